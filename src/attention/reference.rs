//! Attention and its gradients in f64, written to be obviously right: one row at a time, nothing tiled, nothing rounded.

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

/// What [`reference_backward()`] computes, in the operands' layouts.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceGradients {
    /// dQ.
    pub dq: Vec<f64>,
    /// dK.
    pub dk: Vec<f64>,
    /// dV.
    pub dv: Vec<f64>,
}

/// One row of one query head: where it lies, the keys that it sees, and their weights.
struct Row {
    /// Start in q and in the output.
    at: usize,
    lse_at: usize,
    /// Starts of the visible keys, in k and v.
    keys: Vec<usize>,
    /// Logits, after the soft-cap.
    logits: Vec<f64>,
    /// Softmax of the logits.
    p: Vec<f64>,
    lse: f64,
}

/// Every row that sees a key.
fn rows<'a>(call: &'a AttentionCall, q: &'a [f64], k: &'a [f64]) -> impl Iterator<Item = Row> + 'a {
    let shape = &call.shape;
    let places = (0..shape.batch).flat_map(move |batch| {
        (0..shape.n_q_heads).flat_map(move |head| (0..shape.len_q).map(move |row| (batch, head, row)))
    });
    places.filter_map(move |(batch, head, row)| {
        let at = shape.q_row(batch, row, head);
        let keys: Vec<usize> = call.visible(row).map(|j| shape.kv_row(batch, j, shape.kv_head(head))).collect();
        let logit = |&key: &usize| {
            let logit = call.softmax_scale * dot(&q[at..], &k[key..], shape.d_head);
            call.soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh())
        };
        let logits: Vec<f64> = keys.iter().map(logit).collect();
        let max = logits.iter().copied().reduce(f64::max)?;
        let lse = max + logits.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        let p = logits.iter().map(|s| (s - lse).exp()).collect();
        Some(Row { at, lse_at: shape.lse_at(batch, head, row), keys, logits, p, lse })
    })
}

fn dot(a: &[f64], b: &[f64], d: usize) -> f64 {
    (0..d).map(|c| a[c] * b[c]).sum()
}

fn add(to: &mut [f64], factor: f64, from: &[f64], d: usize) {
    (0..d).for_each(|c| to[c] += factor * from[c]);
}

fn check(call: &AttentionCall, q: &[f64], k: &[f64], v: &[f64]) -> Result<()> {
    call.check()?;
    check_length("q", q.len(), call.shape.q_elements())?;
    check_length("k", k.len(), call.shape.kv_elements())?;
    check_length("v", v.len(), call.shape.kv_elements())
}

/// Attention as the [module](super) defines it, without any cast; layouts as there.
///
/// # Errors
/// If the call or an operand's length breaks its rule.
pub fn reference(call: &AttentionCall, q: &[f64], k: &[f64], v: &[f64]) -> Result<ReferenceOutput> {
    check(call, q, k, v)?;
    let mut out = vec![0.0; call.shape.q_elements()];
    let mut lse = vec![f64::NEG_INFINITY; call.shape.lse_elements()];
    for row in rows(call, q, k) {
        for (p, &key) in row.p.iter().zip(&row.keys) {
            add(&mut out[row.at..], *p, &v[key..], call.shape.d_head);
        }
        lse[row.lse_at] = row.lse;
    }
    Ok(ReferenceOutput { out, lse })
}

/// Gradients of `sum(d_out * out)` with respect to q, k and v, without any cast.
///
/// # Errors
/// If the call, an operand's length or the length of `d_out` breaks its rule.
pub fn reference_backward(
    call: &AttentionCall,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    d_out: &[f64],
) -> Result<ReferenceGradients> {
    check(call, q, k, v)?;
    check_length("d_out", d_out.len(), call.shape.q_elements())?;
    let d = call.shape.d_head;
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for row in rows(call, q, k) {
        let dp: Vec<f64> = row.keys.iter().map(|&key| dot(&d_out[row.at..], &v[key..], d)).collect();
        let delta: f64 = row.p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for (j, &key) in row.keys.iter().enumerate() {
            let slope = call.soft_cap.map_or(1.0, |cap| 1.0 - (row.logits[j] / cap).powi(2));
            let ds = call.softmax_scale * row.p[j] * (dp[j] - delta) * slope;
            add(&mut dq[row.at..], ds, &k[key..], d);
            add(&mut dk[key..], ds, &q[row.at..], d);
            add(&mut dv[key..], row.p[j], &d_out[row.at..], d);
        }
    }
    Ok(ReferenceGradients { dq, dk, dv })
}
