//! The forward with Hopper's accumulators.

use super::*;

const ACCUMULATORS: [PvAccumulator; 4] = [
    PvAccumulator::F32,
    PvAccumulator::F16,
    PvAccumulator::Fp8 { promote_every: 64 },
    PvAccumulator::Fp8 { promote_every: 2048 },
];

#[test]
fn every_accumulator_is_near_a_plain_implementation() {
    for accumulator in ACCUMULATORS {
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::sliding(33)] {
            for (len_q, len_k) in [(69, 75), (113, 203), (80, 3), (1, 513)] {
                let call = AttentionCall { mask, ..AttentionCall::causal(shape(6, 2, len_q, len_k, 24)) };
                let data = Data::new(&call.shape, 1);
                let plan = data.plan(&call);
                let precision = Precision::hopper(accumulator);
                let have = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
                let cast = dequantised(&call, &data.inputs(), &plan, precision.on_overflow).unwrap();
                let want = exact(&call, &Inputs { q: &cast.q, k: &cast.k, v: &cast.v });
                // P's rounding, the truncated logits, and what 2^-13 of 513 summed keys can be.
                let p = if precision.probabilities == Probabilities::E4m3 { 0.035 } else { 1e-3 };
                let v = have.stats.v.iter().fold(0.0, |a: f32, v| a.max(v.amax));
                let (largest, _) = errors(&have.out, &want.out);
                assert!(largest < f64::from(v) * (p + 3e-3), "{largest} {accumulator} {call:?}");
                for (have, want) in have.lse.iter().zip(&want.lse) {
                    assert!(f64::from(*have) == *want || (f64::from(*have) - want).abs() < 2e-3, "{have} {want}");
                }
            }
        }
    }
}

/// 2048 keys of equal weight and value: products of 1 leave the sum when it passes `2^13`, where a second level begins anew.
#[test]
fn the_second_level_keeps_what_the_accumulator_would_lose() {
    let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape(1, 1, 1, 4096, 16)) };
    // Values of 17/16, whose last bit is gone past 512 products of 2^8.
    let data = Data { q: vec![0.0; 16], k: vec![1.0; 4096 * 16], v: vec![1.125; 4096 * 16] };
    let one = vec![Descale::ONE];
    let operands = OperandDescales { q: one.clone(), k: one.clone(), v: Some(one.clone()), o: None };
    let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: one, operands };
    let out = |accumulator| {
        let out = Cpu.forward(&call, &data.inputs(), &plan, &Precision::hopper(accumulator)).unwrap().out;
        assert!(out.iter().all(|x| *x == out[0]));
        out[0]
    };
    assert_eq!(out(PvAccumulator::F32), 1.125);
    assert_eq!(out(PvAccumulator::F16), 1.125);
    assert_eq!(out(PvAccumulator::Fp8 { promote_every: 512 }), 1.125);
    assert!(out(PvAccumulator::Fp8 { promote_every: 4096 }) < 1.124);
    assert!(out(PvAccumulator::Fp8 { promote_every: 2048 }) > out(PvAccumulator::Fp8 { promote_every: 4096 }));
}

#[test]
fn what_is_not_finite_stays_in_its_rows_with_every_accumulator() {
    let shape = shape(4, 2, 70, 70, 16);
    let call = AttentionCall::causal(shape);
    for accumulator in ACCUMULATORS {
        let precision = Precision::hopper(accumulator);
        let clean = Data::new(&shape, 3);
        let plan = clean.plan(&call);
        let want = Cpu.forward(&call, &clean.inputs(), &plan, &precision).unwrap();
        let mut data = Data::new(&shape, 3);
        data.v[shape.k_at(40, 1) + 5] = f32::NAN;
        let have = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        for head in 0..4 {
            for row in 0..70 {
                for c in 0..16 {
                    let at = shape.q_at(row, head) + c;
                    let touched = head >= 2 && row >= 40 && c == 5;
                    assert!(
                        if touched { have.out[at].is_nan() } else { have.out[at] == want.out[at] },
                        "{head} {row} {c}"
                    );
                }
            }
        }
    }
}

#[test]
fn accumulators_have_names() {
    for accumulator in ACCUMULATORS {
        assert_eq!(accumulator.to_string().parse::<PvAccumulator>().unwrap(), accumulator);
    }
    assert_eq!(PvAccumulator::Fp8 { promote_every: 256 }.to_string(), "fp8-256");
    for name in ["", "fp8", "fp8-", "fp8-x", "bf16", "bf16-", "FP8-64"] {
        let error = name.parse::<PvAccumulator>().unwrap_err();
        assert!(error.is_argument() && error.to_string().contains("expected f32, f16, fp8-N or bf16-N"), "{error}");
    }
    assert_eq!(PvAccumulator::Bf16 { tile: 16 }.to_string(), "bf16-16");
    assert_eq!("bf16-16".parse::<PvAccumulator>().unwrap(), PvAccumulator::Bf16 { tile: 16 });
    for name in ["bf16-0", "bf16-48"] {
        let error = name.parse::<PvAccumulator>().unwrap_err();
        assert!(error.to_string().ends_with("expected a divisor of 64"), "{error}");
    }
    for name in ["fp8-0", "fp8-100"] {
        let error = name.parse::<PvAccumulator>().unwrap_err();
        assert!(error.to_string().ends_with("expected a multiple of 64 above zero"), "{error}");
    }
}

#[test]
fn accumulators_refuse_what_they_cannot_sum() {
    let call = AttentionCall::causal(shape(4, 2, 3, 3, 16));
    let data = Data::new(&call.shape, 0);
    let plan = data.plan(&call);
    let refused = |plan: &ScalePlan, precision: Precision| {
        let error = Cpu.forward(&call, &data.inputs(), plan, &precision).unwrap_err();
        assert!(error.is_argument(), "{error}");
        error.to_string()
    };
    let fp8 = PvAccumulator::Fp8 { promote_every: 64 };
    let e4m3 = Precision::hopper(fp8);
    assert_eq!(
        refused(&plan, Precision { operands: Cast::F32, ..e4m3 }),
        "the FP8 accumulator of Q K^T needs operands in E4M3"
    );
    assert_eq!(
        refused(&plan, Precision { probabilities: Probabilities::F16, ..e4m3 }),
        "the accumulator fp8-64 of P V does not take P in F16: see Precision::with_pv_accumulator"
    );
    let without = ScalePlan { operands: OperandDescales { v: None, ..plan.operands.clone() }, ..plan.clone() };
    for accumulator in [fp8, PvAccumulator::F16] {
        let wanted = format!("the accumulator {accumulator} of P V needs v in E4M3, by descales of the plan");
        assert_eq!(refused(&without, Precision::hopper(accumulator)), wanted);
        let uncast = Precision { operands: Cast::F32, ..Precision::KERNEL.with_pv_accumulator(accumulator) };
        assert_eq!(refused(&plan, uncast), wanted);
    }
    let odd = Precision::hopper(PvAccumulator::Fp8 { promote_every: 96 });
    assert!(refused(&plan, odd).contains("promoted every 96 keys"));
}
