//! Which scales each engine would use, compared with those that the weights need.
//!
//! Safe is said only where everything that decides was seen. Every tensor that looks like a scale of attention, every weight of
//! attention and every file of an adapter is told apart ([`super::census`]); what an engine makes of a stored name follows from
//! the engine's own rules ([`super::description`]); what neither tells is unknown.

use super::audit::{Audit, AuditEntry, LayerAudit, Outcome, ScaleVerdict, Unjudged};
use super::census;
use super::centers::{self, Judged};
use super::description::{Carries, Loads, Parameters};
use super::engine::{Engine, Operand};
use super::folder::{CERTIFICATE_FILE, check_read, folder_of};
use super::names::ScaleNames;
use super::needs::{KEY_AND_VALUE, Need, biased, needs};
use super::options::Serving;
use super::scales::LayerScales;
use super::settings::{HF_QUANT, Method, Settings};
use super::unjudged::{otherwise, unjudged};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, Checkpoint, RawTensor, WeightFiles};
use crate::plan::ScalePlan;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Scales up to this many times what the weights need may come from them (powers of two, margins); larger ones do not.
const FOREIGN_FROM: f32 = 2.0;
/// How far below what is needed a rounding to BF16 can put a scale.
const ROUNDING: f32 = 1.0 / 128.0;
/// The smallest scale under which probabilities, of at most 1, fit.
const LEAST_PROBABILITY: f32 = 1.0 / 448.0;

/// Audits a checkpoint for these engines, whose servers are started with these options. `each` is called after each layer, and
/// stops the work by an error.
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::layer`]: a checkpoint that cannot be read or bounded has no audit. `is_argument` if a
/// layer to skip is not there, or an engine cannot skip layers.
pub fn verify(
    checkpoint: &Checkpoint,
    engines: &[Engine],
    serving: &Serving,
    each: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Audit>> {
    let first = engines.first().unwrap_or(&Engine::Vllm).description();
    serving.check(checkpoint.spec(), first.skips_layers, first.windows)?;
    let folder = folder_of(checkpoint.path())?;
    let found = Found::read(&folder, checkpoint)?;
    // Engines that compute alike share the bounds.
    let mut done: Vec<(AttentionSpec, Vec<Need>, Judged)> = Vec::new();
    let mut audits = Vec::with_capacity(engines.len());
    for engine in engines {
        let spec = engine.spec(checkpoint.spec(), &found.config, found.generation.as_ref(), serving)?;
        if !done.iter().any(|(own, ..)| *own == spec) {
            let needs = needs(checkpoint, &spec, each)?;
            let centers = centers::judged(checkpoint, &spec, &folder)?;
            done.push((spec.clone(), needs, centers));
        }
        let (spec, needs, centers) = done.iter().find(|(own, ..)| *own == spec).expect("it was just made");
        let mut audit = found.audit(*engine, spec, needs, &engine.serving(serving), &folder);
        audit.notes.extend(centers.notes.iter().cloned());
        if centers.wrong {
            (audit.safe, audit.outcome) = (false, Outcome::NotSafe);
        }
        audits.push(audit);
    }
    Ok(audits)
}

impl Engine {
    /// The engine that a folder was exported for, by the certificate in it.
    pub fn of_export(folder: &Path) -> Option<Self> {
        let certificate = Settings::read_if_present(&folder.join(CERTIFICATE_FILE)).ok()??;
        certificate.value.get("engine")?.as_str()?.parse().ok()
    }
}

/// A stored scale.
#[derive(Clone, PartialEq)]
struct Stored {
    values: Vec<f32>,
    /// File and name, for people.
    place: String,
}

/// What a folder holds.
struct Found {
    config: Settings,
    generation: Option<Settings>,
    names: ScaleNames,
    /// Scales in the files that engines read, by name: one of each file that has it.
    listed: BTreeMap<String, Vec<Stored>>,
    /// In files that the index does not name, by name.
    unlisted: BTreeMap<String, Stored>,
    /// What was found and not judged, whoever serves it.
    unjudged: Vec<Unjudged>,
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
        let aside = Settings::read_if_present(&folder.join(HF_QUANT))?;
        check_read(checkpoint, folder, config.is_plain(aside.as_ref()), &files)?;
        let wanted = |tensor: &RawTensor<'_>| census::is_scale(tensor.name) && !census::is_zero_point(tensor.name);
        let mut listed = BTreeMap::<String, Vec<Stored>>::new();
        for tensor in files.tensors().filter(wanted) {
            let new = Stored { values: values(&tensor), place: place(&tensor) };
            listed.entry(tensor.name.to_owned()).or_default().push(new);
        }
        // A file that nobody reads may be broken.
        let others = files.open_unlisted(folder);
        let unlisted = others.iter().flat_map(|files| files.tensors().filter(wanted));
        let unlisted =
            unlisted.map(|tensor| (tensor.name.to_owned(), Stored { values: values(&tensor), place: place(&tensor) }));
        let unlisted = unlisted.collect();
        let consolidated =
            files.files().chain(files.unlisted.iter().map(String::as_str)).any(|name| name.starts_with("consolidated"));
        let unjudged = unjudged(folder, checkpoint, &config, &names, &files);
        let factor_files = factor_files(folder)?;
        let generation = Settings::read_if_present(&folder.join("generation_config.json"))?;
        Ok(Self { config, generation, names, listed, unlisted, unjudged, consolidated, aside, factor_files })
    }

    fn method(&self, engine: Engine) -> Method {
        let description = engine.description();
        self.config.method(self.aside.as_ref(), description.upper_case, description.needs_producer)
    }

    /// Whether an engine loads the scales of this checkpoint, by its config and its files.
    fn gate(&self, engine: Engine, method: &Method) -> Gate {
        let closed = |why: &str| Gate::Closed(why.to_owned());
        if engine == Engine::Vllm && self.consolidated {
            return closed("vLLM loads the `consolidated` safetensors of this folder, which have none of these names");
        }
        let key = method.key();
        let description = engine.description();
        let Some((_, carries)) = description.methods.iter().find(|(word, _)| *word == key) else {
            let place = format!("{engine} {} for weights stored as `{key}`", description.version);
            return Gate::Unknown(format!("whether scales are loaded is not known of {place}"));
        };
        match carries {
            Carries::Always | Carries::NotExcluded => Gate::Open,
            Carries::Never(why) => closed(why),
            Carries::Asked if self.config.asks(self.aside.as_ref(), engine == Engine::Sglang) => Gate::Open,
            Carries::Asked => Gate::Closed(format!(
                "ModelOpt's config has neither `kv_cache_scheme` nor `kv_cache_quant_algo`, so {engine} reads no scale"
            )),
            Carries::Scheme => self.scheme_gate(engine),
        }
    }

    fn scheme_gate(&self, engine: Engine) -> Gate {
        let closed = |why: &str| Gate::Closed(why.to_owned());
        let scheme = self.config.quantization().and_then(|map| map.get("kv_cache_scheme")).filter(|s| !s.is_null());
        let Some(scheme) = scheme else {
            // vLLM makes room for scales without a scheme, too.
            return match engine {
                Engine::Vllm => Gate::Open,
                _ => closed("the config has no `kv_cache_scheme`, so SGLang reads no scale"),
            };
        };
        // SGLang passes over what it does not support, vLLM ends.
        let wrong = |why: String| match engine {
            Engine::Vllm => Gate::Refused(why),
            _ => Gate::Closed(why),
        };
        let strategy = scheme.get("strategy").and_then(Value::as_str).unwrap_or_default();
        let flag = |key: &str| scheme.get(key).and_then(Value::as_bool);
        let groups = self.config.quantization().and_then(|map| map.get("config_groups"));
        let has_groups = groups.is_some_and(Value::is_object);
        if scheme.get("type") != Some(&json!("float")) || scheme.get("num_bits") != Some(&json!(8)) {
            wrong("`kv_cache_scheme` is not 8-bit float".to_owned())
        } else if !flag("symmetric").unwrap_or(engine == Engine::Sglang) {
            wrong("`kv_cache_scheme` has no `symmetric: true`".to_owned())
        } else if engine == Engine::Sglang && flag("dynamic") == Some(true) {
            closed("`kv_cache_scheme` is dynamic")
        } else if self.per_head(engine) && !has_groups {
            closed("`quantization_config` has no `config_groups`, without which vLLM reads no per-head scales")
        } else if strategy != "tensor" && !(engine == Engine::Vllm && strategy == "attn_head") {
            wrong(format!("{engine} does not read `kv_cache_scheme` with this `strategy`"))
        } else {
            Gate::Open
        }
    }

    fn per_head(&self, engine: Engine) -> bool {
        let scheme = self.config.quantization().and_then(|map| map.get("kv_cache_scheme"));
        let strategy = scheme.and_then(|scheme| scheme.get("strategy")).and_then(|s| s.as_str());
        engine == Engine::Vllm && self.method(engine).is_compressed_tensors() && strategy == Some("attn_head")
    }

    fn audit(&self, engine: Engine, spec: &AttentionSpec, needs: &[Need], serving: &Serving, folder: &Path) -> Audit {
        let description = engine.description();
        let method = self.method(engine);
        let mut loads = description.loads(spec, &self.config.types());
        if let Some(names) = description.latent_names.filter(|_| spec.has_mla()) {
            let parameters = description.parameters(&names, &self.names.modules, &method);
            if self.listed.keys().any(|name| parameters.lands(name).is_some()) {
                loads = Some(Loads::Partly(names, description.latent));
            }
        }
        let (parameters, partly) = match &loads {
            Some(Loads::Scales(names)) => (Some(names), None),
            Some(Loads::Partly(names, why)) => (Some(names), Some(*why)),
            _ => (None, None),
        };
        let parameters = parameters.map(|names| description.parameters(names, &self.names.modules, &method));
        let gate = match self.gate(engine, &method) {
            gate if parameters.is_some() => gate,
            // An engine that stops at what it does not know may stop here too.
            Gate::Unknown(why) if !description.stops_for.is_empty() => Gate::Unknown(why),
            _ => Gate::Open,
        };
        let case = Case { found: self, engine, spec, method: &method, loads, gate, partly, parameters, serving };
        let (candidates, strays) = case.candidates();
        let anywhere = Operand::ALL.map(|operand| candidates.iter().any(|layer| !layer[operand as usize].is_empty()));
        let rows = needs.iter().enumerate().map(|(index, need)| {
            let row = |operand: Operand| case.row(index, operand, need, &candidates[index], anywhere[operand as usize]);
            LayerAudit { layer: need.stored.layer, q: row(Operand::Q), k: row(Operand::K), v: row(Operand::V) }
        });
        let mut layers: Vec<LayerAudit> = rows.collect();
        case.compare_shared(&mut layers, &candidates);
        let mut unjudged = self.unjudged.clone();
        unjudged.extend(case.unjudged(&strays, &layers));
        let safe = unjudged.is_empty()
            && layers.iter().flat_map(LayerAudit::entries).all(|(_, entry)| entry.verdict == ScaleVerdict::Safe);
        let mut notes = case.notes();
        notes.extend(biased(needs, spec, engine, &folder.display().to_string(), serving));
        let (model, version) = (spec.name.clone(), description.version);
        let outcome = Outcome::of(&layers, &unjudged);
        Audit { engine, version, model, safe, outcome, serving: serving.clone(), notes, unjudged, layers }
    }
}

/// Whether scales get into an engine.
enum Gate {
    Open,
    Closed(String),
    /// The engine does not start.
    Refused(String),
    Unknown(String),
}

/// One engine's view of a folder.
struct Case<'a> {
    found: &'a Found,
    engine: Engine,
    spec: &'a AttentionSpec,
    method: &'a Method,
    loads: Option<Loads>,
    gate: Gate,
    partly: Option<&'static str>,
    parameters: Option<Parameters>,
    serving: &'a Serving,
}

/// What may be loaded as the scale of each operand of a layer.
type Candidates<'a> = [Vec<(&'a str, &'a Stored)>; 3];

impl<'a> Case<'a> {
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        match (&self.loads, &self.gate) {
            (Some(Loads::Nothing(why)), _) => notes.push(format!("{why}.")),
            (_, Gate::Closed(why) | Gate::Refused(why)) => notes.push(format!("No scale is loaded: {why}.")),
            (_, Gate::Unknown(why)) => notes.push(format!("{why}.")),
            _ => {}
        }
        if !matches!(self.loads, Some(Loads::Nothing(_))) {
            notes.extend(self.engine.description().without.map(|why| format!("{why}.")));
        }
        notes.extend(self.partly.map(|why| format!("{why}: each scale is judged compared with 1.0.")));
        let engine = self.engine;
        let factors = self.found.factor_files.iter();
        notes.extend(
            factors.map(|name| format!("{engine} does not read the cache factors of {name} with the checkpoint.")),
        );
        notes
    }

    /// The tensors that land as scales, and those that look like scales and land nowhere.
    fn candidates(&self) -> (Vec<Candidates<'a>>, Vec<&'a str>) {
        let mut candidates: Vec<Candidates<'a>> =
            self.found.names.modules.iter().map(|_| Candidates::default()).collect();
        let mut strays = Vec::new();
        for (name, stored) in &self.found.listed {
            match self.parameters.as_ref().and_then(|parameters| parameters.lands(name)) {
                Some((layer, operand)) => {
                    candidates[layer][operand as usize].extend(stored.iter().map(|one| (name.as_str(), one)));
                }
                None => strays.push(name.as_str()),
            }
        }
        (candidates, strays)
    }

    /// Strays that nothing explains.
    fn unjudged(&self, strays: &[&str], layers: &[LayerAudit]) -> Vec<Unjudged> {
        let mut unknown = BTreeSet::new();
        let mut probabilities = BTreeSet::new();
        let stops = self.engine.description().stops_at_strays(self.spec);
        for name in strays {
            let last = name.rsplit('.').next().unwrap_or_default();
            if last.starts_with("prob") {
                let fits = |stored: &Stored| {
                    !stored.values.is_empty() && stored.values.iter().all(|x| x.is_finite() && *x >= LEAST_PROBABILITY)
                };
                if !self.found.listed[*name].iter().all(fits) {
                    probabilities.insert((*name).to_owned());
                }
                continue;
            }
            let meant = self.found.names.meant(name);
            let ignored = match (&self.loads, &self.gate) {
                // The engine has no place for any scale of the model's own modules.
                (Some(Loads::Nothing(_)), _) => meant.is_some() && !stops,
                (_, Gate::Closed(_) | Gate::Refused(_)) => meant.is_some(),
                _ => false,
            };
            let reads = self.engine.description().operands;
            let unread = !stops && meant.is_some_and(|(_, operand)| !reads[operand as usize]);
            let said = meant.is_some_and(|(layer, operand)| {
                let row = layers[layer].row(operand);
                row.iter().any(|entry| [ScaleVerdict::NotLoaded, ScaleVerdict::Unknown].contains(&entry.verdict))
            });
            let skipped = meant.is_some_and(|(layer, _)| self.serving.skip.has(&self.spec.layers[layer]));
            if !(ignored || unread || said || skipped) {
                unknown.insert((*name).to_owned());
            }
        }
        let engine = self.engine;
        let mut unjudged = Vec::new();
        let settings = |why: String| Unjudged { what: "config.json".to_owned(), why };
        unjudged.extend(otherwise(engine, &self.found.config));
        match &self.gate {
            Gate::Refused(why) => unjudged.push(settings(format!("{engine} does not start: {why}"))),
            Gate::Unknown(why) => unjudged.push(settings(why.clone())),
            Gate::Open | Gate::Closed(_) => {}
        }
        if !unknown.is_empty() {
            unjudged.push(Unjudged {
                what: census::first_of(&unknown),
                why: format!("ends in a scale, and nothing tells whether {engine} loads it, or for which layer"),
            });
        }
        if !probabilities.is_empty() {
            unjudged.push(Unjudged {
                what: census::first_of(&probabilities),
                why: "is no scale under which probabilities fit: it has to be at least 1/448".to_owned(),
            });
        }
        unjudged
    }

    fn row(
        &self,
        index: usize,
        operand: Operand,
        need: &Need,
        candidates: &Candidates<'a>,
        anywhere: bool,
    ) -> Vec<AuditEntry> {
        if self.serving.skip.has(&self.spec.layers[index]) {
            let why = "kept in the model's type (--skip-layers)".to_owned();
            return vec![AuditEntry::new(f32::NAN, None, ScaleVerdict::Safe, None, why)];
        }
        let own = &candidates[operand as usize];
        let first = own.first().and_then(|(_, stored)| stored.values.first().copied());
        let unbounded =
            |why: &str| vec![AuditEntry::new(first.unwrap_or(1.0), None, ScaleVerdict::Unknown, first, why.to_owned())];
        let Some(needed) = self.engine.needed(need) else {
            return unbounded(
                "the engine requantizes the FP8 weights of q, k and v, and after a norm with a shift they have no bound",
            );
        };
        let Some(row) = needed.row(operand) else {
            return unbounded("there is no norm before its projection, so it has no bound");
        };
        let reach = operand.reach(self.serving.kv);
        let held = |scale: f32| if reach == 1.0 { scale } else { (scale / reach).next_up() };
        let largest = held(ScalePlan::per_tensor(row).get());
        let at_one = |verdict, why: String, stored| vec![AuditEntry::new(1.0, Some(largest), verdict, stored, why)];
        let covered = match largest <= 1.0 {
            true => "1.0 covers the bound".to_owned(),
            false => format!("can overflow by a factor of {largest:.3}"),
        };
        let cast_at_one = || {
            let verdict = if largest <= 1.0 { ScaleVerdict::Safe } else { ScaleVerdict::Overflow };
            let covers = "1.0, at which the engine casts, covers the bound".to_owned();
            at_one(verdict, if largest <= 1.0 { covers } else { covered.clone() }, None)
        };
        let unread = self.unread(index, operand);
        if self.loads.is_none() {
            return match unread {
                Some((stored, _)) => {
                    let (engine, version) = (self.engine, self.engine.version());
                    let why = format!("what {engine} {version} loads for this family is not known ({})", stored.place);
                    at_one(ScaleVerdict::Unknown, why, stored.values.first().copied())
                }
                None => cast_at_one(),
            };
        }
        if self.parameters.is_none() || !self.engine.description().operands[operand as usize] {
            return cast_at_one();
        }
        let excluded = self.excluded(index);
        let closed = match (&self.gate, excluded) {
            (Gate::Closed(why) | Gate::Refused(why), _) => {
                Some((ScaleVerdict::NotLoaded, format!("never loaded: {why}")))
            }
            (Gate::Unknown(why), _) => Some((ScaleVerdict::Unknown, why.clone())),
            (Gate::Open, Some(true)) => Some((
                ScaleVerdict::NotLoaded,
                format!("never loaded: Quark's `exclude` matches the module, and {} has no scale there", self.engine),
            )),
            (Gate::Open, None) => {
                Some((ScaleVerdict::Unknown, "an expression of Quark's `exclude` cannot be followed".to_owned()))
            }
            (Gate::Open, Some(false)) => None,
        };
        let is_open = closed.is_none();
        if let Some((verdict, why)) = closed
            && let Some(stored) = own.first().map(|(_, stored)| *stored).or(unread.map(|(stored, _)| stored))
        {
            return at_one(verdict, format!("{why}; {covered}"), stored.values.first().copied());
        }
        let own = if own.is_empty() && is_open { self.lent(operand, candidates) } else { own.as_slice() };
        if own.is_empty() {
            return match unread {
                Some((stored, why)) => {
                    let why = format!("never loaded: {} is {why}; {covered}", stored.place);
                    at_one(ScaleVerdict::NotLoaded, why, stored.values.first().copied())
                }
                None if anywhere => at_one(ScaleVerdict::Missing, format!("missing, so 1.0; {covered}"), None),
                None if largest <= 1.0 => {
                    at_one(ScaleVerdict::Safe, "1.0 covers the bound; no layer has a scale".to_owned(), None)
                }
                None => at_one(ScaleVerdict::Missing, format!("no layer has a scale, so 1.0; {covered}"), None),
            };
        }
        let needed_row: Vec<f32> = row.iter().map(|scale| held(scale.get())).collect();
        // Of several tensors for one parameter the last that is read counts, which depends on the order: the worst is said.
        let judged = own.iter().map(|(_, stored)| self.judge(operand, stored, needed, &needed_row, largest));
        let worst = judged.max_by(|a, b| severity(a).total_cmp(&severity(b)));
        let mut entries = worst.expect("there is one");
        if own.iter().any(|(_, stored)| stored.values != own[0].1.values) {
            let several = format!("; {} tensors are loaded as it, and this is the worst of them", own.len());
            entries.iter_mut().for_each(|entry| entry.why += &several);
        }
        if let Some(why) = self.partly
            && largest > 1.0
        {
            for entry in &mut entries {
                if entry.verdict == ScaleVerdict::Safe {
                    (entry.verdict, entry.why) = (ScaleVerdict::Unknown, format!("{why}; {covered} at 1.0"));
                }
            }
        }
        entries
    }

    /// Whether the method keeps the engine from giving this layer parameters; none where that cannot be told.
    fn excluded(&self, index: usize) -> Option<bool> {
        let carries = self.engine.description().methods.iter().find(|(word, _)| *word == self.method.key());
        match carries {
            Some((_, Carries::NotExcluded)) => {
                let module = &self.found.names.modules[index];
                // Quark compares with the engine's name, which for wrapped models has its own prefix.
                let own = self.found.config.quark_excludes(&format!("{module}.attn"))?;
                if module.starts_with("model.layers.") {
                    return Some(own);
                }
                let bare = module.split_once(".layers.").map_or(module.as_str(), |(_, rest)| rest);
                let other = self.found.config.quark_excludes(&format!("language_model.model.layers.{bare}.attn"))?;
                let third = self.found.config.quark_excludes(&format!("model.layers.{bare}.attn"))?;
                (own == other && other == third).then_some(own)
            }
            _ => Some(false),
        }
    }

    /// A scale of this operand that the engine does not read, and why.
    fn unread(&self, index: usize, operand: Operand) -> Option<(&'a Stored, &'static str)> {
        let meant = |name: &&String| self.found.names.meant(name) == Some((index, operand));
        let listed = self.found.listed.keys().find(meant);
        if let Some(name) = listed {
            return Some((&self.found.listed[name][0], "not a name that the engine reads"));
        }
        let name = self.found.unlisted.keys().find(meant)?;
        Some((&self.found.unlisted[name], "in a file that the index does not name"))
    }

    /// The scale of another operand that a loader takes for one that is missing.
    fn lent<'c>(&self, operand: Operand, candidates: &'c Candidates<'a>) -> &'c [(&'a str, &'a Stored)] {
        let k = candidates[Operand::K as usize].as_slice();
        let base = self.method.is_base() || self.engine == Engine::Sglang;
        match (self.engine, operand) {
            (Engine::Vllm | Engine::Sglang, Operand::V) if base => k,
            (Engine::Mistralrs, Operand::Q | Operand::V) => k,
            _ => &[],
        }
    }

    fn judge(
        &self,
        operand: Operand,
        stored: &Stored,
        needed: &LayerScales,
        row: &[f32],
        largest: f32,
    ) -> Vec<AuditEntry> {
        let per_head = self.found.per_head(self.engine);
        let used = match (per_head, operand) {
            (false, _) => (stored.values.len() == 1).then(|| stored.values.clone()),
            (true, Operand::Q) => {
                let group = (needed.n_q_heads / row.len().max(1)).max(1);
                let maxima = stored.values.chunks_exact(group).map(largest_of).collect();
                stored.values.len().is_multiple_of(group).then_some(maxima).and_then(|rows| spread(rows, row.len()))
            }
            (true, _) => spread(stored.values.clone(), row.len()),
        };
        let Some(used) = used else {
            let wanted = match (per_head, operand) {
                (false, _) => 1,
                (true, Operand::Q) => needed.n_q_heads,
                (true, _) => row.len(),
            };
            let count = stored.values.len();
            let why = format!("never loaded: {} has {count} entries, and {} takes {wanted}", stored.place, self.engine);
            let first = stored.values.first().copied();
            return vec![AuditEntry::new(1.0, Some(largest), ScaleVerdict::NotLoaded, first, why)];
        };
        let needed = if per_head { row.to_vec() } else { vec![largest] };
        let entry = |(value, needed): (f32, f32)| {
            let scale = self.rounded(value);
            let (verdict, why) = verdict(value, scale, needed);
            AuditEntry::new(scale, Some(needed), verdict, Some(value), format!("{why} ({})", stored.place))
        };
        used.into_iter().zip(needed).map(entry).collect()
    }

    /// A scale as the engine keeps it: vLLM's loader for FP8 and ModelOpt weights holds it in the model's type.
    fn rounded(&self, value: f32) -> f32 {
        let base = self.method.is_base();
        match self.engine {
            Engine::Vllm if base && self.found.config.runs_in_f16() => half::f16::from_f32(value).to_f32(),
            Engine::Vllm if base => half::bf16::from_f32(value).to_f32(),
            _ => value,
        }
    }

    /// Layers that read another layer's cache: what dequantizes has to be what quantized.
    fn compare_shared(&self, layers: &mut [LayerAudit], candidates: &[Candidates<'a>]) {
        for (index, own) in self.spec.layers.iter().enumerate() {
            let Some(source) = own.kv_source else { continue };
            let Some(writer) = self.spec.layers.iter().position(|layer| layer.number == source) else { continue };
            for operand in KEY_AND_VALUE {
                let skipped = [index, writer].map(|layer| self.serving.skip.has(&self.spec.layers[layer]));
                let why = if skipped[0] != skipped[1] {
                    Some((
                        f32::NAN,
                        format!("its cache is layer {source}'s, and only one of the two is kept in the model's type"),
                    ))
                } else if skipped[0] {
                    None
                } else {
                    let scales = |layer: usize| layers[layer].row(operand).iter().map(|entry| entry.scale);
                    let differ =
                        scales(index).zip(scales(writer)).find(|(read, write)| read.to_bits() != write.to_bits());
                    let several = |layer: usize| {
                        let own = &candidates[layer][operand as usize];
                        own.iter().any(|(_, stored)| stored.values != own[0].1.values)
                    };
                    match differ {
                        Some((read, write)) => Some((
                            (read / write).max(write / read),
                            format!("reads the cache of layer {source}, which is written with {write}, with {read}"),
                        )),
                        None if scales(index).count() != scales(writer).count() => Some((
                            f32::NAN,
                            format!("its scales are not as many as those of layer {source}, whose cache it reads"),
                        )),
                        None if several(index) || several(writer) => Some((
                            f32::NAN,
                            format!("several tensors are its scale or that of layer {source}, whose cache it reads"),
                        )),
                        None => None,
                    }
                };
                let Some((factor, why)) = why else { continue };
                for entry in layers[index].row_mut(operand) {
                    (entry.verdict, entry.why) = (ScaleVerdict::Mismatch, why.clone());
                    entry.factor = Some(factor).filter(|factor| factor.is_finite());
                }
            }
        }
    }
}

/// One value for every head, or one a head, as vLLM copies them: the first ones, or a single one for all.
fn spread(values: Vec<f32>, heads: usize) -> Option<Vec<f32>> {
    match values.len() {
        1 => Some(vec![values[0]; heads]),
        count if count >= heads => Some(values[..heads].to_vec()),
        _ => None,
    }
}

fn largest_of(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) };
    values.iter().copied().reduce(larger).unwrap_or(f32::NAN)
}

/// How bad the entries of one tensor are: by the verdict, then by the factor.
fn severity(entries: &[AuditEntry]) -> f32 {
    let one = |entry: &AuditEntry| match entry.verdict {
        ScaleVerdict::Safe => 0.0,
        ScaleVerdict::Overflow => 2.0 + entry.factor.unwrap_or(0.0).min(1e30),
        ScaleVerdict::Unknown => 1.0,
        _ => f32::MAX,
    };
    entries.iter().map(one).fold(0.0, f32::max)
}

/// What is said of a scale that is loaded.
fn verdict(stored: f32, used: f32, needed: f32) -> (ScaleVerdict, String) {
    let over = needed / used;
    if !(used.is_finite() && used > 0.0) {
        let why = format!("{used} is not a valid scale: expected a finite number greater than 0");
        return (ScaleVerdict::Invalid, why);
    }
    if used >= needed {
        let why = if used <= FOREIGN_FROM * needed {
            "covers the bound".to_owned()
        } else if used == 1.0 {
            "stored as 1.0, the loaders' default; covers the bound".to_owned()
        } else {
            let times = used / needed;
            format!("covers the bound, {times:.3} times: probably the scale of another model or layer")
        };
        return (ScaleVerdict::Safe, why);
    }
    let why = if stored >= needed {
        format!("the loader rounds it below the bound, which is {over:.5} times as large")
    } else if over <= 1.0 + ROUNDING {
        format!("rounded below the bound, which is {over:.5} times as large")
    } else if used == 1.0 {
        format!("stored as 1.0, the loaders' default; can overflow by a factor of {over:.3}")
    } else {
        format!("can overflow by a factor of {over:.3}")
    };
    (ScaleVerdict::Overflow, why)
}

/// Names of the folder's files that hold cache factors next to the weights, as vLLM and SGLang took them by an option.
fn factor_files(folder: &Path) -> Result<Vec<String>> {
    const LONGEST: u64 = 1 << 20;
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "open", e))?;
    let files = entries
        .flatten()
        .filter(|entry| std::fs::metadata(entry.path()).is_ok_and(|file| file.is_file() && file.len() <= LONGEST));
    let mut names: Vec<String> = files
        .filter(|entry| entry.path().extension().is_some_and(|kind| kind == "json"))
        // A file that is not JSON is not one of these.
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
