//! Gains of a norm as they multiply, from stored ones.

use crate::model::GainForm;
use half::{bf16, f16};

/// Gains as they multiply.
pub(crate) struct Gains {
    pub values: Vec<f64>,
    /// Whether any is another one after the rounding of its stored value.
    pub rounded: bool,
}

/// The gains behind stored ones. Where 1 is added, a load in 16 bits rounds `g` and not `1 + g`, which may be far smaller: the
/// larger of the readings counts, and with it every bound, since the others shorten the input channel by channel.
pub(crate) fn gains(stored: &[f64], form: GainForm) -> Gains {
    let mut rounded = false;
    let one_plus = |g: f64| {
        let bf16 = f64::from(bf16::from_f32(g as f32).to_f32());
        if bf16 == g {
            return 1.0 + g;
        }
        rounded = true;
        let loaded = [bf16, f64::from(f16::from_f32(g as f32).to_f32())];
        let larger = |a: f64, b: f64| if b.is_finite() && b.abs() > a.abs() { b } else { a };
        loaded.into_iter().fold(1.0 + g, |most, g| larger(most, 1.0 + g))
    };
    let values = match form {
        GainForm::Plain => stored.to_vec(),
        GainForm::OnePlus => stored.iter().copied().map(one_plus).collect(),
        GainForm::Unit => vec![1.0; stored.len()],
    };
    Gains { values, rounded }
}
