// Operand descales of every layer from the channel statistics: (B + share A) / 448 with
//   B = sqrt(d) ||w_c|| + |c_c|,  A = sqrt(d) ||diag(g) w_c|| + sum |beta_i w_i| + |b_c|;
// under rotation a pair's spectral norm and hypotenuses take the place of a channel's. One block a layer and projection, a warp a
// head; q takes the largest of the query heads that share a KV head, times the largest factor on it; o is twice v. NaN stays NaN
// and sets the status.
// The bounds themselves go to `operand_bounds`, [layer][q, k, v][n_kv]; descales to `heads`, [layer][q, k, v, o][n_kv], and the
// largest of each to `tensors`, [layer][q, k, v, o]: of the whole model, whose layers may differ.
#include "ptx/launch.cuh"
#include "scale/operand_bounds.cuh"

// Of pair p of the head whose rows start at `row`.
__device__ float pair_bound(const ChannelStats* s, const Layer& l, float share, u32 p, u32 rotary) {
  u32 a, b;
  pair_channels(p, rotary, l.interleaved, a, b);
  const ChannelStats x = s[a], y = s[b];
  return pair_bound(x, y, l, share, p < rotary / 2);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    scale_operand_descales(const Layer* layers, const ChannelStats* stats, float* heads, float* tensors, float* operand_bounds,
                   u32* status) {
  extern __shared__ float bounds[];  // one a head of this projection
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
  auto bound_of = [&](u32 head) { return bounds[head]; };
  auto flag = [&] { atomicOr(status, STATUS_NON_FINITE_WEIGHT); };
  put_operands(l, which, group, bound_of, flag, heads, tensors, operand_bounds);
}
