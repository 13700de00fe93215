//! Every tensor and file of a folder that decides about attention, told apart by its name: scales, weights that the bounds
//! read, weights of attention that they do not, adapters.
//!
//! Names come from strangers. What looks like a scale of q, k, v or a cache, or like a weight of attention, and has no place in the
//! tables, is reported, so that an audit never passes over it.

use crate::model::{AttentionSpec, LayerSpec};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// Words of the last part of a name that stand for an operand of attention.
const OPERANDS: &[&str] =
    &["q", "k", "v", "kv", "qk", "qkv", "qkqkv", "query", "key", "value", "query_key_value", "prob"];
/// Names of projections, alone or fused, as modules.
const PROJECTIONS: &[&str] = &[
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "qkqkv_proj",
    "kv_proj",
    "query_key_value",
    "c_attn",
    "qkv",
    "Wqkv",
    "W_pack",
    "in_proj",
    "query",
    "key",
    "value",
    "wq",
    "wk",
    "wv",
    "wqkv",
    "to_q",
    "to_k",
    "to_v",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "fused_qkv_a_proj_with_mqa",
];

/// Whether a name ends in a scale of an operand of attention or of a cache, whoever reads it. Scales of stored weights and of
/// projections' inputs are not.
pub(super) fn is_scale(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let mut parts = name.rsplit('.');
    let last = parts.next().unwrap_or_default().trim_start_matches('_');
    let before = parts.next().unwrap_or_default();
    let Some(stem) = without_scale(last) else { return false };
    if stem.is_empty() {
        // `k_proj.scale`, `k_cache.scale`, `k_bmm_quantizer.amax`, `q.scale`, `attn.scale`.
        let words = || before.split('_');
        let other = ["norm", "layernorm", "weight", "input"].iter().any(|word| words().any(|own| own == *word));
        return !other
            && (words().any(|word| OPERANDS.contains(&word)) || PROJECTIONS.contains(&before) || is_attention(before));
    }
    if stem == "output" || stem == "prob_output" {
        return OPERANDS.contains(&before) || PROJECTIONS.contains(&before) || is_attention(before);
    }
    let words: Vec<&str> = stem.split('_').filter(|word| !word.is_empty()).collect();
    if ["weight", "input", "activation", "act"].iter().any(|word| words.contains(word)) {
        return false;
    }
    words.iter().any(|word| OPERANDS.contains(word)) || words.contains(&"cache")
}

/// The last part of a name without the word that makes it a scale.
fn without_scale(last: &str) -> Option<&str> {
    // Whatever stands behind the word: `_1`, a space, an invisible character.
    let last = last.trim_end_matches(|c: char| !c.is_ascii_alphabetic());
    for end in ["scale_inv", "scaling_factor", "scales", "scale", "descale", "zero_point", "amax"] {
        if let Some(stem) = last.strip_suffix(end) {
            return Some(stem.trim_end_matches("de").trim_end_matches('_'));
        }
    }
    None
}

fn is_attention(part: &str) -> bool {
    part.contains("attn") || part.contains("attention") || part == "mixer"
}

/// Whether a name is a zero point, which no engine uses: casts are symmetric.
pub(super) fn is_zero_point(name: &str) -> bool {
    name.ends_with("_zero_point") || name.ends_with(".zero_point")
}

/// Whether a name is a tensor of an adapter.
pub(super) fn is_adapter(name: &str) -> bool {
    const PARTS: &[&str] = &["base_layer", "modules_to_save", "original_module", "prompt_encoder", "prompt_embeddings"];
    name.split('.').any(|part| {
        let part = part.to_ascii_lowercase();
        let starts = ["lora", "dora", "ia3_", "vera_", "oft_", "hada_", "lokr_", "loha_", "adapter"];
        starts.iter().any(|start| part.starts_with(start))
            || part.ends_with("magnitude_vector")
            || PARTS.contains(&part.as_str())
    })
}

/// Files of an adapter in a folder: loaders of training tools and transformers apply them to the model next to them.
pub(super) fn adapter_files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| {
            let name = name.to_ascii_lowercase();
            let weights =
                ["safetensors", "bin", "pt", "pth", "npz"].iter().any(|end| name.ends_with(&format!(".{end}")));
            name == "adapter_config.json" || name.starts_with("adapter") && weights || name.contains("lora") && weights
        })
        .collect();
    names.sort_unstable();
    names
}

/// Which names are weights of attention that the bounds do not read.
pub(super) struct Unread<'a> {
    spec: &'a AttentionSpec,
    /// Layers of the whole model.
    layers: usize,
    /// Stems of what the bounds read, and whether they read a bias of it.
    read: HashMap<String, bool>,
    modules: &'a [String],
    /// Whether the model has other parts besides the text model.
    wrapped: bool,
}

impl<'a> Unread<'a> {
    pub fn new(
        spec: &'a AttentionSpec,
        layers: usize,
        read: HashMap<String, bool>,
        modules: &'a [String],
        wrapped: bool,
    ) -> Self {
        Self { spec, layers, read, modules, wrapped }
    }

    /// Why a tensor of attention was not judged; `None` where it was, or where it is not of attention.
    pub fn reason(&self, name: &str) -> Option<String> {
        let (stem, kind) = name.rsplit_once('.')?;
        let parts: Vec<&str> = stem.split('.').collect();
        let last = *parts.last()?;
        let projection = PROJECTIONS.contains(&last);
        let norm =
            ["q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_a_layernorm", "kv_a_layernorm"].contains(&last);
        let data = kind == "bias" || kind.starts_with("weight") || kind.starts_with("qweight");
        if let Some(bias) = self.read.get(stem) {
            if !bias && ["bias", "beta"].contains(&kind) {
                return Some("a bias that the config does not list, which some engines load by other keys".to_owned());
            }
            let changes = ["pre_quant_scale", "weight_packed", "qweight"].contains(&kind);
            return changes.then(|| "changes what a projection reads or is, which the bounds do not count".to_owned());
        }
        if !data {
            return None;
        }
        // The selection of keys has a cache of its own, with scales that are computed; a state is no cache of keys.
        let elsewhere = ["indexer", "linear_attn", "mamba", "linear_attention", "delta_net"];
        if parts.iter().any(|part| elsewhere.contains(part))
            || last == "in_proj" && !parts.iter().any(|p| is_attention(p))
        {
            return None;
        }
        if let Some(own) = self.own_module(stem) {
            return self.beside(&self.spec.layers[own], last, projection, norm);
        }
        if self.is_encoder(&parts) {
            return None;
        }
        let number = self.number(name);
        let known = number.is_some_and(|number| number < self.layers);
        // In a layer of the model's own, projections alone tell; elsewhere whatever is called attention does.
        let attention = parts.iter().any(|part| is_attention(part) && !part.contains("norm") && *part != "mixer");
        if !(projection || norm || attention && !known) {
            return None;
        }
        if let Some(number) = number {
            let hybrid = known && self.spec.layers.iter().all(|layer| layer.number != number);
            if hybrid {
                // The config says that the layer has no softmax attention.
                return None;
            }
            if !known {
                return Some(format!(
                    "attention of layer {number}, past the {} layers of the config (a layer for multi-token prediction)",
                    self.layers
                ));
            }
        }
        let draft = ["mtp", "draft", "eagle", "medusa", "nextn", "midlayer"];
        if parts.iter().any(|part| draft.iter().any(|word| part.to_ascii_lowercase().contains(word))) {
            return Some("attention of a draft (multi-token prediction), which is not bounded".to_owned());
        }
        Some("attention outside of the layers that are bounded".to_owned())
    }

    /// The layer whose attention module holds a name.
    fn own_module(&self, stem: &str) -> Option<usize> {
        self.modules
            .iter()
            .position(|module| stem.strip_prefix(module.as_str()).is_some_and(|rest| rest.starts_with('.')))
    }

    /// A tensor in a layer's own module that the bounds do not read.
    fn beside(&self, layer: &LayerSpec, last: &str, projection: bool, norm: bool) -> Option<String> {
        let keys = ["k_proj", "v_proj", "k_norm", "qkv_proj"].contains(&last);
        // Its keys and values are another layer's.
        let shared = layer.kv_source.is_some() && keys;
        // The projection to a latent precedes a norm.
        let latent = layer.mla.is_some() && ["q_a_proj", "fused_qkv_a_proj_with_mqa"].contains(&last);
        if shared || latent || !(projection || norm) {
            return None;
        }
        let what = if norm { "a norm of q or k" } else { "a projection" };
        Some(format!("{what} of layer {} that the config does not list", layer.number))
    }

    /// Whether a name belongs to an encoder of images or sound next to a text model: it keeps no cache, and engines do not cast it.
    fn is_encoder(&self, parts: &[&str]) -> bool {
        const TOWERS: &[&str] = &[
            "vision_tower",
            "vision_model",
            "vision_encoder",
            "visual",
            "vision",
            "audio_tower",
            "audio_model",
            "image_newline",
        ];
        self.wrapped && parts.iter().any(|part| TOWERS.contains(part))
    }

    /// The number of the layer in a name that has the model's own prefix.
    fn number(&self, name: &str) -> Option<usize> {
        let module = self.modules.first()?;
        let first = self.spec.layers.first()?.number.to_string();
        let parts: Vec<&str> = module.split('.').collect();
        let at = parts.iter().position(|part| *part == first)?;
        let mut own = name.split('.');
        for part in &parts[..at] {
            if own.next()? != *part {
                return None;
            }
        }
        own.next()?.parse().ok()
    }
}

/// The first of some names, and how many more there are, for people.
pub(super) fn first_of(names: &BTreeSet<String>) -> String {
    let first = names.iter().next().map(String::as_str).unwrap_or_default();
    match names.len() {
        0 | 1 => first.to_owned(),
        count => format!("{first} and {} more", count - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_operands_are_told_from_those_of_weights() {
        for name in [
            "model.layers.0.self_attn.k_scale",
            "model.layers.0.self_attn.attn._k_scale",
            "model.layers.0.self_attn.kv_scale",
            "model.layers.0.self_attn.v_proj.k_scale",
            "model.layers.0.self_attn.k_proj.output_scale",
            "model.layers.0.self_attn.prob_output_scale",
            "model.layers.0.self_attn.q.scale",
            "model.layers.0.self_attn.k_cache.scale",
            "x.kv_cache_scale",
            "x.cached_v_scale_1",
            "transformer.h.0.attn.k_descale",
            "x.k_scale_inv",
            "x.attn.scale",
            "x.key_scales",
            "k_scale",
        ] {
            assert!(is_scale(name), "{name}");
        }
        for name in [
            "model.layers.0.self_attn.k_proj.weight_scale",
            "model.layers.0.self_attn.k_proj.weight_scale_inv",
            "model.layers.0.self_attn.k_proj.weight_scale_2",
            "model.layers.0.self_attn.q_proj.input_scale",
            "model.layers.0.mlp.down_proj.output_scale",
            "model.layers.0.layer_scalar",
            "model.layers.0.self_attn.k_proj.weight",
            "router.per_expert_scale",
            "router.scale",
        ] {
            assert!(!is_scale(name), "{name}");
        }
    }

    #[test]
    fn adapters_are_known_by_their_tensors() {
        for name in [
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            "model.layers.0.self_attn.k_proj.lora_B.default.weight",
            "model.layers.0.self_attn.k_proj.base_layer.weight",
            "x.k_proj.lora_magnitude_vector",
            "x.v_proj.oft_R",
        ] {
            assert!(is_adapter(name), "{name}");
        }
        assert!(!is_adapter("model.layers.0.self_attn.k_proj.weight"));
    }
}
