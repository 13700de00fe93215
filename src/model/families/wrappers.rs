//! Model types that wrap the text model of `text_config`, one row each.

use super::schema::Wrapper;

/// A whole text model, head included, beside the other parts.
const OUTSIDE: &[&str] = &["language_model.model.", "model.language_model."];
/// A text model without its head, among the other parts.
const INSIDE: &[&str] = &["model.language_model.", "language_model.model."];

/// The same by the name that it has beside a vision model.
const BESIDE: &[&str] = &["model.text_model.", "text_model."];

/// The wrappers that are known. The first Qwen-VL releases store the text model as if it stood alone.
pub(crate) static WRAPPERS: &[Wrapper] = &[
    Wrapper { model_type: "aria", text: "aria_text", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "gemma3", text: "gemma3_text", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "gemma3n", text: "gemma3n_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "gemma4", text: "gemma4_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "gemma4_unified", text: "gemma4_unified_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "minimax_m3_vl", text: "minimax_m3_vl_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "mistral3", text: "mistral", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "qwen2_vl", text: "qwen2_vl_text", flat: true, prefixes: &[] },
    Wrapper { model_type: "qwen2_5_vl", text: "qwen2_5_vl_text", flat: true, prefixes: &[] },
    Wrapper { model_type: "qwen3_vl", text: "qwen3_vl_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "qwen3_vl_moe", text: "qwen3_vl_moe_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "aya_vision", text: "cohere2", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "cohere2_vision", text: "cohere2", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "exaone4_5", text: "exaone4", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "got_ocr2", text: "qwen2", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "idefics3", text: "llama", flat: false, prefixes: BESIDE },
    Wrapper { model_type: "internvl", text: "qwen2", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "lfm2_vl", text: "lfm2", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "lighton_ocr", text: "qwen3", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "llava", text: "llama", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "llava_next", text: "llama", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "llava_onevision", text: "qwen2", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "paligemma", text: "gemma", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "smolvlm", text: "llama", flat: false, prefixes: BESIDE },
    Wrapper { model_type: "vipllava", text: "llama", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "kimi_k25", text: "deepseek_v3", flat: false, prefixes: OUTSIDE },
    // What the attention reads is a weighted sum of residuals behind the layer's own norm.
    Wrapper {
        model_type: "kimi_k3",
        text: "kimi_linear",
        flat: false,
        prefixes: &["language_model.model.", "language_model."],
    },
    Wrapper { model_type: "kimi_vl", text: "deepseek_v3", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "llama4", text: "llama4_text", flat: false, prefixes: OUTSIDE },
    Wrapper { model_type: "qwen3_5", text: "qwen3_5_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "qwen3_5_moe", text: "qwen3_5_moe_text", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "step3p7", text: "step3p5", flat: false, prefixes: INSIDE },
    Wrapper { model_type: "qwen4_exp", text: "qwen4_exp_text", flat: false, prefixes: INSIDE },
];
