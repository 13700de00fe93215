// Last kernel of the attention backward: dQ from its f32 sums to BF16, over the Q that `backward_prepare` left there.
//
// A block owns a tile of kRows queries of one head. Layouts: backward.cuh. Grid (q_tiles * heads_q, batch).
#include "attention/backward.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"

extern "C" __global__ void __launch_bounds__(256)
attention_backward_finish(const __grid_constant__ Backward p) {
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x / p.heads_q, head = blockIdx.x - tile * p.heads_q, batch = blockIdx.y;
  const int kv_head = head / (p.heads_q / p.heads_kv);
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128, quad = thread % 4;
  const float scale = p.softmax_scale * descale_of(p.k_descale, p.k_descale_strides, batch, kv_head) *
                      descale_of(p.v_descale, p.v_descale_strides, batch, kv_head);

  const float4* from = reinterpret_cast<const float4*>(p.dq_sum + tile_index(p, batch, head, tile) * kSumFloats) + 256 * (threadIdx.x / 32) + thread % 32;
  float4 sum[8];
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = from[32 * i];

  // Consumers share the columns of a tile of 64 rows, or the rows of one of 128
  const int column = kRows == 64 ? 64 * consumer : 0, row = tile * kRows + (kRows == 64 ? 0 : 64 * consumer) + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      u32 a[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4& x = sum[4 * c + j];
        a[j] = r == 0 ? ptx::bf16x2(x.x * scale, x.y * scale) : ptx::bf16x2(x.z * scale, x.w * scale);
      }
      quad_transpose(a, quad);
      if (row + 8 * r < p.len_q)
        *reinterpret_cast<uint4*>(row_of(p.dq, p.dq_strides, batch, row + 8 * r, head) + column + 32 * c + 8 * quad) =
            make_uint4(a[0], a[1], a[2], a[3]);
    }
  }
}
