//! From `config.json` to an [`AttentionSpec`].
//!
//! Reads both generations of the keys (`rope_theta` with `rope_scaling`, or `rope_parameters`, also one set a layer
//! type; `torch_dtype` or `dtype`) and fills absent keys with the defaults of the reference implementation. What the
//! table in `families` does not know is refused by name: a model type, a rotation, a quantisation, a setting that
//! changes the logits. Sizes are capped before anything is allocated from them.

use super::families::{
    BIDIRECTIONAL, COMMON_REFUSALS, Count, Family, Flag, HeadDim, KvHeads, NormTensor, REFUSED, Refusal, RopeLayers,
    RopeRule, ScaleRule, Setting, WRAPPERS, family,
};
use super::spec::{AttentionSpec, QkvBias, Rope};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::f64::consts::PI;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest config that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_LAYERS: usize = 10_000;
const MAX_D_MODEL: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 14;
const MAX_POSITIONS: usize = 1 << 40;

impl AttentionSpec {
    /// Reads a Hugging Face `config.json` held in memory. `file` names it in messages and gives the spec its name: that
    /// of its folder for a `config.json`, else its own without the extension.
    ///
    /// ```
    /// use sigmascale::model::AttentionSpec;
    /// let config = br#"{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
    ///     "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0}"#;
    /// let spec = AttentionSpec::from_config_json(config, "tiny/config.json".as_ref())?;
    /// assert_eq!((spec.name.as_str(), spec.d_head, spec.group()), ("tiny", 64, 2));
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    ///
    /// # Errors
    /// `is_format` if it is no JSON object, a size is missing, of the wrong type or out of range, or the heads do not
    /// divide; `is_unsupported` if the family, its rotation or a setting cannot be bounded.
    pub fn from_config_json(bytes: &[u8], file: &Path) -> Result<Self> {
        Ok(Config::parse(bytes, file)?.spec)
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// As [`AttentionSpec::from_config_json`], and `is_io` if the file cannot be read. A file over 16 MiB is refused
    /// before it is read.
    pub fn from_config_file(path: &Path) -> Result<Self> {
        Ok(Config::read(path)?.spec)
    }
}

/// A config as the checkpoint reader needs it.
#[derive(Clone)]
pub(crate) struct Config {
    pub spec: AttentionSpec,
    pub family: &'static Family,
    /// Name of the layer's own input norm, where the family has more than one.
    pub own_norm: Option<&'static str>,
    /// Rows and columns of one tile of the FP8 scales, where the config says so.
    pub fp8_block: Option<(usize, usize)>,
}

impl Config {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_CONFIG_BYTES, "a config")?;
        Self::parse(&bytes, path)
    }

    pub(crate) fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            return Err(too_large(file, bytes.len() as u64, MAX_CONFIG_BYTES, "a config"));
        }
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|e| Error::format(file, format_args!("the config is no JSON: {e}")))?;
        let Value::Object(map) = value else {
            return Err(Error::format(file, "the config is no JSON object"));
        };
        let top = Keys { map: &map, file };
        let model_type = top.text("model_type")?.ok_or_else(|| Error::format(file, "`model_type` is missing"))?;
        let (text, model_type) = match WRAPPERS.iter().find(|(wrapper, _)| *wrapper == model_type) {
            Some((_, family)) => {
                let inner = top.object("text_config")?.ok_or_else(|| {
                    Error::format(file, format_args!("`text_config` is missing from this `{model_type}` config"))
                })?;
                let inner = Keys { map: inner, file };
                (inner, inner.text("model_type")?.unwrap_or(family))
            }
            None => (top, model_type),
        };
        if let Some((_, why)) = REFUSED.iter().find(|(name, _)| *name == model_type) {
            return Err(refuse(file, format_args!("model type `{model_type}` is refused: {why}")));
        }
        let Some(family) = family(model_type) else {
            return Err(refuse(file, format_args!("model type `{}` is not known", shorten(model_type))));
        };
        check_dtype(top)?;
        let fp8_block = quantization(if top.get("quantization_config").is_some() { top } else { text })?;
        for refusal in COMMON_REFUSALS.iter().chain(family.refusals) {
            text.check(refusal)?;
        }
        text.build(family, fp8_block)
    }
}

/// Reads a file of at most `cap` bytes; a longer one is refused before it is read.
pub(crate) fn read_capped(path: &Path, cap: u64, what: &str) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let metadata = file.metadata().map_err(|e| Error::io(path, "read its size", e))?;
    if !metadata.is_file() {
        return Err(Error::format(path, format_args!("{what} must be a regular file")));
    }
    if metadata.len() > cap {
        return Err(too_large(path, metadata.len(), cap, what));
    }
    let mut bytes = Vec::new();
    // One byte over the cap, so that a file that grows meanwhile is still caught.
    file.take(cap + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
    if bytes.len() as u64 > cap {
        return Err(too_large(path, bytes.len() as u64, cap, what));
    }
    Ok(bytes)
}

fn too_large(file: &Path, bytes: u64, cap: u64, what: &str) -> Error {
    Error::format(file, format_args!("{what} may have at most {cap} bytes, and this has {bytes}"))
}

fn refuse(file: &Path, what: impl std::fmt::Display) -> Error {
    Error::unsupported(format_args!("{}: {what}", file.display()))
}

/// Text from a stranger, short enough for a message.
fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// An object of the config and the file it stands in.
#[derive(Clone, Copy)]
struct Keys<'a> {
    map: &'a Map<String, Value>,
    file: &'a Path,
}

impl<'a> Keys<'a> {
    /// The value of a key; null is absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, want: &str, found: &Value) -> Error {
        let found = shorten(&found.to_string());
        Error::format(self.file, format_args!("`{key}` must be {want}, and is {found}"))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| self.wrong(key, "a string", v))).transpose()
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.get(key).map(|v| v.as_object().ok_or_else(|| self.wrong(key, "an object", v))).transpose()
    }

    fn array(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.get(key).map(|v| v.as_array().ok_or_else(|| self.wrong(key, "a list", v))).transpose()
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.wrong(key, "true or false", v))).transpose()
    }

    /// A finite number.
    fn number(&self, key: &str) -> Result<Option<f64>> {
        let read =
            |v: &'a Value| v.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.wrong(key, "a finite number", v));
        self.get(key).map(read).transpose()
    }

    /// A finite number above zero.
    fn positive(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(x) if x <= 0.0 => {
                Err(Error::format(self.file, format_args!("`{key}` must be greater than zero, and is {x}")))
            }
            other => Ok(other),
        }
    }

    /// A count from 1 to `max`.
    fn count(&self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(key, &format!("a whole number from 1 to {max}"), value)),
        }
    }

    fn first_count(&self, count: &Count, max: usize) -> Result<Option<usize>> {
        for key in count.keys {
            if let Some(n) = self.count(key, max)? {
                return Ok(Some(n));
            }
        }
        Ok(None)
    }

    fn size(&self, count: &Count, max: usize) -> Result<usize> {
        self.first_count(count, max)?
            .or(count.default)
            .ok_or_else(|| Error::format(self.file, format_args!("`{}` is missing", count.keys[0])))
    }

    fn set(&self, flag: &Flag) -> Result<bool> {
        match flag {
            Flag::Always => Ok(true),
            Flag::Never => Ok(false),
            Flag::Key(key, default) => Ok(self.flag(key)?.unwrap_or(*default)),
        }
    }

    fn check(&self, refusal: &Refusal) -> Result<()> {
        let Some(value) = self.get(refusal.key) else { return Ok(()) };
        let allowed = match refusal.unless {
            Setting::False => value.as_bool() == Some(false),
            Setting::Text(text) => value.as_str() == Some(text),
        };
        if allowed {
            return Ok(());
        }
        let value = shorten(&value.to_string());
        Err(refuse(self.file, format_args!("`{}` = {value} is refused: {}", refusal.key, refusal.why)))
    }

    fn build(self, family: &'static Family, fp8_block: Option<(usize, usize)>) -> Result<Config> {
        let file = self.file;
        let layers = self.size(&family.sizes.layers, MAX_LAYERS)?;
        let d_model = self.size(&family.sizes.d_model, MAX_D_MODEL)?;
        let n_q_heads = self.size(&family.sizes.q_heads, MAX_HEADS)?;
        let n_kv_heads = self.kv_heads(&family.sizes.kv_heads, n_q_heads)?;
        if n_q_heads % n_kv_heads != 0 {
            return Err(Error::format(
                file,
                format_args!("{n_q_heads} query heads do not divide by {n_kv_heads} key/value heads"),
            ));
        }
        let d_head = self.d_head(&family.sizes.d_head, d_model, n_q_heads)?;
        if d_head % 8 != 0 || !(16..=256).contains(&d_head) {
            return Err(refuse(
                file,
                format_args!("head dimension {d_head} is refused: it must be a multiple of 8 from 16 to 256"),
            ));
        }
        self.layer_types(layers)?;
        let qk_norm = match &family.qk_norm {
            Some(rule) if self.set(&rule.when)? => Some(rule.norm),
            Some(_) => None,
            None => {
                for key in ["qk_norm", "use_qk_norm", "qk_layernorm"] {
                    if self.get(key).is_some_and(|v| v.as_bool() != Some(false)) {
                        return Err(refuse(
                            file,
                            format_args!("`{key}` is set, and family `{}` is not known to have one", family.name),
                        ));
                    }
                }
                None
            }
        };
        let bias = self.set(&family.bias)?;
        let max_positions = self
            .first_count(&Count { keys: &["max_position_embeddings", "n_positions"], default: None }, MAX_POSITIONS)?;
        let both_ways = BIDIRECTIONAL.contains(&family.name) && !self.flag("is_decoder")?.unwrap_or(false)
            || self.flag("use_bidirectional_attention")?.unwrap_or(false);
        let spec = AttentionSpec {
            name: name_of(file),
            family: family.name.to_owned(),
            causal: !both_ways,
            layers,
            d_model,
            n_q_heads,
            n_kv_heads,
            d_head,
            norm: family.norm,
            bias: QkvBias { q: bias, k: bias, v: bias },
            rope: self.rope(family, layers, d_head, max_positions)?,
            qk_norm,
            softmax_scale: self.softmax_scale(&family.scale, layers, d_head)?,
            soft_cap: match family.soft_cap {
                // Present and null switches the cap off.
                Some((key, default)) if !self.map.contains_key(key) => default,
                Some((key, _)) => self.positive(key)?,
                None => None,
            },
            max_positions,
        };
        let own_norm = match family.norm_tensor {
            NormTensor::Own(name) => Some(name),
            NormTensor::Falcon { two, one } => {
                let new = self.flag("new_decoder_architecture")?.unwrap_or(false);
                let norms = self.count("num_ln_in_parallel_attn", 2)?.unwrap_or(if new { 2 } else { 1 });
                Some(if new && norms == 2 { two } else { one })
            }
            NormTensor::None | NormTensor::Previous { .. } => None,
        };
        Ok(Config { spec, family, own_norm, fp8_block })
    }

    fn kv_heads(&self, rule: &KvHeads, n_q_heads: usize) -> Result<usize> {
        match rule {
            KvHeads::SameAsQuery => Ok(n_q_heads),
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

    fn d_head(&self, rule: &HeadDim, d_model: usize, n_q_heads: usize) -> Result<usize> {
        let stated = self.count("head_dim", MAX_D_MODEL)?;
        let derived = || {
            if d_model.is_multiple_of(n_q_heads) {
                return Ok(d_model / n_q_heads);
            }
            Err(Error::format(
                self.file,
                format_args!("model dimension {d_model} does not divide by {n_q_heads} heads"),
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
                        format_args!("`head_dim` is {n}, and this family takes {derived} = model dimension / heads"),
                    )),
                    _ => Ok(derived),
                }
            }
        }
    }

    /// `layer_types`: whether each layer is a full one, or `None` when absent.
    fn layer_types(&self, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(list) = self.array("layer_types")? else { return Ok(None) };
        if list.len() != layers {
            return Err(Error::format(
                self.file,
                format_args!("`layer_types` has {} entries for {layers} layers", list.len()),
            ));
        }
        let full = |value: &Value| match value.as_str() {
            Some("full_attention") => Ok(true),
            Some("sliding_attention") => Ok(false),
            _ => Err(refuse(
                self.file,
                format_args!("layer type {} is not known to be softmax attention", shorten(&value.to_string())),
            )),
        };
        list.iter().map(full).collect::<Result<Vec<bool>>>().map(Some)
    }

    fn softmax_scale(&self, rule: &ScaleRule, layers: usize, d_head: usize) -> Result<Vec<f64>> {
        let usual = (d_head as f64).sqrt().recip();
        let same = match rule {
            ScaleRule::InverseSqrtHead => usual,
            ScaleRule::QueryPreAttnScalar(default) => {
                self.positive("query_pre_attn_scalar")?.unwrap_or(*default).sqrt().recip()
            }
            ScaleRule::Multiplier(key, default) => self.positive(key)?.unwrap_or(*default),
            ScaleRule::Gpt2 => {
                let base = if self.flag("scale_attn_weights")?.unwrap_or(true) { usual } else { 1.0 };
                if self.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false) {
                    return Ok((0..layers).map(|layer| base / (layer + 1) as f64).collect());
                }
                base
            }
        };
        Ok(vec![same; layers])
    }

    fn rope(
        &self,
        family: &Family,
        layers: usize,
        d_head: usize,
        max_positions: Option<usize>,
    ) -> Result<Vec<Option<Rope>>> {
        let RopeRule::Rotary { layout, theta_keys, theta, partial, layers: rule, longrope_names } = &family.rope else {
            return Ok(vec![None; layers]);
        };
        let nested = |kind: &str| -> Result<Option<Keys<'a>>> {
            let Some(map) = self.object("rope_parameters")? else { return Ok(None) };
            let all = Keys { map, file: self.file };
            Ok(all.object(kind)?.map(|map| Keys { map, file: self.file }))
        };
        // The settings of one kind of layer: the nested set, else the common one, else `rope_scaling`.
        let common = match self.object("rope_parameters")? {
            Some(map) => Some(map),
            None => self.object("rope_scaling")?,
        };
        let common = common.map(|map| Keys { map, file: self.file });
        let mut base = None;
        for key in theta_keys.iter().chain(&["rope_theta"]) {
            if base.is_none() && !self.get(key).is_some_and(Value::is_object) {
                base = self.positive(key)?;
            }
        }
        let make = |settings: Option<Keys<'a>>, base: Option<f64>| -> Result<Rope> {
            let inner = settings.map_or(Ok(None), |s| s.positive("rope_theta"))?;
            let share = self.share(settings, partial)?;
            // Truncated towards zero, as the reference implementation does.
            let rotary_dim = (d_head as f64 * share) as usize;
            if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > d_head {
                return Err(Error::format(
                    self.file,
                    format_args!("a share of {share} of {d_head} channels is no even number of rotated channels"),
                ));
            }
            if let Some(stated) = self.count("rotary_dim", MAX_D_MODEL)?
                && stated != rotary_dim
            {
                let rule = format_args!("`rotary_dim` is {stated}, and the other keys say {rotary_dim}");
                return Err(Error::format(self.file, rule));
            }
            let angles = Angles { base: inner.or(base), rotary_dim, max_positions };
            let (attention_factor, inv_freq) = match settings {
                Some(settings) => angles.scaled(settings, *self, longrope_names)?,
                None => (1.0, angles.plain()),
            };
            if !(attention_factor.is_finite() && attention_factor > 0.0) {
                return Err(Error::format(
                    self.file,
                    format_args!("the rotation's attention factor is {attention_factor}, and must be above zero"),
                ));
            }
            if inv_freq.iter().flatten().any(|angle| !angle.is_finite()) {
                return Err(Error::format(
                    self.file,
                    "the rotation's base and factors give angles that are not finite",
                ));
            }
            Ok(Rope { rotary_dim, layout: *layout, attention_factor, inv_freq })
        };
        let by_type = |full: Rope, sliding: Rope, types: &[bool]| {
            types.iter().map(|is_full| Some(if *is_full { full.clone() } else { sliding.clone() })).collect()
        };
        let nested_sets = (nested("full_attention")?, nested("sliding_attention")?);
        let is_nested = nested_sets.0.is_some() || nested_sets.1.is_some();
        let common_base = base.or(*theta);
        match rule {
            RopeLayers::ByType { pattern: (keys, default), local_theta } => {
                let types = match self.layer_types(layers)? {
                    Some(types) => types,
                    None => {
                        let every = self.size(&Count { keys, default: Some(*default) }, MAX_LAYERS)?;
                        (0..layers).map(|layer| (layer + 1) % every == 0).collect()
                    }
                };
                let local = match local_theta {
                    Some((key, default)) => Some(self.positive(key)?.unwrap_or(*default)),
                    None => common_base,
                };
                let full = make(if is_nested { nested_sets.0 } else { common }, common_base)?;
                let sliding = make(nested_sets.1, local)?;
                Ok(by_type(full, sliding, &types))
            }
            _ if is_nested => {
                let types = self.layer_types(layers)?.ok_or_else(|| {
                    Error::format(self.file, "`rope_parameters` differ by layer type, and `layer_types` is missing")
                })?;
                if matches!(rule, RopeLayers::NoRope { .. }) {
                    return Err(refuse(self.file, "`rope_parameters` by layer type beside layers without rotation"));
                }
                Ok(by_type(make(nested_sets.0, common_base)?, make(nested_sets.1, common_base)?, &types))
            }
            RopeLayers::Same => Ok(vec![Some(make(common, common_base)?); layers]),
            RopeLayers::NoRope { interval: (key, default) } => {
                let rope = make(common, common_base)?;
                let rotated: Vec<bool> = match self.array("no_rope_layers")? {
                    Some(list) => {
                        if list.len() < layers {
                            return Err(Error::format(
                                self.file,
                                format_args!("`no_rope_layers` has {} entries for {layers} layers", list.len()),
                            ));
                        }
                        let bit = |v: &Value| match v.as_u64() {
                            Some(bit @ (0 | 1)) => Ok(bit == 1),
                            _ => Err(self.wrong("no_rope_layers", "a list of 0 and 1", v)),
                        };
                        list[..layers].iter().map(bit).collect::<Result<_>>()?
                    }
                    None => {
                        let every = self.count(key, MAX_LAYERS)?.unwrap_or(*default);
                        (0..layers).map(|layer| (layer + 1) % every != 0).collect()
                    }
                };
                Ok(rotated.into_iter().map(|yes| yes.then(|| rope.clone())).collect())
            }
        }
    }

    /// The rotated share of a head.
    fn share(&self, settings: Option<Keys<'a>>, rule: &(&[&str], f64)) -> Result<f64> {
        let mut share = None;
        if let Some(settings) = settings {
            share = settings.positive("partial_rotary_factor")?;
        }
        let known = if rule.0.is_empty() { &["partial_rotary_factor"] } else { rule.0 };
        for key in known {
            if share.is_none() {
                share = self.positive(key)?;
            }
        }
        let share = share.unwrap_or(rule.1);
        if share > 1.0 {
            return Err(Error::format(
                self.file,
                format_args!("the rotated share {share} is more than the whole head"),
            ));
        }
        if rule.0.is_empty() && share != 1.0 {
            return Err(refuse(
                self.file,
                format_args!("this family is not known to rotate a share of {share} of a head"),
            ));
        }
        Ok(share)
    }
}

/// What the angles of a rotation come from.
struct Angles {
    base: Option<f64>,
    rotary_dim: usize,
    max_positions: Option<usize>,
}

impl Angles {
    /// base^(-2b / rotary_dim).
    fn plain(&self) -> Option<Vec<f64>> {
        let base = self.base?;
        let dim = self.rotary_dim as f64;
        Some((0..self.rotary_dim / 2).map(|b| base.powf(-2.0 * b as f64 / dim)).collect())
    }

    /// Attention factor and angles of a scaled rotation.
    fn scaled(&self, settings: Keys<'_>, config: Keys<'_>, longrope_names: &[&str]) -> Result<(f64, Option<Vec<f64>>)> {
        let kind = match settings.text("rope_type")? {
            Some(kind) => kind,
            None => settings.text("type")?.unwrap_or("default"),
        };
        if settings.get("llama_4_scaling_beta").is_some() {
            return Err(refuse(
                settings.file,
                "`llama_4_scaling_beta` is refused: the query is multiplied by a factor that grows with the position",
            ));
        }
        if settings.get("mrope_section").is_some() {
            return Err(refuse(settings.file, "rotation by several position axes (`mrope_section`) is not known"));
        }
        let kind = if longrope_names.contains(&kind) { "longrope" } else { kind };
        match kind {
            "default" => Ok((1.0, self.plain())),
            "linear" => {
                let factor = required(settings, "factor")?;
                Ok((1.0, self.plain().map(|angles| angles.into_iter().map(|w| w / factor).collect())))
            }
            // The base moves with the length of the sequence, so there is no one set of angles.
            "dynamic" => Ok((1.0, None)),
            "llama3" => Ok((1.0, self.llama3(settings)?)),
            "yarn" => self.yarn(settings),
            "longrope" => Ok((self.longrope_factor(settings, config)?, None)),
            other => Err(refuse(settings.file, format_args!("rotation type `{}` is not known", shorten(other)))),
        }
    }

    fn llama3(&self, settings: Keys<'_>) -> Result<Option<Vec<f64>>> {
        let factor = required(settings, "factor")?;
        let low = required(settings, "low_freq_factor")?;
        let high = required(settings, "high_freq_factor")?;
        let original = required(settings, "original_max_position_embeddings")?;
        if high <= low {
            return Err(Error::format(settings.file, "`high_freq_factor` must be greater than `low_freq_factor`"));
        }
        let scale = |w: f64| {
            // Turns within the original length: few turns are stretched, many are kept, between the two is a blend.
            let turns = original * w / (2.0 * PI);
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            w * keep + w / factor * (1.0 - keep)
        };
        Ok(self.plain().map(|angles| angles.into_iter().map(scale).collect()))
    }

    fn yarn(&self, settings: Keys<'_>) -> Result<(f64, Option<Vec<f64>>)> {
        let stated = settings.positive("factor")?;
        let original = settings.count("original_max_position_embeddings", MAX_POSITIONS)?.or(self.max_positions);
        let ratio = match (self.max_positions, original) {
            (Some(max), Some(original)) => Some(max as f64 / original as f64),
            _ => None,
        };
        let Some(factor) = stated.or(ratio) else {
            return Err(Error::format(settings.file, "`factor` is missing from the YaRN rotation"));
        };
        let magnitude = |factor: f64, m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let by = |factor: f64, m: Option<f64>, all: Option<f64>| match (m, all) {
            (Some(m), Some(all)) => magnitude(factor, m) / magnitude(factor, all),
            _ => magnitude(factor, 1.0),
        };
        let attention_factor = match settings.positive("attention_factor")? {
            Some(factor) => factor,
            None => {
                // Zero switches these off, as absence does.
                let m = settings.number("mscale")?.filter(|m| *m != 0.0);
                let all = settings.number("mscale_all_dim")?.filter(|m| *m != 0.0);
                // Releases differ on whether `factor` or the ratio of the lengths counts: the larger covers both.
                by(factor, m, all).max(by(ratio.unwrap_or(factor), m, all))
            }
        };
        let (Some(angles), Some(original)) = (self.plain(), original) else { return Ok((attention_factor, None)) };
        let base = self.base.unwrap_or(1.0);
        let fast = settings.positive("beta_fast")?.unwrap_or(32.0);
        let slow = settings.positive("beta_slow")?.unwrap_or(1.0);
        let dim = self.rotary_dim as f64;
        // The pair that turns `turns` times within the original length.
        let pair = |turns: f64| dim * (original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln());
        let (mut low, mut high) = (pair(fast), pair(slow));
        if settings.flag("truncate")?.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let scale = |(b, w): (usize, f64)| {
            let stretch = ((b as f64 - low) / (high - low)).clamp(0.0, 1.0);
            w / factor * stretch + w * (1.0 - stretch)
        };
        let angles: Vec<f64> = angles.into_iter().enumerate().map(scale).collect();
        // A base of 1 leaves no pair to interpolate between; the bounds do not need the angles.
        Ok((attention_factor, angles.iter().all(|w| w.is_finite()).then_some(angles)))
    }

    fn longrope_factor(&self, settings: Keys<'_>, config: Keys<'_>) -> Result<f64> {
        for key in ["short_mscale", "long_mscale"] {
            if settings.get(key).is_some() {
                return Err(refuse(settings.file, format_args!("LongRoPE with `{key}` is not known")));
            }
        }
        if let Some(factor) = settings.positive("attention_factor")? {
            return Ok(factor);
        }
        let key = "original_max_position_embeddings";
        let original = match config.count(key, MAX_POSITIONS)? {
            Some(n) => Some(n),
            None => settings.count(key, MAX_POSITIONS)?,
        };
        let (factor, original) = match (original, self.max_positions) {
            (Some(original), Some(max)) => (max as f64 / original as f64, original),
            (None, Some(max)) => (required(settings, "factor")?, max),
            _ => return Err(Error::format(settings.file, "`max_position_embeddings` is missing beside LongRoPE")),
        };
        if factor <= 1.0 {
            return Ok(1.0);
        }
        if original < 2 {
            return Err(Error::format(settings.file, format_args!("`{key}` must be at least 2")));
        }
        Ok((1.0 + factor.ln() / (original as f64).ln()).sqrt())
    }
}

fn required(settings: Keys<'_>, key: &str) -> Result<f64> {
    settings
        .positive(key)?
        .ok_or_else(|| Error::format(settings.file, format_args!("`{key}` is missing from the rotation's settings")))
}

/// Refuses a config whose stored type is no floating type.
fn check_dtype(keys: Keys<'_>) -> Result<()> {
    for key in ["dtype", "torch_dtype"] {
        let Some(name) = keys.text(key)? else { continue };
        let name = name.strip_prefix("torch.").unwrap_or(name);
        if !["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "auto"].contains(&name) {
            return Err(refuse(keys.file, format_args!("`{key}` = `{}` is no floating type read here", shorten(name))));
        }
    }
    Ok(())
}

/// Refuses stored weights other than plain ones and scaled E4M3; gives the tile of the scales where it is stated.
fn quantization(keys: Keys<'_>) -> Result<Option<(usize, usize)>> {
    let Some(map) = keys.object("quantization_config")? else { return Ok(None) };
    let settings = Keys { map, file: keys.file };
    let method = settings.text("quant_method")?.unwrap_or("unnamed");
    let known = match method {
        "fp8" | "fbgemm_fp8" => true,
        "compressed-tensors" => settings.text("format")? == Some("float-quantized"),
        "modelopt" => settings.text("quant_algo")? == Some("FP8"),
        _ => false,
    };
    if !known {
        return Err(refuse(
            keys.file,
            format_args!("weights quantised by `{}` are refused: only scaled FP8 (E4M3) is read", shorten(method)),
        ));
    }
    let Some(block) = settings.array("weight_block_size")? else { return Ok(None) };
    let side = |v: &Value| v.as_u64().filter(|n| (1..=MAX_D_MODEL as u64).contains(n)).map(|n| n as usize);
    match block.iter().map(side).collect::<Option<Vec<_>>>().as_deref() {
        Some([rows, cols]) => Ok(Some((*rows, *cols))),
        _ => Err(Error::format(keys.file, "`weight_block_size` must be two whole numbers above zero")),
    }
}

/// A name for people from the path of a config.
fn name_of(file: &Path) -> String {
    if file.file_name().is_none_or(|name| name != "config.json") {
        return file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    }
    let folder = |path: &Path| path.parent()?.file_name().map(|name| name.to_string_lossy().into_owned());
    // A relative path such as `./config.json` does not hold the folder's name.
    folder(file).or_else(|| folder(&file.canonicalize().ok()?)).unwrap_or_else(|| "config".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RopeLayout;

    fn spec(json: &str) -> Result<AttentionSpec> {
        AttentionSpec::from_config_json(json.as_bytes(), Path::new("m/config.json"))
    }

    fn llama(extra: &str) -> Result<AttentionSpec> {
        spec(&format!(
            r#"{{"model_type":"llama","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":4,
               "max_position_embeddings":131072{extra}}}"#
        ))
    }

    #[test]
    fn both_generations_of_rope_keys_agree() {
        let old = llama(r#","rope_theta":500000.0,"torch_dtype":"bfloat16""#).unwrap();
        let new =
            llama(r#","rope_parameters":{"rope_theta":500000.0,"rope_type":"default"},"dtype":"bfloat16""#).unwrap();
        assert_eq!(old, new);
        let rope = old.rope[1].as_ref().unwrap();
        assert_eq!((rope.rotary_dim, rope.layout), (64, RopeLayout::HalfSplit));
        let angles = rope.inv_freq.as_ref().unwrap();
        assert!((angles[16] - 500_000f64.powf(-0.5)).abs() < 1e-15);
    }

    #[test]
    fn scaled_rotations() {
        let factor = |extra: &str| llama(extra).unwrap().rope[0].clone().unwrap();
        let yarn = factor(
            r#","rope_theta":1e4,"rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#,
        );
        assert!((yarn.attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
        // mscale equal to mscale_all_dim: no factor is left.
        let even = factor(
            r#","rope_theta":1e4,"rope_parameters":{"rope_type":"yarn","rope_theta":1e4,"factor":4.0,"mscale":1.0,"mscale_all_dim":1.0,"original_max_position_embeddings":32768}"#,
        );
        assert_eq!(even.attention_factor, 1.0);
        let linear = factor(r#","rope_theta":1e4,"rope_scaling":{"rope_type":"linear","factor":8.0}"#);
        assert_eq!(linear.inv_freq.unwrap()[0], 0.125);
        assert_eq!(factor(r#","rope_scaling":{"type":"dynamic","factor":2.0}"#).inv_freq, None);
        let llama3 = factor(
            r#","rope_theta":5e5,"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}"#,
        );
        let angles = llama3.inv_freq.unwrap();
        let plain = |b: i32| 5e5f64.powf(-2.0 * f64::from(b) / 64.0);
        assert_eq!(angles[0], 1.0);
        assert!((angles[31] - plain(31) / 8.0).abs() < 1e-18);
        assert!(llama(r#","rope_scaling":{"rope_type":"spiral"}"#).unwrap_err().is_unsupported());
    }

    #[test]
    fn longrope_factor_is_that_of_phi3() {
        let spec = spec(
            r#"{"model_type":"phi3","hidden_size":3072,"num_hidden_layers":1,"num_attention_heads":32,
                "max_position_embeddings":131072,"original_max_position_embeddings":4096,
                "rope_scaling":{"type":"su","short_factor":[1.0],"long_factor":[1.0]}}"#,
        )
        .unwrap();
        let factor = spec.rope[0].as_ref().unwrap().attention_factor;
        assert!((factor - (1.0 + 32f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-15);
    }

    #[test]
    fn gemma3_layers_alternate() {
        let old = spec(
            r#"{"model_type":"gemma3","text_config":{"hidden_size":2560,"num_hidden_layers":12,
                "rope_scaling":{"rope_type":"linear","factor":8.0}}}"#,
        )
        .unwrap();
        assert_eq!((old.n_q_heads, old.n_kv_heads, old.d_head, old.layers), (8, 4, 256, 12));
        let angle = |spec: &AttentionSpec, layer: usize, b: usize| {
            spec.rope[layer].as_ref().unwrap().inv_freq.as_ref().unwrap()[b]
        };
        assert_eq!((angle(&old, 0, 0), angle(&old, 5, 0)), (1.0, 0.125));
        assert!((angle(&old, 0, 64) - 0.01).abs() < 1e-15);
        assert!((angle(&old, 5, 64) - 1e-3 / 8.0).abs() < 1e-15);
        let new = spec(
            r#"{"model_type":"gemma3_text","hidden_size":2560,"num_hidden_layers":12,"rope_parameters":{
                "full_attention":{"rope_type":"linear","factor":8.0,"rope_theta":1000000.0},
                "sliding_attention":{"rope_type":"default","rope_theta":10000.0}}}"#,
        )
        .unwrap();
        assert_eq!(old.rope, new.rope);
    }

    #[test]
    fn layer_types_choose_among_nested_rotations() {
        // Nested sets without a base take it from the old keys.
        let mixed = spec(
            r#"{"model_type":"gemma3_text","hidden_size":640,"num_hidden_layers":2,"rope_theta":1000000,
                "rope_local_base_freq":10000,"layer_types":["full_attention","sliding_attention"],"rope_parameters":{
                "full_attention":{"factor":8.0,"rope_type":"linear"},"sliding_attention":{"rope_type":"default"}}}"#,
        )
        .unwrap();
        let angle = |spec: &AttentionSpec, layer: usize, b: usize| {
            spec.rope[layer].as_ref().unwrap().inv_freq.as_ref().unwrap()[b]
        };
        assert!((angle(&mixed, 0, 64) - 1e-3 / 8.0).abs() < 1e-15);
        assert!((angle(&mixed, 1, 64) - 0.01).abs() < 1e-15);
        // Scaling in the old keys is that of the full layers alone.
        let olmo3 = spec(
            r#"{"model_type":"olmo3","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":4,"rope_theta":500000,
                "max_position_embeddings":65536,"rope_scaling":{"rope_type":"yarn","factor":8.0,
                "original_max_position_embeddings":8192,"attention_factor":1.2079441541679836}}"#,
        )
        .unwrap();
        let factors: Vec<f64> = olmo3.rope.iter().map(|rope| rope.as_ref().unwrap().attention_factor).collect();
        assert_eq!(factors, [1.0, 1.0, 1.0, 1.2079441541679836]);
        assert_eq!(olmo3.norm.kind, crate::model::NormKind::None);
    }

    #[test]
    fn the_rotated_share_stands_in_either_place() {
        let dim = |extra: &str| {
            let json = format!(
                r#"{{"model_type":"gpt_neox","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4{extra}}}"#
            );
            spec(&json).unwrap().rope[0].as_ref().unwrap().rotary_dim
        };
        assert_eq!(dim(""), 16);
        assert_eq!(dim(r#","rotary_pct":1.0"#), 64);
        assert_eq!(
            dim(r#","rope_parameters":{"partial_rotary_factor":0.5,"rope_theta":1e4,"rope_type":"default"}"#),
            32
        );
    }

    #[test]
    fn softmax_scales() {
        let gpt2 = spec(r#"{"model_type":"gpt2","n_layer":3,"scale_attn_by_inverse_layer_idx":true}"#).unwrap();
        assert_eq!(gpt2.softmax_scale, [0.125, 0.0625, 0.125 / 3.0]);
        let plain = spec(r#"{"model_type":"gpt2","n_layer":1,"scale_attn_weights":false}"#).unwrap();
        assert_eq!(plain.softmax_scale, [1.0]);
        let gemma = spec(
            r#"{"model_type":"gemma2","hidden_size":4608,"num_hidden_layers":1,"num_attention_heads":32,
                "num_key_value_heads":16,"head_dim":128,"query_pre_attn_scalar":144}"#,
        )
        .unwrap();
        assert_eq!((gemma.softmax_scale[0], gemma.soft_cap), (1.0 / 12.0, Some(50.0)));
    }

    #[test]
    fn refusals_name_what_is_refused() {
        let says = |json: &str, part: &str| {
            let error = spec(json).unwrap_err();
            assert!(error.is_unsupported(), "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        says(r#"{"model_type":"deepseek_v3"}"#, "latent attention");
        says(r#"{"model_type":"deepseek_v2"}"#, "latent attention");
        says(r#"{"model_type":"mamba"}"#, "`mamba` is not known");
        says(
            r#"{"model_type":"falcon","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,"alibi":true}"#,
            "ALiBi",
        );
        says(
            r#"{"model_type":"bert","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
               "position_embedding_type":"relative_key"}"#,
            "relative position",
        );
        says(
            r#"{"model_type":"llama","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
               "quantization_config":{"quant_method":"gptq"}}"#,
            "gptq",
        );
        says(
            r#"{"model_type":"llama","hidden_size":48,"num_hidden_layers":1,"num_attention_heads":4}"#,
            "head dimension 12",
        );
    }
}
