//! Bounds between the two sides, and the bounds stage on weights in host memory.

use crate::bound::HeadBound;
use crate::bound::{LayerBounds, OperandBound, Tail};
use crate::cuda::{Device, Stream};
use crate::device::scale::{DeviceWeights, HostLayer, HostProjection, HostQkNorm, LayerInput, ScaleEngine, above};
use crate::error::{Error, Result};
use crate::geometry::LayerGeometry;
use crate::model::{AttentionSpec, GainForm, LayerSpec, LayerWeights, NormKind, Projection, QkNormScope, RopeLayout};
use crate::policy::PolicyShape;
use std::sync::Arc;

/// A zero bound of every head, for layers that have none.
const NO_BOUND: HeadBound = HeadBound {
    sigma: 0.0,
    certain: 0.0,
    rounded: 0.0,
    descale: 1.0,
    linear: 0.0,
    constant: 0.0,
    constants: 0.0,
    pad: 0.0,
};

/// Bounds of every layer as the device keeps them. Isotropic bounds are carried by a sigma that gives them.
pub(crate) fn to_device(
    spec: &AttentionSpec,
    layers: &[LayerBounds],
    tail: &Tail,
) -> Result<(Vec<HeadBound>, Vec<f32>)> {
    let fits = |(place, (own, b)): (usize, (&LayerSpec, &LayerBounds))| {
        let (n_q, n_kv) = (own.n_q_heads, own.n_kv_heads);
        b.layer == place && b.heads.len() == n_q && b.q.len() == n_q && b.k.len() == n_kv
    };
    if layers.len() != spec.layers.len() || !spec.layers.iter().zip(layers).enumerate().all(fits) {
        return Err(Error::mismatch(format_args!("{}: bounds of every layer, in order, are needed", spec.name)));
    }
    let constants = crate::bound::isotropic(spec, tail)?;
    let (mut heads, mut operands) = (Vec::new(), Vec::new());
    for (own, bounds) in spec.layers.iter().zip(layers) {
        let (tau, n_kv) = (own.logit_scale(), own.n_kv_heads);
        for head in &bounds.heads {
            let missing = || {
                Error::unsupported(format_args!(
                    "{} layer {}: a head without the certain bound has no plan on the device",
                    spec.name, bounds.layer
                ))
            };
            let rounded = above(head.rounded.ok_or_else(missing)?);
            let sigma = head
                .rank_aware
                .map_or(0.0, |bound| bound / (tau * constants.sphere * constants.c_star * spec.d_model as f64));
            heads.push(HeadBound {
                sigma: above(sigma),
                certain: above(head.certain.unwrap_or(rounded.into())),
                rounded,
                ..NO_BOUND
            });
        }
        let rows = [Some(&bounds.q), Some(&bounds.k), bounds.v.as_ref()];
        for row in rows {
            let largest = |kv: usize| {
                let of = |row: &Vec<OperandBound>| {
                    let group = row.len() / n_kv;
                    row[kv * group..(kv + 1) * group].iter().map(|bound| bound.rounded).fold(0.0, f64::max)
                };
                above(row.map_or(0.0, of))
            };
            operands.extend((0..n_kv).map(largest));
        }
    }
    Ok((heads, operands))
}

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
        gain_offset: if spec.norm.gain == GainForm::OnePlus { 1.0 } else { 0.0 },
        mean_removed: spec.norm.kind == NormKind::LayerNorm,
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
    let host: Vec<HostLayer<'_>> = layers
        .iter()
        .map(|weights| {
            // The host's own checks of sizes and vectors.
            LayerGeometry::new(spec, weights.clone())?;
            let own = spec.layer(weights.layer)?;
            Ok(HostLayer {
                form: form(spec, own, weights),
                q: projection(&weights.q),
                k: projection(&weights.k),
                v: (spec.norm.kind != NormKind::None).then(|| projection(&weights.v)),
                gain: weights.norm_gain.as_deref().filter(|_| spec.norm.gain != GainForm::Unit),
                shift: weights.norm_shift.as_deref(),
                qk_norm: spec.qk_norm_of(own).map(|norm| {
                    let sides = [&weights.q_norm, &weights.k_norm].map(Option::as_ref);
                    HostQkNorm {
                        gains: sides.map(|side| Some(side?.gain.as_slice()).filter(|_| norm.gain != GainForm::Unit)),
                        shifts: sides.map(|side| side.and_then(|vectors| vectors.shift.as_deref())),
                        gain_offset: if norm.gain == GainForm::OnePlus { 1.0 } else { 0.0 },
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
