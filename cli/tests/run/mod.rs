//! Running the binary.
#![allow(dead_code)] // Each test target uses its own part.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The carried checkpoint.
pub const TINY_LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-llama");

/// Runs the command to its end.
pub fn sigmascale(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sigmascale"));
    command.args(args).stdin(Stdio::null()).env_remove("RUST_LOG");
    command.output().unwrap()
}

/// Standard output as JSON, of a run that must succeed and say nothing else but which files it wrote.
pub fn json(args: &[&str]) -> Value {
    let output = sigmascale(args);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {log}");
    assert!(log.lines().all(|line| line.starts_with("wrote ")), "{args:?}: {log}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Exit code and standard error of a run that must fail; standard output must be empty.
pub fn failure(args: &[&str]) -> (i32, String) {
    let output = sigmascale(args);
    assert!(!output.status.success(), "{args:?} succeeded");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{args:?}");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// A copy of the carried checkpoint that may be broken.
pub fn copy_of_tiny_llama() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("tiny-llama");
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(TINY_LLAMA).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    (parent, folder)
}

/// The last paragraph of a report, which holds the verdict and the next command, in one line.
pub fn ending(said: &str) -> String {
    said.trim_end().rsplit("\n\n").next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
