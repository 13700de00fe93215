// What an attention call leaves in device memory for a policy, one row per layer: [n_q] LogitWords, then [n_q] CastWords of q,
// [n_kv] of k, [n_kv] of v. Zero means nothing was seen; every word only grows, so that the order of arrival is without
// effect. Counts stay at 2^32 - 1 once they reach it. The host's mirror is src/stats/step_words.rs.
#pragma once
#include "common/types.cuh"

struct LogitWords {
  u32 max;       // ordered(max): sign bit set for positive values, all bits flipped for negative ones
  u32 min;       // ~ordered(min)
  u32 amax_o;    // bits of max |output|
  u32 overflow;  // logits with |x / descale| > 448
};
struct CastWords {
  u32 amax;      // bits of max |x| before the scale
  u32 overflow;  // |x / descale| > 448
  u32 beyond_rounding;  // > 464
  u32 non_finite;
};
static_assert(sizeof(LogitWords) == 16 && sizeof(CastWords) == 16, "host mirror");

__device__ __forceinline__ u32 stats_words(u32 n_q, u32 n_kv) { return 8 * (n_q + n_kv); }

// Adds n to a count, which stays at its largest value instead of wrapping. The block whose addition wraps sets it back, and any
// addition after that wraps again, so the largest value is what remains when all are done.
__device__ __forceinline__ void add_saturating(u32* count, u32 n) {
  if (atomicAdd(count, n) > ~n) atomicExch(count, ~0u);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.4028235e38f; }
// A monotone map from floats to unsigned integers, so that integer atomics give a float maximum in any order of arrival.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 b = __float_as_uint(x);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 x) { return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x); }

// Largest |logit|; 0 when there was none.
__device__ __forceinline__ float amax_of(const LogitWords& head) {
  return head.max == 0 ? 0.f : fmaxf(fabsf(unordered(head.max)), fabsf(unordered(~head.min)));
}
// Largest |x|; a NaN that the maximum lost is put back.
__device__ __forceinline__ float amax_of(const CastWords& head) {
  const float amax = __uint_as_float(head.amax);
  return head.non_finite > 0 && is_finite(amax) ? __uint_as_float(0x7fc00000u) : amax;
}
