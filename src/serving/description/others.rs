//! TensorRT-LLM and mistral.rs of August 2026, by their sources; neither was run.

use super::schema::{Carries, Description, Loads, Names, Rename, rename};

/// Whether they read it is not known.
const FACTOR: &[&str] = &["attention_factor"];

pub(crate) static TRTLLM: Description = Description {
    version: "of August 2026, PyTorch backend",
    operands: [false; 3],
    without: Some("TensorRT-LLM keeps the scale of an FP8 cache at 1.0 and ignores the scales of a checkpoint"),
    every_rename: false,
    methods: &[],
    upper_case: true,
    needs_producer: false,
    families: &[(
        &["*"],
        Loads::Nothing("TensorRT-LLM keeps the scale of an FP8 cache at 1.0 and ignores the scales of a checkpoint"),
    )],
    latent: "TensorRT-LLM keeps the scale of an FP8 cache at 1.0 and ignores the scales of a checkpoint",
    skips_layers: false,
    windows: &[],
    stops_for: &[],
    latent_names: None,
    otherwise: &super::schema::ROTATIONS,
    unread: FACTOR,
    requantizes: false,
};

const OTHER_FAMILY: &str = "mistral.rs reads attention scales of Qwen3.5 models only";
/// `kv_scale` alone sets all.
const RENAMES: &[Rename] = &[rename(r"\.kv_scale$", ".k_scale")];

pub(crate) static MISTRALRS: Description = Description {
    version: "of August 2026",
    operands: [true; 3],
    without: None,
    every_rename: false,
    methods: &[
        ("", Carries::Always),
        ("compressed-tensors", Carries::Always),
        ("fp8", Carries::Always),
        ("modelopt:FP8", Carries::Always),
        ("quark", Carries::Always),
    ],
    upper_case: true,
    needs_producer: false,
    families: &[
        (
            &["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"],
            Loads::Scales(Names { parameter: "{module}", written: "{module}", renames: RENAMES }),
        ),
        (&["*"], Loads::Nothing(OTHER_FAMILY)),
    ],
    latent: OTHER_FAMILY,
    skips_layers: false,
    windows: &[],
    stops_for: &[],
    latent_names: None,
    otherwise: &super::schema::ROTATIONS,
    unread: FACTOR,
    requantizes: false,
};
