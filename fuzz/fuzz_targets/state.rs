//! The saved state of a runtime: what is read can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale::runtime::RuntimeState;
use sigmascale_fuzz::{file, folder};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(state) = RuntimeState::read(&file("state", bytes)) {
        let again = folder().join("again");
        state.write(&again).expect("a state that was read can be written");
        RuntimeState::read(&again).expect("a state that was written can be read");
    }
});
