//! The paper's power iteration as it stands: one norm a layer, of the sum over its heads.

use super::host::DeviceWeights;
use super::layout::Tables;
use super::power::{PowerIteration, Starts, Step, along_channels};
use super::tables::{LayerInput, NO_ROW, Place, Projection, SumLayer};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Persistent power iteration on `M = sum_h W_Q^h W_K^hT` of every layer, raw weights (the paper's Algorithms 2 and 3).
///
/// For parity with the paper: the sum bounds no head. A step is `u = M v / ||M v||`, `sigma = ||M^T u||`, kept as
/// `y = W_K^T v`, `[KV head][d_head]`, which is repeated over a group and summed over it, never W_K. It reads W_Q and W_K
/// twice. Estimates are one a layer, vectors `[layer][KV head][d_head]`.
pub type SummedPowerEngine = PowerIteration<Summed>;

/// The iteration over the sum of a layer's heads: four products a step, each a read of one projection.
#[derive(Debug)]
pub struct Summed {
    along: Kernel,
    across: Kernel,
    next: Kernel,
    projections: Buffer<Projection>,
    layers: Buffer<SumLayer>,
    x: Buffer<f32>,
    parts: Buffer<f32>,
    shape: LayerInput,
    columns: bool,
}

/// Rows that one block of `scale_sum_across` takes, and values of each.
const ACROSS: (usize, usize) = (128, 1024);

impl SummedPowerEngine {
    /// Sets up the iteration from pseudo-random vectors of `seed`.
    ///
    /// # Errors
    /// If the weights of a layer have no 16-byte rows, `[out, in]` or `[in, out]`, of one type, if q and k are normalised after
    /// the projection, or anything that [`ScaleEngine::new`](super::ScaleEngine::new) refuses.
    ///
    /// # Safety
    /// The same as [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[LayerInput], seed: u64) -> Result<Self> {
        Self::set_up(device, layers, seed, |inputs, places, starts| Summed::new(device, inputs, places, starts))
    }

    /// The same over weights that are kept alive with the iteration.
    ///
    /// # Errors
    /// As [`SummedPowerEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which is held and not written.
        Ok(unsafe { Self::new(device, weights.layers(), seed)? }.keeping(weights))
    }
}

impl Summed {
    /// For layers of one kind, whose addresses `SummedPowerEngine::new`'s caller promised.
    fn new(device: &Device, layers: &[LayerInput], places: &[Place], starts: &[Starts]) -> Result<Self> {
        let shape = layers[0];
        let Some(columns) = along_channels(layers, None).filter(|c| *c || shape.d_model.is_multiple_of(8)) else {
            return Err(Error::unsupported(
                "the summed power iteration on the device takes weights with 16-byte rows, and d_model a multiple of 8",
            ));
        };
        let projections = Tables::new(layers, places).projections;
        let of_q_and_k: Vec<u32> =
            (0..).zip(&projections).filter(|(_, p)| p.first_head != NO_ROW).map(|(index, _)| index).collect();
        let table: Vec<SumLayer> = of_q_and_k
            .chunks_exact(2)
            .zip(starts)
            .map(|(sides, s)| SumLayer { q: sides[0], k: sides[1], sigma: s.sigma as u32, vector: s.vectors as u32 })
            .collect();
        let defines = [("WEIGHTS", (shape.q.weight.dtype as u32).to_string())];
        let module = device.module(sources::POWER_SUM, &defines)?;
        let widest = widest(&shape);
        Ok(Self {
            along: module.kernel("scale_sum_along")?,
            across: module.kernel("scale_sum_across")?,
            next: module.kernel("scale_sum_next")?,
            projections: device.upload(&projections)?,
            layers: device.upload(&table)?,
            x: device.zeros(layers.len() * widest)?,
            parts: device.zeros(layers.len() * widest.div_ceil(ACROSS.0) * widest)?,
            shape,
            columns,
        })
    }

    fn words(&self, of_k: bool, stage: u32) -> [u32; 12] {
        let s = &self.shape;
        let channels = if of_k { s.n_kv } else { s.n_q } * s.d_head;
        let (outer, inner) = if self.columns { (s.d_model, channels) } else { (channels, s.d_model) };
        let sizes = [s.n_q, s.n_kv, s.d_head, s.d_model, self.columns.into(), outer, inner, of_k.into(), widest(s)];
        let mut words = [0; 12];
        words.iter_mut().zip(sizes).for_each(|(word, size)| *word = size as u32);
        words[9] = stage;
        words
    }

    /// One projection, or its transpose, times x. How many parts the result has.
    fn product(&self, stream: &Stream, of_k: bool, from_channels: bool) -> Result<u32> {
        let words = self.words(of_k, 0);
        let (outer, inner) = (words[5] as usize, words[6] as usize);
        // The sum runs over rows of memory, or along them.
        let across = from_channels != self.columns;
        let ranges = if across { outer.div_ceil(ACROSS.0) as u32 } else { 1 };
        let (projections, layers) = (Arg::Ptr(self.projections.ptr()), Arg::Ptr(self.layers.ptr()));
        let (x, parts) = (Arg::Ptr(self.x.ptr()), Arg::Ptr(self.parts.ptr()));
        let args = [projections, layers, Arg::Words(words), x, parts, Arg::U32(ranges)];
        let layers = self.layers.len() as u32;
        let (kernel, launch) = if across {
            let grid = (inner.div_ceil(ACROSS.1) as u32, ranges, layers);
            (&self.across, Launch { grid, block: ACROSS.1 as u32 / 8, shared: 0 })
        } else {
            (&self.along, Launch { grid: (outer.div_ceil(32) as u32, layers, 1), block: 256, shared: 0 })
        };
        // SAFETY: 1. the arguments are the kernels'; 2. the tables reach the weights that `new`'s caller promised; 3. every
        // block writes its own parts, and x was written by the previous launch.
        unsafe { kernel.launch(stream, launch, &args)? };
        Ok(ranges)
    }

    /// Between two products: a block a layer.
    fn next(&self, stream: &Stream, stage: u32, ranges: u32, vectors: DevicePtr, sigma: DevicePtr) -> Result<()> {
        let [layers, parts, x, y, sigma] =
            [self.layers.ptr(), self.parts.ptr(), self.x.ptr(), vectors, sigma].map(Arg::Ptr);
        let args = [layers, Arg::Words(self.words(false, stage)), parts, Arg::U32(ranges), x, y, sigma];
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. all are the engine's buffers, a block a layer.
        unsafe { self.next.launch(stream, Launch::linear(self.layers.len(), 1024, 0), &args) }
    }
}

impl Step for Summed {
    fn sizes(layer: &LayerInput) -> (usize, usize) {
        (1, layer.n_kv * layer.d_head)
    }

    fn steps(&self, stream: &Stream, count: usize, vectors: DevicePtr, sigma: DevicePtr) -> Result<()> {
        self.next(stream, 0, 1, vectors, sigma)?;
        for _ in 0..count {
            // W_Q y, W_Q^T u, W_K y, W_K^T v: from the channels to the model and back.
            for (product, of_k) in [false, false, true, true].into_iter().enumerate() {
                let ranges = self.product(stream, of_k, product % 2 == 0)?;
                self.next(stream, product as u32 + 1, ranges, vectors, sigma)?;
            }
        }
        Ok(())
    }
}

/// Values of the longest vector that passes between the products.
fn widest(s: &LayerInput) -> usize {
    (s.n_q * s.d_head).max(s.d_model).next_multiple_of(8)
}
