//! Bounds of q and k that are normalized between projection and rotation.

use super::results::Results;
use super::tables::{LayerInput, Place, QkLayer, QkNormInput, QkNormSide, QkSide};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;
use std::mem::offset_of;

/// One launch for all layers, over vectors in device memory.
#[derive(Debug)]
pub(super) struct QkNorm {
    kernel: Kernel,
    layers: Buffer<QkLayer>,
    pub eta: f64,
    shape: [u32; 3],
}

impl QkNorm {
    pub fn new(device: &Device, layers: &[LayerInput], places: &[Place]) -> Result<Self> {
        let table: Vec<QkLayer> = layers
            .iter()
            .zip(places)
            .filter_map(|(layer, place)| layer.qk_norm.map(|norm| entry(layer, &norm, place)))
            .collect();
        let first = &layers[0];
        Ok(Self {
            kernel: device.module(sources::QK_NORM, &[])?.kernel("scale_qk_norm_bounds")?,
            layers: device.upload(&table)?,
            eta: 0.8,
            shape: [first.n_q as u32, first.n_kv as u32, first.d_head as u32],
        })
    }

    /// Where the tables hold the addresses of these layers' vectors, and what they are.
    pub fn places(&self, layers: &[LayerInput]) -> Vec<(DevicePtr, Vec<u64>)> {
        let of = |(index, norm): (usize, QkNormInput)| {
            let table = self.layers.at(index).0;
            let side = |at: usize, side: &QkNormSide| (DevicePtr(table + at as u64), vec![side.gain.0, side.shift.0]);
            [side(offset_of!(QkLayer, q), &norm.q), side(offset_of!(QkLayer, k), &norm.k)]
        };
        layers.iter().filter_map(|layer| layer.qk_norm).enumerate().flat_map(of).collect()
    }

    /// Descales and bounds of q and k, and the logit bounds, of every layer.
    pub fn run(&self, stream: &Stream, results: &Results) -> Result<()> {
        let Some(bounds) = &results.bounds else { return Ok(()) };
        let [n_q, n_kv, d_head] = self.shape;
        let args = [
            Arg::Ptr(self.layers.ptr()),
            Arg::U32(n_q),
            Arg::U32(n_kv),
            Arg::U32(d_head),
            Arg::F64(self.eta),
            Arg::Ptr(results.descales.ptr()),
            Arg::Ptr(results.tensors.ptr()),
            Arg::Ptr(results.operand_bounds.ptr()),
            Arg::Ptr(bounds.ptr()),
            Arg::Ptr(results.status.ptr()),
        ];
        let launch = Launch::linear(self.layers.len(), 256, 4 * (n_q + n_kv));
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the vectors are those that the engine's maker promised;
        // 3. rows of q and k are written by this launch alone.
        unsafe { self.kernel.launch(stream, launch, &args) }
    }
}

fn entry(layer: &LayerInput, norm: &QkNormInput, place: &Place) -> QkLayer {
    let side = |side: &QkNormSide| QkSide {
        at: [side.gain.0, side.shift.0],
        stride: if side.per_head { layer.d_head as u32 } else { 0 },
        channels: side.channels,
    };
    QkLayer {
        q: side(&norm.q),
        k: side(&norm.k),
        growth: layer.growth(place),
        dtype: norm.dtype as u32,
        gain_offset: norm.gain_offset,
        rope_factor: layer.rope_factor,
        rotary: layer.rotary as u32,
        interleaved: layer.interleaved.into(),
        layer: place.layer,
    }
}
