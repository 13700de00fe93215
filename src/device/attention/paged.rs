//! Attention over a paged KV cache in E4M3: decoding, several drafted tokens, prefill in chunks.
//!
//! [`PagedEngine::forward`] puts up to three kernels on the caller's stream:
//!
//! 1. **Append.** New keys and values in BF16, F16 or F32 become E4M3 by descales known beforehand, keys rotated by their
//!    positions, and go to their pages; queries become E4M3. The same launch cuts the keys of each sequence into parts by the lengths,
//!    which only the device knows.
//! 2. **Attention**, with the numbers of a dense call that is split ([`super`]).
//! 3. **Combine**, where a sequence can have several parts.
//!
//! It allocates nothing and waits for nothing once its kernels are loaded ([`PagedEngine::prepare`]). A captured graph serves every
//! step of a decode: lengths and block table are read when it runs.
//!
//! **What is not checked**: lengths and page numbers lie on the device. Whatever they hold, nothing outside the cache is read or
//! written: a page that the cache does not have reads as zeros and is not written, and a length ends where the row of the block
//! table does. [`PagedEngine::with_table_checks`] has them checked before each launch, for debugging.

use super::kernels::{self, Kernels, operand_map};
use super::paged_call::{PagedTensors, PagedWorkspace, ValuePages};
use super::paged_params::{self, AppendTensor};
use super::params::{self, outer_strides};
use super::tile::{ITEM, JOIN, PART_BYTES, PROCESSORS, Split, Tile};
use super::variant::rope_number_of;
use crate::attention::AttentionShape;
use crate::cuda::tensor_map::{Boxes, MapType, Swizzle, TensorMap, tensor_map};
use crate::cuda::{Arch, Device, DevicePtr, Element, Launch, Request, Stream, View, sources};
use crate::error::{Error, Result};
use bytemuck::Zeroable;

/// Rows and heads that one block of the append takes.
const APPEND_ROWS: usize = 16;
const APPEND_HEADS: usize = 4;
/// Rows that the kernel that joins parts gives a warp each; fewer get several.
const ROWS_A_WARP: usize = 8192;

/// Compiled form of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Variant {
    Append { d_head: usize, input: u32, rope: u32 },
    Attention { d_head: usize, v_rows: bool, telemetry: bool, rolled: bool },
    Combine { d_head: usize },
    Check,
}

impl kernels::Variant for Variant {
    fn request(self) -> Request {
        let arch = Arch::SM90A;
        let paged = |source, d_head: usize| {
            let request = Request::new(source, arch).define("HEAD_DIM", d_head).define("PAGED", 1);
            request.define("SPLIT_KV", 1).define("CAUSAL", 1).define("PV", 1)
        };
        match self {
            Self::Append { d_head, input, rope } => Request::new(sources::APPEND, arch)
                .define("HEAD_DIM", d_head)
                .define("INPUT", input)
                .define("ROPE", rope)
                .define("BLOCK_N", Split::TILE.keys),
            Self::Attention { d_head, v_rows, telemetry, rolled } => paged(sources::PAGED, d_head)
                .define("BLOCK_N", Split::TILE.keys)
                .define("CONSUMERS", Split::TILE.consumers)
                .define("KV_STAGES", Split::TILE.stages)
                .define("V_ROWS", u8::from(v_rows))
                .define("TELEMETRY", u8::from(telemetry))
                .define("ROLLED", u8::from(rolled)),
            Self::Combine { d_head } => paged(sources::COMBINE, d_head),
            Self::Check => Self::Append { d_head: 128, input: 0, rope: 0 }.request(),
        }
    }

    fn entry(self) -> &'static str {
        match self {
            Self::Append { .. } => "append_kv",
            Self::Attention { .. } => "attention_paged",
            Self::Combine { .. } => "attention_combine",
            Self::Check => "check_block_table",
        }
    }

    fn has_shared(self) -> bool {
        matches!(self, Self::Attention { .. })
    }
}

/// Every variant of the kernels that a call on a paged cache can ask for.
pub fn paged_variants() -> Vec<Request> {
    let mut all = Vec::new();
    for d_head in [64, 128] {
        all.push(Variant::Combine { d_head });
        for input in 0..3 {
            all.extend((0..3).map(|rope| Variant::Append { d_head, input, rope }));
        }
        for (v_rows, telemetry) in [(false, false), (true, false), (false, true), (true, true)] {
            all.extend([false, true].map(|rolled| Variant::Attention { d_head, v_rows, telemetry, rolled }));
        }
    }
    all.into_iter().map(kernels::Variant::request).collect()
}

/// A call that keeps every rule.
struct Call<'a> {
    tensors: &'a PagedTensors,
    sizes: AttentionShape,
    place: PagedWorkspace,
    workspace: DevicePtr,
    split: Split,
}

impl<'a> Call<'a> {
    fn new(tensors: &'a PagedTensors, workspace: &View<1>) -> Result<Self> {
        let sizes = tensors.check()?;
        let place = PagedWorkspace::of(&sizes, tensors.q.element());
        place.check(workspace)?;
        Ok(Self { tensors, sizes, place, workspace: workspace.ptr(), split: Split::single(&sizes, usize::MAX) })
    }

    fn at(&self, offset: usize) -> DevicePtr {
        self.workspace.offset(offset as u64)
    }

    fn table(&self) -> paged_params::BlockTable {
        let cache = &self.tensors.cache;
        let [pages, page_size, ..] = cache.k.extents();
        paged_params::BlockTable {
            pages: cache.block_table.ptr().0,
            lengths: cache.lengths.ptr().0,
            stride: cache.block_table.unit_free_strides()[0],
            pages_per_sequence: cache.block_table.extents()[1] as i32,
            log2_page_size: page_size.trailing_zeros() as i32,
            count: pages as i32,
            added: self.tensors.added() as i32,
        }
    }

    fn append_variant(&self) -> Variant {
        let of_new = self.tensors.new.map_or(Element::Bf16, |new| new.k.element());
        let input = params::input_number(self.tensors.q.element()).or(params::input_number(of_new)).unwrap_or(0);
        let rope = rope_number_of(self.tensors.rope.map(|rope| rope.interleaved));
        Variant::Append { d_head: self.sizes.d_head, input, rope }
    }

    fn attention_variant(&self) -> Variant {
        let v_rows = matches!(self.tensors.cache.v, ValuePages::Rows(_));
        let telemetry = self.tensors.stats.is_some();
        // As in `Split::has_few_tiles`: where blocks have an item each, short code is faster.
        let rolled = self.split.consumers == 1 && self.split.tiles(&self.sizes) <= PROCESSORS;
        Variant::Attention { d_head: self.sizes.d_head, v_rows, telemetry, rolled }
    }

    /// The binary logarithm of the warps that share a row when parts are joined.
    fn share(&self) -> u32 {
        let rows = self.sizes.batch * self.sizes.len_q * self.sizes.n_q_heads;
        (ROWS_A_WARP / rows).clamp(1, 8).ilog2()
    }
}

/// Attention over paged caches on one device; kernels are loaded as calls need them.
#[derive(Debug)]
pub struct PagedEngine {
    kernels: Kernels<Variant>,
    checks: bool,
    processors: usize,
}

impl PagedEngine {
    /// An engine for a device; nothing is compiled yet.
    ///
    /// # Errors
    /// If the device is not of compute capability 9.0 (`is_unsupported`), or the driver fails.
    pub fn new(device: &Device) -> Result<Self> {
        let kernels = Kernels::new(device, "the attention kernel")?;
        Ok(Self { kernels, checks: false, processors: device.processors() })
    }

    /// Whether each call first checks lengths and block table on the device and waits for the result; off by default. Such calls
    /// cannot be captured.
    pub fn with_table_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    /// How many multiprocessors the attention kernel takes, at most all and at least one. All by default.
    pub fn with_processors(mut self, processors: usize) -> Self {
        self.processors = processors.clamp(1, self.kernels.device.processors());
        self
    }

    /// The engine's device.
    pub fn device(&self) -> &Device {
        &self.kernels.device
    }

    /// Bytes of device memory that a call needs beside its tensors.
    ///
    /// # Errors
    /// If the call breaks a rule.
    pub fn workspace_bytes(tensors: &PagedTensors) -> Result<usize> {
        Ok(PagedWorkspace::of(&tensors.check()?, tensors.q.element()).bytes)
    }

    /// Compiles and loads what [`PagedEngine::forward`] would for this call, which otherwise its first call does. A capture needs
    /// this before it.
    ///
    /// # Errors
    /// If the call breaks a rule, or a kernel does not compile or load.
    pub fn prepare(&self, tensors: &PagedTensors, workspace: &View<1>) -> Result<()> {
        let call = Call::new(tensors, workspace)?;
        for variant in [call.append_variant(), call.attention_variant()] {
            self.kernels.load(variant)?;
        }
        if call.place.joins(&call.sizes) {
            self.kernels.load(Variant::Combine { d_head: call.sizes.d_head })?;
        }
        Ok(())
    }

    /// Puts one call on `stream`: appends the new tokens, then `out = softmax(softmax_scale q k^T) v` over each sequence's keys,
    /// with `causal` over those at or before the query's position (the last query stands at the last key).
    ///
    /// The workspace has [`PagedEngine::workspace_bytes`], 256-byte aligned, of any content. Calls that can run at the same time
    /// need one each.
    ///
    /// # Errors
    /// If a rule of [`PagedTensors`] is broken, a kernel does not compile or load, or the driver refuses a launch. With table checks
    /// `is_argument` also where a length or a page number is wrong.
    pub fn forward(
        &self,
        stream: &Stream,
        tensors: &PagedTensors,
        causal: bool,
        softmax_scale: f32,
        workspace: &View<1>,
    ) -> Result<()> {
        let call = Call::new(tensors, workspace)?;
        if !(softmax_scale.is_finite() && softmax_scale > 0.0) {
            let rule = format_args!("softmax scale {softmax_scale} must be finite and greater than zero");
            return Err(Error::argument(rule));
        }
        if self.checks {
            self.check_table(stream, &call)?;
        }
        self.launch_append(stream, &call)?;
        let forward = self.launch_attention(stream, &call, causal, softmax_scale)?;
        if call.place.joins(&call.sizes) {
            self.launch_combine(stream, &call, &forward)?;
        }
        Ok(())
    }

    fn launch_append(&self, stream: &Stream, call: &Call) -> Result<()> {
        let Call { tensors: t, sizes, place, .. } = call;
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, d_head, .. } = *sizes;
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
        q.to = call.at(place.q).0;
        let mut k = tensor(t.new.as_ref().map(|new| &new.k), d.k.as_ref(), n_kv_heads, 2 * n_q_heads);
        (k.to, k.page_strides) = (t.cache.k.ptr().0, outer_strides(&t.cache.k));
        let mut v = tensor(t.new.as_ref().map(|new| &new.v), d.v.as_ref(), n_kv_heads, 2 * n_q_heads + n_kv_heads);
        (v.to, v.page_strides) = match &t.cache.v {
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
        let part_bytes = (len_q * n_q_heads * 2 * d_head) as f32;
        let mut append = paged_params::Append {
            q,
            k,
            v,
            table: call.table(),
            cosine: t.rope.map_or(0, |rope| rope.cosine.ptr().0),
            sine: t.rope.map_or(0, |rope| rope.sine.ptr().0),
            counter: call.workspace.0,
            starts: call.at(place.starts).0,
            parts: call.at(place.parts).0,
            rotary: t.rope.map_or(0, |rope| rope.rotary() as i32),
            positions: t.rope.map_or(0, |rope| rope.cosine.extents()[0] as i32),
            v_rows: matches!(t.cache.v, ValuePages::Rows(_)).into(),
            sequences: batch as i32,
            most_parts: place.most_parts as i32,
            items: (call.split.tiles(sizes) / batch) as i32,
            tile_time: tenths(Tile::time(sizes, call.split.consumers)),
            item_time: tenths(ITEM),
            join_time: tenths(JOIN),
            part_time: part_bytes / (10 * PART_BYTES) as f32,
            reading_time: (n_kv_heads * d_head) as f32 / (128 * PROCESSORS) as f32,
            processors: PROCESSORS as i32,
        };
        let kernel = self.kernels.load(call.append_variant())?;
        let launch = Launch::linear(1 + blocks, 2 * d_head as u32, kernel.shared);
        // SAFETY: 1. the struct is the kernel's parameter; 2. and 3. every address comes from a view whose shape was checked, or is a
        // region of the workspace; the kernel writes within the extents of the cache whatever the block table holds.
        unsafe { kernel.kernel.launch_parameters(stream, launch, &mut [(&raw mut append).cast()], false) }
    }

    fn launch_attention(
        &self,
        stream: &Stream,
        call: &Call,
        causal: bool,
        softmax_scale: f32,
    ) -> Result<params::Forward> {
        let Call { tensors: t, sizes, place, split, .. } = call;
        let forward = self.kernels.load(call.attention_variant())?;
        // SAFETY: it lies in the workspace, whose size was checked.
        let cast = unsafe { View::dense(call.at(place.q), Element::E4m3, sizes.q_shape()) };
        let q = if t.q.element() == Element::E4m3 { t.q } else { cast };
        let d = &t.descales;
        let [q_descale, k_descale, v_descale, o_descale] =
            [&d.q, &d.k, &d.v, &d.o].map(|x| self.kernels.descale(x.as_ref()));
        let row_blocks = split.row_blocks(sizes);
        let mut params = params::Forward {
            o: t.out.ptr().0,
            lse: t.lse.map_or(0, |x| x.ptr().0),
            q_descale: q_descale.0,
            k_descale: k_descale.0,
            v_descale: v_descale.0,
            o_descale: o_descale.0,
            telemetry: t.stats.map_or(0, |x| x.ptr().0),
            counter: call.workspace.0,
            o_strides: outer_strides(&t.out),
            q_descale_strides: q_descale.1,
            k_descale_strides: k_descale.1,
            v_descale_strides: v_descale.1,
            o_descale_strides: o_descale.1,
            softmax_scale,
            batch: sizes.batch as i32,
            heads_q: sizes.n_q_heads as i32,
            heads_kv: sizes.n_kv_heads as i32,
            len_q: sizes.len_q as i32,
            row_blocks: row_blocks as i32,
            o_partial: call.at(place.partial[0]).0,
            lse_partial: call.at(place.partial[1]).0,
            extremes_partial: call.at(place.partial[2]).0,
            // A row of a call that is not causal stands behind all keys.
            causal_offset: if causal { 0 } else { sizes.len_q as i32 },
            active_consumers: split.consumers as i32,
            tile_heads: split.heads as i32,
            positions: split.positions as i32,
            tile_heads_reciprocal: (1usize << 16).div_ceil(split.heads) as i32,
            units_per_batch: (sizes.n_q_heads / split.heads) as i32,
            out_e4m3: (t.out.element() == Element::E4m3).into(),
            columns: sizes.d_head as i32,
            ..Zeroable::zeroed()
        };
        let mut paged =
            paged_params::Paged { table: call.table(), starts: call.at(place.starts).0, parts: call.at(place.parts).0 };
        let [_, page_size, ..] = t.cache.k.extents();
        let rows = page_size.min(Split::TILE.keys);
        let mut q = operand_map(&q, split.heads, split.positions)?;
        let mut k = operand_map(&t.cache.k, 1, rows)?;
        let mut v = match &t.cache.v {
            ValuePages::Rows(v) => operand_map(v, 1, rows)?,
            ValuePages::Tiled(v) => tiled_map(v, rows)?,
        };
        let items = place.most_parts.saturating_mul(split.tiles(sizes) / sizes.batch);
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

    fn launch_combine(&self, stream: &Stream, call: &Call, forward: &params::Forward) -> Result<()> {
        let combine = self.kernels.load(Variant::Combine { d_head: call.sizes.d_head })?;
        let mut params = params::Combine {
            log2_row_warps: call.share() as i32,
            part_starts: call.at(call.place.starts).0,
            ..params::Combine::of(forward)
        };
        let heads = (call.sizes.n_q_heads << call.share()).div_ceil(Split::JOINING_WARPS);
        let grid = (call.sizes.len_q as u32, heads as u32, call.sizes.batch as u32);
        let launch = Launch { grid, block: 32 * Split::JOINING_WARPS as u32, shared: combine.shared };
        // SAFETY: as for the attention, which it waits for.
        unsafe { combine.kernel.launch_parameters(stream, launch, &mut [(&raw mut params).cast()], true) }
    }

    fn check_table(&self, stream: &Stream, call: &Call) -> Result<()> {
        let kernel = self.kernels.load(Variant::Check)?;
        let fault = self.kernels.device.zeros::<i32>(4)?;
        let (mut table, mut sequences, mut to) = (call.table(), call.sizes.batch as i32, fault.ptr());
        let parameters = &mut [(&raw mut table).cast(), (&raw mut sequences).cast(), (&raw mut to).cast()];
        // SAFETY: 1. these are the kernel's parameters; 2. and 3. the table's addresses come from views that were checked, and the
        // result is waited for.
        unsafe { kernel.kernel.launch_parameters(stream, Launch::linear(1, 256, 0), parameters, false) }?;
        stream.synchronize()?;
        let [kind, sequence, entry, value] = fault.read()?[..] else { return Ok(()) };
        let paged_params::BlockTable { count, pages_per_sequence, log2_page_size, added, .. } = table;
        Err(match kind {
            0 => return Ok(()),
            1 => Error::argument(format_args!(
                "lengths[{sequence}] = {value} must be from 0 to {}: the block table has {pages_per_sequence} pages of {} tokens, \
                 and {added} are appended",
                (pages_per_sequence << log2_page_size) - added,
                1 << log2_page_size
            )),
            2 => Error::argument(format_args!(
                "block_table[{sequence}][{entry}] = {value} is none of the cache's {count} pages"
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
