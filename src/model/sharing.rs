//! Layers that take the keys and values of others, layers with heads of their own kind, and factors beside the weights.

use super::families::{Family, RopeLayers, RopeRule};
use super::keys::{Keys, MAX_D_MODEL, MAX_HEADS, MAX_LAYERS, refuse, shorten};
use super::spec::Multipliers;
use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;

/// Heads of the full layers, where they differ from those of the others.
pub(super) struct GlobalHeads {
    pub d_head: usize,
    /// `None`: as many as in the other layers.
    pub n_kv_heads: Option<usize>,
    /// Values come from the projection of the keys.
    pub keys_as_values: bool,
}

impl Keys<'_> {
    /// Gemma 4's full layers; those of the others where the family has no such layers.
    pub(super) fn global_heads(&self, family: &Family, layers: usize, d_head: usize) -> Result<GlobalHeads> {
        if !family.global_heads {
            return Ok(GlobalHeads { d_head, n_kv_heads: None, keys_as_values: false });
        }
        let keys_as_values = self.flag("attention_k_eq_v")?.unwrap_or(false);
        let key = "per_layer_config";
        let Some(own) = self.object(key)? else {
            let n_kv_heads = self.count("num_global_key_value_heads", MAX_HEADS)?.filter(|_| keys_as_values);
            let d_head = self.count("global_head_dim", MAX_D_MODEL)?.unwrap_or(512);
            return Ok(GlobalHeads { d_head, n_kv_heads, keys_as_values });
        };
        // What transformers saves in place of the two keys: by layer, what differs from the sizes of the model. Numbers have leading
        // zeros where the last one has more digits.
        let mut by_layer = BTreeMap::new();
        for (name, value) in own {
            let number = name.parse::<usize>().ok().filter(|number| *number < layers);
            if number.is_none_or(|number| by_layer.insert(number, value).is_some()) {
                let rule =
                    format_args!("`{key}` is refused: `{}` is no layer, or one that is there twice", shorten(name));
                return Err(refuse(self.file, rule));
            }
        }
        let heads = |number: usize| -> Result<(usize, Option<usize>)> {
            let Some(&value) = by_layer.get(&number) else { return Ok((d_head, None)) };
            let map = value.as_object().ok_or_else(|| self.wrong(key, "an object of objects", value))?;
            let keys = Keys { map, file: self.file };
            let n_kv_heads = keys.count("num_key_value_heads", MAX_HEADS)?;
            Ok((keys.count("head_dim", MAX_D_MODEL)?.unwrap_or(d_head), n_kv_heads))
        };
        let heads: Vec<_> = (0..layers).map(heads).collect::<Result<_>>()?;
        let full = self.full_layers_of(family, layers)?;
        let of_full = full.iter().position(|full| *full).map_or((d_head, None), |number| heads[number]);
        let fits = heads.iter().zip(&full).all(|(own, full)| *own == if *full { of_full } else { (d_head, None) });
        if !fits {
            let rule = format_args!(
                "`{key}` is refused: only the full layers may have heads of their own, all of them the same"
            );
            return Err(refuse(self.file, rule));
        }
        Ok(GlobalHeads { d_head: of_full.0, n_kv_heads: of_full.1, keys_as_values })
    }

    /// Which layers are full ones, where the family asks; the last of Gemma 4 always is.
    pub(super) fn full_layers_of(&self, family: &Family, layers: usize) -> Result<Vec<bool>> {
        match &family.rope {
            RopeRule::Rotary { layers: RopeLayers::ByType { pattern, .. }, .. } => {
                let mut full = self.full_layers(layers, pattern)?;
                if let (true, Some(last)) = (family.global_heads, full.last_mut()) {
                    *last = true;
                }
                Ok(full)
            }
            _ => Ok(vec![false; layers]),
        }
    }

    /// The layer whose keys and values each one takes: the last of its kind that has its own.
    pub(super) fn kv_sources(&self, family: &Family, full: &[bool]) -> Result<Vec<Option<usize>>> {
        let Some((key, default)) = family.shared_kv else { return Ok(vec![None; full.len()]) };
        let shared = match self.get(key) {
            Some(value) if value.as_u64() == Some(0) => 0,
            _ => self.count(key, MAX_LAYERS)?.unwrap_or(default),
        };
        let first = full.len().checked_sub(shared).filter(|first| *first > 0);
        let Some(first) = first else {
            let rule =
                format_args!("`{key}` is {shared} of {} layers: at least one layer must have its own keys", full.len());
            return Err(Error::format(self.file, rule));
        };
        let source = |number: usize| match full[..first].iter().rposition(|kind| *kind == full[number]) {
            _ if number < first => Ok(None),
            Some(source) => Ok(Some(source)),
            None => {
                let rule = format_args!(
                    "layer {number} shares the keys and values of an earlier layer of its kind, but there is none"
                );
                Err(Error::format(self.file, rule))
            }
        };
        (0..full.len()).map(source).collect()
    }

    /// Falcon-H1's factors.
    pub(super) fn multipliers(&self, family: &Family) -> Result<Option<Multipliers>> {
        if !family.multipliers {
            return Ok(None);
        }
        let factor = |key: &str| Ok::<_, Error>(self.number(key)?.unwrap_or(1.0));
        let factors = Multipliers { input: factor("attention_in_multiplier")?, key: factor("key_multiplier")? };
        Ok(Some(factors).filter(|factors| (factors.input, factors.key) != (1.0, 1.0)))
    }

    /// `use_bidirectional_attention`: a flag, or for what.
    pub(super) fn both_ways(&self) -> Result<bool> {
        let key = "use_bidirectional_attention";
        match self.get(key).and_then(Value::as_str) {
            Some("all") => Ok(true),
            Some("vision") => Ok(false),
            Some(other) => Err(refuse(self.file, format_args!("unknown `{key}` = `{}`", super::keys::shorten(other)))),
            None => Ok(self.flag(key)?.unwrap_or(false)),
        }
    }
}
