// Mainloop with one set of logit accumulators and P V promoted in slices, where registers hold no other sum beside O: a slice of
// P V takes those of the logits, and is added to O in f32 before the next.
//
//   for j = 0, 1, ...:  S = Q K_j^T;  P = softmax(S);  for each slice of columns:  O = rescale O + P V_j
//
// A consumer's softmax runs under the products of the others.
#pragma once
#include "attention/epilogue.cuh"

namespace {

__device__ __forceinline__ void mainloop_sliced(Consumer& c) {
  constexpr int kSlices = kValueDim / kSlice;
  QueryTile tile = c.acquire(0);
  while (tile.key_tiles >= 0) {
    c.begin();
    const u32 stop = c.kv + tile.key_tiles;
    const Unmasked open = c.unmasked_tiles(tile);
    auto step = [&](bool masked) {
      const u32 t = c.kv;
      const int n = stop - t - 1;
      masked = masked && open.hides(n);
      c.kv = t + 1;

      // Logits
      float s[kBlockN / 2], top[2], low[2];
      ptx::mbarrier_wait_uniform(c.k_full(t), c.parity(t));
      issue_qk(s, tile.q, c.k(t));
      ptx::wgmma_wait<0>();
      ptx::keep(s);
      c.release_k(t);

      // Softmax
      c.mask_and_scan(tile, open, s, n, masked, top, low);
      update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
      float shift[2], sum[4] = {};
      exponent_shift(c.rows, c.scale, shift);
      exponents(s, s, c.scale, shift);
      exponentiate<0, kBlockN / 2>(s, sum);
      add_row_sum(c.rows, sum);
#pragma unroll
      for (int i = 0; i < kBlockN / 16; i++) pack_p(c.p, s, i);

      // P V in slices, in the registers of the logits; where they hold two, one computes while the other is added
      constexpr int kBuffers = kSlice == 64 ? 2 : 1;
      float (&part)[kBuffers][kSlice / 2] = reinterpret_cast<float (&)[kBuffers][kSlice / 2]>(s);
      ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t));
      if (kBuffers > 1) issue_pv_slice(part[0], c.p, c.v(t), 0);
#pragma unroll
      for (int i = 0; i < kSlices; i++) {
        const int next = i + kBuffers - 1;
        if (next < kSlices) issue_pv_slice(part[next % kBuffers], c.p, c.v(t), next);
        if (next < kSlices) ptx::wgmma_wait<kBuffers - 1>();
        else ptx::wgmma_wait<0>();
        ptx::keep(part[i % kBuffers]);
        if (i + 1 == kSlices) c.release_v(t);
        float (&o)[kSlice / 2] = reinterpret_cast<float (&)[kSlice / 2]>(c.o[kSlice / 2 * i]);
        promote(o, part[i % kBuffers], c.rows.rescale);
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
    epilogue(c);
    tile = c.acquire(c.item);
  }
}

}  // namespace
