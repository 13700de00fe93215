//! What the GPU takes of the sizes of a call, and the head dimensions that its kernels are compiled for.

use crate::attention::AttentionShape;
use crate::cuda::View;
use crate::error::{Error, Result};

/// Head dimensions that kernels are compiled for; others read as the next larger one, filled up with zeros.
const NATIVE: [usize; 5] = [64, 96, 128, 192, 256];

/// Keys of a tile of values: with sequences of unequal length, each begins one.
pub(super) const VALUE_TILE: usize = 128;

/// The head dimension of the kernel that takes `d`, at most 256.
pub(super) fn native(d: usize) -> usize {
    NATIVE.into_iter().find(|&native| d <= native).unwrap_or(d)
}

/// Bytes of one head's row in E4M3, as the copy engine takes it.
pub(super) const fn row_bytes(d: usize) -> usize {
    d.next_multiple_of(16)
}

/// Head dimensions of a compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadDims {
    /// Of q and k.
    pub qk: usize,
    /// Of v and the output.
    pub v: usize,
    /// Whether the call's v and output have fewer.
    pub padded: bool,
}

impl AttentionShape {
    /// Refuses what the GPU does not take.
    ///
    /// # Errors
    /// If a size is zero or too large, `heads_kv` does not divide `heads_q`, or the head dimension is not offered.
    pub fn check_on_gpu(&self) -> Result<()> {
        let Self { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q, len_k, d_head, d_v } = *self;
        let dims =
            if d_v == d_head { vec![("head dimension", d_head)] } else { vec![("d_head", d_head), ("d_v", d_v)] };
        for (name, d) in dims {
            if d > 256 {
                return Err(Error::unsupported(format_args!(
                    "{name} {d} is not offered on the GPU, which takes at most 256: compute this layer with another backend"
                )));
            }
            if d % 8 != 0 || d < 16 {
                return Err(Error::unsupported(format_args!(
                    "{name} {d} is not offered on the GPU, which takes multiples of 8 from 16 to 256: fill each head up with zeros, \
                     and keep the softmax scale"
                )));
            }
        }
        self.check()?;
        // Grid dimensions count sequences and heads in 16 bits; tiles, and the blocks of a cast, in 31.
        const GRID: usize = 65_535;
        const LENGTH: usize = 1 << 24;
        for (name, value, limit) in [
            ("batch", batch, GRID),
            ("heads", heads_q, GRID),
            ("queries of a sequence", len_q, LENGTH),
            ("keys of a sequence", len_k, LENGTH),
            ("heads of a batch", batch * heads_q, (1 << 30) / len_q.div_ceil(64)),
            ("heads of a sequence", heads_q + 2 * heads_kv, (1 << 30) / len_q.max(len_k).div_ceil(16)),
        ] {
            if value > limit {
                return Err(Error::unsupported(format_args!("{value} {name} are more than the GPU takes: {limit}")));
            }
        }
        Ok(())
    }

    /// Refuses head dimensions other than 64 and 128 for `what`, which takes no others.
    pub(super) fn check_64_or_128(&self, what: &str) -> Result<()> {
        let Self { d_head, d_v, .. } = *self;
        if d_head == d_v && matches!(d_head, 64 | 128) {
            return Ok(());
        }
        Err(Error::unsupported(format_args!(
            "{what} of d_head {d_head} and d_v {d_v} is not offered on the GPU: it takes 64 or 128 for both"
        )))
    }

    /// Shape of q.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.len_q, self.n_q_heads, self.d_head]
    }

    /// Shape of k.
    pub fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.len_k, self.n_kv_heads, self.d_head]
    }

    /// Shape of v.
    pub fn v_shape(&self) -> [usize; 4] {
        [self.batch, self.len_k, self.n_kv_heads, self.d_v]
    }

    /// Shape of the output.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.len_q, self.n_q_heads, self.d_v]
    }

    /// Shape of the log-sum-exp.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.n_q_heads, self.len_q]
    }

    /// Head dimensions of the kernel that takes the call.
    pub fn head_dims(&self) -> HeadDims {
        let v = native(self.d_v);
        HeadDims { qk: native(self.d_head), v, padded: v != self.d_v }
    }

    /// Groups of 16 keys, in which v is stored.
    pub(super) fn key_groups(&self) -> usize {
        self.len_k.div_ceil(16)
    }
}

/// Strides of `(batch, length, heads, d)` in E4M3 as the kernels pass it on: without gaps but for rows of [`row_bytes`].
pub(super) fn row_strides([_, length, heads, d]: [usize; 4]) -> [i64; 4] {
    let row = row_bytes(d);
    [length * heads * row, heads * row, row, 1].map(|stride| stride as i64)
}

/// Bytes of such an array.
pub(super) fn rows_bytes(shape: [usize; 4]) -> usize {
    shape[0] * row_strides(shape)[0] as usize
}

/// Batch, row and head strides of a tensor whose last dimension is contiguous.
pub(super) fn outer_strides(x: &View<4>) -> [i64; 3] {
    let s = x.unit_free_strides();
    [s[0], s[1], s[2]]
}

/// Refuses an array that is written where two of its elements share memory. Strides of an array without such elements nest:
/// sorted by size, each passes over all that the smaller ones reach.
pub(super) fn expect_disjoint<const R: usize>(name: &str, x: &View<R>) -> Result<()> {
    let mut dimensions: Vec<(i64, i64)> = x.strides().into_iter().zip(x.extents().map(|n| n as i64)).collect();
    dimensions.retain(|&(_, extent)| extent > 1);
    dimensions.sort_unstable();
    let mut reach = 0;
    for (stride, extent) in dimensions {
        if stride <= reach {
            return Err(Error::argument(format_args!(
                "{name} has strides {:?}, by which elements of {:?} overlap: an output needs memory for each",
                x.strides(),
                x.extents()
            )));
        }
        reach = stride.checked_mul(extent - 1).and_then(|span| span.checked_add(reach)).unwrap_or(i64::MAX);
    }
    Ok(())
}
