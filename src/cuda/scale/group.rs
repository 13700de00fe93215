//! The launches for layers that are alike in everything that a launch takes once ([`super::partition`]).

use super::super::sources;
use super::super::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use super::bounds::Bounds;
use super::frobenius::Frobenius;
use super::grams::{GramRoute, Grams, Layout};
use super::norms::HeadNorms;
use super::qk_norm::QkNorm;
use super::tables::{self, ChannelStats, HAS_MEAN, HeadBound, HeadFrobenius, LayerInput, NormBlock};
use super::values::Values;
use crate::error::{Error, Result};

pub(super) const NO_ROW: u32 = u32::MAX;

/// Everything that the scales of one group of layers need, set up.
#[derive(Debug)]
pub(super) struct Group {
    layers: Vec<LayerInput>,
    kernels: Kernels,
    projections: Buffer<tables::Projection>,
    row_blocks: (Buffer<NormBlock>, usize),
    column_blocks: (Buffer<NormBlock>, usize),
    stats: Buffer<ChannelStats>,
    layer_table: Buffer<tables::Layer>,
    /// Operand descales, `[layer][q, k, v, o][n_kv]`.
    pub heads: Buffer<f32>,
    /// The largest of each, `[layer][q, k, v, o]`.
    pub tensors: Buffer<f32>,
    /// `[layer][q, k, v][n_kv]`.
    pub operand_bounds: Buffer<f32>,
    grams: Option<Grams>,
    /// Norms alone, where the copy engine brings the weights.
    head_norms: Option<HeadNorms>,
    /// Norms of V channels, where the Grams leave them.
    values: Option<Values>,
    bounds: Option<Bounds>,
    frobenius: Option<Frobenius>,
    qk_norm: Option<QkNorm>,
    /// Kernels may start before the one in front has ended, and wait for it (Hopper and later).
    early: bool,
}

#[derive(Debug)]
struct Kernels {
    norms: Kernel,
    norms_columns: Kernel,
    descales: Kernel,
}

impl Group {
    /// # Safety
    /// As [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: Vec<LayerInput>, with_grams: bool) -> Result<Self> {
        let built = Tables::new(&layers);
        let kernel = |source, name| device.module(source, &[])?.kernel(name);
        let sums = layers.iter().any(|l| l.mean_removed || l.shift != DevicePtr::NULL);
        let kernels = Kernels {
            norms: kernel(sources::NORMS, if sums { "scale_norms_sums" } else { "scale_norms" })?,
            norms_columns: kernel(sources::NORMS, "scale_norms_columns")?,
            descales: device.module(sources::DESCALES, &[])?.overlapping_kernel("scale_descales")?,
        };
        let grams = layout(device, &layers, &built, with_grams)
            .map(|layout| Grams::new(device, &layers, &built, layout))
            .transpose()?;
        let values = match &grams {
            Some(grams) if grams.values_apart => Some(Values::new(device, &layers)?),
            _ => None,
        };
        let head_norms = HeadNorms::new(device, &layers, &built)?;
        let bounds = grams.as_ref().map(|g| Bounds::new(device, &layers, &built, g)).transpose()?;
        let frobenius = match (&grams, &bounds) {
            (Some(grams), Some(bounds)) => Some(Frobenius::new(device, &layers, grams, bounds)?),
            _ => None,
        };
        let qk_norm = match layers[0].qk_norm {
            Some(_) => Some(QkNorm::new(device, &layers, built.layers.iter().map(|l| l.out))?),
            None => None,
        };
        Ok(Self {
            kernels,
            row_blocks: (device.upload(&built.row_blocks)?, built.row_blocks.len()),
            column_blocks: (device.upload(&built.column_blocks)?, built.column_blocks.len()),
            stats: device.zeros(built.rows)?,
            layer_table: device.upload(&built.layers)?,
            heads: device.zeros(built.outputs)?,
            tensors: device.zeros(4 * layers.len())?,
            operand_bounds: device.zeros(3 * layers[0].n_kv * layers.len())?,
            projections: device.upload(&built.projections)?,
            grams,
            head_norms,
            values,
            bounds,
            frobenius,
            // Behind a fill there is no kernel to overlap with: where q and k are normalised and v has no bound.
            early: device.arch().compute >= 90 && qk_norm.is_none(),
            qk_norm,
            layers,
        })
    }

    /// q and k are normalised after the projection.
    pub fn normalised(&self) -> bool {
        self.qk_norm.is_some()
    }

    /// Operand descales; with normalised q and k the logit bounds too.
    /// `clear`: the status has to be cleared first.
    pub fn descales(&self, stream: &Stream, status: &Buffer<u32>, clear: bool) -> Result<()> {
        if clear {
            status.clear(stream)?;
        }
        self.channel_norms(stream)?;
        self.operand_descales(stream, status.ptr())
    }

    fn operand_descales(&self, stream: &Stream, status: DevicePtr) -> Result<()> {
        let args = [
            Arg::Ptr(self.layer_table.ptr()),
            Arg::Ptr(self.stats.ptr()),
            Arg::Ptr(self.heads.ptr()),
            Arg::Ptr(self.tensors.ptr()),
            Arg::Ptr(self.operand_bounds.ptr()),
            Arg::Ptr(status),
        ];
        let grid = (self.layers.len() as u32, 3, 1);
        let launch = Launch { grid, block: 1024, shared: 4 * self.layers[0].n_q as u32 };
        // SAFETY: 1. the arguments are the kernel's, in order; 2. and 3. all are the engine's buffers, written for these
        // layers, ordered by the stream.
        unsafe { self.kernels.descales.launch_early(stream, launch, &args, self.early)? };
        let results = [self.heads.ptr(), self.tensors.ptr(), self.operand_bounds.ptr(), status];
        self.qk_norm.as_ref().map_or(Ok(()), |norm| norm.run(stream, results))
    }

    /// Channel statistics of every projection.
    fn channel_norms(&self, stream: &Stream) -> Result<()> {
        match &self.head_norms {
            Some(norms) => norms.launch(stream, self.projections.ptr(), self.stats.ptr()),
            None => self.norms(stream, [&self.row_blocks, &self.column_blocks]),
        }
    }

    /// Channel statistics of the projections in the two tables.
    fn norms(&self, stream: &Stream, blocks: [&(Buffer<NormBlock>, usize); 2]) -> Result<()> {
        for (kernel, (table, blocks)) in [&self.kernels.norms, &self.kernels.norms_columns].into_iter().zip(blocks) {
            if *blocks > 0 {
                let args = [Arg::Ptr(self.projections.ptr()), Arg::Ptr(table.ptr()), Arg::Ptr(self.stats.ptr())];
                // SAFETY: 1. the arguments are the kernel's, in order; 2. the tables are this group's and reach the
                // weights that `new`'s caller promised; 3. the statistics are written by this launch alone.
                unsafe { kernel.launch(stream, Launch::linear(*blocks, 256, 0), &args)? };
            }
        }
        Ok(())
    }

    /// The Grams, if this group has them.
    pub fn grams(&self, stream: &Stream) -> Result<()> {
        let Some(grams) = &self.grams else { return Ok(()) };
        grams.launch(stream, self.projections.ptr(), self.stats.ptr(), DevicePtr::NULL)
    }

    /// Operand descales and logit bounds. `clear`: the status has to be cleared first.
    pub fn plan(&self, stream: &Stream, status: &Buffer<u32>, clear: bool) -> Result<()> {
        let (Some(grams), Some(b), Some(f)) = (&self.grams, &self.bounds, &self.frobenius) else {
            return self.descales(stream, status, clear);
        };
        let cleared = if clear { grams.clear(status, stream)? } else { DevicePtr::NULL };
        grams.launch(stream, self.projections.ptr(), self.stats.ptr(), cleared)?;
        let status = status.ptr();
        if b.from_grams {
            self.norms(stream, [&b.value_blocks[0], &b.value_blocks[1]])?;
            b.stats(stream, grams, self.stats.ptr())?;
        } else if !grams.has_norms {
            self.channel_norms(stream)?;
        }
        grams.part_stats(stream, self.projections.ptr(), self.stats.ptr())?;
        if let Some(values) = &self.values {
            values.run(stream, self.projections.ptr(), grams, self.stats.ptr())?;
        }
        self.operand_descales(stream, status)?;
        b.norms(stream, grams, self.stats.ptr(), status)?;
        f.bound(stream, grams, b, self.stats.ptr())?;
        b.finish(stream, grams, self.stats.ptr(), self.heads.ptr(), status)
    }

    /// `[layer][query head]`.
    pub fn head_bounds(&self) -> Option<&Buffer<HeadBound>> {
        let normalised = self.qk_norm.as_ref().map(|norm| &norm.heads);
        normalised.or_else(|| self.bounds.as_ref().map(|b| &b.heads))
    }

    /// Frobenius norms, behind a plan, if this group has Grams.
    pub fn frobenius(&self, stream: &Stream) -> Result<()> {
        let (Some(frobenius), Some(grams)) = (&self.frobenius, &self.grams) else { return Ok(()) };
        frobenius.every(stream, grams, self.stats.ptr())
    }

    /// `[layer][query head]`.
    pub fn head_frobenius(&self) -> Option<&Buffer<HeadFrobenius>> {
        self.frobenius.as_ref().map(|f| &f.norms)
    }

    /// Bytes of device memory that the group holds.
    pub fn bytes(&self) -> usize {
        let grams = self.grams.as_ref().map_or(0, Grams::bytes);
        let head_norms = self.head_norms.as_ref().map_or(0, HeadNorms::bytes);
        let bounds = self.bounds.as_ref().map_or(0, |b| b.bytes);
        let tables = 96 * self.projections.len()
            + 64 * self.layer_table.len()
            + 32 * self.stats.len()
            + 4 * (self.heads.len() + self.tensors.len() + self.operand_bounds.len())
            + 8 * (self.row_blocks.1 + self.column_blocks.1);
        let normalised = if self.qk_norm.is_some() { QkNorm::bytes_for(&self.layers) } else { 0 };
        let frobenius = if self.frobenius.is_some() { Frobenius::bytes_for(&self.layers) } else { 0 };
        grams + head_norms + bounds + frobenius + normalised + tables
    }

    /// The same before anything is compiled or allocated.
    pub fn bytes_for(device: &Device, layers: &[LayerInput], with_grams: bool) -> usize {
        let built = Tables::new(layers);
        let projections = built.projections.len();
        let mut bytes = 96 * projections
            + 64 * built.layers.len()
            + 32 * built.rows
            + 4 * (built.outputs + 4 * layers.len())
            + 12 * layers[0].n_kv * layers.len()
            + 8 * (built.row_blocks.len() + built.column_blocks.len());
        if let Some(layout) = layout(device, layers, &built, with_grams) {
            bytes += layout.bytes(projections, layers[0].d_model);
        }
        bytes += HeadNorms::bytes_for(device, layers, &built);
        if layers[0].qk_norm.is_some() {
            bytes += QkNorm::bytes_for(layers);
        } else if with_grams {
            bytes += Bounds::bytes_for(layers, &built) + Frobenius::bytes_for(layers);
        }
        bytes
    }

    /// What logit descales are made with.
    pub fn set_eta(&mut self, eta: f64) {
        if let Some(bounds) = &mut self.bounds {
            bounds.eta = eta;
        }
        if let Some(norm) = &mut self.qk_norm {
            norm.eta = eta;
        }
    }

    /// Whether a plan reads each weight once; `None` without Grams.
    pub fn one_pass(&self) -> Option<bool> {
        self.grams.as_ref().map(|g| g.has_norms)
    }

    /// The Grams leave the norms of V to a plan; `None` without Grams.
    pub fn values_apart(&self) -> Option<bool> {
        self.grams.as_ref().map(|g| g.values_apart)
    }

    /// Which kernel makes the Grams, if any.
    pub fn route(&self) -> Option<GramRoute> {
        self.grams.as_ref().map(|g| g.route)
    }

    /// As [`ScaleEngine::squared`](super::ScaleEngine::squared).
    pub fn squared(&self) -> Result<(usize, usize)> {
        self.bounds.as_ref().map_or(Ok((0, 0)), Bounds::squared)
    }

    /// Statistics of every channel of the layer in this place: q, k, then v, those that are read.
    pub fn read_stats(&self, place: usize) -> Result<Vec<ChannelStats>> {
        let rows = self.stats.len() / self.layers.len();
        Ok(self.stats.read()?[place * rows..][..rows].to_vec())
    }

    /// The Gram of one head of the layer in this place, row-major.
    pub fn read_gram(&self, place: usize, head: usize) -> Result<Vec<f64>> {
        let grams = self.grams.as_ref().ok_or_else(|| Error::cuda("the layer has no Grams"))?;
        let first = &self.layers[0];
        let heads = first.n_q + first.n_kv;
        if head >= heads {
            return Err(Error::argument(format_args!("there is no head {head}, the layer has {heads} of q and k")));
        }
        grams.read(place * heads + head, first.d_head)
    }
}

/// The pass that makes the Grams, if they are wanted and there are any.
fn layout(device: &Device, layers: &[LayerInput], built: &Tables, with_grams: bool) -> Option<Layout> {
    (with_grams && layers[0].qk_norm.is_none()).then(|| Layout::new(device, layers, built))
}

pub(super) struct Tables {
    pub(super) projections: Vec<tables::Projection>,
    pub(super) row_blocks: Vec<NormBlock>,
    pub(super) column_blocks: Vec<NormBlock>,
    pub(super) layers: Vec<tables::Layer>,
    rows: usize,
    outputs: usize,
}

impl Tables {
    pub(super) fn new(layers: &[LayerInput]) -> Self {
        let mut t = Self {
            projections: vec![],
            row_blocks: vec![],
            column_blocks: vec![],
            layers: vec![],
            rows: 0,
            outputs: 0,
        };
        let mut head = 0;
        for l in layers {
            let mut starts = [NO_ROW; 3];
            let mut raw_pairs = 0;
            let projected = l.qk_norm.is_none();
            let inputs = [
                projected.then_some((&l.q, l.n_q)),
                projected.then_some((&l.k, l.n_kv)),
                l.v.as_ref().map(|v| (v, l.n_kv)),
            ];
            for (which, input) in inputs.into_iter().enumerate() {
                let Some((p, heads)) = input else { continue };
                let rotary = if which == 2 { 0 } else { l.rotary };
                let rows = (heads * l.d_head) as u32;
                starts[which] = t.rows as u32;
                let projection = t.projections.len() as u32;
                let m = p.weight;
                let columns = m.row_stride == 1
                    && m.col_stride % 8 == 0
                    && m.ptr.0 % 16 == 0
                    && (rotary == 0 || l.interleaved || rotary % 16 == 0);
                if columns {
                    raw_pairs |= 1 << which;
                    t.column_blocks.extend((0..rows).step_by(64).map(|first| NormBlock { projection, first }));
                } else {
                    t.row_blocks.extend((0..rows / 2).step_by(16).map(|first| NormBlock { projection, first }));
                }
                t.projections.push(tables::Projection {
                    weight: m.ptr.0,
                    gain: l.gain.0,
                    shift: l.shift.0,
                    bias: p.bias.0,
                    row_stride: m.row_stride,
                    col_stride: m.col_stride,
                    rows,
                    d_model: l.d_model as u32,
                    d_head: l.d_head as u32,
                    dtype: m.dtype as u32,
                    vector_dtype: l.vector_dtype as u32,
                    gain_offset: l.gain_offset,
                    flags: if l.mean_removed { HAS_MEAN } else { 0 },
                    rotary: rotary as u32,
                    interleaved: l.interleaved.into(),
                    stat_row: t.rows as u32,
                    raw_pairs: columns.into(),
                    first_head: if which == 2 { NO_ROW } else { head },
                });
                if which < 2 {
                    head += heads as u32;
                }
                t.rows += rows as usize;
            }
            t.layers.push(tables::Layer {
                q_row: starts[0],
                k_row: starts[1],
                v_row: starts[2],
                n_q: l.n_q as u32,
                n_kv: l.n_kv as u32,
                d_head: l.d_head as u32,
                d_model: l.d_model as u32,
                rotary: l.rotary as u32,
                interleaved: l.interleaved.into(),
                flags: if l.mean_removed { HAS_MEAN } else { 0 },
                raw_pairs,
                out: t.outputs as u32,
                rope_factor: l.rope_factor,
                normalised: l.qk_norm.is_some().into(),
                query_factor: l.growth().query,
                rounding_share: l.growth().rounding_share,
            });
            t.outputs += 4 * l.n_kv;
        }
        t
    }
}
