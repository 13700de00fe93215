//! Operand descales in one launch, against those of two.

use crate::device;
use crate::engine::cases;
use crate::weights::{Case, Layer};
use sigmascale::device::scale::{LayerInput, ScaleEngine};

tests![
    one_launch_gives_what_two_give,
    many_layers_and_replays,
    what_is_not_finite_is_flagged_once,
    the_time_of_whole_models,
];

/// The engine with two launches, and with one.
fn both(inputs: &[LayerInput]) -> [ScaleEngine; 2] {
    // SAFETY: the callers hold the memory.
    let make = || unsafe { ScaleEngine::new(device(), inputs, false) }.unwrap();
    [make(), make().with_descales_at_once(device()).unwrap()]
}

/// The formulas are the same; compilers may contract them otherwise.
fn compare(name: &str, [two, one]: &[ScaleEngine; 2]) {
    let results =
        |e: &ScaleEngine| [e.head_descales(), e.tensor_descales(), e.operand_bounds()].map(|b| b.read().unwrap());
    for (which, (got, want)) in results(one).iter().zip(results(two)).enumerate() {
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let same = got.to_bits() == want.to_bits() || (got / want - 1.0).abs() < 1e-6;
            assert!(same, "{name}: result {which}, value {i}: {got} for {want}");
        }
    }
    assert_eq!(one.status().read().unwrap(), two.status().read().unwrap(), "{name}");
}

fn one_launch_gives_what_two_give() {
    let stream = device().stream().unwrap();
    for (i, case) in cases().iter().enumerate() {
        let layer = Layer::new(case, 4000 + i as u64);
        let engines = both(&[layer.input]);
        for _ in 0..2 {
            engines.iter().for_each(|engine| engine.descales(&stream).unwrap());
            compare(&case.name, &engines);
        }
    }
}

fn many_layers_and_replays() {
    let stream = device().stream().unwrap();
    for (r, count) in [(64, 5), (128, 40), (256, 7), (16, 30)] {
        let case = Case { biases: true, ..Case::new("layers", (512, r), (6, 2)) };
        let layers: Vec<Layer> = (0..5).map(|i| Layer::new(&case, 40 + i)).collect();
        let mut inputs: Vec<LayerInput> = layers.iter().cycle().take(count).map(|layer| layer.input).collect();
        for without_values in [false, true] {
            if without_values {
                inputs.iter_mut().for_each(|l| l.v = None);
            }
            let engines = both(&inputs);
            engines[0].descales(&stream).unwrap();
            let graph = stream.capture(|s| engines[1].descales(s)).unwrap();
            for _ in 0..50 {
                graph.launch().unwrap();
            }
            stream.synchronize().unwrap();
            compare(&format!("{count} layers of {r}"), &engines);
        }
    }
}

fn what_is_not_finite_is_flagged_once() {
    let case = Case::new("nan", (512, 128), (4, 2));
    let (broken, good) = (Layer::broken(&case, 1, Some(f32::NAN)), Layer::new(&case, 1));
    let (stream, memory) = (device().stream().unwrap(), broken.memory[1].read().unwrap());
    let engines = both(&[good.input, broken.input, good.input]);
    for (bytes, status) in [(memory.clone(), 1), (good.memory[1].read().unwrap(), 0), (memory, 1)] {
        broken.memory[1].write(&bytes).unwrap();
        engines.iter().for_each(|engine| engine.descales(&stream).unwrap());
        compare("nan", &engines);
        assert_eq!(engines[1].status().read().unwrap()[0], status);
    }
}

/// Prints the time of all layers with two launches and with one, and of one read of the weights at the rate of a copy.
fn the_time_of_whole_models() {
    let stream = device().stream().unwrap();
    for (name, (d, r), heads, layers) in [
        ("qwen2.5-0.5b", (896, 64), (14, 2), 24),
        ("llama-3.2-1b", (2048, 64), (32, 8), 16),
        ("qwen2.5-1.5b", (1536, 128), (12, 2), 28),
        ("qwen2.5-3b", (2048, 128), (16, 2), 36),
        ("llama-3-8b", (4096, 128), (32, 8), 32),
    ] {
        let case = Case::new(name, (d, r), heads);
        let layer = Layer::new(&case, 60);
        // Copies of their own, so that the cache holds no layer twice.
        let (inputs, copies): (Vec<LayerInput>, Vec<_>) = (0..layers).map(|_| layer.copied()).unzip();
        let engines = both(&inputs);
        let bytes: usize = copies.iter().flatten().map(|buffer| buffer.len()).sum();
        let (source, mut target) = (device().zeros::<u8>(bytes).unwrap(), device().zeros::<u8>(bytes).unwrap());
        let graphs = engines.each_ref().map(|engine| stream.capture(move |s| engine.descales(s)).unwrap());
        let mut times = [vec![], vec![], vec![]];
        for _ in 0..21 {
            for (graph, times) in graphs.iter().zip(&mut times) {
                // The cache is full of something else.
                target.copy_from(&source, &stream).unwrap();
                let start = stream.record().unwrap();
                graph.launch().unwrap();
                times.push(1e3 * start.milliseconds_to(&stream.record().unwrap()).unwrap());
            }
            let start = stream.record().unwrap();
            target.copy_from(&source, &stream).unwrap();
            // A copy reads and writes.
            times[2].push(0.5e3 * start.milliseconds_to(&stream.record().unwrap()).unwrap());
        }
        times.iter_mut().for_each(|times| times.sort_by(f32::total_cmp));
        let [two, one, read] = times.map(|times| times[10]);
        println!(
            "{name}: two launches {two:.1} us ({:.2}), one {one:.1} us ({:.2}), a read {read:.1} us",
            two / read,
            one / read
        );
    }
}
