//! Mirrors of the parameter structs of `kernels/attention/pages.cuh` and `append.cu`, byte for byte.

use bytemuck::{Pod, Zeroable};

/// `BlockTable` of `pages.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct BlockTable {
    pub pages: u64,
    pub lengths: u64,
    pub stride: i64,
    pub pages_per_sequence: i32,
    pub log2_page_size: i32,
    pub count: i32,
    pub added: i32,
}
const _: () = assert!(size_of::<BlockTable>() == 40, "the kernel asserts the same");

/// `PagedParams` of `pages.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Paged {
    pub table: BlockTable,
    pub starts: u64,
    pub parts: u64,
}
const _: () = assert!(size_of::<Paged>() == 56, "the kernel asserts the same");

/// `AppendTensor` of `append.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AppendTensor {
    pub from: u64,
    pub to: u64,
    pub descale: u64,
    pub stats: u64,
    pub strides: [i64; 3],
    pub descale_strides: [i64; 2],
    pub page_strides: [i64; 3],
    pub length: i32,
    pub heads: i32,
}
const _: () = assert!(size_of::<AppendTensor>() == 104, "the kernel asserts the same");

/// `AppendParams` of `append.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Append {
    pub q: AppendTensor,
    pub k: AppendTensor,
    pub v: AppendTensor,
    pub table: BlockTable,
    pub cosine: u64,
    pub sine: u64,
    pub counter: u64,
    pub starts: u64,
    pub parts: u64,
    pub rotary: i32,
    pub positions: i32,
    pub v_rows: i32,
    pub sequences: i32,
    pub most_parts: i32,
    pub items: i32,
    pub tile_time: f32,
    pub item_time: f32,
    pub join_time: f32,
    pub part_time: f32,
    pub reading_time: f32,
    pub processors: i32,
}
const _: () = assert!(size_of::<Append>() == 440, "the kernel asserts the same");
