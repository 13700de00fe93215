//! Devices and their memory.
//!
//! Nothing synchronises unless its name says so. Events of the driver wrapper are off: ordering is the caller's, by
//! streams, which is what makes a capture possible. Setting memory up (allocating, filling, loading kernels) has a stream of
//! its own and waits for that alone, so it may run while any thread captures.

use super::cache::{Cache, default_folder};
use super::driver::{OutsideCaptures, failed};
use super::kernel::Module;
use super::nvrtc::{self, Arch, Compiled, Request};
use super::pointer::DevicePtr;
use super::sources::Source;
use super::stream::Stream;
use super::view::{Element, View};
use crate::error::{Error, Result};
use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One GPU, through its primary context (the one PyTorch uses).
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    /// Fills memory; nobody else works on it.
    setup: Arc<CudaStream>,
    cache: Cache,
    arch: Arch,
    processors: usize,
    tally: Option<Arc<Tally>>,
}

/// What a device has been asked to allocate.
#[derive(Debug)]
struct Tally {
    bytes: AtomicUsize,
    /// Nothing is allocated.
    dry: bool,
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// If there is no driver, no such device, or its context cannot be made.
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = super::driver::device_count().map_err(Error::cuda)?;
        if ordinal >= count {
            return Err(Error::cuda(format_args!("device {ordinal} does not exist: the driver lists {count}")));
        }
        super::driver::answered("libcuda.so.1", || Self::opened(ordinal)).map_err(Error::cuda)?
    }

    fn opened(ordinal: usize) -> Result<Self> {
        let _setup = OutsideCaptures::new();
        let doing = format!("opening device {ordinal}");
        let context = CudaContext::new(ordinal).map_err(failed(&doing))?;
        // SAFETY: no buffer of the wrapper is used; `Buffer` is ordered by its users' streams.
        unsafe { context.disable_event_tracking() };
        let (major, minor) = context.compute_capability().map_err(failed(&doing))?;
        let processors = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(failed(&doing))?;
        let arch = Arch::of((major * 10 + minor) as u32);
        let setup = context.new_stream().map_err(failed(&doing))?;
        let cache = Cache::new(default_folder());
        Ok(Self { context, setup, cache, arch, processors: processors as usize, tally: None })
    }

    /// Name, as the driver gives it.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn name(&self) -> Result<String> {
        self.context.name().map_err(failed("reading the device's name"))
    }

    /// Architecture that kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Streaming multiprocessors.
    pub fn processors(&self) -> usize {
        self.processors
    }

    /// Shared memory that one block may have, in bytes.
    pub(crate) fn shared_memory(&self) -> Result<usize> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let bytes = self.context.attribute(attribute).map_err(failed("asking for the size of shared memory"))?;
        Ok(bytes as usize)
    }

    /// Free and total device memory in bytes.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.context.mem_get_info().map_err(failed("asking for device memory"))
    }

    /// Compiles `source` for this device, or takes it from the cache.
    ///
    /// # Errors
    /// If NVRTC is missing, the source does not compile (the message holds the log), or the module does not load.
    pub fn module(&self, source: Source, defines: &[(&'static str, String)]) -> Result<Module> {
        let mut request = Request { source, arch: self.arch, defines: defines.to_vec() };
        // For racecheck of compute-sanitizer (`kernels/scale/ring.cuh`); slower.
        if std::env::var_os("SIGMASCALE_EVERY_LANE").is_some() {
            request = request.define("EVERY_LANE", 1);
        }
        let compiled = self.cache.get_or_build(&request, nvrtc::compiler_build()?, || nvrtc::compile(&request))?;
        self.load(source.name, &compiled)
    }

    /// Loads a compiled source.
    ///
    /// # Errors
    /// If the driver refuses it (another architecture, a damaged file).
    pub fn load(&self, name: &'static str, compiled: &Compiled) -> Result<Module> {
        let _setup = OutsideCaptures::new();
        let image = Ptx::from_binary(compiled.cubin.clone());
        let inner = self.context.load_module(image).map_err(failed(format_args!("loading {name}")))?;
        Ok(Module { inner, name, setup: self.setup.clone() })
    }

    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream { inner: self.context.new_stream().map_err(failed("making a stream"))? })
    }

    /// The same, whose blocks start before those of other streams.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn urgent_stream(&self) -> Result<Stream> {
        // A priority above the device's range is its highest.
        let inner = self.context.new_stream_with_priority(i32::MIN).map_err(failed("making a stream"))?;
        Ok(Stream { inner })
    }

    /// The legacy default stream, where PyTorch works unless told otherwise. It cannot be captured.
    pub fn default_stream(&self) -> Stream {
        Stream { inner: self.context.default_stream() }
    }

    /// Another library's stream (`CUstream` / `cudaStream_t` as an integer). It is not destroyed here.
    ///
    /// # Safety
    /// 1. `raw` is a live stream of this device's primary context.
    /// 2. It stays alive while the returned value or a [`Graph`](super::Graph) made from it is used.
    pub unsafe fn borrow_stream(&self, raw: u64) -> Stream {
        // SAFETY: the caller's two promises are the ones that the wrapper asks for.
        Stream { inner: unsafe { self.context.wrap_borrowed_stream(raw as sys::CUstream) } }
    }

    /// Device memory for `len` values; its content is undefined.
    ///
    /// # Errors
    /// If the memory is not there: nothing is changed, and the device stays usable.
    pub fn allocate<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::cuda(format_args!("{len} values of {} bytes overflow memory", size_of::<T>())))?;
        if let Some(tally) = &self.tally {
            tally.bytes.fetch_add(bytes, Ordering::Relaxed);
            if tally.dry {
                return Ok(Buffer { ptr: 0, len, setup: self.setup.clone(), _type: PhantomData });
            }
        }
        let _setup = OutsideCaptures::new();
        self.context.bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: the context is bound; the size is at least one byte, as the driver asks.
        let ptr = unsafe { result::malloc_sync(bytes.max(1)) }
            .map_err(failed(format_args!("allocating {bytes} bytes on the device")))?;
        Ok(Buffer { ptr, len, setup: self.setup.clone(), _type: PhantomData })
    }

    /// What `make` sets up on this device, and the bytes of device memory that it asks for. `dry`: none is allocated, so what
    /// is made can be dropped and nothing else.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn counting<T>(&self, dry: bool, make: impl FnOnce(&Self) -> Result<T>) -> Result<(T, usize)> {
        let tally = Arc::new(Tally { bytes: AtomicUsize::new(0), dry });
        let made = make(&Self { tally: Some(tally.clone()), ..self.clone() })?;
        Ok((made, tally.bytes.load(Ordering::Relaxed)))
    }

    /// Whether nothing is allocated here ([`Device::counting`]).
    pub(crate) fn is_dry(&self) -> bool {
        self.tally.as_ref().is_some_and(|tally| tally.dry)
    }

    /// Device memory of zeros.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn zeros<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = self.allocate::<T>(len)?;
        if len == 0 || buffer.ptr == 0 {
            return Ok(buffer);
        }
        let _setup = OutsideCaptures::new();
        // SAFETY: the range is the buffer's own, and the context was bound by `allocate`.
        unsafe { result::memset_d8_async(buffer.ptr, 0, len * size_of::<T>(), self.setup.cu_stream()) }
            .and_then(|()| self.setup.synchronize())
            .map_err(failed("clearing memory"))?;
        Ok(buffer)
    }

    /// Device memory with the values of `data`. Synchronous.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn upload<T: Pod>(&self, data: &[T]) -> Result<Buffer<T>> {
        let buffer = self.allocate::<T>(data.len())?;
        buffer.fill(data)?;
        Ok(buffer)
    }

    /// Waits until the device is idle.
    ///
    /// # Errors
    /// Errors of earlier work appear here.
    pub fn synchronize(&self) -> Result<()> {
        self.context.synchronize().map_err(failed("waiting for the device"))
    }
}

/// Owned device memory of `len` values. Freed on drop, after the device has finished with it.
#[derive(Debug)]
pub struct Buffer<T> {
    ptr: sys::CUdeviceptr,
    len: usize,
    setup: Arc<CudaStream>,
    _type: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Address of the first value.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr)
    }

    /// Address of value `index`.
    ///
    /// # Panics
    /// If `index` is past the end.
    pub fn at(&self, index: usize) -> DevicePtr {
        assert!(index <= self.len, "value {index} of {}", self.len);
        DevicePtr(self.ptr + (index * size_of::<T>()) as u64)
    }

    /// The buffer as an array without gaps.
    ///
    /// # Errors
    /// If the extents ask for more bytes than the buffer has.
    ///
    /// # Safety
    /// As [`View::new`]: the buffer outlives all work that is given the view, and graphs of it.
    pub unsafe fn view<const R: usize>(&self, element: Element, extents: [usize; R]) -> Result<View<R>> {
        let bytes = extents.iter().try_fold(element.size(), |a, &b| a.checked_mul(b));
        if bytes.is_none_or(|bytes| bytes > self.len * size_of::<T>()) {
            return Err(Error::argument(format_args!(
                "{extents:?} of {element:?} do not lie in a buffer of {}",
                self.len
            )));
        }
        // SAFETY: the elements lie in the buffer; the rest is the caller's promise.
        Ok(unsafe { View::dense(self.ptr(), element, extents) })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `data` to the device, behind all work that any stream has been given. Waits for the device.
    ///
    /// # Errors
    /// If the lengths differ or the driver fails; errors of earlier work appear here.
    pub fn write(&self, data: &[T]) -> Result<()> {
        if data.len() != self.len {
            return Err(Error::cuda(format_args!("{} values do not fill a buffer of {}", data.len(), self.len)));
        }
        self.wait()?;
        self.fill(data)
    }

    /// The same of memory that nothing uses yet.
    fn fill(&self, data: &[T]) -> Result<()> {
        if data.is_empty() || self.ptr == 0 {
            return Ok(());
        }
        let _setup = OutsideCaptures::new();
        self.setup.context().bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: the buffer holds `data.len()` values of plain data, which live until the stream has been waited for.
        unsafe { result::memcpy_htod_async(self.ptr, data, self.setup.cu_stream()) }
            .and_then(|()| self.setup.synchronize())
            .map_err(failed("copying to the device"))
    }

    fn wait(&self) -> Result<()> {
        self.setup.context().synchronize().map_err(failed("waiting for the device"))
    }

    /// Copies all values to the host. Waits for the device.
    ///
    /// # Errors
    /// If the driver fails; errors of earlier work appear here.
    pub fn read(&self) -> Result<Vec<T>> {
        let mut data = vec![T::zeroed(); self.len];
        if data.is_empty() {
            return Ok(data);
        }
        self.wait()?;
        // SAFETY: both sides hold `len` values of plain data, the device is idle, and the stream is waited for.
        unsafe { result::memcpy_dtoh_async(&mut data, self.ptr, self.setup.cu_stream()) }
            .and_then(|()| self.setup.synchronize())
            .map_err(failed("copying from the device"))?;
        Ok(data)
    }

    /// Sets every byte to zero, in the order of `stream`. Capturable.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear(&self, stream: &Stream) -> Result<()> {
        stream.inner.context().bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: the range is the buffer's own; dropping it waits for the device.
        unsafe { result::memset_d8_async(self.ptr, 0, self.len * size_of::<T>(), stream.inner.cu_stream()) }
            .map_err(failed("clearing memory"))
    }

    /// Copies from another buffer of the same length, in the order of `stream`.
    ///
    /// # Errors
    /// If the lengths differ or the driver refuses.
    pub fn copy_from(&mut self, source: &Self, stream: &Stream) -> Result<()> {
        if source.len != self.len {
            return Err(Error::cuda(format_args!("{} values do not fill a buffer of {}", source.len, self.len)));
        }
        stream.inner.context().bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: both buffers own `len` values; dropping either waits for the device.
        unsafe { result::memcpy_dtod_async(self.ptr, source.ptr, self.len * size_of::<T>(), stream.inner.cu_stream()) }
            .map_err(failed("copying on the device"))
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.ptr == 0 {
            return;
        }
        let _setup = OutsideCaptures::new();
        if self.setup.context().bind_to_thread().is_ok() {
            // SAFETY: the pointer came from `malloc_sync` and is freed once; the call waits for work that uses it. After
            // a lost context it fails, and there is nothing to do.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}
