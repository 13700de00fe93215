// Position in a ring of shared-memory buffers.
#pragma once
#include "common/types.cuh"

// The next of `Stages` buffers and the parity of its phase.
template <int Stages> struct Ring {
  u32 index = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == Stages) {
      index = 0;
      parity ^= 1;
    }
  }
};
