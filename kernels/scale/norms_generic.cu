// Channel statistics of projections of any type, stride and shape: ||diag(g) w||^2, the product with the channel's rotation
// partner, sum g_i w_i, beta . w, sum |beta_i w_i|. A pure read of the weights. Any architecture; norms.cu is
// Hopper's, for 16-bit weights in rows of 16 bytes.
//
// A block per head. Neighbours in memory go to neighbours in a warp: a warp a pair of channels, or a lane a pair and a warp a
// share of the model dimension. Sums run in f32 over eight values and beyond in f64, in a fixed order: same input, same bits.
#include "common/warp.cuh"
#include "scale/types.cuh"

constexpr u32 WARPS = 8, QUANTITIES = 9;

// Loads eight values from `at` on, `stride` apart. Only the first `count` exist; the others are set to zero.
__device__ __forceinline__ void load8(u64 base, u32 dtype, i64 at, i64 stride, u32 count, bool vector, float (&v)[8]) {
  if (!vector) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) v[i] = i < count ? load_value(base, dtype, at + stride * i) : 0.f;
  } else if (dtype == DTYPE_BF16) {
    Vector8<DTYPE_BF16> raw;
    raw.load((const void*)base, at), raw.get(v);
  } else if (dtype == DTYPE_F16) {
    Vector8<DTYPE_F16> raw;
    raw.load((const void*)base, at), raw.get(v);
  } else {
    Vector8<DTYPE_F32> raw;
    raw.load((const void*)base, at), raw.get(v);
  }
}

// Squares, sums, constants and absolute constants of both channels, and their product.
struct PairSums {
  double v[QUANTITIES] = {};
  __device__ __forceinline__ void add(const float (&g)[8], const float (&s)[8], const float (&a)[8], const float (&b)[8]) {
    float part[QUANTITIES] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float y = g[i] * a[i], z = g[i] * b[i], c = s[i] * a[i], e = s[i] * b[i];
      part[0] += y * y, part[1] += z * z, part[2] += y, part[3] += z;
      part[4] += c, part[5] += e, part[6] += fabsf(c), part[7] += fabsf(e), part[8] += y * z;
    }
#pragma unroll
    for (u32 i = 0; i < QUANTITIES; i++) v[i] += part[i];
  }
  __device__ void store(const Projection& p, ChannelStats* stats, const u32 (&rows)[2]) const {
    const double mean = p.flags & HAS_MEAN ? 1.0 / p.d_model : 0.0;
#pragma unroll
    for (u32 c = 0; c < 2; c++) {
      const double norm2 = v[c] - v[2 + c] * v[2 + c] * mean;
      const double bias = p.bias ? load_value(p.bias, p.vector_dtype, rows[c]) : 0.0;
      stats[p.stat_row + rows[c]] = {(float)(norm2 < 0.0 ? 0.0 : norm2), (float)v[c], (float)(v[8] - v[2] * v[3] * mean),
                                     (float)(v[4 + c] + bias), (float)(v[6 + c] + fabs(bias)), (float)v[2 + c], 0.f, 0.f};
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    scale_norms_generic(const Projection* projections, const HeadPlace* heads, u64, u32, ChannelStats* stats) {
  __shared__ double shares[WARPS][QUANTITIES][32];
  const HeadPlace head = heads[blockIdx.x];
  const Projection p = projections[head.projection];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = p.d_head / 2, bytes = p.dtype == DTYPE_F32 ? 4 : 2;
  const bool along_channels = p.row_stride < p.col_stride, whole = p.d_model % 8 == 0;
  const bool vectors = p.col_stride == 1 && whole && p.weight % 16 == 0 && p.row_stride * bytes % 16 == 0;
  const bool gain_vectors = whole && p.gain % 16 == 0, shift_vectors = whole && p.shift % 16 == 0;
  for (u32 first = 0; first < pairs; first += along_channels ? 32 : WARPS) {
    const u32 pair = first + (along_channels ? lane : warp);
    u32 rows[2];
    pair_channels(min(pair, pairs - 1), p.rotary, p.interleaved, rows[0], rows[1]);
    rows[0] += head.first_row, rows[1] += head.first_row;
    PairSums sums;
    for (u32 k = (along_channels ? warp : lane) * 8; k < p.d_model; k += (along_channels ? WARPS : 32) * 8) {
      const u32 count = p.d_model - k;
      const i64 at = p.col_stride * (i64)k;
      float g[8], s[8] = {}, a[8], b[8];
      load8(p.weight, p.dtype, p.row_stride * (i64)rows[0] + at, p.col_stride, count, vectors, a);
      load8(p.weight, p.dtype, p.row_stride * (i64)rows[1] + at, p.col_stride, count, vectors, b);
      if (p.gain) load8(p.gain, p.vector_dtype, k, 1, count, gain_vectors, g);
#pragma unroll
      for (u32 i = 0; i < 8; i++) g[i] = p.gain ? g[i] + p.gain_offset : 1.f;
      if (p.shift) load8(p.shift, p.vector_dtype, k, 1, count, shift_vectors, s);
      sums.add(g, s, a, b);
    }
    if (!along_channels) {
#pragma unroll
      for (u32 i = 0; i < QUANTITIES; i++) sums.v[i] = warp_sum(sums.v[i]);
      if (lane == 0 && pair < pairs) sums.store(p, stats, rows);
      continue;
    }
    for (u32 i = 0; i < QUANTITIES; i++) shares[warp][i][lane] = sums.v[i];
    __syncthreads();
    if (warp == 0 && pair < pairs) {
      PairSums total;
      for (u32 w = 0; w < WARPS; w++)
        for (u32 i = 0; i < QUANTITIES; i++) total.v[i] += shares[w][i][lane];
      total.store(p, stats, rows);
    }
    __syncthreads();
  }
}
