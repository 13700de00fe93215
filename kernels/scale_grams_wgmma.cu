// Gram matrices G = W^T diag(g^2) W of every Q and K head of a model, BF16 weights, d_head 64 or 128 (macro D_HEAD),
// one read of the weights. Hopper.
//
// The model dimension of all heads, laid end to end, is cut into equal shares, one a block (a share is a list of
// segments: head, range). A warp brings tiles of 64 input channels through the copy engine; three warpgroups multiply, each
// one 64 x 64 block: for 128 the blocks (0,0) (0,1) (1,1) of one head, for 64 one head each.
//
// The gain is not rounded to bf16: the left operand, in registers, is g^2 w split into two bf16, the right one is w as
// stored. g^2 itself is a sum of two bf16. Relative error of a product: 2^-18 twice (once where g is bf16).
// Accumulators are flushed into a second f32 sum every 256 input channels. Rounding: the sum of all is at most
// (256 + d/256 + 128 + 2) 2^-24 tr G in norm.
#include "scale_ptx.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
#ifndef ALONG_CHANNELS  // 1: stored [in, out]
#define ALONG_CHANNELS 0
#endif

constexpr int BOXES = D_HEAD == 128 ? 2 : 3;  // boxes of 64 channels a tile
constexpr int TILE = 64;                      // input channels a tile
constexpr int BOX_BYTES = 64 * TILE * 2;
constexpr int GAIN_BYTES = TILE * 4;
constexpr int STAGES = D_HEAD == 128 ? 12 : 8;
constexpr int FLUSH = 4;  // tiles
constexpr int WARPGROUPS = 3;
// The host's number: room for alignment, boxes, gains, barriers.
static_assert(1024 + STAGES * (BOXES * BOX_BYTES + GAIN_BYTES + 16) <= (D_HEAD == 128 ? 200896 : 199808), "shared memory");

struct Segment {
  u32 projection;
  u32 first_row;    // channel
  u32 first, last;  // tiles
  u32 slot;         // of the first head's partial Gram
  u32 heads;        // heads of 64 in this segment's tile (1 for 128)
};
static_assert(sizeof(Segment) == 24, "host mirror");

struct Pipeline {
  u32 boxes, gains, full, empty;
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

__device__ void load_tiles(Pipeline pipe, const Segment* segments, u32 begin, u32 end, const Projection* projections,
                           u64 maps, const uint2* squares, u32 padded) {
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const Projection& p = projections[segment.projection];
    const u64 map = maps + segment.projection * 128ull;
    const uint2* square = squares + (size_t)p.gain_row * (padded / 2);
    for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
      const u32 full = pipe.full + pipe.stage * 8, to = pipe.boxes + pipe.stage * BOXES * BOX_BYTES;
      // Wait until the three warpgroups have left the stage.
      ptx::barrier_wait(pipe.empty + pipe.stage * 8, pipe.phase ^ 1);
      ptx::barrier_expect(full, BOXES * BOX_BYTES + GAIN_BYTES);
      ptx::copy_bytes(pipe.gains + pipe.stage * GAIN_BYTES, square + tile * (TILE / 2), GAIN_BYTES, full);
#pragma unroll
      for (int b = 0; b < BOXES; b++) {
        const u32 row = segment.first_row + 64 * b, k = tile * TILE;
        ptx::copy_tile(to + b * BOX_BYTES, map, ALONG_CHANNELS ? row : k, ALONG_CHANNELS ? k : row, full);
      }
    }
  }
}

// One lane's part of a 64 x 16 fragment of w as stored, and of g^2 = high + low beside it.
struct Fragment {
  u32 w[4];
  uint2 near, far;  // channels k, k + 1 and k + 8, k + 9: (high, low)
  __device__ __forceinline__ void load(u32 address, u32 gains) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(near.x), "=r"(near.y) : "r"(gains));
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(far.x), "=r"(far.y) : "r"(gains + 32));
    ptx::load_fragment<ALONG_CHANNELS>(w, address);
  }
  // g^2 w as two bf16. high = round(w gh) and w gh - high fits bf16 exactly; w gl is added with one rounding.
  __device__ __forceinline__ void split(u32 (&high)[4], u32 (&low)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint2 g = i < 2 ? near : far;
      high[i] = ptx::mul_bf16x2(w[i], g.x);
      low[i] = ptx::fma_bf16x2(w[i], g.y, ptx::fma_bf16x2(w[i], g.x, high[i] ^ 0x80008000u));
    }
  }
};

// One warpgroup: its 64 x 64 block of every segment.
__device__ __forceinline__ void multiply(Pipeline pipe, const Segment* segments, u32 begin, u32 end, float* partials) {
  const u32 group = threadIdx.x / 128, lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const u32 left = D_HEAD == 128 ? group / 2 : group, right = D_HEAD == 128 ? (group + 1) / 2 : group;
  // ldmatrix: where this lane's 16 bytes of a 16 x 16 block lie, for each of the four steps of a tile.
  u32 offset[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 row, chunk;
    if (ALONG_CHANNELS) {
      row = k * 16 + (lane & 7) + (lane >> 4) * 8, chunk = warp * 2 + (lane >> 3 & 1);
    } else {
      row = warp * 16 + (lane & 15), chunk = k * 2 + (lane >> 4);
    }
    offset[k] = left * BOX_BYTES + row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  const u32 gain_offset = (lane & 3) * 8;

  float acc[32], sum[32];
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
#pragma unroll
    for (int i = 0; i < 32; i++) acc[i] = 0.f, sum[i] = 0.f;
    for (u32 tile = segment.first; tile < segment.last; tile += FLUSH) {
      const u32 count = min((u32)FLUSH, segment.last - tile);
      u32 previous = pipe.empty;
      for (u32 t = 0; t < count; t++) {
        ptx::barrier_wait(pipe.full + pipe.stage * 8, pipe.phase);
        const u32 boxes = pipe.boxes + pipe.stage * BOXES * BOX_BYTES;
        const u32 gains = pipe.gains + pipe.stage * GAIN_BYTES + gain_offset;
        const u64 b = ptx::swizzled_operand(boxes + right * BOX_BYTES);
        u32 high[4][4], low[4][4];
        Fragment raw[2];
        raw[0].load(boxes + offset[0], gains);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if (k < 3) raw[(k + 1) & 1].load(boxes + offset[k + 1], gains + (k + 1) * 64);
          // The step four back has to be done with its registers; then the stage before this one is free.
          ptx::wgmma_wait<3>();
          if (k == 3) ptx::barrier_arrive_if(previous, lane == 0 && t > 0);
          raw[k & 1].split(high[k], low[k]);
          ptx::keep(acc), ptx::keep(high[k]), ptx::keep(low[k]);
          ptx::wgmma_fence();
          const u64 step = b + (ALONG_CHANNELS ? k * 16 * 128 / 16 : k * 32 / 16);
          ptx::wgmma_64x64x16<ALONG_CHANNELS>(acc, high[k], step, t + k > 0);
          ptx::wgmma_64x64x16<ALONG_CHANNELS>(acc, low[k], step, 1);
          ptx::wgmma_commit();
        }
        previous = pipe.empty + pipe.stage * 8;
        pipe.next();
      }
      // Flush into the second sum.
      ptx::wgmma_wait<0>();
      ptx::keep(acc);
      ptx::barrier_arrive_if(previous, lane == 0);
#pragma unroll
      for (int i = 0; i < 32; i++) sum[i] += acc[i];
    }
    // Store this share's part.
    if (D_HEAD == 128 || group < segment.heads) {
      const u32 block = D_HEAD == 128 ? segment.slot * 3 + group : segment.slot + group;
      float* out = partials + (size_t)block * 4096 + (warp * 16 + lane / 4) * 64 + (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        *(float2*)(out + j * 8) = make_float2(sum[4 * j], sum[4 * j + 1]);
        *(float2*)(out + 8 * 64 + j * 8) = make_float2(sum[4 * j + 2], sum[4 * j + 3]);
      }
    }
  }
}

// D_HEAD 64 adds three heads a tile, of which the last tile of a projection fills fewer.
extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1)
    scale_grams_wgmma(const Segment* segments, const u32* shares, const Projection* projections, u64 maps,
                      const uint2* squares, u32 padded, float* partials) {
  extern __shared__ u8 shared[];
  const u32 base = (ptx::shared_address(shared) + 1023) & ~1023u;
  Pipeline pipe;
  pipe.boxes = base;
  pipe.gains = base + STAGES * BOXES * BOX_BYTES;
  pipe.full = pipe.gains + STAGES * GAIN_BYTES;
  pipe.empty = pipe.full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      ptx::barrier_init(pipe.full + s * 8, 1);
      ptx::barrier_init(pipe.empty + s * 8, WARPGROUPS * 4);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const u32 begin = shares[blockIdx.x], end = shares[blockIdx.x + 1];
  const u32 group = threadIdx.x / 128;
  if (group == WARPGROUPS) {
    ptx::give_registers<56>();
    if (threadIdx.x % 128 == 0) load_tiles(pipe, segments, begin, end, projections, maps, squares, padded);
  } else {
    ptx::take_registers<152>();
    multiply(pipe, segments, begin, end, partials);
  }
}
