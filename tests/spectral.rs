//! Spectral engines against dense decompositions, and the cases where the paper's forms fail.

mod common;

use common::planted::{Planted, dense_norm, gaussian, rope, spec};
use nalgebra::DMatrix;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use sigmascale::bound::{LayerBounds, Tail};
use sigmascale::model::{NormKind, Rope, RopeLayout};
use sigmascale::spectral::*;

fn gram(planted: &Planted) -> LayerSpectrum {
    GramEngine.layer(&planted.geometry()).unwrap()
}

/// Heads that have broken estimators: by kind.
fn awkward(kind: usize, d: usize, r: usize, seed: u64) -> (DMatrix<f64>, DMatrix<f64>) {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut q, mut k) = (gaussian(d, r, &mut rng), gaussian(d, r, &mut rng));
    match kind {
        0 => {}
        1 => {
            // A spike a hundred times everything else.
            q += gaussian(d, 1, &mut rng) * gaussian(1, r, &mut rng) * 100.0;
            k += gaussian(d, 1, &mut rng) * gaussian(1, r, &mut rng) * 100.0;
        }
        2 => {
            // Rank 3.
            q = gaussian(d, 3, &mut rng) * gaussian(3, r, &mut rng);
            k = gaussian(d, 2, &mut rng) * gaussian(2, r, &mut rng);
        }
        3 => {
            // Large parts of q and k that cancel in the product: the spikes point into orthogonal channels.
            let turn = gaussian(r, r, &mut rng).qr().q();
            let (a, b) = (turn.column(0).clone_owned(), turn.column(1).clone_owned());
            q += gaussian(d, 1, &mut rng) * a.transpose() * 30.0;
            k += gaussian(d, 1, &mut rng) * b.transpose() * 30.0;
            // And what is left along the other one's spike is small.
            q -= &q * &b * b.transpose() * 0.99;
            k -= &k * &a * a.transpose() * 0.99;
        }
        4 => {
            // Channels over twelve orders of magnitude, matched so that the product sees both ends.
            for c in 0..r {
                let size = 10f64.powf(-6.0 + 12.0 * c as f64 / r as f64);
                q.column_mut(c).scale_mut(size);
                k.column_mut(c).scale_mut(1.0 / size);
            }
        }
        5 => {
            q *= 1e-30;
            k *= 1e25;
        }
        _ => unreachable!(),
    }
    (q, k)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn gram_equals_a_dense_svd_and_certifies_it(kind in 0usize..6, seed in 0u64..10_000, r in prop::sample::select(vec![16usize, 40, 64]), d in 65usize..400) {
        let (q, k) = awkward(kind, d, r, seed);
        let exact = dense_norm(&q, &k);
        let frobenius = (&q.qr().r() * k.qr().r().transpose()).norm();
        let (q, k) = awkward(kind, d, r, seed);
        let spectrum = gram(&Planted::pair(q, k));
        let head = &spectrum.heads.as_ref().unwrap()[0];
        let upper = head.exact.unwrap();
        prop_assert!((head.sigma - exact).abs() <= 1e-5 * exact, "kind {kind}: {} against {exact}", head.sigma);
        prop_assert!((upper.frobenius - frobenius).abs() <= 1e-5 * frobenius);
        prop_assert!(upper.sigma_upper >= exact, "kind {kind}: {} below {exact}", upper.sigma_upper);
        prop_assert!(upper.frobenius_rope_upper >= frobenius * (1.0 - 1e-14));
        if kind < 4 {
            prop_assert!(upper.sigma_upper <= 1.0001 * exact, "kind {kind}: {} against {exact}", upper.sigma_upper);
        }
    }

    #[test]
    fn effective_operators_equal_their_definition(seed in 0u64..1000, layer_norm: bool, factor in 1.0f64..1.5) {
        let kind = if layer_norm { NormKind::LayerNorm } else { NormKind::RmsNorm };
        let mut planted = Planted::gaussian(spec(300, 16, 2, 1), seed).with_random_norm(seed, kind, true);
        planted.spec.layers[0].rope = Some(Rope { attention_factor: factor, ..rope(8, RopeLayout::HalfSplit, 1e4) });
        let spectrum = gram(&planted);
        for head in spectrum.heads.unwrap() {
            let scaled = |w: &DMatrix<f64>| {
                let mut w = planted.effective(w);
                (0..8).for_each(|c| w.column_mut(c).scale_mut(factor));
                w
            };
            let exact = dense_norm(&scaled(&planted.q[head.head]), &scaled(&planted.k[0]));
            prop_assert!((head.sigma - exact).abs() <= 1e-9 * exact);
            let raw = dense_norm(&planted.q[head.head], &planted.k[0]);
            prop_assert!((head.sigma_raw - raw).abs() <= 1e-9 * raw);
        }
    }

    #[test]
    fn power_stays_below_and_converges(kind in 0usize..5, seed in 0u64..1000) {
        let (q, k) = awkward(kind, 120, 16, seed);
        let exact = dense_norm(&q, &k);
        let planted = Planted::pair(q, k);
        let geometry = planted.geometry();
        let mut state = PowerState::new(&planted.spec, seed);
        for step in 0..400 {
            let mut engine = PowerEngine::new(&mut state);
            engine.warm = 8;
            let sigma = engine.layer(&geometry).unwrap().heads.unwrap()[0].sigma;
            prop_assert!(sigma <= exact * (1.0 + 1e-6), "step {step}: {sigma} above {exact}");
            if sigma >= exact * (1.0 - 1e-5) {
                return Ok(());
            }
        }
        prop_assert!(false, "not converged to {exact}");
    }

    #[test]
    fn sigma_rope_is_never_below_the_norm_at_a_position(
        seed in 0u64..10_000, interleaved: bool, rotary in prop::sample::select(vec![4usize, 8, 12, 16]), uneven in 0.0f64..3.0,
    ) {
        let layout = if interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
        let mut planted = Planted::gaussian(spec(64, 16, 1, 1), seed);
        for c in 0..16 {
            planted.q[0].column_mut(c).scale_mut(10f64.powf(uneven * (c as f64 / 15.0 - 0.5)));
            planted.k[0].column_mut(c).scale_mut(10f64.powf(-uneven * (c as f64 / 15.0 - 0.3)));
        }
        planted.spec.layers[0].rope = Some(rope(rotary, layout, 100.0));
        let geometry = planted.geometry();
        let exact = gram(&planted).heads.unwrap()[0].exact.unwrap();
        for position in -63i64..64 {
            let turned = rotate_columns(&planted.q[0], geometry.rotary.as_ref().unwrap(), position as f64);
            let dense = dense_norm(&turned, &planted.k[0]);
            prop_assert!(dense <= exact.sigma_rope_upper * (1.0 + 1e-12), "{position}: {dense} {exact:?}");
            let frobenius = (&turned * planted.k[0].transpose()).norm();
            prop_assert!(frobenius <= exact.frobenius_rope_upper * (1.0 + 1e-12));
        }
    }
}

/// `W R` with R turning each pair by `position * freq`.
fn rotate_columns(w: &DMatrix<f64>, rotary: &sigmascale::geometry::Rotary, position: f64) -> DMatrix<f64> {
    let mut out = w.clone();
    for (&(a, b), freq) in rotary.pairs.iter().zip(rotary.inv_freq.as_ref().unwrap()) {
        let (sin, cos) = (position * freq).sin_cos();
        out.set_column(a, &(w.column(a) * cos + w.column(b) * sin));
        out.set_column(b, &(w.column(b) * cos - w.column(a) * sin));
    }
    out
}

/// The paper's Algorithms 2 and 3 iterate on the sum over heads, which two opposite heads cancel.
#[test]
fn the_summed_matrix_bounds_no_head() {
    let mut planted = Planted::gaussian(spec(64, 16, 2, 1), 3);
    planted.q[1] = -&planted.q[0];
    let spectrum = gram(&planted);
    let largest = spectrum.heads.as_ref().unwrap().iter().map(|head| head.sigma).fold(0.0, f64::max);
    assert!(spectrum.sigma_sum.unwrap() < 1e-6 * largest, "{:?} {largest}", spectrum.sigma_sum);
    let mut state = PowerState::new(&planted.spec, 0);
    let summed = PowerEngine::new(&mut state).summed(&planted.geometry()).unwrap();
    assert!(summed.sigma < 1e-12 * largest);
    assert!(largest > 0.5);
}

/// An orthogonal W_Q = e1 (1, 0), W_K = e1 (0, 1): the unrotated product is zero, a quarter turn makes it one.
#[test]
fn rope_can_raise_the_norm_from_zero_to_one() {
    let unit = |channel: usize| DMatrix::from_fn(32, 16, |i, c| f64::from(i == 0 && c == channel));
    let mut planted = Planted::pair(unit(0), unit(8));
    let without = gram(&planted).heads.unwrap()[0].exact.unwrap();
    assert!(without.sigma_upper < 1e-6);
    planted.spec.layers[0].rope = Some(rope(16, RopeLayout::HalfSplit, 1e4));
    let spectrum = gram(&planted);
    let head = &spectrum.heads.as_ref().unwrap()[0];
    assert!(head.sigma < 1e-6, "the paper's sigma is zero");
    assert!(head.exact.unwrap().sigma_rope_upper >= 1.0);
    let geometry = planted.geometry();
    // 11 radians are nearly a quarter turn past three halves.
    let turned = rotate_columns(&planted.q[0], geometry.rotary.as_ref().unwrap(), 11.0);
    assert!(dense_norm(&turned, &planted.k[0]) > 0.9999);
}

/// The Frobenius form can be the smallest of the three, so that leaving it out would be seen.
#[test]
fn each_form_of_sigma_rope_wins_somewhere() {
    let mut wins = [0; 3];
    for seed in 0..60 {
        let mut rng = StdRng::seed_from_u64(seed);
        // Low rank favors Frobenius, matched sizes sigma_Q sigma_K, uneven ones the scaling.
        let rank = 1 + seed as usize % 3;
        let mut q = gaussian(64, rank, &mut rng) * gaussian(rank, 16, &mut rng);
        let mut k = gaussian(64, rank, &mut rng) * gaussian(rank, 16, &mut rng);
        if seed >= 40 {
            (q, k) = (gaussian(64, 16, &mut rng), gaussian(64, 16, &mut rng));
            for c in 0..16 {
                q.column_mut(c).scale_mut(4f64.powf(c as f64 % 8.0));
                k.column_mut(c).scale_mut(4f64.powf(-(c as f64 % 8.0)));
            }
        }
        let mut planted = Planted::pair(q, k);
        planted.spec.layers[0].rope = Some(rope(16, RopeLayout::HalfSplit, 1e4));
        let exact = gram(&planted).heads.unwrap()[0].exact.unwrap();
        let product = exact.sigma_q_upper * exact.sigma_k_upper;
        let which = if exact.sigma_rope_upper >= product * (1.0 - 1e-12) {
            0
        } else if exact.sigma_rope_upper >= exact.frobenius_rope_upper * (1.0 - 1e-12) {
            1
        } else {
            2
        };
        wins[which] += 1;
    }
    assert!(wins[1] > 0 && wins[2] > 0, "{wins:?}");
}

/// A warm start that is orthogonal to the new top direction stays at zero for ever; the Gram route has no start.
#[test]
fn a_warm_power_iteration_can_miss_a_new_head_for_ever() {
    let axis = |i: usize, c: usize| DMatrix::from_fn(32, 16, |row, col| f64::from(row == i && col == c));
    let before = Planted::pair(axis(0, 0), axis(0, 0));
    let after = Planted::pair(axis(1, 0), axis(1, 0));
    let mut state = PowerState::new(&before.spec, 0);
    let mut step =
        |planted: &Planted| PowerEngine::new(&mut state).layer(&planted.geometry()).unwrap().heads.unwrap()[0].sigma;
    assert!((step(&before) - 1.0).abs() < 1e-6);
    for _ in 0..50 {
        assert!(step(&after) < 1e-6);
    }
    assert!((gram(&after).heads.unwrap()[0].sigma - 1.0).abs() < 1e-9);
}

/// Five cold iterations stay well below sigma on an ordinary head (the paper stops there).
#[test]
fn five_cold_iterations_are_an_underestimate() {
    let mut ratios: Vec<f64> = (0..40)
        .map(|seed| {
            let planted = Planted::gaussian(spec(512, 64, 1, 1), seed);
            let exact = dense_norm(&planted.q[0], &planted.k[0]);
            let mut state = PowerState::new(&planted.spec, seed);
            PowerEngine::new(&mut state).layer(&planted.geometry()).unwrap().heads.unwrap()[0].sigma / exact
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    assert!(ratios[20] < 0.97 && ratios[20] > 0.8, "{ratios:?}");
    let inflation = certified_inflation(5, 64, 1e-9).unwrap();
    assert!(ratios.iter().all(|ratio| ratio * inflation >= 1.0));
}

/// An estimate carries its residual and, from a random start only, how many iterations it rests on.
#[test]
fn estimates_say_what_they_are_worth() {
    let planted = Planted::gaussian(spec(96, 16, 2, 1), 3);
    let mut state = PowerState::new(&planted.spec, 0);
    let mut step = || PowerEngine::new(&mut state).layer(&planted.geometry()).unwrap().heads.unwrap()[1].power.unwrap();
    let cold = step();
    assert_eq!(cold.cold_iterations, Some(5));
    let mut last = step();
    assert_eq!(last.cold_iterations, None);
    for _ in 0..300 {
        last = step();
    }
    assert!(last.residual < 1e-3 * cold.residual, "{last:?} {cold:?}");
    assert!(gram(&planted).heads.unwrap()[1].power.is_none());
}

#[test]
fn certified_inflation_has_the_published_values() {
    assert!((certified_inflation(5, 128, 1e-9).unwrap() - 8.4).abs() < 0.05);
    assert!((certified_inflation(20, 128, 1e-9).unwrap() - 1.68).abs() < 0.005);
    assert!(certified_inflation(0, 128, 1e-9).unwrap_err().is_argument());
    assert!(certified_inflation(5, 128, 0.0).is_err());
}

/// Gains fold into the norm and constants add to the logit; the paper's raw sigma sees neither (2.2, 2.3).
#[test]
fn gains_and_constants_break_the_raw_bound() {
    let (d, r) = (64, 16);
    let mut planted = Planted::gaussian(spec(d, r, 1, 1), 5);
    planted.gain = Some(vec![3.0; d]);
    planted.q_bias = Some(vec![10.0; r]);
    planted.k_bias = Some(vec![10.0; r]);
    let geometry = planted.geometry();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let head = &spectrum.heads.as_ref().unwrap()[0];
    let bounds = LayerBounds::new(&planted.spec, &geometry, &spectrum, &Tail::default()).unwrap();
    let worst_paper = planted.spec.layers[0].softmax_scale * d as f64 * head.sigma_raw;
    // The top singular pair of the effective matrix, both tokens on the sphere.
    let m = &planted.q[0] * 3.0 * (&planted.k[0] * 3.0).transpose();
    let svd = m.svd(true, true);
    let top = svd.singular_values.imax();
    let root = (d as f64).sqrt();
    let (x, y) = (svd.u.unwrap().column(top) * root, svd.v_t.unwrap().row(top).transpose() * root);
    let project = |w: &DMatrix<f64>, x: &nalgebra::DVector<f64>| (w * 3.0).tr_mul(x).add_scalar(10.0);
    let logit = |sx: f64, sy: f64| {
        (project(&planted.q[0], &(&x * sx)).dot(&project(&planted.k[0], &(&y * sy)))
            * planted.spec.layers[0].softmax_scale)
            .abs()
    };
    let largest = logit(1.0, 1.0).max(logit(-1.0, -1.0)).max(logit(1.0, -1.0)).max(logit(-1.0, 1.0));
    assert!(largest > 9.0 * worst_paper, "{largest} {worst_paper}");
    assert!(largest <= bounds.heads[0].exact.unwrap());
}

#[test]
fn power_state_survives_a_save_and_refuses_a_foreign_model() {
    let planted = Planted::gaussian(spec(96, 16, 4, 2), 1);
    let geometry = planted.geometry();
    let run = |state: &mut PowerState| PowerEngine::new(state).layer(&geometry).unwrap().heads.unwrap()[0].sigma;
    let mut kept = PowerState::new(&planted.spec, 9);
    run(&mut kept);
    let mut loaded: PowerState = serde_json::from_str(&serde_json::to_string(&kept).unwrap()).unwrap();
    assert!(loaded.is_warm(0));
    assert_eq!(loaded, kept);
    for _ in 0..3 {
        assert_eq!(run(&mut kept).to_bits(), run(&mut loaded).to_bits());
    }
    let mut foreign = PowerState::new(&spec(128, 16, 4, 2), 9);
    let error = PowerEngine::new(&mut foreign).layer(&geometry).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("128"), "{error}");
}

/// Replicate-and-sum equals the expanded matrix of the paper's Proposition 4.1.
#[test]
fn implicit_gqa_equals_explicit_expansion() {
    let planted = Planted::gaussian(spec(80, 16, 6, 2), 4);
    let mut sum = DMatrix::zeros(80, 80);
    for head in 0..6 {
        sum += &planted.q[head] * planted.k[head / 3].transpose();
    }
    let exact = sum.singular_values().max();
    let geometry = planted.geometry();
    let mut state = PowerState::new(&planted.spec, 0);
    let mut sigma = 0.0;
    for _ in 0..300 {
        sigma = PowerEngine::new(&mut state).summed(&geometry).unwrap().sigma;
    }
    assert!((sigma - exact).abs() < 1e-4 * exact, "{sigma} {exact}");
    let converged = gram(&planted).sigma_sum.unwrap();
    assert!((converged - exact).abs() < 1e-4 * exact, "{converged} {exact}");
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut planted = Planted::gaussian(spec(64, 16, 2, 1), 0);
        planted.k[0][(13, 5)] = bad;
        let error = GramEngine.layer(&planted.geometry()).unwrap_err();
        assert!(error.is_non_finite());
        assert!(error.to_string().contains("k_proj head 0 channel 5"), "{error}");
    }
}

#[test]
fn zero_heads_have_zero_norms() {
    let mut planted = Planted::gaussian(spec(64, 16, 2, 1), 0);
    planted.q[1].fill(0.0);
    let geometry = planted.geometry();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let head = &spectrum.heads.as_ref().unwrap()[1];
    assert_eq!(head.sigma, 0.0);
    let bounds = LayerBounds::new(&planted.spec, &geometry, &spectrum, &Tail::default()).unwrap();
    assert_eq!(bounds.heads[1].exact, Some(0.0));
}
