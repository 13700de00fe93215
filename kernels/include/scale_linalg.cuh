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

// Sums of two values over the block, the same bits in every thread. `scratch`: 8 pairs.
__device__ __forceinline__ double2 block_sum2(double a, double b, double2* scratch) {
#pragma unroll
  for (int step = 16; step; step >>= 1) a += __shfl_xor_sync(0xffffffffu, a, step), b += __shfl_xor_sync(0xffffffffu, b, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = make_double2(a, b);
  __syncthreads();
  double2 total = make_double2(0, 0);
#pragma unroll
  for (u32 w = 0; w < THREADS / 32; w++) total.x += scratch[w].x, total.y += scratch[w].y;
  return total;
}
__device__ __forceinline__ double block_sum(double v, double2* scratch) { return block_sum2(v, 0.0, scratch).x; }

// How a block splits the rows of a matrix: `lanes` threads share a row, 256 at 16 rows down to 1 at 256.
struct Rows {
  u32 row, lane, lanes;
  __device__ __forceinline__ explicit Rows(u32 r) {
    const u32 span = r <= 64 ? 64 : r <= 128 ? 128 : 256;
    row = threadIdx.x % span, lane = threadIdx.x / span, lanes = THREADS / span;
  }
};

// y = A x. `parts`: THREADS values. Ends with a barrier.
template <class T> __device__ void multiply(const T* a, const T* x, T* y, T* parts, u32 r) {
  const Rows rows(r);
  T s = 0;
  if (rows.row < r) {
    const u32 i = rows.row;
    const T* row = a + packed(i, 0);
    u32 j = rows.lane;
#pragma unroll 4
    for (; j <= i; j += rows.lanes) s += row[j] * x[j];
    u32 at = packed(j, i);
#pragma unroll 4
    for (; j < r; j += rows.lanes) {
      s += a[at] * x[j];
      at += rows.lanes * j + rows.lanes * (rows.lanes + 1) / 2;
    }
  }
  parts[threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.x < r) {
    const u32 span = THREADS / rows.lanes;
    T sum = 0;
    for (u32 l = 0; l < rows.lanes; l++) sum += parts[l * span + threadIdx.x];
    y[threadIdx.x] = sum;
  }
  __syncthreads();
}

// Power iteration on a positive semidefinite A from x; returns the Rayleigh quotient, a lower bound of the largest
// eigenvalue. x becomes the last unit vector.
template <class T> __device__ double power(const T* a, T* x, T* y, T* parts, u32 r, int steps, double2* scratch) {
  double rho = 0;
  for (int step = 0; step < steps; step++) {
    multiply(a, x, y, parts, r);
    const double yi = threadIdx.x < r ? (double)y[threadIdx.x] : 0.0, xi = threadIdx.x < r ? (double)x[threadIdx.x] : 0.0;
    const double2 sums = block_sum2(xi * yi, yi * yi, scratch);
    if (!(sums.y > 0.0)) break;
    rho = sums.x;
    if (threadIdx.x < r) x[threadIdx.x] = (T)(yi * rsqrt(sums.y));
    __syncthreads();
  }
  return rho;
}

// Cholesky of the packed lower triangle, in place; false as soon as a pivot is not positive. Divisions are products with
// a rounded inverse: the backward error is at most (r + 3) u tr A. `panel`: r * PANEL values.
template <class T> __device__ bool cholesky(T* a, u32 r, T* panel) {
  __shared__ int failed;
  __shared__ T inverses[PANEL];
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
        if (lane == 0) inverses[c] = inverse;
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
        row[c] = s * inverses[c];
      }
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) a[packed(i, k + c)] = panel[c * r + i] = row[c];
    }
    __syncthreads();
    // Update what is left, two rows a thread at a time.
    for (u32 i = k + PANEL + ty; i < r; i += 32) {
      const u32 i2 = i + 16;
      T left[PANEL], left2[PANEL];
#pragma unroll
      for (u32 c = 0; c < PANEL; c++) left[c] = panel[c * r + i], left2[c] = i2 < r ? panel[c * r + i2] : (T)0;
      const u32 last = i2 < r ? i2 : i;
#pragma unroll 1
      for (u32 j = k + PANEL + tx; j <= last; j += 16) {
        T s = 0, s2 = 0;
#pragma unroll
        for (u32 c = 0; c < PANEL; c++) {
          const T right = panel[c * r + j];
          s += left[c] * right, s2 += left2[c] * right;
        }
        if (j <= i) a[packed(i, j)] -= s;
        if (i2 < r) a[packed(i2, j)] -= s2;
      }
    }
    __syncthreads();
  }
  return true;
}

}  // namespace linalg
