//! Small checkpoints of every family, in its real tensor names, shapes and layouts.

use super::fixtures::{Draw, Tensors};
use safetensors::Dtype;
use serde_json::{Value, json};

pub const LAYERS: usize = 4;
pub const R: usize = 16;

/// Families of latent attention, whose cases are those of `latent`.
pub const LATENT: [&str; 13] = [
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "youtu",
];

/// One checkpoint to write: its family's layout by `kind`.
pub struct Case {
    pub name: &'static str,
    /// Which of the hand-written layouts and forwards below.
    pub kind: &'static str,
    pub prefix: &'static str,
    pub config: Value,
    pub d: usize,
    pub n_q: usize,
    pub n_kv: usize,
    pub bias: bool,
    pub dtype: Dtype,
    pub shards: usize,
    /// The layers that have attention.
    pub attention: Vec<usize>,
}

pub fn merge(mut base: Value, extra: Value) -> Value {
    let object = base.as_object_mut().expect("object");
    for (key, value) in extra.as_object().expect("object") {
        object.insert(key.clone(), value.clone());
    }
    base
}

/// Grouped heads of 16 on a model dimension that is not their product, where the family allows it.
pub fn grouped(name: &'static str, kind: &'static str, extra: Value) -> Case {
    let base = json!({"model_type": name, "hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": R, "max_position_embeddings": 512, "rope_theta": 10000.0});
    Case {
        name,
        kind,
        prefix: "model.",
        config: merge(base, extra),
        d: 48,
        n_q: 4,
        n_kv: 2,
        bias: false,
        dtype: Dtype::BF16,
        shards: 1,
        attention: (0..LAYERS).collect(),
    }
}

/// Residual streams, of the family that has them.
const STREAMS: usize = 3;

/// A model of which only layers 1 and 3 have attention.
fn hybrid(case: Case) -> Case {
    Case { attention: vec![1, 3], ..case }
}

/// One key head per query head, d_model = heads x 16.
pub fn square(name: &'static str, kind: &'static str, extra: Value) -> Case {
    let base = json!({"model_type": name, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "max_position_embeddings": 512});
    Case { config: merge(base, extra), d: 64, n_kv: 4, ..grouped(name, kind, json!({})) }
}

pub fn cases() -> Vec<Case> {
    let gemma3 = json!({"query_pre_attn_scalar": 24, "rope_theta": 1000000.0, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let gpt2 = |prefix: &'static str| Case {
        name: "gpt2",
        prefix,
        bias: true,
        config: json!({"model_type": "gpt2", "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 64,
            "scale_attn_by_inverse_layer_idx": true, "torch_dtype": "float32"}),
        dtype: Dtype::F32,
        ..square("gpt2", "gpt2", json!({}))
    };
    let wrapped = |model_type: &'static str, text: &'static str, kind: &'static str, prefix, extra: &Value| {
        let case = grouped(text, kind, extra.clone());
        Case { name: model_type, prefix, config: json!({"model_type": model_type, "text_config": case.config}), ..case }
    };
    vec![
        gpt2("transformer."),
        gpt2(""),
        Case { shards: 3, ..grouped("llama", "llama", json!({"torch_dtype": "bfloat16"})) },
        Case { bias: true, prefix: "", ..grouped("llama", "llama", json!({"attention_bias": true})) },
        // A bias that the config does not mention counts as well.
        Case { bias: true, ..grouped("llama", "llama", json!({})) },
        grouped(
            "llama",
            "llama yarn",
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
        ),
        grouped(
            "llama",
            "llama llama3",
            json!({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
        ),
        Case { dtype: Dtype::F16, ..grouped("mistral", "llama", json!({"head_dim": R})) },
        wrapped("mistral3", "mistral", "llama", "language_model.model.", &json!({})),
        grouped("mixtral", "llama", json!({})),
        Case { bias: true, ..grouped("qwen2", "llama", json!({"dtype": "bfloat16"})) },
        Case { bias: true, ..grouped("qwen2_moe", "llama", json!({"qkv_bias": true})) },
        grouped("qwen3", "qwen3", json!({})),
        grouped("qwen3_moe", "qwen3", json!({})),
        grouped("gemma", "gemma", json!({})),
        grouped("gemma2", "gemma2", json!({"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0})),
        grouped("gemma3_text", "gemma3", gemma3.clone()),
        wrapped("gemma3", "gemma3_text", "gemma3", "language_model.model.", &gemma3),
        wrapped("gemma3", "gemma3_text", "gemma3", "model.language_model.", &gemma3),
        grouped(
            "gemma3_text",
            "gemma3",
            json!({"query_pre_attn_scalar": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
        ),
        grouped("olmo2", "olmo2", json!({})),
        grouped("olmo3", "olmo2", json!({"layer_types": vec!["full_attention"; LAYERS]})),
        grouped("phi3", "phi3", json!({"partial_rotary_factor": 0.5})),
        Case { bias: true, ..square("phi", "phi", json!({"partial_rotary_factor": 0.5, "rope_theta": 10000.0})) },
        Case {
            bias: true,
            prefix: "gpt_neox.",
            ..square("gpt_neox", "gpt_neox", json!({"rotary_pct": 0.5, "rotary_emb_base": 10000}))
        },
        Case {
            prefix: "transformer.",
            n_kv: 1,
            ..square("falcon", "falcon", json!({"multi_query": true, "alibi": false}))
        },
        Case {
            prefix: "transformer.",
            n_kv: 2,
            ..square("falcon", "falcon ln_attn", json!({"new_decoder_architecture": true, "num_kv_heads": 2}))
        },
        Case {
            prefix: "transformer.",
            n_kv: 2,
            ..square(
                "falcon",
                "falcon",
                json!({"new_decoder_architecture": true, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
            )
        },
        Case {
            prefix: "",
            bias: true,
            ..square("falcon", "falcon", json!({"multi_query": false, "bias": true, "parallel_attn": false}))
        },
        Case { bias: true, ..grouped("starcoder2", "starcoder2", json!({"use_bias": true})) },
        Case { bias: true, prefix: "bert.", ..square("bert", "bert", json!({})) },
        Case { bias: true, prefix: "bert.", ..square("bert", "bert gamma", json!({})) },
        Case {
            bias: true,
            prefix: "",
            dtype: Dtype::F64,
            ..square("roberta", "bert", json!({"position_embedding_type": "absolute"}))
        },
        grouped("granite", "granite", json!({"attention_multiplier": 0.015625})),
        Case {
            bias: true,
            n_kv: 2,
            ..square(
                "stablelm",
                "stablelm",
                json!({"num_key_value_heads": 2, "use_qkv_bias": true, "qk_layernorm": true}),
            )
        },
        grouped("cohere", "cohere", json!({"use_qk_norm": true})),
        grouped("smollm3", "smollm3", json!({"no_rope_layers": [1, 1, 0, 1]})),
        grouped("smollm3", "smollm3", json!({"no_rope_layer_interval": 3})),
        Case {
            bias: true,
            ..grouped(
                "gpt_oss",
                "llama",
                json!({"quantization_config": {"quant_method": "mxfp4"}, "rope_parameters": {"rope_type": "default"}}),
            )
        },
        Case { bias: true, ..grouped("glm", "glm4", json!({})) },
        grouped("glm4", "glm4", json!({"attention_bias": false, "partial_rotary_factor": 0.5})),
        grouped("glm4_moe", "glm4_moe", json!({"use_qk_norm": true})),
        grouped("glm4_moe", "llama half", json!({})),
        grouped("minimax_m2", "minimax_m2", json!({"rotary_dim": 8})),
        square("olmo", "olmo", json!({"clip_qkv": null})),
        grouped("olmoe", "olmoe", json!({})),
        grouped("cohere2", "cohere2", json!({"sliding_window_pattern": 2})),
        grouped(
            "exaone4",
            "exaone4",
            json!({"layer_types":
            ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ),
        Case { bias: true, ..grouped("seed_oss", "llama", json!({})) },
        Case { bias: true, ..grouped("ernie4_5", "helium", json!({"use_bias": true})) },
        grouped("ernie4_5_moe", "helium", json!({})),
        grouped("nemotron", "nemotron", json!({})),
        grouped("arcee", "llama", json!({})),
        grouped("helium", "helium", json!({})),
        grouped("apertus", "apertus", json!({"rope_parameters": {"rope_type": "default"}})),
        grouped("dots1", "qwen3", json!({})),
        grouped("hunyuan_v1_dense", "hunyuan", json!({})),
        grouped("hunyuan_v1_moe", "hunyuan alpha", json!({"rope_scaling": {"type": "dynamic", "alpha": 100.0}})),
        grouped("phimoe", "phimoe", json!({"rope_theta": 10000.0})),
        Case { bias: true, ..grouped("phimoe", "phimoe", json!({"rope_theta": 10000.0, "attention_bias": true})) },
        grouped("granitemoe", "granite", json!({"attention_multiplier": 0.015625})),
        Case { bias: true, ..grouped("qwen2_5_vl", "llama", json!({})) },
        Case { bias: true, ..wrapped("qwen2_vl", "qwen2_vl_text", "llama", "model.language_model.", &json!({})) },
        wrapped("qwen3_vl", "qwen3_vl_text", "qwen3", "model.language_model.", &json!({})),
        wrapped("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3", "model.language_model.", &json!({})),
        grouped(
            "ministral3",
            "llama grows",
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16}}),
        ),
        Case {
            prefix: "model.language_model.",
            ..wrapped(
                "llama4",
                "llama4_text",
                "llama4",
                "language_model.model.",
                &json!({"no_rope_layer_interval": 2,
                "use_qk_norm": false, "attn_temperature_tuning": 4, "attn_scale": 0.2, "floor_scale": 16}),
            )
        },
        // As Scout: the layers with rotation normalise q and k behind it.
        grouped(
            "llama4_text",
            "llama4 normed",
            json!({"no_rope_layer_interval": 2, "attn_temperature_tuning": true, "attn_scale": 0.2, "floor_scale": 16}),
        ),
        grouped("ministral", "llama", json!({"layer_types": vec!["sliding_attention"; LAYERS]})),
        grouped("cwm", "llama", json!({"rope_parameters": {"rope_type": "default"}})),
        Case { bias: true, ..grouped("solar_open", "llama", json!({"attention_bias": true})) },
        grouped("hyperclovax", "granite", json!({"attention_multiplier": 0.015625})),
        grouped("hyperclovax", "llama", json!({"use_post_norm": true})),
        grouped(
            "granite_swa",
            "granite bases",
            json!({"attention_multiplier": 0.015625,
            "layer_rope_theta": [10000.0, 0, 10000, 0.0]}),
        ),
        grouped("granitemoe_swa", "granite", json!({"attention_multiplier": 0.015625})),
        grouped("vaultgemma", "gemma2", json!({"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0})),
        Case { bias: true, ..grouped("jais2", "starcoder2", json!({})) },
        grouped("exaone_moe", "exaone_moe", json!({"sliding_window_pattern": 2})),
        grouped("afmoe", "exaone_moe", json!({"global_attn_every_n_layers": 2})),
        grouped("hy_v3", "qwen3", json!({})),
        grouped("flex_olmo", "olmo2", json!({})),
        square("nanochat", "nanochat", json!({})),
        Case { bias: true, ..square("persimmon", "persimmon", json!({"partial_rotary_factor": 0.5})) },
        hybrid(grouped(
            "qwen3_next",
            "qwen3_next",
            json!({"full_attention_interval": 2, "partial_rotary_factor": 0.5}),
        )),
        hybrid(wrapped(
            "qwen3_5",
            "qwen3_5_text",
            "qwen3_next",
            "model.language_model.",
            &json!({"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        )),
        hybrid(wrapped(
            "qwen4_exp",
            "qwen4_exp_text",
            "qwen3_next",
            "model.language_model.",
            &json!({"hc_count": STREAMS,
                "layer_types": ["linear_attention", "qwen_sparse_attention", "linear_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        )),
        grouped(
            "mellum",
            "qwen3",
            json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ),
        grouped(
            "laguna",
            "qwen3",
            json!({"num_attention_heads_per_layer": [4, 4, 4, 4], "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ),
        grouped(
            "step3p5",
            "gemma3",
            json!({"query_pre_attn_scalar": 24, "num_attention_groups": 2, "num_sliding_attention_heads": 4, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ),
        wrapped("aria", "aria_text", "llama", "language_model.model.", &json!({})),
        hybrid(grouped("lfm2", "lfm2", json!({"full_attn_idxs": [1, 3]}))),
        hybrid(grouped(
            "lfm2_moe",
            "lfm2",
            json!({"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
        )),
        hybrid(grouped(
            "granitemoehybrid",
            "granite fixed",
            json!({"attention_multiplier": 0.015625, "position_embedding_type": "nope",
                "layer_types": ["mamba", "attention", "mamba", "attention"]}),
        )),
        hybrid(grouped(
            "granitemoehybrid",
            "granite",
            json!({"attention_multiplier": 0.015625, "position_embedding_type": "rope",
                "layers_block_type": ["mamba", "attention", "mamba", "attention"]}),
        )),
        hybrid(grouped("jamba", "llama fixed", json!({"attn_layer_period": 2, "attn_layer_offset": 1}))),
        Case {
            prefix: "backbone.",
            ..hybrid(grouped("nemotron_h", "nemotron_h", json!({"hybrid_override_pattern": "M*E*"})))
        },
        grouped("falcon_h1", "falcon_h1", json!({"attention_in_multiplier": 1.5, "key_multiplier": 0.375})),
        wrapped(
            "gemma3n",
            "gemma3n_text",
            "gemma3n",
            "model.language_model.",
            &json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "rope_theta": 1000000.0, "num_kv_shared_layers": 2}),
        ),
        grouped(
            "gemma3n_text",
            "gemma3n",
            json!({"sliding_window_pattern": 2, "num_kv_shared_layers": 0, "rope_theta": 1000000.0}),
        ),
        hybrid(grouped("bamba", "llama half", json!({"attn_layer_indices": [3, 1]}))),
        hybrid(grouped(
            "olmo_hybrid",
            "olmo2",
            json!({"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}),
        )),
        hybrid(grouped(
            "minimax",
            "llama half",
            json!({"rotary_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}),
        )),
        grouped("bitnet", "llama", json!({})),
        grouped("phi4_multimodal", "phi3", json!({"partial_rotary_factor": 0.5})),
        wrapped(
            "minimax_m3_vl",
            "minimax_m3_vl_text",
            "minimax_m3",
            "model.language_model.",
            &json!({"rotary_dim": 8, "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}),
        ),
        hybrid(grouped(
            "lfm3",
            "lfm3",
            json!({"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
        )),
        grouped(
            "cohere2_moe",
            "cohere moe",
            json!({"layer_types": vec!["sliding_attention"; LAYERS], "rms_norm_eps": null}),
        ),
        grouped(
            "cohere2_moe",
            "helium",
            json!({"layer_types": vec!["sliding_attention"; LAYERS], "rms_norm_eps": 1e-5}),
        ),
        square(
            "modernbert-decoder",
            "modernbert",
            json!({"global_rope_theta": 160000.0, "global_attn_every_n_layers": 3, "local_rope_theta": 10000.0}),
        ),
        Case { bias: true, prefix: "roberta_prelayernorm.", ..square("roberta-prelayernorm", "bert pre", json!({})) },
        wrapped(
            "gemma4_unified",
            "gemma4_unified_text",
            "gemma3n",
            "model.language_model.",
            &json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "per_layer_config": {}, "num_kv_shared_layers": 2, "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
        ),
        Case { bias: true, ..square("opt", "opt", json!({"do_layer_norm_before": true})) },
        Case { prefix: "", bias: true, ..square("opt", "opt", json!({"hidden_act": "relu"})) },
        Case { prefix: "transformer.", ..square("gptj", "gptj", json!({"n_embd": 64, "n_head": 4, "rotary_dim": 8})) },
        Case {
            prefix: "transformer.",
            n_kv: 1,
            bias: true,
            ..square("gpt_bigcode", "gpt_bigcode", json!({"n_embd": 64, "n_head": 4, "multi_query": true}))
        },
    ]
}

/// The stored tensors that a layer's attention reads.
pub fn draw(case: &Case, seed: u64) -> Tensors {
    let mut t = Draw::new(seed);
    let (p, d, n_q, n_kv) = (case.prefix, case.d, case.n_q, case.n_kv);
    let fused = (n_q + 2 * n_kv) * R;
    let bias = |rows: usize| case.bias.then_some(rows);
    let norm = |t: &mut Draw, name: String, len: usize, shift: bool, around: f64| {
        t.add(format!("{name}.weight"), &[len], around, 0.3);
        if shift {
            t.add(format!("{name}.bias"), &[len], 0.0, 0.3);
        }
    };
    for &i in &case.attention {
        match case.kind.split(' ').next().unwrap() {
            "gpt2" => {
                norm(&mut t, format!("{p}h.{i}.ln_1"), d, true, 1.0);
                t.linear(&format!("{p}h.{i}.attn.c_attn"), d, fused, bias(fused));
            }
            "gptj" | "gpt_bigcode" => {
                norm(&mut t, format!("{p}h.{i}.ln_1"), d, true, 1.0);
                if case.kind == "gpt_bigcode" {
                    t.linear(&format!("{p}h.{i}.attn.c_attn"), fused, d, bias(fused));
                } else {
                    for name in ["q", "k", "v"] {
                        t.linear(&format!("{p}h.{i}.attn.{name}_proj"), d, d, None);
                    }
                }
            }
            "opt" => {
                norm(&mut t, format!("{p}decoder.layers.{i}.self_attn_layer_norm"), d, true, 1.0);
                for name in ["q", "k", "v"] {
                    t.linear(&format!("{p}decoder.layers.{i}.self_attn.{name}_proj"), d, d, bias(d));
                }
            }
            "phi3" => {
                norm(&mut t, format!("{p}layers.{i}.input_layernorm"), d, false, 1.0);
                t.linear(&format!("{p}layers.{i}.self_attn.qkv_proj"), fused, d, None);
            }
            "gpt_neox" => {
                norm(&mut t, format!("{p}layers.{i}.input_layernorm"), d, true, 1.0);
                t.linear(&format!("{p}layers.{i}.attention.query_key_value"), fused, d, bias(fused));
            }
            "persimmon" => {
                norm(&mut t, format!("{p}layers.{i}.input_layernorm"), d, true, 1.0);
                t.linear(&format!("{p}layers.{i}.self_attn.query_key_value"), fused, d, bias(fused));
                for name in ["q", "k"] {
                    norm(&mut t, format!("{p}layers.{i}.self_attn.{name}_layernorm"), R, true, 1.0);
                }
            }
            "falcon" => {
                let name = if case.kind.ends_with("ln_attn") { "ln_attn" } else { "input_layernorm" };
                norm(&mut t, format!("{p}h.{i}.{name}"), d, true, 1.0);
                t.linear(&format!("{p}h.{i}.self_attention.query_key_value"), fused, d, bias(fused));
            }
            "bert" if case.kind.ends_with("pre") => {
                norm(&mut t, format!("{p}encoder.layer.{i}.attention.LayerNorm"), d, true, 1.0);
                for name in ["query", "key", "value"] {
                    t.linear(&format!("{p}encoder.layer.{i}.attention.self.{name}"), d, d, bias(d));
                }
            }
            "modernbert" => {
                let name = if i == 0 { format!("{p}embeddings.norm") } else { format!("{p}layers.{i}.attn_norm") };
                norm(&mut t, name, d, false, 1.0);
                for name in ["q", "k", "v"] {
                    t.linear(&format!("{p}layers.{i}.attn.{name}_proj"), d, d, None);
                }
            }
            "bert" => {
                let (gain, shift) = if case.kind.ends_with("gamma") { ("gamma", "beta") } else { ("weight", "bias") };
                let mut both = |name: String| {
                    t.add(format!("{name}.{gain}"), &[d], 1.0, 0.3);
                    t.add(format!("{name}.{shift}"), &[d], 0.0, 0.3);
                };
                if i == 0 {
                    both(format!("{p}embeddings.LayerNorm"));
                }
                both(format!("{p}encoder.layer.{i}.output.LayerNorm"));
                // A trap: this one feeds the feed-forward, not the attention.
                both(format!("{p}encoder.layer.{i}.attention.output.LayerNorm"));
                for name in ["query", "key", "value"] {
                    t.linear(&format!("{p}encoder.layer.{i}.attention.self.{name}"), d, d, bias(d));
                }
            }
            kind => {
                let around = if kind.starts_with("gemma") && kind != "gemma3n"
                    || ["nemotron", "qwen3_next", "minimax_m3"].contains(&kind)
                {
                    0.0
                } else {
                    1.0
                };
                let shift = ["phi", "starcoder2", "stablelm", "nemotron", "phimoe"].contains(&case.kind);
                match kind {
                    // A trap: this one feeds the feed-forward, not the attention.
                    "olmo2" | "exaone4" => {
                        norm(&mut t, format!("{p}layers.{i}.post_attention_layernorm"), d, false, 1.0);
                    }
                    "lfm2" | "lfm3" => norm(&mut t, format!("{p}layers.{i}.operator_norm"), d, false, 1.0),
                    "nemotron_h" => norm(&mut t, format!("{p}layers.{i}.norm"), d, false, 1.0),
                    "apertus" => norm(&mut t, format!("{p}layers.{i}.attention_layernorm"), d, false, 1.0),
                    "olmo" | "nanochat" => {}
                    _ if case.name == "qwen4_exp" => {
                        // Equal gains in all streams.
                        let name = format!("{p}layers.{i}.attn_hyper_connection.hc_norm.weight");
                        t.add(name.clone(), &[d], around, 0.3);
                        let (shape, gains) = t.tensors.0.get_mut(&name).unwrap();
                        (*shape, *gains) = (vec![STREAMS * d], gains.repeat(STREAMS));
                    }
                    _ => norm(&mut t, format!("{p}layers.{i}.input_layernorm"), d, shift, around),
                }
                let attn = format!("{p}layers.{i}.{}", if kind == "nemotron_h" { "mixer" } else { "self_attn" });
                let shares = case.config.pointer("/text_config/num_kv_shared_layers").is_some() && i >= 2;
                for (name, heads) in [("q", n_q), ("k", n_kv), ("v", n_kv)] {
                    // The last layers take the keys and values of earlier ones.
                    if shares && name != "q" {
                        continue;
                    }
                    // Beside each query head stands the gate of its output.
                    let rows = if kind == "qwen3_next" && name == "q" { 2 * heads * R } else { heads * R };
                    t.linear(&format!("{attn}.{name}_proj"), rows, d, bias(rows));
                    if name == "v" {
                        continue;
                    }
                    match case.kind {
                        "qwen3" | "qwen3_next" | "gemma3" | "gemma3n" | "glm4_moe" | "exaone4" | "exaone_moe"
                        | "apertus" | "lfm3" | "minimax_m3" => {
                            norm(&mut t, format!("{attn}.{name}_norm"), R, false, around)
                        }
                        "hunyuan" | "hunyuan alpha" => {
                            let name = if name == "q" { "query" } else { "key" };
                            norm(&mut t, format!("{attn}.{name}_layernorm"), R, false, 1.0);
                        }
                        "olmo2" | "olmoe" | "minimax_m2" => {
                            norm(&mut t, format!("{attn}.{name}_norm"), heads * R, false, 1.0);
                        }
                        "lfm2" => norm(&mut t, format!("{attn}.{name}_layernorm"), R, false, 1.0),
                        "cohere" => t.add(format!("{attn}.{name}_norm.weight"), &[heads, R], 1.0, 0.3),
                        "stablelm" => {
                            for h in 0..heads {
                                norm(&mut t, format!("{attn}.{name}_layernorm.norms.{h}"), R, false, 1.0);
                            }
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    t.tensors
}
