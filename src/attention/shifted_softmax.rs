//! The shifted softmax: a row whose maximum repeats is shifted further, so that no P is exactly one.
//!
//! With several P equal to one, sums of P V in bf16 round with a bias that made trainings diverge. For the row maximum
//! `r` of a key tile and `n`, the number of its logits within `epsilon` of `r`:
//!
//! ```text
//! m = beta r   if r > 0 and n > 1        m = 0   if r < 0 and n > 1        m = r   otherwise
//! ```
//!
//! Any m gives the same softmax in exact arithmetic. Source: "Why Low-Precision Transformer Training Fails", Algorithm 3
//! (its line 10 drops the second case; section 4 has it). A maximum of exactly zero stays as it is, as there.
//!
//! **Departure.** m moves by at most [`ShiftedSoftmax::MAX_SHIFT`] nats. The paper's m has no limit: with beta = 2 and a
//! repeated maximum of 104 every f32 P is zero, and the row is 0 / 0. Past the limit m still moves with the row's maximum
//! ([`ShiftLimit`](super::ShiftLimit)), since the same shift on every row would bias P.
//!
//! **With P in E4M3 or F16 only [`ShiftLimit::Octave`] is taken**: `exp(-12.5)` is zero in E4M3 and `exp(-23)` in F16, even
//! scaled as in [`P_SCALE`](super::P_SCALE), so that with beta = 2 a repeated maximum above that would empty its row. It is
//! there for comparison: in E4M3 it makes the largest P of the row wrong by up to 1/16, and in F16 it gains nothing
//! (docs/low-precision-failure.md). What helps there is a delta from the output before its rounding.

use super::backend::AttentionOutput;
use super::call::{AttentionCall, Inputs};
use super::cpu;
use super::precision::{Precision, Probabilities};
use super::shift::{Shift, ShiftLimit, ShiftedSoftmax};
use crate::error::{Error, Result};
use crate::plan::ScalePlan;

/// What [`ShiftedSoftmax::forward`] gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct ShiftedOutput {
    /// Output, log-sum-exp and statistics.
    pub output: AttentionOutput,
    /// Repeated maxima per query head (`n_q`): pairs of a row and a tile of keys (64, or those of
    /// [`PvAccumulator::Bf16`](super::PvAccumulator::Bf16)) in which the largest logit occurred
    /// more than once.
    pub repeated: Vec<u64>,
}

impl ShiftedSoftmax {
    /// The CPU backend's forward with this softmax.
    ///
    /// # Errors
    /// If P is in E4M3 or F16 and the limit is not [`ShiftLimit::Octave`] (`is_unsupported`), if `beta` is not above 1, `epsilon`
    /// is negative or a fixed limit is not above zero and at most [`ShiftedSoftmax::MAX_SHIFT`], and as
    /// [`Attention::forward`](super::Attention::forward).
    pub fn forward(
        &self,
        call: &AttentionCall<'_>,
        inputs: &Inputs<'_>,
        plan: &ScalePlan,
        precision: &Precision,
    ) -> Result<ShiftedOutput> {
        let scaled = matches!(precision.probabilities, Probabilities::E4m3 | Probabilities::F16);
        if scaled && self.limit != ShiftLimit::Octave {
            return Err(Error::unsupported(
                "with P in E4M3 or F16 the shifted softmax needs ShiftLimit::Octave: a longer shift makes every P of a row \
                 zero, in E4M3 above 12.5 nats and in F16 above 23",
            ));
        }
        if !(self.beta.is_finite() && self.beta > 1.0) {
            return Err(Error::argument(format_args!("beta {} must be finite and greater than 1", self.beta)));
        }
        if !(self.epsilon.is_finite() && self.epsilon >= 0.0) {
            return Err(Error::argument(format_args!("epsilon {} must be finite and not negative", self.epsilon)));
        }
        if let ShiftLimit::Fixed(nats) = self.limit
            && !(nats > 0.0 && nats <= Self::MAX_SHIFT)
        {
            return Err(Error::argument(format_args!(
                "a fixed limit of {nats} nats must be greater than zero and at most {}",
                Self::MAX_SHIFT
            )));
        }
        let (output, repeated) = cpu::forward(call, inputs, plan, precision, Shift::Further(*self))?;
        Ok(ShiftedOutput { output, repeated })
    }
}
