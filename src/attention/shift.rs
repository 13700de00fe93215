//! Where a row's exponentials are shifted to: its maximum, or further ([`ShiftedSoftmax`]).

use super::lanes;
use serde::Serialize;

/// Parameters of the shifted softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShiftedSoftmax {
    /// How far a positive repeated maximum is exceeded; greater than 1, the paper uses 2 to 8.
    pub beta: f32,
    /// Logits this close to the maximum repeat it, in nats; the paper's example is 1e-3.
    pub epsilon: f32,
    /// What happens to shifts that would empty the row.
    pub limit: ShiftLimit,
}

impl ShiftedSoftmax {
    /// Largest distance, in nats, of a row's shift from its maximum: `exp(-40)` leaves f32 and bf16 47 nats of normal
    /// numbers for the row's smaller weights.
    pub const MAX_SHIFT: f32 = 40.0;
}

impl Default for ShiftedSoftmax {
    /// The paper's beta = 2 and epsilon = 1e-3, and the limit that keeps P unbiased.
    fn default() -> Self {
        Self { beta: 2.0, epsilon: 1e-3, limit: ShiftLimit::Wrapped }
    }
}

/// What a shift w of more than [`ShiftedSoftmax::MAX_SHIFT`] nats beyond the row's maximum becomes.
///
/// The largest P of the row is `bf16(exp(-shift))`. One shift for all rows rounds all of them in one direction, which is the
/// fixed offset of the low-precision paper's appendix C. A shift of `k ln 2` makes P a power of two, which bfloat16 holds
/// exactly; products with V then have V's own bits, and their sums tie as they do with P = 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShiftLimit {
    /// `20 + w mod 20`: it moves with the row's maximum, so that P rounds either way.
    #[default]
    Wrapped,
    /// This many nats for every such row, at most [`ShiftedSoftmax::MAX_SHIFT`]. Biased: for comparison only.
    Fixed(f32),
    /// `w mod ln 2`, whatever w is: less than an octave, which leaves P in E4M3 and F16 their range.
    Octave,
}

impl ShiftLimit {
    #[inline(always)]
    fn of(self, wanted: f32) -> f32 {
        const HALF: f32 = 0.5 * ShiftedSoftmax::MAX_SHIFT;
        match self {
            Self::Octave => {
                if wanted.is_finite() {
                    wanted % std::f32::consts::LN_2
                } else {
                    0.0
                }
            }
            _ if wanted <= ShiftedSoftmax::MAX_SHIFT => wanted,
            // NaN and infinity have no remainder.
            Self::Wrapped => {
                if wanted.is_finite() {
                    HALF + wanted % HALF
                } else {
                    ShiftedSoftmax::MAX_SHIFT
                }
            }
            Self::Fixed(nats) => nats,
        }
    }
}

/// Where a row's exponentials are shifted to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shift {
    /// The row's maximum.
    RowMaximum,
    /// Further, where the maximum repeats.
    Further(ShiftedSoftmax),
}

impl Shift {
    /// The shift that the logits `s` with maximum `max` ask for, and whether the maximum repeats.
    #[inline(always)]
    pub(super) fn of(&self, s: &[f32], max: f32) -> (f32, bool) {
        let Self::Further(options) = self else { return (max, false) };
        if lanes::count(s, |s| max - s <= options.epsilon) < 2 {
            return (max, false);
        }
        let wanted = if max > 0.0 { (options.beta - 1.0) * max } else { -max };
        (max + options.limit.of(wanted), true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn shifts_are_those_of_the_paper_up_to_the_limit() {
        let cases: [(&[f32], (f32, bool)); 9] = [
            (&[1.5, 1.5, -3.0], (3.0, true)),
            (&[1.5, 1.4995], (3.0, true)),
            (&[1.5, 1.498], (1.5, false)),
            (&[-1.5, -1.5, -3.0], (0.0, true)),
            (&[0.0, 0.0], (0.0, true)),
            (&[40.0, 40.0], (80.0, true)),
            (&[207.0, 207.0], (234.0, true)),
            (&[-207.0, -207.0], (-180.0, true)),
            (&[-200.0], (-200.0, false)),
        ];
        for (s, want) in cases {
            assert_eq!(Shift::Further(ShiftedSoftmax::default()).of(s, lanes::max(s)), want, "{s:?}");
            assert_eq!(Shift::RowMaximum.of(s, lanes::max(s)), (lanes::max(s), false));
        }
    }

    /// The shifts of rows whose maxima lie between 41 and 400.
    fn shifts(limit: ShiftLimit) -> Vec<f32> {
        let shift = Shift::Further(ShiftedSoftmax { limit, ..ShiftedSoftmax::default() });
        (0..10_000).map(|i| 41.0 + 0.0359 * i as f32).map(|max| shift.of(&[max, max], max).0 - max).collect()
    }

    #[test]
    fn past_the_limit_p_is_unbiased_and_keeps_its_range() {
        let bias = |limit| {
            let shifts = shifts(limit);
            let error = |shift: &f32| {
                let p = lanes::exp(-shift);
                f64::from(bf16::from_f32(p).to_f32() / p) - 1.0
            };
            assert!(shifts.iter().all(|shift| (20.0..=40.01).contains(shift)), "{limit:?}");
            shifts.iter().map(error).sum::<f64>() / shifts.len() as f64
        };
        let fixed = bias(ShiftLimit::Fixed(40.0));
        assert!(fixed > 1.5e-3, "{fixed}");
        let wrapped = bias(ShiftLimit::Wrapped);
        assert!(wrapped.abs() < fixed / 50.0, "{wrapped}");
    }

    #[test]
    fn an_octave_leaves_e4m3_and_f16_their_range() {
        assert!(shifts(ShiftLimit::Octave).iter().all(|shift| (0.0..0.6932).contains(shift)));
    }

    #[test]
    fn a_power_of_two_is_exact_and_ties_as_one_does() {
        // Sums of three products that lie halfway between two bf16 numbers, of values with all 128 significands.
        let ties = |limit| {
            let shifts = shifts(limit);
            let tie = |(i, shift): (usize, &f32)| {
                let p = bf16::from_f32(lanes::exp(-shift)).to_f32();
                let sum = 3.0 * p * (1.0 + (i % 128) as f32 / 128.0);
                sum.to_bits() & 0xffff == 0x8000
            };
            shifts.iter().enumerate().filter(|&at| tie(at)).count() as f64 / shifts.len() as f64
        };
        let power = ties(ShiftLimit::Fixed(57.0 * std::f32::consts::LN_2));
        assert!(power > 0.3, "{power}");
        let wrapped = ties(ShiftLimit::Wrapped);
        assert!(wrapped < 0.03, "{wrapped}");
    }
}
