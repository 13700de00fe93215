// Fused attention forward on E4M3 operands: O = softmax(scale Q K^T) V for Hopper (sm_90a).
//
// One producer warp feeds shared memory through TMA; each consumer warpgroup owns 64 query rows of one head. The grid is
// persistent: tiles come from a counter, longest first. A consumer follows one of two schedules:
//  ahead (two consumers, tiles of at most 128 keys): the logits of tile j + 1 are computed in a second set of accumulators
//    during the exponentials of tile j, P V of tile j is issued in parts as P is ready, and the maxima of tile j + 1 are
//    looked for among the exponentials of tile j.
//  together (three consumers, larger tiles, or logits through E4M3): the logits of tile j + 1 and P V of tile j are issued
//    together, and the softmax of j + 1 runs while P V, and the other consumers' products, are on the tensor cores.
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
#include "attention_output.cuh"
#include "attention_softmax.cuh"
#include "attention_tile.cuh"
#include "barrier.cuh"
#include "convert.cuh"
#include "launch.cuh"
#include "math.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "wgmma.cuh"

namespace {

using LogitMma = Wgmma<kBlockN>;
using OutMma = Wgmma<kDim>;
constexpr Swizzle kSwizzle = kDim == 128 ? Swizzle::B128 : Swizzle::B64;

__device__ __forceinline__ void issue_logits(float (&s)[kBlockN / 2], u64 q, u64 k) {
  wgmma_fence();
  LogitMma::start(s, q, k);
#pragma unroll
  for (int i = 1; i < kDim / 32; i++) LogitMma::ss(s, wgmma_advance(q, 32 * i), wgmma_advance(k, 32 * i), 1);
  wgmma_commit();
}
// Steps [First, Last) of 32 keys of O += P V.
template <int First, int Last>
__device__ __forceinline__ void issue_output(float (&o)[kDim / 2], const u32 (&pr)[kBlockN / 8], u64 v, bool fresh) {
  wgmma_fence();
#pragma unroll
  for (int i = First; i < Last; i++)
    OutMma::rs(o, pr[4 * i], pr[4 * i + 1], pr[4 * i + 2], pr[4 * i + 3], wgmma_advance(v, 32 * kDim * i), i != 0 || !fresh);
}

// Looks through one tile's logits where integer order serves.
__device__ __forceinline__ void scan(const float (&s)[kBlockN / 2], const Rows& rows, float (&top)[2], float (&low)[2]) {
  largest_signed(s, top);
#if TELEMETRY && !LOGITS_E4M3
  low[0] = rows.lowest[0], low[1] = rows.lowest[1];
  smallest_unsigned(s, low);
#endif
}
// Takes in the maxima of one tile (from `scan`; looked for here where that was not enough). `whole`: nothing is masked. True
// where a maximum moved: O must be multiplied by `rows.rescale`.
__device__ __forceinline__ bool settle(const float (&s)[kBlockN / 2], float (&top)[2], float (&low)[2], Rows& rows, float scale,
                                       bool whole) {
  if (!rows.plain) {
    largest(s, top);
#if TELEMETRY && !LOGITS_E4M3
    low[0] = rows.lowest[0], low[1] = rows.lowest[1];
    smallest(s, low);
#endif
  }
#if TELEMETRY && !LOGITS_E4M3
#pragma unroll
  for (int r = 0; r < 2; r++) rows.lowest[r] = whole ? low[r] : rows.lowest[r];
#endif
  const bool moved = __any_sync(~0u, top[0] > rows.reference[0] || top[1] > rows.reference[1]);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = fmaxf(rows.reference[r], top[r]);
      rows.rescale[r] = exp2_mufu((rows.reference[r] - m) * scale);
      rows.reference[r] = m;
      rows.sum[r] *= rows.rescale[r];
      rows.carry[r] *= rows.rescale[r];
    }
    bool plain = rows.reference[0] >= 0.0f && rows.reference[1] >= 0.0f;
#if TELEMETRY && !LOGITS_E4M3
    plain = plain && rows.lowest[0] < 0.0f && rows.lowest[1] < 0.0f;
#endif
    // NOTES: through a shuffle the assembler knows it uniform.
    rows.plain = __shfl_sync(~0u, __all_sync(~0u, plain), 0);
  }
  return moved;
}
__device__ __forceinline__ void offsets(const Rows& rows, float scale, float (&shift)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) shift[r] = fmaf(rows.reference[r], scale, -kOffset);
}
__device__ __forceinline__ void add_up(Rows& rows, const float (&part)[4]) {
#pragma unroll
  for (int r = 0; r < 2; r++) rows.sum[r] += part[2 * r] + part[2 * r + 1];
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
          mbarrier_wait_uniform(q_empty(q.index, w), q.parity ^ 1);
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
          mbarrier_wait_uniform(k_empty + 8 * k.index, k.parity ^ 1);
          mbarrier_arrive_expect(k_full + 8 * k.index, kTileBytes);
          tma_load_4d(base + kOffsetK + k.index * kTileBytes, &map_k, k_full + 8 * k.index, 0, head, n * kBlockN, t.batch);
          k.advance();
          mbarrier_wait_uniform(v_empty + 8 * v.index, v.parity ^ 1);
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
    u32 items = 0, it = 0;  // work items and key tiles taken so far: the places in the rings
    const u32 uniform_base = __shfl_sync(~0u, base, 0);
    const u64 desc_k = wgmma_descriptor(uniform_base + kOffsetK, 16, 8 * kDim, kSwizzle);
    // Core matrices of V: dims 128 bytes apart, groups of 16 keys 16 * kDim bytes apart
    const u64 desc_v = wgmma_descriptor(uniform_base + kOffsetV, 16 * kDim, 128, Swizzle::None);
    auto k_barrier = [&](u32 t) { return k_full + 8 * (t % K_STAGES); };
    auto v_barrier = [&](u32 t) { return v_full + 8 * (t % V_STAGES); };
    auto k_parity = [&](u32 t) { return t / K_STAGES & 1; };
    auto v_parity = [&](u32 t) { return t / V_STAGES & 1; };
    auto release_k = [&](u32 t) { if (leader) mbarrier_arrive(k_barrier(t) + 8 * K_STAGES); };
    auto release_v = [&](u32 t) { if (leader) mbarrier_arrive(v_barrier(t) + 8 * V_STAGES); };
    auto k_operand = [&](u32 t) { return wgmma_advance(desc_k, t % K_STAGES * kTileBytes); };
    auto v_operand = [&](u32 t) { return wgmma_advance(desc_v, t % V_STAGES * kTileBytes); };

    while (true) {
      const u32 q_stage = items % kQStages;
      mbarrier_wait_uniform(q_full(q_stage, group), items / kQStages & 1);
      const Work& slot = work[q_stage * kConsumers + group];
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
      const u32 queries = __shfl_sync(~0u, base + (q_stage * kConsumers + group) * kQBytes, 0);
      const u64 desc_q = wgmma_descriptor(queries, 16, 8 * kDim, kSwizzle);

      Rows rows = {{kLowest, kLowest}, {0.0f, 0.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {-kLowest, -kLowest}, {kLowest, kLowest}, 0, 0};
      float o[kDim / 2];

      // Tiles below `whole` need no mask
      int whole = p.len_k / kBlockN;
#if CAUSAL
      whole = min(whole, max(0, first_row + p.len_k - p.len_q + 1) / kBlockN);
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
      // Masks (and rounds) the logits of tile n
      auto prepare = [&](float (&s)[kBlockN / 2], int n, bool masked) {
        masked = masked && n >= whole;
        int limit[2];
        if (masked) {
          limit[0] = last_key(n, 0), limit[1] = last_key(n, 1);
          mask(s, limit);
        }
#if TELEMETRY && !LOGITS_E4M3
        if (masked) extremes(s, rows.lowest, rows.highest);
#endif
#if LOGITS_E4M3
        float high[2] = {kLowest, kLowest}, low[2] = {-kLowest, -kLowest};
        extremes(s, low, high);
        // NOTES: counted where this thread's extremes show that there is something to count.
        const float most = fmaxf(fmaxf(high[0], high[1]), -fminf(low[0], low[1])) * to_units;
        if (__any_sync(~0u, most > 448.0f)) rows.overflow += count_past(s, to_units);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          rows.highest[r] = fmaxf(rows.highest[r], high[r]);
          rows.lowest[r] = fminf(rows.lowest[r], low[r]);
        }
        // NOTES: rounding makes a masked logit -448, so the mask runs again.
        round_logits(s, to_units);
        if (masked) mask(s, limit);
#endif
      };

      if (key_tiles > 0) {
        const u32 stop = it + key_tiles;
        bool fresh = true, flushed = false;
        float top[2], low[2];
        auto second_level = [&]() {
          flush<true>(o, slots, rows.carry, !flushed);
          rows.carry[0] = rows.carry[1] = 1.0f;
          fresh = flushed = true;
        };

#if AHEAD
        float even[kBlockN / 2], odd[kBlockN / 2];
        u32 ready = 0;
        // P of tile t and P V, a part at a time; with `more`, also what can be known of the next tile
        auto product = [&](float (&s)[kBlockN / 2], u32 t, bool more, float (&next)[kBlockN / 2], int n, bool masked) {
          float shift[2], part[4] = {};
          offsets(rows, scale, shift);
          wgmma_hold(o);
#pragma unroll
          for (int c = 0; c < kBlockN / kPart; c++) {
            if (more && c == kBlockN / kPart - 1) {
              wgmma_wait<(kBlockN > kPart ? 1 : 0)>();
              wgmma_hold(next);
              release_k(t + 1);
              prepare(next, n, masked);
              scan(next, rows, top, low);
            }
            if (c == 0) exponentials<0, kPart / 2>(s, scale, shift, part);
            if (c == 1) exponentials<kPart / 2, kBlockN / 2>(s, scale, shift, part);
#pragma unroll
            for (int i = kPart / 16 * c; i < kPart / 16 * (c + 1); i++) pack(pr, s, i);
            if (c == 0) mbarrier_wait_uniform(v_barrier(t), v_parity(t));
            if (c == 0) issue_output<0, kPart / 32>(o, pr, v_operand(t), fresh);
            if (c == 1) issue_output<kPart / 32, kBlockN / 32>(o, pr, v_operand(t), fresh);
            wgmma_commit();
          }
          fresh = false;
          add_up(rows, part);
        };
        auto step = [&](float (&s)[kBlockN / 2], float (&next)[kBlockN / 2], bool masked) {
          const u32 t = it;
          const int n = stop - t - 1;
          mbarrier_wait_uniform(k_barrier(t), k_parity(t), ready);
          issue_logits(next, desc_q, k_operand(t));
          it = t + 1;
          product(s, t - 1, true, next, n, masked);
          ready = masked ? 0 : mbarrier_try_wait(k_barrier(t + 1), k_parity(t + 1));

          // Collect P V
          const bool moved = settle(next, top, low, rows, scale, !masked || n < whole);
          wgmma_wait<0>();
          wgmma_hold(o);
          release_v(t - 1);
          if (moved) multiply(o, rows.rescale);
        };
        auto first = [&](float (&s)[kBlockN / 2]) {
          mbarrier_wait_uniform(k_barrier(it), k_parity(it));
          issue_logits(s, desc_q, k_operand(it));
          wgmma_wait<0>();
          wgmma_hold(s);
          release_k(it);
          it++;
          prepare(s, key_tiles - 1, true);
          settle(s, top, low, rows, scale, key_tiles <= whole);
        };

        // Pairs of tiles follow, so that the last one's logits are in `even`: the masked ones apart, and a flush where due
        if (key_tiles % 2 != 0) {
          first(even);
        } else {
          first(odd);
          step(odd, even, true);
        }
        // NOTES: through a shuffle the assembler knows it uniform.
        it = __shfl_sync(~0u, it, 0);
        int pairs = (key_tiles - 1) / 2, masked_pairs = (max(0, (int)(stop - it) - whole) + 1) / 2;
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
          if (pairs > 0) second_level();
        }
        product(even, it - 1, false, odd, 0, false);
#else
        float s[kBlockN / 2];
        auto exponentiate = [&]() {
          float shift[2], part[4] = {};
          offsets(rows, scale, shift);
          exponentials<0, kBlockN / 2>(s, scale, shift, part);
          add_up(rows, part);
        };
        auto pack_all = [&]() {
#pragma unroll
          for (int i = 0; i < kBlockN / 16; i++) pack(pr, s, i);
        };
        auto step = [&](bool masked) {
          // Issue the logits of this tile, then P V of the one before
          const u32 t = it;
          const int n = stop - t - 1;
          mbarrier_wait_uniform(k_barrier(t), k_parity(t));
          issue_logits(s, desc_q, k_operand(t));
          mbarrier_wait_uniform(v_barrier(t - 1), v_parity(t - 1));
          wgmma_hold(o);
          issue_output<0, kBlockN / 32>(o, pr, v_operand(t - 1), fresh);
          wgmma_commit();
          fresh = false;
          it = t + 1;

          // Softmax under P V
          wgmma_wait<1>();
          wgmma_hold(s);
          prepare(s, n, masked);
          if (rows.plain) scan(s, rows, top, low);
          const bool moved = settle(s, top, low, rows, scale, !masked || n < whole);
          exponentiate();
          // NOTES: the assembler would sink the softmax below the next wait. A release that depends on its result (and
          // always happens: no sum is negative) pins it here.
          if (!(rows.sum[0] + rows.sum[1] < 0.0f)) release_k(t);

          // Collect P V and round P for the next
          wgmma_wait<0>();
          wgmma_hold(o);
          release_v(t - 1);
          if (moved) multiply(o, rows.rescale);
          pack_all();
        };

#if CAUSAL && CONSUMERS > 2
        // Pass over tiles that only later rows of the block see
        // NOTES: with two consumers it is one tile at most, and the loop costs the compiler its knowledge of uniformity.
        const int mine = max(1, ceil_div(min(p.len_k, first_row + kRows + p.len_k - p.len_q), kBlockN));
        for (int n = key_tiles; n > mine; n--, it++) {
          mbarrier_wait_uniform(k_barrier(it), k_parity(it));
          release_k(it);
          mbarrier_wait_uniform(v_barrier(it), v_parity(it));
          release_v(it);
        }
#endif

        // First logits
        mbarrier_wait_uniform(k_barrier(it), k_parity(it));
        issue_logits(s, desc_q, k_operand(it));
        wgmma_wait<0>();
        wgmma_hold(s);
        release_k(it);
        it++;
        prepare(s, stop - it, true);
        settle(s, top, low, rows, scale, (int)(stop - it) < whole);
        exponentiate();
        pack_all();

        it = __shfl_sync(~0u, it, 0);
        int left = stop - it;
#if !LOGITS_E4M3
        int masked_left = max(0, left - whole);
#endif
        while (left > 0) {
          int run = min(left, kFlushTiles);
          left -= run;
#if LOGITS_E4M3
          // NOTES: a second copy of this longer step costs registers.
          for (; run > 0; run--) step(true);
#else
          for (; run > 0 && masked_left > 0; run--, masked_left--) step(true);
          for (; run > 0; run--) step(false);
#endif
          if (left > 0) second_level();
        }
        mbarrier_wait_uniform(v_barrier(it - 1), v_parity(it - 1));
        wgmma_hold(o);
        issue_output<0, kBlockN / 32>(o, pr, v_operand(it - 1), fresh);
        wgmma_commit();
#endif

        // Collect the last P V
        wgmma_wait<0>();
        wgmma_hold(o);
        release_v(it - 1);
        if (flushed) flush<false>(o, slots, rows.carry, false);
      } else {
#pragma unroll
        for (int i = 0; i < kDim / 2; i++) o[i] = 0.0f;
      }

      // Read the rest of the work item, release the queries
      const Work item = slot;
      const Tile& t = item.tile;
      const int t4 = place().quad, my_row = place().row;
      __syncwarp();  // every lane has read its copy
      if (leader) mbarrier_arrive(q_empty(q_stage, group));
      items++;

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
      report(p, item, rows, o, my_row);
#endif
      store(p, item, o, my_row, t4);
    }
  }
}
