//! Attention with FP8 casts: what is computed, at which precision, and what is reported.
//!
//! For query head `h` of KV head `g = h / (n_q_heads / n_kv_heads)`, with softmax scale `tau`:
//!
//! ```text
//! S_ij = tau q_i . k_j        S' = cap tanh(S / cap) where there is a soft-cap
//! P_ij = exp(S'_ij - m_i)     over the keys j that the mask shows to row i
//! o_i  = sum_j P_ij v_j / sum_j P_ij        lse_i = m_i + ln sum_j P_ij   (nats)
//! ```
//!
//! **Layouts**, all row-major: q and o are `(batch, len_q, n_q_heads, d_head)`, k and v are
//! `(batch, len_k, n_kv_heads, d_head)`, lse is `(batch, n_q_heads, len_q)`. This is FlashAttention-3's.
//!
//! **Where values are rounded** ([`Precision`] chooses; this order is what every backend has to match):
//! 1. q, k, v: `e4m3(x * quant_scale)`, `quant_scale = 1 / descale` in f32, descales by KV head. Products are taken of
//!    these numbers; `tau descale_q descale_k`, taken in f64 and rounded to f32, multiplies the f32 sum once, and
//!    `descale_v / 256 / l` the output once.
//! 2. The logit after the soft-cap, if asked for: `e4m3(s * quant_scale) * descale`, per query head; the result enters
//!    the softmax (the spectral-bounds paper's Algorithm 1).
//! 3. P, which lies in [0, 1]: `e4m3(256 p)` ([`P_SCALE`]), or bf16. The row sum is that of the unrounded f32 p. In a
//!    tiled backend p is relative to the running maximum of the row.
//! 4. The output, if asked for: `e4m3(o * quant_scale) * descale`.
//!
//! **What is never silent.** NaN in an operand that a row can see makes that row NaN. A saturating cast turns an infinity
//! into 448; it is in the `non_finite` count of its operand. Rows that see no key are zero with an lse of `-inf`.
//!
//! **What this module does not do.** It never makes a plan, and a plan's layer number is not looked at. No dropout, no
//! sinks, no additive bias.

mod backward;
mod cpu;
pub mod cuda;
mod lanes;
mod reference;
mod stabilised;
#[cfg(test)]
mod tests;

pub use backward::{Gradients, backward};
pub use cpu::{Cpu, measure};
pub use reference::{ReferenceOutput, reference};
pub use stabilised::{Stabilised, StabilisedOutput};

use crate::error::{Error, Result};
use crate::fp8::{Counts, Format, OnOverflow};
use crate::plan::ScalePlan;
use crate::scale::Descale;
use crate::stats::{CastStats, StepStats};
use std::ops::Range;

/// What P is multiplied by before its cast to E4M3.
///
/// A power of two, so that scaling is exact. P = 1 becomes 256 and cannot overflow, and values down to `2^-14` stay
/// normal. The descale, `2^-8`, is part of the output's factor.
pub const P_SCALE: f32 = 256.0;

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
    fn q_row(&self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.len_q + row) * self.n_q_heads + head) * self.d_head
    }

    /// Start of a row of k or v.
    fn kv_row(&self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.len_k + row) * self.n_kv_heads + head) * self.d_head
    }

    /// Position of a row's log-sum-exp.
    fn lse_at(&self, batch: usize, head: usize, row: usize) -> usize {
        (batch * self.n_q_heads + head) * self.len_q + row
    }

    fn check(&self) -> Result<()> {
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

    fn visible(&self, row: usize) -> Range<usize> {
        self.mask.visible(row, self.shape.len_q, self.shape.len_k)
    }

    fn check(&self) -> Result<()> {
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

/// Operands of one call, in the layouts of the [module](self).
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
    fn check(&self, shape: &AttentionShape) -> Result<()> {
        let wanted =
            [("q", self.q, shape.q_elements()), ("k", self.k, shape.kv_elements()), ("v", self.v, shape.kv_elements())];
        for (name, values, want) in wanted {
            check_length(name, values.len(), want)?;
        }
        Ok(())
    }
}

fn check_length(name: &str, have: usize, want: usize) -> Result<()> {
    if have == want {
        Ok(())
    } else {
        Err(Error::argument(format_args!("{name} has {have} values where the shape asks for {want}")))
    }
}

/// Whether a tensor passes through E4M3. It is counted against its descale in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cast {
    /// Left in f32.
    F32,
    /// Cast with the plan's descale; left in f32 where the plan has none.
    E4m3,
}

/// What happens to the logits on their way into the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitCast {
    /// Left in f32, overflow not counted.
    F32,
    /// Left in f32, overflow counted against the plan's logit descale.
    Counted,
    /// Cast with the plan's logit descale.
    E4m3,
}

/// The format of P in the product with V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probabilities {
    /// f32.
    F32,
    /// bfloat16.
    Bf16,
    /// E4M3 with the fixed scale [`P_SCALE`].
    E4m3,
}

/// Which values a call rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// q, k and v (v only where the plan has descales for it).
    pub operands: Cast,
    /// Logits.
    pub logits: LogitCast,
    /// P.
    pub probabilities: Probabilities,
    /// Output (only where the plan has descales for it).
    pub output: Cast,
    /// What E4M3 casts do with values out of range.
    pub on_overflow: OnOverflow,
}

impl Precision {
    /// What fused FP8 kernels do: q, k, v and P in E4M3, logits and output in f32. Logit overflow is counted.
    pub const KERNEL: Self = Self {
        operands: Cast::E4m3,
        logits: LogitCast::Counted,
        probabilities: Probabilities::E4m3,
        output: Cast::F32,
        on_overflow: OnOverflow::Saturate,
    };
    /// The spectral-bounds paper's Algorithm 1: logits in E4M3, everything else in f32.
    pub const PAPER_LOGITS: Self = Self {
        operands: Cast::F32,
        logits: LogitCast::E4m3,
        probabilities: Probabilities::F32,
        output: Cast::F32,
        on_overflow: OnOverflow::Saturate,
    };
    /// No rounding but f32's own.
    pub const F32: Self = Self { logits: LogitCast::F32, ..Self::PAPER_LOGITS };
}

/// What a call gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput {
    /// Output, `(batch, len_q, n_q_heads, d_head)`.
    pub out: Vec<f32>,
    /// Log-sum-exp of each row in nats, `(batch, n_q_heads, len_q)`; `-inf` where a row sees no key.
    pub lse: Vec<f32>,
    /// Statistics per head, over the whole batch.
    ///
    /// Logits are those after the soft-cap and before their cast, of the pairs that the mask shows. NaN takes no part in
    /// their maximum and minimum; `non_finite` is counted before the soft-cap.
    pub stats: StepStats,
}

/// A backend that computes attention with the scales of a plan.
pub trait Attention {
    /// Runs one call.
    ///
    /// # Errors
    /// If the call, the operands' lengths or the plan's lengths break their rules, if the backend does not offer the
    /// precision (`is_unsupported`), or if its device fails.
    fn forward(
        &self,
        call: &AttentionCall,
        inputs: &Inputs<'_>,
        plan: &ScalePlan,
        precision: &Precision,
    ) -> Result<AttentionOutput>;
}

/// The operands as the products see them: cast to E4M3 and multiplied back, in the layouts of [`Inputs`].
#[derive(Clone, Debug, PartialEq)]
pub struct Dequantised {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values; unchanged where the plan has no descales for them.
    pub v: Vec<f32>,
}

/// `e4m3(x / descale) * descale` of every operand.
///
/// # Errors
/// As [`Attention::forward`].
pub fn dequantised(
    call: &AttentionCall,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    on_overflow: OnOverflow,
) -> Result<Dequantised> {
    check(call, inputs, plan)?;
    let shape = &call.shape;
    let group = shape.n_q_heads / shape.n_kv_heads;
    let cast = |x: &[f32], descales: &[Descale], group: usize| {
        let mut out = vec![0.0; x.len()];
        for (row, (from, to)) in x.chunks_exact(shape.d_head).zip(out.chunks_exact_mut(shape.d_head)).enumerate() {
            let descale = descales[row / group % descales.len()];
            Format::E4m3.round_slice(from, descale.quant_scale().get(), on_overflow, to)?;
            to.iter_mut().for_each(|value| *value *= descale.get());
        }
        Ok::<_, Error>(out)
    };
    Ok(Dequantised {
        q: cast(inputs.q, &plan.operands.q, group)?,
        k: cast(inputs.k, &plan.operands.k, 1)?,
        v: plan.operands.v.as_ref().map_or_else(|| Ok(inputs.v.to_vec()), |v| cast(inputs.v, v, 1))?,
    })
}

fn check(call: &AttentionCall, inputs: &Inputs<'_>, plan: &ScalePlan) -> Result<()> {
    call.check()?;
    inputs.check(&call.shape)?;
    let (n_q, n_kv) = (call.shape.n_q_heads, call.shape.n_kv_heads);
    let operands = &plan.operands;
    let rows = [
        ("logit", Some(&plan.logit_descale), n_q),
        ("q", Some(&operands.q), n_kv),
        ("k", Some(&operands.k), n_kv),
        ("v", operands.v.as_ref(), n_kv),
        ("o", operands.o.as_ref(), n_kv),
    ];
    for (name, row, want) in rows {
        if let Some(row) = row
            && row.len() != want
        {
            return Err(Error::mismatch(format_args!(
                "the plan has {} {name} descales where the call needs {want}",
                row.len()
            )));
        }
    }
    Ok(())
}

impl From<Counts> for CastStats {
    fn from(counts: Counts) -> Self {
        let Counts { amax, overflow, beyond_rounding, non_finite, count } = counts;
        Self { amax, overflow, beyond_rounding, non_finite, count }
    }
}
