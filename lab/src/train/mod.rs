//! Trains small models with attention in E4M3 under the scales of any policy.
//!
//! ```text
//! parameters -> bounds -> plan -> E4M3 attention -> loss x S -> backward / S -> finite? -> clip -> AdamW -> parameters
//!                          ^ policy <- statistics                               otherwise: skip, S / 2, maybe go back
//! ```
//!
//! The graph and its gradients are candle's, on the CPU; attention is one node of it, with this crate's forward and
//! backward. Everything outside attention is f32, so that two runs differ only in their scales.
//!
//! | scenario | steps | what happens |
//! |---|---|---|
//! | `resume` | 300 + 30 | the run stops and continues: with everything, without the scaling state, with only the weights |
//! | `lr-spike` | 100 + 50 | the rate times 8 for 15 steps |
//!
//! **Each policy has its own run**, from the same parameters and text, next to one with attention in f32, the control. On
//! the control's trajectory all policies also plan in shadow: they see the same operands, and change nothing.
//!
//! **Casts** saturate, or make NaN of what is out of range. NaN reaches the loss, so that the step is skipped. A run in
//! which nothing overflows is the same either way, and is not run twice. The steps before the stop of `resume` have the first kind asked for.
//!
//! **Reproducible.** A run's bits follow from its options. Sums run in a fixed order whatever the number of threads.
//!
//! Sources: spectral-bounds paper, section 5.2; *Mixed Precision Training*, arXiv:1710.03740, section 3.2 (loss scaling).

mod language;
mod model;
mod op;
mod optimizer;
mod options;
mod scenario;
#[cfg(test)]
mod scenario_tests;
mod state;
#[cfg(test)]
mod tests;
mod trained;
mod trainer;

pub use language::{Batch, Language, VOCABULARY};
pub use model::ModelKind;
pub use optimizer::{AdamW, LossScale};
pub use options::{TrainOptions, Watchdog};
pub use scenario::{Arm, LabOptions, Peak, Spread, TrainResult, TrainRun, Training, run, run_with_progress};
pub use state::TrainState;
pub use trained::{TRAINED_STEPS, trained};
pub use trainer::{Observed, StepRecord, Trainer};

use sigmascale::Error;

/// An error of candle's graph as this crate's. Not a `From`: a second one would make `?` ambiguous in closures of other
/// modules.
fn failed(error: candle_core::Error) -> Error {
    Error::mismatch(format_args!("the training graph failed: {error}"))
}
