// sigma^2 of W_Q W_K^T without rotation (include/scale_lift.cuh), and the quadratic forms of the constants,
// aux = (c_k^T G_Q c_k, c_q^T G_K c_q): what scale_products does, for d_head up to 64 (macro D_HEAD) on Hopper. One warpgroup a
// query head, five on a multiprocessor, which wait for nobody else.
//
// G_K is factored in f32; T = U A and H = U T^T are products on tensor cores of f16 pairs, value = high + low to 2^-22, the two
// mixed products before that of the high parts, so that only its N + 16 terms are cut off at 2^-23. H stays in registers and is
// squared there.
#include "scale_accumulator.cuh"
#include "scale_ptx.cuh"

using namespace spectrum;

constexpr u32 SIDE = 64, THREADS = 128;
static_assert(N <= SIDE, "d_head");
constexpr u32 ROW = SIDE + 4;                   // f32 values
constexpr u32 STEPS = (N + 15) / 16, EDGE = STEPS * 16;
constexpr u32 OPERAND_BYTES = SIDE * SIDE * 2;  // f16
// Roundings of the factorisation: sums of 16 products, as many before in the diagonal block, one a block, and the roots'.
constexpr u32 FACTOR_DEPTH = 32 + SIDE / 16 + 24;
constexpr float UP = 0x1p12f;                   // of f16 pairs: low parts are normal numbers, no value is above 1
constexpr float CUT_PAIRS = (N + 28) * 0x1p-23f;

// The sum of a Gram's parts, in order.
__device__ __forceinline__ void load_gram(float (&v)[32], const HeadGram& head, const float* partials) {
  const Lane at;
  const float* from = partials + (size_t)head.first * 4096 + at.row() * 64 + 2 * at.c;
#pragma unroll
  for (u32 n = 0; n < 16; n++) {
    const float2 x = __ldg((const float2*)(from + n % 2 * 8 * 64 + n / 2 * 8));
    v[2 * n] = x.x, v[2 * n + 1] = x.y;
  }
#pragma unroll 1
  for (u32 part = 1; part < head.count; part++) {
    from += (size_t)head.stride * 4096;
#pragma unroll
    for (u32 n = 0; n < 16; n++) {
      const float2 x = __ldg((const float2*)(from + n % 2 * 8 * 64 + n / 2 * 8));
      v[2 * n] += x.x, v[2 * n + 1] += x.y;
    }
  }
}

// The Gram of balanced channels without their mean, 0 beyond the head; its square and its form with the constants.
__device__ __forceinline__ float2 balance_gram(float (&v)[32], const float* balance, const float* sum, const float* constant, float per) {
  const Lane at;
  float square = 0.f, form = 0.f;
  float left[2], left_sum[2], left_constant[2];
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 i = at.row() + 8 * h;
    left[h] = balance[i], left_sum[h] = sum[i] * per, left_constant[h] = constant[i];
  }
#pragma unroll
  for (u32 n = 0; n < 8; n++) {
    const u32 j = 8 * n + 2 * at.c;
    const float2 right = *(const float2*)(balance + j), right_sum = *(const float2*)(sum + j), right_constant = *(const float2*)(constant + j);
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
      float& x = v[4 * n + q];
      x = x * left[q / 2] * (q % 2 ? right.y : right.x) - left_sum[q / 2] * (q % 2 ? right_sum.y : right_sum.x);
      // Beyond the head lies anything.
      if (N < SIDE) x = j + q % 2 < N && at.row() + q / 2 * 8 < N ? x : 0.f;
      square += x * x, form += x * left_constant[q / 2] * (q % 2 ? right_constant.y : right_constant.x);
    }
  }
  return make_float2(square, form);
}

// This lane's values to or from rows of f32.
template <bool PUT> __device__ __forceinline__ void place(float (&v)[32], float* rows) {
  const Lane at;
#pragma unroll
  for (u32 n = 0; n < 16; n++) {
    float2* p = (float2*)(rows + (at.row() + n % 2 * 8) * ROW + n / 2 * 8 + 2 * at.c);
    if (PUT) *p = make_float2(v[2 * n], v[2 * n + 1]);
    else v[2 * n] = p->x, v[2 * n + 1] = p->y;
  }
}

// Writes an operand of 64 x 64 values, given this lane's pairs: of value 2 p and 2 p + 1.
template <class F> __device__ __forceinline__ void store(u32 x, F pair) {
  const Lane at;
  // The row that this lane addresses: of matrix m = lane / 8, m % 2 the half of 16 rows, m / 2 the next eight columns.
  const u32 lane = 4 * at.g + at.c, r = lane & 7, half = lane >> 3 & 1, next = lane >> 4;
#pragma unroll
  for (u32 n = 0; n < 8; n += 2) {
    const u32 to = x + (16 * at.warp + 8 * half + r) * 128 + (((n + next) ^ r) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(pair(2 * n)), "r"(pair(2 * n + 1)),
                 "r"(pair(2 * n + 2)), "r"(pair(2 * n + 3))
                 : "memory");
  }
}
// v times `scale` as two operands, one behind the other.
__device__ __forceinline__ void store_pairs(const float (&v)[32], u32 x, float scale) {
  u32 low[16];
  store(x, [&](u32 p) {
    const Pair both = split(v[2 * p] * scale, v[2 * p + 1] * scale);
    low[p] = both.low;
    return both.high;
  });
  store(x + OPERAND_BYTES, [&](u32 p) { return low[p]; });
  ptx::async_fence();
}

// Where diagonal block `p` of U goes: below the diagonal, where nothing is read, since two warps read the block itself.
__device__ __forceinline__ u32 corner_at(u32 p) { return p < 3 ? (p + 1) * 16 * ROW + p * 16 : 48 * ROW; }

// Cholesky of the upper triangle, U^T U, in place but for the diagonal blocks, 16 rows at a time: two warps with a lane a
// column, both with the diagonal block beside, so that they need not wait for each other; then all of what is left.
__device__ __forceinline__ void factor(float* a, int* failed) {
  const u32 lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
#pragma unroll 1
  for (u32 k0 = 0; k0 < EDGE; k0 += 16) {
    float* rows = a + k0 * ROW;
    if (warp == 0 || (warp == 1 && k0 + 48 < EDGE)) {
      const u32 j = k0 + 16 + threadIdx.x;
      const bool inside = j < EDGE;
      float corner[16], column[16];
#pragma unroll
      for (u32 k = 0; k < 16; k++) {
        corner[k] = rows[k * ROW + k0 + lane % 16];
        column[k] = rows[k * ROW + (inside ? j : k0)];
      }
#pragma unroll
      for (u32 k = 0; k < 16; k++) {
        const float pivot = __shfl_sync(0xffffffffu, corner[k], k);
        if (!(pivot > 0.f)) *failed = 1;
        const float over = inverse_root(pivot);
        corner[k] *= over, column[k] *= over;
#pragma unroll
        for (u32 i = k + 1; i < 16; i++) {
          const float u = __shfl_sync(0xffffffffu, corner[k], i);
          corner[i] -= u * corner[k], column[i] -= u * column[k];
        }
      }
      float* spare = a + corner_at(k0 / 16);
#pragma unroll
      for (u32 k = 0; k < 16; k++) {
        if (threadIdx.x < 16) spare[k * ROW + lane] = k <= lane ? corner[k] : 0.f;
        if (inside) rows[k * ROW + j] = column[k];
      }
    }
    __syncthreads();
    // 16 x 16 tiles of the rest, a warp each.
    u32 index = 0;
#pragma unroll 1
    for (u32 row = k0 + 16; row < EDGE; row += 16)
#pragma unroll 1
      for (u32 column = row; column < EDGE; column += 16) {
        if (index++ % 4 != warp) continue;
        const u32 r = row + lane / 8 * 4, c = column + lane % 8 * 2;
        float acc[4][2] = {};
#pragma unroll 8
        for (u32 k = 0; k < 16; k++) {
          const float4 x = *(const float4*)(rows + k * ROW + r);
          const float2 y = *(const float2*)(rows + k * ROW + c);
          const float left[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (u32 i = 0; i < 4; i++) acc[i][0] += left[i] * y.x, acc[i][1] += left[i] * y.y;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          float2* to = (float2*)(a + (r + i) * ROW + c);
          *to = make_float2(to->x - acc[i][0], to->y - acc[i][1]);
        }
      }
    __syncthreads();
  }
}

// d = a x^T for this warpgroup's rows of a and an operand x, both in pairs.
__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&high)[STEPS][4], const u32 (&low)[STEPS][4], u32 x) {
  const u64 of_high = ptx::swizzled_operand(x), of_low = ptx::swizzled_operand(x + OPERAND_BYTES);
  using Product = ptx::Wgmma<64, false, true>;
  ptx::wgmma_fence();
#pragma unroll
  for (u32 s = 0; s < STEPS; s++) Product::run(d, low[s], of_high + 2 * s, s > 0);
#pragma unroll
  for (u32 s = 0; s < STEPS; s++) Product::run(d, high[s], of_low + 2 * s, 1);
#pragma unroll
  for (u32 s = 0; s < STEPS; s++) Product::run(d, high[s], of_high + 2 * s, 1);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep(d);
}

// P = X X^T.
__device__ __forceinline__ void square(float (&p)[32], u32 x) {
  const u64 operand = ptx::swizzled_operand(x);
  ptx::wgmma_fence();
#pragma unroll
  for (u32 s = 0; s < STEPS; s++) ptx::wgmma_f16_64x64x16<false>(p, operand + 2 * s, operand + 2 * s, s > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep(p);
}

// As `whole_sums`.
__device__ __forceinline__ float2 moments(float (&v)[32], const Lane& at, uint2* scratch) {
  float trace = 0.f, squares[2] = {0.f, 0.f};
  diagonal(v, at, [&](float& x, bool on, u32) { trace += on ? x : 0.f; });
#pragma unroll
  for (u32 i = 0; i < 32; i++) squares[i & 1] += v[i] * v[i];
  return whole_sums<4>(trace, squares[0] + squares[1], scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    scale_products(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                   double* lambdas, double2* aux, float*, u32* status) {
  extern __shared__ u8 memory[];
  __shared__ __align__(16) float balance[2][SIDE], sum[2][SIDE], constant[2][SIDE];
  __shared__ float4 scratch[4], scratch_of_h[4];
  __shared__ __align__(16) uint2 scratch_of_p[4];
  __shared__ SideSums parts[4];
  __shared__ Lift lifts[2];
  __shared__ Links links;
  __shared__ int failed;
  const u32 x = (ptx::shared_address(memory) + 1023) & ~1023u;
  float* u = (float*)(memory + (x - ptx::shared_address(memory)) + 2 * OPERAND_BYTES);
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (only_waits(shape)) return;
  const Job job = jobs[blockIdx.x];
  const HeadGram of_q = heads[job.q], of_k = heads[job.k];
  if (threadIdx.x == 0) failed = 0;
  float q[32], k[32];
  load_gram(q, of_q, partials), load_gram(k, of_k, partials);
  {
    // A thread a channel, q before k.
    const u32 which = threadIdx.x / SIDE, i = threadIdx.x % SIDE, channel = min(i, N - 1);
    BalancedChannel own = balanced_channel(stats[(which ? of_k : of_q).stat_row + channel], stats[(which ? of_q : of_k).stat_row + channel]);
    if (i >= N) own = {1.f, 0.f, 0.f, {0.f, 0.f, 0.f, 0.f, 0.f, 0.f}};
    balance[which][i] = own.factor, sum[which][i] = own.sum, constant[which][i] = own.constant;
    own.share.add_warp();
    if (lane == 0) parts[warp] = own.share;
  }
  __syncthreads();
  const float per = shape.mean ? 1.f / shape.d_model : 0.f;
  const float2 for_k = balance_gram(k, balance[1], sum[1], constant[1], per);
  place<true>(k, u);  // registers are few
  const float2 for_q = balance_gram(q, balance[0], sum[0], constant[0], per);
  const float4 of_grams = sums_of_block<4>({for_q.x, for_k.x, for_q.y, for_k.y}, scratch);
  if (lane == 0) {
    const u32 which = warp & 1;
    SideSums side = parts[2 * which];
    side.add(parts[2 * which + 1]);
    if (warp == 0) lifts[0] = lift_of<0>(side, of_grams.x, shape);
    else if (warp == 1) lifts[1] = lift_of<FACTOR_DEPTH>(side, of_grams.y, shape);
    else ((double*)(aux + blockIdx.x))[which] = form_above(side, which ? of_grams.w : of_grams.z, per, 64 + 2 * SIDE * SIDE / THREADS, shape);
  }
  __syncthreads();
  if (!(lifts[0].scale > 0.f && lifts[1].scale > 0.f)) {
    const bool zero = lifts[0].scale == 0.f || lifts[1].scale == 0.f;
    if (threadIdx.x == 0) put_lambda(lambdas + job.result, zero ? 0.0 : __longlong_as_double(0x7ff8000000000000ll), status);
    return;
  }
  const Lane at;
  // A as an operand, G_K for the factorisation, with ones beyond the head.
  diagonal(q, at, [&](float& v, bool on, u32 i) { v += on && i < N ? lifts[0].added : 0.f; });
  store_pairs(q, x, lifts[0].scale * UP);
  place<false>(k, u);
  diagonal(k, at, [&](float& v, bool on, u32 i) { v = on ? i < N ? v + lifts[1].added : inverse(lifts[1].scale) : v; });
#pragma unroll
  for (u32 i = 0; i < 32; i++) k[i] *= lifts[1].scale;
  place<true>(k, u);
  __syncthreads();
  factor(u, &failed);
  float top = 0.f, slack = 0.f;
  if (!failed) {
    const Lane at;
    // This warp's rows of U as a left operand, a in 16 x 16 pieces; zeros below the diagonal and beyond the head.
    u32 high[STEPS][4], low[STEPS][4];
    float lengths = 0.f;
#pragma unroll
    for (u32 s = 0; s < STEPS; s++)
#pragma unroll
      for (u32 p = 0; p < 4; p++) {
        const u32 column = 16 * s + 2 * at.c + p / 2 * 8;
        float2 v = make_float2(0.f, 0.f);
        if (s > at.warp) v = *(const float2*)(u + (at.row() + p % 2 * 8) * ROW + column);
        if (s == at.warp) v = *(const float2*)(u + corner_at(s) + (at.g + p % 2 * 8) * ROW + column % 16);
        if (N % 16) v.x = column < N ? v.x : 0.f, v.y = column + 1 < N ? v.y : 0.f;
        lengths += v.x * v.x + v.y * v.y;
        const Pair both = split(v.x * UP, v.y * UP);
        high[s][p] = both.high, low[s][p] = both.low;
      }
    float v[32];
    multiply(v, high, low, x);
    float products = 0.f;
#pragma unroll
    for (u32 i = 0; i < 32; i++) v[i] *= 1.f / (UP * UP), products += v[i] * v[i];
    __syncthreads();
    // Parked: registers are few.
    u[threadIdx.x] = lengths, u[THREADS + threadIdx.x] = products;
    store_pairs(v, x, UP);
    __syncthreads();
    multiply(v, high, low, x);
    float trace = 0.f, squares = 0.f;
    diagonal(v, at, [&](float& x, bool on, u32) { trace += on ? x : 0.f; });
#pragma unroll
    for (u32 i = 0; i < 32; i++) v[i] *= 1.f / (UP * UP), squares += v[i] * v[i];
    const float4 sums = sums_of_block<4>({trace * (1.f / (UP * UP)), squares, u[threadIdx.x], u[THREADS + threadIdx.x]}, scratch_of_h);
    slack = product_slack(CUT_PAIRS, sums.z, sums.w, lifts);
    if (!(sums.y > 0.f && sums.y < 1e30f)) {
      top = sums.y == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
    } else {
      // To a norm in [2, 4) by a power of two, whose values are normal numbers of f16.
      const int exponent = ((int)(__float_as_uint(sums.y) >> 23) - 127) >> 1;
      const float unit = __uint_as_float((u32)(128 - exponent) << 23), back = __uint_as_float((u32)(126 + exponent) << 23);
#pragma unroll
      for (u32 i = 0; i < 32; i++) v[i] *= unit;
      Chain chain;
      chain.first(sums.x * unit, sums.y * unit * unit, 0.f, 0.f, links);
      float2 now;
#pragma unroll 1
      for (;;) {
        diagonal(v, at, [&](float& value, bool on, u32 i) { value -= on && i < N ? chain.shift : 0.f; });
        const u32 factor = both_f16(chain.scale);
        store(x, [&](u32 p) { return scaled_f16(pack_f16(v[2 * p], v[2 * p + 1]), factor); });
        ptx::async_fence();
        __syncthreads();
        square(v, x);
        now = moments(v, at, scratch_of_p);
        if (!chain.go_on(now.x, now.y, OPEN, links)) break;
      }
      if (threadIdx.x == 0) top = __fmul_ru(chain.certificate(now.x, now.y, links), back);
    }
  }
  if (threadIdx.x) return;
  u32 block = blockIdx.x;
  asm volatile("" : "+r"(block));  // where it goes is not remembered
  put_product(lambdas + jobs[block].result, !*(volatile int*)&failed, top, slack, lifts, status);
}
