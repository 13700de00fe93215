//! Mirrors of the kernels' parameter structs, byte for byte.

use super::terms::Terms;
use crate::cuda::Element;
use crate::cuda::View;
use bytemuck::{Pod, Zeroable};

/// `Params` of `kernels/attention/forward.cu`. Pointers may be 0 where the kernel says so; strides count elements.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Forward {
    pub o: u64,
    pub lse: u64,
    pub q_descale: u64,
    pub k_descale: u64,
    pub v_descale: u64,
    pub o_descale: u64,
    pub logit_descale: u64,
    pub telemetry: u64,
    pub counter: u64,
    pub o_strides: [i64; 3],
    pub q_descale_strides: [i64; 2],
    pub k_descale_strides: [i64; 2],
    pub v_descale_strides: [i64; 2],
    pub o_descale_strides: [i64; 2],
    pub softmax_scale: f32,
    pub batch: i32,
    pub heads_q: i32,
    pub heads_kv: i32,
    pub len_q: i32,
    pub len_k: i32,
    pub packed: i32,
    pub row_blocks: i32,
    pub units: i32,
    pub section: i32,
    pub o_partial: u64,
    pub lse_partial: u64,
    pub causal_offset: i32,
    pub splits: i32,
    pub active_consumers: i32,
    pub tile_heads: i32,
    pub positions: i32,
    pub tile_heads_reciprocal: i32,
    pub units_per_batch: i32,
    pub out_e4m3: i32,
    pub extremes_partial: u64,
    pub sinks: u64,
    pub schedule: u64,
    pub window: [i32; 2],
    pub soft_cap: f32,
    pub columns: i32,
}
const _: () = assert!(size_of::<Forward>() == 288, "the kernel asserts the same");

/// The same where the kernel keeps each row's largest P, or what the rounding of the output took.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ForwardKeeping {
    pub forward: Forward,
    pub kept: u64,
}

/// `CombineParams` of `kernels/attention/combine.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Combine {
    pub o: u64,
    pub lse: u64,
    pub o_descale: u64,
    pub telemetry: u64,
    pub o_partial: u64,
    pub lse_partial: u64,
    pub extremes_partial: u64,
    pub v_descale: u64,
    pub o_strides: [i64; 3],
    pub o_descale_strides: [i64; 2],
    pub v_descale_strides: [i64; 2],
    pub batch: i32,
    pub heads_q: i32,
    pub heads_kv: i32,
    pub len_q: i32,
    pub splits: i32,
    pub out_e4m3: i32,
    pub log2_row_warps: i32,
    pub columns: i32,
    pub sinks: u64,
    pub sequences: Sequences,
    pub sequence_splits: u64,
    pub part_starts: u64,
}
const _: () = assert!(size_of::<Combine>() == 216, "the kernel asserts the same");

impl Combine {
    /// What it shares with the kernel in front of it.
    pub fn of(forward: &Forward) -> Self {
        Self {
            o: forward.o,
            lse: forward.lse,
            o_descale: forward.o_descale,
            telemetry: forward.telemetry,
            o_partial: forward.o_partial,
            lse_partial: forward.lse_partial,
            extremes_partial: forward.extremes_partial,
            v_descale: forward.v_descale,
            o_strides: forward.o_strides,
            o_descale_strides: forward.o_descale_strides,
            v_descale_strides: forward.v_descale_strides,
            batch: forward.batch,
            heads_q: forward.heads_q,
            heads_kv: forward.heads_kv,
            len_q: forward.len_q,
            out_e4m3: forward.out_e4m3,
            columns: forward.columns,
            ..Zeroable::zeroed()
        }
    }
}

/// `Sequences` of `kernels/attention/sequences.cuh`; null where all are alike.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Sequences {
    pub q_starts: u64,
    pub q_ends: u64,
    pub k_starts: u64,
    pub k_ends: u64,
    pub count: i32,
    pub unused: i32,
}

impl Sequences {
    /// The lists of a call.
    pub fn of(terms: &Terms) -> Self {
        terms.sequences.as_ref().map_or_else(Self::zeroed, |lists| Self {
            q_starts: lists.q_starts.ptr().0,
            q_ends: lists.q_ends.ptr().0,
            k_starts: lists.k_starts.ptr().0,
            k_ends: lists.k_ends.ptr().0,
            count: lists.count() as i32,
            unused: 0,
        })
    }
}

/// `ScheduleParams` of `kernels/attention/schedule.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Schedule {
    pub schedule: u64,
    pub sequence_splits: u64,
    pub sequences: Sequences,
    pub rows: [i32; 2],
    pub lengths: [i32; 2],
    pub window: [i32; 2],
    pub tile_rows: i32,
    pub tile_keys: i32,
    pub units: i32,
    pub capacity: i32,
    pub most_splits: i32,
    pub item_time: i32,
    pub key_tile_time: i32,
    pub combine_time: i32,
}
const _: () = assert!(size_of::<Schedule>() == 112, "the kernel asserts the same");

/// `CastRows` of `kernels/attention/cast_rows.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CastRows {
    pub schedule: Schedule,
    pub o: u64,
    pub lse: u64,
    pub o_strides: [i64; 3],
    pub o_size: i32,
    pub heads_q: i32,
    pub value_groups: i32,
    pub first_key: i32,
}
const _: () = assert!(size_of::<CastRows>() == 168, "the kernel asserts the same");

/// `CastTensor` of `kernels/attention/cast_qkv.cu`; also the parameter of `repack_v`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CastTensor {
    pub from: u64,
    pub to: u64,
    pub descale: u64,
    pub stats: u64,
    pub strides: [i64; 3],
    pub descale_strides: [i64; 2],
    pub length: i32,
    pub heads: i32,
}
const _: () = assert!(size_of::<CastTensor>() == 80, "the kernel asserts the same");

/// `CastParams` of `cast_qkv`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Cast {
    pub q: CastTensor,
    pub k: CastTensor,
    pub v: CastTensor,
    pub cosine: u64,
    pub sine: u64,
    pub positions: u64,
    pub counter: u64,
    pub v_rows: u64,
    pub rotary: i32,
    pub q_start: i32,
    pub v_f16: i32,
    pub table_rows: i32,
}
const _: () = assert!(size_of::<Cast>() == 296, "the kernel asserts the same");

/// Batch, row and head strides of a tensor whose last dimension is contiguous.
pub(super) fn outer_strides(x: &View<4>) -> [i64; 3] {
    let s = x.unit_free_strides();
    [s[0], s[1], s[2]]
}

/// The number that `cast_qkv` knows an input type by.
pub(super) fn input_number(element: Element) -> Option<u32> {
    match element {
        Element::Bf16 => Some(0),
        Element::F16 => Some(1),
        Element::F32 => Some(2),
        _ => None,
    }
}
