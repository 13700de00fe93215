//! Scales on the device: from weights where they lie to descales in device memory, a whole model at a time.
//!
//! [`ScaleEngine`] takes one table of layers when it is made and then only launches: no allocation, no synchronisation,
//! the caller's stream, capturable, deterministic (fixed partition, fixed order of every sum). Weights are read anew at
//! each call, so an update in place is seen.
//!
//! What it computes: `math` sections 2 and 5 as the CPU engine does, per channel
//! `B = sqrt(d) ||w_c|| + |c_c|`, descale `(B + A/32) / 448`; and per head Grams for the logit bounds.

mod bounds;
mod engine;
mod grams;
mod host;
mod power;
mod tables;

pub use engine::ScaleEngine;
pub use grams::GramRoute;
pub use host::{DeviceWeights, HostLayer, HostProjection};
pub use power::PowerEngine;
pub use tables::{ChannelStats, DeviceMatrix, Dtype, HeadBound, HeadGram, LayerInput, ProjectionInput};
