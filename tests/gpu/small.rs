//! One case per kernel family, each with few kernels and so many tiles that every ring of buffers goes round: what
//! compute-sanitizer is run on, which is too slow for the rest. Racecheck follows an arrival at a barrier by the accesses of the
//! arriving thread alone, so for it every lane arrives: `SIGMASCALE_EVERY_LANE=1 compute-sanitizer --tool racecheck gpu small`.

use crate::device;
use crate::engine::{LOGIT_BELOW, OPERAND_ABOVE, operands, ratio};
use crate::weights::{Case, Kind, Layer, Layout};
use sigmascale::device::scale::{Dtype, GramRoute, PowerEngine, ScaleEngine, SummedPowerEngine};
use sigmascale::geometry::LayerGeometry;
use sigmascale::spectral::{self, GramEngine, PowerState, SpectralEngine};

tests![
    one_rounded_product,
    two_products_with_a_mean,
    two_products_along_channels,
    two_products_with_a_mean_along_channels,
    heads_of_256,
    two_heads_of_f32,
    a_head_of_f32,
    without_tensor_cores,
    a_power_step,
    a_power_step_along_channels,
    a_summed_power_step,
    a_summed_power_step_along_channels,
];

fn rounded() -> Case {
    Case::new("one rounded product", (8192, 128), (8, 4))
}

fn fixed() -> Case {
    let case = Case::new("two products", (8192, 64), (10, 10));
    Case { rotary: 0, layer_norm: true, biases: true, ..case }
}

/// How far entries of a Gram may be off, relative to the norms of their channels, and its trace.
#[derive(Clone, Copy)]
struct Near {
    entry: f64,
    trace: f64,
}
/// Where weights are rounded to f16, by the rounding of a few thousand of them.
const ROUNDED: Near = Near { entry: 2e-4, trace: 1.5e-5 };
/// Elsewhere by what sums in f32 lose in 256 inputs, a tenth of what they lose in all of them.
const EXACT: Near = Near { entry: 1e-5, trace: 4e-6 };

fn check_gram(layer: &Layer, engine: &ScaleEngine, of_k: bool, near: Near) {
    let (case, weights) = (&layer.case, layer.weights());
    let view = if of_k { &weights.k.heads[case.n_kv - 1] } else { &weights.q.heads[0] };
    let offset = if case.one_plus { 1.0 } else { 0.0 };
    let gain: Vec<f64> = weights.norm_gain.as_ref().unwrap().iter().map(|g| g + offset).collect();
    let column = |c| {
        let mut x = vec![0.0; case.d];
        view.read_block(c..c + 1, 0..case.d, &mut x);
        x.iter_mut().zip(&gain).for_each(|(x, g)| *x *= g);
        x
    };
    let columns: Vec<Vec<f64>> = (0..case.r).map(column).collect();
    let dot = |a: usize, b: usize| columns[a].iter().zip(&columns[b]).map(|(x, y)| x * y).sum::<f64>();
    let norms: Vec<f64> = (0..case.r).map(|c| dot(c, c).sqrt()).collect();
    let got = engine.read_gram(0, if of_k { case.n_q + case.n_kv - 1 } else { 0 }).unwrap();
    for (a, b) in (0..case.r).flat_map(|a| (a..case.r).map(move |b| (a, b))) {
        let error = (got[a * case.r + b] - dot(a, b)).abs() / (norms[a] * norms[b]);
        assert!(error < near.entry, "{}: of k {of_k}: entry {a}, {b} is off by {error:.1e}", case.name);
    }
    let (trace, want) =
        ((0..case.r).map(|c| got[c * case.r + c]).sum::<f64>(), norms.iter().map(|n| n * n).sum::<f64>());
    assert!((trace / want - 1.0).abs() < near.trace, "{}: of k {of_k}: trace {trace} of {want}", case.name);
}

fn plan(case: Case, route: GramRoute, near: Near) {
    let layer = Layer::new(&case, 1);
    let truth = layer.truth();
    // SAFETY: `layer` holds the memory.
    let engine = unsafe { ScaleEngine::new(device(), &[layer.input], true) }.unwrap();
    if device().arch().compute == 90 {
        assert_eq!(engine.route(0), Some(route), "{}", case.name);
    }
    let stream = device().stream().unwrap();
    let check_operands = |from: &str| {
        let bounds = engine.operand_bounds().read().unwrap();
        for (i, (got, want)) in bounds.iter().zip(operands(&case, &truth)).enumerate() {
            let ratio = ratio(f64::from(*got), want);
            assert!(
                (1.0..=1.0 + OPERAND_ABOVE).contains(&ratio),
                "{}: {from}: operand bound {i}: {ratio:.8}",
                case.name
            );
        }
    };
    engine.descales(&stream).unwrap();
    check_operands("descales alone");
    engine.plan(&stream).unwrap();
    engine.frobenius(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(engine.status().read().unwrap()[0] & 3, 0, "{}", case.name);
    check_operands("plan");
    check_gram(&layer, &engine, false, near);
    check_gram(&layer, &engine, true, near);
    let above = if case.rotary == 0 && case.r > 128 { f64::INFINITY } else { 1.02 };
    for (h, (got, want)) in engine.head_bounds().unwrap().read().unwrap().iter().zip(&truth.heads).enumerate() {
        let ratio = ratio(got.rounded.into(), want.rounded.unwrap());
        assert!((1.0 - LOGIT_BELOW..=above).contains(&ratio), "{}: head {h}: {ratio}", case.name);
    }
}

fn one_rounded_product() {
    plan(rounded(), GramRoute::Rounded, ROUNDED);
}

fn two_products_with_a_mean() {
    plan(fixed(), GramRoute::Split, EXACT);
}

fn two_products_along_channels() {
    let case = Case::new("along channels", (8192, 80), (8, 4));
    plan(Case { dtype: Dtype::F16, layout: Layout::Conv1d, ..case }, GramRoute::Split, EXACT);
}

fn two_products_with_a_mean_along_channels() {
    plan(Case { layout: Layout::Conv1d, ..fixed() }, GramRoute::Split, EXACT);
}

fn heads_of_256() {
    plan(Case::new("heads of 256", (4096, 256), (6, 2)), GramRoute::Wide, ROUNDED);
}

fn two_heads_of_f32() {
    plan(
        Case { dtype: Dtype::F32, rotary: 32, ..Case::new("two heads", (2048, 64), (20, 10)) },
        GramRoute::Wide,
        ROUNDED,
    );
}

fn a_head_of_f32() {
    // And few directions, which the Frobenius bound follows to the end.
    let case = Case { dtype: Dtype::F32, kind: Kind::Uneven, ..Case::new("a head", (4096, 128), (6, 3)) };
    plan(case, GramRoute::Wide, ROUNDED);
}

fn without_tensor_cores() {
    let case = Case::new("plain", (200, 192), (2, 1));
    plan(Case { layout: Layout::Conv1d, layer_norm: true, biases: true, ..case }, GramRoute::Generic, EXACT);
}

/// The largest norm that the step may come to, of each head.
fn norms(layer: &Layer) -> Vec<f64> {
    let spec = layer.case.spec();
    let geometry = LayerGeometry::new(&spec, layer.weights()).unwrap();
    GramEngine.layer(&geometry).unwrap().heads.unwrap().iter().map(|head| head.sigma).collect()
}

fn step(case: Case) {
    let layer = Layer::new(&case, 2);
    // SAFETY: `layer` holds the memory.
    let power = unsafe { PowerEngine::new(device(), &[layer.input], false, 5) }.unwrap();
    let stream = device().stream().unwrap();
    for _ in 0..8 {
        power.step(&stream).unwrap();
    }
    for (h, (got, want)) in power.sigma().read().unwrap().iter().zip(norms(&layer)).enumerate() {
        let ratio = f64::from(*got) / want;
        assert!((0.8..=1.0 + 1e-5).contains(&ratio), "{}: head {h}: {ratio}", case.name);
    }
}

fn a_power_step() {
    step(Case { rotary: 0, ..rounded() });
}

fn a_power_step_along_channels() {
    step(Case { layout: Layout::Conv1d, ..fixed() });
}

/// The norm of the layer's sum, on the CPU.
fn sum(case: Case) {
    let layer = Layer::new(&case, 3);
    let (spec, weights) = (case.spec(), layer.weights());
    let geometry = LayerGeometry::new(&spec, weights).unwrap();
    let mut state = PowerState::new(&spec, 1);
    let mut cpu = spectral::PowerEngine::new(&mut state);
    cpu.cold = 60;
    let want = cpu.summed(&geometry).unwrap().sigma;
    // SAFETY: `layer` holds the memory.
    let power = unsafe { SummedPowerEngine::new(device(), &[layer.input; 3], 5) }.unwrap();
    let stream = device().stream().unwrap();
    power.steps(&stream, 8).unwrap();
    for got in power.sigma().read().unwrap() {
        let ratio = f64::from(got) / want;
        assert!((0.8..=1.0 + 1e-4).contains(&ratio), "{}: {ratio}", case.name);
    }
}

fn a_summed_power_step() {
    sum(Case { rotary: 0, ..rounded() });
}

fn a_summed_power_step_along_channels() {
    sum(Case { layout: Layout::Conv1d, ..fixed() });
}
