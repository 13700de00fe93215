//! What one call computes: sizes, sequences, mask, softmax scale, sinks and operands.

use super::sequences::{Sequence, check_sequences};
use super::shape::AttentionShape;
use crate::error::{Error, Result};
use crate::named;
use crate::plan::Center;
use std::borrow::Cow;
use std::ops::Range;

/// Which keys of its sequence a query sees.
///
/// Queries are aligned to the end of the keys (bottom-right alignment): query `i` has position `p = i + len_k - len_q`, lengths
/// those of the sequence without padding. It sees the keys from `p - window_left` to `p + window_right`.
///
/// ```
/// use sigmascale::attention::Mask;
/// // The last two of five queries that were decoded after a cache of three keys.
/// assert_eq!(Mask::CAUSAL.visible(1, 2, 5), 0..5);
/// assert_eq!(Mask::sliding(2).visible(0, 2, 5), 2..4);
/// assert_eq!(Mask { window_right: Some(1), ..Mask::NONE }.visible(0, 2, 5), 0..5);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Only keys at or before the query's position: no window to the right is wider than 0.
    pub causal: bool,
    /// How many keys before the query's position it sees; `None`: all.
    pub window_left: Option<usize>,
    /// How many keys after the query's position it sees; `None`: all.
    pub window_right: Option<usize>,
}

impl Mask {
    /// Causal, without a window.
    pub const CAUSAL: Self = Self { causal: true, ..Self::NONE };
    /// Every key.
    pub const NONE: Self = Self { causal: false, window_left: None, window_right: None };

    /// Causal with a sliding window, as configs of models count it: the query's own key and the `window - 1` before it. A
    /// window of 0 is one of 1.
    pub const fn sliding(window: usize) -> Self {
        Self { window_left: Some(window.saturating_sub(1)), ..Self::CAUSAL }
    }

    /// Keys that query `row` of `len_q` sees; `0..0` when there are none. Ends that are not empty grow with `row`.
    pub fn visible(&self, row: usize, len_q: usize, len_k: usize) -> Range<usize> {
        // One past the position, so that it needs no sign: `row + len_k - len_q + 1`, which may lie before the first key.
        let end = row + len_k + 1;
        let stop = |right: usize| end.saturating_add(right).saturating_sub(len_q).min(len_k);
        let stop = if self.causal { stop(0) } else { self.window_right.map_or(len_k, stop) };
        let start = self.window_left.map_or(0, |left| end.saturating_sub(len_q.saturating_add(left).saturating_add(1)));
        if start < stop { start..stop } else { 0..0 }
    }
}

/// What one call computes: the description that the CPU, the GPU, the reference and both backward passes take.
///
/// Only its lists depend on where a call runs: [`AttentionCall`] has them in host memory, `device::attention::DeviceCall` in
/// device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call<Sequences, Sinks, Centers> {
    /// Sizes.
    pub shape: AttentionShape,
    /// Which keys a query sees.
    pub mask: Mask,
    /// tau: multiplier of q . k, often `d_head^-1/2`. The GPU takes it, and the soft-cap, in f32.
    pub softmax_scale: f64,
    /// Logits become `cap tanh(S / cap)` (Gemma 2: 50).
    pub soft_cap: Option<f64>,
    /// Where sequences lie in a padded or packed batch, in order; `None`: each has `len_q` queries and `len_k` keys.
    pub sequences: Option<Sequences>,
    /// A logit per query head, in nats, that joins the row sum (gpt-oss).
    pub sinks: Option<Sinks>,
    /// What is subtracted from keys and values before their cast: exact for any values.
    pub center: Option<Centers>,
}

/// A call with its lists in host memory.
pub type AttentionCall<'a> = Call<&'a [Sequence], &'a [f64], &'a Center>;

/// Largest multiplier of logits: times log2(e) and the 1e30 that is the maximum of no logits (`kLowest` of
/// `kernels/attention/config.cuh`), it stays in f32.
const LARGEST_SCALE: f64 = 2e8;

impl<Sequences, Sinks, Centers> Call<Sequences, Sinks, Centers> {
    /// A causal call with the usual softmax scale `d_head^-1/2` and nothing else.
    pub fn causal(shape: AttentionShape) -> Self {
        Self {
            shape,
            mask: Mask::CAUSAL,
            softmax_scale: (shape.d_head as f64).sqrt().recip(),
            soft_cap: None,
            sequences: None,
            sinks: None,
            center: None,
        }
    }

    /// The same call with other lists.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_lists<A, B, C>(
        &self,
        sequences: Option<A>,
        sinks: Option<B>,
        center: Option<C>,
    ) -> Call<A, B, C> {
        let Self { shape, mask, softmax_scale, soft_cap, .. } = *self;
        Call { shape, mask, softmax_scale, soft_cap, sequences, sinks, center }
    }

    /// Checks the numbers that multiply logits.
    pub(crate) fn check_scales(&self) -> Result<()> {
        for (name, value) in [("softmax scale", Some(self.softmax_scale)), ("soft-cap", self.soft_cap)] {
            if let Some(value) = value
                && !(value > 0.0 && value <= LARGEST_SCALE)
            {
                return Err(Error::argument(format_args!(
                    "{name} {value} must be greater than zero and at most {LARGEST_SCALE:e}"
                )));
            }
        }
        Ok(())
    }
}

impl AttentionCall<'_> {
    /// Every sequence of the call.
    pub(crate) fn all_sequences(&self) -> Cow<'_, [Sequence]> {
        let AttentionShape { batch, len_q, len_k, .. } = self.shape;
        let whole = |b: usize| Sequence { q: b * len_q..(b + 1) * len_q, k: b * len_k..(b + 1) * len_k };
        self.sequences.map_or_else(|| (0..batch).map(whole).collect(), Cow::Borrowed)
    }

    /// c of the KV head that a query head reads.
    pub(crate) fn key_center(&self, head: usize) -> Option<&[f32]> {
        self.center?.c(self.shape.kv_head(head))
    }

    /// m of the KV head that a query head reads.
    pub(crate) fn value_center(&self, head: usize) -> Option<&[f32]> {
        self.center?.m(self.shape.kv_head(head))
    }

    /// Keys that a query of a sequence sees, both counted from the sequence's first.
    pub(crate) fn visible(&self, sequence: &Sequence, row: usize) -> Range<usize> {
        self.mask.visible(row, sequence.q.len(), sequence.k.len())
    }

    /// Pairs of a query and a key that it sees, of one head.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn pairs(&self) -> u64 {
        let of = |s: &Sequence| (0..s.q.len()).map(|row| self.visible(s, row).len() as u64).sum::<u64>();
        self.all_sequences().iter().map(of).sum()
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.shape.check()?;
        self.check_scales()?;
        if let Some(sequences) = self.sequences {
            check_sequences(&self.shape, sequences)?;
        }
        let AttentionShape { n_kv_heads, d_head, d_v, .. } = self.shape;
        self.center.map_or(Ok(()), |center| center.check(n_kv_heads, d_head, d_v))?;
        if let Some(sinks) = self.sinks {
            if sinks.len() != self.shape.n_q_heads {
                let (have, want) = (sinks.len(), self.shape.n_q_heads);
                return Err(Error::argument(format_args!("{have} sinks do not fit {want} query heads")));
            }
            if let Some(head) = sinks.iter().position(|sink| !sink.is_finite()) {
                return Err(Error::argument(format_args!("the sink of head {head}, {}, must be finite", sinks[head])));
            }
        }
        Ok(())
    }
}

named! {
    /// What a forward keeps for its backward, besides the output and its log-sum-exp.
    pub enum Keeps is "kept state" default Nothing {
        /// Nothing: no backward follows.
        Nothing = "nothing",
        /// q, k and v as the products took them. The backward takes delta from the rounded output.
        Operands = "operands",
        /// The operands, and what the rounding of the output took: delta is that of the output before it.
        UnroundedDelta = "unrounded-delta",
        /// The operands, and the largest P of each row, from which the scales of a dQ in FP8 come.
        Fp8Dq = "fp8-dq",
    }
}

impl Keeps {
    /// Without [`Keeps::Operands`]: the cast saves them, so the attention kernels do not know them.
    #[cfg(feature = "cuda")]
    pub(crate) const fn of_kernel(self) -> Self {
        match self {
            Self::Operands => Self::Nothing,
            other => other,
        }
    }
}

/// Operands of one call, in the layouts of the [module](super).
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Queries, after RoPE and normalization.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
}

impl Inputs<'_> {
    pub(crate) fn check(&self, shape: &AttentionShape) -> Result<()> {
        let wanted =
            [("q", self.q, shape.q_elements()), ("k", self.k, shape.k_elements()), ("v", self.v, shape.v_elements())];
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
