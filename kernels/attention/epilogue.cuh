// What `attention_fwd` writes of one warpgroup's tile: telemetry and O.
#pragma once
#include "attention/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "common/step_stats.cuh"
#include "common/types.cuh"

namespace {

// Turns four words a[j] of lane t (column block j, piece t) into four words of block t: word k is piece k.
__device__ __forceinline__ void quad_transpose(u32 (&a)[4], int t) {
  bool odd = t & 1, high = t & 2;
  u32 x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
  if (odd) { a[0] = x; a[2] = y; } else { a[1] = x; a[3] = y; }
  x = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2);
  y = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
  if (high) { a[0] = x; a[1] = y; } else { a[2] = x; a[3] = y; }
}

// The log2-sum-exp of a row: minus infinity where it sees no key, whose sum is zero, and NaN where a logit is.
__device__ __forceinline__ float log_sum(float sum, float offset) {
  return sum < 1.0f ? __int_as_float(0xff800000) : offset + ptx::log2_approx(sum);
}

enum class Format { E4m3, Bf16, F16 };
// Stores row r of a thread's two, where it exists, by this thread's quad: a transpose makes 16-byte (E4M3: 8-byte) pieces of it.
template <Format F>
__device__ __forceinline__ void store_row(typename Select<F == Format::E4m3, u8, u16>::type* out, bool exists,
                                          const float (&o)[kDim / 2], int r, int quad, float to_out) {
#pragma unroll
  for (int c = 0; c < kDim / 32; c++) {
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x = o[16 * c + 4 * j + 2 * r], y = o[16 * c + 4 * j + 2 * r + 1];
      a[j] = F == Format::E4m3 ? ptx::e4m3x2(x * to_out, y * to_out) : F == Format::Bf16 ? ptx::bf16x2(x, y) : ptx::f16x2(x, y);
    }
    quad_transpose(a, quad);
    if (!exists) continue;
    if (F == Format::E4m3) *reinterpret_cast<uint2*>(out + 32 * c + 8 * quad) = make_uint2(a[0] | a[1] << 16, a[2] | a[3] << 16);
    else *reinterpret_cast<uint4*>(out + 32 * c + 8 * quad) = make_uint4(a[0], a[1], a[2], a[3]);
  }
}
// The largest |O| of a thread's row r. NOTES: in four chains, since one would wait for itself 64 times.
__device__ __forceinline__ float largest_size(const float (&o)[kDim / 2], int r) {
  float part[4] = {};
#pragma unroll
  for (int i = 0; i < kDim / 2; i++)
    if (((i >> 1) & 1) == r) part[(i & 1) + (i >> 1 & 2)] = fmaxf(part[(i & 1) + (i >> 1 & 2)], fabsf(o[i]));
  return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
}

// Raises a head's first three words. NOTES: most tiles add nothing to them, and atomics on one word take their turns. An old value
// costs no more than an atomic.
__device__ __forceinline__ void raise(Telemetry& out, const u32 (&words)[3]) {
  u32* at = &out.max_logit;
#pragma unroll
  for (int w = 0; w < 3; w++)
    if (words[w] > ptx::ld_relaxed(at + w)) atomicMax(at + w, words[w]);
}

#if SPLIT
// Where a part's row lies, in rows.
__device__ __forceinline__ i64 part_row(const Params& p, const Tile& t, int position, int head) {
  return (((i64)t.part * p.batch + t.batch) * p.len_q + position) * p.heads_q + head;
}
#endif
#if TELEMETRY && SPLIT
// Adds one tile to its heads' telemetry. One of several parts leaves its extremes beside it: joined there they cost fewer atomics, and
// its O is not joined yet.
__device__ __forceinline__ void report(const Params& p, const Work& item, const Rows& rows, const float (&o)[kDim / 2], int row,
                                       int quad) {
  const Tile& t = item.tile;
  const bool single = p.parts == 1;
  u32 words[2][3];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float top = LOGITS_E4M3 ? rows.highest[r] : rows.reference[r];
    const Row at = row_of(p, row + 8 * r);
    const int position = t.row + at.position;
    const bool counts = at.exists && position < p.len_q;
    words[r][0] = counts && top > kLowest ? ordered(top * item.logit_scale) : 0;
    words[r][1] = counts && rows.lowest[r] < -kLowest ? ~ordered(rows.lowest[r] * item.logit_scale) : 0;
    words[r][2] = counts && single ? __float_as_uint(largest_size(o, r)) : 0;
#pragma unroll
    for (int w = 0; w < 3; w++) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) words[r][w] = max(words[r][w], __shfl_xor_sync(~0u, words[r][w], d));
    }
    if (!single && counts && quad == 0)
      p.parts_extremes[part_row(p, t, position, t.head + at.head)] = {words[r][0], words[r][1]};
  }
  if (single) {
    // NOTES: rows of one head meet first, since atomics on its words take their turns.
    const bool meet = 8 % p.tile_heads == 0;
    if (meet) {
#pragma unroll
      for (int w = 0; w < 3; w++) {
        words[0][w] = max(words[0][w], words[1][w]);
        for (int d = 4 * p.tile_heads; d < 32; d *= 2) words[0][w] = max(words[0][w], __shfl_xor_sync(~0u, words[0][w], d));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Row at = row_of(p, row + 8 * r);
      if (quad == 0 && at.exists && (!meet || (r == 0 && threadIdx.x % 32 / 4 < p.tile_heads)))
        raise(p.telemetry[t.head + at.head], words[r]);
    }
  }
#if LOGITS_E4M3
  const u32 count = ptx::warp_sum(rows.overflow);  // one head a tile, by the host
  if (threadIdx.x % 32 == 0 && count > 0) atomicAdd(&p.telemetry[item.tile.head].overflow, count);
#endif
}
#elif TELEMETRY
// What a head's telemetry has come to: lane i has word i of the first three.
// NOTES: asked for early, and as above.
__device__ __forceinline__ u32 known_word(const Params& p, const Work& item) {
  const u32 lane = threadIdx.x % 32;
  u32 word = ~0u;
  if (lane < 3) word = ptx::ld_relaxed(&p.telemetry[item.tile.head].max_logit + lane);
  return word;
}
// Adds one tile to its head's telemetry; `row`: of this thread's first row, in the tile. `known`: by `known_word`, some time ago.
__device__ __forceinline__ void report(const Params& p, const Work& item, const Rows& rows, const float (&o)[kDim / 2], int row,
                                       u32 known) {
  float high = kLowest, low = -kLowest, amax = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (item.tile.row + row + 8 * r < p.len_q) {
#if LOGITS_E4M3
      high = fmaxf(high, rows.highest[r]);
#else
      high = fmaxf(high, rows.reference[r]);
#endif
      low = fminf(low, rows.lowest[r]);
      amax = fmaxf(amax, largest_size(o, r));
    }
  }
  const u32 words[3] = {ptx::warp_max(high > kLowest ? ordered(high * item.logit_scale) : 0),
                        ptx::warp_max(low < -kLowest ? ~ordered(low * item.logit_scale) : 0), ptx::warp_max(__float_as_uint(amax))};
  const u32 count = LOGITS_E4M3 ? ptx::warp_sum(rows.overflow) : 0;
  const u32 lane = threadIdx.x % 32, mine = lane == 0 ? words[0] : lane == 1 ? words[1] : words[2];
  Telemetry* out = p.telemetry + item.tile.head;
  if (lane < 3 && mine > known) atomicMax(&out->max_logit + lane, mine);
  if (lane == 0 && count > 0) atomicAdd(&out->overflow, count);
}
#endif

#if SPLIT
// Stores one of several parts of O in F16, and a single one as the output: row `first_row` and the one eight below by this
// thread's quad.
__device__ __forceinline__ void store(const Params& p, const Work& item, const float (&o)[kDim / 2], int first_row, int quad) {
  const Tile& t = item.tile;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Row row = row_of(p, first_row + 8 * r);
    const int position = t.row + row.position, head = t.head + row.head;
    const bool exists = row.exists && position < p.len_q;
    if (p.parts > 1) {
      u16* out = reinterpret_cast<u16*>(p.parts_o) + part_row(p, t, position, head) * kDim;
      store_row<Format::F16>(out, exists, o, r, quad, 0.0f);
      continue;
    }
    const i64 at = t.batch * p.o_stride_batch + position * p.o_stride_row + head * p.o_stride_head;
    if (p.e4m3) {
      const int kv = t.head / (p.heads_q / p.heads_kv);
      const float to_out = 1.0f / p.o_descale[t.batch * p.o_descale_batch + kv * p.o_descale_head];
      store_row<Format::E4m3>(reinterpret_cast<u8*>(p.o) + at, exists, o, r, quad, to_out);
    } else {
      store_row<Format::Bf16>(reinterpret_cast<u16*>(p.o) + at, exists, o, r, quad, 0.0f);
    }
  }
}
#else
// Stores a tile of O, row `first_row` of it and the one eight below by this thread's quad.
__device__ __forceinline__ void store(const Params& p, const Work& item, const float (&o)[kDim / 2], int first_row, int quad) {
  using Element = Select<OUT_E4M3, u8, u16>::type;
  Element* out = reinterpret_cast<Element*>(p.o) + item.tile.batch * p.o_stride_batch + item.tile.head * p.o_stride_head;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = item.tile.row + first_row + 8 * r;
#if OUT_E4M3
    const float to_out = item.to_out;
#else
    const float to_out = 0.0f;
#endif
    store_row<OUT_E4M3 ? Format::E4m3 : Format::Bf16>(out + row * p.o_stride_row, row < p.len_q, o, r, quad, to_out);
  }
}
#endif

}  // namespace
