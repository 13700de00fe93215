//! Delayed scaling: scales from the maxima of earlier steps.
//!
//! `delayed-paper` is Eq. 1 of the spectral-bounds paper, `s = max(history) / (448 margin)`, with a history of ones at
//! the start. `delayed-te` is TransformerEngine's recipe: a quantization scale and a history of amax, updated after every
//! step. Both have one scale per tensor and layer by default and observe o too.

use super::contract::Policy;
use super::report::{PolicyEvent, Report};
use super::shape::{LayerShape, PolicyShape};
use super::table::{
    AmaxAlgorithm, DelayedPaperConfig, DelayedState, DelayedTeConfig, Memory, PaperSlot, PolicyConfig, PolicyKind,
    PolicyState, TeSlot,
};
use super::tensor::{ScaledTensor, largest};
use crate::bound::{E4M3_MAX, LayerBounds};
use crate::error::{Error, Result};
use crate::plan::{Granularity, OperandDescales, ScalePlan};
use crate::scale::Descale;
use crate::stats::StepStats;
use std::fmt;

/// Longest history that is accepted, so that a file cannot ask for any amount of memory.
const MAX_HISTORY: usize = 1 << 16;

/// One tensor's memory.
pub trait Slot: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// Parameters.
    type Config: Copy + fmt::Debug + PartialEq + Send + Sync;

    /// A tensor that nothing is known about.
    fn start(config: &Self::Config) -> Self;

    /// The descale of the next step.
    ///
    /// # Errors
    /// If it leaves the range of f32.
    fn descale(&self, config: &Self::Config) -> Result<Descale>;

    /// Takes in the amax of a step and says what was unusual about it.
    fn record(&mut self, config: &Self::Config, amax: f32) -> Recorded;

    /// Whether a loaded slot can have come from [`Slot::record`].
    fn is_sound(&self, config: &Self::Config) -> bool;

    /// # Errors
    /// If a parameter breaks its rule.
    fn check(config: &Self::Config) -> Result<()>;

    /// One scale per head or per layer.
    fn granularity(config: &Self::Config) -> Granularity;

    /// The policy's parameters as one of the six.
    fn policy(config: &Self::Config) -> PolicyConfig;

    /// The state as one of the kinds.
    fn memory(state: DelayedState<Self>) -> Memory;
}

/// What became of an amax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// The scale follows it.
    Taken,
    /// Zero: the old scale stays.
    Zero,
    /// So small that the scale would be infinite: the largest finite scale is used.
    Tiny,
    /// NaN or infinite: the old scale stays.
    NonFinite,
}

impl Slot for PaperSlot {
    type Config = DelayedPaperConfig;

    fn start(config: &DelayedPaperConfig) -> Self {
        Self { history: vec![config.initial; config.history] }
    }

    fn descale(&self, config: &DelayedPaperConfig) -> Result<Descale> {
        Descale::covering(f64::from(largest(&self.history)), E4M3_MAX * config.margin)
    }

    /// A non-finite amax is left out: the paper does not say, and one would end every later plan.
    fn record(&mut self, _: &DelayedPaperConfig, amax: f32) -> Recorded {
        if !amax.is_finite() {
            return Recorded::NonFinite;
        }
        self.history.rotate_left(1);
        if let Some(newest) = self.history.last_mut() {
            *newest = amax;
        }
        Recorded::Taken
    }

    fn is_sound(&self, config: &DelayedPaperConfig) -> bool {
        self.history.len() == config.history && self.history.iter().all(|amax| amax.is_finite() && *amax >= 0.0)
    }

    fn check(config: &DelayedPaperConfig) -> Result<()> {
        check_history(config.history)?;
        if !(config.initial.is_finite() && config.initial > 0.0) {
            return Err(Error::argument(format_args!("initial amax {} must be finite and above zero", config.initial)));
        }
        if !(config.margin > 0.0 && config.margin <= 1.0) {
            return Err(Error::argument(format_args!("margin {} must be above 0 and at most 1", config.margin)));
        }
        Ok(())
    }

    fn granularity(config: &DelayedPaperConfig) -> Granularity {
        config.granularity
    }

    fn policy(config: &DelayedPaperConfig) -> PolicyConfig {
        PolicyConfig::DelayedPaper(*config)
    }

    fn memory(state: DelayedState<Self>) -> Memory {
        Memory::DelayedPaper(state)
    }
}

impl Slot for TeSlot {
    type Config = DelayedTeConfig;

    fn start(config: &DelayedTeConfig) -> Self {
        Self { scale: 1.0, history: vec![0.0; config.history] }
    }

    fn descale(&self, _: &DelayedTeConfig) -> Result<Descale> {
        // The largest scale has a subnormal inverse, which a descale may not be.
        Descale::new((1.0 / self.scale).max(f32::MIN_POSITIVE))
    }

    /// The step wrote its amax into slot 0; then the scale is updated and the history rolled, which drops the oldest and
    /// clears slot 0.
    fn record(&mut self, config: &DelayedTeConfig, amax: f32) -> Recorded {
        let Some(current) = self.history.first_mut() else { return Recorded::Zero };
        *current = amax;
        let reduced = match config.algorithm {
            // `f32::max` drops NaN, as `fmaxf` does.
            AmaxAlgorithm::Max => self.history.iter().copied().fold(0.0, f32::max),
            AmaxAlgorithm::MostRecent => amax,
        };
        self.history.rotate_left(1);
        self.history[0] = 0.0;
        if !reduced.is_finite() {
            return Recorded::NonFinite;
        }
        if reduced == 0.0 {
            return if amax.is_finite() { Recorded::Zero } else { Recorded::NonFinite };
        }
        let scale = config.scaled_max() / reduced;
        if scale.is_infinite() {
            self.scale = f32::MAX;
            return Recorded::Tiny;
        }
        self.scale = scale;
        if amax.is_finite() { Recorded::Taken } else { Recorded::NonFinite }
    }

    fn is_sound(&self, config: &DelayedTeConfig) -> bool {
        self.history.len() == config.history
            && self.scale.is_finite()
            && self.scale > 0.0
            && self.history.iter().all(|amax| amax.is_nan() || *amax >= 0.0)
    }

    fn check(config: &DelayedTeConfig) -> Result<()> {
        check_history(config.history)?;
        if !(-32..=32).contains(&config.margin) {
            return Err(Error::argument(format_args!("margin {} must lie between -32 and 32", config.margin)));
        }
        Ok(())
    }

    fn granularity(config: &DelayedTeConfig) -> Granularity {
        config.granularity
    }

    fn policy(config: &DelayedTeConfig) -> PolicyConfig {
        PolicyConfig::DelayedTe(*config)
    }

    fn memory(state: DelayedState<Self>) -> Memory {
        Memory::DelayedTe(state)
    }
}

fn check_history(history: usize) -> Result<()> {
    if (1..=MAX_HISTORY).contains(&history) {
        Ok(())
    } else {
        Err(Error::argument(format_args!("history {history} must lie between 1 and {MAX_HISTORY}")))
    }
}

/// A policy of slots.
#[derive(Clone, Debug)]
pub struct Delayed<S: Slot> {
    config: S::Config,
    shape: PolicyShape,
    state: DelayedState<S>,
}

/// Eq. 1 of the paper.
pub type DelayedPaper = Delayed<PaperSlot>;

/// TransformerEngine's delayed scaling.
pub type DelayedTe = Delayed<TeSlot>;

impl<S: Slot> Delayed<S> {
    /// A policy at its start: what a training run has after loading weights without state.
    ///
    /// # Errors
    /// `is_argument` if a parameter breaks its rule.
    pub fn new(config: S::Config, shape: PolicyShape) -> Result<Self> {
        S::check(&config)?;
        let start = |layer: usize| {
            ScaledTensor::ALL
                .map(|tensor| vec![S::start(&config); slots(shape.of(layer), S::granularity(&config), tensor)])
        };
        let layers = (0..shape.layers()).map(start).collect();
        Ok(Self { config, shape, state: DelayedState { layers } })
    }

    /// A policy that continues from a state.
    ///
    /// # Errors
    /// `is_mismatch` if the state does not fit the shape and parameters.
    pub fn resume(config: S::Config, shape: PolicyShape, state: DelayedState<S>) -> Result<Self> {
        S::check(&config)?;
        let sound = |(at, layer): (usize, &[Vec<S>; 5])| {
            layer.iter().zip(ScaledTensor::ALL).all(|(row, tensor)| {
                row.len() == slots(shape.of(at), S::granularity(&config), tensor)
                    && row.iter().all(|slot| slot.is_sound(&config))
            })
        };
        let fits = state.layers.len() == shape.layers() && state.layers.iter().enumerate().all(sound);
        if !fits {
            return Err(Error::mismatch(format_args!(
                "the histories of the saved {} state do not fit its own shape and parameters",
                S::policy(&config).kind()
            )));
        }
        Ok(Self { config, shape, state })
    }

    /// The memory of one tensor of one layer.
    pub fn slots(&self, layer: usize, tensor: ScaledTensor) -> &[S] {
        &self.state.layers[layer][tensor as usize]
    }
}

fn slots(shape: LayerShape, granularity: Granularity, tensor: ScaledTensor) -> usize {
    match granularity {
        Granularity::Layer => 1,
        Granularity::Head => tensor.row(shape),
    }
}

impl<S: Slot> Policy for Delayed<S> {
    fn config(&self) -> PolicyConfig {
        S::policy(&self.config)
    }

    fn shape(&self) -> &PolicyShape {
        &self.shape
    }

    fn plan(&self, bounds: &LayerBounds, _: Option<&StepStats>) -> Result<ScalePlan> {
        let shape = self.shape.check_bounds(bounds)?;
        let layer = &self.state.layers[bounds.layer];
        let row = |tensor: ScaledTensor| -> Result<Vec<Descale>> {
            let slots = &layer[tensor as usize];
            let n = tensor.row(shape);
            (0..n).map(|head| slots[head * slots.len() / n].descale(&self.config)).collect()
        };
        Ok(ScalePlan {
            layer: bounds.layer,
            logit_bound: None,
            logit_descale: row(ScaledTensor::Logit)?,
            operands: OperandDescales {
                q: row(ScaledTensor::Q)?,
                k: row(ScaledTensor::K)?,
                v: Some(row(ScaledTensor::V)?),
                o: Some(row(ScaledTensor::O)?),
            },
        })
    }

    fn observe(&mut self, plan: &ScalePlan, bounds: &LayerBounds, stats: &StepStats) -> Result<Report> {
        let shape = self.shape.check_step(plan, bounds, stats)?;
        let kind: PolicyKind = self.config().kind();
        let mut report = Report::new(kind, shape, plan, bounds, stats);
        for (slots, tensor) in self.state.layers[plan.layer].iter_mut().zip(ScaledTensor::ALL) {
            let amax = tensor.amax_row(stats, shape);
            let heads = amax.len() / slots.len();
            for (slot, heads) in slots.iter_mut().zip(amax.chunks(heads)) {
                match slot.record(&self.config, largest(heads)) {
                    Recorded::NonFinite => report.events.push(PolicyEvent::Skipped { tensor }),
                    Recorded::Tiny => report.events.push(PolicyEvent::TinyAmax { tensor }),
                    Recorded::Taken | Recorded::Zero => {}
                }
            }
        }
        Ok(report)
    }

    fn save(&self) -> PolicyState {
        PolicyState::new(self.config(), &self.shape, S::memory(self.state.clone()))
    }
}
