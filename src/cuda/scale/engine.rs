//! The launches.

use super::super::device::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use super::super::{driver, sources};
use super::host::DeviceWeights;
use super::tables::{self, *};
use crate::error::{Error, Result};
use std::sync::Arc;

pub(super) const NO_ROW: u32 = u32::MAX;

/// Which kernel makes the Grams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GramRoute {
    /// Tensor cores of Hopper: BF16, d_head 64 or 128, 16-byte rows.
    Wgmma,
    /// f32 without tensor cores: everything else.
    Plain,
}

/// A model's weights in device memory, with everything that scales need set up.
#[derive(Debug)]
pub struct ScaleEngine {
    layers: Vec<LayerInput>,
    kernels: Kernels,
    projections: Buffer<tables::Projection>,
    gain_rows: Buffer<GainRow>,
    squares: Buffer<f32>,
    padded: u32,
    row_blocks: (Buffer<NormBlock>, usize),
    column_blocks: (Buffer<NormBlock>, usize),
    stats: Buffer<ChannelStats>,
    layer_table: Buffer<tables::Layer>,
    heads: Buffer<f32>,
    tensors: Buffer<f32>,
    operand_bounds: Buffer<f32>,
    status: Buffer<u32>,
    grams: Option<Grams>,
    bounds: Option<Bounds>,
    /// Weights that the engine keeps alive; `None` where its maker promised to.
    weights: Option<Arc<DeviceWeights>>,
}

/// What the logit bounds need beside the Grams.
#[derive(Debug)]
struct Bounds {
    eigen: Kernel,
    products: Kernel,
    plan: Kernel,
    gram_stats: Kernel,
    jobs: Buffer<Job>,
    shared: u32,
    product_jobs: Buffer<Job>,
    product_shared: u32,
    vectors: Buffer<f32>,
    workspace: Buffer<f64>,
    lambdas: Buffer<f64>,
    aux: Buffer<f64>,
    softmax_scales: Buffer<f32>,
    biases: Buffer<u64>,
    value_blocks: [(Buffer<NormBlock>, usize); 2],
    heads: Buffer<HeadBound>,
    /// Q and K statistics come from the Grams: no mean, no shift.
    from_grams: bool,
    eta: f64,
    rounding: f32,
}

/// Power steps from a warm vector.
const WARM_STEPS: u32 = 8;

#[derive(Debug)]
struct Kernels {
    gains: Kernel,
    norms: Kernel,
    norms_columns: Kernel,
    descales: Kernel,
}

#[derive(Debug)]
struct Grams {
    route: GramRoute,
    kernel: Kernel,
    launch: Launch,
    segments: Buffer<Segment>,
    shares: Buffer<u32>,
    maps: Buffer<u64>,
    partials: Buffer<f32>,
    heads: Buffer<HeadGram>,
    host_heads: Vec<HeadGram>,
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
        let kernels = Kernels {
            gains: kernel(sources::GAINS, "scale_gains")?,
            norms: kernel(sources::NORMS, "scale_norms")?,
            norms_columns: kernel(sources::NORMS, "scale_norms_columns")?,
            descales: kernel(sources::DESCALES, "scale_descales")?,
        };
        let padded = layers[0].d_model.next_multiple_of(64);
        let grams = if with_grams { Some(Grams::new(device, layers, &built)?) } else { None };
        let bounds = match &grams {
            Some(g) if layers.iter().all(|l| l.fixed_bounds.is_none()) => Some(Bounds::new(device, layers, &built, g)?),
            _ => None,
        };
        Ok(Self {
            kernels,
            gain_rows: device.upload(&built.gain_rows)?,
            squares: device.zeros(padded * layers.len())?,
            padded: padded as u32,
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
            bounds,
            layers: layers.to_vec(),
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
        self.norms(stream, [&self.row_blocks, &self.column_blocks])?;
        self.operand_descales(stream)
    }

    fn operand_descales(&self, stream: &Stream) -> Result<()> {
        let args = [
            Arg::Ptr(self.layer_table.ptr()),
            Arg::Ptr(self.stats.ptr()),
            Arg::Ptr(self.heads.ptr()),
            Arg::Ptr(self.tensors.ptr()),
            Arg::Ptr(self.operand_bounds.ptr()),
            Arg::Ptr(self.status.ptr()),
        ];
        let grid = (self.layers.len() as u32, 3, 1);
        let launch = Launch { grid, block: 1024, shared: 4 * self.layers[0].n_q as u32 };
        // SAFETY: 1. the arguments are the kernel's, in order; 2. and 3. all are this engine's buffers, written for these
        // layers, ordered by the stream.
        unsafe { self.kernels.descales.launch(stream, launch, &args) }
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

    /// Puts the Grams of every Q and K head on `stream`: one read of W_Q and W_K.
    ///
    /// # Errors
    /// If the engine was made without Grams, or a launch is refused.
    pub fn grams(&self, stream: &Stream) -> Result<()> {
        let grams = self.grams.as_ref().ok_or_else(|| Error::cuda("the engine was made without Grams"))?;
        let blocks = self.padded.div_ceil(512);
        let launch = Launch { grid: (blocks, self.layers.len() as u32, 1), block: 256, shared: 0 };
        let args = [Arg::Ptr(self.gain_rows.ptr()), Arg::Ptr(self.squares.ptr()), Arg::U32(self.padded)];
        // SAFETY: 1. the arguments are the kernel's; 2. the gains are the ones `new`'s caller promised; 3. one writer.
        unsafe { self.kernels.gains.launch(stream, launch, &args)? };
        let (segments, projections) = (Arg::Ptr(grams.segments.ptr()), Arg::Ptr(self.projections.ptr()));
        let partials = Arg::Ptr(grams.partials.ptr());
        let args = match grams.route {
            GramRoute::Wgmma => vec![
                segments,
                Arg::Ptr(grams.shares.ptr()),
                projections,
                Arg::Ptr(grams.maps.ptr()),
                Arg::Ptr(self.squares.ptr()),
                Arg::U32(self.padded),
                partials,
            ],
            GramRoute::Plain => vec![segments, projections, partials],
        };
        // SAFETY: 1. the arguments are the kernel's of this route; 2. the tables are this engine's and reach the promised
        // weights; 3. every segment writes its own slot.
        unsafe { grams.kernel.launch(stream, grams.launch, &args) }
    }

    /// Puts the whole plan on `stream`: operand descales, and for every query head a certified logit bound and its
    /// descale. One read of the weights where the norm has neither mean nor shift; W_Q and W_K are read twice where it
    /// has.
    ///
    /// # Errors
    /// If the engine was made without Grams, a QK-norm bounds the logits already, or a launch is refused.
    pub fn plan(&self, stream: &Stream) -> Result<()> {
        let (Some(grams), Some(b)) = (&self.grams, &self.bounds) else {
            return Err(Error::cuda("the engine was made without logit bounds"));
        };
        let first = &self.layers[0];
        let (layers, n_q, n_kv, r) = (self.layers.len(), first.n_q, first.n_kv, first.d_head);
        self.status.clear(stream)?;
        self.grams(stream)?;
        let shape = Arg::Words([
            n_q as u32,
            n_kv as u32,
            r as u32,
            first.rotary as u32,
            first.interleaved.into(),
            first.d_model as u32,
            layers as u32,
            u32::from(!b.product_jobs.is_empty()),
            first.rope_factor.to_bits(),
            0,
            b.eta.to_bits() as u32,
            (b.eta.to_bits() >> 32) as u32,
        ]);
        let (heads, partials) = (Arg::Ptr(grams.heads.ptr()), Arg::Ptr(grams.partials.ptr()));
        let (stats, status) = (Arg::Ptr(self.stats.ptr()), Arg::Ptr(self.status.ptr()));
        if b.from_grams {
            self.norms(stream, [&b.value_blocks[0], &b.value_blocks[1]])?;
            let args = [shape, heads, partials, Arg::Ptr(b.biases.ptr()), Arg::U32(first.vector_dtype as u32), stats];
            // SAFETY: 1. the arguments are the kernel's; 2. the Grams' tables are this engine's, the biases those that
            // `new`'s caller promised; 3. these rows are written by this launch alone.
            unsafe { b.gram_stats.launch(stream, Launch::linear(layers * (n_q + n_kv), 128, 0), &args)? };
        } else {
            self.norms(stream, [&self.row_blocks, &self.column_blocks])?;
        }
        self.operand_descales(stream)?;
        let small = Arg::Words([
            r as u32,
            first.rotary as u32,
            first.interleaved.into(),
            first.mean_removed.into(),
            first.rope_factor.to_bits(),
            b.rounding.to_bits(),
            first.d_model as u32,
            WARM_STEPS,
            0,
            0,
            0,
            0,
        ]);
        let lambdas = Arg::Ptr(b.lambdas.ptr());
        let args = [Arg::Ptr(b.jobs.ptr()), heads, partials, stats, small, Arg::Ptr(b.vectors.ptr()), lambdas, status];
        // SAFETY: 1. the arguments are the kernel's; 2. all tables are this engine's; 3. every job has its own result and
        // vector, and the Grams are finished, by the stream's order.
        unsafe { b.eigen.launch(stream, Launch::linear(b.jobs.len(), 256, b.shared), &args)? };
        if !b.product_jobs.is_empty() {
            let args = [
                Arg::Ptr(b.product_jobs.ptr()),
                heads,
                partials,
                stats,
                small,
                Arg::Ptr(b.workspace.ptr()),
                lambdas,
                Arg::Ptr(b.aux.ptr()),
                status,
            ];
            let launch = Launch::linear(b.product_jobs.len(), 256, b.product_shared);
            // SAFETY: as above; each block has its own workspace.
            unsafe { b.products.launch(stream, launch, &args)? };
        }
        let args = [
            shape,
            heads,
            stats,
            lambdas,
            Arg::Ptr(b.aux.ptr()),
            Arg::Ptr(b.softmax_scales.ptr()),
            Arg::Ptr(self.heads.ptr()),
            Arg::Ptr(b.heads.ptr()),
            status,
        ];
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. everything it reads was written by the launches before it.
        unsafe { b.plan.launch(stream, Launch::linear((layers * n_q).div_ceil(4), 128, 0), &args) }
    }

    /// Logit bounds of [`ScaleEngine::plan`], `[layer][query head]`.
    pub fn head_bounds(&self) -> Option<&Buffer<HeadBound>> {
        self.bounds.as_ref().map(|b| &b.heads)
    }

    /// Bytes of device memory that the engine holds.
    pub fn workspace_bytes(&self) -> usize {
        let grams = self.grams.as_ref().map_or(0, |g| {
            4 * g.partials.len() + 24 * g.segments.len() + 8 * g.maps.len() + 16 * g.heads.len() + 4 * g.shares.len()
        });
        let bounds = self.bounds.as_ref().map_or(0, |b| {
            4 * b.vectors.len()
                + 8 * (b.workspace.len() + b.lambdas.len() + b.aux.len() + b.biases.len())
                + 16 * (b.jobs.len() + b.product_jobs.len())
                + 32 * b.heads.len()
        });
        let tables = 96 * self.projections.len()
            + 32 * self.stats.len()
            + 4 * (self.squares.len() + self.heads.len() + self.tensors.len() + self.operand_bounds.len())
            + 8 * (self.row_blocks.1 + self.column_blocks.1);
        grams + bounds + tables
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
        let r = self.layers[0].d_head;
        let side = r.div_ceil(64);
        let blocks = side * (side + 1) / 2;
        let all = grams.partials.read()?;
        let place = grams.host_heads[head];
        let mut gram = vec![0.0; r * r];
        for part in 0..place.count {
            let slot = (place.first + part * place.stride) as usize;
            let mut block = 0;
            for i in 0..side {
                for j in i..side {
                    let values = &all[(slot * blocks + block) * 4096..][..4096];
                    block += 1;
                    for a in 0..64.min(r - i * 64) {
                        for b in 0..64.min(r - j * 64) {
                            let (row, column) = (i * 64 + a, j * 64 + b);
                            if row <= column {
                                gram[row * r + column] += f64::from(values[a * 64 + b]);
                            }
                        }
                    }
                }
            }
        }
        for row in 0..r {
            for column in 0..row {
                gram[row * r + column] = gram[column * r + row];
            }
        }
        Ok(gram)
    }
}

impl Grams {
    fn new(device: &Device, layers: &[LayerInput], built: &Tables) -> Result<Self> {
        let first = &layers[0];
        let pair = |l: &LayerInput| [l.q.weight, l.k.weight];
        let along_model = |m: &DeviceMatrix| m.col_stride == 1 && m.row_stride % 8 == 0;
        let along_channels = |m: &DeviceMatrix| m.row_stride == 1 && m.col_stride % 8 == 0;
        let matrices: Vec<DeviceMatrix> = layers.iter().flat_map(pair).collect();
        let all = |test: &dyn Fn(&DeviceMatrix) -> bool| {
            matrices.iter().all(|m| m.dtype == Dtype::Bf16 && m.ptr.0 % 16 == 0 && test(m))
        };
        let (rows, columns) = (all(&along_model), all(&along_channels));
        let wgmma = device.arch().compute == 90 && matches!(first.d_head, 64 | 128) && (rows || columns);
        let r = first.d_head as u32;
        let per_tile = if wgmma && r == 64 { 3 } else { 1 };
        let mut units = Vec::new();
        for (index, p) in built.projections.iter().enumerate() {
            if p.first_head == NO_ROW {
                continue;
            }
            for head in (0..p.rows / r).step_by(per_tile as usize) {
                units.push(Unit {
                    projection: index as u32,
                    first_row: head * r,
                    stat_row: p.stat_row + head * r,
                    heads: per_tile.min(p.rows / r - head),
                    tiles: p.d_model.div_ceil(64),
                });
            }
        }
        let side = first.d_head.div_ceil(64);
        let blocks = side * (side + 1) / 2;
        let (cut, launch, kernel, maps) = if wgmma {
            let cut = tables::cut(&units, device.processors(), r);
            let shared = if r == 128 { 200_896 } else { 199_808 };
            let defines = [("D_HEAD", r.to_string()), ("ALONG_CHANNELS", u32::from(!rows).to_string())];
            let kernel = device.module(sources::GRAMS_WGMMA, &defines)?.kernel("scale_grams_wgmma")?;
            kernel.allow_shared(shared)?;
            let mut maps = Vec::with_capacity(16 * built.projections.len());
            for p in &built.projections {
                maps.extend(if p.first_head == NO_ROW {
                    [0; 16]
                } else if rows {
                    driver::tensor_map_bf16(p.weight, p.d_model.into(), p.rows.into(), p.row_stride as u64)?
                } else {
                    driver::tensor_map_bf16(p.weight, p.rows.into(), p.d_model.into(), p.col_stride as u64)?
                });
            }
            (cut, Launch::linear(device.processors(), 4 * 128, shared), kernel, maps)
        } else {
            // Ranges of 1024 input channels, whatever the device: a segment is a block.
            let ranges = first.d_model.div_ceil(1024);
            let cut = tables::cut(&units, units.len() * ranges, r);
            let kernel = device.module(sources::GRAMS, &[])?.kernel("scale_grams")?;
            let grid = (cut.segments.len() as u32, blocks as u32, 1);
            (cut, Launch { grid, block: 256, shared: 0 }, kernel, vec![0])
        };
        Ok(Self {
            route: if wgmma { GramRoute::Wgmma } else { GramRoute::Plain },
            kernel,
            launch,
            segments: device.upload(&cut.segments)?,
            shares: device.upload(&cut.shares)?,
            maps: device.upload(&maps)?,
            partials: device.zeros(cut.slots as usize * blocks * 4096)?,
            heads: device.upload(&cut.heads)?,
            host_heads: cut.heads,
        })
    }
}

impl Bounds {
    fn new(device: &Device, layers: &[LayerInput], built: &Tables, grams: &Grams) -> Result<Self> {
        let first = &layers[0];
        let (count, n_q, n_kv, r) = (layers.len(), first.n_q, first.n_kv, first.d_head);
        let (mut jobs, mut products) = (vec![], vec![]);
        // Results: raw q, raw k, then scaled q and scaled k, or products.
        let (k_at, rest_at) = (count * n_q, count * (n_q + n_kv));
        // Two f64 triangles have to fit shared memory.
        let product_shared = 8 * (r * (r + 1) + 10 * r + 256);
        let by_product = first.rotary == 0 && product_shared <= 227 * 1024;
        for layer in 0..count {
            let heads = layer * (n_q + n_kv);
            for h in 0..n_q {
                let (q, k) = ((heads + h) as u32, (heads + n_q + h / (n_q / n_kv)) as u32);
                let index = layer * n_q + h;
                let mut job = |kind, result: usize| jobs.push(Job { kind, q, k, result: result as u32 });
                job(0, index);
                if first.rotary > 0 {
                    job(2, rest_at + index);
                    job(3, rest_at + count * n_q + index);
                }
                if by_product {
                    products.push(Job { kind: 4, q, k, result: (rest_at + index) as u32 });
                }
            }
            for h in 0..n_kv {
                let k = (heads + n_q + h) as u32;
                jobs.push(Job { kind: 1, q: k, k, result: (k_at + layer * n_kv + h) as u32 });
            }
        }
        let results = rest_at + 2 * count * n_q;
        let module = device.module(sources::BOUNDS, &[])?;
        let plan = device.module(sources::PLAN, &[])?;
        let (eigen, product) = (module.kernel("scale_bounds")?, module.kernel("scale_products")?);
        let shared = (4 * (r * (r + 1) / 2 + 10 * r + 256)) as u32;
        eigen.allow_shared(shared)?;
        if by_product {
            product.allow_shared(product_shared as u32)?;
        }
        let values = |blocks: &[NormBlock]| -> Result<(Buffer<NormBlock>, usize)> {
            let is_value = |b: &&NormBlock| built.projections[b.projection as usize].first_head == NO_ROW;
            let list: Vec<NormBlock> = blocks.iter().filter(is_value).copied().collect();
            Ok((device.upload(&list)?, list.len()))
        };
        let biases: Vec<u64> = layers
            .iter()
            .flat_map(|l| {
                let each = move |bias: DevicePtr, heads: usize| {
                    let step = (r * l.vector_dtype.size()) as u64;
                    (0..heads as u64).map(move |h| if bias == DevicePtr::NULL { 0 } else { bias.0 + h * step })
                };
                each(l.q.bias, n_q).chain(each(l.k.bias, n_kv))
            })
            .collect();
        let flush = 256 + first.d_model.div_ceil(256);
        let split = if grams.route == GramRoute::Wgmma { 130 } else { 3 };
        let parts = grams.host_heads.iter().map(|h| h.count as usize).max().unwrap_or(1);
        // Scaling and the removal of the mean round too.
        let rounding = flush + split + parts + 4 + if first.mean_removed { 8 } else { 0 };
        Ok(Self {
            eigen,
            products: product,
            plan: plan.kernel("scale_plan")?,
            gram_stats: plan.kernel("scale_gram_stats")?,
            jobs: device.upload(&jobs)?,
            shared,
            product_jobs: device.upload(&products)?,
            product_shared: product_shared as u32,
            vectors: device.zeros(results * 256)?,
            workspace: device.zeros(products.len() * (r * (r + 1) / 2 + 256))?,
            lambdas: device.zeros(results)?,
            aux: device.zeros(2 * count * n_q)?,
            softmax_scales: device.upload(&layers.iter().map(|l| l.softmax_scale as f32).collect::<Vec<_>>())?,
            biases: device.upload(&biases)?,
            value_blocks: [values(&built.row_blocks)?, values(&built.column_blocks)?],
            heads: device.zeros(count * n_q)?,
            from_grams: layers.iter().all(|l| !l.mean_removed && l.shift == DevicePtr::NULL),
            eta: 0.8,
            rounding: rounding as f32,
        })
    }
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
        } else if (l.rotary, l.interleaved, l.mean_removed, l.vector_dtype, l.rope_factor)
            != (first.rotary, first.interleaved, first.mean_removed, first.vector_dtype, first.rope_factor)
        {
            "every layer must have the norm, the rotation and the vector type of the first"
        } else if l.d_model == 0 || l.d_model > 1 << 20 || l.n_q > 1 << 12 {
            "d_model must be from 1 to 2^20 and there may be at most 4096 heads"
        } else {
            continue;
        };
        return Err(Error::argument(format_args!("layer {i}: {rule}")));
    }
    Ok(())
}

pub(super) struct Tables {
    pub(super) projections: Vec<tables::Projection>,
    gain_rows: Vec<GainRow>,
    row_blocks: Vec<NormBlock>,
    column_blocks: Vec<NormBlock>,
    layers: Vec<tables::Layer>,
    rows: usize,
    outputs: usize,
}

impl Tables {
    pub(super) fn new(layers: &[LayerInput]) -> Self {
        let mut t = Self {
            projections: vec![],
            gain_rows: vec![],
            row_blocks: vec![],
            column_blocks: vec![],
            layers: vec![],
            rows: 0,
            outputs: 0,
        };
        let mut head = 0;
        for (index, l) in layers.iter().enumerate() {
            let mut starts = [NO_ROW; 3];
            let mut raw_pairs = 0;
            let inputs = [Some((&l.q, l.n_q)), Some((&l.k, l.n_kv)), l.v.as_ref().map(|v| (v, l.n_kv))];
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
                    gain_row: index as u32,
                    first_head: if which == 2 { NO_ROW } else { head },
                });
                if which < 2 {
                    head += heads as u32;
                }
                t.rows += rows as usize;
            }
            let offset = if l.gain == DevicePtr::NULL { 0.0 } else { l.gain_offset };
            t.gain_rows.push(GainRow {
                gain: l.gain.0,
                dtype: l.vector_dtype as u32,
                d_model: l.d_model as u32,
                offset,
                pad: 0,
            });
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
                fixed_q: l.fixed_bounds.map_or(0.0, |b| b.0),
                fixed_k: l.fixed_bounds.map_or(0.0, |b| b.1),
                pad: 0,
            });
            t.outputs += 4 * l.n_kv;
        }
        t
    }
}
