//! Which layers of a hybrid model have softmax attention, where others have a state space, a convolution, linear attention
//! or no token mixer.

use super::families::{LayerHeads, Otherwise, Sizes};
use super::keys::{Keys, MAX_LAYERS, refuse, shorten};
use crate::error::{Error, Result};
use serde_json::Value;

/// Names of a layer that has softmax attention.
const ATTENTION: &[&str] = &["full_attention", "sliding_attention", "attention", "qwen_sparse_attention"];
/// Names of a layer that has none.
pub(super) const OTHER_KINDS: &[&str] = &["linear_attention", "mamba", "mamba2", "conv", "mlp", "moe"];

impl Keys<'_> {
    /// Number of layers; where the config states none, that of its list of kinds.
    pub(super) fn layer_count(&self, sizes: &Sizes) -> Result<usize> {
        let listed = match &sizes.layer_heads {
            LayerHeads::Hybrid { keys, otherwise } => {
                self.kinds(keys)?.map(|(_, kinds)| kinds.len()).or(match otherwise {
                    Otherwise::Letters(key) => self.text(key)?.map(str::len),
                    _ => None,
                })
            }
            _ => None,
        };
        match (self.first_count(&sizes.layers, MAX_LAYERS)?, listed) {
            (None, Some(count @ 1..=MAX_LAYERS)) => Ok(count),
            _ => self.size(&sizes.layers, MAX_LAYERS),
        }
    }

    /// Whether each layer has softmax attention.
    pub(super) fn attention_layers(&self, keys: &[&str], otherwise: &Otherwise, layers: usize) -> Result<Vec<bool>> {
        let of = |key: &str, found: usize| match found == layers {
            true => Ok(()),
            false => Err(Error::format(self.file, format_args!("`{key}` has {found} entries for {layers} layers"))),
        };
        if let Some((key, kinds)) = self.kinds(keys)? {
            of(key, kinds.len())?;
            let has = |kind: &Value| match kind.as_str() {
                Some(name) if ATTENTION.contains(&name) => Ok(true),
                Some(name) if OTHER_KINDS.contains(&name) => Ok(false),
                _ => Err(refuse(self.file, format_args!("unknown layer type {}", shorten(&kind.to_string())))),
            };
            return kinds.iter().map(has).collect();
        }
        match otherwise {
            Otherwise::LastOf(count) => {
                let every = self.size(count, MAX_LAYERS)?;
                Ok((1..=layers).map(|number| number % every == 0).collect())
            }
            Otherwise::Period { period: (period_key, period), offset: (offset_key, offset) } => {
                let period = self.count(period_key, MAX_LAYERS)?.unwrap_or(*period);
                let offset = match self.get(offset_key) {
                    Some(value) => value
                        .as_u64()
                        .filter(|n| *n < period as u64)
                        .ok_or_else(|| self.wrong(offset_key, &format!("an integer below {period}"), value))?,
                    None => *offset as u64,
                };
                Ok((0..layers).map(|layer| (layer % period) as u64 == offset).collect())
            }
            Otherwise::Listed => {
                Err(Error::format(self.file, format_args!("`{}` is missing", keys.first().unwrap_or(&"layer_types"))))
            }
            Otherwise::EverySecond => Ok((0..layers).map(|layer| layer.is_multiple_of(2)).collect()),
            Otherwise::Numbers { key, absent } => {
                let Some(list) = self.array(key)? else { return Ok(vec![*absent; layers]) };
                let mut has = vec![false; layers];
                for value in list {
                    let layer = value.as_u64().and_then(|n| has.get_mut(usize::try_from(n).ok()?));
                    *layer
                        .ok_or_else(|| self.wrong(key, &format!("a list of layer numbers below {layers}"), value))? =
                        true;
                }
                Ok(has)
            }
            Otherwise::KimiLinear => {
                let Some(map) = self.object("linear_attn_config")? else {
                    return Ok((0..layers).map(|layer| layer > 0 && layer.is_multiple_of(4)).collect());
                };
                let settings = Keys { map, file: self.file };
                let key = "full_attn_layers";
                let missing = || Error::format(self.file, format_args!("`{key}` is missing from `linear_attn_config`"));
                let mut has = vec![false; layers];
                for value in settings.array(key)?.ok_or_else(missing)? {
                    let layer = value.as_u64().and_then(|n| has.get_mut(usize::try_from(n).ok()?.checked_sub(1)?));
                    *layer.ok_or_else(|| {
                        self.wrong(key, &format!("a list of layer numbers from 1 to {layers}"), value)
                    })? = true;
                }
                Ok(has)
            }
            Otherwise::Letters(key) => {
                let missing = || Error::format(self.file, format_args!("`{key}` is missing"));
                let letters = self.text(key)?.ok_or_else(missing)?;
                of(key, letters.chars().count())?;
                let has = |letter: char| match letter {
                    '*' => Ok(true),
                    'M' | '-' | 'E' => Ok(false),
                    _ => Err(refuse(self.file, format_args!("`{key}` has the unknown letter {letter:?}"))),
                };
                letters.chars().map(has).collect()
            }
        }
    }

    fn kinds<'k>(&self, keys: &[&'k str]) -> Result<Option<(&'k str, &Vec<Value>)>> {
        for key in keys {
            if let Some(list) = self.array(key)? {
                return Ok(Some((*key, list)));
            }
        }
        Ok(None)
    }
}
