//! What a policy remembers between two steps.

use super::shape::PolicyShape;
use super::table::PolicyConfig;
use serde::{Deserialize, Serialize};

/// Version of a [`PolicyState`]; any other is refused.
pub const STATE_VERSION: u32 = 1;

/// A policy's state between two steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyState {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// Parameters.
    pub config: PolicyConfig,
    /// Model shape.
    pub shape: PolicyShape,
    /// What was learned.
    pub memory: Memory,
}

/// What a policy remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Memory {
    /// Nothing: every plan comes from the step's own bounds or measurement.
    None,
    /// Burn-in and constants.
    AutoC(AutoCState),
    /// Histories.
    DelayedPaper(DelayedState<PaperSlot>),
    /// Histories and scales.
    DelayedTe(DelayedState<TeSlot>),
}

impl PolicyState {
    /// What a policy of this shape remembers.
    pub(crate) fn new(config: PolicyConfig, shape: &PolicyShape, memory: Memory) -> Self {
        Self { version: STATE_VERSION, config, shape: shape.clone(), memory }
    }
}

/// What `auto-c` remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoCState {
    /// Burn-in steps taken in by each layer.
    pub seen: Vec<u32>,
    /// Restarts so far.
    pub restarts: u32,
    /// Pools of logits, q, k and v.
    pub pools: [Vec<RatioPool>; 4],
}

/// One pool: its phase, and the largest ratios seen, as many as decide the order statistic, largest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatioPool {
    /// Its phase.
    pub phase: Phase,
    /// Largest ratios, descending.
    pub top: Vec<f64>,
}

/// Phase of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Phase {
    /// Observing; the worst-case bound is used.
    BurnIn,
    /// `c` times the bound is used.
    Frozen {
        /// The constant.
        c: f64,
    },
    /// An overflow under `c` brought the worst-case bound back.
    FellBack {
        /// The constant given up.
        c: f64,
    },
    /// The worst-case bound is used.
    Forbidden {
        /// Why.
        reason: Forbidden,
    },
}

impl Phase {
    /// Multiplier of the worst-case bound.
    pub fn c(self) -> f64 {
        match self {
            Self::Frozen { c } => c,
            _ => 1.0,
        }
    }
}

/// Why no constant is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Forbidden {
    /// More restarts than allowed: what is observed does not last.
    TooManyRestarts,
    /// Every observed value was zero: nothing to scale by.
    NothingObserved,
}

/// The slots of every layer, tensors in the order of [`ScaledTensor::ALL`](super::ScaledTensor::ALL): one per tensor, or one per head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelayedState<S> {
    /// `layers` entries.
    pub layers: Vec<[Vec<S>; 5]>,
}

/// The last maxima of one tensor, oldest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PaperSlot {
    /// Always full.
    pub history: Vec<f32>,
}

/// One tensor's `scale` and `amax_history`, in TransformerEngine's order: slot 0 is where the running step writes, then
/// the oldest to the newest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TeSlot {
    /// Quantization scale of the next step.
    pub scale: f32,
    /// amax of earlier steps.
    #[serde(with = "super::exact::row")]
    pub history: Vec<f32>,
}
