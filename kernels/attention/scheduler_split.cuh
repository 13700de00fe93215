// Schedule of split tiles, for calls with few query rows such as decoding. A consumer's 64 rows are positions and heads of
// one GQA group, heads innermost, which share keys; the keys are split over blocks, and combine.cu joins the splits. A
// single split writes the output itself.
#pragma once
#include "attention/scheduler.cuh"

namespace {

struct Tile {
  int batch, head, row, key_tiles;
  int first_key_tile, split;
};
struct alignas(16) WorkItem : OwnRows {
  Tile tile;
  float logit_scale;  // softmax scale times the descales of Q and K
  float v_descale;    // 1 where splits are joined: the combine kernel multiplies
};
static_assert(sizeof(WorkItem) == kWorkBytes, "shared-memory slots");

struct Row {
  int position, head;
  bool exists;  // 64 need not be a multiple of `tile_heads`
};
__device__ __forceinline__ Row row_of(const Params& p, int i) {
  const int position = i * p.tile_heads_reciprocal >> 16;
  return {position, i - position * p.tile_heads, position < p.positions};
}
// Whether a tile is one of several splits, and where its row then lies in the partial results, in rows.
__device__ __forceinline__ int splits_of(const Params& p, const OwnRows& own) { return kVarlen ? own.splits : p.splits; }
// Whether an item has a part of the keys only, and where a row of it lies in the partial results, in rows.
__device__ __forceinline__ bool is_part(const Params& p, const WorkItem& item) { return splits_of(p, item) > 1; }
__device__ __forceinline__ i64 partial_row(const Params& p, const WorkItem& item, int position, int head) {
  const Tile& t = item.tile;
  return (((i64)t.split * p.batch + t.batch) * p.len_q + item.q_row + position) * p.heads_q + head;
}
__device__ __forceinline__ int first_key_tile(const WorkItem& item) { return load_uniform(item.tile.first_key_tile); }
__device__ __forceinline__ int last_visible_key(const Params& p, Lengths length, int row) {
  if constexpr (kWindow) return last_visible(length, row, p.window_right);
  else return row + p.causal_offset;
}

// Tile `index`, as the first consumer of a block sees it: neighbours share keys.
__device__ __forceinline__ Tile decode(const Params& p, int index, OwnRows& own) {
  Tile t;
  if constexpr (kVarlen) {
    const int entry = index / p.units;
    const ScheduledTile& tile = p.schedule->tiles[entry];
    own = tile.sequence;
    t.batch = tile.batch, t.head = (index - entry * p.units) * p.tile_heads, t.row = tile.row;
    t.first_key_tile = tile.first_key_tile, t.key_tiles = tile.key_tiles, t.split = tile.split;
    return t;
  }
  int block = 0;
  if (p.row_blocks > 1) block = index % p.row_blocks, index /= p.row_blocks;  // NOTES: divisions delay the first copies
  const int unit = index / p.splits, rows = p.positions * p.active_consumers;
  t.split = index - unit * p.splits;
  t.batch = unit / p.units_per_batch;
  t.head = (unit - t.batch * p.units_per_batch) * p.tile_heads;
  t.row = block * rows;
  const int keys = max(0, min(p.len_k, min(t.row + rows, p.len_q) + p.causal_offset));
  int key_tiles = ceil_div(keys, kBlockN), first = 0;
  if constexpr (kWindow) {
    const KeyTiles seen = visible_tiles({p.len_q, p.len_k}, t.row, t.row + rows, p.window_left, p.window_right, kBlockN);
    key_tiles = seen.count, first = seen.first;
  }
  const int share = key_tiles / p.splits, longer = key_tiles - share * p.splits;  // so many splits have one tile more
  t.first_key_tile = first + t.split * share + min(t.split, longer);
  t.key_tiles = share + (t.split < longer);
  return t;
}

__device__ __forceinline__ void produce(const Params& p, const Pipeline& pipeline, WorkItem* work, const TensorMap& map_q,
                                        const TensorMap& map_k, const TensorMap& map_v, int consumers) {
  // Tiles of keys that are loaded before the work item is scheduled. NOTES: consumers keep the last values of an item until they have
  // the next item, so one stage cannot be counted on: with two, a second tile would wait for it forever.
  constexpr int kEager = kKvStages > 2 ? 2 : 1;
  const int tiles = kVarlen ? p.units * p.schedule->count : p.units * p.row_blocks * p.splits;
  Ring<kQStages> q;
  // NOTES: K and V keep step, so that one ring would do. Where registers are short it does; elsewhere the code with two is
  // what was measured.
  Ring<kKvStages> k, own_v;
  Ring<kKvStages>& v = kShortProducer ? k : own_v;
  const int group_size = p.heads_q / p.heads_kv;
  int index = blockIdx.x;
  while (true) {
    const bool alive = index < tiles;
    // NOTES: where every block has one item, the counter would be a trip to memory for nothing.
    const int next = !alive ? 0 : tiles <= gridDim.x ? tiles : (int)(atomicAdd(p.counter, 1) + gridDim.x);
    // NOTES: an empty schedule has no tile 0.
    Tile t = {};
    OwnRows own = {};
    if (!kVarlen || alive) t = decode(p, alive ? index : 0, own);
    const int head = kShortProducer ? (u32)t.head * p.heads_kv / p.heads_q : t.head / group_size;

    // Read the descales first and use them last: the first copies go out in between. Few copies: consumers release the last
    // tile of an item only when they have the next item
    const float q_descale = p.q_descale[t.batch * p.q_descale_batch + head * p.q_descale_head];
    const float k_descale = p.k_descale[t.batch * p.k_descale_batch + head * p.k_descale_head];
    const int query_bytes = p.positions * p.tile_heads * kRuns * kRun, first = t.first_key_tile;
    int n = first + t.key_tiles - 1;
#pragma unroll 1
    for (int w = 0; w < consumers; w++) {
      ptx::mbarrier_wait_uniform(pipeline.q_empty(q.index, w), q.parity ^ 1);
      if (alive) {
        ptx::mbarrier_expect_tx(pipeline.q_full(q.index, w), query_bytes);
        load_queries(pipeline.q(q.index, w), map_q, pipeline.q_full(q.index, w), t.head, own.q_row + t.row + w * p.positions, t.batch);
      }
    }
#pragma unroll 1
    for (int i = 0; alive && i < kEager && n >= first; i++, n--)
      load_kv(pipeline, map_k, map_v, k, v, n, head, t.batch, p.heads_kv, own);

    // Hand out the work item
    WorkItem item;
    static_cast<OwnRows&>(item) = own;
    item.tile = t;
    if (!alive) item.tile.key_tiles = -1;
    item.logit_scale = logit_scale(p.softmax_scale, q_descale, k_descale);
    item.v_descale = splits_of(p, own) == 1 ? p.v_descale[t.batch * p.v_descale_batch + head * p.v_descale_head] : 1.0f;
#pragma unroll 1
    for (int w = 0; w < consumers; w++) {
      work[q.index * kConsumers + w] = item;
      ptx::mbarrier_arrive(pipeline.q_full(q.index, w));
      item.tile.row += p.positions;
    }
    if (!alive) break;
    q.advance();

#pragma unroll 1
    for (; n >= first; n--) load_kv(pipeline, map_k, map_v, k, v, n, head, t.batch, p.heads_kv, own);
    index = next;
  }
  if (tiles > gridDim.x) reset_counter(p.counter);
}

}  // namespace
