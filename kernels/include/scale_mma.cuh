// Products of f32 vectors with 16-bit weights on tensor cores (mma.sync), exact to f32: a vector goes in as three bf16
// terms, each a row of the left operand.
#pragma once
#include "scale_types.cuh"

namespace mma {

// Two values as bf16, `low` in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// x = hi + mid + lo up to 2^-27 |x|, two values at a time.
__device__ __forceinline__ void split(float a, float b, u32& hi, u32& mid, u32& lo) {
  hi = pack_bf16(a, b);
  a -= bf16_low(hi), b -= bf16_high(hi);
  mid = pack_bf16(a, b);
  lo = pack_bf16(a - bf16_low(mid), b - bf16_high(mid));
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
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(address + i * 128), "r"(words[i]) : "memory");
  }
  __device__ __forceinline__ void reload(u32 address) {
    u32* words[6] = {upper, upper + 1, lower, lower + 1, lo, lo + (PACKED ? 0 : 1)};
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(*words[i]) : "r"(address + i * 128) : "memory");
  }
};

// d (16 x 8) += a (16 x 16) b (16 x 8), bf16 in, f32 out.
__device__ __forceinline__ void product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <bool PACKED> __device__ __forceinline__ void high_terms(float (&d)[4], const Terms<PACKED>& a, u32 b0, u32 b1) {
  product(d, a.upper[0], a.lower[0], a.upper[1], a.lower[1], b0, b1);
}
template <bool PACKED> __device__ __forceinline__ void low_terms(float (&d)[4], const Terms<PACKED>& a, u32 b0, u32 b1) {
  if (!PACKED) product(d, a.lo[0], 0, a.lo[PACKED ? 0 : 1], 0, b0, b1);
}
// Sum of the rows of one vector: two of a lane's values, and with PACKED those of the lane 16 apart.
template <bool PACKED> __device__ __forceinline__ float rows(float upper, float lower) {
  const float mine = upper + lower;
  return PACKED ? mine + __shfl_xor_sync(0xffffffffu, mine, 16) : mine;
}

// Four 8 x 8 matrices of 16-bit values; lane 8 i + j gives the address of row j of matrix i.
template <bool TRANSPOSED> __device__ __forceinline__ void load(u32 (&r)[4], u32 address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace mma
