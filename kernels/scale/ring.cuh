// Stages of shared memory in a ring, handed from warp to warp and to the copy engine by mbarriers.
#pragma once
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

template <u32 Count> struct Ring {
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Count) stage = 0, phase ^= 1;
  }
};

// The copy engine and the tensor cores see what this warp has written, and may overwrite what it has read.
__device__ __forceinline__ void release(u32 bar, u32 lane) {
  ptx::fence_proxy_async();
  __syncwarp();
  ptx::mbarrier_arrive_if(bar, ptx::arrives(lane));
}
