// Warpgroup matrix products with f32 accumulators: D(64 x N) = A(64 x K) B(N x K)^T (+ D), K = 32 for E4M3, 16 for F16 and
// BF16. A from shared memory (`ss`) or registers (`rs`), B from shared memory.
//
// Accumulator d[i] of thread (warp w, lane l): row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
// Register operand a[r] of the same thread: row 16 w + l / 4 + 8 (r % 2), bytes 16 (r / 2) + 4 (l % 4) + 0..3 of K.
#pragma once
#include "common/types.cuh"

namespace ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Pending` groups are in flight. Accumulators of the others need a `keep` (fence.cuh) after it, so that
// the compiler moves no access to them across the product.
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

enum class Swizzle : u64 { None = 0, B128 = 1, B64 = 2 };

// Descriptor of an operand in shared memory. K-major: `lead` is bytes between 16-byte columns of K (unused when swizzled),
// `stride` bytes between groups of 8 rows.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 lead, u32 stride, Swizzle swizzle) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(stride >> 4) << 32) | ((u64)swizzle << 62);
}
// The descriptor `bytes` further on.
__device__ __forceinline__ u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

enum class Operand { E4m3, F16, Bf16 };
template <Operand Type, int N> struct Wgmma;

#define LIST(...) __VA_ARGS__
#define IO8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define IO32(c, i) IO8(c, i), IO8(c, i + 8), IO8(c, i + 16), IO8(c, i + 24)
#define IO4(c) c(d[0]), c(d[1]), c(d[2]), c(d[3])
#define IO48(c) IO32(c, 0), IO8(c, 32), IO8(c, 40)
#define IO64(c) IO32(c, 0), IO32(c, 32)
#define IO96(c) IO64(c), IO32(c, 64)
#define IO128(c) IO96(c), IO32(c, 96)
#define REGS4 "%0, %1, %2, %3"
#define REGS32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS48 REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS64 REGS48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS96 REGS64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGS128 REGS96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// I0 to I6 are the numbers of the operands after the accumulators.
#define WGMMA_E4M3(N, REGS, ACCUMULATORS, OUTPUTS, I0, I1, I2, I3, I4, I5)                                                \
  template <> struct Wgmma<Operand::E4m3, N> {                                                                            \
    /* d += a b, or d = a b where not `accumulate`. */                                                                   \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, %" #I0 ", %" #I1 ", p, 1, 1;\n}\n" \
                   : ACCUMULATORS : "l"(a), "l"(b), "r"(accumulate));                                                    \
    }                                                                                                                     \
    /* d = a b. NOTES: as an output operand alone the old accumulators cost no registers. */                             \
    __device__ static __forceinline__ void ss_overwrite(float (&d)[N / 2], u64 a, u64 b) {                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, %" #I0 ", %" #I1 ", p, 1, 1;\n}\n" \
                   : OUTPUTS : "l"(a), "l"(b), "r"(0));                                                                  \
    }                                                                                                                     \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, "                               \
                   "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1;\n}\n"                                   \
                   : ACCUMULATORS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                \
    }                                                                                                                     \
    __device__ static __forceinline__ void rs_overwrite(float (&d)[N / 2], const u32* a, u64 b) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, "                               \
                   "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1;\n}\n"                                   \
                   : OUTPUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(0));                              \
    }                                                                                                                     \
  };
// 16-bit operands may be transposed: stored with the side of 64 (of N) contiguous.
#define WGMMA_16BIT(TYPE, TEXT, N, REGS, ACCUMULATORS, I0, I1, I2, I3, I4, I5, I6)                                        \
  template <> struct Wgmma<Operand::TYPE, N> {                                                                            \
    template <bool TransposedA, bool TransposedB>                                                                         \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TEXT " {" REGS "}, %" #I0 ", %" #I1 ", p, 1, 1, "   \
                   "%" #I3 ", %" #I4 ";\n}\n"                                                                            \
                   : ACCUMULATORS : "l"(a), "l"(b), "r"(accumulate), "n"((int)TransposedA), "n"((int)TransposedB));      \
    }                                                                                                                     \
    template <bool TransposedB>                                                                                           \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TEXT " {" REGS "}, "                                \
                   "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}\n"                         \
                   : ACCUMULATORS                                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"((int)TransposedB));        \
    }                                                                                                                     \
  };

WGMMA_E4M3(8, REGS4, LIST(IO4("+f")), LIST(IO4("=f")), 4, 5, 6, 7, 8, 9)
WGMMA_E4M3(64, REGS32, LIST(IO32("+f", 0)), LIST(IO32("=f", 0)), 32, 33, 34, 35, 36, 37)
WGMMA_E4M3(96, REGS48, LIST(IO48("+f")), LIST(IO48("=f")), 48, 49, 50, 51, 52, 53)
WGMMA_E4M3(128, REGS64, LIST(IO64("+f")), LIST(IO64("=f")), 64, 65, 66, 67, 68, 69)
WGMMA_E4M3(192, REGS96, LIST(IO96("+f")), LIST(IO96("=f")), 96, 97, 98, 99, 100, 101)
WGMMA_E4M3(256, REGS128, LIST(IO128("+f")), LIST(IO128("=f")), 128, 129, 130, 131, 132, 133)
WGMMA_16BIT(F16, "f16.f16", 8, REGS4, LIST(IO4("+f")), 4, 5, 6, 7, 8, 9, 10)
WGMMA_16BIT(Bf16, "bf16.bf16", 8, REGS4, LIST(IO4("+f")), 4, 5, 6, 7, 8, 9, 10)
WGMMA_16BIT(F16, "f16.f16", 64, REGS32, LIST(IO32("+f", 0)), 32, 33, 34, 35, 36, 37, 38)
WGMMA_16BIT(Bf16, "bf16.bf16", 64, REGS32, LIST(IO32("+f", 0)), 32, 33, 34, 35, 36, 37, 38)
WGMMA_16BIT(Bf16, "bf16.bf16", 96, REGS48, LIST(IO48("+f")), 48, 49, 50, 51, 52, 53, 54)
WGMMA_16BIT(F16, "f16.f16", 96, REGS48, LIST(IO48("+f")), 48, 49, 50, 51, 52, 53, 54)
WGMMA_16BIT(F16, "f16.f16", 128, REGS64, LIST(IO64("+f")), 64, 65, 66, 67, 68, 69, 70)
WGMMA_16BIT(F16, "f16.f16", 192, REGS96, LIST(IO96("+f")), 96, 97, 98, 99, 100, 101, 102)
WGMMA_16BIT(F16, "f16.f16", 256, REGS128, LIST(IO128("+f")), 128, 129, 130, 131, 132, 133, 134)
WGMMA_16BIT(Bf16, "bf16.bf16", 128, REGS64, LIST(IO64("+f")), 64, 65, 66, 67, 68, 69, 70)

#undef LIST
#undef IO4
#undef IO8
#undef IO32
#undef IO48
#undef IO64
#undef IO96
#undef IO128
#undef REGS4
#undef REGS32
#undef REGS48
#undef REGS64
#undef REGS96
#undef REGS128
#undef WGMMA_E4M3
#undef WGMMA_16BIT

}  // namespace ptx
