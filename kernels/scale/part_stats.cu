// Channel statistics from the parts that a Gram kernel left. A block per tile of whole heads, a thread per row of a part.
#include "ptx/launch.cuh"
#include "scale/segments.cuh"

struct StatTile {
  u32 projection, first_row, rows;
  u32 first, parts;  // parts of as many rows as the block has threads
  u32 norms;         // 0: all but the rounding comes from another kernel
  u32 sums;
  u32 from_gram;     // 1: norms are entries of a Gram
};
static_assert(sizeof(StatTile) == 32, "host mirror");

extern "C" __global__ void __launch_bounds__(256)
    scale_part_stats(const StatTile* tiles, const Projection* projections, const ChannelPart* parts, ChannelStats* stats) {
  __shared__ double channel_sums[256];
  const StatTile tile = tiles[blockIdx.x];
  const Projection& p = projections[tile.projection];
  const u32 i = threadIdx.x;
  const u32 flags = p.flags;  // the projection's line is there when it is wanted
  const u64 bias = p.bias;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  double norm2 = 0, pair = 0, rounding = 0, sum = 0, constant = 0, absolute = 0;
  if (i < tile.rows)
    for (u32 part = 0; part < tile.parts; part++) {
      const float4* from = (const float4*)(parts + tile.first + part * blockDim.x + i);
      const float4 v = from[0];
      norm2 += v.x, pair += v.y, rounding += v.z;
      if (tile.sums) {
        const float4 w = from[1];
        sum += v.w, constant += w.x, absolute += w.y;
      }
    }
  rounding *= ROUNDINGS;
  channel_sums[i] = sum;
  __syncthreads();
  if (i >= tile.rows) return;
  ChannelStats& out = stats[p.stat_row + tile.first_row + i];
  if (!tile.norms) {
    out.rounding = (float)rounding;
    return;
  }
  // Tensor cores cut off below 2^-23 of a sum, 16 products at a time.
  const double raw2 = norm2, lost = tile.from_gram ? norm2 * 0x1p-19 : 0.0;
  if (flags & HAS_MEAN) {
    norm2 -= sum * sum / p.d_model;
    norm2 = norm2 < 0.0 ? 0.0 : norm2;
    const u32 head = i / p.d_head * p.d_head;
    pair -= sum * channel_sums[head + pair_partner(i - head, p.rotary, p.interleaved)] / p.d_model;
  }
  const float b = bias ? load_value(bias, p.vector_dtype, tile.first_row + i) : 0.f;
  out = {(float)(norm2 + lost), (float)(raw2 + lost), (float)pair, (float)(constant + b),
         (float)(absolute + fabsf(b)), (float)sum, (float)rounding, 0.f};
}
