//! The trace of a run that `stress replay` takes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale_fuzz::file;
use sigmascale_lab::stress::Trace;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(trace) = Trace::read(&file("trace.json", bytes)) {
        assert!(trace.layers() > 0);
    }
});
