// What the products' kernels share: where a warpgroup's 64 x 64 accumulator has its values, f16 pairs, and sums over a block.
#pragma once
#include "scale_lift.cuh"

namespace spectrum {

// Not to be remembered from one part of the work to the next: registers are few.
__device__ __forceinline__ u32 this_thread() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Value 4 n + 2 h + e of a lane: row 16 warp + g + 8 h, column 8 n + 2 c + e.
struct Lane {
  u32 group, warp, g, c;
  __device__ __forceinline__ Lane() {
    const u32 thread = this_thread();
    group = thread >> 7, warp = thread >> 5 & 3, g = (thread & 31) >> 2, c = thread & 3;
  }
  __device__ __forceinline__ u32 row() const { return 16 * warp + g; }
};

// f(value, on, row) for the values where the diagonal of a diagonal block may pass this thread.
template <u32 WARP, class F> __device__ __forceinline__ void diagonal_of(float (&v)[32], const Lane& at, F f) {
  const bool even = at.g == 2 * at.c, odd = at.g == 2 * at.c + 1;
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 n = 2 * WARP + h, row = 8 * n + at.g;
    f(v[4 * n + 2 * h], even, row), f(v[4 * n + 2 * h + 1], odd, row);
  }
}
template <class F> __device__ __forceinline__ void diagonal(float (&v)[32], const Lane& at, F f) {
  switch (at.warp) {
    case 0: return diagonal_of<0>(v, at, f);
    case 1: return diagonal_of<1>(v, at, f);
    case 2: return diagonal_of<2>(v, at, f);
    default: return diagonal_of<3>(v, at, f);
  }
}

// Two values as f16 pairs, value = high + low to 2^-22.
struct Pair {
  u32 high, low;
};
__device__ __forceinline__ Pair split(float a, float b) {
  const u32 high = pack_f16(a, b);
  return {high, pack_f16(a - f16_value((u16)high), b - f16_value((u16)(high >> 16)))};
}

// Sums over a block of WARPS warps, the same bits in every thread. `scratch`: WARPS values that the last call did not use.
template <u32 WARPS> __device__ __forceinline__ float4 sums_of_block(float4 v, float4* scratch) {
  const u32 thread = this_thread();
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, step), v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    v.z += __shfl_xor_sync(0xffffffffu, v.z, step), v.w += __shfl_xor_sync(0xffffffffu, v.w, step);
  }
  if ((thread & 31) == 0) scratch[thread >> 5] = v;
  __syncthreads();
  v = scratch[0];
#pragma unroll
  for (u32 w = 1; w < WARPS; w++) {
    const float4 more = scratch[w];
    v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
  }
  return v;
}

// (trace, squared Frobenius norm) over the first WARPS warps' sums, both below 2: whole numbers are added up, which takes one
// instruction a warp. Between two calls lies a barrier.
template <u32 WARPS> __device__ __forceinline__ float2 whole_sums(float trace, float squares, uint2* scratch) {
  const u32 a = __reduce_add_sync(0xffffffffu, __float2uint_rn(trace * 0x1p31f));
  const u32 b = __reduce_add_sync(0xffffffffu, __float2uint_rn(squares * 0x1p30f));
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = make_uint2(a, b);
  __syncthreads();
  u32 traces = 0, sums = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w += 2) {
    const uint4 two = *(const uint4*)(scratch + w);
    traces += two.x + two.z, sums += two.y + two.w;
  }
  return make_float2((float)traces * 0x1p-31f, (float)sums * 0x1p-30f);
}

}  // namespace spectrum
