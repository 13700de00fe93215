//! Progress on stderr: step, total and time left. Nothing where stderr is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// A bar, already shown. `unit` is what is counted; [`ProgressBar::set_message`] says what runs.
pub fn bar(total: usize, unit: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total as u64);
    let template = format!("{{msg}}{{bar:30}} {unit} {{pos}}/{{len}}, {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar.tick();
    bar
}
