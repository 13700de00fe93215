// Frobenius norms of every head's interaction, from its Grams. One block per query head.
//
//   F^2 = ||W_Q W_K^T||_F^2 = sum_ij G_Q,ij G_K,ij
// and a bound over every relative position, every pair of channels turned by an angle of its own: for 2 x 2 blocks x of G_Q
// and y of G_K, tr(x R y^T R'^T) splits into parts that turn by the sum and by the difference of the two angles,
//   F_rope^2 <= sum_blocks (|x|+ |y|+ + |x|- |y|-) / 2,   |x|+- = hypot(x00 +- x11, x01 -+ x10).
// A certified one takes G' = (G + (e + R/t) I)/(1 - t) >= the exact Gram in place of G: e covers the sums' roundings, R what
// the operands lost (see `scale_products`). No term changes where a pair of q is scaled by what that of k is divided by. So both
// sides are balanced for what I adds, which is then small beside every pair; it meets the diagonal alone, where it adds
//   l_Q tr G_K + l_K tr G_Q + r l_Q l_K.
// The bound bounds sigma over every position too, and is the sharpest one where few directions carry a head over uneven
// channels: a plan takes it there. Elsewhere a block returns before it reads a Gram: no term is below 0, and the diagonal blocks,
// tr x tr y / 2 at least, pass what the eigenvalues certified.
#include "common/warp.cuh"
#include "common/head_bound.cuh"
#include "ptx/launch.cuh"
#include "scale/segments.cuh"

struct HeadFrobenius {
  float norm;   // F
  float bound;  // certified, over every relative position; rounded up
};

constexpr u32 THREADS = 128, WARPS = THREADS / 32;

// Sums over the block: `parts`, one a warp and value, until the next call.
template <u32 COUNT> __device__ __forceinline__ void to_parts(double (&v)[COUNT], double (*parts)[WARPS]) {
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) v[i] = warp_sum(v[i]);
  __syncthreads();
  if ((threadIdx.x & 31) == 0)
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) parts[i][threadIdx.x >> 5] = v[i];
  __syncthreads();
}
__device__ __forceinline__ double sum_of(const double (&parts)[WARPS]) {
  double sum = 0.0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) sum += parts[w];
  return sum;
}

// One head's side.
struct Side {
  HeadGram head;
  float sums[256];      // of each channel
  double weights[128];  // of each pair: attention factor and balance, squared

  // Values of the Gram, the mean removed where the norm does; those of channels i and j lie at `at`.
  template <u32 COUNT>
  __device__ void read(float (&v)[COUNT][4], const u32 (&at)[COUNT][4], const float* partials, u32 part_values) const {
    const float* from = partials + (size_t)head.first * part_values;
#pragma unroll
    for (u32 n = 0; n < COUNT; n++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) v[n][i] = __ldg(from + at[n][i]);
#pragma unroll 1
    for (u32 part = 1; part < head.count; part++) {
      from += (size_t)head.stride * part_values;
#pragma unroll
      for (u32 n = 0; n < COUNT; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[n][i] += __ldg(from + at[n][i]);
    }
  }
};

struct Lift {
  double added, grown;  // l, 1/(1 - t)
};
// `channels`: parts of ||w||^2 with the mean kept, R and ||s||^2; `squares`: ||G||_F^2.
__device__ Lift lift_of(const double (*channels)[WARPS], double squares, const Shape& s) {
  const double raw = sum_of(channels[0]), lost = sum_of(channels[1]), root = sqrt(lost);
  // The sums of the mean are those of exact channels (matrices.cuh).
  const double moved = s.mean ? (2.0 * sqrt(sum_of(channels[2]) / s.d_model) + root) * root : 0.0;
  const double sums = (double)s.rounding * 0x1p-24 * raw + moved;
  // Operands so small that rounding left nothing: all that they were is in R.
  if (squares == 0.0) return {(sums + lost) * 1.0001, 1.0};
  // As in `scale_products`.
  const double wanted = s.one_sided ? root / (sqrt(sqrt(squares) + sums) + 2.0 * root) : sqrt(lost * raw / squares);
  const double t = lost > 0.0 ? fmin(wanted, 0.5) : 0.0;
  return {(sums + (t > 0.0 ? lost / t : 0.0)) * 1.0001, 1.0 / (1.0 - t)};
}

// Squares of |x|+ and |x|-. Sums of two f32 values are within 2^-24 of theirs.
__device__ __forceinline__ double2 lengths(const float (&x)[4]) {
  const double sum = x[0] + x[3], skew = x[1] - x[2], less = x[0] - x[3], both = x[1] + x[2];
  return make_double2(sum * sum + skew * skew, less * less + both * both);
}

// To `norms`, of every head at its place in the model, or, where that is null, the square of the bound to a plan: behind the
// `lambdas` that `scale_eigenvalues` certified, infinite where another bound is sharper.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    scale_frobenius(Shape s, const HeadGram* heads, const float* partials, const ChannelStats* stats,
                    const Growth* growth, double* lambdas, HeadFrobenius* norms) {
  __shared__ double channel_parts[7][WARPS], parts[6][WARPS];
  __shared__ Side q, k;
  const u32 layer = blockIdx.x / s.n_q, h = blockIdx.x % s.n_q, kv = h / (s.n_q / s.n_kv), first = layer * (s.n_q + s.n_kv);
  const u32 pairs = s.d_head / 2, half = s.rotary / 2, thread = threadIdx.x;
  const HeadGram of_q = heads[first + h], of_k = heads[first + s.n_q + kv];
  const double turned = (double)s.rope_factor * s.rope_factor;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  double of_channels[7] = {};
  if (thread < pairs) {
    u32 c[2];
    pair_channels(thread, s.rotary, s.interleaved, c[0], c[1]);
    const ChannelStats q0 = stats[of_q.stat_row + c[0]], q1 = stats[of_q.stat_row + c[1]];
    const ChannelStats k0 = stats[of_k.stat_row + c[0]], k1 = stats[of_k.stat_row + c[1]];
    const double trace_q = (double)q0.norm2 + q1.norm2, trace_k = (double)k0.norm2 + k1.norm2;
    const double factor = thread < half ? turned : 1.0;
    const double balance = trace_q > 0.0 && trace_k > 0.0 ? sqrt(trace_k / trace_q) : 1.0;
    const double to_q = factor * balance, to_k = factor / balance;
    q.sums[c[0]] = q0.sum, q.sums[c[1]] = q1.sum, k.sums[c[0]] = k0.sum, k.sums[c[1]] = k1.sum;
    q.weights[thread] = to_q, k.weights[thread] = to_k;
    of_channels[0] = to_q * ((double)q0.raw2 + q1.raw2), of_channels[1] = to_q * ((double)q0.rounding + q1.rounding);
    of_channels[2] = to_q * ((double)q0.sum * q0.sum + (double)q1.sum * q1.sum);
    of_channels[3] = to_k * ((double)k0.raw2 + k1.raw2), of_channels[4] = to_k * ((double)k0.rounding + k1.rounding);
    of_channels[5] = to_k * ((double)k0.sum * k0.sum + (double)k1.sum * k1.sum);
    of_channels[6] = 0.5 * factor * factor * trace_q * trace_k;
  }
  if (thread == 0) q.head = of_q, k.head = of_k;
  to_parts(of_channels, channel_parts);

  const u32 all_q = s.layers * s.n_q;
  double* result = nullptr;
  if (!norms) {
    double* scaled = lambdas + all_q + s.layers * s.n_kv + blockIdx.x;
    result = scaled + 2 * all_q;
    const double limit = fmin(lambdas[blockIdx.x] * lambdas[all_q + layer * s.n_kv + kv], scaled[0] * scaled[all_q]);
    if (!(sum_of(channel_parts[6]) < limit)) {
      if (thread == 0) *result = __longlong_as_double(0x7ff0000000000000ll);
      return;
    }
  }

  // A warp 8 x 8 blocks at a time, on and above the diagonal.
  const u32 side = (s.d_head + 63) / 64, part_values = side * (side + 1) / 2 * 4096;
  const u32 across = (pairs + 7) / 8, tiles = across * (across + 1) / 2, warp = thread >> 5, lane = thread & 31;
  const float per = 1.f / s.d_model;
  // The bound, ||G_Q||_F^2, ||G_K||_F^2, tr G_Q, tr G_K, F^2.
  double sums[6] = {};
#pragma unroll 1
  for (u32 tile = warp; tile < tiles; tile += WARPS) {
    u32 row = 0, column = tile;
    while (column >= across - row) column -= across - row, row++;
    column += row;
    const u32 p = min(row * 8 + lane / 4, pairs - 1);
    u32 a[2], o[2], b[2][2], at[2][4];
    pair_channels(p, s.rotary, s.interleaved, a[0], a[1]);
#pragma unroll
    for (u32 n = 0; n < 2; n++) {
      o[n] = min(column * 8 + lane % 4 + 4 * n, pairs - 1);
      pair_channels(o[n], s.rotary, s.interleaved, b[n][0], b[n][1]);
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const u32 x = a[i / 2], y = b[n][i % 2];
        const u32 low = x / 64 <= y / 64 ? x : y, high = x / 64 <= y / 64 ? y : x, bi = low / 64, bj = high / 64;
        at[n][i] = (bi * side - bi * (bi - 1) / 2 + bj - bi) * 4096 + low % 64 * 64 + high % 64;
      }
    }
    float x[2][4], y[2][4];
    q.read(x, at, partials, part_values), k.read(y, at, partials, part_values);
#pragma unroll
    for (u32 n = 0; n < 2; n++) {
      const bool there = row * 8 + lane / 4 < pairs && column * 8 + lane % 4 + 4 * n < pairs;
      const double weight = !there ? 0.0 : row == column ? 1.0 : 2.0;
      if (s.mean)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          x[n][i] -= q.sums[a[i / 2]] * per * q.sums[b[n][i % 2]];
          y[n][i] -= k.sums[a[i / 2]] * per * k.sums[b[n][i % 2]];
        }
      const double2 of_x = lengths(x[n]), of_y = lengths(y[n]);
      const double factor = weight * (p < half ? turned : 1.0) * (o[n] < half ? turned : 1.0);
      double product = 0.0;
#pragma unroll
      for (u32 i = 0; i < 4; i++) product += (double)x[n][i] * y[n][i];
      if (!s.rotary) sums[0] += factor * product;
      else sums[0] += 0.5 * factor * (sqrt(of_x.x * of_y.x) + sqrt(of_x.y * of_y.y));
      sums[1] += 0.5 * weight * q.weights[p] * q.weights[o[n]] * (of_x.x + of_x.y);
      sums[2] += 0.5 * weight * k.weights[p] * k.weights[o[n]] * (of_y.x + of_y.y);
      if (there && p == o[n]) {
        sums[3] += q.weights[p] * fabs((double)x[n][0] + x[n][3]);
        sums[4] += k.weights[p] * fabs((double)y[n][0] + y[n][3]);
      }
      sums[5] += factor * product;
    }
  }
  to_parts(sums, parts);
  if (thread) return;
  const Lift lift_q = lift_of(channel_parts, sum_of(parts[1]), s), lift_k = lift_of(channel_parts + 3, sum_of(parts[2]), s);
  const double lifted =
      lift_q.added * sum_of(parts[4]) + lift_k.added * sum_of(parts[3]) + s.d_head * lift_q.added * lift_k.added;
  const double square = (sum_of(parts[0]) + lifted) * lift_q.grown * lift_k.grown * (1.0 + 1e-6);
  if (!norms) {
    *result = square >= 0.0 ? square : __longlong_as_double(0x7ff0000000000000ll);  // of no use where it is not a number
    return;
  }
  const double norm = sum_of(parts[5]);
  // Not by fmax, which drops a NaN.
  norms[growth[layer].q + h] = {(float)sqrt(norm < 0.0 ? 0.0 : norm), __double2float_ru(sqrt(square < 0.0 ? 0.0 : square))};
}
