//! How a checkpoint stores the weights of its projections, by the `quantization_config`.

use super::keys::{Keys, MAX_D_MODEL, refuse, shorten};
use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// Rows and columns that share one FP8 scale.
pub(super) type Tile = (usize, usize);

/// The tile of `quant_method: fp8` where the config has no `weight_block_size`.
const DEFAULT_TILE: Tile = (128, 128);

/// How the weights of the projections are stored.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Stored {
    /// In scaled E4M3: an engine that multiplies by them as they are rounds the other operand to E4M3 too.
    pub fp8: bool,
    /// The tile of two-dimensional scales. `None` where the config does not tell it: such scales are refused, since their
    /// shape does not tell it either (the last tile may be short).
    pub tile: Option<Tile>,
}

/// Whether a value says anything: `{"config_groups": {}}` is how no transforms are written.
fn has_content(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Object(map) => map.values().any(has_content),
        _ => true,
    }
}

impl Stored {
    /// Refuses stored weights other than plain ones and scaled E4M3, by every dictionary that describes them: in which one an
    /// engine looks depends on its release.
    pub fn of(places: &[Keys<'_>]) -> Result<Self> {
        let mut found: Option<Self> = None;
        for keys in places {
            for key in ["quantization_config", "compression_config"] {
                let Some(map) = keys.object(key)? else { continue };
                let stored = Self::of_one(Keys { map, file: keys.file }, key)?;
                if found.is_some_and(|other| other != stored) {
                    let rule =
                        format_args!("`{key}` contradicts another description of the stored weights in this config");
                    return Err(refuse(keys.file, rule));
                }
                found = Some(stored);
            }
        }
        Ok(found.unwrap_or_default())
    }

    fn of_one(settings: Keys<'_>, key: &str) -> Result<Self> {
        let unnamed = if key == "compression_config" { "compressed-tensors" } else { "unnamed" };
        let method = settings.text("quant_method")?.unwrap_or(unnamed);
        let plain = settings.plain_weights()?;
        let known = match method {
            _ if plain => true,
            // `mxfp4` is for the experts alone; a projection stored so would have a type that is not read.
            "fp8" | "fbgemm_fp8" | "mxfp4" => true,
            "compressed-tensors" => settings.text("format")? == Some("float-quantized"),
            "modelopt" => settings.text("quant_algo")? == Some("FP8"),
            "quark" => settings.quark_fp8()?,
            _ => false,
        };
        if !known {
            return Err(refuse(
                settings.file,
                format_args!(
                    "weights quantized by `{}` are refused: only scaled FP8 (E4M3) is supported",
                    shorten(method)
                ),
            ));
        }
        if settings.object("transform_config")?.is_some_and(|transforms| transforms.values().any(has_content)) {
            let rule = "`transform_config` is refused: the engine multiplies activations by its transforms (Hadamards) online, \
                        which the bounds do not count";
            return Err(refuse(settings.file, rule));
        }
        if plain {
            return Ok(Self::default());
        }
        let tile = match settings.get("weight_block_size") {
            Some(sides) => Some(settings.tile("weight_block_size", sides)?),
            // Written as null, it means one scale per tensor.
            None if method == "fp8" && !settings.map.contains_key("weight_block_size") => Some(DEFAULT_TILE),
            None if method == "compressed-tensors" => settings.group_tile()?,
            None => None,
        };
        Ok(Self { fp8: method != "mxfp4", tile })
    }
}

impl Keys<'_> {
    /// Whether it is compressed-tensors without a group of quantised weights: what asks for an FP8 cache alone.
    fn plain_weights(&self) -> Result<bool> {
        let none = self.object("config_groups")?.is_none_or(|groups| groups.is_empty());
        Ok(none && self.text("quant_method")? == Some("compressed-tensors") && self.get("kv_cache_scheme").is_some())
    }

    /// Whether Quark stored all weights in E4M3.
    fn quark_fp8(&self) -> Result<bool> {
        let e4m3 = |map: &Map<String, Value>| map.get("weight").is_none_or(|weight| weight["dtype"] == "fp8_e4m3");
        let layers = self.object("layer_quant_config")?.into_iter().flat_map(|map| map.values());
        let layers_too = layers.filter_map(Value::as_object).all(e4m3);
        Ok(layers_too && self.object("global_quant_config")?.is_some_and(|map| map.contains_key("weight") && e4m3(map)))
    }

    /// Two sides as a list, or as text: `128x128`.
    fn tile(&self, key: &str, sides: &Value) -> Result<Tile> {
        let sides: Option<Vec<u64>> = match sides {
            Value::Array(list) => list.iter().map(Value::as_u64).collect(),
            Value::String(text) => text.split('x').map(|side| side.parse().ok()).collect(),
            _ => None,
        };
        match sides.as_deref() {
            Some(&[rows, cols]) if [rows, cols].iter().all(|n| (1..=MAX_D_MODEL as u64).contains(n)) => {
                Ok((rows as usize, cols as usize))
            }
            _ => Err(Error::format(self.file, format_args!("`{key}`: expected two positive integers"))),
        }
    }

    /// The tile that the groups of compressed-tensors agree on, if one has it.
    fn group_tile(&self) -> Result<Option<Tile>> {
        let mut found = None;
        for group in self.object("config_groups")?.into_iter().flat_map(|groups| groups.values()) {
            let Some(sides) = group.pointer("/weights/block_structure").filter(|sides| !sides.is_null()) else {
                continue;
            };
            let tile = self.tile("block_structure", sides)?;
            if found.is_some_and(|other| other != tile) {
                return Err(refuse(
                    self.file,
                    "groups of `config_groups` with different `block_structure` are refused",
                ));
            }
            found = Some(tile);
        }
        Ok(found)
    }
}
