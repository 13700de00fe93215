// Shared-memory barriers (mbarrier), named barriers and the fences between them and the asynchronous proxy.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Keeps a value in a register: the compiler forgets how to compute it again.
__device__ __forceinline__ void opaque(u32& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Bytes that the phase waits for beside its arrivals.
__device__ __forceinline__ void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Not zero when the phase is over.
__device__ __forceinline__ u32 mbarrier_try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

// NOTES: the branch is the same for a whole warp; said so, what follows stays uniform to the assembler.
__device__ __forceinline__ void mbarrier_wait_uniform(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
      "@p bra.uni DONE;\n"
      "bra.uni WAIT;\n"
      "DONE:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}

// As above; nothing to wait for when `ready`.
__device__ __forceinline__ void mbarrier_wait_uniform(u32 bar, u32 parity, u32 ready) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p bra.uni DONE;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
      "@p bra.uni DONE;\n"
      "bra.uni WAIT;\n"
      "DONE:\n}\n" ::"r"(bar), "r"(parity), "r"(ready) : "memory");
}

// Makes initialised mbarriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders ordinary shared-memory accesses before those of the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A ring of `Stages` buffers: index and parity of the next one.
template <int Stages>
struct Ring {
  u32 index = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == Stages) {
      index = 0;
      parity ^= 1;
    }
  }
};
