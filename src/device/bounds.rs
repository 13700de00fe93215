//! Bounds of the host in the layout of device memory and back, and the bounds stage on weights in host memory.

use crate::bound::{BoundKind, HeadBound, LayerBounds, OperandBound, Tail};
use crate::cuda::{Device, Stream};
use crate::device::scale::{DeviceWeights, HostLayer, HostProjection, HostQkNorm, LayerInput, ScaleEngine, above};
use crate::error::{Error, Result};
use crate::geometry::{LayerGeometry, gains};
use crate::model::{
    AttentionSpec, GainForm, LayerSpec, LayerWeights, NormKind, NormVectors, Projection, QkNormScope, RopeLayout,
};
use crate::policy::PolicyShape;
use bytemuck::Zeroable;
use std::sync::Arc;

/// Bounds of every layer, rounded up to f32: `[layer][n_q]` and `[layer][q, k, v][n_kv]`. Heads have the fields that policies
/// read (`certain`, `rounded`, `isotropic`), and zeros elsewhere.
///
/// # Errors
/// `is_mismatch` if a layer is missing or has other heads, `is_unsupported` if a head lacks the certain bound or that of `kind`.
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

/// Sizes, norm and rotation of a layer, without addresses.
fn form(spec: &AttentionSpec, own: &LayerSpec, weights: &LayerWeights<'_>) -> LayerInput {
    // A rotation in front of a norm of q and k changes none of their bounds.
    let unturned = spec.qk_norm_of(own).is_some_and(|norm| norm.behind_rotation);
    let rope = own.rope.as_ref().filter(|_| !unturned);
    LayerInput {
        d_model: spec.d_model,
        n_q: own.n_q_heads,
        n_kv: own.n_kv_heads,
        d_head: own.d_head,
        rotary: rope.map_or(0, |rope| rope.rotary_dim),
        interleaved: rope.is_some_and(|rope| rope.layout == RopeLayout::Interleaved),
        rope_factor: rope.map_or(1.0, |rope| above(rope.attention_factor)),
        softmax_scale: own.softmax_scale,
        query_factor: own.query_factor(),
        rounding_share: spec.rounding_share(own, weights.stored()),
        ..LayerInput::without_addresses()
    }
}

fn projection<'a>(input: &'a Projection<'a>) -> HostProjection<'a> {
    HostProjection { heads: &input.heads, bias: input.bias.as_deref() }
}

/// A scale engine over copies of the layers' weights, as far as bounds depend on them. Layers may differ in heads,
/// rotation, softmax scale, the factor on their queries and type. Where queries grow with the position, bounds hold up to
/// [`AttentionSpec::bounded_positions`].
///
/// # Errors
/// `is_unsupported` if neither the attention's input nor q and k are normalised; otherwise as [`LayerGeometry::new`] and
/// [`ScaleEngine::over`].
pub fn scale_engine(device: &Device, spec: &AttentionSpec, layers: &[LayerWeights<'_>]) -> Result<ScaleEngine> {
    spec.check()?;
    // Gains as the host reads them; 1 is added here.
    let read = |stored: Option<&Vec<f64>>, form: GainForm| {
        stored.filter(|_| form != GainForm::Unit).map(|stored| gains(stored, form))
    };
    let read_gains: Vec<_> = layers
        .iter()
        .map(|weights| {
            let side = |norm: &Option<NormVectors>| {
                read(norm.as_ref().map(|vectors| &vectors.gain), spec.qk_norm.map_or(GainForm::Unit, |norm| norm.gain))
            };
            (read(weights.norm_gain.as_ref(), spec.norm.gain), [side(&weights.q_norm), side(&weights.k_norm)])
        })
        .collect();
    let host: Vec<HostLayer<'_>> = layers
        .iter()
        .zip(&read_gains)
        .map(|(weights, (gain, qk_gains))| {
            // The host's own checks of sizes and vectors.
            let centred = LayerGeometry::new(spec, weights.clone())?.centred;
            let own = spec.layer(weights.layer)?;
            Ok(HostLayer {
                form: LayerInput { mean_removed: centred, ..form(spec, own, weights) },
                q: projection(&weights.q),
                k: projection(&weights.k),
                v: (spec.norm.kind != NormKind::None).then(|| projection(&weights.v)),
                gain: gain.as_ref().map(|gain| gain.values.as_slice()),
                shift: weights.norm_shift.as_deref(),
                qk_norm: spec.qk_norm_of(own).map(|norm| {
                    let sides = [&weights.q_norm, &weights.k_norm].map(Option::as_ref);
                    HostQkNorm {
                        gains: qk_gains.each_ref().map(|gain| gain.as_ref().map(|gain| gain.values.as_slice())),
                        shifts: sides.map(|side| side.and_then(|vectors| vectors.shift.as_deref())),
                        gain_offset: 0.0,
                        joint: norm.scope == QkNormScope::Joint,
                    }
                }),
            })
        })
        .collect::<Result<_>>()?;
    let weights = DeviceWeights::upload(device, &host).map_err(|error| error.within(&spec.name))?;
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
