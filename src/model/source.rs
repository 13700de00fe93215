//! What a model argument means: a preset name, a config, a `.safetensors` file or a folder.

use super::checkpoint::Checkpoint;
use super::keys::nearest;
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
    /// `is_argument` if it is empty, `is_io` if there is neither a preset nor a path of this name: the message names the nearest presets, or how to
    /// download a model id of the Hugging Face hub. Otherwise as [`AttentionSpec::from_config_file`] and
    /// [`Checkpoint::open`].
    pub fn open(argument: &str) -> Result<Self> {
        if argument.trim().is_empty() {
            return Err(Error::argument("the model is empty: expected a preset's name or a path"));
        }
        if let Some(spec) = preset(argument) {
            if Path::new(argument).exists() {
                tracing::warn!("{argument}: using the preset of this name; write ./{argument} for the file or folder");
            }
            return Ok(Self::Config(Box::new(spec)));
        }
        let path = Path::new(argument);
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(Error::io(path, "open", std::io::Error::new(ErrorKind::NotFound, unknown(argument))))
            }
            Err(error) => Err(Error::io(path, "open", error)),
            Ok(metadata) if metadata.is_file() && path.extension().is_some_and(|e| e == "json") => {
                AttentionSpec::from_config_file(path).map(|spec| Self::Config(Box::new(spec)))
            }
            Ok(_) => Checkpoint::open(path).map(|checkpoint| Self::Checkpoint(Box::new(checkpoint))),
        }
    }
}

/// What a name without a preset or path may have meant.
fn unknown(argument: &str) -> String {
    let hub_id = hub_name(argument);
    let near = nearest(hub_id.unwrap_or(argument), preset_names());
    let known = preset_names().collect::<Vec<_>>().join(", ");
    match (hub_id, near.is_empty()) {
        (Some(name), empty) => {
            let presets = if empty { String::new() } else { format!("; presets of its config: {}", near.join(", ")) };
            format!(
                "no such path. It looks like a model id of the Hugging Face hub, which has to be downloaded first: \
                 `hf download {argument} --local-dir {name}`, then pass the folder {name}{presets}"
            )
        }
        (None, true) => format!("no such path or preset; the presets are {known}"),
        (None, false) => {
            format!("no such path or preset; nearest: {}; the presets are {known}", near.join(", "))
        }
    }
}

/// The model's part of `owner/name`, if the argument can be that.
fn hub_name(argument: &str) -> Option<&str> {
    let (owner, name) = argument.split_once('/')?;
    let plain = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let file = [".json", ".safetensors", ".gguf", ".bin"].iter().any(|ending| name.ends_with(ending));
    (plain(owner) && plain(name) && !file).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_presets_are_named_first() {
        let nearest = |name| nearest(name, preset_names());
        assert_eq!(nearest("mistral-8b")[0], "mistral-7b");
        assert_eq!(nearest("Llama-2-13b-hf")[0], "llama-2-13b");
        assert_eq!(nearest("something-else"), Vec::<&str>::new());
    }

    #[test]
    fn a_hub_id_is_an_owner_and_a_name() {
        assert_eq!(hub_name("mistralai/Mistral-7B-v0.1"), Some("Mistral-7B-v0.1"));
        for path in ["mistral-7b", "./models/x", "/models/x", "models/x/y", "models/config.json", "models/", "../x"] {
            assert_eq!(hub_name(path), None, "{path}");
        }
    }
}
