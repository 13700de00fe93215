//! Line charts: one curve per policy over steps or layers.

pub use crate::cli::chart::{Frame, WIDTH};

use crate::cli::chart::{Line, lines};
use crate::policy::PolicyKind;
use std::fmt::Write;

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

/// A line chart, a line for each curve.
pub fn curves(all: &[Curve], frame: &Frame) -> String {
    let line = |(policy, points): &Curve| Line {
        name: policy.map_or(String::new(), |policy| policy.to_string()),
        look: look(*policy),
        points: points.clone(),
    };
    lines(&all.iter().map(line).collect::<Vec<_>>(), frame)
}
