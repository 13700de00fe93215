use super::state::replace;
use super::*;
use crate::attention::{AttentionShape, Cpu};
use crate::model::{SyntheticLayer, SyntheticModel, SyntheticOptions, Temperature, preset};
use crate::policy::{AutoCConfig, DelayedTeConfig};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

fn spec() -> AttentionSpec {
    let mut spec = preset("mistral-7b").unwrap();
    spec.d_model = 64;
    spec.layers.truncate(2);
    spec.set_heads(4, 2, 16);
    for layer in &mut spec.layers {
        layer.softmax_scale = 0.25;
        let rope = layer.rope.as_mut().unwrap();
        (rope.rotary_dim, rope.inv_freq) = (16, None);
    }
    spec
}

fn config(kind: PolicyKind) -> RuntimeConfig {
    let policy = match kind {
        PolicyKind::AutoC => PolicyConfig::AutoC(AutoCConfig { burn_in: 3, ..AutoCConfig::default() }),
        PolicyKind::DelayedTe => PolicyConfig::DelayedTe(DelayedTeConfig { history: 4, ..Default::default() }),
        kind => kind.into(),
    };
    RuntimeConfig { policy, ..kind.into() }
}

/// Operands of a step, different at every step.
struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

const SHAPE: AttentionShape =
    AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q: 5, len_k: 5, d_head: 16, d_v: 16 };

impl Operands {
    fn new(step: usize) -> Self {
        let fill =
            |n: usize, seed: usize| (0..n).map(|i| (((i * 37 + seed * 11) % 97) as f32 / 97.0 - 0.5) * 2.0).collect();
        Self {
            q: fill(SHAPE.q_elements(), step),
            k: fill(SHAPE.k_elements(), step + 3),
            v: fill(SHAPE.v_elements(), step + 5),
        }
    }

    fn step<'a>(&'a self, layer: usize, weights: Weights<'a>) -> Step<'a> {
        Step {
            layer,
            weights,
            call: AttentionCall { softmax_scale: 0.25, ..AttentionCall::causal(SHAPE) },
            inputs: Inputs { q: &self.q, k: &self.k, v: &self.v },
            precision: Precision::KERNEL,
        }
    }
}

fn layers(spec: &AttentionSpec, seed: u64) -> Vec<SyntheticLayer> {
    let model = SyntheticModel::new(spec, seed, SyntheticOptions::default()).unwrap();
    (0..spec.layers.len()).map(|layer| model.layer(layer).unwrap()).collect()
}

#[test]
fn bounds_are_recomputed_when_the_weights_change_and_only_then() {
    let spec = spec();
    let (old, new) = (layers(&spec, 1), layers(&spec, 2));
    let mut runtime = Runtime::new(&spec, config(PolicyKind::Geometry)).unwrap();
    let operands = Operands::new(0);
    let error = runtime.step(operands.step(0, Weights::Unchanged), &Cpu).unwrap_err();
    assert!(error.is_argument() && error.to_string().contains("layer 0"), "{error}");

    let mut run = |weights| runtime.step(operands.step(0, weights), &Cpu).unwrap();
    let first = run(Weights::Versioned(7, old[0].weights()));
    assert!(first.recomputed);
    assert!(!run(Weights::Versioned(7, new[0].weights())).recomputed, "the caller's version says unchanged");
    assert!(!run(Weights::Unchanged).recomputed);
    let changed = run(Weights::Versioned(8, new[0].weights()));
    assert!(changed.recomputed);
    assert_ne!(changed.plan, first.plan, "a new plan in the same step");
    assert_eq!(changed.plan, run(Weights::Changed(new[0].weights())).plan);
    assert_eq!(run(Weights::Bounded(bounds_of(&spec, old[0].weights(), &Tail::default()).unwrap())).plan, first.plan);
    assert_eq!(run(Weights::Unchanged).plan, first.plan);
}

#[test]
fn weights_that_cannot_be_bounded_leave_no_plan_behind() {
    let spec = spec();
    let (good, bad) = (layers(&spec, 1), layers(&spec, 2));
    let mut runtime = Runtime::new(&spec, config(PolicyKind::Geometry)).unwrap();
    runtime.update_weights(0, Weights::Changed(good[0].weights())).unwrap();
    let mut weights = bad[0].weights();
    weights.norm_gain = Some(vec![f64::NAN; spec.d_model]);
    assert!(runtime.update_weights(0, Weights::Changed(weights)).unwrap_err().is_non_finite());
    assert!(runtime.plan(0, None).unwrap_err().is_argument());
    assert!(runtime.update_weights(0, Weights::Changed(good[1].weights())).unwrap_err().is_mismatch());
    assert!(runtime.update_weights(2, Weights::Changed(good[1].weights())).unwrap_err().is_argument());
}

#[test]
fn a_call_of_another_model_is_refused() {
    let spec = spec();
    let layers = layers(&spec, 1);
    let mut runtime = Runtime::new(&spec, config(PolicyKind::Geometry)).unwrap();
    let operands = Operands::new(0);
    let mut step = operands.step(0, Weights::Changed(layers[0].weights()));
    step.call.softmax_scale = 0.3;
    assert!(runtime.step(step, &Cpu).unwrap_err().to_string().contains("0.3"));
    let mut step = operands.step(0, Weights::Changed(layers[0].weights()));
    step.call.soft_cap = Some(50.0);
    assert!(runtime.step(step, &Cpu).unwrap_err().is_mismatch());
    let mut step = operands.step(0, Weights::Changed(layers[0].weights()));
    step.call.shape.n_q_heads = 2;
    assert!(runtime.step(step, &Cpu).unwrap_err().is_mismatch());
}

#[test]
fn a_call_past_the_positions_that_bounds_hold_for_is_refused() {
    let mut spec = spec();
    let layers = layers(&spec, 1);
    let operands = Operands::new(0);
    for (positions, fits) in [(SHAPE.len_k, true), (SHAPE.len_k - 1, false)] {
        spec.layers[0].temperature = Some(Temperature { strength: 0.1, period: 4, shift: 0, positions });
        let mut runtime = Runtime::new(&spec, config(PolicyKind::Geometry)).unwrap();
        match runtime.step(operands.step(0, Weights::Changed(layers[0].weights())), &Cpu) {
            Ok(_) => assert!(fits),
            Err(error) => assert!(!fits && error.to_string().contains(&format!("{} keys", SHAPE.len_k)), "{error}"),
        }
    }
}

#[test]
fn resuming_is_bit_equal_to_never_having_stopped() {
    let spec = spec();
    let layers = layers(&spec, 3);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    for kind in PolicyKind::ALL {
        let mut through = Runtime::new(&spec, config(kind)).unwrap();
        let mut resumed = Runtime::new(&spec, config(kind)).unwrap();
        for i in 0..7 {
            if i == 2 || i == 4 {
                resumed.state().write(&path).unwrap();
                let mut elsewhere = spec.clone();
                elsewhere.name = "another folder".into();
                resumed = Runtime::resume(&elsewhere, config(kind), RuntimeState::read(&path).unwrap()).unwrap();
                assert!(resumed.plan(0, None).unwrap_err().is_argument(), "{kind}: weights have to be given again");
            }
            let operands = Operands::new(i);
            for layer in &layers {
                let weights = layer.weights();
                let at = weights.layer;
                let a = through.step(operands.step(at, Weights::Versioned(1, weights.clone())), &Cpu).unwrap();
                let b = resumed.step(operands.step(at, Weights::Versioned(1, weights)), &Cpu).unwrap();
                assert_eq!((a.plan, a.output), (b.plan, b.output), "{kind} step {i}");
            }
        }
        assert_eq!(through.state().policy, resumed.state().policy, "{kind}");
        assert_eq!(resumed.state().layers[1].steps, 7);
    }
}

#[test]
fn a_power_iteration_goes_on_from_its_vectors() {
    let spec = spec();
    let (old, new) = (layers(&spec, 3), layers(&spec, 4));
    let power = |kind: PolicyKind| RuntimeConfig { estimator: Estimator::Power, ..config(kind) };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let config = power(PolicyKind::GeometryCStar);
    let mut through = Runtime::new(&spec, config).unwrap();
    let mut resumed = Runtime::new(&spec, config).unwrap();
    let mut plans = Vec::new();
    for i in 0..8 {
        if [1, 3, 6].contains(&i) {
            resumed.state().write(&path).unwrap();
            resumed = Runtime::resume(&spec, config, RuntimeState::read(&path).unwrap()).unwrap();
        }
        let operands = Operands::new(i);
        // Steps 0 to 2 and 6 to 7 know the weights' version, the others say what they know in other ways.
        let weights = |at: usize| match i {
            0..=2 => Weights::Versioned(1, old[at].weights()),
            3 | 5 => Weights::Unchanged,
            4 => Weights::Changed(old[at].weights()),
            _ => Weights::Versioned(2, new[at].weights()),
        };
        for at in 0..spec.layers.len() {
            let a = through.step(operands.step(at, weights(at)), &Cpu).unwrap();
            let b = resumed.step(operands.step(at, weights(at)), &Cpu).unwrap();
            assert_eq!((&a.plan, a.recomputed), (&b.plan, b.recomputed), "step {i} layer {at}");
            // Every step with weights iterates, whether they changed or not.
            assert_eq!(a.recomputed, ![3, 5].contains(&i));
            if at == 0 {
                plans.push(a.plan.logit_descale);
            }
        }
    }
    assert_eq!(through.state(), resumed.state());
    // One more iteration on the same weights comes closer from below.
    for at in [1, 2, 4] {
        let (new, old) = (&plans[at], &plans[at - 1]);
        assert!(new != old && new.iter().zip(old).all(|(new, old)| new.get() >= old.get()), "step {at}");
    }
    assert_eq!(plans[3], plans[2]);
    // A cold start is another estimate: the vectors that were saved matter.
    let mut cold = Runtime::new(&spec, config).unwrap();
    cold.update_weights(0, Weights::Changed(new[0].weights())).unwrap();
    assert_ne!(cold.plan(0, None).unwrap().logit_descale, plans[6]);

    let state = through.state();
    let gram = self::config(PolicyKind::GeometryCStar);
    let says = |config, state: RuntimeState, part: &str| {
        let error = Runtime::resume(&spec, config, state).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(part), "{error}");
    };
    says(gram, state.clone(), "estimator");
    says(config, RuntimeState { power: None, ..state.clone() }, "vectors");
    let foreign = Some(PowerState::new(&AttentionSpec { d_model: spec.d_model + 1, ..spec.clone() }, 0));
    says(config, RuntimeState { power: foreign, ..state.clone() }, "d_model");
    let mut swapped = state;
    swapped.layers.swap(0, 1);
    says(config, swapped, "own layers");
}

/// `geometry` covers sigma from a cold start on, by a factor that falls with every iteration and ends when the weights change;
/// `auto-c` and `geometry-c-star` take the estimate as it is.
#[test]
fn an_estimate_is_covered_until_the_weights_change() {
    let mut spec = spec();
    spec.layers.iter_mut().for_each(|layer| layer.rope = None);
    let (old, new) = (layers(&spec, 3), layers(&spec, 4));
    let of = |kind: PolicyKind, estimator| Runtime::new(&spec, RuntimeConfig { estimator, ..config(kind) }).unwrap();
    let rounded = |runtime: &Runtime| runtime.bounds(0).unwrap().heads[0].rounded.unwrap();
    let mut exact = of(PolicyKind::Geometry, Estimator::Gram);
    exact.update_weights(0, Weights::Changed(old[0].weights())).unwrap();
    assert!(exact.estimates(0).is_empty());
    let bound = exact.bounds(0).unwrap().heads[0].exact.unwrap();

    let mut covered = of(PolicyKind::Geometry, Estimator::Power);
    let mut plain = of(PolicyKind::AutoC, Estimator::Power);
    let mut last = f64::INFINITY;
    for step in 1..30u64 {
        for runtime in [&mut covered, &mut plain] {
            runtime.update_weights(0, Weights::Versioned(1, old[0].weights())).unwrap();
        }
        let estimate = covered.estimates(0)[0];
        assert_eq!(estimate, plain.estimates(0)[0]);
        assert_eq!((estimate.steps, estimate.cold_iterations), (4 + step, Some(4 + step as usize)));
        let upper = covered.bounds(0).unwrap().heads[0].exact.unwrap();
        assert!(upper >= bound && upper < last, "step {step}: {upper} {bound} {last}");
        assert!(plain.bounds(0).unwrap().heads[0].exact.unwrap() <= bound * (1.0 + 1e-6));
        last = upper;
    }
    assert!(last < 2.0 * bound, "{last} {bound}");
    for runtime in [&mut covered, &mut plain] {
        runtime.update_weights(0, Weights::Versioned(2, new[0].weights())).unwrap();
        assert_eq!((runtime.estimates(0)[0].cold_iterations, runtime.estimates(0)[0].steps), (None, 34));
    }
    assert_eq!(rounded(&covered), rounded(&plain));
}

/// The paper's sum over the heads: one estimate for all heads of a layer, and of the head's own where there is one head.
#[test]
fn the_summed_estimate_is_one_for_a_layer() {
    let spec = spec();
    let weights = layers(&spec, 3);
    for kind in [PolicyKind::GeometryCStar, PolicyKind::AutoC, PolicyKind::Geometry] {
        let config = RuntimeConfig::paper(kind);
        assert_eq!(config.estimator, Estimator::PowerSummed);
        let mut runtime = Runtime::new(&spec, config).unwrap();
        for _ in 0..200 {
            runtime.update_weights(0, Weights::Versioned(1, weights[0].weights())).unwrap();
        }
        let estimates = runtime.estimates(0);
        assert!(estimates.iter().all(|estimate| *estimate == estimates[0]));
        let converged = {
            let geometry = crate::geometry::LayerGeometry::new(&spec, weights[0].weights()).unwrap();
            crate::spectral::summed_norm(&geometry)
        };
        assert!((estimates[0].sigma / converged - 1.0).abs() < 1e-3, "{} {converged}", estimates[0].sigma);
        let plan = runtime.plan(0, None).unwrap();
        assert!(plan.logit_descale.windows(2).all(|pair| pair[0] == pair[1]));
    }
    let none =
        RuntimeConfig { iterations: Iterations { cold: 0, warm: 1 }, ..RuntimeConfig::paper(PolicyKind::Geometry) };
    assert!(Runtime::new(&spec, none).unwrap_err().is_argument());
}

#[test]
fn foreign_states_are_refused_by_name() {
    let spec = spec();
    let state = Runtime::new(&spec, config(PolicyKind::DelayedPaper)).unwrap().state();
    let resume = |spec: &AttentionSpec, config, state: &RuntimeState| {
        Runtime::resume(spec, config, state.clone()).unwrap_err().to_string()
    };
    let right = config(PolicyKind::DelayedPaper);
    // No plan depends on windows or sinks.
    let mut windowed = spec.clone();
    (windowed.layers[1].window, windowed.layers[1].sinks) = (Some(8), true);
    assert!(Runtime::resume(&windowed, right, state.clone()).is_ok());
    let mut other = spec.clone();
    other.d_model = 128;
    assert!(resume(&other, right, &state).contains("d_model"));
    let mut other = spec.clone();
    other.layers[1].softmax_scale = 0.5;
    assert!(resume(&other, right, &state).contains("softmax_scale[1]"));
    assert!(resume(&spec, config(PolicyKind::AutoC), &state).contains("auto-c"));
    let tail = RuntimeConfig { tail: Tail { seq_len: 7, ..right.tail }, ..right };
    assert!(resume(&spec, tail, &state).contains("seq_len"));
    let old = RuntimeState { version: 0, ..state.clone() };
    assert!(resume(&spec, right, &old).contains("version 0"));
    let short = RuntimeState { layers: Vec::new(), ..state };
    assert!(resume(&spec, right, &short).contains("0 layers"));
}

#[test]
fn a_state_cut_at_any_byte_is_refused() {
    let state = Runtime::new(&spec(), config(PolicyKind::DelayedTe)).unwrap().state();
    let bytes = state.encode().unwrap();
    let path = Path::new("state");
    assert_eq!(RuntimeState::decode(path, &bytes).unwrap(), state);
    for length in 0..bytes.len() {
        let error = RuntimeState::decode(path, &bytes[..length]).unwrap_err();
        assert!(error.is_format() && error.to_string().contains("truncated"), "{length}: {error}");
    }
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let result = RuntimeState::decode(path, &damaged);
        assert!(result.is_err(), "byte {at} changed and nobody saw");
    }
    let longer = [&bytes[..], b"}"].concat();
    assert!(RuntimeState::decode(path, &longer).unwrap_err().to_string().contains("1 bytes follow"));
    let foreign = RuntimeState::decode(path, b"{\"version\":1}").unwrap_err();
    assert!(foreign.is_format() && foreign.to_string().contains("not a runtime state"));
    let older = String::from_utf8(bytes).unwrap().replacen("state 1 ", "state 0 ", 1);
    let error = RuntimeState::decode(path, older.as_bytes()).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("version 0"), "{error}");
}

#[test]
fn a_save_that_dies_at_any_byte_leaves_the_old_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let old = Runtime::new(&spec(), config(PolicyKind::DelayedPaper)).unwrap().state();
    let new = Runtime::new(&spec(), config(PolicyKind::AutoC)).unwrap().state();
    old.write(&path).unwrap();
    let bytes = new.encode().unwrap();
    // A process that ends here leaves its temporary file behind.
    let left = folder.path().join(".state.1.tmp");
    for length in (0..=bytes.len()).step_by(7) {
        fs::write(&left, &bytes[..length]).unwrap();
        assert_eq!(RuntimeState::read(&path).unwrap(), old);
        let full = |file: &mut File| {
            file.write_all(&bytes[..length])?;
            Err(io::Error::other("disk full"))
        };
        assert!(replace(&path, full).is_err());
        assert_eq!(RuntimeState::read(&path).unwrap(), old);
    }
    fs::remove_file(&left).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "failed saves clean up");
    new.write(&path).unwrap();
    assert_eq!(RuntimeState::read(&path).unwrap(), new);
    assert!(RuntimeState::read(&folder.path().join("none")).unwrap_err().is_io());
    assert!(new.write(&folder.path().join("no/folder")).unwrap_err().is_io());
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn updates_and_overflows_are_events_with_fields() {
    let spec = spec();
    let layers = layers(&spec, 1);
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    // With one subscriber alone, a thread that has none may switch an event off for everybody while it is registered.
    let _second = tracing::Dispatch::new(tracing_subscriber::fmt().with_writer(io::sink).finish());
    tracing::subscriber::with_default(subscriber, || {
        let mut runtime = Runtime::new(&spec, config(PolicyKind::DelayedPaper)).unwrap();
        let mut operands = Operands::new(0);
        operands.k[3] = 600.0;
        runtime.step(operands.step(0, Weights::Changed(layers[0].weights())), &Cpu).unwrap();
        runtime.step(operands.step(0, Weights::Unchanged), &Cpu).unwrap();
        Runtime::new(&spec, config(PolicyKind::GeometryCStar)).unwrap();
        // The same values where the logits alone are cast, and where nothing is.
        for (kind, precision) in
            [(PolicyKind::Current, Precision::PAPER_LOGITS), (PolicyKind::DelayedTe, Precision::F32)]
        {
            let mut runtime = Runtime::new(&spec, config(kind)).unwrap();
            let mut step = operands.step(0, Weights::Changed(layers[0].weights()));
            step.precision = precision;
            runtime.step(step, &Cpu).unwrap();
        }
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let line = |parts: &[&str]| text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(
        line(&[
            "INFO",
            "scale update",
            "layer=0",
            "step=1",
            "policy=\"delayed-paper\"",
            "tensor=\"k\"",
            "old=",
            "new="
        ]),
        "{text}"
    );
    assert!(
        line(&["WARN", "overflow", "layer=0", "tensor=\"k\"", "overflow=1", "beyond_rounding=1", "max_scaled="]),
        "{text}"
    );
    assert!(line(&["WARN", "beyond the bound", "tensor=\"k\"", "heads=1"]), "{text}");
    assert!(line(&["INFO", "assumption", "uniform on the sphere"]), "{text}");
    // k overflows the first scale of delayed-te, and in these calls it was not cast.
    assert!(!line(&["overflow", "delayed-te"]), "{text}");
    assert!(line(&["WARN", "overflow", "delayed-paper", "tensor=\"k\""]), "{text}");
    assert!(!line(&["WARN", " overflow ", "tensor=\"logit\""]), "logits stay in f32: {text}");
}

/// Means are a center once the burn-in is over, plans then cover what it leaves, and a resumed runtime goes on with the same.
#[test]
fn a_center_of_means_is_frozen_after_the_burn_in() {
    use crate::plan::{CenterPolicy, CenterSource};
    let spec = spec();
    let layers = layers(&spec, 1);
    let centers = CenterPolicy { k: CenterSource::Mean, v: CenterSource::Mean, burn_in: 8, ..CenterPolicy::NONE };
    let with = RuntimeConfig { centers, ..config(PolicyKind::Geometry) };
    let mut runtime = Runtime::new(&spec, with).unwrap();
    let mut plain = Runtime::new(&spec, config(PolicyKind::Geometry)).unwrap();
    let offset = |step: usize| {
        let mut operands = Operands::new(step);
        operands.k.iter_mut().for_each(|x| *x += 3.0);
        operands.v.iter_mut().for_each(|x| *x -= 1.0);
        operands
    };
    let mut last = None;
    for step in 0..4 {
        let operands = offset(step);
        let weights = || if step == 0 { Weights::Changed(layers[0].weights()) } else { Weights::Unchanged };
        let have = runtime.step(operands.step(0, weights()), &Cpu).unwrap();
        let want = plain.step(operands.step(0, weights()), &Cpu).unwrap();
        // Five tokens a step.
        assert_eq!(have.center.is_none(), step < 2, "{step}");
        let (k, plain_k) = (&have.plan.operands.k, &want.plan.operands.k);
        assert!(if step < 2 { k == plain_k } else { k[0] > plain_k[0] }, "a mean may be anywhere: |c| is covered");
        assert!(have.output.stats.k.iter().chain(&have.output.stats.o).all(|cast| cast.overflow == 0));
        for (have, want) in have.output.out.iter().zip(&want.output.out) {
            // Values of up to 2.5 in steps of at most an eighth, in each of the two.
            assert!((have - want).abs() < 0.25, "{step}: {have} {want}");
        }
        for (have, want) in have.output.lse.iter().zip(&want.output.lse) {
            assert!((have - want).abs() < 0.2, "{step}: {have} {want}");
        }
        if step > 2 {
            assert_eq!(Some(&have.center), last.as_ref());
        }
        last = Some(have.center);
    }
    let center = last.unwrap();
    assert!(center.c(0).unwrap().iter().all(|c| (c - 3.0).abs() < 1.0), "{center:?}");
    let state = runtime.state();
    let state: RuntimeState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
    let mut resumed = Runtime::resume(&spec, with, state.clone()).unwrap();
    resumed.update_weights(0, Weights::Changed(layers[0].weights())).unwrap();
    assert_eq!(resumed.center(0).unwrap(), center);
    assert_eq!(resumed.plan(0, None).unwrap(), runtime.plan(0, None).unwrap());
    assert!(Runtime::resume(&spec, config(PolicyKind::Geometry), state).unwrap_err().is_mismatch());
    // Bounds of the caller's own say nothing about positions: |c| is added.
    let bounds = bounds_of(&spec, layers[0].weights(), &Tail::default()).unwrap();
    resumed.update_weights(0, Weights::Bounded(bounds.clone())).unwrap();
    let largest = center.c(0).unwrap().iter().fold(0.0, |a: f32, c| a.max(c.abs()));
    let covered = f64::from(resumed.plan(0, None).unwrap().operands.k[0].get()) * 448.0;
    assert!(covered >= bounds.k[0].rounded + f64::from(largest));
    assert!(runtime.center(7).unwrap_err().is_argument());
}

/// A key bias under rotation: the plan's scale of keys is that of what is left.
#[test]
fn a_center_of_the_weights_lowers_the_scale_of_keys() {
    use crate::plan::CenterPolicy;
    let mut spec = spec();
    spec.bias.k = true;
    spec.max_positions = Some(16);
    let rope = spec.layers[0].rope.as_mut().unwrap();
    rope.inv_freq = Some((0..rope.rotary_dim / 2).map(|i| 1e-4 * 0.5f64.powi(i as i32)).collect());
    let layers = layers(&spec, 1);
    let biased = || {
        let mut weights = layers[0].weights();
        let r = spec.layers[0].d_head * spec.layers[0].n_kv_heads;
        weights.k.bias = Some((0..r).map(|i| if i % 5 == 0 { 200.0 } else { 0.0 }).collect());
        weights
    };
    let plan = |centers| {
        let mut runtime = Runtime::new(&spec, RuntimeConfig { centers, ..config(PolicyKind::Geometry) }).unwrap();
        runtime.update_weights(0, Weights::Changed(biased())).unwrap();
        (runtime.plan(0, None).unwrap(), runtime.center(0).unwrap())
    };
    let ((plain, none), (centered, center)) = (plan(CenterPolicy::NONE), plan(CenterPolicy::CACHE));
    assert!(none.is_none() && center.v.is_none());
    assert_eq!(center.c(0).map(|c| (c[0] - 200.0).abs() < 1.0), Some(true));
    for (centered, plain) in centered.operands.k.iter().zip(&plain.operands.k) {
        assert!(centered.get() < 0.7 * plain.get(), "{centered:?} {plain:?}");
    }
    assert_eq!(centered.operands.q, plain.operands.q);
    assert_eq!(centered.operands.v, plain.operands.v);
}
