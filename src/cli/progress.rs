//! Progress on stderr: step, total and time left. Nothing where stderr is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// A bar, already shown. `counter` is what stands in front of the time left: a template such as `layer {pos}/{len}`, where
/// `{msg}` is the bar's message.
pub fn bar(total: usize, counter: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total as u64);
    if let Ok(style) = ProgressStyle::with_template(&format!("{{bar:30}} {counter}, {{eta}} left")) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar.tick();
    bar
}
