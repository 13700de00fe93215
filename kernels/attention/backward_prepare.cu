// First kernel of the attention backward: what `attention_backward` needs of each query row, in one pass over dO and O.
//
// A block owns a tile of kRows queries of one head. Layouts: backward.cuh. Grid (q_tiles * heads_q, batch); VARLEN: (.., 1).
//
// Of rows that see no key, or are in no sequence, nothing is read.
#include "attention/backward.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = kDim / 8;  // threads of a row
constexpr int kPass = kThreads / kLanes;
constexpr float kLog2e = 1.4426950408889634f;

[[maybe_unused]] __device__ __forceinline__ float dot(u32 a, u32 b, float sum) {
  sum = fmaf(ptx::bf16_low(a), ptx::bf16_low(b), sum);
  return fmaf(ptx::bf16_high(a), ptx::bf16_high(b), sum);
}

#if CENTER
// The same of a row of O without the center `m` of these dims.
__device__ __forceinline__ float dot_without(const uint4& o, const float (&m)[8], const uint4& d_out) {
  const u32 of_o[4] = {o.x, o.y, o.z, o.w}, of_d[4] = {d_out.x, d_out.y, d_out.z, d_out.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(ptx::bf16_low(of_o[i]) - m[2 * i], ptx::bf16_low(of_d[i]), sum);
    sum = fmaf(ptx::bf16_high(of_o[i]) - m[2 * i + 1], ptx::bf16_high(of_d[i]), sum);
  }
  return sum;
}
#endif

#if RESIDUAL
// The same of what the rounding of O took.
__device__ __forceinline__ float dot_residual(const uint2& codes, const uint4& o, const uint4& d_out) {
  const u32 of_c[2] = {codes.x, codes.y}, of_o[4] = {o.x, o.y, o.z, o.w}, of_d[4] = {d_out.x, d_out.y, d_out.z, d_out.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int low = (signed char)(of_c[i / 2] >> 16 * (i % 2)), high = (signed char)(of_c[i / 2] >> (16 * (i % 2) + 8));
    sum = fmaf(ptx::residual_value(low, ptx::bf16_low(of_o[i])), ptx::bf16_low(of_d[i]), sum);
    sum = fmaf(ptx::residual_value(high, ptx::bf16_high(of_o[i])), ptx::bf16_high(of_d[i]), sum);
  }
  return sum;
}
#endif

#if DQ8
// The largest power of two by which what `bound` and the root of `square` bound together stays within E4M3; NaN, so that
// every code is, where one of them bounds nothing. A square that is no normal number may have lost terms, and counts as the
// smallest that is one.
__device__ __forceinline__ float row_scale(float bound, float square) {
  const float root = 0.5f * ptx::log2_approx(fmaxf(square, 1.17549435e-38f));
  const float exponent = floorf(8.807355f - ptx::log2_approx(bound) - root);  // log2 of 448
  const float scale = __int_as_float(((int)fminf(fmaxf(exponent, -100.0f), 100.0f) + 127) << 23);
  const float infinity = __int_as_float(0x7f800000);
  return bound >= 0.0f && bound < infinity && square < infinity ? scale : __int_as_float(0x7fffffff);
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_prepare(const __grid_constant__ Backward p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int number = blockIdx.x / p.heads_q, head = blockIdx.x - number * p.heads_q;
  const int kv_head = head / (p.heads_q / p.heads_kv);
  const i64 index = tile_index(p, blockIdx.y, head, number);
  const int piece = threadIdx.x % kLanes;
#if VARLEN
  const Slot slot = slot_at(p.sequences.q_starts, p.sequences.count, p.batch * p.len_q, kRows, number);
#else
  const Slot slot = {(int)blockIdx.y, number};
#endif
  const Sequence sequence = sequence_of(p, slot.sequence);
  const int tile = slot.tile, batch = sequence.batch_q, first_query = kFeatures ? sequence.first_query(p) : 0;
  auto is_live = [&](int row) { return row < sequence.len_q && row >= first_query; };
  const bool has_v = !FILL || 8 * piece < p.d_v;

  // Load every row's piece
  uint4 o[kRows / kPass] = {}, d_out[kRows / kPass] = {};
#if RESIDUAL
  uint2 residual[kRows / kPass] = {};
#endif
#pragma unroll
  for (int i = 0; i < kRows / kPass; i++) {
    const int row = tile * kRows + i * kPass + threadIdx.x / kLanes;
    if (!is_live(row) || (p.delta != nullptr && !DQ8) || !has_v) continue;
    if (!DQ8 || p.delta == nullptr)
      o[i] = *reinterpret_cast<const uint4*>(row_of(p.o, p.o_strides, batch, sequence.q_row + row, head) + 8 * piece);
#if RESIDUAL
    residual[i] = *reinterpret_cast<const uint2*>(row_of(p.residual, p.residual_strides, batch, sequence.q_row + row, head) + 8 * piece);
#endif
    d_out[i] = *reinterpret_cast<const uint4*>(row_of(p.d_out, p.d_out_strides, batch, sequence.q_row + row, head) + 8 * piece);
  }

  // Clear what dQ is added up in
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + index * kSumFloats);
#pragma unroll
  for (int i = 0; i < kSumFloats / 4 / kThreads; i++) sum[i * kThreads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.turns != nullptr && threadIdx.x < 8) p.turns[8 * index + threadIdx.x] = 0;

  const float from_delta = 1.0f / descale_of(p.v_descale, p.v_descale_strides, sequence.batch_k, kv_head);
#if DQ8
  // In units of V's descale, in which no element passes 448
  const float v_norm = p.v_norm == nullptr
                           ? 448.0f * sqrtf((float)p.d_v)
                           : descale_of(p.v_norm, p.v_norm_strides, sequence.batch_k, kv_head) * from_delta;
#endif
#if SINK
  float sink_sum = 0.0f;
#endif
#if CENTER
  float m[8] = {};
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (has_v) m[j] = p.v_center[kv_head * p.d_v + 8 * piece + j];
#endif
  float* terms = p.terms + index * kTermFloats;
#pragma unroll
  for (int i = 0; i < kRows / kPass; i++) {
    const int in_tile = i * kPass + threadIdx.x / kLanes, row = tile * kRows + in_tile;
#if DQ8
    auto sum_of_row = [&](float x) {
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) x += ptx::shuffle_xor(x, lanes);
      return x;
    };
    auto squares = [&](const uint4& x) { return dot(x.x, x.x, dot(x.y, x.y, dot(x.z, x.z, dot(x.w, x.w, 0.0f)))); };
    const float d_out_square = sum_of_row(squares(d_out[i]));
#endif
    float delta = 0.0f;
#if RESIDUAL
    delta = dot_residual(residual[i], o[i], d_out[i]);
#endif
#if CENTER
    delta += dot_without(o[i], m, d_out[i]);
#else
    delta = dot(o[i].x, d_out[i].x, dot(o[i].y, d_out[i].y, dot(o[i].z, d_out[i].z, dot(o[i].w, d_out[i].w, delta))));
#endif
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) delta += ptx::shuffle_xor(delta, lanes);
    const bool live = is_live(row);
    if (piece == 0) {
      const i64 at = ((i64)batch * p.heads_q + head) * p.len_q + sequence.q_row + row;
      const float infinity = __int_as_float(0x7f800000), lse = live ? p.lse[at] : -infinity;
      if (live && p.delta != nullptr) delta = p.delta[at];
      const bool empty = lse == -infinity;
      terms[in_tile] = empty ? infinity : lse * kLog2e;
      terms[kRows + in_tile] = empty ? 0.0f : delta * from_delta;
#if DQ8
      // |dS_ij| <= P_ij (1 - P_ij) max_k |dP_ij - dP_ik|, where P is the largest, the rest or less; and P_ij times what the rounding
      // of O does to delta. Where logits are large, rounding may take the largest past one
      const float largest = empty ? 1.0f : ptx::exp2_approx(p.row_max[at]);
      const float share = 2.0f * fminf(fminf(largest, fmaxf(1.0f - largest, 0.0f)), 0.25f) + largest / 256.0f;
      terms[kQuantTerm * kRows + in_tile] = row_scale(share * v_norm, d_out_square);
#endif
#if SINK
      if (!empty) sink_sum = fmaf(ptx::exp2_approx((p.sinks[head] - lse) * kLog2e), delta, sink_sum);
#endif
    }
  }
#if SINK
  // The tile's part of the sink's gradient, added up in a fixed order
  __shared__ float parts[kPass];
  if (piece == 0) parts[threadIdx.x / kLanes] = sink_sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kPass; i++) sink_sum += parts[i];
    p.sink_parts[index] = sink_sum;
  }
#endif
}
