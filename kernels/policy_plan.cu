// The scales of a layer's next attention call, from bounds, from what was observed, or from this step's measurement: the
// bits that the policies of the host give. A block a layer; the plan's addresses never change.
//
//   geometry         logits: rounded certain bound / (eta 448), operands: (B + A/32) / 448
//   geometry-c-star  logits: the paper's calibrated bound instead
//   auto-c           both times the constant of the value's pool, once it is frozen
//   delayed-paper    max(history) / (448 margin)        delayed-te  1 / scale
//   current          amax (1 + 2^-22) / 448 of the measurement in the statistics
// o is twice v, but for the delayed policies, which observe it.
//
// NOTES: where the host adds to a product, so do these lines, by intrinsics: a fused multiply-add would change the bits.
#include "common/descale.cuh"
#include "policy_types.cuh"

constexpr u32 THREADS = 256;

__device__ double c_star_bound(const PolicyTable& p, const PolicyLayer& l, u32 i) {
  const HeadBound head = p.heads[l.first_q + i];
  const double tau = l.softmax_scale, sigma = head.sigma;
  double bound;
  if (head.constants > 0.f) {
    const double linear = __dmul_rn(p.linear_factor, head.linear);
    const double isotropic = __dadd_rn(__dmul_rn(__dmul_rn(p.c_halved, p.d_model), sigma), linear);
    bound = __dmul_rn(tau, __dadd_rn(__dmul_rn(p.sphere, isotropic), head.constant));
  } else {
    bound = __dmul_rn(__dmul_rn(__dmul_rn(__dmul_rn(tau, p.sphere), p.c_star), p.d_model), sigma);
  }
  // fmin would drop a NaN; a head whose certain bound is not finite has none of this kind either.
  if (head.rounded != head.rounded) return head.rounded;
  return bound > p.soft_cap ? p.soft_cap : bound;
}

extern "C" __global__ void __launch_bounds__(THREADS) policy_plan(const PolicyTable* table, u32 first_layer) {
  extern __shared__ double row[];  // as many values as a layer has query heads, at most
  __shared__ double scratch[THREADS / 32];
  __shared__ float scratch_f[THREADS / 32];
  const PolicyTable& p = *table;
  const u32 layer = first_layer + blockIdx.x;
  const PolicyLayer l = p.sizes[layer];
  const bool delayed = p.kind == DELAYED_PAPER || p.kind == DELAYED_TE;
  bool missing = false;

  for (u32 tensor = LOGIT; tensor < (delayed ? TENSORS : OUTPUT); tensor++) {
    const u32 n = row_length(l, tensor);
    const double target = tensor == LOGIT ? p.logit_target : p.operand_target;
    float* out = plan_row(p, l, tensor);

    // What each descale has to cover
    if (delayed) {
      const u32 first = first_slot(p, l, layer) + (p.per_layer ? tensor : row_offset(l, tensor)), count = p.per_layer ? 1 : n;
      const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
      for (u32 s = warp; s < count; s += THREADS / 32) {
        float most = 0.f;
        if (p.kind == DELAYED_TE)
          most = p.scales[first + s];
        else
          for (u32 i = lane; i < p.history_length; i += 32)
            most = larger(most, p.history[(size_t)(first + s) * p.history_length + i]);
#pragma unroll
        for (int step = 16; step; step >>= 1) most = larger(most, __shfl_xor_sync(0xffffffffu, most, step));
        if (lane == 0) row[s] = most;
      }
    } else {
      const bool bounded = tensor != OPERAND_V || p.has_values;
      double most = 0.0;
      for (u32 i = threadIdx.x; i < n; i += THREADS) {
        double value = 0.0;
        if (p.kind == CURRENT)
          value = amax_entry(p, l, tensor, i);
        else if (bounded)
          value = p.kind == GEOMETRY_C_STAR && tensor == LOGIT ? c_star_bound(p, l, i) : bound_entry(p, l, tensor, i);
        row[i] = value;
        most = most != most || most >= value ? most : value;
      }
      if (p.per_layer) {
        most = block_largest(most, scratch);
        for (u32 i = threadIdx.x; i < n; i += THREADS) row[i] = most;
      }
      if (p.kind == AUTO_C) {
        most = 0.0;
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
          const u32 pool = pool_of(p, l, tensor, layer, i);
          const double value = row[i] * (p.phases[pool] == FROZEN ? p.constants[pool] : 1.0);
          row[i] = value;
          most = most != most || most >= value ? most : value;
        }
        if (p.per_layer) {
          most = block_largest(most, scratch);
          for (u32 i = threadIdx.x; i < n; i += THREADS) row[i] = most;
        }
      }
    }
    __syncthreads();

    // Its descale
    float most = 0.f;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
      const double value = row[delayed && p.per_layer ? 0 : i];
      float descale;
      if (p.kind == DELAYED_TE) {
        // The largest scale has a subnormal inverse, which a descale may not be.
        descale = fmaxf(1.f / (float)value, 1.17549435e-38f);
        if (!is_finite(descale)) descale = __uint_as_float(0x7fc00000u);
      } else {
        descale = smallest_descale(p.kind == CURRENT ? value * (1.0 + 0x1p-22) : value, target);
      }
      out[i] = descale;
      most = larger(most, descale);
      if (tensor == OPERAND_V && !delayed) {
        const bool zero = !p.has_values && p.kind != CURRENT;
        const float twice = 2.f * descale, o = zero ? 1.f : is_finite(twice) ? twice : __uint_as_float(0x7fc00000u);
        out[l.n_kv + i] = o;
        missing |= o != o;
      }
      missing |= descale != descale;
    }
    most = block_largest(most, scratch_f);
    if (threadIdx.x == 0) {
      p.tensors[layer * TENSORS + tensor] = most;
      if (tensor == OPERAND_V && !delayed) p.tensors[layer * TENSORS + OUTPUT] = p.has_values || p.kind == CURRENT ? 2.f * most : 1.f;
    }
  }
  if (__syncthreads_or(missing) && threadIdx.x == 0) atomicOr(&p.status[layer], STATUS_NO_PLAN);
}
