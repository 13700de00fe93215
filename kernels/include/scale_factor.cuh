// What `scale_factor` leaves of a KV head for the products of its query heads, and the operands that both kernels keep.
//
//   G_K <= 1/((1 - t) s) F^-1 U^T U F^-1,  F powers of two that bring every channel of k near length 1,
//   A = D G_Q D (+ e I), D = F^-1 / root, root a power of two near the mean length:
//   lambda(G_Q G_K) <= root^2 / ((1 - t) s) lambda(U A U^T).
// F does not know of q, so that query heads of a group share U.
#pragma once
#include "scale_accumulator.cuh"
#include "scale_ptx.cuh"

namespace spectrum {

constexpr u32 SIDE = GRAM_SIDE * 64, TILES = (N + 15) / 16, EDGE = TILES * 16;
// An operand is 64 x 64 values of f16 in swizzled rows of 128 bytes; of a pair, value = high + low to 2^-22, low follows high.
constexpr u32 OPERAND_BYTES = 64 * 64 * 2, PAIR_BYTES = 2 * OPERAND_BYTES, FACTOR_BYTES = GRAM_BLOCKS * PAIR_BYTES;
constexpr float UP = 0x1p12f;  // of pairs: low parts are normal numbers, no value is above 4

struct FactorNotes {
  double back;   // root^2 / ((1 - t) s)
  float trace;   // of U^T U, a hair above
  float apart;   // about how far sigma_Q sigma_K is above the norm of a product of the group
  float state;   // 1: all this is there; 0: k is zero; NaN: it is not finite
  float pad;
};
static_assert(sizeof(FactorNotes) == 24, "host mirror");

// Upper 64 x 64 blocks, row by row.
__device__ __forceinline__ constexpr u32 block_number(u32 i, u32 j) { return i * GRAM_SIDE - i * (i - 1) / 2 + j - i; }

__device__ __forceinline__ SideSums sums_of_warps(const SideSums* parts, u32 warps) {
  SideSums all = parts[0];
#pragma unroll 1
  for (u32 w = 1; w < warps; w++) all.add(parts[w]);
  return all;
}

}  // namespace spectrum
