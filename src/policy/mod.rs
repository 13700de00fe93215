//! Where the scales of a step come from.
//!
//! A [`Policy`] turns a layer's bounds into a [`ScalePlan`](crate::plan::ScalePlan) before the attention call and learns from the call's
//! [`StepStats`](crate::stats::StepStats) after it. It never sees a tensor, and it plans without changing its state, so that a saved and restored
//! policy plans the same bits.
//!
//! | name | descales come from | before the first step |
//! |---|---|---|
//! | `geometry` | the worst-case bounds | nothing is needed |
//! | `geometry-c-star` | logits: the paper's `c_star` bound, see [`ISOTROPY`]; operands: as `geometry` | nothing is needed |
//! | `auto-c` | Algorithm 4: as `geometry` for a burn-in, then `c` times its bounds | burn-in |
//! | `delayed-paper` | Eq. 1: `max(history) / (448 margin)`, 16 steps | a history of ones |
//! | `delayed-te` | TransformerEngine's delayed scaling, 1024 steps | scale 1, amax 0 |
//! | `current` | this step's own amax | nothing is needed |
//!
//! By default the observing policies keep one scale per tensor and layer, like the frameworks that they follow.

mod auto_c;
mod build;
mod contract;
mod current;
mod delayed;
mod differs;
mod exact;
mod geometry;
mod report;
mod shape;
mod table;
mod tensor;
#[cfg(test)]
mod tests;

pub use auto_c::AutoC;
pub use contract::Policy;
pub use current::Current;
pub use delayed::{Delayed, DelayedPaper, DelayedTe, Slot};
pub use differs::{differences, differs};
pub use geometry::{Geometry, ISOTROPY};
pub use report::{PolicyEvent, Report, Restart, Slack, TensorReport};
pub use shape::{LayerShape, PolicyShape};
pub use table::{
    AmaxAlgorithm, AutoCConfig, AutoCState, CurrentConfig, DelayedPaperConfig, DelayedState, DelayedTeConfig,
    Forbidden, GeometryConfig, Memory, PaperSlot, Phase, PolicyConfig, PolicyKind, PolicyState, Pooling, RatioPool,
    STATE_VERSION, TeSlot,
};
pub use tensor::ScaledTensor;
