//! Step 3.5 and 3.7, whose sliding layers have heads and a rotation of their own: one form for the config of the hub, with a list
//! entry a layer, and for the one that transformers saves.

use super::families::Family;
use super::keys::{Keys, MAX_D_MODEL, MAX_HEADS, MAX_LAYERS, refuse};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The list of query heads that the family's table reads.
const HEADS: &str = "num_attention_heads_per_layer";

impl Keys<'_> {
    /// The keys with heads by layer and a rotation by kind, where the family asks.
    pub(super) fn with_kinds(&self, family: &Family) -> Result<Map<String, Value>> {
        let mut map = self.map.clone();
        if !family.by_kind {
            return Ok(map);
        }
        let layers = self.size(&family.sizes.layers, MAX_LAYERS)?;
        let kinds: Vec<Value> = match self.array("layer_types")? {
            // The list goes on with layers for multi-token prediction.
            Some(list) => list.iter().take(layers).cloned().collect(),
            None => vec![json!("full_attention"); layers],
        };
        if kinds.len() != layers {
            let rule = format_args!("`layer_types` has {} entries for {layers} layers", kinds.len());
            return Err(Error::format(self.file, rule));
        }
        if map.get("num_key_value_heads").is_none_or(Value::is_null)
            && let Some(groups) = self.count("num_attention_groups", MAX_HEADS)?
        {
            map.insert("num_key_value_heads".to_owned(), json!(groups));
        }
        if map.get("query_pre_attn_scalar").is_none_or(Value::is_null)
            && let Some(width) = map.get("head_dim").filter(|width| !width.is_null()).cloned()
        {
            map.insert("query_pre_attn_scalar".to_owned(), width);
        }
        let own = Keys { map: &map, file: self.file };
        let heads = own.heads_by_kind(&kinds)?;
        let rotations = own.rotations_by_kind(&kinds)?;
        map.insert(HEADS.to_owned(), json!(heads));
        map.insert("layer_types".to_owned(), json!(kinds));
        for key in ["rope_scaling", "rope_theta", "partial_rotary_factors"] {
            map.remove(key);
        }
        map.insert("rope_parameters".to_owned(), Value::Object(rotations));
        Ok(map)
    }

    fn heads_by_kind(&self, kinds: &[Value]) -> Result<Vec<usize>> {
        let every = self.count("num_attention_heads", MAX_HEADS)?;
        let every = every.ok_or_else(|| Error::format(self.file, "`num_attention_heads` is missing"))?;
        let mut sliding = self.count("num_sliding_attention_heads", MAX_HEADS)?;
        if let Some(map) = self.object("attention_other_setting")? {
            let other = Keys { map, file: self.file };
            for (key, most) in [("num_attention_groups", MAX_HEADS), ("head_dim", MAX_D_MODEL)] {
                let same = if key == "head_dim" { "head_dim" } else { "num_key_value_heads" };
                if let Some(stated) = other.count(key, most)?
                    && self.count(same, most)? != Some(stated)
                {
                    let rule =
                        format_args!("`attention_other_setting` is refused where its `{key}` is not the model's");
                    return Err(refuse(self.file, rule));
                }
            }
            sliding = sliding.or(other.count("num_attention_heads", MAX_HEADS)?);
        }
        let sliding = sliding.unwrap_or(every);
        let mut heads: Vec<usize> =
            kinds.iter().map(|kind| if kind == "sliding_attention" { sliding } else { every }).collect();
        for (name, value) in self.object("per_layer_config")?.into_iter().flatten() {
            let at = name.parse::<usize>().ok().and_then(|number| heads.get_mut(number));
            let map = value.as_object().ok_or_else(|| self.wrong("per_layer_config", "an object of objects", value))?;
            let stated = Keys { map, file: self.file }.count("num_attention_heads", MAX_HEADS)?;
            let Some((at, stated)) = at.zip(stated).filter(|_| map.len() == 1) else {
                let rule = "`per_layer_config` is refused: only the number of query heads of a layer may differ";
                return Err(refuse(self.file, rule));
            };
            *at = stated;
        }
        Ok(heads)
    }

    fn rotations_by_kind(&self, kinds: &[Value]) -> Result<Map<String, Value>> {
        let names: BTreeSet<&str> = kinds.iter().filter_map(Value::as_str).collect();
        if let Some(map) = self.object("rope_parameters")?
            && names.iter().all(|name| map.get(*name).is_some_and(Value::is_object))
        {
            return Ok(map.clone());
        }
        if self.array("use_rope_layers")?.is_some_and(|list| !list.is_empty()) {
            return Err(refuse(self.file, "`use_rope_layers` is refused: layers without rotation are not known here"));
        }
        let scaling = self.object("rope_scaling")?;
        if scaling.is_some_and(|map| map.get("attention_factor").is_some_and(|factor| !factor.is_null())) {
            let rule = "`attention_factor` is refused: releases differ on the layers that it counts for";
            return Err(refuse(self.file, rule));
        }
        let mut rotations = Map::new();
        for name in names {
            let mut rotation = scaling.cloned().unwrap_or_default();
            rotation.entry("rope_type").or_insert(json!("default"));
            for (list, key) in [("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")] {
                let own: Vec<&Value> = match self.get(list) {
                    Some(Value::Array(values)) if values.len() >= kinds.len() => {
                        values.iter().zip(kinds).filter(|(_, kind)| *kind == name).map(|(value, _)| value).collect()
                    }
                    Some(Value::Array(values)) => {
                        let rule = format_args!("`{list}` has {} entries for {} layers", values.len(), kinds.len());
                        return Err(Error::format(self.file, rule));
                    }
                    Some(value) => vec![value],
                    None => continue,
                };
                if own.iter().any(|value| *value != own[0]) {
                    let rule = format_args!("`{list}` is refused: it differs between layers of the kind {name}");
                    return Err(refuse(self.file, rule));
                }
                rotation.insert(key.to_owned(), own[0].clone());
            }
            rotations.insert(name.to_owned(), Value::Object(rotation));
        }
        Ok(rotations)
    }
}
