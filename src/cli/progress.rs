//! A progress bar on stderr; nothing where stderr is not a terminal.

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
