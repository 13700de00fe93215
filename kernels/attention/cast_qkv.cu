// One pass from Q, K, V in BF16, F16 or F32 to E4M3 by descales known beforehand, RoPE on Q and K fused in, V written in the
// layout that forward.cu reads. A factor on q that grows with the position was applied by whoever made q: a rotation commutes
// with it.
//
// A block owns 16 positions of up to 4 heads of one tensor: blockIdx.x runs over ceil(heads / 4) for Q, then K, then V, and
// over groups of 16 positions, which may be more than 16 bits count; blockIdx.y over the batch. A thread holds 8 dims of one
// position for each head: neighbouring heads are neighbours in memory, and share their cosines. Where halves rotate against
// each other, these are 4 dims of the one half and 4 of the other.
//
// Q and K leave as [batch, length, heads, dim]; V leaves as [batch, kv head, ceil(length / 16), dim / 8, 8, 16], byte 4 t + e
// of a group being key 8 (e / 2) + 2 t + e % 2, or, for P V in F16, as [batch, length, heads, dim] in F16 (exact). For a
// backward V leaves a second time, in E4M3 as K does.
//
// By-products per head, order-independent: amax of the values before the scale, and counts of scaled values past 448 (which
// saturate), past 464 (where rounding leaves the format) and not finite.
#include "common/step_stats.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
// Type of the input: 0 BF16, 1 F16, 2 F32.
#ifndef INPUT
#define INPUT 0
#endif
// 0: none, 1: half-split (c with c + rotary / 2), 2: interleaved (2 c with 2 c + 1).
#ifndef ROPE
#define ROPE 0
#endif

// Written by the host byte for byte (src/device/attention/params.rs).
struct CastTensor {
  const void* in;
  u8* out;                              // Q, K: [batch, length, heads, dim]; V: a layout above
  const float* descale;                 // [batch, kv head] by the strides below
  CastWords* stats;                     // [heads], or null
  i64 stride_batch, stride_row, stride_head;  // of `in`, elements; multiples of 8
  i64 descale_batch, descale_head;
  int length, heads;
};
struct CastParams {
  CastTensor q, k, v;
  const float* cosine;                  // [positions, rotary / 2]
  const float* sine;
  const int* positions;                 // [batch, len_k], or null: the row's index
  u32* counter;                         // two words: the tiles that the attention behind this has handed out
  u8* v_rows;                           // V in E4M3, [batch, len_k, heads_kv, dim], or null
  int rotary;                           // rotated leading dims, a multiple of 16; tables 16-byte aligned
  int q_start;                          // position of the first query among the keys
  int v_f16;                            // 1: V leaves in F16
  int unused;
};
static_assert(sizeof(CastTensor) == 4 * 8 + 5 * 8 + 2 * 4, "the host writes this layout");
static_assert(sizeof(CastParams) == 3 * sizeof(CastTensor) + 5 * 8 + 4 * 4, "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kPieces = kDim / 8;
constexpr int kKeys = 16;
constexpr int kThreads = kKeys * kPieces;
constexpr int kHeads = 4;
constexpr bool kF32 = INPUT == 2;
constexpr bool kRope = ROPE != 0, kHalfSplit = ROPE == 1;
static_assert(kDim == 64 || kDim == 128, "head dimensions of the attention kernel");

constexpr int kWords = kF32 ? 8 : 4;  // of 8 dims as they are stored

// Two halves of 4 dims.
__device__ __forceinline__ void load_halves(u32 (&w)[kWords], const void* in, i64 low, i64 high) {
  const u8* p = reinterpret_cast<const u8*>(in);
  using Half = Select<kF32, uint4, uint2>::type;
  constexpr int kBytes = kF32 ? 4 : 2;
  *reinterpret_cast<Half*>(w) = *reinterpret_cast<const Half*>(p + kBytes * low);
  *reinterpret_cast<Half*>(w + kWords / 2) = *reinterpret_cast<const Half*>(p + kBytes * high);
}
__device__ __forceinline__ void load(u32 (&w)[kWords], const void* in, i64 offset) {
  const uint4* p = reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(in) + offset * (kF32 ? 4 : 2));
#pragma unroll
  for (int i = 0; i < kWords / 4; i++) {
    const uint4 x = p[i];
    w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
  }
}
__device__ __forceinline__ float value(const u32 (&w)[kWords], int i) {
  if constexpr (kF32) return __uint_as_float(w[i]);
  const u16 half = (u16)(w[i / 2] >> (16 * (i % 2)));
  return INPUT == 1 ? ptx::f32_from_f16(half) : ptx::f32_from_bf16(half);
}

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
  constexpr int kStep = kHalfSplit ? 1 : 2, kPair = kHalfSplit ? 4 : 1;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float e = x[kStep * i], o = x[kStep * i + kPair];
    x[kStep * i] = fmaf(e, a.cosine[i], -o * a.sine[i]);
    x[kStep * i + kPair] = fmaf(o, a.cosine[i], e * a.sine[i]);
  }
}

// Bits of the largest |x| of the warp; a NaN counts as the largest.
__device__ __forceinline__ u32 warp_top(const float (&x)[8]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) top = ptx::max_nan(top, fabsf(x[i]));
  return ptx::warp_max(__float_as_uint(top) & 0x7fffffff);
}
// The slow path: some value of the warp saturates or is not finite.
__device__ __forceinline__ void count_past(const float (&x)[8], float to_units, CastWords* stats) {
  u32 saturated = 0, past = 0, bad = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float a = fabsf(x[i]), u = a * to_units;
    const bool finite = a < __int_as_float(0x7f800000);
    saturated += finite && u > 448.0f;
    past += finite && u > 464.0f;
    bad += !finite;
  }
  // Lane i adds the count of word i
  const u32 sums[3] = {ptx::warp_sum(saturated), ptx::warp_sum(past), ptx::warp_sum(bad)};
  const u32 lane = threadIdx.x % 32, mine = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
  if (lane < 3 && mine > 0) add_saturating(&stats->overflow + lane, mine);
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
// Eight dims of V in F16.
__device__ __forceinline__ void store_f16(const CastTensor& t, i64 at, uint2 y) {
  *reinterpret_cast<uint4*>(t.out + 2 * at) = make_uint4(ptx::f16x2_from_e4m3x2((u16)y.x), ptx::f16x2_from_e4m3x2((u16)(y.x >> 16)),
                                                         ptx::f16x2_from_e4m3x2((u16)y.y), ptx::f16x2_from_e4m3x2((u16)(y.y >> 16)));
}
__device__ __forceinline__ u8* group_of(const CastTensor& t, int batch, int head, int group) {
  return t.out + (((i64)batch * t.heads + head) * ceil_div(t.length, kKeys) + group) * kKeys * kDim;
}

// A launch that was cut off leaves the counter anywhere, and tiles below it would be skipped.
__device__ __forceinline__ void clear_counter(u32* counter) {
  if ((blockIdx.x | blockIdx.y | blockIdx.z) == 0 && threadIdx.x < 2) counter[threadIdx.x] = 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
cast_qkv(const __grid_constant__ CastParams p) {
  __shared__ Transpose tile[kHeads];
  __shared__ u32 tops[kHeads][kThreads / 32];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  clear_counter(p.counter);

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
  alignas(16) u32 raw[kHeads][kWords] = {};
  const bool rotates = kRope && !is_v && 8 * piece < p.rotary;
  const int low = kHalfSplit && rotates ? 4 * piece : 8 * piece, high = rotates ? low + p.rotary / 2 : low + 4;
  const i64 at = batch * t.stride_batch + row * t.stride_row;
#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    if (!live || first + h >= t.heads) continue;
    const i64 head_at = at + (first + h) * t.stride_head;
    if (kHalfSplit && rotates) load_halves(raw[h], t.in, head_at + low, head_at + high);
    else load(raw[h], t.in, head_at + low);
  }
  Angles angles;
  if (rotates && live) {
    const i64 shown = row + (is_q ? p.q_start : 0);
    load_angles(angles, p, piece, p.positions != nullptr ? p.positions[(i64)batch * p.k.length + shown] : shown);
  }
  const int per_kv = is_q ? p.q.heads / p.k.heads : 1;

#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    const int head = first + h;
    if (head >= t.heads) break;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = value(raw[h], i);

    if (rotates && live) rotate(x, angles);

    // Scale, round
    const float to_units = 1.0f / t.descale[batch * t.descale_batch + head / per_kv * t.descale_head];
    if (t.stats != nullptr) {
      const u32 top = warp_top(x);
      if (top >= 0x7f800000 || __uint_as_float(top) * to_units > 448.0f) count_past(x, to_units, t.stats + head);
      if (threadIdx.x % 32 == 0) tops[h][threadIdx.x / 32] = top;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= to_units;
    const uint2 y = make_uint2(ptx::e4m3x4(x[0], x[1], x[2], x[3]), ptx::e4m3x4(x[4], x[5], x[6], x[7]));

    // Store: rows for Q and K, core matrices of 8 dims by 16 keys for V or rows in F16
    const i64 to = (((i64)batch * t.length + row) * t.heads + head) * kDim;
    u8* out = t.out + to;
    if (is_v) {
      if (p.v_rows != nullptr && live) *reinterpret_cast<uint2*>(p.v_rows + to + low) = y;
      if (!p.v_f16) store_v(tile[h], y, group_of(t, batch, head, group));
      else if (live) store_f16(t, to + low, y);
    } else if (live) {
      if constexpr (kHalfSplit) {
        *reinterpret_cast<u32*>(out + low) = y.x;
        *reinterpret_cast<u32*>(out + high) = y.y;
      } else {
        *reinterpret_cast<uint2*>(out + low) = y;
      }
    }
  }

  // Publish the block's maxima
  __syncthreads();
  if (t.stats != nullptr && threadIdx.x < kHeads && first + threadIdx.x < t.heads) {
    u32 top = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) top = max(top, tops[threadIdx.x][w]);
    // NOTES: a stale read only costs a needless atomic; most blocks find their maximum already passed.
    u32* amax = &t.stats[first + threadIdx.x].amax;
    if (top > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, top);
  }
}

// V given in E4M3 as [batch, length, heads, dim] by the strides in `t` (bytes, multiples of 8), to a layout above.
extern "C" __global__ void __launch_bounds__(kThreads)
repack_v(const __grid_constant__ CastTensor t, u32* counter, int v_f16) {
  __shared__ Transpose tile;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  clear_counter(counter);
  const int row = blockIdx.x * kKeys + threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  uint2 y = make_uint2(0, 0);
  if (row < t.length)
    y = *reinterpret_cast<const uint2*>(reinterpret_cast<const u8*>(t.in) + blockIdx.z * t.stride_batch + row * t.stride_row +
                                        blockIdx.y * t.stride_head + 8 * piece);
  if (!v_f16) store_v(tile, y, group_of(t, blockIdx.z, blockIdx.y, blockIdx.x));
  else if (row < t.length) store_f16(t, (((i64)blockIdx.z * t.length + row) * t.heads + blockIdx.y) * kDim + 8 * piece, y);
}
