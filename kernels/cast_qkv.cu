// One pass from Q, K, V in BF16, F16 or F32 to E4M3 by scales known beforehand, RoPE on Q and K fused in, V written in the
// layout that `attention_fwd` reads.
//
// A block owns 16 positions of one (batch, head); blockIdx.y runs over the query heads, then the key heads, then the value
// heads. A thread holds a piece of 8 dims of one position. Q and K leave as [batch, length, heads, dim]; V leaves as
// [batch, kv head, ceil(length / 16), dim / 8, 8, 16], byte 4 t + e of a group being key 8 (e / 2) + 2 t + e % 2.
//
// By-products per head, order-independent: amax of the values before the scale, and counts of scaled values past 448 (which
// saturate), past 464 (where rounding leaves the format) and not finite.
#include "convert.cuh"
#include "launch.cuh"
#include "types.cuh"

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
  u32 amax;        // bits of max |x|
  u32 saturated;   // |x / descale| > 448, infinities too
  u32 past_464;
  u32 non_finite;
};
struct CastTensor {
  const void* in;
  u8* out;                              // Q, K: [batch, length, heads, dim]; V: the layout above
  const float* descale;                 // [batch, kv head] by the strides below
  CastStats* stats;                     // [heads]
  i64 stride_batch, stride_row, stride_head;  // of `in`, elements; multiples of 8
  i64 descale_batch, descale_head;
  int length, heads;
};
struct CastParams {
  CastTensor q, k, v;
  const float* cosine;                  // [positions, rotary / 2]
  const float* sine;
  const int* positions;                 // [batch, len_k], or null: the row's index
  int rotary;                           // rotated leading dims, a multiple of 16
  int q_start;                          // position of the first query among the keys
};
static_assert(sizeof(CastTensor) == 4 * 8 + 5 * 8 + 2 * 4, "the host writes this layout");
static_assert(sizeof(CastParams) == 3 * sizeof(CastTensor) + 3 * 8 + 2 * 4, "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kPieces = kDim / 8;
constexpr int kKeys = 16;
constexpr int kThreads = kKeys * kPieces;
static_assert(kDim == 64 || kDim == 128, "head dimensions of the attention kernel");

__device__ __forceinline__ void load8(float (&x)[8], const void* in, i64 offset) {
#if INPUT == 2
  const float4* p = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(in) + offset);
  float4 a = p[0], b = p[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
#else
  uint4 w = *reinterpret_cast<const uint4*>(reinterpret_cast<const u16*>(in) + offset);
  u32 word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if INPUT == 1
    x[2 * i] = f32_from_f16((u16)word[i]);
    x[2 * i + 1] = f32_from_f16((u16)(word[i] >> 16));
#else
    x[2 * i] = f32_from_bf16((u16)word[i]);
    x[2 * i + 1] = f32_from_bf16((u16)(word[i] >> 16));
#endif
  }
#endif
}

// Rotates dims 8 piece .. 8 piece + 7 of one position; `pair` holds the other half's eight dims (half-split).
__device__ __forceinline__ void rotate(float (&x)[8], const float (&pair)[8], const CastParams& p, int piece, i64 position) {
  const int half = p.rotary / 2;
  const int c = 8 * piece;
#if ROPE == 1
  const bool low = c < half;
  const i64 at = position * half + (low ? c : c - half);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float cs = p.cosine[at + i], sn = p.sine[at + i];
    x[i] = low ? fmaf(x[i], cs, -pair[i] * sn) : fmaf(x[i], cs, pair[i] * sn);
  }
#else
  const i64 at = position * half + c / 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float cs = p.cosine[at + i], sn = p.sine[at + i];
    float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = fmaf(a, cs, -b * sn);
    x[2 * i + 1] = fmaf(b, cs, a * sn);
  }
#endif
}

__device__ __forceinline__ void record(const float (&x)[8], float to_units, bool live, CastStats* stats) {
  float amax = 0.0f;
  u32 saturated = 0, past = 0, bad = 0;
  if (live) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float a = fabsf(x[i]), u = a * to_units;
      bool finite = a < __int_as_float(0x7f800000);
      amax = fmaxf(amax, finite ? a : 0.0f);
      saturated += u > 448.0f;
      past += u > 464.0f;
      bad += !finite;
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
  const bool any = __any_sync(~0u, saturated | bad);
  if (any) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
      saturated += __shfl_xor_sync(~0u, saturated, d);
      past += __shfl_xor_sync(~0u, past, d);
      bad += __shfl_xor_sync(~0u, bad, d);
    }
  }
  if (threadIdx.x % 32 == 0) {
    // NOTES: a stale read only costs a needless atomic; most blocks find their maximum already passed.
    const u32 bits = __float_as_uint(amax);
    if (bits > *reinterpret_cast<volatile u32*>(&stats->amax)) atomicMax(&stats->amax, bits);
    if (any) {
      atomicAdd(&stats->saturated, saturated);
      atomicAdd(&stats->past_464, past);
      atomicAdd(&stats->non_finite, bad);
    }
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
  __shared__ Transpose tile;
  grid_launch_dependents();
  grid_wait_for_previous();

  // Find the head
  const bool is_q = blockIdx.y < p.q.heads;
  const bool is_v = blockIdx.y >= p.q.heads + p.k.heads;
  const CastTensor& t = is_q ? p.q : is_v ? p.v : p.k;
  const int head = blockIdx.y - (is_q ? 0 : is_v ? p.q.heads + p.k.heads : p.q.heads);
  const int batch = blockIdx.z;
  const int row = blockIdx.x * kKeys + threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  if (blockIdx.x * kKeys >= t.length) return;
  const int kv_head = is_q ? head / (p.q.heads / p.k.heads) : head;
  const float to_units = 1.0f / t.descale[batch * t.descale_batch + kv_head * t.descale_head];

  // Load, rotate
  const bool live = row < t.length;
  const i64 at = batch * t.stride_batch + row * t.stride_row + head * t.stride_head;
  float x[8] = {};
  if (live) load8(x, t.in, at + 8 * piece);
#if ROPE
  if (!is_v && live && 8 * piece < p.rotary) {
    float pair[8] = {};
#if ROPE == 1
    const int half = p.rotary / 16;
    load8(pair, t.in, at + 8 * (piece < half ? piece + half : piece - half));
#endif
    const i64 position = p.positions != nullptr
                             ? p.positions[(i64)batch * p.k.length + row + (is_q ? p.q_start : 0)]
                             : row + (is_q ? p.q_start : 0);
    rotate(x, pair, p, piece, position);
  }
#endif
#if STATS
  record(x, to_units, live, t.stats + head);
#endif

  // Scale, round
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= to_units;
  uint2 y = make_uint2(e4m3x4(x[0], x[1], x[2], x[3]), e4m3x4(x[4], x[5], x[6], x[7]));

  // Store: rows for Q and K, core matrices of 8 dims by 16 keys for V
  if (!is_v) {
    if (live)
      *reinterpret_cast<uint2*>(t.out + (((i64)batch * t.length + row) * t.heads + head) * kDim + 8 * piece) = y;
    return;
  }
  store_v(tile, y, group_of(t, batch, head, blockIdx.x));
}

// V given in E4M3 as [batch, length, heads, dim] by the strides in `t` (bytes, multiples of 8), to the layout above.
extern "C" __global__ void __launch_bounds__(kThreads)
repack_v(const __grid_constant__ CastTensor t) {
  __shared__ Transpose tile;
  grid_launch_dependents();
  grid_wait_for_previous();
  const int row = blockIdx.x * kKeys + threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  uint2 y = make_uint2(0, 0);
  if (row < t.length)
    y = *reinterpret_cast<const uint2*>(reinterpret_cast<const u8*>(t.in) + blockIdx.z * t.stride_batch + row * t.stride_row +
                                        blockIdx.y * t.stride_head + 8 * piece);
  store_v(tile, y, group_of(t, blockIdx.z, blockIdx.y, blockIdx.x));
}
