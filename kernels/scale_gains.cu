// Prepared gains of every projection: g s in f32, padded with zeros, so that the Gram kernel copies them without asking for
// a type. s is the power of two that brings the largest of 256 sampled values of g w near 1, so that f16 holds all of them;
// 1 where they are zero or not finite. A block a projection.
#include "scale_types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    scale_gains(const Projection* projections, float* gains, float* scales, u32 padded) {
  __shared__ u32 most;
  const Projection p = projections[blockIdx.x];
  auto gain = [&](u32 k) { return p.gain ? load_value(p.gain, p.vector_dtype, k) + p.gain_offset : 1.f; };
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  // Spread over all rows and, by the golden section, over the model dimension.
  const u32 row = (u32)((u64)p.rows * threadIdx.x / 256), k = (u32)((u64)(threadIdx.x * 2654435769u) * p.d_model >> 32);
  const float sample = fabsf(gain(k) * load_value(p.weight, p.dtype, p.row_stride * (i64)row + p.col_stride * (i64)k));
  atomicMax(&most, __float_as_uint(sample));
  __syncthreads();
  const u32 exponent = most >> 23;
  const u32 power = exponent == 0 || exponent >= 255 ? 127 : min(max(254 - (int)exponent, 67), 187);
  const float scale = __uint_as_float(power << 23);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (u32 i = threadIdx.x; i < padded; i += 256)
    gains[(size_t)blockIdx.x * padded + i] = i < p.d_model ? gain(i) * scale : 0.f;
}
