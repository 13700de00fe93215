// A consumer warpgroup: its position in the pipeline, the work item at hand, and what a thread accumulates of it. The
// mainloops (mainloop_*.cuh) drive it; the epilogue (epilogue.cuh) writes its result.
#pragma once
#include "attention/scheduler.cuh"
#include "attention/softmax.cuh"
#include "ptx/wgmma.cuh"

namespace {

using LogitMma = ptx::Wgmma<ptx::Operand::E4m3, kBlockN>;
constexpr ptx::Swizzle kSwizzle = kDim == 128 ? ptx::Swizzle::B128 : ptx::Swizzle::B64;

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
  for (int i = 1; i < kDim / 32; i++) LogitMma::ss(s, ptx::wgmma_advance(q, 32 * i), ptx::wgmma_advance(k, 32 * i), 1);
  ptx::wgmma_commit();
}
// Issues O += P V, or O = P V where `fresh`.
template <Pv Mode = kPv>
__device__ __forceinline__ void issue_pv(float (&o)[kDim / 2], const u32 (&p)[kPRegisters], u64 v, bool fresh) {
  using Mma = ptx::Wgmma<Mode == Pv::F16 ? ptx::Operand::F16 : ptx::Operand::E4m3, kDim>;
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

// Queries that have arrived, and what the loop over their keys needs of the work item.
struct QueryTile {
  int key_tiles, row, first_key_tile;
  u64 q;  // descriptor
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
  float (&o)[kDim / 2];
  u32 (&p)[kPRegisters];  // operand registers
  RowState& rows;
  float scale, to_units;  // P = 2^(scale logit); E4M3 logits: logit times `to_units` is in units of the descale
  bool fresh, flushed;    // O starts at the next product; part of it lies in shared memory

  __device__ __forceinline__ Consumer(const Params& params, const Pipeline& pipeline, u8* shared, const WorkItem* work,
                                      float (&o)[kDim / 2], u32 (&p)[kPRegisters], RowState& rows)
      : params(params), pipeline(pipeline), shared(shared), work(work), leader(threadIdx.x % 32 == 0), item(0), kv(0), o(o), p(p),
        rows(rows) {
    const u32 base = uniform(pipeline.base);
    desc_k = ptx::wgmma_descriptor(base + kOffsetK, 16, 8 * kDim, kSwizzle);
    // Core matrices of V: dims 128 bytes apart, groups of 16 keys 16 * kDim bytes apart. In F16: rows of 64 dims, which the
    // product takes transposed
    desc_v = kPv == Pv::F16 ? ptx::wgmma_descriptor(base + kOffsetV, kValueRun, 8 * 128, ptx::Swizzle::B128)
                            : ptx::wgmma_descriptor(base + kOffsetV, 16 * kDim, 128, ptx::Swizzle::None);
  }

  // NOTES: read anew at each use, as `place` is.
  __device__ __forceinline__ u32 warpgroup() const { return ptx::thread_index() / 128; }
  __device__ __forceinline__ float4* flushed_o() const {
    return reinterpret_cast<float4*>(shared + kOffsetO) + warpgroup() * kRows * kDim / 4 + ptx::thread_index() % 128;
  }
  __device__ __forceinline__ const WorkItem& slot(u32 i) const { return work[i % kQStages * kConsumers + warpgroup()]; }

  // Key tile t of the pipeline.
  __device__ __forceinline__ u32 k_full(u32 t) const { return pipeline.k_full(t % kKvStages); }
  __device__ __forceinline__ u32 v_full(u32 t) const { return pipeline.v_full(t % kKvStages); }
  __device__ __forceinline__ u32 parity(u32 t) const { return t / kKvStages & 1; }
  __device__ __forceinline__ void release_k(u32 t) const {
    if (leader) ptx::mbarrier_arrive(pipeline.k_empty(t % kKvStages));
  }
  __device__ __forceinline__ void release_v(u32 t) const {
    if (leader) ptx::mbarrier_arrive(pipeline.v_empty(t % kKvStages));
  }
  __device__ __forceinline__ u64 k(u32 t) const { return ptx::wgmma_advance(desc_k, t % kKvStages * kTileBytes); }
  __device__ __forceinline__ u64 v(u32 t) const { return ptx::wgmma_advance(desc_v, t % kKvStages * kValueBytes); }

  // Waits for the queries of work item i. It keeps its slot until `release_item`.
  __device__ __forceinline__ QueryTile acquire(u32 i) const {
    ptx::mbarrier_wait_uniform(pipeline.q_full(i % kQStages, warpgroup()), i / kQStages & 1);
    const u32 at = uniform(pipeline.q(i % kQStages, warpgroup()));
    int first = 0;
    if constexpr (kSplitKv) first = first_key_tile(slot(i));
    return {load_uniform(slot(i).tile.key_tiles), load_uniform(slot(i).tile.row), first,
            ptx::wgmma_descriptor(at, 16, 8 * kDim, kSwizzle)};
  }
  // Key tiles below this one need no mask.
  __device__ __forceinline__ int unmasked_tiles(const QueryTile& tile) const {
    int whole = params.len_k / kBlockN;
    if constexpr (kCausal) whole = min(whole, max(0, last_visible_key(params, tile.row) + 1) / kBlockN);
    return kSplitKv ? max(0, whole - tile.first_key_tile) : whole;
  }
  // The last key that row r of this thread sees, counted from its first key of tile n.
  __device__ __forceinline__ int last_key(const QueryTile& tile, int n, int r) const {
    const Place at = place();
    const int row = tile.row + row_of(params, at.row + 8 * r).position;
    int last = params.len_k - 1;
    if constexpr (kCausal) last = min(last, last_visible_key(params, row));
    return (row < params.len_q ? last : -1) - (tile.first_key_tile + n) * kBlockN - 2 * at.quad;
  }

  // Starts the accumulation of the current work item.
  __device__ __forceinline__ void begin() {
    rows = {{kLowest, kLowest}, {0.0f, 0.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {-kLowest, -kLowest}, {kLowest, kLowest}, 0, 0};
    fresh = true, flushed = false;
    if (kPv == Pv::Promote) clear_o();
    if constexpr (kSplitKv || kTelemetry) {
      // NOTES: otherwise a row that does not exist, whose logits are zeros, would keep its warp from integer order.
      const int first_row = load_uniform(slot(item).tile.row);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Row at = row_of(params, place().row + 8 * r);
        if (!at.exists || first_row + at.position >= params.len_q)
          rows.row_max[r] = rows.unrounded_max[r] = 0.0f, rows.row_min[r] = -1.0f;
      }
    }
    const float logit_scale = load_uniform(slot(item).logit_scale);
    if constexpr (kLogitsE4m3) {
      const float logit_descale = checked_scale(params.logit_descale[load_uniform(slot(item).tile.head)]);
      to_units = logit_scale / logit_descale, scale = logit_descale * kLog2e;
    } else {
      scale = logit_scale * kLog2e;
    }
  }
  // Masks (and rounds) the logits of tile n, and finds their extremes: `top` and `low` by `scan`.
  __device__ __forceinline__ void mask_and_scan(const QueryTile& tile, float (&s)[kBlockN / 2], int n, bool masked,
                                                float (&top)[2], float (&low)[2]) {
    int limit[2];
    float seen[2] = {-kLowest, -kLowest};
    if (masked) {
      limit[0] = last_key(tile, n, 0), limit[1] = last_key(tile, n, 1);
      if (kTelemetry) mask(s, limit, seen); else mask(s, limit);
    }
    scan<kTelemetry>(s, top, low);
    if (masked) low[0] = seen[0], low[1] = seen[1];
    if constexpr (kLogitsE4m3) {
      resolve_extremes(s, top, low, rows, rows.unrounded_max, masked);
      // NOTES: counted where the extremes show that there is something to count.
      const float most = fmaxf(fmaxf(top[0], top[1]), -fminf(low[0], low[1])) * to_units;
      if (__any_sync(~0u, most > 448.0f)) rows.overflow += count_overflow(s, to_units);
      // NOTES: rounding keeps order, so the largest logit rounded is the largest rounded logit. It turns a masked one into
      // -448, so the mask runs again.
#pragma unroll
      for (int r = 0; r < 2; r++) rows.unrounded_max[r] = fmaxf(rows.unrounded_max[r], top[r]);
      const float tops[2] = {top[0], top[1]};
      round_to_e4m3(top, to_units);
      round_to_e4m3(s, to_units);
      if (masked) {
        mask(s, limit);
#pragma unroll
        for (int r = 0; r < 2; r++) top[r] = tops[r] < kLowest ? tops[r] : top[r];
      }
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
    for (int i = 0; i < kDim / 2; i++) o[i] = 0.0f;
  }
};

}  // namespace
