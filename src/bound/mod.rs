//! Bounds on logits and operands.
//!
//! | bound | promise |
//! |---|---|
//! | `certain` | no token on the norm's sphere passes it, in exact arithmetic |
//! | `rounded` | nor with q and k rounded to BF16 on the way and to E4M3 in the end; what logit descales come from |
//! | `rank_aware` | the paper's `c_star`, on sound per-head norms; holds with probability 1 - delta **for isotropic tokens** |
//! | `spectrum` | sharper, same assumption |
//! | `naive` | `||W_Q|| ||W_K||` (Proposition 3.1), for comparison |
//!
//! All include norm gains, mean removal, shifts, biases, rotation, the family's softmax scale and soft-cap; all are on
//! the logit before the mask. Without constants the certain bound is the paper's worst case `tau d sigma` (Eq. 7) on
//! the effective, rotation-proof norm.
//!
//! # Limits
//!
//! The promise is about the norm's output, so it ends where the norm's own arithmetic in f32 does. An RMSNorm keeps it for
//! every finite token. A LayerNorm subtracts a mean whose rounding error is relative to the token and not to what is left of
//! it: bounds hold for tokens of `|mean| <= 512 sqrt(variance + epsilon)` ([`LAYER_NORM_MEAN_LIMIT`]). Beyond it the
//! output can keep a mean that the bounds take to be removed: a constant token of 1e6 has passed a bound 3.8 times.

mod device;
mod tail;

pub use device::{HeadBound, HeadFrobenius, Isotropic, check_device, isotropic};
pub use tail::{CStar, Tail, sphere_factor};

use crate::error::{Error, Result};
use crate::geometry::{Channels, HeadLimit, LayerGeometry};
use crate::model::{AttentionSpec, E4M3_ROUNDING, RoundingShare};
use crate::scale::Descale;
use crate::spectral::{HeadSpectrum, LayerSpectrum};
use serde::{Deserialize, Serialize};

/// Largest finite E4M3 value: what operand bounds are mapped onto.
pub const E4M3_MAX: f64 = 448.0;

/// Largest `|mean| / sqrt(variance + epsilon)` of a token under which bounds behind a LayerNorm hold. A mean that is summed
/// in f32 with an error of at most 32 roundings (pairwise, by lanes or Welford's way) then moves the output by a thousandth of
/// its length, which the rounding share covers beside the roundings to BF16.
pub const LAYER_NORM_MEAN_LIMIT: f64 = 512.0;

/// Absolute error of an E4M3 subnormal, in units of its descale.
const SUBNORMAL_ERROR: f64 = 1.0 / 1024.0;

/// Which bound logit scales come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BoundKind {
    /// No token can pass it.
    #[default]
    Certain,
    /// The paper's, for isotropic tokens.
    RankAware,
    /// Sharper, for isotropic tokens.
    Spectrum,
}

/// Bounds of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerBounds {
    /// Index among the layers with attention; the model's own number is that of its spec.
    pub layer: usize,
    /// Logit bounds, `n_q`.
    pub heads: Vec<HeadBounds>,
    /// Bound on |q| of each query head.
    pub q: Vec<OperandBound>,
    /// Bound on |k| of each KV head.
    pub k: Vec<OperandBound>,
    /// Bound on |v| of each KV head; `None` where the projection's input has no norm.
    pub v: Option<Vec<OperandBound>>,
}

/// Bounds on |logit| of one query head. Fields are `None` where the estimator or the family cannot give them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeadBounds {
    /// From `||W_Q|| ||W_K||`.
    pub naive: Option<f64>,
    /// Certain, exact arithmetic.
    pub certain: Option<f64>,
    /// Certain, rounded operands.
    pub rounded: Option<f64>,
    /// Isotropic: the paper's.
    pub rank_aware: Option<f64>,
    /// Isotropic: sharper.
    pub spectrum: Option<f64>,
}

/// Bound on the values of one head of q, k or v.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperandBound {
    /// In exact arithmetic.
    pub exact: f64,
    /// With the roundings of a BF16 forward, channel by channel: `exact + share A`, see
    /// [`AttentionSpec::rounding_share`](crate::model::AttentionSpec::rounding_share), and where the projections read
    /// their input in E4M3 what elements too small for its normal numbers add.
    pub rounded: f64,
}

impl OperandBound {
    fn times(self, factor: f64) -> Self {
        Self { exact: self.exact * factor, rounded: self.rounded * factor }
    }

    /// The descale under which no value can overflow E4M3.
    ///
    /// # Errors
    /// If the bound is beyond f32.
    pub fn descale(&self) -> Result<Descale> {
        Descale::covering(self.rounded, E4M3_MAX)
    }
}

impl HeadBounds {
    /// The bound that a logit scale of this kind comes from: `rounded` for certain.
    ///
    /// # Errors
    /// If the estimator or the family does not give this bound.
    pub fn for_scale(&self, kind: BoundKind) -> Result<f64> {
        let (value, name) = match kind {
            BoundKind::Certain => (self.rounded, "certain"),
            BoundKind::RankAware => (self.rank_aware, "rank-aware"),
            BoundKind::Spectrum => (self.spectrum, "spectrum"),
        };
        value.ok_or_else(|| {
            Error::unsupported(format_args!(
                "there is no {name} bound: it is made of the head's own spectrum, which the power estimator does not give and layers \
                 that normalise q and k after the projection do not have"
            ))
        })
    }
}

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
        let share = geometry.rounding;
        let (q, k) = match &geometry.qk_limits {
            Some(limits) => (
                limits.q.iter().map(|limit| normalised_operand(limit, share.q)).collect::<Vec<_>>(),
                limits.k.iter().map(|limit| normalised_operand(limit, share.k)).collect::<Vec<_>>(),
            ),
            None => {
                let pairs = geometry.rotary_pairs();
                let bound = |heads: &[Channels], share: f64| -> Vec<_> {
                    heads.iter().map(|channels| operand(geometry, channels, &pairs, share)).collect()
                };
                (bound(&spectrum.q, share.q), bound(&spectrum.k, share.k))
            }
        };
        let v = geometry
            .input_bounded
            .then(|| spectrum.v.iter().map(|channels| operand(geometry, channels, &[], share.v)).collect::<Vec<_>>());
        let constants = ModelConstants::new(spec, tail)?;
        // Heads may share the layer's largest scale, whose E4M3 subnormals are the coarsest.
        let step = |heads: &[OperandBound]| heads.iter().map(|head| head.rounded).fold(0.0, f64::max) / E4M3_MAX;
        let steps = (step(&q), step(&k));
        let mut heads = Vec::with_capacity(geometry.q.len());
        for head in 0..geometry.q.len() {
            let kv_head = geometry.kv_head(head);
            let bounds = match &spectrum.heads {
                Some(spectra) => {
                    let floors = (floor(&spectrum.q[head]), floor(&spectrum.k[kv_head]));
                    projected_head(geometry, &spectra[head], steps, floors, &constants)
                }
                None => normalised_head(geometry, head, kv_head, steps)?,
            };
            heads.push(bounds.capped(geometry.soft_cap));
        }
        let q = q.into_iter().map(|bound| bound.times(geometry.query_factor)).collect();
        let bounds = Self { layer: geometry.layer, heads, q, k, v };
        bounds.check().map_err(|error| error.within(&geometry.place))?;
        Ok(bounds)
    }

    fn check(&self) -> Result<()> {
        let operands = self.q.iter().chain(&self.k).chain(self.v.iter().flatten()).map(|bound| bound.rounded);
        let logits = self.heads.iter().flat_map(|h| [h.naive, h.certain, h.rounded, h.rank_aware, h.spectrum]);
        match operands.chain(logits.flatten()).find(|bound| !bound.is_finite()) {
            Some(bound) => Err(Error::non_finite(format_args!("a bound is {bound}"))),
            None => Ok(()),
        }
    }
}

impl HeadBounds {
    fn capped(self, cap: Option<f64>) -> Self {
        let Some(cap) = cap else { return self };
        let low = |bound: Option<f64>| bound.map(|bound| bound.min(cap));
        Self {
            naive: low(self.naive),
            certain: low(self.certain),
            rounded: low(self.rounded),
            rank_aware: low(self.rank_aware),
            spectrum: low(self.spectrum),
        }
    }
}

/// Logarithms of the union bound, the same for every head of a model.
struct ModelConstants {
    c_star: f64,
    c_star_halved: f64,
    /// `ln(8 N L^2 / delta)`: the linear terms beside `c_star(delta / 2)`.
    t_rank_aware: f64,
    /// Off-diagonal entries, without and with constants; twice as many pairs where attention is not causal.
    t_spectrum: (f64, f64),
    /// Diagonal entries.
    x_diagonal: f64,
    sphere: f64,
}

impl ModelConstants {
    fn new(spec: &AttentionSpec, tail: &Tail) -> Result<Self> {
        let pairs = if spec.causal { 1.0 } else { 2.0 };
        Ok(Self {
            c_star: tail.c_star(spec)?.c_star,
            c_star_halved: tail.halved().c_star(spec)?.c_star,
            t_rank_aware: tail.log_union(8.0, spec, 2),
            t_spectrum: (tail.log_union(2.0 * pairs, spec, 2), tail.log_union(6.0 * pairs, spec, 2)),
            x_diagonal: tail.log_union(4.0, spec, 1),
            sphere: sphere_factor(spec),
        })
    }
}

/// Bounds of a head whose q and k are affine in the normalised token.
fn projected_head(
    geometry: &LayerGeometry<'_>,
    spectrum: &HeadSpectrum,
    (step_q, step_k): (f64, f64),
    (floor_q, floor_k): (f64, f64),
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
    let certain = tau * (d * sigma + root * (c.a + c.b) + c.c0);
    bounds.certain = Some(certain);
    bounds.naive = Some(tau * (root * exact.sigma_q_upper + c.norm_q) * (root * exact.sigma_k_upper + c.norm_k));

    // |q8 . k8 - q . k| <= (||q|| + ||dq||)(||k|| + ||dk||) - ||q|| ||k||, with ||dq|| <= e_q N_Q + sqrt(r) 2^-10 s_q, and where
    // inputs are rounded to E4M3 what their small elements add.
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
    let flushes = (flush * step_q + (1.0 + E4M3_ROUNDING) * floor_q, flush * step_k + (1.0 + E4M3_ROUNDING) * floor_k);
    bounds.rounded = Some(certain + rounding_gap(tau, geometry.rounding, product, (size_q, size_k), flushes));

    let t = if c.any() { model.t_spectrum.1 } else { model.t_spectrum.0 };
    let linear = (2.0 * t).sqrt() * (c.a + c.b);
    let off_diagonal = (2.0 * t).sqrt() * exact.frobenius_rope_upper + t * sigma;
    // The relative position is 0 on the diagonal; tr(C C) <= F^2.
    let x = model.x_diagonal;
    let diagonal = exact.trace.abs() + 2.0 * x.sqrt() * exact.frobenius_rope_upper + 2.0 * sigma * x;
    bounds.spectrum = Some(tau * (model.sphere * (off_diagonal.max(diagonal) + linear) + c.c0));
    bounds
}

/// Length of what small elements of an input in E4M3 add to a head.
fn floor(channels: &Channels) -> f64 {
    channels.floor.iter().map(|error| error * error).sum::<f64>().sqrt()
}

/// `tau [(e_Q e_K - 1) N + e_Q N_Q f_K + e_K N_K f_Q + f_Q f_K]`, N at most N_Q N_K: what meets relative errors on both sides.
/// `e = (1 + 1/17)(1 + share)`: what E4M3 rounding and what came before it together can make of q or k.
fn rounding_gap(
    tau: f64,
    share: RoundingShare,
    product: f64,
    (size_q, size_k): (f64, f64),
    (flush_q, flush_k): (f64, f64),
) -> f64 {
    // Zeros stay zeros.
    if size_q == 0.0 || size_k == 0.0 {
        return 0.0;
    }
    let factor = |share: f64| (1.0 + E4M3_ROUNDING) * (1.0 + share);
    let (q, k) = (factor(share.q), factor(share.k));
    tau * ((q * k - 1.0) * product + q * size_q * flush_k + k * size_k * flush_q + flush_q * flush_k)
}

/// Bounds of a head whose q and k are normalised after the projection: `tau r max_b(gq_b gk_b)`, from the gains alone.
fn normalised_head(
    geometry: &LayerGeometry<'_>,
    head: usize,
    kv_head: usize,
    (step_q, step_k): (f64, f64),
) -> Result<HeadBounds> {
    let limits = geometry.qk_limits.as_ref().ok_or_else(|| {
        Error::unsupported("a layer without head spectra and without normalised q and k has no bound")
    })?;
    let (q, k, tau) = (&limits.q[head], &limits.k[kv_head], geometry.softmax_scale);
    let certain = if limits.shifted {
        tau * q.norm() * k.norm()
    } else {
        let product = q.pair_gain.iter().zip(&k.pair_gain).map(|(a, b)| a * b).fold(0.0, f64::max);
        tau * q.radius * k.radius * product
    };
    let flush = (geometry.d_head as f64).sqrt() * SUBNORMAL_ERROR;
    // The norm sees whatever rounding came before it, and bounds it all the same.
    let sizes = (q.norm(), k.norm());
    let flushes = (flush * step_q, flush * step_k);
    let rounded = certain + rounding_gap(tau, geometry.rounding, sizes.0 * sizes.1, sizes, flushes);
    Ok(HeadBounds {
        naive: Some(tau * q.norm() * k.norm()),
        certain: Some(certain),
        rounded: Some(rounded),
        ..HeadBounds::default()
    })
}

/// `B = sqrt(d) ||w_c|| + |c_c|` and `A = sqrt(d) ||diag(g) w_c|| + sum |beta_i w_ic| + |b_c|`, the largest channel; for a
/// rotation pair the spectral norm of its two columns and the length of its constants.
fn operand(geometry: &LayerGeometry<'_>, channels: &Channels, pairs: &[(usize, usize)], share: f64) -> OperandBound {
    let d = geometry.d_model as f64;
    let rounding = |c: usize| share * ((d * channels.folded_sq[c]).sqrt() + channels.spread[c]) + channels.floor[c];
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

/// Operand bound of a normalised head: from its gains and shifts.
fn normalised_operand(limit: &HeadLimit, share: f64) -> OperandBound {
    let exact = limit.channel();
    OperandBound { exact, rounded: exact * (1.0 + share) }
}
