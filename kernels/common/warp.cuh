// Reductions over a warp, the same bits in every lane, and maxima to which NaN is larger than everything.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ float larger(float a, float b) { return a != a || a >= b ? a : b; }
__device__ __forceinline__ double larger(double a, double b) { return a != a || a >= b ? a : b; }

template <class T, class Op> __device__ __forceinline__ T warp_reduce(T mine, Op op) {
#pragma unroll
  for (int step = 16; step; step >>= 1) mine = op(mine, __shfl_xor_sync(0xffffffffu, mine, step));
  return mine;
}
template <class T> __device__ __forceinline__ T warp_largest(T mine) {
  return warp_reduce(mine, [](T a, T b) { return larger(a, b); });
}
template <class T> __device__ __forceinline__ T warp_sum(T mine) {
  return warp_reduce(mine, [](T a, T b) { return a + b; });
}
