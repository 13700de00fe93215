// Mainloop with two sets of logit accumulators: the logits of tile j + 1 are computed in the second set during the
// exponentials of tile j. The last tile of a work item computes the first logits of the next item.
//
//   S' = Q K_0^T
//   for j = 1, 2, ...:  S, S' = S', Q K_j^T;  O += softmax(S) V_{j-1}, meanwhile the maxima of S';  rescale O
//
// Flush and F16: P V is issued in halves as P is ready, and the maxima of S' are found among the exponentials of S. Promote: P V
// of the whole tile takes the registers of S, which are free once P is packed, and O = rescale O + P V.
#pragma once
#include "attention/epilogue.cuh"

namespace {

// Issues O += P V of tile t (Promote: part = P V), with what can be known of `next`, the logits of tile n, which are in flight.
// Not `held`: there is no tile t; not `real`: those logits are of no tile.
__device__ __forceinline__ void softmax_pv(Consumer& c, const QueryTile& tile, float (&s)[kBlockN / 2], float (&part)[kDim / 2],
                                           u32 t, float (&next)[kBlockN / 2], int n, bool masked, bool held, bool real,
                                           float (&top)[2], float (&low)[2]) {
  constexpr int kHalves = kBlockN / kPvKeys;
  float shift[2], sum[4] = {};
  exponent_shift(c.rows, c.scale, shift);
  if constexpr (kPv == Pv::Promote) {
    exponentiate<0, kBlockN / 2>(s, c.scale, shift, sum);
#pragma unroll
    for (int i = 0; i < kBlockN / 16; i++) pack_p(c.p, s, i);
    if (kRolled) ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t), !held);
    else ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t));
    issue_pv<0, kBlockN>(part, c.p, c.v(t), true);
    add_row_sum(c.rows, sum);
    ptx::wgmma_wait<1>();
    ptx::keep(next);
    if (real) c.release_k(t + 1);
    c.mask_and_scan(tile, next, n, masked, top, low);
    return;
  }
  ptx::keep(c.o);
#pragma unroll
  for (int half = 0; half < kHalves; half++) {
    if (half == kHalves - 1) {
      ptx::wgmma_wait<(kHalves > 1 ? 1 : 0)>();
      ptx::keep(next);
      if (real) c.release_k(t + 1);
      c.mask_and_scan(tile, next, n, masked, top, low);
    }
    if (half == 0) exponentiate<0, kPvKeys / 2>(s, c.scale, shift, sum);
    if (half == 1) exponentiate<kPvKeys / 2, kBlockN / 2>(s, c.scale, shift, sum);
#pragma unroll
    for (int i = kPvKeys / 16 * half; i < kPvKeys / 16 * (half + 1); i++) pack_p(c.p, s, i);
    if (half == 0 && kRolled) ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t), !held);
    if (half == 0 && !kRolled) ptx::mbarrier_wait_uniform(c.v_full(t), c.parity(t));
    if (half == 0) issue_pv<0, kPvKeys>(c.o, c.p, c.v(t), c.fresh);
    if (half == 1) issue_pv<kPvKeys, kBlockN>(c.o, c.p, c.v(t), c.fresh);
  }
  c.fresh = false;
  add_row_sum(c.rows, sum);
}

// Waits for P V of tile t. Promote: adds it to O, which is owed `rescale`.
__device__ __forceinline__ void wait_pv(Consumer& c, float (&part)[kDim / 2], const float (&rescale)[2], u32 t, bool held = true) {
  ptx::wgmma_wait<0>();
  if constexpr (kPv == Pv::Promote) ptx::keep(part);
  else ptx::keep(c.o);
  if (held) c.release_v(t);
  if constexpr (kPv == Pv::Promote) promote(c.o, part, rescale);
}

__device__ __forceinline__ void mainloop_double(Consumer& c) {
  QueryTile tile = c.acquire(0);
  // `odd` may hold the first logits of the item, computed under the last product of the item before; `top` and `low` are what
  // `mask_and_scan` found in them.
  float even[kBlockN / 2], odd[kBlockN / 2], top[2], low[2];
  bool begun = false;
  while (tile.key_tiles >= 0) {
    c.begin();
    if (tile.key_tiles == 0) {
      c.clear_o();
      epilogue(c);
      tile = c.acquire(c.item);
      continue;
    }
    const int key_tiles = tile.key_tiles;
    const u32 stop = c.kv + key_tiles - (begun ? 1 : 0);
    int whole = c.unmasked_tiles(tile);
    u32 ready = 0;
    auto step = [&](float (&s)[kBlockN / 2], float (&next)[kBlockN / 2], bool masked) {
      const u32 t = c.kv;
      const int n = stop - t - 1;
      ptx::mbarrier_wait_uniform(c.k_full(t), c.parity(t), ready);
      issue_qk(next, tile.q, c.k(t));
      c.kv = t + 1;
      float part[kDim / 2];
      softmax_pv(c, tile, s, part, t - 1, next, n, masked && n >= whole, true, true, top, low);
      ready = masked ? 0 : ptx::mbarrier_try_wait(c.k_full(t + 1), c.parity(t + 1));

      // Wait for P V, rescale O
      const float rescale[2] = {c.rows.rescale[0], c.rows.rescale[1]};
      const bool moved = update_row_max(next, top, low, c.rows, c.scale, masked && n >= whole);
      wait_pv(c, part, rescale, t - 1);
      if (kPv != Pv::Promote && moved) scale_rows(c.o, c.rows.rescale);
    };

    // First logits, where the item before did not bring them
    if (!begun) {
      ptx::mbarrier_wait_uniform(c.k_full(c.kv), c.parity(c.kv));
      issue_qk(odd, tile.q, c.k(c.kv));
      ptx::wgmma_wait<0>();
      ptx::keep(odd);
      c.release_k(c.kv);
      c.kv++;
      c.mask_and_scan(tile, odd, key_tiles - 1, key_tiles > whole, top, low);
    }
    update_row_max(odd, top, low, c.rows, c.scale, key_tiles > whole);

    // Pairs of tiles follow, so that the last one's logits are in `even`: the masked ones apart, and a flush where due
    if (key_tiles % 2 != 0) {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; i++) even[i] = odd[i];
    } else {
      // NOTES: a loop that never repeats, since straight code costs spills.
      do step(odd, even, true);
      while (c.params.units < 0);
    }
    c.kv = uniform(c.kv);
    int pairs = (key_tiles - 1) / 2, masked_pairs = (max(0, (int)(stop - c.kv) - whole) + 1) / 2;
    while (pairs > 0) {
      int run = kPv == Pv::Flush ? min(pairs, kFlushTiles / 2) : pairs;
      pairs -= run;
      for (; run > 0 && masked_pairs > 0; run--, masked_pairs--) {
        step(even, odd, true);
        step(odd, even, true);
      }
      for (; run > 0; run--) {
        step(even, odd, false);
        step(odd, even, false);
      }
      if (kPv == Pv::Flush && pairs > 0) c.flush_o();
    }

    // The last product, and the next item's first logits
    // NOTES: where there are none the tensor cores go through stale memory and nobody looks: a branch would serialise them. The
    // loop never repeats, as above.
    const u32 t = c.kv;
    tile = c.acquire(c.item + 1);
    if constexpr (kCausal) whole = c.unmasked_tiles(tile);
    begun = tile.key_tiles > 0;
    do {
      ptx::mbarrier_wait_uniform(c.k_full(t), c.parity(t), begun ? ready : 1);
      issue_qk(odd, tile.q, c.k(t));
      float part[kDim / 2];
      softmax_pv(c, tile, even, part, t - 1, odd, tile.key_tiles - 1, tile.key_tiles > whole, true, begun, top, low);
      wait_pv(c, part, c.rows.rescale, t - 1);
    } while (c.params.units < 0);
    c.kv = uniform(begun ? t + 1 : t);
    epilogue(c);
  }
}

}  // namespace
