//! Bounds of the host in the layout of device memory and back, and the bounds stage on weights in host memory.

use crate::bound::{BoundKind, HeadBound, LayerBounds, OperandBound, Tail, check_device};
use crate::cuda::{Device, Stream};
use crate::device::scale::{DeviceWeights, ScaleEngine, above};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, LayerSpec, LayerWeights};
use crate::policy::PolicyShape;
use bytemuck::Zeroable;
use std::sync::Arc;

/// Bounds of every layer, rounded up to f32: `[layer][n_q]` and `[layer][q, k, v][n_kv]`. Heads have the fields that policies
/// read (`certain`, `rounded`, `isotropic`), and zeros elsewhere.
///
/// # Errors
/// `is_mismatch` if a layer is missing or has other heads, `is_unsupported` if a head lacks the worst-case bound or that of `kind`.
pub(crate) fn to_device(
    spec: &AttentionSpec,
    layers: &[LayerBounds],
    kind: BoundKind,
) -> Result<(Vec<HeadBound>, Vec<f32>)> {
    let fits = |(place, (own, b)): (usize, (&LayerSpec, &LayerBounds))| {
        let (n_q, n_kv) = (own.n_q_heads, own.n_kv_heads);
        let values = b.v.as_ref().is_none_or(|v| v.len() == n_kv);
        b.layer == place && b.heads.len() == n_q && b.q.len() == n_q && b.k.len() == n_kv && values
    };
    if layers.len() != spec.layers.len() || !spec.layers.iter().zip(layers).enumerate().all(fits) {
        return Err(Error::mismatch(format_args!("{}: bounds of every layer, in order, are needed", spec.name)));
    }
    let (mut heads, mut operands) = (Vec::new(), Vec::new());
    for (own, bounds) in spec.layers.iter().zip(layers) {
        for head in &bounds.heads {
            let within = |error: Error| error.within(spec.place(bounds.layer));
            let rounded = head.for_scale(BoundKind::Certain).map_err(within)?;
            head.for_scale(kind).map_err(within)?;
            heads.push(HeadBound {
                certain: above(head.certain.unwrap_or(rounded)),
                rounded: above(rounded),
                isotropic: above(head.rank_aware.unwrap_or(0.0)),
                ..HeadBound::zeroed()
            });
        }
        for row in [Some(&bounds.q), Some(&bounds.k), bounds.v.as_ref()] {
            // Query heads of a group share the largest bound.
            let largest = |group: &[OperandBound]| above(group.iter().map(|bound| bound.rounded).fold(0.0, f64::max));
            match row {
                Some(row) => operands.extend(row.chunks(row.len() / own.n_kv_heads).map(largest)),
                None => operands.extend(std::iter::repeat_n(0.0, own.n_kv_heads)),
            }
        }
    }
    Ok((heads, operands))
}

/// The bounds of every layer, from the layout of [`to_device`] or as a scale engine wrote them.
///
/// # Errors
/// As [`LayerBounds::from_device`].
pub(crate) fn from_device(
    spec: &AttentionSpec,
    heads: &[HeadBound],
    operands: &[f32],
    tail: &Tail,
) -> Result<Vec<LayerBounds>> {
    let offsets = PolicyShape::from(spec);
    let offsets = offsets.heads();
    (0..spec.layers.len())
        .map(|layer| {
            let kv = offsets.kv(layer);
            let (heads, operands) = (&heads[offsets.q(layer)], &operands[3 * kv.start..3 * kv.end]);
            LayerBounds::from_device(spec, layer, heads, operands, tail)
        })
        .collect()
}

/// A scale engine over copies of the layers' weights, as far as bounds depend on them. Layers may differ in heads,
/// rotation, softmax scale, the factor on their queries and type. Where queries grow with the position, bounds hold up to
/// [`AttentionSpec::bounded_positions`].
///
/// # Errors
/// As [`check_device`], [`LayerGeometry::new`](crate::geometry::LayerGeometry::new) and [`ScaleEngine::over`].
pub fn scale_engine(device: &Device, spec: &AttentionSpec, layers: &[LayerWeights<'_>]) -> Result<ScaleEngine> {
    spec.check()?;
    check_device(spec)?;
    let weights = DeviceWeights::upload(device, spec, layers).map_err(|error| error.within(&spec.name))?;
    ScaleEngine::over(device, &Arc::new(weights), true).map_err(|error| error.within(&spec.name))
}

/// The bounds stage on a GPU, one layer at a time, from weights in host memory.
#[derive(Debug)]
pub struct DeviceBounds {
    device: Device,
    stream: Stream,
}

impl DeviceBounds {
    /// On the first GPU.
    ///
    /// # Errors
    /// `is_cuda`, saying what is missing.
    pub fn open() -> Result<Self> {
        crate::cuda::require()?;
        let device = Device::open(0)?;
        Ok(Self { stream: device.stream()?, device })
    }

    /// The bounds of one layer, as the scale engine makes them.
    ///
    /// # Errors
    /// `is_non_finite` if a weight is; otherwise as [`scale_engine`] and [`LayerBounds::new`].
    pub fn layer(&self, spec: &AttentionSpec, weights: LayerWeights<'_>, tail: &Tail) -> Result<LayerBounds> {
        let layer = weights.layer;
        let engine = scale_engine(&self.device, spec, std::slice::from_ref(&weights))?;
        engine.plan(&self.stream)?;
        let heads = engine.head_bounds().ok_or_else(|| Error::cuda("the engine was made without logit bounds"))?;
        LayerBounds::from_device(spec, layer, &heads.read()?, &engine.operand_bounds().read()?, tail)
    }
}

#[cfg(test)]
mod tests;
