// Gram matrices G = W^T diag(g^2) W of every Q and K head of a model, and the statistics of their channels: one read of the
// weights. 16-bit weights of any layout, d_head up to 128, norms with a mean or a shift too. Tiles and shares:
// gram_pass.cuh. Two warpgroups multiply: for more than 64 channels per head the blocks (0,0) (0,1) and (1,1) of one
// head, up to 64 one head each. Hopper.
//
// The weights in shared memory are the right operand as they are. The left one, g^2 w as two terms of their type, is made in
// registers: g^2 as hi + lo, z = w hi + w lo, and e = (w hi - z) + w lo is what z lacks, both products summed up in
// one accumulator. So nothing is written back. What is lost, at most 2^-15 of a value (f16: 2^-22), is summed up for every
// channel. Accumulators are flushed into a second f32 sum every 256 input channels: the
// accumulation's error is at most (256 + d/256) 2^-24 tr G in norm, for each of the two products.
#include "scale/gram_pass.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

constexpr int SQUARES = TILE * 4;  // bytes of g^2 in the gains of a tile (gains.cu)
constexpr int FLUSH = 2;           // tiles
constexpr int STEPS = TILE / 16;
constexpr int AHEAD = 2;           // steps whose operands are on their way
constexpr u32 MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
// The host's number.
static_assert(1024 + Stages::END <= 213248, "shared memory");

// The multiplier's share of 16 input channels, in the fragments of a 16 x 16 left operand.
struct Step {
  u32 w[4];          // rows l/4 and l/4 + 8 of inputs 2(l%4) and the next; the same of inputs + 8
  u32 hi[2], lo[2];  // g^2 of these inputs
  __device__ __forceinline__ void load(u32 weights, u32 gains) {
    ptx::ldmatrix<ALONG_CHANNELS>(w, weights);
    const uint4 g = ptx::ld_shared_v4(gains + threadIdx.x % 4 * 16);
    hi[0] = g.x, hi[1] = g.y, lo[0] = g.z, lo[1] = g.w;
  }
};

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// One warpgroup: 64 rows of every segment's Gram, by COLUMNS columns from the same channel on.
template <int COLUMNS, u32 SIDE>
__device__ __forceinline__ void multiply(const Segment* segments, u32 begin, u32 end, const Projection* projections,
                                         const float2* scales, float* partials, ChannelPart* parts) {
  constexpr ptx::Operand TYPE = F16 ? ptx::Operand::F16 : ptx::Operand::Bf16;
  constexpr int VALUES = COLUMNS / 2;
  const Stages at;
  Ring<STAGES> ring;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4, base = SIDE * BOX_BYTES;
  // Where this lane's row of a fragment lies: row l % 16 of inputs 8 (l / 16).., or input l % 8 + 8 (l / 16) of an eight.
  u32 from;
  {
    const u32 c = warp * 16 + (ALONG_CHANNELS ? lane / 8 % 2 * 8 : lane % 16), in = c < ROWS[SIDE] ? c : 0;
    const u32 k = lane % 8 + lane / 16 * 8;
    from = base + (ALONG_CHANNELS ? k * 128 + ((in / 8 ^ k % 8) << 4) : in * 128 + ((lane / 16 ^ in % 8) << 4));
  }
  if (begin == end) return;
  float acc[VALUES], sum[VALUES];
  Segment next = segments[begin];
  for (u32 s = begin; s < end; s++) {
    // What follows is on its way before it is asked for.
    const Segment segment = next;
    next = segments[min(s + 1, end - 1)];
    const float2 scale = scales[segment.projection];
    const u32 rotary = projections[segment.projection].rotary, interleaved = projections[segment.projection].interleaved;
    float sums[4] = {}, open[4] = {}, absolute[4] = {};
#pragma unroll
    for (int i = 0; i < VALUES; i++) acc[i] = 0.f, sum[i] = 0.f;
    for (u32 tile = segment.first; tile < segment.last; tile += FLUSH) {
      const u32 count = min((u32)FLUSH, segment.last - tile);
      u32 previous = at.empty(0);
      for (u32 t = 0; t < count; t++) {
        ptx::mbarrier_wait(at.full(ring.stage), ring.phase);
        const u32 boxes = at.boxes(ring.stage), gains = at.gains(ring.stage);
        const u64 right = ptx::wgmma_descriptor(boxes + base, BOX_BYTES, 1024, ptx::Swizzle::B128);
        const u32 left = boxes + from;
        // Inputs of step k of a half: chunk 2 k of a row, its bits mixed with the row's, or rows 16 k.
        auto weights = [&](u32 k) { return (ALONG_CHANNELS ? left + k % 4 * 2048 : left ^ k % 4 * 32) + k / 4 * HALF_BYTES; };
        // Registers only as long as they are in use: the loops are unrolled.
        Step step[STEPS];
        u32 z[STEPS][4], e[STEPS][4], positive[STEPS][4];
#pragma unroll
        for (u32 k = 0; k < AHEAD; k++) step[k].load(weights(k), gains + k * 64);
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
          if (k + AHEAD < STEPS) step[k + AHEAD].load(weights(k + AHEAD), gains + (k + AHEAD) * 64);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const u32 w = step[k].w[i], hi = step[k].hi[i / 2], lo = step[k].lo[i / 2];
            z[k][i] = ptx::fma_x2<F16>(w, hi, ptx::mul_x2<F16>(w, lo));
            e[k][i] = ptx::fma_x2<F16>(w, lo, ptx::fma_x2<F16>(w, hi, ptx::neg_x2<F16>(z[k][i])));
            positive[k][i] = w & 0x7fff7fff;
          }
          const u64 operand = ptx::wgmma_advance(right, k / 4 * HALF_BYTES + (ALONG_CHANNELS ? k % 4 * 2048 : k % 4 * 32));
          // One group of products: the assembler waits for those before a second fence.
          ptx::wgmma_fence();
          ptx::Wgmma<TYPE, COLUMNS>::template rs<ALONG_CHANNELS>(acc, z[k], operand, t + k > 0);
          ptx::Wgmma<TYPE, COLUMNS>::template rs<ALONG_CHANNELS>(acc, e[k], operand, 1);
          if (SUMS) {
            // 8 x 16 values as two blocks of 8 rows of 16 bytes.
            const u64 table = ptx::wgmma_descriptor(gains + SQUARES + k * 256, 128, 256, ptx::Swizzle::None);
            ptx::Wgmma<TYPE, 8>::template rs<false>(open, step[k].w, table, t + k > 0);
            ptx::Wgmma<TYPE, 8>::template rs<false>(absolute, positive[k], table, 1);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          // The tile before this one is done with: its stage is free. What was read of it has gone through products that are over.
          if (k == 0) {
            __syncwarp();
            ptx::mbarrier_arrive_if(previous, arrives(lane) && t > 0);
          }
        }
        previous = at.empty(ring.stage);
        ring.next();
      }
      ptx::wgmma_wait<0>();
      ptx::keep(acc);
      __syncwarp();
      ptx::mbarrier_arrive_if(previous, arrives(lane));
#pragma unroll
      for (int i = 0; i < VALUES; i++) sum[i] += acc[i];
      if (SUMS) {
        ptx::keep(open), ptx::keep(absolute);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] += open[i];
      }
    }

    // Store this share's part.
    const float back = 1.f / (scale.x * scale.x);
    if (ONE || segment.heads > SIDE)
      store_blocks(partials + (size_t)(ONE ? segment.slot * 3 + SIDE * 2 : segment.slot + SIDE) * 4096, sum, back);
    const u32 first = ONE ? SIDE * 64 : 0;  // channel of the block's first row
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 own = first + warp * 16 + lane / 4 + 8 * h, other = pair_partner(own, rotary, interleaved);
      // Entry (own, own) lies in columns 16 warp + 8 h + l/4 of the block.
      float norm2 = 0.f, pair = 0.f;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const float even = sum[8 * w + 6 * h], odd = sum[8 * w + 6 * h + 1];
        norm2 = w == warp ? (lane / 4 % 2 ? odd : even) : norm2;
      }
      norm2 = quad_sum(lane % 4 == lane / 8 ? norm2 : 0.f);
      if (rotary) {
#pragma unroll
        for (int i = 0; i < VALUES / 2; i++) {
          const u32 column = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
          pair = column == other ? sum[i / 2 * 4 + 2 * h + i % 2] : pair;
        }
        pair = quad_sum(pair);
      }
      const u32 c = lane & 3;
      auto columns = [&](const float (&v)[4], float even, float odd) {
        return SUMS ? quad_sum((even != 0.f ? v[2 * h] : 0.f) + (odd != 0.f ? v[2 * h + 1] : 0.f)) : 0.f;
      };
      // Columns: g in three, beta in three, |beta| in two.
      const float all = columns(sums, c < 2, c == 0), constant = columns(sums, c == 2, c == 1 || c == 2), positive = columns(absolute, c == 3, c == 3);
      if (c == 0 && own < N) {
        ChannelPart* out = parts + segment.stat + (ONE ? 0 : SIDE * N);
        // The upper of two Gram entries, for both of a pair.
        if (own < other) out[own].pair = out[other].pair = pair * back;
        out[own].norm2 = norm2 * back;
        // E = W^T D D^-1 (Z - D^2 W), its upper triangle mirrored: ||E|| <= 2^1/2 sigma (sum d_c^2)^1/2, d_c = 2^-15 ||w_c||, or
        // 2^-22 and 2^-25 of values below the normal ones. So sigma moves by at most (2 sum d_c^2)^1/2.
        out[own].rounding = (F16 ? 0x1.1p-43f * norm2 + scale.y : 0x1.1p-29f * norm2) * back;
        if (SUMS) out[own].sum = all / scale.x, out[own].constant = constant, out[own].absolute = positive * 1.0001f;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scale_grams_split(const Segment* segments, const Projection* projections, float* partials, const u32* shares,
                       const TensorMap* maps, const u8* gains, const float2* scales, u32 tiles, ChannelPart* parts,
                       ChannelStats*) {
  if (threadIdx.x == 0) init_stages(MULTIPLIERS / 32, 1);
  __syncthreads();
  const u32 begin = shares[blockIdx.x], end = shares[blockIdx.x + 1];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_inc<240>();
    multiply<ONE ? 128 : 64, 0>(segments, begin, end, projections, scales, partials, parts);
  } else if (threadIdx.x < 256) {
    ptx::setmaxnreg_inc<240>();
    multiply<64, 1>(segments, begin, end, projections, scales, partials, parts);
  } else {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == MULTIPLIERS) load_tiles(segments, begin, end, maps, gains, tiles);
  }
}
