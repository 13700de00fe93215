//! `config.json`, `hf_quant_config.json` and the index: read as they are, merged, written back.

use super::engine::Engine;
use crate::error::{Error, Result};
use crate::model::{quoted_non_finite, read_capped};
use serde_json::{Map, Value, json};
use std::path::Path;

/// In front of what Python writes bare and JSON does not know, while it is a text.
const MARK: &str = "sigmascale: bare ";
/// Longest file of settings, in bytes.
const LONGEST: u64 = 64 << 20;
/// The key that says how weights are stored, and its name in older releases of compressed-tensors.
const QUANTIZATION: &str = "quantization_config";
const COMPRESSION: &str = "compression_config";
/// ModelOpt's own config.
pub(super) const HF_QUANT: &str = "hf_quant_config.json";

/// How the weights of a checkpoint are stored, as far as attention scales depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Method {
    /// `quant_method`; empty without a `quantization_config`.
    pub name: String,
    /// ModelOpt's `quant_algo`.
    pub algorithm: Option<String>,
    /// Whether ModelOpt's settings are those of `hf_quant_config.json`.
    pub nested: bool,
}

impl Method {
    /// The word of the engines' tables: `fp8`, `modelopt:NVFP4`, or empty.
    pub fn key(&self) -> String {
        match &self.algorithm {
            Some(algorithm) => format!("{}:{algorithm}", self.name),
            None => self.name.clone(),
        }
    }

    /// The method of such a word.
    #[cfg(test)]
    pub fn named(key: &str) -> Self {
        let (name, algorithm) = key.split_once(':').map_or((key, None), |(name, algorithm)| (name, Some(algorithm)));
        Self { name: name.to_owned(), algorithm: algorithm.map(str::to_owned), nested: false }
    }

    /// Whether there is no `quantization_config`.
    pub fn is_plain(&self) -> bool {
        self.name.is_empty()
    }

    /// Whether it is compressed-tensors.
    pub fn is_compressed_tensors(&self) -> bool {
        self.name == "compressed-tensors"
    }

    /// Whether vLLM loads its scales by the class that rounds them to the model's type, and takes k's for a v that is missing.
    pub fn is_base(&self) -> bool {
        !self.is_plain() && !self.is_compressed_tensors()
    }
}

/// A file of settings.
pub(super) struct Settings {
    pub value: Map<String, Value>,
}

impl Settings {
    pub fn read(file: &Path) -> Result<Self> {
        let bytes = read_capped(file, LONGEST, "a file of settings")?;
        match serde_json::from_slice(&quoted_non_finite(&bytes, MARK)) {
            Ok(Value::Object(value)) => Ok(Self { value }),
            Ok(_) => Err(Error::format(file, "expected a JSON object")),
            Err(error) => Err(Error::format(file, format_args!("not readable as JSON: {error}"))),
        }
    }

    /// The same if the file is there.
    pub fn read_if_present(file: &Path) -> Result<Option<Self>> {
        if file.symlink_metadata().is_err() { Ok(None) } else { Self::read(file).map(Some) }
    }

    /// The file's new content, in the layout that transformers writes.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let text = serde_json::to_string_pretty(&self.value)
            .map_err(|error| Error::non_finite(format_args!("settings cannot be written as JSON: {error}")))?;
        let bare = ["-Infinity", "Infinity", "NaN"]
            .iter()
            .fold(text, |text, word| text.replace(&format!("\"{MARK}{word}\""), word));
        Ok((bare + "\n").into_bytes())
    }

    /// The quantization's object; made where there is none, under the first of its names.
    fn quantization_mut(&mut self) -> &mut Map<String, Value> {
        let is_there = |map: &Map<String, Value>, key: &str| map.get(key).is_some_and(Value::is_object);
        let text = self.value.get("text_config").and_then(Value::as_object);
        let inside = !is_there(&self.value, QUANTIZATION) && text.is_some_and(|text| is_there(text, QUANTIZATION));
        let older = !is_there(&self.value, QUANTIZATION) && !inside && is_there(&self.value, COMPRESSION);
        let key = if older { COMPRESSION } else { QUANTIZATION };
        let holder = match inside {
            true => self.value["text_config"].as_object_mut().expect("it has a key"),
            false => &mut self.value,
        };
        let own = holder.entry(key).or_insert_with(|| json!({}));
        if !own.is_object() {
            *own = json!({});
        }
        own.as_object_mut().expect("it is one")
    }

    pub fn model_type(&self) -> &str {
        self.value.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// The `quantization_config` in use, or `compression_config`, its older name; in the order in which engines look.
    pub fn quantization(&self) -> Option<&Map<String, Value>> {
        let text = self.value.get("text_config").and_then(|text| text.get(QUANTIZATION));
        let places = [self.value.get(QUANTIZATION), text, self.value.get(COMPRESSION)];
        places.into_iter().flatten().find_map(Value::as_object)
    }

    /// A value of the text model.
    pub fn text(&self, key: &str) -> Option<&Value> {
        self.value.get("text_config").and_then(|text| text.get(key)).or_else(|| self.value.get(key))
    }

    /// The `model_type`s of the text model and of the whole.
    pub fn types(&self) -> Vec<&str> {
        let text = self.value.get("text_config").and_then(|text| text.get("model_type")).and_then(Value::as_str);
        text.into_iter().chain([self.model_type()]).collect()
    }

    /// The classes that the config names, of the whole and of the text model.
    pub fn architectures(&self) -> Vec<&str> {
        let text = self.value.get("text_config").and_then(Value::as_object);
        let lists =
            [Some(&self.value), text].into_iter().flatten().filter_map(|map| map.get("architectures")?.as_array());
        lists.flatten().filter_map(Value::as_str).collect()
    }

    /// The settings in which keys of a text model may stand: the config, the text model's part, and their rotations, one for all
    /// layers or one a kind of layer.
    pub fn places(&self) -> Vec<&Map<String, Value>> {
        let text = self.value.get("text_config").and_then(Value::as_object);
        let mut places: Vec<&Map<String, Value>> = [Some(&self.value), text].into_iter().flatten().collect();
        for at in 0..places.len() {
            let rotations =
                ["rope_parameters", "rope_scaling"].iter().filter_map(|key| places[at].get(*key)?.as_object());
            let rotations: Vec<_> =
                rotations.flat_map(|map| [map].into_iter().chain(map.values().filter_map(Value::as_object))).collect();
            places.extend(rotations);
        }
        places
    }

    /// The config without a key of its rotations; none where they do not have it.
    pub fn without_rotation_key(&self, key: &str) -> Option<Self> {
        fn cut(map: &mut Map<String, Value>, key: &str) -> bool {
            let inner = map
                .values_mut()
                .filter_map(Value::as_object_mut)
                .fold(false, |cut_one, inner| cut(inner, key) | cut_one);
            map.remove(key).is_some() | inner
        }
        let rotations = |map: &mut Map<String, Value>| {
            ["rope_parameters", "rope_scaling"].iter().fold(false, |cut_one, name| {
                map.get_mut(*name).and_then(Value::as_object_mut).is_some_and(|rotation| cut(rotation, key)) | cut_one
            })
        };
        let mut value = self.value.clone();
        let text = value.get_mut("text_config").and_then(Value::as_object_mut).is_some_and(rotations);
        (rotations(&mut value) | text).then_some(Self { value })
    }

    /// How the weights are stored, as an engine with these rules sees it. Where the config does not say it, engines ask ModelOpt's
    /// own (`aside`).
    pub fn method(&self, aside: Option<&Settings>, upper_case: bool, needs_producer: bool) -> Method {
        let by_modelopt = |map: &Map<String, Value>| {
            let nested = map.get("quantization").and_then(Value::as_object);
            let said = |map: &Map<String, Value>| {
                map.get("quant_algo").filter(|value| !value.is_null()).map(|value| match value.as_str() {
                    Some(text) if upper_case => text.to_uppercase(),
                    Some(text) => text.to_owned(),
                    None => value.to_string(),
                })
            };
            let algorithm = nested.and_then(said).or_else(|| said(map))?;
            Some(Method { name: "modelopt".to_owned(), algorithm: Some(algorithm), nested: nested.is_some() })
        };
        let plain = Method { name: String::new(), algorithm: None, nested: false };
        let Some(map) = self.quantization() else {
            let Some(aside) = aside else { return plain };
            let producer = aside.value.get("producer").and_then(|made| made.get("name")).and_then(Value::as_str);
            if needs_producer && producer != Some("modelopt") {
                return plain;
            }
            return by_modelopt(&aside.value).unwrap_or(plain);
        };
        let name = map.get("quant_method").and_then(Value::as_str).unwrap_or_default().to_lowercase();
        let name = name.replace("compressed_tensors", "compressed-tensors");
        let made = map.get("producer").is_some_and(|made| made["name"] == "modelopt");
        let modelopt = name.starts_with("modelopt");
        if made && !modelopt && !name.is_empty() {
            // Some engines go by the producer and some by the method.
            return Method { name: format!("{name} by modelopt"), algorithm: None, nested: false };
        }
        if modelopt || made {
            let unnamed =
                || Method { name: "modelopt".to_owned(), algorithm: Some("unnamed".to_owned()), nested: false };
            return by_modelopt(map).unwrap_or_else(unnamed);
        }
        let name = if name.is_empty() { "unnamed".to_owned() } else { name };
        Method { name, algorithm: None, nested: false }
    }

    /// Whether nothing says that the weights are quantized.
    pub fn is_plain(&self, aside: Option<&Settings>) -> bool {
        self.method(aside, true, false).is_plain()
    }

    /// Whether ModelOpt's settings ask for an FP8 cache, by the keys that an engine with these rules looks at.
    pub fn asks(&self, aside: Option<&Settings>, both_keys: bool) -> bool {
        let Some(map) = self.quantization().or(aside.map(|aside| &aside.value)) else { return false };
        let algorithm = |map: &Map<String, Value>| map.get("kv_cache_quant_algo").is_some_and(|value| !value.is_null());
        if let Some(nested) = map.get("quantization").and_then(Value::as_object) {
            return algorithm(nested);
        }
        match map.get("kv_cache_scheme") {
            Some(scheme) if scheme.is_object() => scheme["type"] == "float" && scheme["num_bits"] == 8,
            _ => both_keys && algorithm(map),
        }
    }

    /// Whether Quark's `exclude` matches a module, by name or by regular expression from its start; none where an expression is not
    /// one that is read here.
    pub fn quark_excludes(&self, module: &str) -> Option<bool> {
        let Some(list) = self.quantization().and_then(|map| map.get("exclude")?.as_array()) else { return Some(false) };
        let mut found = false;
        for entry in list.iter().filter_map(Value::as_str) {
            found |= match entry.strip_prefix("re:") {
                Some(pattern) => {
                    let start = regex_lite::Regex::new(&format!("^(?:{pattern})")).ok()?;
                    start.is_match(module)
                }
                None => entry == module,
            };
        }
        Some(found)
    }

    /// Whether the weights run in F16, into which some loaders round scales.
    pub fn runs_in_f16(&self) -> bool {
        let text = self.value.get("text_config").and_then(Value::as_object);
        let said = |map: &Map<String, Value>| {
            ["dtype", "torch_dtype"].iter().find_map(|key| map.get(*key).and_then(Value::as_str).map(str::to_owned))
        };
        let name = said(&self.value).or_else(|| text.and_then(said));
        name.is_some_and(|name| name.strip_prefix("torch.").unwrap_or(&name) == "float16")
    }

    /// Asks for an FP8 cache with the checkpoint's scales.
    pub fn ask_for_fp8(&mut self, engine: Engine, method: &Method, per_head: bool) {
        if !matches!(engine, Engine::Vllm | Engine::Sglang) {
            return;
        }
        let scheme = json!({"num_bits": 8, "type": "float", "strategy": if per_head { "attn_head" } else { "tensor" },
            "symmetric": true, "dynamic": false});
        match method.name.as_str() {
            "" => {
                *self.quantization_mut() =
                    json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme})
                        .as_object()
                        .cloned()
                        .unwrap_or_default();
            }
            "compressed-tensors" => {
                let own = self.quantization_mut();
                own.insert("kv_cache_scheme".to_owned(), scheme);
                // Per-head scales are read only where it is there.
                let groups = own.entry("config_groups").or_insert(Value::Null);
                if groups.is_null() {
                    *groups = json!({});
                }
            }
            // Else ModelOpt's own config asks for it.
            "modelopt" if self.quantization().is_some() => {
                let scheme = json!({"dynamic": false, "num_bits": 8, "type": "float"});
                self.quantization_mut().insert("kv_cache_scheme".to_owned(), scheme);
            }
            _ => {}
        }
    }
}

/// ModelOpt's own config with an FP8 cache, where there is one. Fails where `quantization` in `from`'s is no object.
pub(super) fn hf_quant_config(from: &Path, found: Option<Settings>) -> Result<Option<Settings>> {
    let Some(mut settings) = found else { return Ok(None) };
    let quantization = settings.value.entry("quantization").or_insert_with(|| json!({}));
    if quantization.is_null() {
        *quantization = json!({});
    }
    let Some(quantization) = quantization.as_object_mut() else {
        let rule = "`quantization` is not a JSON object: mend or remove it";
        return Err(Error::format(&from.join(HF_QUANT), rule));
    };
    quantization.insert("kv_cache_quant_algo".to_owned(), json!("FP8"));
    Ok(Some(settings))
}
