//! The bounds of a layer from its geometry and spectrum.

use super::centered::{LayerRanges, operand_rounding};
use super::tail::{ModelConstants, Tail};
use super::values::{E4M3_MAX, HeadBounds, LayerBounds, OperandBound};
use crate::error::{Error, Result};
use crate::geometry::{Channels, HeadLimit, LayerGeometry};
use crate::model::{AttentionSpec, E4M3_ROUNDING};
use crate::spectral::{HeadSpectrum, LayerSpectrum, layer_channels};

/// Absolute error of an E4M3 subnormal, in units of its descale.
pub(super) const SUBNORMAL_ERROR: f64 = 1.0 / 1024.0;

impl LayerBounds {
    /// All bounds of a layer.
    ///
    /// # Errors
    /// If a bound leaves the range of f64, if the spectrum belongs to another layer, or as [`Tail::check`].
    pub fn new(
        spec: &AttentionSpec,
        geometry: &LayerGeometry<'_>,
        spectrum: &LayerSpectrum,
        tail: &Tail,
    ) -> Result<Self> {
        let shape = (geometry.layer, geometry.q.len(), geometry.k.len(), geometry.qk_limits.is_none());
        if shape != (spectrum.layer, spectrum.q.len(), spectrum.k.len(), spectrum.heads.is_some()) {
            return Err(Error::mismatch(format_args!(
                "{}: the spectrum is of another layer or of another model",
                geometry.place
            )));
        }
        let (q, k, v) = operands(geometry, [&spectrum.q, &spectrum.k, &spectrum.v]);
        let constants = ModelConstants::new(spec, tail)?;
        // Heads may share the layer's largest scale, whose E4M3 subnormals are the coarsest.
        let step = |heads: &[OperandBound]| heads.iter().map(|head| head.rounded).fold(0.0, f64::max) / E4M3_MAX;
        let steps = (step(&q), step(&k));
        let mut heads = Vec::with_capacity(geometry.q.len());
        for head in 0..geometry.q.len() {
            let kv_head = geometry.kv_head(head);
            let bounds = match &spectrum.heads {
                Some(spectra) => {
                    let floors = element_errors(geometry, &spectrum.q[head], &spectrum.k[kv_head]);
                    projected_head(geometry, &spectra[head], steps, floors, &constants)
                }
                None => normalised_head(geometry, head, kv_head, steps)?,
            };
            heads.push(bounds.capped(geometry.soft_cap));
        }
        Self::checked(geometry, heads, (q, k, v))
    }

    /// The same from a power iteration, whose `sigma` stands in the worst-case bounds too. They promise nothing: sigma is
    /// estimated from below, without rotation, and what the rounding of q and k adds is counted as a relative error of the bound,
    /// `(1 + 1/17)^2`, since without Grams there is no norm of either side.
    ///
    /// # Errors
    /// As [`LayerBounds::new`].
    pub fn estimated(
        spec: &AttentionSpec,
        geometry: &LayerGeometry<'_>,
        spectrum: &LayerSpectrum,
        tail: &Tail,
    ) -> Result<Self> {
        let mut bounds = Self::new(spec, geometry, spectrum, tail)?;
        let factor = |share: f64| (1.0 + E4M3_ROUNDING) * (1.0 + share);
        let rounding = factor(geometry.rounding.q) * factor(geometry.rounding.k);
        for (head, spectrum) in bounds.heads.iter_mut().zip(spectrum.heads.iter().flatten()) {
            let exact = worst_case(geometry, spectrum, spectrum.sigma);
            let estimated = HeadBounds { exact: Some(exact), rounded: Some(exact * rounding), ..*head };
            *head = estimated.capped(geometry.soft_cap);
        }
        bounds.check().map_err(|error| error.within(&geometry.place))?;
        Ok(bounds)
    }

    /// Only the operand bounds, the same bits as in [`LayerBounds::new`]: one read of the weights, no logit bound, so `heads` is
    /// empty.
    ///
    /// # Errors
    /// If a weight is not finite or a bound leaves the range of f64.
    pub fn operands(geometry: &LayerGeometry<'_>) -> Result<Self> {
        let [q, k, v] = layer_channels(geometry)?;
        Self::checked(geometry, vec![], operands(geometry, [&q, &k, &v]))
    }

    /// The same beside the ranges of keys and values that centers need.
    ///
    /// # Errors
    /// As [`LayerBounds::operands`].
    pub fn operands_and_ranges(spec: &AttentionSpec, geometry: &LayerGeometry<'_>) -> Result<(Self, LayerRanges)> {
        let [q, k, v] = layer_channels(geometry)?;
        let bounds = Self::checked(geometry, vec![], operands(geometry, [&q, &k, &v]))?;
        Ok((bounds, LayerRanges::new(spec, geometry, &k, &v)))
    }

    fn checked(geometry: &LayerGeometry<'_>, heads: Vec<HeadBounds>, (q, k, v): Operands) -> Result<Self> {
        let q = q.into_iter().map(|bound| bound.times(geometry.query_factor)).collect();
        let bounds = Self { layer: geometry.layer, heads, q, k, v, m: None };
        bounds.check().map_err(|error| error.within(&geometry.place))?;
        Ok(bounds)
    }
}

/// Bounds of q, k and v.
type Operands = (Vec<OperandBound>, Vec<OperandBound>, Option<Vec<OperandBound>>);

/// The operand bounds of a layer, before queries grow with the position.
fn operands(geometry: &LayerGeometry<'_>, [q, k, v]: [&[Channels]; 3]) -> Operands {
    let (share, d) = (geometry.rounding, geometry.d_model as f64);
    let bound = |heads: &[Channels], pairs: &[(usize, usize)], share: f64| -> Vec<_> {
        heads.iter().map(|channels| operand(d, channels, pairs, share)).collect()
    };
    let (q, k) = match &geometry.qk_limits {
        Some(limits) => (
            limits.q.iter().map(|limit| normalised_operand(limit, share.q)).collect(),
            limits.k.iter().map(|limit| normalised_operand(limit, share.k)).collect(),
        ),
        None => {
            let pairs = geometry.rotary_pairs();
            (bound(q, &pairs, share.q), bound(k, &pairs, share.k))
        }
    };
    if geometry.v_normalised {
        let exact = (geometry.d_head as f64).sqrt();
        let v = OperandBound { exact, rounded: exact * (1.0 + share.v) };
        return (q, k, Some(vec![v; geometry.v.len()]));
    }
    (q, k, geometry.input_bounded.then(|| bound(v, &[], share.v)))
}

/// `tau [d sigma + sqrt(d) (a + b) + c0]`.
fn worst_case(geometry: &LayerGeometry<'_>, spectrum: &HeadSpectrum, sigma: f64) -> f64 {
    let (d, c) = (geometry.d_model as f64, &spectrum.constants);
    geometry.softmax_scale * (d * sigma + d.sqrt() * (c.a + c.b) + c.c0)
}

/// Bounds of a head whose q and k are affine in the normalized token.
fn projected_head(
    geometry: &LayerGeometry<'_>,
    spectrum: &HeadSpectrum,
    (step_q, step_k): (f64, f64),
    (error_q, error_k): (f64, f64),
    model: &ModelConstants,
) -> HeadBounds {
    let (tau, d) = (geometry.softmax_scale, geometry.d_model as f64);
    let c = &spectrum.constants;
    let sigma = spectrum.exact.map_or(spectrum.sigma, |exact| exact.sigma_rope_upper);
    let rank_aware = if c.any() {
        let linear = (2.0 * model.t_rank_aware).sqrt() * (c.a + c.b);
        tau * (model.sphere * (model.c_star_halved * d * sigma + linear) + c.c0)
    } else {
        tau * model.sphere * model.c_star * d * sigma
    };
    let mut bounds = HeadBounds { rank_aware: Some(rank_aware), ..HeadBounds::default() };
    let Some(exact) = &spectrum.exact else { return bounds };

    let root = d.sqrt();
    let worst = worst_case(geometry, spectrum, sigma);
    bounds.exact = Some(worst);
    bounds.naive = Some(tau * (root * exact.sigma_q_upper + c.norm_q) * (root * exact.sigma_k_upper + c.norm_k));

    // |q8 . k8 - q . k| <= (||q|| + ||dq||)(||k|| + ||dk||) - ||q|| ||k||, with ||dq|| <= e_q N_Q + sqrt(r) 2^-10 s_q, and what
    // roundings of single weights and small elements of inputs add.
    let flush = (geometry.d_head as f64).sqrt() * SUBNORMAL_ERROR;
    let size_q = root * exact.folded_q_upper + c.spread_q;
    let size_k = root * exact.folded_k_upper + c.spread_k;
    let mut product = size_q * size_k;
    // Relative errors, of an element, of a rotation pair or of the token, are as large relative to W_Q F and W_K F^-1, F diagonal
    // and constant on pairs: the dot product of q and k is that of F q and F^-1 k, and dq . k that of F dq and F^-1 k. So what
    // meets them alone is bounded by any such pair of norms, where these are those of all that is rounded.
    if let Some(balanced) = exact.balanced_upper
        && c.spread_q + c.spread_k == 0.0
        && !geometry.centred
    {
        product = product.min(d * balanced);
    }
    let flushes = (flush * step_q + (1.0 + E4M3_ROUNDING) * error_q, flush * step_k + (1.0 + E4M3_ROUNDING) * error_k);
    bounds.rounded =
        Some(worst + rounding_gap(tau, (geometry.rounding.q, geometry.rounding.k), product, (size_q, size_k), flushes));

    let t = if c.any() { model.t_spectrum.1 } else { model.t_spectrum.0 };
    let linear = (2.0 * t).sqrt() * (c.a + c.b);
    let off_diagonal = (2.0 * t).sqrt() * exact.frobenius_rope_upper + t * sigma;
    // The relative position is 0 on the diagonal; tr(C C) <= F^2.
    let x = model.x_diagonal;
    let diagonal = exact.trace.abs() + 2.0 * x.sqrt() * exact.frobenius_rope_upper + 2.0 * sigma * x;
    bounds.spectrum = Some(tau * (model.sphere * (off_diagonal.max(diagonal) + linear) + c.c0));
    bounds
}

/// Lengths of what meets q and k of a head element by element: roundings of weights that are not multiplied as they are stored,
/// whose error's norm is only bounded by the Frobenius norm, and small elements of an input in E4M3.
fn element_errors(geometry: &LayerGeometry<'_>, q: &Channels, k: &Channels) -> (f64, f64) {
    let one = |channels: &Channels, weight: f64| {
        floor(channels) + weight * (geometry.d_model as f64 * channels.folded_sq.iter().sum::<f64>()).sqrt()
    };
    let [weight_q, weight_k] = geometry.rounding.weights;
    (one(q, weight_q), one(k, weight_k))
}

/// Length of what small elements of an input in E4M3 add to a head.
pub(super) fn floor(channels: &Channels) -> f64 {
    channels.floor.iter().map(|error| error * error).sum::<f64>().sqrt()
}

/// `tau [(e_Q e_K - 1) N + e_Q N_Q f_K + e_K N_K f_Q + f_Q f_K]`, N at most N_Q N_K: what meets relative errors on both sides.
/// `e = (1 + 1/17)(1 + share)`: what E4M3 rounding and what came before it together can make of q or k.
pub(super) fn rounding_gap(
    tau: f64,
    (share_q, share_k): (f64, f64),
    product: f64,
    (size_q, size_k): (f64, f64),
    (flush_q, flush_k): (f64, f64),
) -> f64 {
    // Zeros stay zeros.
    if size_q == 0.0 || size_k == 0.0 {
        return 0.0;
    }
    let factor = |share: f64| (1.0 + E4M3_ROUNDING) * (1.0 + share);
    let (q, k) = (factor(share_q), factor(share_k));
    tau * ((q * k - 1.0) * product + q * size_q * flush_k + k * size_k * flush_q + flush_q * flush_k)
}

/// Bounds of a head whose q and k are normalized after the projection: `tau r max_b(gq_b gk_b)`, from the gains.
fn normalised_head(
    geometry: &LayerGeometry<'_>,
    head: usize,
    kv_head: usize,
    (step_q, step_k): (f64, f64),
) -> Result<HeadBounds> {
    let limits = geometry.qk_limits.as_ref().ok_or_else(|| {
        Error::unsupported("a layer without head spectra and without normalized q and k has no bound")
    })?;
    let (q, k, tau) = (&limits.q[head], &limits.k[kv_head], geometry.softmax_scale);
    let exact = if limits.shifted {
        tau * q.norm() * k.norm()
    } else {
        let product = q.pair_gain.iter().zip(&k.pair_gain).map(|(a, b)| a * b).fold(0.0, f64::max);
        tau * q.radius * k.radius * product
    };
    let flush = (geometry.d_head as f64).sqrt() * SUBNORMAL_ERROR;
    // The norm sees whatever rounding came before it, and bounds it all the same.
    let sizes = (q.norm(), k.norm());
    let flushes = (flush * step_q, flush * step_k);
    let rounded =
        exact + rounding_gap(tau, (geometry.rounding.q, geometry.rounding.k), sizes.0 * sizes.1, sizes, flushes);
    Ok(HeadBounds {
        naive: Some(tau * q.norm() * k.norm()),
        exact: Some(exact),
        rounded: Some(rounded),
        ..HeadBounds::default()
    })
}

/// For inputs of length sqrt(d) at most: `B = sqrt(d) ||w_c|| + |c_c|` and `A = sqrt(d) ||diag(g) w_c|| + sum |beta_i w_ic| + |b_c|`, the largest channel; for a
/// rotation pair the spectral norm of its two columns and the length of its constants.
pub(super) fn operand(d: f64, channels: &Channels, pairs: &[(usize, usize)], share: f64) -> OperandBound {
    let terms = operand_rounding(d, channels, share);
    let rounding = |c: usize| terms[c];
    let mut bound = OperandBound { exact: 0.0, rounded: 0.0 };
    let mut include = |exact: f64, rounding: f64| {
        bound.exact = bound.exact.max(exact);
        bound.rounded = bound.rounded.max(exact + rounding);
    };
    let mut rotated = vec![false; channels.norm_sq.len()];
    for (&(a, b), &dot) in pairs.iter().zip(&channels.pair_dot) {
        let (p, s) = (channels.norm_sq[a], channels.norm_sq[b]);
        let norm_sq = 0.5 * (p + s) + (0.5 * (p - s)).hypot(dot);
        include(
            (d * norm_sq).sqrt() + channels.constant[a].hypot(channels.constant[b]),
            rounding(a).hypot(rounding(b)),
        );
        (rotated[a], rotated[b]) = (true, true);
    }
    for c in (0..rotated.len()).filter(|&c| !rotated[c]) {
        include((d * channels.norm_sq[c]).sqrt() + channels.constant[c].abs(), rounding(c));
    }
    bound
}

/// Operand bound of a normalized head: from its gains and shifts.
fn normalised_operand(limit: &HeadLimit, share: f64) -> OperandBound {
    let exact = limit.channel();
    OperandBound { exact, rounded: exact * (1.0 + share) }
}
