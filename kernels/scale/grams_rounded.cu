// Gram matrices G = W^T diag(g^2) W of every Q and K head of a model, and the statistics of their channels, by one F16 product
// of weights rounded once. 16-bit weights stored [out, in], d_head from 72 to 128, norms with neither mean nor shift;
// grams_split.cu does what this one does not. Tiles and shares: gram_pass.cuh. Hopper.
//
// Two warpgroups turn a tile in place into y = f16(s g w), s the projection's power of two, and sum up norms and pair
// products; two warpgroups multiply: the blocks (0,0) and (0,1), and (1,1). Where a segment is a whole tile, its channels'
// statistics are left at once, otherwise in parts.
//
// One product with y on both sides instead of two with a split one. Rounding changes a value of exponent e by at most
// 2^(e - 11), or 2^-25 below the normal ones, which is summed up for every channel: delta_i >= ||y_i - exact||, so that
// sigma(exact) <= sigma(y) + (sum delta_i^2)^1/2. Accumulators are flushed into a second f32 sum with every tile: the
// accumulation's error is at most (128 + d/128) 2^-24 tr G in norm.
#include "scale/gram_pass.cuh"
#include "scale/pair_sums.cuh"

static_assert(N > 64 && N <= 128 && !ALONG_CHANNELS && !SUMS, "one head per tile, stored [out, in]");
constexpr u32 MULTIPLIERS = 256, CONVERTERS = 256, THREADS = MULTIPLIERS + CONVERTERS + 128;
typedef PairSums<8, 64> Scratch;  // of the eight converting warps
// The host's number.
static_assert(1024 + Stages::END + Scratch::BYTES <= 213248, "shared memory");

// Eight values to f16 in place; what rounding may change of each, squared, in units of 2^-22, is added to `lost`.
__device__ __forceinline__ void store_f16(u32 address, const float (&z)[8], float& lost) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float power = __uint_as_float(__float_as_uint(z[i]) & 0x7f800000u);
    lost += power * power;
  }
  ptx::st_shared_v4(address, ptx::f16x2(z[0], z[1]), ptx::f16x2(z[2], z[3]), ptx::f16x2(z[4], z[5]), ptx::f16x2(z[6], z[7]));
}

// Two warpgroups: y in place, and sums over the segment for every channel. A lane two pairs of channels, a warp eight input
// channels: gains are the same for all lanes, and neighbouring channels lie in different banks.
__device__ void convert(const Segment* segments, u32 begin, u32 end, const Projection* projections, const float2* scales,
                        ChannelPart* parts, ChannelStats* stats) {
  const Stages at;
  const Scratch scratch{at.end()};
  Ring<STAGES> ring;
  const u32 thread = threadIdx.x - MULTIPLIERS, lane = thread & 31, warp = thread >> 5;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
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
    for (u32 tile = segment.first; tile < segment.last; tile++, ring.next()) {
      const u32 boxes = at.boxes(ring.stage), gains = at.gains(ring.stage) + warp * 32;
      ptx::mbarrier_wait(at.full(ring.stage), ring.phase);
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const uint4 low = ptx::ld_shared_v4(gains + half * 256), high = ptx::ld_shared_v4(gains + half * 256 + 16);
        const u32 g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        Vector8<WEIGHTS> raw[2][2];
#pragma unroll
        for (u32 q = 0; q < 2; q++) {
          raw[q][0].raw = ptx::ld_shared_v4(boxes + half * HALF_BYTES + offset_a[q]);
          raw[q][1].raw = ptx::ld_shared_v4(boxes + half * HALF_BYTES + offset_b[q]);
        }
#pragma unroll
        for (u32 q = 0; q < 2; q++) {
          if (N < 128 && !in[q]) continue;
          float za[8], zb[8];
          raw[q][0].get(za), raw[q][1].get(zb);
#pragma unroll
          for (int i = 0; i < 8; i++) za[i] *= __uint_as_float(g[i]), zb[i] *= __uint_as_float(g[i]);
          float sum_a = 0.f, sum_b = 0.f, product = 0.f;
#pragma unroll
          for (int i = 0; i < 8; i++) sum_a += za[i] * za[i], sum_b += zb[i] * zb[i];
          sums[q][0] += sum_a, sums[q][1] += sum_b;
#pragma unroll
          for (int i = 0; i < 8; i++) product += za[i] * zb[i];
          sums[q][2] += product;
          store_f16(boxes + half * HALF_BYTES + offset_a[q], za, sums[q][3]);
          store_f16(boxes + half * HALF_BYTES + offset_b[q], zb, sums[q][4]);
        }
      }
      release(at.ready(ring.stage), lane);
    }
    const u64 biases = projections[segment.projection].bias;  // on its way while the warps' sums meet
    const u32 bias_dtype = projections[segment.projection].vector_dtype;
#pragma unroll
    for (u32 q = 0; q < 2; q++) scratch.put(warp, lane + 32 * q, sums[q]);
    ptx::named_barrier_sync<1, CONVERTERS>();
    if (warp < 2 && (warp ? in[1] : in[0])) {
      float total[5];
      scratch.get(lane + 32 * warp, total);
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
    ptx::named_barrier_sync<1, CONVERTERS>();
  }
}

// One warpgroup: COLUMNS columns of every segment's Gram from the channel on that box LEFT starts with, for that box's rows.
template <int COLUMNS, int LEFT>
__device__ __forceinline__ void multiply(const Segment* segments, u32 begin, u32 end, const float2* scales, float* partials) {
  const Stages at;
  Ring<STAGES> ring;
  const u32 lane = threadIdx.x & 31;
  float acc[COLUMNS / 2], sum[COLUMNS / 2];
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) acc[i] = 0.f, sum[i] = 0.f;
    for (u32 tile = segment.first; tile < segment.last; tile++, ring.next()) {
      ptx::mbarrier_wait(at.ready(ring.stage), ring.phase);
      const u64 box = ptx::wgmma_descriptor(at.boxes(ring.stage) + LEFT * BOX_BYTES, 1024, 1024, ptx::Swizzle::B128);
      // Zero; were it known, the assembler would clear the sums itself and serialise the products.
      u32 continued = 0;
      ptx::keep(continued);
      ptx::keep(acc);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const u64 operand = ptx::wgmma_advance(box, k / 4 * HALF_BYTES + k % 4 * 32);
        ptx::Wgmma<ptx::Operand::F16, COLUMNS>::template ss<false, false>(acc, operand, operand, continued + k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep(acc);
      ptx::mbarrier_arrive_if(at.empty(ring.stage), ptx::arrives(lane));
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) sum[i] += acc[i];
    }
    const float scale = scales[segment.projection].x;
    store_blocks(partials + (size_t)(segment.slot * 3 + LEFT * 2) * 4096, sum, 1.f / (scale * scale));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_grams_rounded(const Segment* segments, const Projection* projections, float* partials, const u32* shares,
                      const TensorMap* maps, const u8* gains, const float2* scales, u32 tiles, ChannelPart* parts,
                      ChannelStats* stats) {
  if (threadIdx.x == 0) init_stages(MULTIPLIERS / 32, CONVERTERS / 32);
  __syncthreads();
  const u32 begin = shares[blockIdx.x], end = shares[blockIdx.x + 1];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const u32 group = threadIdx.x / 128;
  // 96 a thread at the start, 480 in all: 168 + 3 * 96 + 24. A product of 128 columns does not assemble below 90.
  if (group == 0) {
    ptx::setmaxnreg_inc<168>();
    multiply<128, 0>(segments, begin, end, scales, partials);
  } else if (group == 1) {
    ptx::setmaxnreg_dec<96>();
    multiply<64, 1>(segments, begin, end, scales, partials);
  } else if (group < 4) {
    ptx::setmaxnreg_dec<96>();
    convert(segments, begin, end, projections, scales, parts, stats);
  } else {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x % 128 == 0) load_tiles(segments, begin, end, maps, gains, tiles);
  }
}
