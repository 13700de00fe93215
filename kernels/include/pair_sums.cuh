// Sums of pairs of channels (two norms, the product, what rounding took from both) that several warps have a part of each.
#pragma once
#include "ptx/memory.cuh"

// In shared memory, of `Count` pairs and `Warps` warps a pair.
template <u32 Warps, u32 Count> struct PairSums {
  u32 base;
  static constexpr u32 BYTES = Warps * 5 * Count * 4;
  __device__ __forceinline__ void put(u32 warp, u32 pair, const float (&mine)[5]) const {
#pragma unroll
    for (u32 i = 0; i < 5; i++) ptx::st_shared_f32(base + ((warp * 5 + i) * Count + pair) * 4, mine[i]);
  }
  __device__ __forceinline__ void get(u32 pair, float (&total)[5]) const {
#pragma unroll
    for (u32 i = 0; i < 5; i++) total[i] = 0.f;
    for (u32 w = 0; w < Warps; w++)
#pragma unroll
      for (u32 i = 0; i < 5; i++) total[i] += ptx::ld_shared_f32(base + ((w * 5 + i) * Count + pair) * 4);
  }
};
