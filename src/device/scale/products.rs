//! W_Q W_K^T without rotation, from Grams (`kernels/scale/products.cu`).

use super::tables::{LayerInput, Product};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

/// The products of a group of layers, one per query head.
#[derive(Debug)]
pub(super) struct Products {
    kernel: Kernel,
    launch: Launch,
    /// Heads in the Gram table: of q, then of k.
    pairs: Buffer<[u32; 2]>,
    /// Symmetric matrices whose largest eigenvalues are the squares of the norms, as Grams lie.
    pub matrices: Buffer<f32>,
    pub products: Buffer<Product>,
    /// The quadratic forms of the constants of k, then of q.
    pub forms: Buffer<[f64; 2]>,
}

/// f32 values of a head's matrix: its upper 64 x 64 blocks.
fn matrix_values(r: usize) -> usize {
    let side = r.div_ceil(64);
    side * (side + 1) / 2 * 4096
}

/// Columns of a matrix that the kernel keeps in shared memory at a time, and the bytes of all that it keeps there.
fn chunk(r: usize, shared: usize) -> (usize, usize) {
    let tiles = r.div_ceil(16);
    let bytes = |columns: usize| 1024 * tiles * (tiles + 1) / 2 + 2 * 16 * tiles * (2 * columns + 16);
    let columns = [16 * tiles, 128, 64, 16].into_iter().find(|&n| n <= 16 * tiles && bytes(n) + STATIC <= shared);
    let columns = columns.unwrap_or(16);
    (columns, bytes(columns))
}

/// Shared memory that the kernel declares, at most.
const STATIC: usize = 8192;

impl Products {
    /// `pairs`: of the query heads of all layers.
    pub fn new(device: &Device, layer: &LayerInput, pairs: &[[u32; 2]]) -> Result<Self> {
        let r = layer.d_head;
        let (columns, shared) = chunk(r, device.shared_memory()?);
        let defines = [("D_HEAD", r.to_string()), ("CHUNK", columns.to_string())];
        let kernel = device.module(sources::PRODUCTS, &defines)?.overlapping_kernel("scale_products")?;
        kernel.allow_shared(shared as u32)?;
        Ok(Self {
            kernel,
            launch: Launch::linear(pairs.len(), 128 * r.div_ceil(64) as u32, shared as u32),
            pairs: device.upload(pairs)?,
            matrices: device.zeros(pairs.len() * matrix_values(r))?,
            products: device.zeros(pairs.len())?,
            forms: device.zeros(pairs.len())?,
        })
    }

    /// `overlaps`: may start before the launch in front has ended.
    pub fn launch(&self, stream: &Stream, inputs: [Arg; 3], shape: Arg, overlaps: bool) -> Result<()> {
        let [heads, partials, stats] = inputs;
        let at = |address: DevicePtr| Arg::Ptr(address);
        let results = [at(self.matrices.ptr()), at(self.products.ptr()), at(self.forms.ptr())];
        let args = [&[at(self.pairs.ptr()), heads, partials, stats, shape][..], &results].concat();
        // SAFETY: 1. the arguments are the kernel's, in order; 2. all tables are the engine's; 3. every block has its own
        // results, and the Grams are finished by the stream's order or the kernel's wait.
        unsafe { self.kernel.launch_early(stream, self.launch, &args, overlaps) }
    }
}
