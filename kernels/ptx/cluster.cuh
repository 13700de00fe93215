// Thread-block clusters: rank, barrier, and shared memory of the other blocks.
#pragma once
#include "common/types.cuh"

namespace ptx {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks; what they wrote before is visible after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The cluster address of `address` in the shared memory of block `rank`.
__device__ __forceinline__ u32 map_shared(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ float ld_shared_cluster_f32(u32 address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint4 ld_shared_cluster_v4(u32 address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}
// Arrives at a barrier of any block if `condition`, without a branch. Orders nothing written before: a release at cluster
// scope waits for the whole device.
__device__ __forceinline__ void mbarrier_arrive_cluster_if(u32 bar, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(bar),
               "r"((u32)condition) : "memory");
}
// Stores to another block's shared memory, completing on a barrier there.
__device__ __forceinline__ void st_async(u32 address, u32 x, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(x), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void st_async(u32 address, u32 x, u32 y, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(address), "r"(x),
               "r"(y), "r"(bar) : "memory");
}

}  // namespace ptx
