// The end of the chain, a warp per query head: certified eigenvalues and channel statistics to the logit bound and its descale.
//
//   exact = tau [d sigma + sqrt(d) (||a|| + ||b||) + |c0|],   rounded = exact + tau [(1 + e)^2 - 1] N_Q N_K + small errors (head_bound.cuh),
//   N = sqrt(d) sigma_raw + ||c'||, c' the constants with absolute values, 1 + e = (1 + 1/17)(1 + share), descale = rounded / (eta 448).
// Under rotation sigma is the smallest of the scaled product, sigma_Q sigma_K and the Frobenius bound, and the constants go pair by
// pair. Without constants, and with the mean kept, d times the scaled product may take the place of N_Q N_K too
// (src/bound/mod.rs).
#include "common/descale.cuh"
#include "common/head_bound.cuh"
#include "common/warp.cuh"
#include "ptx/launch.cuh"
#include "scale/segments.cuh"

// A little above the root: f32 is enough for the constants, and never errs downwards.
__device__ __forceinline__ double root_above(double v) { return (double)sqrtf((float)v) * (1.0 + 0x1p-21); }

extern "C" __global__ void __launch_bounds__(128, 1)  // left to itself, the assembler spills on older architectures
    scale_logit_bounds(Shape s, double eta, const HeadGram* heads, const ChannelStats* stats, const double* lambdas, const double2* aux,
               const Growth* growth, const float* operand_descales, HeadBound* bounds, u32* status) {
  const u32 task = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  ptx::griddepcontrol_wait();
  if (task >= s.layers * s.n_q) return;
  const u32 layer = task / s.n_q, h = task % s.n_q, kv = h / (s.n_q / s.n_kv);
  const u32 first = layer * (s.n_q + s.n_kv);
  const ChannelStats* q = stats + heads[first + h].stat_row;
  const ChannelStats* k = stats + heads[first + s.n_q + kv].stat_row;
  const double root = sqrt((double)s.d_model);
  const double yarn = s.rope_factor;

  // Constants.
  double cq2 = 0, ck2 = 0, c0 = 0, a = 0, b = 0, rest_q = 0, rest_k = 0, rest_cq = 0, rest_ck = 0, rest_c0 = 0;
  double rest_a = 0, rest_b = 0;      // channel by channel
  double spread_q = 0, spread_k = 0;  // of what the constants are made of, before it cancels
  double trace_q = 0, trace_k = 0;
  float least = 1.f, most = 1.f;      // of f^4 (matrices.cuh)
  auto balance = [&](float to_q, float to_k) {
    if (!(to_q > 0.f && to_k > 0.f)) return;
    const float ratio = to_k / to_q;
    least = fminf(least, ratio), most = fmaxf(most, ratio);
  };
  for (u32 p = lane; p < s.d_head / 2; p += 32) {
    u32 i, j;
    pair_channels(p, s.rotary, s.interleaved, i, j);
    const bool rotated = p < s.rotary / 2;
    const double f = rotated ? yarn : 1.0;
    const double q0 = f * q[i].constant, q1 = f * q[j].constant, k0 = f * k[i].constant, k1 = f * k[j].constant;
    const double qq = q0 * q0 + q1 * q1, kk = k0 * k0 + k1 * k1;
    cq2 += qq, ck2 += kk;
    trace_q += f * f * ((double)q[i].raw2 + q[j].raw2), trace_k += f * f * ((double)k[i].raw2 + k[j].raw2);
    if (rotated) balance(q[i].norm2 + q[j].norm2, k[i].norm2 + k[j].norm2);
    else balance(q[i].norm2, k[i].norm2), balance(q[j].norm2, k[j].norm2);
    const double aq0 = f * q[i].absolute, aq1 = f * q[j].absolute, ak0 = f * k[i].absolute, ak1 = f * k[j].absolute;
    spread_q += aq0 * aq0 + aq1 * aq1, spread_k += ak0 * ak0 + ak1 * ak1;
    if (rotated) {
      auto sigma_pair = [&](const ChannelStats* c) {
        const double x = c[i].norm2, y = c[j].norm2, m = c[i].pair;
        return f * root_above(0.5 * (x + y) + root_above(0.25 * (x - y) * (x - y) + m * m));
      };
      const double rq = root_above(qq), rk = root_above(kk);
      c0 += rq * rk, a += sigma_pair(q) * rk, b += sigma_pair(k) * rq;
    } else {
      rest_c0 += q0 * k0 + q1 * k1, rest_cq += qq, rest_ck += kk;
      rest_q += (double)q[i].norm2 + q[j].norm2, rest_k += (double)k[i].norm2 + k[j].norm2;
      rest_a += root_above(q[i].norm2) * fabs(k0) + root_above(q[j].norm2) * fabs(k1);
      rest_b += root_above(k[i].norm2) * fabs(q0) + root_above(k[j].norm2) * fabs(q1);
    }
  }
  cq2 = warp_sum(cq2), ck2 = warp_sum(ck2), c0 = warp_sum(c0) + fabs(warp_sum(rest_c0));
  a = warp_sum(a), b = warp_sum(b), spread_q = warp_sum(spread_q), spread_k = warp_sum(spread_k);
  rest_q = warp_sum(rest_q), rest_k = warp_sum(rest_k), rest_cq = warp_sum(rest_cq), rest_ck = warp_sum(rest_ck);
  rest_a = warp_sum(rest_a), rest_b = warp_sum(rest_b), trace_q = warp_sum(trace_q), trace_k = warp_sum(trace_k);
  least = warp_reduce(least, [](float a, float b) { return fminf(a, b); }), most = warp_largest(most);
  const u32 all = s.layers * s.n_q;
  double raw_q = lambdas[task], raw_k = lambdas[all + layer * s.n_kv + kv];
  const double* rest = lambdas + all + s.layers * s.n_kv;
  // The coarsest of the layer: heads may share its largest scale.
  float step_q = 0.f, step_k = 0.f;
  const Growth place = growth[layer];
  for (u32 i = lane; i < s.n_kv; i += 32) {
    step_q = fmaxf(step_q, operand_descales[4 * place.kv + i]);
    step_k = fmaxf(step_k, operand_descales[4 * place.kv + s.n_kv + i]);
  }
  step_q = warp_largest(step_q), step_k = warp_largest(step_k);
  if (lane) return;
  // In place of a norm that `scale_eigenvalues` skipped: ||W||^2 <= ||W F||^2 max f^-2, and the trace.
  auto instead = [](double square, double trace, double scaled, double back) {
    const double other = scaled * back;
    return square < 1e300 || square != square ? square : (other < trace ? other : trace) * (1.0 + 0x1p-16);
  };
  if (s.rotary && !s.mean) {
    raw_q = instead(raw_q, trace_q, rest[task], 1.0 / sqrt((double)least));
    raw_k = instead(raw_k, trace_k, rest[all + task], sqrt((double)most));
  }
  const double sigma_q = sqrt(raw_q), sigma_k = sqrt(raw_k);
  a += fmin(fmin(sqrt(rest_q), sigma_q) * sqrt(rest_ck), rest_a);
  b += fmin(fmin(sqrt(rest_k), sigma_k) * sqrt(rest_cq), rest_b);
  a = fmin(a, sigma_q * sqrt(ck2)), b = fmin(b, sigma_k * sqrt(cq2));
  double sigma = sigma_q * sigma_k, scaled = sigma;
  if (!s.rotary) {
    sigma = fmin(sigma, sqrt(rest[task]));
    a = fmin(a, sqrt(aux[task].x)), b = fmin(b, sqrt(aux[task].y));
  } else if (s.rotary) {
    scaled = sqrt(rest[task] * rest[all + task]);
    sigma = fmin(sigma, fmin(scaled, sqrt(rest[2 * all + task])));
  }
  const double tau = place.logits, d = s.d_model;
  const double exact = tau * (d * sigma + root * (a + b) + c0);
  const double norm_q = root * sigma_q + sqrt(spread_q), norm_k = root * sigma_k + sqrt(spread_k);
  const bool plain = s.rotary && !s.mean && spread_q + spread_k == 0.0;
  const double product = plain ? fmin(norm_q * norm_k, d * scaled) : norm_q * norm_k;
  double rounded = exact + rounding_gap(tau, place.share_q, place.share_k, product, norm_q, norm_k,
                                             step_q / (double)place.query, step_k, place.weight_q * root * root_above(trace_q),
                                             place.weight_k * root * root_above(trace_k), s.d_head);
  // fmin drops a NaN.
  if (!(raw_q + raw_k + trace_q + trace_k + rest[task] + rounded < 1e300)) {
    rounded = __longlong_as_double(0x7ff8000000000000ll), atomicOr(status, STATUS_NON_FINITE_BOUND);
  }
  HeadBound out;
  out.sigma = above(sigma), out.exact = rounded == rounded ? above(exact) : (float)rounded, out.rounded = above(rounded);
  out.descale = smallest_descale(out.rounded, eta * 448.0);
  out.linear = above(a + b), out.constant = above(c0), out.constants = above(sqrt(cq2) + sqrt(ck2)), out.isotropic = 0.f;
  bounds[place.q + h] = out;
}
