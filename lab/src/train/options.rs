//! What a training run is made from, and the rules of each option.

use super::model::{ModelKind, POSITIONS};
use super::optimizer::AdamW;
use super::state::Identity;
use crate::stress::Mode;
use sigmascale::attention::{BackwardPrecision, Cast, Delta, Precision, PvAccumulator, Rounding};
use sigmascale::bound::Tail;
use sigmascale::fp8::OnOverflow;
use sigmascale::policy::PolicyConfig;
use sigmascale::runtime::RuntimeConfig;
use sigmascale::spectral::{Estimator, Iterations};
use sigmascale::{Error, Result};

/// What a run is made from.
#[derive(Clone, Copy, Debug)]
pub struct TrainOptions {
    /// Model.
    pub model: ModelKind,
    /// Policy; `None` is attention in f32, the control.
    pub policy: Option<PolicyConfig>,
    /// What is cast.
    pub mode: Mode,
    /// How P V is summed in [`Mode::Operands`]: [`PvAccumulator::F32`] sums in f32 throughout, the others as Hopper's tensor
    /// cores do, Q K^T too.
    pub accumulator: PvAccumulator,
    /// What the backward pass takes delta from; the control always takes it from P and dP.
    pub delta: Delta,
    /// The FP8 format of q, k and v in [`Mode::Operands`].
    pub operands: Cast,
    /// Whether q, k and v are rounded up or down at random, so that the mean is kept, in [`Mode::Operands`].
    pub stochastic: bool,
    /// What a value out of range becomes.
    pub casts: OnOverflow,
    /// Seed of parameters and text.
    pub seed: u64,
    /// Sequences of a step.
    pub batch: usize,
    /// Tokens of a sequence, at most 64.
    pub seq_len: usize,
    /// Learning rate.
    pub rate: f64,
    /// Steps over which the rate rises from zero at the start.
    pub warm_up: u32,
    /// Optimizer.
    pub optimizer: AdamW,
    /// Largest norm of all gradients together.
    pub clip: f64,
    /// Union bound of `geometry-c-star`; it must cover the sequences and tokens of a step.
    pub tail: Tail,
    /// What is done about steps that are not finite.
    pub watchdog: Watchdog,
    /// Deviation of the biases of q and k at the start; only GPT-2 has them.
    pub bias: f32,
    /// Whether every step also compares attention with f32 on the same operands.
    pub compare: bool,
    /// Where norms come from, for the policies that plan from bounds.
    pub estimator: Estimator,
    /// Iterations of a step, if they are estimated.
    pub iterations: Iterations,
}

impl TrainOptions {
    /// The defaults of the scenarios.
    pub fn new(model: ModelKind, policy: Option<PolicyConfig>) -> Self {
        Self {
            model,
            policy,
            mode: Mode::Logit,
            accumulator: PvAccumulator::F32,
            delta: Delta::default(),
            operands: Cast::E4m3,
            stochastic: false,
            casts: OnOverflow::Saturate,
            seed: 0,
            batch: 4,
            seq_len: POSITIONS,
            rate: 3e-3,
            warm_up: 10,
            optimizer: AdamW::default(),
            clip: 1.0,
            tail: Tail { seq_len: POSITIONS, batch: 4, ..Tail::default() },
            watchdog: Watchdog::default(),
            bias: 0.0,
            compare: true,
            estimator: Estimator::Gram,
            iterations: Iterations::default(),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        for (name, value, most) in [("batch", self.batch, 4096), ("seq_len", self.seq_len, POSITIONS)] {
            if !(1..=most).contains(&value) {
                return Err(Error::argument(format_args!("{name} {value} must lie between 1 and {most}")));
            }
        }
        if self.mode == Mode::Logit && self.accumulator != PvAccumulator::F32 {
            return Err(Error::argument(format_args!(
                "accumulator {} needs the mode operands: in the mode logit P and V are not cast",
                self.accumulator
            )));
        }
        if self.operands.fp8().is_none() {
            return Err(Error::argument(format_args!("operands {:?} are not in an FP8 format", self.operands)));
        }
        let other = self.stochastic || self.operands != Cast::E4m3;
        if other && (self.mode == Mode::Logit || self.accumulator != PvAccumulator::F32) {
            return Err(Error::argument(
                "another format than E4M3 and stochastic rounding need the mode operands and the accumulator f32",
            ));
        }
        let finite = |name: &str, value: f64, rule: &str, holds: bool| match holds && value.is_finite() {
            true => Ok(()),
            false => Err(Error::argument(format_args!("{name} {value} must be finite and {rule}"))),
        };
        let (above_zero, not_below) = ("greater than zero", "not below zero");
        finite("rate", self.rate, above_zero, self.rate > 0.0)?;
        finite("clip", self.clip, above_zero, self.clip > 0.0)?;
        finite("bias", self.bias.into(), not_below, self.bias >= 0.0)?;
        let AdamW { beta1, beta2, eps, weight_decay } = self.optimizer;
        for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
            finite(name, beta, "at least 0 and below 1", (0.0..1.0).contains(&beta))?;
        }
        finite("eps", eps, above_zero, eps > 0.0)?;
        finite("weight_decay", weight_decay, not_below, weight_decay >= 0.0)?;
        let Tail { seq_len, batch, .. } = self.tail;
        if seq_len < self.seq_len || batch < self.batch {
            return Err(Error::argument(format_args!(
                "tail counts {batch} sequences of {seq_len} tokens, fewer than the {} of {} in a step",
                self.batch, self.seq_len
            )));
        }
        self.tail.check()
    }

    /// What a saved state must have the same of.
    pub(super) fn identity(&self) -> Identity {
        Identity { model: self.model, seed: self.seed, batch: self.batch, seq_len: self.seq_len }
    }

    /// What the run's runtime is made from, if it has one.
    pub(super) fn runtime(&self) -> Option<RuntimeConfig> {
        self.policy.map(|policy| self.runtime_of(policy))
    }

    /// That of another policy over the same run.
    pub(super) fn runtime_of(&self, policy: PolicyConfig) -> RuntimeConfig {
        RuntimeConfig { tail: self.tail, estimator: self.estimator, iterations: self.iterations, ..policy.into() }
    }

    /// That of a layer's call in a step, which stochastic rounding has its own bits for.
    pub(super) fn precision(&self, step: u64, layer: usize) -> Precision {
        let rounding = match self.stochastic {
            true => Rounding::Stochastic { seed: self.seed.wrapping_mul(1 << 40) ^ (step << 12) ^ layer as u64 },
            false => Rounding::Nearest,
        };
        match self.policy {
            None => Precision::F32,
            Some(_) => Precision { on_overflow: self.casts, rounding, ..self.quantised() },
        }
    }

    /// What a policy's call rounds, with saturating casts.
    pub(super) fn quantised(&self) -> Precision {
        match self.accumulator {
            PvAccumulator::F32 if self.mode == Mode::Operands => {
                Precision { operands: self.operands, ..self.mode.precision() }
            }
            PvAccumulator::F32 => self.mode.precision(),
            accumulator => Precision::hopper(accumulator),
        }
    }

    pub(super) fn backward(&self) -> BackwardPrecision {
        let delta = if self.policy.is_some() { self.delta } else { Delta::default() };
        BackwardPrecision { delta, ..BackwardPrecision::default() }
    }
}

/// Steps that are skipped, and what happens after many of them.
///
/// A step whose loss or gradients are not finite changes no weight. After `patience` such steps in a row weights,
/// moments and scaling state go back to the last good checkpoint, and the rate is halved for `cautious` steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watchdog {
    /// Steps between two checkpoints, kept in memory; 0: none is kept, so that the run never goes back.
    pub every: u32,
    /// Bad steps in a row before the run goes back.
    pub patience: u32,
    /// Steps at half the rate after that.
    pub cautious: u32,
    /// Whether the scaling state goes back too; without, a policy keeps what it saw on the way.
    pub restore_scales: bool,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self { every: 25, patience: 8, cautious: 10, restore_scales: true }
    }
}
