// sigma^2 of W_Q W_K^T without rotation, from the factors of `scale_factor`, and the quadratic forms c_k^T G_Q c_k. D_HEAD above
// 64 (macro), Hopper; a warpgroup 64 rows.
//
// T = U A, H = U T^T: products on tensor cores of f16 pairs, the two mixed ones before that of the high parts, so that only its
// terms are cut off at 2^-23. U lies in shared memory, A and then T 64 rows at a time. Up to 128 channels H stays in registers
// and is squared there; above, T and H go through device memory, and `scale_bounds_wide` squares H.
#include "scale_cluster.cuh"
#include "scale_factor.cuh"

using namespace spectrum;

constexpr bool WIDE = N > 128;
constexpr u32 GROUPS = GRAM_SIDE, WARPS = 4 * GROUPS, THREADS = 32 * WARPS;
constexpr u32 PANEL = SIDE * 128;  // 64 columns of X, rows of 128 bytes
// Of |U| |A| and |U| |T|: products and sums of 16 of them that are cut off, pairs and products of low parts. Up to 128 channels the
// low parts of one half of T meet sums of the high ones of the other; above, f32 adds up sums of 64 products. And values of A
// and T so small that f16 has fewer digits of them.
constexpr float CUT_T = (WIDE ? 64 + 12 : N + 28) * 0x1p-23f, CUT_H = (WIDE ? 64 + 12 : 2 * N + 36) * 0x1p-23f;
constexpr float SMALL_A = N * 0x1p-37f, SMALL_T = N * 0x1p-36f;
constexpr float DOWN_T = 0x1p-13f, DOWN_H = 0x1p-23f;
static_assert(UP == 0x1p12f, "T is kept 2^11 times as large, so that no value passes f16");
// What may be left open by estimate, of lambda; a fifth of it is on average.
constexpr float PRODUCT_OPEN = 0.002f;

__device__ __forceinline__ void load_block(float (&v)[32], const HeadGram& head, const float* partials, u32 block) {
  const Lane at;
  const float* from = partials + ((size_t)head.first * GRAM_BLOCKS + block) * 4096 + at.row() * 64 + 2 * at.c;
#pragma unroll
  for (u32 n = 0; n < 16; n++) {
    const float2 x = __ldg((const float2*)(from + n % 2 * 512 + n / 2 * 8));
    v[2 * n] = x.x, v[2 * n + 1] = x.y;
  }
#pragma unroll 1
  for (u32 part = 1; part < head.count; part++) {
    from += (size_t)head.stride * GRAM_BLOCKS * 4096;
#pragma unroll
    for (u32 n = 0; n < 16; n++) {
      const float2 x = __ldg((const float2*)(from + n % 2 * 512 + n / 2 * 8));
      v[2 * n] += x.x, v[2 * n + 1] += x.y;
    }
  }
}

// What is known of the channels of q, scaled by D, powers of two as bf16: shared memory is full.
struct Channels {
  u16 factor[SIDE];
  float sum[SIDE];
};
// Beyond the head lies anything, and zeros are wanted, in block (i, j). Rows and columns come and go eight at a time.
__device__ __forceinline__ void clear_rest(float (&v)[32], u32 i, u32 j) {
  const Lane at;
  // How many of the 8 columns' runs and of a warp's two of rows there are.
  const u32 columns = N / 8 - min(j * 8, N / 8), rows = N / 8 - min(i * 8 + at.warp * 2, N / 8);
#pragma unroll
  for (u32 p = 0; p < 32; p++)
    if (p / 4 >= (N / 8 - 1) % 8 + 1 || rows < 2) v[p] = p / 2 % 2 < rows && p / 4 < columns ? v[p] : 0.f;
}
// f(value, of D G D without the mean, row, column) for block (i, j).
template <class F> __device__ __forceinline__ void scaled_block(float (&v)[32], const Channels& q, float per, u32 i, u32 j, F f) {
  const Lane at;
  if (N < SIDE) clear_rest(v, i, j);
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 row = i * 64 + at.row() + 8 * h;
    const float left = bf16_low(q.factor[row]), mean = q.sum[row] * per;
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
      const u32 column = j * 64 + 8 * n + 2 * at.c;
      const u32 right = *(const u32*)(q.factor + column);
      const float2 sums = *(const float2*)(q.sum + column);
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        float& x = v[4 * n + 2 * h + e];
        x = x * left * (e ? bf16_high(right) : bf16_low(right)) - mean * (e ? sums.y : sums.x);
        f(x, row, column + e);
      }
    }
  }
}

// Four 8 x 8 matrices; lane 8 i + j gives the address of row j of matrix i. TURNED: of its column j.
template <bool TURNED> __device__ __forceinline__ void put(u32 to, u32 a, u32 b, u32 c, u32 d) {
  if (TURNED)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// f(n, address) for the columns 8 n to 8 n + 15 of a 64 x 64 operand, or rows where it is TURNED: matrix m = lane / 8 has the
// half m % 2 of a warp's 16 rows and the columns 8 (n + m / 2).
template <bool TURNED, class F> __device__ __forceinline__ void places(u32 x, F f) {
  const Lane at;
  const u32 lane = 4 * at.g + at.c, r = lane & 7, half = lane >> 3 & 1, next = lane >> 4;
#pragma unroll
  for (u32 n = 0; n < 8; n += 2)
    f(n, TURNED ? x + (8 * (n + next) + r) * 128 + (((2 * at.warp + half) ^ r) << 4)
                : x + (16 * at.warp + 8 * half + r) * 128 + (((n + next) ^ r) << 4));
}
// As a pair of operands.
template <bool TURNED> __device__ __forceinline__ void store_pairs(const float (&v)[32], u32 x, u32 low = OPERAND_BYTES) {
  places<TURNED>(x, [&](u32 n, u32 to) {
    Pair p[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) p[i] = split(v[4 * n + 2 * i], v[4 * n + 2 * i + 1]);
    put<TURNED>(to, p[0].high, p[1].high, p[2].high, p[3].high);
    put<TURNED>(to + low, p[0].low, p[1].low, p[2].low, p[3].low);
  });
}
// multiply(k, low part of the left operand, of the right one, not the first) for the three products of pairs, `steps` of each. One
// loop, and at least once: the assembler takes the accumulator for another one else.
template <class F> __device__ __forceinline__ void three_products(u32 steps, F multiply) {
  u32 k = 0, phase = 0;
#pragma unroll 1
  do {
    ptx::wgmma_fence();
    multiply(k, phase == 0, phase == 1, (k | phase) > 0);
    const bool over = ++k == steps;
    k = over ? 0 : k, phase += over;
  } while (phase < 3);
}
// d = U_i S^T: rows `group` of U, from its diagonal on, and 64 rows S of A or T, both in pairs. Above 128 channels a sum is made for
// every 64 of them, so that what is cut off is of their products. `beside` is done while the tensor cores work.
template <class F> __device__ __forceinline__ void multiply(float (&d)[32], u32 factor, u32 slab, u32 group, F beside) {
  // Lower halves of the descriptors, by 16 bytes; blocks of a row follow one another.
  const u32 upper = (u32)(ptx::swizzled_operand(0) >> 32);
  u32 u = __shfl_sync(0xffffffffu, ((factor + block_number(group, group) * PAIR_BYTES) & 0x3ffff) >> 4 | 64 << 16, 0);
  u32 s = __shfl_sync(0xffffffffu, ((slab + group * PAIR_BYTES) & 0x3ffff) >> 4 | 64 << 16, 0);
  auto operand = [&](u32 first, u32 k, bool low) { return (u64)upper << 32 | (first + (k / 4 * PAIR_BYTES + low * OPERAND_BYTES + k % 4 * 32) / 16); };
  auto ask = [&](float (&d)[32], u32 steps) {
    ptx::keep(d);
    three_products(steps, [&](u32 k, bool low_u, bool low_s, bool more) {
      ptx::wgmma_f16_64x64x16<false>(d, operand(u, k, low_u), operand(s, k, low_s), more);
    });
    ptx::wgmma_commit();
  };
  ask(d, WIDE ? min(TILES - 4 * group, 4) : TILES - 4 * group);
  beside();
  ptx::wgmma_wait<0>();
  ptx::keep(d);
  if constexpr (WIDE) {
    float part[32];
#pragma unroll 1
    for (u32 block = group + 1; block < GROUPS; block++) {
      u += PAIR_BYTES / 16, s += PAIR_BYTES / 16;
      ask(part, min(TILES - 4 * block, 4));
      ptx::wgmma_wait<0>();
      ptx::keep(part);
#pragma unroll
      for (u32 n = 0; n < 32; n++) d[n] += part[n];
    }
  }
}
// d += U_ij T_j^T for up to 128 channels: block (group, j) of U and 64 columns of all of T, the high parts before the low ones.
__device__ __forceinline__ void add_columns(float (&d)[2][32], u32 factor, u32 slab, u32 group, u32 j) {
  const u32 upper = (u32)(ptx::swizzled_operand(0) >> 32);
  const u32 u = __shfl_sync(0xffffffffu, ((factor + (group + j) * PAIR_BYTES) & 0x3ffff) >> 4 | 64 << 16, 0);
  const u32 t = (slab & 0x3ffff) >> 4 | 64 << 16;
  auto operand = [&](u32 first, u32 k, u32 low) { return (u64)upper << 32 | (first + (low + k * 32) / 16); };
  const u32 steps = min(TILES - 4 * j, 4);
  ptx::keep(d[0]), ptx::keep(d[1]);
  three_products(steps, [&](u32 k, bool low_u, bool low_t, bool more) {
    ptx::wgmma_f16_64x128x16(d, operand(u, k, low_u * OPERAND_BYTES), operand(t, k, low_t * 2 * OPERAND_BYTES), j > group || more);
  });
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep(d[0]), ptx::keep(d[1]);
}
// What the products may be off by is in the end of |U| |A| |U|^T, whose norm is the largest eigenvalue of |A| |U|^T |U| and at most the
// largest (|A| |U|^T |U| g)_j / g_j for any g above 0 (Collatz). g is near the lengths of the channels: no entry of A is much above
// g_j g_k, so where few channels of q are long that is what is found. From high parts of pairs, here and below.
//
// Eight values without their signs, times weights.
__device__ __forceinline__ float weighed(u32 address, const float* weights) {
  u32 v[4];
  ptx::load16(v[0], v[1], v[2], v[3], address);
  float sum = 0.f;
#pragma unroll
  for (u32 e = 0; e < 4; e += 2) {
    const float4 w = *((const float4*)weights + e / 2);
    sum += fabsf(f16_value((u16)v[e])) * w.x + fabsf(f16_value((u16)(v[e] >> 16))) * w.y;
    sum += fabsf(f16_value((u16)v[e + 1])) * w.z + fabsf(f16_value((u16)(v[e + 1] >> 16))) * w.w;
  }
  return sum;
}
// |U|^T |U| g behind g in `weights`; `work`: five times SIDE values.
__device__ __forceinline__ void weigh(u32 factor, float* weights, float* work) {
  const u32 thread = this_thread();
  // Two threads a row, then four warps 64 columns, a lane two of them.
  static_assert(THREADS == 2 * SIDE);
  const u32 row = thread / 2, block_row = row / 64;
  float sum = 0.f;
#pragma unroll 1
  for (u32 block = block_row; block < GROUPS; block++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 chunk = thread % 2 * 4 + i;
      sum += weighed(factor + block_number(block_row, block) * PAIR_BYTES + row % 64 * 128 + ((chunk ^ row % 8) << 4), weights + block * 64 + chunk * 8);
    }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (thread % 2 == 0) work[row] = sum;
  __syncthreads();
  const u32 lane = thread % 32, part = thread / 32 % 4, column = thread / 128;
  float even = 0.f, odd = 0.f;
#pragma unroll 1
  for (u32 block = 0; block <= column; block++) {
    const u32 rows = factor + block_number(block, column) * PAIR_BYTES + part * 16 * 128 + lane % 4 * 4;
#pragma unroll 8
    for (u32 i = 0; i < 16; i++) {
      const u32 pair = ptx::load4(rows + i * 128 + ((lane / 4 ^ i % 8) << 4));
      const float weight = work[block * 64 + part * 16 + i];
      even += fabsf(f16_value((u16)pair)) * weight, odd += fabsf(f16_value((u16)(pair >> 16))) * weight;
    }
  }
  *(float2*)(work + (1 + part) * SIDE + column * 64 + 2 * lane) = make_float2(even, odd);
  __syncthreads();
  if (thread < SIDE) weights[SIDE + thread] = work[SIDE + thread] + work[2 * SIDE + thread] + work[3 * SIDE + thread] + work[4 * SIDE + thread];
  __syncthreads();
}
// The largest of these of the 64 rows of A in the slab, given their g: four threads a row, the first warpgroups alone.
__device__ __forceinline__ float largest_ratio(u32 slab, const float* weights, const float* of_rows) {
  const u32 thread = this_thread();
  float sum = 0.f;
  const u32 row = thread / 4 % 64;
  if (thread < 256)
#pragma unroll 1
    for (u32 i = 0; i < SIDE / 32; i++) {
      const u32 chunk = thread % 4 * 2 + i % 2;
      sum += weighed(slab + i / 2 * PAIR_BYTES + row * 128 + ((chunk ^ row % 8) << 4), weights + i / 2 * 64 + chunk * 8);
    }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return sum * inverse(of_rows[row]);
}

// As `whole_sums`, of the block's rows.
__device__ __forceinline__ float2 moments(float (&v)[2][32], const Lane& at, uint2* scratch) {
  float trace = 0.f, squares[2] = {0.f, 0.f};
#pragma unroll
  for (u32 b = 0; b < 2; b++) {
    diagonal(v[b], at, [&](float& x, bool on, u32) { trace += on && b == at.group ? x : 0.f; });
#pragma unroll
    for (u32 i = 0; i < 32; i++) squares[i & 1] += v[b][i] * v[b][i];
  }
  return whole_sums<8>(trace, squares[0] + squares[1], scratch);
}

// P = X X^T, this warpgroup's rows.
__device__ __forceinline__ void square(float (&p)[2][32], u32 x, u32 group) {
  const u32 upper = (u32)(ptx::swizzled_operand(0) >> 32);
  const u32 all = (u32)ptx::swizzled_operand(x), own = __shfl_sync(0xffffffffu, all + group * (64 * 128 / 16), 0);
  ptx::keep(p[0]), ptx::keep(p[1]);
  ptx::wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < TILES; k++) {
    const u32 step = (k / 4 * PANEL + k % 4 * 32) / 16;
    ptx::wgmma_f16_64x128x16(p, (u64)upper << 32 | (own + step), (u64)upper << 32 | (all + step), k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep(p[0]), ptx::keep(p[1]);
}

// The largest eigenvalue of H by shifted squarings, this warpgroup's rows of it in `v`; in thread 0. `x`: where X goes.
__device__ __forceinline__ float largest(float (&v)[2][32], float trace, float squares, u32 x, uint2* scratch, Links& links) {
  if (!(squares > 0.f && squares < 1e30f)) return squares == 0.f ? 0.f : __uint_as_float(0x7fc00000u);
  const Lane at;
  // To a norm in [2, 4) by a power of two, whose values are normal numbers of f16.
  const int exponent = ((int)(__float_as_uint(squares) >> 23) - 127) >> 1;
  const float unit = __uint_as_float((u32)(128 - exponent) << 23), back = __uint_as_float((u32)(126 + exponent) << 23);
#pragma unroll
  for (u32 b = 0; b < 2; b++)
#pragma unroll
    for (u32 i = 0; i < 32; i++) v[b][i] *= unit;
  Chain chain;
  chain.first(trace * unit, squares * unit * unit, 0.f, 0.f, links);
  float2 now;
#pragma unroll 1
  for (;;) {
    const u32 factor = both_f16(chain.scale);
#pragma unroll
    for (u32 b = 0; b < 2; b++) {
      diagonal(v[b], at, [&](float& value, bool on, u32 i) { value -= on && b == at.group && 64 * b + i < N ? chain.shift : 0.f; });
      places<false>(x + b * PANEL + at.group * 64 * 128, [&](u32 n, u32 to) {
        u32 p[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) p[i] = scaled_f16(pack_f16(v[b][4 * n + 2 * i], v[b][4 * n + 2 * i + 1]), factor);
        put<false>(to, p[0], p[1], p[2], p[3]);
      });
    }
    ptx::async_fence();
    __syncthreads();
    square(v, x, at.group);
    now = moments(v, at, scratch);
    if (!chain.go_on(now.x, now.y, PRODUCT_OPEN, links)) break;
  }
  return threadIdx.x == 0 ? __fmul_ru(chain.certificate(now.x, now.y, links), back) : 0.f;
}

struct Room {
  Channels q;
  Lift lift;
  Unfinished out;  // registers are few
  u64 arrived;
  __align__(16) float weights[WIDE ? 4 : 2 * SIDE];  // above 128 channels there is no room
};
// At either end of the work, where the slab has nothing else.
struct Ends {
  float4 scratch[2][WARPS];
  float constant[SIDE];
  SideSums parts[WARPS];
  float ratio[WARPS];
};
struct Squaring {
  uint2 squares[WARPS];
  Links links;
};

// T of a block (64 x 64 pieces in the order of accumulators) and H of all heads, as Grams lie.
__device__ __forceinline__ float4* piece_of_t(float* room, u32 row, u32 column) {
  return (float4*)(room + ((size_t)blockIdx.x * GROUPS * GROUPS + row * GROUPS + column) * 4096) + threadIdx.x % 128;
}

__device__ __forceinline__ void product(u32 index, const Job& job, const HeadGram* heads, const float* partials, const ChannelStats* stats,
                                        const Shape& shape, const u8* factor, const float* frame, const FactorNotes& notes, double* lambdas,
                                        double2* aux, float* room_of_t, float* room_of_h, Unfinished* unfinished, u32* status, u32 parity,
                                        Room& room, Squaring& squaring) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 u = (ptx::shared_address(memory) + 1023) & ~1023u, slab = u + FACTOR_BYTES, arrived = ptx::shared_address(&room.arrived);
  Ends& ends = *(Ends*)(memory + (slab - ptx::shared_address(memory)));
  const HeadGram of_q = heads[job.q];
  const u32 thread = threadIdx.x, group = __shfl_sync(0xffffffffu, thread >> 7, 0);
  if (thread == 0 && notes.state == 1.f) {
    ptx::barrier_expect(arrived, FACTOR_BYTES);
    ptx::copy_bytes(u, factor, FACTOR_BYTES, arrived);
  }
  {
    BalancedChannel own = {1.f, 0.f, 0.f, {}};
    if (thread < N) own = scaled_channel(stats[of_q.stat_row + thread], stats[heads[job.k].stat_row + thread].constant, frame[thread]);
    if (thread < SIDE) {
      room.q.factor[thread] = (u16)(__float_as_uint(own.factor) >> 16), room.q.sum[thread] = own.sum;
      ends.constant[thread] = own.constant;
    }
    own.share.add_warp();
    if (thread % 32 == 0) ends.parts[thread / 32] = own.share;
  }
  __syncthreads();
  const float tau = share_of_mean(ends.parts, WARPS, shape), per = shape.mean ? (1.f - tau) / shape.d_model : 0.f;
  float square = 0.f, form = 0.f;
#pragma unroll 1
  for (u32 b = group; b < GRAM_BLOCKS; b += GROUPS) {
    u32 i = 0, j = b;
    while (j >= GRAM_SIDE) i++, j += i - GRAM_SIDE;
    float v[32];
    load_block(v, of_q, partials, b);
    const float weight = i == j ? 1.f : 2.f;
    float part = 0.f, part_of_form = 0.f;
    scaled_block(v, room.q, per, i, j, [&](float x, u32 row, u32 column) {
      part += x * x, part_of_form += x * ends.constant[row] * ends.constant[column];
    });
    square += weight * part, form += weight * part_of_form;
  }
  {
    const float4 of_gram = sums_of_block<WARPS>({square, form, 0.f, 0.f}, ends.scratch[0]);
    if (thread == 0) {
      const SideSums side = sums_of_warps(ends.parts, WARPS);
      room.lift = lift_of<0>(side, of_gram.x, shape, notes.apart, tau);
      *(double*)(aux + index) = form_above(side, of_gram.y, per, 64 + 4 * 64 * 64 / 128 * GRAM_BLOCKS / GROUPS, shape);
    }
  }
  __syncthreads();
  const Lift lift = room.lift;
  const bool finite = lift.scale > 0.f && notes.state == 1.f;
  if (thread == 0) {
    const bool zero = lift.scale == 0.f || notes.state == 0.f, fallback = lift.scale > 0.f && notes.state == -1.f;
    Unfinished& out = room.out;
    out = {notes.back / ((1.0 - lift.t) * lift.scale), notes.trace, 0.f, 0.f, job.result, finite};
    if (!finite) out.grown = zero ? 0.0 : out.grown, out.traces = zero ? 0.0 : fallback ? out.traces : __longlong_as_double(0x7ff8000000000000ll);
    if (!finite && WIDE) unfinished[index] = out;
    if (!finite && !WIDE) put_product(lambdas + out.result, false, 0.f, 0.f, out.grown, out.traces, status);
  }
  if (notes.state == 1.f) ptx::barrier_wait(arrived, parity);
  if (!finite) return;
  // H comes later.
  float* weights = WIDE ? room_of_h + (size_t)index * GRAM_BLOCKS * 4096 : room.weights;
  if (thread < SIDE) {
    const float f = bf16_low(room.q.factor[thread]);
    weights[thread] = thread < N ? root((stats[of_q.stat_row + thread].norm2 * f * f + lift.added) * lift.scale) : 1.f;
  }
  __syncthreads();
  weigh(u, weights, (float*)&ends);
  // T by 64 columns, from those rows of A.
  float ratio = 0.f;
  auto columns = [&](u32 j, float (&d)[32]) {
    const u32 i = min(group, j), k = max(group, j);
    load_block(d, of_q, partials, block_number(i, k));
    const float times = lift.scale * UP;
    scaled_block(d, room.q, per, i, k, [&](float& x, u32 row, u32 column) { x = (x + (row == column && row < N ? lift.added : 0.f)) * times; });
    if (group < j) store_pairs<true>(d, slab + group * PAIR_BYTES);
    else store_pairs<false>(d, slab + group * PAIR_BYTES);
    ptx::async_fence();
    __syncthreads();
    multiply(d, u, slab, group, [&] { ratio = fmaxf(ratio, largest_ratio(slab, weights + SIDE, weights + 64 * j)); });
    __syncthreads();
#pragma unroll
    for (u32 n = 0; n < 32; n++) d[n] *= DOWN_T;
  };
  float trace = 0.f, of_h = 0.f, h[2][32];
  if constexpr (WIDE) {
#pragma unroll 1
    for (u32 j = 0; j < GROUPS; j++) {
      columns(j, h[0]);
      float4* to = piece_of_t(room_of_t, group, j);
#pragma unroll
      for (u32 n = 0; n < 8; n++) to[128 * n] = make_float4(h[0][4 * n], h[0][4 * n + 1], h[0][4 * n + 2], h[0][4 * n + 3]);
    }
    __syncthreads();
    // H by 64 columns, on and above the diagonal, from those rows of T.
#pragma unroll 1
    for (u32 j = 0; j < GROUPS; j++) {
      const float4* from = piece_of_t(room_of_t, j, group);
#pragma unroll
      for (u32 n = 0; n < 8; n++) {
        const float4 v = from[128 * n];
        h[0][4 * n] = v.x, h[0][4 * n + 1] = v.y, h[0][4 * n + 2] = v.z, h[0][4 * n + 3] = v.w;
      }
      store_pairs<false>(h[0], slab + group * PAIR_BYTES);
      ptx::async_fence();
      __syncthreads();
      if (group <= j) multiply(h[0], u, slab, group, [] {});
      __syncthreads();
      if (group > j) continue;
#pragma unroll
      for (u32 n = 0; n < 32; n++) h[0][n] *= DOWN_H;
      if (group == j) diagonal(h[0], Lane(), [&](float& x, bool on, u32) { trace += on ? x : 0.f; });
      const Lane at;
      float* to = room_of_h + ((size_t)index * GRAM_BLOCKS + block_number(group, j)) * 4096 + at.row() * 64 + 2 * at.c;
#pragma unroll
      for (u32 n = 0; n < 16; n++) *(float2*)(to + n % 2 * 512 + n / 2 * 8) = make_float2(h[0][2 * n], h[0][2 * n + 1]);
    }
  } else {
#pragma unroll  // the assembler spills else
    for (u32 j = 0; j < 2; j++) {
      float t[32];
      columns(j, t);
      store_pairs<false>(t, slab + group * OPERAND_BYTES, 2 * OPERAND_BYTES);
      ptx::async_fence();
      __syncthreads();
      if (group <= j) add_columns(h, u, slab, group, j);
      __syncthreads();
    }
#pragma unroll
    for (u32 b = 0; b < 2; b++) {
#pragma unroll
      for (u32 n = 0; n < 32; n++) h[b][n] *= DOWN_H, of_h += h[b][n] * h[b][n];
      if (group == b) diagonal(h[b], Lane(), [&](float& x, bool on, u32) { trace += on ? x : 0.f; });
    }
  }
  // They are never negative: their bits are in order.
  const u32 of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(ratio));
  const u32 last = this_thread();
  if (last % 32 == 0) ends.ratio[last / 32] = __uint_as_float(of_warp);
  const float4 sums = sums_of_block<WARPS>({of_h, trace, 0.f, 0.f}, ends.scratch[1]);
  ratio = 0.f;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) ratio = fmaxf(ratio, ends.ratio[w]);
  // |E_T| <= c_T |U| |A| and |E_H| <= c_H |U| |T|^T entry by entry, and H is off by U E_T^T + E_H: by (c_T + c_H (1 + c_T)) |U| |A| |U|^T,
  // which is symmetric and bounds the mirror image of half an error as well. A and U stand here times 2^12, low parts left out.
  const float cut = CUT_T + 1.001f * CUT_H, absolute = 1.002f / (UP * UP * UP) * ratio;
  const float of_u = (float)room.out.traces, slack = 1.002f * (cut * absolute + SMALL_A * of_u + SMALL_T * root(of_u));
  if constexpr (WIDE) {
    if (thread == 0) {
      room.out.trace = sums.y, room.out.slack = slack;
      unfinished[index] = room.out;
    }
  } else {
    __syncthreads();
    const float top = largest(h, sums.y, sums.x, slab, squaring.squares, squaring.links);
    const Unfinished& out = room.out;
    if (thread == 0) put_product(lambdas + out.result, true, top, slack, out.grown, out.traces, status);
  }
}

// `group`: query heads of a factor. Products `first` to `end`, a block one after another; their places in `room_of_h` and `unfinished` are
// those in the list.
extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2)
    scale_products_pairs(const Job* jobs, const HeadGram* heads, const float* partials, const ChannelStats* stats, Shape shape,
                         const u8* factors, const float* frames, const FactorNotes* notes, double* lambdas, double2* aux, float* room_of_t,
                         float* room_of_h, Unfinished* unfinished, u32* status, u32 many, u32 count) {
  __shared__ __align__(16) Room room;
  __shared__ __align__(16) Squaring squaring;  // the compiler leaves it out where nothing is squared here
  if (threadIdx.x == 0) ptx::barrier_init(ptx::shared_address(&room.arrived), 1), ptx::barrier_init_fence();
  wait_for_previous();
  let_next_start();
  u32 parity = 0;
  for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
    const u32 k = index / many;
    const FactorNotes known = notes[k];
    product(index, jobs[index], heads, partials, stats, shape, factors + (size_t)k * FACTOR_BYTES, frames + k * SIDE, known, lambdas, aux,
            room_of_t, room_of_h, unfinished, status, parity, room, squaring);
    // The barrier was used only where there was a factor.
    parity ^= known.state == 1.f;
    if (!WIDE) return;
    __syncthreads();
  }
}
