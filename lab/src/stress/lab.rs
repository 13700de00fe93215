//! The policies at work, side by side on the same operands.

use super::calls::call_of;
use super::metrics::{Divergence, Quality, Quantiles, median};
use super::options::{Mode, StressOptions};
use super::result::{PlanDescales, PolicySummary, TensorSlack, TraceRow, Unavailable, largest_descale};
use crate::forward::Projected;
use sigmascale::Descale;
use sigmascale::Result;
use sigmascale::attention::{Attention, AttentionShape, Cpu, Inputs, Precision};
use sigmascale::bound::{E4M3_MAX, Tail};
use sigmascale::model::AttentionSpec;
use sigmascale::plan::{OperandDescales, ScalePlan};
use sigmascale::policy::{PolicyConfig, PolicyEvent, PolicyKind, Report, ScaledTensor};
use sigmascale::runtime::{Runtime, RuntimeConfig, Step, StepOutcome, Weights};
use std::collections::{BTreeMap, BTreeSet};

/// |x / descale| above which a value no longer rounds to 448.
const CLIPPED: f64 = 464.0;

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
pub(super) struct Run {
    kind: PolicyKind,
    runtime: Runtime,
    /// Steps of the burn-in; 0 where there is none.
    burn_in: usize,
    tally: Tally,
    failed: Option<String>,
}

/// What accumulates over layers and steps.
#[derive(Default)]
pub(crate) struct Tally {
    bad_layers: Vec<usize>,
    bad_steps: Vec<usize>,
    clipped_steps: BTreeSet<usize>,
    overflow: u64,
    values: u64,
    max_scaled: f64,
    overshoot: Vec<f64>,
    utilization: Vec<f64>,
    sqnr: Vec<f64>,
    /// Of the layers of each step.
    sqnr_of_steps: BTreeMap<usize, Vec<f64>>,
    bias: Vec<f64>,
    kl: Vec<f64>,
    pub(crate) fallbacks: usize,
    slack: Vec<TensorSlack>,
}

/// One policy's row of a step, before it is written down.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(super) max_scaled: f64,
    pub(super) overflow: u64,
    pub(super) values: u64,
    pub(super) utilization: Vec<f64>,
}

impl Tally {
    pub(crate) fn add(&mut self, layer: usize, step: usize, seen: &Seen) {
        self.overflow += seen.overflow;
        self.values += seen.values;
        self.max_scaled = self.max_scaled.max(seen.max_scaled);
        self.utilization.extend(&seen.utilization);
        if seen.overflow > 0 {
            self.overshoot.push(seen.max_scaled / E4M3_MAX);
            self.bad_layers.push(layer);
            self.bad_steps.push(step);
        }
        if seen.max_scaled > CLIPPED {
            self.clipped_steps.insert(step);
        }
    }

    pub(crate) fn compare(&mut self, row: &TraceRow) {
        self.sqnr.extend(row.sqnr_db);
        self.sqnr_of_steps.entry(row.step).or_default().extend(row.sqnr_db);
        self.bias.extend(row.output_bias);
        self.kl.extend(row.softmax_kl);
    }

    /// Takes in the slack of a burn-in step.
    pub(crate) fn burn_in(&mut self, mode: Mode, report: &Report) {
        for &tensor in mode.tensors() {
            let Some(slack) = report.tensor(tensor).slack else { continue };
            match self.slack.iter_mut().find(|seen| seen.tensor == tensor) {
                Some(seen) => seen.slack = seen.slack.merge(slack),
                None => self.slack.push(TensorSlack { tensor, slack }),
            }
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
            clipped_steps: self.clipped_steps.len(),
            first_bad_step: self.bad_steps.first().copied(),
            overflow_values: self.overflow,
            values: self.values,
            max_scaled: self.max_scaled,
            overshoot: (!self.overshoot.is_empty()).then(|| Quantiles::of(&mut self.overshoot)),
            utilization: Quantiles::of(&mut self.utilization),
            sqnr_db: median(&mut self.sqnr),
            sqnr_worst_step_db: self.sqnr_of_steps.values_mut().filter_map(|step| median(step)).min_by(f64::total_cmp),
            output_bias: median(&mut self.bias),
            softmax_kl: median(&mut self.kl),
            fallbacks: self.fallbacks,
            slack: self.slack,
            assumption,
        }
    }
}

pub(super) struct Lab<'a> {
    spec: &'a AttentionSpec,
    options: &'a StressOptions,
    pub(super) runs: Vec<Run>,
}

impl<'a> Lab<'a> {
    pub(super) fn new(
        spec: &'a AttentionSpec,
        options: &'a StressOptions,
        policies: &[PolicyConfig],
        tail: Tail,
    ) -> Result<Self> {
        let run = |&policy: &PolicyConfig| {
            let runtime = Runtime::new(
                spec,
                RuntimeConfig { tail, estimator: options.estimator, iterations: options.iterations, ..policy.into() },
            )?;
            let burn_in = if let PolicyConfig::AutoC(config) = policy { config.burn_in as usize } else { 0 };
            Ok(Run { kind: policy.kind(), runtime, burn_in, tally: Tally::default(), failed: None })
        };
        let runs = policies.iter().map(run).collect::<Result<_>>()?;
        Ok(Self { spec, options, runs })
    }

    pub(super) fn place(&self, policy: PolicyKind) -> usize {
        self.runs.iter().position(|run| run.kind == policy).unwrap_or(usize::MAX)
    }

    /// One layer at one step under every policy; gives the output of f32 attention.
    pub(super) fn step<'w>(
        &mut self,
        layer: usize,
        step: usize,
        weights: &dyn Fn(bool) -> Weights<'w>,
        projected: &Projected,
        sinks: Option<&[f64]>,
        trace: &mut Vec<TraceRow>,
    ) -> Result<Vec<f32>> {
        let mode = self.options.mode;
        let call = call_of(self.spec, layer, self.options.seq_len, sinks);
        let inputs = Inputs { q: &projected.q, k: &projected.k, v: &projected.v };
        let exact = Cpu.forward(&call, &inputs, &identity(layer, &call.shape), &Precision::F32)?;
        let divergence = Divergence::new(&call, &inputs);
        for run in self.runs.iter_mut().filter(|run| run.failed.is_none()) {
            let request =
                Step { layer, weights: weights(run.runtime.estimated()), call, inputs, precision: mode.precision() };
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
            if step < run.burn_in {
                run.tally.burn_in(mode, &outcome.report);
            }
            let softmax_kl = divergence.of(mode, &outcome.plan)?;
            let quality = Quality { softmax_kl, ..Quality::of(&exact.out, &outcome.output.out) };
            let fell_back = |event: &&PolicyEvent| matches!(event, PolicyEvent::FellBack { .. });
            run.tally.fallbacks += outcome.report.events.iter().filter(fell_back).count();
            let row = row(step, run.kind, mode, &outcome, &seen, &quality);
            run.tally.compare(&row);
            trace.push(row);
        }
        Ok(exact.out)
    }

    pub(super) fn finish(self, layers: usize) -> (Vec<PolicySummary>, Vec<Unavailable>) {
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

/// `|x / descale|` as policies see it, in f32; in f64 where that is infinite though amax is not.
pub(super) fn scaled(amax: f32, descale: Descale) -> f64 {
    let scaled = amax / descale.get();
    if scaled.is_infinite() { f64::from(amax) / f64::from(descale.get()) } else { f64::from(scaled) }
}

/// The mode's tensors in one outcome, head by head.
pub(crate) fn look(mode: Mode, shape: &AttentionShape, outcome: &StepOutcome) -> Seen {
    let stats = &outcome.output.stats;
    let group = shape.n_q_heads / shape.n_kv_heads;
    let mut seen = Seen { max_scaled: 0.0, overflow: 0, values: 0, utilization: Vec::new() };
    let mut head = |amax: f32, descale: Option<Descale>, overflow: u64, count: u64| {
        let Some(descale) = descale else { return };
        let scaled = scaled(amax, descale);
        seen.utilization.push(scaled / E4M3_MAX);
        seen.max_scaled = seen.max_scaled.max(scaled);
        seen.overflow += overflow;
        seen.values += count;
    };
    for tensor in mode.tensors() {
        let descales = tensor.descales(&outcome.plan);
        let at = |head: usize| descales.map(|row| row[head]);
        match tensor {
            ScaledTensor::Logit => {
                stats.logits.iter().enumerate().for_each(|(h, x)| head(x.amax(), at(h), x.overflow, x.count));
            }
            ScaledTensor::Q => {
                stats.q.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h / group), x.overflow, x.count));
            }
            ScaledTensor::K => stats.k.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h), x.overflow, x.count)),
            ScaledTensor::V => stats.v.iter().enumerate().for_each(|(h, x)| head(x.amax, at(h), x.overflow, x.count)),
            ScaledTensor::O => {
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
    quality: &Quality,
) -> TraceRow {
    let report = &outcome.report;
    let tensor = mode
        .tensors()
        .iter()
        .copied()
        .reduce(|a, b| if report.tensor(b).max_scaled > report.tensor(a).max_scaled { b } else { a });
    let tensor = tensor.unwrap_or(ScaledTensor::Logit);
    TraceRow {
        step,
        policy,
        layer: outcome.plan.layer,
        max_logit: f64::from(report.tensor(ScaledTensor::Logit).amax),
        descale: largest_descale(tensor, &outcome.plan).unwrap_or(1.0),
        max_scaled: seen.max_scaled,
        overflow: seen.overflow,
        tensor,
        descales: PlanDescales::of(&outcome.plan),
        sqnr_db: quality.sqnr_db,
        output_bias: quality.output_bias,
        softmax_kl: quality.softmax_kl,
    }
}
