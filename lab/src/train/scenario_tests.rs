//! What a scenario reports, beside the same counted from runs step by step.

use super::scenario::{WINDOW, run};
use super::*;
use crate::stress::{Mode, Scenario};
use sigmascale::attention::Cast;
use sigmascale::fp8::OnOverflow;
use sigmascale::policy::{PolicyConfig, PolicyKind, ScaledTensor};

/// `lr-spike` in 18 steps, the transition at 12, the rate times 40 for 3.
fn short(policies: &[PolicyKind]) -> LabOptions {
    let base = LabOptions::new(ModelKind::Llama);
    LabOptions {
        train: TrainOptions { batch: 2, seq_len: 24, seed: 3, compare: false, ..base.train },
        mode: Mode::Operands,
        policies: policies.iter().map(|kind| (*kind).into()).collect(),
        transition: Some(12),
        after: Some(6),
        spike: 40.0,
        spike_steps: 3,
        ..base
    }
}

/// The same run, step by step.
fn by_hand(options: &LabOptions, policy: Option<PolicyKind>, casts: OnOverflow) -> (Trainer, Vec<StepRecord>) {
    let policy = policy.map(PolicyConfig::from);
    let mut trainer = Trainer::new(TrainOptions { policy, casts, mode: options.mode, ..options.train }).unwrap();
    if policy.is_none() {
        trainer.shadow(&options.policies).unwrap();
    }
    let factors = (0..18).map(|step| if (12..15).contains(&step) { 40.0 } else { 1.0 });
    let records = factors.map(|factor| trainer.step(factor).unwrap()).collect();
    (trainer, records)
}

#[test]
fn counts_losses_and_shadows_are_those_of_the_steps() {
    let options = short(&[PolicyKind::Geometry, PolicyKind::DelayedPaper, PolicyKind::DelayedTe]);
    let result = run(Scenario::LrSpike, &options).unwrap();
    let over = |record: &StepRecord, kind: PolicyKind, own: bool| -> u64 {
        let rows = record.observed.iter().filter(|o| o.own == own && o.row.policy == kind);
        rows.map(|o| o.row.overflow).sum()
    };
    let mut spoilt = 0;
    for kind in options.policies.iter().map(PolicyConfig::kind) {
        for casts in OnOverflow::ALL {
            let (trainer, records) = by_hand(&options, Some(kind), casts);
            let run = result.training.runs.iter().find(|run| run.policy == Some(kind) && run.casts == casts).unwrap();
            let bits = |losses: &[f64]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&run.losses), bits(&records.iter().map(|r| r.loss).collect::<Vec<_>>()), "{kind}");
            let count = |of: &[StepRecord]| of.iter().filter(|r| over(r, kind, true) > 0).count();
            assert_eq!(run.overflow_steps, count(&records), "{kind}");
            assert_eq!(run.window_overflow_steps, count(&records[12..]), "{kind}");
            assert_eq!(run.overflow_values, records.iter().map(|r| over(r, kind, true)).sum::<u64>());
            assert_eq!(run.skipped, records.iter().filter(|r| r.skipped).count());
            assert_eq!(run.window_skipped, records[12..].iter().filter(|r| r.skipped).count());
            assert_eq!(run.held_out_loss, trainer.held_out_loss().unwrap());
            assert_eq!(run.loss_scale, trainer.loss_scale());
            spoilt += run.window_skipped;
        }
    }
    assert!(spoilt > 0, "a spike of 40 must cost someone a step");
    let (_, control) = by_hand(&options, None, OnOverflow::Saturate);
    for (place, kind) in options.policies.iter().map(PolicyConfig::kind).enumerate() {
        let shadow = control[12..].iter().filter(|r| over(r, kind, false) > 0).count();
        assert_eq!(result.training.shadow_window[place], shadow, "{kind}");
    }
    // The peaks are the worst-case bound's, over its own run and the shadow.
    let (_, own) = by_hand(&options, Some(PolicyKind::Geometry), OnOverflow::Saturate);
    for tensor in ScaledTensor::ALL {
        let all = own.iter().chain(&control).flat_map(|r| &r.observed);
        let reports = all.filter(|o| o.row.policy == PolicyKind::Geometry).flat_map(|o| &o.report.tensors);
        let of_tensor = reports.filter(|t| t.tensor == tensor).map(|t| f64::from(t.max_scaled));
        let want = of_tensor.fold(0.0, f64::max);
        let peak = result.training.peaks.iter().find(|peak| peak.tensor == tensor).unwrap();
        assert_eq!(peak.max_scaled, want, "{}", tensor.name());
    }
}

#[test]
fn the_window_is_ten_steps() {
    let options = LabOptions { after: Some(WINDOW + 6), ..short(&[PolicyKind::DelayedTe]) };
    let options = LabOptions { casts: vec![OnOverflow::Saturate], spike_steps: usize::MAX, ..options };
    let result = run(Scenario::LrSpike, &options).unwrap();
    let run = &result.training.runs[1];
    let mut steps: Vec<usize> =
        result.stress.trace.iter().filter(|row| row.overflow > 0 && row.step >= 12).map(|row| row.step).collect();
    steps.dedup();
    assert!(steps.iter().any(|step| *step >= 12 + WINDOW), "{steps:?}");
    assert_eq!(run.window_overflow_steps, steps.iter().filter(|step| **step < 12 + WINDOW).count());
}

#[test]
fn lists_are_neither_empty_nor_name_a_thing_twice() {
    let refused = |options: LabOptions, part: &str| {
        let error = run(Scenario::Resume, &options).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains(part), "{error}");
    };
    refused(short(&[]), "at least one policy");
    refused(short(&[PolicyKind::Current, PolicyKind::Current]), "policy current is named twice");
    refused(LabOptions { casts: vec![], ..short(&[PolicyKind::Current]) }, "at least one kind of casts");
    refused(LabOptions { casts: vec![OnOverflow::NonFinite; 2], ..short(&[PolicyKind::Current]) }, "kind of casts nan");
}

#[test]
fn formats_and_rounding_reach_the_runs() {
    let base = short(&[PolicyKind::Geometry]);
    let of = |operands, stochastic| {
        let train = TrainOptions { operands, stochastic, ..base.train };
        let options = LabOptions { train, casts: vec![OnOverflow::Saturate], ..base.clone() };
        let result = run(Scenario::LrSpike, &options).unwrap().training;
        assert_eq!((result.operands, result.stochastic), (operands.name(), stochastic));
        result.runs.iter().find(|run| run.policy.is_some()).unwrap().losses.clone()
    };
    let plain = of(Cast::E4m3, false);
    assert!([of(Cast::E5m2, false), of(Cast::E4m3, true)].iter().all(|losses| *losses != plain));
    // What the mode does not take is refused before a run.
    let train = TrainOptions { stochastic: true, ..base.train };
    let refused = run(Scenario::LrSpike, &LabOptions { train, mode: Mode::Logit, ..base });
    assert!(refused.err().unwrap().is_argument());
}
