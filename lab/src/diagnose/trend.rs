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

/// Theil-Sen estimator: the median of the slopes of all pairs of points with different x. Up to 29 % of the points may
/// be arbitrary. Two points give their own slope; fewer give none.
pub fn slope(points: impl Iterator<Item = (f64, f64)> + Clone) -> Option<f64> {
    let mut slopes = Vec::new();
    for (place, (x, y)) in points.clone().enumerate() {
        let later = points.clone().skip(place + 1).filter(|(other, _)| *other != x);
        slopes.extend(later.map(|(other, value)| (value - y) / (other - x)));
    }
    median(&mut slopes)
}

/// The last observations of a quantity as points `(x, y)`.
#[derive(Clone, Debug, Default)]
pub struct Window {
    points: VecDeque<(f64, f64)>,
}

impl Window {
    /// Adds an observation and forgets those before the last `window`. What is not finite is left out.
    pub fn push(&mut self, x: f64, y: f64, window: usize) {
        if x.is_finite() && y.is_finite() {
            while self.points.len() >= window {
                self.points.pop_front();
            }
            self.points.push_back((x, y));
        }
    }

    /// Observations held.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// The latest.
    pub fn last(&self) -> Option<(f64, f64)> {
        self.points.back().copied()
    }

    /// Slope of y against x, of at least `least` points.
    pub fn slope(&self, least: usize) -> Option<f64> {
        slope(self.points.iter().copied()).filter(|slope| self.points.len() >= least && slope.is_finite())
    }

    /// Median of y.
    pub fn median(&self) -> Option<f64> {
        median(&mut self.points.iter().map(|point| point.1).collect::<Vec<_>>())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.points.clear();
    }
}

/// Page's CUSUM on signs: is one sign persistent?
///
/// It adds `ln(0.95 / 0.6)` for each sign that agrees, `ln(0.05 / 0.4)` for each that does not, and starts again from 0
/// where the sum is negative. While the sign has a probability of at most 0.6, independent of the past, the mean number
/// of observations until the sum reaches `h` is at least `exp(h)` (Lorden, 1971).
#[derive(Clone, Copy, Debug, Default)]
pub struct Signs {
    positive: Sum,
    negative: Sum,
}

/// Evidence for one sign, and the step since which there has been some.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    value: f64,
    since: u64,
}

impl Sum {
    fn add(&mut self, step: u64, agrees: bool, most: f64) {
        if self.value <= 0.0 {
            self.since = step;
        }
        let term = if agrees { (0.95f64 / 0.6).ln() } else { (0.05f64 / 0.4).ln() };
        self.value = (self.value + term).clamp(0.0, most);
    }
}

impl Signs {
    /// Adds an observation; sums are kept at most at `most`, so that a change of sign shows at once.
    pub fn push(&mut self, step: u64, value: f64, most: f64) {
        // No sign, no evidence; NaN has none.
        if value.abs() > 0.0 {
            self.positive.add(step, value > 0.0, most);
            self.negative.add(step, value < 0.0, most);
        }
    }

    fn larger(&self) -> Sum {
        if self.is_positive() { self.positive } else { self.negative }
    }

    /// The larger of the two sums.
    pub fn evidence(&self) -> f64 {
        self.larger().value
    }

    /// Step since which the larger sum has been above 0.
    pub fn since(&self) -> u64 {
        self.larger().since
    }

    /// Whether the larger sum is that of positive signs.
    pub fn is_positive(&self) -> bool {
        self.positive.value >= self.negative.value
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
    fn windows_forget_and_skip_what_is_not_finite() {
        let mut window = Window::default();
        for step in 1..=40 {
            window.push(f64::from(step), 7.0 - 2.0 * f64::from(step), 16);
        }
        window.push(41.0, f64::NAN, 16);
        assert_eq!((window.len(), window.slope(16), window.slope(17)), (16, Some(-2.0), None));
        assert_eq!((window.last(), window.median()), (Some((40.0, -73.0)), Some(-58.0)));
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
            signs.push(0, if random.random::<f64>() < 0.6 { 1.0 } else { -1.0 }, limit);
            if signs.evidence() >= limit {
                alarms += 1;
                signs = Signs::default();
            }
        }
        assert!(f64::from(alarms) <= rate * f64::from(observations), "{alarms}");
        let mut signs = Signs::default();
        let needed = (1..).find(|step| {
            signs.push(*step, -1.0, limit);
            signs.evidence() >= limit
        });
        assert_eq!((needed, signs.since()), (Some(17), 1));
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
