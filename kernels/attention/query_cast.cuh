// Queries from BF16 to E4M3 inside the attention kernel (CAST_Q), by the three warps of the producer's warpgroup that
// issue no copies: rotation, descale and rounding of cast_qkv.cu, to the same bits. They run ahead of the consumers
// by the stages of Q.
//
// The producer hands them a work item (`q_item`) as it would hand it to its consumer. They bring its rows into shared
// memory by asynchronous copies, each lane into places that it alone reads, so that all rows of a consumer are in
// flight at once without registers. Then they write them in the swizzle in which the copy engine would, and their
// arrivals complete `q_full`.
#pragma once
#include "attention/params.cuh"
#include "attention/pipeline.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

// Written by the host byte for byte (src/device/attention/params.rs).
struct QueryCast {
  const u16* q;                     // BF16, [batch, len_q, heads_q, dim] by the strides below
  i64 stride_batch, stride_row, stride_head;  // multiples of 8
  const float* cosine;              // [positions, rotary / 2]
  const float* sine;
  const int* positions;             // [batch, len_k], or null: the row's index
  int rotary;                       // rotated leading dims, a multiple of 8
  int q_start;                      // position of the first query among the keys
};
static_assert(sizeof(QueryCast) == 64, "the host writes this layout");

namespace {

constexpr bool kRotates = CAST_Q > 1, kHalves = CAST_Q == 2;  // 2: c with c + rotary / 2, 3: 2 c with 2 c + 1

// A thread's row of the first that the warps take at once, and its eight dims: four, and four more. Halves that rotate
// against each other are in one thread.
// NOTES: read anew at each use, since the producer's warpgroup has 32 or 40 registers a thread.
struct Piece {
  int row, number;
  u32 staging;  // of its 16 bytes on their way, from step to step 16 bytes for each thread of the warps
  bool rotated;
  int low, high;
  __device__ __forceinline__ explicit Piece(const QueryCast& c) {
    const int thread = ptx::thread_index() - 128 * kConsumers - 32;
    row = thread / kCastPieces, number = thread % kCastPieces;
    staging = kOffsetCast + 16 * thread;
    rotated = kRotates && 8 * number < c.rotary;
    const bool halves = kHalves && rotated;
    low = halves ? 4 * number : 8 * number, high = halves ? low + c.rotary / 2 : low + 4;
  }
};

// Rotates a thread's four pairs, as `rotate` of cast.cuh.
__device__ __forceinline__ void rotate(float (&x)[8], const uint4& cosines, const uint4& sines) {
  constexpr int kStep = kHalves ? 1 : 2, kPair = kHalves ? 4 : 1;
  const u32 cosine[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, sine[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float e = x[kStep * i], o = x[kStep * i + kPair];
    const float cos = __uint_as_float(cosine[i]), sin = __uint_as_float(sine[i]);
    x[kStep * i] = fmaf(e, cos, -o * sin);
    x[kStep * i + kPair] = fmaf(o, cos, e * sin);
  }
}

// Where byte `column` of a row lies in a tile of queries: its pieces of 16 bytes are swizzled by the row.
__device__ __forceinline__ u32 swizzled(int row, int column) {
  const u32 at = row * kRun + column;
  return at ^ (at >> 3 & (kRun == 128 ? 0x70 : 0x30));
}

constexpr int kCastStride = kCastRows * kCastWarps, kCastStepBytes = 512 * kCastWarps;  // rows and bytes of a step
constexpr int kCastPart = kCastStepBytes * kCastAtOnce;  // bytes of queries, then of cosines, then of sines

// Begins the copies of the steps from `first` on, as many as are in flight. What lies past the last row reads as zero.
__device__ __forceinline__ void copy_steps(const Params& p, const QueryCast& c, const Tile& tile, u32 base, int first) {
  const Piece piece(c);
  const int first_row = piece.row + kCastStride * first;
  const u16* from = c.q + tile.batch * c.stride_batch + tile.head * c.stride_head;
  from += (tile.row + first_row) * c.stride_row;
  int rows = min(kRows, p.len_q - tile.row) - first_row, position = tile.row + first_row + c.q_start;
  const u8* cosines = reinterpret_cast<const u8*>(c.cosine) + 16 * piece.number;
  const u8* sines = reinterpret_cast<const u8*>(c.sine) + 16 * piece.number;
#pragma unroll (kRotates ? 1 : kCastAtOnce)
  for (int i = 0; i < kCastAtOnce; i++) {
    const u32 to = base + piece.staging + kCastStepBytes * i;
    if (kHalves) {
      ptx::copy_async<8>(to, from + piece.low, rows > 0);
      ptx::copy_async<8>(to + 8, from + piece.high, rows > 0);
    } else {
      ptx::copy_async<16>(to, from + piece.low, rows > 0);
    }
    if (piece.rotated) {
      int listed = position;
      if (c.positions != nullptr && rows > 0) listed = c.positions[(i64)tile.batch * p.len_k + position];
      const u64 at = (u64)(u32)listed * (u32)(2 * c.rotary);  // bytes of rows of rotary / 2 f32
      ptx::copy_async<16>(to + kCastPart, cosines + at, rows > 0);
      ptx::copy_async<16>(to + 2 * kCastPart, sines + at, rows > 0);
    }
    rows -= kCastStride, position += kCastStride, from += kCastStride * c.stride_row;
  }
}

// The rows of one consumer's work item, to shared memory at `to`; `base`: of shared memory.
template <class Item>
__device__ __forceinline__ void cast_tile(const Params& p, const QueryCast& c, const Item& item, u32 base, u32 to) {
#pragma unroll
  for (int first = 0; first < kCastSteps; first += kCastAtOnce) {
    copy_steps(p, c, item.tile, base, first);
    const float to_units = item.quant_scale;
    const Piece piece(c);
    // Where the first steps write. After 24 rows the swizzle repeats
    constexpr int kPeriod = 24 / kCastStride;
    u32 places[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod && !kHalves; i++) places[i] = to + swizzled(piece.row + kCastStride * i, piece.low);
    ptx::copy_async_wait();
#pragma unroll
    for (int i = 0; i < kCastAtOnce; i++) {
      const int step = first + i;
      if (step >= kCastSteps - 1 && piece.row + kCastStride * step >= kRows) break;
      const u32 at = base + piece.staging + kCastStepBytes * i;
      const uint4 raw = ptx::ld_shared_v4(at);
      float x[8] = {ptx::bf16_low(raw.x), ptx::bf16_high(raw.x), ptx::bf16_low(raw.y), ptx::bf16_high(raw.y),
                    ptx::bf16_low(raw.z), ptx::bf16_high(raw.z), ptx::bf16_low(raw.w), ptx::bf16_high(raw.w)};
      if (piece.rotated) rotate(x, ptx::ld_shared_v4(at + kCastPart), ptx::ld_shared_v4(at + 2 * kCastPart));
#pragma unroll
      for (int k = 0; k < 8; k++) x[k] *= to_units;
      const u32 low = ptx::e4m3x4(x[0], x[1], x[2], x[3]), high = ptx::e4m3x4(x[4], x[5], x[6], x[7]);
      if (kHalves) {
        const int row = piece.row + kCastStride * step;
        ptx::st_shared_u32(to + swizzled(row, piece.low), low);
        ptx::st_shared_u32(to + swizzled(row, piece.high), high);
      } else {
        ptx::st_shared_v2(places[step % kPeriod] + step / kPeriod * 24 * kRun, low, high);
      }
    }
  }
}

// The loop of the warps behind the producer's, which hands out `work`.
template <class Item>
__device__ __forceinline__ void cast_queries(const Params& p, const QueryCast& c, const Pipeline& pipeline,
                                             const Item* work) {
  Ring<kQStages> q;
  bool more = true;
  while (more) {
#pragma unroll 1
    for (int w = 0; w < kConsumers; w++) {
      ptx::mbarrier_wait_uniform(pipeline.q_item(q.index, w), q.parity);
      const Item& item = work[q.index * kConsumers + w];
      more = item.tile.key_tiles >= 0;
      if (more) cast_tile(p, c, item, pipeline.base, pipeline.q(q.index, w));
      // The products read what the lanes have written
      ptx::fence_proxy_async();
      __syncwarp();
      if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(pipeline.q_full(q.index, w));
    }
    q.advance();
  }
}

}  // namespace
