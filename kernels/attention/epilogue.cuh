// Epilogue: what a consumer writes of a work item. Log-sum-exp, telemetry and O; O leaves by rows through shared memory and the
// copy engine (`store_bulk`), or, where there is no room for them, by 16-byte pieces of rows (8-byte in E4M3) after a transpose
// in each quad of lanes.
#pragma once
#include "attention/quad.cuh"
#include "attention/logits_e4m3.cuh"
#include "common/step_stats.cuh"
#include "ptx/memory.cuh"

namespace {

// The log2-sum-exp of a row: minus infinity where it sees no key, whose sum is zero, and NaN where a logit is.
__device__ __forceinline__ float log2_sum(float sum, float offset) {
  return sum < 1.0f ? __int_as_float(0xff800000) : offset + ptx::log2_approx(sum);
}
// What O is multiplied by: NaN where the sum is. NOTES: a row with a visible key has a sum near 2^7 or more.
__device__ __forceinline__ float normalisation(float sum, float v_descale) {
  return sum <= 1.0f ? 0.0f : v_descale * ptx::rcp_approx(sum);
}

// Takes a sink, in nats, into the sum of a row, whose unit is 2^`offset`. What O is owed for it.
__device__ __forceinline__ float join_sink(float& sum, float& offset, float sink) {
  const float logit = sink * kLog2e, top = fmaxf(offset, logit - kPLog2Scale), rescale = ptx::exp2_approx(offset - top);
  sum = fmaf(sum, rescale, ptx::exp2_approx(logit - top));
  offset = top;
  return rescale;
}

#if CENTER
// O = factor O + m in the rows that see a key; `sums`: of P. m: the center of the values of a head of `columns` columns.
__device__ __forceinline__ void scale_and_shift(float (&o)[kValueDim / 2], const float (&factor)[2], const float (&sums)[2], const float* m,
                                                int quad, int columns) {
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i += 4) {
    const int column = 2 * i + 2 * quad;
    float2 x = make_float2(0.0f, 0.0f);
    if (!kPadded || column < columns) x = *reinterpret_cast<const float2*>(m + column);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const bool empty = sums[r] <= 1.0f;
      o[i + 2 * r] = fmaf(o[i + 2 * r], factor[r], empty ? 0.0f : x.x);
      o[i + 2 * r + 1] = fmaf(o[i + 2 * r + 1], factor[r], empty ? 0.0f : x.y);
    }
  }
}
// That of the values that a query head reads.
__device__ __forceinline__ const float* value_center(const Params& p, int head) {
  return p.v_center + head / (p.heads_q / p.heads_kv) * (kPadded ? p.columns : kValueDim);
}
#endif

enum class Format { E4m3, Bf16, F16 };
// Stores row r of a thread's two, where it exists, by this thread's quad: its first `columns`.
template <Format F, class Element>
__device__ __forceinline__ void store_row(Element* out, bool exists, const float (&o)[kValueDim / 2], int r, int quad,
                                          float quant_scale, int columns = kValueDim) {
#pragma unroll
  for (int c = 0; c < kValueDim / 32; c++) {
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x = o[16 * c + 4 * j + 2 * r], y = o[16 * c + 4 * j + 2 * r + 1];
      a[j] = F == Format::E4m3 ? ptx::e4m3x2(x * quant_scale, y * quant_scale) : F == Format::Bf16 ? ptx::bf16x2(x, y) : ptx::f16x2(x, y);
    }
    quad_transpose(a, quad);
    if (!exists || (kPadded && 32 * c + 8 * quad >= columns)) continue;
    if (F == Format::E4m3) *reinterpret_cast<uint2*>(out + 32 * c + 8 * quad) = make_uint2(a[0] | a[1] << 16, a[2] | a[3] << 16);
    else *reinterpret_cast<uint4*>(out + 32 * c + 8 * quad) = make_uint4(a[0], a[1], a[2], a[3]);
  }
}
// The largest |O| of a thread's row r. NOTES: in four chains, since one would wait for itself 64 times.
__device__ __forceinline__ float row_amax(const float (&o)[kValueDim / 2], int r) {
  float part[4] = {};
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i++)
    if (((i >> 1) & 1) == r) part[(i & 1) + (i >> 1 & 2)] = fmaxf(part[(i & 1) + (i >> 1 & 2)], fabsf(o[i]));
  return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
}

// Takes the rows of its sequence from the slot of the current item.
__device__ __forceinline__ void load_rows(const Consumer& c, WorkItem& item) {
  if constexpr (kVarlen) {
    const WorkItem& slot = c.slot(c.item);
    OwnRows own = {};
    own = SequenceRows{load_uniform(slot.q_row), load_uniform(slot.len_q), 0, 0, 0, load_uniform(slot.splits)};
    static_cast<OwnRows&>(item) = own;
  }
}
// Gives the slot of the current item back to the producer, after its last read.
__device__ __forceinline__ void release_item(Consumer& c) {
  if (EVERY_LANE || c.leader) ptx::mbarrier_arrive(c.pipeline.q_empty(c.item % kQStages, c.warpgroup()));
  c.item = uniform(c.item + 1);
}

}  // namespace

#if SPLIT_KV
#include "attention/epilogue_split.cuh"
#else
#include "attention/epilogue_whole.cuh"
#endif
