// Certified largest eigenvalues (scale_chain.cuh) with mma.sync, a block a matrix, for any architecture and d_head.
#pragma once
#include "scale_chain.cuh"

#ifndef LEAST_WARPS  // of a block that has other work for them
#define LEAST_WARPS 1
#endif
#ifndef LEAST_UNITS  // of a warp that needs registers, so that warps are few
#define LEAST_UNITS 1
#endif

namespace spectrum {

constexpr u32 SIDE = (N + 31) / 32 * 32, BANDS = SIDE / 32, UNITS = BANDS * (BANDS + 1) / 2;
// 32 x 32 units of the upper triangle: one a warp, two or three where there are more than 15.
constexpr u32 FEWEST = UNITS <= 15 ? 1 : UNITS <= 28 ? 2 : 3, EACH = FEWEST < LEAST_UNITS ? LEAST_UNITS : FEWEST, NEEDED = (UNITS + EACH - 1) / EACH;
constexpr u32 WARPS = NEEDED < LEAST_WARPS ? LEAST_WARPS : NEEDED, THREADS = WARPS * 32;
constexpr u32 STRIDE = SIDE + 8;  // f16 values a row: eight rows of 16 bytes touch all banks
constexpr u32 X_BYTES = SIDE * STRIDE * 2;

struct Unit {
  u32 row, column;  // first of the 32 x 32 values
  // 2 off the diagonal, 0 if there is none.
  __device__ __forceinline__ float weight() const { return row >= SIDE ? 0.f : row == column ? 1.f : 2.f; }
};
__device__ __forceinline__ Unit unit(u32 e) {
  u32 index = (threadIdx.x >> 5) + e * WARPS, row = 0;
  if (index >= UNITS) return {SIDE, 0};
  while (index >= BANDS - row) index -= BANDS - row, row++;
  return {row * 32, (row + index) * 32};
}

// One lane's values of a unit, in the layout of an mma accumulator: value q of block (m, n) lies at
// row 16 m + lane/4 + 8 (q/2), column 8 n + 2 (lane%4) + q%2.
struct Values {
  float v[2][4][4];
};
template <class F> __device__ __forceinline__ void each(Values& values, const Unit& at, F f) {
  const u32 g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
  for (u32 m = 0; m < 2; m++)
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 q = 0; q < 4; q++)
        f(values.v[m][n][q], at.row + 16 * m + g + 8 * (q >> 1), at.column + 8 * n + 2 * c + (q & 1));
}
// The values of a unit where its diagonal passes this lane, with whether it does: f(value, row, on).
template <class F> __device__ __forceinline__ void diagonal(Values& values, const Unit& at, F f) {
  const u32 g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
  const bool even = at.weight() == 1.f && g == 2 * c, odd = at.weight() == 1.f && g == 2 * c + 1;
#pragma unroll
  for (u32 m = 0; m < 2; m++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      f(values.v[m][2 * m + h][2 * h], at.row + 16 * m + 8 * h + g, even);
      f(values.v[m][2 * m + h][2 * h + 1], at.row + 16 * m + 8 * h + g, odd);
    }
}

// Sums over the block, the same bits in every thread. `scratch`: one value a warp that the last call did not use.
__device__ __forceinline__ float3 block_sums(float3 v, float4* scratch) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, step);
    v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    v.z += __shfl_xor_sync(0xffffffffu, v.z, step);
  }
  u32 thread;  // not to be remembered from one call to the next
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const u32 lane = thread & 31;
  if (lane == 0) scratch[thread >> 5] = make_float4(v.x, v.y, v.z, 0.f);
  __syncthreads();
  static_assert(WARPS <= 16, "one lane a warp");
  const float4 part = lane % 16 < WARPS ? scratch[lane % 16] : make_float4(0.f, 0.f, 0.f, 0.f);
  v = {part.x, part.y, part.z};
#pragma unroll
  for (int step = 8; step; step >>= 1) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, step);
    v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    v.z += __shfl_xor_sync(0xffffffffu, v.z, step);
  }
  return v;
}

__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ u32 transpose(u32 fragment) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(fragment));
  return turned;
}

// P = X X^T, this warp's units.
__device__ __forceinline__ void square(Values (&p)[EACH], const Unit (&units)[EACH], u32 x) {
  const u32 lane = threadIdx.x & 31, at = ((lane & 15) * STRIDE + (lane >> 4) * 8) * 2;
#pragma unroll
  for (u32 e = 0; e < EACH; e++) {
    if (units[e].row >= SIDE) continue;
    if (SIDE > 128)
#pragma unroll
      for (u32 i = 0; i < 32; i++) p[e].v[i / 16][i / 4 % 4][i % 4] = 0.f;
    const u32 left = x + units[e].row * STRIDE * 2 + at, right = x + units[e].column * STRIDE * 2 + at;
#pragma unroll(SIDE <= 128 ? SIDE / 16 : 1)
    for (u32 k = 0; k < SIDE * 2; k += 32) {
      u32 a[2][4], b[2][4];
      load_fragment(a[0], left + k), load_fragment(a[1], left + 16 * STRIDE * 2 + k);
      load_fragment(b[0], right + k), load_fragment(b[1], right + 16 * STRIDE * 2 + k);
#pragma unroll
      for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
          const u32 b0 = b[n / 2][n % 2], b1 = b[n / 2][2 + n % 2];
          if (SIDE <= 128 && k == 0) mma_first(p[e].v[m][n], a[m], b0, b1);
          else mma(p[e].v[m][n], a[m], b0, b1);
        }
    }
  }
}

// X = a f16(P - c I), both triangles.
__device__ __forceinline__ void store(Values (&p)[EACH], const Unit (&units)[EACH], u8* x, float a, float c) {
  const u32 g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, factor = both_f16(a);
#pragma unroll
  for (u32 e = 0; e < EACH; e++) {
    const Unit u = units[e];
    if (u.weight() == 0.f) continue;
    diagonal(p[e], u, [&](float& v, u32 i, bool on) { v -= on && i < N ? c : 0.f; });
    u8* own = x + ((u.row + g) * STRIDE + u.column + 2 * t) * 2;
    u8* other = x + ((u.column + g) * STRIDE + u.row + 2 * t) * 2;
    u32 packed[2][2][4];
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
          packed[m][h][n] = scaled_f16(pack_f16(p[e].v[m][n][2 * h], p[e].v[m][n][2 * h + 1]), factor);
          *(u32*)(own + ((16 * m + 8 * h) * STRIDE + 8 * n) * 2) = packed[m][h][n];
        }
    if (u.weight() == 2.f)
#pragma unroll
      for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 h = 0; h < 2; h++)
#pragma unroll
          for (u32 n = 0; n < 4; n++)
            // Kept where registers allow it.
            *(u32*)(other + (8 * n * STRIDE + 16 * m + 8 * h) * 2) =
                transpose(EACH < 3 ? packed[m][h][n]
                                   : scaled_f16(pack_f16(p[e].v[m][n][2 * h], p[e].v[m][n][2 * h + 1]), factor));
  }
}

// (trace, squared Frobenius norm) of this thread's values.
__device__ __forceinline__ float2 moments(Values (&p)[EACH], const Unit (&units)[EACH]) {
  float trace = 0.f, squares = 0.f;
#pragma unroll
  for (u32 e = 0; e < EACH; e++) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
      const float v = p[e].v[i / 16][i / 4 % 4][i % 4];
      part[i & 1] += v * v;
    }
    squares += units[e].weight() * (part[0] + part[1]);
    diagonal(p[e], units[e], [&](float& v, u32 i, bool on) { trace += on ? v : 0.f; });
  }
  return make_float2(trace, squares);
}

// Upper bound of the largest eigenvalue of the matrix in `s` (upper units; positive semidefinite but for rounding),
// within `open` of it. 0 for zeros, NaN for NaN. `x`: X_BYTES of shared memory, whose last use is behind
// a barrier.
__device__ float largest(Values (&s)[EACH], const Unit (&units)[EACH], u8* x, float open) {
  __shared__ float4 scratch[2][WARPS];
  __shared__ Links links;
  const u32 address = (u32)__cvta_generic_to_shared(x);
  float2 mine = moments(s, units);
  float3 sums = block_sums({mine.x, mine.y, 0.f}, scratch[0]);
  if (!(sums.y > 0.f && sums.y < 1e30f)) return sums.y == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  // To a norm in [2, 4) by a power of two, whose values are normal numbers of f16.
  const int exponent = ((int)(__float_as_uint(sums.y) >> 23) - 127) >> 1;
  const float unit = __uint_as_float((u32)(128 - exponent) << 23), back = __uint_as_float((u32)(126 + exponent) << 23);
#pragma unroll
  for (u32 e = 0; e < EACH; e++) each(s[e], units[e], [&](float& v, u32, u32) { v *= unit; });
  Chain chain;
  chain.first(sums.x * unit, sums.y * unit * unit, 0.f, 0.f, links);
  for (u32 turn = 1;; turn ^= 1) {
    store(s, units, x, chain.scale, chain.shift);
    __syncthreads();
    square(s, units, address);
    mine = moments(s, units);
    sums = block_sums({mine.x, mine.y, 0.f}, scratch[turn]);
    if (!chain.go_on(sums.x, sums.y, open, links)) break;
  }
  __syncthreads();
  return threadIdx.x < 32 ? __fmul_ru(chain.certificate(sums.x, sums.y, links), back) : 0.f;
}

}  // namespace spectrum
