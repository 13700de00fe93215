// Channel statistics (norms_generic.cu) of 16-bit weights whose rows start at 16 bytes, by the copy engine: a pure read of the
// weights. Hopper.
//
// A block takes one head (macro D_HEAD), 64 input channels at a time, through its own ring: small blocks, so that some load
// while others start or end. A warp sums up 16 channels, a lane two pairs of them over eight of the 64 inputs; lanes of one eight
// share their channels. Sums in f32, every few tiles into a second f32, in a fixed order: same input, same bits.
//
// SPLIT above 1, for few heads: the blocks of a cluster share a head's inputs and keep their first sums in shared memory. They then
// share the warps' channels, and add the first sums of all of them in the order in which one block would: same bits.
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "scale/ring.cuh"
#include "scale/types.cuh"

#ifndef D_HEAD
#define D_HEAD 64
#endif
#ifndef ALONG_CHANNELS  // 1: stored [in, out]
#define ALONG_CHANNELS 0
#endif
#ifndef SUMS  // 1: for a mean or a shift, sums of g w, beta w and |beta w| too
#define SUMS 1
#endif
#ifndef TURNS  // 1: with the products of rotation pairs
#define TURNS 1
#endif
#ifndef F16  // 1: weights in f16, 0: in bf16
#define F16 0
#endif
#ifndef VECTORS  // type of gain, shift and bias
#define VECTORS 2
#endif
#ifndef BESIDE  // 1: one block per multiprocessor, with half of its shared memory; the rest is for kernels that run beside it
#define BESIDE 0
#endif
#ifndef SPLIT  // blocks that share a head: 1, 2, 4 or 8
#define SPLIT 1
#endif
#ifndef AT_MOST  // blocks a multiprocessor; 0: as many as fit
#define AT_MOST 0
#endif

constexpr u32 N = D_HEAD, WARPS = (N + 15) / 16, THREADS = WARPS * 32;
constexpr u32 TILE = 64;                                   // input channels
constexpr u32 BOXES = ALONG_CHANNELS ? (N + 63) / 64 : 1;  // of 64 channels where these are contiguous
constexpr u32 TILE_BYTES = ALONG_CHANNELS ? BOXES * 64 * 128 : (N * 128 + 1023) / 1024 * 1024;
constexpr u32 COPIED = ALONG_CHANNELS ? TILE_BYTES : N * 128;
constexpr u32 VECTOR_SIZE = VECTORS == DTYPE_F32 ? 4 : 2, VECTOR_BYTES = TILE * VECTOR_SIZE;
constexpr u32 QUANTITIES = SUMS ? 4 : 1, VALUES = 4 * QUANTITIES + 2 * TURNS;
// As many blocks a multiprocessor as registers and three stages of each allow, and as many stages as there is shared memory for.
constexpr u32 SHARED = 227 * 1024, APART = 2304, STAGE = TILE_BYTES + 2 * VECTOR_BYTES + 16;
constexpr u32 FITTING = 65536 / (THREADS * (SUMS ? 82 : 64)), HELD = SHARED / (3 * STAGE + APART);
constexpr u32 FEWER = FITTING < HELD ? FITTING : HELD, FIT = BESIDE || FEWER < 1 ? 1 : FEWER > 16 ? 16 : FEWER;
constexpr u32 LIMIT = SPLIT > 1 ? 3 : AT_MOST, BLOCKS = LIMIT && LIMIT < FIT ? LIMIT : FIT;
constexpr u32 FILLED = (SHARED / (BESIDE ? 2 : BLOCKS) - APART) / STAGE, RING = FILLED < 6 ? FILLED : 6;
constexpr u32 STAGES = SPLIT > 1 ? 3 : RING;  // first sums take the rest
static_assert(STAGES >= 3 && !(SPLIT > 1 && BESIDE), "a ring");

struct Shared {
  u8 tiles[STAGES][TILE_BYTES];
  u8 vectors[STAGES][2][VECTOR_BYTES];  // gains, shifts
  u64 full[STAGES], empty[STAGES];
};

extern "C" __constant__ int SHARED_BYTES = BESIDE ? SHARED / 2 + 1024 : sizeof(Shared) + 1024;
extern "C" __constant__ int BLOCK_THREADS = THREADS;
extern "C" __constant__ int BLOCKS_THAT_FIT = FIT;                     // a multiprocessor
extern "C" __constant__ int FIRST_SUM_BYTES = VALUES * THREADS * 4;    // of one first sum, with SPLIT

// Eight values of a vector.
__device__ __forceinline__ void vector8(const u8* from, float (&v)[8]) {
  if (VECTORS == DTYPE_F32) {
    const float4 a = *(const float4*)from, b = *(const float4*)(from + 16);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    Vector8<VECTORS == DTYPE_F32 ? DTYPE_BF16 : VECTORS> values;
    values.raw = *(const uint4*)from, values.get(v);
  }
}
__device__ __forceinline__ float vector1(const u8* from) {
  return VECTORS == DTYPE_F32 ? *(const float*)from : VECTORS == DTYPE_F16 ? ptx::f32_from_f16(*(const u16*)from) : __uint_as_float((u32)*(const u16*)from << 16);
}
__device__ __forceinline__ float value_of(u32 word, u32 upper) {
  return F16 ? ptx::f32_from_f16((u16)(word >> upper * 16)) : upper ? bf16_high(word) : bf16_low(word);
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCKS)
    scale_norms(const Projection* projections, const HeadPlace* heads, const TensorMap* maps, u32 d, ChannelStats* stats,
                u32* status) {  // null: not cleared
  extern __shared__ u8 room[];
  // The swizzle goes by addresses.
  Shared& shared = *(Shared*)(room + (1024 - ptx::shared_address(room) % 1024) % 1024);
  const u32 rank = SPLIT > 1 ? ptx::cluster_rank() : 0;
  const HeadPlace head = heads[blockIdx.x / SPLIT];
  if (!BESIDE) ptx::griddepcontrol_wait();
  const Projection& p = projections[head.projection];
  const u64 gain = p.gain, shift = SUMS ? p.shift : 0;
  const float offset = p.gain_offset;
  const u32 tiles = (d + TILE - 1) / TILE, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  // Tiles of a first sum, a power of two: 8 of its terms a tile and then as many terms as there are sums is how deep roundings go,
  // and least where both are alike.
  auto depth_of_sum = [&]() {
    u32 deep = 1;
    while (16 * deep * deep < tiles) deep *= 2;
    return deep;
  };
  // The first of the first sums of block r of a cluster, and this block's tiles.
  auto first_group = [&](u32 r) { return (tiles + depth_of_sum() - 1) / depth_of_sum() * r / SPLIT; };
  const u32 begin = SPLIT > 1 ? first_group(rank) * depth_of_sum() : 0;
  const u32 end = SPLIT > 1 ? min(tiles, first_group(rank + 1) * depth_of_sum()) : tiles;

  auto load = [&](u32 tile) {
    const u32 stage = (tile - begin) % STAGES, barrier = full + stage * 8, k = tile * TILE, vector = min(TILE, d - k) * VECTOR_SIZE;
    auto expect = [&]() { ptx::mbarrier_arrive_expect_tx(barrier, COPIED + (gain ? vector : 0) + (shift ? vector : 0)); };
    if (BESIDE) expect();
#pragma unroll
    for (u32 b = 0; b < BOXES; b++)
      ptx::tma_load_2d(ptx::shared_address(shared.tiles[stage]) + b * 8192, maps + head.projection, barrier, ALONG_CHANNELS ? head.first_row + b * 64 : k, ALONG_CHANNELS ? k : head.first_row);
    if (!BESIDE) expect();  // the weights do not wait for the addresses of the vectors
    if (gain) ptx::bulk_load(ptx::shared_address(shared.vectors[stage][0]), (const u8*)gain + k * VECTOR_SIZE, vector, barrier);
    if (shift) ptx::bulk_load(ptx::shared_address(shared.vectors[stage][1]), (const u8*)shift + k * VECTOR_SIZE, vector, barrier);
  };
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) ptx::mbarrier_init(full + s * 8, 1), ptx::mbarrier_init(empty + s * 8, WARPS * ARRIVALS);
    ptx::fence_mbarrier_init();
    ptx::fence_tensormap_acquire(maps + head.projection);
    if (!BESIDE && status && blockIdx.x == 0) *status = 0;
    for (u32 tile = begin; tile < min(begin + STAGES, end); tile++) load(tile);
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  // Channels of the lane's two pairs.
  const u32 eight = lane % 8, own = warp * 8 + lane / 8 * 2;
  u32 channels[4];
#pragma unroll
  for (u32 j = 0; j < 2; j++) pair_channels(min(own, N / 2 - 2) + j, p.rotary, p.interleaved, channels[2 * j], channels[2 * j + 1]);

  float sums[VALUES] = {}, totals[VALUES] = {};
  auto add = [&](u32 j, float g, float s, float a, float b) {
    const float y = g * a, z = g * b;
    sums[2 * j] += y * y, sums[2 * j + 1] += z * z;
    if (SUMS) {
      const float u = s * a, v = s * b;
      sums[4 % VALUES + 2 * j] += y, sums[4 % VALUES + 2 * j + 1] += z;
      sums[8 % VALUES + 2 * j] += u, sums[8 % VALUES + 2 * j + 1] += v;
      sums[12 % VALUES + 2 * j] += fabsf(u), sums[12 % VALUES + 2 * j + 1] += fabsf(v);
    }
    if (TURNS) sums[4 * QUANTITIES + j] += y * z;
  };
  const u32 deep = depth_of_sum();
  // First sums, behind the ring; those of this thread.
  const u32 kept = ptx::shared_address(&shared + 1) + threadIdx.x * 4;
  u32 group = 0;
  Ring<STAGES> ring;
  for (u32 tile = begin; tile < end; tile++, ring.next()) {
    const u32 stage = ring.stage;
    ptx::mbarrier_wait(full + stage * 8, ring.phase);
    const u8* weights = shared.tiles[stage];
    // Inputs: eight neighbours; or every eighth.
    if (ALONG_CHANNELS || tile * TILE + eight * 8 < d) {
      float g[8], s[8];
      if (ALONG_CHANNELS) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
          const bool in = tile * TILE + i * 8 + eight < d;
          g[i] = !in ? 0.f : gain ? vector1(shared.vectors[stage][0] + (i * 8 + eight) * VECTOR_SIZE) + offset : 1.f;
          s[i] = in && shift ? vector1(shared.vectors[stage][1] + (i * 8 + eight) * VECTOR_SIZE) : 0.f;
        }
      } else {
        if (gain) {
          vector8(shared.vectors[stage][0] + eight * 8 * VECTOR_SIZE, g);
#pragma unroll
          for (u32 i = 0; i < 8; i++) g[i] += offset;
        } else {
#pragma unroll
          for (u32 i = 0; i < 8; i++) g[i] = 1.f;
        }
        if (shift) {
          vector8(shared.vectors[stage][1] + eight * 8 * VECTOR_SIZE, s);
        } else {
#pragma unroll
          for (u32 i = 0; i < 8; i++) s[i] = 0.f;
        }
      }
      if (ALONG_CHANNELS) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
          // A row is one input's 64 channels.
          const u8* row = weights + (i * 8 + eight) * 128;
          auto at = [&](u32 c) { return row + c / 64 * 8192 + ((c % 64 / 8 ^ eight) << 4) + c % 8 * 2; };
          float v[4];
          if (TURNS) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) v[c] = value_of(*(const u16*)at(channels[c]), 0);
          } else {
            const uint2 four = *(const uint2*)at(channels[0]);
#pragma unroll
            for (u32 c = 0; c < 4; c++) v[c] = value_of(c / 2 ? four.y : four.x, c % 2);
          }
          add(0, g[i], s[i], v[0], v[1]), add(1, g[i], s[i], v[2], v[3]);
        }
      } else {
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
          auto row = [&](u32 c) { return *(const uint4*)(weights + c * 128 + ((eight ^ c % 8) << 4)); };
          const uint4 first = row(channels[2 * j]), second = row(channels[2 * j + 1]);
          const u32 a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
          for (u32 i = 0; i < 8; i++) add(j, g[i], s[i], value_of(a[i / 2], i % 2), value_of(b[i / 2], i % 2));
        }
      }
    }
    release(empty + stage * 8, lane);
    // The tile before this one has been read by every warp, or will be soon.
    const u32 done = tile - begin;
    if (threadIdx.x == 0 && done > 0 && tile - 1 + STAGES < end) {
      ptx::mbarrier_wait(empty + (done - 1) % STAGES * 8, (done - 1) / STAGES & 1);
      load(tile - 1 + STAGES);
    }
    if (SPLIT > 1) {
      if (((tile + 1) & (deep - 1)) == 0 || tile + 1 == end)
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) ptx::st_shared_f32(kept + group++ * THREADS * 4, sums[i]), sums[i] = 0.f;
    } else if (((tile + 1) & (deep - 1)) == 0)
#pragma unroll
      for (u32 i = 0; i < VALUES; i++) totals[i] += sums[i], sums[i] = 0.f;
  }
  if (SPLIT > 1) {
    ptx::cluster_sync();
    if (warp % SPLIT == rank)
#pragma unroll 1
      for (u32 r = 0; r < SPLIT; r++) {
        const u32 there = ptx::map_shared(kept, r), count = first_group(r + 1) - first_group(r);
#pragma unroll 2
        for (u32 g = 0; g < count; g++)
#pragma unroll
          for (u32 i = 0; i < VALUES; i++) totals[i] += ptx::ld_shared_cluster_f32(there + (g * VALUES + i) * THREADS * 4);
      }
    // No block may end while others read from it.
    ptx::cluster_sync();
    if (warp % SPLIT != rank) return;
  }
#pragma unroll
  for (u32 i = 0; i < VALUES; i++) {
    if (SPLIT == 1) totals[i] += sums[i];
#pragma unroll
    for (u32 step = 4; step; step >>= 1) totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], step);
  }
  // Lanes 0 to 3 of every eight finish one channel each.
  if (eight >= 4 || own >= N / 2) return;
  auto mine = [&](u32 first, u32 c) {
    const float low = c & 1 ? totals[first % VALUES + 1] : totals[first % VALUES], high = c & 1 ? totals[first % VALUES + 3] : totals[first % VALUES + 2];
    return c & 2 ? high : low;
  };
  const u32 channel = head.first_row + (eight & 2 ? eight & 1 ? channels[3] : channels[2] : eight & 1 ? channels[1] : channels[0]);
  const float raw2 = mine(0, eight), sum = SUMS ? mine(4, eight) : 0.f;
  double norm2 = raw2, pair = TURNS ? (eight & 2 ? totals[VALUES - 1] : totals[VALUES - 2]) : 0.f;
  // What f32 may have lost: the terms of a first sum, the first sums, three exchanges, two products and the gain's offset. A pair's
  // product and the constants err by as much of sqrt(raw2 raw2') and of the sum of absolute values, which the 2^-18 of
  // `scale_operand_descales` covers.
  const float depth = (8 * deep + (tiles + deep - 1) / deep + 6) * 0x1p-24f;
  float lost = depth * raw2;
  if (p.flags & HAS_MEAN) {
    // |sum| is at most (d raw2)^1/2, and errs by as much of that.
    const double inverse = 1.0 / d;
    norm2 -= (double)sum * sum * inverse, lost += 2.f * depth * fabsf(sum) * sqrtf(raw2 * (float)inverse);
    pair -= (double)sum * (SUMS ? mine(4, eight ^ 1) : 0.f) * inverse;
    norm2 = norm2 < 0.0 ? 0.0 : norm2;
  }
  const float bias = p.bias ? load_value(p.bias, VECTORS, channel) : 0.f;
  float4* out = (float4*)(stats + p.stat_row + channel);
  out[0] = make_float4((float)(norm2 + lost), raw2 + lost, (float)pair, (SUMS ? mine(8, eight) : 0.f) + bias);
  out[1] = make_float4((SUMS ? mine(12, eight) : 0.f) + fabsf(bias), sum, 0.f, 0.f);
}
