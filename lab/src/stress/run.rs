//! The scenarios over a model's weights.

use super::bounds::BoundStage;
use super::lab::Lab;
use super::model::StressModel;
use super::options::{Progress, SPIKE_STEP, Scenario, StressOptions, auto_c, check_policies, with_burn_in};
use super::result::{StressResult, TraceRow, refuse_without_policies};
use super::tokens::Source;
use crate::forward::project;
use sigmascale::bound::Tail;
use sigmascale::policy::{PolicyConfig, Pooling};
use sigmascale::runtime::Weights;
use sigmascale::spectral::Estimator;
use sigmascale::{Error, Result};

/// Layers of a synthetic model that a scenario of more than one step takes by default.
const FEW_LAYERS: usize = 4;

/// Longest run.
const MAX_STEPS: usize = 100_000;

/// Longest generated refit: the growth of longer ones leaves f32.
const MAX_GROWTH_STEPS: usize = 500;

/// Longest sequence.
const MAX_SEQ_LEN: usize = 16_384;

/// Runs a scenario.
///
/// # Errors
/// `is_argument` if an option breaks its rule, `is_unsupported` if the model cannot be run on tokens or on text; otherwise
/// as the model and [`Runtime::step`](sigmascale::runtime::Runtime::step). A policy that cannot plan for this model is left out
/// and named in the result.
pub fn run(scenario: Scenario, model: &StressModel, options: &StressOptions) -> Result<StressResult> {
    run_with_progress(scenario, model, options, |_| ())
}

/// As [`run`], and calls `progress` after every step of every layer.
///
/// # Errors
/// As [`run`].
pub fn run_with_progress(
    scenario: Scenario,
    model: &StressModel,
    options: &StressOptions,
    mut progress: impl FnMut(Progress),
) -> Result<StressResult> {
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
        [("layers", layers, spec.layers.len()), ("steps", steps, most), ("seq_len", options.seq_len, MAX_SEQ_LEN)]
    {
        if !(1..=most).contains(&value) {
            return Err(Error::argument(format_args!("{name} {value} must lie between 1 and {most}")));
        }
    }
    if let Some(shortest) = spec.bounded_positions().filter(|most| options.seq_len > *most) {
        return Err(Error::argument(format_args!(
            "seq_len {} must be at most {shortest}: the model's queries grow with the position and are bounded up to there",
            options.seq_len
        )));
    }
    check_policies(&options.policies)?;
    let policies: Vec<PolicyConfig> = options.policies.iter().map(|policy| with_burn_in(*policy, steps)).collect();
    if layers > 1 && auto_c(&policies).pooling == Pooling::Model {
        return Err(Error::argument(
            "auto-c with pooling model cannot end its burn-in here, since layers run through all steps one by one: use \
             pooling layer or head",
        ));
    }
    if options.bounds_on_gpu && options.estimator != Estimator::Gram {
        return Err(Error::argument(format_args!(
            "bounds on the GPU are from exact norms here: estimator {} runs on the CPU",
            options.estimator.name()
        )));
    }
    let stage = BoundStage::open(options.bounds_on_gpu)?;
    // One sequence per step: delta is that of the whole run.
    let tail = Tail { delta: options.delta, seq_len: options.seq_len, batch: 1, steps };
    let mut lab = Lab::new(spec, options, &policies, tail)?;
    let mut trace = Vec::with_capacity(layers * steps * lab.runs.len());
    let factor = |step: usize| if recorded.is_some() { 1.0 } else { scenario.factor(step) };
    let mut source = match &options.tokens {
        Some(file) => Source::text(model, file, steps, options.seq_len, recorded.is_some())?,
        None => Source::Isotropic { seed: options.seed, seq_len: options.seq_len },
    };
    for layer in 0..layers {
        let stored = model.layer(layer, options.seq_len, options.seed)?;
        let mut version = 0;
        for step in 0..steps {
            let at = if recorded.is_some() { step } else { 0 };
            let weights = stored.weights(at, factor(step))?;
            let sinks = model.sinks(layer, at)?;
            let inputs = project(spec, &weights, &source.tokens(spec, layer, step))?;
            let changed = recorded.is_some() || step == 0 || factor(step) != factor(step - 1);
            let bounds = changed.then(|| stage.layer(spec, weights.clone(), &tail)).transpose()?;
            version += u64::from(changed);
            let again = |estimated: bool| match estimated {
                true => Weights::Versioned(version, weights.clone()),
                false => bounds.clone().map_or(Weights::Unchanged, Weights::Bounded),
            };
            let attention = lab.step(layer, step, &again, &inputs, sinks.as_deref(), &mut trace)?;
            if layer + 1 < layers {
                source.advance(spec, &weights, step, &attention)?;
            }
            progress(Progress { layer: layer + 1, layers, step: step + 1, steps });
        }
    }
    trace.sort_by_key(|row: &TraceRow| (row.step, lab.place(row.policy), row.layer));
    let mut notes = model.notes();
    if options.bounds_on_gpu {
        notes.push("bounds come from the scale engine on the GPU; attention runs on the CPU".into());
    }
    let windowed =
        spec.layers[..layers].iter().filter(|own| own.window.is_some_and(|keys| keys < options.seq_len)).count();
    if windowed > 0 {
        notes.push(format!("{windowed} of the {layers} layers have a sliding window shorter than the sequence"));
    }
    if model.is_synthetic() && spec.layers.iter().any(|own| own.sinks) {
        notes.push("the sinks of the softmax are zero".into());
    }
    if recorded.is_some() {
        notes.push(format!("weights of {}, one per step", model.path_names().join(", ")));
    }
    if scenario == Scenario::WeightSpike && steps <= SPIKE_STEP {
        notes.push(format!("the run ends before step {SPIKE_STEP}, at which the weights would have grown"));
    }
    notes.extend(options.estimator.caveat().map(|caveat| format!("estimator {}: {caveat}", options.estimator.name())));
    let tokens = source.summary();
    notes.push(match &tokens {
        Some(text) => text.note(options.seq_len, steps, scenario != Scenario::CheckpointLoad),
        None => "tokens are isotropic; those of trained models align with the weights and give larger logits".into(),
    });
    let burn_in = auto_c(&policies).burn_in;
    let parameters = policies;
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
        estimator: options.estimator,
        seq_len: options.seq_len,
        tokens,
        tail: Some(tail),
        auto_c_burn_in: burn_in,
        parameters,
        notes,
        policies,
        unavailable,
        trace,
    })
}
