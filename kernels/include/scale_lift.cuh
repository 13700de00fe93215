// Products without rotation: sigma^2 of W_Q W_K^T is at most the largest eigenvalue of H = U A U^T, where A >= G_Q and
// U^T U >= G_K. What the channels of both sides add up to, and what stands for the two Grams.
//
// A product is the same whatever its channels are scaled by, so q and k are balanced by powers of two first, and heads whose
// large channels meet small ones keep their digits. What rounding took from the operands enters by
// G <= 1/(1 - t) (G_rounded + R/t I) for any t in (0, 1) where both sides of a Gram's products were rounded, for t <= sqrt(R)/sigma
// where one was; the sums of a Gram as in scale_jobs.cuh.
#pragma once
#include "scale_jobs.cuh"

namespace spectrum {

// Within 2^-21.
__device__ __forceinline__ float root(float x) { return x > 0.f ? x * inverse_root(x) : x; }

// A power of two near (other/own)^1/4; the same of both sides cancel.
__device__ __forceinline__ float balanced(float own, float other) {
  if (!(own > 0.f && other > 0.f)) return 1.f;
  const int ratio = (int)(__float_as_uint(other) >> 23) - (int)(__float_as_uint(own) >> 23);
  const int power = ratio >= 0 ? (ratio + 2) / 4 : -((2 - ratio) / 4);
  return __uint_as_float((u32)(127 + max(-24, min(24, power))) << 23);
}

// What the channels of one side add up to, balanced.
struct SideSums {
  float raw, lost, mean;          // ||w||^2 with the mean kept, R, ||s||^2
  float of_norms, of_lost, of_s;  // sum |c_i| ||w_i||, sum |c_i| delta_i, s . c, for the other side's constants c
  __device__ __forceinline__ void add(const SideSums& more) {
    raw += more.raw, lost += more.lost, mean += more.mean;
    of_norms += more.of_norms, of_lost += more.of_lost, of_s += more.of_s;
  }
  __device__ __forceinline__ void add_warp() {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      raw += __shfl_xor_sync(0xffffffffu, raw, step), lost += __shfl_xor_sync(0xffffffffu, lost, step);
      mean += __shfl_xor_sync(0xffffffffu, mean, step), of_norms += __shfl_xor_sync(0xffffffffu, of_norms, step);
      of_lost += __shfl_xor_sync(0xffffffffu, of_lost, step), of_s += __shfl_xor_sync(0xffffffffu, of_s, step);
    }
  }
};

// One channel: what its row and column of the Gram are multiplied by, its sum, the other side's constant, and its share.
struct BalancedChannel {
  float factor, sum, constant;
  SideSums share;
};
// By a power of two f.
__device__ __forceinline__ BalancedChannel scaled_channel(const ChannelStats& own, float other_constant, float f) {
  const float s = own.sum * f, c = other_constant * inverse(f);
  const float raw = own.raw2 * f * f, lost = own.rounding * f * f;
  return {f, s, c, {raw, lost, s * s, fabsf(c) * root(raw), fabsf(c) * root(lost), c * s}};
}
__device__ __forceinline__ BalancedChannel balanced_channel(const ChannelStats& own, const ChannelStats& other) {
  return scaled_channel(own, other.constant, balanced(own.norm2, other.norm2));
}

// What stands for one side's Gram: (G + added I) / (1 - t), times `scale`; 0 for a head of zeros, NaN where values are not
// finite. `norm`: ||G||_F.
struct Lift {
  float t, added, scale, norm;
  // ||scale (G + added I)||_F, a hair below or above.
  __device__ __forceinline__ float frobenius() const { return (norm + sqrtf((float)N) * added) * scale; }
};
// Channel sums are those of exact channels, s, where the operands have s + e, ||e||^2 <= d R. Of the mean s s^T/d of what was rounded
// only 1 - tau is taken away, and R/tau added: (s + e)(s + e)^T >= (1 - tau) s s^T - (1/tau - 1) e e^T for any tau in (0, 1). Both terms
// are alike where tau is delta sqrt(d) / ||s||; s is one direction, and R/tau falls on all.
__device__ __forceinline__ float share_of_mean(const SideSums* parts, u32 warps, const Shape& shape) {
  if (!shape.mean || shape.one_sided) return 0.f;
  float lost = 0.f, mean = 0.f;
#pragma unroll 1
  for (u32 w = 0; w < warps; w++) lost += parts[w].lost, mean += parts[w].mean;
  return lost > 0.f ? fminf(2.f * root(lost * shape.d_model) * inverse_root(mean), 0.125f) : 0.f;
}
// `square`: ||G||_F^2. DEPTH: U^T U is within DEPTH 2^-24 of its trace of what it stands for; 0 where it is not factored.
// `apart`: about how far sigma_Q sigma_K is above the norm of the product, 1 where that is not known. `tau`: as above, 0 where all of
// s s^T/d was taken away.
template <u32 DEPTH>
__device__ __forceinline__ Lift lift_of(const SideSums& s, float square, const Shape& shape, float apart = 1.f, float tau = 0.f) {
  const float u24 = 0x1p-24f;
  const float delta = root(s.lost), whole = (2.f * root(s.mean) + delta) * delta * inverse_root((float)shape.d_model);
  const float moved = !shape.mean ? 0.f : tau > 0.f ? s.lost * inverse(tau) : whole;
  const float c = shape.rounding + DEPTH;
  // Both sides rounded: any t in (0, 1) holds, and the product grows by t + R/t sigma_other^2 / sigma^2 of it, so t is near delta / sigma
  // times `apart`, sigma^2 taken as ||G||_F^2 / tr G. One side: the error is known in norm alone, sqrt(R) sigma, which R / t covers where
  // t is no more than delta / sigma.
  const float sigma = root(1.0001f * root(square) + c * u24 * s.raw + moved) + 2.f * delta;
  const float wanted = shape.one_sided ? delta * inverse(sigma) : apart * root(s.lost * s.raw * inverse(square));
  const float t = s.lost > 0.f && square > 0.f ? fminf(wanted, 0.5f) : 0.f;
  // What is added is part of the trace too.
  constexpr float ITSELF = 1.02f * DEPTH * N * 0x1p-24f;
  // Where rounding left nothing at all, what there was is in R.
  const float gone = t > 0.f ? s.lost * inverse(t) : s.lost;
  const float added = (c * u24 * s.raw + moved + gone) * (1.0001f + ITSELF);
  // To a trace of 1, so that neither f32 nor f16 leaves its range.
  const float scale = inverse(s.raw + N * added);
  return {t, added, s.raw == 0.f ? 0.f : square < 3e38f && scale > 0.f && scale < 3e38f ? scale : __uint_as_float(0x7fc00000u),
          root(square) * 1.0001f};
}

// ||W c||^2 for the other side's constants c: c^T G c as computed, with its rounding and what the operands lost before.
// `per`: 1/d where the mean is removed. `sums`: roundings of the form's own.
__device__ __forceinline__ double form_above(const SideSums& s, float form, float per, u32 sums, const Shape& shape) {
  const double norm = s.of_norms * 1.0001, lost = s.of_lost * 1.0001, c = (double)shape.rounding + sums;
  const double f = fmax((double)form, 0.0) + c * 0x1p-24 * norm * norm;
  const double length = shape.one_sided ? norm : sqrt(f + (double)s.of_s * s.of_s * per * 1.0001 + lost * lost);
  // fmax drops a NaN.
  return form == form ? f + 2.0 * lost * (length + lost) : __longlong_as_double(0x7ff8000000000000ll);
}

// How far H as computed lies from U A U^T in norm, if every entry of T = U A and of U T^T is within c of the lengths of the row
// and the column that it is made of: ||U|| c ||U||_F ||A||_F + c ||U||_F ||T||_F. Given ||U||_F^2 and ||T||_F^2.
__device__ __forceinline__ float product_slack(float c, float lengths, float products, const Lift (&lifts)[2]) {
  return 1.001f * c * root(lengths) * (root(lifts[1].frobenius()) * lifts[0].frobenius() + root(products));
}

// sigma^2 from the eigenvalue of H, or from `traces`, the product of both, where there is none; both times `grown`.
__device__ __forceinline__ void put_product(double* to, bool fine, float top, float slack, double grown, double traces, u32* status) {
  const double fallback = 1.0001 * traces * grown, result = fine ? ((double)top + slack) * grown * (1.0 + 0x1p-19) : fallback;
  put_lambda(to, result, status);
  if (result > 0.0 && result >= fallback) atomicOr(status, STATUS_FALLBACK_BOUND);
}
// The same where both traces are 1.
__device__ __forceinline__ void put_product(double* to, bool fine, float top, float slack, const Lift (&lifts)[2], u32* status) {
  const double grown = 1.0 / ((1.0 - lifts[0].t) * (1.0 - lifts[1].t)) / lifts[0].scale / lifts[1].scale;
  put_product(to, fine, top, slack, grown, 1.0, status);
}

// H of a product in device memory, and what its eigenvalue is wanted for.
struct Unfinished {
  double grown, traces;  // as above
  float trace, slack;    // of H
  u32 result, fine;      // fine: 0 where there is no H
};
static_assert(sizeof(Unfinished) == 32, "host mirror");

}  // namespace spectrum
