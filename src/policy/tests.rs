use super::*;
use crate::bound::{HeadBounds, LayerBounds, OperandBound};
use crate::plan::{Granularity, ScalePlan};
use crate::stats::{CastStats, LogitStats, StepStats};

fn shape() -> PolicyShape {
    PolicyShape::uniform(2, 4, 2)
}

fn bounds(layer: usize) -> LayerBounds {
    let operand = |rounded: f64| OperandBound { exact: rounded * 0.9, rounded };
    let head =
        |rounded: f64| HeadBounds { rounded: Some(rounded), rank_aware: Some(rounded / 4.0), ..HeadBounds::default() };
    LayerBounds {
        layer,
        heads: [100.0, 200.0, 300.0, 400.0].map(head).to_vec(),
        q: [10.0, 20.0, 40.0, 30.0].map(operand).to_vec(),
        k: [5.0, 6.0].map(operand).to_vec(),
        v: Some([7.0, 8.0].map(operand).to_vec()),
        m: None,
    }
}

/// Logits are negative, so that only |min| tells their size.
fn stats(logits: [f32; 4], q: [f32; 4], k: [f32; 2], v: [f32; 2], o: [f32; 4]) -> StepStats {
    let cast =
        |amax: f32| CastStats { amax, count: 10, non_finite: u64::from(!amax.is_finite()), ..CastStats::default() };
    let logit = |amax: f32| LogitStats {
        max: 0.0,
        min: -amax,
        count: 10,
        non_finite: u64::from(!amax.is_finite()),
        ..LogitStats::default()
    };
    StepStats {
        logits: logits.map(logit).to_vec(),
        q: q.map(cast).to_vec(),
        k: k.map(cast).to_vec(),
        v: v.map(cast).to_vec(),
        o: o.map(cast).to_vec(),
    }
}

fn even(amax: f32) -> StepStats {
    stats([amax; 4], [amax; 4], [amax; 2], [amax; 2], [amax; 4])
}

fn values(row: &[crate::Descale]) -> Vec<f32> {
    row.iter().map(|descale| descale.get()).collect()
}

fn step(policy: &mut dyn Policy, layer: usize, stats: &StepStats) -> (ScalePlan, Report) {
    let bounds = bounds(layer);
    let plan = policy.plan(&bounds, Some(stats)).unwrap();
    let report = policy.observe(&plan, &bounds, stats).unwrap();
    (plan, report)
}

#[test]
fn geometry_takes_bounds_and_groups() {
    let policy = PolicyConfig::from(PolicyKind::Geometry).build(shape()).unwrap();
    let plan = policy.plan(&bounds(1), None).unwrap();
    assert_eq!(plan.layer, 1);
    let near = |a: f32, b: f64| (f64::from(a) - b).abs() < 2e-7 * b;
    assert!(near(plan.logit_descale[3].get(), 400.0 / (0.8 * 448.0)));
    assert!(near(plan.operands.q[0].get(), 20.0 / 448.0) && near(plan.operands.q[1].get(), 40.0 / 448.0));
    assert!(near(plan.operands.o.unwrap()[1].get(), 16.0 / 448.0));
    assert!(policy.assumption().is_none());

    let policy = PolicyConfig::from(PolicyKind::GeometryCStar).build(shape()).unwrap();
    let plan = policy.plan(&bounds(1), None).unwrap();
    assert!(near(plan.logit_descale[3].get(), 100.0 / (0.8 * 448.0)));
    assert!(policy.assumption().unwrap().contains("uniform on the sphere"));
}

#[test]
fn a_report_names_overflow_and_values_beyond_the_bound() {
    let mut policy = PolicyConfig::from(PolicyKind::Geometry).build(shape()).unwrap();
    let (_, report) =
        step(&mut *policy, 0, &stats([99.0, 199.0, 299.0, 399.0], [9.0; 4], [4.0; 2], [7.0, 7.0], [1.0; 4]));
    assert!(report.tensors.iter().all(|tensor| !tensor.overflowed() && tensor.beyond_bound == 0));
    assert!((report.tensor(ScaledTensor::Logit).max_scaled - 399.0 / 400.0 * 358.4).abs() < 1e-3);
    // Query heads 0 and 1 share the descale of the larger; k of head 1 is past its bound.
    let (_, report) = step(&mut *policy, 0, &stats([1.0; 4], [20.5, 1.0, 1.0, 1.0], [1.0, 6.5], [1.0; 2], [1.0; 4]));
    assert!(report.tensor(ScaledTensor::Q).overflowed() && report.tensor(ScaledTensor::K).overflowed());
    assert_eq!((report.tensor(ScaledTensor::Q).beyond_bound, report.tensor(ScaledTensor::K).beyond_bound), (1, 1));
    assert_eq!(report.tensor(ScaledTensor::Q).tensor, ScaledTensor::Q);
}

#[test]
fn auto_c_burn_in_equals_a_hand_computation() {
    let config = AutoCConfig { burn_in: 3, kappa: 1.5, pooling: Pooling::Layer, ..AutoCConfig::default() };
    let mut policy = AutoC::new(config, shape()).unwrap();
    let worst_case = Geometry::worst_case(GeometryConfig::default(), shape()).unwrap();
    // Ratios of logits: 0.1 0.1 0.1 0.1; 0.05 0.2 0.1 0.3; 0.1 0.1 0.25 0.1. With 12 values the rank is 12: 0.3.
    // q: 10/20, 8/40; 2/20, 30/40; 2/20, 2/40 -> 0.75. k: 1/5 1/6; 2/5, 3/6; .. -> 0.5. v: 0.7/7 .. -> 0.125.
    let steps = [
        stats([10.0, 20.0, 30.0, 40.0], [10.0, 2.0, 1.0, 8.0], [1.0, 1.0], [0.7, 0.8], [0.1; 4]),
        stats([5.0, 40.0, 30.0, 120.0], [2.0, 2.0, 30.0, 1.0], [2.0, 3.0], [0.7, 1.0], [0.1; 4]),
        stats([10.0, 20.0, 75.0, 40.0], [2.0, 2.0, 2.0, 1.0], [1.0, 1.0], [0.7, 0.8], [0.1; 4]),
    ];
    for (i, stats) in steps.iter().enumerate() {
        let (plan, report) = step(&mut policy, 0, stats);
        assert_eq!(plan, worst_case.plan(&bounds(0), None).unwrap(), "burn-in uses the worst-case bound");
        assert_eq!(report.events.len(), if i == 2 { 4 } else { 0 });
    }
    assert!((policy.phase(ScaledTensor::Logit, 0, 0).c() - 0.45).abs() < 1e-12);
    assert_eq!(policy.phase(ScaledTensor::Q, 0, 0), Phase::Frozen { c: 1.0 }, "1.125 stops at the worst-case bound");
    assert!((policy.phase(ScaledTensor::K, 0, 1).c() - 0.75).abs() < 1e-7);
    assert!((policy.phase(ScaledTensor::V, 0, 1).c() - 0.1875).abs() < 1e-7);
    assert_eq!(policy.phase(ScaledTensor::Logit, 1, 0), Phase::BurnIn, "layer 1 has its own pool");

    let (plan, report) = step(&mut policy, 0, &steps[0]);
    assert!((f64::from(plan.logit_descale[3].get()) - 0.45 * 400.0 / 358.4).abs() < 1e-6);
    assert!((f64::from(plan.operands.k[1].get()) - 0.75 * 6.0 / 448.0).abs() < 1e-8);
    assert!((f64::from(plan.operands.o.as_ref().unwrap()[1].get()) - 2.0 * 0.1875 * 8.0 / 448.0).abs() < 1e-8);
    assert!(report.events.is_empty() && report.fallback.is_none());

    // 0.45 * 300 / 0.8 = 168.75 is the limit of head 2; 170 overflows.
    let (_, report) = step(&mut policy, 0, &stats([1.0, 1.0, 170.0, 1.0], [1.0; 4], [1.0; 2], [0.7; 2], [0.1; 4]));
    assert_eq!(report.events.len(), 1);
    assert!(matches!(
        report.events[0],
        PolicyEvent::FellBack { tensor: ScaledTensor::Logit, layer: 0, head: None, .. }
    ));
    let fallback = report.fallback.unwrap();
    assert_eq!(fallback.logit_descale, worst_case.plan(&bounds(0), None).unwrap().logit_descale);
    assert!((f64::from(fallback.operands.k[1].get()) - 0.75 * 6.0 / 448.0).abs() < 1e-8, "k did not overflow");
    assert_eq!(policy.plan(&bounds(0), None).unwrap(), fallback, "until a restart");
}

#[test]
fn auto_c_pools_a_model_or_every_head() {
    let config = AutoCConfig { burn_in: 2, kappa: 1.0, pooling: Pooling::Model, ..AutoCConfig::default() };
    let mut policy = AutoC::new(config, shape()).unwrap();
    let low = stats([10.0; 4], [1.0; 4], [1.0; 2], [1.0; 2], [0.1; 4]);
    let high = stats([10.0, 10.0, 10.0, 200.0], [1.0; 4], [1.0; 2], [1.0; 2], [0.1; 4]);
    for _ in 0..4 {
        // Layer 0 runs ahead: its steps past burn-in do not count.
        assert!(step(&mut policy, 0, &low).1.events.is_empty());
    }
    step(&mut policy, 1, &high);
    assert_eq!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::BurnIn);
    step(&mut policy, 1, &low);
    assert_eq!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::Frozen { c: 0.5 });

    let config = AutoCConfig { pooling: Pooling::Head, ..config };
    let mut policy = AutoC::new(config, shape()).unwrap();
    step(&mut policy, 1, &high);
    step(&mut policy, 1, &low);
    assert_eq!(policy.phase(ScaledTensor::Logit, 1, 3), Phase::Frozen { c: 0.5 });
    assert_eq!(policy.phase(ScaledTensor::Logit, 1, 0), Phase::Frozen { c: 0.1 });
    assert_eq!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::BurnIn);
}

#[test]
fn auto_c_skips_non_finite_steps_restarts_and_is_forbidden() {
    let config = AutoCConfig { burn_in: 1, max_restarts: 1, ..AutoCConfig::default() };
    let mut policy = AutoC::new(config, shape()).unwrap();
    let (_, report) = step(&mut policy, 0, &stats([1.0; 4], [1.0, f32::NAN, 1.0, 1.0], [1.0; 2], [1.0; 2], [0.1; 4]));
    assert_eq!(report.events, [PolicyEvent::Skipped { tensor: ScaledTensor::Q }]);
    assert_eq!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::BurnIn);
    step(&mut policy, 0, &even(1.0));
    assert!(matches!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::Frozen { .. }));
    // A NaN under a frozen constant is an overflow.
    let (_, report) = step(&mut policy, 0, &even(f32::NAN));
    assert!(report.fallback.is_some());

    let events = policy.restart(Restart::WeightsReplaced);
    assert_eq!(events, [PolicyEvent::Restarted { reason: Restart::WeightsReplaced, restarts: 1 }]);
    assert_eq!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::BurnIn);
    assert_eq!(policy.restart(Restart::Requested).len(), 2);
    step(&mut policy, 0, &even(1.0));
    assert_eq!(policy.phase(ScaledTensor::Logit, 0, 0), Phase::Forbidden { reason: Forbidden::TooManyRestarts });

    let mut policy = AutoC::new(config, shape()).unwrap();
    step(&mut policy, 0, &even(0.0));
    assert_eq!(policy.phase(ScaledTensor::K, 0, 0), Phase::Forbidden { reason: Forbidden::NothingObserved });
}

#[test]
fn te_history_and_scale_follow_the_example() {
    let run = |algorithm| {
        let config = DelayedTeConfig { history: 5, algorithm, ..DelayedTeConfig::default() };
        let mut slot = TeSlot::start(&config);
        for amax in [2.1, 2.4, 8.5, 2.3, 2.2] {
            slot.record(&config, amax);
        }
        slot
    };
    let slot = run(AmaxAlgorithm::Max);
    // f32 throughout, as the recipe: one rounding of the amax and one of the division away from the example.
    let near = |scale: f32, want: f64| (f64::from(scale) / want - 1.0).abs() < 1.2e-7;
    assert!(near(slot.scale, 52.705_882_352_941_174));
    // The oldest has been dropped, slot 0 waits for the next step.
    assert_eq!(slot.history, [0.0, 2.4, 8.5, 2.3, 2.2]);
    let recent = run(AmaxAlgorithm::MostRecent);
    assert!(near(recent.scale, 203.636_363_636_363_63));
    assert_eq!(recent.scale, 448.0 / 2.2f32);
}

#[test]
fn te_forgets_a_peak_after_exactly_its_history() {
    let config = DelayedTeConfig { history: 3, ..DelayedTeConfig::default() };
    let mut slot = TeSlot::start(&config);
    let scales: Vec<f32> = [8.0, 1.0, 1.0, 1.0]
        .map(|amax| {
            slot.record(&config, amax);
            slot.scale
        })
        .to_vec();
    assert_eq!(scales, [56.0, 56.0, 56.0, 448.0]);
}

/// A slot that has seen 7, so that its scale is 64, and then each of these.
fn te_after(config: &DelayedTeConfig, then: &[f32]) -> TeSlot {
    let mut slot = TeSlot::start(config);
    slot.record(config, 7.0);
    assert_eq!(slot.scale, config.scaled_max() / 7.0);
    for amax in then {
        slot.record(config, *amax);
    }
    slot
}

const MOST_RECENT: DelayedTeConfig =
    DelayedTeConfig { history: 2, algorithm: AmaxAlgorithm::MostRecent, margin: 0, granularity: Granularity::Layer };

#[test]
fn te_amax_zero_keeps_the_scale() {
    assert_eq!(te_after(&MOST_RECENT, &[0.0, 0.0]).scale, 64.0);
    // With max the scale holds too once nothing else is remembered.
    let max = DelayedTeConfig { algorithm: AmaxAlgorithm::Max, ..MOST_RECENT };
    assert_eq!(te_after(&max, &[0.0; 5]).scale, 64.0);
    let mut slot = TeSlot::start(&MOST_RECENT);
    slot.record(&MOST_RECENT, 0.0);
    assert_eq!((slot.scale, slot.descale(&MOST_RECENT).unwrap().get()), (1.0, 1.0));
}

#[test]
fn te_amax_that_is_normal_lands_on_the_maximum() {
    assert_eq!(te_after(&MOST_RECENT, &[14.0]).scale, 32.0);
    let margin = DelayedTeConfig { margin: 2, ..MOST_RECENT };
    assert_eq!(te_after(&margin, &[7.0]).scale, 16.0, "margin 2 keeps two binades");
}

#[test]
fn te_amax_that_is_tiny_takes_the_largest_finite_scale() {
    // 448 / amax leaves f32 at 1.32e-36.
    let last = 448.0 / f32::MAX;
    assert!((448.0 / last).is_finite() && (448.0 / last.next_down()).is_infinite());
    let above = te_after(&MOST_RECENT, &[last]);
    assert!(above.scale.is_finite() && above.scale == 448.0 / last);
    for tiny in [last.next_down(), 1e-38, f32::from_bits(1)] {
        let slot = te_after(&MOST_RECENT, &[tiny]);
        assert_eq!(slot.scale, f32::MAX, "{tiny:e}");
        // Its inverse is subnormal, and a descale is not.
        assert_eq!(slot.descale(&MOST_RECENT).unwrap().get(), f32::MIN_POSITIVE);
        assert!(slot.is_sound(&MOST_RECENT));
        assert_eq!(te_after(&MOST_RECENT, &[tiny, 14.0]).scale, 32.0, "and goes back");
    }
    let mut policy = DelayedTe::new(MOST_RECENT, shape()).unwrap();
    let (_, report) = step(&mut policy, 0, &even(1e-38));
    let named = ScaledTensor::ALL.map(|tensor| PolicyEvent::TinyAmax { tensor });
    assert_eq!(report.events, named);
    let (plan, report) = step(&mut policy, 0, &even(1.0));
    assert_eq!(plan.operands.k[0].get(), f32::MIN_POSITIVE);
    assert!(report.events.is_empty() && report.tensor(ScaledTensor::K).overflowed());
}

#[test]
fn te_amax_that_is_not_finite_keeps_the_scale() {
    for bad in [f32::NAN, f32::INFINITY] {
        assert_eq!(te_after(&MOST_RECENT, &[bad]).scale, 64.0, "{bad}");
        assert_eq!(te_after(&MOST_RECENT, &[bad, 14.0]).scale, 32.0, "{bad} is forgotten");
        let mut policy = DelayedTe::new(MOST_RECENT, shape()).unwrap();
        let (_, report) = step(&mut policy, 0, &even(bad));
        assert_eq!(report.events, ScaledTensor::ALL.map(|tensor| PolicyEvent::Skipped { tensor }));
    }
    // With max an infinity holds the scale for as long as it is remembered, and NaN takes no part.
    let max = DelayedTeConfig { algorithm: AmaxAlgorithm::Max, ..MOST_RECENT };
    assert_eq!(te_after(&max, &[f32::INFINITY, 14.0]).scale, 64.0);
    assert_eq!(te_after(&max, &[f32::INFINITY, 14.0, 14.0]).scale, 32.0);
    assert_eq!(te_after(&max, &[f32::NAN, 3.5]).scale, 128.0);
}

#[test]
fn delayed_paper_plans_from_the_past_only() {
    let config = DelayedPaperConfig { history: 3, ..DelayedPaperConfig::default() };
    let mut policy = DelayedPaper::new(config, shape()).unwrap();
    let mut planned = Vec::new();
    for amax in [8.0, 1.0, 2.0, 0.5, 0.5] {
        let (plan, report) = step(&mut policy, 0, &even(amax));
        assert_eq!(report.tensor(ScaledTensor::Logit).overflowed(), amax == 8.0);
        planned.push(plan.logit_descale[0].get());
    }
    // History before each step: 1 1 1, 1 1 8, 1 8 1, 8 1 2, 1 2 0.5.
    let want: Vec<f32> =
        [1.0, 8.0, 8.0, 8.0, 2.0].map(|max| crate::Descale::covering(max, 448.0 * 0.9).unwrap().get()).to_vec();
    assert_eq!(planned, want);
    assert_eq!(policy.slots(0, ScaledTensor::Q)[0].history, [2.0, 0.5, 0.5]);
    assert_eq!(policy.slots(1, ScaledTensor::Q)[0].history, [1.0, 1.0, 1.0], "layers are apart");
    step(&mut policy, 0, &even(f32::INFINITY));
    assert_eq!(policy.slots(0, ScaledTensor::Q)[0].history, [2.0, 0.5, 0.5]);
}

#[test]
fn delayed_rows_are_one_a_tensor_or_one_a_head() {
    let observed = stats([1.0, 2.0, 4.0, 3.0], [1.0, 2.0, 3.0, 1.0], [5.0, 6.0], [7.0, 8.0], [1.0, 4.0, 2.0, 1.0]);
    let layer = DelayedTeConfig { history: 1, ..DelayedTeConfig::default() };
    let head = DelayedTeConfig { granularity: Granularity::Head, ..layer };
    let plan = |config| {
        let mut policy = DelayedTe::new(config, shape()).unwrap();
        step(&mut policy, 0, &observed);
        policy.plan(&bounds(0), None).unwrap()
    };
    let descales = |amax: &[f32]| amax.iter().map(|amax| 1.0 / (448.0 / amax)).collect::<Vec<f32>>();
    let shared = plan(layer);
    assert_eq!(values(&shared.logit_descale), descales(&[4.0; 4]));
    assert_eq!(values(&shared.operands.q), descales(&[3.0; 2]));
    assert_eq!(values(shared.operands.o.as_ref().unwrap()), descales(&[4.0; 2]));
    let each = plan(head);
    assert_eq!(values(&each.logit_descale), descales(&[1.0, 2.0, 4.0, 3.0]));
    assert_eq!(values(&each.operands.q), descales(&[2.0, 3.0]), "the largest of the group");
    assert_eq!(values(&each.operands.k), descales(&[5.0, 6.0]));
    assert_eq!(values(each.operands.o.as_ref().unwrap()), descales(&[4.0, 2.0]));
}

#[test]
fn current_fits_its_own_step_and_needs_it() {
    let policy = PolicyConfig::from(PolicyKind::Current).build(shape()).unwrap();
    assert!(policy.needs_measurement());
    assert!(policy.plan(&bounds(0), None).unwrap_err().is_argument());
    assert!(policy.plan(&bounds(0), Some(&even(f32::NAN))).unwrap_err().is_non_finite());
    for i in 1..5_000 {
        let amax = 0.013_7 * i as f32;
        let plan = policy.plan(&bounds(0), Some(&even(amax))).unwrap();
        for descale in &plan.logit_descale {
            assert!(amax * descale.quant_scale().get() <= 448.0 && amax / descale.get() <= 448.0, "{amax}");
            assert!(amax / descale.get() > 447.99, "{amax}");
        }
    }
    let zero = policy.plan(&bounds(0), Some(&even(0.0))).unwrap();
    assert_eq!(zero.operands.q[0].get(), 1.0);
}

#[test]
fn states_resume_bit_equal_through_json() {
    for kind in PolicyKind::ALL {
        let config = match kind {
            PolicyKind::AutoC => PolicyConfig::AutoC(AutoCConfig { burn_in: 3, ..AutoCConfig::default() }),
            PolicyKind::DelayedTe => PolicyConfig::DelayedTe(DelayedTeConfig { history: 4, ..Default::default() }),
            kind => kind.into(),
        };
        for stop in 0..6 {
            let mut through = config.build(shape()).unwrap();
            let mut resumed = config.build(shape()).unwrap();
            for i in 0..8u32 {
                if i == stop {
                    let json = serde_json::to_string(&resumed.save()).unwrap();
                    let state: PolicyState = serde_json::from_str(&json).unwrap();
                    assert_eq!(state, resumed.save());
                    resumed = state.restore(&config, shape()).unwrap();
                }
                let amax =
                    if i == 2 && kind == PolicyKind::DelayedTe { f32::INFINITY } else { 0.1 + 0.37 / (1.3 + i as f32) };
                let observed = even(amax);
                for layer in 0..2 {
                    let one = step(&mut *through, layer, &observed);
                    let two = step(&mut *resumed, layer, &observed);
                    assert_eq!(one.0, two.0, "{kind} step {i}, stopped at {stop}");
                    assert_eq!(one.1.events, two.1.events);
                }
            }
        }
    }
}

#[test]
fn foreign_states_are_refused_by_name() {
    let three = PolicyShape::uniform(3, 4, 2);
    for kind in PolicyKind::ALL {
        let config = PolicyConfig::from(kind);
        let state = config.build(shape()).unwrap().save();
        let error = state.clone().restore(&config, three.clone()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("layers"), "{error}");
        let old = PolicyState { version: 0, ..state.clone() };
        assert!(old.restore(&config, shape()).unwrap_err().to_string().contains("version 0"));
        let other =
            PolicyConfig::from(if kind == PolicyKind::Geometry { PolicyKind::AutoC } else { PolicyKind::Geometry });
        let error = state.clone().restore(&other, shape()).unwrap_err();
        assert!(
            error.to_string().contains(&format!("saved by policy {kind}, not {other_kind}", other_kind = other.kind()))
        );
        let mixed = PolicyState {
            memory: Memory::AutoC(AutoCState { seen: vec![], restarts: 0, pools: Default::default() }),
            ..state
        };
        assert!(mixed.restore(&config, shape()).unwrap_err().is_mismatch());
    }
    let config = DelayedPaperConfig::default();
    let state = DelayedPaper::new(config, shape()).unwrap().save();
    let wanted = PolicyConfig::DelayedPaper(DelayedPaperConfig { margin: 0.5, ..config });
    let error = state.restore(&wanted, shape()).unwrap_err();
    assert!(error.to_string().contains("margin"), "{error}");
}

#[test]
fn shapes_are_checked() {
    for kind in PolicyKind::ALL {
        let mut policy = PolicyConfig::from(kind).build(shape()).unwrap();
        assert!(policy.plan(&bounds(2), Some(&even(1.0))).unwrap_err().is_mismatch(), "{kind}");
        let plan = policy.plan(&bounds(0), Some(&even(1.0))).unwrap();
        assert!(policy.observe(&plan, &bounds(1), &even(1.0)).unwrap_err().is_mismatch(), "{kind}");
        let short = StepStats { k: vec![CastStats::default()], ..even(1.0) };
        assert!(policy.observe(&plan, &bounds(0), &short).unwrap_err().is_mismatch(), "{kind}");
    }
    assert!(PolicyConfig::from(PolicyKind::Current).build(PolicyShape::uniform(2, 4, 3)).unwrap_err().is_argument());
    assert!(PolicyKind::parse_list("geometry,nope").unwrap_err().to_string().contains("nope"));
    assert!(PolicyKind::parse_list(" , ").unwrap_err().is_argument());
    for twice in ["geometry,geometry", "delayed,delayed-te"] {
        assert!(PolicyKind::parse_list(twice).unwrap_err().to_string().contains("duplicate"), "{twice}");
    }
}

#[test]
fn one_scale_a_layer_is_the_largest() {
    let config = AutoCConfig {
        burn_in: 1,
        kappa: 1.0,
        pooling: Pooling::Head,
        granularity: Granularity::Layer,
        ..AutoCConfig::default()
    };
    let mut policy = AutoC::new(config, shape()).unwrap();
    let (plan, _) = step(&mut policy, 0, &stats([40.0, 80.0, 20.0, 10.0], [4.0; 4], [3.0, 1.5], [0.8; 2], [0.1; 4]));
    let near = |a: f32, b: f64| (f64::from(a) / b - 1.0).abs() < 2e-7;
    assert!(plan.logit_descale.iter().all(|d| near(d.get(), 400.0 / 358.4)));
    assert!(plan.operands.k.iter().all(|d| near(d.get(), 6.0 / 448.0)));
    // Ratios are to the layer's bound; the largest constant holds for all.
    let plan = policy.plan(&bounds(0), None).unwrap();
    assert!(plan.logit_descale.iter().all(|d| near(d.get(), 80.0 / 358.4)));
    assert!(plan.operands.k.iter().all(|d| near(d.get(), 3.0 / 448.0)));
}
