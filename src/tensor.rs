//! Borrowed, strided matrix views over raw little-endian bytes.
//!
//! A [`MatrixView`] never owns or copies weights: it is a window onto a memory map (or a slice) with a dtype, a shape
//! and strides in elements, so that `[out, in]` and Conv1D `[in, out]` storage, fused QKV and head slices are all the
//! same type. Reading converts to f64, which is exact for every dtype.

use crate::error::{Error, Result};
use half::{bf16, f16};
use std::sync::Arc;

/// Element types of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// OCP FP8 E4M3 (maximum 448).
    E4m3,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }
}

/// Dequantisation multipliers of an FP8 matrix, one for each `block.0 x block.1` tile (a whole-tensor scale is one tile,
/// a per-channel scale has tiles of one row).
#[derive(Clone, Debug)]
pub struct BlockScale {
    /// Row-major grid of multipliers.
    pub values: Arc<[f32]>,
    /// Rows and columns of one tile.
    pub block: (usize, usize),
    /// Tiles in a row of the grid.
    pub grid_cols: usize,
}

/// A borrowed matrix: `rows x cols` elements at `offset + row * strides.0 + col * strides.1` (in elements).
#[derive(Clone, Debug)]
pub struct MatrixView<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
    offset: usize,
    rows: usize,
    cols: usize,
    strides: (usize, usize),
    scale: Option<BlockScale>,
    /// Position of this view's first element in the grid of `scale`, and whether rows and columns are swapped there.
    scale_origin: (usize, usize),
    transposed: bool,
}

impl<'a> MatrixView<'a> {
    /// A dense row-major `rows x cols` matrix over `bytes`.
    ///
    /// # Errors
    /// If `bytes` does not hold exactly `rows * cols` elements.
    pub fn dense(bytes: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> Result<Self> {
        let want = rows.checked_mul(cols).and_then(|n| n.checked_mul(dtype.size()));
        if want != Some(bytes.len()) {
            return Err(Error::argument(format_args!(
                "a {rows} x {cols} matrix of {dtype:?} does not have {} bytes",
                bytes.len()
            )));
        }
        Ok(Self {
            bytes,
            dtype,
            offset: 0,
            rows,
            cols,
            strides: (cols, 1),
            scale: None,
            scale_origin: (0, 0),
            transposed: false,
        })
    }

    /// A dense row-major matrix over f32 values.
    ///
    /// # Errors
    /// If `values` does not hold exactly `rows * cols` elements.
    pub fn from_f32(values: &'a [f32], rows: usize, cols: usize) -> Result<Self> {
        Self::dense(bytemuck::cast_slice(values), Dtype::F32, rows, cols)
    }

    /// A dense row-major matrix over f64 values.
    ///
    /// # Errors
    /// If `values` does not hold exactly `rows * cols` elements.
    pub fn from_f64(values: &'a [f64], rows: usize, cols: usize) -> Result<Self> {
        Self::dense(bytemuck::cast_slice(values), Dtype::F64, rows, cols)
    }

    /// The same matrix with dequantisation multipliers (before any slicing or transposition).
    pub fn with_scale(mut self, scale: BlockScale) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Element type in storage.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Strides of rows and columns, in elements.
    pub fn strides(&self) -> (usize, usize) {
        self.strides
    }

    /// Rows `start .. start + rows`.
    ///
    /// # Panics
    /// If the range leaves the matrix.
    pub fn slice_rows(&self, start: usize, rows: usize) -> Self {
        assert!(start + rows <= self.rows, "rows {start}..{} of {}", start + rows, self.rows);
        let mut view = self.clone();
        view.offset += start * self.strides.0;
        view.rows = rows;
        if self.transposed {
            view.scale_origin.1 += start;
        } else {
            view.scale_origin.0 += start;
        }
        view
    }

    /// Columns `start .. start + cols`.
    ///
    /// # Panics
    /// If the range leaves the matrix.
    pub fn slice_cols(&self, start: usize, cols: usize) -> Self {
        self.transpose().slice_rows(start, cols).transpose()
    }

    /// Rows and columns swapped, without moving anything.
    pub fn transpose(&self) -> Self {
        let mut view = self.clone();
        (view.rows, view.cols) = (self.cols, self.rows);
        view.strides = (self.strides.1, self.strides.0);
        view.transposed = !self.transposed;
        view
    }

    /// Element `(row, col)` as f64 (exact).
    ///
    /// # Panics
    /// If the position leaves the matrix.
    pub fn get(&self, row: usize, col: usize) -> f64 {
        assert!(row < self.rows && col < self.cols, "({row}, {col}) of {:?}", self.shape());
        let index = self.offset + row * self.strides.0 + col * self.strides.1;
        let size = self.dtype.size();
        decode(self.dtype, &self.bytes[index * size..(index + 1) * size]) * self.scale_at(row, col)
    }

    /// Writes row `row`, columns `start .. start + out.len()`, as f64 (exact).
    ///
    /// # Panics
    /// If the range leaves the matrix.
    pub fn read_row(&self, row: usize, start: usize, out: &mut [f64]) {
        assert!(row < self.rows && start + out.len() <= self.cols, "row {row} of {:?}", self.shape());
        let first = self.offset + row * self.strides.0 + start * self.strides.1;
        let size = self.dtype.size();
        if self.strides.1 == 1 {
            let bytes = &self.bytes[first * size..(first + out.len()) * size];
            for (value, chunk) in out.iter_mut().zip(bytes.chunks_exact(size)) {
                *value = decode(self.dtype, chunk);
            }
        } else {
            for (i, value) in out.iter_mut().enumerate() {
                let at = (first + i * self.strides.1) * size;
                *value = decode(self.dtype, &self.bytes[at..at + size]);
            }
        }
        if self.scale.is_some() {
            for (i, value) in out.iter_mut().enumerate() {
                *value *= self.scale_at(row, start + i);
            }
        }
    }

    fn scale_at(&self, row: usize, col: usize) -> f64 {
        let Some(scale) = &self.scale else { return 1.0 };
        let (row, col) = if self.transposed { (col, row) } else { (row, col) };
        let tile = ((self.scale_origin.0 + row) / scale.block.0, (self.scale_origin.1 + col) / scale.block.1);
        f64::from(scale.values[tile.0 * scale.grid_cols + tile.1])
    }
}

#[inline(always)]
fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().expect("8 bytes")),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
        Dtype::Bf16 => f64::from(bf16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f32()),
        Dtype::E4m3 => f64::from(float8::F8E4M3::from_bits(bytes[0]).to_f32()),
    }
}
