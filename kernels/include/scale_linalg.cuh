// Small symmetric matrices in shared memory, one block each: packed lower triangle, power iteration, Cholesky.
#pragma once
#include "scale_types.cuh"

namespace linalg {

constexpr u32 THREADS = 256;
constexpr u32 PANEL = 8;

__device__ __forceinline__ u32 packed(u32 i, u32 j) { return i * (i + 1) / 2 + j; }
template <class T> __device__ __forceinline__ T symmetric(const T* a, u32 i, u32 j) {
  return i >= j ? a[packed(i, j)] : a[packed(j, i)];
}

// Sum over the block, the same bits in every thread. `scratch`: 8 values.
__device__ __forceinline__ double block_sum(double v, double* scratch) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  double total = 0;
#pragma unroll
  for (u32 w = 0; w < THREADS / 32; w++) total += scratch[w];
  return total;
}

// y = A x; one thread a row. Rows from the first thread on; ends with a barrier.
template <class T> __device__ void multiply(const T* a, const T* x, T* y, u32 r) {
  const u32 i = threadIdx.x;
  if (i < r) {
    T s0 = 0, s1 = 0;
    u32 j = 0;
    const T* row = a + packed(i, 0);
    for (; j + 1 <= i; j += 2) s0 += row[j] * x[j], s1 += row[j + 1] * x[j + 1];
    for (; j < r; j++) s0 += symmetric(a, i, j) * x[j];
    y[i] = s0 + s1;
  }
  __syncthreads();
}

// Power iteration on a positive semidefinite A from x; returns the Rayleigh quotient, a lower bound of the largest
// eigenvalue. x becomes the last unit vector.
template <class T> __device__ double power(const T* a, T* x, T* y, u32 r, int steps, double* scratch) {
  double rho = 0;
  for (int step = 0; step < steps; step++) {
    multiply(a, x, y, r);
    const double yi = threadIdx.x < r ? (double)y[threadIdx.x] : 0.0, xi = threadIdx.x < r ? (double)x[threadIdx.x] : 0.0;
    rho = block_sum(xi * yi, scratch);
    const double norm = sqrt(block_sum(yi * yi, scratch));
    if (!(norm > 0.0)) break;
    if (threadIdx.x < r) x[threadIdx.x] = (T)(yi / norm);
    __syncthreads();
  }
  return rho;
}

// Cholesky of the packed lower triangle, in place; false as soon as a pivot is not positive. `panel`: r * PANEL values.
template <class T> __device__ bool cholesky(T* a, u32 r, T* panel) {
  __shared__ int failed;
  if (threadIdx.x == 0) failed = 0;
  __syncthreads();
  const u32 tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  for (u32 k = 0; k < r; k += PANEL) {
    const u32 width = min(PANEL, r - k);
    // Factor the diagonal block, a lane a row.
    if (threadIdx.x < 32) {
      const u32 lane = threadIdx.x;
      T row[PANEL];
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) row[c] = lane < width && c <= lane ? a[packed(k + lane, k + c)] : (T)(c == lane);
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) {
        const T pivot = __shfl_sync(0xffffffffu, row[c], c);
        if (!(pivot > (T)0) && lane == 0) failed = 1;
        const T inverse = (T)1 / sqrt(pivot);
        row[c] *= inverse;
#pragma unroll
        for (u32 j = c + 1; j < PANEL; j++) {
          const T other = __shfl_sync(0xffffffffu, row[c], j);
          if (lane >= j) row[j] -= row[c] * other;
        }
      }
#pragma unroll
      for (u32 c = 0; c < PANEL; c++)
        if (lane < width && c <= lane) a[packed(k + lane, k + c)] = row[c];
    }
    __syncthreads();
    if (failed) return false;
    // Solve for the rows below, a thread a row.
    for (u32 i = k + PANEL + threadIdx.x; i < r; i += THREADS) {
      T row[PANEL];
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) {
        T s = a[packed(i, k + c)];
#pragma unroll
        for (u32 m = 0; m < c; m++) s -= row[m] * a[packed(k + c, k + m)];
        row[c] = s / a[packed(k + c, k + c)];
      }
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) a[packed(i, k + c)] = panel[i * PANEL + c] = row[c];
    }
    __syncthreads();
    // Update what is left.
    for (u32 i = k + PANEL + ty; i < r; i += 16) {
      T left[PANEL];
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) left[c] = panel[i * PANEL + c];
      for (u32 j = k + PANEL + tx; j <= i; j += 16) {
        T s = a[packed(i, j)];
#pragma unroll
        for (u32 c = 0; c < PANEL; c++) s -= left[c] * panel[j * PANEL + c];
        a[packed(i, j)] = s;
      }
    }
    __syncthreads();
  }
  return true;
}

}  // namespace linalg
