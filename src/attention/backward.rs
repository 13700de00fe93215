//! Gradients in f32, from the operands that the forward really multiplied.
//!
//! With P recomputed from the forward's log-sum-exp, `P_ij = exp(S'_ij - lse_i)`, and `dO` given:
//!
//! ```text
//! dV_j = sum_i P_ij dO_i       dP_ij = dO_i . v_j       delta_i = sum_j P_ij dP_ij
//! dS_ij = P_ij (dP_ij - delta_i) (1 - (S'_ij / cap)^2)     the last factor with a soft-cap only
//! dQ_i = tau sum_j dS_ij k_j       dK_j = tau sum_i dS_ij q_i
//! ```
//!
//! q, k, v are the dequantised E4M3 operands, and the gradients are with respect to them; handing them to the unrounded
//! ones is the straight-through rule. P is f32 here although the forward's product used E4M3: the forward's rounding of P
//! is not differentiated. delta is taken from P and dP, not from the rounded output, whose error would enter every row's
//! gradient (flash-attention paper, section 3.3, Equation 1). With logits in E4M3, P is that of the rounded logits and the
//! rounding passes gradients unchanged.
//!
//! Source: flash-attention paper, Algorithm 2.

use super::backend::{check, dequantised};
use super::call::{AttentionCall, Inputs, check_length};
use super::lanes;
use super::precision::{Cast, LogitCast, Precision};
use crate::error::Result;
use crate::fp8::{self, OnOverflow};
use crate::plan::ScalePlan;
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of a block.
const ROWS: usize = 8;

/// Gradients of the operands, in their layouts.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// dQ, `(batch, len_q, n_q_heads, d_head)`.
    pub dq: Vec<f32>,
    /// dK, `(batch, len_k, n_kv_heads, d_head)`.
    pub dk: Vec<f32>,
    /// dV, `(batch, len_k, n_kv_heads, d_head)`.
    pub dv: Vec<f32>,
}

/// Gradients of the call whose forward gave `lse`, for the output's gradient `d_out` (`(batch, len_q, n_q_heads,
/// d_head)`). `inputs`, `plan` and `precision` are those of the forward.
///
/// Rows that see no key have zero gradients.
///
/// # Errors
/// As [`Attention::forward`](super::Attention::forward), and if `lse` or `d_out` has another length.
pub fn backward(
    call: &AttentionCall,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    precision: &Precision,
    lse: &[f32],
    d_out: &[f32],
) -> Result<Gradients> {
    check(call, inputs, plan)?;
    let shape = &call.shape;
    check_length("lse", lse.len(), shape.lse_elements())?;
    check_length("d_out", d_out.len(), shape.q_elements())?;
    let cast;
    let inputs = match precision.operands {
        Cast::F32 => *inputs,
        Cast::E4m3 => {
            cast = dequantised(call, inputs, plan, precision.on_overflow)?;
            Inputs { q: &cast.q, k: &cast.k, v: &cast.v }
        }
    };
    let heads: Vec<Head> = (0..shape.batch * shape.n_kv_heads)
        .into_par_iter()
        .map(|at| {
            let (batch, kv_head) = (at / shape.n_kv_heads, at % shape.n_kv_heads);
            pulp::Arch::new().dispatch(Kernel { call, inputs, plan, precision, lse, d_out, batch, kv_head })
        })
        .collect();

    let d = shape.d_head;
    let mut all = Gradients {
        dq: vec![0.0; shape.q_elements()],
        dk: vec![0.0; shape.kv_elements()],
        dv: vec![0.0; shape.kv_elements()],
    };
    let group = shape.n_q_heads / shape.n_kv_heads;
    for (at, head) in heads.iter().enumerate() {
        let (batch, kv_head) = (at / shape.n_kv_heads, at % shape.n_kv_heads);
        for (i, dq) in head.dq.chunks_exact(d).enumerate() {
            let (member, row) = (i / shape.len_q, i % shape.len_q);
            all.dq[shape.q_row(batch, row, kv_head * group + member)..][..d].copy_from_slice(dq);
        }
        for (row, (dk, dv)) in head.dk.chunks_exact(d).zip(head.dv.chunks_exact(d)).enumerate() {
            let to = shape.kv_row(batch, row, kv_head);
            all.dk[to..to + d].copy_from_slice(dk);
            all.dv[to..to + d].copy_from_slice(dv);
        }
    }
    Ok(all)
}

/// Gradients of one KV head and of the query heads that read it.
struct Head {
    /// `(group, len_q, d_head)`.
    dq: Vec<f32>,
    /// `(len_k, d_head)`.
    dk: Vec<f32>,
    /// `(len_k, d_head)`.
    dv: Vec<f32>,
}

struct Kernel<'a> {
    call: &'a AttentionCall,
    inputs: Inputs<'a>,
    plan: &'a ScalePlan,
    precision: &'a Precision,
    lse: &'a [f32],
    d_out: &'a [f32],
    batch: usize,
    kv_head: usize,
}

impl NullaryFnOnce for Kernel<'_> {
    type Output = Head;

    #[inline(always)]
    fn call(self) -> Head {
        let shape = &self.call.shape;
        let d = shape.d_head;
        let group = shape.n_q_heads / shape.n_kv_heads;
        let mut dq = vec![0.0; group * shape.len_q * d];
        let mut dk = vec![0.0; shape.len_k * d];
        let mut dv = vec![0.0; shape.len_k * d];
        let tau = self.call.softmax_scale as f32;
        let saturate = self.precision.on_overflow == OnOverflow::Saturate;
        // Rows of P, of dP and of d S' / d S; a block of rows meets each key once while it is in cache.
        let blank = |x: f32| -> [Vec<f32>; ROWS] { std::array::from_fn(|_| vec![x; shape.len_k]) };
        let (mut p, mut dp, mut slope) = (blank(0.0), blank(0.0), blank(1.0));
        let key = |j: usize| shape.kv_row(self.batch, j, self.kv_head);
        for member in 0..group {
            let head = self.kv_head * group + member;
            let descale = self.plan.logit_descale[head];
            let dq = &mut dq[member * shape.len_q * d..][..shape.len_q * d];
            for first in (0..shape.len_q).step_by(ROWS) {
                let rows = first..shape.len_q.min(first + ROWS);
                let visible: [Range<usize>; ROWS] = std::array::from_fn(|r| match first + r {
                    row if row < rows.end => self.call.visible(row),
                    _ => 0..0,
                });
                let seen = visible.iter().filter(|keys| !keys.is_empty());
                let Some(keys) = seen.cloned().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { continue };
                for j in keys.clone() {
                    let (k, v) = (&self.inputs.k[key(j)..][..d], &self.inputs.v[key(j)..][..d]);
                    for (r, row) in rows.clone().enumerate().filter(|(r, _)| visible[*r].contains(&j)) {
                        let at = shape.q_row(self.batch, row, head);
                        let mut s = tau * lanes::dot(&self.inputs.q[at..at + d], k);
                        if let Some(cap) = self.call.soft_cap {
                            let t = (s / cap as f32).tanh();
                            slope[r][j] = 1.0 - t * t;
                            s = cap as f32 * t;
                        }
                        if self.precision.logits == LogitCast::E4m3 {
                            s = fp8::round_e4m3(s * descale.quant_scale().get(), saturate) * descale.get();
                        }
                        p[r][j] = lanes::exp(s - self.lse[shape.lse_at(self.batch, head, row)]);
                        dp[r][j] = lanes::dot(&self.d_out[at..at + d], v);
                    }
                }
                let delta: [f32; ROWS] =
                    std::array::from_fn(|r| lanes::dot(&p[r][visible[r].clone()], &dp[r][visible[r].clone()]));
                for j in keys {
                    let k = &self.inputs.k[key(j)..][..d];
                    let (dk, dv) = (&mut dk[j * d..][..d], &mut dv[j * d..][..d]);
                    for (r, row) in rows.clone().enumerate().filter(|(r, _)| visible[*r].contains(&j)) {
                        let at = shape.q_row(self.batch, row, head);
                        let ds = tau * p[r][j] * (dp[r][j] - delta[r]) * slope[r][j];
                        lanes::add_scaled(&mut dq[row * d..][..d], ds, k);
                        lanes::add_scaled(dk, ds, &self.inputs.q[at..at + d]);
                        lanes::add_scaled(dv, p[r][j], &self.d_out[at..at + d]);
                    }
                }
            }
        }
        Head { dq, dk, dv }
    }
}
