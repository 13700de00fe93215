// Fused attention backward on E4M3 operands for Hopper (sm_90a): dK, dV, and dQ added up in f32.
//
//   S^T = K Q^T            FP8, the forward's instruction in its order of d: the same bits, so P = exp(S - LSE) sums to one
//   dP^T = V dO^T          BF16 from here on, from exact E4M3 values; descales stay scalars
//   dV += P^T dO           P^T and dS^T are register operands
//   dS = P (dP - delta)    to shared memory as well
//   dK += dS^T Q
//   dQ += dS K             each consumer makes one 64 x 64 part; the copy engine adds it to global memory, a warp's 4 KB at a time
//
// A block owns 128 keys of one KV head, and walks the query tiles of every head of its group (backward_walk.cuh): dK and dV stay in
// registers, no query head is expanded. Two consumer warpgroups own 64 keys each; in wide heads, 128 columns each of the block's 64
// keys. One producer warp brings queries and dO by TMA, three widen the queries to BF16. Blocks come longest first. S^T of the next
// tile runs while dQ of this one leaves.
//
// Layouts: backward.cuh, backward_tiles.cuh. Shared memory holds 16-bit tiles as runs of 64 columns, rows of 128 bytes, 128-byte swizzle; so rows
// and columns can both be the side that a product sums over, and nothing is transposed.
//
// Key tiles begin at a sequence's first key, query tiles at its first query; queries that no window joins with the keys of a block
// are not walked. Rows of a tile that lie outside the sequence, or see no key, are zero in shared memory before anything is
// multiplied by them.
//
// DQ8: dS goes to shared memory as E4M3 codes, query by query, with the 16 keys of a warp in the order in which `stmatrix` leaves pairs
// of 8-bit values: byte 2 r + e is key r + 8 e. K lies there as K^T in the same order of keys. The scales of rows stay in dq_sum until
// the last kernel.
//
// NaN in a row of q or dO reaches dK and dV of the key tiles that its query tile sees, and NaN in k or v all rows that see the
// key tile's block of queries; other heads and sequences are not touched.
#include "attention/backward.cuh"
#include "attention/backward_tiles.cuh"
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

// 1: logits are cap tanh(S / cap).
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif

namespace {

constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kWideners = 3;   // warps
constexpr bool kRemake = kFeatures || DETERMINISTIC;  // variants that are short of registers make addresses anew in each tile
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr float kLog2e = 1.4426950408889634f;

#if DETERMINISTIC && VARLEN
// Whether sequences lie in order and share no rows. Of others there may be keys that no block has, for which all would wait.
__device__ __forceinline__ bool in_order(const Backward& p) {
  const Sequences& s = p.sequences;
  bool fine = true;
  for (int i = threadIdx.x; i < s.count; i += kThreads) {
    auto fits = [&](const int* starts, const int* ends, int rows) {
      return starts[i] >= 0 && starts[i] <= ends[i] && ends[i] <= (i + 1 < s.count ? starts[i + 1] : rows);
    };
    fine = fine && fits(s.q_starts, s.q_ends, p.batch * p.len_q) && fits(s.k_starts, s.k_ends, p.batch * p.len_k);
  }
  return __syncthreads_and(fine);
}
#endif

// Operand registers of 16 queries from their eight accumulators.
__device__ __forceinline__ void pack(u32* a, const float* x) {
  a[0] = ptx::bf16x2(x[0], x[1]);
  a[1] = ptx::bf16x2(x[2], x[3]);
  a[2] = ptx::bf16x2(x[4], x[5]);
  a[3] = ptx::bf16x2(x[6], x[7]);
}

// The queries of a tile that a thread's two keys are seen by, from its first column on: [from, to).
struct Seen {
  int from[2], to[2];
  __device__ __forceinline__ bool hides(int i) const {
    const int column = (i >> 2) * 8 + (i & 1), r = (i >> 1) & 1;
    return column < from[r] || (kFeatures && column >= to[r]);
  }
};
// Sets what a key is not seen by to zero.
__device__ __forceinline__ void mask(float (&x)[kRows / 2], const Seen& seen) {
#pragma unroll
  for (int i = 0; i < kRows / 2; i++)
    if (seen.hides(i)) x[i] = 0.0f;
}
#if SOFT_CAP
// The same of pairs in BF16.
__device__ __forceinline__ void mask(u32 (&x)[kRows / 4], const Seen& seen) {
#pragma unroll
  for (int i = 0; i < kRows / 4; i++) {
    if (seen.hides(2 * i)) x[i] &= 0xffff0000u;
    if (seen.hides(2 * i + 1)) x[i] &= 0xffffu;
  }
}
#endif

#if VARLEN || WINDOW
// Rows of a tile outside [from, to) to zero, in all of its runs of 64 columns.
__device__ __forceinline__ void clear_rows(u8* tile, int from, int to) {
  for (int i = threadIdx.x; i < kRuns * kRows * 8; i += 128 * kConsumers) {
    const int row = i / 8 % kRows;
    if (row < from || row >= to) *reinterpret_cast<uint4*>(tile + 16 * i) = make_uint4(0, 0, 0, 0);
  }
}
#endif

__device__ __forceinline__ float dk_scale(const Backward& p, const Work& work) {
  return p.softmax_scale * descale_of(p.q_descale, p.q_descale_strides, work.sequence.batch_q, work.kv_head) *
         descale_of(p.v_descale, p.v_descale_strides, work.sequence.batch_k, work.kv_head);
}
// Stores run `c` of a consumer's 32 columns of dK or dV from a thread's 16 accumulators of it.
__device__ __forceinline__ void store(const Backward& p, const Work& work, bool is_dk, int c, const float (&x)[16], float scale) {
  const int quad = threadIdx.x % 4, first_key = work.key_tile * kKeys + key_row(threadIdx.x);
  const int column = (kWide ? threadIdx.x / 128 * kOwn : 0) + 32 * c + 8 * quad;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int key = first_key + 8 * r;
    int batch = work.sequence.batch_k, row = work.sequence.k_row + key;
#if VARLEN
    // NOTES: a gap may reach over the end of a row of the batch.
    row += batch * p.len_k;
    batch = row / p.len_k, row -= batch * p.len_k;
#endif
    u16* out = is_dk ? row_of(p.dk, p.dk_strides, batch, row, work.kv_head) : row_of(p.dv, p.dv_strides, batch, row, work.kv_head);
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = ptx::bf16x2(x[4 * j + 2 * r] * scale, x[4 * j + 2 * r + 1] * scale);
    quad_transpose(a, quad);
    if (kFeatures && (key < work.sequence.first_key(p) || key >= work.sequence.len_k)) a[0] = a[1] = a[2] = a[3] = 0;
#if VARLEN
    const int keys = work.k_rows;
#else
    const int keys = p.len_k;
#endif
    if (key < keys && !(FILL && column >= (is_dk ? p.d : p.d_v))) *reinterpret_cast<uint4*>(out + column) = make_uint4(a[0], a[1], a[2], a[3]);
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
attention_backward(const __grid_constant__ TensorMap map_q8, const __grid_constant__ TensorMap map_d_out,
                   const __grid_constant__ Backward p) {
  extern __shared__ u8 raw[];
  u32 base = (ptx::shared_address(raw) + 1023u) & ~1023u;
  u8* aligned = raw + (base - ptx::shared_address(raw));
  const u32 full = base + kOffsetBarriers;
  auto bar = [&](int what, u32 stage) { return full + 8 * (what * kStages + stage); };
  constexpr int kToEmpty = 8 * kRings * kStages;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map_q8);
    ptx::prefetch_tensormap(&map_d_out);
    for (int i = 0; i < kRings * kStages; i++) {
      const int what = i / kStages;
      ptx::mbarrier_init(full + 8 * i, what == kFullQ16 ? ptx::kWarpArrivals * kWideners : 1);
      ptx::mbarrier_init(full + 8 * i + kToEmpty, ptx::kWarpArrivals * (4 * kConsumers + (what == kFullQ8 ? kWideners : 0)));
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
#if DETERMINISTIC && VARLEN
  // NOTES: in shared memory, a word for each warp, since registers are short.
  const bool ordered = in_order(p);
  if (threadIdx.x % 32 == 0) ptx::st_shared_u32(base + kOffsetOrder + threadIdx.x / 8, ordered);
#endif

  const Work work = decode(p, blockIdx.x / kSplits, blockIdx.x % kSplits);
  const int first_head = work.kv_head * (p.heads_q / p.heads_kv);

  if (group == kConsumers) {
    // Producer: one thread issues every copy
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) {
      Ring<kStages> ring;
      Place place(p, work);
      const int q_row = VARLEN ? work.sequence.q_row : 0, batch = work.sequence.batch_q;
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
#pragma unroll
        for (int run = 0; run < kRuns8; run++)
          ptx::tma_load_4d(to + kStageQ8 + run * kRows * kRun, &map_q8, for_q8, 128 * run, first_head + place.head,
                            q_row + place.m * kRows, batch);
        const u32 for_d_out = acquire(kFullDOut, 2 * kRows * kDim + kTermFloats * 4);
        ptx::bulk_load(base + kOffsetTerms + ring.index * kTermFloats * 4,
                       p.terms + tile_index(p, work.q_batch, first_head + place.head, work.q_slot + place.m) * kTermFloats, kTermFloats * 4,
                       for_d_out);
#pragma unroll
        for (int run = 0; run < kRuns; run++)
          ptx::tma_load_4d(to + kStageDOut + run * kRowRun, &map_d_out, for_d_out, 64 * run, first_head + place.head,
                            q_row + place.m * kRows, batch);
        ring.advance();
        place.advance(p, work);
      }
    }
    if (threadIdx.x >= kConsumers * 128 + 32) {
      // Wideners: Q from E4M3 to BF16, in shared memory
      const u32 thread = threadIdx.x - kConsumers * 128 - 32;
#pragma unroll 1
      for (u32 it = 0; it < (u32)work.total; it++) {
        const u32 index = it % kStages, parity = it / kStages % 2, stage = base + kOffsetStages + index * kStageBytes;
        ptx::mbarrier_wait(bar(kFullQ8, index), parity);
        ptx::mbarrier_wait(bar(kFullQ16, index) + kToEmpty, parity ^ 1);
#pragma unroll 1
        for (u32 row = thread / kPieces; row < kRows; row += 32 * kWideners / kPieces) {
          const uint4 x = ptx::ld_shared_v4(stage + kStageQ8 + offset8(row, thread % kPieces, kRows));
          const u32 to = stage + kStageQ16 + thread % kPieces / 4 * kRowRun + row * kRun + 16 * (thread % 4 * 2 ^ row % 8);
          const uint4 low = widened(x.x, x.y);
          ptx::st_shared_v4(to, low.x, low.y, low.z, low.w);
          const uint4 high = widened(x.z, x.w);
          ptx::st_shared_v4(to ^ 16, high.x, high.y, high.z, high.w);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (ptx::arrives(thread % 32)) {
          ptx::mbarrier_arrive(bar(kFullQ16, index));
          ptx::mbarrier_arrive(bar(kFullQ8, index) + kToEmpty);
        }
      }
    }
#if SPLITS > 1
    ptx::cluster_sync();
    ptx::cluster_sync();
#endif
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const bool leader = threadIdx.x % 32 == 0;
    const int lane = threadIdx.x % 32, quad = lane % 4;

    load_keys(p, work, aligned);
#if DQ8
    ptx::named_barrier_sync<1, 128 * kConsumers>();
    transpose_keys(base);
#endif
    ptx::fence_proxy_async();
    ptx::named_barrier_sync<1, 128 * kConsumers>();

    const u32 uniform_base = __shfl_sync(~0u, base, 0);
    const int keys_of = kWide ? 0 : 64 * group, columns_of = kWide ? 2 * group * kRowRun : 0;
    const u64 k8 = ptx::wgmma_descriptor(uniform_base + kOffsetK8 + keys_of * kRow8, 16, 8 * kRow8, kSwizzle8);
    const u64 v16 = operand(uniform_base + kOffsetV16 + keys_of * kRun, 16);
    // dQ: consumers share the columns of a tile of 64 queries, or the queries of one of 128
    constexpr u32 kShare = DQ8 ? 64 * kKeys : kKeyRun;
    const u64 k16 = operand(uniform_base + kOffsetK16 + (kRows == 64 ? group * kShare : 0), DQ8 ? 16 : kKeyRun);
    const u64 scores = operand(uniform_base + kOffsetScores + (kRows == 64 ? 0 : group * kShare), DQ8 ? 16 : kKeyRun);
    const u64 q8 = ptx::wgmma_descriptor(uniform_base + kOffsetStages + kStageQ8, 16, 8 * kRow8, kSwizzle8);
    const u64 q16 = operand(uniform_base + kOffsetStages + kStageQ16, kRowRun);
    const u64 d_out = operand(uniform_base + kOffsetStages + kStageDOut, kRowRun);
    // Row j of 8 x 8 matrix i of a `stmatrix` is named by lane 8 i + j
    auto row_address = [&](u32 thread) {
      // DQ8: queries are rows, and a warp's keys 16 bytes of each
      if (DQ8) return base + kOffsetScores + thread % 32 * kKeys + 16 * (thread / 32 ^ thread % 8);
      return base + kOffsetScores + ((kWide ? thread % 128 : thread) / 32 * 16 + thread % 16) * kRun;
    };
    const u32 kept_row = row_address(threadIdx.x);

    const Sequence& sequence = work.sequence;
    const float q_descale = descale_of(p.q_descale, p.q_descale_strides, sequence.batch_q, work.kv_head);
    const float logit = p.softmax_scale * q_descale * descale_of(p.k_descale, p.k_descale_strides, sequence.batch_k, work.kv_head);
#if SOFT_CAP
    const float scale = logit / p.soft_cap, cap = p.soft_cap * kLog2e;
#else
    const float scale = logit * kLog2e;
#endif

    float dk[kOwn / 2], dv[kOwn / 2], s[kRows / 2];
#pragma unroll
    for (int i = 0; i < kOwn / 2; i++) dk[i] = dv[i] = 0.0f;

    auto release = [&](int what, u32 stage) {
      if (EVERY_LANE || leader) ptx::mbarrier_arrive(bar(what, stage) + kToEmpty);
    };
    auto issue_logits = [&](u32 stage) {
      const u64 queries = ptx::wgmma_advance(q8, stage * kStageBytes);
      ptx::wgmma_fence();
      LogitMma::ss_overwrite(s, k8, queries);
#pragma unroll
      for (int i = 1; i < kColumns / 32; i++) LogitMma::ss(s, columns8(k8, i, kKeys), columns8(queries, i, kRows), 1);
      ptx::wgmma_commit();
    };

    const int total = work.total;
    // The first query that this thread's keys are seen by, counted from its first column of tile 0; none for what is no key
#if VARLEN || WINDOW
    const int first_key = sequence.first_key(p), first_query = sequence.first_query(p);
    // NOTES: made anew where it is needed, so that it costs no registers in between.
    auto seen_of = [&](int m) {
      const int index = ptx::thread_index(), column = 2 * (index % 4) + m * kRows;
      Seen seen;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int key = work.key_tile * kKeys + key_row(index) + 8 * r, at = key - sequence.diagonal;
        const bool is_key = key >= first_key && key < sequence.len_k;
        seen.from[r] = is_key ? (CAUSAL || WINDOW ? at - p.window_right : 0) - column : 1 << 30;
        seen.to[r] = (WINDOW ? min(at + p.window_left + 1, sequence.len_q) : sequence.len_q) - column;
      }
      return seen;
    };
#else
    auto first_seen = [&](u32 thread, int r) {
      const int key = work.key_tile * kKeys + key_row(thread) + 8 * r;
      return key >= p.len_k ? 1 << 30 : (CAUSAL ? key - p.diagonal : -(1 << 30)) - 2 * (int)(thread % 4);
    };
    const int kept[2] = {first_seen(threadIdx.x, 0), first_seen(threadIdx.x, 1)};
    auto seen_of = [&](int m) {
      Seen seen = {};
#pragma unroll
      for (int r = 0; r < 2; r++) seen.from[r] = (kRemake ? first_seen(ptx::thread_index(), r) : kept[r]) - m * kRows;
      return seen;
    };
#endif
    // Tiles from this one on are seen whole by this warpgroup's keys
    const int last_key = work.key_tile * kKeys + keys_of + 63;
#if VARLEN || WINDOW
    const bool all_keys = last_key < sequence.len_k && last_key - 63 >= first_key;
    const int whole_from = CAUSAL || WINDOW ? ceil_div(max(0, last_key - sequence.diagonal - p.window_right), kRows) : 0;
    const int sees_all = WINDOW ? min(last_key - 63 - sequence.diagonal + p.window_left + 1, sequence.len_q) : sequence.len_q;
    const int whole_to = all_keys ? max(0, sees_all) / kRows : 0;
#else
    const int whole_from = last_key >= p.len_k ? p.q_tiles : CAUSAL ? ceil_div(max(0, last_key - p.diagonal), kRows) : 0;
#endif

    Place place(p, work);
    u32 turn = 0;  // the tile that this warp's last part was added to
    auto word_of = [&](u32 tile) { return p.turns + 8 * (i64)tile + ptx::thread_index() / 32; };
    auto hand_on = [&](bool owed) {
      if (!owed) return;
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async_global();
      ptx::red_add_release(word_of(turn), 1);
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

#if VARLEN || WINDOW
      const int top = place.m * kRows;
      if (top < first_query || top + kRows > sequence.len_q) {
        // Rows that lie outside the sequence or see no key: of what they hold nothing may enter a product
        ptx::mbarrier_wait_uniform(bar(kFullDOut, ring.index), ring.parity);
        ptx::mbarrier_wait_uniform(bar(kFullQ16, ring.index), ring.parity);
        clear_rows(aligned + kOffsetStages + at + kStageDOut, first_query - top, sequence.len_q - top);
        clear_rows(aligned + kOffsetStages + at + kStageQ16, first_query - top, sequence.len_q - top);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync<1, 128 * kConsumers>();
      }
#endif

      // dP^T
      float dp[kRows / 2];
      ptx::mbarrier_wait_uniform(bar(kFullDOut, ring.index), ring.parity);
      {
        const u64 b = ptx::wgmma_advance(d_out, at);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kColumns / 16; i++)
          GradMma::ss<false, false>(dp, columns(v16, i, kKeyRun), columns(b, i, kRowRun), i != 0);
        ptx::wgmma_commit();
      }

      // P^T under it, and dV
#if VARLEN || WINDOW
      const bool masked = place.m < whole_from || place.m >= whole_to;
#else
      const bool masked = place.m < whole_from;
#endif
      u32 p16[kRows / 4];
#if SOFT_CAP
      // In place of P stays P times the slope of the cap, which is all that dS takes
#pragma unroll
      for (int c = 0; c < kRows / 8; c++) {
        const float2 lse = terms[4 * c];
        float prob[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float t = ptx::tanh_accurate(s[4 * c + j] * scale);
          prob[j] = ptx::exp2_approx(fmaf(t, cap, j % 2 ? -lse.y : -lse.x));
          s[4 * c + j] = prob[j] * fmaf(-t, t, 1.0f);
        }
        p16[2 * c] = ptx::bf16x2(prob[0], prob[1]);
        p16[2 * c + 1] = ptx::bf16x2(prob[2], prob[3]);
      }
      if (masked) mask(s, seen_of(place.m)), mask(p16, seen_of(place.m));
#else
#pragma unroll
      for (int c = 0; c < kRows / 8; c++) {
        const float2 lse = terms[4 * c];
        s[4 * c] = ptx::exp2_approx(fmaf(s[4 * c], scale, -lse.x));
        s[4 * c + 1] = ptx::exp2_approx(fmaf(s[4 * c + 1], scale, -lse.y));
        s[4 * c + 2] = ptx::exp2_approx(fmaf(s[4 * c + 2], scale, -lse.x));
        s[4 * c + 3] = ptx::exp2_approx(fmaf(s[4 * c + 3], scale, -lse.y));
      }
      if (masked) mask(s, seen_of(place.m));
#pragma unroll
      for (int i = 0; i < kRows / 16; i++) pack(&p16[4 * i], &s[8 * i]);
#endif
      {
        const u64 b = ptx::wgmma_advance(d_out, at + columns_of);
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
      if (masked) mask(dp, seen_of(place.m));
      u32 ds16[kRows / 4];
      const u32 buffer = it % kScoreStages * kScoreBytes, score_row = kRemake ? row_address(ptx::thread_index()) : kept_row;
#pragma unroll
      for (int i = 0; i < kRows / 16; i++) {
        pack(&ds16[4 * i], &dp[8 * i]);
#if !DQ8
        const u32 run = i / 4 * kKeyRun, chunk = 16 * ((i % 4 * 2 + lane / 16) ^ lane % 8);
        if (!kWide || i / (kRows / 32) == group)  // both consumers have it
          ptx::stmatrix<false>(score_row + buffer + run + chunk, ds16[4 * i], ds16[4 * i + 1], ds16[4 * i + 2], ds16[4 * i + 3]);
#endif
      }
#if DQ8
#pragma unroll
      for (int i = 0; i < kRows / 32; i++) {
        u32 codes[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float* x = &dp[16 * i + 4 * j];
          const float2 quant = terms[kQuantTerm * kRows / 2 + 16 * i + 4 * j];
          codes[j] = ptx::e4m3x4_merged(x[0] * quant.x, x[2] * quant.x, x[1] * quant.y, x[3] * quant.y);
        }
        ptx::stmatrix<true>(score_row + buffer + i * 32 * kKeys, codes[0], codes[1], codes[2], codes[3]);
      }
#endif
      ptx::fence_proxy_async();
      ptx::mbarrier_wait_uniform(bar(kFullQ16, ring.index), ring.parity);
      {
        const u64 b = ptx::wgmma_advance(q16, at + columns_of);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kRows / 16; i++) KeyMma::rs<true>(dk, &ds16[4 * i], rows(b, i), 1);
        ptx::wgmma_commit();
      }
      // NOTES: dV is done, and the fence above comes after the loads of delta.
      ptx::wgmma_wait<1>();
      ptx::keep(dv);
      release(kFullDOut, ring.index);

      // dQ, once both consumers have stored dS^T. NOTES: a buffer is written again after the next barrier, when both have read it.
      ptx::named_barrier_sync<1, 128 * kConsumers>();
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        float dq[32];
        {
          const u64 a = ptx::wgmma_advance(scores, buffer), b = ptx::wgmma_advance(k16, 2 * part * kKeyRun);
          ptx::wgmma_fence();
#if DQ8
          QueryMma8::ss_overwrite(dq, a, b);
#pragma unroll
          for (int i = 1; i < kKeys / 32; i++) QueryMma8::ss(dq, ptx::wgmma_advance(a, 32 * i), ptx::wgmma_advance(b, 32 * i), 1);
#else
#pragma unroll
          for (int i = 0; i < kKeys / 16; i++) QueryMma::ss<true, true>(dq, rows(a, i), rows(b, i), i != 0);
#endif
          ptx::wgmma_commit();
        }
        const bool is_last = part == kParts - 1;
        if (is_last) {
          // S^T of the next tile, in the registers of P. NOTES: where there is none the tensor cores go through stale memory and
          // nobody looks.
          ptx::mbarrier_wait_uniform(bar(kFullQ8, next.index), next.parity, it + 1 == total);
          issue_logits(next.index);
          ptx::wgmma_wait<1>();
        } else {
          ptx::wgmma_wait<0>();
        }
        ptx::keep(dq);
        if (part == 0) {
          ptx::keep(dk);
          release(kFullQ16, ring.index);
        }

        // Add dQ
        // NOTES: the copy before had the time of a tile; in turn, the next block of keys may add once it is through.
        if (leader) {
          if (DETERMINISTIC && part == 0) hand_on(it > 0);
          else ptx::bulk_wait_read<0>();
        }
        __syncwarp();
        const u32 thread = kRemake ? ptx::thread_index() : threadIdx.x, sums = base + kOffsetSums + 4096 * (thread / 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const u32* x = reinterpret_cast<const u32*>(dq + 4 * i);
          ptx::st_shared_v4(sums + 512 * i + 16 * (thread % 32), x[0], x[1], x[2], x[3]);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (leader) {
          const i64 tile = tile_index(p, work.q_batch, first_head + place.head, work.q_slot + place.m);
          if (DETERMINISTIC && part == 0) {
            turn = (u32)tile;
            // Sequences out of order have wrong gradients, but nobody waits for ever
            const bool waits = !kChecksOrder || ptx::ld_shared_u32(base + kOffsetOrder + ptx::thread_index() / 8);
            while (waits && ptx::ld_acquire(word_of(turn)) != (u32)(work.key_tile - first_key_tile(p, sequence, place.m))) {}
            ptx::fence_proxy_async_global();
          }
          ptx::bulk_reduce_add(p.dq_sum + tile * kSumFloats + 8192 * part + 1024 * (thread / 32), sums, 4096);
          ptx::bulk_commit();
        }
      }
      ptx::wgmma_wait<0>();
      ptx::keep(s);
      if (it + 1 < total) release(kFullQ8, next.index);

      ring = next;
      place.advance(p, work);
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
    auto leave = [&](const float (&x)[kColumns / 2], int tensor) {
#pragma unroll
      for (int i = 0; i < kColumns / 8; i++) {
        const u32* y = reinterpret_cast<const u32*>(x + 4 * i);
        ptx::st_shared_v4(mine + 4096 * (tensor * kColumns / 8 + i), y[0], y[1], y[2], y[3]);
      }
    };
    leave(dv, 0);
    leave(dk, 1);
    ptx::cluster_sync();
    // Every block adds up and stores some runs of 32 columns
#pragma unroll 1
    for (int c = index % kSplits; c < kColumns / 16; c += kSplits) {
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
      const bool is_dk = c >= kColumns / 32;
      store(p, end, is_dk, is_dk ? c - kColumns / 32 : c, x, is_dk ? dk_scale(p, end) : 1.0f);
    }
    ptx::cluster_sync();
#else
#pragma unroll
    for (int c = 0; c < kOwn / 32; c++) {
      float x[16], y[16];
#pragma unroll
      for (int i = 0; i < 16; i++) x[i] = dv[16 * c + i], y[i] = dk[16 * c + i];
      store(p, end, false, c, x, 1.0f);
      store(p, end, true, c, y, dk_scale(p, end));
    }
#endif
  }
}
