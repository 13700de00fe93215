// Operand descales of layers with multi-head latent attention, from the statistics of their channels (docs/latent-attention.md):
// (B + share A) / 448 for q = [A c_q, R B c_q], k = [K c, k_pe] and v = V c of each head, and for the row [c, k_pe] of the cache.
//   c                rho_c max |g_c|
//   k_pe, R B c_q    rho sigma_b + |constants of the pair|, the rotation's factor included
//   other channels   rho ||w_i||
// rho is the radius of what a product reads, sqrt(d), sqrt(q_rank) or sqrt(kv_rank), times the latent's factor. k and v may be made
// of a cache in E4M3: its subnormal elements change the latent by at most sqrt(kv_rank) 2^-10 / 448 of the row's bound in length,
// which meets the rows of K and V as they are stored, without the gain.
// A block per head, grid (heads, layers). q times the largest factor on it; o is twice v. NaN stays NaN and sets the status.
#include "common/descale.cuh"
#include "common/warp.cuh"
#include "ptx/launch.cuh"
#include "scale/types.cuh"

struct MlaLayer {
  u64 latent_gain;                              // g_c, as stored
  u32 q_row, kv_row, raw_row, k_pe_row;         // first statistics row: of head 0's [A; B]; of its [K; V]; of these without g_c
  u32 heads, d_nope, d_rope, d_value, kv_rank;
  u32 rotary, interleaved;                      // rotary: d_rope, or 0 where nothing rotates
  u32 vector_dtype;                             // of g_c
  u32 layer, head;                              // number of the layer, and of its first head, in the model: where its results go
  float radius_q, radius_c, radius;             // rho of what q, the heads' k and v, and k_pe are made from
  float rope_factor, query_factor;
  float latent_share, q_share, k_share, v_share, k_pe_share;
};
static_assert(sizeof(MlaLayer) == 104, "host mirror");

constexpr u32 THREADS = 128;
// As in operand_descales.cu.
constexpr float ROUNDING = 0x1p-18f;
// What an element below the normal numbers of E4M3 errs by, in units of the largest value that a descale is made for.
constexpr float FLUSH = 0x1p-10f / 448.f;
// 1 + 1/17: what rounding to E4M3 makes of a value at most.
constexpr float CACHED = 1.058824f;

// B and A of channel i.
__device__ __forceinline__ float2 channel(const ChannelStats& s, float radius) {
  return make_float2(radius * sqrtf(s.norm2) + fabsf(s.constant), radius * sqrtf(s.raw2) + s.absolute);
}
// B and A of pair p of d_rope channels.
__device__ __forceinline__ float2 pair(const ChannelStats* s, const MlaLayer& l, float radius, u32 p) {
  u32 a, b;
  pair_channels(p, l.rotary, l.interleaved, a, b);
  const ChannelStats x = s[a], y = s[b];
  const float2 first = channel(x, radius), second = channel(y, radius);
  if (!l.rotary) return make_float2(larger(first.x, second.x), larger(first.y, second.y));
  const float mid = 0.5f * (x.norm2 + y.norm2), off = 0.5f * (x.norm2 - y.norm2);
  const float sigma = sqrtf(mid + sqrtf(off * off + x.pair * x.pair));
  const float bound = radius * sigma + sqrtf(x.constant * x.constant + y.constant * y.constant);
  return make_float2(l.rope_factor * bound, l.rope_factor * sqrtf(first.y * first.y + second.y * second.y));
}

// The largest of the block's values, in every thread.
__device__ __forceinline__ float block_largest(float mine, float* shared) {
  mine = warp_largest(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = shared[0];
  for (u32 w = 1; w < THREADS / 32; w++) mine = larger(mine, shared[w]);
  return mine;
}

// Rounding of f32 included; NaN where it is not finite.
__device__ __forceinline__ float finished(float bound, u32* status) {
  bound += bound * ROUNDING;
  if (bound < 3e38f) return bound;
  atomicOr(status, STATUS_NON_FINITE_WEIGHT);
  return __uint_as_float(0x7fc00000u);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    scale_mla_descales(const MlaLayer* layers, const ChannelStats* stats, float* descales, float* operand_bounds,
                          float* cache, u32* status) {
  __shared__ float shared[THREADS / 32];
  const MlaLayer& l = layers[blockIdx.y];
  const u32 head = blockIdx.x, half = l.d_rope / 2;
  if (head >= l.heads) return;

  float gain = 0.f;
  for (u32 i = threadIdx.x; i < l.kv_rank; i += THREADS)
    gain = larger(gain, fabsf(load_value(l.latent_gain, l.vector_dtype, i)));
  float cached = 0.f;
  for (u32 p = threadIdx.x; p < half; p += THREADS) {
    const float2 both = pair(stats + l.k_pe_row, l, l.radius, p);
    cached = larger(cached, both.x + l.k_pe_share * both.y);
  }
  const float latent = l.radius_c * block_largest(gain, shared) * (1.f + l.latent_share);
  cached = block_largest(cached, shared);
  const float row = larger(latent, cached), step = FLUSH * row, error = sqrtf((float)l.kv_rank) * step;

  // The rotated key leaves the cache with an error relative to itself.
  float bounds[3] = {0.f, cached * CACHED + step, 0.f};  // q, k, v
  const ChannelStats* q = stats + l.q_row + (size_t)head * (l.d_nope + l.d_rope);
  for (u32 i = threadIdx.x; i < l.d_nope; i += THREADS) {
    const float2 both = channel(q[i], l.radius_q);
    bounds[0] = larger(bounds[0], both.x + l.q_share * both.y);
  }
  for (u32 p = threadIdx.x; p < half; p += THREADS) {
    const float2 both = pair(q + l.d_nope, l, l.radius_q, p);
    bounds[0] = larger(bounds[0], both.x + l.q_share * both.y);
  }
  const size_t first = (size_t)head * (l.d_nope + l.d_value);
  for (u32 i = threadIdx.x; i < l.d_nope + l.d_value; i += THREADS) {
    const bool of_v = i >= l.d_nope;
    const float2 both = channel(stats[l.kv_row + first + i], l.radius_c);
    const float bound = both.x + (of_v ? l.v_share : l.k_share) * both.y + sqrtf(stats[l.raw_row + first + i].norm2) * error;
    bounds[1] = larger(bounds[1], of_v ? 0.f : bound), bounds[2] = larger(bounds[2], of_v ? bound : 0.f);
  }
#pragma unroll
  for (u32 which = 0; which < 3; which++) bounds[which] = block_largest(bounds[which], shared);
  if (threadIdx.x) return;
  bounds[0] *= l.query_factor;
#pragma unroll
  for (u32 which = 0; which < 3; which++) {
    const float bound = finished(bounds[which], status), descale = smallest_descale(bound, 448.0);
    operand_bounds[3 * l.head + which * l.heads + head] = bound;
    descales[4 * l.head + which * l.heads + head] = descale;
    if (which == 2) descales[4 * l.head + 3 * l.heads + head] = bound == 0.f ? 1.f : 2.f * descale;
  }
  if (head) return;
  const float of_latent = finished(latent, status), of_k_pe = finished(cached, status);
  cache[3 * l.layer] = of_latent, cache[3 * l.layer + 1] = of_k_pe;
  cache[3 * l.layer + 2] = smallest_descale(larger(of_latent, of_k_pe), 448.0);
}
