// The running maxima, minima and sums of a thread's two rows in `attention_fwd`, a tile of keys at a time.
#pragma once
#include "attention/softmax.cuh"
#include "attention/params.cuh"
#include "ptx/math.cuh"

namespace {

constexpr bool kMinimum = TELEMETRY;  // minima are looked for beside the maxima

// Sees to maxima and minima of one tile that `scan` could not find by integer order, and takes in the minima. `highest`: the largest
// logit of each row before; `masked`: the minima are those of what is not masked.
__device__ __forceinline__ void confirm(const float (&s)[kBlockN / 2], float (&top)[2], float (&low)[2], Rows& rows,
                                        const float (&highest)[2], bool masked) {
  if (!rows.plain) {
    bool plain = fmaxf(top[0], highest[0]) >= 0.0f && fmaxf(top[1], highest[1]) >= 0.0f;
    if (kMinimum) plain = plain && fminf(low[0], rows.lowest[0]) < 0.0f && fminf(low[1], rows.lowest[1]) < 0.0f;
    // NOTES: through a shuffle the assembler knows it uniform. References only rise and minima only fall, so it stays true.
    rows.plain = __shfl_sync(~0u, __all_sync(~0u, plain), 0);
    if (!rows.plain) {
      largest(s, top);
      if (kMinimum && !masked) smallest(s, low);
    }
  }
#pragma unroll
  for (int r = 0; kMinimum && r < 2; r++) rows.lowest[r] = fminf(rows.lowest[r], low[r]);
}
// Takes in the maxima of one tile. True where one moved: O must be multiplied by `rows.rescale`.
__device__ __forceinline__ bool settle(const float (&s)[kBlockN / 2], float (&top)[2], float (&low)[2], Rows& rows, float scale,
                                       bool masked) {
  if (!LOGITS_E4M3) confirm(s, top, low, rows, rows.reference, masked);
  const bool moved = __any_sync(~0u, top[0] > rows.reference[0] || top[1] > rows.reference[1]);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = fmaxf(rows.reference[r], top[r]);
      rows.rescale[r] = ptx::exp2_approx((rows.reference[r] - m) * scale);
      rows.reference[r] = m;
      rows.sum[r] *= rows.rescale[r];
      rows.carry[r] *= rows.rescale[r];
    }
  }
  return moved;
}
__device__ __forceinline__ void offsets(const Rows& rows, float scale, float (&shift)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) shift[r] = fmaf(rows.reference[r], scale, -kOffset);
}
__device__ __forceinline__ void add_up(Rows& rows, const float (&part)[4]) {
#pragma unroll
  for (int r = 0; r < 2; r++) rows.sum[r] += part[2 * r] + part[2 * r + 1];
}

}  // namespace
