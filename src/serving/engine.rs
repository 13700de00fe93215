//! What each engine reads: names, and which operands it casts with a scale of the checkpoint.

use crate::model::AttentionSpec;
use crate::named;
use std::fmt;

named! {
    /// A serving engine.
    pub enum Engine is "engine" {
        /// vLLM 0.32.
        Vllm = "vllm",
        /// SGLang 0.5.23.
        Sglang = "sglang",
        /// TensorRT-LLM, PyTorch backend.
        Trtllm = "trtllm",
        /// mistral.rs of August 2026.
        Mistralrs = "mistralrs",
    }
}

/// An operand of attention that is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
}

impl Operand {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Q, Self::K, Self::V];

    /// `q`, `k` or `v`.
    pub fn letter(self) -> char {
        match self {
            Self::Q => 'q',
            Self::K => 'k',
            Self::V => 'v',
        }
    }
}

/// How the weights are stored, as far as attention scales depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// No `quantization_config`.
    Plain,
    CompressedTensors,
    Fp8,
    ModelOpt,
    Quark,
    /// Anything else: no engine loads attention scales beside it.
    Other,
}

impl Method {
    /// Whether vLLM loads its scales by the class that rounds them to the model's type, and takes k's for a v that is
    /// missing.
    pub fn is_base(self) -> bool {
        matches!(self, Self::Fp8 | Self::ModelOpt | Self::Quark)
    }
}

/// What an engine does with the scales of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reads {
    /// Whether it casts q, k and v with a scale of the checkpoint, and not at 1.0.
    pub scaled: [bool; 3],
    /// Why it does not, for people.
    pub why: Option<&'static str>,
}

impl Reads {
    pub fn scale(&self, operand: Operand) -> bool {
        self.scaled[operand as usize]
    }

    pub fn any(&self) -> bool {
        self.scaled.contains(&true)
    }
}

/// Families whose attention module vLLM names `attn`: their scales are `X.attn.k_scale`, with the name of the inner module.
const VLLM_INNER: &[&str] = &["gpt2", "gptj", "gpt_bigcode", "gpt_oss"];
/// Families whose attention vLLM builds without the quantization config: it has no scales to load, and a name of one is refused.
const VLLM_UNSCALED: &[&str] = &["jamba", "lfm2"];
/// Families whose loader in SGLang maps `X.k_scale` to the inner module.
const SGLANG_RENAMED: &[&str] = &[
    "llama",
    "mistral",
    "ministral3",
    "deci",
    "arcee",
    "gemma2",
    "gemma3_text",
    "gptj",
    "phi3",
    "phimoe",
    "cohere",
    "cohere2",
    "apertus",
    "minimax_m2",
    "nemotron_h",
    "exaone4",
];
/// Families whose loader in SGLang does not, so that a scale must be stored as `X.attn.k_scale`. SGLang has no attention scales for
/// any other family: their attention is built without the quantisation config, or they run through its Transformers backend, which
/// refuses the names.
const SGLANG_INNER: &[&str] = &[
    "qwen2",
    "qwen2_moe",
    "qwen3_next",
    "mixtral",
    "gemma",
    "gpt2",
    "gpt_bigcode",
    "phi",
    "opt",
    "starcoder2",
    "olmo",
    "olmoe",
    "granite",
    "granitemoe",
    "glm4",
    "persimmon",
    "afmoe",
];

impl Engine {
    /// The name under which it loads a scale of an attention module.
    pub fn scale_name(self, family: &str, module: &str, operand: Operand) -> String {
        let inner = if self.needs_inner(family) { "attn." } else { "" };
        format!("{module}.{inner}{}_scale", operand.letter())
    }

    fn needs_inner(self, family: &str) -> bool {
        match self {
            Self::Vllm => VLLM_INNER.contains(&family),
            Self::Sglang => SGLANG_INNER.contains(&family),
            Self::Trtllm | Self::Mistralrs => false,
        }
    }

    /// The names under a module that it loads as a scale of the operand, the first stored one counts.
    pub(super) fn names(self, family: &str, module: &str, operand: Operand, method: Method) -> Vec<String> {
        let letter = operand.letter();
        let fused = ["self_attn", "mixer"].contains(&module.rsplit('.').next().unwrap_or_default());
        let at = |rest: String| format!("{module}.{rest}");
        let mut names = vec![self.scale_name(family, module, operand)];
        match self {
            Self::Vllm => {
                names.push(at(format!("attn.{letter}_scale")));
                if operand != Operand::Q && fused {
                    names.push(at(format!("{letter}_proj.{letter}_scale")));
                    names.push(at(format!("qkv_proj.{letter}_scale")));
                    names.push(at(format!("{letter}_cache.scale")));
                }
                if operand == Operand::Q && fused {
                    names.push(at("q.scale".to_owned()));
                }
                if matches!(method, Method::Fp8 | Method::Quark) {
                    names.push(at(format!("{letter}_proj.output_scale")));
                }
                if operand == Operand::K {
                    names.push(at("kv_scale".to_owned()));
                }
            }
            Self::Sglang if self.needs_inner(family) => {}
            Self::Sglang => {
                if fused {
                    names.push(at(format!("{letter}_proj.{letter}_scale")));
                }
                names.push(at(format!("{letter}_proj.output_scale")));
                if operand == Operand::K {
                    names.push(at("kv_scale".to_owned()));
                }
            }
            Self::Trtllm => names = vec![at(format!("{letter}_proj.{letter}_scale"))],
            Self::Mistralrs => names.push(at("kv_scale".to_owned())),
        }
        names.dedup();
        names
    }

    /// What it does with the scales of a checkpoint whose weights are stored by `method`.
    pub(super) fn reads(self, spec: &AttentionSpec, model_type: &str, method: Method) -> Reads {
        let none = |why| Reads { scaled: [false; 3], why: Some(why) };
        let family = spec.family.as_str();
        let latent = spec.layers.iter().any(|layer| layer.mla.is_some());
        match self {
            Self::Vllm if latent => none(
                "vLLM's loader has no scales for latent attention (MLA): it casts the absorbed query and the cached row at 1.0 unless \
                 Sigmascale's plugin sets them",
            ),
            Self::Sglang if latent => {
                none("SGLang writes the cache of latent attention (MLA) without a scale, so an export has none")
            }
            Self::Vllm | Self::Sglang if method == Method::Other => {
                none("its loader has no attention scales for weights stored this way")
            }
            Self::Vllm if VLLM_UNSCALED.contains(&family) => {
                none("vLLM builds the attention of this family without scales that a checkpoint could set")
            }
            Self::Vllm => Reads { scaled: [true; 3], why: None },
            Self::Sglang if !SGLANG_RENAMED.contains(&family) && !SGLANG_INNER.contains(&family) => {
                none("SGLang has no attention scales for this family")
            }
            Self::Sglang => Reads {
                scaled: [false, true, true],
                why: Some("SGLang has no scale for q: it is cast at 1.0 where a backend computes in FP8"),
            },
            Self::Trtllm => {
                none("TensorRT-LLM keeps the scale of an FP8 cache at 1.0 and ignores the scales of a checkpoint")
            }
            // The Qwen3.5 models are the only ones whose loaders ask for scales.
            Self::Mistralrs if model_type.starts_with("qwen3_5") => Reads { scaled: [true; 3], why: None },
            Self::Mistralrs => none("mistral.rs reads attention scales of Qwen3.5 models only"),
        }
    }

    /// How the server is started.
    pub fn command(self, folder: &str) -> String {
        match self {
            Self::Vllm => format!("vllm serve {folder} --kv-cache-dtype fp8"),
            Self::Sglang => {
                format!("python -m sglang.launch_server --model-path {folder} --kv-cache-dtype fp8_e4m3")
            }
            Self::Trtllm => format!("trtllm-serve {folder} --kv_cache_dtype fp8"),
            Self::Mistralrs => format!("mistralrs serve -m {folder} --pa-cache-type f8e4m3"),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Trtllm => "TensorRT-LLM",
            Self::Mistralrs => "mistral.rs",
        })
    }
}
