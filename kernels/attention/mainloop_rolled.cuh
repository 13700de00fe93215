// The double-buffered mainloop with one copy of its code, for splits of few tiles: such a call waits for its own instructions,
// which come from device memory. The same loop body makes every tile, the first logits of the next item and an item's last
// product; its first turn, of no tile, fetches the instructions while the first copies are in flight.
#pragma once
#include "attention/mainloop_double.cuh"

namespace {

__device__ __forceinline__ void mainloop_rolled(Consumer& c) {
  QueryTile tile = {0, 0, 0, c.desc_k, 0, 0.0f};
  float s[kBlockN / 2] = {}, top[2], low[2];
  c.rows = {}, c.scale = 0.0f, c.fresh = true;
  int left = 0, collected = 0;  // tiles of the item whose logits are still to come; products since O was flushed
  Unmasked open = {0, 0};
  bool held = false;                       // `s` is of the current item
  for (bool begun = false;; begun = true) {
    const bool crossing = left == 0;
    if (crossing && begun) {
      tile = c.acquire(c.item + (held ? 1 : 0));
      open = c.unmasked_tiles(tile), left = max(0, tile.key_tiles);
    }
    const bool real = left > 0, masked = open.hides(left - 1);
    const u32 t = c.kv;
    float part[kValueDim / 2], sums[4];
    softmax_pv(c, s, part, sums, t - 1, held, {tile, open, t, left - 1, masked, real, !real}, top, low);
    wait_pv(c, part, sums, c.rows.rescale, t - 1, held);
    if (crossing && begun) {
      // An item without keys ends before it begins
      bool empty = tile.key_tiles == 0;
      do {
        if (held) epilogue(c);
        held = empty, empty = false;
        if (held || real) c.begin();
        if (held) c.clear_o();
      } while (held);
      if (tile.key_tiles < 0) break;
      held = real, collected = -1;
    }
    if (real) {
      const bool moved = update_row_max(s, top, low, c.rows, c.scale, tile.to_caps, masked);
      if (kPv != Pv::Promote && moved) scale_rows(c.o, c.rows.rescale);
      if (kPv == Pv::Flush && ++collected == kFlushTiles) c.flush_o(), collected = 0;
    }
    c.kv = uniform(real ? t + 1 : t), left = uniform(real ? left - 1 : 0);  }
}

}  // namespace
