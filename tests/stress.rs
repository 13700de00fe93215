//! The stress lab as scripts see it: keys, what the policies do in each scenario, exit codes, files.

mod run;

use run::{TINY_LLAMA, failure, json, sigmascale, text};
use serde_json::Value;
use std::collections::BTreeSet;

const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/traces/tiny-llama.json");
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
        keys(policy, &["max_scaled", "utilisation", "sqnr_db", "softmax_kl"]);
        keys(&policy["utilisation"], &["p10", "median", "p90"]);
    }
    for row in run["trace"].as_array().unwrap() {
        keys(row, &["step", "policy", "layer", "max_logit", "descale", "max_scaled", "overflow"]);
    }
}

#[test]
fn a_checkpoint_load_overflows_the_papers_delayed_on_every_layer_and_geometry_on_none() {
    let run = json(&["stress", "checkpoint-load", "--model", TINY_LLAMA, "--seq-len", "96", "--format", "json"]);
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
fn all_is_a_list_of_runs() {
    let all = json(&[
        "stress",
        "all",
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
    let logit = table(&[]);
    for policy in ALL {
        assert!(logit.contains(policy), "{policy}");
    }
    for part in [
        "the first 2 of 6 layers",
        "Mode logit casts the logits to E4M3 and nothing else",
        "delayed-paper starts with a history of ones",
        "delayed-te starts with scale 1",
        "assumes that normalised tokens are independent and uniform",
        "SQNR dB",
        "softmax KL",
        "overshoot",
    ] {
        assert!(logit.contains(part), "{part:?} is missing from {logit}");
    }
    let operands = table(&["--mode", "operands", "--policies", "geometry,delayed"]);
    assert!(operands.contains("as fused FP8 kernels do") && !operands.contains("independent and uniform"));
}

#[test]
fn the_page_needs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let [page, result] = ["page.html", "result.json"].map(|name| folder.path().join(name));
    let output = sigmascale(&[
        "stress",
        "all",
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
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    let runs: Value = serde_json::from_slice(&std::fs::read(&result).unwrap()).unwrap();
    assert_eq!(runs["runs"].as_array().unwrap().len(), 4);
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for absent in ["<script", "http://", "https://", "<link", "<img", "@import", "url(", "NaN", "inf\""] {
        assert!(!page.contains(absent), "{absent}");
    }
    assert_eq!(page.matches("<section>").count(), 4);
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(page.contains("delayed-paper, layer 1: overshoot up to") && page.contains("geometry, layer 1: fits"));
}

#[test]
fn usage_errors_exit_2_and_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [page, result] = ["page.html", "result.json"].map(|name| folder.path().join(name));
    let cases: &[(&[&str], i32, &str)] = &[
        #[cfg(not(feature = "train"))]
        (&["resume", "--model", "tiny-llama-train"], 2, "cargo feature `train`"),
        #[cfg(not(feature = "train"))]
        (&["lr-spike", "--model", "tiny-llama-train"], 2, "cargo feature `train`"),
        #[cfg(feature = "train")]
        (&["lr-spike", "--model", TINY_LLAMA], 2, "--model tiny-llama-train"),
        #[cfg(feature = "train")]
        (&["lr-spike", "--model", "tiny-llama-train", "--steps", "100"], 2, "steps 100"),
        #[cfg(feature = "train")]
        (&["resume", "--model", "tiny-gpt2-train", "--seq-len", "65"], 2, "seq-len 65"),
        #[cfg(feature = "train")]
        (&["resume", "--model", "tiny-gpt2-train", "--layers", "1"], 2, "--layers"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--casts", "nan"], 2, "--casts is for"),
        (&["checkpoint-load"], 2, "needs --model"),
        (&["nothing", "--model", TINY_LLAMA], 2, "possible values"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--device", "cuda"], 2, "CPU alone"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--policies", "geometry,magic"], 2, "unknown policy magic"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--layers", "7"], 2, "layers 7"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--seq-len", "0"], 2, "seq-len 0"),
        (&["checkpoint-load", "--model", TINY_LLAMA, "--trace", TRACE], 2, "--trace is for replay"),
        (&["replay", "--model", TINY_LLAMA], 2, "replay needs --trace"),
        (&["replay", "--trace", TRACE, "--layers", "1"], 2, "--layers"),
        (&["checkpoint-load", "--model", "mistral-8b"], 1, "no preset of this name"),
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
    let (code, log) = failure(&["stress", "checkpoint-load", "--model", TINY_LLAMA, "-o", "/no/such/folder/x.json"]);
    assert!(code == 1 && log.contains("its folder does not exist"), "{log}");
}
