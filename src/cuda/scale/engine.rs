//! The launches.

use super::super::device::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use super::super::sources;
use super::bounds::Bounds;
use super::frobenius::Frobenius;
use super::grams::{GramRoute, Grams, Layout};
use super::host::DeviceWeights;
use super::qk_norm::{self, QkNorm};
use super::tables::{self, ChannelStats, HAS_MEAN, HeadBound, HeadFrobenius, LayerInput, NormBlock};
use crate::error::{Error, Result};
use std::sync::Arc;

pub(super) const NO_ROW: u32 = u32::MAX;

/// A model's weights in device memory, with everything that scales need set up.
#[derive(Debug)]
pub struct ScaleEngine {
    layers: Vec<LayerInput>,
    kernels: Kernels,
    projections: Buffer<tables::Projection>,
    row_blocks: (Buffer<NormBlock>, usize),
    column_blocks: (Buffer<NormBlock>, usize),
    stats: Buffer<ChannelStats>,
    layer_table: Buffer<tables::Layer>,
    heads: Buffer<f32>,
    tensors: Buffer<f32>,
    operand_bounds: Buffer<f32>,
    status: Buffer<u32>,
    grams: Option<Grams>,
    /// The same pass for norms alone, where it is the faster way to them and there are no Grams.
    norms_pass: Option<Grams>,
    bounds: Option<Bounds>,
    frobenius: Option<Frobenius>,
    qk_norm: Option<QkNorm>,
    /// Kernels may start before the one in front has ended, and wait for it (Hopper and later).
    early: bool,
    /// Weights that the engine keeps alive; `None` where its maker promised to.
    weights: Option<Arc<DeviceWeights>>,
}

#[derive(Debug)]
struct Kernels {
    norms: Kernel,
    norms_columns: Kernel,
    descales: Kernel,
}

impl ScaleEngine {
    /// Sets everything up: compiles (or finds) the kernels, writes the tables, allocates the workspace.
    ///
    /// # Errors
    /// If a shape breaks a rule (d_head a multiple of 8 from 16 to 256, n_kv divides n_q, the same shape in every
    /// layer), a kernel does not compile, or the memory is not there.
    ///
    /// # Safety
    /// 1. Every address in `layers` reaches the matrix or vector that its shape describes, in memory of `device`.
    /// 2. It stays valid, and is not written while a launch of this engine (or a graph of one) runs.
    pub unsafe fn new(device: &Device, layers: &[LayerInput], with_grams: bool) -> Result<Self> {
        check(layers)?;
        let built = Tables::new(layers);
        let kernel = |source, name| device.module(source, &[])?.kernel(name);
        let sums = layers.iter().any(|l| l.mean_removed || l.shift != DevicePtr::NULL);
        let kernels = Kernels {
            norms: kernel(sources::NORMS, if sums { "scale_norms_sums" } else { "scale_norms" })?,
            norms_columns: kernel(sources::NORMS, "scale_norms_columns")?,
            descales: kernel(sources::DESCALES, "scale_descales")?,
        };
        let normalised = layers[0].qk_norm.is_some();
        let pass = |wanted| -> Result<_> {
            let layout = pass(device, layers, &built, wanted);
            layout.map(|layout| Grams::new(device, layers, &built, layout)).transpose()
        };
        let grams = if with_grams { pass(true)? } else { None };
        let norms_pass = if with_grams { None } else { pass(false)? };
        let bounds = grams.as_ref().map(|g| Bounds::new(device, layers, &built, g)).transpose()?;
        let frobenius = bounds.as_ref().map(|_| Frobenius::new(device, layers)).transpose()?;
        let qk_norm = match normalised {
            true => Some(QkNorm::new(device, layers, built.layers.iter().map(|l| l.out))?),
            false => None,
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
            status: device.zeros(1)?,
            projections: device.upload(&built.projections)?,
            grams,
            norms_pass,
            bounds,
            frobenius,
            qk_norm,
            layers: layers.to_vec(),
            // Behind a fill there is no kernel to overlap with: where q and k are normalised and v has no bound.
            early: device.arch().compute >= 90 && !normalised,
            weights: None,
        })
    }

    /// The same over weights that are kept alive with the engine.
    ///
    /// # Errors
    /// As [`ScaleEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, with_grams: bool) -> Result<Self> {
        // SAFETY: 1. every range was checked against the memory that `weights` owns; 2. the engine holds it, and nothing
        // here writes it.
        let mut engine = unsafe { Self::new(device, weights.layers(), with_grams)? };
        engine.weights = Some(weights.clone());
        Ok(engine)
    }

    /// The weights that the engine keeps alive.
    pub fn weights(&self) -> Option<&Arc<DeviceWeights>> {
        self.weights.as_ref()
    }

    /// Puts the operand descales of every layer on `stream`: one read of W_Q, W_K and W_V.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn descales(&self, stream: &Stream) -> Result<()> {
        self.status.clear(stream)?;
        match self.grams.as_ref().filter(|grams| grams.fast_norms).or(self.norms_pass.as_ref()) {
            Some(pass) => {
                pass.launch(stream, self.projections.ptr())?;
                pass.part_stats(stream, self.projections.ptr(), self.stats.ptr())?;
            }
            None => self.norms(stream, [&self.row_blocks, &self.column_blocks])?,
        }
        self.operand_descales(stream, false)
    }

    /// `behind`: the launch in front does not change the statistics, and waited for the one that made them.
    fn operand_descales(&self, stream: &Stream, behind: bool) -> Result<()> {
        let args = [
            Arg::Ptr(self.layer_table.ptr()),
            Arg::Ptr(self.stats.ptr()),
            Arg::Ptr(self.heads.ptr()),
            Arg::Ptr(self.tensors.ptr()),
            Arg::Ptr(self.operand_bounds.ptr()),
            Arg::Ptr(self.status.ptr()),
            Arg::U32(behind.into()),
        ];
        let grid = (self.layers.len() as u32, 3, 1);
        // Small enough for the room that the launch in front leaves.
        let launch = Launch { grid, block: if behind { 256 } else { 1024 }, shared: 4 * self.layers[0].n_q as u32 };
        // SAFETY: 1. the arguments are the kernel's, in order; 2. and 3. all are this engine's buffers, written for these
        // layers, ordered by the stream.
        unsafe { self.kernels.descales.launch_early(stream, launch, &args, self.early)? };
        let results = [self.heads.ptr(), self.tensors.ptr(), self.operand_bounds.ptr(), self.status.ptr()];
        self.qk_norm.as_ref().map_or(Ok(()), |norm| norm.run(stream, results))
    }

    /// Channel statistics of the projections in the two tables.
    fn norms(&self, stream: &Stream, blocks: [&(Buffer<NormBlock>, usize); 2]) -> Result<()> {
        for (kernel, (table, blocks)) in [&self.kernels.norms, &self.kernels.norms_columns].into_iter().zip(blocks) {
            if *blocks > 0 {
                let args = [Arg::Ptr(self.projections.ptr()), Arg::Ptr(table.ptr()), Arg::Ptr(self.stats.ptr())];
                // SAFETY: 1. the arguments are the kernel's, in order; 2. the tables are this engine's and reach the
                // weights that `new`'s caller promised; 3. the statistics are written by this launch alone.
                unsafe { kernel.launch(stream, Launch::linear(*blocks, 256, 0), &args)? };
            }
        }
        Ok(())
    }

    /// Puts the Grams of every Q and K head on `stream`: one read of W_Q and W_K, and of W_V where
    /// [`ScaleEngine::one_pass`] says so.
    ///
    /// # Errors
    /// If the engine was made without Grams, or a launch is refused.
    pub fn grams(&self, stream: &Stream) -> Result<()> {
        let grams = self.grams.as_ref().ok_or_else(|| Error::cuda("the engine was made without Grams"))?;
        grams.launch(stream, self.projections.ptr())
    }

    /// Puts the whole plan on `stream`: operand descales, and for every query head a certified logit bound and its
    /// descale. One read of the weights where [`ScaleEngine::one_pass`] says so; W_Q and W_K are read twice elsewhere, and
    /// not at all where q and k are normalised after the projection.
    ///
    /// # Errors
    /// If the engine was made without Grams, or a launch is refused.
    pub fn plan(&self, stream: &Stream) -> Result<()> {
        if self.qk_norm.is_some() {
            return self.descales(stream);
        }
        let (Some(grams), Some(b)) = (&self.grams, &self.bounds) else {
            return Err(Error::cuda("the engine was made without logit bounds"));
        };
        self.status.clear(stream)?;
        self.grams(stream)?;
        if b.from_grams {
            self.norms(stream, [&b.value_blocks[0], &b.value_blocks[1]])?;
            b.stats(stream, grams, self.stats.ptr())?;
        } else if !grams.has_norms {
            self.norms(stream, [&self.row_blocks, &self.column_blocks])?;
        }
        grams.part_stats(stream, self.projections.ptr(), self.stats.ptr())?;
        b.norms(stream, grams, self.stats.ptr(), self.status.ptr())?;
        self.operand_descales(stream, self.early && b.early())?;
        b.finish(stream, grams, self.stats.ptr(), self.heads.ptr(), self.status.ptr())
    }

    /// Logit bounds of [`ScaleEngine::plan`], `[layer][query head]`.
    pub fn head_bounds(&self) -> Option<&Buffer<HeadBound>> {
        let normalised = self.qk_norm.as_ref().map(|norm| &norm.heads);
        normalised.or_else(|| self.bounds.as_ref().map(|b| &b.heads))
    }

    /// Puts the Frobenius norms `||W_Q W_K^T||_F` of every query head on `stream`, behind [`ScaleEngine::plan`], whose Grams
    /// it reads: no weight is read again. Where the Frobenius norm over every relative position is the sharper bound of sigma
    /// (few directions carry the head), sigma, the bounds and the logit descale of that head fall with it.
    ///
    /// # Errors
    /// If the engine has no Grams (it was made without, or q and k are normalised), or the launch is refused.
    pub fn frobenius(&self, stream: &Stream) -> Result<()> {
        let (Some(frobenius), Some(grams), Some(bounds)) = (&self.frobenius, &self.grams, &self.bounds) else {
            return Err(Error::cuda("the engine was made without Grams"));
        };
        frobenius.run(stream, &self.layers[0], grams, bounds, self.stats.ptr())
    }

    /// What [`ScaleEngine::frobenius`] leaves, `[layer][query head]`.
    pub fn head_frobenius(&self) -> Option<&Buffer<HeadFrobenius>> {
        self.frobenius.as_ref().map(|f| &f.norms)
    }

    /// Bytes of device memory that the engine holds.
    pub fn workspace_bytes(&self) -> usize {
        let grams: usize = self.grams.iter().chain(&self.norms_pass).map(Grams::bytes).sum();
        let bounds = self.bounds.as_ref().map_or(0, Bounds::bytes);
        let tables = 96 * self.projections.len()
            + 64 * self.layer_table.len()
            + 32 * self.stats.len()
            + 4 * (self.heads.len() + self.tensors.len())
            + 4 * (self.operand_bounds.len() + self.status.len())
            + 8 * (self.row_blocks.1 + self.column_blocks.1);
        let normalised = if self.qk_norm.is_some() { QkNorm::bytes_for(&self.layers) } else { 0 };
        let frobenius = if self.frobenius.is_some() { Frobenius::bytes_for(&self.layers) } else { 0 };
        grams + bounds + frobenius + normalised + tables
    }

    /// What [`ScaleEngine::workspace_bytes`] of an engine for these layers will be, without compiling or allocating.
    ///
    /// # Errors
    /// As [`ScaleEngine::new`], for shapes.
    pub fn workspace_bytes_for(device: &Device, layers: &[LayerInput], with_grams: bool) -> Result<usize> {
        check(layers)?;
        let built = Tables::new(layers);
        let projections = built.projections.len();
        let mut bytes = 96 * projections
            + 64 * built.layers.len()
            + 32 * built.rows
            + 4 * (built.outputs + 4 * layers.len() + 1)
            + 12 * layers[0].n_kv * layers.len()
            + 8 * (built.row_blocks.len() + built.column_blocks.len());
        if let Some(layout) = pass(device, layers, &built, with_grams) {
            bytes += layout.bytes(projections, layers[0].d_model);
        }
        if layers[0].qk_norm.is_some() {
            bytes += QkNorm::bytes_for(layers);
        } else if with_grams {
            bytes += Bounds::bytes_for(device, layers, &built) + Frobenius::bytes_for(layers);
        }
        Ok(bytes)
    }

    /// The same engine with logit descales bound / (eta 448); 0.8 unless this is called.
    ///
    /// # Errors
    /// If `eta` is not above 0 and at most 1.
    pub fn with_eta(mut self, eta: f64) -> Result<Self> {
        if !(eta > 0.0 && eta <= 1.0) {
            return Err(Error::argument(format_args!("eta must be above 0 and at most 1, not {eta}")));
        }
        if let Some(bounds) = &mut self.bounds {
            bounds.eta = eta;
        }
        if let Some(norm) = &mut self.qk_norm {
            norm.eta = eta;
        }
        Ok(self)
    }

    /// True if [`ScaleEngine::grams`] passes over W_V too and brings every channel's norm, so that
    /// [`ScaleEngine::plan`] reads each weight once.
    pub fn one_pass(&self) -> bool {
        self.grams.as_ref().is_some_and(|g| g.has_norms)
    }

    /// Which kernel makes the Grams, if any.
    pub fn route(&self) -> Option<GramRoute> {
        self.grams.as_ref().map(|g| g.route)
    }

    /// Operand descales, `[layer][q, k, v, o][n_kv]` f32.
    pub fn head_descales(&self) -> &Buffer<f32> {
        &self.heads
    }

    /// The largest of each layer's heads, `[layer][q, k, v, o]` f32.
    pub fn tensor_descales(&self) -> &Buffer<f32> {
        &self.tensors
    }

    /// Operand bounds with rounding, `B + A/32`, `[layer][q, k, v][n_kv]` f32, rounded up; 0 for a head of zeros.
    pub fn operand_bounds(&self) -> &Buffer<f32> {
        &self.operand_bounds
    }

    /// Status word: 0, or bits for weights that are not finite (1), bounds that are not finite (2), bounds that fell back
    /// to a coarser certificate (4).
    pub fn status(&self) -> &Buffer<u32> {
        &self.status
    }

    /// Statistics of every channel: layer after layer, q, k, then v.
    pub fn stats(&self) -> &Buffer<ChannelStats> {
        &self.stats
    }

    /// The Gram of one head, assembled on the host (row-major, d_head x d_head), for tests. `head` counts the query heads
    /// of a layer, then its key heads; layers follow one another.
    ///
    /// # Errors
    /// If there are no Grams or the device fails.
    pub fn read_gram(&self, head: usize) -> Result<Vec<f64>> {
        let grams = self.grams.as_ref().ok_or_else(|| Error::cuda("the engine was made without Grams"))?;
        grams.read(head, self.layers[0].d_head)
    }
}

/// The pass that makes the Grams, or norms alone where it is the faster way to them.
fn pass(device: &Device, layers: &[LayerInput], built: &Tables, with_grams: bool) -> Option<Layout> {
    if layers[0].qk_norm.is_some() {
        return None;
    }
    let layout = Layout::new(device, layers, built, with_grams);
    (with_grams || layout.fast_norms()).then_some(layout)
}

pub(super) fn check(layers: &[LayerInput]) -> Result<()> {
    let first = layers.first().ok_or_else(|| Error::argument("a model needs at least one layer"))?;
    for (i, l) in layers.iter().enumerate() {
        let rule = if !(16..=256).contains(&l.d_head) || l.d_head % 8 != 0 {
            "d_head must be a multiple of 8 from 16 to 256"
        } else if l.n_kv == 0 || l.n_q % l.n_kv != 0 || l.n_q == 0 {
            "the number of KV heads must divide that of query heads"
        } else if l.rotary % 2 != 0 || l.rotary > l.d_head {
            "the rotated channels must be even in number and at most d_head"
        } else if (l.d_model, l.n_q, l.n_kv, l.d_head) != (first.d_model, first.n_q, first.n_kv, first.d_head) {
            "every layer must have the shape of the first"
        } else if (l.mean_removed, l.vector_dtype) != (first.mean_removed, first.vector_dtype)
            // Bounds of normalised q and k take each layer's own rotation.
            || (l.qk_norm.is_none()
                && (l.rotary, l.interleaved, l.rope_factor) != (first.rotary, first.interleaved, first.rope_factor))
        {
            "every layer must have the norm, the rotation and the vector type of the first"
        } else if l.qk_norm.is_some() != first.qk_norm.is_some() {
            "either every layer normalises q and k after the projection, or none"
        } else if l.d_model == 0 || l.d_model > 1 << 20 || l.n_q > 1 << 12 {
            "d_model must be from 1 to 2^20 and there may be at most 4096 heads"
        } else {
            qk_norm::check(l).map_err(|error| error.within(format_args!("layer {i}")))?;
            continue;
        };
        return Err(Error::argument(format_args!("layer {i}: {rule}")));
    }
    Ok(())
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
                pad: [0; 2],
            });
            t.outputs += 4 * l.n_kv;
        }
        t
    }
}
