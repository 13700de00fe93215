// Mainloop for calls whose logits are certified to fit F16 in units of the operands: |q . k| <= 65504 for every pair. Q K^T is summed in
// F16, two logits a register. That halves what the softmax issues for scaling, maxima and packing, and leaves registers in
// which P V of one tile stays in flight during the exponentials of the next:
//
//   S = Q K_0^T
//   for j = 1, 2, ...:  X = scale S - shift;  S = Q K_j^T;  half of 2^X;  O = rescale O + part;  the maxima of S;  the rest of 2^X;
//                       part = 2^X V_{j-1}
//
// P = 2^(scale logit - shift) with shift = scale row_max - 8 rounded up in F16, so that P never passes 256. A logit past 65504 makes
// its row NaN.
#pragma once
#include "attention/epilogue.cuh"
#include "attention/mainloop_double.cuh"
#include "ptx/half.cuh"

namespace {

constexpr int kPairs = kBlockN / 4;  // registers of a tile of logits: register i is of row i % 2, columns 8 (i / 2) and the next
using NarrowMma = ptx::WgmmaF16<kBlockN>;

struct NarrowRows {
  u32 row_max;     // of the raw logits: row 0 in the low half, row 1 in the high half
  u32 neg_shift;   // likewise
  int integer_order;
};

__device__ __forceinline__ void keep(u32 (&x)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; i++) ptx::keep(x[i]);
}

__device__ __forceinline__ void issue_narrow_qk(u32 (&s)[kPairs], u64 q, u64 k) {
  ptx::wgmma_fence();
  NarrowMma::ss_overwrite(s, q, k);
#pragma unroll
  for (int i = 1; i < kDim / 32; i++) {
    const int run = 32 * i / kRun, column = 32 * i % kRun;
    NarrowMma::ss(s, ptx::wgmma_advance(q, run * kQRun + column), ptx::wgmma_advance(k, run * kKeyRun + column));
  }
  ptx::wgmma_commit();
}

// Both rows' largest logits over the quad, row 0 in the low half. Right where they are not negative.
__device__ __forceinline__ u32 scan_narrow(const u32 (&s)[kPairs]) {
  u32 part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int i = 4; i + 4 < kPairs; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; j++) part[j] = ptx::max3_s16x2(part[j], s[i + j], s[i + 4 + j]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) part[r] = ptx::max3_s16x2(part[r], part[r + 2], s[kPairs - 4 + r]);
#pragma unroll
  for (int r = 0; r < 2; r++) part[r] = ptx::max_s16x2(part[r], s[kPairs - 2 + r]);
  u32 top = ptx::max_s16x2(ptx::low_halves(part[0], part[1]), ptx::high_halves(part[0], part[1]));
  top = ptx::max_s16x2(top, ptx::shuffle_xor(top, 1));
  return ptx::max_s16x2(top, ptx::shuffle_xor(top, 2));
}
__device__ __forceinline__ u32 exact_narrow_max(const u32 (&s)[kPairs]) {
  u32 part[2] = {s[0], s[1]};
#pragma unroll
  for (int i = 2; i < kPairs; i++) part[i % 2] = ptx::max_f16x2(part[i % 2], s[i]);
  u32 top = ptx::max_f16x2(ptx::low_halves(part[0], part[1]), ptx::high_halves(part[0], part[1]));
  top = ptx::max_f16x2(top, ptx::shuffle_xor(top, 1));
  return ptx::max_f16x2(top, ptx::shuffle_xor(top, 2));
}

// Sets logits past a row's last visible key to minus infinity.
__device__ __forceinline__ void mask_narrow(u32 (&s)[kPairs], const int (&last)[2]) {
#pragma unroll
  for (int i = 0; i < kPairs; i++) {
    const int column = 8 * (i / 2);
    s[i] = column > last[i % 2] ? 0xfc00fc00u : column + 1 > last[i % 2] ? ptx::low_halves(s[i], 0xfc00u) : s[i];
  }
}

// Takes in the maxima `top` of a tile. What O and the row sums are owed for it goes to rows.rescale.
__device__ __forceinline__ void update_narrow_max(const u32 (&s)[kPairs], u32 top, NarrowRows& narrow, RowState& rows, float scale) {
  if (!narrow.integer_order) {
    const u32 most = ptx::max_f16x2(top, narrow.row_max);
    narrow.integer_order = __shfl_sync(~0u, __all_sync(~0u, (most & 0x80008000u) == 0), 0);
    if (!narrow.integer_order) top = exact_narrow_max(s);
  }
  const u32 most = ptx::max_f16x2(top, narrow.row_max);
  rows.rescale[0] = rows.rescale[1] = 1.0f;
  if (__any_sync(~0u, most != narrow.row_max)) {
    const u32 before = narrow.neg_shift;
    narrow.row_max = most;
    narrow.neg_shift = ptx::negated_above(fmaf(ptx::f32_low(most), scale, -kPLog2Scale), fmaf(ptx::f32_high(most), scale, -kPLog2Scale));
    rows.rescale[0] = ptx::exp2_approx(ptx::f32_low(narrow.neg_shift) - ptx::f32_low(before));
    rows.rescale[1] = ptx::exp2_approx(ptx::f32_high(narrow.neg_shift) - ptx::f32_high(before));
  }
}

struct Narrow {
  Consumer& c;
  u32 (&s)[kPairs];
  NarrowRows rows;
  u32 scale;  // in both halves
  u32 v_ready;

  // Makes P of the logits; under it `next` goes to the logits. With `product`, P V of tile t is issued before that, and added to O.
  // Returns the maxima of `next`.
  // NOTES: every product ends here. In flight around a loop, the assembler would serialise them.
  __device__ __forceinline__ u32 step(bool product, u32 t, const NextLogits& next, u32 top) {
    float part[kValueDim / 2], sums[4];
    u32 x[kPairs];
    if (product) {
      ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t), v_ready);
      issue_pv(part, c.p, c.v(t), true, sums, c.desc_ones);
    }
    const u32 k_ready = next.real ? ptx::mbarrier_try_wait(c.k_full(next.t), c.parity(next.t)) : 1;
    const float owed[2] = {c.rows.rescale[0], c.rows.rescale[1]};
    update_narrow_max(s, top, rows, c.rows, c.scale);
    const u32 shift[2] = {ptx::low_halves(rows.neg_shift, rows.neg_shift), ptx::high_halves(rows.neg_shift, rows.neg_shift)};
#pragma unroll
    for (int i = 0; i < kPairs; i++) x[i] = ptx::fma_x2<true>(s[i], scale, shift[i % 2]);
    keep(x);
    ptx::mbarrier_wait_uniform(c.k_full(next.t), c.parity(next.t), k_ready);
    issue_narrow_qk(s, next.tile.q, c.k(next.t));
#pragma unroll
    for (int i = 0; i < kPairs / 2; i++) x[i] = ptx::exp2_f16x2(x[i]);
    if (product) {
      ptx::wgmma_wait<1>();
      ptx::keep(part);
      ptx::keep(sums);
      add(part, sums, owed, t);
    }
    ptx::wgmma_wait<0>();
    keep(s);
    if (next.real) c.release_k(next.t);
    v_ready = ptx::mbarrier_try_wait(c.v_full(t + 1), c.parity(t + 1));
    if (next.masked) {
      const int last[2] = {c.last_key(next.tile, next.n, 0), c.last_key(next.tile, next.n, 1)};
      mask_narrow(s, last);
    }
    top = scan_narrow(s);
#pragma unroll
    for (int i = kPairs / 2; i < kPairs; i++) x[i] = ptx::exp2_f16x2(x[i]);
#pragma unroll
    for (int i = 0; i < kPairs / 4; i++) {
      c.p[2 * i] = ptx::e4m3x4_from_f16x2(x[4 * i], x[4 * i + 2]);
      c.p[2 * i + 1] = ptx::e4m3x4_from_f16x2(x[4 * i + 1], x[4 * i + 3]);
    }
    return top;
  }
  // Adds P V of tile t to O.
  __device__ __forceinline__ void add(const float (&part)[kValueDim / 2], const float (&sums)[4], const float (&owed)[2], u32 t) {
    c.release_v(t);
    promote(c.o, part, owed);
#pragma unroll
    for (int r = 0; r < 2; r++) c.rows.row_sum[r] = fmaf(c.rows.row_sum[r], owed[r], sums[2 * r]);
  }
  __device__ __forceinline__ void begin() {
    // NOTES: a larger scale is of no logits that a certificate allows.
    if (!(c.scale < 0.5f)) c.scale = __int_as_float(0x7fffffff);
    // The least positive number for a scale that underflows, since minus infinity times zero is NaN
    const float above = c.scale < 5.9604645e-8f ? 5.9604645e-8f : c.scale;
    scale = ptx::f16x2(above, above);
    c.scale = ptx::f32_low(scale);
    rows = {0xfbfffbffu, 0, 0};  // the least number, so that no difference of two maxima is NaN
    const float least = fmaf(-65504.0f, c.scale, -kPLog2Scale);
    rows.neg_shift = ptx::negated_above(least, least);
  }
  // What the epilogue takes for the offset of the row sums.
  __device__ __forceinline__ void end() {
    c.scale = 1.0f;
    c.rows.row_max[0] = kPLog2Scale - ptx::f32_low(rows.neg_shift), c.rows.row_max[1] = kPLog2Scale - ptx::f32_high(rows.neg_shift);
  }
};

__device__ __forceinline__ void mainloop_narrow(Consumer& c) {
  QueryTile tile = c.acquire(0);
  u32 s[kPairs], top = 0;
  Narrow loop = {c, s};
  bool begun = false;
  while (tile.key_tiles >= 0) {
    c.begin();
    loop.begin();
    if (tile.key_tiles == 0) {
      tile = c.acquire(c.item + 1);
    } else {
      const Unmasked open = c.unmasked_tiles(tile);
      // First logits, where the item before did not bring them
      if (!begun) {
        ptx::mbarrier_wait_uniform(c.k_full(c.kv), c.parity(c.kv));
        issue_narrow_qk(s, tile.q, c.k(c.kv));
        ptx::wgmma_wait<0>();
        keep(s);
        c.release_k(c.kv);
        c.kv++;
        if (open.hides(tile.key_tiles - 1)) {
          const int last[2] = {c.last_key(tile, tile.key_tiles - 1, 0), c.last_key(tile, tile.key_tiles - 1, 1)};
          mask_narrow(s, last);
        }
        top = scan_narrow(s);
      }
      c.kv = uniform(c.kv);

      // P of the first tile; then P V of a tile with P of the next, whose logits are there. `kv` is the tile after that: of this
      // item or, behind its last, the first of the next
      const u32 first = c.kv - 1;
      const u32 stop = first + tile.key_tiles;
      QueryTile next = tile;
      Unmasked next_open = open;
      int n = tile.key_tiles - 2;
      begun = true;
      auto any = [&](bool product) {
        if (n < 0) {
          next = c.acquire(c.item + 1);
          begun = next.key_tiles > 0;
          n = next.key_tiles - 1;
          if constexpr (kCausal) next_open = c.unmasked_tiles(next);
        }
        const u32 t = c.kv;
        const bool masked = begun && next_open.hides(n);
        top = loop.step(product, t - 2, {next, next_open, t, n, masked, begun, begun ? 0u : 1u}, top);
        c.kv = uniform(t + 1), n--;
      };
      any(false);
      int masked_left = max(0, n + 1 - open.end);
      int left = stop - c.kv;  // tiles of this item whose logits are to come
      for (; kCausal && left > 0 && masked_left > 0; left--, masked_left--) any(true);
      for (; left > 0; left--) {
        const u32 t = c.kv;
        top = loop.step(true, t - 2, {tile, open, t, 0, false, true, 0}, top);
        c.kv = t + 1;
      }
      if (c.kv == stop) {
        n = -1;
        any(true);
      }

      // The last product
      float part[kValueDim / 2], sums[4];
      ptx::mbarrier_wait_uniform(c.v_full(stop - 1), c.parity(stop - 1), loop.v_ready);
      issue_pv(part, c.p, c.v(stop - 1), true, sums, c.desc_ones);
      ptx::wgmma_wait<0>();
      ptx::keep(part);
      ptx::keep(sums);
      loop.add(part, sums, c.rows.rescale, stop - 1);
      c.kv = uniform(begun ? stop + 1 : stop);
      tile = next;
    }
    loop.end();
    epilogue(c);
  }
}

}  // namespace
