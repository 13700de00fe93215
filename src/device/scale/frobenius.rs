//! Frobenius norms of every head's interaction, from the Grams.

use super::bounds::Bounds;
use super::grams::Grams;
use super::partition::Place;
use super::results::Results;
use super::tables::LayerInput;
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Frobenius {
    every: Kernel,
    bound: Kernel,
    shape: Arg,
    /// First query head of each layer in the results.
    first_heads: Buffer<u32>,
    heads: usize,
    rotates: bool,
    /// Kernels may start before the one in front has ended.
    early: bool,
}

const THREADS: u32 = 128;

impl Frobenius {
    pub fn new(
        device: &Device,
        layers: &[LayerInput],
        places: &[Place],
        grams: &Grams,
        bounds: &Bounds,
    ) -> Result<Self> {
        let module = device.module(sources::FROBENIUS, &[])?;
        let first = &layers[0];
        Ok(Self {
            every: module.kernel("scale_frobenius")?,
            bound: module.overlapping_kernel("scale_frobenius_bound")?,
            shape: Arg::Words([
                first.n_q as u32,
                first.n_kv as u32,
                first.d_head as u32,
                first.rotary as u32,
                first.interleaved.into(),
                first.mean_removed.into(),
                first.d_model as u32,
                layers.len() as u32,
                first.rope_factor.to_bits(),
                bounds.rounding.to_bits(),
                grams.one_sided().into(),
                0,
            ]),
            first_heads: device.upload(&places.iter().map(|place| place.q).collect::<Vec<_>>())?,
            heads: layers.len() * first.n_q,
            rotates: first.rotary > 0,
            early: device.arch().compute >= 90,
        })
    }

    /// Norms of every head; behind [`Bounds::norms`].
    pub fn every(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, results: &Results) -> Result<()> {
        let Some(norms) = &results.frobenius else { return Ok(()) };
        // SAFETY: a block writes its own head's norms.
        unsafe { self.launch(&self.every, stream, grams, stats, norms.ptr(), false) }
    }

    /// The bound over every relative position, for the heads where it is sharper than what [`Bounds::norms`] left: behind
    /// the operand descales, in front of [`Bounds::finish`]. Without rotation sigma is certified as it is, and F is no
    /// less.
    pub fn bound(&self, stream: &Stream, grams: &Grams, bounds: &Bounds, stats: DevicePtr) -> Result<()> {
        if !self.rotates {
            return Ok(());
        }
        // SAFETY: a block writes its own head's square; the statistics that it reads ahead of its wait were written by a
        // launch that the bounds waited for before they let anything start.
        unsafe { self.launch(&self.bound, stream, grams, stats, bounds.lambdas.ptr(), self.early) }
    }

    /// # Safety
    /// `result` is what the kernel writes, its own block's part of it alone; `early` as [`Kernel::launch_early`] has it.
    unsafe fn launch(
        &self,
        kernel: &Kernel,
        stream: &Stream,
        grams: &Grams,
        stats: DevicePtr,
        result: DevicePtr,
        early: bool,
    ) -> Result<()> {
        let args = [
            self.shape,
            Arg::Ptr(grams.heads.ptr()),
            Arg::Ptr(grams.partials.ptr()),
            Arg::Ptr(stats),
            Arg::Ptr(self.first_heads.ptr()),
            Arg::Ptr(result),
        ];
        let launch = Launch::linear(self.heads, THREADS, 0);
        // SAFETY: 1. the arguments are the kernels', in order; 2. the Grams' tables are the engine's; 3. the caller's promise,
        // and Grams and statistics are finished by the stream's order.
        unsafe { kernel.launch_early(stream, launch, &args, early) }
    }
}
