//! The paper's implicit power iteration, head by head, with persistent vectors on the device.
//!
//! A step is `z = G_Q y`, `y <- G_K z`, with `G = W^T W` never formed: `u = W y` and `W^T u` come from one read of the
//! weight, so a warm step reads W_Q and W_K once. It is the paper's Algorithm 3 per head seen from the head's side,
//! `y = W_K^T v`, and without expanding grouped KV heads. W is what the CPU's iteration takes: the gains of the norm are in
//! it, the mean of a LayerNorm is not.

use super::host::DeviceWeights;
use super::layout::Tables;
use super::partition::Partition;
use super::tables::{DeviceMatrix, Dtype, LayerInput, NO_ROW, Place, PowerBlock, Projection, tensor_maps};
use crate::cuda::sources;
use crate::cuda::{Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;

/// Persistent power iteration over every head of a model.
///
/// The estimate of a step is `sigma = sqrt((z . G_K z) / (y . z))`, the norm of `M^T u` for the unit vector
/// `u = M v / ||M v||`: a lower bound, but for rounding. It certifies nothing. RoPE is left out, as in the paper. Estimates are
/// `[layer][query head]` with each layer's own heads, vectors `[layer][query head][d_head]`.
pub type PowerEngine = PowerIteration<PerHead>;

/// A power iteration of every layer of a model, whose layers may differ: each kind (heads, head dimension, norm, storage) has
/// launches of its own, and all work on one set of vectors. One workspace an engine: work of one on two streams has to be
/// ordered by events.
#[derive(Debug)]
pub struct PowerIteration<K> {
    kinds: Vec<K>,
    vectors: Buffer<f32>,
    sigma: Buffer<f32>,
    weights: Option<Arc<DeviceWeights>>,
}

/// Layers of one kind, and how a step of them is made.
pub trait Step: Sized {
    /// Estimates and values of vectors of a layer.
    fn sizes(layer: &LayerInput) -> (usize, usize);
    /// Puts `count` steps on the stream.
    ///
    /// # Errors
    /// If a launch is refused.
    fn steps(&self, stream: &Stream, count: usize, vectors: DevicePtr, sigma: DevicePtr) -> Result<()>;
}

/// Where a layer's estimates and vectors begin in those of the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Starts {
    pub sigma: usize,
    pub vectors: usize,
}

impl<K: Step> PowerIteration<K> {
    /// `make` sets up the layers of one kind.
    pub(super) fn set_up(
        device: &Device,
        layers: &[LayerInput],
        seed: u64,
        make: impl Fn(&[LayerInput], &[Place], &[Starts]) -> Result<K>,
    ) -> Result<Self> {
        let partition = Partition::of_power(layers)?;
        let mut next = Starts { sigma: 0, vectors: 0 };
        let starts: Vec<Starts> = layers
            .iter()
            .map(|layer| {
                let (this, (estimates, values)) = (next, K::sizes(layer));
                next = Starts { sigma: next.sigma + estimates, vectors: next.vectors + values };
                this
            })
            .collect();
        let mut vectors = vec![0f32; next.vectors];
        let mut kinds = vec![];
        for members in partition.groups() {
            let (inputs, places) = partition.pick(layers, members);
            let starts: Vec<Starts> = members.iter().map(|&i| starts[i]).collect();
            let values = K::sizes(&inputs[0]).1;
            let random = start(values * inputs.len() / inputs[0].d_head, inputs[0].d_head, seed);
            for (start, random) in starts.iter().zip(random.chunks(values)) {
                vectors[start.vectors..][..values].copy_from_slice(random);
            }
            kinds.push(make(&inputs, &places, &starts)?);
        }
        Ok(Self { kinds, vectors: device.upload(&vectors)?, sigma: device.zeros(next.sigma)?, weights: None })
    }

    pub(super) fn keeping(mut self, weights: &Arc<DeviceWeights>) -> Self {
        self.weights = Some(weights.clone());
        self
    }

    /// The weights that are kept alive with it.
    pub fn weights(&self) -> Option<&Arc<DeviceWeights>> {
        self.weights.as_ref()
    }

    /// Kinds of layers, each of which has launches of its own.
    pub fn kinds(&self) -> usize {
        self.kinds.len()
    }

    /// Puts `count` steps of every layer on `stream`: 1 from persistent vectors, 5 from random ones (the paper). No allocation,
    /// no synchronisation.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn steps(&self, stream: &Stream, count: usize) -> Result<()> {
        self.kinds.iter().try_for_each(|kind| kind.steps(stream, count, self.vectors.ptr(), self.sigma.ptr()))
    }

    /// Estimates of the last step, layer after layer: lower bounds of sigma; NaN where weights are not finite.
    pub fn sigma(&self) -> &Buffer<f32> {
        &self.sigma
    }

    /// The vectors, layer after layer, as they were after the last steps: what a resume has to keep.
    pub fn vectors(&self) -> &Buffer<f32> {
        &self.vectors
    }

    /// Goes on from saved vectors. Waits for the device.
    ///
    /// # Errors
    /// If their number is not that of [`PowerIteration::vectors`], one is not finite, or the copy fails.
    pub fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        let want = self.vectors.len();
        if vectors.len() != want {
            return Err(Error::mismatch(format_args!(
                "{} values of power iteration vectors do not fit a model with {want}",
                vectors.len()
            )));
        }
        if vectors.iter().any(|x| !x.is_finite()) {
            return Err(Error::mismatch("a power iteration vector is not finite"));
        }
        self.vectors.write(vectors)
    }
}

/// The iteration of each head by itself.
#[derive(Debug)]
pub struct PerHead {
    reduce: Kernel,
    projections: Buffer<Projection>,
    maps: Buffer<u64>,
    halves: [Half; 2],
    middle: Buffer<f32>,
    parts: Buffer<f32>,
    scales: Buffer<f32>,
    tiles: u32,
    raw: bool,
}

/// One of the two products.
#[derive(Debug)]
struct Half {
    kernel: Kernel,
    launch: Launch,
    blocks: Buffer<PowerBlock>,
    /// Vectors of a block, at most.
    most: u32,
    rows: u32,
}

/// Arguments of the kernel.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Arguments {
    maps: u64,
    projections: u64,
    blocks: u64,
    from: u64,
    to: u64,
    parts: u64,
    scales: u64,
    sigma: u64,
    count: u32,
    tiles: u32,
    rows: u32,
    finish: u32,
    raw: u32,
    grid: u32,
}
const _: () = assert!(size_of::<Arguments>() == 88);

/// Vectors that one pass over a head takes, of which a mean takes one: the quick kernel's, and the other's.
const PACKED: u32 = 4;
const WIDE: u32 = 8;

impl PowerEngine {
    /// Sets up the iteration from pseudo-random vectors of `seed`, the same for each kind of layer; `raw` leaves gains and mean
    /// out, as the paper does.
    ///
    /// # Errors
    /// If the weights of a layer are not BF16 with 16-byte rows, `[out, in]`, or `[in, out]` with d_head a multiple of 64; if
    /// q and k are normalised after the projection; if the device has no copy engine for tensors (before Hopper); or anything
    /// that [`ScaleEngine::new`](super::ScaleEngine::new) refuses.
    ///
    /// # Safety
    /// The same as [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, layers: &[LayerInput], raw: bool, seed: u64) -> Result<Self> {
        let total = layers.iter().map(|l| l.n_q * l.d_head).sum();
        let make = |inputs: &[LayerInput], places: &[Place], starts: &[Starts]| {
            PerHead::new(device, (inputs, places, starts), raw, total)
        };
        Self::set_up(device, layers, seed, make)
    }

    /// The same over weights that are kept alive with the iteration.
    ///
    /// # Errors
    /// As [`PowerEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, raw: bool, seed: u64) -> Result<Self> {
        // SAFETY: every range was checked against the memory that `weights` owns, which is held and not written.
        Ok(unsafe { Self::new(device, weights.layers(), raw, seed)? }.keeping(weights))
    }

    /// Puts one step of every head on `stream`: one read of W_Q and W_K.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn step(&self, stream: &Stream) -> Result<()> {
        self.steps(stream, 1)
    }
}

impl PerHead {
    /// For layers of one kind, whose addresses `PowerEngine::new`'s caller promised. `total`: values of the model's vectors.
    fn new(
        device: &Device,
        (layers, places, starts): (&[LayerInput], &[Place], &[Starts]),
        raw: bool,
        total: usize,
    ) -> Result<Self> {
        let first = &layers[0];
        let Some(columns) = along_channels(layers, Some(Dtype::Bf16)).filter(|c| !c || first.d_head.is_multiple_of(64))
        else {
            return Err(Error::unsupported(
                "power iteration on the device takes BF16 weights with 16-byte rows, [out, in], or [in, out] with d_head a multiple of 64",
            ));
        };
        if device.arch().compute < 90 {
            return Err(Error::unsupported(
                "power iteration on the device needs a GPU of the Hopper generation or later",
            ));
        }
        let built = Tables::new(layers, places);
        let defines = [("D_HEAD", first.d_head.to_string()), ("ALONG_CHANNELS", u32::from(columns).to_string())];
        let module = device.module(sources::POWER, &defines)?;
        let number = |name| {
            let value = module.constant(name)?;
            u32::try_from(value).map_err(|_| Error::cuda(format_args!("scale_power: {name} is {value}")))
        };
        let (shared, threads, tile) =
            (number("SHARED_BYTES")?, number("BLOCK_THREADS")?, number("TILE_INPUTS")?.max(1));
        let mean = u32::from(layers.iter().any(|l| l.mean_removed) && !raw);
        let tables = blocks(&built.projections, starts, first.n_q, first.n_kv, WIDE - mean);
        let maps = tensor_maps(&built.projections, false, &[if columns { tile } else { first.d_head as u32 }])?;
        let tiles = (first.d_model as u32).div_ceil(tile);
        let warps = threads as usize / 32;
        let mut parts = 0;
        let mut half = |table: &[PowerBlock]| -> Result<Half> {
            let most = table.iter().map(|b| b.count).max().unwrap_or(1);
            let rows = most + mean;
            let kernel = module.overlapping_kernel(if rows <= PACKED { "scale_power" } else { "scale_power_wide" })?;
            kernel.allow_shared(shared)?;
            let resident = device.processors() * kernel.occupancy(threads, shared)?.max(1) as usize;
            // Every block has a tile, so that no slot of a part stays unwritten.
            let grid = resident.min(table.len() * tiles as usize);
            parts = parts.max((table.len() + grid) * warps * rows as usize * first.d_head);
            Ok(Half {
                kernel,
                launch: Launch::linear(grid, threads, shared),
                blocks: device.upload(table)?,
                most,
                rows,
            })
        };
        let halves = [half(&tables[0])?, half(&tables[1])?];
        let heads = starts.last().map_or(0, |start| start.sigma + first.n_q);
        Ok(Self {
            reduce: module.overlapping_kernel("scale_power_reduce")?,
            projections: device.upload(&built.projections)?,
            maps: device.upload(&maps)?,
            halves,
            middle: device.zeros(total)?,
            parts: device.zeros(parts)?,
            scales: device.zeros(2 * heads)?,
            tiles,
            raw,
        })
    }
}

impl Step for PerHead {
    fn sizes(layer: &LayerInput) -> (usize, usize) {
        (layer.n_q, layer.n_q * layer.d_head)
    }

    fn steps(&self, stream: &Stream, count: usize, y: DevicePtr, sigma: DevicePtr) -> Result<()> {
        let z = self.middle.ptr();
        for launch in 0..2 * count {
            let finish = launch % 2;
            let (from, to): (DevicePtr, DevicePtr) = if finish == 0 { (y, z) } else { (z, y) };
            let half = &self.halves[finish];
            let mut arguments = Arguments {
                maps: self.maps.ptr().0,
                projections: self.projections.ptr().0,
                blocks: half.blocks.ptr().0,
                from: from.0,
                to: to.0,
                parts: self.parts.ptr().0,
                scales: self.scales.ptr().0,
                sigma: sigma.0,
                count: half.blocks.len() as u32,
                tiles: self.tiles,
                rows: half.rows,
                finish: finish as u32,
                raw: self.raw.into(),
                grid: half.launch.grid.0,
            };
            let parameters = &mut [(&raw mut arguments).cast()];
            // The first waits for whatever wrote the weights; the others may bring weights in before the previous one ends.
            // SAFETY: 1. the argument is the kernels'; 2. the tables reach the weights that `new`'s caller promised; 3. every
            // warp writes its own parts, which the second kernel sums, and a kernel waits for the previous one before it reads
            // or writes what that one touches.
            unsafe {
                half.kernel.launch_parameters(stream, half.launch, parameters, launch > 0)?;
                let reduce = Launch::linear(half.blocks.len(), 32 * half.most, 0);
                self.reduce.launch_parameters(stream, reduce, parameters, true)?;
            }
        }
        Ok(())
    }
}

/// Whether W_Q and W_K of all layers lie along the channels (`[in, out]`) or along the model dimension, with contiguous values of
/// one type at 16 bytes; `None` if neither. `dtype`: of this type.
pub(super) fn along_channels(layers: &[LayerInput], dtype: Option<Dtype>) -> Option<bool> {
    let dtype = dtype.unwrap_or(layers[0].q.weight.dtype);
    let whole = (16 / dtype.size()) as i64;
    let all = |test: &dyn Fn(&DeviceMatrix) -> bool| {
        let fits = |m: &DeviceMatrix| m.dtype == dtype && m.ptr.0.is_multiple_of(16) && test(m);
        layers.iter().all(|l| fits(&l.q.weight) && fits(&l.k.weight))
    };
    match all(&|m| m.col_stride == 1 && m.row_stride % whole == 0) {
        true => Some(false),
        false => all(&|m| m.row_stride == 1 && m.col_stride % whole == 0).then_some(true),
    }
}

/// The work of both products: a head each for q; for k each head with up to `most` query heads of its group, which
/// share one read of k.
fn blocks(projections: &[Projection], starts: &[Starts], n_q: usize, n_kv: usize, most: u32) -> [Vec<PowerBlock>; 2] {
    let (n_q, n_kv) = (n_q as u32, n_kv as u32);
    let group = n_q / n_kv;
    let mut tables = [vec![], vec![]];
    let of_q_and_k: Vec<_> = (0u32..).zip(projections).filter(|(_, p)| p.first_head != NO_ROW).collect();
    for (sides, start) in of_q_and_k.chunks_exact(2).zip(starts) {
        let block = |side: usize, head: u32, q: u32, count: u32| PowerBlock {
            projection: sides[side].0,
            head,
            vector: start.sigma as u32 + q,
            count,
            first: start.vectors as u32 + q * sides[side].1.d_head,
            pad: [0; 3],
        };
        tables[0].extend((0..n_q).map(|q| block(0, q, q, 1)));
        for (head, done) in (0..n_kv).flat_map(|head| (0..group).step_by(most as usize).map(move |done| (head, done))) {
            tables[1].push(block(1, head, head * group + done, most.min(group - done)));
        }
    }
    tables
}

/// Unit vectors with independent signs and sizes.
fn start(heads: usize, d_head: usize, seed: u64) -> Vec<f32> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut vectors: Vec<f32> = (0..heads * d_head)
        .map(|_| {
            // The sum of four uniform values is close enough to a Gaussian for every direction to be as likely.
            (0..4)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ((state >> 40) as f32 - 8_388_607.5) / 8_388_608.0
                })
                .sum()
        })
        .collect();
    for vector in vectors.chunks_exact_mut(d_head) {
        let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vectors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_head_is_multiplied_once_by_each_side() {
        for (n_q, n_kv, most) in [(25, 25, 7), (32, 8, 8), (64, 8, 8), (71, 1, 8), (24, 2, 7)] {
            let side =
                |heads: u32, first_head| Projection { rows: heads * 64, d_head: 64, first_head, ..Zeroable::zeroed() };
            let layer = [side(n_q, 0), side(n_kv, 0), side(n_kv, NO_ROW)];
            // The second layer's results begin past another's of a different kind.
            let starts =
                [Starts { sigma: 0, vectors: 0 }, Starts { sigma: n_q as usize + 7, vectors: 64 * n_q as usize + 700 }];
            let [q, k] = blocks(&[layer, layer].concat(), &starts, n_q as usize, n_kv as usize, most);
            for (table, is_k) in [(&q, false), (&k, true)] {
                let mut next = 0;
                for b in table {
                    let (layer, head) = (next / n_q, next % n_q);
                    assert_eq!(b.projection, 3 * layer + u32::from(is_k));
                    assert_eq!((b.vector, b.first), (next + 7 * layer, 64 * next + 700 * layer));
                    assert_eq!(b.head, if is_k { head / (n_q / n_kv) } else { head });
                    assert_eq!(b.head, if is_k { (head + b.count - 1) / (n_q / n_kv) } else { head });
                    assert!((1..=most).contains(&b.count));
                    next += b.count;
                }
                assert_eq!(next, 2 * n_q);
            }
        }
    }

    #[test]
    fn vectors_start_apart_and_at_unit_length() {
        let vectors = start(3, 64, 1);
        for (i, a) in vectors.chunks_exact(64).enumerate() {
            for (j, b) in vectors.chunks_exact(64).enumerate() {
                let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                assert!(if i == j { (dot - 1.0).abs() < 1e-5 } else { dot.abs() < 0.5 }, "{i} {j} {dot}");
            }
        }
        assert_ne!(vectors, start(3, 64, 2));
    }
}
