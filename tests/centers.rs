//! Bounds of keys and values with a center subtracted: random and adversarial tokens, positions and centers against them, and the
//! closed forms against direct sums.

mod common;

use common::forward::{forward_qkv, to_sphere};
use common::planted::{Planted, rope, spec};
use nalgebra::DVector;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use serde_json::json;
use sigmascale::bound::{LayerBounds, LayerRanges, Tail};
use sigmascale::model::*;
use sigmascale::plan::*;
use sigmascale::spectral::{GramEngine, SpectralEngine};

/// A layer with constants, rotated by one of several rotations, of sequences up to a random length.
fn random_layer(rng: &mut StdRng) -> Planted {
    let (d, r, n_kv) = (rng.random_range(20..90), 16, rng.random_range(1..3));
    let mut own = spec(d, r, n_kv * 2, n_kv);
    own.layers[0].rope = match rng.random_range(0..6) {
        0 => None,
        1 => Some(rope(16, RopeLayout::HalfSplit, 1e4)),
        2 => Some(rope(16, RopeLayout::Interleaved, 1e3)),
        3 => Some(rope(8, RopeLayout::HalfSplit, 1e5)),
        4 => Some(Rope { attention_factor: 1.3, ..rope(12, RopeLayout::HalfSplit, 1e4) }),
        _ => {
            // The base grows with the sequence and the factor is one of two.
            let whole = rope(16, RopeLayout::HalfSplit, 1e4);
            let range = RopeRange { fastest: whole.inv_freq.clone(), least_factor: 0.9, stretch: 1.0 };
            Some(Rope { attention_factor: 1.1, inv_freq: None, range: Some(range), ..whole })
        }
    };
    own.max_positions =
        [None, Some(1), Some(rng.random_range(2..60)), Some(rng.random_range(60..4000))][rng.random_range(0..4)];
    let kind = if rng.random() { NormKind::LayerNorm } else { NormKind::RmsNorm };
    let mut planted = Planted::gaussian(own, rng.random()).with_random_norm(rng.random(), kind, true);
    // Biases of trained models lie in few pairs.
    let large = rng.random_range(0.0..60.0);
    planted.k_bias = planted
        .k_bias
        .map(|bias| bias.iter().map(|b| if rng.random_range(0..4) == 0 { b * large } else { *b }).collect());
    if kind == NormKind::RmsNorm {
        (planted.shift, planted.spec.norm.shift) = (None, false);
    }
    planted
}

fn ranges_of(planted: &Planted) -> (LayerBounds, LayerRanges) {
    LayerBounds::operands_and_ranges(&planted.spec, &planted.geometry()).unwrap()
}

/// Rotations that a layer may have: by its angles, and where these are not settled by slower ones and the smaller factor.
fn readings(planted: &Planted, rng: &mut StdRng) -> Vec<AttentionSpec> {
    let Some(Rope { range: Some(range), .. }) = &planted.spec.layers[0].rope else { return vec![planted.spec.clone()] };
    let make = |slower: f64, factor: f64| {
        let mut spec = planted.spec.clone();
        let rope = spec.layers[0].rope.as_mut().unwrap();
        rope.inv_freq = range.fastest.as_ref().map(|angles| angles.iter().map(|w| w * slower).collect());
        (rope.range, rope.attention_factor) = (None, factor);
        spec
    };
    vec![make(1.0, 1.1), make(1.0, 0.9), make(rng.random_range(0.1..1.0), rng.random_range(0.9..1.1))]
}

/// The token that takes a channel of a key to its largest or smallest value at a position.
fn extreme(spec: &AttentionSpec, planted: &Planted, head: usize, channel: usize, position: f64, sign: f64) -> Vec<f64> {
    let w = planted.effective(&planted.k[head]);
    let mut column: DVector<f64> = w.column(channel).into();
    if let Some(rope) = &spec.layers[0].rope {
        for ((a, b), angle) in rope.pairs().zip(rope.inv_freq.as_ref().unwrap()) {
            let (sin, cos) = (position * angle).sin_cos();
            if channel == a {
                column = w.column(a) * cos - w.column(b) * sin;
            } else if channel == b {
                column = w.column(a) * sin + w.column(b) * cos;
            }
        }
    }
    let norm = column.norm();
    (column * (sign * (spec.d_model as f64).sqrt() / norm)).as_slice().to_vec()
}

fn center_of(rng: &mut StdRng, ranges: &LayerRanges, how: usize) -> Center {
    let rows = |heads: &[sigmascale::bound::HeadRange], f: &mut dyn FnMut(f64, f64, f64) -> f64| -> Vec<Vec<f64>> {
        heads
            .iter()
            .map(|head| (0..head.high.len()).map(|i| f(head.high[i], head.low[i], head.constant[i])).collect())
            .collect()
    };
    let mut value: Box<dyn FnMut(f64, f64, f64) -> f64> = match how {
        0 => Box::new(|high, low, _| 0.5 * (high - low)),
        1 => Box::new(|_, _, constant| constant),
        2 => Box::new(|high, low, _| rng.random_range(-1.0..1.0) * high.max(low)),
        _ => Box::new(|high, low, _| rng.random_range(-1000.0..1000.0) * high.max(low)),
    };
    let (k, v) = (rows(&ranges.k, &mut value), rows(ranges.v.as_ref().unwrap(), &mut value));
    Center::new(0, Some(k), Some(v)).unwrap()
}

/// No token at any position below the limit passes a bound, whatever the center; the extreme ones come within a thousandth.
#[test]
fn nothing_passes_the_bound_of_centered_keys_and_values() {
    let mut rng = StdRng::seed_from_u64(1);
    let (mut attained, mut lower) = (0, 0);
    for case in 0..120 {
        let planted = random_layer(&mut rng);
        let (bounds, ranges) = ranges_of(&planted);
        let specs = readings(&planted, &mut rng);
        let center = center_of(&mut rng, &ranges, case % 4);
        let layer = CenteredLayer::with(center.clone(), &bounds, &ranges).unwrap();
        let weights = planted.weights();
        let last = planted.spec.max_positions.map_or(100_000, |n| n - 1);
        for (head, bound) in layer.k.iter().enumerate() {
            let c = center.c(head).map_or(vec![0.0; 16], |c| c.iter().map(|c| f64::from(*c)).collect());
            let mut largest: f64 = 0.0;
            for spec in &specs {
                for _ in 0..300 {
                    let position = [0, last, rng.random_range(0..=last)][rng.random_range(0..3)] as f64;
                    let (channel, sign) = (rng.random_range(0..16), if rng.random() { 1.0 } else { -1.0 });
                    let x = extreme(spec, &planted, head, channel, position, sign);
                    let key = &forward_qkv(spec, &weights, &x, position).k[head];
                    let most = key.iter().zip(&c).map(|(k, c)| (k - c).abs()).fold(0.0, f64::max);
                    assert!(most <= bound.exact * (1.0 + 1e-9), "case {case} head {head}: {most} over {bound:?}");
                    largest = largest.max(most);
                    // What is cast, at the worst that roundings before it may do.
                    let s = layer.k_descale[head].quant_scale().get();
                    for (i, k) in key.iter().enumerate() {
                        for rounding in [-1.0, 1.0].map(|side| side * ranges.k[head].rounding[i]) {
                            let c = center.c(head).map_or(0.0, |c| c[i]);
                            let scaled = ((k + rounding) as f32).mul_add(s, -(c * s));
                            assert!(scaled.abs() <= 448.0, "case {case}: {scaled}");
                        }
                    }
                }
            }
            attained += usize::from(largest > bound.exact * 0.999);
            lower += usize::from(bound.exact < bounds.k[head].exact * 0.9);
            let most = c.iter().fold(0.0, |most: f64, c| most.max(c.abs()));
            assert!(bound.exact <= (bounds.k[head].exact + most) * (1.0 + 1e-9), "case {case}: {bound:?} {most}");
        }
        let (v, plain) = (layer.v.unwrap(), bounds.v.unwrap());
        for (head, bound) in v.iter().enumerate() {
            let m = center.m(head).map_or(vec![0.0; 16], |m| m.iter().map(|m| f64::from(*m)).collect());
            for _ in 0..100 {
                let token: Vec<f64> = (0..planted.spec.d_model).map(|_| StandardNormal.sample(&mut rng)).collect();
                let x = to_sphere(planted.spec.norm.kind, &token);
                let value = &forward_qkv(&specs[0], &weights, &x, 0.0).v[head];
                let most = value.iter().zip(&m).map(|(v, m)| (v - m).abs()).fold(0.0, f64::max);
                assert!(most <= bound.exact * (1.0 + 1e-9));
            }
            if case % 4 == 1 {
                assert!(bound.exact <= plain[head].exact, "the constant part never raises the bound");
            }
        }
    }
    assert!(attained > 40 && lower > 5, "{attained} {lower}");
}

/// The ranges over angles are those over the positions of a long sequence, and cover those of a short one.
#[test]
fn ranges_are_those_of_a_direct_scan() {
    let mut rng = StdRng::seed_from_u64(2);
    for case in 0..40 {
        let mut planted = random_layer(&mut rng);
        let layout = if case % 2 == 0 { RopeLayout::HalfSplit } else { RopeLayout::Interleaved };
        let rope = rope(12, layout, 1e4);
        planted.spec.layers[0].rope = Some(rope.clone());
        let n = [1, 3, 500, 20_000][case % 4];
        planted.spec.max_positions = Some(n);
        let (bounds, ranges) = ranges_of(&planted);
        let root = (planted.spec.d_model as f64).sqrt();
        for (head, range) in ranges.k.iter().enumerate() {
            let w = planted.effective(&planted.k[head]);
            let mut scan = vec![(f64::NEG_INFINITY, f64::NEG_INFINITY); 16];
            for t in 0..n {
                let mut at = |channel: usize, column: DVector<f64>, beta: f64| {
                    let a = root * column.norm();
                    scan[channel] = (scan[channel].0.max(a + beta), scan[channel].1.max(a - beta));
                };
                for ((a, b), angle) in rope.pairs().zip(rope.inv_freq.as_ref().unwrap()) {
                    let (sin, cos) = (t as f64 * angle).sin_cos();
                    let (ka, kb) = (range.constant[a], range.constant[b]);
                    at(a, w.column(a) * cos - w.column(b) * sin, cos * ka - sin * kb);
                    at(b, w.column(a) * sin + w.column(b) * cos, sin * ka + cos * kb);
                }
                (12..16).for_each(|c| at(c, w.column(c).into(), range.constant[c]));
            }
            for (i, (high, low)) in scan.into_iter().enumerate() {
                let size = bounds.k[head].exact;
                for (have, want) in [(range.high[i], high), (range.low[i], low)] {
                    assert!(have >= want - 1e-12 * size, "case {case} channel {i}: {have} under {want}");
                    // Few positions leave gaps between their angles.
                    let loose = if n == 20_000 {
                        1e-3
                    } else if n == 500 {
                        0.05
                    } else {
                        3.0
                    };
                    assert!(have <= want + loose * size, "case {case} channel {i}: {have} for {want}");
                }
            }
            let minimax: Vec<f32> = range.minimax().iter().map(|c| *c as f32).collect();
            assert!(range.bound(&minimax).exact <= bounds.k[head].exact * (1.0 + 1e-6));
            // No center has a lower bound than the least.
            for _ in 0..20 {
                let other: Vec<f32> = minimax.iter().map(|c| c + rng.random_range(-3.0..3.0)).collect();
                assert!(range.bound(&other).exact >= range.bound(&minimax).exact * (1.0 - 1e-6));
            }
        }
    }
}

/// Angles of each kind of rotation by its own formula, and the mean of the rotated bias by a sum over positions.
#[test]
fn the_center_of_every_rotation_is_a_sum_over_positions() {
    let (d, r, n) = (64, 16, 300);
    let plain = |w: f64| w;
    let pi = std::f64::consts::PI;
    let llama3 = |w: f64| {
        let turns = 100.0 * w / (2.0 * pi);
        if turns < 1.0 {
            w / 8.0
        } else if turns > 4.0 {
            w
        } else {
            let smooth = (turns - 1.0) / 3.0;
            (1.0 - smooth) * w / 8.0 + smooth * w
        }
    };
    type Scale<'a> = &'a dyn Fn(f64) -> f64;
    let cases: [(&str, serde_json::Value, usize, Scale<'_>, usize); 5] = [
        ("qwen2", json!({}), 16, &plain, 512),
        ("qwen2", json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}), 16, &|w| w / 4.0, 2048),
        ("qwen2", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}), 16, &plain, 2048),
        (
            "qwen2",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 100}}),
            16,
            &llama3,
            512,
        ),
        ("qwen2", json!({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}), 16, &plain, 512),
    ];
    for (family, extra, rotary, scale, positions) in cases {
        let mut config = json!({"model_type": family, "hidden_size": d, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0});
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let own = AttentionSpec::from_config_json(config.to_string().as_bytes(), "config.json".as_ref()).unwrap();
        assert_eq!(own.positions_of(&own.layers[0]), Some(positions), "{extra}");
        let mut planted = Planted::gaussian(own, 5).with_random_norm(6, NormKind::RmsNorm, true);
        (planted.shift, planted.spec.norm.shift) = (None, false);
        let (_, ranges) = ranges_of(&planted);
        let bias = planted.k_bias.as_ref().unwrap();
        for head in 0..2 {
            let have = ranges.rotary.as_ref().unwrap().mean(&ranges.k[head].constant, n);
            let mut want = vec![0.0; r];
            for pair in 0..rotary / 2 {
                let w = scale(10_000f64.powf(-2.0 * pair as f64 / rotary as f64));
                let (x, y) = (bias[head * r + pair], bias[head * r + pair + rotary / 2]);
                for t in 0..n {
                    let (sin, cos) = (t as f64 * w).sin_cos();
                    want[pair] += (x * cos - y * sin) / n as f64;
                    want[pair + rotary / 2] += (y * cos + x * sin) / n as f64;
                }
            }
            for (have, want) in have.iter().zip(&want) {
                assert!((have - want).abs() < 1e-12, "{extra}: {have} for {want}");
            }
        }
    }
}

/// Where the weights alone are not known to say what c does, |c| is added; and logits from rounded operands stay within their bound.
#[test]
fn bounds_of_logits_and_operands_hold_with_any_center() {
    use sigmascale::attention::{Attention, AttentionCall, AttentionShape, Cpu, Inputs, Precision};
    let mut rng = StdRng::seed_from_u64(4);
    for case in 0..60 {
        let mut planted = random_layer(&mut rng);
        planted.spec.layers[0].rope = Some(rope(16, RopeLayout::HalfSplit, 1e4));
        planted.spec.max_positions = Some(64);
        let geometry = planted.geometry();
        let spectrum = GramEngine.layer(&geometry).unwrap();
        let plain = LayerBounds::new(&planted.spec, &geometry, &spectrum, &Tail::default()).unwrap();
        let ranges = LayerRanges::new(&planted.spec, &geometry, &spectrum.k, &spectrum.v);
        let center = center_of(&mut rng, &ranges, case % 4);
        let exact = centered_bounds(&planted.spec, &plain, Some(&ranges), &center).unwrap();
        let added = centered_bounds(&planted.spec, &plain, None, &center).unwrap();
        for (exact, added) in
            exact.k.iter().chain(exact.v.as_ref().unwrap()).zip(added.k.iter().chain(added.v.as_ref().unwrap()))
        {
            assert!(exact.exact <= added.exact * (1.0 + 1e-9) && exact.rounded <= added.rounded * (1.0 + 1e-9));
        }
        let (n_q, n_kv, len) = (plain.heads.len(), plain.k.len(), 24);
        let shape =
            AttentionShape { batch: 1, n_q_heads: n_q, n_kv_heads: n_kv, len_q: len, len_k: len, d_head: 16, d_v: 16 };
        let (mut q, mut k, mut v) = (vec![], vec![], vec![]);
        for t in 0..len {
            let channel = rng.random_range(0..16);
            let sign = if rng.random() { 1.0 } else { -1.0 };
            let x = extreme(&planted.spec, &planted, 0, channel, t as f64, sign);
            let own = forward_qkv(&planted.spec, &planted.weights(), &x, t as f64);
            let narrow = |rows: &[Vec<f64>]| rows.concat().iter().map(|x| *x as f32).collect::<Vec<_>>();
            q.extend(narrow(&own.q));
            k.extend(narrow(&own.k));
            v.extend(narrow(&own.v));
        }
        for bounds in [&exact, &added] {
            let plan = ScalePlan::from_bounds(bounds, sigmascale::bound::BoundKind::WorstCase, 0.8, Granularity::Head)
                .unwrap();
            let call = AttentionCall { center: Some(&center), ..AttentionCall::causal(shape) };
            let precision = Precision { output: sigmascale::attention::Cast::E4m3, ..Precision::PAPER_LOGITS };
            let out = Cpu.forward(&call, &Inputs { q: &q, k: &k, v: &v }, &plan, &precision).unwrap();
            let casts = out.stats.q.iter().chain(&out.stats.k).chain(&out.stats.v).chain(&out.stats.o);
            assert!(casts.clone().all(|cast| cast.overflow == 0 && cast.count > 0), "case {case}: {casts:?}");
            for (head, logits) in out.stats.logits.iter().enumerate() {
                let bound = bounds.heads[head].rounded.unwrap();
                assert!(f64::from(logits.amax()) <= bound, "case {case}: {} over {bound}", logits.amax());
                assert_eq!(logits.overflow, 0);
            }
        }
    }
}

/// The rule of the default: rotated keys with a bias, and neither soft-cap nor sinks.
#[test]
fn layers_that_need_a_shift_have_no_center_by_default() {
    let mut planted = Planted::gaussian(spec(48, 16, 2, 1), 1).with_random_norm(2, NormKind::RmsNorm, true);
    (planted.shift, planted.spec.norm.shift) = (None, false);
    planted.spec.layers[0].rope = Some(rope(16, RopeLayout::HalfSplit, 1e6));
    planted.spec.max_positions = Some(128);
    planted.k_bias = Some((0..16).map(|i| if i % 4 == 3 { 40.0 } else { 0.5 }).collect());
    let of = |change: &dyn Fn(&mut AttentionSpec), policy: CenterPolicy| {
        let mut planted = planted.clone();
        change(&mut planted.spec);
        let (bounds, ranges) = ranges_of(&planted);
        let layer = CenteredLayer::new(&planted.spec, &bounds, &ranges, &policy).unwrap();
        (layer.center.k.is_some(), layer.center.v.is_some(), layer)
    };
    let both = CenterPolicy { v: CenterSource::Weights, ..CenterPolicy::CACHE };
    let (k, v, layer) = of(&|_| {}, CenterPolicy::CACHE);
    assert!(k && !v && layer.bias_share[0] > 0.5, "{layer:?}");
    assert!(layer.k[0].exact < 0.7 * ranges_of(&planted).1.k[0].plain().exact);
    assert_eq!((of(&|_| {}, both).0, of(&|_| {}, both).1), (true, true));
    let (k, v, _) = of(&|spec| spec.soft_cap = Some(30.0), both);
    assert!(!k && v);
    let (k, v, _) = of(&|spec| spec.layers[0].sinks = true, both);
    assert!(!k && !v);
    let (k, v, layer) = of(&|spec| spec.layers[0].rope = None, both);
    assert!(!k && v && layer.bias_share[0] == 0.0);
    // Angles that no one knows: every pair may be anywhere on its circle.
    let unknown = |spec: &mut AttentionSpec| spec.layers[0].rope.as_mut().unwrap().inv_freq = None;
    assert!(!of(&unknown, both).0);
    let minimax = CenterPolicy { k: CenterSource::Minimax, ..CenterPolicy::NONE };
    assert!(of(&|_| {}, minimax).2.k[0].exact <= of(&|_| {}, CenterPolicy::CACHE).2.k[0].exact * 1.01);
    assert!(CenterPolicy { follow: 2.0, ..both }.check().unwrap_err().is_argument());
    assert!(CenterPolicy { positions: 0, ..both }.check().unwrap_err().is_argument());
}
