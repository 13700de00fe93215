//! Why a run diverges, from its record: which head went wrong first, what to do, and alarms while the run goes on.
//!
//! [`Alarms`] takes in a run's records one by one and raises and clears alarms with hysteresis. [`Diagnosis`] does the
//! same with a whole record and adds the state of every head. [`read_checkpoints`] makes a record of saved weights.
//!
//! What each alarm means, its threshold and how that was chosen: `docs/diagnose.md`. A record that raises none proves
//! nothing: only what was recorded can be seen.

mod advice;
mod alarm;
mod alarms;
mod checkpoints;
mod diagnosis;
mod folder;
mod head;
mod loss;
mod options;
mod training;
mod trend;

pub use advice::Advice;
pub use alarm::{Alarm, AlarmKind};
pub use alarms::Alarms;
pub use checkpoints::read_checkpoints;
pub use diagnosis::{Diagnosis, HeadReport, LOSS_RISE, LOSS_WINDOW, RunVerdict, Span, loss_shows};
pub use folder::in_output_folder;
pub use options::Options;

#[cfg(test)]
mod tests;
