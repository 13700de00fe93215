//! What the engines of the forward and of the backward share: kernels loaded as calls need them, and the maps of operands.

use super::params::outer_strides;
use super::sizes::native;
use crate::cuda::per_key::PerKey;
use crate::cuda::tensor_map::{Boxes, MapType, Swizzle, TensorMap, tensor_map};
use crate::cuda::{Arch, Buffer, Device, Element, Kernel, Request, View};
use crate::error::{Error, Result};
use std::hash::Hash;
use std::sync::Arc;

/// Compiled form of one kernel.
pub(super) trait Variant: Copy + Eq + Hash {
    fn request(self) -> Request;
    fn entry(self) -> &'static str;
    /// Whether the module tells how much dynamic shared memory a block takes.
    fn has_shared(self) -> bool;
}

#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub kernel: Kernel,
    /// Dynamic shared memory of a block.
    pub shared: u32,
}

/// Kernels of one device, each compiled and loaded by the first call that asks for it.
#[derive(Debug)]
pub(super) struct Kernels<V> {
    pub device: Device,
    loaded: PerKey<V, Arc<Loaded>>,
    /// The descale of operands that have none.
    one: Buffer<f32>,
}

impl<V: Variant> Kernels<V> {
    /// Nothing is compiled yet. `what` needs the device to be of compute capability 9.0.
    pub fn new(device: &Device, what: &str) -> Result<Self> {
        if device.arch() != Arch::SM90A {
            return Err(Error::unsupported(format_args!(
                "{what} needs wgmma of compute capability 9.0 (H100, H200), and this device is {}",
                device.arch()
            )));
        }
        Ok(Self { device: device.clone(), loaded: PerKey::default(), one: device.upload(&[1.0])? })
    }

    /// Calls that ask for other variants do not wait for this one.
    pub fn load(&self, variant: V) -> Result<Arc<Loaded>> {
        self.loaded.get_or_make(variant, || {
            let request = variant.request();
            let module = self.device.module(request.source, &request.defines)?;
            let kernel = module.kernel(variant.entry())?;
            let mut shared = 0;
            if variant.has_shared() {
                shared = u32::try_from(module.constant("SHARED_BYTES")?).map_err(|_| {
                    Error::cuda(format_args!("{} tells a negative size of shared memory", request.source.name))
                })?;
                kernel.allow_shared(shared)?;
            }
            Ok(Arc::new(Loaded { kernel, shared }))
        })
    }

    /// Address and strides of a descale; of the one kept here where there is none.
    pub fn descale(&self, given: Option<&View<2>>) -> (u64, [i64; 2]) {
        given.map_or((self.one.ptr().0, [0, 0]), |x| (x.ptr().0, x.strides()))
    }
}

/// Map of an operand in boxes of `rows` positions of `heads` heads, heads innermost, in runs of columns: E4M3 of 128 or 64, 16-bit types
/// of 64. What a run has beyond the operand's columns reads as zero.
pub(super) fn operand_map(x: &View<4>, heads: usize, rows: usize) -> Result<TensorMap> {
    // E4M3: `kRun` of kernels/attention/config.cuh.
    let columns = if x.element().size() == 2 || matches!(native(x.extents()[3]), 64 | 192) { 64 } else { 128 };
    run_map(x, columns, heads, rows)
}

/// The same in runs of so many columns; what a run has beyond the operand's reads as zero.
pub(super) fn run_map(x: &View<4>, columns: usize, heads: usize, rows: usize) -> Result<TensorMap> {
    let [batch, length, all_heads, d] = x.extents().map(|n| n as u64);
    let size = x.element().size() as u64;
    // A dimension of one element may have any stride, and the copy engine takes multiples of 16 bytes.
    let [by_batch, by_row, by_head] = outer_strides(x).map(|s| (s as u64 * size).next_multiple_of(16));
    let element = match x.element() {
        Element::F16 => MapType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Element::Bf16 => MapType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => MapType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    tensor_map(&Boxes {
        address: x.ptr().0,
        element,
        extents: &[d, all_heads, length, batch],
        strides: &[by_head, by_row, by_batch],
        tile: &[columns as u32, heads as u32, rows as u32, 1],
        swizzle: if columns as u64 * size == 128 {
            Swizzle::CU_TENSOR_MAP_SWIZZLE_128B
        } else {
            Swizzle::CU_TENSOR_MAP_SWIZZLE_64B
        },
        far: false,
    })
}
