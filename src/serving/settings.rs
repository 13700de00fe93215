//! `config.json`, `hf_quant_config.json` and the index: read as they are, merged, written back.

use super::engine::{Engine, Method};
use crate::error::{Error, Result};
use crate::model::quoted_non_finite;
use serde_json::{Map, Value, json};
use std::path::Path;

/// In front of what Python writes bare and JSON does not know, while it is a text.
const MARK: &str = "sigmascale: bare ";
/// ModelOpt's own config.
pub(super) const HF_QUANT: &str = "hf_quant_config.json";

/// A file of settings.
pub(super) struct Settings {
    pub value: Map<String, Value>,
}

impl Settings {
    pub fn read(file: &Path) -> Result<Self> {
        let bytes = std::fs::read(file).map_err(|e| Error::io(file, "read", e))?;
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

    /// The object that holds `key`: the top, or the text model's part where only that has it.
    fn holder(&mut self, key: &str) -> &mut Map<String, Value> {
        let outside = self.value.get(key).is_some_and(Value::is_object);
        let inside = self.value.get("text_config").and_then(|text| text.get(key)).is_some_and(Value::is_object);
        if inside && !outside {
            return self.value["text_config"].as_object_mut().expect("it has a key");
        }
        &mut self.value
    }

    pub fn model_type(&self) -> &str {
        self.value.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// The `quantization_config` in use.
    pub fn quantization(&self) -> Option<&Map<String, Value>> {
        let top = self.value.get("quantization_config").filter(|value| value.is_object());
        let text = self.value.get("text_config").and_then(|text| text.get("quantization_config"));
        top.or(text).and_then(Value::as_object)
    }

    /// How the weights are stored. Where the config does not say it, engines ask ModelOpt's own (`aside`).
    pub fn method(&self, aside: Option<&Settings>) -> Method {
        let Some(map) = self.quantization() else {
            let algorithm = aside.and_then(|aside| aside.value.get("quantization")?.get("quant_algo")?.as_str());
            return match algorithm {
                Some("FP8") => Method::ModelOpt,
                Some(_) => Method::Other,
                None => Method::Plain,
            };
        };
        match map.get("quant_method").and_then(Value::as_str) {
            Some("compressed-tensors") => Method::CompressedTensors,
            Some("fp8") => Method::Fp8,
            Some("modelopt") => Method::ModelOpt,
            Some("quark") => Method::Quark,
            _ => Method::Other,
        }
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

    /// Asks for an FP8 cache with the checkpoint's scales. Whether something changed.
    pub fn ask_for_fp8(&mut self, engine: Engine, method: Method, per_head: bool) -> bool {
        if !matches!(engine, Engine::Vllm | Engine::Sglang) {
            return false;
        }
        let scheme = json!({"num_bits": 8, "type": "float", "strategy": if per_head { "attn_head" } else { "tensor" },
            "symmetric": true, "dynamic": false});
        let holder = self.holder("quantization_config");
        match method {
            Method::Plain => {
                holder.insert(
                    "quantization_config".to_owned(),
                    json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}),
                );
            }
            Method::CompressedTensors => {
                holder["quantization_config"]["kv_cache_scheme"] = scheme;
                // Per-head scales are read only where it is there.
                if holder["quantization_config"].get("config_groups").is_none_or(Value::is_null) {
                    holder["quantization_config"]["config_groups"] = json!({});
                }
            }
            // Else ModelOpt's own config asks for it.
            Method::ModelOpt if holder.contains_key("quantization_config") => {
                holder["quantization_config"]["kv_cache_scheme"] =
                    json!({"dynamic": false, "num_bits": 8, "type": "float"});
            }
            Method::ModelOpt | Method::Fp8 | Method::Quark | Method::Other => return false,
        }
        true
    }
}

/// ModelOpt's own config with an FP8 cache: merged where there is one, made for TensorRT-LLM where nothing else says how weights are
/// stored. Fails where `quantization` in `from`'s is no object.
pub(super) fn hf_quant_config(
    from: &Path,
    engine: Engine,
    method: Method,
    found: Option<Settings>,
) -> Result<Option<Settings>> {
    match (found, method) {
        (Some(mut settings), _) => {
            let quantization = settings.value.entry("quantization").or_insert_with(|| json!({}));
            if quantization.is_null() {
                *quantization = json!({});
            }
            let Some(quantization) = quantization.as_object_mut() else {
                return Err(Error::format(
                    &from.join(HF_QUANT),
                    "`quantization` is not a JSON object: mend or remove it",
                ));
            };
            quantization.insert("kv_cache_quant_algo".to_owned(), json!("FP8"));
            Ok(Some(settings))
        }
        (None, Method::Plain) if engine == Engine::Trtllm => {
            let mut value = Map::new();
            value.insert("producer".to_owned(), json!({"name": "sigmascale", "version": env!("CARGO_PKG_VERSION")}));
            value.insert("quantization".to_owned(), json!({"quant_algo": null, "kv_cache_quant_algo": "FP8"}));
            Ok(Some(Settings { value }))
        }
        _ => Ok(None),
    }
}
