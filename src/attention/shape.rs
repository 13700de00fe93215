//! Sizes of a call, and where its rows lie.

use crate::error::{Error, Result};

/// Largest head dimension of a call: 512 channels of MLA's latent cache and 64 of its rotated part.
const MAX_HEAD: usize = 576;

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences; 1 where [`AttentionCall::sequences`](super::AttentionCall::sequences) packs several.
    pub batch: usize,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_q_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Queries of a sequence, with padding; all of them where sequences are packed.
    pub len_q: usize,
    /// Keys of a sequence, with padding; all of them where sequences are packed.
    pub len_k: usize,
    /// Elements of one head of q and k: a multiple of 8 from 16 to 576.
    pub d_head: usize,
    /// Elements of one head of v and of the output: as `d_head` in most models, 128 (with 192 of q and k) in expanded MLA.
    pub d_v: usize,
}

impl AttentionShape {
    /// Elements of q.
    pub fn q_elements(&self) -> usize {
        self.batch * self.len_q * self.n_q_heads * self.d_head
    }

    /// Elements of k.
    pub fn k_elements(&self) -> usize {
        self.batch * self.len_k * self.n_kv_heads * self.d_head
    }

    /// Elements of v.
    pub fn v_elements(&self) -> usize {
        self.batch * self.len_k * self.n_kv_heads * self.d_v
    }

    /// Elements of the output.
    pub fn out_elements(&self) -> usize {
        self.batch * self.len_q * self.n_q_heads * self.d_v
    }

    /// Elements of the log-sum-exp.
    pub fn lse_elements(&self) -> usize {
        self.batch * self.n_q_heads * self.len_q
    }

    /// The KV head that a query head reads.
    pub fn kv_head(&self, q_head: usize) -> usize {
        q_head / self.group()
    }

    /// Query heads of one KV head.
    pub(crate) fn group(&self) -> usize {
        self.n_q_heads / self.n_kv_heads
    }

    /// Start of a query head in q. `row` counts over the whole batch, here and below.
    pub(crate) fn q_at(&self, row: usize, head: usize) -> usize {
        (row * self.n_q_heads + head) * self.d_head
    }

    /// Start of a query head in the output.
    pub(crate) fn out_at(&self, row: usize, head: usize) -> usize {
        (row * self.n_q_heads + head) * self.d_v
    }

    /// Start of a KV head in k.
    pub(crate) fn k_at(&self, row: usize, head: usize) -> usize {
        (row * self.n_kv_heads + head) * self.d_head
    }

    /// Start of a KV head in v.
    pub(crate) fn v_at(&self, row: usize, head: usize) -> usize {
        (row * self.n_kv_heads + head) * self.d_v
    }

    /// Position of a row's log-sum-exp.
    pub(crate) fn lse_at(&self, row: usize, head: usize) -> usize {
        (row / self.len_q * self.n_q_heads + head) * self.len_q + row % self.len_q
    }

    pub(crate) fn check(&self) -> Result<()> {
        let Self { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v } = *self;
        if [batch, n_q_heads, n_kv_heads, len_q, len_k].contains(&0) {
            return Err(Error::argument(format_args!("attention shape {self:?} must have no zero")));
        }
        if n_q_heads % n_kv_heads != 0 {
            return Err(Error::argument(format_args!(
                "{n_q_heads} query heads must be a multiple of {n_kv_heads} KV heads"
            )));
        }
        for (name, d) in [("d_head", d_head), ("d_v", d_v)] {
            if d % 8 != 0 || !(16..=MAX_HEAD).contains(&d) {
                return Err(Error::argument(format_args!("{name} {d} must be a multiple of 8 from 16 to {MAX_HEAD}")));
            }
        }
        let fits = |factors: [usize; 4]| factors.into_iter().try_fold(1usize, usize::checked_mul).is_some();
        let d = d_head.max(d_v);
        if !fits([batch, n_q_heads, len_q, d]) || !fits([batch, n_kv_heads, len_k, d]) {
            return Err(Error::argument(format_args!("attention shape {self:?} is too large to index")));
        }
        Ok(())
    }
}
