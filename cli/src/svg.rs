//! Axes and headers of the pictures.

use super::html::escape;

/// Beyond this ratio of extremes an axis is logarithmic.
const LOG_FROM: f64 = 12.0;

/// An axis from the smallest to the largest value, logarithmic where they are far apart.
pub struct Axis {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Whether it is logarithmic.
    pub log: bool,
}

impl Axis {
    /// Over the positive values; a linear axis starts at `floor` where that is given.
    pub fn new(values: impl Iterator<Item = f64>, floor: Option<f64>) -> Self {
        let values: Vec<f64> = values.filter(|x| x.is_finite() && *x > 0.0).collect();
        if values.is_empty() {
            return Self { low: 0.0, high: 1.0, log: false };
        }
        let (low, high) = extremes(&values);
        if high / low > LOG_FROM {
            return Self { low, high, log: true };
        }
        Self { low: floor.unwrap_or(low), high, log: false }
    }

    /// Linear, over values of any sign.
    pub fn linear(values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.filter(|x| x.is_finite()).collect();
        if values.is_empty() {
            return Self { low: 0.0, high: 1.0, log: false };
        }
        let (low, high) = extremes(&values);
        Self { low, high, log: false }
    }

    /// Place between 0 and 1.
    pub fn place(&self, value: f64) -> f64 {
        let (x, low, high) = match self.log {
            true => (value.max(self.low).ln(), self.low.ln(), self.high.ln()),
            false => (value, self.low, self.high),
        };
        if high > low { ((x - low) / (high - low)).clamp(0.0, 1.0) } else { 1.0 }
    }

    /// Round values to mark.
    pub fn ticks(&self) -> Vec<f64> {
        if self.log {
            let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let all = |steps: &'static [f64]| {
                let values = decades.clone().flat_map(move |e| steps.iter().map(move |s| s * 10f64.powi(e)));
                values.filter(|x| (self.low..=self.high).contains(x)).collect::<Vec<f64>>()
            };
            let fine = all(&[1.0, 2.0, 5.0]);
            return if fine.len() > 7 { all(&[1.0]) } else { fine };
        }
        let rough = (self.high - self.low) / 4.0;
        if rough <= 0.0 {
            return vec![self.high];
        }
        let base = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * base).into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..=(self.high / step).floor() as i64).map(|i| i as f64 * step).collect()
    }
}

/// Smallest and largest value.
pub fn extremes(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)))
}

/// A tick label without needless zeros.
pub fn label(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "0" && value != 0.0 { format!("{value:.0e}") } else { text.to_owned() }
}

/// The start of a picture of this size, with a name for readers that do not see it.
pub fn open_svg(width: f64, height: f64, name: &str) -> String {
    format!(
        "<svg width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
         aria-label=\"{}\">",
        escape(name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_mark_round_values() {
        let linear = Axis::new([2.0, 9.0].into_iter(), Some(0.0));
        assert_eq!(linear.ticks(), [0.0, 5.0]);
        let log = Axis::new([0.9, 110.0].into_iter(), Some(0.0));
        assert!(log.log);
        assert_eq!(log.ticks().first(), Some(&1.0));
        assert_eq!((log.place(0.9), log.place(110.0)), (0.0, 1.0));
        let one = Axis::new(std::iter::once(3.0), None);
        assert_eq!((one.place(3.0), one.ticks()), (1.0, vec![3.0]));
        let signed = Axis::linear([-0.25, f64::NAN, 0.25].into_iter());
        assert_eq!((signed.place(0.0), signed.ticks()), (0.5, vec![-0.2, 0.0, 0.2]));
        assert_eq!([label(0.0), label(0.5), label(20.0), label(2e-8)], ["0", "0.5", "20", "2e-8"]);
    }
}
