// CUDA C++ as the kernels of this crate use it, on one core of a CPU: compiler.cpp puts this in front of each source.
//
// Every CUDA thread is a fiber. A fiber runs until it waits: at a barrier, for an mbarrier, for the other lanes of its warp. Copies of
// the copy engine arrive at a random time after they were asked for, and products of a warpgroup are computed when they are waited
// for, so that a kernel which reads too early, or overwrites too early, gives wrong values here too. Warps take turns in a random
// order (SIGMASCALE_SIMULATOR_SEED). Where no fiber can go on, the run ends with what each warp waits for.
//
// Not simulated: memory order between threads (every store is seen at once), time, registers, more than one block at a time.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>
#include <sys/mman.h>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class A, class B> using Common = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>>;
template <class A, class B> constexpr Common<A, B> min(A a, B b) { return (Common<A, B>)a < (Common<A, B>)b ? a : b; }
template <class A, class B> constexpr Common<A, B> max(A a, B b) { return (Common<A, B>)a < (Common<A, B>)b ? b : a; }

namespace simulator {

using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

[[noreturn]] inline void fail(const std::string& what);

struct Mbarrier {
  int16_t expected, pending;
  int32_t bytes : 31;
  u32 phase : 1;
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 64 bits");

struct Warp {
  u64 slots[2][32];
  u32 turn = 0, arrived = 0, lanes = 0;
};
struct Barrier { u32 turn = 0, arrived = 0, any = 0, all = 1, was_any = 0, was_all = 0; };

// A product of a warpgroup that is under way: this thread's share of it.
struct Product {
  void (*compute)(const Product&);
  float* d;
  const u32* a;  // registers, or null
  u64 a_descriptor, b_descriptor;
  bool accumulate;
};
struct Fiber {
  void* stack = nullptr;  // where it stopped
  uint3 thread = {};
  Warp* warp = nullptr;
  u32 warp_turn = 0;
  // What it waits for: a word that changes, or a phase of an mbarrier
  const u32* word = nullptr;
  u32 old = 0;
  const Mbarrier* barrier = nullptr;
  u32 parity = 0;
  bool done = true;
  std::vector<Product> open;                  // issued, not committed
  std::vector<std::vector<Product>> groups;   // committed
};
struct Copy {
  u32 to, barrier, bytes;
  std::function<void()> run;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Copy> copies;
  uint3 block = {}, grid = {}, threads = {};
  u32 live = 0;
  u8* shared = nullptr;
  u32 shared_bytes = 0;
  std::mt19937 random;
};
inline Block state;
inline Fiber* me;
inline void* scheduler;
inline std::function<void()>* body;

constexpr u32 kSharedBase = 1024;  // of the shared window: no address is 0
inline u8* shared(u32 address, u32 bytes) {
  if (address < kSharedBase || address + bytes > kSharedBase + state.shared_bytes) fail("shared address " + std::to_string(address));
  return state.shared + (address - kSharedBase);
}
inline Mbarrier& mbarrier(u32 address) { return *reinterpret_cast<Mbarrier*>(shared(address, 8)); }
inline u8* dynamic_shared() { return state.shared; }

// Switches from one stack to another: the registers that a call keeps.
extern "C" void simulator_switch(void** from, void* to);
asm(R"(
.text
.type simulator_switch, @function
simulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

__attribute__((noinline)) inline void yield() { simulator_switch(&me->stack, scheduler); }
inline void wait_word(const u32* word, u32 old) {
  me->word = word, me->old = old;
  while (*word == old) yield();
  me->word = nullptr;
}
inline bool completed(const Mbarrier& b, u32 parity) { return b.phase != parity; }
inline void check_phase(Mbarrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.expected;
}
inline void arrive(u32 address) {
  Mbarrier& b = mbarrier(address);
  if (--b.pending < 0) fail("an arrival too many at mbarrier " + std::to_string(address));
  check_phase(b);
}
inline void wait_phase(u32 address, u32 parity) {
  const Mbarrier& b = mbarrier(address);
  me->barrier = &b, me->parity = parity;
  while (!completed(b, parity)) yield();
  me->barrier = nullptr;
}

// What every lane of the warp gave.
inline const u64* collect(u64 value) {
  Warp& w = *me->warp;
  const u32 turn = me->warp_turn++;
  w.slots[turn & 1][me->thread.x % 32] = value;
  if (++w.arrived == w.lanes) w.arrived = 0, w.turn++;
  else wait_word(&w.turn, turn);
  return w.slots[turn & 1];
}
template <class T> T from_bits(u64 bits) { T x; memcpy(&x, &bits, sizeof(T)); return x; }
template <class T> u64 to_bits(T x) { static_assert(sizeof(T) <= 8); u64 bits = 0; memcpy(&bits, &x, sizeof(T)); return bits; }
inline u32 lane() { return me->thread.x % 32; }

inline void barrier_sync(int id, u32 threads, bool value = false) {
  Barrier& b = state.barriers[id];
  const u32 turn = b.turn;
  b.any |= value, b.all &= value;
  if (++b.arrived == (threads == 0 ? state.live : threads)) {
    b.was_any = b.any, b.was_all = b.all, b.any = 0, b.all = 1, b.arrived = 0, b.turn++;
  } else {
    wait_word(&b.turn, turn);
  }
}

inline void fail(const std::string& what) {
  fprintf(stderr, "simulator: block %u, thread %u: %s\n", state.block.x, me ? me->thread.x : ~0u, what.c_str());
  for (size_t w = 0; w < state.warps.size(); w++) {
    const Fiber& f = state.fibers[32 * w];
    if (f.done) continue;
    if (f.barrier) fprintf(stderr, "  warp %zu waits for mbarrier %ld, phase %u (pending %d, bytes %d)\n", w, (long)((u8*)f.barrier - state.shared) + kSharedBase, f.parity, f.barrier->pending, (int)f.barrier->bytes);
    else if (f.word) fprintf(stderr, "  warp %zu waits for its lanes or a barrier\n", w);
  }
  abort();
}

inline void start() {
  (*body)();
  me->done = true;
  state.live--;
  Warp& w = *me->warp;
  w.lanes--;
  if (w.lanes > 0 && w.arrived == w.lanes) w.arrived = 0, w.turn++;
  if (state.live > 0 && state.barriers[0].arrived == state.live) {
    Barrier& b = state.barriers[0];
    b.was_any = b.any, b.was_all = b.all, b.any = 0, b.all = 1, b.arrived = 0, b.turn++;
  }
  yield();
  abort();
}

inline void run_block() {
  constexpr size_t kStack = 256 << 10;
  static std::vector<u8*> stacks;
  const u32 threads = state.threads.x;
  while (stacks.size() < threads)
    stacks.push_back((u8*)mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0));
  state.warps.assign((threads + 31) / 32, {});
  state.fibers.resize(threads);
  for (Barrier& b : state.barriers) b = {};
  // What shared memory holds is anyone's
  memset(state.shared, 0x7f, state.shared_bytes);
  for (u32 i = 0; i < threads; i++) {
    Fiber& f = state.fibers[i];
    f = {};
    f.done = false, f.thread = {i, 0, 0}, f.warp = &state.warps[i / 32], f.warp->lanes++;
    void** top = reinterpret_cast<void**>(stacks[i] + kStack) - 1;
    top[0] = nullptr, top[-1] = (void*)start;
    for (int r = 2; r < 8; r++) top[-r] = nullptr;
    f.stack = top - 7;
  }
  state.live = threads;
  std::vector<u32> order(state.warps.size());
  for (u32 i = 0; i < order.size(); i++) order[i] = i;
  while (state.live > 0) {
    bool moved = false;
    std::shuffle(order.begin(), order.end(), state.random);
    for (u32 w : order) {
      for (u32 i = 32 * w; i < std::min(32 * w + 32, threads); i++) {
        Fiber& f = state.fibers[i];
        if (f.done || (f.word && *f.word == f.old) || (f.barrier && !completed(*f.barrier, f.parity))) continue;
        moved = true, me = &f;
        simulator_switch(&scheduler, f.stack);
        me = nullptr;
      }
    }
    // Some copies arrive, in any order
    while (!state.copies.empty() && (!moved || state.random() % 4 == 0)) {
      const size_t i = state.random() % state.copies.size();
      Copy copy = std::move(state.copies[i]);
      state.copies.erase(state.copies.begin() + i);
      copy.run();
      Mbarrier& b = mbarrier(copy.barrier);
      b.bytes -= copy.bytes;
      check_phase(b);
      moved = true;
    }
    if (!moved) fail("no thread can go on");
  }
  if (!state.copies.empty()) fail("a copy that nobody waited for");
}

inline void run(std::function<void()>& kernel, const u32* grid, u32 threads, u32 shared_bytes) {
  static u8* arena = (u8*)mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  static u32 launches = 0;
  const char* seed = getenv("SIGMASCALE_SIMULATOR_SEED");
  state.random.seed((seed ? atoi(seed) : 0) + 7919 * launches++);
  state.shared = arena + 16 * (state.random() % 64), state.shared_bytes = shared_bytes;
  state.grid = {grid[0], grid[1], grid[2]}, state.threads = {threads, 1, 1};
  body = &kernel;
  for (u32 z = 0; z < grid[2]; z++)
    for (u32 y = 0; y < grid[1]; y++)
      for (u32 x = 0; x < grid[0]; x++) state.block = {x, y, z}, run_block();
}

// A kernel with the values of its arguments.
template <class... Args> std::function<void()> bind(void (*kernel)(Args...), void** arguments) {
  size_t i = 0;
  return [kernel, values = std::tuple<Args...>{*reinterpret_cast<Args*>(arguments[i++])...}] { std::apply(kernel, values); };
}

inline float e4m3(u8 x) {
  static const std::vector<float> table = [] {
    std::vector<float> t(256);
    for (int i = 0; i < 256; i++) {
      const int e = i >> 3 & 15, m = i & 7;
      float v = e == 0 ? ldexpf(m, -9) : ldexpf(8 + m, e - 10);
      if ((i & 127) == 127) v = NAN;
      t[i] = i & 128 ? -v : v;
    }
    return t;
  }();
  return table[x];
}

}  // namespace simulator

#define threadIdx (simulator::me->thread)
#define blockIdx (simulator::state.block)
#define gridDim (simulator::state.grid)
#define blockDim (simulator::state.threads)

template <class T> T __shfl_sync(unsigned, T x, int lane) { return simulator::from_bits<T>(simulator::collect(simulator::to_bits(x))[lane % 32]); }
template <class T> T __shfl_xor_sync(unsigned, T x, int d) { return simulator::from_bits<T>(simulator::collect(simulator::to_bits(x))[simulator::lane() ^ d]); }
template <class T> T __shfl_up_sync(unsigned, T x, int d) {
  const int lane = simulator::lane();
  return simulator::from_bits<T>(simulator::collect(simulator::to_bits(x))[lane < d ? lane : lane - d]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const unsigned long long* all = simulator::collect(x);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; i++) bits |= (unsigned)(all[i] != 0) << i;
  return bits;
}
inline bool __any_sync(unsigned m, bool x) { return __ballot_sync(m, x) != 0; }
inline bool __all_sync(unsigned m, bool x) { return __ballot_sync(m, x) == ~0u; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const unsigned long long* all = simulator::collect(x);
  return (unsigned)*std::max_element(all, all + 32);
}
inline void __syncwarp() { simulator::collect(0); }
inline void __syncthreads() { simulator::barrier_sync(0, 0); }
inline int __syncthreads_or(int x) { simulator::barrier_sync(0, 0, x != 0); return simulator::state.barriers[0].was_any; }
inline int __syncthreads_and(int x) { simulator::barrier_sync(0, 0, x != 0); return simulator::state.barriers[0].was_all; }
inline void __threadfence() {}
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
template <class T> T __ldg(const T* at) { return *at; }
inline unsigned __float_as_uint(float x) { return simulator::from_bits<unsigned>(simulator::to_bits(x)); }
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __uint_as_float(unsigned x) { return simulator::from_bits<float>(x); }
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
template <class T, class U> T atomicAdd(T* at, U x) { T old = *at; *at = old + (T)x; return old; }
template <class T, class U> T atomicMax(T* at, U x) { T old = *at; *at = std::max(old, (T)x); return old; }
template <class T, class U> T atomicMin(T* at, U x) { T old = *at; *at = std::min(old, (T)x); return old; }
template <class T, class U> T atomicExch(T* at, U x) { T old = *at; *at = (T)x; return old; }
template <class T> unsigned long __cvta_generic_to_shared(const T* p) {
  const long offset = (const unsigned char*)p - simulator::state.shared;
  if (offset < 0 || offset >= (long)simulator::state.shared_bytes) simulator::fail("an address of static shared memory");
  return simulator::kSharedBase + offset;
}
