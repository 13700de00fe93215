// Compile-time configuration of the forward kernel and its shared-memory plan. The host passes the macros
// (src/device/attention/engine.rs); everything else reads the constants made from them.
#pragma once
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
#ifndef KV_STAGES
#define KV_STAGES 4
#endif
// How P V is summed: 0 in FP8, flushed to shared memory; 1 in FP8, promoted after every tile; 2 in F16.
#ifndef PV
#define PV 1
#endif
#ifndef FLUSH_KEYS
#define FLUSH_KEYS 256
#endif
#ifndef OUT_E4M3
#define OUT_E4M3 0
#endif
#ifndef TELEMETRY
#define TELEMETRY 0
#endif
#ifndef LOGITS_E4M3
#define LOGITS_E4M3 0
#endif
#ifndef SPLIT_KV
#define SPLIT_KV 0
#endif
#ifndef ROLLED
#define ROLLED 0
#endif

namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kBlockN = BLOCK_N;       // keys of a tile
constexpr int kConsumers = CONSUMERS;  // consumer warpgroups, 64 query rows each
constexpr int kQStages = 2;
constexpr int kKvStages = KV_STAGES;
constexpr bool kCausal = CAUSAL;
constexpr bool kOutE4m3 = OUT_E4M3;
constexpr bool kTelemetry = TELEMETRY;
// Logits go through E4M3 by a logit descale per query head.
constexpr bool kLogitsE4m3 = LOGITS_E4M3;
// Few query rows: heads of a GQA group share a tile, and keys are split over blocks (scheduler_split.cuh). Compiled with
// CAUSAL; `Params::causal_offset` says whether the call is.
constexpr bool kSplitKv = SPLIT_KV;
// Double-buffered logits in one loop body without unrolled copies, for splits of few tiles (mainloop_rolled.cuh).
constexpr bool kRolled = ROLLED;
// The tensor core's FP8 accumulator is narrower than f32 and truncates, so P V needs a second level of accumulation:
//   Flush    O stays in the tensor core's accumulator, and is added to an f32 O in shared memory every FLUSH_KEYS
//   Promote  P V of one tile is added to O in f32, in registers
// or, with F16, P and V in 16 bits (V written so by cast_qkv.cu), whose accumulator needs none.
enum class Pv { Flush, Promote, F16 };
constexpr Pv kPv = (Pv)PV;
// Two tiles of logits in flight (mainloop_double.cuh), where the registers of a thread hold them, or one (mainloop_single.cuh).
constexpr bool kDoubleLogits = kConsumers == 2 && kBlockN <= 128 && !kLogitsE4m3;

constexpr int kRows = 64;  // query rows of a consumer
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr float kPLog2Scale = 8.0f;  // P is computed times 2^8: its largest value 256 is below E4M3's 448
constexpr int kPvStep = kPv == Pv::F16 ? 16 : 32;  // keys of one product
constexpr int kPvRow = kPv == Pv::F16 ? 128 : kDim;  // bytes from key to key of a tile of V
constexpr int kPRegisters = kPv == Pv::F16 ? kBlockN / 4 : kBlockN / 8;
constexpr int kFlushTiles = FLUSH_KEYS / kBlockN;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // row_max of no key: finite, so that no difference of two maxima is NaN

static_assert(kDim == 64 || kDim == 128, "one swizzle row holds a head");
static_assert(kBlockN % 32 == 0 && kBlockN <= 256, "P V consumes 32 keys a product");
static_assert(kConsumers == 2 || kConsumers == 3, "the register file feeds two or three consumers");
static_assert(kPv != Pv::Flush || kFlushTiles > 0, "a flush follows a product");
static_assert(!kLogitsE4m3 || kPv == Pv::Flush, "the form in which E4M3 logits are compiled");
static_assert(kTelemetry || !kLogitsE4m3, "overflow must not go unseen");
static_assert(!kRolled || (kSplitKv && kDoubleLogits), "the rolled loop is a form of the double-buffered one");
static_assert(!kSplitKv || (kCausal && kConsumers == 2 && !kOutE4m3), "the form in which splits are compiled");

// Shared memory: Q [stage][consumer][64][d], K [stage][keys][d], V [stage][keys / 16][d / 8][8][16] (in F16
// [stage][d / 64][keys][64], 128-byte swizzle), the flushed O of each consumer in f32, mbarriers, work items.
constexpr int kQBytes = kRows * kDim;
constexpr int kTileBytes = kBlockN * kDim;
constexpr int kOffsetK = kQStages * kConsumers * kQBytes;
constexpr int kOffsetV = kOffsetK + kKvStages * kTileBytes;
constexpr int kValueBytes = kTileBytes * (kPv == Pv::F16 ? 2 : 1);
constexpr int kValueRun = kBlockN * 128;  // 64 columns of a tile of V in F16
constexpr int kOffsetO = kOffsetV + kKvStages * kValueBytes;
constexpr int kOffsetBarriers = kOffsetO + (kPv == Pv::Flush ? kConsumers * kRows * kDim * 4 : 0);
constexpr int kBarriers = 2 * (kQStages * kConsumers + 2 * kKvStages);
constexpr int kOffsetWork = kOffsetBarriers + ceil_div(8 * kBarriers, 16) * 16;
// 1024 bytes of slack align the swizzle atoms.
constexpr int kSharedBytes = kOffsetWork + 32 * kQStages * kConsumers + 1024;
static_assert(kSharedBytes <= 232448, "shared memory of one multiprocessor");

constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
// NOTES: a block can only redistribute what it was launched with; a warpgroup that asks for more waits forever.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * kLaunchRegisters, "register file");
// The producer keeps one ring for K and V and no quotient in registers, where it would spill otherwise.
constexpr bool kShortProducer = kLogitsE4m3 && kDim == 128 && kConsumers == 3;

}  // namespace
