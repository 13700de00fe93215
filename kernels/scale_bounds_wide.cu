// Certified largest eigenvalues of the matrices that a logit bound is made of (include/scale_jobs.cuh), for heads of more than
// 128 channels (macro D_HEAD). Hopper: a block a job, a warpgroup two 64 x 64 blocks of the upper triangle; the matrix lies in
// shared memory once, in f16.
#include "scale_jobs.cuh"
#include "scale_lift.cuh"
#include "scale_ptx.cuh"

using namespace spectrum;

// What a certificate may leave open, of lambda: products of this size cost more than they do at 128 channels.
constexpr float WIDE_OPEN = 0.002f;

constexpr u32 SLABS = GRAM_SIDE, SIDE = SLABS * 64, BLOCKS = GRAM_BLOCKS;
constexpr u32 PANEL = SIDE * 128, X_BYTES = SLABS * PANEL;  // 64 columns, rows of 128 bytes
constexpr u32 THREADS = BLOCKS / 2 * 128, WARPS = THREADS / 32;
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
  ptx::async_fence();
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

struct Room {
  float factor[SIDE], sum[SIDE];
  float4 scratch[2][WARPS];
  uint3 ends[WARPS];  // bits of the smallest and largest diagonal entry, and of the largest as it is
  Links links;
  Totals totals;
  float inverse, added;  // 1 / trace, and the allowance of S
  u32 head, mean;
};

// Upper bound of the largest eigenvalue of the matrix in `s`, positive semidefinite but for rounding, of trace about 1. 0 for
// zeros, NaN for NaN. In thread 0.
__device__ __forceinline__ float largest(Values& s, Room& room) {
  extern __shared__ u8 shared[];
  u32 x = ptx::shared_address(shared);
  asm volatile("" : "+r"(x));
  x = (x + 1023) & ~1023u;
  float4 sums = block_sums<3>(moments(s, 0.f), room.scratch[0]);
  if (!(sums.y > 0.f && sums.y < 1e30f)) return sums.y == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  const u32 lane = threadIdx.x & 31;
  const uint3 ends = lane < WARPS ? room.ends[lane] : make_uint3(0x7f800000u, 0u, 0u);
  const float low = __uint_as_float(__reduce_min_sync(0xffffffffu, ends.x)) * room.inverse;
  const float high = __uint_as_float(__reduce_max_sync(0xffffffffu, ends.y)) * room.inverse;
  Chain chain;
  chain.first(sums.x, sums.y, low, high, room.links);
  // What rounding the first X changes is measured: flat heads of this size need it. The rest is f32 arithmetic.
  if (threadIdx.x == 0) room.links.error[0] = 1e-7f + chain.scale * 0x1p-22f * (sqrtf(sums.y) + chain.shift * N);
  float lost = store<true>(s, x, chain.scale, chain.shift);
  __syncthreads();
#pragma unroll 1
  for (u32 turn = 1;; turn ^= 1) {
    square(s, x);
    sums = block_sums<3>(moments(s, lost), room.scratch[turn]);
    if (threadIdx.x == 0) room.links.error[0] += 1.0001f * sqrtf(sums.z);
    if (!chain.go_on(sums.x, sums.y, WIDE_OPEN, room.links)) break;
    store<false>(s, x, chain.scale, chain.shift), lost = 0.f;
    __syncthreads();
  }
  return threadIdx.x == 0 ? chain.certificate(sums.x, sums.y, room.links) : 0.f;
}

__device__ __forceinline__ void bound(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats,
                                      const Shape& shape, double* lambdas, u64* leans, u32* status, Room& room) {
  float trace;
  {
    const Job job = jobs[blockIdx.x];
    Channel own = {};
    const u32 i = threadIdx.x;
    if (i < N) own = channel_of(i, known_of(i, job, heads[job.q], heads[job.k], stats, shape), job, shape);
    if (i < SIDE) room.factor[i] = own.factor, room.sum[i] = own.sum * (1.f / sqrtf((float)shape.d_model));
    // Not negative, so that their bits are in order.
    const u32 least = __reduce_min_sync(0xffffffffu, i < N ? __float_as_uint(own.trace) : 0x7f800000u);
    const u32 most = __reduce_max_sync(0xffffffffu, __float_as_uint(own.trace));
    const u32 longest = __reduce_max_sync(0xffffffffu, __float_as_uint(own.longest));
    if (i % 32 == 0) room.ends[i / 32] = make_uint3(least, most, longest);
    if (i == 0) room.head = job.of_q() ? job.q : job.k, room.mean = shape.mean && job.scaled();
    const float4 sums = block_sums<4>(make_float4(own.trace, own.raw, own.lost, own.mean), room.scratch[1]);
    const Totals totals = {sums.x, sums.y, sums.z, sums.w};
    const float added = totals.added(shape);
    trace = totals.trace + N * added;
    // What only the end needs, out of the registers.
    if (i == 0) room.totals = totals, room.inverse = 1.f / trace, room.added = added / trace;
  }
  float lambda = trace == 0.f ? 0.f : __uint_as_float(0x7fc00000u), slope = lambda;
  if (trace > 0.f && trace < 3e38f) {
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
    lambda = largest(s, room);
    if (threadIdx.x == 0 && lambda > 0.f) {
      const Totals totals = room.totals;
      lambda = exact_lambda(__fmul_ru(lambda, totals.trace + N * totals.added(shape)), totals, shape);
    }
    if (leans && jobs[blockIdx.x].scaled()) {
      float4 sums = make_float4(0.f, 0.f, 0.f, 0.f);
      diagonal(s, [&](float& x, u32 i, bool on) {
        if (on && i < N) sums.x += slope_of(x, room.factor[i], i, shape), sums.y += x;
      });
      __syncthreads();  // the sums before may still be read
      sums = block_sums<3>(sums, room.scratch[0]);
      slope = sums.x * inverse(sums.y);
    }
  }
  if (threadIdx.x) return;
  const Job job = jobs[blockIdx.x];
  if (leans && job.scaled()) {
    u32 longest = 0;
    for (u32 w = 0; w < WARPS; w++) longest = max(longest, room.ends[w].z);
    // Of zeros there is nothing to win.
    const float space = lambda == 0.f ? 0.f : room_of(lambda, __uint_as_float(longest));
    put_lean(leans, job, shape, lambda == 0.f ? 0.f : slope, space);
  }
  put_lambda(lambdas + job.result, lambda, status);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_bounds_wide(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                      double* lambdas, u64* leans, u32* status) {
  __shared__ __align__(16) Room room;
  if (only_waits(shape)) return;
  if (shape.asked) {
    const Job job = jobs[blockIdx.x];
    if (!worthwhile(leans, job.kind, job.result, shape)) {
      if (threadIdx.x == 0) lambdas[job.result] = unasked();
      return;
    }
  }
  bound(jobs, heads, partials, stats, shape, lambdas, leans, status, room);
}

// The end of `scale_products_pairs`: norms of products from their H, which lie as Grams do. A block a product.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_products_end(const float* products, const Unfinished* unfinished, double* lambdas, u32* status) {
  __shared__ __align__(16) Room room;
  const Unfinished job = unfinished[blockIdx.x];
  float top = job.trace == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  if (job.fine && job.trace > 0.f && job.trace < 3e38f) {
    Values s;
    load_gram(s, products, {blockIdx.x, 0, 1, 0});
    const float inverse = 1.f / job.trace;
#pragma unroll
    for (u32 b = 0; b < 2; b++)
#pragma unroll
      for (u32 i = 0; i < 32; i++) s.v[b][i] *= inverse;
    // Nothing is known of the ends of its spectrum.
    if (threadIdx.x < WARPS) room.ends[threadIdx.x] = {0, 0, 0};
    if (threadIdx.x == 0) room.inverse = 1.f;
    __syncthreads();
    top = __fmul_ru(largest(s, room) * (1.f + 0x1p-21f), job.trace);
  }
  if (threadIdx.x == 0) put_product(lambdas + job.result, job.fine, top, job.slack, job.grown, job.traces, status);
}
