//! Attention over a paged KV cache in E4M3: decoding, several drafted tokens, prefill in chunks.
//!
//! [`Cuda::launch`] puts up to three kernels on the caller's stream where keys lie in [`Pages`]:
//!
//! 1. **Append.** New keys and values in BF16, F16 or F32 become E4M3 by descales known beforehand, keys rotated by their
//!    positions, and go to their pages; queries become E4M3. The same launch cuts the keys of each sequence into parts by the lengths,
//!    which only the device knows.
//! 2. **Attention**, with the numbers of a dense call that is split ([`super`]).
//! 3. **Combine**, where a sequence can have several parts.
//!
//! Queries may be packed ([`PackedQueries`](super::pages::PackedQueries)): those of each sequence, prefill and decode in one launch, are cut
//! into blocks of rows by the same list.
//!
//! It allocates nothing and waits for nothing once its kernels are loaded ([`Cuda::prepare`]). A captured graph serves every
//! step of a decode: lengths and block table are read when it runs.
//!
//! **What is not checked**: lengths and page numbers lie on the device. Whatever they hold, nothing outside the cache is read or
//! written: a page that the cache does not have reads as zeros and is not written, and a length ends where the row of the block
//! table does. [`Cuda::with_table_checks`] has them checked before each launch, for debugging.

use super::call::Tensors;
use super::engine::Cuda;
use super::kernels::run_map;
use super::pages::{Pages, PagesWorkspace, Splits, ValuePages};
use super::params::{self, AppendTensor};
use super::sizes::outer_strides;
use super::terms::DeviceCall;
use super::tile::{ITEM, JOIN, PART_BYTES, PROCESSORS, Split, Tile};
use super::variant::Variant;
use crate::attention::AttentionShape;
use crate::cuda::tensor_map::{Boxes, MapType, Swizzle, TensorMap, tensor_map};
use crate::cuda::{DevicePtr, Element, Launch, Stream, View};
use crate::error::{Error, Result};
use bytemuck::Zeroable;

/// Rows and heads that one block of the append takes.
pub(super) const APPEND_ROWS: usize = 16;
pub(super) const APPEND_HEADS: usize = 4;
/// Rows that the kernel that joins parts gives a warp each; fewer get several.
const ROWS_A_WARP: usize = 8192;

/// A call over pages that keeps every rule.
pub(super) struct PagesCall<'a> {
    call: &'a DeviceCall,
    tensors: &'a Tensors,
    pages: &'a Pages,
    pub place: PagesWorkspace,
    /// A batch of sequences as long as the longest.
    longest: AttentionShape,
    split: Split,
}

impl<'a> PagesCall<'a> {
    pub fn new(call: &'a DeviceCall, tensors: &'a Tensors, pages: &'a Pages) -> Result<Self> {
        tensors.check(call)?;
        let longest = pages.longest(&call.shape);
        let packed = pages.queries.is_some();
        let place = PagesWorkspace::of(&call.shape, &longest, packed, tensors.q.element(), pages.splits);
        Ok(Self { call, tensors, pages, place, longest, split: Split::single(&longest, usize::MAX) })
    }

    /// The kernels of a call, and whether its parts are joined.
    pub fn variants(&self) -> ([Variant; 2], bool) {
        // As in `Split::has_few_tiles`: where blocks have an item each, short code is faster.
        let rolled = self.split.consumers == 1 && self.split.tiles(&self.longest) <= PROCESSORS;
        let attention = Variant::pages(self.call, self.tensors, self.pages, rolled);
        ([Variant::append(self.call, self.tensors, self.pages), attention], self.place.joins())
    }

    fn queries(&self) -> params::Queries {
        params::Queries {
            cu_seqlens: self.pages.queries.map_or(0, |queries| queries.cu_seqlens.ptr().0),
            length: self.call.shape.len_q as i32,
            block: (self.split.positions * self.split.consumers) as i32,
        }
    }

    fn table(&self) -> params::BlockTable {
        let pages = self.pages;
        params::BlockTable {
            pages: pages.block_table.ptr().0,
            lengths: pages.lengths.ptr().0,
            stride: pages.block_table.unit_free_strides()[0],
            pages_per_sequence: pages.block_table.extents()[1] as i32,
            log2_page_size: pages.page_size().trailing_zeros() as i32,
            count: pages.k.extents()[0] as i32,
            added: pages.added() as i32,
        }
    }

    /// The binary logarithm of the warps that share a row when parts are joined.
    fn share(&self) -> u32 {
        let AttentionShape { batch, len_q, n_q_heads, .. } = self.call.shape;
        (ROWS_A_WARP / (batch * len_q * n_q_heads)).clamp(1, 8).ilog2()
    }
}

impl Cuda {
    pub(super) fn launch_pages(&self, stream: &Stream, call: &PagesCall, workspace: &View<1>) -> Result<()> {
        call.place.check(workspace)?;
        let at = |offset: usize| workspace.ptr().offset(offset as u64);
        if self.table_checks {
            self.check_table(stream, call)?;
        }
        let ([append, attention], joins) = call.variants();
        self.launch_append(stream, call, append, at)?;
        let forward = self.attend_pages(stream, call, attention, at)?;
        if !joins {
            return Ok(());
        }
        let params = params::Combine {
            log2_row_warps: call.share() as i32,
            sinks: forward.sinks,
            counts: at(PagesWorkspace::COUNTS).0,
            joins: at(call.place.joins).0,
            block_rows: call.place.block_rows as i32,
            ..params::Combine::of(&forward)
        };
        let sizes = &call.call.shape;
        let heads = (sizes.n_q_heads << call.share()).div_ceil(Split::JOINING_WARPS);
        let grid = [call.place.joined_rows(), heads, 1];
        self.launch_combine(stream, Variant::combine(call.call, call.tensors), params, grid)
    }

    fn launch_append(
        &self,
        stream: &Stream,
        call: &PagesCall,
        variant: Variant,
        at: impl Fn(usize) -> DevicePtr,
    ) -> Result<()> {
        let PagesCall { tensors: t, pages, place, .. } = call;
        let sizes = &call.call.shape;
        let AttentionShape { batch, n_q_heads, n_kv_heads, d_head, .. } = *sizes;
        // Rows of the statistics: logits, q, k, v.
        let stats = |row: usize| t.stats.map_or(0, |s| s.ptr().offset(16 * row as u64).0);
        let tensor = |x: Option<&View<4>>, descale: Option<&View<2>>, heads: usize, row: usize| {
            let (descale, descale_strides) = self.kernels.descale(descale);
            AppendTensor {
                from: x.map_or(0, |x| x.ptr().0),
                descale,
                descale_strides,
                stats: stats(row),
                strides: x.map_or([0; 3], outer_strides),
                length: x.map_or(0, |x| x.extents()[1] as i32),
                heads: heads as i32,
                ..Zeroable::zeroed()
            }
        };
        let cast_q = (t.q.element() != Element::E4m3).then_some(&t.q);
        let d = &t.descales;
        let mut q = tensor(cast_q, d.q.as_ref(), n_q_heads, n_q_heads);
        q.to = at(place.q).0;
        let mut k = tensor(pages.new.as_ref().map(|new| &new.k), d.k.as_ref(), n_kv_heads, 2 * n_q_heads);
        (k.to, k.page_strides) = (pages.k.ptr().0, outer_strides(&pages.k));
        let center = |x: Option<View<2>>| x.map_or(0, |x| x.ptr().0);
        k.center = center(call.call.key_center());
        let mut v = tensor(pages.new.as_ref().map(|new| &new.v), d.v.as_ref(), n_kv_heads, 2 * n_q_heads + n_kv_heads);
        v.center = center(call.call.value_center());
        (v.to, v.page_strides) = match &pages.v {
            ValuePages::Rows(v) => (v.ptr().0, outer_strides(v)),
            ValuePages::Tiled(v) => {
                let strides = v.unit_free_strides();
                (v.ptr().0, [strides[0], 0, strides[1]])
            }
        };
        let blocks: usize = [(&q, n_q_heads), (&k, n_kv_heads), (&v, n_kv_heads)]
            .map(|(x, heads)| (batch * x.length as usize).div_ceil(APPEND_ROWS) * heads.div_ceil(APPEND_HEADS))
            .iter()
            .sum();
        let tenths = |time: usize| time as f32 / 10.0;
        let block_bytes = (place.block_rows.min(call.longest.len_q) * n_q_heads * 2 * d_head) as f32;
        let mut append = params::Append {
            q,
            k,
            v,
            table: call.table(),
            queries: call.queries(),
            cosine: t.rope.map_or(0, |rope| rope.cosine.ptr().0),
            sine: t.rope.map_or(0, |rope| rope.sine.ptr().0),
            counter: at(0).0,
            counts: at(PagesWorkspace::COUNTS).0,
            parts: at(place.parts).0,
            joins: at(place.joins).0,
            rotary: t.rope.map_or(0, |rope| rope.rotary() as i32),
            positions: t.rope.map_or(0, |rope| rope.cosine.extents()[0] as i32),
            v_rows: matches!(pages.v, ValuePages::Rows(_)).into(),
            sequences: pages.sequences() as i32,
            window_left: call.call.window()[0],
            units: (n_q_heads / call.split.heads) as i32,
            most_blocks: place.most_blocks as i32,
            partial_rows: place.block_rows as i32,
            parts_asked: match pages.splits {
                Splits::Fastest => 0,
                Splits::Parts(parts) => parts as i32,
            },
            tile_time: tenths(Tile::time(sizes, call.split.consumers)),
            item_time: tenths(ITEM),
            join_time: tenths(JOIN),
            block_time: block_bytes / (10 * PART_BYTES) as f32,
            reading_time: (n_kv_heads * d_head) as f32 / (128 * PROCESSORS) as f32,
            processors: PROCESSORS as i32,
            unused: 0,
        };
        let kernel = self.kernels.load(variant)?;
        let launch = Launch::linear(1 + blocks, 2 * d_head as u32, kernel.shared);
        // SAFETY: 1. the struct is the kernel's parameter; 2. and 3. every address comes from a view whose shape was checked, or is a
        // region of the workspace; the kernel writes within the extents of the cache whatever the block table holds.
        unsafe { kernel.kernel.launch_parameters(stream, launch, &mut [(&raw mut append).cast()], false) }
    }

    fn attend_pages(
        &self,
        stream: &Stream,
        call: &PagesCall,
        variant: Variant,
        at: impl Fn(usize) -> DevicePtr,
    ) -> Result<params::Forward> {
        let PagesCall { tensors: t, pages, place, split, .. } = call;
        let (forward, sizes) = (self.kernels.load(variant)?, &call.call.shape);
        // SAFETY: it lies in the workspace, whose size was checked.
        let cast = unsafe { View::dense(at(place.q), Element::E4m3, sizes.q_shape()) };
        let q = if t.q.element() == Element::E4m3 { t.q } else { cast };
        let mut params = params::Forward {
            out_e4m3: (t.out.element() == Element::E4m3).into(),
            ..params::Forward::of(call.call, t, at(0), &self.kernels)
        };
        params.split_by(split, sizes, place.partial.map(&at));
        let (counts, parts) = (at(PagesWorkspace::COUNTS).0, at(place.parts).0);
        let mut paged = params::Paged { table: call.table(), counts, parts };
        let rows = pages.page_size().min(Split::TILE.keys);
        let mut q = run_map(&q, forward.run, split.heads, split.positions)?;
        let mut k = run_map(&pages.k, forward.run, 1, rows)?;
        let mut v = match &pages.v {
            ValuePages::Rows(v) => run_map(v, forward.run, 1, rows)?,
            ValuePages::Tiled(v) => tiled_map(v, rows)?,
        };
        let items = place.most_entries.saturating_mul(sizes.n_q_heads / split.heads);
        let threads = 128 * (Split::TILE.consumers as u32 + 1);
        let launch = Launch::linear(self.processors.min(items), threads, forward.shared);
        let parameters = &mut [
            (&raw mut q).cast(),
            (&raw mut k).cast(),
            (&raw mut v).cast(),
            (&raw mut params).cast(),
            (&raw mut paged).cast(),
        ];
        // SAFETY: 1. three maps and two structs are the kernel's parameters; 2. and 3. every address comes from a view whose shape
        // was checked, or lies in the workspace; pages are read within the extents of the cache; the kernel waits for the append.
        unsafe { forward.kernel.launch_parameters(stream, launch, parameters, true) }?;
        Ok(params)
    }

    fn check_table(&self, stream: &Stream, call: &PagesCall) -> Result<()> {
        let kernel = self.kernels.load(Variant::CheckTable)?;
        let fault = self.kernels.device.zeros::<i32>(4)?;
        let (mut table, mut sequences, mut to) = (call.table(), call.pages.sequences() as i32, fault.ptr());
        let parameters = &mut [(&raw mut table).cast(), (&raw mut sequences).cast(), (&raw mut to).cast()];
        // SAFETY: 1. these are the kernel's parameters; 2. and 3. the table's addresses come from views that were checked, and the
        // result is waited for.
        unsafe { kernel.kernel.launch_parameters(stream, Launch::linear(1, 256, 0), parameters, false) }?;
        stream.synchronize()?;
        let [kind, sequence, entry, value] = fault.read()?[..] else { return Ok(()) };
        let params::BlockTable { count, pages_per_sequence, log2_page_size, added, .. } = table;
        Err(match kind {
            0 => return Ok(()),
            1 => Error::argument(format_args!(
                "lengths[{sequence}] = {value} must be from 0 to {}: the block table has {pages_per_sequence} pages of {} tokens, \
                 and {added} are appended",
                (pages_per_sequence << log2_page_size) - added,
                1 << log2_page_size
            )),
            2 => Error::argument(format_args!(
                "block_table[{sequence}][{entry}] = {value} is not one of the cache's {count} pages"
            )),
            _ => Error::argument(format_args!(
                "block_table[{sequence}][{entry}] = {value}: tokens are appended to rows of this page that another entry uses"
            )),
        })
    }
}

/// Map of tiled values, in boxes of `keys` keys of one head.
fn tiled_map(v: &View<6>, keys: usize) -> Result<TensorMap> {
    let [pages, heads, groups, eights, ..] = v.extents().map(|n| n as u64);
    let [page, head, group, ..] = v.unit_free_strides().map(|n| n as u64);
    let words = 16 * eights;
    tensor_map(&Boxes {
        address: v.ptr().0,
        element: MapType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        extents: &[words, groups, heads, pages],
        strides: &[group, head, page],
        tile: &[words as u32, keys as u32 / 16, 1, 1],
        swizzle: Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        far: false,
    })
}
