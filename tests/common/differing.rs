//! Small checkpoints whose layers have different heads, or none.

use super::cases::R;
use super::fixtures::{Draw, Tensors, write_checkpoint};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::model::Checkpoint;
use tempfile::TempDir;

pub fn openelm() -> Value {
    json!({"model_type": "openelm", "model_dim": 48, "num_transformer_layers": 3, "head_dim": R,
        "num_query_heads": [4, 6, 3], "num_kv_heads": [2, 3, 1], "normalize_qk_projections": true,
        "normalization_layer_name": "rms_norm", "rope_freq_constant": 10000, "max_context_length": 256})
}

/// Nemotron-NAS: the second block has no attention, the fourth a linear layer in its place.
pub fn decilm() -> Value {
    let block = |group: Option<usize>, no_op: bool, linear: bool| {
        json!({"attention": {"n_heads_in_group": group, "no_op": no_op, "replace_with_linear": linear, "sparsify": null},
            "ffn": {"no_op": false}})
    };
    json!({"model_type": "nemotron-nas", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": null, "max_position_embeddings": 256, "rope_theta": 10000.0,
        "block_configs": [block(Some(2), false, false), block(None, true, false), block(Some(4), false, false),
            block(None, false, true), block(Some(1), false, false)]})
}

pub fn draw(config: &Value) -> Tensors {
    let mut t = Draw::new(8);
    if config["model_type"] == "openelm" {
        for (i, (n_q, n_kv)) in [(4, 2), (6, 3), (3, 1)].into_iter().enumerate() {
            t.add(format!("transformer.layers.{i}.attn_norm.weight"), &[48], 1.0, 0.3);
            t.linear(&format!("transformer.layers.{i}.attn.qkv_proj"), (n_q + 2 * n_kv) * R, 48, None);
            t.add(format!("transformer.layers.{i}.attn.q_norm.weight"), &[R], 1.0, 0.3);
            t.add(format!("transformer.layers.{i}.attn.k_norm.weight"), &[R], 1.0, 0.3);
        }
        return t.tensors;
    }
    for (i, n_kv) in [(0, 2), (2, 1), (4, 4)] {
        t.add(format!("model.layers.{i}.input_layernorm.weight"), &[64], 1.0, 0.3);
        for (name, heads) in [("q", 4), ("k", n_kv), ("v", n_kv)] {
            t.linear(&format!("model.layers.{i}.self_attn.{name}_proj"), heads * R, 64, None);
        }
    }
    t.add("model.layers.3.input_layernorm.weight", &[64], 1.0, 0.3);
    t.linear("model.layers.3.self_attn.linear_attn", 64, 64, None);
    t.tensors
}

pub fn written(config: &Value) -> (TempDir, Tensors, Checkpoint) {
    let (folder, tensors) = (tempfile::tempdir().unwrap(), draw(config));
    write_checkpoint(folder.path(), config, &tensors, Dtype::BF16, 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, tensors, checkpoint)
}
