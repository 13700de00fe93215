//! From `config.json` to an [`AttentionSpec`].
//!
//! Reads both generations of the keys (`rope_theta` with `rope_scaling`, or `rope_parameters`, also one set per layer
//! type; `torch_dtype` or `dtype`) and fills absent keys with the defaults of the reference implementation. What the
//! table in `families` does not know is refused by name: a model type, a rotation, a quantisation, a setting that
//! changes the logits. Sizes are capped before anything is allocated from them.

use super::families::{
    BIDIRECTIONAL, COMMON_REFUSALS, Count, Family, LayerHeads, NormTensor, REFUSED, ScaleRule, Support,
    TemperatureRule, WRAPPERS, family, known_families,
};
use super::hybrid::OTHER_KINDS;
use super::keys::{Keys, MAX_D_MODEL, MAX_POSITIONS, nearest, plain, read_capped, refuse, shorten, too_large};
use super::quantization::Stored;
use super::spec::{AttentionSpec, GainForm, InputNorm, LayerSpec, NormKind, QkvBias, Rope, Temperature};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::Path;

/// Longest config that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Most residual streams of a config.
const MAX_STREAMS: usize = 1 << 10;

/// Smallest epsilon of a norm: far above the squares that underflow in f32, far below any in use.
const LEAST_EPSILON: f64 = 1e-30;

impl AttentionSpec {
    /// Reads a Hugging Face `config.json` held in memory. `file` names it in messages and gives the spec its name: that
    /// of its folder for a `config.json`, else its own without the extension.
    ///
    /// ```
    /// use sigmascale::model::AttentionSpec;
    /// let config = br#"{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
    ///     "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0}"#;
    /// let spec = AttentionSpec::from_config_json(config, "tiny/config.json".as_ref())?;
    /// let layer = spec.layer(1)?;
    /// assert_eq!((spec.name.as_str(), layer.d_head, layer.group()), ("tiny", 64, 2));
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

/// The bytes of a config's file.
///
/// # Errors
/// As [`read_capped`].
pub fn read_config(path: &Path) -> Result<Vec<u8>> {
    read_capped(path, MAX_CONFIG_BYTES, "a config")
}

/// A config as the checkpoint reader needs it.
#[derive(Clone)]
pub(crate) struct Config {
    pub spec: AttentionSpec,
    /// Layers of the model, also those without attention.
    pub layers: usize,
    pub family: &'static Family,
    /// What may stand in front of every tensor name; the first that fits is used.
    pub prefixes: Vec<&'static str>,
    /// Name of the layer's own input norm, where the family has more than one.
    pub own_norm: Option<&'static str>,
    /// Whether the config runs the model in F16.
    pub in_f16: bool,
    /// How weights are stored, as far as the config tells.
    pub stored: Stored,
    /// Numbers of the layers whose values are made of their keys' projection.
    pub keys_as_values: Vec<usize>,
    /// The text model's own keys.
    pub settings: Map<String, Value>,
}

/// `NaN` and `Infinity`, which Python writes bare and JSON does not know, as texts with `mark` in front: a key that is used is
/// then refused by name.
pub(crate) fn quoted_non_finite<'j>(json: &'j [u8], mark: &str) -> Cow<'j, [u8]> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut out = Vec::new();
    let (mut at, mut kept, mut text) = (0, 0, false);
    while at < json.len() {
        let word = WORDS.iter().find(|word| !text && json[at..].starts_with(word));
        match (json[at], word) {
            (_, Some(word)) => {
                out.extend_from_slice(&json[kept..at]);
                out.push(b'"');
                out.extend_from_slice(mark.as_bytes());
                out.extend_from_slice(word);
                out.push(b'"');
                at += word.len();
                kept = at;
                continue;
            }
            (b'\\', _) if text => at += 1,
            (b'"', _) => text = !text,
            _ => {}
        }
        at += 1;
    }
    if kept == 0 {
        return Cow::Borrowed(json);
    }
    out.extend_from_slice(&json[kept..]);
    Cow::Owned(out)
}

impl Config {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = read_config(path)?;
        Self::parse(&bytes, path)
    }

    /// Refuses weights that have no bound, whatever their types.
    pub(crate) fn check_stored(&self, path: &Path) -> Result<()> {
        match &self.stored.refused {
            Some(why) => Err(refuse(path, format_args!("its weights have no bound: {why}"))),
            None => Ok(()),
        }
    }

    pub(crate) fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            return Err(too_large(file, bytes.len() as u64, MAX_CONFIG_BYTES, "a config"));
        }
        let value: Value = serde_json::from_slice(&quoted_non_finite(bytes, ""))
            .map_err(|e| Error::format(file, format_args!("invalid JSON: {e}")))?;
        let Value::Object(map) = value else {
            return Err(Error::format(file, "expected a JSON object"));
        };
        let top = Keys { map: &map, file };
        let model_type = top.text("model_type")?.ok_or_else(|| Error::format(file, "`model_type` is missing"))?;
        let wrapper = WRAPPERS.iter().find(|wrapper| wrapper.model_type == model_type);
        let (text, model_type) = match wrapper {
            Some(wrapper) => match top.object("text_config")? {
                Some(inner) => {
                    let inner = Keys { map: inner, file };
                    (inner, inner.text("model_type")?.unwrap_or(wrapper.text))
                }
                None if wrapper.flat && top.get("hidden_size").is_some() => (top, wrapper.text),
                None => {
                    let rule = format_args!("`text_config` is missing from this `{model_type}` config");
                    return Err(Error::format(file, rule));
                }
            },
            None => (top, model_type),
        };
        if let Some((_, why)) = REFUSED.iter().find(|(name, _)| *name == model_type) {
            return Err(refuse(file, format_args!("model type `{model_type}` is refused: {why}")));
        }
        let Some(family) = family(model_type) else {
            return Err(unknown_family(file, model_type));
        };
        let wrapped = wrapper.into_iter().flat_map(|wrapper| wrapper.prefixes);
        let prefixes = wrapped.chain(family.prefixes).copied().collect();
        let mut in_f16 = false;
        for keys in [top, text] {
            in_f16 |= check_dtype(keys)?;
        }
        let stored = Stored::of(&[top, text])?;
        let settings = text.with_kinds(family)?;
        let settings = Keys { map: &settings, file }.with_rope_default(family)?;
        let text = Keys { map: &settings, file };
        for refusal in COMMON_REFUSALS.iter().chain(family.refusals) {
            text.check(refusal)?;
        }
        text.check_epsilons()?;
        Ok(Config { in_f16, ..text.build(family, prefixes, stored)? })
    }
}

impl<'a> Keys<'a> {
    /// A norm divides by `sqrt(mean square + epsilon)`, and every bound rests on its output being no longer than `sqrt(d)`. Below
    /// zero it can be longer, and so it can where the squares of a small token underflow in f32 beside an epsilon of their
    /// size.
    fn check_epsilons(&self) -> Result<()> {
        for key in ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"] {
            match self.number(key)? {
                Some(epsilon) if epsilon < LEAST_EPSILON => {
                    let rule = format_args!(
                        "`{key}` = {epsilon:e} is refused: below {LEAST_EPSILON:e} the norm's output has no bound for tokens \
                         whose squares underflow"
                    );
                    return Err(refuse(self.file, rule));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The keys, with the family's own rotation where they have no settings of it.
    fn with_rope_default(&self, family: &Family) -> Result<Map<String, Value>> {
        let mut map = self.map.clone();
        let Some(default) = family.rope_default else { return Ok(map) };
        for key in ["rope_parameters", "rope_scaling"] {
            if self.object(key)?.is_some_and(|settings| !settings.is_empty()) {
                return Ok(map);
            }
        }
        let default = serde_json::from_str(default).map_err(|e| Error::format(self.file, e))?;
        map.remove("rope_scaling");
        map.insert("rope_parameters".to_owned(), default);
        Ok(map)
    }

    fn build(self, family: &'static Family, prefixes: Vec<&'static str>, stored: Stored) -> Result<Config> {
        let file = self.file;
        // LongCat counts pairs of attentions as layers.
        let layers = self.layer_count(&family.sizes)? * family.mla.as_ref().map_or(1, |rule| rule.per_layer);
        let d_model = self.size(&family.sizes.d_model, MAX_D_MODEL)?;
        let heads = self.heads(&family.sizes, layers)?;
        let Some(most) = heads.iter().flatten().map(|(n_q, _)| *n_q).max() else {
            return Err(refuse(file, "no layer has attention"));
        };
        let mla = family.mla.as_ref().map(|rule| self.mla(rule, d_model, most)).transpose()?;
        let d_head = match mla {
            Some(mla) => mla.d_nope + mla.d_rope,
            None => self.d_head(&family.sizes.d_head, d_model, most)?,
        };
        let global = self.global_heads(family, layers, d_head)?;
        let most_channels = if family.global_heads { 512 } else { 256 };
        // Latent attention has sizes of its own, which `Mla::check` has seen.
        for d_head in [d_head, global.d_head].into_iter().filter(|_| mla.is_none()) {
            if d_head % 8 != 0 || !(16..=most_channels).contains(&d_head) {
                return Err(refuse(
                    file,
                    format_args!(
                        "head dimension {d_head} (`head_dim`, or model dimension / heads) is refused: it must be a multiple of \
                         8 from 16 to {most_channels}"
                    ),
                ));
            }
        }
        if !matches!(family.sizes.layer_heads, LayerHeads::Hybrid { .. }) {
            self.layer_types(layers)?;
            let other = |kind: &&Value| kind.as_str().is_some_and(|name| OTHER_KINDS.contains(&name));
            if let Some(kind) = self.array("layer_types")?.and_then(|list| list.iter().find(other)) {
                return Err(unknown_kind(file, kind));
            }
        }
        let qk_norm = match &family.qk_norm {
            Some(rule) if self.set(&rule.when)? => Some(rule.norm),
            Some(_) => None,
            None => {
                for key in ["qk_norm", "use_qk_norm", "qk_layernorm"] {
                    if self.get(key).is_some_and(|v| v.as_bool() != Some(false)) {
                        return Err(refuse(
                            file,
                            format_args!(
                                "`{key}` is set, but no norm of q and k is known for family `{}`",
                                family.name
                            ),
                        ));
                    }
                }
                None
            }
        };
        let bias = self.set(&family.bias)?;
        let max_positions = self.first_count(
            &Count {
                keys: &["max_position_embeddings", "n_positions", "max_context_length", "model_max_length"],
                default: None,
            },
            MAX_POSITIONS,
        )?;
        let both_ways =
            BIDIRECTIONAL.contains(&family.name) && !self.flag("is_decoder")?.unwrap_or(false) || self.both_ways()?;
        let width = mla.map_or(d_head, |mla| mla.d_rope);
        let widths = if family.global_heads { (width, global.d_head) } else { (width, width) };
        let mut rope = self.rope(family, layers, widths, max_positions)?;
        if let Some(rule) = &family.mla {
            for rope in rope.iter_mut().flatten() {
                rope.layout = self.mla_layout(rule, rope.layout)?;
            }
        }
        let scales = self.softmax_scale(&family.scale, layers, d_head)?;
        let temperature = self.temperature(family.temperature, max_positions)?;
        let tempered = |rope: &Option<Rope>| {
            temperature.filter(|_| rope.is_none() || family.temperature != TemperatureRule::Llama4)
        };
        let rotated: Vec<bool> = rope.iter().map(Option::is_some).collect();
        let windows = self.windows(family.window.as_ref(), layers, &rotated)?;
        let sinks = family.sinks.is_some();
        let full = self.full_layers_of(family, layers)?;
        let sources = self.kv_sources(family, &full)?;
        let is_global = |number: usize| family.global_heads && full[number];
        let parts = rope.into_iter().zip(scales).zip(windows).enumerate();
        let own = heads.into_iter().zip(parts).filter_map(|(heads, (number, ((rope, softmax_scale), window)))| {
            let ((n_q_heads, n_kv_heads), temperature) = (heads?, tempered(&rope));
            let (d_head, n_kv_heads) = if is_global(number) {
                (global.d_head, global.n_kv_heads.unwrap_or(n_kv_heads))
            } else {
                (d_head, n_kv_heads)
            };
            let kv_source = sources[number];
            Some(LayerSpec {
                number,
                n_q_heads,
                n_kv_heads,
                d_head,
                rope,
                softmax_scale,
                temperature,
                window,
                sinks,
                kv_source,
                mla,
            })
        });
        let streams = match family.streams {
            Some((key, default)) => Some(self.count(key, MAX_STREAMS)?.unwrap_or(default)),
            None => None,
        };
        let spec = AttentionSpec {
            name: name_of(file),
            family: family.name.to_owned(),
            prefix: prefixes.first().copied().unwrap_or_default().to_owned(),
            causal: !both_ways,
            layers: own.collect(),
            d_model,
            norm: InputNorm {
                kind: match family.rms_key {
                    Some(key) if self.get(key).is_some() => NormKind::RmsNorm,
                    _ => family.norm.kind,
                },
                // The gain of the mean is made of the stored ones.
                gain: if streams.is_some() { GainForm::Plain } else { family.norm.gain },
                ..family.norm
            },
            bias: QkvBias { q: bias, k: bias, v: bias },
            qk_norm,
            soft_cap: match family.soft_cap {
                // Present and null switches the cap off.
                Some((key, default)) if !self.map.contains_key(key) => default,
                Some((key, _)) => self.positive(key)?,
                None => None,
            },
            max_positions,
            v_norm: family.v_norm,
            streams,
            multipliers: self.multipliers(family)?,
            fp8_inputs: stored.fp8,
        };
        if let Some(layer) = spec.layers.iter().find(|layer| !layer.n_q_heads.is_multiple_of(layer.n_kv_heads)) {
            let (number, n_q, n_kv) = (layer.number, layer.n_q_heads, layer.n_kv_heads);
            let rule = format_args!("layer {number}: {n_q} query heads are not a multiple of {n_kv} KV heads");
            return Err(Error::format(file, rule));
        }
        let keys_as_values =
            if global.keys_as_values { (0..layers).filter(|n| is_global(*n)).collect() } else { vec![] };
        let own_norm = match family.norm_tensor {
            NormTensor::Own(name) => Some(name),
            NormTensor::Falcon { two, one } => {
                let new = self.flag("new_decoder_architecture")?.unwrap_or(false);
                let norms = self.count("num_ln_in_parallel_attn", 2)?.unwrap_or(if new { 2 } else { 1 });
                Some(if new && norms == 2 { two } else { one })
            }
            NormTensor::None | NormTensor::FirstApart { .. } => None,
        };
        let settings = self.map.clone();
        Ok(Config { spec, layers, family, prefixes, own_norm, in_f16: false, stored, keys_as_values, settings })
    }

    /// `layer_types`: whether each layer is a full one, or `None` when absent. Layers of a hybrid that have no attention
    /// are not.
    pub(super) fn layer_types(&self, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(list) = self.array("layer_types")? else { return Ok(None) };
        if list.len() != layers {
            return Err(Error::format(
                self.file,
                format_args!("`layer_types` has {} entries for {layers} layers", list.len()),
            ));
        }
        let full = |value: &Value| match value.as_str() {
            // A selection of keys is a mask too.
            Some("full_attention" | "indexed_attention" | "deepseek_sparse_attention" | "minimax_m3_sparse") => {
                Ok(true)
            }
            // Chunks, like windows, are a mask.
            Some("sliding_attention" | "chunked_attention") => Ok(false),
            Some(name) if OTHER_KINDS.contains(&name) => Ok(false),
            _ => Err(unknown_kind(self.file, value)),
        };
        list.iter().map(full).collect::<Result<Vec<bool>>>().map(Some)
    }

    fn temperature(&self, rule: TemperatureRule, positions: Option<usize>) -> Result<Option<Temperature>> {
        let missing = |key: &str| Error::format(self.file, format_args!("`{key}` is missing"));
        let positions = || positions.ok_or_else(|| missing("max_position_embeddings"));
        match rule {
            TemperatureRule::None => Ok(None),
            TemperatureRule::Llama4 => {
                // A boolean, or in older configs a number that is not 0.
                let off = |v: &Value| v.as_bool() == Some(false) || v.as_f64() == Some(0.0);
                if self.get("attn_temperature_tuning").is_some_and(off) {
                    return Ok(None);
                }
                let strength = self.not_negative("attn_scale")?.unwrap_or(0.1);
                let period = self.whole("floor_scale")?.unwrap_or(8192);
                Ok(Some(Temperature { strength, period, shift: 1, positions: positions()? }))
            }
            TemperatureRule::Ministral3 => {
                let key = "original_max_position_embeddings";
                let said = |map| -> Result<Option<Temperature>> {
                    let settings = Keys { map, file: self.file };
                    let Some(strength) = settings.not_negative("llama_4_scaling_beta")? else { return Ok(None) };
                    // Releases differ on which of the two counts: the shorter period covers both.
                    let periods = [settings.count(key, MAX_POSITIONS)?, self.count(key, MAX_POSITIONS)?];
                    let period = periods.into_iter().flatten().min().ok_or_else(|| missing(key))?;
                    Ok(Some(Temperature { strength, period, shift: 0, positions: positions()? }))
                };
                match [self.object("rope_parameters")?, self.object("rope_scaling")?] {
                    [Some(a), Some(b)] => match [said(a)?, said(b)?] {
                        [a, b] if a == b => Ok(a),
                        _ => {
                            let rule = "`rope_parameters` and `rope_scaling` disagree on the factor by which queries \
                                        grow with the position";
                            Err(Error::format(self.file, rule))
                        }
                    },
                    [Some(map), None] | [None, Some(map)] => said(map),
                    [None, None] => Err(missing("rope_parameters")),
                }
            }
        }
    }

    fn not_negative(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(x) if x < 0.0 => {
                Err(Error::format(self.file, format_args!("`{key}` must not be negative, got {}", plain(x))))
            }
            other => Ok(other),
        }
    }

    /// A count that may be written as `8192.0`.
    fn whole(&self, key: &str) -> Result<Option<usize>> {
        match self.positive(key)? {
            Some(x) if x.fract() == 0.0 && x <= MAX_POSITIONS as f64 => Ok(Some(x as usize)),
            Some(x) => Err(Error::format(self.file, format_args!("`{key}`: expected an integer, got {}", plain(x)))),
            None => Ok(None),
        }
    }

    fn softmax_scale(&self, rule: &ScaleRule, layers: usize, d_head: usize) -> Result<Vec<f64>> {
        let usual = (d_head as f64).sqrt().recip();
        let same = match rule {
            ScaleRule::One => 1.0,
            ScaleRule::InverseSqrtHead => usual,
            ScaleRule::YarnSquared => usual * self.yarn_scale()?,
            ScaleRule::QueryPreAttnScalar(default) => {
                self.positive("query_pre_attn_scalar")?.unwrap_or(*default).sqrt().recip()
            }
            ScaleRule::Multiplier(key, default) => self.positive(key)?.or(*default).unwrap_or(usual),
            ScaleRule::Gpt | ScaleRule::GptByLayer => {
                let base = if self.flag("scale_attn_weights")?.unwrap_or(true) { usual } else { 1.0 };
                let by_layer = matches!(rule, ScaleRule::GptByLayer);
                if by_layer && self.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false) {
                    return Ok((0..layers).map(|layer| base / (layer + 1) as f64).collect());
                }
                base
            }
        };
        Ok(vec![same; layers])
    }
}

fn unknown_family(file: &Path, model_type: &str) -> Error {
    let read = known_families().into_iter().filter(|known| matches!(known.support, Support::Family(_)));
    let near = nearest(model_type, read.map(|known| known.model_type));
    let near = if near.is_empty() { String::new() } else { format!("; nearest: {}", near.join(", ")) };
    let model_type = shorten(model_type);
    refuse(
        file,
        format_args!(
            "unknown model type `{model_type}`, so it cannot be bounded{near}; `sigmascale families` lists the \
             supported types"
        ),
    )
}

/// Whether a config runs in F16; refuses one whose stored type is no floating type.
fn check_dtype(keys: Keys<'_>) -> Result<bool> {
    let mut in_f16 = false;
    for key in ["dtype", "torch_dtype"] {
        let Some(name) = keys.text(key)? else { continue };
        let name = name.strip_prefix("torch.").unwrap_or(name);
        if !["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "auto"].contains(&name) {
            return Err(refuse(
                keys.file,
                format_args!(
                    "`{key}` = `{}`: expected float64, float32, float16, bfloat16, float8_e4m3fn or auto",
                    shorten(name)
                ),
            ));
        }
        in_f16 |= name == "float16";
    }
    Ok(in_f16)
}

fn unknown_kind(file: &Path, kind: &Value) -> Error {
    refuse(file, format_args!("unknown layer type {}: it may not be softmax attention", shorten(&kind.to_string())))
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
mod tests;
