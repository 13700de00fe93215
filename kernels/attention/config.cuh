// Compile-time configuration of the forward kernel and its shared-memory plan. The host passes the macros
// (src/device/attention/variant.rs); everything else reads the constants made from them.
#pragma once
#include "common/types.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
// Of V and the output.
#ifndef V_DIM
#define V_DIM HEAD_DIM
#endif
// The output has fewer columns than V_DIM (Params::columns); what Q, K and V lack up to their dimensions reads as zero.
#ifndef PADDED
#define PADDED 0
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
// The loop over the keys: one of `Mainloop`. The host chooses it (src/device/attention/variant.rs).
#ifndef MAINLOOP
#define MAINLOOP 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef VARLEN
#define VARLEN 0
#endif
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#ifndef SINK
#define SINK 0
#endif
// 1: a constant of each KV head was subtracted from values, and is added to the output.
#ifndef CENTER
#define CENTER 0
#endif
// Keys and values lie in pages (paged.cu); with V_ROWS values are rows, as keys are.
#ifndef PAGED
#define PAGED 0
#endif
#ifndef V_ROWS
#define V_ROWS 0
#endif

namespace {

constexpr int kDim = HEAD_DIM;        // of Q and K
constexpr int kValueDim = V_DIM;      // of V and O
constexpr bool kPadded = PADDED;
constexpr int kBlockN = BLOCK_N;       // keys of a tile
constexpr int kConsumers = CONSUMERS;  // consumer warpgroups, 64 query rows each
constexpr bool kCausal = CAUSAL;
constexpr bool kOutE4m3 = OUT_E4M3;
constexpr bool kTelemetry = TELEMETRY;
// Logits go through E4M3 by a logit descale per query head.
constexpr bool kLogitsE4m3 = LOGITS_E4M3;
// Few query rows: heads of a GQA group share a tile, and keys are split over blocks (scheduler_split.cuh). Compiled with
// CAUSAL; `Params::causal_offset` says whether the call is.
constexpr bool kSplitKv = SPLIT_KV;
// Windows to the left and right of a query by `Params`, which may have none. Compiled with CAUSAL.
constexpr bool kWindow = WINDOW;
// Sequences of unequal length: tiles come from a schedule in the workspace (schedule.cuh). Compiled with WINDOW.
constexpr bool kVarlen = VARLEN;
// Logits become cap tanh(S / cap); in the mainloop they are tanh(S / cap).
constexpr bool kSoftCap = SOFT_CAP;
// A logit a query head joins the row sums.
constexpr bool kSink = SINK;
// Telemetry of logits before they are capped or rounded, beside the maxima of the softmax.
constexpr bool kRawMax = kLogitsE4m3 || (kSoftCap && kTelemetry);
// Keys and values lie in pages, and the lengths of sequences in device memory (scheduler_paged.cuh).
constexpr bool kPaged = PAGED;
// Values come as rows, and idle warps bring them into V's layout (values.cuh).
constexpr bool kVRows = V_ROWS;
// The tensor core's FP8 accumulator is narrower than f32 and truncates, so P V needs a second level of accumulation:
//   Flush    O stays in the tensor core's accumulator, and is added to an f32 O in shared memory every FLUSH_KEYS
//   Promote  P V of one tile is added to O in f32, in registers
// or, with F16, P and V in 16 bits (V written so by cast_qkv.cu), whose accumulator needs none.
enum class Pv { Flush, Promote, F16 };
constexpr Pv kPv = (Pv)PV;
//   Single   one tile of logits in flight (mainloop_single.cuh)
//   Double   two of them, where the registers of a thread hold them (mainloop_double.cuh)
//   Rolled   the same in one loop body without unrolled copies, for splits of few tiles (mainloop_rolled.cuh)
//   Sliced   P V is promoted in slices of columns, through the registers of the logits (mainloop_sliced.cuh), where a thread has
//            no others besides O. Of 64 columns the logits' registers hold two slices.
enum class Mainloop { Single, Double, Rolled, Sliced };
constexpr Mainloop kMainloop = (Mainloop)MAINLOOP;
constexpr bool kDoubleLogits = kMainloop == Mainloop::Double || kMainloop == Mainloop::Rolled;
constexpr bool kSliced = kMainloop == Mainloop::Sliced;
constexpr int kSlice = kValueDim > 128 ? 64 : kValueDim;
constexpr int kSlices = kValueDim / kSlice;
// The last of several slices has registers of its own and is added to O under the next Q K^T. At 256 columns they come from the
// producer, which can spare them in the most common variants.
constexpr bool kSmallProducer = kSliced && kValueDim == 256 && kDim == 256 && !(kVarlen || kSplitKv || kLogitsE4m3 || kOutE4m3);
constexpr bool kCarriedSlice = kSmallProducer || (kSliced && kValueDim == 192);

constexpr int kRows = 64;  // query rows of a consumer
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr float kPLog2Scale = 8.0f;  // P is computed times 2^8: its largest value 256 is below E4M3's 448
constexpr int kPvStep = kPv == Pv::F16 ? 16 : 32;  // keys of one product
constexpr int kPvRow = kPv == Pv::F16 ? 128 : kValueDim;  // bytes from key to key of a tile of V
constexpr int kPRegisters = kPv == Pv::F16 ? kBlockN / 4 : kBlockN / 8;
constexpr int kFlushTiles = FLUSH_KEYS / kBlockN;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // row_max of no key: finite, so that no difference of two maxima is NaN

static_assert(kDim % 32 == 0 && kValueDim % 32 == 0 && kDim <= 256 && kValueDim <= 256, "products of 32 columns, O in registers");
static_assert(kBlockN % 32 == 0 && kBlockN <= 256, "P V consumes 32 keys a product");
static_assert(kConsumers == 2 || kConsumers == 3, "the register file feeds two or three consumers");
static_assert(kPv != Pv::Flush || kFlushTiles > 0, "a flush follows a product");
static_assert(!kLogitsE4m3 || kPv == Pv::Flush || kSliced, "the forms in which E4M3 logits are compiled");
static_assert(kTelemetry || !kLogitsE4m3, "overflow must not go unseen");
static_assert(kMainloop != Mainloop::Rolled || kSplitKv, "the form in which the rolled loop is compiled");
static_assert(!kDoubleLogits || !(kLogitsE4m3 || kSoftCap), "the double-buffered loop neither rounds nor caps");
static_assert(!kSliced || kPv == Pv::Promote, "slices are promoted");
static_assert((!kWindow || kCausal) && (!kVarlen || kWindow), "the form in which windows are compiled");
static_assert(!kPaged || !(kVarlen || kSoftCap), "pages have a schedule of their own");
static_assert(!kPaged || (kSplitKv && kDoubleLogits && kPv == Pv::Promote), "the form in which pages are compiled");
static_assert(kPaged || !kVRows, "values are rows in pages alone");
static_assert(!kSplitKv || (kCausal && kConsumers == 2 && !kOutE4m3), "the form in which splits are compiled");

// Shared memory: Q [stage][consumer][run][64][kRun], K [stage][run][keys][kRun], V [stage][keys / 16][d / 8][8][16] (in F16
// [stage][run of 64][keys][64], 128-byte swizzle), the flushed O of each consumer in f32, mbarriers, work items. A row of Q and K
// lies in runs of a swizzle row, the last filled up with zeros.
constexpr int kRun = kDim % 128 == 0 || kDim == 96 ? 128 : 64;
constexpr int kRuns = ceil_div(kDim, kRun);
constexpr int kQRun = kRows * kRun, kKeyRun = kBlockN * kRun;
constexpr int kQBytes = kRuns * kQRun;
constexpr int kTileBytes = kRuns * kKeyRun;
constexpr int kValueRun = kBlockN * 128;  // 64 columns of a tile of V in F16
constexpr int kValueRuns = ceil_div(kValueDim, 64);
constexpr int kValueBytes = kPv == Pv::F16 ? kValueRuns * kValueRun : kBlockN * kValueDim;
// V of FP8 comes by core matrices where a box of the copy engine does not hold 16 keys of it, or some are missing: 256 words of 8 bytes.
constexpr bool kValueMatrices = kValueDim > 128 || kPadded;
constexpr int kFlushBytes = kPv == Pv::Flush ? kConsumers * kRows * kValueDim * 4 : 0;
constexpr int kWorkBytes = kVarlen ? 64 : kPaged ? 48 : 32;
constexpr int kStagingStages = kVRows ? 3 : 0;
// As many stages as fit, up to those asked for; a second one of Q where two of K and V fit beside it.
constexpr int kMaxSharedBytes = 232448, kSlackBytes = 1024;  // of one multiprocessor; aligns the swizzle atoms
__host__ __device__ constexpr int barrier_bytes(int q_stages, int kv_stages) {
  return ceil_div(8 * 2 * (q_stages * kConsumers + 2 * kv_stages), 16) * 16 + kWorkBytes * q_stages * kConsumers;
}
__host__ __device__ constexpr bool fits(int q_stages, int kv_stages) {
  return q_stages * kConsumers * kQBytes + kv_stages * (kTileBytes + kValueBytes) + kFlushBytes + barrier_bytes(q_stages, kv_stages) +
             kStagingStages * kTileBytes + kSlackBytes <= kMaxSharedBytes;
}
constexpr int kQStages = fits(2, 2) ? 2 : 1;
__host__ __device__ constexpr int most_stages(int stages) { return stages == 1 || fits(kQStages, stages) ? stages : most_stages(stages - 1); }
constexpr int kKvStages = most_stages(KV_STAGES);
constexpr int kOffsetK = kQStages * kConsumers * kQBytes;
constexpr int kOffsetV = kOffsetK + kKvStages * kTileBytes;
constexpr int kOffsetO = kOffsetV + kKvStages * kValueBytes;
constexpr int kOffsetBarriers = kOffsetO + kFlushBytes;
constexpr int kBarriers = 2 * (kQStages * kConsumers + 2 * kKvStages);
constexpr int kOffsetWork = kOffsetBarriers + ceil_div(8 * kBarriers, 16) * 16;
// Values on their way through the idle warps: tiles of rows, mbarriers, and whether a tile follows.
constexpr int kTransposeWarps = 3;
constexpr int kOffsetStaging = ceil_div(kOffsetWork + kWorkBytes * kQStages * kConsumers, 1024) * 1024;
constexpr int kOffsetStagingBarriers = kOffsetStaging + kStagingStages * kTileBytes;
// Rows of the output on their way, 16 of each consumer warp, where there is room for them: the copy engine writes them.
// NOTES: 16 bytes longer than they are, which spreads a column of them over the banks.
constexpr int kOutRow = 2 * kValueDim + 16;
constexpr int kOffsetOut = kVRows ? kOffsetStagingBarriers + 24 * kStagingStages : ceil_div(kOffsetWork + kWorkBytes * kQStages * kConsumers, 16) * 16;
constexpr int kOutBytes = kConsumers * kRows * kOutRow;
constexpr bool kBulkStore = !(kOutE4m3 || kSplitKv || kPadded) && kOffsetOut + kOutBytes + kSlackBytes <= kMaxSharedBytes;
constexpr int kSharedBytes = kOffsetOut + (kBulkStore ? kOutBytes : 0) + kSlackBytes;
static_assert(kSharedBytes <= kMaxSharedBytes && kKvStages > 1, "shared memory of one multiprocessor");
static_assert(!kDoubleLogits || kQStages == 2, "the last product of a work item runs concurrently with the first of the next");
static_assert(!kPaged || (kRuns == 1 && kValueDim == kDim && !kPadded), "paged kernels are compiled for equal head dimensions of 64 or 128");

constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kSmallProducer ? 24 : 40;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kSmallProducer ? 240 : 232;
// NOTES: a block can only redistribute what it was launched with; a warpgroup that asks for more waits forever.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * kLaunchRegisters, "register file");
// The producer keeps one ring for K and V and no quotient in registers, where it would spill otherwise.
constexpr bool kShortProducer = (kLogitsE4m3 && kDim == 128 && kConsumers == 3) || kWindow || kRuns > 1 || (kConsumers == 3 && kValueMatrices);

}  // namespace
