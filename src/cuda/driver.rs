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

/// How the copy engine reads a tensor in boxes: extents from the innermost dimension, strides in bytes from the second.
pub(super) struct Boxes<'a> {
    pub address: u64,
    pub element: sys::CUtensorMapDataType,
    pub extents: &'a [u64],
    pub strides: &'a [u64],
    pub tile: &'a [u32],
    pub swizzle: sys::CUtensorMapSwizzle,
}

/// Tensor map of `boxes`; what lies outside the extents reads as zero.
///
/// # Errors
/// If the ranks differ, or the driver refuses the shape (address or stride not a multiple of 16 bytes, a box too large).
pub(super) fn tensor_map(boxes: &Boxes<'_>) -> Result<sys::CUtensorMap> {
    let Boxes { address, element, extents, strides, tile, swizzle } = *boxes;
    let rank = extents.len();
    if tile.len() != rank || strides.len() + 1 != rank || rank > 5 {
        return Err(Error::cuda(format_args!("a tensor map of {rank} dimensions needs as many tile sizes")));
    }
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let steps = [1u32; 5];
    // SAFETY: every array has the dimensions (one stride less) that the rank says, and outlives the call. The address is
    // only stored.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            element,
            rank as u32,
            address as *mut std::ffi::c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(failed(format_args!(
        "describing {extents:?} with strides {strides:?} at {address:#x} to the copy engine"
    )))?;
    Ok(map)
}

/// Tensor map of a 2-D matrix of 16-bit or f32 values, `inner` contiguous ones by `outer` rows `stride` values apart, brought
/// in boxes of 128 bytes by `rows` rows with 128-byte swizzle; what lies outside reads as zero.
///
/// # Errors
/// If the driver refuses the shape (address or stride not a multiple of 16 bytes).
pub(super) fn tensor_map_rows(
    address: u64,
    is_f32: bool,
    inner: u64,
    outer: u64,
    stride: u64,
    rows: u32,
) -> Result<[u64; 16]> {
    let (element, size) = if is_f32 {
        (sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4)
    } else {
        (sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2)
    };
    let boxes = Boxes {
        address,
        element,
        extents: &[inner, outer],
        strides: &[stride * size],
        tile: &[128 / size as u32, rows],
        swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    Ok(tensor_map(&boxes)?.opaque)
}
