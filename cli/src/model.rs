//! A model in one line.

pub use sigmascale::model::ModelSource as Model;

use sigmascale::calibrate::ModelSummary;
use sigmascale::model::{NormKind, PerLayer, QkNormScope, RopeLayout, preset};
use sigmascale::serving::Engine;
use std::path::{Path, PathBuf};

/// The files that are read for a model argument; none for a preset.
pub fn files(argument: &str, model: &Model) -> Vec<PathBuf> {
    match model {
        Model::Config(_) if preset(argument).is_some() => vec![],
        Model::Config(_) => vec![argument.into()],
        Model::Checkpoint(checkpoint) => checkpoint.files(),
    }
}

/// What the command that serves a folder without a tokenizer needs.
pub fn without_tokenizer(folder: &Path, engine: Engine) -> Option<&'static str> {
    let files = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json"];
    let missing = !files.iter().any(|name| folder.join(name).exists());
    (missing && matches!(engine, Engine::Vllm | Engine::Sglang)).then_some(
        "The folder has no tokenizer: copy one into it, or add --skip-tokenizer-init to the command that serves it.",
    )
}

/// A model in a line, for tables.
pub fn headline(model: &ModelSummary) -> String {
    let norm = match model.norm {
        NormKind::LayerNorm => "LayerNorm",
        NormKind::RmsNorm => "RMSNorm",
        NormKind::None => "no norm",
    };
    let rope = match model.rope {
        Some(RopeLayout::HalfSplit) => ", RoPE",
        Some(RopeLayout::Interleaved) => ", RoPE interleaved",
        None => "",
    };
    let qk_norm = match model.qk_norm {
        Some(QkNormScope::PerHead) => ", QK-norm",
        Some(QkNormScope::Joint) => ", QK-norm over all heads",
        None => "",
    };
    let biases: String =
        [("q", model.bias.q), ("k", model.bias.k), ("v", model.bias.v)].iter().filter(|b| b.1).map(|b| b.0).collect();
    let bias = if biases.is_empty() { String::new() } else { format!(", bias on {biases}") };
    if let Some(mla) = &model.mla {
        let query = mla.q_rank.map_or(String::new(), |rank| format!("query latent {rank}, "));
        return format!(
            "{}: {}, {} layers, d {}, {} heads of {} + {} rotated, values of {}, MLA ({query}cached latent {}), {norm}{rope}\n",
            model.name,
            model.family,
            model.layers,
            model.d_model,
            span(&model.n_q_heads),
            mla.d_nope,
            mla.d_rope,
            mla.d_value,
            mla.kv_rank
        );
    }
    format!(
        "{}: {}, {} layers, d {}, {} query and {} KV heads of {}, {norm}{rope}{qk_norm}{bias}\n",
        model.name,
        model.family,
        model.layers,
        model.d_model,
        span(&model.n_q_heads),
        span(&model.n_kv_heads),
        span(&model.d_head)
    )
}

/// A number, or the least and the most where layers differ.
fn span(counts: &PerLayer) -> String {
    match counts {
        PerLayer::Same(count) => count.to_string(),
        PerLayer::Each(counts) => {
            let least = counts.iter().min().copied().unwrap_or(0);
            format!("{least}..{}", counts.iter().max().copied().unwrap_or(0))
        }
    }
}
