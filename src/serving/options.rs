//! What a server is started with, as far as scales depend on it.

use crate::error::{Error, Result};
use crate::model::{AttentionSpec, LayerSpec};
use crate::named;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;

named! {
    /// The type of the cache, as vLLM's `--kv-cache-dtype` takes it.
    pub enum KvFormat is "cache type" default Fp8 {
        /// E4M3 with one scale: holds 448 times the scale.
        Fp8 = "fp8",
        /// E2M1 with an E4M3 scale for 16 values and one above them: holds 6 x 448 times the scale. Not q, which stays in E4M3.
        Nvfp4 = "nvfp4",
        /// The same, where the largest value of a block may be 4: holds 4 x 448 times the scale.
        Nvfp4FourOverSix = "nvfp4_4over6",
    }
}

/// Options of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Serving {
    /// The longest sequence (vLLM's `--max-model-len`); that of the config where none is given.
    pub context: Option<usize>,
    /// Layers that are kept out of the FP8 cache.
    pub skip: SkipLayers,
    /// The type of the cache.
    pub kv: KvFormat,
}

impl Serving {
    /// Refuses what the model or the engine does not have, and what is not known of the engine: whether it can leave layers out, and
    /// the families that have `windows` by layer there.
    pub(super) fn check(&self, spec: &AttentionSpec, skips: bool, windows: &[&str]) -> Result<()> {
        if !self.skip.is_empty() && !skips {
            return Err(Error::argument(
                "only vLLM keeps layers out of an FP8 cache: skip layers with the engine vllm",
            ));
        }
        if self.kv != KvFormat::Fp8 && !skips {
            return Err(Error::argument("only vLLM has a cache in NVFP4: audit it with the engine vllm"));
        }
        if self.kv != KvFormat::Fp8 && spec.has_mla() {
            return Err(Error::unsupported(
                "caches of latent attention (MLA) in NVFP4 have no scale of a checkpoint: audit the cache type fp8",
            ));
        }
        if self.context == Some(0) {
            return Err(Error::argument("the context must be at least 1"));
        }
        let windowed = |layer: &LayerSpec| layer.window.is_some();
        // Layers without attention are layers without a window.
        let all = spec.layers.iter().enumerate().all(|(at, layer)| windowed(layer) && layer.number == at);
        let by_number =
            spec.family == "gpt_oss" && spec.layers.iter().all(|own| windowed(own) == (own.number % 2 == 0));
        if self.skip.sliding_window && !(all || by_number || windows.contains(&spec.family.as_str())) {
            return Err(Error::argument(format_args!(
                "sliding_window to skip: which layers of family `{}` have a window in vLLM is not known: give their numbers",
                spec.family
            )));
        }
        self.skip.check(spec)
    }
}

/// Layers that keep the model's type, as vLLM's `--kv-cache-dtype-skip-layers` takes them: numbers of layers, or
/// `sliding_window`.
///
/// ```
/// use sigmascale::serving::SkipLayers;
/// let skip = SkipLayers::parse(["3", "sliding_window", "0"])?;
/// assert_eq!(skip.to_string(), "0 3 sliding_window");
/// assert!(SkipLayers::parse(["full"]).is_err());
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SkipLayers {
    /// Their numbers.
    pub numbers: BTreeSet<usize>,
    /// Whether all layers with a sliding window are.
    pub sliding_window: bool,
}

impl SkipLayers {
    /// Reads the words.
    ///
    /// # Errors
    /// `is_argument` if a word is neither a number nor `sliding_window`.
    pub fn parse<W: AsRef<str>>(words: impl IntoIterator<Item = W>) -> Result<Self> {
        let mut skip = Self::default();
        for word in words {
            match word.as_ref() {
                "sliding_window" => skip.sliding_window = true,
                word => {
                    // vLLM compares texts: `01` is no layer there.
                    let number = word.parse().ok().filter(|number: &usize| number.to_string() == word);
                    let number = number.ok_or_else(|| {
                        Error::argument(format_args!(
                            "layer {word:?} to skip: expected the number of a layer, or sliding_window"
                        ))
                    })?;
                    skip.numbers.insert(number);
                }
            }
        }
        Ok(skip)
    }

    /// Whether nothing is skipped.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty() && !self.sliding_window
    }

    /// Whether a layer is skipped.
    pub fn has(&self, layer: &LayerSpec) -> bool {
        self.numbers.contains(&layer.number) || self.sliding_window && layer.window.is_some()
    }

    /// Refuses numbers that no layer with attention has.
    fn check(&self, spec: &AttentionSpec) -> Result<()> {
        let known = |number: &&usize| !spec.layers.iter().any(|layer| layer.number == **number);
        match self.numbers.iter().find(known) {
            Some(number) => Err(Error::argument(format_args!(
                "layer {number} to skip: {} has no layer with attention of this number",
                spec.name
            ))),
            None => Ok(()),
        }
    }
}

impl fmt::Display for SkipLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.numbers.iter().map(usize::to_string);
        let words: Vec<String> = words.chain(self.sliding_window.then(|| "sliding_window".to_owned())).collect();
        f.write_str(&words.join(" "))
    }
}
