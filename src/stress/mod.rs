//! What each scaling policy does when the weights move.
//!
//! A scenario drives one [`Runtime`](crate::runtime::Runtime) a policy through the same weights and tokens and sets the
//! results side by side.
//!
//! | scenario | steps | weights |
//! |---|---|---|
//! | `checkpoint-load` | 1 | loaded before the first step; no policy has seen anything |
//! | `weight-spike` | 30 | weights and biases of q, k and v times 4 at step 10 |
//! | `refit` | 30 | replaced at every step: by the next checkpoint of a recorded path, or 5 % larger (logits: 10 %) |
//! | [`replay`] | recorded | none: recorded amax through `delayed-paper`, `delayed-te` and `current` |
//!
//! **Modes.** `logit` casts only the logits to E4M3, with everything else in f32 (the paper's Algorithm 1): an overflow is
//! a logit that saturates. `operands` casts q, k, v and P, as fused FP8 kernels do: an overflow is an operand that
//! saturates, often by little. Counts of the two modes are not comparable, and a count alone says nothing of the damage:
//! SQNR, the bias of the output and softmax KL stand beside it.
//!
//! **Tokens** are new at every step. Generated ones are isotropic and every layer gets its own. Those of a
//! [`TokenFile`] run through the model's own forward in f32, with the weights of that step: behind a spike or a refit
//! every layer sees what the changed layers below it made of the text. What a policy's casts lose stays in its layer, so
//! that all policies see the same operands.

mod bounds;
mod lab;
mod metrics;
mod model;
mod replay;
mod result;
mod tokens;

#[cfg(feature = "train")]
pub(crate) use lab::{Seen, Tally, identity, look, row};
#[cfg(feature = "train")]
pub(crate) use metrics::{Divergence, Quality};
pub use metrics::{Quantiles, output_bias, sqnr_db};
pub use model::StressModel;
pub use replay::{ReplayStep, Trace, replay};
pub use result::{PlanDescales, PolicySummary, StressResult, TraceRow, Unavailable};
pub use tokens::{TokenFile, TokenSummary};

use crate::attention::{AttentionCall, AttentionShape, Mask, Precision};
use crate::bound::Tail;
use crate::error::{Error, Result};
use crate::forward::project;
use crate::model::AttentionSpec;
use crate::policy::{PolicyKind, Tensor};
use crate::runtime::Weights;
use bounds::BoundStage;
use lab::Lab;
use serde::Serialize;
use tokens::Source;

/// Steps of the scenarios that have more than one.
const STEPS: usize = 30;
/// When the spike comes.
pub const SPIKE_STEP: usize = 10;
/// What it multiplies weights and biases by.
pub const SPIKE: f32 = 4.0;
/// Growth of the weights a step of `refit`.
const REFIT_GROWTH: f32 = 1.05;
/// Layers of a synthetic model that a scenario of more than one step takes by default.
const FEW_LAYERS: usize = 4;

/// Longest run.
const MAX_STEPS: usize = 100_000;
/// Longest generated refit: the growth of longer ones leaves f32.
const MAX_GROWTH_STEPS: usize = 500;
/// Longest sequence.
const MAX_SEQ_LEN: usize = 16_384;

/// What happens to the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// A trained model under policies that know nothing.
    CheckpointLoad,
    /// Weights and biases times 4.
    WeightSpike,
    /// New weights at every step.
    Refit,
    /// Recorded amax.
    Replay,
    /// Training that stops and goes on from its weights (feature `train`).
    Resume,
    /// Training under a learning-rate spike (feature `train`).
    LrSpike,
}

impl Scenario {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::CheckpointLoad => "checkpoint-load",
            Self::WeightSpike => "weight-spike",
            Self::Refit => "refit",
            Self::Replay => "replay",
            Self::Resume => "resume",
            Self::LrSpike => "lr-spike",
        }
    }

    /// Steps by default.
    pub fn steps(self) -> usize {
        if self == Self::CheckpointLoad { 1 } else { STEPS }
    }

    /// Factor on the weights and biases of q, k and v at a step.
    fn factor(self, step: usize) -> f32 {
        match self {
            Self::WeightSpike if step >= SPIKE_STEP => SPIKE,
            Self::Refit => REFIT_GROWTH.powi(step as i32),
            _ => 1.0,
        }
    }
}

/// What is cast to E4M3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The logits alone (the paper's).
    #[default]
    Logit,
    /// q, k, v and P (fused kernels).
    Operands,
}

impl Mode {
    pub(crate) fn precision(self) -> Precision {
        match self {
            Self::Logit => Precision::PAPER_LOGITS,
            Self::Operands => Precision::KERNEL,
        }
    }

    /// The tensors whose overflow counts.
    fn tensors(self) -> &'static [Tensor] {
        match self {
            Self::Logit => &[Tensor::Logit],
            Self::Operands => &[Tensor::Q, Tensor::K, Tensor::V],
        }
    }
}

/// What a run is asked for.
#[derive(Clone, Debug)]
pub struct StressOptions {
    /// What is cast.
    pub mode: Mode,
    /// Policies, in the order of the result.
    pub policies: Vec<PolicyKind>,
    /// The first so many layers; by default all, and 4 of a synthetic model for more than one step.
    pub layers: Option<usize>,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Text for the model's own forward, in place of generated tokens.
    pub tokens: Option<TokenFile>,
    /// Steps; by default the scenario's.
    pub steps: Option<usize>,
    /// Burn-in of `auto-c`; by default 100, or a quarter of the steps where they would not reach it.
    pub burn_in: Option<u32>,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Union bound of `geometry-c-star`.
    pub tail: Tail,
    /// Bounds from the scale engine on the first GPU; everything else runs on the CPU in any case.
    pub bounds_on_gpu: bool,
}

impl Default for StressOptions {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            policies: PolicyKind::ALL.to_vec(),
            layers: None,
            seq_len: 256,
            tokens: None,
            steps: None,
            burn_in: None,
            seed: 0,
            tail: Tail::default(),
            bounds_on_gpu: false,
        }
    }
}

/// Runs a scenario.
///
/// # Errors
/// `is_argument` if an option breaks its rule, `is_unsupported` if the model cannot be run on tokens or on text; otherwise
/// as the model and [`Runtime::step`](crate::runtime::Runtime::step). A policy that cannot plan for this model is left out
/// and named in the result.
pub fn run(scenario: Scenario, model: &StressModel, options: &StressOptions) -> Result<StressResult> {
    let spec = model.spec();
    match scenario {
        Scenario::Replay => return Err(Error::argument("a replay has a trace, not a model")),
        Scenario::Resume | Scenario::LrSpike => {
            return Err(Error::argument(format_args!("{} trains its model: see the feature `train`", scenario.name())));
        }
        _ => {}
    }
    // Along a recorded path every step has its own checkpoint.
    let recorded = model.recorded_steps().filter(|_| scenario == Scenario::Refit);
    let steps = options.steps.or(recorded).unwrap_or(scenario.steps());
    let few = if model.is_synthetic() && steps > 1 { FEW_LAYERS } else { usize::MAX };
    let layers = options.layers.unwrap_or(few.min(spec.layers.len()));
    let most = recorded.unwrap_or(if scenario == Scenario::Refit { MAX_GROWTH_STEPS } else { MAX_STEPS });
    for (name, value, most) in
        [("layers", layers, spec.layers.len()), ("steps", steps, most), ("seq-len", options.seq_len, MAX_SEQ_LEN)]
    {
        if !(1..=most).contains(&value) {
            return Err(Error::argument(format_args!("{name} {value} must lie between 1 and {most}")));
        }
    }
    if let Some(shortest) = spec.bounded_positions().filter(|most| options.seq_len > *most) {
        return Err(Error::argument(format_args!(
            "seq-len {} is past the model's {shortest} positions, up to which its growing queries are bounded",
            options.seq_len
        )));
    }
    let burn_in = options.burn_in.unwrap_or(if steps > 100 || steps == 1 { 100 } else { (steps / 4).max(1) as u32 });
    let stage = BoundStage::open(options.bounds_on_gpu)?;
    let mut lab = Lab::new(scenario, spec, options, burn_in)?;
    let mut trace = Vec::with_capacity(layers * steps * lab.runs.len());
    let factor = |step: usize| if recorded.is_some() { 1.0 } else { scenario.factor(step) };
    let mut source = match &options.tokens {
        Some(file) => Source::text(model, file, steps, options.seq_len, recorded.is_some())?,
        None => Source::Isotropic { seed: options.seed, seq_len: options.seq_len },
    };
    for layer in 0..layers {
        let stored = model.layer(layer, options.seq_len, options.seed)?;
        for step in 0..steps {
            let weights = stored.weights(if recorded.is_some() { step } else { 0 }, factor(step))?;
            let inputs = project(spec, &weights, &source.tokens(spec, layer, step))?;
            let changed = recorded.is_some() || step == 0 || factor(step) != factor(step - 1);
            let bounds = changed.then(|| stage.layer(spec, weights.clone(), &options.tail)).transpose()?;
            let again = || bounds.clone().map_or(Weights::Unchanged, Weights::Bounded);
            let attention = lab.step(layer, step, &again, &inputs, &mut trace)?;
            if layer + 1 < layers {
                source.advance(spec, &weights, step, &attention)?;
            }
        }
    }
    trace.sort_by_key(|row: &TraceRow| (row.step, lab.place(row.policy), row.layer));
    let mut notes = model.notes();
    if options.bounds_on_gpu {
        notes.push("bounds come from the scale engine on the GPU; attention runs on the CPU".into());
    }
    if layers < spec.layers.len() {
        notes.push(format!("the first {layers} of {} layers", spec.layers.len()));
    }
    if recorded.is_some() {
        notes.push(format!("weights of {}, one a step", model.path_names().join(", ")));
    }
    if scenario == Scenario::WeightSpike && steps <= SPIKE_STEP {
        notes.push(format!("the run ends before step {SPIKE_STEP}, at which the weights would have grown"));
    }
    let tokens = source.summary();
    notes.push(match &tokens {
        Some(text) => text.note(options.seq_len, steps, scenario),
        None => "tokens are isotropic; those of trained models align with the weights and give larger logits".into(),
    });
    let (policies, unavailable) = lab.finish(layers);
    refuse_without_policies(&policies, &unavailable)?;
    Ok(StressResult {
        scenario,
        mode: options.mode,
        model: spec.name.clone(),
        model_layers: layers,
        model_layers_total: spec.layers.len(),
        seed: options.seed,
        steps,
        seq_len: options.seq_len,
        tokens,
        auto_c_burn_in: burn_in,
        notes,
        policies,
        unavailable,
        trace,
    })
}

/// A result of no policy at all would read as one without overflows.
fn refuse_without_policies(policies: &[PolicySummary], unavailable: &[Unavailable]) -> Result<()> {
    match unavailable.first() {
        Some(first) if policies.is_empty() => Err(Error::unsupported(format_args!(
            "none of the policies asked for can run here: {}: {}",
            first.policy, first.reason
        ))),
        _ => Ok(()),
    }
}

/// Seeds of different steps and layers are unrelated.
fn token_seed(seed: u64, layer: usize, step: usize) -> u64 {
    let mut x = seed ^ (layer as u64) << 40 ^ (step as u64) << 8;
    // The finaliser of splitmix64.
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The call of a layer that exists.
fn call_of(spec: &AttentionSpec, layer: usize, seq_len: usize) -> AttentionCall {
    let own = &spec.layers[layer];
    let shape = AttentionShape {
        batch: 1,
        n_q_heads: own.n_q_heads,
        n_kv_heads: own.n_kv_heads,
        len_q: seq_len,
        len_k: seq_len,
        d_head: own.d_head,
    };
    let mask = if spec.causal { Mask::CAUSAL } else { Mask::NONE };
    AttentionCall { shape, mask, softmax_scale: own.softmax_scale, soft_cap: spec.soft_cap }
}

#[cfg(test)]
mod tests;
