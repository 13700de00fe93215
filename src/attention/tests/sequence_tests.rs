//! Padded and packed batches, sinks, the soft-cap's extremes and heads whose v is narrower.

use super::*;

/// Rows of one sequence as a call of its own.
fn alone(shape: &AttentionShape, data: &Data, sequence: &Sequence) -> (AttentionShape, Data) {
    let rows = |x: &[f32], rows: &std::ops::Range<usize>, row: usize| x[rows.start * row..rows.end * row].to_vec();
    let shape = AttentionShape { batch: 1, len_q: sequence.q.len(), len_k: sequence.k.len(), ..*shape };
    let data = Data {
        q: rows(&data.q, &sequence.q, shape.n_q_heads * shape.d_head),
        k: rows(&data.k, &sequence.k, shape.n_kv_heads * shape.d_head),
        v: rows(&data.v, &sequence.k, shape.n_kv_heads * shape.d_v),
    };
    (shape, data)
}

/// Every sequence of a batch has the bits that it has alone, and its share of the statistics.
#[test]
fn sequences_are_calls_of_their_own() {
    let padded = AttentionShape { batch: 3, d_v: 24, ..shape(4, 2, 70, 130, 32) };
    let packed = AttentionShape { d_v: 24, ..shape(4, 2, 200, 300, 32) };
    let cases = [
        (padded, Sequence::padded(&padded, &[70, 1, 33], &[130, 90, 33], Padding::Left).unwrap()),
        (padded, Sequence::padded(&padded, &[5, 65, 64], &[130, 1, 70], Padding::Right).unwrap()),
        (packed, Sequence::packed(&[0, 64, 65, 200], &[0, 64, 170, 300], Some(&[64, 100, 130])).unwrap()),
    ];
    let sinks = [0.5, -1.0, 3.0, 0.0];
    for ((shape, sequences), mask) in
        cases.iter().flat_map(|case| [Mask::CAUSAL, Mask::NONE, Mask::sliding(40)].map(|mask| (case, mask)))
    {
        let call = AttentionCall {
            mask,
            sequences: Some(sequences),
            sinks: Some(&sinks),
            soft_cap: Some(8.0),
            ..AttentionCall::causal(*shape)
        };
        let data = Data::new(shape, 3);
        let plan = data.plan(&call);
        let d_out: Vec<f32> = (0..shape.out_elements()).map(|i| (i % 13) as f32 - 6.0).collect();
        let how = BackwardPrecision::KERNEL;
        let gradients = |call: &AttentionCall, data: &Data, out: &AttentionOutput, d_out: &[f32]| {
            let saved = Saved { out: &out.out, lse: &out.lse };
            backward(call, &data.inputs(), &plan, &Precision::TRAINING, &how, &saved, d_out).unwrap()
        };
        let all = Cpu.forward(&call, &data.inputs(), &plan, &Precision::TRAINING).unwrap();
        let all_gradients = gradients(&call, &data, &all, &d_out);
        let mut count = 0;
        for sequence in sequences {
            let (own, own_data) = alone(shape, &data, sequence);
            let own_call = AttentionCall { shape: own, sequences: None, ..call };
            let out = Cpu.forward(&own_call, &own_data.inputs(), &plan, &Precision::TRAINING).unwrap();
            let width = own.n_q_heads * own.d_v;
            let rows = sequence.q.start * width..sequence.q.end * width;
            assert_eq!(all.out[rows.clone()], out.out, "{mask:?} {sequence:?}");
            for head in 0..4 {
                for i in 0..own.len_q {
                    let place = shape.lse_at(sequence.q.start + i, head);
                    assert_eq!(all.lse[place].to_bits(), out.lse[own.lse_at(i, head)].to_bits());
                }
            }
            count += out.stats.logits[3].count;
            let grad = gradients(&own_call, &own_data, &out, &d_out[rows]);
            let width = own.n_kv_heads * own.d_head;
            assert_eq!(all_gradients.dk[sequence.k.start * width..sequence.k.end * width], grad.dk);
        }
        assert_eq!((all.stats.logits[3].count, call.pairs()), (count, count));
        let used: usize = sequences.iter().map(|sequence| sequence.k.len()).sum();
        assert_eq!(all.stats.k[1].count, (used * 32) as u64, "padding is not counted");
    }
}

#[test]
fn sequences_that_break_a_rule_are_refused() {
    let shape = AttentionShape { batch: 2, ..shape(2, 1, 4, 6, 16) };
    let data = Data::new(&shape, 0);
    let run = |sequences: &[Sequence]| {
        let call = AttentionCall { sequences: Some(sequences), ..AttentionCall::causal(shape) };
        measure(&call, &data.inputs()).map(|_| ())
    };
    assert!(run(&[]).is_ok() && run(&[Sequence { q: 0..8, k: 3..12 }]).is_ok());
    let cases = [
        (
            vec![Sequence { q: 0..4, k: 0..6 }, Sequence { q: 3..8, k: 6..12 }],
            "sequence 1 has the queries 3..8: expected a range between 4, the end of the one before it, and 8 rows",
        ),
        (
            vec![Sequence { q: 0..4, k: 0..13 }],
            "sequence 0 has the keys 0..13: expected a range between 0, the end of the one before it, and 12 rows",
        ),
    ];
    for (sequences, message) in cases {
        assert_eq!(run(&sequences).unwrap_err().to_string(), message);
    }
    let refused = [
        (Sequence::padded(&shape, &[1], &[1, 1], Padding::Left), "lengths_q has 1 entries for 2 sequences"),
        (Sequence::padded(&shape, &[1, 1], &[1, 7], Padding::Left), "lengths_k[1] = 7 is more than 6 rows"),
        (Sequence::packed(&[1, 2], &[0, 2], None), "cu_seqlens_q must start with 0"),
        (Sequence::packed(&[], &[0, 2], None), "cu_seqlens_q must start with 0"),
        (Sequence::packed(&[0, 2], &[0, 3, 2], None), "cu_seqlens_k falls from 3 to 2"),
        (Sequence::packed(&[0, 2], &[0, 2, 3], None), "cu_seqlens_k is for 2 sequences, cu_seqlens_q for 1"),
        (Sequence::packed(&[0, 2], &[0, 2], Some(&[3])), "seqused_k[0] = 3 is more than its 2 keys"),
        (Sequence::packed(&[0, 2], &[0, 2], Some(&[])), "seqused_k is for 0 sequences, cu_seqlens_q for 1"),
    ];
    for (result, message) in refused {
        let error = result.unwrap_err();
        assert!(error.is_argument());
        assert_eq!(error.to_string(), message);
    }
}

/// The sink takes its share of the weight, is in the log-sum-exp, and is all of it where a row sees no key.
#[test]
fn sinks_join_the_row_sum() {
    // Two queries and one key. The first query sees no key; the second has logit 2 and sink 2 + ln 3, so a quarter of the weight is
    // the key's.
    let sink = 2.0 + 3f64.ln();
    let call =
        AttentionCall { softmax_scale: 1.0, sinks: Some(&[sink]), ..AttentionCall::causal(shape(1, 1, 2, 1, 16)) };
    let mut data = Data { q: vec![0.0; 32], k: vec![0.0; 16], v: vec![8.0; 16] };
    (data.q[16], data.k[0]) = (2.0, 1.0);
    let one = vec![Descale::ONE];
    let operands = OperandDescales { q: one.clone(), k: one.clone(), v: Some(one.clone()), o: None };
    let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: one, operands };
    for precision in [Precision::KERNEL, Precision::TRAINING, Precision::F32] {
        let out = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        assert!((out.out[16] - 2.0).abs() < 1e-2 && out.out[..16].iter().all(|&x| x == 0.0), "{:?}", out.out);
        assert!(
            (f64::from(out.lse[1]) - (2.0 + 4f64.ln())).abs() < 1e-4 && (f64::from(out.lse[0]) - sink).abs() < 1e-6
        );
        assert_eq!((out.stats.logits[0].max, out.stats.logits[0].count), (2.0, 1), "a sink is no logit");
    }
    // However far it is from the logits, nothing overflows, and P keeps the precision of E4M3.
    for (sink, share) in [(-300.0, 1.0), (300.0, 0.0), (18.0, (-16f64).exp())] {
        let call = AttentionCall { sinks: Some(&[sink]), ..call };
        let out = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
        assert!((f64::from(out.out[16]) - 8.0 * share).abs() <= 1e-4 * 8.0 * share, "{sink}: {}", out.out[16]);
        assert!(out.lse.iter().all(|lse| lse.is_finite()));
        let shifted = ShiftedSoftmax::default().forward(&call, &data.inputs(), &plan, &Precision::F32).unwrap().output;
        assert!((f64::from(shifted.out[16]) - 8.0 * share).abs() <= 1e-4 * 8.0 * share);
    }
}

/// Extremes before and after the soft-cap; overflow is that of what is cast.
#[test]
fn the_soft_cap_is_seen_from_both_sides() {
    let plain = AttentionCall { softmax_scale: 3.0, ..AttentionCall::causal(shape(4, 2, 90, 90, 32)) };
    let capped = AttentionCall { soft_cap: Some(5.0), ..plain };
    let data = Data::new(&plain.shape, 4);
    let [raw, stats] = [plain, capped].map(|call| measure(&call, &data.inputs()).unwrap().logits);
    for (raw, stats) in raw.iter().zip(&stats) {
        assert_eq!((stats.raw_max, stats.raw_min), (raw.max, raw.min));
        assert_eq!((raw.raw_max, raw.raw_min), (raw.max, raw.min));
        assert!(raw.amax() > 20.0 && stats.amax() <= 5.0 && stats.max > 4.99);
    }
    // A descale for the cap holds every capped logit, and none of those beyond it.
    let mut plan = data.plan(&capped);
    plan.logit_descale.fill(Descale::covering(5.0, 448.0).unwrap());
    let overflow = |call: &AttentionCall| -> u64 {
        let out = Cpu.forward(call, &data.inputs(), &plan, &Precision::PAPER_LOGITS).unwrap();
        out.stats.logits.iter().map(|l| l.overflow).sum()
    };
    assert_eq!(overflow(&capped), 0);
    assert!(overflow(&plain) > 1000);
}

/// MLA's shapes: expanded, 192 channels of q and k beside 128 of v, and over its latent cache.
#[test]
fn heads_of_v_may_be_narrower() {
    for (seed, (d_head, d_v, n_kv)) in [(192, 128, 4), (576, 512, 1), (16, 24, 2)].into_iter().enumerate() {
        let call = AttentionCall::causal(AttentionShape { d_v, ..shape(4, n_kv, 70, 90, d_head) });
        for precision in [Precision::KERNEL, Precision::F32] {
            compare(&call, &precision, seed as u64);
        }
        let out = Cpu.forward(
            &call,
            &Data::new(&call.shape, 1).inputs(),
            &Data::new(&call.shape, 1).plan(&call),
            &Precision::INFERENCE,
        );
        assert_eq!(out.unwrap().out.len(), 70 * 4 * d_v);
    }
}
