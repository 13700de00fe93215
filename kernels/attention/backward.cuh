// What the three kernels of the attention backward share: configuration, arguments, layouts.
//
//   backward_prepare   delta, log-sum-exp to the base 2, dQ sums cleared
//   backward           dK, dV, and dQ added up in f32
//   backward_finish    dQ to BF16
//
// Between them lie, in the workspace, one tile of kRows queries of one head after the other ([batch, heads_q, q_tiles]):
//   terms    [kTerms][kRows] f32: the log-sum-exp to the base 2, plus infinity where a row sees no key or does not exist; delta in
//            units of V's descale; with DQ8 what dS is multiplied by before its cast
//   dq_sum   [kParts][8][8][32][4] f32: lane l of consumer warp w adds its accumulators 4 i to 4 i + 3 of a part at [part][w][i][l]
//
// VARLEN: tiles are those of sequences, as sequences.cuh numbers them, and the batch of these layouts is one.
#pragma once
#include "attention/mask.cuh"
#include "attention/quad.cuh"
#include "attention/sequences.cuh"
#include "common/types.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
// Keys of a block and queries of a tile (src/device/attention/backward_cut.rs).
#ifndef BLOCK_KEYS
#define BLOCK_KEYS 128
#endif
#ifndef BLOCK_ROWS
#define BLOCK_ROWS 64
#endif
// 1: heads have fewer columns than HEAD_DIM, p.d of them in q and k, p.d_v in v and the output; the others are zero.
#ifndef FILL
#define FILL 0
#endif
// Columns that are multiplied, of those: the others are zero in every call.
#ifndef COLUMNS
#define COLUMNS HEAD_DIM
#endif
// 1: sequences of unequal length, packed or padded.
#ifndef VARLEN
#define VARLEN 0
#endif
// 1: a window to the left, to the right or both; the right one of causal calls is 0.
#ifndef WINDOW
#define WINDOW 0
#endif
// 1: dQ of E4M3 codes of dS, which have a scale per row: a power of two that certainly fits, from |dO|, a bound on |v| and the row's
// largest P.
#ifndef DQ8
#define DQ8 0
#endif
// 1, in the first kernel: delta is taken from the output before its rounding.
#ifndef RESIDUAL
#define RESIDUAL 0
#endif
// 1: a logit per query head joins the row sum.
#ifndef SINK
#define SINK 0
#endif
// 1: a constant of each KV head was subtracted from values and added to the output.
#ifndef CENTER
#define CENTER 0
#endif

// Written by the host byte for byte; strides count elements: batch, row, head.
struct Backward {
  const u8* q;                   // E4M3, [batch, len_q, heads_q, d]
  const u8* k;                   // E4M3, [batch, len_k, heads_kv, d]
  const u8* v;                   // E4M3, as k
  const u16* o;                  // BF16, as q; not read where delta is given
  const u16* d_out;              // BF16, as q
  const float* lse;              // [batch, heads_q, len_q], nats
  const float* delta;            // [batch, heads_q, len_q]: sum of P dP; or null: sum of dO O
  u16* dq;                       // BF16
  u16* dk;
  u16* dv;
  float* dq_sum;
  float* terms;
  u32* turns;                    // [batch, heads_q, q_tiles, 8], deterministic only: key tiles that each consumer warp's part has
  const float* q_descale;        // [batch, heads_kv]
  const float* k_descale;
  const float* v_descale;
  i64 q_strides[3], k_strides[3], v_strides[3], o_strides[3], d_out_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
  i64 q_descale_strides[2], k_descale_strides[2], v_descale_strides[2];
  float softmax_scale;
  int batch, heads_q, heads_kv, len_q, len_k;
  int q_tiles;                   // ceil(len_q / kRows)
  int diagonal;                  // causal: query i sees the keys up to i + diagonal
  int section;                   // KV heads whose blocks run at a time and share the L2 cache
  int d;                         // columns of a head of q and k
  Sequences sequences;
  const float* sinks;            // [heads_q], nats
  float* d_sinks;                // [heads_q]
  float* sink_parts;             // [batch, heads_q, q_tiles]
  const float* v_center;         // [heads_kv, d_v]; delta is of the output without it
  float soft_cap;
  int window_left, window_right; // keys that a query sees before and after its position; causal: 0 after; kNoWindow: all
  int d_v;                       // columns of a head of v and the output
#if DQ8
  const float* row_max;          // [batch, heads_q, len_q]: log2 of the row's largest P
  const float* v_norm;           // [batch, heads_kv]: bound on |v|, or null: what the range of E4M3 says
  i64 v_norm_strides[2];
#elif RESIDUAL
  const u8* residual;            // as o: what the rounding of the output took (`residual_value`)
  i64 residual_strides[3];
#endif
};
static_assert(sizeof(Backward) == 16 * 8 + 24 * 8 + 6 * 8 + 10 * 4 + 40 + 4 * 8 + 4 * 4 + (DQ8 || RESIDUAL ? 4 * 8 : 0),
              "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kColumns = COLUMNS;
constexpr bool kWide = kDim == 256;              // consumers share the columns of 64 keys; else each has 64 keys
constexpr int kKeys = BLOCK_KEYS;                      // of a block
constexpr int kRows = BLOCK_ROWS;                      // queries of a tile
constexpr int kTerms = 2 + DQ8, kQuantTerm = 2;
constexpr int kTermFloats = kTerms * kRows;
constexpr int kSumFloats = kRows * kDim;
constexpr int kParts = kSumFloats / (2 * 64 * 64);  // 64 x 64 accumulators of a tile of dQ, for each of two consumers
static_assert(kDim == 64 || kDim == 128 || (kDim == 256 && !DQ8), "the layouts below");

constexpr bool kFeatures = VARLEN || WINDOW;     // tiles may hold rows of other sequences, and rows that see no key

// One sequence: where its rows lie, and which of them see a key or are seen.
struct Sequence {
  int batch_q, batch_k, q_row, k_row;  // its first rows
  int len_q, len_k;
  int diagonal;                        // query i is at key i + diagonal
  // The first query that sees a key, and the first key that is seen. All after them do and are.
  __device__ __forceinline__ int first_query(const Backward& p) const {
    return len_k == 0 ? len_q : max(0, -(diagonal + p.window_right));
  }
  __device__ __forceinline__ int first_key(const Backward& p) const { return max(0, diagonal - p.window_left); }
};

// A tile of a sequence; or of the gap before the first, which is sequence -1.
struct Slot {
  int sequence, tile;
};
#if VARLEN
// A row that a list names, of `rows`. Lists that break their rules give wrong rows, but none outside of the tensors.
__device__ __forceinline__ int listed_row(const int* list, int sequence, int rows) { return min(max(list[sequence], 0), rows); }
// Tiles of `size` rows are numbered so that sequence s has those from `first_slot` on: enough for its rows and the gap after it,
// without a prefix sum. `rows / size + count + 1` slots hold the whole axis.
__device__ __forceinline__ int first_slot(const int* starts, int rows, int sequence, int size) {
  return sequence < 0 ? 0 : listed_row(starts, sequence, rows) / size + sequence + 1;
}
__device__ __forceinline__ Slot slot_at(const int* starts, int count, int rows, int size, int index) {
  int low = -1, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_slot(starts, rows, middle, size) <= index) low = middle; else high = middle;
  }
  return {low, index - first_slot(starts, rows, low, size)};
}
// Rows from a sequence's first, or of the gap before all, to the next one's.
__device__ __forceinline__ int rows_to_next(const int* starts, int count, int rows, int sequence) {
  return (sequence + 1 < count ? listed_row(starts, sequence + 1, rows) : rows) - (sequence < 0 ? 0 : listed_row(starts, sequence, rows));
}
// NOTES: through a shuffle the assembler knows a value uniform.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
#endif

// Of a dense call, `number` is the row of the batch.
__device__ __forceinline__ Sequence sequence_of(const Backward& p, int number) {
#if VARLEN
  Sequence s = {};
  if (number < 0) return s;
  const int rows_q = p.batch * p.len_q, rows_k = p.batch * p.len_k;
  const int q = uniform(listed_row(p.sequences.q_starts, number, rows_q)), k = uniform(listed_row(p.sequences.k_starts, number, rows_k));
  // NOTES: an empty one may begin where the rows end.
  s.batch_q = min(q / p.len_q, p.batch - 1), s.batch_k = min(k / p.len_k, p.batch - 1);
  s.q_row = q - s.batch_q * p.len_q, s.k_row = k - s.batch_k * p.len_k;
  s.len_q = max(0, min(uniform(listed_row(p.sequences.q_ends, number, rows_q)) - q, p.len_q - s.q_row));
  s.len_k = max(0, min(uniform(listed_row(p.sequences.k_ends, number, rows_k)) - k, p.len_k - s.k_row));
  s.diagonal = s.len_k - s.len_q;
  return s;
#else
  return {number, number, 0, 0, p.len_q, p.len_k, p.diagonal};
#endif
}

__device__ __forceinline__ i64 tile_index(const Backward& p, int batch, int head, int tile) {
  return ((i64)batch * p.heads_q + head) * p.q_tiles + tile;
}
template <class T> __device__ __forceinline__ T* row_of(T* x, const i64 (&strides)[3], int batch, int row, int head) {
  return x + batch * strides[0] + row * strides[1] + head * strides[2];
}
__device__ __forceinline__ float descale_of(const float* x, const i64 (&strides)[2], int batch, int kv_head) {
  return x[batch * strides[0] + kv_head * strides[1]];
}

}  // namespace
