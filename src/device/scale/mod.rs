//! Scales on the device: from weights where they lie to descales in device memory, a whole model at a time.
//!
//! [`ScaleEngine`] takes one table of layers when it is made and then only launches: no allocation, no synchronisation,
//! the caller's stream, capturable, deterministic (fixed partition, fixed order of every sum). Weights are read anew at
//! each call, so an update in place is seen.
//!
//! Layers may differ: those that share shape, rotation, norm and storage share their launches, and all write their results
//! into one set of buffers, layer after layer ([`ScaleEngine::heads`]). So do those of the power iterations.
//!
//! [`ShapeEngine`] is the same for weights that move, such as those that FSDP gathers anew for each forward: it is set up for the
//! shapes of layers, and each launch brings the addresses as a kernel parameter.
//!
//! [`EstimateEngine`] has the same results with norms from the paper's power iteration, as a baseline and a comparison.
//!
//! What it computes: what the CPU engine does, per channel `B = sqrt(d) ||w_c|| + |c_c|`, descale `(B + share A) / 448`; and
//! per head Grams, certified norms made of them by shifted squarings on tensor cores, and logit bounds. There is no state
//! between calls: the same weights give the same bits.

mod addresses;
mod bounds;
mod engine;
mod estimates;
mod grams;
mod group;
mod host;
mod layout;
mod mla;
mod norms;
mod partition;
mod power;
mod products;
mod qk_norm;
mod results;
mod shape;
mod shares;
mod storage;
mod tables;

pub use engine::ScaleEngine;
pub use estimates::EstimateEngine;
pub use grams::GramRoute;
pub use host::DeviceWeights;
pub use mla::{DeviceTensor, MlaEngine, MlaInput};
pub use power::{PowerEngine, PowerIteration, SummedPowerEngine};
pub use shape::ShapeEngine;
pub use tables::{ChannelStats, DeviceMatrix, Dtype, HeadGram, LayerInput, ProjectionInput, QkNormInput, QkNormSide};
