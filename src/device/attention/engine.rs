//! Launches of a forward call: the cast or V's reordering, attention, and the join of split keys. Which kernels these are:
//! [`super::variant`].

use super::call::{Descales, Tensors, Workspace};
use super::kernels::{Kernels, Loaded, operand_map};
use super::params::{self, outer_strides};
use super::tile::{ROWS, Schedule, Split, Tile};
use super::variant::Variant;
use crate::attention::{AttentionShape, PvAccumulator};
use crate::cuda::tensor_map::{Boxes, MapType, Swizzle, TensorMap, tensor_map};
use crate::cuda::{Device, DevicePtr, Element, Launch, Stream, View};
use crate::error::{Error, Result};
use bytemuck::Zeroable;

/// Heads that one block of the cast takes.
const CAST_HEADS: usize = 4;
/// Positions that one block of the cast takes.
const CAST_ROWS: usize = 16;

/// A call that keeps every rule, and where its memory lies.
struct Call<'a> {
    tensors: &'a Tensors,
    sizes: AttentionShape,
    /// The tile counter.
    header: DevicePtr,
    /// q, k and v as the workspace holds them, or the caller where they are saved; v in the layout of the attention.
    operands: [DevicePtr; 3],
    /// How the call is split, and where its partial results lie.
    split: Option<(Split, DevicePtr)>,
}

impl<'a> Call<'a> {
    fn new(engine: &AttentionEngine, tensors: &'a Tensors, workspace: &View<1>) -> Result<Self> {
        let sizes = tensors.check()?;
        let place = Workspace::of(&sizes, tensors.q.element(), tensors.accumulator, tensors.saved.is_some());
        place.check(workspace)?;
        let mut operands = [place.q, place.k, place.v].map(|offset| workspace.ptr().offset(offset as u64));
        if let Some(saved) = &tensors.saved {
            (operands[0], operands[1]) = (saved.q.ptr(), saved.k.ptr());
        }
        let partial = workspace.ptr().offset(place.partial as u64);
        let split = engine.split_of(tensors, &sizes).map(|split| (split, partial));
        Ok(Self { tensors, sizes, header: workspace.ptr(), operands, split })
    }
}

fn check_scale(softmax_scale: f32) -> Result<()> {
    if softmax_scale.is_finite() && softmax_scale > 0.0 {
        return Ok(());
    }
    Err(Error::argument(format_args!("softmax scale {softmax_scale} must be finite and greater than zero")))
}

/// The attention kernels of one device, loaded as calls need them.
#[derive(Debug)]
pub struct AttentionEngine {
    kernels: Kernels<Variant>,
    overlap: bool,
    split: bool,
    processors: usize,
}

impl AttentionEngine {
    /// An engine for a device; nothing is compiled yet.
    ///
    /// # Errors
    /// If the device is not of compute capability 9.0 (`is_unsupported`), or the driver fails.
    pub fn new(device: &Device) -> Result<Self> {
        let kernels = Kernels::new(device, "the attention kernel")?;
        Ok(Self { kernels, overlap: true, split: true, processors: device.processors() })
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

    /// How many multiprocessors the attention kernel takes, at most all and at least one. All by default; fewer leave room
    /// for other work on the device, such as a collective. The cast is not bound by it.
    pub fn with_processors(mut self, processors: usize) -> Self {
        self.processors = processors.clamp(1, self.kernels.device.processors());
        self
    }

    /// The engine's device.
    pub fn device(&self) -> &Device {
        &self.kernels.device
    }

    /// Compiles and loads what [`AttentionEngine::forward`] would for this call, which otherwise its first call does. A
    /// capture needs this before it.
    ///
    /// # Errors
    /// If the call breaks a rule, or a kernel does not compile or load.
    pub fn prepare(&self, tensors: &Tensors, causal: bool) -> Result<()> {
        let sizes = tensors.check()?;
        self.kernels.load(Variant::first(tensors, &sizes))?;
        let split = self.split_of(tensors, &sizes);
        if split.is_some_and(|split| split.parts > 1) {
            self.kernels.load(Variant::Combine { d_head: sizes.d_head })?;
        }
        self.kernels.load(Variant::second(tensors, &sizes, causal, split)).map(drop)
    }

    fn split_of(&self, tensors: &Tensors, sizes: &AttentionShape) -> Option<Split> {
        if self.split { Split::of(sizes, tensors.descales.logit.is_some()) } else { None }
    }

    /// Puts one call on `stream`: `out = softmax(softmax_scale q k^T) v`, with `causal` over the keys at or before the
    /// query's position (the last query stands at the last key).
    ///
    /// The workspace has [`Workspace::of`] bytes, 256-byte aligned, of any content. Calls that can run at the same time need
    /// one each.
    ///
    /// # Errors
    /// If a rule of [`Tensors`] is broken, a kernel does not compile or load, or the driver refuses a launch.
    pub fn forward(
        &self,
        stream: &Stream,
        tensors: &Tensors,
        causal: bool,
        softmax_scale: f32,
        workspace: &View<1>,
    ) -> Result<()> {
        let call = Call::new(self, tensors, workspace)?;
        check_scale(softmax_scale)?;
        self.launch_cast(stream, &call)?;
        self.launch_attention(stream, &call, causal, softmax_scale, self.overlap)
    }

    /// The first half of [`AttentionEngine::forward`]: q, k and v to E4M3 in the workspace. Of operands that are E4M3
    /// already, v is reordered.
    ///
    /// # Errors
    /// As [`AttentionEngine::forward`].
    pub fn cast(&self, stream: &Stream, tensors: &Tensors, workspace: &View<1>) -> Result<()> {
        self.launch_cast(stream, &Call::new(self, tensors, workspace)?)
    }

    /// The second half of [`AttentionEngine::forward`], on what [`AttentionEngine::cast`] left in the workspace.
    ///
    /// # Errors
    /// As [`AttentionEngine::forward`].
    pub fn attend(
        &self,
        stream: &Stream,
        tensors: &Tensors,
        causal: bool,
        softmax_scale: f32,
        workspace: &View<1>,
    ) -> Result<()> {
        check_scale(softmax_scale)?;
        self.launch_attention(stream, &Call::new(self, tensors, workspace)?, causal, softmax_scale, false)
    }

    fn launch_cast(&self, stream: &Stream, call: &Call) -> Result<()> {
        let variant = Variant::first(call.tensors, &call.sizes);
        let kernel = self.kernels.load(variant)?;
        let [q, k, v] = call.operands;
        match variant {
            Variant::Repack { .. } => self.repack_values(stream, &kernel, call, v),
            _ => self.cast_operands(stream, &kernel, call, [q, k, v]),
        }
    }

    /// `overlap`: the kernel in front on the stream is the cast of this call.
    fn launch_attention(
        &self,
        stream: &Stream,
        call: &Call,
        causal: bool,
        softmax_scale: f32,
        overlap: bool,
    ) -> Result<()> {
        let Call { tensors, sizes, header, operands: [at_q, at_k, at_v], split } = *call;
        let forward = self.kernels.load(Variant::second(tensors, &sizes, causal, split.map(|(split, _)| split)))?;
        let (tile, schedule) = match split {
            Some((split, _)) => (Split::TILE, Schedule::split(&sizes, split, self.processors)),
            None => {
                let tile = Tile::of(&sizes, tensors.descales.logit.is_some());
                (tile, Schedule::whole(&sizes, tile, self.processors))
            }
        };
        // SAFETY: both lie in the workspace, whose size was checked and which is the caller's promise, or are saved views.
        let cast = unsafe {
            (View::dense(at_q, Element::E4m3, sizes.q_shape()), View::dense(at_k, Element::E4m3, sizes.kv_shape()))
        };
        let (q, k) = if tensors.q.element() == Element::E4m3 { (tensors.q, tensors.k) } else { cast };
        let mut params = self.forward_params(tensors, &sizes, &schedule, softmax_scale);
        params.counter = header.0;
        let (mut heads, mut positions) = (1, ROWS);
        if let Some((split, at)) = split {
            (heads, positions) = (split.heads, split.positions);
            let partial = split.partial(&sizes);
            [params.o_partial, params.lse_partial, params.extremes_partial] =
                [partial.o, partial.lse, partial.extremes].map(|offset| at.offset(offset as u64).0);
            params.causal_offset = if causal { sizes.len_k as i32 - sizes.len_q as i32 } else { sizes.len_k as i32 };
            params.splits = split.parts as i32;
            params.active_consumers = split.consumers as i32;
            params.tile_heads = heads as i32;
            params.positions = positions as i32;
            params.tile_heads_reciprocal = (1usize << 16).div_ceil(heads) as i32;
            params.units_per_batch = (sizes.n_q_heads / heads) as i32;
            params.out_e4m3 = (tensors.out.element() == Element::E4m3).into();
        }
        let launch = Launch::linear(schedule.grid, 128 * (tile.consumers as u32 + 1), forward.shared);
        let (mut q, mut k) = (operand_map(&q, heads, positions)?, operand_map(&k, 1, tile.keys)?);
        let mut v = match tensors.accumulator {
            // SAFETY: as above.
            PvAccumulator::F16 => {
                operand_map(&unsafe { View::dense(at_v, Element::F16, sizes.kv_shape()) }, 1, tile.keys)?
            }
            _ => values_map(at_v, &sizes, tile.keys)?,
        };
        let parameters = &mut [(&raw mut q).cast(), (&raw mut k).cast(), (&raw mut v).cast(), (&raw mut params).cast()];
        // SAFETY: 1. three maps and the struct are the kernel's parameters; 2. and 3. every address comes from a view whose
        // shape was checked, or lies in the workspace; the kernel waits for the one in front of it before it reads.
        unsafe { forward.kernel.launch_parameters(stream, launch, parameters, overlap) }?;
        match split {
            Some((split, _)) if split.parts > 1 => self.launch_combine(stream, &sizes, split, &params),
            _ => Ok(()),
        }
    }

    fn launch_combine(
        &self,
        stream: &Stream,
        sizes: &AttentionShape,
        split: Split,
        forward: &params::Forward,
    ) -> Result<()> {
        let combine = self.kernels.load(Variant::Combine { d_head: sizes.d_head })?;
        let mut params = params::Combine {
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
            splits: split.parts as i32,
            out_e4m3: forward.out_e4m3,
            log2_row_warps: split.share() as i32,
            unused: 0,
        };
        let [x, y, z] = split.joining_grid(sizes).map(|blocks| blocks as u32);
        let launch = Launch { grid: (x, y, z), block: 32 * Split::JOINING_WARPS as u32, shared: combine.shared };
        // SAFETY: as for the attention, which it waits for.
        unsafe { combine.kernel.launch_parameters(stream, launch, &mut [(&raw mut params).cast()], true) }
    }

    fn forward_params(
        &self,
        t: &Tensors,
        sizes: &AttentionShape,
        schedule: &Schedule,
        softmax_scale: f32,
    ) -> params::Forward {
        let Descales { q, k, v, o, logit } = &t.descales;
        let [q, k, v, o] = [q, k, v, o].map(|d| self.kernels.descale(d.as_ref()));
        params::Forward {
            o: t.out.ptr().0,
            lse: t.lse.map_or(0, |x| x.ptr().0),
            q_descale: q.0,
            k_descale: k.0,
            v_descale: v.0,
            o_descale: o.0,
            logit_descale: logit.map_or(0, |x| x.ptr().0),
            telemetry: t.stats.map_or(0, |x| x.ptr().0),
            counter: 0,
            o_strides: outer_strides(&t.out),
            q_descale_strides: q.1,
            k_descale_strides: k.1,
            v_descale_strides: v.1,
            o_descale_strides: o.1,
            softmax_scale,
            batch: sizes.batch as i32,
            heads_q: sizes.n_q_heads as i32,
            heads_kv: sizes.n_kv_heads as i32,
            len_q: sizes.len_q as i32,
            len_k: sizes.len_k as i32,
            packed: schedule.packed.into(),
            row_blocks: schedule.row_blocks as i32,
            units: schedule.units as i32,
            section: schedule.section as i32,
            ..Zeroable::zeroed()
        }
    }

    fn cast_operands(&self, stream: &Stream, cast: &Loaded, call: &Call, to: [DevicePtr; 3]) -> Result<()> {
        let Call { tensors: t, sizes, header, .. } = call;
        let (heads_q, heads_kv) = (sizes.n_q_heads, sizes.n_kv_heads);
        // Rows of the statistics: logits, q, k, v.
        let rows = [heads_q, 2 * heads_q, 2 * heads_q + heads_kv];
        let tensor = |i: usize, x: &View<4>, descale: Option<&View<2>>| {
            let stats = t.stats.map_or(0, |s| s.ptr().offset(16 * rows[i] as u64).0);
            params::CastTensor { to: to[i].0, stats, ..self.cast_tensor(x, descale) }
        };
        let mut params = params::Cast {
            q: tensor(0, &t.q, t.descales.q.as_ref()),
            k: tensor(1, &t.k, t.descales.k.as_ref()),
            v: tensor(2, &t.v, t.descales.v.as_ref()),
            cosine: t.rope.map_or(0, |r| r.cosine.ptr().0),
            sine: t.rope.map_or(0, |r| r.sine.ptr().0),
            positions: t.rope.and_then(|r| r.positions).map_or(0, |p| p.ptr().0),
            counter: header.0,
            v_rows: t.saved.map_or(0, |saved| saved.v.ptr().0),
            rotary: t.rope.map_or(0, |r| r.rotary() as i32),
            q_start: sizes.len_k as i32 - sizes.len_q as i32,
            v_f16: (t.accumulator == PvAccumulator::F16).into(),
            unused: 0,
        };
        let blocks = heads_q.div_ceil(CAST_HEADS) + 2 * heads_kv.div_ceil(CAST_HEADS);
        let groups = sizes.len_q.max(sizes.len_k).div_ceil(CAST_ROWS);
        let grid = ((blocks * groups) as u32, sizes.batch as u32, 1);
        let launch = Launch { grid, block: 2 * sizes.d_head as u32, shared: cast.shared };
        // SAFETY: 1. the struct is the kernel's parameter; 2. and 3. every address comes from a view whose shape was checked,
        // or is a region of the workspace of the size that the shape asks for.
        unsafe { cast.kernel.launch_parameters(stream, launch, &mut [(&raw mut params).cast()], false) }
    }

    fn repack_values(&self, stream: &Stream, repack: &Loaded, call: &Call, to: DevicePtr) -> Result<()> {
        let Call { tensors: t, sizes, header, .. } = call;
        let mut params = params::CastTensor { to: to.0, ..self.cast_tensor(&t.v, None) };
        let mut counter = header.0;
        let mut v_f16 = i32::from(t.accumulator == PvAccumulator::F16);
        let grid = (sizes.key_groups() as u32, sizes.n_kv_heads as u32, sizes.batch as u32);
        let launch = Launch { grid, block: 2 * sizes.d_head as u32, shared: repack.shared };
        let parameters = &mut [(&raw mut params).cast(), (&raw mut counter).cast(), (&raw mut v_f16).cast()];
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

/// Map of the reordered values, in boxes of `keys` keys of one head.
fn values_map(address: DevicePtr, sizes: &AttentionShape, keys: usize) -> Result<TensorMap> {
    let (words, groups) = (2 * sizes.d_head as u64, sizes.key_groups() as u64);
    tensor_map(&Boxes {
        address: address.0,
        element: MapType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        extents: &[words, groups, (sizes.batch * sizes.n_kv_heads) as u64],
        strides: &[8 * words, 8 * words * groups],
        tile: &[words as u32, keys as u32 / 16, 1],
        swizzle: Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    })
}
