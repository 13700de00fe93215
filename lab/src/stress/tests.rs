use super::lab::{identity, look, row};
use super::metrics::Quality;
use super::*;
use sigmascale::Descale;
use sigmascale::attention::AttentionShape;
use sigmascale::model::{Temperature, preset};
use sigmascale::policy::{AutoCConfig, PolicyConfig, PolicyKind, Pooling, ScaledTensor};
use sigmascale::runtime::StepOutcome;

/// A few small layers of a preset.
fn small(name: &str, layers: usize) -> StressModel {
    let mut spec = preset(name).unwrap();
    (spec.name, spec.d_model) = ("small".into(), 128);
    spec.layers.truncate(layers);
    spec.set_heads(4, 2, 32);
    for layer in &mut spec.layers {
        layer.softmax_scale = 32f64.sqrt().recip();
        if let Some(rope) = &mut layer.rope {
            (rope.rotary_dim, rope.inv_freq) = (32, Some((0..16).map(|i| 0.6f64.powi(i)).collect()));
        }
    }
    StressModel::synthetic(&spec, 3).unwrap()
}

fn options(mode: Mode) -> StressOptions {
    StressOptions { mode, seq_len: 40, ..StressOptions::default() }
}

fn of(result: &StressResult, kind: PolicyKind) -> &PolicySummary {
    result.policies.iter().find(|summary| summary.policy == kind).unwrap()
}

#[test]
fn at_a_checkpoint_load_the_papers_delayed_overflows_everywhere_and_geometry_nowhere() {
    for name in ["gpt2-xl", "mistral-7b"] {
        let result = run(Scenario::CheckpointLoad, &small(name, 3), &options(Mode::Logit)).unwrap();
        assert_eq!((result.model_layers, result.policies.len(), result.trace.len()), (3, 6, 18));
        let delayed = of(&result, PolicyKind::DelayedPaper);
        assert_eq!((delayed.overflow_layers, delayed.first_bad_step), (3, Some(0)));
        // A history of ones: the largest logit, 20, becomes 20 * 448 * 0.9.
        assert!((delayed.max_scaled - 20.0 * 403.2).abs() < 100.0, "{}", delayed.max_scaled);
        for kind in [PolicyKind::Geometry, PolicyKind::AutoC, PolicyKind::Current, PolicyKind::DelayedTe] {
            let summary = of(&result, kind);
            assert_eq!((summary.overflow_layers, summary.overflow_values, summary.first_bad_step), (0, 0, None));
            assert!(summary.overshoot.is_none());
            assert!(summary.sqnr_db.unwrap() > delayed.sqnr_db.unwrap() + 5.0, "{name} {kind}");
            assert!(summary.softmax_kl.unwrap() < delayed.softmax_kl.unwrap(), "{name} {kind}");
        }
        assert!(of(&result, PolicyKind::Current).utilization.p90 > 0.9);
        assert!(of(&result, PolicyKind::GeometryCStar).assumption.is_some());
    }
}

#[test]
fn small_operands_fit_transformer_engines_start() {
    let result = run(Scenario::CheckpointLoad, &small("mistral-7b", 2), &options(Mode::Operands)).unwrap();
    for summary in &result.policies {
        let bad = summary.policy == PolicyKind::DelayedPaper;
        assert_eq!(summary.overflow_layers, if bad { 2 } else { 0 }, "{}", summary.policy);
        assert!(summary.sqnr_db.is_some() && summary.softmax_kl.is_some());
    }
}

#[test]
fn a_spike_moves_geometry_in_the_same_step_and_delayed_one_later() {
    let options = StressOptions { steps: Some(14), ..options(Mode::Logit) };
    let result = run(Scenario::WeightSpike, &small("gpt2-xl", 2), &options).unwrap();
    let row =
        |kind, step| result.trace.iter().find(|row| row.policy == kind && row.step == step && row.layer == 1).unwrap();
    let ratio = |of: fn(&PlanDescales) -> Option<f64>| {
        let at = |step| of(&row(PolicyKind::Geometry, step).descales).unwrap();
        at(10) / at(9)
    };
    let (logit, q) = (ratio(|d| d.logit_descale), ratio(|d| d.q_descale));
    assert!((logit - 16.0).abs() < 1e-3 && (q - 4.0).abs() < 1e-3, "{logit} {q}");
    assert_eq!(of(&result, PolicyKind::Geometry).overflow_values, 0);
    for kind in [PolicyKind::DelayedPaper, PolicyKind::DelayedTe] {
        assert!(row(kind, 10).overflow > 0, "{kind}");
        assert_eq!(row(kind, 9).overflow, 0, "{kind}");
    }
    // Other tokens may pass the last maximum by a little; nothing as large as the spike is left.
    assert!(row(PolicyKind::DelayedPaper, 11).max_scaled < 1.5 * 448.0);
    assert!(row(PolicyKind::DelayedPaper, 10).max_scaled > 8.0 * 448.0);
    // Burn-in is over after 3 of 14 steps: the frozen constant moves with the bound.
    assert_eq!(result.auto_c_burn_in, 3);
    let auto = of(&result, PolicyKind::AutoC);
    assert!(auto.utilization.median > 2.0 * of(&result, PolicyKind::Geometry).utilization.median);
    assert_eq!((auto.overflow_values, auto.fallbacks), (0, 0));
}

#[test]
fn policies_run_with_their_own_parameters() {
    use sigmascale::policy::{AmaxAlgorithm, DelayedPaperConfig, DelayedTeConfig};
    let policies = vec![
        PolicyConfig::AutoC(AutoCConfig { burn_in: 2, kappa: 8.0, ..AutoCConfig::default() }),
        PolicyConfig::DelayedPaper(DelayedPaperConfig { margin: 0.25, history: 1, ..DelayedPaperConfig::default() }),
        PolicyConfig::DelayedTe(DelayedTeConfig {
            history: 4,
            algorithm: AmaxAlgorithm::MostRecent,
            margin: 3,
            ..DelayedTeConfig::default()
        }),
    ];
    let by_default = StressOptions { steps: Some(6), ..options(Mode::Operands) };
    let named = StressOptions { policies, ..by_default.clone() };
    let model = small("gpt2-xl", 1);
    let descale = |options: &StressOptions, kind: PolicyKind| {
        let result = run(Scenario::WeightSpike, &model, options).unwrap();
        let row = result.trace.iter().find(|row| row.policy == kind && row.step == 5).unwrap().descales;
        (result.auto_c_burn_in, row.q_descale.unwrap())
    };
    for kind in [PolicyKind::AutoC, PolicyKind::DelayedPaper, PolicyKind::DelayedTe] {
        let ((default, plain), (burn_in, own)) = (descale(&by_default, kind), descale(&named, kind));
        assert_eq!((default, burn_in), (1, 2));
        assert!(own > 1.5 * plain, "{kind}: {own} after {plain}");
    }
}

#[test]
fn growing_weights_leave_delayed_behind() {
    let options = StressOptions { steps: Some(12), ..options(Mode::Operands) };
    let result = run(Scenario::Refit, &small("mistral-7b", 1), &options).unwrap();
    assert!(of(&result, PolicyKind::DelayedTe).overflow_steps >= 6);
    assert!(of(&result, PolicyKind::DelayedTe).overshoot.unwrap().p90 < 1.7);
    assert_eq!(of(&result, PolicyKind::Geometry).overflow_values, 0);
    assert_eq!(of(&result, PolicyKind::Current).overflow_values, 0);
}

#[test]
fn a_policy_without_its_bound_is_named_not_run() {
    let mut spec = preset("qwen3-8b").unwrap();
    spec.d_model = 128;
    spec.layers.truncate(2);
    spec.set_heads(2, 1, spec.layers[0].d_head);
    let model = StressModel::synthetic(&spec, 3).unwrap();
    let result = run(Scenario::CheckpointLoad, &model, &options(Mode::Logit)).unwrap();
    assert_eq!(result.unavailable.len(), 1);
    assert_eq!(result.unavailable[0].policy, PolicyKind::GeometryCStar);
    assert!(result.trace.iter().all(|row| row.policy != PolicyKind::GeometryCStar));
}

#[test]
fn the_json_has_the_keys_that_scripts_read() {
    let result = run(Scenario::CheckpointLoad, &small("gpt2-xl", 1), &options(Mode::Logit)).unwrap();
    let json = serde_json::to_value(&result).unwrap();
    assert_eq!(json["scenario"], "checkpoint-load");
    assert_eq!(json["mode"], "logit");
    for key in ["model", "model_layers", "seed"] {
        assert!(!json[key].is_null(), "{key}");
    }
    let policy = json["policies"][3].as_object().unwrap();
    assert_eq!(policy["policy"], "delayed-paper");
    for key in [
        "layers",
        "overflow_layers",
        "overflow_steps",
        "clipped_steps",
        "sqnr_worst_step_db",
        "first_bad_step",
        "overflow_values",
        "max_scaled",
        "sqnr_db",
        "output_bias",
        "softmax_kl",
    ] {
        assert!(policy[key].is_number(), "{key}");
    }
    for key in ["p10", "median", "p90"] {
        assert!(policy["utilization"][key].is_number(), "{key}");
    }
    let row = json["trace"][0].as_object().unwrap();
    assert_eq!(row["policy"], "geometry");
    for key in ["step", "layer", "max_logit", "descale", "max_scaled", "overflow", "output_bias"] {
        assert!(row[key].is_number(), "{key}");
    }
}

/// Each layer's calls have the window, sinks and soft-cap of its config: the logits that a run counts are the pairs that the
/// windows show.
#[test]
fn runs_have_the_models_windows_sinks_and_soft_cap() {
    let config = |family: &str, extra: &str| {
        let json = format!(
            r#"{{"model_type":"{family}","hidden_size":128,"num_hidden_layers":4,"num_attention_heads":4,
                "num_key_value_heads":2,"head_dim":32,"max_position_embeddings":64,"rope_theta":100.0{extra}}}"#
        );
        sigmascale::model::AttentionSpec::from_config_json(json.as_bytes(), "small.json".as_ref()).unwrap()
    };
    let cases = [
        (config("mistral", r#","sliding_window":8"#), [8, 8, 8, 8]),
        (config("gemma2", r#","sliding_window":8"#), [8, 40, 8, 40]),
        (config("gemma3_text", r#","sliding_window":5,"sliding_window_pattern":3"#), [5, 5, 40, 5]),
        (config("gpt_oss", r#","sliding_window":3"#), [3, 40, 3, 40]),
    ];
    for (spec, windows) in cases {
        let model = StressModel::synthetic(&spec, 3).unwrap();
        for mode in [Mode::Logit, Mode::Operands] {
            let result = run(Scenario::CheckpointLoad, &model, &options(mode)).unwrap();
            // The isotropic bounds do not hold behind a QK-norm.
            let policies = if spec.qk_norm.is_some() { 5 } else { 6 };
            let seen = (result.policies.len(), of(&result, PolicyKind::Geometry).overflow_values);
            assert_eq!(seen, (policies, 0), "{}", spec.family);
            assert!(result.policies.iter().all(|policy| policy.softmax_kl.is_some()));
            let short = windows.iter().filter(|window| **window < 40).count();
            let note = format!("{short} of the 4 layers have a sliding window shorter than the sequence");
            assert!(result.notes.contains(&note), "{:?}", result.notes);
            assert_eq!(result.notes.iter().any(|note| note.contains("sinks")), spec.family == "gpt_oss");
            let pairs = |window: usize| (0..40).map(|row: usize| (row + 1).min(window) as u64).sum::<u64>();
            let want = match mode {
                Mode::Logit => 4 * windows.map(pairs).iter().sum::<u64>(),
                Mode::Operands => 4 * 40 * 32 * (4 + 2 + 2),
            };
            assert_eq!(of(&result, PolicyKind::Current).values, want, "{}", spec.family);
            if let Some(cap) = spec.soft_cap {
                assert!(result.trace.iter().all(|row| row.max_logit <= cap));
            }
        }
        let sinks = model.sinks(0, 0).unwrap();
        assert_eq!(sinks, (spec.family == "gpt_oss").then(|| vec![0.0; 4]));
        let call = calls::call_of(&spec, 0, 40, sinks.as_deref());
        assert_eq!((call.soft_cap, call.sinks.is_some()), (spec.soft_cap, spec.layers[0].sinks));
        assert_eq!(
            call.mask,
            sigmascale::attention::Mask {
                window_right: Some(windows[0] - 1),
                ..sigmascale::attention::Mask::sliding(windows[0])
            }
        );
    }
}

#[test]
fn runs_repeat_and_arguments_are_checked() {
    let model = small("gpt2-xl", 2);
    let json = |options: &StressOptions| {
        serde_json::to_string(&run(Scenario::CheckpointLoad, &model, options).unwrap()).unwrap()
    };
    let first = options(Mode::Operands);
    assert_eq!(json(&first), json(&first));
    assert_ne!(json(&first), json(&StressOptions { seed: 9, ..first.clone() }));
    for bad in [
        StressOptions { layers: Some(3), ..first.clone() },
        StressOptions { layers: Some(0), ..first.clone() },
        StressOptions { seq_len: 0, ..first.clone() },
        StressOptions { steps: Some(0), ..first.clone() },
        StressOptions { policies: Vec::new(), ..first.clone() },
        StressOptions { policies: vec![PolicyKind::AutoC.into(); 2], ..first.clone() },
        StressOptions {
            policies: vec![PolicyConfig::AutoC(AutoCConfig { pooling: Pooling::Model, ..AutoCConfig::default() })],
            ..first.clone()
        },
    ] {
        assert!(run(Scenario::CheckpointLoad, &model, &bad).unwrap_err().is_argument());
    }
    assert!(run(Scenario::Replay, &model, &first).unwrap_err().is_argument());
}

#[test]
fn sequences_past_the_positions_that_bounds_hold_for_are_refused() {
    let mut spec = small("mistral-7b", 2).spec().clone();
    spec.layers[1].temperature = Some(Temperature { strength: 0.5, period: 8, shift: 1, positions: 40 });
    let model = StressModel::synthetic(&spec, 3).unwrap();
    let result = run(Scenario::CheckpointLoad, &model, &options(Mode::Operands)).unwrap();
    assert_eq!(of(&result, PolicyKind::Geometry).overflow_layers, 0);
    let long = StressOptions { seq_len: 41, ..options(Mode::Operands) };
    let error = run(Scenario::CheckpointLoad, &model, &long).unwrap_err();
    assert!(error.is_argument() && error.to_string().contains("seq_len 41 must be at most 40"), "{error}");
}

#[test]
fn a_replay_counts_tensors() {
    let step = |x: f32| ReplayStep { q: vec![x, 1.0], k: vec![x, 1.0], v: vec![x, 1.0], s: vec![x * x, 1.0] };
    let trace =
        Trace { what: String::new(), train: [1.0, 1.0, 3.0, 3.0].map(step).to_vec(), lr_spike: vec![step(6.0)] };
    let options = options(Mode::Operands);
    let result = replay("recorded", &trace, &options).unwrap();
    assert_eq!((result.policies.len(), result.unavailable.len(), result.steps), (3, 3, 5));
    let te = of(&result, PolicyKind::DelayedTe);
    // Layer 0, q, k and v: at steps 2 and 4.
    assert_eq!((te.overflow_values, te.overflow_steps, te.overflow_layers, te.first_bad_step), (6, 2, 1, Some(2)));
    assert!((te.overshoot.unwrap().p90 - 3.0).abs() < 1e-5);
    assert_eq!(of(&result, PolicyKind::Current).overflow_values, 0);
    let uneven = Trace { train: vec![ReplayStep { q: vec![1.0], ..step(1.0) }], ..trace };
    assert!(replay("recorded", &uneven, &options).unwrap_err().is_format());
}

#[test]
fn utilization_uses_the_descale_of_each_heads_group() {
    use sigmascale::policy::PolicyShape;
    use sigmascale::stats::{CastStats, LogitStats, StepStats};
    let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q: 1, len_k: 1, d_head: 16, d_v: 16 };
    let mut plan = identity(0, &shape);
    let two = vec![Descale::ONE, Descale::new(2.0).unwrap()];
    (plan.operands.q, plan.operands.k, plan.operands.v) = (two.clone(), two.clone(), Some(two));
    let cast = |amax: f32| CastStats { amax, overflow: 1, count: 2, ..CastStats::default() };
    let stats = StepStats {
        logits: vec![LogitStats::default(); 4],
        q: [448.0, 224.0, 448.0, 224.0].map(cast).to_vec(),
        k: [448.0; 2].map(cast).to_vec(),
        v: [896.0; 2].map(cast).to_vec(),
        o: vec![CastStats::default(); 4],
    };
    let shape_of = PolicyShape::uniform(1, 4, 2);
    let config = PolicyConfig::from(PolicyKind::DelayedPaper);
    let mut policy = config.build(shape_of).unwrap();
    let bounds = sigmascale::bound::LayerBounds {
        layer: 0,
        heads: vec![sigmascale::bound::HeadBounds::default(); 4],
        q: vec![sigmascale::bound::OperandBound { exact: 1.0, rounded: 1.0 }; 4],
        k: vec![sigmascale::bound::OperandBound { exact: 1.0, rounded: 1.0 }; 2],
        v: None,
        m: None,
    };
    let report = policy.observe(&plan, &bounds, &stats).unwrap();
    let output = sigmascale::attention::AttentionOutput { out: vec![], lse: vec![], centered: None, sums: None, stats };
    let outcome = StepOutcome { plan, center: sigmascale::plan::Center::none(0), output, report, recomputed: false };
    let seen = look(Mode::Operands, &shape, &outcome);
    assert_eq!(seen.utilization, [1.0, 0.5, 0.5, 0.25, 1.0, 0.5, 2.0, 1.0]);
    assert_eq!((seen.max_scaled, seen.overflow, seen.values), (896.0, 8, 16));
    let row = row(0, PolicyKind::DelayedPaper, Mode::Operands, &outcome, &seen, &Quality::default());
    assert_eq!((row.tensor, row.descale, row.max_scaled), (ScaledTensor::V, 2.0, 896.0));
}
