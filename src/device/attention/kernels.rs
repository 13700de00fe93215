//! What the engines of the forward and of the backward share: kernels loaded as calls need them, and the maps of operands.

use super::sizes::outer_strides;
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
    /// What the module tells in constants.
    fn tells(self) -> Tells;
}

/// What a launch takes from constants of the module, so that the kernel alone states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tells {
    Nothing,
    /// Dynamic shared memory of a block.
    Shared,
    /// And how operands lie in it.
    Layout,
}

#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub kernel: Kernel,
    /// Dynamic shared memory of a block.
    pub shared: u32,
    /// Bytes of a run of columns of Q and K: `kRun` of kernels/attention/config.cuh.
    pub run: usize,
    /// Whether V in FP8 comes by core matrices: `kValueMatrices`.
    pub value_matrices: bool,
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
            let told = |name| {
                u32::try_from(module.constant(name)?)
                    .map_err(|_| Error::cuda(format_args!("{} tells a negative {name}", request.source.name)))
            };
            let tells = variant.tells();
            let shared = if tells == Tells::Nothing { 0 } else { told("SHARED_BYTES")? };
            if shared > 0 {
                kernel.allow_shared(shared)?;
            }
            let (run, value_matrices) = match tells {
                Tells::Layout => (told("RUN_BYTES")? as usize, told("VALUE_MATRICES")? != 0),
                _ => (0, false),
            };
            Ok(Arc::new(Loaded { kernel, shared, run, value_matrices }))
        })
    }

    /// Address and strides of a descale; of the one kept here where there is none.
    pub fn descale(&self, given: Option<&View<2>>) -> (u64, [i64; 2]) {
        given.map_or((self.one.ptr().0, [0, 0]), |x| (x.ptr().0, x.strides()))
    }
}

/// Map of an operand in boxes of `rows` positions of `heads` heads, heads innermost, in runs of so many columns. What a run has beyond
/// the operand's columns reads as zero.
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
