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
struct alignas(16) WorkItem {
  Tile tile;
  float logit_scale;  // softmax scale times the descales of Q and K
  float v_descale;    // 1 where splits are joined: the combine kernel multiplies
};
static_assert(sizeof(WorkItem) == 32, "shared-memory slots");

struct Row {
  int position, head;
  bool exists;  // 64 need not be a multiple of `tile_heads`
};
__device__ __forceinline__ Row row_of(const Params& p, int i) {
  const int position = i * p.tile_heads_reciprocal >> 16;
  return {position, i - position * p.tile_heads, position < p.positions};
}
__device__ __forceinline__ int first_key_tile(const WorkItem& item) { return load_uniform(item.tile.first_key_tile); }
__device__ __forceinline__ int last_visible_key(const Params& p, int row) { return row + p.causal_offset; }

// Tile `index`, as the first consumer of a block sees it: neighbours share keys.
__device__ __forceinline__ Tile decode(const Params& p, int index) {
  Tile t;
  int block = 0;
  if (p.row_blocks > 1) block = index % p.row_blocks, index /= p.row_blocks;  // NOTES: divisions delay the first copies
  const int unit = index / p.splits, rows = p.positions * p.active_consumers;
  t.split = index - unit * p.splits;
  t.batch = unit / p.units_per_batch;
  t.head = (unit - t.batch * p.units_per_batch) * p.tile_heads;
  t.row = block * rows;
  const int keys = max(0, min(p.len_k, min(t.row + rows, p.len_q) + p.causal_offset)), key_tiles = ceil_div(keys, kBlockN);
  const int share = key_tiles / p.splits, longer = key_tiles - share * p.splits;  // so many splits have one tile more
  t.first_key_tile = t.split * share + min(t.split, longer);
  t.key_tiles = share + (t.split < longer);
  return t;
}

__device__ __forceinline__ void produce(const Params& p, const Pipeline& pipeline, WorkItem* work, const TensorMap& map_q,
                                        const TensorMap& map_k, const TensorMap& map_v, int consumers) {
  constexpr int kEager = 2;  // tiles of keys that are loaded before the work item is handed out
  const int tiles = p.units * p.row_blocks * p.splits;
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
    const Tile t = decode(p, alive ? index : 0);
    const int head = kShortProducer ? (u32)t.head * p.heads_kv / p.heads_q : t.head / group_size;

    // Read the descales first and use them last: the first copies go out in between. Few copies: consumers release the last
    // tile of an item only when they have the next item
    const float q_descale = p.q_descale[t.batch * p.q_descale_batch + head * p.q_descale_head];
    const float k_descale = p.k_descale[t.batch * p.k_descale_batch + head * p.k_descale_head];
    const int query_bytes = p.positions * p.tile_heads * kDim, first = t.first_key_tile;
    int n = first + t.key_tiles - 1;
#pragma unroll 1
    for (int w = 0; w < consumers; w++) {
      ptx::mbarrier_wait_uniform(pipeline.q_empty(q.index, w), q.parity ^ 1);
      if (alive) {
        ptx::mbarrier_expect_tx(pipeline.q_full(q.index, w), query_bytes);
        ptx::tma_load_4d(pipeline.q(q.index, w), &map_q, pipeline.q_full(q.index, w), 0, t.head, t.row + w * p.positions, t.batch);
      }
    }
#pragma unroll 1
    for (int i = 0; alive && i < kEager && n >= first; i++, n--) load_kv(pipeline, map_k, map_v, k, v, n, head, t.batch, p.heads_kv);

    // Hand out the work item
    WorkItem item;
    item.tile = t;
    if (!alive) item.tile.key_tiles = -1;
    item.logit_scale = logit_scale(p.softmax_scale, q_descale, k_descale);
    item.v_descale = p.splits == 1 ? p.v_descale[t.batch * p.v_descale_batch + head * p.v_descale_head] : 1.0f;
#pragma unroll 1
    for (int w = 0; w < consumers; w++) {
      work[q.index * kConsumers + w] = item;
      ptx::mbarrier_arrive(pipeline.q_full(q.index, w));
      item.tile.row += p.positions;
    }
    if (!alive) break;
    q.advance();

#pragma unroll 1
    for (; n >= first; n--) load_kv(pipeline, map_k, map_v, k, v, n, head, t.batch, p.heads_kv);
    index = next;
  }
  if (tiles > gridDim.x) reset_counter(p.counter);
}

}  // namespace
