//! Bounds of a layer with multi-head latent attention.
//!
//! Two forms of it run. **Expanded**, as prefill does: q, k and v of each head, of `d_nope + d_rope` and `d_value` channels.
//! **Absorbed**, as decoding does: a cached row `[c, k_pe]` for all heads, which is the values too, and a query
//! `[K^T q_nope, q_pe]`, K without the latent's gain, which the cache holds. The logits are the same.
//!
//! An FP8 cache has one scale for the whole row. k and v of the expanded form may be made of what such a cache gives back, so
//! their bounds with rounding count it.

use super::layer::{SUBNORMAL_ERROR, floor, operand, rounding_gap};
use super::values::{E4M3_MAX, HeadBounds, LayerBounds, OperandBound};
use crate::error::{Error, Result};
use crate::geometry::{Channels, MlaGeometry};
use crate::model::{AttentionSpec, E4M3_ROUNDING, LayerWeights};
use crate::spectral::{AbsorbedChannel, MlaOperands, MlaSpectrum};

/// Bounds of one layer with latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaBounds {
    /// q, k and v of the expanded form, and the logits of both forms.
    pub expanded: LayerBounds,
    /// Bound on the cached latent, which values and outputs of the absorbed form share.
    pub latent: OperandBound,
    /// Bound on the shared rotated key, as it is cached.
    pub k_pe: OperandBound,
    /// Bound on the absorbed query of each head, its rotated part included.
    pub absorbed_q: Vec<OperandBound>,
}

impl OperandBound {
    /// What covers both.
    fn max(self, other: Self) -> Self {
        Self { exact: self.exact.max(other.exact), rounded: self.rounded.max(other.rounded) }
    }
}

impl MlaBounds {
    /// All bounds of a layer.
    ///
    /// # Errors
    /// As [`MlaGeometry::new`] and [`MlaSpectrum::new`]; `is_non_finite` if a bound leaves the range of f64.
    pub fn new(spec: &AttentionSpec, weights: LayerWeights<'_>) -> Result<Self> {
        let geometry = MlaGeometry::new(spec, weights)?;
        let spectrum = MlaSpectrum::new(&geometry)?;
        Self::checked(&geometry, &spectrum.operands, Some(&spectrum))
    }

    /// Only the operand bounds, the same bits as in [`MlaBounds::new`]: no logit bound, so `expanded.heads` is empty.
    ///
    /// # Errors
    /// As [`MlaBounds::new`].
    pub fn operands(spec: &AttentionSpec, weights: LayerWeights<'_>) -> Result<Self> {
        let geometry = MlaGeometry::new(spec, weights)?;
        Self::checked(&geometry, &MlaOperands::new(&geometry)?, None)
    }

    fn checked(geometry: &MlaGeometry<'_>, channels: &MlaOperands, spectrum: Option<&MlaSpectrum>) -> Result<Self> {
        let bounds = Self::of(geometry, channels, spectrum);
        bounds.check().map_err(|error| error.within(&geometry.place))?;
        Ok(bounds)
    }

    fn check(&self) -> Result<()> {
        let operands = [self.latent, self.k_pe].into_iter().chain(self.absorbed_q.iter().copied());
        match operands.map(|bound| bound.rounded).find(|bound| !bound.is_finite()) {
            Some(bound) => Err(Error::non_finite(format_args!("a bound is {bound}"))),
            None => self.expanded.check(),
        }
    }

    /// Bound on a cached row: the scale of an FP8 cache is its descale.
    pub fn cache(&self) -> OperandBound {
        self.latent.max(self.k_pe)
    }

    fn of(geometry: &MlaGeometry<'_>, channels: &MlaOperands, spectrum: Option<&MlaSpectrum>) -> Self {
        let share = geometry.rounding;
        let (d, rank) = (geometry.d_model as f64, geometry.latent_radius_square());
        let largest_gain = geometry.latent_gain.iter().fold(0.0, |most: f64, g| most.max(g.abs()));
        let latent = rank.sqrt() * largest_gain;
        let latent = OperandBound { exact: latent, rounded: latent * (1.0 + share.latent) };
        let cached_k_pe = operand(d, &channels.k_pe, geometry.k_pe_pairs(), share.k_pe);
        let cache = latent.max(cached_k_pe);

        // What E4M3 numbers under the normal ones take from a latent: in the cache, and where a product reads it in E4M3.
        let flush = SUBNORMAL_ERROR / E4M3_MAX;
        let mut error = rank.sqrt() * flush * cache.rounded;
        if geometry.fp8_inputs {
            error = (1.0 + E4M3_ROUNDING) * (error + rank.sqrt() * flush * latent.rounded);
        }
        let from_latent = |channels: &[Channels], share: f64| -> Vec<(OperandBound, f64)> {
            let one = |channels: &Channels| {
                let errors = channels.floor.iter().map(|unit| unit * error).collect();
                let channels = Channels { floor: errors, ..channels.clone() };
                (operand(rank, &channels, &[], share), floor(&channels))
            };
            channels.iter().map(one).collect()
        };
        // The rotated key leaves the cache with an error relative to itself.
        let read = cached_k_pe.rounded * (1.0 + E4M3_ROUNDING) + flush * cache.rounded;
        let rotated = OperandBound { rounded: read, ..cached_k_pe };
        let keys = from_latent(&channels.k, share.k);
        let k: Vec<OperandBound> = keys.iter().map(|(nope, _)| nope.max(rotated)).collect();
        let v = from_latent(&channels.v, share.v).into_iter().map(|(bound, _)| bound).collect();
        let pairs = geometry.q_pairs();
        let q_square = geometry.q_radius_square();
        let q: Vec<OperandBound> =
            channels.q.iter().map(|channels| operand(q_square, channels, &pairs, share.q)).collect();

        // A product with K may round its input to E4M3 by the scale of all heads.
        let step = |heads: &[OperandBound]| heads.iter().map(|head| head.rounded).fold(0.0, f64::max) * flush;
        let input_step = if geometry.fp8_inputs { step(&q) } else { 0.0 };
        let absorbed_q: Vec<OperandBound> = channels
            .absorbed
            .iter()
            .zip(&channels.q)
            .map(|(absorbed, q)| absorbed_query(geometry, absorbed, q, input_step))
            .collect();

        let steps = Steps {
            q: step(&q),
            k: step(&k),
            absorbed_q: step(&absorbed_q),
            cache: cache.rounded * flush,
            input: input_step,
        };
        let head = |spectrum: &MlaSpectrum, head: usize| {
            let floor_k = keys[head].1.hypot(floor(&channels.k_pe));
            logits(geometry, spectrum, head, floor_k, largest_gain, &steps).capped(geometry.soft_cap)
        };
        let heads = spectrum.map(|spectrum| (0..q.len()).map(|h| head(spectrum, h)).collect()).unwrap_or_default();
        let grown = |bounds: Vec<OperandBound>| -> Vec<OperandBound> {
            bounds.into_iter().map(|bound| bound.times(geometry.query_factor)).collect()
        };
        Self {
            expanded: LayerBounds { layer: geometry.layer, heads, q: grown(q), k, v: Some(v), m: None },
            latent,
            k_pe: cached_k_pe,
            absorbed_q: grown(absorbed_q),
        }
    }
}

/// Largest absolute errors of elements under the normal numbers of E4M3.
struct Steps {
    q: f64,
    k: f64,
    absorbed_q: f64,
    cache: f64,
    /// Of q_nope, where the product with K reads it in E4M3.
    input: f64,
}

/// Bound on the absorbed query of a head, without the factor that grows.
fn absorbed_query(
    geometry: &MlaGeometry<'_>,
    absorbed: &[AbsorbedChannel],
    q: &Channels,
    input_step: f64,
) -> OperandBound {
    let share = geometry.rounding.absorbed_q;
    let root = geometry.q_radius_square().sqrt();
    let latent = absorbed.iter().fold(OperandBound { exact: 0.0, rounded: 0.0 }, |bound, channel| {
        let exact = root * channel.norm;
        let error = share * root * channel.amplitude + channel.floor + channel.sum * input_step;
        bound.max(OperandBound { exact, rounded: exact + error })
    });
    // The rotated part is that of the expanded form.
    let n = geometry.mla.d_nope;
    let rope = |values: &[f64]| values[n..].to_vec();
    let channels = Channels {
        norm_sq: rope(&q.norm_sq),
        folded_sq: rope(&q.folded_sq),
        constant: rope(&q.constant),
        spread: rope(&q.spread),
        floor: rope(&q.floor),
        mean: vec![],
        pair_dot: q.pair_dot.clone(),
    };
    latent.max(operand(geometry.q_radius_square(), &channels, geometry.k_pe_pairs(), geometry.rounding.q))
}

/// Bounds on the logits of a head.
fn logits(
    geometry: &MlaGeometry<'_>,
    spectrum: &MlaSpectrum,
    head: usize,
    floor_k: f64,
    largest_gain: f64,
    steps: &Steps,
) -> HeadBounds {
    let (tau, share, mla) = (geometry.softmax_scale, geometry.rounding, geometry.mla);
    let (facts, channels) = (&spectrum.heads[head], &spectrum.operands);
    let (q, k, k_pe) = (&channels.q[head], &channels.k[head], &channels.k_pe);
    let [root_q, root_c, root] =
        [geometry.q_radius_square(), geometry.latent_radius_square(), geometry.d_model as f64].map(f64::sqrt);
    let length = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let frobenius = |channels: &Channels| channels.folded_sq.iter().sum::<f64>().sqrt();
    let exact = tau * (facts.logit + facts.constant);
    let rotated = root * spectrum.norm_k_pe + length(&k_pe.spread);
    // Relative errors of inputs and results pass through norms; those of weights add up element by element.
    let again = 1.0 + E4M3_ROUNDING;
    let weights = share.weights;
    let weights_k_pe = weights.k_pe * root * frobenius(k_pe);

    let sizes = (root_q * facts.norm_q, (root_c * facts.norm_k).hypot(rotated));
    let width = ((mla.d_nope + mla.d_rope) as f64).sqrt();
    let errors = (
        width * steps.q + again * (floor(q) + weights.q * root_q * frobenius(q)),
        width * steps.k + again * (floor_k + (weights.k * root_c * frobenius(k)).hypot(weights_k_pe)),
    );
    // Of the rotated key as it leaves the cache, too.
    let share_k = share.k.max((1.0 + share.k_pe) * again - 1.0);
    let expanded = rounding_gap(tau, (share.q, share_k), sizes.0 * sizes.1, sizes, errors);

    let sizes_absorbed =
        (root_q * (facts.norm_nope * facts.norm_k_raw).hypot(facts.norm_rope), (root_c * largest_gain).hypot(rotated));
    let width = ((mla.kv_rank + mla.d_rope) as f64).sqrt();
    let query = floor(q) + weights.q * root_q * frobenius(q) + (mla.d_nope as f64).sqrt() * steps.input;
    // Errors of an input of length 1 to each channel of K: the lengths of its rows, without the latent's gain.
    let weights_k = weights.k * floor(k) * root_q * facts.norm_nope;
    let errors = (
        width * steps.absorbed_q + again * (query * facts.norm_k_raw.max(1.0) + weights_k),
        width * steps.cache + again * (floor(k_pe) + weights_k_pe),
    );
    let shares = (share.absorbed_q.max(share.q), share.latent.max(share.k_pe));
    let absorbed = rounding_gap(tau, shares, sizes_absorbed.0 * sizes_absorbed.1, sizes_absorbed, errors);
    HeadBounds {
        naive: Some(tau * sizes.0 * sizes.1),
        exact: Some(exact),
        rounded: Some(exact + expanded.max(absorbed)),
        ..HeadBounds::default()
    }
}
