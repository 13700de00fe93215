//! What a trainer leaves in its output folder.

use super::checkpoints::step_of;
use std::path::{Path, PathBuf};

/// The name that a monitor gives its record by default.
const RECORD: &str = "run.jsonl";

/// What to diagnose of the output folder of a trainer: the record in it, `run.jsonl` or the only `.jsonl`, or else its checkpoints,
/// folders whose names end in their steps. `None` for what is no such folder, as a checkpoint or a file.
pub fn in_output_folder(folder: &Path) -> Option<Vec<PathBuf>> {
    let entries: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    let records: Vec<&PathBuf> =
        entries.iter().filter(|path| path.is_file() && path.extension().is_some_and(|e| e == "jsonl")).collect();
    let named = records.iter().find(|path| path.file_name().is_some_and(|name| name == RECORD));
    if let Some(record) = named.or(records.first().filter(|_| records.len() == 1)) {
        return Some(vec![record.to_path_buf()]);
    }
    let mut checkpoints: Vec<PathBuf> =
        entries.into_iter().filter(|path| path.join("config.json").is_file() && step_of(path) != u64::MAX).collect();
    checkpoints.sort_by_key(|path| step_of(path));
    (!checkpoints.is_empty()).then_some(checkpoints)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_before_checkpoints() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert_eq!(in_output_folder(folder.path()), None);
        for step in [1000, 500] {
            std::fs::create_dir(at(&format!("checkpoint-{step}"))).unwrap();
            std::fs::write(at(&format!("checkpoint-{step}")).join("config.json"), b"{}").unwrap();
        }
        // The model that a trainer saves at its end, and a folder of something else.
        std::fs::write(at("config.json"), b"{}").unwrap();
        std::fs::create_dir(at("runs")).unwrap();
        assert_eq!(in_output_folder(folder.path()), Some(vec![at("checkpoint-500"), at("checkpoint-1000")]));
        std::fs::write(at("log.jsonl"), b"").unwrap();
        assert_eq!(in_output_folder(folder.path()), Some(vec![at("log.jsonl")]));
        std::fs::write(at("run.jsonl"), b"").unwrap();
        assert_eq!(in_output_folder(folder.path()), Some(vec![at("run.jsonl")]));
        assert_eq!(in_output_folder(&at("run.jsonl")), None);
        assert_eq!(in_output_folder(&at("checkpoint-500")), None);
    }
}
