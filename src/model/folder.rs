//! Why a path is not a checkpoint: what was found there, and what to do about it.

use super::header::{GGUF, PICKLED};
use super::shards::{INDEX, SINGLE};
use crate::error::Error;
use std::path::Path;

/// Why one file cannot be opened.
pub(super) fn not_a_checkpoint(file: &Path) -> Error {
    let what = match ending(file).as_str() {
        "gguf" => GGUF,
        "bin" | "pt" | "pth" => PICKLED,
        _ => "expected a checkpoint folder, a .safetensors file or a config.json",
    };
    Error::format(file, what)
}

/// Why weights without `config.json` cannot be opened.
pub(super) fn without_config(folder: &Path) -> Error {
    let names = names(folder);
    let of = |kind: &str| names.iter().find(|name| ending(Path::new(name)) == kind);
    if let Some(gguf) = of("gguf").filter(|_| of("safetensors").is_none()) {
        return Error::format(folder, format_args!("{gguf} {GGUF}"));
    }
    let pickled = of("bin").or(of("pt")).or(of("pth")).filter(|_| of("safetensors").is_none());
    if let Some(pickled) = pickled {
        return Error::format(folder, format_args!("{pickled} {PICKLED}"));
    }
    if let Some(hash) = snapshot(folder) {
        let place = folder.join("snapshots").join(hash);
        let rule = format_args!("this is the cache of a Hugging Face repository: pass {}", place.display());
        return Error::format(folder, rule);
    }
    let what = match of("safetensors") {
        Some(weights) => {
            format!(
                "found {weights}, but no config.json: copy config.json from the model's repository into this folder"
            )
        }
        None if names.is_empty() => "the folder is empty: expected config.json and safetensors files".to_owned(),
        None => format!(
            "not a checkpoint folder: expected config.json and safetensors files, found only {}",
            some_of(&names)
        ),
    };
    Error::format(folder, what)
}

/// Why a folder with `config.json`, but without its weights under the usual names, cannot be opened.
pub(super) fn without_weights(folder: &Path) -> Error {
    let names = names(folder);
    let all = |kinds: &[&str]| -> Vec<&String> {
        names.iter().filter(|name| kinds.contains(&ending(Path::new(name)).as_str())).collect()
    };
    let safetensors = all(&["safetensors"]);
    let sharded = safetensors.iter().find_map(|name| Some((name, shards(name)?)));
    let what = if let Some((shard, count)) = sharded {
        format!("found {shard}, but no {INDEX}: download the index and all {count} shards into this folder")
    } else if let Some(file) = safetensors.first() {
        format!("expected {SINGLE} or {INDEX}, found {file}: pass {} to read that file", folder.join(file).display())
    } else if let Some(pickled) = all(&["bin", "pt", "pth"]).first() {
        format!("{pickled} {PICKLED}")
    } else if let Some(gguf) = all(&["gguf"]).first() {
        format!("{gguf} {GGUF}")
    } else {
        let config = folder.join("config.json");
        format!("found no weights: download {SINGLE}, or pass {} to use only the config", config.display())
    };
    Error::format(folder, what)
}

/// The last revision in a folder of the Hugging Face cache.
fn snapshot(folder: &Path) -> Option<String> {
    names(&folder.join("snapshots")).pop()
}

/// Why one shard of several cannot be read alone.
pub(super) fn one_shard(file: &Path) -> Option<Error> {
    let name = file.file_name()?.to_string_lossy();
    let count = shards(&name).filter(|count| *count > 1)?;
    let number: usize = name.rsplit_once("-of-")?.0.rsplit_once('-')?.1.parse().ok()?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let rule = format_args!("this is shard {number} of {count}: pass the folder {}", folder.display());
    Some(Error::format(file, rule))
}

/// `n` of `model-00001-of-0000n.safetensors`.
fn shards(name: &str) -> Option<usize> {
    name.strip_suffix(".safetensors")?.rsplit_once("-of-")?.1.parse().ok()
}

fn ending(file: &Path) -> String {
    file.extension().unwrap_or_default().to_string_lossy().to_lowercase()
}

/// Names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    // An empty path is the working folder.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

fn some_of(names: &[String]) -> String {
    let mut out = names.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > 3 {
        out.push_str(", ...");
    }
    out
}
