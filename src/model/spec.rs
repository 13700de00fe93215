//! What the attention of a model is, as far as its logits and operands can be bounded from the weights.

use super::mla::Mla;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Everything about a model's attention that a bound needs, read from its `config.json`.
///
/// What all layers share stands here, heads, rotation and softmax scale in each [`LayerSpec`]. `d_model` channels enter every
/// layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct AttentionSpec {
    /// Name shown to people: the preset, folder or file it came from.
    pub name: String,
    /// Family in the tensor-name table (`llama`, `gpt2`, ...).
    pub family: String,
    /// What stands in front of the family's tensor names: the checkpoint's own, or for a config alone what such checkpoints
    /// usually have. It is no part of a saved spec.
    #[serde(skip)]
    pub prefix: String,
    /// Whether a token sees only itself and the ones before it.
    pub causal: bool,
    /// The layers that have attention, in order.
    #[serde(flatten, with = "super::record")]
    pub layers: Vec<LayerSpec>,
    /// Model dimension d.
    pub d_model: usize,
    /// The normalisation whose output the q, k and v projections read.
    pub norm: InputNorm,
    /// Projections that carry a bias.
    pub bias: QkvBias,
    /// Normalisation of q and k after the projection.
    pub qk_norm: Option<QkNorm>,
    /// Logits pass through `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f64>,
    /// Longest sequence of the config, where it names one.
    pub max_positions: Option<usize>,
    /// Whether each value head is normalized to the length `sqrt(d_head)`, without a gain (Gemma 3n and 4): then its values are
    /// bounded whatever the weights are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub v_norm: bool,
    /// Residual streams, each with a norm of its own, whose gated mean attention reads (Qwen4-Exp): `norm` bounds that mean, and
    /// [`LayerWeights`](super::LayerWeights) has its gain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<usize>,
    /// Factors beside the weights (Falcon-H1). [`LayerWeights`](super::LayerWeights) has them in its gain and in k already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipliers: Option<Multipliers>,
    /// Whether the projections may read their input rounded to E4M3, as FP8 matrix products do (checkpoints whose weights are
    /// stored so). Otherwise in 16 or 32 bits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fp8_inputs: bool,
}

/// Factors that a forward multiplies by beside its weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Multipliers {
    /// Of the projections' input, after its norm.
    pub input: f64,
    /// Of the keys, in front of the rotation.
    pub key: f64,
}

/// One layer's attention: `n_q_heads` query heads share `n_kv_heads` key/value heads of `d_head` channels.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The model's own number of this layer, as tensor names have it. It counts layers without attention too; its place in
    /// [`AttentionSpec::layers`] does not.
    pub number: usize,
    /// Query heads.
    pub n_q_heads: usize,
    /// Key and value heads; divides `n_q_heads`.
    pub n_kv_heads: usize,
    /// Head dimension r of queries and keys: a multiple of 8 from 16 to 256 (512 in Gemma 4), or with latent attention
    /// `d_nope + d_rope`.
    pub d_head: usize,
    /// Rotary position embedding; `None` without one (learned positions, NoPE). With `mla` its channels are counted from the
    /// first of the last `d_rope`.
    pub rope: Option<Rope>,
    /// Softmax scale tau.
    pub softmax_scale: f64,
    /// What multiplies the query, behind rotation and norm, as positions grow.
    pub temperature: Option<Temperature>,
    /// Keys that a query sees with a sliding window, its own and those before it; `None`: all. No bound depends on it.
    pub window: Option<usize>,
    /// Whether a learned logit a query head joins the row sum of the softmax. No bound depends on it.
    pub sinks: bool,
    /// The model's own number of the layer whose keys and values this one takes, where they are not its own.
    pub kv_source: Option<usize>,
    /// Multi-head latent attention. Heads are then those of its expanded form, `n_kv_heads` = `n_q_heads`.
    pub mla: Option<Mla>,
}

/// A factor on the query at position m: `1 + strength ln(1 + floor((m + shift) / period))` (Llama 4, Ministral 3).
///
/// ```
/// use sigmascale::model::Temperature;
/// let t = Temperature { strength: 0.1, period: 8192, shift: 1, positions: 16384 };
/// assert_eq!((t.factor(0), t.factor(8190)), (1.0, 1.0));
/// assert_eq!(t.largest(), 1.0 + 0.1 * 3f64.ln());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Temperature {
    /// Multiplies the logarithm; not negative.
    pub strength: f64,
    /// Positions between two steps.
    pub period: usize,
    /// Added to the position.
    pub shift: usize,
    /// Longest sequence of the config. Bounds hold up to it.
    pub positions: usize,
}

impl Temperature {
    /// One factor for all positions, as the largest of one position; `None` for a factor of 1.
    pub fn constant(factor: f64) -> Option<Self> {
        let strength = (factor - 1.0) / std::f64::consts::LN_2;
        (factor != 1.0).then_some(Self { strength, period: 1, shift: 1, positions: 1 })
    }

    /// The factor at a position.
    pub fn factor(&self, position: usize) -> f64 {
        1.0 + self.strength * (1.0 + (position.saturating_add(self.shift) / self.period) as f64).ln()
    }

    /// The largest factor, that of the last position.
    pub fn largest(&self) -> f64 {
        self.factor(self.positions.saturating_sub(1))
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.period == 0 || self.positions == 0 || !(self.strength.is_finite() && self.strength >= 0.0) {
            return Err(format!("`temperature` needs a period, positions and a strength of at least 0, got {self:?}"));
        }
        Ok(())
    }
}

impl LayerSpec {
    /// A layer of these heads without any trait: no rotation, a softmax scale of `1 / sqrt(d_head)`.
    ///
    /// ```
    /// use sigmascale::model::{AttentionSpec, LayerSpec};
    /// let layer = LayerSpec { softmax_scale: 0.1, ..LayerSpec::plain(8, 2, 64) };
    /// let spec = AttentionSpec { soft_cap: Some(50.0), ..AttentionSpec::plain(512, vec![layer]) };
    /// spec.check()?;
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn plain(n_q_heads: usize, n_kv_heads: usize, d_head: usize) -> Self {
        Self {
            number: 0,
            n_q_heads,
            n_kv_heads,
            d_head,
            rope: None,
            softmax_scale: 1.0 / (d_head as f64).sqrt(),
            temperature: None,
            window: None,
            sinks: false,
            kv_source: None,
            mla: None,
        }
    }

    /// Largest factor on the query; 1 without one.
    pub fn query_factor(&self) -> f64 {
        self.temperature.map_or(1.0, |temperature| temperature.largest())
    }

    /// Softmax scale times the largest factor on the query: what a bound on the logits of the plain q and k is multiplied by.
    pub fn logit_scale(&self) -> f64 {
        self.softmax_scale * self.query_factor()
    }

    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.n_q_heads / self.n_kv_heads
    }

    fn check(&self) -> std::result::Result<(), String> {
        for (field, count) in [("n_q_heads", self.n_q_heads), ("n_kv_heads", self.n_kv_heads), ("d_head", self.d_head)]
        {
            if count == 0 {
                return Err(format!("`{field}` must be at least 1"));
            }
        }
        if !self.n_q_heads.is_multiple_of(self.n_kv_heads) {
            return Err(format!("`n_kv_heads` {} does not divide `n_q_heads` {}", self.n_kv_heads, self.n_q_heads));
        }
        if !is_positive(self.softmax_scale) {
            return Err(format!("`softmax_scale` {} must be finite and greater than zero", self.softmax_scale));
        }
        self.temperature.map_or(Ok(()), |temperature| temperature.check())?;
        if self.window == Some(0) {
            return Err("`window` must be at least 1".to_owned());
        }
        if let Some(mla) = &self.mla {
            mla.check()?;
            if (self.n_kv_heads, self.d_head) != (self.n_q_heads, mla.d_nope + mla.d_rope) {
                return Err("`mla` needs a key head for each query head, of `d_nope + d_rope` channels".to_owned());
            }
            if self.rope.as_ref().is_some_and(|rope| rope.rotary_dim != mla.d_rope || !rope.other_dims.is_empty()) {
                return Err(format!("`rotary_dim` must be `d_rope`, {}", mla.d_rope));
            }
        }
        let Some(rope) = &self.rope else { return Ok(()) };
        // Channels are taken two by two, rotated or not.
        let head = self.mla.map_or(self.d_head, |mla| mla.d_rope);
        let fits = |dim: usize| dim <= head && dim.is_multiple_of(2) && head.is_multiple_of(2);
        if let Some(rotary) = rope.dims().find(|dim| !fits(*dim)) {
            return Err(format!("`rotary_dim` {rotary} of {head} channels: both even, at most the head"));
        }
        if rope.attention_factor != 1.0 && !rope.other_dims.is_empty() {
            return Err("`attention_factor` must be 1 beside `other_dims`".to_owned());
        }
        if !is_positive(rope.attention_factor) {
            return Err(format!("`attention_factor` {} must be finite and greater than zero", rope.attention_factor));
        }
        let angles = rope.inv_freq.as_deref();
        if angles.is_some_and(|w| w.len() != rope.rotary_dim / 2 || w.iter().any(|w| !w.is_finite())) {
            return Err(format!("`inv_freq` needs {} finite angles", rope.rotary_dim / 2));
        }
        if let Some(range) = &rope.range {
            let fits = |w: &Vec<f64>| w.len() == rope.rotary_dim / 2 && w.iter().all(|w| w.is_finite());
            let factor = is_positive(range.least_factor) && range.least_factor <= rope.attention_factor;
            if !(range.fastest.iter().all(fits) && factor && range.stretch.is_finite() && range.stretch >= 1.0) {
                return Err(format!("`range` of a rotation does not fit it: {range:?}"));
            }
        }
        Ok(())
    }
}

fn is_positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

impl AttentionSpec {
    /// A causal model of these layers without any trait: an RMSNorm with a gain in front of projections without biases.
    pub fn plain(d_model: usize, layers: Vec<LayerSpec>) -> Self {
        Self {
            name: "model".to_owned(),
            family: String::new(),
            prefix: String::new(),
            causal: true,
            layers,
            d_model,
            norm: InputNorm { kind: NormKind::RmsNorm, gain: GainForm::Plain, shift: false },
            bias: QkvBias::default(),
            qk_norm: None,
            soft_cap: None,
            max_positions: None,
            v_norm: false,
            streams: None,
            multipliers: None,
            fp8_inputs: false,
        }
    }

    /// Whether the parts fit together: counts, numbers in order, rotations within a head.
    ///
    /// # Errors
    /// `is_argument`, naming the layer, the field and the rule.
    pub fn check(&self) -> Result<()> {
        let broken = |rule: std::fmt::Arguments<'_>| Err(Error::argument(format_args!("{}: {rule}", self.name)));
        for (field, count) in [("layers", self.layers.len()), ("d_model", self.d_model)] {
            if count == 0 {
                return broken(format_args!("`{field}` must be at least 1"));
            }
        }
        for layer in &self.layers {
            if let Err(rule) = layer.check() {
                return broken(format_args!("layer {}: {rule}", layer.number));
            }
        }
        if let Some(pair) = self.layers.windows(2).find(|pair| pair[0].number >= pair[1].number) {
            return broken(format_args!("layer {} comes before layer {}", pair[0].number, pair[1].number));
        }
        if let Some(cap) = self.soft_cap.filter(|cap| !is_positive(*cap)) {
            return broken(format_args!("`soft_cap` {cap} must be finite and greater than zero"));
        }
        if self.qk_norm.is_some_and(|norm| norm.kind == NormKind::None) {
            return broken(format_args!("`qk_norm` names no norm"));
        }
        if let Some(factors) = &self.multipliers
            && ![factors.input, factors.key].iter().all(|factor| factor.is_finite())
        {
            return broken(format_args!("`multipliers` must be finite, got {factors:?}"));
        }
        if let Some(layer) = self.layers.iter().find(|layer| layer.kv_source.is_some())
            && (self.qk_norm_of(layer).is_none() || !self.v_norm)
        {
            let rule = "shared keys and values have no bound without both `qk_norm` and `v_norm`";
            return broken(format_args!("layer {}: {rule}", layer.number));
        }
        if self.streams == Some(0) || (self.streams.is_some() && self.norm != GATED_MEAN) {
            return broken(format_args!("`streams` must be at least 1, of RMSNorms with a gain and without a shift"));
        }
        if self.has_mla() && (self.qk_norm.is_some() || self.norm.kind != NormKind::RmsNorm || self.norm.shift) {
            return broken(format_args!("`mla` needs an RMSNorm before it and no `qk_norm`"));
        }
        Ok(())
    }

    /// One layer, by its place among those that have attention.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<&LayerSpec> {
        self.layers.get(layer).ok_or_else(|| {
            let (name, layers) = (&self.name, self.layers.len());
            Error::argument(format_args!(
                "layer index {layer} is out of range: {name} has {layers} layers with attention"
            ))
        })
    }

    /// The model and one of its layers for messages, by the model's own number, given its index among those that have attention.
    pub fn place(&self, layer: usize) -> String {
        match self.layers.get(layer) {
            Some(own) => format!("{} layer {}", self.name, own.number),
            None => self.name.clone(),
        }
    }

    /// Positions that a layer's sequences have at most, as engines read the config; `None` where it names no longest one.
    pub fn positions_of(&self, layer: &LayerSpec) -> Option<usize> {
        let stretch = layer.rope.as_ref().and_then(|rope| rope.range.as_ref()).map_or(1.0, |range| range.stretch);
        Some((self.max_positions? as f64 * stretch).ceil() as usize)
    }

    /// Whether a layer has multi-head latent attention.
    pub fn has_mla(&self) -> bool {
        self.layers.iter().any(|layer| layer.mla.is_some())
    }

    /// Gives every layer these heads.
    pub fn set_heads(&mut self, n_q_heads: usize, n_kv_heads: usize, d_head: usize) {
        for layer in &mut self.layers {
            (layer.n_q_heads, layer.n_kv_heads, layer.d_head) = (n_q_heads, n_kv_heads, d_head);
        }
    }

    /// Query heads of all layers.
    pub fn all_q_heads(&self) -> usize {
        self.layers.iter().map(|layer| layer.n_q_heads).sum()
    }

    /// Positions up to which bounds hold, where queries grow with them.
    pub fn bounded_positions(&self) -> Option<usize> {
        self.layers.iter().filter_map(|layer| layer.temperature).map(|temperature| temperature.positions).min()
    }

    /// The normalisation of q and k in a layer, if it has one.
    pub fn qk_norm_of(&self, layer: &LayerSpec) -> Option<QkNorm> {
        self.qk_norm.filter(|norm| layer.rope.is_some() || !norm.rotated_only)
    }

    /// Whether every layer has attention and the heads of the first.
    pub fn is_plain(&self) -> bool {
        let heads = |layer: &LayerSpec| (layer.n_q_heads, layer.n_kv_heads, layer.d_head);
        self.layers.iter().enumerate().all(|(at, layer)| layer.number == at && heads(layer) == heads(&self.layers[0]))
    }
}

/// What bounds the gated mean of several streams.
pub(super) const GATED_MEAN: InputNorm = InputNorm { kind: NormKind::RmsNorm, gain: GainForm::Plain, shift: false };

/// Normalisation in front of the projections: `y = gain * x_hat + shift`, `||x_hat|| <= sqrt(d_model)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputNorm {
    /// What is normalized.
    pub kind: NormKind,
    /// How the stored gain enters.
    pub gain: GainForm,
    /// Whether a shift (beta) is stored.
    pub shift: bool,
}

/// Kinds of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// Mean removed, then divided by the standard deviation.
    LayerNorm,
    /// Divided by the root mean square.
    RmsNorm,
    /// No normalisation: the input has no bound (OLMo 2).
    None,
}

/// How a stored gain g multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GainForm {
    /// By g.
    Plain,
    /// By 1 + g (Gemma).
    OnePlus,
    /// Nothing is stored: by 1.
    Unit,
}

/// Which projections carry a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QkvBias {
    /// W_Q has one.
    pub q: bool,
    /// W_K has one.
    pub k: bool,
    /// W_V has one.
    pub v: bool,
}

impl QkvBias {
    /// True if any projection has one.
    pub fn any(self) -> bool {
        self.q || self.k || self.v
    }
}

/// Rotary position embedding of the first `rotary_dim` channels of a head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Rotated channels (even, at most d_head); the rest pass unchanged.
    pub rotary_dim: usize,
    /// How many other readings of the config rotate. Bounds hold for each; a forward takes `rotary_dim`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_dims: Vec<usize>,
    /// Which two channels make a pair.
    pub layout: RopeLayout,
    /// Factor on cos and sin (YaRN, LongRoPE); the largest where it depends on the length.
    pub attention_factor: f64,
    /// Angle per position of each of the `rotary_dim / 2` pairs, where the config determines it. Bounds do not need
    /// it; a forward does.
    pub inv_freq: Option<Vec<f64>>,
    /// What else angles and factor may be; `None`: they are as they stand, up to the config's longest sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<RopeRange>,
}

/// What a rotation may be where the length of the sequence, the axes of a position or the reading of the config decide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeRange {
    /// Largest angle per position of each pair, where known.
    pub fastest: Option<Vec<f64>>,
    /// Smallest factor on cos and sin.
    pub least_factor: f64,
    /// Engines take sequences of this many times the config's longest.
    pub stretch: f64,
}

/// Pairing of rotated channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopeLayout {
    /// Channel b with b + rotary_dim / 2 (Llama, GPT-NeoX).
    HalfSplit,
    /// Channel 2b with 2b + 1 (GPT-J, Cohere).
    Interleaved,
}

/// Normalisation of q and k between projection and attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QkNorm {
    /// Over each head alone or over all heads jointly.
    pub scope: QkNormScope,
    /// RMS or LayerNorm.
    pub kind: NormKind,
    /// How the stored gain enters.
    pub gain: GainForm,
    /// Whether a shift is stored.
    pub shift: bool,
    /// Whether it comes behind the rotation (HunYuan), so that gains are never mixed by it, and not in front.
    #[serde(default)]
    pub behind_rotation: bool,
    /// Whether layers without rotation have none (Llama 4).
    #[serde(default)]
    pub rotated_only: bool,
}

/// What one QK normalisation runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QkNormScope {
    /// The d_head channels of one head (Qwen 3, Gemma 3).
    PerHead,
    /// All heads of the projection together (OLMo 2).
    Joint,
}

impl Rope {
    /// The rotated channels of every reading, the model's own first.
    pub(crate) fn dims(&self) -> impl Iterator<Item = usize> + '_ {
        [self.rotary_dim].into_iter().chain(self.other_dims.iter().copied())
    }

    /// Largest angle per position of each pair, where known.
    pub fn fastest(&self) -> Option<&[f64]> {
        match &self.range {
            Some(range) => range.fastest.as_deref(),
            None => self.inv_freq.as_deref(),
        }
    }

    /// The rotated pairs, as channel indices of a head of `d_head`.
    ///
    /// ```
    /// use sigmascale::model::{Rope, RopeLayout};
    /// let rope =
    ///     Rope { rotary_dim: 4, other_dims: vec![], layout: RopeLayout::HalfSplit, attention_factor: 1.0, inv_freq: None,
    ///            range: None };
    /// assert_eq!(rope.pairs().collect::<Vec<_>>(), [(0, 2), (1, 3)]);
    /// ```
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.pairs_of(self.rotary_dim)
    }

    /// The same where `rotary_dim` channels are rotated.
    pub(crate) fn pairs_of(&self, rotary_dim: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let half = rotary_dim / 2;
        (0..half).map(move |b| match self.layout {
            RopeLayout::HalfSplit => (b, b + half),
            RopeLayout::Interleaved => (2 * b, 2 * b + 1),
        })
    }
}
