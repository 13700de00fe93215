// Epilogue of a split tile: rows are positions and heads. One of several splits leaves its O, log-sum-exp and extremes for
// combine.cu; a single split writes the output.
#pragma once
#include "attention/epilogue.cuh"

namespace {

// Raises a head's first three words. NOTES: most tiles raise nothing, and atomics on one word serialise; a stale value costs
// no more than an atomic.
__device__ __forceinline__ void raise(LogitWords& out, const u32 (&words)[3]) {
  u32* at = &out.max;
#pragma unroll
  for (int w = 0; w < 3; w++)
    if (words[w] > ptx::ld_relaxed(at + w)) atomicMax(at + w, words[w]);
}

// Adds one tile to its heads' telemetry, or leaves its extremes by row: combined there they cost fewer atomics, and O is not
// whole yet.
__device__ __forceinline__ void report(const Params& p, const WorkItem& item, const RowState& rows, const float (&o)[kValueDim / 2],
                                       int row, int quad) {
  const Tile& t = item.tile;
  const bool single = !is_part(p, item);
  u32 words[2][3];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float top = kRawMax ? rows.raw_max[r] : rows.row_max[r];
    const Row at = row_of(p, row + 8 * r);
    const int position = t.row + at.position;
    const bool counts = at.exists && position < lengths(p, item).q;
    words[r][0] = counts && top > kLowest ? ordered(top * item.logit_scale) : 0;
    words[r][1] = counts && rows.row_min[r] < -kLowest ? ~ordered(rows.row_min[r] * item.logit_scale) : 0;
    words[r][2] = counts && single ? __float_as_uint(row_amax(o, r)) : 0;
#pragma unroll
    for (int w = 0; w < 3; w++) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) words[r][w] = max(words[r][w], __shfl_xor_sync(~0u, words[r][w], d));
    }
    if (!single && counts && quad == 0)
      p.extremes_partial[partial_row(p, item, position, t.head + at.head)] = {words[r][0], words[r][1]};
  }
  if (single) {
    // NOTES: rows of one head meet in the warp first, since atomics on its words serialise.
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
  if constexpr (kLogitsE4m3) {
    const u32 count = ptx::warp_sum(rows.overflow);  // one head per tile: the host chooses so
    if (threadIdx.x % 32 == 0 && count > 0) add_saturating(&p.telemetry[item.tile.head].overflow, count);
  }
}

// Row `first_row` of the tile and the one eight below: F16 of one of several splits, else the output.
__device__ __forceinline__ void store(const Params& p, const WorkItem& item, const float (&o)[kValueDim / 2], int first_row, int quad) {
  const Tile& t = item.tile;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Row row = row_of(p, first_row + 8 * r);
    const int position = t.row + row.position, head = t.head + row.head;
    const bool exists = row.exists && position < lengths(p, item).q;
    if (is_part(p, item)) {
      u16* out = reinterpret_cast<u16*>(p.o_partial) + partial_row(p, item, position, head) * kValueDim;
      store_row<Format::F16>(out, exists, o, r, quad, 0.0f);
      continue;
    }
    const i64 at = t.batch * p.o_stride_batch + (item.q_row + position) * p.o_stride_row + head * p.o_stride_head;
    if (p.out_e4m3) {
      const int kv = t.head / (p.heads_q / p.heads_kv);
      const float quant_scale = 1.0f / p.o_descale[t.batch * p.o_descale_batch + kv * p.o_descale_head];
      store_row<Format::E4m3>(reinterpret_cast<u8*>(p.o) + at, exists, o, r, quad, quant_scale, p.columns);
    } else {
      store_row<Format::Bf16>(reinterpret_cast<u16*>(p.o) + at, exists, o, r, quad, 0.0f, p.columns);
    }
  }
}

__device__ __forceinline__ void epilogue(Consumer& c) {
  const Params& p = c.params;
  if (kPv == Pv::Flush && c.flushed) flush<false>(c.o, c.flushed_o(), c.rows.flush_rescale, false);
  WorkItem item;
  item.tile = {load_uniform(c.slot(c.item).tile.batch), load_uniform(c.slot(c.item).tile.head), load_uniform(c.slot(c.item).tile.row), 0};
#if PAGED
  item.tile.partial = load_uniform(c.slot(c.item).tile.partial);
#else
  item.tile.split = load_uniform(c.slot(c.item).tile.split);
#endif
  item.logit_scale = load_uniform(c.slot(c.item).logit_scale);
  item.v_descale = load_uniform(c.slot(c.item).v_descale);
  load_rows(c, item);
  release_item(c);

  const Tile& t = item.tile;
  const int quad = place().quad, my_row = place().row;
  float factor[2], sums[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = quad_sum(c.rows.row_sum[r]), offset = fmaf(c.rows.row_max[r], c.scale, -kPLog2Scale), owed = item.v_descale;
    const Row at = row_of(p, my_row + 8 * r);
    const int position = t.row + at.position, head = t.head + at.head;
    if (kSink && at.exists && !is_part(p, item)) owed *= join_sink(sum, offset, p.sinks[head]);
    factor[r] = normalisation(sum, owed), sums[r] = sum;
    const float lse = log2_sum(sum, offset);
    if (quad == 0 && at.exists && position < lengths(p, item).q) {
      if (is_part(p, item)) p.lse_partial[partial_row(p, item, position, head)] = lse;
      else if (p.lse != nullptr) p.lse[((i64)t.batch * p.heads_q + head) * p.len_q + item.q_row + position] = lse * kLn2;
    }
  }
#if CENTER
  if (!is_part(p, item)) scale_and_shift(c.o, factor, sums, value_center(p, t.head), quad, p.columns);
  else
#endif
    scale_rows(c.o, factor);
  if constexpr (kTelemetry) report(p, item, c.rows, c.o, my_row, quad);
  store(p, item, c.o, my_row, quad);
}

}  // namespace
