// Prepared gains: g^2 as a sum of two bf16, rows padded with zeros, so that the Gram kernel copies them without asking
// for a type. One thread two values: grid (ceil(padded / 512), rows).
#include "scale_ptx.cuh"

struct GainRow {
  u64 gain;  // 0: all ones
  u32 dtype;
  u32 d_model;
  float offset;
  u32 pad;
};
static_assert(sizeof(GainRow) == 24, "host mirror");

// g^2 of two neighbours as (high, low), each a packed pair of bf16.
extern "C" __global__ void __launch_bounds__(256) scale_gains(const GainRow* rows, uint2* squares, u32 padded) {
  const u32 i = (blockIdx.x * 256 + threadIdx.x) * 2;
  if (i >= padded) return;
  const GainRow row = rows[blockIdx.y];
  u32 high[2], low[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float g = 0.f;
    if (i + j < row.d_model) g = row.gain ? load_value(row.gain, row.dtype, i + j) + row.offset : 1.f;
    const float square = g * g;
    high[j] = ptx::pack_bf16(square, 0.f);
    low[j] = ptx::pack_bf16(square - bf16_low(high[j]), 0.f);
  }
  squares[(size_t)blockIdx.y * (padded / 2) + i / 2] = make_uint2(high[0] | high[1] << 16, low[0] | low[1] << 16);
}
