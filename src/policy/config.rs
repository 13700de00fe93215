//! Parameters of the policies.

use super::kind::PolicyKind;
use crate::bound::E4M3_MAX;
use crate::plan::{DEFAULT_ETA, Granularity};
use serde::{Deserialize, Serialize};

/// Parameters of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case")]
pub enum PolicyConfig {
    /// See [`Geometry`](super::Geometry).
    Geometry(GeometryConfig),
    /// See [`Geometry`](super::Geometry).
    GeometryCStar(GeometryConfig),
    /// See [`AutoC`](super::AutoC).
    AutoC(AutoCConfig),
    /// See [`DelayedPaper`](super::DelayedPaper).
    DelayedPaper(DelayedPaperConfig),
    /// See [`DelayedTe`](super::DelayedTe).
    DelayedTe(DelayedTeConfig),
    /// See [`Current`](super::Current).
    Current(CurrentConfig),
}

impl From<PolicyKind> for PolicyConfig {
    /// The default parameters.
    fn from(kind: PolicyKind) -> Self {
        match kind {
            PolicyKind::Geometry => Self::Geometry(GeometryConfig::default()),
            PolicyKind::GeometryCStar => Self::GeometryCStar(GeometryConfig::default()),
            PolicyKind::AutoC => Self::AutoC(AutoCConfig::default()),
            PolicyKind::DelayedPaper => Self::DelayedPaper(DelayedPaperConfig::default()),
            PolicyKind::DelayedTe => Self::DelayedTe(DelayedTeConfig::default()),
            PolicyKind::Current => Self::Current(CurrentConfig::default()),
        }
    }
}

impl PolicyConfig {
    /// Which of the six.
    pub fn kind(&self) -> PolicyKind {
        match self {
            Self::Geometry(_) => PolicyKind::Geometry,
            Self::GeometryCStar(_) => PolicyKind::GeometryCStar,
            Self::AutoC(_) => PolicyKind::AutoC,
            Self::DelayedPaper(_) => PolicyKind::DelayedPaper,
            Self::DelayedTe(_) => PolicyKind::DelayedTe,
            Self::Current(_) => PolicyKind::Current,
        }
    }
}

/// Parameters of the policies that only read the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeometryConfig {
    /// Share of the E4M3 range that a logit bound is mapped onto.
    pub eta: f64,
    /// One scale a head or a layer.
    pub granularity: Granularity,
}

impl Default for GeometryConfig {
    fn default() -> Self {
        Self { eta: DEFAULT_ETA, granularity: Granularity::Head }
    }
}

/// Which ratios share one constant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pooling {
    /// All heads of all layers.
    Model,
    /// The heads of a layer.
    #[default]
    Layer,
    /// Each head separately.
    Head,
}

/// Parameters of `auto-c`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoCConfig {
    /// T: steps observed before a constant is fixed.
    pub burn_in: u32,
    /// Share of the observed ratios that the constant covers before the safety factor (the paper: 0.9999).
    #[serde(default = "default_quantile")]
    pub quantile: f64,
    /// Safety factor on the observed ratio (the paper: 1).
    pub kappa: f64,
    /// Which ratios share a constant.
    pub pooling: Pooling,
    /// Share of the E4M3 range that a logit bound is mapped onto.
    pub eta: f64,
    /// One scale a head or a layer.
    pub granularity: Granularity,
    /// Restarts after which no constant is used.
    pub max_restarts: u32,
}

impl Default for AutoCConfig {
    fn default() -> Self {
        Self {
            burn_in: 100,
            quantile: default_quantile(),
            kappa: 1.5,
            pooling: Pooling::default(),
            eta: DEFAULT_ETA,
            granularity: Granularity::Head,
            max_restarts: 8,
        }
    }
}

fn default_quantile() -> f64 {
    0.9999
}

/// Parameters of `delayed-paper`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelayedPaperConfig {
    /// Steps remembered.
    pub history: usize,
    /// What the history holds at the start and after a resume without state.
    pub initial: f32,
    /// Share of 448 that the largest value is mapped onto.
    pub margin: f64,
    /// One scale a head or a layer.
    pub granularity: Granularity,
}

impl Default for DelayedPaperConfig {
    fn default() -> Self {
        Self { history: 16, initial: 1.0, margin: 0.9, granularity: Granularity::Layer }
    }
}

/// What TransformerEngine makes of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AmaxAlgorithm {
    /// Its maximum. NaN takes no part in it.
    #[default]
    Max,
    /// The last step's amax.
    MostRecent,
}

/// Parameters of `delayed-te`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelayedTeConfig {
    /// Steps remembered.
    pub history: usize,
    /// What is made of them.
    pub algorithm: AmaxAlgorithm,
    /// The amax is mapped onto `448 / 2^margin`.
    pub margin: i32,
    /// One scale a head or a layer.
    pub granularity: Granularity,
}

impl Default for DelayedTeConfig {
    fn default() -> Self {
        Self { history: 1024, algorithm: AmaxAlgorithm::Max, margin: 0, granularity: Granularity::Layer }
    }
}

impl DelayedTeConfig {
    /// What the amax is mapped onto: `448 / 2^margin`.
    pub fn scaled_max(&self) -> f32 {
        E4M3_MAX as f32 * 2f32.powi(-self.margin)
    }
}

/// Parameters of `current`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurrentConfig {
    /// One scale a head or a layer.
    pub granularity: Granularity,
}

impl Default for CurrentConfig {
    fn default() -> Self {
        Self { granularity: Granularity::Layer }
    }
}
