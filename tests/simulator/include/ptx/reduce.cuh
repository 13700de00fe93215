#pragma once
#include "common/types.cuh"

namespace ptx {
inline void bulk_store(void* to, u32 from, u32 bytes) { memcpy(to, simulator::shared(from, bytes), bytes); }
inline void bulk_commit() {}
template <int Pending> void bulk_wait() {}
template <int Pending> void bulk_wait_read() {}
}  // namespace ptx
