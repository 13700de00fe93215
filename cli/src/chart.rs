//! Line charts: values over steps or layers.

use super::html::escape;
use super::svg::{Axis, label, open_svg};
use super::table::brief;
use std::fmt::Write;

/// Width of a chart: a phone's.
pub const WIDTH: f64 = 356.0;

/// One curve.
pub struct Line {
    /// Its name in tooltips; may be empty.
    pub name: String,
    /// Class of its color, and its dashes.
    pub look: (String, &'static str),
    /// Places to the right, and values.
    pub points: Vec<(usize, f64)>,
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

/// A line chart, a line for each curve.
pub fn lines(all: &[Line], frame: &Frame) -> String {
    let Frame { axis, first, last, over, limit, mark } = frame;
    let (first, last) = (*first, *last);
    let labels: Vec<_> = axis.ticks().into_iter().map(|tick| (tick, label(tick))).collect();
    let longest = labels.iter().map(|(_, text)| text.len()).max().unwrap_or(0);
    let left = f64::max(46.0, 6.5 * longest as f64 + 8.0);
    let (top, right, height) = (20.0, WIDTH - 10.0, 190.0);
    let width = (last - first).max(1) as f64;
    let x = |at: usize| left + 6.0 + (right - left - 12.0) * (at as f64 - first as f64) / width;
    let y = |value: f64| top + height * (1.0 - axis.place(value));
    let mut svg = open_svg(WIDTH, top + height + 36.0, &format!("Line chart by {over}"));
    for (tick, text) in labels {
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{0:.1}\" y2=\"{0:.1}\"/>\
             <text x=\"{1:.1}\" y=\"{2:.1}\" text-anchor=\"end\">{3}</text>",
            y(tick),
            left - 6.0,
            y(tick) + 4.0,
            text
        );
    }
    if let Some(limit) = limit {
        let y = y(*limit);
        let _ = write!(svg, "<line class=\"limit\" x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
    }
    if let Some(mark) = mark {
        let (x, bottom) = (x(*mark), top + height);
        let _ = write!(svg, "<line class=\"limit\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>");
    }
    let every = (width / 6.0).ceil() as usize;
    let every = (0..7)
        .flat_map(|decade| [1, 2, 5].map(|step| step * 10usize.pow(decade)))
        .find(|step| *step >= every)
        .unwrap_or(every);
    for at in (first.next_multiple_of(every)..=last).step_by(every) {
        let _ =
            write!(svg, "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{at}</text>", x(at), top + height + 15.0);
    }
    for (place, Line { name, look: (class, dash), points }) in all.iter().enumerate() {
        // A curve that later ones cover is drawn as a wide pale band around them.
        let above = all[place + 1..].iter().filter(|other| coincide(points, &other.points, &y)).count();
        let (style, dash) = match above {
            0 => (String::new(), *dash),
            count => (format!(" under\" style=\"stroke-width:{}", 2 + 4 * count), ""),
        };
        let path: String = points
            .iter()
            .enumerate()
            .map(|(n, point)| format!("{}{:.1} {:.1}", if n == 0 { 'M' } else { 'L' }, x(point.0), y(point.1)))
            .collect();
        let _ =
            write!(svg, "<g class=\"{class}\"><path class=\"curve{style}\" stroke-dasharray=\"{dash}\" d=\"{path}\"/>");
        // Dots carry the numbers; hundreds of steps need none.
        for point in points.iter().filter(|_| points.len() <= 40) {
            let name = if name.is_empty() { String::new() } else { format!("{}, ", escape(name)) };
            let _ = write!(
                svg,
                "<circle class=\"dot\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"><title>{name}{over} {}: {}</title></circle>",
                x(point.0),
                y(point.1),
                point.0,
                brief(point.1)
            );
        }
        svg.push_str("</g>");
    }
    if axis.log {
        svg.push_str("<text x=\"0\" y=\"10\">log scale</text>");
    }
    let (middle, bottom) = (0.5 * (left + right), top + height + 31.0);
    let _ = write!(svg, "<text x=\"{middle:.1}\" y=\"{bottom}\" text-anchor=\"middle\">{over}</text></svg>");
    svg
}

/// Whether two curves lie on each other for at least half of the points of the first.
fn coincide(points: &[(usize, f64)], other: &[(usize, f64)], y: &dyn Fn(f64) -> f64) -> bool {
    let near = |point: &&(usize, f64)| {
        let same = other.iter().find(|other| other.0 == point.0);
        same.is_some_and(|same| (y(same.1) - y(point.1)).abs() < 1.5)
    };
    !points.is_empty() && 2 * points.iter().filter(near).count() >= points.len()
}
