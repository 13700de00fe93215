//! Line charts: one curve per policy over steps or layers.

use crate::cli::svg::{Axis, label, open_svg};
use crate::cli::table::brief;
use crate::policy::PolicyKind;
use std::fmt::Write;

/// Width of a chart: a phone's.
pub const WIDTH: f64 = 356.0;
/// Dashes of the policies' curves, so that color is not needed to tell them apart.
const DASHES: [&str; 6] = ["", "7 3", "2 2", "", "9 3 2 3", "4 4"];

/// Place of a policy among the six: its color and dashes.
pub fn place(policy: PolicyKind) -> usize {
    PolicyKind::ALL.iter().position(|kind| *kind == policy).unwrap_or(0)
}

/// What each curve is; `None` is the control.
pub fn legend(curves: &[Option<PolicyKind>]) -> String {
    let mut out = String::from("<div class=\"legend\">");
    for policy in curves {
        let (class, dash) = look(*policy);
        let _ = write!(
            out,
            "<span><svg class=\"{class}\" width=\"34\" height=\"10\" aria-hidden=\"true\"><path class=\"curve\" \
             stroke-dasharray=\"{dash}\" d=\"M0 5H34\"/></svg>{}</span>",
            policy.map_or("f32", PolicyKind::name)
        );
    }
    out + "<span class=\"dim\">A wide pale band is a curve below another one.</span></div>\n"
}

/// Class and dashes of a curve.
fn look(policy: Option<PolicyKind>) -> (String, &'static str) {
    policy.map(place).map_or_else(Default::default, |at| (format!("p{at}"), DASHES[at]))
}

/// Values over steps; `None` is the control without a policy.
pub type Curve = (Option<PolicyKind>, Vec<(usize, f64)>);

/// What stands around the curves of a line chart.
pub struct Frame {
    /// Upwards.
    pub axis: Axis,
    /// Last place to the right; the first is 0.
    pub last: usize,
    /// What runs to the right.
    pub over: &'static str,
    /// A level to mark.
    pub limit: Option<f64>,
    /// A place to mark.
    pub mark: Option<usize>,
}

/// A line chart, a line for each curve.
pub fn curves(all: &[Curve], frame: &Frame) -> String {
    let Frame { axis, last, over, limit, mark } = frame;
    let last = *last;
    let (left, top, right, height) = (46.0, 20.0, WIDTH - 10.0, 190.0);
    let x = |at: usize| left + 6.0 + (right - left - 12.0) * at as f64 / last as f64;
    let y = |value: f64| top + height * (1.0 - axis.place(value));
    let mut svg = open_svg(WIDTH, top + height + 36.0, &format!("Line chart by {over}"));
    for tick in axis.ticks() {
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{0:.1}\" y2=\"{0:.1}\"/>\
             <text x=\"{1:.1}\" y=\"{2:.1}\" text-anchor=\"end\">{3}</text>",
            y(tick),
            left - 6.0,
            y(tick) + 4.0,
            label(tick)
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
    let every = (last as f64 / 6.0).ceil().max(1.0) as usize;
    let every = [1, 2, 5, 10, 20, 50, 100].into_iter().find(|step| *step >= every).unwrap_or(every);
    for at in (0..=last).step_by(every) {
        let _ =
            write!(svg, "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{at}</text>", x(at), top + height + 15.0);
    }
    for (place, (policy, points)) in all.iter().enumerate() {
        let (class, dash) = look(*policy);
        // A curve that later ones cover is drawn as a wide pale band around them.
        let above = all[place + 1..].iter().filter(|(_, other)| coincide(points, other, &y)).count();
        let (style, dash) = match above {
            0 => (String::new(), dash),
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
            let name = policy.map_or(String::new(), |policy| format!("{policy}, "));
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
