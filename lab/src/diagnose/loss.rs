//! What the optimizer's records show: the loss, its scale, skipped steps.

use super::alarm::AlarmKind;
use super::head::Finding;
use super::options::Options;
use super::trend::{Gate, Turn, location};
use crate::history::StepRecord;
use std::collections::VecDeque;

/// Losses of the running median, and steps over which skipped ones are counted.
const WINDOW: usize = 100;
/// Losses before the running median says anything.
const LEAST: usize = 30;
/// Robust standard deviations by which a loss must exceed the running median.
const DEVIATIONS: f64 = 5.0;
/// Losses in a row that raise or clear.
const HOLD: usize = 5;

/// The watch.
#[derive(Clone, Debug, Default)]
pub struct LossWatch {
    losses: VecDeque<f64>,
    spike: Gate,
    finite: Gate,
    steps: u64,
    skipped: VecDeque<bool>,
    skips: Gate,
    scale: Scale,
}

/// Falls of the loss scale with less than a given number of steps between them.
#[derive(Clone, Copy, Debug, Default)]
struct Scale {
    last: Option<f64>,
    /// Before the first fall.
    from: f64,
    first: Option<u64>,
    latest: u64,
    up: bool,
}

impl LossWatch {
    /// Takes in one step.
    pub fn observe(&mut self, record: &StepRecord, options: &Options) -> Vec<(AlarmKind, Turn, Finding)> {
        let mut found = Vec::new();
        let step = record.step;
        self.steps += 1;
        if let Some(loss) = record.loss {
            let bad = !loss.is_finite();
            let hold = if self.finite.up() { HOLD } else { 1 };
            if let Some(turn) = self.finite.observe(step, bad, !bad, hold) {
                let message = format!("the loss is {loss} at step {step}");
                found.push((AlarmKind::NonFiniteLoss, turn, Finding { value: loss, limit: f64::MAX, message }));
            }
            if !bad {
                found.extend(
                    self.spike(step, loss, options).map(|(turn, finding)| (AlarmKind::LossSpike, turn, finding)),
                );
            }
        }
        if let Some((turn, finding)) = record.loss_scale.and_then(|scale| self.scale.observe(step, scale, options)) {
            found.push((AlarmKind::LossScale, turn, finding));
        }
        found.extend(self.skip(record, options).map(|(turn, finding)| (AlarmKind::SkippedSteps, turn, finding)));
        found
    }

    /// After a restored checkpoint.
    pub fn restart(&mut self) {
        self.losses.clear();
    }

    fn spike(&mut self, step: u64, loss: f64, options: &Options) -> Option<(Turn, Finding)> {
        let known = self.losses.len() >= LEAST;
        let (median, deviation) = location(self.losses.iter().copied()).filter(|_| known).unwrap_or((loss, 0.0));
        let margin = (DEVIATIONS * deviation).max(options.loss * median.abs());
        let high = loss > median + margin;
        // A loss that stays high must not become the norm.
        if !high {
            if self.losses.len() >= WINDOW {
                self.losses.pop_front();
            }
            self.losses.push_back(loss);
        }
        let turn = self.spike.observe(step, known && high, loss <= median + 0.5 * margin, HOLD)?;
        let message = format!(
            "the loss {loss:.4} is above its running median {median:.4} by more than {margin:.4}, for {HOLD} steps"
        );
        Some((turn, Finding { value: loss, limit: median + margin, message }))
    }

    fn skip(&mut self, record: &StepRecord, options: &Options) -> Option<(Turn, Finding)> {
        // Dynamic scaling finds its scale by skipping: the first steps do not count.
        if self.steps <= WINDOW as u64 {
            return None;
        }
        if self.skipped.len() >= WINDOW {
            self.skipped.pop_front();
        }
        self.skipped.push_back(record.skipped);
        let count = self.skipped.iter().filter(|skipped| **skipped).count();
        let share = count as f64 / WINDOW as f64;
        let turn = self.skips.observe(record.step, share > options.skipped, share < 0.5 * options.skipped, 1)?;
        let message = format!("the optimizer skipped {count} of the last {WINDOW} steps");
        Some((turn, Finding { value: share, limit: options.skipped, message }))
    }
}

impl Scale {
    fn observe(&mut self, step: u64, scale: f64, options: &Options) -> Option<(Turn, Finding)> {
        let gap = options.loss_scale;
        let last = self.last.replace(scale)?;
        let falls = scale < last || scale.is_nan();
        if falls {
            if self.first.is_none() || step.saturating_sub(self.latest) >= gap {
                (self.first, self.from) = (Some(step), last);
            }
            self.latest = step;
        } else if scale > last {
            self.first = None;
        }
        let lasted = self.first.map_or(0, |first| self.latest.saturating_sub(first));
        let turn = match self.up {
            false if falls && lasted >= gap => Turn::Raised(self.first.unwrap_or(step)),
            true if self.first.is_none() || step.saturating_sub(self.latest) >= gap.saturating_mul(2) => Turn::Cleared,
            _ => return None,
        };
        self.up = !self.up;
        let from = self.from;
        let message = format!("the loss scale has been falling for {lasted} steps, from {from} to {scale}");
        Some((turn, Finding { value: lasted as f64, limit: gap as f64, message }))
    }
}
