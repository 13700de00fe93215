// Scheduler and producer: which tile a block takes next, and the copies that bring it. The grid is persistent: one producer
// thread takes tiles from a counter in global memory, hands each consumer a work item with its queries, then streams the
// tile's keys and values, the last tile of keys first, so that masked tiles come first.
//
// Whole tiles are scheduled by scheduler_whole.cuh, split ones by scheduler_split.cuh. Both define:
//   Tile        batch, head, row: first of the consumer's; key_tiles: of this item, below 0 when there are no more items
//   WorkItem    a Tile and its scales, in shared memory
//   Row         what row i of a consumer's 64 is: position (from Tile::row), head (from Tile::head), whether it exists
//   first_key_tile(item), last_visible_key(p, row)
//   produce(...) the producer's loop
#pragma once
#include "attention/config.cuh"
#include "attention/params.cuh"
#include "attention/pipeline.cuh"
#include "ptx/launch.cuh"
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

// Loads tile n of a head's keys and values.
__device__ __forceinline__ void load_kv(const Pipeline& pipeline, const TensorMap& map_k, const TensorMap& map_v,
                                        Ring<kKvStages>& k, Ring<kKvStages>& v, int n, int head, int batch, int heads_kv) {
  ptx::mbarrier_wait_uniform(pipeline.k_empty(k.index), k.parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(pipeline.k_full(k.index), kTileBytes);
  ptx::tma_load_4d(pipeline.k(k.index), &map_k, pipeline.k_full(k.index), 0, head, n * kBlockN, batch);
  if (!kShortProducer) k.advance();
  ptx::mbarrier_wait_uniform(pipeline.v_empty(v.index), v.parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(pipeline.v_full(v.index), kValueBytes);
  if constexpr (kPv == Pv::F16) {
#pragma unroll
    for (int run = 0; run < kDim / 64; run++)
      ptx::tma_load_4d(pipeline.v(v.index) + run * kValueRun, &map_v, pipeline.v_full(v.index), 64 * run, head, n * kBlockN, batch);
  } else {
    ptx::tma_load_3d(pipeline.v(v.index), &map_v, pipeline.v_full(v.index), 0, n * (kBlockN / 16), batch * heads_kv + head);
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

#if SPLIT_KV
#include "attention/scheduler_split.cuh"
#else
#include "attention/scheduler_whole.cuh"
#endif
