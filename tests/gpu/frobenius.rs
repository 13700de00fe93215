//! Frobenius norms of W_Q^T W_K per head, and the bound that plans take from them.

use crate::engine::{LOGIT_BELOW, cases, engine, few_directions, ratio, stream};
use crate::weights::{Case, Kind, Layer};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sigmascale::geometry::LayerGeometry;
use sigmascale::spectral::{GramEngine, SpectralEngine};

tests![norms_are_the_cpus_and_leave_the_plan];

fn norms_are_the_cpus_and_leave_the_plan() {
    let mut rng = StdRng::seed_from_u64(7);
    let mut all = [few_directions(), cases()].concat();
    all.extend((0..20).map(|_| Case::random(&mut rng)));
    let mut sharpest = 0;
    for (i, case) in all.iter().enumerate() {
        sharpest += norms_of(case, 600 + i as u64);
    }
    assert!(sharpest > 40, "F is the sharpest bound of {sharpest} heads alone");
}

/// Norms of one layer; of how many heads F is the sharpest bound.
pub fn norms_of(case: &Case, seed: u64) -> usize {
    let mut sharpest = 0;
    let layer = Layer::new(case, seed);
    let geometry = LayerGeometry::new(&case.spec(), layer.weights()).unwrap();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let (engine, stream) = (engine(&layer), stream());
    engine.plan(&stream).unwrap();
    let before = engine.head_bounds().unwrap().read().unwrap();
    engine.frobenius(&stream).unwrap();
    stream.synchronize().unwrap();
    let after = engine.head_bounds().unwrap().read().unwrap();
    let norms = engine.head_frobenius().unwrap().read().unwrap();
    for (h, want) in spectrum.heads.unwrap().iter().enumerate() {
        let place = format!("{} ({case:?}): head {h}", case.name);
        let exact = want.exact.unwrap();
        assert_eq!(bytemuck::bytes_of(&after[h]), bytemuck::bytes_of(&before[h]), "{place}: the plan moved");
        // What is left of cancelling heads is made of rounding.
        let near = if matches!(case.kind, Kind::Cancelling | Kind::Offset) { 0.2 } else { 2e-3 };
        let norm = ratio(norms[h].norm.into(), exact.frobenius);
        assert!((norm - 1.0).abs() < near, "{place}: F is {norm:.6} of f64");
        let above = match case.kind {
            Kind::Gaussian | Kind::Spiked => 0.02,
            Kind::Uneven => 0.01,
            _ => f64::INFINITY,
        };
        let bound = ratio(norms[h].bound.into(), exact.frobenius_rope_upper);
        // The CPU does not balance the two sides: it is far above where heads cancel.
        let below = if case.kind == Kind::Cancelling { 1.0 } else { LOGIT_BELOW };
        assert!((1.0 - below..=1.0 + above).contains(&bound), "{place}: bound of F is {bound:.6} of f64");
        assert!(f64::from(norms[h].bound) >= exact.frobenius * (1.0 - LOGIT_BELOW), "{place}: bound of F below F");
        // However sharp: never below the norm at relative position 0.
        let sigma = f64::from(before[h].sigma);
        let truth = ratio(sigma, want.sigma);
        assert!(truth >= 1.0 - LOGIT_BELOW, "{place}: sigma is {truth:.8} of f64");
        if case.rotary > 0 {
            assert!(sigma <= f64::from(norms[h].bound) * (1.0 + 1e-6), "{place}: {sigma} above the bound of F");
        }
        if case.kind == Kind::Uneven && exact.sigma_rope_upper == exact.frobenius_rope_upper {
            let certified = sigma / exact.sigma_rope_upper;
            assert!(certified <= 1.01, "{place}: sigma is {certified:.6} of what F alone gives");
            sharpest += 1;
        }
    }
    sharpest
}
