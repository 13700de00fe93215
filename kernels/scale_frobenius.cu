// Frobenius norms of every head's interaction, from its Grams; behind `scale_plan`. One block a query head.
//
//   F^2 = ||W_Q W_K^T||_F^2 = sum_ij G_Q,ij G_K,ij
// and a bound over every relative position, every rotation pair turned by an angle of its own: for 2 x 2 blocks x of G_Q
// and y of G_K, tr(x R y^T R'^T) splits into parts that turn by the sum and by the difference of the two angles,
//   F_rope^2 <= sum_blocks (|x|+ |y|+ + |x|- |y|-) / 2,   |x|+- = hypot(x00 +- x11, x01 -+ x10).
// A certified one takes G' = (G + (e + R/t) I)/(1 - t) >= the exact Gram in place of G: e covers the sums' roundings, R what
// the operands lost (see `scale_products`). Neither norm changes where channels of q are scaled by what those of k are divided
// by, alike in a rotation pair; so both sides are balanced first, and what I adds is small beside every channel. The bound bounds sigma over every position too, and is the sharper one where few
// directions carry a head: there the logit bound falls with it.
#include "covering.cuh"
#include "head_bound.cuh"
#include "scale_segments.cuh"

struct FrobeniusShape {
  u32 n_q, n_kv, r, rotary;
  u32 interleaved, mean, d_model;
  float rope_factor;
  float rounding;  // e in units of 2^-24 tr G
  u32 one_sided;   // 1: one side of the products that made the Grams was rounded, 0: both
  double eta;
};
static_assert(sizeof(FrobeniusShape) == 48, "host mirror");

struct HeadFrobenius {
  float norm;   // F
  float bound;  // certified, over every relative position; rounded up
};

constexpr u32 THREADS = 256;

__device__ double3 block_sum(double3 v, double3* scratch) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, step);
    v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    v.z += __shfl_xor_sync(0xffffffffu, v.z, step);
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = {0.0, 0.0, 0.0};
  for (u32 w = 0; w < THREADS / 32; w++) v.x += scratch[w].x, v.y += scratch[w].y, v.z += scratch[w].z;
  return v;
}

// One head's Gram, the mean removed where the norm does, rotated channels times the attention factor.
struct Side {
  HeadGram head;
  const float* partials;
  const ChannelStats* stats;
  const FrobeniusShape& s;
  const double* factors;  // attention factor and balance of each channel
  double lift = 0.0;      // e + R/t
  double grow = 1.0;      // 1/(1 - t)

  __device__ double entry(u32 i, u32 j) const {
    const u32 side = (s.r + 63) / 64, blocks = side * (side + 1) / 2;
    const u32 low = i / 64 <= j / 64 ? i : j, high = i / 64 <= j / 64 ? j : i;
    const u32 bi = low / 64, bj = high / 64, block = bi * side - bi * (bi - 1) / 2 + bj - bi;
    double sum = 0.0;
    for (u32 part = 0; part < head.count; part++)
      sum += partials[((size_t)(head.first + part * head.stride) * blocks + block) * 4096 + low % 64 * 64 + high % 64];
    if (s.mean) sum -= (double)stats[i].sum * stats[j].sum / s.d_model;
    return sum * factors[i] * factors[j];
  }
  // Sets the lift, from sums over the channels and ||G||_F^2.
  __device__ void certify(double raw, double lost, double means, double squares) {
    const double root = sqrt(lost);
    // The sums of the mean are those of exact channels.
    const double moved = s.mean ? (2.0 * sqrt(means) + 2.0 * root) * 2.0 * root * rsqrt((double)s.d_model) : 0.0;
    const double sums = (double)s.rounding * 0x1p-24 * raw + moved;
    // As in `scale_products`.
    const double wanted = s.one_sided ? root / (sqrt(sqrt(squares) + sums) + 2.0 * root) : sqrt(lost * raw / squares);
    const double t = lost > 0.0 && squares > 0.0 ? fmin(wanted, 0.5) : 0.0;
    lift = (sums + (t > 0.0 ? lost / t : 0.0)) * 1.0001;
    grow = 1.0 / (1.0 - t);
  }
};

__device__ double3 channel_sums(const Side& side) {
  double3 sums = {0.0, 0.0, 0.0};
  for (u32 i = threadIdx.x; i < side.s.r; i += THREADS) {
    const ChannelStats c = side.stats[i];
    const double f2 = side.factors[i] * side.factors[i];
    sums.x += f2 * c.raw2, sums.y += f2 * c.rounding, sums.z += f2 * c.sum * c.sum;
  }
  return sums;
}

// Every 2 x 2 block of the two Grams on and above the diagonal: visit(block of q, block of k, on the diagonal).
template <class Visit> __device__ __forceinline__ void each_block(const Side& q, const Side& k, Visit visit) {
  const u32 pairs = q.s.r / 2;
  for (u32 index = threadIdx.x; index < pairs * pairs; index += THREADS) {
    const u32 p = index / pairs, o = index % pairs;
    if (o < p) continue;
    u32 a[2], b[2];
    pair_channels(p, q.s.rotary, q.s.interleaved, a[0], a[1]);
    pair_channels(o, q.s.rotary, q.s.interleaved, b[0], b[1]);
    double x[4], y[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = q.entry(a[i / 2], b[i % 2]), y[i] = k.entry(a[i / 2], b[i % 2]);
    visit(x, y, p == o);
  }
}
__device__ __forceinline__ double length(double a, double b) { return sqrt(a * a + b * b); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)  // left to itself, the assembler spills on other architectures
    scale_frobenius(FrobeniusShape s, const HeadGram* heads, const float* partials, const ChannelStats* stats,
                    const float* softmax_scales, HeadFrobenius* norms, HeadBound* bounds) {
  __shared__ double3 scratch[THREADS / 32];
  __shared__ double factors_q[256], factors_k[256];
  const u32 layer = blockIdx.x / s.n_q, h = blockIdx.x % s.n_q, first = layer * (s.n_q + s.n_kv);
  const HeadGram of_q = heads[first + h], of_k = heads[first + s.n_q + h / (s.n_q / s.n_kv)];
  Side q = {of_q, partials, stats + of_q.stat_row, s, factors_q}, k = {of_k, partials, stats + of_k.stat_row, s, factors_k};
  const u32 pairs = s.r / 2;
  for (u32 p = threadIdx.x; p < pairs; p += THREADS) {
    u32 c[2];
    pair_channels(p, s.rotary, s.interleaved, c[0], c[1]);
    const bool rotated = p < s.rotary / 2;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      double size_q = q.stats[c[i]].norm2, size_k = k.stats[c[i]].norm2;
      if (rotated) size_q += q.stats[c[1 - i]].norm2, size_k += k.stats[c[1 - i]].norm2;
      const double balance = size_q > 0.0 && size_k > 0.0 ? sqrt(sqrt(size_k / size_q)) : 1.0;
      const double factor = rotated ? s.rope_factor : 1.0;
      factors_q[c[i]] = factor * balance, factors_k[c[i]] = factor / balance;
    }
  }
  __syncthreads();
  const double3 q_sums = block_sum(channel_sums(q), scratch), k_sums = block_sum(channel_sums(k), scratch);

  // F^2 and the squares of both Grams; then the bound, whose lifts need them.
  double3 sums = {0.0, 0.0, 0.0};
  each_block(q, k, [&](const double(&x)[4], const double(&y)[4], bool diagonal) {
    const double weight = diagonal ? 1.0 : 2.0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) sums.x += weight * x[i] * y[i], sums.y += weight * x[i] * x[i], sums.z += weight * y[i] * y[i];
  });
  sums = block_sum(sums, scratch);
  q.certify(q_sums.x, q_sums.y, q_sums.z, sums.y);
  k.certify(k_sums.x, k_sums.y, k_sums.z, sums.z);
  double3 bound = {0.0, 0.0, 0.0};
  each_block(q, k, [&](double(&x)[4], double(&y)[4], bool diagonal) {
    const double weight = diagonal ? 1.0 : 2.0;
    if (diagonal) x[0] += q.lift, x[3] += q.lift, y[0] += k.lift, y[3] += k.lift;
    if (s.rotary) {
      bound.x += weight * 0.5 * (length(x[0] + x[3], x[2] - x[1]) * length(y[0] + y[3], y[2] - y[1]) +
                                 length(x[0] - x[3], x[1] + x[2]) * length(y[0] - y[3], y[1] + y[2]));
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; i++) bound.x += weight * x[i] * y[i];
    }
  });
  bound = block_sum(bound, scratch);
  if (threadIdx.x) return;
  const double square = fmax(bound.x, 0.0) * q.grow * k.grow * (1.0 + 1e-9);
  const float certified = above(sqrt(square));
  // fmax drops a NaN.
  const bool known = sums.x == sums.x && bound.x == bound.x;
  norms[blockIdx.x].norm = known ? (float)sqrt(fmax(sums.x, 0.0)) : (float)sums.x;
  norms[blockIdx.x].bound = known ? certified : __uint_as_float(0x7fc00000u);
  HeadBound head = bounds[blockIdx.x];
  if (!(known && head.rounded == head.rounded && certified < head.sigma)) return;
  // sigma was rounded up, so that a little less comes off.
  const double less = (double)softmax_scales[layer] * s.d_model * ((double)head.sigma * (1.0 - 0x1p-23) - certified);
  if (less <= 0.0) return;
  head.sigma = certified, head.certain = above(head.certain - less), head.rounded = above(head.rounded - less);
  head.descale = covering(head.rounded, s.eta * 448.0);
  bounds[blockIdx.x] = head;
}
