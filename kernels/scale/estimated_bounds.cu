// Logit bounds from the estimates of a power iteration (power.cu) in place of certified norms, a warp per query head.
//
//   exact = tau [d sigma + sqrt(d) (||a|| + ||b||) + |c0|],   rounded = exact (1 + 1/17)^2 (1 + share_q)(1 + share_k)
//
// They promise nothing: sigma is estimated from below and without rotation, and there is no norm of either side from which
// the rounding of q and k could be bounded. ||a|| = ||W_Q c_k|| and ||b|| = ||W_K c_q|| are bounded by Frobenius norms.
// `factor`: what sigma is multiplied by where an interval is certified. One estimate for each head, or one for a layer (`summed`).
#include "common/descale.cuh"
#include "common/head_bound.cuh"
#include "common/warp.cuh"
#include "scale/types.cuh"

extern "C" __global__ void __launch_bounds__(128)
    scale_estimated_bounds(const Layer* layers, const Growth* growth, u32 count, u32 summed, double factor, double eta,
                           const ChannelStats* stats, const float* estimates, HeadBound* bounds, u32* status) {
  const u32 task = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, n_q = layers[0].n_q;
  if (task >= count * n_q) return;
  const Layer l = layers[task / n_q];
  const Growth place = growth[task / n_q];
  const u32 head = task % n_q, kv = head / (n_q / l.n_kv);
  const ChannelStats* q = stats + l.q_row + head * l.d_head;
  const ChannelStats* k = stats + l.k_row + kv * l.d_head;

  double norm_q = 0, norm_k = 0, square_cq = 0, square_ck = 0, turned = 0, still = 0;
  for (u32 p = lane; p < l.d_head / 2; p += 32) {
    u32 i, j;
    pair_channels(p, l.rotary, l.interleaved, i, j);
    const bool rotated = p < l.rotary / 2;
    const double f = rotated ? l.rope_factor : 1.0;
    const double q0 = f * q[i].constant, q1 = f * q[j].constant, k0 = f * k[i].constant, k1 = f * k[j].constant;
    const double qq = q0 * q0 + q1 * q1, kk = k0 * k0 + k1 * k1;
    norm_q += f * f * ((double)q[i].norm2 + q[j].norm2), norm_k += f * f * ((double)k[i].norm2 + k[j].norm2);
    square_cq += qq, square_ck += kk;
    if (rotated) turned += sqrt(qq * kk);
    else still += q0 * k0 + q1 * k1;
  }
  norm_q = warp_sum(norm_q), norm_k = warp_sum(norm_k), square_cq = warp_sum(square_cq), square_ck = warp_sum(square_ck);
  turned = warp_sum(turned), still = warp_sum(still);
  if (lane) return;
  const double d = l.d_model, tau = place.logits, largest = l.rotary && l.rope_factor > 1.f ? l.rope_factor : 1.0;
  const double estimate = estimates[summed ? l.layer : place.q + head], sigma = factor * estimate * largest * largest;
  const double linear = sqrt(norm_q * square_ck) + sqrt(norm_k * square_cq), constant = turned + fabs(still);
  const double exact = tau * (d * sigma + sqrt(d) * linear + constant);
  constexpr double kOnce = 1.0 + 1.0 / 17.0;
  double rounded = exact * kOnce * kOnce * (1.0 + place.share_q) * (1.0 + place.share_k);
  if (!(rounded < 1e300)) {
    rounded = __longlong_as_double(0x7ff8000000000000ll), atomicOr(status, STATUS_NON_FINITE_BOUND);
  }
  HeadBound out;
  out.sigma = above(sigma), out.exact = rounded == rounded ? above(exact) : (float)rounded, out.rounded = above(rounded);
  out.descale = smallest_descale(out.rounded, eta * 448.0);
  out.linear = above(linear), out.constant = above(constant), out.constants = above(sqrt(square_cq) + sqrt(square_ck));
  out.isotropic = 0.f;
  bounds[place.q + head] = out;
}
