// Masks on the logits of a tile: which of them a row of a consumer sees (mask.cuh says which keys those are), and the scan for
// extremes that goes with them.
#pragma once
#include "attention/consumer.cuh"

namespace {

// Sets logits past a row's last visible key to minus infinity. `last[r]` counts from this thread's first key of the tile.
template <int N> __device__ __forceinline__ void mask(float (&s)[N], const int (&last)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++)
    if ((i >> 2) * 8 + (i & 1) > last[(i >> 1) & 1]) s[i] = __int_as_float(0xff800000);
}
// The same; `low` takes in the smallest of what stays.
template <int N> __device__ __forceinline__ void mask(float (&s)[N], const int (&last)[2], float (&low)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = (i >> 1) & 1;
    const bool hidden = (i >> 2) * 8 + (i & 1) > last[r];
    low[r] = hidden ? low[r] : fminf(low[r], s[i]);
    s[i] = hidden ? __int_as_float(0xff800000) : s[i];
  }
}
// Logits before a row's first visible key likewise.
template <int N> __device__ __forceinline__ void mask_before(float (&s)[N], const int (&first)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++)
    if ((i >> 2) * 8 + (i & 1) < first[(i >> 1) & 1]) s[i] = __int_as_float(0xff800000);
}
// `low` becomes the smallest of the logits that no mask took.
template <int N> __device__ __forceinline__ void visible_min(const float (&s)[N], float (&low)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = (i >> 1) & 1;
    low[r] = s[i] == __int_as_float(0xff800000) ? low[r] : fminf(low[r], s[i]);
  }
}

__device__ __forceinline__ Unmasked Consumer::unmasked_tiles(const QueryTile& tile) const {
  const Lengths length = item_lengths(tile.item);
  Unmasked open = {0, length.k / kBlockN};
  if constexpr (kCausal) open.end = min(open.end, max(0, last_visible_key(params, length, tile.row) + 1) / kBlockN);
  if constexpr (kSplitKv || kWindow) open.end = max(0, open.end - tile.first_key_tile);
  if constexpr (kWindow) {
    const int last_row = min(tile.row + row_of(params, kRows - 1).position, length.q - 1);
    open.first = max(0, ceil_div(max(0, first_visible(length, last_row, params.window_left)), kBlockN) - tile.first_key_tile);
  }
  return open;
}
// The last key that row r of this thread sees, counted from its first key of tile n.
__device__ __forceinline__ int Consumer::last_key(const QueryTile& tile, int n, int r) const {
  const Place at = place();
  const int row = tile.row + row_of(params, at.row + 8 * r).position;
  const Lengths length = lengths(params, slot(tile.item));
  int last = length.k - 1;
  if constexpr (kCausal) last = min(last, last_visible_key(params, length, row));
  return (row < length.q ? last : -1) - (tile.first_key_tile + n) * kBlockN - 2 * at.quad;
}
// The first, with windows.
__device__ __forceinline__ int Consumer::first_key(const QueryTile& tile, int n, int r) const {
  const Place at = place();
  const int row = tile.row + row_of(params, at.row + 8 * r).position;
  const int first = first_visible(lengths(params, slot(tile.item)), row, params.window_left);
  return first - (tile.first_key_tile + n) * kBlockN - 2 * at.quad;
}
// Hides the logits of keys that a row does not see. `low` takes in the smallest of what stays, with telemetry.
template <bool Min>
__device__ __forceinline__ void Consumer::mask_tile(const QueryTile& tile, const Unmasked& open, float (&s)[kBlockN / 2], int n, float (&low)[2]) {
  if (!kWindow || n >= open.end) {
    const int last[2] = {last_key(tile, n, 0), last_key(tile, n, 1)};
    if (Min && !kWindow) mask(s, last, low); else mask(s, last);
  }
  if constexpr (kWindow) {
    if (n < open.first) {
      const int first[2] = {first_key(tile, n, 0), first_key(tile, n, 1)};
      mask_before(s, first);
    }
    if (Min) visible_min(s, low);
  }
}
// Masks (and rounds) the logits of tile n, and finds their extremes: `top` and `low` by `scan`.
__device__ __forceinline__ void Consumer::mask_and_scan(const QueryTile& tile, const Unmasked& open, float (&s)[kBlockN / 2], int n, bool masked,
                                                        float (&top)[2], float (&low)[2]) {
  float seen[2] = {-kLowest, -kLowest};
  if constexpr (kSoftCap && !kRawMax) soft_cap(s, tile.to_caps);
  if (masked) mask_tile<kTelemetry>(tile, open, s, n, seen);
  if constexpr (kSoftCap && kRawMax) exact_max(s, top), exact_min(s, low);
  else scan<kTelemetry>(s, top, low);
  if (masked) low[0] = seen[0], low[1] = seen[1];
  if constexpr (kSoftCap && kRawMax) {
    soft_cap(s, tile.to_caps);
    if (masked) mask_tile<false>(tile, open, s, n, seen);
  }
  if constexpr (kLogitsE4m3) round_logits(tile, open, s, n, masked, top, low);
}

}  // namespace
