// Loads, stores and atomics with explicit address space, width or order. Shared addresses are those of mbarrier.cuh.
#pragma once
#include "common/types.cuh"

namespace ptx {

__device__ __forceinline__ u32 ld_shared_u32(u32 address) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float ld_shared_f32(u32 address) { return __uint_as_float(ld_shared_u32(address)); }
__device__ __forceinline__ uint4 ld_shared_v4(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void st_shared_u32(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void st_shared_v2(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void st_shared_f32(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void st_shared_v4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// 8 or 16 bytes from global to shared memory, zeros unless `real`; the thread that began its copies waits for them all.
template <int Bytes> __device__ __forceinline__ void copy_async(u32 to, const void* from, bool real) {
  static_assert(Bytes == 8 || Bytes == 16, "widths that are used");
  const int bytes = real ? Bytes : 0;
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A word of global memory that other blocks change at the same time.
__device__ __forceinline__ u32 ld_relaxed(const u32* at) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

}  // namespace ptx
