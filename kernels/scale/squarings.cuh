// A certified upper bound of the largest eigenvalue of a small positive semidefinite matrix S, by shifted squarings in F16
// (docs/scale-engine.md, "Squarings"):
//
//   X_0 = a_0 (S - c_0 I),  P_j = X_j X_j^T,  X_j+1 = a_j+1 (P_j - c_j+1 I),  each X rounded to F16, a a power of two.
//
// The bound holds for any a and c. c is chosen to make the rest of the spectrum small, and kept below the middle of the
// spectrum, since beyond it the small end would be the one that is bounded. Squaring stops when the estimated slack is small.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif

namespace spectrum {

constexpr u32 N = D_HEAD;
constexpr int MAX_SQUARINGS = 9;
// A sum of tensor cores: N + 16 aligned terms, each truncated below 2^-23 of the largest.
constexpr float TRUNCATION = (N + 16) * 0x1p-23f;
// Absolute error of a squared norm below 2 that the threads of a block sum as integers (`moments`).
constexpr float INTEGER_SUM = N > 128 ? 0x1p-21f : 0x1p-24f;

using ptx::rcp_approx;
using ptx::rsqrt_approx;

// sqrt(x) or slightly more, x >= 0: the approximation is within 2^-22.9, its product within 2^-24. NaN stays NaN.
__device__ __forceinline__ float sqrt_above(float x) {
  const bool small = x < 0x1p-60f;  // the approximation flushes subnormals
  const float y = small ? x * 0x1p80f : x, root = __fmul_ru(y * rsqrt_approx(y), 1.f + 0x1p-21f);
  return x > 0.f ? (small ? __fmul_ru(root, 0x1p-40f) : root) : x;
}

// c, 1/a and a bound of ||rounding of X|| for each X, written by thread 0 and read at the end.
struct ChainRecord {
  float shift[MAX_SQUARINGS], back[MAX_SQUARINGS], error[MAX_SQUARINGS];
};

// The state of the chain, the same in every thread. Only `certificate` is rounded upwards; the rest are choices.
struct Chain {
  float shift, scale, back;  // c, a, 1/a of the next X
  float part = 1.f;          // relative change of lambda(S) by that of lambda of the last matrix
  float above;               // bound of the last matrix
  float fell = 0.f;          // relative decrease of the bound of S by the last product
  int count = 0;

  // For S of moments s1 = tr S and s2 = ||S||_F^2, known to 2^-16. `low`, `high`: estimates of the ends of its spectrum.
  __device__ __forceinline__ void start(float s1, float s2, float low, float high, ChainRecord& record) {
    above = bound(s1, s2);
    choose(s1, s2, 0.5f * (low + fmaxf(high, s2 * rcp_approx(s1))), 0x1p-19f, record, true);
  }
  // After a product of moments s1 and s2: false if less than `tolerance` of lambda(S) is estimated to be slack.
  __device__ __forceinline__ bool next(float s1, float s2, float tolerance, ChainRecord& record) {
    const float now = bound(s1, s2), before = now * rsqrt_approx(now) * back + shift, relative = rcp_approx(before);
    const float falls = part * (above * relative - 1.f);
    // The bound is assumed to keep falling as it did: by a half at least, by four fifths at most.
    const float rest = falls * fmaxf(0.25f, falls * rcp_approx(fmaxf(fell - falls, falls)));
    part *= 0.5f - 0.5f * shift * relative;
    const float mean = s2 * rcp_approx(s1), most = part * (now * rcp_approx(mean) - 1.f);
    const bool more = count < MAX_SQUARINGS && fminf(rest, most) >= tolerance;
    fell = falls, above = now;
    // In parallel with the decision, which is a long dependency chain as well.
    choose(s1, s2, 0.5f * mean, TRUNCATION * s1, record, more);
    return more;
  }

  // lambda(S), every step rounded up. The moments are within 1e-5 and INTEGER_SUM.
  __device__ __forceinline__ float certificate(float sum, float squares, const ChainRecord& record) const {
    constexpr float ABOVE = (1.f + 0x1p-22f) / N, BELOW = (1.f - 0x1p-22f) / N;  // of 1 / N
    constexpr float OTHERS = (1.f - 1.f / N) * (1.f + 0x1p-22f);
    const float s1 = __fmul_ru(sum, 1.00001f), s2 = __fmaf_ru(squares, 1.00001f, INTEGER_SUM), low = sum * 0.99999f;
    const float spread = fmaxf(__fmul_ru(OTHERS, __fsub_ru(s2, __fmul_rd(__fmul_rd(low, low), BELOW))), 0.f);
    float norm = __fadd_ru(__fadd_ru(__fmul_ru(s1, ABOVE), sqrt_above(spread)), __fmul_ru(TRUNCATION, s1));
    norm = sqrt_above(norm);
#pragma unroll 1
    for (int j = count - 1; j >= 0; j--) {
      norm = __fadd_ru(__fmul_ru(__fadd_ru(norm, record.error[j]), record.back[j]), record.shift[j]);
      if (j) norm = sqrt_above(norm);
    }
    return norm;
  }

 private:
  // s1/N + sqrt((1 - 1/N) (s2 - s1^2/N)): no eigenvalue is further from the mean.
  __device__ __forceinline__ static float bound(float s1, float s2) {
    const float mean = s1 * (1.f / N), spread = fmaxf((1.f - 1.f / N) * (s2 - s1 * mean), 1e-30f);
    return mean + spread * rsqrt_approx(spread);
  }
  // Shift (at most `half`) and scale for a matrix that is within `before` in norm; into the record if `keep`.
  __device__ __forceinline__ void choose(float s1, float s2, float half, float before, ChainRecord& record, bool keep) {
    s2 = fmaxf(s2, 1e-30f);  // a matrix so small that F16 leaves nothing of it
    const float top = s2 * rsqrt_approx(s2), room = N * top - s1;
    const float best = room > 1e-5f * s1 ? (s1 * top - s2) * rcp_approx(room) : 0.f;
    shift = fmaxf(fminf(best, half), 0.f);
    const float left = fmaxf(s2 - shift * (2.f * s1 - (float)N * shift), 1e-4f * s2);
    // The power of two that brings the norm into [1/2, 1], as far as F16 has it.
    const int power = min((126 - (int)(__float_as_uint(left) >> 23)) >> 1, 15);
    scale = __uint_as_float((u32)(127 + power) << 23), back = __uint_as_float((u32)(127 - power) << 23);
    // Rounding to F16 changes a value v by at most 2^-11 |v|, or 2^-25 if it is subnormal; a power of two below 1 changes
    // subnormals once more. And the f32 arithmetic before.
    const float rounded = 0x1p-22f * (left + 4e-5f * s2 + INTEGER_SUM) + N * N * 0x1p-50f;
    if (threadIdx.x == 0 && keep) {
      record.shift[count] = shift, record.back[count] = back;
      record.error[count] = 1e-7f + (scale < 1.f ? N * 0x1p-25f : 0.f) +
                            scale * (1.0001f * rounded * rsqrt_approx(rounded) + 0x1p-22f * (top + shift * N) + before);
    }
    count += keep;
  }
};

}  // namespace spectrum
