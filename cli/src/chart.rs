//! Line charts: values over steps or layers.

use super::html::escape;
use super::svg::{Anchor, Axis, Svg, label};
use super::table::brief;
use std::fmt::Write;

/// Width of a chart: a phone's.
pub const WIDTH: f64 = 356.0;

/// Dashes of the curves, so that color is not needed to tell them apart.
const DASHES: [&str; 6] = ["", "7 3", "2 2", "", "9 3 2 3", "4 4"];

/// One curve.
pub struct Line {
    /// Its name in legends and tooltips; may be empty.
    pub name: String,
    /// Which color and dashes it has; `None` is the plain line of a control.
    pub place: Option<usize>,
    /// Places to the right, and values.
    pub points: Vec<(usize, f64)>,
}

impl Line {
    /// Class and dashes. Past six curves colors repeat with other dashes.
    fn look(&self) -> (String, &'static str) {
        let of = |at: usize| (format!("p{}", at % DASHES.len()), DASHES[(at + at / DASHES.len()) % DASHES.len()]);
        self.place.map_or_else(Default::default, of)
    }
}

/// What each curve is.
pub fn legend(all: &[Line]) -> String {
    let mut out = String::from("<div class=\"legend\">");
    for line in all {
        let (class, dash) = line.look();
        let _ = write!(
            out,
            "<span><svg class=\"{class}\" width=\"34\" height=\"10\" aria-hidden=\"true\"><path class=\"curve\" \
             stroke-dasharray=\"{dash}\" d=\"M0 5H34\"/></svg>{}</span>",
            escape(&line.name)
        );
    }
    if all.len() > 1 {
        out.push_str("<span class=\"dim\">A wide pale band is a curve that another one covers.</span>");
    }
    out + "</div>\n"
}

/// What stands around the curves of a line chart.
pub struct Frame {
    /// Upwards.
    pub axis: Axis,
    /// Place at the left end.
    pub first: usize,
    /// Place at the right end, above that at the left.
    pub last: usize,
    /// What runs to the right.
    pub over: &'static str,
    /// A level to mark.
    pub limit: Option<f64>,
    /// A place to mark.
    pub mark: Option<usize>,
}

impl Frame {
    /// From step 0, without marks.
    pub fn of_steps(axis: Axis, last: usize) -> Self {
        Self { axis, first: 0, last: last.max(1), over: "step", limit: None, mark: None }
    }
}

/// A line chart, a line for each curve.
pub fn lines(all: &[Line], frame: &Frame) -> String {
    let &Frame { ref axis, first, last, over, limit, mark } = frame;
    let longest = axis.ticks().into_iter().map(|tick| label(tick).len()).max().unwrap_or(0);
    let left = f64::max(46.0, 6.5 * longest as f64 + 8.0);
    let (top, right, height) = (20.0, WIDTH - 10.0, 190.0);
    let bottom = top + height;
    let width = (last - first).max(1) as f64;
    let x = |at: usize| left + 6.0 + (right - left - 12.0) * (at as f64 - first as f64) / width;
    let y = |value: f64| top + height * (1.0 - axis.place(value));
    let mut svg = Svg::new(WIDTH, bottom + 36.0, &format!("Line chart by {over}"));
    svg.rows(axis, (left, right), y);
    if let Some(limit) = limit {
        svg.line("limit", (left, y(limit)), (right, y(limit)));
    }
    if let Some(mark) = mark {
        svg.line("limit", (x(mark), top), (x(mark), bottom));
    }
    let every = (width / 6.0).ceil() as usize;
    let every = (0..7)
        .flat_map(|decade| [1, 2, 5].map(|step| step * 10usize.pow(decade)))
        .find(|step| *step >= every)
        .unwrap_or(every);
    for at in (first.next_multiple_of(every)..=last).step_by(every) {
        svg.text((x(at), bottom + 15.0), Anchor::Middle, &at.to_string());
    }
    for (place, line) in all.iter().enumerate() {
        let (Line { name, points, .. }, (class, dash)) = (line, line.look());
        // A curve that later ones cover is drawn as a wide pale band around them.
        let above = all[place + 1..].iter().filter(|other| coincide(points, &other.points, &y)).count();
        let (style, dash, band) = match above {
            0 => ("curve", dash, None),
            count => ("curve under", "", Some(2 + 4 * count)),
        };
        svg.group(&class, |svg| {
            svg.curve(style, dash, band, points.iter().map(|point| (x(point.0), y(point.1))));
            // Dots carry the numbers; hundreds of steps need none.
            for point in points.iter().filter(|_| points.len() <= 40) {
                let name = if name.is_empty() { String::new() } else { format!("{name}, ") };
                let about = format!("{name}{over} {}: {}", point.0, brief(point.1));
                svg.dot("dot", (x(point.0), y(point.1)), 2.0, &about);
            }
        });
    }
    if axis.log {
        svg.text((0.0, 10.0), Anchor::Start, "log scale");
    }
    svg.text((0.5 * (left + right), bottom + 31.0), Anchor::Middle, over);
    svg.finish()
}

/// Whether two curves lie on each other for at least half of the points of the first.
fn coincide(points: &[(usize, f64)], other: &[(usize, f64)], y: &dyn Fn(f64) -> f64) -> bool {
    let near = |point: &&(usize, f64)| {
        let same = other.iter().find(|other| other.0 == point.0);
        same.is_some_and(|same| (y(same.1) - y(point.1)).abs() < 1.5)
    };
    !points.is_empty() && 2 * points.iter().filter(near).count() >= points.len()
}
