//! Every policy, once: its name, its parameters, the bound that it plans from, and what it remembers between two steps. Serde, the command line, the Python
//! package and the checks of the kernels' constants read this table.

use super::shape::PolicyShape;
use crate::bound::{BoundKind, E4M3_MAX};
use crate::error::{Error, Result};
use crate::named;
use crate::plan::{DEFAULT_ETA, Granularity};
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! policies {
    ($(#[doc = $doc:literal] $Policy:ident($Config:ty) = $name:literal from $bound:expr;)+) => {
        named! {
            /// The policies.
            pub enum PolicyKind is "policy" {
                $(#[doc = $doc] $Policy = $name,)+
            }
        }

        impl PolicyKind {
            /// The bound that its logit scales come from. A policy with one needs bounds to plan; one without observes.
            pub const fn bound(self) -> Option<BoundKind> {
                match self {
                    $(Self::$Policy => $bound,)+
                }
            }
        }

        impl fmt::Display for PolicyKind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        /// Parameters of a policy.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "policy")]
        pub enum PolicyConfig {
            $(#[doc = $doc] #[serde(rename = $name)] $Policy($Config),)+
        }

        impl From<PolicyKind> for PolicyConfig {
            /// The default parameters.
            fn from(kind: PolicyKind) -> Self {
                match kind {
                    $(PolicyKind::$Policy => Self::$Policy(<$Config>::default()),)+
                }
            }
        }

        impl PolicyConfig {
            /// Which policy.
            pub fn kind(&self) -> PolicyKind {
                match self {
                    $(Self::$Policy(_) => PolicyKind::$Policy,)+
                }
            }
        }
    };
}
policies! {
    /// Worst-case bounds.
    Geometry(GeometryConfig) = "geometry" from Some(BoundKind::WorstCase);
    /// The paper's calibrated logit bound.
    GeometryCStar(GeometryConfig) = "geometry-c-star" from Some(BoundKind::RankAware);
    /// Burn-in, then frozen.
    AutoC(AutoCConfig) = "auto-c" from Some(BoundKind::WorstCase);
    /// The paper's delayed scaling.
    DelayedPaper(DelayedPaperConfig) = "delayed-paper" from None;
    /// TransformerEngine's delayed scaling.
    DelayedTe(DelayedTeConfig) = "delayed-te" from None;
    /// This step's amax.
    Current(CurrentConfig) = "current" from None;
}

impl PolicyKind {
    /// Reads a comma-separated list; `delayed` means both delayed policies.
    ///
    /// # Errors
    /// `is_argument` if a name is unknown or repeated, or there is none.
    ///
    /// ```
    /// use sigmascale::policy::PolicyKind;
    /// let kinds = PolicyKind::parse_list("geometry,delayed")?;
    /// assert_eq!(kinds, [PolicyKind::Geometry, PolicyKind::DelayedPaper, PolicyKind::DelayedTe]);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn parse_list(list: &str) -> Result<Vec<Self>> {
        let mut kinds = Vec::new();
        let known = Self::ALL.map(Self::name).join(", ");
        if list.trim().is_empty() {
            return Err(Error::argument(format_args!("no policy is named: the policies are {known}")));
        }
        for name in list.split(',').map(str::trim) {
            if name.is_empty() {
                return Err(Error::argument(format_args!("empty name in `{list}`: the policies are {known}")));
            }
            let found: Vec<_> = match name {
                "delayed" => vec![Self::DelayedPaper, Self::DelayedTe],
                _ => Self::ALL.into_iter().filter(|kind| kind.name() == name).collect(),
            };
            if found.is_empty() {
                return Err(Error::argument(format_args!("unknown policy {name}: the policies are {known}")));
            }
            for kind in found {
                if kinds.contains(&kind) {
                    return Err(Error::argument(format_args!("duplicate policy {}", kind.name())));
                }
                kinds.push(kind);
            }
        }
        Ok(kinds)
    }
}

impl PolicyConfig {
    /// Sets eta, where the policy has one.
    pub fn set_eta(&mut self, eta: f64) {
        match self {
            Self::Geometry(config) | Self::GeometryCStar(config) => config.eta = eta,
            Self::AutoC(config) => config.eta = eta,
            Self::DelayedPaper(_) | Self::DelayedTe(_) | Self::Current(_) => {}
        }
    }

    /// Sets whether heads have scales of their own.
    pub fn set_granularity(&mut self, granularity: Granularity) {
        *match self {
            Self::Geometry(config) | Self::GeometryCStar(config) => &mut config.granularity,
            Self::AutoC(config) => &mut config.granularity,
            Self::DelayedPaper(config) => &mut config.granularity,
            Self::DelayedTe(config) => &mut config.granularity,
            Self::Current(config) => &mut config.granularity,
        } = granularity;
    }
}

/// Parameters of the policies that only read the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeometryConfig {
    /// Share of the E4M3 range that a logit bound is mapped onto.
    pub eta: f64,
    /// One scale per head or per layer.
    pub granularity: Granularity,
}

impl Default for GeometryConfig {
    fn default() -> Self {
        Self { eta: DEFAULT_ETA, granularity: Granularity::Head }
    }
}

named! {
    /// Which ratios share one constant.
    pub enum Pooling is "pooling" default Layer {
        /// All heads of all layers.
        Model = "model",
        /// The heads of a layer.
        Layer = "layer",
        /// Each head separately.
        Head = "head",
    }
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
    /// One scale per head or per layer.
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
    /// One scale per head or per layer.
    pub granularity: Granularity,
}

impl Default for DelayedPaperConfig {
    fn default() -> Self {
        Self { history: 16, initial: 1.0, margin: 0.9, granularity: Granularity::Layer }
    }
}

named! {
    /// How TransformerEngine reduces a history of amax.
    pub enum AmaxAlgorithm is "amax algorithm" default Max {
        /// Maximum of the history; NaN takes no part in it.
        Max = "max",
        /// The amax of the last step.
        MostRecent = "most-recent",
    }
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
    /// One scale per head or per layer.
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
    /// One scale per head or per layer.
    pub granularity: Granularity,
}

impl Default for CurrentConfig {
    fn default() -> Self {
        Self { granularity: Granularity::Layer }
    }
}

/// Version of a [`PolicyState`]; any other is refused.
pub const STATE_VERSION: u32 = 1;

/// A policy's state between two steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyState {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// Parameters.
    pub config: PolicyConfig,
    /// Model shape.
    pub shape: PolicyShape,
    /// What was learned.
    pub memory: Memory,
}

/// What a policy remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Memory {
    /// Nothing: every plan comes from the step's own bounds or measurement.
    None,
    /// Burn-in and constants.
    AutoC(AutoCState),
    /// Histories.
    DelayedPaper(DelayedState<PaperSlot>),
    /// Histories and scales.
    DelayedTe(DelayedState<TeSlot>),
}

impl PolicyState {
    /// What a policy of this shape remembers.
    pub(crate) fn new(config: PolicyConfig, shape: &PolicyShape, memory: Memory) -> Self {
        Self { version: STATE_VERSION, config, shape: shape.clone(), memory }
    }
}

/// What `auto-c` remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoCState {
    /// Burn-in steps taken in by each layer.
    pub seen: Vec<u32>,
    /// Restarts so far.
    pub restarts: u32,
    /// Pools of logits, q, k and v.
    pub pools: [Vec<RatioPool>; 4],
}

/// One pool: its phase, and the largest ratios seen, as many as decide the order statistic, largest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatioPool {
    /// Its phase.
    pub phase: Phase,
    /// Largest ratios, descending.
    pub top: Vec<f64>,
}

/// Phase of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Phase {
    /// Observing; the worst-case bound is used.
    BurnIn,
    /// `c` times the bound is used.
    Frozen {
        /// The constant.
        c: f64,
    },
    /// An overflow under `c` brought the worst-case bound back.
    FellBack {
        /// The constant given up.
        c: f64,
    },
    /// The worst-case bound is used.
    Forbidden {
        /// Why.
        reason: Forbidden,
    },
}

impl Phase {
    /// Multiplier of the worst-case bound.
    pub fn c(self) -> f64 {
        match self {
            Self::Frozen { c } => c,
            _ => 1.0,
        }
    }
}

/// Why no constant is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Forbidden {
    /// More restarts than allowed: what is observed does not last.
    TooManyRestarts,
    /// Every observed value was zero: nothing to scale by.
    NothingObserved,
}

/// The slots of every layer, tensors in the order of [`ScaledTensor::ALL`](super::ScaledTensor::ALL): one per tensor, or one per head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelayedState<S> {
    /// `layers` entries.
    pub layers: Vec<[Vec<S>; 5]>,
}

/// The last maxima of one tensor, oldest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PaperSlot {
    /// Always full.
    pub history: Vec<f32>,
}

/// One tensor's `scale` and `amax_history`, in TransformerEngine's order: slot 0 is where the running step writes, then
/// the oldest to the newest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TeSlot {
    /// Quantization scale of the next step.
    pub scale: f32,
    /// amax of earlier steps.
    #[serde(with = "super::exact::row")]
    pub history: Vec<f32>,
}
