//! An alarm as a value.

use serde::Serialize;

sigmascale::named! {
    /// What an alarm is about, causes before their consequences.
    #[derive(PartialOrd, Ord)]
    pub enum AlarmKind is "alarm" {
        /// Delta has an error of one sign.
        DeltaBias = "delta-bias",
        /// More and more rows reach their maximum at several keys.
        RepeatedMaxima = "repeated-maxima",
        /// Values of Q, K or V leave the FP8 range.
        Saturation = "saturation",
        /// The updates of a head's W_Q point in one direction, so that its norm grows nearly as fast as the rate allows.
        Growth = "growth",
        /// The largest logit reached the limit.
        LogitLimit = "logit-limit",
        /// A logit above its certified bound.
        BoundExceeded = "bound-exceeded",
        /// A head attends to one key per row.
        EntropyCollapse = "entropy-collapse",
        /// The loss scale keeps falling.
        LossScale = "loss-scale",
        /// The optimizer skips many steps.
        SkippedSteps = "skipped-steps",
        /// The loss is above its running median.
        LossSpike = "loss-spike",
        /// The loss is NaN or infinite.
        NonFiniteLoss = "non-finite-loss",
    }
}

/// Loss scaling, and steps that are skipped where gradients overflow.
pub(super) const LOSS_SCALING: &str = "Mixed Precision Training, arXiv:1710.03740, section 3.2";

impl AlarmKind {
    /// Where the quantity and its meaning come from.
    pub fn source(self) -> &'static str {
        match self {
            Self::DeltaBias => "\"Why Low-Precision Transformer Training Fails\", section 3.3.1, Claim 2",
            Self::RepeatedMaxima => {
                "\"Why Low-Precision Transformer Training Fails\", section 3.3.2, Claim 3 and Figure 13"
            }
            Self::Saturation => "FP8 Formats for Deep Learning, arXiv:2209.05433",
            Self::Growth => "\"Why Low-Precision Transformer Training Fails\", section 3.3.1 and Figure 11",
            Self::LogitLimit => "Kimi K2, arXiv:2507.20534, section 2.1",
            Self::BoundExceeded => "docs/bounds.md",
            Self::EntropyCollapse => "Zhai et al., 2023, arXiv:2303.06296",
            Self::LossScale => LOSS_SCALING,
            Self::SkippedSteps => LOSS_SCALING,
            Self::LossSpike => "PaLM, arXiv:2204.02311, section 5.1",
            Self::NonFiniteLoss => "docs/monitoring.md, what the guard does",
        }
    }
}

/// An alarm that was raised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alarm {
    /// What it is about.
    pub kind: AlarmKind,
    /// The model's own number of the layer, if it concerns one.
    pub layer: Option<usize>,
    /// Query head, if it concerns one.
    pub head: Option<usize>,
    /// First step that was out of order; the alarm was raised when that had lasted.
    pub since: u64,
    /// Step at which it was raised.
    pub raised: u64,
    /// Step at which it was cleared; null while it is up.
    pub cleared: Option<u64>,
    /// The quantity when it was raised.
    pub value: f64,
    /// The threshold.
    pub limit: f64,
    /// One sentence.
    pub message: String,
    /// Where the quantity and its meaning come from.
    pub source: &'static str,
}
