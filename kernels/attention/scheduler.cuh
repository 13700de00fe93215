// Scheduler and producer: which tile a block takes next, and the copies that bring it. The grid is persistent: one producer
// thread takes tiles from a counter in global memory, hands each consumer a work item with its queries, then streams the
// tile's keys and values, the last tile of keys first, so that masked tiles come first.
//
// Whole tiles are scheduled by scheduler_whole.cuh, split ones by scheduler_split.cuh, those over pages by scheduler_paged.cuh.
// Each defines:
//   Tile        batch, head, row: first of the consumer's; key_tiles: of this item, below 0 when there are no more items
//   WorkItem    a Tile and its scales, in shared memory
//   Row         what row i of a consumer's 64 is: position (from Tile::row), head (from Tile::head), whether it exists
//   first_key_tile(item), last_visible_key(p, length, row)
//   produce(...) the producer's loop
#pragma once
#include "attention/config.cuh"
#include "attention/params.cuh"
#include "attention/mask.cuh"
#include "attention/pipeline.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"

namespace {

// A scale or descale of logits. NaN where it is negative, not finite or so large that logits leave f32: a wrong scale must not
// give plausible values.
__device__ __forceinline__ float checked_scale(float scale) {
  return scale >= 0.0f && scale < 1e30f ? scale : __int_as_float(0x7fffffff);
}
// The scale of a head's logits. NOTES: the smallest normal number is added for products that underflow, since a masked logit of
// minus infinity times zero is NaN; it changes no other product.
__device__ __forceinline__ float logit_scale(float softmax_scale, float q_descale, float k_descale) {
  return checked_scale(fmaf(softmax_scale * q_descale, k_descale, 1.17549435e-38f));
}

// 1 / x as the compiler divides where neither is subnormal.
// NOTES: its routine for the others costs registers, also where it is not called.
__device__ __forceinline__ float reciprocal(float x) {
  const float r = ptx::rcp_approx(x);
  return fabsf(r) < __int_as_float(0x7f800000) && r != 0.0f ? fmaf(r, fmaf(-x, r, 1.0f), r) : r;
}

// What a work item has of its sequence: nothing, where all are alike.
struct Alike {
  static constexpr int q_row = 0, len_q = 0, k_row = 0, len_k = 0, value_tile = 0, splits = 1;
  __device__ Alike& operator=(const SequenceRows&) { return *this; }
};
using OwnRows = Select<kVarlen, SequenceRows, Alike>::type;

// Queries and keys of the sequence of a work item.
__device__ __forceinline__ Lengths lengths(const Params& p, const OwnRows& rows) {
  return kVarlen ? Lengths{rows.len_q, rows.len_k} : Lengths{p.len_q, p.len_k};
}

// Loads a consumer's queries from a row and a head on.
__device__ __forceinline__ void load_queries(u32 to, const TensorMap& map_q, u32 bar, int head, int row, int batch) {
#pragma unroll (kRuns < 3 || kConsumers > 2 ? 4 : 1)  // NOTES: as it costs the producer no register too many
  for (int run = 0; run < kRuns; run++) ptx::tma_load_4d(to + run * kQRun, &map_q, bar, run * kRun, head, row, batch);
}

// Loads tile n of a head's keys and values.
__device__ __forceinline__ void load_kv(const Pipeline& pipeline, const TensorMap& map_k, const TensorMap& map_v,
                                        Ring<kKvStages>& k, Ring<kKvStages>& v, int n, int head, int batch, int heads_kv,
                                        const OwnRows& rows) {
  int first_key = n * kBlockN, value_key = first_key;
  if constexpr (kVarlen) first_key += rows.k_row, value_key += 128 * rows.value_tile;
  ptx::mbarrier_wait_uniform(pipeline.k_empty(k.index), k.parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(pipeline.k_full(k.index), kTileBytes);
#pragma unroll (kRuns < 3 || kConsumers > 2 ? 4 : 1)  // NOTES: as it costs the producer no register too many
  for (int run = 0; run < kRuns; run++)
    ptx::tma_load_4d(pipeline.k(k.index) + run * kKeyRun, &map_k, pipeline.k_full(k.index), run * kRun, head, first_key, batch);
  if (!kShortProducer) k.advance();
  ptx::mbarrier_wait_uniform(pipeline.v_empty(v.index), v.parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(pipeline.v_full(v.index), kValueBytes);
  if constexpr (kPv == Pv::F16) {
#pragma unroll
    for (int run = 0; run < kValueRuns; run++)
      ptx::tma_load_4d(pipeline.v(v.index) + run * kValueRun, &map_v, pipeline.v_full(v.index), 64 * run, head, value_key, kVarlen ? 0 : batch);
  } else if constexpr (kValueMatrices) {
    ptx::tma_load_4d(pipeline.v(v.index), &map_v, pipeline.v_full(v.index), 0, 0, value_key / 16, kVarlen ? head : batch * heads_kv + head);
  } else {
    const int group = kVarlen ? value_key / 16 : n * (kBlockN / 16);
    ptx::tma_load_3d(pipeline.v(v.index), &map_v, pipeline.v_full(v.index), 0, group, kVarlen ? head : batch * heads_kv + head);
  }
  v.advance();
}

// Leaves the tile counter at zero for the next launch: the last block to come resets it.
__device__ __forceinline__ void reset_counter(u32* counter) {
  __threadfence();
  if (atomicAdd(counter + 1, 1) == gridDim.x - 1) {
    counter[0] = 0;
    counter[1] = 0;
  }
}

}  // namespace

#if PAGED
#include "attention/scheduler_paged.cuh"
#elif SPLIT_KV
#include "attention/scheduler_split.cuh"
#else
#include "attention/scheduler_whole.cuh"
#endif
