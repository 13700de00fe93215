// What the kernels that make Grams on tensor cores are given, what they leave of every channel, where Grams lie, and the shape of
// what is certified.
#pragma once
#include "scale/types.cuh"

// A run of tiles of the model dimension, for the heads that share a tile.
struct Segment {
  u32 projection;
  u32 first_row;    // channel
  u32 first, last;  // tiles
  u32 slot;         // of the first head's partial Gram
  u32 heads;        // heads whose Grams are wanted; 0: norms only
  u32 stat;         // first row of this segment's channel parts, or of its channels' statistics
  u32 whole;        // 1: nobody else has tiles of these channels, so their statistics are known here
};

// What one segment (or one block's share of it) saw of one channel. Sums are there where the norm has a mean or a shift.
struct ChannelPart {
  float norm2, pair, rounding, sum, constant, absolute, pad[2];
};

// What f32 sums of thousands of roundings may be short of, as a factor.
constexpr double ROUNDINGS = 1.001;

// Where the parts of a head's Gram lie, `stride` slots apart; their sum is the Gram.
struct HeadGram {
  u32 first, stride, count;
  u32 stat_row;  // statistics of the head's first channel
};
// Layers of one kind, as certificates see them.
struct Shape {
  u32 layers, n_q, n_kv, d_head, d_model;
  u32 rotary, interleaved;
  u32 mean;           // 1: the norm removes it
  u32 one_sided;      // 1: one side of the products that made the Grams was rounded, 0: both
  float rope_factor;  // on rotated channels (YaRN)
  float rounding;     // c: the sums of a Gram err by at most c 2^-24 tr G
  float skip_spread;  // raw norms are skipped where max f^4 / min f^4 is at most this
};
static_assert(sizeof(Segment) == 32 && sizeof(ChannelPart) == 32 && sizeof(HeadGram) == 16 && sizeof(Shape) == 48, "host mirror");
