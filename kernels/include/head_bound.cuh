// A query head's logit bound, and what `scale_plan` and `scale_qk_norm` share.
#pragma once
#include "common/types.cuh"

// Everything rounded up. The host's mirror is `HeadBound` in src/cuda/scale/tables.rs.
struct HeadBound {
  float sigma;      // certified, rotation included
  float certain;    // of the exact |logit|
  float rounded;    // with operands rounded to E4M3
  float descale;    // rounded / (eta 448)
  float linear;     // ||a|| + ||b||
  float constant;   // |c0|
  float constants;  // ||c_q|| + ||c_k||: zero where there are none
  float pad;
};
static_assert(sizeof(HeadBound) == 32, "host mirror");

__device__ __forceinline__ float above(double v) {  // rounded up
  const float f = (float)v;
  return (double)f < v ? __uint_as_float(__float_as_uint(f) + 1) : f;
}

// Of one layer, rounded up: the softmax scale times the largest factor on q after rotation and norms, that factor, and the share
// of the rounding term. q is cast with the factor; norms and steps are without. And where its results go: its first query and KV
// head in the model.
struct Growth {
  float logits, query, rounding_share;
  u32 q, kv;
};
static_assert(sizeof(Growth) == 20, "host mirror");

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// What 16-bit and E4M3 rounding of q and k can add to a logit, from bounds of their norms and the largest descales that their
// heads may share: |q8 . k8 - q . k| <= (N_q + dq)(N_k + dk) - N_q N_k, 1 + dq/N_q = (1 + 1/17)(1 + share), and elements below 2^-6
// of their descale are off by up to 2^-10 of it. `product`: N_q N_k, or a smaller bound on what meets the relative errors alone.
__device__ __forceinline__ double rounding_gap(double tau, double share, double product, double norm_q, double norm_k, double step_q, double step_k,
                                               unsigned d_head) {
  if (norm_q == 0.0 || norm_k == 0.0) return 0.0;  // zeros stay zeros
  const double e = (1.0 + 1.0 / 17.0) * (1.0 + share), small = sqrt((double)d_head) * 0x1p-10;
  const double sq = small * step_q, sk = small * step_k;
  return tau * ((e * e - 1.0) * product + e * (norm_q * sk + norm_k * sq) + sq * sk);
}
