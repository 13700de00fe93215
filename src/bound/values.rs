//! Bounds of a layer, as values.

use crate::error::{Error, Result};
use crate::named;
use crate::scale::Descale;
use serde::{Deserialize, Serialize};

/// Largest finite E4M3 value: what operand bounds are mapped onto.
pub const E4M3_MAX: f64 = 448.0;

/// Largest `|mean| / sqrt(variance + epsilon)` of a token for which bounds after a LayerNorm hold. A mean that is summed
/// in f32 with an error of at most 32 roundings (pairwise, by lanes or Welford's way) then moves the output by a thousandth of
/// its length, which the rounding share covers together with the roundings to BF16.
pub const LAYER_NORM_MEAN_LIMIT: f64 = 512.0;

named! {
    /// Which bound logit scales come from.
    pub enum BoundKind is "bound" default WorstCase {
        /// The worst-case bound: no normalized input exceeds it, rounding included.
        WorstCase = "worst-case",
        /// The paper's probabilistic bound, for isotropic tokens.
        RankAware = "rank-aware",
        /// A sharper probabilistic bound, for isotropic tokens.
        Spectrum = "spectrum",
    }
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
    /// Largest |m| that is subtracted from the values of each KV head, where `v` are bounds of what is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub m: Option<Vec<f64>>,
}

/// Bounds on |logit| of one query head. Fields are `None` where the estimator or the family cannot give them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeadBounds {
    /// From `||W_Q|| ||W_K||`.
    pub naive: Option<f64>,
    /// The worst case in exact arithmetic.
    pub exact: Option<f64>,
    /// The worst case with rounded operands: what worst-case scales come from.
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
    pub(super) fn times(self, factor: f64) -> Self {
        Self { exact: self.exact * factor, rounded: self.rounded * factor }
    }

    /// The one with the lower worst case of two bounds that both hold.
    pub(crate) fn lower(self, other: Self) -> Self {
        if self.rounded <= other.rounded { self } else { other }
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
    /// The bound that a logit scale of this kind comes from: `rounded` for [`BoundKind::WorstCase`].
    ///
    /// # Errors
    /// If the estimator or the family does not give this bound.
    pub fn for_scale(&self, kind: BoundKind) -> Result<f64> {
        let value = match kind {
            BoundKind::WorstCase => self.rounded,
            BoundKind::RankAware => self.rank_aware,
            BoundKind::Spectrum => self.spectrum,
        };
        value.ok_or_else(|| {
            Error::unsupported(format_args!(
                "there is no {} bound: it is made of the head's own spectrum, which the power estimator does not give, and which layers \
                 with latent attention or with q and k normalized after the projection do not have",
                kind.name()
            ))
        })
    }

    pub(super) fn capped(self, cap: Option<f64>) -> Self {
        let Some(cap) = cap else { return self };
        let low = |bound: Option<f64>| bound.map(|bound| bound.min(cap));
        Self {
            naive: low(self.naive),
            exact: low(self.exact),
            rounded: low(self.rounded),
            rank_aware: low(self.rank_aware),
            spectrum: low(self.spectrum),
        }
    }
}

impl LayerBounds {
    pub(super) fn check(&self) -> Result<()> {
        let operand =
            |name, heads: &[OperandBound]| heads.iter().map(move |bound| (name, bound.rounded)).collect::<Vec<_>>();
        let v = self.v.as_deref().unwrap_or_default();
        let operands = [operand("q", &self.q), operand("k", &self.k), operand("v", v)].concat();
        let logits = self.heads.iter().flat_map(|h| [h.naive, h.exact, h.rounded, h.rank_aware, h.spectrum]);
        let logits = logits.flatten().map(|bound| ("logits", bound));
        match operands.into_iter().chain(logits).find(|(_, bound)| !bound.is_finite()) {
            Some((what, bound)) => {
                Err(Error::non_finite(format_args!("{what}: the bound is {bound}, the weights are too large")))
            }
            None => Ok(()),
        }
    }
}
