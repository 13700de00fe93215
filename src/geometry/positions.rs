//! What a rotation does to a constant over the positions of a sequence.

use super::Rotary;
use std::f64::consts::TAU;

impl Rotary {
    /// Mean over the positions `0..positions` of a vector that every position rotates.
    ///
    /// With `z = x_a + i x_b` of a pair and its angle w, the mean of `z e^{iwt}` is the geometric series
    /// `z e^{i(n-1)w/2} sin(nw/2) / (n sin(w/2))`. So slow pairs keep their constant and fast ones have nearly none. The angles
    /// are the largest where a config does not settle them (dynamic scaling at a sequence's start, axes of text); pairs
    /// of unknown angles count as fast. Channels that do not rotate keep theirs.
    ///
    /// ```
    /// use sigmascale::geometry::Rotary;
    /// let quarter = std::f64::consts::FRAC_PI_2;
    /// let rotary = Rotary { pairs: vec![(0, 1)], fixed: vec![2, 3], fastest: Some(vec![quarter]), ..Rotary::default() };
    /// // (1, 0) and (0, 1).
    /// let mean = rotary.mean(&[1.0, 0.0, 7.0, 8.0], 2);
    /// assert!(mean.iter().zip([0.5, 0.5, 7.0, 8.0]).all(|(have, want)| (have - want).abs() < 1e-15));
    /// ```
    pub fn mean(&self, x: &[f64], positions: usize) -> Vec<f64> {
        let mut mean = x.to_vec();
        for (pair, &(a, b)) in self.pairs.iter().enumerate() {
            let turned = self.fastest.as_ref().map_or((0.0, 0.0), |angles| {
                let (re, im) = mean_turn(angles[pair], positions);
                (x[a] * re - x[b] * im, x[a] * im + x[b] * re)
            });
            (mean[a], mean[b]) = turned;
        }
        mean
    }
}

/// Mean of `e^{iwt}` over t in `0..n`.
fn mean_turn(w: f64, n: usize) -> (f64, f64) {
    // Whole turns between two positions change nothing.
    let w = w - TAU * (w / TAU).round();
    let n = n.max(1) as f64;
    let length = if w == 0.0 { 1.0 } else { (n * w / 2.0).sin() / (n * (w / 2.0).sin()) };
    let (sin, cos) = ((n - 1.0) * w / 2.0).sin_cos();
    (length * cos, length * sin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closed_form_is_the_sum_over_positions() {
        for n in [1, 2, 3, 7, 100, 2048] {
            for w in [0.0, 1e-300, 1e-9, 1e-4, 0.01, 0.3, 1.0, -0.7, 3.0, TAU, TAU - 1e-7, 20.0] {
                let direct = (0..n).fold((0.0, 0.0), |sum: (f64, f64), t| {
                    let (sin, cos) = (w * t as f64).sin_cos();
                    (sum.0 + cos, sum.1 + sin)
                });
                let (re, im) = mean_turn(w, n);
                let error = (re - direct.0 / n as f64).hypot(im - direct.1 / n as f64);
                assert!(error < 1e-12, "{w} {n}: {error:e}");
            }
        }
    }
}
