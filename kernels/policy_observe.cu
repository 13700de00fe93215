// Takes in what the attention calls reported: updates the policy's memory as the policies of the host do, sets the status,
// keeps a copy of the statistics and clears them for the next step. A block a layer; where auto-c pools the whole model,
// one block goes through the layers in order.
#include "policy_types.cuh"

constexpr u32 THREADS = 256;

// By division or by multiplication with the rounded inverse; NaN does.
__device__ __forceinline__ bool overflows(float amax, float descale) {
  const float inverse = 1.f / descale;
  return !(amax / descale <= 448.f && amax * inverse <= 448.f);
}

// Gives up every constant under which something overflowed.
__device__ void fall_back(const PolicyTable& p, const PolicyLayer& l, u32 layer) {
  bool any = false;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++) {
    if (tensor == OPERAND_V && !p.has_values) continue;
    const float* descales = plan_row(p, l, tensor);
    for (u32 i = threadIdx.x; i < row_length(l, tensor); i += THREADS) {
      const u32 pool = pool_of(p, l, tensor, layer, i);
      // Heads of one pool write the same word.
      const u32 phase = p.phases[pool];
      if ((phase == FROZEN || phase == FELL_BACK) && overflows(amax_entry(p, l, tensor, i), descales[i])) {
        any |= phase == FROZEN;
        p.phases[pool] = FELL_BACK;
      }
    }
  }
  if (__syncthreads_or(any) && threadIdx.x == 0) atomicOr(&p.status[layer], STATUS_FELL_BACK);
}

// Adds a ratio to the largest of its pool, descending.
__device__ void push(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 pool, double ratio) {
  const u32 keep = l.keep[tensor], count = p.counts[pool];
  double* top = p.top + p.top_base[tensor] + (size_t)(pool - p.pool_base[tensor]) * p.room[tensor];
  if (count == keep && top[count - 1] >= ratio) return;
  u32 at = count < keep ? count : keep - 1;
  for (; at > 0 && top[at - 1] < ratio; at--) top[at] = top[at - 1];
  top[at] = ratio;
  if (count < keep) p.counts[pool] = count + 1;
}

// Adds a step's heads to the slack of a tensor. One warp.
__device__ void add_slack(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 layer) {
  const double infinity = __longlong_as_double(0x7ff0000000000000ll);
  double least = infinity, most = 0.0, sum = 0.0;
  u32 count = 0;
  for (u32 i = threadIdx.x; i < row_length(l, tensor); i += 32) {
    const double amax = amax_entry(p, l, tensor, i), bound = bound_entry(p, l, tensor, i);
    if (!(amax > 0.0 && bound < infinity)) continue;
    const double slack = bound / amax;
    least = fmin(least, slack), most = fmax(most, slack), sum += slack, count++;
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    least = fmin(least, __shfl_xor_sync(0xffffffffu, least, step));
    most = fmax(most, __shfl_xor_sync(0xffffffffu, most, step));
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
    count += __shfl_xor_sync(0xffffffffu, count, step);
  }
  if (threadIdx.x != 0 || count == 0) return;
  SlackWords& all = p.slack[OUTPUT * layer + tensor];
  const bool first = all.count == 0;
  all.min = first ? least : fmin(all.min, least);
  all.max = first ? most : fmax(all.max, most);
  all.sum = first ? sum : all.sum + sum;
  all.count += count;
}

// Takes a burn-in step in; nothing where a value is not finite. Says whether it did.
__device__ bool burn_in(const PolicyTable& p, const PolicyLayer& l, u32 layer, double* row, double* scratch) {
  bool bad = false;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++)
    for (u32 i = threadIdx.x; i < row_length(l, tensor); i += THREADS) bad |= !is_finite(amax_entry(p, l, tensor, i));
  if (__syncthreads_or(bad)) return false;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++) {
    if (tensor == OPERAND_V && !p.has_values) continue;
    const u32 n = row_length(l, tensor);
    double most = 0.0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
      const double bound = bound_entry(p, l, tensor, i);
      most = most != most || most >= bound ? most : bound;
    }
    if (p.per_layer) most = block_largest(most, scratch);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
      const double bound = p.per_layer ? most : bound_entry(p, l, tensor, i);
      // A zero bound is an all-zero head: nothing of it can be observed.
      const double ratio = bound > 0.0 ? (double)amax_entry(p, l, tensor, i) / bound : 0.0;
      if (p.pooling == POOL_HEAD)
        push(p, l, tensor, pool_of(p, l, tensor, layer, i), ratio);
      else
        row[i] = ratio;
    }
    __syncthreads();
    if (p.pooling != POOL_HEAD && threadIdx.x == 0)
      for (u32 i = 0; i < n; i++) push(p, l, tensor, pool_of(p, l, tensor, layer, i), row[i]);
    if (threadIdx.x < 32) add_slack(p, l, tensor, layer);
    __syncthreads();
  }
  if (threadIdx.x == 0) p.seen[layer]++;
  __syncthreads();
  return true;
}

// Fixes the constants of the pools that this layer's step completed.
__device__ void freeze(const PolicyTable& p, const PolicyLayer& l, u32 layer) {
  bool waits = p.seen[layer] != p.burn_in;
  if (p.pooling == POOL_MODEL)
    for (u32 l = threadIdx.x; l < p.layers; l += THREADS) waits |= p.seen[l] != p.burn_in;
  if (__syncthreads_or(waits)) return;
  for (u32 tensor = LOGIT; tensor < OUTPUT; tensor++) {
    const u32 heads = p.pooling == POOL_HEAD ? row_length(l, tensor) : 1;
    for (u32 i = threadIdx.x; i < heads; i += THREADS) {
      const u32 pool = pool_of(p, l, tensor, layer, i), count = p.counts[pool];
      if (p.phases[pool] != BURN_IN || count == 0) continue;
      const double* top = p.top + p.top_base[tensor] + (size_t)(pool - p.pool_base[tensor]) * p.room[tensor];
      const double ratio = top[count - 1];
      if (ratio == 0.0) {
        p.phases[pool] = NOTHING_OBSERVED;
        continue;
      }
      const double c = p.kappa * ratio;
      p.phases[pool] = FROZEN, p.constants[pool] = c < 1.0 ? c : 1.0, p.counts[pool] = 0;
    }
  }
  __syncthreads();
}

// Takes a step's amax into one slot's ring, a warp a slot.
__device__ void record(const PolicyTable& p, u32 slot, float amax, u32 lane, u32& status) {
  float* ring = p.history + (size_t)slot * p.history_length;
  const u32 place = p.places[slot], next = place + 1 == p.history_length ? 0 : place + 1;
  if (p.kind == DELAYED_PAPER) {
    // The place holds the oldest.
    if (lane == 0) {
      if (is_finite(amax))
        ring[place] = amax, p.places[slot] = next;
      else
        status |= STATUS_NON_FINITE;
    }
    return;
  }
  // The place is where the running step writes; the next one holds the oldest, which is dropped.
  float most = 0.f;
  for (u32 i = lane; i < p.history_length; i += 32)
    if (i != place) most = fmaxf(most, ring[i]);
#pragma unroll
  for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  if (lane) return;
  const float reduced = p.most_recent ? amax : fmaxf(most, amax);
  ring[place] = amax, ring[next] = 0.f, p.places[slot] = next;
  if (!is_finite(amax)) status |= STATUS_NON_FINITE;
  if (!is_finite(reduced) || reduced == 0.f) return;
  const float scale = p.scaled_max / reduced;
  if (is_finite(scale))
    p.scales[slot] = scale;
  else
    p.scales[slot] = 3.4028235e38f, status |= STATUS_TINY;
}

__device__ void record_layer(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32& status) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 slots = slot_count(p, l), first = first_slot(p, l, layer);
  for (u32 s = warp; s < slots; s += THREADS / 32) {
    u32 tensor = s, i = 0;
    if (!p.per_layer) {
      tensor = LOGIT;
      while (tensor < OUTPUT && s >= row_offset(l, tensor + 1)) tensor++;
      i = s - row_offset(l, tensor);
    }
    float amax = 0.f;
    if (p.per_layer) {
      for (u32 j = lane; j < row_length(l, tensor); j += 32) amax = larger(amax, amax_entry(p, l, tensor, j));
#pragma unroll
      for (int step = 16; step; step >>= 1) amax = larger(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    } else {
      amax = amax_entry(p, l, tensor, i);
    }
    record(p, first + s, amax, lane, status);
  }
}

__device__ void observe(const PolicyTable& p, const PolicyLayer& l, u32 layer, double* row, double* scratch) {
  u32 status = 0;
  if (p.kind == DELAYED_PAPER || p.kind == DELAYED_TE) record_layer(p, l, layer, status);
  if (p.kind == AUTO_C) {
    fall_back(p, l, layer);
    if (*p.restarts <= p.max_restarts && p.seen[layer] < p.burn_in) {
      if (!burn_in(p, l, layer, row, scratch) && threadIdx.x == 0) status |= STATUS_NON_FINITE;
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
  u32 *from = p.stats + stats_row(l), *seen = p.seen_stats + stats_row(l);
  for (u32 i = threadIdx.x; i < words; i += THREADS) {
    const u32 word = from[i];
    if (word && (i % 4 == (i < 4 * l.n_q ? 3 : 1))) status |= STATUS_OVERFLOW;
    if (word && i >= 4 * l.n_q && i % 4 == 3) status |= STATUS_NON_FINITE;
    seen[i] = word;
    from[i] = 0;
  }
  if (status) atomicOr(&p.status[layer], status);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) policy_observe(const PolicyTable* table, u32 first_layer, u32 count) {
  extern __shared__ double row[];  // as many values as a layer has query heads, at most
  __shared__ double scratch[THREADS / 32];
  const PolicyTable& p = *table;
  for (u32 layer = first_layer + blockIdx.x; layer < first_layer + count; layer += gridDim.x) {
    const PolicyLayer& l = p.sizes[layer];
    observe(p, l, layer, row, scratch);
    __syncthreads();
  }
}

// auto-c: what was observed no longer counts. A thread a pool or layer.
extern "C" __global__ void __launch_bounds__(THREADS) policy_restart(const PolicyTable* table, u32 pools) {
  const PolicyTable& p = *table;
  const u32 restarts = *p.restarts;
  __syncthreads();
  const u32 next = restarts == 0xffffffffu ? restarts : restarts + 1;
  for (u32 i = threadIdx.x; i < pools; i += THREADS) {
    p.phases[i] = next > p.max_restarts ? TOO_MANY_RESTARTS : BURN_IN;
    p.counts[i] = 0;
  }
  for (u32 layer = threadIdx.x; layer < p.layers; layer += THREADS) p.seen[layer] = 0;
  for (u32 i = threadIdx.x; i < OUTPUT * p.layers; i += THREADS) p.slack[i].count = 0;
  if (threadIdx.x == 0) *p.restarts = next;
}
