// What a thread of the casts to E4M3 does with its 8 dims of one position of a head: loads, rotates, scales, counts. Where halves
// rotate against each other, these are 4 dims of the one half and 4 of the other.
#pragma once
#include "common/step_stats.cuh"
#include "common/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
// Of V.
#ifndef V_DIM
#define V_DIM HEAD_DIM
#endif
// Type of the input: 0 BF16, 1 F16, 2 F32.
#ifndef INPUT
#define INPUT 0
#endif
// 1: a constant of each head is subtracted from keys or values.
#ifndef CENTER
#define CENTER 0
#endif
// 0: none, 1: half-split (c with c + rotary / 2), 2: interleaved (2 c with 2 c + 1).
#ifndef ROPE
#define ROPE 0
#endif

namespace {

constexpr int kDim = HEAD_DIM, kValueDim = V_DIM;
constexpr int kRowBytes = ceil_div(kDim, 16) * 16, kValueRowBytes = ceil_div(kValueDim, 16) * 16;  // of rows in E4M3
constexpr int kPieces = kDim / 8, kValuePieces = kValueDim / 8;
constexpr int kKeys = 16;
// Whole warps; of Q and K, or V, some threads may have no row.
constexpr int kThreads = ceil_div(kKeys * (kPieces > kValuePieces ? kPieces : kValuePieces), 32) * 32;
constexpr bool kWhole = kPieces == kValuePieces && kThreads == kKeys * kPieces;  // every thread has a row
constexpr int kHeads = 4;
constexpr bool kF32 = INPUT == 2;
constexpr bool kRope = ROPE != 0, kHalfSplit = ROPE == 1;
static_assert(kDim % 8 == 0 && kValueDim % 8 == 0 && kThreads <= 1024, "a thread holds 8 dims");

// A thread's row of the block's 16, or one past them, and its 8 dims.
struct Place {
  int row, piece;
};
template <int Pieces> __device__ __forceinline__ Place place() {
  return {(int)(threadIdx.x / Pieces), (int)(threadIdx.x % Pieces)};
}

constexpr int kWords = kF32 ? 8 : 4;  // of 8 dims as they are stored

// Two halves of 4 dims.
__device__ __forceinline__ void load_halves(u32 (&w)[kWords], const void* in, i64 low, i64 high) {
  const u8* p = reinterpret_cast<const u8*>(in);
  using Half = Select<kF32, uint4, uint2>::type;
  constexpr int kBytes = kF32 ? 4 : 2;
  *reinterpret_cast<Half*>(w) = *reinterpret_cast<const Half*>(p + kBytes * low);
  *reinterpret_cast<Half*>(w + kWords / 2) = *reinterpret_cast<const Half*>(p + kBytes * high);
}
__device__ __forceinline__ void load(u32 (&w)[kWords], const void* in, i64 offset) {
  const uint4* p = reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(in) + offset * (kF32 ? 4 : 2));
#pragma unroll
  for (int i = 0; i < kWords / 4; i++) {
    const uint4 x = p[i];
    w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
  }
}
__device__ __forceinline__ float value(const u32 (&w)[kWords], int i) {
  if constexpr (kF32) return __uint_as_float(w[i]);
  const u16 half = (u16)(w[i / 2] >> (16 * (i % 2)));
  return INPUT == 1 ? ptx::f32_from_f16(half) : ptx::f32_from_bf16(half);
}

// Cosines and sines of this thread's four pairs.
struct Angles {
  float cosine[4], sine[4];
};
template <class Params> __device__ __forceinline__ void load_angles(Angles& a, const Params& p, int piece, i64 position) {
  const i64 at = position * (p.rotary / 2) + 4 * piece;
  const float4 x = *reinterpret_cast<const float4*>(p.cosine + at), y = *reinterpret_cast<const float4*>(p.sine + at);
  a.cosine[0] = x.x, a.cosine[1] = x.y, a.cosine[2] = x.z, a.cosine[3] = x.w;
  a.sine[0] = y.x, a.sine[1] = y.y, a.sine[2] = y.z, a.sine[3] = y.w;
}
// Half-split: the pairs are x[i], x[i + 4]; interleaved: x[2 i], x[2 i + 1].
__device__ __forceinline__ void rotate(float (&x)[8], const Angles& a) {
  constexpr int kStep = kHalfSplit ? 1 : 2, kPair = kHalfSplit ? 4 : 1;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float e = x[kStep * i], o = x[kStep * i + kPair];
    x[kStep * i] = fmaf(e, a.cosine[i], -o * a.sine[i]);
    x[kStep * i + kPair] = fmaf(o, a.cosine[i], e * a.sine[i]);
  }
}

// Without the center of the head, whose dims from `low` and from `high` on these are.
__device__ __forceinline__ void subtract(float (&x)[8], const float* center, int low, int high) {
  const float4 a = *reinterpret_cast<const float4*>(center + low), b = *reinterpret_cast<const float4*>(center + high);
  x[0] -= a.x, x[1] -= a.y, x[2] -= a.z, x[3] -= a.w;
  x[4] -= b.x, x[5] -= b.y, x[6] -= b.z, x[7] -= b.w;
}

// Bits of the largest |x| of the warp; a NaN counts as the largest.
__device__ __forceinline__ u32 warp_top(const float (&x)[8]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) top = ptx::max_nan(top, fabsf(x[i]));
  return ptx::warp_max(__float_as_uint(top) & 0x7fffffff);
}
// The slow path: some value of the warp saturates or is not finite.
__device__ __forceinline__ void count_past(const float (&x)[8], float to_units, CastWords* stats) {
  u32 saturated = 0, past = 0, bad = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = fabsf(x[i]), u = a * to_units;
    const bool finite = a < __int_as_float(0x7f800000);
    saturated += finite && u > 448.0f;
    past += finite && u > 464.0f;
    bad += !finite;
  }
  // Lane i adds the count of word i
  const u32 sums[3] = {ptx::warp_sum(saturated), ptx::warp_sum(past), ptx::warp_sum(bad)};
  const u32 lane = threadIdx.x % 32, mine = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
  if (lane < 3 && mine > 0) add_saturating(&stats->overflow + lane, mine);
}

}  // namespace
