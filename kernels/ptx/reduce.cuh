// Copies and reductions into global memory that return nothing, and the order between blocks that take turns at them.
#pragma once
#include "common/types.cuh"

namespace ptx {


// Adds `bytes` of f32 in shared memory, a multiple of 16, to global memory by the copy engine; a group ends with `bulk_commit`.
__device__ __forceinline__ void bulk_reduce_add(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
// Writes `bytes` of shared memory, a multiple of 16, to global memory likewise.
__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of this thread's groups are in flight; `_read`: until what they read may be overwritten.
template <int Pending> __device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}
template <int Pending> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
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
