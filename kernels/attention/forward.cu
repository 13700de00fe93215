// Fused attention forward on E4M3 operands: O = softmax(scale Q K^T) V for Hopper (sm_90a).
//
// One producer warp feeds shared memory through TMA (scheduler.cuh); each consumer warpgroup owns 64 query rows (consumer.cuh),
// runs a mainloop over the keys (mainloop_*.cuh) with an online softmax (softmax.cuh), and writes the result (epilogue.cuh).
// Barriers and buffers are those of pipeline.cuh, variants those of config.cuh.
//
// The mainloop to read first is mainloop_double.cuh: it runs nearly all calls on heads of 128. The others are for what its
// registers do not hold (config.cuh).
//
// Operands: Q, K by TMA from any [batch, length, heads, dim] strides. V as cast_qkv.cu writes it: for P V in F16 as rows in
// F16, [batch, length, heads, dim]; for FP8 as [batch, kv head, ceil(keys / 16), dim / 8, 8, 16] bytes, where byte 4 t + e of a group of 16 keys holds key
// 8 (e / 2) + 2 t + e % 2. That is the K-major core-matrix order of `wgmma`, and its key order makes the accumulator
// registers of the logits the operand registers of P.
//
// The algorithm is FlashAttention-2's (Dao 2023) with the warp specialisation of FlashAttention-3 (Shah et al. 2024).
#include "attention/mainloop_double.cuh"
#include "attention/mainloop_rolled.cuh"
#include "attention/mainloop_single.cuh"
#include "attention/mainloop_sliced.cuh"
#include "ptx/reduce.cuh"

// The host reads them.
extern "C" __constant__ int SHARED_BYTES = kSharedBytes, RUN_BYTES = kRun, VALUE_MATRICES = kValueMatrices;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_forward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                  const __grid_constant__ TensorMap map_v, const __grid_constant__ Params p) {
  // Align shared memory to the swizzle atoms
  extern __shared__ u8 raw[];
  u32 base = (ptx::shared_address(raw) + 1023u) & ~1023u;
  u8* shared = raw + (base - ptx::shared_address(raw));
  ptx::keep(base);
  WorkItem* work = reinterpret_cast<WorkItem*>(shared + kOffsetWork);
  const Pipeline pipeline(base);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int consumers = kSplitKv ? p.active_consumers : kConsumers;

  // Initialise barriers
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map_q);
    ptx::prefetch_tensormap(&map_k);
    ptx::prefetch_tensormap(&map_v);
    pipeline.init(consumers);
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  // The blocks that combine splits start as soon as there is room, and wait for the last split
  if (kSplitKv) ptx::griddepcontrol_launch_dependents();

  if (warpgroup == kConsumers) {
    // Producer: one thread issues every copy
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) produce(p, pipeline, work, map_q, map_k, map_v, consumers);
  } else if (!kSplitKv || warpgroup < consumers) {
    // Consumers
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    float o[kValueDim / 2];
    u32 p_operand[kPRegisters];
    RowState rows;
    Consumer c(p, pipeline, shared, work, o, p_operand, rows);
    if constexpr (kMainloop == Mainloop::Rolled) mainloop_rolled(c);
    else if constexpr (kMainloop == Mainloop::Double) mainloop_double(c);
    else if constexpr (kSliced) mainloop_sliced(c);
    else mainloop_single(c);
    // Shared memory stays until the copy engine has read it
    if constexpr (kBulkStore) ptx::bulk_wait_read<0>();
  }
}
