// Barriers: mbarrier objects in shared memory and the hardware's named barriers (PTX ISA, "Parallel Synchronization").
// A barrier or buffer in shared memory is named by its 32-bit address in the shared window.
#pragma once
#include "common/types.cuh"

// A warp arrives by its lane 0, once all its lanes are there. 1: by all of them, for racecheck of compute-sanitizer, which follows an
// arrival by the accesses of the arriving thread alone.
#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif

namespace ptx {

constexpr u32 kWarpArrivals = EVERY_LANE ? 32 : 1;
__device__ __forceinline__ bool arrives(u32 lane) { return EVERY_LANE || lane == 0; }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives if `condition`, predicated rather than by a branch: a branch would serialise the wgmma around it.
__device__ __forceinline__ void mbarrier_arrive_if(u32 bar, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(bar),
               "r"((u32)condition) : "memory");
}
// Arrives, and makes the phase wait for `bytes` of asynchronous copies as well.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// The same without an arrival.
__device__ __forceinline__ void mbarrier_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Nonzero when the phase of this parity has completed.
__device__ __forceinline__ u32 mbarrier_try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// The same; never suspends the thread.
__device__ __forceinline__ u32 mbarrier_test_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\nbra again_%=;\nover_%=:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
// By whole warps. NOTES: with `bra.uni` the assembler keeps what follows in uniform registers.
__device__ __forceinline__ void mbarrier_wait_uniform(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
      "@p bra.uni DONE;\n"
      "bra.uni WAIT;\n"
      "DONE:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
// The same; does not wait when `ready`.
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

// Waits for `Threads` threads at the block's named barrier `Id`; 0 is __syncthreads.
template <int Id, int Threads> __device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}

}  // namespace ptx
