//! The stress lab as scripts see it: keys, what the policies do in each scenario, exit codes, files.

mod run;

use run::{TINY_LLAMA, copy_of_tiny_llama, failure, json, sigmascale, text};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/traces/tiny-llama.json");
const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/sample.py");
const ALL: [&str; 6] = ["geometry", "geometry-c-star", "auto-c", "delayed-paper", "delayed-te", "current"];

fn of<'a>(run: &'a Value, policy: &str) -> &'a Value {
    run["policies"].as_array().unwrap().iter().find(|entry| entry["policy"] == policy).unwrap()
}

fn row<'a>(run: &'a Value, policy: &str, step: u64, layer: u64) -> &'a Value {
    let rows = run["trace"].as_array().unwrap();
    rows.iter().find(|row| row["policy"] == policy && row["step"] == step && row["layer"] == layer).unwrap()
}

/// The keys that scripts read; more may stand beside them.
fn has_the_promised_keys(run: &Value) {
    let keys = |value: &Value, names: &[&str]| {
        for name in names {
            assert!(value.get(name).is_some(), "{name} is missing from {value}");
        }
    };
    keys(run, &["scenario", "mode", "model", "model_layers", "seed", "policies", "trace"]);
    for policy in run["policies"].as_array().unwrap() {
        keys(policy, &["policy", "layers", "overflow_layers", "overflow_steps", "first_bad_step", "overflow_values"]);
        keys(policy, &["max_scaled", "utilization", "sqnr_db", "softmax_kl"]);
        keys(&policy["utilization"], &["p10", "median", "p90"]);
    }
    for row in run["trace"].as_array().unwrap() {
        keys(row, &["step", "policy", "layer", "max_logit", "descale", "max_scaled", "overflow"]);
    }
}

#[test]
fn a_checkpoint_load_overflows_the_papers_delayed_on_every_layer_and_geometry_on_none() {
    let run = json(&[
        "stress",
        "checkpoint-load",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--seq-len",
        "96",
        "--format",
        "json",
    ]);
    has_the_promised_keys(&run);
    assert_eq!((&run["scenario"], &run["mode"], &run["seed"]), (&"checkpoint-load".into(), &"logit".into(), &0.into()));
    assert_eq!((&run["model"], &run["model_layers"]), (&"tiny-llama".into(), &6.into()));
    let names: Vec<_> = run["policies"].as_array().unwrap().iter().map(|p| p["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ALL);
    assert_eq!(run["trace"].as_array().unwrap().len(), 36);
    let (delayed, geometry) = (of(&run, "delayed-paper"), of(&run, "geometry"));
    assert_eq!((&delayed["overflow_layers"], &delayed["first_bad_step"]), (&6.into(), &0.into()));
    assert_eq!((&geometry["overflow_layers"], &geometry["overflow_values"]), (&0.into(), &0.into()));
    assert!(geometry["first_bad_step"].is_null());
    // TransformerEngine's start fits these logits.
    assert_eq!(of(&run, "delayed-te")["overflow_values"], 0);
    assert!(geometry["sqnr_db"].as_f64().unwrap() > delayed["sqnr_db"].as_f64().unwrap() + 5.0);
    assert!(geometry["softmax_kl"].as_f64().unwrap() < delayed["softmax_kl"].as_f64().unwrap());
}

#[test]
fn a_spike_overflows_delayed_for_one_step_and_moves_geometry_with_it() {
    let run = json(&[
        "stress",
        "weight-spike",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--layers",
        "2",
        "--seq-len",
        "48",
        "--steps",
        "13",
        "--policies",
        "geometry,delayed",
        "--format",
        "json",
    ]);
    has_the_promised_keys(&run);
    assert_eq!((&run["model_layers"], &run["model_layers_total"]), (&2.into(), &6.into()));
    assert_eq!(run["policies"].as_array().unwrap().len(), 3);
    assert_eq!(of(&run, "geometry")["overflow_values"], 0);
    for layer in 0..2 {
        let moved = |key: &str| {
            let at = |step| row(&run, "geometry", step, layer)[key].as_f64().unwrap();
            (at(10) / at(9), at(11) / at(10))
        };
        for (key, factor) in [("logit_descale", 16.0), ("q_descale", 4.0), ("k_descale", 4.0), ("v_descale", 4.0)] {
            let (spike, after) = moved(key);
            assert!((spike / factor - 1.0).abs() < 1e-4 && after == 1.0, "layer {layer} {key}: {spike}, {after}");
        }
        for policy in ["delayed-paper", "delayed-te"] {
            let scaled = |step| row(&run, policy, step, layer)["max_scaled"].as_f64().unwrap();
            assert!(scaled(10) > 7.0 * 448.0, "{policy} layer {layer}: {}", scaled(10));
            // It fits again, up to what other tokens add to the last maximum.
            assert!(scaled(11) < 1.4 * 448.0, "{policy} layer {layer}: {}", scaled(11));
        }
    }
}

#[test]
fn text_makes_the_logits_that_were_observed_on_text() {
    let observed: Value =
        serde_json::from_slice(&std::fs::read(Path::new(TINY_LLAMA).join("observed.json")).unwrap()).unwrap();
    let args = [
        "stress",
        "checkpoint-load",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--policies",
        "geometry,delayed",
        "--format",
        "json",
    ];
    let run = json(&[&args[..], &["--tokens", SAMPLE]].concat());
    let isotropic = json(&args);
    assert_eq!(run["tokens"]["file"], "sample.py");
    assert!(isotropic["tokens"].is_null());
    for layer in 0..6 {
        let seen = observed["layers"][layer]["s"].as_array().unwrap();
        let seen = seen.iter().map(|x| x.as_f64().unwrap()).fold(0.0, f64::max);
        let here = |run| row(run, "geometry", 0, layer as u64)["max_logit"].as_f64().unwrap();
        // One sequence of 256 bytes reaches less than 64 of 512, but not by much; isotropic tokens do not come near.
        assert!((0.45..1.15).contains(&(here(&run) / seen)), "layer {layer}: {} against {seen}", here(&run));
        assert!(here(&isotropic) < 0.45 * seen, "layer {layer}: {}", here(&isotropic));
    }
    assert_eq!(of(&run, "geometry")["overflow_values"], 0);
    assert_eq!(of(&run, "delayed-te")["overflow_values"], 0);
    let delayed = of(&run, "delayed-paper");
    assert_eq!(delayed["overflow_layers"], 6);
    assert!(delayed["sqnr_db"].as_f64().unwrap() < of(&run, "geometry")["sqnr_db"].as_f64().unwrap() - 15.0);
}

#[test]
fn ids_in_json_are_the_bytes_of_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let ids = folder.path().join("ids.json");
    let bytes: Vec<u32> = std::fs::read(SAMPLE).unwrap().into_iter().map(u32::from).collect();
    std::fs::write(&ids, serde_json::to_vec(&bytes).unwrap()).unwrap();
    let run = |file: &str| {
        let args = ["stress", "checkpoint-load", "--model", TINY_LLAMA, "--seq-len", "40", "--layers", "2"];
        json(&[&args[..], &["--format", "json", "--tokens", file]].concat())["trace"].clone()
    };
    assert_eq!(run(SAMPLE), run(text(&ids)));
    std::fs::write(&ids, "[1, 256, 3]").unwrap();
    let args = ["stress", "checkpoint-load", "--model", TINY_LLAMA, "--seq-len", "2", "--tokens", text(&ids)];
    let (code, log) = failure(&args);
    assert!(code == 1 && log.contains("token id 256"), "{log}");
}

/// A model with a tokenizer reads text: the run is the one on the ids that the tokenizer gives.
#[test]
fn text_is_read_by_the_models_tokenizer() {
    let (_parent, model) = copy_of_tiny_llama();
    let folder = tempfile::tempdir().unwrap();
    let words = folder.path().join("words.txt");
    std::fs::write(&words, "def attention(q, k):\n    return  q @ k.T  # it's 1234\n").unwrap();
    let ids = folder.path().join("ids.json");
    let first = "[0,118,74,123,63,83,101,6,60,10,74,54,98,77,113,74,74,60,74,24,74,54,12,38,74,74,3,124,63,5,62,74]";
    std::fs::write(&ids, first).unwrap();
    let args = |file| {
        let args = ["stress", "checkpoint-load", "--model", text(&model), "--seq-len", "32", "--layers", "1"];
        [&args[..], &["--format", "json", "--tokens", file]].concat()
    };
    let tokenizer = model.join("tokenizer.json");
    if cfg!(not(feature = "tokenizers")) {
        std::fs::write(&tokenizer, "{}").unwrap();
        let (code, log) = failure(&args(text(&words)));
        assert!(code == 2 && log.contains("cargo feature `tokenizers`"), "{log}");
        return;
    }
    std::fs::copy("../lab/tests/data/tokenizer.json", &tokenizer).unwrap();
    let run = json(&args(text(&words)));
    assert_eq!(run["trace"], json(&args(text(&ids)))["trace"]);
    assert_eq!((&run["tokens"]["tokens"], &run["tokens"]["sequences"]), (&37.into(), &1.into()));

    let refused = |content: &[u8], expected: &[&str]| {
        std::fs::write(&words, content).unwrap();
        let (code, log) = failure(&args(text(&words)));
        assert!(code != 0 && expected.iter().all(|part| log.contains(part)), "{log}");
    };
    refused(b"\xff\xfe", &["words.txt", "UTF-8", "byte 0"]);
    refused(b"q", &["words.txt", "2 tokens are fewer than one sequence of 32"]);
    refused(b"", &["words.txt", "empty"]);
    std::fs::write(&tokenizer, "{}").unwrap();
    refused(b"text", &["tokenizer.json", "not a readable tokenizer"]);
    // A tokenizer of another model: `<s>` gets an id past the vocabulary.
    let other = std::fs::read_to_string("../lab/tests/data/tokenizer.json").unwrap();
    let other = other.replace(r#""<s>":0"#, r#""<s>":300"#).replace(r#""id":0"#, r#""id":300"#);
    std::fs::write(&tokenizer, other.replace(r#""ids":[0]"#, r#""ids":[300]"#)).unwrap();
    refused(b"some text", &["tokenizer.json", "token id 300 is outside the vocabulary"]);
    std::fs::rename(&tokenizer, model.join("tokenizer.model")).unwrap();
    refused(b"text", &["words.txt", "only a tokenizer.model", ".json"]);
}

#[test]
fn steps_take_the_sequences_of_the_text_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.txt");
    std::fs::write(&short, &std::fs::read(SAMPLE).unwrap()[..50]).unwrap();
    let args = [
        "stress",
        "weight-spike",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--layers",
        "2",
        "--seq-len",
        "20",
        "--steps",
        "4",
    ];
    let run = json(&[&args[..], &["--format", "json", "--policies", "geometry", "--tokens", text(&short)]].concat());
    assert_eq!((&run["tokens"]["tokens"], &run["tokens"]["sequences"]), (&50.into(), &2.into()));
    assert!(run["notes"].to_string().contains("ends before step 10"), "{}", run["notes"]);
    let logit = |step, layer| row(&run, "geometry", step, layer)["max_logit"].as_f64().unwrap();
    for layer in 0..2 {
        assert_eq!((logit(0, layer), logit(1, layer)), (logit(2, layer), logit(3, layer)));
        assert_ne!(logit(0, layer), logit(1, layer));
    }
}

#[test]
fn refit_goes_along_recorded_checkpoints() {
    let (_gain, gain) = copy_of_tiny_llama();
    double_tensor(&gain, "model.layers.1.input_layernorm.weight");
    let (_out, out) = copy_of_tiny_llama();
    double_tensor(&out, "model.layers.0.self_attn.o_proj.weight");
    // One sequence, so that nothing but the weights differs between steps.
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.txt");
    std::fs::write(&short, &std::fs::read(SAMPLE).unwrap()[..40]).unwrap();
    let args = [
        "stress",
        "refit",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--layers",
        "2",
        "--seq-len",
        "32",
        "--format",
        "json",
    ];
    let path = format!("{},{},{TINY_LLAMA}", text(&gain), text(&out));
    let run =
        json(&[&args[..], &["--checkpoints", &path, "--tokens", text(&short), "--policies", "geometry"]].concat());
    assert_eq!(run["steps"], 4);
    let at = |step, layer, key: &str| row(&run, "geometry", step, layer)[key].as_f64().unwrap();
    for key in ["max_logit", "q_descale"] {
        // The last checkpoint is the first again, and no change reaches layer 0.
        assert!((1..4).all(|step| at(0, 0, key) == at(step, 0, key)) && at(0, 1, key) == at(3, 1, key));
    }
    assert!((at(1, 1, "q_descale") / at(0, 1, "q_descale") - 2.0).abs() < 1e-6);
    assert!((at(1, 1, "max_logit") / at(0, 1, "max_logit") - 4.0).abs() < 1e-4);
    // A layer's output projection is no part of any scale: the layer above reads other tokens.
    assert_eq!(at(2, 1, "q_descale"), at(0, 1, "q_descale"));
    assert_ne!(at(2, 1, "max_logit"), at(0, 1, "max_logit"));

    let other = gain.join("config.json");
    let config = std::fs::read_to_string(&other).unwrap().replace("10000.0", "500000.0");
    std::fs::write(&other, config).unwrap();
    let (code, log) = failure(&[&args[..], &["--checkpoints", text(&gain)]].concat());
    assert!(code == 1 && log.contains("rope[0]"), "{log}");
}

/// Doubles a BF16 tensor of a checkpoint in place.
fn double_tensor(folder: &Path, name: &str) {
    let index: Value =
        serde_json::from_slice(&std::fs::read(folder.join("model.safetensors.index.json")).unwrap()).unwrap();
    let file = folder.join(index["weight_map"][name].as_str().unwrap());
    let mut bytes = std::fs::read(&file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let [start, end] = [0, 1].map(|at| data + header[name]["data_offsets"][at].as_u64().unwrap() as usize);
    for value in bytes[start..end].chunks_exact_mut(2) {
        // One more in the exponent field.
        let doubled = u16::from_le_bytes(value.try_into().unwrap()) + 0x80;
        value.copy_from_slice(&doubled.to_le_bytes());
    }
    std::fs::write(&file, bytes).unwrap();
}

#[test]
fn a_trace_runs_through_the_policies_that_need_no_weights() {
    for mode in ["logit", "operands"] {
        let run = json(&["stress", "replay", "--trace", TRACE, "--mode", mode, "--format", "json"]);
        has_the_promised_keys(&run);
        assert_eq!((&run["scenario"], &run["mode"]), (&"replay".into(), &mode.into()));
        assert_eq!((&run["model"], &run["model_layers"]), (&"tiny-llama".into(), &6.into()));
        let ran: BTreeSet<_> =
            run["policies"].as_array().unwrap().iter().map(|p| p["policy"].as_str().unwrap()).collect();
        assert_eq!(ran, BTreeSet::from(["current", "delayed-paper", "delayed-te"]));
        assert_eq!(of(&run, "current")["overflow_values"], 0);
        assert!(of(&run, "delayed-te")["sqnr_db"].is_null());
        assert!(of(&run, "delayed-te")["overflow_steps"].as_u64().unwrap() > 0);
    }
}

#[test]
fn text_of_a_file_cannot_steer_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let trace = r#"{"what": "a\u001b[2Jb", "train": [{"q": [1.0], "k": [1.0], "v": [1.0], "s": [1.0]}]}"#;
    std::fs::write(&file, trace).unwrap();
    let output = sigmascale(&["stress", "replay", "--trace", text(&file)]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("a [2Jb") && !table.contains('\u{1b}'), "{table}");
}

#[test]
fn all_is_a_list_of_runs() {
    let all = json(&[
        "stress",
        "all",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--layers",
        "1",
        "--seq-len",
        "16",
        "--steps",
        "3",
        "--policies",
        "geometry",
        "--format",
        "json",
    ]);
    let runs = all["runs"].as_array().unwrap();
    runs.iter().for_each(has_the_promised_keys);
    let names: Vec<_> =
        runs.iter().map(|run| (run["scenario"].as_str().unwrap(), run["steps"].as_u64().unwrap())).collect();
    assert_eq!(names, [("checkpoint-load", 1), ("weight-spike", 3), ("refit", 3)]);
    let left: Vec<_> =
        all["left_out"].as_array().unwrap().iter().map(|entry| entry["scenario"].as_str().unwrap()).collect();
    assert_eq!(left, ["replay", "resume", "lr-spike"]);
}

/// A short spike whose auto-c ends its burn-in.
const SPIKE: [&str; 11] =
    ["stress", "weight-spike", "--mode", "logit", "--model", TINY_LLAMA, "--layers", "2", "--seq-len", "24", "--steps"];

#[test]
fn the_failure_probability_is_that_of_the_run() {
    let run = json(&[&SPIKE[..], &["3", "--delta", "1e-4", "--format", "json"]].concat());
    assert_eq!(run["tail"], serde_json::json!({"delta": 1e-4, "seq_len": 24, "batch": 1, "steps": 3}));
    // The policy's descale is that of the bound at this tail, and at no other.
    let rank_aware = |tail: &[&str]| {
        let args = ["calibrate", TINY_LLAMA, "--bound", "rank-aware", "--format", "json"];
        json(&[&args[..], tail].concat())["layers"][0]["logit_descale"].as_f64().unwrap()
    };
    let own = rank_aware(&["--delta", "1e-4", "--seq-len", "24", "--steps", "3"]);
    let descale = row(&run, "geometry-c-star", 0, 0)["logit_descale"].as_f64().unwrap();
    assert!((descale / own - 1.0).abs() < 1e-6, "{descale} and {own}");
    assert!((rank_aware(&[]) / own - 1.0).abs() > 1e-2);
    let long = json(&[
        "stress",
        "checkpoint-load",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--seq-len",
        "32",
        "--format",
        "json",
    ]);
    assert_eq!((&long["tail"]["seq_len"], &long["tail"]["steps"]), (&32.into(), &1.into()));
    assert!(json(&["stress", "replay", "--trace", TRACE, "--format", "json"])["tail"].is_null());
}

/// Estimates rise from below to the norm while the weights stay, follow a spike in the same step, and say that they promise nothing.
#[test]
fn an_estimator_is_one_word() {
    let run_with = |estimator, iterations| {
        let options = ["--layers", "2", "--seq-len", "32", "--steps", "12", "--mode", "logit", "--format", "json"];
        let policies = [
            "--policies",
            "geometry-c-star,auto-c,delayed-paper",
            "--estimator",
            estimator,
            "--iterations",
            iterations,
        ];
        json(&[&["stress", "weight-spike", "--model", TINY_LLAMA][..], &options, &policies].concat())
    };
    let [gram, power, summed] = ["gram", "power", "power-summed"].map(|estimator| run_with(estimator, "5,1"));
    let descale = |run: &Value, policy, step| row(run, policy, step, 1)["logit_descale"].as_f64().unwrap();
    for (name, estimated) in [("power", &power), ("power-summed", &summed)] {
        assert_eq!(estimated["estimator"], name);
        let notes = estimated["notes"].to_string();
        assert!(notes.contains("no guarantee") && !gram["notes"].to_string().contains("no guarantee"), "{notes}");
        assert!(
            (0..9)
                .all(|step| descale(estimated, "geometry-c-star", step)
                    <= descale(estimated, "geometry-c-star", step + 1))
        );
        assert!(descale(estimated, "geometry-c-star", 9) > descale(estimated, "geometry-c-star", 0));
        let spike = descale(estimated, "geometry-c-star", 10) / descale(estimated, "geometry-c-star", 9);
        assert!((15.9..17.0).contains(&spike), "{spike}");
        let longer = run_with(name, "30,2");
        assert!(descale(&longer, "geometry-c-star", 0) > descale(estimated, "geometry-c-star", 0));
        // The baseline is the same whatever the estimator.
        assert!((0..12).all(|step| descale(estimated, "delayed-paper", step) == descale(&gram, "delayed-paper", step)));
    }
    assert!((0..12).all(|step| descale(&power, "geometry-c-star", step) <= descale(&gram, "geometry-c-star", step)));
}

#[test]
fn auto_c_takes_its_parameters_and_reports_its_slack() {
    let run = |options: &[&str]| {
        json(&[&SPIKE[..], &["9", "--policies", "geometry,auto-c", "--format", "json"], options].concat())
    };
    let descale = |run: &Value, policy, step| row(run, policy, step, 1)["logit_descale"].as_f64().unwrap();
    let frozen_at =
        |run: &Value| (0..9).find(|step| descale(run, "auto-c", *step) != descale(run, "geometry", *step)).unwrap();
    let base = run(&["--auto-c-burn-in", "4"]);
    assert_eq!((&base["auto_c_burn_in"], frozen_at(&base)), (&4.into(), 4));
    assert_eq!(base["parameters"][1]["kappa"], 1.5);
    assert_eq!(frozen_at(&run(&["--auto-c-burn-in", "6"])), 6);
    let ratio = |a: &Value, b: &Value| descale(a, "auto-c", 8) / descale(b, "auto-c", 8);
    let wider = run(&["--auto-c-burn-in", "4", "--auto-c-kappa", "3"]);
    assert!((ratio(&wider, &base) - 2.0).abs() < 1e-6);
    // A lower quantile and smaller pools give smaller constants.
    assert!(ratio(&run(&["--auto-c-burn-in", "4", "--auto-c-quantile", "0.5"]), &base) < 0.999);
    assert!(ratio(&run(&["--auto-c-burn-in", "4", "--auto-c-pooling", "head"]), &base) <= 1.0);

    // Slack over 4 heads, 2 layers and 4 steps; its least is the largest ratio, from which c comes.
    let slack = &of(&base, "auto-c")["slack"][0];
    assert_eq!((&slack["tensor"], &slack["count"]), (&"logit".into(), &32.into()));
    let [min, mean, max] = ["min", "mean", "max"].map(|key| slack[key].as_f64().unwrap());
    assert!(1.0 < min && min < mean && mean < max, "{min} {mean} {max}");
    let c = descale(&base, "auto-c", 8) / descale(&base, "geometry", 8);
    assert!(c * min <= 1.5 * (1.0 + 1e-6), "{c} {min}");
    assert!(of(&base, "geometry").get("slack").is_none());
    let table = sigmascale(&[&SPIKE[..2], &SPIKE[4..], &["9", "--policies", "auto-c"]].concat());
    let table = String::from_utf8(table.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(table.contains("Slack in the burn-in") && table.contains("min / mean / max: q "), "{table}");
}

#[test]
fn delayed_policies_take_their_parameters() {
    let replay = |options: &[&str]| {
        json(&[&["stress", "replay", "--mode", "logit", "--trace", TRACE, "--format", "json"], options].concat())
    };
    let base = replay(&[]);
    let descale = |run: &Value, policy, step| row(run, policy, step, 0)["logit_descale"].as_f64().unwrap();
    let half = replay(&["--delayed-paper-margin", "0.45", "--delayed-te-margin", "1"]);
    for policy in ["delayed-paper", "delayed-te"] {
        assert!((descale(&half, policy, 9) / descale(&base, policy, 9) - 2.0).abs() < 1e-6, "{policy}");
    }
    // One step of memory: the scale is the last maximum's, whether by length or by algorithm.
    let short = replay(&["--delayed-paper-history", "1", "--delayed-te-history", "2"]);
    let last = replay(&["--delayed-te-algorithm", "most-recent"]);
    for step in 5..12 {
        let logit = |step| row(&base, "current", step, 0)["max_logit"].as_f64().unwrap();
        let want = logit(step - 1) / (448.0 * 0.9);
        assert!((descale(&short, "delayed-paper", step) / want - 1.0).abs() < 1e-6, "step {step}");
        let te = descale(&last, "delayed-te", step);
        assert!((te / (logit(step - 1) / 448.0) - 1.0).abs() < 1e-6, "step {step}");
    }
    assert_eq!(short["parameters"][3]["history"], 1);
    assert_eq!(last["parameters"][4]["algorithm"], "most-recent");
}

#[test]
fn a_report_starts_with_one_verdict_per_policy() {
    let output = sigmascale(&[
        "stress",
        "checkpoint-load",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--layers",
        "2",
        "--seq-len",
        "48",
    ]);
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().skip(2).take(6).map(str::trim_start).collect();
    for (line, policy) in lines.iter().zip(ALL) {
        let verdict = line.strip_prefix(policy).unwrap().trim_start();
        let want = if policy == "delayed-paper" { "OVERFLOW on 2 of 2 layers; up to " } else { "no overflow; " };
        assert!(verdict.starts_with(want), "{line}");
    }
    let output = sigmascale(&["stress", "replay", "--mode", "logit", "--trace", TRACE]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("  auto-c           not run: it needs weights"), "{text}");
}

#[test]
fn the_table_says_what_the_numbers_mean() {
    let table = |args: &[&str]| {
        let args =
            [&["stress", "checkpoint-load", "--model", TINY_LLAMA, "--layers", "2", "--seq-len", "48"], args].concat();
        let output = sigmascale(&args);
        assert!(output.status.success() && output.stderr.is_empty());
        let text = String::from_utf8(output.stdout).unwrap();
        // Line ends are no part of a sentence.
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let logit = table(&["--mode", "logit"]);
    for policy in ALL {
        assert!(logit.contains(policy), "{policy}");
    }
    for part in [
        "the first 2 of 6 layers",
        "Mode logit casts only the logits to E4M3",
        "delayed-paper starts with a history of ones",
        "delayed-te starts with scale 1",
        "assumes that normalized tokens are independent and uniform",
        "SQNR dB",
        "softmax KL",
        "overshoot",
    ] {
        assert!(logit.contains(part), "{part:?} is missing from {logit}");
    }
    let operands = table(&["--policies", "geometry,delayed"]);
    assert!(operands.contains("as fused FP8 kernels do") && !operands.contains("independent and uniform"));
}

#[test]
fn the_page_needs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let [page, result] = ["page.html", "result.json"].map(|name| folder.path().join(name));
    let output = sigmascale(&[
        "stress",
        "all",
        "--mode",
        "logit",
        "--model",
        TINY_LLAMA,
        "--layers",
        "2",
        "--seq-len",
        "16",
        "--steps",
        "12",
        "--trace",
        TRACE,
        "--html",
        text(&page),
        "--format",
        "json",
        "-o",
        text(&result),
    ]);
    assert!(output.status.success() && output.stdout.is_empty());
    let wrote = format!("wrote {}\nwrote {}\n", page.display(), result.display());
    assert_eq!(String::from_utf8(output.stderr).unwrap(), wrote);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    let runs: Value = serde_json::from_slice(&std::fs::read(&result).unwrap()).unwrap();
    assert_eq!(runs["runs"].as_array().unwrap().len(), 4);
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for absent in ["<script", "http://", "https://", "<link", "<img", "@import", "url(", "NaN", "inf\""] {
        assert!(!page.contains(absent), "{absent}");
    }
    assert_eq!(page.matches("<section id=").count(), 4);
    // Every section starts with the chart that decides, then come its verdicts.
    for section in page.split("<section id=").skip(1) {
        let (before, after) = section.split_once("<ul class=\"lines\">").unwrap();
        let first = before.split("<figure").nth(1).unwrap();
        assert!(first.contains("<h2>Largest |x / descale| / 448 by "), "{first}");
        let (verdicts, _) = after.split_once("</ul>").unwrap();
        assert_eq!(verdicts.matches("<li>").count(), 6, "{verdicts}");
    }
    assert!(page.contains("<li>delayed-paper: OVERFLOW on ") && page.contains("<li>geometry: no overflow; "));
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(page.contains("delayed-paper, layer 1: overshoot up to") && page.contains("geometry, layer 1: fits"));
}

#[test]
fn usage_errors_exit_2_and_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [page, result] = ["page.html", "result.json"].map(|name| folder.path().join(name));
    let cases: &[(&[&str], i32, &str)] = &[
        (&["lr-spike", "--model", TINY_LLAMA], 2, "--model tiny-llama-train"),
        (&["lr-spike", "--model", "tiny-llama-train", "--steps", "100"], 2, "steps 100"),
        (&["resume", "--model", "tiny-gpt2-train", "--seq-len", "65"], 2, "seq_len 65"),
        (&["resume", "--model", "tiny-gpt2-train", "--layers", "1"], 2, "--layers"),
        (&["lr-spike", "--model", "tiny-llama-train", "--tokens", TRACE], 2, "its own text"),
        (&["all", "--model", "tiny-llama-train", "--checkpoints", TINY_LLAMA], 2, "its own text"),
        (&["replay", "--trace", TRACE, "--policies", ""], 2, "no policy is named: the policies are geometry"),
        (&["replay", "--trace", TRACE, "--delayed-te-history", "0"], 2, "at least 1"),
        (&["replay", "--trace", TRACE, "--delayed-te-history", "70000"], 2, "delayed-te: history 70000"),
        (&["replay", "--trace", TRACE, "--delayed-paper-margin", "1.5"], 2, "delayed-paper: margin 1.5"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--auto-c-quantile", "0"], 2, "auto-c: quantile 0 must be"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--auto-c-kappa", "-1"], 2, "auto-c: kappa -1 must be"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--auto-c-pooling", "model"], 2, "pooling model"),
        (
            &["checkpoint-load", "--model", TINY_LLAMA, "--policies", "current", "--auto-c-kappa", "2"],
            2,
            "is for auto-c",
        ),
        (
            &["checkpoint-load", "--model", TINY_LLAMA, "--delta", "2"],
            2,
            "delta 2 must be greater than 0 and less than 1",
        ),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--seq-len", "99999"], 2, "seq_len 99999 must lie between"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--casts", "nan"], 2, "remove --casts"),
        (&["checkpoint-load"], 2, "--model MODEL is required"),
        (&["nothing", "--model", TINY_LLAMA], 2, "possible values"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--policies", "geometry,magic"], 2, "unknown policy magic"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--layers", "7"], 2, "layers 7"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--seq-len", "0"], 2, "at least 1"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--trace", TRACE], 2, "remove --trace, which is for replay"),
        (&["checkpoint-load", "--model", "gpt2-xl", "--layers", "1", "--tokens", SAMPLE], 2, "synthetic weights"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--tokens", "/no/such/text"], 1, "/no/such/text"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--tokens", "/dev/null"], 1, "regular file"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--tokens", TRACE], 1, "token ids are a JSON list"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--tokens", SAMPLE, "--seq-len", "9000"], 2, "are fewer than one"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--tokens", SAMPLE, "--seq-len", "1025"], 2, "exceed the 1024"),
        (&["weight-spike", "--model", TINY_LLAMA, "--tokens", SAMPLE, "--steps", "99999"], 2, "take fewer of either"),
        (&["replay", "--trace", TRACE, "--tokens", SAMPLE], 2, "remove --tokens"),
        (
            &["weight-spike", "--model", TINY_LLAMA, "--checkpoints", TINY_LLAMA],
            2,
            "remove --checkpoints, which is for refit",
        ),
        (&["refit", "--model", "gpt2-xl", "--checkpoints", TINY_LLAMA], 2, "gpt2-xl has no weights"),
        (
            &["refit", "--model", TINY_LLAMA, "--checkpoints", TINY_LLAMA, "--steps", "3"],
            2,
            "steps 3 must lie between 1 and 2",
        ),
        (&["replay"], 2, "replay: --trace FILE is required"),
        (&["replay", "--trace", TRACE, "--layers", "1"], 2, "--layers"),
        (&["replay", "--trace", TRACE, "--model", TINY_LLAMA], 2, "remove --model"),
        (&["replay", "--trace", TRACE, "--seq-len", "7"], 2, "remove --seq-len"),
        (&["replay", "--trace", TRACE, "--policies", "current,,delayed"], 2, "empty name"),
        (&["replay", "--trace", TRACE, "--policies", "geometry,auto-c"], 2, "name one of the policies delayed-paper"),
        (&["checkpoint-load", "--model", "mistral-8b"], 1, "no such path or preset"),
        (&["replay", "--trace", "/no/such/trace.json"], 1, "/no/such/trace.json"),
        (&["replay", "--trace", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")], 1, "no trace"),
    ];
    for (args, want, part) in cases {
        let args = [&["stress"], *args, &["-o", text(&result), "--html", text(&page)]].concat();
        let (code, log) = failure(&args);
        assert_eq!(code, *want, "{args:?}: {log}");
        assert!(log.contains(part), "{args:?}: {log}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{args:?}");
    }
    for (output, part) in [(["--html", "-"], "--html needs a file"), (["-o", TRACE], "which is read here")] {
        let args = [&["stress", "replay", "--trace", TRACE], &output[..]].concat();
        let (code, log) = failure(&args);
        assert!(code == 2 && log.contains(part), "{args:?}: {log}");
    }
    let (code, log) = failure(&["stress", "checkpoint-load", "--model", TINY_LLAMA, "-o", "/no/such/folder/x.json"]);
    assert!(code == 1 && log.contains("folder"), "{log}");
}

#[test]
fn low_precision_reproduces_the_failure_records_it_and_names_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let short = ["stress", "low-precision", "--heads", "1", "--head", "0", "--steps", "121", "--seeds", "3"];
    let mut args = short.to_vec();
    args.extend(["--remedies", "none,f32-output", "--format", "json"]);
    args.extend(["--record", text(folder.path()), "--html", text(&page)]);
    let run = json(&args);
    assert_eq!(run["scenario"], "low-precision");
    let (runs, verdicts) = (run["runs"].as_array().unwrap(), run["verdicts"].as_array().unwrap());
    assert_eq!((runs.len(), verdicts.len()), (2, 2));
    assert_eq!((&runs[0]["remedy"], &runs[0]["seed"], &runs[0]["tile"]), (&"none".into(), &3.into(), &64.into()));
    let bias = |run: &Value| run["delta_bias"][0].as_f64().unwrap();
    assert!(bias(&runs[0]) > 10.0 * bias(&runs[1]).abs(), "{run}");
    for remedy in ["none", "f32-output"] {
        let file = folder.path().join(format!("{remedy}-seed3.jsonl"));
        let history = sigmascale_lab::history::History::read(&file).unwrap();
        assert_eq!((history.steps.len(), history.layers.len(), history.run.layers[0].heads), (121, 13, 1));
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("Norm of W_Q") && page.contains("f32-output") && !page.contains("<script"));

    let table = String::from_utf8(sigmascale(&[&short[..], &["--remedies", "f32"]].concat()).stdout).unwrap();
    assert!(table.lines().any(|line| line.starts_with("  f32 ") && line.contains("did not double")), "{table}");
    for (bad, message) in [
        (["--steps", "0"], "steps 0 must lie between"),
        (["--heads", "1"], "head 2 must lie between 0 and 0"),
        (["--head", "x"], "expected a head's number, or none"),
        (["--tile", "5"], "expected a divisor of 64"),
        (["--beta", "1"], "beta 1 must be finite and greater than 1"),
        (["--remedies", "f32,f32"], "duplicate remedy f32"),
        (["--arithmetic=fp8", "--remedies=f32-pv"], "remedy f32-pv changes nothing in the arithmetic fp8"),
        (["--seeds", "1,1"], "duplicate seed 1"),
        (["--remedies", "qk-clip"], "invalid value 'qk-clip'"),
        (["--model", "x"], "unexpected argument '--model'"),
    ] {
        let (code, log) = failure(&[&["stress", "low-precision"], &bad[..]].concat());
        assert!(code == 2 && log.contains(message), "{bad:?}: {log}");
    }
    let (code, log) = failure(&["stress", "low-precision", "--steps", "1", "--record", "no/such/folder"]);
    assert!(code == 1 && log.contains("--record"), "{log}");
}

#[test]
fn ablations_vary_one_parameter_of_the_paper() {
    let args = ["stress", "ablate", "--model", TINY_LLAMA, "--tokens", SAMPLE, "--layers", "1", "--seq-len", "32"];
    let run = json(&[&args[..], &["--steps", "8", "--format", "json"]].concat());
    let rows = |parameter: &str, policy: &str| -> Vec<Value> {
        let rows = run["rows"].as_array().unwrap().iter();
        rows.filter(|row| row["parameter"] == parameter && row["policy"] == policy).cloned().collect()
    };
    let column = |rows: &[Value], key: &str| rows.iter().map(|row| row[key].as_f64().unwrap()).collect::<Vec<f64>>();
    // The share of the range grows in proportion to eta, and nothing overflows under the worst case.
    let eta = rows("eta", "geometry");
    let share: Vec<f64> = eta.iter().map(|r| r["largest"].as_f64().unwrap() / r["value"].as_f64().unwrap()).collect();
    assert!(share.iter().all(|x| (x / share[0] - 1.0).abs() < 1e-5), "{share:?}");
    assert!(column(&eta, "overflow_values").iter().all(|n| *n == 0.0));
    // A smaller failure probability and a longer sequence give a larger constant; so does a larger kappa.
    for (parameter, policy) in [("delta", "geometry-c-star"), ("seq-len", "geometry-c-star"), ("kappa", "auto-c")] {
        let constants = column(&rows(parameter, policy), "constant");
        assert_eq!(constants.len(), 4, "{parameter}");
        assert!(constants.windows(2).all(|pair| pair[0] < pair[1]), "{parameter}: {constants:?}");
    }
    // Half of the ratios is too few: something overflows, and auto-c falls back to the worst case.
    let quantile = rows("quantile", "auto-c");
    let (constants, over) = (column(&quantile, "constant"), column(&quantile, "overflow_values"));
    assert!(over[0] > 0.0 && constants[0] == 1.0, "{quantile:?}");
    assert!(over[3] == 0.0 && constants[1] <= constants[2] && constants[2] <= constants[3], "{quantile:?}");
    assert!(constants[3] < 1.0, "{constants:?}");
    let kappa = column(&rows("kappa", "auto-c"), "constant");
    assert!((kappa[3] / kappa[1] - 2.0).abs() < 1e-4, "{kappa:?}");
    let (code, log) = failure(&[&args[..], &["--steps", "3", "--parameters", "kappa"]].concat());
    assert!(code == 2 && log.contains("steps 3"), "{log}");
    let (code, log) = failure(&[&args[..], &["--parameters", "eta,eta"]].concat());
    assert!(code == 2 && log.contains("eta"), "{log}");
}
