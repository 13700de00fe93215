//! Norms of V channels beside the certificates (`kernels/scale_values.cu`).

use super::grams::Grams;
use super::tables::{Dtype, LayerInput};
use crate::cuda::sources;
use crate::cuda::{Arg, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Values {
    kernel: Kernel,
    launch: Launch,
    layers: usize,
    rows: usize,
}

/// Dynamic shared memory of the kernel (asserted there).
const SHARED: u32 = 98_432;

impl Values {
    /// What a copy brings: input channels and channels.
    pub const TILE: [u32; 2] = [256, 32];

    pub fn new(device: &Device, layers: &[LayerInput]) -> Result<Self> {
        let first = &layers[0];
        let f16 = u32::from(first.q.weight.dtype == Dtype::F16).to_string();
        let kernel = device.module(sources::VALUES, &[("F16", f16)])?.overlapping_kernel("scale_values")?;
        kernel.allow_shared(SHARED)?;
        let launch = Launch::linear(device.processors(), 288, SHARED);
        Ok(Self { kernel, launch, layers: layers.len(), rows: first.n_kv * first.d_head })
    }

    /// Behind a launch that waited for what came before it; what comes next may start at once.
    pub fn run(&self, stream: &Stream, projections: DevicePtr, grams: &Grams, stats: DevicePtr) -> Result<()> {
        let (layers, rows) = (Arg::U32(self.layers as u32), Arg::U32(self.rows as u32));
        let (maps, gains, tiles) = grams.prepared();
        let (maps, gains) = (Arg::Ptr(maps), Arg::Ptr(gains));
        let args = [Arg::Ptr(projections), maps, gains, Arg::U32(tiles), layers, rows, Arg::Ptr(stats)];
        // SAFETY: 1. the arguments are the kernel's, in order; 2. the tables are the engine's, three projections a layer, and
        // reach the weights and biases that its maker's caller promised; 3. nothing else writes the rows of V.
        unsafe { self.kernel.launch_early(stream, self.launch, &args, true) }
    }
}
