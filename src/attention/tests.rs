mod accumulator_tests;
mod backward_tests;
mod bf16_tests;
mod center_tests;
mod format_tests;
mod paged_tests;
mod random_tests;
mod sequence_tests;

use super::*;
use crate::fp8::{Format, OnOverflow};
use crate::plan::OperandDescales;
use crate::plan::ScalePlan;
use crate::scale::Descale;
use crate::stats::CastStats;
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};
use rand_distr::{Distribution, StandardNormal};

/// Random operands; each head has its own magnitude, so that a wrong head's descale shows.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    fn new(shape: &AttentionShape, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut draw = |n: usize, heads: usize, d: usize, spread: f32| -> Vec<f32> {
            let size = |i: usize| 0.75 + spread * ((i / d) % heads) as f32;
            (0..n).map(|i| size(i) * Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect()
        };
        Self {
            q: draw(shape.q_elements(), shape.n_q_heads, shape.d_head, 0.2),
            k: draw(shape.k_elements(), shape.n_kv_heads, shape.d_head, 0.9),
            v: draw(shape.v_elements(), shape.n_kv_heads, shape.d_v, 3.0),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs { q: &self.q, k: &self.k, v: &self.v }
    }

    /// A plan whose operand descales cover each head's amax, and whose logit descale covers its logits.
    fn plan(&self, call: &AttentionCall) -> ScalePlan {
        let stats = measure(call, &self.inputs()).unwrap();
        let group = call.shape.n_q_heads / call.shape.n_kv_heads;
        let cover = |amax: f32| Descale::covering(f64::from(amax) * 1.01, 448.0).unwrap();
        let v: Vec<Descale> = stats.v.iter().map(|s| cover(s.amax)).collect();
        ScalePlan {
            layer: 0,
            logit_bound: None,
            logit_descale: stats.logits.iter().map(|s| cover(s.amax() * 1.1)).collect(),
            operands: OperandDescales {
                q: stats.q.chunks(group).map(|g| cover(g.iter().fold(0.0, |a, s| a.max(s.amax)))).collect(),
                k: stats.k.iter().map(|s| cover(s.amax)).collect(),
                o: Some(v.iter().map(|v| Descale::new(2.0 * v.get()).unwrap()).collect()),
                v: Some(v),
            },
        }
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn exact(call: &AttentionCall, x: &Inputs<'_>) -> ReferenceOutput {
    reference(call, &wide(x.q), &wide(x.k), &wide(x.v)).unwrap()
}

/// The untiled implementation that `cpu` may be at most twice as far from the reference as: f64 throughout, with the
/// casts of `precision` at the same places.
fn plain(call: &AttentionCall, x: &Inputs<'_>, plan: &ScalePlan, precision: &Precision) -> Vec<f64> {
    let shape = &call.shape;
    let e4m3 = |x: f64| f64::from(Format::E4m3.round(x as f32, precision.on_overflow));
    let mut out = vec![0.0; shape.out_elements()];
    for sequence in call.all_sequences().iter() {
        for head in 0..shape.n_q_heads {
            let (descale, kv_head) = (f64::from(plan.logit_descale[head].get()), shape.kv_head(head));
            for (i, row) in sequence.q.clone().enumerate() {
                let (q, o) = (shape.q_at(row, head), shape.out_at(row, head));
                let key = |j| shape.k_at(sequence.k.start + j, kv_head);
                let m = call.value_center(head);
                let keys = call.visible(sequence, i);
                let mut s: Vec<f64> = Vec::new();
                for j in keys.clone() {
                    let dot: f64 = (0..shape.d_head).map(|c| f64::from(x.q[q + c]) * f64::from(x.k[key(j) + c])).sum();
                    let logit = call.softmax_scale * dot;
                    let logit = call.soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh());
                    s.push(if precision.logits == LogitCast::E4m3 { e4m3(logit / descale) * descale } else { logit });
                }
                let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = s.iter().map(|s| (s - max).exp()).collect();
                let sum = p.iter().sum::<f64>() + call.sinks.map_or(0.0, |sinks| (sinks[head] - max).exp());
                let share = p.iter().sum::<f64>() / sum;
                for (c, m) in m.into_iter().flatten().enumerate().filter(|_| share > 0.0) {
                    out[o + c] += share * f64::from(*m);
                }
                for (p, j) in p.iter().zip(keys) {
                    let p = match precision.probabilities {
                        Probabilities::F32 => *p,
                        Probabilities::Bf16 => half::bf16::from_f64(*p).to_f64(),
                        Probabilities::F16 => half::f16::from_f64(256.0 * p).to_f64() / 256.0,
                        Probabilities::E4m3 => e4m3(256.0 * p) / 256.0,
                    };
                    for c in 0..shape.d_v {
                        let v = x.v[shape.v_at(sequence.k.start + j, kv_head) + c];
                        out[o + c] += p / sum * (f64::from(v) - m.map_or(0.0, |m| f64::from(m[c])));
                    }
                }
            }
        }
    }
    out
}

/// Largest and root-mean-square difference.
fn errors<A: Into<f64> + Copy>(have: &[A], want: &[f64]) -> (f64, f64) {
    let d = have.iter().zip(want).map(|(&a, b)| (a.into() - b).abs());
    let square: f64 = d.clone().map(|d| d * d).sum();
    (d.fold(0.0, |a: f64, d| if d > a || d.is_nan() { d } else { a }), (square / want.len() as f64).sqrt())
}

/// The same distance on both sides, the query's own key included.
fn window(causal: bool, width: Option<usize>) -> Mask {
    let ends = width.map(|width| width - 1);
    Mask { causal, window_left: ends, window_right: ends }
}

fn shape(n_q_heads: usize, n_kv_heads: usize, len_q: usize, len_k: usize, d_head: usize) -> AttentionShape {
    AttentionShape { batch: 1, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head }
}

/// Error against the reference, fed with the operands already rounded, compared with that of [`plain`].
fn compare(call: &AttentionCall, precision: &Precision, seed: u64) {
    let data = Data::new(&call.shape, seed);
    let plan = data.plan(call);
    let have = Cpu.forward(call, &data.inputs(), &plan, precision).unwrap();
    let cast = dequantised(call, &data.inputs(), &plan, precision.on_overflow).unwrap();
    let x = match precision.operands {
        Cast::F32 => data.inputs(),
        _ => Inputs { q: &cast.q, k: &cast.k, v: &cast.v },
    };
    let want = exact(&AttentionCall { center: None, ..*call }, &x);
    let (cpu, simple) = (errors(&have.out, &want.out), errors(&plain(call, &x, &plan, precision), &want.out));
    // f32 sums: a few units in the last place of the largest logit, which the weights inherit relatively.
    let largest_logit = have.stats.logits.iter().fold(0.0, |a: f32, l| a.max(l.amax()));
    let noise = 2e-6 + 6e-7 * (f64::from(largest_logit) + random_tests::largest_offset(call, x.q));
    let m = call.center.and_then(|center| center.v.as_ref()).into_iter().flatten().flatten();
    let m = m.fold(0.0, |a: f32, m| a.max(m.abs()));
    let out_noise = noise * f64::from(have.stats.v.iter().fold(0.0, |a: f32, v| a.max(v.amax)) + m);
    // Few outputs leave the two errors to chance: they round different numbers.
    let (largest, mean) = match want.out.len() {
        0..512 => (4.0, 4.0),
        512..4096 => (2.0, 2.0),
        _ => (2.0, 1.15),
    };
    assert!(cpu.0 <= largest * simple.0 + out_noise, "largest: {cpu:?} {simple:?} {call:?} {precision:?}");
    assert!(cpu.1 <= mean * simple.1 + out_noise, "mean: {cpu:?} {simple:?} {call:?} {precision:?}");
    if precision.logits != LogitCast::E4m3 {
        for (have, want) in have.lse.iter().zip(&want.lse) {
            assert!(f64::from(*have) == *want || (f64::from(*have) - want).abs() < noise, "{have} {want}");
        }
    }
    for row in [&have.stats.q, &have.stats.k, &have.stats.v, &have.stats.o] {
        assert!(row.iter().all(|s| s.overflow == 0 && s.non_finite == 0 && s.count > 0));
    }
}

const LENGTHS: [(usize, usize); 4] = [(113, 203), (799, 3), (1023, 1024), (1, 513)];

#[test]
fn kernel_precision_is_as_good_as_a_plain_implementation() {
    for (seed, (len_q, len_k)) in LENGTHS.into_iter().enumerate() {
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::sliding(70)] {
            let call = AttentionCall { mask, ..AttentionCall::causal(shape(4, 2, len_q, len_k, 128 >> (len_q / 341))) };
            compare(&call, &Precision::KERNEL, seed as u64);
        }
    }
}

#[test]
fn paper_precision_is_as_good_as_a_plain_implementation() {
    for (seed, (len_q, len_k)) in LENGTHS.into_iter().enumerate() {
        compare(
            &AttentionCall::causal(shape(4, 2, len_q, len_k, 128 >> (len_q / 341))),
            &Precision::PAPER_LOGITS,
            seed as u64,
        );
    }
}

#[test]
fn every_option_is_as_good_as_a_plain_implementation() {
    let bf16 = Precision { probabilities: Probabilities::Bf16, ..Precision::KERNEL };
    for precision in [Precision::KERNEL, Precision::PAPER_LOGITS, Precision::F32, bf16] {
        for (n_q, n_kv) in [(1, 1), (4, 4), (6, 2), (8, 1)] {
            for soft_cap in [None, Some(3.0)] {
                for width in [None, Some(1), Some(33)] {
                    for causal in [false, true] {
                        let shape = AttentionShape { batch: 1 + n_q % 2, ..shape(n_q, n_kv, 69, 75, 24) };
                        let call = AttentionCall {
                            mask: window(causal, width),
                            soft_cap,
                            softmax_scale: 0.3,
                            ..AttentionCall::causal(shape)
                        };
                        compare(&call, &precision, n_q as u64);
                    }
                }
            }
        }
    }
}

#[test]
fn masks_show_what_their_definition_says() {
    for (len_q, len_k) in [(1, 1), (5, 5), (5, 9), (9, 5), (1, 7), (7, 1)] {
        for causal in [false, true] {
            for (left, right) in ENDS.into_iter().flat_map(|left| ENDS.map(|right| (left, right))) {
                let mask = Mask { causal, window_left: left, window_right: right };
                for row in 0..len_q {
                    let position = row as i64 + len_k as i64 - len_q as i64;
                    let within = |end: Option<usize>, distance: i64| {
                        distance <= 0 || end.is_none_or(|end| distance as u64 <= end as u64)
                    };
                    let sees = |j: i64| {
                        (!causal || j <= position) && within(left, position - j) && within(right, j - position)
                    };
                    let want: Vec<usize> = (0..len_k).filter(|&j| sees(j as i64)).collect();
                    let have: Vec<usize> = mask.visible(row, len_q, len_k).collect();
                    assert_eq!(have, want, "{mask:?} {row} {len_q} {len_k}");
                }
            }
        }
    }
    assert_eq!(Mask::sliding(4).visible(9, 10, 10), 6..10);
    assert_eq!((Mask::sliding(0), Mask { window_left: None, ..Mask::sliding(1) }), (Mask::sliding(1), Mask::CAUSAL));
}

const ENDS: [Option<usize>; 6] = [None, Some(0), Some(1), Some(3), Some(100), Some(usize::MAX)];

#[test]
fn rows_without_keys_are_zero() {
    let call = AttentionCall::causal(shape(2, 1, 799, 3, 16));
    let data = Data::new(&call.shape, 1);
    let out = Cpu.forward(&call, &data.inputs(), &data.plan(&call), &Precision::KERNEL).unwrap();
    for head in 0..2 {
        for row in 0..799 {
            let values = &out.out[call.shape.q_at(row, head)..][..16];
            let lse = out.lse[call.shape.lse_at(row, head)];
            assert_eq!(row < 796, values.iter().all(|&x| x == 0.0), "{row}");
            assert_eq!(row < 796, lse == f32::NEG_INFINITY, "{row}");
            assert!(row < 796 || lse.is_finite());
        }
        assert_eq!(out.stats.logits[head].count, 6);
    }
}

/// One query, two keys, everything by hand.
#[test]
fn a_hand_computed_call() {
    let call = AttentionCall { mask: Mask::NONE, softmax_scale: 0.5, ..AttentionCall::causal(shape(2, 2, 1, 2, 16)) };
    let mut q = vec![0.0; 32];
    let (mut k, mut v) = (vec![0.0; 64], vec![0.0; 64]);
    // Head 1: q = 3.3 -> 3.25 at descale 1 and 1.625 * 2 at descale 2; keys 2 and 17 -> 16 (a tie, to even) at descale 1.
    (q[16], k[16], k[48], v[16], v[48]) = (3.3, 2.0, 17.0, 100.0, 1.0);
    let d = |x: f32| Descale::new(x).unwrap();
    let mut plan = ScalePlan {
        layer: 0,
        logit_bound: None,
        logit_descale: vec![d(1.0), d(0.05)],
        operands: OperandDescales {
            q: vec![d(64.0), d(2.0)],
            k: vec![d(64.0), d(1.0)],
            v: Some(vec![d(64.0), d(0.25)]),
            o: Some(vec![d(64.0), d(0.001)]),
        },
    };
    let inputs = Inputs { q: &q, k: &k, v: &v };
    let out = Cpu.forward(&call, &inputs, &plan, &Precision::KERNEL).unwrap();
    let (s0, s1) = (0.5f64 * 3.25 * 2.0, 0.5f64 * 3.25 * 16.0);
    let stats = &out.stats;
    assert_eq!((stats.logits[1].min, stats.logits[1].max), (s0 as f32, s1 as f32));
    // 26 / 0.05 = 520 is over the format, 3.25 / 0.05 = 65 is not.
    assert_eq!((stats.logits[1].overflow, stats.logits[1].beyond_rounding, stats.logits[1].count), (1, 1, 2));
    assert_eq!(out.lse[1], (s1 + (s0 - s1).exp().ln_1p()) as f32);
    // exp(-22.75) is below the smallest P, so the value is that of key 1; 100 / 0.25 = 400 rounds to 384.
    assert!((f64::from(out.out[16]) - 1.0).abs() < 1e-6);
    assert_eq!((stats.q[1].amax, stats.k[1].amax, stats.v[1].amax), (3.3, 17.0, 100.0));
    assert_eq!((stats.v[1].overflow, stats.o[1].overflow, stats.o[1].beyond_rounding), (0, 1, 1));
    assert_eq!((stats.q[0].amax, stats.o[0].overflow), (0.0, 0));

    // Through E4M3 the logit 520 becomes 448, 65 becomes 64 (to even), and 22.4 - 3.2 remain.
    let precision = Precision { logits: LogitCast::E4m3, ..Precision::KERNEL };
    let cast = Cpu.forward(&call, &inputs, &plan, &precision).unwrap();
    assert!((f64::from(cast.lse[1]) - (22.4 + (3.2f64 - 22.4).exp().ln_1p())).abs() < 4e-6, "{}", cast.lse[1]);
    let open = Precision { on_overflow: OnOverflow::NonFinite, ..precision };
    let open = Cpu.forward(&call, &inputs, &plan, &open).unwrap();
    assert!(open.out[16].is_nan() && open.lse[1].is_nan() && open.out[0] == 0.0);

    // The output, 1, cast at descale 0.001 saturates; at 0.6 it is e4m3(1.667) = 1.625 (1.75 is farther).
    let precision = Precision { output: Cast::E4m3, ..Precision::KERNEL };
    let cast = Cpu.forward(&call, &inputs, &plan, &precision).unwrap();
    assert!((cast.out[16] - 0.448).abs() < 1e-6);
    plan.operands.o = Some(vec![d(1.0), d(0.6)]);
    let cast = Cpu.forward(&call, &inputs, &plan, &precision).unwrap();
    assert!((cast.out[16] - 0.975).abs() < 1e-6);
    assert_eq!(cast.stats.o[1].overflow, 0);
    // Without descales values and output stay as they are.
    (plan.operands.v, plan.operands.o) = (None, None);
    v[48] = 1.03;
    let uncast = Cpu.forward(&call, &Inputs { q: &q, k: &k, v: &v }, &plan, &precision).unwrap();
    assert!((uncast.out[16] - 1.03).abs() < 1e-6);
    assert_eq!((uncast.stats.v[1].overflow, uncast.stats.v[1].amax), (0, 100.0));
}

/// A weight of exp(-9) keeps E4M3's relative precision, since P is cast as 256 P.
#[test]
fn small_weights_survive_their_cast() {
    let call = AttentionCall { mask: Mask::NONE, softmax_scale: 1.0, ..AttentionCall::causal(shape(1, 1, 1, 2, 16)) };
    let (mut q, mut k, mut v) = (vec![0.0; 16], vec![0.0; 32], vec![0.0; 32]);
    (q[0], k[16], v[16]) = (1.0, -9.0, 8192.0);
    let one = vec![Descale::ONE];
    let operands = OperandDescales { q: one.clone(), k: one.clone(), v: None, o: None };
    let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: one, operands };
    let out = Cpu.forward(&call, &Inputs { q: &q, k: &k, v: &v }, &plan, &Precision::KERNEL).unwrap();
    let small = (-9f64).exp();
    let want =
        f64::from(Format::E4m3.round((256.0 * small) as f32, OnOverflow::Saturate)) / 256.0 * 8192.0 / (1.0 + small);
    assert!((f64::from(out.out[0]) - want).abs() < 1e-5, "{} {want}", out.out[0]);
    assert!((want / (small * 8192.0) - 1.0).abs() < 1.0 / 16.0);
}

/// Counts are those of x * quant_scale on every head, with descales that let some values out.
#[test]
fn overflow_is_counted_per_head() {
    let shape = AttentionShape { batch: 2, ..shape(6, 3, 70, 81, 16) };
    let call = AttentionCall::causal(shape);
    let data = Data::new(&shape, 5);
    let mut plan = data.plan(&call);
    let tighten = |row: &mut Vec<Descale>, factor: f32| {
        for (i, descale) in row.iter_mut().enumerate() {
            *descale = Descale::new(descale.get() * factor * (1.0 + 0.2 * i as f32)).unwrap();
        }
    };
    let tight = |row: &mut Vec<Descale>| tighten(row, 0.4);
    tighten(&mut plan.logit_descale, 0.1);
    tight(&mut plan.operands.q);
    tight(&mut plan.operands.k);
    plan.operands.v.as_mut().map(tight);
    let out = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
    let recount = |x: &[f32], heads: usize, head: usize, descale: Descale| {
        let mine = x.chunks(16).enumerate().filter(|(i, _)| i % heads == head).flat_map(|(_, row)| row);
        let scaled: Vec<f32> = mine.map(|x| (x * descale.quant_scale().get()).abs()).collect();
        let over = |limit: f32| scaled.iter().filter(|&&y| y > limit).count() as u64;
        (over(448.0), over(464.0), scaled.len() as u64)
    };
    let stats = &out.stats;
    let of = |s: &CastStats| (s.overflow, s.beyond_rounding, s.count);
    for head in 0..3 {
        assert_eq!(of(&stats.k[head]), recount(&data.k, 3, head, plan.operands.k[head]));
        assert_eq!(of(&stats.v[head]), recount(&data.v, 3, head, plan.operands.v.as_ref().unwrap()[head]));
        assert!(stats.k[head].beyond_rounding > 0 && stats.k[head].overflow > stats.k[head].beyond_rounding);
    }
    let cast = dequantised(&call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap();
    for head in 0..6 {
        assert_eq!(of(&stats.q[head]), recount(&data.q, 6, head, plan.operands.q[head / 2]));
        assert_eq!(of(&stats.o[head]), recount(&out.out, 6, head, plan.operands.o.as_ref().unwrap()[head / 2]));
        let (mut over, mut seen, mut max) = (0i64, 0, 0f64);
        for batch in 0..2 {
            for row in 0..70 {
                for j in call.mask.visible(row, shape.len_q, shape.len_k) {
                    let (a, b) =
                        (shape.q_at(batch * shape.len_q + row, head), shape.k_at(batch * shape.len_k + j, head / 2));
                    let s: f64 =
                        (0..16).map(|c| f64::from(cast.q[a + c]) * f64::from(cast.k[b + c])).sum::<f64>() / 4.0;
                    over += i64::from((s / f64::from(plan.logit_descale[head].get())).abs() > 448.0);
                    (seen, max) = (seen + 1, max.max(s.abs()));
                }
            }
        }
        let logits = &stats.logits[head];
        assert!(over > 0 && (logits.overflow as i64 - over).abs() <= 1, "{} {over}", logits.overflow);
        assert_eq!(logits.count, seen);
        assert!((f64::from(logits.amax()) - max).abs() < 1e-5 * max);
    }
    let uncounted = Precision { logits: LogitCast::F32, ..Precision::KERNEL };
    let uncounted = Cpu.forward(&call, &data.inputs(), &plan, &uncounted).unwrap();
    assert_eq!((uncounted.stats.logits[0].overflow, &uncounted.out), (0, &out.out));
}

#[test]
fn what_is_not_finite_is_seen_and_does_not_spread() {
    let shape = shape(4, 2, 70, 70, 16);
    let call = AttentionCall::causal(shape);
    let clean = Data::new(&shape, 3);
    let plan = clean.plan(&call);
    let want = Cpu.forward(&call, &clean.inputs(), &plan, &Precision::KERNEL).unwrap();
    for precision in [Precision::KERNEL, Precision::PAPER_LOGITS, Precision::F32] {
        for (bad, tensor) in [(f32::NAN, 1), (f32::NAN, 2), (f32::INFINITY, 1), (f32::NEG_INFINITY, 2), (f32::NAN, 0)] {
            let mut data = Data::new(&shape, 3);
            // Row 66 of KV head 1, or of query head 2.
            match tensor {
                0 => data.q[shape.q_at(66, 2) + 5] = bad,
                1 => data.k[shape.k_at(66, 1) + 5] = bad,
                _ => data.v[shape.k_at(66, 1) + 5] = bad,
            }
            let out = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
            let counts =
                [&out.stats.q, &out.stats.k, &out.stats.v].map(|s| s.iter().map(|s| s.non_finite).sum::<u64>());
            assert_eq!(counts.iter().sum::<u64>(), 1);
            assert_eq!(counts[tensor], 1);
            let amax = [out.stats.q[2], out.stats.k[1], out.stats.v[1]][tensor].amax;
            assert!(if bad.is_nan() { amax.is_nan() } else { amax == f32::INFINITY });
            for head in 0..4 {
                for row in 0..70 {
                    let values = &out.out[shape.q_at(row, head)..][..16];
                    let touched = if tensor == 0 { head == 2 && row == 66 } else { head >= 2 && row >= 66 };
                    if !touched {
                        assert!(values.iter().all(|x| x.is_finite()), "{bad} {tensor} {head} {row}");
                        if precision == Precision::KERNEL {
                            assert_eq!(values, &want.out[shape.q_at(row, head)..][..16]);
                        }
                    } else if bad.is_nan() {
                        assert!(values[5].is_nan(), "{bad} {tensor} {head} {row}");
                    }
                }
            }
        }
    }
    // A cast that may overflow into NaN does.
    let mut small = plan.clone();
    small.operands.k[1] = Descale::new(1e-3).unwrap();
    let open = Precision { on_overflow: OnOverflow::NonFinite, ..Precision::KERNEL };
    let out = Cpu.forward(&call, &clean.inputs(), &small, &open).unwrap();
    assert!(out.out[shape.q_at(9, 3)].is_nan() && out.out[shape.q_at(9, 0)].is_finite());
    assert!(out.stats.k[1].overflow > 0 && out.stats.k[1].non_finite == 0 && out.stats.logits[3].non_finite > 0);
    // Finite operands whose product is infinite are seen although the soft-cap hides them.
    let data = Data { q: vec![1e30; shape.q_elements()], k: vec![1e30; shape.k_elements()], v: clean.v };
    let capped = AttentionCall { soft_cap: Some(20.0), ..call };
    let out = Cpu.forward(&capped, &data.inputs(), &plan, &Precision::F32).unwrap();
    assert_eq!(out.stats.logits[0].non_finite, out.stats.logits[0].count);
}

#[test]
fn threads_do_not_change_a_bit() {
    let call = AttentionCall::causal(AttentionShape { batch: 2, ..shape(4, 2, 150, 150, 32) });
    let data = Data::new(&call.shape, 9);
    let plan = data.plan(&call);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap())
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn measure_is_the_forwards_own_statistics() {
    let call = AttentionCall { soft_cap: Some(5.0), ..AttentionCall::causal(shape(4, 2, 100, 130, 32)) };
    let data = Data::new(&call.shape, 2);
    let out = Cpu.forward(&call, &data.inputs(), &data.plan(&call), &Precision::F32).unwrap();
    let stats = measure(&call, &data.inputs()).unwrap();
    assert_eq!(
        (&stats.logits, &stats.q, &stats.k, &stats.v),
        (&out.stats.logits, &out.stats.q, &out.stats.k, &out.stats.v)
    );
    assert!(stats.o.iter().all(|o| o.count == 0));
    assert_eq!(
        stats.v[1].amax,
        data.v
            .chunks(16)
            .enumerate()
            .filter(|(i, _)| i / 2 % 2 == 1)
            .flat_map(|(_, r)| r)
            .fold(0.0, |a: f32, x| a.max(x.abs()))
    );
}

#[test]
fn calls_that_break_a_rule_are_refused() {
    let good = AttentionCall::causal(shape(4, 2, 3, 3, 16));
    let data = Data::new(&good.shape, 0);
    let plan = data.plan(&good);
    let run = |call: &AttentionCall, plan: &ScalePlan| Cpu.forward(call, &data.inputs(), plan, &Precision::KERNEL);
    assert!(run(&good, &plan).is_ok());
    let shapes = [
        shape(4, 3, 3, 3, 16),
        shape(4, 0, 3, 3, 16),
        shape(4, 2, 3, 3, 20),
        shape(4, 2, 4, 3, 16),
        shape(4, 2, 3, 4, 16),
    ];
    for shape in shapes.into_iter().chain([shape(usize::MAX, 1, usize::MAX, 1, 16)]) {
        assert!(run(&AttentionCall { shape, ..good }, &plan).unwrap_err().is_argument(), "{shape:?}");
    }
    for softmax_scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(run(&AttentionCall { softmax_scale, ..good }, &plan).unwrap_err().is_argument());
        assert!(run(&AttentionCall { soft_cap: Some(softmax_scale), ..good }, &plan).unwrap_err().is_argument());
    }
    let wide = AttentionShape { d_v: 20, ..good.shape };
    let error = run(&AttentionCall { shape: wide, ..good }, &plan).unwrap_err();
    assert_eq!(error.to_string(), "d_v 20 must be a multiple of 8 from 16 to 576");
    for (sinks, message) in [
        (&[0.0; 3][..], "3 sinks do not fit 4 query heads"),
        (&[0.0, 1.0, f64::NAN, 0.0], "the sink of head 2, NaN, must be finite"),
    ] {
        assert_eq!(run(&AttentionCall { sinks: Some(sinks), ..good }, &plan).unwrap_err().to_string(), message);
    }
    let mut short = plan.clone();
    short.logit_descale.pop();
    assert!(run(&good, &short).unwrap_err().is_mismatch());
    let mut short = plan.clone();
    short.operands.v = Some(vec![Descale::ONE]);
    let error = run(&good, &short).unwrap_err();
    assert_eq!(error.to_string(), "the plan has 1 v descales where the call needs 2");
}

#[test]
fn the_shifted_softmax_is_the_softmax() {
    for probabilities in [Probabilities::F32, Probabilities::Bf16] {
        let precision = Precision { probabilities, ..Precision::KERNEL };
        let call = AttentionCall::causal(shape(4, 2, 140, 140, 16));
        let mut data = Data::new(&call.shape, 6);
        // The first and third key of head 0 are one, and the keys of head 1 are all one.
        let row = |i: usize, head: usize| call.shape.k_at(i, head);
        let first = data.k[row(0, 0)..][..16].to_vec();
        data.k[row(2, 0)..][..16].copy_from_slice(&first);
        for i in 0..140 {
            data.k[row(i, 1)..][..16].copy_from_slice(&first);
        }
        let plan = data.plan(&call);
        let want = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        let have = ShiftedSoftmax::default().forward(&call, &data.inputs(), &plan, &precision).unwrap();
        let tolerance = if probabilities == Probabilities::F32 { 1e-5 } else { 2e-2 };
        assert!(errors(&have.output.out, &wide(&want.out)).0 < tolerance * f64::from(want.stats.v[1].amax));
        assert!(errors(&have.output.lse, &wide(&want.lse)).0 < 1e-5);
        assert_eq!(have.output.stats.logits, want.stats.logits);
        // Head 1: every row repeats in each of its tiles but where it sees a single key of the tile.
        let tiles = |row: usize| row.div_ceil(64);
        let want: usize = (0..140).map(tiles).sum();
        assert_eq!(have.repeated[2..], [want as u64; 2]);
        assert!(have.repeated[0] > 0 && have.repeated[0] < 140);
    }
}

#[test]
fn the_shifted_softmax_keeps_large_repeated_maxima() {
    // Two equal logits of +200 or -200: the paper's shifts of 400 and 0 would empty the row.
    for sign in [1.0, -1.0] {
        let call =
            AttentionCall { softmax_scale: 1.0, mask: Mask::NONE, ..AttentionCall::causal(shape(1, 1, 1, 2, 16)) };
        let data =
            Data { q: [10.0; 16].to_vec(), k: vec![1.25 * sign; 32], v: (0..32).map(|i| (i / 16) as f32).collect() };
        let plan = data.plan(&call);
        let out = ShiftedSoftmax::default().forward(&call, &data.inputs(), &plan, &Precision::F32).unwrap();
        assert_eq!((out.output.out[0], out.repeated[0]), (0.5, 1));
        assert!((out.output.lse[0] - (200.0 * sign + 2f32.ln())).abs() < 1e-4);
    }
}

#[test]
fn the_shifted_softmax_refuses_e4m3_weights() {
    let call = AttentionCall::causal(shape(1, 1, 2, 2, 16));
    let data = Data::new(&call.shape, 0);
    let run = |options: ShiftedSoftmax, p: &Precision| options.forward(&call, &data.inputs(), &data.plan(&call), p);
    assert!(run(ShiftedSoftmax::default(), &Precision::KERNEL).unwrap_err().is_unsupported());
    assert!(run(ShiftedSoftmax { limit: ShiftLimit::Octave, ..ShiftedSoftmax::default() }, &Precision::KERNEL).is_ok());
    assert!(run(ShiftedSoftmax { beta: 1.0, ..ShiftedSoftmax::default() }, &Precision::F32).unwrap_err().is_argument());
    assert!(
        run(ShiftedSoftmax { epsilon: f32::NAN, ..ShiftedSoftmax::default() }, &Precision::F32)
            .unwrap_err()
            .is_argument()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_call_is_as_good_as_a_plain_implementation(
        (len_q, len_k) in (1usize..150, 1usize..150),
        (n_kv, group, batch) in (1usize..3, 1usize..4, 1usize..3),
        d_head in prop::sample::select(vec![16usize, 24, 32, 64, 72]),
        causal in any::<bool>(),
        width in prop::option::of(1usize..100),
        soft_cap in prop::option::of(1.0f64..30.0),
        softmax_scale in 0.05f64..0.5,
        precision in prop::sample::select(vec![Precision::KERNEL, Precision::PAPER_LOGITS, Precision::F32]),
        seed in any::<u64>(),
    ) {
        let shape = AttentionShape { batch, n_q_heads: n_kv * group, n_kv_heads: n_kv, len_q, len_k, d_head, d_v: d_head };
        compare(&AttentionCall { shape, mask: window(causal, width), softmax_scale, soft_cap, ..AttentionCall::causal(shape) }, &precision, seed);
    }

    /// o <= 18/17 max |v|, which is why an output descale of twice v's can never overflow.
    #[test]
    fn outputs_stay_under_their_descale(seed in any::<u64>(), len in 1usize..200, scale in 0.01f64..2.0) {
        let call = AttentionCall { softmax_scale: scale, ..AttentionCall::causal(shape(2, 1, len, len, 16)) };
        let data = Data::new(&call.shape, seed);
        let out = Cpu.forward(&call, &data.inputs(), &data.plan(&call), &Precision::KERNEL).unwrap();
        prop_assert!(out.stats.o.iter().all(|o| o.overflow == 0));
        // The cast of v adds its own 1/17 (448 itself is exact).
        let limit = out.stats.v[0].amax * (18.0 / 17.0) * (18.0 / 17.0) * 1.0001;
        prop_assert!(out.stats.o.iter().all(|o| o.amax <= limit));
    }
}
