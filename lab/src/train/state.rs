//! The saved state of a run: all that a resume needs, in one safetensors file.
//!
//! | entry | is |
//! |---|---|
//! | `NAME` | a parameter, under its Hugging Face name |
//! | `NAME:first`, `NAME:second` | its moments |
//! | `good:NAME`, .. | the same of the last good checkpoint, if there is one |
//! | metadata `sigmascale-training` | version, hash of the tensors, counters and scaling states, as JSON |

use super::model::{ModelKind, Parameter, Parameters};
use super::optimizer::{LossScale, Moments};
use crate::file::write_atomically;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use sigmascale::model::read_capped;
use sigmascale::policy::differs;
use sigmascale::runtime::RuntimeState;
use sigmascale::{Error, Result};
use std::collections::HashMap;
use std::path::Path;

/// Version of the file.
const VERSION: u32 = 1;
/// Key of the metadata.
const KEY: &str = "sigmascale-training";
/// Prefix of the last good checkpoint's tensors.
const GOOD: &str = "good:";
/// Largest file that is read, in bytes: far above what the models need.
const MAX_FILE: u64 = 1 << 28;

/// What a resume needs the same of, or the text is another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub model: ModelKind,
    pub seed: u64,
    pub batch: usize,
    pub seq_len: usize,
}

/// Where a run stands, beside its parameters and scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Counters {
    /// Steps done.
    pub step: u64,
    /// Updates that the optimizer has done.
    pub updates: u32,
    /// Bad steps in a row.
    pub bad: u32,
    /// Steps left at half the rate.
    pub cautious: u32,
    pub loss_scale: LossScale,
}

/// A run at one moment.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub parameters: Parameters,
    /// `None` for the control.
    pub scales: Option<RuntimeState>,
    pub counters: Counters,
}

/// Everything that [`Trainer::resume`](super::Trainer::resume) needs.
#[derive(Clone, Debug)]
pub struct TrainState {
    pub(super) run: Identity,
    pub(super) now: Snapshot,
    /// Where the run would go back to.
    pub(super) good: Option<Snapshot>,
}

/// The metadata: a snapshot without its tensors.
#[derive(Serialize, Deserialize)]
struct Rest {
    scales: Option<RuntimeState>,
    counters: Counters,
}

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    hash: String,
    run: Identity,
    now: Rest,
    good: Option<Rest>,
}

impl TrainState {
    /// Writes the state; the file appears whole or not at all.
    ///
    /// # Errors
    /// `is_io` if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_atomically(path, &self.encode(path)?)
    }

    /// Reads a state that [`TrainState::write`] wrote.
    ///
    /// # Errors
    /// `is_io` if the file cannot be read; `is_format` if it is no regular file, foreign, truncated or damaged; `is_mismatch` if it is of
    /// another version. [`Trainer::resume`](super::Trainer::resume) checks that it belongs to the run.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_FILE, "a training state")?;
        Self::decode(path, &bytes)
    }

    fn snapshots(&self) -> impl Iterator<Item = (&'static str, &Snapshot)> {
        [("", &self.now)].into_iter().chain(self.good.as_ref().map(|good| (GOOD, good)))
    }

    /// The file's bytes; `path` is for messages.
    pub(super) fn encode(&self, path: &Path) -> Result<Vec<u8>> {
        let broken = |error: &dyn std::fmt::Display| Error::format(path, format_args!("cannot be written: {error}"));
        let mut views = Vec::new();
        for (prefix, snapshot) in self.snapshots() {
            for parameter in &snapshot.parameters.all {
                for (suffix, values) in parts(parameter) {
                    let bytes = bytemuck::cast_slice(values);
                    let view = TensorView::new(Dtype::F32, parameter.shape.clone(), bytes).map_err(|e| broken(&e))?;
                    views.push((format!("{prefix}{}{suffix}", parameter.name), view));
                }
            }
        }
        let rest = |snapshot: &Snapshot| Rest { scales: snapshot.scales.clone(), counters: snapshot.counters };
        let header = Header {
            version: VERSION,
            hash: hash(self.snapshots().map(|(_, snapshot)| &snapshot.parameters)),
            run: self.run,
            now: rest(&self.now),
            good: self.good.as_ref().map(rest),
        };
        let header = serde_json::to_string(&header).map_err(|e| broken(&e))?;
        safetensors::serialize(views, Some(HashMap::from([(KEY.to_owned(), header)]))).map_err(|e| broken(&e))
    }

    /// The state in a file's bytes; `path` is for messages.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let refuse = |rule: &dyn std::fmt::Display| Error::format(path, rule);
        let (_, metadata) = SafeTensors::read_metadata(bytes)
            .map_err(|error| refuse(&format_args!("no training state, or a damaged one: {error}")))?;
        let header = metadata.metadata().as_ref().and_then(|all| all.get(KEY));
        let header = header.ok_or_else(|| refuse(&format_args!("no training state: it has no `{KEY}`")))?;
        // First of all, since another version may have other fields.
        let version: Option<u64> = serde_json::from_str::<serde_json::Value>(header)
            .ok()
            .and_then(|value| value.get("version").and_then(serde_json::Value::as_u64));
        match version {
            None => return Err(refuse(&"the state has no version")),
            Some(version) if version != u64::from(VERSION) => {
                return Err(Error::mismatch(format_args!(
                    "{}: the state has version {version}, this build reads {VERSION}",
                    path.display()
                )));
            }
            Some(_) => {}
        }
        let header: Header =
            serde_json::from_str(header).map_err(|error| refuse(&format_args!("the state cannot be read: {error}")))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| refuse(&error))?;
        let snapshot = |prefix: &str, rest: Rest| -> Result<Snapshot> {
            let values = |name: String, shape: &[usize]| -> Result<Vec<f32>> {
                let tensor = tensors.tensor(&name).map_err(|_| refuse(&format_args!("`{name}` is missing")))?;
                if tensor.dtype() != Dtype::F32 || tensor.shape() != shape {
                    return Err(refuse(&format_args!("`{name}` is not {shape:?} in F32")));
                }
                Ok(tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            };
            let kind = header.run.model;
            let mut all = Vec::new();
            for (name, shape, _) in kind.layout() {
                let part = |suffix: &str| values(format!("{prefix}{name}{suffix}"), &shape);
                let (value, moments) = (part("")?, Moments { first: part(":first")?, second: part(":second")? });
                all.push(Parameter { name, shape, value, moments });
            }
            rest.counters.loss_scale.check().map_err(|error| error.within(path.display()))?;
            Ok(Snapshot { parameters: Parameters { kind, all }, scales: rest.scales, counters: rest.counters })
        };
        let state = Self {
            run: header.run,
            now: snapshot("", header.now)?,
            good: header.good.map(|rest| snapshot(GOOD, rest)).transpose()?,
        };
        if hash(state.snapshots().map(|(_, snapshot)| &snapshot.parameters)) != header.hash {
            return Err(refuse(&"the state is damaged: its tensors do not have the hash of its header"));
        }
        Ok(state)
    }

    /// Refuses a state of another run.
    pub(super) fn check(&self, run: Identity, policy: Option<&str>) -> Result<()> {
        differs("run", &self.run, &run)?;
        match (&self.now.scales, policy) {
            (None, Some(policy)) => Err(Error::mismatch(format_args!(
                "the state was saved by the control, which has no scales, not by policy {policy}"
            ))),
            (Some(scales), None) => Err(Error::mismatch(format_args!(
                "the state was saved by policy {}, not by the control",
                scales.policy.config.kind()
            ))),
            _ => Ok(()),
        }
    }
}

/// What is saved of a parameter, with the suffixes of its tensors.
fn parts(parameter: &Parameter) -> [(&'static str, &[f32]); 3] {
    let Moments { first, second } = &parameter.moments;
    [("", &parameter.value), (":first", first), (":second", second)]
}

/// 64-bit FNV-1a over the bits of all values: finds damage, not malice.
fn hash<'a>(all: impl Iterator<Item = &'a Parameters>) -> String {
    let values = all.flat_map(|parameters| &parameters.all).flat_map(parts).flat_map(|(_, values)| values);
    let hash =
        values.fold(0xcbf2_9ce4_8422_2325u64, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}
