// Logits through E4M3, in units of the logit descale of their head: overflow is counted, and the rounded logits enter the softmax.
#pragma once
#include "attention/mask_logits.cuh"

namespace {

// Logits that do not fit E4M3 in units of the descale, but for masked ones. `to_units` is 0 for a row that does not count.
template <int N> __device__ __forceinline__ u32 count_overflow(const float (&s)[N], const float (&to_units)[2]) {
  u32 count = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float x = fabsf(s[i] * to_units[(i >> 1) & 1]);
    count += x > 448.0f && x < __int_as_float(0x7f800000);
  }
  return count;
}
// Rounds logits to E4M3 in units of the descale.
template <int N> __device__ __forceinline__ void round_to_e4m3(float (&s)[N], float to_units) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const u32 h = ptx::f16x2_from_e4m3x2(ptx::e4m3x2(s[i] * to_units, s[i + 1] * to_units));
    s[i] = ptx::f32_from_f16((u16)h);
    s[i + 1] = ptx::f32_from_f16((u16)(h >> 16));
  }
}

// Takes in the extremes of tile n, counts what does not fit, and rounds the logits and their maxima `top`.
__device__ __forceinline__ void Consumer::round_logits(const QueryTile& tile, const Unmasked& open, float (&s)[kBlockN / 2], int n,
                                                       bool masked, float (&top)[2], float (&low)[2]) {
  take_extremes(s, top, low, rows, tile.to_caps, masked);
  // NOTES: counted where the extremes show that there is something to count.
  const float most = fmaxf(fmaxf(top[0], top[1]), -fminf(low[0], low[1])) * to_units;
  if (__any_sync(~0u, most > 448.0f)) {
    // Behind the queries of a sequence lie those of the next
    float units[2] = {to_units, to_units};
#pragma unroll
    for (int r = 0; kVarlen && r < 2; r++)
      if (tile.row + row_of(params, place().row + 8 * r).position >= lengths(params, slot(tile.item)).q) units[r] = 0.0f;
    rows.overflow += count_overflow(s, units);
  }
  // NOTES: rounding keeps order, so the largest logit rounded is the largest rounded logit. It turns a masked one into
  // -448, so the mask runs again.
#pragma unroll
  for (int r = 0; !kSoftCap && r < 2; r++) rows.raw_max[r] = fmaxf(rows.raw_max[r], top[r]);
  const float tops[2] = {top[0], top[1]};
  round_to_e4m3(top, to_units);
  round_to_e4m3(s, to_units);
  if (masked) {
    mask_tile<false>(tile, open, s, n, low);
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = tops[r] < kLowest ? tops[r] : top[r];
  }
}

}  // namespace
