// Mainloop with one set of logit accumulators: the logits of tile j + 1 and P V of tile j are issued together, and the
// softmax of j + 1 runs under P V, and under the products of the other consumers. FlashAttention-3 calls this order
// intra-warpgroup pipelining (Shah et al. 2024, section 3.2).
//
//   S = Q K_0^T; P = softmax(S)
//   for j = 1, 2, ...:  S = Q K_j^T;  O += P V_{j-1};  P = softmax(S);  rescale O
//   O += P V_last
#pragma once
#include "attention/epilogue.cuh"

namespace {

__device__ __forceinline__ void mainloop_single(Consumer& c) {
  QueryTile tile = c.acquire(0);
  while (tile.key_tiles >= 0) {
    c.begin();
    if (tile.key_tiles == 0) {
      c.clear_o();
      epilogue(c);
      tile = c.acquire(c.item);
      continue;
    }
    const u32 stop = c.kv + tile.key_tiles;
    const Unmasked open = c.unmasked_tiles(tile);
    float s[kBlockN / 2], top[2], low[2];
    auto softmax = [&]() {
      float shift[2], sum[4] = {};
      exponent_shift(c.rows, c.scale, shift);
      exponents(s, s, c.scale, shift);
      exponentiate<0, kBlockN / 2>(s, sum);
      add_row_sum(c.rows, sum);
    };
    auto pack = [&]() {
#pragma unroll
      for (int i = 0; i < kBlockN / 16; i++) pack_p(c.p, s, i);
    };
    // O += P V of tile t. Promote: into `part`, to be added to O, which is owed `rescale`.
    float part[kValueDim / 2], sums[4];
    auto issue = [&](u32 t) {
      ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t));
      if constexpr (kPv != Pv::Promote) ptx::keep(c.o);
      issue_pv(kPv == Pv::Promote ? part : c.o, c.p, c.v(t), c.fresh, sums, 0);
      c.fresh = false;
    };
    auto wait = [&](u32 t, const float (&rescale)[2]) {
      ptx::wgmma_wait<0>();
      ptx::keep(kPv == Pv::Promote ? part : c.o);
      c.release_v(t);
      if constexpr (kPv == Pv::Promote) promote(c.o, part, rescale);
    };
    auto step = [&](bool masked) {
      // Issue the logits of this tile, then P V of the one before
      const u32 t = c.kv;
      const int n = stop - t - 1;
      ptx::mbarrier_wait_uniform(c.k_full(t), c.parity(t));
      issue_qk(s, tile.q, c.k(t));
      issue(t - 1);
      const float rescale[2] = {c.rows.rescale[0], c.rows.rescale[1]};
      c.kv = t + 1;

      // Softmax under P V
      masked = masked && open.hides(n);
      ptx::wgmma_wait<1>();
      ptx::keep(s);
      c.mask_and_scan(tile, open, s, n, masked, top, low);
      const bool moved = update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
      softmax();
      // NOTES: the assembler would sink the softmax below the next wait. A release that depends on its result (and always
      // happens: no sum is negative) pins it here.
      if (!(c.rows.row_sum[0] + c.rows.row_sum[1] < 0.0f)) c.release_k(t);

      // Wait for P V, rescale O, round P for the next
      wait(t - 1, rescale);
      if (kPv != Pv::Promote && moved) scale_rows(c.o, c.rows.rescale);
      pack();
    };

    // NOTES: with two consumers it is one tile at most, and the loop costs the compiler its knowledge of uniformity.
    if constexpr (kCausal && kConsumers > 2) c.skip_hidden_tiles(tile);

    // First logits
    ptx::mbarrier_wait_uniform(c.k_full(c.kv), c.parity(c.kv));
    issue_qk(s, tile.q, c.k(c.kv));
    ptx::wgmma_wait<0>();
    ptx::keep(s);
    c.release_k(c.kv);
    c.kv++;
    const bool masked = open.hides((int)(stop - c.kv));
    c.mask_and_scan(tile, open, s, stop - c.kv, masked, top, low);
    update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
    softmax();
    pack();

    // Masked tiles, then the others, with a flush where one is due
    c.kv = uniform(c.kv);
    int left = c.count(stop - c.kv), masked_left = c.count(max(0, left - open.end));
    int open_left = c.count(max(0, min(left, open.end) - open.first));
    while (left > 0) {
      int run = kPv == Pv::Flush ? min(left, kFlushTiles) : left;
      left -= run;
      if constexpr (kLogitsE4m3) {
        // NOTES: a second copy of this longer step costs registers.
        for (; run > 0; run--) step(true);
      } else {
        do {
          for (; run > 0 && masked_left > 0; run--, masked_left--) step(true);
          for (; run > 0 && (!kWindow || open_left > 0); run--, open_left--) step(false);
          if (kWindow && run > 0) masked_left = run;
        } while (kWindow && run > 0);
      }
      if (kPv == Pv::Flush && left > 0) c.flush_o();
    }

    // Last P V
    issue(c.kv - 1);
    wait(c.kv - 1, c.rows.rescale);
    epilogue(c);
    tile = c.acquire(c.item);
  }
}

}  // namespace
