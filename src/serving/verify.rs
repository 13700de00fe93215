//! Which scales each engine would use, beside those that the weights need.

use super::engine::{Engine, Method, Operand, Reads};
use super::export::{CERTIFICATE_FILE, check_read};
use super::folder::folder_of;
use super::names::ScaleNames;
use super::scales::LayerScales;
use super::settings::{HF_QUANT, Settings};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, Checkpoint, RawTensor, WeightFiles};
use crate::named;
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Scales up to this many times what the weights need may come from them (powers of two, margins); larger ones do not.
const FOREIGN_FROM: f32 = 2.0;
/// How far below what is needed a rounding to BF16 can put a scale.
const ROUNDING: f32 = 1.0 / 128.0;

named! {
    /// What is said of a scale.
    pub enum ScaleVerdict is "verdict" {
        /// No value can overflow under it.
        Safe = "safe",
        /// A normalized input can overflow it.
        Overflow = "overflow",
        /// Other layers have one, this has none: the engine uses 1.0. Or none has one, and 1.0 does not cover the bound.
        Missing = "missing",
        /// Stored as 1.0, the loaders' default, where the weights need another.
        Default = "default",
        /// Below what is needed by a rounding: of the file, or of the engine's loader.
        RoundedBelow = "rounded-below",
        /// More than twice what these weights can need: it is of other weights.
        Foreign = "foreign",
        /// NaN, infinite, 0 or negative: no scale. Engines cast with it, use 1.0 in its place, or do not start.
        Invalid = "invalid",
        /// Stored, and never loaded by this engine: the index, the name, the shape or the config is not what it reads.
        NotLoaded = "not-loaded",
        /// The operand has no bound, so no scale can be guaranteed.
        Unbounded = "unbounded",
    }
}

/// One scale that the engine would use.
#[derive(Clone, Debug, Serialize)]
pub struct AuditEntry {
    /// What the engine casts with; NaN, null in JSON, where that is stored.
    pub scale: f32,
    /// The worst-case bound over 448; null without one.
    pub needed: Option<f32>,
    /// What is said of it.
    pub verdict: ScaleVerdict,
    /// What is stored, before the engine's rounding and reductions; null where it casts at 1.0.
    pub stored: Option<f32>,
    /// The reason, for people.
    pub why: String,
}

/// The scales of one layer: an entry a tensor, or one a KV head.
#[derive(Clone, Debug, Serialize)]
pub struct LayerAudit {
    /// The model's own number.
    pub layer: usize,
    /// Queries.
    pub q: Vec<AuditEntry>,
    /// Keys.
    pub k: Vec<AuditEntry>,
    /// Values.
    pub v: Vec<AuditEntry>,
}

impl LayerAudit {
    /// All entries, with their operand.
    pub fn entries(&self) -> impl Iterator<Item = (char, &AuditEntry)> {
        [('q', &self.q), ('k', &self.k), ('v', &self.v)]
            .into_iter()
            .flat_map(|(letter, row)| row.iter().map(move |entry| (letter, entry)))
    }
}

/// What one engine would do with a checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct Audit {
    /// Engine.
    pub engine: Engine,
    /// Model.
    pub model: String,
    /// Whether no operand of any layer can overflow, by scales that are the checkpoint's own.
    pub safe: bool,
    /// What holds for the whole checkpoint.
    pub notes: Vec<String>,
    /// Layers with attention.
    pub layers: Vec<LayerAudit>,
}

/// Audits a checkpoint for these engines. `each` is called after each layer, and stops the work by an error.
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::layer`]: a checkpoint that cannot be read or bounded has no audit.
pub fn verify(checkpoint: &Checkpoint, engines: &[Engine], each: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Audit>> {
    let spec = checkpoint.spec();
    let folder = folder_of(checkpoint.path())?;
    let found = Found::read(&folder, checkpoint)?;
    let mut layers = Vec::with_capacity(spec.layers.len());
    for layer in 0..spec.layers.len() {
        layers.push(LayerScales::new(spec, checkpoint.layer(layer)?)?);
        each()?;
    }
    Ok(engines.iter().map(|engine| found.audit(*engine, spec, &layers)).collect())
}

impl Engine {
    /// The engine that a folder was exported for, by the certificate in it.
    pub fn of_export(folder: &Path) -> Option<Self> {
        let certificate = Settings::read_if_present(&folder.join(CERTIFICATE_FILE)).ok()??;
        certificate.value.get("engine")?.as_str()?.parse().ok()
    }
}

/// A stored scale.
#[derive(Clone)]
struct Stored {
    values: Vec<f32>,
    /// File and name, for people.
    place: String,
}

impl Stored {
    /// The smallest value; of none that is a number, less than any.
    fn smallest(&self) -> f32 {
        self.values.iter().map(|x| if x.is_nan() { f32::NEG_INFINITY } else { *x }).fold(f32::INFINITY, f32::min)
    }
}

/// What a folder holds.
struct Found {
    config: Settings,
    method: Method,
    names: ScaleNames,
    /// In the files that engines read, by name.
    listed: BTreeMap<String, Stored>,
    /// In files that the index does not name, by name.
    unlisted: BTreeMap<String, Stored>,
    /// `consolidated*.safetensors`, which vLLM prefers.
    consolidated: bool,
    /// ModelOpt's own config.
    aside: Option<Settings>,
    /// Files of cache factors (`kv_cache_scales.json`), which no engine reads by itself.
    factor_files: Vec<String>,
}

impl Found {
    fn read(folder: &Path, checkpoint: &Checkpoint) -> Result<Self> {
        let config = Settings::read(&folder.join("config.json"))?;
        let names = ScaleNames::new(checkpoint.spec())?;
        let files = WeightFiles::open(folder)?;
        let scales = |files: &WeightFiles| {
            let mut found = BTreeMap::<String, Stored>::new();
            for tensor in files.tensors().filter(|tensor| names.meant(tensor.name).is_some()) {
                let new = Stored { values: values(&tensor), place: place(&tensor) };
                // In two files: which of them counts depends on the order in which they are loaded.
                let kept = found.remove(tensor.name).filter(|kept| kept.smallest() <= new.smallest());
                found.insert(tensor.name.to_owned(), kept.unwrap_or(new));
            }
            found
        };
        let listed = scales(&files);
        // A file that nobody reads may be broken.
        let unlisted = files.open_unlisted(folder).map(|files| scales(&files)).unwrap_or_default();
        let consolidated =
            files.files().chain(files.unlisted.iter().map(String::as_str)).any(|name| name.starts_with("consolidated"));
        let aside = Settings::read_if_present(&folder.join(HF_QUANT))?;
        let method = config.method(aside.as_ref());
        check_read(checkpoint, folder, method, &files)?;
        let factor_files = factor_files(folder)?;
        Ok(Self { config, method, names, listed, unlisted, consolidated, aside, factor_files })
    }

    /// Whether ModelOpt's settings ask for an FP8 cache, without which SGLang makes no room for scales.
    fn modelopt_asks(&self) -> bool {
        let own = self.config.quantization();
        let aside = || self.aside.as_ref()?.value.get("quantization")?.as_object();
        let Some(map) = own.or_else(aside) else { return false };
        map.get("kv_cache_scheme").is_some_and(|scheme| scheme["type"] == "float" && scheme["num_bits"] == 8)
            || map.get("kv_cache_quant_algo").is_some_and(|algorithm| !algorithm.is_null())
    }

    /// Why an engine loads no scale of this checkpoint, where its config or its files keep it from that.
    fn blocked(&self, engine: Engine) -> Option<String> {
        let text = |why: &str| Some(why.to_owned());
        let scheme = self.config.quantization().and_then(|map| map.get("kv_cache_scheme")).filter(|s| !s.is_null());
        match (engine, self.method) {
            (Engine::Vllm, _) if self.consolidated => {
                text("vLLM loads the `consolidated` safetensors of this folder, which have none of these names")
            }
            (Engine::Vllm, Method::Plain) => {
                text("the config has no `quantization_config`, without which vLLM refuses a checkpoint that has scales")
            }
            (Engine::Sglang, Method::Plain) => {
                text("the config has no `quantization_config`, so SGLang reads no scale")
            }
            (Engine::Vllm | Engine::Sglang, Method::CompressedTensors) => {
                let Some(scheme) = scheme else {
                    // vLLM makes room for scales without a scheme, too.
                    let why = "the config has no `kv_cache_scheme`, so SGLang reads no scale";
                    return (engine == Engine::Sglang).then(|| why.to_owned());
                };
                let strategy = scheme.get("strategy").and_then(Value::as_str).unwrap_or_default();
                let flag = |key: &str| scheme.get(key).and_then(Value::as_bool);
                let groups = self.config.quantization().and_then(|map| map.get("config_groups"));
                let has_groups = groups.is_some_and(Value::is_object);
                if scheme.get("type") != Some(&json!("float")) || scheme.get("num_bits") != Some(&json!(8)) {
                    text("`kv_cache_scheme` is not 8-bit float")
                } else if !flag("symmetric").unwrap_or(engine == Engine::Sglang) {
                    text("`kv_cache_scheme` has no `symmetric: true`")
                } else if engine == Engine::Sglang && flag("dynamic") == Some(true) {
                    text("`kv_cache_scheme` is dynamic")
                } else if self.per_head(engine) && !has_groups {
                    text("`quantization_config` has no `config_groups`, without which vLLM reads no per-head scales")
                } else if strategy != "tensor" && !(engine == Engine::Vllm && strategy == "attn_head") {
                    Some(format!("{engine} does not read `kv_cache_scheme` with this `strategy`"))
                } else {
                    None
                }
            }
            (Engine::Sglang, Method::ModelOpt) if !self.modelopt_asks() => text(
                "ModelOpt's config has neither `kv_cache_scheme` nor `kv_cache_quant_algo`, so SGLang reads no scale",
            ),
            _ => None,
        }
    }

    fn per_head(&self, engine: Engine) -> bool {
        let scheme = self.config.quantization().and_then(|map| map.get("kv_cache_scheme"));
        let strategy = scheme.and_then(|scheme| scheme.get("strategy")).and_then(|s| s.as_str());
        engine == Engine::Vllm && self.method == Method::CompressedTensors && strategy == Some("attn_head")
    }

    fn audit(&self, engine: Engine, spec: &AttentionSpec, layers: &[LayerScales]) -> Audit {
        let reads = engine.reads(spec, self.config.model_type(), self.method);
        let blocked = self.blocked(engine).filter(|_| reads.any());
        let loaded: Vec<[Option<Stored>; 3]> =
            layers.iter().map(|layer| Operand::ALL.map(|operand| self.loaded(engine, spec, layer, operand))).collect();
        let anywhere = Operand::ALL.map(|operand| loaded.iter().any(|layer| layer[operand as usize].is_some()));
        let rows = layers.iter().zip(&loaded).enumerate().map(|(index, (layer, own))| {
            let row = |operand| {
                let case = Case { found: self, engine, reads, index, layer, own, anywhere: anywhere[operand as usize] };
                case.row(operand, blocked.as_deref())
            };
            LayerAudit { layer: layer.layer, q: row(Operand::Q), k: row(Operand::K), v: row(Operand::V) }
        });
        let layers: Vec<LayerAudit> = rows.collect();
        let safe = layers.iter().flat_map(LayerAudit::entries).all(|(_, entry)| entry.verdict == ScaleVerdict::Safe);
        let mut notes: Vec<String> = reads.why.iter().map(|why| format!("{why}.")).collect();
        notes.extend(blocked.map(|why| format!("No scale is loaded: {why}.")));
        let factors = self.factor_files.iter();
        notes.extend(
            factors.map(|name| format!("{engine} does not read the cache factors of {name} with the checkpoint.")),
        );
        Audit { engine, model: spec.name.clone(), safe, notes, layers }
    }

    /// What an engine finds for an operand, by the names that it reads.
    fn loaded(&self, engine: Engine, spec: &AttentionSpec, layer: &LayerScales, operand: Operand) -> Option<Stored> {
        let names = engine.names(&spec.family, &layer.module, operand, self.method);
        let found = names.iter().filter_map(|name| self.listed.get(name));
        // Of several names the one that is read last counts, which depends on the files: the smallest is judged.
        found.min_by(|a, b| a.smallest().total_cmp(&b.smallest())).cloned()
    }

    /// A scale of this operand that the engine does not read, and why.
    fn unread(&self, index: usize, operand: Operand) -> Option<(&Stored, &'static str)> {
        let of = |map: &'_ BTreeMap<String, Stored>| -> Option<String> {
            map.keys().find(|name| self.names.meant(name) == Some((index, operand))).cloned()
        };
        let listed = of(&self.listed).map(|name| (&self.listed[&name], "not a name that the engine reads"));
        let unlisted =
            || of(&self.unlisted).map(|name| (&self.unlisted[&name], "in a file that the index does not name"));
        listed.or_else(unlisted)
    }
}

/// One layer of one engine.
struct Case<'a> {
    found: &'a Found,
    engine: Engine,
    reads: Reads,
    index: usize,
    layer: &'a LayerScales,
    own: &'a [Option<Stored>; 3],
    /// Whether some layer has a scale for the operand.
    anywhere: bool,
}

impl Case<'_> {
    fn row(&self, operand: Operand, blocked: Option<&str>) -> Vec<AuditEntry> {
        let Some(row) = self.layer.row(operand) else {
            let why = "there is no norm before its projection, so it has no bound".to_owned();
            let stored = self.own[operand as usize].as_ref().and_then(|s| s.values.first().copied());
            return vec![AuditEntry {
                scale: stored.unwrap_or(1.0),
                needed: None,
                verdict: ScaleVerdict::Unbounded,
                stored,
                why,
            }];
        };
        let largest = crate::plan::ScalePlan::per_tensor(row).get();
        let one =
            |verdict, why: String, stored| vec![AuditEntry { scale: 1.0, needed: Some(largest), verdict, stored, why }];
        let covered = match largest <= 1.0 {
            true => "1.0 covers the bound".to_owned(),
            false => format!("can overflow by a factor of {largest:.3}"),
        };
        if !self.reads.scale(operand) {
            let verdict = if largest <= 1.0 { ScaleVerdict::Safe } else { ScaleVerdict::Overflow };
            let why =
                if largest <= 1.0 { "1.0, at which the engine casts, covers the bound".to_owned() } else { covered };
            return one(verdict, why, None);
        }
        let unread = self.found.unread(self.index, operand);
        let own = self.own[operand as usize].as_ref();
        if let Some(why) = blocked
            && let Some((stored, _)) = own.map(|own| (own, "")).or(unread)
        {
            return one(
                ScaleVerdict::NotLoaded,
                format!("never loaded: {why}; {covered}"),
                stored.values.first().copied(),
            );
        }
        match own.or_else(|| self.lent(operand)) {
            Some(stored) => self.judge(operand, stored, row.iter().map(|scale| scale.get()).collect()),
            None => match unread {
                Some((stored, why)) => {
                    let why = format!("never loaded: {} is {why}; {covered}", stored.place);
                    one(ScaleVerdict::NotLoaded, why, stored.values.first().copied())
                }
                None if self.anywhere => one(ScaleVerdict::Missing, format!("missing, so 1.0; {covered}"), None),
                None if largest <= 1.0 => {
                    one(ScaleVerdict::Safe, "1.0 covers the bound; no layer has a scale".to_owned(), None)
                }
                None => one(ScaleVerdict::Missing, format!("no layer has a scale, so 1.0; {covered}"), None),
            },
        }
    }

    /// The scale of another operand that a loader takes for one that is missing.
    fn lent(&self, operand: Operand) -> Option<&Stored> {
        let k = self.own[Operand::K as usize].as_ref();
        let base = self.found.method.is_base() || self.engine == Engine::Sglang;
        match (self.engine, operand) {
            (Engine::Vllm | Engine::Sglang, Operand::V) if base => k,
            (Engine::Mistralrs, Operand::Q) => k,
            _ => None,
        }
    }

    fn judge(&self, operand: Operand, stored: &Stored, needed: Vec<f32>) -> Vec<AuditEntry> {
        let (per_head, heads) = (self.found.per_head(self.engine), needed.len());
        let wanted = match (per_head, operand) {
            (false, _) => 1,
            (true, Operand::Q) => self.layer.n_q_heads,
            (true, _) => heads,
        };
        let largest = needed.iter().copied().fold(0.0, f32::max);
        if stored.values.len() != wanted {
            let why = format!(
                "never loaded: {} has {} entries, and {} takes {wanted}",
                stored.place,
                stored.values.len(),
                self.engine
            );
            let verdict = ScaleVerdict::NotLoaded;
            return vec![AuditEntry {
                scale: 1.0,
                needed: Some(largest),
                verdict,
                stored: stored.values.first().copied(),
                why,
            }];
        }
        let needed = if per_head { needed } else { vec![largest] };
        let group = wanted / needed.len();
        let entry = |(index, needed): (usize, f32)| {
            let own = &stored.values[index * group..][..group];
            let value = own.iter().copied().reduce(|a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) });
            let value = value.unwrap_or(f32::NAN);
            let scale = self.rounded(value);
            let (verdict, why) = verdict(value, scale, needed);
            AuditEntry {
                scale,
                needed: Some(needed),
                verdict,
                stored: Some(value),
                why: format!("{why} ({})", stored.place),
            }
        };
        needed.into_iter().enumerate().map(entry).collect()
    }

    /// A scale as the engine keeps it: vLLM's loader for FP8 and ModelOpt weights holds it in the model's type.
    fn rounded(&self, value: f32) -> f32 {
        let base = self.found.method.is_base();
        match self.engine {
            Engine::Vllm if base && self.found.config.runs_in_f16() => half::f16::from_f32(value).to_f32(),
            Engine::Vllm if base => half::bf16::from_f32(value).to_f32(),
            _ => value,
        }
    }
}

/// What is said of a scale that is loaded.
fn verdict(stored: f32, used: f32, needed: f32) -> (ScaleVerdict, String) {
    let over = needed / used;
    if !(used.is_finite() && used > 0.0) {
        return (
            ScaleVerdict::Invalid,
            format!("{used} is not a valid scale: expected a finite number greater than 0"),
        );
    }
    if used >= needed {
        return if used <= FOREIGN_FROM * needed {
            (ScaleVerdict::Safe, "covers the bound".to_owned())
        } else if used == 1.0 {
            (ScaleVerdict::Default, "stored as 1.0, the loaders' default; 1.0 covers the bound".to_owned())
        } else {
            (
                ScaleVerdict::Foreign,
                format!(
                    "{:.3} times what these weights need: probably the scale of another model or layer",
                    used / needed
                ),
            )
        };
    }
    if stored >= needed {
        (ScaleVerdict::RoundedBelow, format!("the loader rounds it below the bound, which is {over:.5} times as large"))
    } else if over <= 1.0 + ROUNDING {
        (ScaleVerdict::RoundedBelow, format!("rounded below the bound, which is {over:.5} times as large"))
    } else if used == 1.0 {
        (ScaleVerdict::Default, format!("stored as 1.0, the loaders' default; can overflow by a factor of {over:.3}"))
    } else {
        (ScaleVerdict::Overflow, format!("can overflow by a factor of {over:.3}"))
    }
}

/// Names of the folder's files that hold cache factors beside the weights, as vLLM and SGLang took them by an option.
fn factor_files(folder: &Path) -> Result<Vec<String>> {
    const LONGEST: u64 = 1 << 20;
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "open", e))?;
    let files = entries.flatten().filter(|entry| entry.metadata().is_ok_and(|file| file.len() <= LONGEST));
    let mut names: Vec<String> = files
        .filter(|entry| entry.path().extension().is_some_and(|kind| kind == "json"))
        // A file that is no JSON is none of these.
        .filter(|entry| {
            let read = Settings::read(&entry.path()).ok();
            read.is_some_and(|file| {
                file.value.get("kv_cache").is_some_and(|cache| cache.get("scaling_factor").is_some())
            })
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    Ok(names)
}

fn place(tensor: &RawTensor<'_>) -> String {
    format!("{} in {}", tensor.name, tensor.file)
}

/// The values of a small tensor; none where its type is not read.
fn values(tensor: &RawTensor<'_>) -> Vec<f32> {
    fn read<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        bytes.chunks_exact(N).filter_map(|chunk| Some(value(chunk.try_into().ok()?))).collect()
    }
    match tensor.dtype {
        Dtype::F32 => read(tensor.bytes, f32::from_le_bytes),
        Dtype::BF16 => read(tensor.bytes, |bytes| half::bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F16 => read(tensor.bytes, |bytes| half::f16::from_le_bytes(bytes).to_f32()),
        Dtype::F64 => read(tensor.bytes, |bytes| f64::from_le_bytes(bytes) as f32),
        _ => vec![],
    }
}
