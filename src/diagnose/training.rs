//! How much training has been done: the sum of the learning rates, or the number of steps where rates are not recorded.
//!
//! Adam moves a weight by about its learning rate per step at most (Kingma and Ba, 2015, section 2.1). So a norm that grows from
//! learning alone grows at most in proportion to this sum, whatever the schedule.

/// The sum so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Training {
    step: Option<u64>,
    lr: Option<f64>,
    sum: f64,
}

impl Training {
    /// Notes that the run is at `step`; true if that lies before a step seen earlier.
    pub fn note(&mut self, step: u64, lr: Option<f64>) -> bool {
        let back = self.step.is_some_and(|last| step < last);
        let lr = lr.filter(|lr| *lr >= 0.0 && lr.is_finite());
        match (self.step, self.lr, lr) {
            // What was trained before the record began counts at its first rate.
            (_, None, Some(lr)) => (self.lr, self.sum) = (Some(lr), lr * step as f64),
            (Some(last), Some(before), _) if step > last => {
                self.sum += lr.unwrap_or(before) * (step - last) as f64;
                self.lr = lr.or(self.lr);
            }
            _ => self.lr = lr.or(self.lr),
        }
        self.step = Some(step);
        back
    }

    /// The training done by `step`, which is the last one noted.
    pub fn at(&self, step: u64) -> f64 {
        if self.lr.is_some() { self.sum } else { step as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_summed_and_steps_stand_in_for_them() {
        let mut steps = Training::default();
        assert!(!steps.note(5, None) && steps.at(5) == 5.0);
        let mut rates = Training::default();
        for (step, lr) in [(10, Some(0.5)), (10, None), (12, Some(1.0)), (14, None)] {
            assert!(!rates.note(step, lr));
        }
        assert_eq!(rates.at(14), 5.0 + 2.0 + 2.0);
        assert!(rates.note(11, Some(1.0)));
    }
}
