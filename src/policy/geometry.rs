//! Scales from the weights: `geometry` and `geometry-c-star`.

use super::contract::Policy;
use super::report::Report;
use super::shape::PolicyShape;
use super::table::{GeometryConfig, Memory, PolicyConfig, PolicyKind, PolicyState};
use crate::bound::{BoundKind, LayerBounds};
use crate::error::Result;
use crate::plan::{ScalePlan, check_eta};
use crate::stats::StepStats;

/// What `geometry-c-star` rests on.
pub const ISOTROPY: &str = "geometry-c-star assumes that normalized tokens are independent and uniform on the sphere; \
tokens of trained models align with the weights and can exceed its logit bound";

/// Descales from bounds: logits `bound / (eta 448)`, operands `(B + share A) / 448`, o twice v.
///
/// It remembers nothing, so a resume without state is the same as one with it.
#[derive(Clone, Debug)]
pub struct Geometry {
    config: GeometryConfig,
    shape: PolicyShape,
    bound: BoundKind,
}

impl Geometry {
    /// Policy `geometry`: logits from the worst-case bound. No normalized input overflows.
    ///
    /// # Errors
    /// `is_argument` as [`check_eta`].
    pub fn worst_case(config: GeometryConfig, shape: PolicyShape) -> Result<Self> {
        check_eta(config.eta)?;
        Ok(Self { config, shape, bound: BoundKind::WorstCase })
    }

    /// Policy `geometry-c-star`: logits from the paper's calibrated bound (Proposition 3.4) on sound per-head norms.
    /// It holds with probability `1 - delta` under [`ISOTROPY`] only.
    ///
    /// # Errors
    /// `is_argument` as [`check_eta`].
    pub fn c_star(config: GeometryConfig, shape: PolicyShape) -> Result<Self> {
        check_eta(config.eta)?;
        Ok(Self { config, shape, bound: BoundKind::RankAware })
    }
}

impl Policy for Geometry {
    fn config(&self) -> PolicyConfig {
        match self.bound {
            BoundKind::RankAware => PolicyConfig::GeometryCStar(self.config),
            _ => PolicyConfig::Geometry(self.config),
        }
    }

    fn shape(&self) -> &PolicyShape {
        &self.shape
    }

    fn assumption(&self) -> Option<&'static str> {
        (self.config().kind() == PolicyKind::GeometryCStar).then_some(ISOTROPY)
    }

    fn plan(&self, bounds: &LayerBounds, _: Option<&StepStats>) -> Result<ScalePlan> {
        self.shape.check_bounds(bounds)?;
        ScalePlan::from_bounds(bounds, self.bound, self.config.eta, self.config.granularity)
    }

    fn observe(&mut self, plan: &ScalePlan, bounds: &LayerBounds, stats: &StepStats) -> Result<Report> {
        let shape = self.shape.check_step(plan, bounds, stats)?;
        Ok(Report::new(self.config().kind(), shape, plan, bounds, stats))
    }

    fn save(&self) -> PolicyState {
        PolicyState::new(self.config(), &self.shape, Memory::None)
    }
}
