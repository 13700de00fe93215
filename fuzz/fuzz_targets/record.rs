//! The record of a training run from a stranger: read, watched and judged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale_fuzz::file;
use sigmascale_lab::diagnose::{Diagnosis, Options};
use sigmascale_lab::history::read_records;

fuzz_target!(|bytes: &[u8]| {
    if let Ok((run, records)) = read_records(&file("run.jsonl", bytes)) {
        let _ = Diagnosis::new(run, &records, Options::default());
    }
});
