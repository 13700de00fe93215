//! Model types that wrap the text model of `text_config`, a row each.

use super::schema::Wrapper;

/// The wrappers that are known.
pub(crate) static WRAPPERS: &[Wrapper] = &[
    Wrapper { model_type: "gemma3", text: "gemma3_text", flat: false },
    Wrapper { model_type: "mistral3", text: "mistral", flat: false },
    Wrapper { model_type: "qwen2_vl", text: "qwen2_vl_text", flat: true },
    Wrapper { model_type: "qwen2_5_vl", text: "qwen2_5_vl_text", flat: true },
    Wrapper { model_type: "qwen3_vl", text: "qwen3_vl_text", flat: false },
    Wrapper { model_type: "qwen3_vl_moe", text: "qwen3_vl_moe_text", flat: false },
    Wrapper { model_type: "llama4", text: "llama4_text", flat: false },
    Wrapper { model_type: "qwen3_5", text: "qwen3_5_text", flat: false },
    Wrapper { model_type: "qwen3_5_moe", text: "qwen3_5_moe_text", flat: false },
];
