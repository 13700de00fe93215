//! Scales whose logit bounds rest on a power iteration in place of certified norms: what the paper's runtime does, on the device.

use super::addresses::AddressWriter;
use super::engine::ScaleEngine;
use super::host::DeviceWeights;
use super::power::{PowerEngine, SummedPowerEngine};
use super::shape::OTHER_SHAPE;
use super::tables::LayerInput;
use crate::bound::HeadBound;
use crate::cuda::{Buffer, Device, Stream};
use crate::error::{Error, Result};
use crate::model::HeadOffsets;
use crate::spectral::{Estimator, Iterations, certified_inflation};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Operand descales and bounds of a model as [`ScaleEngine`] has them, with the norms from a power iteration, whose vectors stay in
/// device memory. No Gram is formed. The bounds promise nothing ([`Estimator::caveat`]).
///
/// Work of one engine on two streams has to be ordered by events.
#[derive(Debug)]
pub struct EstimateEngine {
    scales: ScaleEngine,
    power: Power,
    /// Failure probability with which a cold start covers sigma; `None`: the estimate as it is.
    cover: Option<f64>,
    cold: AtomicBool,
    writer: AddressWriter,
    shapes: Vec<LayerInput>,
}

#[derive(Debug)]
enum Power {
    Heads(PowerEngine),
    Summed(SummedPowerEngine),
}

impl EstimateEngine {
    /// Sets everything up, with vectors of `seed`.
    ///
    /// # Errors
    /// `is_argument` for [`Estimator::Gram`]; otherwise as [`PowerEngine::new`].
    ///
    /// # Safety
    /// As [`ScaleEngine::new`].
    pub unsafe fn new(device: &Device, layers: &[LayerInput], estimator: Estimator, seed: u64) -> Result<Self> {
        // SAFETY: the caller's promises.
        let (scales, power) = unsafe {
            let power = match estimator {
                Estimator::Gram => return Err(Error::argument("estimator gram is exact: make a ScaleEngine")),
                Estimator::Power => Power::Heads(PowerEngine::new(device, layers, false, seed)?),
                Estimator::PowerSummed => Power::Summed(SummedPowerEngine::new(device, layers, seed)?),
            };
            (ScaleEngine::estimated(device, layers)?, power)
        };
        Ok(Self {
            scales,
            power,
            cover: None,
            cold: AtomicBool::new(true),
            writer: AddressWriter::new(device)?,
            shapes: layers.iter().map(LayerInput::without_places).collect(),
        })
    }

    /// The same over weights that are kept alive with the engine.
    ///
    /// # Errors
    /// As [`EstimateEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, estimator: Estimator, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which the engine holds and nothing here writes.
        let mut engine = unsafe { Self::new(device, weights.layers(), estimator, seed)? };
        engine.scales = engine.scales.keeping(weights);
        Ok(engine)
    }

    /// Where nothing rotates, bounds of a cold start cover sigma but with probability `p` a head: what policy `geometry` has.
    #[must_use]
    pub fn covering(mut self, p: f64) -> Self {
        self.cover = Some(p);
        self
    }

    /// With descales of E4M3 logits that map their bounds onto this share of the range.
    ///
    /// # Errors
    /// As [`check_eta`](crate::plan::check_eta).
    pub fn with_eta(mut self, eta: f64) -> Result<Self> {
        self.scales = self.scales.with_eta(eta)?;
        Ok(self)
    }

    /// Puts operand descales, the iterations of one forward and the bounds on `stream`: those of a cold start at the first call,
    /// which must not be captured in a graph, and later one from the vectors before. No allocation, no synchronisation.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn plan(&self, stream: &Stream) -> Result<()> {
        let cold = self.cold.swap(false, Ordering::Relaxed);
        let Iterations { cold: first, warm } = Iterations::default();
        self.run(stream, if cold { first } else { warm }, cold)
    }

    /// The same with `count` iterations, `cold` if the vectors are random ones. With none, bounds are those of the estimates that
    /// lie in [`EstimateEngine::estimates`], as where ranks that share a layer's heads have summed them.
    ///
    /// # Errors
    /// As [`EstimateEngine::plan`].
    pub fn run(&self, stream: &Stream, count: usize, cold: bool) -> Result<()> {
        self.scales.descales(stream)?;
        self.iterate(stream, count)?;
        let cover = |rank| match self.cover.filter(|_| cold) {
            Some(p) => certified_inflation(count, rank, p),
            None => Ok(1.0),
        };
        self.scales.estimate(stream, (self.estimates().ptr(), matches!(self.power, Power::Summed(_))), &cover)
    }

    /// Whether [`EstimateEngine::run_on`] takes these layers.
    pub fn fits(&self, layers: &[LayerInput]) -> bool {
        self.shapes.iter().copied().eq(layers.iter().map(LayerInput::without_places))
    }

    /// As [`EstimateEngine::run`], on layers of the same shapes at other addresses.
    ///
    /// # Errors
    /// As [`ShapeEngine::plan`](super::ShapeEngine::plan).
    ///
    /// # Safety
    /// As [`ShapeEngine::plan`](super::ShapeEngine::plan).
    pub unsafe fn run_on(&self, stream: &Stream, layers: &[LayerInput], count: usize, cold: bool) -> Result<()> {
        if !self.fits(layers) {
            return Err(Error::argument(OTHER_SHAPE));
        }
        stream.bind()?;
        let power = match &self.power {
            Power::Heads(power) => power.places(layers)?,
            Power::Summed(power) => power.places(layers)?,
        };
        // SAFETY: 1. the places are rows of the engine's tables; 2. an engine's work is ordered, and the launches behind this one
        // start when it has ended.
        unsafe { self.writer.put(stream, [self.scales.places(layers)?, power].concat())? };
        self.run(stream, count, cold)
    }

    fn iterate(&self, stream: &Stream, count: usize) -> Result<()> {
        match &self.power {
            Power::Heads(power) => power.steps(stream, count),
            Power::Summed(power) => power.steps(stream, count),
        }
    }

    /// Estimates of the last iteration: `[layer][query head]`, or one a layer of the sum.
    pub fn estimates(&self) -> &Buffer<f32> {
        match &self.power {
            Power::Heads(power) => power.sigma(),
            Power::Summed(power) => power.sigma(),
        }
    }

    /// The vectors after the last iteration, layer after layer: what a resume has to keep.
    pub fn vectors(&self) -> &Buffer<f32> {
        match &self.power {
            Power::Heads(power) => power.vectors(),
            Power::Summed(power) => power.vectors(),
        }
    }

    /// Goes on from saved vectors, so that the next start is warm. Waits for the device.
    ///
    /// # Errors
    /// As [`PowerIteration::restore`](super::PowerIteration::restore).
    pub fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        match &mut self.power {
            Power::Heads(power) => power.restore(vectors)?,
            Power::Summed(power) => power.restore(vectors)?,
        }
        self.cold = AtomicBool::new(false);
        Ok(())
    }

    /// Heads of each layer: [`ScaleEngine::heads`].
    pub fn heads(&self) -> &HeadOffsets {
        self.scales.heads()
    }

    /// As [`ScaleEngine::head_bounds`].
    pub fn head_bounds(&self) -> Option<&Buffer<HeadBound>> {
        self.scales.head_bounds()
    }

    /// As [`ScaleEngine::operand_bounds`].
    pub fn operand_bounds(&self) -> &Buffer<f32> {
        self.scales.operand_bounds()
    }

    /// As [`ScaleEngine::head_descales`].
    pub fn head_descales(&self) -> &Buffer<f32> {
        self.scales.head_descales()
    }

    /// As [`ScaleEngine::status`].
    pub fn status(&self) -> &Buffer<u32> {
        self.scales.status()
    }
}
