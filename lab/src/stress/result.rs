//! The result of a run: one summary per policy, one row per step, policy and layer.

use super::metrics::Quantiles;
use super::options::{Mode, Scenario};
use super::tokens::TokenSummary;
use serde::Serialize;
use sigmascale::bound::Tail;
use sigmascale::plan::ScalePlan;
use sigmascale::policy::{PolicyConfig, PolicyKind, ScaledTensor, Slack};
use sigmascale::spectral::Estimator;
use sigmascale::{Error, Result};

/// Result of a run; serialises to the JSON of `sigmascale stress`.
#[derive(Clone, Debug, Serialize)]
pub struct StressResult {
    /// What happened.
    pub scenario: Scenario,
    /// What was cast.
    pub mode: Mode,
    /// Model name.
    pub model: String,
    /// Layers run.
    pub model_layers: usize,
    /// Layers of the model.
    pub model_layers_total: usize,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Steps.
    pub steps: usize,
    /// Where norms came from.
    pub estimator: Estimator,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// The text that ran through the model; null for generated tokens and recorded maxima.
    pub tokens: Option<TokenSummary>,
    /// What the failure probability of `geometry-c-star` counts; null for recorded maxima.
    pub tail: Option<Tail>,
    /// Burn-in of `auto-c`, in steps.
    pub auto_c_burn_in: u32,
    /// What each policy ran with.
    pub parameters: Vec<PolicyConfig>,
    /// What a reader has to know: how the model was made, what was assumed.
    pub notes: Vec<String>,
    /// One entry per policy.
    pub policies: Vec<PolicySummary>,
    /// Policies that cannot plan for this model.
    pub unavailable: Vec<Unavailable>,
    /// One entry per step, policy and layer, in this order.
    pub trace: Vec<TraceRow>,
}

/// A policy that was left out.
#[derive(Clone, Debug, Serialize)]
pub struct Unavailable {
    /// Which.
    pub policy: PolicyKind,
    /// Why.
    pub reason: String,
}

/// One policy over a whole run.
#[derive(Clone, Debug, Serialize)]
pub struct PolicySummary {
    /// Which.
    pub policy: PolicyKind,
    /// Layers run.
    pub layers: usize,
    /// Layers in which a value overflowed.
    pub overflow_layers: usize,
    /// Steps in which a value overflowed.
    pub overflow_steps: usize,
    /// Steps in which a value was clipped: |x / descale| above 464, where it no longer rounds to 448; tensors in a replay.
    pub clipped_steps: usize,
    /// The first step with overflow.
    pub first_bad_step: Option<usize>,
    /// Values that overflowed, with |x / descale| > 448 before the cast; tensors in a replay.
    pub overflow_values: u64,
    /// All values that were cast; tensors in a replay.
    pub values: u64,
    /// Largest |x / descale|.
    pub max_scaled: f64,
    /// Largest |x / descale| / 448 of the layers and steps that overflowed; null without overflow.
    pub overshoot: Option<Quantiles>,
    /// |x / descale| / 448 of one head, layer and step.
    pub utilization: Quantiles,
    /// Signal to quantisation noise of the attention output, dB: median over layers and steps. Null if nothing was
    /// computed or the output is exact.
    pub sqnr_db: Option<f64>,
    /// The same in the step in which it is least: median over the layers of that step.
    pub sqnr_worst_step_db: Option<f64>,
    /// Mean error of the attention output in the direction of the exact one, over its mean size ([`output_bias`]): median
    /// over layers and steps. Null if nothing was computed.
    ///
    /// [`output_bias`]: super::output_bias
    pub output_bias: Option<f64>,
    /// KL divergence (nats) of softmax rows from the f32 softmax: median over layers and steps of the mean row.
    pub softmax_kl: Option<f64>,
    /// Of `auto-c`: worst-case bound over observed maximum during the burn-in, of the tensors that are cast.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slack: Vec<TensorSlack>,
    /// Times that a frozen `auto-c` went back to the worst-case bound.
    pub fallbacks: usize,
    /// What the policy assumes.
    pub assumption: Option<&'static str>,
}

/// Slack of one tensor.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TensorSlack {
    /// Which.
    pub tensor: ScaledTensor,
    /// Over heads, layers and steps.
    #[serde(flatten)]
    pub slack: Slack,
}

/// One layer of one step under one policy.
#[derive(Clone, Debug, Serialize)]
pub struct TraceRow {
    /// Step.
    pub step: usize,
    /// Policy.
    pub policy: PolicyKind,
    /// Layer.
    pub layer: usize,
    /// Largest |logit|.
    pub max_logit: f64,
    /// Largest descale of `tensor` over the heads.
    pub descale: f64,
    /// Largest |x / descale| of the tensors that are cast.
    pub max_scaled: f64,
    /// Values that overflowed.
    pub overflow: u64,
    /// The cast tensor that came closest to overflow.
    pub tensor: ScaledTensor,
    /// Those of every tensor, whether cast or not.
    #[serde(flatten)]
    pub descales: PlanDescales,
    /// See [`PolicySummary::sqnr_db`].
    pub sqnr_db: Option<f64>,
    /// See [`PolicySummary::output_bias`].
    pub output_bias: Option<f64>,
    /// See [`PolicySummary::softmax_kl`].
    pub softmax_kl: Option<f64>,
}

/// Largest descale of each tensor over the heads; null where the plan has none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlanDescales {
    /// Logits.
    pub logit_descale: Option<f64>,
    /// Queries.
    pub q_descale: Option<f64>,
    /// Keys.
    pub k_descale: Option<f64>,
    /// Values.
    pub v_descale: Option<f64>,
}

impl PlanDescales {
    pub(super) fn of(plan: &ScalePlan) -> Self {
        let [logit_descale, q_descale, k_descale, v_descale] =
            [ScaledTensor::Logit, ScaledTensor::Q, ScaledTensor::K, ScaledTensor::V]
                .map(|tensor| largest_descale(tensor, plan));
        Self { logit_descale, q_descale, k_descale, v_descale }
    }
}

pub(super) fn largest_descale(tensor: ScaledTensor, plan: &ScalePlan) -> Option<f64> {
    tensor.descales(plan).map(|row| f64::from(ScalePlan::per_tensor(row).get()))
}

/// A result of no policy at all would read as one without overflows.
pub(super) fn refuse_without_policies(policies: &[PolicySummary], unavailable: &[Unavailable]) -> Result<()> {
    match unavailable.first() {
        Some(first) if policies.is_empty() => Err(Error::unsupported(format_args!(
            "none of the policies asked for can run here: {}: {}",
            first.policy, first.reason
        ))),
        _ => Ok(()),
    }
}
