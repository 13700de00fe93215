//! Whose casts a run has.

use serde::Serialize;

/// Whose casts a run has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arithmetic {
    /// The paper's: BF16, and the unnormalised output rounded after every tile.
    #[default]
    Bf16,
    /// A fused BF16 kernel's: P in BF16, its sums in f32 until the output is stored in BF16.
    Fused,
    /// This package's FP8 kernel's in training: q, k and v in E4M3 by their current maxima, P in F16, the output in BF16.
    Fp8,
}

impl Arithmetic {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Fused, Self::Fp8];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fused => "fused",
            Self::Fp8 => "fp8",
        }
    }
}
