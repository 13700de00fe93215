//! What engines read, as data with the engine's version: names and renames, methods of quantization that carry scales of
//! attention, families, casts without a scale.
//!
//! A name is never spelled by hand to say what is read: [`Description::lands`] applies the engine's own renames to a stored name
//! and looks whether an attention parameter has the result. The name that an export writes is one of these
//! ([`Description::written`]), and the tests send every written name through the reader. What no row tells is unknown.
//!
//! Lanes in `python/tests/lanes` compare these tables with the engines' own loaders.

mod others;
mod schema;
mod sglang;
mod vllm;

pub(super) use schema::{Carries, Description, Loads, Names, Otherwise};

use super::engine::{Engine, Operand};
use super::settings::Method;
use crate::model::AttentionSpec;
use regex_lite::Regex;
use schema::Rename;
use std::collections::HashMap;

impl Engine {
    pub(super) fn description(self) -> &'static Description {
        match self {
            Self::Vllm => &vllm::DESCRIPTION,
            Self::Sglang => &sglang::DESCRIPTION,
            Self::Trtllm => &others::TRTLLM,
            Self::Mistralrs => &others::MISTRALRS,
        }
    }
}

/// The attention parameters of one model in one engine, by name.
pub(super) struct Parameters {
    by_name: HashMap<String, (usize, Operand)>,
    renames: Vec<(Regex, Rename)>,
    every_rename: bool,
}

impl Parameters {
    /// The layer and operand that a stored tensor is loaded as; none where the engine has no place for it.
    pub fn lands(&self, name: &str) -> Option<(usize, Operand)> {
        let mut name = name.to_owned();
        for (regex, rename) in &self.renames {
            let Some(found) = regex.find(&name) else { continue };
            if !rename.not_behind.is_empty() && name[..found.start()].ends_with(rename.not_behind) {
                continue;
            }
            name = regex.replace(&name, rename.to).into_owned();
            if !self.every_rename {
                break;
            }
        }
        self.by_name.get(&name).copied()
    }
}

impl Description {
    /// What the attention of a model loads; none: no row tells. `types` are the config's own `model_type`s, which go before the
    /// family.
    pub fn loads(&self, spec: &AttentionSpec, types: &[&str]) -> Option<Loads> {
        if spec.has_mla() {
            return Some(Loads::Nothing(self.latent));
        }
        let row = |word: &str| self.families.iter().find(|(names, _)| names.contains(&word)).map(|(_, loads)| *loads);
        types.iter().copied().chain([spec.family.as_str(), "*"]).find_map(row)
    }

    /// Whether the engine does not start with a model of this family where a stored scale has no parameter.
    pub fn stops_at_strays(&self, spec: &AttentionSpec) -> bool {
        !spec.has_mla() && self.stops_for.iter().any(|family| ["*", &spec.family].contains(family))
    }

    /// The parameters of a model whose attention modules these are.
    pub fn parameters(&self, names: &Names, modules: &[String], method: &Method) -> Parameters {
        let key = method.key();
        let fits = |rename: &&Rename| {
            rename.methods.is_empty() || rename.methods.iter().any(|own| key.split(':').next() == Some(*own))
        };
        let compiled = names.renames.iter().filter(fits).filter_map(|rename| {
            // Every expression is compiled in the tests.
            Some((Regex::new(rename.from).ok()?, *rename))
        });
        let by_name = modules.iter().enumerate().flat_map(|(layer, module)| {
            let of = move |operand| (parameter(names.parameter, module, operand), (layer, operand));
            Operand::ALL.into_iter().filter(|operand| self.operands[*operand as usize]).map(of)
        });
        Parameters { by_name: by_name.collect(), renames: compiled.collect(), every_rename: self.every_rename }
    }

    /// The name under which an export stores a scale.
    pub fn written(&self, family: &str, module: &str, operand: Operand) -> String {
        let template = match self.families.iter().find(|(names, _)| names.contains(&family)) {
            Some((_, Loads::Scales(names) | Loads::Partly(names, _))) => names.written,
            _ => "{module}",
        };
        parameter(template, module, operand)
    }
}

fn parameter(template: &str, module: &str, operand: Operand) -> String {
    let layer = module.rsplit_once('.').map_or("", |(layer, _)| layer);
    let place = template.replace("{module}", module).replace("{layer}", layer);
    format!("{place}.{}_scale", operand.letter())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Support, known_families};

    /// One spelling writes and another reads: each written name has to arrive, for every family and method.
    #[test]
    fn what_is_written_is_read() {
        for engine in Engine::ALL {
            let description = engine.description();
            for (families, loads) in description.families {
                let (Loads::Scales(names) | Loads::Partly(names, _)) = loads else { continue };
                for family in *families {
                    let module = crate::model::attention_module(family, "model.", 3);
                    let module = module.unwrap_or_else(|| "model.layers.3.self_attn".to_owned());
                    for (key, _) in description.methods {
                        let method = Method::named(key);
                        let parameters = description.parameters(names, &[String::new(), module.clone()], &method);
                        for operand in Operand::ALL.into_iter().filter(|o| description.operands[*o as usize]) {
                            let name = description.written(family, &module, operand);
                            assert_eq!(parameters.lands(&name), Some((1, operand)), "{engine} {family} {key} {name}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_expression_compiles_and_every_family_is_one() {
        let known = known_families();
        for engine in Engine::ALL {
            let mut seen = std::collections::BTreeSet::new();
            for (families, loads) in engine.description().families {
                for family in *families {
                    let is_one = *family == "*"
                        || known
                            .iter()
                            .any(|known| known.support == Support::Family(family) || known.model_type == *family);
                    assert!(is_one && seen.insert(*family), "{engine} {family}");
                }
                if let Loads::Scales(names) | Loads::Partly(names, _) = loads {
                    names.renames.iter().for_each(|rename| assert!(Regex::new(rename.from).is_ok(), "{}", rename.from));
                }
            }
        }
    }

    /// As the engines' own tables have them.
    #[test]
    fn names_land_where_the_engines_put_them() {
        let modules: Vec<String> = (0..2).map(|layer| format!("model.layers.{layer}.self_attn")).collect();
        let lands = |engine: Engine, family: &str, method: &str, rest: &str| {
            let description = engine.description();
            let (_, loads) = description.families.iter().find(|(names, _)| names.contains(&family)).unwrap();
            let Loads::Scales(names) = loads else { panic!("{family}") };
            let parameters = description.parameters(names, &modules, &Method::named(method));
            parameters.lands(&format!("model.layers.1.self_attn.{rest}")).map(|(layer, operand)| {
                assert_eq!(layer, 1);
                operand.letter()
            })
        };
        for (rest, expected) in [
            ("k_scale", Some('k')),
            ("attn.k_scale", Some('k')),
            ("kv_scale", Some('k')),
            ("k_proj.k_scale", Some('k')),
            // The class in front of the group is not compared with it.
            ("v_proj.k_scale", Some('k')),
            ("qkv_proj.v_scale", Some('v')),
            ("qkqkv_proj.k_scale", Some('k')),
            ("q.scale", Some('q')),
            ("v_cache.scale", Some('v')),
            ("q_proj.q_scale", None),
            ("o_proj.k_scale", None),
            ("attn.attn.k_scale", None),
        ] {
            assert_eq!(lands(Engine::Vllm, "llama", "compressed-tensors", rest), expected, "{rest}");
        }
        assert_eq!(lands(Engine::Vllm, "llama", "compressed-tensors", "k_proj.output_scale"), None);
        assert_eq!(lands(Engine::Vllm, "llama", "quark", "k_proj.output_scale"), Some('k'));
        assert_eq!(lands(Engine::Vllm, "llama", "fp8", "q_proj.output_scale"), Some('q'));
        for (family, rest, expected) in [
            ("llama", "k_scale", Some('k')),
            ("llama", "k_proj.k_scale", Some('k')),
            ("llama", "v_proj.output_scale", Some('v')),
            ("llama", "q_scale", None),
            ("qwen2", "attn.k_scale", Some('k')),
            ("qwen2", "k_scale", None),
            ("qwen3_5", "k_scale", Some('k')),
            ("qwen3_5", "k_proj.k_scale", Some('k')),
        ] {
            assert_eq!(lands(Engine::Sglang, family, "compressed-tensors", rest), expected, "{family} {rest}");
        }
    }
}
