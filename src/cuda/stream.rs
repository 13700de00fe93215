//! Streams, events and graphs: the order of work on a device.

use super::driver::failed;
use super::view::View;
use crate::error::{Error, Result};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, result, sys};
use std::sync::Arc;

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
        self.bind()?;
        // SAFETY: the view's maker promised its memory, for work on streams.
        unsafe { result::memset_d8_async(view.ptr().0, 0, bytes, self.inner.cu_stream()) }
            .map_err(failed("clearing memory"))
    }

    /// Makes the stream's device current for this thread, which descriptions of arrays need; launches do it by themselves.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn bind(&self) -> Result<()> {
        self.inner.context().bind_to_thread().map_err(failed("binding the device"))
    }

    /// Lets what this stream is given next wait for what `other` has been given so far. Capturable.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn wait_for(&self, other: &Self) -> Result<()> {
        self.inner.join(&other.inner).map_err(failed("ordering two streams"))
    }

    /// What tells it from other streams.
    pub(crate) fn address(&self) -> usize {
        self.inner.cu_stream() as usize
    }

    /// Whether its work goes to a graph that is being captured, or to one whose capture failed and has not ended.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let status = self.inner.capture_status().map_err(failed("asking whether a stream is captured"))?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
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
