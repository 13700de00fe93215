//! What `verify` found.

use serde::Serialize;
use sigmascale::serving::Audit;
use sigmascale_lab::stress::Observed;

/// The audit that was asked for, and those of the other engines.
#[derive(Serialize)]
pub struct Report {
    #[serde(skip)]
    pub folder: String,
    #[serde(flatten)]
    pub audit: Audit,
    /// What a text reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed: Option<Observed>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Audit>,
}
