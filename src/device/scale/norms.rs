//! Channel statistics: one read of the weights, one block per head.

use super::layout::Tables;
use super::schedule::Schedule;
use super::storage::Storage;
use super::tables::{DeviceMatrix, Dtype, HeadPlace, LayerInput, NO_ROW, TensorMaps, has_sums};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Module, Stream};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Norms {
    every: (Kernel, Launch),
    /// Of V alone, beside kernels that leave the memory alone.
    values: (Kernel, Launch),
    /// Of V alone, in front of a plan's other launches: where it has so few heads that this takes no longer than these.
    first: Option<(Kernel, Launch)>,
    /// `every` and `first` may start early, and clear the status.
    overlap: bool,
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
    /// One block a multiprocessor, beside other kernels.
    pub beside: bool,
    pub launching: Launching,
}

/// How `scale_norms` is launched, where that changes none of its results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Launching {
    pub schedule: Schedule,
    pub d_model: usize,
    pub processors: usize,
}

impl Form {
    /// The kernel, and its launch over so many heads.
    pub fn kernel(self, device: &Device, heads: usize) -> Result<(Kernel, Launch)> {
        let mut defines = vec![
            ("D_HEAD", self.d_head.to_string()),
            ("ALONG_CHANNELS", u32::from(self.columns).to_string()),
            ("SUMS", u32::from(self.sums).to_string()),
            ("TURNS", u32::from(self.turns).to_string()),
            ("F16", u32::from(self.f16).to_string()),
            ("VECTORS", (self.vectors as u32).to_string()),
            ("BESIDE", u32::from(self.beside).to_string()),
        ];
        let Launching { schedule, d_model, processors } = self.launching;
        if schedule.overlap && !self.beside {
            defines.push(("OVERLAP", 1.to_string()));
        }
        let sharing = if self.beside { 1 } else { schedule.sharing(heads, processors) };
        if sharing > 1 {
            let split = [&defines[..], &[("SPLIT", sharing.to_string())]].concat();
            let (kernel, threads, shared, module) = of_module(device, &split)?;
            let tiles = d_model.div_ceil(64);
            let first_sums = tiles.div_ceil(deep(tiles)).div_ceil(sharing) as u32;
            let shared = shared + first_sums * module.constant("FIRST_SUM_BYTES")? as u32;
            if shared as usize <= device.shared_memory()? {
                kernel.allow_shared(shared)?;
                return Ok((kernel, Launch::linear(heads * sharing, threads, shared)));
            }
        }
        if schedule.even && !self.beside {
            let fit = device.module(sources::NORMS, &defines)?.constant("BLOCKS_THAT_FIT")?;
            let at_a_time = schedule.at_a_time(heads, processors, fit as usize);
            defines.extend((at_a_time > 0).then(|| ("AT_MOST", at_a_time.to_string())));
        }
        let (kernel, threads, shared, _) = of_module(device, &defines)?;
        kernel.allow_shared(shared)?;
        Ok((kernel, Launch::linear(heads, threads, shared)))
    }
}

/// The kernel of a variant, and threads and shared memory of a block.
fn of_module(device: &Device, defines: &[(&'static str, String)]) -> Result<(Kernel, u32, u32, Module)> {
    let module = device.module(sources::NORMS, defines)?;
    let number = |name| module.constant(name).map(|value| value as u32);
    let (threads, shared) = (number("BLOCK_THREADS")?, number("SHARED_BYTES")?);
    Ok((module.overlapping_kernel("scale_norms")?, threads, shared, module))
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
    pub fn new(device: &Device, layers: &[LayerInput], built: &Tables, schedule: Schedule) -> Result<Self> {
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
        let (every, values, first, maps) = match copied(device, layers) {
            None => {
                let kernel = device.module(sources::NORMS_GENERIC, &[])?.kernel("scale_norms_generic")?;
                let launch = |heads| Launch::linear(heads, 256, 0);
                ((kernel.clone(), launch(all)), (kernel, launch(of_v)), None, None)
            }
            Some(Storage { dtype, columns, .. }) => {
                let sums = has_sums(layers);
                let turns = built.projections.iter().any(|p| p.rotary > 0);
                let vectors = layers[0].vector_dtype;
                let launching = Launching { schedule, d_model: layers[0].d_model, processors: device.processors() };
                let form = Form {
                    d_head: r,
                    columns,
                    sums,
                    turns,
                    f16: dtype == Dtype::F16,
                    vectors,
                    beside: false,
                    launching,
                };
                let kernel = |turns: bool, heads| Form { turns, ..form }.kernel(device, heads);
                // With sums it is bound by instructions, and needs every warp that fits.
                let beside = Form { launching: Launching::default(), turns: false, beside: !sums, ..form };
                let values = beside.kernel(device, of_v)?;
                let ahead = schedule.overlap && (1..=device.processors()).contains(&of_v);
                let first = ahead.then(|| kernel(false, of_v)).transpose()?;
                let boxes = vec![if columns { 64 } else { r }];
                let maps = TensorMaps::new(device, &built.projections, true, boxes, schedule.far)?;
                (kernel(turns, all)?, values, first, Some(maps))
            }
        };
        let (heads, d_model) = (device.upload(&heads)?, layers[0].d_model as u32);
        let overlap = schedule.overlap && maps.is_some() && all > 0;
        Ok(Self { every, values, first, overlap, heads, first_value, maps, d_model })
    }

    /// Clears `status`, or has [`Norms::every`] do it, and returns what that is to be told.
    pub fn clear(&self, status: &Buffer<u32>, stream: &Stream) -> Result<DevicePtr> {
        if self.overlap {
            return Ok(status.ptr());
        }
        status.clear(stream)?;
        Ok(DevicePtr::NULL)
    }

    /// Puts the statistics of every channel on `stream`. `status`: what [`Norms::clear`] returned, or NULL. `early`: the launch in
    /// front may be waited for in the kernel.
    pub fn every(&self, stream: &Stream, [projections, stats, status]: [DevicePtr; 3], early: bool) -> Result<()> {
        let status = self.overlap.then_some(status);
        self.launch(stream, &self.every, 0, [projections, stats], status, early)
    }

    /// Whether there is a launch for [`Norms::first`].
    pub fn is_first(&self) -> bool {
        self.first.is_some()
    }

    /// Those of V, in front of everything else. Arguments as those of [`Norms::every`]; `status` is cleared unless it is NULL.
    pub fn first(&self, stream: &Stream, [projections, stats, status]: [DevicePtr; 3], early: bool) -> Result<()> {
        let Some(first) = &self.first else { return Ok(()) };
        self.launch(stream, first, self.first_value, [projections, stats], Some(status), early)
    }

    /// The tensor maps that it reads weights by, if any.
    pub fn maps(&self) -> Option<&TensorMaps> {
        self.maps.as_ref()
    }

    /// Those of V. False if there is nothing to launch.
    pub fn values(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<bool> {
        let any = self.first_value < self.heads.len();
        if any {
            self.launch(stream, &self.values, self.first_value, [projections, stats], None, false)?;
        }
        Ok(any)
    }

    fn launch(
        &self,
        stream: &Stream,
        (kernel, launch): &(Kernel, Launch),
        first: usize,
        [projections, stats]: [DevicePtr; 2],
        status: Option<DevicePtr>,
        early: bool,
    ) -> Result<()> {
        if launch.grid.0 == 0 {
            return Ok(());
        }
        let maps = Arg::Ptr(self.maps.as_ref().map_or(DevicePtr::NULL, TensorMaps::ptr));
        let heads = Arg::Ptr(self.heads.at(first));
        let mut args = vec![Arg::Ptr(projections), heads, maps, Arg::U32(self.d_model), Arg::Ptr(stats)];
        args.extend(status.map(Arg::Ptr));
        // SAFETY: 1. the arguments are the kernels', the status of those that overlap; 2. the tables are the group's and reach the
        // weights and vectors that the engine's maker's caller promised; 3. every head has its own rows, and what overlaps waits.
        unsafe { kernel.launch_early(stream, *launch, &args, early && status.is_some()) }
    }
}
