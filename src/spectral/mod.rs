//! Spectral norms of the heads' interaction matrices `M = W_Q W_K^T`.
//!
//! Two estimators implement one trait. [`GramEngine`] (the default) is exact and certified: it
//! forms `G_Q = W_Q^T W_Q` and `G_K = W_K^T W_K`, and works on `r x r` matrices in f64. [`PowerEngine`] is the
//! paper's implicit power iteration (Algorithms 2 and 3) with persistent vectors: a lower bound, for parity.

mod dense;
mod gram;
mod gram_engine;
mod head_grams;
mod mla;
mod power;
mod rope;
mod spectrum;
mod summed;

pub use dense::{Largest, largest_eigenvalue};
pub use gram::{Gram, GramPair, LayerGrams};
pub use gram_engine::GramEngine;
pub use head_grams::HeadGrams;
pub use mla::{AbsorbedChannel, MlaHeadSpectrum, MlaOperands, MlaSpectrum};
pub use power::{
    PowerEngine, PowerState, PowerVectors, attention_factor, certified_inflation, from_estimates, iterate_heads,
    iterate_sum,
};
pub use spectrum::{
    Constants, Estimator, ExactSpectrum, HeadSpectrum, Iterations, LayerSpectrum, PowerEstimate, SpectralEngine,
    layer_channels,
};
pub use summed::summed_norm;
