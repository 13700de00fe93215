// Warp-level matrix products (m16n8k16) and the loads and stores of their fragments.
//
// Lane l = 4 g + t. A: a[r] holds row g + 8 (r % 2), columns 2 t + 8 (r / 2) and the next. B: b_r holds rows 2 t + 8 r and the
// next of column g. D: d[i] is row g + 8 (i / 2), column 2 t + i % 2.
#pragma once
#include "common/types.cuh"

namespace ptx {

// d += a b.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d = a b.
__device__ __forceinline__ void mma_f16_overwrite(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
// Four 8 x 8 matrices of 16-bit values from or to shared memory; lane 8 i + j gives the address of row j of matrix i.
template <bool Transposed> __device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
template <bool Transposed> __device__ __forceinline__ void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
  if constexpr (Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d) : "memory");
}
// The transpose of one 8 x 8 fragment.
__device__ __forceinline__ u32 movmatrix(u32 fragment) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

}  // namespace ptx
