// One pass from Q, K, V in BF16, F16 or F32 to E4M3 by descales known beforehand, RoPE on Q and K fused in, V written in the
// layout that forward.cu reads. A factor on q that grows with the position was applied by whoever made q: a rotation commutes
// with it.
//
// A block owns 16 positions of up to 4 heads of one tensor: blockIdx.x runs over ceil(heads / 4) for Q, then K, then V, and
// over groups of 16 positions, which may be more than 16 bits count; blockIdx.y over the batch. A thread holds 8 dims of one
// position for each head: neighbouring heads are neighbours in memory, and share their cosines. Where halves rotate against
// each other, these are 4 dims of the one half and 4 of the other.
//
// Q and K leave as [batch, length, heads, dim], the row of a head followed by 8 bytes that nobody reads where dim is no multiple
// of 16; V leaves as [batch, kv head, ceil(length / 16), dim / 8, 8, 16], byte 4 t + e of a group being key
// 8 (e / 2) + 2 t + e % 2, or, for P V in F16, as [batch, length, heads, dim] in F16 (exact). For a backward V leaves a second
// time, in E4M3 as K does.
//
// With sequences of unequal length (VARLEN), blockIdx.x 0 makes the schedule of the attention, rows of V start a tile of 128 keys with
// each sequence, and rows that no sequence has are not read: their codes are zero, as are their outputs, and their log-sum-exps -inf.
// Values of keys before the first that a window shows to any query are zero in V, so that not even a NaN of theirs is multiplied.
//
// By-products per head, order-independent: amax of the values before the scale, and counts of scaled values past 448 (which
// saturate), past 464 (where rounding leaves the format) and not finite.
#include "attention/cast.cuh"
#include "attention/cast_rows.cuh"
#include "ptx/launch.cuh"

static_assert(!VARLEN || PROCESSORS > 0, "the list of tiles is made for a number of multiprocessors");

// Written by the host byte for byte (src/device/attention/params.rs).
struct CastTensor {
  const void* in;
  u8* out;                              // Q, K: [batch, length, heads, dim]; V: a layout above
  const float* descale;                 // [batch, kv head] by the strides below
  CastWords* stats;                     // [heads], or null
  const float* center;                  // [heads, dim], 16-byte aligned: subtracted behind the rotation; or null
  i64 stride_batch, stride_row, stride_head;  // of `in`, elements; multiples of 8
  i64 descale_batch, descale_head;
  int length, heads;
};
struct CastParams {
  CastTensor q, k, v;
  const float* cosine;                  // [positions, rotary / 2]
  const float* sine;
  const int* positions;                 // [batch, len_k], or null: the row's index
  u32* counter;                         // two words: the tiles that the attention after this has scheduled
  u8* v_rows;                           // V in E4M3, [batch, len_k, heads_kv, dim], or null
  int rotary;                           // rotated leading dims, a multiple of 8; tables 16-byte aligned
  int q_start;                          // position of the first query among the keys
  int v_f16;                            // 1: V leaves in F16
  int table_rows;                       // positions of the tables
};
static_assert(sizeof(CastTensor) == 5 * 8 + 5 * 8 + 2 * 4, "the host writes this layout");
static_assert(sizeof(CastParams) == 3 * sizeof(CastTensor) + 5 * 8 + 4 * 4, "the host writes this layout");

namespace {

// One position's row of dims per line; the odd width spreads the columns over the banks.
struct Transpose {
  u32 word[kKeys][kValuePieces * 2 + 1];
};

// The block's 16 keys as core matrices: thread i writes dim i / 2, half i % 2 of its 16 keys.
__device__ __forceinline__ void store_v(Transpose& tile, uint2 y, u8* group) {
  if (kWhole || threadIdx.x < kKeys * kValuePieces) {
    tile.word[threadIdx.x / kValuePieces][2 * (threadIdx.x % kValuePieces)] = y.x;
    tile.word[threadIdx.x / kValuePieces][2 * (threadIdx.x % kValuePieces) + 1] = y.y;
  }
  __syncthreads();
  if (!kWhole && threadIdx.x >= kKeys * kValuePieces) return;
  const int d = threadIdx.x / 2, h = threadIdx.x % 2;
  u32 out[2] = {0, 0};
#pragma unroll
  for (int w = 0; w < 2; w++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int key = 8 * (e / 2) + 2 * (2 * h + w) + e % 2;
      out[w] |= (tile.word[key][d / 4] >> (8 * (d % 4)) & 0xff) << (8 * e);
    }
  }
  *reinterpret_cast<uint2*>(group + 8 * threadIdx.x) = make_uint2(out[0], out[1]);
}
// Eight dims of V in F16.
__device__ __forceinline__ void store_f16(const CastTensor& t, i64 at, uint2 y) {
  *reinterpret_cast<uint4*>(t.out + 2 * at) = make_uint4(ptx::f16x2_from_e4m3x2((u16)y.x), ptx::f16x2_from_e4m3x2((u16)(y.x >> 16)),
                                                         ptx::f16x2_from_e4m3x2((u16)y.y), ptx::f16x2_from_e4m3x2((u16)(y.y >> 16)));
}
__device__ __forceinline__ u8* group_of(const CastTensor& t, const CastRows& all, int batch, int head, int group) {
  if constexpr (kVarlen) return t.out + ((i64)head * all.value_groups + group) * kKeys * kValueDim;
  return t.out + (((i64)batch * t.heads + head) * ceil_div(t.length, kKeys) + group) * kKeys * kValueDim;
}
// Clears 8 dims of an output row that no sequence has, and its log-sum-exp.
__device__ __forceinline__ void clear_output(const CastRows& all, const RowPlace& at, int head, int column) {
  u8* o = reinterpret_cast<u8*>(all.o) + all.o_size * (at.batch * all.o_stride_batch + at.row * all.o_stride_row +
                                                     head * all.o_stride_head + column);
  if (all.o_size == 1) *reinterpret_cast<uint2*>(o) = make_uint2(0, 0);
  else *reinterpret_cast<uint4*>(o) = make_uint4(0, 0, 0, 0);
  if (all.lse != nullptr && column == 0)
    all.lse[((i64)at.batch * all.heads_q + head) * all.schedule.len_q + at.row] = __int_as_float(0xff800000);
}

// A launch that was cut off leaves the counter anywhere, and tiles below it would be skipped.
__device__ __forceinline__ void clear_counter(u32* counter) {
  if ((blockIdx.x | blockIdx.y | blockIdx.z) == 0 && threadIdx.x < 2) counter[threadIdx.x] = 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
cast_qkv(const __grid_constant__ CastParams p, const __grid_constant__ CastRows all) {
  __shared__ Transpose tile[kHeads];
  __shared__ u32 tops[kHeads][kThreads / 32];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  clear_counter(p.counter);
  if (kVarlen && blockIdx.x == 0) return make_schedule(all.schedule);

  // Find the tensor and the heads
  const int blocks_q = ceil_div(p.q.heads, kHeads), blocks_k = ceil_div(p.k.heads, kHeads);
  const int index = blockIdx.x - kVarlen;
  const int blocks = blocks_q + 2 * blocks_k, group = index / blocks, block = index - group * blocks;
  const bool is_q = block < blocks_q, is_v = block >= blocks_q + blocks_k;
  const CastTensor& t = is_q ? p.q : is_v ? p.v : p.k;
  const int first = kHeads * (block - (is_q ? 0 : is_v ? blocks_q + blocks_k : blocks_q));
  if (group * kKeys >= (kVarlen ? rows_of_axis(all, is_q, is_v) : t.length)) return;
  const Place here = kPieces == kValuePieces || !is_v ? place<kPieces>() : place<kValuePieces>();
  const int slot = group * kKeys + min(here.row, kKeys - 1), piece = here.piece;
  const RowPlace seat = place_of(all, is_q, is_v, blockIdx.y, slot, t.length);
  // NOTES: the same in all rows of a group of values.
  if (kVarlen && is_v && !seat.stored) return;
  const int batch = seat.batch, row = seat.row;
  const bool has_row = kWhole || here.row < kKeys, live = has_row && seat.live;

  // Load every head's piece, then the angles
  alignas(16) u32 raw[kHeads][kWords] = {};
  const bool rotates = kRope && !is_v && 8 * piece < p.rotary;
  const int low = kHalfSplit && rotates ? 4 * piece : 8 * piece, high = rotates ? low + p.rotary / 2 : low + 4;
  const i64 at = batch * t.stride_batch + row * t.stride_row;
#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    if (!live || first + h >= t.heads) continue;
    const i64 head_at = at + (first + h) * t.stride_head;
    if (kHalfSplit && rotates) load_halves(raw[h], t.in, head_at + low, head_at + high);
    else load(raw[h], t.in, head_at + low);
  }
  Angles angles;
  if (rotates && live) {
    const i64 shown = kVarlen ? seat.position : row + (is_q ? p.q_start : 0);
    const i64 key = kVarlen ? seat.key : (i64)batch * p.k.length + shown;
    i64 position = p.positions != nullptr ? p.positions[key] : shown;
    // A sequence that is longer than the host was told may stand past the tables
    if constexpr (kVarlen) position = min(max((int)position, 0), p.table_rows - 1);
    load_angles(angles, p, piece, position);
  }
  const int per_kv = is_q ? p.q.heads / p.k.heads : 1;

#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    const int head = first + h;
    if (head >= t.heads) break;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = value(raw[h], i);

    if (rotates && live) rotate(x, angles);

    // Scale, round
    const float to_units = 1.0f / t.descale[batch * t.descale_batch + head / per_kv * t.descale_head];
#if CENTER
    // NOTES: behind the quotient, whose slow path leaves no registers for more.
    if (t.center != nullptr && live) subtract(x, t.center + head * (is_v ? kValueDim : kDim), low, high);
#endif
    if (t.stats != nullptr) {
      const u32 top = warp_top(x);
      bool past = __uint_as_float(top) * to_units > 448.0f;
      // NOTES: rows of a warp may be of different entries of the batch, each with its own descale, and all lanes have to count.
      if constexpr (kVarlen) past = __any_sync(~0u, past);
      if (top >= 0x7f800000 || past) count_past(x, to_units, t.stats + head);
      if (threadIdx.x % 32 == 0) tops[h][threadIdx.x / 32] = top;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= to_units;
    uint2 y = make_uint2(ptx::e4m3x4(x[0], x[1], x[2], x[3]), ptx::e4m3x4(x[4], x[5], x[6], x[7]));
    if (kWindow && is_v && !seat.seen) y = make_uint2(0, 0);

    // Store: rows for Q and K, core matrices of 8 dims by 16 keys for V or rows in F16
    const i64 line = ((i64)batch * t.length + row) * t.heads + head;
    u8* out = t.out + line * kRowBytes;
    if (is_v) {
      if (p.v_rows != nullptr && live) *reinterpret_cast<uint2*>(p.v_rows + line * kValueRowBytes + low) = y;
      if (!p.v_f16) store_v(tile[h], y, group_of(t, all, batch, head, group));
      else if (kVarlen && has_row) store_f16(t, ((i64)slot * t.heads + head) * kValueDim + low, y);
      else if (live) store_f16(t, line * kValueDim + low, y);
    } else if (live || (kVarlen && has_row && seat.stored)) {
      if (kVarlen && !live && p.v_rows != nullptr && !is_q)
        for (int c = 8 * piece; c < kValueDim; c += kDim) *reinterpret_cast<uint2*>(p.v_rows + line * kValueRowBytes + c) = make_uint2(0, 0);
      if (kVarlen && !live && is_q)
        for (int c = 8 * piece; c < kValueDim; c += kDim) clear_output(all, seat, head, c);
      if constexpr (kHalfSplit) {
        *reinterpret_cast<u32*>(out + low) = y.x;
        *reinterpret_cast<u32*>(out + high) = y.y;
      } else {
        *reinterpret_cast<uint2*>(out + low) = y;
      }
    }
  }

  // Publish the block's maxima
  __syncthreads();
  if (t.stats != nullptr && threadIdx.x < kHeads && first + threadIdx.x < t.heads) {
    u32 top = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) top = max(top, tops[threadIdx.x][w]);
    // NOTES: a stale read only costs a needless atomic; most blocks find their maximum already passed.
    u32* amax = &t.stats[first + threadIdx.x].amax;
    if (top > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, top);
  }
}

// V given in E4M3 as [batch, length, heads, dim] by the strides in `t` (bytes, multiples of 8), to a layout above.
extern "C" __global__ void __launch_bounds__(kThreads)
repack_v(const __grid_constant__ CastTensor t, u32* counter, int v_f16, const __grid_constant__ CastRows all) {
  __shared__ Transpose tile;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  clear_counter(counter);
  if (kVarlen && blockIdx.x == 0) {
    if (blockIdx.y == 0) make_schedule(all.schedule);
    return;
  }
  const Place here = place<kValuePieces>();
  const int group = blockIdx.x - kVarlen, piece = here.piece, head = blockIdx.y;
  const int slot = group * kKeys + min(here.row, kKeys - 1);
  const bool has_row = kWhole || here.row < kKeys;
  if (kVarlen && group >= all.value_groups) {
    // Blocks after those of V: rows of the output
    const RowPlace seat = place_of(all, true, false, 0, slot - all.value_groups * kKeys, 0);
    const int per_kv = all.heads_q / t.heads;
    for (int h = head * per_kv; has_row && seat.stored && !seat.live && h < (head + 1) * per_kv; h++)
      clear_output(all, seat, h, 8 * piece);
    return;
  }
  const RowPlace seat = place_of(all, false, true, blockIdx.z, slot, t.length);
  if (kVarlen && !seat.stored) return;
  uint2 y = make_uint2(0, 0);
  if (has_row && seat.live && seat.seen)
    y = *reinterpret_cast<const uint2*>(reinterpret_cast<const u8*>(t.in) + seat.batch * t.stride_batch + seat.row * t.stride_row +
                                        head * t.stride_head + 8 * piece);
  if (!v_f16) store_v(tile, y, group_of(t, all, seat.batch, head, group));
  else if (kVarlen && has_row) store_f16(t, ((i64)slot * t.heads + head) * kValueDim + 8 * piece, y);
  else if (has_row && seat.live) store_f16(t, (((i64)seat.batch * t.length + seat.row) * t.heads + head) * kValueDim + 8 * piece, y);
}
