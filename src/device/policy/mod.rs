//! Scaling policies with bounds, memory and descales in device memory.
//!
//! [`PolicyEngine`] is any of the six policies of [`crate::policy`]: the same [`PolicyConfig`](crate::policy::PolicyConfig), the
//! same saved [`PolicyState`](crate::policy::PolicyState), and for the same bounds and statistics the same bits, so a run may
//! move between host and device at any step.
//!
//! ```text
//! update_bounds     after the weights changed     one read of W_Q, W_K, W_V
//! plan              before the attention calls    `current`: after the measurement of this step
//! (the calls)       read descales(layer, tensor), add to stats(layer)
//! observe           after the calls               updates memory and status, clears the statistics
//! ```
//!
//! Once made, an engine only launches: no allocation, no synchronization, on the caller's stream, capturable in a CUDA graph;
//! descales keep their addresses. What the host reports as an event is a bit of the layer's [`status`] word.

mod engine;
mod memory;
mod table;

pub use engine::{BoundSource, PolicyEngine};

/// Bits of a layer's status word. They stay until [`PolicyEngine::clear_status`].
pub mod status {
    /// A value passed 448 times its descale.
    pub const OVERFLOW: u32 = 1;
    /// A value was NaN or infinite.
    pub const NON_FINITE: u32 = 2;
    /// A value exceeded its worst-case bound: the bounds are of other weights.
    pub const BEYOND_BOUND: u32 = 4;
    /// auto-c: a constant was given up.
    pub const FELL_BACK: u32 = 8;
    /// delayed-te: an amax too small for a finite scale.
    pub const TINY: u32 = 16;
    /// A descale is NaN: its bound or measurement is not finite.
    pub const NO_PLAN: u32 = 32;
}
