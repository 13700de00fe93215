// What a kernel asks of its launch: programmatic dependent launch (PDL), register redistribution between warpgroups, and
// the special registers.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Waits for the grids that this one depends on, and their writes. No effect in a kernel launched without the attribute, nor
// before Hopper. Whatever a grid reads or overwrites of an earlier one comes after its own wait.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next grid start when every block has called this or returned.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Registers a thread, from here on; by all warps of a warpgroup.
template <int Count> __device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(Count % 8 == 0 && Count <= 256, "setmaxnreg takes multiples of 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> __device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(Count % 8 == 0 && Count >= 24, "setmaxnreg takes multiples of 8 from 24");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// threadIdx.x and blockIdx.x, read again at each use: values derived from them are not kept in registers in between.
__device__ __forceinline__ u32 thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ u32 block_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
// Waits for so many clocks.
__device__ __forceinline__ void spend_clocks(u32 clocks) {
  u32 first, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(first)::"memory");
  do {
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  } while (now - first < clocks);
}
// A zero that the compiler does not know to be one. NOTES: of a plain zero the assembler keeps a copy, and spills it.
__device__ __forceinline__ int opaque_zero() {
  int x;
  asm volatile("mov.b32 %0, 0;" : "=r"(x));
  return x;
}

}  // namespace ptx
