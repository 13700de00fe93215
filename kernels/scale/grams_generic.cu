// Gram matrices of heads of any type, stride and d_head from 16 to 256, in f32 without tensor cores: y = g w is rounded
// once, products are summed in f32 and flushed every 256 input channels. Any architecture. One block a 64 x 64 block of
// one head's Gram over one range of the model dimension: grid (segments, blocks of the upper triangle).
// Rounding: at most (256 + d/256 + 3) 2^-24 tr G in norm.
#include "scale/segments.cuh"

constexpr u32 STEP = 16;
constexpr u32 TILE = 64;  // inputs, of segments

extern "C" __global__ void __launch_bounds__(256)
    scale_grams_generic(const Segment* segments, const Projection* projections, float* partials) {
  __shared__ float left[STEP][64 + 4], right[STEP][64 + 4];
  const Segment segment = segments[blockIdx.x];
  const Projection p = projections[segment.projection];
  // Block (i, j), i <= j, of the triangle, row by row.
  const u32 side = (p.d_head + 63) / 64, blocks = side * (side + 1) / 2;
  u32 i = 0, j = blockIdx.y;
  while (j >= side - i) j -= side - i, i++;
  j += i;
  const u32 tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  // Which value this thread brings: neighbours in memory to neighbours in the warp.
  const bool along_model = p.col_stride <= p.row_stride;
  float acc[4][4] = {}, sum[4][4] = {};
  const u32 end = min(segment.last * TILE, p.d_model);
  u32 since = 0;
  for (u32 k0 = segment.first * TILE; k0 < end; k0 += STEP) {
    __syncthreads();
#pragma unroll
    for (u32 e = threadIdx.x; e < STEP * 64; e += 256) {
      const u32 k = along_model ? e % STEP : e / 64, c = along_model ? e / STEP : e % 64;
      float g = 0.f;
      if (k0 + k < end) g = p.gain ? load_value(p.gain, p.vector_dtype, k0 + k) + p.gain_offset : 1.f;
      const u32 a = i * 64 + c, b = j * 64 + c;
      const i64 at = p.row_stride * (i64)segment.first_row + p.col_stride * (i64)(k0 + k);
      const bool in = k0 + k < end;
      left[k][c] = in && a < p.d_head ? g * load_value(p.weight, p.dtype, at + p.row_stride * a) : 0.f;
      right[k][c] = in && b < p.d_head ? g * load_value(p.weight, p.dtype, at + p.row_stride * b) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < STEP; k++) {
      float x[4], y[4];
#pragma unroll
      for (int q = 0; q < 4; q++) x[q] = left[k][ty * 4 + q], y[q] = right[k][tx * 4 + q];
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int r = 0; r < 4; r++) acc[q][r] += x[q] * y[r];
    }
    if (++since == 256 / STEP || k0 + STEP >= end) {
      since = 0;
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int r = 0; r < 4; r++) sum[q][r] += acc[q][r], acc[q][r] = 0.f;
    }
  }
  float* out = partials + ((size_t)segment.slot * blocks + blockIdx.y) * 4096;
#pragma unroll
  for (int q = 0; q < 4; q++)
    *(float4*)(out + (ty * 4 + q) * 64 + tx * 4) = make_float4(sum[q][0], sum[q][1], sum[q][2], sum[q][3]);
}
