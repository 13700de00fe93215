//! The scale engine against the CPU engine, which is f64 throughout.

use crate::device;
use crate::weights::{Case, GROWING, Kind, Layer, Layout, decode, encode};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sigmascale::bound::HeadBound;
use sigmascale::bound::{E4M3_MAX, LayerBounds, Tail};
use sigmascale::cuda::{Buffer, DevicePtr, Stream};
use sigmascale::device::DeviceBounds;
use sigmascale::device::scale::{DeviceWeights, Dtype, GramRoute, LayerInput, ScaleEngine};
use sigmascale::model::Temperature;
use sigmascale::plan::DEFAULT_ETA;
use sigmascale::runtime::bounds_of;
use sigmascale::{Descale, Result};
use std::sync::Arc;

tests![
    plans_are_never_below_the_truth_and_close_above_it,
    heads_of_few_directions_are_bounded_as_tightly,
    large_flat_heads_are_bounded_as_tightly,
    random_shapes_hold_the_same,
    a_head_of_which_rounding_leaves_nothing_keeps_its_bound,
    raw_norms_that_are_the_sharpest_bound_are_used,
    raw_norms_of_channels_that_are_alike_are_skipped,
    the_rounding_share_is_the_layers,
    many_layers_are_the_same_as_one,
    the_same_input_gives_the_same_bits,
    a_capture_and_its_replays_neither_allocate_nor_wait,
    weights_written_in_place_are_seen,
    weights_that_are_not_finite_are_flagged,
    every_shape_takes_its_kernel,
    the_workspace_is_foretold_without_weights_or_memory,
    broken_arguments_are_refused_in_one_sentence,
    host_weights_give_the_same_bounds,
    weights_must_lie_in_their_memory,
    memory_that_runs_out_is_an_error,
];

/// How far an operand bound may lie above f64, relative; nowhere below.
pub const OPERAND_ABOVE: f64 = 1e-5;
/// How far a certified logit bound may lie below that of the CPU: the two balance rotation pairs in f32 and f64.
pub const LOGIT_BELOW: f64 = 2e-6;

pub fn cases() -> Vec<Case> {
    let case = Case::new;
    let mut all = vec![
        case("mistral", (1024, 128), (8, 2)),
        case("llama", (1280, 128), (4, 4)),
        Case { rotary: 0, layer_norm: true, biases: true, ..case("gpt2-xl", (1600, 64), (5, 5)) },
        Case { layout: Layout::Conv1d, rotary: 0, layer_norm: true, biases: true, ..case("gpt2", (768, 64), (12, 12)) },
        Case { layout: Layout::Fused, ..case("fused", (1024, 128), (6, 3)) },
        Case { layout: Layout::Strided, ..case("strided", (512, 64), (4, 1)) },
        Case { biases: true, ..case("qwen2", (896, 64), (14, 2)) },
        Case { one_plus: true, ..case("gemma", (2048, 256), (8, 1)) },
        Case { rotary: 32, ..case("partial", (640, 80), (4, 4)) },
        Case { rotary: 32, interleaved: true, layer_norm: true, biases: true, ..case("gpt-j", (512, 128), (4, 4)) },
        Case { interleaved: true, ..case("interleaved", (1024, 128), (4, 1)) },
        Case { rope_factor: 1.35, ..case("yarn", (1024, 128), (8, 2)) },
        case("odd d", (101, 64), (3, 1)),
        Case { rotary: 0, ..case("one head", (64, 16), (1, 1)) },
        Case { dtype: Dtype::F32, rotary: 0, layer_norm: true, ..case("master", (384, 32), (12, 12)) },
        Case { dtype: Dtype::F16, ..case("half", (1000, 96), (6, 2)) },
        Case { dtype: Dtype::F32, layout: Layout::Conv1d, ..case("f32 conv", (300, 40), (5, 5)) },
    ];
    // Queries that grow with the position: rotated, unrotated, with constants, small and wide, f32.
    let grows = |name, (d, r), heads| Case { temperature: Some(GROWING), ..case(name, (d, r), heads) };
    all.extend([
        grows("ministral 3", (1024, 128), (8, 2)),
        Case { rotary: 0, ..grows("llama 4", (1024, 128), (5, 1)) },
        Case { rotary: 0, biases: true, layer_norm: true, ..grows("grows with constants", (640, 64), (6, 2)) },
        Case { biases: true, rope_factor: 1.2, rotary: 48, ..grows("grows partly turned", (512, 64), (4, 2)) },
        Case { layout: Layout::Conv1d, ..grows("grows along channels", (320, 32), (3, 3)) },
        grows("grows wide", (512, 192), (3, 1)),
        Case { dtype: Dtype::F32, kind: Kind::ZeroHead, ..grows("grows f32", (300, 72), (4, 2)) },
    ]);
    // Heads of more than 128 channels and f32 weights: every layout, rotation, count and end that the wide kernel has.
    all.extend([
        Case { dtype: Dtype::F32, ..case("f32 llama", (1284, 128), (6, 2)) },
        Case { dtype: Dtype::F32, rotary: 24, interleaved: true, ..case("f32 odd", (388, 64), (7, 1)) },
        Case { dtype: Dtype::F32, layout: Layout::Strided, ..case("f32 strided", (516, 24), (3, 3)) },
        Case { dtype: Dtype::F32, layout: Layout::Fused, biases: true, ..case("f32 fused", (640, 96), (3, 1)) },
        Case { dtype: Dtype::F32, rope_factor: 1.2, ..case("f32 wide", (1100, 256), (4, 2)) },
        Case { dtype: Dtype::F32, rotary: 0, layer_norm: true, biases: true, ..case("f32 norm", (776, 200), (2, 2)) },
        Case { dtype: Dtype::F16, interleaved: true, ..case("f16 wide", (712, 160), (3, 1)) },
        Case { layer_norm: true, biases: true, rotary: 64, ..case("wide norm", (1096, 192), (2, 1)) },
        Case { rotary: 0, ..case("wide fixed", (520, 136), (3, 3)) },
        Case { rotary: 0, dtype: Dtype::F32, ..case("f32 wide fixed", (640, 160), (4, 2)) },
        Case { rotary: 0, biases: true, ..case("wide fixed with constants", (640, 256), (2, 1)) },
        Case { layout: Layout::Strided, rotary: 90, ..case("wide strided", (896, 248), (5, 5)) },
        Case { layout: Layout::Conv1d, ..case("wide conv", (400, 192), (2, 1)) },
        case("wide unaligned", (333, 144), (2, 1)),
    ]);
    for kind in [Kind::Spiked, Kind::BadlyScaled, Kind::Cancelling, Kind::ZeroHead] {
        all.push(Case { kind, rotary: 0, ..case("wide fixed", (640, 192), (4, 2)) });
        all.push(Case { kind, ..case("wide turned", (640, 160), (4, 2)) });
        all.push(Case { kind, dtype: Dtype::F32, ..case("f32 turned", (512, 128), (4, 2)) });
        all.push(Case { kind, dtype: Dtype::F32, rotary: 0, ..case("f32 fixed", (512, 64), (4, 2)) });
    }
    for r in (16..=256).step_by(24) {
        all.push(Case { rotary: r / 2 / 2 * 2, ..case("every head size", (320, r), (2, 1)) });
    }
    // A mean that only the norm takes out, on every way to the pairs of a rotation.
    for layout in [Layout::Apart, Layout::Conv1d] {
        let offset = Case { kind: Kind::Offset, layer_norm: true, layout, ..case("offset", (512, 64), (4, 2)) };
        all.push(Case { dtype: Dtype::F32, ..offset.clone() });
        all.push(Case { rotary: 0, ..offset.clone() });
        all.push(offset);
    }
    let offset = Case { kind: Kind::Offset, layer_norm: true, ..case("wide offset", (512, 192), (4, 2)) };
    all.push(Case { dtype: Dtype::F32, ..offset.clone() });
    all.push(offset);
    // Which channels are a pair decides what balances them.
    for (kind, r) in [(Kind::BadlyScaled, 64), (Kind::BadlyScaled, 128), (Kind::BadlyScaled, 160), (Kind::Spiked, 96)] {
        all.push(Case { kind, interleaved: true, ..case("interleaved kinds", (640, r), (4, 2)) });
        all.push(Case { kind, interleaved: true, rotary: r / 2, ..case("interleaved parts", (640, r), (4, 2)) });
    }
    for interleaved in [false, true] {
        all.push(Case { kind: Kind::Turning, interleaved, ..case("turning pairs", (512, 64), (4, 2)) });
    }
    for (r, rotary) in [(64, 0), (64, 64), (128, 128), (192, 192)] {
        all.push(Case { kind: Kind::TwoDirections, rotary, ..case("two directions", (384, r), (6, 3)) });
    }
    for r in [24, 40, 72] {
        all.push(Case { rotary: 0, ..case("fixed of every size", (384, r), (6, 3)) });
    }
    // What only constants, only a gain of 1 + g or only a part without rotation can show.
    all.push(Case { rope_factor: 1.35, biases: true, ..case("yarn with constants", (512, 64), (4, 2)) });
    all.push(Case { one_plus: true, ..case("one plus", (512, 128), (4, 2)) });
    all.push(Case { kind: Kind::Cancelling, rotary: 16, biases: true, ..case("part turned", (512, 64), (4, 2)) });
    for (r, rotary) in [(64, 64), (64, 0), (128, 128), (200, 200), (256, 256)] {
        all.push(Case { kind: Kind::WeakChannel, rotary, ..case("weak channel", (2048, r), (2, 1)) });
    }
    for kind in [Kind::Spiked, Kind::BadlyScaled, Kind::Cancelling, Kind::ZeroHead] {
        all.push(Case { kind, rotary: 0, biases: true, ..case("fixed with constants", (512, 64), (4, 2)) });
        all.push(Case { kind, ..case("turned", (512, 64), (4, 2)) });
        all.push(Case { kind, rotary: 0, ..case("fixed", (512, 64), (4, 2)) });
        all.push(Case { kind, dtype: Dtype::F32, layer_norm: true, biases: true, ..case("f32", (200, 48), (4, 2)) });
    }
    all
}

/// Heads whose raw norms are far below the scaled ones, beside flat ones, on every way to their squares; and what single norms
/// are needed for beside.
fn competing() -> Vec<Case> {
    let case = |(d, r), heads| Case { kind: Kind::Competing, ..Case::new("competing", (d, r), heads) };
    vec![
        case((1024, 128), (8, 2)),
        case((1024, 64), (6, 3)),
        case((768, 96), (4, 4)),
        case((1024, 192), (8, 2)),
        case((640, 256), (5, 1)),
        Case { dtype: Dtype::F32, interleaved: true, ..case((512, 128), (70, 2)) },
        Case { layout: Layout::Conv1d, ..case((512, 160), (4, 2)) },
        Case { rope_factor: 1.35, ..case((512, 64), (4, 2)) },
        Case { biases: true, ..case((512, 128), (4, 2)) },
        Case { layer_norm: true, ..case((512, 64), (4, 2)) },
        Case { layer_norm: true, unshifted: true, ..case((512, 128), (4, 2)) },
        Case { layer_norm: true, unshifted: true, kind: Kind::BadlyScaled, ..case((512, 64), (4, 2)) },
        Case { kind: Kind::OneLarge, ..case((2048, 128), (6, 3)) },
        Case { kind: Kind::OneLarge, ..case((1024, 256), (4, 4)) },
    ]
}

/// Heads that few directions carry over uneven channels, on every way to their Grams and pairs: the Frobenius norm over every
/// relative position is the sharpest bound of most.
pub fn few_directions() -> Vec<Case> {
    let uneven = |(d, r)| Case { kind: Kind::Uneven, ..Case::new("uneven", (d, r), (4, 2)) };
    let mut all: Vec<Case> = [64, 96, 128, 192, 256].map(|r| uneven((512, r))).into();
    all.extend([
        uneven((2048, 128)),
        uneven((512, 16)),
        uneven((333, 72)),
        Case { interleaved: true, ..uneven((512, 64)) },
        Case { interleaved: true, rotary: 64, ..uneven((640, 160)) },
        Case { rotary: 64, ..uneven((512, 128)) },
        Case { rotary: 90, ..uneven((640, 248)) },
        Case { layer_norm: true, biases: true, ..uneven((768, 64)) },
        Case { layer_norm: true, layout: Layout::Conv1d, ..uneven((768, 128)) },
        Case { layer_norm: true, ..uneven((512, 192)) },
        Case { dtype: Dtype::F32, ..uneven((772, 128)) },
        Case { dtype: Dtype::F32, rotary: 24, ..uneven((388, 48)) },
        Case { dtype: Dtype::F32, layer_norm: true, layout: Layout::Conv1d, ..uneven((300, 64)) },
        Case { dtype: Dtype::F16, rope_factor: 1.35, ..uneven((712, 128)) },
        Case { rope_factor: 1.35, rotary: 32, ..uneven((512, 64)) },
    ]);
    all
}

/// The same without rotation: norms of such heads lie far above those of products, and few channels are long.
fn few_directions_without_rotation() -> Vec<Case> {
    let uneven = |(d, r), dtype| Case { kind: Kind::Uneven, rotary: 0, dtype, ..Case::new("uneven", (d, r), (4, 2)) };
    vec![
        uneven((512, 256), Dtype::Bf16),
        uneven((640, 168), Dtype::F32),
        uneven((1024, 192), Dtype::F16),
        uneven((512, 96), Dtype::F32),
        uneven((512, 128), Dtype::Bf16),
    ]
}

/// How far a certified logit bound may lie above that of the CPU.
fn logit_above(case: &Case) -> f64 {
    let part_turned = case.rotary > 0 && case.rotary < case.r;
    match case.kind {
        // Nothing but constants is left, and the norm that they meet keeps the mean.
        Kind::ZeroHead if case.layer_norm && case.biases => 0.02,
        // The bound of the last head is made of what rounding took.
        Kind::Faded => f64::INFINITY,
        // The shift of the first squaring stays half way to the small end: more is rounded.
        Kind::WeakChannel => 0.02,
        // What the norm takes out of a Gram costs the digits that it had.
        Kind::Offset => 0.4,
        // Constants that meet channels without rotation: the CPU knows the norm of these channels together.
        Kind::Cancelling if part_turned => 0.05,
        Kind::Spiked | Kind::Uneven if part_turned && (case.biases || case.layer_norm) => 0.05,
        // Both sides of both Grams are rounded once, and their sums are deep.
        _ if case.rotary == 0 && case.r > 128 => 0.011,
        _ => 0.01,
    }
}

pub fn engine(layer: &Layer) -> ScaleEngine {
    engine_of(layer, 1)
}

/// Of a model that has this layer so many times.
fn engine_of(layer: &Layer, copies: usize) -> ScaleEngine {
    // SAFETY: the memory is held by `layer`, which outlives the engine in every test, and written by no launch.
    unsafe { ScaleEngine::new(device(), &vec![layer.input; copies], true) }.unwrap()
}

pub fn stream() -> Stream {
    device().stream().unwrap()
}

fn bits(buffer: &Buffer<f32>) -> Vec<u32> {
    buffer.read().unwrap().into_iter().map(f32::to_bits).collect()
}

/// The bounds that the engine's buffers hold.
fn read(case: &Case, engine: &ScaleEngine) -> Result<LayerBounds> {
    let (heads, operands) = (engine.head_bounds().unwrap().read()?, engine.operand_bounds().read()?);
    LayerBounds::from_device(&case.spec(), 0, &heads[..case.n_q], &operands[..3 * case.n_kv], &Tail::default())
}

/// Ratio of the device's value to the truth; 1 where both are zero.
pub fn ratio(device: f64, truth: f64) -> f64 {
    if truth == 0.0 && device == 0.0 { 1.0 } else { device / truth }
}

pub fn operands(case: &Case, truth: &LayerBounds) -> Vec<f64> {
    let group = case.n_q / case.n_kv;
    let q = truth.q.chunks(group).map(|heads| heads.iter().map(|b| b.rounded).fold(0.0, f64::max));
    let rest = truth.k.iter().chain(truth.v.as_ref().unwrap()).map(|b| b.rounded);
    q.chain(rest).collect()
}

/// Every failed expectation of one case.
pub fn compare(case: &Case, seed: u64) -> Vec<String> {
    compare_copies(case, seed, 1)
}

/// The same of a model that has this layer so many times.
fn compare_copies(case: &Case, seed: u64, copies: usize) -> Vec<String> {
    let mut bad = vec![];
    let layer = Layer::new(case, seed);
    let (truth, engine, stream) = (layer.truth(), engine_of(&layer, copies), stream());
    let want = operands(case, &truth);
    let mut check_operands = |name: &str, got: Vec<f32>, descales: Vec<f32>| {
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let ratio = ratio(f64::from(*got), *want);
            if !(1.0..=1.0 + OPERAND_ABOVE).contains(&ratio) {
                bad.push(format!("{name} operand bound {i} is {ratio:.8} of f64"));
            }
            let descale = Descale::covering(f64::from(*got), E4M3_MAX).unwrap();
            if descale.get() != descales[i] {
                bad.push(format!("{name} descale {i} is {}, not {}", descales[i], descale.get()));
            }
        }
        for kv in 0..case.n_kv {
            let (v, o) = (descales[2 * case.n_kv + kv], descales[3 * case.n_kv + kv]);
            let zero = want[2 * case.n_kv + kv] == 0.0;
            if o != if zero { 1.0 } else { 2.0 * v } {
                bad.push(format!("{name} o descale {kv} is {o} for v {v}"));
            }
        }
    };
    engine.descales(&stream).unwrap();
    check_operands("lone", engine.operand_bounds().read().unwrap(), engine.head_descales().read().unwrap());
    // SAFETY: `layer` holds the memory.
    let alone = unsafe { ScaleEngine::new(device(), &[layer.input], false) }.unwrap();
    alone.descales(&stream).unwrap();
    check_operands("without Grams", alone.operand_bounds().read().unwrap(), alone.head_descales().read().unwrap());
    engine.plan(&stream).unwrap();
    let cold = read(case, &engine).unwrap();
    for _ in 0..8 {
        engine.plan(&stream).unwrap();
    }
    check_operands("plan", engine.operand_bounds().read().unwrap(), engine.head_descales().read().unwrap());
    let warm = read(case, &engine).unwrap();
    for (h, want) in truth.heads.iter().enumerate() {
        let pairs = |b: &LayerBounds| {
            let head = &b.heads[h];
            [(head.exact, want.exact), (head.rounded, want.rounded), (head.rank_aware, want.rank_aware)]
        };
        let above = logit_above(case);
        for (name, bounds) in [("first", &cold), ("later", &warm)] {
            for ((got, want), kind) in pairs(bounds).into_iter().zip(["exact", "rounded", "rank-aware"]) {
                // Two products of norms are in it.
                let above = if kind == "rounded" { above.max(0.02) } else { above };
                let ratio = ratio(got.unwrap(), want.unwrap());
                if !(1.0 - LOGIT_BELOW..=1.0 + above).contains(&ratio) {
                    bad.push(format!("{name} {kind} bound of head {h} is {ratio:.8} of f64"));
                }
            }
        }
    }
    let heads = engine.head_bounds().unwrap().read().unwrap();
    // Where blocks share a head's Gram, its sums round otherwise, and a raw norm may be skipped that else is not.
    let near = |a: f32, b: f32| a == b || (a / b - 1.0).abs() < 2e-3;
    let same = |(h, head): (usize, &HeadBound)| {
        near(head.exact, heads[h % case.n_q].exact) && near(head.rounded, heads[h % case.n_q].rounded)
    };
    if !heads.iter().enumerate().all(same) {
        bad.push("the same layer has other bounds".into());
    }
    for (h, head) in heads[..case.n_q].iter().enumerate() {
        let descale = Descale::covering(f64::from(head.rounded), DEFAULT_ETA * E4M3_MAX).unwrap();
        if head.descale != descale.get() {
            bad.push(format!("logit descale of head {h} is {}, not {}", head.descale, descale.get()));
        }
    }
    let status = engine.status().read().unwrap()[0];
    if status & 3 != 0 {
        bad.push(format!("status {status}"));
    }
    bad.truncate(6);
    bad.into_iter().map(|rule| format!("{} ({:?}): {rule}", case.name, case)).collect()
}

fn plans_are_never_below_the_truth_and_close_above_it() {
    let bad: Vec<String> = cases().iter().enumerate().flat_map(|(i, case)| compare(case, 7 + i as u64)).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

fn heads_of_few_directions_are_bounded_as_tightly() {
    let cases = [few_directions(), few_directions_without_rotation()].concat();
    let bad: Vec<String> = cases.iter().zip(500..).flat_map(|(case, seed)| compare(case, seed)).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Independent values of one size over many inputs: the flattest spectrum that weights have, the hardest for a certificate.
fn large_flat_heads_are_bounded_as_tightly() {
    let flat = |d, r, rotary| Case { rotary, ..Case::new("flat", (d, r), (2, 1)) };
    let f32s = |case| Case { dtype: Dtype::F32, ..case };
    let cases = [
        flat(8192, 128, 128),
        flat(8192, 128, 0),
        flat(8192, 192, 192),
        Case { layer_norm: true, biases: true, ..flat(1600, 64, 0) },
        Case { layer_norm: true, biases: true, ..flat(4096, 128, 0) },
        Case { dtype: Dtype::F16, ..flat(3072, 96, 96) },
        f32s(flat(8192, 128, 128)),
        f32s(flat(4096, 128, 0)),
        f32s(flat(3584, 256, 256)),
    ];
    let bad: Vec<String> = cases.iter().zip(900..).flat_map(|(case, seed)| compare(case, seed)).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

fn random_shapes_hold_the_same() {
    let mut rng = StdRng::seed_from_u64(2026);
    let mut bad: Vec<String> = (0..60).flat_map(|i| compare(&Case::random(&mut rng), 100 + i)).collect();
    let mut uneven = || Case { kind: Kind::Uneven, ..Case::random(&mut rng) };
    bad.extend((0..20).flat_map(|i| compare(&uneven(), 200 + i)));
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

fn a_head_of_which_rounding_leaves_nothing_keeps_its_bound() {
    let faded = |(d, r), heads| Case { kind: Kind::Faded, ..Case::new("faded", (d, r), heads) };
    let unrotated = [((1024, 64), (4, 2)), ((1024, 96), (4, 2)), ((512, 192), (2, 2))]
        .map(|(size, heads)| Case { rotary: 0, ..faded(size, heads) });
    let rotated =
        [((2048, 128), (6, 3)), ((1024, 64), (4, 2)), ((1024, 192), (4, 4))].map(|(size, heads)| faded(size, heads));
    let bad: Vec<String> = rotated.iter().chain(&unrotated).flat_map(|case| compare(case, 41)).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Layers of a model whose blocks share no head.
const MANY: usize = 64;

fn raw_norms_that_are_the_sharpest_bound_are_used() {
    let bad: Vec<String> = competing().iter().flat_map(|case| compare_copies(case, 31, MANY)).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Of flat heads nearly all; of heads whose raw norms win, their own and their keys' are not; with constants none.
fn raw_norms_of_channels_that_are_alike_are_skipped() {
    for (case, squared, most) in [
        (Case::new("flat", (4096, 128), (8, 2)), 16..=18, 26),
        (Case { rope_factor: 1.35, ..Case::new("flat", (4096, 128), (8, 2)) }, 16..=18, 26),
        (Case { dtype: Dtype::F32, ..Case::new("flat", (4096, 256), (4, 4)) }, 8..=10, 16),
        // Two query heads and the keys of both groups.
        (Case { kind: Kind::Competing, ..Case::new("competing", (4096, 128), (8, 2)) }, 20..=22, 26),
        // Both are of the only group.
        (Case { kind: Kind::Competing, ..Case::new("competing", (4096, 128), (8, 1)) }, 19..=21, 25),
        (Case { kind: Kind::Competing, ..Case::new("competing", (4096, 192), (8, 2)) }, 20..=22, 26),
        (Case { biases: true, ..Case::new("constants", (1024, 64), (4, 2)) }, 14..=14, 14),
        (Case { layer_norm: true, ..Case::new("shift", (1024, 128), (4, 2)) }, 14..=14, 14),
        (Case { rotary: 0, ..Case::new("fixed", (1024, 64), (4, 2)) }, 6..=6, 6),
    ] {
        let layer = Layer::new(&case, 21);
        for copies in [1, MANY] {
            let (engine, stream) = (engine_of(&layer, copies), stream());
            for _ in 0..2 {
                engine.plan(&stream).unwrap();
                let found = engine.squared().unwrap();
                let each = found.0 / copies;
                assert!(squared.contains(&each) && found == (each * copies, most * copies), "{case:?}: {found:?}");
            }
        }
    }
    // Skipped or not, what is not a number is seen, and by the heads that use it alone.
    for r in [128, 192] {
        let broken = Layer::broken(&Case::new("nan", (512, r), (4, 2)), 1, Some(f32::NAN));
        let (engine, stream) = (engine_of(&broken, MANY), stream());
        engine.plan(&stream).unwrap();
        assert_eq!(engine.status().read().unwrap()[0] & 3, 3);
        for (h, head) in engine.head_bounds().unwrap().read().unwrap().iter().enumerate() {
            let found = [head.exact, head.rounded, head.descale].map(f32::is_nan);
            assert_eq!(found, [h % 4 < 2; 3], "head {h}: {head:?}");
        }
    }
    // What one plan knows of its heads must not reach the next.
    let flat = Layer::new(&Case::new("flat", (4096, 128), (8, 2)), 3);
    let layer = Layer::new(&Case { kind: Kind::Competing, ..flat.case.clone() }, 3);
    let (first, stream) = (layer.memory[0].read().unwrap(), stream());
    let engine = engine_of(&layer, MANY);
    let graph = stream.capture(|s| engine.plan(s)).unwrap();
    let plan = |q: &[u8]| {
        layer.memory[0].write(q).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let heads = engine.head_bounds().unwrap().read().unwrap();
        (bytemuck::cast_slice::<_, u32>(&heads).to_vec(), engine.squared().unwrap().0)
    };
    let other = flat.memory[0].read().unwrap();
    let (one, two) = (plan(&first), plan(&other));
    assert!(one.1 > two.1, "{} {}", one.1, two.1);
    for _ in 0..3 {
        assert_eq!((plan(&first), plan(&other)), (one.clone(), two.clone()));
    }
}

/// Operand bounds are B + share A, and bounds with rounding meet the same share.
fn the_rounding_share_is_the_layers() {
    for case in [
        Case::new("share", (512, 64), (4, 2)),
        Case { dtype: Dtype::F32, ..Case::new("share, f32", (640, 128), (4, 2)) },
    ] {
        let layer = Layer::new(&case, 77);
        let mut spec = case.spec();
        // A factor on q counts two roundings more, nine with the rotation, which the least share does not cover.
        spec.layers[0].temperature = Some(Temperature { strength: 0.0, period: 8, shift: 0, positions: 64 });
        let truth = bounds_of(&spec, layer.weights(), &Tail::default()).unwrap();
        let input = LayerInput {
            rounding_share: spec.rounding_share(&spec.layers[0], layer.weights().stored()),
            ..layer.input
        };
        // SAFETY: `layer` holds the memory.
        let engine = unsafe { ScaleEngine::new(device(), &[input], true) }.unwrap();
        engine.plan(&stream()).unwrap();
        for (got, want) in engine.operand_bounds().read().unwrap().iter().zip(operands(&case, &truth)) {
            let ratio = f64::from(*got) / want;
            assert!((1.0..=1.0 + OPERAND_ABOVE).contains(&ratio), "{}: operand bound is {ratio:.8} of f64", case.name);
        }
        for (got, want) in engine.head_bounds().unwrap().read().unwrap().iter().zip(&truth.heads) {
            let ratio = f64::from(got.rounded) / want.rounded.unwrap();
            assert!((1.0 - LOGIT_BELOW..1.02).contains(&ratio), "{}: rounded bound is {ratio:.6} of f64", case.name);
        }
    }
}

fn many_layers_are_the_same_as_one() {
    // Tiles that several blocks share, and so many that most belong to one.
    for (r, count) in [(64, 5), (128, 5), (128, 40), (64, 40)] {
        let case = Case { biases: true, ..Case::new("layers", (512, r), (6, 2)) };
        let layers: Vec<Layer> = (0..5).map(|i| Layer::new(&case, 40 + i)).collect();
        let inputs: Vec<LayerInput> = layers.iter().cycle().take(count).map(|layer| layer.input).collect();
        // SAFETY: `layers` holds the memory.
        let all = unsafe { ScaleEngine::new(device(), &inputs, true) }.unwrap();
        let stream = stream();
        for _ in 0..6 {
            all.plan(&stream).unwrap();
        }
        let (heads, operands) = (all.head_bounds().unwrap().read().unwrap(), bits(all.operand_bounds()));
        assert_eq!(heads.len(), 6 * count);
        let truths: Vec<LayerBounds> = layers.iter().map(Layer::truth).collect();
        for (i, truth) in truths.iter().cycle().take(count).enumerate() {
            for (head, want) in heads[6 * i..].iter().zip(&truth.heads) {
                let ratio = f64::from(head.rounded) / want.rounded.unwrap();
                assert!((1.0 - LOGIT_BELOW..1.02).contains(&ratio), "layer {i}: {ratio}");
            }
            for (got, want) in operands[6 * i..].iter().zip(self::operands(&case, truth)) {
                let ratio = f64::from(f32::from_bits(*got)) / want;
                assert!((1.0..1.0 + OPERAND_ABOVE).contains(&ratio), "layer {i}: {ratio}");
            }
        }
    }
}

fn the_same_input_gives_the_same_bits() {
    for (i, case) in [few_directions(), competing(), cases()].concat().iter().enumerate().filter(|(i, _)| i % 3 == 0) {
        let layer = Layer::new(case, 300 + i as u64);
        let run = || {
            let (engine, stream) = (engine(&layer), stream());
            for _ in 0..3 {
                engine.plan(&stream).unwrap();
            }
            let heads = engine.head_bounds().unwrap().read().unwrap();
            let heads: Vec<u32> = bytemuck::cast_slice(&heads).to_vec();
            (heads, bits(engine.head_descales()), bits(engine.operand_bounds()))
        };
        assert_eq!(run(), run(), "{}", case.name);
    }
}

fn a_capture_and_its_replays_neither_allocate_nor_wait() {
    for (i, case) in [few_directions(), competing(), cases()].concat().iter().enumerate().filter(|(i, _)| i % 4 == 1) {
        let layer = Layer::new(case, 400 + i as u64);
        let (direct, replayed, stream) = (engine(&layer), engine(&layer), stream());
        // A capture fails at an allocation or a synchronisation.
        let graph = stream.capture(|s| replayed.plan(s)).unwrap();
        let free = device().memory().unwrap().0;
        for _ in 0..4 {
            direct.plan(&stream).unwrap();
            graph.launch().unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(free, device().memory().unwrap().0, "{}", case.name);
        let heads =
            |e: &ScaleEngine| bytemuck::cast_slice::<_, u32>(&e.head_bounds().unwrap().read().unwrap()).to_vec();
        assert_eq!(heads(&direct), heads(&replayed), "{}", case.name);
        assert_eq!(bits(direct.head_descales()), bits(replayed.head_descales()), "{}", case.name);
    }
}

/// Every chain of launches that a plan can be, replayed: what one replay leaves must not reach the next, and its flags neither.
fn weights_written_in_place_are_seen() {
    let case = Case::new("update", (512, 64), (4, 2));
    for case in [
        Case { dtype: Dtype::F32, ..case.clone() },
        case.clone(),
        Case { r: 128, rotary: 128, ..case.clone() },
        Case { rotary: 0, ..case.clone() },
        Case { layer_norm: true, rotary: 0, ..case.clone() },
        Case { r: 160, rotary: 160, ..case.clone() },
        Case { d: 333, ..case.clone() },
    ] {
        let mut layer = Layer::new(&case, 1);
        let (engine, stream) = (engine(&layer), stream());
        let graph = stream.capture(|s| engine.plan(s)).unwrap();
        let plan = || {
            (0..3).for_each(|_| graph.launch().unwrap());
            stream.synchronize().unwrap();
            let heads = engine.head_bounds().unwrap().read().unwrap();
            (heads, bits(engine.operand_bounds()), engine.status().read().unwrap()[0] & 3)
        };
        let before = plan();
        assert_eq!(before.2, 0, "{case:?}");
        let nan = encode(&[f32::NAN], case.dtype);
        for which in 0..3 {
            let good = layer.memory[which].read().unwrap();
            let mut bad = good.clone();
            bad[..nan.len()].copy_from_slice(&nan);
            layer.memory[which].write(&bad).unwrap();
            assert_eq!(plan().2, if which == 2 { 1 } else { 3 }, "{case:?}: of matrix {which}");
            layer.memory[which].write(&good).unwrap();
            let mended = plan();
            assert_eq!((mended.1, mended.2), (before.1.clone(), 0), "{case:?}: matrix {which}");
            let words = |heads| bytemuck::cast_slice::<_, u32>(heads);
            assert_eq!(words(&mended.0[..]), words(&before.0[..]), "{case:?}: matrix {which}");
        }
        for buffer in layer.memory.iter_mut().take(3) {
            let doubled: Vec<f32> = decode(&buffer.read().unwrap(), case.dtype).iter().map(|x| 2.0 * x).collect();
            buffer.write(&encode(&doubled, case.dtype)).unwrap();
        }
        let after = plan();
        for (new, old) in after.0.iter().zip(&before.0) {
            assert!((new.sigma / old.sigma / 4.0 - 1.0).abs() < 0.01, "{case:?}: {} for {}", new.sigma, old.sigma);
        }
        for (new, old) in after.1.into_iter().zip(before.1) {
            assert_eq!(f32::from_bits(new), 2.0 * f32::from_bits(old), "{case:?}");
        }
    }
}

fn weights_that_are_not_finite_are_flagged() {
    for planted in [f32::NAN, f32::INFINITY] {
        for case in [
            Case::new("tensor cores", (512, 128), (4, 2)),
            Case { dtype: Dtype::F32, rotary: 0, layer_norm: true, ..Case::new("plain", (301, 48), (4, 2)) },
            Case { dtype: Dtype::F32, ..Case::new("f32", (300, 48), (4, 2)) },
            Case::new("wide", (512, 256), (4, 2)),
        ] {
            let layer = Layer::broken(&case, 1, Some(planted));
            let (engine, stream) = (engine(&layer), stream());
            engine.descales(&stream).unwrap();
            let descales = engine.head_descales().read().unwrap();
            // Head 0 of k holds it; q, v and the other head do not.
            for (i, descale) in descales.iter().enumerate() {
                assert_eq!(descale.is_nan(), i == 2, "{planted} in {}: descale {i} is {descale}", case.name);
            }
            assert_eq!(engine.status().read().unwrap()[0], 1);
            engine.plan(&stream).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(engine.status().read().unwrap()[0] & 3, 3);
            let heads = engine.head_bounds().unwrap().read().unwrap();
            for (h, head) in heads.iter().enumerate() {
                assert_eq!(head.rounded.is_nan() && head.descale.is_nan(), h < 2, "{planted}: head {h} {head:?}");
            }
            assert!(read(&case, &engine).unwrap_err().is_non_finite());
            // The flag goes when the weights are mended.
            let good = Layer::new(&case, 1);
            let mended = self::engine(&good);
            mended.plan(&stream).unwrap();
            assert_eq!(mended.status().read().unwrap()[0] & 3, 0);
        }
    }
}

fn every_shape_takes_its_kernel() {
    if device().arch().compute != 90 {
        return;
    }
    let f32s = |case| Case { dtype: Dtype::F32, ..case };
    let conv1d = |case| Case { layout: Layout::Conv1d, ..case };
    let shape = |d, r| Case::new("route", (d, r), (2, 1));
    // Whether a plan reads each weight once.
    for (case, route, one_pass) in [
        (shape(256, 128), GramRoute::Rounded, true),
        (Case { rotary: 0, ..shape(256, 128) }, GramRoute::Split, true),
        (shape(256, 64), GramRoute::Split, true),
        (conv1d(shape(256, 128)), GramRoute::Split, true),
        (Case { layer_norm: true, ..shape(256, 128) }, GramRoute::Split, true),
        (Case { dtype: Dtype::F16, layer_norm: true, ..shape(256, 128) }, GramRoute::Split, false),
        (shape(256, 136), GramRoute::Wide, true),
        (Case { layer_norm: true, ..shape(256, 136) }, GramRoute::Wide, false),
        (f32s(shape(100, 16)), GramRoute::Wide, true),
        (f32s(shape(256, 256)), GramRoute::Wide, true),
        (f32s(shape(101, 128)), GramRoute::Generic, false),
        (f32s(conv1d(shape(256, 128))), GramRoute::Generic, false),
        (conv1d(shape(256, 256)), GramRoute::Generic, false),
    ] {
        let layer = Layer::new(&case, 1);
        let engine = engine(&layer);
        assert_eq!((engine.route(0), engine.one_pass()), (Some(route), one_pass), "{case:?}");
    }
}

fn the_workspace_is_foretold_without_weights_or_memory() {
    let shapes = [Case::new("a", (1024, 128), (8, 2)), Case { rotary: 0, ..Case::new("b", (512, 192), (6, 3)) }];
    let layers = shapes.map(|case| Layer::new(&case, 1));
    let inputs: Vec<LayerInput> = layers.iter().cycle().take(40).map(|layer| layer.input).collect();
    let nowhere: Vec<LayerInput> = inputs
        .iter()
        .map(|l| {
            let mut l = *l;
            let v = l.v.as_mut().unwrap();
            for p in [&mut l.q, &mut l.k, v] {
                p.weight.ptr = DevicePtr::NULL;
            }
            l.gain = DevicePtr::NULL;
            l
        })
        .collect();
    for with_grams in [false, true] {
        // SAFETY: `layers` holds the memory.
        let engine = unsafe { ScaleEngine::new(device(), &inputs, with_grams) }.unwrap();
        let free = device().memory().unwrap().0;
        let foretold = ScaleEngine::workspace_bytes_for(device(), &nowhere, with_grams).unwrap();
        assert_eq!(engine.workspace_bytes(), foretold);
        assert!(foretold > if with_grams { 1 << 24 } else { 1 << 18 }, "{foretold}");
        assert_eq!(device().memory().unwrap().0, free);
    }
}

fn broken_arguments_are_refused_in_one_sentence() {
    let good = Layer::new(&Case::new("good", (512, 64), (4, 2)), 1);
    type Break = fn(&mut LayerInput);
    let rules: [(&str, Break); 10] = [
        ("d_head must be a multiple of 8 from 16 to 256", |l| l.d_head = 12),
        ("d_head must be a multiple of 8 from 16 to 256", |l| l.d_head = 264),
        ("must divide that of query heads", |l| l.n_kv = 0),
        ("must divide that of query heads", |l| l.n_kv = 3),
        ("even in number and at most d_head", |l| l.rotary = 3),
        ("even in number and at most d_head", |l| l.rotary = 66),
        ("finite and greater than zero", |l| l.rope_factor = 0.0),
        ("the factor on q must be finite", |l| l.query_factor = f64::NAN),
        ("d_model must be from 1 to 2^20", |l| l.d_model = 0),
        ("at most 4096 heads", |l| (l.n_q, l.n_kv) = (8192, 2)),
    ];
    for (rule, change) in rules {
        let mut input = good.input;
        change(&mut input);
        // SAFETY: refused before anything is read.
        let error = unsafe { ScaleEngine::new(device(), &[input], true) }.unwrap_err();
        let text = error.to_string();
        assert!(error.is_argument() && text.contains(rule) && text.starts_with("layer 0: "), "{text}");
    }
    // SAFETY: there is nothing to read.
    assert!(unsafe { ScaleEngine::new(device(), &[], true) }.unwrap_err().is_argument());
    // SAFETY: `good` holds the memory.
    let lone = unsafe { ScaleEngine::new(device(), &[good.input], false) }.unwrap();
    assert!(lone.plan(&stream()).unwrap_err().is_cuda());
}

fn host_weights_give_the_same_bounds() {
    let bounds = DeviceBounds::open().unwrap();
    for (i, case) in cases().iter().enumerate().filter(|(i, _)| i % 4 == 2) {
        let layer = Layer::new(case, 500 + i as u64);
        let truth = layer.truth();
        let got = bounds.layer(&case.spec(), layer.weights(), &Tail::default()).unwrap();
        for (got, want) in got.heads.iter().zip(&truth.heads) {
            let ratio = ratio(got.rounded.unwrap(), want.rounded.unwrap());
            let above = 1.0 + logit_above(case).max(0.02);
            assert!((1.0 - LOGIT_BELOW..=above).contains(&ratio), "{}: {ratio}", case.name);
        }
    }
    let case = Case::new("nan", (256, 64), (2, 1));
    let layer = Layer::broken(&case, 1, Some(f32::NAN));
    assert!(bounds.layer(&case.spec(), layer.weights(), &Tail::default()).unwrap_err().is_non_finite());
}

fn weights_must_lie_in_their_memory() {
    for layout in [Layout::Apart, Layout::Conv1d] {
        let case = Case { layout, biases: true, layer_norm: true, ..Case::new("owned", (256, 64), (4, 2)) };
        type Break = fn(&mut LayerInput);
        let breaks: [(Break, bool); 9] = [
            (|_| (), true),
            (|l| l.q.weight.ptr = l.q.weight.ptr.offset(2), false),
            (|l| l.k.weight.ptr.0 = l.k.weight.ptr.0.wrapping_sub(1 << 30), false),
            (|l| l.v.as_mut().unwrap().weight.row_stride *= 2, false),
            (|l| l.k.weight.col_stride = -1, false),
            (|l| l.d_model *= 1 << 20, false),
            (|l| l.gain = l.gain.offset(4), false),
            (|l| l.shift = l.shift.offset(4), false),
            (|l| l.q.bias = l.q.bias.offset(4), false),
        ];
        for (at, (change, sound)) in breaks.into_iter().enumerate() {
            let mut layer = Layer::new(&case, 1);
            let mut input = layer.input;
            change(&mut input);
            // In one fused matrix, moving q or k by little stays inside.
            let sound = sound || (layout == Layout::Conv1d && at == 1);
            let weights = DeviceWeights::new(vec![input], std::mem::take(&mut layer.memory));
            assert_eq!(weights.is_ok(), sound, "{layout:?} {at}");
            if at == 0 {
                let engine = ScaleEngine::over(device(), &Arc::new(weights.unwrap()), true).unwrap();
                engine.plan(&stream()).unwrap();
                assert_eq!(engine.status().read().unwrap()[0], 0);
            }
        }
    }
}

fn memory_that_runs_out_is_an_error() {
    let error = device().allocate::<u8>(1 << 46).unwrap_err();
    assert!(error.is_cuda() && error.to_string().contains("out of device memory"), "{error}");
    assert!(device().allocate::<f64>(usize::MAX / 4).unwrap_err().is_cuda());
    // So little is left that an engine cannot be set up, and the next one can.
    let case = Case::new("large", (4096, 128), (32, 32));
    let layer = Layer::new(&case, 1);
    let mut hogs = vec![];
    let mut size = device().memory().unwrap().0;
    while size > 1 << 16 {
        match device().allocate::<u8>(size) {
            Ok(hog) => hogs.push(hog),
            Err(_) => size /= 2,
        }
    }
    // SAFETY: `layer` holds the memory.
    let error = unsafe { ScaleEngine::new(device(), &[layer.input], true) }.unwrap_err();
    assert!(error.is_cuda() && error.to_string().contains("out of device memory"), "{error}");
    drop(hogs);
    let engine = engine(&layer);
    engine.plan(&stream()).unwrap();
    assert_eq!(engine.status().read().unwrap()[0], 0);
    assert_eq!(
        engine.route(0),
        Some(if device().arch().compute == 90 { GramRoute::Rounded } else { GramRoute::Generic })
    );
}
