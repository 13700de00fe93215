// Products without rotation: what stands for the Grams of a query head and its key head (docs/scale-engine.md, "Products").
//
// A product does not change when channel i of q is multiplied by f_i and that of k divided by it: both sides are balanced by
// powers of two first, so that heads whose large channels meet small ones keep their digits. What rounding took from the
// operands enters by G <= 1/(1 - t) (G_rounded + R/t I) for any t in (0, 1) where both sides of a Gram's products were
// rounded, for t <= sqrt(R)/sigma where one was; the sums of a Gram as in matrices.cuh.
#pragma once
#include "scale/matrices.cuh"

namespace spectrum {

// Within 2^-21.
__device__ __forceinline__ float root(float x) { return x > 0.f ? x * rsqrt_approx(x) : x; }

// What the channels of one side add up to, balanced.
struct SideSums {
  float raw, lost, mean;             // ||w||^2 with the mean, R, ||s||^2
  float by_norm, by_delta, by_sum;   // sum |c_i| ||w_i||, sum |c_i| delta_i, s . c, for the other side's constants c
};
// One channel: the factor of its row and column, its sum, the other side's constant, and its share of the sums.
struct BalancedChannel {
  float factor, sum, constant;
  SideSums share;
};
__device__ __forceinline__ BalancedChannel balanced_channel(const ChannelStats& own, const ChannelStats& other) {
  // A power of two near (other / own)^1/4: those of both sides cancel.
  float f = 1.f;
  if (own.norm2 > 0.f && other.norm2 > 0.f) {
    const int ratio = (int)(__float_as_uint(other.norm2) >> 23) - (int)(__float_as_uint(own.norm2) >> 23);
    const int power = ratio >= 0 ? (ratio + 2) / 4 : -((2 - ratio) / 4);
    f = __uint_as_float((u32)(127 + max(-24, min(24, power))) << 23);
  }
  const float s = own.sum * f, c = other.constant * rcp_approx(f), raw = own.raw2 * f * f, lost = own.rounding * f * f;
  return {f, s, c, {raw, lost, s * s, fabsf(c) * root(raw), fabsf(c) * root(lost), c * s}};
}

// The channel sums are s, of exact channels, where the operands have s + e, ||e||^2 <= d R. Of the mean s s^T/d only the share
// 1 - tau is removed, and R/tau I added: (s + e)(s + e)^T >= (1 - tau) s s^T - (1/tau - 1) e e^T for any tau in (0, 1).
__device__ __forceinline__ float share_of_mean(const SideSums& s, const Shape& shape) {
  if (!shape.mean || shape.one_sided || !(s.lost > 0.f)) return 0.f;
  return fminf(2.f * root(s.lost * shape.d_model) * rsqrt_approx(s.mean), 0.125f);
}

// What stands for one side's Gram: (G + added I) / (1 - t), times `scale`; scale is 0 for a head of zeros, NaN where a value is
// not finite.
struct Lift {
  float t, added, scale, norm;  // norm: ||scale (G + added I)||_F, or slightly more
};
// `square`: ||G||_F^2. `depth`: its factor U^T U is within depth 2^-24 of its trace. `loose`: an estimate of sigma_Q sigma_K over
// the norm of the product.
__device__ __forceinline__ Lift lift_of(const SideSums& s, float square, float depth, float loose, const Shape& shape) {
  const float delta = root(s.lost), tau = share_of_mean(s, shape);
  const float whole = (2.f * root(s.mean) + delta) * delta * rsqrt_approx((float)shape.d_model);
  const float moved = !shape.mean ? 0.f : tau > 0.f ? s.lost * rcp_approx(tau) : whole;
  const float sums = (shape.rounding + depth) * 0x1p-24f * s.raw;
  // Both sides rounded: any t holds, and the product grows by t + R/t sigma_other^2 / sigma^2 of it, so t is near delta / sigma
  // times `loose`, sigma^2 taken as ||G||_F^2 / tr G. One side: the error is known in norm alone, sqrt(R) sigma, which R/t covers
  // where t is at most delta / sigma.
  const float sigma = root(1.0001f * root(square) + sums + moved) + 2.f * delta;
  const float wanted = shape.one_sided ? delta * rcp_approx(sigma) : loose * root(s.lost * s.raw * rcp_approx(square));
  const float t = s.lost > 0.f && square > 0.f ? fminf(wanted, 0.5f) : 0.f;
  // Where rounding left nothing, all there was is in R. What is added is part of the trace too.
  const float added = (sums + moved + (t > 0.f ? s.lost * rcp_approx(t) : s.lost)) * (1.0001f + 1.02f * depth * N * 0x1p-24f);
  // To a trace of 1, so that neither f32 nor F16 leaves its range.
  const float scale = rcp_approx(s.raw + N * added);
  const bool finite = square < 3e38f && scale > 0.f && scale < 3e38f;
  return {t, added, s.raw == 0.f ? 0.f : finite ? scale : __uint_as_float(0x7fc00000u), (root(square) * 1.0001f + sqrtf((float)N) * added) * scale};
}

// ||W c||^2 for the other side's constants c: c^T G c as computed, with its own rounding, `depth` deep, and what the operands
// lost. `per`: the share of s s^T that was removed.
__device__ __forceinline__ double form_above(const SideSums& s, float form, float per, u32 depth, const Shape& shape) {
  const double norm = s.by_norm * 1.0001, lost = s.by_delta * 1.0001, c = (double)shape.rounding + depth;
  const double f = fmax((double)form, 0.0) + c * 0x1p-24 * norm * norm;
  const double length = shape.one_sided ? norm : sqrt(f + (double)s.by_sum * s.by_sum * per * 1.0001 + lost * lost);
  return form == form ? f + 2.0 * lost * (length + lost) : __longlong_as_double(0x7ff8000000000000ll);  // fmax drops a NaN
}

}  // namespace spectrum
