//! The backward pass: slopes of the reference, the choices of delta and products, masks, and what is not finite.

use super::*;

/// Gradients by one way, from a forward at the same precision.
fn gradients(
    call: &AttentionCall,
    data: &Data,
    precision: &Precision,
    how: &BackwardPrecision,
    d_out: &[f32],
) -> Gradients {
    let plan = data.plan(call);
    let output = Cpu.forward(call, &data.inputs(), &plan, precision).unwrap();
    let saved = Saved { out: &output.out, lse: &output.lse };
    backward(call, &data.inputs(), &plan, precision, how, &saved, d_out).unwrap()
}

/// The operands that the products see, in f64.
fn operands(call: &AttentionCall, data: &Data) -> [Vec<f64>; 3] {
    let cast = dequantised(call, &data.inputs(), &data.plan(call), OnOverflow::Saturate).unwrap();
    [wide(&cast.q), wide(&cast.k), wide(&cast.v)]
}

fn reference_of(call: &AttentionCall, data: &Data, d_out: &[f32]) -> ReferenceGradients {
    let [q, k, v] = operands(call, data);
    reference_backward(call, &q, &k, &v, &wide(d_out)).unwrap()
}

/// Norm of the difference over the norm of `want`.
fn relative(have: &[f32], want: &[f64]) -> f64 {
    let (_, error) = errors(have, want);
    let size = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    if error == 0.0 { 0.0 } else { error / size }
}

/// Masks and lengths that a backward pass has to get right, rows without keys among them.
fn calls() -> impl Iterator<Item = AttentionCall<'static>> {
    let masks = [Mask::NONE, Mask::CAUSAL, Mask::sliding(40), window(false, Some(9))];
    let lengths = [(70, 70), (33, 150), (130, 65), (1, 90), (90, 1)];
    masks.into_iter().flat_map(move |mask| {
        lengths.into_iter().flat_map(move |(len_q, len_k)| {
            [None, Some(2.0)].map(|soft_cap| {
                let shape = AttentionShape { batch: 2, ..shape(4, 2, len_q, len_k, 24) };
                AttentionCall { mask, soft_cap, ..AttentionCall::causal(shape) }
            })
        })
    })
}

/// Central differences of the f64 reference, for the loss sum(dO * O).
#[test]
fn the_reference_gradients_are_the_references_slopes() {
    let masks = [Mask::NONE, Mask::CAUSAL, Mask::sliding(4)];
    for (mask, soft_cap) in masks.into_iter().flat_map(|mask| [(mask, None), (mask, Some(1.5))]) {
        for (len_q, len_k) in [(7, 9), (6, 3)] {
            let shape = AttentionShape { batch: 2, ..shape(4, 2, len_q, len_k, 16) };
            let call = AttentionCall { mask, soft_cap, ..AttentionCall::causal(shape) };
            let data = Data::new(&shape, 4);
            let d_out = Data::new(&shape, 5).q;
            let x = operands(&call, &data);
            let loss = |x: &[Vec<f64>; 3]| -> f64 {
                let out = reference(&call, &x[0], &x[1], &x[2]).unwrap().out;
                out.iter().zip(&d_out).map(|(o, d)| o * f64::from(*d)).sum()
            };
            let have = reference_backward(&call, &x[0], &x[1], &x[2], &wide(&d_out)).unwrap();
            for (tensor, have) in [&have.dq, &have.dk, &have.dv].into_iter().enumerate() {
                assert_eq!(have.len(), x[tensor].len());
                for i in (0..have.len()).step_by(7) {
                    let h = 1e-5;
                    let moved = |h: f64| {
                        let mut x = x.clone();
                        x[tensor][i] += h;
                        loss(&x)
                    };
                    let slope = (moved(h) - moved(-h)) / (2.0 * h);
                    let error = (have[i] - slope).abs();
                    assert!(error < 1e-8 * (1.0 + slope.abs()), "{tensor} {i}: {} {slope} {call:?}", have[i]);
                }
            }
        }
    }
}

/// With f32 sums both sources of delta give the reference's gradients, if the output is exact.
#[test]
fn gradients_are_the_references_for_every_mask_and_length() {
    for (seed, call) in calls().enumerate() {
        let data = Data::new(&call.shape, seed as u64);
        let d_out = Data::new(&call.shape, 77).q;
        let want = reference_of(&call, &data, &d_out);
        let exact = Precision { probabilities: Probabilities::F32, ..Precision::KERNEL };
        for delta in [Delta::Probabilities, Delta::Output] {
            for (products, limit) in [(GradientProducts::F32, 1e-5), (GradientProducts::Bf16, 1e-2)] {
                let have = gradients(&call, &data, &exact, &BackwardPrecision { delta, products }, &d_out);
                for (name, have, want) in
                    [("dq", &have.dq, &want.dq), ("dk", &have.dk, &want.dk), ("dv", &have.dv, &want.dv)]
                {
                    let off = relative(have, want);
                    // One key gets no gradient from its softmax: what is there is rounding alone.
                    let one = call.shape.len_k == 1 && name != "dv";
                    assert!(one || off < limit, "{name} is off by {off:e}: {delta:?} {products:?} {call:?}");
                }
            }
        }
    }
}

/// Products in FP8 by scales of rows: every row is off by the rounding alone, whatever its size; and what is not in FP8
/// has the bits of BF16 products.
#[test]
fn fp8_products_are_off_by_their_rounding() {
    let fp8 = |dq, dp, value_slack| GradientProducts::Fp8(Fp8Products { dq, dp, value_slack });
    for (seed, call) in calls().enumerate() {
        let data = Data::new(&call.shape, seed as u64);
        let (plan, d) = (data.plan(&call), call.shape.d_head);
        let mut d_out = Data::new(&call.shape, 77).q;
        // Rows of dO of every size, and one without a gradient.
        for (i, row) in d_out.chunks_exact_mut(d).enumerate() {
            let size = if i == 1 { 0.0 } else { 2f32.powi((i % 41) as i32 - 20) };
            row.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x * size).to_f32());
        }
        let output = Cpu.forward(&call, &data.inputs(), &plan, &Precision::TRAINING).unwrap();
        let saved = Saved { out: &output.out, lse: &output.lse };
        let of = |products| {
            let how = BackwardPrecision { delta: Delta::Output, products };
            backward(&call, &data.inputs(), &plan, &Precision::TRAINING, &how, &saved, &d_out).unwrap()
        };
        let bf16 = of(GradientProducts::Bf16);
        assert_eq!(of(fp8(false, false, 1)), bf16);
        let [dq, both] = [fp8(true, false, 1), fp8(true, true, 1)].map(of);
        assert_eq!((&dq.dk, &dq.dv), (&bf16.dk, &bf16.dv), "{call:?}");
        assert_eq!(both.dv, bf16.dv, "{call:?}");
        // A row has at most so much: the norm of its dS against the keys' size.
        let keys = data.k.iter().fold(0f32, |top, k| top.max(k.abs())) * (d as f32).sqrt();
        let values = data.v.iter().fold(0f32, |top, v| top.max(v.abs())) * (d as f32).sqrt();
        for (row, ((have, want), d_out)) in
            dq.dq.chunks_exact(d).zip(bf16.dq.chunks_exact(d)).zip(d_out.chunks_exact(d)).enumerate()
        {
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
            let size = call.softmax_scale as f32 * norm(&mut d_out.iter().copied()) * keys * values;
            let error = norm(&mut have.iter().zip(want).map(|(a, b)| a - b));
            assert!(error <= 0.04 * size, "row {row}: {error:e} of {size:e}, {call:?}");
            assert!(have.iter().all(|x| x.is_finite()));
        }
        assert!(both.dq.iter().chain(&both.dk).all(|x| x.is_finite()));
    }
}

/// Rows whose dS attains its bound: two keys with opposite values along dO. A code past 448 would saturate.
#[test]
fn no_code_of_ds_overflows_at_its_bound() {
    let (d, rows) = (16, 128);
    let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape(1, 1, rows, 2, d)) };
    let ends = [1.0, -1.0].map(|x| [x; 16]).concat();
    // Both keys have P from 0.5 to 0.95 and its rest; dO takes 16 places between two powers of two.
    let of_rows = |x: &dyn Fn(usize) -> f32| (0..rows).flat_map(|row| [x(row); 16]).collect::<Vec<f32>>();
    let data = Data { q: of_rows(&|row| 0.05 * (row / 16) as f32), k: ends.clone(), v: ends };
    let d_out = of_rows(&|row| 1.0 + (row % 16) as f32 / 16.0);
    let of = |products| {
        let how = BackwardPrecision { delta: Delta::Output, products };
        gradients(&call, &data, &Precision::TRAINING, &how, &d_out).dq
    };
    let bf16 = of(GradientProducts::Bf16);
    let fp8 = of(GradientProducts::Fp8(Fp8Products { dq: true, dp: false, value_slack: 1 }));
    for (row, (have, want)) in fp8.chunks_exact(d).zip(bf16.chunks_exact(d)).enumerate() {
        let off = (have[0] - want[0]).abs() / want[0].abs();
        assert!(off <= 0.07, "row {row}: {} is off by {off:e} of {}", have[0], want[0]);
    }
}

#[test]
fn gradients_of_rows_without_keys_are_zero() {
    let call = AttentionCall::causal(shape(2, 1, 6, 2, 16));
    let data = Data::new(&call.shape, 4);
    for how in [BackwardPrecision::default(), BackwardPrecision::KERNEL] {
        let grad = gradients(&call, &data, &Precision::TRAINING, &how, &data.q);
        assert!(grad.dq[..4 * 2 * 16].iter().all(|&x| x == 0.0));
        assert!(grad.dq[4 * 2 * 16..].iter().any(|&x| x != 0.0));
        assert!(grad.dk.iter().chain(&grad.dv).all(|x| x.is_finite()));
    }
}

#[test]
fn lengths_of_the_backwards_tensors_are_checked() {
    let call = AttentionCall::causal(shape(2, 1, 6, 2, 16));
    let data = Data::new(&call.shape, 4);
    let plan = data.plan(&call);
    let output = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
    let run = |out: &[f32], lse: &[f32], d_out: &[f32], delta: Delta| {
        let how = BackwardPrecision { delta, ..BackwardPrecision::default() };
        backward(&call, &data.inputs(), &plan, &Precision::KERNEL, &how, &Saved { out, lse }, d_out).map(|_| ())
    };
    let (out, lse) = (&output.out[..], &output.lse[..]);
    let cases = [
        (run(out, &lse[1..], &data.q, Delta::Probabilities), "lse has 11 values where the shape asks for 12"),
        (run(out, lse, &data.q[1..], Delta::Probabilities), "d_out has 191 values where the shape asks for 192"),
        (run(&[], lse, &data.q, Delta::Output), "out has 0 values where the shape asks for 192"),
    ];
    for (result, message) in cases {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
    assert!(run(&[], lse, &data.q, Delta::Probabilities).is_ok(), "P and dP need no output");
}

/// P of a backward pass sums to one with the log-sum-exp of a forward that took the sums of Q K^T in the same way, and with
/// no other: with dO of ones, dV is the sum of P over the queries, which all see the same keys.
#[test]
fn logits_are_recomputed_as_the_forward_had_them() {
    let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape(2, 1, 70, 90, 64)) };
    let mut data = Data::new(&call.shape, 8);
    // Sums of one sign, which the FP8 accumulator makes smaller.
    data.q.iter_mut().chain(&mut data.k).for_each(|x| *x = x.abs());
    let plan = data.plan(&call);
    let ones = vec![1.0; call.shape.q_elements()];
    let off = |forward: &Precision, after: &Precision| -> f64 {
        let output = Cpu.forward(&call, &data.inputs(), &plan, forward).unwrap();
        let saved = Saved { out: &output.out, lse: &output.lse };
        let how = BackwardPrecision::default();
        let dv = backward(&call, &data.inputs(), &plan, after, &how, &saved, &ones).unwrap().dv;
        let sum: f64 = dv.iter().step_by(64).map(|&x| f64::from(x)).sum();
        (sum / 140.0 - 1.0).abs()
    };
    assert!(off(&Precision::KERNEL, &Precision::KERNEL) < 1e-6);
    assert!(off(&Precision::TRAINING, &Precision::TRAINING) < 1e-6);
    assert!(off(&Precision::TRAINING, &Precision::KERNEL) > 1e-4);
}

/// What is not finite in one row of q or dO, or in one key or value, reaches the gradients that depend on it and no others,
/// whose bits stay what they were.
#[test]
fn gradients_confine_what_is_not_finite() {
    let shape = shape(4, 2, 70, 70, 16);
    let call = AttentionCall { mask: Mask::sliding(20), ..AttentionCall::causal(shape) };
    let clean = Data::new(&shape, 3);
    let plan = clean.plan(&call);
    let d_out = Data::new(&shape, 5).q;
    let run = |data: &Data, d_out: &[f32], how: &BackwardPrecision| {
        // The log-sum-exp and the output of the clean forward in every row that the bad value does not touch.
        let output = Cpu.forward(&call, &data.inputs(), &plan, &Precision::TRAINING).unwrap();
        let saved = Saved { out: &output.out, lse: &output.lse };
        backward(&call, &data.inputs(), &plan, &Precision::TRAINING, how, &saved, d_out).unwrap()
    };
    for how in [BackwardPrecision::default(), BackwardPrecision::KERNEL] {
        let want = run(&clean, &d_out, &how);
        for tensor in ["q", "k", "v", "d_out"] {
            let (mut data, mut bad_d_out) = (Data::new(&shape, 3), d_out.clone());
            let (head, row) = (2, 40);
            match tensor {
                "q" => data.q[shape.q_at(row, head) + 5] = f32::NAN,
                "k" => data.k[shape.k_at(row, 1) + 5] = f32::NAN,
                "v" => data.v[shape.k_at(row, 1) + 5] = f32::NAN,
                _ => bad_d_out[shape.q_at(row, head) + 5] = f32::INFINITY,
            }
            let have = run(&data, &bad_d_out, &how);
            let query = matches!(tensor, "q" | "d_out");
            // Queries that the bad value is in or that see it, and the keys that those see.
            let rows = if query { row..row + 1 } else { row..row + 20 };
            let keys = rows.start - 19..rows.end;
            for at in 0..70 {
                for (h, touched) in (0..4).map(|h| (h, rows.contains(&at) && if query { h == head } else { h >= 2 })) {
                    let span = shape.q_at(at, h)..shape.q_at(at, h) + 16;
                    let same = have.dq[span.clone()] == want.dq[span];
                    assert!(touched || same, "dq of row {at}, head {h}: bad {tensor}, {how:?}");
                }
                for (h, touched) in (0..2).map(|h| (h, h == 1 && keys.contains(&at))) {
                    let span = shape.k_at(at, h)..shape.k_at(at, h) + 16;
                    let same = have.dk[span.clone()] == want.dk[span.clone()] && have.dv[span.clone()] == want.dv[span];
                    assert!(touched || same, "dk or dv of key {at}, KV head {h}: bad {tensor}, {how:?}");
                }
            }
            assert!(have.dq[shape.q_at(row, head)..][..16].iter().any(|x| !x.is_finite()), "{tensor}");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit_of_a_gradient() {
    let call = AttentionCall::causal(AttentionShape { batch: 2, ..shape(4, 2, 150, 150, 32) });
    let data = Data::new(&call.shape, 9);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| gradients(&call, &data, &Precision::TRAINING, &BackwardPrecision::KERNEL, &data.q))
    };
    assert_eq!(run(1), run(3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Gradients of any call against f64 on the same operands: f32 products to f32, BF16 products to BF16.
    #[test]
    fn any_gradients_are_the_references(
        (len_q, len_k) in (1usize..150, 2usize..150),
        (n_kv, group, batch) in (1usize..3, 1usize..4, 1usize..3),
        d_head in prop::sample::select(vec![16usize, 24, 64, 72]),
        causal in any::<bool>(),
        width in prop::option::of(1usize..100),
        soft_cap in prop::option::of(1.0f64..30.0),
        softmax_scale in 0.05f64..0.3,
        delta in prop::sample::select(vec![Delta::Probabilities, Delta::Output]),
        seed in any::<u64>(),
    ) {
        let shape = AttentionShape { batch, n_q_heads: n_kv * group, n_kv_heads: n_kv, len_q, len_k, d_head, d_v: d_head };
        let call = AttentionCall { shape, mask: window(causal, width), softmax_scale, soft_cap, ..AttentionCall::causal(shape) };
        let data = Data::new(&shape, seed);
        let d_out = Data::new(&shape, seed ^ 1).q;
        let want = reference_of(&call, &data, &d_out);
        let exact = Precision { probabilities: Probabilities::F32, ..Precision::KERNEL };
        // Gradients that cancel to little are as far off as what they cancel from, which dV has the size of.
        let size = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let scale = |x: &[f64]| size(x).max(0.02 * size(&want.dv));
        for (products, limit) in [(GradientProducts::F32, 2e-5), (GradientProducts::Bf16, 2e-2)] {
            let have = gradients(&call, &data, &exact, &BackwardPrecision { delta, products }, &d_out);
            for (name, have, want) in [("dq", &have.dq, &want.dq), ("dk", &have.dk, &want.dk), ("dv", &have.dv, &want.dv)] {
                let off = errors(have, want).1 / scale(want);
                prop_assert!(off < limit || want.iter().all(|&x| x == 0.0), "{name}: {off:e} {products:?} {call:?}");
            }
        }
    }
}
