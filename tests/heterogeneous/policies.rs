//! Every policy over layers of random heads, beside policies that know one layer alone.

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::bound::{HeadBounds, LayerBounds, OperandBound};
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::policy::{
    AutoCConfig, CurrentConfig, DelayedPaperConfig, DelayedTeConfig, GeometryConfig, Policy, PolicyConfig, PolicyEvent,
    PolicyKind, PolicyShape, PolicyState, Pooling, Restart, STATE_VERSION, ScaledTensor,
};
use sigmascale::stats::{CastStats, LogitStats, StepStats};

fn bounds(layer: usize, (n_q, n_kv): (usize, usize), rng: &mut StdRng) -> LayerBounds {
    let mut operands = |heads: usize| -> Vec<OperandBound> {
        let bound = (0..heads).map(|_| rng.random_range(1.0..60.0));
        bound.map(|rounded| OperandBound { exact: rounded, rounded }).collect()
    };
    let (q, k, v, logits) = (operands(n_q), operands(n_kv), Some(operands(n_kv)), operands(n_q));
    let head = |bound: OperandBound| HeadBounds {
        exact: Some(10.0 * bound.rounded),
        rounded: Some(10.0 * bound.rounded),
        rank_aware: Some(bound.rounded),
        ..HeadBounds::default()
    };
    LayerBounds { layer, heads: logits.into_iter().map(head).collect(), q, k, v, m: None }
}

/// What a call might report: mostly a part of each bound, at times past it.
fn stats(bounds: &LayerBounds, rng: &mut StdRng) -> StepStats {
    let share = if rng.random_bool(0.1) { 2.0 } else { 0.3 };
    let mut amax = |bound: f64| (share * bound * rng.random_range(0.1..1.0)) as f32;
    let mut row = |bounds: &[OperandBound]| -> Vec<CastStats> {
        bounds.iter().map(|b| CastStats { amax: amax(b.rounded), count: 8, ..CastStats::default() }).collect()
    };
    let (q, k, v) = (row(&bounds.q), row(&bounds.k), row(bounds.v.as_ref().unwrap()));
    let o = row(&bounds.q);
    let logit = |head: &HeadBounds| {
        let max = amax(head.rounded.unwrap());
        LogitStats { max, min: -0.5 * max, count: 8, ..LogitStats::default() }
    };
    StepStats { logits: bounds.heads.iter().map(logit).collect(), q, k, v, o }
}

/// All policies; where a pool spans the model, layers are no longer alone.
fn configs(granularity: Granularity) -> Vec<PolicyConfig> {
    let auto = |pooling| {
        PolicyConfig::AutoC(AutoCConfig { burn_in: 3, pooling, granularity, max_restarts: 1, ..Default::default() })
    };
    vec![
        PolicyConfig::Geometry(GeometryConfig { granularity, ..Default::default() }),
        PolicyConfig::GeometryCStar(GeometryConfig { granularity, ..Default::default() }),
        auto(Pooling::Layer),
        auto(Pooling::Head),
        PolicyConfig::DelayedPaper(DelayedPaperConfig { granularity, history: 4, ..Default::default() }),
        PolicyConfig::DelayedTe(DelayedTeConfig { granularity, history: 4, ..Default::default() }),
        PolicyConfig::Current(CurrentConfig { granularity }),
    ]
}

/// One step of one layer: the plan and what was reported.
fn step(policy: &mut dyn Policy, bounds: &LayerBounds, stats: &StepStats) -> (ScalePlan, Vec<String>) {
    let plan = policy.plan(bounds, Some(stats)).unwrap();
    let report = policy.observe(&plan, bounds, stats).unwrap();
    let mut said: Vec<String> = report.tensors.iter().map(|tensor| format!("{tensor:?}")).collect();
    said.push(format!("{:?}", report.fallback.map(|plan| (plan.logit_descale, plan.operands))));
    (ScalePlan { layer: 0, ..plan }, said)
}

fn layers() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let heads = (1usize..=4, 1usize..=5).prop_map(|(n_kv, group)| (n_kv * group, n_kv));
    prop::collection::vec(heads, 1..=5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_layer_is_planned_as_if_it_were_alone(heads in layers(), seed in 0u64..1 << 32, by_layer: bool) {
        let granularity = if by_layer { Granularity::Layer } else { Granularity::Head };
        for config in configs(granularity) {
            let mut rng = StdRng::seed_from_u64(seed);
            let shape = PolicyShape::new(heads.iter().copied());
            let mut whole = config.build(shape.clone()).unwrap();
            let mut alone: Vec<_> =
                heads.iter().map(|(q, kv)| config.build(PolicyShape::uniform(1, *q, *kv)).unwrap()).collect();
            for round in 0..9 {
                if round == 6 {
                    whole.restart(Restart::WeightsReplaced);
                    alone.iter_mut().for_each(|policy| drop(policy.restart(Restart::WeightsReplaced)));
                }
                for (layer, alone) in alone.iter_mut().enumerate() {
                    let bounds = bounds(layer, heads[layer], &mut rng);
                    let stats = stats(&bounds, &mut rng);
                    let own = LayerBounds { layer: 0, ..bounds.clone() };
                    prop_assert_eq!(step(&mut *whole, &bounds, &stats), step(&mut **alone, &own, &stats));
                }
                // Through JSON, as a resume does.
                let text = serde_json::to_string(&whole.save()).unwrap();
                let state: PolicyState = serde_json::from_str(&text).unwrap();
                prop_assert_eq!(state.version, STATE_VERSION);
                whole = state.restore(&config, shape.clone()).unwrap();
                prop_assert_eq!(serde_json::to_string(&whole.save()).unwrap(), text);
            }
        }
    }

    #[test]
    fn a_pool_over_the_model_waits_for_every_layer(heads in layers(), seed in 0u64..1 << 32) {
        let mut rng = StdRng::seed_from_u64(seed);
        let auto = AutoCConfig { burn_in: 2, pooling: Pooling::Model, kappa: 1.25, ..AutoCConfig::default() };
        let shape = PolicyShape::new(heads.iter().copied());
        let mut policy = PolicyConfig::AutoC(auto).build(shape).unwrap();
        let mut largest = 0f64;
        for round in 0..2 {
            for layer in 0..heads.len() {
                let bounds = bounds(layer, heads[layer], &mut rng);
                let stats = stats(&bounds, &mut rng);
                let ratios = stats.logits.iter().zip(&bounds.heads).map(|(s, b)| f64::from(s.amax()) / b.rounded.unwrap());
                largest = ratios.fold(largest, f64::max);
                let plan = policy.plan(&bounds, None).unwrap();
                let report = policy.observe(&plan, &bounds, &stats).unwrap();
                let last = round == 1 && layer + 1 == heads.len();
                prop_assert_eq!(report.events.len(), if last { 4 } else { 0 });
                if let Some(PolicyEvent::Frozen { tensor, c, ratio, .. }) = report.events.first() {
                    prop_assert_eq!((*tensor, *ratio, *c), (ScaledTensor::Logit, largest, (1.25 * largest).min(1.0)));
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let shape = PolicyShape::new([(4, 2), (6, 3)]);
    let mut rng = StdRng::seed_from_u64(1);
    for kind in PolicyKind::ALL {
        let config = PolicyConfig::from(kind);
        let mut policy = config.build(shape.clone()).unwrap();
        let right = bounds(1, (6, 3), &mut rng);
        let seen = stats(&right, &mut rng);
        let plan = policy.plan(&right, Some(&seen)).unwrap();
        // The heads of the other layer.
        let other = bounds(1, (4, 2), &mut rng);
        let error = policy.plan(&other, Some(&seen)).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("4 logit bounds"));
        let short = stats(&other, &mut rng);
        let error = policy.observe(&plan, &right, &short).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("4 logit statistics"), "{error}");
        assert!(policy.plan(&bounds(2, (6, 3), &mut rng), Some(&seen)).unwrap_err().is_mismatch());
        let state = policy.save();
        let swapped = PolicyShape::new([(6, 3), (4, 2)]);
        let error = state.clone().restore(&config, swapped).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("n_q_heads[0]"), "{error}");
        let newer = PolicyState { version: STATE_VERSION + 1, ..state };
        let error = newer.restore(&config, shape.clone()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("version 2"), "{error}");
    }
    for heads in [vec![], vec![(4, 2), (0, 0)], vec![(4, 2), (5, 2)]] {
        let error = PolicyConfig::from(PolicyKind::Geometry).build(PolicyShape::new(heads)).unwrap_err();
        assert!(error.is_argument());
    }
    let memory = PolicyConfig::from(PolicyKind::DelayedTe).build(shape.clone()).unwrap().save().memory;
    let crossed = PolicyState {
        memory,
        ..PolicyConfig::from(PolicyKind::DelayedTe).build(PolicyShape::uniform(3, 4, 2)).unwrap().save()
    };
    let config = PolicyKind::DelayedTe.into();
    assert!(crossed.restore(&config, PolicyShape::uniform(3, 4, 2)).unwrap_err().is_mismatch());
}

/// Counts are numbers where all layers agree.
#[test]
fn the_text_of_a_state_is_short_and_checked() {
    let slot = r#"[{"scale":2.0,"history":[0.0,7.5]}]"#;
    let text = format!(
        r#"{{"version":1,"config":{{"policy":"delayed-te","history":2,"algorithm":"max","margin":0,"granularity":"layer"}},"shape":{{"layers":2,"n_q_heads":4,"n_kv_heads":2}},"memory":{{"kind":"delayed-te","layers":[[{slot},{slot},{slot},{slot},{slot}],[{slot},{slot},{slot},{slot},{slot}]]}}}}"#
    );
    let state: PolicyState = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&state).unwrap(), text);
    let config = state.config;
    assert_eq!(state.restore(&config, PolicyShape::uniform(2, 4, 2)).unwrap().save().version, 1);
    let refused = |from: &str, to: &str, part: &str| {
        let error = serde_json::from_str::<PolicyState>(&text.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(r#""n_q_heads":4"#, r#""n_q_heads":[4]"#, "`n_q_heads`");
    refused(r#""layers":2"#, r#""layers":99999999999999"#, "65536");
    refused(r#""n_q_heads":4"#, r#""n_q_heads":18446744073709551615"#, "2^32");
}
