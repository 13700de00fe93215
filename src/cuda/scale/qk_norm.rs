//! Bounds of q and k that are normalised between projection and rotation.

use super::super::sources;
use super::super::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use super::tables::{HeadBound, LayerInput, QkLayer, QkNormInput, QkNormSide, QkSide};
use crate::error::{Error, Result};

/// One launch for all layers, over vectors in device memory.
#[derive(Debug)]
pub(super) struct QkNorm {
    kernel: Kernel,
    layers: Buffer<QkLayer>,
    /// `[layer][query head]`; without a sigma.
    pub heads: Buffer<HeadBound>,
    pub eta: f64,
    shape: [u32; 3],
}

impl QkNorm {
    /// `outs`: the first operand descale of each layer.
    pub fn new(device: &Device, layers: &[LayerInput], outs: impl Iterator<Item = u32>) -> Result<Self> {
        let table: Vec<QkLayer> = layers
            .iter()
            .zip(outs)
            .filter_map(|(layer, out)| layer.qk_norm.map(|norm| entry(layer, &norm, out)))
            .collect();
        let first = &layers[0];
        Ok(Self {
            kernel: device.module(sources::QK_NORM, &[])?.kernel("scale_qk_norm")?,
            layers: device.upload(&table)?,
            heads: device.zeros(layers.len() * first.n_q)?,
            eta: 0.8,
            shape: [first.n_q as u32, first.n_kv as u32, first.d_head as u32],
        })
    }

    /// Bytes of device memory for these layers.
    pub fn bytes_for(layers: &[LayerInput]) -> usize {
        layers.len() * (size_of::<QkLayer>() + size_of::<HeadBound>() * layers[0].n_q)
    }

    /// Descales and bounds of q and k, and the logit bounds, of every layer.
    pub fn run(&self, stream: &Stream, [descales, tensors, operand_bounds, status]: [DevicePtr; 4]) -> Result<()> {
        let [n_q, n_kv, d_head] = self.shape;
        let args = [
            Arg::Ptr(self.layers.ptr()),
            Arg::U32(n_q),
            Arg::U32(n_kv),
            Arg::U32(d_head),
            Arg::F64(self.eta),
            Arg::Ptr(descales),
            Arg::Ptr(tensors),
            Arg::Ptr(operand_bounds),
            Arg::Ptr(self.heads.ptr()),
            Arg::Ptr(status),
        ];
        let launch = Launch::linear(self.layers.len(), 256, 4 * (n_q + n_kv));
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the vectors are those that the engine's maker promised;
        // 3. rows of q and k are written by this launch alone.
        unsafe { self.kernel.launch(stream, launch, &args) }
    }
}

fn entry(layer: &LayerInput, norm: &QkNormInput, out: u32) -> QkLayer {
    let side = |side: &QkNormSide| QkSide {
        gain: side.gain.0,
        shift: side.shift.0,
        stride: if side.per_head { layer.d_head as u32 } else { 0 },
        channels: side.channels,
    };
    let growth = layer.growth();
    QkLayer {
        q: side(&norm.q),
        k: side(&norm.k),
        dtype: norm.dtype as u32,
        gain_offset: norm.gain_offset,
        rope_factor: layer.rope_factor,
        logit_scale: growth.logits,
        rotary: layer.rotary as u32,
        interleaved: layer.interleaved.into(),
        out,
        query_factor: growth.query,
        rounding_share: growth.rounding_share,
        pad: 0,
    }
}

/// What is wrong with a layer's QK-norm, if anything.
pub(super) fn check(layer: &LayerInput) -> Result<()> {
    let Some(norm) = &layer.qk_norm else { return Ok(()) };
    if norm.q.channels == 0 || norm.k.channels == 0 {
        return Err(Error::argument("a norm of q and k needs at least one channel"));
    }
    Ok(())
}
