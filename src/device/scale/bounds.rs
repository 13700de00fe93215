//! Certified norms of every head and the logit bounds made of them.

use super::grams::Grams;
use super::norms;
use super::products::Products;
use super::results::Results;
use super::tables::{Growth, HeadGram, LayerInput, Place, Task};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

/// What the logit bounds need besides the Grams.
#[derive(Debug)]
pub(super) struct Bounds {
    certify: Kernel,
    launch: Launch,
    /// A matrix per block.
    tasks: Buffer<Task>,
    products: Option<Products>,
    plan: Kernel,
    /// Squares: raw q, raw k, then scaled q, scaled k and the Frobenius bound, or products. Infinite where a raw norm was skipped.
    pub lambdas: Buffer<f64>,
    growth: Buffer<Growth>,
    frobenius: Kernel,
    pub eta: f64,
    /// `Shape` of the kernels.
    shape: Arg,
    layer: LayerInput,
    layers: usize,
    /// Kernels may start before the one in front has ended, and wait for it.
    overlaps: bool,
}

/// Kinds of matrices (`kernels/scale/matrices.cuh`).
const RAW_Q: u32 = 0;
const RAW_K: u32 = 1;
const SCALED_Q: u32 = 2;
const SCALED_K: u32 = 3;
const PRODUCT: u32 = 4;

/// Threads and shared memory of the kernel that certifies (`kernels/scale/symmetric.cuh`): a group of four warps up to 128
/// channels, one for every two 64 x 64 blocks above; the matrix in F16, with room for its alignment.
fn certificate(r: usize) -> (u32, u32) {
    let side = r.div_ceil(64);
    let groups = if r > 128 { side * (side + 1) / 4 } else { 1 };
    (128 * groups as u32, (2 * 64 * 64 * side * side + 1024) as u32)
}

/// Raw norms may be skipped where they bound nothing but sigma_Q sigma_K: constants meet them, and with a mean that the norm
/// removes they have it.
fn may_skip(layer: &LayerInput) -> bool {
    let biases = layer.q.bias != DevicePtr::NULL || layer.k.bias != DevicePtr::NULL;
    layer.rotary > 0 && !biases && layer.shift == DevicePtr::NULL && !layer.mean_removed
}

/// Spread of log f over the channels up to which raw norms are skipped: that of independent weights of one size nearly always is
/// below 2.4 / sqrt(d). sigma is at most exp of it above what the raw norms would give (`docs/scale-engine.md`).
fn skip_spread(d_model: usize) -> f64 {
    (2.4 / (d_model as f64).sqrt()).min(0.045)
}

/// Squares of a query head, after those of its raw sides: both scaled sides and the Frobenius bound, or the product.
fn rest(layer: &LayerInput) -> usize {
    if layer.rotary > 0 { 3 } else { 1 }
}

impl Bounds {
    pub fn new(device: &Device, layers: &[LayerInput], places: &[Place], grams: &Grams) -> Result<Self> {
        let first = &layers[0];
        let (count, n_q, n_kv, r) = (layers.len(), first.n_q, first.n_kv, first.d_head);
        let group = n_q / n_kv;
        let (mut tasks, mut pairs) = (vec![], vec![]);
        let (k_at, rest_at) = (count * n_q, count * (n_q + n_kv));
        // Matrices that are made of the same Gram follow one another, so that the cache serves them.
        for (layer, input) in layers.iter().enumerate() {
            let heads = layer * (n_q + n_kv);
            let skips = |heads: usize| if may_skip(input) { heads as u32 } else { 0 };
            for kv in 0..n_kv {
                let (k, first_q) = (heads + n_q + kv, heads + kv * group);
                let task = |kind: u32, q: usize, result: usize, group: u32| {
                    let (of_q, of_k) = (grams.host_heads[q], grams.host_heads[k]);
                    let HeadGram { first, stride, count, .. } =
                        if kind == RAW_K || kind == SCALED_K { of_k } else { of_q };
                    let (q_row, k_row) = (of_q.stat_row, of_k.stat_row);
                    Task { kind, result: result as u32, first, stride, count, q_row, k_row, group }
                };
                tasks.push(task(RAW_K, first_q, k_at + layer * n_kv + kv, skips(group)));
                for (q, head) in (first_q..first_q + group).zip(layer * n_q + kv * group..) {
                    tasks.push(task(RAW_Q, q, head, skips(1)));
                    if first.rotary > 0 {
                        tasks.push(task(SCALED_Q, q, rest_at + head, 0));
                        tasks.push(task(SCALED_K, q, rest_at + count * n_q + head, 0));
                    } else {
                        let matrix = pairs.len() as u32;
                        tasks.push(Task { first: matrix, stride: 0, count: 1, ..task(PRODUCT, q, rest_at + head, 0) });
                        pairs.push([q as u32, k as u32]);
                    }
                }
            }
        }
        let (threads, shared) = certificate(r);
        let module = device.module(sources::EIGENVALUES, &[("D_HEAD", r.to_string())])?;
        let certify = module.overlapping_kernel("scale_eigenvalues")?;
        certify.allow_shared(shared)?;
        let flush = grams.depth;
        // g w is rounded once.
        let split = 3;
        let parts = grams.host_heads.iter().map(|h| h.count as usize).max().unwrap_or(1);
        // The removal of the mean rounds too, and its two sums are as deep as the norms' (`norms_generic.cu`, or where these are not
        // of the Grams' pass `norms.cu`).
        let by_loads = first.d_model.div_ceil(256) + 13;
        let deep = if grams.has_stats { by_loads } else { by_loads.max(norms::depth(first.d_model)) };
        let mean = if first.mean_removed { 2 * deep + 8 } else { 0 };
        let rounding = (flush + split + parts + 4 + mean) as f32;
        let sizes = [count, n_q, n_kv, r, first.d_model, first.rotary].map(|size| size as u32);
        let flags = [first.interleaved, first.mean_removed, grams.one_sided()].map(u32::from);
        let skipped = (4.0 * skip_spread(first.d_model)).exp() as f32;
        let mut shape = [0; 12];
        shape[..6].copy_from_slice(&sizes);
        shape[6..9].copy_from_slice(&flags);
        shape[9..].copy_from_slice(&[first.rope_factor, rounding, skipped].map(f32::to_bits));
        Ok(Self {
            certify,
            launch: Launch::linear(tasks.len(), threads, shared),
            products: if pairs.is_empty() { None } else { Some(Products::new(device, first, &pairs)?) },
            plan: device.module(sources::LOGIT_BOUNDS, &[])?.overlapping_kernel("scale_logit_bounds")?,
            frobenius: device.module(sources::FROBENIUS, &[])?.overlapping_kernel("scale_frobenius")?,
            overlaps: device.arch().compute >= 90,
            lambdas: device.zeros(rest_at + rest(first) * count * n_q)?,
            growth: device.upload(&layers.iter().zip(places).map(|(l, place)| l.growth(place)).collect::<Vec<_>>())?,
            eta: 0.8,
            tasks: device.upload(&tasks)?,
            shape: Arg::Words(shape),
            layer: *first,
            layers: count,
        })
    }

    /// Matrices of heads as they are and scaled that the last plan certified, and how many there are. Waits for the device.
    pub fn squared(&self) -> Result<(usize, usize)> {
        let most = self.tasks.len() - self.products.as_ref().map_or(0, |products| products.products.len());
        let raw = self.layers * (self.layer.n_q + self.layer.n_kv);
        let skipped = self.lambdas.read()?[..raw].iter().filter(|square| square.is_infinite()).count();
        Ok((most - skipped, most))
    }

    /// Certified norms of every head: raw, and scaled under rotation or of its product without, from Grams and channel statistics.
    pub fn norms(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, status: DevicePtr) -> Result<()> {
        let (partials, stats, shape) = (Arg::Ptr(grams.partials.ptr()), Arg::Ptr(stats), self.shape);
        let (mut matrices, mut products) = (DevicePtr::NULL, DevicePtr::NULL);
        if let Some(p) = &self.products {
            p.launch(stream, [Arg::Ptr(grams.heads.ptr()), partials, stats], shape, self.overlaps)?;
            (matrices, products) = (p.matrices.ptr(), p.products.ptr());
        }
        let args = [
            Arg::Ptr(self.tasks.ptr()),
            partials,
            Arg::Ptr(matrices),
            Arg::Ptr(products),
            stats,
            shape,
            Arg::Ptr(self.lambdas.ptr()),
            Arg::Ptr(status),
        ];
        // SAFETY: 1. the arguments are the kernel's; 2. all tables are the engine's; 3. every task has its own result, and the
        // Grams are finished by the stream's order or the kernel's wait.
        unsafe { self.certify.launch_early(stream, self.launch, &args, self.overlaps) }
    }

    /// Frobenius norms of every head, to `norms`; or with none there the bound over every relative position, for the heads where it
    /// is sharper than what [`Bounds::norms`] left: after these and before [`Bounds::finish`]. Without rotation sigma is
    /// certified as it is, and F is no less.
    pub fn frobenius(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, norms: DevicePtr) -> Result<()> {
        let in_plan = norms == DevicePtr::NULL;
        if in_plan && self.layer.rotary == 0 {
            return Ok(());
        }
        let tables = [grams.heads.ptr(), grams.partials.ptr(), stats, self.growth.ptr(), self.lambdas.ptr(), norms]
            .map(Arg::Ptr);
        let args = [&[self.shape][..], &tables].concat();
        let launch = Launch::linear(self.layers * self.layer.n_q, 128, 0);
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the tables and results are the engine's; 3. a block writes its
        // own head's result, and what it reads is finished by the stream's order or its wait.
        unsafe { self.frobenius.launch_early(stream, launch, &args, self.overlaps && in_plan) }
    }

    /// Bounds of every query head, from what [`Bounds::norms`] left, channel statistics and operand descales.
    pub fn finish(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, results: &Results) -> Result<()> {
        let Some(bounds) = &results.bounds else { return Ok(()) };
        let args = [
            self.shape,
            Arg::F64(self.eta),
            Arg::Ptr(grams.heads.ptr()),
            Arg::Ptr(stats),
            Arg::Ptr(self.lambdas.ptr()),
            Arg::Ptr(self.products.as_ref().map_or(DevicePtr::NULL, |products| products.forms.ptr())),
            Arg::Ptr(self.growth.ptr()),
            Arg::Ptr(results.descales.ptr()),
            Arg::Ptr(bounds.ptr()),
            Arg::Ptr(results.status.ptr()),
        ];
        let launch = Launch::linear((self.layers * self.layer.n_q).div_ceil(4), 128, 0);
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. everything it reads was written by the launches before it, on
        // this stream and on the one that it has waited for.
        unsafe { self.plan.launch(stream, launch, &args) }
    }
}
