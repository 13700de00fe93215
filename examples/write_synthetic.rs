//! Writes a sharded BF16 checkpoint of a preset's shape with random weights, only the tensors that attention needs:
//! `cargo run --release --example write_synthetic -- mistral-7b FOLDER [LAYERS]` (1.6 GB for mistral-7b).
//!
//! For measuring: `calibrate FOLDER` reads what it would read of the real model. Llama-style presets without biases
//! and QK-norm only.

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use sigmascale::model::{SyntheticModel, SyntheticOptions, preset};
use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

/// Layers in one shard.
const LAYERS_A_SHARD: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: write_synthetic PRESET FOLDER [LAYERS]";
    let name = args.next().ok_or(usage)?;
    let folder = PathBuf::from(args.next().ok_or(usage)?);
    let mut spec = preset(&name).ok_or("no such preset")?;
    if let Some(layers) = args.next() {
        spec.layers.truncate(layers.parse()?);
    }
    if spec.bias.any() || spec.qk_norm.is_some() || !["llama", "mistral"].contains(&spec.family.as_str()) {
        return Err("only Llama-style presets without biases and QK-norm are written".into());
    }
    std::fs::create_dir_all(&folder)?;
    let preset_file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("calibration/presets/{name}.json"));
    let mut config: Value = serde_json::from_slice(&std::fs::read(preset_file)?)?;
    config["num_hidden_layers"] = spec.layers.len().into();
    config["torch_dtype"] = "bfloat16".into();
    std::fs::write(folder.join("config.json"), serde_json::to_string_pretty(&config)?)?;

    let model = SyntheticModel::new(&spec, 0, SyntheticOptions::default())?;
    let shards = spec.layers.len().div_ceil(LAYERS_A_SHARD);
    let mut weight_map = BTreeMap::new();
    for shard in 0..shards {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for layer in (shard * LAYERS_A_SHARD..spec.layers.len()).take(LAYERS_A_SHARD) {
            let drawn = model.layer(layer)?;
            let weights = drawn.weights();
            let prefix = format!("model.layers.{layer}");
            for (name, projection) in [("q", &weights.q), ("k", &weights.k), ("v", &weights.v)] {
                let mut bytes = Vec::new();
                let mut row = vec![0.0; spec.d_model];
                for head in &projection.heads {
                    for channel in 0..spec.layers[layer].d_head {
                        head.read_block(channel..channel + 1, 0..spec.d_model, &mut row);
                        bytes.extend(row.iter().flat_map(|x| half::bf16::from_f64(*x).to_le_bytes()));
                    }
                }
                let shape = vec![projection.heads.len() * spec.layers[layer].d_head, spec.d_model];
                tensors.push((format!("{prefix}.self_attn.{name}_proj.weight"), shape, bytes));
            }
            // Gains that are not one, so that folding is not skipped.
            let gain = (0..spec.d_model).flat_map(|i| half::bf16::from_f64(0.5 + (i % 7) as f64 / 8.0).to_le_bytes());
            tensors.push((format!("{prefix}.input_layernorm.weight"), vec![spec.d_model], gain.collect()));
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::BF16, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        safetensors::serialize_to_file(views, None, &folder.join(&file))?;
        weight_map.extend(tensors.into_iter().map(|(name, ..)| (name, file.clone())));
        eprintln!("{file}");
    }
    let index = json!({ "metadata": {}, "weight_map": weight_map });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
    Ok(())
}
