//! Safetensors files and their index: mapped, with every rule of the format checked before a tensor is handed out.

use super::header::{broken_tensor, data_end, other_content};
use super::keys::{LFS_POINTER, lfs_pointer, read_capped};
use crate::error::{Error, Result};
use memmap2::Mmap;
use safetensors::{SafeTensorError, SafeTensors};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::ops::Deref;
use std::path::{Component, Path, PathBuf};

/// Longest safetensors header, in bytes (the format's own limit).
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Longest index of a sharded checkpoint, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Name of the index of a sharded checkpoint.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Name of the weights in one file.
pub(super) const SINGLE: &str = "model.safetensors";

/// The content of a file.
pub(super) enum Content {
    Mapped(Mmap),
    Held(Vec<u8>),
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Held(bytes) => bytes,
        }
    }
}

/// One file.
pub(super) struct Shard {
    pub path: PathBuf,
    pub map: Content,
    /// Where the data starts.
    pub data: usize,
}

/// One tensor: its file, type and place in the file's data.
#[derive(Clone)]
pub(super) struct Entry {
    pub shard: usize,
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub start: usize,
    pub end: usize,
}

/// Files and the tensors in them.
pub(super) type Opened = (Vec<Shard>, HashMap<String, Entry>);

pub(super) fn open_held(bytes: Vec<u8>, path: PathBuf) -> Result<Opened> {
    let (data, entries) = parse_header(&bytes, &path, 0)?;
    Ok((vec![Shard { path, map: Content::Held(bytes), data }], entries))
}

pub(super) fn open_single(path: PathBuf) -> Result<Opened> {
    let (shard, entries) = open_shard(path, 0)?;
    Ok((vec![shard], entries))
}

/// The file of each tensor by the index of a folder, all of them there.
pub(super) fn read_index(folder: &Path) -> Result<BTreeMap<String, String>> {
    let index_path = folder.join(INDEX);
    let bytes = read_capped(&index_path, MAX_INDEX_BYTES, "an index")?;
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|e| Error::format(&index_path, format_args!("the index has no readable `weight_map`: {e}")))?;
    let named: BTreeSet<&String> = index.weight_map.values().collect();
    let missing = named.iter().filter(|file| is_inside(file) && !folder.join(file).exists());
    let missing: Vec<&str> = missing.map(|file| file.as_str()).collect();
    if !missing.is_empty() {
        let (count, all, list) = (missing.len(), named.len(), missing.join(", "));
        let rule = format_args!("{count} of the {all} shards that it names are missing: download {list}");
        return Err(Error::format(&index_path, rule));
    }
    Ok(index.weight_map)
}

pub(super) fn open_sharded(folder: &Path) -> Result<Opened> {
    let index_path = folder.join(INDEX);
    let weight_map = read_index(folder)?;
    let mut shards = Vec::new();
    let mut tensors = HashMap::new();
    let mut seen: HashMap<&str, (usize, HashMap<String, Entry>)> = HashMap::new();
    for (tensor, file) in &weight_map {
        if !seen.contains_key(file.as_str()) {
            if !is_inside(file) {
                let rule = format_args!("shard `{file}` of tensor `{tensor}` must lie in the folder");
                return Err(Error::format(&index_path, rule));
            }
            let number = shards.len();
            let (shard, entries) = open_shard(folder.join(file), number)?;
            shards.push(shard);
            seen.insert(file, (number, entries));
        }
        let (number, entries) = &seen[file.as_str()];
        let entry = entries.get(tensor).cloned().ok_or_else(|| {
            let path = &shards[*number].path;
            Error::format(path, format_args!("tensor `{tensor}` is missing, although the index lists it here"))
        })?;
        tensors.insert(tensor.clone(), entry);
    }
    Ok((shards, tensors))
}

/// Whether a name stays in its folder. Links may lead anywhere (caches are made of them), names may not.
pub(super) fn is_inside(file: &str) -> bool {
    !file.is_empty() && Path::new(file).components().all(|part| matches!(part, Component::Normal(_)))
}

pub(super) fn open_shard(path: PathBuf, number: usize) -> Result<(Shard, HashMap<String, Entry>)> {
    // Before it is opened: opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(&path).map_err(|e| Error::io(&path, "open", e))?;
    if !metadata.is_file() {
        return Err(Error::format(&path, "a safetensors file must be a regular file"));
    }
    let file = File::open(&path).map_err(|e| Error::io(&path, "open", e))?;
    // An empty file cannot be mapped.
    if metadata.len() < 8 {
        return Err(Error::format(&path, format_args!("{} bytes are too few for a header", metadata.len())));
    }
    if pointer_of_lfs(&file) {
        return Err(lfs_pointer(&path));
    }
    // SAFETY:
    // 1. The map is read-only and lives as long as every view borrowed from it.
    // 2. The bytes are only ever read as plain numbers, for which every bit pattern is valid.
    // 3. Nothing in this crate writes to the file. Another process that shortens it while it is mapped ends this one
    //    with a bus error; the module's documentation forbids that.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(&path, "map", e))?;
    let (data, entries) = parse_header(&map, &path, number)?;
    Ok((Shard { path, map: Content::Mapped(map), data }, entries))
}

fn pointer_of_lfs(file: &File) -> bool {
    let mut start = Vec::new();
    file.take(LFS_POINTER.len() as u64).read_to_end(&mut start).is_ok_and(|_| start == LFS_POINTER)
}

/// Offset of the data and the tensors of a whole safetensors file.
fn parse_header(bytes: &[u8], path: &Path, shard: usize) -> Result<(usize, HashMap<String, Entry>)> {
    let Some(Ok(length)) = bytes.get(..8).map(|b| <[u8; 8]>::try_from(b).map(u64::from_le_bytes)) else {
        return Err(Error::format(path, format_args!("{} bytes are too few for a header", bytes.len())));
    };
    let available = bytes.len() as u64 - 8;
    if length > MAX_HEADER_BYTES.min(available)
        && let Some(content) = other_content(bytes)
    {
        return Err(Error::format(path, content));
    }
    if length > MAX_HEADER_BYTES {
        let rule = format_args!("a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}");
        return Err(Error::format(path, rule));
    }
    if length > available {
        let rule = format_args!(
            "a header of {length} bytes does not fit a file of {} bytes: it is truncated, download it again",
            bytes.len()
        );
        return Err(Error::format(path, rule));
    }
    let header = &bytes[8..][..length as usize];
    let (length, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|e| Error::format(path, rule_of(&e, header, bytes)))?;
    let entry = |info: &safetensors::tensor::TensorInfo| Entry {
        shard,
        dtype: info.dtype,
        shape: info.shape.clone(),
        start: info.data_offsets.0,
        end: info.data_offsets.1,
    };
    let entries = metadata.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect();
    Ok((8 + length, entries))
}

fn rule_of(error: &SafeTensorError, header: &[u8], file: &[u8]) -> String {
    if let Some(rule) = broken_tensor(header) {
        return rule;
    }
    match error {
        SafeTensorError::InvalidOffset(name) => {
            format!("tensor `{name}` does not start where the one before it ends (overlap, gap or reversed offsets)")
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            let (found, end) = (file.len() as u64, data_end(header).unwrap_or(0));
            let needed = end.saturating_add(8 + header.len() as u64);
            match found < needed {
                true => format!("it has {found} of {needed} bytes: it is truncated, download it again"),
                false => format!(
                    "it has {found} bytes and its tensors end after {needed}: it has trailing bytes, download it again"
                ),
            }
        }
        SafeTensorError::MisalignedSlice => "a tensor does not fill whole bytes".to_owned(),
        other => other.to_string(),
    }
}

/// Parses the header of a safetensors file held in memory and touches every tensor it names.
///
/// For fuzzing: gives the number of tensors, and reads nothing outside `bytes`.
#[doc(hidden)]
pub fn fuzz_safetensors(bytes: &[u8]) -> Result<usize> {
    let path = Path::new("fuzz.safetensors");
    let (data, entries) = parse_header(bytes, path, 0)?;
    for entry in entries.values() {
        let inside = bytes.get(data + entry.start..data + entry.end).is_some();
        assert!(inside, "a header that was accepted points outside the file");
    }
    Ok(entries.len())
}
