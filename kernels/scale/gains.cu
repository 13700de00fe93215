// Prepared gains of every projection for the Gram kernels, a block of bytes for every 128 input channels, padded with zeros; of V
// none.
// With s a power of two of the projection, by `form`:
//   SCALED   s g in f32, for grams_rounded.cu
//   SPLIT    (s g)^2 as hi + lo in the type of the weights, in the order of the fragments of grams_split.cu: within
//            2^-17 in bf16, exact for gains in bf16; rounded up in f16, which has few exponents
//   COLUMNS  and after them the columns of a right operand: s g in three terms, beta in three, |beta| in two (bf16)
//
// s brings the largest of 256 sampled values of s g w near 1, so that f16 holds all of them. Where terms are f16, it brings
// the largest gain^2 times the largest sampled weight near 2^10, so that products, their low parts and what rounding leaves of
// them stay among the normal values. 1 where these are zero or not finite.
// `scales` is (s, sum of 2^-49 / (hi + lo)): what f16 values below the normal ones may lose. A block a projection.
#include "common/warp.cuh"
#include "ptx/convert.cuh"
#include "scale/types.cuh"

enum : u32 { SCALED = 0, SPLIT = 1, COLUMNS = 2 };

__device__ __forceinline__ u32 bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ u16 bf16_above(float v) {
  const u16 d = ptx::bf16_nearest(v);
  return ptx::f32_from_bf16(d) < v ? (v > 0.f ? d + 1 : d - 1) : d;
}

// Blocks (projection, 1024 input channels). `status`: where not null, cleared for the launches after this one.
extern "C" __global__ void __launch_bounds__(256)
    scale_gains(const Projection* projections, u8* gains, float2* scales, u32 tiles, u32 form, u32* status) {
  __shared__ u32 most, widest;
  __shared__ float lost[8];
  ptx::griddepcontrol_launch_dependents();
  if (status && blockIdx.x + blockIdx.y + threadIdx.x == 0) *status = 0;
  const Projection p = projections[blockIdx.x];
  if (p.first_head == NO_HEAD) return;
  const bool f16 = p.dtype == DTYPE_F16 && form != SCALED, sums = form == COLUMNS;
  auto gain = [&](u32 k) { return p.gain ? load_value(p.gain, p.vector_dtype, k) + p.gain_offset : 1.f; };
  if (threadIdx.x == 0) most = widest = 0;
  __syncthreads();
  // Spread over all rows and, by the golden section, over the model dimension.
  const u32 row = (u32)((u64)p.rows * threadIdx.x / 256), k = (u32)((u64)(threadIdx.x * 2654435769u) * p.d_model >> 32);
  const float weight = load_value(p.weight, p.dtype, p.row_stride * (i64)row + p.col_stride * (i64)k);
  atomicMax(&most, bits(fabsf(f16 ? weight : gain(k) * weight)));
  u32 wide = 0;
  if (form != SCALED)
#pragma unroll 4
    for (u32 i = threadIdx.x; i < p.d_model; i += 256) wide = max(wide, bits(fabsf(gain(i))));
  atomicMax(&widest, wide);
  __syncthreads();
  // Binary exponents, of numbers that are zero or not finite 0.
  auto exponent = [](u32 v) { return v >> 23 == 0 || v >> 23 >= 255 ? 0 : (int)(v >> 23) - 127; };
  const int power = f16 ? (8 - exponent(most) - 2 * exponent(widest)) >> 1 : -exponent(most);
  const float scale = __uint_as_float((u32)(127 + max(-60, min(60, power))) << 23);
  // Smaller gains of bf16 weights count as this one, which is nothing beside the largest.
  const float least = f16 ? 0.f : scale * __uint_as_float(widest) * 0x1p-40f;
  auto square = [&](float g) {
    const float size = g != 0.f && fabsf(g) < least ? least : g;
    return f16 ? __fmul_ru(size, size) : size * size;
  };
  if (blockIdx.y == 0) {
    float slack = 0.f;
    if (f16)
      for (u32 i = threadIdx.x; i < p.d_model; i += 256) {
        const float whole = square(gain(i) * scale), hi = ptx::f32_from_f16(ptx::f16_nearest(whole)), both = hi + ptx::f32_from_f16(ptx::f16_above(whole - hi));
        slack += both > 0.f ? 0x1p-49f / both : 0.f;
      }
    slack = warp_sum(slack);
    if (threadIdx.x % 32 == 0) lost[threadIdx.x / 32] = slack;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < 8; w++) slack += lost[w];
      scales[blockIdx.x] = make_float2(scale, slack);
    }
  }
  const u32 tile_bytes = 128 * (sums ? 20 : 4);
  u8* target = gains + (size_t)blockIdx.x * tiles * tile_bytes;
#pragma unroll
  for (u32 n = 0; n < 4; n++) {
    const u32 i = blockIdx.y * 1024 + n * 256 + threadIdx.x;
    if (i >= tiles * 128) return;
    const float g = i < p.d_model ? gain(i) * scale : 0.f;
    u8* tile = target + i / 128 * tile_bytes;
    if (form == SCALED) {
      *(float*)(tile + i % 128 * 4) = g;
      continue;
    }
    const u32 step = i % 128 / 16, at = i % 8 / 2, half = i / 8 % 2 * 4 + i % 2 * 2;
    const float whole = square(g);
    u16 hi, lo;
    if (f16) {
      hi = ptx::f16_nearest(whole), lo = ptx::f16_above(whole - ptx::f32_from_f16(hi));
    } else {
      hi = ptx::bf16_nearest(whole), lo = ptx::bf16_nearest(whole - ptx::f32_from_bf16(hi));
    }
    *(u16*)(tile + step * 64 + at * 16 + half) = hi;
    *(u16*)(tile + step * 64 + at * 16 + 8 + half) = lo;
    if (sums) {
      const float shift = i < p.d_model && p.shift ? load_value(p.shift, p.vector_dtype, i) : 0.f;
      auto column = [&](u32 n, u16 v) { *(u16*)(tile + 512 + step * 256 + i / 8 % 2 * 128 + n * 16 + i % 8 * 2) = v; };
      auto three = [&](u32 n, float v) {
#pragma unroll
        for (u32 term = 0; term < 3; term++) {
          const u16 part = ptx::bf16_nearest(v);
          column(n + term, part), v -= ptx::f32_from_bf16(part);
        }
      };
      three(0, g), three(3, shift);
      const u16 top = ptx::bf16_nearest(fabsf(shift));
      column(6, top), column(7, bf16_above(fabsf(shift) - ptx::f32_from_bf16(top)));
    }
  }
}
