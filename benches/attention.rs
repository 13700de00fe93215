//! CPU attention. Throughput is floating-point operations of the two products that the mask shows, 4 d_head a pair
//! (backward: 10 d_head), printed by criterion as elements.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sigmascale::Descale;
use sigmascale::attention::{
    Attention, AttentionCall, AttentionShape, BackwardPrecision, Cpu, Inputs, Precision, Saved, backward, measure,
};
use sigmascale::plan::{OperandDescales, ScalePlan};

fn layers(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    for (n_q_heads, n_kv_heads, len, d_head) in [(32, 8, 256, 128), (32, 8, 1024, 128), (25, 25, 1024, 64)] {
        let shape = AttentionShape { batch: 1, n_q_heads, n_kv_heads, len_q: len, len_k: len, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        let (q, k) = (wave(shape.q_elements(), 0.7), wave(shape.k_elements(), 0.3));
        let v = wave(shape.v_elements(), 0.11);
        let inputs = Inputs { q: &q, k: &k, v: &v };
        let row = |n: usize| vec![Descale::new(1.0 / 400.0).expect("positive"); n];
        let operands = OperandDescales {
            q: row(n_kv_heads),
            k: row(n_kv_heads),
            v: Some(row(n_kv_heads)),
            o: Some(row(n_kv_heads)),
        };
        let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: row(n_q_heads), operands };
        let pairs = n_q_heads * len * (len + 1) / 2;
        let name = format!("{n_q_heads}x{n_kv_heads} heads, {len} tokens, d {d_head}");
        group.throughput(Throughput::Elements((4 * pairs * d_head) as u64));
        for (mode, precision) in
            [("kernel", Precision::KERNEL), ("paper logits", Precision::PAPER_LOGITS), ("f32", Precision::F32)]
        {
            group.bench_function(format!("{name}/{mode}"), |b| {
                b.iter(|| Cpu.forward(&call, &inputs, &plan, &precision).expect("a valid call"));
            });
        }
        group.throughput(Throughput::Elements((2 * pairs * d_head) as u64));
        group.bench_function(format!("{name}/measure"), |b| b.iter(|| measure(&call, &inputs).expect("a valid call")));
        let output = Cpu.forward(&call, &inputs, &plan, &Precision::KERNEL).expect("a valid call");
        let saved = Saved { out: &output.out, lse: &output.lse };
        group.throughput(Throughput::Elements((10 * pairs * d_head) as u64));
        group.bench_function(format!("{name}/backward"), |b| {
            let how = BackwardPrecision::default();
            b.iter(|| backward(&call, &inputs, &plan, &Precision::KERNEL, &how, &saved, &q).expect("a valid call"));
        });
    }
    group.finish();
}

criterion_group!(benches, layers);
criterion_main!(benches);
