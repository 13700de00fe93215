//! What is watched of one query head.

use super::alarm::AlarmKind;
use super::options::Options;
use super::trend::{Gate, LogWindow, Signs, Turn, median};
use crate::history::LayerRecord;
use std::collections::VecDeque;

/// An alarm is cleared below this part of what raises it.
const CLEAR: f64 = 0.5;
/// Fewest points of a growth that can raise an alarm.
const POINTS: usize = 6;
/// Growth that needs no comparison with the other heads, in units of the one that does.
const ALONE: f64 = 3.0;
/// Largest part of the range that still rounds to 448.
const RANGE: f64 = 464.0 / 448.0;

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

/// The watch.
#[derive(Clone, Debug, Default)]
pub struct Head {
    w_q: LogWindow,
    sigma: LogWindow,
    logits: LogWindow,
    exponent: Option<f64>,
    repeated: VecDeque<f64>,
    /// Smallest median of a whole window.
    least_repeated: Option<f64>,
    bias: VecDeque<f64>,
    signs: Signs,
    entropy: f64,
    gates: [Gate; AlarmKind::ALL.len()],
}

impl Head {
    /// Takes in a record of its layer; `training` is what has been trained by then, `evidence` what the test of signs needs.
    pub fn push(&mut self, record: &LayerRecord, head: usize, training: f64, evidence: f64, options: &Options) {
        let (step, window) = (record.step as f64, options.window);
        let of = |values: &[f64]| values.get(head).copied();
        for (to, from) in
            [(&mut self.w_q, &record.w_q), (&mut self.sigma, &record.sigma), (&mut self.logits, &record.logit_max)]
        {
            to.push(step, training, of(from).unwrap_or(f64::NAN), window);
        }
        // A product of two factors that both grow in proportion grows with the square.
        self.exponent = match self.w_q.len() {
            0 => self.sigma.exponent().map(|exponent| 0.5 * exponent),
            _ => self.w_q.exponent(),
        };
        if let Some(share) = of(&record.repeated).filter(|share| share.is_finite()) {
            keep(&mut self.repeated, share, window);
        }
        if let Some(bias) = of(&record.delta_bias) {
            self.signs.push(bias, evidence);
            keep(&mut self.bias, bias.abs(), window);
        }
        self.entropy = self.entropy.max(of(&record.entropy).unwrap_or(0.0));
    }

    /// Growth against the training done; `None` with too few points.
    pub fn exponent(&self) -> Option<f64> {
        self.exponent.filter(|_| self.w_q.len().max(self.sigma.len()) >= POINTS)
    }

    /// What the record just taken in raises or clears, given median and deviation of every head's exponent.
    pub fn judge(
        &mut self,
        record: &LayerRecord,
        head: usize,
        others: Option<(f64, f64)>,
        evidence: f64,
        options: &Options,
    ) -> Vec<(AlarmKind, Turn, Finding)> {
        let step = record.step;
        let of = |values: &[f64]| values.get(head).copied();
        let mut found = Vec::new();
        let mut gate =
            |kind: AlarmKind, value: f64, limit: f64, low: bool, hold: usize, message: &dyn Fn() -> String| {
                let turn = self.gates[kind as usize].observe(step, value >= limit, low, hold);
                found.extend(turn.map(|turn| (kind, turn, Finding { value, limit, message: message() })));
            };
        let hold = options.hold;

        if self.bias.len() >= 3 {
            let size = median(&mut self.bias.iter().copied().collect::<Vec<_>>()).unwrap_or(0.0);
            let sum = self.signs.evidence();
            let value = if size >= options.bias { sum } else { sum.min(0.0) };
            gate(AlarmKind::DeltaBias, value, evidence, sum <= 0.0, 1, &|| {
                let sign = if self.signs.is_positive() { "positive" } else { "negative" };
                format!(
                    "the error of delta keeps its {sign} sign, {size:.1e} of the sum of |delta| a step, so that it adds up \
                     instead of canceling"
                )
            });
        }
        if let Some(share) = of(&record.repeated).filter(|share| share.is_finite()) {
            let middle = median(&mut self.repeated.iter().copied().collect::<Vec<_>>()).unwrap_or(share);
            let whole = self.repeated.len() >= options.window;
            let least = self.least_repeated;
            let rise = least.map_or(0.0, |least| share - least);
            let far = least.is_some_and(|least| share >= 2.0 * least);
            let value = if far || rise < options.repeated { rise } else { 0.0 };
            gate(AlarmKind::RepeatedMaxima, value, options.repeated, rise < CLEAR * options.repeated, hold, &|| {
                let (now, before) = (100.0 * share, 100.0 * least.unwrap_or(0.0));
                format!("{now:.1} % of the rows reach their maximum at several keys, up from {before:.1} %")
            });
            if whole {
                self.least_repeated = Some(least.map_or(middle, |least| least.min(middle)));
            }
        }
        let saturated = of(&record.saturated).filter(|share| share.is_finite());
        if let Some(share) = saturated {
            let low = share < CLEAR * options.saturated;
            gate(AlarmKind::Saturation, share, options.saturated, low, hold, &|| {
                format!("{:.2} % of the values of Q, K and V leave the FP8 range", 100.0 * share)
            });
        } else if let Some(used) = of(&record.utilization) {
            gate(AlarmKind::Saturation, used, RANGE, used <= 1.0, hold, &|| {
                format!("the largest value of Q, K or V is {used:.2} times the FP8 range")
            });
        }
        if let Some(exponent) = self.exponent.filter(|_| self.w_q.len().max(self.sigma.len()) >= POINTS) {
            let far = others.is_some_and(|(middle, deviation)| exponent >= middle + options.outlier * deviation);
            let limit = if far { options.growth } else { ALONE * options.growth };
            let (grown, name) = if self.w_q.len() > 0 { (&self.w_q, "W_Q") } else { (&self.sigma, "W_Q W_K^T") };
            gate(AlarmKind::Growth, exponent, limit, exponent < CLEAR * options.growth, hold, &|| {
                let rate = grown.rate().unwrap_or(0.0);
                let doubling =
                    if rate > 0.0 { format!(", doubling in {:.0} steps", 2f64.ln() / rate) } else { String::new() };
                let middle =
                    others.map_or(String::new(), |(middle, _)| format!("; the median of all heads is {middle:.2}"));
                format!("the norm of {name} grows as the training done to the power {exponent:.2}{doubling}{middle}")
            });
        }
        if let Some(logit) = of(&record.logit_max) {
            let low = logit < 0.8 * options.logit_limit;
            gate(AlarmKind::LogitLimit, logit, options.logit_limit, low, hold, &|| {
                format!("the largest logit is {logit:.1}, above {}", options.logit_limit)
            });
            if let Some(bound) = of(&record.bound).filter(|bound| bound.is_finite()) {
                let limit = bound * (1.0 + 1e-6);
                gate(AlarmKind::BoundExceeded, logit, limit, logit <= bound, 1, &|| {
                    format!(
                        "the largest logit {logit:.3} exceeds its certified bound {bound:.3}: the bound is of other weights, or the \
                         input of the projections is not normalized"
                    )
                });
            }
        }
        if let Some(entropy) = of(&record.entropy).filter(|entropy| entropy.is_finite()) {
            let before = self.entropy;
            // A larger value is worse, as everywhere.
            let value = if before >= 10.0 * options.entropy { -entropy } else { f64::NEG_INFINITY };
            gate(AlarmKind::EntropyCollapse, value, -options.entropy, entropy > 2.0 * options.entropy, hold, &|| {
                format!("the mean entropy of the attention weights fell to {entropy:.1e} nats, from up to {before:.2}")
            });
        }
        found
    }

    /// After a restored checkpoint: growth starts anew, what was raised stays up until it clears.
    pub fn restart(&mut self) {
        for window in [&mut self.w_q, &mut self.sigma, &mut self.logits] {
            window.clear();
        }
        self.exponent = None;
        (self.repeated, self.bias, self.signs) = Default::default();
    }
}

fn keep(values: &mut VecDeque<f64>, value: f64, window: usize) {
    while values.len() >= window {
        values.pop_front();
    }
    values.push_back(value);
}
