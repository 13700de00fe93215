//! How weights are stored, as far as kernels depend on it.

use super::tables::{DeviceMatrix, Dtype};

/// How matrices that are read together (W_Q and W_K; W_V) lie, as far as a kernel depends on it: the same in every layer of one
/// pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Storage {
    pub dtype: Dtype,
    /// All are `[out, in]`, of one type, in rows of 16 bytes.
    pub rows: bool,
    /// The same of `[in, out]`.
    pub columns: bool,
}

impl Storage {
    /// Of at least one matrix.
    pub fn of(matrices: &[DeviceMatrix]) -> Self {
        let dtype = matrices[0].dtype;
        let step = (16 / dtype.size()) as i64;
        let all = |along: fn(&DeviceMatrix) -> (i64, i64)| {
            matrices.iter().all(|m| {
                let (one, other) = along(m);
                m.dtype == dtype && m.ptr.0.is_multiple_of(16) && one == 1 && other > 0 && other % step == 0
            })
        };
        let rows = all(|m| (m.col_stride, m.row_stride));
        let columns = all(|m| (m.row_stride, m.col_stride));
        // Read value by value otherwise, whatever the type.
        Self { dtype: if rows || columns { dtype } else { Dtype::F32 }, rows, columns }
    }
}
