//! Policies on the device against those of the host: the same bits, step after step.

use crate::device;
use crate::weights::{Case, Layer};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::attention::{AttentionCall, AttentionShape, PvAccumulator};
use sigmascale::bound::{HeadBounds, LayerBounds, OperandBound, Tail};
use sigmascale::device::attention::{Cuda, Descales, DeviceCall, Element, Keys, Tensors, View, Workspace};
use sigmascale::device::policy::{BoundSource, PolicyEngine, status};
use sigmascale::device::scale::{EstimateEngine, ScaleEngine};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{AttentionSpec, preset};
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::policy::{
    AmaxAlgorithm, AutoCConfig, CurrentConfig, DelayedPaperConfig, DelayedTeConfig, GeometryConfig, Policy,
    PolicyConfig, PolicyEvent, PolicyKind, PolicyState, Pooling, Report, Restart, ScaledTensor, Slack,
};
use sigmascale::spectral::{Estimator, from_estimates};
use sigmascale::stats::StepStats;
use sigmascale::stats::{CastWords, LogitWords, StepWords, ordered};

tests![
    every_policy_plans_the_bits_of_the_host,
    a_long_burn_in_keeps_several_ratios,
    slack_is_that_of_the_hosts_burn_in,
    a_state_moves_between_host_and_device,
    a_graph_replays_the_loop_at_the_same_addresses,
    weights_become_plans_in_one_graph,
    estimates_become_plans_in_one_graph,
    an_attention_call_feeds_the_policy,
    what_is_not_finite_is_flagged,
    foreign_states_and_bounds_are_refused,
];

fn model(layers: usize, n_q: usize, n_kv: usize) -> AttentionSpec {
    let mut spec = preset("mistral-7b").unwrap();
    spec.d_model = 256;
    spec.layers.truncate(layers);
    spec.set_heads(n_q, n_kv, 128);
    spec
}

/// Layers of these query and KV heads.
fn heterogeneous(heads: &[(usize, usize)]) -> AttentionSpec {
    let mut spec = model(heads.len(), 1, 1);
    for (layer, heads) in spec.layers.iter_mut().zip(heads) {
        (layer.n_q_heads, layer.n_kv_heads) = *heads;
    }
    spec
}

/// Magnitudes over many binades, and sometimes zero.
fn magnitude(rng: &mut StdRng) -> f32 {
    if rng.random_range(0..40) == 0 { 0.0 } else { rng.random_range(-6.0..6.0f32).exp2() }
}

/// Bounds that f32 holds, so that the device has the same, below the soft-cap.
fn bounds(spec: &AttentionSpec, layer: usize, rng: &mut StdRng) -> LayerBounds {
    let (n_q, n_kv) = (spec.layers[layer].n_q_heads, spec.layers[layer].n_kv_heads);
    let operands = |heads: usize, rng: &mut StdRng| -> Vec<OperandBound> {
        let bound = |rng: &mut StdRng| f64::from(40.0 * magnitude(rng));
        (0..heads).map(|_| bound(rng)).map(|b| OperandBound { exact: b, rounded: b }).collect()
    };
    // One of the heads of a group carries the bound on the device, so they share it here.
    let k = operands(n_kv, rng);
    let per_kv = operands(n_kv, rng);
    let q = (0..n_q).map(|h| per_kv[h * n_kv / n_q]).collect();
    let head = |rng: &mut StdRng| {
        let cap = spec.soft_cap.map_or(f32::INFINITY, |cap| cap as f32);
        let rounded = (500.0 * magnitude(rng)).min(cap);
        HeadBounds {
            exact: Some(rounded.into()),
            rounded: Some(rounded.into()),
            rank_aware: Some((0.1 * rounded).into()),
            ..HeadBounds::default()
        }
    };
    let heads = (0..n_q).map(|_| head(rng)).collect();
    LayerBounds { layer, heads, q, k, v: Some(operands(n_kv, rng)), m: None }
}

/// What a call might leave; `share` of each worst-case bound is reached, more when something is planted.
fn words(spec: &AttentionSpec, bounds: &LayerBounds, share: f32, rng: &mut StdRng) -> StepWords {
    let own = &spec.layers[bounds.layer];
    // About one step in four has a value that is not finite.
    let odd_of = 13 * (own.n_q_heads + 2 * own.n_kv_heads);
    let cast = |bound: f64, rng: &mut StdRng| {
        let amax = (bound as f32) * share * rng.random_range(0.2..1.0f32);
        let odd = rng.random_range(0..odd_of);
        match odd {
            0 => CastWords { amax: f32::NAN.to_bits(), non_finite: 3, ..Default::default() },
            1 => CastWords { amax: amax.to_bits(), non_finite: 1, ..Default::default() },
            2 => CastWords { amax: f32::INFINITY.to_bits(), non_finite: 1, overflow: 1, beyond_rounding: 1 },
            3 => CastWords { amax: 1e-43f32.to_bits(), ..Default::default() },
            4..10 => CastWords::default(),
            _ => CastWords { amax: amax.to_bits(), ..Default::default() },
        }
    };
    let logit = |bound: f64, rng: &mut StdRng| {
        let most = bound as f32 * share * rng.random_range(0.2..1.0f32);
        let (max, min) = if rng.random_bool(0.5) { (most, -0.3 * most) } else { (-0.1 * most, -most) };
        match rng.random_range(0..60) {
            0 => LogitWords::default(),
            _ => LogitWords {
                max: ordered(max),
                min: !ordered(min),
                amax_o: (0.7 * most).to_bits(),
                overflow: u32::from(share > 1.0),
            },
        }
    };
    let row = |row: &[OperandBound], rng: &mut StdRng| row.iter().map(|b| cast(b.rounded, rng)).collect();
    StepWords {
        logits: (0..own.n_q_heads).map(|h| logit(bounds.heads[h].rounded.unwrap(), rng)).collect(),
        q: row(&bounds.q, rng),
        k: row(&bounds.k, rng),
        v: row(bounds.v.as_ref().unwrap(), rng),
    }
}

fn bits(plan: &ScalePlan) -> Vec<u32> {
    let rows = ScaledTensor::ALL.iter().flat_map(|tensor| tensor.descales(plan).unwrap_or(&[]));
    rows.map(|descale| descale.get().to_bits()).collect()
}

fn with_granularity(granularity: Granularity) -> Vec<PolicyConfig> {
    let mut all = vec![
        PolicyConfig::Geometry(GeometryConfig { granularity, ..Default::default() }),
        PolicyConfig::GeometryCStar(GeometryConfig { granularity, eta: 0.7 }),
        PolicyConfig::DelayedPaper(DelayedPaperConfig { granularity, ..Default::default() }),
        PolicyConfig::DelayedPaper(DelayedPaperConfig { granularity, history: 1, initial: 3.0, margin: 0.37 }),
        PolicyConfig::DelayedTe(DelayedTeConfig { granularity, history: 37, ..Default::default() }),
        PolicyConfig::DelayedTe(DelayedTeConfig { granularity, history: 1, margin: 3, ..Default::default() }),
        PolicyConfig::DelayedTe(DelayedTeConfig {
            granularity,
            history: 5,
            margin: -2,
            algorithm: AmaxAlgorithm::MostRecent,
        }),
        PolicyConfig::Current(CurrentConfig { granularity }),
    ];
    for pooling in [Pooling::Model, Pooling::Layer, Pooling::Head] {
        all.push(PolicyConfig::AutoC(AutoCConfig {
            burn_in: 40,
            pooling,
            granularity,
            max_restarts: 2,
            ..Default::default()
        }));
    }
    // A burn-in this long keeps more than one ratio.
    all.push(PolicyConfig::AutoC(AutoCConfig {
        burn_in: 120,
        pooling: Pooling::Model,
        granularity,
        kappa: 1.0,
        max_restarts: 1,
        ..Default::default()
    }));
    all
}

/// Host and device policy side by side.
struct Pair {
    host: Box<dyn Policy>,
    plan: PolicyEngine,
    bounds: Vec<LayerBounds>,
    name: String,
}

impl Pair {
    fn new(spec: &AttentionSpec, config: PolicyConfig, rng: &mut StdRng) -> Self {
        let host = config.build(spec.into()).unwrap();
        let needs = matches!(config.kind(), PolicyKind::Geometry | PolicyKind::GeometryCStar | PolicyKind::AutoC);
        let source = if needs { BoundSource::Host } else { BoundSource::None };
        let plan = PolicyEngine::new(device(), spec, config, &Tail::default(), source).unwrap();
        let mut pair = Self { host, plan, bounds: vec![], name: format!("{config:?}") };
        pair.move_weights(spec, rng);
        pair
    }

    fn move_weights(&mut self, spec: &AttentionSpec, rng: &mut StdRng) {
        self.bounds = (0..spec.layers.len()).map(|layer| bounds(spec, layer, rng)).collect();
        if self.plan.read_bounds().is_ok() {
            self.plan.write_bounds(&self.bounds).unwrap();
            assert_eq!(self.plan.read_bounds().unwrap(), self.bounds, "{}", self.name);
        }
    }

    /// One step of every layer; says what happened to the host's policy.
    fn step(&mut self, spec: &AttentionSpec, step: usize, share: f32, rng: &mut StdRng) -> Vec<PolicyEvent> {
        self.reports(spec, step, share, rng).into_iter().flat_map(|report| report.events).collect()
    }

    /// The same, with everything that the host's policy reported.
    fn reports(&mut self, spec: &AttentionSpec, step: usize, share: f32, rng: &mut StdRng) -> Vec<Report> {
        let stream = device().stream().unwrap();
        let rows: Vec<StepWords> = self.bounds.iter().map(|b| words(spec, b, share, rng)).collect();
        let measures = self.host.needs_measurement();
        for (layer, row) in rows.iter().enumerate().filter(|_| measures) {
            self.plan.write_stats(layer, &row.to_row()).unwrap();
        }
        self.plan.refresh(&stream).unwrap();
        let mut reports = vec![];
        let mut plans = vec![];
        for (bounds, row) in self.bounds.iter().zip(&rows) {
            let stats = StepStats::from(row);
            let layer = bounds.layer;
            let device = self.plan.read_plan(layer);
            match self.host.plan(bounds, measures.then_some(&stats)) {
                Ok(host) => {
                    let device = device.unwrap_or_else(|e| panic!("{} step {step} layer {layer}: {e}", self.name));
                    assert_eq!(bits(&host), bits(&device), "{} step {step} layer {layer}", self.name);
                    let tensors = self.plan.read_tensor_descales().unwrap();
                    for (tensor, largest) in ScaledTensor::ALL.into_iter().zip(&tensors[layer * 5..]) {
                        let row = tensor.descales(&host).unwrap();
                        assert_eq!(ScalePlan::per_tensor(row).get(), *largest, "{} {tensor:?}", self.name);
                    }
                    plans.push(Some(host));
                }
                Err(error) => {
                    assert!(error.is_non_finite(), "{error}");
                    assert!(device.unwrap_err().is_non_finite());
                    let word = self.plan.read_status().unwrap()[layer];
                    assert_ne!(word & status::NO_PLAN, 0, "{} step {step} layer {layer}", self.name);
                    plans.push(None);
                }
            }
        }
        for (layer, row) in rows.iter().enumerate() {
            self.plan.write_stats(layer, &row.to_row()).unwrap();
        }
        self.plan.observe(&stream).unwrap();
        let observed = self.plan.read_observed().unwrap();
        for ((plan, bounds), row) in plans.iter().zip(&self.bounds).zip(&rows) {
            let stats = StepStats::from(row);
            let same = |a: &StepStats, b: &StepStats| format!("{a:?}") == format!("{b:?}");
            assert!(same(&observed[bounds.layer], &stats));
            if let Some(plan) = plan {
                reports.push(self.host.observe(plan, bounds, &stats).unwrap());
            }
        }
        reports
    }

    fn same_state(&self, step: usize) {
        // NaN in a history is a word in JSON, and not equal to itself as a number.
        let text = |state: &PolicyState| serde_json::to_string(state).unwrap();
        assert_eq!(text(&self.host.save()), text(&self.plan.save().unwrap()), "{} step {step}", self.name);
    }
}

fn every_policy_plans_the_bits_of_the_host() {
    let mut sizes =
        [model(3, 8, 2), model(2, 5, 5), model(1, 7, 1), heterogeneous(&[(8, 2), (3, 3), (300, 20), (2, 1)])];
    sizes[1].soft_cap = Some(300.0);
    let (mut frozen, mut fell, mut skipped, mut forbidden) = (0, 0, 0, 0);
    for (at, spec) in sizes.iter().enumerate() {
        for granularity in [Granularity::Head, Granularity::Layer] {
            for config in with_granularity(granularity) {
                let mut rng = StdRng::seed_from_u64(17 + at as u64);
                let mut pair = Pair::new(spec, config, &mut rng);
                for step in 0..260 {
                    // Ordinary values, then a spike.
                    let share = if step % 90 == 80 { 1.5 } else { 0.05 };
                    if step % 60 == 59 {
                        pair.move_weights(spec, &mut rng);
                    }
                    if step == 100 || step == 150 || step == 250 {
                        let stream = device().stream().unwrap();
                        pair.host.restart(Restart::WeightsReplaced);
                        pair.plan.restart(&stream).unwrap();
                    }
                    for event in pair.step(spec, step, share, &mut rng) {
                        match event {
                            PolicyEvent::Frozen { .. } => frozen += 1,
                            PolicyEvent::FellBack { .. } => fell += 1,
                            PolicyEvent::Skipped { .. } => skipped += 1,
                            PolicyEvent::Forbidden { .. } => forbidden += 1,
                            _ => {}
                        }
                    }
                    if step % 20 == 19 {
                        pair.same_state(step);
                    }
                }
            }
        }
    }
    println!("{frozen} constants frozen, {fell} given up, {skipped} steps skipped, {forbidden} forbidden");
    assert!(frozen > 20 && fell > 20 && skipped > 100, "the steps did not reach every transition");
}

/// A few steps of every policy, for compute-sanitizer.
pub fn a_few_steps() {
    let spec = heterogeneous(&[(8, 2), (3, 3), (40, 20)]);
    for granularity in [Granularity::Head, Granularity::Layer] {
        for config in with_granularity(granularity) {
            let mut rng = StdRng::seed_from_u64(17);
            let mut pair = Pair::new(&spec, config, &mut rng);
            for step in 0..3 {
                pair.step(&spec, step, if step == 2 { 1.5 } else { 0.05 }, &mut rng);
            }
            pair.same_state(3);
        }
    }
}

fn a_long_burn_in_keeps_several_ratios() {
    // 128 logit ratios per step: after 160 steps three of the largest decide.
    a_burn_in_keeps(&model(2, 64, 8), Pooling::Model, &[3, 3]);
    // Pools of heterogeneous layers keep different numbers of ratios.
    a_burn_in_keeps(&heterogeneous(&[(64, 8), (4, 2), (140, 4)]), Pooling::Layer, &[2, 1, 3]);
}

fn a_burn_in_keeps(spec: &AttentionSpec, pooling: Pooling, kept: &[usize]) {
    let auto = AutoCConfig { burn_in: 160, pooling, ..Default::default() };
    for (layer, kept) in kept.iter().enumerate() {
        assert_eq!(auto.kept_ratios(&spec.into(), layer, ScaledTensor::Logit), *kept);
    }
    let mut rng = StdRng::seed_from_u64(21);
    let mut pair = Pair::new(spec, PolicyConfig::AutoC(auto), &mut rng);
    let mut frozen = 0;
    // A step with a value that is not finite is not counted, so it takes a few more; enough for both phases in any case.
    for step in 0..1500 {
        let events = pair.step(spec, step, 0.05, &mut rng);
        frozen += events.iter().filter(|event| matches!(event, PolicyEvent::Frozen { .. })).count();
        if step % 40 == 0 {
            pair.same_state(step);
        }
        if frozen > 0 {
            break;
        }
    }
    assert!(frozen > 0, "the burn-in did not end");
    pair.same_state(0);
}

fn slack_is_that_of_the_hosts_burn_in() {
    let spec = heterogeneous(&[(8, 2), (64, 4), (2, 1)]);
    for pooling in [Pooling::Model, Pooling::Layer, Pooling::Head] {
        for granularity in [Granularity::Head, Granularity::Layer] {
            let auto = AutoCConfig { burn_in: 9, pooling, granularity, ..Default::default() };
            let mut rng = StdRng::seed_from_u64(31);
            let mut pair = Pair::new(&spec, PolicyConfig::AutoC(auto), &mut rng);
            let mut expected: Vec<[Option<Slack>; 4]> = vec![[None; 4]; 3];
            let mut seen = [0; 3];
            for step in 0..25 {
                if step == 5 {
                    pair.move_weights(&spec, &mut rng);
                }
                for report in pair.reports(&spec, step, 0.05, &mut rng) {
                    let skipped = report.events.iter().any(|event| matches!(event, PolicyEvent::Skipped { .. }));
                    if skipped || seen[report.layer] == auto.burn_in {
                        continue;
                    }
                    seen[report.layer] += 1;
                    for (slack, tensor) in expected[report.layer].iter_mut().zip(ScaledTensor::ALL) {
                        *slack = match (*slack, report.tensor(tensor).slack) {
                            (Some(a), Some(b)) => Some(a.merge(b)),
                            (a, b) => a.or(b),
                        };
                    }
                }
            }
            assert_eq!(seen, [auto.burn_in; 3], "the burn-in ended in every layer");
            let found = pair.plan.read_slack().unwrap();
            for (layer, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for (found, expected) in found.iter().zip(expected) {
                    let (found, expected) = (found.unwrap(), expected.unwrap());
                    assert_eq!((found.min, found.max, found.count), (expected.min, expected.max, expected.count));
                    assert!((found.mean / expected.mean - 1.0).abs() < 1e-12, "layer {layer}: {found:?} {expected:?}");
                }
            }
            // A restart begins anew, and other policies measure none.
            pair.plan.restart(&device().stream().unwrap()).unwrap();
            assert_eq!(pair.plan.read_slack().unwrap(), [[None; 4]; 3]);
        }
    }
    let other = Pair::new(&spec, PolicyKind::Geometry.into(), &mut StdRng::seed_from_u64(32));
    assert!(other.plan.read_slack().unwrap().is_empty());
}

fn a_state_moves_between_host_and_device() {
    let spec = heterogeneous(&[(8, 2), (6, 6), (8, 2)]);
    for config in with_granularity(Granularity::Head) {
        let mut rng = StdRng::seed_from_u64(5);
        let mut pair = Pair::new(&spec, config, &mut rng);
        for step in 0..53 {
            pair.step(&spec, step, 0.05, &mut rng);
        }
        // Through JSON: device to host, host to a new device policy, and back into the running one.
        let text = serde_json::to_string(&pair.plan.save().unwrap()).unwrap();
        let state: PolicyState = serde_json::from_str(&text).unwrap();
        pair.host = state.clone().restore(&config, (&spec).into()).unwrap();
        pair.plan.load(state.clone()).unwrap();
        pair.same_state(53);
        for step in 53..80 {
            pair.step(&spec, step, 0.05, &mut rng);
        }
        pair.same_state(80);
        let needs = pair.plan.read_bounds().is_ok();
        let source = if needs { BoundSource::Host } else { BoundSource::None };
        pair.plan = PolicyEngine::with_state(device(), &spec, pair.host.save(), &Tail::default(), source).unwrap();
        pair.move_weights(&spec, &mut rng);
        for step in 80..100 {
            pair.step(&spec, step, 0.05, &mut rng);
        }
        pair.same_state(100);
    }
}

fn a_graph_replays_the_loop_at_the_same_addresses() {
    let spec = model(3, 8, 2);
    for config in with_granularity(Granularity::Layer) {
        let mut rng = StdRng::seed_from_u64(9);
        let mut pair = Pair::new(&spec, config, &mut rng);
        let stream = device().stream().unwrap();
        let addresses = |plan: &PolicyEngine| ScaledTensor::ALL.map(|t| plan.descales(1, t).unwrap());
        let before = addresses(&pair.plan);
        // A capture refuses allocations and synchronisation.
        let graph = stream.capture(|s| {
            pair.plan.observe(s)?;
            pair.plan.refresh(s)
        });
        let graph = graph.unwrap();
        for _ in 0..10 {
            let rows: Vec<StepWords> = pair.bounds.iter().map(|b| words(&spec, b, 0.05, &mut rng)).collect();
            for (layer, row) in rows.iter().enumerate() {
                pair.plan.write_stats(layer, &row.to_row()).unwrap();
            }
            let mut plans = vec![];
            for (bounds, row) in pair.bounds.iter().zip(&rows) {
                let stats = StepStats::from(row);
                plans.push(pair.host.plan(bounds, Some(&stats)));
            }
            for ((plan, bounds), row) in plans.iter().zip(&pair.bounds).zip(&rows) {
                if let Ok(plan) = plan {
                    pair.host.observe(plan, bounds, &StepStats::from(row)).unwrap();
                }
            }
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            pair.same_state(0);
        }
        assert_eq!(before, addresses(&pair.plan));
    }
}

fn weights_become_plans_in_one_graph() {
    let case = Case { biases: true, ..Case::new("chain", (512, 64), (6, 2)) };
    let layer = Layer::new(&case, 77);
    let spec = case.spec();
    let truth = layer.truth();
    let tail = Tail::default();
    for kind in [PolicyKind::Geometry, PolicyKind::GeometryCStar, PolicyKind::AutoC] {
        // SAFETY: `layer` holds the memory.
        let engine = unsafe { ScaleEngine::new(device(), &[layer.input], true) }.unwrap();
        let plan =
            PolicyEngine::new(device(), &spec, kind.into(), &tail, BoundSource::Weights(Box::new(engine))).unwrap();
        let stream = device().stream().unwrap();
        let graph = stream.capture(|s| plan.refresh(s)).unwrap();
        for _ in 0..6 {
            graph.launch().unwrap();
        }
        stream.synchronize().unwrap();
        let got = plan.read_plan(0).unwrap();
        let host = PolicyConfig::from(kind).build((&spec).into()).unwrap();
        assert_eq!(bits(&got), bits(&host.plan(&plan.read_bounds().unwrap()[0], None).unwrap()), "{kind}");
        // And close above the plan from f64 throughout.
        let want = host.plan(&truth, None).unwrap();
        for tensor in ScaledTensor::ALL {
            for (got, want) in tensor.descales(&got).unwrap().iter().zip(tensor.descales(&want).unwrap()) {
                let ratio = got.get() / want.get();
                assert!((0.999_997..1.025).contains(&ratio), "{kind} {}: {ratio}", tensor.name());
            }
        }
        assert_eq!(plan.read_status().unwrap(), [0]);
    }
}

/// Power iteration in place of certified norms: one iteration a replay, the host's plan of the bounds that it leaves, and a resume
/// from the vectors with the same bits.
fn estimates_become_plans_in_one_graph() {
    for (estimator, rotary) in [(Estimator::Power, 64), (Estimator::Power, 0), (Estimator::PowerSummed, 64)] {
        let case = Case { biases: true, rotary, ..Case::new("chain", (512, 64), (6, 2)) };
        let layer = Layer::new(&case, 77);
        let (spec, tail, stream) = (case.spec(), Tail::default(), device().stream().unwrap());
        let geometry = LayerGeometry::new(&spec, layer.weights()).unwrap();
        for kind in [PolicyKind::Geometry, PolicyKind::GeometryCStar, PolicyKind::AutoC] {
            // SAFETY: `layer` holds the memory.
            let engine = || unsafe { EstimateEngine::new(device(), &[layer.input], estimator, 5) }.unwrap();
            let policy = |engine| {
                let source = BoundSource::Estimates(Box::new(engine));
                PolicyEngine::new(device(), &spec, kind.into(), &tail, source).unwrap()
            };
            let plan = policy(engine());
            plan.refresh(&stream).unwrap();
            stream.synchronize().unwrap();
            let graph = stream.capture(|s| plan.refresh(s)).unwrap();
            for _ in 0..9 {
                graph.launch().unwrap();
            }
            stream.synchronize().unwrap();
            let host = PolicyConfig::from(kind).build((&spec).into()).unwrap();
            let (got, bounds) = (plan.read_plan(0).unwrap(), plan.read_bounds().unwrap().remove(0));
            assert_eq!(bits(&got), bits(&host.plan(&bounds, None).unwrap()), "{kind}");

            let found = plan.estimates().unwrap().estimates().read().unwrap();
            let sigma: Vec<f64> = (0..6).map(|head| f64::from(found[head % found.len()])).collect();
            let want = LayerBounds::estimated(&spec, &geometry, &from_estimates(&geometry, &sigma).unwrap(), &tail);
            for (got, want) in bounds.heads.iter().zip(want.unwrap().heads) {
                let ratio = got.rounded.unwrap() / want.rounded.unwrap();
                assert!((0.99..1.2).contains(&ratio), "{kind} {}: {ratio}", estimator.name());
            }

            let vectors = plan.estimates().unwrap().vectors().read().unwrap();
            let mut resumed = engine();
            resumed.restore(&vectors).unwrap();
            let resumed = policy(resumed);
            for plan in [&plan, &resumed] {
                plan.refresh(&stream).unwrap();
            }
            stream.synchronize().unwrap();
            assert_eq!(bits(&plan.read_plan(0).unwrap()), bits(&resumed.read_plan(0).unwrap()), "{kind}");
            assert_eq!(plan.read_status().unwrap(), [0]);
        }
    }
}

fn an_attention_call_feeds_the_policy() {
    let Ok(attention) = Cuda::new(device()) else {
        println!("ignored: this architecture has no attention kernel");
        return;
    };
    let mut spec = model(2, 8, 2);
    for layer in &mut spec.layers {
        (layer.d_head, layer.rope) = (64, None);
    }
    let mut rng = StdRng::seed_from_u64(8);
    let plan =
        PolicyEngine::new(device(), &spec, PolicyKind::DelayedTe.into(), &Tail::default(), BoundSource::None).unwrap();
    let mut host = PolicyConfig::from(PolicyKind::DelayedTe).build((&spec).into()).unwrap();
    let call = AttentionCall::causal(AttentionShape {
        batch: 2,
        n_q_heads: 8,
        n_kv_heads: 2,
        len_q: 200,
        len_k: 200,
        d_head: 64,
        d_v: 64,
    });
    let stream = device().stream().unwrap();
    let bounds: Vec<LayerBounds> = (0..2).map(|layer| bounds(&spec, layer, &mut rng)).collect();
    let random = |heads: usize, size: f32, rng: &mut StdRng| -> Vec<f32> {
        (0..2 * 200 * heads * 64).map(|_| size * rng.random_range(-1.0..1.0f32)).collect()
    };
    let on_device = DeviceCall::causal(call.shape);
    let workspace_bytes = Workspace::of(&on_device, Element::F32, PvAccumulator::default(), false).bytes;
    let workspace = device().zeros::<u8>(workspace_bytes).unwrap();
    for step in 0..4 {
        plan.refresh(&stream).unwrap();
        let plans: Vec<ScalePlan> = bounds.iter().map(|b| host.plan(b, None).unwrap()).collect();
        for (layer, want) in plans.iter().enumerate() {
            assert_eq!(bits(&plan.read_plan(layer).unwrap()), bits(want), "step {step} layer {layer}");
            let size = 3.0 * (1 + step + layer) as f32;
            let [q, k, v] = [8, 2, 2].map(|heads| device().upload(&random(heads, size, &mut rng)).unwrap());
            let out = device().zeros::<u16>(2 * 200 * 8 * 64).unwrap();
            // SAFETY: every array has the size of its view and outlives the call, which is waited for.
            unsafe {
                let row = |tensor| {
                    let ptr = plan.descales(layer, tensor).unwrap();
                    Some(View::new(ptr, Element::F32, [2, 2], [0, 1]))
                };
                let words = sigmascale::stats::stats_words(8, 2);
                let tensors = Tensors {
                    q: View::dense(q.ptr(), Element::F32, [2, 200, 8, 64]),
                    keys: Keys::Rows {
                        k: View::dense(k.ptr(), Element::F32, [2, 200, 2, 64]),
                        v: View::dense(v.ptr(), Element::F32, [2, 200, 2, 64]),
                    },
                    descales: Descales {
                        q: row(ScaledTensor::Q),
                        k: row(ScaledTensor::K),
                        v: row(ScaledTensor::V),
                        o: None,
                        logit: None,
                    },
                    rope: None,
                    accumulator: PvAccumulator::default(),
                    saved: None,
                    out: View::dense(out.ptr(), Element::Bf16, [2, 200, 8, 64]),
                    lse: None,
                    stats: Some(View::dense(plan.stats(layer).unwrap(), Element::U32, [words])),
                };
                let workspace = View::dense(workspace.ptr(), Element::U8, [workspace_bytes]);
                attention.launch(&stream, &on_device, &tensors, &workspace).unwrap();
            }
            stream.synchronize().unwrap();
        }
        plan.observe(&stream).unwrap();
        let observed = plan.read_observed().unwrap();
        for (layer, want) in plans.iter().enumerate() {
            let size = 3.0 * (1 + step + layer) as f32;
            let amax = observed[layer].q.iter().map(|head| head.amax).fold(0.0, f32::max);
            assert!(amax > 0.99 * size && amax <= size, "step {step} layer {layer}: {amax} of {size}");
            assert!(observed[layer].logits.iter().all(|head| head.max > 0.0 && head.min < 0.0));
            host.observe(want, &bounds[layer], &observed[layer]).unwrap();
        }
        assert_eq!(plan.save().unwrap(), host.save(), "step {step}");
    }
    // The statistics were cleared: a step without calls leaves zeros.
    plan.observe(&stream).unwrap();
    assert!(plan.read_observed().unwrap().iter().all(|stats| stats.q.iter().all(|head| head.amax == 0.0)));
    plan.clear_status(&stream).unwrap();
}

fn what_is_not_finite_is_flagged() {
    let spec = model(2, 4, 2);
    let mut rng = StdRng::seed_from_u64(3);
    let mut pair = Pair::new(&spec, PolicyKind::Geometry.into(), &mut rng);
    let stream = device().stream().unwrap();
    pair.bounds[1].heads[1].rounded = Some(f64::NAN);
    pair.plan.write_bounds(&pair.bounds).unwrap();
    pair.plan.refresh(&stream).unwrap();
    assert!(pair.plan.read_plan(0).is_ok());
    let error = pair.plan.read_plan(1).unwrap_err();
    assert!(error.is_non_finite() && error.to_string().contains("layer 1: a logit descale"), "{error}");
    assert!(pair.plan.read_bounds().unwrap_err().is_non_finite());
    assert_eq!(pair.plan.read_status().unwrap(), [0, status::NO_PLAN]);
    pair.plan.clear_status(&stream).unwrap();
    pair.bounds[1].heads[1].rounded = Some(7.0);
    pair.plan.write_bounds(&pair.bounds).unwrap();
    pair.plan.refresh(&stream).unwrap();
    assert_eq!(pair.plan.read_status().unwrap(), [0, 0]);
    // Statistics: an overflow, a NaN, a value past its bound.
    let mut row = StepWords::from_row(&[0; 8 * 6], 4, 2).unwrap();
    row.v[1].overflow = 2;
    row.q[0].non_finite = 1;
    row.logits[2].amax_o = 1f32.to_bits();
    pair.plan.write_stats(0, &row.to_row()).unwrap();
    let mut past = StepWords::from_row(&[0; 8 * 6], 4, 2).unwrap();
    past.k[0].amax = 1e30f32.to_bits();
    pair.plan.write_stats(1, &past.to_row()).unwrap();
    pair.plan.observe(&stream).unwrap();
    let words = pair.plan.read_status().unwrap();
    assert_eq!(words, [status::OVERFLOW | status::NON_FINITE, status::BEYOND_BOUND]);
    pair.plan.clear_status(&stream).unwrap();
    let mut logits = StepWords::from_row(&[0; 8 * 6], 4, 2).unwrap();
    logits.logits[2].amax_o = 1f32.to_bits();
    pair.plan.write_stats(0, &logits.to_row()).unwrap();
    logits.logits[3].overflow = 1;
    pair.plan.write_stats(1, &logits.to_row()).unwrap();
    pair.plan.observe(&stream).unwrap();
    assert_eq!(pair.plan.read_status().unwrap(), [0, status::OVERFLOW]);
}

fn foreign_states_and_bounds_are_refused() {
    let spec = model(2, 4, 2);
    let mut rng = StdRng::seed_from_u64(4);
    let plan = Pair::new(&spec, PolicyKind::DelayedTe.into(), &mut rng).plan;
    let other = PolicyConfig::from(PolicyKind::DelayedPaper).build((&spec).into()).unwrap().save();
    assert!(plan.load(other.clone()).unwrap_err().is_mismatch());
    let larger = model(3, 4, 2);
    let error = PolicyEngine::with_state(device(), &larger, other, &Tail::default(), BoundSource::None).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("layers is 2, not 3"), "{error}");
    let none = PolicyEngine::new(device(), &spec, PolicyKind::Geometry.into(), &Tail::default(), BoundSource::None);
    assert!(none.unwrap_err().is_argument());
    let geometry = Pair::new(&spec, PolicyKind::Geometry.into(), &mut rng);
    let short = geometry.bounds[..1].to_vec();
    assert!(geometry.plan.write_bounds(&short).unwrap_err().is_mismatch());
    // The calibrated bound is needed where the policy plans from it.
    let mut c_star = Pair::new(&spec, PolicyKind::GeometryCStar.into(), &mut rng);
    c_star.bounds[1].heads[0].rank_aware = None;
    geometry.plan.write_bounds(&c_star.bounds).unwrap();
    let error = c_star.plan.write_bounds(&c_star.bounds).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("layer 1: there is no rank-aware bound"), "{error}");
    assert!(geometry.plan.descales(2, ScaledTensor::Q).unwrap_err().is_argument());
    assert!(geometry.plan.write_stats(0, &[0; 8]).unwrap_err().is_argument());
}
