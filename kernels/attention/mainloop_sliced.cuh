// Mainloop with one set of logit accumulators and P V promoted in slices, where registers hold no other sum next to O: a slice of
// P V takes those of the logits, and is added to O in f32 while the next is computed. The last is added under the next Q K^T.
//
//   for j = 0, 1, ...:  S = Q K_j^T;  P = softmax(S);  for each slice of columns:  O = rescale O + P V_j
//
// A consumer's softmax runs under the products of the others.
#pragma once
#include "attention/epilogue.cuh"

namespace {

// O = factor O + part, of one slice of columns.
__device__ __forceinline__ void promote_slice(Consumer& c, int slice, const float (&part)[kSlice / 2], const float (&factor)[2]) {
  promote(reinterpret_cast<float (&)[kSlice / 2]>(c.o[kSlice / 2 * slice]), part, factor);
}

__device__ __forceinline__ void mainloop_sliced(Consumer& c) {
  constexpr int kLast = kSlices - 1;
  QueryTile tile = c.acquire(0);
  while (tile.key_tiles >= 0) {
    c.begin();
    const u32 stop = c.kv + tile.key_tiles;
    const Unmasked open = c.unmasked_tiles(tile);
    // The last slice of the tile before, and what O is owed with it
    float carried[kSlice / 2], owed[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < kSlice / 2; i++) carried[i] = 0.0f;
    // Keys and values are asked for while other work is under way: a wait that succeeds at once takes 45 clocks and more
    u32 ready_k = 0, ready_v = 0;
    auto step = [&](bool masked) {
      const u32 t = c.kv;
      const int n = stop - t - 1;
      // NOTES: the assembler knows that the slice is complete only where no branch for a mask follows (C7517); a literal.
      const bool early = masked;
      masked = masked && open.hides(n);
      c.kv = t + 1;

      // Logits
      float s[kBlockN / 2], top[2], low[2];
      ptx::mbarrier_wait_uniform(c.k_full(t), c.parity(t), ready_k);
      if (kCarriedSlice && early) promote_slice(c, kLast, carried, owed);
      issue_qk(s, tile.q, c.k(t));
      if (kCarriedSlice && !early) promote_slice(c, kLast, carried, owed);
      ptx::wgmma_wait<0>();
      ptx::keep(s);
      c.release_k(t);
      if (kCarriedSlice) ready_v = ptx::mbarrier_test_wait(c.v_full(t), c.parity(t));

      // Softmax
      c.mask_and_scan(tile, open, s, n, masked, top, low);
      update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
      owed[0] = c.rows.rescale[0], owed[1] = c.rows.rescale[1];
      float shift[2], sum[4] = {};
      exponent_shift(c.rows, c.scale, shift);
      exponents(s, s, c.scale, shift);
      exponentiate<0, kBlockN / 2>(s, sum);
      add_row_sum(c.rows, sum);
#pragma unroll
      for (int i = 0; i < kBlockN / 16; i++) pack_p(c.p, s, i);

      // P V in slices: one computes while the one before is added. The last has a buffer of its own, or the logits' registers hold both
      constexpr int kOther = kCarriedSlice || kSlices == 1 ? 0 : kSlice / 2;
      float (&other)[kSlice / 2] = reinterpret_cast<float (&)[kSlice / 2]>(s[kOther]);
      float (&last)[kSlice / 2] = kCarriedSlice ? carried : reinterpret_cast<float (&)[kSlice / 2]>(s);
      ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t), ready_v);
#pragma unroll
      for (int i = 0; i <= kSlices; i++) {
        float (&part)[kSlice / 2] = (kLast - i) % 2 == 0 ? last : other;
        float (&before)[kSlice / 2] = (kLast - i) % 2 == 0 ? other : last;
        if (i < kSlices) issue_pv_slice(part, c.p, c.v(t), i, i > 1);
        if (i == 0) continue;
        if (kCarriedSlice && i == kSlices) ready_k = ptx::mbarrier_test_wait(c.k_full(t + 1), c.parity(t + 1));
        if (i < kSlices) ptx::wgmma_wait<1>();
        else ptx::wgmma_wait<0>();
        ptx::keep(before);
        if (i == kSlices) c.release_v(t);
        if (i < kSlices || !kCarriedSlice) promote_slice(c, i - 1, before, owed);
      }
    };
    if constexpr (kCausal && kConsumers > 2) c.skip_hidden_tiles(tile);
    c.kv = uniform(c.kv);
    int left = c.count(stop - c.kv), masked_left = c.count(max(0, left - open.end));
    int open_left = c.count(max(0, min(left, open.end) - open.first));
    if constexpr (kLogitsE4m3) {
      // NOTES: a second copy of this longer step costs registers.
      for (; left > 0; left--) step(true);
    } else {
      for (; left > 0 && masked_left > 0; left--, masked_left--) step(true);
      for (; left > 0 && (!kWindow || open_left > 0); left--, open_left--) step(false);
      for (; kWindow && left > 0; left--) step(true);
    }
    if constexpr (kCarriedSlice) promote_slice(c, kLast, carried, owed);
    epilogue(c);
    tile = c.acquire(c.item);
  }
}

}  // namespace
