//! A runtime between two steps, and the file that holds it.

use super::means::RunningMeans;
use crate::bound::{LayerBounds, Tail};
use crate::error::{Error, Result};
use crate::file::fnv1a;
use crate::model::{AttentionSpec, read_capped};
use crate::plan::{CenterPolicy, ScalePlan};
use crate::policy::PolicyState;
use crate::spectral::{Estimator, Iterations, PowerEstimate, PowerState};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Version of the state and its file; any other is refused.
pub const STATE_VERSION: u32 = 1;

/// First word of a state file.
const MAGIC: &str = "sigmascale-state";

/// Longest header line.
const MAX_HEADER: usize = 96;

/// Largest state file that is read.
const MAX_FILE: u64 = 1 << 30;

/// A runtime between two steps. Plain values: serialize them as you like, or use [`RuntimeState::write`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuntimeState {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// The model; its name may differ at a resume, nothing else.
    pub model: AttentionSpec,
    /// Union bound.
    pub tail: Tail,
    /// Where the norms come from.
    pub estimator: Estimator,
    /// Iterations of a step.
    pub iterations: Iterations,
    /// Centers of keys and values.
    #[serde(default = "no_centers")]
    pub centers: CenterPolicy,
    /// Singular vectors, where norms are estimated.
    pub power: Option<PowerState>,
    /// What the policy knows.
    pub policy: PolicyState,
    /// `model.layers` entries.
    pub layers: Vec<LayerState>,
}

/// One layer of a state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerState {
    /// Steps observed.
    pub steps: u64,
    /// The last plan, so that logs continue where they stopped.
    pub last: Option<ScalePlan>,
    /// The bounds in use, where they are estimates.
    pub bounds: Option<LayerBounds>,
    /// The caller's version of the weights that they were computed from.
    pub weights_version: Option<u64>,
    /// What keys and values have been on average.
    #[serde(default)]
    pub means: RunningMeans,
    /// How far the power iteration of each query head has come.
    pub estimates: Vec<PowerEstimate>,
}

fn no_centers() -> CenterPolicy {
    CenterPolicy::NONE
}

pub(super) fn check_version(version: u32) -> Result<()> {
    if version == STATE_VERSION {
        return Ok(());
    }
    Err(Error::mismatch(format_args!("the state has version {version}, but this build reads version {STATE_VERSION}")))
}

impl RuntimeState {
    /// Writes the state so that a reader finds the old file or the new one, whenever the process ends: a temporary file
    /// in the same folder is written, synchronized and renamed. One that a killed process left (`.NAME.PID.tmp`) is
    /// never read.
    ///
    /// The file is one header line (`sigmascale-state VERSION BYTES HASH`) and JSON; length and 64-bit FNV-1a hash are
    /// those of the JSON.
    ///
    /// # Errors
    /// `is_io` if the folder or file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let bytes = self.encode().map_err(|error| Error::io(path, "encode the state", error))?;
        replace(path, |file| file.write_all(&bytes)).map_err(|error| Error::io(path, "write the state", error))
    }

    /// Reads a state that [`RuntimeState::write`] wrote.
    ///
    /// # Errors
    /// `is_io` if the file cannot be read; `is_format` if it is foreign, truncated or damaged; `is_mismatch` if it is of
    /// another version. [`Runtime::resume`](super::Runtime::resume) checks that it belongs to the model and policy.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_FILE, "a state")?;
        Self::decode(path, &bytes)
    }

    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let json = serde_json::to_vec(self)?;
        let header = format!("{MAGIC} {} {} {:016x}\n", self.version, json.len(), fnv1a(&json));
        Ok([header.into_bytes(), json].concat())
    }

    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let refuse = |rule: String| Error::format(path, rule);
        let magic = MAGIC.as_bytes();
        if !bytes.starts_with(magic) {
            let cut = magic.starts_with(bytes);
            return Err(refuse(if cut {
                "the state is truncated".into()
            } else {
                "this is not a runtime state".into()
            }));
        }
        let end = bytes.iter().take(MAX_HEADER).position(|b| *b == b'\n');
        let Some(end) = end else { return Err(refuse("the state is truncated or its header damaged".into())) };
        let header = std::str::from_utf8(&bytes[..end]).unwrap_or_default();
        let words: Vec<_> = header.split(' ').collect();
        let [_, version, length, hash] = words[..] else { return Err(refuse("the state's header is damaged".into())) };
        let version: u32 = version.parse().map_err(|_| refuse("the state's version is no number".into()))?;
        check_version(version).map_err(|error| error.within(path.display()))?;
        let length: usize = length.parse().map_err(|_| refuse("the state's length is no number".into()))?;
        let json = &bytes[end + 1..];
        if json.len() < length {
            return Err(refuse(format!("the state is truncated: {} of {length} bytes are there", json.len())));
        }
        if json.len() > length {
            return Err(refuse(format!("{} bytes follow the state", json.len() - length)));
        }
        if hash != format!("{:016x}", fnv1a(json)) {
            return Err(refuse("the state is damaged: its hash is not the header's".into()));
        }
        let state: Self =
            serde_json::from_slice(json).map_err(|error| refuse(format!("the state cannot be read: {error}")))?;
        if state.version != version {
            return Err(refuse(format!(
                "the state is damaged: its header has version {version}, it has {}",
                state.version
            )));
        }
        Ok(state)
    }
}

/// Puts a new file in the place of an old one, all or nothing.
pub(super) fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::other("the path names no file"))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let temporary = folder.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
    let filled = File::create(&temporary).and_then(|mut file| {
        write(&mut file)?;
        file.sync_all()
    });
    match filled.and_then(|()| fs::rename(&temporary, path)) {
        Ok(()) => sync_folder(folder),
        Err(error) => {
            // The first error is the one to report.
            let _ = fs::remove_file(&temporary);
            Err(error)
        }
    }
}

/// Makes the rename last through a power cut.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}
