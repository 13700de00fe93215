//! Frobenius norms of every head's interaction, from the Grams.

use super::super::sources;
use super::super::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use super::bounds::Bounds;
use super::engine::Results;
use super::grams::Grams;
use super::partition::Place;
use super::tables::LayerInput;
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Frobenius {
    kernel: Kernel,
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
        let first = &layers[0];
        Ok(Self {
            kernel: device.module(sources::FROBENIUS, &[])?.overlapping_kernel("scale_frobenius")?,
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
        self.launch(stream, grams, stats, [DevicePtr::NULL, norms.ptr()], false)
    }

    /// The bound over every relative position, for the heads where it is sharper than what [`Bounds::norms`] left: behind
    /// these, in front of [`Bounds::finish`]. Without rotation sigma is certified as it is, and F is no less.
    pub fn bound(&self, stream: &Stream, grams: &Grams, bounds: &Bounds, stats: DevicePtr) -> Result<()> {
        if !self.rotates {
            return Ok(());
        }
        self.launch(stream, grams, stats, [bounds.lambdas.ptr(), DevicePtr::NULL], self.early)
    }

    fn launch(
        &self,
        stream: &Stream,
        grams: &Grams,
        stats: DevicePtr,
        results: [DevicePtr; 2],
        early: bool,
    ) -> Result<()> {
        let [lambdas, norms] = results.map(Arg::Ptr);
        let [heads, partials, stats, first_heads] =
            [grams.heads.ptr(), grams.partials.ptr(), stats, self.first_heads.ptr()].map(Arg::Ptr);
        let args = [self.shape, heads, partials, stats, lambdas, first_heads, norms];
        let launch = Launch::linear(self.heads, THREADS, 0);
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the tables and results are the engine's; 3. a block writes its
        // own head's result, and what it reads is finished by the stream's order or its wait.
        unsafe { self.kernel.launch_early(stream, launch, &args, early) }
    }
}
