//! What a policy reports about a step.

use super::shape::LayerShape;
use super::table::{Forbidden, PolicyKind};
use super::tensor::{ScaledTensor, largest};
use crate::bound::{E4M3_MAX, LayerBounds};
use crate::plan::ScalePlan;
use crate::stats::StepStats;
use serde::{Deserialize, Serialize};

/// What one step of one layer did under a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Policy that made the plan.
    pub policy: PolicyKind,
    /// Index among the layers with attention; the model's own number is that of its spec.
    pub layer: usize,
    /// One entry for each of [`ScaledTensor::ALL`].
    pub tensors: Vec<TensorReport>,
    /// Changes of the policy's state that a reader of logs should know.
    pub events: Vec<PolicyEvent>,
    /// A safe plan for the same step, where the one used overflowed and the policy has given it up: run the call again
    /// with it, or continue with the saturated result.
    pub fallback: Option<ScalePlan>,
}

/// One tensor of a step. An overflow is a value with `|x / descale| > 448`, before the cast.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    /// Which.
    pub tensor: ScaledTensor,
    /// Largest |x|; NaN (null in JSON) if there was one.
    #[serde(with = "super::exact")]
    pub amax: f32,
    /// Largest `|x / descale|` over the heads; divided by 448 it is the utilization.
    #[serde(with = "super::exact")]
    pub max_scaled: f32,
    /// Values that overflowed.
    pub overflow: u64,
    /// Values that leave the format even by rounding (`|x / descale| > 464`).
    pub beyond_rounding: u64,
    /// NaN or infinite values.
    pub non_finite: u64,
    /// All values.
    pub count: u64,
    /// Worst-case bound over the observed maximum; null where there is no bound or nothing but zeros.
    #[serde(default)]
    pub slack: Option<Slack>,
    /// Heads whose amax exceeded the worst-case bound. Never happens for normalized inputs; it means
    /// that the bounds are of other weights.
    pub beyond_bound: usize,
}

/// Bound over observed amax, of heads whose amax is finite and above zero.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slack {
    /// Smallest.
    pub min: f64,
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
    /// Heads (times steps, once merged).
    pub count: u64,
}

impl Slack {
    fn of(amax: &[f32], bounds: &[f64]) -> Option<Self> {
        let observed =
            amax.iter().zip(bounds).filter(|(amax, bound)| **amax > 0.0 && amax.is_finite() && bound.is_finite());
        observed
            .map(|(amax, bound)| bound / f64::from(*amax))
            .map(|ratio| Self { min: ratio, mean: ratio, max: ratio, count: 1 })
            .reduce(Self::merge)
    }

    /// Over the heads and steps of both.
    pub fn merge(self, other: Self) -> Self {
        let count = self.count + other.count;
        Self {
            min: self.min.min(other.min),
            mean: self.mean + (other.mean - self.mean) * (other.count as f64 / count as f64),
            max: self.max.max(other.max),
            count,
        }
    }
}

impl TensorReport {
    /// Whether any value overflowed.
    pub fn overflowed(&self) -> bool {
        self.overflow > 0 || self.max_scaled > E4M3_MAX as f32
    }
}

/// Why what was observed so far no longer counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// Other weights were put in place of the old ones: a checkpoint load, a refit.
    WeightsReplaced,
    /// The data changed.
    DataChanged,
    /// A person asked.
    Requested,
}

/// A change of a policy's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum PolicyEvent {
    /// auto-c: burn-in is over and `c` is fixed for these layers.
    Frozen {
        /// Tensor.
        tensor: ScaledTensor,
        /// First layer of the pool.
        layer: usize,
        /// Head, where every head has its own pool.
        head: Option<usize>,
        /// `min(1, kappa * ratio)`.
        c: f64,
        /// The order statistic of amax / bound.
        ratio: f64,
    },
    /// auto-c: a value overflowed under the frozen `c`; this pool uses the worst-case bound again.
    FellBack {
        /// Tensor.
        tensor: ScaledTensor,
        /// Layer that overflowed.
        layer: usize,
        /// Head, where every head has its own pool.
        head: Option<usize>,
        /// The constant given up.
        c: f64,
    },
    /// auto-c: burn-in starts again.
    Restarted {
        /// Why.
        reason: Restart,
        /// How often so far.
        restarts: u32,
    },
    /// auto-c: no constant will be used.
    Forbidden {
        /// Why.
        reason: Forbidden,
    },
    /// A step with NaN or infinite values was not taken in.
    Skipped {
        /// Tensor.
        tensor: ScaledTensor,
    },
    /// delayed-te: the amax was too small for a finite scale; the largest finite one is used.
    TinyAmax {
        /// Tensor.
        tensor: ScaledTensor,
    },
}

impl Report {
    pub(super) fn new(
        policy: PolicyKind,
        shape: LayerShape,
        plan: &ScalePlan,
        bounds: &LayerBounds,
        stats: &StepStats,
    ) -> Self {
        let tensors = ScaledTensor::ALL
            .into_iter()
            .map(|tensor| {
                let amax = tensor.amax_row(stats, shape);
                let scaled: Vec<f32> = tensor
                    .descales(plan)
                    .map(|descales| amax.iter().zip(descales).map(|(amax, descale)| amax / descale.get()).collect())
                    .unwrap_or_default();
                let bounds = tensor.bound_row(bounds, shape).unwrap_or_default();
                let beyond_bound = amax.iter().zip(&bounds).filter(|(amax, bound)| f64::from(**amax) > **bound).count();
                let [overflow, beyond_rounding, non_finite, count] = tensor.counts(stats);
                TensorReport {
                    tensor,
                    amax: largest(&amax),
                    max_scaled: largest(&scaled),
                    overflow,
                    beyond_rounding,
                    non_finite,
                    count,
                    slack: Slack::of(&amax, &bounds),
                    beyond_bound,
                }
            })
            .collect();
        Self { policy, layer: plan.layer, tensors, events: Vec::new(), fallback: None }
    }

    /// The entry of one tensor.
    pub fn tensor(&self, tensor: ScaledTensor) -> &TensorReport {
        // `ScaledTensor::ALL` lists the variants in their order.
        &self.tensors[tensor as usize]
    }
}
