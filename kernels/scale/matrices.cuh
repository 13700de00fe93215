// The matrices whose largest eigenvalue `scale_eigenvalues` certifies, and how a head's Gram becomes one of them
// (docs/scale-engine.md, "Matrices"):
//   RAW_Q, RAW_K        G as it is, with the mean: sigma_Q^2, sigma_K^2
//   SCALED_Q, SCALED_K  F G_Q F and F^-1 G_K F^-1, f_b = (tr G_K,bb / tr G_Q,bb)^1/4 for rotation pair b
//   PRODUCT             H of `scale_products`, without rotation
// G + e I stands for G, e = c 2^-24 tr G (with the mean) covering every rounding of its sums. What rounding took from the
// channels before, R = sum delta_i^2, enters by sigma(exact) <= sqrt(lambda + R) + sqrt(R). Removing the mean with the sums s
// of exact channels moves G - s s^T/d by at most (2 ||s|| + sqrt(d) delta) delta / sqrt(d).
#pragma once
#include "scale/squarings.cuh"
#include "scale/segments.cuh"

enum : u32 { RAW_Q = 0, RAW_K = 1, SCALED_Q = 2, SCALED_K = 3, PRODUCT = 4 };

struct Task {
  u32 kind;
  u32 result;                // index in lambdas
  u32 first, stride, count;  // the parts of the Gram; PRODUCT: H
  u32 q_row, k_row;          // statistics of the two heads
  u32 group;                 // of a raw norm that may be skipped: the query heads that need it, from q_row on; else 0
  __device__ __forceinline__ bool of_q() const { return kind == RAW_Q || kind == SCALED_Q; }
  __device__ __forceinline__ bool scaled() const { return kind == SCALED_Q || kind == SCALED_K; }
};
static_assert(sizeof(Task) == 32, "host mirror");

// f^4 of the channel's rotation pair: tr G_K,bb / tr G_Q,bb, or 1 where one is zero.
__device__ __forceinline__ float balance(u32 i, const ChannelStats* q, const ChannelStats* k, const Shape& s) {
  const u32 other = pair_partner(i, s.rotary, s.interleaved);
  const bool rotated = i < s.rotary;
  const float of_q = q[i].norm2 + (rotated ? q[other].norm2 : 0.f), of_k = k[i].norm2 + (rotated ? k[other].norm2 : 0.f);
  return of_q > 0.f && of_k > 0.f ? of_k * spectrum::rcp_approx(of_q) : 1.f;
}

// Whether F is so close to a multiple of I for every head that needs this raw norm that the product of the scaled norms is
// at most (max f / min f) sigma_Q sigma_K, and so the raw norm not worth a certificate. By all threads; includes a barrier.
__device__ __forceinline__ bool skips_raw(const Task& task, const ChannelStats* stats, const Shape& s) {
  bool needed = false;
  for (u32 h = threadIdx.x / 32; h < task.group; h += blockDim.x / 32) {
    u32 least = 0xffffffffu, most = 0;  // positive floats are in the order of their bits; NaN is above all
    for (u32 i = threadIdx.x % 32; i < spectrum::N; i += 32) {
      const u32 bits = __float_as_uint(balance(i, stats + task.q_row + h * spectrum::N, stats + task.k_row, s));
      least = min(least, bits), most = max(most, bits);
    }
    least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most);
    needed |= !(__uint_as_float(most) <= s.skip_spread * __uint_as_float(least));
  }
  return !__syncthreads_or(needed);
}

// One channel of a matrix: the factor of its row and column, its sum where the mean is removed, and its share of the totals.
struct Channel {
  float factor, sum;
  float trace, raw, lost, mean;  // norm^2, norm^2 with the mean, R, sum^2; scaled
};
__device__ __forceinline__ Channel channel_of(u32 i, const Task& task, const ChannelStats* stats, const Shape& s) {
  const ChannelStats *q = stats + task.q_row, *k = stats + task.k_row;
  const ChannelStats own = (task.of_q() ? q : k)[i];
  float f = i < s.rotary ? s.rope_factor : 1.f;
  if (task.scaled()) {
    // In powers that cancel between q and k.
    const float f4 = balance(i, q, k, s), f2 = f4 * spectrum::rsqrt_approx(f4), f1 = f2 * spectrum::rsqrt_approx(f2);
    f *= task.of_q() ? f1 : spectrum::rcp_approx(f1);
  }
  const float f2 = f * f, sum = task.scaled() && s.mean ? own.sum : 0.f;
  return {f, sum, f2 * (task.scaled() ? own.norm2 : own.raw2), f2 * own.raw2, f2 * own.rounding, f2 * sum * sum};
}

// Sums over the channels.
struct Totals {
  float trace, raw, lost, mean;
  // e
  __device__ __forceinline__ float added(const Shape& s) const { return s.rounding * 0x1p-24f * raw; }
};

// sigma^2 of the exact channels from the certificate of their Gram, every step rounded up.
__device__ __forceinline__ float exact_lambda(float lambda, const Totals& totals, const Shape& s) {
  using spectrum::sqrt_above;
  const float lost = totals.lost * (1.f + 0x1p-20f), delta = sqrt_above(lost);
  const float sums = __fadd_ru(2.f * sqrt_above(totals.mean * (1.f + 0x1p-20f)), delta);
  const float moved = s.mean ? __fmul_ru(__fmul_ru(sums, delta), spectrum::rsqrt_approx((float)s.d_model) * (1.f + 0x1p-20f)) : 0.f;
  // Factors and channel sums in f32: within 2^-19.
  const float before = __fadd_ru(__fmul_ru(lambda, 1.f + 0x1p-19f), __fadd_ru(moved, lost));
  const float sigma = __fadd_ru(sqrt_above(before), delta);
  return __fmul_ru(sigma, sigma);
}

__device__ __forceinline__ void put_lambda(double* to, double value, u32* status) {
  *to = value;
  if (!(value < 1e300)) atomicOr(status, STATUS_NON_FINITE_BOUND);
}

// What `scale_products` leaves beside H: lambda(G_Q G_K) <= grown (lambda(H) + slack). trace: of H; 0 where a head is zero, NaN
// where a value is not finite, negative where the factorisation failed: then the product of both traces, `grown`, stands for it.
struct Product {
  double grown;
  float trace, slack;
};
static_assert(sizeof(Product) == 16, "host mirror");

__device__ __forceinline__ void put_product(double* to, const Product& product, float lambda, u32* status) {
  const double fallback = 1.0001 * product.grown;
  const double result = product.trace < 0.f ? fallback : ((double)lambda + product.slack) * product.grown * (1.0 + 0x1p-19);
  put_lambda(to, result, status);
  if (result > 0.0 && result >= fallback) atomicOr(status, STATUS_FALLBACK_BOUND);
}
