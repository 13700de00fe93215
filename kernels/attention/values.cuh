// Values of a tile in shared memory, in the layout that P V takes (forward.cu): groups of 16 keys, [dim / 8][8][16] bytes, byte
// 4 t + e of a dim being key 8 (e / 2) + 2 t + e % 2 of the group.
#pragma once
#include "attention/config.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace {

constexpr int kGroupBytes = 16 * kDim;

// Sets the values of keys from `keys` on to zero, by one warpgroup.
__device__ __forceinline__ void clear_keys(u32 tile, int keys) {
  const u32 thread = threadIdx.x % 128;
  const int whole = keys / 16, partial = keys % 16;
  if (partial > 0 && thread < kDim) {
    const u32 at = tile + whole * kGroupBytes + 16 * thread;
    const uint4 x = ptx::ld_shared_v4(at);
    u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (8 * (i % 4 / 2) + 2 * (i / 4) + i % 2 >= partial) words[i / 4] &= ~(0xffu << 8 * (i % 4));
    ptx::st_shared_v4(at, words[0], words[1], words[2], words[3]);
  }
  for (u32 at = ceil_div(keys, 16) * kGroupBytes + 16 * thread; at < kTileBytes; at += 16 * 128)
    ptx::st_shared_v4(tile + at, 0, 0, 0, 0);
}

// Sets the values of keys from `keys` on to zero, by each warpgroup: a page may hold NaN past the end of its sequence, and zero
// times NaN is NaN. Another warpgroup may do the same at the same time: each stores a byte of a key that exists as it was, and zero
// for any other, so both store the same whichever of them comes first, and neither sees the tile before its own barrier.
// `consumers`: warpgroups that call this.
__device__ __forceinline__ void clear_past_keys(u32 tile, int keys, [[maybe_unused]] int consumers) {
#if EVERY_LANE
  // Racecheck takes equal stores for a race: the first warpgroup clears for all
  if (threadIdx.x < 128) clear_keys(tile, keys);
  ptx::fence_proxy_async();
  if (consumers > 1) ptx::named_barrier_sync<1, 256>();
  else ptx::named_barrier_sync<1, 128>();
#else
  clear_keys(tile, keys);
  ptx::fence_proxy_async();
  if (threadIdx.x < 128) ptx::named_barrier_sync<1, 128>();
  else ptx::named_barrier_sync<2, 128>();
#endif
}

#if V_ROWS
// Transposes rows of 128 keys, swizzled by the copy engine, to the layout above. `warp`: this warp among `kTransposeWarps`.
// A transposed load gives a lane two dims of four keys; two byte permutations give it one word of each dim. Lanes of the upper
// half swap the two, so that a store of eight dims meets every bank once.
__device__ __forceinline__ void transpose_values(u32 rows, u32 tile, int warp) {
  const u32 lane = threadIdx.x % 32;
  const u32 first = lane < 16 ? 0x6420 : 0x7531, second = lane < 16 ? 0x7531 : 0x6420;
  // Matrix m of a load: keys 8 (m % 2) and on, dims 16 (m / 2) and on; lane 8 m + r names row r
  const u32 key = lane % 16, column = lane / 16;
  // Row r of matrix m of a store: dims 16 (m / 2) + 2 r, + 1 where rows of the upper half meet the first word
  const u32 r = lane % 8, m = lane / 8, dim = 16 * (m / 2) + 2 * r + ((r / 4) ^ (m % 2));
  constexpr int kColumns = kDim / 32;
#pragma unroll 2
  for (int i = warp; i < kBlockN / 16 * kColumns; i += kTransposeWarps) {
    const u32 group = i / kColumns, block = i % kColumns;
    const u32 row = 16 * group + key, chunk = 2 * block + column;
    const u32 swizzled = kDim == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
    u32 x[4];
    ptx::ldmatrix<true>(x, rows + row * kDim + 16 * swizzled);
    const u32 a = __byte_perm(x[0], x[1], first), b = __byte_perm(x[0], x[1], second);
    const u32 c = __byte_perm(x[2], x[3], first), d = __byte_perm(x[2], x[3], second);
    ptx::stmatrix<false>(tile + group * kGroupBytes + 512 * block + 16 * dim, a, b, c, d);
  }
}
#endif

}  // namespace
