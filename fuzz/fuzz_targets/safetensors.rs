//! A safetensors file from a stranger: an error, or tensors that all lie inside the file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = sigmascale::model::fuzz_safetensors(bytes);
});
