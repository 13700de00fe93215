// Certified largest eigenvalues of the small matrices that a logit bound is made of. One block a job:
//   RAW_Q, RAW_K     G as it is (mean kept): sigma_Q^2, sigma_K^2
//   SCALED_Q, _K     T^1/2 G_Q T^1/2 and T^-1/2 G_K T^-1/2, t_b = sqrt(tr G_K,bb / tr G_Q,bb) (rotation)
//   PRODUCT          H = L^T (G_Q + e I) L with L L^T = G_K + e I, in f64 (no rotation)
// G + e I stands for G, e = c 2^-24 tr G covering every rounding of the Gram. A Cholesky factor of mu I - S proves
// lambda <= mu + r (r + 3) u mu; mu starts a little above the Rayleigh quotient of the vector that the last call left,
// and grows until the factorisation succeeds; the trace always does. An all-zero matrix gives 0, NaN gives NaN.
#include "scale_linalg.cuh"

enum : u32 { RAW_Q = 0, RAW_K = 1, SCALED_Q = 2, SCALED_K = 3, PRODUCT = 4 };

struct HeadGram {
  u32 first, stride, count, stat_row;
};
struct Job {
  u32 kind;
  u32 q, k;    // heads in the Gram table; RAW jobs use the one they name
  u32 result;  // where lambda goes; the vector lies at result * 256
};
struct Shape {
  u32 r, rotary, interleaved, mean;  // mean: 1 if the norm removes it
  float rope_factor;
  float rounding;                    // c
  u32 d_model;
  u32 steps;                         // power steps from a warm vector; three times as many from a cold one
};
static_assert(sizeof(HeadGram) == 16 && sizeof(Job) == 16 && sizeof(Shape) == 32, "host mirror");

// Entry (i, j), i <= j, of a head's Gram: the sum of its parts, in order.
__device__ float gram_entry(const float* partials, const HeadGram& head, u32 side, u32 i, u32 j) {
  const u32 bi = i / 64, bj = j / 64, block = bi * side - bi * (bi - 1) / 2 + bj - bi;
  const u32 blocks = side * (side + 1) / 2;
  float sum = 0.f;
  for (u32 part = 0; part < head.count; part++)
    sum += partials[((size_t)(head.first + part * head.stride) * blocks + block) * 4096 + (i % 64) * 64 + j % 64];
  return sum;
}

// G, mean taken out if asked, as a packed triangle of T. A thread brings four values of a row at a time.
template <class T>
__device__ void load_gram(T* a, const float* partials, const ChannelStats* stats, const HeadGram& head, const Shape& s, bool mean) {
  const u32 side = (s.r + 63) / 64, blocks = side * (side + 1) / 2;
  const u32 column = (threadIdx.x & 15) * 4, row = threadIdx.x >> 4;
#pragma unroll 1
  for (u32 bi = 0, block = 0; bi < side; bi++)
#pragma unroll 1
    for (u32 bj = bi; bj < side; bj++, block++) {
      float4 sum[4] = {};
#pragma unroll 1
      for (u32 part = 0; part < head.count; part++) {
        const float* from = partials + ((size_t)(head.first + part * head.stride) * blocks + block) * 4096 + row * 64 + column;
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
          const float4 v = *(const float4*)(from + m * 16 * 64);
          sum[m].x += v.x, sum[m].y += v.y, sum[m].z += v.z, sum[m].w += v.w;
        }
      }
#pragma unroll
      for (u32 m = 0; m < 4; m++) {
        const u32 i = bi * 64 + row + 16 * m;
        const float v[4] = {sum[m].x, sum[m].y, sum[m].z, sum[m].w};
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
          const u32 j = bj * 64 + column + q;
          if (i > j || j >= s.r) continue;
          T g = v[q];
          if (mean) g -= (T)stats[head.stat_row + i].sum * (T)stats[head.stat_row + j].sum / (T)s.d_model;
          a[linalg::packed(j, i)] = g;
        }
      }
    }
  __syncthreads();
}

template <class T> __device__ double trace(const T* a, u32 r, double2* scratch) {
  return linalg::block_sum(threadIdx.x < r ? (double)a[linalg::packed(threadIdx.x, threadIdx.x)] : 0.0, scratch);
}

// Pseudo-random unit-free start that depends on the channel alone.
__device__ __forceinline__ float cold(u32 i) {
  u32 h = i * 2654435761u + 12345u;
  h ^= h >> 15, h *= 0x2c1b3c6du, h ^= h >> 12, h *= 0x297a2d39u, h ^= h >> 15;
  return (float)(h >> 8) * (1.f / 8388608.f) - 1.f;
}

extern "C" __global__ void __launch_bounds__(256, 3)
    scale_bounds(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape s,
                 float* vectors, double* lambdas, u32* status) {
  extern __shared__ float memory[];
  __shared__ double2 scratch[8];
  __shared__ float diagonal_q[256], diagonal_k[256], factor[256];
  const Job job = jobs[blockIdx.x];
  const u32 r = s.r, i = threadIdx.x;
  float* a = memory;                      // packed triangle
  float* panel = a + r * (r + 1) / 2;     // r x 8
  float* x = panel + r * linalg::PANEL;
  float* y = x + r;
  float* parts = y + r;
  const bool of_q = job.kind == RAW_Q || job.kind == SCALED_Q;
  const bool scaled = job.kind >= SCALED_Q, mean = s.mean && scaled;
  const HeadGram head = heads[of_q ? job.q : job.k];
  const u32 side = (r + 63) / 64;
  // Diagonal scaling, in powers that cancel between q and k.
  if (i < r) {
    factor[i] = i < s.rotary ? s.rope_factor : 1.f;
    if (scaled) {
      const HeadGram q = heads[job.q], k = heads[job.k];
      diagonal_q[i] = gram_entry(partials, q, side, i, i), diagonal_k[i] = gram_entry(partials, k, side, i, i);
      if (mean) {
        const float sq = stats[q.stat_row + i].sum, sk = stats[k.stat_row + i].sum;
        diagonal_q[i] -= sq * sq / s.d_model, diagonal_k[i] -= sk * sk / s.d_model;
      }
    }
  }
  __syncthreads();
  if (scaled && i < r) {
    u32 partner = i;
    if (i < s.rotary) partner = s.interleaved ? i ^ 1 : (i < s.rotary / 2 ? i + s.rotary / 2 : i - s.rotary / 2);
    float tq = diagonal_q[i], tk = diagonal_k[i];
    if (partner != i) tq += diagonal_q[partner], tk += diagonal_k[partner];
    const float fourth = tq > 0.f && tk > 0.f ? sqrtf(sqrtf(tk / tq)) : 1.f;  // t^1/2 = (tr k / tr q)^1/4
    factor[i] *= of_q ? fourth : 1.f / fourth;
  }
  double top = 0, result = 0;
  float e = 0.f;
  int attempt = -1;
  for (;;) {
    // (Re)load: a failed factorisation has overwritten the matrix.
    load_gram(a, partials, stats, head, s, mean);
    if (attempt < 0) e = (float)(s.rounding * 0x1p-24 * trace(a, r, scratch));
    __syncthreads();
    for (u32 row = i / 32; row < r; row += 8)
      for (u32 column = i & 31; column <= row; column += 32) {
        float& v = a[linalg::packed(row, column)];
        v = (v + (row == column ? e : 0.f)) * factor[row] * factor[column];
      }
    __syncthreads();
    if (attempt < 0) {
      const double tr = trace(a, r, scratch);
      if (!(tr > 0.0) || !(tr < 1e300)) {
        result = tr == 0.0 ? 0.0 : __longlong_as_double(0x7ff8000000000000ll);
        break;
      }
      top = tr;
      float start = i < r ? vectors[(size_t)job.result * 256 + i] : 0.f;
      const double length = linalg::block_sum((double)start * start, scratch);
      const bool warm = length > 0.5 && length < 2.0;
      if (i < r) x[i] = warm ? start : cold(i);
      __syncthreads();
      const double rho = linalg::power(a, x, y, parts, r, warm ? s.steps : 3 * s.steps, scratch);
      if (i < r) vectors[(size_t)job.result * 256 + i] = x[i];
      result = rho * (warm ? 1.005 : 1.01);
    } else {
      // mu grows: 0.4, 1.2, 2.8, 6 % above the first guess, and so on up to the trace.
      result *= 1.0 + 0.004 * (double)(1 << min(attempt, 20));
    }
    // A quotient that is not positive (a Gram that is not semidefinite) would never grow.
    if (!(result > 0.0 && result < top)) {
      result = top;
      break;
    }
    if (i < r) a[linalg::packed(i, i)] -= (float)result;
    __syncthreads();
    for (u32 e2 = i; e2 < r * (r + 1) / 2; e2 += 256) a[e2] = -a[e2];
    __syncthreads();
    if (linalg::cholesky(a, r, panel)) break;
    attempt++;
  }
  if (i == 0) {
    const double u = 0x1p-24;
    if (result == result && result > 0.0) result += ((double)r * (r + 3) + 4) * u * result;
    lambdas[job.result] = result;
    if (result != result) atomicOr(status, STATUS_NON_FINITE_BOUND);
    if (result >= top && top > 0.0 && r > 1) atomicOr(status, STATUS_FALLBACK_BOUND);
  }
}

// sigma^2 of W_Q W_K^T, and the quadratic forms of the constants: aux = (c_k^T G_Q c_k, c_q^T G_K c_q).
extern "C" __global__ void __launch_bounds__(256, 2)
    scale_products(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape s,
                   double* workspace, double* lambdas, double2* aux, u32* status) {
  extern __shared__ double memory64[];
  __shared__ double2 scratch[8];
  const Job job = jobs[blockIdx.x];
  const u32 r = s.r, i = threadIdx.x, triangle = r * (r + 1) / 2;
  double* l = memory64;              // G_K + e I, then its factor
  double* h = l + triangle;          // G_Q + e I, then H
  double* panel = h + triangle;      // r x 8
  double* x = panel + r * linalg::PANEL;
  double* y = x + r;
  double* parts = y + r;  // 256, also one column a lane of rows while H is formed
  const HeadGram q = heads[job.q], k = heads[job.k];
  load_gram(l, partials, stats, k, s, s.mean);
  load_gram(h, partials, stats, q, s, s.mean);
  const double trace_q = trace(h, r, scratch), trace_k = trace(l, r, scratch);
  double2 forms;
  {
    if (i < r) x[i] = stats[k.stat_row + i].constant;
    __syncthreads();
    linalg::multiply(h, x, y, parts, r);
    forms.x = linalg::block_sum(i < r ? x[i] * y[i] : 0.0, scratch);
    if (i < r) x[i] = stats[q.stat_row + i].constant;
    __syncthreads();
    linalg::multiply(l, x, y, parts, r);
    forms.y = linalg::block_sum(i < r ? x[i] * y[i] : 0.0, scratch);
  }
  const double e_q = s.rounding * 0x1p-24 * trace_q, e_k = s.rounding * 0x1p-24 * trace_k;
  // The certificate covers the forms too.
  {
    double ck = i < r ? stats[k.stat_row + i].constant : 0.0, cq = i < r ? stats[q.stat_row + i].constant : 0.0;
    forms.x = fmax(forms.x, 0.0) + e_q * linalg::block_sum(ck * ck, scratch);
    forms.y = fmax(forms.y, 0.0) + e_k * linalg::block_sum(cq * cq, scratch);
  }
  const double fallback = (trace_q + r * e_q) * (trace_k + r * e_k);
  double result = fallback;
  bool fine = fallback > 0.0 && fallback < 1e300;
  if (!fine) result = fallback == 0.0 ? 0.0 : __longlong_as_double(0x7ff8000000000000ll);
  if (fine) {
    if (i < r) l[linalg::packed(i, i)] += e_k, h[linalg::packed(i, i)] += e_q;
    __syncthreads();
    fine = linalg::cholesky(l, r, panel);
  }
  if (fine) {
    // H(m, n) = sum_i L(i, m) (G L)(i, n), a column n at a time; finished columns wait in global memory, since every
    // column needs all of G.
    double* out = workspace + (size_t)blockIdx.x * (triangle + 256) + 256;
    const linalg::Rows rows(r);
    const u32 span = linalg::THREADS / rows.lanes, row = rows.row;
    for (u32 n0 = 0; n0 < r; n0 += rows.lanes) {
      const u32 n = n0 + rows.lane;
      if (row < r && n < r) {
        double sum = 0;
#pragma unroll 4
        for (u32 j = n; j < r; j++) sum += linalg::symmetric(h, row, j) * l[linalg::packed(j, n)];
        parts[rows.lane * span + row] = sum;
      }
      __syncthreads();
      if (row >= n && row < r) {
        double sum = 0;
        u32 at = linalg::packed(row, row);
#pragma unroll 4
        for (u32 j = row; j < r; j++) sum += l[at] * parts[rows.lane * span + j], at += j + 1;
        out[linalg::packed(row, n)] = sum;
      }
      __syncthreads();
    }
    double* vector = out - 256;
    for (u32 e = i; e < triangle; e += 256) h[e] = out[e];
    __syncthreads();
    const double start = i < r ? vector[i] : 0.0, length = linalg::block_sum(start * start, scratch);
    const bool warm = length > 0.5 && length < 2.0;
    if (i < r) x[i] = warm ? start : (double)cold(i);
    __syncthreads();
    const double rho = linalg::power(h, x, y, parts, r, warm ? s.steps : 3 * s.steps, scratch);
    if (i < r) vector[i] = x[i];
    double mu = rho * (warm ? 1.005 : 1.01);
    for (int attempt = 0; mu > 0.0 && mu < fallback; attempt++) {
      for (u32 e = i; e < triangle; e += 256) l[e] = -h[e];
      __syncthreads();
      if (i < r) l[linalg::packed(i, i)] += mu;
      __syncthreads();
      if (linalg::cholesky(l, r, panel)) {
        result = mu;
        break;
      }
      mu *= 1.0 + 0.004 * (double)(1 << min(attempt, 20));
    }
    result += ((double)r * (r + 3) * mu + 4.0 * r * fallback) * 0x1p-53;
  }
  if (i == 0) {
    lambdas[job.result] = result;
    aux[blockIdx.x] = forms;
    if (result != result) atomicOr(status, STATUS_NON_FINITE_BOUND);
    if (result >= fallback && fallback > 0.0 && r > 1) atomicOr(status, STATUS_FALLBACK_BOUND);
  }
}
