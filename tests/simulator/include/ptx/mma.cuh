#pragma once
#include "common/types.cuh"

namespace ptx {
template <bool Transposed> void ldmatrix(u32 (&r)[4], u32 address) {
  const u64* rows = simulator::collect(address);
  const u32 lane = simulator::lane();
  for (u32 i = 0; i < 4; i++) {
    const auto element = [&](u32 row, u32 column) { return *reinterpret_cast<u16*>(simulator::shared((u32)rows[8 * i + row] + 2 * column, 2)); };
    const u32 a = lane / 4, b = 2 * (lane % 4);
    r[i] = Transposed ? element(b, a) | (u32)element(b + 1, a) << 16 : element(a, b) | (u32)element(a, b + 1) << 16;
  }
  __syncwarp();
}
template <bool Transposed> void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u64* rows = simulator::collect(address);
  const u32 lane = simulator::lane(), words[4] = {a, b, c, d};
  for (u32 i = 0; i < 4; i++) {
    const auto element = [&](u32 row, u32 column) -> u16& { return *reinterpret_cast<u16*>(simulator::shared((u32)rows[8 * i + row] + 2 * column, 2)); };
    const u32 x = lane / 4, y = 2 * (lane % 4);
    (Transposed ? element(y, x) : element(x, y)) = (u16)words[i];
    (Transposed ? element(y + 1, x) : element(x, y + 1)) = (u16)(words[i] >> 16);
  }
  __syncwarp();
}
}  // namespace ptx
