//! `sigmascale diagnose` as scripts see it: exit codes, JSON keys, messages; checkpoints with a head that grows.

mod run;

use run::{TINY_LLAMA, copy_of_tiny_llama, failure, json, sigmascale, text};
use serde_json::Value;
use sigmascale_lab::diagnose::Diagnosis;
use sigmascale_lab::history::{FORMAT, LayerInfo, LayerRecord, OperandFormat, Record, RunInfo, StepRecord, Writer};
use std::path::{Path, PathBuf};

/// A record in which the logits of layer 5, head 1 pass 1000 at step 500 and the loss rises at step 700; or a calm one.
fn record(file: &Path, fails: bool) {
    let layer = LayerInfo { layer: 5, heads: 2, kv_heads: 2, head_dim: 8, width: Some(16), operands: None };
    let run = RunInfo { format: FORMAT, source: "lab".into(), layers: vec![layer], ..RunInfo::default() };
    let mut writer = Writer::create(file, run).unwrap();
    for step in 0..1000 {
        let loss = Some(if fails && step >= 700 { 4.0 } else { 2.0 });
        writer.write(&Record::Step(StepRecord { step, loss, lr: Some(1e-3), ..StepRecord::default() })).unwrap();
        if step % 10 == 0 {
            let logit = if fails { (step as f64).powi(2) / 250.0 } else { 20.0 };
            let layer = LayerRecord { step, layer: 5, logit_max: vec![20.0, logit], ..LayerRecord::default() };
            writer.write(&Record::Layer(layer)).unwrap();
        }
    }
}

#[test]
fn a_run_that_fails_is_named_by_its_head_with_exit_1() {
    let folder = tempfile::tempdir().unwrap();
    let (file, page) = (folder.path().join("run.jsonl"), folder.path().join("run.html"));
    record(&file, true);
    let output = sigmascale(&["diagnose", text(&file), "--json", "--html", text(&page)]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["verdict"], &found["first"]["kind"]), (&"alarm".into(), &"logit-limit".into()));
    assert_eq!((&found["first"]["layer"], &found["first"]["head"]), (&5.into(), &1.into()));
    assert_eq!((&found["first"]["since"], &found["first"]["raised"]), (&500.into(), &520.into()));
    // Five of fifty losses are twice as large.
    assert_eq!((&found["loss_shows"], &found["lead"]), (&704.into(), &184.into()));
    assert!(found["advice"][0]["source"].as_str().unwrap().contains("2507.20534"));
    assert_eq!(found["heads"].as_array().unwrap().len(), 2);
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("layer 5, head 1 goes wrong first") && page.contains("Largest logit"));
    assert!(!page.contains("NaN") && !page.contains("<script"));
    // The line is where the lead counts from.
    assert!(page.contains("The vertical line is step 520"), "{page}");
    let table = String::from_utf8(sigmascale(&["diagnose", text(&file)]).stdout).unwrap();
    assert!(table.contains("ALARM: layer 5, head 1") && table.contains("184 steps after its first alarm"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 160), "{table}");
}

/// The stress lab names a run by its settings, and the limit of its logits is that of their format.
#[test]
fn a_run_in_f16_named_by_its_settings() {
    let folder = tempfile::tempdir().unwrap();
    let (file, page) = (folder.path().join("run.jsonl"), folder.path().join("run.html"));
    let operands = Some(OperandFormat::F16);
    let layer = LayerInfo { layer: 5, heads: 1, kv_heads: 1, head_dim: 8, width: Some(16), operands };
    let name = Some(r#"{"remedy":"none","seed":3}"#.to_owned());
    let run = RunInfo { format: FORMAT, source: "lab".into(), name, layers: vec![layer], ..RunInfo::default() };
    let mut writer = Writer::create(&file, run).unwrap();
    for step in 0..100 {
        let layer = LayerRecord { step, layer: 5, logit_max: vec![2000.0], ..LayerRecord::default() };
        writer.write(&Record::Layer(layer)).unwrap();
    }
    drop(writer);
    let output = sigmascale(&["diagnose", text(&file), "--html", text(&page)]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{table}");
    assert!(table.starts_with("remedy none, seed 3: 1 layer, 1 query head, steps 0 to 99"), "{table}");
    assert!(table.contains("reaches 8000") && !table.contains("passed"), "{table}");
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("remedy none, seed 3") && page.contains("Dotted: the limit of 8000."));
}

#[test]
fn a_calm_run_exits_with_0_and_its_limit_is_an_option() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    record(&file, false);
    let found = json(&["diagnose", text(&file), "--json"]);
    assert_eq!(
        (&found["verdict"], &found["first"], &found["loss_shows"]),
        (&"calm".into(), &Value::Null, &Value::Null)
    );
    let output = sigmascale(&["diagnose", text(&file), "--logit-limit", "15"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_record_without_steps_is_said_to_have_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    record(&file, false);
    let begun = std::fs::read_to_string(&file).unwrap().lines().next().unwrap().to_owned() + "\n";
    std::fs::write(&file, begun).unwrap();
    let table = String::from_utf8(sigmascale(&["diagnose", text(&file)]).stdout).unwrap();
    assert!(
        table.contains("no alarm was raised, since the record has no step yet.") && !table.contains("calm"),
        "{table}"
    );
}

#[test]
fn wrong_usage_is_2_and_what_cannot_be_read_is_3() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    record(&file, false);
    for (args, code, said) in [
        (vec!["diagnose"], 2, "RUN|CHECKPOINTS"),
        (vec!["diagnose", text(&file), "--growth", "0"], 2, "growth 0 must be finite and greater than 0"),
        (vec!["diagnose", text(&file), "--lr", "0.1"], 2, "--lr is for checkpoints"),
        (vec!["diagnose", text(&file), TINY_LLAMA], 2, "one record of a run, or only checkpoints"),
        (vec!["diagnose", TINY_LLAMA], 2, "pass two or more checkpoints"),
        (vec!["diagnose", "--model", TINY_LLAMA], 2, "--tokens <FILE>"),
        (vec!["diagnose", text(&file), "--tokens", text(&file)], 2, "need --model FOLDER"),
        (vec!["diagnose", text(&file), "--model", TINY_LLAMA, "--tokens", text(&file)], 2, "cannot be used with"),
        (vec!["diagnose", "--model", TINY_LLAMA, "--tokens", "absent.txt"], 3, "absent.txt: cannot open"),
        (vec!["diagnose", "absent.jsonl"], 3, "absent.jsonl: cannot read"),
        (vec!["diagnose", TINY_LLAMA, "checkpoint-7"], 3, "checkpoint-7: cannot read"),
        (vec!["diagnose", concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")], 3, "line 1 is not a record of a run"),
    ] {
        let (got, message) = failure(&args);
        assert!(got == code && message.contains(said), "{args:?}: {got}, {message}");
    }
}

#[test]
fn a_text_shows_which_heads_repeat_their_maximum() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/sample.py");
    let folder = tempfile::tempdir().unwrap();
    let same = folder.path().join("same.json");
    std::fs::write(&same, format!("{:?}", [101; 64])).unwrap();
    let of = |tokens: &str| json(&["diagnose", "--model", TINY_LLAMA, "--tokens", tokens, "--seq-len", "64", "--json"]);
    let (text_of, same) = (of(sample), of(text(&same)));
    assert_eq!((&text_of["sequences"], &text_of["seq_len"], &same["sequences"]), (&16.into(), &64.into(), &1.into()));
    let mean = |found: &Value, layer: u64, key: &str| {
        let heads = found["heads"].as_array().unwrap().iter().filter(|head| head["layer"] == layer);
        let values: Vec<f64> = heads.filter_map(|head| head[key].as_f64()).collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    for layer in 0..6 {
        for (key, range) in
            [("repeated", 0.0..=1.0), ("ones", 0.0..=1.0), ("error_at_ones", 0.0..=1.0), ("similarity", -1.0..=1.0)]
        {
            assert!(range.contains(&mean(&text_of, layer, key)), "{layer} {key}");
        }
        // Text repeats no row of keys; a maximum that several keys reach in f32 has several weights of 1 in BF16.
        assert!(mean(&text_of, layer, "repeated") <= mean(&text_of, layer, "ones"));
    }
    // Of one token again and again the first layer reads one vector.
    assert!(mean(&same, 0, "similarity") > 0.5 && mean(&same, 0, "similarity") > 2.0 * mean(&text_of, 0, "similarity"));
    let table = sigmascale(&["diagnose", "--model", TINY_LLAMA, "--tokens", sample, "--seq-len", "64"]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("several P = 1") && table.contains("16 sequences of 64 tokens"), "{table}");
}

/// Copies of the carried checkpoint at steps 100, 200 and 300, of which head 1 of layer 2 has a W_Q to which the same matrix
/// was added `factor` times, 2 `factor` times, ...
fn series(factor: f32) -> (Vec<tempfile::TempDir>, Vec<PathBuf>) {
    let made = (1..=3u8).map(|number| {
        let (parent, folder) = copy_of_tiny_llama();
        let name = "model.layers.2.self_attn.q_proj.weight";
        for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
            let file = folder.join(shard);
            let mut bytes = std::fs::read(&file).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let Some(offsets) = header[name]["data_offsets"].as_array() else { continue };
            // 4 heads of 64 rows, 256 BF16 columns.
            let start = 8 + length + offsets[0].as_u64().unwrap() as usize + 64 * 256 * 2;
            for (place, value) in bytes[start..start + 64 * 256 * 2].chunks_exact_mut(2).enumerate() {
                let sign = if (place / 256 + place % 256) % 2 == 0 { 1.0 } else { -1.0 };
                let old = half::bf16::from_le_bytes([value[0], value[1]]).to_f32();
                let new = half::bf16::from_f32(old + sign * factor * f32::from(number));
                value.copy_from_slice(&new.to_le_bytes());
            }
            std::fs::write(&file, bytes).unwrap();
        }
        let named = parent.path().join(format!("checkpoint-{}00", number));
        std::fs::rename(&folder, &named).unwrap();
        (parent, named)
    });
    made.unzip()
}

#[test]
fn the_head_that_grows_over_checkpoints_is_found_and_only_with_its_rate() {
    // 64 x 256 signs times 0.06 have the norm 7.7; a rate of 1e-3 allows 12.8 in 100 steps.
    let (_folders, paths) = series(0.06);
    let paths: Vec<&str> = paths.iter().map(|path| text(path)).collect();
    // In any order.
    let asked = ["diagnose", paths[2], paths[0], paths[1], "--json"];
    let output = sigmascale(&[&asked[..], &["--lr", "1e-3"]].concat());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{found}");
    assert_eq!((&found["first"]["kind"], &found["first"]["layer"]), (&"growth".into(), &2.into()));
    assert_eq!(
        (&found["first"]["head"], &found["first_step"], &found["last_step"]),
        (&1.into(), &100.into(), &300.into())
    );
    let share = found["first"]["value"].as_f64().unwrap();
    assert!((0.55..0.65).contains(&share), "{share}");
    let head = &found["heads"][9];
    assert_eq!((&head["layer"], &head["head"]), (&2.into(), &1.into()));
    assert!(head["sigma"]["last"].as_f64() > head["sigma"]["first"].as_f64());
    let calm = json(&asked);
    assert!(calm["heads"][9]["growth"].is_null() && calm["heads"][9]["w_q"]["per_step"].as_f64().unwrap() > 0.07);
    let table = String::from_utf8(sigmascale(&["diagnose", paths[0], paths[1]]).stdout).unwrap();
    assert!(table.contains("--lr"), "{table}");
}

#[test]
fn checkpoints_without_steps_have_no_rate_and_the_odd_one_is_named_beside_the_first() {
    let (_folders, mut paths) = series(0.06);
    let last = paths[2].with_file_name("final");
    std::fs::rename(&paths[2], &last).unwrap();
    paths[2] = last;
    let rate = ["--lr", "1e-3"];
    for paths in [[&paths[0], &paths[2]], [&paths[0], &paths[0]]] {
        let asked = ["diagnose", text(paths[0]), text(paths[1])];
        let (code, message) = failure(&[&asked[..], &rate].concat());
        assert!(code == 2 && message.contains("checkpoints"), "{message}");
        assert_eq!(json(&[&asked[..], &["--json"]].concat())["last_step"], 1);
    }
    let config = paths[1].join("config.json");
    let other =
        std::fs::read_to_string(&config).unwrap().replace(r#""num_hidden_layers": 6"#, r#""num_hidden_layers": 5"#);
    std::fs::write(&config, other).unwrap();
    let (_, message) = failure(&["diagnose", text(&paths[1]), text(&paths[0])]);
    assert!(message.contains("checkpoint-200: ") && message.contains("checkpoint-100:"));
}

#[test]
fn equal_checkpoints_are_calm_and_keep_their_certified_norms() {
    let (_folders, paths) = series(0.0);
    let found = json(&["diagnose", text(&paths[0]), text(&paths[1]), "--lr", "1e-3", "--json"]);
    let profile = json(&["calibrate", TINY_LLAMA, "--format", "json"]);
    for (place, head) in found["heads"].as_array().unwrap().iter().enumerate() {
        let own = &profile["layers"][place / 4]["heads"][place % 4];
        assert_eq!(head["bound"], own["bound_rounded"]);
        assert_eq!(head["growth"].as_f64(), Some(0.0));
        let ratio = head["sigma"]["last"].as_f64().unwrap() / own["sigma"].as_f64().unwrap();
        assert!((1.0..1.0001).contains(&ratio), "{ratio}");
    }
}

#[test]
fn the_library_reads_what_it_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    record(&file, true);
    let (run, records) = sigmascale_lab::history::read_records(&file).unwrap();
    let diagnosis = Diagnosis::new(run, &records, Default::default()).unwrap();
    assert_eq!((diagnosis.first.unwrap().raised, diagnosis.loss_shows), (520, Some(704)));
}

/// What a trainer leaves: its record, or its checkpoints in the order of their steps.
#[test]
fn the_output_folder_of_a_trainer_is_read() {
    let folder = tempfile::tempdir().unwrap();
    for (step, place) in [(20, "checkpoint-20"), (3, "checkpoint-3")] {
        let (_keep, copy) = copy_of_tiny_llama();
        std::fs::rename(&copy, folder.path().join(place)).unwrap();
        assert!(folder.path().join(format!("checkpoint-{step}")).exists());
    }
    let found = json(&["diagnose", text(folder.path()), "--json"]);
    assert_eq!(
        (&found["source"], &found["first_step"], &found["last_step"]),
        (&"checkpoints".into(), &3.into(), &20.into())
    );
    record(&folder.path().join("run.jsonl"), false);
    assert_eq!(json(&["diagnose", text(folder.path()), "--json"])["source"], "lab");
}
