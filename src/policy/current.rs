//! Current scaling: `descale = amax (1 + 2^-22) / 448` of the step itself.
//!
//! The extra `2^-22` keeps the maximum itself at or below 448 after f32 division. A zero amax gives 1. The output's amax
//! is not known before the call, so o takes twice the descale of v, which always suffices: an output is a weighted mean
//! of values.

use super::contract::Policy;
use super::report::Report;
use super::shape::PolicyShape;
use super::table::{CurrentConfig, Memory, PolicyConfig, PolicyKind, PolicyState};
use super::tensor::{ScaledTensor, largest};
use crate::bound::{E4M3_MAX, LayerBounds};
use crate::error::{Error, Result};
use crate::plan::{Granularity, OperandDescales, ScalePlan};
use crate::scale::Descale;
use crate::stats::StepStats;

/// What covers the roundings of f32 division.
const HEADROOM: f64 = 1.0 + 1.0 / (1 << 22) as f64;

/// Scales from a measurement of the step that is about to run: an extra pass over q, k and v, and over all logits where
/// logits are cast. It remembers nothing.
#[derive(Clone, Debug)]
pub struct Current {
    config: CurrentConfig,
    shape: PolicyShape,
}

impl Current {
    /// A policy for this shape.
    pub fn new(config: CurrentConfig, shape: PolicyShape) -> Self {
        Self { config, shape }
    }
}

impl Policy for Current {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Current(self.config)
    }

    fn shape(&self) -> &PolicyShape {
        &self.shape
    }

    fn needs_measurement(&self) -> bool {
        true
    }

    fn plan(&self, bounds: &LayerBounds, measured: Option<&StepStats>) -> Result<ScalePlan> {
        let shape = self.shape.check_bounds(bounds)?;
        let Some(stats) = measured else {
            return Err(Error::argument("current scaling needs the statistics of the step that it plans"));
        };
        shape.check_stats(stats)?;
        let row = |tensor: ScaledTensor| -> Result<Vec<Descale>> {
            let mut amax = tensor.amax_row(stats, shape);
            if self.config.granularity == Granularity::Layer {
                let shared = largest(&amax);
                amax.fill(shared);
            }
            let descale = |&amax: &f32| Descale::covering(f64::from(amax) * HEADROOM, E4M3_MAX);
            amax.iter().map(descale).collect::<Result<_>>().map_err(|error| error.within(tensor.name()))
        };
        let v = row(ScaledTensor::V)?;
        let o = v.iter().map(|v| Descale::new(2.0 * v.get())).collect::<Result<_>>()?;
        Ok(ScalePlan {
            layer: bounds.layer,
            logit_bound: None,
            logit_descale: row(ScaledTensor::Logit)?,
            operands: OperandDescales { q: row(ScaledTensor::Q)?, k: row(ScaledTensor::K)?, v: Some(v), o: Some(o) },
        })
    }

    fn observe(&mut self, plan: &ScalePlan, bounds: &LayerBounds, stats: &StepStats) -> Result<Report> {
        let shape = self.shape.check_step(plan, bounds, stats)?;
        Ok(Report::new(PolicyKind::Current, shape, plan, bounds, stats))
    }

    fn save(&self) -> PolicyState {
        PolicyState::new(self.config(), &self.shape, Memory::None)
    }
}
