//! Power iteration on the device against the same iteration in f64, and against the CPU's exact norms.

use crate::device;
use crate::weights::{Case, Kind, Layer, Layout};
use sigmascale::cuda::{Buffer, Stream};
use sigmascale::device::scale::{DeviceWeights, Dtype, LayerInput, PowerEngine, SummedPowerEngine};
use sigmascale::geometry::LayerGeometry;
use sigmascale::spectral::{self, GramEngine, PowerState, SpectralEngine};
use std::sync::Arc;

tests![
    every_step_is_that_of_f64,
    it_converges_to_the_exact_norm_from_below,
    many_layers_are_the_same_as_one,
    steps_together_are_steps_one_by_one,
    the_same_start_gives_the_same_bits_and_a_resume_goes_on,
    a_capture_and_its_replays_neither_allocate_nor_wait,
    weights_that_are_not_finite_reach_their_heads_alone_and_leave_no_trace,
    a_zero_head_keeps_its_vectors,
    the_weights_are_kept_alive,
    every_summed_step_is_that_of_f64,
    the_summed_form_converges_to_the_cpus,
    summed_layers_are_apart_and_broken_ones_leave_no_trace,
    a_summed_resume_goes_on_with_the_same_bits,
    layers_of_any_mix_have_the_bits_of_engines_for_each_kind,
    a_summed_mix_has_the_bits_of_engines_for_each_kind,
];

fn cases() -> Vec<Case> {
    let case = |name, shape, heads| Case { rotary: 0, ..Case::new(name, shape, heads) };
    let conv = |name, shape, heads| Case { layout: Layout::Conv1d, layer_norm: true, ..case(name, shape, heads) };
    let mut all = vec![
        case("mistral", (1024, 128), (8, 2)),
        case("llama", (1280, 128), (4, 4)),
        case("group of eight", (2048, 128), (16, 2)),
        case("more than a pass takes", (640, 64), (20, 1)),
        Case { layer_norm: true, ..case("and with a mean", (640, 64), (8, 1)) },
        Case { layer_norm: true, ..case("gpt2-xl", (1600, 64), (5, 5)) },
        conv("conv1d", (768, 64), (12, 12)),
        conv("conv1d r128", (648, 128), (6, 2)),
        conv("conv1d r192", (200, 192), (2, 1)),
        conv("conv1d r256", (520, 256), (2, 1)),
        Case { layout: Layout::Fused, ..case("fused", (1024, 128), (6, 3)) },
        Case { layout: Layout::Strided, ..case("strided", (512, 64), (4, 1)) },
        Case { one_plus: true, ..case("gemma", (2048, 256), (8, 1)) },
        case("one tile", (64, 16), (1, 1)),
        case("many heads", (256, 32), (150, 150)),
        Case { dtype: Dtype::F32, ..case("f32", (1096, 64), (4, 2)) },
        Case { dtype: Dtype::F16, ..case("f16", (512, 64), (4, 2)) },
        case("rows off 16 bytes", (101, 64), (4, 2)),
        conv("conv1d r80", (512, 80), (4, 2)),
    ];
    all.extend((16..=256).step_by(24).map(|r| case("every head size", (328, r), (2, 1))));
    for kind in [Kind::Spiked, Kind::BadlyScaled, Kind::Cancelling, Kind::ZeroHead, Kind::Offset] {
        all.push(Case { kind, layer_norm: kind == Kind::Offset, ..case("kinds", (512, 64), (4, 2)) });
        all.push(Case { kind, layer_norm: true, ..conv("kinds", (512, 64), (4, 2)) });
    }
    all
}

fn stream() -> Stream {
    device().stream().unwrap()
}

fn engine(inputs: &[LayerInput], raw: bool) -> PowerEngine {
    // SAFETY: every test holds the layers, and writes none of their memory while work is on the device.
    unsafe { PowerEngine::new(device(), inputs, raw, 5) }.unwrap()
}

fn bits(buffer: &Buffer<f32>) -> Vec<u32> {
    buffer.read().unwrap().into_iter().map(f32::to_bits).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Columns of the effective weights, head by head, of q and of k.
fn columns(layer: &Layer, raw: bool) -> [Vec<Vec<Vec<f64>>>; 2] {
    let (case, weights) = (&layer.case, layer.weights());
    let gain = weights.norm_gain.as_ref().unwrap();
    let effective = |mut x: Vec<f64>| {
        if raw {
            return x;
        }
        let offset = if case.one_plus { 1.0 } else { 0.0 };
        x.iter_mut().zip(gain).for_each(|(x, g)| *x *= g + offset);
        if case.layer_norm {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            x.iter_mut().for_each(|x| *x -= mean);
        }
        x
    };
    [&weights.q, &weights.k].map(|p| {
        let head = |view: &sigmascale::tensor::MatrixView<'_>| {
            let row = |c| {
                let mut x = vec![0.0; case.d];
                view.read_block(c..c + 1, 0..case.d, &mut x);
                effective(x)
            };
            (0..case.r).map(row).collect::<Vec<_>>()
        };
        p.heads.iter().map(head).collect()
    })
}

/// `W^T W x`.
fn gram(columns: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    let mut u = vec![0.0; columns[0].len()];
    for (w, x) in columns.iter().zip(x) {
        u.iter_mut().zip(w).for_each(|(u, w)| *u += w * x);
    }
    columns.iter().map(|w| dot(w, &u)).collect()
}

/// The CPU engine's certified norm of every head, without rotation.
fn exact(layer: &Layer) -> Vec<f64> {
    let spec = layer.case.spec();
    let geometry = LayerGeometry::new(&spec, layer.weights()).unwrap();
    GramEngine.layer(&geometry).unwrap().heads.unwrap().iter().map(|h| h.sigma).collect()
}

fn every_step_is_that_of_f64() {
    let mut bad = vec![];
    for (i, case) in cases().iter().enumerate() {
        for raw in [false, true] {
            let layer = Layer::new(case, 900 + i as u64);
            let [q, k] = columns(&layer, raw);
            let (power, stream) = (engine(&[layer.input], raw), stream());
            let start = power.vectors().read().unwrap();
            let mut vectors: Vec<Vec<f64>> =
                start.chunks_exact(case.r).map(|v| v.iter().map(|x| f64::from(*x)).collect()).collect();
            for step in 0..3 {
                power.step(&stream).unwrap();
                let (sigma, after) = (power.sigma().read().unwrap(), power.vectors().read().unwrap());
                for (h, y) in vectors.iter_mut().enumerate() {
                    let kv = h / (case.n_q / case.n_kv);
                    let z = gram(&q[h], y);
                    let next = gram(&k[kv], &z);
                    let (along, before, length) = (dot(&z, &next), dot(y, &z), dot(&next, &next).sqrt());
                    let want = if along > 0.0 { (along / before).sqrt() } else { 0.0 };
                    if length > 0.0 {
                        *y = next.iter().map(|x| x / length).collect();
                    }
                    let got = f64::from(sigma[h]);
                    // Rounding is relative to the product of the norms, which a cancelling head is far below.
                    let room = if case.kind == Kind::Cancelling { 1e-3 } else { 1e-5 };
                    let off = after[h * case.r..][..case.r].iter().zip(&*y).map(|(a, b)| (f64::from(*a) - b).powi(2));
                    let off = off.sum::<f64>().sqrt();
                    if !((got - want).abs() <= room * want && off <= 10.0 * room) {
                        let name = &case.name;
                        bad.push(format!(
                            "{name} raw {raw} step {step} head {h}: {got} for {want}, vector off by {off:e}"
                        ));
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{} of them\n{}", bad.len(), bad[..bad.len().min(12)].join("\n"));
}

fn it_converges_to_the_exact_norm_from_below() {
    for (i, case) in cases().iter().enumerate().filter(|(_, case)| case.r <= 64 || case.kind != Kind::Gaussian) {
        let layer = Layer::new(case, 950 + i as u64);
        let (power, stream) = (engine(&[layer.input], false), stream());
        let want = exact(&layer);
        let mut last = vec![0.0; case.n_q];
        for round in 0..8 {
            power.steps(&stream, if round == 0 { 1 } else { 100 }).unwrap();
            for (h, sigma) in power.sigma().read().unwrap().into_iter().map(f64::from).enumerate() {
                let room = if case.kind == Kind::Cancelling { 1e-3 } else { 2e-5 };
                assert!(sigma <= want[h] * (1.0 + room), "{}: head {h} has {sigma} above {}", case.name, want[h]);
                assert!(sigma >= last[h] * (1.0 - room), "{}: head {h} fell from {} to {sigma}", case.name, last[h]);
                last[h] = sigma;
            }
        }
        for (h, (sigma, want)) in last.iter().zip(&want).enumerate() {
            let room = if case.kind == Kind::Cancelling { 1e-3 } else { 1e-4 };
            assert!((sigma - want).abs() <= room * want, "{}: head {h} has {sigma}, not {want}", case.name);
        }
    }
}

fn many_layers_are_the_same_as_one() {
    for case in [Case::new("layers", (512, 64), (6, 2)), Case::new("wide", (264, 128), (16, 2))] {
        let layers: Vec<Layer> = (0..7).map(|i| Layer::new(&case, 40 + i)).collect();
        let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
        let (all, stream) = (engine(&inputs, false), stream());
        let start = all.vectors().read().unwrap();
        all.steps(&stream, 3).unwrap();
        let sigma = all.sigma().read().unwrap();
        let heads = case.n_q * case.r;
        for (i, layer) in layers.iter().enumerate() {
            let mut one = engine(&[layer.input], false);
            one.restore(&start[i * heads..(i + 1) * heads]).unwrap();
            one.steps(&stream, 3).unwrap();
            for (got, want) in sigma[i * case.n_q..].iter().zip(one.sigma().read().unwrap()) {
                assert!((got / want - 1.0).abs() < 1e-6, "{}: layer {i}: {got} for {want}", case.name);
            }
        }
    }
}

fn steps_together_are_steps_one_by_one() {
    let case = Case { layer_norm: true, ..Case::new("steps", (1600, 64), (5, 5)) };
    let layer = Layer::new(&case, 1);
    let (together, apart, stream) = (engine(&[layer.input], false), engine(&[layer.input], false), stream());
    together.steps(&stream, 40).unwrap();
    for _ in 0..40 {
        apart.step(&stream).unwrap();
        stream.synchronize().unwrap();
    }
    assert_eq!(bits(together.sigma()), bits(apart.sigma()));
    assert_eq!(bits(together.vectors()), bits(apart.vectors()));
}

fn the_same_start_gives_the_same_bits_and_a_resume_goes_on() {
    for (i, case) in cases().iter().enumerate().filter(|(i, _)| i % 3 == 0) {
        let layer = Layer::new(case, 300 + i as u64);
        let stream = stream();
        let whole = engine(&[layer.input], false);
        whole.steps(&stream, 5).unwrap();
        let first = engine(&[layer.input], false);
        first.steps(&stream, 2).unwrap();
        let saved = first.vectors().read().unwrap();
        // SAFETY: as for `engine`.
        let mut resumed = unsafe { PowerEngine::new(device(), &[layer.input], false, 77) }.unwrap();
        assert_ne!(bits(resumed.vectors()), bits(engine(&[layer.input], false).vectors()));
        // Behind steps that still run.
        resumed.steps(&stream, 200).unwrap();
        resumed.restore(&saved).unwrap();
        resumed.steps(&stream, 3).unwrap();
        assert_eq!(bits(whole.sigma()), bits(resumed.sigma()), "{}", case.name);
        assert_eq!(bits(whole.vectors()), bits(resumed.vectors()), "{}", case.name);
        assert!(resumed.restore(&saved[1..]).unwrap_err().is_mismatch());
        assert!(resumed.restore(&vec![f32::NAN; saved.len()]).unwrap_err().is_mismatch());
    }
}

fn a_capture_and_its_replays_neither_allocate_nor_wait() {
    for (i, case) in cases().iter().enumerate().filter(|(i, _)| i % 4 == 1) {
        let layer = Layer::new(case, 400 + i as u64);
        let (direct, replayed, stream) = (engine(&[layer.input], false), engine(&[layer.input], false), stream());
        // A capture fails at an allocation or a synchronisation.
        let graph = stream.capture(|s| replayed.steps(s, 2)).unwrap();
        let free = device().memory().unwrap().0;
        for _ in 0..3 {
            direct.steps(&stream, 2).unwrap();
            graph.launch().unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(free, device().memory().unwrap().0, "{}", case.name);
        assert_eq!(bits(direct.sigma()), bits(replayed.sigma()), "{}", case.name);
        assert_eq!(bits(direct.vectors()), bits(replayed.vectors()), "{}", case.name);
    }
}

fn weights_that_are_not_finite_reach_their_heads_alone_and_leave_no_trace() {
    for planted in [f32::NAN, f32::INFINITY] {
        for layout in [Layout::Apart, Layout::Conv1d] {
            let case = Case { layout, ..Case::new("broken", (512, 64), (4, 2)) };
            let (good, mut layer) = (Layer::new(&case, 1), Layer::broken(&case, 1, Some(planted)));
            let (power, whole, stream) = (engine(&[layer.input], false), engine(&[good.input], false), stream());
            power.step(&stream).unwrap();
            for (h, sigma) in power.sigma().read().unwrap().into_iter().enumerate() {
                assert_eq!(sigma.is_finite(), h >= 2, "{planted} {layout:?}: head {h} has {sigma}");
            }
            assert!(power.vectors().read().unwrap().iter().all(|x| x.is_finite()));
            // Mended in place, those heads go on from where they were.
            for (to, from) in layer.memory.iter_mut().zip(&good.memory) {
                to.write(&from.read().unwrap()).unwrap();
            }
            power.step(&stream).unwrap();
            whole.step(&stream).unwrap();
            assert_eq!(bits(power.sigma())[..2], bits(whole.sigma())[..2], "{planted} {layout:?}");
            whole.step(&stream).unwrap();
            assert_eq!(bits(power.sigma())[2..], bits(whole.sigma())[2..], "{planted} {layout:?}");
        }
    }
}

fn a_zero_head_keeps_its_vectors() {
    let case = Case { kind: Kind::ZeroHead, ..Case::new("zero", (512, 64), (4, 2)) };
    let layer = Layer::new(&case, 3);
    let (power, stream) = (engine(&[layer.input], false), stream());
    let before = bits(power.vectors());
    power.steps(&stream, 2).unwrap();
    let (sigma, after) = (power.sigma().read().unwrap(), bits(power.vectors()));
    assert!(sigma[..2].iter().all(|s| *s > 0.1) && sigma[2..] == [0.0, 0.0], "{sigma:?}");
    assert!(before[..128] != after[..128] && before[128..] == after[128..]);
}

fn the_weights_are_kept_alive() {
    let good = Case::new("good", (512, 64), (4, 2));
    let mut layer = Layer::new(&good, 1);
    let weights = Arc::new(DeviceWeights::new(vec![layer.input], std::mem::take(&mut layer.memory)).unwrap());
    let power = PowerEngine::over(device(), &weights, false, 1).unwrap();
    drop(weights);
    power.step(&stream()).unwrap();
    assert!(power.sigma().read().unwrap().iter().all(|s| *s > 0.0));
}

fn summed(inputs: &[LayerInput]) -> SummedPowerEngine {
    // SAFETY: as for `engine`.
    unsafe { SummedPowerEngine::new(device(), inputs, 5) }.unwrap()
}

fn summed_cases() -> Vec<Case> {
    let case = |name, shape, heads| Case { rotary: 0, ..Case::new(name, shape, heads) };
    vec![
        case("mistral", (1024, 128), (8, 2)),
        Case { layer_norm: true, layout: Layout::Conv1d, ..case("gpt2", (768, 64), (12, 12)) },
        Case { layout: Layout::Conv1d, ..case("conv1d with groups", (136, 24), (6, 2)) },
        Case { layout: Layout::Fused, dtype: Dtype::F16, ..case("fused", (1160, 96), (6, 3)) },
        Case { layout: Layout::Strided, dtype: Dtype::F32, ..case("strided", (520, 40), (7, 1)) },
        Case { layout: Layout::Conv1d, dtype: Dtype::F32, ..case("f32 conv", (99, 40), (5, 5)) },
        case("narrower than its heads", (64, 64), (8, 4)),
        Case { kind: Kind::Spiked, ..case("spiked", (512, 64), (4, 2)) },
        case("many heads", (328, 128), (64, 8)),
        case("more heads than inputs", (136, 128), (72, 8)),
        case("odd head size", (2568, 104), (11, 11)),
        case("one head", (24, 16), (1, 1)),
        Case { dtype: Dtype::F16, ..case("one key head", (1032, 64), (71, 1)) },
        Case { dtype: Dtype::F32, ..case("f32", (808, 128), (16, 4)) },
        Case { layout: Layout::Conv1d, ..case("gpt2-xl", (1600, 64), (25, 25)) },
        Case { layout: Layout::Conv1d, dtype: Dtype::F16, ..case("wide conv", (77, 128), (40, 8)) },
    ]
}

fn every_summed_step_is_that_of_f64() {
    let mut bad = vec![];
    for (i, case) in summed_cases().iter().enumerate() {
        let layer = Layer::new(case, 700 + i as u64);
        let [q, k] = columns(&layer, true);
        let (power, stream) = (summed(&[layer.input]), stream());
        let mut y: Vec<f64> = power.vectors().read().unwrap().into_iter().map(f64::from).collect();
        let group = case.n_q / case.n_kv;
        let out = |heads: &[Vec<Vec<f64>>], x: &dyn Fn(usize) -> Vec<f64>| {
            let mut u = vec![0.0; case.d];
            for (h, head) in heads.iter().enumerate() {
                for (w, x) in head.iter().zip(x(h)) {
                    u.iter_mut().zip(w).for_each(|(u, w)| *u += w * x);
                }
            }
            let norm = dot(&u, &u).sqrt();
            u.iter_mut().for_each(|u| *u /= norm);
            (u, norm)
        };
        for step in 0..3 {
            let (u, _) = out(&q, &|h| y[h / group * case.r..][..case.r].to_vec());
            let back: Vec<Vec<f64>> = q.iter().map(|head| head.iter().map(|w| dot(w, &u)).collect()).collect();
            let sums = |kv: usize| (0..case.r).map(|c| (0..group).map(|g| back[kv * group + g][c]).sum()).collect();
            let (v, want) = out(&k, &sums);
            y = k.iter().flatten().map(|w| dot(w, &v)).collect();
            power.steps(&stream, 1).unwrap();
            let got = f64::from(power.sigma().read().unwrap()[0]);
            let vector = power.vectors().read().unwrap();
            let off = vector.iter().zip(&y).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt();
            if !((got / want - 1.0).abs() < 1e-5 && off < 1e-4 * dot(&y, &y).sqrt()) {
                bad.push(format!("{} step {step}: {got} for {want}, vector off by {off:e}", case.name));
            }
        }
    }
    assert!(bad.is_empty(), "{} of them\n{}", bad.len(), bad[..bad.len().min(20)].join("\n"));
}

fn the_summed_form_converges_to_the_cpus() {
    // Small ones: what a step is does not depend on the size, but how many it takes does.
    for (i, case) in summed_cases().iter().enumerate().filter(|(_, case)| case.d * case.n_q * case.r <= 1 << 20) {
        let layer = Layer::new(case, 750 + i as u64);
        let spec = case.spec();
        let geometry = LayerGeometry::new(&spec, layer.weights()).unwrap();
        let mut state = PowerState::new(&spec, 1);
        let mut cpu = spectral::PowerEngine::new(&mut state);
        cpu.cold = 600;
        let want = cpu.summed(&geometry).unwrap().sigma;
        let (power, stream) = (summed(&[layer.input]), stream());
        power.steps(&stream, 600).unwrap();
        let got = f64::from(power.sigma().read().unwrap()[0]);
        assert!((got / want - 1.0).abs() < 1e-4, "{}: {got} for the CPU's {want}", case.name);
    }
}

fn summed_layers_are_apart_and_broken_ones_leave_no_trace() {
    let case = |name, shape, heads| Case { rotary: 0, ..Case::new(name, shape, heads) };
    for case in [
        case("layers", (4104, 64), (6, 2)),
        case("wide layers", (2056, 64), (25, 25)),
        Case { layout: Layout::Conv1d, ..case("conv layers", (2056, 64), (10, 5)) },
        case("short layers", (72, 64), (4, 2)),
    ] {
        let layers: Vec<Layer> = (0..7).map(|i| Layer::broken(&case, 40 + i, (i == 1).then_some(f32::NAN))).collect();
        let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
        let (all, stream) = (summed(&inputs), stream());
        let start = all.vectors().read().unwrap();
        let graph = stream.capture(|s| all.steps(s, 3)).unwrap();
        graph.launch().unwrap();
        let (sigma, keys) = (all.sigma().read().unwrap(), case.n_kv * case.r);
        let after = all.vectors().read().unwrap();
        for (i, layer) in layers.iter().enumerate() {
            let mut one = summed(&[layer.input]);
            one.restore(&start[i * keys..(i + 1) * keys]).unwrap();
            one.steps(&stream, 3).unwrap();
            let got = one.sigma().read().unwrap()[0];
            assert!(got.to_bits() == sigma[i].to_bits() && got.is_nan() == (i == 1), "{}: {got}", case.name);
            assert_eq!(one.vectors().read().unwrap(), after[i * keys..(i + 1) * keys], "{}: layer {i}", case.name);
        }
        assert_eq!(after[keys..2 * keys], start[keys..2 * keys], "{}", case.name);
    }
}

fn a_summed_resume_goes_on_with_the_same_bits() {
    for (i, case) in summed_cases().iter().enumerate().filter(|(i, _)| i % 2 == 0) {
        let layers: Vec<Layer> = (0..3).map(|l| Layer::new(case, 60 + 3 * i as u64 + l)).collect();
        let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
        let (whole, first, stream) = (summed(&inputs), summed(&inputs), stream());
        whole.steps(&stream, 5).unwrap();
        first.steps(&stream, 2).unwrap();
        // SAFETY: as for `engine`.
        let mut resumed = unsafe { SummedPowerEngine::new(device(), &inputs, 77) }.unwrap();
        resumed.restore(&first.vectors().read().unwrap()).unwrap();
        for _ in 0..3 {
            resumed.steps(&stream, 1).unwrap();
        }
        assert_eq!(bits(whole.sigma()), bits(resumed.sigma()), "{}", case.name);
        assert_eq!(bits(whole.vectors()), bits(resumed.vectors()), "{}", case.name);
    }
}

/// Layers of four kinds, mixed, and the places of each kind.
fn mix() -> (Vec<Layer>, [&'static [usize]; 4]) {
    let a = Case { rotary: 0, ..Case::new("mixed", (512, 64), (6, 2)) };
    let heads = Case { n_q: 4, n_kv: 4, ..a.clone() };
    let wide = Case::new("wide", (512, 128), (3, 1));
    let conv = Case { layout: Layout::Conv1d, layer_norm: true, ..a.clone() };
    // The fourth turns, which an iteration without rotation does not see.
    let turned = Case { rotary: 64, ..a.clone() };
    let cases = [&a, &heads, &a, &wide, &turned, &conv, &heads];
    (
        cases.into_iter().zip(1300..).map(|(case, seed)| Layer::new(case, seed)).collect(),
        [&[0, 2, 4], &[1, 6], &[3], &[5]],
    )
}

/// What of a model's row belongs to these layers, by the values of each layer.
fn of_layers(row: &[u32], values: &[usize], layers: &[usize]) -> Vec<u32> {
    let start = |layer: usize| values[..layer].iter().sum::<usize>();
    layers.iter().flat_map(|&layer| row[start(layer)..start(layer + 1)].to_vec()).collect()
}

fn layers_of_any_mix_have_the_bits_of_engines_for_each_kind() {
    let (layers, kinds) = mix();
    let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
    let estimates: Vec<usize> = inputs.iter().map(|l| l.n_q).collect();
    let values: Vec<usize> = inputs.iter().map(|l| l.n_q * l.d_head).collect();
    let stream = stream();
    for raw in [false, true] {
        let whole = engine(&inputs, raw);
        assert_eq!(whole.kinds(), 4);
        let alone = kinds.map(|kind| engine(&kind.iter().map(|i| inputs[*i]).collect::<Vec<_>>(), raw));
        let same = |whole: &PowerEngine, what: &str| {
            let (sigma, vectors) = (bits(whole.sigma()), bits(whole.vectors()));
            for (one, kind) in alone.iter().zip(kinds) {
                assert_eq!(of_layers(&sigma, &estimates, kind), bits(one.sigma()), "{what}: {kind:?}");
                assert_eq!(of_layers(&vectors, &values, kind), bits(one.vectors()), "{what}: {kind:?}");
            }
        };
        same(&whole, "before the first step");
        let graph = stream.capture(|s| whole.steps(s, 3)).unwrap();
        graph.launch().unwrap();
        alone.iter().for_each(|one| one.steps(&stream, 3).unwrap());
        stream.synchronize().unwrap();
        same(&whole, "after three steps");
        // SAFETY: as for `engine`.
        let mut resumed = unsafe { PowerEngine::new(device(), &inputs, raw, 77) }.unwrap();
        let saved = whole.vectors().read().unwrap();
        resumed.restore(&saved).unwrap();
        assert_eq!(bits(resumed.vectors()), bits(whole.vectors()));
        resumed.step(&stream).unwrap();
        alone.iter().for_each(|one| one.step(&stream).unwrap());
        stream.synchronize().unwrap();
        same(&resumed, "after a resume");
        assert!(resumed.restore(&saved[1..]).unwrap_err().is_mismatch());
    }
}

fn a_summed_mix_has_the_bits_of_engines_for_each_kind() {
    let (layers, kinds) = mix();
    let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
    let values: Vec<usize> = inputs.iter().map(|l| l.n_kv * l.d_head).collect();
    let stream = stream();
    let whole = summed(&inputs);
    let alone = kinds.map(|kind| summed(&kind.iter().map(|i| inputs[*i]).collect::<Vec<_>>()));
    let same = |whole: &SummedPowerEngine| {
        let (sigma, vectors) = (bits(whole.sigma()), bits(whole.vectors()));
        for (one, kind) in alone.iter().zip(kinds) {
            assert_eq!(of_layers(&sigma, &vec![1; inputs.len()], kind), bits(one.sigma()), "{kind:?}");
            assert_eq!(of_layers(&vectors, &values, kind), bits(one.vectors()), "{kind:?}");
        }
    };
    whole.steps(&stream, 2).unwrap();
    alone.iter().for_each(|one| one.steps(&stream, 2).unwrap());
    stream.synchronize().unwrap();
    same(&whole);
    let mut resumed = summed(&inputs);
    resumed.restore(&whole.vectors().read().unwrap()).unwrap();
    resumed.steps(&stream, 1).unwrap();
    alone.iter().for_each(|one| one.steps(&stream, 1).unwrap());
    stream.synchronize().unwrap();
    same(&resumed);
}
