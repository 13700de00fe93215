//! Families with multi-head latent attention, one row each.

use super::parts::*;
use super::schema::{
    Count, Family, Flag, HeadDim, KvHeads, LayerHeads, MlaRule, NormTensor, Otherwise, QkvTensors, RopeLayers,
    RopeRule, RotaryShare, ScaleRule, Sizes, TemperatureRule,
};
use crate::model::spec::RopeLayout;

/// DeepSeek V3's sizes where a config leaves them out.
const V3: MlaRule = MlaRule {
    q_rank: Some(1536),
    kv_rank: 512,
    d_nope: 128,
    d_rope: 64,
    d_value: Some(128),
    may_split: true,
    scaled_latents: false,
    per_layer: 1,
};

const fn rope(layout: RopeLayout, theta: f64) -> RopeRule {
    RopeRule::Rotary {
        layout,
        theta_keys: &[],
        theta: Some(theta),
        share: RotaryShare::Fixed,
        layers: RopeLayers::Same,
        longrope_names: &[],
    }
}

const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    model_types: &["deepseek_v3", "kimi_k2"],
    sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Key(None)),
    // `attention_bias` stands in front of norms, but for the shared rotated key's, which counts where it is stored.
    bias: Flag::Never,
    rope: rope(RopeLayout::Interleaved, 10_000.0),
    scale: ScaleRule::YarnSquared,
    qkv: QkvTensors::Latent {
        q: "layers.{i}.self_attn.q_proj",
        q_b: "layers.{i}.self_attn.q_b_proj",
        q_norm: "layers.{i}.self_attn.q_a_layernorm",
        kv_a: "layers.{i}.self_attn.kv_a_proj_with_mqa",
        kv_norm: "layers.{i}.self_attn.kv_a_layernorm",
        kv_b: "layers.{i}.self_attn.kv_b_proj",
    },
    mla: Some(V3),
    ..LLAMA
};

/// The table.
pub(super) static FAMILIES: &[Family] = &[
    DEEPSEEK_V3,
    Family {
        name: "deepseek_v2",
        model_types: &["deepseek_v2"],
        mla: Some(MlaRule { may_split: false, ..V3 }),
        ..DEEPSEEK_V3
    },
    // Which keys a query meets is chosen by an indexer with keys of its own; logits are bounded for any choice.
    Family {
        name: "deepseek_v32",
        model_types: &["deepseek_v32"],
        mla: Some(MlaRule { may_split: false, ..V3 }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "glm_moe_dsa",
        model_types: &["glm_moe_dsa"],
        mla: Some(MlaRule { q_rank: Some(2048), d_nope: 192, d_value: Some(256), may_split: false, ..V3 }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "glm4_moe_lite",
        model_types: &["glm4_moe_lite"],
        mla: Some(MlaRule { q_rank: Some(768), d_nope: 192, d_value: Some(256), ..V3 }),
        ..DEEPSEEK_V3
    },
    Family { name: "youtu", model_types: &["youtu"], ..DEEPSEEK_V3 },
    Family { name: "axk1", model_types: &["axk1"], ..DEEPSEEK_V3 },
    // The sinks are one more column of the softmax, and the gates multiply its output.
    Family {
        name: "hy_v4",
        model_types: &["hy_v4"],
        rope: rope(RopeLayout::HalfSplit, 10_000.0),
        mla: Some(MlaRule { d_nope: 192, d_value: Some(256), may_split: false, ..V3 }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "minicpm3",
        model_types: &["minicpm3"],
        rope: rope(RopeLayout::HalfSplit, 10_000.0),
        mla: Some(MlaRule {
            q_rank: Some(768),
            kv_rank: 256,
            d_nope: 64,
            d_rope: 32,
            d_value: None,
            may_split: false,
            ..V3
        }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "mistral4",
        model_types: &["mistral4"],
        temperature: TemperatureRule::Ministral3,
        mla: Some(MlaRule { q_rank: Some(1024), kv_rank: 256, d_nope: 64, ..V3 }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "longcat_flash",
        model_types: &["longcat_flash"],
        sizes: Sizes { layers: required(&["num_layers"]), ..llama_sizes(KvHeads::SameAsQuery, HeadDim::Key(None)) },
        norm_tensor: NormTensor::Own("layers.{i}.input_layernorm.{a}"),
        rope: rope(RopeLayout::Interleaved, 1e7),
        qkv: QkvTensors::Latent {
            q: "layers.{i}.self_attn.{a}.q_proj",
            q_b: "layers.{i}.self_attn.{a}.q_b_proj",
            q_norm: "layers.{i}.self_attn.{a}.q_a_layernorm",
            kv_a: "layers.{i}.self_attn.{a}.kv_a_proj_with_mqa",
            kv_norm: "layers.{i}.self_attn.{a}.kv_a_layernorm",
            kv_b: "layers.{i}.self_attn.{a}.kv_b_proj",
        },
        mla: Some(MlaRule { may_split: false, scaled_latents: true, per_layer: 2, ..V3 }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "kimi_linear",
        model_types: &["kimi_linear"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid { keys: &["layer_types"], otherwise: Otherwise::KimiLinear },
            ..llama_sizes(KvHeads::SameAsQuery, HeadDim::Key(None))
        },
        rope: RopeRule::None,
        scale: ScaleRule::InverseSqrtHead,
        mla: Some(MlaRule { q_rank: None, may_split: false, ..V3 }),
        ..DEEPSEEK_V3
    },
    Family {
        name: "bailing_hybrid",
        model_types: &["bailing_hybrid"],
        sizes: Sizes {
            layer_heads: LayerHeads::Hybrid {
                keys: &["layer_types"],
                otherwise: Otherwise::LastOf(Count { keys: &["layer_group_size"], default: Some(6) }),
            },
            ..llama_sizes(KvHeads::SameAsQuery, HeadDim::Key(None))
        },
        rope: rope(RopeLayout::Interleaved, 6e6),
        qkv: QkvTensors::Latent {
            q: "layers.{i}.attention.q_proj",
            q_b: "layers.{i}.attention.q_b_proj",
            q_norm: "layers.{i}.attention.q_a_layernorm",
            kv_a: "layers.{i}.attention.kv_a_proj_with_mqa",
            kv_norm: "layers.{i}.attention.kv_a_layernorm",
            kv_b: "layers.{i}.attention.kv_b_proj",
        },
        mla: Some(MlaRule { q_rank: None, may_split: false, ..V3 }),
        ..DEEPSEEK_V3
    },
];
