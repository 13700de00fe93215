//! Families in which only some layers have softmax attention, one row each.

use super::parts::*;
use super::schema::{
    Count, Family, Flag, HeadDim, LayerHeads, NormTensor, Otherwise, QkNormRule, QkvTensors, RopeLayers, RopeRule,
    RotaryShare, ScaleRule, Sizes, WindowLayers, WindowRule,
};
use crate::model::spec::{GainForm, InputNorm, NormKind, RopeLayout};

const KINDS: &[&str] = &["layer_types"];

/// The table.
pub(super) static FAMILIES: &[Family] = &[
    QWEN3_NEXT,
    Family {
        name: "qwen3_5",
        model_types: &["qwen3_5_text"],
        sizes: Sizes { kv_heads: kv(Some(4)), ..QWEN3_NEXT.sizes },
        ..QWEN3_NEXT
    },
    // Its indexer leaves out keys, which changes no bound.
    Family {
        name: "qwen4_exp",
        model_types: &["qwen4_exp_text"],
        norm_tensor: NormTensor::Own("layers.{i}.attn_hyper_connection.hc_norm"),
        streams: Some(("hc_count", 4)),
        rope: rotary(10_000.0, RotaryShare::Part(PARTIAL, 1.0)),
        ..QWEN3_NEXT
    },
    Family {
        name: "lfm2",
        model_types: &["lfm2", "lfm2_moe"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: KINDS,
                otherwise: Otherwise::Numbers { key: "full_attn_idxs", absent: true },
            },
            ..llama_sizes(kv(Some(8)), HeadDim::Key(None))
        },
        norm_tensor: NormTensor::Own("layers.{i}.operator_norm"),
        bias: Flag::Never,
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &["theta"],
            theta: Some(1e6),
            share: RotaryShare::Whole,
            layers: RopeLayers::Same,
            longrope_names: &[],
        },
        qk_norm: Some(QkNormRule {
            q: "layers.{i}.self_attn.q_layernorm",
            k: "layers.{i}.self_attn.k_layernorm",
            ..head_rms(GainForm::Plain)
        }),
        ..LLAMA
    },
    Family {
        name: "lfm3",
        model_types: &["lfm3"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid { keys: KINDS, otherwise: Otherwise::Listed },
            ..llama_sizes(kv(Some(4)), HeadDim::Key(Some(128)))
        },
        norm_tensor: NormTensor::Own("layers.{i}.operator_norm"),
        rope: gemma_rope(4),
        qk_norm: Some(head_rms(GainForm::Plain)),
        window: Some(WindowRule { absent: Some(256), switch: None, layers: WindowLayers::Types }),
        ..LLAMA
    },
    Family {
        name: "granitemoehybrid",
        model_types: &["granitemoehybrid"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: &["layer_types", "layers_block_type"],
                // Without a list every layer is a state space.
                otherwise: Otherwise::Numbers { key: "layer_types", absent: false },
            },
            ..llama_sizes(kv(None), HeadDim::Key(None))
        },
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: Some(10_000.0),
            share: RotaryShare::Whole,
            layers: RopeLayers::If("position_embedding_type", "rope"),
            longrope_names: &[],
        },
        scale: ScaleRule::Multiplier("attention_multiplier", Some(1.0)),
        ..LLAMA
    },
    Family {
        name: "jamba",
        model_types: &["jamba"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: &[],
                otherwise: Otherwise::Period { period: ("attn_layer_period", 8), offset: ("attn_layer_offset", 4) },
            },
            ..llama_sizes(kv(Some(8)), HeadDim::Key(None))
        },
        bias: Flag::Never,
        rope: RopeRule::None,
        ..LLAMA
    },
    Family {
        name: "nemotron_h",
        model_types: &["nemotron_h"],
        prefixes: &["backbone.", "model.", ""],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: &["layers_block_type", "layer_types"],
                otherwise: Otherwise::Letters("hybrid_override_pattern"),
            },
            ..llama_sizes(kv(Some(8)), HeadDim::Key(Some(128)))
        },
        norm_tensor: NormTensor::Own("layers.{i}.norm"),
        rope: RopeRule::None,
        qkv: QkvTensors::Separate {
            q: "layers.{i}.mixer.q_proj",
            k: "layers.{i}.mixer.k_proj",
            v: "layers.{i}.mixer.v_proj",
        },
        ..LLAMA
    },
    // Every layer has a state space beside its attention.
    Family {
        name: "falcon_h1",
        model_types: &["falcon_h1"],
        sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
        multipliers: true,
        ..LLAMA
    },
    Family {
        name: "bamba",
        model_types: &["bamba"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: &[],
                otherwise: Otherwise::Numbers { key: "attn_layer_indices", absent: false },
            },
            ..llama_sizes(kv(Some(8)), HeadDim::Key(None))
        },
        // The model overwrites what the config says of the share.
        rope: rotary(10_000.0, RotaryShare::Part(&[], 0.5)),
        ..LLAMA
    },
    Family {
        name: "olmo_hybrid",
        model_types: &["olmo_hybrid"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: KINDS,
                otherwise: Otherwise::LastOf(Count { keys: &[], default: Some(4) }),
            },
            ..llama_sizes(kv(None), HeadDim::Key(None))
        },
        norm: InputNorm { kind: NormKind::None, gain: GainForm::Unit, shift: false },
        norm_tensor: NormTensor::None,
        // A config without a base has no rotation.
        rope: RopeRule::Rotary {
            layout: RopeLayout::HalfSplit,
            theta_keys: &[],
            theta: None,
            share: RotaryShare::Whole,
            layers: RopeLayers::Perhaps,
            longrope_names: &[],
        },
        qk_norm: Some(JOINT_RMS),
        ..LLAMA
    },
    Family {
        name: "minimax",
        model_types: &["minimax"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid { keys: KINDS, otherwise: Otherwise::EverySecond },
            ..llama_sizes(kv(Some(8)), HeadDim::Key(None))
        },
        bias: Flag::Never,
        rope: rotary(1e6, RotaryShare::ChannelsOrShare("rotary_dim")),
        ..LLAMA
    },
];
