//! The heads of every layer, by the config: how many, how wide, and which layers have attention at all.

use super::families::{BLOCK_REFUSALS, Count, HeadDim, KvHeads, LayerHeads, Sizes};
use super::keys::{Keys, MAX_D_MODEL, MAX_HEADS, refuse};
use crate::error::{Error, Result};
use serde_json::Value;
use std::path::PathBuf;

impl Keys<'_> {
    /// Query and KV heads of each layer; `None` where it has no attention.
    pub fn heads(&self, sizes: &Sizes, layers: usize) -> Result<Vec<Option<(usize, usize)>>> {
        let heads: Vec<Option<(usize, usize)>> = match &sizes.layer_heads {
            LayerHeads::Uniform => {
                let n_q = self.size(&sizes.q_heads, MAX_HEADS)?;
                vec![Some((n_q, self.kv_heads(&sizes.kv_heads, n_q)?)); layers]
            }
            LayerHeads::Queries(key) => {
                let n_q = self.size(&sizes.q_heads, MAX_HEADS)?;
                let n_kv = self.kv_heads(&sizes.kv_heads, n_q)?;
                let list = self.counts(key, layers, MAX_HEADS)?.unwrap_or_else(|| vec![n_q; layers]);
                list.into_iter().map(|n_q| Some((n_q, n_kv))).collect()
            }
            LayerHeads::Lists { q, kv } => {
                let list = |key: &str| {
                    let missing = || Error::format(self.file, format_args!("`{key}` is missing"));
                    self.counts(key, layers, MAX_HEADS)?.ok_or_else(missing)
                };
                list(q)?.into_iter().zip(list(kv)?).map(Some).collect()
            }
            LayerHeads::Blocks => {
                let n_q = self.size(&sizes.q_heads, MAX_HEADS)?;
                self.blocks(layers, n_q)?.into_iter().map(|n_kv| Some((n_q, n_kv?))).collect()
            }
            LayerHeads::Hybrid { keys, otherwise } => {
                let n_q = self.size(&sizes.q_heads, MAX_HEADS)?;
                let heads = (n_q, self.kv_heads(&sizes.kv_heads, n_q)?);
                self.attention_layers(keys, otherwise, layers)?.into_iter().map(|has| has.then_some(heads)).collect()
            }
        };
        let unequal = |heads: &Option<(usize, usize)>| heads.is_some_and(|(n_q, n_kv)| n_q % n_kv != 0);
        if let Some((number, Some((n_q, n_kv)))) = heads.iter().enumerate().find(|(_, heads)| unequal(heads)) {
            let rule = format_args!(
                "layer {number}: {n_q} query heads are not a multiple of {n_kv} KV heads (`{}`{})",
                sizes.q_heads.keys[0],
                match &sizes.kv_heads {
                    KvHeads::Key(count) => format!(", `{}`", count.keys[0]),
                    _ => String::new(),
                }
            );
            return Err(Error::format(self.file, rule));
        }
        Ok(heads)
    }

    /// DeciLM: KV heads of each layer from `block_configs`, or from the list of its first release; `None` where a layer
    /// has no attention.
    fn blocks(&self, layers: usize, n_q: usize) -> Result<Vec<Option<usize>>> {
        let Some(blocks) = self.array("block_configs")? else {
            let key = "num_key_value_heads_per_layer";
            let counts = self.counts(key, layers, MAX_HEADS)?;
            let missing = || Error::format(self.file, format_args!("`block_configs` and `{key}` are both missing"));
            return Ok(counts.ok_or_else(missing)?.into_iter().map(Some).collect());
        };
        if blocks.len() != layers {
            let rule = format_args!("`block_configs` has {} entries for {layers} layers", blocks.len());
            return Err(Error::format(self.file, rule));
        }
        let kv_heads = |(number, block): (usize, &Value)| {
            let Some(Value::Object(map)) = block.get("attention") else {
                return Err(Error::format(self.file, format_args!("block {number}: `attention` must be an object")));
            };
            if block.get("parallel_blocks").is_some_and(|inner| !inner.is_null()) {
                return Err(refuse(self.file, format_args!("block {number}: `parallel_blocks` are not supported")));
            }
            let place = PathBuf::from(format!("{}, block {number}", self.file.display()));
            let attention = Keys { map, file: &place };
            // A linear layer in attention's place has no logits.
            for absent in ["no_op", "replace_with_linear"] {
                if attention.flag(absent)?.unwrap_or(false) {
                    return Ok(None);
                }
            }
            for refusal in BLOCK_REFUSALS {
                attention.check(refusal)?;
            }
            match attention.count("n_heads_in_group", MAX_HEADS)? {
                Some(group) if n_q.is_multiple_of(group) => Ok(Some(n_q / group)),
                Some(group) => {
                    let rule =
                        format_args!("block {number}: {n_q} query heads are not a multiple of the group size {group}");
                    Err(Error::format(self.file, rule))
                }
                None => Err(Error::format(self.file, format_args!("block {number}: `n_heads_in_group` is missing"))),
            }
        };
        blocks.iter().enumerate().map(kv_heads).collect()
    }

    fn kv_heads(&self, rule: &KvHeads, n_q_heads: usize) -> Result<usize> {
        match rule {
            KvHeads::SameAsQuery => Ok(n_q_heads),
            KvHeads::One => Ok(1),
            KvHeads::Key(count) => {
                let null = count.keys.iter().any(|key| self.map.get(*key).is_some_and(Value::is_null));
                let default = if null { None } else { count.default };
                Ok(self.first_count(count, MAX_HEADS)?.or(default).unwrap_or(n_q_heads))
            }
            KvHeads::Falcon => {
                let keys = Count { keys: &["num_kv_heads", "n_head_kv"], default: None };
                if self.flag("new_decoder_architecture")?.unwrap_or(false) {
                    return Ok(self.first_count(&keys, MAX_HEADS)?.unwrap_or(n_q_heads));
                }
                Ok(if self.flag("multi_query")?.unwrap_or(true) { 1 } else { n_q_heads })
            }
        }
    }

    pub fn d_head(&self, rule: &HeadDim, d_model: usize, n_q_heads: usize) -> Result<usize> {
        let stated = self.count("head_dim", MAX_D_MODEL)?;
        let derived = || {
            if d_model.is_multiple_of(n_q_heads) {
                return Ok(d_model / n_q_heads);
            }
            Err(Error::format(
                self.file,
                format_args!(
                    "the hidden size {d_model} is not a multiple of {n_q_heads} heads, and `head_dim` is missing"
                ),
            ))
        };
        match rule {
            HeadDim::Key(default) => {
                let null = self.map.get("head_dim").is_some_and(Value::is_null);
                stated.or(if null { None } else { *default }).map_or_else(derived, Ok)
            }
            HeadDim::Derived => {
                let derived = derived()?;
                match stated {
                    Some(n) if n != derived => Err(Error::format(
                        self.file,
                        format_args!(
                            "`head_dim`: expected {derived} (hidden size / heads, which this family uses), got {n}"
                        ),
                    )),
                    _ => Ok(derived),
                }
            }
        }
    }
}
