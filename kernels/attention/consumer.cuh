// A consumer warpgroup: its position in the pipeline, the work item at hand, and what a thread accumulates of it. The
// mainloops (mainloop_*.cuh) drive it; the epilogue (epilogue.cuh) writes its result.
#pragma once
#include "attention/scheduler.cuh"
#include "attention/softmax.cuh"
#include "ptx/wgmma.cuh"

namespace {

using LogitMma = ptx::Wgmma<ptx::Operand::E4m3, kBlockN>;
constexpr ptx::Swizzle kSwizzle = kRun == 128 ? ptx::Swizzle::B128 : ptx::Swizzle::B64;

// A thread's row (of the first of its two) in the warpgroup and its place in a quad.
// NOTES: read anew at each use; kept, the two would cost registers that the mainloop needs.
struct Place {
  int row, quad;
};
__device__ __forceinline__ Place place() {
  const u32 i = ptx::thread_index();
  return {(int)(i % 128 / 32 * 16 + i % 32 / 4), (int)(i % 4)};
}

// Issues S = Q K^T of one tile.
__device__ __forceinline__ void issue_qk(float (&s)[kBlockN / 2], u64 q, u64 k) {
  ptx::wgmma_fence();
  LogitMma::ss_overwrite(s, q, k);
#pragma unroll
  for (int i = 1; i < kDim / 32; i++) {
    const int run = 32 * i / kRun, column = 32 * i % kRun;
    LogitMma::ss(s, ptx::wgmma_advance(q, run * kQRun + column), ptx::wgmma_advance(k, run * kKeyRun + column), 1);
  }
  ptx::wgmma_commit();
}
// Issues O += P V, or O = P V where `fresh`.
template <Pv Mode = kPv>
__device__ __forceinline__ void issue_pv(float (&o)[kValueDim / 2], const u32 (&p)[kPRegisters], u64 v, bool fresh) {
  using Mma = ptx::Wgmma<Mode == Pv::F16 ? ptx::Operand::F16 : ptx::Operand::E4m3, kValueDim>;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlockN / kPvStep; i++) {
    const u64 keys = ptx::wgmma_advance(v, kPvRow * kPvStep * i);
    if constexpr (Mode == Pv::F16) Mma::template rs<true>(o, &p[4 * i], keys, i != 0 || !fresh);
    else if (Mode == Pv::Promote && i == 0) Mma::rs_overwrite(o, p, keys);
    else Mma::rs(o, &p[4 * i], keys, i != 0 || !fresh);
  }
  ptx::wgmma_commit();
}

// Issues part = P V of one slice of columns. `again`: part had another slice, which was added to O.
// NOTES: that slice is an operand that is multiplied by zero, which keeps the sum in its registers. Otherwise the assembler takes
// others, which there are not, and adds the old slice to O after the product has begun.
__device__ __forceinline__ void issue_pv_slice(float (&part)[kSlice / 2], const u32 (&p)[kPRegisters], u64 v, int slice, bool again) {
  using Mma = ptx::Wgmma<ptx::Operand::E4m3, kSlice>;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlockN / kPvStep; i++) {
    const u64 keys = ptx::wgmma_advance(v, kPvRow * kPvStep * i + 16 * kSlice * slice);
    if (i == 0 && !again) Mma::rs_overwrite(part, p, keys);
    else Mma::rs(part, &p[4 * i], keys, i == 0 ? ptx::opaque_zero() : 1);
  }
  ptx::wgmma_commit();
}

// Queries that have arrived, and what the loop over their keys needs of the work item.
struct QueryTile {
  int key_tiles, row, first_key_tile;
  u64 q;  // descriptor
  u32 item;
  float to_caps;  // logit times this is in units of the soft-cap
};

// Tiles of keys, counted from the item's first, that need no mask: those after it have keys past some row's last, those before it (with
// windows) keys before some row's first.
struct Unmasked {
  int first, end;
  __device__ __forceinline__ bool hides(int n) const { return n >= end || (kWindow && n < first); }
};

struct Consumer {
  const Params& params;
  Pipeline pipeline;
  u8* shared;            // `pipeline.base`
  const WorkItem* work;
  const bool leader;     // of the warp
  u32 item, kv;          // work items and key tiles consumed so far: the places in the rings
  u64 desc_k, desc_v;
  // The accumulation of one work item. NOTES: arrays are references, since the compiler takes a struct that holds arrays apart
  // only after it has unrolled the loops over them.
  float (&o)[kValueDim / 2];
  u32 (&p)[kPRegisters];  // operand registers
  RowState& rows;
  float scale, to_units;  // P = 2^(scale logit); E4M3 logits: logit times `to_units` is in units of the descale
  bool fresh, flushed;    // O starts at the next product; part of it lies in shared memory
  int tail = kBlockN;     // keys of the next tile of values that exist, where they lie in pages

  __device__ __forceinline__ Consumer(const Params& params, const Pipeline& pipeline, u8* shared, const WorkItem* work,
                                      float (&o)[kValueDim / 2], u32 (&p)[kPRegisters], RowState& rows)
      : params(params), pipeline(pipeline), shared(shared), work(work), leader(threadIdx.x % 32 == 0), item(0), kv(0), o(o), p(p),
        rows(rows) {
    const u32 base = uniform(pipeline.base);
    desc_k = ptx::wgmma_descriptor(base + kOffsetK, 16, 8 * kRun, kSwizzle);
    // Core matrices of V: dims 128 bytes apart, groups of 16 keys 16 * kValueDim bytes apart. In F16: rows of 64 dims, which the
    // product takes transposed
    desc_v = kPv == Pv::F16 ? ptx::wgmma_descriptor(base + kOffsetV, kValueRun, 8 * 128, ptx::Swizzle::B128)
                            : ptx::wgmma_descriptor(base + kOffsetV, 16 * kValueDim, 128, ptx::Swizzle::None);
  }

  // NOTES: read anew at each use, as `place` is.
  __device__ __forceinline__ u32 warpgroup() const { return ptx::thread_index() / 128; }
  __device__ __forceinline__ float4* flushed_o() const {
    return reinterpret_cast<float4*>(shared + kOffsetO) + warpgroup() * kRows * kValueDim / 4 + ptx::thread_index() % 128;
  }
  __device__ __forceinline__ const WorkItem& slot(u32 i) const { return work[i % kQStages * kConsumers + warpgroup()]; }

  // Key tile t of the pipeline.
  __device__ __forceinline__ u32 k_full(u32 t) const { return pipeline.k_full(t % kKvStages); }
  __device__ __forceinline__ u32 v_full(u32 t) const { return pipeline.v_full(t % kKvStages); }
  __device__ __forceinline__ u32 parity(u32 t) const { return t / kKvStages & 1; }
  __device__ __forceinline__ void release_k(u32 t) const {
    if (EVERY_LANE || leader) ptx::mbarrier_arrive(pipeline.k_empty(t % kKvStages));
  }
  __device__ __forceinline__ void release_v(u32 t) const {
    if (EVERY_LANE || leader) ptx::mbarrier_arrive(pipeline.v_empty(t % kKvStages));
  }
  __device__ __forceinline__ u64 k(u32 t) const { return ptx::wgmma_advance(desc_k, t % kKvStages * kTileBytes); }
  __device__ __forceinline__ u64 v(u32 t) const { return ptx::wgmma_advance(desc_v, t % kKvStages * kValueBytes); }

  // Waits for the queries of work item i. It keeps its slot until `release_item`.
  __device__ __forceinline__ QueryTile acquire(u32 i) const {
    ptx::mbarrier_wait_uniform(pipeline.q_full(i % kQStages, warpgroup()), i / kQStages & 1);
    const u32 at = uniform(pipeline.q(i % kQStages, warpgroup()));
    int first = 0;
    if constexpr (kSplitKv || kWindow) first = first_key_tile(slot(i));
    float to_caps = 0.0f;
    if constexpr (kSoftCap) to_caps = load_uniform(slot(i).logit_scale) / params.soft_cap;
    return {load_uniform(slot(i).tile.key_tiles), load_uniform(slot(i).tile.row), first,
            ptx::wgmma_descriptor(at, 16, 8 * kRun, kSwizzle), i, to_caps};
  }
  // Queries and keys of work item i.
  __device__ __forceinline__ Lengths item_lengths(u32 i) const {
#if PAGED
    return {load_uniform(slot(i).queries), load_uniform(slot(i).keys)};
#else
    if constexpr (kVarlen) return {load_uniform(slot(i).len_q), load_uniform(slot(i).len_k)};
    return lengths(params, slot(i));
#endif
  }
  // Sets values of keys that do not exist to zero in tile t, which has arrived, before a product meets them.
  __device__ __forceinline__ void clear_tail(u32 t) {
#if PAGED
    if (tail < kBlockN) clear_past_keys(pipeline.v(t % kKvStages), tail, params.active_consumers);
    tail = kBlockN;
#endif
  }
  // The mask (mask_logits.cuh).
  __device__ __forceinline__ Unmasked unmasked_tiles(const QueryTile& tile) const;
  __device__ __forceinline__ int last_key(const QueryTile& tile, int n, int r) const;
  __device__ __forceinline__ int first_key(const QueryTile& tile, int n, int r) const;
  template <bool Min>
  __device__ __forceinline__ void mask_tile(const QueryTile& tile, const Unmasked& open, float (&s)[kBlockN / 2], int n, float (&low)[2]);
  __device__ __forceinline__ void mask_and_scan(const QueryTile& tile, const Unmasked& open, float (&s)[kBlockN / 2], int n, bool masked,
                                                float (&top)[2], float (&low)[2]);
  // The rounding of logits to E4M3 (logits_e4m3.cuh).
  __device__ __forceinline__ void round_logits(const QueryTile& tile, const Unmasked& open, float (&s)[kBlockN / 2], int n, bool masked,
                                               float (&top)[2], float (&low)[2]);
  // A count of tiles. NOTES: with windows there are more of them than registers, unless the assembler knows that they are uniform.
  __device__ __forceinline__ static int count(int tiles) { return kWindow ? uniform(tiles) : tiles; }
  // Releases the first tiles of an item, which only later rows of the block see.
  __device__ __forceinline__ void skip_hidden_tiles(const QueryTile& tile) {
    const Lengths length = item_lengths(tile.item);
    int visible = ceil_div(min(length.k, last_visible_key(params, length, tile.row + kRows)), kBlockN);
    visible = max(1, kWindow ? visible - tile.first_key_tile : visible);
    for (int n = tile.key_tiles; n > visible; n--, kv++) {
      ptx::mbarrier_wait_uniform(k_full(kv), parity(kv));
      release_k(kv);
      ptx::mbarrier_wait_uniform(v_full(kv), parity(kv));
      release_v(kv);
    }
  }

  // Starts the accumulation of the current work item.
  __device__ __forceinline__ void begin() {
    rows = {{kLowest, kLowest}, {0.0f, 0.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {-kLowest, -kLowest}, {kLowest, kLowest}, 0, 0};
    fresh = true, flushed = false;
    if (kPv == Pv::Promote) clear_o();
    if constexpr (kSplitKv || kTelemetry) {
      // NOTES: otherwise a row that does not exist, whose logits are zeros, would keep its warp from integer order.
      const int first_row = load_uniform(slot(item).tile.row), queries = item_lengths(item).q;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Row at = row_of(params, place().row + 8 * r);
        if (!at.exists || first_row + at.position >= queries)
          rows.row_max[r] = rows.raw_max[r] = 0.0f, rows.row_min[r] = -1.0f;
      }
    }
#if PAGED
    tail = load_uniform(slot(item).last_tile_keys);
#endif
    float logit_scale = load_uniform(slot(item).logit_scale);
    if constexpr (kSoftCap) logit_scale = params.soft_cap;
    if constexpr (kLogitsE4m3) {
      const float logit_descale = checked_scale(params.logit_descale[load_uniform(slot(item).tile.head)]);
      to_units = logit_scale / logit_descale, scale = logit_descale * kLog2e;
    } else {
      scale = logit_scale * kLog2e;
    }
  }
  // Adds O to the f32 accumulator in shared memory.
  __device__ __forceinline__ void flush_o() {
    flush<true>(o, flushed_o(), rows.flush_rescale, !flushed);
    rows.flush_rescale[0] = rows.flush_rescale[1] = 1.0f;
    fresh = flushed = true;
  }
  __device__ __forceinline__ void clear_o() {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; i++) o[i] = 0.0f;
  }
};

}  // namespace
