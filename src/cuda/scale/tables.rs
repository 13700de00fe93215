//! The host's side of the tables that the kernels read (`kernels/include/scale_types.cuh` and the structs at the head of
//! each kernel file).

use super::super::DevicePtr;
use bytemuck::{Pod, Zeroable};

/// Type of stored values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Dtype {
    /// bfloat16.
    Bf16 = 0,
    /// IEEE half.
    F16 = 1,
    /// IEEE single.
    F32 = 2,
}

impl Dtype {
    /// Bytes of one value.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// A weight matrix in device memory, as it comes: channel c (output) and input channel i lie at
/// `c * row_stride + i * col_stride` values from `ptr`. `[out, in]` has `col_stride` 1, Conv1D `[in, out]` has
/// `row_stride` 1; a fused QKV is three of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMatrix {
    /// First value.
    pub ptr: DevicePtr,
    /// Type of the values.
    pub dtype: Dtype,
    /// Values from an output channel to the next.
    pub row_stride: i64,
    /// Values from an input channel to the next.
    pub col_stride: i64,
}

/// One projection: its weight and, where it has one, its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProjectionInput {
    /// Weight.
    pub weight: DeviceMatrix,
    /// Bias, one value a channel, or NULL.
    pub bias: DevicePtr,
}

/// One layer's attention weights in device memory, and its shape. All vectors share one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerInput {
    /// Query projection.
    pub q: ProjectionInput,
    /// Key projection.
    pub k: ProjectionInput,
    /// Value projection; `None` where the values have no bound.
    pub v: Option<ProjectionInput>,
    /// Gain of the input norm, `d_model` values as stored, or NULL.
    pub gain: DevicePtr,
    /// Shift of the input norm, or NULL.
    pub shift: DevicePtr,
    /// Type of gain, shift and biases.
    pub vector_dtype: Dtype,
    /// Added to every stored gain (1 for norms that multiply by 1 + g).
    pub gain_offset: f32,
    /// The norm removes the mean (LayerNorm).
    pub mean_removed: bool,
    /// Model dimension.
    pub d_model: usize,
    /// Query heads.
    pub n_q: usize,
    /// Key and value heads.
    pub n_kv: usize,
    /// Channels of a head.
    pub d_head: usize,
    /// Rotated channels of a head; 0 without RoPE.
    pub rotary: usize,
    /// Rotation pairs are (2b, 2b + 1).
    pub interleaved: bool,
    /// Factor on rotated channels (YaRN, LongRoPE).
    pub rope_factor: f32,
    /// Softmax scale tau.
    pub softmax_scale: f64,
    /// Largest factor on q behind rotation and norms, where one grows with the position; 1 without. It is in the operand bound
    /// of q, which is cast with it, and in the logit bounds, in no norm of W_Q.
    pub query_factor: f64,
    /// Share of the rounding term A in operand bounds B + share A, which covers the roundings of the computation (1/32 for
    /// seven of BF16 and f32 accumulation).
    pub rounding_share: f64,
    /// Norms of q and k between projection and rotation. Their bounds come from these alone: W_Q and W_K are not read.
    pub qk_norm: Option<QkNormInput>,
}

/// Norms of q and k between projection and rotation: `|y_b| <= sqrt(channels) |gain_b| + |shift_b|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormInput {
    /// Norm of the query heads.
    pub q: QkNormSide,
    /// Norm of the key heads.
    pub k: QkNormSide,
    /// Type of the stored vectors.
    pub dtype: Dtype,
    /// Added to every stored gain (1 for norms that multiply by 1 + g).
    pub gain_offset: f32,
}

/// The vectors of one norm, as stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormSide {
    /// Gains, or NULL for ones (to which no offset is added).
    pub gain: DevicePtr,
    /// Shifts, or NULL for none.
    pub shift: DevicePtr,
    /// Every head has values of its own, `heads * d_head` of them; otherwise all heads share `d_head`.
    pub per_head: bool,
    /// Channels that are normalised together: d_head (Qwen 3, Gemma 3), or those of all heads (OLMo 2).
    pub channels: u32,
}

impl LayerInput {
    /// The largest factor on q, and what bounds on the logits of q without it are multiplied by; rounded up.
    pub(super) fn growth(&self) -> Growth {
        Growth {
            logits: above(self.softmax_scale * self.query_factor),
            query: above(self.query_factor),
            rounding_share: above(self.rounding_share),
        }
    }

    /// No weights, sizes of zero, no rotation: for filling in what a layer has.
    pub fn without_addresses() -> Self {
        let weight = DeviceMatrix { ptr: DevicePtr::NULL, dtype: Dtype::F32, row_stride: 0, col_stride: 0 };
        let projection = ProjectionInput { weight, bias: DevicePtr::NULL };
        Self {
            q: projection,
            k: projection,
            v: None,
            gain: DevicePtr::NULL,
            shift: DevicePtr::NULL,
            vector_dtype: Dtype::F32,
            gain_offset: 0.0,
            mean_removed: false,
            d_model: 0,
            n_q: 0,
            n_kv: 0,
            d_head: 0,
            rotary: 0,
            interleaved: false,
            rope_factor: 1.0,
            softmax_scale: 1.0,
            query_factor: 1.0,
            rounding_share: 1.0 / 32.0,
            qk_norm: None,
        }
    }
}

/// The smallest f32 that is not below `x`.
pub(crate) fn above(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) < x { near.next_up() } else { near }
}

/// Factors and the rounding share of one layer, for `scale_plan` and `scale_qk_norm`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Growth {
    pub logits: f32,
    pub query: f32,
    pub rounding_share: f32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Projection {
    pub weight: u64,
    pub gain: u64,
    pub shift: u64,
    pub bias: u64,
    pub row_stride: i64,
    pub col_stride: i64,
    pub rows: u32,
    pub d_model: u32,
    pub d_head: u32,
    pub dtype: u32,
    pub vector_dtype: u32,
    pub gain_offset: f32,
    pub flags: u32,
    pub rotary: u32,
    pub interleaved: u32,
    pub stat_row: u32,
    pub raw_pairs: u32,
    pub first_head: u32,
}
const _: () = assert!(size_of::<Projection>() == 96);
pub(super) const HAS_MEAN: u32 = 1;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct NormBlock {
    pub projection: u32,
    pub first: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Layer {
    pub q_row: u32,
    pub k_row: u32,
    pub v_row: u32,
    pub n_q: u32,
    pub n_kv: u32,
    pub d_head: u32,
    pub d_model: u32,
    pub rotary: u32,
    pub interleaved: u32,
    pub flags: u32,
    pub raw_pairs: u32,
    pub out: u32,
    pub rope_factor: f32,
    pub normalised: u32,
    pub query_factor: f32,
    pub rounding_share: f32,
}
const _: () = assert!(size_of::<Layer>() == 64);

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QkSide {
    pub gain: u64,
    pub shift: u64,
    pub stride: u32,
    pub channels: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QkLayer {
    pub q: QkSide,
    pub k: QkSide,
    pub dtype: u32,
    pub gain_offset: f32,
    pub rope_factor: f32,
    pub logit_scale: f32,
    pub rotary: u32,
    pub interleaved: u32,
    pub out: u32,
    pub query_factor: f32,
    pub rounding_share: f32,
    pub pad: u32,
}
const _: () = assert!(size_of::<QkLayer>() == 88);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Segment {
    pub projection: u32,
    pub first_row: u32,
    pub first: u32,
    pub last: u32,
    pub slot: u32,
    pub heads: u32,
    pub stat: u32,
    pub whole: u32,
}
const _: () = assert!(size_of::<Segment>() == 32);

/// Where the parts of a tile's channel statistics lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct StatTile {
    pub projection: u32,
    pub first_row: u32,
    pub rows: u32,
    pub first: u32,
    pub parts: u32,
    pub norms: u32,
    pub sums: u32,
    pub from_gram: u32,
}
const _: () = assert!(size_of::<StatTile>() == 32);

/// Where the parts of a head's Gram lie: `count` of them, `stride` slots apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadGram {
    /// Slot of the first part.
    pub first: u32,
    /// Slots from a part to the next.
    pub stride: u32,
    /// Parts; their sum is the Gram.
    pub count: u32,
    /// Channel statistics row of the head's first channel.
    pub stat_row: u32,
}

/// Statistics of one channel, as the device keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ChannelStats {
    /// Square of the column's norm, mean removed where the input norm does.
    pub norm2: f32,
    /// The same with the mean kept.
    pub raw2: f32,
    /// Product with the rotation partner's column.
    pub pair: f32,
    /// Constant part: shift through the weight, plus the bias.
    pub constant: f32,
    /// The same with absolute values.
    pub absolute: f32,
    /// Sum of the column, gains applied.
    pub sum: f32,
    /// Square of what the Gram's rounded operands take from the column: sigma moves by at most the root of the channels' sum.
    pub rounding: f32,
    pub(super) pad: f32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PowerBlock {
    pub projection: u32,
    pub head: u32,
    pub vector: u32,
    pub count: u32,
}

/// One matrix whose largest eigenvalue is certified (`kernels/include/scale_jobs.cuh`).
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Task {
    pub kind: u32,
    pub result: u32,
    pub first: u32,
    pub stride: u32,
    pub count: u32,
    pub q_row: u32,
    pub k_row: u32,
    pub group: u32,
}
const _: () = assert!(size_of::<Task>() == 32);

/// What goes with the matrix of a product (`kernels/include/scale_jobs.cuh`).
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Product {
    pub grown: f64,
    pub trace: f32,
    pub slack: f32,
}
const _: () = assert!(size_of::<Product>() == 16);

/// Logit bound of one query head, as the device keeps it; everything rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadBound {
    /// Certified spectral norm of the interaction, over every relative position under RoPE.
    pub sigma: f32,
    /// Bound on the exact |logit|.
    pub certain: f32,
    /// Bound on |logit| from operands rounded to E4M3 with this plan's descales.
    pub rounded: f32,
    /// Descale of E4M3 logits.
    pub descale: f32,
    /// `||a|| + ||b||`: what the logit's linear terms scale with.
    pub linear: f32,
    /// `|c0|`: the constant part of the logit.
    pub constant: f32,
    /// `||c_q|| + ||c_k||`: zero where q and k have no constant part.
    pub constants: f32,
    /// Zero.
    pub pad: f32,
}

/// Frobenius norm of one query head's interaction `W_Q W_K^T`, as the device keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadFrobenius {
    /// The norm at relative position 0.
    pub norm: f32,
    /// Certified bound over every relative position, rounded up.
    pub bound: f32,
}

impl HeadFrobenius {
    /// `F^2 / sigma^2`, between 1 and d_head; 0 for a head of zeros.
    pub fn stable_rank(&self, sigma: f32) -> f64 {
        if sigma == 0.0 { 0.0 } else { (f64::from(self.norm) / f64::from(sigma)).powi(2) }
    }
}

/// How Grams are cut into work: segments, the share of each block, and where each head's parts lie.
#[derive(Debug, Default)]
pub(super) struct Cut {
    pub segments: Vec<Segment>,
    pub shares: Vec<u32>,
    pub heads: Vec<HeadGram>,
    pub slots: u32,
    /// First part and number of parts of every unit's statistics, in runs of 128 rows; none where a segment leaves them itself.
    pub stats: Vec<(u32, u32)>,
    pub stat_parts: u32,
}

/// One run of heads that share a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub projection: u32,
    pub first_row: u32,
    pub stat_row: u32,
    pub heads: u32,
    pub tiles: u32,
    /// What a tile costs beside those of other units.
    pub cost: u32,
    /// Grams are wanted, not norms alone.
    pub gram: bool,
}

/// Cuts the units, end to end, into `blocks` shares of equal cost. A segment leaves `stat_runs` parts of its statistics, but
/// with `whole` the statistics themselves where it has all tiles of its unit.
pub(super) fn cut(units: &[Unit], blocks: usize, d_head: u32, stat_runs: u32, whole: bool) -> Cut {
    let total: u64 = units.iter().map(|u| u64::from(u.tiles) * u64::from(u.cost)).sum();
    let mut cut = Cut { shares: vec![0], ..Cut::default() };
    let mut block = 1u64;
    let mut done = 0u64;
    let boundary = |block: u64| total * block / blocks as u64;
    for unit in units {
        let base = cut.slots;
        let first_stat = cut.stat_parts;
        let heads = if unit.gram { unit.heads } else { 0 };
        let mut tile = 0;
        let mut parts = 0;
        while tile < unit.tiles {
            while boundary(block) <= done {
                cut.shares.push(cut.segments.len() as u32);
                block += 1;
            }
            let cost = u64::from(unit.cost);
            let last = ((boundary(block) - done).div_ceil(cost) + u64::from(tile)).min(u64::from(unit.tiles)) as u32;
            let whole = whole && last - tile == unit.tiles;
            cut.segments.push(Segment {
                projection: unit.projection,
                first_row: unit.first_row,
                first: tile,
                last,
                slot: base + parts * heads,
                heads,
                stat: if whole { unit.stat_row } else { cut.stat_parts * 128 },
                whole: whole.into(),
            });
            parts += 1;
            cut.stat_parts += if whole { 0 } else { stat_runs };
            done += u64::from(last - tile) * cost;
            tile = last;
        }
        cut.stats.push((first_stat * 128, cut.stat_parts - first_stat));
        cut.slots += parts * heads;
        for h in 0..heads {
            let stat_row = unit.stat_row + h * d_head;
            cut.heads.push(HeadGram { first: base + h, stride: heads, count: parts, stat_row });
        }
    }
    cut.shares.resize(blocks + 1, cut.segments.len() as u32);
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_covers_every_tile_once_in_shares_of_equal_cost() {
        for (tiles, blocks, whole) in
            [(5u32, 3usize, false), (64, 132, true), (25, 7, true), (1, 4, true), (25, 7, false)]
        {
            let units: Vec<Unit> = (0..11)
                .map(|i| Unit {
                    projection: i,
                    first_row: 0,
                    stat_row: 1000 * i,
                    heads: 1 + i % 3,
                    tiles,
                    cost: if i == 4 { 2 } else { 3 },
                    gram: i != 4,
                })
                .collect();
            let cut = cut(&units, blocks, 64, 2, whole);
            assert_eq!(cut.shares.len(), blocks + 1);
            let mut seen = vec![vec![0; tiles as usize]; 11];
            let mut sizes = vec![];
            for share in cut.shares.windows(2) {
                let mut size = 0;
                for s in &cut.segments[share[0] as usize..share[1] as usize] {
                    for t in s.first..s.last {
                        seen[s.projection as usize][t as usize] += 1;
                    }
                    size += (s.last - s.first) * units[s.projection as usize].cost;
                }
                sizes.push(size);
            }
            assert!(seen.iter().flatten().all(|&n| n == 1));
            assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 2 * 3, "{sizes:?}");
            let wanted = units.iter().filter(|u| u.gram);
            assert_eq!(cut.heads.len(), wanted.map(|u| u.heads as usize).sum::<usize>());
            let (alone, parts): (Vec<&Segment>, Vec<&Segment>) = cut.segments.iter().partition(|s| s.whole == 1);
            for s in &alone {
                assert!(s.first == 0 && s.last == tiles && s.stat == units[s.projection as usize].stat_row);
            }
            let several = |unit: &Unit| parts.iter().any(|s| s.projection == unit.projection);
            assert_eq!(alone.len(), if whole { units.iter().filter(|u| !several(u)).count() } else { 0 });
            assert!(whole || !parts.is_empty());
            let mut rows: Vec<u32> = parts.iter().map(|s| s.stat).collect();
            rows.dedup();
            assert_eq!(rows.len(), parts.len(), "every segment has its own statistics");
            assert_eq!(cut.stats.iter().map(|s| s.1).sum::<u32>(), cut.stat_parts);
            assert_eq!(cut.stat_parts as usize, 2 * parts.len());
            for (unit, &(first, count)) in units.iter().zip(&cut.stats) {
                let own = parts.iter().filter(|s| s.projection == unit.projection);
                assert!(own.map(|s| s.stat).eq((0..count / 2).map(|i| first + 256 * i)));
            }
            let mut slots: Vec<u32> =
                cut.heads.iter().flat_map(|h| (0..h.count).map(move |i| h.first + i * h.stride)).collect();
            slots.sort_unstable();
            assert_eq!(slots, (0..cut.slots).collect::<Vec<_>>(), "every slot belongs to one head");
        }
    }
}
