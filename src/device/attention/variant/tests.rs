//! Lists of the variants that calls can ask for, which `device::tests` compiles.

use super::{Pv, Variant};
use crate::attention::{Keeps, PvAccumulator};
use crate::cuda::Request;
use crate::device::attention::kernels::Variant as _;
use crate::device::attention::sizes::HeadDims;
use crate::device::attention::terms::Features;
use crate::device::attention::tile::Tile;
use std::collections::HashSet;

/// Every variant of the kernels that a call over pages can ask for.
pub(in crate::device) fn paged_variants() -> Vec<Request> {
    let mut all = Vec::new();
    for d_head in [64, 128] {
        let (none, sink) = (Features::default(), Features { sink: true, ..Features::default() });
        all.extend([none, sink].map(|features| Variant::Combine {
            columns: d_head,
            padded: false,
            pages: true,
            features,
        }));
        for input in 0..3 {
            all.extend((0..3).map(|rope| Variant::Append { d_head, input, rope, center: input == rope }));
        }
        all.push(Variant::Append { d_head, input: 0, rope: 0, center: false });
        let features = Features { center: true, ..Features::default() };
        all.push(Variant::Combine { columns: d_head, padded: false, pages: true, features });
        for (v_rows, telemetry) in [(false, false), (true, false), (false, true), (true, true)] {
            let center = Features { center: true, ..none };
            let window = Features { window: true, ..none };
            let all_features =
                [none, window, sink, Features { window: true, ..sink }, center, Features { window: true, ..center }];
            for features in all_features {
                all.extend([false, true].map(|rolled| Variant::Pages { d_head, v_rows, telemetry, rolled, features }));
            }
        }
    }
    all.into_iter().map(Variant::request).collect()
}

/// Variants of the attention kernels that are compiled and read without a GPU: every one that a dense call of
/// [`Precision::INFERENCE`](crate::attention::Precision::INFERENCE), `TRAINING` or `PROMOTE_2048` can ask for at the head dimensions
/// 64 and 128, and of windows, sequences of unequal length, soft-caps, sinks and other head dimensions some of each kind.
pub(in crate::device) fn attention_variants() -> Vec<Request> {
    let none = Features::default();
    let (inference, seldom) = (PvAccumulator::default(), PvAccumulator::Fp8 { promote_every: 2048 });
    let mut all = Vec::new();
    for d in [64, 128] {
        let dims = HeadDims { qk: d, v: d, padded: false };
        all.push(Variant::Combine { columns: d, padded: false, pages: false, features: none });
        for accumulator in [inference, seldom, PvAccumulator::F16] {
            for (telemetry, logits_e4m3) in [(false, false), (true, false), (true, true)] {
                // The schedule of E4M3 logits has no rolled form, and P V in F16 has neither these logits nor an output in E4M3.
                let f16 = accumulator == PvAccumulator::F16;
                if f16 && logits_e4m3 {
                    continue;
                }
                for rolled in if logits_e4m3 { vec![false] } else { vec![false, true] } {
                    all.push(parts(dims, accumulator, [telemetry, logits_e4m3, rolled], none));
                }
                for (causal, out_e4m3) in [(false, false), (true, false), (false, true), (true, true)] {
                    if !(f16 && out_e4m3) {
                        let how = [causal, telemetry, logits_e4m3, out_e4m3];
                        let tiles = Tile::all(dims, logits_e4m3, accumulator).into_iter();
                        all.extend(tiles.map(|tile| whole(dims, tile, accumulator, how, none)));
                    }
                }
            }
        }
        all.extend(featured(dims));
        all.extend(keeping(dims));
    }
    for (qk, v, padded) in [(96, 96, false), (192, 128, false), (256, 256, true)] {
        let dims = HeadDims { qk, v, padded };
        all.push(Variant::Combine { columns: v, padded, pages: false, features: none });
        all.push(parts(dims, inference, [true, false, v <= 128], none));
        for (accumulator, how) in [
            (inference, [true, false, false, false]),
            (inference, [true; 4]),
            (PvAccumulator::F16, [false, true, false, false]),
        ] {
            let tiles = Tile::all(dims, how[2], accumulator).into_iter();
            all.extend(tiles.map(|tile| whole(dims, tile, accumulator, how, none)));
        }
    }
    let mut known = HashSet::new();
    all.retain(|variant| known.insert(*variant));
    all.into_iter().map(|variant| variant.request()).collect()
}

/// `[telemetry, logits_e4m3, rolled]`.
fn parts(dims: HeadDims, accumulator: PvAccumulator, how: [bool; 3], features: Features) -> Variant {
    let [telemetry, logits_e4m3, rolled] = how;
    let pv = Pv::of(accumulator, [telemetry, logits_e4m3, false], features.soft_cap, dims, None);
    Variant::Parts { dims, tile: Tile::of_two(dims, accumulator), pv, telemetry, logits_e4m3, rolled, features }
}

/// `[causal, telemetry, logits_e4m3, out_e4m3]`.
fn whole(dims: HeadDims, tile: Tile, accumulator: PvAccumulator, how: [bool; 4], features: Features) -> Variant {
    let [causal, telemetry, logits_e4m3, out_e4m3] = how;
    let pv = Pv::of(accumulator, [telemetry, logits_e4m3, out_e4m3], features.soft_cap, dims, Some(tile));
    Variant::Forward { dims, causal, tile, pv, telemetry, logits_e4m3, out_e4m3, keeps: Keeps::Nothing, features }
}

const EVERY: Features = Features { window: true, varlen: true, soft_cap: true, sink: true, center: false };
const CENTER: Features = Features { window: false, varlen: false, soft_cap: false, sink: false, center: true };

/// The forwards in F16 that keep each row's largest P, or what the rounding of the output took.
fn keeping(dims: HeadDims) -> Vec<Variant> {
    let mut variants = Vec::new();
    for (telemetry, features) in [(false, Features::default()), (false, CENTER), (true, EVERY)] {
        for tile in Tile::all(dims, false, PvAccumulator::F16) {
            for kept in [Keeps::Fp8Dq, Keeps::UnroundedDelta] {
                let mut variant = whole(dims, tile, PvAccumulator::F16, [true, telemetry, false, false], features);
                if let Variant::Forward { keeps, .. } = &mut variant {
                    *keeps = kept;
                }
                variants.push(variant);
            }
        }
    }
    variants
}

/// Variants whose registers are too few, with the bytes that they may spill: parts of calls with sequences, where telemetry leaves room
/// for one set of logits next to O and the sums of a tile, or every feature is there at once.
pub(in crate::device) fn spilling_variants() -> Vec<(Request, u32)> {
    let varlen = Features { varlen: true, ..Features::default() };
    let sink = Features { sink: true, ..varlen };
    let every = Features { window: true, soft_cap: true, ..sink };
    let (fp8, f16) = (PvAccumulator::default(), PvAccumulator::F16);
    // Columns of q and v, features, accumulator, telemetry and logits in E4M3, bytes.
    let all = [
        (64, 128, varlen, fp8, [true, false], 184),
        (128, 128, varlen, fp8, [true, false], 168),
        (192, 128, varlen, fp8, [true, false], 176),
        (256, 128, varlen, fp8, [true, false], 152),
        (192, 64, varlen, fp8, [true, false], 8),
        (192, 96, varlen, fp8, [true, false], 8),
        (192, 64, sink, fp8, [true, false], 8),
        (192, 96, sink, fp8, [true, false], 8),
        (192, 128, sink, fp8, [true, false], 8),
        (192, 128, every, fp8, [false, false], 16),
        (192, 128, every, fp8, [true, false], 16),
        (192, 128, every, fp8, [true, true], 16),
        (192, 128, every, f16, [false, false], 8),
        (192, 128, every, f16, [true, false], 8),
        (192, 96, every, fp8, [false, false], 16),
        (192, 96, every, fp8, [true, false], 16),
        (192, 96, every, fp8, [true, true], 16),
        (192, 96, every, f16, [false, false], 8),
        (192, 96, every, f16, [true, false], 8),
    ];
    type Row = (usize, usize, Features, PvAccumulator, [bool; 2], u32);
    let of = |(qk, v, features, accumulator, [telemetry, logits_e4m3], spills): Row| {
        let dims = HeadDims { qk, v, padded: false };
        (parts(dims, accumulator, [telemetry, logits_e4m3, false], features).request(), spills)
    };
    all.into_iter().map(of).collect()
}

/// Windows, sequences of unequal length, soft-caps and sinks, alone and together.
fn featured(dims: HeadDims) -> Vec<Variant> {
    let none = Features::default();
    let window = Features { window: true, ..none };
    let varlen = Features { varlen: true, ..none };
    let soft_cap = Features { soft_cap: true, ..none };
    let (fp8, f16) = (PvAccumulator::default(), PvAccumulator::F16);
    let joined = [Features { sink: true, ..varlen }, Features { center: true, ..varlen }];
    let combine = |features| Variant::Combine { columns: dims.v, padded: dims.padded, pages: false, features };
    let mut variants: Vec<_> = joined.map(combine).into();
    for (features, accumulator, telemetry) in [
        (window, fp8, false),
        (Features { sink: true, ..varlen }, f16, false),
        (soft_cap, fp8, false),
        (EVERY, fp8, true),
        (EVERY, f16, false),
        (CENTER, fp8, true),
        (Features { center: true, ..varlen }, f16, false),
    ] {
        let tiles = Tile::all(dims, false, accumulator).into_iter();
        variants.extend(tiles.map(|tile| whole(dims, tile, accumulator, [true, telemetry, false, false], features)));
        variants.push(parts(dims, accumulator, [telemetry, false, false], features));
    }
    variants
}

/// Every variant of the cast that a call can ask for at the head dimensions 64 and 128, and some of other ones and for windows and
/// sequences of unequal length.
pub(in crate::device) fn cast_variants() -> Vec<Request> {
    let none = Features::default();
    let mut all = Vec::new();
    for d in [64, 128] {
        for input in 0..3 {
            for features in [none, CENTER] {
                all.extend((0..3).map(|rope| Variant::Cast { d_head: d, d_v: d, input, rope, features }));
            }
        }
    }
    for (d_head, d_v, input, rope) in [(16, 16, 0, 2), (72, 72, 0, 1), (192, 128, 0, 0), (256, 256, 2, 1)] {
        all.push(Variant::Cast { d_head, d_v, input, rope, features: none });
    }
    for features in [Features { window: true, ..none }, Features { varlen: true, ..none }] {
        all.extend([(128, 128), (72, 40)].map(|(d_head, d_v)| Variant::Cast {
            d_head,
            d_v,
            input: 0,
            rope: 1,
            features,
        }));
    }
    all.into_iter().map(|variant| variant.request()).collect()
}
