//! What the launches of every kind of layer write: one set of buffers for the whole model.

use super::tables::LayerInput;
use crate::bound::{HeadBound, HeadFrobenius};
use crate::cuda::{Buffer, Device};
use crate::error::Result;
use crate::model::HeadOffsets;

/// Where bounds of logits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Logits {
    /// There are none.
    Unbounded,
    /// Certified norms.
    Certified,
    /// Estimates that another engine leaves in device memory.
    Estimated,
}

/// What the launches of every kind of layer write.
#[derive(Debug)]
pub(super) struct Results {
    pub status: Buffer<u32>,
    /// `[layer][q, k, v, o][n_kv]`.
    pub descales: Buffer<f32>,
    /// `[layer][q, k, v, o]`.
    pub tensors: Buffer<f32>,
    /// `[layer][q, k, v][n_kv]`.
    pub operand_bounds: Buffer<f32>,
    /// `[layer][query head]`, where a layer has bounds.
    pub bounds: Option<Buffer<HeadBound>>,
    /// `[layer][query head]`, where a layer has Grams.
    pub frobenius: Option<Buffer<HeadFrobenius>>,
}

impl Results {
    pub fn new(device: &Device, heads: &HeadOffsets, layers: &[LayerInput], logits: Logits) -> Result<Self> {
        // A layer with normalised q and k has logit bounds always, and Grams never.
        let normalised: Vec<bool> = layers.iter().map(|l| l.qk_norm.is_some()).collect();
        let has_bounds = logits != Logits::Unbounded || normalised.contains(&true);
        let unset = |(l, &none): (&LayerInput, &bool)| {
            let value = if none { f32::NAN } else { 0.0 };
            std::iter::repeat_n(HeadFrobenius { norm: value, bound: value }, l.n_q)
        };
        let frobenius: Vec<HeadFrobenius> = match logits == Logits::Certified && normalised.contains(&false) {
            true => layers.iter().zip(&normalised).flat_map(unset).collect(),
            false => vec![],
        };
        Ok(Self {
            status: device.zeros(1)?,
            descales: device.zeros(4 * heads.all_kv())?,
            tensors: device.zeros(4 * heads.layers())?,
            operand_bounds: device.zeros(3 * heads.all_kv())?,
            bounds: if has_bounds { Some(device.zeros(heads.all_q())?) } else { None },
            frobenius: if frobenius.is_empty() { None } else { Some(device.upload(&frobenius)?) },
        })
    }
}
