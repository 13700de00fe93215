//! From `config.json` to an [`AttentionSpec`].
//!
//! Reads both generations of the keys (`rope_theta` with `rope_scaling`, or `rope_parameters`, also one set a layer
//! type; `torch_dtype` or `dtype`) and fills absent keys with the defaults of the reference implementation. What the
//! table in `families` does not know is refused by name: a model type, a rotation, a quantisation, a setting that
//! changes the logits. Sizes are capped before anything is allocated from them.

use super::families::{
    BIDIRECTIONAL, BLOCK_REFUSALS, COMMON_REFUSALS, Count, Family, HeadDim, KvHeads, LayerHeads, NormTensor, REFUSED,
    ScaleRule, Sizes, WRAPPERS, family,
};
use super::keys::{Keys, MAX_D_MODEL, MAX_HEADS, MAX_POSITIONS, read_capped, refuse, shorten, too_large};
use super::spec::{AttentionSpec, LayerSpec, QkvBias};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// Longest config that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

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

/// A config as the checkpoint reader needs it.
#[derive(Clone)]
pub(crate) struct Config {
    pub spec: AttentionSpec,
    /// Layers of the model, also those without attention.
    pub layers: usize,
    pub family: &'static Family,
    /// Name of the layer's own input norm, where the family has more than one.
    pub own_norm: Option<&'static str>,
    /// Rows and columns of one tile of the FP8 scales, where the config says so.
    pub fp8_block: Option<(usize, usize)>,
    /// The text model's own keys.
    pub settings: Map<String, Value>,
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
        let (text, model_type) = match WRAPPERS.iter().find(|wrapper| wrapper.model_type == model_type) {
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
            return Err(refuse(file, format_args!("model type `{}` is not known", shorten(model_type))));
        };
        check_dtype(top)?;
        let fp8_block = quantization(if top.get("quantization_config").is_some() { top } else { text })?;
        for refusal in COMMON_REFUSALS.iter().chain(family.refusals) {
            text.check(refusal)?;
        }
        text.check_epsilons()?;
        text.build(family, fp8_block)
    }
}

impl<'a> Keys<'a> {
    /// A norm divides by `sqrt(mean square + epsilon)`: below zero, its output could be longer than `sqrt(d)`, which every
    /// bound rests on.
    fn check_epsilons(&self) -> Result<()> {
        for key in ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"] {
            match self.number(key)? {
                Some(epsilon) if epsilon < 0.0 => {
                    let rule = format_args!("`{key}` must not be negative, and is {epsilon}");
                    return Err(Error::format(self.file, rule));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn build(self, family: &'static Family, fp8_block: Option<(usize, usize)>) -> Result<Config> {
        let file = self.file;
        let layers = self.layer_count(&family.sizes)?;
        let d_model = self.size(&family.sizes.d_model, MAX_D_MODEL)?;
        let heads = self.heads(&family.sizes, layers)?;
        let Some(most) = heads.iter().flatten().map(|(n_q, _)| *n_q).max() else {
            return Err(refuse(file, "no layer has attention"));
        };
        let d_head = self.d_head(&family.sizes.d_head, d_model, most)?;
        if d_head % 8 != 0 || !(16..=256).contains(&d_head) {
            return Err(refuse(
                file,
                format_args!("head dimension {d_head} is refused: it must be a multiple of 8 from 16 to 256"),
            ));
        }
        if !matches!(family.sizes.layer_heads, LayerHeads::Hybrid { .. }) {
            self.layer_types(layers)?;
        }
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
        let max_positions = self.first_count(
            &Count { keys: &["max_position_embeddings", "n_positions", "max_context_length"], default: None },
            MAX_POSITIONS,
        )?;
        let both_ways = BIDIRECTIONAL.contains(&family.name) && !self.flag("is_decoder")?.unwrap_or(false)
            || self.flag("use_bidirectional_attention")?.unwrap_or(false);
        let rope = self.rope(family, layers, d_head, max_positions)?;
        let scales = self.softmax_scale(&family.scale, layers, d_head)?;
        let own = |(number, ((heads, rope), softmax_scale)): (usize, ((Option<(usize, usize)>, _), f64))| {
            let (n_q_heads, n_kv_heads) = heads?;
            Some(LayerSpec { number, n_q_heads, n_kv_heads, d_head, rope, softmax_scale })
        };
        let spec = AttentionSpec {
            name: name_of(file),
            family: family.name.to_owned(),
            causal: !both_ways,
            layers: heads.into_iter().zip(rope).zip(scales).enumerate().filter_map(own).collect(),
            d_model,
            norm: family.norm,
            bias: QkvBias { q: bias, k: bias, v: bias },
            qk_norm,
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
        Ok(Config { spec, layers, family, own_norm, fp8_block, settings: self.map.clone() })
    }

    /// Query and KV heads of each layer; `None` where it has no attention.
    fn heads(&self, sizes: &Sizes, layers: usize) -> Result<Vec<Option<(usize, usize)>>> {
        let heads: Vec<Option<(usize, usize)>> = match &sizes.layer_heads {
            LayerHeads::Alike => {
                let n_q = self.size(&sizes.q_heads, MAX_HEADS)?;
                vec![Some((n_q, self.kv_heads(&sizes.kv_heads, n_q)?)); layers]
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
            let rule = format_args!("layer {number}: {n_q} query heads do not divide by {n_kv} key/value heads");
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
            let missing = || Error::format(self.file, format_args!("neither `block_configs` nor `{key}` is there"));
            return Ok(counts.ok_or_else(missing)?.into_iter().map(Some).collect());
        };
        if blocks.len() != layers {
            let rule = format_args!("`block_configs` has {} entries for {layers} layers", blocks.len());
            return Err(Error::format(self.file, rule));
        }
        let kv_heads = |(number, block): (usize, &Value)| {
            let at = |e: Error| e.within(format_args!("block {number}"));
            let Some(Value::Object(map)) = block.get("attention") else {
                return Err(Error::format(self.file, format_args!("block {number}: `attention` must be an object")));
            };
            let attention = Keys { map, file: self.file };
            // A linear layer in attention's place has no logits.
            for absent in ["no_op", "replace_with_linear"] {
                if attention.flag(absent).map_err(at)?.unwrap_or(false) {
                    return Ok(None);
                }
            }
            for refusal in BLOCK_REFUSALS {
                attention.check(refusal).map_err(at)?;
            }
            match attention.count("n_heads_in_group", MAX_HEADS).map_err(at)? {
                Some(group) if n_q % group == 0 => Ok(Some(n_q / group)),
                Some(group) => {
                    let rule = format_args!("block {number}: {n_q} query heads do not divide into groups of {group}");
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
    pub(super) fn layer_types(&self, layers: usize) -> Result<Option<Vec<bool>>> {
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
            ScaleRule::Multiplier(key, default) => self.positive(key)?.or(*default).unwrap_or(usual),
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
        // `mxfp4` is for the experts alone; a projection stored so would have a type that is not read.
        "fp8" | "fbgemm_fp8" | "mxfp4" => true,
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
        let rope = old.layers[1].rope.as_ref().unwrap();
        assert_eq!((rope.rotary_dim, rope.layout), (64, RopeLayout::HalfSplit));
        let angles = rope.inv_freq.as_ref().unwrap();
        assert!((angles[16] - 500_000f64.powf(-0.5)).abs() < 1e-15);
    }

    #[test]
    fn scaled_rotations() {
        let factor = |extra: &str| llama(extra).unwrap().layers[0].rope.clone().unwrap();
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
        let factor = spec.layers[0].rope.as_ref().unwrap().attention_factor;
        assert!((factor - (1.0 + 32f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-15);
    }

    #[test]
    fn where_engines_differ_on_a_factor_the_largest_counts() {
        let factor = |extra: &str| llama(extra).unwrap().layers[0].rope.as_ref().unwrap().attention_factor;
        let long = |original: usize, extra: &str| {
            factor(&format!(
                r#","rope_scaling":{{"type":"longrope","original_max_position_embeddings":{original},
                    "short_factor":[1.0],"long_factor":[1.0]{extra}}}"#
            ))
        };
        let root = |factor: f64, original: f64| (1.0 + factor.ln() / original.ln()).sqrt();
        // A stated factor, or the ratio of the lengths.
        assert!((long(131_072, r#","factor":32.0"#) - root(32.0, 131_072.0)).abs() < 1e-15);
        assert!((long(4096, r#","factor":2.0"#) - root(32.0, 4096.0)).abs() < 1e-15);
        // Scales of cosines and sines, which not all engines read.
        assert!((long(4096, r#","short_mscale":1.0,"long_mscale":1.0"#) - root(32.0, 4096.0)).abs() < 1e-15);
        assert_eq!(long(4096, r#","short_mscale":3.0,"long_mscale":2.0"#), 3.0);
        let scales = r#","short_mscale":2.0,"long_mscale":3.0"#;
        assert_eq!(factor(&format!(r#","rope_scaling":{{"type":"linear","factor":2.0{scales}}}"#)), 3.0);
        assert_eq!(factor(&format!(r#","rope_scaling":{{"type":"default"{scales}}}"#)), 1.0);
        // Two generations of keys side by side.
        let yarn = r#""rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#;
        let both = format!(r#","rope_parameters":{{"rope_type":"default","rope_theta":10000.0}},{yarn}"#);
        assert!((factor(&both) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
        assert_eq!(llama(&both).unwrap().layers[0].rope.as_ref().unwrap().inv_freq, None);
    }

    #[test]
    fn gemma3_layers_alternate() {
        let old = spec(
            r#"{"model_type":"gemma3","text_config":{"hidden_size":2560,"num_hidden_layers":12,
                "rope_scaling":{"rope_type":"linear","factor":8.0}}}"#,
        )
        .unwrap();
        let first = &old.layers[0];
        assert_eq!((first.n_q_heads, first.n_kv_heads, first.d_head, old.layers.len()), (8, 4, 256, 12));
        let angle = |spec: &AttentionSpec, layer: usize, b: usize| {
            spec.layers[layer].rope.as_ref().unwrap().inv_freq.as_ref().unwrap()[b]
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
        assert_eq!(old.layers, new.layers);
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
            spec.layers[layer].rope.as_ref().unwrap().inv_freq.as_ref().unwrap()[b]
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
        let factors: Vec<f64> =
            olmo3.layers.iter().map(|layer| layer.rope.as_ref().unwrap().attention_factor).collect();
        assert_eq!(factors, [1.0, 1.0, 1.0, 1.2079441541679836]);
        assert_eq!(olmo3.norm.kind, crate::model::NormKind::None);
    }

    #[test]
    fn the_rotated_share_stands_in_either_place() {
        let dim = |extra: &str| {
            let json = format!(
                r#"{{"model_type":"gpt_neox","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4{extra}}}"#
            );
            spec(&json).unwrap().layers[0].rope.as_ref().unwrap().rotary_dim
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
        let scales = |spec: &AttentionSpec| spec.layers.iter().map(|layer| layer.softmax_scale).collect::<Vec<_>>();
        let gpt2 = spec(r#"{"model_type":"gpt2","n_layer":3,"scale_attn_by_inverse_layer_idx":true}"#).unwrap();
        assert_eq!(scales(&gpt2), [0.125, 0.0625, 0.125 / 3.0]);
        let plain = spec(r#"{"model_type":"gpt2","n_layer":1,"scale_attn_weights":false}"#).unwrap();
        assert_eq!(scales(&plain), [1.0]);
        let gemma = spec(
            r#"{"model_type":"gemma2","hidden_size":4608,"num_hidden_layers":1,"num_attention_heads":32,
                "num_key_value_heads":16,"head_dim":128,"query_pre_attn_scalar":144}"#,
        )
        .unwrap();
        assert_eq!((scales(&gemma)[0], gemma.soft_cap), (1.0 / 12.0, Some(50.0)));
    }

    #[test]
    fn rotation_by_several_axes_has_no_one_set_of_angles() {
        let vision = |rope: &str| {
            spec(&format!(
                r#"{{"model_type":"qwen2_5_vl","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
                    "num_key_value_heads":2{rope}}}"#
            ))
        };
        for kind in ["mrope", "default"] {
            let several = format!(r#","rope_scaling":{{"type":"{kind}","mrope_section":[16,8,8]}}"#);
            let rope = vision(&several).unwrap().layers[0].rope.clone().unwrap();
            assert_eq!((rope.rotary_dim, rope.attention_factor, rope.inv_freq), (64, 1.0, None));
        }
        assert!(vision("").unwrap().layers[0].rope.clone().unwrap().inv_freq.is_some());
        let stretched = r#","rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768,"mrope_section":[16,8,8]}"#;
        let rope = vision(stretched).unwrap().layers[0].rope.clone().unwrap();
        assert!(rope.attention_factor > 1.1 && rope.inv_freq.is_none());
        assert!(vision(r#","rope_scaling":{"type":"mrope"}"#).unwrap_err().is_unsupported());
        let missing = spec(r#"{"model_type":"qwen2_5_vl"}"#).unwrap_err().to_string();
        assert!(missing.contains("`text_config` is missing"), "{missing}");
    }

    #[test]
    fn where_only_sliding_layers_rotate() {
        let rotated = |family: &str, extra: &str| -> Vec<bool> {
            let json = format!(
                r#"{{"model_type":"{family}","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":4,
                    "num_key_value_heads":4{extra}}}"#
            );
            spec(&json).unwrap().layers.iter().map(|layer| layer.rope.is_some()).collect()
        };
        assert_eq!(rotated("cohere2", ""), [true, true, true, false]);
        assert_eq!(rotated("cohere2", r#","sliding_window_pattern":2"#), [true, false, true, false]);
        let full = r#","layer_types":["full_attention","full_attention","full_attention","full_attention"]"#;
        assert_eq!(rotated("exaone4", full), [false; 4]);
        assert_eq!(rotated("exaone4", &format!(r#"{full},"sliding_window":null"#)), [true; 4]);
    }

    #[test]
    fn a_layer_can_have_a_base_of_its_own() {
        let granite = |extra: &str| {
            spec(&format!(
                r#"{{"model_type":"granite_swa","hidden_size":256,"num_hidden_layers":3,"num_attention_heads":4,
                    "rope_parameters":{{"rope_type":"default","rope_theta":500.0}}{extra}}}"#
            ))
        };
        let bases = |spec: AttentionSpec| -> Vec<Option<f64>> {
            // angle b = base^(-2 b / 64), so the base is angle 16 to the power -2.
            let base = |rope: &Option<crate::model::Rope>| Some(rope.as_ref()?.inv_freq.as_ref()?[16].powi(-2).round());
            spec.layers.iter().map(|layer| base(&layer.rope)).collect()
        };
        assert_eq!(bases(granite("").unwrap()), [Some(500.0); 3]);
        let own = granite(r#","layer_rope_theta":[10000.0,0,500000]"#).unwrap();
        assert_eq!(bases(own), [Some(10_000.0), None, Some(500_000.0)]);
        let refused = |extra: &str| granite(extra).unwrap_err().to_string();
        assert!(refused(r#","layer_rope_theta":[1.0,2.0]"#).contains("2 entries for 3 layers"));
        assert!(refused(r#","layer_rope_theta":[1.0,2.0,-1.0]"#).contains("from 0 on"));
    }

    #[test]
    fn a_scale_that_is_not_stated_is_the_usual_one() {
        let scale = |extra: &str| {
            let json = format!(
                r#"{{"model_type":"hyperclovax","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4{extra}}}"#
            );
            spec(&json).unwrap().layers[0].softmax_scale
        };
        assert_eq!((scale(""), scale(r#","attention_multiplier":null"#)), (0.125, 0.125));
        assert_eq!(scale(r#","attention_multiplier":0.5"#), 0.5);
    }

    #[test]
    fn rotated_channels_can_be_counted() {
        let dim = |extra: &str| {
            let json = format!(r#"{{"model_type":"gptj","n_embd":1024,"n_layer":1,"n_head":4{extra}}}"#);
            spec(&json).map(|spec| spec.layers[0].rope.clone().unwrap().rotary_dim)
        };
        assert_eq!(dim("").unwrap(), 64);
        assert_eq!(dim(r#","rotary_dim":128"#).unwrap(), 128);
        assert_eq!(dim(r#","rotary_dim":null"#).unwrap(), 256);
        assert!(dim(r#","rotary_dim":300"#).is_err() && dim(r#","rotary_dim":33"#).is_err());
    }

    #[test]
    fn a_norm_that_could_lengthen_its_input_is_refused() {
        let with = |epsilon: &str| {
            spec(&format!(
                r#"{{"model_type":"llama","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
                    "rms_norm_eps":{epsilon}}}"#
            ))
        };
        let error = with("-1e-6").unwrap_err();
        assert!(error.to_string().contains("`rms_norm_eps` must not be negative"), "{error}");
        assert!(with("0").is_ok() && with("1e-6").is_ok());
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
            r#"{"model_type":"olmo","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,"clip_qkv":8.0}"#,
            "clipping can raise a logit",
        );
        says(
            r#"{"model_type":"opt","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
               "do_layer_norm_before":false}"#,
            "behind attention",
        );
        says(r#"{"model_type":"gpt_bigcode","n_embd":256,"n_layer":1,"n_head":4,"multi_query":false}"#, "multi-query");
        says(
            r#"{"model_type":"llama","hidden_size":48,"num_hidden_layers":1,"num_attention_heads":4}"#,
            "head dimension 12",
        );
    }
}
