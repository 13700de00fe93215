// Combines the splits of a row that forward.cu left: with l_i the log2-sum-exp of split i and w_i = 2^(l_i - max l),
// O = sum_i w_i O_i / sum_i w_i.
//
// Up to eight warps share a row. Each combines its splits, and their results meet in a fixed order, so that a call repeats
// bit for bit. A sink joins the sum here. Partial O is F16 in units of v's descale, lse f32 to the base 2 (params.cuh has the layouts).
#include "attention/config.cuh"
#include "attention/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace {
constexpr int kWarps = 8;
// Elements of a row that one lane has, neighbours; the last lanes may have none.
constexpr int kMine = kValueDim <= 64 ? 2 : kValueDim <= 128 ? 4 : 8;
constexpr int kLanes = kValueDim / kMine;
constexpr bool kExact = kLanes == 32 && !kPadded;  // every lane has columns of the output
constexpr int kBatch = 8;         // splits that a warp loads at once
struct alignas(2 * kMine) Halves { u32 pairs[kMine / 2]; };
// The log2-sum-exp of a split in which a row sees no key.
__device__ __forceinline__ float none() { return __int_as_float(0xff800000); }

// Some splits of a row: O is sum / total, and the log2-sum-exp max_lse + log2(total).
struct Combined {
  float max_lse = none(), total = 0.0f, sum[kMine] = {};
  __device__ __forceinline__ void raise_max(float lse) {
    const float top = fmaxf(max_lse, lse), rescale = max_lse > none() ? ptx::exp2_approx(max_lse - top) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMine; j++) sum[j] *= rescale;
    total *= rescale;
    max_lse = top;
  }
  // Adds x with weight `weight` 2^lse; `lse` is at most max_lse.
  __device__ __forceinline__ void add(float lse, float weight, const float (&x)[kMine]) {
    const float w = lse == none() ? 0.0f : ptx::exp2_approx(lse - max_lse);  // NaN where a logit was
#pragma unroll
    for (int j = 0; j < kMine; j++) sum[j] = fmaf(w, x[j], sum[j]);  // NOTES: also where w is 0, so that a NaN is not lost
    total = fmaf(w, weight, total);
  }
};
}  // namespace

// grid (len_q, ceil(heads_q * row_warps / kWarps), batch), 32 kWarps threads. With sequences of unequal length: (queries of the longest,
// .., sequences); one of a single part is the output already. Over pages: (rows that there is room for, .., 1).
extern "C" __global__ void __launch_bounds__(32 * kWarps) attention_combine(const __grid_constant__ CombineParams p) {
  __shared__ float sums[kWarps][32 * kMine], tops[kWarps], totals[kWarps];
  ptx::griddepcontrol_wait();
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 row_warps = 1u << p.log2_row_warps, mine = warp & (row_warps - 1), head = (blockIdx.y * kWarps + warp) >> p.log2_row_warps;
  int splits = p.splits;
  u32 axis_row = blockIdx.z * p.len_q + blockIdx.x, batch = blockIdx.z, position = blockIdx.x;
  if constexpr (kVarlen) {
    const int first = p.sequences.q_starts[blockIdx.z];
    splits = p.sequence_splits[blockIdx.z];
    axis_row = first + blockIdx.x;
    batch = axis_row / p.len_q, position = axis_row - batch * p.len_q;
    if (splits == 1 || first < 0 || (int)axis_row >= min(p.sequences.q_ends[blockIdx.z], p.batch * p.len_q)) return;
  }
  u32 rows = p.batch * p.len_q * p.heads_q, row = axis_row * p.heads_q + head, sequence = batch;
  if constexpr (kPaged) {
    const u32 block = blockIdx.x / p.block_rows, i = blockIdx.x - block * p.block_rows;
    if ((int)block >= p.counts->joins) return;
    const Join join = p.joins[block];
    if ((int)i >= join.rows) return;
    sequence = join.sequence, batch = join.batch, position = join.row + i, splits = join.parts;
    rows = join.stride * p.heads_q, row = (join.partial + i) * p.heads_q + head;
  }
  const bool exists = head < p.heads_q;

  u32 words[3] = {};
  for (int split = lane; p.telemetry != nullptr && exists && mine == 0 && split < splits; split += 32) {
    const Extremes e = p.extremes_partial[split * rows + row];
    words[0] = max(words[0], e.max), words[1] = max(words[1], e.min);
  }
  const u32 kv = head / (p.heads_q / p.heads_kv);
  const float v_descale = exists ? p.v_descale[sequence * p.v_descale_batch + kv * p.v_descale_head] : 0.0f;

  Combined all;
  for (int first = mine; exists && first < splits; first += kBatch << p.log2_row_warps) {
    float lse[kBatch];
    Halves halves[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int split = first + (j << p.log2_row_warps);
      const u32 at = split * rows + row;
      const bool mine_too = split < splits && (kLanes == 32 || lane < kLanes);
      lse[j] = split < splits ? p.lse_partial[at] : none();
      halves[j] = mine_too ? static_cast<const Halves*>(p.o_partial)[(i64)at * kLanes + lane] : Halves{};
    }
    float top = lse[0];
#pragma unroll
    for (int j = 1; j < kBatch; j++) top = fmaxf(top, lse[j]);
    all.raise_max(top);
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      float x[kMine];
#pragma unroll
      for (int i = 0; i < kMine; i++) x[i] = ptx::f32_from_f16(halves[j].pairs[i / 2] >> 16 * (i % 2));
      all.add(lse[j], 1.0f, x);
    }
  }
  if (row_warps > 1) {
#pragma unroll
    for (int j = 0; j < kMine; j++) sums[warp][kMine * lane + j] = all.sum[j];
    if (lane == 0) tops[warp] = all.max_lse, totals[warp] = all.total;
    __syncthreads();
    if (mine > 0) return;
    for (u32 w = warp + 1; w < warp + row_warps; w++) {
      float x[kMine];
#pragma unroll
      for (int j = 0; j < kMine; j++) x[j] = sums[w][kMine * lane + j];
      all.raise_max(tops[w]);
      all.add(tops[w], totals[w], x);
    }
  }
  if (!exists) return;

  if constexpr (kSink) {
    const float sink = p.sinks[head] * kLog2e;
    if (sink != none()) {  // NOTES: else in a row that sees no key it would be the difference of two infinities
      all.raise_max(sink);
      all.total += ptx::exp2_approx(sink - all.max_lse);
    }
  }
  const float factor = all.total == 0.0f ? 0.0f : v_descale / all.total;  // NaN of a sink that is
  float amax = 0.0f, out[kMine];
#pragma unroll
  for (int j = 0; j < kMine; j++) {
    float m = 0.0f;
#if CENTER
    if (all.total != 0.0f && (kExact || kMine * lane < p.columns)) m = p.v_center[kv * p.columns + kMine * lane + j];
#endif
    out[j] = fmaf(all.sum[j], factor, m), amax = fmaxf(amax, fabsf(out[j]));
  }
  if (p.lse != nullptr && lane == 0)
    p.lse[((i64)batch * p.heads_q + head) * p.len_q + position] =
        all.total == 0.0f ? none() : (all.max_lse + ptx::log2_approx(all.total)) * kLn2;
  if (p.telemetry != nullptr) {
    words[2] = __float_as_uint(amax);
#pragma unroll
    for (int w = 0; w < 3; w++) words[w] = ptx::warp_max(words[w]);
    u32* at = &p.telemetry[head].max + lane;
    const u32 word = lane == 0 ? words[0] : lane == 1 ? words[1] : words[2];
    if (lane < 3 && word > ptx::ld_relaxed(at)) atomicMax(at, word);
  }
  if (!kExact && kMine * lane >= p.columns) return;
  const i64 at = batch * p.o_stride_batch + position * p.o_stride_row + head * p.o_stride_head + kMine * lane;
  if (p.out_e4m3) {
    const float quant_scale = 1.0f / p.o_descale[sequence * p.o_descale_batch + kv * p.o_descale_head];
#pragma unroll
    for (int j = 0; j < kMine; j += 2)
      reinterpret_cast<u16*>(reinterpret_cast<u8*>(p.o) + at)[j / 2] = ptx::e4m3x2(out[j] * quant_scale, out[j + 1] * quant_scale);
  } else {
#pragma unroll
    for (int j = 0; j < kMine; j += 2)
      reinterpret_cast<u32*>(reinterpret_cast<u16*>(p.o) + at)[j / 2] = ptx::bf16x2(out[j], out[j + 1]);
  }
}
