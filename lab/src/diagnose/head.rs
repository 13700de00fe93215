//! What is watched of one query head.

use super::alarm::AlarmKind;
use super::options::Options;
use super::trend::{Gate, Signs, Turn, Window};
use crate::history::LayerRecord;

/// An alarm is cleared below this part of what raises it.
const CLEAR: f64 = 0.5;
/// Largest part of the range that still rounds to 448.
const RANGE: f64 = 464.0 / 448.0;
/// Growth between two records, in units of the largest that Adam explains, after which the weights are others: with
/// beta_2 = 0.999 a single step can be 3.2 times the rate (Kingma and Ba, 2015, section 2.1).
const JUMP: f64 = 4.0;
/// Entropy, in units of its limit, that a head must have had before it can collapse.
const SPREAD: f64 = 10.0;

/// What was found, for an alarm.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The quantity.
    pub value: f64,
    /// Its threshold.
    pub limit: f64,
    /// What was seen, without the head.
    pub message: String,
}

/// The state of a run when a record is taken in.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Sum of the learning rates so far, where known.
    pub training: Option<f64>,
    /// `sqrt(head_dim width)`: the largest growth of the norm of W_Q per unit of that sum.
    pub reach: Option<f64>,
    /// What the test of signs needs.
    pub evidence: f64,
    /// Fewest points of the growth of W_Q.
    pub points: usize,
    /// Least steps between two of them.
    pub spacing: u64,
    /// Largest |logit| that is still normal in the layer's format.
    pub logit_limit: f64,
}

/// The watch.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// Norm of W_Q in units of `reach`, against the training done.
    w_q: Window,
    /// Step of its latest point.
    grown: Option<u64>,
    /// Square root of the largest logit, or of its bound, against the step: linear while W_Q and W_K grow at constant
    /// rates.
    logits: Window,
    repeated: Window,
    /// Smallest median of a whole window.
    least_repeated: Option<f64>,
    bias: Window,
    signs: Signs,
    entropy: f64,
    gates: [Gate; AlarmKind::ALL.len()],
    growth: Option<f64>,
}

impl Head {
    /// Takes in a record of its layer; returns what it raises or clears.
    pub fn observe(
        &mut self,
        record: &LayerRecord,
        head: usize,
        context: Context,
        options: &Options,
    ) -> Vec<(AlarmKind, Turn, Finding)> {
        let (step, hold, window) = (record.step, options.hold, options.window);
        let of = |values: &[f64]| values.get(head).copied().filter(|value| !value.is_nan());
        let mut found = Vec::new();
        let mut gate = |kind: AlarmKind, value: f64, limit: f64, low: bool, hold: usize, say: &dyn Fn() -> String| {
            let turn = self.gates[kind as usize].observe(step, value >= limit, low, hold);
            found.extend(turn.map(|turn| (kind, turn, Finding { value, limit, message: say() })));
        };

        if let Some(bias) = of(&record.delta_bias).filter(|bias| bias.is_finite()) {
            self.signs.push(step, bias, context.evidence);
            self.bias.push(step as f64, bias.abs(), window);
            let size = self.bias.median().unwrap_or(0.0);
            let (sum, signs) = (self.signs.evidence(), self.signs);
            let value = if size >= options.bias { sum } else { 0.0 };
            gate(AlarmKind::DeltaBias, value, context.evidence, sum <= 0.0, 1, &|| {
                let sign = if signs.is_positive() { "positive" } else { "negative" };
                format!(
                    "the error of delta has been {sign} since step {}, with a median of {size:.1e} of the sum of \
                     |delta|, so it adds up instead of canceling",
                    signs.since()
                )
            });
        }
        if let Some(share) = of(&record.repeated) {
            self.repeated.push(step as f64, share, window);
            let least = self.least_repeated.unwrap_or(share);
            let rise = share - least;
            let value = if share >= 2.0 * least { rise } else { 0.0 };
            gate(AlarmKind::RepeatedMaxima, value, options.repeated, rise < CLEAR * options.repeated, hold, &|| {
                let (now, before) = (100.0 * share, 100.0 * least);
                format!("{now:.1} % of the rows reach their maximum at several keys, up from {before:.1} %")
            });
            if let Some(middle) = self.repeated.median().filter(|_| self.repeated.len() >= window) {
                self.least_repeated = Some(self.least_repeated.map_or(middle, |least| least.min(middle)));
            }
        }
        if let Some(share) = of(&record.saturated) {
            let low = share < CLEAR * options.saturated;
            gate(AlarmKind::Saturation, share, options.saturated, low, hold, &|| {
                format!("{:.2} % of the values of Q, K and V leave the FP8 range", 100.0 * share)
            });
        } else if let Some(used) = of(&record.utilization) {
            gate(AlarmKind::Saturation, used, RANGE, used <= 1.0, hold, &|| {
                format!("the largest value of Q, K or V is {used:.2} times the FP8 range")
            });
        }
        let spaced = self.grown.is_none_or(|last| step.abs_diff(last) >= context.spacing);
        if let (Some(norm), Some(reach), Some(training), true) =
            (of(&record.w_q), context.reach, context.training, spaced)
        {
            let norm = norm / reach;
            if self.w_q.last().is_some_and(|(before, last)| (norm - last).abs() > JUMP * (training - before)) {
                self.w_q.clear();
            }
            self.w_q.push(training, norm, window);
            self.grown = Some(step);
            self.growth = self.w_q.slope(context.points);
            if let Some(share) = self.growth {
                gate(AlarmKind::Growth, share, options.growth, share < CLEAR * options.growth, hold, &|| {
                    format!(
                        "the norm of W_Q grows at {:.0} % of the largest rate that the learning rate allows: the \
                         updates point in one direction",
                        100.0 * share
                    )
                });
            }
        }
        let (logit, bound) = (of(&record.logit_max), of(&record.bound));
        self.logits.push(step as f64, logit.or(bound).unwrap_or(f64::NAN).sqrt(), window);
        if let Some(logit) = logit {
            let limit = context.logit_limit;
            gate(AlarmKind::LogitLimit, logit, limit, logit < CLEAR * limit, hold, &|| {
                format!("the largest logit is {logit:.1}, above the limit of {limit}")
            });
            if let Some(bound) = bound.filter(|bound| bound.is_finite()) {
                // Above the bound: a head of zeros has a largest logit of 0, and that bound.
                let limit = (bound + 1e-6 * bound.abs()).next_up();
                gate(AlarmKind::BoundExceeded, logit, limit, logit <= bound, 1, &|| {
                    format!(
                        "the largest logit {logit:.3} exceeds its certified bound {bound:.3}: the bound is of other \
                         weights, or the input of the projections is not normalized"
                    )
                });
            }
        }
        if let Some(entropy) = of(&record.entropy).filter(|entropy| entropy.is_finite()) {
            let before = self.entropy;
            self.entropy = before.max(entropy);
            // A larger value is worse, as everywhere.
            let value = if before >= SPREAD * options.entropy { -entropy } else { f64::NEG_INFINITY };
            gate(AlarmKind::EntropyCollapse, value, -options.entropy, entropy > 2.0 * options.entropy, hold, &|| {
                format!("the mean entropy of the attention weights fell to {entropy:.1e} nats, from up to {before:.2}")
            });
        }
        found
    }

    /// Step since which delta's error has kept its sign.
    pub fn biased_since(&self) -> u64 {
        self.signs.since()
    }

    /// Growth of the norm of W_Q, as a part of the largest that the learning rate allows.
    pub fn growth(&self) -> Option<f64> {
        self.growth
    }

    /// The step at which the largest logit (its bound, where none is recorded) reaches a limit if its square root goes
    /// on as it does; `None` while it does not grow, and where it has passed it.
    pub fn reaches(&self, limit: f64) -> Option<u64> {
        let (slope, (step, root)) = (self.logits.slope(2)?, self.logits.last()?);
        let left = (limit.sqrt() - root) / slope;
        (slope > 0.0 && left > 0.0 && left < 1e12).then(|| (step + left).ceil() as u64)
    }

    /// After a restored checkpoint: trends start anew, what was raised stays up until it clears.
    pub fn restart(&mut self) {
        for window in [&mut self.w_q, &mut self.logits, &mut self.repeated, &mut self.bias] {
            window.clear();
        }
        (self.signs, self.growth, self.grown) = (Signs::default(), None, None);
    }
}
