//! An engine of a shape, given the addresses of weights at each launch, against an engine over those weights.

use crate::device;
use crate::engine::cases;
use crate::qk_norm::{Normalised, PLAIN};
use crate::weights::{Case, Layer, Layout, decode, encode};
use sigmascale::cuda::{Buffer, DevicePtr, Stream};
use sigmascale::device::scale::{DeviceWeights, Dtype, LayerInput, ScaleEngine, ShapeEngine};

tests![
    weights_that_move_give_the_bits_of_an_engine_over_them,
    norms_of_q_and_k_move_too,
    several_layers_move_at_once,
    a_graph_keeps_the_addresses_that_it_captured,
    layers_of_another_shape_are_refused,
    the_cost_of_addresses_by_value,
];

/// All that a plan leaves, as words.
fn results(
    bounds: Option<&Buffer<sigmascale::bound::HeadBound>>,
    floats: [&Buffer<f32>; 3],
    status: &Buffer<u32>,
) -> Vec<u32> {
    let mut all: Vec<u32> = bounds.map(|b| bytemuck::cast_slice(&b.read().unwrap()).to_vec()).unwrap_or_default();
    floats.iter().for_each(|values| all.extend(values.read().unwrap().iter().map(|x| x.to_bits())));
    all.extend(status.read().unwrap());
    all
}

fn of_shape(engine: &ShapeEngine) -> Vec<u32> {
    let floats = [engine.head_descales(), engine.tensor_descales(), engine.operand_bounds()];
    results(engine.head_bounds(), floats, engine.status())
}

/// What an engine over these layers leaves: of a plan, and of descales alone.
fn expected(layers: &[LayerInput], stream: &Stream) -> [Vec<u32>; 2] {
    [true, false].map(|plan| {
        // SAFETY: the callers hold the memory.
        let engine = unsafe { ScaleEngine::new(device(), layers, plan) }.unwrap();
        if plan {
            engine.plan(stream).unwrap()
        } else {
            engine.descales(stream).unwrap()
        }
        stream.synchronize().unwrap();
        let floats = [engine.head_descales(), engine.tensor_descales(), engine.operand_bounds()];
        results(engine.head_bounds(), floats, engine.status())
    })
}

/// An engine made over the first of these, run over all of them, twice.
fn compare(name: &str, places: &[Vec<LayerInput>]) {
    let stream = device().stream().unwrap();
    let wanted: Vec<_> = places.iter().map(|layers| expected(layers, &stream)).collect();
    let engines = [true, false].map(|plan| ShapeEngine::new(device(), &places[0], plan).unwrap());
    for round in 0..2 {
        for (i, (layers, wanted)) in places.iter().zip(&wanted).enumerate().rev() {
            assert!(engines[0].fits(layers), "{name}: place {i}");
            // SAFETY: the callers hold the memory.
            unsafe { engines[0].plan(&stream, layers) }.unwrap();
            assert_eq!(of_shape(&engines[0]), wanted[0], "{name}: plan at place {i}, round {round}");
            // SAFETY: as above.
            unsafe { engines[1].descales(&stream, layers) }.unwrap();
            assert_eq!(of_shape(&engines[1]), wanted[1], "{name}: descales at place {i}, round {round}");
        }
    }
    assert!(places.len() == 1 || wanted[0] != wanted[1], "{name}: all places give the same");
}

fn weights_that_move_give_the_bits_of_an_engine_over_them() {
    for (i, case) in cases().iter().enumerate().filter(|(i, _)| i % 2 == 0) {
        three_places(case, 7000 + 3 * i as u64);
    }
}

/// Weights of one case at three places.
pub fn three_places(case: &Case, seed: u64) {
    let layers: Vec<Layer> = (0..3).map(|i| Layer::new(case, seed + i)).collect();
    let places: Vec<_> = layers.iter().map(|layer| vec![layer.input]).collect();
    compare(&case.name, &places);
}

fn norms_of_q_and_k_move_too() {
    for case in [Case::new("qwen3", (256, 128), (8, 2)), Case::new("odd", (201, 64), (6, 3))] {
        let layers: Vec<Normalised> = (0..2).map(|seed| Normalised::new(&case, PLAIN, 90 + seed)).collect();
        let upload = |layer: &Normalised| DeviceWeights::upload(device(), layer.spec(), &[layer.weights()]).unwrap();
        let held: Vec<DeviceWeights> = layers.iter().map(upload).collect();
        let places: Vec<_> = held.iter().map(|weights| weights.layers().to_vec()).collect();
        compare(&case.name, &places);
    }
}

/// More words than one launch takes, and layers of several kinds.
fn several_layers_move_at_once() {
    let cases = [
        Case::new("rotated", (512, 128), (4, 2)),
        Case { rotary: 0, ..Case::new("fixed", (512, 128), (4, 2)) },
        Case { dtype: Dtype::F32, ..Case::new("f32", (384, 64), (3, 3)) },
        Case { layout: Layout::Conv1d, layer_norm: true, biases: true, ..Case::new("columns", (256, 64), (4, 4)) },
    ];
    let make = |seed: u64| -> Vec<Layer> {
        (0..12).zip(cases.iter().cycle()).map(|(i, case)| Layer::new(case, seed + i)).collect()
    };
    let models = [make(300), make(400)];
    let places: Vec<Vec<LayerInput>> =
        models.iter().map(|model| model.iter().map(|layer| layer.input).collect()).collect();
    compare("several kinds", &places);
}

/// Two layers in one graph, through one engine, whose results are copied away in between. Replays follow weights that are written in
/// place, whatever the engine has done in the meantime.
fn a_graph_keeps_the_addresses_that_it_captured() {
    for case in [Case::new("graph", (512, 128), (4, 2)), Case { d: 333, ..Case::new("graph, odd", (333, 64), (4, 2)) }]
    {
        let layers: Vec<Layer> = (0..3).map(|seed| Layer::new(&case, 800 + seed)).collect();
        let stream = device().stream().unwrap();
        let engine = ShapeEngine::new(device(), &[layers[2].input], true).unwrap();
        let kept = [0, 1].map(|_| device().zeros::<f32>(engine.head_descales().len()).unwrap());
        let kept = std::sync::Mutex::new(kept);
        let graph = stream
            .capture(|s| {
                for (layer, row) in layers.iter().zip(kept.lock().unwrap().iter_mut()) {
                    // SAFETY: `layers` outlives the graph.
                    unsafe { engine.plan(s, &[layer.input])? };
                    row.copy_from(engine.head_descales(), s)?;
                }
                Ok(())
            })
            .unwrap();
        for factor in [1.0f32, 2.0, 0.25] {
            for buffer in layers.iter().flat_map(|layer| layer.memory.iter().take(3)) {
                let values: Vec<f32> = decode(&buffer.read().unwrap(), case.dtype).iter().map(|x| factor * x).collect();
                buffer.write(&encode(&values, case.dtype)).unwrap();
            }
            // Another layer's addresses are in the tables when the graph begins.
            // SAFETY: `layers` holds the memory.
            unsafe { engine.plan(&stream, &[layers[2].input]) }.unwrap();
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            for (layer, row) in layers.iter().zip(kept.lock().unwrap().iter()) {
                // SAFETY: as above.
                let alone = unsafe { ScaleEngine::new(device(), &[layer.input], true) }.unwrap();
                alone.plan(&stream).unwrap();
                assert_eq!(row.read().unwrap(), alone.head_descales().read().unwrap(), "{} times {factor}", case.name);
            }
        }
    }
}

fn layers_of_another_shape_are_refused() {
    let case = Case::new("shape", (512, 64), (4, 2));
    let layer = Layer::new(&case, 1);
    let (engine, stream) = (ShapeEngine::new(device(), &[layer.input], false).unwrap(), device().stream().unwrap());
    type Change = fn(&mut LayerInput);
    let changes: [Change; 4] =
        [|l| l.gain.0 += 2, |l| l.q.weight.ptr.0 += 8, |l| l.n_q = 2, |l| l.k.bias = DevicePtr(16)];
    for change in changes {
        let mut other = layer.input;
        change(&mut other);
        assert!(!engine.fits(&[other]));
        // SAFETY: it is refused before anything is launched.
        let error = unsafe { engine.descales(&stream, &[other]) }.unwrap_err();
        assert!(error.is_argument() && error.to_string().contains("make another engine"), "{error}");
    }
    assert!(engine.fits(&[layer.input]) && !engine.fits(&[layer.input; 2]) && !engine.fits(&[]));
}

/// Prints what a layer of Llama-3 8B's shape takes with its addresses in tables and by value, in a graph of 32 layers.
fn the_cost_of_addresses_by_value() {
    let case = Case::new("llama-3 8b", (4096, 128), (32, 8));
    let layer = Layer::new(&case, 60);
    let (inputs, _copies): (Vec<LayerInput>, Vec<_>) = (0..32).map(|_| layer.copied()).unzip();
    let stream = device().stream().unwrap();
    for plan in [false, true] {
        // SAFETY: `layer` and its copies hold the memory, here and below.
        let whole = unsafe { ScaleEngine::new(device(), &inputs, plan) }.unwrap();
        // SAFETY: as above.
        let single: Vec<ScaleEngine> =
            inputs.iter().map(|l| unsafe { ScaleEngine::new(device(), &[*l], plan) }.unwrap()).collect();
        let shape = ShapeEngine::new(device(), &inputs[..1], plan).unwrap();
        let run = |engine: &ScaleEngine, s: &Stream| if plan { engine.plan(s) } else { engine.descales(s) };
        let graphs = [
            ("one launch per model", stream.capture(|s| run(&whole, s)).unwrap()),
            ("one engine per layer", stream.capture(|s| (0..32).try_for_each(|i| run(&single[i], s))).unwrap()),
            (
                "addresses by value",
                stream
                    .capture(|s| {
                        // SAFETY: as above.
                        let one = |l: &LayerInput| unsafe {
                            if plan { shape.plan(s, &[*l]) } else { shape.descales(s, &[*l]) }
                        };
                        inputs.iter().try_for_each(one)
                    })
                    .unwrap(),
            ),
        ];
        let mut times = vec![vec![]; graphs.len()];
        for _ in 0..21 {
            for ((_, graph), times) in graphs.iter().zip(&mut times) {
                graph.launch().unwrap();
                let start = stream.record().unwrap();
                graph.launch().unwrap();
                times.push(1e3 * start.milliseconds_to(&stream.record().unwrap()).unwrap() / 32.0);
            }
        }
        for ((name, _), times) in graphs.iter().zip(&mut times) {
            times.sort_by(f32::total_cmp);
            println!("{} us per layer: {name}, {}", times[10], if plan { "plan" } else { "descales" });
        }
    }
}
