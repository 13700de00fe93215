// Pieces of the online softmax of `attention_fwd` on one warpgroup's tile of logits, in the accumulator layout of wgmma.cuh:
// value i of a thread lies in row r = i / 2 % 2 of its two, column 8 (i / 4) + i % 2 of those that the thread sees.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "common/types.cuh"

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Largest value of each row, right where it is not negative, since floats of that sign are ordered as integers are. With `Low`
// also the smallest that this thread has, right where it is negative: the integer order of negative floats is the reverse, and
// unsigned they pass every other.
// NOTES: both look at the same two values one after the other, which spares the second its operands' way from the registers.
template <bool Low, int N> __device__ __forceinline__ void scan(const float (&s)[N], float (&top)[2], float (&low)[2]) {
  float part[4] = {s[0], s[1], s[2], s[3]}, least[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
#pragma unroll
  for (int i = 4; i + 4 < N; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      part[j] = ptx::max3_signed(part[j], s[i + j], s[i + 4 + j]);
      if (Low) least[j] = ptx::max3_unsigned(least[j], s[i + j], s[i + 4 + j]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int last = N - 4 + 2 * r;
    top[r] = ptx::max3_signed(part[2 * r], part[2 * r + 1], ptx::max3_signed(s[last], s[last], s[last + 1]));
    if (Low) {
      const float ends = ptx::max3_unsigned(s[2 * r], s[2 * r + 1], ptx::max3_unsigned(s[last], s[last], s[last + 1]));
      low[r] = ptx::max3_unsigned(least[2 * r], least[2 * r + 1], ends);
    }
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = ptx::max3_signed(top[r], top[r], ptx::shuffle_xor(top[r], d));
  }
}
template <int N> __device__ __forceinline__ void largest(const float (&s)[N], float (&top)[2]) {
  float part[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
#pragma unroll
  for (int i = 8; i < N; i++) part[i & 7] = fmaxf(part[i & 7], s[i]);
#pragma unroll
  for (int r = 0; r < 2; r++)
    top[r] = quad_max(fmaxf(fmaxf(part[2 * r], part[2 * r + 1]), fmaxf(part[2 * r + 4], part[2 * r + 5])));
}
template <int N> __device__ __forceinline__ void smallest(const float (&s)[N], float (&low)[2]) {
  low[0] = s[0], low[1] = s[2];
#pragma unroll
  for (int i = 0; i < N; i++) low[(i >> 1) & 1] = fminf(low[(i >> 1) & 1], s[i]);
}

// Sets logits past a row's last visible key to minus infinity. `last[r]` counts from this thread's first key of the tile.
template <int N> __device__ __forceinline__ void mask(float (&s)[N], const int (&last)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++)
    if ((i >> 2) * 8 + (i & 1) > last[(i >> 1) & 1]) s[i] = __int_as_float(0xff800000);
}
// The same; `low` takes in the smallest of what stays.
template <int N> __device__ __forceinline__ void mask(float (&s)[N], const int (&last)[2], float (&low)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = (i >> 1) & 1;
    const bool hidden = (i >> 2) * 8 + (i & 1) > last[r];
    low[r] = hidden ? low[r] : fminf(low[r], s[i]);
    s[i] = hidden ? __int_as_float(0xff800000) : s[i];
  }
}

template <int N> __device__ __forceinline__ void multiply(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[(i >> 1) & 1];
}

// P of the logits [First, Last), in place, and the sums of its columns: `part[2 r]` and `part[2 r + 1]` of row r.
template <int First, int Last, int N>
__device__ __forceinline__ void exponentials(float (&s)[N], float scale, const float (&shift)[2], float (&part)[4]) {
#pragma unroll
  for (int i = First; i < Last; i++) {
    s[i] = ptx::exp2_approx(fmaf(s[i], scale, -shift[(i >> 1) & 1]));
    part[i & 3] = i < 4 ? s[i] : part[i & 3] + s[i];
  }
}
// The operand registers of 16 keys of P from their eight values.
template <int N> __device__ __forceinline__ void pack(u32 (&p)[N / 4], const float (&s)[N], int group) {
  const int i = 8 * group;
  p[2 * group] = ptx::e4m3x4_merged(s[i], s[i + 1], s[i + 4], s[i + 5]);
  p[2 * group + 1] = ptx::e4m3x4_merged(s[i + 2], s[i + 3], s[i + 6], s[i + 7]);
}

// The second level of accumulation: o += factor * slot, then (when `Store`) back to the slot. Slots are private to threads.
template <bool Store, int N>
__device__ __forceinline__ void flush(float (&o)[N], float4* slot, const float (&factor)[2], bool first) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float4 x = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : slot[i * 128];
    o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
    o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
    o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
    o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
    if (Store) slot[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }
}

// Logits that do not fit E4M3 in units of the descale, but for masked ones.
template <int N> __device__ __forceinline__ u32 count_past(const float (&s)[N], float to_units) {
  u32 count = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float x = fabsf(s[i] * to_units);
    count += x > 448.0f && x < __int_as_float(0x7f800000);
  }
  return count;
}
// Rounds logits to E4M3 in units of the descale.
template <int N> __device__ __forceinline__ void round_logits(float (&s)[N], float to_units) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const u32 h = ptx::f16x2_from_e4m3x2(ptx::e4m3x2(s[i] * to_units, s[i + 1] * to_units));
    s[i] = ptx::f32_from_f16((u16)h);
    s[i + 1] = ptx::f32_from_f16((u16)(h >> 16));
  }
}
