//! FP8 casts of slices. Throughput counts bytes read and written.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use sigmascale::fp8::{Format, OnOverflow};
use std::hint::black_box;

fn casts(c: &mut Criterion) {
    // 16 MiB of f32: past the caches of most machines, and small enough to run often.
    let n = 4 << 20;
    let x: Vec<f32> = (0..n).map(|i| ((i as f32) * 0.618).sin() * 3.0).collect();
    let short: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let (mut codes, mut values) = (vec![0u8; n], vec![0f32; n]);
    let mut group = c.benchmark_group("fp8");
    group.sample_size(20);
    for format in Format::ALL {
        group.throughput(Throughput::Bytes(5 * n as u64));
        group.bench_function(format!("{format:?}/encode f32"), |b| {
            b.iter(|| format.encode_slice(black_box(&x), 100.0, OnOverflow::Saturate, &mut codes));
        });
        group.throughput(Throughput::Bytes(3 * n as u64));
        group.bench_function(format!("{format:?}/encode bf16"), |b| {
            b.iter(|| format.encode_slice_bf16(black_box(&short), 100.0, OnOverflow::Saturate, &mut codes));
        });
        group.throughput(Throughput::Bytes(8 * n as u64));
        group.bench_function(format!("{format:?}/round f32"), |b| {
            b.iter(|| format.round_slice(black_box(&x), 100.0, OnOverflow::Saturate, &mut values));
        });
        group.throughput(Throughput::Bytes(4 * n as u64));
        group.bench_function(format!("{format:?}/count f32"), |b| {
            b.iter(|| format.count_slice(black_box(&x), 100.0));
        });
        group.throughput(Throughput::Bytes(5 * n as u64));
        group.bench_function(format!("{format:?}/decode"), |b| {
            b.iter(|| format.decode_slice(black_box(&codes), 0.01, &mut values));
        });
    }
    group.throughput(Throughput::Bytes(8 * n as u64));
    group.bench_function("copy f32", |b| b.iter(|| values.copy_from_slice(black_box(&x))));
    group.finish();
}

criterion_group!(benches, casts);
criterion_main!(benches);
