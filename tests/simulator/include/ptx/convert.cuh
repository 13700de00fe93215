#pragma once
#include "common/types.cuh"

namespace simulator {
inline u8 to_e4m3(float x) {
  if (x != x) return 0x7f;
  const u32 sign = std::signbit(x) ? 0x80 : 0;
  const float a = fabsf(x);
  if (a >= 464.0f) return sign | 0x7e;
  int e = 0;
  frexpf(a, &e);                                       // a = f 2^e, f from 0.5 to 1
  const int shift = std::max(e - 4, -9);               // unit of the last of three bits after the first
  const int units = (int)nearbyintf(ldexpf(a, -shift));  // 8 to 16, or fewer where subnormal
  const u32 code = shift == -9 ? units : ((shift + 9) << 3) + units;
  return sign | std::min(code, 0x7eu);
}
inline u16 to_f16(float x) { _Float16 h = (_Float16)x; return from_bits<u16>(to_bits(h)); }
inline u16 to_bf16(float x) {
  u32 b = from_bits<u32>(to_bits(x));
  if (x != x) return 0x7fff;
  return (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
}  // namespace simulator

namespace ptx {
inline u16 e4m3x2(float lo, float hi) { return (u16)(simulator::to_e4m3(lo) | simulator::to_e4m3(hi) << 8); }
inline u32 e4m3x4(float a, float b, float c, float d) { return e4m3x2(a, b) | (u32)e4m3x2(c, d) << 16; }
inline u32 e4m3x4_merged(float a, float b, float c, float d) { return e4m3x4(a, b, c, d); }
inline u32 f16x2(float lo, float hi) { return simulator::to_f16(lo) | (u32)simulator::to_f16(hi) << 16; }
inline u32 bf16x2(float lo, float hi) { return simulator::to_bf16(lo) | (u32)simulator::to_bf16(hi) << 16; }
inline u32 f16x2_from_e4m3x2(u16 x) { return f16x2(simulator::e4m3(x & 255), simulator::e4m3(x >> 8)); }
inline u16 f16_nearest(float x) { return simulator::to_f16(x); }
inline u16 bf16_nearest(float x) { return simulator::to_bf16(x); }
inline float f32_from_f16(u16 x) { return (float)simulator::from_bits<_Float16>(x); }
inline float f32_from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
inline float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
}  // namespace ptx
