//! Scales of layers with multi-head latent attention, from weights in device memory (`docs/latent-attention.md`).
//!
//! Channel statistics come from the kernels of [`ScaleEngine`](super::ScaleEngine), which read the rows of a head wherever they
//! lie in a matrix: A, B, K and V of every head and the shared key's D are "heads" of so many channels over so many inputs, and
//! those of one size share a launch. K and V are read once more without the latent's gain, which rounding of a cache in E4M3 does
//! not meet. `scale_mla_descales` makes the bounds of [`MlaBounds::operands`](crate::bound::MlaBounds::operands) from them.
//!
//! Logits, and the absorbed query, are bounded on the CPU only.

use super::addresses::AddressWriter;
use super::norms::Form;
use super::shape::OTHER_SHAPE;
use super::storage::Storage;
use super::tables::{
    Addresses, ChannelStats, DeviceMatrix, Dtype, HeadPlace, NO_ROW, Projection, TensorMaps, stand_in,
};
use crate::bound::round_up;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream, sources};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, GainForm, LayerSpec, Layout, Mla, MlaRounding, RopeLayout};
use bytemuck::{Pod, Zeroable};

/// A tensor in device memory, as a framework holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// First value.
    pub ptr: DevicePtr,
    /// Type of the values.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// Values from an entry to the next, of each dimension.
    pub strides: Vec<i64>,
}

/// A vector in device memory and its type; NULL for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vector {
    ptr: DevicePtr,
    dtype: Dtype,
}

const NO_VECTOR: Vector = Vector { ptr: DevicePtr::NULL, dtype: Dtype::F32 };

/// One layer with latent attention in device memory: its projections, the gains that they read, and its sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaInput {
    mla: Mla,
    heads: usize,
    d_model: usize,
    /// `[A; B]` of each head.
    q: DeviceMatrix,
    /// `[K; V]` of each head.
    kv: DeviceMatrix,
    /// The rows of the latent, then D.
    kv_a: DeviceMatrix,
    /// Of `kv_a`'s rows.
    bias: Vector,
    /// Of what q reads.
    q_gain: Vector,
    q_gain_offset: f32,
    latent_gain: Vector,
    gain: Vector,
    gain_offset: f32,
    rotated: bool,
    interleaved: bool,
    rope_factor: f64,
    query_factor: f64,
    rounding: MlaRounding,
}

impl MlaInput {
    /// A layer of a model, whose tensors `find` gives by their names, without prefix and with `.weight` or `.bias`.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer; `is_mismatch` if a tensor is missing or its shape is not that of the config;
    /// `is_unsupported` if the layer has no latent attention, or for weights stored in FP8 and sizes that the kernels do not take:
    /// such layers are bounded on the CPU.
    pub fn new(layout: &Layout, layer: usize, find: impl Fn(&str) -> Option<DeviceTensor>) -> Result<Self> {
        let spec = layout.spec();
        Self::find(spec, spec.layer(layer)?, layout, layer, find).map_err(|error| error.within(spec.place(layer)))
    }

    fn find(
        spec: &AttentionSpec,
        own: &LayerSpec,
        layout: &Layout,
        layer: usize,
        find: impl Fn(&str) -> Option<DeviceTensor>,
    ) -> Result<Self> {
        let names = layout.layer(layer)?;
        let (Some(mla), Some(latents), Some(norm)) = (own.mla, &names.mla, &names.norm) else {
            return Err(Error::unsupported("the layer has no latent attention (MLA) after a norm"));
        };
        if spec.fp8_inputs {
            return Err(on_cpu("weights stored in FP8"));
        }
        let rope = own.rope.as_ref();
        if rope.is_some_and(|rope| rope.rotary_dim != mla.d_rope || !rope.other_dims.is_empty()) {
            return Err(on_cpu("a rotation of some of the rotated key's channels"));
        }
        if [mla.d_nope, mla.d_value].iter().any(|size| size % 2 != 0) {
            return Err(on_cpu("an odd number of channels"));
        }
        let (d, heads) = (spec.d_model, own.n_q_heads);
        let get = |name: String| find(&name).ok_or_else(|| Error::mismatch(format_args!("{name} is missing")));
        let matrix = |name: &str, rows: usize, columns: usize| -> Result<DeviceMatrix> {
            let name = format!("{name}.weight");
            let found = get(name.clone())?;
            match (&found.shape[..], &found.strides[..]) {
                (&[r, c], &[row_stride, col_stride]) if (r, c) == (rows, columns) => {
                    Ok(DeviceMatrix { ptr: found.ptr, dtype: found.dtype, row_stride, col_stride })
                }
                (shape, _) => Err(Error::mismatch(format_args!(
                    "{name} has shape {shape:?}, and the config needs [{rows}, {columns}]"
                ))),
            }
        };
        let vector = |name: String, len: usize| -> Result<Vector> {
            let found = get(name.clone())?;
            match (&found.shape[..], &found.strides[..]) {
                (&[n], &[1]) if n == len => Ok(Vector { ptr: found.ptr, dtype: found.dtype }),
                (shape, _) => {
                    Err(Error::mismatch(format_args!("{name} has shape {shape:?}, and the config needs [{len}]")))
                }
            }
        };
        let plain = |name: &str, len: usize| vector(format!("{name}.weight"), len);
        let gain = if spec.norm.gain == GainForm::Unit { NO_VECTOR } else { plain(norm, d)? };
        let offset = if spec.norm.gain == GainForm::OnePlus { 1.0 } else { 0.0 };
        let (q_gain, q_gain_offset) = match (&latents.q_norm, mla.q_rank) {
            (Some(name), Some(rank)) => (plain(name, rank)?, 0.0),
            _ => (gain, offset),
        };
        let kv_a = matrix(&latents.k_pe.name, latents.k_pe.channels, d)?;
        let bias = format!("{}.bias", latents.k_pe.name);
        let bias = if find(&bias).is_some() { vector(bias, latents.k_pe.channels)? } else { NO_VECTOR };
        if bias != NO_VECTOR && gain != NO_VECTOR && bias.dtype != gain.dtype {
            return Err(on_cpu("a bias of another type than the input norm's gain"));
        }
        let q = matrix(&names.q.name, names.q.channels, mla.q_inputs(d))?;
        let kv = matrix(&names.k.name, names.k.channels, mla.kv_rank)?;
        let stored = [q, kv, kv, kv_a].map(|matrix| matrix.dtype.into());
        Ok(Self {
            mla,
            heads,
            d_model: d,
            q,
            kv,
            kv_a,
            bias,
            q_gain,
            q_gain_offset,
            latent_gain: plain(&latents.kv_norm, mla.kv_rank)?,
            gain,
            gain_offset: offset,
            rotated: rope.is_some(),
            interleaved: rope.is_some_and(|rope| rope.layout == RopeLayout::Interleaved),
            rope_factor: rope.map_or(1.0, |rope| rope.attention_factor),
            query_factor: own.query_factor(),
            rounding: spec.mla_rounding(own, &mla, stored),
        })
    }

    /// The layer with stand-ins for its addresses, as [`LayerInput::without_places`](super::LayerInput::without_places).
    fn without_places(&self) -> Self {
        let matrix = |m: DeviceMatrix| DeviceMatrix { ptr: stand_in(m.ptr), ..m };
        let vector = |v: Vector| Vector { ptr: stand_in(v.ptr), ..v };
        Self {
            q: matrix(self.q),
            kv: matrix(self.kv),
            kv_a: matrix(self.kv_a),
            bias: vector(self.bias),
            q_gain: vector(self.q_gain),
            latent_gain: vector(self.latent_gain),
            gain: vector(self.gain),
            ..self.clone()
        }
    }

    /// Number of heads.
    pub fn heads(&self) -> usize {
        self.heads
    }
}

fn on_cpu(what: &str) -> Error {
    Error::unsupported(format_args!("latent attention with {what} is bounded on the CPU only"))
}

/// A layer, as `scale_mla_descales` reads it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct MlaLayer {
    latent_gain: u64,
    q_row: u32,
    kv_row: u32,
    raw_row: u32,
    k_pe_row: u32,
    heads: u32,
    d_nope: u32,
    d_rope: u32,
    d_value: u32,
    kv_rank: u32,
    rotary: u32,
    interleaved: u32,
    vector_dtype: u32,
    layer: u32,
    head: u32,
    radius_q: f32,
    radius_c: f32,
    radius: f32,
    rope_factor: f32,
    query_factor: f32,
    latent_share: f32,
    q_share: f32,
    k_share: f32,
    v_share: f32,
    k_pe_share: f32,
}
const _: () = assert!(size_of::<MlaLayer>() == 104);

/// What one launch of statistics takes once: channels of a head, inputs, storage, type of the gains, rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Size {
    d_head: usize,
    inputs: usize,
    storage: Storage,
    vectors: Dtype,
    /// Gains begin at multiples of 16 bytes, or there are none.
    aligned: bool,
    turns: bool,
}

/// The heads that one launch of statistics reads, and the projections that they are of.
#[derive(Debug)]
struct Heads {
    size: Size,
    projections: Vec<Projection>,
    places: Vec<HeadPlace>,
}

/// The tables of a model.
#[derive(Debug, Default)]
struct Tables {
    launches: Vec<Heads>,
    layers: Vec<MlaLayer>,
    /// Channels of all projections.
    rows: usize,
    /// Heads of all layers.
    heads: usize,
}

impl Tables {
    fn new(layers: &[MlaInput]) -> Self {
        let mut tables = Self::default();
        for (number, layer) in layers.iter().enumerate() {
            let Mla { d_nope: n, d_rope: p, d_value: w, kv_rank, .. } = layer.mla;
            let (d, heads, first) = (layer.d_model, layer.heads, tables.rows as u32);
            let (q_rows, kv_rows) = (heads * (n + p), heads * (n + w));
            let starts = |each: usize, at: usize| -> Vec<u32> { (0..heads).map(|h| (h * each + at) as u32).collect() };
            let q = (layer.q, layer.q_gain, layer.q_gain_offset, NO_VECTOR, q_rows, layer.mla.q_inputs(d));
            let kv = (layer.kv, layer.latent_gain, 0.0, NO_VECTOR, kv_rows, kv_rank);
            // As those with a gain, for one launch of both.
            let without = Vector { ptr: DevicePtr::NULL, ..layer.latent_gain };
            let raw = (layer.kv, without, 0.0, NO_VECTOR, kv_rows, kv_rank);
            let key = (layer.kv_a, layer.gain, layer.gain_offset, layer.bias, kv_rank + p, d);
            let [q_row, kv_row, raw_row, k_pe_row] =
                [0, q_rows, q_rows + kv_rows, q_rows + 2 * kv_rows].map(|at| first + at as u32);
            for (part, row, d_head, turns, starts) in [
                (q, q_row, n, false, starts(n + p, 0)),
                (q, q_row, p, layer.rotated, starts(n + p, n)),
                (kv, kv_row, n, false, starts(n + w, 0)),
                (kv, kv_row, w, false, starts(n + w, n)),
                (raw, raw_row, n, false, starts(n + w, 0)),
                (raw, raw_row, w, false, starts(n + w, n)),
                (key, k_pe_row, p, layer.rotated, vec![kv_rank as u32]),
            ] {
                let (matrix, gain, gain_offset, bias, rows, inputs) = part;
                let vector = if gain == NO_VECTOR && bias != NO_VECTOR { bias } else { gain };
                let projection = Projection {
                    at: Addresses { weight: matrix.ptr.0, gain: gain.ptr.0, shift: 0, bias: bias.ptr.0 },
                    row_stride: matrix.row_stride,
                    col_stride: matrix.col_stride,
                    rows: rows as u32,
                    d_model: inputs as u32,
                    d_head: d_head as u32,
                    dtype: matrix.dtype as u32,
                    vector_dtype: vector.dtype as u32,
                    gain_offset,
                    flags: 0,
                    rotary: if turns { d_head as u32 } else { 0 },
                    interleaved: (turns && layer.interleaved).into(),
                    stat_row: row,
                    first_head: NO_ROW,
                    pad: 0,
                };
                let storage = Storage::of(&[matrix]);
                let aligned = gain.ptr.0.is_multiple_of(16);
                tables.add(Size { d_head, inputs, storage, vectors: vector.dtype, aligned, turns }, projection, starts);
            }
            tables.rows += q_rows + 2 * kv_rows + kv_rank + p;
            tables.layers.push(MlaLayer {
                latent_gain: layer.latent_gain.ptr.0,
                q_row,
                kv_row,
                raw_row,
                k_pe_row: k_pe_row + kv_rank as u32,
                heads: heads as u32,
                d_nope: n as u32,
                d_rope: p as u32,
                d_value: w as u32,
                kv_rank: kv_rank as u32,
                rotary: if layer.rotated { p as u32 } else { 0 },
                interleaved: layer.interleaved.into(),
                vector_dtype: layer.latent_gain.dtype as u32,
                layer: number as u32,
                head: tables.heads as u32,
                radius_q: round_up((layer.mla.q_inputs(d) as f64).sqrt() * layer.mla.q_factor),
                radius_c: round_up((kv_rank as f64).sqrt() * layer.mla.kv_factor),
                radius: round_up((d as f64).sqrt()),
                rope_factor: round_up(layer.rope_factor),
                query_factor: round_up(layer.query_factor),
                latent_share: round_up(layer.rounding.latent),
                q_share: round_up(layer.rounding.q),
                k_share: round_up(layer.rounding.k),
                v_share: round_up(layer.rounding.v),
                k_pe_share: round_up(layer.rounding.k_pe),
            });
            tables.heads += heads;
        }
        tables
    }

    /// Adds heads of a projection to the launch of their size.
    fn add(&mut self, size: Size, projection: Projection, starts: Vec<u32>) {
        let at = self.launches.iter().position(|heads| heads.size == size).unwrap_or_else(|| {
            self.launches.push(Heads { size, projections: vec![], places: vec![] });
            self.launches.len() - 1
        });
        let heads = &mut self.launches[at];
        let projection_index = heads.projections.len() as u32;
        heads.projections.push(projection);
        heads.places.extend(starts.into_iter().map(|first_row| HeadPlace { projection: projection_index, first_row }));
    }
}

/// A launch of statistics, set up.
#[derive(Debug)]
struct Statistics {
    kernel: Kernel,
    launch: Launch,
    projections: Buffer<Projection>,
    places: Buffer<HeadPlace>,
    maps: Option<TensorMaps>,
    inputs: u32,
}

impl Statistics {
    fn new(device: &Device, heads: &Heads) -> Result<Self> {
        let Size { d_head, inputs, storage: Storage { dtype, columns, .. }, vectors, aligned, turns } = heads.size;
        let sized = (16..=256).contains(&d_head) && d_head.is_multiple_of(8) && inputs.is_multiple_of(8);
        let copied = device.arch().compute == 90 && aligned && sized && dtype != Dtype::F32;
        let count = heads.places.len();
        let (kernel, launch, maps) = if copied {
            let (d_head, f16) = (d_head as u32, dtype == Dtype::F16);
            let form = Form { d_head, columns, sums: false, turns, f16, vectors, beside: false };
            let (kernel, launch) = form.kernel(device, count)?;
            let boxes = vec![if columns { 64 } else { d_head }];
            (kernel, launch, Some(TensorMaps::new(device, &heads.projections, true, boxes, false)?))
        } else {
            let kernel = device.module(sources::NORMS_GENERIC, &[])?.kernel("scale_norms_generic")?;
            (kernel, Launch::linear(count, 256, 0), None)
        };
        Ok(Self {
            kernel,
            launch,
            projections: device.upload(&heads.projections)?,
            places: device.upload(&heads.places)?,
            maps,
            inputs: inputs as u32,
        })
    }

    fn run(&self, stream: &Stream, stats: DevicePtr) -> Result<()> {
        let [projections, places] = [self.projections.ptr(), self.places.ptr()].map(Arg::Ptr);
        let maps = Arg::Ptr(self.maps.as_ref().map_or(DevicePtr::NULL, TensorMaps::ptr));
        let mut args = vec![projections, places, maps, Arg::U32(self.inputs), Arg::Ptr(stats)];
        // The status is cleared with all launches.
        args.extend(self.maps.is_some().then_some(Arg::Ptr(DevicePtr::NULL)));
        // SAFETY: 1. the arguments are the kernels'; 2. the tables are the engine's and reach the weights and gains that its
        // maker's caller promised; 3. every head has its own rows.
        unsafe { self.kernel.launch(stream, self.launch, &args) }
    }
}

/// Descales of layers with latent attention, from their weights in device memory, which are read anew at each launch.
///
/// Results are those of [`MlaBounds::operands`](crate::bound::MlaBounds::operands) in f32, rounded up. They lie layer after layer.
/// An engine has one workspace: work of one engine on two streams has to be ordered by events.
#[derive(Debug)]
pub struct MlaEngine {
    statistics: Vec<Statistics>,
    finish: Kernel,
    layers: Buffer<MlaLayer>,
    most_heads: usize,
    stats: Buffer<ChannelStats>,
    descales: Buffer<f32>,
    operand_bounds: Buffer<f32>,
    cache: Buffer<f32>,
    status: Buffer<u32>,
    writer: AddressWriter,
    /// The layers with stand-ins for their addresses.
    shapes: Vec<MlaInput>,
}

impl MlaEngine {
    /// Compiles (or finds) the kernels, writes the tables, allocates the workspace.
    ///
    /// # Errors
    /// `is_argument` without layers; otherwise if a kernel does not compile or the memory is not there.
    ///
    /// # Safety
    /// As [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[MlaInput]) -> Result<Self> {
        let tables = Tables::new(layers);
        let Some(most_heads) = layers.iter().map(MlaInput::heads).max() else {
            return Err(Error::argument("a model needs at least one layer"));
        };
        let launches = tables.launches.iter();
        Ok(Self {
            statistics: launches.map(|heads| Statistics::new(device, heads)).collect::<Result<_>>()?,
            finish: device.module(sources::MLA_DESCALES, &[])?.kernel("scale_mla_descales")?,
            layers: device.upload(&tables.layers)?,
            most_heads,
            stats: device.zeros(tables.rows)?,
            descales: device.zeros(4 * tables.heads)?,
            operand_bounds: device.zeros(3 * tables.heads)?,
            cache: device.zeros(3 * layers.len())?,
            status: device.zeros(1)?,
            writer: AddressWriter::new(device)?,
            shapes: layers.iter().map(MlaInput::without_places).collect(),
        })
    }

    /// Whether the engine can take these layers in place of those that it was made with: all is equal, but for addresses, of
    /// which the same ones are NULL and the same ones are multiples of 16 bytes.
    pub fn fits(&self, layers: &[MlaInput]) -> bool {
        self.shapes.iter().cloned().eq(layers.iter().map(MlaInput::without_places))
    }

    /// Has later launches on `stream` read these layers, whose addresses go into the tables as
    /// [`ShapeEngine`](super::ShapeEngine)'s do: as parameters of launches, two per layer.
    ///
    /// # Errors
    /// `is_argument` if the engine does not fit the layers; otherwise if a launch is refused.
    ///
    /// # Safety
    /// As [`ScaleEngine::new`](super::ScaleEngine::new), of these layers, until all launches have run that come before the
    /// next layers, also at each replay of a graph that captured them.
    pub unsafe fn place(&self, stream: &Stream, layers: &[MlaInput]) -> Result<()> {
        if !self.fits(layers) {
            return Err(Error::argument(OTHER_SHAPE));
        }
        stream.bind()?;
        // SAFETY: 1. the places are rows of the engine's tables; 2. an engine's work is ordered, and its launches are plain ones.
        unsafe { self.writer.put(stream, self.places(layers)?) }
    }

    fn places(&self, layers: &[MlaInput]) -> Result<Vec<(DevicePtr, Vec<u64>)>> {
        let (tables, mut all) = (Tables::new(layers), vec![]);
        for (statistics, heads) in self.statistics.iter().zip(&tables.launches) {
            for (index, projection) in heads.projections.iter().enumerate() {
                let words: [u64; 4] = bytemuck::cast(projection.at);
                all.push((statistics.projections.at(index), words.to_vec()));
                if let Some(maps) = &statistics.maps {
                    all.extend(maps.of(index, projection)?);
                }
            }
        }
        // The gain is the first word of a row.
        all.extend(tables.layers.iter().enumerate().map(|(i, l)| (self.layers.at(i), vec![l.latent_gain])));
        Ok(all)
    }

    /// Puts the descales of every layer on `stream`.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn descales(&self, stream: &Stream) -> Result<()> {
        self.status.clear(stream)?;
        self.statistics.iter().try_for_each(|statistics| statistics.run(stream, self.stats.ptr()))?;
        let [layers, stats] = [self.layers.ptr(), self.stats.ptr()].map(Arg::Ptr);
        let results = [&self.descales, &self.operand_bounds, &self.cache].map(|results| Arg::Ptr(results.ptr()));
        let args = [&[layers, stats][..], &results, &[Arg::Ptr(self.status.ptr())]].concat();
        let launch = Launch { grid: (self.most_heads as u32, self.layers.len() as u32, 1), block: 128, shared: 0 };
        // SAFETY: 1. the arguments are the kernel's; 2. the tables are the engine's and reach the latents' gains that its maker's
        // caller promised; 3. every head has its own results, and the statistics are finished by the stream's order.
        unsafe { self.finish.launch(stream, launch, &args) }
    }

    /// Descales of the expanded form, `[layer][q, k, v, o][heads]`.
    pub fn head_descales(&self) -> &Buffer<f32> {
        &self.descales
    }

    /// Operand bounds with rounding, `[layer][q, k, v][heads]`, rounded up.
    pub fn operand_bounds(&self) -> &Buffer<f32> {
        &self.operand_bounds
    }

    /// Of the cached row: `[layer][bound of the latent, bound of the rotated key, descale of both]`.
    pub fn cache(&self) -> &Buffer<f32> {
        &self.cache
    }

    /// Status word of all layers, as [`ScaleEngine::status`](super::ScaleEngine::status).
    pub fn status(&self) -> &Buffer<u32> {
        &self.status
    }
}

#[cfg(test)]
mod tests;
