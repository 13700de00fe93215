//! Attention and its gradients in f64, written to be obviously right: one row at a time, nothing tiled, nothing rounded.
//!
//! With centers it computes what a kernel does, from `k - c` and `v - m`, so that the plain call shows whether that is exact.

use super::call::{AttentionCall, check_length};
use crate::error::Result;

/// What [`reference()`] computes.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceOutput {
    /// Output, `(batch, len_q, n_q_heads, d_v)`.
    pub out: Vec<f64>,
    /// Log-sum-exp in nats with the sink in it, `(batch, n_q_heads, len_q)`; `-inf` where a row sees neither key nor sink.
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
    /// Gradient of each head's sink; empty without sinks.
    pub d_sinks: Vec<f64>,
}

/// One row of one query head: where it lies, the keys that it sees, and their weights.
struct Row {
    head: usize,
    /// Starts in q, in the output and in the log-sum-exp.
    q_at: usize,
    out_at: usize,
    lse_at: usize,
    /// Starts of the visible keys in k, and of their values in v.
    keys: Vec<(usize, usize)>,
    /// Logits, after the soft-cap.
    logits: Vec<f64>,
    /// Softmax of the logits.
    p: Vec<f64>,
    lse: f64,
    /// The sink's share of the row.
    sink: f64,
}

/// `x - center`, in the layout of k and v: `heads` rows of `d` values a token.
fn subtract(x: &[f64], center: Option<&Vec<Vec<f32>>>, heads: usize, d: usize) -> Vec<f64> {
    let mut out = x.to_vec();
    for (row, x) in out.chunks_exact_mut(d).enumerate() {
        let center = center.map(|center| &center[row % heads]);
        x.iter_mut().zip(center.into_iter().flatten()).for_each(|(x, c)| *x -= f64::from(*c));
    }
    out
}

fn widened(center: Option<&[f32]>) -> Vec<f64> {
    center.unwrap_or_default().iter().map(|x| f64::from(*x)).collect()
}

/// Every row that sees a key or a sink; `k` has its center subtracted.
fn rows<'a>(call: &'a AttentionCall<'_>, q: &'a [f64], k: &'a [f64]) -> impl Iterator<Item = Row> + 'a {
    let shape = &call.shape;
    let places = call.all_sequences().into_owned().into_iter().flat_map(move |sequence| {
        (0..shape.n_q_heads).flat_map(move |head| {
            let sequence = sequence.clone();
            (0..sequence.q.len()).map(move |i| (sequence.clone(), head, i))
        })
    });
    places.filter_map(move |(sequence, head, i)| {
        let row = sequence.q.start + i;
        let (q_at, kv_head) = (shape.q_at(row, head), shape.kv_head(head));
        let place = |j| (shape.k_at(sequence.k.start + j, kv_head), shape.v_at(sequence.k.start + j, kv_head));
        let keys: Vec<(usize, usize)> = call.visible(&sequence, i).map(place).collect();
        // What centered keys take from each logit: a soft-cap needs it before it, a sink and the log-sum-exp afterwards.
        let c = widened(call.key_center(head).filter(|_| !keys.is_empty()));
        let offset = call.softmax_scale * dot(&q[q_at..], &c, c.len());
        let (before, after) = if call.soft_cap.is_some() { (offset, 0.0) } else { (0.0, offset) };
        let logit = |&(key, _): &(usize, usize)| {
            let logit = call.softmax_scale * dot(&q[q_at..], &k[key..], shape.d_head) + before;
            call.soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh())
        };
        let logits: Vec<f64> = keys.iter().map(logit).collect();
        let sink = call.sinks.map(|sinks| sinks[head] - after);
        let columns = || logits.iter().copied().chain(sink);
        let max = columns().reduce(f64::max)?;
        let lse = max + columns().map(|s| (s - max).exp()).sum::<f64>().ln();
        let p = logits.iter().map(|s| (s - lse).exp()).collect();
        let (out_at, lse_at) = (shape.out_at(row, head), shape.lse_at(row, head));
        let sink = sink.map_or(0.0, |sink| (sink - lse).exp());
        // Without a key and a sink nothing is in the row's sum.
        Some(Row { head, q_at, out_at, lse_at, keys, logits, p, lse: lse + after, sink })
    })
}

fn dot(a: &[f64], b: &[f64], d: usize) -> f64 {
    (0..d).map(|c| a[c] * b[c]).sum()
}

fn add(to: &mut [f64], factor: f64, from: &[f64], d: usize) {
    (0..d).for_each(|c| to[c] += factor * from[c]);
}

/// Keys and values without their centers.
fn centered(call: &AttentionCall<'_>, k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (shape, center) = (&call.shape, call.center);
    (
        subtract(k, center.and_then(|center| center.k.as_ref()), shape.n_kv_heads, shape.d_head),
        subtract(v, center.and_then(|center| center.v.as_ref()), shape.n_kv_heads, shape.d_v),
    )
}

fn check(call: &AttentionCall<'_>, q: &[f64], k: &[f64], v: &[f64]) -> Result<()> {
    call.check()?;
    check_length("q", q.len(), call.shape.q_elements())?;
    check_length("k", k.len(), call.shape.k_elements())?;
    check_length("v", v.len(), call.shape.v_elements())
}

/// Attention as the [module](super) defines it, without any cast; layouts as there.
///
/// # Errors
/// If the call or an operand's length breaks its rule.
pub fn reference(call: &AttentionCall<'_>, q: &[f64], k: &[f64], v: &[f64]) -> Result<ReferenceOutput> {
    check(call, q, k, v)?;
    let (k, v) = centered(call, k, v);
    let mut out = vec![0.0; call.shape.out_elements()];
    let mut lse = vec![f64::NEG_INFINITY; call.shape.lse_elements()];
    for row in rows(call, q, &k) {
        for (p, &(_, value)) in row.p.iter().zip(&row.keys) {
            add(&mut out[row.out_at..], *p, &v[value..], call.shape.d_v);
        }
        let m = widened(call.value_center(row.head));
        add(&mut out[row.out_at..], 1.0 - row.sink, &m, m.len());
        lse[row.lse_at] = row.lse;
    }
    Ok(ReferenceOutput { out, lse })
}

/// Gradients of `sum(d_out * out)` with respect to q, k, v and the sinks, without any cast.
///
/// # Errors
/// If the call, an operand's length or the length of `d_out` breaks its rule.
pub fn reference_backward(
    call: &AttentionCall<'_>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    d_out: &[f64],
) -> Result<ReferenceGradients> {
    check(call, q, k, v)?;
    check_length("d_out", d_out.len(), call.shape.out_elements())?;
    let (d, d_v) = (call.shape.d_head, call.shape.d_v);
    let (k, v) = centered(call, k, v);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let mut d_sinks = vec![0.0; call.sinks.map_or(0, <[f64]>::len)];
    for row in rows(call, q, &k) {
        let c = widened(call.key_center(row.head));
        // Of a row that sees no key nothing is read.
        let m = widened(call.value_center(row.head).filter(|_| !row.keys.is_empty()));
        let d_out_m = dot(&d_out[row.out_at..], &m, m.len());
        let dp: Vec<f64> = row.keys.iter().map(|&(_, value)| dot(&d_out[row.out_at..], &v[value..], d_v)).collect();
        // The sink is a column whose value is zero, which is -m next to v - m.
        let delta = row.p.iter().zip(&dp).map(|(p, dp)| p * dp).sum::<f64>() - row.sink * d_out_m;
        let mut rest = 0.0;
        for (j, &(key, value)) in row.keys.iter().enumerate() {
            let slope = call.soft_cap.map_or(1.0, |cap| 1.0 - (row.logits[j] / cap).powi(2));
            let ds = call.softmax_scale * row.p[j] * (dp[j] - delta) * slope;
            add(&mut dq[row.q_at..], ds, &k[key..], d);
            add(&mut dk[key..], ds, &q[row.q_at..], d);
            add(&mut dv[value..], row.p[j], &d_out[row.out_at..], d_v);
            rest += ds;
        }
        if call.sinks.is_some() || call.soft_cap.is_some() {
            // Rows of dS do not sum to zero, so c does not cancel.
            add(&mut dq[row.q_at..], rest, &c, c.len());
        }
        if call.sinks.is_some() {
            d_sinks[row.head] -= row.sink * (delta + d_out_m);
        }
    }
    Ok(ReferenceGradients { dq, dk, dv, d_sinks })
}
