//! The paper's power iteration as it stands: one norm a layer, of the sum over its heads.

use super::super::device::{Arg, Buffer, Device, Kernel, Launch, Stream};
use super::super::sources;
use super::engine::{NO_ROW, Tables, check};
use super::host::DeviceWeights;
use super::power::start;
use super::tables::{DeviceMatrix, Dtype, LayerInput, Projection};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Persistent power iteration on `M = sum_h W_Q^h W_K^hT` of every layer, raw weights (the paper's Algorithms 2 and 3).
///
/// For parity with the paper: the sum bounds no head. A step is `u = M v / ||M v||`, `sigma = ||M^T u||`, kept as
/// `y = W_K^T v`, `[KV head][d_head]`, which is repeated over a group and summed over it, never W_K. It reads W_Q and W_K
/// twice.
#[derive(Debug)]
pub struct SummedPowerEngine {
    along: Kernel,
    across: Kernel,
    next: Kernel,
    projections: Buffer<Projection>,
    of_layer: Buffer<u32>,
    vectors: Buffer<f32>,
    x: Buffer<f32>,
    parts: Buffer<f32>,
    sigma: Buffer<f32>,
    shape: LayerInput,
    layers: usize,
    columns: bool,
    weights: Option<Arc<DeviceWeights>>,
}

/// Rows that one block of `scale_sum_across` takes, and values of each.
const ACROSS: (usize, usize) = (128, 1024);

impl SummedPowerEngine {
    /// Sets up the iteration from pseudo-random vectors of `seed`.
    ///
    /// # Errors
    /// If the weights have no 16-byte rows, `[out, in]` or `[in, out]`, all of one type, or anything that
    /// [`ScaleEngine::new`](super::ScaleEngine::new) refuses.
    ///
    /// # Safety
    /// The same as [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[LayerInput], seed: u64) -> Result<Self> {
        check(layers)?;
        let shape = layers[0];
        let dtype = shape.q.weight.dtype;
        let whole = if dtype == Dtype::F32 { 4 } else { 8 };
        let all = |test: &dyn Fn(&DeviceMatrix) -> bool| {
            let fits = |m: &DeviceMatrix| m.dtype == dtype && m.ptr.0.is_multiple_of(16) && test(m);
            layers.iter().all(|l| fits(&l.q.weight) && fits(&l.k.weight))
        };
        let rows = all(&|m| m.col_stride == 1 && m.row_stride % whole == 0) && shape.d_model.is_multiple_of(8);
        let columns = all(&|m| m.row_stride == 1 && m.col_stride % whole == 0);
        if !(rows || columns) {
            return Err(Error::unsupported(
                "the summed power iteration on the device takes weights with 16-byte rows, and d_model a multiple of 8",
            ));
        }
        let built = Tables::new(layers);
        let with_gram = built.projections.iter().enumerate().filter(|(_, p)| p.first_head != NO_ROW);
        let of_layer: Vec<u32> = with_gram.map(|(index, _)| index as u32).collect();
        let module = device.module(sources::POWER_SUM, &[("WEIGHTS", (dtype as u32).to_string())])?;
        let widest = widest(&shape);
        let ranges = widest.div_ceil(ACROSS.0);
        Ok(Self {
            along: module.kernel("scale_sum_along")?,
            across: module.kernel("scale_sum_across")?,
            next: module.kernel("scale_sum_next")?,
            projections: device.upload(&built.projections)?,
            of_layer: device.upload(&of_layer)?,
            vectors: device.upload(&start(layers.len(), shape.n_kv * shape.d_head, seed))?,
            x: device.zeros(layers.len() * widest)?,
            parts: device.zeros(layers.len() * ranges * widest)?,
            sigma: device.zeros(layers.len())?,
            shape,
            layers: layers.len(),
            columns: !rows,
            weights: None,
        })
    }

    /// The same over weights that are kept alive with the iteration.
    ///
    /// # Errors
    /// As [`SummedPowerEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which is held and not written.
        let mut power = unsafe { Self::new(device, weights.layers(), seed)? };
        power.weights = Some(weights.clone());
        Ok(power)
    }

    /// The weights that are kept alive with it.
    pub fn weights(&self) -> Option<&Arc<DeviceWeights>> {
        self.weights.as_ref()
    }

    /// Puts `count` steps of every layer on `stream`. No allocation, no synchronisation.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn steps(&self, stream: &Stream, count: usize) -> Result<()> {
        self.next(stream, 0, 1)?;
        for _ in 0..count {
            // W_Q y, W_Q^T u, W_K y, W_K^T v: from the channels to the model and back.
            for (product, of_k) in [false, false, true, true].into_iter().enumerate() {
                let ranges = self.product(stream, of_k, product % 2 == 0)?;
                self.next(stream, product as u32 + 1, ranges)?;
            }
        }
        Ok(())
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
        let mut args = vec![
            Arg::Ptr(self.projections.ptr()),
            Arg::Ptr(self.of_layer.ptr()),
            Arg::Words(words),
            Arg::Ptr(self.x.ptr()),
            Arg::Ptr(self.parts.ptr()),
        ];
        let (kernel, launch) = if across {
            args.push(Arg::U32(ranges));
            let grid = (inner.div_ceil(ACROSS.1) as u32, ranges, self.layers as u32);
            (&self.across, Launch { grid, block: ACROSS.1 as u32 / 8, shared: 0 })
        } else {
            (&self.along, Launch { grid: (outer.div_ceil(32) as u32, self.layers as u32, 1), block: 256, shared: 0 })
        };
        // SAFETY: 1. the arguments are the kernel's; 2. the tables reach the weights that `new`'s caller promised; 3. every
        // block writes its own parts, and x is written by the launch in front.
        unsafe { kernel.launch(stream, launch, &args)? };
        Ok(ranges)
    }

    fn next(&self, stream: &Stream, stage: u32, ranges: u32) -> Result<()> {
        let args = [
            Arg::Words(self.words(false, stage)),
            Arg::Ptr(self.parts.ptr()),
            Arg::U32(ranges),
            Arg::Ptr(self.x.ptr()),
            Arg::Ptr(self.vectors.ptr()),
            Arg::Ptr(self.sigma.ptr()),
        ];
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. all are this engine's buffers, a block a layer.
        unsafe { self.next.launch(stream, Launch::linear(self.layers, 1024, 0), &args) }
    }

    /// Estimates of the last step, one a layer: lower bounds of the norm of the sum; NaN where weights are not finite.
    pub fn sigma(&self) -> &Buffer<f32> {
        &self.sigma
    }

    /// The vectors `W_K^T v`, `[layer][KV head][d_head]`: what a resume has to keep.
    pub fn vectors(&self) -> &Buffer<f32> {
        &self.vectors
    }

    /// Goes on from saved vectors. Waits for the device.
    ///
    /// # Errors
    /// If their number is not that of [`SummedPowerEngine::vectors`], one is not finite, or the copy fails.
    pub fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        super::power::check_vectors(vectors, self.vectors.len())?;
        self.vectors.write(vectors)
    }
}

/// Values of the longest vector that passes between the products.
fn widest(s: &LayerInput) -> usize {
    (s.n_q * s.d_head).max(s.d_model).next_multiple_of(8)
}
