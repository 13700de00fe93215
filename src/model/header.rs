//! What is wrong with a file that is not a safetensors file, or with its header: the content, the tensor, the rule.

use serde_json::Value;

pub(super) const PICKLED: &str = "is a pickled PyTorch checkpoint, and only safetensors are read: load it in transformers and call \
                       `save_pretrained(folder, safe_serialization=True)`";
pub(super) const GGUF: &str =
    "is GGUF, whose weights are already quantized: use the safetensors checkpoint that it was made from";

const ZIP: &[u8] = b"PK\x03\x04";

/// What a file is by its first bytes, if it is something else that people download or rename.
pub(super) fn other_content(bytes: &[u8]) -> Option<String> {
    let start = bytes[..bytes.len().min(64)].to_ascii_lowercase();
    let text = start.trim_ascii_start();
    if bytes.starts_with(b"GGUF") {
        Some(format!("it {GGUF}"))
    } else if bytes.starts_with(ZIP) || bytes.starts_with(b"\x80\x02") {
        Some(format!("it {PICKLED}"))
    } else if text.starts_with(b"<!doctype") || text.starts_with(b"<html") || text.starts_with(b"<?xml") {
        Some("it is a web page, not weights: download it again, logged in if the model asks for that".to_owned())
    } else if bytes.starts_with(b"\x1f\x8b") {
        Some("it is compressed by gzip: unpack it first".to_owned())
    } else if text.starts_with(b"{") {
        Some("it is JSON, not weights: download the safetensors file again".to_owned())
    } else {
        None
    }
}

/// The rule that the first tensor in a header breaks, and which tensor that is; `None` if each is sound alone.
pub(super) fn broken_tensor(header: &[u8]) -> Option<String> {
    let Value::Object(tensors) = serde_json::from_slice(header).ok()? else {
        return Some("the header is not a JSON object".to_owned());
    };
    let named = tensors.iter().filter(|(name, _)| *name != "__metadata__");
    named.filter_map(|(name, info)| Some(format!("tensor `{name}` {}", broken(info)?))).next()
}

fn broken(info: &Value) -> Option<String> {
    let numbers = |key: &str| -> Result<Vec<u64>, String> {
        let list = info.get(key).ok_or_else(|| format!("has no `{key}`"))?;
        let of = |list: &Vec<Value>| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
        let wrong = || {
            format!("has `{key}` {}, expected a list of non-negative integers", super::keys::shorten(&list.to_string()))
        };
        list.as_array().and_then(of).ok_or_else(wrong)
    };
    let checked = || -> Result<Option<String>, String> {
        let (shape, offsets) = (numbers("shape")?, numbers("data_offsets")?);
        let dtype = info.get("dtype").ok_or("has no `dtype`")?;
        let known: safetensors::Dtype = serde_json::from_value(dtype.clone())
            .map_err(|_| format!("has an unknown type, {}", super::keys::shorten(&dtype.to_string())))?;
        let [start, end] = offsets[..] else { return Err(format!("has {} `data_offsets`, not 2", offsets.len())) };
        let elements = shape.iter().try_fold(1u64, |all, side| all.checked_mul(*side));
        let bits = elements.and_then(|all| all.checked_mul(known.bitsize() as u64));
        let bits = bits.ok_or_else(|| format!("has shape {shape:?}, more elements than can be counted"))?;
        if end < start {
            return Err(format!("has reversed offsets: it starts at {start} and ends at {end}"));
        }
        let bytes = end - start;
        Ok((bits.div_ceil(8) != bytes).then(|| {
            format!(
                "has shape {shape:?} of type {known:?}, which is {} bytes, but its offsets span {bytes}",
                bits.div_ceil(8)
            )
        }))
    };
    checked().unwrap_or_else(Some)
}

/// Where the last tensor of a header ends.
pub(super) fn data_end(header: &[u8]) -> Option<u64> {
    let Value::Object(tensors) = serde_json::from_slice(header).ok()? else { return None };
    tensors.values().filter_map(|info| info.get("data_offsets")?.get(1)?.as_u64()).max()
}
