// Descales of a layer's next attention call, the same bits as the host's policies (src/policy) give.
//
//   geometry         logits: worst-case bound, rounding included, / (eta 448), operands: bound with rounding / 448
//   geometry-c-star  logits: the paper's calibrated bound (Proposition 3.4) in its place
//   auto-c           Algorithm 4: as geometry, times the constant of the value's pool once it is frozen
//   delayed-paper    Eq. 1: max(history) / (448 margin)
//   delayed-te       TransformerEngine's delayed scaling: 1 / scale
//   current          amax (1 + 2^-22) / 448 of the statistics of this step
//
// o is twice v, except for the delayed policies, which observe it.
//
// Layout (types.cuh): reads bounds, memory or statistics of a layer; writes its row of `descales`, the largest descale of each
// tensor, and NO_PLAN in `status` where a descale is NaN. One block per layer.
//
// NOTES: where the host adds to a product, so do these lines, by intrinsics: a fused multiply-add would change the bits.
#include "common/descale.cuh"
#include "policy/types.cuh"

constexpr u32 THREADS = 256;

__device__ __forceinline__ float nan_f32() { return __uint_as_float(0x7fc00000u); }

// The paper's calibrated logit bound of a head: the host's, or from sigma by the operations of `LayerBounds::from_device` in
// their order.
__device__ double c_star_bound(const PolicyTable& p, const PolicyLayer& l, u32 i) {
  const HeadBound head = p.heads[l.first_q + i];
  const Isotropic& c = p.isotropic;
  const double tau = l.softmax_scale, sigma = head.sigma;
  double bound = head.isotropic;
  if (head.isotropic == 0.f && head.constants > 0.f) {
    const double linear = __dmul_rn(c.linear, head.linear);
    const double spread = __dadd_rn(__dmul_rn(__dmul_rn(c.c_halved, p.d_model), sigma), linear);
    bound = __dmul_rn(tau, __dadd_rn(__dmul_rn(c.sphere, spread), head.constant));
  } else if (head.isotropic == 0.f) {
    bound = __dmul_rn(__dmul_rn(__dmul_rn(__dmul_rn(tau, c.sphere), c.c_star), p.d_model), sigma);
  }
  // A head whose worst-case bound is not finite has no calibrated one either; fmin would drop the NaN.
  if (head.rounded != head.rounded) return head.rounded;
  return bound > p.soft_cap ? p.soft_cap : bound;
}

// delayed: what each slot of a tensor remembers, a warp per slot.
__device__ void load_memory(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32 tensor, double* row) {
  const u32 first = first_slot(p, l, layer, tensor), count = slot_count(p, l, tensor);
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (u32 s = warp; s < count; s += THREADS / 32) {
    const float* ring = p.history + (size_t)(first + s) * p.history_length;
    float most = p.kind == DELAYED_TE ? p.slots[first + s].scale : 0.f;
    if (p.kind == DELAYED_PAPER)
      for (u32 i = lane; i < p.history_length; i += 32) most = larger(most, ring[i]);
    most = warp_largest(most);
    if (lane == 0) row[s] = most;
  }
}

// Every other policy: what each descale of a tensor covers. `value(i)` is called once for each; with one scale per layer all
// get the largest.
template <class Value> __device__ void fill_row(const PolicyTable& p, u32 n, double* row, double* scratch, Value value) {
  double most = 0.0;
  for (u32 i = threadIdx.x; i < n; i += THREADS) most = larger(most, row[i] = value(i));
  if (!p.per_layer) return;
  most = block_largest(most, scratch);
  for (u32 i = threadIdx.x; i < n; i += THREADS) row[i] = most;
}
__device__ void load_row(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32 tensor, double* row, double* scratch) {
  const u32 n = row_length(l, tensor);
  fill_row(p, n, row, scratch, [&](u32 i) -> double {
    if (p.kind == CURRENT) return amax_entry(p, l, tensor, i);
    if (tensor == OPERAND_V && !p.has_values) return 0.0;
    return p.kind == GEOMETRY_C_STAR && tensor == LOGIT ? c_star_bound(p, l, i) : bound_entry(p, l, tensor, i);
  });
  if (p.kind != AUTO_C) return;
  fill_row(p, n, row, scratch, [&](u32 i) {
    const Pool& pool = p.pools[pool_of(p, l, layer, tensor, i)];
    return row[i] * (pool.phase == FROZEN ? pool.c : 1.0);
  });
}

__device__ float descale_of(const PolicyTable& p, double value, double target) {
  if (p.kind != DELAYED_TE) return smallest_descale(p.kind == CURRENT ? value * (1.0 + 0x1p-22) : value, target);
  // The largest scale has a subnormal inverse, which a descale may not be.
  const float descale = fmaxf(1.f / (float)value, 1.17549435e-38f);
  return is_finite(descale) ? descale : nan_f32();
}

extern "C" __global__ void __launch_bounds__(THREADS) policy_plan(const PolicyTable* table, u32 first_layer) {
  extern __shared__ double row[];  // [the most query heads of a layer]
  __shared__ double scratch[THREADS / 32];
  __shared__ float scratch_f[THREADS / 32];
  const PolicyTable& p = *table;
  const u32 layer = first_layer + blockIdx.x;
  const PolicyLayer l = p.layers[layer];
  const bool delayed = p.kind == DELAYED_PAPER || p.kind == DELAYED_TE;
  const bool output_known = p.has_values || p.kind == CURRENT;
  bool missing = false;

  for (u32 tensor = LOGIT; tensor < (delayed ? TENSORS : OUTPUT); tensor++) {
    const bool sets_output = tensor == OPERAND_V && !delayed;
    const double target = tensor == LOGIT ? p.logit_target : p.operand_target;
    float* out = descale_row(p, l, tensor);
    if (delayed)
      load_memory(p, l, layer, tensor, row);
    else
      load_row(p, l, layer, tensor, row, scratch);
    __syncthreads();

    float most = 0.f;
    for (u32 i = threadIdx.x; i < row_length(l, tensor); i += THREADS) {
      const float descale = descale_of(p, row[delayed && p.per_layer ? 0 : i], target);
      out[i] = descale;
      most = larger(most, descale);
      missing |= descale != descale;
      if (!sets_output) continue;
      const float twice = 2.f * descale, o = !output_known ? 1.f : is_finite(twice) ? twice : nan_f32();
      out[l.n_kv + i] = o;
      missing |= o != o;
    }
    most = block_largest(most, scratch_f);
    if (threadIdx.x == 0) {
      float* tensors = p.tensor_descales + layer * TENSORS;
      tensors[tensor] = most;
      if (sets_output) tensors[OUTPUT] = output_known ? 2.f * most : 1.f;
    }
  }
  if (__syncthreads_or(missing) && threadIdx.x == 0) atomicOr(&p.status[layer], STATUS_NO_PLAN);
}
