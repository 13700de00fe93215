// Certified largest eigenvalues of the matrices that logit bounds are made of (scale/matrices.cuh), one block per matrix,
// for any d_head (macro D_HEAD) and device. Contract: `lambdas[task.result]` is never below the exact square of the norm;
// infinite where a raw norm was skipped; NaN where a value is not finite, with the status set.
#include "common/warp.cuh"
#include "scale/symmetric.cuh"
#include "scale/matrices.cuh"

using namespace spectrum;

// Estimated slack at which squaring stops, of lambda; a fifth of it is left on average. Under rotation raw norms matter only where
// their product is the smaller bound, which is rare; without it they meet roundings alone. Squarings above 128 channels are
// expensive.
constexpr float SLACK = N > 128 ? 0.002f : 0.0015f, RAW_SLACK = N > 128 ? 0.002f : 0.003f, ROUNDING_SLACK = 0.02f;
constexpr float TRACE = 16.f;  // of S: its values are normal numbers of F16
static_assert(THREADS >= N && SIDE * SIDE * 2 + 1024 <= 132096, "host's numbers");

// What a block knows of its matrix beside the values: registers are short.
struct Scratch {
  float factor[SIDE], sum[SIDE];
  uint2 moments[WARPS];
  float4 totals_of_warp[WARPS];
  uint2 ends_of_warp[WARPS];  // bits of the smallest and the largest diagonal entry
  u32 changed[WARPS];
  ChainRecord record;
  Totals totals;
  float trace, to_trace, added;  // of G + e I; TRACE over it; e TRACE over it
  float low, high;               // ends of the diagonal of S
  float slack;                   // at which squaring stops
  u32 mean;                      // 1: it is to be removed
};

// The largest eigenvalue of S, positive semidefinite but for rounding, of trace about TRACE; thread 0 has it.
__device__ __forceinline__ float largest(Values& s, u32 x, Scratch& scratch) {
  bool finite = true;
  Moments m = moments<(int)TRACE * 2>(s, scratch.moments, finite, true);
  if (!finite) return __uint_as_float(0x7fc00000u);
  // Each thread may have had nearly half a unit of squares.
  if (m.squares == 0.f) return 1.0001f * (N > 128 ? 0x1p-6f : 0x1p-8f);
  Chain chain;
  chain.start(m.trace, m.squares, scratch.low, scratch.high, scratch.record);
  if (N > 128) {
    // The bound of the first rounding is too wide for flat spectra of this size: the rounding itself is measured, in units of 2^-53.
    const float changed = store<true>(s, x, chain.scale, chain.shift) * chain.scale * chain.scale;
    const u32 units = ptx::warp_sum(__float2uint_rn(changed * 0x1p53f) + 1);
    const u32 thread = ptx::thread_index();
    if (thread % 32 == 0) scratch.changed[thread / 32] = units;
    if (thread == 0)
      scratch.record.error[0] = 1e-7f + (chain.scale < 1.f ? N * 0x1p-25f : 0.f) + chain.scale * 0x1p-22f * (sqrtf(m.squares) + chain.shift * N);
  } else {
    store<false>(s, x, chain.scale, chain.shift);
  }
#pragma unroll 1
  for (;;) {
    square(s, x);
    m = moments<2>(s, scratch.moments, finite, false);
    if (!chain.next(m.trace, m.squares, scratch.slack, scratch.record)) break;
    store<false>(s, x, chain.scale, chain.shift);
  }
  if (ptx::thread_index()) return 0.f;
  if (N > 128) {
    float changed = 0.f;
    for (u32 w = 0; w < WARPS; w++) changed += (float)scratch.changed[w] * 0x1p-53f;
    scratch.record.error[0] += 1.0001f * sqrtf(changed);
  }
  return chain.certificate(m.trace, m.squares, scratch.record);
}

extern "C" __global__ void __launch_bounds__(THREADS, !HOPPER || N > 128 ? 1 : N > 64 ? 4 : 6)
    scale_eigenvalues(const Task* tasks, const float* partials, const float* matrices, const Product* products, const ChannelStats* stats,
                 Shape shape, double* lambdas, u32* status) {
  extern __shared__ u8 memory[];
  __shared__ __align__(16) Scratch scratch;
  const Task task = tasks[blockIdx.x];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const bool product = task.kind == PRODUCT;
  if (task.group && skips_raw(task, stats, shape)) {
    if (threadIdx.x == 0) lambdas[task.result] = __longlong_as_double(0x7ff0000000000000ll);
    return;
  }
  Values s;
  // These loads overlap those of the statistics where registers allow it.
  if (N <= 128) load(s, product ? matrices : partials, task.first, task.stride, task.count);
  {
    // A thread per channel.
    const u32 i = threadIdx.x;
    Channel own = {};
    if (product) own = {1.f, 0.f, products[task.first].trace * (1.f / N), 0.f, 0.f, 0.f};
    else if (i < N) own = channel_of(i, task, stats, shape);
    if (i >= N) own = {};
    if (i < SIDE) scratch.factor[i] = own.factor, scratch.sum[i] = own.sum;
    const u32 bits = __float_as_uint(own.trace);  // not negative, so in order
    const u32 least = __reduce_min_sync(0xffffffffu, i < N ? product ? 0 : bits : 0x7f800000u);
    const u32 most = __reduce_max_sync(0xffffffffu, product ? 0 : bits);
    const float4 totals = make_float4(warp_sum(own.trace), warp_sum(own.raw), warp_sum(own.lost), warp_sum(own.mean));
    if (i % 32 == 0)
      scratch.totals_of_warp[i / 32] = totals, scratch.ends_of_warp[i / 32] = make_uint2(least, most);
    __syncthreads();
  }
  if (N > 128) load(s, product ? matrices : partials, task.first, task.stride, task.count);
  if (ptx::thread_index() == 0) {
    Totals t = {};
    uint2 ends = scratch.ends_of_warp[0];
#pragma unroll 1
    for (u32 w = 0; w < SIDE / 32; w++) {
      const float4 of_warp = scratch.totals_of_warp[w];
      t.trace += of_warp.x, t.raw += of_warp.y, t.lost += of_warp.z, t.mean += of_warp.w;
      ends.x = min(ends.x, scratch.ends_of_warp[w].x), ends.y = max(ends.y, scratch.ends_of_warp[w].y);
    }
    const float added = t.added(shape), trace = t.trace + N * added, to_trace = TRACE * rcp_approx(trace);
    scratch.totals = t, scratch.trace = trace, scratch.to_trace = to_trace, scratch.added = added * to_trace;
    scratch.low = __uint_as_float(ends.x) * to_trace, scratch.high = __uint_as_float(ends.y) * to_trace;
    scratch.slack = product || task.scaled() ? SLACK : shape.rotary ? RAW_SLACK : ROUNDING_SLACK, scratch.mean = shape.mean && task.scaled();
  }
  __syncthreads();
  float top = scratch.trace <= 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  if (scratch.trace > 0.f && scratch.trace < 3e38f) {
    if (N % 64) clear_outside(s);
    if (scratch.mean) {
      const float per = 1.f / shape.d_model;
      for_each(s, [&](float& low, float& high, u32 row, u32 column) {
        const float2 right = *(const float2*)(scratch.sum + column);
        const float left = scratch.sum[row] * per;
        low -= left * right.x, high -= left * right.y;
      });
    }
    for_each(s, [&](float& low, float& high, u32 row, u32 column) {
      const float2 right = *(const float2*)(scratch.factor + column);
      const float left = scratch.factor[row] * scratch.to_trace;
      low *= left * right.x, high *= left * right.y;
    });
    for_diagonal(s, [&](float& v, u32 i, bool on) { v += on && i < N ? scratch.added : 0.f; });
    const u32 x = (ptx::shared_address(memory) + 1023) & ~1023u;
    clear_rows(x);
    top = __fmul_ru(largest(s, x, scratch), scratch.trace / TRACE);
  }
  if (ptx::thread_index()) return;
  const Task own = tasks[ptx::block_index()];
  if (own.kind == PRODUCT) put_product(lambdas + own.result, products[own.first], top, status);
  else put_lambda(lambdas + own.result, scratch.trace == 0.f ? 0.0 : exact_lambda(top, scratch.totals, shape), status);
}
