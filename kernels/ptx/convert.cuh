// Conversions between f32 and E4M3, F16, BF16; of a pair, the first argument is the low half.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Saturates at 448; NaN stays NaN.
__device__ __forceinline__ u16 e4m3x2(float lo, float hi) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 e4m3x4(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 l, h;\n"
      "cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      "mov.b32 %0, {l, h};\n}\n"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
// The same. NOTES: the upper pair first, so that the second conversion merges and no permutation follows.
__device__ __forceinline__ u32 e4m3x4_merged(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 l, h;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      "cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "mov.b32 %0, {l, h};\n}\n"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
__device__ __forceinline__ u32 f16x2_from_e4m3x2(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
}

__device__ __forceinline__ u32 f16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 bf16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u16 f16_nearest(float x) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ u16 f16_above(float x) {
  u16 r;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ u16 bf16_nearest(float x) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float f32_from_f16(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
__device__ __forceinline__ float f32_from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// What the rounding to BF16 took from a value, as a signed byte: in steps of 2^-15 of the power of two below the rounded value
// `x`, so that half a step of BF16 is 128 of them. Values below 2^-111 count as that.
__device__ __forceinline__ u32 residual_exponent(float x) { return max(__float_as_uint(x) & 0x7f800000u, 16u << 23); }
__device__ __forceinline__ float residual_value(int code, float x) {
  return (float)code * __uint_as_float(residual_exponent(x) - (15u << 23));
}
// Codes of a pair, in the low bytes. NOTES: the magic number makes the adder round, and leaves the code in the low byte; 128
// becomes 127.
__device__ __forceinline__ u32 residual_codes(float low, float high) {
  const u32 rounded = bf16x2(low, high);
  auto code = [](float value, float x) {
    const float inverse = __uint_as_float((269u << 23) - residual_exponent(x));
    return __float_as_uint(fminf(fmaf(value - x, inverse, 12582912.0f), 12582912.0f + 127.0f));
  };
  return (code(low, bf16_low(rounded)) & 0xff) | (code(high, bf16_high(rounded)) & 0xff) << 8;
}

}  // namespace ptx
