//! Inputs made to break the bounds: adversarial weights, extreme numbers, and specs that do not fit their weights.

mod common;

use common::forward::{dot, forward_qkv_at, logit};
use common::planted::{Planted, gaussian, rope, spec};
use float8::F8E4M3;
use nalgebra::{DMatrix, DVector};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::bound::{BoundKind, LAYER_NORM_MEAN_LIMIT, LayerBounds, Tail};
use sigmascale::calibrate::{Calibration, Options};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::*;
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::policy::PolicyKind;
use sigmascale::runtime::{Runtime, Weights};
use sigmascale::spectral::*;
use sigmascale::{Descale, Result};

fn try_bounds(planted: &Planted) -> Result<LayerBounds> {
    let geometry = planted.try_geometry()?;
    let spectrum = GramEngine.layer(&geometry)?;
    LayerBounds::new(&planted.spec, &geometry, &spectrum, &Tail::default())
}

/// The largest |logit| of a head that ascent finds, under random angles, by the independent forward.
fn worst_logit(planted: &Planted, head: usize, seed: u64) -> f64 {
    let (spec, weights) = (&planted.spec, planted.weights());
    let mut rng = StdRng::seed_from_u64(seed);
    let root = (spec.d_model as f64).sqrt();
    let (kv, r) = (head / spec.layers[0].group(), spec.layers[0].d_head);
    let side = |w: &DMatrix<f64>, bias: &Option<Vec<f64>>, head: usize| {
        let mut c = DVector::from_fn(r, |c, _| bias.as_ref().map_or(0.0, |b| b[head * r + c]));
        if let Some(shift) = &planted.shift {
            c += w.tr_mul(&DVector::from_column_slice(shift));
        }
        (planted.effective(w), c)
    };
    let (wq, cq) = side(&planted.q[head], &planted.q_bias, head);
    let (wk, ck) = side(&planted.k[kv], &planted.k_bias, kv);
    let rotation = spec.layers[0].rope.clone();
    let turn = |y: DVector<f64>, angles: &[f64], sign: f64| {
        let mut out = y.clone();
        for ((a, b), angle) in rotation.iter().flat_map(Rope::pairs).zip(angles) {
            let (sin, cos) = (sign * angle).sin_cos();
            let factor = rotation.as_ref().map_or(1.0, |rope| rope.attention_factor);
            (out[a], out[b]) = (factor * (y[a] * cos - y[b] * sin), factor * (y[a] * sin + y[b] * cos));
        }
        out
    };
    let onto = |gradient: DVector<f64>| {
        let norm = gradient.amax();
        if norm > 0.0 { (gradient / norm).normalize() * root } else { gradient }
    };
    let mut largest: f64 = 0.0;
    for attempt in 0..8 {
        let mut angles = || -> Vec<f64> {
            let pairs = rotation.as_ref().map_or(0, |rope| rope.rotary_dim / 2);
            (0..pairs).map(|_| rng.random_range(0.0..std::f64::consts::TAU)).collect()
        };
        let (aq, ak) = (angles(), angles());
        let sign = if attempt % 2 == 0 { 1.0 } else { -1.0 };
        let mut y = onto(&wk * gaussian(spec.layers[0].d_head, 1, &mut rng).column(0));
        let mut x = y.clone();
        for _ in 0..100 {
            x = onto(&wq * turn(turn(wk.tr_mul(&y) + &ck, &ak, 1.0), &aq, -1.0) * sign);
            y = onto(&wk * turn(turn(wq.tr_mul(&x) + &cq, &aq, 1.0), &ak, -1.0) * sign);
        }
        let query = forward_qkv_at(spec, &weights, x.as_slice(), &aq);
        let key = forward_qkv_at(spec, &weights, y.as_slice(), &ak);
        largest = largest.max(logit(spec, 0, head, &query, &key).abs());
    }
    largest
}

/// Shapes and weights on the edges: each head's exact bound holds, and is attained where nothing rotates.
#[test]
fn exact_bounds_hold_on_the_edges() {
    type Change = fn(&mut Planted);
    let none: Change = |_| {};
    let cases: [(&str, usize, usize, usize, usize, Change); 14] = [
        ("d below a panel line", 5, 16, 2, 1, none),
        ("d = 257", 257, 16, 2, 2, none),
        ("multi-query, wide heads", 300, 256, 3, 1, none),
        ("rank 1", 64, 16, 1, 1, |p| {
            let column = p.q[0].column(0).clone_owned();
            p.q[0] = &column * DMatrix::from_element(1, 16, 0.3);
        }),
        ("zero channels", 64, 16, 1, 1, |p| {
            (0..8).for_each(|c| p.q[0].column_mut(c).fill(0.0));
            (4..12).for_each(|c| p.k[0].column_mut(c).fill(0.0));
        }),
        ("gains with zeros and signs", 64, 16, 1, 1, |p| {
            p.gain = Some((0..64).map(|i| [0.0, -3.0, 1.0, 1e-6][i % 4]).collect());
        }),
        ("a mean that dominates", 64, 16, 1, 1, |p| {
            p.spec.norm.kind = NormKind::LayerNorm;
            p.q[0].add_scalar_mut(1e3);
            p.k[0].add_scalar_mut(-1e3);
        }),
        ("constants larger than the weights", 64, 16, 2, 1, |p| {
            p.q_bias = Some((0..32).map(|i| f64::from(i) - 20.0).collect());
            p.k_bias = Some((0..16).map(|i| 9.0 - f64::from(i)).collect());
            p.shift = Some((0..64).map(|i| if i % 3 == 0 { 4.0 } else { -2.0 }).collect());
            p.spec.norm.shift = true;
            p.spec.bias = QkvBias { q: true, k: true, v: false };
        }),
        ("1e-30 against 1e25", 64, 16, 1, 1, |p| {
            p.q[0] *= 1e-30;
            p.k[0] *= 1e25;
        }),
        ("partial rotation with a factor", 64, 24, 2, 1, |p| {
            p.spec.layers[0].rope = Some(Rope { attention_factor: 1.3, ..rope(10, RopeLayout::HalfSplit, 1e4) });
        }),
        ("interleaved rotation and constants", 64, 16, 2, 1, |p| {
            p.spec.layers[0].rope = Some(Rope { attention_factor: 0.7, ..rope(6, RopeLayout::Interleaved, 1e4) });
            p.q_bias = Some(vec![3.0; 32]);
            p.k_bias = Some((0..16).map(f64::from).collect());
        }),
        ("rotation, small keys", 64, 16, 1, 1, |p| {
            p.spec.layers[0].rope = Some(rope(12, RopeLayout::HalfSplit, 1e4));
            p.k[0] *= 1e-3;
        }),
        ("rotation, heads that meet only when turned", 64, 16, 1, 1, |p| {
            p.spec.layers[0].rope = Some(rope(16, RopeLayout::Interleaved, 1e4));
            p.q[0] = DMatrix::from_fn(64, 16, |i, c| f64::from((i, c) == (0, 0)));
            p.k[0] = DMatrix::from_fn(64, 16, |i, c| f64::from((i, c) == (0, 1)));
        }),
        ("rotation, uneven pairs", 64, 16, 1, 1, |p| {
            p.spec.layers[0].rope = Some(rope(12, RopeLayout::Interleaved, 1e4));
            (0..16).for_each(|c| p.q[0].column_mut(c).scale_mut(10f64.powi(c as i32 % 5 - 2)));
            (0..16).for_each(|c| p.k[0].column_mut(c).scale_mut(10f64.powi(2 - c as i32 % 5)));
        }),
    ];
    for (name, d, r, n_q, n_kv, change) in cases {
        let mut planted = Planted::gaussian(spec(d, r, n_q, n_kv), 77);
        change(&mut planted);
        let bounds = try_bounds(&planted).unwrap();
        for head in 0..n_q {
            let (bound, worst) = (bounds.heads[head].exact.unwrap(), worst_logit(&planted, head, 5));
            assert!(worst <= bound * (1.0 + 1e-12), "{name}, head {head}: {worst} past {bound}");
            let constant = planted.q_bias.is_some();
            if planted.spec.layers[0].rope.is_none() && !constant {
                assert!(worst > 0.99 * bound, "{name}, head {head}: {worst} of {bound}");
            }
        }
    }
}

/// One scale for the whole layer flushes small heads in larger steps than their own scale would: values just above half a
/// step double. The rounded bound must know.
#[test]
fn a_shared_descale_does_not_pass_the_rounded_bound() {
    let (d, r) = (64, 16);
    let mut planted = Planted::gaussian(spec(d, r, 2, 2), 0);
    let axis = |size: f64| DMatrix::from_fn(d, r, |i, c| if (i, c) == (0, 0) { size } else { 0.0 });
    // Head 0 sets the scale of k and has the smaller logits.
    (planted.q, planted.k) = (vec![axis(1e-6), axis(1.0)], vec![axis(1.0), axis(1.0)]);
    for granularity in [Granularity::Head, Granularity::Layer] {
        let shared = try_bounds(&planted).unwrap().k[0].rounded / 448.0;
        planted.k[1] = axis(1.001 / 1024.0 * shared / (d as f64).sqrt());
        let bounds = try_bounds(&planted).unwrap();
        let plan = ScalePlan::from_bounds(&bounds, BoundKind::WorstCase, 1.0, granularity).unwrap();
        let mut x = vec![0.0; d];
        x[0] = (d as f64).sqrt();
        let weights = planted.weights();
        let token = forward_qkv_at(&planted.spec, &weights, &x, &[]);
        let cast = |values: &[f64], descale: Descale| -> Vec<f64> {
            let s = f64::from(descale.get());
            values.iter().map(|v| F8E4M3::from_f64(v / s).to_f64() * s).collect()
        };
        for head in 0..2 {
            let q = cast(&token.q[head], plan.operands.q[head]);
            let k = cast(&token.k[head], plan.operands.k[head]);
            let logit = dot(&q, &k).abs() * planted.spec.layers[0].softmax_scale;
            let bound = plan.logit_bound.as_ref().unwrap()[head];
            assert!(logit <= bound, "{granularity:?} head {head}: {logit} past {bound}");
        }
    }
}

/// Every rule of a spec, broken one at a time: an error that names it, never a panic and never a bound.
#[test]
fn a_spec_that_breaks_a_rule_is_refused() {
    type Break = fn(&mut Planted);
    let cases: [(&str, Break); 22] = [
        ("layers", |p| p.spec.layers.clear()),
        ("layer 0 comes before layer 0", |p| p.spec.layers.push(p.spec.layers[0].clone())),
        ("softmax_scale", |p| p.spec.layers[0].softmax_scale = f64::NAN),
        ("softmax_scale", |p| p.spec.layers[0].softmax_scale = -0.25),
        ("soft_cap", |p| p.spec.soft_cap = Some(f64::NAN)),
        ("soft_cap", |p| p.spec.soft_cap = Some(-1.0)),
        ("n_kv_heads", |p| p.spec.layers[0].n_kv_heads = 0),
        ("n_kv_heads", |p| p.spec.layers[0].n_q_heads = 3),
        ("d_model", |p| p.spec.d_model = 0),
        ("d_head", |p| p.spec.layers[0].d_head = 0),
        ("rotary_dim", |p| p.spec.layers[0].rope = Some(rope(32, RopeLayout::HalfSplit, 1e4))),
        ("rotary_dim", |p| p.spec.layers[0].rope = Some(Rope { rotary_dim: 7, ..rope(6, RopeLayout::HalfSplit, 1e4) })),
        ("attention_factor", |p| {
            p.spec.layers[0].rope = Some(Rope { attention_factor: -1.0, ..rope(8, RopeLayout::HalfSplit, 1e4) });
        }),
        ("attention_factor", |p| {
            p.spec.layers[0].rope = Some(Rope { attention_factor: f64::NAN, ..rope(8, RopeLayout::HalfSplit, 1e4) });
        }),
        ("inv_freq", |p| {
            p.spec.layers[0].rope = Some(Rope { inv_freq: Some(vec![1.0]), ..rope(8, RopeLayout::HalfSplit, 1e4) });
        }),
        ("inv_freq", |p| {
            p.spec.layers[0].rope =
                Some(Rope { inv_freq: Some(vec![f64::NAN; 4]), ..rope(8, RopeLayout::HalfSplit, 1e4) });
        }),
        ("input norm shift", |p| p.spec.norm.shift = true),
        ("q_proj: bias", |p| p.spec.bias.q = true),
        ("k norm", |p| {
            qk_normed(p);
            p.k_norm.as_mut().unwrap().gain[3] = f64::NAN;
        }),
        ("q norm", |p| {
            qk_normed(p);
            p.q_norm.as_mut().unwrap().shift = Some(vec![f64::INFINITY; 16]);
        }),
        ("q norm", |p| {
            qk_normed(p);
            p.spec.qk_norm.as_mut().unwrap().shift = true;
        }),
        ("qk_norm", |p| {
            qk_normed(p);
            p.spec.qk_norm.as_mut().unwrap().kind = NormKind::None;
        }),
    ];
    for (number, (rule, change)) in cases.into_iter().enumerate() {
        let mut planted = Planted::gaussian(spec(64, 16, 2, 2), 5);
        change(&mut planted);
        let error = try_bounds(&planted).map(|bounds| bounds.heads).expect_err(&format!("{number}, {rule}"));
        assert!(error.to_string().contains(rule), "{number}, {rule}: {error}");
    }
    let planted = Planted::gaussian(spec(64, 16, 2, 2), 5);
    let error = LayerGeometry::new(&planted.spec, LayerWeights { layer: 1, ..planted.weights() }).unwrap_err();
    assert!(error.to_string().contains("layer index 1"), "{error}");
}

fn qk_normed(planted: &mut Planted) {
    let vectors = NormVectors { gain: vec![1.0; 16], shift: None };
    planted.spec.qk_norm = Some(QkNorm {
        scope: QkNormScope::PerHead,
        kind: NormKind::RmsNorm,
        gain: GainForm::Plain,
        shift: false,
        behind_rotation: false,
        rotated_only: false,
    });
    (planted.q_norm, planted.k_norm) = (Some(vectors.clone()), Some(vectors));
}

/// A shift that is stored moves q even where the spec knows of none: the bound counts it.
#[test]
fn a_stored_shift_of_the_qk_norm_counts() {
    let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 5);
    qk_normed(&mut planted);
    planted.q_norm.as_mut().unwrap().shift = Some(vec![10.0; 16]);
    if let Ok(bounds) = try_bounds(&planted) {
        let worst = 0.25 * (4.0 + 40.0) * 4.0;
        assert!(bounds.heads[0].exact.unwrap() >= worst * (1.0 - 1e-12), "{bounds:?}");
    }
}

/// Finite weights of any size: a bound that holds, or an error. Never NaN, a zero for something that is not, or a panic.
#[test]
fn extreme_weights_give_a_sound_bound_or_an_error() {
    let sizes = [1e-300, 1e-170, 1e-160, 1e-120, 1e-80, 1e-60, 1e-40, 1e35, 1e60, 1e75, 1e100, 1e140, 1e150, 1e300];
    for kind in [NormKind::RmsNorm, NormKind::LayerNorm] {
        for rotated in [false, true] {
            for (a, b) in sizes.iter().flat_map(|a| sizes.iter().map(move |b| (*a, *b))) {
                let mut planted = Planted::gaussian(spec(24, 16, 1, 1), 3);
                planted.spec.norm.kind = kind;
                if rotated {
                    planted.spec.layers[0].rope = Some(rope(8, RopeLayout::HalfSplit, 1e4));
                }
                planted.q[0] *= a;
                planted.k[0] *= b;
                let bounds = match try_bounds(&planted) {
                    Ok(bounds) => bounds,
                    Err(error) => {
                        assert!([a, b].iter().any(|x| !(1e-60..=1e60).contains(x)), "{kind:?} {a:e} {b:e}: {error}");
                        continue;
                    }
                };
                assert!(bounds.heads[0].rounded.unwrap().is_finite());
                let (exact, worst) = (bounds.heads[0].exact.unwrap(), worst_logit(&planted, 0, 1));
                assert!(exact >= worst * (1.0 - 1e-9), "{kind:?} {rotated} {a:e} {b:e}: {worst} past {exact}");
                for (side, w) in [(&bounds.q[0], &planted.q[0]), (&bounds.k[0], &planted.k[0])] {
                    let w = planted.effective(w);
                    let longest = w.column_iter().map(|c| c.amax()).fold(0.0, f64::max);
                    assert!(side.exact >= longest, "{kind:?} {a:e} {b:e}: {side:?}");
                }
            }
        }
    }
}

/// The paper's summed norm is held in f32 and must not lose weights at the ends of its range.
#[test]
fn the_summed_norm_keeps_the_ends_of_f32() {
    for (a, b) in [(1e37, 1.0), (3e37, 1e-37), (1e-40, 1.0), (1e-39, 1e-39), (1e-37, 1e37)] {
        let mut planted = Planted::gaussian(spec(64, 16, 2, 1), 3);
        let exact = common::planted::dense_norm(&(&planted.q[0] + &planted.q[1]), &planted.k[0]);
        planted.q.iter_mut().for_each(|q| *q *= a);
        planted.k[0] *= b;
        let got = summed_norm(&planted.geometry());
        // A subnormal f32 keeps fewer digits.
        assert!((got / a / b - exact).abs() <= 1e-3 * exact, "{a} {b}: {got} for {}", exact * a * b);
    }
}

/// The descale times the target is never below the bound, down to the last bit of f64.
#[test]
fn covering_is_exact() {
    for target in [448.0, 0.8 * 448.0, 0.3 * 448.0] {
        for i in 1..4000u32 {
            let descale = f32::from_bits(0x3f80_0000 + i * 2049);
            let mut bound = f64::from(descale) * target;
            for _ in 0..4 {
                let got = f64::from(Descale::covering(bound, target).unwrap().get());
                assert!(got * target >= bound, "{bound} {target}: {got}");
                bound = bound.next_up();
            }
        }
    }
}

/// Grams of the first query and key head.
fn grams(geometry: &LayerGeometry<'_>) -> (Gram, Gram) {
    let [q, k, _] = layer_channels(geometry).unwrap();
    let mut grams = LayerGrams::new(geometry, &q, &k);
    (grams.q.remove(0).effective, grams.k.remove(0).effective)
}

fn close(got: f64, want: f64, tolerance: f64, what: &str) {
    assert!((got - want).abs() <= tolerance * want.abs(), "{what}: {got} for {want}");
}

/// Everything at once, against the formulas written out: LayerNorm, shift, biases, grouped heads, partial rotation with
/// an attention factor, and constants spread over the pairs or in one of them.
#[test]
fn formulas_with_everything() {
    let (d, r, rotary, factor) = (96, 24, 10, 1.25);
    let root = (d as f64).sqrt();
    for (layout, concentrated) in [(RopeLayout::HalfSplit, false), (RopeLayout::Interleaved, true)] {
        let mut planted = Planted::gaussian(spec(d, r, 4, 2), 31).with_random_norm(31, NormKind::LayerNorm, true);
        planted.spec.layers[0].rope = Some(Rope { attention_factor: factor, ..rope(rotary, layout, 1e4) });
        planted.q[1] *= 3.0;
        if concentrated {
            planted.shift = Some(vec![0.0; d]);
            planted.q_bias = Some((0..4 * r).map(|c| if c % r < 2 { 5.0 } else { 0.0 }).collect());
            planted.k_bias = Some((0..2 * r).map(|c| if c % r < 2 { 7.0 } else { 0.0 }).collect());
        }
        // A mean that rounding sees and exact arithmetic does not.
        planted.q[2].add_scalar_mut(0.3);
        planted.k[1].add_scalar_mut(0.2);
        let scaled = |c: usize| if c < rotary { factor } else { 1.0 };
        let shift = planted.shift.clone().unwrap();
        let gain = planted.gain.clone().unwrap();
        struct Side {
            w: DMatrix<f64>,
            constant: DVector<f64>,
            spread: DVector<f64>,
            folded: DMatrix<f64>,
        }
        let side = |raw: &DMatrix<f64>, bias: &[f64]| {
            let (mut w, mut folded) = (planted.effective(raw), raw.clone());
            folded.row_iter_mut().zip(&gain).for_each(|(mut row, g)| row *= *g);
            for c in 0..r {
                w.column_mut(c).scale_mut(scaled(c));
                folded.column_mut(c).scale_mut(scaled(c));
            }
            let products = |c: usize| raw.column(c).iter().zip(&shift).map(|(w, s)| w * s).collect::<Vec<_>>();
            let constant = DVector::from_fn(r, |c, _| scaled(c) * (products(c).iter().sum::<f64>() + bias[c]));
            let spread = DVector::from_fn(r, |c, _| {
                scaled(c) * (products(c).iter().map(|p| p.abs()).sum::<f64>() + bias[c].abs())
            });
            Side { w, constant, spread, folded }
        };
        let sides = |heads: &[DMatrix<f64>], bias: &Option<Vec<f64>>| -> Vec<Side> {
            heads.iter().zip(bias.as_ref().unwrap().chunks(r)).map(|(w, b)| side(w, b)).collect()
        };
        let (qs, ks) = (sides(&planted.q, &planted.q_bias), sides(&planted.k, &planted.k_bias));
        let mut blocks: Vec<Vec<usize>> =
            planted.spec.layers[0].rope.as_ref().unwrap().pairs().map(|(a, b)| vec![a, b]).collect();
        blocks.push((rotary..r).collect());
        let part = |v: &DVector<f64>, block: &[usize]| block.iter().map(|&c| v[c] * v[c]).sum::<f64>().sqrt();
        let linear = |w: &DMatrix<f64>, c: &DVector<f64>| {
            let by_block: f64 = blocks.iter().map(|b| w.select_columns(b).singular_values().max() * part(c, b)).sum();
            by_block.min(w.singular_values().max() * c.norm())
        };
        let operand = |side: &Side| {
            let (mut exact, mut rounded) = (0.0f64, 0.0f64);
            let rows = blocks[..rotary / 2].iter().cloned().chain((rotary..r).map(|c| vec![c]));
            for block in rows {
                let own = root * side.w.select_columns(&block).singular_values().max() + part(&side.constant, &block);
                let a = DVector::from_fn(r, |c, _| root * side.folded.column(c).norm() + side.spread[c]);
                exact = exact.max(own);
                rounded = rounded.max(own + part(&a, &block) / 32.0);
            }
            (exact, rounded)
        };
        let geometry = planted.geometry();
        let spectrum = GramEngine.layer(&geometry).unwrap();
        let tail = Tail::default();
        let bounds = LayerBounds::new(&planted.spec, &geometry, &spectrum, &tail).unwrap();
        for (got, side) in bounds.q.iter().chain(&bounds.k).zip(qs.iter().chain(&ks)) {
            let (exact, rounded) = operand(side);
            close(got.exact, exact, 1e-9, "operand");
            close(got.rounded, rounded, 1e-9, "rounded operand");
        }
        let largest = |bounds: &[sigmascale::bound::OperandBound]| bounds.iter().map(|b| b.rounded).fold(0.0, f64::max);
        let flush = |bounds| (r as f64).sqrt() / 1024.0 * largest(bounds) / 448.0;
        let (tau, factor_e) = (planted.spec.layers[0].softmax_scale, 18.0 / 17.0 * 33.0 / 32.0);
        for (head, got) in bounds.heads.iter().enumerate() {
            let (q, k) = (&qs[head], &ks[head / 2]);
            let sigma = spectrum.heads.as_ref().unwrap()[head].exact.unwrap().sigma_rope_upper;
            let turned: f64 = blocks[..rotary / 2].iter().map(|b| part(&q.constant, b) * part(&k.constant, b)).sum();
            // Channels that do not rotate have one product, whatever the position.
            let c0 = turned + (rotary..r).map(|c| q.constant[c] * k.constant[c]).sum::<f64>().abs();
            let constants = root * (linear(&q.w, &k.constant) + linear(&k.w, &q.constant)) + c0;
            let exact = got.exact.unwrap();
            close(exact, tau * (d as f64 * sigma + constants), 1e-7, "exact");
            assert!(exact >= tau * (d as f64 * sigma + constants * (1.0 - 1e-9)) * (1.0 - 1e-14));
            let size = |side: &Side| root * side.folded.singular_values().max() + side.spread.norm();
            let (sq, sk) = (size(q), size(k));
            // Weights that are rounded to BF16 when they are loaded.
            let load = |side: &Side| 18.0 / 17.0 * root * side.folded.norm() / 256.0;
            let gap =
                (factor_e * sq + flush(&bounds.q) + load(q)) * (factor_e * sk + flush(&bounds.k) + load(k)) - sq * sk;
            close(got.rounded.unwrap(), exact + tau * gap, 1e-7, "rounded");
        }
        // One q descale per group: its first head may be the larger.
        let plan = ScalePlan::from_bounds(&bounds, BoundKind::WorstCase, 0.8, Granularity::Head).unwrap();
        for kv in 0..2 {
            let want = bounds.q[2 * kv].rounded.max(bounds.q[2 * kv + 1].rounded) / 448.0;
            close(f64::from(plan.operands.q[kv].get()), want, 1e-6, "q descale");
        }
    }
}

/// Normalized q and k with shifts and an attention factor, against the formulas.
#[test]
fn formulas_of_a_qk_norm_with_shift_and_factor() {
    let mut planted = Planted::gaussian(spec(64, 16, 2, 2), 5);
    qk_normed(&mut planted);
    planted.spec.qk_norm.as_mut().unwrap().shift = true;
    planted.spec.qk_norm.as_mut().unwrap().gain = GainForm::OnePlus;
    let factor = 1.5;
    planted.spec.layers[0].rope = Some(Rope { attention_factor: factor, ..rope(8, RopeLayout::HalfSplit, 1e4) });
    let gain: Vec<f64> = (0..16).map(|c| if c == 2 { 1.0 } else { -0.5 }).collect();
    let shift: Vec<f64> = (0..16)
        .map(|c| {
            if c == 2 {
                3.0
            } else if c == 6 {
                4.0
            } else {
                0.25
            }
        })
        .collect();
    let vectors = NormVectors { gain, shift: Some(shift.clone()) };
    (planted.q_norm, planted.k_norm) = (Some(vectors.clone()), Some(vectors));
    let bounds = try_bounds(&planted).unwrap();
    // Channels 2 and 6 are one pair: gain 2, shift (3, 4).
    close(bounds.q[0].exact, factor * (4.0 * 2.0 + 5.0), 1e-12, "operand");
    close(bounds.q[0].rounded, factor * (4.0 * 2.0 + 5.0) * 33.0 / 32.0, 1e-12, "rounded operand");
    let length: f64 =
        shift.iter().enumerate().map(|(c, s)| (s * if c < 8 { factor } else { 1.0 }).powi(2)).sum::<f64>().sqrt();
    let norm = factor * 4.0 * 2.0 + length;
    close(bounds.heads[1].exact.unwrap(), 0.25 * norm * norm, 1e-12, "exact");
}

/// A gain stored as g - 1, by the ascent: behind a gain of 1 + 2 the logits are nine times as large.
#[test]
fn a_gain_stored_without_its_one_counts_in_full() {
    let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 5);
    let plain = try_bounds(&planted).unwrap();
    planted.gain = Some(vec![2.0; 64]);
    planted.spec.norm.gain = GainForm::OnePlus;
    let bounds = try_bounds(&planted).unwrap();
    close(bounds.heads[0].exact.unwrap(), 9.0 * plain.heads[0].exact.unwrap(), 1e-9, "exact");
    close(bounds.v.unwrap()[0].exact, 3.0 * plain.v.unwrap()[0].exact, 1e-9, "v");
}

/// A gain of 1 + g is not what a load in BF16 rounds: that is g, and `1 + bf16(g)` may be almost twice as large.
#[test]
fn a_gain_stored_without_its_one_counts_as_it_is_loaded() {
    let g = f64::from(-0.99795f32);
    let loaded = 1.0 + half::bf16::from_f64(g).to_f64();
    assert!(loaded > 1.85 * (1.0 + g));
    for kind in [NormKind::RmsNorm, NormKind::LayerNorm] {
        let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 5);
        planted.spec.norm = InputNorm { kind, gain: GainForm::OnePlus, shift: false };
        planted.gain = Some((0..64).map(|i| if i % 2 == 0 { g } else { 0.25 }).collect());
        let found = try_bounds(&planted).unwrap();
        // What the model computes after the load, the rounded gains being exact.
        let mut run = planted.clone();
        run.spec.norm.gain = GainForm::Plain;
        run.gain = Some((0..64).map(|i| if i % 2 == 0 { loaded } else { 1.25 }).collect());
        let run = try_bounds(&run).unwrap();
        let v = [found.v.unwrap()[0].exact, run.v.unwrap()[0].exact];
        assert!(v[0] >= v[1] * (1.0 - 1e-12) && found.heads[0].exact >= run.heads[0].exact, "{kind:?} {v:?}");
    }
    // The same of the norm of q and k.
    let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 5);
    qk_normed(&mut planted);
    planted.q_norm = Some(NormVectors { gain: vec![g; 16], shift: None });
    planted.spec.qk_norm = planted.spec.qk_norm.map(|norm| QkNorm { gain: GainForm::OnePlus, ..norm });
    let exact = try_bounds(&planted).unwrap().q[0].exact;
    assert!(exact >= 4.0 * loaded * (1.0 - 1e-12), "{exact}");
}

/// Large sides whose product all but cancels: what certifies is the error of the Grams, far above sigma.
#[test]
fn certificates_carry_the_error_of_the_grams() {
    let (d, r) = (1000, 16);
    let mut rng = StdRng::seed_from_u64(8);
    let turn = gaussian(r, r, &mut rng).qr().q();
    let q = gaussian(d, 1, &mut rng) * turn.column(0).transpose();
    let k = gaussian(d, 1, &mut rng) * turn.column(1).transpose();
    let mut planted = Planted::pair(q, k);
    planted.q_bias = Some(turn.column(1).iter().map(|x| 3.0 * x).collect());
    planted.spec.bias.q = true;
    let geometry = planted.geometry();
    let (q, k) = grams(&geometry);
    let (tq, tk) = (q.matrix.trace(), k.matrix.trace());
    for (gram, trace) in [(&q, tq), (&k, tk)] {
        assert!(gram.error() >= d as f64 * f64::EPSILON * trace, "{}", gram.error());
    }
    let least = q.error() * tk + k.error() * tq;
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let head = &spectrum.heads.unwrap()[0];
    let exact = head.exact.unwrap();
    // The balanced diagonals shrink the errors a little, never by half.
    for upper in [exact.sigma_upper, exact.sigma_rope_upper, exact.frobenius_rope_upper] {
        assert!(upper.powi(2) >= 0.25 * least, "{upper} {}", least.sqrt());
    }
    // W_K c_q is as large as sides get; W_Q c_k is zero but for the error.
    close(head.constants.b, 3.0 * tk.sqrt(), 1e-9, "b");
    planted.q_bias = None;
    planted.spec.bias = QkvBias { k: true, ..QkvBias::default() };
    planted.k_bias = Some(turn.column(1).iter().map(|x| 3.0 * x).collect());
    let spectrum = GramEngine.layer(&planted.geometry()).unwrap();
    let a = spectrum.heads.unwrap()[0].constants.a;
    assert!(a * a >= 0.99 * q.error() * 9.0, "{a}");
}

/// The diagonal of a LayerNorm head: the trace is that of the effective operators, the mean removed.
#[test]
fn the_diagonal_term_knows_no_mean() {
    let (d, r) = (512, 128);
    let mut planted = Planted::gaussian(spec(d, r, 1, 1), 4);
    planted.spec.norm.kind = NormKind::LayerNorm;
    planted.k[0] = planted.q[0].clone();
    let centred = planted.effective(&planted.q[0]);
    planted.k[0].add_scalar_mut(-2.0);
    planted.q[0].add_scalar_mut(1.0);
    let spectrum = GramEngine.layer(&planted.geometry()).unwrap();
    close(spectrum.heads.unwrap()[0].exact.unwrap().trace, centred.norm_squared(), 1e-9, "trace");
}

/// Batch, steps and the keys of a mask that is not causal enter the union; the published constants follow.
#[test]
fn the_union_counts_batches_steps_and_both_triangles() {
    let tail = Tail { batch: 8, steps: 3000, ..Tail::default() };
    for (name, want) in [("gpt2-xl", 0.0892), ("mistral-7b", 0.0422), ("llama-2-13b", 0.0340), ("llama-2-70b", 0.0216)]
    {
        close(tail.c_star(&preset(name).unwrap()).unwrap().c_star, want, 2e-3, name);
    }
    let mut planted = Planted::gaussian(spec(128, 16, 1, 1), 4);
    planted.spec.causal = false;
    let sigma = common::planted::dense_norm(&planted.q[0], &planted.k[0]);
    let frobenius = (&planted.q[0] * planted.k[0].transpose()).norm();
    planted.q_bias = Some(vec![1.0; 16]);
    planted.spec.bias.q = true;
    let linear = planted.k[0].column_sum().norm();
    let (t, x) = ((12.0 * 1024f64.powi(2) / 1e-6).ln(), (4.0 * 1024.0 / 1e-6f64).ln());
    let trace = planted.q[0].tr_mul(&planted.k[0]).trace().abs();
    let pairs = ((2.0 * t).sqrt() * frobenius + t * sigma).max(trace + 2.0 * x.sqrt() * frobenius + 2.0 * sigma * x);
    let want = 0.25 * (pairs + (2.0 * t).sqrt() * linear);
    close(try_bounds(&planted).unwrap().heads[0].spectrum.unwrap(), want, 1e-6, "spectrum");
}

/// The inverse of every descale is finite, also of one below what f32 can invert.
#[test]
fn tiny_bounds_have_a_finite_inverse() {
    for bound in [1e-300, 1e-44, 1e-36] {
        let descale = Descale::covering(bound, 448.0).unwrap();
        assert!(descale.quant_scale().get().is_finite() && descale.get() >= f32::MIN_POSITIVE, "{bound:e}");
    }
}

/// Raw weights beyond f64 behind gains that bring them back, and Grams with a NaN: no decomposition may run for ever.
#[test]
fn decompositions_end_on_what_is_not_finite() {
    for (weight, gain) in [(1e200, 1e-200), (1e-165, 1e165)] {
        let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 3);
        let exact = common::planted::dense_norm(&planted.q[0], &planted.k[0]);
        planted.q[0] *= weight;
        planted.k[0] *= weight;
        planted.v[0] *= weight;
        planted.gain = Some(vec![gain; 64]);
        let bounds = try_bounds(&planted).unwrap();
        close(bounds.heads[0].exact.unwrap(), 0.25 * 64.0 * exact, 1e-6, "exact");
    }
    let mut matrix = DMatrix::identity(16, 16);
    (matrix[(3, 5)], matrix[(5, 3)]) = (f64::NAN, f64::NAN);
    let (bad, good) = (Gram::exact(matrix), Gram::exact(DMatrix::identity(16, 16)));
    for (q, k) in [(&bad, &good), (&good, &bad)] {
        assert!(!HeadGrams { q, k }.sigma_square().upper.is_finite());
    }
}

/// A spectrum of another layer or model bounds nothing.
#[test]
fn a_foreign_spectrum_is_refused() {
    let planted = Planted::gaussian(spec(64, 16, 2, 1), 3);
    let other = Planted::gaussian(spec(64, 16, 1, 1), 3);
    let spectrum = GramEngine.layer(&other.geometry()).unwrap();
    let error = LayerBounds::new(&planted.spec, &planted.geometry(), &spectrum, &Tail::default()).unwrap_err();
    assert!(error.is_mismatch(), "{error}");
    let mut spectrum = GramEngine.layer(&planted.geometry()).unwrap();
    spectrum.layer = 1;
    assert!(LayerBounds::new(&planted.spec, &planted.geometry(), &spectrum, &Tail::default()).is_err());
}

/// A config whose rotated channels engines count differently: the bounds are the larger of both readings.
#[test]
fn two_readings_of_a_rotation_give_the_larger_bounds() {
    let (d, r) = (64, 16);
    for (seed, normed) in [(1, false), (2, false), (3, true)] {
        let mut planted = Planted::gaussian(spec(d, r, 2, 1), seed).with_random_norm(seed, NormKind::RmsNorm, true);
        (0..r).for_each(|c| planted.k[0].column_mut(c).scale_mut(1.0 + c as f64));
        if normed {
            qk_normed(&mut planted);
            planted.q_norm.as_mut().unwrap().gain = (0..r).map(|c| 1.0 + (c * 5 % 7) as f64).collect();
            planted.k_norm.as_mut().unwrap().gain = (0..r).map(|c| 1.0 + (c * 3 % 11) as f64).collect();
        }
        let mut with = |dim: usize, other_dims: Vec<usize>| {
            planted.spec.layers[0].rope = Some(Rope { other_dims, ..rope(dim, RopeLayout::HalfSplit, 1e4) });
            try_bounds(&planted).unwrap()
        };
        let (one, two, both) = (with(8, vec![]), with(16, vec![]), with(8, vec![16]));
        assert!(normed || one.k[0] != two.k[0]);
        for head in 0..2 {
            let of = |bounds: &LayerBounds| {
                let head = bounds.heads[head];
                [head.exact.unwrap(), head.rounded.unwrap(), head.spectrum.unwrap_or(0.0)]
            };
            for ((a, b), found) in of(&one).into_iter().zip(of(&two)).zip(of(&both)) {
                assert!(found >= a.max(b), "{seed}: {found} of {a} and {b}");
                assert!(normed || found <= a.max(b) * 1.02, "{seed}: {found} of {a} and {b}");
            }
            assert_eq!(both.q[head].exact, one.q[head].exact.max(two.q[head].exact));
        }
        assert_eq!(both.k[0].exact, one.k[0].exact.max(two.k[0].exact));
    }
}

/// An input in E4M3 takes its scale from the element with the large gain, and the others fall under its normal numbers: those just
/// above half a step double.
#[test]
fn a_gain_thousands_of_times_the_others_is_counted_in_e4m3() {
    let (d, r, gain) = (1024, 16, 20_000.0);
    let mut planted = Planted::gaussian(spec(d, r, 1, 1), 1);
    planted.spec.fp8_inputs = true;
    planted.gain = Some((0..d).map(|i| if i == 0 { gain } else { 1.0 }).collect());
    // One channel adds up the others.
    let sums = DMatrix::from_fn(d, r, |i, c| if i > 0 && c == 0 { 1.0 } else { 0.0 });
    (planted.q, planted.k, planted.v) = (vec![sums.clone()], vec![sums.clone()], vec![sums]);
    let bounds = try_bounds(&planted).unwrap();
    // x_0 such that the others, each 1 before the sphere, are 0.501 of a step.
    let step = 1.0 / 0.501;
    let first = step * 512.0 * 448.0 / gain;
    let token = common::forward::to_sphere(NormKind::RmsNorm, &[vec![first], vec![1.0; d - 1]].concat());
    let normed = common::forward::norm_output(&planted.spec, &planted.weights(), &token);
    let scale = normed[0] / 448.0;
    let rounded: f64 = normed[1..].iter().map(|x| F8E4M3::from_f64(x / scale).to_f64() * scale).sum();
    for (name, bound) in [("q", bounds.q[0]), ("k", bounds.k[0]), ("v", bounds.v.as_ref().unwrap()[0])] {
        assert!(rounded > 1.3 * bound.exact, "{name}: the attack is weak, {rounded} of {bound:?}");
        assert!(rounded <= bound.rounded, "{name}: {rounded} past {bound:?}");
    }
    let logit = rounded * rounded * planted.spec.layers[0].softmax_scale;
    assert!(logit <= bounds.heads[0].rounded.unwrap(), "{logit} past {:?}", bounds.heads[0]);
}

/// A LayerNorm in f32 as GPUs compute it, its output in BF16, and one value channel in f32 rounded to BF16.
fn computed_value(token: &[f32], weights: &[f64], epsilon: f32) -> f64 {
    let lanes = |of: &dyn Fn(f32) -> f32| {
        let mut sums = [0f32; 32];
        token.iter().enumerate().for_each(|(i, x)| sums[i % 32] += of(*x));
        sums.iter().sum::<f32>() * (1.0 / token.len() as f32)
    };
    let mean = lanes(&|x| x);
    let scale = 1.0 / (lanes(&|x| (x - mean) * (x - mean)) + epsilon).sqrt();
    let normed = token.iter().map(|x| half::bf16::from_f32((x - mean) * scale).to_f32());
    let value: f32 = normed.zip(weights).map(|(x, w)| x * half::bf16::from_f64(*w).to_f32()).sum();
    f64::from(half::bf16::from_f32(value.abs()).to_f32())
}

/// The mean that a LayerNorm subtracts is rounded relative to the token: up to the stated limit the bounds hold, and a constant
/// token far beyond it passes them.
#[test]
fn a_layer_norm_is_bounded_up_to_the_stated_mean() {
    let (d, r, epsilon) = (1000, 16, 1e-5f32);
    let mut rng = StdRng::seed_from_u64(3);
    let mut planted = Planted::gaussian(spec(d, r, 1, 1), 3);
    planted.spec.norm = InputNorm { kind: NormKind::LayerNorm, gain: GainForm::Plain, shift: false };
    // Almost all of the weights is the mean that the norm takes out.
    planted.v = vec![DMatrix::from_fn(d, r, |_, _| 1.0 + 0.02 * rng.random_range(-1.0..1.0))];
    let bound = try_bounds(&planted).unwrap().v.unwrap()[0].rounded;
    let value = |token: &[f32]| {
        let column = |c: usize| planted.v[0].column(c).iter().copied().collect::<Vec<_>>();
        (0..r).map(|c| computed_value(token, &column(c), epsilon)).fold(0.0, f64::max)
    };
    let limit = LAYER_NORM_MEAN_LIMIT as f32;
    let mut most: f64 = 0.0;
    for size in [1e-3f32, 1.0, 30.0, 1e3, 1e6] {
        for attempt in 0..20 {
            let noise: Vec<f32> = (0..d).map(|_| rng.random_range(-1.7f32..1.7)).collect();
            let mean = limit * (size * size + epsilon).sqrt() * 0.95;
            let token: Vec<f32> = noise.iter().map(|x| mean + if attempt == 0 { 0.0 } else { size * x }).collect();
            let ratio = mean / (if attempt == 0 { epsilon } else { size * size + epsilon }).sqrt();
            if ratio <= limit {
                most = most.max(value(&token));
            }
        }
        // Constant tokens, whose variance is zero.
        let constant = limit * epsilon.sqrt() * rng.random_range(0.5..1.0);
        most = most.max(value(&vec![constant; d]));
    }
    assert!(most <= bound, "{most} past {bound}");
    let far = value(&vec![999_424.0 + 64.0; d]);
    assert!(far > 3.0 * bound, "the limit is not needed: {far} of {bound}");
}

/// Weights that are stored in more than they run in are rounded once more when they are loaded.
#[test]
fn the_rounding_share_grows_with_what_is_rounded() {
    let planted = |rotated: bool, grown: bool| {
        let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 2);
        planted.spec.layers[0].rope = rotated.then(|| rope(16, RopeLayout::HalfSplit, 1e4));
        planted.spec.layers[0].temperature =
            grown.then_some(Temperature { strength: 1e-9, period: 8, shift: 0, positions: 8 });
        // Rank one and one pair, so that exact and rounding parts are the same number.
        let one = DMatrix::from_fn(64, 16, |i, c| if (i, c) == (0, 0) { 1.0 } else { 0.0 });
        (planted.q, planted.k, planted.v) = (vec![one.clone()], vec![one.clone()], vec![one]);
        let bounds = try_bounds(&planted).unwrap();
        let share = |bound: &sigmascale::bound::OperandBound| bound.rounded / bound.exact - 1.0;
        [share(&bounds.q[0]), share(&bounds.k[0]), share(&bounds.v.unwrap()[0])]
    };
    let of = |n: i32| (1.0 + 1.0 / 256.0f64).powi(n) - 1.0;
    let close = |found: f64, least: f64| assert!(found >= least && found < least + 1e-4, "{found} for {least}");
    // Norm and gain 3, load 1, projection 1, rotation 3, growth 2; stored in F64 here.
    for (rotated, grown, [q, k, v]) in [
        (false, false, [1.0 / 32.0; 3]),
        (true, false, [of(8), of(8), 1.0 / 32.0]),
        (true, true, [of(10), of(8), 1.0 / 32.0]),
    ] {
        let found = planted(rotated, grown);
        found.into_iter().zip([q, k, v]).for_each(|(found, least)| close(found, least - 1e-12));
    }
}

/// Weights that are all rounded to the same side move a token's query by more than a share of the spectral norm: single
/// roundings add up by the Frobenius norm.
#[test]
fn roundings_of_single_weights_are_counted_one_by_one() {
    let d = 128;
    let mut planted = Planted::gaussian(spec(d, d, 1, 1), 3);
    // Orthogonal columns whose entries all lie just above the middle between two BF16 numbers, so that loading adds 2^-8 to each.
    let entry = |i: usize, c: usize| {
        if (i & c).count_ones().is_multiple_of(2) { 1.0 + 1.001 / 256.0 } else { -1.0 - 0.999 / 256.0 }
    };
    planted.q = vec![DMatrix::from_fn(d, d, entry)];
    let load = |x: f64| half::bf16::from_f64(x).to_f64();
    // The constant token, which the exact weights hardly see.
    let moved: f64 =
        (0..d).map(|c| (0..d).map(|i| load(entry(i, c)) - entry(i, c)).sum::<f64>().powi(2)).sum::<f64>().sqrt();
    let sigma = |m: &DMatrix<f64>| m.singular_values()[0] * (d as f64).sqrt();
    let (size_q, size_k) = (sigma(&planted.q[0]), sigma(&planted.k[0]));
    let share = planted.geometry().rounding.q;
    assert!(moved > share * size_q, "{moved} is within {}", share * size_q);
    let head = &try_bounds(&planted).unwrap().heads[0];
    let tau = planted.spec.layers[0].softmax_scale;
    let gap = tau * (((1.0 + share).powi(2) - 1.0) * size_q * size_k + moved * size_k);
    assert!(head.rounded.unwrap() - head.exact.unwrap() >= gap, "{head:?} without {gap}");
}

/// Sizes for which nalgebra's products take another path.
#[test]
fn heads_of_any_size_have_bounds() {
    for d_head in [2, 4, 6, 66, 68, 70] {
        let planted = Planted::gaussian(spec(96, d_head, 2, 1), 9);
        let bounds = try_bounds(&planted).unwrap();
        let sigma = |m: DMatrix<f64>| m.singular_values().max() * planted.spec.layers[0].softmax_scale * 96.0;
        let (least, most) = (
            sigma(planted.k[0].transpose() * &planted.q[0]),
            sigma(planted.q[0].clone()) * planted.k[0].singular_values().max(),
        );
        let exact = bounds.heads[0].exact.unwrap();
        assert!(exact > least * (1.0 - 1e-9) && exact < most * (1.0 + 1e-9), "{d_head}: {least} {exact} {most}");
    }
}

/// Errors name a layer by the model's own number, which is not its place where layers without attention stand in front.
#[test]
fn errors_name_layers_by_the_models_own_number() {
    let mut planted = Planted::gaussian(spec(64, 16, 1, 1), 5);
    planted.spec.layers[0].number = 7;
    let named = |error: sigmascale::Error| {
        let text = error.to_string();
        assert!(text.contains("layer 7") && !text.contains("layer 0"), "{text}");
    };
    let mut broken = planted.clone();
    broken.spec.norm.shift = true;
    named(broken.try_geometry().unwrap_err());
    let geometry = planted.geometry();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let bounds = |spectrum: &LayerSpectrum| LayerBounds::new(&planted.spec, &geometry, spectrum, &Tail::default());
    named(bounds(&LayerSpectrum { layer: 1, ..spectrum.clone() }).unwrap_err());
    let mut infinite = spectrum.clone();
    infinite.heads.as_mut().unwrap()[0].exact.as_mut().unwrap().sigma_rope_upper = f64::INFINITY;
    named(bounds(&infinite).unwrap_err());
    let foreign = AttentionSpec { d_model: 32, ..planted.spec.clone() };
    named(PowerEngine::new(&mut PowerState::new(&foreign, 0)).layer(&geometry).unwrap_err());
    let mut calibration = Calibration::new(&planted.spec, Options::default()).unwrap();
    let mut huge = planted.clone();
    huge.k[0] *= 1e60;
    named(calibration.layer(huge.weights()).unwrap_err());
    let mut runtime = Runtime::new(&planted.spec, PolicyKind::Geometry.into()).unwrap();
    named(runtime.update_weights(0, Weights::Unchanged).unwrap_err());
    named(runtime.plan(0, None).unwrap_err());
    let mut bounded = bounds(&spectrum).unwrap();
    bounded.k.push(bounded.k[0]);
    runtime.update_weights(0, Weights::Bounded(bounded)).unwrap();
    named(runtime.plan(0, None).unwrap_err());
}
