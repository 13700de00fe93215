//! The files of a checkpoint in a new folder: linked or copied, without the scales that they may bring.

use crate::error::{Error, Result};
use crate::model::{Checkpoint, INDEX, WeightFiles};
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Files longer than this are linked: weights, and what else nobody edits in place.
const LINK_FROM: u64 = 1 << 20;
/// The weights where no index tells of them.
const SINGLE: &str = "model.safetensors";

/// File of the certificate.
pub(super) const CERTIFICATE_FILE: &str = "sigmascale.json";

/// How the files came.
#[derive(Default)]
pub(super) struct Moved {
    pub linked: usize,
    pub copied: usize,
}

/// Puts every file of `from` into `to`, but hidden ones and those that `skip` names.
///
/// # Errors
/// `is_argument` if a link leads to a folder that holds it; `is_io`.
pub(super) fn bring(from: &Path, to: &Path, copy: bool, skip: &dyn Fn(&str) -> bool, moved: &mut Moved) -> Result<()> {
    bring_below(&mut vec![], from, to, copy, skip, moved)
}

/// `above` are the folders that are being brought.
fn bring_below(
    above: &mut Vec<PathBuf>,
    from: &Path,
    to: &Path,
    copy: bool,
    skip: &dyn Fn(&str) -> bool,
    moved: &mut Moved,
) -> Result<()> {
    let place = from.canonicalize().map_err(|e| Error::io(from, "open", e))?;
    if above.contains(&place) {
        let rule = "is a link to a folder that holds it: remove the link";
        return Err(Error::argument(format_args!("{} {rule}", from.display())));
    }
    above.push(place);
    let entries = std::fs::read_dir(from).map_err(|e| Error::io(from, "open", e))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    for name in names {
        let text = name.to_string_lossy();
        if text.starts_with('.') || skip(&text) {
            continue;
        }
        let (source, target) = (from.join(&name), to.join(&name));
        let metadata = std::fs::metadata(&source).map_err(|e| Error::io(&source, "open", e))?;
        if metadata.is_dir() {
            std::fs::create_dir(&target).map_err(|e| Error::io(&target, "create", e))?;
            // What is skipped is at the top level.
            bring_below(above, &source, &target, copy, &|_| false, moved)?;
        } else if metadata.is_file() {
            bring_file(&source, &target, copy || metadata.len() < LINK_FROM, moved)?;
        }
    }
    above.pop();
    Ok(())
}

/// A hard link to a file, or a copy where none can be made (another file system).
fn bring_file(source: &Path, target: &Path, copy: bool, moved: &mut Moved) -> Result<()> {
    // Caches hold links to what they share; a hard link has to go to the file itself.
    let file = source.canonicalize().map_err(|e| Error::io(source, "open", e))?;
    if !copy && std::fs::hard_link(&file, target).is_ok() {
        moved.linked += 1;
        return Ok(());
    }
    std::fs::copy(&file, target).map_err(|e| Error::io(target, "write", e))?;
    moved.copied += 1;
    Ok(())
}

/// Files of a checkpoint that hold attention scales, and the names of those tensors.
pub(super) fn files_with(files: &WeightFiles, is_scale: impl Fn(&str) -> bool) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut found = BTreeMap::<&str, BTreeSet<&str>>::new();
    for tensor in files.tensors().filter(|tensor| is_scale(tensor.name)) {
        found.entry(tensor.file).or_default().insert(tensor.name);
    }
    found
}

/// Writes a file anew without some of its tensors; nothing where no other is in it.
pub(super) fn write_without(files: &WeightFiles, file: &str, without: &BTreeSet<&str>, to: &Path) -> Result<()> {
    let kept: Vec<_> = files.tensors().filter(|t| t.file == file && !without.contains(t.name)).collect();
    if kept.is_empty() {
        return Ok(());
    }
    let target = to.join(file);
    let broken = |e: safetensors::SafeTensorError| Error::format(&target, e);
    let views = kept
        .iter()
        .map(|t| Ok((t.name, TensorView::new(t.dtype, t.shape.to_vec(), t.bytes).map_err(broken)?)))
        .collect::<Result<Vec<_>>>()?;
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    // It may be a link to the model's own file.
    if let Err(error) = std::fs::remove_file(&target)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(Error::io(&target, "write", error));
    }
    safetensors::serialize_to_file(views, Some(about), &target).map_err(broken)
}

/// The index of the new folder: that of the old one, or one that names every tensor, without the scales that went and with those
/// that came.
pub(super) fn index(
    found: Option<Map<String, Value>>,
    files: &WeightFiles,
    gone: &BTreeMap<&str, BTreeSet<&str>>,
    came: &[(String, usize)],
    scales_file: &str,
) -> Map<String, Value> {
    let has_index = found.is_some();
    // What else lies in a folder without an index is not of the model.
    let own = || files.tensors().filter(|t| has_index || t.file == SINGLE);
    let mut index = found.unwrap_or_default();
    let mut map: Map<String, Value> = match index.remove("weight_map") {
        Some(Value::Object(map)) => map,
        _ => own().map(|t| (t.name.to_owned(), json!(t.file))).collect(),
    };
    let gone: BTreeSet<&str> = gone.values().flatten().copied().collect();
    map.retain(|name, _| !gone.contains(name.as_str()));
    let lost: usize = own().filter(|t| gone.contains(t.name)).map(|t| t.bytes.len()).sum();
    let all: usize = own().map(|t| t.bytes.len()).sum();
    let added: usize = came.iter().map(|(_, bytes)| bytes).sum();
    map.extend(came.iter().map(|(name, _)| (name.clone(), json!(scales_file))));
    index.insert("weight_map".to_owned(), Value::Object(map));
    let metadata = index.entry("metadata").or_insert_with(|| json!({ "total_size": all }));
    if let Some(size) = metadata.get("total_size").and_then(Value::as_u64) {
        metadata["total_size"] = json!((size + added as u64).saturating_sub(lost as u64));
    }
    index
}

/// The folder of a checkpoint that was opened by path.
pub(super) fn folder_of(path: &Path) -> Result<PathBuf> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.file_name().is_some_and(|name| name == SINGLE) && folder.join(INDEX).symlink_metadata().is_err() {
        return Ok(folder.to_owned());
    }
    Err(Error::argument(format_args!("{}: pass the checkpoint's folder, which holds all its files", path.display())))
}

/// Refuses a folder whose weights engines would load otherwise than they were read here.
pub(super) fn check_read(checkpoint: &Checkpoint, folder: &Path, plain: bool, files: &WeightFiles) -> Result<()> {
    checkpoint.check_loaded(files)?;
    if plain && checkpoint.spec().fp8_inputs {
        return Err(Error::format(
            &folder.join("config.json"),
            "projections are stored in FP8 (E4M3), but there is no `quantization_config`, without which engines load them \
             without their scales: restore it",
        ));
    }
    Ok(())
}
