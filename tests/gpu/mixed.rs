//! Engines over layers that are not alike: the bits of engines over each kind, and the bounds of the CPU.

use crate::device;
use crate::qk_norm::{Normalised, PLAIN, borrowed};
use crate::weights::{Case, GROWING, Kind, Layer, Layout};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sigmascale::bound::{LayerBounds, OperandBound, Tail};
use sigmascale::cuda::{Buffer, Stream};
use sigmascale::device::policy::{BoundSource, PolicyEngine};
use sigmascale::device::scale::{Dtype, LayerInput, ScaleEngine};
use sigmascale::device::scale_engine;
use sigmascale::model::HeadOffsets;
use sigmascale::model::{AttentionSpec, LayerSpec, LayerWeights};
use sigmascale::policy::{PolicyConfig, PolicyKind, PolicyShape, ScaledTensor};
use sigmascale::runtime::bounds_of;

tests![
    a_mixed_engine_has_the_bits_of_an_engine_for_each_kind,
    layers_that_share_nothing_have_the_bits_of_engines_of_their_own,
    bounds_of_a_mixed_engine_are_the_cpus,
    a_graph_of_a_mixed_engine_neither_allocates_nor_waits,
    weights_that_are_not_finite_mark_their_layer_alone,
    a_model_with_unlike_layers_plans_as_on_the_host,
    layers_may_normalise_q_and_k_or_let_queries_grow,
    a_policy_names_the_layer_of_other_heads,
    what_the_device_does_not_count_is_refused_at_set_up,
];

/// A layer of any kind, with what holds its memory.
struct Mixed {
    kind: char,
    layer: Layer,
    normalised: Option<Normalised>,
    input: LayerInput,
    _memory: Vec<Buffer<u8>>,
}

impl Mixed {
    fn plain(kind: char, case: &Case, seed: u64) -> Self {
        let layer = Layer::new(case, seed);
        Self { kind, input: layer.input, layer, normalised: None, _memory: vec![] }
    }

    fn normalised(kind: char, case: &Case, seed: u64) -> Self {
        let normalised = Normalised::new(case, PLAIN, seed);
        let (input, memory) = borrowed(&normalised, Dtype::F32);
        Self { kind, layer: Layer::new(case, seed), normalised: Some(normalised), input, _memory: memory }
    }

    fn truth(&self) -> LayerBounds {
        self.normalised.as_ref().map_or_else(|| self.layer.truth(), Normalised::truth)
    }
}

/// One model of eight kinds: heads of other numbers and sizes, no rotation, part of one, f32, `[in, out]` behind a
/// LayerNorm, normalised q and k.
fn model() -> Vec<Mixed> {
    let base = Case::new("rotated", (512, 64), (6, 2));
    let fixed = Case { rotary: 0, temperature: Some(GROWING), ..base.clone() };
    let heads = Case { n_q: 4, n_kv: 4, ..base.clone() };
    let wide = Case { kind: Kind::Uneven, ..Case::new("wide", (512, 128), (3, 1)) };
    let part = Case { rotary: 16, interleaved: true, rope_factor: 1.25, ..base.clone() };
    let full = Case { dtype: Dtype::F32, kind: Kind::Spiked, ..base.clone() };
    let conv = Case { layout: Layout::Conv1d, layer_norm: true, biases: true, rotary: 0, ..base.clone() };
    let norm = Case { rope_factor: 1.5, temperature: Some(GROWING), ..base.clone() };
    let order = "RFRHWRNFPR32CNHR";
    order
        .chars()
        .zip(50..)
        .map(|(kind, seed)| match kind {
            'R' => Mixed::plain(kind, &base, seed),
            'F' => Mixed::plain(kind, &fixed, seed),
            'H' => Mixed::plain(kind, &heads, seed),
            'W' => Mixed::plain(kind, &wide, seed),
            'P' => Mixed::plain(kind, &part, seed),
            'C' => Mixed::plain(kind, &conv, seed),
            'N' => Mixed::normalised(kind, &norm, seed),
            _ => Mixed::plain('3', &full, seed),
        })
        .collect()
}

fn engine(layers: &[&Mixed], with_grams: bool) -> ScaleEngine {
    let inputs: Vec<LayerInput> = layers.iter().map(|mixed| mixed.input).collect();
    // SAFETY: the layers hold the memory, which no launch writes, and outlive the engine in every test.
    unsafe { ScaleEngine::new(device(), &inputs, with_grams) }.unwrap()
}

fn stream() -> Stream {
    device().stream().unwrap()
}

/// Every result of a layer, by name.
fn results(engine: &ScaleEngine) -> Vec<[(&'static str, Vec<u32>); 5]> {
    let of = |buffer: &Buffer<f32>| buffer.read().unwrap().into_iter().map(f32::to_bits).collect::<Vec<u32>>();
    let (descales, tensors) = (of(engine.head_descales()), of(engine.tensor_descales()));
    let operands = of(engine.operand_bounds());
    let words = |words: Option<Vec<u32>>| words.unwrap_or_default();
    let bounds = words(engine.head_bounds().map(|b| bytemuck::cast_slice(&b.read().unwrap()).to_vec()));
    let norms = words(engine.head_frobenius().map(|b| bytemuck::cast_slice(&b.read().unwrap()).to_vec()));
    let heads = engine.heads();
    let part = |all: &[u32], each: usize, range: std::ops::Range<usize>| match all {
        [] => vec![],
        all => all[each * range.start..each * range.end].to_vec(),
    };
    let layer = |i: usize| {
        [
            ("descales", part(&descales, 4, heads.kv(i))),
            ("tensor descales", part(&tensors, 4, i..i + 1)),
            ("operand bounds", part(&operands, 3, heads.kv(i))),
            ("logit bounds", part(&bounds, 8, heads.q(i))),
            ("Frobenius norms", part(&norms, 2, heads.q(i))),
        ]
    };
    assert_eq!(descales.len(), 4 * heads.all_kv());
    assert!(bounds.is_empty() || bounds.len() == 8 * heads.all_q());
    (0..heads.layers()).map(layer).collect()
}

/// What each launch of the whole gives, and what engines over the layers of each kind give in their places.
fn same_bits(layers: &[Mixed], with_grams: bool, launches: &[fn(&ScaleEngine, &Stream)]) {
    let all: Vec<&Mixed> = layers.iter().collect();
    let (whole, stream) = (engine(&all, with_grams), stream());
    let mut kinds: Vec<char> = layers.iter().map(|mixed| mixed.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(whole.kinds(), kinds.len());
    let parts: Vec<(Vec<usize>, ScaleEngine)> = kinds
        .iter()
        .map(|kind| {
            let members: Vec<usize> = (0..layers.len()).filter(|i| layers[*i].kind == *kind).collect();
            let engine = engine(&members.iter().map(|i| &layers[*i]).collect::<Vec<_>>(), with_grams);
            assert_eq!(engine.kinds(), 1);
            (members, engine)
        })
        .collect();
    for (step, launch) in launches.iter().enumerate() {
        launch(&whole, &stream);
        let got = results(&whole);
        for (members, part) in &parts {
            launch(part, &stream);
            for (want, &i) in results(part).iter().zip(members) {
                for (got, want) in got[i].iter().zip(want) {
                    let place = format!("launch {step}, layer {i} ({}): {}", layers[i].kind, got.0);
                    // Alone, layers with normalised q and k have no array of Frobenius norms.
                    if got.0 == "Frobenius norms" && want.1.is_empty() {
                        assert!(got.1.iter().all(|word| f32::from_bits(*word).is_nan()), "{place}");
                    } else if got.0 != "logit bounds" || whole.head_bounds().is_some() {
                        assert_eq!(got.1, want.1, "{place}");
                        let written = got.0.contains("descales") || got.0.contains("logit") && step > 0;
                        assert!(!written || got.1.iter().any(|word| *word != 0), "{place}");
                    }
                }
            }
        }
        assert_eq!(whole.status().read().unwrap()[0] & 3, 0);
    }
    // The device was waited for: what lies beside the results.
    for (members, part) in &parts {
        for (at, &i) in members.iter().enumerate() {
            assert_eq!(whole.route(i), part.route(at));
            let stats = |engine: &ScaleEngine, layer| {
                let rows = engine.read_stats(layer).unwrap();
                rows.iter().map(|row| row.norm2.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(stats(&whole, i), stats(part, at), "layer {i}");
            if whole.route(i).is_some() {
                let last = layers[i].input.n_q + layers[i].input.n_kv - 1;
                assert_eq!(whole.read_gram(i, last).unwrap(), part.read_gram(at, last).unwrap(), "layer {i}");
                assert!(whole.read_gram(i, last + 1).unwrap_err().is_argument());
            }
        }
    }
    assert!(whole.read_stats(layers.len()).unwrap_err().is_argument());
    assert_eq!(whole.route(layers.len()), None);
}

const EVERY: [fn(&ScaleEngine, &Stream); 4] = [
    |engine, stream| engine.descales(stream).unwrap(),
    |engine, stream| engine.plan(stream).unwrap(),
    |engine, stream| engine.frobenius(stream).unwrap_or_else(|error| assert!(error.is_cuda())),
    |engine, stream| engine.plan(stream).unwrap(),
];

fn a_mixed_engine_has_the_bits_of_an_engine_for_each_kind() {
    let layers = model();
    same_bits(&layers, true, &EVERY);
    // Operands alone, without Grams.
    same_bits(&layers, false, &EVERY[..1]);
    let whole = engine(&layers.iter().collect::<Vec<_>>(), false);
    assert!(whole.head_bounds().is_none() && whole.plan(&stream()).unwrap_err().is_cuda());
    assert!(whole.frobenius(&stream()).unwrap_err().is_cuda());
}

fn layers_that_share_nothing_have_the_bits_of_engines_of_their_own() {
    let mut rng = StdRng::seed_from_u64(61);
    for round in 0..2 {
        // Shapes this random do not meet twice; heads of one size, so that few kernels have to be compiled.
        let layers: Vec<Mixed> = ('a'..'i')
            .enumerate()
            .map(|(i, kind)| {
                let case = Case::random(&mut rng);
                let case = Case { r: 64, rotary: case.rotary.min(64), ..case };
                Mixed::plain(kind, &case, 700 + 10 * round + i as u64)
            })
            .collect();
        same_bits(&layers, true, &EVERY[1..3]);
    }
}

fn bounds_of_a_mixed_engine_are_the_cpus() {
    let layers = model();
    let (engine, stream) = (engine(&layers.iter().collect::<Vec<_>>(), true), stream());
    engine.plan(&stream).unwrap();
    let (bounds, operands) = (engine.head_bounds().unwrap().read().unwrap(), engine.operand_bounds().read().unwrap());
    let counts = layers.iter().map(|mixed| (mixed.input.n_q, mixed.input.n_kv));
    assert_eq!(*engine.heads(), HeadOffsets::new(counts));
    for (i, mixed) in layers.iter().enumerate() {
        let (truth, place) = (mixed.truth(), format!("layer {i} ({})", mixed.kind));
        let heads = engine.heads();
        for (got, want) in bounds[heads.q(i)].iter().zip(&truth.heads) {
            let ratio = f64::from(got.rounded) / want.rounded.unwrap();
            assert!((1.0 - 2e-6..1.05).contains(&ratio), "{place}: logit bound is {ratio:.8} of f64");
        }
        let rows = [&truth.q, &truth.k, truth.v.as_ref().unwrap()];
        let kv = heads.kv(i);
        for (which, row) in rows.into_iter().enumerate() {
            for (head, group) in row.chunks(row.len() / kv.len()).enumerate() {
                let want = group.iter().map(|bound| bound.rounded).fold(0.0, f64::max);
                let got = operands[3 * kv.start + which * kv.len() + head];
                let ratio = f64::from(got) / want;
                assert!((1.0..1.0 + 1e-5).contains(&ratio), "{place}: operand bound is {ratio:.8} of f64");
            }
        }
    }
}

fn a_graph_of_a_mixed_engine_neither_allocates_nor_waits() {
    let layers = model();
    let all: Vec<&Mixed> = layers.iter().collect();
    let (direct, replayed, stream) = (engine(&all, true), engine(&all, true), stream());
    // A capture fails at an allocation or a synchronisation.
    let graph = stream
        .capture(|s| {
            replayed.plan(s)?;
            replayed.frobenius(s)
        })
        .unwrap();
    let free = device().memory().unwrap().0;
    for _ in 0..3 {
        direct.plan(&stream).unwrap();
        direct.frobenius(&stream).unwrap();
        graph.launch().unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(free, device().memory().unwrap().0);
    assert_eq!(results(&direct), results(&replayed));
}

fn weights_that_are_not_finite_mark_their_layer_alone() {
    let mut layers = model();
    let bad = layers.iter().rposition(|mixed| mixed.kind == 'H').unwrap();
    let layer = Layer::broken(&layers[bad].layer.case, 5, Some(f32::NAN));
    layers[bad] = Mixed { kind: 'H', input: layer.input, layer, normalised: None, _memory: vec![] };
    let (engine, stream) = (engine(&layers.iter().collect::<Vec<_>>(), true), stream());
    engine.plan(&stream).unwrap();
    assert_eq!(engine.status().read().unwrap()[0] & 1, 1);
    let (descales, heads) = (engine.head_descales().read().unwrap(), engine.heads());
    for i in 0..layers.len() {
        let kv = heads.kv(i);
        let nan = descales[4 * kv.start..4 * kv.end].iter().any(|x| x.is_nan());
        assert_eq!(nan, i == bad, "layer {i}");
    }
}

/// Six layers as SmolLM3, OpenELM and DeciLM have them: with and without rotation, one of them in f32, one with a rotation factor
/// and all with a softmax scale of their own, and with heads of their own in number and width. Queries grow in two, one of which
/// is of the kind of the first.
fn unlike() -> (AttentionSpec, Vec<Layer>) {
    let case = Case::new("unlike", (512, 64), (6, 2));
    let cases = [
        case.clone(),
        Case { n_q: 4, n_kv: 4, rotary: 0, temperature: Some(GROWING), ..case.clone() },
        Case { rope_factor: 1.25, ..case.clone() },
        Case { dtype: Dtype::F32, ..case.clone() },
        Case { n_q: 3, n_kv: 1, r: 128, rotary: 0, ..case.clone() },
        Case { temperature: Some(GROWING), ..case.clone() },
    ];
    let mut spec = case.spec();
    let own = |(number, case): (usize, &Case)| {
        let softmax_scale = 0.1 * (number + 1) as f64;
        LayerSpec { number, softmax_scale, ..case.spec().layers.remove(0) }
    };
    spec.layers = cases.iter().enumerate().map(own).collect();
    let layers = cases.iter().zip(900..).map(|(case, seed)| Layer::new(case, seed));
    (spec, layers.collect())
}

fn a_model_with_unlike_layers_plans_as_on_the_host() {
    let (spec, layers) = unlike();
    let weights: Vec<LayerWeights<'_>> =
        layers.iter().enumerate().map(|(i, layer)| LayerWeights { layer: i, ..layer.weights() }).collect();
    let tail = Tail::default();
    let truth: Vec<LayerBounds> = weights.iter().map(|w| bounds_of(&spec, w.clone(), &tail).unwrap()).collect();
    let shape = PolicyShape::from(&spec);
    for kind in PolicyKind::ALL {
        let engine = scale_engine(device(), &spec, &weights).unwrap();
        assert_eq!(engine.kinds(), 5);
        let plan =
            PolicyEngine::new(device(), &spec, kind.into(), &tail, BoundSource::Weights(Box::new(engine))).unwrap();
        let stream = stream();
        let graph = stream.capture(|s| plan.refresh(s)).unwrap();
        for _ in 0..2 {
            graph.launch().unwrap();
            plan.observe(&stream).unwrap();
        }
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        // What one side saved, the other goes on from.
        let host = plan.save().unwrap().restore(&PolicyConfig::from(kind), shape.clone()).unwrap();
        let bounds = plan.read_bounds().unwrap();
        for (i, (bounds, truth)) in bounds.iter().zip(&truth).enumerate() {
            for (got, want) in bounds.heads.iter().zip(&truth.heads) {
                let ratio = got.rounded.unwrap() / want.rounded.unwrap();
                assert!((1.0 - 2e-6..1.025).contains(&ratio), "{kind} layer {i}: {ratio}");
            }
            if host.needs_measurement() {
                continue;
            }
            let (got, want) = (plan.read_plan(i).unwrap(), host.plan(bounds, None).unwrap());
            for tensor in ScaledTensor::ALL {
                let row = |plan| tensor.descales(plan).unwrap().iter().map(|d| d.get().to_bits()).collect::<Vec<_>>();
                assert_eq!(row(&got), row(&want), "{kind} layer {i} {}", tensor.name());
            }
        }
        assert_eq!(plan.read_status().unwrap(), [0; 6], "{kind}");
    }
}

/// As in Llama 4: layers with rotation normalise q and k, queries of the others grow.
fn layers_may_normalise_q_and_k_or_let_queries_grow() {
    let turned = Normalised::new(&Case::new("turned", (256, 64), (6, 2)), PLAIN, 31);
    let fixed =
        Layer::new(&Case { rotary: 0, temperature: Some(GROWING), ..Case::new("fixed", (256, 64), (6, 2)) }, 32);
    let mut spec = turned.spec().clone();
    spec.qk_norm.as_mut().unwrap().rotated_only = true;
    let first = spec.layers[0].clone();
    let grown = fixed.case.spec().layers.remove(0);
    spec.layers = [first.clone(), grown.clone(), first, grown]
        .into_iter()
        .enumerate()
        .map(|(number, layer)| LayerSpec { number, ..layer })
        .collect();
    let weights: Vec<LayerWeights<'_>> = (0..4)
        .map(|layer| LayerWeights { layer, ..if layer % 2 == 0 { turned.weights() } else { fixed.weights() } })
        .collect();
    let engine = scale_engine(device(), &spec, &weights).unwrap();
    assert_eq!(engine.kinds(), 2);
    let kind = PolicyKind::Geometry.into();
    let plan =
        PolicyEngine::new(device(), &spec, kind, &Tail::default(), BoundSource::Weights(Box::new(engine))).unwrap();
    let stream = stream();
    plan.refresh(&stream).unwrap();
    stream.synchronize().unwrap();
    for (got, weights) in plan.read_bounds().unwrap().iter().zip(weights) {
        let (layer, want) = (weights.layer, bounds_of(&spec, weights, &Tail::default()).unwrap());
        for (got, want) in got.heads.iter().zip(&want.heads) {
            let ratio = got.rounded.unwrap() / want.rounded.unwrap();
            assert!((1.0..1.01).contains(&ratio), "layer {layer}: {ratio}");
            assert_eq!(got.rank_aware.is_some(), want.rank_aware.is_some(), "layer {layer}");
        }
        let largest = |row: &[OperandBound]| row.iter().map(|bound| bound.rounded).fold(0.0, f64::max);
        for (got, want) in [(&got.q, &want.q), (&got.k, &want.k)] {
            let ratio = largest(got) / largest(want);
            assert!((1.0..1.0 + 1e-5).contains(&ratio), "layer {layer}: operand bound is {ratio:.8} of f64");
        }
    }
}

fn a_policy_names_the_layer_of_other_heads() {
    let (spec, layers) = unlike();
    let refused = |inputs: &[LayerInput]| {
        // SAFETY: `layers` hold the memory.
        let engine = unsafe { ScaleEngine::new(device(), inputs, true) }.unwrap();
        let bounds = BoundSource::Weights(Box::new(engine));
        let kind = PolicyKind::Geometry.into();
        PolicyEngine::new(device(), &spec, kind, &Tail::default(), bounds).unwrap_err()
    };
    let mut inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
    assert!(refused(&inputs[..5]).to_string().contains("expected 6 layers, got 5"));
    // In sum as many heads as the policy has.
    inputs.swap(0, 1);
    let error = refused(&inputs);
    assert!(
        error.is_mismatch() && error.to_string().contains("expected 6 query and 2 KV heads in layer 0, got 4 and 4"),
        "{error}"
    );
}

fn what_the_device_does_not_count_is_refused_at_set_up() {
    let (mut spec, layers) = unlike();
    let weights: Vec<LayerWeights<'_>> =
        layers.iter().enumerate().map(|(i, layer)| LayerWeights { layer: i, ..layer.weights() }).collect();
    let engine = Box::new(scale_engine(device(), &spec, &weights).unwrap());
    spec.fp8_inputs = true;
    let error = scale_engine(device(), &spec, &weights).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("on the CPU only"), "{error}");
    let (kind, tail) = (PolicyKind::Geometry.into(), Tail::default());
    let error = PolicyEngine::new(device(), &spec, kind, &tail, BoundSource::Weights(engine)).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("on the CPU only"), "{error}");
}
