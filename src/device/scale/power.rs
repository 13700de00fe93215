//! The paper's implicit power iteration with persistent vectors on the device, of each head or of a layer's sum.
//!
//! A step of each head is `z = G_Q y`, `y <- G_K z`, with `G = W^T W` never formed: the paper's Algorithm 3 per head seen from the
//! head's side, `y = W_K^T v`, and without expanding grouped KV heads. W is what the CPU's iteration takes: the gains and the mean of
//! the norm are in it, unless it is raw. `kernels/scale/power.cu` says how.

use super::host::DeviceWeights;
use super::layout::{self, Tables};
use super::partition::Partition;
use super::storage::Storage;
use super::tables::{LayerInput, NO_ROW, Place, PowerLayer, Projection};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Persistent power iteration over every head of a model.
///
/// The estimate of a step is `sigma = sqrt((z . G_K z) / (y . z))`, the norm of `M^T u` for the unit vector
/// `u = M v / ||M v||`: a lower bound, but for rounding. It certifies nothing. RoPE is left out, as in the paper. Estimates are
/// `[layer][query head]` with each layer's own heads, vectors `[layer][query head][d_head]`. A step reads W_Q and W_K once.
pub type PowerEngine = PowerIteration<false>;

/// Persistent power iteration on `M = sum_h W_Q^h W_K^hT` of every layer, raw weights (the paper's Algorithms 2 and 3).
///
/// For parity with the paper: the sum bounds no head. A step is `u = M v / ||M v||`, `sigma = ||M^T u||`, kept as
/// `y = W_K^T v`, `[KV head][d_head]`, which is repeated over a group and summed over it, never W_K. It reads W_Q and W_K
/// twice. Estimates are one per layer, vectors `[layer][KV head][d_head]`.
pub type SummedPowerEngine = PowerIteration<true>;

/// A power iteration of every layer of a model, whose layers may differ: each kind (heads, head dimension, norm, storage) has
/// launches of its own, and all work on one set of vectors. One workspace per engine: work of one on two streams has to be
/// ordered by events.
#[derive(Debug)]
pub struct PowerIteration<const SUMMED: bool> {
    kinds: Vec<Kind>,
    vectors: Buffer<f32>,
    /// Between W_Q and W_K.
    middle: Buffer<f32>,
    sigma: Buffer<f32>,
    /// Of each head: what its next estimate needs of z.
    scales: Buffer<f64>,
    weights: Option<Arc<DeviceWeights>>,
}

/// Layers of one kind.
#[derive(Debug)]
struct Kind {
    products: Kernel,
    heads: Kernel,
    sum: Kernel,
    projections: Buffer<Projection>,
    layers: Buffer<PowerLayer>,
    inputs: Buffer<f32>,
    parts: Buffer<f32>,
    shape: LayerInput,
    raw: bool,
}

/// Inputs of a block of the products (`kernels/scale/power.cu`).
const RANGE: usize = 1024;

/// Which products a launch makes: both from one read, or one of them.
#[derive(Clone, Copy)]
enum Products {
    Both = 0,
    ToInputs = 1,
    ToChannels = 2,
}

impl<const SUMMED: bool> PowerIteration<SUMMED> {
    /// # Safety
    /// As [`ScaleEngine::new`](super::ScaleEngine::new).
    unsafe fn set_up(device: &Device, layers: &[LayerInput], raw: bool, seed: u64) -> Result<Self> {
        let partition = Partition::of_power(layers)?;
        let (mut estimates, mut values) = (vec![0], vec![0]);
        for l in layers {
            let (own, heads) = if SUMMED { (1, l.n_kv) } else { (l.n_q, l.n_q) };
            estimates.push(estimates[estimates.len() - 1] + own);
            values.push(values[values.len() - 1] + heads * l.d_head);
        }
        let mut vectors = vec![0f32; values[layers.len()]];
        let mut kinds = vec![];
        for members in partition.groups() {
            let d_head = layers[members[0]].d_head;
            let own: usize = members.iter().map(|&i| values[i + 1] - values[i]).sum();
            let random = start(own / d_head, d_head, seed);
            for (&i, random) in members.iter().zip(random.chunks(own / members.len())) {
                vectors[values[i]..values[i + 1]].copy_from_slice(random);
            }
            let starts: Vec<(u32, u32)> = members.iter().map(|&i| (estimates[i] as u32, values[i] as u32)).collect();
            kinds.push(Kind::new(device, partition.pick(layers, members), &starts, SUMMED, raw)?);
        }
        let estimates = estimates[layers.len()];
        Ok(Self {
            kinds,
            middle: device.zeros(vectors.len())?,
            vectors: device.upload(&vectors)?,
            sigma: device.zeros(estimates)?,
            scales: device.zeros(estimates)?,
            weights: None,
        })
    }

    /// Where the tables hold what depends on the addresses of these layers, and what that is. They are as those that the iteration
    /// was made with, but for addresses.
    pub(super) fn places(&self, layers: &[LayerInput]) -> Result<Vec<(DevicePtr, Vec<u64>)>> {
        let partition = Partition::of_power(layers)?;
        let of = |(kind, members): (&Kind, &[usize])| {
            let layers = partition.pick(layers, members).0;
            let row = |(index, at)| (kind.projections.at(index), bytemuck::cast::<_, [u64; 4]>(at).to_vec());
            layout::places(&layers).enumerate().map(row).collect::<Vec<_>>()
        };
        Ok(self.kinds.iter().zip(partition.groups()).flat_map(of).collect())
    }

    /// The weights that are kept alive with it.
    pub fn weights(&self) -> Option<&Arc<DeviceWeights>> {
        self.weights.as_ref()
    }

    /// Number of kinds of layers. Each kind has its own launches.
    pub fn kinds(&self) -> usize {
        self.kinds.len()
    }

    /// Puts `count` steps of every layer on `stream`: 1 from persistent vectors, 5 from random ones (the paper). No allocation,
    /// no synchronisation.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn steps(&self, stream: &Stream, count: usize) -> Result<()> {
        let (vectors, middle) = (self.vectors.ptr(), self.middle.ptr());
        for kind in &self.kinds {
            for _ in 0..count {
                for (of_k, from, to) in [(false, vectors, middle), (true, middle, vectors)] {
                    if SUMMED {
                        kind.multiply(stream, of_k, Products::ToInputs, from, true)?;
                        kind.sum(stream, of_k, Products::ToInputs, to, self.sigma.ptr())?;
                        kind.multiply(stream, of_k, Products::ToChannels, from, true)?;
                        kind.sum(stream, of_k, Products::ToChannels, to, self.sigma.ptr())?;
                    } else {
                        kind.multiply(stream, of_k, Products::Both, from, false)?;
                        kind.finish_heads(stream, of_k, [from, to, self.scales.ptr(), self.sigma.ptr()])?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Estimates of the last step, layer after layer: lower bounds of sigma; NaN where weights are not finite.
    pub fn sigma(&self) -> &Buffer<f32> {
        &self.sigma
    }

    /// The vectors, layer after layer, as they were after the last steps: what a resume has to keep.
    pub fn vectors(&self) -> &Buffer<f32> {
        &self.vectors
    }

    /// Goes on from saved vectors. Waits for the device.
    ///
    /// # Errors
    /// If their number is not that of [`PowerIteration::vectors`], one is not finite, or the copy fails.
    pub fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        let want = self.vectors.len();
        if vectors.len() != want {
            return Err(Error::mismatch(format_args!(
                "{} values of power iteration vectors do not fit a model with {want}",
                vectors.len()
            )));
        }
        if vectors.iter().any(|x| !x.is_finite()) {
            return Err(Error::mismatch("a power iteration vector is not finite"));
        }
        self.vectors.write(vectors)
    }
}

impl PowerEngine {
    /// Sets up the iteration from pseudo-random vectors of `seed`, the same for each kind of layer; `raw` leaves gains and mean
    /// out, as the paper does.
    ///
    /// # Errors
    /// If q and k of a layer are normalized after the projection, or anything that
    /// [`ScaleEngine::new`](super::ScaleEngine::new) refuses.
    ///
    /// # Safety
    /// The same as [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[LayerInput], raw: bool, seed: u64) -> Result<Self> {
        // SAFETY: the caller's promises.
        unsafe { Self::set_up(device, layers, raw, seed) }
    }

    /// The same over weights that are kept alive with the iteration.
    ///
    /// # Errors
    /// As [`PowerEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, raw: bool, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which is held and not written.
        let power = unsafe { Self::new(device, weights.layers(), raw, seed)? };
        Ok(Self { weights: Some(weights.clone()), ..power })
    }

    /// Puts one step of every head on `stream`.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn step(&self, stream: &Stream) -> Result<()> {
        self.steps(stream, 1)
    }
}

impl SummedPowerEngine {
    /// Sets up the iteration from pseudo-random vectors of `seed`.
    ///
    /// # Errors
    /// As [`PowerEngine::new`].
    ///
    /// # Safety
    /// The same as [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[LayerInput], seed: u64) -> Result<Self> {
        // SAFETY: the caller's promises.
        unsafe { Self::set_up(device, layers, true, seed) }
    }

    /// The same over weights that are kept alive with the iteration.
    ///
    /// # Errors
    /// As [`PowerEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which is held and not written.
        let power = unsafe { Self::new(device, weights.layers(), seed)? };
        Ok(Self { weights: Some(weights.clone()), ..power })
    }
}

impl Kind {
    /// `starts`: of each layer's estimates and vectors in those of the model.
    fn new(
        device: &Device,
        (layers, places): (Vec<LayerInput>, Vec<Place>),
        starts: &[(u32, u32)],
        summed: bool,
        raw: bool,
    ) -> Result<Self> {
        let shape = layers[0];
        let Storage { dtype, rows, .. } = Storage::of(&[shape.q.weight, shape.k.weight]);
        let defines = [
            ("D_HEAD", shape.d_head.to_string()),
            ("WEIGHTS", (dtype as u32).to_string()),
            ("ROWS", u32::from(rows && shape.d_model.is_multiple_of(8)).to_string()),
            ("MEAN", u32::from(shape.mean_removed).to_string()),
        ];
        let module = device.module(sources::POWER, &defines)?;
        let projections = Tables::new(&layers, &places).projections;
        let of_q_and_k: Vec<u32> =
            (0..).zip(&projections).filter(|(_, p)| p.first_head != NO_ROW).map(|(index, _)| index).collect();
        let table = of_q_and_k.chunks_exact(2).zip(starts);
        let table = table.map(|(sides, &(sigma, vector))| PowerLayer { q: sides[0], k: sides[1], sigma, vector });
        let of_a_head = 2 * shape.d_head * shape.d_model.div_ceil(RANGE);
        let of_a_head = if summed { of_a_head.max(shape.d_model) } else { of_a_head };
        Ok(Self {
            products: module.kernel("scale_power")?,
            heads: module.kernel("scale_power_heads")?,
            sum: module.kernel("scale_power_sum")?,
            layers: device.upload(&table.collect::<Vec<_>>())?,
            projections: device.upload(&projections)?,
            inputs: device.zeros(if summed { layers.len() * shape.d_model } else { 0 })?,
            parts: device.zeros(layers.len() * shape.n_q * of_a_head)?,
            shape,
            raw,
        })
    }

    fn pass(&self, of_k: bool, products: Products, summed: bool) -> Arg {
        let s = &self.shape;
        let sizes = [s.n_q, s.n_kv, s.d_model, s.d_model.div_ceil(RANGE)].map(|size| size as u32);
        let flags = [of_k.into(), products as u32, summed.into(), self.raw.into()];
        let mut words = [0; 12];
        words[..8].copy_from_slice(&[sizes, flags].concat());
        Arg::Words(words)
    }

    /// One projection times the vectors at `from`, or its transpose times `inputs`, or both, in parts.
    fn multiply(&self, stream: &Stream, of_k: bool, products: Products, from: DevicePtr, summed: bool) -> Result<()> {
        let s = &self.shape;
        let heads = if summed && of_k { s.n_kv } else { s.n_q };
        let [layers, projections, from, inputs, parts] =
            [self.layers.ptr(), self.projections.ptr(), from, self.inputs.ptr(), self.parts.ptr()].map(Arg::Ptr);
        let args = [layers, projections, self.pass(of_k, products, summed), from, inputs, parts];
        let grid = (s.d_model.div_ceil(RANGE) as u32, heads as u32, self.layers.len() as u32);
        let block = if s.d_head > 128 { 256 } else { 128 };
        // SAFETY: 1. the arguments are the kernel's; 2. the tables reach the weights that the caller of `new` promised; 3. every
        // block writes its own parts, and what it reads was written by launches in front of it.
        unsafe { self.products.launch(stream, Launch { grid, block, shared: 0 }, &args) }
    }

    /// `addresses`: vectors from and to, what the estimate needs, estimates.
    fn finish_heads(&self, stream: &Stream, of_k: bool, addresses: [DevicePtr; 4]) -> Result<()> {
        let [from, to, scales, sigma] = addresses.map(Arg::Ptr);
        let [layers, projections, parts] = [self.layers.ptr(), self.projections.ptr(), self.parts.ptr()].map(Arg::Ptr);
        let pass = self.pass(of_k, Products::Both, false);
        let grid = (self.shape.n_q as u32, self.layers.len() as u32, 1);
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. all are the engine's buffers, a block per head.
        unsafe {
            let args = [layers, projections, pass, from, to, parts, scales, sigma];
            self.heads.launch(stream, Launch { grid, block: 256, shared: 0 }, &args)
        }
    }

    fn sum(&self, stream: &Stream, of_k: bool, products: Products, to: DevicePtr, sigma: DevicePtr) -> Result<()> {
        let [layers, to, inputs, parts, sigma] =
            [self.layers.ptr(), to, self.inputs.ptr(), self.parts.ptr(), sigma].map(Arg::Ptr);
        let args = [layers, self.pass(of_k, products, true), to, inputs, parts, sigma];
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. all are the engine's buffers, a block per layer.
        unsafe { self.sum.launch(stream, Launch::linear(self.layers.len(), 1024, 0), &args) }
    }
}

/// Unit vectors with independent signs and sizes.
fn start(heads: usize, d_head: usize, seed: u64) -> Vec<f32> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut vectors: Vec<f32> = (0..heads * d_head)
        .map(|_| {
            // The sum of four uniform values is close enough to a Gaussian for every direction to be as likely.
            (0..4)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ((state >> 40) as f32 - 8_388_607.5) / 8_388_608.0
                })
                .sum()
        })
        .collect();
    for vector in vectors.chunks_exact_mut(d_head) {
        let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vectors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_start_apart_and_at_unit_length() {
        let vectors = start(3, 64, 1);
        for (i, a) in vectors.chunks_exact(64).enumerate() {
            for (j, b) in vectors.chunks_exact(64).enumerate() {
                let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                assert!(if i == j { (dot - 1.0).abs() < 1e-5 } else { dot.abs() < 0.5 }, "{i} {j} {dot}");
            }
        }
        assert_ne!(vectors, start(3, 64, 2));
    }
}
