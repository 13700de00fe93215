//! Small cases of every kernel family, each with few kernels and so many tiles that every ring of buffers goes round: what
//! compute-sanitizer is run on, which is too slow for the rest (`.ci/gpu`). A name begins with its family; those of attention are in
//! `attention/small.rs`. Racecheck follows an arrival at a barrier by the accesses of the arriving thread alone, so for it every lane
//! arrives: `SIGMASCALE_EVERY_LANE=1 compute-sanitizer --tool racecheck gpu small::forward`.

use crate::device;
use crate::engine::{LOGIT_BELOW, OPERAND_ABOVE, compare, operands, ratio};
use crate::weights::{Case, Kind, Layer, Layout};
use crate::{frobenius, mla, norms, policies, qk_norm, shapes};
use sigmascale::device::DeviceBounds;
use sigmascale::device::scale::{Dtype, GramRoute, PowerEngine, ScaleEngine, SummedPowerEngine};
use sigmascale::geometry::LayerGeometry;
use sigmascale::spectral::{self, GramEngine, PowerState, SpectralEngine};

tests![
    grams_rounded,
    grams_split_with_a_mean,
    grams_split_along_channels,
    grams_split_with_a_mean_along_channels,
    grams_wide,
    grams_wide_of_two_heads,
    grams_wide_of_f32,
    grams_generic,
    power_heads,
    power_heads_along_channels,
    power_sum,
    power_sum_along_channels,
    norms_of_every_storage,
    frobenius_norms,
    products_without_rotation,
    qk_norm_bounds,
    addresses_that_move,
    mla_descales,
    policy_steps,
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

fn grams_rounded() {
    plan(rounded(), GramRoute::Rounded, ROUNDED);
}

fn grams_split_with_a_mean() {
    plan(fixed(), GramRoute::Split, EXACT);
}

fn grams_split_along_channels() {
    let case = Case::new("along channels", (8192, 80), (8, 4));
    plan(Case { dtype: Dtype::F16, layout: Layout::Conv1d, ..case }, GramRoute::Split, EXACT);
}

fn grams_split_with_a_mean_along_channels() {
    plan(Case { layout: Layout::Conv1d, ..fixed() }, GramRoute::Split, EXACT);
}

fn grams_wide() {
    plan(Case::new("heads of 256", (4096, 256), (6, 2)), GramRoute::Wide, ROUNDED);
}

fn grams_wide_of_two_heads() {
    plan(
        Case { dtype: Dtype::F32, rotary: 32, ..Case::new("two heads", (2048, 64), (20, 10)) },
        GramRoute::Wide,
        ROUNDED,
    );
}

fn grams_wide_of_f32() {
    // And few directions, which the Frobenius bound follows to the end.
    let case = Case { dtype: Dtype::F32, kind: Kind::Uneven, ..Case::new("a head", (4096, 128), (6, 3)) };
    plan(case, GramRoute::Wide, ROUNDED);
}

fn grams_generic() {
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

fn power_heads() {
    step(Case { rotary: 0, ..rounded() });
}

fn power_heads_along_channels() {
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

fn power_sum() {
    sum(Case { rotary: 0, ..rounded() });
}

fn power_sum_along_channels() {
    sum(Case { layout: Layout::Conv1d, ..fixed() });
}

fn norms_of_every_storage() {
    // Rows of 16 bytes in both directions, several blocks a head, and what no copy takes.
    for (case, seed) in [
        (Case::new("rows", (1024, 128), (2, 1)), 5),
        (
            Case { layer_norm: true, biases: true, layout: Layout::Conv1d, ..Case::new("columns", (1024, 64), (3, 3)) },
            6,
        ),
        (Case { dtype: Dtype::F32, ..Case::new("f32", (200, 24), (2, 2)) }, 7),
    ] {
        norms::check(&case.name, &Layer::new(&case, seed));
    }
}

fn frobenius_norms() {
    frobenius::norms_of(&Case { kind: Kind::Uneven, ..Case::new("uneven", (400, 64), (4, 2)) }, 8);
    frobenius::norms_of(&Case::new("gaussian", (512, 128), (2, 1)), 9);
}

fn products_without_rotation() {
    for r in [64, 136, 256] {
        let bad = compare(&Case { rotary: 0, ..Case::new("products", (512, r), (4, 2)) }, 10);
        assert!(bad.is_empty(), "{}", bad.join("\n"));
    }
}

fn qk_norm_bounds() {
    let (stream, lone) = (device().stream().unwrap(), DeviceBounds::open().unwrap());
    for form in qk_norm::forms() {
        qk_norm::bounds_of_one(&Case::new("qwen3", (256, 128), (8, 2)), form, 11, &stream, &lone);
    }
}

fn addresses_that_move() {
    shapes::three_places(&Case::new("rotated", (512, 128), (4, 2)), 12);
    shapes::three_places(&Case { dtype: Dtype::F32, layout: Layout::Fused, ..Case::new("f32", (384, 64), (3, 3)) }, 15);
}

fn mla_descales() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for sizes in [[512, 2, 96, 64, 64, 32, 64, 2], [200, 3, 44, 36, 18, 10, 26, 1]] {
            mla::compare("small", &mla::config(sizes, &serde_json::json!({})), dtype);
        }
    }
}

fn policy_steps() {
    policies::a_few_steps();
}
