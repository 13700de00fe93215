//! Tensor maps: how the copy engine (TMA) reads a tensor in device memory box by box.

use super::driver::failed;
use crate::error::{Error, Result};
use cudarc::driver::sys;
pub(crate) use cudarc::driver::sys::{
    CUtensorMap as TensorMap, CUtensorMapDataType as MapType, CUtensorMapSwizzle as Swizzle,
};

/// How the copy engine reads a tensor in boxes: extents from the innermost dimension, strides in bytes from the second.
pub(crate) struct Boxes<'a> {
    pub address: u64,
    pub element: MapType,
    pub extents: &'a [u64],
    pub strides: &'a [u64],
    pub tile: &'a [u32],
    pub swizzle: Swizzle,
    /// What a copy asks of memory comes into the L2 cache in pieces of 256 bytes, not 128.
    pub far: bool,
}

/// Tensor map of `boxes`; what lies outside the extents reads as zero.
///
/// # Errors
/// If the ranks differ, or the driver refuses the shape (address or stride not a multiple of 16 bytes, a box too large).
pub(crate) fn tensor_map(boxes: &Boxes<'_>) -> Result<TensorMap> {
    let Boxes { address, element, extents, strides, tile, swizzle, far } = *boxes;
    let rank = extents.len();
    if tile.len() != rank || strides.len() + 1 != rank || rank > 5 {
        return Err(Error::cuda(format_args!("a tensor map of {rank} dimensions needs as many tile sizes")));
    }
    let mut map = TensorMap { opaque: [0; 16] };
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
            match far {
                true => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                false => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            },
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
/// in boxes of 128 bytes by `rows` rows with 128-byte swizzle; what lies outside reads as zero. `far`: as of [`Boxes`].
///
/// # Errors
/// If the driver refuses the shape (address or stride not a multiple of 16 bytes).
pub(crate) fn tensor_map_rows(
    address: u64,
    is_f32: bool,
    inner: u64,
    outer: u64,
    stride: u64,
    rows: u32,
    far: bool,
) -> Result<[u64; 16]> {
    let (element, size) = if is_f32 {
        (MapType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4)
    } else {
        (MapType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2)
    };
    let boxes = Boxes {
        address,
        element,
        extents: &[inner, outer],
        strides: &[stride * size],
        tile: &[128 / size as u32, rows],
        swizzle: Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        far,
    };
    Ok(tensor_map(&boxes)?.opaque)
}
