// The largest eigenvalue of a small positive semidefinite matrix, bounded from above by a certificate: shifted squarings in
// f16, without vectors and without a state.
//
//   X_0 = a_0 (S - c_0 I),  P_j = X_j X_j^T,  X_j+1 = a_j+1 (P_j - c_j+1 I), each X rounded to f16, a a power of two.
// With eps_j >= ||rounding of X_j|| (2^-11 ||X_j||_F, and a term for the tensor cores) the norms obey
//   ||X_j||^2 = lambda(P_j) <= (||X_j+1|| + eps_j+1) / a_j+1 + c_j+1,   lambda(S) <= (||X_0|| + eps_0) / a_0 + c_0,
// whatever a and c are, and the last one lambda(P) <= s1/n + sqrt((1 - 1/n)(s2 - s1^2/n)), s1 = tr P, s2 = ||P||_F^2 (no
// eigenvalue lies further from the mean). The shift that makes the remaining bound smallest if lambda(P) is about
// sqrt(s2) is c = (s1 T - s2) / (n T - s1), T = sqrt(s2): a flat spectrum is moved into a small ball around 0, a spiked one
// stays. At most half way between the ends of the spectrum: beyond, the small end would be the one that is bounded.
//
// Squaring ends when little is open. By how much the bound of S fell from one product to the next says what the rest will
// be: what is open is at least halved by a product. And the weighted mean s2/s1 <= lambda(P) says what it is at most.
#pragma once
#include "scale_types.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif

namespace spectrum {

constexpr u32 N = D_HEAD;
constexpr int MOST = 9;            // products
// Tensor cores: N + 16 aligned terms, each cut off below 2^-23 of the largest.
constexpr float CUT = (N + 16) * 0x1p-23f;

__device__ __forceinline__ float inverse(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float inverse_root(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Not below the root of x >= 0: the approximation is within 2^-22.9, its product within 2^-24. NaN stays NaN.
__device__ __forceinline__ float root_above(float x) {
  const bool small = x < 0x1p-60f;  // which the approximation takes for zero
  const float y = small ? x * 0x1p80f : x, root = __fmul_ru(y * inverse_root(y), 1.f + 0x1p-21f);
  return x > 0.f ? (small ? __fmul_ru(root, 0x1p-40f) : root) : x;
}

// What is remembered of each squaring, by one thread for the end.
struct Links {
  float shift[MOST], back[MOST], error[MOST];  // c, 1/a, eps
};

// The same in every thread of a block. Nothing here but `certificate` has to be exact.
struct Chain {
  float shift, scale, back;  // of the X to store: c, a, 1/a
  float part = 1.f;          // relative change of lambda(S) by that of lambda of the last matrix
  float above;               // bound of the last matrix
  float fell = 0.f;          // how far the bound of S fell last, relative
  int count = 0;

  // For S with moments s1 and s2, `low` and `high` at or inside the ends of its spectrum.
  __device__ __forceinline__ void first(float s1, float s2, float low, float high, Links& links) {
    above = bound(s1, s2);
    // These squares may be known to 2^-16 alone (whole numbers, `scale_bounds_wgmma`): of the rounding 2^-19.
    next(s1, s2, 0.5f * (low + fmaxf(high, s2 * inverse(s1))), 0x1p-19f, links, true);
  }
  // After a product with moments s1 and s2: false if less than `open` of lambda(S) is open.
  __device__ __forceinline__ bool go_on(float s1, float s2, float open, Links& links) {
    const float now = bound(s1, s2), before = now * inverse_root(now) * back + shift, relative = inverse(before);
    const float falls = part * (above * relative - 1.f);
    // The next ones as they went on so far: falling to a half at least, to a fifth at most.
    const float rest = falls * fmaxf(0.25f, falls * inverse(fmaxf(fell - falls, falls)));
    part *= 0.5f - 0.5f * shift * relative;
    const float mean = s2 * inverse(s1), most = part * (now * inverse(mean) - 1.f);
    const bool more = count < MOST && fminf(rest, most) >= open;
    fell = falls, above = now;
    // Beside the decision, not behind it: both are long chains.
    next(s1, s2, 0.5f * mean, CUT * s1, links, more);
    return more;
  }

 private:
  __device__ __forceinline__ static float bound(float s1, float s2) {
    const float mean = s1 * (1.f / N), spread = fmaxf((1.f - 1.f / N) * (s2 - s1 * mean), 1e-30f);
    return mean + spread * inverse_root(spread);
  }
  // Shift, at most `half`, and scale for a matrix that may be off by `before` in norm.
  __device__ __forceinline__ void next(float s1, float s2, float half, float before, Links& links, bool keep) {
    const float top = s2 * inverse_root(s2), room = N * top - s1;
    const float best = room > 1e-5f * s1 ? (s1 * top - s2) * inverse(room) : 0.f;
    shift = fmaxf(fminf(best, half), 0.f);
    const float left = fmaxf(s2 - shift * (2.f * s1 - (float)N * shift), 1e-4f * s2);
    // The power of two that brings the norm into [1/2, 1].
    const int power = (126 - (int)(__float_as_uint(left) >> 23)) >> 1;
    scale = __uint_as_float((u32)(127 + power) << 23), back = __uint_as_float((u32)(127 - power) << 23);
    // A value v changes by at most 2^-11 |v| or, below the normal ones, 2^-25: in norm the root of 2^-22 ||.||_F^2 + N^2 2^-50,
    // the squares known to 4e-5 s2 + 2^-24. The power of two is exact but for small values where it is below 1. And the f32
    // arithmetic before.
    const float lost = 0x1p-22f * (left + 4e-5f * s2 + 0x1p-24f) + N * N * 0x1p-50f;
    if (threadIdx.x == 0 && keep) {
      links.shift[count] = shift, links.back[count] = back;
      links.error[count] = 1e-7f + (scale < 1.f ? N * 0x1p-25f : 0.f) +
                           scale * (1.0001f * lost * inverse_root(lost) + 0x1p-22f * (top + shift * N) + before);
    }
    count += keep;
  }

 public:
  // Back through the chain, every step rounded up. The sums are within 1e-5, and squares within 2^-24 beside.
  __device__ __forceinline__ float certificate(float sum, float squares, const Links& links) const {
    constexpr float ABOVE = (1.f + 0x1p-22f) / N, BELOW = (1.f - 0x1p-22f) / N;  // of 1 / N
    constexpr float OTHERS = (1.f - 1.f / N) * (1.f + 0x1p-22f);
    const float s1 = __fmul_ru(sum, 1.00001f), s2 = __fmaf_ru(squares, 1.00001f, 0x1p-24f), low = sum * 0.99999f;
    const float spread = fmaxf(__fmul_ru(OTHERS, __fsub_ru(s2, __fmul_rd(__fmul_rd(low, low), BELOW))), 0.f);
    float norm = __fadd_ru(__fadd_ru(__fmul_ru(s1, ABOVE), root_above(spread)), __fmul_ru(CUT, s1));
    norm = root_above(norm);
#pragma unroll 1
    for (int j = count - 1; j >= 0; j--) {
      norm = __fadd_ru(__fmul_ru(__fadd_ru(norm, links.error[j]), links.back[j]), links.shift[j]);
      if (j) norm = root_above(norm);
    }
    return norm;
  }
};

__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ u32 scaled_f16(u32 pair, u32 scale) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scale));
  return product;
}
__device__ __forceinline__ u32 both_f16(float value) { return pack_f16(value, value); }

}  // namespace spectrum
