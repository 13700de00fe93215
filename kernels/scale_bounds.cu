// Certified largest eigenvalues of the small matrices that a logit bound is made of (include/scale_jobs.cuh), one block a
// job, for any architecture and d_head.
#include "scale_jobs.cuh"
#include "scale_spectrum.cuh"

using namespace spectrum;

// This thread's values of a head's Gram: the sum of its parts, in order.
__device__ __forceinline__ void load_gram(Values (&s)[EACH], const Unit (&units)[EACH], const float* partials, const HeadGram& head) {
  const u32 g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (u32 e = 0; e < EACH; e++) {
#pragma unroll
    for (u32 i = 0; i < 32; i++) s[e].v[i / 16][i / 4 % 4][i % 4] = 0.f;
    const Unit u = units[e];
    if (u.weight() == 0.f) continue;
    const u32 bi = u.row / 64, bj = u.column / 64, block = bi * GRAM_SIDE - bi * (bi - 1) / 2 + bj - bi;
    const float* from = partials + ((size_t)head.first * GRAM_BLOCKS + block) * 4096 + (u.row % 64 + g) * 64 + u.column % 64 + 2 * t;
#pragma unroll 1
    for (u32 part = 0; part < head.count; part++, from += (size_t)head.stride * GRAM_BLOCKS * 4096) {
#pragma unroll
      for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 n = 0; n < 4; n++)
#pragma unroll
          for (u32 h = 0; h < 2; h++) {
            const float2 v = __ldg((const float2*)(from + (16 * m + 8 * h) * 64 + 8 * n));
            s[e].v[m][n][2 * h] += v.x, s[e].v[m][n][2 * h + 1] += v.y;
          }
    }
  }
}

// About 100 registers a thread, where a block leaves room for several.
constexpr u32 SHARING = N > 160 ? 1 : 65536 / 100 / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, SHARING)
    scale_bounds(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                 double* lambdas, u64* leans, u32* status) {
  extern __shared__ u8 x[];
  // Zeros behind the end, where units that do not exist look.
  __shared__ __align__(16) float factor[SIDE + 32], sum[SIDE + 32];
  __shared__ float4 scratch[3][WARPS];
  __shared__ u32 longest;
  if (threadIdx.x == 0) longest = 0;
  __syncthreads();
  const Job job = jobs[blockIdx.x];
  if (shape.asked && !worthwhile(leans, job.kind, job.result, shape)) {
    if (threadIdx.x == 0) lambdas[job.result] = unasked();
    return;
  }
  const bool leans_on = leans && job.scaled(), mean = shape.mean && job.scaled();
  Unit units[EACH];
#pragma unroll
  for (u32 e = 0; e < EACH; e++) units[e] = unit(e);
  Values s[EACH];
  const HeadGram of_q = heads[job.q], of_k = heads[job.k];
  load_gram(s, units, partials, job.of_q() ? of_q : of_k);
  if (threadIdx.x < 32) factor[SIDE + threadIdx.x] = sum[SIDE + threadIdx.x] = 0.f;
  Totals totals = {0.f, 0.f, 0.f, 0.f};
  for (u32 i = threadIdx.x; i < SIDE; i += THREADS) {
    Channel own = {};
    if (i < N) own = channel_of(i, known_of(i, job, of_q, of_k, stats, shape), job, shape);
    factor[i] = own.factor, sum[i] = own.sum;
    totals.trace += own.trace, totals.raw += own.raw, totals.lost += own.lost, totals.mean += own.mean;
    atomicMax(&longest, __float_as_uint(own.longest));  // not negative, so that their bits are in order
  }
  {
    const float3 a = block_sums({totals.trace, totals.raw, totals.lost}, scratch[0]);
    const float3 b = block_sums({totals.mean, 0.f, 0.f}, scratch[1]);
    totals = {a.x, a.y, a.z, b.x};
  }
  const float added = totals.added(shape), trace = totals.trace + N * added;
  float result = trace == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  Lean lean = {result, result};
  if (trace > 0.f && trace < 3e38f) {
    const float unit = 1.f / trace, per = mean ? 1.f / shape.d_model : 0.f;
    const u32 g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      // Rows beyond the head hold anything.
      if (N % 64) each(s[e], units[e], [&](float& v, u32 i, u32 j) { v = i < N && j < N ? v : 0.f; });
#pragma unroll
      for (u32 n = 0; n < 4; n++) {
        const u32 j = units[e].column + 8 * n + 2 * c;
        const float2 right = *(const float2*)(factor + j), mean_right = *(const float2*)(sum + j);
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
          for (u32 h = 0; h < 2; h++) {
            const u32 i = units[e].row + 16 * m + 8 * h + g;
            const float left = factor[i] * unit;
            float &low = s[e].v[m][n][2 * h], &high = s[e].v[m][n][2 * h + 1];
            if (mean) {
              const float mean_left = sum[i] * per;
              low -= mean_left * mean_right.x, high -= mean_left * mean_right.y;
            }
            low *= left * right.x, high *= left * right.y;
          }
      }
      diagonal(s[e], units[e], [&](float& v, u32 i, bool on) { v += on && i < N ? added * unit : 0.f; });
    }
    const float top = largest(s, units, x, OPEN);
    if (leans_on) {
      float3 sums = {0.f, 0.f, 0.f};
#pragma unroll
      for (u32 e = 0; e < EACH; e++)
        diagonal(s[e], units[e], [&](float& x, u32 i, bool on) {
          if (on && i < N) sums.x += slope_of(x, factor[i], i, shape), sums.y += x;
        });
      sums = block_sums(sums, scratch[2]);
      lean.slope = sums.x * inverse(sums.y);
    }
    result = top == 0.f ? 0.f : exact_lambda(__fmul_ru(top, trace), totals, shape);
    if (result == 0.f) lean = {0.f, 0.f};
    else lean.room = room_of(result, __uint_as_float(longest));
  }
  if (threadIdx.x) return;
  if (leans_on) put_lean(leans, job, shape, lean.slope, lean.room);
  put_lambda(lambdas + job.result, result, status);
}
