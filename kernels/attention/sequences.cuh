// Sequences of unequal length: padded and packed batches. Rows count over the axis batch * length of q, and of k and v; lists lie in
// device memory, in order, so that a replay of a graph may find other lengths.
#pragma once
#include "common/types.cuh"

// Null lists: every sequence has all rows of its entry of the batch.
struct Sequences {
  const int *q_starts, *q_ends, *k_starts, *k_ends;
  int count, unused;
};
static_assert(sizeof(Sequences) == 40, "the host writes this layout");

namespace {

constexpr int kValueTile = 128;  // keys

// The last sequence that starts at or before a row; -1 where none does. Empty sequences share their start with the next.
__device__ __forceinline__ int sequence_at(const int* starts, int count, int row) {
  int low = -1, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= row) low = middle; else high = middle;
  }
  return low;
}

// Values of each sequence start a tile of 128 keys of their own, so that a tile holds no other sequence's:
// ceil(keys / 128) <= floor(start of the next / 128) - floor(start / 128) + 1.
__device__ __forceinline__ int value_tile(int k_start, int sequence) { return k_start / kValueTile + sequence; }

}  // namespace
