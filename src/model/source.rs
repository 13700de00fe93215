//! What a model argument means: a preset name, a config, a `.safetensors` file or a folder.

use super::checkpoint::Checkpoint;
use super::preset::{preset, preset_names};
use super::spec::AttentionSpec;
use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::path::Path;

/// A model, with or without weights.
pub enum ModelSource {
    /// Config facts alone.
    Config(Box<AttentionSpec>),
    /// Mapped weights.
    Checkpoint(Box<Checkpoint>),
}

impl ModelSource {
    /// Resolves the argument; a preset's name wins over a file of that name (write `./name` for the file).
    ///
    /// # Errors
    /// `is_io` if there is neither a preset nor a path of this name; otherwise as [`AttentionSpec::from_config_file`] and
    /// [`Checkpoint::open`].
    pub fn open(argument: &str) -> Result<Self> {
        if let Some(spec) = preset(argument) {
            if Path::new(argument).exists() {
                tracing::warn!(
                    "{argument} is taken for the preset of this name; write ./{argument} for what lies here"
                );
            }
            return Ok(Self::Config(Box::new(spec)));
        }
        let path = Path::new(argument);
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let presets = preset_names().collect::<Vec<_>>().join(", ");
                let rule = format!("there is no such path, and no preset of this name; the presets are {presets}");
                Err(Error::io(path, "open", std::io::Error::new(ErrorKind::NotFound, rule)))
            }
            Err(error) => Err(Error::io(path, "open", error)),
            Ok(metadata) if metadata.is_file() && path.extension().is_some_and(|e| e == "json") => {
                AttentionSpec::from_config_file(path).map(|spec| Self::Config(Box::new(spec)))
            }
            Ok(_) => Checkpoint::open(path).map(|checkpoint| Self::Checkpoint(Box::new(checkpoint))),
        }
    }
}
