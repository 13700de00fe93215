// Pairs of 16-bit values: F16 and the signed integers of the same bits, and products that are summed in F16.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace ptx {

__device__ __forceinline__ u32 max_s16x2(u32 a, u32 b) {
  u32 r;
  asm("max.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// One instruction.
__device__ __forceinline__ u32 max3_s16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("{\n.reg .b32 t;\nmax.s16x2 t, %1, %2;\nmax.s16x2 %0, t, %3;\n}\n" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Of F16; a NaN loses.
__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
  u32 r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 exp2_f16x2(u32 x) {
  u32 r;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
// The low (high) halves of two registers.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ float f32_low(u32 pair) {
  float r;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}\n" : "=f"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ float f32_high(u32 pair) {
  float r;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}\n" : "=f"(r) : "r"(pair));
  return r;
}
// The negatives of two values rounded up, so rounded down.
__device__ __forceinline__ u32 negated_above(float a, float b) {
  u32 r;
  asm("{\n.reg .b16 l, h;\ncvt.rm.f16.f32 l, %1;\ncvt.rm.f16.f32 h, %2;\nmov.b32 %0, {l, h};\n}\n" : "=r"(r) : "f"(-a), "f"(-b));
  return r;
}
__device__ __forceinline__ u32 shuffle_xor(u32 x, int lanes) {
  u32 r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(r) : "r"(x), "r"(lanes));
  return r;
}
// E4M3 of two pairs, the first low.
__device__ __forceinline__ u32 e4m3x4_from_f16x2(u32 a, u32 b) {
  u32 r;
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f16x2 h, %2;\ncvt.rn.satfinite.e4m3x2.f16x2 l, %1;\nmov.b32 %0, {l, h};\n}\n" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// D(64 x N) = A(64 x 32) B(N x 32)^T (+ D) of E4M3 operands in shared memory, summed in F16. Register i of a thread is of row
// 16 w + l / 4 + 8 (i % 2) and of the columns 8 (i / 2) + 2 (l % 4) and the next.
template <int N> struct WgmmaF16;
#define R8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define REGS32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
template <> struct WgmmaF16<128> {
  __device__ static __forceinline__ void ss(u32 (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {" REGS32 "}, %32, %33, 1, 1, 1;\n"
                 : R8("+r", 0), R8("+r", 8), R8("+r", 16), R8("+r", 24) : "l"(a), "l"(b));
  }
  __device__ static __forceinline__ void ss_overwrite(u32 (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {" REGS32 "}, %32, %33, 0, 1, 1;\n"
                 : R8("=r", 0), R8("=r", 8), R8("=r", 16), R8("=r", 24) : "l"(a), "l"(b));
  }
};
#undef R8
#undef REGS32

}  // namespace ptx
