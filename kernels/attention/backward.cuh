// What the three kernels of the attention backward share: configuration, arguments, layouts.
//
//   backward_prepare   delta, log-sum-exp to the base 2, Q in BF16, dQ sums cleared
//   backward           dK, dV, and dQ added up in f32
//   backward_finish    dQ to BF16
//
// Between them lie, in the workspace, one tile of kRows queries of one head after the other ([batch, heads_q, q_tiles]):
//   terms    [2][kRows] f32: the log-sum-exp to the base 2, plus infinity where a row sees no key or is none; then delta in
//            units of V's descale
//   dq_sum   [8][8][32][4] f32: lane l of consumer warp w adds its accumulators 4 i to 4 i + 3 at [w][i][l]
// and Q in BF16, in units of its descale, where dQ will leave: [batch, len_q, heads_q, d] by dQ's strides.
#pragma once
#include "attention/quad.cuh"
#include "common/types.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
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
  int unused;
};
static_assert(sizeof(Backward) == 16 * 8 + 24 * 8 + 6 * 8 + 10 * 4, "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kKeys = 128;                       // of a block
constexpr int kRows = kDim == 128 ? 64 : 128;    // queries of a tile
constexpr int kTermFloats = 2 * kRows;
constexpr int kSumFloats = kRows * kDim;
static_assert(kDim == 64 || kDim == 128, "a tile of dQ is one 64 x 64 accumulator for each of two consumers");
static_assert(kSumFloats == 2 * 64 * 64, "dq_sum's layout");

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
