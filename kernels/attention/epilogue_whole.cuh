// Epilogue of a whole tile: 64 rows of one head.
#pragma once
#include "attention/epilogue.cuh"
#include "ptx/mma.cuh"
#include "ptx/reduce.cuh"

namespace {

// A head's telemetry so far: lane i has word i of the first three.
// NOTES: read early. Most tiles raise nothing, and atomics on one word serialise; a stale value costs no more than an atomic.
__device__ __forceinline__ u32 known_word(const Params& p, const WorkItem& item) {
  const u32 lane = threadIdx.x % 32;
  u32 word = ~0u;
  if (lane < 3) word = ptx::ld_relaxed(&p.telemetry[item.tile.head].max + lane);
  return word;
}
// Adds one tile to its head's telemetry; `row`: of this thread's first row, in the tile. `known`: by `known_word`.
__device__ __forceinline__ void report(const Params& p, const WorkItem& item, const RowState& rows, const float (&o)[kValueDim / 2],
                                       int row, u32 known) {
  float high = kLowest, low = -kLowest, amax = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (item.tile.row + row + 8 * r < lengths(p, item).q) {
      high = fmaxf(high, kRawMax ? rows.raw_max[r] : rows.row_max[r]);
      low = fminf(low, rows.row_min[r]);
      amax = fmaxf(amax, row_amax(o, r));
    }
  }
  const u32 words[3] = {ptx::warp_max(high > kLowest ? ordered(high * item.logit_scale) : 0),
                        ptx::warp_max(low < -kLowest ? ~ordered(low * item.logit_scale) : 0), ptx::warp_max(__float_as_uint(amax))};
  const u32 count = kLogitsE4m3 ? ptx::warp_sum(rows.overflow) : 0;
  const u32 lane = threadIdx.x % 32, mine = lane == 0 ? words[0] : lane == 1 ? words[1] : words[2];
  LogitWords* out = p.telemetry + item.tile.head;
  if (lane < 3 && mine > known) atomicMax(&out->max + lane, mine);
  if (lane == 0 && count > 0) add_saturating(&out->overflow, count);
}

// Row `first_row` of the tile and the one eight below.
__device__ __forceinline__ void store(const Params& p, const WorkItem& item, const float (&o)[kValueDim / 2], int first_row, int quad) {
  using Element = Select<kOutE4m3, u8, u16>::type;
  Element* out = reinterpret_cast<Element*>(p.o) + item.tile.batch * p.o_stride_batch + item.tile.head * p.o_stride_head;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = item.tile.row + first_row + 8 * r;
    store_row<kOutE4m3 ? Format::E4m3 : Format::Bf16>(out + (item.q_row + row) * p.o_stride_row, row < lengths(p, item).q, o, r, quad,
                                                      kOutE4m3 ? item.o_quant_scale : 0.0f, p.columns);
  }
}

// The same of a warp's 16 rows, by the copy engine, which may read them until the next call. NOTES: a lane waits for the copies that it began.
__device__ __forceinline__ void store_bulk(const Consumer& c, const WorkItem& item, const float (&o)[kValueDim / 2]) {
  const Params& p = c.params;
  const u32 lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
  const u32 base = c.pipeline.base + kOffsetOut + warp * 16 * kOutRow;
  ptx::bulk_wait_read<0>();
  __syncwarp();
  // Matrix m: rows 8 (m % 2) and on, columns 8 (m / 2) and on of 16
  const u32 at = base + (lane % 16) * kOutRow + lane / 16 * 16;
#pragma unroll
  for (int i = 0; i < kValueDim / 16; i++)
    ptx::stmatrix<false>(at + 32 * i, ptx::bf16x2(o[8 * i], o[8 * i + 1]), ptx::bf16x2(o[8 * i + 2], o[8 * i + 3]),
                         ptx::bf16x2(o[8 * i + 4], o[8 * i + 5]), ptx::bf16x2(o[8 * i + 6], o[8 * i + 7]));
  ptx::fence_proxy_async();
  __syncwarp();
  const int row = item.tile.row + warp % 4 * 16 + lane;
  if (lane < 16 && row < lengths(p, item).q) {
    u16* out = reinterpret_cast<u16*>(p.o) + item.tile.batch * p.o_stride_batch + item.tile.head * p.o_stride_head;
    ptx::bulk_store(out + (item.q_row + row) * p.o_stride_row, base + lane * kOutRow, 2 * kValueDim);
  }
  ptx::bulk_commit();
}

#if RESIDUAL
// Stores what rounding to BF16 takes from O, of row `first_row` of the tile and the one eight below, as `store_row` stores O.
__device__ __forceinline__ void store_residual(const Params& p, const WorkItem& item, const float (&o)[kValueDim / 2], int first_row, int quad) {
  const int columns = kPadded ? p.columns : kValueDim;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = item.tile.row + first_row + 8 * r;
    u8* out = p.residual + (((i64)item.tile.batch * p.len_q + item.q_row + row) * p.heads_q + item.tile.head) * columns;
#pragma unroll
    for (int c = 0; c < kValueDim / 32; c++) {
      u32 a[4];
#pragma unroll
      for (int j = 0; j < 4; j++) a[j] = ptx::residual_codes(o[16 * c + 4 * j + 2 * r], o[16 * c + 4 * j + 2 * r + 1]);
      quad_transpose(a, quad);
      if (row >= lengths(p, item).q || (kPadded && 32 * c + 8 * quad >= columns)) continue;
      *reinterpret_cast<uint2*>(out + 32 * c + 8 * quad) = make_uint2(a[0] | a[1] << 16, a[2] | a[3] << 16);
    }
  }
}
#endif

__device__ __forceinline__ void epilogue(Consumer& c) {
  const Params& p = c.params;
  if (kPv == Pv::Flush && c.flushed) flush<false>(c.o, c.flushed_o(), c.rows.flush_rescale, false);
  WorkItem item;
  item.tile = {load_uniform(c.slot(c.item).tile.batch), load_uniform(c.slot(c.item).tile.head), load_uniform(c.slot(c.item).tile.row), 0};
  item.logit_scale = load_uniform(c.slot(c.item).logit_scale);
  item.v_descale = load_uniform(c.slot(c.item).v_descale);
  if constexpr (kOutE4m3) item.o_quant_scale = load_uniform(c.slot(c.item).o_quant_scale);
  load_rows(c, item);
  release_item(c);

  const Tile& t = item.tile;
  const int quad = place().quad, my_row = place().row;
  u32 known = 0;
  if constexpr (kTelemetry) known = known_word(p, item);
  float factor[2];
#if CENTER
  float sums[2];
#endif
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = quad_sum(c.rows.row_sum[r]), offset = fmaf(c.rows.row_max[r], c.scale, -kPLog2Scale), owed = item.v_descale;
    if constexpr (kSink) owed *= join_sink(sum, offset, p.sinks[t.head]);
    factor[r] = normalisation(sum, owed);
#if CENTER
    sums[r] = sum;
#endif
    const int row = t.row + my_row + 8 * r;
    if (p.lse != nullptr && quad == 0 && row < lengths(p, item).q)
      p.lse[((i64)t.batch * p.heads_q + t.head) * p.len_q + item.q_row + row] = log2_sum(sum, offset) * kLn2;
#if ROW_MAX
    if (quad == 0 && row < lengths(p, item).q)
      p.row_max[((i64)t.batch * p.heads_q + t.head) * p.len_q + item.q_row + row] =
          fmaf(c.rows.row_max[r], c.scale, -log2_sum(sum, offset));
#endif
  }
#if CENTER
  scale_and_shift(c.o, factor, sums, value_center(p, t.head), quad, p.columns);
#else
  scale_rows(c.o, factor);
#endif
  if constexpr (kTelemetry) report(p, item, c.rows, c.o, my_row, known);
  if constexpr (kBulkStore) store_bulk(c, item, c.o);
  else store(p, item, c.o, my_row, quad);
#if RESIDUAL
  store_residual(p, item, c.o, my_row, quad);
#endif
}

}  // namespace
