// Schedule of tiles over a paged KV cache. As in scheduler_split.cuh a consumer's 64 rows are positions and heads of one GQA
// group. Lengths, of keys and of packed queries, are known on the device alone: append.cu cuts the keys of each sequence into parts,
// so that long sequences do not hold up short ones, and leaves the list that this producer goes through.
//
// The producer is a warp: lane i holds entry i of 32 entries of the block table, and one lane copies. A page number that the
// cache does not have reads as zeros: the copy engine knows the cache's extents.
#pragma once
#include "attention/pages.cuh"
#include "attention/scheduler.cuh"
#include "attention/values.cuh"

namespace {

struct Tile {
  int batch, head, row, key_tiles;  // row: counts from the sequence's first query
  int first_key_tile, partial;      // partial: the row of the sequence's first query in the partial results, or -1
};
struct alignas(16) WorkItem {
  Tile tile;
  float logit_scale;   // softmax scale times the descales of Q and K
  float v_descale;     // 1 where parts are joined: the combine kernel multiplies
  int q_row;           // of the sequence's first query in its entry of the batch
  int queries, keys;   // of the sequence
  int last_tile_keys;  // keys of the item's last tile, at most those of a tile
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
__device__ __forceinline__ bool is_part(const Params&, const WorkItem& item) { return item.tile.partial >= 0; }
__device__ __forceinline__ i64 partial_row(const Params& p, const WorkItem& item, int position, int head) {
  return ((i64)item.tile.partial + position) * p.heads_q + head;
}
__device__ __forceinline__ Lengths lengths(const Params&, const WorkItem& item) { return {item.queries, item.keys}; }
__device__ __forceinline__ int last_visible_key(const Params& p, Lengths length, int row) {
  return last_visible(length, row, p.window_right);
}
__device__ __forceinline__ int first_key_tile(const WorkItem& item) { return load_uniform(item.tile.first_key_tile); }

// A work item as the producer takes it from the list.
struct Item {
  int sequence, batch, q_row, queries, keys;
  int first, end;       // key tiles that some row of the block sees
  int first_key;        // the first key that one sees, with windows
  int partial;
  int head, row;        // first head, first row
};

// Entries of the block table: lane i holds entry 32 number + i.
struct Entries {
  int number, page;
  __device__ __forceinline__ void load(const BlockTable& table, const Item& item, int first) {
    number = first / 32;
    const int entry = 32 * number + threadIdx.x % 32;
    page = -1;
    // The cache may have taken back a page that no query sees
    const bool seen = !kWindow || entry >= item.first_key >> table.log2_page_size;
    if (seen && entry < ceil_div(item.keys, 1 << table.log2_page_size)) page = __ldg(table.pages + item.sequence * table.stride + entry);
  }
  // Those of the item's last tile.
  __device__ __forceinline__ void load_last(const BlockTable& table, const Item& item) {
    load(table, item, (max(1, item.end) - 1) * kBlockN >> table.log2_page_size);
  }
};

// Item `index` of the list: blocks of rows of one part and head are neighbours, the longest first.
__device__ __forceinline__ Item item_at(const Params& p, const PagedParams& g, int index) {
  const Part part = g.parts[index / p.units_per_batch];
  const int rows = p.positions * p.active_consumers;
  int unit = index - part.begin * p.units_per_batch, block = 0;
  if (part.blocks > 1) block = unit % part.blocks, unit /= part.blocks;
  Item item;
  item.sequence = part.sequence, item.batch = part.batch, item.q_row = part.row, item.queries = part.queries, item.keys = part.keys;
  item.partial = part.partial, item.head = unit * p.tile_heads, item.row = (part.blocks - 1 - block) * rows;
  const Lengths length = {part.queries, part.keys};
  const int visible = last_visible(length, min(item.row + rows, part.queries) - 1, p.window_right) + 1;
  item.end = min(part.end, ceil_div(max(0, min(part.keys, visible)), kBlockN));
  item.first = part.first, item.first_key = 0;
  if constexpr (kWindow) {
    item.first_key = max(0, first_visible(length, item.row, p.window_left));
    item.first = max(item.first, item.first_key / kBlockN);
  }
  return item;
}

// The copies of one tile: boxes of whole pages, or a box that is part of one.
struct Copies {
  int first, count;  // entries of the block table
  int row;           // of the page, where a page has several tiles
  int bytes;         // of a box

  __device__ __forceinline__ Copies(const BlockTable& table, const Item& item, int n) {
    const int page_size = 1 << table.log2_page_size, key = n * kBlockN, rows = min(page_size, kBlockN);
    first = key >> table.log2_page_size;
    count = ceil_div(min(kBlockN, item.keys - key), rows);
    row = key & (page_size - 1);
    bytes = rows * kDim;
  }
};

// Loads tile n of an item, by a warp.
__device__ __forceinline__ void load_pages(const Pipeline& pipeline, const PagedParams& g, const TensorMap& map_k, const TensorMap& map_v,
                                           Ring<kKvStages>& k, Ring<kVRows ? kStagingStages : kKvStages>& v, u32 staging,
                                           const Item& item, Entries& entries, int n, int head) {
  const bool leader = threadIdx.x % 32 == 0;
  const Copies copies(g.table, item, n);
  if (copies.first / 32 != entries.number) entries.load(g.table, item, copies.first);
  ptx::mbarrier_wait_uniform(pipeline.k_empty(k.index), k.parity ^ 1);
  if (leader) ptx::mbarrier_arrive_expect_tx(pipeline.k_full(k.index), copies.count * copies.bytes);
#pragma unroll 1
  for (int i = 0; i < copies.count; i++) {
    const int page = __shfl_sync(~0u, entries.page, copies.first + i);
    if (leader) ptx::tma_load_4d(pipeline.k(k.index) + i * copies.bytes, &map_k, pipeline.k_full(k.index), 0, head, copies.row, page);
  }
  k.advance();
#if V_ROWS
  const u32 full = staging + kStagingStages * kTileBytes + 16 * v.index, empty = full + 8;
  const u32 to = staging + v.index * kTileBytes;
#else
  const u32 full = pipeline.v_full(v.index), empty = pipeline.v_empty(v.index), to = pipeline.v(v.index);
#endif
  ptx::mbarrier_wait_uniform(empty, v.parity ^ 1);
  if (leader) ptx::mbarrier_arrive_expect_tx(full, copies.count * copies.bytes);
#pragma unroll 1
  for (int i = 0; i < copies.count; i++) {
    const int page = __shfl_sync(~0u, entries.page, copies.first + i);
    if (leader) {
      if constexpr (kVRows) ptx::tma_load_4d(to + i * copies.bytes, &map_v, full, 0, head, copies.row, page);
      else ptx::tma_load_4d(to + i * copies.bytes, &map_v, full, 0, copies.row / 16, head, page);
    }
  }
  v.advance();
}

// Whether a tile follows in staging slot `stage`: written before the arrival of the producer.
__device__ __forceinline__ u32 follows(u32 staging, int stage) {
  return staging + kStagingStages * (kTileBytes + 16) + 4 * stage;
}

// The producer's loop, by a warp. `staging`: where rows of values go, with V_ROWS.
__device__ __forceinline__ void produce_pages(const Params& p, const PagedParams& g, const Pipeline& pipeline, WorkItem* work, u32 staging,
                                              const TensorMap& map_q, const TensorMap& map_k, const TensorMap& map_v) {
  constexpr int kEager = 2;  // tiles of keys that are loaded before the work item is scheduled
  static_assert(kEager < kKvStages, "consumers keep the last values of an item until they have the next item");
  const bool leader = threadIdx.x % 32 == 0;
  const int group_size = p.heads_q / p.heads_kv, consumers = p.active_consumers;
  const int tiles = g.counts->parts * p.units_per_batch;
  Ring<kQStages> q;
  Ring<kKvStages> k;
  Ring<kVRows ? kStagingStages : kKvStages> v;
  // NOTES: the counter, the part and its pages are each a trip to memory. They are taken while the items before are copied
  Item item;
  Entries entries = {};
  int index = blockIdx.x, next = tiles;
  item = item_at(p, g, index);  // the lists have room for one a block
  if (index < tiles) {
    entries.load_last(g.table, item);
    if (tiles > gridDim.x) {
      if (leader) next = atomicAdd(p.counter, 1) + gridDim.x;
      next = __shfl_sync(~0u, next, 0);
    }
  }
  while (index < tiles) {
    Item following = item;
    if (next < tiles) following = item_at(p, g, next);
    int later = tiles;
    if (next < tiles && leader) later = atomicAdd(p.counter, 1) + gridDim.x;
    const int sequence = item.sequence, head = item.head / group_size, first = item.first, key_tiles = max(0, item.end - first);

    // Read the descales first and use them last: the first copies go out in between. Few copies: consumers release the last
    // tile of an item only when they have the next item
    const float q_descale = p.q_descale[sequence * p.q_descale_batch + head * p.q_descale_head];
    const float k_descale = p.k_descale[sequence * p.k_descale_batch + head * p.k_descale_head];
    const float v_descale = item.partial < 0 ? p.v_descale[sequence * p.v_descale_batch + head * p.v_descale_head] : 1.0f;
    int n = first + key_tiles - 1;
#pragma unroll 1
    for (int w = 0; w < consumers; w++) {
      ptx::mbarrier_wait_uniform(pipeline.q_empty(q.index, w), q.parity ^ 1);
      if (leader) {
        ptx::mbarrier_expect_tx(pipeline.q_full(q.index, w), p.positions * p.tile_heads * kDim);
        ptx::tma_load_4d(pipeline.q(q.index, w), &map_q, pipeline.q_full(q.index, w), 0, item.head, item.q_row + item.row + w * p.positions, item.batch);
      }
    }
#pragma unroll 1
    for (int i = 0; i < kEager && n >= first; i++, n--) load_pages(pipeline, g, map_k, map_v, k, v, staging, item, entries, n, head);

    // Hand out the work item
    if (leader) {
      WorkItem out;
      out.tile = {item.batch, item.head, item.row, key_tiles, first, item.partial};
      out.logit_scale = logit_scale(p.softmax_scale, q_descale, k_descale);
      out.v_descale = v_descale;
      out.q_row = item.q_row, out.queries = item.queries, out.keys = item.keys;
      out.last_tile_keys = key_tiles > 0 ? min(kBlockN, item.keys - (first + key_tiles - 1) * kBlockN) : kBlockN;
#pragma unroll 1
      for (int w = 0; w < consumers; w++) {
        work[q.index * kConsumers + w] = out;
        ptx::mbarrier_arrive(pipeline.q_full(q.index, w));
        out.tile.row += p.positions;
      }
    }
    q.advance();

    Entries following_entries = {};
    if (next < tiles) following_entries.load_last(g.table, following);
#pragma unroll 1
    for (; n >= first; n--) load_pages(pipeline, g, map_k, map_v, k, v, staging, item, entries, n, head);
    item = following, entries = following_entries;
    index = next, next = __shfl_sync(~0u, later, 0);
  }

  // No more items
#pragma unroll 1
  for (int w = 0; w < consumers; w++) {
    ptx::mbarrier_wait_uniform(pipeline.q_empty(q.index, w), q.parity ^ 1);
    if (leader) {
      WorkItem out = {};
      out.tile.key_tiles = -1;
      work[q.index * kConsumers + w] = out;
      ptx::mbarrier_arrive(pipeline.q_full(q.index, w));
    }
  }
#if V_ROWS
  const u32 full = staging + kStagingStages * kTileBytes + 16 * v.index;
  ptx::mbarrier_wait_uniform(full + 8, v.parity ^ 1);
  if (leader) {
    ptx::st_shared_u32(follows(staging, v.index), 0);
    ptx::mbarrier_arrive(full);
  }
#endif
  if (leader && tiles > gridDim.x) reset_counter(p.counter);
}

#if V_ROWS
// The loop of the idle warps: rows of values to the layout that the products take.
__device__ __forceinline__ void transpose_pages(const Pipeline& pipeline, u32 staging, int warp) {
  Ring<kStagingStages> from;
  Ring<kKvStages> to;
  while (true) {
    const u32 full = staging + kStagingStages * kTileBytes + 16 * from.index;
    ptx::mbarrier_wait_uniform(full, from.parity);
    if (ptx::ld_shared_u32(follows(staging, from.index)) == 0) break;
    ptx::mbarrier_wait_uniform(pipeline.v_empty(to.index), to.parity ^ 1);
    transpose_values(staging + from.index * kTileBytes, pipeline.v(to.index), warp);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::arrives(threadIdx.x % 32)) {
      ptx::mbarrier_arrive(full + 8);
      ptx::mbarrier_arrive(pipeline.v_full(to.index));
    }
    from.advance(), to.advance();
  }
}
#endif

}  // namespace
