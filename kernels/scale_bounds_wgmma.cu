// Certified largest eigenvalues of the small matrices that a logit bound is made of (include/scale_jobs.cuh), d_head up to
// 128 (macro D_HEAD). Hopper: one warpgroup a matrix, several on a multiprocessor.
//
// X lies in shared memory as a wgmma operand, both sides of P = X X^T. Of P the upper 64 x 64 blocks are made, three of
// four; the fourth of the next X is written by transposition.
#include "scale_jobs.cuh"
#include "scale_ptx.cuh"

using namespace spectrum;

constexpr bool BIG = N > 64;
constexpr u32 SIDE = BIG ? 128 : 64, TILES = SIDE / 8;
// What may be left open by estimate, of lambda; a fifth of it is on average. Norms as they are may be looser: their product is
// sigma only where it is the smaller one, which is seldom, and by little.
constexpr float SCALED_OPEN = 0.0015f, RAW_OPEN = 0.003f;
constexpr float TRACE = 16.f;            // of S: its values are normal numbers of f16
constexpr u32 PANEL_BYTES = SIDE * 128;  // 64 columns of every row

// One thread's values of the upper blocks: rows 16 w + g and + 8 of 64, columns 8 n + 2 c and + 1, in top[n] over all columns
// and, for the lower rows, in low[n - 8] over the right half.
struct Values {
  float top[TILES][4];
  float low[8][4];  // only there if BIG
};

struct Lane {
  u32 warp, g, c;
  __device__ __forceinline__ Lane() : warp(threadIdx.x >> 5), g((threadIdx.x & 31) >> 2), c(threadIdx.x & 3) {}
  __device__ __forceinline__ u32 row() const { return 16 * warp + g; }
};

// f(value, on, row) for the values where the diagonal may pass this thread: row 16 w + 8 h + g is column 8 (2 w + h) + g.
template <u32 WARP, class F> __device__ __forceinline__ void diagonal_of(Values& v, const Lane& at, F f) {
  const bool even = at.g == 2 * at.c, odd = at.g == 2 * at.c + 1;
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 n = 2 * WARP + h, row = 8 * n + at.g;
    f(v.top[n][2 * h], even, row), f(v.top[n][2 * h + 1], odd, row);
    if (BIG) f(v.low[n][2 * h], even, 64 + row), f(v.low[n][2 * h + 1], odd, 64 + row);
  }
}
template <class F> __device__ __forceinline__ void diagonal(Values& v, const Lane& at, F f) {
  switch (at.warp) {
    case 0: return diagonal_of<0>(v, at, f);
    case 1: return diagonal_of<1>(v, at, f);
    case 2: return diagonal_of<2>(v, at, f);
    default: return diagonal_of<3>(v, at, f);
  }
}

template <class F> __device__ __forceinline__ void each(Values& v, F f) {
#pragma unroll
  for (u32 n = 0; n < TILES; n++)
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
      f(v.top[n][q]);
      if (BIG && n >= 8) f(v.low[n % 8][q]);
    }
}

// f(value, a of its row, a of its column, row, column) for every value.
template <class F> __device__ __forceinline__ void rows_and_columns(Values& v, const Lane& at, const float* a, F f) {
  float left[BIG ? 4 : 2];
#pragma unroll
  for (u32 h = 0; h < (BIG ? 4 : 2); h++) left[h] = a[at.row() + h / 2 * 64 + h % 2 * 8];
#pragma unroll
  for (u32 n = 0; n < TILES; n++) {
    const u32 j = 8 * n + 2 * at.c;
    const float2 right = *(const float2*)(a + j);
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 i = at.row() + 8 * h;
      f(v.top[n][2 * h], left[h], right.x, i, j), f(v.top[n][2 * h + 1], left[h], right.y, i, j + 1);
      if (BIG && n >= 8)
        f(v.low[n % 8][2 * h], left[2 + h], right.x, i + 64, j), f(v.low[n % 8][2 * h + 1], left[2 + h], right.y, i + 64, j + 1);
    }
  }
}

// The sum of a Gram's parts, in order.
template <bool FIRST> __device__ __forceinline__ void load_part(Values& v, const float* from) {
  auto block = [](float (&to)[4], const float* at) {
    const float2 upper = __ldg((const float2*)at), lower = __ldg((const float2*)(at + 8 * 64));
    if (FIRST) to[0] = upper.x, to[1] = upper.y, to[2] = lower.x, to[3] = lower.y;
    else to[0] += upper.x, to[1] += upper.y, to[2] += lower.x, to[3] += lower.y;
  };
#pragma unroll
  for (u32 n = 0; n < TILES; n++) block(v.top[n], from + n / 8 * 4096 + n % 8 * 8);
  if (BIG)
#pragma unroll
    for (u32 n = 0; n < 8; n++) block(v.low[n], from + 2 * 4096 + n * 8);
}

__device__ __forceinline__ float2 warp_sums(float2 v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, step);
    v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
  }
  return v;
}

// (trace, squared Frobenius norm) over the block, below LARGEST and its square: whole numbers are added up, which takes one
// instruction a warp. FIRST: the second is NaN if a value is not finite. Between two calls lies a barrier.
template <bool FIRST, int LARGEST> __device__ __forceinline__ float2 moments(Values& v, const Lane& at, uint2* scratch) {
  constexpr float UNIT = LARGEST * 0x1p-32f, UNIT2 = LARGEST * UNIT;
  float trace = 0.f, once[2] = {0.f, 0.f}, twice[2] = {0.f, 0.f};
  diagonal(v, at, [&](float x, bool on, u32) { trace += on ? x : 0.f; });
#pragma unroll
  for (u32 n = 0; n < 8; n++)
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
      once[q & 1] += v.top[n][q] * v.top[n][q];
      if (BIG) {
        once[q & 1] += v.low[n][q] * v.low[n][q];
        twice[q & 1] += v.top[8 + n][q] * v.top[8 + n][q];
      }
    }
  const float squares = once[0] + once[1] + 2.f * (twice[0] + twice[1]);
  const u32 a = __reduce_add_sync(0xffffffffu, __float2uint_rn(trace * (1.f / UNIT)));
  const u32 b = __reduce_add_sync(0xffffffffu, __float2uint_rn(squares * (1.f / UNIT2)));
  if ((threadIdx.x & 31) == 0) scratch[at.warp] = make_uint2(a, b);
  bool finite = true;
  if (FIRST) finite = __syncthreads_and(squares < 1e30f);
  else __syncthreads();
  const uint4 low = *(const uint4*)scratch, high = *(const uint4*)(scratch + 2);
  const float sum = (float)(low.y + low.w + high.y + high.w) * UNIT2;
  return make_float2((float)(low.x + low.z + high.x + high.z) * UNIT, finite ? sum : __uint_as_float(0x7fc00000u));
}

__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// X = scale f16(M - shift I).
__device__ __forceinline__ void store(Values& v, const Lane& at, u32 x, float shift, float scale) {
  diagonal(v, at, [&](float& value, bool on, u32 i) { value -= on && i < N ? shift : 0.f; });
  const u32 factor = both_f16(scale);
  // The row that this lane addresses: of matrix m = lane / 8, m % 2 the half of 16 rows, m / 2 the next eight columns.
  const u32 lane = threadIdx.x & 31, r = lane & 7, half = lane >> 3 & 1, next = lane >> 4;
  u32 own[4];
#pragma unroll
  for (u32 n = 0; n < 4; n++) own[n] = x + (16 * at.warp + 8 * half + r) * 128 + (((2 * n + next) ^ r) << 4);
  const u32 other = x + (64 + 8 * next + r) * 128 + (((2 * at.warp + half) ^ r) << 4);
#pragma unroll
  for (u32 n = 0; n < TILES + (BIG ? 8 : 0); n += 2) {
    const bool top = n < TILES;
    u32 packed[4];
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
      const float* from = top ? v.top[n + m / 2] : v.low[(n - TILES) + m / 2];
      packed[m] = scaled_f16(pack_f16(from[m % 2 * 2], from[m % 2 * 2 + 1]), factor);
    }
    const u32 block = (top ? 0 : 64 * 128) + (n >= 8 ? PANEL_BYTES : 0);
    store_matrices(own[n % 8 / 2] + block, packed[0], packed[1], packed[2], packed[3]);
    if (BIG && top && n >= 8) store_transposed(other + n % 8 * 8 * 128, packed[0], packed[1], packed[2], packed[3]);
  }
  ptx::async_fence();
  __syncthreads();
}

// d (64 x columns) = a (64 x 16) * b (columns x 16)^T + (accumulate ? d : 0), both in swizzled shared memory, given
// by the lower halves of their descriptors.
__device__ __forceinline__ void multiply(float (&d)[16][4], u32 a, u32 b, bool accumulate) {
#define D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\n"
      "mov.b64 a, {%64, 0x40000040};\nmov.b64 b, {%65, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "a, b, p, 1, 1, 0, 0;\n}\n"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
      : "r"(a), "r"(b), "r"((u32)accumulate));
}
__device__ __forceinline__ void multiply(float (&d)[8][4], u32 a, u32 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\n"
      "mov.b64 a, {%32, 0x40000040};\nmov.b64 b, {%33, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "a, b, p, 1, 1, 0, 0;\n}\n"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
      : "r"(a), "r"(b), "r"((u32)accumulate));
#undef D4
}

// P = X X^T.
__device__ __forceinline__ void square(Values& p, u32 x) {
  const u32 all = (u32)ptx::swizzled_operand(x), right = (u32)ptx::swizzled_operand(x + 64 * 128);
  ptx::wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < SIDE / 16; k++) {
    const u32 step = (k / 4 * PANEL_BYTES + k % 4 * 32) / 16;
    multiply(p.top, all + step, all + step, k > 0);
    if (BIG) multiply(p.low, right + step, right + step, k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  each(p, [](float& x) { asm volatile("" : "+f"(x)::"memory"); });
}

// A matrix, with everything that asking for it takes.
struct Task {
  u32 kind, result;
  u32 first, stride, count;  // its Gram's parts
  u32 q_row, k_row;          // statistics of the two heads
  u32 pad;
};
static_assert(sizeof(Task) == 32, "host mirror");

// What lies beyond a head of 120 costs registers.
extern "C" __global__ void __launch_bounds__(128, BIG ? (N == 120 ? 3 : 4) : 6)
    scale_bounds(const Task* tasks, const float* partials, const ChannelStats* stats, Shape shape, double* lambdas, u64* leans, u32* status) {
  extern __shared__ u8 memory[];
  __shared__ __align__(16) float factor[SIDE], sum[SIDE];
  __shared__ __align__(16) uint2 scratch[4];
  __shared__ __align__(16) float4 totals_of[4];
  __shared__ uint3 ends_of[4];  // bits of the smallest and largest diagonal entry, and of the largest as it is
  __shared__ float slopes[4];
  __shared__ Links links;
  const u32 x = (ptx::shared_address(memory) + 1023) & ~1023u;
  const Lane at;
  const Task task = tasks[min(blockIdx.x, gridDim.x - 1 - shape.beside)];
  const Job job = {task.kind, 0, 0, task.result};
  // To wait first is what lets products, descales and plan read statistics ahead of their own waits.
  if (only_waits(shape)) return;
  if (shape.asked && !worthwhile(leans, task.kind, task.result, shape)) {
    if (threadIdx.x == 0) lambdas[task.result] = unasked();
    return;
  }
  // A thread a channel.
  const u32 i = threadIdx.x;
  const Known known = known_of(min(i, N - 1), job, stats + task.q_row, stats + task.k_row, shape);
  Values v;
  const float* from = partials + (size_t)task.first * GRAM_BLOCKS * 4096 + at.row() * 64 + 2 * at.c;
  load_part<true>(v, from);
  {
    Channel own = {};
    if (i < N) own = channel_of(i, known, job, shape);
    if (i < SIDE) factor[i] = own.factor, sum[i] = own.sum;
    const float2 a = warp_sums({own.trace, own.raw}), b = warp_sums({own.lost, own.mean});
    // Not negative, so that their bits are in order.
    const u32 least = __reduce_min_sync(0xffffffffu, i < N ? __float_as_uint(own.trace) : 0x7f800000u);
    const u32 most = __reduce_max_sync(0xffffffffu, __float_as_uint(own.trace));
    const u32 longest = __reduce_max_sync(0xffffffffu, __float_as_uint(own.longest));
    if (i % 32 == 0) totals_of[at.warp] = make_float4(a.x, a.y, b.x, b.y), ends_of[at.warp] = make_uint3(least, most, longest);
    __syncthreads();
  }
#pragma unroll 1
  for (u32 part = 1; part < task.count; part++) load_part<false>(v, from += (size_t)task.stride * GRAM_BLOCKS * 4096);
  auto totals = [&] {
    float4 t = totals_of[0];
#pragma unroll
    for (u32 w = 1; w < 4; w++) {
      const float4 u = totals_of[w];
      t.x += u.x, t.y += u.y, t.z += u.z, t.w += u.w;
    }
    return Totals{t.x, t.y, t.z, t.w};
  };
  const float added = totals().added(shape), trace = totals().trace + N * added;
  // Zeros or not a number.
  auto leave = [&](bool zero) {
    if (threadIdx.x) return;
    if (job.scaled()) put_lean(leans, job, shape, zero ? 0.f : __uint_as_float(0x7fc00000u), zero ? 0.f : __uint_as_float(0x7fc00000u));
    put_lambda(lambdas + task.result, zero ? 0.0 : __longlong_as_double(0x7ff8000000000000ll), status);
  };
  if (!(trace > 0.f && trace < 3e38f)) return leave(trace == 0.f);
  const float to_trace = TRACE * inverse(trace), extra = added * to_trace;
  if (shape.mean && job.scaled()) {
    const float per = 1.f / shape.d_model;
    rows_and_columns(v, at, sum, [&](float& x, float left, float right, u32, u32) { x -= left * per * right; });
  }
  if (job.scaled() || shape.rope_factor != 1.f) {
    rows_and_columns(v, at, factor, [&](float& x, float left, float right, u32, u32) { x *= left * to_trace * right; });
  } else {
    each(v, [&](float& x) { x *= to_trace; });
  }
  // Beyond the head lies anything.
  if (N % 64) rows_and_columns(v, at, factor, [&](float& x, float, float, u32 i, u32 j) { x = i < N && j < N ? x : 0.f; });
  diagonal(v, at, [&](float& value, bool on, u32 i) { value += on && i < N ? extra : 0.f; });
  float2 sums = moments<true, (int)TRACE * 2>(v, at, scratch);
  if (sums.y != sums.y) return leave(false);
  if (sums.y == 0.f) {
    // Rounding left so little of the head that no thread has half a unit of its squares, 2^-23; what there was is in R.
    if (threadIdx.x) return;
    constexpr float MOST_UNSEEN = 0x1p-8f;
    if (job.scaled()) put_lean(leans, job, shape, 0.f, 0.f);
    return put_lambda(lambdas + task.result, exact_lambda(trace * (1.0001f * MOST_UNSEEN / TRACE), totals(), shape), status);
  }
  const float open = job.scaled() ? SCALED_OPEN : RAW_OPEN;
  Chain chain;
  {
    uint3 ends = ends_of[0];
#pragma unroll
    for (u32 w = 1; w < 4; w++) ends.x = min(ends.x, ends_of[w].x), ends.y = max(ends.y, ends_of[w].y);
    chain.first(sums.x, sums.y, __uint_as_float(ends.x) * to_trace, __uint_as_float(ends.y) * to_trace, links);
  }
#pragma unroll 1
  for (;;) {
    store(v, at, x, chain.shift, chain.scale);
    square(v, x);
    sums = moments<false, 2>(v, at, scratch);
    if (!chain.go_on(sums.x, sums.y, open, links)) break;
  }
  const bool leans_on = leans && job.scaled();
  if (leans_on) {
    float slope = 0.f;
    diagonal(v, at, [&](float& x, bool on, u32 i) {
      if (on && i < N) slope += slope_of(x, factor[i], i, shape);
    });
    slope = warp_sums({slope, 0.f}).x;
    if (i % 32 == 0) slopes[at.warp] = slope;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const Totals t = totals();
    const float top = __fmul_ru(chain.certificate(sums.x, sums.y, links), (t.trace + N * t.added(shape)) / TRACE);
    const float lambda = exact_lambda(top, t, shape);
    if (leans_on) {
      const u32 longest = max(max(ends_of[0].z, ends_of[1].z), max(ends_of[2].z, ends_of[3].z));
      const float slope = (slopes[0] + slopes[1] + slopes[2] + slopes[3]) * inverse(sums.x);
      put_lean(leans, job, shape, slope, room_of(lambda, __uint_as_float(longest)));
    }
    put_lambda(lambdas + task.result, lambda, status);
  }
}
