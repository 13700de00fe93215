//! The scenarios, and the options of a run.

use super::tokens::TokenFile;
use sigmascale::attention::Precision;
use sigmascale::bound::Tail;
use sigmascale::policy::{AutoCConfig, PolicyConfig, PolicyKind, ScaledTensor};
use sigmascale::spectral::{Estimator, Iterations};
use sigmascale::{Error, Result};

/// Steps of the scenarios that have more than one.
const STEPS: usize = 30;
/// When the spike comes.
pub const SPIKE_STEP: usize = 10;
/// What it multiplies weights and biases by.
pub const SPIKE: f32 = 4.0;
/// Growth of the weights a step of `refit`.
const REFIT_GROWTH: f32 = 1.05;
sigmascale::named! {
    /// What happens to the weights.
    pub enum Scenario is "scenario" {
        /// A trained model is loaded; no policy has a history.
        CheckpointLoad = "checkpoint-load",
        /// Weights and biases of q, k and v grow by a factor of 4 at step 10.
        WeightSpike = "weight-spike",
        /// New weights at every step: those of later checkpoints, or growth by 5 %.
        Refit = "refit",
        /// Recorded maxima, through the policies that need no weights.
        Replay = "replay",
        /// Training stops and resumes (cargo feature `train`).
        Resume = "resume",
        /// Training under a learning-rate spike (cargo feature `train`).
        LrSpike = "lr-spike",
    }
}

impl Scenario {
    /// Steps by default.
    pub fn steps(self) -> usize {
        if self == Self::CheckpointLoad { 1 } else { STEPS }
    }

    /// Factor on the weights and biases of q, k and v at a step.
    pub(super) fn factor(self, step: usize) -> f32 {
        match self {
            Self::WeightSpike if step >= SPIKE_STEP => SPIKE,
            Self::Refit => REFIT_GROWTH.powi(step as i32),
            _ => 1.0,
        }
    }
}

sigmascale::named! {
    /// What is cast to E4M3.
    pub enum Mode is "mode" default Operands {
        /// Only the logits, as in the paper.
        Logit = "logit",
        /// q, k, v and P, as fused kernels do.
        Operands = "operands",
    }
}

impl Mode {
    pub(crate) fn precision(self) -> Precision {
        match self {
            Self::Logit => Precision::PAPER_LOGITS,
            Self::Operands => Precision::KERNEL,
        }
    }

    /// The tensors whose overflow counts.
    pub(super) fn tensors(self) -> &'static [ScaledTensor] {
        match self {
            Self::Logit => &[ScaledTensor::Logit],
            Self::Operands => &[ScaledTensor::Q, ScaledTensor::K, ScaledTensor::V],
        }
    }
}

/// A layer and step that a run has done. All steps of a layer come before the next layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Layer, from 1 on.
    pub layer: usize,
    /// Layers in all.
    pub layers: usize,
    /// Step, from 1 on.
    pub step: usize,
    /// Steps in all.
    pub steps: usize,
}

/// What a run is asked for.
#[derive(Clone, Debug)]
pub struct StressOptions {
    /// What is cast.
    pub mode: Mode,
    /// Policies with their parameters, in the order of the result; one of a kind.
    ///
    /// `auto-c` with the default burn-in takes a quarter of the steps where the run would not reach the end of it; any
    /// other burn-in is used as given.
    pub policies: Vec<PolicyConfig>,
    /// The first so many layers; by default all, and 4 of a synthetic model for more than one step.
    pub layers: Option<usize>,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Text for the model's own forward, in place of generated tokens.
    pub tokens: Option<TokenFile>,
    /// Steps; by default the scenario's.
    pub steps: Option<usize>,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Failure probability of `geometry-c-star`, over all layers, tokens and steps of the run.
    pub delta: f64,
    /// Bounds from the scale engine on the first GPU; everything else runs on the CPU in any case.
    pub bounds_on_gpu: bool,
    /// Where norms come from, for the policies that plan from bounds.
    pub estimator: Estimator,
    /// Iterations of a step, if they are estimated.
    pub iterations: Iterations,
}

impl Default for StressOptions {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            policies: PolicyKind::ALL.map(PolicyConfig::from).to_vec(),
            layers: None,
            seq_len: 256,
            tokens: None,
            steps: None,
            seed: 0,
            delta: Tail::default().delta,
            bounds_on_gpu: false,
            estimator: Estimator::Gram,
            iterations: Iterations::default(),
        }
    }
}

/// Results are told apart by the policy's name.
pub(super) fn check_policies(policies: &[PolicyConfig]) -> Result<()> {
    if policies.is_empty() {
        return Err(Error::argument("a stress run needs at least one policy"));
    }
    let twice = |at: &usize| policies[..*at].iter().any(|other| other.kind() == policies[*at].kind());
    match (0..policies.len()).find(twice) {
        Some(at) => Err(Error::argument(format_args!("duplicate policy {}", policies[at].kind()))),
        None => Ok(()),
    }
}

pub(crate) fn auto_c(policies: &[PolicyConfig]) -> AutoCConfig {
    let found = policies.iter().find_map(|policy| match policy {
        PolicyConfig::AutoC(config) => Some(*config),
        _ => None,
    });
    found.unwrap_or_default()
}

/// `auto-c` whose burn-in was left at the default ends it within the run.
pub(super) fn with_burn_in(policy: PolicyConfig, steps: usize) -> PolicyConfig {
    let default = AutoCConfig::default().burn_in;
    match policy {
        PolicyConfig::AutoC(config) if config.burn_in == default && (2..=default as usize).contains(&steps) => {
            PolicyConfig::AutoC(AutoCConfig { burn_in: (steps / 4).max(1) as u32, ..config })
        }
        other => other,
    }
}
