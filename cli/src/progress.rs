//! Progress on stderr: what is being made, step, total and time left. Nothing where stderr is not a terminal.

use indicatif::{ProgressBar, ProgressState, ProgressStyle, WeakProgressBar};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The bar that is on the terminal now.
static SHOWN: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

static QUIET: AtomicBool = AtomicBool::new(false);

/// Nothing but errors goes to stderr from now on.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether only errors are wanted.
pub fn quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// A bar, already shown; 0 of `total` is a length that is not known yet. `counter` is shown before the time left: a
/// template such as `layer {pos}/{len}`, where `{msg}` is the bar's message.
pub fn bar(total: usize, counter: &str, message: &str) -> ProgressBar {
    if quiet() || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = if total == 0 { ProgressBar::no_length() } else { ProgressBar::new(total as u64) };
    if let Ok(style) = ProgressStyle::with_template(&format!("{{bar:30}} {counter}{{left}}")) {
        bar.set_style(style.with_key("left", left));
    }
    bar.set_message(message.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    bar.tick();
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
    bar
}

/// A bar of a caller that counts its own steps, for other faces of the same work. It goes with its value.
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar of so many steps of what is made.
    pub fn new(total: usize, what: &str) -> Self {
        Self(bar(total, "{msg}: {pos}/{len}", what))
    }

    /// So many steps are done.
    pub fn at(&self, done: usize) {
        self.0.set_position(done as u64);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The time left, once a step has been timed.
fn left(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    if state.pos() > 0 && state.len().is_some() {
        let _ = write!(out, ", {:#} left", indicatif::HumanDuration(state.eta()));
    }
}

/// Standard error for log lines: the bar is taken off its line first and drawn again below.
pub struct Log;

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let bar = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(WeakProgressBar::upgrade);
        match bar.filter(|bar| !bar.is_finished()) {
            Some(bar) => bar.suspend(|| std::io::stderr().write(line)),
            None => std::io::stderr().write(line),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}
