//! Progress on stderr; nothing where stderr is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// A bar over `layers`, already shown.
pub fn layers(layers: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(layers as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} layer {pos}/{len}  {elapsed}, {eta} left") {
        bar.set_style(style);
    }
    bar.tick();
    bar
}

/// A spinner with the name of what runs.
pub fn spinner() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}  {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    bar
}
