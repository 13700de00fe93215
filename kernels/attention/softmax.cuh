// Online softmax of one warpgroup on a tile of logits, in the accumulator layout of ptx/wgmma.cuh: value i of a thread lies in
// row r = i / 2 % 2 of its two, column 8 (i / 4) + i % 2 of those that the thread sees.
//
// P = 2^(8 + scale (logit - row_max)) with row_max a row's running maximum: P never passes 256, and the largest is exact. Row
// sums take the unrounded values in f32. Here P is rounded to E4M3 or F16 (`pack_p`), and P V is promoted to f32 (`promote`, `flush`).
#pragma once
#include "attention/config.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace {

// A thread's two query rows: r = 0 is row l / 4 of the warp, r = 1 eight rows below.
struct RowState {
  float row_max[2];        // running maximum, subtracted from the logits
  float row_sum[2];        // of P before rounding, this thread's columns
  float rescale[2];        // what O is owed since the last tile: 1 where the maximum stayed (Flush, F16: stale)
  float flush_rescale[2];  // what the flushed O is owed
  float row_min[2];        // telemetry
  float raw_max[2];        // telemetry: the maximum before logits are capped or rounded
  u32 overflow;
  int integer_order;       // the warp's maxima are not negative (and its minima are): `scan` is exact
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Largest value of each row, right where it is not negative, since floats of that sign are ordered as integers are. With `Min`
// also the smallest that this thread has, right where it is negative: the integer order of negative floats is the reverse, and
// unsigned they pass every other.
// NOTES: both look at the same two values in turn, so that the second finds its operands in the reuse cache.
template <bool Min, int N> __device__ __forceinline__ void scan(const float (&s)[N], float (&top)[2], float (&low)[2]) {
  float part[4] = {s[0], s[1], s[2], s[3]}, least[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
#pragma unroll
  for (int i = 4; i + 4 < N; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      part[j] = ptx::max3_signed(part[j], s[i + j], s[i + 4 + j]);
      if (Min) least[j] = ptx::max3_unsigned(least[j], s[i + j], s[i + 4 + j]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int last = N - 4 + 2 * r;
    top[r] = ptx::max3_signed(part[2 * r], part[2 * r + 1], ptx::max3_signed(s[last], s[last], s[last + 1]));
    if (Min) {
      const float ends = ptx::max3_unsigned(s[2 * r], s[2 * r + 1], ptx::max3_unsigned(s[last], s[last], s[last + 1]));
      low[r] = ptx::max3_unsigned(least[2 * r], least[2 * r + 1], ends);
    }
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = ptx::max3_signed(top[r], top[r], ptx::shuffle_xor(top[r], d));
  }
}
// The same for values of any sign.
template <int N> __device__ __forceinline__ void exact_max(const float (&s)[N], float (&top)[2]) {
  float part[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
#pragma unroll
  for (int i = 8; i < N; i++) part[i & 7] = fmaxf(part[i & 7], s[i]);
#pragma unroll
  for (int r = 0; r < 2; r++)
    top[r] = quad_max(fmaxf(fmaxf(part[2 * r], part[2 * r + 1]), fmaxf(part[2 * r + 4], part[2 * r + 5])));
}
template <int N> __device__ __forceinline__ void exact_min(const float (&s)[N], float (&low)[2]) {
  low[0] = s[0], low[1] = s[2];
#pragma unroll
  for (int i = 0; i < N; i++) low[(i >> 1) & 1] = fminf(low[(i >> 1) & 1], s[i]);
}

// Logits in units of a soft-cap, before and after it.
__device__ __forceinline__ float soft_cap(float x) { return kPv == Pv::F16 ? ptx::tanh_accurate(x) : ptx::tanh_approx(x); }
template <int N> __device__ __forceinline__ void soft_cap(float (&s)[N], float to_caps) {
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = soft_cap(s[i] * to_caps);
}

// Recomputes the extremes of a tile where `scan` could not find them by integer order, and takes in the minima.
// `running_max`: of each row before this tile. `masked`: `low` is of the unmasked logits already.
__device__ __forceinline__ void resolve_extremes(const float (&s)[kBlockN / 2], float (&top)[2], float (&low)[2], RowState& rows,
                                                 const float (&running_max)[2], bool masked) {
  if (!rows.integer_order) {
    bool exact = fmaxf(top[0], running_max[0]) >= 0.0f && fmaxf(top[1], running_max[1]) >= 0.0f;
    if (kTelemetry) exact = exact && fminf(low[0], rows.row_min[0]) < 0.0f && fminf(low[1], rows.row_min[1]) < 0.0f;
    // NOTES: through a shuffle the assembler knows it uniform. Maxima only rise and minima only fall, so it stays true.
    rows.integer_order = __shfl_sync(~0u, __all_sync(~0u, exact), 0);
    if (!rows.integer_order) {
      exact_max(s, top);
      if (kTelemetry && !masked) exact_min(s, low);
    }
  }
#pragma unroll
  for (int r = 0; kTelemetry && r < 2; r++) rows.row_min[r] = fminf(rows.row_min[r], low[r]);
}
// The same for the extremes of a tile, which with a soft-cap and telemetry are those of raw logits, and leave as those of capped ones.
__device__ __forceinline__ void take_extremes(const float (&s)[kBlockN / 2], float (&top)[2], float (&low)[2], RowState& rows,
                                              float to_caps, bool masked) {
  if constexpr (kSoftCap && kRawMax) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rows.raw_max[r] = fmaxf(rows.raw_max[r], top[r]), rows.row_min[r] = fminf(rows.row_min[r], low[r]);
      top[r] = top[r] < kLowest ? top[r] : soft_cap(top[r] * to_caps);
      low[r] = soft_cap(low[r] * to_caps);
    }
  } else {
    resolve_extremes(s, top, low, rows, kLogitsE4m3 ? rows.raw_max : rows.row_max, masked);
  }
}
// Takes in the maxima of one tile. True where one moved: O must be multiplied by `rows.rescale`.
__device__ __forceinline__ bool update_row_max(const float (&s)[kBlockN / 2], float (&top)[2], float (&low)[2], RowState& rows,
                                               float scale, float to_caps, bool masked) {
  if (!kLogitsE4m3) take_extremes(s, top, low, rows, to_caps, masked);
  const bool moved = __any_sync(~0u, top[0] > rows.row_max[0] || top[1] > rows.row_max[1]);
  if (kPv == Pv::Promote) rows.rescale[0] = rows.rescale[1] = 1.0f;
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = fmaxf(rows.row_max[r], top[r]);
      rows.rescale[r] = ptx::exp2_approx((rows.row_max[r] - m) * scale);
      rows.row_max[r] = m;
      rows.row_sum[r] *= rows.rescale[r];
      if (kPv == Pv::Flush) rows.flush_rescale[r] *= rows.rescale[r];
    }
  }
  return moved;
}

// P = 2^(scale logit - shift).
__device__ __forceinline__ void exponent_shift(const RowState& rows, float scale, float (&shift)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) shift[r] = fmaf(rows.row_max[r], scale, -kPLog2Scale);
}
template <int N> __device__ __forceinline__ void exponents(float (&x)[N], const float (&s)[N], float scale, const float (&shift)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = fmaf(s[i], scale, -shift[(i >> 1) & 1]);
}
// P of the exponents [First, Last), in place, and the sums of its columns: `sum[2 r]` and `sum[2 r + 1]` of row r.
template <int First, int Last, int N> __device__ __forceinline__ void exponentiate(float (&x)[N], float (&sum)[4]) {
#pragma unroll
  for (int i = First; i < Last; i++) {
    x[i] = ptx::exp2_approx(x[i]);
    sum[i & 3] = i < 4 ? x[i] : sum[i & 3] + x[i];
  }
}
__device__ __forceinline__ void add_row_sum(RowState& rows, const float (&sum)[4]) {
#pragma unroll
  for (int r = 0; r < 2; r++) rows.row_sum[r] += sum[2 * r] + sum[2 * r + 1];
}
// The operand registers of 16 keys of P from their eight values. NOTES: their order is that of the keys in V's layout.
template <int N> __device__ __forceinline__ void pack_p(u32 (&p)[kPRegisters], const float (&s)[N], int group) {
  const int i = 8 * group;
  if constexpr (kPv == Pv::F16) {
#pragma unroll
    for (int j = 0; j < 4; j++) p[4 * group + j] = ptx::f16x2(s[i + 2 * j], s[i + 2 * j + 1]);
    return;
  }
  p[2 * group] = ptx::e4m3x4_merged(s[i], s[i + 1], s[i + 4], s[i + 5]);
  p[2 * group + 1] = ptx::e4m3x4_merged(s[i + 2], s[i + 3], s[i + 6], s[i + 7]);
}

template <int N> __device__ __forceinline__ void scale_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[(i >> 1) & 1];
}
// The second level of accumulation in registers: o = factor * o + part.
template <int N> __device__ __forceinline__ void promote(float (&o)[N], const float (&part)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] = fmaf(o[i], factor[(i >> 1) & 1], part[i]);
}
// And in shared memory: o += factor * slot, then (when `Store`) back to the slot. Slots are private to threads.
template <bool Store, int N>
__device__ __forceinline__ void flush(float (&o)[N], float4* slot, const float (&factor)[2], bool first) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float4 x = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : slot[i * 128];
    o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
    o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
    o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
    o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
    if (Store) slot[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }
}

}  // namespace
