//! Where a row's exponentials are shifted to: its maximum, or further ([`Stabilised`]).

use super::lanes;

/// Parameters of the stabilized softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stabilised {
    /// How far a positive repeated maximum is exceeded; greater than 1, the paper uses 2 to 8.
    pub beta: f32,
    /// Logits this close to the maximum repeat it, in nats; the paper's example is 1e-3.
    pub epsilon: f32,
}

impl Stabilised {
    /// Largest distance, in nats, of a row's shift from its maximum: `exp(-40)` leaves f32 and bf16 47 nats of normal
    /// numbers for the row's smaller weights.
    pub const MAX_SHIFT: f32 = 40.0;
}

impl Default for Stabilised {
    /// The paper's beta = 2 and epsilon = 1e-3.
    fn default() -> Self {
        Self { beta: 2.0, epsilon: 1e-3 }
    }
}

/// Where a row's exponentials are shifted to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shift {
    /// The row's maximum.
    RowMaximum,
    /// Further, where the maximum repeats.
    Stabilised(Stabilised),
}

impl Shift {
    /// The shift that the logits `s` with maximum `max` ask for, and whether the maximum repeats.
    #[inline(always)]
    pub(super) fn of(&self, s: &[f32], max: f32) -> (f32, bool) {
        let Self::Stabilised(options) = self else { return (max, false) };
        if lanes::count(s, |s| max - s <= options.epsilon) < 2 {
            return (max, false);
        }
        let wanted = if max > 0.0 { options.beta * max } else { 0.0 };
        (wanted.min(max + Stabilised::MAX_SHIFT), true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_are_those_of_the_paper_up_to_the_limit() {
        let cases: [(&[f32], (f32, bool)); 8] = [
            (&[1.5, 1.5, -3.0], (3.0, true)),
            (&[1.5, 1.4995], (3.0, true)),
            (&[1.5, 1.498], (1.5, false)),
            (&[-1.5, -1.5, -3.0], (0.0, true)),
            (&[0.0, 0.0], (0.0, true)),
            (&[200.0, 200.0], (240.0, true)),
            (&[-200.0, -200.0], (-160.0, true)),
            (&[-200.0], (-200.0, false)),
        ];
        for (s, want) in cases {
            assert_eq!(Shift::Stabilised(Stabilised::default()).of(s, lanes::max(s)), want, "{s:?}");
            assert_eq!(Shift::RowMaximum.of(s, lanes::max(s)), (lanes::max(s), false));
        }
    }
}
