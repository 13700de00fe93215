// dQ of a tile in BF16 from its f32 sums. Layouts: backward.cuh.
#pragma once
#include "attention/backward.cuh"
#include "ptx/convert.cuh"

// What the sums of dQ are multiplied by.
__device__ __forceinline__ float dq_scale(const Backward& p, const Sequence& sequence, int kv_head) {
  return p.softmax_scale * descale_of(p.k_descale, p.k_descale_strides, sequence.batch_k, kv_head) *
         descale_of(p.v_descale, p.v_descale_strides, sequence.batch_k, kv_head);
}
// A thread's sums of one part of a tile.
__device__ __forceinline__ float4* dq_sums(float* tile, int part) {
  return reinterpret_cast<float4*>(tile + 8192 * part) + 256 * (threadIdx.x / 32) + threadIdx.x % 32;
}
// Stores them, by 256 threads in the order of the consumers. `rows`: of the sequence, and of the gap behind it, which gets zeros. DQ8: `quant`
// is what the rows of the tile were multiplied by.
__device__ __forceinline__ void store_dq(const Backward& p, const Sequence& sequence, int head, int tile, int rows, int part,
                                         const float4 (&sum)[8], float scale, [[maybe_unused]] const float* quant = nullptr) {
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128, quad = thread % 4;
  const int batch = sequence.batch_q, first_query = kFeatures ? sequence.first_query(p) : 0;
  // Consumers share the columns of a tile of 64 rows, or the rows of one of 128
  const int column = kRows == 64 ? 64 * (2 * part + consumer) : 0;
  const int row = tile * kRows + (kRows == 64 ? 0 : 64 * consumer) + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
#if DQ8
    // The exact inverse of a power of two
    const float of_row = scale * __int_as_float(0x7f000000 - __float_as_int(quant[row + 8 * r - tile * kRows]));
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
      const int at = row + 8 * r, from = column + 32 * c + 8 * quad;
      if (at >= rows || (FILL && from >= p.d)) continue;
      uint4 x = make_uint4(a[0], a[1], a[2], a[3]);
      int in_batch = batch, in_row = at;
#if VARLEN
      // NOTES: a gap may reach over the end of a row of the batch.
      in_row += sequence.q_row + batch * p.len_q;
      in_batch = in_row / p.len_q, in_row -= in_batch * p.len_q;
#endif
      if (kFeatures && (at >= sequence.len_q || at < first_query)) x = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(row_of(p.dq, p.dq_strides, in_batch, in_row, head) + from) = x;
    }
  }
}
