// Reductions into global memory that return nothing, and the order between blocks that take turns at them.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Adds four values to 16 aligned bytes, each by itself. Relaxed.
__device__ __forceinline__ void red_add_v4(float* at, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// A word by which blocks hand a turn on: what was written before `red_add_release` is seen after `ld_acquire`.
__device__ __forceinline__ u32 ld_acquire(const u32* at) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void red_add_release(u32* at, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

}  // namespace ptx
