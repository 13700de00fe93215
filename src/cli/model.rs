//! What a MODEL argument means: a preset name, a config, a `.safetensors` file or a folder.

use sigmascale::calibrate::ModelSummary;
use sigmascale::model::{AttentionSpec, Checkpoint, NormKind, QkNormScope, RopeLayout, preset, preset_names};
use sigmascale::{Error, Result};
use std::io::ErrorKind;
use std::path::Path;

/// A model, with or without weights.
pub enum Model {
    /// Config facts alone.
    Config(Box<AttentionSpec>),
    /// Mapped weights.
    Checkpoint(Box<Checkpoint>),
}

impl Model {
    /// Resolves the argument; a preset's name wins over a file of that name (write `./name` for the file).
    pub fn open(argument: &str) -> Result<Self> {
        if let Some(spec) = preset(argument) {
            return Ok(Self::Config(Box::new(spec)));
        }
        let path = Path::new(argument);
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let presets = preset_names().collect::<Vec<_>>().join(", ");
                let rule = format!("there is no such path, and no preset of this name; the presets are {presets}");
                Err(Error::io(path, "open", std::io::Error::new(ErrorKind::NotFound, rule)))
            }
            Err(error) => Err(Error::io(path, "open", error)),
            Ok(metadata) if metadata.is_file() && path.extension().is_some_and(|e| e == "json") => {
                AttentionSpec::from_config_file(path).map(|spec| Self::Config(Box::new(spec)))
            }
            Ok(_) => Checkpoint::open(path).map(|checkpoint| Self::Checkpoint(Box::new(checkpoint))),
        }
    }
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
    format!(
        "{}: {}, {} layers, d {}, {} query and {} KV heads of {}, {norm}{rope}{qk_norm}{bias}\n",
        model.name, model.family, model.layers, model.d_model, model.n_q_heads, model.n_kv_heads, model.d_head
    )
}
