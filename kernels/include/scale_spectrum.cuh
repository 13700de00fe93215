// The largest eigenvalue of a small symmetric matrix, bounded from above by a certificate: shifted squarings on tensor
// cores, without vectors and without a state. One block a matrix.
//
//   X_0 = a_0 (S - c_0 I),  P_j = X_j X_j^T,  X_j+1 = a_j+1 (P_j - c_j+1 I), each X rounded to f16.
// With eps_j >= ||rounding of X_j|| (2^-11 ||X_j||_F, and a term for the tensor cores) the norms obey
//   ||X_j||^2 = lambda(P_j) <= (||X_j+1|| + eps_j+1) / a_j+1 + c_j+1,   lambda(S) <= (||X_0|| + eps_0) / a_0 + c_0,
// whatever a and c are, and the last one lambda(P) <= s1/n + sqrt((1 - 1/n)(s2 - s1^2/n)), s1 = tr P, s2 = ||P||_F^2 (no
// eigenvalue lies further from the mean). The shift that makes the remaining bound smallest if lambda(P) is about
// sqrt(s2) is c = (s1 T - s2) / (n T - s1), T = sqrt(s2): a flat spectrum is moved into a small ball around 0, a spiked one
// stays. The weighted mean s2/s1 <= lambda(P) says how much is still open, so squaring ends when it is little: after
// two to four products on weights, where plain squaring takes eight.
#pragma once
#include "scale_types.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif

namespace spectrum {

constexpr u32 N = D_HEAD, SIDE = (N + 31) / 32 * 32, BANDS = SIDE / 32, UNITS = BANDS * (BANDS + 1) / 2;
// 32 x 32 units of the upper triangle: one a warp, two or three where there are more than 15.
constexpr u32 EACH = UNITS <= 15 ? 1 : UNITS <= 28 ? 2 : 3, WARPS = (UNITS + EACH - 1) / EACH, THREADS = WARPS * 32;
constexpr u32 STRIDE = SIDE + 8;  // f16 values a row: eight rows of 16 bytes touch all banks
constexpr u32 X_BYTES = SIDE * STRIDE * 2;
constexpr int MOST = 9;           // products

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
  const u32 lane = threadIdx.x & 31;
  if (lane == 0) scratch[threadIdx.x >> 5] = make_float4(v.x, v.y, v.z, 0.f);
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
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
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

// X = f16(a (P - c I)), both triangles.
__device__ __forceinline__ void store(Values (&p)[EACH], const Unit (&units)[EACH], u8* x, float a, float c) {
  const u32 g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
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
          const float low = p[e].v[m][n][2 * h] * a, high = p[e].v[m][n][2 * h + 1] * a;
          packed[m][h][n] = pack_f16(low, high);
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
                transpose(EACH < 3 ? packed[m][h][n] : pack_f16(p[e].v[m][n][2 * h] * a, p[e].v[m][n][2 * h + 1] * a));
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

struct Shift {
  float c, a, top;
};
// For a matrix of trace s1 and squared Frobenius norm s2. Whatever the rounding, the result holds.
__device__ __forceinline__ Shift best_shift(float s1, float s2) {
  const float top = s2 * rsqrtf(s2), room = N * top - s1;
  const float c = room > 1e-5f * s1 ? fmaxf(__fdividef(s1 * top - s2, room), 0.f) : 0.f;
  const float left = fmaxf(s2 - 2.f * c * s1 + (float)N * c * c, 1e-4f * s2);
  return {c, rsqrtf(left), top};
}

// Upper bound of the largest eigenvalue of the matrix in `s` (upper units; positive semidefinite but for rounding), of
// trace about 1, within `open` of it. 0 for zeros, NaN for NaN. `x`: X_BYTES of shared memory, whose last use is behind a
// barrier.
__device__ float largest(Values (&s)[EACH], const Unit (&units)[EACH], u8* x, float open) {
  __shared__ float4 scratch[2][WARPS];
  __shared__ float shifts[MOST], scales[MOST], errors[MOST];
  const u32 address = (u32)__cvta_generic_to_shared(x);
  // Tensor cores: N + 16 aligned terms, each cut off below 2^-23 of the largest.
  const float cut = (N + 16) * 0x1p-23f;
  float2 mine = moments(s, units);
  float3 sums = block_sums({mine.x, mine.y, 0.f}, scratch[0]);
  if (!(sums.y > 0.f && sums.y < 1e30f)) return sums.y == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  Shift shift = best_shift(sums.x, sums.y);
  float part = 1.f - __fdividef(shift.c, shift.top);
  // Rounding to f16 changes 2^-11 of a matrix of norm 1 at most (its scale is off by a few percent where the shift leaves
  // little), and 2^-25 of each value below the normal ones.
  const float rounding = 1.07f * 0x1p-11f + N * 0x1p-25f + 1e-7f;
  float error = rounding + shift.a * 0x1p-22f * (shift.top + shift.c * N);
  store(s, units, x, shift.a, shift.c);
  __syncthreads();
  int last = 0;
  for (;; last++) {
    if (threadIdx.x == 0) shifts[last] = shift.c, scales[last] = shift.a, errors[last] = error;
    square(s, units, address);
    mine = moments(s, units);
    sums = block_sums({mine.x, mine.y, 0.f}, scratch[(last + 1) & 1]);
    // What the certificate leaves open: lambda(P) lies between s2/s1 and the bound of the head.
    const float mean = sums.x / N, spread = fmaxf((1.f - 1.f / N) * (sums.y - sums.x * mean), 1e-30f);
    const float ratio = __fdividef((mean + spread * rsqrtf(spread)) * sums.x, sums.y);
    if (last == MOST - 1 || !(sums.x > 0.f) || (last >= 1 && 0.5f * part * (ratio - 1.f) < open)) break;
    shift = best_shift(sums.x, sums.y);
    part *= 0.5f * (1.f - __fdividef(shift.c, shift.top));
    error = rounding + shift.a * (0x1p-22f * (shift.top + shift.c * N) + cut * sums.x);
    store(s, units, x, shift.a, shift.c);
    __syncthreads();
  }
  __syncthreads();
  if (threadIdx.x >= 32) return 0.f;
  // Back through the chain, every step rounded up. The sums are within 1e-5.
  const float s1 = __fmul_ru(sums.x, 1.00001f), s2 = __fmul_ru(sums.y, 1.00001f), low = sums.x * 0.99999f;
  const float spread = fmaxf(__fsub_ru(s2, __fdiv_rd(__fmul_rd(low, low), (float)N)), 0.f);
  float norm = __fadd_ru(__fadd_ru(__fdiv_ru(s1, (float)N), __fsqrt_ru(spread)), __fmul_ru(cut, s1));
  norm = __fsqrt_ru(norm);
#pragma unroll 1
  for (int j = last; j >= 0; j--) {
    norm = __fadd_ru(__fdiv_ru(__fadd_ru(norm, errors[j]), scales[j]), shifts[j]);
    if (j) norm = __fsqrt_ru(norm);
  }
  return norm;
}

}  // namespace spectrum
