// Tables that the host writes for the scale kernels, and reading of weights of any type. The host's mirror of every
// struct is src/device/scale/tables.rs; the sizes are asserted on both sides.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/launch.cuh"

enum : u32 { DTYPE_BF16 = 0, DTYPE_F16 = 1, DTYPE_F32 = 2 };
enum : u32 { HAS_MEAN = 1 };
constexpr u32 NO_HEAD = 0xffffffff;
enum : u32 { STATUS_NON_FINITE_WEIGHT = 1, STATUS_NON_FINITE_BOUND = 2, STATUS_FALLBACK_BOUND = 4 };

// One projection of one layer: y = W^T x, channel c being the row of W that starts at weight + c * row_stride.
struct Projection {
  u64 weight;       // address of the first value
  u64 gain;         // d_model values of the input norm; 0: all ones
  u64 shift;        // d_model values; 0: none
  u64 bias;         // rows values; 0: none
  i64 row_stride;   // values from a channel to the next
  i64 col_stride;   // values from an input channel to the next
  u32 rows;         // heads * d_head
  u32 d_model;
  u32 d_head;
  u32 dtype;        // of the weight
  u32 vector_dtype; // of gain, shift and bias
  float gain_offset; // added to every stored gain (1 for 1 + g)
  u32 flags;
  u32 rotary;       // rotated channels of each head; 0 for values and for models without
  u32 interleaved;  // pairs (2b, 2b+1) rather than (b, b + rotary/2)
  u32 stat_row;     // first row of this projection in the statistics
  u32 first_head;   // of this projection in the Gram table; NO_HEAD: V, which has no Gram
  u32 pad;
};
static_assert(sizeof(Projection) == 96, "host mirror");

// What one pass over a channel's weights leaves. w = diag(g) W[:, c], after removal of the mean where the norm does.
struct ChannelStats {
  float norm2;    // ||w||^2
  float raw2;     // ||diag(g) W[:, c]||^2, mean kept
  float pair;     // w . w' with the other channel of its rotation pair (stored at both)
  float constant; // beta . W[:, c] + b_c
  float absolute; // sum |beta_i W_ic| + |b_c|
  float sum;      // sum g_i W_ic
  float rounding; // delta^2: what the Gram's rounded operands take from sigma is at most (sum over the channels)^1/2
  float pad;
};
static_assert(sizeof(ChannelStats) == 32, "host mirror");

// A layer: where its channel statistics begin, and where its results go.
struct Layer {
  u32 q_row, k_row, v_row;     // first statistics row of each projection; 0xffffffff: v has no bound
  u32 n_q, n_kv, d_head, d_model;
  u32 rotary, interleaved;
  u32 layer, kv;               // number of the layer, and of its first KV head, in the model: where its results go
  float rope_factor;           // on rotated channels (YaRN)
  u32 normalised;              // 1: q and k go by `scale_qk_norm_bounds`
  float query_factor;          // largest factor on q behind rotation and norms, rounded up
  float rounding_share[3];     // of A, of q, k and v, rounded up
};
static_assert(sizeof(Layer) == 68, "host mirror");

// A head: of a projection, and where its channels begin.
struct HeadPlace {
  u32 projection, first_row;
};

using ptx::bf16_low;
using ptx::bf16_high;

// Eight values from a 16-byte aligned address (32 bytes for f32).
template <u32 DTYPE> struct Vector8;
template <> struct Vector8<DTYPE_BF16> {
  uint4 raw = {0, 0, 0, 0};
  __device__ __forceinline__ void load(const void* base, i64 index) { raw = __ldg((const uint4*)((const u16*)base + index)); }
  __device__ __forceinline__ void get(float (&v)[8]) const {
    const u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = bf16_low(w[i]), v[2 * i + 1] = bf16_high(w[i]);
  }
};
template <> struct Vector8<DTYPE_F16> {
  uint4 raw = {0, 0, 0, 0};
  __device__ __forceinline__ void load(const void* base, i64 index) { raw = __ldg((const uint4*)((const u16*)base + index)); }
  __device__ __forceinline__ void get(float (&v)[8]) const {
    const u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = ptx::f32_from_f16((u16)w[i]), v[2 * i + 1] = ptx::f32_from_f16((u16)(w[i] >> 16));
  }
};
template <> struct Vector8<DTYPE_F32> {
  float4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
  __device__ __forceinline__ void load(const void* base, i64 index) {
    const float4* p = (const float4*)((const float*)base + index);
    a = __ldg(p), b = __ldg(p + 1);
  }
  __device__ __forceinline__ void get(float (&v)[8]) const {
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
};

// One value, wherever it lies.
__device__ __forceinline__ float load_value(u64 base, u32 dtype, i64 index) {
  if (dtype == DTYPE_F32) return __ldg((const float*)base + index);
  const u16 bits = __ldg((const u16*)base + index);
  return dtype == DTYPE_BF16 ? __uint_as_float((u32)bits << 16) : ptx::f32_from_f16(bits);
}

// The two channels of pair p of a head (p < d_head / 2): rotation pairs first, then the unrotated rest two by two.
__device__ __forceinline__ void pair_channels(u32 p, u32 rotary, u32 interleaved, u32& a, u32& b) {
  const u32 half = rotary / 2;
  if (p < half && !interleaved) {
    a = p, b = p + half;
  } else {
    a = 2 * p, b = 2 * p + 1;
  }
}
// The other channel of a pair.
__device__ __forceinline__ u32 pair_partner(u32 channel, u32 rotary, u32 interleaved) {
  const u32 half = rotary / 2;
  return interleaved || channel >= rotary ? channel ^ 1 : channel < half ? channel + half : channel - half;
}
