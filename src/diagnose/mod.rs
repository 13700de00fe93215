//! Why a run diverges: growth of heads, errors of one sign, repeated maxima, and alarms, from the record of a run.
mod alarm;
mod alarms;
mod head;
mod loss;
mod options;
mod training;
mod trend;

pub use alarm::{Alarm, AlarmKind};
pub use alarms::Alarms;
pub use options::Options;
