//! Every schedule of the engine's launches against the default one: equal bits, of every kind of layer, alone and in a row.

use crate::device;
use crate::engine::cases;
use crate::shapes::{expected, of_shape, results};
use crate::weights::{Case, Layer, Layout, decode, encode};
use sigmascale::cuda::Stream;
use sigmascale::device::scale::{LayerInput, ScaleEngine, Schedule, ShapeEngine};

tests![
    every_schedule_gives_the_same_bits,
    heads_of_any_depth_are_shared,
    plans_in_a_row_are_of_their_own_weights,
    weights_that_move_give_the_same_bits,
    few_small_heads,
    the_time_of_weights_that_move,
];

const OFF: Schedule = Schedule { overlap: false, split: false, even: false, far: false };
const SCHEDULES: [Schedule; 5] = [
    Schedule { overlap: true, ..OFF },
    Schedule { split: true, ..OFF },
    Schedule { even: true, ..OFF },
    Schedule { far: true, ..OFF },
    Schedule::ALL,
];

fn of_engine(engine: &ScaleEngine) -> Vec<u32> {
    let floats = [engine.head_descales(), engine.tensor_descales(), engine.operand_bounds()];
    results(engine.head_bounds(), floats, engine.status())
}

/// Plans and descales of these layers by every schedule, each twice.
fn compare(name: &str, layers: &[LayerInput], stream: &Stream) {
    let wanted = expected(layers, stream);
    for schedule in SCHEDULES {
        for (plan, wanted) in [true, false].into_iter().zip(&wanted) {
            // SAFETY: the callers hold the memory.
            let engine = unsafe { ScaleEngine::scheduled(device(), layers, plan, schedule) }.unwrap();
            for round in 0..2 {
                // What is not written would be seen.
                for values in [engine.head_descales(), engine.tensor_descales(), engine.operand_bounds()] {
                    values.clear(stream).unwrap();
                }
                if plan { engine.plan(stream) } else { engine.descales(stream) }.unwrap();
                stream.synchronize().unwrap();
                assert!(of_engine(&engine) == *wanted, "{name}: {schedule:?}, plan {plan}, round {round}");
            }
        }
    }
}

fn every_schedule_gives_the_same_bits() {
    let stream = device().stream().unwrap();
    // A third of them: every schedule has kernels of its own to compile.
    for (i, case) in cases().iter().enumerate().step_by(3) {
        let layers: Vec<Layer> = (0..3).map(|j| Layer::new(case, 9000 + 3 * i as u64 + j)).collect();
        let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
        compare(&case.name, &inputs[..1], &stream);
        compare(&case.name, &inputs, &stream);
    }
    // Several kinds in one engine: each its own chain, behind that of another.
    let kinds = [Case::new("rotated", (512, 128), (4, 2)), Case { rotary: 0, ..Case::new("fixed", (640, 64), (5, 5)) }];
    let layers: Vec<Layer> = (0..6).map(|i| Layer::new(&kinds[i % 2], 9900 + i as u64)).collect();
    compare("two kinds", &layers.iter().map(|layer| layer.input).collect::<Vec<_>>(), &stream);
}

/// Depths of which a block of a cluster has no first sum, one, and several, the last of them short.
fn heads_of_any_depth_are_shared() {
    let stream = device().stream().unwrap();
    for d in [64, 200, 512, 520, 1024, 1096, 2048, 4096, 4104] {
        for (r, rotary, layout) in
            [(16, 0, Layout::Apart), (64, 64, Layout::Apart), (64, 0, Layout::Conv1d), (128, 128, Layout::Apart)]
        {
            let sums = d % 16 == 8;
            let case = Case { rotary, layout, layer_norm: sums, biases: sums, ..Case::new("deep", (d, r), (2, 1)) };
            let layer = Layer::new(&case, d as u64);
            compare(&format!("d {d}, d_head {r}, {layout:?}"), &[layer.input], &stream);
        }
    }
    // Heads that are shared by 8, 4, 2 and no blocks, and rounds of fewer blocks.
    for heads in [30, 60, 120, 240] {
        let layer = Layer::new(&Case::new("many", (256, 64), (heads, heads / 2)), 3);
        compare(&format!("{heads} heads"), &[layer.input], &stream);
    }
    let layer = Layer::new(&Case::new("rounds", (256, 128), (16, 2)), 4);
    compare("rounds", &vec![layer.input; 36], &stream);
}

/// Descales and plans of several engines in a row, without a wait: weights change in between, on the stream.
fn plans_in_a_row_are_of_their_own_weights() {
    let stream = device().stream().unwrap();
    for case in [
        Case { biases: true, ..Case::new("qwen2", (896, 64), (14, 2)) },
        Case::new("mistral", (1024, 128), (8, 2)),
        Case { rotary: 0, layer_norm: true, biases: true, ..Case::new("gpt2", (768, 64), (12, 12)) },
    ] {
        let layers: Vec<Layer> = (0..3).map(|seed| Layer::new(&case, 50 + seed)).collect();
        let wanted: Vec<_> = layers.iter().map(|layer| expected(&[layer.input], &stream)).collect();
        let mut place = Layer::new(&case, 50);
        for schedule in SCHEDULES {
            // SAFETY: `place` outlives the engines.
            let engines = [true, false]
                .map(|plan| unsafe { ScaleEngine::scheduled(device(), &[place.input], plan, schedule) }.unwrap());
            for round in 0..200 {
                let which = round % 3;
                for (to, from) in place.memory.iter_mut().zip(&layers[which].memory) {
                    to.copy_from(from, &stream).unwrap();
                }
                for _ in 0..round % 4 {
                    engines[0].plan(&stream).unwrap();
                }
                engines[1].descales(&stream).unwrap();
                engines[0].plan(&stream).unwrap();
                if round % 5 == 0 {
                    engines[0].frobenius(&stream).unwrap();
                }
                if round % 7 == 0 || round > 190 {
                    stream.synchronize().unwrap();
                    assert!(of_engine(&engines[0]) == wanted[which][0], "{}: {schedule:?}, plan {round}", case.name);
                    assert!(of_engine(&engines[1]) == wanted[which][1], "{}: {schedule:?}, {round}", case.name);
                }
            }
        }
        let scaled: Vec<f32> = decode(&place.memory[0].read().unwrap(), case.dtype).iter().map(|x| 2.0 * x).collect();
        place.memory[0].write(&encode(&scaled, case.dtype)).unwrap();
        compare(&case.name, &[place.input], &stream);
    }
}

fn weights_that_move_give_the_same_bits() {
    let stream = device().stream().unwrap();
    for (i, case) in cases().iter().enumerate().skip(1).step_by(4) {
        let layers: Vec<Layer> = (0..3).map(|j| Layer::new(case, 8000 + 3 * i as u64 + j)).collect();
        let wanted: Vec<_> = layers.iter().map(|layer| expected(&[layer.input], &stream)).collect();
        for schedule in [SCHEDULES[0], Schedule::ALL] {
            let engines =
                [true, false].map(|plan| ShapeEngine::scheduled(device(), &[layers[0].input], plan, schedule).unwrap());
            for round in 0..6 {
                let (layer, wanted) = (&layers[round % 3], &wanted[round % 3]);
                // SAFETY: `layers` holds the memory.
                unsafe {
                    // Another layer's launches right in front.
                    engines[0].plan(&stream, &[layers[(round + 1) % 3].input]).unwrap();
                    engines[1].descales(&stream, &[layers[(round + 2) % 3].input]).unwrap();
                    engines[0].plan(&stream, &[layer.input]).unwrap();
                    engines[1].descales(&stream, &[layer.input]).unwrap();
                }
                stream.synchronize().unwrap();
                assert!(of_shape(&engines[0]) == wanted[0], "{}: {schedule:?}, plan {round}", case.name);
                assert!(of_shape(&engines[1]) == wanted[1], "{}: {schedule:?}, descales {round}", case.name);
            }
        }
    }
}

/// Small enough for compute-sanitizer: two chains, one of them rotated.
fn few_small_heads() {
    let stream = device().stream().unwrap();
    for case in [
        Case { biases: true, ..Case::new("rotated", (520, 64), (4, 2)) },
        Case { rotary: 0, layer_norm: true, biases: true, ..Case::new("fixed", (520, 64), (2, 2)) },
    ] {
        let layer = Layer::new(&case, 70);
        compare(&case.name, &[layer.input; 2], &stream);
    }
}

/// Prints what layers of real shapes take whose addresses come with each launch, by every schedule in turn.
fn the_time_of_weights_that_move() {
    let stream = device().stream().unwrap();
    for (name, shape, heads, count) in [
        ("qwen2.5-0.5b", (896, 64), (14, 2), 24),
        ("llama-3.2-1b", (2048, 64), (32, 8), 16),
        ("qwen2.5-3b", (2048, 128), (16, 2), 36),
        ("llama-3-8b", (4096, 128), (32, 8), 32),
    ] {
        let layer = Layer::new(&Case::new(name, shape, heads), 60);
        let (inputs, _copies): (Vec<LayerInput>, Vec<_>) = (0..count).map(|_| layer.copied()).unzip();
        for plan in [false, true] {
            let all: Vec<Schedule> = std::iter::once(OFF).chain(SCHEDULES).collect();
            let make = |&schedule: &Schedule| ShapeEngine::scheduled(device(), &inputs[..1], plan, schedule).unwrap();
            let engines: Vec<ShapeEngine> = all.iter().map(make).collect();
            let graph = |engine: &ShapeEngine, s: &Stream| {
                inputs.iter().try_for_each(|l| {
                    // SAFETY: `layer` and its copies hold the memory.
                    unsafe { if plan { engine.plan(s, &[*l]) } else { engine.descales(s, &[*l]) } }
                })
            };
            let graphs: Vec<_> = engines.iter().map(|engine| stream.capture(|s| graph(engine, s)).unwrap()).collect();
            let mut times = vec![vec![]; graphs.len()];
            for _ in 0..21 {
                for (graph, times) in graphs.iter().zip(&mut times) {
                    graph.launch().unwrap();
                    let start = stream.record().unwrap();
                    graph.launch().unwrap();
                    times.push(1e3 * start.milliseconds_to(&stream.record().unwrap()).unwrap() / count as f32);
                }
            }
            let names = ["default", "overlap", "split", "even", "far", "all"];
            for (named, times) in names.iter().zip(&mut times) {
                times.sort_by(f32::total_cmp);
                let what = if plan { "plan" } else { "descales" };
                println!("moving,{name},{count},{what},{named},{:.2},{:.2},{:.2}", times[10], times[0], times[20]);
            }
        }
    }
}
