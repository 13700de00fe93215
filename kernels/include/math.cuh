// Base-2 exponentials: the special-function unit's, and one on the multiply-add pipe.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float exp2_mufu(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float log2_mufu(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 2^x = 2^n 2^f with n = round(x), f in [-1/2, 1/2], 2^f by a minimax cubic: relative error at most 1.1e-4 for x >= -120.
__device__ __forceinline__ float exp2_poly(float x) {
  x = fmaxf(x, -120.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: the low bits of x + magic hold round(x)
  float t = x + magic;
  float f = x - (t - magic);
  float p = fmaf(fmaf(fmaf(0.05550410866f, f, 0.2402265070f), f, 0.6931471806f), f, 1.0f);
  // NOTES: written as integer C++, the same two operations make the assembler serialise `wgmma` (C7511).
  float r;
  asm("{\n.reg .b32 a, b;\nmov.b32 a, %1;\nmov.b32 b, %2;\nshl.b32 b, b, 23;\nadd.s32 a, a, b;\nmov.b32 %0, a;\n}\n"
      : "=f"(r) : "f"(p), "f"(t));
  return r;
}

// NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ u32 warp_max(u32 x) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ u32 warp_sum(u32 x) {
  u32 r;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}
