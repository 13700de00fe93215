// Power iterations over W_Q and W_K of every layer, G = W^T W never formed. Weights of any type and stride, any architecture.
//   of each head   z = G_Q y, y <- G_K z, W with the norm's gain and without its mean, or raw
//   of the sum     u = M v / ||M v||, v = M^T u, kept as y = W_K^T v, M = sum over the heads of W_Q W_K^T, raw (the paper's)
//
// `scale_power` multiplies a head's weights over a range of the model dimension, 64 inputs at a time. These stay in registers
// for both products: u = W y is complete for them, so W^T u starts there, and a step of each head reads every weight once. The
// sum's u needs every head, so its products are launches of their own. `scale_power_heads` and `scale_power_sum` add up what the
// blocks leave and finish the vectors. The mean of a LayerNorm is a term of rank one: G - s s^T / d with s = W^T g.
//
// sigma = sqrt((z . G_K z) / (y . z)) is ||M^T u|| for the unit u = M v / ||M v||, y = W_K^T v: never above the norm of M. A vector that
// is mapped to zero, or to what is not a number, stays as it is. Sums run in a fixed order: same input, same bits.
#include "common/warp.cuh"
#include "scale/types.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
#ifndef WEIGHTS  // type, where rows start at 16 bytes
#define WEIGHTS 0
#endif
#ifndef ROWS  // 1: stored [out, in] in such rows, d_model a multiple of 8
#define ROWS 1
#endif
#ifndef MEAN  // 1: the norm takes a mean off
#define MEAN 0
#endif

enum : u32 { BOTH = 0, TO_INPUTS = 1, TO_CHANNELS = 2 };

struct Pass {
  u32 n_q, n_kv, d_model;
  u32 ranges;
  u32 of_k;      // 0: W_Q, 1: W_K
  u32 products;  // BOTH, or one of the two
  u32 summed;
  u32 raw;       // 1: neither gain nor mean
  u32 pad[4];
};
static_assert(sizeof(Pass) == 48, "host mirror");

// A layer's projections, and where its estimates and its vectors begin.
struct PowerLayer {
  u32 q, k, sigma, vector;
};
static_assert(sizeof(PowerLayer) == 16, "host mirror");

constexpr u32 N = D_HEAD, TILE = 64, RANGE = 1024;
// Of the products: `LANES` channels by 8 times 8 inputs.
constexpr u32 THREADS = N > 128 ? 256 : 128, LANES = THREADS / 8, ROUNDS = (N + LANES - 1) / LANES;

__device__ __forceinline__ const Projection& projection(const Projection* projections, const PowerLayer& l, const Pass& s) {
  return projections[s.of_k ? l.k : l.q];
}
// Parts of a head's vector over a range, [z, s][N].
__device__ __forceinline__ size_t part_at(const Pass& s, u32 heads, u32 layer, u32 head, u32 range) {
  return (((size_t)layer * heads + head) * s.ranges + range) * 2 * N;
}
__device__ __forceinline__ double block_sum(double v, double* scratch) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.0;
  for (u32 w = 0; w < blockDim.x / 32; w++) v += scratch[w];
  return v;
}

// Eight inputs of a thread's channels.
struct Weights {
  Vector8<WEIGHTS> rows[ROUNDS];
  float loose[ROWS ? 1 : ROUNDS][8];  // where rows are not vectors

  __device__ __forceinline__ void load(const Projection& p, u32 first, u32 row, u32 k, u32 end) {
#pragma unroll
    for (u32 j = 0; j < ROUNDS; j++) {
      const i64 at = p.row_stride * (i64)(first + j * LANES + row);
      if (ROWS && j * LANES + row < N && k < end) rows[j].load((const void*)p.weight, at + k);
      if (!ROWS)
#pragma unroll
        for (u32 i = 0; i < 8; i++)
          loose[j][i] = j * LANES + row < N && k + i < end ? load_value(p.weight, p.dtype, at + p.col_stride * (i64)(k + i)) : 0.f;
    }
  }
  __device__ __forceinline__ void get(float (&w)[ROUNDS][8]) const {
#pragma unroll
    for (u32 j = 0; j < ROUNDS; j++) {
      if (ROWS) rows[j].get(w[j]);
      if (!ROWS)
#pragma unroll
        for (u32 i = 0; i < 8; i++) w[j][i] = loose[j][i];
    }
  }
};

// Blocks (range, head, layer). A thread has channels `row` + `LANES` j and eight inputs of each tile, and asks for the next
// tile's before it multiplies.
extern "C" __global__ void __launch_bounds__(THREADS, N > 128 ? 1 : ROWS && WEIGHTS != DTYPE_F32 && __CUDA_ARCH__ >= 900 ? 3 : 2)
    scale_power(const PowerLayer* layers, const Projection* projections, Pass s, const float* vectors, const float* inputs, float* parts) {
  __shared__ float by_row[LANES][TILE + 8];
  __shared__ float2 of_input[TILE];  // u with the gain on both sides, and the gain
  const u32 head = blockIdx.y, heads = gridDim.y, layer = blockIdx.z, t = threadIdx.x;
  const PowerLayer& l = layers[layer];
  const Projection p = projection(projections, l, s);
  const u32 first_row = head / (heads * N / p.rows) * N, vector = head / (heads / (s.summed ? s.n_kv : s.n_q));
  // Neighbours in memory to neighbours in the warp.
  const bool along_channels = p.row_stride < p.col_stride;
  const u32 row = along_channels ? t % LANES : t / 8, eight = along_channels ? t / LANES : t % 8;
  float y[ROUNDS], z[ROUNDS] = {}, sum[ROUNDS] = {};
#pragma unroll
  for (u32 j = 0; j < ROUNDS; j++)
    y[j] = s.products != TO_CHANNELS && j * LANES + row < N ? vectors[l.vector + vector * N + j * LANES + row] : 0.f;
  const u32 begin = blockIdx.x * RANGE, end = min(s.d_model, begin + RANGE);
  Weights ahead = {};
  ahead.load(p, first_row, row, begin + eight * 8, end);
  for (u32 first = begin; first < end; first += TILE) {
    const u32 k = first + eight * 8;
    float w[ROUNDS][8], u[8] = {};
    ahead.get(w);
    ahead.load(p, first_row, row, k + TILE, end);
#pragma unroll
    for (u32 j = 0; j < ROUNDS; j++)
#pragma unroll
      for (u32 i = 0; i < 8; i++) u[i] += w[j][i] * y[j];
    float4* to = (float4*)&by_row[row][eight * 8];
    to[0] = make_float4(u[0], u[1], u[2], u[3]), to[1] = make_float4(u[4], u[5], u[6], u[7]);
    __syncthreads();
    {
      constexpr u32 EACH = THREADS / TILE;  // threads of an input
      const u32 i = t / EACH, input = first + i;
      float all = 0.f;
#pragma unroll
      for (u32 q = t % EACH; q < LANES; q += EACH) all += by_row[q][i];
#pragma unroll
      for (u32 lane = 1; lane < EACH; lane *= 2) all += __shfl_xor_sync(0xffffffffu, all, lane);
      if (t % EACH == 0 && input < end) {
        const float gain = s.raw || !p.gain ? 1.f : load_value(p.gain, p.vector_dtype, input) + p.gain_offset;
        if (s.products == TO_INPUTS) parts[((size_t)layer * heads + head) * s.d_model + input] = all;
        of_input[i] = make_float2(s.products == TO_CHANNELS ? inputs[(size_t)layer * s.d_model + input] : all * gain * gain, gain);
      }
    }
    __syncthreads();
    if (s.products == TO_INPUTS) continue;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      const float2 x = k + i < end ? of_input[eight * 8 + i] : make_float2(0.f, 0.f);
#pragma unroll
      for (u32 j = 0; j < ROUNDS; j++) {
        z[j] += w[j][i] * x.x;
        if (MEAN) sum[j] += w[j][i] * x.y;
      }
    }
  }
  if (s.products == TO_INPUTS) return;
  float* part = parts + part_at(s, heads, layer, head, blockIdx.x);
#pragma unroll
  for (u32 j = 0; j < ROUNDS; j++) {
    by_row[row][eight] = z[j], by_row[row][8 + eight] = sum[j];
    __syncthreads();
    const u32 c = j * LANES + t % LANES, which = t / LANES;
    if (which < 2 && c < N) {
      float all = 0.f;
#pragma unroll
      for (u32 e = 0; e < 8; e++) all += by_row[t % LANES][which * 8 + e];
      part[which * N + c] = all;
    }
    __syncthreads();
  }
}

// Each head: z, or y and sigma. A block per head, a thread per channel. `scales`: ||z||^2 / (y . z).
extern "C" __global__ void __launch_bounds__(256)
    scale_power_heads(const PowerLayer* layers, const Projection* projections, Pass s, const float* from, float* to, const float* parts,
                      double* scales, float* sigma) {
  __shared__ double scratch[8];
  const u32 head = blockIdx.x, layer = blockIdx.y, c = threadIdx.x;
  const PowerLayer& l = layers[layer];
  const size_t at = l.vector + head * N + c;
  double value = 0.0, sum = 0.0;
  if (c < N)
    for (u32 range = 0; range < s.ranges; range++) {
      const float* part = parts + part_at(s, s.n_q, layer, head, range);
      value += part[c], sum += part[N + c];
    }
  const double x = c < N ? from[at] : 0.f;
  if (MEAN && !s.raw) value -= block_sum(sum * x, scratch) / s.d_model * sum;
  const double length = sqrt(block_sum(value * value, scratch)), along = block_sum(value * x, scratch);
  double& scale = scales[l.sigma + head];
  const bool moves = length > 0.0 && length < 1e300;
  if (c < N && (moves || !s.of_k)) to[at] = (float)(length == 0.0 ? 0.0 : value / length);
  if (c) return;
  // Rounding may leave a product that is zero below it; what is not a number stays so.
  if (s.of_k) sigma[l.sigma + head] = along <= 0.0 ? 0.f : (float)sqrt(scale * along);
  else scale = along <= 0.0 ? 0.0 : length * length / along;
}

// The sum: behind TO_INPUTS u or v, normalised, and with v sigma; behind TO_CHANNELS the channels, those of q summed over their
// group. A block per layer.
extern "C" __global__ void __launch_bounds__(1024)
    scale_power_sum(const PowerLayer* layers, Pass s, float* to, float* inputs, const float* parts, float* sigma) {
  __shared__ double scratch[32];
  const u32 layer = blockIdx.x, heads = s.of_k ? s.n_kv : s.n_q, group = heads / s.n_kv;
  const PowerLayer& l = layers[layer];
  inputs += (size_t)layer * s.d_model;
  if (s.products == TO_CHANNELS) {
    const float norm = sigma[l.sigma];
    if (s.of_k && !(norm > 0.f && norm < 3e38f)) return;
    for (u32 i = threadIdx.x; i < s.n_kv * N; i += 1024) {
      float all = 0.f;
      for (u32 g = 0; g < group; g++)
        for (u32 range = 0; range < s.ranges; range++) all += parts[part_at(s, heads, layer, i / N * group + g, range) + i % N];
      to[l.vector + i] = all;
    }
    return;
  }
  double square = 0.0;
  for (u32 i = threadIdx.x; i < s.d_model; i += 1024) {
    float all = 0.f;
#pragma unroll 4
    for (u32 head = 0; head < heads; head++) all += parts[((size_t)layer * heads + head) * s.d_model + i];
    inputs[i] = all, square += (double)all * all;
  }
  const double norm = sqrt(block_sum(square, scratch)), factor = norm > 0.0 ? 1.0 / norm : 0.0;
  for (u32 i = threadIdx.x; i < s.d_model; i += 1024) inputs[i] = (float)(inputs[i] * factor);
  if (s.of_k && threadIdx.x == 0) sigma[l.sigma] = (float)norm;
}
