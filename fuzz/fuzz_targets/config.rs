//! `config.json` from a stranger: an error or a spec that is consistent, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale::model::AttentionSpec;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(spec) = AttentionSpec::from_config_json(bytes, "fuzz/config.json".as_ref()) {
        assert!(!spec.layers.is_empty());
        for layer in &spec.layers {
            assert_eq!(layer.n_q_heads % layer.n_kv_heads, 0);
            assert!(layer.mla.is_some() || layer.d_head % 8 == 0 && (16..=512).contains(&layer.d_head));
            assert!(layer.softmax_scale.is_finite() && layer.softmax_scale > 0.0);
            if let Some(rope) = &layer.rope {
                assert!(rope.rotary_dim % 2 == 0 && (2..=layer.d_head).contains(&rope.rotary_dim));
                assert!(rope.attention_factor.is_finite() && rope.attention_factor > 0.0);
            }
        }
    }
});
