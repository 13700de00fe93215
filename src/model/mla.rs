//! Multi-head latent attention (MLA): the sizes of a layer.
//!
//! A layer caches one normalized latent c of `kv_rank` channels and one rotated key of `d_rope` channels for all heads. A head's
//! key is `[K_h c, k_pe]`, its value `V_h c`, its query `[q_nope, q_pe]` from a normalized query latent, or from the layer's
//! input where there is none. In absorbed form the query is `[K_h^T q_nope, q_pe]` and meets the cached row as it is.

use serde::{Deserialize, Serialize};

/// Sizes of a layer with multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mla {
    /// Channels of the query latent; `None` where queries are projected from the layer's input.
    pub q_rank: Option<usize>,
    /// Channels of the cached latent, which keys and values are projected from.
    pub kv_rank: usize,
    /// Channels of a head's query and key that are not rotated; they come first.
    pub d_nope: usize,
    /// Rotated channels, which come last; those of the key are shared by all heads.
    pub d_rope: usize,
    /// Channels of a head's value.
    pub d_value: usize,
    /// Multiplies the query latent after its norm (LongCat), else 1.
    pub q_factor: f64,
    /// Multiplies the cached latent after its norm (LongCat), else 1.
    pub kv_factor: f64,
}

impl Mla {
    /// What the query projection reads: the query latent, or the layer's input.
    pub fn q_inputs(&self, d_model: usize) -> usize {
        self.q_rank.unwrap_or(d_model)
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let counts = [
            ("q_rank", self.q_rank.unwrap_or(1)),
            ("kv_rank", self.kv_rank),
            ("d_nope", self.d_nope),
            ("d_rope", self.d_rope),
            ("d_value", self.d_value),
        ];
        if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(format!("`{field}` must be at least 1"));
        }
        if !self.d_rope.is_multiple_of(2) {
            return Err(format!("`d_rope` {} must be even", self.d_rope));
        }
        match [self.q_factor, self.kv_factor].into_iter().find(|factor| !(factor.is_finite() && *factor > 0.0)) {
            Some(factor) => Err(format!("the latents' factor must be finite and greater than 0, got {factor}")),
            None => Ok(()),
        }
    }
}
