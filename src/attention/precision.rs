//! Which values a call rounds, and how.

use crate::fp8::OnOverflow;

/// What P is multiplied by before its cast to E4M3.
///
/// A power of two, so that scaling is exact. P = 1 becomes 256 and cannot overflow, and values down to `2^-14` stay
/// normal. The descale, `2^-8`, is part of the output's factor.
pub const P_SCALE: f32 = 256.0;

/// Whether a tensor passes through E4M3. It is counted against its descale in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cast {
    /// Left in f32.
    F32,
    /// Cast with the plan's descale; left in f32 where the plan has none.
    E4m3,
}

/// What happens to the logits on their way into the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitCast {
    /// Left in f32, overflow not counted.
    F32,
    /// Left in f32, overflow counted against the plan's logit descale.
    Counted,
    /// Cast with the plan's logit descale.
    E4m3,
}

/// The format of P in the product with V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probabilities {
    /// f32.
    F32,
    /// bfloat16.
    Bf16,
    /// E4M3 with the fixed scale [`P_SCALE`].
    E4m3,
}

/// Which values a call rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// q, k and v (v only where the plan has descales for it).
    pub operands: Cast,
    /// Logits.
    pub logits: LogitCast,
    /// P.
    pub probabilities: Probabilities,
    /// Output (only where the plan has descales for it).
    pub output: Cast,
    /// What E4M3 casts do with values out of range.
    pub on_overflow: OnOverflow,
}

impl Precision {
    /// What fused FP8 kernels do: q, k, v and P in E4M3, logits and output in f32. Logit overflow is counted.
    pub const KERNEL: Self = Self {
        operands: Cast::E4m3,
        logits: LogitCast::Counted,
        probabilities: Probabilities::E4m3,
        output: Cast::F32,
        on_overflow: OnOverflow::Saturate,
    };
    /// The spectral-bounds paper's Algorithm 1: logits in E4M3, everything else in f32.
    pub const PAPER_LOGITS: Self = Self {
        operands: Cast::F32,
        logits: LogitCast::E4m3,
        probabilities: Probabilities::F32,
        output: Cast::F32,
        on_overflow: OnOverflow::Saturate,
    };
    /// No rounding but f32's own.
    pub const F32: Self = Self { logits: LogitCast::F32, ..Self::PAPER_LOGITS };
}
