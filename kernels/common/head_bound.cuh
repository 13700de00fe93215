// A query head's logit bound, and what `scale_logit_bounds` and `scale_qk_norm_bounds` share.
#pragma once
#include "common/types.cuh"

// Everything rounded up. The host's mirror is `HeadBound` in src/bound/device.rs.
struct HeadBound {
  float sigma;      // certified, rotation included
  float exact;    // of the exact |logit|
  float rounded;    // with operands rounded to E4M3
  float descale;    // rounded / (eta 448)
  float linear;     // ||a|| + ||b||
  float constant;   // |c0|
  float constants;  // ||c_q|| + ||c_k||: zero where there are none
  float isotropic;  // the paper's calibrated bound where the host computed it; 0: compute it from the other fields
};
static_assert(sizeof(HeadBound) == 32, "host mirror");

__device__ __forceinline__ float above(double v) {  // rounded up
  const float f = (float)v;
  return (double)f < v ? __uint_as_float(__float_as_uint(f) + 1) : f;
}

// Of one layer, rounded up: the softmax scale times the largest factor on q after rotation and norms, that factor, the share of
// the rounding term, and the relative error of single weights that are not multiplied as they are stored. q is cast with the factor;
// norms and steps are without. And where its results go: its first query and KV head in the model.
struct Growth {
  float logits, query;
  float share_q, share_k;
  float weight_q, weight_k;
  u32 q, kv;
};
static_assert(sizeof(Growth) == 32, "host mirror");

// What 16-bit and E4M3 rounding of q and k can add to a logit, from bounds of their norms and the largest descales that their
// heads may share: |q8 . k8 - q . k| <= (e_q N_q + s_q)(e_k N_k + s_k) - N_q N_k, e = (1 + 1/17)(1 + share), and s from elements
// below 2^-6 of their descale, which are off by up to 2^-10 of it, and from single weights (`error`). `product`: N_q N_k, or a
// smaller bound on what meets the relative errors alone.
__device__ __forceinline__ double rounding_gap(double tau, double share_q, double share_k, double product, double norm_q, double norm_k,
                                               double step_q, double step_k, double error_q, double error_k, unsigned d_head) {
  if (norm_q == 0.0 || norm_k == 0.0) return 0.0;  // zeros stay zeros
  constexpr double kOnce = 1.0 + 1.0 / 17.0;
  const double e_q = kOnce * (1.0 + share_q), e_k = kOnce * (1.0 + share_k);
  const double small = sqrt((double)d_head) * 0x1p-10, s_q = small * step_q + kOnce * error_q, s_k = small * step_k + kOnce * error_k;
  return tau * ((e_q * e_k - 1.0) * product + e_q * norm_q * s_k + e_k * norm_k * s_q + s_q * s_k);
}
