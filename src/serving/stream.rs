//! Scales of weights that arrive tensor by tensor, and what becomes of a cache when the weights change.

use super::census::is_adapter;
use super::scales::LayerScales;
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, LayerStream};
use crate::plan::Center;
use crate::scale::Descale;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names in a message.
const NAMED: usize = 3;

/// Scales of a model while its weights arrive, in any order: those of a layer as soon as it is complete, the same bits as a
/// calibration of the whole.
///
/// ```
/// use safetensors::Dtype;
/// use sigmascale::serving::ScaleStream;
/// let config = br#"{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
///     "rope_theta": 10000.0}"#;
/// let mut stream = ScaleStream::new(config, "config.json".as_ref(), &[])?;
/// let ones = |n: usize| 1f32.to_le_bytes().repeat(n);
/// for name in ["q", "k", "v"] {
///     let name = format!("model.layers.0.self_attn.{name}_proj.weight");
///     assert!(stream.push(&name, Dtype::F32, &[16, 16], ones(256))?.is_empty());
/// }
/// let layers = stream.push("model.layers.0.input_layernorm.weight", Dtype::F32, &[16], ones(16))?;
/// assert_eq!(layers[0].module, "model.layers.0.self_attn");
/// stream.finish(false)?;
/// # Ok::<(), sigmascale::Error>(())
/// ```
pub struct ScaleStream {
    stream: LayerStream,
    /// Layers that are complete on a device and whose descales were not given yet.
    due: BTreeSet<usize>,
    /// The first names of this pass that look like a tensor that layers wait for, and are none.
    strange: Vec<String>,
    /// Centers that do not follow the weights, by layer.
    centers: BTreeMap<usize, Center>,
}

impl ScaleStream {
    /// A stream for the model of this `config.json`; `names` as in [`LayerStream::new`].
    ///
    /// # Errors
    /// As [`LayerStream::new`].
    pub fn new(config: &[u8], file: &Path, names: &[String]) -> Result<Self> {
        Ok(Self {
            stream: LayerStream::new(config, file, names)?,
            due: BTreeSet::new(),
            strange: vec![],
            centers: BTreeMap::new(),
        })
    }

    /// The stream of one tensor-parallel rank: see [`LayerStream::of_rank`].
    ///
    /// # Errors
    /// As there.
    pub fn of_rank(self, ranks: usize) -> Result<Self> {
        Ok(Self { stream: self.stream.of_rank(ranks)?, ..self })
    }

    /// Keeps these centers whatever the weights are: those that entries of a cache have. The scales of `k - c` follow the weights.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer. A center of another shape is found when its layer is complete.
    pub fn keep_centers(&mut self, centers: Vec<Center>) -> Result<()> {
        for center in centers {
            self.spec().layer(center.layer)?;
            self.centers.insert(center.layer, center);
        }
        Ok(())
    }

    /// What the attention is.
    pub fn spec(&self) -> &AttentionSpec {
        self.stream.spec()
    }

    /// Whether a tensor of this name has to be pushed, since attention reads it, or since it is refused. The names of others are
    /// remembered for the message of a pass that ends without its tensors.
    pub fn wants(&mut self, name: &str) -> bool {
        let wanted = self.stream.wants(name) || self.changes_attention(name);
        if !wanted && self.strange.len() < NAMED && self.stream.resembles(name) {
            self.strange.push(name.to_owned());
        }
        wanted
    }

    /// Whether a tensor is of an adapter that changes attention where it is applied.
    fn changes_attention(&self, name: &str) -> bool {
        let inputs = ["prompt_encoder", "prompt_embeddings"];
        is_adapter(name) && (inputs.iter().any(|part| name.contains(part)) || self.stream.resembles(name))
    }

    fn check_name(&self, name: &str) -> Result<()> {
        if !self.changes_attention(name) {
            return Ok(());
        }
        Err(Error::unsupported(format_args!(
            "tensor `{name}` is of an adapter, which changes attention where it is applied: merge it, and pass the merged \
             weights under the names of the model"
        )))
    }

    /// Where the tensors of an attention layer are, for a caller that gathers them from a loaded model: see [`LayerStream`].
    pub fn tensors(&self) -> &LayerStream {
        &self.stream
    }

    /// Takes a tensor and gives the scales of the layers that it completes. Tensors that attention does not read are ignored.
    ///
    /// # Errors
    /// `is_unsupported` for a tensor of an adapter that changes attention; as [`LayerStream::push`] and [`LayerScales::new`].
    pub fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Result<Vec<LayerScales>> {
        self.check_name(name)?;
        let mut done = Vec::new();
        if !self.wants(name) {
            return Ok(done);
        }
        for layer in self.stream.push(name, dtype, shape, bytes)? {
            let (spec, weights) = (self.stream.spec(), self.stream.layer(layer)?);
            done.push(match self.centers.get(&layer) {
                Some(center) => LayerScales::with_center(spec, weights, center.clone())?,
                None => LayerScales::new(spec, weights)?,
            });
            self.stream.release(layer);
        }
        Ok(done)
    }

    /// Takes the name, type and shape of a tensor whose values stay elsewhere, on a device, and gives the layers that it completes,
    /// by their place among those with attention: their descales are due in [`ScaleStream::computed`], in any order, before the pass
    /// ends.
    ///
    /// # Errors
    /// As [`ScaleStream::push`].
    pub fn note(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Vec<usize>> {
        self.check_name(name)?;
        if !self.wants(name) {
            return Ok(vec![]);
        }
        let done = self.stream.note(name, dtype, shape)?;
        done.iter().for_each(|layer| self.stream.release(*layer));
        self.due.extend(&done);
        Ok(done)
    }

    /// The scales of a complete layer whose descales were computed where its tensors are.
    ///
    /// # Errors
    /// `is_argument` if the layer is not complete, or has its scales; otherwise as [`LayerScales::from_descales`].
    pub fn computed(
        &mut self,
        layer: usize,
        q: Vec<Descale>,
        k: Vec<Descale>,
        v: Option<Vec<Descale>>,
    ) -> Result<LayerScales> {
        if !self.due.contains(&layer) {
            return Err(Error::argument(format_args!(
                "layer {layer} is not complete, or has its scales: pass descales once per layer that `note` returned"
            )));
        }
        let scales = LayerScales::from_descales(self.stream.spec(), layer, q, k, v)?;
        self.due.remove(&layer);
        Ok(scales)
    }

    /// Ends a pass over the weights and begins the next. Of a `part` of the model, a pipeline stage, layers of which no tensor came
    /// are left out.
    ///
    /// # Errors
    /// `is_mismatch` if a layer is not complete, with the tensors that it waits for, or if no layer is; `is_argument` if a layer that
    /// is complete on a device has no scales.
    pub fn finish(&mut self, part: bool) -> Result<()> {
        let missing = self.stream.missing(part);
        if !missing.is_empty() {
            let first: Vec<&str> = missing.iter().take(NAMED).map(String::as_str).collect();
            return Err(Error::mismatch(format_args!(
                "{} tensors are missing, among them {}{}",
                missing.len(),
                first.join(", "),
                self.instead()
            )));
        }
        if !self.stream.started() {
            return Err(Error::mismatch(format_args!("no tensor of an attention layer was passed{}", self.instead())));
        }
        if let Some(layer) = self.due.first() {
            return Err(Error::argument(format_args!(
                "layer {layer} is complete but has no scales: pass its descales"
            )));
        }
        self.restart();
        Ok(())
    }

    /// What came in place of what is missing.
    fn instead(&self) -> String {
        match self.strange.as_slice() {
            [] => String::new(),
            names => {
                format!("; {} came, which this model does not read: pass the names of its checkpoint", names.join(", "))
            }
        }
    }

    /// Drops what a pass has taken so far, and begins the next.
    pub fn restart(&mut self) {
        self.strange.clear();
        self.due.clear();
        self.stream.reset();
    }

    /// Bytes of tensors that are held.
    pub fn held_bytes(&self) -> usize {
        self.stream.held_bytes()
    }
}

/// What becomes of cached keys and values when the weights change.
#[derive(Clone, Debug, PartialEq)]
pub struct Refit {
    /// What to cast with from now on.
    pub scales: Vec<LayerScales>,
    /// Numbers of the layers whose bounds grew past the scale in use. Where there are any, the cache has to be flushed: its entries
    /// would be read with another scale than they were written with. Where there is none it stays, and so do the scales of k and v.
    pub grown: Vec<usize>,
}

impl Refit {
    /// Whether the cache has to go.
    pub fn flush(&self) -> bool {
        !self.grown.is_empty()
    }
}

/// The rule for a cache that is kept across a change of the weights: while no bound is larger than the scale in use, the old
/// scales of k and v stay, and with them every cached entry; else all scales are the new ones. Queries are not cached: their
/// scales are always the new ones. `in_use` are the scales that the engine casts with, rounded as it has them.
///
/// # Errors
/// `is_mismatch` if the two are not of the same layers and heads.
pub fn refit(in_use: &[LayerScales], new: &[LayerScales]) -> Result<Refit> {
    let shape = |layer: &LayerScales| (layer.layer, layer.k.len(), layer.v.as_ref().map(Vec::len));
    if !in_use.iter().map(shape).eq(new.iter().map(shape)) {
        return Err(Error::mismatch("the scales in use and the new ones have different layers or heads"));
    }
    let larger = |old: &[Descale], new: &[Descale]| old.iter().zip(new).any(|(old, new)| new > old);
    let grew = |old: &LayerScales, new: &LayerScales| {
        let values = old.v.as_deref().zip(new.v.as_deref());
        larger(&old.k, &new.k) || values.is_some_and(|(old, new)| larger(old, new))
    };
    let grown: Vec<usize> =
        in_use.iter().zip(new).filter(|(old, new)| grew(old, new)).map(|(_, new)| new.layer).collect();
    let mut scales = new.to_vec();
    if grown.is_empty() {
        for (scale, old) in scales.iter_mut().zip(in_use) {
            (scale.k, scale.v) = (old.k.clone(), old.v.clone());
        }
    }
    Ok(Refit { scales, grown })
}
