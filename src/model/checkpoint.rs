//! Checkpoints on disk: safetensors files, memory-mapped, read as borrowed views.
//!
//! Nothing is copied but vectors (norms, biases). A header is at most 100 MB and its length is checked before anything
//! is read from it; offsets must cover the file without gap or overlap; an index may only name files inside its folder.
//! Every error is one sentence that names the file, the tensor and the rule.
//!
//! E4M3 weights are read as the product with their scale. Whoever multiplies by them in FP8 rounds the projections' input to
//! E4M3 too, and bounds with rounding count that ([`AttentionSpec::fp8_inputs`]).
//!
//! A file must not change while it is mapped. Weights are not checked for NaN here (that takes a read of them all);
//! vectors are.

mod stream;

pub use stream::LayerStream;

use super::config::Config;
use super::families::{QkNormRule, QkNormStored, QkvTensors};
use super::files::{RawTensor, WeightFiles};
use super::folder::{not_a_checkpoint, one_shard, without_config, without_weights};
use super::gains::mean_of_streams;
use super::keys::refuse;
use super::layout::{LayerNames, ProjectionName, at};
use super::quantization::MICRO_TILE;
use super::shards::{Content, Entry, INDEX, Opened, SINGLE, Shard, open_held, open_sharded, open_single};
use super::spec::{AttentionSpec, GainForm, LayerSpec, Multipliers, NormKind};
use super::weights::{LayerWeights, MlaWeights, NormVectors, Projection};
use crate::error::{Error, Result};
use crate::fp8::E4M3_MAX;
use crate::tensor::{BlockScale, Dtype, MatrixView};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A mapped checkpoint with the spec of its attention.
///
/// ```no_run
/// use sigmascale::model::Checkpoint;
/// let checkpoint = Checkpoint::open("llama-3.1-8b".as_ref())?;
/// let layer = checkpoint.layer(0)?;
/// assert_eq!(layer.q.heads.len(), checkpoint.spec().layer(0)?.n_q_heads);
/// # Ok::<(), sigmascale::Error>(())
/// ```
pub struct Checkpoint {
    path: PathBuf,
    config: Config,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
}

/// The scales of E4M3 weights of q, k and v.
pub(crate) struct WeightScales {
    /// The values of each.
    pub values: Vec<Vec<f64>>,
    /// Whether they are those of blocks.
    pub blocks: bool,
}

/// Any stored tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct StoredTensor<'a> {
    /// The values: `shape[0] x shape[1]` for a matrix, one row for a vector or a scalar, the leading dimensions
    /// together as rows for more than two.
    pub view: MatrixView<'a>,
    /// Shape in storage.
    pub shape: Vec<usize>,
}

impl Checkpoint {
    /// Opens a folder with `config.json` and `model.safetensors` (or `model.safetensors.index.json` and its shards), or
    /// one `.safetensors` file with `config.json` beside it.
    ///
    /// The spec is the config's, except that a bias found in the file counts even where the config has none (bounds with
    /// it also hold without it); beside a norm with a shift that is not so, and the contradiction is refused.
    ///
    /// # Errors
    /// `is_io` if a file cannot be opened or mapped; `is_format` if a file breaks a rule of its format or holds no
    /// attention of the config's family; `is_unsupported` as [`AttentionSpec::from_config_json`].
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
        let (folder, file) = if metadata.is_dir() {
            (path.to_owned(), None)
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            (path.parent().map(Path::to_owned).unwrap_or_default(), Some(path.to_owned()))
        } else {
            return Err(not_a_checkpoint(path));
        };
        let config = folder.join("config.json");
        // A link that leads nowhere is one that was meant.
        if config.symlink_metadata().is_err() {
            return Err(without_config(&folder));
        }
        let config = Config::read(&config)?;
        let opened = match file {
            Some(file) => match one_shard(&file) {
                Some(error) => return Err(error),
                None => open_single(file)?,
            },
            None if folder.join(SINGLE).symlink_metadata().is_ok() => open_single(folder.join(SINGLE))?,
            None if folder.join(INDEX).symlink_metadata().is_ok() => open_sharded(&folder)?,
            None => return Err(without_weights(&folder)),
        };
        let checkpoint = Self::new(path, config, opened)?;
        if metadata.is_dir() {
            checkpoint.check_loaded(&WeightFiles::open(&folder)?)?;
        }
        Ok(checkpoint)
    }

    /// The same from memory: a config and the bytes of one safetensors file, under a name for messages.
    ///
    /// # Errors
    /// As [`Checkpoint::open`], without `is_io`.
    pub fn from_memory(config: &[u8], weights: Vec<u8>, name: &str) -> Result<Self> {
        let path = Path::new(name);
        let mut parsed = Config::parse(config, path)?;
        parsed.spec.name = name.to_owned();
        Self::new(path, parsed, open_held(weights, path.to_owned())?)
    }

    /// Gives it another name than that of its folder.
    pub(super) fn set_name(&mut self, name: &str) {
        name.clone_into(&mut self.config.spec.name);
    }

    fn new(path: &Path, config: Config, (shards, tensors): Opened) -> Result<Self> {
        config.check_stored(path)?;
        let mut checkpoint = Self { path: path.to_owned(), config, shards, tensors };
        checkpoint.config.spec.prefix = checkpoint.find_prefix()?.to_owned();
        checkpoint.count_biases()?;
        checkpoint.count_fp8();
        let family = checkpoint.config.family;
        let known: BTreeSet<usize> = checkpoint.config.spec.layers.iter().map(|layer| layer.number).collect();
        for number in (0..=checkpoint.config.layers).filter(|number| !known.contains(number)) {
            let tensor = format!("{}{}.weight", checkpoint.prefix(), at(family.qkv.first(), number));
            if checkpoint.has_tensor(&tensor) {
                // Layers for multi-token prediction lie behind the model's own; a config that leaves some out looks the same.
                tracing::warn!(tensor, "{}: ignored: weights of a layer that the config does not list", path.display());
            }
        }
        checkpoint.warn_of_unread();
        Ok(checkpoint)
    }

    /// Says which tensors would change the attention if anybody applied them, and are not read, as the config knows nothing of them.
    fn warn_of_unread(&self) {
        let strange = |name: &&String| {
            let norm =
                self.config.spec.qk_norm.is_none() && [".q_norm.", ".k_norm."].iter().any(|part| name.contains(part));
            norm || name.contains(".lora_")
        };
        if let Some(tensor) = self.tensors.keys().filter(strange).min() {
            tracing::warn!(tensor, "{}: ignored, since the config does not list it", self.path.display());
        }
    }

    /// What the attention is.
    pub fn spec(&self) -> &AttentionSpec {
        &self.config.spec
    }

    /// The text model's part of the config.
    pub(super) fn settings(&self) -> &serde_json::Map<String, serde_json::Value> {
        &self.config.settings
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that it is read from: config, index, shards. None of a checkpoint from memory is there.
    pub fn files(&self) -> Vec<PathBuf> {
        if self.shards.iter().any(|shard| matches!(shard.map, Content::Held(_))) {
            return vec![];
        }
        let folder = if self.path.is_dir() { Some(&*self.path) } else { self.path.parent() };
        let beside = folder.into_iter().flat_map(|folder| ["config.json", INDEX].map(|name| folder.join(name)));
        beside.chain(self.shards.iter().map(|shard| shard.path.clone())).collect()
    }

    /// Refuses files of a folder from which an engine or transformers would load other values for attention than were read here: they
    /// load every tensor of every file, and the index says only which files there are.
    ///
    /// # Errors
    /// `is_format`, with the tensor and its file.
    pub(crate) fn check_loaded(&self, files: &WeightFiles) -> Result<()> {
        let (own, probe) = (self.prefix(), self.probe());
        let others = self.config.prefixes.iter().copied().filter(|other| *other != own);
        let mut stored = others.filter(|other| {
            let name = format!("{other}{probe}");
            self.tensors.contains_key(&name) || files.tensors().any(|tensor| tensor.name == name)
        });
        if let Some(other) = stored.next() {
            let rule =
                format_args!("has `{own}{probe}` and `{other}{probe}`: remove the model that is not to be served");
            return Err(Error::format(&self.path, rule));
        }
        let stems = self.attention_stems();
        let read =
            |tensor: &RawTensor<'_>| tensor.name.rsplit_once('.').is_some_and(|(stem, _)| stems.contains_key(stem));
        let folder = if self.path.is_dir() { Some(&*self.path) } else { self.path.parent() };
        let folder = folder.unwrap_or(Path::new(""));
        for tensor in files.tensors().filter(read) {
            let broken = |rule: std::fmt::Arguments<'_>| {
                Err(Error::format(&folder.join(tensor.file), format_args!("tensor `{}` {rule}", tensor.name)))
            };
            let Some(entry) = self.tensors.get(tensor.name) else {
                return broken(format_args!(
                    "is not in the index, but engines load every tensor of its file: add it to the index or remove it"
                ));
            };
            let shard = &self.shards[entry.shard];
            if shard.path == folder.join(tensor.file) {
                // The tensor that was read.
                continue;
            }
            let own = shard.map.get(shard.data + entry.start..shard.data + entry.end).unwrap_or_default();
            if (entry.dtype, &*entry.shape, own) != (tensor.dtype, tensor.shape, tensor.bytes) {
                return broken(format_args!(
                    "has other values in {}, and which of them an engine uses depends on the order of files: remove one",
                    shard.path.display()
                ));
            }
        }
        Ok(())
    }

    /// Layers of the model, also those without attention.
    pub(crate) fn layer_count(&self) -> usize {
        self.config.layers
    }

    /// The scales of the stored q, k and v projections of a layer; `None` where they are not all E4M3 tensors of their own.
    pub(crate) fn weight_scales(&self, layer: usize) -> Result<Option<WeightScales>> {
        let names = self.config.names(self.spec().layer(layer)?);
        let places = [&names.q, &names.k, &names.v].map(|place| self.named(&place.name, &["weight"]));
        let mut scales = WeightScales { values: vec![], blocks: false };
        for name in &places {
            let Some(entry) = self.tensors.get(name).filter(|entry| entry.dtype == safetensors::Dtype::F8_E4M3) else {
                return Ok(None);
            };
            let base = name.strip_suffix("weight").unwrap_or(name);
            let stored = ["weight_scale_inv", "weight_scale"].map(|end| format!("{base}{end}"));
            let Some((name, scale)) = stored.iter().find_map(|name| Some((name, self.tensors.get(name)?))) else {
                return Ok(None);
            };
            let one_a_row = |n: usize| Some(&n) == entry.shape.first();
            scales.blocks |= match scale.shape.as_slice() {
                [] | [1] | [1, 1] => false,
                [n] | [n, 1] if one_a_row(*n) => false,
                _ => true,
            };
            scales.values.push(self.scale_values(name, scale)?);
        }
        // Of a fused tensor there is one scale.
        let fused = places[0] == places[1];
        Ok((!fused || scales.blocks).then_some(scales))
    }

    /// Names of the tensors that layers read, without their last part, and whether a bias of it is read.
    pub(crate) fn attention_stems(&self) -> HashMap<String, bool> {
        let spec = self.spec();
        let mut stems = HashMap::new();
        for layer in &spec.layers {
            let names = self.config.names(layer);
            let projections =
                [(&names.q.name, spec.bias.q), (&names.k.name, spec.bias.k), (&names.v.name, spec.bias.v)];
            let mla = names.mla.iter().flat_map(|mla| {
                mla.q_norm.iter().chain([&mla.kv_norm]).map(|name| (name, false)).chain([(&mla.k_pe.name, true)])
            });
            let shift = spec.qk_norm_of(layer).is_some_and(|norm| norm.shift);
            let qk = names.qk_norm.iter().flat_map(|(q, k)| [(q, shift), (k, shift)]);
            let norms = names.norm.iter().map(|name| (name, spec.norm.shift)).chain(qk);
            for (stem, bias) in projections.into_iter().chain(mla).chain(norms) {
                let heads = if stem.contains("{h}") { layer.n_q_heads } else { 1 };
                for head in 0..heads {
                    let name = format!("{}{}", self.prefix(), stem.replace("{h}", &head.to_string()));
                    *stems.entry(name).or_default() |= bias;
                }
            }
        }
        stems
    }

    /// What stands in front of the family's tensor names in this file (`model.`, `transformer.`, nothing, ...).
    pub fn prefix(&self) -> &str {
        &self.config.spec.prefix
    }

    /// True if a tensor of this name is stored.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Any floating tensor by its full stored name; E4M3 comes with the scale that stands beside it.
    ///
    /// # Errors
    /// `is_format` if there is none of this name, or its type is not read.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        let entry = self.entry(name)?;
        let (rows, cols) = match entry.shape.as_slice() {
            [] => (1, 1),
            [n] => (1, *n),
            [leading @ .., cols] => (leading.iter().product(), *cols),
        };
        Ok(StoredTensor { view: self.view(name, entry, rows, cols)?, shape: entry.shape.clone() })
    }

    /// The weights of one layer as views.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer; `is_format` if a tensor is missing or has the wrong shape or type;
    /// `is_non_finite` if a norm vector or a bias holds a NaN or an infinity.
    pub fn layer(&self, layer: usize) -> Result<LayerWeights<'_>> {
        let spec = &self.config.spec;
        let own = spec.layer(layer).map_err(|error| error.within(self.path.display()))?;
        let names = self.config.names(own);
        let (q, k, v) = self.projections(own, &names)?;
        let (norm_gain, norm_shift) = match &names.norm {
            Some(name) => {
                let stored =
                    |streams: usize| self.vector(&self.named(name, &["weight", "gamma"]), streams * spec.d_model);
                let gain = match (spec.norm.gain, spec.streams) {
                    (GainForm::Unit, _) => None,
                    (_, None) => Some(stored(1)?),
                    (_, Some(streams)) => {
                        Some(mean_of_streams(&stored(streams)?, self.config.family.norm.gain, streams))
                    }
                };
                let shift = match spec.norm.shift {
                    true => Some(self.vector(&self.named(name, &["bias", "beta"]), spec.d_model)?),
                    false => None,
                };
                (gain, shift)
            }
            None => (None, None),
        };
        self.check_input_scales(&names, norm_gain.as_deref(), norm_shift.as_deref())?;
        let (q_norm, k_norm) = match (&self.config.family.qk_norm, &names.qk_norm) {
            (Some(rule), Some((q, k))) => {
                let read = |name, heads| self.qk_norm(rule, name, heads, own.d_head).map(Some);
                (read(q, own.n_q_heads)?, read(k, own.n_kv_heads)?)
            }
            _ => (None, None),
        };
        let mla = self.mla(own, &names)?;
        let mut weights = LayerWeights { layer, q, k, v, norm_gain, norm_shift, q_norm, k_norm, mla };
        if self.config.in_f16 {
            super::f16::check(spec, &weights).map_err(|error| error.within(spec.place(layer)))?;
        }
        if let Some(factors) = spec.multipliers {
            multiply(&mut weights, factors);
        }
        Ok(weights)
    }

    /// The learned sink logits of one layer, a query head each; `None` where the family has none.
    ///
    /// # Errors
    /// As [`Checkpoint::layer`].
    pub fn sinks(&self, layer: usize) -> Result<Option<Vec<f64>>> {
        let own = self.config.spec.layer(layer).map_err(|error| error.within(self.path.display()))?;
        let name = self.config.family.sinks.map(|name| format!("{}{}", self.prefix(), at(name, own.number)));
        name.map(|name| self.vector(&name, own.n_q_heads)).transpose()
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).ok_or_else(|| Error::format(&self.path, format_args!("tensor `{name}` is missing")))
    }

    /// An error about one tensor, with the file that holds it.
    fn broken(&self, name: &str, entry: &Entry, rule: impl std::fmt::Display) -> Error {
        Error::format(&self.shards[entry.shard].path, format_args!("tensor `{name}` {rule}"))
    }

    fn find_prefix(&self) -> Result<&'static str> {
        let probe = self.probe();
        for prefix in &self.config.prefixes {
            self.check_plain(&format!("{prefix}{}", probe.trim_end_matches("weight")))?;
        }
        self.fitting_prefixes().next().ok_or_else(|| {
            let family = self.config.family.name;
            let rule = format_args!(
                "found no tensor `{}` (with any known prefix), which family `{family}` needs: check that the weights belong \
                 to this config",
                self.probe()
            );
            Error::format(&self.path, rule)
        })
    }

    /// A tensor that the first layer with attention has, without prefix.
    fn probe(&self) -> String {
        let first = self.config.spec.layers.first().map_or(0, |layer| layer.number);
        at(self.config.family.qkv.first(), first) + ".weight"
    }

    /// What may stand in front of the family's tensor names and does, in the order in which it is tried.
    fn fitting_prefixes(&self) -> impl Iterator<Item = &'static str> {
        let probe = self.probe();
        let fits = move |prefix: &&str| self.tensors.contains_key(&format!("{prefix}{probe}"));
        self.config.prefixes.iter().copied().filter(fits)
    }

    /// A bias that is stored counts even where the config has none. One that is missing is found out by the layer.
    ///
    /// Without a shift the constant of a projection is its bias alone, so bounds with it hold without it too. With a
    /// shift the two can cancel, and a config that contradicts its file is refused.
    fn count_biases(&mut self) -> Result<()> {
        let stored = |template: &str| {
            let name = |layer: &LayerSpec| format!("{}{}.bias", self.prefix(), at(template, layer.number));
            self.config.spec.layers.iter().map(name).find(|name| self.tensors.contains_key(name))
        };
        let (q, k, v) = match self.config.family.qkv {
            QkvTensors::Separate { q, k, v } | QkvTensors::Gated { q, k, v } => (stored(q), stored(k), stored(v)),
            QkvTensors::Concat { name, .. } | QkvTensors::Grouped { name } => {
                let stored = stored(name);
                (stored.clone(), stored.clone(), stored)
            }
            QkvTensors::Latent { q, q_b, kv_b, .. } => {
                if let Some(name) = [q, q_b, kv_b].into_iter().find_map(stored) {
                    let rule = format_args!("tensor `{name}` is a bias where latent attention has none");
                    return Err(Error::format(&self.path, rule));
                }
                return Ok(());
            }
        };
        let spec = &mut self.config.spec;
        for (flag, stored) in [(&mut spec.bias.q, q), (&mut spec.bias.k, k), (&mut spec.bias.v, v)] {
            let Some(name) = stored else { continue };
            if !*flag && spec.norm.shift {
                let rule = format_args!("tensor `{name}` is a bias, but the config says that there is none");
                return Err(Error::format(&self.path, rule));
            }
            *flag = true;
        }
        Ok(())
    }

    /// The first stored of `name.suffix`, else the name with the first suffix (for the message).
    pub(super) fn named(&self, name: &str, suffixes: &[&str]) -> String {
        let full = |suffix: &&str| format!("{}{name}.{suffix}", self.prefix());
        suffixes.iter().map(full).find(|n| self.tensors.contains_key(n)).unwrap_or_else(|| full(&suffixes[0]))
    }

    /// Projections that are stored in E4M3 may read their input in it too, whatever the config says.
    fn count_fp8(&mut self) {
        let stored = |layer: &LayerSpec| {
            let names = self.config.names(layer);
            let k_pe = names.mla.map(|mla| mla.k_pe);
            [names.q, names.k, names.v].iter().chain(&k_pe).any(|place| {
                let entry = self.tensors.get(&self.named(&place.name, &["weight"]));
                entry.is_some_and(|entry| entry.dtype == safetensors::Dtype::F8_E4M3)
            })
        };
        if self.config.spec.layers.iter().any(stored) {
            self.config.spec.fp8_inputs = true;
        }
    }

    /// A static scale of the projections' input that is stored beside them. Above the largest that an element can need, it rounds
    /// more of the input than the bounds count; an input clipped by a smaller one is shorter, but has a mean.
    fn check_input_scales(&self, names: &LayerNames, gain: Option<&[f64]>, shift: Option<&[f64]>) -> Result<()> {
        let norm = self.config.spec.norm;
        if norm.kind == NormKind::None {
            return Ok(());
        }
        let form = |g: &f64| if norm.gain == GainForm::OnePlus { 1.0 + g } else { *g };
        let largest = |most: f64, x: f64| most.max(x.abs());
        let gain = gain.map_or(1.0, |gain| gain.iter().map(form).fold(0.0, largest));
        let shift = shift.map_or(0.0, |shift| shift.iter().copied().fold(0.0, largest));
        let most = ((self.config.spec.d_model as f64).sqrt() * gain + shift) / f64::from(E4M3_MAX);
        for place in [&names.q, &names.k, &names.v] {
            let name = self.named(&place.name, &["input_scale", "activation_scale"]);
            let Some(entry) = self.tensors.get(&name) else { continue };
            if norm.kind == NormKind::LayerNorm {
                let rule =
                    format_args!("tensor `{name}` is a static input scale, which is not supported after a LayerNorm");
                return Err(refuse(&self.shards[entry.shard].path, rule));
            }
            for scale in self.read(&name, entry)? {
                if !(scale > 0.0 && scale <= most) {
                    let rule = format_args!(
                        "tensor `{name}` is an input scale of {scale:e}, and no input of this layer needs one above {most:e}: \
                         use dynamic scales, or calibrate it anew"
                    );
                    return Err(refuse(&self.shards[entry.shard].path, rule));
                }
            }
        }
        Ok(())
    }

    fn projections(
        &self,
        layer: &LayerSpec,
        names: &LayerNames,
    ) -> Result<(Projection<'_>, Projection<'_>, Projection<'_>)> {
        let spec = &self.config.spec;
        let one = |place: &ProjectionName, (rows, inputs): (usize, usize), bias: bool| {
            self.check_plain(&format!("{}{}.", self.prefix(), place.name))?;
            let weight = self.matrix(&self.named(&place.name, &["weight"]), place.channels, inputs, place.conv1d)?;
            let bias = self.bias(&place.name, place.channels, bias)?;
            Ok(self.projection(place, rows, &weight, bias.as_deref()))
        };
        let (r, d) = (layer.d_head, spec.d_model);
        let [q, k, v] = match layer.mla {
            Some(mla) => [(r, mla.q_inputs(d)), (mla.d_nope, mla.kv_rank), (mla.d_value, mla.kv_rank)],
            None => [(r, d); 3],
        };
        Ok((one(&names.q, q, spec.bias.q)?, one(&names.k, k, spec.bias.k)?, one(&names.v, v, spec.bias.v)?))
    }

    /// What latent attention has beside. A bias that is stored counts: of the shared key alone, since norms follow the others.
    fn mla(&self, layer: &LayerSpec, names: &LayerNames) -> Result<Option<MlaWeights<'_>>> {
        let (Some(mla), Some(names)) = (layer.mla, &names.mla) else { return Ok(None) };
        let gain = |name: &str, rank: usize| self.vector(&self.named(name, &["weight"]), rank);
        let place = &names.k_pe;
        self.check_plain(&format!("{}{}.", self.prefix(), place.name))?;
        let weight = self.matrix(&self.named(&place.name, &["weight"]), place.channels, self.spec().d_model, false)?;
        let stored = self.has_tensor(&self.named(&place.name, &["bias"]));
        let bias = self.bias(&place.name, place.channels, self.has_shared_key_bias() || stored)?;
        Ok(Some(MlaWeights {
            q_gain: names.q_norm.as_ref().zip(mla.q_rank).map(|(name, rank)| gain(name, rank)).transpose()?,
            kv_gain: gain(&names.kv_norm, mla.kv_rank)?,
            k_pe: self.projection(place, mla.d_rope, &weight, bias.as_deref()),
        }))
    }

    /// Whether the config says that the shared rotated key of latent attention has a bias.
    fn has_shared_key_bias(&self) -> bool {
        self.settings().get("attention_bias").and_then(serde_json::Value::as_bool) == Some(true)
    }

    fn projection<'a>(
        &self,
        place: &ProjectionName,
        r: usize,
        weight: &MatrixView<'a>,
        bias: Option<&[f64]>,
    ) -> Projection<'a> {
        let rows = &place.heads;
        Projection {
            heads: rows.iter().map(|&row| weight.slice_rows(row, r)).collect(),
            bias: bias.map(|b| rows.iter().flat_map(|&row| &b[row..row + r]).copied().collect()),
            name: {
                let name = format!("{}{}.weight", self.prefix(), place.name);
                let file = self.tensors.get(&name).map_or(&*self.path, |entry| &self.shards[entry.shard].path);
                format!("{}: {name}", file.display())
            },
        }
    }

    fn bias(&self, name: &str, rows: usize, wanted: bool) -> Result<Option<Vec<f64>>> {
        let name = self.named(name, &["bias"]);
        if !wanted {
            return Ok(None);
        }
        if !self.tensors.contains_key(&name) {
            let rule = format_args!("tensor `{name}` is missing, although the config or another layer has this bias");
            return Err(Error::format(&self.path, rule));
        }
        self.vector(&name, rows).map(Some)
    }

    fn qk_norm(&self, rule: &QkNormRule, name: &str, heads: usize, r: usize) -> Result<NormVectors> {
        let read = |suffix: &str| -> Result<Vec<f64>> {
            match rule.stored {
                QkNormStored::Shared => self.vector(&self.named(name, &[suffix]), r),
                QkNormStored::Flat => self.vector(&self.named(name, &[suffix]), heads * r),
                QkNormStored::PerHead => self.values(&self.named(name, &[suffix]), &[heads, r]),
                QkNormStored::Nothing => Ok(vec![1.0; r]),
                QkNormStored::TensorPerHead => {
                    let mut all = Vec::with_capacity(heads * r);
                    for h in 0..heads {
                        let name = name.replace("{h}", &h.to_string());
                        all.extend(self.vector(&self.named(&name, &[suffix]), r)?);
                    }
                    Ok(all)
                }
            }
        };
        let gain = read("weight")?;
        let shift = if rule.norm.shift { Some(read("bias")?) } else { None };
        Ok(NormVectors { gain, shift })
    }

    /// A projection as `rows x cols` (out x in), whatever its orientation in storage.
    pub(super) fn matrix(&self, name: &str, rows: usize, cols: usize, conv1d: bool) -> Result<MatrixView<'_>> {
        let entry = self.entry(name)?;
        let stored = if conv1d { (cols, rows) } else { (rows, cols) };
        if entry.shape != [stored.0, stored.1] {
            return Err(self.broken(
                name,
                entry,
                format_args!("has shape {:?}, but the config needs [{}, {}]", entry.shape, stored.0, stored.1),
            ));
        }
        let view = self.view(name, entry, stored.0, stored.1)?;
        Ok(if conv1d { view.transpose() } else { view })
    }

    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Vec<f64>> {
        self.values(name, &[len])
    }

    /// A small tensor of exactly this shape, all finite.
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>> {
        let entry = self.entry(name)?;
        if entry.shape != shape {
            return Err(self.broken(
                name,
                entry,
                format_args!("has shape {:?}, but the config needs {shape:?}", entry.shape),
            ));
        }
        if entry.dtype == safetensors::Dtype::F8_E4M3 {
            return Err(self.broken(name, entry, "is a vector in FP8, which is not supported"));
        }
        let values = self.read(name, entry)?;
        if values.iter().any(|x| !x.is_finite()) {
            return Err(Error::non_finite(format_args!(
                "{}: tensor `{name}` contains NaN or infinity",
                self.shards[entry.shard].path.display()
            )));
        }
        Ok(values)
    }

    fn read(&self, name: &str, entry: &Entry) -> Result<Vec<f64>> {
        let len = entry.shape.iter().product();
        let view = self.plain_view(name, entry, 1, len)?;
        let mut values = vec![0.0; len];
        let columns = values.len();
        view.read_block(0..1, 0..columns, &mut values);
        Ok(values)
    }

    /// The scales of a weight: numbers, or exponents of two (E8M0), which microscaling formats also store as bytes.
    fn scale_values(&self, name: &str, entry: &Entry) -> Result<Vec<f64>> {
        let exponents = entry.dtype == safetensors::Dtype::F8_E8M0
            || entry.dtype == safetensors::Dtype::U8 && self.config.stored.tile == Some(MICRO_TILE);
        if !exponents {
            return self.read(name, entry);
        }
        const BIAS: i32 = 127;
        let value = |byte: &u8| if *byte == u8::MAX { f64::NAN } else { 2f64.powi(i32::from(*byte) - BIAS) };
        let shard = &self.shards[entry.shard];
        let bytes = shard.map.get(shard.data + entry.start..shard.data + entry.end);
        let bytes = bytes.ok_or_else(|| self.broken(name, entry, "has offsets outside the file"))?;
        Ok(bytes.iter().map(value).collect())
    }

    /// Refuses weights of a projection that are stored in a form which is not multiplied as it is, by the tensor.
    fn check_plain(&self, base: &str) -> Result<()> {
        const PACKED: [&str; 4] = ["qweight", "weight_packed", "weight.absmax", "W_q"];
        let refuse = |name: &str, entry: &Entry, rule: std::fmt::Arguments<'_>| {
            // Of a stream that has only names there is no file.
            let file = self.shards.get(entry.shard).map_or(&*self.path, |shard| &shard.path);
            Err(refuse(file, format_args!("tensor `{name}` {rule}")))
        };
        const NEEDED: &str =
            "bounds need q, k and v in F64, F32, F16, BF16 or scaled E4M3 (keep attention out of the quantization)";
        for name in PACKED.map(|end| format!("{base}{end}")) {
            if let Some(entry) = self.tensors.get(&name) {
                return refuse(&name, entry, format_args!("is of packed weights ({:?}): {NEEDED}", entry.dtype));
            }
        }
        let factors = format!("{base}pre_quant_scale");
        if let Some(entry) = self.tensors.get(&factors) {
            return refuse(
                &factors,
                entry,
                format_args!("multiplies the projection's input, which bounds do not count"),
            );
        }
        let name = format!("{base}weight");
        match self.tensors.get(&name) {
            Some(entry) if !is_float(entry.dtype) => {
                refuse(&name, entry, format_args!("is of packed or integer weights ({:?}): {NEEDED}", entry.dtype))
            }
            _ => Ok(()),
        }
    }

    fn plain_view(&self, name: &str, entry: &Entry, rows: usize, cols: usize) -> Result<MatrixView<'_>> {
        let dtype = match entry.dtype {
            safetensors::Dtype::F64 => Dtype::F64,
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::F8_E4M3 => Dtype::E4m3,
            other => {
                let rule = format_args!("has type {other:?}, but only F64, F32, F16, BF16 and F8_E4M3 are supported");
                return Err(self.broken(name, entry, rule));
            }
        };
        let shard = &self.shards[entry.shard];
        let bytes = shard.map.get(shard.data + entry.start..shard.data + entry.end);
        let bytes = bytes.ok_or_else(|| self.broken(name, entry, "has offsets outside the file"))?;
        MatrixView::dense(bytes, dtype, rows, cols).map_err(|e| e.within(shard.path.display()))
    }

    fn view(&self, name: &str, entry: &Entry, rows: usize, cols: usize) -> Result<MatrixView<'_>> {
        let view = self.plain_view(name, entry, rows, cols)?;
        if view.dtype() != Dtype::E4m3 {
            return Ok(view);
        }
        let base = name.strip_suffix("weight").unwrap_or(name);
        let names = [format!("{base}weight_scale_inv"), format!("{base}weight_scale")];
        let mut stored = names.iter().filter_map(|name| Some((name, self.tensors.get(name)?)));
        let Some((scale_name, scale)) = stored.next() else {
            return Err(self.broken(name, entry, "is E4M3, but has neither `weight_scale` nor `weight_scale_inv`"));
        };
        if let Some((other, again)) = stored.next()
            && self.scale_values(other, again)? != self.scale_values(scale_name, scale)?
        {
            let rule = format_args!("has two different scales, `{scale_name}` and `{other}`: remove the wrong one");
            return Err(self.broken(name, entry, rule));
        }
        let needs = |what: &str| {
            self.broken(scale_name, scale, format_args!("has shape {:?}, but {what} for `{name}`", scale.shape))
        };
        let (grid, block) = match scale.shape.as_slice() {
            // A side of zero would divide by zero below.
            [] | [1] | [1, 1] => ((1, 1), (rows.max(1), cols.max(1))),
            [n] | [n, 1] if *n == rows => ((rows, 1), (1, cols.max(1))),
            [grid_rows, grid_cols] => {
                let tile = self.config.stored.tile;
                let block = tile
                    .ok_or_else(|| needs("the config has no tile size (`weight_block_size` or `block_structure`)"))?;
                let grid = (rows.div_ceil(block.0), cols.div_ceil(block.1));
                if grid != (*grid_rows, *grid_cols) {
                    let rule = format!("tiles of {} x {} need [{}, {}]", block.0, block.1, grid.0, grid.1);
                    return Err(needs(&rule));
                }
                ((*grid_rows, *grid_cols), block)
            }
            _ => return Err(needs("expected one value, one per row or one per tile")),
        };
        if scale.dtype == safetensors::Dtype::F8_E4M3 {
            return Err(self.broken(scale_name, scale, "is a scale in FP8, which is not supported"));
        }
        let values: Arc<[f32]> = self.scale_values(scale_name, scale)?.into_iter().map(|x| x as f32).collect();
        if values.iter().any(|x| !x.is_finite()) {
            return Err(Error::non_finite(format_args!(
                "{}: tensor `{scale_name}` contains NaN or infinity",
                self.shards[scale.shard].path.display()
            )));
        }
        if let Some(negative) = values.iter().find(|x| **x < 0.0) {
            let rule = format_args!("contains {negative}: a weight scale must not be negative");
            return Err(self.broken(scale_name, scale, rule));
        }
        debug_assert_eq!(values.len(), grid.0 * grid.1);
        view.with_scale(BlockScale { values, block, grid_cols: grid.1 })
    }
}

/// Whether values of a type are numbers that a product reads.
fn is_float(dtype: safetensors::Dtype) -> bool {
    use safetensors::Dtype as D;
    matches!(dtype, D::F64 | D::F32 | D::F16 | D::BF16 | D::F8_E4M3)
}

/// Puts factors beside the weights into the norm's gain and the keys.
fn multiply(weights: &mut LayerWeights<'_>, factors: Multipliers) {
    weights.norm_gain.iter_mut().flatten().for_each(|g| *g *= factors.input);
    // Views hold factors in f32: none below what the model multiplies by.
    let mut key = factors.key as f32;
    if f64::from(key).abs() < factors.key.abs() {
        key = if key >= 0.0 { key.next_up() } else { key.next_down() };
    }
    weights.k.heads.iter_mut().for_each(|head| *head = head.scaled(key));
    weights.k.bias.iter_mut().flatten().for_each(|b| *b *= f64::from(key));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_shared_by_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Checkpoint>();
    }
}
