//! The attention call of a layer, and the seeds of its tokens.

use sigmascale::attention::{AttentionCall, AttentionShape, Mask};
use sigmascale::model::AttentionSpec;

/// Seeds of different steps and layers are unrelated.
pub(super) fn token_seed(seed: u64, layer: usize, step: usize) -> u64 {
    let mut x = seed ^ (layer as u64) << 40 ^ (step as u64) << 8;
    // The finaliser of splitmix64.
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The call of a layer that exists, with the model's window, soft-cap and sinks.
pub(super) fn call_of<'a>(
    spec: &AttentionSpec,
    layer: usize,
    seq_len: usize,
    sinks: Option<&'a [f64]>,
) -> AttentionCall<'a> {
    let own = &spec.layers[layer];
    let shape = AttentionShape {
        batch: 1,
        n_q_heads: own.n_q_heads,
        n_kv_heads: own.n_kv_heads,
        len_q: seq_len,
        len_k: seq_len,
        d_head: own.d_head,
        d_v: own.d_head,
    };
    // A window counts the query's own key; in an encoder it reaches as far to the other side.
    let window = own.window.map(|window| window.saturating_sub(1));
    AttentionCall {
        mask: Mask { causal: spec.causal, window_left: window, window_right: window },
        softmax_scale: own.softmax_scale,
        soft_cap: spec.soft_cap,
        sinks,
        ..AttentionCall::causal(shape)
    }
}
