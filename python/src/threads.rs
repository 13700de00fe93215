//! Work beside the interpreter, without its lock: on a device, so that PyTorch's current one stays what it was; and long work, open to
//! Ctrl-C and safe in a child of `fork`.

use crate::errors::raise;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sigmascale::cuda::{KeepCurrent, OutsideCaptures};
use sigmascale::{Error, Result};
use sigmascale_cli::progress::Bar;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs `work`, which may make any device current; the one before is current again after it.
pub fn on_device<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let done = py.detach(|| {
        let _current = KeepCurrent::new();
        work()
    });
    done.map_err(|error| raise(py, &error))
}

/// What lives on a device, and goes without making it current for others and without breaking a capture.
pub struct OnDevice<T>(Option<T>);

impl<T> OnDevice<T> {
    pub fn new(held: T) -> Self {
        Self(Some(held))
    }
}

impl<T> Deref for OnDevice<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("held until it is dropped")
    }
}

impl<T> Drop for OnDevice<T> {
    fn drop(&mut self) {
        let (_current, _outside) = (KeepCurrent::new(), OutsideCaptures::new());
        self.0 = None;
    }
}

/// How often a waiting call looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// A call that takes longer shows how far it is.
const SHOWN_AFTER: Duration = Duration::from_secs(2);

/// What work and the call that waits for it tell each other: whether the caller has gone, and how far the work is.
pub struct Stop {
    gone: AtomicBool,
    done: AtomicUsize,
    total: AtomicUsize,
}

impl Stop {
    /// Work of `steps` steps; each ends with a [`check`](Stop::check).
    pub fn expect(&self, steps: usize) {
        self.total.store(steps, Ordering::Relaxed);
    }

    /// One step is done.
    ///
    /// # Errors
    /// If nobody waits for the result any more.
    pub fn check(&self) -> Result<()> {
        self.done.fetch_add(1, Ordering::Relaxed);
        if self.gone.load(Ordering::Relaxed) { Err(Error::argument("interrupted")) } else { Ok(()) }
    }

    /// Shows how far the work is, on a terminal alone, and not before it has taken a while.
    fn show(&self, bar: &mut Option<Bar>, what: &str, since: Instant) {
        let total = self.total.load(Ordering::Relaxed);
        if total == 0 || since.elapsed() < SHOWN_AFTER {
            return;
        }
        let bar = bar.get_or_insert_with(|| Bar::new(total, what));
        bar.at(self.done.load(Ordering::Relaxed));
    }
}

/// The pool of this process. A child of `fork` has the memory of its parent and none of its threads: work handed to the
/// parent's pool would wait for ever there.
fn pool() -> Result<Arc<ThreadPool>> {
    static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);
    let mut held = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, pool)) = &*held
        && *owner == process
    {
        return Ok(Arc::clone(pool));
    }
    let made = ThreadPoolBuilder::new().thread_name(|index| format!("sigmascale-{index}")).build();
    let made = Arc::new(made.map_err(|error| Error::argument(format_args!("no threads can be started: {error}")))?);
    // The parent's is not dropped: that would wake threads that are not there.
    std::mem::forget(held.replace((process, Arc::clone(&made))));
    Ok(made)
}

/// Runs `work` on the pool of this process and waits for it, since it reads memory of the caller; other threads of Python go on.
pub fn beside<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    py.detach(|| pool()?.install(work)).map_err(|error| raise(py, &error))
}

/// Runs `work` on the pool of this process while Python goes on. A signal handler that raises (Ctrl-C) ends the wait at
/// once; work that does not look at its [`Stop`] then runs to its end in the background, and its result is dropped. `what` names
/// the work where its progress is shown.
pub fn detached<T: Send + 'static>(
    py: Python<'_>,
    what: &'static str,
    work: impl FnOnce(&Stop) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = channel();
    let stop = Arc::new(Stop { gone: AtomicBool::new(false), done: AtomicUsize::new(0), total: AtomicUsize::new(0) });
    let seen = Arc::clone(&stop);
    py.detach(move || {
        let pool = pool().map_err(|error| Python::attach(|py| raise(py, &error)))?;
        pool.spawn(move || {
            // Nobody listens after an interrupt.
            let _ = sender.send(catch_unwind(AssertUnwindSafe(|| work(&seen))));
        });
        let (since, mut bar) = (Instant::now(), None);
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(Ok(done)) => return done.map_err(|error| Python::attach(|py| raise(py, &error))),
                // PyO3 makes an exception of it.
                Ok(Err(panic)) => resume_unwind(panic),
                Err(RecvTimeoutError::Timeout) => {
                    Python::attach(|py| py.check_signals())
                        .inspect_err(|_| stop.gone.store(true, Ordering::Relaxed))?;
                    stop.show(&mut bar, what, since);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let error = Error::argument("the work ended without a result");
                    return Err(Python::attach(|py| raise(py, &error)));
                }
            }
        }
    })
}
