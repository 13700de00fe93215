//! FP8 numbers: E4M3, E5M2 and the E4M3 with infinities, one value at a time or whole slices.
//!
//! A code is `sign | exponent | mantissa`. With `M` mantissa bits and bias `B` a normal code is
//! `(-1)^s 2^(e - B) (1 + m / 2^M)` and a code with `e = 0` is `(-1)^s 2^(1 - B) m / 2^M`.
//!
//! | [`Format`] | bits | bias | maximum | rounds to it up to | infinity | NaN |
//! |---|---|---|---|---|---|---|
//! | `E4m3` | 1-4-3 | 7 | 448 | 464, included | none | `0x7f` |
//! | `E5m2` | 1-5-2 | 15 | 57344 | 61440, excluded | `0x7c` | `0x7d..=0x7f`, written as `0x7e` |
//! | `E4m3Ieee` | 1-4-3 | 7 | 240 | 248, excluded | `0x78` | `0x79..=0x7f`, written as `0x7c` |
//!
//! **Scaling.** Slices are scaled by one f32 multiplication, `y = x * multiplier`, where the multiplier is a
//! quantization scale, that is `1 / descale` rounded to f32. This is what a GPU kernel does, and all counts are taken on
//! that `y`, before the cast. Two roundings lie between `|x| <= 448 descale` and `y`, so `y` can exceed 448 by a factor
//! of at most `(1 + 2^-24)^2`. A descale that must cover its bound to the last bit therefore carries a relative margin
//! of `2^-22`, which is enough; bounds that come from weights carry far more.
//!
//! **What this module does not do.** It never chooses a scale, and a saturating cast is silent: out-of-range values are
//! visible only in [`Counts`].
//!
//! Source: OCP 8-bit floating point specification 1.0; the third format follows IEEE 754's conventions, as `ml_dtypes`
//! `float8_e4m3` does.

mod slice;

pub use slice::Counts;

/// The largest finite E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// The last value that rounds to an E4M3 number; values above it round out of range.
pub const E4M3_LAST_ROUNDING: f32 = 464.0;

crate::named! {
    /// An FP8 format.
    ///
    /// ```
    /// use sigmascale::fp8::{Format, OnOverflow};
    /// let code = Format::E4m3.encode(430.08, OnOverflow::Saturate);
    /// assert_eq!(Format::E4m3.decode(code), 416.0);
    /// ```
    pub enum Format is "FP8 format" {
        /// Maximum 448, no infinity.
        ///
        /// OCP E4M3, with one NaN per sign (`ml_dtypes` `float8_e4m3fn`).
        E4m3 = "e4m3",
        /// Maximum 57344.
        ///
        /// OCP E5M2, with IEEE-like infinities and NaN (`float8_e5m2`).
        E5m2 = "e5m2",
        /// E4M3 that keeps infinities: maximum 240.
        ///
        /// The top exponent is kept for infinity and NaN (`float8_e4m3`).
        E4m3Ieee = "e4m3-240",
    }
}

crate::named! {
    /// What a cast does with a value that rounding takes out of the format.
    pub enum OnOverflow is "cast" default Saturate {
        /// The maximum with the sign of the value.
        ///
        /// Also for infinities, as `cvt.rn.satfinite` does. NaN stays NaN.
        Saturate = "saturating",
        /// NaN in E4M3, the infinity in the other formats.
        NonFinite = "nan",
    }
}

/// The numbers that define a format.
trait Layout {
    const MANTISSA: u32;
    const BIAS: i32;
    /// Largest finite code.
    const MAX_CODE: i32;
    /// Code of infinity; 256 where there is none.
    const INF_CODE: i32;
    const NAN_CODE: i32;
    const MAX: f32;
    /// Largest f32 that rounds to `MAX`.
    const LAST_ROUNDING: f32;

    /// Code of a non-saturating overflow.
    const OVERFLOW_CODE: i32 = if Self::INF_CODE < 128 { Self::INF_CODE } else { Self::NAN_CODE };
    /// f32 exponent field of the smallest normal number; smaller values share its spacing.
    const MIN_EXPONENT: i32 = 128 - Self::BIAS;
    /// f32 bits of a power of two above every finite value: larger ones need not be told apart.
    const CAP: i32 = ((Self::MAX.to_bits() >> 23) as i32 + 1) << 23;
}

struct E4m3;
struct E5m2;
struct E4m3Ieee;

impl Layout for E4m3 {
    const MANTISSA: u32 = 3;
    const BIAS: i32 = 7;
    const MAX_CODE: i32 = 0x7e;
    const INF_CODE: i32 = 256;
    const NAN_CODE: i32 = 0x7f;
    const MAX: f32 = E4M3_MAX;
    const LAST_ROUNDING: f32 = E4M3_LAST_ROUNDING;
}

impl Layout for E5m2 {
    const MANTISSA: u32 = 2;
    const BIAS: i32 = 15;
    const MAX_CODE: i32 = 0x7b;
    const INF_CODE: i32 = 0x7c;
    const NAN_CODE: i32 = 0x7e;
    const MAX: f32 = 57344.0;
    const LAST_ROUNDING: f32 = 61440f32.next_down();
}

impl Layout for E4m3Ieee {
    const MANTISSA: u32 = 3;
    const BIAS: i32 = 7;
    const MAX_CODE: i32 = 0x77;
    const INF_CODE: i32 = 0x78;
    const NAN_CODE: i32 = 0x7c;
    const MAX: f32 = 240.0;
    const LAST_ROUNDING: f32 = 248f32.next_down();
}

/// Runs an expression with `L` bound to the layout of a format.
macro_rules! with_layout {
    ($format:expr, $L:ident => $body:expr) => {
        match $format {
            $crate::fp8::Format::E4m3 => {
                type $L = $crate::fp8::E4m3;
                $body
            }
            $crate::fp8::Format::E5m2 => {
                type $L = $crate::fp8::E5m2;
                $body
            }
            $crate::fp8::Format::E4m3Ieee => {
                type $L = $crate::fp8::E4m3Ieee;
                $body
            }
        }
    };
}
use with_layout;

impl Format {
    /// The largest finite value: 448, 57344 or 240.
    pub fn max(self) -> f32 {
        with_layout!(self, L => L::MAX)
    }

    /// The largest f32 that rounds to [`Format::max`]: 464, or the f32 just below 61440 or 248 (where the tie rounds
    /// away from the format).
    pub fn last_rounding(self) -> f32 {
        with_layout!(self, L => L::LAST_ROUNDING)
    }

    /// The smallest positive normal value: `2^(1 - B)`.
    pub fn min_normal(self) -> f32 {
        with_layout!(self, L => f32::from_bits((L::MIN_EXPONENT as u32) << 23))
    }

    /// The smallest positive value: `2^(1 - B - M)`.
    pub fn min_subnormal(self) -> f32 {
        with_layout!(self, L => f32::from_bits((L::MIN_EXPONENT as u32 - L::MANTISSA) << 23))
    }

    /// The code nearest to `x`, ties to the even code. NaN gives the format's NaN with the sign of `x`.
    pub fn encode(self, x: f32, on_overflow: OnOverflow) -> u8 {
        with_layout!(self, L => encode::<L>(x, on_overflow == OnOverflow::Saturate))
    }

    /// One of the two codes around `x`, the upper one with probability equal to the position of `|x|` between them.
    ///
    /// `random` is 32 uniform bits, so the probability is exact to `2^-32`. Representable values never move. A value
    /// between the maximum and the next grid point may leave the format.
    pub fn encode_stochastic(self, x: f32, random: u32, on_overflow: OnOverflow) -> u8 {
        with_layout!(self, L => encode_stochastic::<L>(x, random, on_overflow == OnOverflow::Saturate))
    }

    /// The value of a code; exact.
    pub fn decode(self, code: u8) -> f32 {
        with_layout!(self, L => decode::<L>(code))
    }

    /// `decode(encode(x))` without the code in between.
    pub fn round(self, x: f32, on_overflow: OnOverflow) -> f32 {
        with_layout!(self, L => round::<L>(x, on_overflow == OnOverflow::Saturate))
    }
}

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: i32 = 0x7f80_0000;

/// `|x|` in units of the format's spacing there, rounded to even by one addition, and the f32 exponent field of that
/// spacing's binade. Adding `2^(e + 23 - M)` to a value of exponent `e` leaves no bit below `2^(e - M)`.
#[inline(always)]
fn grid<L: Layout>(magnitude: i32) -> (f32, f32, i32) {
    let capped = magnitude.min(L::CAP);
    let exponent = (capped >> 23).max(L::MIN_EXPONENT);
    let magic = f32::from_bits(((exponent + 23 - L::MANTISSA as i32) << 23) as u32);
    (f32::from_bits(capped as u32) + magic, magic, exponent)
}

/// A code without sign from a count of spacings in a binade; the count `2^(M + 1)` carries into the next binade.
#[inline(always)]
fn finish<L: Layout>(steps: i32, exponent: i32, magnitude: i32, saturate: bool) -> i32 {
    let code = ((exponent + L::BIAS - 127) << L::MANTISSA) + steps - (1 << L::MANTISSA);
    let over = if saturate { L::MAX_CODE } else { L::OVERFLOW_CODE };
    let code = if code > L::MAX_CODE { over } else { code };
    if magnitude > INFINITY { L::NAN_CODE } else { code }
}

#[inline(always)]
fn encode<L: Layout>(x: f32, saturate: bool) -> u8 {
    let magnitude = (x.to_bits() & MAGNITUDE) as i32;
    let (sum, magic, exponent) = grid::<L>(magnitude);
    let steps = sum.to_bits() as i32 - magic.to_bits() as i32;
    let code = finish::<L>(steps, exponent, magnitude, saturate);
    (code | ((x.to_bits() >> 24) & 0x80) as i32) as u8
}

#[inline(always)]
fn encode_stochastic<L: Layout>(x: f32, random: u32, saturate: bool) -> u8 {
    let magnitude = (x.to_bits() & MAGNITUDE) as i32;
    let capped = magnitude.min(L::CAP);
    let field = capped >> 23;
    let exponent = field.max(L::MIN_EXPONENT);
    // f32 subnormals lie more than 2^-100 below the spacing, so their missing implicit bit is of no account.
    let significand = ((capped & 0x7f_ffff) | 0x80_0000) as u64;
    let shift = 23 - L::MANTISSA + (exponent - field) as u32;
    // The count of spacings with 32 fractional bits.
    let fixed = if shift < 64 { (significand << 32) >> shift } else { 0 };
    let fixed = if capped == 0 { 0 } else { fixed };
    let steps = ((fixed + u64::from(random)) >> 32) as i32;
    let code = finish::<L>(steps, exponent, magnitude, saturate);
    (code | ((x.to_bits() >> 24) & 0x80) as i32) as u8
}

#[inline(always)]
fn round<L: Layout>(x: f32, saturate: bool) -> f32 {
    let magnitude = (x.to_bits() & MAGNITUDE) as i32;
    let (sum, magic, _) = grid::<L>(magnitude);
    let value = sum - magic;
    let over = if saturate {
        L::MAX
    } else if L::INF_CODE < 128 {
        f32::INFINITY
    } else {
        f32::NAN
    };
    let value = if value > L::MAX { over } else { value };
    let value = if magnitude > INFINITY { f32::NAN } else { value };
    f32::from_bits((value.to_bits() & MAGNITUDE) | (x.to_bits() & !MAGNITUDE))
}

/// f32 bits of the format's smallest normal number.
const fn min_normal_bits<L: Layout>() -> i32 {
    L::MIN_EXPONENT << 23
}

/// A number whose last bit weighs as much as a step between the format's subnormals.
#[inline(always)]
fn subnormal_magic<L: Layout>() -> f32 {
    f32::from_bits(((L::MIN_EXPONENT + 23 - L::MANTISSA as i32) << 23) as u32)
}

/// Bits of a normal magnitude, rounded to even at the format's last mantissa bit; the bits below it are left over.
#[inline(always)]
fn rounded_bits<L: Layout>(magnitude: i32) -> i32 {
    let cut = 23 - L::MANTISSA;
    magnitude + ((1 << (cut - 1)) - 1) + ((magnitude >> cut) & 1)
}

/// [`encode`] of a number that is not above the format's maximum: half the work.
#[inline(always)]
fn encode_within<L: Layout>(x: f32) -> u8 {
    let bits = x.to_bits() as i32;
    let magnitude = bits & MAGNITUDE as i32;
    let normal = (rounded_bits::<L>(magnitude) >> (23 - L::MANTISSA)) - ((127 - L::BIAS) << L::MANTISSA);
    let magic = subnormal_magic::<L>();
    let subnormal = (f32::from_bits(magnitude as u32) + magic).to_bits() as i32 - magic.to_bits() as i32;
    let code = if magnitude < min_normal_bits::<L>() { subnormal } else { normal };
    (code | ((bits >> 24) & 0x80)) as u8
}

/// [`round`] of a number that is not above the format's maximum.
#[inline(always)]
fn round_within<L: Layout>(x: f32) -> f32 {
    let magnitude = (x.to_bits() & MAGNITUDE) as i32;
    let normal = rounded_bits::<L>(magnitude) & !((1 << (23 - L::MANTISSA)) - 1);
    let magic = subnormal_magic::<L>();
    let subnormal = ((f32::from_bits(magnitude as u32) + magic) - magic).to_bits() as i32;
    let value = if magnitude < min_normal_bits::<L>() { subnormal } else { normal };
    f32::from_bits(value as u32 | (x.to_bits() & !MAGNITUDE))
}

/// [`Format::round`] for the inner loops of this crate.
#[inline(always)]
pub(crate) fn round_e4m3(x: f32, saturate: bool) -> f32 {
    round::<E4m3>(x, saturate)
}

#[inline(always)]
fn decode<L: Layout>(code: u8) -> f32 {
    let magnitude = i32::from(code & 0x7f);
    // A subnormal code is read one binade up, where it has an implicit one, which is then taken off.
    let subnormal = magnitude < (1 << L::MANTISSA);
    let lifted = if subnormal { magnitude + (1 << L::MANTISSA) } else { magnitude };
    let one = if subnormal { f32::from_bits((L::MIN_EXPONENT as u32) << 23) } else { 0.0 };
    let value = f32::from_bits(((lifted << (23 - L::MANTISSA)) + ((127 - L::BIAS) << 23)) as u32) - one;
    let value = if magnitude > L::MAX_CODE { f32::NAN } else { value };
    let value = if magnitude == L::INF_CODE { f32::INFINITY } else { value };
    f32::from_bits((value.to_bits() & MAGNITUDE) | (u32::from(code & 0x80) << 24))
}

#[cfg(test)]
mod tests;
