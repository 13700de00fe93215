//! Options of a calibration.

use crate::bound::{BoundKind, Tail};
use crate::error::{Error, Result};
use crate::plan::{CenterPolicy, DEFAULT_ETA, Granularity, check_eta};
use crate::spectral::{Estimator, Iterations};

/// Largest constant in place of `c_star`; the worst case is 1.
const MOST_C: f64 = 1000.0;

/// What a calibration is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The union bound of the probabilistic constants.
    pub tail: Tail,
    /// Share of the E4M3 range that logit bounds are mapped onto.
    pub eta: f64,
    /// Bound that logit descales come from.
    pub bound: BoundKind,
    /// One scale per head or per layer.
    pub granularity: Granularity,
    /// Engine.
    pub estimator: Estimator,
    /// Iterations of a power iteration, from random vectors.
    pub iterations: usize,
    /// Everything as the paper has it: summed sigma of raw weights, no gains, constants or rotation, one logit scale a
    /// layer, no operand descales.
    pub as_paper: bool,
    /// The attention applies the model's soft-cap of the logits. Not all do (transformers' default, SDPA, leaves it out), so without this
    /// the bounds hold either way.
    pub soft_cap: bool,
    /// Replaces `c_star` under `as_paper` (the paper used 0.08, 0.04, 0.03 and 0.02).
    pub c: Option<f64>,
    /// Seed of the power iteration's start vectors.
    pub seed: u64,
    /// Centers of keys and values. A calibration sees no tokens, so there is no [`CenterSource::Mean`](crate::plan::CenterSource::Mean).
    pub centers: CenterPolicy,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tail: Tail::default(),
            eta: DEFAULT_ETA,
            bound: BoundKind::default(),
            granularity: Granularity::default(),
            estimator: Estimator::default(),
            iterations: Iterations::default().cold,
            as_paper: false,
            soft_cap: false,
            c: None,
            seed: 0,
            centers: CenterPolicy::CACHE,
        }
    }
}

impl Options {
    /// # Errors
    /// If a value breaks its rule or two options contradict each other.
    pub fn check(&self) -> Result<()> {
        self.tail.check()?;
        check_eta(self.eta)?;
        Iterations { cold: self.iterations, ..Iterations::default() }.check()?;
        self.centers.check_for_weights()?;
        match self.c {
            Some(c) if c > MOST_C => {
                return Err(Error::argument(format_args!("c {c:e} must be at most {MOST_C}: 1 is the worst case")));
            }
            Some(c) if !(c.is_finite() && c > 0.0) => {
                return Err(Error::argument(format_args!("c {c} must be finite and greater than zero")));
            }
            Some(_) if !self.as_paper => {
                return Err(Error::argument("c replaces c_star in the paper's bound only: set as_paper"));
            }
            _ => {}
        }
        if !self.as_paper && self.estimator != Estimator::Gram {
            match self.bound {
                BoundKind::WorstCase => {
                    return Err(Error::argument(
                        "bound worst-case needs estimator gram, since power iteration gives a lower bound, which \
                         cannot certify; with estimator power use bound rank-aware",
                    ));
                }
                BoundKind::Spectrum => {
                    return Err(Error::argument(
                        "bound spectrum needs estimator gram: power iteration gives no Frobenius norm; use bound rank-aware with it",
                    ));
                }
                BoundKind::RankAware => {}
            }
        }
        Ok(())
    }
}
