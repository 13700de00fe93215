//! Where a family keeps the attention tensors of a layer, by name.
//!
//! [`Checkpoint`](super::Checkpoint) reads these tensors from files; a caller whose tensors already lie in memory (a
//! framework's modules, say) looks them up by [`Layout`].

use super::config::Config;
use super::families::{self, NormTensor, QkNormStored, QkvTensors};
use super::spec::{AttentionSpec, LayerSpec};
use crate::error::{Error, Result};
use std::path::Path;

/// Names and places of a model's attention tensors.
///
/// ```
/// use sigmascale::model::Layout;
/// let config = br#"{"model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 1}"#;
/// let layout = Layout::from_config_json(config, "config.json".as_ref())?;
/// let names = layout.layer(0)?;
/// assert_eq!((names.k.name.as_str(), names.k.conv1d, names.k.heads.as_slice()), ("h.0.attn.c_attn", true, &[128, 192][..]));
/// assert_eq!(names.norm.as_deref(), Some("h.0.ln_1"));
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone)]
pub struct Layout {
    config: Config,
}

/// The tensors of one layer; names are without prefix and without `.weight` or `.bias`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerNames {
    /// Query projection.
    pub q: ProjectionName,
    /// Key projection.
    pub k: ProjectionName,
    /// Value projection.
    pub v: ProjectionName,
    /// Norm in front of the projections; `None` where there is none.
    pub norm: Option<String>,
    /// Norms of q and k behind the projections; `{h}` stands for the head where each head has a tensor of its own. `None` where
    /// there are none, or none with gains.
    pub qk_norm: Option<(String, String)>,
    /// What latent attention has beside: q then reads the query latent where there is one, and k and v are rows of one tensor
    /// that reads the cached latent.
    pub mla: Option<MlaNames>,
}

/// The tensors of a layer with latent attention beside its heads' projections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlaNames {
    /// Norm of the query latent; `None` without one.
    pub q_norm: Option<String>,
    /// Norm of the cached latent.
    pub kv_norm: String,
    /// The shared rotated key: the last rows of the tensor that makes the cached latent.
    pub k_pe: ProjectionName,
}

/// One projection: a tensor, or some rows of a fused one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProjectionName {
    /// Name.
    pub name: String,
    /// First output channel of each head in the stored tensor; a head has `d_head` consecutive ones (with `mla` those of its own
    /// part: see [`Mla`](super::Mla)).
    pub heads: Vec<usize>,
    /// Output channels of the stored tensor.
    pub channels: usize,
    /// Stored `[in, out]` rather than `[out, in]`.
    pub conv1d: bool,
}

impl Layout {
    /// The layout of a model by its Hugging Face config; `file` names it in messages.
    ///
    /// # Errors
    /// As [`AttentionSpec::from_config_json`].
    pub fn from_config_json(bytes: &[u8], file: &Path) -> Result<Self> {
        Ok(Self { config: Config::parse(bytes, file)? })
    }

    /// What the attention is.
    pub fn spec(&self) -> &AttentionSpec {
        &self.config.spec
    }

    /// What may stand in front of every name; the first with which the first layer's projection exists is meant.
    pub fn prefixes(&self) -> &[&'static str] {
        &self.config.prefixes
    }

    /// The tensors of one layer.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<LayerNames> {
        Ok(self.config.names(self.spec().layer(layer)?))
    }
}

/// The module that holds a layer's attention, by the name that loaders know it by: `model.layers.3.self_attn`,
/// `transformer.h.3.attn`. `prefix` is that of the tensor names ([`AttentionSpec::prefix`]), `number` the model's own
/// ([`LayerSpec::number`]). `None` if there is no such family.
///
/// ```
/// use sigmascale::model::attention_module;
/// assert_eq!(attention_module("gpt2", "transformer.", 3).as_deref(), Some("transformer.h.3.attn"));
/// ```
pub fn attention_module(family: &str, prefix: &str, number: usize) -> Option<String> {
    let projection = at(families::family_named(family)?.qkv.first(), number);
    let (module, _) = projection.rsplit_once('.')?;
    Some(format!("{prefix}{module}"))
}

/// As [`attention_module`].
///
/// # Errors
/// `is_unsupported` if there is no such family.
pub(crate) fn require_attention_module(family: &str, prefix: &str, number: usize) -> Result<String> {
    attention_module(family, prefix, number)
        .ok_or_else(|| Error::unsupported(format_args!("the attention module names of family `{family}` are unknown")))
}

impl Config {
    /// The tensors of one layer.
    pub(super) fn names(&self, spec: &LayerSpec) -> LayerNames {
        let [q, k, v] = self.projection_names(spec);
        let layer = spec.number;
        let source = spec.kv_source.unwrap_or(layer);
        let norm = match &self.family.norm_tensor {
            NormTensor::FirstApart { first, .. } if layer == 0 => Some((*first).to_owned()),
            NormTensor::FirstApart { rest, .. } => Some(at(&rest.replace("{j}", &(layer - 1).to_string()), layer)),
            _ => self.own_norm.map(|name| at(name, layer)),
        };
        let qk_norm = match (&self.family.qk_norm, self.spec.qk_norm_of(spec)) {
            (Some(rule), Some(_)) if rule.stored != QkNormStored::Nothing => {
                Some((at(rule.q, layer), at(rule.k, source)))
            }
            _ => None,
        };
        LayerNames { q, k, v, norm, qk_norm, mla: self.mla_names(spec) }
    }

    fn mla_names(&self, spec: &LayerSpec) -> Option<MlaNames> {
        let (QkvTensors::Latent { q_norm, kv_a, kv_norm, .. }, Some(mla)) = (&self.family.qkv, spec.mla) else {
            return None;
        };
        Some(MlaNames {
            q_norm: mla.q_rank.map(|_| at(q_norm, spec.number)),
            kv_norm: at(kv_norm, spec.number),
            k_pe: ProjectionName {
                name: at(kv_a, spec.number),
                heads: vec![mla.kv_rank],
                channels: mla.kv_rank + mla.d_rope,
                conv1d: false,
            },
        })
    }

    fn projection_names(&self, spec: &LayerSpec) -> [ProjectionName; 3] {
        let layer = spec.number;
        let (n_q, n_kv, r) = (spec.n_q_heads, spec.n_kv_heads, spec.d_head);
        let rows = |first: usize, heads: usize| -> Vec<usize> { (0..heads).map(|h| (first + h) * r).collect() };
        let (name, conv1d, starts) = match self.family.qkv {
            QkvTensors::Separate { q, k, v } | QkvTensors::Gated { q, k, v } => {
                let gated = matches!(self.family.qkv, QkvTensors::Gated { .. });
                let source = spec.kv_source.unwrap_or(layer);
                let v = if self.keys_as_values.contains(&source) { k } else { v };
                let parts = [(q, n_q, gated, layer), (k, n_kv, false, source), (v, n_kv, false, source)];
                return parts.map(|(template, heads, gated, layer)| {
                    let each = if gated { 2 * r } else { r };
                    ProjectionName {
                        name: at(template, layer),
                        heads: (0..heads).map(|h| h * each).collect(),
                        channels: heads * each,
                        conv1d: false,
                    }
                });
            }
            QkvTensors::Concat { name, conv1d } => {
                (name, conv1d, [rows(0, n_q), rows(n_q, n_kv), rows(n_q + n_kv, n_kv)])
            }
            QkvTensors::Latent { q, q_b, kv_b, .. } => {
                // Families with these tensors have the sizes.
                let (q, each) = (if spec.mla.is_some_and(|mla| mla.q_rank.is_some()) { q_b } else { q }, spec.mla);
                let (nope, value) = each.map_or((r, r), |mla| (mla.d_nope, mla.d_value));
                return [(q, r, 0), (kv_b, nope + value, 0), (kv_b, nope + value, nope)].map(
                    |(template, each, first)| ProjectionName {
                        name: at(template, layer),
                        heads: (0..n_q).map(|h| h * each + first).collect(),
                        channels: n_q * each,
                        conv1d: false,
                    },
                );
            }
            QkvTensors::Grouped { name } => {
                let group = spec.group();
                let block = (group + 2) * r;
                let q = (0..n_q).map(|h| h / group * block + h % group * r).collect();
                let k = (0..n_kv).map(|g| g * block + group * r).collect();
                let v = (0..n_kv).map(|g| g * block + (group + 1) * r).collect();
                (name, false, [q, k, v])
            }
        };
        let channels = (n_q + 2 * n_kv) * r;
        starts.map(|heads| ProjectionName { name: at(name, layer), heads, channels, conv1d })
    }
}

/// A name template at one layer. With `{a}` in it, a layer of the names has two attentions, and these are counted here.
pub(super) fn at(template: &str, layer: usize) -> String {
    if template.contains("{a}") {
        return template.replace("{i}", &(layer / 2).to_string()).replace("{a}", &(layer % 2).to_string());
    }
    template.replace("{i}", &layer.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grouped_heads_interleave_query_key_and_value() {
        let config =
            br#"{"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}"#;
        let names = Layout::from_config_json(config, "config.json".as_ref()).unwrap().layer(1).unwrap();
        assert_eq!(names.q.name, "layers.1.attention.query_key_value");
        assert_eq!((&names.q.heads[..2], &names.k.heads[..2], names.v.heads[3]), (&[0, 48][..], &[16, 64][..], 176));
        assert_eq!(names.v.channels, 192);
    }
}
