// Operand descales of q and k, and logit bounds, where both are normalised between projection and rotation: from the
// norms' own vectors, whatever the weights. Channel b of a head of which c channels are normalised together obeys
//   |y_b| <= R |g_b| + |s_b|,  R = sqrt(c);
// rotation mixes the channels of a pair, so both count with the larger gain and with the length of the pair's shifts, times
// the attention factor. For logits, without shifts
//   exact = tau R_q R_k max_b |gq_b gk_b|,   with shifts   exact = tau N_q N_k,  N = R max_b |g_b| + ||s||,
// and rounded as in `scale_logit_bounds`; a factor on q multiplies its operand bound, and is part of tau. f64 throughout, results rounded
// up. One block per layer, a warp per head.
#include "common/descale.cuh"
#include "common/head_bound.cuh"
#include "common/warp.cuh"
#include "scale/types.cuh"

struct QkSide {
  u64 gain, shift;  // stored values; 0: ones, none
  u32 stride;       // from a head's values to the next head's; 0: shared
  u32 channels;     // normalised together
};
struct QkLayer {
  QkSide q, k;
  Growth growth;
  u32 dtype;
  float gain_offset;
  float rope_factor;
  u32 rotary, interleaved;
  u32 layer;        // its number in the model
};
static_assert(sizeof(QkSide) == 24 && sizeof(QkLayer) == 104, "host mirror");

// Gains and shifts of the two channels of pair p of a head, as bounds count them.
struct Pair {
  double gain[2], shift[2];
  double shift_square;  // of both, the factor included
};
__device__ Pair pair_limits(const QkLayer& l, const QkSide& side, u32 head, u32 p) {
  u32 at[2];
  pair_channels(p, l.rotary, l.interleaved, at[0], at[1]);
  const bool rotated = p < l.rotary / 2;
  const double factor = rotated ? l.rope_factor : 1.0;
  Pair pair;
  pair.shift_square = 0.0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const size_t index = (size_t)head * side.stride + at[i];
    const double gain = side.gain ? (double)load_value(side.gain, l.dtype, index) + l.gain_offset : 1.0;
    const double shift = side.shift ? (double)load_value(side.shift, l.dtype, index) : 0.0;
    pair.gain[i] = factor * fabs(gain), pair.shift[i] = factor * fabs(shift);
    pair.shift_square += pair.shift[i] * pair.shift[i];
  }
  if (rotated) {
    pair.gain[0] = pair.gain[1] = larger(pair.gain[0], pair.gain[1]);
    pair.shift[0] = pair.shift[1] = sqrt(pair.shift_square);
  }
  return pair;
}

// Bound of the head's channels in exact arithmetic.
__device__ double operand_bound(const QkLayer& l, const QkSide& side, u32 head, u32 d_head) {
  const double radius = sqrt((double)side.channels);
  double most = 0.0;
  for (u32 p = threadIdx.x & 31; p < d_head / 2; p += 32) {
    const Pair pair = pair_limits(l, side, head, p);
    most = larger(most, larger(radius * pair.gain[0] + pair.shift[0], radius * pair.gain[1] + pair.shift[1]));
  }
  return warp_largest(most);
}

extern "C" __global__ void __launch_bounds__(256, 1)  // left to itself, the assembler spills
    scale_qk_norm_bounds(const QkLayer* layers, u32 n_q, u32 n_kv, u32 d_head, double eta, float* descales, float* tensors,
                  float* operand_bounds, HeadBound* heads, u32* status) {
  extern __shared__ float bounds[];  // of q heads, then of k heads
  __shared__ float coarsest[2];  // descale of the layer's heads that have one
  const QkLayer l = layers[blockIdx.x];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = n_q / n_kv;

  // Operands
  for (u32 head = warp; head < n_q + n_kv; head += 8) {
    const bool of_k = head >= n_q;
    const double factor = (of_k ? 1.0 : l.growth.query) * (1.0 + (double)(of_k ? l.growth.share_k : l.growth.share_q));
    const float bound = above(factor * operand_bound(l, of_k ? l.k : l.q, of_k ? head - n_q : head, d_head));
    if (lane == 0) bounds[head] = bound;
  }
  __syncthreads();
  if (warp < 2) {
    double most = 0.0, finite = 0.0;
    for (u32 head = lane; head < n_kv; head += 32) {
      double bound = warp ? bounds[n_q + head] : 0.f;
      if (!warp)
        for (u32 i = 0; i < group; i++) bound = larger(bound, (double)bounds[head * group + i]);
      if (!(bound < 3e38)) bound = __longlong_as_double(0x7ff8000000000000ll), atomicOr(status, STATUS_NON_FINITE_WEIGHT);
      const float descale = smallest_descale(bound, 448.0);
      operand_bounds[3 * l.growth.kv + warp * n_kv + head] = (float)bound;
      descales[4 * l.growth.kv + warp * n_kv + head] = descale;
      most = larger(most, (double)descale), finite = fmax(finite, (double)descale);
    }
    most = warp_largest(most), finite = warp_largest(finite);
    if (lane == 0) tensors[l.layer * 4 + warp] = (float)most, coarsest[warp] = (float)finite;
  }
  __syncthreads();

  // Logits
  const double radius_q = sqrt((double)l.q.channels), radius_k = sqrt((double)l.k.channels);
  const bool shifted = l.q.shift || l.k.shift;
  for (u32 head = warp; head < n_q; head += 8) {
    double gain_q = 0.0, gain_k = 0.0, product = 0.0, square_q = 0.0, square_k = 0.0;
    for (u32 p = lane; p < d_head / 2; p += 32) {
      const Pair q = pair_limits(l, l.q, head, p), k = pair_limits(l, l.k, head / group, p);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        gain_q = larger(gain_q, q.gain[i]), gain_k = larger(gain_k, k.gain[i]);
        product = larger(product, q.gain[i] * k.gain[i]);
      }
      square_q += q.shift_square, square_k += k.shift_square;
    }
    const double norm_q = radius_q * warp_largest(gain_q) + sqrt(warp_sum(square_q));
    const double norm_k = radius_k * warp_largest(gain_k) + sqrt(warp_sum(square_k));
    product = warp_largest(product);
    if (lane) continue;
    const double tau = l.growth.logits;
    const double exact = tau * (shifted ? norm_q * norm_k : radius_q * radius_k * product);
    double rounded = exact + rounding_gap(tau, l.growth.share_q, l.growth.share_k,
                                               norm_q * norm_k, norm_q, norm_k, coarsest[0] / (double)l.growth.query, coarsest[1], 0.0, 0.0,
                                               d_head);
    if (!(rounded < 1e300)) rounded = __longlong_as_double(0x7ff8000000000000ll), atomicOr(status, STATUS_NON_FINITE_BOUND);
    HeadBound out = {};
    out.exact = rounded == rounded ? above(exact) : (float)rounded, out.rounded = above(rounded);
    out.descale = smallest_descale(out.rounded, eta * 448.0);
    heads[l.growth.q + head] = out;
  }
}
