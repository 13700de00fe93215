//! Which values a call rounds, and how.

use super::lanes::TILE;
use crate::error::{Error, Result};
use crate::fp8::{Format, OnOverflow};
use crate::plan::ScalePlan;
use std::fmt;
use std::str::FromStr;

/// What P is multiplied by before its cast to E4M3 or F16.
///
/// A power of two, so that scaling is exact. P = 1 becomes 256 and cannot overflow, and values down to `2^-14` (`2^-22`
/// in F16) stay normal. The descale, `2^-8`, is part of the output's factor.
pub const P_SCALE: f32 = 256.0;

/// What a tensor is rounded to. It is counted against its descale in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cast {
    /// Left in f32.
    F32,
    /// Rounded to bfloat16, without a scale.
    Bf16,
    /// The same, up or down with probabilities that keep the mean, by bits that follow from the element's place; of the output
    /// alone.
    Bf16Stochastic,
    /// Cast with the plan's descale; left in f32 where the plan has none.
    E4m3,
    /// The same in E5M2, whose range of 57344 is 128 times the plan's 448; on the CPU only.
    E5m2,
    /// The same in the E4M3 that keeps infinities and ends at 240, with twice the plan's descale; on the CPU only.
    E4m3Ieee,
}

impl Cast {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Bf16Stochastic => "bf16-stochastic",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::E4m3Ieee => "e4m3-240",
        }
    }

    /// The FP8 format, and the power of two that brings the plan's range of 448 to it.
    pub fn fp8(self) -> Option<(Format, f32)> {
        match self {
            Self::F32 | Self::Bf16 | Self::Bf16Stochastic => None,
            Self::E4m3 => Some((Format::E4m3, 1.0)),
            Self::E5m2 => Some((Format::E5m2, 128.0)),
            Self::E4m3Ieee => Some((Format::E4m3Ieee, 0.5)),
        }
    }
}

/// How q, k and v are rounded to FP8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest value, ties to even.
    #[default]
    Nearest,
    /// Up or down with probabilities that keep the mean ([`Format::encode_stochastic`]); on the CPU only. A call and its
    /// backward pass need the same seed, other calls others.
    Stochastic {
        /// Seed; the bits of an element follow from it, the tensor and the place.
        seed: u64,
    },
}

impl Rounding {
    /// 32 uniform bits for an element of a tensor.
    pub(super) fn bits(seed: u64, tensor: u64, at: usize) -> u32 {
        // SplitMix64, whose outputs at consecutive places are independent.
        let mut z = seed.wrapping_add(tensor << 56).wrapping_add((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 32) as u32 ^ z as u32
    }
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
    /// F16 with the fixed scale [`P_SCALE`].
    F16,
    /// E4M3 with the fixed scale [`P_SCALE`].
    E4m3,
}

/// How the sums of Q K^T are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkAccumulator {
    /// f32.
    F32,
    /// As Hopper's FP8 instructions do: 13 bits after the point of the largest term (needs operands in E4M3).
    Fp8,
}

/// How the sums of P V are taken.
///
/// As text: `f32`, `f16`, `fp8-N` for [`PvAccumulator::Fp8`] and `bf16-N` for [`PvAccumulator::Bf16`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PvAccumulator {
    /// f32.
    F32,
    /// As Hopper's FP8 instructions do, 13 bits after the point of the largest term, and added to a second accumulator in
    /// f32 after every `promote_every` keys. Needs V and P in E4M3.
    Fp8 {
        /// Keys: a multiple of 64.
        promote_every: usize,
    },
    /// As Hopper's F16 instructions do, 25 bits after the point of the largest term. Needs P in F16 and V in E4M3, which
    /// F16 holds exactly.
    F16,
    /// f32 within a tile of keys; the running output is rounded to bfloat16 after each tile, and the row maximum moves from
    /// tile to tile. This is how low-precision training stores the unnormalised output (low-precision paper, section
    /// 3.3.2); on the CPU only. Needs P in BF16.
    Bf16 {
        /// Keys of a tile: a divisor of 64.
        tile: usize,
    },
}

impl fmt::Display for PvAccumulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::Fp8 { promote_every } => write!(f, "fp8-{promote_every}"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 { tile } => write!(f, "bf16-{tile}"),
        }
    }
}

/// That of [`Precision::INFERENCE`].
impl Default for PvAccumulator {
    fn default() -> Self {
        Self::Fp8 { promote_every: 256 }
    }
}

impl FromStr for PvAccumulator {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let keys = |prefix: &str| name.strip_prefix(prefix).and_then(|keys| keys.parse().ok());
        let fp8 = || keys("fp8-").map(|promote_every| Self::Fp8 { promote_every });
        let bf16 = || keys("bf16-").map(|tile| Self::Bf16 { tile });
        let accumulator = match name {
            "f32" => Self::F32,
            "f16" => Self::F16,
            _ => fp8().or_else(bf16).ok_or_else(|| {
                Error::argument(format_args!("accumulator {name}: expected f32, f16, fp8-N or bf16-N, N in keys"))
            })?,
        };
        accumulator.check().map(|()| accumulator)
    }
}

impl PvAccumulator {
    /// Whether its numbers of keys fit the tiles of a kernel.
    ///
    /// # Errors
    /// `is_argument` if one does not divide them, or is no multiple of them.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Fp8 { promote_every } if promote_every == 0 || promote_every % TILE != 0 => {
                Err(Error::argument(format_args!(
                    "an FP8 accumulator promoted every {promote_every} keys: expected a multiple of {TILE} above zero"
                )))
            }
            Self::Bf16 { tile } if !TILE.is_multiple_of(tile) => {
                Err(Error::argument(format_args!("an output rounded every {tile} keys: expected a divisor of {TILE}")))
            }
            _ => Ok(()),
        }
    }

    /// Keys over which a row's P has one shift.
    pub(super) fn tile(self) -> usize {
        if let Self::Bf16 { tile } = self { tile } else { TILE }
    }
}

/// Which values a call rounds, and how it sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// q, k and v (v only where the plan has descales for it).
    pub operands: Cast,
    /// Rounding of q, k and v.
    pub rounding: Rounding,
    /// Logits.
    pub logits: LogitCast,
    /// Sums of Q K^T.
    pub qk_accumulator: QkAccumulator,
    /// P.
    pub probabilities: Probabilities,
    /// Sums of P V.
    pub pv_accumulator: PvAccumulator,
    /// Output (only where the plan has descales for it).
    pub output: Cast,
    /// What E4M3 casts do with values out of range.
    pub on_overflow: OnOverflow,
}

impl Precision {
    /// What fused FP8 kernels round: q, k, v and P in E4M3, logits and output in f32. Logit overflow is counted. Sums are
    /// f32, unlike a GPU's.
    pub const KERNEL: Self = Self {
        operands: Cast::E4m3,
        rounding: Rounding::Nearest,
        logits: LogitCast::Counted,
        qk_accumulator: QkAccumulator::F32,
        probabilities: Probabilities::E4m3,
        pv_accumulator: PvAccumulator::F32,
        output: Cast::F32,
        on_overflow: OnOverflow::Saturate,
    };
    /// The spectral-bounds paper's Algorithm 1: logits in E4M3, everything else in f32.
    pub const PAPER_LOGITS: Self = Self {
        operands: Cast::F32,
        rounding: Rounding::Nearest,
        logits: LogitCast::E4m3,
        qk_accumulator: QkAccumulator::F32,
        probabilities: Probabilities::F32,
        pv_accumulator: PvAccumulator::F32,
        output: Cast::F32,
        on_overflow: OnOverflow::Saturate,
    };
    /// No rounding but f32's own.
    pub const F32: Self = Self { logits: LogitCast::F32, ..Self::PAPER_LOGITS };

    /// FlashAttention in BF16 with every cast of the low-precision paper: q, k, v, P, P V after each tile of 64 keys, and the
    /// output.
    pub const BF16: Self = Self {
        operands: Cast::Bf16,
        probabilities: Probabilities::Bf16,
        pv_accumulator: PvAccumulator::Bf16 { tile: TILE },
        output: Cast::Bf16,
        ..Self::F32
    };

    /// The FP8 kernel on Hopper for inference, its accumulators included: P V is promoted to f32 every 256 keys.
    ///
    /// The mean error of the output is at most 5e-3 of its mean size: -1e-3 to -3e-3 for V with a mean of 0.1 to 3
    /// deviations, from 1k to 64k keys.
    pub const INFERENCE: Self = Self::hopper(PvAccumulator::Fp8 { promote_every: 256 });
    /// The FP8 kernel on Hopper for training: Q K^T in FP8, P V in F16.
    ///
    /// The mean error of the output is at most 1e-3 of its mean size: under 1e-4 to 16k keys, 4e-4 at 64k.
    pub const TRAINING: Self = Self::hopper(PvAccumulator::F16);
    /// [`Precision::INFERENCE`] with P V promoted every 2048 keys only, for comparison: the output is 2.3 % too small for V
    /// with a mean of one deviation, 3.5 % with three.
    pub const PROMOTE_2048: Self = Self::hopper(PvAccumulator::Fp8 { promote_every: 2048 });

    /// The FP8 kernel on Hopper with a choice of the sums of P V, and P in the format that they need.
    pub const fn hopper(pv_accumulator: PvAccumulator) -> Self {
        Self { qk_accumulator: QkAccumulator::Fp8, ..Self::KERNEL.with_pv_accumulator(pv_accumulator) }
    }

    /// This precision with another way to sum P V, and P in the format that it needs.
    pub const fn with_pv_accumulator(self, pv_accumulator: PvAccumulator) -> Self {
        let probabilities = match pv_accumulator {
            PvAccumulator::F32 => self.probabilities,
            PvAccumulator::Fp8 { .. } => Probabilities::E4m3,
            PvAccumulator::F16 => Probabilities::F16,
            PvAccumulator::Bf16 { .. } => Probabilities::Bf16,
        };
        Self { probabilities, pv_accumulator, ..self }
    }

    /// What P is multiplied by.
    pub(super) fn p_scale(&self) -> f32 {
        match self.probabilities {
            Probabilities::F32 | Probabilities::Bf16 => 1.0,
            Probabilities::F16 | Probabilities::E4m3 => P_SCALE,
        }
    }

    /// The accumulators' rules.
    pub(super) fn check(&self, plan: &ScalePlan) -> Result<()> {
        self.pv_accumulator.check()?;
        if self.operands == Cast::Bf16Stochastic {
            return Err(Error::argument("bf16-stochastic is a cast of the output: give operands another"));
        }
        let e4m3 = self.operands == Cast::E4m3;
        if self.qk_accumulator == QkAccumulator::Fp8 && !e4m3 {
            return Err(Error::argument("the FP8 accumulator of Q K^T needs operands in E4M3"));
        }
        let accumulator = self.pv_accumulator;
        if accumulator == PvAccumulator::F32 {
            return Ok(());
        }
        if *self != self.with_pv_accumulator(accumulator) {
            return Err(Error::argument(format_args!(
                "the accumulator {accumulator} of P V does not take P in {:?}: see Precision::with_pv_accumulator",
                self.probabilities
            )));
        }
        let needs_e4m3 = !matches!(accumulator, PvAccumulator::Bf16 { .. });
        if needs_e4m3 && (!e4m3 || plan.operands.v.is_none()) {
            return Err(Error::argument(format_args!(
                "the accumulator {accumulator} of P V needs v in E4M3, by descales of the plan"
            )));
        }
        Ok(())
    }
}
