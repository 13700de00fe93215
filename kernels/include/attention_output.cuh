// What `attention_fwd` writes of one warpgroup's tile: telemetry and O.
#pragma once
#include "attention_tile.cuh"
#include "convert.cuh"
#include "math.cuh"
#include "types.cuh"

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

// Stores row r of a thread's two, where it exists, by this thread's quad: a transpose makes 16-byte (E4M3: 8-byte) pieces of it.
template <bool E4m3>
__device__ __forceinline__ void store_row(typename Select<E4m3, u8, u16>::type* out, bool exists, const float (&o)[kDim / 2], int r,
                                          int quad, float to_out) {
#pragma unroll
  for (int c = 0; c < kDim / 32; c++) {
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x = o[16 * c + 4 * j + 2 * r], y = o[16 * c + 4 * j + 2 * r + 1];
      a[j] = E4m3 ? e4m3x2(x * to_out, y * to_out) : bf16x2(x, y);
    }
    quad_transpose(a, quad);
    if (!exists) continue;
    if (E4m3) *reinterpret_cast<uint2*>(out + 32 * c + 8 * quad) = make_uint2(a[0] | a[1] << 16, a[2] | a[3] << 16);
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

#if TELEMETRY && SPLIT
// Adds one tile to its heads' telemetry; of O, if it is not one of several parts, which are not joined yet.
__device__ __forceinline__ void report(const Params& p, const Work& item, const Rows& rows, const float (&o)[kDim / 2], int row,
                                       int quad) {
  u32 high[2], low[2], amax[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float top = LOGITS_E4M3 ? rows.highest[r] : rows.reference[r];
    const Row at = row_of(p, row + 8 * r);
    const bool counts = at.exists && item.tile.row + at.position < p.len_q;
    high[r] = counts && top > kLowest ? ordered(top * item.logit_scale) : 0;
    low[r] = counts && rows.lowest[r] < -kLowest ? ~ordered(rows.lowest[r] * item.logit_scale) : 0;
    amax[r] = counts && p.parts == 1 ? __float_as_uint(largest_size(o, r)) : 0;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      high[r] = max(high[r], __shfl_xor_sync(~0u, high[r], d));
      low[r] = max(low[r], __shfl_xor_sync(~0u, low[r], d));
      amax[r] = max(amax[r], __shfl_xor_sync(~0u, amax[r], d));
    }
  }
  // NOTES: rows of one head meet first, since atomics on its words take their turns.
  const bool meet = 8 % p.tile_heads == 0;
  if (meet) {
    high[0] = max(high[0], high[1]), low[0] = max(low[0], low[1]), amax[0] = max(amax[0], amax[1]);
    for (int d = 4 * p.tile_heads; d < 32; d *= 2) {
      high[0] = max(high[0], __shfl_xor_sync(~0u, high[0], d));
      low[0] = max(low[0], __shfl_xor_sync(~0u, low[0], d));
      amax[0] = max(amax[0], __shfl_xor_sync(~0u, amax[0], d));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (quad == 0 && (!meet || (r == 0 && threadIdx.x % 32 / 4 < p.tile_heads))) {
      Telemetry* out = p.telemetry + item.tile.head + row_of(p, row + 8 * r).head;
      if (high[r] > 0) atomicMax(&out->max_logit, high[r]);
      if (low[r] > 0) atomicMax(&out->min_logit, low[r]);
      if (amax[r] > 0) atomicMax(&out->amax_o, amax[r]);
    }
  }
#if LOGITS_E4M3
  const u32 count = warp_sum(rows.overflow);  // one head a tile, by the host
  if (threadIdx.x % 32 == 0 && count > 0) atomicAdd(&p.telemetry[item.tile.head].overflow, count);
#endif
}
#elif TELEMETRY
// What a head's telemetry has come to: lane i has word i of the first three.
// NOTES: most tiles add nothing to it, and atomics on one word take their turns. An old value costs no more than an atomic.
__device__ __forceinline__ u32 known_word(const Params& p, const Work& item) {
  const u32 lane = threadIdx.x % 32;
  u32 word = ~0u;
  const u32* at = &p.telemetry[item.tile.head].max_logit + lane;
  if (lane < 3) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
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
  const u32 words[3] = {warp_max(high > kLowest ? ordered(high * item.logit_scale) : 0),
                        warp_max(low < -kLowest ? ~ordered(low * item.logit_scale) : 0), warp_max(__float_as_uint(amax))};
  const u32 count = LOGITS_E4M3 ? warp_sum(rows.overflow) : 0;
  const u32 lane = threadIdx.x % 32, mine = lane == 0 ? words[0] : lane == 1 ? words[1] : words[2];
  Telemetry* out = p.telemetry + item.tile.head;
  if (lane < 3 && mine > known) atomicMax(&out->max_logit + lane, mine);
  if (lane == 0 && count > 0) atomicAdd(&out->overflow, count);
}
#endif

#if SPLIT
// Where a part's row lies, in rows.
__device__ __forceinline__ i64 part_row(const Params& p, const Tile& t, int position, int head) {
  return (((i64)t.part * p.batch + t.batch) * p.len_q + position) * p.heads_q + head;
}
// Stores one of several parts of O as it is, and a single one as the output: row `first_row` and the one eight below by this
// thread's quad.
__device__ __forceinline__ void store(const Params& p, const Work& item, const float (&o)[kDim / 2], int first_row, int quad) {
  const Tile& t = item.tile;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Row row = row_of(p, first_row + 8 * r);
    const int position = t.row + row.position, head = t.head + row.head;
    const bool exists = row.exists && position < p.len_q;
    if (p.parts > 1) {
      if (!exists) continue;
      float2* out = reinterpret_cast<float2*>(p.parts_o + part_row(p, t, position, head) * kDim) + quad;
#pragma unroll
      for (int c = 0; c < kDim / 8; c++) out[4 * c] = make_float2(o[4 * c + 2 * r], o[4 * c + 2 * r + 1]);
      continue;
    }
    const i64 at = t.batch * p.o_stride_batch + position * p.o_stride_row + head * p.o_stride_head;
    if (p.e4m3) {
      const int kv = t.head / (p.heads_q / p.heads_kv);
      const float to_out = 1.0f / p.o_descale[t.batch * p.o_descale_batch + kv * p.o_descale_head];
      store_row<true>(reinterpret_cast<u8*>(p.o) + at, exists, o, r, quad, to_out);
    } else {
      store_row<false>(reinterpret_cast<u16*>(p.o) + at, exists, o, r, quad, 0.0f);
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
    store_row<OUT_E4M3>(out + row * p.o_stride_row, row < p.len_q, o, r, quad, to_out);
  }
}
#endif

}  // namespace
