//! What the GPU takes of the sizes of a call.

use crate::attention::AttentionShape;
use crate::error::{Error, Result};

impl AttentionShape {
    /// Refuses what the GPU does not take.
    ///
    /// # Errors
    /// If a size is zero or too large, `heads_kv` does not divide `heads_q`, or the head dimension is not offered.
    pub fn check_on_gpu(&self) -> Result<()> {
        self.check()?;
        let Self { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q, len_k, d_head } = *self;
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
        [self.batch, self.len_q, self.n_q_heads, self.d_head]
    }

    /// Shape of k and of v.
    pub fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.len_k, self.n_kv_heads, self.d_head]
    }

    /// Shape of the log-sum-exp.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.n_q_heads, self.len_q]
    }

    /// Groups of 16 keys, in which v is stored.
    pub(super) fn key_groups(&self) -> usize {
        self.len_k.div_ceil(16)
    }
}
