//! Channel statistics: one read of the weights, one block per head, or several where heads are few.

use super::layout::Tables;
use super::storage::Storage;
use super::tables::{DeviceMatrix, Dtype, HeadPlace, LayerInput, NO_ROW, TensorMaps, has_sums};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Module, Stream};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Norms {
    every: (Kernel, Launch),
    /// Of V alone, concurrently with kernels that read no weights.
    values: (Kernel, Launch),
    /// Heads of every projection, those of V last.
    heads: Buffer<HeadPlace>,
    first_value: usize,
    /// Where the copy engine brings the weights.
    maps: Option<TensorMaps>,
    d_model: u32,
}

/// How weights lie that the copy engine can bring, with the vectors of their norm.
fn copied(device: &Device, layers: &[LayerInput]) -> Option<Storage> {
    let read = |l: &LayerInput| {
        let q_and_k = l.qk_norm.is_none().then_some([l.q.weight, l.k.weight]);
        q_and_k.into_iter().flatten().chain(l.v.map(|v| v.weight))
    };
    let matrices: Vec<DeviceMatrix> = layers.iter().flat_map(read).collect();
    let storage = matrices.first().map(|_| Storage::of(&matrices))?;
    let vectors = layers.iter().all(|l| (l.gain.0 | l.shift.0).is_multiple_of(16));
    let fits = device.arch().compute == 90 && vectors && layers[0].d_model.is_multiple_of(8);
    (fits && storage.dtype != Dtype::F32).then_some(storage)
}

/// What `scale_norms` is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub d_head: u32,
    /// Stored `[in, out]`.
    pub columns: bool,
    pub sums: bool,
    /// With the products of rotation pairs.
    pub turns: bool,
    pub f16: bool,
    pub vectors: Dtype,
    /// One block per multiprocessor, concurrently with other kernels.
    pub beside: bool,
}

impl Form {
    fn module(self, device: &Device, blocks: Option<(&'static str, usize)>) -> Result<Module> {
        let mut defines = vec![
            ("D_HEAD", self.d_head.to_string()),
            ("ALONG_CHANNELS", u32::from(self.columns).to_string()),
            ("SUMS", u32::from(self.sums).to_string()),
            ("TURNS", u32::from(self.turns).to_string()),
            ("F16", u32::from(self.f16).to_string()),
            ("VECTORS", (self.vectors as u32).to_string()),
            ("BESIDE", u32::from(self.beside).to_string()),
        ];
        defines.extend(blocks.map(|(name, value)| (name, value.to_string())));
        device.module(sources::NORMS, &defines)
    }

    /// The kernel, and its launch over so many heads: a block each, and as many at a time as fit.
    pub fn kernel(self, device: &Device, heads: usize) -> Result<(Kernel, Launch)> {
        launch_of(&self.module(device, None)?, heads, 0)
    }

    /// The same results from blocks that keep the device busier: several a head where heads are few, fewer at a time where the
    /// last of them would leave most multiprocessors idle. Not for weights `[in, out]`, where fewer blocks are slower.
    fn busier_kernel(self, device: &Device, heads: usize, d_model: usize) -> Result<(Kernel, Launch)> {
        if self.columns {
            return self.kernel(device, heads);
        }
        let sharing = blocks_a_head(self.d_head, heads, device.processors());
        if sharing > 1 {
            let module = self.module(device, Some(("SPLIT", sharing)))?;
            let tiles = d_model.div_ceil(64);
            let first_sums = tiles.div_ceil(deep(tiles)).div_ceil(sharing);
            let kept = first_sums as u32 * module.constant("FIRST_SUM_BYTES")? as u32;
            if (module.constant("SHARED_BYTES")? as u32 + kept) as usize <= device.shared_memory()? {
                return launch_of(&module, heads * sharing, kept);
            }
        }
        let module = self.module(device, None)?;
        let fit = module.constant("BLOCKS_THAT_FIT")? as usize;
        let at_a_time = blocks_at_a_time(heads, device.processors(), fit);
        if at_a_time == fit {
            return launch_of(&module, heads, 0);
        }
        launch_of(&self.module(device, Some(("AT_MOST", at_a_time)))?, heads, 0)
    }
}

/// `kept`: bytes of shared memory for what is kept of first sums.
fn launch_of(module: &Module, blocks: usize, kept: u32) -> Result<(Kernel, Launch)> {
    let kernel = module.overlapping_kernel("scale_norms")?;
    let number = |name| module.constant(name).map(|value| value as u32);
    let (threads, shared) = (number("BLOCK_THREADS")?, number("SHARED_BYTES")? + kept);
    kernel.allow_shared(shared)?;
    Ok((kernel, Launch::linear(blocks, threads, shared)))
}

/// Blocks that share each of `heads` heads: as many as three blocks a multiprocessor allow. Heads of 64 channels are read faster by
/// one block each.
fn blocks_a_head(d_head: u32, heads: usize, processors: usize) -> usize {
    let fits = |&blocks: &usize| d_head >= 128 && heads * blocks <= 3 * processors;
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// Blocks that a multiprocessor runs at a time, of the `fit` that it has room for. All blocks take about as long, so they run in
/// rounds, and a multiprocessor is given the next ones when those before have ended.
fn blocks_at_a_time(blocks: usize, processors: usize, fit: usize) -> usize {
    // Blocks that the busiest multiprocessor runs one after another, each weighed by its share of the multiprocessor.
    let busiest = |at_a_time: usize| match blocks.div_ceil(at_a_time * processors) {
        0 | 1 => blocks.div_ceil(processors),
        rounds => rounds * at_a_time,
    };
    let fewest = (fit.div_ceil(2).max(1)..=fit).rev().min_by_key(|&n| busiest(n)).unwrap_or(fit);
    if 100 * busiest(fewest) < 95 * busiest(fit) { fewest } else { fit }
}

/// Tiles of a first sum of `scale_norms`.
fn deep(tiles: usize) -> usize {
    let mut deep = 1;
    while 16 * deep * deep < tiles {
        deep *= 2;
    }
    deep
}

/// Roundings that the sums of `scale_norms` over `d_model` inputs are deep.
pub(super) fn depth(d_model: usize) -> usize {
    let tiles = d_model.div_ceil(64);
    8 * deep(tiles) + tiles.div_ceil(deep(tiles)) + 6
}

impl Norms {
    pub fn new(device: &Device, layers: &[LayerInput], built: &Tables) -> Result<Self> {
        let r = layers[0].d_head as u32;
        let of = |values: bool| {
            let wanted = built.projections.iter().enumerate().filter(move |(_, p)| (p.first_head == NO_ROW) == values);
            wanted.flat_map(move |(index, p)| {
                (0..p.rows).step_by(r as usize).map(move |first_row| HeadPlace { projection: index as u32, first_row })
            })
        };
        let mut heads: Vec<HeadPlace> = of(false).collect();
        let first_value = heads.len();
        heads.extend(of(true));
        let (all, of_v) = (heads.len(), heads.len() - first_value);
        let (every, values, maps) = match copied(device, layers) {
            None => {
                let kernel = device.module(sources::NORMS_GENERIC, &[])?.kernel("scale_norms_generic")?;
                let launch = |heads| Launch::linear(heads, 256, 0);
                ((kernel.clone(), launch(all)), (kernel, launch(of_v)), None)
            }
            Some(Storage { dtype, columns, .. }) => {
                let sums = has_sums(layers);
                let turns = built.projections.iter().any(|p| p.rotary > 0);
                let vectors = layers[0].vector_dtype;
                let form = Form { d_head: r, columns, sums, turns, f16: dtype == Dtype::F16, vectors, beside: false };
                let of_values = Form { turns: false, ..form };
                let few = !columns && blocks_a_head(r, of_v, device.processors()) > 1;
                // Blocks that share few heads need little memory, and the kernels beside them find the rest. With sums it is bound
                // by instructions, and needs every warp that fits.
                let values = match (sums, few) {
                    (false, true) => of_values.busier_kernel(device, of_v, layers[0].d_model)?,
                    (false, false) => Form { beside: true, ..of_values }.kernel(device, of_v)?,
                    (true, _) => of_values.kernel(device, of_v)?,
                };
                let boxes = vec![if columns { 64 } else { r }];
                // The other half of 256 bytes is the next tile's where inputs are contiguous, otherwise another head's.
                let maps = TensorMaps::new(device, &built.projections, true, boxes, !columns)?;
                (form.busier_kernel(device, all, layers[0].d_model)?, values, Some(maps))
            }
        };
        let heads = device.upload(&heads)?;
        Ok(Self { every, values, heads, first_value, maps, d_model: layers[0].d_model as u32 })
    }

    /// Puts the statistics of every channel on `stream`, and clears `status` in front of that, if any. `early`: the launch in front
    /// is one of this crate, which a kernel may wait for.
    pub fn every(
        &self,
        stream: &Stream,
        [projections, stats]: [DevicePtr; 2],
        status: Option<&Buffer<u32>>,
        early: bool,
    ) -> Result<()> {
        let by_kernel = self.maps.is_some();
        if let Some(status) = status.filter(|_| !by_kernel) {
            status.clear(stream)?;
        }
        let status = status.map_or(DevicePtr::NULL, Buffer::ptr);
        self.launch(stream, &self.every, 0, [projections, stats, status], early && by_kernel)
    }

    /// The tensor maps that it reads weights by, if any.
    pub fn maps(&self) -> Option<&TensorMaps> {
        self.maps.as_ref()
    }

    /// Those of V. False if there is nothing to launch.
    pub fn values(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<bool> {
        let any = self.first_value < self.heads.len();
        if any {
            self.launch(stream, &self.values, self.first_value, [projections, stats, DevicePtr::NULL], false)?;
        }
        Ok(any)
    }

    fn launch(
        &self,
        stream: &Stream,
        (kernel, launch): &(Kernel, Launch),
        first: usize,
        [projections, stats, status]: [DevicePtr; 3],
        early: bool,
    ) -> Result<()> {
        if launch.grid.0 == 0 {
            return Ok(());
        }
        let maps = Arg::Ptr(self.maps.as_ref().map_or(DevicePtr::NULL, TensorMaps::ptr));
        let heads = Arg::Ptr(self.heads.at(first));
        let mut args = vec![Arg::Ptr(projections), heads, maps, Arg::U32(self.d_model), Arg::Ptr(stats)];
        args.extend(self.maps.is_some().then_some(Arg::Ptr(status)));
        // SAFETY: 1. the arguments are the kernels'; 2. the tables are the group's and reach the weights and vectors that the
        // engine's maker's caller promised; 3. every head has its own rows, and the kernel by maps waits for what is in front.
        unsafe { kernel.launch_early(stream, *launch, &args, early) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_heads_are_shared_and_rounds_are_full() {
        // One layer of Llama-3 8B, and its 32 layers.
        assert_eq!([48, 1536].map(|heads| blocks_a_head(128, heads, 132)), [8, 1]);
        assert_eq!([49, 50, 99, 100, 198, 199].map(|heads| blocks_a_head(128, heads, 132)), [8, 4, 4, 2, 2, 1]);
        assert_eq!([64, 120, 136].map(|d_head| blocks_a_head(d_head, 48, 132)), [1, 1, 8]);
        // Qwen2.5-3B and Llama-3.2-3B run in rounds of 3 blocks, GPT-2 XL in rounds of 4; others are full as they are.
        let fit = [(720, 4), (1120, 4), (3600, 6), (448, 4), (768, 8), (1536, 4), (432, 8), (1, 1)];
        assert_eq!(fit.map(|(heads, fit)| blocks_at_a_time(heads, 132, fit)), [3, 3, 4, 4, 8, 4, 8, 1]);
    }
}
