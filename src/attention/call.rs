//! What one call computes: sizes, mask, softmax scale and operands.

use crate::error::{Error, Result};
use std::ops::Range;

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_q_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Queries of a sequence.
    pub len_q: usize,
    /// Keys of a sequence.
    pub len_k: usize,
    /// Elements of one head: a multiple of 8 from 16 to 256.
    pub d_head: usize,
}

impl AttentionShape {
    /// Elements of q and of the output.
    pub fn q_elements(&self) -> usize {
        self.batch * self.len_q * self.n_q_heads * self.d_head
    }

    /// Elements of k, and of v.
    pub fn kv_elements(&self) -> usize {
        self.batch * self.len_k * self.n_kv_heads * self.d_head
    }

    /// Elements of the log-sum-exp.
    pub fn lse_elements(&self) -> usize {
        self.batch * self.n_q_heads * self.len_q
    }

    /// The KV head that a query head reads.
    pub fn kv_head(&self, q_head: usize) -> usize {
        q_head / (self.n_q_heads / self.n_kv_heads)
    }

    /// Start of a row of q or of the output.
    pub(crate) fn q_row(&self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.len_q + row) * self.n_q_heads + head) * self.d_head
    }

    /// Start of a row of k or v.
    pub(crate) fn kv_row(&self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.len_k + row) * self.n_kv_heads + head) * self.d_head
    }

    /// Position of a row's log-sum-exp.
    pub(crate) fn lse_at(&self, batch: usize, head: usize, row: usize) -> usize {
        (batch * self.n_q_heads + head) * self.len_q + row
    }

    pub(crate) fn check(&self) -> Result<()> {
        let Self { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head } = *self;
        if [batch, n_q_heads, n_kv_heads, len_q, len_k].contains(&0) {
            return Err(Error::argument(format_args!("attention shape {self:?} must have no zero")));
        }
        if n_q_heads % n_kv_heads != 0 {
            return Err(Error::argument(format_args!(
                "{n_q_heads} query heads must be a multiple of {n_kv_heads} KV heads"
            )));
        }
        if d_head % 8 != 0 || !(16..=256).contains(&d_head) {
            return Err(Error::argument(format_args!("d_head {d_head} must be a multiple of 8 from 16 to 256")));
        }
        let fits = |factors: [usize; 4]| factors.into_iter().try_fold(1usize, usize::checked_mul).is_some();
        if !fits([batch, n_q_heads, len_q, d_head]) || !fits([batch, n_kv_heads, len_k, d_head]) {
            return Err(Error::argument(format_args!("attention shape {self:?} is too large to index")));
        }
        Ok(())
    }
}

/// Which keys a query sees.
///
/// The last query stands at the last key (bottom-right alignment): query `i` has position `i + len_k - len_q`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Only keys at or before the query's position.
    pub causal: bool,
    /// Only keys at a distance less than this: with `causal`, the query's own key and the `window - 1` before it.
    pub window: Option<usize>,
}

impl Mask {
    /// Causal, without a window.
    pub const CAUSAL: Self = Self { causal: true, window: None };
    /// Every key.
    pub const NONE: Self = Self { causal: false, window: None };

    /// Keys that query `row` of `len_q` sees; `0..0` when there are none. Ends that are not empty grow with `row`.
    pub fn visible(&self, row: usize, len_q: usize, len_k: usize) -> Range<usize> {
        // One past the position, so that it needs no sign: `row + len_k - len_q + 1`, which may lie before the first key.
        let end = row + len_k + 1;
        let upto = |ahead: usize| end.saturating_add(ahead).saturating_sub(len_q).min(len_k);
        let stop = match (self.causal, self.window) {
            (true, _) => upto(0),
            (false, Some(window)) => upto(window.saturating_sub(1)),
            (false, None) => len_k,
        };
        let start = self.window.map_or(0, |window| end.saturating_sub(len_q.saturating_add(window)));
        if start < stop { start..stop } else { 0..0 }
    }
}

/// What one call computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionCall {
    /// Sizes.
    pub shape: AttentionShape,
    /// Which keys a query sees.
    pub mask: Mask,
    /// tau: multiplier of q . k, often `d_head^-1/2`.
    pub softmax_scale: f64,
    /// Logits become `cap tanh(S / cap)` (Gemma 2: 50).
    pub soft_cap: Option<f64>,
}

impl AttentionCall {
    /// A causal call with the usual softmax scale `d_head^-1/2` and no soft-cap.
    pub fn causal(shape: AttentionShape) -> Self {
        Self { shape, mask: Mask::CAUSAL, softmax_scale: (shape.d_head as f64).sqrt().recip(), soft_cap: None }
    }

    pub(crate) fn visible(&self, row: usize) -> Range<usize> {
        self.mask.visible(row, self.shape.len_q, self.shape.len_k)
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.shape.check()?;
        if self.mask.window == Some(0) {
            return Err(Error::argument("a window of 0 keys shows nothing: it must be at least 1"));
        }
        for (name, value) in [("softmax scale", Some(self.softmax_scale)), ("soft-cap", self.soft_cap)] {
            if let Some(value) = value
                && !(value.is_finite() && value > 0.0)
            {
                return Err(Error::argument(format_args!("{name} {value} must be finite and greater than zero")));
            }
        }
        Ok(())
    }
}

/// Operands of one call, in the layouts of the [module](super).
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Queries, after RoPE and normalisation.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
}

impl Inputs<'_> {
    pub(crate) fn check(&self, shape: &AttentionShape) -> Result<()> {
        let wanted =
            [("q", self.q, shape.q_elements()), ("k", self.k, shape.kv_elements()), ("v", self.v, shape.kv_elements())];
        for (name, values, want) in wanted {
            check_length(name, values.len(), want)?;
        }
        Ok(())
    }
}

pub(crate) fn check_length(name: &str, have: usize, want: usize) -> Result<()> {
    if have == want {
        Ok(())
    } else {
        Err(Error::argument(format_args!("{name} has {have} values where the shape asks for {want}")))
    }
}
