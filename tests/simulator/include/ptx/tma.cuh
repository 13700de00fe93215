// Copies by tensor maps, which driver.cpp encodes: base; element size, rank and swizzle; extents; strides; box.
#pragma once
#include "common/types.cuh"

namespace simulator {
inline u32 swizzled(u32 address, u32 swizzle) {  // 0: none, 1: 32, 2: 64, 3: 128 bytes
  return swizzle == 3 ? address ^ (address >> 7 & 7) << 4 : swizzle == 2 ? address ^ (address >> 7 & 3) << 4 : swizzle == 1 ? address ^ (address >> 7 & 1) << 4 : address;
}
inline void tma_load(u32 dst, const TensorMap* at, u32 bar, std::vector<int> first) {
  const TensorMap map = *at;
  const u32 element = map.opaque[1] & 255, rank = map.opaque[1] >> 8 & 255, swizzle = map.opaque[1] >> 16 & 255;
  if (rank != first.size()) fail("a copy of another rank than its map");
  u32 box[5];
  memcpy(box, &map.opaque[11], sizeof(box));
  u32 bytes = element;
  for (u32 i = 0; i < rank; i++) bytes *= box[i];
  shared(dst, bytes);
  if (dst % (swizzle ? 128 : 16) != 0) fail("a copy to an address that is not aligned");
  state.copies.push_back({dst, bar, bytes, [=] {
    const u32 rows = bytes / (box[0] * element);
    for (u32 row = 0; row < rows; row++) {
      bool inside = true;
      const u8* from = reinterpret_cast<const u8*>(map.opaque[0]);
      for (u32 i = 1, rest = row; i < rank; rest /= box[i], i++) {
        const long c = (long)first[i] + rest % box[i];
        inside = inside && c >= 0 && c < (long)map.opaque[2 + i];
        from += c * (long)map.opaque[6 + i];
      }
      for (u32 x = 0; x < box[0]; x++) {
        const long c = (long)first[0] + x;
        u8 value[16] = {};
        if (inside && c >= 0 && c < (long)map.opaque[2]) memcpy(value, from + c * element, element);
        memcpy(shared(swizzled(dst + (row * box[0] + x) * element, swizzle), element), value, element);
      }
    }
  }});
}
}  // namespace simulator

namespace ptx {
inline void prefetch_tensormap(const TensorMap*) {}
inline void tma_load_2d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1) { simulator::tma_load(dst, map, bar, {c0, c1}); }
inline void tma_load_3d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) { simulator::tma_load(dst, map, bar, {c0, c1, c2}); }
inline void tma_load_4d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) { simulator::tma_load(dst, map, bar, {c0, c1, c2, c3}); }
}  // namespace ptx
