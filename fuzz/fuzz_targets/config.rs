//! `config.json` from a stranger: an error or a spec that is consistent, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale::model::AttentionSpec;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(spec) = AttentionSpec::from_config_json(bytes, "fuzz/config.json".as_ref()) {
        assert_eq!(spec.n_q_heads % spec.n_kv_heads, 0);
        assert!(spec.d_head % 8 == 0 && (16..=256).contains(&spec.d_head));
        assert_eq!((spec.rope.len(), spec.softmax_scale.len()), (spec.layers, spec.layers));
        assert!(spec.softmax_scale.iter().all(|scale| scale.is_finite() && *scale > 0.0));
        for rope in spec.rope.iter().flatten() {
            assert!(rope.rotary_dim % 2 == 0 && (2..=spec.d_head).contains(&rope.rotary_dim));
            assert!(rope.attention_factor.is_finite() && rope.attention_factor > 0.0);
        }
    }
});
