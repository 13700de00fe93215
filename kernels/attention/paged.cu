// Fused attention forward over a paged KV cache in E4M3: the mainloops, softmax and epilogue of forward.cu with the schedule of
// scheduler_paged.cuh. Launched after append.cu, which leaves the list of work items.
//
// Pages: K is (pages, page_size, heads_kv, d), any strides with d contiguous. V is (pages, heads_kv, page_size / 16, d / 8, 8, 16)
// bytes, as in forward.cu, which the products take as it is; or with V_ROWS as K, and idle warps of the producer's warpgroup
// bring it into that layout. Pages of 16 to 256 tokens.
//
// What a page holds past the end of its sequence reaches no output: such logits are masked, and such values set to zero before
// a product meets them.
#include "attention/mainloop_double.cuh"
#include "attention/mainloop_rolled.cuh"

// The host reads them.
extern "C" __constant__ int SHARED_BYTES = kSharedBytes, RUN_BYTES = kRun, VALUE_MATRICES = kValueMatrices;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_paged(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                const __grid_constant__ Params p, const __grid_constant__ PagedParams g) {
  // Align shared memory to the swizzle atoms
  extern __shared__ u8 raw[];
  u32 base = (ptx::shared_address(raw) + 1023u) & ~1023u;
  u8* shared = raw + (base - ptx::shared_address(raw));
  ptx::keep(base);
  WorkItem* work = reinterpret_cast<WorkItem*>(shared + kOffsetWork);
  const Pipeline pipeline(base);
  const u32 staging = base + kOffsetStaging;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int consumers = p.active_consumers;

  // Initialise barriers
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map_q);
    ptx::prefetch_tensormap(&map_k);
    ptx::prefetch_tensormap(&map_v);
    for (int i = 0; i < kStagingStages; i++) {
      const u32 full = base + kOffsetStagingBarriers + 16 * i;
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(full + 8, kTransposeWarps);
      ptx::st_shared_u32(base + kOffsetStagingBarriers + 16 * kStagingStages + 4 * i, 1);
    }
    pipeline.init(consumers);
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  // The blocks that combine parts start as soon as there is room, and wait for the last part
  ptx::griddepcontrol_launch_dependents();

  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    if (warp == 0) produce_pages(p, g, pipeline, work, staging, map_q, map_k, map_v);
#if V_ROWS
    else transpose_pages(pipeline, staging, warp - 1);
#endif
  } else if (warpgroup < consumers) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    float o[kDim / 2];
    u32 p_operand[kPRegisters];
    RowState rows;
    Consumer c(p, pipeline, shared, work, o, p_operand, rows);
    if constexpr (kMainloop == Mainloop::Rolled) mainloop_rolled(c);
    else mainloop_double(c);
  }
}
