//! Bounds and plans against their formulas written out, and against isotropic tokens.

mod common;

use common::planted::{Planted, dense_norm, rope, spec};
use nalgebra::DVector;
use rand::SeedableRng;
use rand::rngs::StdRng;
use sigmascale::bound::{BoundKind, LayerBounds, Tail};
use sigmascale::model::{GainForm, NormKind, NormVectors, QkNorm, QkNormScope, RopeLayout};
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::spectral::{GramEngine, PowerEngine, PowerState, SpectralEngine};

const TAIL: Tail = Tail { delta: 1e-6, seq_len: 1024, batch: 1, steps: 1 };

fn bounds(planted: &Planted) -> LayerBounds {
    let geometry = planted.geometry();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    LayerBounds::new(&planted.spec, &geometry, &spectrum, &TAIL).unwrap()
}

fn close(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} for {want}");
}

/// What a logit gains, in units of d, where weights are rounded to BF16 one by one when they are loaded (they are stored in F64
/// here): from the norms of both sides and their Frobenius norms.
fn loading((norm_q, norm_k): (f64, f64), (frobenius_q, frobenius_k): (f64, f64)) -> f64 {
    let e = (1.0 + 1.0 / 17.0) * (1.0 + 1.0 / 32.0);
    let [q, k] = [frobenius_q, frobenius_k].map(|norm| (1.0 + 1.0 / 17.0) * norm / 256.0);
    e * norm_q * k + e * norm_k * q + q * k
}

#[test]
fn formulas_without_constants() {
    let (d, r) = (128, 16);
    let planted = Planted::gaussian(spec(d, r, 2, 1), 1);
    let tau = 1.0 / (r as f64).sqrt();
    let union: f64 = 2.0 * 1024.0 * 1024.0 / 1e-6;
    for (head, got) in bounds(&planted).heads.iter().enumerate() {
        let (q, k) = (&planted.q[head], &planted.k[0]);
        let sigma = dense_norm(q, k);
        let (nq, nk) = (q.singular_values().max(), k.singular_values().max());
        close(got.exact.unwrap(), tau * d as f64 * sigma);
        close(got.naive.unwrap(), tau * d as f64 * nq * nk);
        let gamma = TAIL.c_star(&planted.spec).unwrap().gamma;
        let t1 = (2.0 * 2.0 * 1024.0 / 1e-6f64).ln();
        close(0.5 * r as f64 * (gamma - 1.0 - gamma.ln()), t1);
        let c_star = (2.0 * gamma * r as f64 * (2.0 * 2.0 * union).ln()).sqrt() / d as f64;
        close(got.rank_aware.unwrap(), tau * c_star * d as f64 * sigma);
        let frobenius = (q * k.transpose()).norm();
        let t = (2.0 * union).ln();
        let off_diagonal = (2.0 * t).sqrt() * frobenius + t * sigma;
        let x = (4.0 * 2.0 * 1024.0 / 1e-6f64).ln();
        let diagonal = q.tr_mul(k).trace().abs() + 2.0 * x.sqrt() * frobenius + 2.0 * sigma * x;
        close(got.spectrum.unwrap(), tau * off_diagonal.max(diagonal));
        // Rounded: (1 + 1/17)(1 + 1/32) on each side, and the subnormal steps.
        let e = (1.0 + 1.0 / 17.0) * (1.0 + 1.0 / 32.0);
        let least = tau * d as f64 * (sigma + (e * e - 1.0) * nq * nk + loading((nq, nk), (q.norm(), k.norm())));
        assert!(got.rounded.unwrap() >= least * (1.0 - 1e-9) && got.rounded.unwrap() < 1.01 * least);
    }
}

/// Relative errors meet the smaller of two products: of the norms as they are, and of those of balanced rotation pairs. Constants
/// and a mean that the norm takes out meet the first alone.
#[test]
fn rounding_meets_the_smaller_product_of_norms() {
    let (d, r) = (512, 16);
    let rotation = rope(12, RopeLayout::HalfSplit, 1e4);
    let pairs: Vec<(usize, usize)> = rotation.pairs().collect();
    let mut wins = [0; 2];
    for (seed, exponent) in [(1, 0.0), (2, 0.4), (3, 1.5)] {
        let mut planted = Planted::gaussian(spec(d, r, 1, 1), seed);
        planted.spec.layers[0].rope = Some(rotation.clone());
        if exponent == 0.0 {
            // One direction with one pair above the rest, and keys that are flat.
            let direction = planted.q[0].column(0).clone_owned();
            for c in 0..r {
                planted.q[0].set_column(c, &(&direction * if c == 0 || c == 6 { 4.0 } else { 1.0 }));
            }
        }
        for c in 0..r {
            planted.q[0].column_mut(c).scale_mut(4f64.powf(exponent * (c % 6) as f64 / 5.0));
            planted.k[0].column_mut(c).scale_mut(4f64.powf(-exponent * (c % 6) as f64 / 5.0));
        }
        let (q, k) = (planted.q[0].clone(), planted.k[0].clone());
        let mut balance = DVector::from_fn(r, |c, _| (k.column(c).norm() / q.column(c).norm()).sqrt());
        for &(a, b) in &pairs {
            let length = |w: &nalgebra::DMatrix<f64>| w.select_columns(&[a, b]).norm();
            (balance[a], balance[b]) = ((length(&k) / length(&q)).sqrt(), (length(&k) / length(&q)).sqrt());
        }
        let scaled = |w: &nalgebra::DMatrix<f64>, f: &DVector<f64>| {
            (w * nalgebra::DMatrix::from_diagonal(f)).singular_values().max()
        };
        let plain = q.singular_values().max() * k.singular_values().max();
        let balanced = scaled(&q, &balance) * scaled(&k, &balance.map(|f| 1.0 / f));
        assert!((plain / balanced).ln().abs() > 0.05, "{plain} {balanced}");
        wins[usize::from(plain < balanced)] += 1;
        let tau = 1.0 / (r as f64).sqrt();
        let e = (1.0 + 1.0 / 17.0) * (1.0 + 1.0 / 32.0);
        let gap = |planted: &Planted, norms: (f64, f64), frobenius: (f64, f64)| {
            let head = bounds(planted).heads[0];
            let gap = (head.rounded.unwrap() - head.exact.unwrap()) / (tau * d as f64);
            (gap - loading(norms, frobenius)) / (e * e - 1.0)
        };
        let (norms, frobenius) = ((q.singular_values().max(), k.singular_values().max()), (q.norm(), k.norm()));
        let (product, smaller) = (gap(&planted, norms, frobenius), plain.min(balanced));
        assert!((smaller * (1.0 - 1e-9)..smaller * 1.02).contains(&product), "{product} for {smaller}");
        let mut biased = planted.clone();
        (biased.spec.bias.q, biased.spec.bias.k) = (true, true);
        (biased.q_bias, biased.k_bias) = (Some(vec![0.3; r]), Some(vec![-0.2; r]));
        let root = (d as f64).sqrt();
        let size = |w: &nalgebra::DMatrix<f64>, b: f64| w.singular_values().max() + b * (r as f64).sqrt() / root;
        let norms = (size(&q, 0.3), size(&k, 0.2));
        let (product, whole) = (gap(&biased, norms, frobenius), norms.0 * norms.1);
        assert!((whole * (1.0 - 1e-9)..whole * 1.02).contains(&product), "{product} for {whole}");
        let mut shifted = Planted::pair(q.clone(), k.clone());
        shifted.spec.layers[0].rope = Some(rotation.clone());
        shifted = shifted.with_random_norm(seed, NormKind::LayerNorm, true);
        shifted.q_bias = Some(vec![0.0; r]);
        shifted.k_bias = Some(vec![0.0; r]);
        shifted.shift = Some(vec![0.0; d]);
        let folded = |w: &nalgebra::DMatrix<f64>| {
            let gain = DVector::from_vec(shifted.gain.clone().unwrap());
            nalgebra::DMatrix::from_diagonal(&gain) * w
        };
        let (q, k) = (folded(&q), folded(&k));
        let norms = (q.singular_values().max(), k.singular_values().max());
        let (product, whole) = (gap(&shifted, norms, (q.norm(), k.norm())), norms.0 * norms.1);
        assert!((whole * (1.0 - 1e-9)..whole * 1.02).contains(&product), "{product} for {whole}");
    }
    assert!(wins[0] > 0 && wins[1] > 0, "{wins:?}");
}

#[test]
fn formulas_with_layer_norm_and_constants() {
    let (d, r) = (128, 16);
    let planted = Planted::gaussian(spec(d, r, 1, 1), 3).with_random_norm(3, NormKind::LayerNorm, true);
    let tau = 1.0 / (r as f64).sqrt();
    let (q, k) = (planted.effective(&planted.q[0]), planted.effective(&planted.k[0]));
    let shift = DVector::from_vec(planted.shift.clone().unwrap());
    let constant =
        |w: &nalgebra::DMatrix<f64>, b: &Option<Vec<f64>>| w.tr_mul(&shift) + DVector::from_vec(b.clone().unwrap());
    let (cq, ck) = (constant(&planted.q[0], &planted.q_bias), constant(&planted.k[0], &planted.k_bias));
    let (a, b, c0) = ((&q * &ck).norm(), (&k * &cq).norm(), cq.dot(&ck).abs());
    let sigma = dense_norm(&q, &k);
    let got = bounds(&planted);
    let head = got.heads[0];
    close(head.exact.unwrap(), tau * (d as f64 * sigma + (d as f64).sqrt() * (a + b) + c0));
    let sphere = d as f64 / (d as f64 - 1.0);
    let half = Tail { delta: 0.5e-6, ..TAIL }.c_star(&planted.spec).unwrap().c_star;
    let t = (8.0 * 1024.0f64.powi(2) / 1e-6).ln();
    close(head.rank_aware.unwrap(), tau * (sphere * (half * d as f64 * sigma + (2.0 * t).sqrt() * (a + b)) + c0));
    // Operands: sqrt(d) ||w_c|| + |c_c| with the mean removed, and A/32 of what is not.
    let kb = (0..r).map(|c| (d as f64).sqrt() * k.column(c).norm() + ck[c].abs()).fold(0.0, f64::max);
    close(got.k[0].exact, kb);
    let gain = DVector::from_vec(planted.gain.clone().unwrap());
    let with_rounding = (0..r)
        .map(|c| {
            let raw = planted.k[0].column(c);
            let folded = raw.component_mul(&gain).norm();
            let spread: f64 = raw.iter().zip(&shift).map(|(w, s)| (w * s).abs()).sum();
            let a = (d as f64).sqrt() * folded + spread + planted.k_bias.as_ref().unwrap()[c].abs();
            (d as f64).sqrt() * k.column(c).norm() + ck[c].abs() + a / 32.0
        })
        .fold(0.0, f64::max);
    close(got.k[0].rounded, with_rounding);
}

#[test]
fn rope_operands_take_the_spectral_norm_of_a_pair() {
    let d = 64;
    for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
        let mut planted = Planted::gaussian(spec(d, 16, 1, 1), 8);
        planted.spec.layers[0].rope = Some(rope(12, layout, 1e4));
        let k = &planted.k[0];
        let rotated = planted.spec.layers[0]
            .rope
            .as_ref()
            .unwrap()
            .pairs()
            .map(|(a, b)| k.select_columns(&[a, b]).singular_values().max());
        let fixed = (12..16).map(|c| k.column(c).norm());
        close(bounds(&planted).k[0].exact, (d as f64).sqrt() * rotated.chain(fixed).fold(0.0, f64::max));
    }
}

#[test]
fn normalised_heads_are_bounded_by_their_gains() {
    let mut planted = Planted::gaussian(spec(64, 16, 4, 2), 8);
    let gains = |n: usize, top: usize| -> Vec<f64> { (0..n).map(|c| if c == top { -3.0 } else { 0.5 }).collect() };
    planted.spec.layers[0].rope = Some(rope(16, RopeLayout::HalfSplit, 1e4));
    // Pair 1 of q and pair 1 of k meet: channels 1 and 9.
    planted.q_norm = Some(NormVectors { gain: gains(16, 1), shift: None });
    planted.k_norm = Some(NormVectors { gain: gains(16, 9), shift: None });
    planted.spec.qk_norm = Some(QkNorm {
        scope: QkNormScope::PerHead,
        kind: NormKind::RmsNorm,
        gain: GainForm::Plain,
        shift: false,
        behind_rotation: false,
        rotated_only: false,
    });
    let got = bounds(&planted);
    close(got.heads[0].exact.unwrap(), 0.25 * 16.0 * 9.0);
    assert_eq!((got.heads[0].rank_aware, got.heads[0].spectrum), (None, None));
    close(got.q[0].exact, 4.0 * 3.0);
    let plan = ScalePlan::from_bounds(&got, BoundKind::RankAware, 0.8, Granularity::Head);
    assert!(plan.unwrap_err().is_unsupported());
    // Jointly over all heads: sqrt(n_q n_kv) times as much.
    planted.q_norm = Some(NormVectors { gain: [gains(16, 1), vec![0.5; 48]].concat(), shift: None });
    planted.k_norm = Some(NormVectors { gain: [gains(16, 9), vec![0.5; 16]].concat(), shift: None });
    planted.spec.qk_norm.as_mut().unwrap().scope = QkNormScope::Joint;
    let got = bounds(&planted);
    close(got.heads[0].exact.unwrap(), 0.25 * 16.0 * 8f64.sqrt() * 9.0);
    close(got.heads[2].exact.unwrap(), 0.25 * 16.0 * 8f64.sqrt() * 0.25);
    close(got.q[0].exact, 8.0 * 3.0);
}

#[test]
fn soft_cap_caps() {
    let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 8);
    planted.spec.soft_cap = Some(0.5);
    let head = bounds(&planted).heads[0];
    for bound in [head.naive, head.exact, head.rounded, head.rank_aware, head.spectrum] {
        assert_eq!(bound, Some(0.5));
    }
}

/// The paper calls the diagonal safer (Remark in 3.2). With W_Q = W_K its entries have the mean tr M / d: on a flat head
/// most tokens pass c_star B_max, promised to fail once in a million. The spectrum bound covers them.
#[test]
fn diagonal_entries_pass_the_papers_bound() {
    let (d, r) = (512, 128);
    let mut planted = Planted::gaussian(spec(d, r, 1, 1), 4);
    planted.q[0] = planted.q[0].clone().qr().q();
    planted.k[0] = planted.q[0].clone();
    let head = bounds(&planted).heads[0];
    let paper = TAIL.c_star(&planted.spec).unwrap().c_star * planted.spec.layers[0].softmax_scale * d as f64;
    close(head.rank_aware.unwrap(), paper);
    let mut rng = StdRng::seed_from_u64(0);
    let (mut past_paper, mut largest) = (0, 0.0f64);
    for _ in 0..1024 {
        let x = DVector::from_vec(common::forward::random_x_hat(&planted.spec, &mut rng));
        let y = planted.q[0].tr_mul(&x);
        let logit = y.norm_squared() * planted.spec.layers[0].softmax_scale;
        past_paper += usize::from(logit > paper);
        largest = largest.max(logit);
    }
    assert!(past_paper > 512, "{past_paper} of 1024");
    assert!(largest < head.spectrum.unwrap(), "{largest} {head:?}");
}

/// Isotropic tokens keep both tail bounds, with constants and rotation.
#[test]
fn isotropic_tokens_keep_the_tail_bounds() {
    let mut planted = Planted::gaussian(spec(128, 16, 1, 1), 6).with_random_norm(6, NormKind::RmsNorm, true);
    planted.spec.layers[0].rope = Some(rope(16, RopeLayout::HalfSplit, 1e4));
    let head = bounds(&planted).heads[0];
    let weights = planted.weights();
    let mut rng = StdRng::seed_from_u64(1);
    let tokens: Vec<_> = (0..400)
        .map(|m| {
            let x = common::forward::random_x_hat(&planted.spec, &mut rng);
            common::forward::forward_qkv(&planted.spec, &weights, &x, f64::from(m))
        })
        .collect();
    let mut largest: f64 = 0.0;
    for q in &tokens {
        for k in &tokens {
            largest = largest.max(common::forward::logit(&planted.spec, 0, 0, q, k).abs());
        }
    }
    assert!(largest <= head.spectrum.unwrap() && largest <= head.rank_aware.unwrap(), "{largest} {head:?}");
    assert!(largest > 0.1 * head.spectrum.unwrap(), "{largest} {head:?}");
}

#[test]
fn plans_follow_eta_and_granularity() {
    let mut planted = Planted::gaussian(spec(64, 16, 4, 2), 5);
    planted.q[3] *= 7.0;
    planted.k[0] *= 3.0;
    planted.v[1] *= 5.0;
    let got = bounds(&planted);
    let plan = ScalePlan::from_bounds(&got, BoundKind::WorstCase, 0.8, Granularity::Head).unwrap();
    for (head, descale) in plan.logit_descale.iter().enumerate() {
        close(f64::from(descale.get()), got.heads[head].rounded.unwrap() / (0.8 * 448.0));
    }
    // One q descale per KV head: the larger of its two query heads.
    close(f64::from(plan.operands.q[1].get()), got.q[3].rounded / 448.0);
    assert!(plan.operands.q[0].get() < plan.operands.q[1].get());
    let (v, o) = (plan.operands.v.as_ref().unwrap(), plan.operands.o.as_ref().unwrap());
    assert_eq!(o[1].get(), 2.0 * v[1].get());
    let layer = ScalePlan::from_bounds(&got, BoundKind::WorstCase, 0.8, Granularity::Layer).unwrap();
    assert_eq!(layer.logit_descale, vec![ScalePlan::per_tensor(&plan.logit_descale); 4]);
    assert_eq!(layer.operands.k, vec![plan.operands.k[0]; 2]);
    assert_eq!(layer.operands.v.unwrap(), vec![v[1]; 2]);
    let half = ScalePlan::from_bounds(&got, BoundKind::RankAware, 0.4, Granularity::Head).unwrap();
    close(f64::from(half.logit_descale[0].get()), got.heads[0].rank_aware.unwrap() / (0.4 * 448.0));
    // Operand descales do not depend on the kind of the logit bound.
    assert_eq!(half.operands, plan.operands);
    for eta in [0.0, -1.0, 1.01, f64::NAN] {
        assert!(ScalePlan::from_bounds(&got, BoundKind::WorstCase, eta, Granularity::Head).unwrap_err().is_argument());
    }
}

#[test]
fn zero_heads_get_descale_one() {
    let mut planted = Planted::gaussian(spec(64, 16, 2, 2), 5);
    planted.q[1].fill(0.0);
    planted.v[1].fill(0.0);
    let plan = ScalePlan::from_bounds(&bounds(&planted), BoundKind::WorstCase, 0.8, Granularity::Head).unwrap();
    assert_eq!(plan.logit_descale[1].get(), 1.0);
    assert_eq!(plan.operands.q[1].get(), 1.0);
    assert_eq!(plan.operands.v.unwrap()[1].get(), 1.0);
}

#[test]
fn power_iteration_cannot_certify() {
    let planted = Planted::gaussian(spec(64, 16, 2, 1), 5);
    let geometry = planted.geometry();
    let mut state = PowerState::new(&planted.spec, 0);
    let spectrum = PowerEngine::new(&mut state).layer(&geometry).unwrap();
    let got = LayerBounds::new(&planted.spec, &geometry, &spectrum, &TAIL).unwrap();
    assert_eq!((got.heads[0].exact, got.heads[0].rounded, got.heads[0].spectrum), (None, None, None));
    assert!(got.heads[0].rank_aware.is_some());
    assert!(ScalePlan::from_bounds(&got, BoundKind::WorstCase, 0.8, Granularity::Head).unwrap_err().is_unsupported());
}

#[test]
fn a_layer_without_any_norm_is_refused() {
    let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 5);
    planted.spec.norm.kind = NormKind::None;
    let error = planted.try_geometry().unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("no bound"), "{error}");
}

/// Weights whose bounds leave the range of f32, or of f64, name the operand.
#[test]
fn bounds_past_a_range_name_the_operand() {
    let scaled = |by: [f64; 3]| {
        let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 3);
        for (heads, by) in [&mut planted.q, &mut planted.k, &mut planted.v].into_iter().zip(by) {
            heads.iter_mut().for_each(|head| *head *= by);
        }
        planted
    };
    for (by, what) in [
        ([1e45, 1e-45, 1.0], "q: "),
        ([1e-45, 1e45, 1.0], "k: "),
        ([1.0, 1.0, 1e45], "v: "),
        ([1e30, 1e30, 1.0], "logits: "),
    ] {
        let planted = scaled(by);
        let error =
            ScalePlan::from_bounds(&bounds(&planted), BoundKind::WorstCase, 0.8, Granularity::Head).unwrap_err();
        assert!(error.is_non_finite() && error.to_string().starts_with(what), "{error}");
    }
    let planted = scaled([1e150, 1e150, 1.0]);
    let geometry = planted.geometry();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let error = LayerBounds::new(&planted.spec, &geometry, &spectrum, &Tail::default());
    assert!(error.is_err_and(|error| error.is_non_finite() && error.to_string().contains("logits: ")));
}
