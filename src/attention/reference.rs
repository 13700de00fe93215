//! Attention in f64, written to be obviously right: one row at a time, nothing tiled, nothing rounded.

use super::call::{AttentionCall, check_length};
use crate::error::Result;

/// What [`reference()`] computes.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceOutput {
    /// Output, `(batch, len_q, n_q_heads, d_head)`.
    pub out: Vec<f64>,
    /// Log-sum-exp in nats, `(batch, n_q_heads, len_q)`; `-inf` where a row sees no key.
    pub lse: Vec<f64>,
}

/// Attention as the [module](super) defines it, without any cast; layouts as there.
///
/// # Errors
/// If the call or an operand's length breaks its rule.
pub fn reference(call: &AttentionCall, q: &[f64], k: &[f64], v: &[f64]) -> Result<ReferenceOutput> {
    call.check()?;
    let shape = &call.shape;
    let d = shape.d_head;
    check_length("q", q.len(), shape.q_elements())?;
    check_length("k", k.len(), shape.kv_elements())?;
    check_length("v", v.len(), shape.kv_elements())?;
    let mut out = vec![0.0; shape.q_elements()];
    let mut lse = vec![f64::NEG_INFINITY; shape.lse_elements()];
    for batch in 0..shape.batch {
        for head in 0..shape.n_q_heads {
            for row in 0..shape.len_q {
                let at = shape.q_row(batch, row, head);
                let key = |j| shape.kv_row(batch, j, shape.kv_head(head));
                let keys = call.visible(row);
                if keys.is_empty() {
                    continue;
                }
                let mut logits = Vec::with_capacity(keys.len());
                for j in keys.clone() {
                    let dot: f64 = (0..d).map(|c| q[at + c] * k[key(j) + c]).sum();
                    let logit = call.softmax_scale * dot;
                    logits.push(call.soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh()));
                }
                let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = logits.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = p.iter().sum();
                for (p, j) in p.iter().zip(keys) {
                    for c in 0..d {
                        out[at + c] += p / sum * v[key(j) + c];
                    }
                }
                lse[shape.lse_at(batch, head, row)] = max + sum.ln();
            }
        }
    }
    Ok(ReferenceOutput { out, lse })
}
