//! Channel statistics by the copy engine, a block a head: 16-bit weights on Hopper.

use super::group::Tables;
use super::tables::{Dtype, LayerInput, NormBlock, Projection};
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::cuda::{sources, tensor_map};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct HeadNorms {
    kernel: Kernel,
    launch: Launch,
    heads: Buffer<NormBlock>,
    maps: Buffer<u64>,
    d_model: u32,
}

/// True if weights lie along the channels, false along the model dimension; `None` if the copy engine cannot bring them or the
/// vectors of their norm.
fn along_channels(device: &Device, projections: &[Projection]) -> Option<bool> {
    let first = projections.first().filter(|_| device.arch().compute == 90)?;
    let rows = |p: &Projection| p.col_stride == 1 && p.row_stride > 0 && p.row_stride % 8 == 0;
    let columns = |p: &Projection| p.row_stride == 1 && p.col_stride > 0 && p.col_stride % 8 == 0;
    let fits = |p: &Projection| {
        let aligned = [p.weight, p.gain, p.shift].iter().all(|address| address % 16 == 0);
        aligned && p.d_model.is_multiple_of(8) && p.dtype == first.dtype && p.dtype != Dtype::F32 as u32
    };
    match projections.iter().all(fits) {
        true if projections.iter().all(rows) => Some(false),
        true if projections.iter().all(columns) => Some(true),
        _ => None,
    }
}

fn heads(layers: &[LayerInput], built: &Tables) -> Vec<NormBlock> {
    let heads_of = |(index, p): (usize, &Projection)| {
        let first_rows = (0..p.rows).step_by(layers[0].d_head);
        first_rows.map(move |first| NormBlock { projection: index as u32, first })
    };
    built.projections.iter().enumerate().flat_map(heads_of).collect()
}

/// Roundings that the kernel's sums over `d_model` inputs are deep.
pub(super) fn depth(d_model: usize) -> usize {
    let tiles = d_model.div_ceil(64);
    let mut deep = 1;
    while 16 * deep * deep < tiles {
        deep *= 2;
    }
    8 * deep + tiles.div_ceil(deep) + 6
}

impl HeadNorms {
    /// `None` where `scale_norms` has to do it.
    pub fn new(device: &Device, layers: &[LayerInput], built: &Tables) -> Result<Option<Self>> {
        let Some(columns) = along_channels(device, &built.projections) else { return Ok(None) };
        let (r, d) = (layers[0].d_head as u32, layers[0].d_model as u32);
        let sums = layers.iter().any(|l| l.mean_removed || l.shift != DevicePtr::NULL);
        let turns = built.projections.iter().any(|p| p.rotary > 0);
        let f16 = built.projections.iter().any(|p| p.dtype == Dtype::F16 as u32);
        let defines = [
            ("D_HEAD", r.to_string()),
            ("ALONG_CHANNELS", u32::from(columns).to_string()),
            ("SUMS", u32::from(sums).to_string()),
            ("TURNS", u32::from(turns).to_string()),
            ("F16", u32::from(f16).to_string()),
            ("VECTORS", (layers[0].vector_dtype as u32).to_string()),
        ];
        let module = device.module(sources::NORMS_HEADS, &defines)?;
        let kernel = module.overlapping_kernel("scale_norms_heads")?;
        let (threads, shared) = (module.constant("BLOCK_THREADS")? as u32, module.constant("SHARED_BYTES")? as u32);
        kernel.allow_shared(shared)?;
        let mut maps = Vec::with_capacity(16 * built.projections.len());
        for p in &built.projections {
            maps.extend(if columns {
                tensor_map::tensor_map_16bit(p.weight, p.rows.into(), p.d_model.into(), p.col_stride as u64, 64)?
            } else {
                tensor_map::tensor_map_16bit(p.weight, p.d_model.into(), p.rows.into(), p.row_stride as u64, r)?
            });
        }
        let heads = heads(layers, built);
        let launch = Launch::linear(heads.len(), threads, shared);
        let (heads, maps) = (device.upload(&heads)?, device.upload(&maps)?);
        Ok(Some(Self { kernel, launch, heads, maps, d_model: d }))
    }

    /// Puts the statistics of every channel on `stream`.
    pub fn launch(&self, stream: &Stream, projections: DevicePtr, stats: DevicePtr) -> Result<()> {
        let (heads, maps) = (Arg::Ptr(self.heads.ptr()), Arg::Ptr(self.maps.ptr()));
        let args = [Arg::Ptr(projections), heads, maps, Arg::U32(self.d_model), Arg::Ptr(stats)];
        // SAFETY: 1. the arguments are the kernel's; 2. the tables are the group's and reach the weights and vectors that the
        // engine's maker's caller promised; 3. every head has its own rows.
        unsafe { self.kernel.launch(stream, self.launch, &args) }
    }

    pub fn bytes(&self) -> usize {
        8 * (self.heads.len() + self.maps.len())
    }

    /// The same before anything is compiled or allocated.
    pub fn bytes_for(device: &Device, layers: &[LayerInput], built: &Tables) -> usize {
        match along_channels(device, &built.projections) {
            Some(_) => 8 * heads(layers, built).len() + 128 * built.projections.len(),
            None => 0,
        }
    }
}
