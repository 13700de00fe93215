// Parameters that the host writes byte for byte (src/device/attention/params.rs). Strides count elements.
#pragma once
#include "attention/pages.cuh"
#include "attention/schedule.cuh"
#include "common/step_stats.cuh"
#include "common/types.cuh"

// 1: the largest P of each row is kept, for a backward whose dQ is in FP8.
#ifndef ROW_MAX
#define ROW_MAX 0
#endif
// 1: what the rounding of the output took is kept, for a backward whose delta is that of the output before it.
#ifndef RESIDUAL
#define RESIDUAL 0
#endif

// Extreme logits of one row in one split, in the form of `LogitWords`.
struct alignas(8) Extremes {
  u32 max, min;
};

struct Params {
  void* o;
  float* lse;                    // [batch, heads_q, len_q] or null
  const float* q_descale;
  const float* k_descale;
  const float* v_descale;
  const float* o_descale;        // E4M3 output only
  const float* logit_descale;    // [heads_q], E4M3 logits only
  LogitWords* telemetry;         // [heads_q]
  u32* counter;                  // two words, zero before the first launch; left zero
  i64 o_stride_batch, o_stride_row, o_stride_head;
  i64 q_descale_batch, q_descale_head, k_descale_batch, k_descale_head;
  i64 v_descale_batch, v_descale_head, o_descale_batch, o_descale_head;
  float softmax_scale;
  int batch, heads_q, heads_kv, len_q, len_k;
  int pack_gqa;                  // 1: the consumers of a block take different heads of a GQA group at the same rows
  int row_blocks;                // ceil(len_q / (pack_gqa ? 64 : 64 * consumers))
  int units;                     // batch * heads_q / (pack_gqa ? consumers : 1)
  int section;                   // units whose keys and values share the L2 cache
  // Split KV only. Units are `tile_heads` heads of a group, row_blocks ceil(len_q / (active_consumers * positions)).
  void* o_partial;               // [splits, batch, len_q, heads_q, kValueDim] F16, in units of v's descale: at most 448
  float* lse_partial;            // [splits, batch, len_q, heads_q], base 2
  int causal_offset;             // query i sees the keys up to i + causal_offset
  int splits;                    // parts of a tile's keys
  int active_consumers;          // 1 where one consumer has room for all rows
  int tile_heads;
  int positions;                 // 64 / tile_heads, rounded down
  int tile_heads_reciprocal;     // 2^16 / tile_heads, rounded up
  int units_per_batch;
  int out_e4m3;                  // 1: a single split leaves as E4M3 by its descale, 0: as BF16
  Extremes* extremes_partial;    // as lse_partial, with telemetry
  // Of the variants that ask for them
  const float* sinks;            // [heads_q], nats
  const Schedule* schedule;
  const float* v_center;         // [heads_kv, columns]: added to the output
  int window_left, window_right; // kNoWindow: no limit; causal is 0 to the right
  float soft_cap;
  int columns;                   // of the output, where the kernel has more (PADDED)
#if ROW_MAX
  float* row_max;                // as lse: log2 of the row's largest P
#elif RESIDUAL
  u8* residual;                  // [batch, len_q, heads_q, columns]: O before its rounding to BF16 minus O, as `residual_codes`
#endif
};
static_assert(!(ROW_MAX && RESIDUAL), "their addresses have one place");
static_assert(sizeof(Params) == 9 * 8 + 11 * 8 + 10 * 4 + 2 * 8 + 8 * 4 + 8 + 3 * 8 + 4 * 4 + (ROW_MAX || RESIDUAL ? 8 : 0),
              "the host writes this layout");

struct CombineParams {
  void* o;
  float* lse;                    // [batch, heads_q, len_q] or null
  const float* o_descale;
  LogitWords* telemetry;         // [heads_q] or null
  const void* o_partial;         // as in Params
  const float* lse_partial;
  const Extremes* extremes_partial;
  const float* v_descale;
  i64 o_stride_batch, o_stride_row, o_stride_head;
  i64 o_descale_batch, o_descale_head, v_descale_batch, v_descale_head;
  int batch, heads_q, heads_kv, len_q;
  int splits;
  int out_e4m3;
  int log2_row_warps;            // 0 to 3: log2 of the warps that share a row
  int columns;                   // of the output, at most kValueDim
  const float* sinks;            // as in Params, as is what follows
  Sequences sequences;
  const int* sequence_splits;    // parts of each sequence
  // Of a call on pages: what is joined, and rows of a block of it
  const Counts* counts;
  const Join* joins;
  int block_rows;
  int unused;
  const float* v_center;
};
static_assert(sizeof(CombineParams) == 8 * 8 + 7 * 8 + 8 * 4 + 10 * 8 + 2 * 4, "the host writes this layout");
