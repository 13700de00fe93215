// One implicit power step per head that reads each weight once: z = G_Q y, then y <- G_K z, G = W^T W never formed, W with
// the norm's gain and without its mean.
//
// The two products of one weight are fused over the model dimension: u = W y is complete for the input channels of a tile,
// so W^T u starts from the same tile. A warp takes runs of 16 input channels of the tile for both, and u never leaves its registers:
// the result of the first product has the layout of the second's left operand. Tiles come through the copy engine; the warp
// that is the last to have read one asks for the next, and nothing in the loop is a barrier of the block. Vectors enter as
// three bf16 terms on tensor cores, exact to f32, four or eight at once, so that a K head serves the query heads of its group
// from one read. The mean of a LayerNorm is a term of rank one, G_effective = G - s s^T / d with s = W^T 1, and s is one more
// row of the second product. Every warp leaves its part of a head; scale_power_reduce sums them in order.
//
// sigma = sqrt((z . G_K z) / (y . z)) is ||M^T u|| for the unit u = M v / ||M v||, M = W_Q W_K^T, y = W_K^T v: never above
// the norm of M. A vector that is mapped to zero stays as it is.
//
// BF16, [out, in] or (d_head a multiple of 64) [in, out].
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ring.cuh"
#include "scale_mma.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
#ifndef ALONG_CHANNELS  // 1: stored [in, out]
#define ALONG_CHANNELS 0
#endif

struct PowerBlock {
  u32 projection;
  u32 head;    // of the projection
  u32 vector;  // first vector (query head, counted over the model) it multiplies
  u32 count;   // vectors: 1 for q, up to 8 of the group for k
  u32 first;   // where the first vector begins, in values
  u32 pad[3];
};
static_assert(sizeof(PowerBlock) == 32, "host mirror");

struct Step {
  const TensorMap* maps;  // one a projection
  u64 projections;
  u64 blocks;
  u64 from;         // vectors in: y, or z
  u64 to;           // z, or y
  u64 parts;        // [slot][warp][rows][D_HEAD]
  u64 scales;       // of each vector: y . z and the exponent that was taken out of z
  u64 sigma;
  u32 count;        // of the table
  u32 tiles;        // of a head
  u32 rows;         // of a part
  u32 finish;       // 0: to z; 1: to y
  u32 raw;          // 1: neither gain nor mean
  u32 grid;         // blocks of scale_power, at most one an item
};
static_assert(sizeof(Step) == 88, "host mirror");

constexpr u32 N = D_HEAD, CHUNKS = (N + 15) / 16;  // of 16 channels
// A warp takes `GROUPS` runs of 16 input channels of a tile: independent work to hide latencies with.
constexpr u32 WARPS = N <= 128 ? 8 : 4, GROUPS = N <= 128 ? 2 : 1, THREADS = WARPS * 32, TILE = WARPS * GROUPS * 16;
constexpr u32 BLOCKS = N <= 64 ? 2 : 1;  // of a multiprocessor, where the registers suffice
constexpr u32 BOXES = ALONG_CHANNELS ? (N + 63) / 64 : TILE / 64;
constexpr u32 BOX_BYTES = (ALONG_CHANNELS ? TILE : CHUNKS * 16) * 128, TILE_BYTES = BOXES * BOX_BYTES;
constexpr u32 COPIED = N * TILE * 2;
static_assert(!ALONG_CHANNELS || N % 64 == 0, "whole boxes");
// Terms of the vectors are kept in registers where there is room.
constexpr bool HELD = N <= 128;
constexpr u32 TERM_BYTES = HELD ? 0 : WARPS * CHUNKS * 768;
constexpr u32 FITTING = (221184 / BLOCKS - TERM_BYTES) / TILE_BYTES, STAGES = FITTING < 12 ? FITTING : 12;

extern "C" __constant__ int SHARED_BYTES = 1024 + STAGES * TILE_BYTES + TERM_BYTES;
extern "C" __constant__ int BLOCK_THREADS = THREADS;
extern "C" __constant__ int TILE_INPUTS = TILE;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}
__device__ __forceinline__ float warp_most(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

// Equal runs of `items` for each of the blocks, and the block that has an item.
__device__ __forceinline__ u32 run_start(u32 items, u32 block, u32 grid) { return (u32)((u64)items * block / grid); }
__device__ __forceinline__ u32 block_of(u32 items, u32 item, u32 grid) {
  return (u32)((((u64)item + 1) * grid - 1) / items);
}

// Asks for the tile of `item`, of a head of the table.
__device__ __forceinline__ void bring(const Step& step, const PowerBlock& block, u32 head, u32 item, u32 to, u32 full) {
  const u32 at = (item - head * step.tiles) * TILE;
  ptx::mbarrier_arrive_expect_tx(full, COPIED);
#pragma unroll
  for (u32 b = 0; b < BOXES; b++)
    ptx::tma_load_2d(to + b * BOX_BYTES, step.maps + block.projection, full, ALONG_CHANNELS ? block.head * N + b * 64 : at + b * 64,
                     ALONG_CHANNELS ? at : block.head * N);
}
__device__ __forceinline__ PowerBlock entry(const Step& step, u32 head) {
  const uint4* at = (const uint4*)step.blocks + head * 2;
  const uint4 raw = __ldg(at);
  return {raw.x, raw.y, raw.z, raw.w, __ldg(&at[1].x)};
}

// What one load of weights gives: two right operands for the product over the channels, or over the inputs.
struct Weights {
  u32 r[4];
  template <bool TRANSPOSED> __device__ __forceinline__ void load(u32 address) { ptx::ldmatrix<TRANSPOSED>(r, address); }
  template <bool TRANSPOSED> __device__ __forceinline__ u32 operand(int tile, int half) const {
    return TRANSPOSED ? r[2 * tile + half] : r[tile + 2 * half];
  }
};

struct Norm {
  u64 gain;
  float offset;
  u32 dtype, d_model;
  bool mean;
};
__device__ __forceinline__ Norm norm_of(const Step& step, u32 projection) {
  const Projection& p = ((const Projection*)step.projections)[projection];
  return {step.raw ? 0 : p.gain, p.gain_offset, p.vector_dtype, p.d_model, (p.flags & HAS_MEAN) && !step.raw};
}

// PACKED: up to four vectors, or three and a mean; else up to eight, or seven and a mean.
template <bool PACKED>
__device__ void multiply(const Step& step, u32 tiles, u32 terms, u32 full, u32* released, u32 first, u32 last) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  // Rows of vector g are this lane's; the sum of weights is made in the last.
  constexpr u32 VECTORS = PACKED ? 4 : 8, MEAN = VECTORS - 1;
  const u32 g = (lane >> 2) % VECTORS;
  terms += warp * CHUNKS * 768 + lane * 4;
  // Where this lane reads: rows of channels in a box of 64 inputs, or rows of inputs in boxes of 64 channels.
  u32 place[GROUPS];
#pragma unroll
  for (u32 i = 0; i < GROUPS; i++) {
    const u32 run = warp * GROUPS + i;
    const u32 box = ALONG_CHANNELS ? 0 : run / 4 * BOX_BYTES, row = (ALONG_CHANNELS ? run * 16 : 0) + (lane & 15);
    const u32 chunk = (ALONG_CHANNELS ? 0 : run % 4 * 2) + (lane >> 4);
    place[i] = box + row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  auto address = [&](u32 stage, u32 i, u32 c) {
    const u32 tile = tiles + stage * TILE_BYTES;
    return ALONG_CHANNELS ? tile + (c / 4 * BOX_BYTES + (place[i] ^ (c % 4 * 32))) : tile + place[i] + c * 2048;
  };
  auto gains_of = [&](const Norm& norm, u32 tile, float (&gains)[GROUPS][4]) {
#pragma unroll
    for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const u32 input = tile * TILE + (warp * GROUPS + i) * 16 + t * 2 + j / 2 * 8 + j % 2;
        gains[i][j] = input >= norm.d_model ? 0.f : norm.gain ? load_value(norm.gain, norm.dtype, input) + norm.offset : 1.f;
      }
  };
  Ring<STAGES> ring;
  u32 head = first / step.tiles;
  PowerBlock block = entry(step, head);
  Norm norm = norm_of(step, block.projection);
  float gains[GROUPS][4];
  gains_of(norm, first - head * step.tiles, gains);
  for (u32 item = first; item < last; head++) {
    const u32 end = min(last, (head + 1) * step.tiles);
    // What the next head needs is on its way while this one is worked on.
    const PowerBlock next_block = entry(step, min(head + 1, step.count - 1));
    const Norm next_norm = norm_of(step, next_block.projection);

    mma::Terms<PACKED> held[HELD ? CHUNKS : 1];
    {
      const float* from = (const float*)step.from + block.first + g * N;
#pragma unroll
      for (u32 c = 0; c < CHUNKS; c++) {
        mma::Terms<PACKED>& a = held[HELD ? c : 0];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          const u32 at = c * 16 + half * 8 + t * 2;
          const float2 x = g < block.count && at < N ? __ldcg((const float2*)(from + at)) : make_float2(0.f, 0.f);
          a.set(half, x.x, x.y);
        }
        if (!HELD) a.store(terms + c * 768);
      }
    }
    auto term = [&](u32 c) {
      mma::Terms<PACKED> a = held[HELD ? c : 0];
      if (!HELD) a.reload(terms + c * 768);
      return a;
    };

    float sum[2 * CHUNKS][4];
#pragma unroll
    for (u32 i = 0; i < 2 * CHUNKS; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;

    for (; item < end; item++, ring.next()) {
      // The gains of the next tile are on their way.
      float ahead[GROUPS][4];
      if (item + 1 < end) gains_of(norm, item + 1 - head * step.tiles, ahead);
      else gains_of(next_norm, 0, ahead);
      ptx::mbarrier_wait(full + ring.stage * 8, ring.phase);
      float high[GROUPS][2][4] = {}, low[GROUPS][2][4] = {};
#pragma unroll
      for (u32 c = 0; c < CHUNKS; c++) {
        Weights w[GROUPS];
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) w[i].load<!ALONG_CHANNELS>(address(ring.stage, i, c));
        const mma::Terms<PACKED> a = term(c);
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
          for (u32 n = 0; n < 2; n++) {
            const u32 b0 = w[i].operand<!ALONG_CHANNELS>(n, 0), b1 = w[i].operand<!ALONG_CHANNELS>(n, 1);
            mma::high_terms(high[i][n], a, b0, b1);
            mma::low_terms(low[i][n], a, b0, b1);
          }
      }
      // u of vector g, with the gain on both sides; or the gain alone, which makes s.
      mma::Terms<PACKED> u[GROUPS];
#pragma unroll
      for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
          float x[2];
#pragma unroll
          for (u32 j = 0; j < 2; j++) {
            const float value = mma::rows<PACKED>(high[i][n][j] + low[i][n][j], high[i][n][j + 2]), factor = gains[i][n * 2 + j];
            x[j] = norm.mean && g == MEAN ? factor : value * factor * factor;
            gains[i][n * 2 + j] = ahead[i][n * 2 + j];
          }
          u[i].set(n, x[0], x[1]);
        }
#pragma unroll
      for (u32 c = 0; c < CHUNKS; c++) {
        Weights w[GROUPS];
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) w[i].load<ALONG_CHANNELS>(address(ring.stage, i, c));
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
          for (u32 n = 0; n < 2; n++)
            mma::high_terms(sum[2 * c + n], u[i], w[i].operand<ALONG_CHANNELS>(n, 0), w[i].operand<ALONG_CHANNELS>(n, 1));
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
          for (u32 n = 0; n < 2; n++)
            mma::low_terms(sum[2 * c + n], u[i], w[i].operand<ALONG_CHANNELS>(n, 0), w[i].operand<ALONG_CHANNELS>(n, 1));
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        const u32 before = ptx::atom_inc_shared_acq_rel(ptx::shared_address(released + ring.stage));
        // The counter runs on: a multiple of the warps is a tile that all have read.
        if ((before + 1) % WARPS == 0 && item + STAGES < last) {
          const u32 ahead = item + STAGES, its = ahead / step.tiles;
          bring(step, its == head ? block : its == head + 1 ? next_block : entry(step, its), its, ahead,
                tiles + ring.stage * TILE_BYTES, full + ring.stage * 8);
        }
      }
      __syncwarp();
    }

    // This warp's part of the head.
    const u32 part_row = g < block.count ? g : norm.mean && g == MEAN ? block.count : ~0u;
    float* to = (float*)step.parts + (((size_t)(blockIdx.x + head) * WARPS + warp) * step.rows + part_row) * N + t * 2;
#pragma unroll
    for (u32 i = 0; i < 2 * CHUNKS; i++) {
      const float2 part = make_float2(mma::rows<PACKED>(sum[i][0], sum[i][2]), mma::rows<PACKED>(sum[i][1], sum[i][3]));
      // With PACKED lanes 16 apart have the same.
      if (part_row != ~0u && lane < VECTORS * 4 && i * 8 < N) __stcg((float2*)(to + i * 8), part);
    }
    block = next_block, norm = next_norm;
  }
}

template <bool PACKED> __device__ __forceinline__ void pass(const Step& step) {
  extern __shared__ u8 shared[];
  __shared__ u64 barriers[STAGES];
  __shared__ u32 released[STAGES];
  const u32 tiles = (ptx::shared_address(shared) + 1023) & ~1023u, terms = tiles + STAGES * TILE_BYTES;
  const u32 full = ptx::shared_address(barriers);
  if (threadIdx.x < STAGES) ptx::mbarrier_init(full + threadIdx.x * 8, 1), released[threadIdx.x] = 0;
  ptx::fence_mbarrier_init();
  if (!ALONG_CHANNELS && N % 16) {
    // Channels that the copies never write.
    for (u32 i = threadIdx.x; i < STAGES * BOXES * 64; i += THREADS)
      ptx::st_shared_v4(tiles + i / 64 * BOX_BYTES + N * 128 + i % 64 * 16, 0, 0, 0, 0);
    ptx::fence_proxy_async();
  }
  let_next_start();
  const u32 items = step.count * step.tiles;
  const u32 first = run_start(items, blockIdx.x, gridDim.x), last = run_start(items, blockIdx.x + 1, gridDim.x);
  for (u32 head = first / step.tiles + threadIdx.x; head * step.tiles < last; head += THREADS)
    ptx::fence_tensormap_acquire(step.maps + entry(step, head).projection);
  __syncthreads();
  // The weights do not depend on the launch in front, the vectors do.
  if (threadIdx.x == 0)
    for (u32 i = 0; i < STAGES && first + i < last; i++) {
      const u32 head = (first + i) / step.tiles;
      bring(step, entry(step, head), head, first + i, tiles + i * TILE_BYTES, full + i * 8);
    }
  wait_for_previous();
  multiply<PACKED>(step, tiles, terms, full, released, first, last);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scale_power(const __grid_constant__ Step step) { pass<true>(step); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) scale_power_wide(const __grid_constant__ Step step) { pass<false>(step); }

// Sums the parts of every vector, in order, and finishes it. A block a head, a warp a vector.
extern "C" __global__ void __launch_bounds__(256) scale_power_reduce(const __grid_constant__ Step step) {
  constexpr u32 RUNS = (N + 127) / 128;
  const u32 lane = threadIdx.x & 31, row = threadIdx.x >> 5, head = blockIdx.x;
  const PowerBlock block = entry(step, head);
  let_next_start();
  if (row >= block.count) return;
  const Norm norm = norm_of(step, block.projection);
  const u32 items = step.count * step.tiles, vector = block.vector + row, at = block.first + row * N;
  const u32 first = block_of(items, head * step.tiles, step.grid), last = block_of(items, (head + 1) * step.tiles - 1, step.grid);
  const u32 part = step.rows * N, count = (last - first + 1) * WARPS;
  const float* parts = (const float*)step.parts + (size_t)(first + head) * WARPS * part;
  wait_for_previous();
  auto total = [&](u32 row, float4 (&sum)[RUNS]) {
#pragma unroll
    for (u32 j = 0; j < RUNS; j++) {
      sum[j] = make_float4(0.f, 0.f, 0.f, 0.f);
      const u32 c = j * 128 + lane * 4;
      if (c >= N) continue;
#pragma unroll 8
      for (u32 i = 0; i < count; i++) {
        const float4 x = __ldcg((const float4*)(parts + (size_t)i * part + row * N + c));
        sum[j].x += x.x, sum[j].y += x.y, sum[j].z += x.z, sum[j].w += x.w;
      }
    }
  };
  auto dot = [&](const float4 (&a)[RUNS], const float4 (&b)[RUNS]) {
    float sum = 0.f;
#pragma unroll
    for (u32 j = 0; j < RUNS; j++) sum += a[j].x * b[j].x + a[j].y * b[j].y + a[j].z * b[j].z + a[j].w * b[j].w;
    return warp_sum(sum);
  };
  float4 x[RUNS], y[RUNS];
#pragma unroll
  for (u32 j = 0; j < RUNS; j++) {
    const u32 c = j * 128 + lane * 4;
    x[j] = c < N ? __ldcg((const float4*)((const float*)step.from + at + c)) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  total(row, y);
  if (norm.mean) {
    float4 sums[RUNS];
    total(block.count, sums);
    const float factor = dot(sums, x) / (float)norm.d_model;
#pragma unroll
    for (u32 j = 0; j < RUNS; j++)
      y[j].x -= factor * sums[j].x, y[j].y -= factor * sums[j].y, y[j].z -= factor * sums[j].z, y[j].w -= factor * sums[j].w;
  }
  float most = 0.f;
#pragma unroll
  for (u32 j = 0; j < RUNS; j++)
    most = fmaxf(fmaxf(most, fmaxf(fabsf(y[j].x), fabsf(y[j].y))), fmaxf(fabsf(y[j].z), fabsf(y[j].w)));
  most = warp_most(most);
  // A power of two out of every result keeps products of tiny and of huge weights in f32.
  const float infinite = __uint_as_float(0x7f800000u);
  const int exponent = most > 0.f && most < infinite ? ilogbf(most) : 0;
#pragma unroll
  for (u32 j = 0; j < RUNS; j++) {
    y[j].x = scalbnf(y[j].x, -exponent), y[j].y = scalbnf(y[j].y, -exponent);
    y[j].z = scalbnf(y[j].z, -exponent), y[j].w = scalbnf(y[j].w, -exponent);
  }
  const float along = dot(x, y);
  float2* scale = (float2*)step.scales + vector;
  bool keep = true;
  float factor = 1.f;
  if (!step.finish) {
    if (lane == 0) *scale = make_float2(along, (float)exponent);
  } else {
    const float2 before = __ldcg(scale);
    const float length = sqrtf(dot(y, y));
    keep = length > 0.f && length < infinite;
    factor = 1.f / length;
    if (lane == 0) {
      // (2^e z . 2^f y') / (y . 2^e z). Rounding may leave a product that is zero below it; what is not a number stays so.
      const bool none = before.x <= 0.f || along <= 0.f;
      const double square = (double)along / (double)before.x;
      ((float*)step.sigma)[vector] = none ? 0.f : (float)sqrt(scalbn(square, exponent + (int)before.y));
    }
  }
#pragma unroll
  for (u32 j = 0; j < RUNS; j++) {
    const u32 c = j * 128 + lane * 4;
    if (c < N && keep)
      *(float4*)((float*)step.to + at + c) =
          make_float4(y[j].x * factor, y[j].y * factor, y[j].z * factor, y[j].w * factor);
  }
}
