//! Channel statistics channel by channel: what operand descales alone are made of against f64, those of plans against these.

use crate::device;
use crate::weights::{Case, Kind, Layer, Layout};
use sigmascale::cuda::DevicePtr;
use sigmascale::device::scale::{ChannelStats, Dtype, LayerInput, ScaleEngine};
use sigmascale::tensor::MatrixView;

tests![
    every_head_size_in_every_storage,
    every_rotation,
    every_norm,
    every_depth,
    layers_leave_the_bits_of_one_alone,
    statistics_of_unaligned_weights,
    large_sums_that_cancel_are_not_below,
    engines_follow_one_another_in_the_same_memory,
    plans_leave_the_same_statistics,
    plans_in_a_row_are_of_their_own_weights,
    weights_that_are_not_finite_reach_their_channels_alone,
];

/// Roundings that a sum over `d` inputs may be deep, relative: f32 sums of 8 inputs a tile of 64 in first sums and these in second
/// ones, or of 8 inputs a load and one of these every 256 inputs, three for what is made of them.
fn depth(d: usize) -> f64 {
    let tiles = d.div_ceil(64);
    let deep = (0..).map(|power| 1 << power).find(|deep| 16 * deep * deep >= tiles).unwrap_or(1);
    let by_tiles = 8 * deep + tiles.div_ceil(deep) + 6;
    let by_loads = 3 * (d / 256 + 13);
    by_tiles.max(by_loads) as f64 * 2f64.powi(-24)
}

/// What one channel's statistics are of.
struct Sums {
    raw2: f64,
    sum: f64,
    constant: f64,
    absolute: f64,
}

fn column(view: &MatrixView<'_>, channel: usize, d: usize) -> Vec<f64> {
    let mut x = vec![0.0; d];
    view.read_block(channel..channel + 1, 0..d, &mut x);
    x
}

pub fn check(name: &str, layer: &Layer) {
    let (case, input, weights) = (&layer.case, &layer.input, layer.weights());
    let (d, r) = (case.d, case.r);
    // SAFETY: `layer` holds the memory.
    let engine = unsafe { ScaleEngine::new(device(), &[*input], false) }.unwrap();
    let stream = device().stream().unwrap();
    engine.descales(&stream).unwrap();
    let stats = engine.read_stats(0).unwrap();
    engine.descales(&stream).unwrap();
    let again = engine.read_stats(0).unwrap();
    assert_eq!(bytemuck::cast_slice::<_, u32>(&stats), bytemuck::cast_slice::<_, u32>(&again), "{name}: other bits");

    let offset = f64::from(input.gain_offset);
    let gain = match input.gain {
        DevicePtr::NULL => vec![1.0; d],
        _ => weights.norm_gain.as_ref().unwrap().iter().map(|g| g + offset).collect(),
    };
    let shift = weights.norm_shift.clone().filter(|_| input.shift != DevicePtr::NULL).unwrap_or_else(|| vec![0.0; d]);
    let off = depth(d);
    let mut rows = stats.iter();
    for (which, p) in [&weights.q, &weights.k, &weights.v].into_iter().enumerate() {
        let rotary = if which == 2 { 0 } else { case.rotary };
        for (h, view) in p.heads.iter().enumerate() {
            let columns: Vec<Vec<f64>> = (0..r).map(|c| column(view, c, d)).collect();
            let scaled = |c: usize| columns[c].iter().zip(&gain).map(|(w, g)| g * w);
            let all: Vec<Sums> = (0..r)
                .map(|c| {
                    let bias = p.bias.as_ref().map_or(0.0, |bias| bias[h * r + c]);
                    let shifted = || columns[c].iter().zip(&shift).map(|(w, s)| s * w);
                    Sums {
                        raw2: scaled(c).map(|y| y * y).sum(),
                        sum: scaled(c).sum(),
                        constant: shifted().sum::<f64>() + bias,
                        absolute: shifted().map(f64::abs).sum::<f64>() + bias.abs(),
                    }
                })
                .collect();
            for c in 0..r {
                let got: &ChannelStats = rows.next().unwrap();
                let place = format!("{name}: {which}, head {h}, channel {c}: {got:?}");
                let own = &all[c];
                let (taken, mean) = match case.layer_norm {
                    true => (own.sum * own.sum / d as f64, own.sum.abs() * (own.raw2 / d as f64).sqrt()),
                    false => (0.0, 0.0),
                };
                // Rounded to f32 at the end, and otherwise never below.
                let last = 2f64.powi(-23);
                let (norm2, raw2) = (f64::from(got.norm2), f64::from(got.raw2));
                let want = own.raw2 - taken;
                let lost = off * (own.raw2 + 2.0 * mean) + last * want;
                assert!(norm2 >= want * (1.0 - last) && norm2 <= want + 2.0 * lost, "{place}: norm2 is {want}");
                let lost = lost + last * own.raw2;
                assert!(
                    raw2 >= own.raw2 * (1.0 - last) && raw2 <= own.raw2 + 2.0 * lost,
                    "{place}: raw2 is {}",
                    own.raw2
                );
                let near =
                    |got: f32, want: f64, scale: f64| (f64::from(got) - want).abs() <= off * scale + last * want.abs();
                assert!(near(got.constant, own.constant, own.absolute), "{place}: constant is {}", own.constant);
                assert!(near(got.absolute, own.absolute, own.absolute), "{place}: absolute is {}", own.absolute);
                if case.layer_norm {
                    assert!(near(got.sum, own.sum, (own.raw2 * d as f64).sqrt()), "{place}: sum is {}", own.sum);
                }
                if c < rotary {
                    let other = match (case.interleaved, rotary / 2) {
                        (true, _) => c ^ 1,
                        (false, half) => (c + half) % rotary,
                    };
                    let partner = &all[other];
                    let product: f64 = scaled(c).zip(scaled(other)).map(|(y, z)| y * z).sum();
                    // Where weights lie along the channels the mean may still be in it, and goes by the sums.
                    let mean = if case.layer_norm { own.sum * partner.sum / d as f64 } else { 0.0 };
                    let size = (own.raw2 * partner.raw2).sqrt();
                    let kept = case.layout == Layout::Conv1d && near(got.pair, product, size);
                    assert!(kept || near(got.pair, product - mean, 3.0 * size), "{place}: pair is {}", product - mean);
                }
            }
        }
    }
    assert!(rows.next().is_none(), "{name}: more statistics than channels");
    assert_eq!(engine.status().read().unwrap()[0], 0, "{name}");
}

fn check_case(case: &Case, seed: u64) {
    check(&format!("{case:?}"), &Layer::new(case, seed));
}

const LAYOUTS: [Layout; 4] = [Layout::Apart, Layout::Conv1d, Layout::Fused, Layout::Strided];
const TYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

fn every_head_size_in_every_storage() {
    for (i, r) in [16, 24, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 200, 248, 256].into_iter().enumerate() {
        for layout in [LAYOUTS[i % 4], LAYOUTS[(i + 1) % 4]] {
            let layer_norm = i / 2 % 2 == 0;
            let rotary = if i % 3 == 0 { 0 } else { r };
            let case = Case { layout, layer_norm, biases: layer_norm, rotary, ..Case::new("size", (328, r), (2, 1)) };
            check_case(&Case { dtype: TYPES[i % 2], ..case }, 10 + i as u64);
        }
    }
}

fn every_rotation() {
    // Half an odd number of channels, so that pairs of one lane are of both kinds; and all but the last ones.
    for (i, (r, rotary)) in
        [(64, 2), (64, 26), (64, 62), (96, 24), (128, 90), (24, 10), (256, 250)].into_iter().enumerate()
    {
        for interleaved in [false, true] {
            for layout in [Layout::Apart, Layout::Conv1d] {
                let case = Case { layout, rotary, interleaved, ..Case::new("rotation", (200, r), (2, 2)) };
                check_case(&Case { layer_norm: i % 2 == 0, ..case }, 30 + i as u64);
            }
        }
    }
}

fn every_norm() {
    let case = |layout, vectors| Case {
        layout,
        vectors,
        layer_norm: true,
        biases: true,
        ..Case::new("norm", (392, 64), (2, 1))
    };
    for layout in [Layout::Fused, Layout::Conv1d] {
        for (i, vectors) in [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
            for one_plus in [false, true] {
                check_case(&Case { one_plus, ..case(layout, vectors) }, 50 + i as u64);
            }
            let mut layer = Layer::new(&case(layout, vectors), 60);
            layer.input.gain = DevicePtr::NULL;
            check("no gain", &layer);
            layer.input.shift = DevicePtr::NULL;
            check("neither gain nor shift", &layer);
            let mut layer = Layer::new(&Case { one_plus: true, ..case(layout, vectors) }, 61);
            layer.input.shift = DevicePtr::NULL;
            check("no shift", &layer);
        }
    }
}

fn every_depth() {
    // Fewer tiles than stages, each number of first sums, and ends of every kind.
    for (i, d) in [8, 64, 72, 1024, 1032, 1600, 4096, 4168, 16384, 16456].into_iter().enumerate() {
        for (layout, layer_norm) in [(Layout::Apart, true), (Layout::Conv1d, false), (Layout::Apart, false)] {
            let case = Case { layout, layer_norm, ..Case::new("depth", (d, 64), (1, 1)) };
            check_case(&Case { rotary: if i % 2 == 0 { 64 } else { 0 }, ..case }, 70 + i as u64);
        }
    }
}

/// Several blocks share a head of one layer, fewer those of more layers, and of many layers none: equal bits of all.
fn layers_leave_the_bits_of_one_alone() {
    let stream = device().stream().unwrap();
    let compare = |case: &Case, seed: u64, counts: &[usize]| {
        let layer = Layer::new(case, seed);
        let words = |count: usize| -> Vec<Vec<u32>> {
            // SAFETY: `layer` holds the memory.
            let engine = unsafe { ScaleEngine::new(device(), &vec![layer.input; count], false) }.unwrap();
            engine.descales(&stream).unwrap();
            let of = |place| bytemuck::cast_slice(&engine.read_stats(place).unwrap()).to_vec();
            vec![of(0), of(count - 1)]
        };
        let alone = words(1);
        for &count in counts {
            assert!(words(count) == alone, "{case:?}: {count} layers");
        }
    };
    // Depths of which a block of eight has no first sum, one, and several, the last of them short; 4, 52, 120, 240 heads.
    for (i, d) in [64, 200, 512, 520, 1096, 2048, 4096, 4104].into_iter().enumerate() {
        for r in [128, 192, 256] {
            let sums = d % 16 == 8;
            let rotary = if i % 3 == 0 { 0 } else { r };
            let case = Case { rotary, layer_norm: sums, biases: sums, ..Case::new("depth", (d, r), (2, 1)) };
            compare(&Case { dtype: TYPES[i % 2], ..case }, 95 + i as u64, &[13, 30, 60]);
        }
    }
    // 720 heads in rounds of fewer blocks a multiprocessor than fit; heads of 64 channels, with a mean, too.
    compare(&Case::new("rounds", (256, 128), (16, 2)), 93, &[36]);
    compare(&Case { layer_norm: true, ..Case::new("rounds of small heads", (256, 64), (25, 25)) }, 94, &[48]);
}

fn statistics_of_unaligned_weights() {
    for layout in LAYOUTS {
        check_case(&Case { layout, layer_norm: true, biases: true, ..Case::new("odd", (333, 72), (2, 1)) }, 90);
        if layout == Layout::Conv1d {
            continue;
        }
        // A vector that does not start at 16 bytes.
        let mut layer = Layer::new(&Case { layout, layer_norm: true, ..Case::new("off", (336, 64), (2, 1)) }, 91);
        let values: Vec<f64> = layer.weights().norm_shift.unwrap();
        let bytes: Vec<u8> = std::iter::once(0.0).chain(values).flat_map(|x| (x as f32).to_le_bytes()).collect();
        let moved = device().upload(&bytes).unwrap();
        layer.input.shift = moved.ptr().offset(4);
        check("a shift off its 16 bytes", &layer);
    }
}

fn large_sums_that_cancel_are_not_below() {
    for (d, layout) in [(512, Layout::Apart), (1600, Layout::Apart), (1600, Layout::Conv1d), (8192, Layout::Fused)] {
        let case = Case { kind: Kind::Offset, layer_norm: true, layout, ..Case::new("offset", (d, 64), (2, 1)) };
        check_case(&case, 100);
        check_case(&Case { rotary: 0, ..case }, 101);
    }
}

fn weights_that_are_not_finite_reach_their_channels_alone() {
    for planted in [f32::NAN, f32::INFINITY] {
        for (layout, r) in [(Layout::Apart, 64), (Layout::Fused, 40), (Layout::Conv1d, 64), (Layout::Conv1d, 40)] {
            // The value is one of channel 0 of the first head of k.
            let case = Case { layout, layer_norm: true, ..Case::new("not finite", (328, r), (4, 2)) };
            let layer = Layer::broken(&case, 5, Some(planted));
            // SAFETY: `layer` holds the memory.
            let engine = unsafe { ScaleEngine::new(device(), &[layer.input], false) }.unwrap();
            let stream = device().stream().unwrap();
            engine.descales(&stream).unwrap();
            stream.synchronize().unwrap();
            for (row, stats) in engine.read_stats(0).unwrap().iter().enumerate() {
                let finite = stats.norm2.is_finite() && stats.raw2.is_finite() && stats.absolute.is_finite();
                assert_eq!(finite, row != 4 * r, "{planted} in {case:?}: channel {row}: {stats:?}");
            }
        }
    }
}

/// What a multiprocessor keeps of an engine's tables must not serve the next engine, whose tables and weights may lie where those of
/// the last one lay.
fn engines_follow_one_another_in_the_same_memory() {
    for (round, d) in [4096, 1536, 3072, 2048, 4096, 1024, 2560].into_iter().enumerate() {
        for rotary in [0, 128] {
            let case = Case { rotary, ..Case::new("in turn", (d, 128), (12, 12)) };
            let layer = Layer::new(&case, round as u64);
            check(&format!("engine {round} of {d} inputs, {rotary} turned"), &layer);
        }
    }
}

/// Every kernel that leaves statistics beside Grams or certificates, channel by channel, and Grams entry by entry, of layers that
/// are not alike: a descale is the largest of many, and a bound has room, and neither would tell.
fn plans_leave_the_same_statistics() {
    let named = |name: &str, size, heads| Case::new(name, size, heads);
    let cases = [
        named("rounded", (4096, 128), (32, 8)),
        Case { dtype: Dtype::F16, biases: true, ..named("rounded, f16", (3000, 128), (16, 16)) },
        Case { interleaved: true, ..named("rounded, of 96", (2560, 96), (24, 8)) },
        Case { layer_norm: true, biases: true, rotary: 0, ..named("split", (2048, 64), (16, 16)) },
        Case { layout: Layout::Conv1d, layer_norm: true, ..named("split along channels", (1600, 64), (10, 10)) },
        named("wide", (2304, 256), (8, 4)),
        Case { rotary: 64, ..named("wide of 160", (2560, 160), (8, 2)) },
        Case { dtype: Dtype::F32, ..named("wide of f32", (2048, 128), (8, 4)) },
        Case { dtype: Dtype::F32, layout: Layout::Conv1d, layer_norm: true, ..named("generic", (768, 64), (4, 4)) },
    ];
    for (case, seed) in cases.iter().zip((70..).step_by(3)) {
        let layers = [0, 1, 2].map(|i| Layer::new(case, seed + i));
        // SAFETY: `layers` hold the memory.
        let new = |inputs: &[LayerInput], grams| unsafe { ScaleEngine::new(device(), inputs, grams) }.unwrap();
        let stream = device().stream().unwrap();
        let plans = new(&layers.each_ref().map(|layer| layer.input), true);
        let heads = case.n_q + case.n_kv;
        let alone = layers.each_ref().map(|layer| {
            let (descales, plan) = (new(&[layer.input], false), new(&[layer.input], true));
            descales.descales(&stream).unwrap();
            plan.plan(&stream).unwrap();
            let grams: Vec<Vec<f64>> = (0..heads).map(|head| plan.read_gram(0, head).unwrap()).collect();
            (descales.read_stats(0).unwrap(), grams)
        });
        for round in 0..3 {
            plans.plan(&stream).unwrap();
            for (place, (expected, grams)) in alone.iter().enumerate() {
                let stats = plans.read_stats(place).unwrap();
                assert_eq!(stats.len(), expected.len());
                for (channel, (got, want)) in stats.iter().zip(expected).enumerate() {
                    let at = format!("{case:?}: plan {round}, layer {place}, channel {channel}");
                    assert!(same_statistics(case, channel, got, want, expected), "{at}: {got:?}, not {want:?}");
                }
                for (head, want) in grams.iter().enumerate().filter(|_| round == 2) {
                    let (got, r) = (plans.read_gram(place, head).unwrap(), case.r);
                    let off = |(a, b): (usize, usize)| {
                        (got[a * r + b] - want[a * r + b]).abs() / (want[a * r + a] * want[b * r + b]).sqrt()
                    };
                    let worst = (0..r).flat_map(|a| (a..r).map(move |b| (a, b))).map(off).fold(0.0, f64::max);
                    assert!(worst < 2e-5, "{case:?}: layer {place}, Gram of head {head} is off by {worst:.1e}");
                }
            }
        }
    }
}

/// What a plan leaves of one channel beside what descales alone do, whose other channels are `all`.
fn same_statistics(case: &Case, channel: usize, got: &ChannelStats, want: &ChannelStats, all: &[ChannelStats]) -> bool {
    let near = |got: f32, want: f32, size: f32| (got - want).abs() <= 1e-5 * size + f32::MIN_POSITIVE;
    let (projected, c) = (channel < (case.n_q + case.n_kv) * case.r, channel % case.r);
    let paired = !projected || c >= case.rotary || {
        let other = if case.interleaved { c ^ 1 } else { (c + case.rotary / 2) % case.rotary };
        near(got.pair, want.pair, (want.raw2 * all[channel - c + other].raw2).sqrt())
    };
    let sums = !case.layer_norm || near(got.sum, want.sum, (case.d as f32 * want.raw2).sqrt());
    // Sums of tensor cores are cut off, so they are raised by 1e-4.
    let absolute = (got.absolute + f32::MIN_POSITIVE) / (want.absolute + f32::MIN_POSITIVE);
    near(got.norm2, want.norm2, want.raw2)
        && near(got.raw2, want.raw2, want.raw2)
        && near(got.constant, want.constant, want.absolute)
        && (1.0 - 1e-5..1.0 + 1.3e-4).contains(&absolute)
        && paired
        && sums
}

/// Weights that change between plans, on the stream and with nobody waiting: what is stale is then wrong.
fn plans_in_a_row_are_of_their_own_weights() {
    for case in [
        Case::new("in a row", (2304, 128), (16, 4)),
        Case { layer_norm: true, biases: true, rotary: 0, ..Case::new("in a row, fixed", (1600, 64), (10, 10)) },
        Case::new("in a row, wide", (1280, 192), (4, 2)),
    ] {
        let (mut first, other) = (Layer::new(&case, 1), Layer::new(&case, 2));
        let rest = Layer::new(&case, 3);
        let stream = device().stream().unwrap();
        // SAFETY: the layers hold the memory.
        let new = |inputs: &[LayerInput]| unsafe { ScaleEngine::new(device(), inputs, true) }.unwrap();
        let results = |engine: &ScaleEngine| {
            let heads = engine.head_bounds().unwrap().read().unwrap();
            let words = bytemuck::cast_slice::<_, u32>(&heads).to_vec();
            let operands: Vec<u32> = engine.operand_bounds().read().unwrap().into_iter().map(f32::to_bits).collect();
            (words, operands)
        };
        let want = [&first, &other].map(|layer| {
            let engine = new(&[rest.input, layer.input, rest.input]);
            engine.plan(&stream).unwrap();
            results(&engine)
        });
        assert!(want[0] != want[1]);
        let weights = [0, 1].map(|which| {
            let layer = if which == 0 { &first } else { &other };
            layer.memory.iter().map(|buffer| device().upload(&buffer.read().unwrap()).unwrap()).collect::<Vec<_>>()
        });
        let engine = new(&[rest.input, first.input, rest.input]);
        let (heads, operands) = (engine.head_bounds().unwrap(), engine.operand_bounds());
        let mut kept: Vec<_> =
            (0..30).map(|_| (device().zeros(heads.len()).unwrap(), device().zeros(operands.len()).unwrap())).collect();
        for (round, (to_heads, to_operands)) in kept.iter_mut().enumerate() {
            for (to, from) in first.memory.iter_mut().zip(&weights[round % 2]) {
                to.copy_from(from, &stream).unwrap();
            }
            engine.plan(&stream).unwrap();
            to_heads.copy_from(heads, &stream).unwrap();
            to_operands.copy_from(operands, &stream).unwrap();
        }
        stream.synchronize().unwrap();
        for (round, (heads, operands)) in kept.iter().enumerate() {
            let heads = heads.read().unwrap();
            let words: &[u32] = bytemuck::cast_slice(&heads);
            let operands: Vec<u32> = operands.read().unwrap().into_iter().map(f32::to_bits).collect();
            assert!((words, &operands) == (&want[round % 2].0, &want[round % 2].1), "{case:?}: plan {round}");
        }
    }
}
