// Shared memory of the attention backward: its layout, the products' view of it, and how keys and values come to it.
#pragma once
#include "attention/backward_convert.cuh"
#include "attention/backward_walk.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

namespace {

constexpr int kConsumers = 2;
constexpr int kStages = kWide ? 1 : 2;

constexpr int kRun = 128;                         // bytes of a swizzled row
constexpr int kKeyRun = kKeys * kRun;             // 64 columns of K or V in BF16
constexpr int kRowRun = kRows * kRun;             // 64 columns of Q or dO in BF16
constexpr int kRuns = kDim / 64;
constexpr int kRow8 = kDim < kRun ? kDim : kRun;  // bytes of an E4M3 row in shared memory; wide ones lie in runs of 128 columns
constexpr int kRuns8 = kDim / kRow8;
constexpr int kOwn = kWide ? 128 : kColumns;      // columns of dK and dV that a consumer adds up
constexpr int kPieces = kDim / 16;                // of 16 columns, of a row
constexpr int kScoreBytes = (DQ8 ? 1 : 2) * kKeys * kRows;  // dS^T in BF16: rows are keys, runs of 64 queries; or dS in E4M3
constexpr int kScoreStages = 2;

constexpr int kStageQ8 = 0;
constexpr int kStageQ16 = kRows * kDim;
constexpr int kStageDOut = kStageQ16 + 2 * kRows * kDim;
constexpr int kStageBytes = kStageDOut + 2 * kRows * kDim;

constexpr int kOffsetK16 = 0;  // DQ8: K^T in E4M3
constexpr int kOffsetV16 = kOffsetK16 + (DQ8 ? kKeys * kDim : kRuns * kKeyRun);
constexpr int kOffsetStages = kOffsetV16 + kRuns * kKeyRun;
constexpr int kOffsetScores = kOffsetStages + kStages * kStageBytes;
constexpr int kOffsetK8 = kOffsetScores + kScoreStages * kScoreBytes;
constexpr int kOffsetTerms = kOffsetK8 + kKeys * kDim;
constexpr int kOffsetSums = kOffsetTerms + kStages * kTermFloats * 4;
constexpr int kOffsetBarriers = kOffsetSums + 4096 * 4 * kConsumers;
// 1024 bytes of slack align the swizzle atoms. The host reads this value as SHARED_BYTES below.
constexpr int kFullQ8 = 0, kFullDOut = 1, kFullQ16 = 2, kRings = 3;  // barriers: kRings x stages full, as many empty
constexpr int kOffsetOrder = kOffsetBarriers + 16 * kRings * kStages;
constexpr bool kChecksOrder = DETERMINISTIC && VARLEN;
constexpr int kSharedBytes = kOffsetOrder + (kChecksOrder ? 64 : 0) + 1024;
static_assert(kSharedBytes <= 232448, "shared memory of one multiprocessor");
static_assert(kSplits == 1 || (kDim == 128 && !DETERMINISTIC), "tiles of 128 queries leave no registers for it");

using LogitMma = ptx::Wgmma<ptx::Operand::E4m3, kRows>;
using GradMma = ptx::Wgmma<ptx::Operand::Bf16, kRows>;
using KeyMma = ptx::Wgmma<ptx::Operand::Bf16, kOwn>;
using QueryMma = ptx::Wgmma<ptx::Operand::Bf16, 64>;
using QueryMma8 = ptx::Wgmma<ptx::Operand::E4m3, 64>;
constexpr ptx::Swizzle kSwizzle8 = kRow8 == 128 ? ptx::Swizzle::B128 : ptx::Swizzle::B64;

// Operands in 128-byte rows. `Along`: the product sums over the rows; runs of 64 columns lie `run` bytes apart.
__device__ __forceinline__ u64 operand(u32 address, u32 run) { return ptx::wgmma_descriptor(address, run, 8 * kRun, ptx::Swizzle::B128); }
// Step `i` of 16 columns, or of 16 rows.
__device__ __forceinline__ u64 columns(u64 descriptor, int i, int run) { return ptx::wgmma_advance(descriptor, i / 4 * run + i % 4 * 32); }
__device__ __forceinline__ u64 rows(u64 descriptor, int i) { return ptx::wgmma_advance(descriptor, 16 * kRun * i); }

// Of E4M3 operands, step `i` of 32 columns; and where 16 columns of a row lie, in a tile of `rows`.
__device__ __forceinline__ u64 columns8(u64 descriptor, int i, int rows) {
  return ptx::wgmma_advance(descriptor, i / 4 * rows * kRun + i % 4 * 32);
}
__device__ __forceinline__ int offset8(int row, int piece, int rows) {
  const int run = kRuns8 > 1 ? piece / 8 : 0, in_run = piece - 8 * run;
  return run * rows * kRun + row * kRow8 + 16 * (kRow8 == 128 ? in_run ^ row % 8 : in_run ^ row / 2 % 4);
}
// The key of its block that a thread's first accumulators of S^T belong to; the second ones' is 8 further.
__device__ __forceinline__ int key_row(u32 thread) { return (kWide ? thread % 128 : thread) / 32 * 16 + thread % 32 / 4; }

// Eight E4M3 values to BF16, by integer arithmetic and an exact product. Of NaN comes a number.
__device__ __forceinline__ u32 widened(u32 pair) {
  return ptx::mul_x2<false>((pair << 4 & 0x07f007f0u) | (pair << 8 & 0x80008000u), 0x7b807b80u);
}
__device__ __forceinline__ uint4 widened(u32 x, u32 y) {
  return make_uint4(widened(__byte_perm(x, 0, 0x4140)), widened(__byte_perm(x, 0, 0x4342)), widened(__byte_perm(y, 0, 0x4140)),
                    widened(__byte_perm(y, 0, 0x4342)));
}

// 16 columns of a row, or the 8 that it has.
__device__ __forceinline__ uint4 load_piece(const u8* at, int piece, int d) {
#if FILL
  if (16 * piece >= d) return make_uint4(0, 0, 0, 0);
  if (16 * piece + 16 > d) {
    const uint2 x = *reinterpret_cast<const uint2*>(at);
    return make_uint4(x.x, x.y, 0, 0);
  }
#endif
  return *reinterpret_cast<const uint4*>(at);
}
// This block's keys and values to shared memory: K as it is and in BF16, V in BF16. What is no key is zero.
__device__ __forceinline__ void load_keys(const Backward& p, const Work& work, u8* shared) {
  constexpr int kEach = kKeys * kPieces / (128 * kConsumers);
  uint4 k[kEach] = {}, v[kEach] = {};
  const Sequence& from = work.sequence;
  const int first_key = kFeatures ? from.first_key(p) : 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = i * 128 * kConsumers + threadIdx.x, row = at / kPieces, piece = at % kPieces, key = work.key_tile * kKeys + row;
    if (key >= from.len_k || (kFeatures && key < first_key) ) continue;
    const u8* k_row = row_of(p.k, p.k_strides, from.batch_k, from.k_row + key, work.kv_head) + 16 * piece;
    const u8* v_row = row_of(p.v, p.v_strides, from.batch_k, from.k_row + key, work.kv_head) + 16 * piece;
    k[i] = load_piece(k_row, piece, p.d);
    v[i] = load_piece(v_row, piece, p.d_v);
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = i * 128 * kConsumers + threadIdx.x, row = at / kPieces, piece = at % kPieces;
    *reinterpret_cast<uint4*>(shared + kOffsetK8 + offset8(row, piece, kKeys)) = k[i];
    [[maybe_unused]] u8* wide = shared + piece / 4 * kKeyRun + row * kRun;
    [[maybe_unused]] const int low = 16 * (piece % 4 * 2 ^ row % 8), high = 16 * ((piece % 4 * 2 + 1) ^ row % 8);
#if !DQ8
    *reinterpret_cast<uint4*>(wide + kOffsetK16 + low) = bf16x8_from_e4m3x8(make_uint2(k[i].x, k[i].y));
    *reinterpret_cast<uint4*>(wide + kOffsetK16 + high) = bf16x8_from_e4m3x8(make_uint2(k[i].z, k[i].w));
#endif
    *reinterpret_cast<uint4*>(wide + kOffsetV16 + low) = bf16x8_from_e4m3x8(make_uint2(v[i].x, v[i].y));
    *reinterpret_cast<uint4*>(wide + kOffsetV16 + high) = bf16x8_from_e4m3x8(make_uint2(v[i].z, v[i].w));
  }
}
#if DQ8
// K^T of the keys in shared memory: a row of 128 keys for each channel. A warp has 16 keys, which are 16 bytes of every row, and a lane
// four channels of them.
__device__ __forceinline__ void transpose_keys(u32 base) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane >= kDim / 4) return;
  u32 x[16];
#pragma unroll
  for (int r = 0; r < 16; r++) x[r] = ptx::ld_shared_u32(base + kOffsetK8 + offset8(16 * warp + r, lane / 4, kKeys) + 4 * (lane % 4));
#pragma unroll
  for (u32 c = 0; c < 4; c++) {
    const u32 pick = c | (4 + c) << 4, channel = 4 * lane + c;
    u32 word[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      word[j] = __byte_perm(__byte_perm(x[2 * j], x[2 * j + 8], pick), __byte_perm(x[2 * j + 1], x[2 * j + 9], pick), 0x5410);
    ptx::st_shared_v4(base + kOffsetK16 + channel * kKeys + 16 * (warp ^ channel % 8), word[0], word[1], word[2], word[3]);
  }
}
#endif

}  // namespace
