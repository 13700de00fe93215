// Mainloop with two tiles of logits in flight: the exponents of tile j leave the registers of Q K^T, which computes the logits of
// tile j + 1 in them during the exponentials of tile j. The last tile of a work item computes the first logits of the next item.
//
//   S = Q K_0^T
//   for j = 1, 2, ...:  X = scale S - shift;  S = Q K_j^T;  the maxima of S between the halves of 2^X;  O += 2^X V_{j-1};  rescale O
//
// Promote: P V of a tile takes the registers of X, which are free once P is packed, and O = rescale O + P V. The factor is
// that of this tile's own maxima; what is found under its product is the next tile's.
#pragma once
#include "attention/epilogue.cuh"

namespace {

// The next Q K^T: waits for tile `t` of keys unless `ready`, and issues it.
struct NextLogits {
  const QueryTile& tile;
  const Unmasked& open;
  u32 t;
  int n;        // the tile's number in the work item
  bool masked;
  bool real;    // else the tensor cores go through stale memory and nobody looks: a branch would serialise them
  u32 ready;
};

// Makes P of the logits `s` and issues O += P V of tile t (Promote: part = P V); under it `next` goes to `s`, and `top` and `low` become
// what can be known of it. Not `held`: there is no tile t. `first`: tile t may be the first of its item.
__device__ __forceinline__ void softmax_pv(Consumer& c, float (&s)[kBlockN / 2], float (&part)[kValueDim / 2], u32 t, bool held,
                                           const NextLogits& next, float (&top)[2], float (&low)[2], bool first = true) {
  float x[kBlockN / 2], shift[2], sum[4] = {};
  exponent_shift(c.rows, c.scale, shift);
  exponents(x, s, c.scale, shift);
  ptx::keep(x);
  ptx::mbarrier_wait_uniform(c.k_full(next.t), c.parity(next.t), next.ready);
  issue_qk(s, next.tile.q, c.k(next.t));
  // NOTES: the search for the maxima of S fills the gaps between the exponentials of X.
  exponentiate<0, kBlockN / 4>(x, sum);
  ptx::wgmma_wait<0>();
  ptx::keep(s);
  if (next.real) c.release_k(next.t);
  c.mask_and_scan(next.tile, next.open, s, next.n, next.masked, top, low);
  exponentiate<kBlockN / 4, kBlockN / 2>(x, sum);
  add_row_sum(c.rows, sum);
#pragma unroll
  for (int i = 0; i < kBlockN / 16; i++) pack_p(c.p, x, i);
  ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t), !held);
  if (first) c.clear_tail(t);
  if constexpr (kPv == Pv::Promote) {
    issue_pv(part, c.p, c.v(t), true);
  } else {
    ptx::keep(c.o);
    issue_pv(c.o, c.p, c.v(t), c.fresh);
  }
  c.fresh = false;
}

// Waits for P V of tile t. Promote: adds it to O, which is owed `rescale`.
__device__ __forceinline__ void wait_pv(Consumer& c, float (&part)[kValueDim / 2], const float (&rescale)[2], u32 t, bool held) {
  ptx::wgmma_wait<0>();
  if constexpr (kPv == Pv::Promote) ptx::keep(part);
  else ptx::keep(c.o);
  if (held) c.release_v(t);
  if constexpr (kPv == Pv::Promote) promote(c.o, part, rescale);
}

__device__ __forceinline__ void mainloop_double(Consumer& c) {
  QueryTile tile = c.acquire(0);
  // `s` may hold the first logits of the item, computed under the last product of the item before; `top` and `low` are what
  // `mask_and_scan` found in them.
  float s[kBlockN / 2], top[2], low[2];
  bool begun = false;
  while (tile.key_tiles >= 0) {
    c.begin();
    // NOTES: with an epilogue of its own here, and a second way back, the assembler does not know the loops below uniform.
    if (tile.key_tiles == 0) {
      c.clear_o();
      tile = c.acquire(c.item + 1);
    } else {
      const int key_tiles = tile.key_tiles;
      const u32 stop = c.kv + key_tiles - (begun ? 1 : 0);
      Unmasked open = c.unmasked_tiles(tile);
      u32 ready = 0;
      auto step = [&](bool masked) {
        const u32 t = c.kv;
        const int n = stop - t - 1;
        const bool first = masked;  // NOTES: a literal, so that the loop of other tiles has no code for tails
        masked = masked && open.hides(n);
        c.kv = t + 1;
        float part[kValueDim / 2];
        softmax_pv(c, s, part, t - 1, true, {tile, open, t, n, masked, true, ready}, top, low, first);
        ready = ptx::mbarrier_try_wait(c.k_full(t + 1), c.parity(t + 1));
        const float rescale[2] = {c.rows.rescale[0], c.rows.rescale[1]};
        const bool moved = update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
        wait_pv(c, part, rescale, t - 1, true);
        if (kPv != Pv::Promote && moved) scale_rows(c.o, c.rows.rescale);
      };

      // First logits, where the item before did not bring them
      if (!begun) {
        ptx::mbarrier_wait_uniform(c.k_full(c.kv), c.parity(c.kv));
        issue_qk(s, tile.q, c.k(c.kv));
        ptx::wgmma_wait<0>();
        ptx::keep(s);
        c.release_k(c.kv);
        c.kv++;
        c.mask_and_scan(tile, open, s, key_tiles - 1, open.hides(key_tiles - 1), top, low);
      }
      update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, open.hides(key_tiles - 1));

      // Masked tiles, then the others, with a flush where one is due
      c.kv = uniform(c.kv);
      int left = c.count(stop - c.kv), masked_left = c.count(max(0, left - open.end));
      if (kPaged && c.tail < kBlockN) masked_left = max(masked_left, 1);
      int open_left = c.count(max(0, left - masked_left - open.first));
      while (left > 0) {
        int run = kPv == Pv::Flush ? min(left, kFlushTiles) : left;
        left -= run;
        for (; run > 0 && masked_left > 0; run--, masked_left--) step(true);
        for (; run > 0 && (!kWindow || open_left > 0); run--, open_left--) step(false);
        for (; kWindow && run > 0; run--) step(true);
        if (kPv == Pv::Flush && left > 0) c.flush_o();
      }

      // The last product, and the next item's first logits
      const u32 t = c.kv;
      tile = c.acquire(c.item + 1);
      if constexpr (kCausal) open = c.unmasked_tiles(tile);
      begun = tile.key_tiles > 0;
      float part[kValueDim / 2];
      softmax_pv(c, s, part, t - 1, true, {tile, open, t, tile.key_tiles - 1, open.hides(tile.key_tiles - 1), begun, begun ? ready : 1}, top, low);
      wait_pv(c, part, c.rows.rescale, t - 1, true);
      c.kv = uniform(begun ? t + 1 : t);
    }
    epilogue(c);
  }
}

}  // namespace
