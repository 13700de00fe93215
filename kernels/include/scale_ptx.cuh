// PTX used by the scale kernels, each instruction wrapped once: mbarriers, bulk copies, ldmatrix, wgmma (Hopper).
#pragma once
#include "scale_types.cuh"

namespace ptx {

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives if `condition`, without a branch: one would serialise the wgmma around it.
__device__ __forceinline__ void barrier_arrive_if(u32 barrier, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
               "r"((u32)condition)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\nbra again_%=;\nover_%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Between plain accesses of shared memory and those of the copy engine and the tensor cores: behind writes that they are to read, and
// behind reads of what they are to overwrite. An arrival at a barrier does not wait for a read that is on its way, and beside kernels
// that keep shared memory busy the next copy has been seen to land first.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A warp arrives by its lane 0, once all its lanes are there. EVERY_LANE 1: by all of them, for racecheck of compute-sanitizer,
// which follows an arrival by the accesses of the arriving thread alone.
#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif
constexpr u32 ARRIVALS = EVERY_LANE ? 32 : 1;  // of a warp
__device__ __forceinline__ bool arrives(u32 lane) { return EVERY_LANE || lane == 0; }
// The copy engine and the tensor cores see what this warp has written, and may overwrite what it has read.
__device__ __forceinline__ void hand_over(u32 barrier, u32 lane) {
  async_fence();
  __syncwarp();
  barrier_arrive_if(barrier, arrives(lane));
}

// Registers from one warpgroup to another; a multiple of 8, by all of its warps.
template <int COUNT> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Ahead of the first copy by a tensor map in a launch. The host writes maps by plain copies, and an engine's may lie where those of one that is
// gone lay: what a multiprocessor keeps of a map does not notice by itself. By the thread that copies, or ahead of a block barrier.
__device__ __forceinline__ void take_map(u64 map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// Global to shared memory by the copy engine, completing on an mbarrier.
__device__ __forceinline__ void copy_tile(u32 to, u64 map, u32 x, u32 y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same for what is read once, and is to leave the second-level cache to others.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_tile(u32 to, u64 map, u32 x, u32 y, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}

// Descriptor of a shared-memory operand in 128-byte swizzled rows; atoms of 8 rows lie 1024 bytes apart. `next`: bytes from one
// run of 64 values to the next where these are contiguous along the operand's side.
__device__ __forceinline__ u64 swizzled_operand(u32 address, u32 next = 1024) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// 8 x 16 values as two blocks of 8 rows of 16 bytes, one after the other.
__device__ __forceinline__ u64 plain_operand(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int COUNT> __device__ __forceinline__ void keep(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// d (64 x 64) = a (64 x 16) * b (64 x 16)^T + (accumulate ? d : 0), f16 in, f32 out, both in shared memory. ALONG: stored with
// the 64 side contiguous.
template <bool ALONG>
__device__ __forceinline__ void wgmma_f16_64x64x16(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, %35, %35;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate), "n"(ALONG ? 1 : 0));
}

// d (64 x COLUMNS) = a (64 x 16) b (COLUMNS x 16)^T + (accumulate ? d : 0), f16 or bf16 in, f32 out; a in registers, b in
// shared memory. ALONG: stored with the COLUMNS side contiguous. Value i of a lane lies at row 16 warp + l/4 + 8 (i/2 % 2),
// column 8 (i/4) + 2 (l%4) + i%2.
template <int COLUMNS, bool ALONG, bool HALF> struct Wgmma;
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
#define P32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P64 \
  P32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(COLUMNS, HALF, TYPES, REGISTERS, VALUES, A, B, ACCUMULATE, TURNED)                                          \
  template <bool ALONG> struct Wgmma<COLUMNS, ALONG, HALF> {                                                              \
    __device__ static __forceinline__ void run(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, int accumulate) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPES " {" REGISTERS "}, {" A "}, " B        \
                   ", p, 1, 1, " TURNED ";\n}\n"                                                                        \
                   : VALUES                                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ALONG ? 1 : 0));           \
    }                                                                                                                    \
  };
#define VALUES4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define VALUES32 D32(0)
#define VALUES64 D32(0), D32(32)
#define LIST(...) __VA_ARGS__
WGMMA(8, false, "bf16.bf16", "%0,%1,%2,%3", LIST(VALUES4), "%4,%5,%6,%7", "%8", "%9", "%10")
WGMMA(8, true, "f16.f16", "%0,%1,%2,%3", LIST(VALUES4), "%4,%5,%6,%7", "%8", "%9", "%10")
WGMMA(64, false, "bf16.bf16", P32, LIST(VALUES32), "%32,%33,%34,%35", "%36", "%37", "%38")
WGMMA(64, true, "f16.f16", P32, LIST(VALUES32), "%32,%33,%34,%35", "%36", "%37", "%38")
WGMMA(128, false, "bf16.bf16", P64, LIST(VALUES64), "%64,%65,%66,%67", "%68", "%69", "%70")
WGMMA(128, true, "f16.f16", P64, LIST(VALUES64), "%64,%65,%66,%67", "%68", "%69", "%70")

// The same in f16 with a in shared memory too, both stored along the inputs.
__device__ __forceinline__ void wgmma_f16_64x128x16(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" P64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
               : D32(0), D32(32)
               : "l"(a), "l"(b), "r"(accumulate));
}
#undef D8
#undef D32
#undef P32
#undef P64
#undef WGMMA
#undef VALUES4
#undef VALUES32
#undef VALUES64
#undef LIST

// Two values at once, rounded once.
template <bool HALF> __device__ __forceinline__ u32 fma(u32 a, u32 b, u32 c) {
  u32 d;
  if (HALF) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <bool HALF> __device__ __forceinline__ u32 product(u32 a, u32 b) {
  u32 d;
  if (HALF) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <bool HALF> __device__ __forceinline__ u32 negated(u32 a) {
  u32 d;
  if (HALF) asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  else asm("neg.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// A 16 x 16 operand from shared memory, every lane naming 16 bytes of it; turned where these run along the other side.
template <bool TURNED> __device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 address) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}
__device__ __forceinline__ void load8(u32& a, u32& b, u32 address) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(address));
}
__device__ __forceinline__ u32 load4(u32 address) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void load16(u32& a, u32& b, u32& c, u32& d, u32 address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
}

}  // namespace ptx
