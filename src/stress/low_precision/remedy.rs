//! What is done against the failure.

use super::arithmetic::Arithmetic;
use serde::Serialize;

/// What is done against the failure. Each but [`Remedy::None`] changes one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remedy {
    /// Nothing: the casts of the [`Arithmetic`], delta from O.
    None,
    /// The output in f32 from P V on.
    F32Output,
    /// P V in f32, the output in BF16.
    F32Pv,
    /// The same, and the output rounded stochastically.
    StochasticOutput,
    /// delta from the output before its rounding to BF16, as `attention(.., unrounded_delta=True)` takes it in Python: the output itself stays
    /// in BF16, and what its rounding took is kept in BF16 beside it.
    UnroundedDelta,
    /// delta = rowsum(P o dP).
    DeltaFromP,
    /// The row maximum of Algorithm 3, with the limit of [`ShiftLimit::Wrapped`](crate::attention::ShiftLimit::Wrapped).
    Stabilised,
    /// The same with a limit of 40 nats for every row: a fixed offset, which the paper's appendix C warns against.
    StabilisedFixed,
    /// The same with a limit of 57 ln 2 nats, so that P is a power of two.
    StabilisedPower,
    /// The output of one head in f32.
    F32Head,
    /// W_Q and q of one head in f32.
    #[serde(rename = "f32-w-q")]
    F32WQ,
    /// Everything in f32.
    F32,
}

impl Remedy {
    /// Every choice.
    pub const ALL: [Self; 12] = [
        Self::None,
        Self::F32Output,
        Self::F32Pv,
        Self::StochasticOutput,
        Self::UnroundedDelta,
        Self::DeltaFromP,
        Self::Stabilised,
        Self::StabilisedFixed,
        Self::StabilisedPower,
        Self::F32Head,
        Self::F32WQ,
        Self::F32,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::F32Output => "f32-output",
            Self::F32Pv => "f32-pv",
            Self::StochasticOutput => "stochastic-output",
            Self::UnroundedDelta => "unrounded-delta",
            Self::DeltaFromP => "delta-from-p",
            Self::Stabilised => "stabilised",
            Self::StabilisedFixed => "stabilised-fixed",
            Self::StabilisedPower => "stabilised-power",
            Self::F32Head => "f32-head",
            Self::F32WQ => "f32-w-q",
            Self::F32 => "f32",
        }
    }

    /// Whether it changes anything in an arithmetic: fused kernels sum P V in f32 as they are, and FP8 has neither shifts beyond an
    /// octave nor one matrix in f32.
    pub fn is_for(self, arithmetic: Arithmetic) -> bool {
        match arithmetic {
            Arithmetic::Bf16 => true,
            Arithmetic::Fused => self != Self::F32Pv,
            Arithmetic::Fp8 => {
                let not = [Self::F32Pv, Self::StabilisedFixed, Self::StabilisedPower, Self::F32WQ];
                !not.contains(&self)
            }
        }
    }

    /// Whether the paper says that it averts the failure.
    pub fn is_of_the_paper(self) -> bool {
        matches!(self, Self::F32Output | Self::F32Pv | Self::DeltaFromP | Self::Stabilised | Self::F32Head | Self::F32)
    }
}
