//! The GPU half of `doctor` in a build without the cargo feature `cuda`.

use super::report::Gpu;
use std::path::PathBuf;

pub(super) fn found() -> (Gpu, Option<PathBuf>) {
    let advice = "this build has no GPU support: build it with the cargo feature `cuda`".to_owned();
    (Gpu { available: false, facts: vec![], advice: vec![advice] }, None)
}
