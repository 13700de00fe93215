//! Centers: where the simple forms hold, where they do not, what a kernel has to add there, and centers that are far off.

use super::random_tests::random_center;
use super::*;
use crate::plan::Center;
use rand::RngExt;

const D: usize = 16;
const TAU: f64 = 0.25;

/// One KV head with two query heads, in f64, and a center far from zero.
struct Case {
    shape: AttentionShape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    center: Center,
}

impl Case {
    fn new(seed: u64) -> Self {
        let shape = shape(2, 1, 24, 24, D);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| StandardNormal.sample(&mut rng)).collect() };
        let (q, k, v) = (draw(shape.q_elements()), draw(shape.k_elements()), draw(shape.v_elements()));
        let (c, m) = (draw(D).iter().map(|x| 3.0 * x).collect(), draw(D).iter().map(|x| 2.0 + x).collect());
        Self { shape, q, k, v, center: Center::new(0, Some(vec![c]), Some(vec![m])).unwrap() }
    }

    fn call(&self) -> AttentionCall<'static> {
        AttentionCall { softmax_scale: TAU, ..AttentionCall::causal(self.shape) }
    }

    fn c(&self) -> Vec<f64> {
        wide(self.center.c(0).unwrap())
    }

    fn m(&self) -> Vec<f64> {
        wide(self.center.m(0).unwrap())
    }

    /// tau q . c of the row that has this place in the log-sum-exp.
    fn offset(&self, lse_at: usize, c: &[f64]) -> f64 {
        let (head, row) = (lse_at / self.shape.len_q, lse_at % self.shape.len_q);
        TAU * dot(&self.q[self.shape.q_at(row, head)..][..D], c)
    }

    fn run(&self, call: &AttentionCall<'_>, k: &[f64], v: &[f64]) -> ReferenceOutput {
        reference(call, &self.q, k, v).unwrap()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Every row of `x` plus `factor` times a vector.
fn shifted(x: &[f64], factor: f64, by: &[f64]) -> Vec<f64> {
    x.iter().enumerate().map(|(i, x)| x + factor * by[i % by.len()]).collect()
}

fn largest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn the_output_needs_m_and_the_log_sum_exp_its_shift() {
    let case = Case::new(1);
    let (k, v) = (shifted(&case.k, -1.0, &case.c()), shifted(&case.v, -1.0, &case.m()));
    let (want, have) = (case.run(&case.call(), &case.k, &case.v), case.run(&case.call(), &k, &v));
    assert!(largest(&shifted(&have.out, 1.0, &case.m()), &want.out) < 1e-12);
    let lse: Vec<f64> = have.lse.iter().enumerate().map(|(i, lse)| lse + case.offset(i, &case.c())).collect();
    assert!(largest(&lse, &want.lse) < 1e-12);
    assert!(largest(&have.lse, &want.lse) > 1.0, "alone it is off by the shift");
}

#[test]
fn a_soft_cap_sees_the_shift_of_keys_but_not_that_of_values() {
    let case = Case::new(2);
    let call = AttentionCall { soft_cap: Some(2.0), ..case.call() };
    let (k, v) = (shifted(&case.k, -1.0, &case.c()), shifted(&case.v, -1.0, &case.m()));
    let want = case.run(&call, &case.k, &case.v);
    assert!(largest(&case.run(&call, &k, &case.v).out, &want.out) > 0.1, "without the shift");
    assert!(largest(&shifted(&case.run(&call, &case.k, &v).out, 1.0, &case.m()), &want.out) < 1e-12, "values alone");
    let centered = AttentionCall { center: Some(&case.center), ..call };
    assert!(largest(&case.run(&centered, &case.k, &case.v).out, &want.out) < 1e-12);
}

#[test]
fn a_sink_is_compared_with_shifted_logits_and_takes_its_share_of_m() {
    let case = Case::new(3);
    let sinks = [1.0, -0.5];
    let call = AttentionCall { sinks: Some(&sinks), ..case.call() };
    let (k, v) = (shifted(&case.k, -1.0, &case.c()), shifted(&case.v, -1.0, &case.m()));
    let want = case.run(&call, &case.k, &case.v);
    assert!(largest(&case.run(&call, &k, &case.v).out, &want.out) > 0.1, "the same sink");
    let all_of_m = shifted(&case.run(&call, &case.k, &v).out, 1.0, &case.m());
    assert!(largest(&all_of_m, &want.out) > 0.1, "m without the sink's share");
    let centered = AttentionCall { center: Some(&case.center), ..call };
    assert!(largest(&case.run(&centered, &case.k, &case.v).out, &want.out) < 1e-12);
    // A kernel without sinks: O = sigmoid(LSE' + tau q . c - sink) (O' + m).
    let own = case.run(&case.call(), &k, &v);
    let mut out = shifted(&own.out, 1.0, &case.m());
    for (i, lse) in own.lse.iter().enumerate() {
        let (head, row) = (i / case.shape.len_q, i % case.shape.len_q);
        let logit = lse + case.offset(i, &case.c()) - sinks[head];
        let at = case.shape.out_at(row, head);
        out[at..at + D].iter_mut().for_each(|o| *o /= 1.0 + (-logit).exp());
    }
    assert!(largest(&out, &want.out) < 1e-12);
}

/// The softmax with a one in its denominator is a sink of 0, and a row (-c, -m) of the cache.
#[test]
fn a_sink_of_zero_is_a_row_of_the_cache() {
    let case = Case::new(4);
    let want = case.run(&AttentionCall { sinks: Some(&[0.0, 0.0]), ..case.call() }, &case.k, &case.v);
    let with_row = |x: &[f64], center: &[f64]| [center.iter().map(|c| -c).collect(), shifted(x, -1.0, center)].concat();
    let shape = AttentionShape { len_k: case.shape.len_k + 1, ..case.shape };
    let call = AttentionCall { shape, ..case.call() };
    let have = case.run(&call, &with_row(&case.k, &case.c()), &with_row(&case.v, &case.m()));
    assert!(largest(&shifted(&have.out, 1.0, &case.m()), &want.out) < 1e-12);
}

#[test]
fn rows_without_keys_get_no_m() {
    let case = Case::new(5);
    let shape = AttentionShape { len_k: 4, ..case.shape };
    let (k, v) = (&case.k[..shape.k_elements()], &case.v[..shape.v_elements()]);
    // Without a plan's casts, so that the tiled path shows it too.
    let [q32, k32, v32] = [&case.q[..], k, v].map(|x| x.iter().map(|x| *x as f32).collect::<Vec<_>>());
    for sinks in [None, Some(&[0.5, 0.5][..])] {
        let plain = AttentionCall { shape, sinks, ..case.call() };
        let call = AttentionCall { center: Some(&case.center), ..plain };
        let (have, want) = (reference(&call, &case.q, k, v).unwrap(), reference(&plain, &case.q, k, v).unwrap());
        let empty = AttentionShape::out_at(&shape, 0, 0);
        assert!(have.out[empty..empty + D].iter().all(|o| *o == 0.0), "{:?}", &have.out[..D]);
        assert!(largest(&have.out, &want.out) < 1e-12);
        let data = Data { q: q32.clone(), k: k32.clone(), v: v32.clone() };
        let tiled = Cpu.forward(&call, &data.inputs(), &data.plan(&call), &Precision::F32).unwrap();
        assert!(tiled.out[empty..empty + D].iter().all(|o| *o == 0.0));
        assert!(largest(&wide(&tiled.out), &want.out) < 1e-4);
        for (have, want) in tiled.lse.iter().zip(&want.lse) {
            assert!(f64::from(*have) == *want || (f64::from(*have) - want).abs() < 1e-4, "{have} {want}");
        }
    }
}

fn merge(case: &Case, parts: &[(Vec<f64>, Vec<f64>)]) -> (Vec<f64>, Vec<f64>) {
    let rows = case.shape.lse_elements();
    let total: Vec<f64> = (0..rows)
        .map(|i| {
            let max = parts.iter().map(|(_, lse)| lse[i]).fold(f64::NEG_INFINITY, f64::max);
            max + parts.iter().map(|(_, lse)| (lse[i] - max).exp()).sum::<f64>().ln()
        })
        .collect();
    let mut out = vec![0.0; case.shape.out_elements()];
    for (part, lse) in parts {
        for i in 0..rows {
            let at = case.shape.out_at(i % case.shape.len_q, i / case.shape.len_q);
            let share = (lse[i] - total[i]).exp();
            out[at..at + D].iter_mut().zip(&part[at..]).for_each(|(o, x)| *o += share * x);
        }
    }
    (out, total)
}

/// Split keys, rings and cascades: parts with one center merge as they are; with centers of their own they are made plain first.
#[test]
fn parts_with_one_center_merge_as_they_are() {
    let case = Case::new(6);
    let full = AttentionCall { mask: Mask::NONE, ..case.call() };
    let want = case.run(&full, &case.k, &case.v);
    let mut rng = StdRng::seed_from_u64(60);
    let own: Vec<(Vec<f64>, Vec<f64>)> = (0..3)
        .map(|_| {
            let mut draw = || -> Vec<f64> { (0..D).map(|_| StandardNormal.sample(&mut rng)).collect() };
            (draw(), draw())
        })
        .collect();
    let part = |j: usize, c: &[f64], m: &[f64]| {
        let shape = AttentionShape { len_k: 8, ..case.shape };
        let rows = j * 8 * D..(j + 1) * 8 * D;
        let (k, v) = (shifted(&case.k[rows.clone()], -1.0, c), shifted(&case.v[rows], -1.0, m));
        let out = case.run(&AttentionCall { shape, ..full }, &k, &v);
        (out.out, out.lse)
    };
    let with_offset = |lse: &[f64], c: &[f64]| -> Vec<f64> {
        lse.iter().enumerate().map(|(i, lse)| lse + case.offset(i, c)).collect()
    };
    let (out, lse) = merge(&case, &[0, 1, 2].map(|j| part(j, &case.c(), &case.m())));
    assert!(largest(&shifted(&out, 1.0, &case.m()), &want.out) < 1e-12);
    assert!(largest(&with_offset(&lse, &case.c()), &want.lse) < 1e-12);
    let parts = [0, 1, 2].map(|j| (j, part(j, &own[j].0, &own[j].1)));
    let uncorrected = parts.clone().map(|(j, (out, lse))| (shifted(&out, 1.0, &own[j].1), lse));
    assert!(largest(&merge(&case, &uncorrected).0, &want.out) > 0.1, "centers of their own, merged as they are");
    let corrected = parts.map(|(j, (out, lse))| (shifted(&out, 1.0, &own[j].1), with_offset(&lse, &own[j].0)));
    let (out, lse) = merge(&case, &corrected);
    assert!(largest(&out, &want.out) < 1e-12 && largest(&lse, &want.lse) < 1e-12);
}

#[test]
fn a_center_is_one_for_all_keys_of_a_row_and_none_of_the_query() {
    let case = Case::new(7);
    let full = AttentionCall { mask: Mask::NONE, ..case.call() };
    let want = case.run(&full, &case.k, &case.v).out;
    // A center for each block of 8 keys: their logits lose different shifts.
    let blocks: Vec<f64> =
        case.k.iter().enumerate().map(|(i, k)| k - case.c()[i % D] * (1.0 + (i / (8 * D)) as f64)).collect();
    assert!(largest(&case.run(&full, &blocks, &case.v).out, &want) > 0.1);
    // A query that loses a constant loses tau a . k_j, a number per key.
    let q = shifted(&case.q, -1.0, &case.c());
    assert!(largest(&reference(&full, &q, &case.k, &case.v).unwrap().out, &want) > 0.1);
    // A layer that reads a cache takes the center that it was written with: another in one half is wrong.
    let other: Vec<f64> = case.c().iter().map(|c| 1.5 * c).collect();
    let half = case.k.len() / 2;
    let mixed = [shifted(&case.k[..half], -1.0, &case.c()), shifted(&case.k[half..], -1.0, &other)].concat();
    assert!(largest(&case.run(&full, &mixed, &case.v).out, &want) > 0.1);
    // A scale per channel multiplies the query.
    let scale: Vec<f64> = (0..D).map(|c| 0.1 + c as f64 / 7.0).collect();
    let k: Vec<f64> = shifted(&case.k, -1.0, &case.c()).iter().enumerate().map(|(i, k)| k / scale[i % D]).collect();
    let q: Vec<f64> = case.q.iter().enumerate().map(|(i, q)| q * scale[i % D]).collect();
    assert!(largest(&reference(&full, &q, &k, &case.v).unwrap().out, &want) < 1e-12);
}

#[test]
fn a_center_comes_after_norm_and_rotation() {
    let case = Case::new(8);
    let norm = |x: &[f64]| -> Vec<f64> {
        let rows = x.chunks(D).flat_map(|row| {
            let size = (dot(row, row) / D as f64).sqrt();
            row.iter().map(move |x| x / size)
        });
        rows.collect()
    };
    let turn = |x: &[f64]| -> Vec<f64> {
        let mut out = x.to_vec();
        for (row, x) in out.chunks_mut(D).enumerate() {
            for pair in 0..D / 2 {
                let (sin, cos) = (row as f64 * 0.7f64.powi(pair as i32)).sin_cos();
                let (a, b) = (x[pair], x[pair + D / 2]);
                (x[pair], x[pair + D / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        out
    };
    let k = shifted(&case.k, 1.0, &[1.0; D]);
    let want = case.run(&case.call(), &turn(&norm(&k)), &case.v).out;
    let after = shifted(&turn(&norm(&k)), -1.0, &case.c());
    assert!(largest(&case.run(&case.call(), &after, &case.v).out, &want) < 1e-12);
    let before_norm = turn(&norm(&shifted(&k, -1.0, &[1.0; D])));
    assert!(largest(&case.run(&case.call(), &before_norm, &case.v).out, &want) > 0.1);
    let before_turn = turn(&shifted(&norm(&k), -1.0, &case.c()));
    assert!(largest(&case.run(&case.call(), &before_turn, &case.v).out, &want) > 0.1);
}

/// Absorbed latent attention: rows [latent - A, k_pe - B] whose first part is also the value; W_UV sees A again.
#[test]
fn latent_attention_has_one_center_per_row() {
    let (heads, rank, nope, pe, len) = (4, 24, 16, 8, 20);
    let mut rng = StdRng::seed_from_u64(9);
    let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| StandardNormal.sample(&mut rng)).collect() };
    let (latent, k_pe) = (shifted(&draw(len * rank), 2.0, &draw(rank)), draw(len * pe));
    let (up_k, up_v) = (draw(heads * nope * rank), draw(heads * nope * rank));
    let (q_nope, q_pe) = (draw(len * heads * nope), draw(len * heads * pe));
    let scale = ((nope + pe) as f64).sqrt().recip();
    let up = |w: &[f64], head: usize, x: &[f64]| -> Vec<f64> {
        w[head * nope * rank..][..nope * rank].chunks(rank).map(|row| dot(row, x)).collect()
    };
    let rows = |width: usize, of: &dyn Fn(usize, usize) -> Vec<f64>| -> Vec<f64> {
        let all = (0..len).flat_map(|t| (0..heads).flat_map(move |h| of(t, h)));
        let all: Vec<f64> = all.collect();
        assert_eq!(all.len(), len * heads * width);
        all
    };
    // Expanded: a key and a value of each head.
    let expanded = |latent: &[f64], k_pe: &[f64]| {
        let of = |t: usize| (&latent[t * rank..][..rank], &k_pe[t * pe..][..pe]);
        let k = rows(nope + pe, &|t, h| [up(&up_k, h, of(t).0), of(t).1.to_vec()].concat());
        let v = rows(nope, &|t, h| up(&up_v, h, of(t).0));
        let q = rows(nope + pe, &|t, h| {
            let at = t * heads + h;
            [&q_nope[at * nope..][..nope], &q_pe[at * pe..][..pe]].concat()
        });
        let shape = AttentionShape {
            batch: 1,
            n_q_heads: heads,
            n_kv_heads: heads,
            len_q: len,
            len_k: len,
            d_head: nope + pe,
            d_v: nope,
        };
        let call = AttentionCall { softmax_scale: scale, ..AttentionCall::causal(shape) };
        reference(&call, &q, &k, &v).unwrap().out
    };
    let want = expanded(&latent, &k_pe);
    // Absorbed: the query goes through K's weights, and all heads share a row.
    let q = rows(rank + pe, &|t, h| {
        let at = t * heads + h;
        let own = &q_nope[at * nope..][..nope];
        let w = &up_k[h * nope * rank..][..nope * rank];
        let absorbed = (0..rank).map(|i| own.iter().enumerate().map(|(j, q)| q * w[j * rank + i]).sum::<f64>());
        absorbed.chain(q_pe[at * pe..][..pe].iter().copied()).collect()
    });
    let k: Vec<f64> = latent.chunks(rank).zip(k_pe.chunks(pe)).flat_map(|(l, p)| [l, p].concat()).collect();
    let mut vector = |n: usize| -> Vec<f64> { (0..n).map(|_| f64::from(rng.random_range(-40..40)) / 8.0).collect() };
    let (a, b) = (vector(rank), vector(pe));
    let center = Center::new(0, Some(vec![[a.clone(), b.clone()].concat()]), Some(vec![a.clone()])).unwrap();
    let shape = AttentionShape {
        batch: 1,
        n_q_heads: heads,
        n_kv_heads: 1,
        len_q: len,
        len_k: len,
        d_head: rank + pe,
        d_v: rank,
    };
    let call = AttentionCall { softmax_scale: scale, center: Some(&center), ..AttentionCall::causal(shape) };
    let out = reference(&call, &q, &k, &latent).unwrap().out;
    let have = rows(nope, &|t, h| up(&up_v, h, &out[(t * heads + h) * rank..][..rank]));
    assert!(largest(&have, &want) < 1e-11, "{}", largest(&have, &want));
    // Expanded from centered rows: the head's output lacks W_UV A.
    let out = expanded(&shifted(&latent, -1.0, &a), &shifted(&k_pe, -1.0, &b));
    let have = rows(nope, &|t, h| {
        let at = (t * heads + h) * nope;
        up(&up_v, h, &a).iter().zip(&out[at..]).map(|(add, o)| o + add).collect()
    });
    assert!(largest(&have, &want) < 1e-11);
    assert!(largest(&out, &want) > 1.0, "without it");
}

/// dQ of a backward pass, relative to that of the plain reference, with a saved output of the caller's choice.
fn dq_error(case: &Case, call: &AttentionCall<'_>, saved: impl Fn(&AttentionOutput) -> Vec<f32>) -> f64 {
    let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
    let data = Data { q: narrow(&case.q), k: narrow(&case.k), v: narrow(&case.v) };
    let plan = data.plan(call);
    let d_out: Vec<f32> = (0..case.shape.out_elements()).map(|i| ((i * 37 % 19) as f32 - 9.0) / 5.0).collect();
    let output = Cpu.forward(call, &data.inputs(), &plan, &Precision::F32).unwrap();
    let out = saved(&output);
    let how = BackwardPrecision { delta: Delta::Output, products: GradientProducts::F32 };
    let saved = Saved { out: &out, lse: output.saved().lse };
    let have = backward(call, &data.inputs(), &plan, &Precision::F32, &how, &saved, &d_out).unwrap();
    let plain = AttentionCall { center: None, ..*call };
    let want = reference_backward(&plain, &wide(&data.q), &wide(&data.k), &wide(&data.v), &wide(&d_out)).unwrap();
    let size = (want.dq.iter().map(|x| x * x).sum::<f64>() / want.dq.len() as f64).sqrt();
    errors(&have.dq, &want.dq).1 / size
}

#[test]
fn delta_and_dp_are_of_one_kind() {
    let case = Case::new(10);
    let call = AttentionCall { center: Some(&case.center), ..case.call() };
    assert!(dq_error(&case, &call, |out| out.saved().out.to_vec()) < 1e-4);
    assert!(dq_error(&case, &call, |out| out.out.clone()) > 0.1, "O with m next to V without");
    let m = case.center.m(0).unwrap();
    let kernels_own = |share: &dyn Fn(usize) -> f32, out: &AttentionOutput| -> Vec<f32> {
        out.out.iter().enumerate().map(|(i, o)| o - share(i / D) * m[i % D]).collect()
    };
    assert!(dq_error(&case, &call, |out| kernels_own(&|_| 1.0, out)) < 1e-4, "without sinks it is the kernel's own");
    // With sinks delta loses all of m, though the output has only a share of it.
    let sinks = [1.0, 0.5];
    let call = AttentionCall { sinks: Some(&sinks), ..call };
    assert!(dq_error(&case, &call, |out| out.saved().out.to_vec()) < 1e-4);
    let own = |out: &AttentionOutput| {
        let share = |row: usize| {
            let (token, head) = (row / 2, row % 2);
            1.0 - ((sinks[head] as f32) - out.lse[case.shape.lse_at(token, head)]).exp()
        };
        kernels_own(&share, out)
    };
    assert!(dq_error(&case, &call, own) > 0.1, "the kernel's own output");
}

/// An error of delta enters dQ along the keys that it is made of: along K - c it has no common direction.
#[test]
fn an_error_of_delta_enters_along_centered_keys() {
    let mut case = Case::new(11);
    case.k = shifted(&case.k, 1.0, &case.c());
    let off = |out: &[f32]| out.iter().map(|o| o * 0.99 - 0.01).collect::<Vec<_>>();
    let keys = Center { v: None, ..case.center.clone() };
    let centered = dq_error(&case, &AttentionCall { center: Some(&keys), ..case.call() }, |out| off(&out.out));
    let plain = dq_error(&case, &case.call(), |out| off(&out.out));
    assert!(centered < 0.5 * plain, "{centered} {plain}");
}

/// A center of a thousand times the keys costs accuracy. It breaks no cast, no sum of P and no bound on the output.
#[test]
fn a_center_far_off_costs_accuracy_alone() {
    let mut rng = StdRng::seed_from_u64(12);
    for seed in 0..40 {
        let shape = AttentionShape { d_v: 24, ..shape(4, 2, 70, 90, 32) };
        let data = Data::new(&shape, seed);
        let center = random_center(&shape, 1000.0, &mut rng);
        let soft_cap = (seed % 3 == 0).then_some(5.0);
        let sinks = (seed % 4 == 0).then_some(&[0.5, 1.0, -2.0, 0.0][..]);
        let plain = AttentionCall { soft_cap, sinks, ..AttentionCall::causal(shape) };
        let call = AttentionCall { center: Some(&center), ..plain };
        let want = exact(&plain, &data.inputs());
        for precision in [Precision::KERNEL, Precision::TRAINING, Precision::INFERENCE, Precision::F32] {
            let plan = data.plan(&call);
            let have = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
            for cast in have.stats.k.iter().chain(&have.stats.v).chain(&have.stats.q) {
                assert_eq!((cast.overflow, cast.non_finite), (0, 0), "{precision:?}");
            }
            assert!(have.out.iter().chain(&have.lse).all(|x| x.is_finite()), "{precision:?}");
            // Values of one: rows of P sum to the keys' share, whatever c does to the logits.
            let ones = Data { v: vec![1.0; shape.v_elements()], q: data.q.clone(), k: data.k.clone() };
            let keys = Center { v: None, ..center.clone() };
            let call = AttentionCall { center: Some(&keys), sinks: None, ..call };
            let sums = Cpu.forward(&call, &ones.inputs(), &ones.plan(&call), &precision).unwrap().out;
            assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 0.09), "{precision:?} {sums:?}");
            if precision == Precision::F32 {
                let v = data.v.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
                assert!(errors(&have.out, &want.out).0 < f64::from(v) * 0.05, "{:?}", errors(&have.out, &want.out));
            }
        }
    }
}

#[test]
fn a_center_of_another_shape_is_refused() {
    let shape = shape(4, 2, 8, 8, 32);
    let (data, center) = (Data::new(&shape, 1), Center::new(0, Some(vec![vec![1.0; 16]; 2]), None).unwrap());
    let plain = AttentionCall::causal(shape);
    let call = AttentionCall { center: Some(&center), ..plain };
    let error = Cpu.forward(&call, &data.inputs(), &data.plan(&plain), &Precision::KERNEL).unwrap_err();
    assert!(error.is_mismatch(), "{error}");
    assert_eq!(error.to_string(), "the center of k has 2 heads, expected 2 of 32 channels each");
}

/// What lets dQ use K - c is that rows of dS sum to zero. A soft-cap multiplies dS by its slope and a sink takes a share, so they do
/// not there. With one query, the sum over the keys of dK is that sum times tau q.
#[test]
fn rows_of_ds_sum_to_zero_without_soft_cap_and_sinks() {
    let case = Case::new(13);
    let shape = AttentionShape { n_q_heads: 1, len_q: 1, ..case.shape };
    let q = &case.q[..D];
    let d_out: Vec<f64> = (0..D).map(|i| (i as f64 * 0.7).sin()).collect();
    let sum = |soft_cap: Option<f64>, sinks: Option<&[f64]>| {
        let call = AttentionCall { soft_cap, sinks, softmax_scale: TAU, ..AttentionCall::causal(shape) };
        let dk = reference_backward(&call, q, &case.k, &case.v, &d_out).unwrap().dk;
        (0..D).map(|c| dk.iter().skip(c).step_by(D).sum::<f64>() / q[c]).fold(0.0, |a: f64, x| a.max(x.abs()))
    };
    assert!(sum(None, None) < 1e-13);
    assert!(sum(Some(1.0), None) > 1e-3, "{}", sum(Some(1.0), None));
    assert!(sum(None, Some(&[0.5])) > 1e-3, "{}", sum(None, Some(&[0.5])));
}
