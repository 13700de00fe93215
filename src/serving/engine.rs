//! The engines: their words, the names that an export writes for them, and how their servers are started.

use super::options::{KvFormat, Serving};
use crate::named;
use std::fmt;

named! {
    /// A serving engine.
    pub enum Engine is "engine" {
        /// vLLM 0.32 and 0.33.
        Vllm = "vllm",
        /// SGLang 0.5.23.
        Sglang = "sglang",
        /// TensorRT-LLM, PyTorch backend; verify only, since it reads no scales for an FP8 cache.
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

    /// How many times more a scale holds of it in a cache of this type than in one of E4M3.
    pub(super) fn reach(self, kv: KvFormat) -> f32 {
        match (kv, self) {
            (KvFormat::Fp8, _) | (_, Self::Q) => 1.0,
            (KvFormat::Nvfp4, _) => 6.0,
            (KvFormat::Nvfp4FourOverSix, _) => 4.0,
        }
    }
}

impl Engine {
    /// The versions that the tables of names and methods were taken from.
    pub fn version(self) -> &'static str {
        self.description().version
    }

    /// The name under which it loads a scale of an attention module.
    pub fn scale_name(self, family: &str, module: &str, operand: Operand) -> String {
        self.description().written(family, module, operand)
    }

    /// How the server is started, for a shell.
    pub fn command(self, folder: &str, serving: &Serving) -> String {
        let folder = quoted(folder);
        let context = |option: &str| serving.context.map_or(String::new(), |context| format!(" {option} {context}"));
        match self {
            Self::Vllm => {
                let skip = if serving.skip.is_empty() {
                    String::new()
                } else {
                    format!(" --kv-cache-dtype-skip-layers {}", serving.skip)
                };
                let kv = serving.kv.name();
                format!("vllm serve {folder} --kv-cache-dtype {kv}{}{skip}", context("--max-model-len"))
            }
            Self::Sglang => {
                let context = context("--context-length");
                format!("python -m sglang.launch_server --model-path {folder} --kv-cache-dtype fp8_e4m3{context}")
            }
            Self::Trtllm => format!("trtllm-serve {folder} --kv_cache_dtype fp8{}", context("--max_seq_len")),
            Self::Mistralrs => format!("mistralrs serve -m {folder} --pa-cache-type f8e4m3"),
        }
    }
}

/// A word as a POSIX shell takes it.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && !word.starts_with('-') && word.chars().all(plain) {
        return word.to_owned();
    }
    // A name that starts with a dash would be taken for an option.
    let word = if word.starts_with('-') { format!("./{word}") } else { word.to_owned() };
    format!("'{}'", word.replace('\'', r"'\''"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_quoted_for_a_shell() {
        assert_eq!(quoted("/models/llama-3.1_8b"), "/models/llama-3.1_8b");
        assert_eq!(quoted("my model"), "'my model'");
        assert_eq!(quoted("it's; rm -rf $HOME"), r"'it'\''s; rm -rf $HOME'");
        assert_eq!(quoted("-x"), "'./-x'");
        assert_eq!(quoted(""), "''");
    }
}
