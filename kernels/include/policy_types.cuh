// The table that a policy's kernels read: sizes, parameters, and where bounds, statistics, memory and plans lie. The host
// writes it once (src/cuda/policy/table.rs); sizes are asserted on both sides.
#pragma once
#include "head_bound.cuh"
#include "common/step_stats.cuh"

enum : u32 { GEOMETRY = 0, GEOMETRY_C_STAR = 1, AUTO_C = 2, DELAYED_PAPER = 3, DELAYED_TE = 4, CURRENT = 5 };
enum : u32 { LOGIT = 0, OPERAND_Q = 1, OPERAND_K = 2, OPERAND_V = 3, OUTPUT = 4, TENSORS = 5 };
enum : u32 { POOL_MODEL = 0, POOL_LAYER = 1, POOL_HEAD = 2 };
// Phases of an auto-c pool.
enum : u32 { BURN_IN = 0, FROZEN = 1, FELL_BACK = 2, TOO_MANY_RESTARTS = 3, NOTHING_OBSERVED = 4 };
// Status bits of a layer. They stay until the host clears them.
enum : u32 {
  STATUS_OVERFLOW = 1,      // a value passed 448 times its descale
  STATUS_NON_FINITE = 2,    // a value was NaN or infinite
  STATUS_BEYOND_BOUND = 4,  // a value passed its certain bound: the bounds are of other weights
  STATUS_FELL_BACK = 8,     // auto-c gave a constant up
  STATUS_TINY = 16,         // delayed-te: an amax too small for a finite scale
  STATUS_NO_PLAN = 32,      // a descale is NaN: its bound or measurement is not finite
};

// One layer's heads, and those of the layers in front of it: arrays over a model hold one layer's values behind another's,
// without padding.
struct PolicyLayer {
  u32 n_q, n_kv, first_q, first_kv;
  u32 keep[4];                  // auto-c: ratios kept in the pool of each tensor
  double softmax_scale;
};
static_assert(sizeof(PolicyLayer) == 8 * 4 + 8, "host mirror");

// Certain bound over observed amax: of a layer's heads over the steps of its burn-in.
struct SlackWords {
  double min, max, sum;
  u64 count;                    // 0: nothing was seen, and the rest holds nothing
};
static_assert(sizeof(SlackWords) == 4 * 8, "host mirror");

struct PolicyTable {
  const HeadBound* heads;       // [layers][n_q], or null: this policy needs no bounds
  const float* operands;        // [layers][q, k, v][n_kv]: B + A/32, 0 for a head of zeros
  u32* stats;                   // [layers][stats_words]
  u32* seen_stats;              // the same, as the last observation found them
  float* plan;                  // [layers][n_q + 4 n_kv]: descales of logits, q, k, v, o
  float* tensors;               // [layers][TENSORS]: the largest of each row
  u32* status;                  // [layers]
  const PolicyLayer* sizes;     // [layers]
  // auto-c
  u32* seen;                    // [layers]: burn-in steps taken in
  u32* restarts;                // [1]
  u32* phases;                  // [pools]
  double* constants;            // [pools]
  u32* counts;                  // [pools]: ratios in `top`
  double* top;                  // the largest ratios of each pool, descending
  SlackWords* slack;            // [layers][logit, q, k, v]
  // delayed
  float* history;               // [slots][history]: rings
  u32* places;                  // [slots]: the ring's next entry
  float* scales;                // [slots]: delayed-te's quantisation scales
  u32 kind, layers;
  u32 per_layer;                // 1: one scale a tensor and layer
  u32 has_values;               // v has bounds
  u32 history_length, most_recent;
  double logit_target, operand_target, soft_cap;
  double kappa;
  u32 pooling, burn_in, max_restarts;
  float scaled_max;             // delayed-te: 448 / 2^margin
  u32 pool_base[4];             // first pool of each tensor
  u32 room[4];                  // places for ratios in a pool of each tensor: the most that a layer keeps
  u64 top_base[4];              // first ratio of each tensor
  // geometry-c-star: tau sphere c_star d sigma, or tau [sphere (c_halved d sigma + linear_factor (||a|| + ||b||)) + |c0|]
  double sphere, c_star, c_halved, linear_factor, d_model;
};
static_assert(sizeof(PolicyTable) == 18 * 8 + 6 * 4 + 4 * 8 + 4 * 4 + 2 * 16 + 4 * 8 + 5 * 8, "host mirror");

__device__ __forceinline__ u32 row_length(const PolicyLayer& l, u32 tensor) { return tensor == LOGIT ? l.n_q : l.n_kv; }
__device__ __forceinline__ u32 row_offset(const PolicyLayer& l, u32 tensor) {
  return tensor == LOGIT ? 0 : l.n_q + (tensor - 1) * l.n_kv;
}
__device__ __forceinline__ float* plan_row(const PolicyTable& p, const PolicyLayer& l, u32 tensor) {
  return p.plan + l.first_q + 4 * l.first_kv + row_offset(l, tensor);
}
// delayed: first slot of a layer and how many it has
__device__ __forceinline__ u32 first_slot(const PolicyTable& p, const PolicyLayer& l, u32 layer) {
  return p.per_layer ? layer * TENSORS : l.first_q + 4 * l.first_kv;
}
__device__ __forceinline__ u32 slot_count(const PolicyTable& p, const PolicyLayer& l) {
  return p.per_layer ? (u32)TENSORS : l.n_q + 4 * l.n_kv;
}
// Where the words of all layers in front end.
__device__ __forceinline__ size_t stats_row(const PolicyLayer& l) { return stats_words(l.first_q, l.first_kv); }

// Largest |value| for the descale `i` of a tensor; KV heads take the largest of their query heads.
__device__ __forceinline__ float amax_entry(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 i) {
  const u32* row = p.stats + stats_row(l);
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

// The certain bound with rounding on the values of a descale. NaN where the weights were not finite.
__device__ __forceinline__ double bound_entry(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 i) {
  if (tensor != LOGIT) return p.operands[3 * (size_t)l.first_kv + (tensor - 1) * l.n_kv + i];
  const double bound = p.heads[l.first_q + i].rounded;
  return bound > p.soft_cap ? p.soft_cap : bound;
}

__device__ __forceinline__ u32 pool_of(const PolicyTable& p, const PolicyLayer& l, u32 tensor, u32 layer, u32 i) {
  const u32 head = (tensor == LOGIT ? l.first_q : l.first_kv) + i;
  return p.pool_base[tensor] + (p.pooling == POOL_MODEL ? 0 : p.pooling == POOL_LAYER ? layer : head);
}

// Largest of `row` over the block, the same bits in every thread; NaN is larger than everything. Ends with a barrier.
template <class T> __device__ T block_largest(T mine, T* scratch) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const T other = __shfl_xor_sync(0xffffffffu, mine, step);
    mine = mine != mine || mine >= other ? mine : other;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = mine;
  __syncthreads();
  T most = scratch[0];
  for (u32 w = 1; w < blockDim.x / 32; w++) most = most != most || most >= scratch[w] ? most : scratch[w];
  __syncthreads();
  return most;
}
