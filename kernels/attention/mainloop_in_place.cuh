// Mainloop with one set of logit accumulators, whose exponentials are computed in place, so that P V of the tile before has
// registers of its own and is added to O in the gaps between them:
//
//   S = Q K_0^T; P = softmax(S)
//   for j = 1, 2, ...:  S = Q K_j^T;  part = P V_{j-1};  half of 2^S;  O = rescale O + part;  the rest;  P = 2^S
//   O = rescale O + P V_last
//
// A consumer's Q K^T is hidden by the softmax of the other. With IN_PLACE 2 they take turns at issuing products.
#pragma once
#include "attention/epilogue.cuh"
#include "attention/mainloop_double.cuh"

namespace {

struct InPlace {
  Consumer& c;
  float (&s)[kBlockN / 2];
  const bool second;  // of the two consumers

  __device__ __forceinline__ void take_turn() const {
    if (IN_PLACE != 2) return;
    if (second) ptx::named_barrier_sync<2, 256>();
    else ptx::named_barrier_sync<1, 256>();
  }
  __device__ __forceinline__ void end_turn() const {
    if (IN_PLACE != 2) return;
    if (second) ptx::named_barrier_arrive<1, 256>();
    else ptx::named_barrier_arrive<2, 256>();
  }
  // P of tile t, n of the item, and with `product` O += P V of the tile before.
  __device__ __forceinline__ void step(bool product, const QueryTile& tile, const Unmasked& open, u32 t, int n, bool masked) {
    float part[kValueDim / 2], sums[4], top[2], low[2];
    ptx::mbarrier_wait_uniform(c.k_full(t), c.parity(t));
    if (product) ptx::mbarrier_wait_uniform(c.v_full(t - 1), c.parity(t - 1));
    take_turn();
    issue_qk(s, tile.q, c.k(t));
    if (product) issue_pv(part, c.p, c.v(t - 1), true, sums, c.desc_ones);
    end_turn();
    const float owed[2] = {c.rows.rescale[0], c.rows.rescale[1]};
    if (product) ptx::wgmma_wait<1>();
    else ptx::wgmma_wait<0>();
    ptx::keep(s);
    c.release_k(t);
    c.mask_and_scan(tile, open, s, n, masked, top, low);
    update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
    float shift[2], sum[4] = {};
    exponent_shift(c.rows, c.scale, shift);
    exponents(s, s, c.scale, shift);
    exponentiate<0, kBlockN / 4, false>(s, sum);
    if (product) wait_pv(c, part, sums, owed, t - 1, true);
    exponentiate<kBlockN / 4, kBlockN / 2, false>(s, sum);
#pragma unroll
    for (int i = 0; i < kBlockN / 16; i++) pack_p(c.p, s, i);
  }
};

__device__ __forceinline__ void mainloop_in_place(Consumer& c) {
  QueryTile tile = c.acquire(0);
  float s[kBlockN / 2];
  InPlace loop = {c, s, uniform(c.warpgroup()) == 1};
  if (IN_PLACE == 2 && loop.second) ptx::named_barrier_arrive<1, 256>();
  while (tile.key_tiles >= 0) {
    c.begin();
    if (tile.key_tiles > 0) {
      const Unmasked open = c.unmasked_tiles(tile);
      c.kv = uniform(c.kv);
      const u32 stop = c.kv + tile.key_tiles;
      loop.step(false, tile, open, c.kv, tile.key_tiles - 1, open.hides(tile.key_tiles - 1));
      c.kv++;
      int left = tile.key_tiles - 1, masked_left = max(0, left - open.end);
      for (; kCausal && left > 0 && masked_left > 0; left--, masked_left--, c.kv++) loop.step(true, tile, open, c.kv, left - 1, true);
      for (; left > 0; left--, c.kv++) loop.step(true, tile, open, c.kv, left - 1, false);

      // The last product
      float part[kValueDim / 2], sums[4];
      ptx::mbarrier_wait_uniform(c.v_full(stop - 1), c.parity(stop - 1));
      issue_pv(part, c.p, c.v(stop - 1), true, sums, c.desc_ones);
      wait_pv(c, part, sums, c.rows.rescale, stop - 1, true);
    }
    epilogue(c);
    tile = c.acquire(c.item);
  }
}

}  // namespace
