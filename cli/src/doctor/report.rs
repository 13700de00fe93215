//! What `doctor` found, as its JSON.

use serde::Serialize;
use std::path::PathBuf;

/// Everything found, section by section.
#[derive(Serialize)]
pub(super) struct Report {
    pub version: &'static str,
    pub presets: usize,
    pub cpu: Cpu,
    pub cache: Cache,
    pub gpu: Gpu,
}

#[derive(Serialize)]
pub(super) struct Cpu {
    pub architecture: &'static str,
    /// Threads that this process may use.
    pub threads: usize,
    pub features: Vec<&'static str>,
    pub memory_bytes: Option<u64>,
    pub available_bytes: Option<u64>,
}

/// Where compiled kernels are kept.
#[derive(Serialize)]
pub(super) struct Cache {
    pub folder: Option<PathBuf>,
    pub exists: bool,
    /// Kernels kept, and their size.
    pub entries: usize,
    pub bytes: u64,
    /// Whether a new one could be kept; null before the folder is made.
    pub writable: Option<bool>,
}

/// What the CUDA module found. `available`: kernels can be compiled and launched.
#[derive(Serialize)]
pub(super) struct Gpu {
    pub available: bool,
    pub facts: Vec<Fact>,
    /// What to do, a sentence each.
    pub advice: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct Fact {
    pub name: String,
    pub found: bool,
    /// What was found, or what is missing and what to do.
    pub value: String,
}
