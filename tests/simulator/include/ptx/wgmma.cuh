// Products of a warpgroup in E4M3: begun at once, computed when they are waited for. Sums are f32, which the tensor core's are not.
#pragma once
#include "common/types.cuh"
#include "ptx/tma.cuh"

namespace ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {
  simulator::me->groups.push_back(std::move(simulator::me->open));
  simulator::me->open.clear();
}
template <int Pending> void wgmma_wait() {
  auto& groups = simulator::me->groups;
  while (groups.size() > Pending) {
    for (const simulator::Product& product : groups.front()) product.compute(product);
    groups.erase(groups.begin());
  }
}

enum class Swizzle : u64 { None = 0, B128 = 1, B64 = 2 };
inline u64 wgmma_descriptor(u32 address, u32 lead, u32 stride, Swizzle swizzle) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(stride >> 4) << 32) | ((u64)swizzle << 62);
}
inline u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

enum class Operand { E4m3, F16, Bf16 };

// 32 bytes of K of row `row` of an operand that is K-major.
inline void operand_row(u64 descriptor, u32 row, u8 (&to)[32]) {
  const u32 address = (descriptor & 0x3FFF) << 4, lead = (descriptor >> 16 & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  const Swizzle swizzle = (Swizzle)(descriptor >> 62);
  for (u32 k = 0; k < 32; k += 16) {
    u32 at = address + row / 8 * stride;
    if (swizzle == Swizzle::None) at += k / 16 * lead + row % 8 * 16;
    else at = simulator::swizzled(at + row % 8 * (swizzle == Swizzle::B128 ? 128 : 64) + k, swizzle == Swizzle::B128 ? 3 : 2);
    memcpy(to + k, simulator::shared(at, 16), 16);
  }
}

template <int N> void compute_e4m3(const simulator::Product& p) {
  const u32 thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  u8 a[2][32], b[32];
  if (p.a == nullptr) {
    for (u32 r = 0; r < 2; r++) operand_row(p.a_descriptor, row + 8 * r, a[r]);
  } else {
    for (u32 half = 0; half < 2; half++) {
      const u64* words = simulator::collect(p.a[2 * half] | (u64)p.a[2 * half + 1] << 32);
      for (u32 q = 0; q < 4; q++) {
        const u64 both = words[lane / 4 * 4 + q];
        for (u32 r = 0; r < 2; r++) {
          const u32 word = (u32)(both >> 32 * r);
          memcpy(a[r] + 16 * half + 4 * q, &word, 4);
        }
      }
    }
  }
  float x[2][32];
  for (u32 r = 0; r < 2; r++)
    for (u32 k = 0; k < 32; k++) x[r][k] = simulator::e4m3(a[r][k]);
  for (u32 c = 0; c < N / 4; c++) {
    operand_row(p.b_descriptor, 8 * (c / 2) + 2 * (lane % 4) + c % 2, b);
    float sum[2] = {};
    for (u32 k = 0; k < 32; k++) {
      const float y = simulator::e4m3(b[k]);
      sum[0] += x[0][k] * y, sum[1] += x[1][k] * y;
    }
    for (u32 r = 0; r < 2; r++) {
      float& d = p.d[4 * (c / 2) + 2 * r + c % 2];
      d = p.accumulate ? d + sum[r] : sum[r];
    }
  }
}

template <Operand Type, int N> struct Wgmma {
  static_assert(Type == Operand::E4m3, "the simulator has products in E4M3 alone");
  static void begin(float* d, const u32* a, u64 da, u64 db, bool accumulate) {
    simulator::me->open.push_back({compute_e4m3<N>, d, a, da, db, accumulate});
  }
  static void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) { begin(d, nullptr, a, b, accumulate != 0); }
  static void ss_overwrite(float (&d)[N / 2], u64 a, u64 b) { begin(d, nullptr, a, b, false); }
  static void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) { begin(d, a, 0, b, accumulate != 0); }
  static void rs_overwrite(float (&d)[N / 2], const u32* a, u64 b) { begin(d, a, 0, b, false); }
};

}  // namespace ptx
