//! Tensors that arrive one by one, in any order, as a weight sync sends them.
//!
//! A layer can be read once all its tensors are there, and they are dropped when it has been read: where tensors come layer by
//! layer, those of one layer are held.

use super::{Checkpoint, Content, Entry, QkNormStored, Shard};
use crate::error::{Error, Result};
use crate::model::config::Config;
use crate::model::layout::{LayerNames, ProjectionName};
use crate::model::spec::{AttentionSpec, GainForm, QkNormScope};
use crate::model::weights::LayerWeights;
use safetensors::Dtype;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// The attention tensors of a model while they arrive.
pub struct LayerStream {
    checkpoint: Checkpoint,
    layers: Vec<Layer>,
    /// The layers that read a tensor, by its name without the prefix.
    readers: HashMap<String, Vec<usize>>,
    prefix: Option<&'static str>,
    free: Vec<usize>,
}

/// One layer's part of it.
struct Layer {
    /// What has to be there: of each entry one of the names.
    needs: Vec<Vec<String>>,
    /// Weights that need a scale beside them where they are E4M3.
    weights: Vec<String>,
    read: bool,
}

impl LayerStream {
    /// A stream of the model of this `config.json`; `file` names it in messages. `names`, those of all tensors to come, are only
    /// needed where the config does not tell of a bias that is stored.
    ///
    /// # Errors
    /// As [`AttentionSpec::from_config_json`]; `is_format` if a name is a bias that the config rules out.
    pub fn new(config: &[u8], file: &Path, names: &[String]) -> Result<Self> {
        let config = Config::parse(config, file)?;
        config.check_stored(file)?;
        let mut checkpoint = Checkpoint { path: file.to_owned(), config, shards: vec![], tensors: HashMap::new() };
        // The names alone, for as long as biases are counted.
        let place = Entry { shard: 0, dtype: Dtype::F32, shape: vec![], start: 0, end: 0 };
        checkpoint.tensors.extend(names.iter().map(|name| (name.clone(), place.clone())));
        if let Ok(prefix) = checkpoint.find_prefix() {
            checkpoint.config.spec.prefix = prefix.to_owned();
            checkpoint.count_biases()?;
        }
        checkpoint.tensors.clear();
        let stream = Self { layers: vec![], readers: HashMap::new(), prefix: None, free: vec![], checkpoint };
        Ok(stream.begun())
    }

    /// The same of one tensor-parallel rank of `ranks`: its share of every layer's heads, in tensors laid out as the family's own.
    /// KV heads are shared out, or each is on as many ranks where there are fewer.
    ///
    /// # Errors
    /// `is_argument` if the heads cannot be shared out evenly, `is_unsupported` if q and k are normalized over all heads together.
    pub fn of_rank(mut self, ranks: usize) -> Result<Self> {
        let spec = &mut self.checkpoint.config.spec;
        if ranks != 1 && spec.qk_norm.is_some_and(|norm| norm.scope == QkNormScope::Joint) {
            return Err(Error::unsupported(
                "q or k are normalized over all heads together, but a rank holds only some of them: pass ranks=1",
            ));
        }
        for layer in &mut spec.layers {
            let n_kv = if layer.mla.is_some() { layer.n_q_heads } else { layer.n_kv_heads };
            let uneven = |a: usize, b: usize| b == 0 || !a.is_multiple_of(b);
            if uneven(layer.n_q_heads, ranks) || (uneven(n_kv, ranks) && uneven(ranks, n_kv)) {
                return Err(Error::argument(format_args!(
                    "{ranks} ranks cannot share {} query and {n_kv} KV heads evenly",
                    layer.n_q_heads
                )));
            }
            layer.n_q_heads /= ranks;
            layer.n_kv_heads = (n_kv / ranks).max(1);
        }
        (self.layers, self.readers) = (vec![], HashMap::new());
        Ok(self.begun())
    }

    /// With the layers that wait for their tensors.
    fn begun(mut self) -> Self {
        let stream = &mut self;
        for index in 0..stream.spec().layers.len() {
            let layer = stream.needs(index);
            let scales = layer.weights.iter().flat_map(|weight| scales_of(weight));
            for name in layer.needs.iter().flatten().cloned().chain(scales) {
                let readers = stream.readers.entry(name).or_default();
                if readers.last() != Some(&index) {
                    readers.push(index);
                }
            }
            stream.layers.push(layer);
        }
        self
    }

    /// What the attention is.
    pub fn spec(&self) -> &AttentionSpec {
        self.checkpoint.spec()
    }

    /// Names of a layer's tensors, without prefix.
    pub fn names(&self, layer: usize) -> LayerNames {
        self.checkpoint.config.names(&self.spec().layers[layer])
    }

    /// What a layer waits for: of each entry one of the names, without prefix.
    pub fn wanted(&self, layer: usize) -> &[Vec<String>] {
        &self.layers[layer].needs
    }

    /// What may stand in front of every name.
    pub fn prefixes(&self) -> &[&'static str] {
        &self.checkpoint.config.prefixes
    }

    fn needs(&self, index: usize) -> Layer {
        let checkpoint = &self.checkpoint;
        let config = &checkpoint.config;
        let (spec, own) = (&config.spec, &config.spec.layers[index]);
        let names = config.names(own);
        let with = |name: &str, suffixes: &[&str]| -> Vec<String> {
            suffixes.iter().map(|suffix| format!("{name}.{suffix}")).collect()
        };
        let projections: [(&ProjectionName, bool); 3] =
            [(&names.q, spec.bias.q), (&names.k, spec.bias.k), (&names.v, spec.bias.v)];
        let mut needs = Vec::new();
        for (place, bias) in projections {
            needs.push(with(&place.name, &["weight"]));
            if bias {
                needs.push(with(&place.name, &["bias"]));
            }
        }
        let mut weights = projections.map(|(place, _)| format!("{}.weight", place.name)).to_vec();
        if let Some(mla) = &names.mla {
            needs.push(with(&mla.k_pe.name, &["weight"]));
            if checkpoint.has_shared_key_bias() {
                needs.push(with(&mla.k_pe.name, &["bias"]));
            }
            needs.extend(mla.q_norm.iter().chain([&mla.kv_norm]).map(|name| with(name, &["weight"])));
            weights.push(format!("{}.weight", mla.k_pe.name));
        }
        if let Some(name) = &names.norm {
            if spec.norm.gain != GainForm::Unit {
                needs.push(with(name, &["weight", "gamma"]));
            }
            if spec.norm.shift {
                needs.push(with(name, &["bias", "beta"]));
            }
        }
        if let (Some(rule), Some((q, k))) = (&config.family.qk_norm, &names.qk_norm) {
            for (name, heads) in [(q, own.n_q_heads), (k, own.n_kv_heads)] {
                let heads = if rule.stored == QkNormStored::TensorPerHead { heads } else { 1 };
                for head in 0..heads {
                    let name = name.replace("{h}", &head.to_string());
                    needs.push(with(&name, &["weight"]));
                    if rule.norm.shift {
                        needs.push(with(&name, &["bias"]));
                    }
                }
            }
        }
        needs.sort_unstable();
        needs.dedup();
        weights.dedup();
        Layer { needs, weights, read: false }
    }

    /// Takes a tensor of any name, little-endian values of the stored shape, and gives the layers that can be read now, by their
    /// place among those with attention. A tensor that no layer's attention reads is not held.
    ///
    /// # Errors
    /// `is_format` if it has other bytes than its type and shape ask for, came before, or contradicts the config.
    pub fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Result<Vec<usize>> {
        let length = shape.iter().try_fold(1usize, |n, side| n.checked_mul(*side));
        let wanted = length.and_then(|n| n.checked_mul(dtype.bitsize())).map(|bits| bits / 8);
        if wanted != Some(bytes.len()) && self.wants(name) {
            return Err(Error::format(
                &self.checkpoint.path,
                format_args!(
                    "tensor `{name}` has {} bytes, which does not fit {dtype:?} of shape {shape:?}",
                    bytes.len()
                ),
            ));
        }
        self.enter(name, dtype, shape, bytes)
    }

    /// The same of a tensor whose values are held elsewhere, on a device: layers are complete as with [`LayerStream::push`], and
    /// [`LayerStream::layer`] refuses to read them.
    ///
    /// # Errors
    /// As [`LayerStream::push`].
    pub fn note(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Vec<usize>> {
        self.enter(name, dtype, shape, Vec::new())
    }

    fn enter(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Result<Vec<usize>> {
        let broken = |rule: std::fmt::Arguments<'_>| {
            Err(Error::format(&self.checkpoint.path, format_args!("tensor `{name}` {rule}")))
        };
        let prefixes = &self.checkpoint.config.prefixes;
        let fits = |prefix: &&&str| name.strip_prefix(**prefix).is_some_and(|rest| self.readers.contains_key(rest));
        let Some(&prefix) = prefixes.iter().find(fits) else {
            return match prefixes.iter().find_map(|prefix| self.bias_of(name.strip_prefix(prefix)?)) {
                Some(weight) => broken(format_args!(
                    "is a bias of `{weight}` that the config does not mention: pass all tensor names when the stream \
                     is created"
                )),
                None => Ok(vec![]),
            };
        };
        if self.prefix.is_some_and(|other| other != prefix) {
            return broken(format_args!(
                "has another prefix than tensors before it, so the text model cannot be identified"
            ));
        }
        let rest = &name[prefix.len()..];
        if self.readers[rest].iter().all(|layer| self.layers[*layer].read) || self.checkpoint.has_tensor(name) {
            return broken(format_args!("was already passed: create a new stream for new weights"));
        }
        if dtype == Dtype::F8_E4M3 && self.checkpoint.config.stored.mixed {
            self.checkpoint.config.spec.fp8_inputs = true;
        }
        if dtype == Dtype::F8_E4M3 && !self.spec().fp8_inputs {
            return broken(format_args!("is E4M3, but the config has no FP8 `quantization_config`"));
        }
        let end = bytes.len();
        self.prefix = Some(prefix);
        self.checkpoint.config.spec.prefix = prefix.to_owned();
        let shard = Shard { path: self.checkpoint.path.clone(), map: Content::Held(bytes), data: 0 };
        let place = match self.free.pop() {
            Some(place) => {
                self.checkpoint.shards[place] = shard;
                place
            }
            None => {
                self.checkpoint.shards.push(shard);
                self.checkpoint.shards.len() - 1
            }
        };
        let entry = Entry { shard: place, dtype, shape: shape.to_vec(), start: 0, end };
        self.checkpoint.tensors.insert(name.to_owned(), entry);
        Ok(self.readers[rest].iter().copied().filter(|layer| self.is_complete(&self.layers[*layer])).collect())
    }

    /// The weight whose bias this is, where no bias is expected.
    fn bias_of(&self, rest: &str) -> Option<String> {
        let weight = format!("{}.weight", rest.strip_suffix(".bias")?);
        self.layers.iter().any(|layer| layer.weights.contains(&weight)).then_some(weight)
    }

    /// Whether [`LayerStream::push`] does anything with a tensor of this name.
    pub fn wants(&self, name: &str) -> bool {
        let rests = || self.checkpoint.config.prefixes.iter().filter_map(|prefix| name.strip_prefix(prefix));
        rests().any(|rest| self.readers.contains_key(rest) || self.bias_of(rest).is_some())
    }

    /// Whether a name holds that of a tensor which a layer reads, without its last part: under another prefix, or as a part of it.
    pub fn resembles(&self, name: &str) -> bool {
        self.readers.keys().any(|own| own.rsplit_once('.').is_some_and(|(stem, _)| name.contains(stem)))
    }

    fn is_complete(&self, layer: &Layer) -> bool {
        let has = |name: &String| self.checkpoint.has_tensor(&self.full(name));
        let scaled = |weight: &String| match self.checkpoint.tensors.get(&self.full(weight)) {
            Some(entry) if entry.dtype == Dtype::F8_E4M3 => scales_of(weight).iter().any(has),
            _ => true,
        };
        !layer.read && layer.needs.iter().all(|names| names.iter().any(has)) && layer.weights.iter().all(scaled)
    }

    /// Whether all tensors of a layer are there, and it was not read yet.
    pub fn is_due(&self, layer: usize) -> bool {
        self.layers.get(layer).is_some_and(|layer| self.is_complete(layer))
    }

    /// The weights of a layer that is complete.
    ///
    /// # Errors
    /// As [`Checkpoint::layer`].
    pub fn layer(&self, layer: usize) -> Result<LayerWeights<'_>> {
        self.checkpoint.layer(layer)
    }

    /// Drops the tensors of a layer that has been read, but those that another one reads too.
    pub fn release(&mut self, layer: usize) {
        self.layers[layer].read = true;
        let prefix = self.prefix.unwrap_or_default();
        let held: Vec<String> = self.checkpoint.tensors.keys().cloned().collect();
        for name in held {
            let readers = self.readers.get(&name[prefix.len()..]);
            if readers.is_some_and(|readers| readers.iter().any(|reader| !self.layers[*reader].read)) {
                continue;
            }
            if let Some(entry) = self.checkpoint.tensors.remove(&name) {
                self.checkpoint.shards[entry.shard].map = Content::Held(vec![]);
                self.free.push(entry.shard);
            }
        }
    }

    /// Bytes of tensors that are held.
    pub fn held_bytes(&self) -> usize {
        self.checkpoint.shards.iter().map(|shard| shard.map.len()).sum()
    }

    /// The tensors that layers still wait for; of a `part` of the model, those of layers of which some tensor came.
    pub fn missing(&self, part: bool) -> BTreeSet<String> {
        let has = |names: &Vec<String>| names.iter().any(|name| self.checkpoint.has_tensor(&self.full(name)));
        let open = self.layers.iter().filter(|layer| !layer.read && (!part || layer.needs.iter().any(has)));
        let absent = open.flat_map(|layer| &layer.needs).filter(|names| !has(names));
        let scaled = |layer: &&Layer| !layer.read && layer.needs.iter().all(has);
        // A layer may wait for the scales of its E4M3 weights alone.
        let scales = self.layers.iter().filter(scaled).flat_map(|layer| &layer.weights);
        let unscaled = scales.filter(|weight| {
            let entry = self.checkpoint.tensors.get(&self.full(weight));
            entry.is_some_and(|entry| entry.dtype == Dtype::F8_E4M3) && !has(&scales_of(weight).to_vec())
        });
        let names = absent.filter_map(|names| names.first()).map(|name| self.full(name));
        names.chain(unscaled.map(|weight| self.full(&scales_of(weight)[0]))).collect()
    }

    /// Whether a layer has been read.
    pub fn started(&self) -> bool {
        self.layers.iter().any(|layer| layer.read)
    }

    /// Begins anew, for the next weights of the same model.
    pub fn reset(&mut self) {
        self.checkpoint.tensors.clear();
        self.checkpoint.shards.clear();
        self.free.clear();
        self.layers.iter_mut().for_each(|layer| layer.read = false);
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.checkpoint.prefix())
    }
}

/// What the scale of an E4M3 weight may be called.
fn scales_of(weight: &str) -> [String; 2] {
    [format!("{weight}_scale_inv"), format!("{weight}_scale")]
}
