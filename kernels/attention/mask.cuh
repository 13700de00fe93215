// Which keys a query sees. Rows and keys count from the first of their sequence; the last query is at the last key.
#pragma once
#include "common/types.cuh"

namespace {

// Queries and keys of one sequence.
struct Lengths {
  int q, k;
};

// A window wider than any sequence: no limit.
constexpr int kNoWindow = 1 << 28;

// Ends of the keys that row `row` sees, by the window on that side; causal is a right window of 0. Both may lie outside of the keys,
// and the first after the last.
__device__ __forceinline__ int first_visible(Lengths length, int row, int left) { return row + length.k - length.q - left; }
__device__ __forceinline__ int last_visible(Lengths length, int row, int right) { return row + length.k - length.q + right; }

// Tiles of keys that the rows from `row` to `end` see.
struct KeyTiles {
  int first, count;
};
__device__ __forceinline__ KeyTiles visible_tiles(Lengths length, int row, int end, int left, int right, int tile_keys) {
  const int keys = max(0, min(length.k, last_visible(length, min(end, length.q), right)));
  const int first = max(0, first_visible(length, row, left)) / tile_keys;
  return {first, max(0, ceil_div(keys, tile_keys) - first)};
}

}  // namespace
