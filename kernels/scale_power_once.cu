// The paper's iteration on a whole layer, M = sum over the heads of W_Q W_K^T, with each weight read once a step:
// t = W^T (W x) for one projection W of all layers, which scale_power_next turns into the other's x.
//
// u = W x needs every channel of an input, and W^T u needs u. So a cluster of PEERS blocks holds all channels of TILE
// inputs in its shared memories, a block SHARE of them; the blocks exchange their parts of u, and the second product
// reads the same tile. Sixteen warps multiply on the plain cores, x and t in registers for a whole layer; a warp asks for
// tiles, and another sums the warps' parts, sends them to every block of the cluster and sums what arrives. The second
// product of a tile comes after the first of the next, which hides the exchange.
//
// Two slots of the exchange take turns without a signal back: a block sends tile n + 2 once it has tile n + 1 of every
// block, and each sent that after it had summed up tile n.
//
// ||u|| divides t afterwards: sigma = ||M^T u|| of the unit u, never above ||M||.
//
// BF16, F16, F32; [out, in], or ALONG_CHANNELS: [in, out].
#include "scale_ptx.cuh"

#ifndef WEIGHTS
#define WEIGHTS 0
#endif
#ifndef PEERS
#define PEERS 8
#endif
#ifndef SHARE  // channels of a block, BOXES times BOX
#define SHARE 512
#endif
#ifndef BOX
#define BOX 256
#endif
#ifndef ALONG_CHANNELS
#define ALONG_CHANNELS 0
#endif
#ifndef TILE
#define TILE 64
#endif

struct SumPass {
  u64 maps;    // a tensor map a layer
  u64 x;       // [layer][PEERS * SHARE], zeros behind the channels
  u64 parts;   // of t, [slot][PEERS * SHARE]
  u64 squares; // of ||u||^2, [slot], f64
  u32 tiles;   // of a layer
  u32 items;   // tiles of all layers
};
static_assert(sizeof(SumPass) == 40, "host mirror");

constexpr u32 SIZE = WEIGHTS == DTYPE_F32 ? 4 : 2, VALUES = 16 / SIZE;  // of a load
constexpr u32 WARPS = 16, THREADS = (WARPS + 2) * 32;
constexpr u32 EACH = TILE / 32;  // inputs of a lane of the exchange
constexpr u32 BOXES = SHARE / BOX, BOX_BYTES = BOX * TILE * SIZE, TILE_BYTES = SHARE * TILE * SIZE;
constexpr u32 STAGE_BYTES = TILE_BYTES + (SHARE * 4 + 127) / 128 * 128;
static_assert(SHARE % BOX == 0 && BOX % 8 == 0 && BOX <= (ALONG_CHANNELS ? 512 / SIZE : 256), "whole boxes");
static_assert(TILE == 32 || TILE == 64, "one or two inputs a lane of the exchange");

// Shared memory: stages (weights, x), parts of u of the warps [2][PARTS][TILE], of the peers [2][PEERS][TILE], u [2][TILE].
constexpr u32 PARTS = ALONG_CHANNELS ? 1 : WARPS;
constexpr u32 EXCHANGE_BYTES = 2 * (PARTS + PEERS + 1) * TILE * 4;
constexpr u32 FITTING = (231000 - 128 - EXCHANGE_BYTES) / STAGE_BYTES, STAGES = FITTING < 8 ? FITTING : 8;
static_assert(STAGES >= 3, "one tile in each product and one on its way");

extern "C" __constant__ int SHARED_BYTES = 128 + STAGES * STAGE_BYTES + EXCHANGE_BYTES;
extern "C" __constant__ int BLOCK_THREADS = THREADS;

__device__ __forceinline__ u32 run_start(u32 items, u32 run, u32 runs) { return (u32)((u64)items * run / runs); }
__device__ __forceinline__ u32 run_of(u32 items, u32 item, u32 runs) { return (u32)((((u64)item + 1) * runs - 1) / items); }

__device__ __forceinline__ void wait_for_peers(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\nbra again_%=;\nover_%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// All threads of the cluster.
__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void meet_multiplying() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }
__device__ __forceinline__ u32 rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ u32 of_peer(u32 address, u32 peer) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(peer));
  return there;
}
__device__ __forceinline__ void send(u32 to, const float (&v)[EACH], u32 barrier) {
  if (EACH == 2)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to),
                 "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1 % EACH])), "r"(barrier)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(v[0])), "r"(barrier)
                 : "memory");
}
template <u32 COUNT> __device__ __forceinline__ void load_floats(float (&v)[COUNT], u32 address) {
#pragma unroll
  for (u32 i = 0; i < COUNT; i += COUNT < 4 ? COUNT : 4) {
    if (COUNT >= 4)
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(v[i]), "=f"(v[(i + 1) % COUNT]), "=f"(v[(i + 2) % COUNT]), "=f"(v[(i + 3) % COUNT])
                   : "r"(address + i * 4)
                   : "memory");
    else if (COUNT == 2)
      asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1 % COUNT]) : "r"(address) : "memory");
    else
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(address) : "memory");
  }
}
template <u32 COUNT> __device__ __forceinline__ void store_floats(u32 address, const float* v) {
  if (COUNT == 4)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1 % COUNT]), "f"(v[2 % COUNT]),
                 "f"(v[3 % COUNT])
                 : "memory");
  else if (COUNT == 2)
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v[0]), "f"(v[1 % COUNT]) : "memory");
  else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v[0]) : "memory");
}
__device__ __forceinline__ void load_weights(float (&w)[VALUES], u32 address) {
  u32 r[4];
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    if (WEIGHTS == DTYPE_F32)
      w[i] = __uint_as_float(r[i]);
    else if (WEIGHTS == DTYPE_F16)
      w[2 * i % VALUES] = f16_value((u16)r[i]), w[(2 * i + 1) % VALUES] = f16_value((u16)(r[i] >> 16));
    else
      w[2 * i % VALUES] = bf16_low(r[i]), w[(2 * i + 1) % VALUES] = bf16_high(r[i]);
  }
}

// Sums v over the lanes that differ in the bits from `least` to 16. Each exchange halves what a lane has while it can; gives
// which of the values the first of the lane's is.
template <u32 COUNT> __device__ __forceinline__ u32 fold(float (&v)[COUNT], u32 lane, u32 least) {
  u32 first = 0, kept = COUNT;
#pragma unroll
  for (u32 step = 16; step; step >>= 1) {
    if (step < least) continue;
    if (kept == 1) {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], step);
      continue;
    }
    kept /= 2;
    const bool upper = lane & step;
#pragma unroll
    for (u32 i = 0; i < COUNT / 2; i++)
      if (i < kept) {
        const float away = upper ? v[i] : v[i + kept], mine = upper ? v[i + kept] : v[i];
        v[i] = mine + __shfl_xor_sync(0xffffffffu, away, step);
      }
    first += upper ? kept : 0;
  }
  return first;
}

// A thread's share of both products. Rows of channels: 16 bytes of every STEP-th channel; they lie 16 bytes apart along
// the threads.
struct Rows {
  static constexpr u32 LANES = TILE / VALUES, STEP = WARPS * 32 / LANES, HELD = (SHARE + STEP - 1) / STEP;
  float x[HELD], t[HELD];
  u32 lane, warp, channel, input;
  __device__ __forceinline__ Rows(u32 lane, u32 warp)
      : x{}, t{}, lane(lane), warp(warp), channel((warp * 32 + lane) / LANES), input(lane % LANES * VALUES) {}
  __device__ __forceinline__ bool has(u32 j) const { return (j + 1) * STEP <= SHARE || channel + j * STEP < SHARE; }
  __device__ __forceinline__ u32 place(u32 j) const { return (j * WARPS * 32 + warp * 32 + lane) * 16; }
  __device__ __forceinline__ void take(u32 from) {
#pragma unroll
    for (u32 j = 0; j < HELD; j++)
      if (has(j)) {
        float v[1];
        load_floats(v, from + (channel + j * STEP) * 4);
        x[j] = v[0];
      }
  }
  __device__ __forceinline__ void first(u32 tile, u32 to) const {
    float u[VALUES] = {};
#pragma unroll
    for (u32 j = 0; j < HELD; j++)
      if (has(j)) {
        float w[VALUES];
        load_weights(w, tile + place(j));
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) u[i] += w[i] * x[j];
      }
    const u32 mine = fold(u, lane, LANES);
    store_floats<EACH>(to + (warp * TILE + input + mine) * 4, u);
  }
  __device__ __forceinline__ void second(u32 tile, u32 from) {
    float u[VALUES];
    load_floats(u, from + input * 4);
#pragma unroll
    for (u32 j = 0; j < HELD; j++)
      if (has(j)) {
        float w[VALUES], even = 0.f, odd = 0.f;
        load_weights(w, tile + place(j));
#pragma unroll
        for (u32 i = 0; i < VALUES; i += 2) even += w[i] * u[i], odd += w[i + 1] * u[i + 1];
        t[j] += even + odd;
      }
  }
  __device__ __forceinline__ void leave(u32, float* parts) {
#pragma unroll
    for (u32 j = 0; j < HELD; j++) {
#pragma unroll
      for (u32 step = LANES / 2; step; step >>= 1) t[j] += __shfl_xor_sync(0xffffffffu, t[j], step);
      if (has(j) && input == 0) parts[channel + j * STEP] = t[j];
      t[j] = 0.f;
    }
  }
};

// Rows of inputs: a warp has every sixteenth row, a lane 16 bytes of it in each box.
struct Columns {
  static constexpr u32 INPUTS = TILE / WARPS;
  float x[BOXES][VALUES], t[BOXES][VALUES];
  u32 lane, warp;
  __device__ __forceinline__ Columns(u32 lane, u32 warp) : x{}, t{}, lane(lane), warp(warp) {}
  __device__ __forceinline__ bool has() const { return BOX == 32 * VALUES || lane * VALUES < BOX; }
  __device__ __forceinline__ u32 place(u32 b, u32 i) const {
    return b * BOX_BYTES + ((i * WARPS + warp) * BOX + lane * VALUES) * SIZE;
  }
  __device__ __forceinline__ void take(u32 from) {
    if (!has()) return;
#pragma unroll
    for (u32 b = 0; b < BOXES; b++) load_floats(x[b], from + (b * BOX + lane * VALUES) * 4);
  }
  __device__ __forceinline__ void first(u32 tile, u32 to) const {
    float u[INPUTS] = {};
    if (has())
#pragma unroll
      for (u32 b = 0; b < BOXES; b++)
#pragma unroll
        for (u32 i = 0; i < INPUTS; i++) {
          float w[VALUES], even = 0.f, odd = 0.f;
          load_weights(w, tile + place(b, i));
#pragma unroll
          for (u32 k = 0; k < VALUES; k += 2) even += w[k] * x[b][k], odd += w[k + 1] * x[b][k + 1];
          u[i] += even + odd;
        }
    __syncwarp();
    const u32 mine = fold(u, lane, 1);
    if (lane % (32 / INPUTS) == 0) store_floats<1>(to + (mine * WARPS + warp) * 4, u);
  }
  __device__ __forceinline__ void second(u32 tile, u32 from) {
    if (!has()) return;
    float u[INPUTS];
#pragma unroll
    for (u32 i = 0; i < INPUTS; i++) {
      float v[1];
      load_floats(v, from + (i * WARPS + warp) * 4);
      u[i] = v[0];
    }
#pragma unroll
    for (u32 b = 0; b < BOXES; b++)
#pragma unroll
      for (u32 i = 0; i < INPUTS; i++) {
        float w[VALUES];
        load_weights(w, tile + place(b, i));
#pragma unroll
        for (u32 k = 0; k < VALUES; k++) t[b][k] += w[k] * u[i];
      }
  }
  // Warps have sums of the same channels: they meet where the tile was.
  __device__ __forceinline__ void leave(u32 tile, float* parts) {
    static_assert(WARPS * 4 <= TILE * SIZE, "room for the sums");
    meet_multiplying();
    if (has())
#pragma unroll
      for (u32 b = 0; b < BOXES; b++)
#pragma unroll
        for (u32 k = 0; k < VALUES; k += 4)
          store_floats<4>(tile + (warp * SHARE + b * BOX + lane * VALUES + k) * 4, t[b] + k);
#pragma unroll
    for (u32 b = 0; b < BOXES; b++)
#pragma unroll
      for (u32 k = 0; k < VALUES; k++) t[b][k] = 0.f;
    meet_multiplying();
    for (u32 c = warp * 32 + lane; c < SHARE; c += WARPS * 32) {
      float sum = 0.f;
#pragma unroll
      for (u32 w = 0; w < WARPS; w++) {
        float part[1];
        load_floats(part, tile + (w * SHARE + c) * 4);
        sum += part[0];
      }
      parts[c] = sum;
    }
    // The copy engine writes here next.
    ptx::async_fence();
  }
};
template <bool ALONG> struct Layout {
  using Product = Rows;
};
template <> struct Layout<true> {
  using Product = Columns;
};

// Goes over the tiles of this cluster: tile `at` of `layer`, in `stage`.
struct Cursor {
  u32 count, tiles, layer, at, n = 0, stage = 0, phase = 0;
  __device__ __forceinline__ Cursor(const SumPass& pass, u32 cluster, u32 clusters) : tiles(pass.tiles) {
    const u32 first = run_start(pass.items, cluster, clusters);
    count = run_start(pass.items, cluster + 1, clusters) - first;
    layer = first / tiles, at = first - layer * tiles;
  }
  __device__ __forceinline__ bool more() const { return n < count; }
  __device__ __forceinline__ bool starts() const { return n == 0 || at == 0; }
  __device__ __forceinline__ bool ends() const { return n + 1 == count || at + 1 == tiles; }
  __device__ __forceinline__ void next() {
    n++;
    if (++at == tiles) at = 0, layer++;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

extern "C" __global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(THREADS, 1)
    scale_power_once(const __grid_constant__ SumPass pass) {
  extern __shared__ u8 shared[];
  __shared__ u64 barriers[2 * STAGES + 6];
  const u32 stages = (ptx::shared_address(shared) + 127) & ~127u;
  const u32 of_warps = stages + STAGES * STAGE_BYTES, of_peers = of_warps + 2 * PARTS * TILE * 4;
  const u32 sums = of_peers + 2 * PEERS * TILE * 4;
  // Tile there, tile done with; u of this block, of every block, summed.
  const u32 full = ptx::shared_address(barriers), empty = full + STAGES * 8, own = empty + STAGES * 8, all = own + 16,
            ready = all + 16;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, me = rank();
  const u32 cluster = blockIdx.x / PEERS, clusters = gridDim.x / PEERS;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; i++) ptx::barrier_init(full + i * 8, 1), ptx::barrier_init(empty + i * 8, WARPS * ptx::ARRIVALS);
    for (u32 i = 0; i < 2; i++) {
      ptx::barrier_init(own + i * 8, WARPS * ptx::ARRIVALS), ptx::barrier_init(all + i * 8, 1);
      ptx::barrier_init(ready + i * 8, ptx::ARRIVALS);
      ptx::barrier_expect(all + i * 8, PEERS * TILE * 4);
    }
    ptx::barrier_init_fence();
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  meet();
  Cursor at(pass, cluster, clusters);
  // The parts of a layer have slots side by side.
  auto slot_of = [&](const Cursor& at) { return at.layer + cluster; };

  if (warp == WARPS) {
    // Asks for tiles.
    if (lane == 0) {
      auto weights = [&] {
        const u32 to = stages + at.stage * STAGE_BYTES, barrier = full + at.stage * 8, input = at.at * TILE;
        if (at.starts()) ptx::take_map(pass.maps + at.layer * 128ull);
        ptx::barrier_expect(barrier, TILE_BYTES + (at.starts() ? SHARE * 4 : 0));
#pragma unroll
        for (u32 b = 0; b < BOXES; b++) {
          const u32 channel = me * SHARE + b * BOX;
          ptx::copy_tile(to + b * BOX_BYTES, pass.maps + at.layer * 128ull, (ALONG_CHANNELS ? channel : input) * (SIZE / 2),
                         ALONG_CHANNELS ? input : channel, barrier);
        }
      };
      auto vector = [&](const Cursor& at) {
        if (at.starts())
          ptx::copy_bytes(stages + at.stage * STAGE_BYTES + TILE_BYTES,
                          (const float*)pass.x + ((size_t)at.layer * PEERS + me) * SHARE, SHARE * 4, full + at.stage * 8);
      };
      // The weights do not depend on the launch in front, x does.
      Cursor early = at;
      for (; at.more() && at.n < STAGES; at.next()) weights();
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (; early.n < at.n; early.next()) vector(early);
      for (; at.more(); at.next()) {
        ptx::barrier_wait(empty + at.stage * 8, at.phase ^ 1);
        weights(), vector(at);
      }
    }
  } else if (warp == WARPS + 1) {
    // Exchanges u.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    auto total = [&](u32 from, u32 count, float (&u)[EACH]) {
#pragma unroll
      for (u32 e = 0; e < EACH; e++) u[e] = 0.f;
#pragma unroll
      for (u32 i = 0; i < count; i++) {
        float part[EACH];
        load_floats(part, from + (i * TILE + lane * EACH) * 4);
#pragma unroll
        for (u32 e = 0; e < EACH; e++) u[e] += part[e];
      }
    };
    double square = 0.;
    for (; at.more(); at.next()) {
      const u32 slot = at.n & 1, parity = at.n >> 1 & 1;
      float u[EACH];
      ptx::barrier_wait(own + slot * 8, parity);
      total(of_warps + slot * PARTS * TILE * 4, PARTS, u);
      if (PEERS > 1) {
        const u32 to = of_peers + ((slot * PEERS + me) * TILE + lane * EACH) * 4;
#pragma unroll
        for (u32 peer = 0; peer < PEERS; peer++) send(of_peer(to, peer), u, of_peer(all + slot * 8, peer));
        wait_for_peers(all + slot * 8, parity);
        total(of_peers + slot * PEERS * TILE * 4, PEERS, u);
      }
      store_floats<EACH>(sums + (slot * TILE + lane * EACH) * 4, u);
#pragma unroll
      for (u32 e = 0; e < EACH; e++) square += (double)u[e] * u[e];
      __syncwarp();
      if (ptx::arrives(lane)) {
        if (PEERS > 1 && lane == 0) ptx::barrier_expect(all + slot * 8, PEERS * TILE * 4);
        ptx::barrier_arrive_if(ready + slot * 8, true);
      }
      if (at.ends()) {
#pragma unroll
        for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(0xffffffffu, square, step);
        if (lane == 0 && me == 0) ((double*)pass.squares)[slot_of(at)] = square;
        square = 0.;
      }
    }
  } else {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Layout<ALONG_CHANNELS>::Product product(lane, warp);
    // W^T u of a tile.
    auto second = [&](const Cursor& at) {
      const u32 slot = at.n & 1, tile = stages + at.stage * STAGE_BYTES;
      ptx::barrier_wait(ready + slot * 8, at.n >> 1 & 1);
      product.second(tile, sums + slot * TILE * 4);
      if (at.ends()) product.leave(tile, (float*)pass.parts + ((size_t)slot_of(at) * PEERS + me) * SHARE);
      ptx::hand_over(empty + at.stage * 8, lane);
    };
    Cursor before = at;
    for (; at.more(); at.next()) {
      const u32 tile = stages + at.stage * STAGE_BYTES, slot = at.n & 1;
      ptx::barrier_wait(full + at.stage * 8, at.phase);
      if (at.starts()) product.take(tile + TILE_BYTES);
      product.first(tile, of_warps + slot * PARTS * TILE * 4);
      __syncwarp();
      ptx::barrier_arrive_if(own + slot * 8, ptx::arrives(lane));
      if (at.n > 0) second(before);
      before = at;
    }
    second(before);
  }
  // A block's memory is written to until its last sums have come.
  meet();
}

struct SumNext {
  u64 parts, squares;
  u64 x;      // of the next product, [layer][width_to]
  u64 y;      // [layer][KV channel]
  u64 sigma;  // [layer]
  u32 tiles, items, clusters;
  u32 n_q, n_kv, d_head;
  u32 width_from, width_to;
  u32 finish;  // 0: t of W_Q to x of W_K; 1: t of W_K to y and x of W_Q
  u32 pad;
};
static_assert(sizeof(SumNext) == 80, "host mirror");

// Sums the parts in order; a thread a KV channel, a row of blocks a layer.
extern "C" __global__ void __launch_bounds__(128) scale_power_next(const __grid_constant__ SumNext next) {
  const u32 channel = blockIdx.x * 128 + threadIdx.x, layer = blockIdx.y, group = next.n_q / next.n_kv;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (channel >= next.n_kv * next.d_head) return;
  const u32 first = layer + run_of(next.items, layer * next.tiles, next.clusters);
  const u32 last = layer + run_of(next.items, (layer + 1) * next.tiles - 1, next.clusters);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  double square = 0.;
  for (u32 slot = first; slot <= last; slot++) square += __ldcg((const double*)next.squares + slot);
  const double norm = sqrt(square), factor = norm > 0. ? 1. / norm : 0.;
  const u32 head = channel / next.d_head, within = channel % next.d_head;
  float* x = (float*)next.x + (size_t)layer * next.width_to;
  auto total = [&](u32 channel) {
    float sum = 0.f;
#pragma unroll 8
    for (u32 slot = first; slot <= last; slot++)
      sum += __ldcg((const float*)next.parts + (size_t)slot * next.width_from + channel);
    return sum;
  };
  if (!next.finish) {
    float sum = 0.f;
    for (u32 g = 0; g < group; g++) sum += total((head * group + g) * next.d_head + within);
    x[channel] = (float)(sum * factor);
  } else {
    if (channel == 0) ((float*)next.sigma)[layer] = (float)norm;
    // A vector that is mapped to zero or to no number stays as it is.
    if (!(norm > 0. && (float)norm < __uint_as_float(0x7f800000u))) return;
    const float value = (float)(total(channel) * factor);
    ((float*)next.y)[(size_t)layer * next.n_kv * next.d_head + channel] = value;
    for (u32 g = 0; g < group; g++) x[(head * group + g) * next.d_head + within] = value;
  }
}
