// Attention the plain way, in f32, to check the fused kernel on any shape: a block per row, every logit kept, nothing tiled.
//
// Operands are E4M3 without gaps: q [batch, len_q, heads_q, d], k [batch, len_k, heads_kv, d], v of d_v dims; descales
// [batch, heads_kv], logit descales [heads_q]. Beside the output it gives what the fused kernel's rounding can do to it,
// with p_j = exp(s_j - max):
//   room = sum_j (p_j / 16 + 2^-17 + p_j slack_j) |v_j| / sum_j p_j + |o| sum_j p_j slack_j / sum_j p_j
// Half a unit in the last place of E4M3 is 1/16 of the value at most, or 2^-10 of P = 2^8 p where P is subnormal; of F16 2^-11, or
// 2^-25 of P. slack_j is
// what an error of kAccumulator sum |q k| in the tensor core's sum does to p_j, also by moving a logit to the next E4M3, and what the
// approximation of tanh does where there is a soft-cap.
#include "attention/mask.cuh"
#include "attention/sequences.cuh"
#include "common/step_stats.cuh"
#include "ptx/convert.cuh"
#include "common/types.cuh"

struct Sizes {
  int batch, heads_q, heads_kv, len_q, len_k, d, d_v;
  int window_left, window_right;  // kNoWindow: no limit
  float softmax_scale, soft_cap;  // 0: no cap
  int flags;                      // 1: logits in E4M3, 2: P in F16
};
static_assert(sizeof(Sizes) == 48, "the host writes this layout");

// Per query head.
struct Extremes {
  u32 max, min;        // ordered(max), ~ordered(min)
  u32 past, close;     // logits past 448 descales for certain, and logits so close that rounding decides
  u32 error;           // bits of the largest error that a logit may have
  u32 amax_o, room;    // bits of the largest |o|, and of the largest room
  u32 unused;
};

namespace {
constexpr int kThreads = 128;
constexpr float kAccumulator = 1.2e-3f;  // measured up to 8.4e-4 where q = k, whose terms all have one sign

__device__ float decode(u8 code) { return ptx::f32_from_f16((u16)ptx::f16x2_from_e4m3x2(code)); }

__device__ float reduce(float x, float* shared, bool maximum) {
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int n = kThreads / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) {
      const float y = shared[threadIdx.x + n];
      shared[threadIdx.x] = maximum ? fmaxf(shared[threadIdx.x], y) : shared[threadIdx.x] + y;
    }
    __syncthreads();
  }
  const float result = shared[0];
  __syncthreads();
  return result;
}
}  // namespace

// grid (len_q, heads_q, batch), 2 len_k floats of dynamic shared memory; `sinks` may be null.
extern "C" __global__ void __launch_bounds__(kThreads)
attention_reference(const u8* q, const u8* k, const u8* v, const float* q_descale, const float* k_descale,
                    const float* v_descale, const float* logit_descale, float* out, float* lse, float* room,
                    float* lse_room, Extremes* extremes, const float* sinks, Sequences sequences, Sizes s) {
  extern __shared__ float p[];
  float* slack = p + s.len_k;
  __shared__ float scratch[kThreads];
  const int row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int kv = head / (s.heads_q / s.heads_kv), at = batch * s.heads_kv + kv;
  const float infinity = __int_as_float(0x7f800000);
  const u8* my_q = q + (((i64)batch * s.len_q + row) * s.heads_q + head) * s.d;
  // The sequence that has the row
  Lengths length = {s.len_q, s.len_k};
  int i_row = row;
  i64 k_first = (i64)batch * s.len_k;
  bool outside = false;
  if (sequences.q_starts != nullptr) {
    const int axis = batch * s.len_q + row;
    int i = 0;
    while (i < sequences.count && !(sequences.q_starts[i] <= axis && axis < sequences.q_ends[i])) i++;
    outside = i == sequences.count;
    if (!outside) {
      length = {sequences.q_ends[i] - sequences.q_starts[i], sequences.k_ends[i] - sequences.k_starts[i]};
      i_row = axis - sequences.q_starts[i];
      k_first = sequences.k_starts[i];
    }
  }
  const int first_key = max(0, first_visible(length, i_row, s.window_left));
  const int keys = outside ? 0 : max(0, min(length.k - 1, last_visible(length, i_row, s.window_right)) + 1 - first_key);
  k_first += first_key;
  const float scale = s.softmax_scale * q_descale[at] * k_descale[at];

  // Logits
  float top = -infinity, low = infinity, error = 0;
  u32 past = 0, close = 0;
  for (int j = threadIdx.x; j < keys; j += kThreads) {
    const u8* my_k = k + ((k_first + j) * s.heads_kv + kv) * s.d;
    float x = 0, mass = 0;
    for (int i = 0; i < s.d; i++) {
      const float term = decode(my_q[i]) * decode(my_k[i]);
      x += term;
      mass += fabsf(term);
    }
    x *= scale;
    float e = kAccumulator * mass * scale;
    top = fmaxf(top, x);
    low = fminf(low, x);
    error = fmaxf(error, e);
    if (s.soft_cap > 0.0f) {
      x = s.soft_cap * tanhf(x / s.soft_cap);
      e += (s.flags & 2) ? 1e-6f * s.soft_cap : 6e-4f * fabsf(x);
    }
    slack[j] = expm1f(e);
    if ((s.flags & 1)) {
      const float descale = logit_descale[head], u = x / descale, margin = e / descale + 1e-4f;
      past += fabsf(u) > 448.0f + margin;
      close += fabsf(fabsf(u) - 448.0f) <= margin;
      x = decode((u8)ptx::e4m3x2(u, 0.0f)) * descale;
      const float below = decode((u8)ptx::e4m3x2(u - margin, 0.0f)), above = decode((u8)ptx::e4m3x2(u + margin, 0.0f));
      slack[j] = expm1f((above - below) * descale);
    }
    p[j] = x;
  }
  if (past) atomicAdd(&extremes[head].past, past);
  if (close) atomicAdd(&extremes[head].close, close);
  atomicMax(&extremes[head].error, __float_as_uint(error));
  top = reduce(top, scratch, true);
  low = -reduce(-low, scratch, true);
  if (threadIdx.x == 0 && keys > 0) {
    atomicMax(&extremes[head].max, ordered(top));
    atomicMax(&extremes[head].min, ~ordered(low));
  }

  // Softmax
  float largest = -infinity, sum = 0, loose = 0;
  for (int j = threadIdx.x; j < keys; j += kThreads) largest = fmaxf(largest, p[j]);
  largest = reduce(largest, scratch, true);
  for (int j = threadIdx.x; j < keys; j += kThreads) {
    p[j] = expf(p[j] - largest);
    sum += p[j];
    loose += p[j] * slack[j];
  }
  sum = reduce(sum, scratch, false);
  loose = reduce(loose, scratch, false);
  const float sink = sinks != nullptr && !outside ? sinks[head] : -infinity;
  if (keys > 0) sum += expf(sink - largest), loose /= sum;
  else loose = 0.0f;
  if (threadIdx.x == 0) {
    const i64 to = ((i64)batch * s.heads_q + head) * s.len_q + row;
    lse[to] = keys > 0 ? largest + logf(sum) : sink;
    lse_room[to] = loose;
  }

  // Values
  for (int i = threadIdx.x; i < s.d_v; i += kThreads) {
    float o = 0, r = 0;
    for (int j = 0; j < keys; j++) {
      const float x = decode(v[((k_first + j) * s.heads_kv + kv) * s.d_v + i]) * v_descale[at];
      o += p[j] * x;
      r += ((s.flags & 2) ? p[j] * 0x1p-11f + 0x1p-32f : p[j] / 16 + 0x1p-17f) * fabsf(x) + p[j] * slack[j] * fabsf(x);
    }
    const i64 to = (((i64)batch * s.len_q + row) * s.heads_q + head) * s.d_v + i;
    o = keys > 0 ? o / sum : 0.0f;
    r = keys > 0 ? r / sum + fabsf(o) * loose : 0.0f;
    out[to] = o;
    room[to] = r;
    atomicMax(&extremes[head].amax_o, __float_as_uint(fabsf(o)));
    atomicMax(&extremes[head].room, __float_as_uint(r));
  }
}

// What a comparison found.
struct Verdict {
  u32 wrong_out;   // elements off by more than their room, or not finite
  u32 wrong_lse;
  u32 guard;       // words past the end of the output or the LSE that changed
  u32 worst;       // bits of the largest |o - reference| / room
  float error2, reference2;  // sums of squares
};

// o: BF16 bits or E4M3 codes by [batch, heads_kv] descales, followed by `guards` words of `poison`, as is lse.
extern "C" __global__ void __launch_bounds__(kThreads)
compare(const void* o, int e4m3, const float* o_descale, const float* out, const float* room, const float* lse,
        const float* reference_lse, const float* lse_room, u32 poison, Verdict* verdict, Sizes s) {
  const i64 elements = (i64)s.batch * s.len_q * s.heads_q * s.d_v, rows = (i64)s.batch * s.heads_q * s.len_q;
  const i64 first = (i64)blockIdx.x * kThreads + threadIdx.x, step = (i64)gridDim.x * kThreads;
  u32 wrong = 0, worst = 0, wrong_lse = 0, guard = 0;
  float error2 = 0, reference2 = 0;
  for (i64 i = first; i < elements; i += step) {
    float x, rounding, want = out[i];
    if (e4m3) {
      const int head = i / s.d_v % s.heads_q, batch = i / s.d_v / s.heads_q / s.len_q;
      const float descale = o_descale[batch * s.heads_kv + head / (s.heads_q / s.heads_kv)];
      x = decode(((const u8*)o)[i]) * descale;
      want = fminf(fmaxf(want, -448.0f * descale), 448.0f * descale);
      rounding = fabsf(want) / 16 + descale * 0x1p-10f;
    } else {
      x = ptx::f32_from_bf16(((const u16*)o)[i]);
      rounding = fabsf(want) / 256;
    }
    const float allowed = room[i] * 1.05f + rounding * 1.1f + 1e-30f, e = fabsf(x - want);
    wrong += !(e <= allowed);
    worst = max(worst, __float_as_uint(e / allowed));
    error2 += e * e;
    reference2 += want * want;
  }
  for (i64 i = first; i < rows; i += step) {
    const float a = lse[i], b = reference_lse[i];
    wrong_lse += !(a == b || fabsf(a - b) <= lse_room[i] + 1e-4f + 1e-5f * fabsf(b));
  }
  constexpr int kGuards = 64;
  if (first < kGuards) {
    const u32* end = (const u32*)((const u8*)o + elements * (e4m3 ? 1 : 2));
    guard += end[first] != poison;
    guard += ((const u32*)lse)[rows + first] != poison;
  }
  if (wrong) atomicAdd(&verdict->wrong_out, wrong);
  if (wrong_lse) atomicAdd(&verdict->wrong_lse, wrong_lse);
  if (guard) atomicAdd(&verdict->guard, guard);
  atomicMax(&verdict->worst, worst);
  atomicAdd(&verdict->error2, error2);
  atomicAdd(&verdict->reference2, reference2);
}

extern "C" __global__ void __launch_bounds__(kThreads) fill(u32* words, u32 value, u32 count) {
  const u32 i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) words[i] = value;
}
