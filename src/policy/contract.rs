//! What every policy does.

use super::report::{PolicyEvent, Report, Restart};
use super::shape::PolicyShape;
use super::table::{PolicyConfig, PolicyState};
use crate::bound::LayerBounds;
use crate::error::Result;
use crate::plan::ScalePlan;
use crate::stats::StepStats;
use std::fmt;

/// A source of scale plans for every layer of one model.
pub trait Policy: fmt::Debug + Send + Sync {
    /// What it was made from.
    fn config(&self) -> PolicyConfig;

    /// The model shape it was made for.
    fn shape(&self) -> &PolicyShape;

    /// Its name on the command line and in results.
    fn name(&self) -> &'static str {
        self.config().kind().name()
    }

    /// An assumption that its scales rest on and that may fail; to be shown where the policy is used.
    fn assumption(&self) -> Option<&'static str> {
        None
    }

    /// Whether [`Policy::plan`] needs the statistics of the step that is about to run.
    fn needs_measurement(&self) -> bool {
        false
    }

    /// The scales of the layer's next call. `measured` is read only by policies that need it.
    ///
    /// # Errors
    /// `is_mismatch` if the bounds belong to another shape, `is_argument` if a measurement is missing, `is_unsupported`
    /// if the layer lacks the bound, `is_non_finite` if a measurement is.
    fn plan(&self, bounds: &LayerBounds, measured: Option<&StepStats>) -> Result<ScalePlan>;

    /// Takes in what the call with `plan` reported.
    ///
    /// # Errors
    /// `is_mismatch` if the plan, bounds or statistics belong to another layer or shape.
    fn observe(&mut self, plan: &ScalePlan, bounds: &LayerBounds, stats: &StepStats) -> Result<Report>;

    /// The caller says that what was observed so far no longer describes the model. Policies without a start of their
    /// own ignore it.
    fn restart(&mut self, reason: Restart) -> Vec<PolicyEvent> {
        let _ = reason;
        Vec::new()
    }

    /// Everything that [`PolicyState::restore`] needs to continue.
    fn save(&self) -> PolicyState;
}
