// A paged KV cache, and the plan of a call on it, which append.cu leaves and paged.cu and combine.cu read.
#pragma once
#include "common/types.cuh"

// A part of a sequence's keys: tiles from `first` to before `end`. A sequence without keys has one, of no tiles.
struct alignas(16) Part {
  int sequence;  // its complement where the part is the only one, and writes the output
  int first, end;
  int keys;      // of the sequence
};

// Which pages the tokens of each sequence lie in: token t of sequence s is row t % page_size of page table[s][t / page_size].
// `lengths` are counted before `added` tokens, which a call appends first.
struct BlockTable {
  const int* pages;    // [sequences, pages_per_sequence]
  const int* lengths;  // [sequences]
  i64 stride;          // of `pages`, from sequence to sequence
  int pages_per_sequence;
  int log2_page_size;  // 4 to 8
  int count;           // pages of the cache
  int added;

  // Tokens of a sequence, as many as its row has room for.
  __device__ __forceinline__ int keys(int sequence) const {
    return max(0, min(lengths[sequence] + added, pages_per_sequence << log2_page_size));
  }
};
static_assert(sizeof(BlockTable) == 3 * 8 + 4 * 4, "the host writes this layout");

// What paged.cu reads besides `Params`.
struct PagedParams {
  BlockTable table;
  const int* starts;   // [sequences + 1], the number of each sequence's first part
  const Part* parts;
};
static_assert(sizeof(PagedParams) == sizeof(BlockTable) + 2 * 8, "the host writes this layout");
