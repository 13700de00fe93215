//! Models: what their attention is ([`AttentionSpec`]) and where its weights lie ([`LayerWeights`]).

mod spec;
mod weights;

pub use spec::{AttentionSpec, GainForm, InputNorm, NormKind, QkNorm, QkNormScope, QkvBias, Rope, RopeLayout};
pub use weights::{LayerWeights, NormVectors, Projection};
