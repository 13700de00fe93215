//! The safetensors files of a folder as serving engines read them: every tensor of every file that the index names, or of every
//! file in the folder where there is no index.
//!
//! [`Checkpoint`](super::Checkpoint) reads tensors by name instead, and only those that the index names.

use super::shards::{Entry, INDEX, Shard, is_inside, open_shard, read_index};
use crate::error::{Error, Result};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The files that engines read.
pub struct WeightFiles {
    files: Vec<Named>,
    index: Option<BTreeMap<String, String>>,
    /// Safetensors files of the folder that the index does not name.
    pub unlisted: Vec<String>,
}

/// A tensor as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor<'a> {
    /// File, relative to the folder.
    pub file: &'a str,
    /// Name.
    pub name: &'a str,
    /// Type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [usize],
    /// Little-endian values.
    pub bytes: &'a [u8],
}

impl WeightFiles {
    /// Opens the files of a folder.
    ///
    /// # Errors
    /// `is_io` if a file cannot be opened; `is_format` if a file breaks a rule of its format or the index names a file that is not
    /// there.
    pub fn open(folder: &Path) -> Result<Self> {
        let present = safetensors_in(folder)?;
        let index = folder.join(INDEX).symlink_metadata().is_ok().then(|| read_index(folder)).transpose()?;
        let names: BTreeSet<String> = match &index {
            Some(map) => map.values().cloned().collect(),
            None => present.clone(),
        };
        if let Some(outside) = names.iter().find(|name| !is_inside(name)) {
            return Err(Error::format(&folder.join(INDEX), format_args!("shard `{outside}` must lie in the folder")));
        }
        let unlisted = present.difference(&names).cloned().collect();
        Ok(Self { files: open_all(folder, names)?, index, unlisted })
    }

    /// The files that no index names, as they are.
    ///
    /// # Errors
    /// As [`WeightFiles::open`].
    pub fn open_unlisted(&self, folder: &Path) -> Result<Self> {
        Ok(Self { files: open_all(folder, self.unlisted.iter().cloned())?, index: None, unlisted: vec![] })
    }

    /// Whether there is an index.
    pub fn has_index(&self) -> bool {
        self.index.is_some()
    }

    /// The files, by name.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(name, ..)| name.as_str())
    }

    /// Every tensor of every file.
    pub fn tensors(&self) -> impl Iterator<Item = RawTensor<'_>> {
        self.files.iter().flat_map(|(file, shard, entries)| {
            entries.iter().map(|(name, entry)| {
                // The header was checked against the file when it was opened.
                let bytes = shard.map.get(shard.data + entry.start..shard.data + entry.end).unwrap_or_default();
                RawTensor { file, name, dtype: entry.dtype, shape: &entry.shape, bytes }
            })
        })
    }
}

/// A file's name, the file, and where its tensors are.
type Named = (String, Shard, BTreeMap<String, Entry>);

fn open_all(folder: &Path, names: impl IntoIterator<Item = String>) -> Result<Vec<Named>> {
    let open = |name: String| {
        let (shard, entries) = open_shard(folder.join(&name), 0)?;
        Ok((name, shard, entries.into_iter().collect()))
    };
    names.into_iter().map(open).collect()
}

fn safetensors_in(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "open", e))?;
    let mut names = BTreeSet::new();
    for name in entries.flatten().map(|entry| entry.file_name()) {
        let text = name.to_string_lossy();
        if !text.ends_with(".safetensors") || text.starts_with('.') {
            continue;
        }
        if name.to_str().is_none() {
            return Err(Error::format(&folder.join(&name), "the name of this file is not UTF-8: rename it"));
        }
        names.insert(text.into_owned());
    }
    Ok(names)
}
