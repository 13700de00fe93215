//! The six policies by name.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The six policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Worst-case bounds.
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

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
