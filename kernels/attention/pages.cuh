// A paged KV cache, and the plan of a call on it, which append.cu leaves and paged.cu and combine.cu read.
#pragma once
#include "common/types.cuh"

// A part of a sequence's keys, tiles from `first` to before `end`, with all blocks of the sequence's query rows. The list has an entry
// for every block of a part, all alike, so that a work item finds its part by one division. A sequence without keys has one part
// of no tiles; one without queries has none.
struct alignas(16) Part {
  int sequence;
  int batch, row;      // of the sequence's first query: entry of the batch, row of that entry
  int queries, keys;   // of the sequence
  int first, end;
  int begin, blocks;   // the part's first entry in the list, and how many it has
  int partial;         // the row of its first query in the partial results, or -1 where the part is the only one and writes the output
  int unused[2];
};
static_assert(sizeof(Part) == 48, "the host makes room for lists of them");

// A block of query rows of a sequence that has several parts: what combine.cu joins.
struct alignas(16) Join {
  int sequence, batch;
  int row, rows;       // first row of the block in its entry of the batch, and how many there are
  int partial;         // its first row in the partial results of the first part
  int stride;          // rows from part to part
  int parts;
  int unused;
};
static_assert(sizeof(Join) == 32, "the host makes room for lists of them");

// How many entries the two lists have.
struct Counts {
  int parts, joins;
};

// Which rows of q are whose: the rows of entry s of the batch, or those of a packed batch from cu_seqlens[s] on.
struct Queries {
  const int* cu_seqlens;  // [sequences + 1], or null
  int length;             // of an entry of the batch
  int block;              // rows that one work item takes

  __device__ __forceinline__ int begin(int sequence) const { return cu_seqlens == nullptr ? 0 : max(0, min(cu_seqlens[sequence], length)); }
  __device__ __forceinline__ int count(int sequence) const {
    return cu_seqlens == nullptr ? length : max(0, min(cu_seqlens[sequence + 1], length) - begin(sequence));
  }
  __device__ __forceinline__ int batch(int sequence) const { return cu_seqlens == nullptr ? sequence : 0; }
};
static_assert(sizeof(Queries) == 16, "the host writes this layout");

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
  const Counts* counts;
  const Part* parts;
};
static_assert(sizeof(PagedParams) == sizeof(BlockTable) + 2 * 8, "the host writes this layout");
