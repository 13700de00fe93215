// sigma^2 of W_Q W_K^T without rotation (include/scale_lift.cuh), and the quadratic forms of the constants,
// aux = (c_k^T G_Q c_k, c_q^T G_K c_q): any d_head (macro D_HEAD), one block a query head, in f32. Above 128 channels the three
// matrices are more than shared memory holds: they lie in `room`, 3 SIDE ROW values a block.
#define LEAST_WARPS 8
#if D_HEAD > 128
#define LEAST_UNITS 3
#endif
#include "scale_lift.cuh"
#include "scale_spectrum.cuh"

using namespace spectrum;

constexpr u32 ROW = SIDE + 4;  // f32 values
static_assert(THREADS >= SIDE, "a thread a channel");
constexpr bool ROOMY = SIDE > 128;
// Roundings of the factorisation: sums of 32 products, as many before in the diagonal block, one a block, and the roots'.
constexpr u32 FACTOR_DEPTH = 64 + SIDE / 32 + 24;

// This thread and warp, not to be remembered.
__device__ __forceinline__ u32 thread_index() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ u32 warp_index() { return thread_index() >> 5; }

// Four values of shared memory, in the order of the program: registers are few.
__device__ __forceinline__ void ordered_load(float (&v)[4], const float* from) {
  asm volatile("ld.volatile.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"((u32)__cvta_generic_to_shared(from))
               : "memory");
}

// acc += A^T B over rows `from` to `to` of A (32 columns at `row`) and B (16 columns at `column`); a lane has 4 x 4 values.
__device__ __forceinline__ void outer(float (&acc)[4][4], const float* a, const float* b, u32 row, u32 column, u32 from, u32 to) {
  const u32 lane = thread_index() & 31, r = row + lane / 4 * 4, c = column + lane % 4 * 4;
#pragma unroll 2
  for (u32 k = from; k < to; k++) {
    const float4 x = *(const float4*)(a + k * ROW + r), y = *(const float4*)(b + k * ROW + c);
    const float left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) acc[i][j] += left[i] * right[j];
  }
}
// A^T B over rows `from` on, 32 of them at a time, so that a sum is 32 + SIDE/32 roundings deep.
__device__ __forceinline__ void product(float (&sum)[4][4], const float* a, const float* b, u32 row, u32 column, u32 from) {
#pragma unroll 1
  for (; from < SIDE; from += 32) {
    float acc[4][4] = {};
    outer(acc, a, b, row, column, from, min(from + 32, SIDE));
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) sum[i][j] += acc[i][j];
  }
}
template <bool PUT> __device__ __forceinline__ void piece(float* at, float (&acc)[4][4], u32 row, u32 column) {
  const u32 lane = thread_index() & 31, r = row + lane / 4 * 4, c = column + lane % 4 * 4;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    float4* p = (float4*)(at + (r + i) * ROW + c);
    if (PUT) *p = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    else acc[i][0] = p->x, acc[i][1] = p->y, acc[i][2] = p->z, acc[i][3] = p->w;
  }
}
// f(row, column) for the 32 x 16 pieces from `first` on that touch the upper triangle, spread over the warps.
template <class F> __device__ __forceinline__ void upper_pieces(u32 first, F f) {
  u32 index = 0;
  const u32 warp = warp_index();
  for (u32 row = first; row < SIDE; row += 32)
    for (u32 column = row; column < SIDE; column += 16)
      if (index++ % WARPS == warp) f(row, column);
}

// Cholesky of the upper triangle, U^T U, in place, 32 rows at a time: the diagonal block in one warp's registers, a lane a
// column; the rows beside it a lane a column; the rest by all. False if the matrix is not positive definite.
// `room`: shared memory for a diagonal block where the matrix is elsewhere.
__device__ __forceinline__ bool factor(float* a, float* room, float* inverses, int* failed) {
  constexpr u32 CORNER = ROOMY ? 36 : ROW;
  // The same in a warp, and known to be.
  const u32 thread = ROOMY ? thread_index() : threadIdx.x, lane = thread & 31, warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
#pragma unroll 1
  for (u32 c = 0; c < SIDE; c += 32) {
    if (warp == 0) {
      float column[32];
#pragma unroll
      for (u32 k = 0; k < 32; k++) column[k] = a[(c + k) * ROW + c + lane];
#pragma unroll
      for (u32 k = 0; k < 32; k++) {
        asm volatile("" ::: "memory");
        const float pivot = __shfl_sync(0xffffffffu, column[k], k);
        if (!(pivot > 0.f)) *failed = 1;
        const float over = inverse_root(pivot);
        if (lane == 0) inverses[k] = over;
        column[k] *= over;
#pragma unroll
        for (u32 i = k + 1; i < 32; i++) column[i] -= __shfl_sync(0xffffffffu, column[k], i) * column[k];
      }
#pragma unroll
      for (u32 k = 0; k < 32; k++)
        if (k <= lane) a[(c + k) * ROW + c + lane] = column[k];
      if (ROOMY)
#pragma unroll
        for (u32 k = 0; k < 32; k++) room[k * CORNER + lane] = column[k];
    }
    __syncthreads();
    const u32 j = c + 32 + thread;
    if (j < SIDE) {
      float column[32], *own = a + c * ROW + j;
      const float* corner = ROOMY ? room : a + c * ROW + c;
      if (ROOMY) asm volatile("" : "+l"(own));  // one address, not one a row
#pragma unroll
      for (u32 k = 0; k < 32; k++) column[k] = own[k * ROW];
#pragma unroll
      for (u32 k = 0; k < 32; k++) {
        column[k] *= inverses[k];
        *(volatile float*)(own + k * ROW) = column[k];  // before the next row is loaded
#pragma unroll
        for (u32 i = (k + 1) / 4 * 4; i < 32; i += 4) {
          float row[4];
          ordered_load(row, corner + k * CORNER + i);
#pragma unroll
          for (u32 q = 0; q < 4; q++)
            if (i + q > k) column[i + q] -= row[q] * column[k];
        }
      }
    }
    __syncthreads();
    upper_pieces(c + 32, [&](u32 row, u32 column) {
      float acc[4][4] = {}, rest[4][4];
      outer(acc, a, a, row, column, c, c + 32);
      piece<false>(a, rest, row, column);
#pragma unroll
      for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) rest[i][j] -= acc[i][j];
      piece<true>(a, rest, row, column);
    });
    __syncthreads();
  }
  return !*failed;
}

extern "C" __global__ void __launch_bounds__(THREADS, SIDE == 64 || SIDE == 96 ? 2 : 1)
    scale_products(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                   double* lambdas, double2* aux, float* room, u32* status) {
  extern __shared__ float memory[];
  __shared__ float4 scratch[2][WARPS];
  __shared__ float balance[2][SIDE], sum[2][SIDE], constant[2][SIDE], inverses[32];
  __shared__ SideSums parts[2][SIDE / 32];
  __shared__ Lift lifts[2];
  __shared__ int failed;
  if (only_waits(shape)) return;
  const Job job = jobs[blockIdx.x];
  const HeadGram of_q = heads[job.q], of_k = heads[job.k];
  // G_Q + e I, then H; G_K + e I, U = L^T, then L; G_Q L, then, where it is shared memory, the matrices that are squared.
  enum { G = 0, L = 1, T = 2 };
  auto matrix = [&](u32 index) -> float* {
    if (!ROOMY) return memory + index * SIDE * ROW;
    u32 block;  // addresses are not to be remembered
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return room + ((size_t)block * 3 + index) * SIDE * ROW;
  };
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) failed = 0;
  if (threadIdx.x < SIDE) {
    const u32 i = threadIdx.x;
    BalancedChannel sides[2] = {{1.f, 0.f, 0.f, {}}, {1.f, 0.f, 0.f, {}}};
    if (i < N) {
      const ChannelStats q = stats[of_q.stat_row + i], k = stats[of_k.stat_row + i];
      sides[0] = balanced_channel(q, k), sides[1] = balanced_channel(k, q);
    }
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
      balance[which][i] = sides[which].factor, sum[which][i] = sides[which].sum, constant[which][i] = sides[which].constant;
      sides[which].share.add_warp();
      if (lane == 0) parts[which][warp] = sides[which].share;
    }
  }
  __syncthreads();
  // Both Grams in 16 x 16 pieces of the upper triangle, mirrored; their squares, and the constants' forms.
  const float per = shape.mean ? 1.f / shape.d_model : 0.f;
  float squares[2] = {0.f, 0.f}, forms[2] = {0.f, 0.f};
  constexpr u32 ALONG = SIDE / 16, PIECES = ALONG * (ALONG + 1) / 2;
#pragma unroll 1
  for (u32 index = warp; index < 2 * PIECES; index += WARPS) {
    const u32 which = index / PIECES;
    u32 column = index % PIECES, row = 0;
    while (column >= ALONG - row) column -= ALONG - row, row++;
    column = (row + column) * 16, row *= 16;
    const HeadGram head = which ? of_k : of_q;
    const u32 bi = row / 64, bj = column / 64, block = bi * GRAM_SIDE - bi * (bi - 1) / 2 + bj - bi, r = lane / 4, c = lane % 4 * 2;
    const float* from = partials + ((size_t)head.first * GRAM_BLOCKS + block) * 4096 + (row % 64 + r) * 64 + column % 64 + c;
    float2 v[2][2] = {};
#pragma unroll 1
    for (u32 part = 0; part < head.count; part++, from += (size_t)head.stride * GRAM_BLOCKS * 4096)
#pragma unroll
      for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
          const float2 x = __ldg((const float2*)(from + 8 * h * 64 + 8 * n));
          v[h][n].x += x.x, v[h][n].y += x.y;
        }
    float* to = matrix(which ? L : G);
    float square = 0.f, form = 0.f;
#pragma unroll
    for (u32 q = 0; q < 8; q++) {
      const u32 i = row + q / 4 * 8 + r, j = column + q / 2 % 2 * 8 + c + q % 2;
      const float raw = q % 2 ? v[q / 4][q / 2 % 2].y : v[q / 4][q / 2 % 2].x;
      if (j < i) continue;
      // Beyond the head lies anything.
      const float value = j < N ? raw * balance[which][i] * balance[which][j] - sum[which][i] * sum[which][j] * per : 0.f;
      to[i * ROW + j] = value, to[j * ROW + i] = value;
      const float weighted = (i == j ? 1.f : 2.f) * value;
      square += weighted * value, form += weighted * constant[which][i] * constant[which][j];
    }
    squares[0] += which ? 0.f : square, squares[1] += which ? square : 0.f;
    forms[0] += which ? 0.f : form, forms[1] += which ? form : 0.f;
  }
  const float3 of_grams = block_sums({squares[0], squares[1], forms[0]}, scratch[0]);
  const float form_k = block_sums({forms[1], 0.f, 0.f}, scratch[1]).x;
  if (threadIdx.x < 2) {
    const u32 which = threadIdx.x;
    SideSums side = parts[which][0];
#pragma unroll 1
    for (u32 w = 1; w < SIDE / 32; w++) side.add(parts[which][w]);
    lifts[which] = which ? lift_of<FACTOR_DEPTH>(side, of_grams.y, shape) : lift_of<0>(side, of_grams.x, shape);
    ((double*)(aux + blockIdx.x))[which] = form_above(side, which ? form_k : of_grams.z, per, 64 + 2 * SIDE * SIDE / THREADS, shape);
  }
  __syncthreads();
  if (!(lifts[0].scale > 0.f && lifts[1].scale > 0.f)) {
    const bool zero = lifts[0].scale == 0.f || lifts[1].scale == 0.f;
    if (threadIdx.x == 0) put_lambda(lambdas + job.result, zero ? 0.0 : __longlong_as_double(0x7ff8000000000000ll), status);
    return;
  }
  if (threadIdx.x < SIDE) {
    float *g = matrix(G), *l = matrix(L);
    const u32 at = threadIdx.x * ROW + threadIdx.x;
    g[at] += lifts[0].added, l[at] = threadIdx.x < N ? l[at] + lifts[1].added : inverse(lifts[1].scale);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < SIDE * SIDE / 4; i += THREADS) {
    float4 *a = (float4*)(matrix(G) + i / (SIDE / 4) * ROW) + i % (SIDE / 4), *b = (float4*)(matrix(L) + i / (SIDE / 4) * ROW) + i % (SIDE / 4);
    const float4 x = *a, y = *b;
    const float q = lifts[0].scale, k = lifts[1].scale;
    *a = make_float4(x.x * q, x.y * q, x.z * q, x.w * q), *b = make_float4(y.x * k, y.y * k, y.z * k, y.w * k);
  }
  __syncthreads();
  const bool fine = factor(matrix(L), memory, inverses, &failed);
  float top = 0.f, slack = 0.f;
  if (fine) {
    // L, and zeros above it and in the padding.
    float lengths = 0.f, products = 0.f;
    float* l = matrix(L);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < SIDE * SIDE; i += THREADS) {
      const u32 row = i / SIDE, column = i % SIDE;
      if (column < row) continue;
      const float v = column < N ? l[row * ROW + column] : 0.f;
      if (column > row) l[row * ROW + column] = 0.f;
      l[column * ROW + row] = v;
      lengths += v * v;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 index = warp_index(); index < SIDE / 32 * (SIDE / 16); index += WARPS) {
      const u32 row = index / (SIDE / 16) * 32, column = index % (SIDE / 16) * 16;
      float acc[4][4] = {};
      product(acc, matrix(G), matrix(L), row, column, column);
      piece<true>(matrix(T), acc, row, column);
#pragma unroll
      for (u32 i = 0; i < 16; i++) products += acc[i / 4][i % 4] * acc[i / 4][i % 4];
    }
    const float3 sums = block_sums({lengths, products, 0.f}, scratch[0]);
    upper_pieces(0, [&](u32 row, u32 column) {
      float acc[4][4] = {};
      product(acc, matrix(L), matrix(T), row, column, row);
      piece<true>(matrix(G), acc, row, column);
    });
    __syncthreads();
    Unit units[EACH];
    Values s[EACH] = {};
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      units[e] = unit(e);
      const float* g = matrix(G);
      if (units[e].weight() > 0.f) each(s[e], units[e], [&](float& v, u32 i, u32 j) { v = j >= i ? g[i * ROW + j] : g[j * ROW + i]; });
    }
    slack = product_slack((32 + SIDE / 32 + 2) * 0x1p-24f, sums.x, sums.y, lifts);
    top = largest(s, units, (u8*)(memory + (ROOMY ? 0 : T * SIDE * ROW)), OPEN);
  }
  if (threadIdx.x == 0) {
    u32 block = blockIdx.x;
    asm volatile("" : "+r"(block));  // where it goes is not remembered
    put_product(lambdas + jobs[block].result, fine, top, slack, lifts, status);
  }
}
