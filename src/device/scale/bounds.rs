//! Certified norms of every head and the logit bounds made of them.

use super::engine::Results;
use super::grams::Grams;
use super::norms;
use super::partition::Place;
use super::products::{Inputs, Products};
use super::tables::{Growth, HeadGram, Job, LayerInput, Task};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

/// What the logit bounds need beside the Grams.
#[derive(Debug)]
pub(super) struct Bounds {
    eigen: Kernel,
    products: Option<Products>,
    plan: Kernel,
    /// What is squared in any case.
    sure: Squarings,
    /// Norms as they are, where the scaled ones beside them can be beaten.
    asked: Option<Squarings>,
    /// What the scaled ones leave for these: of q, then of k.
    leans: Buffer<u64>,
    /// Squares: raw q, raw k, then scaled q, scaled k and the Frobenius bound, or products.
    pub lambdas: Buffer<f64>,
    growth: Buffer<Growth>,
    pub eta: f64,
    /// Allowance of a Gram's entries, in units of 2^-24 tr G.
    pub rounding: f32,
    /// Of the plan (`kernels/scale_plan.cu`).
    flags: u32,
    shape: LayerInput,
    layers: usize,
    /// So may the one that squares, beside another launch of it.
    hopper: bool,
}

/// Matrices and the launch that squares them, a block each.
#[derive(Debug)]
struct Squarings {
    jobs: Jobs,
    launch: Launch,
}

impl Squarings {
    fn new(device: &Device, jobs: &[Job], places: Option<&[HeadGram]>, (threads, shared): (u32, u32)) -> Result<Self> {
        let launch = Launch::linear(jobs.len(), threads, shared);
        let jobs = match places {
            Some(heads) => {
                let tasks: Vec<Task> = jobs.iter().map(|job| Task::new(job, heads)).collect();
                Jobs::Places(device.upload(&tasks)?)
            }
            None => Jobs::Heads(device.upload(jobs)?),
        };
        Ok(Self { jobs, launch })
    }
}

/// The matrices, as the kernel wants them.
#[derive(Debug)]
enum Jobs {
    /// By their heads.
    Heads(Buffer<Job>),
    /// With their places, one load less ahead of the Gram (`kernels/scale_bounds_wgmma.cu`).
    Places(Buffer<Task>),
}

/// Bits of the plan's flags (`kernels/scale_plan.cu`).
const MEAN_REMOVED: u32 = 8;
const MAY_MISS: u32 = 16;

/// Hopper's tensor cores make the certificates, a warpgroup a matrix.
fn by_warpgroups(device: &Device, r: usize) -> bool {
    device.arch().compute == 90 && r <= WGMMA_MOST
}

/// Threads and shared memory of the kernels that square matrices (`kernels/include/scale_spectrum.cuh`).
pub(super) fn squaring(r: usize) -> (u32, u32) {
    let bands = r.div_ceil(32);
    let units = bands * (bands + 1) / 2;
    let each = if units <= 15 {
        1
    } else if units <= 28 {
        2
    } else {
        3
    };
    (32 * units.div_ceil(each) as u32, (bands * 32 * (bands * 32 + 8) * 2) as u32)
}

/// The same of the kernel on Hopper's tensor cores, one warpgroup a matrix (`kernels/scale_bounds_wgmma.cu`).
fn squaring_wgmma(r: usize) -> (u32, u32) {
    let side = r.next_multiple_of(64) as u32;
    (128, side * side * 2 + 1024)
}

/// Largest d_head that it takes.
const WGMMA_MOST: usize = 128;

/// The same where heads have more than 128 channels (`kernels/scale_bounds_wide.cu`): two 64 x 64 blocks a warpgroup, and
/// the matrix in f16 with room for its alignment.
pub(super) fn wide_squaring(r: usize) -> (u32, u32) {
    let side = r.div_ceil(64);
    (32 * (side * (side + 1)) as u32, (1024 + 2 * 64 * 64 * side * side) as u32)
}

/// The same launch and, where it stands beside the one in front, the block that waits for that.
pub(super) fn waiting(launch: Launch, beside: bool) -> Launch {
    Launch { grid: (launch.grid.0 + u32::from(beside), 1, 1), ..launch }
}

/// What no scaled norm has left yet (`kernels/include/scale_jobs.cuh`).
const NOT_YET: u64 = u64::MAX;

/// Whether norms as they are wait for the scaled ones: only where they bound nothing but sigma_Q sigma_K (with constants they
/// meet these, and with a mean that the norm takes out they have it), and where not all run at once in any case.
fn compete(device: &Device, layers: &[LayerInput]) -> impl Fn(&LayerInput) -> bool + use<> {
    let first = &layers[0];
    let matrices = layers.len() * (3 * first.n_q + first.n_kv);
    let together = match first.d_head {
        _ if !by_warpgroups(device, first.d_head) => 1,
        ..=64 => 6,
        _ => 4,
    };
    let many = 2 * matrices > 3 * together * device.processors();
    move |layer| {
        let biases = layer.q.bias != DevicePtr::NULL || layer.k.bias != DevicePtr::NULL;
        many && layer.rotary > 0 && !biases && layer.shift == DevicePtr::NULL && !layer.mean_removed
    }
}

/// Squares of a query head behind those of its raw sides: both scaled sides and the Frobenius bound, or the product.
fn rest(layer: &LayerInput) -> usize {
    if layer.rotary > 0 { 3 } else { 1 }
}

impl Bounds {
    pub fn new(device: &Device, layers: &[LayerInput], places: &[Place], grams: &Grams) -> Result<Self> {
        let first = &layers[0];
        let (count, n_q, n_kv, r) = (layers.len(), first.n_q, first.n_kv, first.d_head);
        let (mut sure, mut asked, mut products) = (vec![], vec![], vec![]);
        let (k_at, rest_at) = (count * n_q, count * (n_q + n_kv));
        let (by_product, competes) = (first.rotary == 0, compete(device, layers));
        // Jobs that read the same Gram follow one another, so that the cache serves them.
        for (layer, input) in layers.iter().enumerate() {
            let heads = layer * (n_q + n_kv);
            let compete = competes(input);
            for kv in 0..n_kv {
                let k = (heads + n_q + kv) as u32;
                let group = kv * (n_q / n_kv)..(kv + 1) * (n_q / n_kv);
                let raw = Job { kind: 1, q: k, k, result: (k_at + layer * n_kv + kv) as u32 };
                if compete {
                    asked.push(raw)
                } else {
                    sure.push(raw)
                }
                if first.rotary > 0 {
                    sure.extend(group.clone().map(|h| {
                        let result = (rest_at + (count + layer) * n_q + h) as u32;
                        Job { kind: 3, q: (heads + h) as u32, k, result }
                    }));
                }
                for h in group {
                    let (q, index) = ((heads + h) as u32, layer * n_q + h);
                    let raw = Job { kind: 0, q, k, result: index as u32 };
                    if compete {
                        asked.push(raw)
                    } else {
                        sure.push(raw)
                    }
                    if first.rotary > 0 {
                        sure.push(Job { kind: 2, q, k, result: (rest_at + index) as u32 });
                    }
                    if by_product {
                        products.push(Job { kind: 4, q, k, result: (rest_at + index) as u32 });
                    }
                }
            }
        }
        let results = rest_at + rest(first) * count * n_q;
        let module = |source| device.module(source, &[("D_HEAD", r.to_string())]);
        let plan = device.module(sources::PLAN, &[])?;
        let (hopper, warpgroups) = (device.arch().compute == 90, by_warpgroups(device, r));
        let (source, name, block) = match hopper {
            true if warpgroups => (sources::BOUNDS_WGMMA, "scale_bounds", squaring_wgmma(r)),
            true => (sources::BOUNDS_WIDE, "scale_bounds_wide", wide_squaring(r)),
            false => (sources::BOUNDS, "scale_bounds", squaring(r)),
        };
        let eigen = module(source)?.overlapping_kernel(name)?;
        eigen.allow_shared(block.1)?;
        let products = if by_product { Some(Products::new(device, layers, &products)?) } else { None };
        let flush = grams.depth;
        // g w is rounded once.
        let split = 3;
        let parts = grams.host_heads.iter().map(|h| h.count as usize).max().unwrap_or(1);
        // The removal of the mean rounds too, and its two sums are as deep as the norms' (`scale_norms.cu`, or where these are not
        // of the Grams' pass `scale_norms_heads.cu`).
        let by_loads = first.d_model.div_ceil(256) + 13;
        let deep = if grams.has_stats { by_loads } else { by_loads.max(norms::depth(first.d_model)) };
        let mean = if first.mean_removed { 2 * deep + 8 } else { 0 };
        let rounding = flush + split + parts + 4 + mean;
        let task_places = warpgroups.then_some(&grams.host_heads[..]);
        Ok(Self {
            eigen,
            products,
            plan: plan.overlapping_kernel("scale_plan")?,
            sure: Squarings::new(device, &sure, task_places, block)?,
            asked: if asked.is_empty() { None } else { Some(Squarings::new(device, &asked, task_places, block)?) },
            leans: device.upload(&vec![NOT_YET; if asked.is_empty() { 0 } else { 2 * count * n_q }])?,
            hopper,
            lambdas: device.zeros(results)?,
            growth: device.upload(&layers.iter().zip(places).map(|(l, place)| l.growth(place)).collect::<Vec<_>>())?,
            eta: 0.8,
            rounding: rounding as f32,
            flags: if first.mean_removed {
                MEAN_REMOVED
            } else if asked.is_empty() {
                0
            } else {
                MAY_MISS
            },
            shape: *first,
            layers: count,
        })
    }

    /// Matrices that the last plan squared, and those that a plan may square. Waits for the device.
    pub fn squared(&self) -> Result<(usize, usize)> {
        let asked = self.asked.as_ref().map_or(0, |asked| asked.launch.grid.0 as usize);
        let most = self.sure.launch.grid.0 as usize + asked;
        let as_they_are = self.layers * (self.shape.n_q + self.shape.n_kv);
        let missing = self.lambdas.read()?[..as_they_are].iter().filter(|square| square.is_infinite()).count();
        Ok((most - missing, most))
    }

    fn plan_shape(&self) -> Arg {
        let s = &self.shape;
        Arg::Words([
            s.n_q as u32,
            s.n_kv as u32,
            s.d_head as u32,
            s.rotary as u32,
            s.interleaved.into(),
            s.d_model as u32,
            self.layers as u32,
            self.products.is_some().into(),
            s.rope_factor.to_bits(),
            self.flags,
            self.eta.to_bits() as u32,
            (self.eta.to_bits() >> 32) as u32,
        ])
    }

    /// The launch of [`Bounds::norms`] lets the next one start early.
    pub fn early(&self) -> bool {
        matches!(self.sure.jobs, Jobs::Places(_))
    }

    /// `beside`: the launch in front leaves what is read as it is (`kernels/include/scale_jobs.cuh`).
    fn gram_shape(&self, grams: &Grams, beside: bool, asked: bool) -> Arg {
        let s = &self.shape;
        Arg::Words([
            s.rotary as u32,
            s.interleaved.into(),
            s.mean_removed.into(),
            s.d_model as u32,
            s.rope_factor.to_bits(),
            self.rounding.to_bits(),
            grams.one_sided().into(),
            beside.into(),
            (self.layers * s.n_q) as u32,
            (s.n_q / s.n_kv) as u32,
            asked.into(),
            0,
        ])
    }

    /// Certified norms of every head, under rotation scaled, from Grams and channel statistics; as it is where it has to be or
    /// where these say that it may be sharper.
    pub fn norms(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, status: DevicePtr) -> Result<()> {
        let given = [grams.heads.ptr(), grams.partials.ptr(), stats, status];
        let shape = self.gram_shape(grams, false, false);
        self.square(stream, (&self.sure, self.early()), shape, false, given)?;
        let Some(asked) = &self.asked else { return Ok(()) };
        // Its blocks wait for what the scaled ones that they compete with leave, not for the end of that launch.
        let shape = self.gram_shape(grams, self.hopper, true);
        self.square(stream, (asked, self.hopper), shape, self.hopper, given)
    }

    /// `given`: heads and parts of the Grams, statistics, status.
    fn square(
        &self,
        stream: &Stream,
        (matrices, early): (&Squarings, bool),
        shape: Arg,
        beside: bool,
        given: [DevicePtr; 4],
    ) -> Result<()> {
        let [heads, partials, stats, status] = given.map(Arg::Ptr);
        let leans = if self.asked.is_some() { self.leans.ptr() } else { DevicePtr::NULL };
        let mut args = match &matrices.jobs {
            Jobs::Heads(jobs) => vec![Arg::Ptr(jobs.ptr()), heads],
            Jobs::Places(tasks) => vec![Arg::Ptr(tasks.ptr())],
        };
        args.extend([partials, stats, shape, Arg::Ptr(self.lambdas.ptr()), Arg::Ptr(leans), status]);
        // SAFETY: 1. the arguments are the kernel's; 2. all tables are the engine's; 3. every job has its own result, and the
        // Grams are finished, by the stream's order or the kernel's wait. A launch beside the one in front reads of what that
        // writes only words that are written whole.
        unsafe { self.eigen.launch_early(stream, waiting(matrices.launch, beside), &args, early) }
    }

    /// Norms of products without rotation, behind the operand descales and, where [`Bounds::norms`] lets those start early, beside
    /// both.
    pub fn products(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, status: DevicePtr) -> Result<()> {
        let Some(products) = &self.products else { return Ok(()) };
        let (heads, partials) = (Arg::Ptr(grams.heads.ptr()), Arg::Ptr(grams.partials.ptr()));
        let (stats, status, lambdas) = (Arg::Ptr(stats), Arg::Ptr(status), Arg::Ptr(self.lambdas.ptr()));
        let shape = self.gram_shape(grams, products.beside(self.early()), false);
        products.launch(stream, &Inputs { heads, partials, stats, shape, lambdas, status }, self.early())
    }

    /// Bounds of every query head, from what [`Bounds::norms`] and [`Bounds::products`] left, channel statistics and operand
    /// descales.
    pub fn finish(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, results: &Results) -> Result<()> {
        let Some(bounds) = &results.bounds else { return Ok(()) };
        let args = [
            self.plan_shape(),
            Arg::Ptr(grams.heads.ptr()),
            Arg::Ptr(stats),
            Arg::Ptr(self.lambdas.ptr()),
            Arg::Ptr(self.products.as_ref().map_or(DevicePtr::NULL, |products| products.aux.ptr())),
            Arg::Ptr(self.growth.ptr()),
            Arg::Ptr(results.descales.ptr()),
            Arg::Ptr(bounds.ptr()),
            Arg::Ptr(self.leans.ptr()),
            Arg::Ptr(results.status.ptr()),
        ];
        let launch = Launch::linear((self.layers * self.shape.n_q).div_ceil(4), 128, 0);
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. everything it reads was written by the launches before it, on
        // this stream and on the one that it has waited for.
        unsafe { self.plan.launch(stream, launch, &args) }
    }
}
