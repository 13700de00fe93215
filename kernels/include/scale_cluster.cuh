// PTX of scale kernels whose blocks work in pairs (clusters of two), and products of f16 operands in 64-byte rows. Hopper.
#pragma once
#include "scale_ptx.cuh"

namespace ptx {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of both blocks; what they wrote before is seen after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Where `address` of this block's shared memory lies in that of block `rank`.
__device__ __forceinline__ u32 at_rank(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Arrives at a barrier of either block, without a branch. Orders nothing that was written: a release to the cluster waits for
// the whole device.
__device__ __forceinline__ void cluster_arrive_if(u32 barrier, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(barrier),
               "r"((u32)condition)
               : "memory");
}
// Own shared memory to that of another block of the cluster, completing on a barrier there.
__device__ __forceinline__ void send(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// A warpgroup's registers a thread, from `START` to `COUNT`.
template <int START, int COUNT> __device__ __forceinline__ void set_registers() {
  if constexpr (COUNT > START) take_registers<COUNT>();
  if constexpr (COUNT < START) give_registers<COUNT>();
}

// Descriptor of an operand in 64-byte swizzled rows; atoms of 8 rows lie 512 bytes apart.
__device__ __forceinline__ u64 narrow_operand(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(512 >> 4) << 16 | (u64)(512 >> 4) << 32 | 2ull << 62;
}

template <int COUNT> __device__ __forceinline__ void keep_all(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// d (64 x 128) = a (64 x 16) b (128 x 16)^T + (accumulate ? d : 0), f16 in, f32 out, both in shared memory.
__device__ __forceinline__ void wgmma_f16_64x128x16(float (&d)[2][32], u64 a, u64 b, int accumulate = 1) {
#define ONE(i) "+f"(d[(i) / 32][(i) % 32])
#define FOUR(i) ONE(i), ONE(i + 1), ONE(i + 2), ONE(i + 3)
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"
      "%62,%63}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "l"(a), "l"(b), "r"(accumulate));
#undef SIXTEEN
#undef FOUR
#undef ONE
}

}  // namespace ptx
