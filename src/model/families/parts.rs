//! What rows of the table share.

use super::schema::{
    Count, Family, Flag, HeadDim, KvHeads, LayerHeads, NormTensor, Otherwise, Pattern, QkNormRule, QkNormStored,
    QkvTensors, Refusal, RopeLayers, RopeRule, RotaryShare, ScaleRule, Setting, Sizes, TemperatureRule, WindowLayers,
    WindowRule,
};
use crate::model::spec::{GainForm, InputNorm, NormKind, QkNorm, QkNormScope, RopeLayout};

pub(super) const DECODER_PREFIXES: &[&str] =
    &["model.", "", "language_model.model.", "model.language_model.", "transformer.", "language_model."];
pub(super) const HALF: RopeRule = half_split(10_000.0);
pub(super) const RMS: InputNorm = InputNorm { kind: NormKind::RmsNorm, gain: GainForm::Plain, shift: false };
pub(super) const RMS_ONE_PLUS: InputNorm = InputNorm { kind: NormKind::RmsNorm, gain: GainForm::OnePlus, shift: false };
pub(super) const LAYER_NORM: InputNorm = InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: true };
pub(super) const LAYERS: Count = required(&["num_hidden_layers"]);
pub(super) const WIDTH: Count = required(&["hidden_size"]);
pub(super) const HEADS: Count = required(&["num_attention_heads"]);
pub(super) const OWN_NORM: NormTensor = NormTensor::Own("layers.{i}.input_layernorm");
pub(super) const SEPARATE: QkvTensors = QkvTensors::Separate {
    q: "layers.{i}.self_attn.q_proj",
    k: "layers.{i}.self_attn.k_proj",
    v: "layers.{i}.self_attn.v_proj",
};
pub(super) const BERT_POSITIONS: &[Refusal] = &[Refusal {
    key: "position_embedding_type",
    unless: Setting::Text("absolute"),
    why: "relative position embeddings are added to the logits",
}];

pub(super) const fn required(keys: &'static [&'static str]) -> Count {
    Count { keys, default: None }
}

pub(super) const fn kv(default: Option<usize>) -> KvHeads {
    KvHeads::Key(Count { keys: &["num_key_value_heads"], default })
}

pub(super) const fn half_split(theta: f64) -> RopeRule {
    rotary(theta, RotaryShare::Whole)
}

pub(super) const fn rotary(theta: f64, share: RotaryShare) -> RopeRule {
    RopeRule::Rotary {
        layout: RopeLayout::HalfSplit,
        theta_keys: &[],
        theta: Some(theta),
        share,
        layers: RopeLayers::Same,
        longrope_names: &[],
    }
}

pub(super) const fn llama_sizes(kv_heads: KvHeads, d_head: HeadDim) -> Sizes {
    Sizes { layers: LAYERS, d_model: WIDTH, q_heads: HEADS, kv_heads, d_head, layer_heads: LayerHeads::Uniform }
}

pub(super) const fn gpt_sizes(kv_heads: KvHeads) -> Sizes {
    Sizes {
        layers: required(&["n_layer", "num_hidden_layers"]),
        d_model: required(&["n_embd", "hidden_size"]),
        q_heads: required(&["n_head", "num_attention_heads"]),
        kv_heads,
        d_head: HeadDim::Derived,
        layer_heads: LayerHeads::Uniform,
    }
}

pub(super) const fn head_rms(gain: GainForm) -> QkNormRule {
    QkNormRule {
        when: Flag::Always,
        norm: QkNorm {
            scope: QkNormScope::PerHead,
            kind: NormKind::RmsNorm,
            gain,
            shift: false,
            behind_rotation: false,
            rotated_only: false,
        },
        q: "layers.{i}.self_attn.q_norm",
        k: "layers.{i}.self_attn.k_norm",
        stored: QkNormStored::Shared,
    }
}

/// Without gains, behind the rotation.
pub(super) const fn bare_head_rms(rotated_only: bool) -> QkNormRule {
    let mut rule = head_rms(GainForm::Unit);
    rule.norm.behind_rotation = true;
    rule.norm.rotated_only = rotated_only;
    rule.stored = QkNormStored::Nothing;
    rule
}

pub(super) const PARTIAL: &[&str] = &["partial_rotary_factor"];
pub(super) const PATTERN: &[&str] = &["sliding_window_pattern"];

pub(super) const fn interleaved(theta: f64, share: RotaryShare) -> RopeRule {
    RopeRule::Rotary {
        layout: RopeLayout::Interleaved,
        theta_keys: &[],
        theta: Some(theta),
        share,
        layers: RopeLayers::Same,
        longrope_names: &[],
    }
}

pub(super) const fn sliding_only(layout: RopeLayout, pattern: &'static [&'static str], or_all: bool) -> RopeRule {
    RopeRule::Rotary {
        layout,
        theta_keys: &[],
        theta: Some(10_000.0),
        share: RotaryShare::Whole,
        layers: RopeLayers::Sliding { pattern: Pattern { keys: pattern, every: 4, first: false }, or_all },
        longrope_names: &[],
    }
}

/// A window in every layer.
pub(super) const fn in_every_layer(absent: Option<usize>) -> Option<WindowRule> {
    Some(WindowRule { absent, switch: None, layers: WindowLayers::All })
}

/// A window in all layers but every n-th.
pub(super) const fn all_but_every(window: usize, keys: &'static [&'static str], every: usize) -> Option<WindowRule> {
    let layers = WindowLayers::AllButOneOf { keys, every, first: false };
    Some(WindowRule { absent: Some(window), switch: None, layers })
}

/// As [`all_but_every`], from the first layer on.
pub(super) const fn all_but_first_of(window: usize, every: usize) -> Option<WindowRule> {
    Some(WindowRule {
        absent: Some(window),
        switch: None,
        layers: WindowLayers::AllButOneOf { keys: &[], every, first: true },
    })
}

/// Qwen's: off by default, and in the upper layers.
pub(super) const fn switched(layers: WindowLayers) -> Option<WindowRule> {
    Some(WindowRule { absent: Some(4096), switch: Some("use_sliding_window"), layers })
}

pub(super) const UPPER: WindowLayers = WindowLayers::From("max_window_layers", 28);

/// Every n-th layer is a full one, with a base of its own.
pub(super) const fn gemma_rope(pattern: usize) -> RopeRule {
    rope_by_type(1e6, pattern)
}

/// The same with this base in full layers.
pub(super) const fn rope_by_type(theta: f64, pattern: usize) -> RopeRule {
    RopeRule::Rotary {
        layout: RopeLayout::HalfSplit,
        theta_keys: &[],
        theta: Some(theta),
        share: RotaryShare::Whole,
        layers: RopeLayers::ByType {
            pattern: Pattern {
                keys: &["sliding_window_pattern", "_sliding_window_pattern"],
                every: pattern,
                first: false,
            },
            local_theta: Some(("rope_local_base_freq", 10_000.0)),
        },
        longrope_names: &[],
    }
}

pub(super) const CLIP: &[Refusal] = &[Refusal {
    key: "clip_qkv",
    unless: Setting::False,
    why: "clipped queries and keys are not linear in the token, and clipping can raise a logit",
}];

/// A LayerNorm of each head without a shift, ahead of the rotation.
pub(super) const HEAD_LAYER_NORM: QkNorm = QkNorm {
    scope: QkNormScope::PerHead,
    kind: NormKind::LayerNorm,
    gain: GainForm::Plain,
    shift: false,
    behind_rotation: false,
    rotated_only: false,
};

pub(super) const JOINT_RMS: QkNormRule = QkNormRule {
    when: Flag::Always,
    norm: QkNorm {
        scope: QkNormScope::Joint,
        kind: NormKind::RmsNorm,
        gain: GainForm::Plain,
        shift: false,
        behind_rotation: false,
        rotated_only: false,
    },
    q: "layers.{i}.self_attn.q_norm",
    k: "layers.{i}.self_attn.k_norm",
    stored: QkNormStored::Flat,
};

pub(super) const LLAMA: Family = Family {
    name: "llama",
    model_types: &["llama"],
    prefixes: DECODER_PREFIXES,
    sizes: llama_sizes(kv(None), HeadDim::Key(None)),
    norm: RMS,
    rms_key: None,
    norm_tensor: OWN_NORM,
    streams: None,
    bias: Flag::Key("attention_bias", false),
    rope: HALF,
    rope_default: None,
    qk_norm: None,
    scale: ScaleRule::InverseSqrtHead,
    temperature: TemperatureRule::None,
    soft_cap: None,
    window: None,
    sinks: None,
    qkv: SEPARATE,
    mla: None,
    v_norm: false,
    shared_kv: None,
    global_heads: false,
    by_kind: false,
    multipliers: false,
    refusals: &[],
};

pub(super) const MISTRAL: Family = Family {
    name: "mistral",
    model_types: &["mistral"],
    sizes: llama_sizes(kv(Some(8)), HeadDim::Key(None)),
    bias: Flag::Never,
    window: Some(WindowRule { absent: Some(4096), switch: None, layers: WindowLayers::Types }),
    ..LLAMA
};

pub(super) const PHI3: Family = Family {
    name: "phi3",
    model_types: &["phi3"],
    bias: Flag::Never,
    rope: RopeRule::Rotary {
        layout: RopeLayout::HalfSplit,
        theta_keys: &[],
        theta: Some(10_000.0),
        share: RotaryShare::Part(PARTIAL, 1.0),
        layers: RopeLayers::Same,
        // Older configs wrote these two for what is LongRoPE here.
        longrope_names: &["su", "yarn"],
    },
    qkv: QkvTensors::Concat { name: "layers.{i}.self_attn.qkv_proj", conv1d: false },
    window: in_every_layer(None),
    ..LLAMA
};

pub(super) const ERNIE: Family = Family {
    name: "ernie4_5",
    model_types: &["ernie4_5"],
    sizes: llama_sizes(kv(Some(2)), HeadDim::Key(Some(128))),
    bias: Flag::Key("use_bias", false),
    rope: interleaved(500_000.0, RotaryShare::Whole),
    ..LLAMA
};

pub(super) const QWEN3_VL: Family = Family {
    name: "qwen3_vl",
    model_types: &["qwen3_vl_text"],
    sizes: llama_sizes(kv(Some(32)), HeadDim::Key(Some(128))),
    rope: half_split(5e5),
    qk_norm: Some(head_rms(GainForm::Plain)),
    ..LLAMA
};

pub(super) const GRANITE_SWA: Family = Family {
    name: "granite_swa",
    model_types: &["granite_swa"],
    sizes: llama_sizes(kv(Some(4)), HeadDim::Key(None)),
    rope: RopeRule::Rotary {
        layout: RopeLayout::HalfSplit,
        theta_keys: &[],
        theta: Some(10_000.0),
        share: RotaryShare::Whole,
        layers: RopeLayers::Bases("layer_rope_theta"),
        longrope_names: &[],
    },
    scale: ScaleRule::Multiplier("attention_multiplier", Some(1.0)),
    window: all_but_first_of(128, 4),
    sinks: Some("layers.{i}.self_attn.sinks"),
    ..LLAMA
};

/// Layers that have softmax attention are full ones, every fourth where nothing says so; q comes with a gate.
pub(super) const QWEN3_NEXT: Family = Family {
    name: "qwen3_next",
    model_types: &["qwen3_next", "qwen3_5_moe_text"],
    sizes: Sizes {
        layer_heads: LayerHeads::Hybrid {
            keys: &["layer_types"],
            otherwise: Otherwise::LastOf(Count { keys: &["full_attention_interval"], default: Some(4) }),
        },
        ..llama_sizes(kv(Some(2)), HeadDim::Key(Some(256)))
    },
    norm: RMS_ONE_PLUS,
    rope: rotary(10_000.0, RotaryShare::Part(PARTIAL, 0.25)),
    qk_norm: Some(head_rms(GainForm::OnePlus)),
    qkv: QkvTensors::Gated {
        q: "layers.{i}.self_attn.q_proj",
        k: "layers.{i}.self_attn.k_proj",
        v: "layers.{i}.self_attn.v_proj",
    },
    ..LLAMA
};

pub(super) const BERT: Family = Family {
    name: "bert",
    model_types: &["bert"],
    prefixes: &["bert.", ""],
    sizes: llama_sizes(KvHeads::SameAsQuery, HeadDim::Derived),
    norm: LAYER_NORM,
    norm_tensor: NormTensor::FirstApart { first: "embeddings.LayerNorm", rest: "encoder.layer.{j}.output.LayerNorm" },
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
