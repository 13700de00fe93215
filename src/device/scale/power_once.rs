//! The summed power step with each weight read once.
//!
//! A step is `W^T (W x)` with W_Q, then with W_K. `u = W x` needs every channel of an input channel, more than one
//! multiprocessor's memory holds, so a cluster of blocks shares a tile: some inputs, all channels, each block its share. The
//! normalisation of `u` is a factor, which comes afterwards.

use super::group::NO_ROW;
use super::tables::{LayerInput, Projection};
use crate::cuda::{Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::cuda::{sources, tensor_map};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// How one projection is cut: a tile is `tile` inputs of every channel, `share` of them in each of `peers` blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    peers: u32,
    tile: u32,
    share: u32,
    /// Channels that the copy engine brings at once.
    box_channels: u32,
}

impl Cut {
    fn new(channels: usize, size: usize, along: bool, peers: u32, tile: u32) -> Option<Self> {
        let widest = if along { 512 / size as u32 } else { 256 };
        let share = (channels as u32).div_ceil(peers);
        let boxes = share.div_ceil(widest);
        let box_channels = share.div_ceil(boxes).next_multiple_of(8);
        let cut = Self { peers, tile, share: boxes * box_channels, box_channels };
        // Three tiles and the exchange in the shared memory of a Hopper block, and the vectors of [in, out] in registers.
        (cut.stage(size) <= 69_632 && (!along || cut.share <= 768)).then_some(cut)
    }

    /// Bytes of a tile in a block, with the vector.
    fn stage(&self, size: usize) -> u32 {
        self.share * (self.tile * size as u32 + 4)
    }

    fn width(&self) -> usize {
        (self.peers * self.share) as usize
    }
}

/// Blocks of a cluster and inputs of a tile: rows of 128 bytes where they fit. More than eight blocks, which fewer
/// multiprocessors can take, come last.
const CUTS_16BIT: &[(u32, u32)] = &[(1, 64), (2, 64), (4, 64), (8, 64), (8, 32), (16, 32)];
const CUTS_F32: &[(u32, u32)] = &[(1, 32), (2, 32), (4, 32), (8, 32), (16, 32)];

/// The cut of a projection, if one fits.
fn cut(channels: usize, size: usize, along: bool) -> Option<Cut> {
    let cuts = if size == 4 { CUTS_F32 } else { CUTS_16BIT };
    cuts.iter().find_map(|&(peers, tile)| Cut::new(channels, size, along, peers, tile))
}

/// Arguments of the two kernels.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SumPass {
    maps: u64,
    x: u64,
    parts: u64,
    squares: u64,
    tiles: u32,
    items: u32,
}
const _: () = assert!(size_of::<SumPass>() == 40);

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SumNext {
    parts: u64,
    squares: u64,
    x: u64,
    y: u64,
    sigma: u64,
    tiles: u32,
    items: u32,
    clusters: u32,
    n_q: u32,
    n_kv: u32,
    d_head: u32,
    width_from: u32,
    width_to: u32,
    finish: u32,
    pad: u32,
}
const _: () = assert!(size_of::<SumNext>() == 80);

/// `W^T W x` of one projection of every layer.
#[derive(Debug)]
struct Half {
    pass: Kernel,
    next: Kernel,
    launch: Launch,
    maps: Buffer<u64>,
    x: Buffer<f32>,
    width: usize,
    clusters: u32,
    tiles: u32,
}

/// Both projections.
#[derive(Debug)]
pub(super) struct Once {
    halves: [Half; 2],
    parts: Buffer<f32>,
    squares: Buffer<f64>,
    shape: LayerInput,
    layers: usize,
}

impl Once {
    /// `None`: this device or these shapes have no cut that fits.
    pub(super) fn new(
        device: &Device,
        shape: &LayerInput,
        projections: &[Projection],
        along: bool,
    ) -> Result<Option<Self>> {
        if device.arch().compute != 90 {
            return Ok(None);
        }
        // W_Q and W_K take turns.
        let both: Vec<Projection> = projections.iter().filter(|p| p.first_head != NO_ROW).copied().collect();
        let side = |first: usize| both.iter().skip(first).step_by(2).copied().collect::<Vec<_>>();
        let (mut parts, mut slots) = (0, 0);
        let mut halves = vec![];
        for (side, of_k) in [(side(0), false), (side(1), true)] {
            let Some(half) = Half::new(device, shape, &side, along, of_k)? else { return Ok(None) };
            let count = side.len() + half.clusters as usize;
            parts = parts.max(count * half.width);
            slots = slots.max(count);
            halves.push(half);
        }
        let Ok(halves) = halves.try_into() else { return Ok(None) };
        let (parts, squares) = (device.zeros(parts)?, device.zeros(slots)?);
        Ok(Some(Self { halves, parts, squares, shape: *shape, layers: both.len() / 2 }))
    }

    /// What the query heads are multiplied with, from `y`, `[layer][KV head][d_head]`. Waits for the device.
    pub(super) fn start(&mut self, y: &[f32]) -> Result<()> {
        let s = &self.shape;
        let (width, group) = (self.halves[0].width, s.n_q / s.n_kv);
        let mut x = vec![0.0; self.layers * width];
        for (x, y) in x.chunks_exact_mut(width).zip(y.chunks_exact(s.n_kv * s.d_head)) {
            for (h, head) in x.chunks_exact_mut(s.d_head).take(s.n_q).enumerate() {
                head.copy_from_slice(&y[h / group * s.d_head..][..s.d_head]);
            }
        }
        self.halves[0].x.write(&x)
    }

    /// One read of W_Q, one of W_K. `overlaps`: the launch in front is another step.
    pub(super) fn step(&self, stream: &Stream, y: DevicePtr, sigma: DevicePtr, overlaps: bool) -> Result<()> {
        let s = &self.shape;
        for finish in [0, 1] {
            let (from, to) = (&self.halves[finish], &self.halves[1 - finish]);
            let items = from.tiles * self.layers as u32;
            let mut pass = SumPass {
                maps: from.maps.ptr().0,
                x: from.x.ptr().0,
                parts: self.parts.ptr().0,
                squares: self.squares.ptr().0,
                tiles: from.tiles,
                items,
            };
            let mut next = SumNext {
                parts: pass.parts,
                squares: pass.squares,
                x: to.x.ptr().0,
                y: y.0,
                sigma: sigma.0,
                tiles: from.tiles,
                items,
                clusters: from.clusters,
                n_q: s.n_q as u32,
                n_kv: s.n_kv as u32,
                d_head: s.d_head as u32,
                width_from: from.width as u32,
                width_to: to.width as u32,
                finish: finish as u32,
                pad: 0,
            };
            let keys = (s.n_kv * s.d_head).div_ceil(128) as u32;
            let launch = Launch { grid: (keys, self.layers as u32, 1), block: 128, shared: 0 };
            // SAFETY: 1. the arguments are the kernels'; 2. the maps reach the weights that the engine's caller promised; 3.
            // every block writes its own parts, which the second kernel sums, and a kernel waits for the one in front before
            // it reads or writes what that one touches.
            unsafe {
                let overlaps = overlaps || finish == 1;
                from.pass.launch_parameters(stream, from.launch, &mut [(&raw mut pass).cast()], overlaps)?;
                from.next.launch_parameters(stream, launch, &mut [(&raw mut next).cast()], true)?;
            }
        }
        Ok(())
    }
}

impl Half {
    fn new(device: &Device, shape: &LayerInput, side: &[Projection], along: bool, of_k: bool) -> Result<Option<Self>> {
        let dtype = shape.q.weight.dtype;
        let channels = if of_k { shape.n_kv } else { shape.n_q } * shape.d_head;
        let Some(cut) = cut(channels, dtype.size(), along) else { return Ok(None) };
        let defines = [
            ("WEIGHTS", (dtype as u32).to_string()),
            ("ALONG_CHANNELS", u32::from(along).to_string()),
            ("PEERS", cut.peers.to_string()),
            ("SHARE", cut.share.to_string()),
            ("BOX", cut.box_channels.to_string()),
            ("TILE", cut.tile.to_string()),
        ];
        let module = device.module(sources::POWER_ONCE, &defines)?;
        let number = |name| {
            let value = module.constant(name)?;
            u32::try_from(value).map_err(|_| Error::cuda(format_args!("scale_power_once: {name} is {value}")))
        };
        let (shared, threads) = (number("SHARED_BYTES")?, number("BLOCK_THREADS")?);
        let pass = module.kernel("scale_power_once")?;
        pass.allow_shared(shared)?;
        let tiles = shape.d_model.div_ceil(cut.tile as usize) as u32;
        let resident = pass.clusters(cut.peers, threads, shared)?;
        if resident == 0 {
            return Ok(None);
        }
        let clusters = resident.min(tiles * side.len() as u32);
        let words = dtype.size() as u32 / 2;
        let mut maps = Vec::with_capacity(16 * side.len());
        for p in side {
            let (inner, outer, stride) =
                if along { (p.rows, p.d_model, p.col_stride) } else { (p.d_model, p.rows, p.row_stride) };
            let tile = if along { [cut.box_channels * words, cut.tile] } else { [cut.tile * words, cut.box_channels] };
            let (inner, stride) = (u64::from(inner * words), stride as u64 * dtype.size() as u64);
            maps.extend(tensor_map::tensor_map_plain(p.weight, inner, outer.into(), stride, tile)?);
        }
        Ok(Some(Self {
            pass,
            next: module.kernel("scale_power_next")?,
            launch: Launch::linear((clusters * cut.peers) as usize, threads, shared),
            maps: device.upload(&maps)?,
            x: device.zeros(side.len() * cut.width())?,
            width: cut.width(),
            clusters,
            tiles,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_covers_every_channel_in_whole_boxes() {
        for (size, along) in [(2, false), (2, true), (4, false), (4, true)] {
            for channels in (16..=8192).step_by(8) {
                let cut = cut(channels, size, along).unwrap();
                let widest = if along { 512 / size as u32 } else { 256 };
                assert!(cut.width() >= channels && cut.width() - channels < channels.max(512), "{channels} {cut:?}");
                assert!(cut.box_channels <= widest && cut.box_channels.is_multiple_of(8), "{channels} {cut:?}");
                assert!(cut.share.is_multiple_of(cut.box_channels) && cut.stage(size) <= 69_632, "{channels} {cut:?}");
            }
        }
        assert_eq!(cut(40_960, 2, false), None);
        let of = |channels| cut(channels, 2, false).map(|cut| (cut.peers, cut.tile, cut.share));
        assert_eq!(
            [of(1600), of(4096), of(8192), of(16_384)].map(Option::unwrap),
            [(4, 64, 400), (8, 64, 512), (8, 32, 1024), (16, 32, 1024)]
        );
    }
}
