//! The host's side of the tables that the kernels read (`kernels/scale/types.cuh` and the structs at the head of
//! each kernel file).

use crate::bound::round_up;
use crate::cuda::{Buffer, Device, DevicePtr, tensor_map};
use crate::error::Result;
use crate::model::RoundingShare;
use crate::tensor;
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

impl From<Dtype> for tensor::Dtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
            Dtype::F32 => Self::F32,
        }
    }
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
    /// Bias, one value per channel, or NULL.
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
    /// Largest factor on q after rotation and norms, where one grows with the position; 1 without. It is in the operand bound
    /// of q, which is cast with it, and in the logit bounds, in no norm of W_Q.
    pub query_factor: f64,
    /// Shares of the rounding term A in operand bounds B + share A, see
    /// [`AttentionSpec::rounding_share`](crate::model::AttentionSpec::rounding_share).
    pub rounding_share: RoundingShare,
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
    /// Channels that are normalized together: d_head (Qwen 3, Gemma 3), or those of all heads (OLMo 2).
    pub channels: u32,
}

/// Where a layer's results begin in those of the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub layer: u32,
    /// First query and KV head.
    pub q: u32,
    pub kv: u32,
}

impl LayerInput {
    /// The largest factor on q, what bounds on the logits of q without it are multiplied by, and the share of rounding, all
    /// rounded up; where results go.
    pub(super) fn growth(&self, place: &Place) -> Growth {
        Growth {
            logits: round_up(self.softmax_scale * self.query_factor),
            query: round_up(self.query_factor),
            rounding_share: [self.rounding_share.q, self.rounding_share.k].map(round_up),
            weight_rounding: self.rounding_share.weights.map(round_up),
            q: place.q,
            kv: place.kv,
        }
    }

    /// The layer with stand-ins for its addresses. Which kernels run depends on whether a vector is there and on whether an
    /// address is a multiple of 16 bytes, so these stay. Layers whose stand-ins are equal are one [`ShapeEngine`]'s.
    ///
    /// [`ShapeEngine`]: super::ShapeEngine
    pub fn without_places(&self) -> Self {
        let place = stand_in;
        let projection = |p: &ProjectionInput| ProjectionInput {
            weight: DeviceMatrix { ptr: place(p.weight.ptr), ..p.weight },
            bias: place(p.bias),
        };
        let side = |s: &QkNormSide| QkNormSide { gain: place(s.gain), shift: place(s.shift), ..*s };
        Self {
            q: projection(&self.q),
            k: projection(&self.k),
            v: self.v.as_ref().map(projection),
            gain: place(self.gain),
            shift: place(self.shift),
            qk_norm: self.qk_norm.map(|norm| QkNormInput { q: side(&norm.q), k: side(&norm.k), ..norm }),
            ..*self
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
            rounding_share: RoundingShare::default(),
            qk_norm: None,
        }
    }
}

/// In place of an address: NULL, or one that is or is not a multiple of 16 bytes as it.
pub(super) fn stand_in(ptr: DevicePtr) -> DevicePtr {
    match ptr {
        DevicePtr::NULL => ptr,
        DevicePtr(address) if address.is_multiple_of(16) => DevicePtr(16),
        _ => DevicePtr(1),
    }
}

/// Factors and the rounding share of one layer, for `scale_logit_bounds` and `scale_qk_norm_bounds`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Growth {
    pub logits: f32,
    pub query: f32,
    /// Of q and k.
    pub rounding_share: [f32; 2],
    pub weight_rounding: [f32; 2],
    pub q: u32,
    pub kv: u32,
}

/// Where a projection's weight and vectors lie: the part of a [`Projection`] that changes when weights move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Addresses {
    pub weight: u64,
    pub gain: u64,
    pub shift: u64,
    pub bias: u64,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Projection {
    pub at: Addresses,
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
    pub first_head: u32,
    pub pad: u32,
}
const _: () = assert!(size_of::<Projection>() == 96);
pub(super) const HAS_MEAN: u32 = 1;
/// No row of statistics, or no head: a projection that is not read, or V.
pub(super) const NO_ROW: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct HeadPlace {
    pub projection: u32,
    pub first_row: u32,
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
    pub layer: u32,
    pub kv: u32,
    pub rope_factor: f32,
    pub normalised: u32,
    pub query_factor: f32,
    pub rounding_share: [f32; 3],
}
const _: () = assert!(size_of::<Layer>() == 68);

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QkSide {
    /// Gain and shift.
    pub at: [u64; 2],
    pub stride: u32,
    pub channels: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QkLayer {
    pub q: QkSide,
    pub k: QkSide,
    pub growth: Growth,
    pub dtype: u32,
    pub gain_offset: f32,
    pub rope_factor: f32,
    pub rotary: u32,
    pub interleaved: u32,
    pub layer: u32,
}
const _: () = assert!(size_of::<QkLayer>() == 104);

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

/// A layer of a power iteration: its projections, and where its estimates and vectors begin.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PowerLayer {
    pub q: u32,
    pub k: u32,
    pub sigma: u32,
    pub vector: u32,
}
const _: () = assert!(size_of::<PowerLayer>() == 16);

/// One matrix whose largest eigenvalue is certified (`kernels/scale/matrices.cuh`).
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

/// What goes with the matrix of a product (`kernels/scale/matrices.cuh`).
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Product {
    pub grown: f64,
    pub trace: f32,
    pub slack: f32,
}
const _: () = assert!(size_of::<Product>() == 16);

/// Norms of these layers remove the mean or add a shift: channels have sums next to their norms.
pub(super) fn has_sums(layers: &[LayerInput]) -> bool {
    layers.iter().any(|l| l.mean_removed || l.shift != DevicePtr::NULL)
}

/// Tensor maps of a table of projections in device memory, one for each size of box: so many channels by 128 bytes of inputs of
/// weights stored `[out, in]`, so many inputs by 128 bytes of channels of others.
#[derive(Debug)]
pub(super) struct TensorMaps {
    maps: Buffer<u64>,
    boxes: Vec<u32>,
    /// V has maps too.
    values: bool,
    /// As of [`tensor_map::Boxes`].
    far: bool,
}

/// 64-bit words of a tensor map.
pub(super) const MAP_WORDS: usize = 16;

impl TensorMaps {
    /// A dry run, whose weights need not be there, makes none.
    pub fn new(device: &Device, projections: &[Projection], values: bool, boxes: Vec<u32>, far: bool) -> Result<Self> {
        let of = |p: &Projection| match values || p.first_head != NO_ROW {
            true if !device.is_dry() => tensor_maps(p, &boxes, far),
            _ => Ok(vec![0; MAP_WORDS * boxes.len()]),
        };
        let maps = projections.iter().map(of).collect::<Result<Vec<_>>>()?.concat();
        Ok(Self { maps: device.upload(&maps)?, boxes, values, far })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.maps.ptr()
    }

    /// Where the maps of the projection with this number lie, and what they are; `None` if it has none.
    pub fn of(&self, index: usize, projection: &Projection) -> Result<Option<(DevicePtr, Vec<u64>)>> {
        if !self.values && projection.first_head == NO_ROW {
            return Ok(None);
        }
        let place = self.maps.at(MAP_WORDS * self.boxes.len() * index);
        Ok(Some((place, tensor_maps(projection, &self.boxes, self.far)?)))
    }
}

fn tensor_maps(p: &Projection, boxes: &[u32], far: bool) -> Result<Vec<u64>> {
    let (channels, inputs) = (u64::from(p.rows), u64::from(p.d_model));
    let (inner, outer, stride) = match p.col_stride {
        1 => (inputs, channels, p.row_stride),
        _ => (channels, inputs, p.col_stride),
    };
    let is_f32 = p.dtype == Dtype::F32 as u32;
    let map = |&rows: &u32| tensor_map::tensor_map_rows(p.at.weight, is_f32, inner, outer, stride as u64, rows, far);
    Ok(boxes.iter().map(map).collect::<Result<Vec<_>>>()?.concat())
}
