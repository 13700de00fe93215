// Channel statistics of every projection of a model in one launch: ||diag(g) w||^2, the product with the channel's
// rotation partner, sum g_i w_i, beta . w, sum |beta_i w_i|. A pure read of the weights.
//
// A block takes 32 channels of one projection (16 pairs), a warp two pairs. Sums run in f32 over the 8 values of one
// load and beyond in f64, with a mean or a shift up to 16384 input channels in f32; in a fixed order: same input, same bits.
#include "scale_types.cuh"

struct NormBlock {
  u32 projection;
  u32 first_pair;  // of the projection: head * d_head / 2 + pair of the head
};

struct Sums {
  double raw2 = 0, sum = 0, constant = 0, absolute = 0;
};

template <class T> __device__ __forceinline__ T warp_sum(T v) {
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

// Eight values of a vector of any type, 16-byte aligned.
__device__ __forceinline__ void load8(u64 base, u32 dtype, u32 k, float (&v)[8]) {
  if (dtype == DTYPE_BF16) {
    Vector8<DTYPE_BF16> raw;
    raw.load((const void*)base, k), raw.get(v);
  } else if (dtype == DTYPE_F16) {
    Vector8<DTYPE_F16> raw;
    raw.load((const void*)base, k), raw.get(v);
  } else {
    Vector8<DTYPE_F32> raw;
    raw.load((const void*)base, k), raw.get(v);
  }
}

// Sums sixteen values over the warp at once; lane l returns the sum of value l / 2. Half of the values change lanes at
// each step, so it takes 16 exchanges where sixteen sums take 80.
template <int WIDTH, class T> __device__ __forceinline__ void fold(T (&v)[16]) {
  const bool upper = threadIdx.x & (WIDTH * 2);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const T mine = upper ? v[i + WIDTH] : v[i], theirs = upper ? v[i] : v[i + WIDTH];
    v[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, WIDTH * 2);
  }
}
template <class T> __device__ __forceinline__ T warp_sum16(T (&v)[16]) {
  fold<8>(v), fold<4>(v), fold<2>(v), fold<1>(v);
  return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

template <bool SHORT> struct Sum { typedef double T; };
template <> struct Sum<true> { typedef float T; };

// Contiguous along the model dimension: lanes stride over it, 8 values a load, four channels at a time.
template <u32 DTYPE, bool SUMS, bool SHIFT>
__device__ void along_model(const Projection& p, ChannelStats* stats, const u32 (&rows)[4], bool second) {
  const u32 lane = threadIdx.x & 31;
  const u8* base[4];
#pragma unroll
  for (int r = 0; r < 4; r++) base[r] = (const u8*)p.weight + p.row_stride * (i64)rows[r] * (DTYPE == DTYPE_F32 ? 4 : 2);
  // raw2 x 4, sum x 4, constant x 4, absolute x 4; the products of the two pairs.
  // In f32 where there are four sums a channel: registers for more warps, at most d/256 + 13 roundings deep.
  typename Sum<SUMS>::T sums[16] = {}, dot[2] = {0, 0};
  constexpr int AHEAD = DTYPE == DTYPE_F32 || SUMS ? 1 : 2;
  constexpr bool EARLY = DTYPE != DTYPE_F32;  // registers allow the next round's loads before this round's sums
  Vector8<DTYPE> raw[AHEAD][4];
  if (EARLY)
#pragma unroll
  for (int u = 0; u < AHEAD; u++)
    if (lane * 8 + 256 * u < p.d_model)
#pragma unroll
      for (int r = 0; r < 4; r++) raw[u][r].load(base[r], lane * 8 + 256 * u);
  for (u32 k0 = lane * 8; k0 < p.d_model; k0 += 256 * AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const u32 k = k0 + 256 * u;
      if (k >= p.d_model) break;
      if (!EARLY)
#pragma unroll
        for (int r = 0; r < 4; r++) raw[u][r].load(base[r], k);
      float g[8], s[8];
      if (p.gain) {
        load8(p.gain, p.vector_dtype, k, g);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] += p.gain_offset;
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = 1.f;
      }
      if (SHIFT) load8(p.shift, p.vector_dtype, k, s);
#pragma unroll
      for (int q = 0; q < 2; q++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = 2 * q + h;
          float w[8], raw2 = 0, sum = 0, constant = 0, absolute = 0;
          raw[u][r].get(w);
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float y = g[i] * w[i];
            raw2 += y * y;
            if (SUMS) sum += y;
            if (SHIFT) {
              const float c = s[i] * w[i];
              constant += c, absolute += fabsf(c);
            }
          }
          sums[r] += raw2;
          if (SUMS) sums[4 + r] += sum;
          if (SHIFT) sums[8 + r] += constant, sums[12 + r] += absolute;
        }
        // Anew, so that the registers of the first are free: not every model rotates.
        if (!SUMS || p.rotary) {
          float w[8], x[8], m = 0;
          raw[u][2 * q].get(w), raw[u][2 * q + 1].get(x);
#pragma unroll
          for (int i = 0; i < 8; i++) m += (g[i] * w[i]) * (g[i] * x[i]);
          dot[q] += m;
        }
      }
      // The next round's values, as soon as these are used up.
      if (EARLY && k + 256 * AHEAD < p.d_model)
#pragma unroll
        for (int r = 0; r < 4; r++) raw[u][r].load(base[r], k + 256 * AHEAD);
    }
  }
  if (!SUMS) sums[4] = dot[0], sums[5] = dot[1];
  const auto total = warp_sum16(sums);
  if (SUMS) dot[0] = warp_sum(dot[0]), dot[1] = warp_sum(dot[1]);
  // Lanes 0 to 3 finish one channel each.
  auto value = [&](int i) { return __shfl_sync(0xffffffffu, total, 2 * i); };
  const u32 r = lane & 3;
  const double raw2 = value(r);
  const double sum = SUMS ? value(4 + r) : 0.0, partner = SUMS ? value(4 + (r ^ 1)) : 0.0;
  const double constant = SHIFT ? value(8 + r) : 0.0, absolute = SHIFT ? value(12 + r) : 0.0;
  double m = SUMS ? (r < 2 ? dot[0] : dot[1]) : value(4 + r / 2);
  if (lane >= (second ? 4 : 2)) return;
  double norm2 = raw2;
  if (p.flags & HAS_MEAN) {
    const double inverse = 1.0 / p.d_model;
    norm2 = raw2 - sum * sum * inverse, m -= sum * partner * inverse;
    norm2 = norm2 < 0.0 ? 0.0 : norm2;
  }
  // What f32 sums may have lost: three of them, each at most d/256 + 13 roundings deep.
  const double lost = SUMS ? raw2 * (3 * (p.d_model / 256 + 13) * 0x1p-24) : 0.0;
  const u32 row = r == 0 ? rows[0] : r == 1 ? rows[1] : r == 2 ? rows[2] : rows[3];
  const double bias = p.bias ? load_value(p.bias, p.vector_dtype, row) : 0.f;
  float4* out = (float4*)(stats + p.stat_row + row);
  out[0] = make_float4((float)(norm2 + lost), (float)(raw2 + lost), (float)m, (float)(constant + bias));
  out[1] = make_float4((float)(absolute + fabs(bias)), (float)sum, 0.f, 0.f);
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

template <bool SUMS>
__device__ __forceinline__ void norms(const Projection* projections, const NormBlock* blocks, ChannelStats* stats) {
  const NormBlock block = blocks[blockIdx.x];
  const Projection p = projections[block.projection];
  const u32 pair = block.first_pair + (threadIdx.x >> 5) * 2, pairs = p.rows / 2;
  if (pair >= pairs) return;
  const bool second = pair + 1 < pairs;
  u32 rows[4];
  rows_of_pair(p, pair, rows[0], rows[1]);
  rows_of_pair(p, second ? pair + 1 : pair, rows[2], rows[3]);

  const u32 bytes = p.dtype == DTYPE_F32 ? 4 : 2;
  const bool vectors = p.col_stride == 1 && p.d_model % 8 == 0 && p.weight % 16 == 0 && (!SUMS || p.d_model <= 16384) &&
                       (p.row_stride * bytes) % 16 == 0 && p.gain % 16 == 0 && p.shift % 16 == 0;
  if (!vectors) {
    anywhere(p, stats, rows[0], rows[1]);
    if (second) anywhere(p, stats, rows[2], rows[3]);
    return;
  }
#define CASES(DTYPE)                                                       \
  if (SUMS && p.shift)                                                     \
    along_model<DTYPE, SUMS, SUMS>(p, stats, rows, second);                \
  else                                                                     \
    along_model<DTYPE, SUMS, false>(p, stats, rows, second);
  if (p.dtype == DTYPE_BF16) {
    CASES(DTYPE_BF16)
  } else if (p.dtype == DTYPE_F16) {
    CASES(DTYPE_F16)
  } else {
    CASES(DTYPE_F32)
  }
#undef CASES
}

extern "C" __global__ void __launch_bounds__(256, 2)
    scale_norms(const Projection* projections, const NormBlock* blocks, ChannelStats* stats) {
  norms<false>(projections, blocks, stats);
}
// The same where a norm has a mean or a shift.
extern "C" __global__ void __launch_bounds__(256, 2)
    scale_norms_sums(const Projection* projections, const NormBlock* blocks, ChannelStats* stats) {
  norms<true>(projections, blocks, stats);
}

// Contiguous along the channels (Conv1D, [in, out]): a block takes 64 channels as 8 lanes of 8 and splits the model
// dimension over 32 rows of lanes. Rotation partners 8-aligned apart or adjacent come from the same pass.
struct ColumnBlock {
  u32 projection;
  u32 first;  // first channel, a multiple of 8
};

template <u32 DTYPE, bool SUMS, bool PAIR>
__device__ void along_channels(const Projection& p, ChannelStats* stats, u32 first, double (*scratch)[64]) {
  const u32 group = threadIdx.x & 7, slice = threadIdx.x >> 3;
  const u32 channel = first + group * 8;
  const bool live = channel < p.rows;
  // The partner of channel c (half-split rotation), or itself.
  const u32 in_head = channel % p.d_head, half = p.rotary / 2;
  const bool split = PAIR && half && !p.interleaved && in_head < half;
  const u32 partner = split ? channel + half : channel;
  // f32 over 16 input channels, then a second f32: at most 16 + d/512 roundings deep.
  float sums[4][8] = {}, dots[8] = {};
  constexpr int DEEP = DTYPE == DTYPE_F32 ? 1 : SUMS && PAIR ? 2 : 4, ROUNDS = 16 / DEEP;
  if (live)
    for (u32 k0 = slice; k0 < p.d_model; k0 += 32 * DEEP * ROUNDS) {
      float part[4][8] = {}, dot[8] = {};
#pragma unroll 1
      for (int round = 0; round < ROUNDS; round++) {
        Vector8<DTYPE> raw[DEEP], other[PAIR ? DEEP : 1];
        float g[DEEP], s[DEEP];
#pragma unroll
        for (int u = 0; u < DEEP; u++) {
          const u32 k = k0 + 32 * (round * DEEP + u);
          const bool in = k < p.d_model;
          raw[u].load((const void*)p.weight, p.col_stride * (i64)(in ? k : 0) + channel);
          if (PAIR) other[u].load((const void*)p.weight, p.col_stride * (i64)(in ? k : 0) + partner);
          g[u] = !in ? 0.f : p.gain ? load_value(p.gain, p.vector_dtype, k) + p.gain_offset : 1.f;
          s[u] = in && SUMS && p.shift ? load_value(p.shift, p.vector_dtype, k) : 0.f;
          // What lies past the end counts as zero, also where value 0 is not finite.
          if (!in) raw[u] = Vector8<DTYPE>(), g[u] = 0.f;
          if (PAIR && !in) other[u] = Vector8<DTYPE>();
        }
#pragma unroll
        for (int u = 0; u < DEEP; u++) {
          float w[8];
          raw[u].get(w);
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float y = g[u] * w[i];
            part[0][i] += y * y;
            if (SUMS) {
              const float c = s[u] * w[i];
              part[1][i] += y, part[2][i] += c, part[3][i] += fabsf(c);
            }
          }
          if (PAIR) {
            float o[8];
            other[u].get(o);
            if (split) {
#pragma unroll
              for (int i = 0; i < 8; i++) dot[i] += (g[u] * w[i]) * (g[u] * o[i]);
            } else {
#pragma unroll
              for (int i = 0; i < 8; i += 2) dot[i] += (g[u] * w[i]) * (g[u] * w[i + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int q = 0; q < (SUMS ? 4 : 1); q++) sums[q][i] += part[q][i];
        if (PAIR) dots[i] += dot[i];
      }
    }
  // Sum the slices in order, one quantity at a time.
  double total[5] = {};
#pragma unroll
  for (int q = 0; q < 5; q++) {
    if ((q > 0 && q < 4 && !SUMS) || (q == 4 && !PAIR)) continue;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) scratch[slice][group * 8 + i] = q < 4 ? sums[q & 3][i] : dots[i];
    __syncthreads();
    double part = 0;
    const u32 c = threadIdx.x & 63, quarter = threadIdx.x >> 6;
#pragma unroll
    for (int s = 0; s < 8; s++) part += scratch[quarter * 8 + s][c];
    __syncthreads();
    scratch[quarter][c] = part;
    __syncthreads();
    total[q] = (scratch[0][c] + scratch[1][c]) + (scratch[2][c] + scratch[3][c]);
  }
  const u32 mine = first + threadIdx.x;
  if (threadIdx.x >= 64 || mine >= p.rows) return;
  const double bias = p.bias ? load_value(p.bias, p.vector_dtype, mine) : 0.f;
  double norm2 = total[0];
  if (p.flags & HAS_MEAN) norm2 -= total[1] * total[1] / p.d_model;
  if (norm2 < 0.0) norm2 = 0.0;
  float4* out = (float4*)(stats + p.stat_row + mine);
  // The mean is still in the pair's product: scale_descales takes it out with both sums.
  out[0] = make_float4((float)norm2, (float)total[0], (float)total[4], (float)(total[2] + bias));
  out[1] = make_float4((float)(total[3] + fabs(bias)), (float)total[1], 0.f, 0.f);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    scale_norms_columns(const Projection* projections, const ColumnBlock* blocks, ChannelStats* stats) {
  __shared__ double scratch[32][64];
  const ColumnBlock block = blocks[blockIdx.x];
  const Projection p = projections[block.projection];
  const bool sums = p.shift || (p.flags & HAS_MEAN), pair = p.rotary > 0;
#define CASES(DTYPE)                                                        \
  if (sums && pair)                                                         \
    along_channels<DTYPE, true, true>(p, stats, block.first, scratch);      \
  else if (sums)                                                            \
    along_channels<DTYPE, true, false>(p, stats, block.first, scratch);     \
  else                                                                      \
    along_channels<DTYPE, false, true>(p, stats, block.first, scratch);
  if (p.dtype == DTYPE_BF16) {
    CASES(DTYPE_BF16)
  } else if (p.dtype == DTYPE_F16) {
    CASES(DTYPE_F16)
  } else {
    CASES(DTYPE_F32)
  }
#undef CASES
}
