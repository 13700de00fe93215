// Last kernel of the attention backward: dQ from its f32 sums to BF16, and the sinks' gradients.
//
// A block owns a tile of kRows queries of one head. Layouts: backward.cuh. Grid (q_tiles * heads_q, batch); VARLEN: (.., 1). RING: the
// sinks' gradients are left, grid (heads_q).
#include "attention/backward_dq.cuh"
#include "ptx/launch.cuh"

#if SINK
namespace {

// dsink = -sum exp(sink - LSE) delta over the rows of a query head; their parts in a fixed order.
__device__ __forceinline__ void add_sink(const Backward& p, int head) {
  __shared__ float sums[256];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < (VARLEN ? 1 : p.batch) * p.q_tiles; i += 256)
    sum += p.sink_parts[tile_index(p, i / p.q_tiles, head, i % p.q_tiles)];
  sums[threadIdx.x] = sum;
  for (int n = 128; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
  }
  if (threadIdx.x == 0) p.d_sinks[head] = -sums[0];
}

}  // namespace
#endif

extern "C" __global__ void __launch_bounds__(256)
attention_backward_finish(const __grid_constant__ Backward p) {
  ptx::griddepcontrol_wait();
  const int number = blockIdx.x / p.heads_q, head = blockIdx.x - number * p.heads_q;
#if SINK
  if (number == 0 && blockIdx.y == 0) add_sink(p, head);
#endif
#if !RING
#if VARLEN
  const Slot slot = slot_at(p.sequences.q_starts, p.sequences.count, p.batch * p.len_q, kRows, number);
  const int rows = rows_to_next(p.sequences.q_starts, p.sequences.count, p.batch * p.len_q, slot.sequence);
#else
  const Slot slot = {(int)blockIdx.y, number};
  const int rows = p.len_q;
#endif
  const Sequence sequence = sequence_of(p, slot.sequence);
  const float scale = dq_scale(p, sequence, head / (p.heads_q / p.heads_kv));
  float* sums = p.dq_sum + tile_index(p, blockIdx.y, head, number) * kSumFloats;
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const float4* from = dq_sums(sums, part);
    float4 sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = from[32 * i];
    const float* quant = p.terms + tile_index(p, blockIdx.y, head, number) * kTermFloats + kQuantTerm * kRows;
    store_dq(p, sequence, head, slot.tile, rows, part, sum, scale, quant);
  }
#endif
}
