//! Which kernel a call gets: its accumulator, tile, masks and types as compile-time variants, and the list of them all.
//! Tiles and splits: [`super::tile`].

use super::call::{Rope, Tensors};
use super::kernels::{self, Variant as _};
use super::params;
use super::tile::{Split, Tile};
use crate::attention::{AttentionShape, PvAccumulator};
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

    /// Registers do not hold a second set of sums beside logits in E4M3, nor beside telemetry where three consumers share them.
    /// Parts of a split call (`tile` is `None`) are short, and always promoted after every tile.
    fn of(accumulator: PvAccumulator, telemetry: bool, logits_e4m3: bool, tile: Option<Tile>) -> Self {
        let PvAccumulator::Fp8 { promote_every } = accumulator else { return Self::F16 };
        let flush =
            logits_e4m3 || tile.is_some_and(|tile| promote_every >= Self::SELDOM || (telemetry && tile.consumers > 2));
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

/// Compiled form of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Variant {
    Forward {
        d_head: usize,
        causal: bool,
        tile: Tile,
        pv: Pv,
        telemetry: bool,
        logits_e4m3: bool,
        out_e4m3: bool,
    },
    /// Parts of a split call, masked or not. `rolled`: of few tiles.
    Parts {
        d_head: usize,
        pv: Pv,
        telemetry: bool,
        logits_e4m3: bool,
        rolled: bool,
    },
    Combine {
        d_head: usize,
    },
    Cast {
        d_head: usize,
        input: u32,
        rope: u32,
    },
    Repack {
        d_head: usize,
    },
}

impl kernels::Variant for Variant {
    fn request(self) -> Request {
        let arch = Arch::SM90A;
        match self {
            Self::Parts { d_head, pv, telemetry, logits_e4m3, rolled } => {
                let tile = Split::TILE;
                let forward = Self::Forward { d_head, causal: true, tile, pv, telemetry, logits_e4m3, out_e4m3: false };
                forward.request().define("SPLIT_KV", 1).define("ROLLED", u8::from(rolled))
            }
            Self::Combine { d_head } => Request::new(sources::COMBINE, arch).define("HEAD_DIM", d_head),
            Self::Forward { d_head, causal, tile, pv, telemetry, logits_e4m3, out_e4m3 } => pv
                .define(Request::new(sources::ATTENTION, arch))
                .define("HEAD_DIM", d_head)
                .define("BLOCK_N", tile.keys)
                .define("CONSUMERS", tile.consumers)
                .define("KV_STAGES", tile.stages)
                .define("CAUSAL", u8::from(causal))
                .define("TELEMETRY", u8::from(telemetry))
                .define("LOGITS_E4M3", u8::from(logits_e4m3))
                .define("OUT_E4M3", u8::from(out_e4m3)),
            Self::Cast { d_head, input, rope } => {
                Request::new(sources::CAST, arch).define("HEAD_DIM", d_head).define("INPUT", input).define("ROPE", rope)
            }
            Self::Repack { d_head } => Self::Cast { d_head, input: 0, rope: 0 }.request(),
        }
    }

    fn entry(self) -> &'static str {
        match self {
            Self::Forward { .. } | Self::Parts { .. } => "attention_forward",
            Self::Combine { .. } => "attention_combine",
            Self::Cast { .. } => "cast_qkv",
            Self::Repack { .. } => "repack_v",
        }
    }

    fn has_shared(self) -> bool {
        matches!(self, Self::Forward { .. } | Self::Parts { .. })
    }
}

impl Variant {
    /// What a checked call launches first.
    pub(super) fn first(tensors: &Tensors, sizes: &AttentionShape) -> Self {
        let d_head = sizes.d_head;
        match params::input_number(tensors.q.element()) {
            Some(input) => Self::Cast { d_head, input, rope: rope_number(tensors.rope.as_ref()) },
            None => Self::Repack { d_head },
        }
    }

    /// What a checked call launches then.
    pub(super) fn second(tensors: &Tensors, sizes: &AttentionShape, causal: bool, split: Option<Split>) -> Self {
        let (d_head, logits_e4m3) = (sizes.d_head, tensors.descales.logit.is_some());
        let telemetry = tensors.stats.is_some();
        let pv = |tile| Pv::of(tensors.accumulator, telemetry, logits_e4m3, tile);
        if let Some(split) = split {
            let pv = pv(None);
            let rolled = !logits_e4m3 && split.has_few_tiles(sizes);
            return Self::Parts { d_head, pv, telemetry, logits_e4m3, rolled };
        }
        let tile = Tile::of(sizes, logits_e4m3);
        let out_e4m3 = tensors.out.element() == Element::E4m3;
        let pv = pv(Some(tile));
        Self::Forward { d_head, causal, tile, pv, telemetry, logits_e4m3, out_e4m3 }
    }
}

pub(super) fn rope_number(rope: Option<&Rope>) -> u32 {
    rope.map_or(0, |r| if r.interleaved { 2 } else { 1 })
}

/// Every variant of the attention kernels that a call of [`Precision::INFERENCE`](crate::attention::Precision::INFERENCE),
/// `TRAINING` or `PROMOTE_2048` can ask for.
pub fn attention_variants() -> Vec<Request> {
    const TELEMETRY_LOGITS: [(bool, bool); 3] = [(false, false), (true, false), (true, true)];
    let sums = [256, 2048].map(|promote_every| PvAccumulator::Fp8 { promote_every });
    let mut all = Vec::new();
    for d_head in [64, 128] {
        all.push(Variant::Combine { d_head });
        for accumulator in sums.into_iter().chain([PvAccumulator::F16]) {
            let f16 = accumulator == PvAccumulator::F16;
            for (telemetry, logits_e4m3) in TELEMETRY_LOGITS {
                // The schedule of E4M3 logits has no rolled form, and P V none in F16.
                if f16 && logits_e4m3 {
                    continue;
                }
                let pv = Pv::of(accumulator, telemetry, logits_e4m3, None);
                let rolled: &[bool] = if logits_e4m3 { &[false] } else { &[false, true] };
                all.extend(rolled.iter().map(|&rolled| Variant::Parts { d_head, pv, telemetry, logits_e4m3, rolled }));
                for (causal, out_e4m3) in [(false, false), (true, false), (false, true), (true, true)] {
                    if f16 && out_e4m3 {
                        continue;
                    }
                    all.extend(Tile::all(d_head, logits_e4m3).into_iter().map(|tile| Variant::Forward {
                        d_head,
                        causal,
                        tile,
                        pv: Pv::of(accumulator, telemetry, logits_e4m3, Some(tile)),
                        telemetry,
                        logits_e4m3,
                        out_e4m3,
                    }));
                }
            }
        }
    }
    let mut known = HashSet::new();
    all.retain(|variant| known.insert(*variant));
    all.into_iter().map(|variant| variant.request()).collect()
}

/// Every variant of the cast that a call can ask for.
pub fn cast_variants() -> Vec<Request> {
    let mut all = Vec::new();
    for d_head in [64, 128] {
        for input in 0..3 {
            all.extend((0..3).map(|rope| Variant::Cast { d_head, input, rope }.request()));
        }
    }
    all
}
