// Norms of every V channel of a model, and its bias: what the descales of v and o take where the norm has neither mean nor
// shift. 16-bit weights stored [out, in] (macro F16). Hopper.
//
// A pure read that runs beside the certificates of Q and K, which wait for themselves and leave the memory alone: a block a
// multiprocessor, with a quarter of its registers, that stays until all is read. It takes a run of tiles, each 32 channels; a
// warp copies 256 input channels of them at a time, eight warps have four channels each. Sums run in f32 over at most 32 values
// and beyond in f64, in a fixed order.
#include "scale_ptx.cuh"

#ifndef F16
#define F16 0
#endif

constexpr u32 WARPS = 8, ROWS = 4, TILE_ROWS = WARPS * ROWS;
constexpr u32 CHUNK = 256, ROW_BYTES = CHUNK * 2, STAGE_BYTES = TILE_ROWS * ROW_BYTES, STAGES = 6;
constexpr u32 FOLD = 4;  // chunks whose sums meet in f32
// The host's number: the ring and its barriers.
static_assert(STAGES * (STAGE_BYTES + 16) <= 98432, "shared memory");

__device__ __forceinline__ uint4 load16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// Projections are Q, K and V of a layer, one layer behind the other, each with `rows` channels of V; `gains` as scale_gains.cu
// leaves them, `tiles` runs of 128 a projection; `maps` bring 32 channels by 256 input channels.
extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 4)  // the certificates have what is left of the registers
    scale_values(const Projection* projections, u64 maps, const float* gains, u32 tiles, u32 layers, u32 rows, ChannelStats* stats) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 ring = ptx::shared_address(shared), full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) ptx::barrier_init(full + s * 8, 1), ptx::barrier_init(empty + s * 8, WARPS * ptx::ARRIVALS);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  // A run of tiles, so that a block meets the gains of few layers.
  const u32 of_layer = (rows + TILE_ROWS - 1) / TILE_ROWS, chunks = (tiles + 1) / 2;
  const u64 total = (u64)layers * of_layer;
  const u32 begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  u32 stage = 0, phase = 0;
  auto next = [&] {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  };

  if (warp == WARPS) {
    // Weights may be read ahead of the wait: whatever wrote them was over when the launch in front started.
    if (lane) return;
    const u64 once = ptx::read_once();
    for (u32 tile = begin; tile < end; tile++) {
      const u64 map = maps + (tile / of_layer * 3 + 2) * 256ull;
      if (tile == begin || tile % of_layer == 0) ptx::take_map(map);
      for (u32 chunk = 0; chunk < chunks; chunk++, next()) {
        ptx::barrier_wait(empty + stage * 8, phase ^ 1);
        ptx::barrier_expect(full + stage * 8, STAGE_BYTES);
        ptx::copy_tile(ring + stage * STAGE_BYTES, map, chunk * CHUNK, tile % of_layer * TILE_ROWS, full + stage * 8, once);
      }
    }
    return;
  }
  // What comes next reads nothing that is written here before it has waited.
  wait_for_previous();
  let_next_start();
  for (u32 tile = begin; tile < end; tile++) {
    const u32 projection = tile / of_layer * 3 + 2;
    const float* gain = gains + (size_t)projection * tiles * 128;
    double norms[ROWS] = {};
    float sums[ROWS] = {};
    for (u32 chunk = 0; chunk < chunks; chunk++, next()) {
      const u32 k = chunk * CHUNK + lane * 8;
      float4 low = {0.f, 0.f, 0.f, 0.f}, high = low;
      if (k < tiles * 128) low = __ldg((const float4*)(gain + k)), high = __ldg((const float4*)(gain + k) + 1);
      const float g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      ptx::barrier_wait(full + stage * 8, phase);
      const u32 from = ring + stage * STAGE_BYTES + warp * ROWS * ROW_BYTES + lane * 16;
#pragma unroll
      for (u32 r = 0; r < ROWS; r++) {
        Vector8<F16 ? DTYPE_F16 : DTYPE_BF16> values;
        float w[8];
        values.raw = load16(from + r * ROW_BYTES), values.get(w);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float y = g[i] * w[i];
          sums[r] += y * y;
        }
      }
      ptx::hand_over(empty + stage * 8, lane);
      if (chunk % FOLD == FOLD - 1 || chunk + 1 == chunks)
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) norms[r] += sums[r], sums[r] = 0.f;
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
      for (int by = 16; by; by >>= 1) norms[r] += __shfl_xor_sync(0xffffffffu, norms[r], by);
    const u32 row = tile % of_layer * TILE_ROWS + warp * ROWS + lane;
    if (lane < ROWS && row < rows) {
      const Projection& p = projections[projection];
      const float norm = (float)(lane == 0 ? norms[0] : lane == 1 ? norms[1] : lane == 2 ? norms[2] : norms[3]);
      const float bias = p.bias ? load_value(p.bias, p.vector_dtype, row) : 0.f;
      float4* out = (float4*)(stats + p.stat_row + row);
      out[0] = make_float4(norm, norm, 0.f, bias);
      out[1] = make_float4(fabsf(bias), 0.f, 0.f, 0.f);
    }
  }
}
