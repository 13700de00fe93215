//! Families whose attention reads an RMSNorm, or has its norms after the projections, one row each.

use super::parts::*;
use super::schema::{
    Count, Family, Flag, HeadDim, KvHeads, LayerHeads, NormTensor, Pattern, QkNormRule, QkvTensors, Refusal,
    RopeLayers, RopeRule, RotaryShare, ScaleRule, Setting, Sizes, TemperatureRule, WindowLayers, WindowRule,
};
use crate::model::spec::{GainForm, InputNorm, NormKind, QkNorm, QkNormScope, RopeLayout};

/// The table.
pub(super) static FAMILIES: &[Family] = &[
    LLAMA,
    MISTRAL,
    Family {
        name: "mixtral",
        model_types: &["mixtral"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        bias: Flag::Never,
        rope: half_split(1e6),
        window: in_every_layer(None),
        ..LLAMA
    },
    Family {
        name: "qwen2",
        model_types: &["qwen2"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(None)),
        bias: Flag::Always,
        window: switched(UPPER),
        ..LLAMA
    },
    Family {
        name: "qwen2_moe",
        model_types: &["qwen2_moe"],
        sizes: llama_sizes(kv(Some(16)), HeadDim::Key(None)),
        bias: Flag::Key("qkv_bias", true),
        window: switched(WindowLayers::EverySecondBelow("max_window_layers", 28)),
        ..LLAMA
    },
    Family {
        name: "qwen3",
        model_types: &["qwen3"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(Some(128))),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: switched(UPPER),
        ..LLAMA
    },
    Family {
        name: "qwen3_moe",
        model_types: &["qwen3_moe"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(None)),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: switched(WindowLayers::All),
        ..LLAMA
    },
    // Full and sliding layers have rotations of their own; a config without a list has full ones only.
    Family {
        name: "mellum",
        model_types: &["mellum"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(Some(128))),
        rope: rope_by_type(500_000.0, 1),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: Some(WindowRule { absent: Some(1024), switch: None, layers: WindowLayers::Types }),
        ..LLAMA
    },
    Family { name: "aria_text", model_types: &["aria_text"], ..LLAMA },
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
        window: all_but_every(4096, &[], 2),
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
            layer_heads: LayerHeads::Uniform,
        },
        norm: RMS_ONE_PLUS,
        rope: gemma_rope(6),
        qk_norm: Some(head_rms(GainForm::OnePlus)),
        // The config has a soft-cap key, but the attention does not apply it: no cap is the larger bound.
        scale: ScaleRule::QueryPreAttnScalar(256.0),
        window: all_but_every(4096, &["_sliding_window_pattern", "sliding_window_pattern"], 6),
        ..LLAMA
    },
    Family {
        name: "gemma3n_text",
        model_types: &["gemma3n_text"],
        sizes: llama_sizes(kv(Some(2)), HeadDim::Key(Some(256))),
        rope: gemma_rope(5),
        qk_norm: Some(head_rms(GainForm::Plain)),
        scale: ScaleRule::One,
        v_norm: true,
        shared_kv: Some(("num_kv_shared_layers", 15)),
        ..LLAMA
    },
    Family {
        name: "gemma4_text",
        model_types: &["gemma4_text", "gemma4_unified_text"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(Some(256))),
        rope: gemma_rope(6),
        qk_norm: Some(head_rms(GainForm::Plain)),
        scale: ScaleRule::One,
        v_norm: true,
        shared_kv: Some(("num_kv_shared_layers", 0)),
        global_heads: true,
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
            share: RotaryShare::Whole,
            layers: RopeLayers::ByType { pattern: Pattern { keys: &[], every: 4, first: false }, local_theta: None },
            longrope_names: &[],
        },
        qk_norm: Some(JOINT_RMS),
        window: all_but_every(4096, &[], 4),
        ..LLAMA
    },
    PHI3,
    Family {
        name: "phi4_multimodal",
        model_types: &["phi4_multimodal"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        ..PHI3
    },
    Family {
        name: "bitnet",
        model_types: &["bitnet"],
        sizes: llama_sizes(kv(Some(5)), HeadDim::Key(None)),
        rope: half_split(500_000.0),
        ..LLAMA
    },
    Family {
        name: "granite",
        model_types: &["granite"],
        scale: ScaleRule::Multiplier("attention_multiplier", Some(1.0)),
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
            share: RotaryShare::Whole,
            layers: RopeLayers::NoRope { interval: ("no_rope_layer_interval", 4) },
            longrope_names: &[],
        },
        window: Some(WindowRule { absent: None, switch: Some("use_sliding_window"), layers: WindowLayers::NotRotated }),
        ..LLAMA
    },
    Family {
        name: "gpt_oss",
        model_types: &["gpt_oss"],
        // The sinks are one more column of the softmax: they raise no logit of a key.
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(64))),
        bias: Flag::Key("attention_bias", true),
        rope: half_split(150_000.0),
        window: all_but_every(128, &[], 2),
        sinks: Some("layers.{i}.self_attn.sinks"),
        rope_default: Some(
            r#"{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                "original_max_position_embeddings": 4096}"#,
        ),
        ..LLAMA
    },
    Family {
        name: "glm4",
        model_types: &["glm", "glm4"],
        sizes: llama_sizes(kv(Some(2)), HeadDim::Key(Some(128))),
        bias: Flag::Key("attention_bias", true),
        rope: interleaved(10_000.0, RotaryShare::Part(PARTIAL, 0.5)),
        ..LLAMA
    },
    Family {
        name: "glm4_moe",
        model_types: &["glm4_moe"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        rope: rotary(10_000.0, RotaryShare::Part(PARTIAL, 0.5)),
        qk_norm: Some(QkNormRule { when: Flag::Key("use_qk_norm", false), ..head_rms(GainForm::Plain) }),
        ..LLAMA
    },
    Family {
        name: "minimax_m2",
        model_types: &["minimax_m2"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        bias: Flag::Never,
        rope: rotary(5e6, RotaryShare::ChannelsOrShare("rotary_dim")),
        qk_norm: Some(JOINT_RMS),
        ..LLAMA
    },
    Family {
        name: "minimax_m3",
        model_types: &["minimax_m3_vl_text"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(Some(128))),
        norm: RMS_ONE_PLUS,
        bias: Flag::Never,
        rope: rotary(5e6, RotaryShare::ChannelsOrShare("rotary_dim")),
        qk_norm: Some(head_rms(GainForm::OnePlus)),
        ..LLAMA
    },
    Family { name: "olmoe", model_types: &["olmoe"], qk_norm: Some(JOINT_RMS), refusals: CLIP, ..LLAMA },
    Family {
        name: "exaone4",
        model_types: &["exaone4"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(None)),
        norm: InputNorm { kind: NormKind::None, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        bias: Flag::Never,
        rope: sliding_only(RopeLayout::HalfSplit, PATTERN, true),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: all_but_every(4096, PATTERN, 4),
        ..LLAMA
    },
    Family {
        name: "seed_oss",
        model_types: &["seed_oss"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        bias: Flag::Key("attention_bias", true),
        ..LLAMA
    },
    ERNIE,
    Family {
        name: "ernie4_5_moe",
        model_types: &["ernie4_5_moe"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(None)),
        ..ERNIE
    },
    Family { name: "arcee", model_types: &["arcee"], ..LLAMA },
    Family {
        name: "helium",
        model_types: &["helium"],
        sizes: llama_sizes(kv(Some(20)), HeadDim::Key(Some(128))),
        rope: interleaved(1e5, RotaryShare::Whole),
        ..LLAMA
    },
    Family {
        name: "apertus",
        model_types: &["apertus"],
        norm_tensor: NormTensor::Own("layers.{i}.attention_layernorm"),
        rope: half_split(12e6),
        rope_default: Some(
            r#"{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0}"#,
        ),
        qk_norm: Some(head_rms(GainForm::Plain)),
        ..LLAMA
    },
    Family {
        name: "hunyuan_v1_dense",
        model_types: &["hunyuan_v1_dense", "hunyuan_v1_moe"],
        sizes: llama_sizes(kv(None), HeadDim::Key(None)),
        qk_norm: Some(QkNormRule {
            norm: QkNorm {
                scope: QkNormScope::PerHead,
                kind: NormKind::RmsNorm,
                gain: GainForm::Plain,
                shift: false,
                behind_rotation: true,
                rotated_only: false,
            },
            q: "layers.{i}.self_attn.query_layernorm",
            k: "layers.{i}.self_attn.key_layernorm",
            ..head_rms(GainForm::Plain)
        }),
        refusals: &[
            Refusal { key: "use_qk_norm", unless: Setting::True, why: "without the norm, its gains bound nothing" },
            Refusal { key: "qk_norm", unless: Setting::True, why: "without the norm, its gains bound nothing" },
            Refusal {
                key: "use_cla",
                unless: Setting::False,
                why: "some layers use the keys and values of another layer",
            },
        ],
        ..LLAMA
    },
    Family {
        name: "dots1",
        model_types: &["dots1"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(None)),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: Some(WindowRule {
            absent: Some(4096),
            switch: None,
            layers: WindowLayers::From("max_window_layers", 62),
        }),
        ..LLAMA
    },
    Family {
        name: "granitemoe",
        model_types: &["granitemoe", "granitemoeshared"],
        scale: ScaleRule::Multiplier("attention_multiplier", Some(1.0)),
        ..LLAMA
    },
    Family {
        name: "qwen2_vl",
        model_types: &["qwen2_vl_text", "qwen2_5_vl_text"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        bias: Flag::Always,
        rope: half_split(1e6),
        window: switched(WindowLayers::From("max_window_layers", 80)),
        ..LLAMA
    },
    QWEN3_VL,
    Family {
        name: "qwen3_vl_moe",
        model_types: &["qwen3_vl_moe_text"],
        sizes: llama_sizes(kv(Some(16)), HeadDim::Key(None)),
        ..QWEN3_VL
    },
    Family {
        name: "openelm",
        model_types: &["openelm"],
        prefixes: &["transformer.", ""],
        sizes: Sizes {
            layers: required(&["num_transformer_layers"]),
            d_model: required(&["model_dim"]),
            q_heads: required(&["num_query_heads"]),
            kv_heads: KvHeads::SameAsQuery,
            d_head: HeadDim::Key(None),
            layer_heads: LayerHeads::Lists { q: "num_query_heads", kv: "num_kv_heads" },
        },
        norm_tensor: NormTensor::Own("layers.{i}.attn_norm"),
        bias: Flag::Never,
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &["rope_freq_constant"],
            theta: Some(10_000.0),
            share: RotaryShare::Whole,
            layers: RopeLayers::Same,
            longrope_names: &[],
        },
        qk_norm: Some(QkNormRule {
            when: Flag::Key("normalize_qk_projections", false),
            q: "layers.{i}.attn.q_norm",
            k: "layers.{i}.attn.k_norm",
            ..head_rms(GainForm::Plain)
        }),
        qkv: QkvTensors::Concat { name: "layers.{i}.attn.qkv_proj", conv1d: false },
        refusals: &[Refusal {
            key: "normalization_layer_name",
            unless: Setting::Text("rms_norm"),
            why: "only its RMSNorm is supported",
        }],
        ..LLAMA
    },
    Family {
        name: "deci",
        model_types: &["deci", "nemotron-nas"],
        sizes: Sizes { layer_heads: LayerHeads::Blocks, ..llama_sizes(kv(None), HeadDim::Key(None)) },
        refusals: &[Refusal {
            key: "position_embedding_type",
            unless: Setting::Text("rope"),
            why: "other kinds rotate other pairs or none",
        }],
        ..LLAMA
    },
    Family {
        name: "ministral3",
        model_types: &["ministral3"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        bias: Flag::Never,
        rope: half_split(1e6),
        rope_default: Some(
            r#"{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}"#,
        ),
        temperature: TemperatureRule::Ministral3,
        window: in_every_layer(None),
        ..LLAMA
    },
    Family {
        name: "llama4_text",
        model_types: &["llama4_text"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        rope: RopeRule::Rotary {
            layout: RopeLayout::Interleaved,
            theta_keys: &[],
            theta: Some(500_000.0),
            share: RotaryShare::Whole,
            layers: RopeLayers::NoRope { interval: ("no_rope_layer_interval", 4) },
            longrope_names: &[],
        },
        qk_norm: Some(QkNormRule { when: Flag::Key("use_qk_norm", true), ..bare_head_rms(true) }),
        temperature: TemperatureRule::Llama4,
        ..LLAMA
    },
    Family { name: "ministral", model_types: &["ministral"], ..MISTRAL },
    Family {
        name: "cwm",
        model_types: &["cwm"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        bias: Flag::Never,
        rope: half_split(1e6),
        window: all_but_first_of(8192, 4),
        rope_default: Some(
            r#"{"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0}"#,
        ),
        ..LLAMA
    },
    Family {
        name: "solar_open",
        model_types: &["solar_open"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        rope: half_split(1e6),
        ..LLAMA
    },
    Family {
        name: "hyperclovax",
        model_types: &["hyperclovax"],
        scale: ScaleRule::Multiplier("attention_multiplier", None),
        ..LLAMA
    },
    GRANITE_SWA,
    Family {
        name: "granitemoe_swa",
        model_types: &["granitemoe_swa"],
        sizes: llama_sizes(kv(None), HeadDim::Key(None)),
        ..GRANITE_SWA
    },
    Family {
        name: "vaultgemma",
        model_types: &["vaultgemma"],
        sizes: llama_sizes(kv(Some(4)), HeadDim::Key(Some(256))),
        norm: RMS_ONE_PLUS,
        scale: ScaleRule::QueryPreAttnScalar(256.0),
        soft_cap: Some(("attn_logit_softcapping", Some(50.0))),
        window: all_but_every(4096, &[], 2),
        ..LLAMA
    },
    Family {
        name: "exaone_moe",
        model_types: &["exaone_moe"],
        sizes: llama_sizes(kv(Some(32)), HeadDim::Key(None)),
        bias: Flag::Never,
        rope: sliding_only(RopeLayout::HalfSplit, PATTERN, true),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: all_but_every(4096, PATTERN, 4),
        ..LLAMA
    },
    Family {
        name: "afmoe",
        model_types: &["afmoe"],
        sizes: llama_sizes(kv(None), HeadDim::Key(Some(128))),
        rope: sliding_only(RopeLayout::HalfSplit, &["global_attn_every_n_layers"], false),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: all_but_every(1024, &["global_attn_every_n_layers"], 4),
        ..LLAMA
    },
    Family {
        name: "laguna",
        model_types: &["laguna"],
        sizes: Sizes {
            layer_heads: LayerHeads::Queries("num_attention_heads_per_layer"),
            ..llama_sizes(kv(Some(8)), HeadDim::Key(Some(128)))
        },
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(500_000.0),
            share: RotaryShare::Part(&[], 1.0),
            layers: RopeLayers::ByType { pattern: Pattern { keys: &[], every: 1, first: false }, local_theta: None },
            longrope_names: &[],
        },
        rope_default: Some(
            r#"{"full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}"#,
        ),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: Some(WindowRule { absent: Some(512), switch: None, layers: WindowLayers::Types }),
        ..LLAMA
    },
    // A gate behind the attention is the only other part that knows of heads.
    Family {
        name: "step3p5",
        model_types: &["step3p5"],
        sizes: Sizes {
            layer_heads: LayerHeads::Queries("num_attention_heads_per_layer"),
            ..llama_sizes(kv(Some(8)), HeadDim::Key(Some(128)))
        },
        norm: RMS_ONE_PLUS,
        by_kind: true,
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(10_000.0),
            share: RotaryShare::Part(&[], 1.0),
            layers: RopeLayers::ByType { pattern: Pattern { keys: &[], every: 1, first: false }, local_theta: None },
            longrope_names: &[],
        },
        qk_norm: Some(head_rms(GainForm::OnePlus)),
        scale: ScaleRule::QueryPreAttnScalar(128.0),
        window: Some(WindowRule { absent: None, switch: None, layers: WindowLayers::Types }),
        ..LLAMA
    },
    Family {
        name: "hy_v3",
        model_types: &["hy_v3"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(Some(128))),
        rope: half_split(11_158_840.0),
        qk_norm: Some(head_rms(GainForm::Plain)),
        ..LLAMA
    },
    Family {
        name: "flex_olmo",
        model_types: &["flex_olmo"],
        norm: InputNorm { kind: NormKind::None, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        rope: half_split(500_000.0),
        qk_norm: Some(JOINT_RMS),
        ..LLAMA
    },
    Family {
        name: "nanochat",
        model_types: &["nanochat"],
        // It turns pairs the other way round, which changes no norm and so no bound.
        norm: InputNorm { kind: NormKind::RmsNorm, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        qk_norm: Some(bare_head_rms(false)),
        ..LLAMA
    },
];
