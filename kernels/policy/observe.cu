// Updates a policy's memory with the statistics of a step, as the host's policies (src/policy) do.
//
//   auto-c         Algorithm 4: the largest ratios amax / bound of a burn-in, then c = min(1, kappa q) of their order statistic q;
//                  an overflow under c gives the constant up
//   delayed-paper  Eq. 1: the amax enters the history, unless it is not finite
//   delayed-te     TransformerEngine's delayed scaling: scale = 448 / (2^margin reduce(history)), then the history rolls
//
// Layout (types.cuh): reads the statistics, descales and bounds of a layer; updates memory and `status`, copies the
// statistics to `observed` and clears them for the next step. One block per layer; where auto-c pools the whole model, one block
// takes the layers in order.
#include "policy/types.cuh"

constexpr u32 THREADS = 256;

// By division or by multiplication with the rounded inverse; NaN overflows.
__device__ __forceinline__ bool overflows(float amax, float descale) {
  const float inverse = 1.f / descale;
  return !(amax / descale <= 448.f && amax * inverse <= 448.f);
}

// auto-c: gives up every constant under which a value overflowed.
__device__ void fall_back(const PolicyTable& p, const PolicyLayer& l, u32 layer) {
  bool any = false;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++) {
    if (tensor == OPERAND_V && !p.has_values) continue;
    const float* descales = descale_row(p, l, tensor);
    for (u32 i = threadIdx.x; i < row_length(l, tensor); i += THREADS) {
      Pool& pool = p.pools[pool_of(p, l, layer, tensor, i)];
      // Heads of one pool write the same word.
      const u32 phase = pool.phase;
      if ((phase == FROZEN || phase == FELL_BACK) && overflows(amax_entry(p, l, tensor, i), descales[i])) {
        any |= phase == FROZEN;
        pool.phase = FELL_BACK;
      }
    }
  }
  if (__syncthreads_or(any) && threadIdx.x == 0) atomicOr(&p.status[layer], STATUS_FELL_BACK);
}

// auto-c: inserts a ratio among the `keep` largest of a pool, descending.
__device__ void push(const PolicyTable& p, u32 index, u32 keep, double ratio) {
  Pool& pool = p.pools[index];
  double* top = p.top + (size_t)index * p.room;
  const u32 count = pool.count;
  if (count == keep && top[count - 1] >= ratio) return;
  u32 at = count < keep ? count : keep - 1;
  for (; at > 0 && top[at - 1] < ratio; at--) top[at] = top[at - 1];
  top[at] = ratio;
  if (count < keep) pool.count = count + 1;
}

// auto-c: adds the heads of a step to the slack of a tensor. One warp.
__device__ void add_slack(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32 tensor) {
  const double infinity = __longlong_as_double(0x7ff0000000000000ll);
  double least = infinity, most = 0.0, sum = 0.0;
  u32 count = 0;
  for (u32 i = threadIdx.x; i < row_length(l, tensor); i += 32) {
    const double amax = amax_entry(p, l, tensor, i), bound = bound_entry(p, l, tensor, i);
    if (!(amax > 0.0 && bound < infinity)) continue;
    const double slack = bound / amax;
    least = fmin(least, slack), most = fmax(most, slack), sum += slack, count++;
  }
  least = warp_reduce(least, [](double a, double b) { return fmin(a, b); });
  most = warp_reduce(most, [](double a, double b) { return fmax(a, b); });
  sum = warp_reduce(sum, [](double a, double b) { return a + b; });
  count = warp_reduce(count, [](u32 a, u32 b) { return a + b; });
  if (threadIdx.x != 0 || count == 0) return;
  Slack& all = p.slack[OUTPUT * layer + tensor];
  const bool first = all.count == 0;
  all.min = first ? least : fmin(all.min, least);
  all.max = first ? most : fmax(all.max, most);
  all.sum = first ? sum : all.sum + sum;
  all.count += count;
}

// auto-c: counts a burn-in step, unless a value is not finite. Returns whether it did.
__device__ bool burn_in(const PolicyTable& p, const PolicyLayer& l, u32 layer, double* row, double* scratch) {
  bool bad = false;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++)
    for (u32 i = threadIdx.x; i < row_length(l, tensor); i += THREADS) bad |= !is_finite(amax_entry(p, l, tensor, i));
  if (__syncthreads_or(bad)) return false;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++) {
    if (tensor == OPERAND_V && !p.has_values) continue;
    const u32 n = row_length(l, tensor), keep = l.keep[tensor];
    double most = 0.0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) most = larger(most, bound_entry(p, l, tensor, i));
    if (p.per_layer) most = block_largest(most, scratch);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
      const double bound = p.per_layer ? most : bound_entry(p, l, tensor, i);
      // A zero bound is an all-zero head: nothing of it can be observed.
      const double ratio = bound > 0.0 ? (double)amax_entry(p, l, tensor, i) / bound : 0.0;
      if (p.pooling == POOL_HEAD)
        push(p, pool_of(p, l, layer, tensor, i), keep, ratio);
      else
        row[i] = ratio;
    }
    __syncthreads();
    if (p.pooling != POOL_HEAD && threadIdx.x == 0)
      for (u32 i = 0; i < n; i++) push(p, pool_of(p, l, layer, tensor, i), keep, row[i]);
    if (threadIdx.x < 32) add_slack(p, l, layer, tensor);
    __syncthreads();
  }
  if (threadIdx.x == 0) p.seen[layer]++;
  __syncthreads();
  return true;
}

// auto-c: fixes the constants of the pools whose burn-in this layer's step completed.
__device__ void freeze(const PolicyTable& p, const PolicyLayer& l, u32 layer) {
  bool waits = p.seen[layer] != p.burn_in;
  if (p.pooling == POOL_MODEL)
    for (u32 i = threadIdx.x; i < p.n_layers; i += THREADS) waits |= p.seen[i] != p.burn_in;
  if (__syncthreads_or(waits)) return;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++) {
    const u32 pools = p.pooling == POOL_HEAD ? row_length(l, tensor) : 1;
    for (u32 i = threadIdx.x; i < pools; i += THREADS) {
      const u32 index = pool_of(p, l, layer, tensor, i);
      Pool& pool = p.pools[index];
      if (pool.phase != BURN_IN || pool.count == 0) continue;
      const double ratio = p.top[(size_t)index * p.room + pool.count - 1], c = p.kappa * ratio;
      if (ratio == 0.0)
        pool.phase = NOTHING_OBSERVED;
      else
        pool.phase = FROZEN, pool.c = c < 1.0 ? c : 1.0, pool.count = 0;
    }
  }
  __syncthreads();
}

// delayed: enters a step's amax into one slot. One warp.
__device__ void record(const PolicyTable& p, u32 index, float amax, u32 lane, u32& status) {
  Slot& slot = p.slots[index];
  float* ring = p.history + (size_t)index * p.history_length;
  const u32 place = slot.place, next = place + 1 == p.history_length ? 0 : place + 1;
  if (p.kind == DELAYED_PAPER) {
    if (lane == 0 && is_finite(amax))
      ring[place] = amax, slot.place = next;
    else if (lane == 0)
      status |= STATUS_NON_FINITE;
    return;
  }
  // The next entry is the oldest, which is dropped.
  float most = 0.f;
  for (u32 i = lane; i < p.history_length; i += 32)
    if (i != place) most = fmaxf(most, ring[i]);
  most = warp_reduce(most, [](float a, float b) { return fmaxf(a, b); });
  if (lane) return;
  const float reduced = p.most_recent ? amax : fmaxf(most, amax);
  ring[place] = amax, ring[next] = 0.f, slot.place = next;
  if (!is_finite(amax)) status |= STATUS_NON_FINITE;
  if (!is_finite(reduced) || reduced == 0.f) return;
  const float scale = p.scaled_max / reduced;
  slot.scale = is_finite(scale) ? scale : 3.4028235e38f;
  if (!is_finite(scale)) status |= STATUS_TINY;
}

// delayed: every slot of a layer, a warp per slot. Each tensor starts at another warp, so that those of one slot run at once.
__device__ void record_layer(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32& status) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (u32 tensor = LOGIT; tensor < TENSORS; tensor++)
    for (u32 s = (warp - tensor) % (THREADS / 32); s < slot_count(p, l, tensor); s += THREADS / 32) {
      float amax = 0.f;
      if (p.per_layer)
        for (u32 i = lane; i < row_length(l, tensor); i += 32) amax = larger(amax, amax_entry(p, l, tensor, i));
      else
        amax = amax_entry(p, l, tensor, s);
      record(p, first_slot(p, l, layer, tensor) + s, warp_largest(amax), lane, status);
    }
}

__device__ void observe(const PolicyTable& p, const PolicyLayer& l, u32 layer, double* row, double* scratch) {
  u32 status = 0;
  if (p.kind == DELAYED_PAPER || p.kind == DELAYED_TE) record_layer(p, l, layer, status);
  if (p.kind == AUTO_C) {
    fall_back(p, l, layer);
    if (*p.restarts <= p.max_restarts && p.seen[layer] < p.burn_in) {
      if (!burn_in(p, l, layer, row, scratch)) status |= STATUS_NON_FINITE;
      freeze(p, l, layer);
    }
  }
  if (p.heads != nullptr)
    for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++)
      if (tensor != OPERAND_V || p.has_values)
        for (u32 i = threadIdx.x; i < row_length(l, tensor); i += THREADS)
          if ((double)amax_entry(p, l, tensor, i) > bound_entry(p, l, tensor, i)) status |= STATUS_BEYOND_BOUND;
  __syncthreads();
  const u32 words = stats_words(l.n_q, l.n_kv);
  u32 *from = p.stats + stats_offset(l), *to = p.observed + stats_offset(l);
  for (u32 i = threadIdx.x; i < words; i += THREADS) {
    const u32 word = from[i];
    if (word && (i % 4 == (i < 4 * l.n_q ? 3 : 1))) status |= STATUS_OVERFLOW;
    if (word && i >= 4 * l.n_q && i % 4 == 3) status |= STATUS_NON_FINITE;
    to[i] = word;
    from[i] = 0;
  }
  if (status) atomicOr(&p.status[layer], status);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) policy_observe(const PolicyTable* table, u32 first_layer, u32 count) {
  extern __shared__ double row[];  // [the most query heads of a layer]
  __shared__ double scratch[THREADS / 32];
  const PolicyTable& p = *table;
  for (u32 layer = first_layer + blockIdx.x; layer < first_layer + count; layer += gridDim.x) {
    observe(p, p.layers[layer], layer, row, scratch);
    __syncthreads();
  }
}

// auto-c: starts the burn-in of every pool and layer again. One block.
extern "C" __global__ void __launch_bounds__(THREADS) policy_restart(const PolicyTable* table, u32 pools) {
  const PolicyTable& p = *table;
  const u32 restarts = *p.restarts, next = restarts == 0xffffffffu ? restarts : restarts + 1;
  __syncthreads();
  for (u32 i = threadIdx.x; i < pools; i += THREADS) {
    p.pools[i].phase = next > p.max_restarts ? TOO_MANY_RESTARTS : BURN_IN;
    p.pools[i].count = 0;
  }
  for (u32 layer = threadIdx.x; layer < p.n_layers; layer += THREADS) p.seen[layer] = 0;
  for (u32 i = threadIdx.x; i < OUTPUT * p.n_layers; i += THREADS) p.slack[i].count = 0;
  if (threadIdx.x == 0) *p.restarts = next;
}
