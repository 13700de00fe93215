//! The command line as scripts see it: JSON keys, exit codes, files, hostile input.

mod run;

use run::{TINY_LLAMA, copy_of_tiny_llama, failure, json, sigmascale, text};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn keys(value: &Value, expected: &[&str]) {
    for key in expected {
        assert!(value.get(key).is_some(), "{key} is missing from {value}");
    }
}

#[test]
fn calibrate_json_has_the_promised_keys() {
    let profile = json(&["calibrate", TINY_LLAMA, "--format", "json"]);
    keys(&profile, &["model", "tail", "c_star", "layers"]);
    keys(&profile["model"], &["name", "family", "layers", "d_model", "n_q_heads", "n_kv_heads", "d_head"]);
    keys(&profile["model"], &["norm", "rope", "qk_norm", "bias"]);
    keys(&profile["tail"], &["delta", "seq_len", "batch", "steps", "eta"]);
    keys(&profile["c_star"], &["gamma", "c_star", "c_rank_agnostic", "improvement"]);
    assert_eq!(profile["layers"].as_array().unwrap().len(), 6);
    for (number, layer) in profile["layers"].as_array().unwrap().iter().enumerate() {
        assert_eq!(layer["layer"], number);
        keys(layer, &["sigma", "sigma_sum", "logit_bound", "logit_descale"]);
        for operand in ["q_descale", "k_descale", "v_descale", "o_descale"] {
            assert_eq!(layer[operand].as_array().unwrap().len(), 2, "{operand}");
        }
        assert_eq!(layer["heads"].as_array().unwrap().len(), 4);
        for head in layer["heads"].as_array().unwrap() {
            keys(head, &["head", "kv_head", "sigma", "sigma_raw", "sigma_rope", "frobenius", "stable_rank"]);
            keys(head, &["bias_constant", "bound_naive", "bound_exact", "bound_rounded"]);
            keys(head, &["bound_rank_aware", "bound_spectrum"]);
            assert!(head["sigma_rope"].as_f64() >= head["sigma"].as_f64());
            assert!(head["bound_rounded"].as_f64() > head["bound_exact"].as_f64());
        }
    }
}

#[test]
fn one_scale_a_layer_keeps_the_length() {
    let profile = json(&["calibrate", TINY_LLAMA, "--granularity", "layer", "--format", "json"]);
    for layer in profile["layers"].as_array().unwrap() {
        let row = layer["k_descale"].as_array().unwrap();
        assert!(row.len() == 2 && row[0] == row[1]);
    }
}

#[test]
fn as_paper_leaves_out_what_the_paper_has_not() {
    let ours = json(&["calibrate", TINY_LLAMA, "--format", "json"]);
    let paper = json(&["calibrate", TINY_LLAMA, "--as-paper", "--format", "json"]);
    let chosen = json(&["calibrate", TINY_LLAMA, "--as-paper", "--c", "0.08", "--format", "json"]);
    for layer in 0..6 {
        let (ours, paper, chosen) = (&ours["layers"][layer], &paper["layers"][layer], &chosen["layers"][layer]);
        assert_eq!(paper["sigma"], ours["sigma_sum"]);
        assert!(paper.get("heads").is_none() && paper["q_descale"].is_null());
        // tau d = 256 / 8.
        let bound = 0.08 * 32.0 * paper["sigma"].as_f64().unwrap();
        assert!((chosen["logit_bound"].as_f64().unwrap() / bound - 1.0).abs() < 1e-12);
    }
    assert!(paper["method"]["bound"].is_null() && paper["method"]["granularity"] == "layer");
    assert_eq!((&paper["method"]["rotation"], &ours["method"]["rotation"]), (&false.into(), &true.into()));
    let table = String::from_utf8(sigmascale(&["calibrate", TINY_LLAMA, "--as-paper"]).stdout).unwrap();
    assert!(table.contains("assumes isotropic tokens") && table.contains("sigma_sum does not bound single heads"));
}

#[test]
fn power_iteration_stays_below_the_exact_norm() {
    let exact = json(&["calibrate", TINY_LLAMA, "--format", "json"]);
    let asked = ["calibrate", TINY_LLAMA, "--estimator", "power", "--bound", "rank-aware"];
    let power = json(&[&asked[..], &["--format", "json"]].concat());
    assert_eq!(power["method"]["rotation"], false);
    assert_eq!(power["method"]["iterations"], 5);
    let short = json(&[&asked[..], &["--iterations", "1", "--format", "json"]].concat());
    let sigma = |profile: &Value| profile["layers"][0]["sigma"].as_f64().unwrap();
    assert!(short["method"]["iterations"] == 1 && sigma(&short) < sigma(&power));
    let table = String::from_utf8(sigmascale(&asked).stdout).unwrap();
    assert!(table.contains("from below") && table.contains("rotation is ignored"), "{table}");
    for layer in 0..6 {
        for head in 0..4 {
            let of = |profile: &Value| profile["layers"][layer]["heads"][head]["sigma"].as_f64().unwrap();
            assert!(of(&power) <= of(&exact) * (1.0 + 1e-9));
        }
    }
}

#[test]
fn every_form_of_a_model_is_read() {
    let layers = |model: &str| json(&["calibrate", model, "--format", "json"])["layers"].clone();
    assert!(layers(&format!("{TINY_LLAMA}/config.json")).is_null());
    assert!(layers("llama-3.1-8b").is_null());
    assert!(layers(TINY_LLAMA).is_array());
    // One file with its config beside it: all tensors of the two shards.
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(format!("{TINY_LLAMA}/config.json"), folder.path().join("config.json")).unwrap();
    let shards = [1, 2].map(|n| std::fs::read(format!("{TINY_LLAMA}/model-0000{n}-of-00002.safetensors")).unwrap());
    let tensors = shards.iter().flat_map(|bytes| SafeTensors::deserialize(bytes).unwrap().tensors());
    let file = folder.path().join("one.safetensors");
    std::fs::write(&file, safetensors::serialize(tensors, None).unwrap()).unwrap();
    assert_eq!(layers(text(&file)), layers(TINY_LLAMA));
    // A norm that the config knows nothing of changes nothing, and is named.
    let gain = [0u8; 256];
    let norm =
        ("model.layers.0.self_attn.q_norm.weight".to_owned(), TensorView::new(Dtype::F32, vec![64], &gain).unwrap());
    let tensors = shards.iter().flat_map(|bytes| SafeTensors::deserialize(bytes).unwrap().tensors());
    std::fs::write(&file, safetensors::serialize(tensors.chain([norm]), None).unwrap()).unwrap();
    let output = sigmascale(&["calibrate", text(&file), "--format", "json"]);
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["layers"], layers(TINY_LLAMA));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("q_norm") && said.contains("ignored"), "{said}");
    // A preset's name is the preset, and says so where something of that name lies here.
    std::fs::create_dir(folder.path().join("mistral-7b")).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sigmascale"));
    let output = command.args(["calibrate", "mistral-7b"]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("./mistral-7b"));
    // Nor is anything read that an output of that name could replace.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sigmascale"));
    let output = command.args(["calibrate", "gpt2-xl", "-o", "gpt2-xl"]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success() && folder.path().join("gpt2-xl").is_file());
}

#[test]
fn what_is_read_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let mut kept = vec![];
    for file in std::fs::read_dir(TINY_LLAMA).unwrap().flatten().filter(|file| file.path().is_file()) {
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
        kept.push((model.join(file.file_name()), std::fs::read(file.path()).unwrap()));
    }
    let (config, weights) = (
        model.join("config.json"),
        kept.iter().map(|(file, _)| file).find(|file| file.extension().is_some_and(|e| e == "safetensors")),
    );
    let weights = weights.unwrap();
    let around = folder.path().join("model/../model").join(weights.file_name().unwrap());
    for args in [
        &["calibrate", text(&model), "-o", text(&config)][..],
        &["calibrate", text(&model), "-o", text(weights)],
        &["calibrate", text(&config), "-o", text(&config)],
        &["inspect", text(&model), "--html", text(&around)],
        &["bench", "spectral", "--model", text(&config), "-o", text(&config)],
        &["stress", "checkpoint-load", "--model", text(&model), "-o", text(&config)],
    ] {
        let (code, log) = failure(args);
        assert!(code == 2 && log.contains("part of the model in that folder"), "{args:?}: {code} {log}");
    }
    // Neither is a file made that would be read in their place.
    let files = || std::fs::read_dir(&model).unwrap().count();
    let before = files();
    for (command, option, name) in [
        ("calibrate", "-o", "model.safetensors"),
        ("inspect", "--html", "pytorch_model.bin"),
        ("verify", "--html", "tokenizer.json"),
        ("verify", "-o", "model.safetensors"),
        ("stress", "--html", "model.safetensors"),
    ] {
        let (command, last): (&[&str], _) = match command {
            "stress" => (&["stress", "checkpoint-load", "--model"], text(&model)),
            _ => (&[command], text(&model)),
        };
        let target = model.join(name);
        let (code, log) = failure(&[command, &[last, option, text(&target)]].concat());
        assert!(code == 2 && log.contains("choose another name"), "{command:?} {option} {name}: {code} {log}");
    }
    let into = model.join("model.safetensors");
    let (code, log) = failure(&["export", text(&model), "--to", text(&into), "--for", "vllm"]);
    assert!(code == 2 && log.contains("--to names"), "{code} {log}");
    let (code, log) = failure(&["doctor", "-o", text(&into)]);
    assert!(code == 2 && log.contains("-o names"), "{code} {log}");
    assert_eq!(files(), before);
    for (file, bytes) in &kept {
        assert!(std::fs::read(file).unwrap() == *bytes, "{}", file.display());
    }
    // Beside them there is room.
    let profile = model.join("profile.json");
    for _ in 0..2 {
        assert!(sigmascale(&["calibrate", text(&model), "-o", text(&profile)]).status.success());
    }
}

#[test]
fn inspect_gives_table_json_and_page() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("page.html");
    let profile = json(&["inspect", TINY_LLAMA, "--format", "json", "--html", text(&file)]);
    for layer in profile["layers"].as_array().unwrap() {
        for key in ["sigma", "sigma_raw", "stable_rank", "rope_ratio"] {
            let of = |part: &str| layer[key][part].as_f64().unwrap();
            assert!(of("min") <= of("mean") && of("mean") <= of("max"), "{key}");
        }
        assert!(layer["rope_ratio"]["min"].as_f64().unwrap() >= 1.0);
        assert_eq!(layer["heads"].as_array().unwrap().len(), 4);
    }
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for absent in ["<script", "http://", "https://", "<link", "<img", "@import", "url("] {
        assert!(!page.contains(absent), "{absent}");
    }
    assert!(page.contains("prefers-color-scheme:dark") && page.contains("layer 5, head 3 (KV head 1)"));
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    let table = String::from_utf8(sigmascale(&["inspect", TINY_LLAMA]).stdout).unwrap();
    assert!(table.contains("Sigma of 24 heads in 6 layers"));
}

#[test]
fn the_two_bounds_have_one_name_each() {
    let table = |command: &str| String::from_utf8(sigmascale(&[command, TINY_LLAMA]).stdout).unwrap();
    let (inspected, calibrated) = (table("inspect"), table("calibrate"));
    assert!(inspected.contains("exact bound  worst-case bound\n") && inspected.contains("in exact arithmetic"));
    assert!(calibrated.contains("logit bound: worst-case bound, rounding included") && !calibrated.contains("certain"));
    // The last column of one is the sixth of the other.
    let row = |table: &str, column: usize| -> String {
        let line = table.lines().find(|line| line.trim_start().starts_with("5 ")).unwrap();
        line.split_whitespace().nth(column).unwrap().to_owned()
    };
    assert_eq!(row(&inspected, 11), row(&calibrated, 5));
    assert_ne!(row(&inspected, 10), row(&inspected, 11));
    let profile = json(&["inspect", TINY_LLAMA, "--format", "json"]);
    let layer = &profile["layers"][5];
    assert!(layer["bound_rounded"].as_f64() > layer["bound_exact"].as_f64());
    assert_eq!(
        layer["bound_rounded"],
        json(&["calibrate", TINY_LLAMA, "--format", "json"])["layers"][5]["logit_bound"]
    );
}

#[test]
fn a_chosen_constant_reports_the_failure_probability_that_it_amounts_to() {
    let with = |model: &str, c: &str| json(&["calibrate", model, "--as-paper", "--c", c, "--format", "json"]);
    let at = |delta: &str| {
        let c_star = &json(&["calibrate", "mistral-7b", "--delta", delta, "--format", "json"])["c_star"];
        format!("{:.17}", c_star["c_star"].as_f64().unwrap())
    };
    for (delta, model) in [("1e-6", "mistral-7b"), ("1e-3", "mistral-7b"), ("1e-30", "mistral-7b")] {
        let chosen = &with(model, &at(delta))["chosen_c"];
        let got = chosen["delta"].as_f64().unwrap();
        assert!((got / delta.parse::<f64>().unwrap() - 1.0).abs() < 1e-6, "{delta}: {got}");
    }
    // Too small for any guarantee; the worst case itself; with weights too.
    assert_eq!(with("mistral-7b", "0.001")["chosen_c"]["delta"], 1.0);
    assert_eq!(with("mistral-7b", "1")["chosen_c"]["delta"], 0.0);
    let chosen = with(TINY_LLAMA, "0.5");
    assert!(chosen["layers"].is_array() && chosen["chosen_c"]["delta"].as_f64().unwrap() < 1.0);
    assert!(json(&["calibrate", "mistral-7b", "--as-paper", "--format", "json"]).get("chosen_c").is_none());
    let table =
        String::from_utf8(sigmascale(&["calibrate", "mistral-7b", "--as-paper", "--c", "0.04"]).stdout).unwrap();
    assert!(table.contains("c 0.04000 in place of c_star: failure probability delta 1.018e-9"), "{table}");
}

#[test]
fn families_lists_what_is_supported_and_what_is_refused() {
    let known = json(&["families", "--format", "json"]);
    let of =
        |name: &str| known["families"].as_array().unwrap().iter().find(|entry| entry["model_type"] == name).unwrap();
    assert_eq!(of("qwen2_5_vl")["family"], "qwen2_vl");
    assert!(of("bloom")["refused"].as_str().unwrap().contains("ALiBi") && of("bloom").get("family").is_none());
    let table = String::from_utf8(sigmascale(&["families"]).stdout).unwrap();
    for entry in known["families"].as_array().unwrap() {
        assert!(table.contains(entry["model_type"].as_str().unwrap()), "{entry}");
    }
    assert!(table.contains("- bloom, mpt: ALiBi") && table.lines().all(|line| line.chars().count() <= 118), "{table}");
}

/// A shell reads its script without an error.
fn parses(shell: &str, script: &Path) {
    match Command::new(shell).arg("-n").arg(script).output() {
        Ok(checked) => assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr)),
        Err(_) => eprintln!("{shell} is not installed: its script is not parsed"),
    }
}

#[test]
fn completions_are_scripts_of_each_shell() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = sigmascale(&["completions", shell]).stdout;
        let script = String::from_utf8(script).unwrap();
        // Scripts of fish, elvish and PowerShell complete no values of positional arguments.
        let value = matches!(shell, "bash" | "zsh").then_some("weight-spike");
        for name in ["calibrate", "skip-layers"].into_iter().chain(value) {
            assert!(script.contains(name), "{shell}: {name}");
        }
        let file = folder.path().join(shell);
        std::fs::write(&file, script).unwrap();
        if shell != "elvish" && shell != "powershell" {
            parses(shell, &file);
        }
    }
    assert_eq!(failure(&["completions", "command.com"]).0, 2);
}

#[test]
fn man_pages_name_every_command() {
    let page = String::from_utf8(sigmascale(&["man"]).stdout).unwrap();
    assert!(page.contains(".TH sigmascale 1") && page.contains("sigmascale\\-stress(1)"), "{page}");
    let folder = tempfile::tempdir().unwrap();
    let made = sigmascale(&["man", "--dir", text(folder.path())]);
    assert!(made.status.success());
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(read("sigmascale.1"), page);
    for (file, option) in [
        ("sigmascale-stress.1", "seq\\-len"),
        ("sigmascale-stress-low-precision.1", "remedies"),
        ("sigmascale-verify.1", "html"),
    ] {
        let page = read(file);
        for part in [".SH NAME", ".SH SYNOPSIS", ".SH OPTIONS", option] {
            assert!(page.contains(part), "{file}: {part} in {page}");
        }
    }
    // groff warns of macros and escapes that it does not know.
    match Command::new("groff").args(["-man", "-Tutf8", "-ww"]).arg(folder.path().join("sigmascale-stress.1")).output()
    {
        Ok(shown) => {
            assert!(shown.status.success() && shown.stderr.is_empty() && !shown.stdout.is_empty(), "{shown:?}")
        }
        Err(_) => eprintln!("groff is not installed: the page is not rendered"),
    }
    let (code, log) = failure(&["man", "--dir", "no/such/folder"]);
    assert!(code == 2 && log.contains("no/such/folder"), "{log}");
}

#[test]
fn a_written_file_is_confirmed_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (result, page) = (at("result.json"), at("page.html"));
    for (args, files) in [
        (&["calibrate", "mistral-7b", "-o", text(&result)][..], vec![&result]),
        (&["inspect", TINY_LLAMA, "-o", text(&result), "--html", text(&page)], vec![&page, &result]),
        (&["inspect", TINY_LLAMA, "--html", text(&page), "--format", "json", "-o", "-"], vec![&page]),
    ] {
        let output = sigmascale(args);
        let want: String = files.iter().map(|file| format!("wrote {}\n", file.display())).collect();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), want, "{args:?}");
    }
}

#[test]
fn doctor_reports_the_machine() {
    let report = json(&["doctor", "--format", "json"]);
    assert!(report["cpu"]["threads"].as_u64().unwrap() >= 1);
    assert!(report["presets"].as_u64().unwrap() >= 14);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    keys(&report, &["cache", "gpu", "plugins"]);
    for fact in report["gpu"]["facts"].as_array().unwrap() {
        keys(fact, &["name", "found", "value"]);
    }
    let available = sigmascale::cuda::is_available();
    assert_eq!(report["gpu"]["available"], available);
    let advice: Vec<&str> =
        report["gpu"]["advice"].as_array().unwrap().iter().filter_map(|line| line.as_str()).collect();
    if !available {
        assert!(advice.iter().any(|line| line.starts_with("no GPU can be used: ")), "{advice:?}");
    }
    // Cache entries are counted, other files are not.
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [("a.cubin", 700), ("b.cubin", 1000), ("notes.txt", 9)] {
        std::fs::write(folder.path().join(name), vec![0u8; bytes]).unwrap();
    }
    let said = with_cache(folder.path());
    assert!(said.contains(&format!("{}, 2 kernels, 2 KiB", folder.path().display())), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "doctor leaves nothing behind");
    assert!(with_cache(&folder.path().join("later")).contains("(not created yet)"));
}

/// What `doctor` says with its kernels in `folder`.
fn with_cache(folder: &Path) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sigmascale"));
    let output = command.arg("doctor").env("SIGMASCALE_CACHE", folder).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn what_needs_a_gpu_says_so() {
    if sigmascale::cuda::is_available() {
        println!("ignored: what_needs_a_gpu_says_so: there is one");
        return;
    }
    for args in [
        &["bench", "spectral"][..],
        &["bench", "spectral", "--model", "512,8,2,64"],
        &["stress", "checkpoint-load", "--model", TINY_LLAMA, "--device", "cuda"],
    ] {
        let (code, log) = failure(args);
        assert!(code == 1 && log.contains("GPU") && log.lines().count() == 1, "{args:?}: {code} {log}");
    }
    // Before the GPU is looked for: what no GPU would mend.
    let (code, log) = failure(&["bench", "spectral", "--model", "512,3,2,64"]);
    assert!(code == 2 && log.contains("KV heads"), "{log}");
    let (code, log) = failure(&["stress", "replay", "--trace", "x.json", "--device", "cuda"]);
    assert!(code == 2 && log.contains("--device cuda"), "{log}");
}

#[test]
fn usage_errors_exit_2() {
    let cases: &[(&[&str], &str)] = &[
        (&["calibrate", "mistral-7b", "--bound", "worst-case", "--estimator", "power"], "cannot certify"),
        (&["calibrate", "mistral-7b", "--bound", "spectrum", "--estimator", "power"], "Frobenius"),
        (&["stress", "weight-spike", "--model", TINY_LLAMA, "--iterations", "5"], "must be COLD,WARM"),
        (&["stress", "weight-spike", "--model", TINY_LLAMA, "--iterations", "5,0"], "at least 1 cold and 1 warm"),
        (&["calibrate", "mistral-7b", "--delta", "0"], "delta 0 must be greater than 0 and less than 1"),
        (&["calibrate", "mistral-7b", "--delta", "nan"], "delta"),
        (&["calibrate", "mistral-7b", "--eta", "1.5"], "eta 1.5"),
        (&["calibrate", "mistral-7b", "--seq-len", "0"], "expected an integer of at least 1"),
        (&["calibrate", "mistral-7b", "--c", "0.1"], "--c needs --as-paper"),
        (&["calibrate", "mistral-7b", "--bound", "tight"], "possible values"),
        (&["calibrate", "mistral-7b", "--as-paper", "--bound", "worst-case"], "remove --bound"),
        (&["calibrate", "mistral-7b", "--as-paper", "--granularity", "head"], "one scale per layer"),
        (&["inspect", TINY_LLAMA, "--html", "x.out", "-o", "tests/../x.out"], "name the same file"),
        (&["inspect", "mistral-7b"], "needs weights"),
        (&["calibrate"], "MODEL"),
        (&["nothing"], "unrecognized subcommand"),
        (&[], "Usage"),
    ];
    for (args, part) in cases {
        let (code, log) = failure(args);
        assert_eq!(code, 2, "{args:?}: {log}");
        assert!(log.contains(part), "{args:?}: {log}");
    }
    assert!(!Path::new("x.safetensors").exists() && !Path::new("x.out").exists());
    assert!(sigmascale(&["--version"]).status.success() && sigmascale(&["calibrate", "--help"]).status.success());
}

#[test]
fn targets_that_cannot_be_written_are_found_first() {
    let (code, log) = failure(&["calibrate", "mistral-7b", "-o", "/no/such/folder/x.json"]);
    assert_eq!(code, 1);
    assert!(log.contains("/no/such/folder/x.json: "), "{log}");
    let folder = tempfile::tempdir().unwrap();
    let (code, log) = failure(&["inspect", TINY_LLAMA, "--html", text(folder.path())]);
    assert!(code == 1 && log.contains("it is a folder"), "{log}");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_sigmascale"))
        .args(["calibrate", TINY_LLAMA, "--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(log, "");
}

#[test]
fn timings_go_to_stderr_when_asked_for() {
    let output = Command::new(env!("CARGO_BIN_EXE_sigmascale"))
        .args(["calibrate", TINY_LLAMA, "--format", "json"])
        .env("RUST_LOG", "sigmascale=debug")
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("calibrated"));
    serde_json::from_slice::<Value>(&output.stdout).unwrap();
}

/// The carried weights under another family's name, with q and k norms of these lengths.
fn with_qk_norm(model_type: &str, lengths: [usize; 2]) -> (tempfile::TempDir, PathBuf) {
    let (keep, folder) = copy_of_tiny_llama();
    edit_config(&folder, "model_type", model_type.into());
    let shards = [1, 2].map(|n| std::fs::read(folder.join(format!("model-0000{n}-of-00002.safetensors"))).unwrap());
    let mut tensors: Vec<_> = shards
        .iter()
        .flat_map(|bytes| SafeTensors::deserialize(bytes).unwrap().tensors())
        .map(|(name, view)| (name, view.shape().to_vec(), view.data().to_vec()))
        .collect();
    for layer in 0..6 {
        for (name, length) in [("q", lengths[0]), ("k", lengths[1])] {
            let gain = half::bf16::from_f32(1.5).to_le_bytes().repeat(length);
            tensors.push((format!("model.layers.{layer}.self_attn.{name}_norm.weight"), vec![length], gain));
        }
    }
    let views = tensors.iter().map(|(name, shape, data)| {
        (name, safetensors::tensor::TensorView::new(Dtype::BF16, shape.clone(), data).unwrap())
    });
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    (keep, folder)
}

#[test]
fn normalised_q_and_k_have_bounds_but_no_sigma() {
    let (_keep, folder) = with_qk_norm("qwen3", [64, 64]);
    let profile = json(&["calibrate", text(&folder), "--format", "json"]);
    let layer = &profile["layers"][0];
    assert!(layer["sigma"].is_null() && layer["sigma_sum"].is_null());
    assert!(layer["heads"][0]["bound_rank_aware"].is_null() && layer["v_descale"].is_array());
    // tau r gq gk = 64 / 8 * 1.5^2.
    assert!((layer["heads"][0]["bound_exact"].as_f64().unwrap() - 18.0).abs() < 1e-9);
    let page = folder.join("page.html");
    let inspection = sigmascale(&["inspect", text(&folder), "--html", text(&page)]);
    assert!(String::from_utf8(inspection.stdout).unwrap().contains("do not bound the logits"));
    assert!(std::fs::read_to_string(&page).unwrap().contains("Bound in exact arithmetic by layer"));
    let (code, log) = failure(&["calibrate", text(&folder), "--bound", "rank-aware"]);
    assert!(code == 1 && log.contains("rank-aware"), "{log}");
}

/// Behind a LayerNorm bounds end where its mean is lost in f32: table and JSON say where.
#[test]
fn a_layer_norm_states_its_limit() {
    let (_keep, folder) = copy_of_tiny_llama();
    let llama = sigmascale(&["calibrate", text(&folder)]);
    assert!(!String::from_utf8_lossy(&llama.stdout).contains("LayerNorm"));
    // Cohere has the same tensors behind a LayerNorm without a shift.
    edit_config(&folder, "model_type", "cohere".into());
    let table = sigmascale(&["calibrate", text(&folder)]);
    let table = String::from_utf8_lossy(&table.stdout);
    assert!(table.contains("LayerNorm: holds for tokens with |mean| <= 512 sqrt(variance + epsilon)"), "{table}");
    assert_eq!(json(&["calibrate", text(&folder), "--format", "json"])["method"]["layer_norm_mean_limit"], 512.0);
}

#[test]
fn values_without_a_norm_in_front_are_not_exported() {
    let (_keep, folder) = with_qk_norm("olmo2", [256, 128]);
    let profile = json(&["calibrate", text(&folder), "--format", "json"]);
    assert!(profile["layers"][0]["v_descale"].is_null() && profile["layers"][0]["o_descale"].is_null());
    let to = folder.with_extension("out");
    let (code, log) = failure(&["export", text(&folder), "--to", text(&to), "--for", "vllm"]);
    assert!(code == 1 && log.contains("model.layers.0.self_attn: v "), "{log}");
    assert!(!to.exists());
}

/// First shard of a copy of the checkpoint, for breaking.
fn shard(folder: &Path) -> PathBuf {
    folder.join("model-00001-of-00002.safetensors")
}

/// Changes the header text of a shard and keeps the data.
fn edit_header(file: &Path, edit: impl Fn(&str) -> String) {
    let bytes = std::fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = edit(std::str::from_utf8(&bytes[8..8 + length]).unwrap());
    let mut out = std::fs::File::create(file).unwrap();
    out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    out.write_all(header.as_bytes()).unwrap();
    out.write_all(&bytes[8 + length..]).unwrap();
}

/// Changes a value of the config.
fn edit_config(folder: &Path, key: &str, value: Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

/// Overwrites one BF16 weight.
fn plant(file: &Path, tensor: &str, value: [u8; 2]) {
    let mut bytes = std::fs::read(file).unwrap();
    let (length, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let start = 8 + length + metadata.info(tensor).unwrap().data_offsets.0;
    bytes[start + 20..start + 22].copy_from_slice(&value);
    std::fs::write(file, bytes).unwrap();
}

/// Exit 1, one line, every part named, nothing written.
fn refused(folder: &Path, parts: &[&str]) {
    let outputs = tempfile::tempdir().unwrap();
    let [result, scales] = ["result.json", "scales.safetensors"].map(|name| outputs.path().join(name));
    for command in [
        vec!["calibrate", text(folder), "-o", text(&result)],
        vec!["inspect", text(folder), "-o", text(&result), "--html", text(&scales)],
    ] {
        let (code, log) = failure(&command);
        assert_eq!(code, 1, "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
        for part in parts {
            assert!(log.contains(part), "{part:?} is missing from {log}");
        }
        assert_eq!(std::fs::read_dir(outputs.path()).unwrap().count(), 0);
    }
}

#[test]
fn truncated_shard() {
    let (_keep, folder) = copy_of_tiny_llama();
    let bytes = std::fs::read(shard(&folder)).unwrap();
    std::fs::write(shard(&folder), &bytes[..bytes.len() - 100]).unwrap();
    refused(&folder, &["model-00001-of-00002.safetensors"]);
    std::fs::write(shard(&folder), &bytes[..5]).unwrap();
    refused(&folder, &["model-00001-of-00002.safetensors"]);
    std::fs::write(shard(&folder), b"").unwrap();
    refused(&folder, &["model-00001-of-00002.safetensors"]);
}

#[test]
fn overlapping_tensors() {
    let (_keep, folder) = copy_of_tiny_llama();
    let bytes = std::fs::read(shard(&folder)).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let q = metadata.info("model.layers.0.self_attn.q_proj.weight").unwrap().data_offsets;
    let o = metadata.info("model.layers.0.self_attn.o_proj.weight").unwrap().data_offsets;
    edit_header(&shard(&folder), |header| {
        let offsets = |(start, end): (usize, usize)| format!("[{start},{end}]");
        assert!(header.contains(&offsets(o)));
        header.replace(&offsets(o), &offsets(q))
    });
    refused(&folder, &["model-00001-of-00002.safetensors"]);
}

#[test]
fn header_of_two_to_the_sixty_bytes() {
    let (_keep, folder) = copy_of_tiny_llama();
    let mut bytes = std::fs::read(shard(&folder)).unwrap();
    bytes[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    std::fs::write(shard(&folder), bytes).unwrap();
    refused(&folder, &["model-00001-of-00002.safetensors", "1152921504606846976"]);
}

#[test]
fn wrong_type_and_missing_tensor() {
    let (_keep, folder) = copy_of_tiny_llama();
    edit_header(&shard(&folder), |header| header.replace("\"BF16\"", "\"I16\""));
    refused(&folder, &["model-00001-of-00002.safetensors", "tensor `model.layers.0.", "I16"]);
    let (_keep, folder) = copy_of_tiny_llama();
    edit_config(&folder, "num_hidden_layers", 7.into());
    refused(&folder, &["model.layers.6.self_attn.q_proj.weight"]);
}

#[test]
fn missing_shard() {
    let (_keep, folder) = copy_of_tiny_llama();
    std::fs::remove_file(shard(&folder)).unwrap();
    refused(&folder, &["model.safetensors.index.json", "model-00001-of-00002.safetensors", "missing"]);
}

#[test]
fn weights_that_are_not_finite() {
    for (name, value) in [("q", [0xc0, 0x7f]), ("k", [0x80, 0x7f]), ("v", [0x80, 0xff])] {
        let (_keep, folder) = copy_of_tiny_llama();
        let tensor = format!("model.layers.1.self_attn.{name}_proj.weight");
        plant(&shard(&folder), &tensor, value);
        refused(&folder, &[tensor.as_str()]);
    }
    let (_keep, folder) = copy_of_tiny_llama();
    plant(&shard(&folder), "model.layers.1.input_layernorm.weight", [0xc0, 0x7f]);
    refused(&folder, &["model.layers.1.input_layernorm.weight"]);
}

#[test]
fn configs_that_make_no_sense() {
    for (key, value, part) in [
        ("num_attention_heads", 5.into(), "5"),
        ("num_key_value_heads", 3.into(), "3"),
        ("num_hidden_layers", 0.into(), "layers"),
        ("hidden_size", (1u64 << 62).into(), "hidden_size"),
        ("model_type", "alibi-net".into(), "alibi-net"),
    ] {
        let (_keep, folder) = copy_of_tiny_llama();
        edit_config(&folder, key, value);
        refused(&folder, &["config.json", part]);
    }
    let (_keep, folder) = copy_of_tiny_llama();
    std::fs::write(folder.join("config.json"), "{").unwrap();
    refused(&folder, &["config.json"]);
}

#[test]
fn config_of_a_hundred_megabytes() {
    let (_keep, folder) = copy_of_tiny_llama();
    std::fs::File::create(folder.join("config.json")).unwrap().set_len(100 << 20).unwrap();
    refused(&folder, &["config.json"]);
}

#[cfg(unix)]
#[test]
fn path_without_permission() {
    use std::os::unix::fs::PermissionsExt;
    let (_keep, folder) = copy_of_tiny_llama();
    std::fs::set_permissions(shard(&folder), std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::File::open(shard(&folder)).is_ok() {
        // The superuser reads everything; a folder in the file's place cannot be read by anyone.
        eprintln!("path_without_permission: running as a user whom no permission stops");
        std::fs::remove_file(shard(&folder)).unwrap();
        std::fs::create_dir(shard(&folder)).unwrap();
    }
    refused(&folder, &["model-00001-of-00002.safetensors"]);
}
