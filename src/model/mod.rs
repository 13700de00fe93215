//! Models: what their attention is ([`AttentionSpec`]) and where its weights are ([`LayerWeights`]).
//!
//! A [`Checkpoint`] maps a Hugging Face folder and hands out borrowed views; a [`SyntheticModel`] draws random weights
//! of a prescribed spectral norm; a [`preset`] is a spec alone. What a family is stands in a table, and a family that is
//! not in it is refused: no bound is better than a wrong one.

mod body;
mod checkpoint;
mod config;
mod f16;
mod families;
mod files;
mod folder;
mod gains;
mod head_offsets;
mod header;
mod heads;
mod hub;
mod hybrid;
mod keys;
mod kinds;
mod layout;
mod mla;
mod mla_keys;
mod preset;
mod quantization;
mod record;
mod rotate;
mod rotation;
mod rounding;
mod shards;
mod sharing;
mod source;
mod spec;
mod synthetic;
mod weights;
mod window;

pub use body::{Activation, Block, Body, Linear, Mlp, NormOrder, Router};
pub use checkpoint::{Checkpoint, LayerStream, StoredTensor};
pub use families::{KnownFamily, Support, known_families};
pub use files::{RawTensor, WeightFiles};
pub(crate) use gains::gains;
pub use head_offsets::HeadOffsets;
pub(crate) use layout::require_attention_module;
pub use layout::{LayerNames, Layout, MlaNames, ProjectionName, attention_module};
pub use mla::Mla;
pub use preset::{paper_sigma_profile, preset, preset_names};
pub use record::PerLayer;
pub use rotate::rotate;
pub use rounding::{
    E4M3_ROUNDING, Forward, LEAST_ROUNDING_SHARE, MlaRounding, RoundingShare, WeightRounding, norm_roundings,
};
#[doc(hidden)]
pub use shards::fuzz_safetensors;
pub use source::{ModelSource, local_path};
pub use spec::{
    AttentionSpec, GainForm, InputNorm, LayerSpec, Multipliers, NormKind, QkNorm, QkNormScope, QkvBias, Rope,
    RopeLayout, RopeRange, Temperature,
};
pub use synthetic::{SyntheticDtype, SyntheticLayer, SyntheticModel, SyntheticOptions};
pub use weights::{LayerWeights, MlaWeights, NormVectors, Projection};

pub(crate) use config::quoted_non_finite;
pub use config::read_config;
pub use keys::read_capped;
pub(crate) use shards::INDEX;
