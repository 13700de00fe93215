//! Channel statistics: one read of the weights, one block per head.

use super::layout::Tables;
use super::storage::Storage;
use super::tables::{DeviceMatrix, Dtype, HeadPlace, LayerInput, NO_ROW, TensorMaps, has_sums};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Norms {
    every: (Kernel, Launch),
    /// Of V alone, beside kernels that leave the memory alone.
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
    /// One block a multiprocessor, beside other kernels.
    pub beside: bool,
}

impl Form {
    /// The kernel, and its launch over so many heads.
    pub fn kernel(self, device: &Device, heads: usize) -> Result<(Kernel, Launch)> {
        let defines = [
            ("D_HEAD", self.d_head.to_string()),
            ("ALONG_CHANNELS", u32::from(self.columns).to_string()),
            ("SUMS", u32::from(self.sums).to_string()),
            ("TURNS", u32::from(self.turns).to_string()),
            ("F16", u32::from(self.f16).to_string()),
            ("VECTORS", (self.vectors as u32).to_string()),
            ("BESIDE", u32::from(self.beside).to_string()),
        ];
        let module = device.module(sources::NORMS, &defines)?;
        let kernel = module.overlapping_kernel("scale_norms")?;
        let number = |name| module.constant(name).map(|value| value as u32);
        let (threads, shared) = (number("BLOCK_THREADS")?, number("SHARED_BYTES")?);
        kernel.allow_shared(shared)?;
        Ok((kernel, Launch::linear(heads, threads, shared)))
    }
}

/// Roundings that the sums of `scale_norms` over `d_model` inputs are deep.
pub(super) fn depth(d_model: usize) -> usize {
    let tiles = d_model.div_ceil(64);
    let mut deep = 1;
    while 16 * deep * deep < tiles {
        deep *= 2;
    }
    8 * deep + tiles.div_ceil(deep) + 6
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
                let kernel = |turns: bool, beside: bool, heads| Form { turns, beside, ..form }.kernel(device, heads);
                // With sums it is bound by instructions, and needs every warp that fits.
                let values = kernel(false, !sums, of_v)?;
                let maps = TensorMaps::new(device, &built.projections, true, vec![if columns { 64 } else { r }])?;
                (kernel(turns, false, all)?, values, Some(maps))
            }
        };
        let heads = device.upload(&heads)?;
        Ok(Self { every, values, heads, first_value, maps, d_model: layers[0].d_model as u32 })
    }

    /// Puts the statistics of every channel on `stream`.
    pub fn every(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<()> {
        self.launch(stream, &self.every, 0, projections, stats)
    }

    /// The tensor maps that it reads weights by, if any.
    pub fn maps(&self) -> Option<&TensorMaps> {
        self.maps.as_ref()
    }

    /// Those of V. False if there is nothing to launch.
    pub fn values(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<bool> {
        let any = self.first_value < self.heads.len();
        if any {
            self.launch(stream, &self.values, self.first_value, projections, stats)?;
        }
        Ok(any)
    }

    fn launch(
        &self,
        stream: &Stream,
        (kernel, launch): &(Kernel, Launch),
        first: usize,
        projections: DevicePtr,
        stats: DevicePtr,
    ) -> Result<()> {
        if launch.grid.0 == 0 {
            return Ok(());
        }
        let maps = Arg::Ptr(self.maps.as_ref().map_or(DevicePtr::NULL, TensorMaps::ptr));
        let heads = Arg::Ptr(self.heads.at(first));
        let args = [Arg::Ptr(projections), heads, maps, Arg::U32(self.d_model), Arg::Ptr(stats)];
        // SAFETY: 1. the arguments are the kernels'; 2. the tables are the group's and reach the weights and vectors that the
        // engine's maker's caller promised; 3. every head has its own rows.
        unsafe { kernel.launch(stream, *launch, &args) }
    }
}
