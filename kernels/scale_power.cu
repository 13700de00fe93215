// One implicit power step per head that reads each weight once: y <- G_K (G_Q y), G = W^T diag(g^2) W, never formed.
//
// The two products of one weight are fused over the model dimension: for a range of input channels u_i = g_i^2 w_i . y is
// complete, so y'_c = sum_i w_ic u_i can start from the same tile. Tiles of one head and 256 input channels come through
// three stages of shared memory; every thread copies what it alone reads back (8 channels of a warp, 8 input channels of a
// lane). A K head serves all query heads of its group from one load (no expansion). The parts of y' are summed in order
// by scale_power_reduce.
//
// BF16, [out, in], d_head 64 or 128 (macro D_HEAD). The estimate is a lower bound; the mean is kept.
#include "scale_types.cuh"

#ifndef D_HEAD
#define D_HEAD 128
#endif
constexpr int ROWS = 8, WARPS = D_HEAD / ROWS;

struct PowerBlock {
  u32 projection;
  u32 head;     // of the projection
  u32 vector;   // first vector (query head, counted over the model) it multiplies
  u32 count;    // vectors: 1 for q, the group for k
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

constexpr u32 THREADS = WARPS * 32, STAGES = 3;
constexpr u32 STAGE_BYTES = THREADS * ROWS * 16;

// 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool in) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
}

// Sums eight values over the warp at once: lane l returns value l / 4.
template <int WIDTH> __device__ __forceinline__ void fold(float (&v)[8]) {
  const bool upper = threadIdx.x & (WIDTH * 4);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const float mine = upper ? v[i + WIDTH] : v[i], theirs = upper ? v[i] : v[i + WIDTH];
    v[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, WIDTH * 4);
  }
}

// A persistent grid; items are (head, range), an equal run of them a block. parts: [vector][range][D_HEAD].
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    scale_power(const Projection* projections, const PowerBlock* blocks, u32 items, const float* y, float* parts, u32 raw) {
  extern __shared__ u8 tiles[];
  __shared__ float partial[WARPS][256];
  __shared__ float vector[D_HEAD];
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ranges = (projections[0].d_model + 255) / 256;
  const u32 first = (u32)((u64)items * blockIdx.x / gridDim.x), last = (u32)((u64)items * (blockIdx.x + 1) / gridDim.x);
  const u32 base = (u32)__cvta_generic_to_shared(tiles) + threadIdx.x * 16;

  auto load = [&](u32 item, u32 stage) {
    if (item < last) {
      const PowerBlock block = blocks[item / ranges];
      const Projection& p = projections[block.projection];
      const u32 k = item % ranges * 256 + lane * 8;
      const bool in = k < p.d_model;
      const u16* from = (const u16*)p.weight + p.row_stride * (i64)(block.head * D_HEAD + warp * ROWS) + (in ? k : 0);
#pragma unroll
      for (u32 r = 0; r < ROWS; r++)
        copy16(base + stage * STAGE_BYTES + r * THREADS * 16, from + p.row_stride * r, in);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(first, 0), load(first + 1, 1);
  u32 stage = 0;
  for (u32 item = first; item < last; item++) {
    const u32 ahead = stage == 0 ? 2 : stage - 1;
    load(item + 2, ahead);
    const PowerBlock block = blocks[item / ranges];
    const Projection& p = projections[block.projection];
    const u32 range = item % ranges, mine = range * 256 + threadIdx.x;
    float square = 0.f;
    if (threadIdx.x < 256 && mine < p.d_model) {
      const float g = p.gain && !raw ? load_value(p.gain, p.vector_dtype, mine) + p.gain_offset : 1.f;
      square = g * g;
    }
    // This thread's own copies have landed; nobody else reads them.
    asm volatile("cp.async.wait_group 2;" ::: "memory");
    const uint4* tile = (const uint4*)(tiles + stage * STAGE_BYTES) + threadIdx.x;
#pragma unroll 1
    for (u32 v = 0; v < block.count; v++) {
      __syncthreads();
      if (threadIdx.x < D_HEAD) vector[threadIdx.x] = y[(size_t)(block.vector + v) * D_HEAD + threadIdx.x];
      __syncthreads();
      // u over this warp's channels, then over the warps.
      float u[8] = {};
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        Vector8<DTYPE_BF16> w;
        float x[8];
        w.raw = tile[r * THREADS], w.get(x);
        const float yr = vector[warp * ROWS + r];
#pragma unroll
        for (int i = 0; i < 8; i++) u[i] += x[i] * yr;
      }
      float4* to = (float4*)&partial[warp][lane * 8];
      to[0] = make_float4(u[0], u[1], u[2], u[3]), to[1] = make_float4(u[4], u[5], u[6], u[7]);
      __syncthreads();
      float sum = 0.f;
      if (threadIdx.x < 256)
#pragma unroll
        for (int q = 0; q < WARPS; q++) sum += partial[q][threadIdx.x];
      __syncthreads();
      if (threadIdx.x < 256) partial[0][threadIdx.x] = sum * square;
      __syncthreads();
      const float4 a = *(const float4*)&partial[0][lane * 8], b = *(const float4*)&partial[0][lane * 8 + 4];
      float dot[8];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        Vector8<DTYPE_BF16> w;
        float x[8];
        w.raw = tile[r * THREADS], w.get(x);
        dot[r] = x[0] * a.x + x[1] * a.y + x[2] * a.z + x[3] * a.w + x[4] * b.x + x[5] * b.y + x[6] * b.z + x[7] * b.w;
      }
      fold<4>(dot), fold<2>(dot), fold<1>(dot);
      dot[0] += __shfl_xor_sync(0xffffffffu, dot[0], 2);
      dot[0] += __shfl_xor_sync(0xffffffffu, dot[0], 1);
      float* out = parts + ((size_t)(block.vector + v) * ranges + range) * D_HEAD + warp * ROWS;
      if ((lane & 3) == 0) out[lane >> 2] = dot[0];
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
}

// y' = sum of the parts of one vector. After the second product (`finish`) it is normalised and
// sigma = sqrt(||G_K G_Q y|| / ||y||); a zero vector is left as it is, with sigma 0. A block a vector, a thread a channel.
extern "C" __global__ void __launch_bounds__(D_HEAD)
    scale_power_reduce(const float* parts, u32 ranges, float* y, float* sigma, u32 finish) {
  __shared__ float squares[D_HEAD / 32];
  const float* from = parts + (size_t)blockIdx.x * ranges * D_HEAD + threadIdx.x;
  float sum = 0.f;
#pragma unroll 8
  for (u32 range = 0; range < ranges; range++) sum += from[(size_t)range * D_HEAD];
  if (finish) {
    const float part = warp_sum(sum * sum);
    if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = part;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < D_HEAD / 32; w++) total += squares[w];
    const float norm = sqrtf(total);
    if (norm > 0.f) sum /= norm;
    if (threadIdx.x == 0) sigma[blockIdx.x] = sqrtf(norm);
  }
  y[(size_t)blockIdx.x * D_HEAD + threadIdx.x] = sum;
}
