// Addresses of weights that move, and the tensor maps made of them, into the tables of an engine: words that come with the launch,
// as its parameter, so that nothing is uploaded, and a graph that captured the launch writes the same words at each replay. Any
// architecture. A block per run of consecutive words, a thread per word.
#include "ptx/fence.cuh"

constexpr u32 RUNS = 8, WORDS = 128, LONGEST = 32;
struct Run {
  u64* to;
  u32 first, count;  // of `words`
};
struct Writes {
  Run runs[RUNS];
  u64 words[WORDS];
};
static_assert(sizeof(Writes) == 1152, "host mirror");

extern "C" __global__ void __launch_bounds__(LONGEST) scale_addresses(const __grid_constant__ Writes writes) {
  const Run run = writes.runs[blockIdx.x];
  if (threadIdx.x < run.count) run.to[threadIdx.x] = writes.words[run.first + threadIdx.x];
  ptx::fence_tensormap_release();
}
