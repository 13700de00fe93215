//! How much training has been done: the sum of the learning rates.
//!
//! Adam moves an entry of a matrix by about its learning rate per step at most (Kingma and Ba, 2015, section 2.1). So
//! the spectral norm of a `r x d` matrix grows by at most about `sqrt(r d)` per unit of this sum, whatever the
//! schedule.

/// The sum so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Training {
    step: Option<u64>,
    lr: Option<f64>,
    sum: f64,
}

impl Training {
    /// Notes that the run is at `step`; true if that lies before a step seen earlier. A rate holds until the next.
    pub fn note(&mut self, step: u64, lr: Option<f64>) -> bool {
        let back = self.step.is_some_and(|last| step < last);
        if let (Some(last), Some(lr)) = (self.step, self.lr) {
            self.sum += lr * step.saturating_sub(last) as f64;
        }
        self.lr = lr.filter(|lr| *lr >= 0.0 && lr.is_finite()).or(self.lr);
        self.step = Some(step);
        back
    }

    /// The training done since the first rate that is known; `None` before it.
    pub fn done(&self) -> Option<f64> {
        self.lr.map(|_| self.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_summed_over_the_steps_that_they_hold() {
        let mut training = Training::default();
        assert!(!training.note(5, None) && training.done().is_none());
        for (step, lr) in [(10, Some(0.5)), (10, None), (12, Some(1.0)), (13, Some(f64::NAN)), (14, None)] {
            assert!(!training.note(step, lr));
        }
        assert_eq!(training.done(), Some(2.0 * 0.5 + 2.0 * 1.0));
        assert!(training.note(11, Some(1.0)));
        assert_eq!(training.done(), Some(3.0));
    }
}
