//! Files of token ids, and of text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale_fuzz::file;
use sigmascale_lab::stress::TokenFile;

fuzz_target!(|bytes: &[u8]| {
    for name in ["tokens.json", "tokens.txt"] {
        let _ = TokenFile::read(&file(name, bytes));
    }
});
