// Gram matrices G = W^T diag(g^2) W of every Q and K head of a model and, on the way, the norms of every channel: one read of
// the weights. 16-bit weights of any layout, d_head up to 128 (macro D_HEAD), norms with a mean or a shift too. Hopper.
//
// The model dimension of all tiles of 128 channels, laid end to end, is cut into equal shares, one a block (a share is a
// list of segments: tile, range). A warp brings 128 input channels at a time through the copy engine; two warpgroups
// multiply: for more than 64 channels a head the blocks (0,0) (0,1) and (1,1) of one head, up to 64 one head each.
//
// The weights in shared memory are the right operand as they are. The left one, g^2 w in two pieces of their type, is made in
// registers: g^2 as hi + lo, z = w hi + w lo, and e = (w hi - z) + w lo is what z lacks, both products summed up in
// one accumulator. So nothing is written back. What is lost, at most 2^-15 of a value (f16: 2^-22), is summed up for every
// channel. Accumulators are flushed into a second f32 sum every 256 input channels: the
// accumulation's error is at most (256 + d/256) 2^-24 tr G in norm, for each of the two products.
#include "scale_ptx.cuh"
#include "scale_segments.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
#ifndef ALONG_CHANNELS  // 1: stored [in, out]
#define ALONG_CHANNELS 0
#endif
#ifndef SUMS  // 1: for a mean or a shift, sums of g w, beta w and |beta w| too
#define SUMS 0
#endif
#ifndef F16  // 1: weights in f16, 0: in bf16
#define F16 0
#endif

constexpr u32 N = D_HEAD;
constexpr bool ONE = N > 64;                 // one head a tile
constexpr u32 ROWS[2] = {N < 64 ? N : 64, ONE ? N - 64 : N};  // channels in each box
constexpr int TILE = 128;                    // input channels a tile, in two halves
constexpr int BOX_BYTES = 64 * 64 * 2, HALF_BYTES = 2 * BOX_BYTES, TILE_BYTES = 2 * HALF_BYTES;
constexpr int COPIED = ALONG_CHANNELS ? TILE_BYTES : (ROWS[0] + ROWS[1]) * TILE * 2;
constexpr int SQUARES = TILE * 4, GAIN_BYTES = TILE * (SUMS ? 20 : 4);  // see scale_gains.cu
constexpr int STAGES = 6;
constexpr int FLUSH = 2;  // tiles
constexpr int STEPS = TILE / 16;
constexpr int AHEAD = 2;  // steps whose operands are on their way
constexpr u32 MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
// The host's number: room for alignment, boxes, gains and barriers.
static_assert(1024 + STAGES * (TILE_BYTES + GAIN_BYTES + 16) <= 213248, "shared memory");

struct Pipeline {
  u32 boxes, gains, full, empty;
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

__device__ void load_tiles(Pipeline pipe, const Segment* segments, u32 begin, u32 end, u64 maps, const u8* gains, u32 tiles) {
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const u64 map = maps + segment.projection * 256ull;
    ptx::take_map(map);
    if (ROWS[1] != ROWS[0]) ptx::take_map(map + 128);
    const u8* gain = gains + (size_t)segment.projection * tiles * GAIN_BYTES;
    for (u32 tile = segment.first; tile < segment.last; tile++, pipe.next()) {
      const u32 full = pipe.full + pipe.stage * 8, to = pipe.boxes + pipe.stage * TILE_BYTES;
      ptx::barrier_wait(pipe.empty + pipe.stage * 8, pipe.phase ^ 1);
      ptx::barrier_expect(full, COPIED + GAIN_BYTES);
      ptx::copy_bytes(pipe.gains + pipe.stage * GAIN_BYTES, gain + tile * GAIN_BYTES, GAIN_BYTES, full);
#pragma unroll
      for (u32 b = 0; b < 4; b++) {
        const u32 row = segment.first_row + (b % 2 ? ROWS[0] : 0), k = tile * TILE + b / 2 * 64;
        ptx::copy_tile(to + b * BOX_BYTES, map + (b % 2 && ROWS[1] != ROWS[0] ? 128 : 0), ALONG_CHANNELS ? row : k,
                       ALONG_CHANNELS ? k : row, full);
      }
    }
  }
}

// The multiplier's share of 16 input channels, in the fragments of a 16 x 16 left operand.
struct Step {
  u32 w[4];          // rows l/4 and l/4 + 8 of inputs 2(l%4) and the next; the same of inputs + 8
  u32 hi[2], lo[2];  // g^2 of these inputs
  __device__ __forceinline__ void load(u32 weights, u32 gains) {
    ptx::load_fragment<ALONG_CHANNELS>(w, weights);
    ptx::load16(hi[0], hi[1], lo[0], lo[1], gains + threadIdx.x % 4 * 16);
  }
};

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// One warpgroup: 64 rows of every segment's Gram, by COLUMNS columns from the same channel on.
template <int COLUMNS, u32 SIDE> __device__ __forceinline__ void multiply(Pipeline pipe, const Segment* segments, u32 begin, u32 end, const Projection* projections, const float2* scales, float* partials, ChannelPart* parts) {
  constexpr int VALUES = COLUMNS / 2;
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
      u32 previous = pipe.empty;
      for (u32 t = 0; t < count; t++) {
        ptx::barrier_wait(pipe.full + pipe.stage * 8, pipe.phase);
        const u32 boxes = pipe.boxes + pipe.stage * TILE_BYTES, gains = pipe.gains + pipe.stage * GAIN_BYTES;
        const u64 right = ptx::swizzled_operand(boxes + base, BOX_BYTES);
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
            z[k][i] = ptx::fma<F16>(w, hi, ptx::product<F16>(w, lo));
            e[k][i] = ptx::fma<F16>(w, lo, ptx::fma<F16>(w, hi, ptx::negated<F16>(z[k][i])));
            positive[k][i] = w & 0x7fff7fff;
          }
          const u64 at = right + (k / 4 * HALF_BYTES + (ALONG_CHANNELS ? k % 4 * 2048 : k % 4 * 32)) / 16;
          // One group of products: the assembler waits for those before a second fence.
          ptx::wgmma_fence();
          ptx::Wgmma<COLUMNS, ALONG_CHANNELS, F16>::run(acc, z[k], at, t + k > 0);
          ptx::Wgmma<COLUMNS, ALONG_CHANNELS, F16>::run(acc, e[k], at, 1);
          if (SUMS) {
            const u64 table = ptx::plain_operand(gains + SQUARES + k * 256);
            ptx::Wgmma<8, false, F16>::run(open, step[k].w, table, t + k > 0);
            ptx::Wgmma<8, false, F16>::run(absolute, positive[k], table, 1);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          // The tile before this one is done with: its stage is free. What was read of it has gone through products that are over.
          if (k == 0) {
            __syncwarp();
            ptx::barrier_arrive_if(previous, ptx::arrives(lane) && t > 0);
          }
        }
        previous = pipe.empty + pipe.stage * 8;
        pipe.next();
      }
      ptx::wgmma_wait<0>();
      ptx::keep(acc);
      __syncwarp();
      ptx::barrier_arrive_if(previous, ptx::arrives(lane));
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
    const u32 row = warp * 16 + lane / 4;
    if (segment.heads > (ONE ? 0 : SIDE)) {
      float* out = partials + (size_t)(ONE ? segment.slot * 3 + SIDE * 2 : segment.slot + SIDE) * 4096 + row * 64 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        *(float2*)(out + j / 8 * 4096 + j % 8 * 8) = make_float2(sum[4 * j] * back, sum[4 * j + 1] * back);
        *(float2*)(out + j / 8 * 4096 + 8 * 64 + j % 8 * 8) = make_float2(sum[4 * j + 2] * back, sum[4 * j + 3] * back);
      }
    }
    const u32 first = ONE ? SIDE * 64 : 0;  // channel of the block's first row
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 own = first + row + 8 * h, other = pair_partner(own, rotary, interleaved);
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
    scale_grams_pieces(const Segment* segments, const u32* shares, const Projection* projections, u64 maps,
                       const u8* gains, const float2* scales, u32 tiles, float* partials, ChannelPart* parts) {
  extern __shared__ u8 shared[];
  const u32 base = (ptx::shared_address(shared) + 1023) & ~1023u;
  Pipeline pipe;
  pipe.boxes = base;
  pipe.gains = base + STAGES * TILE_BYTES;
  pipe.full = pipe.gains + STAGES * GAIN_BYTES;
  pipe.empty = pipe.full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      ptx::barrier_init(pipe.full + s * 8, 1);
      ptx::barrier_init(pipe.empty + s * 8, MULTIPLIERS / 32 * ptx::ARRIVALS);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const u32 begin = shares[blockIdx.x], end = shares[blockIdx.x + 1];
  wait_for_previous();
  let_next_start();
  if (threadIdx.x < 128) {
    ptx::take_registers<240>();
    multiply<ONE ? 128 : 64, 0>(pipe, segments, begin, end, projections, scales, partials, parts);
  } else if (threadIdx.x < 256) {
    ptx::take_registers<240>();
    multiply<64, 1>(pipe, segments, begin, end, projections, scales, partials, parts);
  } else {
    ptx::give_registers<24>();
    if (threadIdx.x == MULTIPLIERS) load_tiles(pipe, segments, begin, end, maps, gains, tiles);
  }
}
