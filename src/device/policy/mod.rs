//! Scaling policies on the device: bounds and observed statistics in, descales out, all in device memory.
//!
//! - [`PolicyEngine`] is the launches: one policy's memory for every layer of a model and the kernels that read it.
//! - [`DevicePlan`] is the policy as the host knows it: the same [`PolicyConfig`](crate::policy::PolicyConfig), the same
//!   saved state and the same bits as the host's policy, with its memory on the device.

mod engine;
mod plan;
mod setup;
mod state;
mod table;

pub use engine::{BoundSource, PolicyEngine, PolicyMemory, phase, status};
pub use plan::{Bounds, DevicePlan};
pub use setup::{PolicySetup, Pool, Rule, TENSORS};
pub use table::SlackWords;
