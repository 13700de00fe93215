//! SGLang 0.5.23 (run): `model_loader/weight_utils.py`, `layers/quantization`, and the loaders of its models.

use super::schema::{Carries, Description, Loads, Names, Otherwise, ROTATIONS, Rename, otherwise, rename};

/// `maybe_remap_kv_scale_name`: the first that fits counts.
const RENAMES: &[Rename] = &[
    rename(r"\.kv_scale$", ".attn.k_scale"),
    rename(r"\.(self_attn|mixer)\.k_proj\.k_scale$", ".${1}.attn.k_scale"),
    rename(r"\.(self_attn|mixer)\.v_proj\.v_scale$", ".${1}.attn.v_scale"),
    rename(r"\.([kv])_scale$", ".attn.${1}_scale"),
    rename(r"\.([kv])_proj\.output_scale$", ".attn.${1}_scale"),
];
/// Qwen3.5: the attention is an attribute of the layer.
const QWEN3_5: &[Rename] = &[
    rename(r"\.self_attn\.k_proj\.k_scale$", ".attn.k_scale"),
    rename(r"\.self_attn\.v_proj\.v_scale$", ".attn.v_scale"),
    rename(r"\.self_attn\.([kv])_scale$", ".attn.${1}_scale"),
    rename(r"\.self_attn\.attn\.([kv])_scale$", ".attn.${1}_scale"),
];
const QWEN3_NEXT: &[Rename] = &[
    rename(r"\.self_attn\.k_proj\.k_scale$", ".attn.k_scale"),
    rename(r"\.self_attn\.v_proj\.v_scale$", ".attn.v_scale"),
    rename(r"\.self_attn\.attn\.([kv])_scale$", ".attn.${1}_scale"),
];

/// Latent attention: the projection's name stands for the attention.
const LATENT: &[Rename] =
    &[rename(r"\.k_proj\.k_scale$", ".attn_mqa.k_scale"), rename(r"\.v_proj\.v_scale$", ".attn_mqa.v_scale")];

const RENAMED: Names = Names { parameter: "{module}.attn", written: "{module}", renames: RENAMES };
const INNER: Names = Names { parameter: "{module}.attn", written: "{module}.attn", renames: &[] };

const OTHERWISE: &[Otherwise] = &[
    ROTATIONS[0],
    ROTATIONS[1],
    otherwise(
        "dual_chunk_attention_config",
        None,
        "attends in chunks, with a factor on queries that grows with the position",
    ),
    otherwise("attn_factor", Some(1.0), "multiplies what YaRN's settings give"),
    otherwise("video_rope", None, "rotates by another class, with YaRN's factor"),
];

const NO_SCALES: &str = "SGLang has no attention scales for weights stored this way";
const UNSCALED: &str = "SGLang builds the attention of this family without scales that a checkpoint could set";

pub(crate) static DESCRIPTION: Description = Description {
    version: "0.5.23",
    operands: [false, true, true],
    without: Some("SGLang has no scale for q: it is cast at 1.0 where a backend computes in FP8"),
    every_rename: false,
    methods: &[
        ("", Carries::Never("the config has no `quantization_config`, so SGLang reads no scale")),
        ("compressed-tensors", Carries::Scheme),
        ("fp8", Carries::Always),
        ("mxfp8", Carries::Always),
        ("modelopt:FP8", Carries::Asked),
        ("modelopt:NVFP4", Carries::Asked),
        ("modelopt:MXFP8", Carries::Always),
        ("modelopt:MIXED_PRECISION", Carries::Asked),
        ("quark", Carries::Always),
        ("mxfp4", Carries::Never(NO_SCALES)),
        ("awq", Carries::Never(NO_SCALES)),
        ("gptq", Carries::Never(NO_SCALES)),
        ("bitsandbytes", Carries::Never(NO_SCALES)),
    ],
    upper_case: false,
    needs_producer: false,
    families: &[
        (
            &[
                "llama",
                "mistral",
                "ministral3",
                "deci",
                "arcee",
                "gemma2",
                "gemma3_text",
                "gemma3n_text",
                "gemma4_text",
                "gptj",
                "phi3",
                "phimoe",
                "cohere",
                "cohere2",
                "apertus",
                "nemotron_h",
                "exaone4",
            ],
            Loads::Scales(RENAMED),
        ),
        // Its loader takes the output scale of a projection for one of the fused projection, and drops it.
        (
            &["minimax_m2"],
            Loads::Scales(Names { parameter: "{module}.attn", written: "{module}", renames: RENAMES.split_at(4).0 }),
        ),
        (
            &["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"],
            Loads::Scales(Names { parameter: "{layer}.attn", written: "{module}", renames: QWEN3_5 }),
        ),
        (
            &["qwen3_next"],
            Loads::Scales(Names { parameter: "{layer}.attn", written: "{module}.attn", renames: QWEN3_NEXT }),
        ),
        (
            &[
                "qwen2",
                "qwen2_moe",
                "mixtral",
                "gemma",
                "gpt2",
                "gpt_bigcode",
                "phi",
                "opt",
                "starcoder2",
                "olmo",
                "olmo2",
                "olmoe",
                "granite",
                "granitemoe",
                "granitemoehybrid",
                "glm4",
                "persimmon",
                "afmoe",
                "cohere2_moe",
            ],
            Loads::Scales(INNER),
        ),
        (
            &[
                "qwen3",
                "qwen3_moe",
                "gpt_oss",
                "lfm2",
                "falcon_h1",
                "stablelm",
                "exaone_moe",
                "glm4_moe",
                "llama4_text",
                "mellum",
                "hunyuan_v1_dense",
                "hy_v3",
            ],
            Loads::Nothing(UNSCALED),
        ),
    ],
    latent: "SGLang writes the cache of latent attention (MLA) without a scale, so an export has none",
    skips_layers: false,
    windows: &[],
    stops_for: &[
        "cohere",
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "granite",
        "hunyuan_v1_dense",
        "olmo",
        "olmoe",
        "stablelm",
    ],
    latent_names: Some(Names { parameter: "{module}.attn_mqa", written: "{module}.attn_mqa", renames: LATENT }),
    otherwise: OTHERWISE,
    // No class reads it.
    unread: &["attention_factor"],
    requantizes: true,
};
