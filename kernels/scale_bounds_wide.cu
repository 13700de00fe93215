// Certified largest eigenvalues as scale_bounds makes them, for heads of more than 128 channels: the same jobs, tables and
// mathematics (scale_bounds.cu, scale_spectrum.cuh), with the squarings as warpgroup products. A block a job, a warpgroup two
// 64 x 64 blocks of the upper triangle; the matrix lies in shared memory once, in f16. Hopper.
#include "scale_ptx.cuh"
#include "scale_segments.cuh"

#ifndef D_HEAD
#define D_HEAD 256
#endif

// What a certificate may leave open, of lambda.
constexpr float OPEN = 0.004f;

enum : u32 { RAW_Q = 0, RAW_K = 1, SCALED_Q = 2, SCALED_K = 3 };

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
static_assert(sizeof(Job) == 16 && sizeof(Shape) == 24, "host mirror");

constexpr u32 N = D_HEAD, SLABS = (N + 63) / 64, SIDE = SLABS * 64, BLOCKS = SLABS * (SLABS + 1) / 2;
constexpr u32 PANEL = SIDE * 128, X_BYTES = SLABS * PANEL;  // 64 columns, rows of 128 bytes
constexpr u32 THREADS = BLOCKS / 2 * 128, WARPS = THREADS / 32;
constexpr int MOST = 9;  // products
static_assert(N > 128 && X_BYTES + 1024 <= 132096, "host's number");

// The thread's number, read here: what is made of it is not kept from before, where registers are short.
__device__ __forceinline__ u32 thread_anew() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Where a block of the upper triangle lies.
struct Place {
  u32 i, j;
  __device__ __forceinline__ bool diagonal() const { return i == j; }
};
// Block b (0, 1) of a warpgroup.
__device__ __forceinline__ Place place(u32 group, u32 b) {
  // Rows and columns, warpgroup by warpgroup from the right; neighbours in a row but for the last.
  const u32 rows = SLABS == 4 ? 0b11'01'10'10'01'01'00'00'00'00 : 0b10'00'01'01'00'00;
  const u32 columns = SLABS == 4 ? 0b11'11'11'10'10'01'11'10'01'00 : 0b10'10'10'01'01'00;
  const u32 at = 4 * group + 2 * b;
  return {rows >> at & 3, columns >> at & 3};
}

// A lane's values of a block: value 4 j + 2 h + e at row 16 warp + lane / 4 + 8 h, column 8 j + 2 (lane % 4) + e.
struct Values {
  float v[2][32];
  __device__ __forceinline__ Place at(u32 b) const { return place(threadIdx.x / 128, b); }
};
// f(low, high, row, column of low), all of the matrix.
template <class F> __device__ __forceinline__ void each(Values& s, F f) {
  const u32 lane = threadIdx.x & 31, r = threadIdx.x / 32 % 4 * 16 + lane / 4, c = lane % 4 * 2;
#pragma unroll
  for (u32 b = 0; b < 2; b++)
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
#pragma unroll
      for (u32 h = 0; h < 2; h++) f(s.v[b][4 * j + 2 * h], s.v[b][4 * j + 2 * h + 1], s.at(b).i * 64 + r + 8 * h, s.at(b).j * 64 + 8 * j + c);
      asm volatile("" ::: "memory");  // not all loads at once
    }
}
// f(value, row, on) where the diagonal may pass this lane, with whether it does.
template <class F> __device__ __forceinline__ void diagonal(Values& s, F f) {
  const u32 thread = thread_anew();
  const u32 lane = thread & 31, warp = thread / 32 % 4, g = lane / 4;
  // Which of the candidates: 2 warp + g % 2, none where g / 2 is another lane's.
  const u32 mine = g / 2 == lane % 4 ? 2 * warp + g % 2 : 8;
#pragma unroll
  for (u32 b = 0; b < 2; b++)
    if (place(thread / 128, b).diagonal())
#pragma unroll
      for (u32 i = 0; i < 16; i++) {
        const u32 w = i / 4, h = i / 2 % 2, e = i % 2;
        f(s.v[b][4 * (2 * w + h) + 2 * h + e], place(thread / 128, b).i * 64 + warp * 16 + h * 8 + g, mine == 2 * w + e);
      }
}

// Sums over the block, the same bits in every thread. `scratch` is not that of the call before.
template <int COUNT> __device__ __forceinline__ float4 block_sums(float4 v, float4* scratch) {
  auto add = [](float4& v, int step) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, step), v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    v.z += __shfl_xor_sync(0xffffffffu, v.z, step);
    if (COUNT > 3) v.w += __shfl_xor_sync(0xffffffffu, v.w, step);
  };
#pragma unroll
  for (int step = 16; step; step >>= 1) add(v, step);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = (threadIdx.x & 31) < WARPS ? scratch[threadIdx.x & 31] : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int step = 16; step; step >>= 1) add(v, step);
  return v;
}

// The sum of a head's parts, in order.
__device__ __forceinline__ void load_gram(Values& s, const float* partials, const HeadGram& head) {
  const u32 lane = threadIdx.x & 31, inside = (threadIdx.x / 32 % 4 * 16 + lane / 4) * 64 + lane % 4 * 2;
  const float* from = partials + (size_t)head.first * BLOCKS * 4096 + inside;
  u32 block[2];
#pragma unroll
  for (u32 b = 0; b < 2; b++) {
    const u32 i = s.at(b).i;
    block[b] = (i * SLABS - i * (i - 1) / 2 + s.at(b).j - i) * 4096;
#pragma unroll
    for (u32 k = 0; k < 16; k++) {
      const float2 v = *(const float2*)(from + block[b] + k % 2 * 512 + k / 2 * 8);
      s.v[b][2 * k] = v.x, s.v[b][2 * k + 1] = v.y;
    }
  }
#pragma unroll 1
  for (u32 part = 1; part < head.count; part++) {
    from += (size_t)head.stride * BLOCKS * 4096;
#pragma unroll
    for (u32 b = 0; b < 2; b++)
#pragma unroll
      for (u32 k = 0; k < 16; k++) {
        const float2 v = *(const float2*)(from + block[b] + k % 2 * 512 + k / 2 * 8);
        s.v[b][2 * k] += v.x, s.v[b][2 * k + 1] += v.y;
        if (k % 2 == 1) __syncwarp();  // not all loads at once: registers
      }
  }
}

// Rows and columns beyond the head hold anything: zeros instead. They come and go eight at a time.
__device__ __forceinline__ void clear_rest(Values& s) {
  constexpr u32 LAST = SLABS - 1, FULL = N / 8 - LAST * 8;
  const u32 thread = thread_anew();
#pragma unroll
  for (u32 b = 0; b < 2; b++) {
    const Place at = place(thread / 128, b);
    if (at.j != LAST) continue;
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
      const bool below = at.i == LAST && thread / 32 % 4 * 2 + i / 2 % 2 >= FULL;
      s.v[b][i] = i / 4 >= FULL || below ? 0.f : s.v[b][i];
    }
  }
}

__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Four 8 x 8 matrices; lane 8 i + j gives the address of row j of matrix i. TURNED: of its column j.
template <bool TURNED> __device__ __forceinline__ void put(u32 address, const u32 (&v)[4]) {
  if (TURNED)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
// X = a (P - c I) in f16, the lower triangle too. Rows beyond the head stay zero. Returns the sum of the squares of what
// rounding changed, where it is MEASURED.
template <bool MEASURED> __device__ __forceinline__ float store(Values& s, u32 x, float a, float c) {
  // Four matrices at a time: m / 2 says which 8 columns, m % 2 which 8 rows. 16 bytes number c of row r lie at place c ^ r % 8.
  const u32 thread = thread_anew();
  const u32 lane = thread & 31, warp = thread / 32 % 4, m = lane / 8, g = lane % 8;
  float lost = 0.f;
  diagonal(s, [&](float& v, u32 i, bool on) { v -= on && i < N ? c : 0.f; });
#pragma unroll
  for (u32 b = 0; b < 2; b++) {
    const Place at = place(thread / 128, b);
    const u32 own = x + at.j * PANEL + (at.i * 64 + warp * 16 + m % 2 * 8 + g) * 128 + ((m / 2 ^ g) << 4);
    const u32 other = x + at.i * PANEL + (at.j * 64 + m / 2 * 8 + g) * 128 + ((2 * warp + m % 2 ^ g) << 4);
    float part = 0.f;
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
      u32 packed[4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float low = s.v[b][4 * j + 2 * i] * a, high = s.v[b][4 * j + 2 * i + 1] * a;
        packed[i] = pack_f16(low, high);
        if (!MEASURED) continue;
        const float less = low - f16_value((u16)packed[i]), more = high - f16_value((u16)(packed[i] >> 16));
        part += less * less, part += more * more;
      }
      put<false>(own ^ j << 4, packed);
      if (!at.diagonal()) put<true>(other + j * 1024, packed);
    }
    lost += (at.diagonal() ? 1.f : 2.f) * part;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  return lost;
}

// P = X X^T.
__device__ __forceinline__ void square(Values& s, u32 x) {
  // Lower halves of the operands' descriptors; the upper one is the same for all.
  const u64 base = ptx::swizzled_operand(x);
  const u32 upper = (u32)(base >> 32);
  const u32 group = thread_anew() / 128;
  u32 left[2], right[2];
#pragma unroll
  for (u32 b = 0; b < 2; b++) {
    // The same in all lanes, and said so: sums of them are made once a warp.
    left[b] = __shfl_sync(0xffffffffu, (u32)base + place(group, b).i * 512, 0);
    right[b] = __shfl_sync(0xffffffffu, (u32)base + place(group, b).j * 512, 0);
    ptx::keep(s.v[b]);
  }
  ptx::wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < SLABS * 4; k++)
#pragma unroll
    for (u32 b = 0; b < 2; b++) {
      const u32 step = (k / 4 * PANEL + k % 4 * 32) / 16;
      ptx::wgmma_f16_64x64x16<false>(s.v[b], (u64)upper << 32 | (left[b] + step), (u64)upper << 32 | (right[b] + step), k > 0);
    }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep(s.v[0]), ptx::keep(s.v[1]);
}

// (trace, squared Frobenius norm) of this thread's values, and `lost`.
__device__ __forceinline__ float4 moments(Values& s, float lost) {
  float trace = 0.f, squares = 0.f;
#pragma unroll
  for (u32 b = 0; b < 2; b++) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (u32 i = 0; i < 32; i++) part[i & 1] += s.v[b][i] * s.v[b][i];
    squares += (s.at(b).diagonal() ? 1.f : 2.f) * (part[0] + part[1]);
  }
  diagonal(s, [&](float& v, u32, bool on) { trace += on ? v : 0.f; });
  return make_float4(trace, squares, lost, 0.f);
}

struct Shift {
  float c, a, top;
};
// For a matrix of trace s1 and squared Frobenius norm s2. Whatever the rounding, the result holds.
__device__ __forceinline__ Shift best_shift(float s1, float s2) {
  const float top = s2 * rsqrtf(s2), room = N * top - s1;
  const float c = room > 1e-5f * s1 ? fmaxf(__fdividef(s1 * top - s2, room), 0.f) : 0.f;
  const float left = fmaxf(s2 - 2.f * c * s1 + (float)N * c * c, 1e-4f * s2);
  return {c, rsqrtf(left), top};
}

// Upper bound of the largest eigenvalue of the matrix in `s`, positive semidefinite but for rounding, of trace about 1. 0 for
// zeros, NaN for NaN. In warp 0.
__device__ __forceinline__ float largest(Values& s, float4 (*scratch)[WARPS], float* chain) {
  extern __shared__ u8 shared[];
  u32 x = ptx::shared_address(shared);
  asm volatile("" : "+r"(x));
  x = (x + 1023) & ~1023u;
  float *shifts = chain, *scales = chain + MOST, *errors = chain + 2 * MOST;
  // Tensor cores: N + 16 aligned terms, each cut off below 2^-23 of the largest.
  const float cut = (N + 16) * 0x1p-23f;
  float4 sums = block_sums<3>(moments(s, 0.f), scratch[0]);
  if (!(sums.y > 0.f && sums.y < 1e30f)) return sums.y == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  Shift shift = best_shift(sums.x, sums.y);
  float part = 1.f - __fdividef(shift.c, shift.top);
  // Of X, whose norm is about 1, beside what rounding it to f16 changes, which is measured.
  float error = 1e-7f + shift.a * 0x1p-22f * (shift.top + shift.c * N);
  float lost = store<true>(s, x, shift.a, shift.c);
  __syncthreads();
  int last = 0;
  for (;; last++) {
    square(s, x);
    sums = block_sums<3>(moments(s, lost), scratch[(last + 1) & 1]);
    if (threadIdx.x == 0) shifts[last] = shift.c, scales[last] = shift.a, errors[last] = error + 1.0001f * sqrtf(sums.z);
    // What the certificate leaves open: lambda(P) lies between s2/s1 and the bound of the head.
    const float mean = sums.x / N, spread = fmaxf((1.f - 1.f / N) * (sums.y - sums.x * mean), 1e-30f);
    const float ratio = __fdividef((mean + spread * rsqrtf(spread)) * sums.x, sums.y);
    if (last == MOST - 1 || !(sums.x > 0.f) || (last >= 1 && 0.5f * part * (ratio - 1.f) < OPEN)) break;
    shift = best_shift(sums.x, sums.y);
    part *= 0.5f * (1.f - __fdividef(shift.c, shift.top));
    error = 1e-7f + shift.a * (0x1p-22f * (shift.top + shift.c * N) + cut * sums.x);
    // Further on less depends on it: 2^-11 of a norm of about 1, and 2^-25 a value below the normal ones, squared.
    store<false>(s, x, shift.a, shift.c);
    error += 1.07f * 0x1p-11f + N * 0x1p-25f, lost = 0.f;
    __syncthreads();
  }
  if (threadIdx.x >= 32) return 0.f;
  __syncwarp();
  // Back through the chain, every step rounded up. The sums are within 1e-5.
  const float s1 = __fmul_ru(sums.x, 1.00001f), s2 = __fmul_ru(sums.y, 1.00001f), low = sums.x * 0.99999f;
  const float spread = fmaxf(__fsub_ru(s2, __fdiv_rd(__fmul_rd(low, low), (float)N)), 0.f);
  float norm = __fadd_ru(__fadd_ru(__fdiv_ru(s1, (float)N), __fsqrt_ru(spread)), __fmul_ru(cut, s1));
  norm = __fsqrt_ru(norm);
#pragma unroll 1
  for (int j = last; j >= 0; j--) {
    norm = __fadd_ru(__fdiv_ru(__fadd_ru(norm, errors[j]), scales[j]), shifts[j]);
    if (j) norm = __fsqrt_ru(norm);
  }
  return norm;
}

__device__ __forceinline__ u32 partner(u32 i, const Shape& s) {
  if (i >= s.rotary) return i;
  return s.interleaved ? i ^ 1 : (i < s.rotary / 2 ? i + s.rotary / 2 : i - s.rotary / 2);
}

struct Room {
  float factor[SIDE], sum[SIDE];
  float4 scratch[2][WARPS];
  float chain[3 * MOST];
  float4 sums;
  float inverse, added;
  u32 head, mean;
};

__device__ __forceinline__ void bound(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats,
                                      const Shape& shape, double* lambdas, u32* status, Room& room) {
  const Job job = jobs[blockIdx.x];
  const bool of_q = job.kind == RAW_Q || job.kind == SCALED_Q, scaled = job.kind >= SCALED_Q, mean = shape.mean && scaled;
  const u32 head = of_q ? job.q : job.k;
  const ChannelStats* own = stats + heads[head].stat_row;
  // Trace, delta^2, ||s||^2 of scaled channels, and their trace with the mean kept. Scaling in factors that cancel
  // between q and k.
  float4 sums = {0.f, 0.f, 0.f, 0.f};
  if (threadIdx.x == 0) room.head = head, room.mean = mean;
  if (const u32 i = threadIdx.x; i < SIDE) {
    float f = i >= N ? 0.f : i < shape.rotary ? shape.rope_factor : 1.f;
    ChannelStats c = {};
    if (i < N) c = own[i];
    if (scaled && i < N) {
      const ChannelStats *q = stats + heads[job.q].stat_row, *k = stats + heads[job.k].stat_row;
      const u32 other = partner(i, shape);
      float tq = q[i].norm2, tk = k[i].norm2;
      if (other != i) tq += q[other].norm2, tk += k[other].norm2;
      const float fourth = tq > 0.f && tk > 0.f ? sqrtf(sqrtf(tk / tq)) : 1.f;  // t^1/2 = (tr k / tr q)^1/4
      f *= of_q ? fourth : 1.f / fourth;
    }
    const float total = mean ? c.sum : 0.f;
    room.factor[i] = f, room.sum[i] = total * (1.f / sqrtf((float)shape.d_model));
    sums = {scaled ? f * f * c.norm2 : 0.f, f * f * c.rounding, f * f * total * total, f * f * c.raw2};
  }
  sums = block_sums<4>(sums, room.scratch[1]);
  const float added = shape.rounding * 0x1p-24f * sums.w, trace = (scaled ? sums.x : sums.w) + N * added;
  // What only the end needs, out of the registers.
  if (threadIdx.x == 0) room.sums = {trace, sums.y, sums.z, mean ? 1.f : 0.f}, room.inverse = 1.f / trace, room.added = added / trace;
  double result = 0.0;
  if (!(trace > 0.f && trace < 3e38f)) {
    result = trace == 0.f ? 0.0 : __longlong_as_double(0x7ff8000000000000ll);
  } else {
    Values s;
    load_gram(s, partials, heads[room.head]);
    __syncthreads();
    if (room.mean)
      each(s, [&](float& low, float& high, u32 row, u32 column) {
        const float2 right = *(const float2*)(room.sum + column);
        const float left = room.sum[row];
        low -= left * right.x, high -= left * right.y;
      });
    if (N % 64) clear_rest(s);
    each(s, [&](float& low, float& high, u32 row, u32 column) {
      const float2 right = *(const float2*)(room.factor + column);
      const float left = room.factor[row] * room.inverse, first = left * right.x, second = left * right.y;
      low *= first, high *= second;
    });
    diagonal(s, [&](float& v, u32 i, bool on) { v += on && i < N ? room.added : 0.f; });
    const float top = largest(s, room.scratch, room.chain);
    if (threadIdx.x) return;
    const float4 kept = room.sums;
    const double lambda = (double)top * kept.x * (1.0 + 0x1p-19);
    const double delta = sqrt((double)kept.y), moved = kept.w * delta / sqrt((double)shape.d_model);
    const double sigma = sqrt(lambda + (2.0 * sqrt((double)kept.z) + delta) * moved) + delta;
    result = sigma * sigma;
  }
  if (threadIdx.x == 0) {
    lambdas[jobs[blockIdx.x].result] = result;
    if (!(result < 1e300)) atomicOr(status, STATUS_NON_FINITE_BOUND);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_bounds_wide(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                      double* lambdas, u32* status) {
  __shared__ __align__(16) Room room;
  bound(jobs, heads, partials, stats, shape, lambdas, status, room);
}
