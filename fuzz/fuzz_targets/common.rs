//! What targets share: readers take files, so each input becomes one.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

/// The folder of this process.
pub fn folder() -> &'static Path {
    FOLDER.path()
}

/// A file of this name that holds these bytes, in the folder of this process.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    std::fs::write(&path, bytes).expect("a file in a temporary folder");
    path
}
