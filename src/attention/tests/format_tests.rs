//! Operands in other formats than E4M3, and stochastic rounding.

use super::*;

#[test]
fn other_formats_take_the_plan_s_range_to_their_own() {
    let call = AttentionCall::causal(shape(4, 2, 70, 70, 16));
    let data = Data::new(&call.shape, 8);
    let plan = data.plan(&call);
    for (operands, format, factor) in [(Cast::E5m2, Format::E5m2, 128.0), (Cast::E4m3Ieee, Format::E4m3Ieee, 0.5)] {
        let precision = Precision { operands, ..Precision::F32 };
        let have = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        let round = |x: &[f32], d: usize, descales: &[Descale], group: usize| -> Vec<f32> {
            let one = |(i, x): (usize, &f32)| {
                let descale = descales[i / d / group % descales.len()].get();
                format.round(x / descale * factor, OnOverflow::NonFinite) / factor * descale
            };
            x.iter().enumerate().map(one).collect()
        };
        let rounded = Data {
            q: round(&data.q, 16, &plan.operands.q, 2),
            k: round(&data.k, 16, &plan.operands.k, 1),
            v: round(&data.v, 16, plan.operands.v.as_ref().unwrap(), 1),
        };
        assert!(rounded.q.iter().chain(&rounded.k).chain(&rounded.v).all(|x| x.is_finite()), "{format:?}");
        let want = exact(&call, &rounded.inputs());
        assert!(errors(&have.out, &want.out).0 < 1e-3, "{format:?}");
        assert!(errors(&have.out, &exact(&call, &data.inputs()).out).0 > 1e-2, "{format:?} rounds");
        assert!(have.stats.q.iter().all(|q| q.overflow == 0));
        // The backward pass multiplies the same operands.
        let d_out = vec![1.0; have.out.len()];
        let saved = Saved { out: &have.out, lse: &have.lse };
        let how = BackwardPrecision::default();
        let have = backward(&call, &data.inputs(), &plan, &precision, &how, &saved, &d_out).unwrap();
        let wide = |x: &[f32]| super::wide(x);
        let want = reference_backward(&call, &wide(&rounded.q), &wide(&rounded.k), &wide(&rounded.v), &wide(&d_out));
        assert!(errors(&have.dk, &want.unwrap().dk).0 < 1e-2, "{format:?}");
    }
}

#[test]
fn stochastic_rounding_keeps_the_mean() {
    // One key: the output is the rounded value.
    let call = AttentionCall::causal(shape(1, 1, 1, 1, 16));
    let v: Vec<f32> = (0..16).map(|i| 1.0 + 0.01 * i as f32).collect();
    let data = Data { q: vec![1.0; 16], k: vec![1.0; 16], v: v.clone() };
    let one = vec![Descale::ONE];
    let operands = OperandDescales { q: one.clone(), k: one.clone(), v: Some(one.clone()), o: None };
    let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: one, operands };
    let run = |rounding| {
        let precision = Precision { operands: Cast::E4m3, rounding, ..Precision::F32 };
        Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap().out
    };
    assert!(run(Rounding::Nearest)[1..6].iter().all(|&x| x == 1.0), "nearest rounds 1.05 to 1 every time");
    const SEEDS: u64 = 2000;
    let mut mean = [0f64; 16];
    for seed in 0..SEEDS {
        let out = run(Rounding::Stochastic { seed });
        assert!(out.iter().all(|x| [1.0, 1.125, 1.25].contains(x)), "{out:?}");
        mean.iter_mut().zip(&out).for_each(|(mean, x)| *mean += f64::from(*x) / SEEDS as f64);
    }
    // Four deviations of a mean of values that lie 0.125 apart.
    let near = |(mean, v): (&f64, &f32)| (mean - f64::from(*v)).abs() < 4.0 * 0.0625 / (SEEDS as f64).sqrt();
    assert!(mean.iter().zip(&v).all(near), "{mean:?}");
    let [a, b] = [7, 8].map(|seed| run(Rounding::Stochastic { seed }));
    assert_eq!(a, run(Rounding::Stochastic { seed: 7 }));
    assert_ne!(a, b);
}
