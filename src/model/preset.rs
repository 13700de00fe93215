//! Models by name: config facts carried with the crate, and the sigma profiles of the paper's Table 6.

use super::config::Config;
use super::spec::AttentionSpec;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

macro_rules! presets {
    ($($name:literal),+ $(,)?) => {
        /// Names and configs, the four of the paper first.
        static PRESETS: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../calibration/presets/", $name, ".json")))),+];
    };
}

presets![
    "gpt2-xl",
    "mistral-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-32b",
    "gemma-2-9b",
    "gemma-3-27b",
    "mistral-small-24b",
    "mixtral-8x7b",
    "phi-3-mini",
    "olmo-2-7b",
    "starcoder2-7b",
    "falcon-7b",
    "smollm3-3b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
    "minicpm3-4b",
    "glm-5",
    "longcat-flash",
];

static PAPER_SIGMA: &str = include_str!("../../calibration/paper-sigma.json");

/// The attention of a well-known model, from the config facts in `calibration/presets`.
///
/// ```
/// let spec = sigmascale::model::preset("mistral-7b").unwrap();
/// assert_eq!((spec.layers.len(), spec.d_model, spec.layer(0)?.group()), (32, 4096, 4));
/// assert!(sigmascale::model::preset("mistral-8b").is_none());
/// # Ok::<(), sigmascale::Error>(())
/// ```
pub fn preset(name: &str) -> Option<AttentionSpec> {
    let (name, json) = PRESETS.iter().find(|(known, _)| *known == name)?;
    let mut spec = Config::parse(json.as_bytes(), Path::new(name)).ok()?.spec;
    spec.name = (*name).to_owned();
    Some(spec)
}

/// The names [`preset`] knows, the four models of the paper first.
///
/// ```
/// assert_eq!(sigmascale::model::preset_names().next(), Some("gpt2-xl"));
/// ```
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

#[derive(Deserialize)]
struct Profile {
    mean: f64,
    max: f64,
    min: f64,
    max_layer: usize,
}

/// A sigma (summed raw matrix) for each layer with the mean, extremes and place of the maximum that the paper's Table 6
/// prints for this preset. What the table does not say is filled in evenly, falling with the distance from the maximum.
///
/// ```
/// let sigma = sigmascale::model::paper_sigma_profile("llama-2-70b").unwrap();
/// assert_eq!((sigma.len(), sigma[67]), (80, 1786.1));
/// ```
pub fn paper_sigma_profile(name: &str) -> Option<Vec<f64>> {
    #[derive(Deserialize)]
    struct Table {
        models: BTreeMap<String, Profile>,
    }
    let table: Table = serde_json::from_str(PAPER_SIGMA).ok()?;
    let profile = table.models.get(name)?;
    let layers = preset(name)?.layers.len();
    // The others by distance from the maximum, the farthest takes the minimum.
    let mut order: Vec<usize> = (0..layers).filter(|layer| *layer != profile.max_layer).collect();
    order.sort_by_key(|layer| layer.abs_diff(profile.max_layer));
    let mut sigma = vec![profile.max; layers];
    sigma[order.pop()?] = profile.min;
    let rest = order.len() as f64;
    let mean = (profile.mean * layers as f64 - profile.max - profile.min) / rest;
    // A symmetric spread around the mean of the rest keeps it and stays between the extremes.
    let spread = 0.8 * (mean - profile.min).min(profile.max - mean);
    for (place, layer) in order.into_iter().enumerate() {
        sigma[layer] = mean + spread * (1.0 - 2.0 * (place as f64 + 0.5) / rest);
    }
    Some(sigma)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_reads() {
        for (name, json) in PRESETS {
            let parsed = Config::parse(json.as_bytes(), Path::new(name));
            let spec = parsed.unwrap_or_else(|e| panic!("{name}: {e}")).spec;
            assert!(spec.is_plain() && spec.check().is_ok(), "{name}");
            let value: serde_json::Value = serde_json::from_str(json).unwrap();
            assert_eq!(value["name"], *name);
        }
        assert!(PRESETS.len() >= 14);
    }

    #[test]
    fn the_papers_models_have_the_papers_shapes() {
        let shape = |name: &str| {
            let s = preset(name).unwrap();
            let layer = &s.layers[0];
            (s.d_model, layer.d_head, layer.n_q_heads, layer.n_kv_heads, s.layers.len())
        };
        assert_eq!(shape("gpt2-xl"), (1600, 64, 25, 25, 48));
        assert_eq!(shape("mistral-7b"), (4096, 128, 32, 8, 32));
        assert_eq!(shape("llama-2-13b"), (5120, 128, 40, 40, 40));
        assert_eq!(shape("llama-2-70b"), (8192, 128, 64, 8, 80));
    }

    #[test]
    fn profiles_have_the_papers_statistics() {
        let table = [
            ("gpt2-xl", 83.1, 483.9, 55.8, 0),
            ("mistral-7b", 4.9, 46.8, 2.4, 0),
            ("llama-2-13b", 198.4, 463.5, 134.4, 0),
            ("llama-2-70b", 584.2, 1786.1, 264.6, 67),
        ];
        for (name, mean, max, min, max_layer) in table {
            let sigma = paper_sigma_profile(name).unwrap();
            assert!((sigma.iter().sum::<f64>() / sigma.len() as f64 - mean).abs() < 1e-9 * mean, "{name}");
            assert_eq!(sigma.iter().copied().fold(f64::INFINITY, f64::min), min, "{name}");
            assert_eq!(sigma.iter().copied().fold(0.0, f64::max), max, "{name}");
            assert_eq!(sigma[max_layer], max, "{name}");
        }
        assert!(paper_sigma_profile("qwen3-8b").is_none());
    }
}
