//! How a checkpoint stores the weights of its projections, by the `quantization_config`.

use super::keys::{Keys, MAX_D_MODEL, refuse, shorten};
use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// Rows and columns that share one FP8 scale.
pub(crate) type Tile = (usize, usize);

/// The tile of `quant_method: fp8` where the config has no `weight_block_size`.
const DEFAULT_TILE: Tile = (128, 128);

/// The tile of microscaling formats (MXFP8).
pub(super) const MICRO_TILE: Tile = (1, 32);

/// Methods whose checkpoints hold the weights as they are multiplied: the type of each tensor tells how. What is packed is refused
/// by its tensor.
const STORED: &[&str] = &[
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "mxfp8",
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "quark",
    "awq",
    "gptq",
    "auto-round",
];

/// How the weights of the projections are stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Stored {
    /// In scaled E4M3: an engine that multiplies by them as they are rounds the other operand to E4M3 too.
    pub fp8: bool,
    /// The config may leave attention in E4M3 beside weights of other formats: the tensors tell.
    pub mixed: bool,
    /// The tile of two-dimensional scales. `None` where the config does not tell it: such scales are refused, since their
    /// shape does not tell it either (the last tile may be short).
    pub tile: Option<Tile>,
    /// Why weights stored so have no bound, whatever their types. Constants of the config need no weights.
    pub refused: Option<String>,
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
    /// How weights are stored, by every dictionary that describes them: in which one an engine looks depends on its release.
    pub fn of(places: &[Keys<'_>]) -> Result<Self> {
        let mut found: Option<Self> = None;
        for keys in places {
            for key in ["quantization_config", "compression_config"] {
                let Some(map) = keys.object(key)? else { continue };
                let stored = Self::of_one(Keys { map, file: keys.file }, key)?;
                found = Some(match found {
                    None => stored,
                    Some(other) if other == stored => other,
                    // What either refuses is refused.
                    Some(Self { refused: Some(why), .. }) => Self { refused: Some(why), ..stored },
                    Some(_) if stored.refused.is_some() => stored,
                    Some(_) => {
                        let why =
                            format!("`{key}` contradicts another description of the stored weights in the config");
                        Self { refused: Some(why), ..stored }
                    }
                });
            }
        }
        Ok(found.unwrap_or_default())
    }

    fn of_one(settings: Keys<'_>, key: &str) -> Result<Self> {
        let unnamed = if key == "compression_config" { "compressed-tensors" } else { "unnamed" };
        let method = settings.text("quant_method")?.unwrap_or(unnamed);
        let algorithm = settings.text("quant_algo")?.unwrap_or_default();
        let plain = settings.plain_weights()?;
        let fp8 = match method {
            "fp8" | "fbgemm_fp8" | "mxfp8" => true,
            "compressed-tensors" => settings.text("format")? == Some("float-quantized"),
            "modelopt" => ["FP8", "MXFP8"].contains(&algorithm),
            "quark" => settings.quark_fp8()?,
            _ => false,
        };
        let refused = if settings.object("transform_config")?.is_some_and(|map| map.values().any(has_content)) {
            Some(
                "`transform_config`: the engine multiplies activations by its transforms (Hadamards) online, which the bounds do not \
                 count"
                    .to_owned(),
            )
        } else if method == "bitsandbytes" && !settings.skips_attention()? {
            Some(
                "`bitsandbytes` without attention in `llm_int8_skip_modules`: it rounds weights to 4 or 8 bits when they are loaded"
                    .to_owned(),
            )
        } else if method != "bitsandbytes" && !STORED.contains(&method) {
            let method = shorten(method);
            Some(format!("`{method}`: what it makes of weights when they are loaded is not known"))
        } else {
            None
        };
        if plain {
            return Ok(Self { refused, ..Self::default() });
        }
        let format = settings.text("format")?.unwrap_or_default();
        let micro = method == "mxfp8" || algorithm == "MXFP8" || format.starts_with("mxfp8");
        let tile = match settings.get("weight_block_size") {
            Some(sides) => Some(settings.tile("weight_block_size", sides)?),
            None if micro => Some(MICRO_TILE),
            // Written as null, it means one scale per tensor.
            None if method == "fp8" && !settings.map.contains_key("weight_block_size") => Some(DEFAULT_TILE),
            None if method == "compressed-tensors" => settings.group_tile()?,
            None => None,
        };
        let mixed = !fp8 && ["compressed-tensors", "modelopt", "modelopt_mixed", "quark"].contains(&method);
        Ok(Self { fp8, mixed, tile, refused })
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

    /// Whether bitsandbytes leaves q, k and v as they are. A name excludes every module that has it among its dotted parts.
    fn skips_attention(&self) -> Result<bool> {
        let list = self.array("llm_int8_skip_modules")?.into_iter().flatten();
        let names: Vec<&str> = list.filter_map(Value::as_str).collect();
        let skipped = |module: &str| names.contains(&module);
        Ok(skipped("self_attn") || ["q_proj", "k_proj", "v_proj"].iter().all(|module| skipped(module)))
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
