// Gram matrices G = W^T diag(g^2) W of every Q and K head of a model and, on the way, the norms of every channel: one read of
// the weights. 16-bit weights stored [out, in], d_head from 72 to 128 (macro D_HEAD), norms with neither mean nor shift;
// scale_grams_pieces.cu does what this one does not. Hopper.
//
// The model dimension of all tiles of 128 channels, laid end to end, is cut into equal shares, one a block (a share is a
// list of segments: tile, range). A warp brings 128 input channels at a time through the copy engine; four warpgroups turn
// them in place into y = f16(s g w), s the projection's power of two, and sum up norms and pair products; two warpgroups
// multiply: the blocks (0,0) and (0,1), and (1,1).
//
// One product with y on both sides instead of two with a split one. Rounding changes a value of exponent e by at most
// 2^(e - 11), or 2^-25 below the normal ones, which is summed up for every channel: delta_i >= ||y_i - exact||, so that
// sigma(exact) <= sigma(y) + (sum delta_i^2)^1/2. Accumulators are flushed into a second f32 sum every 256 input channels:
// the accumulation's error is at most (256 + d/256) 2^-24 tr G in norm.
#include "scale_ptx.cuh"
#include "scale_segments.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
#ifndef F16  // 1: weights in f16, 0: in bf16
#define F16 0
#endif

constexpr u32 N = D_HEAD;
constexpr u32 ROWS[2] = {64, N - 64};         // channels in each box
static_assert(N > 64 && N <= 128, "one head a tile");
constexpr int TILE = 128;                    // input channels a tile, in two halves
constexpr int BOX_BYTES = 64 * 64 * 2, HALF_BYTES = 2 * BOX_BYTES, TILE_BYTES = 2 * HALF_BYTES;
constexpr int COPIED = N * TILE * 2;
constexpr int GAIN_BYTES = TILE * 4;
constexpr int STAGES = 6;
constexpr int FLUSH = 2;  // tiles
constexpr int MEETING_BYTES = 8 * 5 * 64 * 4;  // sums of the converting warps
constexpr u32 MULTIPLIERS = 256, CONVERTERS = 512, THREADS = MULTIPLIERS + CONVERTERS + 128;
// The host's number: room for alignment, boxes, gains, barriers and sums.
static_assert(1024 + STAGES * (TILE_BYTES + GAIN_BYTES + 24) + MEETING_BYTES <= 211456, "shared memory");

struct Pipeline {
  u32 boxes, gains, full, ready, empty, meeting;
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

__device__ void load_tiles(Pipeline pipe, const Segment* segments, u32 begin, u32 end, u64 maps, const float* gains, u32 tiles) {
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const u64 map = maps + segment.projection * 256ull;
    const float* gain = gains + (size_t)segment.projection * tiles * TILE;
    for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
      const u32 full = pipe.full + pipe.stage * 8, to = pipe.boxes + pipe.stage * TILE_BYTES;
      ptx::barrier_wait(pipe.empty + pipe.stage * 8, pipe.phase ^ 1);
      ptx::barrier_expect(full, COPIED + GAIN_BYTES);
      ptx::copy_bytes(pipe.gains + pipe.stage * GAIN_BYTES, gain + tile * TILE, GAIN_BYTES, full);
#pragma unroll
      for (u32 b = 0; b < 4; b++) {
        const u32 row = segment.first_row + (b % 2 ? ROWS[0] : 0), k = tile * TILE + b / 2 * 64;
        ptx::copy_tile(to + b * BOX_BYTES, map + (b % 2 && ROWS[1] != ROWS[0] ? 128 : 0), k, row, full);
      }
    }
  }
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&v)[8]) {
  Vector8<F16 ? DTYPE_F16 : DTYPE_BF16> values;
  values.raw = raw, values.get(v);
}
__device__ __forceinline__ uint4 load16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float load4(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store4(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
// Eight values to f16 in place; what rounding may change of each, squared, in units of 2^-22, is added to `lost`.
__device__ __forceinline__ void store_f16(u32 address, const float (&z)[8], float& lost) {
  u32 packed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed[i]) : "f"(z[2 * i + 1]), "f"(z[2 * i]));
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float power = __uint_as_float(__float_as_uint(z[i]) & 0x7f800000u);
    lost += power * power;
  }
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
               : "memory");
}
// The copy engine and the tensor cores see what this warp has written, and may go on.
__device__ __forceinline__ void hand_over(u32 barrier) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  ptx::barrier_arrive_if(barrier, ptx::arrives(threadIdx.x & 31));
}

// Four warpgroups: y in place, and sums over the segment for every channel.
__device__ void convert(Pipeline pipe, const Segment* segments, u32 begin, u32 end, const Projection* projections,
                        const float2* scales, ChannelPart* parts) {
  const u32 thread = threadIdx.x - MULTIPLIERS, lane = thread & 31, warp = thread >> 5;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const bool gram = segment.heads > 0;
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
    // A lane one pair of channels, a warp eight input channels: gains are the same for all lanes, and neighbouring
    // channels lie in different banks.
    const u32 chunk = warp & 7, pair = (warp >> 3) * 32 + lane;
    const bool in = pair < N / 2;
    u32 a, b;
    {
      const Projection& p = projections[segment.projection];
      // Without rotation any two may be a pair: the halves, whose banks do not collide.
      pair_channels(pair, p.rotary ? p.rotary : N, p.rotary && p.interleaved, a, b);
      if (!in) a = b = 0;
    }
    const u32 offset_a = a * 128 + ((chunk ^ (a & 7)) << 4);
    const u32 offset_b = b * 128 + ((chunk ^ (b & 7)) << 4);
    float norm_a = 0.f, norm_b = 0.f, dot = 0.f, lost_a = 0.f, lost_b = 0.f;
    for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
      const u32 boxes = pipe.boxes + pipe.stage * TILE_BYTES, gains = pipe.gains + pipe.stage * GAIN_BYTES + chunk * 32;
      ptx::barrier_wait(pipe.full + pipe.stage * 8, pipe.phase);
      if (in)
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const uint4 low = load16(gains + half * 256), high = load16(gains + half * 256 + 16);
        const u32 g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float za[8], zb[8];
        const u32 at_a = boxes + half * HALF_BYTES + offset_a, at_b = boxes + half * HALF_BYTES + offset_b;
        unpack(load16(at_a), za), unpack(load16(at_b), zb);
#pragma unroll
        for (int i = 0; i < 8; i++) za[i] *= __uint_as_float(g[i]), zb[i] *= __uint_as_float(g[i]);
        float sum_a = 0.f, sum_b = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum_a += za[i] * za[i], sum_b += zb[i] * zb[i];
        norm_a += sum_a, norm_b += sum_b;
        if (gram) {
          float product = 0.f;
#pragma unroll
          for (int i = 0; i < 8; i++) product += za[i] * zb[i];
          dot += product;
          store_f16(at_a, za, lost_a), store_f16(at_b, zb, lost_b);
        }
      }
      hand_over(pipe.ready + pipe.stage * 8);
    }
    // The eight warps of a pair meet in shared memory.
    const float mine[5] = {norm_a, norm_b, dot, lost_a, lost_b};
#pragma unroll
    for (int i = 0; i < 5; i++) store4(pipe.meeting + ((chunk * 5 + i) * 64 + pair) * 4, mine[i]);
    asm volatile("bar.sync 1, 512;" ::: "memory");
    if (chunk == 0 && in) {
      float total[5] = {};
      for (u32 c = 0; c < 8; c++)
#pragma unroll
        for (int i = 0; i < 5; i++) total[i] += load4(pipe.meeting + ((c * 5 + i) * 64 + pair) * 4);
      const float below = (segment.last - segment.first) * TILE * 0x1p-50f;
      ChannelPart* out = parts + segment.stat;
      *(float4*)(out + a) = make_float4(total[0] * back, total[2] * back, (total[3] * 0x1p-22f + below) * back, 0.f);
      *(float4*)(out + b) = make_float4(total[1] * back, total[2] * back, (total[4] * 0x1p-22f + below) * back, 0.f);
    }
    asm volatile("bar.sync 1, 512;" ::: "memory");
  }
}

// One warpgroup: `BLOCKS` 64 x 64 blocks of every segment, side by side, the left operand from box LEFT.
template <int BLOCKS, int LEFT> __device__ __forceinline__ void multiply(Pipeline pipe, const Segment* segments, u32 begin, u32 end, const float2* scales, float* partials) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  float acc[BLOCKS][32], sum[BLOCKS][32];
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    if (segment.heads == 0) {
      for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
        ptx::barrier_wait(pipe.ready + pipe.stage * 8, pipe.phase);
        ptx::barrier_arrive_if(pipe.empty + pipe.stage * 8, ptx::arrives(lane));
      }
      continue;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int i = 0; i < 32; i++) acc[b][i] = 0.f, sum[b][i] = 0.f;
    for (u32 tile = segment.first; tile < segment.last; tile += FLUSH) {
      const u32 count = min((u32)FLUSH, segment.last - tile);
      u32 previous = pipe.empty;
      for (u32 t = 0; t < count; t++) {
        ptx::barrier_wait(pipe.ready + pipe.stage * 8, pipe.phase);
        const u32 boxes = pipe.boxes + pipe.stage * TILE_BYTES;
        const u64 left = ptx::swizzled_operand(boxes + LEFT * BOX_BYTES);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) ptx::keep(acc[b]);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const u64 step = (k / 4 * HALF_BYTES + k % 4 * 32) / 16;
#pragma unroll
          for (int b = 0; b < BLOCKS; b++)
            ptx::wgmma_f16_64x64x16<false>(acc[b], left + step, left + b * (BOX_BYTES / 16) + step, t + k > 0);
        }
        ptx::wgmma_commit();
        // The tile before this one is done with: its stage is free.
        ptx::wgmma_wait<1>();
        ptx::barrier_arrive_if(previous, ptx::arrives(lane) && t > 0);
        previous = pipe.empty + pipe.stage * 8;
        pipe.next();
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) ptx::keep(acc[b]);
      ptx::barrier_arrive_if(previous, ptx::arrives(lane));
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 32; i++) sum[b][i] += acc[b][i];
    }
    // Store this share's part.
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      float* out = partials + (size_t)(segment.slot * 3 + LEFT * 2 + b) * 4096 + (warp * 16 + lane / 4) * 64 + (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        *(float2*)(out + j * 8) = make_float2(sum[b][4 * j] * back, sum[b][4 * j + 1] * back);
        *(float2*)(out + 8 * 64 + j * 8) = make_float2(sum[b][4 * j + 2] * back, sum[b][4 * j + 3] * back);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_grams_wgmma(const Segment* segments, const u32* shares, const Projection* projections, u64 maps,
                      const float* gains, const float2* scales, u32 tiles, float* partials, ChannelPart* parts) {
  extern __shared__ u8 shared[];
  const u32 base = (ptx::shared_address(shared) + 1023) & ~1023u;
  Pipeline pipe;
  pipe.boxes = base;
  pipe.gains = base + STAGES * TILE_BYTES;
  pipe.full = pipe.gains + STAGES * GAIN_BYTES;
  pipe.ready = pipe.full + STAGES * 8;
  pipe.empty = pipe.ready + STAGES * 8;
  pipe.meeting = pipe.empty + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      ptx::barrier_init(pipe.full + s * 8, 1);
      ptx::barrier_init(pipe.ready + s * 8, CONVERTERS / 32 * ptx::ARRIVALS);
      ptx::barrier_init(pipe.empty + s * 8, MULTIPLIERS / 32 * ptx::ARRIVALS);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const u32 begin = shares[blockIdx.x], end = shares[blockIdx.x + 1];
  const u32 group = threadIdx.x / 128;
  // 72 a thread at the start, 504 in all: 160 + 88 + 4 * 56 + 24.
  if (group == 0) {
    ptx::take_registers<160>();
    multiply<2, 0>(pipe, segments, begin, end, scales, partials);
  } else if (group == 1) {
    ptx::take_registers<88>();
    multiply<1, 1>(pipe, segments, begin, end, scales, partials);
  } else if (group < 6) {
    ptx::give_registers<56>();
    convert(pipe, segments, begin, end, projections, scales, parts);
  } else {
    ptx::give_registers<24>();
    if (threadIdx.x % 128 == 0) load_tiles(pipe, segments, begin, end, maps, gains, tiles);
  }
}
