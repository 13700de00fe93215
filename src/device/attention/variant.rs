//! Which kernel a call gets: its accumulator, tile, masks and types as compile-time variants, and the list of them all.
//! Tiles and splits: [`super::tile`].

use super::call::{Keys, Rope, Tensors};
use super::cut::Cut;
use super::kernels::{self, Tells, Variant as _};
use super::pages::{Pages, ValuePages};
use super::params;
use super::sizes::HeadDims;
use super::terms::{DeviceCall, Features};
use super::tile::{PROCESSORS, Split, Tile};
use crate::attention::{Keeps, PvAccumulator};
use crate::cuda::{Arch, Element, Request, sources};
use std::collections::HashSet;

/// How a kernel sums P V: `Pv` of `kernels/attention/config.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pv {
    /// In FP8, flushed to shared memory after so many keys.
    Flush(usize),
    /// In FP8, promoted in registers after every tile.
    Promote,
    F16,
}

impl Pv {
    /// Keys from which on a flush costs nearly nothing.
    const SELDOM: usize = 2048;

    /// Registers do not hold a second set of sums next to logits in E4M3 or a soft-cap, nor beside telemetry where three consumers
    /// share them. Parts of a split call (`tile` is `None`) are short, and always promoted after every tile, as are sums in slices.
    fn of(
        accumulator: PvAccumulator,
        [telemetry, logits_e4m3, out_e4m3]: [bool; 3],
        soft_cap: bool,
        dims: HeadDims,
        tile: Option<Tile>,
    ) -> Self {
        let PvAccumulator::Fp8 { promote_every } = accumulator else { return Self::F16 };
        let sliced = Mainloop::slices(dims, tile.unwrap_or(Split::TILE));
        let seldom = |tile: Tile| match tile.consumers {
            // Telemetry and an output in E4M3 together leave a register too few for flushes that are seldom.
            2 => promote_every >= Self::SELDOM && !(telemetry && out_e4m3),
            _ => promote_every >= Self::SELDOM || telemetry,
        };
        let flush = !sliced && (logits_e4m3 || soft_cap || tile.is_some_and(seldom));
        if flush { Self::Flush(promote_every) } else { Self::Promote }
    }

    fn define(self, request: Request) -> Request {
        match self {
            Self::Flush(keys) => request.define("PV", 0).define("FLUSH_KEYS", keys),
            Self::Promote => request.define("PV", 1),
            Self::F16 => request.define("PV", 2),
        }
    }
}

/// The loop over the keys: `Mainloop` of `kernels/attention/config.cuh`, which says what each is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mainloop {
    Single,
    Double,
    Rolled,
    Sliced,
}

impl Mainloop {
    fn of(dims: HeadDims, tile: Tile, pv: Pv, [telemetry, logits_e4m3]: [bool; 2], features: Features) -> Self {
        // What the registers of two consumers do not hold next to the logits of two tiles.
        let more = logits_e4m3 || features.soft_cap || features.windowed() && telemetry;
        match pv {
            _ if tile.consumers == 2 && dims.v <= 128 && !more => Self::Double,
            Pv::Promote if Self::slices(dims, tile) => Self::Sliced,
            _ => Self::Single,
        }
    }

    /// Whether a thread has no registers for P V of a tile next to O.
    fn slices(dims: HeadDims, tile: Tile) -> bool {
        dims.v > 128 || (dims.v > 64 && tile == Tile::THREE)
    }

    /// Of a split call. `few`: of few tiles.
    fn of_parts(self, few: bool) -> Self {
        if self == Self::Double && few { Self::Rolled } else { self }
    }
}

/// Compiled form of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Variant {
    Forward {
        dims: HeadDims,
        causal: bool,
        tile: Tile,
        pv: Pv,
        telemetry: bool,
        logits_e4m3: bool,
        out_e4m3: bool,
        keeps: Keeps,
        features: Features,
    },
    /// Parts of a split call, masked or not. `rolled`: by the short code.
    Parts {
        dims: HeadDims,
        tile: Tile,
        pv: Pv,
        telemetry: bool,
        logits_e4m3: bool,
        rolled: bool,
        features: Features,
    },
    /// `columns`: of the partial results. `padded`: the output has fewer. `pages`: of a call over pages.
    Combine {
        columns: usize,
        padded: bool,
        pages: bool,
        features: Features,
    },
    Cast {
        d_head: usize,
        d_v: usize,
        input: u32,
        rope: u32,
        features: Features,
    },
    Repack {
        d_v: usize,
        features: Features,
    },
    /// Of a call over pages: new tokens to their pages, queries to E4M3.
    Append {
        d_head: usize,
        input: u32,
        rope: u32,
        center: bool,
    },
    Pages {
        d_head: usize,
        v_rows: bool,
        telemetry: bool,
        rolled: bool,
        features: Features,
    },
    /// Checks lengths and block table.
    CheckTable,
}

impl kernels::Variant for Variant {
    fn request(self) -> Request {
        let arch = Arch::SM90A;
        match self {
            Self::Parts { dims, tile, pv, telemetry, logits_e4m3, rolled, features } => {
                let mainloop = Mainloop::of(dims, tile, pv, [telemetry, logits_e4m3], features).of_parts(rolled);
                let request = forward(dims, tile, pv, [true, telemetry, logits_e4m3, false], features, mainloop);
                request.define("SPLIT_KV", 1)
            }
            Self::Combine { columns, pages: true, features, .. } => {
                features.define(over_pages(sources::COMBINE, columns)).define("MAINLOOP", Mainloop::Double as u8)
            }
            Self::Combine { columns, padded, features, .. } => {
                let request = Request::new(sources::COMBINE, arch).define("HEAD_DIM", columns);
                let request = if padded { request.define("PADDED", 1) } else { request };
                let request = if features.varlen { request.define("CAUSAL", 1) } else { request };
                features.of_forward().define(request)
            }
            Self::Forward { dims, causal, tile, pv, telemetry, logits_e4m3, out_e4m3, keeps, features } => {
                let mainloop = Mainloop::of(dims, tile, pv, [telemetry, logits_e4m3], features);
                let how = [causal || features.windowed(), telemetry, logits_e4m3, out_e4m3];
                let request = forward(dims, tile, pv, how, features, mainloop);
                match keeps {
                    Keeps::Nothing | Keeps::Operands => request,
                    Keeps::Fp8Dq => request.define("ROW_MAX", 1),
                    Keeps::UnroundedDelta => request.define("RESIDUAL", 1),
                }
            }
            Self::Cast { d_head, d_v, input, rope, features } => {
                let request = define_dims(Request::new(sources::CAST, arch), d_head, d_v, false);
                let request = features.of_forward().define(request.define("INPUT", input).define("ROPE", rope));
                // The cast makes the list of tiles.
                if features.varlen { request.define("PROCESSORS", PROCESSORS) } else { request }
            }
            Self::Repack { d_v, features } => Self::Cast { d_head: d_v, d_v, input: 0, rope: 0, features }.request(),
            Self::Append { d_head, input, rope, center } => {
                let request = Request::new(sources::APPEND, arch).define("HEAD_DIM", d_head).define("INPUT", input);
                centered(request.define("ROPE", rope).define("BLOCK_N", Split::TILE.keys), center)
            }
            Self::Pages { d_head, v_rows, telemetry, rolled, features } => features
                .define(over_pages(sources::PAGED, d_head))
                .define("BLOCK_N", Split::TILE.keys)
                .define("CONSUMERS", Split::TILE.consumers)
                .define("KV_STAGES", Split::TILE.stages)
                .define("V_ROWS", u8::from(v_rows))
                .define("TELEMETRY", u8::from(telemetry))
                .define("MAINLOOP", Mainloop::Double.of_parts(rolled) as u8),
            Self::CheckTable => Self::Append { d_head: 128, input: 0, rope: 0, center: false }.request(),
        }
    }

    fn entry(self) -> &'static str {
        match self {
            Self::Forward { .. } | Self::Parts { .. } => "attention_forward",
            Self::Combine { .. } => "attention_combine",
            Self::Cast { .. } => "cast_qkv",
            Self::Repack { .. } => "repack_v",
            Self::Append { .. } => "append_kv",
            Self::Pages { .. } => "attention_paged",
            Self::CheckTable => "check_block_table",
        }
    }

    fn tells(self) -> Tells {
        match self {
            Self::Forward { .. } | Self::Parts { .. } | Self::Pages { .. } => Tells::Layout,
            _ => Tells::Nothing,
        }
    }
}

/// `[causal, telemetry, logits_e4m3, out_e4m3]`, causal as the kernel is compiled.
fn forward(dims: HeadDims, tile: Tile, pv: Pv, how: [bool; 4], features: Features, mainloop: Mainloop) -> Request {
    let request = define_dims(Request::new(sources::ATTENTION, Arch::SM90A), dims.qk, dims.v, dims.padded);
    let request = features
        .of_forward()
        .define(pv.define(request))
        .define("BLOCK_N", tile.keys)
        .define("CONSUMERS", tile.consumers)
        .define("KV_STAGES", tile.stages)
        .define("MAINLOOP", mainloop as u8);
    let flags = ["CAUSAL", "TELEMETRY", "LOGITS_E4M3", "OUT_E4M3"].into_iter().zip(how);
    flags.fold(request, |request, (name, on)| request.define(name, u8::from(on)))
}

/// Kernels over pages are those of split calls; P V is promoted after every tile.
fn over_pages(source: sources::Source, d_head: usize) -> Request {
    let request = Request::new(source, Arch::SM90A).define("HEAD_DIM", d_head).define("PAGED", 1);
    request.define("SPLIT_KV", 1).define("CAUSAL", 1).define("PV", 1)
}

fn centered(request: Request, center: bool) -> Request {
    Features { center, ..Features::default() }.define(request)
}

fn define_dims(request: Request, qk: usize, v: usize, padded: bool) -> Request {
    let mut request = request.define("HEAD_DIM", qk);
    if v != qk {
        request = request.define("V_DIM", v);
    }
    if padded { request.define("PADDED", 1) } else { request }
}

impl Variant {
    /// What a call on rows launches first.
    pub(super) fn cast(call: &DeviceCall, tensors: &Tensors) -> Self {
        let (d_head, d_v) = (call.shape.d_head, call.shape.d_v);
        let (_, Features { varlen, .. }) = call.features();
        let features = Features { window: !varlen && call.first_key() > 0, varlen, ..Features::default() };
        match params::input_number(tensors.q.element()) {
            Some(input) => {
                let features = Features { center: subtracts(call), ..features };
                Self::Cast { d_head, d_v, input, rope: rope_number(tensors.rope.as_ref()), features }
            }
            None => Self::Repack { d_v, features },
        }
    }

    /// Its attention.
    pub(super) fn attention(call: &DeviceCall, tensors: &Tensors, cut: &Cut) -> Self {
        let (dims, logits_e4m3) = (call.shape.head_dims(), tensors.descales.logit.is_some());
        let telemetry = tensors.stats.is_some();
        let (causal, features) = call.features();
        let tile = cut.tile;
        let out_e4m3 = tensors.out.element() == Element::E4m3;
        let pv = |tile| Pv::of(tensors.accumulator, [telemetry, logits_e4m3, out_e4m3], features.soft_cap, dims, tile);
        if let Some(split) = cut.split {
            let pv = pv(None);
            let mainloop = Mainloop::of(dims, tile, pv, [telemetry, logits_e4m3], features);
            let rolled = mainloop.of_parts(split.has_few_tiles(&call.longest())) == Mainloop::Rolled;
            return Self::Parts { dims, tile, pv, telemetry, logits_e4m3, rolled, features };
        }
        let pv = pv(Some(tile));
        let keeps = tensors.keeps().of_kernel();
        Self::Forward { dims, causal, tile, pv, telemetry, logits_e4m3, out_e4m3, keeps, features }
    }

    /// What joins the parts of a split call.
    pub(super) fn combine(call: &DeviceCall, tensors: &Tensors) -> Self {
        let (_, Features { varlen, sink, center, .. }) = call.features();
        let (dims, pages) = (call.shape.head_dims(), matches!(tensors.keys, Keys::Pages(_)));
        let features = Features { varlen, sink, center, ..Features::default() };
        Self::Combine { columns: dims.v, padded: dims.padded, pages, features }
    }

    /// What a call over pages launches first.
    pub(super) fn append(call: &DeviceCall, tensors: &Tensors, pages: &Pages) -> Self {
        let of_new = pages.new.map_or(Element::Bf16, |new| new.k.element());
        let input = params::input_number(tensors.q.element()).or(params::input_number(of_new)).unwrap_or(0);
        let center = pages.new.is_some() && subtracts(call);
        Self::Append { d_head: call.shape.d_head, input, rope: rope_number(tensors.rope.as_ref()), center }
    }

    /// Its attention.
    pub(super) fn pages(call: &DeviceCall, tensors: &Tensors, pages: &Pages, rolled: bool) -> Self {
        let (v_rows, telemetry) = (matches!(pages.v, ValuePages::Rows(_)), tensors.stats.is_some());
        let (_, features) = call.features();
        Self::Pages { d_head: call.shape.d_head, v_rows, telemetry, rolled, features }
    }
}

/// Whether the cast of a call subtracts anything.
fn subtracts(call: &DeviceCall) -> bool {
    call.key_center().or(call.value_center()).is_some()
}

/// The number that the casts know a rotation by: none, of halves, of neighbours (`interleaved`).
fn rope_number(rope: Option<&Rope>) -> u32 {
    rope.map_or(0, |rope| if rope.interleaved { 2 } else { 1 })
}

/// Every variant of the kernels that a call over pages can ask for.
pub fn paged_variants() -> Vec<Request> {
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
pub fn attention_variants() -> Vec<Request> {
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
pub fn spilling_variants() -> Vec<(Request, u32)> {
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
pub fn cast_variants() -> Vec<Request> {
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
