//! Typed access to the keys of a config: each wrong type or value is an error that names the file and the key.

use super::families::{Count, Flag, Refusal, Setting};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most layers.
pub(super) const MAX_LAYERS: usize = 10_000;
/// Largest model dimension.
pub(super) const MAX_D_MODEL: usize = 1 << 20;
/// Most heads.
pub(super) const MAX_HEADS: usize = 1 << 14;
/// Longest sequence.
pub(super) const MAX_POSITIONS: usize = 1 << 30;

/// How the text starts that stands for a file in a repository that was cloned without Git LFS.
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs";

pub(super) fn lfs_pointer(file: &Path) -> Error {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let rule =
        format_args!("this is a Git LFS pointer, not the file itself: run `git lfs pull` in {}", folder.display());
    Error::format(file, rule)
}

/// Reads a file of at most `cap` bytes; a longer one is refused before it is read, and so is what is no regular file: a pipe would be
/// waited for, and a device read without end.
///
/// # Errors
/// `is_io` if it cannot be read; `is_format` if it is too long, no regular file or a Git LFS pointer. `what` names it: "a config".
pub fn read_capped(path: &Path, cap: u64, what: &str) -> Result<Vec<u8>> {
    // Before it is opened: opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
    if !metadata.is_file() {
        return Err(Error::format(path, format_args!("{what} must be a regular file")));
    }
    if metadata.len() > cap {
        return Err(too_large(path, metadata.len(), cap, what));
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let mut bytes = Vec::new();
    // One byte over the cap, so that a file that grows meanwhile is still caught.
    file.take(cap + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
    if bytes.len() as u64 > cap {
        return Err(too_large(path, bytes.len() as u64, cap, what));
    }
    if bytes.starts_with(LFS_POINTER) {
        return Err(lfs_pointer(path));
    }
    Ok(bytes)
}

pub(super) fn too_large(file: &Path, bytes: u64, cap: u64, what: &str) -> Error {
    Error::format(file, format_args!("{what} may have at most {cap} bytes, got {bytes}"))
}

pub(super) fn refuse(file: &Path, what: impl std::fmt::Display) -> Error {
    Error::unsupported(format_args!("{}: {what}", file.display()))
}

/// Text from a stranger, short enough for a message.
pub(super) fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// How alike a name and a known one have to be for that to be named.
const ALIKE: f64 = 0.8;

/// At most three of the known names, the most alike first.
pub(super) fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Vec<&'static str> {
    let name = name.to_lowercase();
    let mut alike: Vec<_> = known.map(|known| (strsim::jaro_winkler(&name, known), known)).collect();
    alike.retain(|(score, _)| *score > ALIKE);
    alike.sort_by(|a, b| b.0.total_cmp(&a.0));
    alike.into_iter().take(3).map(|(_, known)| known).collect()
}

/// A number in a message: with an exponent where it has many digits.
pub(super) fn plain(x: f64) -> String {
    let text = x.to_string();
    if text.len() > 16 { format!("{x:e}") } else { text }
}

/// An object of the config and the file it stands in.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub map: &'a Map<String, Value>,
    pub file: &'a Path,
}

impl<'a> Keys<'a> {
    /// The value of a key; null is absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn wrong(&self, key: &str, want: &str, found: &Value) -> Error {
        let found = shorten(&found.to_string());
        Error::format(self.file, format_args!("`{key}`: expected {want}, got {found}"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| self.wrong(key, "a string", v))).transpose()
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.get(key).map(|v| v.as_object().ok_or_else(|| self.wrong(key, "an object", v))).transpose()
    }

    pub fn array(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.get(key).map(|v| v.as_array().ok_or_else(|| self.wrong(key, "a list", v))).transpose()
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.wrong(key, "true or false", v))).transpose()
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let read =
            |v: &'a Value| v.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.wrong(key, "a finite number", v));
        self.get(key).map(read).transpose()
    }

    /// A finite number above zero.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(x) if x <= 0.0 => {
                Err(Error::format(self.file, format_args!("`{key}` must be greater than 0, got {}", plain(x))))
            }
            other => Ok(other),
        }
    }

    /// A count from 1 to `max`.
    pub fn count(&self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(key, &format!("an integer from 1 to {max}"), value)),
        }
    }

    /// A count of each of `layers` layers: a list, or one number for all.
    pub fn counts(&self, key: &str, layers: usize, max: usize) -> Result<Option<Vec<usize>>> {
        let Some(list) = self.get(key).and_then(Value::as_array) else {
            return Ok(self.count(key, max)?.map(|count| vec![count; layers]));
        };
        if list.len() != layers {
            let rule = format_args!("`{key}` has {} entries for {layers} layers", list.len());
            return Err(Error::format(self.file, rule));
        }
        let one = |value: &Value| match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=max).contains(&n) => Ok(n),
            _ => Err(self.wrong(key, &format!("a list of integers from 1 to {max}"), value)),
        };
        list.iter().map(one).collect::<Result<_>>().map(Some)
    }

    pub fn first_count(&self, count: &Count, max: usize) -> Result<Option<usize>> {
        for key in count.keys {
            if let Some(n) = self.count(key, max)? {
                return Ok(Some(n));
            }
        }
        Ok(None)
    }

    pub fn size(&self, count: &Count, max: usize) -> Result<usize> {
        self.first_count(count, max)?
            .or(count.default)
            .ok_or_else(|| Error::format(self.file, format_args!("`{}` is missing", count.keys[0])))
    }

    pub fn set(&self, flag: &Flag) -> Result<bool> {
        match flag {
            Flag::Always => Ok(true),
            Flag::Never => Ok(false),
            Flag::Key(key, default) => Ok(self.flag(key)?.unwrap_or(*default)),
        }
    }

    pub fn check(&self, refusal: &Refusal) -> Result<()> {
        let Some(value) = self.get(refusal.key) else { return Ok(()) };
        let allowed = match refusal.unless {
            Setting::False => value.as_bool() == Some(false),
            Setting::True => value.as_bool() == Some(true),
            Setting::Text(text) => value.as_str() == Some(text),
        };
        if allowed {
            return Ok(());
        }
        let value = shorten(&value.to_string());
        Err(refuse(self.file, format_args!("`{}` = {value} is refused: {}", refusal.key, refusal.why)))
    }
}
