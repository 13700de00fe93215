//! q, k and v of whole checkpoints against the forward of the library's tests.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::cases::{cases, draw};
use common::fixtures::write_checkpoint;
use common::forward::forward_qkv;
use sigmascale::model::Checkpoint;
use sigmascale_lab::forward::{Tokens, project};

#[test]
fn queries_of_generated_tokens_grow_with_their_position() {
    let mut grew = 0;
    for (number, case) in
        cases().iter().enumerate().filter(|(_, case)| matches!(case.name, "ministral3" | "llama4_text"))
    {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &case.config, &draw(case, 70 + number as u64), case.dtype, case.shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let spec = checkpoint.spec();
        let tokens = Tokens::isotropic(spec, 40, 3);
        for (layer, own) in spec.layers.iter().enumerate() {
            let weights = checkpoint.layer(layer).unwrap();
            let got = project(spec, &weights, &tokens).unwrap();
            for (m, x) in tokens.values().chunks_exact(spec.d_model).enumerate() {
                let x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
                let want: Vec<f64> = forward_qkv(spec, &weights, &x, m as f64).q.concat();
                for (got, want) in got.q.chunks_exact(want.len()).nth(m).unwrap().iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-4 * (1.0 + want.abs()), "{} {layer} {m}", case.name);
                }
            }
            grew += usize::from(own.query_factor() > 1.0);
        }
    }
    assert!(grew > 3, "{grew}");
}
