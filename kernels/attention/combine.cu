// Joins what `attention_fwd` made of parts of the keys (SPLIT): with l_i the log2-sum-exp of part i and w_i = 2^(l_i - max l),
// O = sum_i w_i O_i / sum_i w_i. Each of the warps that share a row joins its parts, and what they come to meets in one order, so
// that a call repeats bit for bit.
#include "attention/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/math.cuh"
#include "common/types.cuh"

// Written by the host byte for byte; strides count elements.
struct Combine {
  void* o;
  float* lse;                    // [batch, heads_q, len_q] or null
  const float* o_descale;
  Telemetry* telemetry;          // [heads_q] or null
  const void* parts_o;           // as Params has them
  const float* parts_lse;
  const Extremes* parts_extremes;
  const float* v_descale;
  i64 o_stride_batch, o_stride_row, o_stride_head;
  i64 o_descale_batch, o_descale_head, v_descale_batch, v_descale_head;
  int batch, heads_q, heads_kv, len_q;
  int parts;
  int e4m3;                      // 1: O leaves as E4M3 by its descale, 0: as BF16
  int share;                     // log2 of the warps that share a row: 0 to 3
  int unused;
};
static_assert(sizeof(Combine) == 8 * 8 + 7 * 8 + 8 * 4, "the host writes this layout");

namespace {
constexpr int kWarps = 8;
constexpr int kMine = kDim / 32;  // elements of a row that one lane has, neighbours
constexpr int kBatch = 8;         // parts that a warp loads at once
struct alignas(2 * kMine) Halves { u32 pairs[kMine / 2]; };
// The log2-sum-exp of a part in which a row sees no key.
__device__ __forceinline__ float none() { return __int_as_float(0xff800000); }

// Parts of a row, joined: O is sum / total, and the log2-sum-exp `most` + log2(total).
struct Joined {
  float most = none(), total = 0.0f, sum[kMine] = {};
  // Makes room for parts up to `lse`.
  __device__ __forceinline__ void rise(float lse) {
    const float top = fmaxf(most, lse), keep = most > none() ? ptx::exp2_approx(most - top) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMine; j++) sum[j] *= keep;
    total *= keep;
    most = top;
  }
  // Takes in what has weight `weight` 2^lse; `lse` at most `most`.
  __device__ __forceinline__ void take(float lse, float weight, const float (&x)[kMine]) {
    const float w = lse == none() ? 0.0f : ptx::exp2_approx(lse - most);  // NaN where a logit was
#pragma unroll
    for (int j = 0; j < kMine; j++) sum[j] = fmaf(w, x[j], sum[j]);  // NOTES: also where w is 0, so that a NaN is not lost
    total = fmaf(w, weight, total);
  }
};
}  // namespace

// grid (len_q, ceil(heads_q * 2^share / kWarps), batch), 32 kWarps threads
extern "C" __global__ void __launch_bounds__(32 * kWarps) attention_combine(const __grid_constant__ Combine p) {
  __shared__ float sums[kWarps][kDim], tops[kWarps], totals[kWarps];
  ptx::griddepcontrol_wait();
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 share = 1u << p.share, mine = warp & (share - 1), head = (blockIdx.y * kWarps + warp) >> p.share;
  const u32 rows = p.batch * p.len_q * p.heads_q, row = (blockIdx.z * p.len_q + blockIdx.x) * p.heads_q + head;
  const bool exists = head < p.heads_q;

  u32 words[3] = {};
  for (int part = lane; p.telemetry != nullptr && exists && mine == 0 && part < p.parts; part += 32) {
    const Extremes e = p.parts_extremes[part * rows + row];
    words[0] = max(words[0], e.max_logit), words[1] = max(words[1], e.min_logit);
  }
  const u32 kv = head / (p.heads_q / p.heads_kv), batch = blockIdx.z, position = blockIdx.x;
  const float v_descale = exists ? p.v_descale[batch * p.v_descale_batch + kv * p.v_descale_head] : 0.0f;

  Joined joined;
  for (int first = mine; exists && first < p.parts; first += kBatch << p.share) {
    float lse[kBatch];
    Halves halves[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int part = first + (j << p.share);
      const u32 at = part * rows + row;
      lse[j] = part < p.parts ? p.parts_lse[at] : none();
      halves[j] = part < p.parts ? static_cast<const Halves*>(p.parts_o)[(i64)at * 32 + lane] : Halves{};
    }
    float top = lse[0];
#pragma unroll
    for (int j = 1; j < kBatch; j++) top = fmaxf(top, lse[j]);
    joined.rise(top);
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      float x[kMine];
#pragma unroll
      for (int i = 0; i < kMine; i++) x[i] = ptx::f32_from_f16(halves[j].pairs[i / 2] >> 16 * (i % 2));
      joined.take(lse[j], 1.0f, x);
    }
  }
  if (share > 1) {
#pragma unroll
    for (int j = 0; j < kMine; j++) sums[warp][kMine * lane + j] = joined.sum[j];
    if (lane == 0) tops[warp] = joined.most, totals[warp] = joined.total;
    __syncthreads();
    if (mine > 0) return;
    for (u32 w = warp + 1; w < warp + share; w++) {
      float x[kMine];
#pragma unroll
      for (int j = 0; j < kMine; j++) x[j] = sums[w][kMine * lane + j];
      joined.rise(tops[w]);
      joined.take(tops[w], totals[w], x);
    }
  }
  if (!exists) return;

  const float factor = joined.total > 0.0f ? v_descale / joined.total : 0.0f;
  float amax = 0.0f, out[kMine];
#pragma unroll
  for (int j = 0; j < kMine; j++) out[j] = joined.sum[j] * factor, amax = fmaxf(amax, fabsf(out[j]));
  if (p.lse != nullptr && lane == 0)
    p.lse[((i64)batch * p.heads_q + head) * p.len_q + position] =
        joined.total == 0.0f ? none() : (joined.most + ptx::log2_approx(joined.total)) * kLn2;
  if (p.telemetry != nullptr) {
    words[2] = __float_as_uint(amax);
#pragma unroll
    for (int w = 0; w < 3; w++) words[w] = ptx::warp_max(words[w]);
    u32* at = &p.telemetry[head].max_logit + lane;
    const u32 word = lane == 0 ? words[0] : lane == 1 ? words[1] : words[2];
    if (lane < 3 && word > ptx::ld_relaxed(at)) atomicMax(at, word);
  }
  const i64 at = batch * p.o_stride_batch + position * p.o_stride_row + head * p.o_stride_head + kMine * lane;
  if (p.e4m3) {
    const float to_out = 1.0f / p.o_descale[batch * p.o_descale_batch + kv * p.o_descale_head];
#pragma unroll
    for (int j = 0; j < kMine; j += 2)
      reinterpret_cast<u16*>(reinterpret_cast<u8*>(p.o) + at)[j / 2] = ptx::e4m3x2(out[j] * to_out, out[j + 1] * to_out);
  } else {
#pragma unroll
    for (int j = 0; j < kMine; j += 2)
      reinterpret_cast<u32*>(reinterpret_cast<u16*>(p.o) + at)[j / 2] = ptx::bf16x2(out[j], out[j + 1]);
  }
}
