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

mod backend;
mod backward;
mod call;
mod cpu;
mod lanes;
mod precision;
mod reference;
mod shift;
mod stabilised;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use backend::check;
pub use backend::{Attention, AttentionOutput, Dequantised, dequantised};
pub use backward::{Gradients, backward};
pub use call::{AttentionCall, AttentionShape, Inputs, Mask};
pub use cpu::{Cpu, measure};
pub use precision::{Cast, LogitCast, P_SCALE, Precision, Probabilities};
pub use reference::{ReferenceOutput, reference};
pub use shift::Stabilised;
pub use stabilised::StabilisedOutput;
