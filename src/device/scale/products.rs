//! Norms of W_Q W_K^T without rotation, from Grams.

use super::bounds::{squaring, waiting, wide_squaring};
use super::tables::{FactorJob, FactorNotes, Job, LayerInput, Unfinished};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, Kernel, Launch, Stream};
use crate::error::Result;

/// The products of a group of layers.
#[derive(Debug)]
pub(super) struct Products {
    jobs: Buffer<Job>,
    /// `[product]`: the quadratic forms of the constants of k, then of q.
    pub aux: Buffer<f64>,
    kernel: Kernel,
    launch: Launch,
    /// Products of one launch.
    together: usize,
    room: Buffer<f32>,
    factored: Option<Factored>,
}

/// Where K is factored ahead of the products, once for all query heads of a group.
#[derive(Debug)]
struct Factored {
    kernel: Kernel,
    launch: Launch,
    jobs: Buffer<FactorJob>,
    factors: Buffer<u8>,
    frames: Buffer<f32>,
    notes: Buffer<FactorNotes>,
    /// Query heads of a factor.
    group: usize,
    /// Heads of more than 128 channels are squared by a launch of their own.
    end: Option<(Kernel, Launch)>,
    products: Buffer<f32>,
    unfinished: Buffer<Unfinished>,
}

/// What every launch is given alike.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    pub heads: Arg,
    pub partials: Arg,
    pub stats: Arg,
    pub shape: Arg,
    pub lambdas: Arg,
    pub status: Arg,
}

/// Sizes, before anything is allocated.
struct Sizes {
    /// K is factored ahead.
    factored: bool,
    count: usize,
    /// Products of one launch.
    together: usize,
    /// f32 values of device memory that a launch works in.
    room: usize,
    /// Of a head's 64 x 64 blocks.
    side: usize,
    blocks: usize,
}

impl Sizes {
    fn new(device: &Device, layer: &LayerInput, layers: usize) -> Self {
        let (r, count) = (layer.d_head, layers * layer.n_q);
        let (side, wide) = (r.div_ceil(64), r > 128);
        let factored = device.arch().compute == 90 && r > 64;
        let processors = device.processors();
        let together = match (wide, factored) {
            (false, _) => count,
            // A block a multiprocessor.
            (true, false) => count.min(processors),
            // As many as wait for their squarings, whole groups.
            (true, true) => count.min((4 * processors).next_multiple_of(layer.n_q / layer.n_kv)),
        };
        let room = match (wide, factored) {
            (false, _) => 0,
            (true, false) => together * product_values(r),
            (true, true) => together.min(processors) * side * side * 4096,
        };
        Self { factored, count, together, room, side, blocks: side * (side + 1) / 2 }
    }
}

/// Bytes of a 64 x 64 block of a factor: two operands of f16.
const FACTOR_BYTES: usize = 2 * 64 * 64 * 2;

/// Values of the three matrices of a product.
fn product_values(r: usize) -> usize {
    let side = r.next_multiple_of(32);
    3 * side * (side + 4)
}

/// The kernel that makes a product of its own, its threads and shared memory.
fn whole_route(r: usize, hopper: bool) -> (sources::Source, u32, u32) {
    if hopper && r <= 64 {
        // The factored Gram in f32, an operand in two pieces of f16, and room for its alignment.
        return (sources::PRODUCTS_WGMMA, 128, 1024 + 64 * 68 * 4 + 2 * 64 * 64 * 2);
    }
    if r <= 128 {
        return (sources::PRODUCTS, squaring(r).0.max(256), 4 * product_values(r) as u32);
    }
    // The matrix in f16 alone; three units of it a warp.
    let bands = r.div_ceil(32);
    (sources::PRODUCTS, 32 * (bands * (bands + 1) / 2).div_ceil(3).max(8) as u32, squaring(r).1)
}

impl Products {
    /// `jobs`: of the query heads of all layers, those of a KV head one after another.
    pub fn new(device: &Device, layers: &[LayerInput], jobs: &[Job]) -> Result<Self> {
        let (first, r) = (&layers[0], layers[0].d_head);
        let sizes = Sizes::new(device, first, layers.len());
        let module = |source| device.module(source, &[("D_HEAD", r.to_string())]);
        let (source, name, threads, shared) = if sizes.factored {
            // A factor and 64 rows of another matrix, in pairs, and room for their alignment.
            let shared = (FACTOR_BYTES * (sizes.blocks + sizes.side) + 1024) as u32;
            (sources::PRODUCTS_PAIRS, "scale_products_pairs", 128 * sizes.side as u32, shared)
        } else {
            let (source, threads, shared) = whole_route(r, device.arch().compute == 90);
            (source, "scale_products", threads, shared)
        };
        let kernel = module(source)?.overlapping_kernel(name)?;
        kernel.allow_shared(shared)?;
        let blocks = if sizes.factored && r > 128 { device.processors() } else { sizes.together };
        Ok(Self {
            jobs: device.upload(jobs)?,
            aux: device.zeros(2 * sizes.count)?,
            kernel,
            launch: Launch::linear(blocks, threads, shared),
            together: sizes.together,
            room: device.allocate(sizes.room)?,
            factored: if sizes.factored { Some(Factored::new(device, layers, jobs, &sizes)?) } else { None },
        })
    }

    /// Their launch has a block more than there are products (`kernels/include/scale_jobs.cuh`). `early`: as for [`Self::launch`].
    pub fn beside(&self, early: bool) -> bool {
        early && self.factored.is_none() && self.together == self.jobs.len()
    }

    /// Puts them on `stream`. `early`: the launch in front lets the next one start early, leaves Grams and the statistics of q and
    /// k as they are, and started when they were there.
    pub fn launch(&self, stream: &Stream, inputs: &Inputs, early: bool) -> Result<()> {
        if let Some(factored) = &self.factored {
            factored.launch(stream, inputs, self.aux.ptr(), early)?;
        }
        let beside = self.beside(early);
        let Inputs { heads, partials, stats, shape, lambdas, status } = *inputs;
        let count = self.jobs.len();
        for first in (0..count).step_by(self.together.max(1)) {
            let many = self.together.min(count - first);
            let jobs = Arg::Ptr(self.jobs.ptr().offset((first * size_of::<Job>()) as u64));
            let aux = Arg::Ptr(self.aux.ptr().offset((first * 2 * size_of::<f64>()) as u64));
            let room = Arg::Ptr(self.room.ptr());
            let launch = Launch { grid: (self.launch.grid.0.min(many as u32), 1, 1), ..self.launch };
            let Some(f) = &self.factored else {
                let args = [jobs, heads, partials, stats, shape, lambdas, aux, room, status];
                // SAFETY: 1. the arguments are the kernel's; 2. all tables are the engine's; 3. every job has its own result,
                // a block its own part of the room, and the Grams are finished by the stream's order or as `early` says.
                unsafe { self.kernel.launch_early(stream, waiting(launch, beside), &args, beside)? };
                continue;
            };
            let factor = first / f.group;
            let at = |buffer: u64, size: usize| Arg::Ptr(crate::cuda::DevicePtr(buffer + (factor * size) as u64));
            let side = launch.block as usize / 128;
            let args = [
                jobs,
                heads,
                partials,
                stats,
                shape,
                at(f.factors.ptr().0, FACTOR_BYTES * side * (side + 1) / 2),
                at(f.frames.ptr().0, 256 * side),
                at(f.notes.ptr().0, size_of::<FactorNotes>()),
                lambdas,
                aux,
                room,
                Arg::Ptr(f.products.ptr()),
                Arg::Ptr(f.unfinished.ptr()),
                status,
                Arg::U32(f.group as u32),
                Arg::U32(many as u32),
            ];
            // SAFETY: as above; the factors are finished by the stream's order or the kernel's wait.
            unsafe { self.kernel.launch_early(stream, launch, &args, f.end.is_none())? };
            if let Some((kernel, end)) = &f.end {
                let args = [Arg::Ptr(f.products.ptr()), Arg::Ptr(f.unfinished.ptr()), lambdas, status];
                // SAFETY: as above; it reads what the launch in front left.
                unsafe { kernel.launch(stream, Launch { grid: (many as u32, 1, 1), ..*end }, &args)? };
            }
        }
        Ok(())
    }
}

impl Factored {
    fn new(device: &Device, layers: &[LayerInput], jobs: &[Job], sizes: &Sizes) -> Result<Self> {
        let (first, r) = (&layers[0], layers[0].d_head);
        let (wide, group, count) = (r > 128, first.n_q / first.n_kv, layers.len() * first.n_kv);
        let factor_jobs: Vec<FactorJob> = jobs
            .chunks(group)
            .enumerate()
            .map(|(i, q)| FactorJob { k: q[0].k, q: q[0].q, many: group as u32, product: (i * group) as u32 })
            .collect();
        let module = |source| device.module(source, &[("D_HEAD", r.to_string())]);
        let kernel = module(sources::FACTOR)?.overlapping_kernel("scale_factor")?;
        // The upper 16 x 16 tiles in f32.
        let tiles = r.div_ceil(16);
        let shared = (1024 * tiles * (tiles + 1) / 2) as u32;
        kernel.allow_shared(shared)?;
        let end = if wide {
            let kernel = module(sources::BOUNDS_WIDE)?.kernel("scale_products_end")?;
            let (threads, shared) = wide_squaring(r);
            kernel.allow_shared(shared)?;
            Some((kernel, Launch::linear(sizes.together, threads, shared)))
        } else {
            None
        };
        let waiting = if wide { sizes.together } else { 0 };
        Ok(Self {
            kernel,
            launch: Launch::linear(count, if wide { 256 } else { 128 }, shared),
            jobs: device.upload(&factor_jobs)?,
            factors: device.allocate(count * FACTOR_BYTES * sizes.blocks)?,
            frames: device.allocate(count * 64 * sizes.side)?,
            notes: device.zeros(count)?,
            group,
            end,
            products: device.allocate(waiting * 4096 * sizes.blocks)?,
            unfinished: device.zeros(waiting)?,
        })
    }

    fn launch(&self, stream: &Stream, inputs: &Inputs, aux: crate::cuda::DevicePtr, behind: bool) -> Result<()> {
        let args = [
            Arg::Ptr(self.jobs.ptr()),
            inputs.heads,
            inputs.partials,
            inputs.stats,
            inputs.shape,
            Arg::Ptr(self.factors.ptr()),
            Arg::Ptr(self.frames.ptr()),
            Arg::Ptr(self.notes.ptr()),
            Arg::Ptr(aux),
            Arg::U32(behind.into()),
        ];
        // SAFETY: 1. the arguments are the kernel's; 2. all tables are the engine's; 3. a block writes what is its job's alone, and
        // what it reads is finished by the stream's order or, `behind`, by what the caller says.
        unsafe { self.kernel.launch_early(stream, self.launch, &args, behind) }
    }
}
