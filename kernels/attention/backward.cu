// Fused attention backward on E4M3 operands for Hopper (sm_90a): dK, dV, and dQ added up in f32.
//
//   S^T = K Q^T            FP8, the forward's instruction in its order of d: the same bits, so P = exp(S - LSE) sums to one
//   dP^T = V dO^T          BF16 from here on, from exact E4M3 values; descales stay scalars
//   dV += P^T dO           P^T and dS^T are register operands
//   dS = P (dP - delta)    to shared memory as well
//   dK += dS^T Q
//   dQ += dS K             each consumer makes one 64 x 64 part; the copy engine adds it to global memory, a warp's 4 KB at a time
//
// A block owns 128 keys of one KV head, and walks the query tiles of every head of its group: dK and dV stay in registers, no
// query head is expanded. Two consumer warpgroups own 64 keys each; one producer warp brings queries and dO by TMA. Blocks come
// longest first. S^T of the next tile runs while dQ of this one leaves.
//
// Layouts: backward.cuh. Shared memory holds 16-bit tiles as runs of 64 columns, rows of 128 bytes, 128-byte swizzle; so rows
// and columns can both be the side that a product sums over, and nothing is transposed.
//
// NaN in a row of q or dO reaches dK and dV of the key tiles that its query tile sees, and NaN in k or v all rows that see the
// key tile's block of queries; other heads and sequences are not touched.
#include "attention/backward.cuh"
#include "attention/backward_convert.cuh"
#include "attention/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/reduce.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#ifndef CAUSAL
#define CAUSAL 0
#endif
// 1: key tiles add to dQ in their order, so that every run gives the same bits.
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
// Blocks of a cluster that share the query tiles of one block of keys, and add up dK and dV at the end: for calls of few blocks.
#ifndef SPLITS
#define SPLITS 1
#endif

namespace {

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kStages = 2;
constexpr int kSplits = SPLITS;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr float kLog2e = 1.4426950408889634f;

constexpr int kRun = 128;                         // bytes of a swizzled row
constexpr int kKeyRun = kKeys * kRun;             // 64 columns of K or V in BF16
constexpr int kRowRun = kRows * kRun;             // 64 columns of Q or dO in BF16
constexpr int kRuns = kDim / 64;
constexpr int kScoreBytes = 2 * kKeys * kRows;    // dS^T in BF16: rows are keys, runs of 64 queries
constexpr int kScoreStages = 2;

constexpr int kStageQ8 = 0;
constexpr int kStageQ16 = kRows * kDim;
constexpr int kStageDOut = kStageQ16 + 2 * kRows * kDim;
constexpr int kStageBytes = kStageDOut + 2 * kRows * kDim;

constexpr int kOffsetK16 = 0;
constexpr int kOffsetV16 = kRuns * kKeyRun;
constexpr int kOffsetStages = 2 * kRuns * kKeyRun;
constexpr int kOffsetScores = kOffsetStages + kStages * kStageBytes;
constexpr int kOffsetK8 = kOffsetScores + kScoreStages * kScoreBytes;
constexpr int kOffsetTerms = kOffsetK8 + kKeys * kDim;
constexpr int kOffsetSums = kOffsetTerms + kStages * kTermFloats * 4;
constexpr int kOffsetBarriers = kOffsetSums + 4 * kSumFloats;
// 1024 bytes of slack align the swizzle atoms. The host reads this value as SHARED_BYTES below.
constexpr int kFullQ8 = 0, kFullDOut = 1, kFullQ16 = 2, kRings = 3;  // barriers: kRings x stages full, as many empty
constexpr int kSharedBytes = kOffsetBarriers + 16 * kRings * kStages + 1024;
static_assert(kSharedBytes <= 232448, "shared memory of one multiprocessor");
static_assert(kSplits == 1 || (kDim == 128 && !DETERMINISTIC), "tiles of 128 queries leave no registers for it");

using LogitMma = ptx::Wgmma<ptx::Operand::E4m3, kRows>;
using GradMma = ptx::Wgmma<ptx::Operand::Bf16, kRows>;
using KeyMma = ptx::Wgmma<ptx::Operand::Bf16, kDim>;
using QueryMma = ptx::Wgmma<ptx::Operand::Bf16, 64>;
constexpr ptx::Swizzle kSwizzle8 = kDim == 128 ? ptx::Swizzle::B128 : ptx::Swizzle::B64;

// What a block owns.
struct Work {
  int batch, kv_head, key_tile;
  int first, tiles;  // query tiles that see its keys, for each head of the group
  int begin, total;  // of all heads' tiles, those that this block walks
};
// One of `kSplits` parts of what block `index` of keys has to do. Sections of KV heads; in a section the longest first, heads innermost.
__device__ __forceinline__ Work decode(const Backward& p, int index, int rank) {
  const int key_tiles = ceil_div(p.len_k, kKeys), units = p.batch * p.heads_kv;
  const int per_section = p.section * key_tiles, s = index / per_section;
  index -= s * per_section;
  const int width = min(p.section, units - s * p.section);
  Work w;
  // NOTES: through a shuffle the assembler knows it uniform.
  w.key_tile = __shfl_sync(~0u, index / width, 0);
  const int unit = s * p.section + index - w.key_tile * width;
  w.batch = unit / p.heads_kv;
  w.kv_head = unit - w.batch * p.heads_kv;
  w.first = CAUSAL ? max(0, w.key_tile * kKeys - p.diagonal) / kRows : 0;
  w.tiles = max(0, p.q_tiles - w.first);
  const int all = w.tiles * (p.heads_q / p.heads_kv);
  w.begin = all / kSplits * rank + min(rank, all % kSplits);
  w.total = all / kSplits + (rank < all % kSplits);
  return w;
}

// A walk over a block's tiles: head by head, from the first queries that see its keys on. Blocks of later keys begin at later
// queries, so that they do not add to the same tile of dQ at a time.
// Deterministic calls walk from the last queries back, the heads of the group in turn: so all blocks are at the same tile at a time,
// and none waits long for the one before it.
struct Place {
  int m, head;  // of the group
  __device__ __forceinline__ Place(const Backward& p, const Work& w) {
    const int heads = p.heads_q / p.heads_kv, inner = DETERMINISTIC ? heads : max(1, w.tiles), outer = w.begin / inner;
    head = DETERMINISTIC ? w.begin - outer * inner : outer;
    m = DETERMINISTIC ? p.q_tiles - 1 - outer : w.first + w.begin - outer * inner;
  }
  // Returns by how much the tile's index grows.
  __device__ __forceinline__ int advance(const Backward& p, const Work& w) {
    if (DETERMINISTIC) {
      const int heads = p.heads_q / p.heads_kv;
      if (++head < heads) return p.q_tiles;
      head = 0, m--;
      return -(heads - 1) * p.q_tiles - 1;
    }
    if (++m < p.q_tiles) return 1;
    m = w.first, head++;
    return 1 + w.first;
  }
};

// Operands in 128-byte rows. `Along`: the product sums over the rows; runs of 64 columns lie `run` bytes apart.
__device__ __forceinline__ u64 operand(u32 address, u32 run) { return ptx::wgmma_descriptor(address, run, 8 * kRun, ptx::Swizzle::B128); }
// Step `i` of 16 columns, or of 16 rows.
__device__ __forceinline__ u64 columns(u64 descriptor, int i, int run) { return ptx::wgmma_advance(descriptor, i / 4 * run + i % 4 * 32); }
__device__ __forceinline__ u64 rows(u64 descriptor, int i) { return ptx::wgmma_advance(descriptor, 16 * kRun * i); }

// This block's keys and values to shared memory: K as it is and in BF16, V in BF16. What is no key is zero.
__device__ __forceinline__ void load_keys(const Backward& p, const Work& work, u8* shared) {
  constexpr int kPieces = kDim / 16, kEach = kKeys * kPieces / (128 * kConsumers);
  uint4 k[kEach] = {}, v[kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = i * 128 * kConsumers + threadIdx.x, row = at / kPieces, piece = at % kPieces, key = work.key_tile * kKeys + row;
    if (key >= p.len_k) continue;
    k[i] = *reinterpret_cast<const uint4*>(row_of(p.k, p.k_strides, work.batch, key, work.kv_head) + 16 * piece);
    v[i] = *reinterpret_cast<const uint4*>(row_of(p.v, p.v_strides, work.batch, key, work.kv_head) + 16 * piece);
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = i * 128 * kConsumers + threadIdx.x, row = at / kPieces, piece = at % kPieces;
    const int swizzled = kDim == 128 ? piece ^ row % 8 : piece ^ row / 2 % 4;
    *reinterpret_cast<uint4*>(shared + kOffsetK8 + row * kDim + 16 * swizzled) = k[i];
    u8* wide = shared + piece / 4 * kKeyRun + row * kRun;
    const int low = 16 * (piece % 4 * 2 ^ row % 8), high = 16 * ((piece % 4 * 2 + 1) ^ row % 8);
    *reinterpret_cast<uint4*>(wide + kOffsetK16 + low) = bf16x8_from_e4m3x8(make_uint2(k[i].x, k[i].y));
    *reinterpret_cast<uint4*>(wide + kOffsetK16 + high) = bf16x8_from_e4m3x8(make_uint2(k[i].z, k[i].w));
    *reinterpret_cast<uint4*>(wide + kOffsetV16 + low) = bf16x8_from_e4m3x8(make_uint2(v[i].x, v[i].y));
    *reinterpret_cast<uint4*>(wide + kOffsetV16 + high) = bf16x8_from_e4m3x8(make_uint2(v[i].z, v[i].w));
  }
}

// Operand registers of 16 queries from their eight accumulators.
__device__ __forceinline__ void pack(u32* a, const float* x) {
  a[0] = ptx::bf16x2(x[0], x[1]);
  a[1] = ptx::bf16x2(x[2], x[3]);
  a[2] = ptx::bf16x2(x[4], x[5]);
  a[3] = ptx::bf16x2(x[6], x[7]);
}

// Sets what a key is not seen by to zero: column 8 (i / 4) + i % 2 below `from[i / 2 % 2]`.
__device__ __forceinline__ void mask(float (&x)[kRows / 2], const int (&from)[2]) {
#pragma unroll
  for (int i = 0; i < kRows / 2; i++)
    if ((i >> 2) * 8 + (i & 1) < from[(i >> 1) & 1]) x[i] = 0.0f;
}

__device__ __forceinline__ float dk_scale(const Backward& p, const Work& work) {
  return p.softmax_scale * descale_of(p.q_descale, p.q_descale_strides, work.batch, work.kv_head) *
         descale_of(p.v_descale, p.v_descale_strides, work.batch, work.kv_head);
}
// Stores run `c` of 32 columns of dK or dV from a thread's 16 accumulators of it.
__device__ __forceinline__ void store(const Backward& p, const Work& work, bool is_dk, int c, const float (&x)[16], float scale) {
  const int quad = threadIdx.x % 4, first_key = work.key_tile * kKeys + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int key = first_key + 8 * r;
    u16* out = is_dk ? row_of(p.dk, p.dk_strides, work.batch, key, work.kv_head) : row_of(p.dv, p.dv_strides, work.batch, key, work.kv_head);
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = ptx::bf16x2(x[4 * j + 2 * r] * scale, x[4 * j + 2 * r + 1] * scale);
    quad_transpose(a, quad);
    if (key < p.len_k) *reinterpret_cast<uint4*>(out + 32 * c + 8 * quad) = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

}  // namespace

extern "C" __constant__ int SHARED_BYTES = kSharedBytes;

#if SPLITS > 1
#define CLUSTER __cluster_dims__(SPLITS)
#else
#define CLUSTER
#endif
extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, 1)
attention_backward(const __grid_constant__ TensorMap map_q8, const __grid_constant__ TensorMap map_q16,
                   const __grid_constant__ TensorMap map_d_out, const __grid_constant__ Backward p) {
  extern __shared__ u8 raw[];
  u32 base = (ptx::shared_address(raw) + 1023u) & ~1023u;
  u8* aligned = raw + (base - ptx::shared_address(raw));
  const u32 full = base + kOffsetBarriers;
  auto bar = [&](int what, u32 stage) { return full + 8 * (what * kStages + stage); };
  constexpr int kToEmpty = 8 * kRings * kStages;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map_q8);
    ptx::prefetch_tensormap(&map_q16);
    ptx::prefetch_tensormap(&map_d_out);
    for (int i = 0; i < kRings * kStages; i++) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(full + 8 * i + kToEmpty, 4 * kConsumers);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();

  const Work work = decode(p, blockIdx.x / kSplits, blockIdx.x % kSplits);
  const int first_head = work.kv_head * (p.heads_q / p.heads_kv);

  if (group == kConsumers) {
    // Producer: one thread issues every copy
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) {
      Ring<kStages> ring;
      Place place(p, work);
#pragma unroll 1
      for (int it = 0; it < work.total; it++) {
        const u32 to = base + kOffsetStages + ring.index * kStageBytes;
        auto acquire = [&](int what, u32 bytes) {
          const u32 at = bar(what, ring.index);
          ptx::mbarrier_wait_uniform(at + kToEmpty, ring.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(at, bytes);
          return at;
        };
        const u32 for_q8 = acquire(kFullQ8, kRows * kDim);
        ptx::tma_load_4d(to + kStageQ8, &map_q8, for_q8, 0, first_head + place.head, place.m * kRows, work.batch);
        const u32 for_d_out = acquire(kFullDOut, 2 * kRows * kDim + kTermFloats * 4);
        ptx::bulk_load(base + kOffsetTerms + ring.index * kTermFloats * 4,
                       p.terms + tile_index(p, work.batch, first_head + place.head, place.m) * kTermFloats, kTermFloats * 4, for_d_out);
#pragma unroll
        for (int run = 0; run < kRuns; run++)
          ptx::tma_load_4d(to + kStageDOut + run * kRowRun, &map_d_out, for_d_out, 64 * run, first_head + place.head, place.m * kRows,
                            work.batch);
        const u32 for_q16 = acquire(kFullQ16, 2 * kRows * kDim);
#pragma unroll
        for (int run = 0; run < kRuns; run++)
          ptx::tma_load_4d(to + kStageQ16 + run * kRowRun, &map_q16, for_q16, 64 * run, first_head + place.head, place.m * kRows,
                            work.batch);
        ring.advance();
        place.advance(p, work);
      }
    }
#if SPLITS > 1
    ptx::cluster_sync();
    ptx::cluster_sync();
#endif
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const bool leader = threadIdx.x % 32 == 0;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;

    load_keys(p, work, aligned);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync<1, 128 * kConsumers>();

    const u32 uniform_base = __shfl_sync(~0u, base, 0);
    const u64 k8 = ptx::wgmma_descriptor(uniform_base + kOffsetK8 + group * 64 * kDim, 16, 8 * kDim, kSwizzle8);
    const u64 v16 = operand(uniform_base + kOffsetV16 + group * 64 * kRun, 16);
    // dQ: consumers share the columns of a tile of 64 queries, or the queries of one of 128
    const u64 k16 = operand(uniform_base + kOffsetK16 + (kRows == 64 ? group * kKeyRun : 0), kKeyRun);
    const u64 scores = operand(uniform_base + kOffsetScores + (kRows == 64 ? 0 : group * kKeyRun), kKeyRun);
    const u64 q8 = ptx::wgmma_descriptor(uniform_base + kOffsetStages + kStageQ8, 16, 8 * kDim, kSwizzle8);
    const u64 q16 = operand(uniform_base + kOffsetStages + kStageQ16, kRowRun);
    const u64 d_out = operand(uniform_base + kOffsetStages + kStageDOut, kRowRun);
    // Row j of 8 x 8 matrix i of a `stmatrix` is named by lane 8 i + j
    const u32 score_row = base + kOffsetScores + (64 * group + 16 * warp + 8 * (lane / 8 % 2) + lane % 8) * kRun;

    const float q_descale = descale_of(p.q_descale, p.q_descale_strides, work.batch, work.kv_head);
    const float scale = p.softmax_scale * q_descale * descale_of(p.k_descale, p.k_descale_strides, work.batch, work.kv_head) * kLog2e;

    float dk[kDim / 2], dv[kDim / 2], s[kRows / 2];
#pragma unroll
    for (int i = 0; i < kDim / 2; i++) dk[i] = dv[i] = 0.0f;

    auto release = [&](int what, u32 stage) { if (leader) ptx::mbarrier_arrive(bar(what, stage) + kToEmpty); };
    auto issue_logits = [&](u32 stage) {
      const u64 queries = ptx::wgmma_advance(q8, stage * kStageBytes);
      ptx::wgmma_fence();
      LogitMma::ss_overwrite(s, k8, queries);
#pragma unroll
      for (int i = 1; i < kDim / 32; i++) LogitMma::ss(s, ptx::wgmma_advance(k8, 32 * i), ptx::wgmma_advance(queries, 32 * i), 1);
      ptx::wgmma_commit();
    };

    const int total = work.total;
    // The first query that this thread's keys are seen by, counted from its first column of tile 0; none for what is no key
    int seen_from[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int key = work.key_tile * kKeys + 64 * group + 16 * warp + lane / 4 + 8 * r;
      seen_from[r] = key >= p.len_k ? 1 << 30 : (CAUSAL ? key - p.diagonal : -(1 << 30)) - 2 * quad;
    }
    // Tiles from this one on are seen whole by this warpgroup's keys
    const int last_key = work.key_tile * kKeys + 64 * group + 63;
    const int whole_from = last_key >= p.len_k ? p.q_tiles : CAUSAL ? ceil_div(max(0, last_key - p.diagonal), kRows) : 0;

    Place place(p, work);
    u32 tile = (u32)tile_index(p, work.batch, first_head + place.head, place.m);
    u32* turn = nullptr;
    auto hand_on = [&](bool owed) {
      if (!owed) return;
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async_global();
      ptx::red_add_release(turn, 1);
    };
    Ring<kStages> ring;
    if (total > 0) {
      ptx::mbarrier_wait_uniform(bar(kFullQ8, 0), 0);
      issue_logits(0);
      ptx::wgmma_wait<0>();
      ptx::keep(s);
      release(kFullQ8, 0);
    }
    for (int it = 0; it < total; it++) {
      const u32 at = ring.index * kStageBytes;
      const float2* terms = reinterpret_cast<const float2*>(aligned + kOffsetTerms + ring.index * kTermFloats * 4) + quad;
      Ring<kStages> next = ring;
      next.advance();

      // dP^T
      float dp[kRows / 2];
      ptx::mbarrier_wait_uniform(bar(kFullDOut, ring.index), ring.parity);
      {
        const u64 b = ptx::wgmma_advance(d_out, at);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kDim / 16; i++)
          GradMma::ss<false, false>(dp, columns(v16, i, kKeyRun), columns(b, i, kRowRun), i != 0);
        ptx::wgmma_commit();
      }

      // P^T under it, and dV
      const int from[2] = {seen_from[0] - place.m * kRows, seen_from[1] - place.m * kRows};
      const bool masked = place.m < whole_from;
#pragma unroll
      for (int c = 0; c < kRows / 8; c++) {
        const float2 lse = terms[4 * c];
        s[4 * c] = ptx::exp2_approx(fmaf(s[4 * c], scale, -lse.x));
        s[4 * c + 1] = ptx::exp2_approx(fmaf(s[4 * c + 1], scale, -lse.y));
        s[4 * c + 2] = ptx::exp2_approx(fmaf(s[4 * c + 2], scale, -lse.x));
        s[4 * c + 3] = ptx::exp2_approx(fmaf(s[4 * c + 3], scale, -lse.y));
      }
      if (masked) mask(s, from);
      u32 p16[kRows / 4];
#pragma unroll
      for (int i = 0; i < kRows / 16; i++) pack(&p16[4 * i], &s[8 * i]);
      {
        const u64 b = ptx::wgmma_advance(d_out, at);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kRows / 16; i++) KeyMma::rs<true>(dv, &p16[4 * i], rows(b, i), 1);
        ptx::wgmma_commit();
      }

      // dS^T under it, and dK
      ptx::wgmma_wait<1>();
      ptx::keep(dp);
#pragma unroll
      for (int c = 0; c < kRows / 8; c++) {
        const float2 delta = terms[kRows / 2 + 4 * c];
        dp[4 * c] = s[4 * c] * (dp[4 * c] - delta.x);
        dp[4 * c + 1] = s[4 * c + 1] * (dp[4 * c + 1] - delta.y);
        dp[4 * c + 2] = s[4 * c + 2] * (dp[4 * c + 2] - delta.x);
        dp[4 * c + 3] = s[4 * c + 3] * (dp[4 * c + 3] - delta.y);
      }
      if (masked) mask(dp, from);
      u32 ds16[kRows / 4];
      const u32 buffer = it % kScoreStages * kScoreBytes;
#pragma unroll
      for (int i = 0; i < kRows / 16; i++) {
        pack(&ds16[4 * i], &dp[8 * i]);
        const u32 run = i / 4 * kKeyRun, chunk = 16 * ((i % 4 * 2 + lane / 16) ^ lane % 8);
        ptx::stmatrix<false>(score_row + buffer + run + chunk, ds16[4 * i], ds16[4 * i + 1], ds16[4 * i + 2], ds16[4 * i + 3]);
      }
      ptx::fence_proxy_async();
      ptx::mbarrier_wait_uniform(bar(kFullQ16, ring.index), ring.parity);
      {
        const u64 b = ptx::wgmma_advance(q16, at);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kRows / 16; i++) KeyMma::rs<true>(dk, &ds16[4 * i], rows(b, i), 1);
        ptx::wgmma_commit();
      }
      // NOTES: dV is through, and the fence above stands behind the loads of delta.
      ptx::wgmma_wait<1>();
      ptx::keep(dv);
      release(kFullDOut, ring.index);

      // dQ, once both consumers have stored dS^T. NOTES: a buffer is written again after the next barrier, when both have read it.
      ptx::named_barrier_sync<1, 128 * kConsumers>();
      float dq[32];
      {
        const u64 a = ptx::wgmma_advance(scores, buffer);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kKeys / 16; i++) QueryMma::ss<true, true>(dq, rows(a, i), rows(k16, i), i != 0);
        ptx::wgmma_commit();
      }

      // S^T of the next tile, in the registers of P. NOTES: where there is none the tensor cores go through stale memory and nobody
      // looks.
      ptx::mbarrier_wait_uniform(bar(kFullQ8, next.index), next.parity, it + 1 == total);
      issue_logits(next.index);

      ptx::wgmma_wait<1>();
      ptx::keep(dq);
      ptx::keep(dk);
      release(kFullQ16, ring.index);

      // Add dQ
      // NOTES: the copy before had the time of a tile; in turn, the next block of keys may add once it is through.
      if (leader) {
        if (DETERMINISTIC) hand_on(it > 0);
        else ptx::bulk_wait_read<0>();
      }
      __syncwarp();
      const u32 part = base + kOffsetSums + 4096 * (4 * group + warp);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32* x = reinterpret_cast<const u32*>(dq + 4 * i);
        ptx::st_shared_v4(part + 512 * i + 16 * lane, x[0], x[1], x[2], x[3]);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (leader) {
        if (DETERMINISTIC) {
          turn = p.turns + 8 * (i64)tile + 4 * group + warp;
          while (ptx::ld_acquire(turn) != (u32)work.key_tile) {}
          ptx::fence_proxy_async_global();
        }
        ptx::bulk_reduce_add(p.dq_sum + (i64)tile * kSumFloats + 1024 * (4 * group + warp), part, 4096);
        ptx::bulk_commit();
      }
      ptx::wgmma_wait<0>();
      ptx::keep(s);
      release(kFullQ8, next.index);

      ring = next;
      tile += place.advance(p, work);
    }
    if (leader) {
      if (DETERMINISTIC) hand_on(total > 0);
      else ptx::bulk_wait<0>();
    }
    const u32 index = ptx::block_index();  // NOTES: decoded again, which costs no registers until here
    const Work end = decode(p, index / kSplits, index % kSplits);
#if SPLITS > 1
    // Leave dK and dV to the cluster
    ptx::named_barrier_sync<1, 128 * kConsumers>();
    const u32 mine = base + 16 * ptx::thread_index();
    auto leave = [&](const float (&x)[kDim / 2], int tensor) {
#pragma unroll
      for (int i = 0; i < kDim / 8; i++) {
        const u32* y = reinterpret_cast<const u32*>(x + 4 * i);
        ptx::st_shared_v4(mine + 4096 * (tensor * kDim / 8 + i), y[0], y[1], y[2], y[3]);
      }
    };
    leave(dv, 0);
    leave(dk, 1);
    ptx::cluster_sync();
    // Every block adds up and stores some runs of 32 columns
#pragma unroll 1
    for (int c = index % kSplits; c < kDim / 16; c += kSplits) {
      float x[16] = {};
#pragma unroll
      for (int rank = 0; rank < kSplits; rank++) {
        const u32 there = ptx::map_shared(mine, rank);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const uint4 y = ptx::ld_shared_cluster_v4(there + 4096 * (4 * c + j));
          x[4 * j] += __uint_as_float(y.x), x[4 * j + 1] += __uint_as_float(y.y);
          x[4 * j + 2] += __uint_as_float(y.z), x[4 * j + 3] += __uint_as_float(y.w);
        }
      }
      const bool is_dk = c >= kDim / 32;
      store(p, end, is_dk, is_dk ? c - kDim / 32 : c, x, is_dk ? dk_scale(p, end) : 1.0f);
    }
    ptx::cluster_sync();
#else
#pragma unroll
    for (int c = 0; c < kDim / 32; c++) {
      float x[16], y[16];
#pragma unroll
      for (int i = 0; i < 16; i++) x[i] = dv[16 * c + i], y[i] = dk[16 * c + i];
      store(p, end, false, c, x, 1.0f);
      store(p, end, true, c, y, dk_scale(p, end));
    }
#endif
  }
}
