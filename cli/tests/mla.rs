//! What the commands say of latent attention.

#[path = "../../tests/common/mod.rs"]
mod common;
mod run;

use common::fixtures::{Draw, write_checkpoint};
use run::{sigmascale, text};
use safetensors::Dtype;
use serde_json::json;

const HEADS: usize = 2;
const Q_RANK: usize = 48;
const RANK: usize = 32;

/// Sizes of heads are those that the config states, whatever the hidden size over the heads is.
#[test]
fn commands_show_the_cache_and_the_sizes_of_heads() {
    for [hidden, nope, rope, value] in [[192, 16, 16, 24], [56, 16, 16, 24], [200, 18, 10, 26], [192, 244, 16, 8]] {
        let config = json!({"model_type": "deepseek_v3", "hidden_size": hidden, "num_hidden_layers": 1,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": RANK,
            "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "max_position_embeddings": 4096,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-6});
        let mut draw = Draw::new(1);
        let name = |part: &str| format!("model.layers.0.self_attn.{part}");
        draw.add("model.layers.0.input_layernorm.weight", &[hidden], 1.0, 0.4);
        draw.add(name("kv_a_layernorm.weight"), &[RANK], 1.0, 0.4);
        draw.add(name("q_a_layernorm.weight"), &[Q_RANK], 1.0, 0.4);
        draw.linear(&name("q_a_proj"), Q_RANK, hidden, None);
        draw.linear(&name("q_b_proj"), HEADS * (nope + rope), Q_RANK, None);
        draw.linear(&name("kv_a_proj_with_mqa"), RANK + rope, hidden, None);
        draw.linear(&name("kv_b_proj"), HEADS * (nope + value), RANK, None);
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &config, &draw.tensors, Dtype::BF16, 1);
        for command in ["calibrate", "inspect"] {
            let output = sigmascale(&[command, text(folder.path())]);
            // Lines end where they would be too wide.
            let shown = String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
            let heads = format!("2 heads of {nope} + {rope} rotated, values of {value}");
            let latents = format!("MLA (query latent {Q_RANK}, cached latent {RANK})");
            for part in [format!("{heads}, {latents}"), "cache descale".to_owned()] {
                assert!(shown.contains(&part), "{command}: {shown}");
            }
        }
    }
}
