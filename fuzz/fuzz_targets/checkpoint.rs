//! A checkpoint folder from a stranger, and its audit for every engine. Parts of the input are divided by a byte that JSON never has:
//! config, settings of the quantization, weights.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale::model::Checkpoint;
use sigmascale::serving::{Engine, Serving, verify};
use sigmascale_fuzz::{file, folder};

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(3, |byte| *byte == 0xff);
    for name in ["config.json", "hf_quant_config.json", "model.safetensors"] {
        file(name, parts.next().unwrap_or_default());
    }
    if let Ok(checkpoint) = Checkpoint::open(folder()) {
        let audits = verify(&checkpoint, &Engine::ALL, &Serving::default(), &mut || Ok(()));
        // Nothing that was not judged is called safe.
        for audit in audits.iter().flatten() {
            assert!(!audit.safe || audit.unjudged.is_empty());
        }
    }
});
