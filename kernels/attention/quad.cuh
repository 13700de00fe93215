// Exchanges between the four lanes that share a row of an accumulator.
#pragma once
#include "common/types.cuh"

// Turns four words a[j] of lane t (column block j, piece t) into four words of block t: word k is piece k.
__device__ __forceinline__ void quad_transpose(u32 (&a)[4], int t) {
  bool odd = t & 1, high = t & 2;
  u32 x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
  if (odd) { a[0] = x; a[2] = y; } else { a[1] = x; a[3] = y; }
  x = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2);
  y = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
  if (high) { a[0] = x; a[1] = y; } else { a[2] = x; a[3] = y; }
}
