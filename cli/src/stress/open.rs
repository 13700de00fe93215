//! The model of a scenario.

use crate::model::Model;
use sigmascale::{Error, Result};
use sigmascale_lab::stress::StressModel;
use std::path::PathBuf;

/// Weights of a checkpoint as they are; random ones where there is a config alone.
pub fn open(name: &str, path: &[PathBuf], seed: u64) -> Result<StressModel> {
    if let Some(missing) = path.iter().find(|place| !place.exists()) {
        let rule = std::io::Error::new(
            std::io::ErrorKind::NotFound,
            "no such path: --checkpoints lists folders of later checkpoints of --model, comma-separated",
        );
        return Err(Error::io(missing, "open", rule));
    }
    match Model::open(name)? {
        Model::Config(_) if !path.is_empty() => {
            Err(Error::argument(format_args!("--checkpoints needs a checkpoint as --model, but {name} has no weights")))
        }
        Model::Config(spec) => StressModel::synthetic(&spec, seed),
        Model::Checkpoint(first) => {
            let first = [first.path().to_owned()];
            StressModel::open_path(&first.iter().chain(path).collect::<Vec<_>>())
        }
    }
}
