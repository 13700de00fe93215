// The Gram kernels for heads of up to 128 channels: their tiles, the ring that brings these, and the store of accumulators.
//
// The model dimension of all tiles of 128 channels, laid end to end, is cut into equal shares, one per block (stream-K); a share
// is a list of segments: tile, range. A tile is one head of more than 64 channels, or two smaller ones. It comes 128 input
// channels at a time: four boxes of 64 channels by 64 inputs in 128-byte swizzle, inputs 0 to 63 first, and the gains of
// these inputs. Macros D_HEAD, WEIGHTS (type), ALONG_CHANNELS (1: stored [in, out]), SUMS (1: for a mean or a shift, sums of
// g w, beta w and |beta w| too).
#pragma once
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scale/ring.cuh"
#include "scale/segments.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
#ifndef WEIGHTS
#define WEIGHTS 0
#endif
#ifndef ALONG_CHANNELS
#define ALONG_CHANNELS 0
#endif
#ifndef SUMS
#define SUMS 0
#endif

constexpr u32 N = D_HEAD;
constexpr bool F16 = WEIGHTS == DTYPE_F16;
constexpr bool ONE = N > 64;                                        // one head per tile
constexpr u32 ROWS[2] = {N < 64 ? N : 64, ONE ? N - 64 : N};        // channels in each box
constexpr int TILE = 128;                                           // input channels a tile, in two halves
constexpr int BOX_BYTES = 64 * 64 * 2, HALF_BYTES = 2 * BOX_BYTES, TILE_BYTES = 2 * HALF_BYTES;
constexpr int COPIED = ALONG_CHANNELS ? TILE_BYTES : (ROWS[0] + ROWS[1]) * TILE * 2;
constexpr int GAIN_BYTES = TILE * (SUMS ? 20 : 4);                  // gains.cu
constexpr int STAGES = 6;

// Shared memory: boxes, gains, and three barriers a stage; what a kernel keeps beside them follows.
struct Stages {
  u32 base;
  __device__ __forceinline__ Stages() {
    extern __shared__ u8 shared[];
    base = (ptx::shared_address(shared) + 1023) & ~1023u;
  }
  static constexpr u32 GAINS_AT = STAGES * TILE_BYTES, BARRIERS_AT = GAINS_AT + STAGES * GAIN_BYTES, END = BARRIERS_AT + STAGES * 24;
  __device__ __forceinline__ u32 boxes(u32 stage) const { return base + stage * TILE_BYTES; }
  __device__ __forceinline__ u32 gains(u32 stage) const { return base + GAINS_AT + stage * GAIN_BYTES; }
  __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS_AT + stage * 8; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return base + BARRIERS_AT + (STAGES + stage) * 8; }
  __device__ __forceinline__ u32 ready(u32 stage) const { return base + BARRIERS_AT + (2 * STAGES + stage) * 8; }
  __device__ __forceinline__ u32 end() const { return base + END; }
};

// By the block's first thread. `readers`: warps that give a stage back; `writers`: those that make it ready for products.
__device__ __forceinline__ void init_stages(u32 readers, u32 writers) {
  const Stages at;
  for (int s = 0; s < STAGES; s++) {
    ptx::mbarrier_init(at.full(s), 1);
    ptx::mbarrier_init(at.empty(s), readers * ptx::kWarpArrivals);
    ptx::mbarrier_init(at.ready(s), writers * ptx::kWarpArrivals);
  }
  ptx::fence_mbarrier_init();
}

// The copying thread: every tile of the block's share.
__device__ void load_tiles(const Segment* segments, u32 begin, u32 end, const TensorMap* maps, const u8* gains, u32 tiles) {
  const Stages at;
  Ring<STAGES> ring;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const TensorMap* map = maps + segment.projection * 2;
    ptx::fence_tensormap_acquire(map);
    if (ROWS[1] != ROWS[0]) ptx::fence_tensormap_acquire(map + 1);
    const u8* gain = gains + (size_t)segment.projection * tiles * GAIN_BYTES;
    for (u32 tile = segment.first; tile < segment.last; tile++, ring.next()) {
      const u32 full = at.full(ring.stage), to = at.boxes(ring.stage);
      ptx::mbarrier_wait(at.empty(ring.stage), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, COPIED + GAIN_BYTES);
      ptx::bulk_load(at.gains(ring.stage), gain + tile * GAIN_BYTES, GAIN_BYTES, full);
#pragma unroll
      for (u32 b = 0; b < 4; b++) {
        const u32 row = segment.first_row + (b % 2 ? ROWS[0] : 0), k = tile * TILE + b / 2 * 64;
        ptx::tma_load_2d(to + b * BOX_BYTES, map + (b % 2 && ROWS[1] != ROWS[0]), full, ALONG_CHANNELS ? row : k,
                         ALONG_CHANNELS ? k : row);
      }
    }
  }
}

// One warpgroup's 64 rows to consecutive 64 x 64 blocks.
template <int COUNT> __device__ __forceinline__ void store_blocks(float* out, const float (&sum)[COUNT], float factor) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  out += (warp * 16 + lane / 4) * 64 + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COUNT / 4; j++) {
    float* to = out + j / 8 * 4096 + j % 8 * 8;
    *(float2*)to = make_float2(sum[4 * j] * factor, sum[4 * j + 1] * factor);
    *(float2*)(to + 8 * 64) = make_float2(sum[4 * j + 2] * factor, sum[4 * j + 3] * factor);
  }
}
