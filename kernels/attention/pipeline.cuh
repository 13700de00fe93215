// The pipeline between the producer warp and the consumers: rings of buffers in shared memory, each with a `full` and an
// `empty` mbarrier. The producer waits for empty, expects bytes on full and copies; a consumer waits for full, reads, and
// arrives on empty once a warp.
#pragma once
#include "attention/config.cuh"
#include "attention/ring.cuh"
#include "ptx/fence.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"

namespace {

// Addresses of buffers and barriers. Q has a buffer for each consumer and stage.
struct Pipeline {
  u32 base;  // of shared memory, aligned to 1024 bytes
  u32 q_bars, k_full_bars, k_empty_bars, v_full_bars, v_empty_bars;

  __device__ __forceinline__ explicit Pipeline(u32 base) : base(base), q_bars(base + kOffsetBarriers) {
    k_full_bars = q_bars + 16 * kQStages * kConsumers, k_empty_bars = k_full_bars + 8 * kKvStages;
    v_full_bars = k_empty_bars + 8 * kKvStages, v_empty_bars = v_full_bars + 8 * kKvStages;
  }
  __device__ __forceinline__ u32 q_full(u32 stage, u32 consumer) const { return q_bars + 8 * (stage * kConsumers + consumer); }
  __device__ __forceinline__ u32 q_empty(u32 stage, u32 consumer) const {
    return q_bars + 8 * (kQStages * kConsumers + stage * kConsumers + consumer);
  }
  __device__ __forceinline__ u32 k_full(u32 stage) const { return k_full_bars + 8 * stage; }
  __device__ __forceinline__ u32 k_empty(u32 stage) const { return k_empty_bars + 8 * stage; }
  __device__ __forceinline__ u32 v_full(u32 stage) const { return v_full_bars + 8 * stage; }
  __device__ __forceinline__ u32 v_empty(u32 stage) const { return v_empty_bars + 8 * stage; }
  __device__ __forceinline__ u32 q(u32 stage, u32 consumer) const { return base + (stage * kConsumers + consumer) * kQBytes; }
  __device__ __forceinline__ u32 k(u32 stage) const { return base + kOffsetK + stage * kTileBytes; }
  __device__ __forceinline__ u32 v(u32 stage) const { return base + kOffsetV + stage * kValueBytes; }

  // By one thread. `consumers`: how many take tiles.
  __device__ __forceinline__ void init(int consumers) const {
    for (int i = 0; i < kQStages * kConsumers; i++) {
      ptx::mbarrier_init(q_full(0, 0) + 8 * i, 1);
      ptx::mbarrier_init(q_empty(0, 0) + 8 * i, 4 * ptx::kWarpArrivals);
    }
    for (int i = 0; i < kKvStages; i++) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), 4 * ptx::kWarpArrivals * consumers);
    }
    for (int i = 0; i < kKvStages; i++) {
      ptx::mbarrier_init(v_full(i), kVRows ? kTransposeWarps * ptx::kWarpArrivals : 1);
      ptx::mbarrier_init(v_empty(i), 4 * ptx::kWarpArrivals * consumers);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
  }
};

// A word of a work item.
// NOTES: lane 0 reads it, which also releases the slot, and the others get it by a shuffle, so that the compiler knows it
// uniform and keeps loop and rings in uniform registers.
__device__ __forceinline__ int load_uniform(const int& word) {
  int x = ptx::opaque_zero();
  if (threadIdx.x % 32 == 0) x = word;
  return __shfl_sync(~0u, x, 0);
}
__device__ __forceinline__ float load_uniform(const float& word) {
  return __int_as_float(load_uniform(reinterpret_cast<const int&>(word)));
}
// A value that is the same in all lanes. NOTES: through a shuffle the assembler knows it, too.
template <class T> __device__ __forceinline__ T uniform(T x) { return __shfl_sync(~0u, x, 0); }

}  // namespace
