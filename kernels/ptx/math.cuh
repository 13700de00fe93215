// Arithmetic that C++ does not name: special-function approximations, integer and NaN-aware maxima, warp reductions, packed
// 16-bit operations.
#pragma once
#include "common/types.cuh"

namespace ptx {

__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float log2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float rsqrt_approx(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Off by 5e-4 of the result.
__device__ __forceinline__ float tanh_approx(float x) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Off by 3e-7.
__device__ __forceinline__ float tanh_accurate(float x) {
  return fmaf(-2.0f, rcp_approx(exp2_approx(2.885390081777927f * x) + 1.0f), 1.0f);
}

// NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// The maximum of three bit patterns compared as signed (unsigned) integers: one instruction for two values.
// NOTES: with integer types outside the assembly, the assembler serialises `wgmma` (C7511).
__device__ __forceinline__ float max3_signed(float a, float b, float c) {
  float r;
  asm("{\n.reg .s32 a, b, c;\nmov.b32 a, %1;\nmov.b32 b, %2;\nmov.b32 c, %3;\nmax.s32 a, a, b;\nmax.s32 a, a, c;\nmov.b32 %0, a;\n}\n"
      : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
__device__ __forceinline__ float max3_unsigned(float a, float b, float c) {
  float r;
  asm("{\n.reg .u32 a, b, c;\nmov.b32 a, %1;\nmov.b32 b, %2;\nmov.b32 c, %3;\nmax.u32 a, a, b;\nmax.u32 a, a, c;\nmov.b32 %0, a;\n}\n"
      : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

// Over all lanes of a warp.
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
// Volatile, so that it stays where it is written.
__device__ __forceinline__ float shuffle_xor(float x, int lanes) {
  float r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(r) : "f"(x), "r"(lanes));
  return r;
}

// Two 16-bit values at once, each rounded once: F16 where `Half`, else BF16.
template <bool Half> __device__ __forceinline__ u32 fma_x2(u32 a, u32 b, u32 c) {
  u32 d;
  if constexpr (Half) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <bool Half> __device__ __forceinline__ u32 mul_x2(u32 a, u32 b) {
  u32 d;
  if constexpr (Half) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <bool Half> __device__ __forceinline__ u32 neg_x2(u32 a) {
  u32 d;
  if constexpr (Half) asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  else asm("neg.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace ptx
