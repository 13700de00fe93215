//! Devices, memory, streams, graphs.
//!
//! Nothing synchronises unless its name says so. Events of the driver wrapper are off: ordering is the caller's, by
//! streams, which is what makes a capture possible.

use super::cache::{Cache, default_folder};
use super::driver::failed;
use super::nvrtc::{self, Arch, Compiled, Request};
use super::sources::Source;
use super::view::{Element, View};
use super::{DevicePtr, Module};
use crate::error::{Error, Result};
use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One GPU, through its primary context (the one PyTorch uses).
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<CudaContext>,
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
        let doing = format!("opening device {ordinal}");
        let context = CudaContext::new(ordinal).map_err(failed(&doing))?;
        // SAFETY: no buffer of the wrapper is used; `Buffer` is ordered by its users' streams.
        unsafe { context.disable_event_tracking() };
        let (major, minor) = context.compute_capability().map_err(failed(&doing))?;
        let processors = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(failed(&doing))?;
        let arch = Arch::of((major * 10 + minor) as u32);
        Ok(Self { context, cache: Cache::new(default_folder()), arch, processors: processors as usize, tally: None })
    }

    /// The same device with compiled kernels kept elsewhere (`None`: nowhere).
    pub fn with_cache(mut self, cache: Cache) -> Self {
        self.cache = cache;
        self
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
    pub(super) fn shared_memory(&self) -> Result<usize> {
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
        let image = Ptx::from_binary(compiled.cubin.clone());
        let inner = self.context.load_module(image).map_err(failed(format_args!("loading {name}")))?;
        Ok(Module { inner, name, compiled: Arc::new(compiled.clone()) })
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
    pub(super) fn urgent_stream(&self) -> Result<Stream> {
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
    /// 2. It stays alive while the returned value or a [`Graph`] made from it is used.
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
                return Ok(Buffer { ptr: 0, len, context: self.context.clone(), _type: PhantomData });
            }
        }
        self.context.bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: the context is bound; the size is at least one byte, as the driver asks.
        let ptr = unsafe { result::malloc_sync(bytes.max(1)) }
            .map_err(failed(format_args!("allocating {bytes} bytes on the device")))?;
        Ok(Buffer { ptr, len, context: self.context.clone(), _type: PhantomData })
    }

    /// What `make` sets up on this device, and the bytes of device memory that it asks for. `dry`: none is allocated, so what
    /// is made can be dropped and nothing else.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn counting<T>(&self, dry: bool, make: impl FnOnce(&Self) -> Result<T>) -> Result<(T, usize)> {
        let tally = Arc::new(Tally { bytes: AtomicUsize::new(0), dry });
        let made = make(&Self { tally: Some(tally.clone()), ..self.clone() })?;
        Ok((made, tally.bytes.load(Ordering::Relaxed)))
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
        // SAFETY: the range is the buffer's own, and the context was bound by `allocate`.
        unsafe { result::memset_d8_sync(buffer.ptr, 0, len * size_of::<T>()) }.map_err(failed("clearing memory"))?;
        wait_for_legacy_stream(&self.context, "clearing memory")?;
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

/// Waits for what the driver still does on the legacy stream: it returns once a fill is asked for, or once values to copy
/// lie in its own memory, and other streams do not wait for that one.
fn wait_for_legacy_stream(context: &Arc<CudaContext>, doing: &'static str) -> Result<()> {
    context.default_stream().synchronize().map_err(failed(doing))
}

/// Owned device memory of `len` values. Freed on drop, after the device has finished with it.
#[derive(Debug)]
pub struct Buffer<T> {
    ptr: sys::CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
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
        self.context.synchronize().map_err(failed("waiting for the device"))?;
        self.fill(data)
    }

    /// The same of memory that nothing uses yet.
    fn fill(&self, data: &[T]) -> Result<()> {
        if data.is_empty() || self.ptr == 0 {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: the buffer holds `data.len()` values of plain data and the call returns when the host memory was read.
        unsafe { result::memcpy_htod_sync(self.ptr, data) }.map_err(failed("copying to the device"))?;
        wait_for_legacy_stream(&self.context, "copying to the device")
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
        self.context.synchronize().map_err(failed("waiting for the device"))?;
        // SAFETY: both sides hold `len` values of plain data, and the device is idle.
        unsafe { result::memcpy_dtoh_sync(&mut data, self.ptr) }.map_err(failed("copying from the device"))?;
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
        if self.ptr != 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: the pointer came from `malloc_sync` and is freed once; the call waits for work that uses it. After
            // a lost context it fails, and there is nothing to do.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}

/// An order of work on a device.
#[derive(Clone, Debug)]
pub struct Stream {
    pub(super) inner: Arc<CudaStream>,
}

impl Stream {
    /// Waits until everything on the stream has run.
    ///
    /// # Errors
    /// Errors of earlier work appear here.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.synchronize().map_err(failed("waiting for a stream"))
    }

    /// Sets every byte of an array without gaps to zero. Capturable.
    ///
    /// # Errors
    /// If the array has gaps, or the driver refuses.
    pub fn clear<const R: usize>(&self, view: &View<R>) -> Result<()> {
        if !view.is_dense() {
            return Err(Error::argument("an array with gaps cannot be cleared"));
        }
        let bytes = view.extents().iter().product::<usize>() * view.element().size();
        self.inner.context().bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: the view's maker promised its memory, for work on streams.
        unsafe { result::memset_d8_async(view.ptr().0, 0, bytes, self.inner.cu_stream()) }
            .map_err(failed("clearing memory"))
    }

    /// Lets what this stream is given next wait for what `other` has been given so far. Capturable.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn wait_for(&self, other: &Self) -> Result<()> {
        self.inner.join(&other.inner).map_err(failed("ordering two streams"))
    }

    /// Records what `work` puts on this stream as a graph; nothing runs yet. The graph keeps `work`, so the engines that it borrows
    /// cannot go before the graph does.
    ///
    /// # Errors
    /// Those of `work`, or if something in it cannot be captured.
    pub fn capture<'a>(&self, mut work: impl FnMut(&Self) -> Result<()> + 'a) -> Result<Graph<'a>> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.inner.begin_capture(mode).map_err(failed("beginning a capture"))?;
        let done = work(self);
        // The capture has to end, whatever `work` said.
        let graph = self.inner.end_capture(sys::CUgraphInstantiate_flags(0));
        done?;
        let inner =
            graph.map_err(failed("ending a capture"))?.ok_or_else(|| Error::cuda("the captured graph is empty"))?;
        inner.upload().map_err(failed("uploading a graph"))?;
        Ok(Graph { inner, _work: Box::new(work) })
    }

    /// Marks this point of the stream, with its time.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record(&self) -> Result<Event> {
        let inner = self
            .inner
            .record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(failed("recording an event"))?;
        Ok(Event { inner })
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    inner: CudaEvent,
}

impl Event {
    /// Milliseconds from this event to `end`. Waits for both.
    ///
    /// # Errors
    /// If the work between them failed.
    pub fn milliseconds_to(&self, end: &Self) -> Result<f32> {
        self.inner.elapsed_ms(&end.inner).map_err(failed("reading a time"))
    }
}

/// Captured work.
pub struct Graph<'a> {
    inner: CudaGraph,
    /// Holds what the captured kernels touch.
    _work: Box<dyn Held + 'a>,
}

/// Anything that is kept to be dropped later.
trait Held {}
impl<T> Held for T {}

impl std::fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl Graph<'_> {
    /// Runs it on the stream it was captured from. Asynchronous.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn launch(&self) -> Result<()> {
        self.inner.launch().map_err(failed("launching a graph"))
    }
}
