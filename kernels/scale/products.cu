// H = U A U^T for heads without rotation, A >= G_Q and U^T U >= G_K (scale/lift.cuh): lambda(H) is sigma^2 of
// W_Q W_K^T, and `scale_eigenvalues` certifies it. And the quadratic forms of the constants, aux = (c_k^T G_Q c_k, c_q^T G_K c_q). Any
// d_head (macro D_HEAD) and device; one block per query head.
//
// Contract: `matrices` has H in the layout of a Gram (its upper 64 x 64 blocks), `products` what goes with it. Cholesky by 16
// rows, and all products on tensor cores (mma.sync) of F16 pairs, value = high + low to 2^-22. The upper 16 x 16 tiles of G_K
// lie in shared memory in f32, in the order of an accumulator; those of U, as pairs and column by column, take their places. A, and
// T = U A in its place, lie there by CHUNK columns.
#include "common/warp.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "scale/lift.cuh"

using namespace spectrum;

constexpr u32 TILES = (N + 15) / 16, EDGE = TILES * 16, SLABS = (N + 63) / 64, SIDE = SLABS * 64, BLOCKS = SLABS * (SLABS + 1) / 2;
constexpr u32 THREADS = 2 * SIDE, WARPS = THREADS / 32;
#ifndef CHUNK
#define CHUNK EDGE
#endif
constexpr u32 TILE_BYTES = 1024, FACTOR_BYTES = TILES * (TILES + 1) / 2 * TILE_BYTES;
constexpr u32 ROW_BYTES = CHUNK * 2 + 16, PART_BYTES = EDGE * ROW_BYTES;  // of A: high parts, then low; eight rows touch all banks
constexpr u32 CHUNK_TILES = CHUNK / 16;
static_assert(CHUNK % 16 == 0 && CHUNK <= EDGE, "host's number");

constexpr float UP = 0x1p12f;  // pairs are of values times 2^12: low parts are normal numbers, no value is above 1
// In 2^-24 of the lengths of the two vectors: a value as a pair 4, low times low 4, 16 products and their sum truncated at 2^-23
// of the largest 36, one f32 sum for every 16 products, the last roundings 2. U is its pairs from the start.
constexpr float PRODUCT_DEPTH = 4 + 4 + 36 + TILES + 2;
// The same of U^T U: 16 steps within per row of tiles, 24 for the roots, both values as pairs, and what is added to the diagonal.
constexpr float FACTOR_DEPTH = 16 + 24 + 4 + PRODUCT_DEPTH + 8;
// Of the constants' forms: a thread's values, its warp's and the block's.
constexpr u32 FORM_DEPTH = 32 + 4 * TILES * (TILES + 1) / WARPS + WARPS;
constexpr float SMALLEST = 0x1p-37f;  // half of the smallest F16, 2^12 times too large

// The pair of two neighbouring values.
struct Pair {
  u32 high, low;
};
__device__ __forceinline__ Pair split(float a, float b) {
  const u32 high = ptx::f16x2(a, b);
  return {high, ptx::f16x2(a - ptx::f32_from_f16((u16)high), b - ptx::f32_from_f16((u16)(high >> 16)))};
}

// Of four 8 x 8 fragments, this lane addresses row `row` of the one that has columns 8 `column`. ALONG: fragments 0 and 1 share
// their columns rather than their rows.
template <bool ALONG> __device__ __forceinline__ uint2 fragment_row() {
  const u32 lane = threadIdx.x & 31, m = lane / 8;
  return ALONG ? make_uint2(m % 2 * 8 + lane % 8, m / 2) : make_uint2(m / 2 * 8 + lane % 8, m % 2);
}
// Tile (row, column) of U, and in a pair of it rows 8 `half` of a column: columns of 32 bytes, swizzled so that eight touch all banks.
__device__ __forceinline__ u32 tile_at(u32 row, u32 column) { return (row * TILES - row * (row - 1) / 2 + column - row) * TILE_BYTES; }
__device__ __forceinline__ u32 in_tile(u32 column, u32 half) { return column * 32 + ((half ^ (column >> 2 & 1)) << 4); }

// High and low part of a 16 x 16 operand; TRANSPOSED: as it lies, row by row, its columns are wanted.
template <bool ALONG, bool TRANSPOSED> __device__ __forceinline__ void load_factor(u32 (&v)[2][4], u32 tile) {
  const uint2 at = fragment_row<ALONG>();
  ptx::ldmatrix<TRANSPOSED>(v[0], tile + in_tile(at.x, at.y)), ptx::ldmatrix<TRANSPOSED>(v[1], tile + TILE_BYTES / 2 + in_tile(at.x, at.y));
}
// The same from A: its rows 16 `row`, and columns 16 `column` of the chunk.
template <bool ALONG, bool TRANSPOSED> __device__ __forceinline__ void load_chunk(u32 (&v)[2][4], u32 a, u32 row, u32 column) {
  const uint2 at = fragment_row<ALONG>();
  const u32 address = a + (row * 16 + at.x) * ROW_BYTES + column * 32 + at.y * 16;
  ptx::ldmatrix<TRANSPOSED>(v[0], address), ptx::ldmatrix<TRANSPOSED>(v[1], address + PART_BYTES);
}

// sum += a b of 16 x 16 pairs, the mixed products before the one that truncates them. Value 4 n + 2 h + e of lane 4 g + t: row
// g + 8 h, column 8 n + 2 t + e.
__device__ __forceinline__ void multiply_add(float (&sum)[8], const u32 (&a)[2][4], const u32 (&b)[2][4]) {
#pragma unroll
  for (u32 n = 0; n < 2; n++) {
    float d[4];
    ptx::mma_f16_overwrite(d, a[1], b[0][2 * n], b[0][2 * n + 1]);
    ptx::mma_f16(d, a[0], b[1][2 * n], b[1][2 * n + 1]);
    ptx::mma_f16(d, a[0], b[0][2 * n], b[0][2 * n + 1]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum[4 * n + i] += d[i];
  }
}

// f(row, column) for this warp's upper tiles from row `first` on.
template <class F> __device__ __forceinline__ void for_tiles(u32 first, F f) {
  u32 row = first, column = row + ptx::thread_index() / 32;
#pragma unroll 1
  for (;;) {
    while (row < TILES && column >= TILES) row++, column += row - TILES;
    if (row >= TILES) return;
    f(row, column);
    column += WARPS;
  }
}

// A tile of a Gram, the sum of its parts. UPPER: on or above the diagonal; else it may be the mirror image of one that is.
template <bool UPPER> __device__ __forceinline__ void load_tile(float (&v)[8], const float* partials, const HeadGram& head, u32 row, u32 column) {
  const bool mirrored = !UPPER && row > column;
  const u32 lane = threadIdx.x & 31, i = min(row, column), j = max(row, column);
  const u32 block = i / 4 * SLABS - i / 4 * (i / 4 - 1) / 2 + j / 4 - i / 4;
  const u32 down = lane / 4, right = lane % 4 * 2, step = mirrored ? 1 : 64, next = mirrored ? 64 : 1;
  const float* from = partials + ((size_t)head.first * BLOCKS + block) * 4096 + i % 4 * 16 * 64 + j % 4 * 16 + down * step + right * next;
#pragma unroll
  for (u32 p = 0; p < 8; p++) v[p] = 0.f;
#pragma unroll 1
  for (u32 part = 0; part < head.count; part++, from += (size_t)head.stride * BLOCKS * 4096)
#pragma unroll
    for (u32 p = 0; p < 8; p += 2) {
      const float* at = from + p / 2 % 2 * 8 * step + p / 4 * 8 * next;
      const float2 x = UPPER ? __ldg((const float2*)at) : make_float2(__ldg(at), __ldg(at + next));
      v[p] += x.x, v[p + 1] += x.y;
    }
}

// Both heads' channels, balanced.
struct Channels {
  float factor[2][SIDE], sum[2][SIDE], constant[2][SIDE];
};
// f(value, row, column) of the balanced Gram of side `which` without its mean; 0 outside the head, where a Gram holds anything.
template <class F> __device__ __forceinline__ void balanced_tile(float (&v)[8], const Channels& c, u32 which, float per, u32 row, u32 column, F f) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 p = 0; p < 8; p++) {
    const u32 i = row * 16 + lane / 4 + p / 2 % 2 * 8, j = column * 16 + lane % 4 * 2 + p / 4 * 8 + p % 2;
    v[p] = i < N && j < N ? v[p] * c.factor[which][i] * c.factor[which][j] - c.sum[which][i] * c.sum[which][j] * per : 0.f;
    f(v[p], i, j);
  }
}

template <u32 COUNT> __device__ __forceinline__ void block_sums(float (&v)[COUNT], float (*scratch)[COUNT]) {
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) v[i] = warp_sum(v[i]);
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) scratch[threadIdx.x / 32][i] = v[i];
  __syncthreads();
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) {
    v[i] = 0.f;
#pragma unroll 1
    for (u32 w = 0; w < WARPS; w++) v[i] += scratch[w][i];
  }
}

// U of the tiles of S, U^T U = S, in their places. False if S is not positive definite. `meanwhile`: other work, for warps that have
// no columns of a row of tiles.
template <class F> __device__ __forceinline__ bool factorise(u32 factor, u8* tiles, int* failed, F meanwhile) {
#pragma unroll 1
  for (u32 p = 0; p < TILES; p++) {
    // `warp` is the same in a warp, and known to be.
    const u32 thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
    // A lane a column of the row of tiles, every warp with the diagonal tile beside it, so that none waits for another.
    const u32 j = (p + 1) * 16 + thread, x = lane % 16;
    const bool inside = j < EDGE, active = warp == 0 || (p + 1) * 16 + warp * 32 < EDGE;
    auto column_of = [](u32 y) { return y % 8 / 2 * 8 + y / 8 * 4 + y % 2; };
    float corner[16], column[16];
    if (!active) meanwhile();
    if (active) {
      const float *from = (const float*)(tiles + tile_at(p, p)) + column_of(x), *beside = (const float*)(tiles + tile_at(p, inside ? j / 16 : p)) + column_of(inside ? j % 16 : 0);
#pragma unroll
      for (u32 k = 0; k < 16; k++) corner[k] = from[k % 8 * 32 + k / 8 * 2], column[k] = beside[k % 8 * 32 + k / 8 * 2];
#pragma unroll
      for (u32 k = 0; k < 16; k++) {
        const float pivot = __shfl_sync(0xffffffffu, corner[k], k);
        if (!(pivot > 0.f)) *failed = 1;
        const float over = rsqrt_approx(pivot);
        corner[k] *= over, column[k] *= over;
#pragma unroll
        for (u32 i = k + 1; i < 16; i++) {
          const float u = __shfl_sync(0xffffffffu, corner[k], i);
          corner[i] -= u * corner[k], column[i] -= u * column[k];
        }
      }
    }
    __syncthreads();
    // Zeros below the diagonal and outside the head.
    auto put = [&](u32 tile, u32 at_column, float (&v)[16], u32 rows) {
      u32 high[8], low[8];
#pragma unroll
      for (u32 k = 0; k < 16; k += 2) {
        const Pair pair = split(k < rows ? v[k] * UP : 0.f, k + 1 < rows ? v[k + 1] * UP : 0.f);
        high[k / 2] = pair.high, low[k / 2] = pair.low;
      }
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 at = tile + in_tile(at_column, half), i = 4 * half;
        ptx::st_shared_v4(at, high[i], high[i + 1], high[i + 2], high[i + 3]);
        ptx::st_shared_v4(at + TILE_BYTES / 2, low[i], low[i + 1], low[i + 2], low[i + 3]);
      }
    };
    const u32 again = ptx::thread_index(), y = (p + 1) * 16 + again;
    if (again < 16) put(factor + tile_at(p, p), again, corner, p * 16 + again < N ? again + 1 : 0);
    if (y < EDGE) put(factor + tile_at(p, y / 16), y % 16, column, y < N ? 16 : 0);
    __syncthreads();
    for_tiles(p + 1, [&](u32 row, u32 column) {
      u32 a[2][4], b[2][4];
      load_factor<true, false>(a, factor + tile_at(p, row)), load_factor<false, false>(b, factor + tile_at(p, column));
      float d[8] = {};
      multiply_add(d, a, b);
      float4* to = (float4*)(tiles + tile_at(row, column)) + lane * 2;
#pragma unroll
      for (u32 n = 0; n < 2; n++) {
        constexpr float DOWN = 1.f / (UP * UP);
        float4 v = to[n];
        v.x -= d[4 * n] * DOWN, v.y -= d[4 * n + 1] * DOWN, v.z -= d[4 * n + 2] * DOWN, v.w -= d[4 * n + 3] * DOWN;
        to[n] = v;
      }
    });
    __syncthreads();
  }
  return !*failed;
}

// Pairs of values times `scale` to rows 16 `row` and columns 16 `column` of the chunk.
__device__ __forceinline__ void store_chunk(const float (&v)[8], float scale, u32 a, u32 row, u32 column) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 p = 0; p < 4; p++) {
    const Pair pair = split(v[2 * p] * scale, v[2 * p + 1] * scale);
    const u32 at = a + (row * 16 + lane / 4 + p % 2 * 8) * ROW_BYTES + column * 32 + p / 2 * 16 + lane % 4 * 4;
    ptx::st_shared_u32(at, pair.high), ptx::st_shared_u32(at + PART_BYTES, pair.low);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, N > 128 ? 1 : N > 64 ? 2 : 5)
    scale_products(const uint2* pairs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                   float* matrices, Product* products, double2* aux) {
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Channels channels;
  __shared__ SideSums parts[WARPS];
  __shared__ float scratch[2][WARPS][6];
  __shared__ Lift lifts[2];
  __shared__ float per[2];  // what s s^T is multiplied by
  __shared__ int failed;
  __shared__ u32 next;  // tile of A
  const u32 factor = ptx::shared_address(memory), a = factor + FACTOR_BYTES;
  const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  __shared__ HeadGram sides[2];  // of q and k
  {
    // A thread per channel, q before k.
    const u32 which = thread / SIDE, i = thread % SIDE;
    const uint2 pair = pairs[blockIdx.x];
    const HeadGram side = heads[which ? pair.y : pair.x], other = heads[which ? pair.x : pair.y];
    if (i == 0) sides[which] = side, failed = 0, next = 0;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    BalancedChannel own = {1.f, 0.f, 0.f, {}};
    if (i < N) own = balanced_channel(stats[side.stat_row + i], stats[other.stat_row + i]);
    channels.factor[which][i] = own.factor, channels.sum[which][i] = own.sum, channels.constant[which][i] = own.constant;
    float v[6] = {own.share.raw, own.share.lost, own.share.mean, own.share.by_norm, own.share.by_delta, own.share.by_sum};
#pragma unroll
    for (u32 n = 0; n < 6; n++) v[n] = warp_sum(v[n]);
    if (lane == 0) parts[warp] = {v[0], v[1], v[2], v[3], v[4], v[5]};
  }
  __syncthreads();
  auto sums_of = [&](u32 which) {
    SideSums all = parts[which * WARPS / 2];
#pragma unroll 1
    for (u32 w = which * WARPS / 2 + 1; w < (which + 1) * WARPS / 2; w++) {
      const SideSums& more = parts[w];
      all.raw += more.raw, all.lost += more.lost, all.mean += more.mean;
      all.by_norm += more.by_norm, all.by_delta += more.by_delta, all.by_sum += more.by_sum;
    }
    return all;
  };
  if (thread < 2) per[thread] = shape.mean ? (1.f - share_of_mean(sums_of(thread), shape)) / shape.d_model : 0.f;
  __syncthreads();
  // ||G_Q||_F^2, ||G_K||_F^2, the forms of the constants, tr G_Q G_K.
  float sums[6] = {};
  for_tiles(0, [&](u32 row, u32 column) {
    float v[2][8];
    const float weight = row == column ? 1.f : 2.f;
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
      load_tile<true>(v[which], partials, sides[which], row, column);
      float square = 0.f, form = 0.f;
      balanced_tile(v[which], channels, which, per[which], row, column, [&](float x, u32 i, u32 j) {
        square += x * x, form += x * channels.constant[which][i] * channels.constant[which][j];
      });
      sums[which] += weight * square, sums[2 + which] += weight * form;
    }
    float dot = 0.f;
#pragma unroll
    for (u32 p = 0; p < 8; p++) dot += v[0][p] * v[1][p];
    sums[4] += weight * dot;
    float4* to = (float4*)(memory + tile_at(row, column)) + lane * 2;
    to[0] = make_float4(v[1][0], v[1][1], v[1][2], v[1][3]), to[1] = make_float4(v[1][4], v[1][5], v[1][6], v[1][7]);
  });
  block_sums(sums, scratch[0]);
  if (thread < 2) {
    const SideSums own = sums_of(thread), other = sums_of(1 - thread);
    // sigma_Q^2 sigma_K^2 over sigma^2 of the product, the first two taken as ||G||_F^2 / tr G and the last as tr G_Q G_K over the
    // smaller (tr G)^2 / ||G||_F^2.
    const float of_product = fminf(sums[thread] * other.raw * rcp_approx(own.raw), sums[1 - thread] * own.raw * rcp_approx(other.raw));
    const float loose = root(fminf(fmaxf(of_product * rcp_approx(sums[4]), 1.f), 0x1p20f));  // drops a NaN
    lifts[thread] = lift_of(own, sums[thread], thread ? FACTOR_DEPTH : 0.f, loose, shape);
    ((double*)(aux + blockIdx.x))[thread] = form_above(own, sums[2 + thread], per[thread], FORM_DEPTH, shape);
  }
  __syncthreads();
  const Lift &of_q = lifts[0], &of_k = lifts[1];
  auto put = [&](float trace, float slack) {
    if (ptx::thread_index()) return;
    const bool zero = of_q.scale == 0.f || of_k.scale == 0.f;
    const double grown = 1.0 / ((1.0 - of_q.t) * (1.0 - of_k.t) * of_q.scale * of_k.scale);
    products[ptx::block_index()] = {zero ? 0.0 : grown, zero ? 0.f : trace, slack};
  };
  if (!(of_q.scale > 0.f && of_k.scale > 0.f)) return put(__uint_as_float(0x7fc00000u), 0.f);
  // G_K + e I of trace 1, with ones outside the head.
  for_tiles(0, [&](u32 row, u32 column) {
    float* v = (float*)(memory + tile_at(row, column)) + lane * 8;
#pragma unroll
    for (u32 p = 0; p < 8; p++) {
      const u32 i = lane / 4 + p / 2 % 2 * 8, j = lane % 4 * 2 + p / 4 * 8 + p % 2;
      const bool on = row == column && i == j;
      v[p] = on && row * 16 + i >= N ? 1.f : (v[p] + (on ? of_k.added : 0.f)) * of_k.scale;
    }
  });
  __syncthreads();
  // The next tile of A, of the `count` columns of tiles from `first` on; false if there is none.
  auto load_a = [&](u32 first, u32 count) {
    const u32 index = __shfl_sync(0xffffffffu, ptx::thread_index() % 32 == 0 ? atomicAdd(&next, 1) : 0, 0);
    if (index >= TILES * count) return false;
    const u32 row = index / count, column = index % count;
    float v[8];
    load_tile<false>(v, partials, sides[0], row, first + column);
    balanced_tile(v, channels, 0, per[0], row, first + column, [&](float& x, u32 i, u32 j) { x += i == j && i < N ? of_q.added : 0.f; });
    store_chunk(v, of_q.scale * UP, a, row, column);
    return true;
  };
  // From the last columns on, to which every tile of H adds something.
  constexpr u32 LAST = (TILES - 1) / CHUNK_TILES * CHUNK_TILES;
  auto meanwhile = [&] {
#pragma unroll 1
    for (u32 n = 0; n < 2 && load_a(LAST, TILES - LAST); n++) {
    }
  };
  if (!factorise(factor, memory, &failed, meanwhile)) return put(-1.f, 0.f);
  float lengths[2] = {};  // ||T||_F^2, tr H
#pragma unroll 1
  for (u32 first = LAST;; first -= CHUNK_TILES) {
    const u32 count = min(CHUNK_TILES, TILES - first);
    while (load_a(first, count)) {
    }
    __syncthreads();
    // T = U A: a warp per column of tiles. Row i of T is made of the rows of A from i on.
#pragma unroll 1
    for (u32 column = ptx::thread_index() / 32; column < count; column += WARPS)
#pragma unroll 1
      for (u32 row = 0; row < TILES; row++) {
        float v[8] = {};
#pragma unroll 2
        for (u32 k = row; k < TILES; k++) {
          u32 u[2][4], b[2][4];
          load_factor<false, true>(u, factor + tile_at(row, k)), load_chunk<true, true>(b, a, k, column);
          multiply_add(v, u, b);
        }
        __syncwarp();
#pragma unroll
        for (u32 p = 0; p < 8; p++) v[p] *= 1.f / (UP * UP), lengths[0] += v[p] * v[p];
        store_chunk(v, UP, a, row, column);
      }
    __syncthreads();
    // H = T U^T on and above the diagonal, mirrored within its 64 x 64 blocks.
    for_tiles(0, [&](u32 row, u32 column) {
      float v[8] = {};
      const u32 from = max(first, column);
#pragma unroll 2
      for (u32 k = from; k < first + count; k++) {
        u32 t[2][4], b[2][4];
        load_chunk<true, false>(t, a, row, k - first), load_factor<true, true>(b, factor + tile_at(column, k));
        multiply_add(v, t, b);
      }
      if (from >= first + count) return;
      const u32 block = row / 4 * SLABS - row / 4 * (row / 4 - 1) / 2 + column / 4 - row / 4;
      float* to = matrices + ((size_t)blockIdx.x * BLOCKS + block) * 4096;
#pragma unroll
      for (u32 p = 0; p < 8; p++) {
        const u32 i = lane / 4 + p / 2 % 2 * 8, j = lane % 4 * 2 + p / 4 * 8 + p % 2, x = row % 4 * 16 + i, y = column % 4 * 16 + j;
        v[p] *= 1.f / (UP * UP);
        if (row == column && i == j) lengths[1] += v[p];
        if (first + count < TILES) v[p] += to[x * 64 + y];
        to[x * 64 + y] = v[p];
        if (row / 4 == column / 4 && row != column) to[y * 64 + x] = v[p];
      }
    });
    if (first == 0) break;
    if (ptx::thread_index() == 0) next = 0;
    __syncthreads();
  }
  float last[6] = {lengths[0], lengths[1], 0.f, 0.f, 0.f, 0.f};
  block_sums(last, scratch[1]);
  // |T - U A| <= c |U| |A| and |H - T U^T| <= c |T| |U|^T, row by column, c = PRODUCT_DEPTH 2^-24; half of H is mirrored. U^T U has a
  // trace of at most 1, which with ||U^T U||_F bounds ||U||^2.
  const float c = 1.4143f * 1.001f * PRODUCT_DEPTH * 0x1p-24f;
  const float length = root(1.001f / N + root(fmaxf(of_k.norm * of_k.norm - 0.999f / N, 0.f)));
  put(last[1], 1.002f * (c * (length * of_q.norm + root(last[0])) + 1.4143f * N * SMALLEST * (of_k.norm + length)));
}
