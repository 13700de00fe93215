// Tiles of a call whose sequences have unequal lengths: a list in the workspace, those with most keys first. One block of the cast
// makes it (cast_qkv.cu) and the producer of the attention walks it, so that lengths may change between replays of a graph.
//
// A call with few query rows splits the keys of its sequences into parts (scheduler_split.cuh). How many each has is decided here,
// from the lengths alone: the device and the order of arrival change nothing.
#pragma once
#include "attention/mask.cuh"
#include "attention/sequences.cuh"

// Multiprocessors that lists of tiles are made for: not those of the device, since results must not depend on them. The host tells
// the cast, which makes the lists (src/device/attention/tile.rs).
#ifndef PROCESSORS
#define PROCESSORS 0
#endif

// What a tile needs of its sequence.
struct SequenceRows {
  int q_row, len_q;        // first query, in its entry of the batch
  int k_row, len_k;
  int value_tile;          // its first tile in the layout of V
  int splits;              // parts of its keys
};
struct alignas(16) ScheduledTile {
  SequenceRows sequence;
  int batch, row;          // row: first of the tile, in the sequence
  int first_key_tile, key_tiles, split;
  int unused[5];
};
struct alignas(16) Schedule {
  int count;
  int unused[15];
  ScheduledTile tiles[1];  // `count` of them
};
static_assert(sizeof(ScheduledTile) == 64 && sizeof(Schedule) == 128, "the host writes this layout");

struct ScheduleParams {
  Schedule* schedule;
  int* sequence_splits;    // [sequences]
  Sequences sequences;
  int rows_q, rows_k;      // of the axes
  int len_q, len_k;        // of an entry of the batch
  int window_left, window_right;
  int tile_rows, tile_keys;
  int units;               // tiles of heads for each tile of rows
  int capacity;            // tiles that the list has room for
  int most_splits;
  int item_time, key_tile_time, combine_time;  // tenths of a microsecond
};
static_assert(sizeof(ScheduleParams) == 16 + 40 + 14 * 4, "the host writes this layout");

namespace {

constexpr int kScheduleBins = 256;
constexpr int kProcessors = PROCESSORS > 0 ? PROCESSORS : 1;

// The rows of sequence s. Lists that break their rules give wrong rows, but none outside of the tensors.
__device__ __forceinline__ SequenceRows rows_of(const ScheduleParams& p, int s) {
  const Sequences& all = p.sequences;
  const int q = min(max(all.q_starts[s], 0), p.rows_q), k = min(max(all.k_starts[s], 0), p.rows_k);
  SequenceRows rows = {};
  rows.q_row = q % p.len_q;
  rows.len_q = max(0, min(all.q_ends[s], min(p.rows_q, q - rows.q_row + p.len_q)) - q);
  rows.k_row = k % p.len_k;
  rows.len_k = max(0, min(all.k_ends[s], min(p.rows_k, k - rows.k_row + p.len_k)) - k);
  rows.value_tile = value_tile(k, s);
  return rows;
}
__device__ __forceinline__ KeyTiles key_tiles_of(const ScheduleParams& p, const SequenceRows& rows, int row) {
  return visible_tiles({rows.len_q, rows.len_k}, row, row + p.tile_rows, p.window_left, p.window_right, p.tile_keys);
}
// Tiles of rows of a sequence, and tiles of keys that the last of them sees.
__device__ __forceinline__ int row_tiles(const ScheduleParams& p, const SequenceRows& rows) { return ceil_div(rows.len_q, p.tile_rows); }
__device__ __forceinline__ int last_key_tiles(const ScheduleParams& p, const SequenceRows& rows) {
  return rows.len_q == 0 ? 0 : key_tiles_of(p, rows, (row_tiles(p, rows) - 1) * p.tile_rows).count;
}

// Calls `visit` with every tile; `part`: tiles of keys that a part has at most. A warp takes a sequence, a lane a tile.
template <class Visit> __device__ __forceinline__ void each_tile(const ScheduleParams& p, int part, Visit visit) {
  const int lane = threadIdx.x % 32;
  for (int s = threadIdx.x / 32; s < p.sequences.count; s += blockDim.x / 32) {
    ScheduledTile tile = {};
    tile.sequence = rows_of(p, s);
    tile.batch = min(max(p.sequences.q_starts[s], 0), p.rows_q - 1) / p.len_q;
    const int splits = tile.sequence.splits = max(1, ceil_div(last_key_tiles(p, tile.sequence), part));
    if (lane == 0) p.sequence_splits[s] = splits;
    const int tiles = row_tiles(p, tile.sequence) * splits;
    for (int i = lane; i < tiles; i += 32) {
      tile.row = i / splits * p.tile_rows;
      tile.split = i % splits;
      const KeyTiles keys = key_tiles_of(p, tile.sequence, tile.row);
      const int share = keys.count / splits, longer = keys.count - share * splits;  // so many splits have one tile more
      tile.first_key_tile = keys.first + tile.split * share + min(tile.split, longer);
      tile.key_tiles = share + (tile.split < longer);
      visit(tile);
    }
  }
}

// The tiles of keys of a part for which the call takes least time: items run on all multiprocessors, and the longest of them ends last.
__device__ __forceinline__ int choose_part(const ScheduleParams& p) {
  __shared__ i64 best[32];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const auto sum = [](i64 x) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
  };
  int most = 0;
  i64 work = 0;
  for (int s = lane; s < p.sequences.count; s += 32) {
    const SequenceRows rows = rows_of(p, s);
    const int tiles = last_key_tiles(p, rows);
    most = max(most, tiles);
    work += (i64)row_tiles(p, rows) * tiles;
  }
  most = max(1, __reduce_max_sync(~0u, most));
  work = sum(work) * p.units * p.key_tile_time;
  i64 mine = 1ll << 62;
  for (int parts = 1 + warp; parts <= min(p.most_splits, most); parts += warps) {
    const int part = ceil_div(most, parts);
    i64 items = 0;
    for (int s = lane; s < p.sequences.count; s += 32) {
      const SequenceRows rows = rows_of(p, s);
      items += (i64)row_tiles(p, rows) * max(1, ceil_div(last_key_tiles(p, rows), part));
    }
    items = sum(items) * p.units;
    const i64 one = (i64)part * p.key_tile_time + p.item_time;
    const i64 all = items <= kProcessors ? one : (work + items * p.item_time) / kProcessors + one / 2;
    mine = min(mine, (all + (parts > 1 ? p.combine_time : 0)) << 20 | part);
  }
  if (lane == 0) best[warp] = mine;
  __syncthreads();
  for (int w = 0; w < warps; w++) mine = min(mine, best[w]);
  return (int)(mine & ((1 << 20) - 1));
}

// By one block.
__device__ __forceinline__ void make_schedule(const ScheduleParams& p) {
  __shared__ int bins[kScheduleBins];
  for (int i = threadIdx.x; i < kScheduleBins; i += blockDim.x) bins[i] = 0;
  __syncthreads();
  const int part = p.most_splits > 1 ? choose_part(p) : 1 << 20;
  const int longest = ceil_div(p.len_k, p.tile_keys) + 1;
  const auto bin_of = [&](const ScheduledTile& tile) {
    return kScheduleBins - 1 - (int)((i64)min(tile.key_tiles, longest - 1) * kScheduleBins / longest);
  };

  // Count the tiles of each bin, and where it starts
  each_tile(p, part, [&](const ScheduledTile& tile) { atomicAdd(&bins[bin_of(tile)], 1); });
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kMine = kScheduleBins / 32;
    int* mine = bins + kMine * threadIdx.x;
    int total = 0;
    for (int i = 0; i < kMine; i++) total += mine[i];
    int start = total;
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, start, d);
      if (threadIdx.x >= d) start += before;
    }
    if (threadIdx.x == 31) p.schedule->count = min(start, p.capacity);
    start -= total;
    for (int i = 0; i < kMine; i++) {
      const int count = mine[i];
      mine[i] = start;
      start += count;
    }
  }
  __syncthreads();
  each_tile(p, part, [&](const ScheduledTile& tile) {
    const int at = atomicAdd(&bins[bin_of(tile)], 1);
    if (at < p.capacity) p.schedule->tiles[at] = tile;
  });
}

}  // namespace
