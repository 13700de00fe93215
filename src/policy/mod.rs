//! Where the scales of a step come from.
//!
//! A [`Policy`] turns a layer's bounds into a [`ScalePlan`] before the attention call and learns from the call's
//! [`StepStats`] after it. It never sees a tensor, and it plans without changing its state, so that a saved and restored
//! policy plans the same bits.
//!
//! | name | descales come from | before the first step |
//! |---|---|---|
//! | `geometry` | the rounded certain bounds | nothing is needed |
//! | `geometry-c-star` | logits: the paper's `c_star` bound, see [`ISOTROPY`]; operands: as `geometry` | nothing is needed |
//! | `auto-c` | Algorithm 4: as `geometry` for a burn-in, then `c` times its bounds | burn-in |
//! | `delayed-paper` | Eq. 1: `max(history) / (448 margin)`, 16 steps | a history of ones |
//! | `delayed-te` | TransformerEngine's delayed scaling, 1024 steps | scale 1, amax 0 |
//! | `current` | this step's own amax | nothing is needed |
//!
//! The observing policies keep one scale a tensor and layer by default, as the frameworks that they come from.

mod auto_c;
mod current;
mod delayed;
mod geometry;
mod report;
mod shape;
#[cfg(test)]
mod tests;

pub use auto_c::{AutoC, AutoCConfig, AutoCState, Forbidden, Phase, Pooling, RatioPool};
pub use current::{Current, CurrentConfig};
pub use delayed::{
    AmaxAlgorithm, Delayed, DelayedPaper, DelayedPaperConfig, DelayedState, DelayedTe, DelayedTeConfig, PaperSlot,
    Slot, TeSlot,
};
pub use geometry::{Geometry, GeometryConfig, ISOTROPY};
pub use report::{PolicyEvent, Report, Restart, Slack, Tensor, TensorReport};
pub use shape::{LayerShape, PolicyShape};

use crate::bound::LayerBounds;
use crate::error::{Error, Result};
use crate::plan::{Granularity, ScalePlan};
use crate::stats::StepStats;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Version of the [`PolicyState`] of a model whose layers have the same heads.
pub const STATE_VERSION: u32 = 1;

/// Version of the [`PolicyState`] of a model whose layers differ in their heads. Any third is refused.
pub const UNLIKE_STATE_VERSION: u32 = 2;

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

/// The six policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Rounded certain bounds.
    Geometry,
    /// The paper's calibrated logit bound.
    GeometryCStar,
    /// Burn-in, then frozen.
    AutoC,
    /// The paper's delayed scaling.
    DelayedPaper,
    /// TransformerEngine's delayed scaling.
    DelayedTe,
    /// This step's amax.
    Current,
}

impl PolicyKind {
    /// All six, in the order of comparisons.
    pub const ALL: [Self; 6] =
        [Self::Geometry, Self::GeometryCStar, Self::AutoC, Self::DelayedPaper, Self::DelayedTe, Self::Current];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Geometry => "geometry",
            Self::GeometryCStar => "geometry-c-star",
            Self::AutoC => "auto-c",
            Self::DelayedPaper => "delayed-paper",
            Self::DelayedTe => "delayed-te",
            Self::Current => "current",
        }
    }

    /// Reads a comma-separated list; `delayed` stands for both presets, and a repeated name counts once.
    ///
    /// # Errors
    /// `is_argument` if a name is unknown or there is none.
    ///
    /// ```
    /// use sigmascale::policy::PolicyKind;
    /// let kinds = PolicyKind::parse_list("geometry,delayed")?;
    /// assert_eq!(kinds, [PolicyKind::Geometry, PolicyKind::DelayedPaper, PolicyKind::DelayedTe]);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn parse_list(list: &str) -> Result<Vec<Self>> {
        let mut kinds = Vec::new();
        for name in list.split(',').map(str::trim) {
            if name.is_empty() {
                return Err(Error::argument(format_args!("`{list}` has a policy without a name")));
            }
            let found: Vec<_> = match name {
                "delayed" => vec![Self::DelayedPaper, Self::DelayedTe],
                _ => Self::ALL.into_iter().filter(|kind| kind.name() == name).collect(),
            };
            if found.is_empty() {
                let known = Self::ALL.map(Self::name).join(", ");
                return Err(Error::argument(format_args!("unknown policy {name}: the policies are {known}")));
            }
            for kind in found {
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
            }
        }
        Ok(kinds)
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Parameters of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case")]
pub enum PolicyConfig {
    /// See [`Geometry`].
    Geometry(GeometryConfig),
    /// See [`Geometry`].
    GeometryCStar(GeometryConfig),
    /// See [`AutoC`].
    AutoC(AutoCConfig),
    /// See [`DelayedPaper`].
    DelayedPaper(DelayedPaperConfig),
    /// See [`DelayedTe`].
    DelayedTe(DelayedTeConfig),
    /// See [`Current`].
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

    /// A policy at its start.
    ///
    /// # Errors
    /// `is_argument` if a parameter or the shape breaks its rule.
    ///
    /// ```
    /// use sigmascale::policy::{PolicyConfig, PolicyKind, PolicyShape};
    /// let shape = PolicyShape::new([(4, 2), (8, 4)]);
    /// let policy = PolicyConfig::from(PolicyKind::DelayedTe).build(shape)?;
    /// assert_eq!(policy.name(), "delayed-te");
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn build(&self, shape: PolicyShape) -> Result<Box<dyn Policy>> {
        shape.check()?;
        Ok(match self {
            Self::Geometry(config) => Box::new(Geometry::certain(*config, shape)?),
            Self::GeometryCStar(config) => Box::new(Geometry::c_star(*config, shape)?),
            Self::AutoC(config) => Box::new(AutoC::new(*config, shape)?),
            Self::DelayedPaper(config) => Box::new(DelayedPaper::new(*config, shape)?),
            Self::DelayedTe(config) => Box::new(DelayedTe::new(*config, shape)?),
            Self::Current(config) => Box::new(Current::new(*config, shape)),
        })
    }
}

/// A policy's state between two steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyState {
    /// [`STATE_VERSION`] or [`UNLIKE_STATE_VERSION`], by the shape.
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
        Self { version: version_of(shape), config, shape: shape.clone(), memory }
    }

    /// The policy that this state was saved from.
    ///
    /// # Errors
    /// `is_mismatch` if the version, the parameters or the shape differ from what the caller expects (the message names
    /// what differs), or if the state's parts do not fit each other.
    pub fn restore(self, config: &PolicyConfig, shape: PolicyShape) -> Result<Box<dyn Policy>> {
        let version = version_of(&self.shape);
        if self.version != version {
            return Err(Error::mismatch(format_args!(
                "policy state has version {}, and for its layers this build reads {version}",
                self.version
            )));
        }
        if self.config.kind() != config.kind() {
            return Err(Error::mismatch(format_args!(
                "the state was saved by policy {}, not {}",
                self.config.kind(),
                config.kind()
            )));
        }
        differs("policy shape", &self.shape, &shape)?;
        differs(config.kind().name(), &self.config, config)?;
        shape.check()?;
        match (config, self.memory) {
            (PolicyConfig::AutoC(config), Memory::AutoC(state)) => Ok(Box::new(AutoC::resume(*config, shape, state)?)),
            (PolicyConfig::DelayedPaper(config), Memory::DelayedPaper(state)) => {
                Ok(Box::new(DelayedPaper::resume(*config, shape, state)?))
            }
            (PolicyConfig::DelayedTe(config), Memory::DelayedTe(state)) => {
                Ok(Box::new(DelayedTe::resume(*config, shape, state)?))
            }
            (PolicyConfig::Geometry(_) | PolicyConfig::GeometryCStar(_) | PolicyConfig::Current(_), Memory::None) => {
                config.build(shape)
            }
            _ => Err(Error::mismatch(format_args!(
                "the state of policy {} holds another policy's memory",
                config.kind()
            ))),
        }
    }
}

fn version_of(shape: &PolicyShape) -> u32 {
    if shape.is_alike() { STATE_VERSION } else { UNLIKE_STATE_VERSION }
}

/// Refuses two values that serialise differently, naming every field that does.
///
/// # Errors
/// `is_mismatch`, in the form `what: field is saved, not expected`.
pub fn differs<T: Serialize>(what: &str, saved: &T, expected: &T) -> Result<()> {
    match differences(saved, expected).map_err(|error| error.within(what))? {
        found if found.is_empty() => Ok(()),
        found => Err(Error::mismatch(format_args!("{what} of the saved state differs: {}", found.join(", ")))),
    }
}

/// The fields in which two values serialise differently, in the form `field is this, not that`.
pub(crate) fn differences<T: Serialize>(this: &T, that: &T) -> Result<Vec<String>> {
    let value = |x: &T| serde_json::to_value(x).map_err(Error::argument);
    let mut found = Vec::new();
    collect_differences("", &value(this)?, &value(that)?, &mut found);
    Ok(found)
}

fn collect_differences(path: &str, saved: &serde_json::Value, want: &serde_json::Value, found: &mut Vec<String>) {
    match (saved, want) {
        (serde_json::Value::Object(a), serde_json::Value::Object(b)) => {
            let null = serde_json::Value::Null;
            let mut keys: Vec<_> = a.keys().chain(b.keys()).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                collect_differences(&path, a.get(key).unwrap_or(&null), b.get(key).unwrap_or(&null), found);
            }
        }
        _ if saved == want => {}
        (serde_json::Value::Array(a), serde_json::Value::Array(b)) if a.len() == b.len() => {
            // One entry is enough to name a row.
            if let Some(at) = (0..a.len()).find(|&at| a[at] != b[at]) {
                collect_differences(&format!("{path}[{at}]"), &a[at], &b[at], found);
            }
        }
        _ => {
            let short = |value: &serde_json::Value| {
                let text = value.to_string();
                if text.len() > 60 { "another value".to_owned() } else { text }
            };
            found.push(format!("{path} is {}, not {}", short(saved), short(want)));
        }
    }
}

/// Fills a row with its largest value where one scale a layer is asked for.
fn share(row: &mut [f64], granularity: Granularity) {
    if granularity == Granularity::Layer {
        let largest = row.iter().copied().fold(0.0, f64::max);
        row.fill(largest);
    }
}
