//! Sliding windows: how many keys each layer of a config sees.
//!
//! No bound depends on them, since a mask can only hide logits. A forward does.

use super::families::{WindowLayers, WindowRule};
use super::keys::{Keys, MAX_LAYERS, MAX_POSITIONS};
use crate::error::Result;
use serde_json::Value;

const KEY: &str = "sliding_window";

impl Keys<'_> {
    /// The window of each layer; `rotated` says which have a rotation.
    pub(super) fn windows(
        &self,
        rule: Option<&WindowRule>,
        layers: usize,
        rotated: &[bool],
    ) -> Result<Vec<Option<usize>>> {
        let Some(rule) = rule else { return Ok(vec![None; layers]) };
        let window = match self.map.get(KEY) {
            None => rule.absent,
            // Some configs write 0 or false for none.
            Some(value) if value.as_i64() == Some(0) || value == &Value::Bool(false) => None,
            Some(_) => self.count(KEY, MAX_POSITIONS)?,
        };
        let on = rule.switch.map_or(Ok(true), |key| self.flag(key).map(|on| on.unwrap_or(false)))?;
        let Some(window) = window.filter(|_| on) else { return Ok(vec![None; layers]) };
        // Both ways, half of them lie on each side.
        let both_ways = self.flag("use_bidirectional_attention")?.unwrap_or(false);
        let window = if both_ways { window / 2 + 1 } else { window };
        let full: Vec<bool> = match (self.layer_types(layers)?, &rule.layers) {
            (_, WindowLayers::All) => vec![false; layers],
            (Some(full), _) => full,
            (None, WindowLayers::Types) => vec![false; layers],
            (None, WindowLayers::NotRotated) => rotated.to_vec(),
            (None, WindowLayers::From(key, absent)) => {
                let from = self.layer_number(key, *absent)?;
                (0..layers).map(|layer| layer < from).collect()
            }
            (None, WindowLayers::EverySecondBelow(key, absent)) => {
                let below = self.layer_number(key, *absent)?;
                (0..layers).map(|layer| layer % 2 == 1 || layer >= below).collect()
            }
            (None, WindowLayers::AllButOneOf { keys, every, first }) => {
                let mut own = *every;
                for key in *keys {
                    own = self.count(key, MAX_LAYERS)?.unwrap_or(own);
                }
                (0..layers).map(|layer| layer % own == if *first { 0 } else { own - 1 }).collect()
            }
        };
        Ok(full.into_iter().map(|full| (!full).then_some(window)).collect())
    }

    /// The number of a layer, which may be 0 or past the last.
    fn layer_number(&self, key: &str, absent: usize) -> Result<usize> {
        let number = |value: &Value| value.as_u64().map(|n| n as usize);
        let wrong = |value| self.wrong(key, "the number of a layer", value);
        self.get(key).map_or(Ok(absent), |value| number(value).ok_or_else(|| wrong(value)))
    }
}
