// One pass from Q, K, V in BF16, F16 or F32 to E4M3 by scales known beforehand, RoPE on Q and K fused in, V written in the
// layout that `attention_fwd` reads. A factor on q that grows with the position was applied by whoever made q: a rotation
// commutes with it.
//
// A block owns 16 positions of up to 4 heads of one tensor: blockIdx.x runs over ceil(heads / 4) for Q, then K, then V, and
// over groups of 16 positions, which may be more than 16 bits count; blockIdx.y over the batch. A thread holds 8 dims of one position, for each head:
// neighbouring heads are neighbours in memory, and share their cosines. The 8 dims are one piece, or, where halves rotate
// against each other, 4 of the one half and 4 of the other. Q and K leave as [batch, length, heads, dim]; V leaves as
// [batch, kv head, ceil(length / 16), dim / 8, 8, 16], byte 4 t + e of a group being key 8 (e / 2) + 2 t + e % 2.
//
// By-products per head, order-independent: amax of the values before the scale, and counts of scaled values past 448 (which
// saturate), past 464 (where rounding leaves the format) and not finite.
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/math.cuh"
#include "common/types.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
// 0: BF16, 1: F16, 2: F32
#ifndef INPUT
#define INPUT 0
#endif
// 0: none, 1: half-split (c with c + rotary / 2), 2: interleaved (2 c with 2 c + 1)
#ifndef ROPE
#define ROPE 0
#endif
#ifndef STATS
#define STATS 1
#endif

// Written by the host byte for byte.
struct CastStats {
  u32 amax;        // bits of max |x|; NaN if any x is
  u32 saturated;   // finite x with |x / descale| > 448
  u32 past_464;
  u32 non_finite;
};
struct CastTensor {
  const void* in;
  u8* out;                              // Q, K: [batch, length, heads, dim]; V: the layout above
  const float* descale;                 // [batch, kv head] by the strides below
  CastStats* stats;                     // [heads], or null
  i64 stride_batch, stride_row, stride_head;  // of `in`, elements; multiples of 8
  i64 descale_batch, descale_head;
  int length, heads;
};
struct CastParams {
  CastTensor q, k, v;
  const float* cosine;                  // [positions, rotary / 2]
  const float* sine;
  const int* positions;                 // [batch, len_k], or null: the row's index
  int rotary;                           // rotated leading dims, a multiple of 16; tables 16-byte aligned
  int q_start;                          // position of the first query among the keys
};
static_assert(sizeof(CastTensor) == 4 * 8 + 5 * 8 + 2 * 4, "the host writes this layout");
static_assert(sizeof(CastParams) == 3 * sizeof(CastTensor) + 3 * 8 + 2 * 4, "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kPieces = kDim / 8;
constexpr int kKeys = 16;
constexpr int kThreads = kKeys * kPieces;
constexpr int kHeads = 4;
static_assert(kDim == 64 || kDim == 128, "head dimensions of the attention kernel");

constexpr int kWords = INPUT == 2 ? 8 : 4;  // of a piece as it is stored

#if ROPE == 1
// Two halves of 4 dims.
__device__ __forceinline__ void load_halves(u32 (&w)[kWords], const void* in, i64 low, i64 high) {
  const u8* p = reinterpret_cast<const u8*>(in);
#if INPUT == 2
  const uint4 x = *reinterpret_cast<const uint4*>(p + 4 * low), y = *reinterpret_cast<const uint4*>(p + 4 * high);
  w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
#else
  const uint2 x = *reinterpret_cast<const uint2*>(p + 2 * low), y = *reinterpret_cast<const uint2*>(p + 2 * high);
  w[0] = x.x, w[1] = x.y, w[2] = y.x, w[3] = y.y;
#endif
}
#endif
__device__ __forceinline__ void load(u32 (&w)[kWords], const void* in, i64 offset) {
  const uint4* p = reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(in) + offset * (INPUT == 2 ? 4 : 2));
#pragma unroll
  for (int i = 0; i < kWords / 4; i++) {
    const uint4 x = p[i];
    w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
  }
}
__device__ __forceinline__ float value(const u32 (&w)[kWords], int i) {
#if INPUT == 2
  return __uint_as_float(w[i]);
#elif INPUT == 1
  return ptx::f32_from_f16((u16)(w[i / 2] >> (16 * (i % 2))));
#else
  return ptx::f32_from_bf16((u16)(w[i / 2] >> (16 * (i % 2))));
#endif
}

#if ROPE
// Cosines and sines of this thread's four pairs.
struct Angles {
  float cosine[4], sine[4];
};
__device__ __forceinline__ void load_angles(Angles& a, const CastParams& p, int piece, i64 position) {
  const i64 at = position * (p.rotary / 2) + 4 * piece;
  const float4 x = *reinterpret_cast<const float4*>(p.cosine + at), y = *reinterpret_cast<const float4*>(p.sine + at);
  a.cosine[0] = x.x, a.cosine[1] = x.y, a.cosine[2] = x.z, a.cosine[3] = x.w;
  a.sine[0] = y.x, a.sine[1] = y.y, a.sine[2] = y.z, a.sine[3] = y.w;
}
// Half-split: the pairs are x[i], x[i + 4]; interleaved: x[2 i], x[2 i + 1].
__device__ __forceinline__ void rotate(float (&x)[8], const Angles& a) {
  constexpr int kStep = ROPE == 1 ? 1 : 2, kPair = ROPE == 1 ? 4 : 1;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float e = x[kStep * i], o = x[kStep * i + kPair];
    x[kStep * i] = fmaf(e, a.cosine[i], -o * a.sine[i]);
    x[kStep * i + kPair] = fmaf(o, a.cosine[i], e * a.sine[i]);
  }
}
#endif

// Bits of the largest |x| of the warp; a NaN counts as the largest.
__device__ __forceinline__ u32 warp_top(const float (&x)[8]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) top = ptx::max_nan(top, fabsf(x[i]));
  return ptx::warp_max(__float_as_uint(top) & 0x7fffffff);
}
// The slow path: some value of the warp saturates or is not finite.
__device__ __forceinline__ void count_past(const float (&x)[8], float to_units, CastStats* stats) {
  u32 saturated = 0, past = 0, bad = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = fabsf(x[i]), u = a * to_units;
    const bool finite = a < __int_as_float(0x7f800000);
    saturated += finite && u > 448.0f;
    past += finite && u > 464.0f;
    bad += !finite;
  }
  const u32 sums[3] = {ptx::warp_sum(saturated), ptx::warp_sum(past), ptx::warp_sum(bad)};
  if (threadIdx.x % 32 == 0) {
    if (sums[0] > 0) atomicAdd(&stats->saturated, sums[0]);
    if (sums[1] > 0) atomicAdd(&stats->past_464, sums[1]);
    if (sums[2] > 0) atomicAdd(&stats->non_finite, sums[2]);
  }
}

// One position's row of dims per line; the odd width spreads the columns over the banks.
struct Transpose {
  u32 word[kKeys][kPieces * 2 + 1];
};

// The block's 16 keys as core matrices: thread i writes dim i / 2, half i % 2 of its 16 keys.
__device__ __forceinline__ void store_v(Transpose& tile, uint2 y, u8* group) {
  tile.word[threadIdx.x / kPieces][2 * (threadIdx.x % kPieces)] = y.x;
  tile.word[threadIdx.x / kPieces][2 * (threadIdx.x % kPieces) + 1] = y.y;
  __syncthreads();
  const int d = threadIdx.x / 2, h = threadIdx.x % 2;
  u32 out[2] = {0, 0};
#pragma unroll
  for (int w = 0; w < 2; w++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int key = 8 * (e / 2) + 2 * (2 * h + w) + e % 2;
      out[w] |= (tile.word[key][d / 4] >> (8 * (d % 4)) & 0xff) << (8 * e);
    }
  }
  *reinterpret_cast<uint2*>(group + 8 * threadIdx.x) = make_uint2(out[0], out[1]);
}
__device__ __forceinline__ u8* group_of(const CastTensor& t, int batch, int head, int group) {
  return t.out + (((i64)batch * t.heads + head) * ceil_div(t.length, kKeys) + group) * kKeys * kDim;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
cast_qkv(const __grid_constant__ CastParams p) {
  __shared__ Transpose tile[kHeads];
#if STATS
  __shared__ u32 tops[kHeads][kThreads / 32];
#endif
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  // Find the tensor and the heads
  const int blocks_q = ceil_div(p.q.heads, kHeads), blocks_k = ceil_div(p.k.heads, kHeads);
  const int blocks = blocks_q + 2 * blocks_k, group = blockIdx.x / blocks, block = blockIdx.x - group * blocks;
  const bool is_q = block < blocks_q, is_v = block >= blocks_q + blocks_k;
  const CastTensor& t = is_q ? p.q : is_v ? p.v : p.k;
  const int first = kHeads * (block - (is_q ? 0 : is_v ? blocks_q + blocks_k : blocks_q));
  const int batch = blockIdx.y;
  if (group * kKeys >= t.length) return;
  const int row = group * kKeys + threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const bool live = row < t.length;

  // Load every head's piece, then the angles
  u32 raw[kHeads][kWords] = {};
#if ROPE
  const bool turns = !is_v && 8 * piece < p.rotary;
#endif
#if ROPE == 1
  const int low = turns ? 4 * piece : 8 * piece, high = turns ? low + p.rotary / 2 : low + 4;
#else
  const int low = 8 * piece;
#endif
  const i64 at = batch * t.stride_batch + row * t.stride_row;
#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    if (!live || first + h >= t.heads) continue;
    const i64 head_at = at + (first + h) * t.stride_head;
#if ROPE == 1
    if (turns) {
      load_halves(raw[h], t.in, head_at + low, head_at + high);
      continue;
    }
#endif
    load(raw[h], t.in, head_at + low);
  }
#if ROPE
  Angles angles;
  if (turns && live) {
    const i64 shown = row + (is_q ? p.q_start : 0);
    load_angles(angles, p, piece, p.positions != nullptr ? p.positions[(i64)batch * p.k.length + shown] : shown);
  }
#endif
  const int per_kv = is_q ? p.q.heads / p.k.heads : 1;

#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    const int head = first + h;
    if (head >= t.heads) break;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = value(raw[h], i);

#if ROPE
    if (turns && live) rotate(x, angles);
#endif

    // Scale, round
    const float to_units = 1.0f / t.descale[batch * t.descale_batch + head / per_kv * t.descale_head];
#if STATS
    if (t.stats != nullptr) {
      const u32 top = warp_top(x);
      if (top >= 0x7f800000 || __uint_as_float(top) * to_units > 448.0f) count_past(x, to_units, t.stats + head);
      if (threadIdx.x % 32 == 0) tops[h][threadIdx.x / 32] = top;
    }
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= to_units;
    const uint2 y = make_uint2(ptx::e4m3x4(x[0], x[1], x[2], x[3]), ptx::e4m3x4(x[4], x[5], x[6], x[7]));

    // Store: rows for Q and K, core matrices of 8 dims by 16 keys for V
    u8* out = t.out + (((i64)batch * t.length + row) * t.heads + head) * kDim;
    if (is_v) {
      store_v(tile[h], y, group_of(t, batch, head, group));
    } else if (live) {
#if ROPE == 1
      *reinterpret_cast<u32*>(out + low) = y.x;
      *reinterpret_cast<u32*>(out + high) = y.y;
#else
      *reinterpret_cast<uint2*>(out + low) = y;
#endif
    }
  }

  // Publish the block's maxima
#if STATS
  __syncthreads();
  if (t.stats != nullptr && threadIdx.x < kHeads && first + threadIdx.x < t.heads) {
    u32 top = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) top = max(top, tops[threadIdx.x][w]);
    // NOTES: a stale read only costs a needless atomic; most blocks find their maximum already passed.
    u32* amax = &t.stats[first + threadIdx.x].amax;
    if (top > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, top);
  }
#endif
}

// V given in E4M3 as [batch, length, heads, dim] by the strides in `t` (bytes, multiples of 8), to the layout above.
extern "C" __global__ void __launch_bounds__(kThreads)
repack_v(const __grid_constant__ CastTensor t) {
  __shared__ Transpose tile;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int row = blockIdx.x * kKeys + threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  uint2 y = make_uint2(0, 0);
  if (row < t.length)
    y = *reinterpret_cast<const uint2*>(reinterpret_cast<const u8*>(t.in) + blockIdx.z * t.stride_batch + row * t.stride_row +
                                        blockIdx.y * t.stride_head + 8 * piece);
  store_v(tile, y, group_of(t, blockIdx.z, blockIdx.y, blockIdx.x));
}
