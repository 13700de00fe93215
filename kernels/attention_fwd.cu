// Fused attention forward on E4M3 operands: O = softmax(scale Q K^T) V for Hopper (sm_90a).
//
// One producer warp feeds shared memory through TMA; each consumer warpgroup owns 64 query rows of one head. The grid is
// persistent: tiles come from a counter, longest first. A consumer follows one of two schedules:
//  ahead (two consumers, 128 keys): the logits of tile j + 1 go to a second set of accumulators during the exponentials of
//    tile j; P V of tile j is issued in parts as P is ready, and the maxima of tile j + 1 are looked for meanwhile.
//  turns (any other tile): the logits of tile j + 1 and P V of tile j are issued together, the consumers taking turns, and
//    the softmax of j + 1 runs while P V is on the tensor cores.
//
// Operands: Q, K by TMA from any [batch, length, heads, dim] strides. V in the layout that `cast_qkv` writes:
// [batch, kv head, ceil(keys / 16), dim / 8, 8, 16] bytes, where byte 4 t + e of a group of 16 keys holds key
// 8 (e / 2) + 2 t + e % 2. That is the K-major core-matrix order of `wgmma`, and its key order makes the accumulator
// registers of the logits the operand registers of P.
//
// Numbers: P = 2^(8 + logit - reference), where the reference is a row's running maximum: P never passes 256, and the largest
// is exact. O is rescaled only by warps whose maximum moved. Row sums take the unrounded values in f32.
// NOTES: the tensor core's FP8 accumulator is narrower than f32. Every FLUSH_KEYS keys it is added to an f32 O in shared
// memory and starts again from zero, so that its own error does not grow with the number of keys.
#include "barrier.cuh"
#include "convert.cuh"
#include "launch.cuh"
#include "math.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "wgmma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef Q_STAGES
#define Q_STAGES 2
#endif
#ifndef K_STAGES
#define K_STAGES 3
#endif
#ifndef V_STAGES
#define V_STAGES 3
#endif
#ifndef FLUSH_KEYS
#define FLUSH_KEYS 2048
#endif
#ifndef OUT_E4M3
#define OUT_E4M3 0
#endif
#ifndef TELEMETRY
#define TELEMETRY 0
#endif
// 1: logits go through E4M3 by a logit descale per query head.
#ifndef LOGITS_E4M3
#define LOGITS_E4M3 0
#endif

// 1: the schedule `ahead`, 0: `turns`. Not the default, though faster: it has been compared on eight shapes only, and not
// under the sanitizer.
#ifndef AHEAD
#define AHEAD 0
#endif
static_assert(!AHEAD || (CONSUMERS == 2 && BLOCK_N == 128 && !TELEMETRY && !LOGITS_E4M3), "what `ahead` is written for");

// Written by the host byte for byte; strides count elements.
struct Telemetry {
  u32 max_logit;   // ordered(max)
  u32 min_logit;   // ~ordered(min): initialise all four words with zero
  u32 amax_o;      // bits of max |O|
  u32 overflow;    // logits with |x / descale| > 448
};
struct Params {
  void* o;
  float* lse;                    // [batch, heads_q, len_q] or null
  const float* q_descale;
  const float* k_descale;
  const float* v_descale;
  const float* o_descale;        // E4M3 output only
  const float* logit_descale;    // [heads_q], E4M3 logits only
  Telemetry* telemetry;          // [heads_q]
  u32* counter;                  // two words, zero before the first launch; left zero
  i64 o_stride_batch, o_stride_row, o_stride_head;
  i64 q_descale_batch, q_descale_head, k_descale_batch, k_descale_head;
  i64 v_descale_batch, v_descale_head, o_descale_batch, o_descale_head;
  float softmax_scale;
  int batch, heads_q, heads_kv, len_q, len_k;
  int packed;                    // 1: consumers take different heads of one group at the same rows
  int row_blocks;                // ceil(len_q / (packed ? 64 : 64 * CONSUMERS))
  int units;                     // batch * heads_q / (packed ? CONSUMERS : 1)
  int section;                   // units whose keys and values share the L2 cache
};
static_assert(sizeof(Params) == 9 * 8 + 11 * 8 + 10 * 4, "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kBlockN = BLOCK_N;
constexpr int kConsumers = CONSUMERS;
constexpr int kRows = 64;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kQStages = Q_STAGES;
constexpr float kOffset = 8.0f;  // log2 of P's scale: the largest is 256, below E4M3's 448
constexpr float kLag = 0.0f;     // how far, in powers of two, a row's maximum may pass its reference
constexpr int kFlushTiles = FLUSH_KEYS / BLOCK_N;
static_assert(kFlushTiles > 1 && kFlushTiles % 2 == 0, "the first flush follows the first product; tiles go in pairs");
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // finite, so that no difference of two maxima is NaN

static_assert(kDim == 64 || kDim == 128, "one swizzle row holds a head");
static_assert(kBlockN % 32 == 0 && kBlockN <= 256, "P V consumes 32 keys a product");
static_assert(kConsumers == 2 || kConsumers == 3, "the register file feeds two or three consumers");
#if AHEAD
constexpr int kPart = 64;                     // keys whose P goes to the tensor cores together
constexpr int kLead = kDim == 128 ? 32 : 16;  // scaled values that wait for their exponentials
static_assert(kBlockN == 2 * kPart && !TELEMETRY && !LOGITS_E4M3, "two parts, and logits that nobody else looks at");
#endif

constexpr int kQBytes = kRows * kDim;
constexpr int kTileBytes = kBlockN * kDim;
constexpr int kOffsetK = kQStages * kConsumers * kQBytes;
constexpr int kOffsetV = kOffsetK + K_STAGES * kTileBytes;
constexpr int kOffsetO = kOffsetV + V_STAGES * kTileBytes;
constexpr int kOffsetBarriers = kOffsetO + kConsumers * kRows * kDim * 4;
constexpr int kBarriers = 2 * (kQStages * kConsumers + K_STAGES + V_STAGES);
constexpr int kOffsetTile = kOffsetBarriers + ceil_div(8 * kBarriers, 16) * 16;
// 1024 bytes of slack align the swizzle atoms. The host reads this value as SHARED_BYTES below.
constexpr int kSharedBytes = kOffsetTile + 32 * kQStages * kConsumers + 1024;
static_assert(kSharedBytes <= 232448, "shared memory of one multiprocessor");

constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * 128 <= 65536, "register file");

struct Tile {
  int batch, head, row, key_tiles;
};
// What the producer hands to a consumer with the queries.
struct alignas(16) Work {
  Tile tile;          // of this consumer; key_tiles < 0: no more work
  float logit_scale;  // softmax scale and the descales of Q and K
  float v_descale;
  float to_out;       // 1 / o_descale
  int unused;
};
static_assert(sizeof(Work) == 32, "shared-memory slots");

// Tile `index`, as its first consumer sees it: sections of heads, in a section the longest rows first, heads innermost.
__device__ __forceinline__ Tile decode(const Params& p, int index) {
  const int per_section = p.section * p.row_blocks;
  const int s = index / per_section;
  index -= s * per_section;
  const int width = min(p.section, p.units - s * p.section);
  int block = index / width;
  const int unit = s * p.section + index - block * width;
#if CAUSAL
  block = p.row_blocks - 1 - block;
#endif
  const int per_batch = p.units / p.batch;
  const int rows = p.packed ? kRows : kRows * kConsumers;
  Tile t;
  t.batch = unit / per_batch;
  t.head = (unit - t.batch * per_batch) * (p.packed ? kConsumers : 1);
  t.row = block * rows;
  int keys = p.len_k;
#if CAUSAL
  keys = max(0, min(keys, min(t.row + rows, p.len_q) + p.len_k - p.len_q));
#endif
  t.key_tiles = ceil_div(keys, kBlockN);
  return t;
}
// Waits for a phase of a barrier.
__device__ __forceinline__ void wait_for(u32 bar, u32 parity) {
  if constexpr (AHEAD) mbarrier_wait_uniform(bar, parity);
  else mbarrier_wait(bar, parity);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

using LogitMma = Wgmma<kBlockN>;
using OutMma = Wgmma<kDim>;
constexpr Swizzle kSwizzle = kDim == 128 ? Swizzle::B128 : Swizzle::B64;

// A thread's row (of the first of its two) in the warpgroup and its place in a quad.
struct Place {
  int row, quad;
};
// NOTES: read anew at each use; kept, the two would cost registers that the main loop needs.
__device__ __forceinline__ Place place() {
  const u32 i = thread_index();
  return {(int)(i % 128 / 32 * 16 + i % 32 / 4), (int)(i % 4)};
}

// What one thread knows of its two query rows: r = 0 is row l / 4 of the warp, r = 1 eight rows below.
struct Rows {
  float reference[2];  // subtracted from the logits
  float sum[2];        // of P before rounding, this thread's columns
  float rescale[2];    // owed to O since the last tile
  float carry[2];      // owed to the flushed O
  float lowest[2];     // telemetry
  float highest[2];
  u32 overflow;
  bool positive;       // no reference of the warp is negative: integer order serves
};

__device__ __forceinline__ void issue_logits(float (&s)[kBlockN / 2], u64 q, u64 k) {
#if AHEAD
  wgmma_fence();
  LogitMma::start(s, q, k);
#pragma unroll
  for (int i = 1; i < kDim / 32; i++) LogitMma::ss(s, wgmma_advance(q, 32 * i), wgmma_advance(k, 32 * i), 1);
#else
  wgmma_hold(s);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 32; i++) LogitMma::ss(s, wgmma_advance(q, 32 * i), wgmma_advance(k, 32 * i), i != 0);
#endif
  wgmma_commit();
}

// Sets logits past a row's last visible key to minus infinity. `last[r]` counts from this thread's first key of the tile.
__device__ __forceinline__ void mask(float (&s)[kBlockN / 2], const int (&last)[2]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; i++)
    if ((i >> 2) * 8 + (i & 1) > last[(i >> 1) & 1]) s[i] = __int_as_float(0xff800000);
}

#if AHEAD
// The maximum of three words compared as signed integers: one instruction for two values.
// NOTES: with integer types outside the assembly, the assembler serialises `wgmma` (C7511).
__device__ __forceinline__ float max3_signed(float a, float b, float c) {
  float r;
  asm("{\n.reg .s32 a, b, c;\nmov.b32 a, %1;\nmov.b32 b, %2;\nmov.b32 c, %3;\nmax.s32 a, a, b;\nmax.s32 a, a, c;\nmov.b32 %0, a;\n}\n"
      : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
// NOTES: volatile, to stay where it is written: among the exponentials.
__device__ __forceinline__ float shuffle_xor(float x, int d) {
  float r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(r) : "f"(x), "r"(d));
  return r;
}
// Maxima of two rows. Non-negative floats are ordered as signed integers; negative ones come out in no useful order.
__device__ __forceinline__ void signed_maxima(const float (&s)[kBlockN / 2], float (&top)[2]) {
  float part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int i = 4; i + 4 < kBlockN / 2; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; j++) part[j] = max3_signed(part[j], s[i + j], s[i + 4 + j]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int last = kBlockN / 2 - 4 + 2 * r;
    top[r] = max3_signed(part[2 * r], part[2 * r + 1], max3_signed(s[last], s[last], s[last + 1]));
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2)
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = max3_signed(top[r], top[r], shuffle_xor(top[r], d));
}

// Row maxima of one tile: `top` from signed_maxima, which serves while no reference is negative, since no other order matters
// then. True where a reference moved: O must be multiplied by `rows.rescale`.
__device__ __forceinline__ bool maxima(const float (&s)[kBlockN / 2], float (&top)[2], Rows& rows, float scale, float lag) {
  if (!rows.positive) {
    float part[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
#pragma unroll
    for (int i = 8; i < kBlockN / 2; i++) part[i & 7] = fmaxf(part[i & 7], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++)
      top[r] = quad_max(fmaxf(fmaxf(part[2 * r], part[2 * r + 1]), fmaxf(part[2 * r + 4], part[2 * r + 5])));
  }
  const bool moved = __any_sync(~0u, top[0] > rows.reference[0] + lag || top[1] > rows.reference[1] + lag);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = fmaxf(rows.reference[r], top[r]);
      rows.rescale[r] = exp2_mufu((rows.reference[r] - m) * scale);
      rows.reference[r] = m;
      rows.sum[r] *= rows.rescale[r];
      rows.carry[r] *= rows.rescale[r];
    }
    rows.positive = __shfl_sync(~0u, __all_sync(~0u, rows.reference[0] >= 0.0f && rows.reference[1] >= 0.0f), 0);
  }
  return moved;
}

#else
__device__ __forceinline__ void issue_output(float (&o)[kDim / 2], const u32 (&pr)[kBlockN / 8], u64 v, bool fresh) {
  wgmma_hold(o);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlockN / 32; i++)
    OutMma::rs(o, pr[4 * i], pr[4 * i + 1], pr[4 * i + 2], pr[4 * i + 3], wgmma_advance(v, 32 * kDim * i), i != 0 || !fresh);
  wgmma_commit();
}

template <int I> __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2], float scale, const float (&shift)[2]) {
  if constexpr (I < kBlockN / 2) {
    s[I] = exp2_mufu(fmaf(s[I], scale, -shift[(I >> 1) & 1]));
    exponentiate<I + 1>(s, scale, shift);
  }
}

// Online softmax of one tile, in place: logits in, P out. `whole`: nothing is masked. True where O must be multiplied by `rows.rescale`.
__device__ __forceinline__ bool softmax(float (&s)[kBlockN / 2], Rows& rows, float scale, float lag, bool whole) {
  float part[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
#pragma unroll
  for (int i = 8; i < kBlockN / 2; i++) part[i & 7] = fmaxf(part[i & 7], s[i]);
  float top[2];
#pragma unroll
  for (int r = 0; r < 2; r++)
    top[r] = quad_max(fmaxf(fmaxf(part[2 * r], part[2 * r + 1]), fmaxf(part[2 * r + 4], part[2 * r + 5])));
#if TELEMETRY && !LOGITS_E4M3
  rows.highest[0] = fmaxf(rows.highest[0], top[0]);
  rows.highest[1] = fmaxf(rows.highest[1], top[1]);
#endif

#if TELEMETRY && !LOGITS_E4M3
  // The lowest logits, in the shade of the shuffles
  float low[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
#pragma unroll
  for (int i = 8; i < kBlockN / 2; i++) low[i & 7] = fminf(low[i & 7], s[i]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float x = fminf(fminf(low[2 * r], low[2 * r + 1]), fminf(low[2 * r + 4], low[2 * r + 5]));
    rows.lowest[r] = whole ? fminf(rows.lowest[r], x) : rows.lowest[r];
  }
#endif

  const bool moved = __any_sync(~0u, top[0] > rows.reference[0] + lag || top[1] > rows.reference[1] + lag);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = fmaxf(rows.reference[r], top[r]);
      rows.rescale[r] = exp2_mufu((rows.reference[r] - m) * scale);
      rows.reference[r] = m;
      rows.sum[r] *= rows.rescale[r];
      rows.carry[r] *= rows.rescale[r];
    }
  }
  float shift[2] = {fmaf(rows.reference[0], scale, -kOffset), fmaf(rows.reference[1], scale, -kOffset)};
  exponentiate<0>(s, scale, shift);
#pragma unroll
  for (int i = 0; i < 4; i++) part[i] = s[i];
#pragma unroll
  for (int i = 4; i < kBlockN / 2; i++) part[i & 3] += s[i];
#pragma unroll
  for (int r = 0; r < 2; r++) rows.sum[r] += part[2 * r] + part[2 * r + 1];
  return moved;
}

__device__ __forceinline__ void pack(u32 (&pr)[kBlockN / 8], const float (&s)[kBlockN / 2]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 16; i++) {
    pr[2 * i] = e4m3x4(s[8 * i], s[8 * i + 1], s[8 * i + 4], s[8 * i + 5]);
    pr[2 * i + 1] = e4m3x4(s[8 * i + 2], s[8 * i + 3], s[8 * i + 6], s[8 * i + 7]);
  }
}

#endif

__device__ __forceinline__ void multiply(float (&o)[kDim / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kDim / 2; i++) o[i] *= factor[(i >> 1) & 1];
}

// The second level of accumulation: o += factor * slot, then (when `store`) back to the slot. Slots are private to threads.
template <bool Store>
__device__ __forceinline__ void flush(float (&o)[kDim / 2], float4* slot, const float (&factor)[2], bool first) {
#pragma unroll
  for (int i = 0; i < kDim / 8; i++) {
    float4 x = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : slot[i * 128];
    o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
    o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
    o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
    o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
    if (Store) slot[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }
}

#if LOGITS_E4M3
// Masked logits are infinite.
__device__ __forceinline__ u32 past(float x) { return fabsf(x) > 448.0f && fabsf(x) < __int_as_float(0x7f800000); }
// Rounds logits to E4M3 in units of the descale, counting what would not fit.
__device__ __forceinline__ void round_logits(float (&s)[kBlockN / 2], float to_units, u32& overflow) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; i += 2) {
    float a = s[i] * to_units, b = s[i + 1] * to_units;
    overflow += past(a) + past(b);
    u32 h = f16x2_from_e4m3x2(e4m3x2(a, b));
    s[i] = f32_from_f16((u16)h);
    s[i + 1] = f32_from_f16((u16)(h >> 16));
  }
}
#endif

// Turns four words a[j] of lane t (column block j, piece t) into four words of block t: word k is piece k.
__device__ __forceinline__ void quad_transpose(u32 (&a)[4], int t) {
  bool odd = t & 1, high = t & 2;
  u32 x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
  if (odd) { a[0] = x; a[2] = y; } else { a[1] = x; a[3] = y; }
  x = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2);
  y = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
  if (high) { a[0] = x; a[1] = y; } else { a[2] = x; a[3] = y; }
}

}  // namespace

extern "C" __constant__ int SHARED_BYTES = kSharedBytes;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_fwd(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
              const __grid_constant__ TensorMap map_v, const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  u32 base = (smem_address(raw) + 1023u) & ~1023u;
  u8* aligned = raw + (base - smem_address(raw));
  opaque(base);
  Work* work = reinterpret_cast<Work*>(aligned + kOffsetTile);
  const u32 bars = base + kOffsetBarriers;
  auto q_full = [&](int stage, int w) { return bars + 8 * (stage * kConsumers + w); };
  auto q_empty = [&](int stage, int w) { return bars + 8 * (kQStages * kConsumers + stage * kConsumers + w); };
  const u32 k_full = bars + 16 * kQStages * kConsumers, k_empty = k_full + 8 * K_STAGES;
  const u32 v_full = k_empty + 8 * K_STAGES, v_empty = v_full + 8 * V_STAGES;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

  // Initialise barriers
  if (threadIdx.x == 0) {
    tma_prefetch(&map_q);
    tma_prefetch(&map_k);
    tma_prefetch(&map_v);
    for (int i = 0; i < kQStages * kConsumers; i++) {
      mbarrier_init(q_full(0, 0) + 8 * i, 1);
      mbarrier_init(q_empty(0, 0) + 8 * i, 4);
    }
    for (int i = 0; i < K_STAGES; i++) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, 4 * kConsumers);
    }
    for (int i = 0; i < V_STAGES; i++) {
      mbarrier_init(v_full + 8 * i, 1);
      mbarrier_init(v_empty + 8 * i, 4 * kConsumers);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  grid_wait_for_previous();

  const int tiles = p.units * p.row_blocks;

  if (group == kConsumers) {
    // Producer: one thread issues every copy
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) {
      Ring<kQStages> q;
      Ring<K_STAGES> k;
      Ring<V_STAGES> v;
      const int group_size = p.heads_q / p.heads_kv;
      int index = blockIdx.x;
      while (true) {
        const bool alive = index < tiles;
        const int next = alive ? (int)(atomicAdd(p.counter, 1) + gridDim.x) : 0;

        const Tile t = decode(p, alive ? index : 0);
        const int head = t.head / group_size;

        // Hand out the tile and load its queries
        Work item;
        item.tile = t;
        if (!alive) item.tile.key_tiles = -1;
        item.logit_scale = p.softmax_scale * p.q_descale[t.batch * p.q_descale_batch + head * p.q_descale_head] *
                           p.k_descale[t.batch * p.k_descale_batch + head * p.k_descale_head];
        item.v_descale = p.v_descale[t.batch * p.v_descale_batch + head * p.v_descale_head];
#if OUT_E4M3
        item.to_out = 1.0f / p.o_descale[t.batch * p.o_descale_batch + head * p.o_descale_head];
#endif
        for (int w = 0; w < kConsumers; w++) {
          wait_for(q_empty(q.index, w), q.parity ^ 1);
          work[q.index * kConsumers + w] = item;
          if (alive) {
            mbarrier_arrive_expect(q_full(q.index, w), kQBytes);
            tma_load_4d(base + (q.index * kConsumers + w) * kQBytes, &map_q, q_full(q.index, w), 0, item.tile.head,
                        item.tile.row, t.batch);
          } else {
            mbarrier_arrive(q_full(q.index, w));
          }
          if (p.packed) item.tile.head++; else item.tile.row += kRows;
        }
        if (!alive) break;
        q.advance();

        // Stream keys and values, the last tile first
        for (int n = t.key_tiles - 1; n >= 0; n--) {
          wait_for(k_empty + 8 * k.index, k.parity ^ 1);
          mbarrier_arrive_expect(k_full + 8 * k.index, kTileBytes);
          tma_load_4d(base + kOffsetK + k.index * kTileBytes, &map_k, k_full + 8 * k.index, 0, head, n * kBlockN, t.batch);
          k.advance();
          wait_for(v_empty + 8 * v.index, v.parity ^ 1);
          mbarrier_arrive_expect(v_full + 8 * v.index, kTileBytes);
          tma_load_3d(base + kOffsetV + v.index * kTileBytes, &map_v, v_full + 8 * v.index, 0, n * (kBlockN / 16),
                      t.batch * p.heads_kv + head);
          v.advance();
        }
        index = next;
      }

      // Leave the counter at zero for the next launch
      __threadfence();
      if (atomicAdd(p.counter + 1, 1) == gridDim.x - 1) {
        p.counter[0] = 0;
        p.counter[1] = 0;
      }
    }
  } else {
    registers_grow<kConsumerRegisters>();
    const bool leader = threadIdx.x % 32 == 0;
    float4* slots = reinterpret_cast<float4*>(aligned + kOffsetO) + group * kRows * kDim / 4 + threadIdx.x % 128;
    Ring<kQStages> q;
#if AHEAD
    u32 it = 0;  // key tiles taken so far: the place in both rings
    // Core matrices of V: dims 128 bytes apart, groups of 16 keys 16 * kDim bytes apart
    const u32 uniform = __shfl_sync(~0u, base, 0);
    const u64 desc_k = wgmma_descriptor(uniform + kOffsetK, 16, 8 * kDim, kSwizzle);
    const u64 desc_v = wgmma_descriptor(uniform + kOffsetV, 16 * kDim, 128, Swizzle::None);
#else
    Ring<K_STAGES> k;
    Ring<V_STAGES> v;
    auto begin = [&]() { named_barrier_sync(1 + group, 256); };
    auto end = [&]() { named_barrier_arrive(1 + (group + 1) % kConsumers, 256); };
    if (group == kConsumers - 1) end();
#endif

    while (true) {
      wait_for(q_full(q.index, group), q.parity);
      const Work& slot = work[q.index * kConsumers + group];
      // NOTES: through a shuffle the compiler knows them uniform, and keeps loop and rings in uniform registers.
      const int key_tiles = __shfl_sync(~0u, slot.tile.key_tiles, 0), first_row = __shfl_sync(~0u, slot.tile.row, 0);
      if (key_tiles < 0) break;
      const float logit_scale = slot.logit_scale;
#if LOGITS_E4M3
      const float logit_descale = p.logit_descale[slot.tile.head];
      const float to_units = logit_scale / logit_descale, scale = logit_descale * kLog2e;
#else
      const float scale = logit_scale * kLog2e;
#endif
      const float lag = kLag * reciprocal(scale);
#if AHEAD
      const u64 desc_q = wgmma_descriptor(__shfl_sync(~0u, base + (q.index * kConsumers + group) * kQBytes, 0), 16, 8 * kDim, kSwizzle);
#else
      const u64 desc_q = wgmma_descriptor(base + (q.index * kConsumers + group) * kQBytes, 16, 8 * kDim, kSwizzle);
      const u64 desc_k = wgmma_descriptor(base + kOffsetK, 16, 8 * kDim, kSwizzle);
      // Core matrices of V: dims 128 bytes apart, groups of 16 keys 16 * kDim bytes apart
      const u64 desc_v = wgmma_descriptor(base + kOffsetV, 16 * kDim, 128, Swizzle::None);
#endif

      Rows rows = {{kLowest, kLowest}, {0.0f, 0.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {-kLowest, -kLowest}, {kLowest, kLowest}, 0, false};
      float o[kDim / 2];

      // Tiles below `whole` need no mask
      int whole = p.len_k / kBlockN;
#if CAUSAL
      whole = min(whole, max(0, first_row + p.len_k - p.len_q + 1) / kBlockN);
#endif

#if AHEAD
      float even[kBlockN / 2], odd[kBlockN / 2];
#else
      float s[kBlockN / 2];
#endif
      u32 pr[kBlockN / 8];

      // The last key that row r of this thread sees, counted from its first key of tile n
      auto last_key = [&](int n, int r) {
        const Place at = place();
        const int row = first_row + at.row + 8 * r;
        int last = p.len_k - 1;
#if CAUSAL
        last = min(last, row + p.len_k - p.len_q);
#endif
        return (row < p.len_q ? last : -1) - n * kBlockN - 2 * at.quad;
      };
#if !AHEAD
      auto visit = [&](int n) {
#if TELEMETRY && LOGITS_E4M3
        if (n < whole) {
#pragma unroll
          for (int i = 0; i < kBlockN / 2; i++) rows.lowest[(i >> 1) & 1] = fminf(rows.lowest[(i >> 1) & 1], s[i]);
        }
#endif
        if (n >= whole) {
          const int limit[2] = {last_key(n, 0), last_key(n, 1)};
#if TELEMETRY
#pragma unroll
          for (int i = 0; i < kBlockN / 2; i++)
            if ((i >> 2) * 8 + (i & 1) <= limit[(i >> 1) & 1]) rows.lowest[(i >> 1) & 1] = fminf(rows.lowest[(i >> 1) & 1], s[i]);
#endif
          mask(s, limit);
        }
#if LOGITS_E4M3
#if TELEMETRY
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i++) rows.highest[(i >> 1) & 1] = fmaxf(rows.highest[(i >> 1) & 1], s[i]);
#endif
        // NOTES: rounding makes a masked logit -448, so the mask runs again.
        round_logits(s, to_units, rows.overflow);
        if (n >= whole) {
          const int limit[2] = {last_key(n, 0), last_key(n, 1)};
          mask(s, limit);
        }
#endif
        return softmax(s, rows, scale, lag, n < whole);
      };
#endif

      if (key_tiles > 0) {
#if AHEAD
        const int n = key_tiles - 1;
        auto hide = [&](float (&s)[kBlockN / 2], int n, bool masked) {
          if (masked && n >= whole) {
            const int limit[2] = {last_key(n, 0), last_key(n, 1)};
            mask(s, limit);
          }
        };
        const u32 end = it + key_tiles;
        bool fresh = true, flushed = false;

        u32 ready_k = 0;
        auto k_barrier = [&](u32 t) { return k_full + 8 * (t % K_STAGES); };
        auto k_parity = [&](u32 t) { return t / K_STAGES & 1; };
        // Issue the logits of the next tile
        auto feed = [&](float (&s)[kBlockN / 2], u32 t) {
          mbarrier_wait_uniform(k_barrier(t), k_parity(t), ready_k);
          issue_logits(s, desc_q, wgmma_advance(desc_k, t % K_STAGES * kTileBytes));
        };
        auto release_k = [&](u32 t) {
          if (leader) mbarrier_arrive(k_empty + 8 * (t % K_STAGES));
        };
        // P of this tile, a part at a time, and P V; with `more`, the maxima of the next tile meanwhile
        auto product = [&](float (&s)[kBlockN / 2], u32 t, float (&next)[kBlockN / 2], float (&top)[2], int n, bool masked, bool more) {
          float shift[2] = {fmaf(rows.reference[0], scale, -kOffset), fmaf(rows.reference[1], scale, -kOffset)};
          const u64 desc = wgmma_advance(desc_v, t % V_STAGES * kTileBytes);
          float part[4] = {};
          wgmma_hold(o);
#pragma unroll
          for (int c = 0; c < kBlockN / kPart; c++) {
            if (more && c == 1) {
              wgmma_wait<1>();
              wgmma_hold(next);
              release_k(t + 1);
              hide(next, n, masked);
              signed_maxima(next, top);
            }
#pragma unroll
            for (int i = kPart / 2 * c; i < kPart / 2 * (c + 1); i++) {
              // NOTES: adds nothing; it ties the scaling of these columns to earlier exponentials, so that the assembler spreads
              // it among them instead of doing all of it first.
              if (i % (kLead / 2) == 0 && i >= kLead)
                for (int r = 0; r < 2; r++) shift[r] = fmaf(s[i - kLead + 2 * r], 0.0f, shift[r]);
              s[i] = exp2_mufu(fmaf(s[i], scale, -shift[(i >> 1) & 1]));
              part[i & 3] = i < 4 ? s[i] : part[i & 3] + s[i];
            }
#pragma unroll
            for (int i = kPart / 16 * c; i < kPart / 16 * (c + 1); i++) {
              pr[2 * i] = e4m3x4_merged(s[8 * i], s[8 * i + 1], s[8 * i + 4], s[8 * i + 5]);
              pr[2 * i + 1] = e4m3x4_merged(s[8 * i + 2], s[8 * i + 3], s[8 * i + 6], s[8 * i + 7]);
            }
            if (c == 0) mbarrier_wait_uniform(v_full + 8 * (t % V_STAGES), t / V_STAGES & 1);
            wgmma_fence();
#pragma unroll
            for (int i = kPart / 32 * c; i < kPart / 32 * (c + 1); i++)
              OutMma::rs(o, pr[4 * i], pr[4 * i + 1], pr[4 * i + 2], pr[4 * i + 3], wgmma_advance(desc, 32 * kDim * i), i != 0 || !fresh);
            wgmma_commit();
          }
          fresh = false;
#pragma unroll
          for (int r = 0; r < 2; r++) rows.sum[r] += part[2 * r] + part[2 * r + 1];
        };
        // Collect P V of tile t
        auto collect = [&](bool moved, u32 t) {
          wgmma_wait<0>();
          wgmma_hold(o);
          if (leader) mbarrier_arrive(v_empty + 8 * (t % V_STAGES));
          if (moved) multiply(o, rows.rescale);
        };
        auto step = [&](float (&s)[kBlockN / 2], float (&next)[kBlockN / 2], bool masked) {
          const u32 t = it;
          feed(next, t);
          it = t + 1;
          float top[2];
          const int n = end - it;
          product(s, t - 1, next, top, n, masked, true);
          ready_k = mbarrier_try_wait(k_barrier(it), k_parity(it));
          collect(maxima(next, top, rows, scale, lag), t - 1);
        };

        auto first = [&](float (&s)[kBlockN / 2]) {
          feed(s, it);
          wgmma_wait<0>();
          wgmma_hold(s);
          release_k(it);
          it++;
          hide(s, n, true);
          float top[2];
          maxima(s, top, rows, scale, lag);
        };
        if (key_tiles % 2 != 0) {
          first(even);
        } else {
          first(odd);
          step(odd, even, true);
        }
        // Pairs of tiles: the masked ones apart, and a flush every kFlushTiles
        it = __shfl_sync(~0u, it, 0);
        int pairs = (key_tiles - 1) / 2, masked_pairs = (max(0, (int)(end - it) - whole) + 1) / 2;
        while (pairs > 0) {
          int run = min(pairs, kFlushTiles / 2);
          pairs -= run;
          for (; run > 0 && masked_pairs > 0; run--, masked_pairs--) {
            step(even, odd, true);
            step(odd, even, true);
          }
          for (; run > 0; run--) {
            step(even, odd, false);
            step(odd, even, false);
          }
          if (pairs > 0) {
            flush<true>(o, slots, rows.carry, !flushed);
            rows.carry[0] = rows.carry[1] = 1.0f;
            fresh = flushed = true;
          }
        }
        float none[2];
        product(even, it - 1, odd, none, 0, false, false);
        wgmma_wait<0>();
        wgmma_hold(o);

#else
        // Pass over tiles that only later rows of the block see
        // NOTES: with two consumers it is one tile at most, and the loop costs the compiler its knowledge of uniformity.
        int n = key_tiles - 1;
#if CAUSAL && CONSUMERS > 2
        const int mine = max(1, ceil_div(min(p.len_k, first_row + kRows + p.len_k - p.len_q), kBlockN));
        for (; n >= mine; n--) {
          begin();
          end();
          mbarrier_wait(k_full + 8 * k.index, k.parity);
          if (leader) mbarrier_arrive(k_empty + 8 * k.index);
          k.advance();
          mbarrier_wait(v_full + 8 * v.index, v.parity);
          if (leader) mbarrier_arrive(v_empty + 8 * v.index);
          v.advance();
        }
#endif

        // First logits
        begin();
        mbarrier_wait(k_full + 8 * k.index, k.parity);
        issue_logits(s, desc_q, wgmma_advance(desc_k, k.index * kTileBytes));
        end();
        wgmma_wait<0>();
        wgmma_hold(s);
        if (leader) mbarrier_arrive(k_empty + 8 * k.index);
        k.advance();
        visit(n--);
        pack(pr, s);

        int until_flush = kFlushTiles;
        bool fresh = true, flushed = false;
        auto step = [&]() {
          // Issue the logits of this tile, then P V of the one before
          begin();
          mbarrier_wait(k_full + 8 * k.index, k.parity);
          issue_logits(s, desc_q, wgmma_advance(desc_k, k.index * kTileBytes));
          mbarrier_wait(v_full + 8 * v.index, v.parity);
          issue_output(o, pr, wgmma_advance(desc_v, v.index * kTileBytes), fresh);
          end();
          fresh = false;

          // Softmax under P V
          wgmma_wait<1>();
          wgmma_hold(s);
          const bool moved = visit(n);
          // NOTES: the assembler would sink the softmax below the next wait. A release that depends on its result (and
          // always happens: no sum is negative) pins it here.
          if (leader && !(rows.sum[0] + rows.sum[1] < 0.0f)) mbarrier_arrive(k_empty + 8 * k.index);
            k.advance();

          // Collect P V and round P for the next
          wgmma_wait<0>();
          wgmma_hold(o);
          if (leader) mbarrier_arrive(v_empty + 8 * v.index);
          v.advance();
          if (moved) multiply(o, rows.rescale);
          if (--until_flush == 0) {
            flush<true>(o, slots, rows.carry, !flushed);
            rows.carry[0] = rows.carry[1] = 1.0f;
            until_flush = kFlushTiles;
            fresh = flushed = true;
          }
          pack(pr, s);
          n--;
        };
        while (n >= 0) step();
        mbarrier_wait(v_full + 8 * v.index, v.parity);
        issue_output(o, pr, wgmma_advance(desc_v, v.index * kTileBytes), fresh);
        wgmma_wait<0>();
        wgmma_hold(o);

#endif

        // Collect the last P V
#if AHEAD
        if (leader) mbarrier_arrive(v_empty + 8 * ((it - 1) % V_STAGES));
#else
        if (leader) mbarrier_arrive(v_empty + 8 * v.index);
        v.advance();
#endif
        if (flushed) flush<false>(o, slots, rows.carry, false);
      } else {
#pragma unroll
        for (int i = 0; i < kDim / 2; i++) o[i] = 0.0f;
      }

      // Read the rest of the work item, release the queries
      const Work item = slot;
      const Tile& t = item.tile;
      const int t4 = place().quad, my_row = place().row;
      if (leader) mbarrier_arrive(q_empty(q.index, group));
      q.advance();

      // Normalise
      float factor[2];  // NOTES: a row with a visible key has a sum near 2^7 or more
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float sum = quad_sum(rows.sum[r]);
        int row = t.row + my_row + 8 * r;
        factor[r] = sum > 1.0f ? item.v_descale * reciprocal(sum) : 0.0f;
        if (p.lse != nullptr && t4 == 0 && row < p.len_q)
          p.lse[((i64)t.batch * p.heads_q + t.head) * p.len_q + row] =
              sum > 1.0f ? (fmaf(rows.reference[r], scale, -kOffset) + log2_mufu(sum)) * kLn2 : __int_as_float(0xff800000);
      }
      multiply(o, factor);

#if TELEMETRY
      {
        float high = kLowest, low = -kLowest, amax = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          if (t.row + my_row + 8 * r < p.len_q) {
            high = fmaxf(high, rows.highest[r]);
            low = fminf(low, rows.lowest[r]);
#pragma unroll
            for (int i = 0; i < kDim / 2; i++)
              if (((i >> 1) & 1) == r) amax = fmaxf(amax, fabsf(o[i]));
          }
        }
        u32 count = rows.overflow;
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
          high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
          low = fminf(low, __shfl_xor_sync(~0u, low, d));
          amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
          count += __shfl_xor_sync(~0u, count, d);
        }
        if (leader) {
          Telemetry* out = p.telemetry + t.head;
          if (high > kLowest) atomicMax(&out->max_logit, ordered(high * item.logit_scale));
          if (low < -kLowest) atomicMax(&out->min_logit, ~ordered(low * item.logit_scale));
          atomicMax(&out->amax_o, __float_as_uint(amax));
          if (count > 0) atomicAdd(&out->overflow, count);
        }
      }
#endif

      // Store: a transpose in each quad makes 16-byte (E4M3: 8-byte) pieces of one row
#if OUT_E4M3
      const float to_out = item.to_out;
      u8* out = reinterpret_cast<u8*>(p.o) + t.batch * p.o_stride_batch + t.head * p.o_stride_head;
#else
      u16* out = reinterpret_cast<u16*>(p.o) + t.batch * p.o_stride_batch + t.head * p.o_stride_head;
#endif
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = t.row + my_row + 8 * r;
#pragma unroll
        for (int c = 0; c < kDim / 32; c++) {
          u32 a[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float x = o[16 * c + 4 * j + 2 * r], y = o[16 * c + 4 * j + 2 * r + 1];
#if OUT_E4M3
            a[j] = e4m3x2(x * to_out, y * to_out);
#else
            a[j] = bf16x2(x, y);
#endif
          }
          quad_transpose(a, t4);
          if (row < p.len_q) {
#if OUT_E4M3
            *reinterpret_cast<uint2*>(out + row * p.o_stride_row + 32 * c + 8 * t4) =
                make_uint2(a[0] | a[1] << 16, a[2] | a[3] << 16);
#else
            *reinterpret_cast<uint4*>(out + row * p.o_stride_row + 32 * c + 8 * t4) = make_uint4(a[0], a[1], a[2], a[3]);
#endif
          }
        }
      }
    }
  }
}
