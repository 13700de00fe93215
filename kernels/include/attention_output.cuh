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

#if TELEMETRY && SPLIT
// Adds one tile to its heads' telemetry, but for O, whose parts are not joined yet.
__device__ __forceinline__ void report(const Params& p, const Work& item, const Rows& rows, int row, int quad) {
  u32 high[2], low[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float top = LOGITS_E4M3 ? rows.highest[r] : rows.reference[r];
    const Row at = row_of(p, row + 8 * r);
    const bool counts = at.exists && item.tile.row + at.position < p.len_q;
    high[r] = counts && top > kLowest ? ordered(top * item.logit_scale) : 0;
    low[r] = counts && rows.lowest[r] < -kLowest ? ~ordered(rows.lowest[r] * item.logit_scale) : 0;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      high[r] = max(high[r], __shfl_xor_sync(~0u, high[r], d));
      low[r] = max(low[r], __shfl_xor_sync(~0u, low[r], d));
    }
  }
  // NOTES: rows of one head meet first, since atomics on its words take their turns.
  const bool meet = 8 % p.tile_heads == 0;
  if (meet) {
    high[0] = max(high[0], high[1]), low[0] = max(low[0], low[1]);
    for (int d = 4 * p.tile_heads; d < 32; d *= 2) {
      high[0] = max(high[0], __shfl_xor_sync(~0u, high[0], d));
      low[0] = max(low[0], __shfl_xor_sync(~0u, low[0], d));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (quad == 0 && (!meet || (r == 0 && threadIdx.x % 32 / 4 < p.tile_heads))) {
      Telemetry* out = p.telemetry + item.tile.head + row_of(p, row + 8 * r).head;
      if (high[r] > 0) atomicMax(&out->max_logit, high[r]);
      if (low[r] > 0) atomicMax(&out->min_logit, low[r]);
    }
  }
#if LOGITS_E4M3
  const u32 count = warp_sum(rows.overflow);  // one head a tile, by the host
  if (threadIdx.x % 32 == 0 && count > 0) atomicAdd(&p.telemetry[item.tile.head].overflow, count);
#endif
}
#elif TELEMETRY
// Adds one tile to its head's telemetry; `row`: of this thread's first row, in the tile.
__device__ __forceinline__ void report(const Params& p, const Work& item, const Rows& rows, const float (&o)[kDim / 2], int row) {
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
#pragma unroll
      for (int i = 0; i < kDim / 2; i++)
        if (((i >> 1) & 1) == r) amax = fmaxf(amax, fabsf(o[i]));
    }
  }
  const u32 words[3] = {warp_max(high > kLowest ? ordered(high * item.logit_scale) : 0),
                        warp_max(low < -kLowest ? ~ordered(low * item.logit_scale) : 0), warp_max(__float_as_uint(amax))};
  const u32 count = LOGITS_E4M3 ? warp_sum(rows.overflow) : 0;
  if (threadIdx.x % 32 == 0) {
    Telemetry* out = p.telemetry + item.tile.head;
    atomicMax(&out->max_logit, words[0]);
    atomicMax(&out->min_logit, words[1]);
    atomicMax(&out->amax_o, words[2]);
    if (count > 0) atomicAdd(&out->overflow, count);
  }
}
#endif

#if SPLIT
// Where a row of a part lies, in rows; less than 0: nowhere.
__device__ __forceinline__ i64 part_row(const Params& p, const Tile& t, int row) {
  const Row at = row_of(p, row);
  const int position = t.row + at.position;
  if (!at.exists || position >= p.len_q) return -1;
  return (((i64)t.part * p.batch + t.batch) * p.len_q + position) * p.heads_q + t.head + at.head;
}
// Stores a part of O as it is, row `first_row` and the one eight below by this thread's quad.
__device__ __forceinline__ void store(const Params& p, const Work& item, const float (&o)[kDim / 2], int first_row, int quad) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const i64 at = part_row(p, item.tile, first_row + 8 * r);
    if (at < 0) continue;
    float2* out = reinterpret_cast<float2*>(p.parts_o + at * kDim) + quad;
#pragma unroll
    for (int c = 0; c < kDim / 8; c++) out[4 * c] = make_float2(o[4 * c + 2 * r], o[4 * c + 2 * r + 1]);
  }
}
#else
// Stores a tile of O, row `first_row` of it and the one eight below by this thread's quad: a transpose in each quad makes 16-byte
// (E4M3: 8-byte) pieces of one row.
__device__ __forceinline__ void store(const Params& p, const Work& item, const float (&o)[kDim / 2], int first_row, int quad) {
#if OUT_E4M3
  const float to_out = item.to_out;
  u8* out = reinterpret_cast<u8*>(p.o) + item.tile.batch * p.o_stride_batch + item.tile.head * p.o_stride_head;
#else
  u16* out = reinterpret_cast<u16*>(p.o) + item.tile.batch * p.o_stride_batch + item.tile.head * p.o_stride_head;
#endif
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = item.tile.row + first_row + 8 * r;
#pragma unroll
    for (int c = 0; c < kDim / 32; c++) {
      u32 a[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float x = o[16 * c + 4 * j + 2 * r], y = o[16 * c + 4 * j + 2 * r + 1];
#if OUT_E4M3
        a[j] = e4m3x2(x * to_out, y * to_out);
#else
        a[j] = bf16x2(x, y);
#endif
      }
      quad_transpose(a, quad);
      if (row < p.len_q) {
#if OUT_E4M3
        *reinterpret_cast<uint2*>(out + row * p.o_stride_row + 32 * c + 8 * quad) =
            make_uint2(a[0] | a[1] << 16, a[2] | a[3] << 16);
#else
        *reinterpret_cast<uint4*>(out + row * p.o_stride_row + 32 * c + 8 * quad) = make_uint4(a[0], a[1], a[2], a[3]);
#endif
      }
    }
  }
}
#endif

}  // namespace
