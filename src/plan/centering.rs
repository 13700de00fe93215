//! Where centers come from, and what they do to the bounds of a layer.

use super::center::Center;
use crate::bound::{E4M3_MAX, HeadRange, LayerBounds, LayerRanges, OperandBound};
use crate::error::{Error, Result};
use crate::geometry::LayerGeometry;
use crate::model::{AttentionSpec, E4M3_ROUNDING, LayerSpec, LayerWeights};
use crate::named;
use crate::scale::Descale;
use serde::{Deserialize, Serialize};

/// Positions that the mean of a rotated bias is taken over: within 1.6 times the least error at any length up to 32768 on
/// Qwen2.5-Coder-0.5B, where the whole context is within 2.6.
pub const CENTER_POSITIONS: usize = 2048;

named! {
    /// Where a center comes from.
    pub enum CenterSource is "source of centers" default None {
        /// Nothing is subtracted.
        None = "none",
        /// The constant part that the weights give keys (its mean over positions, where it rotates) and values.
        Weights = "weights",
        /// The mean of the keys or values that a runtime has seen.
        Mean = "mean",
        /// The least worst-case bound in exact arithmetic; the mean of the bias has the smaller error.
        Minimax = "minimax",
    }
}

/// Which centers a model gets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CenterPolicy {
    /// Source of c.
    pub k: CenterSource,
    /// Source of m.
    pub v: CenterSource,
    /// Positions of the mean of a rotated bias, at most those of the model.
    pub positions: usize,
    /// Tokens that a mean is taken over before it is used.
    pub burn_in: u64,
    /// Weight of a step's own mean after the burn-in; 0 freezes the center, as a cache needs it.
    pub follow: f64,
}

impl CenterPolicy {
    /// Nothing is subtracted.
    pub const NONE: Self =
        Self { k: CenterSource::None, v: CenterSource::None, positions: CENTER_POSITIONS, burn_in: 512, follow: 0.0 };
    /// For an FP8 cache: c from the weights. No m, which gains nothing there, and one from data does harm.
    pub const CACHE: Self = Self { k: CenterSource::Weights, ..Self::NONE };

    /// Whether the parameters are in their ranges.
    ///
    /// # Errors
    /// `is_argument`, naming the parameter and its rule.
    pub fn check(&self) -> Result<()> {
        if self.positions == 0 || self.burn_in == 0 {
            return Err(Error::argument("`positions` and `burn_in` of a center must be at least 1"));
        }
        if !(0.0..=1.0).contains(&self.follow) {
            return Err(Error::argument(format_args!("`follow` {} of a center must lie in [0, 1]", self.follow)));
        }
        Ok(())
    }

    /// The same where there are weights and no tokens.
    ///
    /// # Errors
    /// As [`CenterPolicy::check`], and for [`CenterSource::Mean`].
    pub fn check_for_weights(&self) -> Result<()> {
        if [self.k, self.v].contains(&CenterSource::Mean) {
            return Err(Error::argument(
                "a center from means needs tokens, and here are weights alone: use weights or minimax",
            ));
        }
        self.check()
    }

    /// Where c of a layer comes from. Nowhere without rotation, which leaves a bias invisible to softmax and small, and nowhere
    /// with a soft-cap or sinks, which need each row's shift.
    pub fn keys(&self, spec: &AttentionSpec, layer: &LayerSpec) -> CenterSource {
        let applies = layer.rope.is_some() && spec.soft_cap.is_none() && !layer.sinks && layer.mla.is_none();
        if applies { self.k } else { CenterSource::None }
    }

    /// Where m of a layer comes from: nowhere with sinks, which take a share of each row that only the kernel knows.
    pub fn values(&self, layer: &LayerSpec) -> CenterSource {
        if layer.sinks || layer.mla.is_some() { CenterSource::None } else { self.v }
    }
}

impl Default for CenterPolicy {
    fn default() -> Self {
        Self::CACHE
    }
}

/// The center of a layer and the bounds of what is cast with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CenteredLayer {
    /// c and m.
    pub center: Center,
    /// Bounds of each KV head of `k - c`.
    pub k: Vec<OperandBound>,
    /// Bounds of each KV head of `v - m`; `None` where values have no bound.
    pub v: Option<Vec<OperandBound>>,
    /// Descales that cover `k - c`. Those of a plan cover k.
    pub k_descale: Vec<Descale>,
    /// Descales that cover `v - m`.
    pub v_descale: Option<Vec<Descale>>,
    /// The largest constant of a rotation pair of keys (of a channel that does not rotate), relative to the bound of k in exact
    /// arithmetic, per KV head; 0 without rotation, which leaves a bias invisible to softmax.
    pub bias_share: Vec<f64>,
    /// The bounds hold at positions below this; `None`: at all.
    pub positions: Option<usize>,
}

impl CenteredLayer {
    /// The center of a layer from its weights: everything but [`CenterSource::Mean`], which is none here. A head whose bound over
    /// the same positions it would not lower in exact arithmetic keeps zeros.
    ///
    /// # Errors
    /// If a constant is past the range of BF16 or a descale past that of f32.
    pub fn new(
        spec: &AttentionSpec,
        bounds: &LayerBounds,
        ranges: &LayerRanges,
        policy: &CenterPolicy,
    ) -> Result<Self> {
        policy.check()?;
        let layer = spec.layer(bounds.layer)?;
        let positions = ranges.positions.unwrap_or(policy.positions).min(policy.positions);
        let k = match policy.keys(spec, layer) {
            CenterSource::None | CenterSource::Mean => None,
            CenterSource::Weights => Some(
                ranges
                    .k
                    .iter()
                    .map(|head| {
                        ranges.rotary.as_ref().map_or(head.constant.clone(), |r| r.mean(&head.constant, positions))
                    })
                    .collect::<Vec<_>>(),
            ),
            CenterSource::Minimax => Some(ranges.k.iter().map(|head| head.minimax()).collect()),
        };
        let v = match policy.values(layer) {
            CenterSource::None | CenterSource::Mean => None,
            CenterSource::Weights => ranges.v.as_ref().map(|v| v.iter().map(|head| head.constant.clone()).collect()),
            CenterSource::Minimax => ranges.v.as_ref().map(|v| v.iter().map(|head| head.minimax()).collect()),
        };
        let mut center = Center::new(bounds.layer, k, v)?;
        let keep = |rows: &mut Option<Vec<Vec<f32>>>, ranges: &[HeadRange]| {
            for (row, range) in rows.iter_mut().flatten().zip(ranges) {
                if range.bound(row).exact >= range.plain().exact {
                    row.fill(0.0);
                }
            }
            *rows = rows.take().filter(|rows| rows.iter().flatten().any(|x| *x != 0.0));
        };
        keep(&mut center.k, &ranges.k);
        keep(&mut center.v, ranges.v.as_deref().unwrap_or_default());
        Self::with(center, bounds, ranges)
    }

    /// The layer with any center, one from data too: the bounds are exact for it, and never above those of k and v by more than
    /// |c| and |m| and what they add to roundings.
    ///
    /// # Errors
    /// `is_mismatch` if the center is of another shape; if a descale leaves the range of f32.
    pub fn with(center: Center, bounds: &LayerBounds, ranges: &LayerRanges) -> Result<Self> {
        let (n_kv, d_head) = (ranges.k.len(), ranges.k.first().map_or(0, |head| head.high.len()));
        let d_v = ranges.v.as_ref().and_then(|v| v.first()).map_or(d_head, |head| head.high.len());
        center.check(n_kv, d_head, d_v)?;
        let of = |rows: &Option<Vec<Vec<f32>>>, ranges: &[HeadRange], plain: &[OperandBound]| {
            let bound = |head: usize| match rows {
                // A head of zeros may use that positions are limited, too.
                Some(rows) if rows[head].iter().all(|c| *c == 0.0) => ranges[head].plain().lower(plain[head]),
                Some(rows) => ranges[head].bound(&rows[head]),
                None => plain[head],
            };
            (0..plain.len()).map(bound).collect::<Vec<_>>()
        };
        let k = of(&center.k, &ranges.k, &bounds.k);
        let v = match (&ranges.v, &bounds.v) {
            (Some(ranges), Some(plain)) => Some(of(&center.v, ranges, plain)),
            (_, plain) => {
                if center.v.is_some() {
                    return Err(Error::unsupported("values without a bound have no scale that a center could change"));
                }
                plain.clone()
            }
        };
        let descales = |bounds: &[OperandBound]| bounds.iter().map(|bound| bound.descale()).collect::<Result<Vec<_>>>();
        let bias_share = ranges.k.iter().zip(&bounds.k).map(|(head, bound)| {
            let constant = ranges.largest_constant(head);
            if bound.exact > 0.0 && ranges.rotary.is_some() { constant / bound.exact } else { 0.0 }
        });
        Ok(Self {
            k_descale: descales(&k)?,
            v_descale: v.as_deref().map(descales).transpose()?,
            bias_share: bias_share.collect(),
            positions: ranges.positions,
            center,
            k,
            v,
        })
    }

    /// Whether the weights give rotated keys a constant part, or anything is subtracted.
    pub fn matters(&self) -> bool {
        !self.center.is_none() || self.bias_share.iter().any(|share| *share > 0.0)
    }

    /// The center of a layer by its weights, read once, beside the bounds of k and v as they are. `None` with latent attention,
    /// whose cache holds neither.
    ///
    /// # Errors
    /// As [`LayerGeometry::new`] and [`CenteredLayer::new`].
    pub fn of_weights(
        spec: &AttentionSpec,
        weights: LayerWeights<'_>,
        policy: &CenterPolicy,
    ) -> Result<Option<(LayerBounds, Self)>> {
        Self::of(spec, weights, |bounds, ranges| Self::new(spec, bounds, ranges, policy))
    }

    /// The same with a center that was stored.
    ///
    /// # Errors
    /// As [`LayerGeometry::new`] and [`CenteredLayer::with`].
    pub fn of_stored(
        spec: &AttentionSpec,
        weights: LayerWeights<'_>,
        center: Center,
    ) -> Result<Option<(LayerBounds, Self)>> {
        Self::of(spec, weights, |bounds, ranges| Self::with(center, bounds, ranges))
    }

    fn of(
        spec: &AttentionSpec,
        weights: LayerWeights<'_>,
        make: impl FnOnce(&LayerBounds, &LayerRanges) -> Result<Self>,
    ) -> Result<Option<(LayerBounds, Self)>> {
        if weights.mla.is_some() {
            return Ok(None);
        }
        let geometry = LayerGeometry::new(spec, weights)?;
        let (bounds, ranges) = LayerBounds::operands_and_ranges(spec, &geometry)?;
        let layer = make(&bounds, &ranges).map_err(|error| error.within(&geometry.place))?;
        Ok(Some((bounds, layer)))
    }
}

/// A layer's bounds with those of `k - c` and `v - m` in place of those of k and v: exact where ranges are known, and with |c| and
/// |m| added where not. Logits stay those of the model; their bound with rounded operands grows by what rounding c with the
/// keys can add.
///
/// # Errors
/// As [`CenteredLayer::with`]; `is_argument` if there is no such layer.
pub fn centered_bounds(
    spec: &AttentionSpec,
    plain: &LayerBounds,
    ranges: Option<&LayerRanges>,
    center: &Center,
) -> Result<LayerBounds> {
    let layer = spec.layer(plain.layer)?;
    let amax = |rows: &Option<Vec<Vec<f32>>>| Center::amax(rows.as_ref());
    let (largest_c, largest_m) = (amax(&center.k), amax(&center.v));
    let mut out = match ranges {
        None => plain.clone().around(largest_c.as_deref(), largest_m.as_deref()),
        Some(ranges) => {
            let CenteredLayer { k, v, .. } = CenteredLayer::with(center.clone(), plain, ranges)?;
            LayerBounds { k, v, m: largest_m, ..plain.clone() }
        }
    };
    let Some(c) = &center.k else { return Ok(out) };
    let root = (layer.d_head as f64).sqrt();
    for (head, bounds) in out.heads.iter_mut().enumerate() {
        let kv_head = head * plain.k.len() / plain.heads.len();
        let length = c[kv_head].iter().map(|c| f64::from(*c).powi(2)).sum::<f64>().sqrt();
        // `||q8||` by its largest channel; subnormals by the wider of the two scales.
        let q = plain.q[head].rounded;
        let q8 = root * (q * (1.0 + E4M3_ROUNDING) + q / E4M3_MAX);
        let step = (out.k[kv_head].rounded - plain.k[kv_head].rounded).max(0.0) / E4M3_MAX;
        if let Some(rounded) = &mut bounds.rounded {
            *rounded += layer.softmax_scale * q8 * (length * E4M3_ROUNDING + root * step);
            *rounded = spec.soft_cap.map_or(*rounded, |cap| rounded.min(cap));
        }
    }
    Ok(out)
}

/// The layer whose center a layer's calls take: that of the layer whose keys and values it reads.
///
/// # Errors
/// `is_argument` if there is no such layer.
pub fn center_layer(spec: &AttentionSpec, layer: usize) -> Result<usize> {
    let source = spec.layer(layer)?.kv_source;
    Ok(source.and_then(|number| spec.layers.iter().position(|other| other.number == number)).unwrap_or(layer))
}
