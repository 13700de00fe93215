//! One layer's attention weights as borrowed views, head by head, whatever the storage.

use crate::tensor::{Dtype, MatrixView};

/// Weights of one attention layer. Every head is a `d_head x d_model` view: row c holds the weights of channel c, so
/// fused, interleaved and Conv1D storage differ only in strides. Vectors are small and owned.
#[derive(Clone, Debug)]
pub struct LayerWeights<'a> {
    /// Index among the layers with attention; the model's own number is that of its spec.
    pub layer: usize,
    /// Query projection and its bias.
    pub q: Projection<'a>,
    /// Key projection and its bias.
    pub k: Projection<'a>,
    /// Value projection and its bias.
    pub v: Projection<'a>,
    /// Stored gain of the input norm, `d_model` values (as stored: g, not 1 + g).
    pub norm_gain: Option<Vec<f64>>,
    /// Stored shift of the input norm, `d_model` values.
    pub norm_shift: Option<Vec<f64>>,
    /// Stored QK-norm vectors: `d_head` values shared by all heads, or `n_heads * d_head` (joint, or per head and
    /// distinct).
    pub q_norm: Option<NormVectors>,
    /// The same for k.
    pub k_norm: Option<NormVectors>,
}

impl LayerWeights<'_> {
    /// How the q, k and v projections are stored.
    pub fn stored(&self) -> [Dtype; 3] {
        [&self.q, &self.k, &self.v].map(|p| p.heads.first().map_or(Dtype::Bf16, |head| head.dtype()))
    }
}

/// The heads of one projection.
#[derive(Clone, Debug)]
pub struct Projection<'a> {
    /// One `d_head x d_model` view a head.
    pub heads: Vec<MatrixView<'a>>,
    /// `n_heads * d_head` values, head after head.
    pub bias: Option<Vec<f64>>,
    /// Tensor name, for messages.
    pub name: String,
}

/// A norm's stored vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct NormVectors {
    /// Gain as stored.
    pub gain: Vec<f64>,
    /// Shift as stored.
    pub shift: Option<Vec<f64>>,
}
