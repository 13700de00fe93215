//! `calibration/profiles` holds what the tool prints today.
//!
//! After a wanted change: `for p in calibration/presets/*.json; do n=$(basename $p .json); cargo run --release --
//! calibrate $n --format json -o calibration/profiles/$n.json; done`.

mod run;

use run::{json, sigmascale, text};
use serde_json::Value;
use sigmascale::model::preset_names;
use std::path::Path;

/// Equal, numbers to 1e-12 (logarithms differ in the last digit between machines).
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}

#[test]
fn every_preset_has_its_profile() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../calibration/profiles");
    for name in preset_names() {
        let stored = std::fs::read(folder.join(format!("{name}.json"))).unwrap();
        let stored: Value = serde_json::from_slice(&stored).unwrap();
        assert!(same(&stored, &json(&["calibrate", name, "--format", "json"])), "{name} is out of date");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), preset_names().count(), "a profile without a preset");
}

#[test]
fn a_file_holds_what_stdout_would() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.json");
    let output = sigmascale(&["calibrate", "qwen3-8b", "--format", "json", "-o", text(&file)]);
    assert!(output.status.success() && output.stdout.is_empty());
    let shown = sigmascale(&["calibrate", "qwen3-8b", "--format", "json"]).stdout;
    assert_eq!(std::fs::read(&file).unwrap(), shown);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
