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

// A warp arrives by its lane 0, once all its lanes are there. EVERY_LANE 1: by all of them, for racecheck of compute-sanitizer,
// which follows an arrival by the accesses of the arriving thread alone.
#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif
constexpr u32 ARRIVALS = EVERY_LANE ? 32 : 1;  // of a warp
__device__ __forceinline__ bool arrives(u32 lane) { return EVERY_LANE || lane == 0; }

// The copy engine and the tensor cores see what this warp has written, and may overwrite what it has read.
__device__ __forceinline__ void release(u32 bar, u32 lane) {
  ptx::fence_proxy_async();
  __syncwarp();
  ptx::mbarrier_arrive_if(bar, arrives(lane));
}
