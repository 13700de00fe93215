//! Gains of a norm as they multiply, from stored ones.

use super::spec::GainForm;
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

/// Gains of one norm whose outputs hold the mean of `streams` norms of the same width, each element times a gate of at most 1 in
/// magnitude: `y = 1/n sum_s a_s * g_s * x_s`. For every w, `|w y| <= sqrt(d)/n sum_s ||w g_s|| <= sqrt(d) ||w rms_s(g_s)||`, so y
/// lies in the ellipsoid of the root mean squares. Each is rounded up.
pub(super) fn mean_of_streams(stored: &[f64], form: GainForm, streams: usize) -> Vec<f64> {
    let each = gains(stored, form).values;
    let d = each.len() / streams;
    let up = 1.0 + (streams + 3) as f64 * f64::EPSILON;
    let rms = |c: usize| (each.iter().skip(c).step_by(d).map(|g| g * g).sum::<f64>() / streams as f64).sqrt();
    (0..d).map(|c| up * rms(c)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_count_by_the_root_of_their_mean_square() {
        // Two streams of three channels; stored gains are less 1.
        let found = mean_of_streams(&[2.0, -1.0, 0.0, 3.0, 0.0, 0.0], GainForm::OnePlus, 2);
        for (found, exact) in found.iter().zip([12.5f64.sqrt(), 0.5f64.sqrt(), 1.0]) {
            assert!((exact..exact * (1.0 + 1e-14)).contains(found), "{found} {exact}");
        }
    }
}
