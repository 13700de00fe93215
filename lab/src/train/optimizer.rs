//! AdamW with moments that can be saved (a test compares its bits with candle-nn 0.11), and dynamic loss scaling.

use serde::{Deserialize, Serialize};
use sigmascale::{Error, Result};

/// AdamW as candle-nn computes it, to the bit; it is here because candle keeps the moments private, without which a run
/// can neither resume with its own bits nor go back to a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamW {
    /// As the spectral-bounds paper's Table 8 where it says: decay 0.01.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Moments of one parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Moments {
    pub first: Vec<f32>,
    pub second: Vec<f32>,
}

impl Moments {
    pub(super) fn zeros(len: usize) -> Self {
        Self { first: vec![0.0; len], second: vec![0.0; len] }
    }
}

impl AdamW {
    /// One update of one parameter; `step` counts from 1.
    ///
    /// ```text
    /// m = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2
    /// theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    /// ```
    pub(super) fn update(&self, step: u32, rate: f64, theta: &mut [f32], moments: &mut Moments, gradient: &[f32]) {
        let [b1, c1] = [self.beta1, 1.0 - self.beta1].map(|x| x as f32);
        let [b2, c2] = [self.beta2, 1.0 - self.beta2].map(|x| x as f32);
        let correct = |beta: f64| (1.0 / (1.0 - beta.powi(step as i32))) as f32;
        let (scale_m, scale_v) = (correct(self.beta1), correct(self.beta2));
        let keep = (1.0 - rate * self.weight_decay) as f32;
        let (rate, eps) = (rate as f32, self.eps as f32);
        let moments = moments.first.iter_mut().zip(&mut moments.second);
        for ((theta, (m, v)), g) in theta.iter_mut().zip(moments).zip(gradient) {
            *m = *m * b1 + g * c1;
            *v = *v * b2 + g * g * c2;
            let adjusted = *m * scale_m / ((*v * scale_v).sqrt() + eps);
            *theta = *theta * keep - adjusted * rate;
        }
    }
}

/// Dynamic loss scaling: the loss is multiplied before the backward pass and the gradients divided after it. A gradient
/// that is not finite halves the factor and the step is skipped; a streak of good steps doubles it.
///
/// Source: Mixed Precision Training, arXiv:1710.03740, section 3.2, with the factors of `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// The factor, a power of two.
    pub factor: f64,
    /// Good steps since it last moved.
    pub streak: u32,
    /// Good steps after which it doubles.
    pub patience: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { factor: 32768.0, streak: 0, patience: 2000 }
    }
}

impl LossScale {
    /// Smallest and largest factor.
    pub const RANGE: (f64, f64) = (1.0, 16_777_216.0);

    pub(super) fn check(&self) -> Result<()> {
        let (low, high) = Self::RANGE;
        if !(low..=high).contains(&self.factor) || self.patience == 0 || self.streak >= self.patience {
            return Err(Error::argument(format_args!(
                "loss scale {} with a streak of {} must lie between {low} and {high}, the streak below its patience {}",
                self.factor, self.streak, self.patience
            )));
        }
        Ok(())
    }

    /// Takes in a step.
    pub fn observe(&mut self, finite: bool) {
        if !finite {
            self.factor = (0.5 * self.factor).max(Self::RANGE.0);
            self.streak = 0;
            return;
        }
        self.streak += 1;
        if self.streak >= self.patience {
            self.factor = (2.0 * self.factor).min(Self::RANGE.1);
            self.streak = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};
    use candle_nn::{AdamW as Candle, Optimizer, ParamsAdamW};

    #[test]
    fn every_bit_is_that_of_candle() {
        let start: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
        let var = Var::from_slice(&start, 40, &Device::Cpu).unwrap();
        let ours = AdamW::default();
        let params = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
        let mut candle = Candle::new(vec![var.clone()], params).unwrap();
        let (mut theta, mut moments) = (start, Moments::zeros(40));
        for step in 1..=20u32 {
            // A rate that moves, as in the scenario.
            let rate = if step > 10 { 2.4e-2 } else { 3e-3 };
            candle.set_learning_rate(rate);
            let loss = (var.as_tensor().sin().unwrap() * f64::from(step)).unwrap().sqr().unwrap().sum_all().unwrap();
            let gradients = loss.backward().unwrap();
            let gradient = gradients.get(&var).unwrap().to_vec1::<f32>().unwrap();
            candle.step(&gradients).unwrap();
            ours.update(step, rate, &mut theta, &mut moments, &gradient);
            assert_eq!(theta, var.to_vec1::<f32>().unwrap(), "step {step}");
        }
    }

    #[test]
    fn fifteen_bad_steps_reach_one_and_a_streak_doubles() {
        // Numerics chapter, section 14.3.
        let mut scale = LossScale::default();
        for bad in 1..=20 {
            scale.observe(false);
            assert_eq!(scale.factor, 2f64.powi((15 - bad).max(0)));
        }
        for _ in 0..1999 {
            scale.observe(true);
        }
        assert_eq!(scale.factor, 1.0);
        scale.observe(true);
        assert_eq!((scale.factor, scale.streak), (2.0, 0));
        let mut scale = LossScale { factor: LossScale::RANGE.1, patience: 1, ..scale };
        scale.observe(true);
        assert_eq!(scale.factor, LossScale::RANGE.1);
    }
}
