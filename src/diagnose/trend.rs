//! Estimators that a few wild points do not move: medians, the Theil-Sen slope, and a sequential test of signs.

use std::collections::VecDeque;

/// Consistency factor of the median absolute deviation for normal data.
const MAD: f64 = 1.4826;

/// The median; `None` without values. Reorders them.
pub fn median(values: &mut [f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    Some(if values.len() % 2 == 1 { values[middle] } else { 0.5 * (values[middle - 1] + values[middle]) })
}

/// Median and robust standard deviation (1.4826 times the median absolute deviation).
pub fn location(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let mut values: Vec<f64> = values.collect();
    let middle = median(&mut values)?;
    values.iter_mut().for_each(|value| *value = (*value - middle).abs());
    Some((middle, MAD * median(&mut values)?))
}

/// Theil-Sen estimator: the median of the slopes of all pairs of points with different x. Up to 29 % of the points may be
/// arbitrary. Two points give their own slope; fewer give none.
pub fn slope(points: impl Iterator<Item = (f64, f64)> + Clone) -> Option<f64> {
    let mut slopes = Vec::new();
    for (place, (x, y)) in points.clone().enumerate() {
        let later = points.clone().skip(place + 1).filter(|(other, _)| *other != x);
        slopes.extend(later.map(|(other, value)| (value - y) / (other - x)));
    }
    median(&mut slopes)
}

/// The last observations of a positive quantity: step, training done by then, and the natural logarithm.
#[derive(Clone, Debug, Default)]
pub struct LogWindow {
    points: VecDeque<(f64, f64, f64)>,
}

impl LogWindow {
    /// Adds an observation and forgets those before the last `window`. Values that have no logarithm are left out.
    pub fn push(&mut self, step: f64, training: f64, value: f64, window: usize) {
        if !(value > 0.0 && value.is_finite()) {
            return;
        }
        while self.points.len() >= window {
            self.points.pop_front();
        }
        self.points.push_back((step, training, value.ln()));
    }

    /// Observations held.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Growth per step of the logarithm.
    pub fn rate(&self) -> Option<f64> {
        slope(self.points.iter().map(|(step, _, log)| (*step, *log)))
    }

    /// `d ln(value) / d ln(training)`: 1 for a value in proportion to the training done.
    pub fn exponent(&self) -> Option<f64> {
        slope(self.points.iter().filter(|point| point.1 > 0.0).map(|(_, training, log)| (training.ln(), *log)))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.points.clear();
    }
}

/// Page's CUSUM on signs: is one sign persistent?
///
/// It adds `ln(0.95 / 0.6)` for each sign that agrees, `ln(0.05 / 0.4)` for each that does not, and starts again from 0 where the
/// sum is negative. While the sign has a probability of at most 0.6, independent of the past, the mean number of observations
/// until the sum reaches `h` is at least `exp(h)` (Lorden, 1971).
#[derive(Clone, Copy, Debug, Default)]
pub struct Signs {
    positive: f64,
    negative: f64,
}

impl Signs {
    /// Adds an observation; sums are kept at most at `most`, so that a change of sign shows at once.
    pub fn push(&mut self, value: f64, most: f64) {
        let (agrees, differs) = ((0.95f64 / 0.6).ln(), (0.05f64 / 0.4).ln());
        // No sign, no evidence.
        if value > 0.0 || value < 0.0 {
            let add = |sum: f64, same: bool| (sum + if same { agrees } else { differs }).clamp(0.0, most);
            self.positive = add(self.positive, value > 0.0);
            self.negative = add(self.negative, value < 0.0);
        }
    }

    /// The larger of the two sums.
    pub fn evidence(&self) -> f64 {
        self.positive.max(self.negative)
    }

    /// Whether the larger sum is that of positive signs.
    pub fn is_positive(&self) -> bool {
        self.positive >= self.negative
    }

    /// The sum that keeps false alarms of `tests` such tests at `rate` per observation in all.
    pub fn limit(tests: usize, rate: f64) -> f64 {
        (2.0 * tests.max(1) as f64 / rate).ln()
    }
}

/// Hysteresis: raised after `hold` observations in a row that are high, cleared after `hold` in a row that are low.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gate {
    up: bool,
    run: usize,
    since: u64,
}

/// What a gate did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It was raised; the step of the first of the observations that raised it.
    Raised(u64),
    /// It was cleared.
    Cleared,
}

impl Gate {
    /// Takes in one observation. An observation may be neither high nor low.
    pub fn observe(&mut self, step: u64, high: bool, low: bool, hold: usize) -> Option<Turn> {
        if !(if self.up { low } else { high }) {
            self.run = 0;
            return None;
        }
        if self.run == 0 {
            self.since = step;
        }
        self.run += 1;
        if self.run < hold {
            return None;
        }
        (self.up, self.run) = (!self.up, 0);
        Some(if self.up { Turn::Raised(self.since) } else { Turn::Cleared })
    }

    /// Whether it is raised.
    pub fn up(&self) -> bool {
        self.up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_survive_wild_points_and_few_points() {
        let line = |n: usize| (0..n).map(|x| (x as f64, 3.0 + 0.5 * x as f64));
        assert_eq!(slope(line(1)), None);
        assert_eq!(slope(line(2)), Some(0.5));
        assert_eq!(slope(std::iter::repeat_n((1.0, 2.0), 5)), None);
        let mut wild: Vec<(f64, f64)> = line(20).collect();
        for place in [0, 7, 13, 19] {
            wild[place].1 = 1e6;
        }
        assert!((slope(wild.into_iter()).unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(location([1.0, 2.0, 3.0, 4.0, 1e9].into_iter()), Some((3.0, MAD)));
    }

    #[test]
    fn exponents_are_those_of_powers() {
        let mut window = LogWindow::default();
        for step in 1..=40 {
            window.push(f64::from(step), f64::from(step), 7.0 * f64::from(step).powf(0.6), 16);
        }
        window.push(41.0, 41.0, f64::NAN, 16);
        assert_eq!(window.len(), 16);
        assert!((window.exponent().unwrap() - 0.6).abs() < 1e-9);
        let rate = window.rate().unwrap();
        assert!(rate > 0.6 / 40.0 && rate < 0.6 / 25.0, "{rate}");
    }

    /// The promise of the limit, counted: signs at the edge of what counts as calm.
    #[test]
    fn false_alarms_of_signs_are_as_rare_as_promised() {
        use rand::{RngExt, SeedableRng, rngs::StdRng};
        let mut random = StdRng::seed_from_u64(1);
        let (rate, observations) = (1e-3, 200_000);
        let limit = Signs::limit(1, rate);
        let (mut signs, mut alarms) = (Signs::default(), 0);
        for _ in 0..observations {
            signs.push(if random.random::<f64>() < 0.6 { 1.0 } else { -1.0 }, limit);
            if signs.evidence() >= limit {
                alarms += 1;
                signs = Signs::default();
            }
        }
        assert!(f64::from(alarms) <= rate * f64::from(observations), "{alarms}");
        let mut signs = Signs::default();
        let needed = (1..).find(|_| {
            signs.push(-1.0, limit);
            signs.evidence() >= limit
        });
        assert_eq!(needed, Some(17));
    }

    #[test]
    fn gates_wait_and_hold() {
        let mut gate = Gate::default();
        let turns: Vec<_> = [9, 1, 9, 9, 5, 5, 1, 5, 1, 1]
            .into_iter()
            .enumerate()
            .filter_map(|(step, x)| gate.observe(step as u64, x > 8, x < 3, 2))
            .collect();
        assert_eq!(turns, [Turn::Raised(2), Turn::Cleared]);
    }
}
