// Launches run one after another, and threads have all registers they want.
#pragma once
#include "common/types.cuh"

namespace ptx {
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
template <int Count> void setmaxnreg_inc() {}
template <int Count> void setmaxnreg_dec() {}
inline u32 thread_index() { return threadIdx.x; }
inline u32 block_index() { return blockIdx.x; }
inline int opaque_zero() { return 0; }
}  // namespace ptx
