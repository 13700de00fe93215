// Channel statistics of every projection of a model in one launch: ||diag(g) w||^2, the product with the channel's
// rotation partner, sum g_i w_i, beta . w, sum |beta_i w_i|. A pure read of the weights.
//
// A block takes 32 channels of one projection (16 pairs), a warp two pairs. Sums run in f32 over the 8 values of one
// load and in f64 beyond, in a fixed order: same input, same bits.
#include "scale_types.cuh"

struct NormBlock {
  u32 projection;
  u32 first_pair;  // of the projection: head * d_head / 2 + pair of the head
};

struct Sums {
  double raw2 = 0, sum = 0, constant = 0, absolute = 0;
};

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

__device__ void store(const Projection& p, ChannelStats* stats, u32 a, u32 b, Sums sa, Sums sb, double dot) {
  const double d = p.d_model;
  double na = sa.raw2, nb = sb.raw2, m = dot;
  if (p.flags & HAS_MEAN) {
    na = fmax(na - sa.sum * sa.sum / d, 0.0);
    nb = fmax(nb - sb.sum * sb.sum / d, 0.0);
    m -= sa.sum * sb.sum / d;
  }
  // fmax drops a NaN: put it back.
  if (!(sa.raw2 + sb.raw2 < 1e300)) na = nb = sa.raw2 + sb.raw2;
  const double ba = p.bias ? load_value(p.bias, p.vector_dtype, a) : 0.0;
  const double bb = p.bias ? load_value(p.bias, p.vector_dtype, b) : 0.0;
  stats[p.stat_row + a] = {(float)na, (float)sa.raw2, (float)m, (float)(sa.constant + ba),
                           (float)(sa.absolute + fabs(ba)), (float)sa.sum, 0.f, 0.f};
  stats[p.stat_row + b] = {(float)nb, (float)sb.raw2, (float)m, (float)(sb.constant + bb),
                           (float)(sb.absolute + fabs(bb)), (float)sb.sum, 0.f, 0.f};
}

// Contiguous along the model dimension: lanes stride over it, 8 values a load, four channels at a time.
template <u32 DTYPE, bool SUMS, bool SHIFT>
__device__ void along_model(const Projection& p, ChannelStats* stats, const u32 (&rows)[4], bool second) {
  const u32 lane = threadIdx.x & 31;
  const u8* base[4];
#pragma unroll
  for (int r = 0; r < 4; r++) base[r] = (const u8*)p.weight + p.row_stride * (i64)rows[r] * (DTYPE == DTYPE_F32 ? 4 : 2);
  Sums sums[4];
  double dot[2] = {0, 0};
  constexpr int UNROLL = DTYPE == DTYPE_F32 || SUMS ? 1 : 2;
  for (u32 k0 = lane * 8; k0 < p.d_model; k0 += 256 * UNROLL) {
    Vector8<DTYPE> raw[UNROLL][4];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (k0 + 256 * u < p.d_model)
#pragma unroll
        for (int r = 0; r < 4; r++) raw[u][r].load(base[r], k0 + 256 * u);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 k = k0 + 256 * u;
      if (k >= p.d_model) break;
      float g[8], s[8];
      if (p.gain) {
        if (p.vector_dtype == DTYPE_BF16) {
          Vector8<DTYPE_BF16> v;
          v.load((const void*)p.gain, k), v.get(g);
        } else if (p.vector_dtype == DTYPE_F16) {
          Vector8<DTYPE_F16> v;
          v.load((const void*)p.gain, k), v.get(g);
        } else {
          Vector8<DTYPE_F32> v;
          v.load((const void*)p.gain, k), v.get(g);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] += p.gain_offset;
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = 1.f;
      }
      if (SHIFT) {
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] = load_value(p.shift, p.vector_dtype, k + i);
      }
      float y[4][8];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float w[8], raw2 = 0, sum = 0, constant = 0, absolute = 0;
        raw[u][r].get(w);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          y[r][i] = g[i] * w[i];
          raw2 += y[r][i] * y[r][i];
          if (SUMS) sum += y[r][i];
          if (SHIFT) {
            const float c = s[i] * w[i];
            constant += c, absolute += fabsf(c);
          }
        }
        sums[r].raw2 += raw2;
        if (SUMS) sums[r].sum += sum;
        if (SHIFT) sums[r].constant += constant, sums[r].absolute += absolute;
      }
#pragma unroll
      for (int q = 0; q < 2; q++) {
        float m = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) m += y[2 * q][i] * y[2 * q + 1][i];
        dot[q] += m;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; r++) {
    sums[r].raw2 = warp_sum(sums[r].raw2);
    if (SUMS) sums[r].sum = warp_sum(sums[r].sum);
    if (SHIFT) sums[r].constant = warp_sum(sums[r].constant), sums[r].absolute = warp_sum(sums[r].absolute);
  }
  dot[0] = warp_sum(dot[0]), dot[1] = warp_sum(dot[1]);
  if (lane == 0) {
    store(p, stats, rows[0], rows[1], sums[0], sums[1], dot[0]);
    if (second) store(p, stats, rows[2], rows[3], sums[2], sums[3], dot[1]);
  }
}

// Any strides: a lane takes every 32nd value. Slow where neighbours in the model dimension lie apart.
__device__ void anywhere(const Projection& p, ChannelStats* stats, u32 a, u32 b) {
  const u32 lane = threadIdx.x & 31;
  Sums sa, sb;
  double dot = 0;
  for (u32 k = lane; k < p.d_model; k += 32) {
    const float g = p.gain ? load_value(p.gain, p.vector_dtype, k) + p.gain_offset : 1.f;
    const float s = p.shift ? load_value(p.shift, p.vector_dtype, k) : 0.f;
    const float wa = load_value(p.weight, p.dtype, p.row_stride * a + p.col_stride * k);
    const float wb = load_value(p.weight, p.dtype, p.row_stride * b + p.col_stride * k);
    const double ya = g * wa, yb = g * wb, ca = s * wa, cb = s * wb;
    sa.raw2 += ya * ya, sb.raw2 += yb * yb, dot += ya * yb;
    sa.sum += ya, sb.sum += yb;
    sa.constant += ca, sb.constant += cb, sa.absolute += fabs(ca), sb.absolute += fabs(cb);
  }
  sa.raw2 = warp_sum(sa.raw2), sb.raw2 = warp_sum(sb.raw2), dot = warp_sum(dot);
  sa.sum = warp_sum(sa.sum), sb.sum = warp_sum(sb.sum);
  sa.constant = warp_sum(sa.constant), sb.constant = warp_sum(sb.constant);
  sa.absolute = warp_sum(sa.absolute), sb.absolute = warp_sum(sb.absolute);
  if (lane == 0) store(p, stats, a, b, sa, sb, dot);
}

__device__ __forceinline__ void rows_of_pair(const Projection& p, u32 pair, u32& a, u32& b) {
  const u32 half = p.d_head / 2, head = pair / half;
  pair_channels(pair % half, p.rotary, p.interleaved, a, b);
  a += head * p.d_head, b += head * p.d_head;
}

extern "C" __global__ void __launch_bounds__(256, 2)
    scale_norms(const Projection* projections, const NormBlock* blocks, ChannelStats* stats) {
  const NormBlock block = blocks[blockIdx.x];
  const Projection p = projections[block.projection];
  const u32 pair = block.first_pair + (threadIdx.x >> 5) * 2, pairs = p.rows / 2;
  if (pair >= pairs) return;
  const bool second = pair + 1 < pairs;
  u32 rows[4];
  rows_of_pair(p, pair, rows[0], rows[1]);
  rows_of_pair(p, second ? pair + 1 : pair, rows[2], rows[3]);

  const u32 bytes = p.dtype == DTYPE_F32 ? 4 : 2;
  const u32 vector_bytes = p.vector_dtype == DTYPE_F32 ? 4 : 2;
  const bool vectors = p.col_stride == 1 && p.d_model % 8 == 0 && p.weight % 16 == 0 &&
                       (p.row_stride * bytes) % 16 == 0 && p.gain % 16 == 0 && vector_bytes > 0;
  if (!vectors) {
    anywhere(p, stats, rows[0], rows[1]);
    if (second) anywhere(p, stats, rows[2], rows[3]);
    return;
  }
#define CASES(DTYPE)                                                       \
  if (p.shift)                                                             \
    along_model<DTYPE, true, true>(p, stats, rows, second);                \
  else if (p.flags & HAS_MEAN)                                             \
    along_model<DTYPE, true, false>(p, stats, rows, second);               \
  else                                                                     \
    along_model<DTYPE, false, false>(p, stats, rows, second);
  if (p.dtype == DTYPE_BF16) {
    CASES(DTYPE_BF16)
  } else if (p.dtype == DTYPE_F16) {
    CASES(DTYPE_F16)
  } else {
    CASES(DTYPE_F32)
  }
#undef CASES
}

// Contiguous along the channels (Conv1D, [in, out]): a block takes 64 channels as 8 lanes of 8 and splits the model
// dimension over 32 rows of lanes. Rotation partners 8-aligned apart or adjacent come from the same pass.
struct ColumnBlock {
  u32 projection;
  u32 first;  // first channel, a multiple of 8
};

template <u32 DTYPE>
__device__ void along_channels(const Projection& p, ChannelStats* stats, u32 first, double (*scratch)[64]) {
  const u32 group = threadIdx.x & 7, slice = threadIdx.x >> 3;
  const u32 channel = first + group * 8;
  const bool live = channel < p.rows;
  // The partner of channel c (half-split rotation), or itself.
  const u32 in_head = channel % p.d_head, half = p.rotary / 2;
  const bool split = half && !p.interleaved && in_head < half;
  const u32 partner = split ? channel + half : channel;
  double sums[4][8] = {}, dots[8] = {};
  if (live)
    for (u32 k0 = slice; k0 < p.d_model; k0 += 128) {
      Vector8<DTYPE> raw[4], other[4];
#pragma unroll
      for (int u = 0; u < 4; u++)
        if (k0 + 32 * u < p.d_model) {
          raw[u].load((const void*)p.weight, p.col_stride * (k0 + 32 * u) + channel);
          if (split) other[u].load((const void*)p.weight, p.col_stride * (k0 + 32 * u) + partner);
        }
      float part[4][8] = {}, dot[8] = {};
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const u32 k = k0 + 32 * u;
        if (k >= p.d_model) break;
        const float g = p.gain ? load_value(p.gain, p.vector_dtype, k) + p.gain_offset : 1.f;
        const float s = p.shift ? load_value(p.shift, p.vector_dtype, k) : 0.f;
        float w[8];
        raw[u].get(w);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float y = g * w[i], c = s * w[i];
          part[0][i] += y * y, part[1][i] += y, part[2][i] += c, part[3][i] += fabsf(c);
        }
        if (split) {
          float o[8];
          other[u].get(o);
#pragma unroll
          for (int i = 0; i < 8; i++) dot[i] += (g * w[i]) * (g * o[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 8; i += 2) dot[i] += (g * w[i]) * (g * w[i + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int q = 0; q < 4; q++) sums[q][i] += part[q][i];
        dots[i] += dot[i];
      }
    }
  // Sum the slices in order, one quantity at a time.
  double total[5];
#pragma unroll
  for (int q = 0; q < 5; q++) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) scratch[slice][group * 8 + i] = q < 4 ? sums[q & 3][i] : dots[i];
    __syncthreads();
    double v = 0;
    if (threadIdx.x < 64)
      for (int s = 0; s < 32; s++) v += scratch[s][threadIdx.x];
    total[q] = v;
  }
  // The finished channels, so that a thread can see its partner's sum.
  __syncthreads();
  const u32 mine = first + threadIdx.x;
  if (threadIdx.x >= 64 || mine >= p.rows) return;
  const double d = p.d_model, bias = p.bias ? load_value(p.bias, p.vector_dtype, mine) : 0.0;
  double norm2 = total[0];
  if (p.flags & HAS_MEAN) norm2 = fmax(norm2 - total[1] * total[1] / d, 0.0);
  if (!(total[0] < 1e300)) norm2 = total[0];
  ChannelStats& out = stats[p.stat_row + mine];
  out.norm2 = (float)norm2, out.raw2 = (float)total[0], out.constant = (float)(total[2] + bias);
  out.absolute = (float)(total[3] + fabs(bias)), out.sum = (float)total[1];
  out.pair = (float)total[4];  // mean still in it: scale_descales takes it out with both sums
}

extern "C" __global__ void __launch_bounds__(256, 1)
    scale_norms_columns(const Projection* projections, const ColumnBlock* blocks, ChannelStats* stats) {
  __shared__ double scratch[32][64];
  const ColumnBlock block = blocks[blockIdx.x];
  const Projection p = projections[block.projection];
  if (p.dtype == DTYPE_BF16)
    along_channels<DTYPE_BF16>(p, stats, block.first, scratch);
  else if (p.dtype == DTYPE_F16)
    along_channels<DTYPE_F16>(p, stats, block.first, scratch);
  else
    along_channels<DTYPE_F32>(p, stats, block.first, scratch);
}
