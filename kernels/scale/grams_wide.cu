// Gram matrices and channel norms as scale_grams_rounded makes them, where that has no room: heads of more than 128 channels,
// and f32 weights. Stored [out, in]. Macros D_HEAD, WEIGHTS (type). Hopper.
//
// Two rings of shared memory: weights as they come, rows of 128 bytes, and y = f16(s g w) in slices of 32 input channels. A
// head of more than 128 channels belongs to a cluster of two blocks: each converts every second run of input channels and sends
// its slices to the other, so that a weight is read and converted once, and each multiplies half of the 64 x 64 blocks of the
// upper triangle. Roles of a block: two warpgroups multiply, two or three convert, a warp copies, a warp sends.
//
// What rounding to f16 changed is measured, value by value: sigma(exact) <= sigma(y) + (sum delta_i^2)^1/2. Every 256 input
// channels an accumulator t is split, t = bf16(t) + rest: the rest stays where it is, so a sum costs half a register more and
// not a whole one. That adds 256 2^-24 2^-8 |t| to the error of the next 256: (256 + 2 d/256) 2^-24 tr G in norm altogether.
#include "scale/pair_sums.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scale/ring.cuh"
#include "scale/segments.cuh"

#ifndef D_HEAD
#define D_HEAD 256
#endif
#ifndef WEIGHTS  // 0: bf16, 1: f16, 2: f32
#define WEIGHTS 0
#endif

constexpr u32 N = D_HEAD;
constexpr bool F32 = WEIGHTS == DTYPE_F32;
constexpr u32 CTAS = N > 128 ? 2 : 1;
constexpr u32 HEADS = N > 64 ? 1 : 2;                      // of a tile, 64 rows of shared memory each where there are two
constexpr u32 SLABS = HEADS == 2 ? 2 : (N + 63) / 64;      // 64 channels each
constexpr u32 BLOCKS = HEADS == 2 ? 1 : SLABS * (SLABS + 1) / 2;
constexpr u32 ROWS = SLABS * 64;
constexpr u32 STEP = 32;                                   // input channels of a slice
constexpr u32 STEPS = F32 ? 1 : 2;                         // slices of a raw stage
constexpr u32 RAW_STAGES = SLABS == 4 ? 3 : SLABS == 3 ? 4 : 8, STAGES = SLABS == 4 ? 3 : SLABS == 3 ? 4 : 6;
constexpr u32 RAW_BYTES = ROWS * 128, SLICE_BYTES = ROWS * STEP * 2, STAGE_BYTES = CTAS * SLICE_BYTES;
constexpr u32 GAIN_BYTES = STEPS * STEP * 4;
constexpr u32 FLUSH = 256 / (CTAS * STEP);                 // stages
constexpr u32 HALF = N / 2, PAIRS = HEADS * HALF, GROUPS = (PAIRS + 31) / 32;
constexpr u32 AT_ONCE = GROUPS == 3 ? 3 : GROUPS == 1 ? 1 : 2, TASKS = GROUPS / AT_ONCE;  // groups of 32 pairs that the block, a warp takes
constexpr u32 CONVERTERS = AT_ONCE * 4, MULTIPLIERS = 8;   // warps
typedef PairSums<4, GROUPS * 32> Scratch;
constexpr u32 THREADS = 32 * (MULTIPLIERS + CONVERTERS + 4);

// Registers a thread: at the start, of the two multiplying warpgroups, of the converting ones.
constexpr int START = 65536 / THREADS / 8 * 8;
constexpr int FIRST = SLABS == 4 ? 168 : 136, SECOND = SLABS == 4 ? 120 : 88, COPYING = 32;
constexpr int SPARE = (int)(START * (THREADS / 128) - FIRST - SECOND - COPYING) / (int)AT_ONCE / 8 * 8, CONVERTING = SPARE < 128 ? SPARE : 128;

constexpr bool EARLY = !F32 && !(SLABS == 4 && PAIRS % 32);  // registers allow all loads before the first sum

// Shared memory. Barriers: a raw stage is full, is used; a slice is made; a stage is ready for products, is done with.
struct Stages {
  u32 base, rank;
  __device__ __forceinline__ Stages() {
    extern __shared__ u8 shared[];
    base = (ptx::shared_address(shared) + 1023) & ~1023u, rank = CTAS == 2 ? ptx::cluster_rank() : 0;
  }
  static constexpr u32 STAGES_AT = RAW_STAGES * RAW_BYTES, GAINS_AT = STAGES_AT + STAGES * STAGE_BYTES;
  static constexpr u32 SCRATCH_AT = GAINS_AT + RAW_STAGES * GAIN_BYTES, BARRIERS_AT = SCRATCH_AT + Scratch::BYTES;
  static constexpr u32 BYTES = BARRIERS_AT + (2 * RAW_STAGES + 3 * STAGES) * 8;
  __device__ __forceinline__ u32 raw(u32 stage) const { return base + stage * RAW_BYTES; }
  __device__ __forceinline__ u32 slice(u32 stage) const { return base + STAGES_AT + stage * STAGE_BYTES + (CTAS == 2 ? rank * SLICE_BYTES : 0); }
  __device__ __forceinline__ u32 operands(u32 stage) const { return base + STAGES_AT + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 gains(u32 stage) const { return base + GAINS_AT + stage * GAIN_BYTES; }
  __device__ __forceinline__ Scratch scratch() const { return {base + SCRATCH_AT}; }
  __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS_AT + stage * 8; }
  __device__ __forceinline__ u32 used(u32 stage) const { return base + BARRIERS_AT + (RAW_STAGES + stage) * 8; }
  __device__ __forceinline__ u32 made(u32 stage) const { return base + BARRIERS_AT + (2 * RAW_STAGES + stage) * 8; }
  __device__ __forceinline__ u32 ready(u32 stage) const { return base + BARRIERS_AT + (2 * RAW_STAGES + STAGES + stage) * 8; }
  __device__ __forceinline__ u32 done(u32 stage) const { return base + BARRIERS_AT + (2 * RAW_STAGES + 2 * STAGES + stage) * 8; }
};
static_assert(1024 + Stages::BYTES <= 227 * 1024, "shared memory");

// A warpgroup's registers a thread, from START on.
template <int COUNT> __device__ __forceinline__ void set_registers() {
  if constexpr (COUNT > START) ptx::setmaxnreg_inc<COUNT>();
  if constexpr (COUNT < START) ptx::setmaxnreg_dec<COUNT>();
}

__device__ void load_tiles(const Segment* segments, const u32* shares, const TensorMap* maps, const float* gains, u32 gain_tiles) {
  const Stages pipe;
  const u32 begin = shares[blockIdx.x / CTAS], end = shares[blockIdx.x / CTAS + 1];
  Ring<RAW_STAGES> at;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    const TensorMap* map = maps + segment.projection;
    ptx::fence_tensormap_acquire(map);
    const float* gain = gains + (size_t)segment.projection * gain_tiles * 128;
    for (u32 tile = segment.first; tile < segment.last; tile++, at.next()) {
      const u32 full = pipe.full(at.stage), k = (tile * CTAS + pipe.rank) * STEP * STEPS;
      ptx::mbarrier_wait(pipe.used(at.stage), at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, HEADS * N * 128 + GAIN_BYTES);
      ptx::bulk_load(pipe.gains(at.stage), gain + k, GAIN_BYTES, full);
#pragma unroll
      for (u32 h = 0; h < HEADS; h++)
        ptx::tma_load_2d(pipe.raw(at.stage) + h * 64 * 128, map, full, k, segment.first_row + h * N);
    }
  }
}

// This block's slices to the other; the one that multiplies rows 64 on has no use for those before.
__device__ void send_slices(const Segment* segments, const u32* shares) {
  const Stages pipe;
  const u32 begin = shares[blockIdx.x / CTAS], end = shares[blockIdx.x / CTAS + 1];
  Ring<STAGES> at;
  const u32 other = pipe.rank ^ 1, skipped = other ? 64 * STEP * 2 : 0, expected = (pipe.rank ? N - 64 : N) * STEP * 2;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    for (u32 step = 0; step < (segment.last - segment.first) * STEPS; step++, at.next()) {
      const u32 ready = pipe.ready(at.stage), from = pipe.slice(at.stage) + skipped;
      ptx::mbarrier_wait(pipe.made(at.stage), at.phase);
      ptx::mbarrier_arrive_expect_tx(ready, expected);
      ptx::bulk_copy_to_block(ptx::map_shared(from, other), from, N * STEP * 2 - skipped, ptx::map_shared(ready, other));
    }
  }
}

// Eight input channels of one channel.
struct Run {
  uint4 raw[F32 ? 2 : 1];
  __device__ __forceinline__ void load(u32 address) {
    raw[0] = ptx::ld_shared_v4(address);
    if (F32) raw[F32 ? 1 : 0] = ptx::ld_shared_v4(address ^ 16);
  }
  __device__ __forceinline__ void get(float (&v)[8]) const {
    if (F32) {
      const uint4 low = raw[0], high = raw[F32 ? 1 : 0];
      const u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = __uint_as_float(w[i]);
    } else {
      Vector8<WEIGHTS == DTYPE_F16 ? DTYPE_F16 : DTYPE_BF16> values;
      values.raw = raw[0], values.get(v);
    }
  }
};

// Eight values to f16; the squares of what that changed are added to `lost`.
__device__ __forceinline__ void store_f16(u32 address, const float (&z)[8], float& lost) {
  u32 packed[4];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    packed[i] = ptx::f16x2(z[2 * i], z[2 * i + 1]);
    const float low = z[2 * i] - ptx::f32_from_f16((u16)packed[i]), high = z[2 * i + 1] - ptx::f32_from_f16((u16)(packed[i] >> 16));
    sum += low * low, sum += high * high;
  }
  lost += sum;
  ptx::st_shared_v4(address, packed[0], packed[1], packed[2], packed[3]);
}

// y into this block's slices, and sums over the segment for every channel. A lane one pair of channels, a warp eight input
// channels of each slice: gains are the same for all lanes, and neighbouring channels lie in different banks.
__device__ void convert(const Segment* segments, const u32* shares, const Projection* projections,
                        const float2* scales, ChannelPart* parts) {
  const Stages pipe;
  const u32 begin = shares[blockIdx.x / CTAS], end = shares[blockIdx.x / CTAS + 1];
  const u32 lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - MULTIPLIERS, chunk = warp & 3, group = warp >> 2;
  Ring<RAW_STAGES> from;
  Ring<STAGES> to;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
    // Without rotation any two may be a pair: the halves, whose banks do not collide.
    const u32 rotated = projections[segment.projection].rotary, rotary = rotated ? rotated : N;
    const bool interleaved = rotated && projections[segment.projection].interleaved;
    // Where the two channels come from.
    u32 raw[TASKS][2];
#pragma unroll
    for (u32 t = 0; t < TASKS; t++) {
      const u32 pair = (group + t * AT_ONCE) * 32 + lane;
      u32 row[2];
      pair_channels(pair % HALF, rotary, interleaved, row[0], row[1]);
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        const u32 r = row[i] + (HEADS == 2 && pair < PAIRS ? pair / HALF * 64 : 0);
        raw[t][i] = r * 128 + (((F32 ? 2 * chunk : chunk) ^ (r & 7)) << 4);
      }
    }
    float sums[TASKS][5] = {};  // norms of both, their product, what rounding took from both
    for (u32 tile = segment.first; tile < segment.last; tile++, from.next()) {
      ptx::mbarrier_wait(pipe.full(from.stage), from.phase);
      const u32 source = pipe.raw(from.stage);
      Run run[TASKS][2];
      auto load = [&](u32 t, u32 step) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) run[t][i].load(source + (raw[t][i] ^ (step * 64)));
      };
#pragma unroll 1
      for (u32 step = 0; step < STEPS; step++) {
        if (EARLY)
#pragma unroll
          for (u32 t = 0; t < TASKS; t++) load(t, step);
        const u32 gains = pipe.gains(from.stage) + (step * STEP + chunk * 8) * 4;
        const uint4 low = ptx::ld_shared_v4(gains), high = ptx::ld_shared_v4(gains + 16);
        const u32 g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const u32 target = pipe.slice(to.stage);
        ptx::mbarrier_wait(pipe.done(to.stage), to.phase ^ 1);
#pragma unroll
        for (u32 t = 0; t < TASKS; t++) {
          if (!EARLY) load(t, step);
          float z[2][8];
          run[t][0].get(z[0]), run[t][1].get(z[1]);
#pragma unroll
          for (int i = 0; i < 8; i++) z[0][i] *= __uint_as_float(g[i]), z[1][i] *= __uint_as_float(g[i]);
          float sum[3] = {};
#pragma unroll
          for (int i = 0; i < 8; i++) sum[0] += z[0][i] * z[0][i], sum[1] += z[1][i] * z[1][i], sum[2] += z[0][i] * z[1][i];
#pragma unroll
          for (u32 i = 0; i < 3; i++) sums[t][i] += sum[i];
#pragma unroll
          for (u32 i = 0; i < 2; i++)  // lanes past the last pair have another's channels, and leave nothing
            if (PAIRS % 32 == 0 || (group + t * AT_ONCE) * 32 + lane < PAIRS) store_f16(target + (raw[t][i] >> 7 << 6) + (chunk << 4 ^ (raw[t][i] >> 4 & 0x30)), z[i], sums[t][3 + i]);
        }
        release(CTAS == 2 ? pipe.made(to.stage) : pipe.ready(to.stage), lane);
        to.next();
      }
      __syncwarp();
      ptx::mbarrier_arrive_if(pipe.used(from.stage), ptx::arrives(lane));
    }
    // The four warps of a pair.
#pragma unroll
    for (u32 t = 0; t < TASKS; t++) pipe.scratch().put(chunk, (group + t * AT_ONCE) * 32 + lane, sums[t]);
    ptx::named_barrier_sync<1, CONVERTERS * 32>();
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
#pragma unroll
    for (u32 t = 0; t < TASKS; t++) {
      const u32 pair = (group + t * AT_ONCE) * 32 + lane;
      if (chunk != 0 || pair >= PAIRS) continue;
      float total[5];
      pipe.scratch().get(pair, total);
      ChannelPart* out = parts + (segment.stat + (CTAS == 2 ? pipe.rank * 256 : 0) + pair / HALF * N);
      u32 a, b;
      pair_channels(pair % HALF, rotary, interleaved, a, b);
      *(float4*)(out + a) = make_float4(total[0] * back, total[2] * back, total[3] * back, 0.f);
      *(float4*)(out + b) = make_float4(total[1] * back, total[2] * back, total[4] * back, 0.f);
    }
    ptx::named_barrier_sync<1, CONVERTERS * 32>();
  }
}

// t = acc + sum into sum = bf16(t) and acc = t - sum.
template <int COUNT> __device__ __forceinline__ void fold(float (&acc)[COUNT], u32 (&sum)[COUNT / 2]) {
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) {
    const float low = acc[2 * i] + bf16_low(sum[i]), high = acc[2 * i + 1] + bf16_high(sum[i]);
    sum[i] = ptx::bf16x2(low, high);
    acc[2 * i] = low - bf16_low(sum[i]), acc[2 * i + 1] = high - bf16_high(sum[i]);
  }
}
// One 64 x 64 block; `sum` and `acc` from the block's first value.
__device__ __forceinline__ void store_block(float* out, const float* acc, const u32* sum, float back) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  out += (warp * 16 + lane / 4) * 64 + (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < 16; i++)
    *(float2*)(out + i % 2 * 8 * 64 + i / 2 * 8) =
        make_float2((acc[2 * i] + bf16_low(sum[i])) * back, (acc[2 * i + 1] + bf16_high(sum[i])) * back);
}

// What a warpgroup multiplies: slab `left` by slabs `right` and the one after it (wide), slab by slab (narrow); and where the
// blocks go.
struct Products {
  u32 left, right, block;
  u32 narrow_left, narrow_right, narrow_block;
};

template <int N> using Product = ptx::Wgmma<ptx::Operand::F16, N>;

template <bool WIDE, bool NARROW>
__device__ __forceinline__ void multiply(const Segment* segments, const u32* shares, const float2* scales, float* partials,
                                         const Products& at) {
  const Stages pipe;
  const u32 begin = shares[blockIdx.x / CTAS], end = shares[blockIdx.x / CTAS + 1];
  const u32 lane = threadIdx.x & 31;
  constexpr u32 SLAB = 64 * STEP * 2;
  const u32 other_done = CTAS == 2 ? ptx::map_shared(pipe.done(0), pipe.rank ^ 1) : 0;
  auto release_stage = [&](u32 stage) {
    ptx::mbarrier_arrive_if(pipe.done(stage), ptx::arrives(lane));
    if (CTAS == 2) ptx::mbarrier_arrive_cluster_if(other_done + stage * 8, ptx::arrives(lane));
  };
  float wide[WIDE ? 64 : 2], narrow[NARROW ? 32 : 2];
  u32 wide_sum[WIDE ? 32 : 1], narrow_sum[NARROW ? 16 : 1];
  Ring<STAGES> ring;
  for (u32 s = begin; s < end; s++) {
    const Segment segment = segments[s];
#pragma unroll
    for (int i = 0; i < (WIDE ? 64 : 2); i++) wide[i] = 0.f, wide_sum[i / 2] = 0;
#pragma unroll
    for (int i = 0; i < (NARROW ? 32 : 2); i++) narrow[i] = 0.f, narrow_sum[i / 2] = 0;
    const u32 stages = (segment.last - segment.first) * STEPS;
    for (u32 first = 0; first < stages; first += FLUSH) {
      const u32 count = min(FLUSH, stages - first);
      for (u32 t = 0; t < count; t++) {
        ptx::mbarrier_wait(pipe.ready(ring.stage), ring.phase);
        // The same in all lanes, and said so: what is made of it is made once a warp.
        const u32 stage = __shfl_sync(0xffffffffu, pipe.operands(ring.stage), 0);
        if (WIDE) ptx::keep(wide);
        if (NARROW) ptx::keep(narrow);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 slice = 0; slice < CTAS; slice++)
#pragma unroll
          for (u32 k = 0; k < 2; k++) {
            // Rows of 64 bytes, a slab of 64 rows after the other.
            const u64 base = ptx::wgmma_advance(ptx::wgmma_descriptor(stage, 512, 512, ptx::Swizzle::B64), slice * SLICE_BYTES + k * 32);
            auto slab = [&](u32 i) { return base + i * (SLAB / 16); };
            if constexpr (WIDE && START >= 96) Product<128>::ss<false, false>(wide, slab(at.left), slab(at.right), 1);
            // The larger product asks for more registers than a thread starts with.
            if constexpr (WIDE && START < 96) {
              Product<64>::ss<false, false>(*(float(*)[32])wide, slab(at.left), slab(at.right), 1);
              Product<64>::ss<false, false>(*(float(*)[32])(wide + 32), slab(at.left), slab(at.right) + SLAB / 16, 1);
            }
            if constexpr (NARROW) Product<64>::ss<false, false>(narrow, slab(at.narrow_left), slab(at.narrow_right), 1);
          }
        ptx::wgmma_commit();
        // Released at once: with few stages the next products may wait for it.
        ptx::wgmma_wait<0>();
        release_stage(ring.stage);
        ring.next();
      }
      if (WIDE) ptx::keep(wide);
      if (NARROW) ptx::keep(narrow);
      if constexpr (WIDE) fold(wide, wide_sum);
      if constexpr (NARROW) fold(narrow, narrow_sum);
    }
    const float scale = scales[segment.projection].x, back = 1.f / (scale * scale);
    float* out = partials + (size_t)segment.slot * BLOCKS * 4096;
    if constexpr (WIDE) {
      store_block(out + at.block * 4096, wide, wide_sum, back);
      store_block(out + (at.block + 1) * 4096, wide + 32, wide_sum + 16, back);
    }
    if constexpr (NARROW)
      if (HEADS == 1 || at.narrow_block < segment.heads) store_block(out + at.narrow_block * 4096, narrow, narrow_sum, back);
  }
}

__device__ __forceinline__ constexpr u32 block_of(u32 i, u32 j) { return HEADS == 2 ? i : i * SLABS - i * (i - 1) / 2 + j - i; }

extern "C" __global__ void
#if D_HEAD > 128
__cluster_dims__(2, 1, 1)
#endif
__launch_bounds__(THREADS, 1)
    scale_grams_wide(const Segment* segments, const Projection* projections, float* partials, const u32* shares,
                     const TensorMap* maps, const float* gains, const float2* scales, u32 gain_tiles, ChannelPart* parts,
                     ChannelStats*) {
  if (threadIdx.x == 0) {
    const Stages pipe;
    for (u32 s = 0; s < RAW_STAGES; s++) ptx::mbarrier_init(pipe.full(s), 1), ptx::mbarrier_init(pipe.used(s), CONVERTERS * ptx::kWarpArrivals);
    for (u32 s = 0; s < STAGES; s++) {
      ptx::mbarrier_init(pipe.made(s), CONVERTERS * ptx::kWarpArrivals);
      ptx::mbarrier_init(pipe.ready(s), CTAS == 2 ? 1 : CONVERTERS * ptx::kWarpArrivals);
      ptx::mbarrier_init(pipe.done(s), CTAS * MULTIPLIERS * ptx::kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  if (CTAS == 2) ptx::cluster_sync();
  else __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const u32 group = threadIdx.x / 128, rank = Stages().rank;
  if (group == 0) {
    set_registers<FIRST>();
    // Block 0 has the first row of blocks, and with four slabs the last; block 1 the rest.
    if constexpr (SLABS == 4)
      multiply<true, true>(segments, shares, scales, partials,
                           rank ? Products{1, 1, block_of(1, 1), 1, 3, block_of(1, 3)} : Products{0, 0, block_of(0, 0), 3, 3, block_of(3, 3)});
    else if constexpr (HEADS == 1)
      multiply<true, false>(segments, shares, scales, partials, {rank, rank, block_of(rank, rank), 0, 0, 0});
    else
      multiply<false, true>(segments, shares, scales, partials, {0, 0, 0, 0, 0, 0});
  } else if (group == 1) {
    set_registers<SECOND>();
    if constexpr (SLABS == 4)
      multiply<true, false>(segments, shares, scales, partials,
                            rank ? Products{2, 2, block_of(2, 2), 0, 0, 0} : Products{0, 2, block_of(0, 2), 0, 0, 0});
    else if constexpr (SLABS == 3)
      multiply<false, true>(segments, shares, scales, partials, {0, 0, 0, 2 * rank, 2, block_of(2 * rank, 2)});
    else
      multiply<false, true>(segments, shares, scales, partials, {0, 0, 0, 1, 1, block_of(1, 1)});
  } else if (group < THREADS / 128 - 1) {
    set_registers<CONVERTING>();
    convert(segments, shares, projections, scales, parts);
  } else {
    set_registers<COPYING>();
    if (threadIdx.x % 128 == 0) load_tiles(segments, shares, maps, gains, gain_tiles);
    if (CTAS == 2 && threadIdx.x % 128 == 32) send_slices(segments, shares);
  }
  // Neither block leaves while the other may still reach its memory.
  if (CTAS == 2) ptx::cluster_sync();
}
