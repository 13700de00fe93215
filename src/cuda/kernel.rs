//! Kernels of loaded sources: their arguments and launches.

use super::driver::{OutsideCaptures, failed};
use super::pointer::DevicePtr;
use super::stream::Stream;
use crate::error::{Error, Result};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, DevicePtr as _, result, sys};
use std::ffi::c_void;
use std::sync::Arc;

/// A loaded source.
#[derive(Clone, Debug)]
pub struct Module {
    pub(super) inner: Arc<CudaModule>,
    pub(super) name: &'static str,
    pub(super) setup: Arc<CudaStream>,
}

impl Module {
    /// An entry point.
    ///
    /// # Errors
    /// If the source has none of that name.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        // The driver loads functions when they are first asked for.
        let _setup = OutsideCaptures::new();
        let inner =
            self.inner.load_function(name).map_err(failed(format_args!("{} has no kernel {name}", self.name)))?;
        Ok(Kernel { inner, name })
    }

    /// An entry point that overlaps with others of the kind. A multiprocessor changes how it divides its first-level memory only
    /// when it is idle; these ask for the same division, the largest part as shared memory, so none has to wait for that.
    ///
    /// # Errors
    /// If the source has none of that name.
    pub(crate) fn overlapping_kernel(&self, name: &'static str) -> Result<Kernel> {
        let kernel = self.kernel(name)?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let doing = format_args!("asking for shared memory for {name}");
        kernel.inner.set_attribute(attribute, 100).map_err(failed(doing))?;
        Ok(kernel)
    }

    /// The value of an `int` that the source declares `__constant__`. Waits for a copy from the device.
    ///
    /// # Errors
    /// If the source has none of that name.
    pub(crate) fn constant(&self, name: &str) -> Result<i32> {
        let doing = format_args!("{} has no constant {name}", self.name);
        let _setup = OutsideCaptures::new();
        let place = self.inner.get_global(name, &self.setup).map_err(failed(doing))?;
        if place.len() != size_of::<i32>() {
            return Err(Error::cuda(format_args!("{}: {name} has {} bytes", self.name, place.len())));
        }
        let mut value = [0i32];
        // SAFETY: the module owns four bytes there, and the stream is waited for.
        unsafe { result::memcpy_dtoh_async(&mut value, place.device_ptr(&self.setup).0, self.setup.cu_stream()) }
            .and_then(|()| self.setup.synchronize())
            .map_err(failed(doing))?;
        Ok(value[0])
    }
}

/// An entry point of a loaded source.
#[derive(Clone, Debug)]
pub struct Kernel {
    inner: CudaFunction,
    name: &'static str,
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory a block, in bytes.
    pub shared: u32,
}

impl Launch {
    /// A one-dimensional launch.
    pub fn linear(blocks: usize, block: u32, shared: u32) -> Self {
        Self { grid: (blocks as u32, 1, 1), block, shared }
    }
}

/// One kernel argument by value.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// A pointer.
    Ptr(DevicePtr),
    /// `unsigned int`.
    U32(u32),
    /// `double`.
    F64(f64),
    /// A small struct, as 32-bit words.
    Words([u32; 12]),
}

impl Kernel {
    /// Name of the entry point.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Allows launches with up to `bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// If the device has less.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.inner
            .set_attribute(attribute, bytes as i32)
            .map_err(failed(format_args!("{} wants {bytes} bytes of shared memory", self.name)))
    }

    /// Puts the kernel on a stream. Asynchronous, and capturable.
    ///
    /// # Errors
    /// If the driver refuses the configuration. Errors of the kernel itself appear at a later synchronisation.
    ///
    /// # Safety
    /// 1. `args` has the number, the order and the sizes of the kernel's parameters.
    /// 2. Every address it reaches, through arguments or through tables in device memory, is valid for its reads and
    ///    writes until the kernel has run, also at each replay of a graph that captured it.
    /// 3. Nothing else writes what it reads, or touches what it writes, without being ordered by a stream.
    pub unsafe fn launch(&self, stream: &Stream, launch: Launch, args: &[Arg]) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { self.launch_early(stream, launch, args, false) }
    }

    /// As [`Kernel::launch`]. `early`: the kernel may start before the one in front of it on the stream has ended, and waits
    /// for it itself (`griddepcontrol.wait`; Hopper and later).
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub(crate) unsafe fn launch_early(&self, stream: &Stream, launch: Launch, args: &[Arg], early: bool) -> Result<()> {
        let mut values: Vec<Arg> = args.to_vec();
        let mut params: Vec<*mut c_void> = values
            .iter_mut()
            .map(|a| match a {
                Arg::Ptr(v) => (&raw mut v.0).cast(),
                Arg::U32(v) => (&raw mut *v).cast(),
                Arg::F64(v) => (&raw mut *v).cast(),
                Arg::Words(v) => v.as_mut_ptr().cast(),
            })
            .collect();
        // SAFETY: the parameters point into `values`, which outlives the call; the rest are the caller's promises.
        unsafe { self.launch_parameters(stream, launch, &mut params, early) }
    }

    /// As [`Kernel::launch`], with parameters of any size by address. `overlap`: the kernel may start before the one in
    /// front of it on the stream has ended, and waits for it itself (`griddepcontrol.wait`).
    ///
    /// # Safety
    /// As [`Kernel::launch`]; every pointer is to a live value of its parameter's size, which the driver copies.
    pub(crate) unsafe fn launch_parameters(
        &self,
        stream: &Stream,
        launch: Launch,
        parameters: &mut [*mut c_void],
        overlap: bool,
    ) -> Result<()> {
        let doing = format_args!("launching {} with {launch:?}", self.name);
        stream.inner.context().bind_to_thread().map_err(failed(doing))?;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: launch.grid.1,
            gridDimZ: launch.grid.2,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream.inner.cu_stream(),
            attrs: &raw mut early,
            numAttrs: overlap.into(),
        };
        // SAFETY: the configuration and its one attribute outlive the call; the rest are the caller's promises.
        unsafe {
            sys::cuLaunchKernelEx(&config, self.inner.cu_function(), parameters.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(failed(doing))
    }
}
