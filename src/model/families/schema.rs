//! What a row of the table says of a family.

use crate::model::spec::{InputNorm, QkNorm, RopeLayout};

/// Everything that tells one family from another.
pub(crate) struct Family {
    /// The family's name: the `model_type` of its text model.
    pub name: &'static str,
    /// Values of `model_type` that mean this family.
    pub model_types: &'static [&'static str],
    /// What may stand in front of every tensor name; the first that fits is used.
    pub prefixes: &'static [&'static str],
    /// Sizes.
    pub sizes: Sizes,
    /// Normalisation in front of the projections.
    pub norm: InputNorm,
    /// A key that makes it an RMSNorm where it is there and not null.
    pub rms_key: Option<&'static str>,
    /// Its tensors.
    pub norm_tensor: NormTensor,
    /// Residual streams, each with a norm of its own in one tensor, whose gated mean attention reads: a key and its value when absent.
    pub streams: Option<(&'static str, usize)>,
    /// Biases of the q, k and v projections (all three or none).
    pub bias: Flag,
    /// Rotary position embedding.
    pub rope: RopeRule,
    /// Its settings where the config has none, as JSON.
    pub rope_default: Option<&'static str>,
    /// Normalisation of q and k.
    pub qk_norm: Option<QkNormRule>,
    /// Softmax scale.
    pub scale: ScaleRule,
    /// Factor on the query that grows with the position.
    pub temperature: TemperatureRule,
    /// Key of the logits' soft-cap and its value when the key is absent.
    pub soft_cap: Option<(&'static str, Option<f64>)>,
    /// Sliding windows; `None` where the family has none, whatever its config says.
    pub window: Option<WindowRule>,
    /// Tensor of a learned logit a query head that joins the row sum of the softmax.
    pub sinks: Option<&'static str>,
    /// Projections.
    pub qkv: QkvTensors,
    /// Multi-head latent attention.
    pub mla: Option<MlaRule>,
    /// Each value head is normalized, without a gain.
    pub v_norm: bool,
    /// How many of the last layers take the keys and values of the last layer of their kind before them: a key and its value when
    /// absent.
    pub shared_kv: Option<(&'static str, usize)>,
    /// Full layers have heads of their own (Gemma 4).
    pub global_heads: bool,
    /// Sliding layers have query heads and a rotation of their own, in lists by layer or by kind (Step 3.5).
    pub by_kind: bool,
    /// `attention_in_multiplier` and `key_multiplier` are read.
    pub multipliers: bool,
    /// Settings that change the logits in a way no bound here covers.
    pub refusals: &'static [Refusal],
}

/// Multi-head latent attention: what absent keys mean, and how families differ.
#[derive(Clone, Copy)]
pub(crate) struct MlaRule {
    /// `q_lora_rank`; null always means that there is no query latent.
    pub q_rank: Option<usize>,
    /// `kv_lora_rank`.
    pub kv_rank: usize,
    /// `qk_nope_head_dim`.
    pub d_nope: usize,
    /// `qk_rope_head_dim`.
    pub d_rope: usize,
    /// `v_head_dim`; `None`: model dimension / heads.
    pub d_value: Option<usize>,
    /// Whether `rope_interleave` = false pairs the halves.
    pub may_split: bool,
    /// Whether each latent is multiplied by sqrt(model dimension / rank) after its norm.
    pub scaled_latents: bool,
    /// Attentions in what the config counts as a layer.
    pub per_layer: usize,
}

/// A count: its keys, the first present wins, and what an absent key means (`None`: refused).
pub(crate) struct Count {
    pub keys: &'static [&'static str],
    pub default: Option<usize>,
}

/// Where the sizes stand.
pub(crate) struct Sizes {
    pub layers: Count,
    pub d_model: Count,
    pub q_heads: Count,
    pub kv_heads: KvHeads,
    pub d_head: HeadDim,
    pub layer_heads: LayerHeads,
}

/// Whether layers differ in their heads, and where that stands.
pub(crate) enum LayerHeads {
    /// Every layer has those of the sizes.
    Uniform,
    /// Laguna: the query heads of each layer in a list, where there is one.
    Queries(&'static str),
    /// OpenELM: two lists with a number for each layer.
    Lists { q: &'static str, kv: &'static str },
    /// DeciLM: `block_configs` gives the query heads of a KV head in each layer, or says that it has no attention; the first
    /// release has `num_key_value_heads_per_layer`.
    Blocks,
    /// Those of the sizes in the layers that have softmax attention: a list of kinds under one of these keys says which.
    Hybrid { keys: &'static [&'static str], otherwise: Otherwise },
}

/// Which layers have softmax attention where no list of kinds says so.
pub(crate) enum Otherwise {
    /// The last of every so many.
    LastOf(Count),
    /// A config without the list is refused.
    Listed,
    /// Those whose number leaves `offset` when divided by `period`; keys with what they are when absent.
    Period { period: (&'static str, usize), offset: (&'static str, usize) },
    /// Every second layer, from the first on: nothing in the config says otherwise.
    EverySecond,
    /// A list of layer numbers; absent: all layers or none.
    Numbers { key: &'static str, absent: bool },
    /// Kimi-Linear: the numbers from 1 on in `linear_attn_config`, else every fourth layer but the first.
    KimiLinear,
    /// A string with a letter a layer, `*` for attention.
    Letters(&'static str),
}

/// Number of key/value heads.
pub(crate) enum KvHeads {
    /// As many as query heads, always.
    SameAsQuery,
    /// One for all query heads.
    One,
    /// A key; null means as many as query heads, absent the default (`None`: as many as query heads).
    Key(Count),
    /// Falcon: `num_kv_heads` with the new decoder architecture, else 1 with `multi_query` (the default), else as many
    /// as query heads.
    Falcon,
}

/// Channels of one head.
pub(crate) enum HeadDim {
    /// d_model / heads; a `head_dim` that says otherwise is refused.
    Derived,
    /// `head_dim`; null or absent means the default, or d_model / heads where there is none.
    Key(Option<usize>),
}

/// A yes or no.
pub(crate) enum Flag {
    Always,
    Never,
    /// A boolean key and its value when absent.
    Key(&'static str, bool),
}

/// Rotary position embedding of a family.
pub(crate) enum RopeRule {
    /// None: positions are learned and added before the first layer.
    None,
    Rotary {
        layout: RopeLayout,
        /// Keys of the base beside the common ones.
        theta_keys: &'static [&'static str],
        /// Base when the config has none; `None` leaves the angles undetermined.
        theta: Option<f64>,
        share: RotaryShare,
        layers: RopeLayers,
        /// `type` values that mean `longrope` here.
        longrope_names: &'static [&'static str],
    },
}

/// The rotated part of a head.
pub(crate) enum RotaryShare {
    /// Every channel.
    Whole,
    /// Keys of the share and its default. The first counts, behind the rotation's own settings; releases differ on the others,
    /// and bounds hold for each.
    Part(&'static [&'static str], f64),
    /// A key that counts rotated channels and its value when absent; null means every channel. Where the common share is
    /// stated too, bounds hold for both.
    Channels(&'static str, usize),
    /// Every channel, whatever share the config states: it is one of a wider head.
    Fixed,
    /// A key that counts rotated channels, which other releases leave unread in favour of the common share or of the whole
    /// head: bounds hold for each.
    ChannelsOrShare(&'static str),
}

/// How the rotation differs between layers.
pub(crate) enum RopeLayers {
    /// Not at all.
    Same,
    /// Every layer may have it or none, by what a config does not tell: the attention factor counts as at least 1, that of a layer
    /// without rotation.
    Perhaps,
    /// Full and sliding layers have their own parameters. `pattern`: which layers are full when `layer_types` is absent.
    /// Releases differ on the keys behind the first, and on settings that are not set apart by the kind of layer: the
    /// largest factor counts. `local_theta`: key and default of the sliding layers' base; without one they take the
    /// common base. Scaling in the old generation of keys belongs to the full layers alone.
    ByType { pattern: Pattern, local_theta: Option<(&'static str, f64)> },
    /// The same in all if this key has this value, else none.
    If(&'static str, &'static str),
    /// A list of bases, one per layer, 0 for a layer that is not rotated; absent or null: the common base in all.
    Bases(&'static str),
    /// `no_rope_layers` (1: rotated, 0: not), else every n-th layer has none.
    NoRope { interval: (&'static str, usize) },
    /// Only sliding layers are rotated; `pattern` says which are full when `layer_types` is absent. With `or_all`, every
    /// layer is rotated where `sliding_window` is null.
    Sliding { pattern: Pattern, or_all: bool },
}

/// One full layer of so many: the last, or the `first`.
#[derive(Clone, Copy)]
pub(crate) struct Pattern {
    pub keys: &'static [&'static str],
    /// Where no key is there.
    pub every: usize,
    pub first: bool,
}

/// Normalisation of q and k.
pub(crate) struct QkNormRule {
    pub when: Flag,
    pub norm: QkNorm,
    /// Tensor names without `.weight`; `{h}` stands for the head where each has its own tensor.
    pub q: &'static str,
    pub k: &'static str,
    /// Values stored: of one head, or of every head.
    pub stored: QkNormStored,
}

/// What the tensors of a QK-norm hold.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNormStored {
    /// `[d_head]`, shared by all heads.
    Shared,
    /// `[n_heads * d_head]`.
    Flat,
    /// `[n_heads, d_head]`.
    PerHead,
    /// One `[d_head]` tensor a head, named with `{h}`.
    TensorPerHead,
    /// Nothing: the norm has no gains.
    Nothing,
}

/// Factor on the query that grows with the position.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TemperatureRule {
    None,
    /// Llama 4: in layers without rotation, `attn_scale` over `floor_scale` positions unless `attn_temperature_tuning` is
    /// false.
    Llama4,
    /// Ministral 3: `llama_4_scaling_beta` and the original length among the rotation's settings.
    Ministral3,
}

/// Softmax scale.
pub(crate) enum ScaleRule {
    /// 1.
    One,
    /// d_head^-1/2.
    InverseSqrtHead,
    /// The same times YaRN's `(0.1 mscale_all_dim ln(factor) + 1)^2`.
    YarnSquared,
    /// `query_pre_attn_scalar`^-1/2, and the scalar when absent.
    QueryPreAttnScalar(f64),
    /// A key that is the scale itself, and its value when absent or null (`None`: d_head^-1/2).
    Multiplier(&'static str, Option<f64>),
    /// d_head^-1/2 unless `scale_attn_weights` is false.
    Gpt,
    /// The same, over layer + 1 if `scale_attn_by_inverse_layer_idx`.
    GptByLayer,
}

/// Tensors of the input norm (names without `.weight`).
pub(crate) enum NormTensor {
    /// The layer's own.
    Own(&'static str),
    /// No norm at all.
    None,
    /// The first layer reads another norm than the rest. Post-norm: what leaves the norm after the previous layer enters
    /// this one; `{j}` is the layer before.
    FirstApart { first: &'static str, rest: &'static str },
    /// Falcon: `ln_attn` with the new decoder architecture and two norms (the default there), else `input_layernorm`.
    Falcon { two: &'static str, one: &'static str },
}

/// Tensors of the projections (names without `.weight`).
pub(crate) enum QkvTensors {
    /// One each, `[out, in]`.
    Separate { q: &'static str, k: &'static str, v: &'static str },
    /// One each; the query tensor holds the channels of a query head and as many of its output's gate, head after head.
    Gated { q: &'static str, k: &'static str, v: &'static str },
    /// All query heads, then all key heads, then all value heads; `[in, out]` if `conv1d`.
    Concat { name: &'static str, conv1d: bool },
    /// Latent attention: the query's projection without or with a latent and that latent's norm; what makes the cached latent
    /// and the shared rotated key; the latent's norm; each head's key and value.
    Latent {
        q: &'static str,
        q_b: &'static str,
        q_norm: &'static str,
        kv_a: &'static str,
        kv_norm: &'static str,
        kv_b: &'static str,
    },
    /// For each key/value head: its query heads, its key, its value; `[out, in]`.
    Grouped { name: &'static str },
}

impl QkvTensors {
    /// Name of a tensor that every layer with attention has, within its attention module.
    pub fn first(&self) -> &'static str {
        match self {
            Self::Separate { q: name, .. }
            | Self::Gated { q: name, .. }
            | Self::Concat { name, .. }
            | Self::Latent { kv_b: name, .. }
            | Self::Grouped { name } => name,
        }
    }
}

/// Sliding windows, by the key `sliding_window`; null means none.
pub(crate) struct WindowRule {
    /// The window where the key is absent.
    pub absent: Option<usize>,
    /// A key without which there is no window.
    pub switch: Option<&'static str>,
    /// The layers that have it.
    pub layers: WindowLayers,
}

/// The layers that have a window. `layer_types` comes first, but for the first of these.
pub(crate) enum WindowLayers {
    /// Every layer.
    All,
    /// Every layer that `layer_types` does not call full.
    Types,
    /// Those without a rotation.
    NotRotated,
    /// Those from a key's value on, and what it is when absent.
    From(&'static str, usize),
    /// Every second one of those below it, from the first on.
    EverySecondBelow(&'static str, usize),
    /// All but one of so many, as the last of `keys` or `every` says: the first of them, or the last.
    AllButOneOf { keys: &'static [&'static str], every: usize, first: bool },
}

/// A setting that is refused unless it is absent, null or the one value.
pub(crate) struct Refusal {
    pub key: &'static str,
    pub unless: Setting,
    pub why: &'static str,
}

/// A config value to compare with.
pub(crate) enum Setting {
    False,
    True,
    Text(&'static str),
}

/// A model type that wraps a text model described by `text_config`.
pub(crate) struct Wrapper {
    pub model_type: &'static str,
    /// The text model's type when `text_config` names none.
    pub text: &'static str,
    /// Older configs have the text model's keys at the top.
    pub flat: bool,
    /// What stands in front of the text model's tensor names, tried ahead of the family's.
    pub prefixes: &'static [&'static str],
}
