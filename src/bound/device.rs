//! Bounds in the layout of device memory: plain values, which need no driver.

use super::tail::{ModelConstants, Tail};
use super::values::{BoundKind, HeadBounds, LayerBounds, OperandBound};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, HeadOffsets, LayerSpec, NormKind};
use bytemuck::{Pod, Zeroable};

/// Logit bound of one query head, as the device keeps it; everything rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadBound {
    /// Certified spectral norm of the interaction, over every relative position under RoPE.
    pub sigma: f32,
    /// Bound on the exact |logit|.
    pub exact: f32,
    /// Bound on |logit| from operands rounded to E4M3 with this plan's descales.
    pub rounded: f32,
    /// Descale of E4M3 logits.
    pub descale: f32,
    /// `||a|| + ||b||`: what the logit's linear terms scale with.
    pub linear: f32,
    /// `|c0|`: the constant part of the logit.
    pub constant: f32,
    /// `||c_q|| + ||c_k||`: zero where q and k have no constant part.
    pub constants: f32,
    /// The paper's calibrated bound for isotropic tokens, where the host computed it. 0: [`HeadBound::rank_aware`] computes it
    /// from `sigma` and the constant parts, which gives 0 for a head of zeros too.
    pub isotropic: f32,
}

/// Frobenius norm of one query head's interaction `W_Q W_K^T`, as the device keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct HeadFrobenius {
    /// The norm at relative position 0.
    pub norm: f32,
    /// Certified bound over every relative position, rounded up.
    pub bound: f32,
}

impl HeadFrobenius {
    /// `F^2 / sigma^2`, between 1 and d_head; 0 for a head of zeros.
    pub fn stable_rank(&self, sigma: f32) -> f64 {
        if sigma == 0.0 { 0.0 } else { (f64::from(self.norm) / f64::from(sigma)).powi(2) }
    }
}

impl From<HeadBound> for [f32; 8] {
    fn from(bound: HeadBound) -> Self {
        bytemuck::cast(bound)
    }
}

impl From<[f32; 8]> for HeadBound {
    fn from(values: [f32; 8]) -> Self {
        bytemuck::cast(values)
    }
}

impl HeadBound {
    /// The exact, worst-case and rank-aware bounds of a head, those that it has, rounded up; zeros elsewhere.
    pub fn new(bounds: &HeadBounds) -> Self {
        let up = |bound: Option<f64>| round_up(bound.unwrap_or(0.0));
        Self {
            exact: up(bounds.exact.or(bounds.rounded)),
            rounded: up(bounds.rounded),
            isotropic: up(bounds.rank_aware),
            ..Self::zeroed()
        }
    }

    /// The paper's calibrated bound, before a soft-cap: `isotropic` where it is set; otherwise `tau sphere c_star d sigma`, or
    /// with constant parts `tau [sphere (c_halved d sigma + linear (||a|| + ||b||)) + |c0|]`. `tau` is
    /// [`LayerSpec::logit_scale`](crate::model::LayerSpec::logit_scale).
    ///
    /// The kernel `policy_plan` does these operations in this order, so that both sides have the same bits.
    pub fn rank_aware(&self, constants: &Isotropic, tau: f64, d_model: usize) -> f64 {
        let (sigma, d) = (f64::from(self.sigma), d_model as f64);
        if self.isotropic != 0.0 {
            self.isotropic.into()
        } else if self.constants > 0.0 {
            let linear = constants.linear * f64::from(self.linear);
            tau * (constants.sphere * (constants.c_halved * d * sigma + linear) + f64::from(self.constant))
        } else {
            tau * constants.sphere * constants.c_star * d * sigma
        }
    }
}

/// Constants of the paper's calibrated bound for one model, see [`HeadBound::rank_aware`]. Kernels read it as it is.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Isotropic {
    /// d / (d - 1) after a LayerNorm, else 1.
    pub sphere: f64,
    /// The paper's alpha*.
    pub c_star: f64,
    /// The same for half the failure probability.
    pub c_halved: f64,
    /// Factor of the linear terms, `sqrt(2 t)`.
    pub linear: f64,
}

/// The smallest f32 that is not below `x`.
pub fn round_up(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) < x { near.next_up() } else { near }
}

/// Operand bounds of a layer, `[q, k, v][n_kv]`, rounded up. Query heads of a group share the largest; values without a bound
/// have 0.
pub fn operand_row(bounds: &LayerBounds, n_kv: usize) -> Vec<f32> {
    let largest = |group: &[OperandBound]| round_up(group.iter().map(|bound| bound.rounded).fold(0.0, f64::max));
    let row = |heads: Option<&Vec<OperandBound>>| match heads {
        Some(heads) => heads.chunks(heads.len() / n_kv).map(largest).collect(),
        None => vec![0.0; n_kv],
    };
    [Some(&bounds.q), Some(&bounds.k), bounds.v.as_ref()].map(row).concat()
}

/// Bounds of every layer in the layout of device memory: `[layer][n_q]` and `[layer][q, k, v][n_kv]`.
///
/// # Errors
/// `is_mismatch` if a layer is missing or has other heads, `is_unsupported` if a head lacks the worst-case bound or that of `kind`.
pub fn to_device(spec: &AttentionSpec, layers: &[LayerBounds], kind: BoundKind) -> Result<(Vec<HeadBound>, Vec<f32>)> {
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
            head.for_scale(BoundKind::WorstCase).map_err(within)?;
            head.for_scale(kind).map_err(within)?;
            heads.push(HeadBound::new(head));
        }
        operands.extend(operand_row(bounds, own.n_kv_heads));
    }
    Ok((heads, operands))
}

/// The bounds of every layer, from the layout of [`to_device`] or as a scale engine wrote them.
///
/// # Errors
/// As [`LayerBounds::from_device`].
pub fn from_device(
    spec: &AttentionSpec,
    heads: &[HeadBound],
    operands: &[f32],
    tail: &Tail,
) -> Result<Vec<LayerBounds>> {
    let offsets = HeadOffsets::new(spec.layers.iter().map(|layer| (layer.n_q_heads, layer.n_kv_heads)));
    let layer = |layer: usize| {
        let kv = offsets.kv(layer);
        let heads = heads.get(offsets.q(layer)).unwrap_or_default();
        let operands = operands.get(3 * kv.start..3 * kv.end).unwrap_or_default();
        LayerBounds::from_device(spec, layer, heads, operands, tail)
    };
    (0..spec.layers.len()).map(layer).collect()
}

/// Constants of the paper's calibrated bound for one model.
///
/// # Errors
/// As [`Tail::check`].
pub fn isotropic(spec: &AttentionSpec, tail: &Tail) -> Result<Isotropic> {
    let model = ModelConstants::new(spec, tail)?;
    Ok(Isotropic {
        sphere: model.sphere,
        c_star: model.c_star,
        c_halved: model.c_star_halved,
        linear: (2.0 * model.t_rank_aware).sqrt(),
    })
}

fn on_cpu(spec: &AttentionSpec, what: &str) -> Result<()> {
    Err(Error::unsupported(format_args!("{}: {what} are bounded on the CPU only", spec.name)))
}

/// Refuses what is no plain q, k and v of a layer's own weights, which is all that the scale engine reads.
///
/// # Errors
/// `is_unsupported` for latent attention, normalized values, factors that multiply projections, a mean of residual streams, and layers
/// that take the keys and values of others.
pub fn check_plain(spec: &AttentionSpec) -> Result<()> {
    if spec.has_mla() {
        return on_cpu(spec, "layers with latent attention (MLA)");
    }
    if spec.v_norm || spec.multipliers.is_some() {
        return on_cpu(spec, "normalized values and factors beside the weights");
    }
    if spec.streams.is_some() {
        return on_cpu(spec, "layers that read a gated mean of residual streams");
    }
    if spec.layers.iter().any(|layer| layer.kv_source.is_some()) {
        return on_cpu(spec, "layers that take keys and values of others");
    }
    Ok(())
}

/// Refuses what the scale engine does not count.
///
/// # Errors
/// As [`check_plain`]; `is_unsupported` if the projections may read their input rounded to E4M3, or if the config has two
/// readings of the rotation.
pub fn check_device(spec: &AttentionSpec) -> Result<()> {
    check_plain(spec)?;
    if spec.fp8_inputs {
        return on_cpu(spec, "weights stored in FP8, whose inputs may be rounded to E4M3 too,");
    }
    if spec.layers.iter().flat_map(|layer| &layer.rope).any(|rope| !rope.other_dims.is_empty()) {
        return on_cpu(spec, "rotations that engines read differently");
    }
    Ok(())
}

impl LayerBounds {
    /// The bounds of one layer from what the scale engine wrote: `heads` has `n_q` entries, `operands` the values
    /// `[q, k, v][n_kv]`. It has exact, worst-case and rank-aware bounds of the logits (the last not with a QK-norm). Query heads of a
    /// group share the largest operand bound, whose `exact` equals its `rounded`. Values of an input without a norm have none.
    ///
    /// # Errors
    /// `is_non_finite` if a weight was; `is_mismatch` if a length is not the layer's; `is_argument` if there is no such layer;
    /// as [`check_device`].
    pub fn from_device(
        spec: &AttentionSpec,
        layer: usize,
        heads: &[HeadBound],
        operands: &[f32],
        tail: &Tail,
    ) -> Result<Self> {
        let own = spec.layer(layer)?;
        check_device(spec)?;
        let (n_q, n_kv) = (own.n_q_heads, own.n_kv_heads);
        if heads.len() != n_q || operands.len() != 3 * n_kv {
            return Err(Error::mismatch(format_args!("{}: bounds of another model", spec.place(layer))));
        }
        let constants = isotropic(spec, tail)?;
        let tau = own.logit_scale();
        let heads = heads.iter().map(|head| {
            let rank_aware = head.rank_aware(&constants, tau, spec.d_model);
            HeadBounds {
                exact: Some(head.exact.into()),
                rounded: Some(head.rounded.into()),
                rank_aware: spec.qk_norm_of(own).is_none().then_some(rank_aware),
                ..HeadBounds::default()
            }
            .capped(spec.soft_cap)
        });
        let row = |which: usize, heads: usize| {
            let operands = &operands[which * n_kv..][..n_kv];
            let bound = |head: usize| f64::from(operands[head * n_kv / heads]);
            (0..heads).map(|head| OperandBound { exact: bound(head), rounded: bound(head) }).collect::<Vec<_>>()
        };
        let bounds = Self {
            layer,
            heads: heads.collect(),
            q: row(0, n_q),
            k: row(1, n_kv),
            v: (spec.norm.kind != NormKind::None).then(|| row(2, n_kv)),
            m: None,
        };
        // `min` with a soft-cap drops a NaN.
        if bounds.heads.iter().any(|head| head.rounded.is_none_or(f64::is_nan)) {
            return Err(Error::non_finite(format_args!("{}: a bound is NaN", spec.place(layer))));
        }
        bounds.check().map_err(|error| error.within(spec.place(layer)))?;
        Ok(bounds)
    }
}

#[cfg(test)]
mod tests;
