// Exact where the hardware approximates.
#pragma once
#include "common/types.cuh"

namespace ptx {
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline float rsqrt_approx(float x) { return 1.0f / sqrtf(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float tanh_accurate(float x) { return tanhf(x); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline float max3_signed(float a, float b, float c) { return __int_as_float(max(max(__float_as_int(a), __float_as_int(b)), __float_as_int(c))); }
inline float max3_unsigned(float a, float b, float c) { return __uint_as_float(max(max(__float_as_uint(a), __float_as_uint(b)), __float_as_uint(c))); }
inline u32 warp_max(u32 x) { return __reduce_max_sync(~0u, x); }
inline u32 warp_sum(u32 x) {
  const u64* all = simulator::collect(x);
  u32 sum = 0;
  for (int i = 0; i < 32; i++) sum += (u32)all[i];
  return sum;
}
inline float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
}  // namespace ptx
