// Schedule of whole tiles: 64 rows of one head per consumer, all of its keys. Tiles go section by section of heads whose keys
// and values share the L2 cache; in a section the longest rows first, heads innermost.
#pragma once
#include "attention/scheduler.cuh"

namespace {

struct Tile {
  int batch, head, row, key_tiles;
};
struct alignas(16) WorkItem : OwnRows {
  Tile tile;
  float logit_scale;    // softmax scale times the descales of Q and K
  float v_descale;
  float o_quant_scale;  // 1 / descale of an E4M3 output
  int first_key_tile;   // with windows
};
static_assert(sizeof(WorkItem) == kWorkBytes, "shared-memory slots");

struct Row {
  int position, head;
  bool exists;
};
__device__ __forceinline__ Row row_of(const Params&, int i) { return {i, 0, true}; }
__device__ __forceinline__ int first_key_tile(const WorkItem& item) { return kWindow ? load_uniform(item.first_key_tile) : 0; }
// Of a causal call.
__device__ __forceinline__ int last_visible_key(const Params& p, Lengths length, int row) {
  return last_visible(length, row, kWindow ? p.window_right : 0);
}

// Tile `index`, as the first consumer of a block sees it, with the first of its tiles of keys.
__device__ __forceinline__ Tile decode(const Params& p, int index, int row_blocks, int& first, OwnRows& own) {
  const int per_section = p.section * row_blocks;
  const int s = index / per_section;
  index -= s * per_section;
  const int width = min(p.section, p.units - s * p.section);
  int block = index / width;
  const int unit = s * p.section + index - block * width;
  first = 0;
  if constexpr (kVarlen) {
    const ScheduledTile& tile = p.schedule->tiles[block];
    own = tile.sequence;
    first = tile.first_key_tile;
    return {tile.batch, unit * (p.pack_gqa ? kConsumers : 1), tile.row, tile.key_tiles};
  }
  if constexpr (kCausal) block = p.row_blocks - 1 - block;
  const int per_batch = p.units / p.batch;
  const int rows = p.pack_gqa ? kRows : kRows * kConsumers;
  Tile t;
  t.batch = unit / per_batch;
  t.head = (unit - t.batch * per_batch) * (p.pack_gqa ? kConsumers : 1);
  t.row = block * rows;
  if constexpr (kWindow) {
    const KeyTiles keys = visible_tiles({p.len_q, p.len_k}, t.row, t.row + rows, p.window_left, p.window_right, kBlockN);
    first = keys.first, t.key_tiles = keys.count;
    return t;
  }
  int keys = p.len_k;
  if constexpr (kCausal) keys = max(0, min(keys, min(t.row + rows, p.len_q) + p.len_k - p.len_q));
  t.key_tiles = ceil_div(keys, kBlockN);
  return t;
}

__device__ __forceinline__ void produce(const Params& p, const Pipeline& pipeline, WorkItem* work, const TensorMap& map_q,
                                        const TensorMap& map_k, const TensorMap& map_v, int) {
  const int row_blocks = kVarlen ? p.schedule->count : p.row_blocks;
  const int tiles = p.units * row_blocks;
  Ring<kQStages> q;
  // NOTES: K and V keep step, so that one ring would do. Where registers are short it does; elsewhere the code with two is
  // what was measured.
  Ring<kKvStages> k, own_v;
  Ring<kKvStages>& v = kShortProducer ? k : own_v;
  const int group_size = p.heads_q / p.heads_kv;
  int index = blockIdx.x;
  while (true) {
    const bool alive = index < tiles;
    const int next = !alive ? 0 : (int)(atomicAdd(p.counter, 1) + gridDim.x);
    // NOTES: an empty schedule has no tile 0.
    Tile t = {0, 0, 0, -1};
    int first = 0;
    OwnRows own = {};
    if (!kVarlen || alive) t = decode(p, alive ? index : 0, row_blocks, first, own);
    const int head = kShortProducer ? (u32)t.head * p.heads_kv / p.heads_q : t.head / group_size;

    // Hand out the work item, and load its queries
    WorkItem item;
    static_cast<OwnRows&>(item) = own;
    item.tile = t;
    if (kWindow) item.first_key_tile = first;
    if (!alive) item.tile.key_tiles = -1;
    item.logit_scale = logit_scale(p.softmax_scale, p.q_descale[t.batch * p.q_descale_batch + head * p.q_descale_head],
                                   p.k_descale[t.batch * p.k_descale_batch + head * p.k_descale_head]);
    item.v_descale = p.v_descale[t.batch * p.v_descale_batch + head * p.v_descale_head];
    if constexpr (kOutE4m3) item.o_quant_scale = 1.0f / p.o_descale[t.batch * p.o_descale_batch + head * p.o_descale_head];
#pragma unroll (kSmallProducer ? 1 : kConsumers)  // NOTES: copies of this loop and of the next cost registers
    for (int w = 0; w < kConsumers; w++) {
      ptx::mbarrier_wait_uniform(pipeline.q_empty(q.index, w), q.parity ^ 1);
      work[q.index * kConsumers + w] = item;
      if (alive) {
        ptx::mbarrier_arrive_expect_tx(pipeline.q_full(q.index, w), kQBytes);
        load_queries(pipeline.q(q.index, w), map_q, pipeline.q_full(q.index, w), item.tile.head, own.q_row + item.tile.row, t.batch);
      } else {
        ptx::mbarrier_arrive(pipeline.q_full(q.index, w));
      }
      if (p.pack_gqa) item.tile.head++; else item.tile.row += kRows;
    }
    if (!alive) break;
    q.advance();

#pragma unroll (kSmallProducer ? 1 : 4)
    for (int n = first + t.key_tiles - 1; n >= first; n--)
      load_kv(pipeline, map_k, map_v, k, v, n, head, t.batch, p.heads_kv, own);
    index = next;
  }
  reset_counter(p.counter);
}

}  // namespace
