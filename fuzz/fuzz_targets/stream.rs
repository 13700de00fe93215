//! The config of a model and the names of its tensors, as a weight sync announces them; names follow the config, one a line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sigmascale::serving::ScaleStream;

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(2, |byte| *byte == 0xff);
    let config = parts.next().unwrap_or_default();
    let names: Vec<String> =
        String::from_utf8_lossy(parts.next().unwrap_or_default()).lines().map(str::to_owned).collect();
    if let Ok(mut stream) = ScaleStream::new(config, "fuzz/config.json".as_ref(), &names) {
        assert!(!stream.spec().layers.is_empty());
        let _ = names.iter().filter(|name| stream.wants(name)).count();
        let _ = stream.of_rank(2);
    }
});
