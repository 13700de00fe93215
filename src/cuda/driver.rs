//! The thin unsafe edge to the driver library.

use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use std::path::Path;
use std::sync::OnceLock;

/// True if `libcuda` can be loaded.
pub(super) fn library_loads() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading libcuda runs its initialisers, which have no precondition; the handle is dropped again.
    *FOUND.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// What `ask` gives, or a sentence: functions are looked up when first called, and the binding panics where a library, too old or
/// damaged, has none of that name.
pub(super) fn answered<T>(library: &str, ask: impl FnOnce() -> T) -> Result<T, String> {
    // What a lookup that failed leaves behind is no state of ours.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask))
        .map_err(|_| format!("{library} lacks a function that is needed: it is too old or damaged"))
}

/// The CUDA context that is current in this thread, and is again when this goes.
///
/// Every call on a [`Device`](super::Device), and every drop of what one made, leaves that device's context current. A library in the
/// same thread that takes the current context for the device that is meant, as PyTorch and the CUDA runtime do, must not find
/// another one than it left: hold one of these around calls beside such a library where there is more than one device. Without a
/// driver it does nothing.
#[derive(Debug)]
pub struct KeepCurrent {
    before: Option<sys::CUcontext>,
}

impl KeepCurrent {
    /// Remembers what is current now.
    pub fn new() -> Self {
        let mut before = std::ptr::null_mut();
        // SAFETY: the library is present, and the pointer is to a live handle.
        let asked = library_loads() && unsafe { sys::cuCtxGetCurrent(&mut before) }.result().is_ok();
        Self { before: asked.then_some(before) }
    }
}

impl Default for KeepCurrent {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for KeepCurrent {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the handle was current in this thread, or null, which makes none current. Where its owner has destroyed it
            // since, the driver refuses, and there is nothing to do.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

/// While one of these lives, calls of this thread that allocate, free or load neither fail because a capture is under way, in
/// this thread or in another, nor break that capture. What they do is no part of the graph. Without a driver it does nothing.
///
/// [`Device`](super::Device) and [`Buffer`](super::Buffer) hold one where they need it. Hold one yourself where engines are
/// dropped, since that unloads their kernels.
#[derive(Debug)]
pub struct OutsideCaptures {
    before: Option<sys::CUstreamCaptureMode>,
}

impl OutsideCaptures {
    /// Begins here.
    pub fn new() -> Self {
        Self { before: exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) }
    }
}

impl Default for OutsideCaptures {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for OutsideCaptures {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange_capture_mode(before);
        }
    }
}

/// Sets this thread's mode and gives the one before; `None` without a driver.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: the library is present, and the pointer is to a live value, which the call replaces by the mode before.
    let done = library_loads() && unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().is_ok();
    done.then_some(mode)
}

/// CUDA version that the driver supports.
pub(super) fn version() -> Result<(i32, i32), String> {
    if !library_loads() {
        return Err("no NVIDIA driver: libcuda.so.1 was not found".into());
    }
    let mut version = 0;
    // SAFETY: the library is present, and the pointer is to a live integer.
    answered("libcuda.so.1", || unsafe { sys::cuDriverGetVersion(&mut version) })?
        .result()
        .map_err(|e| e.to_string())?;
    Ok((version / 1000, version % 1000 / 10))
}

/// Drivers before CUDA 12 lack functions that Hopper's kernels need.
const OLDEST: i32 = 12;

/// Number of devices.
pub(super) fn device_count() -> Result<usize, String> {
    let (major, minor) = version()?;
    if major < OLDEST {
        return Err(format!("the driver is for CUDA {major}.{minor}, and {OLDEST} or later is needed"));
    }
    let count = answered("libcuda.so.1", || {
        result::init().map_err(|e| format!("the driver does not start: {e}"))?;
        result::device::get_count().map_err(|e| format!("the driver lists no devices: {e}"))
    })??;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Loads a library by path and never unloads it; true on success.
pub(super) fn load_for_ever(path: &Path) -> bool {
    // SAFETY: the paths come from CUDA installations; their initialisers have no precondition. The handle is leaked, so
    // no code is unmapped under a caller.
    match unsafe { libloading::Library::new(path) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// A driver error with what was being done.
pub(super) fn failed(doing: impl std::fmt::Display) -> impl FnOnce(result::DriverError) -> Error {
    move |e| {
        let hint = match e.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => " (out of device memory)",
            sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | sys::CUresult::CUDA_ERROR_LAUNCH_FAILED
            | sys::CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR => {
                " (the device context is lost: nothing more can run on it in this process)"
            }
            _ => "",
        };
        Error::cuda(format_args!("{doing}: {e}{hint}"))
    }
}
