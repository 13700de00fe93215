//! Options of a run.

use super::arithmetic::Arithmetic;
use super::remedy::Remedy;
use serde::Serialize;
use sigmascale::attention::{PvAccumulator, ShiftedSoftmax};
use sigmascale::{Error, Result};

/// What a run is made from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LowPrecisionOptions {
    /// Whose casts it has.
    pub arithmetic: Arithmetic,
    /// Remedy.
    pub remedy: Remedy,
    /// Seed of tokens, targets and batches.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Heads of the layer.
    pub heads: usize,
    /// The head whose V has one sign; `None`: no head has, and none fails.
    pub head: Option<usize>,
    /// The head that [`Remedy::F32Head`] and [`Remedy::F32WQ`] compute in f32.
    pub f32_head: usize,
    /// Learning rate after 100 steps of warm-up.
    pub rate: f32,
    /// How often a repeated token occurs; 1, 2 and 4 times have no tie to round.
    pub copies: usize,
    /// Keys after which the unnormalised output is rounded, in [`Arithmetic::Bf16`] alone; 64 holds every sequence of up to four
    /// copies.
    pub tile: usize,
    /// How far the shifted softmax exceeds a repeated maximum.
    pub beta: f32,
    /// Logits this close to the maximum repeat it, in nats.
    pub epsilon: f32,
}

impl Default for LowPrecisionOptions {
    fn default() -> Self {
        let ShiftedSoftmax { beta, epsilon, .. } = ShiftedSoftmax::default();
        Self {
            arithmetic: Arithmetic::Bf16,
            remedy: Remedy::None,
            seed: 0,
            steps: 1600,
            heads: 4,
            head: Some(2),
            f32_head: 2,
            rate: 1e-3,
            copies: 3,
            tile: 64,
            beta,
            epsilon,
        }
    }
}

impl LowPrecisionOptions {
    /// Checks every option.
    ///
    /// # Errors
    /// `is_argument`.
    pub fn check(&self) -> Result<()> {
        for (name, value, most) in
            [("steps", self.steps, 1_000_000), ("heads", self.heads as u64, 64), ("copies", self.copies as u64, 64)]
        {
            if !(1..=most).contains(&value) {
                return Err(Error::argument(format_args!("{name} {value} must lie between 1 and {most}")));
            }
        }
        for (name, head) in [("head", self.head.unwrap_or(0)), ("f32_head", self.f32_head)] {
            if head >= self.heads {
                let last = self.heads - 1;
                return Err(Error::argument(format_args!(
                    "{name} {head} must lie between 0 and {last}, the last head"
                )));
            }
        }
        if !self.remedy.is_for(self.arithmetic) {
            return Err(Error::argument(format_args!(
                "remedy {} changes nothing in the arithmetic {}: leave it out, or take bf16",
                self.remedy.name(),
                self.arithmetic.name()
            )));
        }
        if !(self.rate > 0.0 && self.rate.is_finite()) {
            return Err(Error::argument(format_args!("rate {} must be finite and greater than zero", self.rate)));
        }
        if !(self.beta > 1.0 && self.beta.is_finite()) {
            return Err(Error::argument(format_args!("beta {} must be finite and greater than 1", self.beta)));
        }
        if !(self.epsilon >= 0.0 && self.epsilon.is_finite()) {
            return Err(Error::argument(format_args!("epsilon {} must be finite and not negative", self.epsilon)));
        }
        PvAccumulator::Bf16 { tile: self.tile }.check()
    }
}
