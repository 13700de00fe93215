//! Line charts: one curve per policy, remedy or head over steps or layers.

pub use crate::chart::{Frame, WIDTH};

use crate::chart::{Line, lines};
use sigmascale::policy::PolicyKind;
use std::fmt::Write;

/// Dashes of the curves, so that color is not needed to tell them apart.
const DASHES: [&str; 6] = ["", "7 3", "2 2", "", "9 3 2 3", "4 4"];

/// What a curve shows.
pub trait Label: Copy {
    /// Its name in legends.
    fn name(self) -> String;
    /// Its color and dashes; `None` is the plain line of a control.
    fn place(self) -> Option<usize>;
}

impl Label for Option<PolicyKind> {
    fn name(self) -> String {
        self.map_or("f32".to_owned(), |policy| policy.to_string())
    }

    fn place(self) -> Option<usize> {
        self.map(place)
    }
}

/// Place of a policy among the six: its color and dashes.
pub fn place(policy: PolicyKind) -> usize {
    PolicyKind::ALL.iter().position(|kind| *kind == policy).unwrap_or(0)
}

/// What each curve is.
pub fn legend<L: Label>(curves: &[L]) -> String {
    let mut out = String::from("<div class=\"legend\">");
    for label in curves {
        let (class, dash) = look(*label);
        let _ = write!(
            out,
            "<span><svg class=\"{class}\" width=\"34\" height=\"10\" aria-hidden=\"true\"><path class=\"curve\" \
             stroke-dasharray=\"{dash}\" d=\"M0 5H34\"/></svg>{}</span>",
            label.name()
        );
    }
    out + "<span class=\"dim\">A wide pale band is a curve that another one covers.</span></div>\n"
}

/// Class and dashes of a curve. Past six curves colors repeat with other dashes.
fn look(label: impl Label) -> (String, &'static str) {
    let of = |at: usize| (format!("p{}", at % DASHES.len()), DASHES[(at + at / DASHES.len()) % DASHES.len()]);
    label.place().map_or_else(Default::default, of)
}

/// Values over steps.
pub type Curve<L = Option<PolicyKind>> = (L, Vec<(usize, f64)>);

/// A line chart, a line for each curve.
pub fn curves<L: Label>(all: &[Curve<L>], frame: &Frame) -> String {
    let line = |(label, points): &Curve<L>| Line {
        name: label.place().map_or(String::new(), |_| label.name()),
        look: look(*label),
        points: points.clone(),
    };
    lines(&all.iter().map(line).collect::<Vec<_>>(), frame)
}
