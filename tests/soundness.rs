//! Attempts to break the bounds: every family's layout, random weights, tokens found by ascent, exact and rounded.

mod common;

use common::cases::{cases, draw};
use common::fixtures::write_checkpoint;
use common::forward::{
    Qkv, dot, forward_qkv, forward_qkv_at, last_factor, logit, norm_output, random_x_hat, to_sphere,
};
use common::planted::{Planted, rope, spec};
use float8::F8E4M3;
use half::bf16;
use nalgebra::{DMatrix, DVector};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::bound::{BoundKind, LayerBounds, Tail};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{
    AttentionSpec, Checkpoint, GainForm, LayerSpec, LayerWeights, NormKind, QkNormScope, RopeLayout, Temperature,
};
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::spectral::{GramEngine, SpectralEngine};

/// One side of a head as an affine map of x_hat, read off the independent forward: `y = a x_hat + c`, before rotation
/// and QK-norm.
struct Affine {
    a: DMatrix<f64>,
    c: DVector<f64>,
}

impl Affine {
    fn of(spec: &AttentionSpec, weights: &LayerWeights<'_>, side: impl Fn(&Qkv) -> &[f64]) -> Self {
        let mut plain = AttentionSpec { qk_norm: None, v_norm: false, ..spec.clone() };
        plain.layers.iter_mut().for_each(|layer| layer.rope = None);
        let d = spec.d_model;
        let at = |x: &[f64]| DVector::from_column_slice(side(&forward_qkv_at(&plain, weights, x, &[])));
        let c = at(&vec![0.0; d]);
        let columns: Vec<_> = (0..d)
            .map(|i| {
                let mut x = vec![0.0; d];
                x[i] = 1.0;
                at(&x) - &c
            })
            .collect();
        Self { a: DMatrix::from_columns(&columns), c }
    }

    /// The token on the sphere for which `direction . y` is largest.
    fn towards(&self, kind: NormKind, direction: &DVector<f64>) -> Vec<f64> {
        let gradient = self.a.tr_mul(direction);
        let x = to_sphere(kind, gradient.as_slice());
        if x.iter().all(|v| v.is_finite()) { x } else { vec![0.0; gradient.len()] }
    }

    /// A token whose y points along `direction`, as far as the map allows.
    fn onto(&self, kind: NormKind, direction: &DVector<f64>) -> Vec<f64> {
        let target = direction * 50.0 - &self.c;
        let x = self.a.clone().svd(true, true).solve(&target, 1e-9).unwrap();
        to_sphere(kind, x.as_slice())
    }
}

/// Where tokens live; anywhere without a norm, so that any length is as good as another.
fn sphere(spec: &AttentionSpec) -> NormKind {
    if spec.norm.kind == NormKind::None { NormKind::RmsNorm } else { spec.norm.kind }
}

fn turn(spec: &AttentionSpec, layer: usize, angles: &[f64], y: &DVector<f64>, sign: f64) -> DVector<f64> {
    let mut out = y.clone();
    if let Some(rope) = &spec.layers[layer].rope {
        for ((a, b), angle) in rope.pairs().zip(angles) {
            let (sin, cos) = (sign * angle).sin_cos();
            out[a] = rope.attention_factor * (y[a] * cos - y[b] * sin);
            out[b] = rope.attention_factor * (y[a] * sin + y[b] * cos);
        }
    }
    out
}

/// Tokens to try on a layer: random ones, and the ones that push single channels and single logits the furthest.
struct Attack<'a> {
    spec: &'a AttentionSpec,
    weights: &'a LayerWeights<'a>,
    rng: StdRng,
}

impl Attack<'_> {
    fn angles(&mut self) -> Vec<f64> {
        let pairs = self.spec.layers[self.weights.layer].rope.as_ref().map_or(0, |rope| rope.rotary_dim / 2);
        (0..pairs).map(|_| self.rng.random_range(0.0..std::f64::consts::TAU)).collect()
    }

    /// (query token, its angles, key token, its angles), head by head.
    fn logits(&mut self, head: usize) -> Vec<[(Vec<f64>, Vec<f64>); 2]> {
        let (spec, layer) = (self.spec, self.weights.layer);
        let kv = head / spec.layers[layer].group();
        let q = Affine::of(spec, self.weights, |out| &out.q[head]);
        let k = Affine::of(spec, self.weights, |out| &out.k[kv]);
        let kind = sphere(spec);
        let mut found = Vec::new();
        for _ in 0..6 {
            let (aq, ak) = (self.angles(), self.angles());
            let mut x = random_x_hat(spec, &mut self.rng);
            let mut y = random_x_hat(spec, &mut self.rng);
            found.push([(x.clone(), aq.clone()), (y.clone(), ak.clone())]);
            let sign = if self.rng.random() { 1.0 } else { -1.0 };
            for _ in 0..60 {
                // Each step maximises the logit over one token: exact for affine q and k.
                let key = turn(spec, layer, &ak, &(&k.a * DVector::from_column_slice(&y) + &k.c), 1.0);
                x = q.towards(kind, &(turn(spec, layer, &aq, &key, -1.0) * sign));
                let query = turn(spec, layer, &aq, &(&q.a * DVector::from_column_slice(&x) + &q.c), 1.0);
                y = k.towards(kind, &(turn(spec, layer, &ak, &query, -1.0) * sign));
            }
            found.push([(x, aq), (y, ak)]);
        }
        if spec.qk_norm_of(&spec.layers[layer]).is_some() {
            for c in 0..spec.layers[layer].d_head {
                let axis = DVector::from_fn(spec.layers[layer].d_head, |i, _| f64::from(i == c));
                let zero = vec![0.0; self.angles().len()];
                found.push([(q.onto(kind, &axis), zero.clone()), (k.onto(kind, &axis), zero)]);
            }
        }
        found
    }

    /// (token, angles) that push the channels of one head of q, k or v.
    fn operands(&mut self, side: impl Fn(&Qkv) -> &[f64] + Copy, rotated: bool) -> Vec<(Vec<f64>, Vec<f64>)> {
        let affine = Affine::of(self.spec, self.weights, side);
        let (kind, layer) = (sphere(self.spec), self.weights.layer);
        let mut found = vec![(random_x_hat(self.spec, &mut self.rng), self.angles())];
        let r = self.spec.layers[layer].d_head;
        for c in 0..r {
            for sign in [1.0, -1.0] {
                let axis = DVector::from_fn(r, |i, _| if i == c { sign } else { 0.0 });
                // Without rotation, and turned by an angle at which the pair's larger direction lands in the channel.
                let zero = vec![0.0; self.angles().len()];
                let tries = if rotated { 12 } else { 1 };
                for t in 0..tries {
                    let angles: Vec<f64> = zero.iter().map(|_| f64::from(t) * std::f64::consts::PI / 12.0).collect();
                    let direction = turn(self.spec, layer, &angles, &axis, -1.0);
                    found.push((affine.towards(kind, &direction), angles.clone()));
                    if self.spec.qk_norm_of(&self.spec.layers[layer]).is_some() {
                        found.push((affine.onto(kind, &direction), angles));
                    }
                }
            }
        }
        found
    }
}

fn bounds_of(spec: &AttentionSpec, weights: &LayerWeights<'_>) -> (LayerBounds, ScalePlan) {
    let geometry = LayerGeometry::new(spec, weights.clone()).unwrap();
    let spectrum = GramEngine.layer(&geometry).unwrap();
    let bounds = LayerBounds::new(spec, &geometry, &spectrum, &Tail::default()).unwrap();
    let plan = ScalePlan::from_bounds(&bounds, BoundKind::WorstCase, 0.8, Granularity::Head).unwrap();
    (bounds, plan)
}

fn amax(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m, v| v.abs().max(m))
}

/// Runs `check` once for each attention that a layer of some family has. Families that differ in names and layouts of tensors
/// alone, as many do, have one: `families.rs` compares what is read of each with its raw tensors.
fn every_attention(mut check: impl FnMut(&AttentionSpec, &LayerWeights<'_>, &str)) {
    let mut seen = Vec::new();
    for (number, case) in cases().iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &case.config, &draw(case, 900 + number as u64), case.dtype, case.shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let spec = checkpoint.spec();
        for layer in [0, spec.layers.len() - 1] {
            let own = LayerSpec { number: 0, ..spec.layers[layer].clone() };
            let (name, family, prefix) = Default::default();
            let attention = (case.dtype, AttentionSpec { name, family, prefix, layers: vec![own], ..spec.clone() });
            if seen.contains(&attention) {
                continue;
            }
            seen.push(attention);
            let label = format!("{} ({}) layer {layer}", case.name, case.kind);
            check(spec, &checkpoint.layer(layer).unwrap(), &label);
        }
    }
    assert!(seen.len() > 40, "{}", seen.len());
}

#[test]
fn no_token_passes_an_exact_bound() {
    let mut tightest: f64 = 0.0;
    every_attention(|spec, weights, label| {
        let own = &spec.layers[weights.layer];
        let (bounds, _) = bounds_of(spec, weights);
        let mut attack = Attack { spec, weights, rng: StdRng::seed_from_u64(7) };
        for head in 0..own.n_q_heads {
            let bound = bounds.heads[head].exact.unwrap();
            for [(x, ax), (y, ay)] in attack.logits(head) {
                let query = forward_qkv_at(spec, weights, &x, &ax);
                let key = forward_qkv_at(spec, weights, &y, &ay);
                let logit = logit(spec, weights.layer, head, &query, &key).abs();
                assert!(logit <= bound * (1.0 + 1e-9), "{label} head {head}: {logit} past {bound}");
                if spec.soft_cap.is_none() {
                    tightest = tightest.max(logit / bound);
                }
            }
        }
        for kv in 0..own.n_kv_heads {
            for head in (0..own.n_q_heads).filter(|h| h / own.group() == kv) {
                for (x, angles) in attack.operands(|out| &out.q[head], true) {
                    let got = amax(&forward_qkv_at(spec, weights, &x, &angles).q[head]);
                    let bound = bounds.q[head].exact;
                    assert!(got <= bound * (1.0 + 1e-9), "{label} q head {head}: {got} past {bound}");
                }
            }
            for (x, angles) in attack.operands(|out| &out.k[kv], true) {
                let got = amax(&forward_qkv_at(spec, weights, &x, &angles).k[kv]);
                let bound = bounds.k[kv].exact;
                assert!(got <= bound * (1.0 + 1e-9), "{label} k head {kv}: {got} past {bound}");
            }
            let Some(v) = &bounds.v else {
                assert_eq!(spec.norm.kind, NormKind::None, "{label}");
                continue;
            };
            let (mut reached, angles) = (0.0f64, attack.angles());
            for (x, _) in attack.operands(|out| &out.v[kv], false) {
                let got = amax(&forward_qkv_at(spec, weights, &x, &angles).v[kv]);
                assert!(got <= v[kv].exact * (1.0 + 1e-9), "{label} v head {kv}: {got} past {}", v[kv].exact);
                reached = reached.max(got / v[kv].exact);
            }
            assert!(reached > 0.999, "{label} v head {kv}: the bound is attained, reached {reached}");
        }
    });
    assert!(tightest > 0.99, "the attack is too weak to mean anything: {tightest}");
}

/// BF16 forward as frameworks run it: norm output, projection, QK-norm and every step of the rotation rounded.
fn forward_bf16(spec: &AttentionSpec, weights: &LayerWeights<'_>, x_hat: &[f64], angles: &[f64]) -> Qkv {
    let round = |x: f64| bf16::from_f64(x).to_f64();
    let rounded: Vec<f64> = x_hat.iter().map(|x| round(*x)).collect();
    let x: Vec<f64> = norm_output(spec, weights, &rounded).into_iter().map(round).collect();
    let project = |side: &sigmascale::model::Projection<'_>| -> Vec<Vec<f64>> {
        side.heads
            .iter()
            .enumerate()
            .map(|(h, head)| {
                let (r, d) = head.shape();
                let mut row = vec![0.0; d];
                (0..r)
                    .map(|c| {
                        head.read_block(c..c + 1, 0..d, &mut row);
                        round(dot(&row, &x) + side.bias.as_ref().map_or(0.0, |b| b[h * r + c]))
                    })
                    .collect()
            })
            .collect()
    };
    let normalise = |heads: Vec<Vec<f64>>, vectors: &Option<sigmascale::model::NormVectors>| -> Vec<Vec<f64>> {
        let Some(norm) = &spec.qk_norm_of(&spec.layers[weights.layer]) else { return heads };
        let r = spec.layers[weights.layer].d_head;
        let hats: Vec<Vec<f64>> = match norm.scope {
            QkNormScope::Joint => to_sphere(norm.kind, &heads.concat()).chunks(r).map(<[f64]>::to_vec).collect(),
            QkNormScope::PerHead => heads.iter().map(|head| to_sphere(norm.kind, head)).collect(),
        };
        hats.iter()
            .enumerate()
            .map(|(h, hat)| {
                (0..r)
                    .map(|c| {
                        let Some(vectors) = vectors else { return round(hat[c]) };
                        let at = if vectors.gain.len() == r { c } else { h * r + c };
                        let g = if norm.gain == GainForm::OnePlus { 1.0 + vectors.gain[at] } else { vectors.gain[at] };
                        round(g * round(hat[c]) + vectors.shift.as_ref().map_or(0.0, |s| s[at]))
                    })
                    .collect()
            })
            .collect()
    };
    let rotate = |heads: Vec<Vec<f64>>| -> Vec<Vec<f64>> {
        let Some(rope) = &spec.layers[weights.layer].rope else { return heads };
        heads
            .into_iter()
            .map(|mut y| {
                for ((a, b), angle) in rope.pairs().zip(angles) {
                    let (sin, cos) = angle.sin_cos();
                    let (sin, cos) = (round(rope.attention_factor * sin), round(rope.attention_factor * cos));
                    let (x, z) = (y[a], y[b]);
                    y[a] = round(round(x * cos) - round(z * sin));
                    y[b] = round(round(z * cos) + round(x * sin));
                }
                y
            })
            .collect()
    };
    let finish =
        |heads, vectors| match spec.qk_norm_of(&spec.layers[weights.layer]).is_some_and(|norm| norm.behind_rotation) {
            true => normalise(rotate(heads), vectors),
            false => rotate(normalise(heads, vectors)),
        };
    let factor = last_factor(spec, weights);
    let grow = |head: Vec<f64>| -> Vec<f64> {
        if factor == 1.0 { head } else { head.into_iter().map(|y| round(y * round(factor))).collect() }
    };
    Qkv {
        q: finish(project(&weights.q), &weights.q_norm).into_iter().map(grow).collect(),
        k: finish(project(&weights.k), &weights.k_norm),
        v: match (project(&weights.v), spec.v_norm) {
            (heads, false) => heads,
            (heads, true) => {
                let norm = |head: Vec<f64>| to_sphere(NormKind::RmsNorm, &head).into_iter().map(round).collect();
                heads.into_iter().map(norm).collect()
            }
        },
    }
}

#[test]
fn no_rounded_token_overflows_or_passes_the_rounded_bound() {
    let mut closest: f64 = 0.0;
    every_attention(|spec, weights, label| {
        let own = &spec.layers[weights.layer];
        let (bounds, plan) = bounds_of(spec, weights);
        let mut attack = Attack { spec, weights, rng: StdRng::seed_from_u64(11) };
        let cast = |values: &[f64], descale: f64| -> Vec<f64> {
            values.iter().map(|v| F8E4M3::from_f64(v / descale).to_f64() * descale).collect()
        };
        let mut fits = |values: &[f64], descale: f64, what: &str| {
            let scaled = amax(values) / descale;
            assert!(scaled <= 448.0, "{label} {what}: {scaled}");
            closest = closest.max(scaled);
        };
        for head in 0..own.n_q_heads {
            let kv = head / own.group();
            let (dq, dk) = (f64::from(plan.operands.q[kv].get()), f64::from(plan.operands.k[kv].get()));
            let bound = bounds.heads[head].rounded.unwrap();
            for [(x, ax), (y, ay)] in attack.logits(head) {
                let query = forward_bf16(spec, weights, &x, &ax);
                let key = forward_bf16(spec, weights, &y, &ay);
                fits(&query.q[head], dq, "q");
                fits(&key.k[kv], dk, "k");
                let raw = dot(&cast(&query.q[head], dq), &cast(&key.k[kv], dk)) * own.softmax_scale;
                let logit = spec.soft_cap.map_or(raw, |cap| cap * (raw / cap).tanh()).abs();
                assert!(logit <= bound, "{label} head {head}: {logit} past {bound}");
            }
        }
        for kv in 0..own.n_kv_heads {
            for (x, angles) in attack.operands(|out| &out.k[kv], true) {
                let descale = f64::from(plan.operands.k[kv].get());
                fits(&forward_bf16(spec, weights, &x, &angles).k[kv], descale, "k");
            }
            if let Some(v) = &plan.operands.v {
                let angles = attack.angles();
                for (x, _) in attack.operands(|out| &out.v[kv], false) {
                    fits(&forward_bf16(spec, weights, &x, &angles).v[kv], f64::from(v[kv].get()), "v");
                }
            }
        }
    });
    // The rounding share is 1/32: an attack that comes this close would have passed the exact bound's descale.
    assert!(closest > 430.0, "{closest}");
}

/// A planted head attains its exact bound: nothing is given away without rotation.
#[test]
fn the_exact_bound_is_attained() {
    for (kind, constants) in [
        (NormKind::RmsNorm, false),
        (NormKind::LayerNorm, false),
        (NormKind::RmsNorm, true),
        (NormKind::LayerNorm, true),
    ] {
        let (d, r) = (96, 16);
        let mut planted = Planted::gaussian(spec(d, r, 1, 1), 21).with_random_norm(21, kind, false);
        if constants {
            // Constants along the top singular directions of the product, where every term adds up.
            let (q, k) = (planted.effective(&planted.q[0]), planted.effective(&planted.k[0]));
            let svd = (&q * k.transpose()).svd(true, true);
            let top = svd.singular_values.imax();
            let u = svd.u.unwrap().column(top) * (d as f64).sqrt();
            let v = svd.v_t.unwrap().row(top).transpose() * (d as f64).sqrt();
            planted.q_bias = Some((q.tr_mul(&u)).iter().copied().collect());
            planted.k_bias = Some((k.tr_mul(&v)).iter().copied().collect());
        }
        let geometry = planted.geometry();
        let spectrum = GramEngine.layer(&geometry).unwrap();
        let bound =
            LayerBounds::new(&planted.spec, &geometry, &spectrum, &Tail::default()).unwrap().heads[0].exact.unwrap();
        let weights = planted.weights();
        let mut attack = Attack { spec: &planted.spec, weights: &weights, rng: StdRng::seed_from_u64(1) };
        let reached = attack
            .logits(0)
            .iter()
            .map(|[(x, ax), (y, ay)]| {
                let query = forward_qkv_at(&planted.spec, &weights, x, ax);
                let key = forward_qkv_at(&planted.spec, &weights, y, ay);
                logit(&planted.spec, 0, 0, &query, &key).abs()
            })
            .fold(0.0, f64::max);
        assert!(
            reached > 0.99 * bound && reached <= bound * (1.0 + 1e-9),
            "{kind:?} {constants}: {reached} of {bound}"
        );
    }
}

/// Queries that grow are cast as the model hands them over, the factor applied: their descale covers every position that the
/// config has, the last one to the hair, and none beyond it.
#[test]
fn grown_queries_fill_their_descale_at_the_last_position() {
    let (d, r) = (64, 16);
    for turned in [false, true] {
        let mut spec = spec(d, r, 2, 1);
        let temperature = Temperature { strength: 0.5, period: 8, shift: 1, positions: 41 };
        spec.layers[0].temperature = Some(temperature);
        spec.layers[0].rope = turned.then(|| rope(r, RopeLayout::HalfSplit, 1e4));
        let planted = Planted::gaussian(spec, 5);
        let weights = planted.weights();
        let (bounds, plan) = bounds_of(&planted.spec, &weights);
        let exact = bounds.q.iter().map(|bound| bound.exact).fold(0.0, f64::max);
        let descale = f64::from(plan.operands.q[0].get());
        // Towards each channel of each head, at a position: rotations of the pair are tried by position alone.
        let reach = |position: usize| -> f64 {
            let mut most: f64 = 0.0;
            for head in 0..2 {
                for channel in 0..r {
                    let at = |x: &[f64]| forward_qkv(&planted.spec, &weights, x, position as f64).q[head][channel];
                    let unit = |i: usize| -> Vec<f64> { (0..d).map(|j| f64::from(u8::from(i == j))).collect() };
                    let gradient: Vec<f64> = (0..d).map(|i| at(&unit(i))).collect();
                    most = most.max(at(&to_sphere(NormKind::RmsNorm, &gradient)));
                }
            }
            most
        };
        let last = temperature.positions - 1;
        let (first, last, beyond) = (reach(0), reach(last), reach(last + 100 * temperature.period));
        assert!(first < 0.6 * exact, "{turned}: {first} of {exact}");
        // A pair's norm is reached at one angle; positions have their own.
        let near = if turned { 0.8 } else { 1.0 - 1e-9 };
        assert!((near..=1.0 + 1e-12).contains(&(last / exact)), "{turned}: {last} of {exact}");
        assert!(last / descale <= 448.0 && beyond / descale > 448.0, "{turned}: {last}, {beyond} by {descale}");
    }
}

/// Without the A term of math 5 a LayerNorm token reaches several times the bound: a channel that is nearly constant over
/// the model dimension vanishes in exact arithmetic and not in BF16.
#[test]
fn rounding_needs_its_own_term_behind_layer_norm() {
    let d = 512;
    let mut planted = Planted::gaussian(spec(d, 16, 1, 1), 2).with_random_norm(2, NormKind::LayerNorm, false);
    planted.gain = Some(vec![1.0; d]);
    let small = &planted.v[0] * 1e-3;
    planted.v[0] = small.add_scalar(1.0);
    let weights = planted.weights();
    let (bounds, plan) = bounds_of(&planted.spec, &weights);
    let v = bounds.v.as_ref().unwrap()[0];
    let descale = f64::from(plan.operands.v.as_ref().unwrap()[0].get());
    // A token all of whose roundings go up: positive entries just above, negative ones just below the middle between
    // two BF16 values; two free entries restore mean and length.
    let ulp = 2f64.powi(-8);
    let mut x: Vec<f64> =
        (0..d).map(|i| if i % 2 == 0 { 253.0 * ulp + 0.51 * ulp } else { -(253.0 * ulp + 0.49 * ulp) }).collect();
    let (sum, square) = x[2..].iter().fold((0.0, 0.0), |(sum, square), v| (sum + v, square + v * v));
    let half = -0.5 * sum;
    let offset = (0.5 * (d as f64 - square) - half * half).sqrt();
    (x[0], x[1]) = (half + offset, half - offset);
    let worst = amax(&forward_bf16(&planted.spec, &weights, &to_sphere(NormKind::LayerNorm, &x), &[]).v[0]);
    assert!(worst > 9.0 * v.exact, "rounding passes the exact bound: {worst} {}", v.exact);
    assert!(worst <= 448.0 * descale, "{worst} {}", 448.0 * descale);
}

/// Real text behind RoPE passes the unrotated worst case; a planted head shows it, and ours holds.
#[test]
fn rope_passes_the_papers_worst_case() {
    for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
        let (d, r) = (64, 16);
        let mut planted = Planted::gaussian(spec(d, r, 1, 1), 9);
        let (a, b) = match layout {
            RopeLayout::HalfSplit => (0, 8),
            RopeLayout::Interleaved => (0, 1),
        };
        for (side, channel) in [(&mut planted.q[0], a), (&mut planted.k[0], b)] {
            side.scale_mut(0.01);
            side[(3, channel)] += 1.0;
        }
        planted.spec.layers[0].rope = Some(rope(r, layout, 1e4));
        let weights = planted.weights();
        let (bounds, _) = bounds_of(&planted.spec, &weights);
        let paper = {
            let sigma = common::planted::dense_norm(&planted.q[0], &planted.k[0]);
            planted.spec.layers[0].softmax_scale * d as f64 * sigma
        };
        let x = to_sphere(NormKind::RmsNorm, &(0..d).map(|i| if i == 3 { 1.0 } else { 1e-3 }).collect::<Vec<_>>());
        let largest = (0..64)
            .map(|n| {
                let at = |m: f64| common::forward::forward_qkv(&planted.spec, &weights, &x, m);
                logit(&planted.spec, 0, 0, &at(0.0), &at(f64::from(n))).abs()
            })
            .fold(0.0, f64::max);
        assert!(largest > 2.0 * paper, "{layout:?}: {largest} {paper}");
        assert!(largest <= bounds.heads[0].exact.unwrap());
    }
}
