//! A family by its `model_type`, and what is refused by name.

use super::refused::REFUSED;
use super::schema::Family;
use super::wrappers::WRAPPERS;
use super::{hybrids, layer_norm, mla, rms_norm};
use serde::Serialize;

/// Families whose tokens also see the ones behind them, unless the config makes the model a decoder.
pub(crate) const BIDIRECTIONAL: &[&str] = &["bert", "roberta", "roberta-prelayernorm"];

/// A `model_type` that configs name, and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KnownFamily {
    /// The config's `model_type`.
    pub model_type: &'static str,
    /// Whether it has bounds.
    #[serde(flatten)]
    pub support: Support,
}

/// Whether a model type has bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Support {
    /// It is read as this family.
    Family(&'static str),
    /// It has no bounds, for this reason.
    Refused(&'static str),
}

/// Every model type in the table, by name: those that are read, wrappers of a text model included, and those that are
/// refused. A type that is not listed is refused as unknown.
///
/// ```
/// use sigmascale::model::{Support, known_families};
/// let bloom = known_families().into_iter().find(|known| known.model_type == "bloom").unwrap();
/// assert!(matches!(bloom.support, Support::Refused(why) if why.contains("ALiBi")));
/// ```
pub fn known_families() -> Vec<KnownFamily> {
    let types = families().flat_map(|family| family.model_types.iter().map(|model_type| (*model_type, family.name)));
    let wrapped = WRAPPERS.iter().filter_map(|wrapper| Some((wrapper.model_type, family(wrapper.text)?.name)));
    let read = types.chain(wrapped).map(|(model_type, name)| (model_type, Support::Family(name)));
    let refused = REFUSED.iter().map(|(model_type, why)| (*model_type, Support::Refused(why)));
    let mut all: Vec<_> =
        read.chain(refused).map(|(model_type, support)| KnownFamily { model_type, support }).collect();
    all.sort_unstable_by_key(|known| known.model_type);
    all
}

/// All of them.
fn families() -> impl Iterator<Item = &'static Family> {
    rms_norm::FAMILIES.iter().chain(layer_norm::FAMILIES).chain(hybrids::FAMILIES).chain(mla::FAMILIES)
}

/// The family of a `model_type`.
pub(crate) fn family(model_type: &str) -> Option<&'static Family> {
    families().find(|family| family.model_types.contains(&model_type))
}

/// The family of this name, which need not be a `model_type`.
pub(crate) fn family_named(name: &str) -> Option<&'static Family> {
    families().find(|family| family.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families::schema::Wrapper;

    #[test]
    fn a_layer_has_the_module_name_of_its_family() {
        let module = |family: &str| crate::model::attention_module(family, "p.", 11);
        assert_eq!(module("llama").unwrap(), "p.layers.11.self_attn");
        assert_eq!(module("gpt2").unwrap(), "p.h.11.attn");
        assert_eq!(module("gpt_neox").unwrap(), "p.layers.11.attention");
        assert_eq!(module("bert").unwrap(), "p.encoder.layer.11.attention.self");
        assert!(module("unheard-of").is_none());
    }

    #[test]
    fn every_model_type_stands_once() {
        let names: std::collections::BTreeSet<_> = families().map(|family| family.name).collect();
        assert_eq!(names.len(), families().count());
        let mut seen = std::collections::BTreeSet::new();
        for family in families() {
            for model_type in family.model_types {
                assert!(seen.insert(*model_type), "{model_type} twice");
            }
        }
        for (model_type, _) in REFUSED {
            assert!(seen.insert(model_type), "{model_type} twice");
        }
        for Wrapper { model_type, text, .. } in WRAPPERS {
            assert!(seen.insert(model_type), "{model_type} twice");
            assert!(family(text).is_some(), "{text} is no family");
        }
    }
    #[test]
    fn the_list_has_what_is_read_and_what_is_refused() {
        let all = known_families();
        assert!(all.windows(2).all(|pair| pair[0].model_type < pair[1].model_type));
        let support = |name: &str| all.iter().find(|known| known.model_type == name).map(|known| known.support);
        assert_eq!(support("xlm-roberta"), Some(Support::Family("roberta")));
        assert_eq!(support("qwen2_5_vl"), Some(Support::Family("qwen2_vl")));
        assert!(matches!(support("t5"), Some(Support::Refused(why)) if why.contains("relative position")));
        assert_eq!(support("unheard-of"), None);
        let json = serde_json::to_value(&all).unwrap();
        assert!(json[0]["model_type"].is_string() && (json[0]["family"].is_string() || json[0]["refused"].is_string()));
    }
}
