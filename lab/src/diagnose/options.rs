//! Thresholds of the alarms. Their defaults, and why, are in `docs/diagnose.md`.

use serde::{Deserialize, Serialize};
use sigmascale::{Error, Result};

/// Thresholds. An alarm is raised at the value given here for [`hold`](Self::hold) records in a row, and cleared below
/// half of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Largest |logit| that is still normal where Q and K are in BF16 or FP8; in F16 and f32 it is as much larger as
    /// these are finer ([`OperandFormat::resolution`](crate::history::OperandFormat::resolution)).
    pub logit_limit: f64,
    /// Records of a layer over which growth is estimated and medians are taken.
    pub window: usize,
    /// Records in a row that raise or clear an alarm.
    pub hold: usize,
    /// Growth of the norm of W_Q, as a part of the largest growth that steps of Adam can add up to.
    pub growth: f64,
    /// Rise of the share of rows with repeated maxima over the smallest that the head has shown (medians of windows),
    /// which must at least double.
    pub repeated: f64,
    /// Least mean |delta bias| of a window that counts.
    pub bias: f64,
    /// False alarms of the test of delta's sign per record of the model.
    pub false_alarms: f64,
    /// Mean entropy of the attention weights, in nats, at which it has collapsed.
    pub entropy: f64,
    /// Share of the values of Q, K and V out of the format's range.
    pub saturated: f64,
    /// Steps between two falls of the loss scale that belong together, and for which it must have been falling.
    pub loss_scale: u64,
    /// Share of skipped steps among the last 100.
    pub skipped: f64,
    /// Rise of the loss over its running median, as a part of the median; at least five robust standard deviations.
    pub loss: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            logit_limit: 1000.0,
            window: 24,
            hold: 3,
            growth: 0.3,
            repeated: 0.1,
            bias: 1e-4,
            false_alarms: 1e-6,
            entropy: 0.02,
            saturated: 1e-3,
            loss_scale: 100,
            skipped: 0.1,
            loss: 0.1,
        }
    }
}

impl Options {
    /// # Errors
    /// `is_argument` if a value breaks its rule.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("logit limit", self.logit_limit),
            ("growth", self.growth),
            ("bias", self.bias),
            ("entropy", self.entropy),
            ("loss", self.loss),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(Error::argument(format_args!("{name} {value} must be finite and greater than 0")));
            }
        }
        for (name, value) in [
            ("repeated", self.repeated),
            ("false alarms", self.false_alarms),
            ("saturated", self.saturated),
            ("skipped", self.skipped),
        ] {
            if !(value > 0.0 && value < 1.0) {
                return Err(Error::argument(format_args!("{name} {value} must lie between 0 and 1")));
            }
        }
        if self.window < 3 || self.window > 512 {
            return Err(Error::argument(format_args!("window {} must be at least 3 and at most 512", self.window)));
        }
        if self.hold == 0 || self.loss_scale == 0 {
            return Err(Error::argument("hold and loss scale must be at least 1"));
        }
        Ok(())
    }
}
