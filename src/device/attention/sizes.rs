//! Sizes of one call, and what the GPU takes of them.

use crate::error::{Error, Result};

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Sequences.
    pub batch: usize,
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Queries of a sequence.
    pub len_q: usize,
    /// Keys of a sequence.
    pub len_k: usize,
    /// Elements of a head: 64 or 128.
    pub d_head: usize,
}

impl Sizes {
    /// # Errors
    /// If a size is zero or too large, `heads_kv` does not divide `heads_q`, or the head dimension is not offered.
    pub fn check(&self) -> Result<()> {
        let Self { batch, heads_q, heads_kv, len_q, len_k, d_head } = *self;
        if [batch, heads_q, heads_kv, len_q, len_k, d_head].contains(&0) {
            return Err(Error::argument(format_args!("attention sizes {self:?} must have no zero")));
        }
        if heads_q % heads_kv != 0 {
            return Err(Error::argument(format_args!(
                "{heads_q} query heads must be a multiple of {heads_kv} KV heads"
            )));
        }
        if d_head != 64 && d_head != 128 {
            return Err(Error::unsupported(format_args!(
                "head dimension {d_head} is not offered on the GPU: it must be 64 or 128"
            )));
        }
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

    /// Shape of q and of the output.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.len_q, self.heads_q, self.d_head]
    }

    /// Shape of k and of v.
    pub fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.len_k, self.heads_kv, self.d_head]
    }

    /// Shape of the log-sum-exp.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.heads_q, self.len_q]
    }

    /// Groups of 16 keys, in which v is stored.
    pub(super) fn key_groups(&self) -> usize {
        self.len_k.div_ceil(16)
    }
}
