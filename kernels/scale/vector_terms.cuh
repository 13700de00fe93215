// Products of f32 vectors with 16-bit weights on tensor cores (mma.sync), exact to f32: a vector goes in as three bf16
// terms, each a row of the left operand.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "scale/types.cuh"

namespace mma {

// x = hi + mid + lo up to 2^-27 |x|, two values at a time.
__device__ __forceinline__ void split(float a, float b, u32& hi, u32& mid, u32& lo) {
  hi = ptx::bf16x2(a, b);
  a -= bf16_low(hi), b -= bf16_high(hi);
  mid = ptx::bf16x2(a, b);
  lo = ptx::bf16x2(a - bf16_low(mid), b - bf16_high(mid));
}

// Vectors over 16 positions as the left operand. A lane (g, t) of the warp has rows g and 8 + g at positions 2t, 2t + 1 and
// 8 + 2t, 9 + 2t.
// PACKED: up to four vectors; rows v, 8 + v and 4 + v are hi, mid and lo of vector v.
// Else up to eight: rows v and 8 + v are hi and mid, and lo is row v of an operand of its own.
template <bool PACKED> struct Terms {
  u32 upper[2], lower[2], lo[PACKED ? 1 : 2];

  // Two values of vector g (PACKED: g % 4, so that lanes 16 apart are given the same).
  __device__ __forceinline__ void set(int half, float a, float b) {
    u32 hi, mid, low;
    split(a, b, hi, mid, low);
    if (PACKED) {
      const bool second = threadIdx.x & 16;
      upper[half] = second ? low : hi, lower[half] = second ? 0 : mid;
    } else {
      upper[half] = hi, lower[half] = mid, lo[PACKED ? 0 : half] = low;
    }
  }
  // In shared memory, words of a warp 128 bytes apart.
  static constexpr int WORDS = PACKED ? 4 : 6;
  __device__ __forceinline__ void store(u32 address) const {
    const u32 words[6] = {upper[0], upper[1], lower[0], lower[1], lo[0], lo[PACKED ? 0 : 1]};
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      ptx::st_shared_u32(address + i * 128, words[i]);
  }
  __device__ __forceinline__ void reload(u32 address) {
    u32* words[6] = {upper, upper + 1, lower, lower + 1, lo, lo + (PACKED ? 0 : 1)};
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      *words[i] = ptx::ld_shared_u32(address + i * 128);
  }
};

template <bool PACKED> __device__ __forceinline__ void high_terms(float (&d)[4], const Terms<PACKED>& a, u32 b0, u32 b1) {
  ptx::mma_bf16(d, a.upper[0], a.lower[0], a.upper[1], a.lower[1], b0, b1);
}
template <bool PACKED> __device__ __forceinline__ void low_terms(float (&d)[4], const Terms<PACKED>& a, u32 b0, u32 b1) {
  if (!PACKED) ptx::mma_bf16(d, a.lo[0], 0, a.lo[PACKED ? 0 : 1], 0, b0, b1);
}
// Sum of the rows of one vector: two of a lane's values, and with PACKED those of the lane 16 apart.
template <bool PACKED> __device__ __forceinline__ float rows(float upper, float lower) {
  const float mine = upper + lower;
  return PACKED ? mine + __shfl_xor_sync(0xffffffffu, mine, 16) : mine;
}

}  // namespace mma
