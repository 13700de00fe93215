//! Gram matrices of every Q and K head: the cut of the work, the launch, and the reading for tests.

use super::group::{NO_ROW, Tables};
use super::tables::{self, Cut, DeviceMatrix, Dtype, HeadGram, LayerInput, Segment, StatTile, Unit};
use super::values::Values;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::cuda::{sources, tensor_map};
use crate::error::Result;

/// Which kernel makes the Grams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GramRoute {
    /// Tensor cores of Hopper: 16-bit weights, d_head up to 128, 16-byte rows.
    Wgmma,
    /// Tensor cores of Hopper: f32 weights or d_head above 128, stored `[out, in]` in 16-byte rows.
    Wide,
    /// f32 without tensor cores: everything else.
    Plain,
}

/// Dynamic shared memory of the tensor-core kernels (asserted there).
const WGMMA_SHARED: u32 = 213_248;
const WIDE_SHARED: u32 = 227 * 1024;

impl GramRoute {
    /// Blocks that share a head.
    fn blocks_a_head(self, d_head: usize) -> usize {
        if self == Self::Wide && d_head > 128 { 2 } else { 1 }
    }

    /// Input channels of a tile.
    fn tile(self, d_head: usize, dtype: Dtype) -> usize {
        match self {
            Self::Wgmma => 128,
            // 128 bytes of a row for each block.
            Self::Wide => self.blocks_a_head(d_head) * 128 / dtype.size(),
            Self::Plain => 64,
        }
    }
}

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
    maps: Buffer<u64>,
    gains: Buffer<u8>,
    scales: Buffer<[f32; 2]>,
    gain_kernel: Option<Kernel>,
    tiles: u32,
    /// Of the gains (`kernels/scale_gains.cu`).
    form: u32,
    /// Roundings of one accumulator before it is flushed.
    chain: usize,
    /// Such sums that meet in a second one, for every 256 input channels.
    flushes: usize,
    pub partials: Buffer<f32>,
    pub heads: Buffer<HeadGram>,
    pub host_heads: Vec<HeadGram>,
    channel_parts: Buffer<f32>,
    stats: Option<(Kernel, Buffer<StatTile>)>,
    stat_rows: u32,
    /// The norms of every channel come out of the same pass, but for those of V where they are apart.
    pub has_norms: bool,
    /// Norms of V channels are left to `scale_values`.
    pub values_apart: bool,
}

/// How a layer's weights lie, as far as a kernel depends on it: the same in every layer of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Storage {
    dtype: Dtype,
    /// Q and K are `[out, in]`, of one type, in rows of 16 bytes.
    rows: bool,
    /// The same of `[in, out]`.
    columns: bool,
    /// V, where there is one, lies like them: one read for everything.
    values: bool,
}

impl Storage {
    /// Of one layer.
    pub fn of(layer: &LayerInput) -> Self {
        let dtype = layer.q.weight.dtype;
        let step = (16 / dtype.size()) as i64;
        let fits = |m: &DeviceMatrix| m.dtype == dtype && m.ptr.0.is_multiple_of(16);
        let along_model = |m: &DeviceMatrix| fits(m) && m.col_stride == 1 && m.row_stride % step == 0;
        let along_channels = |m: &DeviceMatrix| fits(m) && m.row_stride == 1 && m.col_stride % step == 0;
        let (q, k) = (&layer.q.weight, &layer.k.weight);
        let rows = along_model(q) && along_model(k);
        let columns = along_channels(q) && along_channels(k);
        if !(rows || columns) {
            // Read value by value, whatever the type.
            return Self { dtype: Dtype::F32, rows, columns, values: false };
        }
        let like = |m: &DeviceMatrix| if rows { along_model(m) } else { along_channels(m) };
        Self { dtype, rows, columns, values: layer.v.is_none_or(|v| like(&v.weight)) }
    }
}

/// How the Grams of a model are made, before anything is allocated.
pub(super) struct Layout {
    route: GramRoute,
    rows: bool,
    /// g^2 w in two pieces rather than one rounded g w on both sides: slower by a tenth.
    pieces: bool,
    pub has_norms: bool,
    values_apart: bool,
    /// And, for a mean or a shift, the sums that these need.
    sums: bool,
    units: Vec<Unit>,
    pub cut: Cut,
    blocks: usize,
}

impl Layout {
    /// For layers of one [`Storage`].
    pub fn new(device: &Device, layers: &[LayerInput], built: &Tables) -> Self {
        let first = &layers[0];
        let Storage { dtype, rows, columns, values } = Storage::of(first);
        let small = first.d_head <= 128 && dtype != Dtype::F32;
        let route = match device.arch().compute == 90 {
            true if small && (rows || columns) => GramRoute::Wgmma,
            true if !small && rows => GramRoute::Wide,
            _ => GramRoute::Plain,
        };
        let (tensor_cores, wgmma) = (route != GramRoute::Plain, route == GramRoute::Wgmma);
        let sums = layers.iter().any(|l| l.mean_removed || l.shift != DevicePtr::NULL);
        let has_norms = tensor_cores && values && (!sums || wgmma && dtype == Dtype::Bf16);
        // Without rotation both sides' losses meet in one norm, and one rounding a side is more than the bounds allow.
        let pieces = wgmma && !(rows && has_norms && !sums && first.d_head > 64 && first.rotary > 0);
        let sums = sums && has_norms;
        // A read beside the certificates costs less than a share of this pass.
        let values_apart = wgmma && rows && has_norms && !sums && first.v.is_some();
        let r = first.d_head as u32;
        let per_tile = if tensor_cores && r <= 64 { 2 } else { 1 };
        // Elsewhere a tile takes as long as its bytes.
        let waits_for_products = route == GramRoute::Wide && dtype != Dtype::F32;
        let mut units = Vec::new();
        for (index, p) in built.projections.iter().enumerate() {
            let gram = p.first_head != NO_ROW;
            if !gram && (!has_norms || values_apart) {
                continue;
            }
            for head in (0..p.rows / r).step_by(per_tile as usize) {
                units.push(Unit {
                    projection: index as u32,
                    first_row: head * r,
                    stat_row: p.stat_row + head * r,
                    heads: per_tile.min(p.rows / r - head),
                    tiles: first.d_model.div_ceil(route.tile(first.d_head, dtype)) as u32,
                    cost: if gram && waits_for_products { 2 } else { 1 },
                    gram,
                });
            }
        }
        let side = first.d_head.div_ceil(64);
        let blocks = side * (side + 1) / 2;
        let sharing = route.blocks_a_head(first.d_head);
        let cut = match route {
            // Without mean and shift a channel needs nothing of another for its statistics.
            GramRoute::Wgmma => tables::cut(&units, device.processors(), r, 1, !pieces),
            // Each block of a pair leaves its own, room for 256 channels.
            GramRoute::Wide => {
                tables::cut(&units, device.processors() / sharing, r, if sharing == 2 { 4 } else { 1 }, false)
            }
            // Ranges of 1024 input channels, whatever the device: a segment is a block.
            GramRoute::Plain => tables::cut(&units, units.len() * first.d_model.div_ceil(1024), r, 0, false),
        };
        Self { route, rows, pieces, has_norms, values_apart, sums, units, cut, blocks }
    }

    /// Units whose statistics are left in parts, and where.
    fn in_parts(&self) -> impl Iterator<Item = (&Unit, &(u32, u32))> {
        self.units.iter().zip(&self.cut.stats).filter(|(_, (_, parts))| *parts > 0)
    }

    /// Bytes of device memory.
    pub fn bytes(&self, projections: usize, d_model: usize) -> usize {
        let (cut, tensor_cores) = (&self.cut, usize::from(self.route != GramRoute::Plain));
        let maps = match self.route {
            GramRoute::Wgmma => 256 * projections,
            GramRoute::Wide => 128 * projections,
            GramRoute::Plain => 8,
        };
        4 * (cut.slots as usize * self.blocks * 4096 + cut.shares.len())
            + 32 * (cut.segments.len() + tensor_cores * (self.in_parts().count() + 128 * cut.stat_parts as usize))
            + tensor_cores * (8 + self.gain_bytes(d_model)) * projections
            + maps
            + 16 * cut.heads.len()
    }

    /// Prepared gains of one projection (`kernels/scale_gains.cu`).
    fn gain_bytes(&self, d_model: usize) -> usize {
        d_model.next_multiple_of(128) * if self.sums { 20 } else { 4 }
    }
}

impl Grams {
    pub fn new(device: &Device, layers: &[LayerInput], built: &Tables, layout: Layout) -> Result<Self> {
        let (r, d) = (layers[0].d_head as u32, layers[0].d_model);
        let gain_bytes = layout.gain_bytes(d);
        // Rows of a part: two runs where heads are that wide.
        let stat_rows = 128 * layout.route.blocks_a_head(r as usize) as u32;
        let tile = |(unit, &(first, parts)): (&Unit, &(u32, u32))| StatTile {
            projection: unit.projection,
            first_row: unit.first_row,
            rows: unit.heads * r,
            first,
            parts: parts * 128 / stat_rows,
            norms: layout.has_norms.into(),
            sums: layout.sums.into(),
            from_gram: layout.pieces.into(),
        };
        let tiles: Vec<StatTile> = layout.in_parts().map(tile).collect();
        let Layout { route, rows, pieces, has_norms, values_apart, sums, cut, blocks, .. } = layout;
        let tensor_cores = route != GramRoute::Plain;
        let projections = if tensor_cores { built.projections.len() } else { 0 };
        let dtype = layers[0].q.weight.dtype;
        let (launch, kernel, maps) = match route {
            GramRoute::Wgmma => {
                let mut defines = vec![("D_HEAD", r.to_string()), ("F16", u32::from(dtype == Dtype::F16).to_string())];
                let kernel = if pieces {
                    defines.push(("ALONG_CHANNELS", u32::from(!rows).to_string()));
                    defines.push(("SUMS", u32::from(sums).to_string()));
                    device.module(sources::GRAMS_PIECES, &defines)?.overlapping_kernel("scale_grams_pieces")?
                } else {
                    device.module(sources::GRAMS_WGMMA, &defines)?.overlapping_kernel("scale_grams_wgmma")?
                };
                kernel.allow_shared(WGMMA_SHARED)?;
                let mut maps = Vec::with_capacity(32 * built.projections.len());
                for p in &built.projections {
                    // Channels in the first and in the second box of a tile.
                    for box_rows in [r.min(64), if r > 64 { r - 64 } else { r }] {
                        maps.extend(if p.first_head == NO_ROW && !has_norms {
                            [0; 16]
                        } else if p.first_head == NO_ROW && values_apart {
                            let (inner, outer, stride) = (p.d_model.into(), p.rows.into(), 2 * p.row_stride as u64);
                            tensor_map::tensor_map_plain(p.weight, inner, outer, stride, Values::TILE)?
                        } else if rows {
                            let (inner, outer, stride) = (p.d_model.into(), p.rows.into(), p.row_stride as u64);
                            tensor_map::tensor_map_16bit(p.weight, inner, outer, stride, box_rows)?
                        } else {
                            let (inner, outer, stride) = (p.rows.into(), p.d_model.into(), p.col_stride as u64);
                            tensor_map::tensor_map_16bit(p.weight, inner, outer, stride, 64)?
                        });
                    }
                }
                let threads = if pieces { 3 * 128 } else { 5 * 128 };
                (Launch::linear(device.processors(), threads, WGMMA_SHARED), kernel, maps)
            }
            GramRoute::Wide => {
                let defines = [
                    ("D_HEAD", r.to_string()),
                    ("WEIGHTS", (dtype as u32).to_string()),
                    ("NORMS", u32::from(has_norms).to_string()),
                ];
                let kernel = device.module(sources::GRAMS_WIDE, &defines)?.overlapping_kernel("scale_grams_wide")?;
                kernel.allow_shared(WIDE_SHARED)?;
                let mut maps = Vec::with_capacity(16 * built.projections.len());
                for p in &built.projections {
                    maps.extend(if p.first_head == NO_ROW && !has_norms {
                        [0; 16]
                    } else {
                        let (inner, outer, stride) = (p.d_model.into(), p.rows.into(), p.row_stride as u64);
                        tensor_map::tensor_map_rows(p.weight, dtype == Dtype::F32, inner, outer, stride, r)?
                    });
                }
                let sharing = route.blocks_a_head(r as usize);
                let blocks = device.processors() / sharing * sharing;
                (Launch::linear(blocks, wide_threads(r as usize), WIDE_SHARED), kernel, maps)
            }
            GramRoute::Plain => {
                let kernel = device.module(sources::GRAMS, &[])?.kernel("scale_grams")?;
                let grid = (cut.segments.len() as u32, blocks as u32, 1);
                (Launch { grid, block: 256, shared: 0 }, kernel, vec![0])
            }
        };
        let stats = if tiles.is_empty() {
            None
        } else {
            let kernel = device.module(sources::PLAN, &[])?.overlapping_kernel("scale_part_stats")?;
            Some((kernel, device.upload(&tiles)?))
        };
        Ok(Self {
            route,
            kernel,
            launch,
            segments: device.upload(&cut.segments)?,
            shares: device.upload(&cut.shares)?,
            maps: device.upload(&maps)?,
            gains: device.zeros(gain_bytes * projections)?,
            scales: device.zeros(projections)?,
            gain_kernel: if tensor_cores {
                Some(device.module(sources::GAINS, &[])?.overlapping_kernel("scale_gains")?)
            } else {
                None
            },
            tiles: d.div_ceil(128) as u32,
            form: u32::from(pieces) + u32::from(sums),
            chain: match route {
                GramRoute::Wgmma if pieces => 512,
                GramRoute::Wgmma => 128,
                _ => 256,
            },
            flushes: if route == GramRoute::Wide || route == GramRoute::Wgmma && !pieces { 2 } else { 1 },
            partials: device.zeros(cut.slots as usize * blocks * 4096)?,
            heads: device.upload(&cut.heads)?,
            host_heads: cut.heads,
            channel_parts: device.zeros(if tensor_cores { cut.stat_parts as usize * 128 * 8 } else { 0 })?,
            stats,
            stat_rows,
            has_norms,
            values_apart,
        })
    }

    /// Clears `status`, or has the launches of [`Grams::launch`] do it, and returns what they are to be told.
    pub fn clear(&self, status: &Buffer<u32>, stream: &Stream) -> Result<DevicePtr> {
        if self.gain_kernel.is_some() {
            return Ok(status.ptr());
        }
        status.clear(stream)?;
        Ok(DevicePtr::NULL)
    }

    /// Puts the Grams on `stream`, and with them the norms of all channels where this pass has them; [`Grams::part_stats`] ends
    /// what of these is left in parts. `status`: what [`Grams::clear`] returned.
    pub fn launch(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr, status: DevicePtr) -> Result<()> {
        let (gains, scales) = (Arg::Ptr(self.gains.ptr()), Arg::Ptr(self.scales.ptr()));
        if let Some(kernel) = &self.gain_kernel {
            let (tiles, form, apart) = (self.tiles, self.form, self.values_apart);
            let args = [
                Arg::Ptr(projections),
                gains,
                scales,
                Arg::U32(tiles),
                Arg::U32(form),
                Arg::U32(apart.into()),
                Arg::Ptr(status),
            ];
            // SAFETY: 1. the arguments are the kernel's; 2. weights, gains and shifts are the ones that the engine's maker
            // promised, the status is the engine's; 3. a block writes the gains of its own projection, one of them the status.
            let grid = (self.scales.len() as u32, self.tiles.div_ceil(8), 1);
            unsafe { kernel.launch(stream, Launch { grid, block: 256, shared: 0 }, &args)? };
        }
        let (segments, projections) = (Arg::Ptr(self.segments.ptr()), Arg::Ptr(projections));
        let partials = Arg::Ptr(self.partials.ptr());
        let mut args = match self.route {
            GramRoute::Wgmma | GramRoute::Wide => vec![
                segments,
                Arg::Ptr(self.shares.ptr()),
                projections,
                Arg::Ptr(self.maps.ptr()),
                gains,
                scales,
                Arg::U32(self.tiles),
                partials,
                Arg::Ptr(self.channel_parts.ptr()),
            ],
            GramRoute::Plain => vec![segments, projections, partials],
        };
        if self.route == GramRoute::Wgmma && self.form == 0 {
            args.push(Arg::Ptr(stats));
        }
        // SAFETY: 1. the arguments are the kernel's of this route; 2. the tables are the engine's and reach the promised
        // weights; 3. every segment writes its own slots, and statistics that no other writes.
        unsafe { self.kernel.launch_early(stream, self.launch, &args, self.route == GramRoute::Wgmma) }
    }

    /// The copy engine's tables and the prepared gains, and how many runs of 128 a projection has of these.
    pub fn prepared(&self) -> (DevicePtr, DevicePtr, u32) {
        (self.maps.ptr(), self.gains.ptr(), self.tiles)
    }

    /// One side of the products was rounded, not both.
    pub fn one_sided(&self) -> bool {
        self.form > 0
    }

    /// Roundings that a sum over `d_model` products is deep.
    pub fn depth(&self, d_model: usize) -> usize {
        self.chain + self.flushes * d_model.div_ceil(256)
    }

    /// Sums what the segments saw of each channel; after the norms, where those come from another kernel.
    pub fn part_stats(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<()> {
        let Some((kernel, tiles)) = &self.stats else { return Ok(()) };
        let parts = Arg::Ptr(self.channel_parts.ptr());
        let args = [Arg::Ptr(tiles.ptr()), Arg::Ptr(projections), parts, Arg::Ptr(stats)];
        // SAFETY: 1. the arguments are the kernel's; 2. the tables are the engine's, the biases those that its maker's
        // caller promised; 3. every tile has its own rows. These routes are Hopper's.
        unsafe { kernel.launch_early(stream, Launch::linear(tiles.len(), self.stat_rows, 0), &args, true) }
    }

    pub fn bytes(&self) -> usize {
        4 * (self.partials.len() + self.shares.len() + self.channel_parts.len())
            + 32 * (self.segments.len() + self.stats.as_ref().map_or(0, |s| s.1.len()))
            + 8 * (self.maps.len() + self.scales.len())
            + self.gains.len()
            + 16 * self.heads.len()
    }

    /// One head's Gram, row-major.
    pub fn read(&self, head: usize, r: usize) -> Result<Vec<f64>> {
        let side = r.div_ceil(64);
        let blocks = side * (side + 1) / 2;
        let all = self.partials.read()?;
        let place = self.host_heads[head];
        let mut gram = vec![0.0; r * r];
        for part in 0..place.count {
            let slot = (place.first + part * place.stride) as usize;
            let mut block = 0;
            for i in 0..side {
                for j in i..side {
                    let values = &all[(slot * blocks + block) * 4096..][..4096];
                    block += 1;
                    for a in 0..64.min(r - i * 64) {
                        for b in 0..64.min(r - j * 64) {
                            let (row, column) = (i * 64 + a, j * 64 + b);
                            if row <= column {
                                gram[row * r + column] += f64::from(values[a * 64 + b]);
                            }
                        }
                    }
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
