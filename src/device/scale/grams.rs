//! Gram matrices of every Q and K head: the cut of the work, the launches, and the reading for tests.

use super::layout::Tables;
use super::shares::{Shares, Unit};
use super::storage::Storage;
use super::tables::{Dtype, HeadGram, LayerInput, NO_ROW, Segment, StatTile, TensorMaps, has_sums};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

/// Which kernel makes the Grams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GramRoute {
    /// Hopper's tensor cores, one F16 product of weights rounded once: d_head 72 to 128, 16 bits, `[out, in]`, rotated, under
    /// an RMSNorm.
    Rounded,
    /// Hopper's tensor cores, two products of exact weights: 16 bits and d_head up to 128 otherwise.
    Split,
    /// Hopper's tensor cores, one F16 product: f32 weights or d_head above 128, `[out, in]`.
    Wide,
    /// f32 without tensor cores: everything else.
    Generic,
}

/// Dynamic shared memory of the tensor-core kernels (asserted there).
const ONE_HEAD_SHARED: u32 = 213_248;
const WIDE_SHARED: u32 = 227 * 1024;

/// Threads of the wide kernel: two multiplying warpgroups, the converting ones, and one that copies.
fn wide_threads(d_head: usize) -> u32 {
    let pairs = if d_head > 64 { d_head / 2 } else { d_head };
    let converting = match pairs.div_ceil(32) {
        1 => 1,
        3 => 3,
        _ => 2,
    };
    128 * (2 + converting + 1)
}

#[derive(Debug)]
pub(super) struct Grams {
    pub route: GramRoute,
    kernel: Kernel,
    launch: Launch,
    segments: Buffer<Segment>,
    shares: Buffer<u32>,
    pub partials: Buffer<f32>,
    pub heads: Buffer<HeadGram>,
    pub host_heads: Vec<HeadGram>,
    /// Of the tensor-core routes.
    pass: Option<Pass>,
    /// The statistics of Q and K come out of the pass too.
    pub has_stats: bool,
    /// Roundings that a sum of products is deep.
    pub depth: usize,
}

/// What the passes on tensor cores read and leave besides the Grams.
#[derive(Debug)]
struct Pass {
    gain_kernel: Kernel,
    gains: Buffer<u8>,
    scales: Buffer<[f32; 2]>,
    maps: TensorMaps,
    /// Of 128 input channels.
    gain_tiles: u32,
    /// Of the gains (`kernels/scale/gains.cu`).
    form: u32,
    channel_parts: Buffer<f32>,
    /// Sums the parts of statistics; `None` where no tile is shared.
    part_stats: Option<(Kernel, Buffer<StatTile>)>,
    stat_rows: u32,
}

impl Grams {
    /// For layers of one [`Storage`].
    pub fn new(device: &Device, layers: &[LayerInput], built: &Tables) -> Result<Self> {
        let (first, processors) = (&layers[0], device.processors());
        let (r, d) = (first.d_head as u32, first.d_model);
        let Storage { dtype, rows, columns } = Storage::of(&[first.q.weight, first.k.weight]);
        let (small, sums) = (r <= 128 && dtype != Dtype::F32, has_sums(layers));
        let route = match device.arch().compute == 90 {
            // Without rotation both sides' roundings meet in one norm, and one per side is more than the bounds allow.
            true if small && rows && !sums && r > 64 && first.rotary > 0 => GramRoute::Rounded,
            true if small && (rows || columns) => GramRoute::Split,
            true if !small && rows => GramRoute::Wide,
            _ => GramRoute::Generic,
        };
        let split = route == GramRoute::Split;
        let has_stats = route != GramRoute::Generic && (!sums || split && dtype == Dtype::Bf16);
        let sums = sums && has_stats;
        // Blocks that share a head.
        let sharing = if route == GramRoute::Wide && r > 128 { 2 } else { 1 };
        // With inputs of a tile, and roundings of one accumulator before it is flushed and of a flush every 256 inputs.
        let (source, name, threads, shared, tile, (chain, flushes)) = match route {
            GramRoute::Rounded => (sources::GRAMS_ROUNDED, "scale_grams_rounded", 640, ONE_HEAD_SHARED, 128, (128, 2)),
            GramRoute::Split => (sources::GRAMS_SPLIT, "scale_grams_split", 384, ONE_HEAD_SHARED, 128, (512, 1)),
            // 128 bytes of a row for each block.
            GramRoute::Wide => {
                let (threads, tile) = (wide_threads(first.d_head), sharing * 128 / dtype.size());
                (sources::GRAMS_WIDE, "scale_grams_wide", threads, WIDE_SHARED, tile, (256, 2))
            }
            GramRoute::Generic => (sources::GRAMS_GENERIC, "scale_grams_generic", 256, 0, 64, (256, 1)),
        };
        let per_unit = if route != GramRoute::Generic && r <= 64 { 2 } else { 1 };
        let of_q_and_k = built.projections.iter().enumerate().filter(|(_, p)| p.first_head != NO_ROW);
        let units: Vec<Unit> = of_q_and_k
            .flat_map(|(index, p)| {
                (0..p.rows / r).step_by(per_unit as usize).map(move |head| Unit {
                    projection: index as u32,
                    first_row: head * r,
                    stat_row: p.stat_row + head * r,
                    heads: per_unit.min(p.rows / r - head),
                })
            })
            .collect();
        let tiles = d.div_ceil(tile) as u32;
        let shares = |blocks, stat_runs, whole| Shares::new(&units, tiles, blocks, r, stat_runs, whole);
        let cut = match route {
            // A channel needs nothing of another for its statistics.
            GramRoute::Rounded => shares(processors, 1, true),
            GramRoute::Split => shares(processors, 1, false),
            // Each block of a pair leaves its own, room for 256 channels.
            GramRoute::Wide => shares(processors / sharing, if sharing == 2 { 4 } else { 1 }, false),
            // Ranges of 1024 input channels, whatever the device: a segment is a block.
            GramRoute::Generic => shares(units.len() * d.div_ceil(1024), 0, false),
        };
        let side = r.div_ceil(64) as usize;
        let blocks = side * (side + 1) / 2;
        let defines = match route {
            GramRoute::Generic => vec![],
            _ => vec![
                ("D_HEAD", r.to_string()),
                ("WEIGHTS", (dtype as u32).to_string()),
                ("ALONG_CHANNELS", u32::from(!rows).to_string()),
                ("SUMS", u32::from(sums).to_string()),
            ],
        };
        let kernel = device.module(source, &defines)?.overlapping_kernel(name)?;
        kernel.allow_shared(shared)?;
        let grid = match route {
            GramRoute::Generic => (cut.segments.len() as u32, blocks as u32, 1),
            _ => ((processors / sharing * sharing) as u32, 1, 1),
        };
        let pass = match route {
            GramRoute::Generic => None,
            _ => {
                // Rows of a part of statistics.
                let stat_rows = 128 * sharing as u32;
                let tile = |(unit, &(first, parts)): (&Unit, &(u32, u32))| StatTile {
                    projection: unit.projection,
                    first_row: unit.first_row,
                    rows: unit.heads * r,
                    first,
                    parts: parts * 128 / stat_rows,
                    norms: has_stats.into(),
                    sums: sums.into(),
                    from_gram: split.into(),
                };
                let tiles: Vec<StatTile> = units.iter().zip(&cut.stats).filter(|(_, s)| s.1 > 0).map(tile).collect();
                // Channels of a box; two boxes a tile where one head fills it.
                let boxes = match (route, rows) {
                    (GramRoute::Wide, _) => vec![r],
                    (_, true) => vec![r.min(64), if r > 64 { r - 64 } else { r }],
                    (_, false) => vec![64; 2],
                };
                let projections = built.projections.len();
                let gain_bytes = d.next_multiple_of(128) * if sums { 20 } else { 4 };
                let part_stats = match tiles.is_empty() {
                    true => None,
                    false => {
                        let kernel = device.module(sources::PART_STATS, &[])?.overlapping_kernel("scale_part_stats")?;
                        Some((kernel, device.upload(&tiles)?))
                    }
                };
                Some(Pass {
                    gain_kernel: device.module(sources::GAINS, &[])?.overlapping_kernel("scale_gains")?,
                    gains: device.zeros(gain_bytes * projections)?,
                    scales: device.zeros(projections)?,
                    maps: TensorMaps::new(device, &built.projections, false, boxes, false)?,
                    gain_tiles: d.div_ceil(128) as u32,
                    form: u32::from(split) + u32::from(sums),
                    channel_parts: device.zeros(cut.stat_parts as usize * 128 * 8)?,
                    part_stats,
                    stat_rows,
                })
            }
        };
        Ok(Self {
            route,
            kernel,
            launch: Launch { grid, block: threads, shared },
            segments: device.upload(&cut.segments)?,
            shares: device.upload(&cut.starts)?,
            partials: device.zeros(cut.slots as usize * blocks * 4096)?,
            heads: device.upload(&cut.heads)?,
            host_heads: cut.heads,
            pass,
            has_stats,
            depth: chain + flushes * d.div_ceil(256),
        })
    }

    /// Clears `status`, or has the launches of [`Grams::launch`] do it, and returns what they are to be told.
    pub fn clear(&self, status: &Buffer<u32>, stream: &Stream) -> Result<DevicePtr> {
        if self.pass.is_some() {
            return Ok(status.ptr());
        }
        status.clear(stream)?;
        Ok(DevicePtr::NULL)
    }

    /// Puts the Grams on `stream`, and with them the statistics of Q and K where this pass has them; [`Grams::part_stats`] ends
    /// what of these is left in parts. `status`: what [`Grams::clear`] returned.
    pub fn launch(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr, status: DevicePtr) -> Result<()> {
        let projections = Arg::Ptr(projections);
        let mut args = vec![Arg::Ptr(self.segments.ptr()), projections, Arg::Ptr(self.partials.ptr())];
        if let Some(pass) = &self.pass {
            let [gains, scales] = [pass.gains.ptr(), pass.scales.ptr()].map(Arg::Ptr);
            let tiles = Arg::U32(pass.gain_tiles);
            let grid = (pass.scales.len() as u32, pass.gain_tiles.div_ceil(8), 1);
            let of_gains = [projections, gains, scales, tiles, Arg::U32(pass.form), Arg::Ptr(status)];
            // SAFETY: 1. the arguments are the kernel's; 2. weights, gains and shifts are the ones that the engine's maker
            // promised, the status is the engine's; 3. a block writes the gains of its own projection, one of them the status.
            unsafe { pass.gain_kernel.launch(stream, Launch { grid, block: 256, shared: 0 }, &of_gains)? };
            let tables = [self.shares.ptr(), pass.maps.ptr()].map(Arg::Ptr);
            let left = [pass.channel_parts.ptr(), stats].map(Arg::Ptr);
            args.extend(tables.into_iter().chain([gains, scales, tiles]).chain(left));
        }
        // SAFETY: 1. the arguments are the kernel's of this route; 2. the tables are the engine's and reach the promised
        // weights; 3. every segment writes its own slots, and statistics that no other writes.
        unsafe { self.kernel.launch_early(stream, self.launch, &args, self.pass.is_some()) }
    }

    /// The tensor maps that it reads weights by, if any.
    pub fn maps(&self) -> Option<&TensorMaps> {
        self.pass.as_ref().map(|pass| &pass.maps)
    }

    /// One side of the products was rounded, not both.
    pub fn one_sided(&self) -> bool {
        self.route == GramRoute::Split
    }

    /// Sums what the segments saw of each channel; after the norms, where those come from another kernel.
    pub fn part_stats(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<()> {
        let Some(Pass { part_stats: Some((kernel, tiles)), channel_parts, stat_rows, .. }) = &self.pass else {
            return Ok(());
        };
        let args = [tiles.ptr(), projections, channel_parts.ptr(), stats].map(Arg::Ptr);
        // SAFETY: 1. the arguments are the kernel's; 2. the tables are the engine's, the biases those that its maker's
        // caller promised; 3. every tile has its own rows. These routes are Hopper's.
        unsafe { kernel.launch_early(stream, Launch::linear(tiles.len(), *stat_rows, 0), &args, true) }
    }

    /// One head's Gram, row-major.
    pub fn read(&self, head: usize, r: usize) -> Result<Vec<f64>> {
        let side = r.div_ceil(64);
        let all = self.partials.read()?;
        let place = self.host_heads[head];
        let mut gram = vec![0.0; r * r];
        for part in 0..place.count {
            let slot = (place.first + part * place.stride) as usize;
            let upper = (0..side).flat_map(|i| (i..side).map(move |j| (i, j)));
            for ((i, j), values) in upper.zip(all.chunks(4096).skip(slot * side * (side + 1) / 2)) {
                for (row, column) in
                    (i * 64..r.min(i * 64 + 64)).flat_map(|a| (a.max(j * 64)..r.min(j * 64 + 64)).map(move |b| (a, b)))
                {
                    gram[row * r + column] += f64::from(values[row % 64 * 64 + column % 64]);
                }
            }
        }
        for row in 0..r {
            for column in 0..row {
                gram[row * r + column] = gram[column * r + row];
            }
        }
        Ok(gram)
    }
}
