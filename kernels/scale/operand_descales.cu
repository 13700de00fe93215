// Operand descales of every layer from the channel statistics: (B + share A) / 448 with
//   B = sqrt(d) ||w_c|| + |c_c|,  A = sqrt(d) ||diag(g) w_c|| + sum |beta_i w_i| + |b_c|;
// under rotation a pair's spectral norm and hypotenuses take the place of a channel's. One block per layer and projection, a warp a
// head; q takes the largest of the query heads that share a KV head, times the largest factor on it; o is twice v. NaN stays NaN
// and sets the status.
// The bounds themselves go to `operand_bounds`, [layer][q, k, v][n_kv]; descales to `heads`, [layer][q, k, v, o][n_kv], and the
// largest of each to `tensors`, [layer][q, k, v, o]: of the whole model, whose layers may differ.
#include "common/descale.cuh"
#include "common/warp.cuh"
#include "ptx/launch.cuh"
#include "scale/types.cuh"

// Relative error of a bound computed in f32: eight roundings of at most 2^-24, and statistics that come from the Grams,
// whose sums on tensor cores were seen to be 2e-6 low.
constexpr float ROUNDING = 0x1p-18f;

// B + share A of pair p of the head whose rows start at `row`.
__device__ float pair_bound(const ChannelStats* s, const Layer& l, float share, u32 p, u32 rotary) {
  u32 a, b;
  pair_channels(p, rotary, l.interleaved, a, b);
  const ChannelStats x = s[a], y = s[b];
  const float root = sqrtf((float)l.d_model);
  const float ax = root * sqrtf(x.raw2) + x.absolute, ay = root * sqrtf(y.raw2) + y.absolute;
  if (p >= rotary / 2) {
    const float bx = root * sqrtf(x.norm2) + fabsf(x.constant) + ax * share;
    const float by = root * sqrtf(y.norm2) + fabsf(y.constant) + ay * share;
    return larger(bx, by);
  }
  const float mid = 0.5f * (x.norm2 + y.norm2), off = 0.5f * (x.norm2 - y.norm2);
  const float sigma = sqrtf(mid + sqrtf(off * off + x.pair * x.pair));
  const float bound = root * sigma + sqrtf(x.constant * x.constant + y.constant * y.constant);
  return l.rope_factor * (bound + sqrtf(ax * ax + ay * ay) * share);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    scale_operand_descales(const Layer* layers, const ChannelStats* stats, float* heads, float* tensors, float* operand_bounds,
                   u32* status) {
  extern __shared__ float bounds[];  // one per head of this projection
  const Layer l = layers[blockIdx.x];
  const u32 which = blockIdx.y;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (l.normalised && which < 2) return;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = l.d_head / 2;
  const u32 first = which == 0 ? l.q_row : which == 1 ? l.k_row : l.v_row;
  const u32 count = which == 0 ? l.n_q : l.n_kv, group = count / l.n_kv;
  const u32 rotary = which == 2 ? 0 : l.rotary;
  for (u32 head = warp; head < count; head += blockDim.x / 32) {
    float bound = 0.f;
    if (first != 0xffffffffu)
      for (u32 i = lane; i < half; i += 32)
        bound = larger(bound, pair_bound(stats + first + (size_t)head * l.d_head, l, layers[blockIdx.x].rounding_share[which], i, rotary));
    bound = warp_largest(bound);
    if (lane == 0) bounds[head] = bound;
  }
  __syncthreads();
  if (warp) return;
  float most = 0.f, most_o = 0.f;
  for (u32 head = lane; head < l.n_kv; head += 32) {
    float bound = 0.f;
    for (u32 g = 0; g < group; g++) bound = larger(bound, bounds[head * group + g]);
    if (which == 0) bound *= l.query_factor;
    bound += bound * ROUNDING;
    if (!(bound < 3e38f)) bound = __uint_as_float(0x7fc00000u), atomicOr(status, STATUS_NON_FINITE_WEIGHT);
    const float descale = smallest_descale(bound, 448.0);
    operand_bounds[3 * l.kv + which * l.n_kv + head] = bound;
    heads[4 * l.kv + which * l.n_kv + head] = descale;
    const float o = bound == 0.f ? 1.f : 2.f * descale;
    if (which == 2) heads[4 * l.kv + 3 * l.n_kv + head] = o;
    most = larger(most, descale), most_o = larger(most_o, o);
  }
  // One descale per tensor: the largest of its heads.
  most = warp_largest(most), most_o = warp_largest(most_o);
  if (lane) return;
  tensors[l.layer * 4 + which] = most;
  if (which == 2) tensors[l.layer * 4 + 3] = most_o;
}
