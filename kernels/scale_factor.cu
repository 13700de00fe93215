// Factors of the K side of products without rotation (include/scale_factor.cuh), and the quadratic forms of the query heads'
// constants, c_q^T G_K c_q. D_HEAD above 64 (macro), Hopper; a block a KV head.
//
// Cholesky by 16 rows. A lane a column within them, every warp with the diagonal tile beside, so that none waits for another;
// the rest of the matrix by mma.sync with the rows as f16 pairs, which are what U is from then on. The upper 16 x 16 tiles lie
// in shared memory, f32, in the order of an accumulator.
#include "scale_factor.cuh"

using namespace spectrum;

constexpr u32 WARPS = N > 128 ? 8 : 4, THREADS = WARPS * 32;
constexpr u32 ROW_BYTES = (EDGE + 8) * 2, ROWS_BYTES = 16 * ROW_BYTES;  // of 16 rows in f16: eight rows touch all banks
static_assert(THREADS >= SIDE, "a thread a channel, a lane a column");
// Roundings of the factorisation, in 2^-24 of the lengths of two columns: 16 steps within the rows and the roots' 24, 8 that an
// entry is a pair and 4 that products of low parts are left out, 16 products and their sum cut off at 2^-23 of the largest, one
// f32 operation for every 16 rows, and what is added to the diagonal.
constexpr u32 FACTOR_DEPTH = 16 + 24 + 8 + 4 + 36 + TILES + 8;

constexpr u32 GUESSES = 2;  // query heads that are looked at for how far products are below those of norms

struct FactorJob {
  u32 k;        // head in the Gram table
  u32 q, many;  // first query head and number of them
  u32 product;  // of the first query head: where its forms go
};
static_assert(sizeof(FactorJob) == 16, "host mirror");

__device__ __forceinline__ u32 tile_at(u32 row, u32 column) { return (row * TILES - row * (row - 1) / 2 + column - row) * 256; }

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }
__device__ __forceinline__ int exponent_of(float x) { return (int)(__float_as_uint(x) >> 23) - 127; }

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_turned(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void put_f16(u32 address, u16 value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// f(piece, row, column) for this warp's 16 x 16 tiles.
template <class F> __device__ __forceinline__ void pieces(F f) {
  u32 row = 0, column = threadIdx.x >> 5;
#pragma unroll 1
  for (;;) {
    while (row < TILES && column >= TILES) row++, column += row - TILES;
    if (row >= TILES) return;
    f(row, column);
    column += WARPS;
  }
}

// The sum of a Gram's parts. Value 4 n + 2 h + e of a lane: row g + 8 h, column 8 n + c + e.
__device__ __forceinline__ void load_piece(float (&v)[8], const HeadGram& head, const float* partials, u32 row, u32 column) {
  const u32 lane = threadIdx.x & 31, i = row * 16 + lane / 4, j = column * 16 + lane % 4 * 2;
  const float* from = partials + ((size_t)head.first * GRAM_BLOCKS + block_number(row / 4, column / 4)) * 4096 + i % 64 * 64 + j % 64;
#pragma unroll
  for (u32 p = 0; p < 8; p++) v[p] = 0.f;
#pragma unroll 1
  for (u32 part = 0; part < head.count; part++, from += (size_t)head.stride * GRAM_BLOCKS * 4096)
#pragma unroll
    for (u32 p = 0; p < 4; p++) {
      const float2 x = __ldg((const float2*)(from + p % 2 * 8 * 64 + p / 2 * 8));
      v[2 * p] += x.x, v[2 * p + 1] += x.y;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, N > 192 ? 1 : N > 128 ? 2 : 5)
    scale_factor(const FactorJob* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                 u8* factors, float* frames, FactorNotes* notes, double2* aux, u32 behind) {
  extern __shared__ __align__(16) float tiles[];
  __shared__ __align__(16) u8 rows[2][ROWS_BYTES];  // high, low
  __shared__ __align__(16) float factor[SIDE], sum[SIDE], constant[SIDE];
  __shared__ float4 scratch[4][WARPS];
  __shared__ SideSums parts[WARPS];
  __shared__ Lift lift;
  __shared__ float unit, apart;  // s
  __shared__ int failed;
  const u32 thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
  const FactorJob job = jobs[blockIdx.x];
  const HeadGram of_k = heads[job.k];
  // `behind`: the launch in front changes nothing that is read here, and waited for the one that made it. Waiting in the end keeps
  // the order of what comes after.
  if (!behind) wait_for_previous();
  let_next_start();
  const ChannelStats own = stats[of_k.stat_row + min(thread, N - 1)];
  if (thread == 0) failed = 0;
  // Channels below 2^-24 of the mean length stay short, and what rounding leaves of a mean is none.
  const float square = fmaxf(own.norm2, own.raw2 * 0x1p-24f);
  const float4 total = sums_of_block<WARPS>({thread < N ? square : 0.f, 0.f, 0.f, 0.f}, scratch[0]);
  const int mean = exponent_of(total.x * (1.f / N)), root = (mean + (mean & 1)) >> 1;
  const int power = (max(exponent_of(square), mean - 48) + 1) >> 1;
  {
    BalancedChannel mine = {1.f, 0.f, 0.f, {}};
    if (thread < N) mine = scaled_channel(own, 0.f, power_of_two(-power));
    if (thread < SIDE) {
      factor[thread] = mine.factor, sum[thread] = mine.sum;
      frames[blockIdx.x * SIDE + thread] = thread < N ? power_of_two(power - root) : 1.f;
    }
    mine.share.add_warp();
    if (lane == 0) parts[warp] = mine.share;
  }
  __syncthreads();
  const float tau = share_of_mean(parts, WARPS, shape), per = shape.mean ? (1.f - tau) / shape.d_model : 0.f;
  const u32 g = lane / 4, c = lane % 4 * 2;
  float squares = 0.f;
  pieces([&](u32 row, u32 column) {
    const u32 i = row * 16 + g, j = column * 16 + c;
    float v[8];
    load_piece(v, of_k, partials, row, column);
    const float weight = row == column ? 1.f : 2.f;
#pragma unroll
    for (u32 p = 0; p < 8; p++) {
      const u32 a = i + p / 2 % 2 * 8, b = j + p / 4 * 8 + p % 2;
      // Beyond the head lies anything.
      v[p] = a < N && b < N ? v[p] * factor[a] * factor[b] - sum[a] * sum[b] * per : 0.f;
      squares += weight * v[p] * v[p];
    }
    float4* to = (float4*)(tiles + tile_at(row, column) + lane * 8);
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  });
  squares = sums_of_block<WARPS>({squares, 0.f, 0.f, 0.f}, scratch[1]).x;
  // sigma_Q^2 sigma_K^2 over sigma^2 of the product, the first two taken as ||G||_F^2 / tr G and the last as tr G_Q G_K over the smaller
  // (tr G)^2 / ||G||_F^2: a guess, the largest of a few heads of the group.
  float of_products = 1.f;
#pragma unroll 1
  for (u32 h = 0; h < (shape.one_sided ? 0 : min(job.many, GUESSES)); h++) {
    const HeadGram of_q = heads[job.q + h];
    const ChannelStats other = stats[of_q.stat_row + min(thread, N - 1)];
    const float over = thread < N ? inverse(factor[thread]) : 1.f;
    if (thread < SIDE) constant[thread] = other.sum * over;
    __syncthreads();
    float square = 0.f, dot = 0.f;
    pieces([&](u32 row, u32 column) {
      const u32 i = row * 16 + g, j = column * 16 + c;
      const float* beside = tiles + tile_at(row, column) + lane * 8;
      float v[8], of_square = 0.f, of_dot = 0.f;
      load_piece(v, of_q, partials, row, column);
#pragma unroll
      for (u32 p = 0; p < 8; p++) {
        const u32 a = i + p / 2 % 2 * 8, b = j + p / 4 * 8 + p % 2;
        const float x = a < N && b < N ? v[p] * inverse(factor[a]) * inverse(factor[b]) - constant[a] * constant[b] * per : 0.f;
        of_square += x * x, of_dot += x * beside[p];
      }
      const float weight = row == column ? 1.f : 2.f;
      square += weight * of_square, dot += weight * of_dot;
    });
    const float4 sums = sums_of_block<WARPS>({square, dot, thread < N ? other.raw2 * over * over : 0.f, 0.f}, scratch[2 + h % 2]);
    const float raw = sums_of_warps(parts, WARPS).raw * inverse(sums.z);
    of_products = fmaxf(of_products, fminf(squares * inverse(raw), sums.x * raw) * inverse(sums.y));  // drops a NaN
  }
  if (thread == 0) {
    const SideSums side = sums_of_warps(parts, WARPS);
    apart = spectrum::root(fminf(of_products, 0x1p20f));
    lift = lift_of<FACTOR_DEPTH>(side, squares, shape, apart, tau);
    // A power of four that keeps the diagonal below 8: with 2^12 no entry of U passes f16, nor does T with 2^11.
    unit = power_of_two(-(max(exponent_of(2.f + lift.added), 1) / 2 * 2));
  }
  // Forms of the query heads that have constants.
#pragma unroll 1
  for (u32 h = 0; h < job.many; h++) {
    const u32 q = heads[job.q + h].stat_row;
    const float other = thread < N ? stats[q + thread].constant : 0.f;
    double* to = (double*)(aux + job.product + h) + 1;
    if (!__syncthreads_or(!(other == 0.f))) {
      if (thread == 0) *to = 0.0;
      continue;
    }
    BalancedChannel mine = {1.f, 0.f, 0.f, {}};
    if (thread < N) mine = scaled_channel(own, other, factor[thread]);
    if (thread < SIDE) constant[thread] = mine.constant;
    mine.share.add_warp();
    if (lane == 0) parts[warp] = mine.share;
    __syncthreads();
    float form = 0.f;
    pieces([&](u32 row, u32 column) {
      const float* v = tiles + tile_at(row, column) + lane * 8;
      float part = 0.f;
#pragma unroll
      for (u32 p = 0; p < 8; p++)
        part += v[p] * constant[row * 16 + g + p / 2 % 2 * 8] * constant[column * 16 + c + p / 4 * 8 + p % 2];
      form += row == column ? part : 2.f * part;
    });
    form = sums_of_block<WARPS>({form, 0.f, 0.f, 0.f}, scratch[h & 1]).x;
    if (thread == 0) *to = form_above(sums_of_warps(parts, WARPS), form, per, 64 + 3 * SIDE * SIDE / THREADS, shape);
  }
  __syncthreads();
  if (!(lift.scale > 0.f)) {
    if (thread == 0) notes[blockIdx.x] = {0.0, 0.f, 1.f, lift.scale, 0.f};
    wait_for_previous();
    return;
  }
  // s (B + e I), with ones beyond the head.
  const float times = unit, added = lift.added * times;
  pieces([&](u32 row, u32 column) {
    if (row != column && times == 1.f) return;
    float* v = tiles + tile_at(row, column) + lane * 8;
#pragma unroll
    for (u32 p = 0; p < 8; p++) {
      const u32 a = g + p / 2 % 2 * 8, b = c + p / 4 * 8 + p % 2;
      v[p] *= times;
      if (row == column && a == b) v[p] = row * 16 + a < N ? v[p] + added : 1.f;
    }
  });
  __syncthreads();
  const u32 high = ptx::shared_address(rows[0]);
  u8* image = factors + (size_t)blockIdx.x * FACTOR_BYTES;
#pragma unroll 1
  for (u32 p = 0; p < TILES; p++) {
    {
      const u32 j = (p + 1) * 16 + thread;
      const bool inside = j < EDGE, active = warp == 0 || (p + 1) * 16 + warp * 32 < EDGE;
      if (active) {
        const u32 x = lane % 16, y = inside ? j % 16 : 0;
        const float* from = tiles + tile_at(p, p) + x % 8 / 2 * 8 + x / 8 * 4 + x % 2;
        const float* beside = tiles + tile_at(p, inside ? j / 16 : p) + y % 8 / 2 * 8 + y / 8 * 4 + y % 2;
        float corner[16], column[16];
#pragma unroll
        for (u32 k = 0; k < 16; k++) corner[k] = from[k % 8 * 32 + k / 8 * 2], column[k] = beside[k % 8 * 32 + k / 8 * 2];
#pragma unroll
        for (u32 k = 0; k < 16; k++) {
          const float pivot = __shfl_sync(0xffffffffu, corner[k], k);
          if (!(pivot > 0.f)) failed = 1;
          const float over = inverse_root(pivot);
          corner[k] *= over, column[k] *= over;
#pragma unroll
          for (u32 i = k + 1; i < 16; i++) {
            const float u = __shfl_sync(0xffffffffu, corner[k], i);
            corner[i] -= u * corner[k], column[i] -= u * column[k];
          }
        }
        const bool whole = p * 16 + x < N, mine = warp == 0 && lane < 16;
        const u32 at = high + (p * 16 + x) * 2, next = high + j * 2;
#pragma unroll
        for (u32 k = 0; k < 16; k++) {
          const float left = mine && k <= x && whole ? corner[k] : 0.f, right = inside && j < N ? column[k] : 0.f;
          const Pair pair = split(left * UP, right * UP);
          if (mine) put_f16(at + k * ROW_BYTES, (u16)pair.high), put_f16(at + ROWS_BYTES + k * ROW_BYTES, (u16)pair.low);
          if (inside)
            put_f16(next + k * ROW_BYTES, (u16)(pair.high >> 16)), put_f16(next + ROWS_BYTES + k * ROW_BYTES, (u16)(pair.low >> 16));
        }
      }
    }
    __syncthreads();
    // These rows of U as operands: 16 bytes a thread, zeros left of the diagonal and beyond the head.
    for (u32 i = thread; i < 256 * (GRAM_SIDE - p / 4); i += THREADS) {
      const u32 block = p / 4 + i / 256, which = i / 128 % 2, row = i / 8 % 16, chunk = i % 8, column = block * 64 + chunk * 8;
      uint4 v = {0, 0, 0, 0};
      if (column >= p * 16 && column < EDGE) v = *(const uint4*)(rows[which] + row * ROW_BYTES + column * 2);
      const u32 r = p % 4 * 16 + row;
      *(uint4*)(image + block_number(p / 4, block) * PAIR_BYTES + which * OPERAND_BYTES + r * 128 + ((chunk ^ r % 8) << 4)) = v;
    }
    // The rest, a tile a warp.
    u32 row = p + 1, column = row + warp;
    const u32 q = lane % 8, m = lane / 8;
    const u32 left = high + (q + m / 2 * 8) * ROW_BYTES + m % 2 * 16, right = high + (q + m % 2 * 8) * ROW_BYTES + m / 2 * 16;
#pragma unroll 1
    for (;;) {
      while (row < TILES && column >= TILES) row++, column += row - TILES;
      if (row >= TILES) break;
      u32 a[2][4], b[2][4];
      load_turned(a[0], left + row * 32), load_turned(a[1], left + ROWS_BYTES + row * 32);
      load_turned(b[0], right + column * 32), load_turned(b[1], right + ROWS_BYTES + column * 32);
      float4* to = (float4*)(tiles + tile_at(row, column) + lane * 8);
      float d[2][4] = {};
#pragma unroll
      for (u32 n = 0; n < 2; n++) multiply(d[n], a[1], b[0][2 * n], b[0][2 * n + 1]);
#pragma unroll
      for (u32 n = 0; n < 2; n++) multiply(d[n], a[0], b[1][2 * n], b[1][2 * n + 1]);
#pragma unroll
      for (u32 n = 0; n < 2; n++) {
        multiply(d[n], a[0], b[0][2 * n], b[0][2 * n + 1]);
        constexpr float DOWN = 1.f / (UP * UP);
        float4 v = to[n];
        v.x -= d[n][0] * DOWN, v.y -= d[n][1] * DOWN, v.z -= d[n][2] * DOWN, v.w -= d[n][3] * DOWN;
        to[n] = v;
      }
      column += WARPS;
    }
    __syncthreads();
  }
  // Rows beyond the head.
  u8* last = image + block_number(GRAM_SIDE - 1, GRAM_SIDE - 1) * PAIR_BYTES;
  for (u32 i = thread; EDGE < SIDE && i < 256 * (SIDE - EDGE) / 16; i += THREADS) {
    const u32 which = i / 128 % 2, r = EDGE % 64 + i / 256 * 16 + i / 8 % 16;
    *(uint4*)(last + which * OPERAND_BYTES + r * 128 + (i % 8 << 4)) = {0, 0, 0, 0};
  }
  if (thread == 0) {
    FactorNotes out = {};
    out.back = (double)power_of_two(root) * power_of_two(root) / ((1.0 - lift.t) * times);
    out.trace = 1.001f * inverse(lift.scale) * times;
    out.apart = apart, out.state = failed ? -1.f : 1.f;
    notes[blockIdx.x] = out;
  }
  wait_for_previous();
}
