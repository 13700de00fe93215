//! Random calls over the cross product of what a call can have: the reference against finite differences, the tiled path
//! against the reference, and NaN wherever nothing may be read.

use super::*;
use crate::plan::Center;
use rand::RngExt;

/// A call with the lists that it borrows.
struct Random {
    shape: AttentionShape,
    mask: Mask,
    softmax_scale: f64,
    soft_cap: Option<f64>,
    sequences: Option<Vec<Sequence>>,
    sinks: Option<Vec<f64>>,
    center: Option<Center>,
}

/// One of several, each as likely.
fn pick<T: Copy>(rng: &mut StdRng, of: &[T]) -> T {
    of[rng.random_range(0..of.len())]
}

fn maybe<T>(rng: &mut StdRng, value: impl FnOnce(&mut StdRng) -> T) -> Option<T> {
    let yes: bool = rng.random();
    yes.then(|| value(rng))
}

impl Random {
    /// Lengths up to `longest`, around tiles of 64 among them.
    fn new(rng: &mut StdRng, longest: usize) -> Self {
        let length = |rng: &mut StdRng| match pick(rng, &[0, 1, 2, 2]) {
            0 => pick(rng, &[1, 2, 63, 64, 65, 127, 128, 129]).min(longest),
            1 => rng.random_range(1..=8.min(longest)),
            _ => rng.random_range(1..=longest),
        };
        let n_kv_heads = rng.random_range(1..=2);
        let widths = [16, 24, 32, 40, 56, 72];
        let d_head = pick(rng, &widths);
        let mut shape = AttentionShape {
            batch: rng.random_range(1..=3),
            n_q_heads: n_kv_heads * rng.random_range(1..=3),
            n_kv_heads,
            len_q: length(rng),
            len_k: length(rng),
            d_head,
            d_v: if rng.random() { d_head } else { pick(rng, &widths) },
        };
        let sequences = match rng.random_range(0..4) {
            0 => None,
            1 | 2 => {
                let side = pick(rng, &[Padding::Left, Padding::Right]);
                let mut lengths =
                    |most: usize| -> Vec<usize> { (0..shape.batch).map(|_| rng.random_range(0..=most)).collect() };
                let (q, k) = (lengths(shape.len_q), lengths(shape.len_k));
                Some(Sequence::padded(&shape, &q, &k, side).unwrap())
            }
            _ => {
                let count = rng.random_range(1..=5);
                let ends = |rng: &mut StdRng, total: usize| -> Vec<usize> {
                    let mut ends: Vec<usize> = (0..count - 1).map(|_| rng.random_range(0..=total)).collect();
                    ends.extend([0, total]);
                    ends.sort_unstable();
                    ends
                };
                shape.batch = 1;
                let (q, k) = (ends(rng, shape.len_q), ends(rng, shape.len_k));
                let used: Vec<usize> = k.windows(2).map(|ends| rng.random_range(0..=ends[1] - ends[0])).collect();
                let seqused_k = maybe(rng, |_| used);
                Some(Sequence::packed(&q, &k, seqused_k.as_deref()).unwrap())
            }
        };
        let end = |rng: &mut StdRng| pick(rng, &[0, 1, 5, 40, 70, 200]);
        Self {
            mask: Mask { causal: rng.random(), window_left: maybe(rng, end), window_right: maybe(rng, end) },
            softmax_scale: rng.random_range(0.05..0.4),
            soft_cap: maybe(rng, |rng| rng.random_range(1.0..20.0)),
            sinks: maybe(rng, |rng| (0..shape.n_q_heads).map(|_| rng.random_range(-8.0..12.0)).collect()),
            center: maybe(rng, |rng| random_center(&shape, 3.0, rng)),
            shape,
            sequences,
        }
    }

    fn call(&self) -> AttentionCall<'_> {
        let Self { shape, mask, softmax_scale, soft_cap, .. } = *self;
        let (sequences, sinks) = (self.sequences.as_deref(), self.sinks.as_deref());
        AttentionCall { shape, mask, softmax_scale, soft_cap, sequences, sinks, center: self.center.as_ref() }
    }

    /// The same call without a center.
    fn plain(&self) -> AttentionCall<'_> {
        AttentionCall { center: None, ..self.call() }
    }
}

/// A center of keys, of values or of both, with elements of this size.
pub(super) fn random_center(shape: &AttentionShape, size: f64, rng: &mut StdRng) -> Center {
    let mut rows = |d: usize| -> Vec<Vec<f64>> {
        (0..shape.n_kv_heads).map(|_| (0..d).map(|_| rng.random_range(-size..size)).collect()).collect()
    };
    let (k, v) = (rows(shape.d_head), rows(shape.d_v));
    let which = rng.random_range(0..3);
    Center::new(0, (which != 0).then_some(k), (which != 1).then_some(v)).unwrap()
}

/// Largest |tau q . c| of a call with a center.
pub(super) fn largest_offset(call: &AttentionCall<'_>, q: &[f32]) -> f64 {
    let heads = call.shape.n_q_heads;
    let rows = q.chunks_exact(call.shape.d_head).enumerate();
    let offset = |(row, q): (usize, &[f32])| {
        let c = call.key_center(row % heads).unwrap_or_default();
        call.softmax_scale * q.iter().zip(c).map(|(q, c)| f64::from(q * c)).sum::<f64>().abs()
    };
    rows.map(offset).fold(0.0, f64::max)
}

fn output_gradient(shape: &AttentionShape, rng: &mut StdRng) -> Vec<f32> {
    (0..shape.out_elements()).map(|_| StandardNormal.sample(rng)).collect()
}

/// Every gradient of the reference, that of the sinks among them, is its slope.
#[test]
fn reference_gradients_of_random_calls_are_slopes() {
    let mut rng = StdRng::seed_from_u64(31);
    for seed in 0..150 {
        let mut random = Random::new(&mut rng, 9);
        let call = random.call();
        let data = Data::new(&call.shape, seed);
        let d_out = wide(&output_gradient(&call.shape, &mut rng));
        let mut x = [wide(&data.q), wide(&data.k), wide(&data.v)];
        let want = reference_backward(&call, &x[0], &x[1], &x[2], &d_out).unwrap();
        let loss = |random: &Random, x: &[Vec<f64>; 3]| -> f64 {
            let out = reference(&random.call(), &x[0], &x[1], &x[2]).unwrap().out;
            out.iter().zip(&d_out).map(|(o, d)| o * d).sum()
        };
        let close = |have: f64, [up, down]: [f64; 2], what: &str, random: &Random| {
            let slope = (up - down) / 2e-5;
            assert!((have - slope).abs() < 1e-7 * (1.0 + slope.abs()), "{what}: {have} {slope} {:?}", random.call());
        };
        for (tensor, have) in [&want.dq, &want.dk, &want.dv].into_iter().enumerate() {
            for _ in 0..6 {
                let i = rng.random_range(0..have.len());
                let kept = x[tensor][i];
                let ends = [1e-5, -1e-5].map(|h| {
                    x[tensor][i] = kept + h;
                    loss(&random, &x)
                });
                x[tensor][i] = kept;
                close(have[i], ends, ["dq", "dk", "dv"][tensor], &random);
            }
        }
        for head in 0..random.sinks.as_ref().map_or(0, Vec::len) {
            let ends = [1e-5, -2e-5].map(|h| {
                random.sinks.as_mut().unwrap()[head] += h;
                loss(&random, &x)
            });
            random.sinks.as_mut().unwrap()[head] += 1e-5;
            close(want.d_sinks[head], ends, "d_sinks", &random);
        }
    }
}

/// The centered form in f64 is the plain one: outputs, log-sum-exps and gradients, with masks, packed sequences, grouped heads,
/// soft-caps and sinks, for any center.
#[test]
fn centers_are_exact() {
    let mut rng = StdRng::seed_from_u64(51);
    let (mut centered, mut capped, mut sinks, mut empty) = (0, 0, 0, 0);
    for seed in 0..1000 {
        let random = Random::new(&mut rng, 24);
        let center = random_center(&random.shape, 8.0, &mut rng);
        let (plain, call) = (random.plain(), AttentionCall { center: Some(&center), ..random.plain() });
        let data = Data::new(&call.shape, seed);
        let x = [wide(&data.q), wide(&data.k), wide(&data.v)];
        let d_out = wide(&output_gradient(&call.shape, &mut rng));
        let [have, want] = [&call, &plain].map(|call| reference(call, &x[0], &x[1], &x[2]).unwrap());
        let close = |have: &[f64], want: &[f64], what: &str, size: f64| {
            for (have, want) in have.iter().zip(want) {
                let error = (have - want).abs();
                assert!(have == want || error < 1e-12 * (size + want.abs()), "{what}: {have} {want} {call:?}");
            }
        };
        // Of the size of what is added up.
        close(&have.out, &want.out, "out", 10.0);
        close(&have.lse, &want.lse, "lse", 10.0);
        let [have, want] = [&call, &plain].map(|call| reference_backward(call, &x[0], &x[1], &x[2], &d_out).unwrap());
        close(&have.dq, &want.dq, "dq", 100.0);
        close(&have.dk, &want.dk, "dk", 100.0);
        close(&have.dv, &want.dv, "dv", 100.0);
        close(&have.d_sinks, &want.d_sinks, "d_sinks", 100.0);
        centered += usize::from(center.k.is_some() && center.v.is_some());
        (capped, sinks) = (capped + usize::from(call.soft_cap.is_some()), sinks + usize::from(call.sinks.is_some()));
        let no_key = |s: &Sequence| (0..s.q.len()).filter(|i| call.visible(s, *i).is_empty()).count();
        empty += call.all_sequences().iter().map(no_key).sum::<usize>();
    }
    assert!(centered.min(capped).min(sinks).min(empty) > 200, "{centered} {capped} {sinks} {empty}");
}

/// 1,200 calls, forward and backward, by f32 sums on E4M3 operands. What is left is f32's rounding. With a center the plain
/// reference is that of `e4m3(k - c) + c`.
#[test]
fn tiled_calls_are_the_references() {
    let mut rng = StdRng::seed_from_u64(7);
    let precision = Precision { probabilities: Probabilities::F32, ..Precision::KERNEL };
    let (mut empty_rows, mut sinks, mut capped, mut unequal, mut listed, mut centered) = (0, 0, 0, 0, 0, 0);
    for seed in 0..1200 {
        let random = Random::new(&mut rng, 150);
        let call = random.call();
        let shape = call.shape;
        let data = Data::new(&shape, seed);
        let d_out = output_gradient(&shape, &mut rng);
        let plan = data.plan(&call);
        let have = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        let cast = dequantised(&call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap();
        let want = exact(&random.plain(), &Inputs { q: &cast.q, k: &cast.k, v: &cast.v });
        let raw = have
            .stats
            .logits
            .iter()
            .fold(0f32, |a, l| if l.count > 0 { a.max(l.raw_max.abs()).max(l.raw_min.abs()) } else { a });
        let largest =
            raw.max(call.sinks.map_or(0.0, |sinks| sinks.iter().fold(0.0, |a: f32, s| a.max(s.abs() as f32))));
        let noise = 2e-6 + 6e-7 * (f64::from(largest) + largest_offset(&call, &cast.q));
        let amax = |x: &[f32]| f64::from(x.iter().fold(0f32, |a, x| a.max(x.abs())));
        let of_center = |rows: Option<&Vec<Vec<f32>>>| rows.map_or(0.0, |rows| amax(&rows.concat()));
        let c_max = of_center(call.center.and_then(|center| center.k.as_ref()));
        let m_max = of_center(call.center.and_then(|center| center.v.as_ref()));
        let (v_max, do_max) = (amax(&cast.v) + m_max, amax(&d_out));
        assert!(errors(&have.out, &want.out).0 <= noise * v_max, "{:?} {call:?}", errors(&have.out, &want.out));
        for (have, want) in have.lse.iter().zip(&want.lse) {
            assert!(f64::from(*have) == *want || (f64::from(*have) - want).abs() < noise, "{have} {want} {call:?}");
        }
        empty_rows += want.lse.iter().filter(|lse| lse.is_infinite()).count();
        (sinks, capped) = (sinks + usize::from(call.sinks.is_some()), capped + usize::from(call.soft_cap.is_some()));
        centered += usize::from(call.center.is_some());
        (unequal, listed) =
            (unequal + usize::from(shape.d_head != shape.d_v), listed + usize::from(call.sequences.is_some()));

        let slopes = reference_backward(&random.plain(), &wide(&cast.q), &wide(&cast.k), &wide(&cast.v), &wide(&d_out));
        let slopes = slopes.unwrap();
        // Terms that cancel leave their own rounding, which is in proportion to them.
        let dp = do_max * v_max * (shape.d_v as f64).sqrt();
        let term = call.softmax_scale * dp;
        let saved = have.saved();
        for delta in [Delta::Probabilities, Delta::Output] {
            let how = BackwardPrecision { delta, products: GradientProducts::F32 };
            let have = backward(&call, &data.inputs(), &plan, &precision, &how, &saved, &d_out).unwrap();
            let pairs = [
                ("dq", &have.dq, &slopes.dq, term * (amax(&cast.k) + c_max)),
                ("dk", &have.dk, &slopes.dk, term * amax(&cast.q)),
                ("dv", &have.dv, &slopes.dv, do_max),
                ("d_sinks", &have.d_sinks, &slopes.d_sinks, dp * (shape.len_q * shape.batch) as f64),
            ];
            for (name, have, want, term) in pairs {
                assert_eq!(have.len(), want.len(), "{name}");
                if want.is_empty() {
                    continue;
                }
                let size = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
                let (largest, error) = errors(have, want);
                let place = format!("{name}: {error:e} and {largest:e} of {size:e}, {delta:?} {call:?}");
                assert!(error <= 4.0 * noise * size + noise * term, "{place}");
                assert!(largest <= 40.0 * noise * size + 8.0 * noise * term, "{place}");
            }
        }
    }
    // Everything that the cross product has was there.
    assert!(empty_rows > 1000 && sinks.min(capped).min(unequal).min(listed) > 300, "{empty_rows} {sinks} {capped}");
    assert!(centered > 300, "{centered}");
}

/// The precisions of kernels, accumulators of Hopper included, beside an untiled implementation with the same roundings.
#[test]
fn rounded_calls_are_as_good_as_a_plain_implementation() {
    let mut rng = StdRng::seed_from_u64(8);
    for seed in 0..200 {
        let random = Random::new(&mut rng, 150);
        if random.call().pairs() > 0 {
            for precision in [Precision::KERNEL, Precision::PAPER_LOGITS, Precision::F32] {
                compare(&random.call(), &precision, seed);
            }
        }
    }
}

/// The rows of each tensor that nothing may be read from, of one KV head or query head as of another.
struct Hidden {
    q: Vec<bool>,
    k: Vec<bool>,
}

impl Hidden {
    fn of(call: &AttentionCall<'_>) -> Self {
        let shape = &call.shape;
        let mut hidden = Self { q: vec![true; shape.batch * shape.len_q], k: vec![true; shape.batch * shape.len_k] };
        for sequence in call.all_sequences().iter() {
            for i in 0..sequence.q.len() {
                let keys = call.visible(sequence, i);
                // A row without keys is not read either.
                hidden.q[sequence.q.start + i] = keys.is_empty();
                keys.for_each(|j| hidden.k[sequence.k.start + j] = false);
            }
        }
        hidden
    }
}

/// `x` with NaN in the hidden rows.
fn planted(x: &[f32], hidden: &[bool]) -> Vec<f32> {
    let row = x.len() / hidden.len();
    x.iter().enumerate().map(|(i, x)| if hidden[i / row] { f32::NAN } else { *x }).collect()
}

#[test]
fn nan_that_must_not_be_read_leaves_no_trace() {
    let mut rng = StdRng::seed_from_u64(9);
    let (mut rows, mut keys) = (0, 0);
    for seed in 0..300 {
        let random = Random::new(&mut rng, 150);
        let call = random.call();
        let data = Data::new(&call.shape, seed);
        let d_out = output_gradient(&call.shape, &mut rng);
        let plan = data.plan(&call);
        let hidden = Hidden::of(&call);
        rows += hidden.q.iter().filter(|hidden| **hidden).count();
        keys += hidden.k.iter().filter(|hidden| **hidden).count();
        let bad =
            Data { q: planted(&data.q, &hidden.q), k: planted(&data.k, &hidden.k), v: planted(&data.v, &hidden.k) };
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let precision = pick(&mut rng, &[Precision::KERNEL, Precision::INFERENCE, Precision::TRAINING, Precision::F32]);
        let want = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        let have = Cpu.forward(&call, &bad.inputs(), &plan, &precision).unwrap();
        assert_eq!(bits(&have.out), bits(&want.out), "{precision:?} {call:?}");
        assert_eq!((bits(&have.lse), &have.stats.logits), (bits(&want.lse), &want.stats.logits), "{call:?}");
        for how in [BackwardPrecision::default(), BackwardPrecision::KERNEL] {
            let run = |data: &Data, out: &[f32], d_out: &[f32]| {
                let saved = Saved { out, lse: want.saved().lse };
                let grad = backward(&call, &data.inputs(), &plan, &precision, &how, &saved, d_out).unwrap();
                [bits(&grad.dq), bits(&grad.dk), bits(&grad.dv), bits(&grad.d_sinks)]
            };
            let out = want.saved().out;
            let clean = run(&data, out, &d_out);
            let have = run(&bad, &planted(out, &hidden.q), &planted(&d_out, &hidden.q));
            assert!(have == clean, "{how:?} {precision:?} {call:?}");
            assert!(have.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()), "{call:?}");
        }
        let finite = |x: &[f64]| x.iter().all(|x| x.is_finite());
        let x = [wide(&bad.q), wide(&bad.k), wide(&bad.v)];
        assert!(finite(&reference(&call, &x[0], &x[1], &x[2]).unwrap().out));
        let d_out = wide(&planted(&d_out, &hidden.q));
        let slopes = reference_backward(&call, &x[0], &x[1], &x[2], &d_out).unwrap();
        assert!([&slopes.dq, &slopes.dk, &slopes.dv, &slopes.d_sinks].into_iter().all(|x| finite(x)), "{call:?}");
    }
    assert!(rows > 1000 && keys > 1000);
}
