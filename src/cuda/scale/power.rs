//! The paper's implicit power iteration, head by head, with persistent vectors on the device.
//!
//! A step is `y <- G_K (G_Q y)` with `G = W^T diag(g^2) W` never formed: `u = W y` and `W^T u` come from one read of the
//! weight, so a warm step reads W_Q and W_K once. It is the paper's Algorithm 3 per head, seen from the head's side
//! (`y = W_K^T v`), and without expanding grouped KV heads. The estimate `sqrt(||G_K G_Q y|| / ||y||)` is a lower bound of
//! sigma: it certifies nothing. The mean of a LayerNorm is kept, as in the paper.

use super::super::device::{Arg, Buffer, Device, Kernel, Launch, Stream};
use super::super::sources;
use super::engine::{NO_ROW, Tables, check};
use super::host::DeviceWeights;
use super::tables::{Dtype, LayerInput, PowerBlock, Projection};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Persistent power iteration over every head of a model.
#[derive(Debug)]
pub struct PowerEngine {
    step: Kernel,
    reduce: Kernel,
    projections: Buffer<Projection>,
    q: Buffer<PowerBlock>,
    k: Buffer<PowerBlock>,
    vectors: Buffer<f32>,
    parts: Buffer<f32>,
    sigma: Buffer<f32>,
    d_head: usize,
    ranges: usize,
    heads: usize,
    blocks: usize,
    raw: bool,
    weights: Option<Arc<DeviceWeights>>,
}

/// Three stages of 16 bytes for each of 8 channels of every thread.
fn shared_bytes(d_head: usize) -> u32 {
    (3 * 4 * d_head * 8 * 16) as u32
}

impl PowerEngine {
    /// Sets up the iteration from pseudo-random vectors of `seed`; `raw` leaves the gains out, as the paper does.
    ///
    /// # Errors
    /// If the weights are not BF16 `[out, in]` with 16-byte rows and d_head 64 or 128, or anything that
    /// [`ScaleEngine::new`](super::ScaleEngine::new) refuses.
    ///
    /// # Safety
    /// The same as [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[LayerInput], raw: bool, seed: u64) -> Result<Self> {
        check(layers)?;
        let first = &layers[0];
        let fits = layers
            .iter()
            .flat_map(|l| [l.q.weight, l.k.weight])
            .all(|m| m.dtype == Dtype::Bf16 && m.col_stride == 1 && m.row_stride % 8 == 0 && m.ptr.0 % 16 == 0);
        if !fits || !matches!(first.d_head, 64 | 128) || !first.d_model.is_multiple_of(8) {
            return Err(Error::unsupported(
                "power iteration on the device takes BF16 [out, in] weights with 16-byte rows and d_head 64 or 128",
            ));
        }
        let built = Tables::new(layers);
        let group = first.n_q / first.n_kv;
        let (mut q, mut k) = (vec![], vec![]);
        let (mut layer, mut is_k) = (0, false);
        for (index, p) in built.projections.iter().enumerate().filter(|(_, p)| p.first_head != NO_ROW) {
            for head in 0..p.rows / p.d_head {
                let vector = (layer * first.n_q) as u32 + if is_k { head * group as u32 } else { head };
                let count = if is_k { group as u32 } else { 1 };
                let block = PowerBlock { projection: index as u32, head, vector, count };
                if is_k { k.push(block) } else { q.push(block) }
            }
            layer += usize::from(is_k);
            is_k = !is_k;
        }
        let defines = [("D_HEAD", first.d_head.to_string())];
        let module = device.module(sources::POWER, &defines)?;
        let heads = layers.len() * first.n_q;
        let ranges = first.d_model.div_ceil(256);
        let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
        let start: Vec<f32> = (0..heads * first.d_head)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 - 8_388_608.0) / 8_388_608.0
            })
            .collect();
        let step = module.kernel("scale_power")?;
        step.allow_shared(shared_bytes(first.d_head))?;
        Ok(Self {
            step,
            blocks: device.processors() * 128 / first.d_head,
            reduce: module.kernel("scale_power_reduce")?,
            projections: device.upload(&built.projections)?,
            q: device.upload(&q)?,
            k: device.upload(&k)?,
            vectors: device.upload(&start)?,
            parts: device.zeros(heads * ranges * first.d_head)?,
            sigma: device.zeros(heads)?,
            d_head: first.d_head,
            ranges,
            heads,
            raw,
            weights: None,
        })
    }

    /// The same over weights that are kept alive with the iteration.
    ///
    /// # Errors
    /// As [`PowerEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, raw: bool, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which is held and not written.
        let mut power = unsafe { Self::new(device, weights.layers(), raw, seed)? };
        power.weights = Some(weights.clone());
        Ok(power)
    }

    /// The weights that are kept alive with it.
    pub fn weights(&self) -> Option<&Arc<DeviceWeights>> {
        self.weights.as_ref()
    }

    /// Puts one step of every head on `stream`: one read of W_Q and W_K. No allocation, no synchronisation.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn step(&self, stream: &Stream) -> Result<()> {
        for (blocks, finish) in [(&self.q, 0), (&self.k, 1)] {
            let threads = 4 * self.d_head as u32;
            let launch = Launch::linear(self.blocks, threads, shared_bytes(self.d_head));
            let args = [
                Arg::Ptr(self.projections.ptr()),
                Arg::Ptr(blocks.ptr()),
                Arg::U32((blocks.len() * self.ranges) as u32),
                Arg::Ptr(self.vectors.ptr()),
                Arg::Ptr(self.parts.ptr()),
                Arg::U32(self.raw.into()),
            ];
            // SAFETY: 1. the arguments are the kernel's; 2. the tables reach the weights that `new`'s caller promised;
            // 3. every block writes its own parts.
            unsafe { self.step.launch(stream, launch, &args)? };
            let args = [
                Arg::Ptr(self.parts.ptr()),
                Arg::U32(self.ranges as u32),
                Arg::Ptr(self.vectors.ptr()),
                Arg::Ptr(self.sigma.ptr()),
                Arg::U32(finish),
            ];
            // SAFETY: as above; a block a vector.
            unsafe { self.reduce.launch(stream, Launch::linear(self.heads, self.d_head as u32, 0), &args)? };
        }
        Ok(())
    }

    /// Estimates of the last step, `[layer][query head]`: lower bounds of sigma.
    pub fn sigma(&self) -> &Buffer<f32> {
        &self.sigma
    }

    /// The vectors, `[layer][query head][d_head]`: what a resume has to keep.
    pub fn vectors(&self) -> &Buffer<f32> {
        &self.vectors
    }
}
