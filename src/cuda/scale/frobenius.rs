//! Frobenius norms of every head's interaction, from the Grams.

use super::super::sources;
use super::super::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use super::bounds::Bounds;
use super::grams::Grams;
use super::tables::{HeadFrobenius, LayerInput};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Frobenius {
    kernel: Kernel,
    shape: Arg,
    /// `[layer][query head]`.
    pub norms: Buffer<HeadFrobenius>,
    rotates: bool,
    /// Kernels may start before the one in front has ended.
    early: bool,
}

const THREADS: u32 = 128;

impl Frobenius {
    pub fn new(device: &Device, layers: &[LayerInput], grams: &Grams, bounds: &Bounds) -> Result<Self> {
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
            norms: device.zeros(layers.len() * first.n_q)?,
            rotates: first.rotary > 0,
            early: device.arch().compute >= 90,
        })
    }

    /// Bytes of device memory for these layers.
    pub fn bytes_for(layers: &[LayerInput]) -> usize {
        size_of::<HeadFrobenius>() * layers.len() * layers[0].n_q
    }

    /// Norms of every head; behind [`Bounds::norms`].
    pub fn every(&self, stream: &Stream, grams: &Grams, stats: DevicePtr) -> Result<()> {
        self.launch(stream, grams, stats, [DevicePtr::NULL, self.norms.ptr()], false)
    }

    /// The bound over every relative position, for the heads where it is sharper than what [`Bounds::norms`] left: behind
    /// these, in front of [`Bounds::finish`]. Without rotation sigma is certified as it is, and F is no less.
    pub fn bound(&self, stream: &Stream, grams: &Grams, bounds: &Bounds, stats: DevicePtr) -> Result<()> {
        if !self.rotates {
            return Ok(());
        }
        self.launch(stream, grams, stats, [bounds.lambdas.ptr(), DevicePtr::NULL], self.early)
    }

    fn launch(&self, stream: &Stream, grams: &Grams, stats: DevicePtr, results: [DevicePtr; 2], early: bool) -> Result<()> {
        let [lambdas, norms] = results.map(Arg::Ptr);
        let args =
            [self.shape, Arg::Ptr(grams.heads.ptr()), Arg::Ptr(grams.partials.ptr()), Arg::Ptr(stats), lambdas, norms];
        let launch = Launch::linear(self.norms.len(), THREADS, 0);
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the tables and results are the engine's; 3. a block writes its
        // own head's result, and what it reads is finished by the stream's order or its wait.
        unsafe { self.kernel.launch_early(stream, launch, &args, early) }
    }
}
