// Gram matrices G = W^T diag(g^2) W of every Q and K head of a model and, on the way, the norms of every channel: one read of
// the weights. 16-bit weights stored [out, in], d_head from 72 to 128 (macro D_HEAD), norms with neither mean nor shift;
// scale_grams_pieces.cu does what this one does not. Hopper.
//
// The model dimension of all tiles of 128 channels, laid end to end, is cut into equal shares, one a block (a share is a
// list of segments: tile, range). A warp brings 128 input channels at a time through the copy engine; two warpgroups turn
// them in place into y = f16(s g w), s the projection's power of two, and sum up norms and pair products; two warpgroups
// multiply: the blocks (0,0) and (0,1), and (1,1). Where a segment is a whole tile, its channels' statistics are left at once.
//
// One product with y on both sides instead of two with a split one. Rounding changes a value of exponent e by at most
// 2^(e - 11), or 2^-25 below the normal ones, which is summed up for every channel: delta_i >= ||y_i - exact||, so that
// sigma(exact) <= sigma(y) + (sum delta_i^2)^1/2. Accumulators are flushed into a second f32 sum with every tile: the
// accumulation's error is at most (128 + d/128) 2^-24 tr G in norm.
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
constexpr int MEETING_BYTES = 8 * 5 * 64 * 4;  // sums of the converting warps
constexpr u32 MULTIPLIERS = 256, CONVERTERS = 256, THREADS = MULTIPLIERS + CONVERTERS + 128;
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
    ptx::take_map(map);
    if (ROWS[1] != ROWS[0]) ptx::take_map(map + 128);
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

// Two warpgroups: y in place, and sums over the segment for every channel.
__device__ void convert(Pipeline pipe, const Segment* segments, u32 begin, u32 end, const Projection* projections,
                        const float2* scales, ChannelPart* parts, ChannelStats* stats) {
  const u32 thread = threadIdx.x - MULTIPLIERS, lane = thread & 31, warp = thread >> 5;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const bool gram = segment.heads > 0;
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
    // A lane two pairs of channels, a warp eight input channels: gains are the same for all lanes, and neighbouring
    // channels lie in different banks.
    u32 a[2], b[2];
    bool in[2];
    {
      const Projection& p = projections[segment.projection];
#pragma unroll
      for (u32 q = 0; q < 2; q++) {
        in[q] = lane + 32 * q < N / 2;
        // Without rotation any two may be a pair: the halves, whose banks do not collide.
        pair_channels(in[q] ? lane + 32 * q : 0, p.rotary ? p.rotary : N, p.rotary && p.interleaved, a[q], b[q]);
      }
    }
    auto offset = [&](u32 channel) { return channel * 128 + ((warp ^ (channel & 7)) << 4); };
    const u32 offset_a[2] = {offset(a[0]), offset(a[1])}, offset_b[2] = {offset(b[0]), offset(b[1])};
    float sums[2][5] = {};  // norms of both, their product, what rounding may change of both
    for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
      const u32 boxes = pipe.boxes + pipe.stage * TILE_BYTES, gains = pipe.gains + pipe.stage * GAIN_BYTES + warp * 32;
      ptx::barrier_wait(pipe.full + pipe.stage * 8, pipe.phase);
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const uint4 low = load16(gains + half * 256), high = load16(gains + half * 256 + 16);
        const u32 g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        uint4 raw[2][2];
#pragma unroll
        for (u32 q = 0; q < 2; q++) {
          raw[q][0] = load16(boxes + half * HALF_BYTES + offset_a[q]), raw[q][1] = load16(boxes + half * HALF_BYTES + offset_b[q]);
        }
#pragma unroll
        for (u32 q = 0; q < 2; q++) {
          if (N < 128 && !in[q]) continue;
          float za[8], zb[8];
          unpack(raw[q][0], za), unpack(raw[q][1], zb);
#pragma unroll
          for (int i = 0; i < 8; i++) za[i] *= __uint_as_float(g[i]), zb[i] *= __uint_as_float(g[i]);
          float sum_a = 0.f, sum_b = 0.f;
#pragma unroll
          for (int i = 0; i < 8; i++) sum_a += za[i] * za[i], sum_b += zb[i] * zb[i];
          sums[q][0] += sum_a, sums[q][1] += sum_b;
          if (gram) {
            float product = 0.f;
#pragma unroll
            for (int i = 0; i < 8; i++) product += za[i] * zb[i];
            sums[q][2] += product;
            store_f16(boxes + half * HALF_BYTES + offset_a[q], za, sums[q][3]);
            store_f16(boxes + half * HALF_BYTES + offset_b[q], zb, sums[q][4]);
          }
        }
      }
      ptx::hand_over(pipe.ready + pipe.stage * 8, lane);
    }
    const u64 biases = projections[segment.projection].bias;  // on its way while warps meet
    const u32 bias_dtype = projections[segment.projection].vector_dtype;
    // The eight warps of a pair meet in shared memory.
#pragma unroll
    for (u32 q = 0; q < 2; q++)
#pragma unroll
      for (int i = 0; i < 5; i++) store4(pipe.meeting + ((warp * 5 + i) * 64 + lane + 32 * q) * 4, sums[q][i]);
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if (warp < 2 && (warp ? in[1] : in[0])) {
      float total[5] = {};
      for (u32 c = 0; c < 8; c++)
#pragma unroll
        for (int i = 0; i < 5; i++) total[i] += load4(pipe.meeting + ((c * 5 + i) * 64 + lane + 32 * warp) * 4);
      const float below = (segment.last - segment.first) * TILE * 0x1p-50f;
      auto put = [&](u32 channel, float norm2, float rounding) {
        const float pair = total[2] * back;
        if (!segment.whole) {
          *(float4*)(parts + segment.stat + channel) = make_float4(norm2, pair, rounding, 0.f);
          return;
        }
        // As `scale_part_stats`.
        const float bias = biases ? load_value(biases, bias_dtype, segment.first_row + channel) : 0.f;
        float4* out = (float4*)(stats + segment.stat + channel);
        out[0] = make_float4(norm2, norm2, pair, bias), out[1] = make_float4(fabsf(bias), 0.f, (float)(rounding * ROUNDINGS), 0.f);
      };
      put(warp ? a[1] : a[0], total[0] * back, (total[3] * 0x1p-22f + below) * back);
      put(warp ? b[1] : b[0], total[1] * back, (total[4] * 0x1p-22f + below) * back);
    }
    asm volatile("bar.sync 1, 256;" ::: "memory");
  }
}

__device__ __forceinline__ void product(float (&d)[32], u64 a, u64 b, int accumulate) {
  ptx::wgmma_f16_64x64x16<false>(d, a, b, accumulate);
}
__device__ __forceinline__ void product(float (&d)[64], u64 a, u64 b, int accumulate) {
  ptx::wgmma_f16_64x128x16(d, a, b, accumulate);
}

// One warpgroup: COLUMNS columns of every segment's Gram from the channel on that box LEFT starts with, for that box's rows.
template <int COLUMNS, int LEFT>
__device__ __forceinline__ void multiply(Pipeline pipe, const Segment* segments, u32 begin, u32 end, const float2* scales, float* partials) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  float acc[COLUMNS / 2], sum[COLUMNS / 2];
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
    for (int i = 0; i < COLUMNS / 2; i++) acc[i] = 0.f, sum[i] = 0.f;
    for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
      ptx::barrier_wait(pipe.ready + pipe.stage * 8, pipe.phase);
      const u64 box = ptx::swizzled_operand(pipe.boxes + pipe.stage * TILE_BYTES + LEFT * BOX_BYTES);
      // Zero; were it known, the assembler would clear the sums itself and serialise the products.
      u32 continued = 0;
      asm volatile("" : "+r"(continued));
      ptx::keep(acc);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const u64 at = box + (k / 4 * HALF_BYTES + k % 4 * 32) / 16;
        product(acc, at, at, continued + k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep(acc);
      ptx::barrier_arrive_if(pipe.empty + pipe.stage * 8, ptx::arrives(lane));
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) sum[i] += acc[i];
    }
    // Store this share's part.
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
    float* out = partials + (size_t)(segment.slot * 3 + LEFT * 2) * 4096 + (warp * 16 + lane / 4) * 64 + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      float* to = out + j / 8 * 4096 + j % 8 * 8;
      *(float2*)to = make_float2(sum[4 * j] * back, sum[4 * j + 1] * back);
      *(float2*)(to + 8 * 64) = make_float2(sum[4 * j + 2] * back, sum[4 * j + 3] * back);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_grams_wgmma(const Segment* segments, const u32* shares, const Projection* projections, u64 maps,
                      const float* gains, const float2* scales, u32 tiles, float* partials, ChannelPart* parts, ChannelStats* stats) {
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
  wait_for_previous();
  let_next_start();
  const u32 group = threadIdx.x / 128;
  // 96 a thread at the start, 480 in all: 168 + 3 * 96 + 24. A product of 128 columns does not assemble below 90.
  if (group == 0) {
    ptx::take_registers<168>();
    multiply<128, 0>(pipe, segments, begin, end, scales, partials);
  } else if (group == 1) {
    ptx::give_registers<96>();
    multiply<64, 1>(pipe, segments, begin, end, scales, partials);
  } else if (group < 4) {
    ptx::give_registers<96>();
    convert(pipe, segments, begin, end, projections, scales, parts, stats);
  } else {
    ptx::give_registers<24>();
    if (threadIdx.x % 128 == 0) load_tiles(pipe, segments, begin, end, maps, gains, tiles);
  }
}
