//! What a command ran and what it left out.

use serde::Serialize;
use sigmascale_lab::stress::StressResult;

/// One scenario.
#[derive(Serialize)]
pub struct Run {
    #[serde(flatten)]
    pub stress: StressResult,
    #[cfg(feature = "train")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<sigmascale_lab::train::Training>,
}

impl Run {
    /// The step at which training stopped or its rate rose.
    pub fn transition(&self) -> Option<usize> {
        #[cfg(feature = "train")]
        return self.training.as_ref().map(|training| training.transition);
        #[cfg(not(feature = "train"))]
        None
    }
}

impl From<StressResult> for Run {
    fn from(stress: StressResult) -> Self {
        Self {
            stress,
            #[cfg(feature = "train")]
            training: None,
        }
    }
}

/// What is written: one run as it is, several in a list.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Results {
    One(Box<Run>),
    All { runs: Vec<Run>, left_out: Vec<LeftOut> },
}

impl Results {
    pub fn runs(&self) -> &[Run] {
        match self {
            Self::One(run) => std::slice::from_ref(run),
            Self::All { runs, .. } => runs,
        }
    }

    pub fn left_out(&self) -> &[LeftOut] {
        match self {
            Self::One(_) => &[],
            Self::All { left_out, .. } => left_out,
        }
    }
}

/// A scenario that `all` did not run.
#[derive(Serialize)]
pub struct LeftOut {
    pub scenario: &'static str,
    pub reason: &'static str,
}
