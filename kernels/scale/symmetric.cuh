// A symmetric matrix of D_HEAD channels in registers, and its square on tensor cores: wgmma on Hopper, mma.sync elsewhere.
//
// Layout: the upper 64 x 64 blocks, each as the accumulator of a group of four warps: value 4 j + 2 h + e of lane 4 g + t of
// warp w is row 16 w + g + 8 h, column 8 j + 2 t + e. A group holds all blocks up to 128 channels, two of them above. Grams in
// device memory are the same blocks one after another, row-major. X in shared memory is both operands of X X^T: panels of 64
// columns, rows of 128 bytes in the 128-byte swizzle.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "scale/squarings.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#else
#define HOPPER 0
#endif

namespace spectrum {

constexpr u32 SLABS = (N + 63) / 64, SIDE = SLABS * 64, BLOCKS = SLABS * (SLABS + 1) / 2;
constexpr u32 HELD = N > 128 ? 2 : BLOCKS;  // blocks of a group
constexpr u32 THREADS = BLOCKS / HELD * 128, WARPS = THREADS / 32;
constexpr u32 PANEL_BYTES = SIDE * 128;
constexpr u32 STEPS = (N + 15) / 16;  // of the products, over the channels

struct Block {
  u32 i, j;
  __device__ __forceinline__ bool diagonal() const { return i == j; }
  __device__ __forceinline__ u32 number() const { return i * SLABS - i * (i - 1) / 2 + j - i; }
};
// Block b of a group: from the right above 128 channels, so that neighbours share a row but for the last.
__device__ __forceinline__ Block block_of(u32 group, u32 b) {
  if (N <= 128) return {b / 2, (b + 1) / 2};
  const u32 rows = SLABS == 4 ? 0b11'01'10'10'01'01'00'00'00'00 : 0b10'00'01'01'00'00;
  const u32 columns = SLABS == 4 ? 0b11'11'11'10'10'01'11'10'01'00 : 0b10'10'10'01'01'00;
  const u32 at = 4 * group + 2 * b;
  return {rows >> at & 3, columns >> at & 3};
}

// Columns of a group's block b that are held, in eights: up to 128 channels none outside the last step.
__device__ __forceinline__ constexpr u32 eights(u32 b) {
  const u32 left = 2 * STEPS - (b + 1) / 2 * 8;
  return N > 128 || left > 8 ? 8 : left;
}

struct Values {
  float v[HELD][32];
};

// f(value, next value, row, column of the first), for all values of this thread.
template <class F> __device__ __forceinline__ void for_each(Values& s, F f) {
  const u32 thread = N > 128 ? ptx::thread_index() : threadIdx.x, lane = thread & 31, r = thread / 32 % 4 * 16 + lane / 4, c = lane % 4 * 2;
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    const Block at = block_of(thread / 128, b);
#pragma unroll
    for (u32 j = 0; j < eights(b); j++) {
#pragma unroll
      for (u32 h = 0; h < 2; h++) f(s.v[b][4 * j + 2 * h], s.v[b][4 * j + 2 * h + 1], at.i * 64 + r + 8 * h, at.j * 64 + 8 * j + c);
      if (N > 128) __syncwarp();  // few loads of f at once: registers are short
    }
  }
}

// f(value, row, on): for the values where the diagonal may pass this thread, `on` where it does. The branch on the warp lets
// the values stay in registers.
template <u32 WARP, class F> __device__ __forceinline__ void diagonal_of_warp(Values& s, u32 thread, F f) {
  const u32 g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    const Block at = block_of(thread / 128, b);
    if (!at.diagonal()) continue;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 j = 2 * WARP + h, row = at.i * 64 + 8 * j + g;
      if (j >= eights(b)) continue;
      f(s.v[b][4 * j + 2 * h], row, g == 2 * t), f(s.v[b][4 * j + 2 * h + 1], row, g == 2 * t + 1);
    }
  }
}
template <class F> __device__ __forceinline__ void for_diagonal(Values& s, F f) {
  const u32 thread = ptx::thread_index();
  switch (thread / 32 % 4) {
    case 0: return diagonal_of_warp<0>(s, thread, f);
    case 1: return diagonal_of_warp<1>(s, thread, f);
    case 2: return diagonal_of_warp<2>(s, thread, f);
    default: return diagonal_of_warp<3>(s, thread, f);
  }
}

// The sum of `count` Grams of the same head, `stride` of them apart, in order.
template <bool FIRST> __device__ __forceinline__ void load_part(Values& s, const float* from, const u32 (&offset)[HELD]) {
#pragma unroll
  for (u32 b = 0; b < HELD; b++)
#pragma unroll
    for (u32 k = 0; k < 2 * eights(b); k++) {
      const float2* at = (const float2*)(from + offset[b] + k % 2 * 512 + k / 2 * 8);
      const float2 v = N > 128 ? *at : __ldg(at);  // a plain load stays on its side of the barrier below
      if (FIRST) s.v[b][2 * k] = v.x, s.v[b][2 * k + 1] = v.y;
      else s.v[b][2 * k] += v.x, s.v[b][2 * k + 1] += v.y;
      if (N > 128 && !FIRST && k % 2 == 1) __syncwarp();  // few loads at once: registers are short
    }
}
__device__ __forceinline__ void load(Values& s, const float* grams, u32 first, u32 stride, u32 count) {
  const u32 lane = threadIdx.x & 31, inside = (threadIdx.x / 32 % 4 * 16 + lane / 4) * 64 + lane % 4 * 2;
  u32 offset[HELD];
#pragma unroll
  for (u32 b = 0; b < HELD; b++) offset[b] = block_of(threadIdx.x / 128, b).number() * 4096;
  const float* from = grams + (size_t)first * BLOCKS * 4096 + inside;
  load_part<true>(s, from, offset);
#pragma unroll 1
  for (u32 part = 1; part < count; part++) load_part<false>(s, from += (size_t)stride * BLOCKS * 4096, offset);
}

// Zeros outside the head, where a Gram holds anything. Rows and columns come and go eight at a time.
__device__ __forceinline__ void clear_outside(Values& s) {
  constexpr u32 INSIDE = N / 8 - (SLABS - 1) * 8;  // of the eights of the last block
  const u32 thread = ptx::thread_index();
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    const Block at = block_of(thread / 128, b);
    if (at.j != SLABS - 1) continue;
#pragma unroll
    for (u32 i = 0; i < 4 * eights(b); i++) {
      const bool below = at.i == SLABS - 1 && thread / 32 % 4 * 2 + i / 2 % 2 >= INSIDE;
      s.v[b][i] = i / 4 >= INSIDE || below ? 0.f : s.v[b][i];
    }
  }
}

// Sums over the block of non-negative values below 2^32 units, as integers: one instruction per warp, and the same bits in any
// order. Includes a barrier; between two calls with the same scratch lies another.
struct Moments {
  float trace, squares;
};
template <int LARGEST> __device__ __forceinline__ Moments moments(Values& s, uint2* scratch, bool& finite, bool check) {
  constexpr float UNIT = LARGEST * 0x1p-32f, UNIT2 = LARGEST * UNIT;
  const u32 thread = ptx::thread_index();
  float trace = 0.f, squares = 0.f;
  for_diagonal(s, [&](float& x, u32, bool on) { trace += on ? x : 0.f; });
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (u32 i = 0; i < 4 * eights(b); i++) part[i & 1] += s.v[b][i] * s.v[b][i];
    squares += (block_of(thread / 128, b).diagonal() ? 1.f : 2.f) * (part[0] + part[1]);
  }
  const u32 a = ptx::warp_sum(__float2uint_rn(trace * (1.f / UNIT))), c = ptx::warp_sum(__float2uint_rn(squares * (1.f / UNIT2)));
  if (thread % 32 == 0) scratch[thread / 32] = make_uint2(a, c);
  if (check) finite = __syncthreads_and(squares < 1e30f);
  else __syncthreads();
  u32 traces = 0, sums = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w += 2) {
    const uint4 two = *(const uint4*)(scratch + w);
    traces += two.x + two.z, sums += two.y + two.w;
  }
  return {(float)traces * UNIT, (float)sums * UNIT2};
}

// Four 8 x 8 fragments to shared memory; lane 8 i + j gives the address of row j of fragment i, or of its column j.
template <bool TRANSPOSED> __device__ __forceinline__ void store_fragments(u32 address, const u32 (&v)[4]) {
#if HOPPER
  ptx::stmatrix<TRANSPOSED>(address, v[0], v[1], v[2], v[3]);
#else
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 row = __shfl_sync(0xffffffffu, address, 8 * i + lane / 4);
    ptx::st_shared_u32(row + lane % 4 * 4, TRANSPOSED ? ptx::movmatrix(v[i]) : v[i]);
  }
#endif
}

// Zeros in the rows of X that `store` leaves out and products read.
__device__ __forceinline__ void clear_rows(u32 x) {
  if (N > 64 && N <= 128)
    for (u32 i = STEPS * 16 * 8 + threadIdx.x; i < SIDE * 8; i += THREADS) ptx::st_shared_v4(x + i * 16, 0, 0, 0, 0);
}
// X = scale F16(P - shift I), both triangles. Ends behind a barrier. MEASURED: returns this thread's sum of squares of what
// rounding changed, times scale^-2.
template <bool MEASURED> __device__ __forceinline__ float store(Values& s, u32 x, float scale, float shift) {
  for_diagonal(s, [&](float& v, u32 i, bool on) { v -= on && i < N ? shift : 0.f; });
  const u32 thread = ptx::thread_index(), lane = thread & 31, warp = thread / 32 % 4, factor = ptx::f16x2(scale, scale);
  // Of four fragments, m / 2 says which eight columns, m % 2 which eight rows.
  const u32 m = lane / 8, g = lane % 8;
  const u32 rows = (warp * 16 + m % 2 * 8 + g) * 128 + ((m / 2 ^ g) << 4);
  const u32 columns = (m / 2 * 8 + g) * 128 + ((2 * warp + m % 2 ^ g) << 4);
  float changed = 0.f;
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    const Block at = block_of(thread / 128, b);
    float part = 0.f;
#pragma unroll
    for (u32 j = 0; j < eights(b); j += 2) {
      u32 packed[4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float low = s.v[b][4 * j + 2 * i], high = s.v[b][4 * j + 2 * i + 1];
        packed[i] = ptx::f16x2(low, high);
        if (MEASURED) {
          const float less = low - ptx::f32_from_f16((u16)packed[i]), more = high - ptx::f32_from_f16((u16)(packed[i] >> 16));
          part += less * less, part += more * more;
        }
        packed[i] = ptx::mul_x2<true>(packed[i], factor);
      }
      if (MEASURED) __syncwarp();  // few values at once: registers are short
      store_fragments<false>(x + (rows ^ j << 4) + at.j * PANEL_BYTES + at.i * 64 * 128, packed);
      if (!at.diagonal()) store_fragments<true>(x + columns + j * 1024 + at.i * PANEL_BYTES + at.j * 64 * 128, packed);
    }
    changed += (at.diagonal() ? 1.f : 2.f) * part;
  }
  if (HOPPER) ptx::fence_proxy_async();
  __syncthreads();
  return changed;
}

// P = X X^T.
__device__ __forceinline__ void square(Values& s, u32 x) {
#if HOPPER
  // Lower halves of the operands' descriptors; the upper one is the same for all.
  const u64 base = ptx::wgmma_descriptor(x, 1024, 1024, ptx::Swizzle::B128), upper = base >> 32 << 32;
  const u32 group = ptx::thread_index() / 128;
  u32 left[HELD], right[HELD];
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    const Block at = block_of(group, b);
    left[b] = (u32)base + at.i * 512, right[b] = (u32)base + at.j * 512;
    // The same in a warp, and known to be.
    if (N > 128) left[b] = __shfl_sync(0xffffffffu, left[b], 0), right[b] = __shfl_sync(0xffffffffu, right[b], 0);
    ptx::keep(s.v[b]);
  }
  ptx::wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < STEPS; k++)
#pragma unroll
    for (u32 b = 0; b < HELD; b++) {
      const u32 step = (k / 4 * PANEL_BYTES + k % 4 * 32) / 16;
      if constexpr (HELD == 3) {
        // Both blocks of the upper row at once read less shared memory.
        constexpr u32 WIDTH = N <= 96 ? 96 : 128;
        if (b == 0) ptx::Wgmma<ptx::Operand::F16, WIDTH>::ss<false, false>(*(float (*)[WIDTH / 2])s.v, upper | (left[0] + step), upper | (left[0] + step), k > 0);
        if (b < 2) continue;
      }
      ptx::Wgmma<ptx::Operand::F16, 64>::ss<false, false>(s.v[b], upper | (left[b] + step), upper | (right[b] + step), k > 0);
    }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (u32 b = 0; b < HELD; b++) ptx::keep(s.v[b]);
#else
  const u32 lane = threadIdx.x & 31, m = lane / 8, g = lane % 8, warp = threadIdx.x / 32 % 4;
  auto address = [&](u32 row, u32 chunk) { return x + chunk / 8 * PANEL_BYTES + row * 128 + ((chunk % 8 ^ row % 8) << 4); };
#pragma unroll
  for (u32 b = 0; b < HELD; b++) {
    const Block at = block_of(threadIdx.x / 128, b);
    float(&d)[8][4] = *(float(*)[8][4])s.v[b];
#pragma unroll
    for (u32 i = 0; i < 32; i++) s.v[b][i] = 0.f;
#pragma unroll 1
    for (u32 k = 0; k < STEPS; k++) {
      u32 rows[4];
      ptx::ldmatrix<false>(rows, address(at.i * 64 + warp * 16 + m % 2 * 8 + g, 2 * k + m / 2));
#pragma unroll
      for (u32 n = 0; n < eights(b) / 2; n++) {
        u32 columns[4];
        ptx::ldmatrix<false>(columns, address(at.j * 64 + n * 16 + m / 2 * 8 + g, 2 * k + m % 2));
        ptx::mma_f16(d[2 * n], rows, columns[0], columns[1]), ptx::mma_f16(d[2 * n + 1], rows, columns[2], columns[3]);
      }
    }
  }
#endif
}

}  // namespace spectrum
