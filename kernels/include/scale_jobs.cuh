// What a certified eigenvalue is asked of, and how a head's Gram becomes the matrix that is squared:
//   RAW_Q, RAW_K     G as it is (mean kept): sigma_Q^2, sigma_K^2
//   SCALED_Q, _K     F G_Q F and F^-1 G_K F^-1, f_b = (tr G_K,bb / tr G_Q,bb)^1/4 (rotation)
// G + e I stands for G, e = c 2^-24 tr G (mean kept) covering every rounding of its sums; G and e are those of the scaled
// channels, since an entry errs by c 2^-24 ||w_i|| ||w_j|| at most. What rounding took from channel i before, delta_i, enters
// by R = sum delta_i^2, sigma(exact) <= sqrt(lambda + R) + sqrt(R): this holds whether one side of the products that made the
// Gram was rounded or both. Sums s_i over the model dimension are those of exact channels; that moves G - s s^T/d by at
// most (2 ||s|| + sqrt(d) delta) delta / sqrt(d). An all-zero matrix gives 0, NaN gives NaN.
#pragma once
#include "scale_chain.cuh"
#include "scale_segments.cuh"

// What a certificate may leave open, of lambda. Norms as they are too: their product is sigma where it is the smaller one.
constexpr float OPEN = 0.001f;

enum : u32 { RAW_Q = 0, RAW_K = 1, SCALED_Q = 2, SCALED_K = 3 };

struct Job {
  u32 kind;
  u32 q, k;    // heads in the Gram table; RAW jobs use the one they name
  u32 result;  // where lambda goes
  __device__ __forceinline__ bool of_q() const { return kind == RAW_Q || kind == SCALED_Q; }
  __device__ __forceinline__ bool scaled() const { return kind >= SCALED_Q; }
};
struct Shape {
  u32 rotary, interleaved, mean, d_model;  // mean: 1 if the norm removes it
  float rope_factor;
  float rounding;                          // c
  u32 one_sided;                           // 1: one side of the products that made the Grams was rounded, 0: both
  u32 beside;                              // see `only_waits`
  u32 heads, group;                        // query heads of all layers, those of a KV head
  u32 asked;                               // 1: matrices as they are, which are squared only where `worthwhile`
  u32 pad;
};
static_assert(sizeof(Job) == 16 && sizeof(Shape) == 48, "host mirror");

// Waits for the launch in front and lets the next one start. `beside`: that launch leaves what is read here as it is, and let
// this one start only when all of that was there. Then nothing is waited for but by one block more than there are jobs, to
// which this returns true: so who waits for this launch waits for that one too.
__device__ __forceinline__ bool only_waits(const Shape& shape) {
  const bool last = shape.beside && blockIdx.x + 1 == gridDim.x;
  if (last) let_next_start();
  if (last || !shape.beside) wait_for_previous();
  if (!last) let_next_start();
  return last;
}

// Parts of Grams: the upper 64 x 64 blocks one after another, row-major.
constexpr u32 GRAM_SIDE = (spectrum::N + 63) / 64, GRAM_BLOCKS = GRAM_SIDE * (GRAM_SIDE + 1) / 2;

__device__ __forceinline__ u32 partner(u32 i, const Shape& s) {
  if (i >= s.rotary) return i;
  return s.interleaved ? i ^ 1 : (i < s.rotary / 2 ? i + s.rotary / 2 : i - s.rotary / 2);
}

// What is known of a channel, loaded ahead and without a branch, so that the Gram's loads follow at once.
struct Known {
  float4 norms, sums;              // the channel's own: norm2, raw2, pair, constant; absolute, sum, rounding, -
  float q, k, q_other, k_other;    // norm^2 of it and of the other of its rotation pair
};
__device__ __forceinline__ Known known_of(u32 i, const Job& job, const ChannelStats* q, const ChannelStats* k, const Shape& shape) {
  const ChannelStats* own = (job.of_q() ? q : k) + i;
  const u32 other = partner(i, shape);
  return {*(const float4*)own, *((const float4*)own + 1), q[i].norm2, k[i].norm2, q[other].norm2, k[other].norm2};
}
__device__ __forceinline__ Known known_of(u32 i, const Job& job, const HeadGram& of_q, const HeadGram& of_k, const ChannelStats* stats, const Shape& shape) {
  return known_of(i, job, stats + of_q.stat_row, stats + of_k.stat_row, shape);
}

// One channel of a job: what its row and column of the Gram are multiplied by, its sum where the mean is removed, and its
// share of the totals.
struct Channel {
  float factor, sum;
  float trace, raw, lost, mean;  // norm^2, with the mean kept, R, sum^2, scaled
  float longest;                 // norm^2 with the mean kept, not scaled
};
__device__ __forceinline__ Channel channel_of(u32 i, const Known& known, const Job& job, const Shape& shape) {
  float f = i < shape.rotary ? shape.rope_factor : 1.f;
  const float longest = f * f * known.norms.y;
  // t = sqrt(tr k / tr q) of the pair, in powers that cancel between q and k.
  const float q = i < shape.rotary ? known.q + known.q_other : known.q, k = i < shape.rotary ? known.k + known.k_other : known.k;
  if (job.scaled() && q > 0.f && k > 0.f) {
    const float t2 = k * spectrum::inverse(q), t = t2 * spectrum::inverse_root(t2), half = t * spectrum::inverse_root(t);
    f *= job.of_q() ? half : spectrum::inverse(half);
  }
  const float f2 = f * f, sum = job.scaled() && shape.mean ? known.sums.y : 0.f;
  return {f, sum, f2 * (job.scaled() ? known.norms.x : known.norms.y), f2 * known.norms.y, f2 * known.sums.z, f2 * sum * sum, longest};
}

// Sums over the channels.
struct Totals {
  float trace, raw, lost, mean;
  // e
  __device__ __forceinline__ float added(const Shape& shape) const { return shape.rounding * 0x1p-24f * raw; }
};

// sigma^2 of the exact channels from the certificate of their Gram, every step rounded up.
__device__ __forceinline__ float exact_lambda(float lambda, const Totals& totals, const Shape& shape) {
  const float lost = totals.lost * (1.f + 0x1p-20f), delta = spectrum::root_above(lost);
  const float sums = __fadd_ru(2.f * spectrum::root_above(totals.mean * (1.f + 0x1p-20f)), delta);
  const float moved = shape.mean ? __fmul_ru(__fmul_ru(sums, delta), spectrum::inverse_root((float)shape.d_model) * (1.f + 0x1p-20f)) : 0.f;
  // Factors and channel sums in f32: within 2^-19.
  const float before = __fadd_ru(__fmul_ru(lambda, 1.f + 0x1p-19f), __fadd_ru(moved, lost));
  const float sigma = __fadd_ru(spectrum::root_above(before), delta);
  return __fmul_ru(sigma, sigma);
}

// Whether sigma_Q sigma_K can be below the scaled product, as the scaled matrices tell. By the three-lines theorem
// g(t) = log sigma(W_Q F^t) + log sigma(W_K F^-t) is convex, so that
//   g(0) >= g(1) - g'(1),   g'(1) = sum_i (v_Q,i^2 - v_K,i^2) log f_i,   v the top eigenvectors of the scaled Grams.
// The diagonal of the last product of a chain, over its trace, stands for v^2: the weights of a Schatten norm, which is as
// convex. And sigma(W) is at least the length of its longest channel. Nothing that is sound depends on either.
struct Lean {
  float slope;  // log2 of sigma by t
  float room;   // log2 of the scaled sigma over the longest channel as it is
};
constexpr u64 NOT_YET = ~0ull;
// What sigma may lose, in log2: 0.15 %, and 0.3 % of smaller heads, whose Grams leave less open. Flat heads lose 0.005 % on
// average.
constexpr float WORTH = (spectrum::N > 64 ? 0.0015f : 0.003f) * 1.442695f;

// Leans of the query heads, then of their keys. One thread; the word is all that its readers wait for.
__device__ __forceinline__ void put_lean(u64* leans, const Job& job, const Shape& s, float slope, float room) {
  if (!leans) return;
  const u32 high = slope == slope ? __float_as_uint(slope) : 0x7fc00000u;  // never NOT_YET
  const u64 word = (u64)high << 32 | __float_as_uint(room);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(leans + job.result - s.heads - s.heads / s.group), "l"(word) : "memory");
}
// This thread's part of g'(1): the diagonal entry of channel i, whose factor is given, over the trace.
__device__ __forceinline__ float slope_of(float entry, float factor, u32 i, const Shape& s) {
  return entry * (__log2f(factor) - (i < s.rotary ? __log2f(s.rope_factor) : 0.f));
}
__device__ __forceinline__ float room_of(float lambda, float longest) { return 0.5f * __log2f(lambda * spectrum::inverse(longest)); }

// Of a matrix as it is, all threads of a block: false if no head that it serves can win by it. Waits for the scaled ones of
// these heads, which run already, or have: the launch in front let this one start.
__device__ __forceinline__ bool worthwhile(const u64* leans, u32 kind, u32 result, const Shape& s) {
  auto lean = [](const u64* at) {
    u64 word;
    for (;;) {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
      if (word != NOT_YET) return Lean{__uint_as_float((u32)(word >> 32)), __uint_as_float((u32)word)};
      __nanosleep(200);
    }
  };
  const u32 first = kind == RAW_K ? (result - s.heads) * s.group : result, count = kind == RAW_K ? s.group : 1;
  bool wins = false;
  for (u32 h = first + threadIdx.x; h < first + count; h += blockDim.x) {
    const Lean q = lean(leans + h), k = lean(leans + s.heads + h);
    // What is not a number has to be seen.
    wins |= !(q.slope + k.slope <= WORTH || q.room + k.room <= WORTH);
  }
  return __syncthreads_or(wins);
}
// What stands for the square of a norm that nobody asked for.
__device__ __forceinline__ double unasked() { return __longlong_as_double(0x7ff0000000000000ll); }

__device__ __forceinline__ void put_lambda(double* to, double value, u32* status) {
  *to = value;
  if (!(value < 1e300)) atomicOr(status, STATUS_NON_FINITE_BOUND);
}
