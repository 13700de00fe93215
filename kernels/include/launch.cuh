// Register redistribution between warpgroups, programmatic dependent launch, and the index of this multiprocessor's work.
#pragma once
#include "types.cuh"

template <int Count> __device__ __forceinline__ void registers_grow() {
  static_assert(Count % 8 == 0 && Count <= 256, "setmaxnreg takes multiples of 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> __device__ __forceinline__ void registers_shrink() {
  static_assert(Count % 8 == 0 && Count >= 24, "setmaxnreg takes multiples of 8 from 24");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
// Both do nothing in a kernel that was launched without the programmatic attribute.
__device__ __forceinline__ void grid_wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A word that others raise by atomics.
__device__ __forceinline__ u32 load_relaxed(const u32* at) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
// threadIdx.x, not to be remembered.
__device__ __forceinline__ u32 thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
