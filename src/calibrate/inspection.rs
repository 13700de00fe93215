//! The spectral profile of a checkpoint. Its serialized form is the JSON of `sigmascale inspect`.

use super::profile::{CenterProfile, HeadProfile, LayerProfile, MlaProfile, ModelSummary, Profile};
use serde::Serialize;

/// The profile. Numbers are null where q and k are normalized after the projection.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// The model.
    pub model: ModelSummary,
    /// One entry per layer.
    pub layers: Vec<LayerInspection>,
}

/// One layer: statistics over its heads, then the heads.
#[derive(Clone, Debug, Serialize)]
pub struct LayerInspection {
    /// Place among the layers that have attention.
    pub layer: usize,
    /// The model's own number of the layer.
    pub number: usize,
    /// Effective norm: gain folded, mean removed, unrotated.
    pub sigma: Option<Statistics>,
    /// Plain norm.
    pub sigma_raw: Option<Statistics>,
    /// `frobenius^2 / sigma^2`.
    pub stable_rank: Option<Statistics>,
    /// `sigma_rope / sigma`.
    pub rope_ratio: Option<Statistics>,
    /// The paper's summed matrix.
    pub sigma_sum: Option<f64>,
    /// Largest bound on a logit, in exact arithmetic.
    pub bound_exact: Option<f64>,
    /// The worst-case bound: the same including rounding. Logit descales come from it.
    pub bound_rounded: Option<f64>,
    /// What centers change; absent where keys have no constant part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub center: Option<CenterProfile>,
    /// Latent attention: what its cache needs. Absent without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mla: Option<MlaProfile>,
    /// The query heads.
    pub heads: Vec<HeadInspection>,
}

/// One query head; see [`HeadProfile`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HeadInspection {
    /// Query head.
    pub head: usize,
    /// The KV head it reads.
    pub kv_head: usize,
    /// Effective, unrotated norm.
    pub sigma: Option<f64>,
    /// Raw norm.
    pub sigma_raw: Option<f64>,
    /// Bound over every relative position.
    pub sigma_rope: Option<f64>,
    /// `sigma_rope / sigma`; null for a head of zeros.
    pub rope_ratio: Option<f64>,
    /// Frobenius norm.
    pub frobenius: Option<f64>,
    /// `frobenius^2 / sigma^2`.
    pub stable_rank: Option<f64>,
    /// Bound on a logit, in exact arithmetic.
    pub bound_exact: Option<f64>,
    /// The worst-case bound: the same including rounding.
    pub bound_rounded: Option<f64>,
}

/// Smallest, mean and largest of a quantity over the heads of a layer.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Statistics {
    /// Smallest.
    pub min: f64,
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
}

impl Statistics {
    /// Of the values there are; `None` without any.
    fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let values: Vec<f64> = values.flatten().collect();
        let min = values.iter().copied().reduce(f64::min)?;
        let max = values.iter().copied().reduce(f64::max)?;
        Some(Self { min, mean: values.iter().sum::<f64>() / values.len() as f64, max })
    }
}

impl HeadInspection {
    fn new(head: &HeadProfile) -> Self {
        // A zero head has no ratio.
        let ratio = head.sigma_rope.zip(head.sigma).filter(|(_, sigma)| *sigma > 0.0).map(|(rope, sigma)| rope / sigma);
        Self {
            head: head.head,
            kv_head: head.kv_head,
            sigma: head.sigma,
            sigma_raw: head.sigma_raw,
            sigma_rope: head.sigma_rope,
            rope_ratio: ratio,
            frobenius: head.frobenius,
            stable_rank: head.stable_rank,
            bound_exact: head.bound_exact,
            bound_rounded: head.bound_rounded,
        }
    }
}

impl LayerInspection {
    fn new(profile: &LayerProfile) -> Self {
        let heads: Vec<HeadInspection> = profile.heads.iter().flatten().map(HeadInspection::new).collect();
        let statistics = |value: fn(&HeadInspection) -> Option<f64>| Statistics::of(heads.iter().map(value));
        Self {
            layer: profile.layer,
            number: profile.number,
            sigma: statistics(|head| head.sigma),
            sigma_raw: statistics(|head| head.sigma_raw),
            stable_rank: statistics(|head| head.stable_rank),
            rope_ratio: statistics(|head| head.rope_ratio),
            sigma_sum: profile.sigma_sum,
            bound_exact: statistics(|head| head.bound_exact).map(|bound| bound.max),
            bound_rounded: statistics(|head| head.bound_rounded).map(|bound| bound.max),
            center: profile.center.clone(),
            mla: profile.mla.clone(),
            heads,
        }
    }
}

impl Inspection {
    /// The spectra of a profile; without layers for the profile of a config.
    pub fn new(profile: Profile) -> Self {
        let layers = profile.layers.iter().flatten().map(LayerInspection::new).collect();
        Self { model: profile.model, layers }
    }
}
