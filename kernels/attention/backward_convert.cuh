// E4M3 to BF16, exact.
#pragma once
#include "ptx/convert.cuh"
#include "common/types.cuh"

__device__ __forceinline__ u32 bf16x2_from_e4m3x2(u16 x) {
  const u32 half = ptx::f16x2_from_e4m3x2(x);
  return ptx::bf16x2(ptx::f32_from_f16((u16)half), ptx::f32_from_f16((u16)(half >> 16)));
}
__device__ __forceinline__ uint4 bf16x8_from_e4m3x8(uint2 x) {
  return make_uint4(bf16x2_from_e4m3x2((u16)x.x), bf16x2_from_e4m3x2((u16)(x.x >> 16)), bf16x2_from_e4m3x2((u16)x.y),
                    bf16x2_from_e4m3x2((u16)(x.y >> 16)));
}
