// What a block of the attention backward has to do, and in which order.
#pragma once
#include "attention/backward.cuh"

#ifndef CAUSAL
#define CAUSAL 0
#endif
// 1: key tiles add to dQ in their order, so that every run gives the same bits.
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
// Blocks of a cluster that share the query tiles of one block of keys, and add up dK and dV at the end: for calls of few blocks.
#ifndef SPLITS
#define SPLITS 1
#endif

namespace {

constexpr int kSplits = SPLITS;

// What a block owns.
struct Work {
  Sequence sequence;
  int kv_head, key_tile;
  int q_batch, q_slot;  // of `tile_index`: where the sequence's query tiles are
  int first, tiles;  // query tiles that see its keys, for each head of the group
  int begin, total;  // of all heads' tiles, those that this block walks
  bool by_rows;      // the heads of the group in turn, tile by tile of queries
  bool backwards;    // from the last queries on
  int first_head;    // of the group, at each tile
#if VARLEN
  int k_rows;        // to the next sequence
#endif
};
// One of `kSplits` parts of what block `index` of keys has to do. Sections of KV heads; in a section the longest first, heads innermost.
__device__ __forceinline__ Work decode(const Backward& p, int index, int rank) {
  Work w;
#if VARLEN
  const int number = __shfl_sync(~0u, index / p.heads_kv, 0);
  w.kv_head = index - number * p.heads_kv;
  const Slot slot = slot_at(p.sequences.k_starts, p.sequences.count, p.batch * p.len_k, kKeys, number);
  const int run = slot.sequence;
  w.key_tile = slot.tile;
  w.sequence = sequence_of(p, slot.sequence);
  w.k_rows = rows_to_next(p.sequences.k_starts, p.sequences.count, p.batch * p.len_k, slot.sequence);
  w.q_batch = 0, w.q_slot = first_slot(p.sequences.q_starts, p.batch * p.len_q, slot.sequence, kRows);
#else
  const int key_tiles = ceil_div(p.len_k, kKeys), units = p.batch * p.heads_kv;
  const int per_section = p.section * key_tiles, s = index / per_section, run = s;
  index -= s * per_section;
  const int width = min(p.section, units - s * p.section);
  // NOTES: through a shuffle the assembler knows it uniform.
  w.key_tile = __shfl_sync(~0u, index / width, 0);
  const int unit = s * p.section + index - w.key_tile * width, batch = unit / p.heads_kv;
  w.kv_head = unit - batch * p.heads_kv;
  w.sequence = sequence_of(p, batch);
  w.q_batch = batch, w.q_slot = 0;
#endif
  const int key = w.key_tile * kKeys;
#if VARLEN || WINDOW
  const Sequence& q = w.sequence;
  const int sees_last = WINDOW ? min(key + kKeys, q.len_k) - 1 - q.diagonal + p.window_left : q.len_q - 1;
  const int end = key < q.len_k && sees_last >= 0 ? min(ceil_div(q.len_q, kRows), sees_last / kRows + 1) : 0;
  w.first = max(0, key - q.diagonal - p.window_right) / kRows;
  w.tiles = max(0, end - w.first);
#else
  w.first = CAUSAL ? max(0, key - p.diagonal) / kRows : 0;
  w.tiles = max(0, p.q_tiles - w.first);
#endif
  // Blocks of a large group's KV head would each be at another head, and what they add to and read would not fit the L2 cache. So
  // they meet at the same queries, heads in turn: where they begin together, from the last queries back; where they begin as others
  // end, from the first on; in causal calls these take turns. Each begins with another head, so that few add to one tile of dQ at a
  // time. Deterministic calls add in the order of the keys.
  const int heads = p.heads_q / p.heads_kv;
  w.by_rows = DETERMINISTIC || (CAUSAL && heads >= 8);
  w.backwards = DETERMINISTIC || run % 2 == 0;
  w.first_head = DETERMINISTIC ? 0 : w.key_tile % heads;
  const int all = w.tiles * (p.heads_q / p.heads_kv);
  w.begin = all / kSplits * rank + min(rank, all % kSplits);
  w.total = all / kSplits + (rank < all % kSplits);
  return w;
}

// The first block of keys that a tile of queries sees.
__device__ __forceinline__ int first_key_tile(const Backward& p, const Sequence& s, int m) {
  return WINDOW ? max(0, m * kRows + s.diagonal - p.window_left) / kKeys : 0;
}
__device__ __forceinline__ int tile_end(const Backward& p, const Work& w) { return kFeatures ? w.first + w.tiles : p.q_tiles; }

// A walk over a block's tiles: head by head, from the first queries that see its keys on, or `by_rows`.
struct Place {
  int m, head;  // of the group
  __device__ __forceinline__ Place(const Backward& p, const Work& w) {
    const int inner = w.by_rows ? p.heads_q / p.heads_kv : max(1, w.tiles), outer = w.begin / inner, at = w.begin - outer * inner;
    if (w.by_rows) head = (at + w.first_head) % inner, m = w.backwards ? tile_end(p, w) - 1 - outer : w.first + outer;
    else head = outer, m = w.first + at;
  }
  __device__ __forceinline__ void advance(const Backward& p, const Work& w) {
    if (w.by_rows) {
      if (++head == p.heads_q / p.heads_kv) head = 0;
      if (head == w.first_head) m += w.backwards ? -1 : 1;
    } else if (++m == tile_end(p, w)) {
      m = w.first, head++;
    }
  }
};

}  // namespace
