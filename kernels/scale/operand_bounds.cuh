// B + share A of a rotation pair or of two channels, and a layer as these bounds see it: what scale_operand_descales and the norms
// that finish by themselves share.
#pragma once
#include "common/descale.cuh"
#include "common/warp.cuh"
#include "scale/types.cuh"

struct Layer {
  u32 q_row, k_row, v_row;     // first statistics row of each projection; 0xffffffff: v has no bound
  u32 n_q, n_kv, d_head, d_model;
  u32 rotary, interleaved;
  u32 layer, kv;               // number of the layer, and of its first KV head, in the model: where its results go
  float rope_factor;           // on rotated channels (YaRN)
  u32 normalised;              // 1: q and k go by `scale_qk_norm_bounds`
  float query_factor;          // largest factor on q behind rotation and norms, rounded up
  float rounding_share[3];     // of A, of q, k and v, rounded up
};
static_assert(sizeof(Layer) == 68, "host mirror");

// Relative error of a bound computed in f32: eight roundings of at most 2^-24, and statistics that come from the Grams,
// whose sums on tensor cores were seen to be 2e-6 low.
constexpr float ROUNDING = 0x1p-18f;

// B + share A of channels x and y, which turn together or not at all.
__device__ __forceinline__ float pair_bound(const ChannelStats& x, const ChannelStats& y, const Layer& l, float share, bool turns) {
  const float root = sqrtf((float)l.d_model);
  const float ax = root * sqrtf(x.raw2) + x.absolute, ay = root * sqrtf(y.raw2) + y.absolute;
  if (!turns) {
    const float bx = root * sqrtf(x.norm2) + fabsf(x.constant) + ax * share;
    const float by = root * sqrtf(y.norm2) + fabsf(y.constant) + ay * share;
    return larger(bx, by);
  }
  const float mid = 0.5f * (x.norm2 + y.norm2), off = 0.5f * (x.norm2 - y.norm2);
  const float sigma = sqrtf(mid + sqrtf(off * off + x.pair * x.pair));
  const float bound = root * sigma + sqrtf(x.constant * x.constant + y.constant * y.constant);
  return l.rope_factor * (bound + sqrtf(ax * ax + ay * ay) * share);
}

// Results of a projection (0: q, 1: k, 2: v), by one warp: q takes the largest of the `group` query heads that share a KV head, times
// the largest factor on it; o is twice v. `bound_of`: of a head; `flag`: called where one is not finite.
template <class BoundOf, class Flag>
__device__ __forceinline__ void put_operands(const Layer& l, u32 which, u32 group, BoundOf bound_of, Flag flag, float* heads,
                                             float* tensors, float* operand_bounds) {
  const u32 lane = threadIdx.x & 31;
  float most = 0.f, most_o = 0.f;
  for (u32 head = lane; head < l.n_kv; head += 32) {
    float bound = 0.f;
    for (u32 g = 0; g < group; g++) bound = larger(bound, bound_of(head * group + g));
    if (which == 0) bound *= l.query_factor;
    bound += bound * ROUNDING;
    if (!(bound < 3e38f)) bound = __uint_as_float(0x7fc00000u), flag();
    const float descale = smallest_descale(bound, 448.0);
    operand_bounds[3 * l.kv + which * l.n_kv + head] = bound;
    heads[4 * l.kv + which * l.n_kv + head] = descale;
    const float o = bound == 0.f ? 1.f : 2.f * descale;
    if (which == 2) heads[4 * l.kv + 3 * l.n_kv + head] = o;
    most = larger(most, descale), most_o = larger(most_o, o);
  }
  // One descale a tensor: the largest of its heads.
  most = warp_largest(most), most_o = warp_largest(most_o);
  if (lane) return;
  tensors[l.layer * 4 + which] = most;
  if (which == 2) tensors[l.layer * 4 + 3] = most_o;
}
