//! Rate of the Gram stage on a Mistral-7B-shaped layer beside the machine's matrix-product rate, on all cores:
//! `cargo bench --bench gram`. Counted are 2 d r^2 operations per head, the whole product; symmetry saves a part of it.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nalgebra::DMatrix;
use rayon::prelude::*;
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{SyntheticModel, SyntheticOptions, preset};
use sigmascale::spectral::{LayerGrams, layer_channels};
use std::hint::black_box;
use std::time::Instant;

const SIDE: usize = 768;

/// Best of a few runs, in operations a second.
fn rate(operations: f64, mut run: impl FnMut()) -> f64 {
    run();
    let best = (0..5).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    operations / best.fold(f64::INFINITY, f64::min)
}

/// Square products of nalgebra, one on each core.
fn product_rate<T: nalgebra::RealField + Copy + Send + Sync>() -> f64 {
    let cores = rayon::current_num_threads();
    let a = DMatrix::<T>::from_fn(SIDE, SIDE, |i, j| nalgebra::convert(((i * 7 + j * 3) % 11) as f64 - 5.0));
    let mut outputs = vec![DMatrix::<T>::zeros(SIDE, SIDE); cores];
    rate(2.0 * (SIDE as f64).powi(3) * cores as f64, || {
        outputs.par_iter_mut().for_each(|out| out.gemm(T::one(), &a, &a, T::zero()));
        black_box(&outputs);
    })
}

fn gram(criterion: &mut Criterion) {
    let mut spec = preset("mistral-7b").expect("a preset");
    spec.layers.truncate(1);
    let model = SyntheticModel::new(&spec, 0, SyntheticOptions::default()).expect("a model");
    let drawn = model.layer(0).expect("a layer");
    let geometry = LayerGeometry::new(&spec, drawn.weights()).expect("a geometry");
    let [q, k, _] = layer_channels(&geometry).expect("finite weights");
    // Every head's Gram with its gain folded in and of its raw weights.
    let grams = 2 * (geometry.q.len() + geometry.k.len());
    let operations = 2.0 * spec.d_model as f64 * (spec.layers[0].d_head as f64).powi(2) * grams as f64;
    let grams = || {
        black_box(LayerGrams::new(&geometry, &q, &k));
    };

    let (ours, f64_rate, f32_rate) = (rate(operations, grams), product_rate::<f64>(), product_rate::<f32>());
    println!("cores {}", rayon::current_num_threads());
    println!("Gram stage        {:7.1} GFLOP/s", ours * 1e-9);
    println!("f64 product       {:7.1} GFLOP/s, Gram stage at {:.0} %", f64_rate * 1e-9, 100.0 * ours / f64_rate);
    println!("f32 product       {:7.1} GFLOP/s, Gram stage at {:.0} %", f32_rate * 1e-9, 100.0 * ours / f32_rate);

    let mut group = criterion.benchmark_group("gram");
    group.sample_size(10).throughput(Throughput::Elements(operations as u64));
    group.bench_function("mistral-7b layer", |bencher| bencher.iter(grams));
    group.finish();
}

criterion_group!(benches, gram);
criterion_main!(benches);
