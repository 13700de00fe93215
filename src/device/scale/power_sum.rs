//! The paper's power iteration as it stands: one norm a layer, of the sum over its heads.

use super::group::{NO_ROW, Tables};
use super::host::DeviceWeights;
use super::kinds::{Iteration, Kinds};
use super::power::start;
use super::power_once::Once;
use super::tables::{DeviceMatrix, Dtype, LayerInput, Projection};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Persistent power iteration on `M = sum_h W_Q^h W_K^hT` of every layer, raw weights (the paper's Algorithms 2 and 3).
///
/// For parity with the paper: the sum bounds no head. A step is `u = M v / ||M v||`, `sigma = ||M^T u||`, kept as
/// `y = W_K^T v`, `[KV head][d_head]`, which is repeated over a group and summed over it, never W_K. It reads W_Q and W_K
/// once on Hopper ([`SummedPowerEngine::reads`]). Layers need not be alike: each kind has launches of its own.
#[derive(Debug)]
pub struct SummedPowerEngine {
    kinds: Kinds<Sums>,
    weights: Option<Arc<DeviceWeights>>,
}

/// The iteration over layers of one kind.
#[derive(Debug)]
struct Sums {
    route: Route,
    vectors: Buffer<f32>,
    sigma: Buffer<f32>,
}

#[derive(Debug)]
enum Route {
    Once(Once),
    Twice(Twice),
}

/// Four products a step, each a read.
#[derive(Debug)]
struct Twice {
    along: Kernel,
    across: Kernel,
    next: Kernel,
    projections: Buffer<Projection>,
    of_layer: Buffer<u32>,
    x: Buffer<f32>,
    parts: Buffer<f32>,
    shape: LayerInput,
    layers: usize,
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
        Self::with_route(device, layers, seed, true)
    }

    /// The same on the kernels that read each weight twice, whatever the device: what other devices take.
    ///
    /// # Errors
    /// As [`SummedPowerEngine::new`].
    ///
    /// # Safety
    /// As [`SummedPowerEngine::new`].
    #[doc(hidden)]
    pub unsafe fn reading_twice(device: &Device, layers: &[LayerInput], seed: u64) -> Result<Self> {
        Self::with_route(device, layers, seed, false)
    }

    fn with_route(device: &Device, layers: &[LayerInput], seed: u64, once: bool) -> Result<Self> {
        let values = |l: &LayerInput| (1, l.n_kv * l.d_head);
        let kinds = Kinds::new(device, layers, values, |layers| Sums::new(device, layers, seed, once))?;
        Ok(Self { kinds, weights: None })
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

    /// How often a step reads each weight: 1, or 2 before Hopper and where the shape of a layer does not fit.
    pub fn reads(&self) -> usize {
        if self.kinds.iter().all(|kind| matches!(kind.route, Route::Once(_))) { 1 } else { 2 }
    }

    /// Puts `count` steps of every layer on `stream`. No allocation, no synchronisation.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn steps(&self, stream: &Stream, count: usize) -> Result<()> {
        self.kinds.steps(stream, count)
    }

    /// Estimates of the last step, one a layer: lower bounds of the norm of the sum; NaN where weights are not finite.
    pub fn sigma(&self) -> &Buffer<f32> {
        self.kinds.sigma()
    }

    /// The vectors `W_K^T v`, `[layer][KV head][d_head]`, as they were after the last steps: what a resume has to keep.
    pub fn vectors(&self) -> &Buffer<f32> {
        self.kinds.vectors()
    }

    /// Goes on from saved vectors. Waits for the device.
    ///
    /// # Errors
    /// If their number is not that of [`SummedPowerEngine::vectors`], one is not finite, or the copy fails.
    pub fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        self.kinds.restore(vectors)
    }
}

impl Sums {
    /// For layers that are alike, whose addresses `SummedPowerEngine::new`'s caller promised.
    fn new(device: &Device, layers: &[LayerInput], seed: u64, once: bool) -> Result<Self> {
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
        let fused = if once { Once::new(device, &shape, &built.projections, !rows)? } else { None };
        let route = match fused {
            Some(once) => Route::Once(once),
            None => Route::Twice(Twice::new(device, &shape, &built.projections, !rows)?),
        };
        let vectors = start(layers.len(), shape.n_kv * shape.d_head, seed);
        let mut engine = Self { route, vectors: device.upload(&vectors)?, sigma: device.zeros(layers.len())? };
        engine.restore(&vectors)?;
        Ok(engine)
    }
}

impl Iteration for Sums {
    fn steps(&self, stream: &Stream, count: usize) -> Result<()> {
        let (y, sigma) = (self.vectors.ptr(), self.sigma.ptr());
        match &self.route {
            Route::Once(once) => (0..count).try_for_each(|step| once.step(stream, y, sigma, step > 0)),
            Route::Twice(twice) => twice.steps(stream, y, sigma, count),
        }
    }

    fn sigma(&self) -> &Buffer<f32> {
        &self.sigma
    }

    fn vectors(&self) -> &Buffer<f32> {
        &self.vectors
    }

    fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        self.vectors.write(vectors)?;
        match &mut self.route {
            Route::Once(once) => once.start(vectors),
            Route::Twice(_) => Ok(()),
        }
    }
}

impl Twice {
    fn new(device: &Device, shape: &LayerInput, projections: &[Projection], columns: bool) -> Result<Self> {
        let with_gram = projections.iter().enumerate().filter(|(_, p)| p.first_head != NO_ROW);
        let of_layer: Vec<u32> = with_gram.map(|(index, _)| index as u32).collect();
        let layers = of_layer.len() / 2;
        let dtype = shape.q.weight.dtype;
        let module = device.module(sources::POWER_SUM, &[("WEIGHTS", (dtype as u32).to_string())])?;
        let widest = widest(shape);
        let ranges = widest.div_ceil(ACROSS.0);
        Ok(Self {
            along: module.kernel("scale_sum_along")?,
            across: module.kernel("scale_sum_across")?,
            next: module.kernel("scale_sum_next")?,
            projections: device.upload(projections)?,
            of_layer: device.upload(&of_layer)?,
            x: device.zeros(layers * widest)?,
            parts: device.zeros(layers * ranges * widest)?,
            shape: *shape,
            layers,
            columns,
        })
    }

    fn steps(&self, stream: &Stream, y: DevicePtr, sigma: DevicePtr, count: usize) -> Result<()> {
        self.next(stream, y, sigma, 0, 1)?;
        for _ in 0..count {
            // W_Q y, W_Q^T u, W_K y, W_K^T v: from the channels to the model and back.
            for (product, of_k) in [false, false, true, true].into_iter().enumerate() {
                let ranges = self.product(stream, of_k, product % 2 == 0)?;
                self.next(stream, y, sigma, product as u32 + 1, ranges)?;
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

    fn next(&self, stream: &Stream, y: DevicePtr, sigma: DevicePtr, stage: u32, ranges: u32) -> Result<()> {
        let args = [
            Arg::Words(self.words(false, stage)),
            Arg::Ptr(self.parts.ptr()),
            Arg::U32(ranges),
            Arg::Ptr(self.x.ptr()),
            Arg::Ptr(y),
            Arg::Ptr(sigma),
        ];
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. all are the engine's buffers, a block a layer.
        unsafe { self.next.launch(stream, Launch::linear(self.layers, 1024, 0), &args) }
    }
}

/// Values of the longest vector that passes between the products.
fn widest(s: &LayerInput) -> usize {
    (s.n_q * s.d_head).max(s.d_model).next_multiple_of(8)
}
