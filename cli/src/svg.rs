//! The building blocks of pictures: shapes, axes, and a map of cells.

use super::html::escape;
use std::fmt::Write;

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

/// A picture under construction.
pub struct Svg(String);

/// Which point of a text is placed.
#[derive(Clone, Copy)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

impl Svg {
    /// Of this size, with a name for readers that do not see it.
    pub fn new(width: f64, height: f64, name: &str) -> Self {
        Self(format!(
            "<svg width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
             aria-label=\"{}\">",
            escape(name)
        ))
    }

    /// A line from one point to another.
    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        self.add(format_args!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"));
    }

    /// A text in plain words.
    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, text: &str) {
        self.text_of("", at, anchor, text);
    }

    fn text_of(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let class =
            if class.is_empty() { String::new() } else { format!(" class=\"{class}\" pointer-events=\"none\"") };
        let text = escape(text);
        self.add(format_args!("<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    /// A dot with its tooltip.
    pub fn dot(&mut self, class: &str, (x, y): (f64, f64), radius: f64, about: &str) {
        let about = escape(about);
        self.add(format_args!(
            "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"><title>{about}</title></circle>"
        ));
    }

    /// A curve through points, with its dashes and width where they are not the class's.
    pub fn curve(&mut self, class: &str, dash: &str, width: Option<usize>, points: impl Iterator<Item = (f64, f64)>) {
        let mut path = String::new();
        for (x, y) in points {
            let _ = write!(path, "{}{x:.1} {y:.1}", if path.is_empty() { 'M' } else { 'L' });
        }
        let width = width.map_or_else(String::new, |width| format!(" style=\"stroke-width:{width}\""));
        self.add(format_args!("<path class=\"{class}\"{width} stroke-dasharray=\"{dash}\" d=\"{path}\"/>"));
    }

    /// Shapes that share a class.
    pub fn group(&mut self, class: &str, shapes: impl FnOnce(&mut Self)) {
        self.add(format_args!("<g class=\"{class}\">"));
        shapes(self);
        self.0.push_str("</g>");
    }

    /// Values to the left of a chart, and a line across it for each.
    pub fn rows(&mut self, axis: &Axis, (left, right): (f64, f64), y: impl Fn(f64) -> f64) {
        for tick in axis.ticks() {
            let y = y(tick);
            self.line("grid", (left, y), (right, y));
            self.text((left - 6.0, y + 4.0), Anchor::End, &label(tick));
        }
    }

    /// Values below a chart, and a line up through it for each.
    pub fn columns(&mut self, axis: &Axis, (top, bottom): (f64, f64), x: impl Fn(f64) -> f64) {
        for tick in axis.ticks() {
            let x = x(tick);
            self.line("grid", (x, top), (x, bottom));
            self.text((x, bottom + 14.0), Anchor::Middle, &label(tick));
        }
    }

    /// The markup.
    pub fn finish(mut self) -> String {
        self.0.push_str("</svg>");
        self.0
    }

    fn add(&mut self, markup: std::fmt::Arguments<'_>) {
        let _ = self.0.write_fmt(markup);
    }
}

/// A cell of a [`Map`].
pub struct Cell {
    /// Class of its color.
    pub class: &'static str,
    /// Strength of the color, from 0 to 1.
    pub shade: f64,
    /// Its number, shown where it fits.
    pub label: String,
    /// Its tooltip.
    pub about: String,
}

/// Width of a color in the scale of a [`Map`].
const SWATCH: f64 = 46.0;

/// Cells by row and column, rows downwards.
pub struct Map<'a> {
    /// For readers that do not see it.
    pub name: &'a str,
    /// What stands at the top left, and how far from the left.
    pub note: (f64, &'a str),
    /// Labels of the rows.
    pub rows: Vec<String>,
    /// Labels of the columns, on one or two lines.
    pub columns: Vec<[String; 2]>,
    /// Width and height of a cell.
    pub cell: (f64, f64),
    /// Values and the strength of their color, below the cells.
    pub scale: Vec<(String, f64)>,
}

impl Map<'_> {
    /// The picture; places without a cell stay empty.
    pub fn draw(&self, cell: impl Fn(usize, usize) -> Option<Cell>) -> String {
        let (width, height) = self.cell;
        let (left, top) = (32.0, 34.0);
        let (right, bottom) = (left + width * self.columns.len() as f64, top + height * self.rows.len() as f64);
        let below = if self.scale.is_empty() { 6.0 } else { 34.0 };
        let mut svg =
            Svg::new(f64::max(right, left + SWATCH * self.scale.len() as f64) + 8.0, bottom + below, self.name);
        svg.text((self.note.0, 11.0), Anchor::Start, self.note.1);
        // Labels that would touch are left out.
        let every = |cell: f64, room: f64| (room / cell).ceil() as usize;
        for (column, names) in self.columns.iter().enumerate().step_by(every(width, 22.0)) {
            let x = left + width * (column as f64 + 0.5);
            for (name, y) in names.iter().zip([12.0, 26.0]).filter(|(name, _)| !name.is_empty()) {
                svg.text_of("small", (x, y), Anchor::Middle, name);
            }
        }
        for (row, name) in self.rows.iter().enumerate() {
            let y = top + height * row as f64;
            let middle = y + 0.5 * height + 4.0;
            if row % every(height, 14.0) == 0 {
                svg.text((left - 6.0, middle), Anchor::End, name);
            }
            for column in 0..self.columns.len() {
                let Some(Cell { class, shade, label, about }) = cell(row, column) else { continue };
                let x = left + width * column as f64;
                let about = escape(&about);
                svg.add(format_args!(
                    "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
                     fill-opacity=\"{shade:.3}\"><title>{about}</title></rect>",
                    width - 1.0,
                    height - 1.0
                ));
                if width >= 46.0 && height >= 14.0 && !label.is_empty() {
                    let class = if shade > 0.6 { "hi" } else { "lo" };
                    svg.text_of(class, (x + 0.5 * width, middle), Anchor::Middle, &label);
                }
            }
        }
        for (place, (value, shade)) in self.scale.iter().enumerate() {
            let x = left + SWATCH * place as f64;
            svg.add(format_args!(
                "<rect class=\"cell\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"8\" fill-opacity=\"{shade:.3}\"/>",
                bottom + 6.0,
                SWATCH - 1.0
            ));
            svg.text((x + 0.5 * SWATCH, bottom + 26.0), Anchor::Middle, value);
        }
        svg.finish()
    }
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
