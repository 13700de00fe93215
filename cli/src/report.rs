//! What `verify` found.

use serde::Serialize;
use sigmascale::serving::Audit;
use sigmascale_lab::stress::Observed;

/// The audit that was asked for, and those of the other engines.
#[derive(Serialize)]
pub struct Report {
    /// The folder, as it was named.
    #[serde(skip)]
    pub folder: String,
    /// The audit that was asked for.
    #[serde(flatten)]
    pub audit: Audit,
    /// What a text reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed: Option<Observed>,
    /// Those of the other engines.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Audit>,
}
