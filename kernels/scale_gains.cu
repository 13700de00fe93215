// Prepared gains: g and g^2 in f32, rows padded with zeros, so that the Gram kernels copy them without asking for a
// type. One thread a value: grid (ceil(padded / 256), rows).
#include "scale_types.cuh"

struct GainRow {
  u64 gain;  // 0: all ones
  u32 dtype;
  u32 d_model;
  float offset;
  u32 pad;
};
static_assert(sizeof(GainRow) == 24, "host mirror");

extern "C" __global__ void __launch_bounds__(256)
    scale_gains(const GainRow* rows, float* gain, float* square, u32 padded) {
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= padded) return;
  const GainRow row = rows[blockIdx.y];
  float g = 0.f;
  if (i < row.d_model) g = row.gain ? load_value(row.gain, row.dtype, i) + row.offset : 1.f;
  gain[(size_t)blockIdx.y * padded + i] = g;
  square[(size_t)blockIdx.y * padded + i] = g * g;
}
