#pragma once
#include "common/types.cuh"

namespace ptx {
inline u32 ld_shared_u32(u32 address) { return *reinterpret_cast<u32*>(simulator::shared(address, 4)); }
inline float ld_shared_f32(u32 address) { return __uint_as_float(ld_shared_u32(address)); }
inline uint4 ld_shared_v4(u32 address) { return *reinterpret_cast<uint4*>(simulator::shared(address, 16)); }
inline void st_shared_u32(u32 address, u32 x) { *reinterpret_cast<u32*>(simulator::shared(address, 4)) = x; }
inline void st_shared_f32(u32 address, float x) { st_shared_u32(address, __float_as_uint(x)); }
inline void st_shared_v4(u32 address, u32 a, u32 b, u32 c, u32 d) { *reinterpret_cast<uint4*>(simulator::shared(address, 16)) = {a, b, c, d}; }
inline u32 ld_relaxed(const u32* at) { return *at; }
}  // namespace ptx
