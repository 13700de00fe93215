//! What each scaling policy does when the weights move.
//!
//! A scenario drives one [`Runtime`] a policy through the same weights and tokens and sets the results side by side.
//!
//! | scenario | steps | weights |
//! |---|---|---|
//! | `checkpoint-load` | 1 | loaded before the first step; no policy has seen anything |
//! | `weight-spike` | 30 | weights and biases of q, k and v times 4 at step 10 |
//! | `refit` | 30 | replaced at every step: 5 % larger each time, so logits grow by 10 % |
//! | [`replay`] | recorded | none: recorded amax through `delayed-paper`, `delayed-te` and `current` |
//!
//! **Modes.** `logit` casts only the logits to E4M3, with everything else in f32 (the paper's Algorithm 1): an overflow is
//! a logit that saturates. `operands` casts q, k, v and P, as fused FP8 kernels do: an overflow is an operand that
//! saturates, often by little. Counts of the two modes are not comparable, and a count alone says nothing of the damage:
//! SQNR and softmax KL stand beside it.
//!
//! **Tokens** are isotropic and new at every step, every layer gets its own: the model's own forward is not run.

mod metrics;
mod model;
mod replay;

pub use metrics::{Quantiles, sqnr_db};
pub use model::StressModel;
pub use replay::{ReplayStep, Trace, replay};

use crate::attention::{Attention, AttentionCall, AttentionShape, Cpu, Inputs, Mask, Precision};
use crate::bound::{E4M3_MAX, Tail};
use crate::error::{Error, Result};
use crate::forward::{Projected, Tokens, project};
use crate::model::AttentionSpec;
use crate::plan::{OperandDescales, ScalePlan};
use crate::policy::{AutoCConfig, PolicyConfig, PolicyEvent, PolicyKind, Tensor};
use crate::runtime::{Runtime, RuntimeConfig, Step, StepOutcome, Weights, bounds_of};
use crate::scale::Descale;
pub(crate) use metrics::Divergence;
use metrics::quantile;
use serde::Serialize;

/// Steps of the scenarios that have more than one.
const STEPS: usize = 30;
/// When the spike comes.
const SPIKE_STEP: usize = 10;
/// What it multiplies weights and biases by.
const SPIKE: f32 = 4.0;
/// Growth of the weights a step of `refit`.
const REFIT_GROWTH: f32 = 1.05;
/// Layers of a synthetic model that a scenario of more than one step takes by default.
const FEW_LAYERS: usize = 4;

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
    /// Steps; by default the scenario's.
    pub steps: Option<usize>,
    /// Burn-in of `auto-c`; by default 100, or a quarter of the steps where they would not reach it.
    pub burn_in: Option<u32>,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Union bound of `geometry-c-star`.
    pub tail: Tail,
}

impl Default for StressOptions {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            policies: PolicyKind::ALL.to_vec(),
            layers: None,
            seq_len: 256,
            steps: None,
            burn_in: None,
            seed: 0,
            tail: Tail::default(),
        }
    }
}

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
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Burn-in of `auto-c`, in steps.
    pub auto_c_burn_in: u32,
    /// What a reader has to know: how the model was made, what was assumed.
    pub notes: Vec<String>,
    /// One entry a policy.
    pub policies: Vec<PolicySummary>,
    /// Policies that cannot plan for this model.
    pub unavailable: Vec<Unavailable>,
    /// One entry a step, policy and layer, in this order.
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
    /// The first of them.
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
    pub utilisation: Quantiles,
    /// Signal to quantisation noise of the attention output, dB: median over layers and steps. Null if nothing was
    /// computed or the output is exact.
    pub sqnr_db: Option<f64>,
    /// KL divergence (nats) of softmax rows from the f32 softmax: median over layers and steps of the mean row.
    pub softmax_kl: Option<f64>,
    /// Times that a frozen `auto-c` went back to the certain bound.
    pub fallbacks: usize,
    /// What the policy assumes.
    pub assumption: Option<&'static str>,
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
    pub tensor: Tensor,
    /// Those of every tensor, whether cast or not.
    #[serde(flatten)]
    pub descales: PlanDescales,
    /// See [`PolicySummary::sqnr_db`].
    pub sqnr_db: Option<f64>,
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
    fn of(plan: &ScalePlan) -> Self {
        let [logit_descale, q_descale, k_descale, v_descale] =
            [Tensor::Logit, Tensor::Q, Tensor::K, Tensor::V].map(|tensor| largest_descale(tensor, plan));
        Self { logit_descale, q_descale, k_descale, v_descale }
    }
}

fn largest_descale(tensor: Tensor, plan: &ScalePlan) -> Option<f64> {
    tensor.descales(plan).map(|row| f64::from(ScalePlan::per_tensor(row).get()))
}

/// Runs a scenario.
///
/// # Errors
/// `is_argument` if an option breaks its rule, `is_unsupported` if the model cannot be run on tokens; otherwise as the
/// model and [`Runtime::step`]. A policy that cannot plan for this model is left out and named in the result.
pub fn run(scenario: Scenario, model: &StressModel, options: &StressOptions) -> Result<StressResult> {
    let spec = model.spec();
    let steps = options.steps.unwrap_or(scenario.steps());
    let few = if model.is_synthetic() && steps > 1 { FEW_LAYERS } else { usize::MAX };
    let layers = options.layers.unwrap_or(few.min(spec.layers));
    match scenario {
        Scenario::Replay => return Err(Error::argument("a replay has a trace, not a model")),
        Scenario::Resume | Scenario::LrSpike => {
            return Err(Error::argument(format_args!("{} trains its model: see the feature `train`", scenario.name())));
        }
        _ => {}
    }
    for (name, value, most) in
        [("layers", layers, spec.layers), ("steps", steps, 100_000), ("seq-len", options.seq_len, 16_384)]
    {
        if !(1..=most).contains(&value) {
            return Err(Error::argument(format_args!("{name} {value} must lie between 1 and {most}")));
        }
    }
    let burn_in = options.burn_in.unwrap_or(if steps > 100 || steps == 1 { 100 } else { (steps / 4).max(1) as u32 });
    let mut lab = Lab::new(scenario, spec, options, burn_in)?;
    let mut trace = Vec::with_capacity(layers * steps * lab.runs.len());
    for layer in 0..layers {
        let source = model.layer(layer, options.seq_len, options.seed)?;
        for step in 0..steps {
            let weights = source.weights(scenario.factor(step))?;
            let tokens = Tokens::isotropic(spec, options.seq_len, token_seed(options.seed, layer, step));
            let inputs = project(spec, &weights, &tokens)?;
            let changed = step == 0 || scenario.factor(step) != scenario.factor(step - 1);
            let bounds = if changed { Some(bounds_of(spec, weights, &options.tail)?) } else { None };
            let again = || bounds.clone().map_or(Weights::Unchanged, Weights::Bounded);
            lab.step(layer, step, &again, &inputs, &mut trace)?;
        }
    }
    trace.sort_by_key(|row: &TraceRow| (row.step, lab.place(row.policy), row.layer));
    let mut notes = model.notes();
    if layers < spec.layers {
        notes.push(format!("the first {layers} of {} layers", spec.layers));
    }
    notes.push("tokens are isotropic; those of trained models align with the weights and give larger logits".into());
    let (policies, unavailable) = lab.finish(layers);
    Ok(StressResult {
        scenario,
        mode: options.mode,
        model: spec.name.clone(),
        model_layers: layers,
        model_layers_total: spec.layers,
        seed: options.seed,
        steps,
        seq_len: options.seq_len,
        auto_c_burn_in: burn_in,
        notes,
        policies,
        unavailable,
        trace,
    })
}

/// Seeds of different steps and layers are unrelated.
fn token_seed(seed: u64, layer: usize, step: usize) -> u64 {
    let mut x = seed ^ (layer as u64) << 40 ^ (step as u64) << 8;
    // The finaliser of splitmix64.
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The call of a layer: causal, apart from the encoder family.
fn call_of(spec: &AttentionSpec, layer: usize, seq_len: usize) -> AttentionCall {
    let shape = AttentionShape {
        batch: 1,
        n_q_heads: spec.n_q_heads,
        n_kv_heads: spec.n_kv_heads,
        len_q: seq_len,
        len_k: seq_len,
        d_head: spec.d_head,
    };
    let mask = if spec.family.contains("bert") { Mask::NONE } else { Mask::CAUSAL };
    AttentionCall { shape, mask, softmax_scale: spec.softmax_scale[layer], soft_cap: spec.soft_cap }
}

/// A plan that changes nothing, for calls that cast nothing.
pub(crate) fn identity(layer: usize, shape: &AttentionShape) -> ScalePlan {
    let one = vec![Descale::ONE; shape.n_kv_heads];
    ScalePlan {
        layer,
        logit_bound: None,
        logit_descale: vec![Descale::ONE; shape.n_q_heads],
        operands: OperandDescales { q: one.clone(), k: one.clone(), v: Some(one.clone()), o: Some(one) },
    }
}

/// One policy at work.
struct Run {
    kind: PolicyKind,
    runtime: Runtime,
    tally: Tally,
    failed: Option<String>,
}

/// What accumulates over layers and steps.
#[derive(Default)]
pub(crate) struct Tally {
    bad_layers: Vec<usize>,
    bad_steps: Vec<usize>,
    overflow: u64,
    values: u64,
    max_scaled: f64,
    overshoot: Vec<f64>,
    utilisation: Vec<f64>,
    pub(crate) sqnr: Vec<f64>,
    pub(crate) kl: Vec<f64>,
    pub(crate) fallbacks: usize,
}

/// One policy's row of a step, before it is written down.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    max_scaled: f64,
    overflow: u64,
    values: u64,
    utilisation: Vec<f64>,
}

impl Tally {
    pub(crate) fn add(&mut self, layer: usize, step: usize, seen: &Seen) {
        self.overflow += seen.overflow;
        self.values += seen.values;
        self.max_scaled = self.max_scaled.max(seen.max_scaled);
        self.utilisation.extend(&seen.utilisation);
        if seen.overflow > 0 {
            self.overshoot.push(seen.max_scaled / E4M3_MAX);
            self.bad_layers.push(layer);
            self.bad_steps.push(step);
        }
    }

    pub(crate) fn summary(
        mut self,
        policy: PolicyKind,
        layers: usize,
        assumption: Option<&'static str>,
    ) -> PolicySummary {
        for bad in [&mut self.bad_layers, &mut self.bad_steps] {
            bad.sort_unstable();
            bad.dedup();
        }
        PolicySummary {
            policy,
            layers,
            overflow_layers: self.bad_layers.len(),
            overflow_steps: self.bad_steps.len(),
            first_bad_step: self.bad_steps.first().copied(),
            overflow_values: self.overflow,
            values: self.values,
            max_scaled: self.max_scaled,
            overshoot: (!self.overshoot.is_empty()).then(|| Quantiles::of(&mut self.overshoot)),
            utilisation: Quantiles::of(&mut self.utilisation),
            sqnr_db: quantile(&mut self.sqnr, 0.5),
            softmax_kl: quantile(&mut self.kl, 0.5),
            fallbacks: self.fallbacks,
            assumption,
        }
    }
}

struct Lab<'a> {
    spec: &'a AttentionSpec,
    options: &'a StressOptions,
    runs: Vec<Run>,
}

impl<'a> Lab<'a> {
    fn new(scenario: Scenario, spec: &'a AttentionSpec, options: &'a StressOptions, burn_in: u32) -> Result<Self> {
        if options.policies.is_empty() {
            return Err(Error::argument(format_args!("{} needs at least one policy", scenario.name())));
        }
        let run = |&kind: &PolicyKind| {
            let policy = match kind {
                PolicyKind::AutoC => PolicyConfig::AutoC(AutoCConfig { burn_in, ..AutoCConfig::default() }),
                kind => kind.into(),
            };
            let runtime = Runtime::new(spec, RuntimeConfig { policy, tail: options.tail })?;
            Ok(Run { kind, runtime, tally: Tally::default(), failed: None })
        };
        let runs = options.policies.iter().map(run).collect::<Result<_>>()?;
        Ok(Self { spec, options, runs })
    }

    fn place(&self, policy: PolicyKind) -> usize {
        self.runs.iter().position(|run| run.kind == policy).unwrap_or(usize::MAX)
    }

    /// One layer at one step under every policy.
    fn step<'w>(
        &mut self,
        layer: usize,
        step: usize,
        weights: &dyn Fn() -> Weights<'w>,
        projected: &Projected,
        trace: &mut Vec<TraceRow>,
    ) -> Result<()> {
        let mode = self.options.mode;
        let call = call_of(self.spec, layer, self.options.seq_len);
        let inputs = Inputs { q: &projected.q, k: &projected.k, v: &projected.v };
        let exact = Cpu.forward(&call, &inputs, &identity(layer, &call.shape), &Precision::F32)?;
        let divergence = Divergence::new(&call, &inputs);
        for run in self.runs.iter_mut().filter(|run| run.failed.is_none()) {
            let request = Step { layer, weights: weights(), call, inputs, precision: mode.precision() };
            let outcome = match run.runtime.step(request, &Cpu) {
                Ok(outcome) => outcome,
                Err(error) if error.is_unsupported() => {
                    run.failed = Some(error.to_string());
                    trace.retain(|row| row.policy != run.kind);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let seen = look(mode, &call.shape, &outcome);
            run.tally.add(layer, step, &seen);
            let sqnr = sqnr_db(&exact.out, &outcome.output.out);
            let kl = divergence.of(mode, &outcome.plan)?;
            run.tally.sqnr.extend(sqnr);
            run.tally.kl.extend(kl);
            let fell_back = |event: &&PolicyEvent| matches!(event, PolicyEvent::FellBack { .. });
            run.tally.fallbacks += outcome.report.events.iter().filter(fell_back).count();
            trace.push(row(step, run.kind, mode, &outcome, &seen, sqnr, kl));
        }
        Ok(())
    }

    fn finish(self, layers: usize) -> (Vec<PolicySummary>, Vec<Unavailable>) {
        let (mut policies, mut unavailable) = (Vec::new(), Vec::new());
        for run in self.runs {
            match run.failed {
                Some(reason) => unavailable.push(Unavailable { policy: run.kind, reason }),
                None => policies.push(run.tally.summary(run.kind, layers, run.runtime.policy().assumption())),
            }
        }
        (policies, unavailable)
    }
}

/// The mode's tensors in one outcome, head by head.
pub(crate) fn look(mode: Mode, shape: &AttentionShape, outcome: &StepOutcome) -> Seen {
    let stats = &outcome.output.stats;
    let group = shape.n_q_heads / shape.n_kv_heads;
    let mut seen = Seen { max_scaled: 0.0, overflow: 0, values: 0, utilisation: Vec::new() };
    let mut head = |amax: f32, descale: Option<Descale>, overflow: u64, count: u64| {
        let Some(descale) = descale else { return };
        let scaled = f64::from(amax / descale.get());
        seen.utilisation.push(scaled / E4M3_MAX);
        seen.max_scaled = seen.max_scaled.max(scaled);
        seen.overflow += overflow;
        seen.values += count;
    };
    for tensor in mode.tensors() {
        let descales = tensor.descales(&outcome.plan);
        let at = |head: usize| descales.map(|row| row[head]);
        match tensor {
            Tensor::Logit => {
                stats.logits.iter().enumerate().for_each(|(h, x)| head(x.amax(), at(h), x.overflow, x.count));
            }
            Tensor::Q => {
                stats.q.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h / group), x.overflow, x.count));
            }
            Tensor::K => stats.k.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h), x.overflow, x.count)),
            Tensor::V => stats.v.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h), x.overflow, x.count)),
            Tensor::O => {
                stats.o.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h / group), x.overflow, x.count));
            }
        }
    }
    seen
}

pub(crate) fn row(
    step: usize,
    policy: PolicyKind,
    mode: Mode,
    outcome: &StepOutcome,
    seen: &Seen,
    sqnr_db: Option<f64>,
    softmax_kl: Option<f64>,
) -> TraceRow {
    let report = &outcome.report;
    let tensor = mode
        .tensors()
        .iter()
        .copied()
        .reduce(|a, b| if report.tensor(b).max_scaled > report.tensor(a).max_scaled { b } else { a });
    let tensor = tensor.unwrap_or(Tensor::Logit);
    TraceRow {
        step,
        policy,
        layer: outcome.plan.layer,
        max_logit: f64::from(report.tensor(Tensor::Logit).amax),
        descale: largest_descale(tensor, &outcome.plan).unwrap_or(1.0),
        max_scaled: seen.max_scaled,
        overflow: seen.overflow,
        tensor,
        descales: PlanDescales::of(&outcome.plan),
        sqnr_db,
        softmax_kl,
    }
}

#[cfg(test)]
mod tests;
