// What comes before paged.cu, in one launch: new keys and values to E4M3 by descales known beforehand, RoPE on keys fused in, into the
// pages of their sequences; queries to E4M3 likewise; and the plan of the call, by the first block. Lengths, pages and where packed
// queries lie are read on the device, so that a captured graph serves every step.
//
// New tokens of sequence s follow the `lengths[s]` that it has, and its last query is at its last key. A token that its
// sequence's row of the block table has no room for, or whose page the cache does not have, is not written.
//
// A block beside the first owns 16 rows (of all sequences) of up to 4 heads of one tensor, a thread 8 dims of a row for each head,
// as in cast_qkv.cu, which has the statistics as well. Layouts of the pages: paged.cu.
#include "attention/cast.cuh"
#include "attention/mask.cuh"
#include "attention/pages.cuh"
#include "attention/sequences.cuh"
#include "ptx/launch.cuh"

// Keys of a tile of paged.cu.
#ifndef BLOCK_N
#define BLOCK_N 128
#endif

// Written by the host byte for byte (src/device/attention/params.rs).
struct AppendTensor {
  const void* in;
  u8* out;                              // q: [sequences, length, heads, dim]; k and v: pages
  const float* descale;                 // [sequences, kv head] by the strides below
  CastWords* stats;                     // [heads], or null
  const float* center;                  // as in cast_qkv.cu
  i64 stride_sequence, stride_row, stride_head;  // of `in`, elements; multiples of 8
  i64 descale_sequence, descale_head;
  i64 out_page, out_row, out_head;      // of pages, bytes
  int length, heads;                    // length 0: nothing to cast
};
struct AppendParams {
  AppendTensor q, k, v;
  BlockTable table;
  Queries queries;
  const float* cosine;                  // [positions, rotary / 2]
  const float* sine;
  u32* counter;                         // two words: the work items that the attention after this has scheduled
  Counts* counts;
  Part* parts;
  Join* joins;
  int rotary;                           // rotated leading dims, a multiple of 8; tables 16-byte aligned
  int positions;                        // of the tables
  int v_rows;                           // 1: pages of v are rows, as those of k
  int sequences;
  int window_left;                      // keys that a query sees before its own, or kNoWindow
  int units;                            // items of a part and a block of rows: groups of heads
  int most_blocks;                      // of joined parts, that the partial results have room for
  int partial_rows;                     // of such a block
  int parts_asked;                      // 0: as is fastest; else the parts of every sequence that has so many tiles
  // Times that the plan reckons with, in microseconds: of a tile of keys, of an item, of a join and of a joined block of rows, and of
  // reading a tile of keys of every KV head, by all multiprocessors.
  float tile_time, item_time, join_time, block_time, reading_time;
  int processors;
  int unused;
};
static_assert(sizeof(AppendTensor) == 5 * 8 + 8 * 8 + 2 * 4, "the host writes this layout");
static_assert(sizeof(AppendParams) == 3 * sizeof(AppendTensor) + sizeof(BlockTable) + sizeof(Queries) + 6 * 8 + 16 * 4, "the host writes this layout");

namespace {

// A sequence as the plan sees it: tiles of keys that some query of it sees, and blocks of query rows.
struct Span {
  int first, tiles, blocks;
  __device__ __forceinline__ Span(const AppendParams& p, int s) {
    const Lengths length = {p.queries.count(s), p.table.keys(s)};
    first = p.window_left < kNoWindow ? max(0, first_visible(length, 0, p.window_left)) / BLOCK_N : 0;
    tiles = max(0, ceil_div(length.k, BLOCK_N) - first);
    blocks = ceil_div(length.q, p.queries.block);
  }
  // How many parts of at most `most` tiles each, or as many as were asked for.
  __device__ __forceinline__ int parts(const AppendParams& p, int most) const {
    if (blocks == 0) return 0;
    if (p.parts_asked > 0) return max(1, min(p.parts_asked, tiles));
    return max(1, ceil_div(tiles, most));
  }
};

// Cuts the keys of each sequence into parts: evenly, of at most so many tiles that the call is fastest. Time is the longer of two:
// reading all keys and values, and work items on the multiprocessors. A pure function of the lengths.
__device__ void plan(const AppendParams& p) {
  constexpr int kWarps = kThreads / 32, kCandidates = 32;
  __shared__ int chosen, running[3], blocks[kCandidates], joined[kCandidates], longest[kCandidates];
  __shared__ int begins[kThreads], partials[kThreads], join_begins[kThreads], warp_sums[3][kWarps];
  __shared__ u32 warp_tiles[kWarps], warp_work[kWarps], warp_most[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 mine = 0, work_mine = 0, most = 1;
  bool falls = false;
  for (int s = threadIdx.x; s < p.sequences; s += kThreads) {
    const Span span(p, s);
    falls |= p.queries.cu_seqlens != nullptr && p.queries.cu_seqlens[s] > p.queries.cu_seqlens[s + 1];
    mine += span.tiles, work_mine += span.tiles * span.blocks;
    if (span.blocks > 0) most = max(most, span.tiles);
  }
  warp_tiles[warp] = ptx::warp_sum(mine), warp_work[warp] = ptx::warp_sum(work_mine), warp_most[warp] = ptx::warp_max(most);
  if (threadIdx.x < 3) running[threadIdx.x] = 0;
  if (threadIdx.x == 0) p.counter[0] = p.counter[1] = 0;
  if (threadIdx.x < kCandidates) blocks[threadIdx.x] = joined[threadIdx.x] = longest[threadIdx.x] = 0;
  // The lists have room for blocks of disjoint sequences: of others nothing is computed
  if (__syncthreads_or(falls)) {
    if (threadIdx.x == 0) *p.counts = {0, 0};
    return;
  }
  float all_tiles = 0.0f, all_work = 0.0f;
  int most_tiles = 1;
#pragma unroll
  for (int w = 0; w < kWarps; w++)
    all_tiles += (float)warp_tiles[w], all_work += (float)warp_work[w], most_tiles = max(most_tiles, (int)warp_most[w]);

  // A candidate a lane: the longest sequence in 1 to 16 parts, or so many waves of parts of all. None but the first where that takes
  // the time of reading
  const float work = all_work * p.units, reading = all_tiles * p.reading_time;
  const auto time_of = [&](float items, int tiles) {
    const float item = tiles * p.tile_time + p.item_time;
    return fmaxf(reading, fminf(ceilf(items / p.processors) * item, (work * p.tile_time + items * p.item_time) / p.processors + item));
  };
  const bool search = p.parts_asked == 0 && time_of((float)p.sequences * p.units, most_tiles) > 1.05f * reading;
  if (threadIdx.x == 0) chosen = most_tiles;
  const int by_waves = (int)fminf(work / (p.processors * max(1, lane - 15)), 1e6f) + 1;
  const int tiles_a_part = lane < 16 ? ceil_div(most_tiles, lane + 1) : min(by_waves, most_tiles);
  int count = 0, joined_count = 0, longest_part = 0;
  for (int s = warp; search && s < p.sequences; s += kWarps) {
    const Span span(p, s);
    const int n = span.parts(p, tiles_a_part);
    count += n * span.blocks;
    if (n > 1) joined_count += n * span.blocks;
    if (n > 0) longest_part = max(longest_part, ceil_div(span.tiles, n));
  }
  if (search) {
    atomicAdd(&blocks[lane], count);
    atomicAdd(&joined[lane], joined_count);
    atomicMax(&longest[lane], longest_part);
  }
  __syncthreads();
  if (search && warp == 0) {
    const float join_time = joined[lane] > 0 ? p.join_time + joined[lane] * p.block_time : 0.0f;
    const float time = time_of((float)blocks[lane] * p.units, longest[lane]) + join_time;
    // Of equally fast ones that of fewer parts. A part a sequence always has room
    u64 best = (u64)__float_as_uint(time) << 32 | (u32)blocks[lane];
    if (joined[lane] > p.most_blocks) best = ~0ull;
    const u64 own = best;
    for (int d = 16; d > 0; d /= 2) best = min(best, __shfl_xor_sync(~0u, best, d));
    if (__ffs(__ballot_sync(~0u, own == best)) == lane + 1) chosen = tiles_a_part;
  }
  __syncthreads();

  // The lists
  for (int first = 0; first < p.sequences; first += kThreads) {
    const int s = first + threadIdx.x, last = min(p.sequences - first, kThreads);
    int sums[3] = {};  // entries, blocks of joined parts, joins
    if (s < p.sequences) {
      const Span span(p, s);
      const int n = span.parts(p, chosen);
      sums[0] = n * span.blocks;
      if (n > 1) sums[1] = sums[0], sums[2] = span.blocks;
    }
    int at[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      at[i] = sums[i];
      for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(~0u, at[i], d);
        if (lane >= d) at[i] += below;
      }
      if (lane == 31) warp_sums[i][warp] = at[i];
    }
    __syncthreads();
    int begin = running[0];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      at[i] += running[i] - sums[i];
      for (int w = 0; w < warp; w++) at[i] += warp_sums[i][w];
    }
    begins[threadIdx.x] = at[0], partials[threadIdx.x] = sums[1] > 0 ? at[1] : -1, join_begins[threadIdx.x] = at[2];
    __syncthreads();
    if (threadIdx.x == kThreads - 1) {
#pragma unroll
      for (int i = 0; i < 3; i++) running[i] = at[i] + sums[i];
    }
    __syncthreads();
    for (begin += threadIdx.x; begin < running[0]; begin += kThreads) {
      const int owner = sequence_at(begins, last, begin), sequence = first + owner;
      const Span span(p, sequence);
      const int n = span.parts(p, chosen), own = begin - begins[owner], part = own / span.blocks, block = own - part * span.blocks;
      const int share = span.tiles / n, longer = span.tiles - share * n;  // so many parts have one tile more
      const int part_first = span.first + part * share + min(part, longer), part_end = part_first + share + (part < longer);
      const int queries = p.queries.count(sequence), row = p.queries.begin(sequence), batch = p.queries.batch(sequence);
      const int partial = partials[owner] < 0 ? -1 : partials[owner] * p.partial_rows;
      const int stride = span.blocks * p.partial_rows;
      p.parts[begin] = {sequence, batch, row, queries, p.table.keys(sequence), part_first, part_end, begin - block, span.blocks,
                        partial < 0 ? -1 : partial + part * stride, {}};
      if (part == 0 && partial >= 0) {
        const int from = block * p.queries.block;
        p.joins[join_begins[owner] + block] = {sequence, batch, row + from, min(p.queries.block, queries - from),
                                               partial + block * p.partial_rows, stride, n, 0};
      }
    }
  }
  if (threadIdx.x == 0) *p.counts = {running[0], running[2]};
}

// Byte of a group of 16 values that holds key i of it.
__device__ __forceinline__ int value_byte(int i) { return 4 * (i % 8 / 2) + 2 * (i / 8) + i % 2; }

enum class Kind { Q, K, V };

template <Kind Of> __device__ __forceinline__ void cast(const AppendParams& p, const AppendTensor& t, int block) {
  __shared__ u32 tops[kHeads][kThreads / 32];
  const int blocks = ceil_div(t.heads, kHeads), first = block % blocks * kHeads;
  const int row = block / blocks * kKeys + threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  int sequence = row / t.length, i = row - sequence * t.length;
  bool live = sequence < p.sequences;
  i64 at;
  if (Of == Kind::Q && p.queries.cu_seqlens != nullptr) {
    sequence = max(0, sequence_at(p.queries.cu_seqlens, p.sequences, row)), i = row - p.queries.begin(sequence);
    live = row < t.length && i >= 0 && i < p.queries.count(sequence);
    at = row * t.stride_row;
  } else {
    at = sequence * t.stride_sequence + i * t.stride_row;
  }

  // Find the position, and the page
  int position = 0;
  u8* page = t.out;
  if (live && Of == Kind::Q) position = max(0, p.table.keys(sequence) - p.queries.count(sequence) + i);
  if (live && Of != Kind::Q) {
    position = p.table.lengths[sequence] + i;
    live = position >= 0 && position < p.table.pages_per_sequence << p.table.log2_page_size;
    if (live) {
      const int number = p.table.pages[sequence * p.table.stride + (position >> p.table.log2_page_size)];
      live = number >= 0 && number < p.table.count;
      page += number * t.out_page;
    }
  }
  const int place = position & ((1 << p.table.log2_page_size) - 1);

  // Load every head's piece, then the angles
  alignas(16) u32 raw[kHeads][kWords] = {};
  const bool rotates = kRope && Of != Kind::V && 8 * piece < p.rotary;
  const int low = kHalfSplit && rotates ? 4 * piece : 8 * piece, high = rotates ? low + p.rotary / 2 : low + 4;
#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    if (!live || first + h >= t.heads) continue;
    const i64 head_at = at + (first + h) * t.stride_head;
    if (kHalfSplit && rotates) load_halves(raw[h], t.in, head_at + low, head_at + high);
    else load(raw[h], t.in, head_at + low);
  }
  Angles angles;
  if (rotates && live) load_angles(angles, p, piece, min(position, p.positions - 1));
  const int per_kv = t.heads / p.k.heads;

#pragma unroll
  for (int h = 0; h < kHeads; h++) {
    const int head = first + h;
    if (head >= t.heads) break;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = value(raw[h], j);
    if (rotates && live) rotate(x, angles);
#if CENTER
    if (t.center != nullptr && live) subtract(x, t.center + head * kDim, low, high);
#endif

    // Scale, round. NOTES: rows of a warp may be of different sequences, so that each has its own descale
    const float to_units = live ? 1.0f / t.descale[sequence * t.descale_sequence + head / per_kv * t.descale_head] : 0.0f;
    if (t.stats != nullptr) {
      const u32 top = warp_top(x);
      const bool past = __uint_as_float(top) * to_units > 448.0f;
      if (top >= 0x7f800000 || __any_sync(~0u, past)) count_past(x, to_units, t.stats + head);
      if (threadIdx.x % 32 == 0) tops[h][threadIdx.x / 32] = top;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] *= to_units;
    const uint2 y = make_uint2(ptx::e4m3x4(x[0], x[1], x[2], x[3]), ptx::e4m3x4(x[4], x[5], x[6], x[7]));

    // Store
    if (!live) continue;
    u8* out = Of == Kind::Q ? t.out + ((i64)row * t.heads + head) * kDim : page + head * t.out_head;
    if (Of == Kind::K || (Of == Kind::V && p.v_rows)) out += place * t.out_row;
    if (Of == Kind::V && !p.v_rows) {
      out += (place / 16) * 16 * kDim + 16 * low + value_byte(place % 16);
#pragma unroll
      for (int j = 0; j < 8; j++) out[16 * j] = (u8)((j < 4 ? y.x : y.y) >> 8 * (j % 4));
    } else if constexpr (kHalfSplit) {
      *reinterpret_cast<u32*>(out + low) = y.x;
      *reinterpret_cast<u32*>(out + high) = y.y;
    } else {
      *reinterpret_cast<uint2*>(out + low) = y;
    }
  }

  // Publish the block's maxima
  __syncthreads();
  if (t.stats != nullptr && threadIdx.x < kHeads && first + threadIdx.x < t.heads) {
    u32 top = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) top = max(top, tops[threadIdx.x][w]);
    u32* amax = &t.stats[first + threadIdx.x].amax;
    if (top > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, top);
  }
}

// Blocks that so many rows of a tensor take.
__device__ __forceinline__ int blocks_of(const AppendTensor& t, int rows) { return ceil_div(rows, kKeys) * ceil_div(t.heads, kHeads); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) append_kv(const __grid_constant__ AppendParams p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  int block = blockIdx.x;
  if (block-- == 0) return plan(p);
  const int q = blocks_of(p.q, p.q.length * (p.queries.cu_seqlens == nullptr ? p.sequences : 1)), k = blocks_of(p.k, p.k.length * p.sequences);
  if (block < q) cast<Kind::Q>(p, p.q, block);
  else if (block < q + k) cast<Kind::K>(p, p.k, block - q);
  else cast<Kind::V>(p, p.v, block - q - k);
}

// What is wrong with a block table, for a caller that wants to know before a launch.
struct TableFault {
  int kind;  // 1: a length below 0 or past the row; 2: a page that the cache does not have; 3: a row that is appended to is another token's
  int sequence, entry, value;
};

// The first fault in the order of sequences, by one block of any size: `fault` is zero before, and stays so where there is none.
extern "C" __global__ void check_block_table(BlockTable table, int sequences, TableFault* fault) {
  const int page_size = 1 << table.log2_page_size, room = table.pages_per_sequence * page_size;
  __shared__ int worst;
  if (threadIdx.x == 0) worst = sequences;
  __syncthreads();
  for (int pass = 0; pass < 2; pass++) {
    // The first pass finds the sequence, the second says what is wrong with it
    for (int s = threadIdx.x; s < sequences; s += blockDim.x) {
      if (pass == 1 && s != worst) continue;
      const int length = table.lengths[s];
      TableFault found = {0, s, 0, length};
      if (length < 0 || length > room - table.added) found.kind = 1;
      const int* row = table.pages + s * table.stride;
      const int entries = found.kind ? 0 : ceil_div(length + table.added, page_size), written = length >> table.log2_page_size;
      for (int e = 0; e < entries && !found.kind; e++) {
        found.entry = e, found.value = row[e];
        if (row[e] < 0 || row[e] >= table.count) found.kind = 2;
        const int first_row = max(0, length - e * page_size);
        for (int other = 0; table.added > 0 && e >= written && other < sequences && !found.kind; other++) {
          const int tokens = max(0, min(room, table.lengths[other] + table.added));
          for (int i = 0; i * page_size < tokens && !found.kind; i++)
            if ((other != s || i != e) && table.pages[other * table.stride + i] == row[e] && tokens - i * page_size > first_row) found.kind = 3;
        }
      }
      if (!found.kind) continue;
      if (pass == 0) atomicMin(&worst, s);
      else *fault = found;
    }
    __syncthreads();
  }
}
