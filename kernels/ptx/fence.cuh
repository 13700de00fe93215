// Fences between the generic proxy (plain loads and stores), the asynchronous proxy (copy engine, tensor cores) and the
// tensor-map proxy, and compiler barriers on registers.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Makes initialised mbarriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders plain accesses of shared memory before those of the copy engine and the tensor cores: after writes that these
// read, and after reads of what these overwrite. NOTES: an arrival at an mbarrier does not wait for a load in flight.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Before the first copy by a tensor map that the host or a kernel may have rewritten since the multiprocessor cached it. By
// the thread that copies, or before a block barrier.
__device__ __forceinline__ void fence_tensormap_acquire(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"((u64)map) : "memory");
}

// After plain stores of tensor maps, for kernels whose copies by them come after `fence_tensormap_acquire`. No effect before
// Hopper, which has no copy engine to tell.
__device__ __forceinline__ void fence_tensormap_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
#endif
}

// Keeps a value in its register: the compiler can neither recompute it nor move memory accesses across this point.
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }
template <int Count> __device__ __forceinline__ void keep(float (&x)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; i++) asm volatile("" : "+f"(x[i])::"memory");
}

}  // namespace ptx
