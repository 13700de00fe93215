// Configuration of `attention_fwd`, what it gets from the host, the tiles that its blocks take and what a thread keeps of one.
#pragma once
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "common/types.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef Q_STAGES
#define Q_STAGES 2
#endif
#ifndef K_STAGES
#define K_STAGES 4
#endif
#ifndef V_STAGES
#define V_STAGES 4
#endif
#ifndef FLUSH_KEYS
#define FLUSH_KEYS 2048
#endif
#ifndef OUT_E4M3
#define OUT_E4M3 0
#endif
#ifndef TELEMETRY
#define TELEMETRY 0
#endif
// 1: logits go through E4M3 by a logit descale per query head.
#ifndef LOGITS_E4M3
#define LOGITS_E4M3 0
#endif
// 1: for calls with few query rows. A tile's rows are positions and heads of a group, heads innermost, which share its keys; keys are
// split over blocks, and `attention_combine` joins the parts; one part is the output. Compiled with CAUSAL, masked or not by `Params::diagonal`.
#ifndef SPLIT
#define SPLIT 0
#endif
// 1: SPLIT for parts of few tiles, whose time is starts and ends: one copy of the code makes all of them.
#ifndef COMPACT
#define COMPACT 0
#endif

// Written by the host byte for byte; strides count elements.
struct Telemetry {
  u32 max_logit;   // ordered(max)
  u32 min_logit;   // ~ordered(min): initialise all four words with zero
  u32 amax_o;      // bits of max |O|
  u32 overflow;    // logits with |x / descale| > 448
};
// Of one row in one part, as Telemetry has them.
struct alignas(8) Extremes {
  u32 max_logit, min_logit;
};
struct Params {
  void* o;
  float* lse;                    // [batch, heads_q, len_q] or null
  const float* q_descale;
  const float* k_descale;
  const float* v_descale;
  const float* o_descale;        // E4M3 output only
  const float* logit_descale;    // [heads_q], E4M3 logits only
  Telemetry* telemetry;          // [heads_q]
  u32* counter;                  // two words, zero before the first launch; left zero
  i64 o_stride_batch, o_stride_row, o_stride_head;
  i64 q_descale_batch, q_descale_head, k_descale_batch, k_descale_head;
  i64 v_descale_batch, v_descale_head, o_descale_batch, o_descale_head;
  float softmax_scale;
  int batch, heads_q, heads_kv, len_q, len_k;
  int packed;                    // 1: consumers take different heads of one group at the same rows
  int row_blocks;                // ceil(len_q / (packed ? 64 : 64 * CONSUMERS))
  int units;                     // batch * heads_q / (packed ? CONSUMERS : 1)
  int section;                   // units whose keys and values share the L2 cache
  // With SPLIT only: units are `tile_heads` heads of one group, row_blocks ceil(len_q / (consumers * positions)).
  void* parts_o;                 // [parts, batch, len_q, heads_q, d] in F16, in units of v's descale: at most 448
  float* parts_lse;              // [parts, batch, len_q, heads_q], to the base 2
  int diagonal;                  // query i sees the keys up to i + diagonal
  int parts;                     // that a tile's keys are split into
  int consumers;                 // that take tiles: 1 where one has room for all rows
  int tile_heads;
  int positions;                 // 64 / tile_heads, rounded down
  int per_head;                  // 2^16 / tile_heads, rounded up
  int per_batch;                 // units of a sequence
  int e4m3;                      // 1: the output of a single part leaves as E4M3 by its descale, 0: as BF16
  Extremes* parts_extremes;      // as parts_lse, with telemetry
};
static_assert(sizeof(Params) == 9 * 8 + 11 * 8 + 10 * 4 + 2 * 8 + 8 * 4 + 8, "the host writes this layout");

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kBlockN = BLOCK_N;
constexpr int kConsumers = CONSUMERS;
constexpr int kRows = 64;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kQStages = Q_STAGES;
// 1: the schedule `ahead`, 0: `together`
#ifndef AHEAD
#define AHEAD (CONSUMERS == 2 && BLOCK_N <= 128 && !LOGITS_E4M3)
#endif
constexpr bool kAhead = AHEAD;
constexpr bool kSplit = SPLIT;
constexpr int kPart = 64;  // keys whose P goes to the tensor cores together, under `ahead`
constexpr float kOffset = 8.0f;  // log2 of P's scale: the largest is 256, below E4M3's 448
constexpr int kEager = 2;  // tiles that the producer asks for before the item is handed out, with SPLIT
constexpr int kFlushTiles = FLUSH_KEYS / (2 * BLOCK_N) * 2;
static_assert(kFlushTiles > 1, "the first flush follows the first product; tiles go in pairs");
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // finite, so that no difference of two maxima is NaN

static_assert(kDim == 64 || kDim == 128, "one swizzle row holds a head");
static_assert(kBlockN % 32 == 0 && kBlockN <= 256, "P V consumes 32 keys a product");
static_assert(kConsumers == 2 || kConsumers == 3, "the register file feeds two or three consumers");
static_assert(!kAhead || kBlockN % kPart == 0, "whole parts");
static_assert(TELEMETRY || !LOGITS_E4M3, "overflow must not go unseen");
static_assert(!COMPACT || (kSplit && kAhead), "a form of that schedule");
static_assert(!kSplit || (CAUSAL && kConsumers == 2 && !OUT_E4M3), "the form that parts are made in");

constexpr int kQBytes = kRows * kDim;
constexpr int kTileBytes = kBlockN * kDim;
constexpr int kOffsetK = kQStages * kConsumers * kQBytes;
constexpr int kOffsetV = kOffsetK + K_STAGES * kTileBytes;
constexpr int kOffsetO = kOffsetV + V_STAGES * kTileBytes;
constexpr int kOffsetBarriers = kOffsetO + kConsumers * kRows * kDim * 4;
constexpr int kBarriers = 2 * (kQStages * kConsumers + K_STAGES + V_STAGES);
constexpr int kOffsetTile = kOffsetBarriers + ceil_div(8 * kBarriers, 16) * 16;
// 1024 bytes of slack align the swizzle atoms. The host reads this value as SHARED_BYTES below.
constexpr int kSharedBytes = kOffsetTile + 32 * kQStages * kConsumers + 1024;
static_assert(kSharedBytes <= 232448, "shared memory of one multiprocessor");

// The producer's registers are short: it keeps less in them.
constexpr bool kShortProducer = LOGITS_E4M3 && kDim == 128 && kConsumers == 3;
static_assert(K_STAGES == V_STAGES, "a tile of keys and one of values keep step");
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
// NOTES: what a block is launched with is all that it can hand around; a warpgroup that asks for more waits for ever.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * kLaunchRegisters, "register file");

struct Tile {
  int batch, head, row, key_tiles;
#if SPLIT
  int first, part;    // key tile that it starts at, and which part of the keys that is
#endif
};
// What the producer hands to a consumer with the queries.
struct alignas(16) Work {
  Tile tile;          // of this consumer; key_tiles < 0: no more work
  float logit_scale;  // softmax scale and the descales of Q and K
  float v_descale;
#if !SPLIT
  float to_out;       // 1 / o_descale
  int unused;
#endif
};
static_assert(sizeof(Work) == 32, "shared-memory slots");

#if SPLIT
// Tile `index`, as its first consumer sees it: those that share keys are neighbours.
__device__ __forceinline__ Tile decode(const Params& p, int index) {
  Tile t;
  int block = 0;
  if (p.row_blocks > 1) block = index % p.row_blocks, index /= p.row_blocks;  // NOTES: divisions hold the first copies up
  const int unit = index / p.parts, rows = p.positions * p.consumers;
  t.part = index - unit * p.parts;
  t.batch = unit / p.per_batch;
  t.head = (unit - t.batch * p.per_batch) * p.tile_heads;
  t.row = block * rows;
  const int keys = max(0, min(p.len_k, min(t.row + rows, p.len_q) + p.diagonal)), key_tiles = ceil_div(keys, kBlockN);
  const int share = key_tiles / p.parts, longer = key_tiles - share * p.parts;  // so many parts have one tile more
  t.first = t.part * share + min(t.part, longer);
  t.key_tiles = share + (t.part < longer);
  return t;
}
#else
// Tile `index`, as its first consumer sees it: sections of heads, in a section the longest rows first, heads innermost.
__device__ __forceinline__ Tile decode(const Params& p, int index) {
  const int per_section = p.section * p.row_blocks;
  const int s = index / per_section;
  index -= s * per_section;
  const int width = min(p.section, p.units - s * p.section);
  int block = index / width;
  const int unit = s * p.section + index - block * width;
#if CAUSAL
  block = p.row_blocks - 1 - block;
#endif
  const int per_batch = p.units / p.batch;
  const int rows = p.packed ? kRows : kRows * kConsumers;
  Tile t;
  t.batch = unit / per_batch;
  t.head = (unit - t.batch * per_batch) * (p.packed ? kConsumers : 1);
  t.row = block * rows;
  int keys = p.len_k;
#if CAUSAL
  keys = max(0, min(keys, min(t.row + rows, p.len_q) + p.len_k - p.len_q));
#endif
  t.key_tiles = ceil_div(keys, kBlockN);
  return t;
}
#endif

// A thread's row (of the first of its two) in the warpgroup and its place in a quad.
struct Place {
  int row, quad;
};
// NOTES: read anew at each use; kept, the two would cost registers that the main loop needs.
__device__ __forceinline__ Place place() {
  const u32 i = ptx::thread_index();
  return {(int)(i % 128 / 32 * 16 + i % 32 / 4), (int)(i % 4)};
}

// Row `i` of a warpgroup's 64, counted from its tile's first position and head.
struct Row {
  int position, head;
  bool exists;  // a tile has no more positions than `positions`
};
__device__ __forceinline__ Row row_of(const Params& p, int i) {
#if SPLIT
  const int position = i * p.per_head >> 16;
  return {position, i - position * p.tile_heads, position < p.positions};
#else
  return {i, 0, true};
#endif
}

// What one thread knows of its two query rows: r = 0 is row l / 4 of the warp, r = 1 eight rows below.
struct Rows {
  float reference[2];  // the running maximum, subtracted from the logits
  float sum[2];        // of P before rounding, this thread's columns
  float rescale[2];    // owed to O since the last tile
  float carry[2];      // owed to the flushed O
  float lowest[2];     // telemetry
  float highest[2];    // telemetry of E4M3 logits, before they are rounded
  u32 overflow;
  int plain;           // the warp's references are not negative (and its lowest logits are): integer order serves
};

}  // namespace
