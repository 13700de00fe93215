//! Where results may be written: not over what is read, nor into a model.

use sigmascale::{Error, Result};
use sigmascale_lab::file::behind_links;
use std::path::{Path, PathBuf};

/// Refuses a target that is one of the files which are read for what goes there, whatever the paths to it look like.
///
/// # Errors
/// `is_argument`, with `what` and the path.
pub fn check_not_read(what: &str, target: &Path, read: impl IntoIterator<Item = PathBuf>) -> Result<()> {
    let place = place_of(target);
    if read.into_iter().any(|file| place_of(&file) == place) {
        return Err(Error::argument(format_args!(
            "{what} names {}, which is read here: it would be replaced",
            target.display()
        )));
    }
    Ok(())
}

/// Refuses a target that a later read of its folder would take for part of the model there: a config, weights, their index.
///
/// # Errors
/// `is_argument`, with `what` and the path.
pub fn check_not_of_model(what: &str, target: &Path) -> Result<()> {
    let place = behind_links(target)?;
    let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let lower = |name: &std::ffi::OsStr| name.to_string_lossy().to_lowercase();
    let names: Vec<String> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| lower(&entry.file_name())).collect();
    let is_index = |name: &str| name.ends_with(".safetensors.index.json");
    let of_model = |name: &str| name == "config.json" || name.ends_with(".safetensors") || is_index(name);
    let name = place.file_name().map(lower).unwrap_or_default();
    let taken = match name.rsplit_once('.') {
        // An index says which files are weights. Without one, engines load every such file.
        Some((stem, "safetensors")) => {
            stem.starts_with("model") || stem.starts_with("consolidated") || !names.iter().any(|name| is_index(name))
        }
        Some((_, "json")) => {
            let others = ["tokenizer.json", "vocab.json", "params.json", "sigmascale.json"];
            is_index(&name) || name.ends_with("config.json") || others.contains(&name.as_str())
        }
        Some((_, ending)) => ["bin", "pt", "pth", "gguf"].contains(&ending),
        None => false,
    };
    if taken && names.iter().any(|name| of_model(name)) {
        return Err(Error::argument(format_args!(
            "{what} names {}, which would be read as part of the model in that folder: choose another name or folder",
            target.display()
        )));
    }
    Ok(())
}

/// Where a file is or will be.
pub fn place_of(file: &Path) -> PathBuf {
    if let Ok(place) = file.canonicalize() {
        return place;
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    file.file_name().map_or_else(|| folder.clone(), |name| folder.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        std::fs::write(&model, b"weights").unwrap();
        let other = folder.path().join(".").join("model");
        assert!(check_not_read("-o", &other, [model.clone()]).unwrap_err().is_argument());
        check_not_read("-o", &folder.path().join("new"), [model]).unwrap();
    }

    #[test]
    fn no_output_becomes_part_of_a_model() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let refused = |name: &str| check_not_of_model("-o", &at(name)).is_err_and(|error| error.is_argument());
        let weights = ["model.safetensors", "Model-00001-of-00002.safetensors", "consolidated.00.safetensors"];
        let others = [
            "config.json",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "adapter_config.json",
            "tokenizer.json",
        ];
        let harmless = ["scales.json", "page.html", "out", "README.md"];
        // Nothing is a model's where no model is.
        assert!(weights.iter().chain(&others).chain(&harmless).all(|name| !refused(name)));
        std::fs::write(at("config.json"), b"{}").unwrap();
        assert!(weights.iter().chain(&others).all(|name| refused(name)));
        assert!(harmless.iter().all(|name| !refused(name)));
        // Engines load every such file, unless an index says which.
        assert!(refused("scales.safetensors"));
        std::fs::write(at("model.safetensors.index.json"), b"{}").unwrap();
        assert!(!refused("scales.safetensors") && refused("model.safetensors"));
        #[cfg(unix)]
        {
            let other = tempfile::tempdir().unwrap();
            let link = other.path().join("link");
            std::os::unix::fs::symlink(at("model.safetensors"), &link).unwrap();
            assert!(check_not_of_model("-o", &link).is_err(), "through a link too");
        }
    }
}
