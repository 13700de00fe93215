//! What a model argument means: a preset name, a config, a `.safetensors` file, a folder, or a model id in the Hugging Face cache.

use super::checkpoint::Checkpoint;
use super::hub;
use super::keys::nearest;
use super::preset::{preset, preset_names};
use super::spec::AttentionSpec;
use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A model, with or without weights.
pub enum ModelSource {
    /// Config facts alone.
    Config(Box<AttentionSpec>),
    /// Mapped weights.
    Checkpoint(Box<Checkpoint>),
}

impl ModelSource {
    /// Resolves the argument; a preset's name wins over a file of that name (write `./name` for the file). A model id of the
    /// Hugging Face hub is looked for in its cache ([`local_path`]).
    ///
    /// # Errors
    /// `is_argument` if it is empty, `is_io` if there is neither a preset nor a path of this name: the message names the
    /// nearest presets, or how to download a model id of the hub. Otherwise as [`AttentionSpec::from_config_file`] and
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
        let place = local_path(argument);
        let path = place.as_path();
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(Error::io(path, "open", std::io::Error::new(ErrorKind::NotFound, unknown(argument))))
            }
            Err(error) => Err(Error::io(path, "open", error)),
            Ok(metadata) if metadata.is_file() && path.extension().is_some_and(|e| e == "json") => {
                AttentionSpec::from_config_file(path).map(|spec| Self::Config(Box::new(spec)))
            }
            Ok(_) => {
                let mut checkpoint = Checkpoint::open(path)?;
                if path != Path::new(argument) {
                    // The folder's own name is a hash.
                    checkpoint.set_name(argument);
                }
                let (files, layers) = (checkpoint.files().len(), checkpoint.spec().layers.len());
                tracing::info!(files, layers, "opened {}", path.display());
                Ok(Self::Checkpoint(Box::new(checkpoint)))
            }
        }
    }
}

/// The path that a model argument stands for: the folder in the Hugging Face cache where it is the id of a model that was
/// downloaded (`owner/name`) and no path, and otherwise the argument itself. Nothing is downloaded.
pub fn local_path(argument: &str) -> PathBuf {
    let path = PathBuf::from(argument);
    if hub::name(argument).is_none() || path.exists() {
        return path;
    }
    hub::cache().and_then(|cache| hub::snapshot(&cache, argument)).unwrap_or(path)
}

/// What a name without a preset or path may have meant.
fn unknown(argument: &str) -> String {
    let known = preset_names().collect::<Vec<_>>().join(", ");
    if let Some(name) = hub::name(argument) {
        let same: Vec<&str> = preset_names().filter(|preset| is_of_config(preset, name)).collect();
        let presets =
            if same.is_empty() { String::new() } else { format!("; preset of its config: {}", same.join(", ")) };
        let place = hub::cache().map_or_else(|| "HF_HOME is not set".to_owned(), |cache| cache.display().to_string());
        return format!(
            "no such path. It looks like a model id of the Hugging Face hub and is not in its cache ({place}): download it with \
             `hf download {argument}`{presets}"
        );
    }
    let near = nearest(argument, preset_names());
    match near.is_empty() {
        true => format!("no such path or preset; the presets are {known}"),
        false => format!("no such path or preset; nearest: {}; the presets are {known}", near.join(", ")),
    }
}

/// Whether a preset describes models of this name: each word of it, its size among them, is one of the name.
fn is_of_config(preset: &str, name: &str) -> bool {
    let name = name.to_lowercase();
    let words: Vec<&str> = name.split(['-', '_']).collect();
    preset.split('-').all(|word| words.contains(&word))
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
    fn a_preset_of_another_size_is_not_of_the_config() {
        assert!(is_of_config("qwen2.5-7b", "Qwen2.5-7B-Instruct") && is_of_config("llama-3.1-8b", "Meta-Llama-3.1-8B"));
        assert!(!is_of_config("qwen2.5-7b", "Qwen2.5-0.5B") && !is_of_config("mistral-7b", "Mixtral-8x7B-v0.1"));
    }
}
