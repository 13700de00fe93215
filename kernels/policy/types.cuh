// What the policy kernels read and write. The host fills one table per policy (src/device/policy/table.rs, sizes asserted on
// both sides); its pointers reach the bounds, statistics, memory and descales of every layer.
//
// Layout: `[layer][n]` holds the n values of one layer after those of another, without padding, where layers may have unequal
// numbers of heads. Row order of tensors: logits (n_q values), then q, k, v and o (n_kv values each).
#pragma once
#include "common/head_bound.cuh"
#include "common/step_stats.cuh"
#include "common/warp.cuh"

// The host's `PolicyKind`, `Tensor` and `Pooling`.
enum : u32 { GEOMETRY = 0, GEOMETRY_C_STAR = 1, AUTO_C = 2, DELAYED_PAPER = 3, DELAYED_TE = 4, CURRENT = 5 };
enum : u32 { LOGIT = 0, OPERAND_Q = 1, OPERAND_K = 2, OPERAND_V = 3, OUTPUT = 4, TENSORS = 5 };
enum : u32 { POOL_MODEL = 0, POOL_LAYER = 1, POOL_HEAD = 2 };
// Phases of an auto-c pool (`phase` in src/device/policy/memory.rs).
enum : u32 { BURN_IN = 0, FROZEN = 1, FELL_BACK = 2, TOO_MANY_RESTARTS = 3, NOTHING_OBSERVED = 4 };
// Status bits of a layer (`status` in src/device/policy/mod.rs says what they mean).
enum : u32 {
  STATUS_OVERFLOW = 1,
  STATUS_NON_FINITE = 2,
  STATUS_BEYOND_BOUND = 4,
  STATUS_FELL_BACK = 8,
  STATUS_TINY = 16,
  STATUS_NO_PLAN = 32,
};

// Heads of a layer, and of all layers before it.
struct PolicyLayer {
  u32 n_q, n_kv, first_q, first_kv;
  u32 keep[4];            // auto-c: ratios kept in the pool of logits, q, k and v
  double softmax_scale;   // with the largest factor on the query
};
static_assert(sizeof(PolicyLayer) == 8 * 4 + 8, "host mirror");

// auto-c: ratios that share a constant.
struct Pool {
  u32 phase;
  u32 count;              // ratios in its row of `top`
  double c;               // FROZEN and FELL_BACK: the constant
};
// auto-c: worst-case bound over observed amax, of a layer's heads over the steps of its burn-in.
struct Slack {
  double min, max, sum;
  u64 count;              // 0: nothing observed, the rest is undefined
};
// delayed: one tensor or head of a layer.
struct Slot {
  u32 place;              // paper: the ring's oldest entry; te: the entry that the running step writes
  float scale;            // te: quantization scale of the next step
};
// Constants of the paper's calibrated bound (Proposition 3.4): the host's `Isotropic`.
struct Isotropic {
  double sphere, c_star, c_halved, linear;
};
static_assert(sizeof(Pool) == 16 && sizeof(Slack) == 32 && sizeof(Slot) == 8 && sizeof(Isotropic) == 32, "host mirror");

struct PolicyTable {
  const HeadBound* heads;     // [layer][n_q], or null: no bounds
  const float* operands;      // [layer][q, k, v][n_kv]: bounds with rounding, 0 for a head of zeros
  u32* stats;                 // [layer][stats_words]
  u32* observed;              // the same, as of the last observation
  float* descales;            // [layer][n_q + 4 n_kv]
  float* tensor_descales;     // [layer][TENSORS]: the largest of each row
  u32* status;                // [layer]
  const PolicyLayer* layers;  // [layer]
  // auto-c
  u32* seen;                  // [layer]: burn-in steps counted
  u32* restarts;              // [1]
  Pool* pools;                // pools of logits, then of q, k and v
  double* top;                // [pool][room]: the largest ratios, descending
  Slack* slack;               // [layer][logit, q, k, v]
  // delayed
  Slot* slots;                // one per tensor and layer, or one per descale
  float* history;             // [slot][history_length]: rings
  u32 kind, n_layers;
  u32 per_layer;              // 1: one scale per tensor and layer
  u32 has_values;             // 1: v has bounds
  double logit_target, operand_target;  // what a value's bound is mapped onto
  double soft_cap;            // no logit passes it; infinity without one
  double d_model;
  Isotropic isotropic;        // geometry-c-star
  // auto-c
  double kappa;
  u32 pooling, burn_in, max_restarts, room;
  u32 pool_base[4];           // first pool of each tensor
  // delayed
  u32 history_length, most_recent;
  float scaled_max;           // te: 448 / 2^margin
  u32 unused;
};
static_assert(sizeof(PolicyTable) == 15 * 8 + 4 * 4 + 4 * 8 + sizeof(Isotropic) + 8 + 4 * 4 + 4 * 4 + 4 * 4, "host mirror");

__device__ __forceinline__ u32 row_length(const PolicyLayer& l, u32 tensor) { return tensor == LOGIT ? l.n_q : l.n_kv; }
__device__ __forceinline__ u32 row_offset(const PolicyLayer& l, u32 tensor) {
  return tensor == LOGIT ? 0 : l.n_q + (tensor - 1) * l.n_kv;
}
__device__ __forceinline__ float* descale_row(const PolicyTable& p, const PolicyLayer& l, u32 tensor) {
  return p.descales + l.first_q + 4 * l.first_kv + row_offset(l, tensor);
}
// First slot of a tensor. Its row has row_length slots, or one where scales are per layer.
__device__ __forceinline__ u32 first_slot(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32 tensor) {
  return p.per_layer ? layer * TENSORS + tensor : l.first_q + 4 * l.first_kv + row_offset(l, tensor);
}
__device__ __forceinline__ u32 slot_count(const PolicyTable& p, const PolicyLayer& l, u32 tensor) {
  return p.per_layer ? 1 : row_length(l, tensor);
}
// Index of the pool of head i.
__device__ __forceinline__ u32 pool_of(const PolicyTable& p, const PolicyLayer& l, u32 layer, u32 tensor, u32 i) {
  const u32 head = (tensor == LOGIT ? l.first_q : l.first_kv) + i;
  return p.pool_base[tensor] + (p.pooling == POOL_MODEL ? 0 : p.pooling == POOL_LAYER ? layer : head);
}
// Words of the statistics of all layers before this one.
__device__ __forceinline__ size_t stats_offset(const PolicyLayer& l) { return stats_words(l.first_q, l.first_kv); }

// Largest |value| that descale i of a tensor covers: a KV head takes the largest of its query heads.
__device__ __forceinline__ float amax_entry(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 i) {
  const u32* row = p.stats + stats_offset(l);
  const LogitWords* logits = (const LogitWords*)row;
  const CastWords* q = (const CastWords*)(row + 4 * l.n_q);
  const u32 group = l.n_q / l.n_kv;
  if (tensor == LOGIT) return amax_of(logits[i]);
  if (tensor == OPERAND_K) return amax_of(q[l.n_q + i]);
  if (tensor == OPERAND_V) return amax_of(q[l.n_q + l.n_kv + i]);
  float most = 0.f;
  for (u32 g = i * group; g < (i + 1) * group; g++)
    most = larger(most, tensor == OUTPUT ? __uint_as_float(logits[g].amax_o) : amax_of(q[g]));
  return most;
}

// worst-case bound, rounding included, on the values that descale i of a tensor covers. NaN where a weight was not finite.
__device__ __forceinline__ double bound_entry(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 i) {
  if (tensor != LOGIT) return p.operands[3 * (size_t)l.first_kv + (tensor - 1) * l.n_kv + i];
  const double bound = p.heads[l.first_q + i].rounded;
  return bound > p.soft_cap ? p.soft_cap : bound;
}

// Largest over the block, the same bits in every thread. Starts and ends with a barrier.
template <class T> __device__ T block_largest(T mine, T* scratch) {
  mine = warp_largest(mine);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = mine;
  __syncthreads();
  T most = scratch[0];
  for (u32 w = 1; w < blockDim.x / 32; w++) most = larger(most, scratch[w]);
  __syncthreads();
  return most;
}
