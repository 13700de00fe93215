//! The families whose attention reads a LayerNorm, one row each.

use super::parts::*;
use super::schema::{
    Count, Family, Flag, HeadDim, KvHeads, LayerHeads, NormTensor, Pattern, QkNormRule, QkNormStored, QkvTensors,
    Refusal, RopeLayers, RopeRule, RotaryShare, ScaleRule, Setting, Sizes,
};
use crate::model::spec::{GainForm, InputNorm, NormKind, QkNorm, QkNormScope, RopeLayout};

/// The table.
pub(super) static FAMILIES: &[Family] = &[
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
            layer_heads: LayerHeads::Uniform,
        },
        norm: LAYER_NORM,
        norm_tensor: NormTensor::Own("h.{i}.ln_1"),
        bias: Flag::Always,
        rope: RopeRule::None,
        scale: ScaleRule::GptByLayer,
        qkv: QkvTensors::Concat { name: "h.{i}.attn.c_attn", conv1d: true },
        ..LLAMA
    },
    Family {
        name: "phi",
        model_types: &["phi"],
        sizes: llama_sizes(kv(None), HeadDim::Derived),
        norm: LAYER_NORM,
        bias: Flag::Always,
        rope: rotary(10_000.0, RotaryShare::Part(&["partial_rotary_factor"], 0.5)),
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
            share: RotaryShare::Part(&["rotary_pct", "partial_rotary_factor"], 0.25),
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
            layer_heads: LayerHeads::Uniform,
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
        window: in_every_layer(None),
        ..LLAMA
    },
    BERT,
    Family { name: "roberta", model_types: &["roberta", "xlm-roberta"], prefixes: &["roberta.", ""], ..BERT },
    Family {
        name: "stablelm",
        model_types: &["stablelm"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Derived),
        norm: LAYER_NORM,
        bias: Flag::Key("use_qkv_bias", false),
        rope: rotary(10_000.0, RotaryShare::Part(&["partial_rotary_factor"], 0.25)),
        qk_norm: Some(QkNormRule {
            when: Flag::Key("qk_layernorm", false),
            norm: HEAD_LAYER_NORM,
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
            share: RotaryShare::Whole,
            layers: RopeLayers::Same,
            longrope_names: &[],
        },
        qk_norm: Some(QkNormRule {
            when: Flag::Key("use_qk_norm", false),
            norm: HEAD_LAYER_NORM,
            q: "layers.{i}.self_attn.q_norm",
            k: "layers.{i}.self_attn.k_norm",
            stored: QkNormStored::PerHead,
        }),
        ..LLAMA
    },
    Family {
        name: "olmo",
        model_types: &["olmo"],
        norm: InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        refusals: CLIP,
        ..LLAMA
    },
    Family {
        name: "cohere2",
        model_types: &["cohere2"],
        sizes: llama_sizes(kv(None), HeadDim::Key(None)),
        norm: InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: false },
        rope: sliding_only(RopeLayout::Interleaved, PATTERN, false),
        window: all_but_every(4096, PATTERN, 4),
        ..LLAMA
    },
    Family {
        name: "cohere2_moe",
        model_types: &["cohere2_moe"],
        sizes: llama_sizes(kv(None), HeadDim::Key(Some(128))),
        norm: InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: false },
        rms_key: Some("rms_norm_eps"),
        // Full layers are rotated where they are dense and `prefix_dense_sliding_window_pattern` is 1.
        rope: RopeRule::Rotary {
            layout: RopeLayout::Interleaved,
            theta_keys: &[],
            theta: Some(10_000.0),
            share: RotaryShare::Whole,
            layers: RopeLayers::Perhaps,
            longrope_names: &[],
        },
        window: all_but_every(4096, PATTERN, 4),
        ..LLAMA
    },
    Family {
        name: "modernbert-decoder",
        model_types: &["modernbert-decoder"],
        sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Derived),
        norm: InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: false },
        norm_tensor: NormTensor::FirstApart { first: "embeddings.norm", rest: "layers.{i}.attn_norm" },
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &["global_rope_theta"],
            theta: Some(160_000.0),
            share: RotaryShare::Whole,
            layers: RopeLayers::ByType {
                pattern: Pattern { keys: &["global_attn_every_n_layers"], every: 3, first: true },
                local_theta: Some(("local_rope_theta", 10_000.0)),
            },
            longrope_names: &[],
        },
        qkv: QkvTensors::Separate {
            q: "layers.{i}.attn.q_proj",
            k: "layers.{i}.attn.k_proj",
            v: "layers.{i}.attn.v_proj",
        },
        // Its window (`local_attention`) is not read: no bound depends on it.
        refusals: &[
            Refusal { key: "norm_bias", unless: Setting::False, why: "only its norm without a shift is supported" },
            Refusal {
                key: "rope_scaling",
                unless: Setting::False,
                why: "it would scale both kinds of layers, which is not supported",
            },
        ],
        ..LLAMA
    },
    Family {
        name: "roberta-prelayernorm",
        model_types: &["roberta-prelayernorm"],
        prefixes: &["roberta_prelayernorm.", ""],
        norm_tensor: NormTensor::Own("encoder.layer.{i}.attention.LayerNorm"),
        ..BERT
    },
    Family {
        name: "nemotron",
        model_types: &["nemotron"],
        norm: InputNorm { kind: NormKind::LayerNorm, gain: GainForm::OnePlus, shift: true },
        rope: rotary(10_000.0, RotaryShare::Part(PARTIAL, 0.5)),
        ..LLAMA
    },
    Family {
        name: "phimoe",
        model_types: &["phimoe"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        norm: LAYER_NORM,
        rope: half_split(1e6),
        window: in_every_layer(None),
        ..LLAMA
    },
    Family {
        name: "opt",
        model_types: &["opt"],
        prefixes: &["model.", "", "decoder."],
        sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Derived),
        norm: LAYER_NORM,
        norm_tensor: NormTensor::Own("decoder.layers.{i}.self_attn_layer_norm"),
        bias: Flag::Key("enable_bias", true),
        rope: RopeRule::None,
        qkv: QkvTensors::Separate {
            q: "decoder.layers.{i}.self_attn.q_proj",
            k: "decoder.layers.{i}.self_attn.k_proj",
            v: "decoder.layers.{i}.self_attn.v_proj",
        },
        refusals: &[
            Refusal {
                key: "do_layer_norm_before",
                unless: Setting::True,
                why: "the norm after attention is not supported",
            },
            Refusal { key: "layer_norm_elementwise_affine", unless: Setting::True, why: "it has no norm weights" },
        ],
        ..LLAMA
    },
    Family {
        name: "gptj",
        model_types: &["gptj"],
        prefixes: &["transformer.", ""],
        sizes: gpt_sizes(KvHeads::SameAsQuery),
        norm: LAYER_NORM,
        norm_tensor: NormTensor::Own("h.{i}.ln_1"),
        bias: Flag::Never,
        rope: interleaved(10_000.0, RotaryShare::Channels("rotary_dim", 64)),
        qkv: QkvTensors::Separate { q: "h.{i}.attn.q_proj", k: "h.{i}.attn.k_proj", v: "h.{i}.attn.v_proj" },
        ..LLAMA
    },
    Family {
        name: "gpt_bigcode",
        model_types: &["gpt_bigcode"],
        prefixes: &["transformer.", ""],
        sizes: gpt_sizes(KvHeads::One),
        norm: LAYER_NORM,
        norm_tensor: NormTensor::Own("h.{i}.ln_1"),
        bias: Flag::Always,
        rope: RopeRule::None,
        scale: ScaleRule::Gpt,
        qkv: QkvTensors::Concat { name: "h.{i}.attn.c_attn", conv1d: false },
        refusals: &[Refusal {
            key: "multi_query",
            unless: Setting::True,
            why: "only its multi-query form is supported",
        }],
        ..LLAMA
    },
    Family {
        name: "jais2",
        model_types: &["jais2"],
        norm: LAYER_NORM,
        bias: Flag::Key("attention_bias", true),
        ..LLAMA
    },
    Family {
        name: "persimmon",
        model_types: &["persimmon"],
        sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Derived),
        norm: LAYER_NORM,
        bias: Flag::Always,
        rope: rotary(10_000.0, RotaryShare::Part(PARTIAL, 0.5)),
        qk_norm: Some(QkNormRule {
            when: Flag::Key("qk_layernorm", true),
            norm: QkNorm {
                scope: QkNormScope::PerHead,
                kind: NormKind::LayerNorm,
                gain: GainForm::Plain,
                shift: true,
                behind_rotation: false,
                rotated_only: false,
            },
            q: "layers.{i}.self_attn.q_layernorm",
            k: "layers.{i}.self_attn.k_layernorm",
            stored: QkNormStored::Shared,
        }),
        qkv: QkvTensors::Grouped { name: "layers.{i}.self_attn.query_key_value" },
        ..LLAMA
    },
];
