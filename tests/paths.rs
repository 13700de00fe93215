//! Every file of this repository that a comment or a document names exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Sources of other projects, and patterns.
const ELSEWHERE: &[&str] = &[
    "mistral.rs",
    "model_loader/weight_utils.py",
    "mistralrs-core/src/paged_attention/scales.rs",
    "algorithms/grpo.py",
    "backends/fsdp_utils/update_weight_utils.py",
    "backends/megatron_utils/update_weight/update_weight_from_tensor.py",
    "backends/skyrl_train/weight_sync/weight_extractor.py",
    "dtensor_policy_worker_v2.py",
    "models/policy/workers/megatron_policy_worker.py",
    "workers/rollout/vllm_rollout/utils.py",
    "_torch/attention_backend/trtllm.py",
    "_torch/modules/linear.py",
    "flash_attn/flash_attn_interface.py",
    "hopper/flash_attn_interface.py",
    "src/graph/tuning.cc",
    "kernels/FOLDER/NAME.cu",
    "calibration/profiles/NAME.json",
];

/// Files of the repository, as paths from its root. Built and downloaded ones are left out.
fn files(folder: &Path, root: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != ".git" && name != "target" && name != ".venv" && name != "__pycache__" && name != "shared" {
                files(&path, root, found);
            }
        } else {
            found.insert(path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/"));
        }
    }
}

/// Where comments begin; nothing for documents, which are read whole.
fn comment(file: &str) -> Option<&'static str> {
    match Path::new(file).extension()?.to_str()? {
        "rs" | "cu" | "cuh" => Some("//"),
        "py" | "pyi" | "toml" | "sh" => Some("#"),
        "md" => Some(""),
        _ => None,
    }
}

/// Names of source files, and paths that begin with a folder of the repository.
fn named<'t>(text: &'t str, folders: &'t BTreeSet<&str>) -> impl Iterator<Item = &'t str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_-./".contains(c)));
    words.map(|word| word.trim_end_matches('.').trim_start_matches("./")).filter(|word| {
        let extension = Path::new(word).extension().and_then(|extension| extension.to_str());
        let source = matches!(extension, Some("rs" | "cu" | "cuh" | "py")) && !word.starts_with(['.', '/']);
        let inside = word.split_once('/').is_some_and(|(first, _)| first == ".." || folders.contains(first));
        source || (inside && extension.is_some_and(|e| e.chars().all(char::is_alphabetic)))
    })
}

#[test]
fn every_file_that_is_named_exists() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    files(&root, &root, &mut all);
    let folders: BTreeSet<&str> = all.iter().filter_map(|file| Some(file.split_once('/')?.0)).collect();
    let mut missing = Vec::new();
    for file in &all {
        let shell = file.starts_with(".ci/").then_some("#");
        let Some(mark) = comment(file).or(shell) else { continue };
        let Ok(text) = std::fs::read_to_string(root.join(file)) else { continue };
        for (number, line) in text.lines().enumerate() {
            let Some((_, said)) = line.split_once(mark) else { continue };
            let exists = |name: &str| {
                let here = Path::new(file).parent().unwrap();
                let suffix = format!("/{name}");
                root.join(here).join(name).exists()
                    || all.iter().any(|other| other == name || other.ends_with(&suffix))
                    || ELSEWHERE.contains(&name)
            };
            let broken = named(said, &folders).filter(|name| !exists(name));
            missing.extend(broken.map(|name| format!("{file}:{}: {name}", number + 1)));
        }
    }
    assert!(all.len() > 300, "the repository was not read");
    assert!(missing.is_empty(), "{} names of files that do not exist:\n{}", missing.len(), missing.join("\n"));
}
