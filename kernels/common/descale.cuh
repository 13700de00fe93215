// The descale that maps a bound onto a target, the same bits as `Descale::covering` on the host.
#pragma once

// Smallest f32 s with s * target >= bound in f64; 1 for a zero bound; NaN where the bound is negative or not finite, or s
// leaves the range of f32.
__device__ __forceinline__ float smallest_descale(double bound, double target) {
  const float nan = __uint_as_float(0x7fc00000u);
  if (!(bound >= 0.0) || bound > 1e300) return nan;
  if (bound == 0.0) return 1.f;
  float s = (float)(bound / target);
  if ((double)s * target < bound) s = __uint_as_float(__float_as_uint(s) + 1);
  // A subnormal descale would make 1 / descale infinite.
  s = fmaxf(s, 1.17549435e-38f);
  return s <= 3.4028235e38f ? s : nan;
}
