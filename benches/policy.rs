//! What a policy costs the host, one layer of a 70B model (64 query heads, 8 KV heads) a step.
//!
//! `cargo bench --bench policy`

use criterion::{Criterion, criterion_group, criterion_main};
use sigmascale::bound::{HeadBounds, LayerBounds, OperandBound};
use sigmascale::policy::{PolicyConfig, PolicyKind, PolicyShape};
use sigmascale::stats::{CastStats, LogitStats, StepStats};
use std::hint::black_box;

fn policies(criterion: &mut Criterion) {
    let shape = PolicyShape::uniform(80, 64, 8);
    let operand = OperandBound { exact: 9.0, rounded: 10.0 };
    let head = HeadBounds { rounded: Some(100.0), rank_aware: Some(20.0), ..HeadBounds::default() };
    let bounds = LayerBounds {
        layer: 3,
        heads: vec![head; 64],
        q: vec![operand; 64],
        k: vec![operand; 8],
        v: Some(vec![operand; 8]),
        m: None,
    };
    let cast = CastStats { amax: 2.0, count: 1 << 20, ..CastStats::default() };
    let logit = LogitStats { max: 12.0, min: -15.0, count: 1 << 20, ..LogitStats::default() };
    let stats =
        StepStats { logits: vec![logit; 64], q: vec![cast; 64], k: vec![cast; 8], v: vec![cast; 8], o: vec![cast; 64] };
    let mut group = criterion.benchmark_group("plan and observe");
    for kind in PolicyKind::ALL {
        let mut policy = PolicyConfig::from(kind).build(shape.clone()).expect("default parameters");
        group.bench_function(kind.name(), |bencher| {
            bencher.iter(|| {
                let plan = policy.plan(black_box(&bounds), Some(black_box(&stats))).expect("sound bounds");
                policy.observe(&plan, &bounds, &stats).expect("statistics of this shape")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, policies);
criterion_main!(benches);
