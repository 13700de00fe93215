//! Borrowed, strided matrix views over raw little-endian bytes.
//!
//! A [`MatrixView`] never owns or copies weights: it is a window onto a memory map (or a slice) with a dtype, a shape
//! and strides in elements, so that `[out, in]` and Conv1D `[in, out]` storage, fused QKV and head slices are all the
//! same type. Reading converts to f64, which is exact for every dtype.
//!
//! ```
//! use sigmascale::tensor::MatrixView;
//!
//! let stored = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]; // 2 x 3, row-major
//! let matrix = MatrixView::from_f32(&stored, 2, 3)?;
//! let right = matrix.slice_cols(1, 2).transpose();
//! assert_eq!((right.shape(), right.strides()), ((2, 2), (1, 3)));
//!
//! let mut block = [0.0; 4];
//! right.read_block(0..2, 0..2, &mut block);
//! assert_eq!(block, [2.0, 5.0, 3.0, 6.0]);
//! # Ok::<(), sigmascale::Error>(())
//! ```

use crate::error::{Error, Result};
use half::f16;
use std::ops::Range;
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

/// Dequantization multipliers of an FP8 matrix, one for each `block.0 x block.1` tile (a whole-tensor scale is one tile,
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

    /// The same matrix with dequantization multipliers (before any slicing or transposition).
    ///
    /// # Errors
    /// If the tiles do not cover the matrix: each side at least 1, and a value for every tile.
    pub fn with_scale(mut self, scale: BlockScale) -> Result<Self> {
        let covers = scale.block.0 > 0
            && scale.block.1 > 0
            && self.cols.div_ceil(scale.block.1) <= scale.grid_cols
            && self
                .rows
                .div_ceil(scale.block.0)
                .checked_mul(scale.grid_cols)
                .is_some_and(|tiles| tiles <= scale.values.len());
        if !covers {
            return Err(Error::argument(format_args!(
                "{} scales in rows of {}, one for {} x {} elements, do not cover a {} x {} matrix",
                scale.values.len(),
                scale.grid_cols,
                scale.block.0,
                scale.block.1,
                self.rows,
                self.cols
            )));
        }
        self.scale = Some(scale);
        Ok(self)
    }

    /// The same matrix times `factor`, without touching the storage: its multipliers, if it has any, are multiplied.
    pub fn scaled(&self, factor: f32) -> Self {
        let scale = match &self.scale {
            Some(scale) => BlockScale { values: scale.values.iter().map(|x| x * factor).collect(), ..scale.clone() },
            // One tile that covers every index.
            None => BlockScale { values: [factor].into(), block: (usize::MAX, usize::MAX), grid_cols: 1 },
        };
        Self { scale: Some(scale), ..self.clone() }
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
        let mut value = [0.0];
        self.read_block(row..row + 1, col..col + 1, &mut value);
        value[0]
    }

    /// Writes rows `rows`, columns `cols` as f64 (exact), row after row.
    ///
    /// # Panics
    /// If a range leaves the matrix or `out` does not hold exactly that many values.
    pub fn read_block(&self, rows: Range<usize>, cols: Range<usize>, out: &mut [f64]) {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "{rows:?} x {cols:?} of {:?}", self.shape());
        let width = cols.len();
        assert_eq!(out.len(), rows.len() * width);
        if width == 0 {
            return;
        }
        macro_rules! read {
            ($size:literal, $decode:expr) => {{
                let at = |row: usize, col: usize| (self.offset + row * self.strides.0 + col * self.strides.1) * $size;
                let decode = |bytes: &[u8]| $decode(bytes.try_into().expect("a whole element"));
                if self.strides.1 == 1 {
                    for (row, line) in rows.clone().zip(out.chunks_exact_mut(width)) {
                        let first = at(row, cols.start);
                        let bytes = &self.bytes[first..first + width * $size];
                        for (value, chunk) in line.iter_mut().zip(bytes.chunks_exact($size)) {
                            *value = decode(chunk);
                        }
                    }
                } else {
                    // Conv1D storage: neighboring rows are neighboring bytes, so they go in the inner loop.
                    for (c, col) in cols.clone().enumerate() {
                        for (r, row) in rows.clone().enumerate() {
                            let first = at(row, col);
                            out[r * width + c] = decode(&self.bytes[first..first + $size]);
                        }
                    }
                }
            }};
        }
        match self.dtype {
            Dtype::F64 => read!(8, f64::from_le_bytes),
            Dtype::F32 => read!(4, |b: [u8; 4]| f64::from(f32::from_le_bytes(b))),
            Dtype::F16 => read!(2, |b: [u8; 2]| f16::from_le_bytes(b).to_f64()),
            Dtype::Bf16 => read!(2, |b: [u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))),
            Dtype::E4m3 => read!(1, |b: [u8; 1]| f64::from(float8::F8E4M3::from_bits(b[0]).to_f32())),
        }
        if self.scale.is_some() {
            for (row, line) in rows.zip(out.chunks_exact_mut(width)) {
                for (col, value) in cols.clone().zip(line) {
                    *value *= self.scale_at(row, col);
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_transposes_agree_with_indexing() {
        let values: Vec<f32> = (0..6 * 10).map(|i| i as f32).collect();
        let full = MatrixView::from_f32(&values, 6, 10).unwrap();
        let view = full.slice_rows(1, 4).transpose().slice_rows(2, 5);
        assert_eq!(view.shape(), (5, 4));
        for row in 0..5 {
            for col in 0..4 {
                assert_eq!(view.get(row, col), f64::from(values[(col + 1) * 10 + row + 2]));
            }
        }
        let mut block = vec![0.0; 2 * 3];
        view.read_block(1..3, 1..4, &mut block);
        assert_eq!(block, [23.0, 33.0, 43.0, 24.0, 34.0, 44.0]);
    }

    #[test]
    fn block_scales_follow_slices_and_transposes() {
        let ones = vec![0x38u8; 4 * 6];
        let scale = BlockScale { values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0].into(), block: (2, 2), grid_cols: 3 };
        let full = MatrixView::dense(&ones, Dtype::E4m3, 4, 6).unwrap().with_scale(scale).unwrap();
        assert_eq!(full.get(3, 5), 6.0);
        assert_eq!(full.slice_rows(2, 2).slice_cols(1, 5).get(0, 0), 4.0);
        assert_eq!(full.transpose().slice_rows(4, 2).get(0, 1), 3.0);
    }

    #[test]
    fn scales_that_do_not_cover_the_matrix_are_refused() {
        let ones = vec![0x38u8; 4 * 6];
        let refused = |count: usize, block: (usize, usize), grid_cols: usize| {
            let scale = BlockScale { values: vec![1.0; count].into(), block, grid_cols };
            MatrixView::dense(&ones, Dtype::E4m3, 4, 6).unwrap().with_scale(scale).is_err_and(|e| e.is_argument())
        };
        assert!(refused(6, (0, 2), 3), "tiles without rows");
        assert!(refused(6, (2, 0), 3), "tiles without columns");
        assert!(refused(5, (2, 2), 3), "a tile without a value");
        assert!(refused(6, (2, 2), 2), "a row of tiles too short");
        assert!(!refused(6, (2, 2), 3));
    }

    #[test]
    fn a_factor_multiplies_every_element_with_and_without_scales() {
        let codes = vec![0x38u8; 4 * 6];
        let plain = MatrixView::dense(&codes, Dtype::E4m3, 4, 6).unwrap();
        let scale = BlockScale { values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0].into(), block: (2, 2), grid_cols: 3 };
        let tiles = plain.clone().with_scale(scale).unwrap().slice_rows(1, 3).transpose();
        for view in [plain, tiles] {
            let (rows, cols) = view.shape();
            for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                assert_eq!(view.scaled(4.0).scaled(0.5).get(row, col), 2.0 * view.get(row, col));
            }
        }
    }

    #[test]
    fn every_dtype_decodes_exactly() {
        let cases: [(Dtype, Vec<u8>); 5] = [
            (Dtype::F64, (-1.5f64).to_le_bytes().to_vec()),
            (Dtype::F32, (-1.5f32).to_le_bytes().to_vec()),
            (Dtype::F16, f16::from_f32(-1.5).to_le_bytes().to_vec()),
            (Dtype::Bf16, half::bf16::from_f32(-1.5).to_le_bytes().to_vec()),
            (Dtype::E4m3, vec![0xbc]),
        ];
        for (dtype, bytes) in cases {
            assert_eq!(MatrixView::dense(&bytes, dtype, 1, 1).unwrap().get(0, 0), -1.5, "{dtype:?}");
        }
        assert!(MatrixView::dense(&[0; 3], Dtype::F32, 1, 1).unwrap_err().is_argument());
    }
}
