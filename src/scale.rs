//! The two directions of a scale, as two types; a bound becomes a descale by [`Descale::covering`].
//!
//! [`Descale`] turns FP8 back into the value: `x ~ e4m3(x / descale) * descale` (FlashAttention-3 and cuDNN
//! `descale_*`, vLLM `*_scale`, the paper's "scale"). [`QuantScale`] is its inverse (TransformerEngine `scale`, cuDNN
//! `scale_s`, `scale_o`). Both are finite and greater than zero.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Multiplier that turns an FP8 code back into the value; values are divided by it before the cast.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct Descale(f32);

/// Multiplier applied before the cast: `1 / descale`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct QuantScale(f32);

impl Descale {
    /// Changes nothing: also the descale of a head that is identically zero.
    pub const ONE: Self = Self(1.0);

    /// A descale from its value.
    ///
    /// # Errors
    /// If `value` is not finite and greater than zero.
    pub fn new(value: f32) -> Result<Self> {
        positive(value, "descale").map(Self)
    }

    /// The descale that maps `bound` onto `target` (448 for E4M3), rounded up so that `bound / descale <= target` also
    /// holds in f32; 1 for a zero bound.
    ///
    /// # Errors
    /// `is_argument` if `bound` is negative; `is_non_finite` if it is not finite or the descale leaves the range of f32.
    ///
    /// ```
    /// # use sigmascale::Descale;
    /// assert_eq!(Descale::covering(896.0, 448.0)?.get(), 2.0);
    /// assert_eq!(Descale::covering(0.0, 448.0)?, Descale::ONE);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn covering(bound: f64, target: f64) -> Result<Self> {
        if !bound.is_finite() {
            return Err(Error::non_finite(format_args!("bound {bound} must be finite")));
        }
        if bound < 0.0 {
            return Err(Error::argument(format_args!("bound {bound} must not be negative")));
        }
        if bound == 0.0 {
            return Ok(Self::ONE);
        }
        let exact = bound / target;
        if exact > f64::from(f32::MAX) {
            return Err(Error::non_finite(format_args!(
                "bound {bound:e} needs a descale of {exact:e}, past the range of f32"
            )));
        }
        let mut value = exact as f32;
        if f64::from(value) * target < bound {
            value = value.next_up();
        }
        // A subnormal descale would make `1 / descale` infinite.
        Self::new(value.max(f32::MIN_POSITIVE))
    }

    /// The smallest BF16 value that is not below it: a loader that rounds scales to BF16 then keeps it.
    ///
    /// # Errors
    /// `is_non_finite` if that is past the range of BF16.
    ///
    /// ```
    /// # use sigmascale::Descale;
    /// assert_eq!(Descale::new(1.001)?.up_to_bf16()?.get(), 1.0078125);
    /// assert_eq!(Descale::ONE.up_to_bf16()?, Descale::ONE);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn up_to_bf16(self) -> Result<Self> {
        let value = f32::from_bits(self.0.to_bits().saturating_add(0xffff) & 0xffff_0000);
        if !value.is_finite() {
            return Err(Error::non_finite(format_args!("descale {} is past the range of BF16", self.0)));
        }
        // Small enough for its inverse to be infinite is no descale, and rounding up cannot make one so.
        Self::new(value)
    }

    /// The value.
    pub fn get(self) -> f32 {
        self.0
    }

    /// The inverse, for libraries that multiply before the cast.
    pub fn quant_scale(self) -> QuantScale {
        QuantScale(1.0 / self.0)
    }

    /// The larger of two.
    pub fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }
}

impl QuantScale {
    /// A quantization scale from its value.
    ///
    /// # Errors
    /// If `value` is not finite and greater than zero.
    pub fn new(value: f32) -> Result<Self> {
        positive(value, "quantization scale").map(Self)
    }

    /// The value.
    pub fn get(self) -> f32 {
        self.0
    }

    /// The inverse.
    pub fn descale(self) -> Descale {
        Descale(1.0 / self.0)
    }
}

fn positive(value: f32, name: &str) -> Result<f32> {
    // The inverse has to exist too, which rules out subnormals.
    if value.is_finite() && value > 0.0 && (1.0 / value).is_finite() {
        Ok(value)
    } else {
        Err(Error::argument(format_args!("{name} {value} must be finite and greater than zero")))
    }
}

macro_rules! conversions {
    ($name:ident) => {
        impl TryFrom<f32> for $name {
            type Error = Error;
            fn try_from(value: f32) -> Result<Self> {
                Self::new(value)
            }
        }
        impl From<$name> for f32 {
            fn from(scale: $name) -> f32 {
                scale.0
            }
        }
    };
}
conversions!(Descale);
conversions!(QuantScale);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_negative_and_non_finite_are_refused() {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
            assert!(Descale::new(bad).is_err(), "{bad}");
            assert!(QuantScale::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_negative_bound_is_finite_and_refused_as_an_argument() {
        let error = Descale::covering(-1.0, 448.0).unwrap_err();
        assert!(error.is_argument() && !error.is_non_finite(), "{error}");
        assert_eq!(error.to_string(), "bound -1 must not be negative");
        assert!(Descale::covering(f64::NAN, 448.0).unwrap_err().is_non_finite());
    }

    #[test]
    fn covering_never_rounds_below_the_bound() {
        for i in 1..20_000u32 {
            let bound = f64::from(i) * 0.001_234_567_89;
            let descale = Descale::covering(bound, 448.0).unwrap();
            assert!(f64::from(descale.get()) * 448.0 >= bound, "{bound}");
            assert!(f64::from(descale.get()) * 448.0 <= bound * (1.0 + 2.4e-7), "{bound}");
        }
    }

    #[test]
    fn serde_checks_the_value() {
        assert!(serde_json::from_str::<Descale>("0.0").is_err());
        assert_eq!(serde_json::from_str::<Descale>("0.5").unwrap().quant_scale().get(), 2.0);
    }
}
