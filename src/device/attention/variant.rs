//! Which kernel a call gets: its accumulator, tile, masks and types as compile-time variants.
//! Tiles and splits: [`super::tile`].

use super::call::{Keys, Rope, Tensors};
use super::cut::Cut;
use super::kernels::{self, Tells};
use super::pages::{Pages, ValuePages};
use super::params;
use super::sizes::HeadDims;
use super::terms::{DeviceCall, Features};
use super::tile::{PROCESSORS, Split, Tile};
use crate::attention::{Keeps, PvAccumulator};
use crate::cuda::{Arch, Element, Request, sources};

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

#[cfg(test)]
pub(super) mod tests;
