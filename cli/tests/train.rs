//! Training scenarios: promises that hold for every seed, and the command.

use sigmascale::bound::Tail;
use sigmascale::fp8::OnOverflow;
use sigmascale::policy::{AutoCConfig, PolicyConfig, PolicyKind};
use sigmascale_lab::stress::{Mode, Scenario};
use sigmascale_lab::train::{Arm, LabOptions, ModelKind, TrainOptions, Trainer, run, run_with_progress};
use std::process::Command;
use std::sync::Mutex;

fn short(model: ModelKind, mode: Mode) -> LabOptions {
    let base = LabOptions::new(model);
    let policy = |kind| match kind {
        PolicyKind::AutoC => PolicyConfig::AutoC(AutoCConfig { burn_in: 6, ..AutoCConfig::default() }),
        kind => kind.into(),
    };
    LabOptions {
        policies: PolicyKind::ALL.map(policy).to_vec(),
        train: TrainOptions { batch: 2, seq_len: 24, seed: 5, ..base.train },
        mode,
        transition: Some(12),
        after: Some(4),
        ..base
    }
}

#[test]
fn lr_spike_runs_every_policy_and_geometry_never_overflows() {
    for mode in [Mode::Logit, Mode::Operands] {
        let options = LabOptions { spike: 30.0, ..short(ModelKind::Gpt2, mode) };
        let result = run(Scenario::LrSpike, &options).unwrap();
        let kinds: Vec<_> = result.stress.policies.iter().map(|policy| policy.policy).collect();
        assert_eq!(kinds, PolicyKind::ALL);
        let training = &result.training;
        // The control and six policies, each with both kinds of casts.
        assert_eq!(training.runs.len(), 14);
        for run in &training.runs {
            assert_eq!(run.losses.len(), 16);
            assert!(run.held_out_loss.is_finite(), "{run:?}");
            if matches!(run.policy, None | Some(PolicyKind::Geometry | PolicyKind::Current)) {
                assert_eq!((run.overflow_values, run.skipped, run.rollbacks), (0, 0, 0), "{run:?}");
                assert_eq!(run.same_as_saturating, run.casts == OnOverflow::NonFinite);
            }
        }
        let delayed = training.runs.iter().filter(|run| run.policy == Some(PolicyKind::DelayedPaper));
        for run in delayed {
            // Operands of a fresh model pass a history of ones.
            assert!(mode == Mode::Logit || run.overflow_steps > 0, "{run:?}");
            assert!(run.skipped == 0 || run.casts == OnOverflow::NonFinite);
        }
        assert_eq!(training.peaks.len(), 5);
        for peak in &training.peaks {
            assert!(peak.max_scaled > 0.0 && peak.max_scaled <= 448.0, "{peak:?}");
        }
        assert_eq!(training.shadow.len(), 6);
        assert_eq!(training.shadow[0].overflow_values, 0);
    }
}

#[test]
fn resume_with_state_changes_nothing_and_without_it_something() {
    let options = LabOptions {
        policies: [PolicyKind::Geometry, PolicyKind::DelayedTe, PolicyKind::DelayedPaper]
            .map(PolicyConfig::from)
            .to_vec(),
        casts: vec![OnOverflow::Saturate],
        ..short(ModelKind::Llama, Mode::Operands)
    };
    let result = run(Scenario::Resume, &options).unwrap();
    assert_eq!(result.training.runs.len(), 4 * 4);
    // The shadows resume without their history too: one of ones is too short for operands.
    assert!(result.training.shadow_window[2] > 0 && result.training.shadow_window[0] == 0);
    for run in &result.training.runs {
        let delayed = matches!(run.policy, Some(PolicyKind::DelayedTe | PolicyKind::DelayedPaper));
        match run.arm {
            Arm::NeverStopped => assert_eq!(run.same_as_never_stopped, None),
            Arm::WithState => assert_eq!(run.same_as_never_stopped, Some(true), "{run:?}"),
            // Geometry has no state to lose, and the control neither.
            Arm::ScalesLost => {
                assert_eq!(run.same_as_never_stopped, Some(!delayed), "{run:?}");
            }
            Arm::WeightsOnly => assert_eq!(run.same_as_never_stopped, Some(false), "{run:?}"),
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let output = |threads: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_sigmascale"))
            .args(["stress", "lr-spike", "--model", "tiny-llama-train", "--seq-len", "16", "--steps", "101"])
            .args(["--policies", "geometry", "--casts", "saturating", "--format", "json"])
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let one = output("1");
    let json: serde_json::Value = serde_json::from_slice(&one).unwrap();
    for key in ["scenario", "mode", "model", "model_layers", "seed", "policies", "trace", "training"] {
        assert!(!json[key].is_null(), "{key}");
    }
    assert_eq!(json["policies"][0]["overflow_values"], 0);
    assert!(json["training"]["runs"][1]["losses"][100].as_f64().unwrap() < 3.5, "it learns");
    assert!(one == output("3"));
}

/// The other scenarios train the model first, and load its weights.
#[test]
fn a_model_that_is_trained_first_is_loaded() {
    let run = |scenario: &str, steps: &str| -> serde_json::Value {
        let output = Command::new(env!("CARGO_BIN_EXE_sigmascale"))
            .args([
                "stress",
                scenario,
                "--model",
                "tiny-gpt2-train",
                "--seq-len",
                "32",
                "--steps",
                steps,
                "--mode",
                "logit",
            ])
            .args(["--policies", "geometry,geometry-c-star,delayed-paper", "--estimator", "power", "--format", "json"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    for (scenario, steps) in [("checkpoint-load", "1"), ("weight-spike", "12")] {
        let run = run(scenario, steps);
        assert_eq!((&run["model"], &run["estimator"]), (&"tiny-gpt2-train".into(), &"power".into()));
        let overflow = |policy: usize| run["policies"][policy]["overflow_values"].as_u64().unwrap();
        assert_eq!(overflow(0), 0, "{run}");
        assert!(overflow(2) > 0, "{run}");
    }
}

#[test]
fn the_page_has_losses_overflow_and_its_own_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("page.html");
    let output = Command::new(env!("CARGO_BIN_EXE_sigmascale"))
        .args(["stress", "lr-spike", "--model", "tiny-gpt2-train", "--seq-len", "16", "--steps", "103"])
        .args(["--policies", "geometry,delayed-te", "--mode", "operands", "--html"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (page, text) = (std::fs::read_to_string(&file).unwrap(), String::from_utf8(output.stdout).unwrap());
    for part in
        ["Training loss, casts saturating", "The same minus f32&#39;s, casts nan", "Steps with an overflow so far"]
    {
        assert_eq!(page.matches(part).count(), 1, "{part}");
    }
    for part in ["a generated language", "each policy in its own run", "Every policy trains a run of its own"] {
        assert!(page.contains(part), "{part}");
    }
    for absent in
        ["isotropic token", "The same for every policy", "the same weights and the same tokens", "NaN\"", "inf\""]
    {
        assert!(!page.contains(absent) && !text.contains(absent), "{absent}");
    }
    // The transition in five charts of scales, four of losses and that of overflow; levels of 1 in two, of 0 in two.
    assert_eq!(page.matches("class=\"limit\"").count(), 10 + 4);
}

#[test]
fn the_failure_probability_is_that_of_a_whole_run_and_all_steps_are_counted() {
    for scenario in [Scenario::LrSpike, Scenario::Resume] {
        let options = LabOptions {
            policies: vec![PolicyKind::GeometryCStar.into(), PolicyKind::DelayedTe.into()],
            ..short(ModelKind::Llama, Mode::Operands)
        };
        let last = Mutex::new((0, 0));
        let keep = |done: usize, total: usize| {
            let mut last = last.lock().unwrap();
            assert!(done <= total);
            *last = (last.0.max(done), total);
        };
        let result = run_with_progress(scenario, &options, &keep).unwrap();
        let (done, total) = *last.lock().unwrap();
        assert_eq!(done, total, "{scenario:?}");
        let tail = Tail { delta: 1e-6, seq_len: 24, batch: 2, steps: 16 };
        assert_eq!(result.stress.tail, Some(tail));
    }
}

#[test]
fn refused_options_name_their_rule() {
    let refused = |options: LabOptions, part: &str| {
        let error = run(Scenario::LrSpike, &options).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains(part), "{error}");
    };
    let base = || short(ModelKind::Llama, Mode::Logit);
    refused(LabOptions { policies: Vec::new(), ..base() }, "at least one policy");
    refused(LabOptions { transition: Some(0), ..base() }, "before the transition: 0");
    refused(LabOptions { spike: f64::NAN, ..base() }, "spike NaN");
    refused(LabOptions { train: TrainOptions { seq_len: 65, ..base().train }, ..base() }, "seq_len 65");
    assert!(run(Scenario::Refit, &base()).unwrap_err().is_argument());
    let uncovered = TrainOptions { batch: 8, ..TrainOptions::new(ModelKind::Llama, None) };
    let error = Trainer::new(uncovered).err().unwrap();
    assert!(error.is_argument() && error.to_string().contains("fewer than the 8 of 64"), "{error}");
}
