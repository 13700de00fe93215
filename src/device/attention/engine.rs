//! The forward's engine and its launches: the cast or V's reordering, attention, and the join of split keys. Which kernels these
//! are: [`super::variant`]; over pages: [`super::paged`]; the entry for both: [`super::launch`].

use super::call::{Keys, Tensors, Workspace};
use super::cut::{self, Cut};
use super::kernels::{Kernels, Loaded, run_map};
use super::params;
use super::sizes::{outer_strides, row_strides};
use super::terms::DeviceCall;
use super::tile::{ROWS, Split};
use super::variant::Variant;
use crate::attention::{AttentionShape, Keeps, PvAccumulator};
use crate::cuda::tensor_map::{Boxes, MapType, Swizzle, TensorMap, tensor_map};
use crate::cuda::{Device, DevicePtr, Element, Launch, Stream, View};
use crate::error::{Error, Result};
use bytemuck::Zeroable;

/// Heads that one block of the cast takes.
pub(super) const CAST_HEADS: usize = 4;
/// Positions that one block of the cast takes.
pub(super) const CAST_ROWS: usize = 16;

/// A call on rows that keeps every rule, and where its memory lies.
pub(super) struct RowsCall<'a> {
    call: &'a DeviceCall,
    tensors: &'a Tensors,
    k: View<4>,
    v: View<4>,
    /// The tile counter.
    header: DevicePtr,
    /// q, k and v as the workspace holds them, or the caller where they are saved; v in the layout of the attention.
    operands: [DevicePtr; 3],
    cut: Cut,
    /// Partial results of a split call.
    partial: DevicePtr,
    /// The list of tiles, and the parts of each sequence, where these have unequal lengths.
    schedule: DevicePtr,
    sequence_splits: DevicePtr,
}

/// Attention on one device; kernels are loaded as calls need them.
#[derive(Debug)]
pub struct Cuda {
    pub(super) kernels: Kernels<Variant>,
    pub(super) overlap: bool,
    split: bool,
    pub(super) table_checks: bool,
    pub(super) processors: usize,
}

impl Cuda {
    /// The backend on a device. Kernels are compiled when a call first needs them, or taken from the cache.
    ///
    /// # Errors
    /// If the device is not of compute capability 9.0 (`is_unsupported`), or the driver fails.
    pub fn new(device: &Device) -> Result<Self> {
        let kernels = Kernels::new(device, "the attention kernel")?;
        Ok(Self { kernels, overlap: true, split: true, table_checks: false, processors: device.processors() })
    }

    /// Whether the attention kernel may start while the cast drains (programmatic dependent launch); on by default.
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Whether calls with few query rows are split ([`Split::of`]); on by default. The workspace has room for it either way.
    pub fn with_split(mut self, split: bool) -> Self {
        self.split = split;
        self
    }

    /// Whether each call over pages first checks lengths and block table on the device and waits for the result; off by default.
    /// Such calls cannot be captured.
    pub fn with_table_checks(mut self, checks: bool) -> Self {
        self.table_checks = checks;
        self
    }

    /// How many multiprocessors the attention kernel takes, at most all and at least one. All by default; fewer leave room
    /// for other work on the device, such as a collective. Results do not depend on it, and the cast is not bound by it.
    pub fn with_processors(mut self, processors: usize) -> Self {
        self.processors = processors.clamp(1, self.kernels.device.processors());
        self
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.kernels.device
    }

    pub(super) fn cut(&self, call: &DeviceCall, tensors: &Tensors) -> Cut {
        let split = self.split && tensors.keeps().of_kernel() == Keeps::Nothing;
        Cut::of(call, tensors.accumulator, tensors.descales.logit.is_some(), split, self.processors)
    }

    /// The first half of [`Cuda::launch`] on rows: q, k and v to E4M3 in the workspace. Of operands that are E4M3
    /// already, v is reordered.
    ///
    /// # Errors
    /// As [`Cuda::launch`]; `is_unsupported` over pages.
    pub fn cast(&self, stream: &Stream, call: &DeviceCall, tensors: &Tensors, workspace: &View<1>) -> Result<()> {
        self.launch_cast(stream, &self.on_rows(call, tensors, workspace)?)
    }

    /// The second half of [`Cuda::launch`] on rows, on what [`Cuda::cast`] left in the workspace.
    ///
    /// # Errors
    /// As [`Cuda::cast`].
    pub fn attend(&self, stream: &Stream, call: &DeviceCall, tensors: &Tensors, workspace: &View<1>) -> Result<()> {
        self.launch_attention(stream, &self.on_rows(call, tensors, workspace)?, false)
    }

    pub(super) fn on_rows<'a>(
        &self,
        call: &'a DeviceCall,
        tensors: &'a Tensors,
        workspace: &View<1>,
    ) -> Result<RowsCall<'a>> {
        tensors.check(call)?;
        let Keys::Rows { k, v } = tensors.keys else {
            return Err(Error::unsupported("halves of a call over pages are not launched alone"));
        };
        let place = Workspace::of(call, tensors.q.element(), tensors.accumulator, tensors.saved.is_some());
        place.check(workspace)?;
        let at = |offset: usize| workspace.ptr().offset(offset as u64);
        let mut operands = [place.q, place.k, place.v].map(at);
        if let Some(saved) = &tensors.saved {
            (operands[0], operands[1]) = (saved.q.ptr(), saved.k.ptr());
        }
        Ok(RowsCall {
            call,
            tensors,
            k,
            v,
            header: workspace.ptr(),
            operands,
            cut: self.cut(call, tensors),
            partial: at(place.partial),
            schedule: at(place.schedule),
            sequence_splits: at(place.sequence_splits),
        })
    }

    pub(super) fn launch_cast(&self, stream: &Stream, call: &RowsCall) -> Result<()> {
        let variant = Variant::cast(call.call, call.tensors);
        let kernel = self.kernels.load(variant)?;
        let [q, k, v] = call.operands;
        match variant {
            Variant::Repack { .. } => self.repack_values(stream, &kernel, call, v),
            _ => self.cast_operands(stream, &kernel, call, [q, k, v]),
        }
    }

    /// `overlap`: the kernel in front on the stream is the cast of this call.
    pub(super) fn launch_attention(&self, stream: &Stream, call: &RowsCall, overlap: bool) -> Result<()> {
        let RowsCall { call: terms, tensors, header, operands: [at_q, at_k, at_v], cut, .. } = *call;
        let (forward, sizes) = (self.kernels.load(Variant::attention(terms, tensors, &cut))?, terms.shape);
        let tile = cut.tile;
        // SAFETY: both lie in the workspace, whose size was checked and which is the caller's promise, or are saved views.
        let rows = |at, shape| unsafe { View::new(at, Element::E4m3, shape, row_strides(shape)) };
        let (q, k) = match tensors.q.element() {
            Element::E4m3 => (tensors.q, call.k),
            _ => (rows(at_q, sizes.q_shape()), rows(at_k, sizes.k_shape())),
        };
        let schedule = cut.schedule;
        let mut params = params::Forward {
            pack_gqa: schedule.pack_gqa.into(),
            row_blocks: schedule.row_blocks as i32,
            units: schedule.units as i32,
            section: schedule.section as i32,
            schedule: call.schedule.0,
            ..params::Forward::of(terms, tensors, header, &self.kernels)
        };
        let (mut heads, mut positions) = (1, ROWS);
        if let Some(split) = cut.split {
            (heads, positions) = (split.heads, split.positions);
            let partial = split.partial(&sizes);
            params.split_by(
                &split,
                &sizes,
                [partial.o, partial.lse, partial.extremes].map(|at| call.partial.offset(at as u64)),
            );
            // As the kernel is compiled: a window of 0 to the right is causal, too.
            let (causal, _) = terms.features();
            params.causal_offset = if causal { sizes.len_k as i32 - sizes.len_q as i32 } else { sizes.len_k as i32 };
            params.splits = split.parts as i32;
            params.out_e4m3 = (tensors.out.element() == Element::E4m3).into();
        }
        let launch = Launch::linear(cut.schedule.grid, 128 * (tile.consumers as u32 + 1), forward.shared);
        let run = forward.run;
        let (mut q, mut k) = (run_map(&q, run, heads, positions)?, run_map(&k, run, 1, tile.keys)?);
        let values = cut::values(terms);
        let mut v = match tensors.accumulator {
            // SAFETY: as above.
            PvAccumulator::F16 => {
                // Rows in F16 come 64 columns at a time.
                run_map(&unsafe { View::dense(at_v, Element::F16, values.v_shape()) }, 64, 1, tile.keys)?
            }
            _ => values_map(at_v, &values, tile.keys, forward.value_matrices)?,
        };
        let kept = tensors.saved.map_or(0, |saved| saved.rows.address());
        // Kernels that keep neither have no place for it: theirs are the bytes in front.
        let mut given = params::ForwardKeeping { forward: params, kept };
        let parameters = &mut [(&raw mut q).cast(), (&raw mut k).cast(), (&raw mut v).cast(), (&raw mut given).cast()];
        // SAFETY: 1. three maps and the struct are the kernel's parameters; 2. and 3. every address comes from a view whose
        // shape was checked, or lies in the workspace; the kernel waits for the one in front of it before it reads.
        unsafe { forward.kernel.launch_parameters(stream, launch, parameters, overlap) }?;
        match cut.split {
            Some(split) if split.parts > 1 => self.join_parts(stream, call, split, &params),
            _ => Ok(()),
        }
    }

    fn join_parts(&self, stream: &Stream, call: &RowsCall, split: Split, forward: &params::Forward) -> Result<()> {
        let params = params::Combine {
            splits: split.parts as i32,
            log2_row_warps: split.share() as i32,
            sinks: forward.sinks,
            sequences: params::Sequences::of(call.call),
            sequence_splits: call.sequence_splits.0,
            ..params::Combine::of(forward)
        };
        // With sequences of unequal length a block takes a query of one of them.
        let grid = split.joining_grid(&call.call.longest());
        self.launch_combine(stream, Variant::combine(call.call, call.tensors), params, grid)
    }

    pub(super) fn launch_combine(
        &self,
        stream: &Stream,
        variant: Variant,
        mut params: params::Combine,
        grid: [usize; 3],
    ) -> Result<()> {
        let combine = self.kernels.load(variant)?;
        let [x, y, z] = grid.map(|blocks| blocks as u32);
        let launch = Launch { grid: (x, y, z), block: 32 * Split::JOINING_WARPS as u32, shared: combine.shared };
        // SAFETY: as for the attention, which it waits for.
        unsafe { combine.kernel.launch_parameters(stream, launch, &mut [(&raw mut params).cast()], true) }
    }

    fn cast_operands(&self, stream: &Stream, cast: &Loaded, call: &RowsCall, to: [DevicePtr; 3]) -> Result<()> {
        let RowsCall { call: terms, tensors: t, header, .. } = *call;
        let sizes = &terms.shape;
        let (heads_q, heads_kv) = (sizes.n_q_heads, sizes.n_kv_heads);
        // Rows of the statistics: logits, q, k, v.
        let rows = [heads_q, 2 * heads_q, 2 * heads_q + heads_kv];
        let centers = [None, terms.key_center(), terms.value_center()];
        let tensor = |i: usize, x: &View<4>, descale: Option<&View<2>>| {
            let stats = t.stats.map_or(0, |s| s.ptr().offset(16 * rows[i] as u64).0);
            let center = centers[i].map_or(0, |x| x.ptr().0);
            params::CastTensor { to: to[i].0, stats, center, ..self.cast_tensor(x, descale) }
        };
        let mut params = params::Cast {
            q: tensor(0, &t.q, t.descales.q.as_ref()),
            k: tensor(1, &call.k, t.descales.k.as_ref()),
            v: tensor(2, &call.v, t.descales.v.as_ref()),
            cosine: t.rope.map_or(0, |r| r.cosine.ptr().0),
            sine: t.rope.map_or(0, |r| r.sine.ptr().0),
            positions: t.rope.and_then(|r| r.positions).map_or(0, |p| p.ptr().0),
            counter: header.0,
            v_rows: t.saved.map_or(0, |saved| saved.v.ptr().0),
            rotary: t.rope.map_or(0, |r| r.rotary() as i32),
            q_start: sizes.len_k as i32 - sizes.len_q as i32,
            v_f16: (t.accumulator == PvAccumulator::F16).into(),
            table_rows: t.rope.map_or(0, |r| r.cosine.extents()[0] as i32),
        };
        let blocks = heads_q.div_ceil(CAST_HEADS) + 2 * heads_kv.div_ceil(CAST_HEADS);
        let mut groups = sizes.len_q.max(sizes.len_k).div_ceil(CAST_ROWS);
        let mut grid = ((blocks * groups) as u32, sizes.batch as u32, 1);
        if terms.sequences.is_some() {
            // All rows are one axis, and a block makes the list of tiles.
            groups = (sizes.batch * sizes.len_q).div_ceil(CAST_ROWS).max(cut::values(terms).key_groups());
            grid = ((1 + blocks * groups) as u32, 1, 1);
        }
        let mut rows = self.cast_rows(call);
        let launch = Launch { grid, block: cast_threads(sizes.d_head.max(sizes.d_v)), shared: cast.shared };
        // SAFETY: 1. the struct is the kernel's parameter; 2. and 3. every address comes from a view whose shape was checked,
        // or is a region of the workspace of the size that the shape asks for.
        let parameters = &mut [(&raw mut params).cast(), (&raw mut rows).cast()];
        unsafe { cast.kernel.launch_parameters(stream, launch, parameters, false) }
    }

    /// What the cast needs of windows and sequences.
    fn cast_rows(&self, call: &RowsCall) -> params::CastRows {
        let RowsCall { call: terms, tensors: t, cut, .. } = call;
        let sizes = &terms.shape;
        let [item_time, key_tile_time, combine_time] = cut.times(sizes).map(|time| time as i32);
        let schedule = params::Schedule {
            schedule: call.schedule.0,
            sequence_splits: call.sequence_splits.0,
            sequences: params::Sequences::of(terms),
            rows: [sizes.batch * sizes.len_q, sizes.batch * sizes.len_k].map(|rows| rows as i32),
            lengths: [sizes.len_q as i32, sizes.len_k as i32],
            window: terms.window(),
            tile_rows: cut.tile_rows() as i32,
            tile_keys: cut.tile.keys as i32,
            units: cut.schedule.units as i32,
            capacity: cut.capacity as i32,
            most_splits: cut.split.map_or(1, |split| split.parts as i32),
            item_time,
            key_tile_time,
            combine_time,
        };
        params::CastRows {
            schedule,
            o: t.out.ptr().0,
            lse: t.lse.map_or(0, |x| x.ptr().0),
            o_strides: outer_strides(&t.out),
            o_size: t.out.element().size() as i32,
            heads_q: sizes.n_q_heads as i32,
            value_groups: cut::values(terms).key_groups() as i32,
            first_key: terms.first_key() as i32,
        }
    }

    fn repack_values(&self, stream: &Stream, repack: &Loaded, call: &RowsCall, to: DevicePtr) -> Result<()> {
        let RowsCall { call: terms, tensors: t, header, .. } = *call;
        let sizes = &terms.shape;
        let mut params = params::CastTensor { to: to.0, ..self.cast_tensor(&call.v, None) };
        let mut counter = header.0;
        let mut v_f16 = i32::from(t.accumulator == PvAccumulator::F16);
        let mut grid = (sizes.key_groups() as u32, sizes.n_kv_heads as u32, sizes.batch as u32);
        if terms.sequences.is_some() {
            // The list of tiles, V, and rows of the output.
            let groups = cut::values(terms).key_groups() + (sizes.batch * sizes.len_q).div_ceil(CAST_ROWS);
            grid = (1 + groups as u32, sizes.n_kv_heads as u32, 1);
        }
        let mut rows = self.cast_rows(call);
        let launch = Launch { grid, block: cast_threads(sizes.d_v), shared: repack.shared };
        let parameters =
            &mut [(&raw mut params).cast(), (&raw mut counter).cast(), (&raw mut v_f16).cast(), (&raw mut rows).cast()];
        // SAFETY: as for the cast.
        unsafe { repack.kernel.launch_parameters(stream, launch, parameters, false) }
    }

    fn cast_tensor(&self, x: &View<4>, descale: Option<&View<2>>) -> params::CastTensor {
        let [_, length, heads, _] = x.extents();
        let (descale, descale_strides) = self.kernels.descale(descale);
        params::CastTensor {
            from: x.ptr().0,
            descale,
            descale_strides,
            strides: outer_strides(x),
            length: length as i32,
            heads: heads as i32,
            ..Zeroable::zeroed()
        }
    }
}

/// Threads of a block of the cast: one for each 8 dimensions of a row, in whole warps.
fn cast_threads(d: usize) -> u32 {
    (CAST_ROWS * d / 8).next_multiple_of(32) as u32
}

/// Map of the reordered values, in boxes of `keys` keys of one head. Where the kernel is wider than the head, the box goes by core
/// matrices (`by_matrices`), and those past the head read as zeros.
fn values_map(address: DevicePtr, sizes: &AttentionShape, keys: usize, by_matrices: bool) -> Result<TensorMap> {
    let (words, groups) = (2 * sizes.d_v as u64, sizes.key_groups() as u64);
    let (heads, group) = ((sizes.batch * sizes.n_kv_heads) as u64, keys as u32 / 16);
    let dims = sizes.head_dims();
    let (extents, strides, tile) = if by_matrices {
        (
            vec![16, words / 16, groups, heads],
            vec![128, 8 * words, 8 * words * groups],
            vec![16, dims.v as u32 / 8, group, 1],
        )
    } else {
        (vec![words, groups, heads], vec![8 * words, 8 * words * groups], vec![words as u32, group, 1])
    };
    tensor_map(&Boxes {
        address: address.0,
        element: MapType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        extents: &extents,
        strides: &strides,
        tile: &tile,
        swizzle: Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        far: false,
    })
}
