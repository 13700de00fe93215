// First kernel of the attention backward: what `attention_backward` needs of each query row, in one pass over dO, O and Q.
//
// A block owns a tile of kRows queries of one head. Layouts: backward.cuh. Grid (q_tiles * heads_q, batch).
#include "attention/backward.cuh"
#include "attention/backward_convert.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = kDim / 8;  // threads of a row
constexpr int kPass = kThreads / kLanes;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float dot(u32 a, u32 b, float sum) {
  sum = fmaf(ptx::bf16_low(a), ptx::bf16_low(b), sum);
  return fmaf(ptx::bf16_high(a), ptx::bf16_high(b), sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_prepare(const __grid_constant__ Backward p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x / p.heads_q, head = blockIdx.x - tile * p.heads_q, batch = blockIdx.y;
  const int kv_head = head / (p.heads_q / p.heads_kv);
  const i64 index = tile_index(p, batch, head, tile);
  const int piece = threadIdx.x % kLanes;

  // Load every row's piece
  uint4 o[kRows / kPass] = {}, d_out[kRows / kPass] = {};
  uint2 q[kRows / kPass] = {};
#pragma unroll
  for (int i = 0; i < kRows / kPass; i++) {
    const int row = tile * kRows + i * kPass + threadIdx.x / kLanes;
    if (row >= p.len_q) continue;
    q[i] = *reinterpret_cast<const uint2*>(row_of(p.q, p.q_strides, batch, row, head) + 8 * piece);
    if (p.delta != nullptr) continue;
    o[i] = *reinterpret_cast<const uint4*>(row_of(p.o, p.o_strides, batch, row, head) + 8 * piece);
    d_out[i] = *reinterpret_cast<const uint4*>(row_of(p.d_out, p.d_out_strides, batch, row, head) + 8 * piece);
  }

  // Clear what dQ is added up in
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + index * kSumFloats);
#pragma unroll
  for (int i = 0; i < kSumFloats / 4 / kThreads; i++) sum[i * kThreads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.turns != nullptr && threadIdx.x < 8) p.turns[8 * index + threadIdx.x] = 0;

  const float from_delta = 1.0f / descale_of(p.v_descale, p.v_descale_strides, batch, kv_head);
  float* terms = p.terms + index * kTermFloats;
#pragma unroll
  for (int i = 0; i < kRows / kPass; i++) {
    const int in_tile = i * kPass + threadIdx.x / kLanes, row = tile * kRows + in_tile;
    float delta = dot(o[i].x, d_out[i].x, dot(o[i].y, d_out[i].y, dot(o[i].z, d_out[i].z, dot(o[i].w, d_out[i].w, 0.0f))));
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) delta += ptx::shuffle_xor(delta, lanes);
    const bool live = row < p.len_q;
    if (live)
      *reinterpret_cast<uint4*>(row_of(p.dq, p.dq_strides, batch, row, head) + 8 * piece) =
          bf16x8_from_e4m3x8(q[i]);
    if (piece == 0) {
      const i64 at = ((i64)batch * p.heads_q + head) * p.len_q + row;
      const float infinity = __int_as_float(0x7f800000), lse = live ? p.lse[at] : -infinity;
      if (live && p.delta != nullptr) delta = p.delta[at];
      const bool empty = lse == -infinity;
      terms[in_tile] = empty ? infinity : lse * kLog2e;
      terms[kRows + in_tile] = empty ? 0.0f : delta * from_delta;
    }
  }
}
