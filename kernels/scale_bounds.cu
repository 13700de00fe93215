// Certified largest eigenvalues of the small matrices that a logit bound is made of. One block a job:
//   RAW_Q, RAW_K     G as it is (mean kept): sigma_Q^2, sigma_K^2
//   SCALED_Q, _K     T^1/2 G_Q T^1/2 and T^-1/2 G_K T^-1/2, t_b = sqrt(tr G_K,bb / tr G_Q,bb) (rotation)
//   PRODUCT          H = L^T (G_Q + e I) L with L L^T = G_K + e I (no rotation)
// G + e I stands for G, e = c 2^-24 tr G (mean kept) covering every rounding of its sums; G and e are those of the scaled
// channels, since an entry errs by c 2^-24 ||w_i|| ||w_j|| at most. A product is the same whatever its channels are scaled by, so
// q and k are balanced by powers of two first, and heads whose large channels meet small ones keep their digits. What rounding took from channel i
// before, delta_i, enters by sigma(exact) <= sigma(rounded) + (sum delta_i^2)^1/2, or for a product by
// G <= (1 + t)(G_rounded + (sum delta_i^2 / t) I). Sums s_i over the model dimension are those of exact channels; that
// moves G - s s^T/d by at most (2 ||s|| + sqrt(d) delta) delta / sqrt(d). An all-zero matrix gives 0, NaN gives NaN.
#include "scale_spectrum.cuh"

using namespace spectrum;

// What a certificate may leave open, of lambda. Norms as they are too: their product is sigma where it is the smaller one.
constexpr float OPEN = 0.004f;

enum : u32 { RAW_Q = 0, RAW_K = 1, SCALED_Q = 2, SCALED_K = 3 };

struct HeadGram {
  u32 first, stride, count, stat_row;
};
struct Job {
  u32 kind;
  u32 q, k;    // heads in the Gram table; RAW jobs use the one they name
  u32 result;  // where lambda goes
};
struct Shape {
  u32 rotary, interleaved, mean, d_model;  // mean: 1 if the norm removes it
  float rope_factor;
  float rounding;                          // c
};
static_assert(sizeof(HeadGram) == 16 && sizeof(Job) == 16 && sizeof(Shape) == 24, "host mirror");

constexpr u32 GRAM_SIDE = (N + 63) / 64, GRAM_BLOCKS = GRAM_SIDE * (GRAM_SIDE + 1) / 2;

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

__device__ __forceinline__ u32 partner(u32 i, const Shape& s) {
  if (i >= s.rotary) return i;
  return s.interleaved ? i ^ 1 : (i < s.rotary / 2 ? i + s.rotary / 2 : i - s.rotary / 2);
}

// About 100 registers a thread, where a block leaves room for several.
constexpr u32 SHARING = N > 160 ? 1 : 65536 / 100 / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, SHARING)
    scale_bounds(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                 double* lambdas, u32* status) {
  extern __shared__ u8 x[];
  // Zeros behind the end, where units that do not exist look.
  __shared__ __align__(16) float factor[SIDE + 32], sum[SIDE + 32];
  __shared__ float norm_q[SIDE], norm_k[SIDE];
  __shared__ float4 scratch[2][WARPS];
  const Job job = jobs[blockIdx.x];
  const bool of_q = job.kind == RAW_Q || job.kind == SCALED_Q, scaled = job.kind >= SCALED_Q, mean = shape.mean && scaled;
  const HeadGram head = heads[of_q ? job.q : job.k];
  Unit units[EACH];
#pragma unroll
  for (u32 e = 0; e < EACH; e++) units[e] = unit(e);
  Values s[EACH];
  load_gram(s, units, partials, head);
  const ChannelStats* own = stats + head.stat_row;
  for (u32 i = threadIdx.x; i < SIDE; i += THREADS) {
    sum[i] = i < N && mean ? own[i].sum : 0.f;
    if (scaled && i < N) norm_q[i] = stats[heads[job.q].stat_row + i].norm2, norm_k[i] = stats[heads[job.k].stat_row + i].norm2;
  }
  if (threadIdx.x < 32) factor[SIDE + threadIdx.x] = sum[SIDE + threadIdx.x] = 0.f;
  __syncthreads();
  // Diagonal scaling, in powers that cancel between q and k.
  float3 sums = {0.f, 0.f, 0.f};  // trace, delta^2, ||s||^2, scaled
  float raw = 0.f;                // trace, scaled, mean kept
  for (u32 i = threadIdx.x; i < SIDE; i += THREADS) {
    float f = i >= N ? 0.f : i < shape.rotary ? shape.rope_factor : 1.f;
    if (scaled && i < N) {
      const u32 other = partner(i, shape);
      float tq = norm_q[i], tk = norm_k[i];
      if (other != i) tq += norm_q[other], tk += norm_k[other];
      const float fourth = tq > 0.f && tk > 0.f ? sqrtf(sqrtf(tk / tq)) : 1.f;  // t^1/2 = (tr k / tr q)^1/4
      f *= of_q ? fourth : 1.f / fourth;
    }
    factor[i] = f;
    if (i < N) {
      raw += f * f * own[i].raw2;
      if (scaled) sums.x += f * f * own[i].norm2;
      sums.y += f * f * own[i].rounding, sums.z += f * f * sum[i] * sum[i];
    }
  }
  sums = block_sums(sums, scratch[0]);
  raw = block_sums({raw, 0.f, 0.f}, scratch[1]).x;
  const float added = shape.rounding * 0x1p-24f * raw, trace = (scaled ? sums.x : raw) + N * added;
  double result = 0.0;
  if (!(trace > 0.f && trace < 3e38f)) {
    result = trace == 0.f ? 0.0 : __longlong_as_double(0x7ff8000000000000ll);
  } else {
    const float inverse = 1.f / trace, per = mean ? 1.f / shape.d_model : 0.f;
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
            const float left = factor[i] * inverse;
            float &low = s[e].v[m][n][2 * h], &high = s[e].v[m][n][2 * h + 1];
            if (mean) {
              const float mean_left = sum[i] * per;
              low -= mean_left * mean_right.x, high -= mean_left * mean_right.y;
            }
            low *= left * right.x, high *= left * right.y;
          }
      }
      diagonal(s[e], units[e], [&](float& v, u32 i, bool on) { v += on && i < N ? added * inverse : 0.f; });
    }
    const float top = largest(s, units, x, OPEN);
    if (threadIdx.x) return;
    const double lambda = (double)top * trace * (1.0 + 0x1p-19);
    const double delta = sqrt((double)sums.y), moved = delta / sqrt((double)shape.d_model);
    const double sigma = sqrt(lambda + (mean ? (2.0 * sqrt((double)sums.z) + delta) * moved : 0.0)) + delta;
    result = sigma * sigma;
  }
  if (threadIdx.x == 0) {
    lambdas[job.result] = result;
    if (!(result < 1e300)) atomicOr(status, STATUS_NON_FINITE_BOUND);
  }
}

#if D_HEAD <= 128
// sigma^2 of W_Q W_K^T, and the quadratic forms of the constants: aux = (c_k^T G_Q c_k, c_q^T G_K c_q). In f32: the factor
// and the products are within 2 (N + 2) 2^-24 ||L||_F^2 ||G_Q||_F, which is added.
constexpr u32 ROW = SIDE + 4;  // f32 values

// A power of two near (other/own)^1/4; the same of both sides cancel.
__device__ __forceinline__ float balanced(float own, float other) {
  if (!(own > 0.f && other > 0.f)) return 1.f;
  const int ratio = (int)(__float_as_uint(other) >> 23) - (int)(__float_as_uint(own) >> 23);
  const int power = ratio >= 0 ? (ratio + 2) / 4 : -((2 - ratio) / 4);
  return __uint_as_float((u32)(127 + max(-24, min(24, power))) << 23);
}

// acc += A^T B over rows `from` to SIDE of A (columns at `row`) and B (columns at `column`); a lane has 8 x 4 values. `limit`:
// 1 where A, 2 where B is lower triangular and its other half is something else.
template <int LIMIT>
__device__ __forceinline__ void outer(float (&acc)[8][4], const float* a, const float* b, u32 row, u32 column, u32 from) {
  const u32 lane = threadIdx.x & 31, r = row + lane / 8 * 8, c = column + lane % 8 * 4;
#pragma unroll 1
  for (u32 k = from; k < SIDE; k++) {
    const float4 a0 = *(const float4*)(a + k * ROW + r), a1 = *(const float4*)(a + k * ROW + r + 4);
    const float4 b0 = *(const float4*)(b + k * ROW + c);
    float left[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w}, right[4] = {b0.x, b0.y, b0.z, b0.w};
    if (k < from + 32) {
#pragma unroll
      for (u32 i = 0; i < 8; i++) left[i] = LIMIT == 1 && k < r + i ? 0.f : left[i];
#pragma unroll
      for (u32 j = 0; j < 4; j++) right[j] = LIMIT == 2 && k < c + j ? 0.f : right[j];
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) acc[i][j] += left[i] * right[j];
  }
}
__device__ __forceinline__ void put(float* to, const float (&acc)[8][4], u32 row, u32 column) {
  const u32 lane = threadIdx.x & 31, r = row + lane / 8 * 8, c = column + lane % 8 * 4;
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    *(float4*)(to + (r + i) * ROW + c) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 65536 / 192 / THREADS)
    scale_products(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                   double* lambdas, double2* aux, u32* status) {
  extern __shared__ float memory[];
  __shared__ float4 scratch[2][WARPS];
  __shared__ float own_sum[SIDE], constant_q[SIDE], constant_k[SIDE], balance[SIDE];
  __shared__ int failed;
  const Job job = jobs[blockIdx.x];
  const HeadGram q = heads[job.q], k = heads[job.k];
  float* l = memory;               // G_K + e I; its factor below the diagonal, transposed above
  float* g = l + SIDE * ROW;       // G_Q + e I, then H
  float* t = g + SIDE * ROW;       // G_Q L, then the matrices that are squared
  const float per = shape.mean ? 1.f / shape.d_model : 0.f;
  float3 sums = {0.f, 0.f, 0.f}, lost = {0.f, 0.f, 0.f}, means = {0.f, 0.f, 0.f};
  Unit units[EACH];
#pragma unroll
  for (u32 e = 0; e < EACH; e++) units[e] = unit(e);
  Values s[EACH];
  // (sum |c_i| ||w_i||, sum |c_i| delta_i, s . c) of the forms of q and of k: what their roundings are measured by.
  float3 of_q = {0.f, 0.f, 0.f}, of_k = {0.f, 0.f, 0.f};
#pragma unroll 1
  for (u32 which = 0; which < 2; which++) {
    float* to = which ? l : g;
    const ChannelStats *own = stats + (which ? k : q).stat_row, *other = stats + (which ? q : k).stat_row;
    load_gram(s, units, partials, which ? k : q);
    float3 form = {0.f, 0.f, 0.f};
    for (u32 i = threadIdx.x; i < SIDE; i += THREADS) {
      const float f = i < N ? balanced(own[i].norm2, other[i].norm2) : 1.f;
      balance[i] = f;
      own_sum[i] = i < N ? own[i].sum * f : 0.f;
      // The other's constants meet this Gram.
      const float c = i < N ? other[i].constant / f : 0.f;
      (which ? constant_q : constant_k)[i] = c;
      const float raw = i < N ? own[i].raw2 * f * f : 0.f, gone = i < N ? own[i].rounding * f * f : 0.f, s2 = own_sum[i] * own_sum[i];
      form.x += fabsf(c) * sqrtf(raw), form.y += fabsf(c) * sqrtf(gone), form.z += c * own_sum[i];
      sums.x += which ? 0.f : raw, sums.y += which ? raw : 0.f;
      lost.x += which ? 0.f : gone, lost.y += which ? gone : 0.f;
      means.x += which ? 0.f : s2, means.y += which ? s2 : 0.f;
    }
    if (which) of_k = form;
    else of_q = form;
    __syncthreads();
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      const Unit u = units[e];
      if (u.weight() == 0.f) continue;
      each(s[e], u, [&](float& v, u32 i, u32 j) {
        const float value = i < N && j < N ? v * balance[i] * balance[j] - own_sum[i] * own_sum[j] * per : 0.f;
        to[i * ROW + j] = value;
        if (u.weight() == 2.f) to[j * ROW + i] = value;
        sums.z += which ? 0.f : u.weight() * value * value;
        lost.z += which ? u.weight() * value * value : 0.f;
      });
    }
    __syncthreads();
  }
  sums = block_sums(sums, scratch[0]);
  lost = block_sums(lost, scratch[1]);
  __syncthreads();
  means = block_sums(means, scratch[0]);
  __syncthreads();
  const float u24 = 0x1p-24f;
  // t near delta / sigma, with sigma^2 taken as ||G||_F^2 / tr G: any t holds.
  auto loosen = [](float delta2, float trace, float squares) {
    return delta2 > 0.f && squares > 0.f ? fminf(sqrtf(delta2 * trace / squares), 0.5f) : 0.f;
  };
  const float t_q = loosen(lost.x, sums.x, sums.z), t_k = loosen(lost.y, sums.y, lost.z);
  auto added = [&](float c, float trace, float delta2, float mean2, float t) {
    const float delta = sqrtf(delta2), moved = shape.mean ? (2.f * sqrtf(mean2) + delta) * delta * rsqrtf((float)shape.d_model) : 0.f;
    return ((c * u24 * trace + moved) + (delta2 > 0.f ? delta2 / t : 0.f)) * 1.0001f;
  };
  const float e_q = added(shape.rounding, sums.x, lost.x, means.x, t_q);
  const float e_k = added(shape.rounding + N + 12, sums.y, lost.y, means.y, t_k);
  // ||W c||^2 for the other's constants c: the form, its rounding, and what the operands lost before.
  float3 forms = {0.f, 0.f, 0.f};
#pragma unroll 4
  for (u32 i = threadIdx.x; i < SIDE * SIDE; i += THREADS) {
    const u32 row = i / SIDE, column = i % SIDE;
    forms.x += constant_k[row] * constant_k[column] * g[row * ROW + column];
    forms.y += constant_q[row] * constant_q[column] * l[row * ROW + column];
  }
  forms = block_sums(forms, scratch[1]);
  of_q = block_sums(of_q, scratch[0]);
  of_k = block_sums(of_k, scratch[1]);
  const float more = 64.f + SIDE * SIDE / THREADS;
  auto form_above = [&](float form, const float3& of) {
    const double norm = of.x * 1.0001, delta = of.y * 1.0001;
    const double f = fmax((double)form, 0.0) + ((double)shape.rounding + more) * u24 * norm * norm;
    return f + 2.0 * delta * sqrt(f + (double)of.z * of.z * per * 1.0001) + delta * delta;
  };
  const double form_x = form_above(forms.x, of_q), form_y = form_above(forms.y, of_k);
  if (threadIdx.x == 0) aux[blockIdx.x] = make_double2(form_x, form_y);
  const double fallback = ((double)sums.x + (double)N * e_q) * ((double)sums.y + (double)N * e_k) * (1.0 + t_q) * (1.0 + t_k) * 1.0001;
  // Balanced, so that neither f32 nor f16 leaves its range: traces of 1.
  const float scale_q = 1.f / (sums.x + N * e_q), scale_k = 1.f / (sums.y + N * e_k);
  double result = fallback;
  bool fine = fallback > 0.0 && scale_q > 0.f && scale_k > 0.f && scale_q < 3e38f && scale_k < 3e38f;
  if (!fine) result = sums.x == 0.f || sums.y == 0.f ? 0.0 : __longlong_as_double(0x7ff8000000000000ll);
  if (fine) {
    if (threadIdx.x == 0) failed = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < SIDE * SIDE; i += THREADS) {
      const u32 row = i / SIDE, column = i % SIDE, at = row * ROW + column;
      const bool diagonal = row == column;
      g[at] = (g[at] + (diagonal ? e_q : 0.f)) * scale_q;
      l[at] = column < N || !diagonal ? (l[at] + (diagonal ? e_k : 0.f)) * scale_k : 1.f;
    }
    __syncthreads();
    // Cholesky on the upper half, U = L^T, four rows at a time. Every thread factors the 4 x 4 block for itself.
#pragma unroll 1
    for (u32 c = 0; c < SIDE; c += 4) {
      float block[4][4], inverse[4];
#pragma unroll
      for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = i; j < 4; j++) block[i][j] = l[(c + i) * ROW + c + j];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        if (threadIdx.x == 0 && !(block[i][i] > 0.f)) failed = 1;
        inverse[i] = 1.f / sqrtf(block[i][i]);
#pragma unroll
        for (u32 j = i; j < 4; j++) block[i][j] *= inverse[i];
#pragma unroll
        for (u32 k = i + 1; k < 4; k++)
#pragma unroll
          for (u32 j = k; j < 4; j++) block[k][j] -= block[i][k] * block[i][j];
      }
      __syncthreads();
      for (u32 j = c + threadIdx.x; j < SIDE; j += THREADS) {
        float column[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) column[i] = l[(c + i) * ROW + j];
        if (j >= c + 4)
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
            column[i] *= inverse[i];
#pragma unroll
            for (u32 k = i + 1; k < 4; k++) column[k] -= block[i][k] * column[i];
          }
        else
#pragma unroll
          for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (u32 k = i; k < 4; k++)
              if (j == c + k) column[i] = block[i][k];
#pragma unroll
        for (u32 i = 0; i < 4; i++) l[(c + i) * ROW + j] = column[i];
      }
      __syncthreads();
      const u32 lane = threadIdx.x & 31;
#pragma unroll 1
      for (u32 j = (c + 4) / 32 * 32 + lane; j < SIDE; j += 32) {
        float right[4];
#pragma unroll
        for (u32 q = 0; q < 4; q++) right[q] = l[(c + q) * ROW + j];
#pragma unroll 4
        for (u32 i = c + 4 + (threadIdx.x >> 5); i < SIDE; i += WARPS) {
          if (i > j - lane + 31) break;
          float v = l[i * ROW + j];
#pragma unroll
          for (u32 q = 0; q < 4; q++) v -= l[(c + q) * ROW + i] * right[q];
          if (j >= i) l[i * ROW + j] = v;
        }
      }
      __syncthreads();
    }
    fine = !failed;
  }
  if (fine) {
    float lengths = 0.f;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < SIDE * SIDE; i += THREADS) {
      const u32 row = i / SIDE, column = i % SIDE;
      if (column < row) continue;
      // Padding counts as nothing.
      const float v = column < N ? l[row * ROW + column] : 0.f;
      l[row * ROW + column] = l[column * ROW + row] = v;
      lengths += v * v;
    }
    lengths = block_sums({lengths, 0.f, 0.f}, scratch[1]).x;
#pragma unroll 1
    for (u32 index = threadIdx.x >> 5; index < BANDS * BANDS; index += WARPS) {
      const u32 row = index / BANDS * 32, column = index % BANDS * 32;
      float acc[8][4] = {};
      outer<2>(acc, g, l, row, column, column);
      put(t, acc, row, column);
    }
    __syncthreads();
    {
      float acc[8][4] = {};
      outer<1>(acc, l, t, units[0].row, units[0].column, units[0].row);
      put(g, acc, units[0].row, units[0].column);
    }
    __syncthreads();
    each(s[0], units[0], [&](float& v, u32 i, u32 j) { v = g[i * ROW + j]; });
    const float frobenius = sqrtf(sums.z) * 1.0001f * scale_q + N * e_q * scale_q;
    const double slack = 2.0 * (N + 2) * u24 * lengths * frobenius;
    const float top = largest(s, units, (u8*)t, 0.25f * OPEN);  // the factor has lost enough already
    if (threadIdx.x) return;
    result = (1.0 + t_q) * (1.0 + t_k) * ((double)top + slack) / scale_q / scale_k * (1.0 + 0x1p-19);
  }
  if (threadIdx.x == 0) {
    lambdas[job.result] = result;
    if (!(result < 1e300)) atomicOr(status, STATUS_NON_FINITE_BOUND);
    if (result >= fallback && fallback > 0.0 && N > 1) atomicOr(status, STATUS_FALLBACK_BOUND);
  }
}
static_assert(EACH == 1, "one unit a warp");
#endif
