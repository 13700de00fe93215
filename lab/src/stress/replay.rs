//! Recorded maxima through the policies that work from maxima.
//!
//! A trace holds one amax per layer and tensor of every recorded step. There are no values to cast, so an overflow counts
//! a tensor whose amax exceeds its descale's range, and there is no SQNR or KL. Steps between recorded ones are missing:
//! a history of 16 spans 160 steps of training where every tenth was recorded.

use super::lab::{Seen, Tally, scaled};
use super::options::{Mode, Scenario, StressOptions, check_policies};
use super::result::{PlanDescales, PolicySummary, StressResult, TraceRow, Unavailable, largest_descale};
use serde::Deserialize;
use sigmascale::bound::{E4M3_MAX, HeadBounds, LayerBounds, OperandBound};
use sigmascale::model::read_capped;
use sigmascale::policy::{PolicyKind, PolicyShape, ScaledTensor};
use sigmascale::stats::{CastStats, LogitStats, StepStats};
use sigmascale::{Error, Result};
use std::path::Path;

/// Largest trace file that is read.
const MAX_FILE: u64 = 64 << 20;

/// Policies that work from maxima.
const OBSERVING: [PolicyKind; 3] = [PolicyKind::DelayedPaper, PolicyKind::DelayedTe, PolicyKind::Current];

/// Recorded maxima of a training run.
#[derive(Clone, Debug, Deserialize)]
pub struct Trace {
    /// What it is.
    #[serde(default)]
    pub what: String,
    /// Training.
    #[serde(default)]
    pub train: Vec<ReplayStep>,
    /// What follows: a learning-rate spike.
    #[serde(default)]
    pub lr_spike: Vec<ReplayStep>,
}

/// One recorded step; every row has one value per layer.
#[derive(Clone, Debug, Deserialize)]
pub struct ReplayStep {
    /// amax of q.
    pub q: Vec<f32>,
    /// amax of k.
    pub k: Vec<f32>,
    /// amax of v.
    pub v: Vec<f32>,
    /// Largest |logit|.
    pub s: Vec<f32>,
}

impl Trace {
    /// Reads a trace file.
    ///
    /// # Errors
    /// `is_io` if it cannot be read; `is_format` if it is no trace, has no steps, or its rows differ in length.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_FILE, "a trace")?;
        let trace: Self =
            serde_json::from_slice(&bytes).map_err(|error| Error::format(path, format_args!("no trace: {error}")))?;
        trace.check().map_err(|rule| Error::format(path, rule))?;
        Ok(trace)
    }

    fn steps(&self) -> impl Iterator<Item = &ReplayStep> {
        self.train.iter().chain(&self.lr_spike)
    }

    /// Layers of the recorded model.
    pub fn layers(&self) -> usize {
        self.steps().next().map_or(0, |step| step.q.len())
    }

    fn check(&self) -> std::result::Result<(), String> {
        let layers = self.layers();
        if layers == 0 {
            return Err("the trace has no steps or no layers".into());
        }
        for (at, step) in self.steps().enumerate() {
            let rows = [&step.q, &step.k, &step.v, &step.s];
            if rows.iter().any(|row| row.len() != layers || row.iter().any(|x| !x.is_finite() || *x < 0.0)) {
                return Err(format!("step {at} does not have {layers} finite maxima in each row"));
            }
        }
        Ok(())
    }
}

/// Runs a trace through `delayed-paper`, `delayed-te` and `current`, those of them that the options name; the others need
/// weights and are named as unavailable.
///
/// # Errors
/// `is_format` if the trace's rows do not fit each other, `is_argument` if none of the policies can run or one is named
/// twice.
pub fn replay(name: &str, trace: &Trace, options: &StressOptions) -> Result<StressResult> {
    trace.check().map_err(|rule| Error::format(Path::new(name), rule))?;
    check_policies(&options.policies)?;
    if !options.policies.iter().any(|policy| OBSERVING.contains(&policy.kind())) {
        let known = OBSERVING.map(PolicyKind::name).join(", ");
        return Err(Error::argument(format_args!("a replay has no weights: name one of the policies {known}")));
    }
    let layers = trace.layers();
    let shape = PolicyShape::uniform(layers, 1, 1);
    let mode = options.mode;
    let (mut policies, mut unavailable, mut rows) = (Vec::<PolicySummary>::new(), Vec::new(), Vec::new());
    for config in &options.policies {
        let kind = config.kind();
        if !OBSERVING.contains(&kind) {
            unavailable
                .push(Unavailable { policy: kind, reason: "it needs weights, which a trace does not have".into() });
            continue;
        }
        let mut policy = config.build(shape.clone())?;
        let mut tally = Tally::default();
        for (step, recorded) in trace.steps().enumerate() {
            for layer in 0..layers {
                let (bounds, stats) = (no_bounds(layer), stats(recorded, layer));
                let plan = policy.plan(&bounds, Some(&stats))?;
                let report = policy.observe(&plan, &bounds, &stats)?;
                let tensors = mode.tensors().iter().map(|tensor| report.tensor(*tensor));
                let mut seen = Seen { max_scaled: 0.0, overflow: 0, values: 0, utilization: Vec::new() };
                let mut worst = ScaledTensor::Logit;
                for tensor in tensors {
                    let Some(descale) = tensor.tensor.descales(&plan).and_then(|row| row.first()) else { continue };
                    let scaled = scaled(tensor.amax, *descale);
                    if seen.values == 0 || scaled > seen.max_scaled {
                        (seen.max_scaled, worst) = (scaled, tensor.tensor);
                    }
                    seen.overflow += u64::from(scaled > E4M3_MAX);
                    seen.values += 1;
                    seen.utilization.push(scaled / E4M3_MAX);
                }
                tally.add(layer, step, &seen);
                rows.push(TraceRow {
                    step,
                    policy: kind,
                    layer,
                    max_logit: f64::from(recorded.s[layer]),
                    descale: largest_descale(worst, &plan).unwrap_or(1.0),
                    max_scaled: seen.max_scaled,
                    overflow: seen.overflow,
                    tensor: worst,
                    descales: PlanDescales::of(&plan),
                    sqnr_db: None,
                    output_bias: None,
                    softmax_kl: None,
                });
            }
        }
        policies.push(tally.summary(kind, layers, policy.assumption()));
    }
    let place = |kind: PolicyKind| options.policies.iter().position(|policy| policy.kind() == kind);
    rows.sort_by_key(|row| (row.step, place(row.policy), row.layer));
    let steps = trace.steps().count();
    let mut notes = vec!["counts are of tensors: a trace has maxima, not values".to_owned()];
    if mode == Mode::Operands {
        notes.push("an overshoot below 464/448 of a maximum changes nothing: it rounds to 448".into());
    }
    if !trace.what.is_empty() {
        notes.push(trace.what.clone());
    }
    Ok(StressResult {
        scenario: Scenario::Replay,
        mode,
        model: name.to_owned(),
        model_layers: layers,
        model_layers_total: layers,
        seed: options.seed,
        steps,
        estimator: options.estimator,
        seq_len: options.seq_len,
        tokens: None,
        tail: None,
        auto_c_burn_in: 0,
        parameters: options.policies.clone(),
        notes,
        policies,
        unavailable,
        trace: rows,
    })
}

/// The observing policies read no bound, only the shape.
fn no_bounds(layer: usize) -> LayerBounds {
    let none = OperandBound { exact: f64::INFINITY, rounded: f64::INFINITY };
    LayerBounds { layer, heads: vec![HeadBounds::default()], q: vec![none], k: vec![none], v: None, m: None }
}

fn stats(step: &ReplayStep, layer: usize) -> StepStats {
    let cast = |amax: f32| vec![CastStats { amax, count: 1, ..CastStats::default() }];
    let logit = step.s[layer];
    StepStats {
        logits: vec![LogitStats { max: logit, min: -logit, count: 1, ..LogitStats::default() }],
        q: cast(step.q[layer]),
        k: cast(step.k[layer]),
        v: cast(step.v[layer]),
        // Not recorded: an output lies within its values.
        o: cast(step.v[layer]),
    }
}
