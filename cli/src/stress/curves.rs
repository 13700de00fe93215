//! Curves of policies, each in its own color.

use crate::chart::Line;
use sigmascale::policy::PolicyKind;

/// The curve of a policy, or of the run in f32.
pub fn line(policy: Option<PolicyKind>, points: Vec<(usize, f64)>) -> Line {
    Line { name: policy.map_or("f32", PolicyKind::name).to_owned(), place: policy.map(place), points }
}

/// Place of a policy among the six: its color and dashes.
pub fn place(policy: PolicyKind) -> usize {
    PolicyKind::ALL.iter().position(|kind| *kind == policy).unwrap_or(0)
}
