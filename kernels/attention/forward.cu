// Fused attention forward on E4M3 operands: O = softmax(scale Q K^T) V for Hopper (sm_90a).
//
// One producer warp feeds shared memory through TMA; each consumer warpgroup owns 64 query rows of one head. The grid is
// persistent: tiles come from a counter, longest first. A consumer follows one of two schedules:
//  ahead (two consumers, tiles of at most 128 keys): the logits of tile j + 1 are computed in a second set of accumulators
//    during the exponentials of tile j, P V of tile j is issued in parts as P is ready, and the maxima of tile j + 1 are
//    looked for among the exponentials of tile j. After an item's last tile comes the first of the next item.
//  together (three consumers, larger tiles, or logits through E4M3): the logits of tile j + 1 and P V of tile j are issued
//    together, and the softmax of j + 1 runs while P V, and the other consumers' products, are on the tensor cores.
//
// Calls with few rows are compiled with SPLIT, as attention_tile.cuh says.
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
#include "attention/epilogue.cuh"
#include "attention/rows.cuh"
#include "attention/softmax.cuh"
#include "attention/params.cuh"
#include "attention/pipeline.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "common/types.cuh"
#include "ptx/wgmma.cuh"

namespace {

using LogitMma = ptx::Wgmma<ptx::Operand::E4m3, kBlockN>;
using OutMma = ptx::Wgmma<ptx::Operand::E4m3, kDim>;
constexpr ptx::Swizzle kSwizzle = kDim == 128 ? ptx::Swizzle::B128 : ptx::Swizzle::B64;

__device__ __forceinline__ void issue_logits(float (&s)[kBlockN / 2], u64 q, u64 k) {
  ptx::wgmma_fence();
  LogitMma::ss_overwrite(s, q, k);
#pragma unroll
  for (int i = 1; i < kDim / 32; i++) LogitMma::ss(s, ptx::wgmma_advance(q, 32 * i), ptx::wgmma_advance(k, 32 * i), 1);
  ptx::wgmma_commit();
}
// Steps [First, Last) of 32 keys of O += P V.
template <int First, int Last>
__device__ __forceinline__ void issue_output(float (&o)[kDim / 2], const u32 (&pr)[kBlockN / 8], u64 v, bool fresh) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = First; i < Last; i++)
    OutMma::rs(o, &pr[4 * i], ptx::wgmma_advance(v, 32 * kDim * i), i != 0 || !fresh);
}

// A scale of logits, or NaN where it is none: a negative one would turn maxima round, past 1e30 logits leave f32, and what came out
// would look like values.
__device__ __forceinline__ float sane(float scale) { return scale >= 0.0f && scale < 1e30f ? scale : __int_as_float(0x7fffffff); }

// A word of a work item.
// NOTES: one lane of a warp reads it, the one that hands the slot back, and the others get it from that lane. So the compiler knows
// it uniform, too, and keeps loop and rings in uniform registers.
__device__ __forceinline__ int handed(const int& word) {
  int x = ptx::opaque_zero();
  if (threadIdx.x % 32 == 0) x = word;
  return __shfl_sync(~0u, x, 0);
}
__device__ __forceinline__ float handed(const float& word) { return __int_as_float(handed(reinterpret_cast<const int&>(word))); }

}  // namespace

extern "C" __constant__ int SHARED_BYTES = kSharedBytes;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_fwd(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
              const __grid_constant__ TensorMap map_v, const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  u32 base = (ptx::shared_address(raw) + 1023u) & ~1023u;
  u8* aligned = raw + (base - ptx::shared_address(raw));
  ptx::keep(base);
  Work* work = reinterpret_cast<Work*>(aligned + kOffsetTile);
  const u32 bars = base + kOffsetBarriers;
  auto q_full = [&](int stage, int w) { return bars + 8 * (stage * kConsumers + w); };
  auto q_empty = [&](int stage, int w) { return bars + 8 * (kQStages * kConsumers + stage * kConsumers + w); };
  const u32 k_full = bars + 16 * kQStages * kConsumers, k_empty = k_full + 8 * K_STAGES;
  const u32 v_full = k_empty + 8 * K_STAGES, v_empty = v_full + 8 * V_STAGES;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int consumers = kSplit ? p.consumers : kConsumers;

  // Initialise barriers
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map_q);
    ptx::prefetch_tensormap(&map_k);
    ptx::prefetch_tensormap(&map_v);
    for (int i = 0; i < kQStages * kConsumers; i++) {
      ptx::mbarrier_init(q_full(0, 0) + 8 * i, 1);
      ptx::mbarrier_init(q_empty(0, 0) + 8 * i, 4);
    }
    for (int i = 0; i < K_STAGES; i++) {
      ptx::mbarrier_init(k_full + 8 * i, 1);
      ptx::mbarrier_init(k_empty + 8 * i, 4 * consumers);
    }
    for (int i = 0; i < V_STAGES; i++) {
      ptx::mbarrier_init(v_full + 8 * i, 1);
      ptx::mbarrier_init(v_empty + 8 * i, 4 * consumers);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  // NOTES: the blocks that join parts come as soon as there is room, and wait for the last part.
  if (kSplit) ptx::griddepcontrol_launch_dependents();

  const int tiles = p.units * p.row_blocks * (kSplit ? p.parts : 1);

  if (group == kConsumers) {
    // Producer: one thread issues every copy
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) {
      Ring<kQStages> q;
      // NOTES: keys and values keep step, so that one ring would do. Where registers are short it does; elsewhere the code
      // with two is what was measured.
      Ring<K_STAGES> k;
      Ring<V_STAGES> own;
      Ring<V_STAGES>& v = kShortProducer ? k : own;
      const int group_size = p.heads_q / p.heads_kv;
      int index = blockIdx.x;
      while (true) {
        const bool alive = index < tiles;
        // NOTES: where every block has one item, the counter would be a trip to memory for nothing.
        const int next = !alive ? 0 : kSplit && tiles <= gridDim.x ? tiles : (int)(atomicAdd(p.counter, 1) + gridDim.x);

        const Tile t = decode(p, alive ? index : 0);
        const int head = kShortProducer ? (u32)t.head * p.heads_kv / p.heads_q : t.head / group_size;
        auto load_keys = [&](int n) {
          ptx::mbarrier_wait_uniform(k_empty + 8 * k.index, k.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(k_full + 8 * k.index, kTileBytes);
          ptx::tma_load_4d(base + kOffsetK + k.index * kTileBytes, &map_k, k_full + 8 * k.index, 0, head, n * kBlockN, t.batch);
          if (!kShortProducer) k.advance();
          ptx::mbarrier_wait_uniform(v_empty + 8 * v.index, v.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(v_full + 8 * v.index, kTileBytes);
          ptx::tma_load_3d(base + kOffsetV + v.index * kTileBytes, &map_v, v_full + 8 * v.index, 0, n * (kBlockN / 16),
                      t.batch * p.heads_kv + head);
          v.advance();
        };

#if SPLIT
        // NOTES: descales are asked for ahead of the first copies, and waited for behind them. Few copies: consumers let go of the last tile
        // of an item only when they have the next item.
        const float q_descale = p.q_descale[t.batch * p.q_descale_batch + head * p.q_descale_head];
        const float k_descale = p.k_descale[t.batch * p.k_descale_batch + head * p.k_descale_head];
        const int query_bytes = p.positions * p.tile_heads * kDim, first = t.first;
        int n = first + t.key_tiles - 1;
#pragma unroll 1
        for (int w = 0; w < consumers; w++) {
          ptx::mbarrier_wait_uniform(q_empty(q.index, w), q.parity ^ 1);
          if (alive) {
            ptx::mbarrier_expect_tx(q_full(q.index, w), query_bytes);
            ptx::tma_load_4d(base + (q.index * kConsumers + w) * kQBytes, &map_q, q_full(q.index, w), 0, t.head,
                        t.row + w * p.positions, t.batch);
          }
        }
#pragma unroll 1
        for (int i = 0; alive && i < kEager && n >= first; i++, n--) load_keys(n);
#endif

        // Hand out the tile, and load its queries
        Work item;
        item.tile = t;
        if (!alive) item.tile.key_tiles = -1;
#if SPLIT
        item.logit_scale = sane(p.softmax_scale * q_descale * k_descale);
        item.v_descale = p.parts == 1 ? p.v_descale[t.batch * p.v_descale_batch + head * p.v_descale_head] : 1.0f;
#else
        item.logit_scale = sane(p.softmax_scale * p.q_descale[t.batch * p.q_descale_batch + head * p.q_descale_head] *
                                p.k_descale[t.batch * p.k_descale_batch + head * p.k_descale_head]);
        item.v_descale = p.v_descale[t.batch * p.v_descale_batch + head * p.v_descale_head];
#endif
#if OUT_E4M3
        item.to_out = 1.0f / p.o_descale[t.batch * p.o_descale_batch + head * p.o_descale_head];
#endif
#if SPLIT
#pragma unroll 1
        for (int w = 0; w < consumers; w++) {
          work[q.index * kConsumers + w] = item;
          ptx::mbarrier_arrive(q_full(q.index, w));
          item.tile.row += p.positions;
        }
#else
        const int first = 0;
        int n = t.key_tiles - 1;
        for (int w = 0; w < consumers; w++) {
          ptx::mbarrier_wait_uniform(q_empty(q.index, w), q.parity ^ 1);
          work[q.index * kConsumers + w] = item;
          if (alive) {
            ptx::mbarrier_arrive_expect_tx(q_full(q.index, w), kQBytes);
            ptx::tma_load_4d(base + (q.index * kConsumers + w) * kQBytes, &map_q, q_full(q.index, w), 0, item.tile.head,
                        item.tile.row, t.batch);
          } else {
            ptx::mbarrier_arrive(q_full(q.index, w));
          }
          if (p.packed) item.tile.head++; else item.tile.row += kRows;
        }
#endif
        if (!alive) break;
        q.advance();

        // Stream keys and values, the last tile first
#if SPLIT
#pragma unroll 1
#endif
        for (; n >= first; n--) load_keys(n);
        index = next;
      }

      // Leave the counter at zero for the next launch
      if (!kSplit || tiles > gridDim.x) {
        __threadfence();
        if (atomicAdd(p.counter + 1, 1) == gridDim.x - 1) {
          p.counter[0] = 0;
          p.counter[1] = 0;
        }
      }
    }
  } else if (!kSplit || group < consumers) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const bool leader = threadIdx.x % 32 == 0;
    // This warpgroup, and this thread's part of the second level. NOTES: read anew at each use, as `place` is.
    auto mine = [&]() { return ptx::thread_index() / 128; };
    auto slots = [&]() { return reinterpret_cast<float4*>(aligned + kOffsetO) + mine() * kRows * kDim / 4 + ptx::thread_index() % 128; };
    u32 items = 0, it = 0;  // work items and key tiles taken so far: the places in the rings
    const u32 uniform_base = __shfl_sync(~0u, base, 0);
    const u64 desc_k = ptx::wgmma_descriptor(uniform_base + kOffsetK, 16, 8 * kDim, kSwizzle);
    // Core matrices of V: dims 128 bytes apart, groups of 16 keys 16 * kDim bytes apart
    const u64 desc_v = ptx::wgmma_descriptor(uniform_base + kOffsetV, 16 * kDim, 128, ptx::Swizzle::None);
    auto k_barrier = [&](u32 t) { return k_full + 8 * (t % K_STAGES); };
    auto v_barrier = [&](u32 t) { return v_full + 8 * (t % V_STAGES); };
    auto k_parity = [&](u32 t) { return t / K_STAGES & 1; };
    auto v_parity = [&](u32 t) { return t / V_STAGES & 1; };
    auto release_k = [&](u32 t) { if (leader) ptx::mbarrier_arrive(k_barrier(t) + 8 * K_STAGES); };
    auto release_v = [&](u32 t) { if (leader) ptx::mbarrier_arrive(v_barrier(t) + 8 * V_STAGES); };
    auto k_operand = [&](u32 t) { return ptx::wgmma_advance(desc_k, t % K_STAGES * kTileBytes); };
    auto v_operand = [&](u32 t) { return ptx::wgmma_advance(desc_v, t % V_STAGES * kTileBytes); };

    // Work items, once their queries are there; key_tiles < 0: there are no more
    struct Task {
      int key_tiles, row, first;
      u64 queries;
    };
    auto slot = [&](u32 item) -> const Work& { return work[item % kQStages * kConsumers + mine()]; };
    auto take = [&](u32 item) {
      ptx::mbarrier_wait_uniform(q_full(item % kQStages, mine()), item / kQStages & 1);
      const u32 at = __shfl_sync(~0u, base + (item % kQStages * kConsumers + mine()) * kQBytes, 0);
      int first = 0;
#if SPLIT
      first = handed(slot(item).tile.first);
#endif
      return Task{handed(slot(item).tile.key_tiles), handed(slot(item).tile.row), first,
                  ptx::wgmma_descriptor(at, 16, 8 * kDim, kSwizzle)};
    };
#if COMPACT
    Task task = {0, 0, 0, desc_k};
#else
    Task task = take(0);
#endif

#if CAUSAL
    // The last key that a query sees by that rule
    auto limit_of = [&](int row) { return kSplit ? row + p.diagonal : row + p.len_k - p.len_q; };
#endif
    // Key tiles of the task below this one need no mask
    auto whole_tiles = [&]() {
      int whole = p.len_k / kBlockN;
#if CAUSAL
      whole = min(whole, max(0, limit_of(task.row) + 1) / kBlockN);
#endif
      return kSplit ? max(0, whole - task.first) : whole;
    };
    // The last key that row r of this thread sees, counted from its first key of tile n
    auto last_key = [&](int n, int r) {
      const Place at = place();
      const int row = task.row + row_of(p, at.row + 8 * r).position;
      int last = p.len_k - 1;
#if CAUSAL
      last = min(last, limit_of(row));
#endif
      return (row < p.len_q ? last : -1) - (task.first + n) * kBlockN - 2 * at.quad;
    };

    // What the warpgroup holds of the item at hand
    float o[kDim / 2], scale;
#if LOGITS_E4M3
    float to_units;
#endif
    u32 pr[kBlockN / 8];
    Rows rows;
    bool fresh, flushed;  // O starts at the next product; part of it lies in shared memory
    auto open = [&]() {
      rows = {{kLowest, kLowest}, {0.0f, 0.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {-kLowest, -kLowest}, {kLowest, kLowest}, 0, 0};
      fresh = true, flushed = false;
#if SPLIT || TELEMETRY
      // NOTES: else a row that is none, whose logits are zeros, would keep its warp from integer order. Nobody reads what it comes to.
      const int first_row = handed(slot(items).tile.row);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Row at = row_of(p, place().row + 8 * r);
        if (!at.exists || first_row + at.position >= p.len_q) rows.reference[r] = rows.highest[r] = 0.0f, rows.lowest[r] = -1.0f;
      }
#endif
      const float logit_scale = handed(slot(items).logit_scale);
#if LOGITS_E4M3
      const float logit_descale = p.logit_descale[handed(slot(items).tile.head)];
      to_units = logit_scale / logit_descale, scale = logit_descale * kLog2e;
#else
      scale = logit_scale * kLog2e;
#endif
    };
    auto second_level = [&]() {
      flush<true>(o, slots(), rows.carry, !flushed);
      rows.carry[0] = rows.carry[1] = 1.0f;
      fresh = flushed = true;
    };
    // Masks (and rounds) the logits of tile n, and looks through them
    auto prepare = [&](float (&s)[kBlockN / 2], int n, bool masked, float (&top)[2], float (&low)[2]) {
      int limit[2];
      float seen[2] = {-kLowest, -kLowest};
      if (masked) {
        limit[0] = last_key(n, 0), limit[1] = last_key(n, 1);
        if (kMinimum) mask(s, limit, seen); else mask(s, limit);
      }
      scan<kMinimum>(s, top, low);
      if (masked) low[0] = seen[0], low[1] = seen[1];
#if LOGITS_E4M3
      confirm(s, top, low, rows, rows.highest, masked);
      // NOTES: counted where the extremes show that there is something to count.
      const float most = fmaxf(fmaxf(top[0], top[1]), -fminf(low[0], low[1])) * to_units;
      if (__any_sync(~0u, most > 448.0f)) rows.overflow += count_past(s, to_units);
      // NOTES: rounding keeps order, so the largest logit rounded is the largest rounded logit. It makes a masked one -448, so the
      // mask runs again.
#pragma unroll
      for (int r = 0; r < 2; r++) rows.highest[r] = fmaxf(rows.highest[r], top[r]);
      const float tops[2] = {top[0], top[1]};
      round_logits(top, to_units);
      round_logits(s, to_units);
      if (masked) {
        mask(s, limit);
#pragma unroll
        for (int r = 0; r < 2; r++) top[r] = tops[r] < kLowest ? tops[r] : top[r];
      }
#endif
    };
    // The end of an item: reads the rest of it, hands its slot back, writes what it came to
    auto close = [&]() {
      if (flushed) flush<false>(o, slots(), rows.carry, false);
      Work item;
      item.tile = {handed(slot(items).tile.batch), handed(slot(items).tile.head), handed(slot(items).tile.row), 0};
#if SPLIT
      item.tile.part = handed(slot(items).tile.part);
#endif
      item.logit_scale = handed(slot(items).logit_scale);
      item.v_descale = handed(slot(items).v_descale);
#if OUT_E4M3
      item.to_out = handed(slot(items).to_out);
#endif
      if (leader) ptx::mbarrier_arrive(q_empty(items % kQStages, mine()));
      items = __shfl_sync(~0u, items + 1, 0);

      const Tile& t = item.tile;
      const int quad = place().quad, my_row = place().row;
#if TELEMETRY && !SPLIT
      const u32 known = known_word(p, item);
#endif
      float factor[2];  // NOTES: a row with a visible key has a sum near 2^7 or more
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float sum = quad_sum(rows.sum[r]);
        factor[r] = sum > 1.0f ? item.v_descale * ptx::rcp_approx(sum) : 0.0f;
#if SPLIT
        const float lse = log_sum(sum, fmaf(rows.reference[r], scale, -kOffset));
        const Row at = row_of(p, my_row + 8 * r);
        const int position = t.row + at.position, head = t.head + at.head;
        if (quad == 0 && at.exists && position < p.len_q) {
          if (p.parts > 1) p.parts_lse[part_row(p, t, position, head)] = lse;
          else if (p.lse != nullptr) p.lse[((i64)t.batch * p.heads_q + head) * p.len_q + position] = lse * kLn2;
        }
#else
        const int row = t.row + my_row + 8 * r;
        if (p.lse != nullptr && quad == 0 && row < p.len_q)
          p.lse[((i64)t.batch * p.heads_q + t.head) * p.len_q + row] =
              log_sum(sum, fmaf(rows.reference[r], scale, -kOffset)) * kLn2;
#endif
      }
      multiply(o, factor);
#if TELEMETRY && SPLIT
      report(p, item, rows, o, my_row, quad);
#elif TELEMETRY
      report(p, item, rows, o, my_row, known);
#endif
      store(p, item, o, my_row, quad);
    };

#if AHEAD
    float top[2], low[2];
    // P of tile t and P V, a part at a time, with what can be known of tile n, whose logits are on their way. Not `held`: there is no
    // tile t; not `real`: those logits are of no tile.
    auto product = [&](float (&s)[kBlockN / 2], u32 t, float (&next)[kBlockN / 2], int n, bool masked, bool held, bool real) {
      float shift[2], part[4] = {};
      offsets(rows, scale, shift);
      ptx::keep(o);
#pragma unroll
      for (int c = 0; c < kBlockN / kPart; c++) {
        if (c == kBlockN / kPart - 1) {
          ptx::wgmma_wait<(kBlockN > kPart ? 1 : 0)>();
          ptx::keep(next);
          if (real) release_k(t + 1);
          prepare(next, n, masked, top, low);
        }
        if (c == 0) exponentials<0, kPart / 2>(s, scale, shift, part);
        if (c == 1) exponentials<kPart / 2, kBlockN / 2>(s, scale, shift, part);
#pragma unroll
        for (int i = kPart / 16 * c; i < kPart / 16 * (c + 1); i++) pack(pr, s, i);
        if (c == 0 && COMPACT) ptx::mbarrier_wait_uniform(v_barrier(t), v_parity(t), !held);
        if (c == 0 && !COMPACT) ptx::mbarrier_wait_uniform(v_barrier(t), v_parity(t));
        if (c == 0) issue_output<0, kPart / 32>(o, pr, v_operand(t), fresh);
        if (c == 1) issue_output<kPart / 32, kBlockN / 32>(o, pr, v_operand(t), fresh);
        ptx::wgmma_commit();
      }
      fresh = false;
      add_up(rows, part);
    };
#if COMPACT
    // NOTES: a call of few tiles waits for its own instructions, which come from far. So one copy of them makes every tile, the next item's
    // first logits and an item's last product too, and the first turn, of no tile at all, brings them while the first copies are on their way.
    float logits[kBlockN / 2] = {}, next[kBlockN / 2];
    rows = {}, scale = 0.0f, fresh = true;
    int left = 0, whole = 0, collected = 0;  // tiles of the task whose logits are still to come; products since O was flushed
    bool held = false;                       // `logits` are of the item at hand
    for (bool begun = false;; begun = true) {
      const bool crossing = left == 0;
      if (crossing && begun) {
        task = take(items + (held ? 1 : 0));
        whole = whole_tiles(), left = max(0, task.key_tiles);
      }
      const bool real = left > 0, masked = left > whole;
      const u32 t = it;
      ptx::mbarrier_wait_uniform(k_barrier(t), k_parity(t), !real);
      issue_logits(next, task.queries, k_operand(t));
      product(logits, t - 1, next, left - 1, masked, held, real);
      ptx::wgmma_wait<0>();
      ptx::keep(o);
      if (held) release_v(t - 1);
      if (crossing && begun) {
        // An item without keys is over before it begins
        bool empty = task.key_tiles == 0;
        do {
          if (held) close();
          held = empty, empty = false;
          if (held || real) open();
          if (held)
#pragma unroll
            for (int i = 0; i < kDim / 2; i++) o[i] = 0.0f;
        } while (held);
        if (task.key_tiles < 0) break;
        held = real, collected = -1;
      }
      if (real) {
        if (settle(next, top, low, rows, scale, masked)) multiply(o, rows.rescale);
        if (++collected == kFlushTiles) second_level(), collected = 0;
      }
      it = __shfl_sync(~0u, real ? t + 1 : t, 0), left = __shfl_sync(~0u, real ? left - 1 : 0, 0);
#pragma unroll
      for (int i = 0; i < kBlockN / 2; i++) logits[i] = next[i];
    }
#else
    // `odd` may hold the first logits of the task, computed under the last product of the item before; `top` and `low` what
    // `prepare` found in them.
    float even[kBlockN / 2], odd[kBlockN / 2];
    bool begun = false;
    while (task.key_tiles >= 0) {
      open();
      if (task.key_tiles == 0) {
#pragma unroll
        for (int i = 0; i < kDim / 2; i++) o[i] = 0.0f;
        close();
        task = take(items);
        continue;
      }
      const int key_tiles = task.key_tiles;
      const u32 stop = it + key_tiles - (begun ? 1 : 0);
      int whole = whole_tiles();
      u32 ready = 0;
      auto step = [&](float (&s)[kBlockN / 2], float (&next)[kBlockN / 2], bool masked) {
        const u32 t = it;
        const int n = stop - t - 1;
        ptx::mbarrier_wait_uniform(k_barrier(t), k_parity(t), ready);
        issue_logits(next, task.queries, k_operand(t));
        it = t + 1;
        product(s, t - 1, next, n, masked && n >= whole, true, true);
        ready = masked ? 0 : ptx::mbarrier_try_wait(k_barrier(t + 1), k_parity(t + 1));

        // Collect P V
        const bool moved = settle(next, top, low, rows, scale, masked && n >= whole);
        ptx::wgmma_wait<0>();
        ptx::keep(o);
        release_v(t - 1);
        if (moved) multiply(o, rows.rescale);
      };

      // First logits, where the item before did not bring them
      if (!begun) {
        ptx::mbarrier_wait_uniform(k_barrier(it), k_parity(it));
        issue_logits(odd, task.queries, k_operand(it));
        ptx::wgmma_wait<0>();
        ptx::keep(odd);
        release_k(it);
        it++;
        prepare(odd, key_tiles - 1, key_tiles > whole, top, low);
      }
      settle(odd, top, low, rows, scale, key_tiles > whole);

      // Pairs of tiles follow, so that the last one's logits are in `even`: the masked ones apart, and a flush where due
      if (key_tiles % 2 != 0) {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i++) even[i] = odd[i];
      } else {
        // NOTES: a loop that never repeats, since straight code costs spills.
        do step(odd, even, true);
        while (p.units < 0);
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

      // The last product, and the next item's first logits
      // NOTES: where there are none the tensor cores go through stale memory and nobody looks: a branch would serialise them. The
      // loop never repeats, as above.
      const u32 t = it;
      task = take(items + 1);
      if (CAUSAL) whole = whole_tiles();
      begun = task.key_tiles > 0;
      do {
        ptx::mbarrier_wait_uniform(k_barrier(t), k_parity(t), begun ? ready : 1);
        issue_logits(odd, task.queries, k_operand(t));
        product(even, t - 1, odd, task.key_tiles - 1, task.key_tiles > whole, true, begun);
        ptx::wgmma_wait<0>();
        ptx::keep(o);
        release_v(t - 1);
      } while (p.units < 0);
      it = __shfl_sync(~0u, begun ? t + 1 : t, 0);
      close();
    }
#endif  // COMPACT
#else
    while (task.key_tiles >= 0) {
      open();
      if (task.key_tiles == 0) {
#pragma unroll
        for (int i = 0; i < kDim / 2; i++) o[i] = 0.0f;
        close();
        task = take(items);
        continue;
      }
      const u32 stop = it + task.key_tiles;
      const int whole = whole_tiles();
      float s[kBlockN / 2], top[2], low[2];
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
        ptx::mbarrier_wait_uniform(k_barrier(t), k_parity(t));
        issue_logits(s, task.queries, k_operand(t));
        ptx::mbarrier_wait_uniform(v_barrier(t - 1), v_parity(t - 1));
        ptx::keep(o);
        issue_output<0, kBlockN / 32>(o, pr, v_operand(t - 1), fresh);
        ptx::wgmma_commit();
        fresh = false;
        it = t + 1;

        // Softmax under P V
        masked = masked && n >= whole;
        ptx::wgmma_wait<1>();
        ptx::keep(s);
        prepare(s, n, masked, top, low);
        const bool moved = settle(s, top, low, rows, scale, masked);
        exponentiate();
        // NOTES: the assembler would sink the softmax below the next wait. A release that depends on its result (and
        // always happens: no sum is negative) pins it here.
        if (!(rows.sum[0] + rows.sum[1] < 0.0f)) release_k(t);

        // Collect P V and round P for the next
        ptx::wgmma_wait<0>();
        ptx::keep(o);
        release_v(t - 1);
        if (moved) multiply(o, rows.rescale);
        pack_all();
      };

#if CAUSAL && CONSUMERS > 2
      // Pass over tiles that only later rows of the block see
      // NOTES: with two consumers it is one tile at most, and the loop costs the compiler its knowledge of uniformity.
      const int mine = max(1, ceil_div(min(p.len_k, task.row + kRows + p.len_k - p.len_q), kBlockN));
      for (int n = task.key_tiles; n > mine; n--, it++) {
        ptx::mbarrier_wait_uniform(k_barrier(it), k_parity(it));
        release_k(it);
        ptx::mbarrier_wait_uniform(v_barrier(it), v_parity(it));
        release_v(it);
      }
#endif

      // First logits
      ptx::mbarrier_wait_uniform(k_barrier(it), k_parity(it));
      issue_logits(s, task.queries, k_operand(it));
      ptx::wgmma_wait<0>();
      ptx::keep(s);
      release_k(it);
      it++;
      const bool masked = (int)(stop - it) >= whole;
      prepare(s, stop - it, masked, top, low);
      settle(s, top, low, rows, scale, masked);
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
      ptx::mbarrier_wait_uniform(v_barrier(it - 1), v_parity(it - 1));
      ptx::keep(o);
      issue_output<0, kBlockN / 32>(o, pr, v_operand(it - 1), fresh);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep(o);
      release_v(it - 1);
      close();
      task = take(items);
    }
#endif
  }
}
