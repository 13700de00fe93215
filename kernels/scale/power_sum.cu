// The paper's iteration on a whole layer, M = sum over the heads of W_Q W_K^T, on raw weights: u = M v, v = M^T u, kept as
// y = W_K^T v. Four matrix-vector products a step, each one read of a projection, all layers at once: u needs every head, so
// W_Q y must be complete before W_Q^T u begins. Grouped heads are neither expanded nor copied: y is repeated and summed as a
// vector. Between the products one block a layer sums parts in order, normalises, and lays out the next vector.
//
// sigma = ||M^T u|| of the unit u, never above ||M||. A vector that is mapped to zero stays as it is.
//
// BF16, F16, F32 (macro WEIGHTS) in rows of 16 bytes, [out, in] or [in, out]. Any architecture.
#include "scale/types.cuh"

#ifndef WEIGHTS
#define WEIGHTS 0
#endif

struct SumShape {
  u32 n_q, n_kv, d_head, d_model;
  u32 along;  // 1: stored [in, out]
  u32 outer;  // rows of memory of the projection at hand
  u32 inner;  // values of a row
  u32 of_k;   // 0: W_Q, 1: W_K
  u32 widest; // values kept of a vector
  u32 stage;  // of scale_sum_next
  u32 pad[2];
};
static_assert(sizeof(SumShape) == 48, "host mirror");

// One layer: its projections, and where its estimate and its y begin.
struct SumLayer {
  u32 q, k, sigma, vector;
};
static_assert(sizeof(SumLayer) == 16, "host mirror");

constexpr u32 ROWS = 128, WIDTH = 1024;  // of a block of scale_sum_across

__device__ __forceinline__ const Projection& projection(const Projection* projections, const SumLayer* layers, const SumShape& s, u32 layer) {
  return projections[s.of_k ? layers[layer].k : layers[layer].q];
}
__device__ __forceinline__ i64 outer_stride(const Projection& p, const SumShape& s) { return s.along ? p.col_stride : p.row_stride; }
__device__ __forceinline__ const void* row_of(const Projection& p, i64 values) {
  return (const u8*)p.weight + values * (WEIGHTS == DTYPE_F32 ? 4 : 2);
}

// out[row] = the row times x, over its contiguous values. A warp four rows.
extern "C" __global__ void __launch_bounds__(256)
    scale_sum_along(const Projection* projections, const SumLayer* layers, SumShape s, const float* x, float* out, u32) {
  const u32 layer = blockIdx.y, lane = threadIdx.x & 31, first = (blockIdx.x * 8 + (threadIdx.x >> 5)) * 4;
  if (first >= s.outer) return;
  const Projection& p = projection(projections, layers, s, layer);
  const i64 stride = outer_stride(p, s);
  x += (size_t)layer * s.widest;
  float sum[4] = {};
#pragma unroll 2
  for (u32 k = lane * 8; k < s.inner; k += 256) {
    Vector8<WEIGHTS> w[4];
#pragma unroll
    for (u32 r = 0; r < 4; r++) w[r].load(row_of(p, stride * min(first + r, s.outer - 1)), k);
    const float4 a = *(const float4*)(x + k), b = *(const float4*)(x + k + 4);
    const float y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
      float v[8];
      w[r].get(v);
#pragma unroll
      for (u32 i = 0; i < 8; i++) sum[r] += v[i] * y[i];
    }
  }
#pragma unroll
  for (u32 r = 0; r < 4; r++) {
#pragma unroll
    for (int step = 16; step; step >>= 1) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
    if (lane == 0 && first + r < s.outer) out[(size_t)layer * s.widest + first + r] = sum[r];
  }
}

// parts[range of rows][k] = the sum of x[row] times the row, over 128 rows. A thread eight neighbouring values.
extern "C" __global__ void __launch_bounds__(WIDTH / 8)
    scale_sum_across(const Projection* projections, const SumLayer* layers, SumShape s, const float* x, float* parts, u32 ranges) {
  const u32 layer = blockIdx.z, first = blockIdx.y * ROWS, k = blockIdx.x * WIDTH + threadIdx.x * 8;
  if (k >= s.inner) return;
  const Projection& p = projection(projections, layers, s, layer);
  const i64 stride = outer_stride(p, s);
  const u32 last = min(first + ROWS, s.outer);
  x += (size_t)layer * s.widest;
  float sum[8] = {};
#pragma unroll 8
  for (u32 row = first; row < last; row++) {
    Vector8<WEIGHTS> w;
    float v[8];
    w.load(row_of(p, stride * row), k);
    w.get(v);
    const float y = __ldg(x + row);
#pragma unroll
    for (u32 i = 0; i < 8; i++) sum[i] += v[i] * y;
  }
  float4* to = (float4*)(parts + ((size_t)layer * ranges + blockIdx.y) * s.widest + k);
  to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

// Between two products: `parts` (ranges of them) to the next x. A block a layer.
// stage 0: y repeated over its group. 1: u, normalised. 2: summed over the group. 3: v, normalised, and sigma. 4: y, then 0.
extern "C" __global__ void __launch_bounds__(1024)
    scale_sum_next(const SumLayer* layers, SumShape s, const float* parts, u32 ranges, float* x, float* y, float* sigma) {
  __shared__ double squares[32];
  const u32 layer = blockIdx.x, keys = s.n_kv * s.d_head, group = s.n_q / s.n_kv;
  parts += (size_t)layer * ranges * s.widest, x += (size_t)layer * s.widest, y += layers[layer].vector, sigma += layers[layer].sigma;
  auto total = [&](u32 i) {
    float sum = 0.f;
#pragma unroll 4
    for (u32 range = 0; range < ranges; range++) sum += parts[(size_t)range * s.widest + i];
    return sum;
  };
  auto repeat = [&] {
    for (u32 i = threadIdx.x; i < s.n_q * s.d_head; i += 1024) x[i] = y[i / s.d_head / group * s.d_head + i % s.d_head];
  };
  if (s.stage == 0) {
    repeat();
  } else if (s.stage == 2) {
    for (u32 i = threadIdx.x; i < keys; i += 1024) {
      float sum = 0.f;
      for (u32 g = 0; g < group; g++) sum += total((i / s.d_head * group + g) * s.d_head + i % s.d_head);
      x[i] = sum;
    }
  } else if (s.stage == 4) {
    const float norm = *sigma;
    if (norm > 0.f && norm < __uint_as_float(0x7f800000u))
      for (u32 i = threadIdx.x; i < keys; i += 1024) y[i] = total(i);
    __syncthreads();
    repeat();
  } else {
    double square = 0.;
    for (u32 i = threadIdx.x; i < s.d_model; i += 1024) {
      const float value = total(i);
      x[i] = value, square += (double)value * value;
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
    if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = square;
    __syncthreads();
    double all = 0.;
    for (u32 w = 0; w < 32; w++) all += squares[w];
    const double norm = sqrt(all), factor = norm > 0. ? 1. / norm : 0.;
    for (u32 i = threadIdx.x; i < s.d_model; i += 1024) x[i] = (float)(x[i] * factor);
    if (s.stage == 3 && threadIdx.x == 0) *sigma = (float)norm;
  }
}
