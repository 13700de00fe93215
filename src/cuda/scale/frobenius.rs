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
    /// `[layer][query head]`.
    pub norms: Buffer<HeadFrobenius>,
}

impl Frobenius {
    pub fn new(device: &Device, layers: &[LayerInput]) -> Result<Self> {
        Ok(Self {
            kernel: device.module(sources::FROBENIUS, &[])?.kernel("scale_frobenius")?,
            norms: device.zeros(layers.len() * layers[0].n_q)?,
        })
    }

    /// Bytes of device memory for these layers.
    pub fn bytes_for(layers: &[LayerInput]) -> usize {
        size_of::<HeadFrobenius>() * layers.len() * layers[0].n_q
    }

    /// Norms of every head, and its logit bound where they sharpen it; behind [`Bounds::run`].
    pub fn run(
        &self,
        stream: &Stream,
        first: &LayerInput,
        grams: &Grams,
        bounds: &Bounds,
        stats: DevicePtr,
    ) -> Result<()> {
        let eta = bounds.eta.to_bits();
        let shape = Arg::Words([
            first.n_q as u32,
            first.n_kv as u32,
            first.d_head as u32,
            first.rotary as u32,
            first.interleaved.into(),
            first.mean_removed.into(),
            first.d_model as u32,
            first.rope_factor.to_bits(),
            bounds.rounding.to_bits(),
            grams.one_sided().into(),
            eta as u32,
            (eta >> 32) as u32,
        ]);
        let args = [
            shape,
            Arg::Ptr(grams.heads.ptr()),
            Arg::Ptr(grams.partials.ptr()),
            Arg::Ptr(stats),
            Arg::Ptr(bounds.softmax_scales.ptr()),
            Arg::Ptr(self.norms.ptr()),
            Arg::Ptr(bounds.heads.ptr()),
        ];
        let launch = Launch::linear(self.norms.len(), 256, 0);
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the Grams' tables and the bounds are the engine's; 3. a block
        // writes its own head's norm and bound, which were finished by the stream's order.
        unsafe { self.kernel.launch(stream, launch, &args) }
    }
}
