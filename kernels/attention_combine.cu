// Joins what `attention_fwd` made of parts of the keys (SPLIT): with l_i the log2-sum-exp of part i and w_i = 2^(l_i - max l),
// O = sum_i w_i O_i / sum_i w_i. A block a row; its warps take every kWarps-th part, and their sums meet in one order, so that a
// call repeats bit for bit.
#include "attention_tile.cuh"
#include "convert.cuh"
#include "launch.cuh"
#include "math.cuh"
#include "types.cuh"

// Written by the host byte for byte; strides count elements.
struct Combine {
  void* o;
  float* lse;                    // [batch, heads_q, len_q] or null
  const float* o_descale;
  Telemetry* telemetry;          // [heads_q] or null
  const float* parts_o;          // as Params has them
  const float* parts_lse;
  i64 o_stride_batch, o_stride_row, o_stride_head;
  i64 o_descale_batch, o_descale_head;
  int batch, heads_q, heads_kv, len_q;
  int parts;
  int e4m3;                      // 1: O leaves as E4M3 by its descale, 0: as BF16
};
static_assert(sizeof(Combine) == 6 * 8 + 5 * 8 + 6 * 4, "the host writes this layout");

namespace {
constexpr int kWarps = 4;
constexpr int kMine = kDim / 32;  // elements of a row that one lane has, neighbours
template <int N> struct alignas(4 * N) Floats { float at[N]; };
}  // namespace

// grid batch * len_q * heads_q, 32 kWarps threads
extern "C" __global__ void __launch_bounds__(32 * kWarps) attention_combine(const __grid_constant__ Combine p) {
  __shared__ float sums[kWarps][kDim], totals[kWarps];
  grid_wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 rows = (i64)p.batch * p.len_q * p.heads_q, row = blockIdx.x;
  const float none = __int_as_float(0xff800000);

  float most = none;
  for (int i = lane; i < p.parts; i += 32) most = fmaxf(most, p.parts_lse[i * rows + row]);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));

  // NOTES: a part without a visible key weighs nothing, and where no part has one the largest is none either.
  float sum[kMine] = {}, total = 0.0f;
#pragma unroll 4
  for (int i = warp; i < p.parts; i += kWarps) {
    const float lse = p.parts_lse[i * rows + row];
    const float weight = lse > none ? exp2_mufu(lse - most) : 0.0f;
    const Floats<kMine> x = reinterpret_cast<const Floats<kMine>*>(p.parts_o + (i * rows + row) * kDim)[lane];
#pragma unroll
    for (int j = 0; j < kMine; j++) sum[j] = fmaf(weight, x.at[j], sum[j]);
    total += weight;
  }
#pragma unroll
  for (int j = 0; j < kMine; j++) sums[warp][kMine * lane + j] = sum[j];
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (warp > 0) return;

  // The first warp writes the row
  total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += totals[w];
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  float amax = 0.0f;
#pragma unroll
  for (int j = 0; j < kMine; j++) {
    sum[j] = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) sum[j] += sums[w][kMine * lane + j];
    sum[j] *= factor;
    amax = fmaxf(amax, fabsf(sum[j]));
  }
  const int head = row % p.heads_q, position = row / p.heads_q % p.len_q, batch = row / p.heads_q / p.len_q;
  if (p.lse != nullptr && lane == 0)
    p.lse[((i64)batch * p.heads_q + head) * p.len_q + position] = total > 0.0f ? (most + log2_mufu(total)) * kLn2 : none;
  if (p.telemetry != nullptr) {
    const u32 word = warp_max(__float_as_uint(amax));
    if (lane == 0) atomicMax(&p.telemetry[head].amax_o, word);
  }
  const i64 at = batch * p.o_stride_batch + position * p.o_stride_row + head * p.o_stride_head + kMine * lane;
  if (p.e4m3) {
    const int kv = head / (p.heads_q / p.heads_kv);
    const float to_out = 1.0f / p.o_descale[batch * p.o_descale_batch + kv * p.o_descale_head];
#pragma unroll
    for (int j = 0; j < kMine; j += 2)
      reinterpret_cast<u16*>(reinterpret_cast<u8*>(p.o) + at)[j / 2] = e4m3x2(sum[j] * to_out, sum[j + 1] * to_out);
  } else {
#pragma unroll
    for (int j = 0; j < kMine; j += 2)
      reinterpret_cast<u32*>(reinterpret_cast<u16*>(p.o) + at)[j / 2] = bf16x2(sum[j], sum[j + 1]);
  }
}
