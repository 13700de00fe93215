//! One layer's attention weights as borrowed views, head by head, whatever the storage.

use crate::tensor::{Dtype, MatrixView};

/// Weights of one attention layer. Every head is a `d_head x d_model` view: row c holds the weights of channel c, so
/// fused, interleaved and Conv1D storage differ only in strides. Vectors are small and owned. With `mla` the projections of
/// a head read latents and have other shapes: see [`MlaWeights`].
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
    /// What latent attention has beside; `None` in other layers.
    pub mla: Option<MlaWeights<'a>>,
}

impl LayerWeights<'_> {
    /// How the q, k and v projections are stored.
    pub fn stored(&self) -> [Dtype; 3] {
        [&self.q, &self.k, &self.v].map(Projection::dtype)
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

impl Projection<'_> {
    /// How it is stored.
    pub(crate) fn dtype(&self) -> Dtype {
        self.heads.first().map_or(Dtype::Bf16, |head| head.dtype())
    }
}

/// What a layer with multi-head latent attention has beside the projections of each head: [`LayerWeights`] holds those as
/// `(d_nope + d_rope) x q_inputs` (q), `d_nope x kv_rank` (k) and `d_value x kv_rank` (v).
#[derive(Clone, Debug)]
pub struct MlaWeights<'a> {
    /// Stored gain of the query latent's norm; `None` where there is no query latent.
    pub q_gain: Option<Vec<f64>>,
    /// Stored gain of the cached latent's norm.
    pub kv_gain: Vec<f64>,
    /// Projection of the shared rotated key, one head of `d_rope x d_model`, and its bias.
    pub k_pe: Projection<'a>,
}

/// A norm's stored vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct NormVectors {
    /// Gain as stored.
    pub gain: Vec<f64>,
    /// Shift as stored.
    pub shift: Option<Vec<f64>>,
}
