// Last kernel of the attention backward: dQ from its f32 sums to BF16, and the sinks' gradients.
//
// A block owns a tile of kRows queries of one head. Layouts: backward.cuh. Grid (q_tiles * heads_q, batch); VARLEN: (.., 1).
#include "attention/backward.cuh"
#include "ptx/convert.cuh"
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
#if VARLEN
  const Slot slot = slot_at(p.sequences.q_starts, p.sequences.count, p.batch * p.len_q, kRows, number);
  const int rows = rows_to_next(p.sequences.q_starts, p.sequences.count, p.batch * p.len_q, slot.sequence);
#else
  const Slot slot = {(int)blockIdx.y, number};
  const int rows = p.len_q;
#endif
  const Sequence sequence = sequence_of(p, slot.sequence);
  const int tile = slot.tile, batch = sequence.batch_q, first_query = kFeatures ? sequence.first_query(p) : 0;
  const int kv_head = head / (p.heads_q / p.heads_kv), thread = threadIdx.x % 128, consumer = threadIdx.x / 128, quad = thread % 4;
  const float scale = p.softmax_scale * descale_of(p.k_descale, p.k_descale_strides, sequence.batch_k, kv_head) *
                      descale_of(p.v_descale, p.v_descale_strides, sequence.batch_k, kv_head);

  const i64 index = tile_index(p, blockIdx.y, head, number);
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const float* of_part = p.dq_sum + index * kSumFloats + 8192 * part;
    const float4* from = reinterpret_cast<const float4*>(of_part) + 256 * (threadIdx.x / 32) + thread % 32;
    float4 sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = from[32 * i];

    // Consumers share the columns of a tile of 64 rows, or the rows of one of 128
    const int column = kRows == 64 ? 64 * (2 * part + consumer) : 0;
    const int row = tile * kRows + (kRows == 64 ? 0 : 64 * consumer) + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#if DQ8
      // The exact inverse of the power of two that the row was multiplied by
      const float quant = p.terms[index * kTermFloats + kQuantTerm * kRows + row + 8 * r - tile * kRows];
      const float of_row = scale * __int_as_float(0x7f000000 - __float_as_int(quant));
#else
      const float of_row = scale;
#endif
#pragma unroll
      for (int c = 0; c < 2; c++) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4& x = sum[4 * c + j];
          a[j] = r == 0 ? ptx::bf16x2(x.x * of_row, x.y * of_row) : ptx::bf16x2(x.z * of_row, x.w * of_row);
        }
        quad_transpose(a, quad);
        // The gap after a sequence gets zeros
        const int at = row + 8 * r, column_of_quad = column + 32 * c + 8 * quad;
        if (at >= rows || (FILL && column_of_quad >= p.d)) continue;
        uint4 x = make_uint4(a[0], a[1], a[2], a[3]);
        int in_batch = batch, in_row = at;
#if VARLEN
        // NOTES: a gap may reach over the end of a row of the batch.
        in_row += sequence.q_row + batch * p.len_q;
        in_batch = in_row / p.len_q, in_row -= in_batch * p.len_q;
#endif
        if (kFeatures && (at >= sequence.len_q || at < first_query)) x = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(row_of(p.dq, p.dq_strides, in_batch, in_row, head) + column_of_quad) = x;
      }
    }
  }
}
