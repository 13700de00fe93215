// Warpgroup matrix products on E4M3 with f32 accumulators: D(64 x N) = A(64 x 32) B(N x 32)^T (+ D).
// A from shared memory (`ss`) or registers (`rs`), B from shared memory, both K-major.
//
// Accumulator d[i] of thread (warp w, lane l): row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
// Register operand a[r] of the same thread: row 16 w + l / 4 + 8 (r % 2), bytes 16 (r / 2) + 4 (l % 4) + 0..3 of K.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// NOTES: keeps the compiler from moving reads or writes of an accumulator across the asynchronous product.
template <int Count> __device__ __forceinline__ void wgmma_hold(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; i++) asm volatile("" : "+f"(d[i])::"memory");
}

enum class Swizzle : u64 { None = 0, B128 = 1, B64 = 2 };

// K-major operand. `lead`: bytes between 16-byte columns of K (unused when swizzled); `stride`: bytes between groups of 8 rows.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 lead, u32 stride, Swizzle swizzle) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(stride >> 4) << 32) | ((u64)swizzle << 62);
}
// Moves a descriptor's start address.
__device__ __forceinline__ u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

template <int N> struct Wgmma;

#define W(...) __VA_ARGS__
#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OUT8(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), "=f"(d[i + 7])
#define OUT16(i) OUT8(i), OUT8(i + 8)
#define OUT32(i) OUT16(i), OUT16(i + 16)
#define OUT64(i) OUT32(i), OUT32(i + 32)
#define ACC16(i) ACC8(i), ACC8(i + 8)
#define ACC32(i) ACC16(i), ACC16(i + 16)
#define ACC64(i) ACC32(i), ACC32(i + 32)
#define REG0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REG16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REG32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REG48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REG64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define REG80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REG96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define REG112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Operands after the accumulators: %A.. the A descriptor or four A registers, then the B descriptor and the accumulate flag.
#define WGMMA_SHAPE(N, REGS, ACCS, OUTS, I0, I1, I2, I3, I4, I5)                                                              \
  template <> struct Wgmma<N> {                                                                                         \
    static constexpr int kAccumulators = N / 2;                                                                         \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, %" #I0 ", %" #I1 ", p, 1, 1;\n}\n" \
                   : ACCS : "l"(a), "l"(b), "r"(accumulate));                                                           \
    }                                                                                                                   \
    __device__ static __forceinline__ void start(float (&d)[N / 2], u64 a, u64 b) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, %" #I0 ", %" #I1 ", p, 1, 1;\n}\n" \
                   : OUTS : "l"(a), "l"(b), "r"(0));                                                                    \
    }                                                                                                                   \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, "                              \
                   "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1;\n}\n"                                \
                   : ACCS : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));                               \
    }                                                                                                                   \
  };

WGMMA_SHAPE(64, REG0 ", " REG16, W(ACC32(0)), W(OUT32(0)), 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(96, REG0 ", " REG16 ", " REG32, W(ACC32(0), ACC16(32)), W(OUT32(0), OUT16(32)), 48, 49, 50, 51, 52, 53)
WGMMA_SHAPE(128, REG0 ", " REG16 ", " REG32 ", " REG48, W(ACC64(0)), W(OUT64(0)), 64, 65, 66, 67, 68, 69)
WGMMA_SHAPE(160, REG0 ", " REG16 ", " REG32 ", " REG48 ", " REG64, W(ACC64(0), ACC16(64)), W(OUT64(0), OUT16(64)), 80, 81, 82, 83, 84, 85)
WGMMA_SHAPE(192, REG0 ", " REG16 ", " REG32 ", " REG48 ", " REG64 ", " REG80, W(ACC64(0), ACC32(64)), W(OUT64(0), OUT32(64)), 96, 97, 98, 99, 100, 101)
WGMMA_SHAPE(224, REG0 ", " REG16 ", " REG32 ", " REG48 ", " REG64 ", " REG80 ", " REG96, W(ACC64(0), ACC32(64), ACC16(96)), W(OUT64(0), OUT32(64), OUT16(96)), 112, 113, 114, 115, 116, 117)
WGMMA_SHAPE(256, REG0 ", " REG16 ", " REG32 ", " REG48 ", " REG64 ", " REG80 ", " REG96 ", " REG112, W(ACC64(0), ACC64(64)), W(OUT64(0), OUT64(64)), 128, 129, 130, 131, 132, 133)

#undef WGMMA_SHAPE
#undef W
#undef ACC8
#undef ACC16
#undef ACC32
#undef ACC64
#undef REG0
#undef REG16
#undef REG32
#undef REG48
#undef REG64
#undef REG80
#undef REG96
#undef REG112
