//! Attention with FP8 casts: what is computed, at which precision, and what is reported.
//!
//! For query head `h` of KV head `g = h / (n_q_heads / n_kv_heads)`, with softmax scale `tau`:
//!
//! ```text
//! S_ij = tau q_i . k_j        S' = cap tanh(S / cap) where there is a soft-cap
//! P_ij = exp(S'_ij - m_i)     over the keys j that the mask shows to row i
//! l_i  = sum_j P_ij           + exp(sink_h - m_i) where there are sinks
//! o_i  = sum_j P_ij v_j / l_i               lse_i = m_i + ln l_i          (nats)
//! ```
//!
//! **Layouts**, all row-major: q is `(batch, len_q, n_q_heads, d_head)`, k `(batch, len_k, n_kv_heads, d_head)`, v
//! `(batch, len_k, n_kv_heads, d_v)`, o `(batch, len_q, n_q_heads, d_v)`, lse `(batch, n_q_heads, len_q)`. This is
//! FlashAttention-3's. Packed sequences have `batch` 1 and share the axis of rows ([`Sequence`]).
//!
//! **Centers** ([`Center`](crate::plan::Center)). With c and m of a KV head the products are those of `k' = k - c` and `v' = v - m`. All
//! logits of a row lose `tau q_i . c`, which softmax does not see, and
//!
//! ```text
//! o_i = sum_j P_ij v'_j / l_i + (1 - p_sink) m         lse_i = lse'_i + tau q_i . c
//! ```
//!
//! where `1 - p_sink` is the keys' share of the row: 1 without sinks, and 0 for a row that sees no key. Sinks are compared with
//! logits and lose `tau q_i . c` too; a soft-cap and a cast of the logits need it added first. Outputs are those of the plain
//! call, whatever c and m are, up to rounding.
//!
//! **Where values are rounded** ([`Precision`] chooses; this order is what every backend has to match):
//! 1. q, k, v: `e4m3(x * quant_scale)`, `quant_scale = 1 / descale` in f32, descales by KV head; with a center
//!    `e4m3(fma(x, quant_scale, -c * quant_scale))`. Products are taken of
//!    these numbers; `tau descale_q descale_k`, taken in f64 and rounded to f32, multiplies the f32 sum once, and
//!    `descale_v / 256 / l` the output once.
//! 2. The logit after the soft-cap, if asked for: `e4m3(s * quant_scale) * descale`, per query head; the result enters
//!    the softmax (the spectral-bounds paper's Algorithm 1).
//! 3. P, which lies in [0, 1]: `e4m3(256 p)` or `f16(256 p)` ([`P_SCALE`]), or bf16. The row sum is that of the unrounded
//!    f32 p. In a tiled backend p is relative to the running maximum of the row.
//! 4. The sums of Q K^T and P V, where an accumulator of Hopper's tensor cores is asked for ([`QkAccumulator`],
//!    [`PvAccumulator`]), or the running output after each tile, to bf16 ([`PvAccumulator::Bf16`]).
//! 5. The output, if asked for: `e4m3(o * quant_scale) * descale`, or bf16.
//!
//! On the CPU q, k, v and the output can also be rounded to bf16 without scales, to E5M2 or to the E4M3 that ends at 240
//! ([`Cast`]), and q, k and v stochastically ([`Rounding`]).
//!
//! **What is never silent.** NaN in an operand that a row can see makes that row NaN. A saturating cast turns an infinity
//! into 448; it is in the `non_finite` count of its operand. Rows that see no key are zero, with the sink as lse or `-inf`.
//! What a row cannot see never reaches it, NaN included; rows that no sequence has are not read.
//!
//! **What this module does not do.** It never makes a plan, and a plan's layer number is not looked at. No dropout, no
//! additive bias.

mod accumulator;
mod backend;
mod backward;
mod call;
mod cpu;
mod lanes;
mod operands;
mod paged;
mod precision;
mod reference;
mod sequences;
mod shape;
mod shift;
mod shifted_softmax;
mod stochastic;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use backend::check;
pub use backend::{Attention, AttentionOutput, CenteredOutput, Dequantised, Saved, dequantised};
pub use backward::{BackwardPrecision, Delta, Fp8Products, GradientProducts, Gradients, backward};
pub use call::{AttentionCall, Call, Inputs, Keeps, Mask};
pub use cpu::{Cpu, measure};
#[cfg(feature = "cuda")]
pub(crate) use operands::key_offsets;
pub use paged::{Appended, BlockTable, Gathered, NewTokens, PageShape, PagedKv};
pub use precision::{Cast, LogitCast, P_SCALE, Precision, Probabilities, PvAccumulator, QkAccumulator, Rounding};
pub use reference::{ReferenceGradients, ReferenceOutput, reference, reference_backward};
pub use sequences::{Padding, Sequence};
pub use shape::AttentionShape;
pub use shift::{ShiftLimit, ShiftedSoftmax};
pub use shifted_softmax::ShiftedOutput;
