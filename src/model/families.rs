//! The families, as data: one entry each says which config keys and which tensors hold what.
//!
//! A family is a row of this table and nothing else; the code that reads it lives in `config` and `checkpoint`. Facts
//! are those of the reference implementation (Hugging Face transformers). A model type outside the table is refused by
//! name: an architecture that is not understood has no bound.

use super::spec::{GainForm, InputNorm, NormKind, QkNorm, QkNormScope, RopeLayout};

/// Families whose tokens also see the ones behind them, unless the config makes the model a decoder.
pub(crate) const BIDIRECTIONAL: &[&str] = &["bert", "roberta"];

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
    /// Its tensors.
    pub norm_tensor: NormTensor,
    /// Biases of the q, k and v projections (all three or none).
    pub bias: Flag,
    /// Rotary position embedding.
    pub rope: RopeRule,
    /// Normalisation of q and k.
    pub qk_norm: Option<QkNormRule>,
    /// Softmax scale.
    pub scale: ScaleRule,
    /// Key of the logits' soft-cap and its value when the key is absent.
    pub soft_cap: Option<(&'static str, Option<f64>)>,
    /// Projections.
    pub qkv: QkvTensors,
    /// Settings that change the logits in a way no bound here covers.
    pub refusals: &'static [Refusal],
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
}

/// Number of key/value heads.
pub(crate) enum KvHeads {
    /// As many as query heads, always.
    SameAsQuery,
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
        /// Keys of the rotated share and its default; no keys: every channel is rotated.
        partial: (&'static [&'static str], f64),
        layers: RopeLayers,
        /// `type` values that mean `longrope` here.
        longrope_names: &'static [&'static str],
    },
}

/// How the rotation differs between layers.
pub(crate) enum RopeLayers {
    /// Not at all.
    Same,
    /// Full and sliding layers have their own parameters. `pattern` keys: every n-th layer is full when `layer_types`
    /// is absent. `local_theta`: key and default of the sliding layers' base; without one they take the common base.
    /// Scaling in the old generation of keys belongs to the full layers alone.
    ByType { pattern: (&'static [&'static str], usize), local_theta: Option<(&'static str, f64)> },
    /// `no_rope_layers` (1: rotated, 0: not), else every n-th layer has none.
    NoRope { interval: (&'static str, usize) },
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
}

/// Softmax scale.
pub(crate) enum ScaleRule {
    /// d_head^-1/2.
    InverseSqrtHead,
    /// `query_pre_attn_scalar`^-1/2, and the scalar when absent.
    QueryPreAttnScalar(f64),
    /// A key that is the scale itself, and its value when absent.
    Multiplier(&'static str, f64),
    /// d_head^-1/2 unless `scale_attn_weights` is false, over layer + 1 if `scale_attn_by_inverse_layer_idx`.
    Gpt2,
}

/// Tensors of the input norm (names without `.weight`).
pub(crate) enum NormTensor {
    /// The layer's own.
    Own(&'static str),
    /// No norm at all.
    None,
    /// Post-norm: what leaves the norm after the previous layer enters this one; `{j}` is the layer before.
    Previous { first: &'static str, rest: &'static str },
    /// Falcon: `ln_attn` with the new decoder architecture and two norms (the default there), else `input_layernorm`.
    Falcon { two: &'static str, one: &'static str },
}

/// Tensors of the projections (names without `.weight`).
pub(crate) enum QkvTensors {
    /// One each, `[out, in]`.
    Separate { q: &'static str, k: &'static str, v: &'static str },
    /// All query heads, then all key heads, then all value heads; `[in, out]` if `conv1d`.
    Concat { name: &'static str, conv1d: bool },
    /// For each key/value head: its query heads, its key, its value; `[out, in]`.
    Grouped { name: &'static str },
}

impl QkvTensors {
    /// Name of the tensor that holds the query heads.
    pub fn first(&self) -> &'static str {
        match self {
            Self::Separate { q: name, .. } | Self::Concat { name, .. } | Self::Grouped { name } => name,
        }
    }
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
    Text(&'static str),
}

/// Settings refused in every family.
pub(crate) static COMMON_REFUSALS: &[Refusal] = &[
    Refusal { key: "alibi", unless: Setting::False, why: "ALiBi adds a position bias to the logits" },
    Refusal { key: "use_alibi", unless: Setting::False, why: "ALiBi adds a position bias to the logits" },
    Refusal {
        key: "use_logn_attn",
        unless: Setting::False,
        why: "the query is multiplied by a factor that grows with the position",
    },
    Refusal { key: "use_mrope", unless: Setting::False, why: "rotation by several position axes is not known" },
    Refusal {
        key: "attn_temperature_tuning",
        unless: Setting::False,
        why: "the query is multiplied by a factor that grows with the position",
    },
];

/// Model types that are known and cannot be bounded, each with the reason.
pub(crate) static REFUSED: &[(&str, &str)] = &[
    ("deepseek_v2", MLA),
    ("deepseek_v3", MLA),
    ("deepseek_v32", MLA),
    ("kimi_k2", MLA),
    ("minicpm3", MLA),
    ("longcat_flash", MLA),
    ("bloom", ALIBI),
    ("mpt", ALIBI),
    ("t5", RELATIVE),
    ("mt5", RELATIVE),
    ("umt5", RELATIVE),
    ("deberta", RELATIVE),
    ("deberta-v2", RELATIVE),
    ("mpnet", RELATIVE),
    ("xlnet", RELATIVE),
    ("ministral3", "its query is multiplied by a factor that grows with the position"),
    ("llama4", "its query is multiplied by a factor that grows with the position"),
    ("llama4_text", "its query is multiplied by a factor that grows with the position"),
];

const MLA: &str = "multi-head latent attention (MLA) builds keys and queries from a compressed latent with a norm in \
                   between and a rotary part shared by all heads, which per-head projection bounds do not cover";
const ALIBI: &str = "ALiBi adds a position bias to the logits";
const RELATIVE: &str = "relative position terms are added to the logits";

/// Model types that wrap a text model described by `text_config`, and the text family when that names none.
pub(crate) static WRAPPERS: &[(&str, &str)] = &[("gemma3", "gemma3_text"), ("mistral3", "mistral")];

const DECODER_PREFIXES: &[&str] =
    &["model.", "", "language_model.model.", "model.language_model.", "transformer.", "language_model."];
const HALF: RopeRule = half_split(10_000.0);
const RMS: InputNorm = InputNorm { kind: NormKind::RmsNorm, gain: GainForm::Plain, shift: false };
const RMS_ONE_PLUS: InputNorm = InputNorm { kind: NormKind::RmsNorm, gain: GainForm::OnePlus, shift: false };
const LAYER_NORM: InputNorm = InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: true };
const LAYERS: Count = required(&["num_hidden_layers"]);
const WIDTH: Count = required(&["hidden_size"]);
const HEADS: Count = required(&["num_attention_heads"]);
const OWN_NORM: NormTensor = NormTensor::Own("layers.{i}.input_layernorm");
const SEPARATE: QkvTensors = QkvTensors::Separate {
    q: "layers.{i}.self_attn.q_proj",
    k: "layers.{i}.self_attn.k_proj",
    v: "layers.{i}.self_attn.v_proj",
};
const BERT_POSITIONS: &[Refusal] = &[Refusal {
    key: "position_embedding_type",
    unless: Setting::Text("absolute"),
    why: "relative position embeddings are added to the logits",
}];

const fn required(keys: &'static [&'static str]) -> Count {
    Count { keys, default: None }
}

const fn kv(default: Option<usize>) -> KvHeads {
    KvHeads::Key(Count { keys: &["num_key_value_heads"], default })
}

const fn half_split(theta: f64) -> RopeRule {
    partial(theta, (&[], 1.0))
}

const fn partial(theta: f64, partial: (&'static [&'static str], f64)) -> RopeRule {
    RopeRule::Rotary {
        layout: RopeLayout::HalfSplit,
        theta_keys: &[],
        theta: Some(theta),
        partial,
        layers: RopeLayers::Same,
        longrope_names: &[],
    }
}

const fn llama_sizes(kv_heads: KvHeads, d_head: HeadDim) -> Sizes {
    Sizes { layers: LAYERS, d_model: WIDTH, q_heads: HEADS, kv_heads, d_head }
}

const fn head_rms(gain: GainForm) -> QkNormRule {
    QkNormRule {
        when: Flag::Always,
        norm: QkNorm { scope: QkNormScope::PerHead, kind: NormKind::RmsNorm, gain, shift: false },
        q: "layers.{i}.self_attn.q_norm",
        k: "layers.{i}.self_attn.k_norm",
        stored: QkNormStored::Shared,
    }
}

const JOINT_RMS: QkNormRule = QkNormRule {
    when: Flag::Always,
    norm: QkNorm { scope: QkNormScope::Joint, kind: NormKind::RmsNorm, gain: GainForm::Plain, shift: false },
    q: "layers.{i}.self_attn.q_norm",
    k: "layers.{i}.self_attn.k_norm",
    stored: QkNormStored::Flat,
};

const LLAMA: Family = Family {
    name: "llama",
    model_types: &["llama"],
    prefixes: DECODER_PREFIXES,
    sizes: llama_sizes(kv(None), HeadDim::Key(None)),
    norm: RMS,
    norm_tensor: OWN_NORM,
    bias: Flag::Key("attention_bias", false),
    rope: HALF,
    qk_norm: None,
    scale: ScaleRule::InverseSqrtHead,
    soft_cap: None,
    qkv: SEPARATE,
    refusals: &[],
};

const BERT: Family = Family {
    name: "bert",
    model_types: &["bert"],
    prefixes: &["bert.", ""],
    sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Derived),
    norm: LAYER_NORM,
    norm_tensor: NormTensor::Previous { first: "embeddings.LayerNorm", rest: "encoder.layer.{j}.output.LayerNorm" },
    bias: Flag::Always,
    rope: RopeRule::None,
    qkv: QkvTensors::Separate {
        q: "encoder.layer.{i}.attention.self.query",
        k: "encoder.layer.{i}.attention.self.key",
        v: "encoder.layer.{i}.attention.self.value",
    },
    refusals: BERT_POSITIONS,
    ..LLAMA
};

/// The table.
pub(crate) static FAMILIES: &[Family] = &[
    Family {
        name: "gpt2",
        model_types: &["gpt2"],
        prefixes: &["transformer.", ""],
        sizes: Sizes {
            layers: Count { keys: &["n_layer", "num_hidden_layers"], default: Some(12) },
            d_model: Count { keys: &["n_embd", "hidden_size"], default: Some(768) },
            q_heads: Count { keys: &["n_head", "num_attention_heads"], default: Some(12) },
            kv_heads: KvHeads::SameAsQuery,
            d_head: HeadDim::Derived,
        },
        norm: LAYER_NORM,
        norm_tensor: NormTensor::Own("h.{i}.ln_1"),
        bias: Flag::Always,
        rope: RopeRule::None,
        scale: ScaleRule::Gpt2,
        qkv: QkvTensors::Concat { name: "h.{i}.attn.c_attn", conv1d: true },
        ..LLAMA
    },
    LLAMA,
    Family {
        name: "mistral",
        model_types: &["mistral"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        bias: Flag::Never,
        ..LLAMA
    },
    Family {
        name: "mixtral",
        model_types: &["mixtral"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        bias: Flag::Never,
        rope: half_split(1e6),
        ..LLAMA
    },
    Family {
        name: "qwen2",
        model_types: &["qwen2"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(None)),
        bias: Flag::Always,
        ..LLAMA
    },
    Family {
        name: "qwen2_moe",
        model_types: &["qwen2_moe"],
        sizes: llama_sizes(kv(Some(16)), HeadDim::Key(None)),
        bias: Flag::Key("qkv_bias", true),
        ..LLAMA
    },
    Family {
        name: "qwen3",
        model_types: &["qwen3"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(Some(128))),
        qk_norm: Some(head_rms(GainForm::Plain)),
        ..LLAMA
    },
    Family {
        name: "qwen3_moe",
        model_types: &["qwen3_moe"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(None)),
        qk_norm: Some(head_rms(GainForm::Plain)),
        ..LLAMA
    },
    Family {
        name: "gemma",
        model_types: &["gemma"],
        sizes: llama_sizes(kv(Some(16)), HeadDim::Key(Some(256))),
        norm: RMS_ONE_PLUS,
        ..LLAMA
    },
    Family {
        name: "gemma2",
        model_types: &["gemma2"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(Some(256))),
        norm: RMS_ONE_PLUS,
        scale: ScaleRule::QueryPreAttnScalar(256.0),
        soft_cap: Some(("attn_logit_softcapping", Some(50.0))),
        ..LLAMA
    },
    Family {
        name: "gemma3_text",
        model_types: &["gemma3_text"],
        // Published configs leave most sizes to the defaults of the text model.
        sizes: Sizes {
            layers: Count { keys: &["num_hidden_layers"], default: Some(26) },
            d_model: Count { keys: &["hidden_size"], default: Some(2304) },
            q_heads: Count { keys: &["num_attention_heads"], default: Some(8) },
            kv_heads: kv(Some(4)),
            d_head: HeadDim::Key(Some(256)),
        },
        norm: RMS_ONE_PLUS,
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(1e6),
            partial: (&[], 1.0),
            layers: RopeLayers::ByType {
                pattern: (&["sliding_window_pattern", "_sliding_window_pattern"], 6),
                local_theta: Some(("rope_local_base_freq", 10_000.0)),
            },
            longrope_names: &[],
        },
        qk_norm: Some(head_rms(GainForm::OnePlus)),
        // The config has a soft-cap key, but the attention does not apply it: no cap is the larger bound.
        scale: ScaleRule::QueryPreAttnScalar(256.0),
        ..LLAMA
    },
    Family {
        name: "olmo2",
        model_types: &["olmo2"],
        norm: InputNorm { kind: NormKind::None, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        qk_norm: Some(JOINT_RMS),
        ..LLAMA
    },
    Family {
        name: "olmo3",
        model_types: &["olmo3"],
        norm: InputNorm { kind: NormKind::None, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(500_000.0),
            partial: (&[], 1.0),
            layers: RopeLayers::ByType { pattern: (&[], 4), local_theta: None },
            longrope_names: &[],
        },
        qk_norm: Some(JOINT_RMS),
        ..LLAMA
    },
    Family {
        name: "phi3",
        model_types: &["phi3"],
        bias: Flag::Never,
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(10_000.0),
            partial: (&["partial_rotary_factor"], 1.0),
            layers: RopeLayers::Same,
            // Older configs wrote these two for what is LongRoPE here.
            longrope_names: &["su", "yarn"],
        },
        qkv: QkvTensors::Concat { name: "layers.{i}.self_attn.qkv_proj", conv1d: false },
        ..LLAMA
    },
    Family {
        name: "phi",
        model_types: &["phi"],
        sizes: llama_sizes(kv(None), HeadDim::Derived),
        norm: LAYER_NORM,
        bias: Flag::Always,
        rope: partial(10_000.0, (&["partial_rotary_factor"], 0.5)),
        // `qk_layernorm` is refused: the reference implementation sizes its norm for one head and applies it to all at
        // once, so what it means with several heads is not settled.
        ..LLAMA
    },
    Family {
        name: "gpt_neox",
        model_types: &["gpt_neox"],
        prefixes: &["gpt_neox.", ""],
        sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Derived),
        norm: LAYER_NORM,
        bias: Flag::Key("attention_bias", true),
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &["rotary_emb_base"],
            theta: Some(10_000.0),
            partial: (&["partial_rotary_factor", "rotary_pct"], 0.25),
            layers: RopeLayers::Same,
            longrope_names: &[],
        },
        qkv: QkvTensors::Grouped { name: "layers.{i}.attention.query_key_value" },
        ..LLAMA
    },
    Family {
        name: "falcon",
        model_types: &["falcon"],
        prefixes: &["transformer.", ""],
        sizes: Sizes {
            layers: required(&["num_hidden_layers", "n_layer"]),
            d_model: required(&["hidden_size", "n_embed"]),
            q_heads: required(&["num_attention_heads", "n_head"]),
            kv_heads: KvHeads::Falcon,
            d_head: HeadDim::Derived,
        },
        norm: LAYER_NORM,
        norm_tensor: NormTensor::Falcon { two: "h.{i}.ln_attn", one: "h.{i}.input_layernorm" },
        bias: Flag::Key("bias", false),
        qkv: QkvTensors::Grouped { name: "h.{i}.self_attention.query_key_value" },
        ..LLAMA
    },
    Family {
        name: "starcoder2",
        model_types: &["starcoder2"],
        sizes: llama_sizes(kv(Some(2)), HeadDim::Key(None)),
        norm: LAYER_NORM,
        bias: Flag::Key("use_bias", true),
        ..LLAMA
    },
    BERT,
    Family { name: "roberta", model_types: &["roberta", "xlm-roberta"], prefixes: &["roberta.", ""], ..BERT },
    Family {
        name: "granite",
        model_types: &["granite"],
        scale: ScaleRule::Multiplier("attention_multiplier", 1.0),
        ..LLAMA
    },
    Family {
        name: "stablelm",
        model_types: &["stablelm"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Derived),
        norm: LAYER_NORM,
        bias: Flag::Key("use_qkv_bias", false),
        rope: partial(10_000.0, (&["partial_rotary_factor"], 0.25)),
        qk_norm: Some(QkNormRule {
            when: Flag::Key("qk_layernorm", false),
            norm: QkNorm {
                scope: QkNormScope::PerHead,
                kind: NormKind::LayerNorm,
                gain: GainForm::Plain,
                shift: false,
            },
            q: "layers.{i}.self_attn.q_layernorm.norms.{h}",
            k: "layers.{i}.self_attn.k_layernorm.norms.{h}",
            stored: QkNormStored::TensorPerHead,
        }),
        ..LLAMA
    },
    Family {
        name: "cohere",
        model_types: &["cohere"],
        norm: InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: false },
        rope: RopeRule::Rotary {
            layout: RopeLayout::Interleaved,
            theta_keys: &[],
            // The default changed between releases: without the key the angles stay undetermined.
            theta: None,
            partial: (&[], 1.0),
            layers: RopeLayers::Same,
            longrope_names: &[],
        },
        qk_norm: Some(QkNormRule {
            when: Flag::Key("use_qk_norm", false),
            norm: QkNorm {
                scope: QkNormScope::PerHead,
                kind: NormKind::LayerNorm,
                gain: GainForm::Plain,
                shift: false,
            },
            q: "layers.{i}.self_attn.q_norm",
            k: "layers.{i}.self_attn.k_norm",
            stored: QkNormStored::PerHead,
        }),
        ..LLAMA
    },
    Family {
        name: "smollm3",
        model_types: &["smollm3"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(None)),
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(2e6),
            partial: (&[], 1.0),
            layers: RopeLayers::NoRope { interval: ("no_rope_layer_interval", 4) },
            longrope_names: &[],
        },
        ..LLAMA
    },
];

/// The family of a `model_type`.
pub(crate) fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_types.contains(&model_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_the_module_name_of_its_family() {
        let module = |family| crate::model::attention_module(family, 11).unwrap();
        assert_eq!(module("llama"), "model.layers.11.self_attn");
        assert_eq!(module("gpt2"), "transformer.h.11.attn");
        assert_eq!(module("gpt_neox"), "gpt_neox.layers.11.attention");
        assert_eq!(module("bert"), "bert.encoder.layer.11.attention.self");
        assert!(crate::model::attention_module("unheard-of", 0).is_none());
    }

    #[test]
    fn every_model_type_stands_once() {
        let mut seen = std::collections::BTreeSet::new();
        for family in FAMILIES {
            for model_type in family.model_types {
                assert!(seen.insert(*model_type), "{model_type} twice");
            }
        }
        for (model_type, _) in REFUSED {
            assert!(seen.insert(model_type), "{model_type} twice");
        }
        for (wrapper, text) in WRAPPERS {
            assert!(seen.insert(wrapper), "{wrapper} twice");
            assert!(family(text).is_some(), "{text} is no family");
        }
    }
}
