//! Attention with the casts of BF16 training, and the error of delta that they leave in the gradients.

use super::*;
use half::bf16;

const D: usize = 32;

fn bf16_of(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// One row of FlashAttention's Algorithm 1 with every cast, tile by tile.
fn plain_row(q: &[f32], k: &[f32], v: &[f32], tau: f32, tile: usize) -> Vec<f32> {
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0f32, vec![0f32; D]);
    for (k, v) in k.chunks(tile * D).zip(v.chunks(tile * D)) {
        let logits = k.chunks_exact(D).map(|k| tau * q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>());
        let logits: Vec<f32> = logits.collect();
        let new = logits.iter().copied().fold(max, f32::max);
        let rescale = (max - new).exp();
        sum *= rescale;
        out.iter_mut().for_each(|out| *out *= rescale);
        for (s, v) in logits.iter().zip(v.chunks_exact(D)) {
            let p = (s - new).exp();
            sum += p;
            out.iter_mut().zip(v).for_each(|(out, v)| *out += bf16_of(p) * v);
        }
        out.iter_mut().for_each(|out| *out = bf16_of(*out));
        max = new;
    }
    out.iter().map(|out| bf16_of(out / sum)).collect()
}

fn one_head(len: usize) -> AttentionCall<'static> {
    AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape(1, 1, len, len, D)) }
}

fn tiled(tile: usize) -> Precision {
    Precision { pv_accumulator: PvAccumulator::Bf16 { tile }, ..Precision::BF16 }
}

#[test]
fn every_cast_of_bf16_is_where_the_paper_has_it() {
    let call = one_head(150);
    let mut data = Data::new(&call.shape, 3);
    let plan = data.plan(&call);
    let unrounded = Cpu.forward(&call, &data.inputs(), &plan, &tiled(64)).unwrap().out;
    for x in [&mut data.q, &mut data.k, &mut data.v] {
        x.iter_mut().for_each(|x| *x = bf16_of(*x));
    }
    let mut outputs = Vec::new();
    for tile in [64, 32, 16] {
        let have = Cpu.forward(&call, &data.inputs(), &plan, &tiled(tile)).unwrap().out;
        let rows = data.q.chunks_exact(D);
        let want: Vec<f32> =
            rows.flat_map(|q| plain_row(q, &data.k, &data.v, call.softmax_scale as f32, tile)).collect();
        assert!(have.iter().all(|&x| x == bf16_of(x)));
        // f32 sums in another order round to the next BF16 number now and then, and never further.
        let equal = have.iter().zip(&want).filter(|(a, b)| a == b).count() as f64 / have.len() as f64;
        assert!(equal > 0.97, "tile {tile}: {equal}");
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.02 * b.abs().max(0.05);
        assert!(have.iter().zip(&want).all(near), "tile {tile}");
        outputs.push(have);
    }
    assert!(outputs[0] != outputs[1] && outputs[1] != outputs[2], "tiles round at other places");
    assert_eq!(unrounded, outputs[0], "operands are rounded by the call");
    let error = Cpu.forward(&call, &data.inputs(), &plan, &tiled(48)).unwrap_err();
    assert!(error.is_argument() && error.to_string().contains("divisor of 64"), "{error}");
    let mixed = Precision { probabilities: Probabilities::F32, ..Precision::BF16 };
    assert!(Cpu.forward(&call, &data.inputs(), &plan, &mixed).unwrap_err().is_argument());
    assert_eq!("bf16-32".parse::<PvAccumulator>().unwrap(), PvAccumulator::Bf16 { tile: 32 });
    assert_eq!(PvAccumulator::Bf16 { tile: 32 }.to_string(), "bf16-32");
}

/// 8 sequences of 16 tokens, each three times, with orthogonal keys that share channel 0; V is negative. Rows have maxima of
/// 9 to 16, each its own, and every one repeats three times.
fn repeated() -> (AttentionCall<'static>, Data) {
    const ROWS: usize = 8 * 48;
    let shape = AttentionShape { batch: 8, ..shape(1, 1, 48, 48, D) };
    let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape) };
    let code = |token: usize, a: usize| if (a & token).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let mut rng = StdRng::seed_from_u64(1);
    let mut normal = || -> f32 { StandardNormal.sample(&mut rng) };
    let values: Vec<f32> = (0..ROWS / 3 * D).map(|_| bf16_of(-(0.6 * normal()).exp())).collect();
    let row = |i: usize| (0..D).map(move |a| code(i % 48 / 3 + 1, a));
    let data = Data {
        q: (0..ROWS).flat_map(|i| row(i).map(move |x| bf16_of((1.6 + 0.003 * i as f32) * x))).collect(),
        k: (0..ROWS).flat_map(row).collect(),
        v: (0..ROWS).flat_map(|i| values[i / 3 * D..][..D].to_vec()).collect(),
    };
    (call, data)
}

/// Mean of `|O| / |exact O| - 1`.
fn growth(out: &[f32], want: &ReferenceOutput) -> f64 {
    out.iter().zip(&want.out).map(|(have, want)| f64::from(*have) / want - 1.0).sum::<f64>() / out.len() as f64
}

#[test]
fn repeated_maxima_make_the_output_too_large_and_the_shifted_softmax_does_not() {
    let (call, data) = repeated();
    let (plan, want) = (data.plan(&call), exact(&call, &data.inputs()));
    let plain = growth(&Cpu.forward(&call, &data.inputs(), &plan, &Precision::BF16).unwrap().out, &want);
    assert!(plain > 2e-4, "{plain}");
    let shifted = ShiftedSoftmax::default().forward(&call, &data.inputs(), &plan, &Precision::BF16).unwrap();
    assert_eq!(shifted.repeated, [8 * 48]);
    let shifted = growth(&shifted.output.out, &want);
    assert!(shifted.abs() < plain / 2.0, "{shifted} against {plain}");
}

/// FlashAttention-2 prints `delta = rowsum(dO o O)`. With the stored output's error rows of dS no longer sum to zero, and
/// dQ gets a part along what the keys share.
#[test]
fn delta_from_a_biased_output_pushes_dq_along_what_keys_share() {
    let (call, data) = repeated();
    let plan = data.plan(&call);
    let forward = Cpu.forward(&call, &data.inputs(), &plan, &Precision::BF16).unwrap();
    let d_out: Vec<f32> = forward.out.iter().map(|o| 0.1 * o).collect();
    let shared = |delta: Delta| {
        let how = BackwardPrecision { delta, ..BackwardPrecision::default() };
        let saved = Saved { out: &forward.out, lse: &forward.lse };
        let gradients = backward(&call, &data.inputs(), &plan, &Precision::BF16, &how, &saved, &d_out).unwrap();
        gradients.dq.iter().step_by(D).map(|&x| f64::from(x)).collect::<Vec<f64>>()
    };
    let (printed, right) = (shared(Delta::Output), shared(Delta::Probabilities));
    let negative = printed.iter().filter(|&&x| x < 0.0).count();
    assert!(4 * negative > 3 * printed.len(), "{negative} of {} rows have the sign of a large delta", printed.len());
    let sum = |rows: &[f64]| rows.iter().sum::<f64>().abs();
    assert!(sum(&right) < 1e-2 * sum(&printed), "{} against {}", sum(&right), sum(&printed));
    // The reference takes delta from P and dP.
    let wide = |x: &[f32]| super::wide(x);
    let want = reference_backward(&call, &wide(&data.q), &wide(&data.k), &wide(&data.v), &wide(&d_out)).unwrap();
    let want: Vec<f64> = want.dq.iter().step_by(D).copied().collect();
    assert!(sum(&want) < 1e-2 * sum(&printed));
}
