//! A plain f64 forward from a spec and borrowed weights up to the logits: what the bounds are about.
//!
//! Tokens are given as `x_hat`, the normalised input before gain and shift: on the sphere `||x_hat|| = sqrt(d)`, mean
//! zero for LayerNorm ([`random_x_hat`], [`to_sphere`]). Positions are any real number. Heads are slow and obvious.

use rand::Rng;
use rand_distr::{Distribution, StandardNormal};
use sigmascale::model::{
    AttentionSpec, GainForm, LayerWeights, NormKind, NormVectors, Projection, QkNorm, QkNormScope, Rope,
};

/// Queries, keys and values of one token, head after head, as the attention call gets them.
#[derive(Clone, Debug)]
pub struct Qkv {
    /// `n_q_heads` vectors of `d_head`.
    pub q: Vec<Vec<f64>>,
    /// `n_kv_heads` vectors of `d_head`.
    pub k: Vec<Vec<f64>>,
    /// `n_kv_heads` vectors of `d_head`.
    pub v: Vec<Vec<f64>>,
}

/// Queries, keys and values of one token at one position: norm, projection, QK-norm, rotation.
///
/// # Panics
/// If the layer is rotated by angles the config does not determine; use [`forward_qkv_at`] then.
pub fn forward_qkv(spec: &AttentionSpec, weights: &LayerWeights<'_>, x_hat: &[f64], position: f64) -> Qkv {
    let angles = match &spec.layers[weights.layer].rope {
        Some(rope) => rope.inv_freq.as_ref().expect("angles").iter().map(|w| w * position).collect(),
        None => Vec::new(),
    };
    let temperature = &spec.layers[weights.layer].temperature;
    let factor = temperature.as_ref().map_or(1.0, |temperature| temperature.factor(position as usize));
    turned_and_grown(spec, weights, x_hat, &angles, factor)
}

/// The same with the angle of each rotated pair given outright, and the query grown as at the last position: bounds must
/// hold for any.
pub fn forward_qkv_at(spec: &AttentionSpec, weights: &LayerWeights<'_>, x_hat: &[f64], angles: &[f64]) -> Qkv {
    turned_and_grown(spec, weights, x_hat, angles, last_factor(spec, weights))
}

/// What multiplies the query at the last position of the config.
pub fn last_factor(spec: &AttentionSpec, weights: &LayerWeights<'_>) -> f64 {
    let temperature = &spec.layers[weights.layer].temperature;
    temperature.as_ref().map_or(1.0, |temperature| temperature.factor(temperature.positions - 1))
}

fn turned_and_grown(
    spec: &AttentionSpec,
    weights: &LayerWeights<'_>,
    x_hat: &[f64],
    angles: &[f64],
    factor: f64,
) -> Qkv {
    let x = norm_output(spec, weights, x_hat);
    let mut q = project(&weights.q, &x);
    let mut k = project(&weights.k, &x);
    let mut v = project(&weights.v, &x);
    if spec.v_norm {
        v = v.iter().map(|head| to_sphere(NormKind::RmsNorm, head)).collect();
    }
    let own = &spec.layers[weights.layer];
    for behind_rotation in [false, true] {
        if let Some(norm) = spec.qk_norm_of(own).filter(|norm| norm.behind_rotation == behind_rotation) {
            q = qk_norm(&norm, weights.q_norm.as_ref(), &q);
            k = qk_norm(&norm, weights.k_norm.as_ref(), &k);
        }
        if let (Some(rope), false) = (&own.rope, behind_rotation) {
            for head in q.iter_mut().chain(&mut k) {
                rotate(rope, head, angles);
            }
        }
    }
    q.iter_mut().flatten().for_each(|value| *value *= factor);
    Qkv { q, k, v }
}

/// The logit of query head `head` between two tokens, softmax scale and soft-cap included.
pub fn logit(spec: &AttentionSpec, layer: usize, head: usize, query: &Qkv, key: &Qkv) -> f64 {
    let raw = dot(&query.q[head], &key.k[head / spec.layers[layer].group()]) * spec.layers[layer].softmax_scale;
    match spec.soft_cap {
        Some(cap) => cap * (raw / cap).tanh(),
        None => raw,
    }
}

/// Gain and shift on a normalised token: what the projections read.
pub fn norm_output(spec: &AttentionSpec, weights: &LayerWeights<'_>, x_hat: &[f64]) -> Vec<f64> {
    scale_and_shift(x_hat, weights.norm_gain.as_deref(), spec.norm.gain, weights.norm_shift.as_deref())
}

/// A random token on the sphere of the spec's norm.
pub fn random_x_hat(spec: &AttentionSpec, rng: &mut impl Rng) -> Vec<f64> {
    let x: Vec<f64> = (0..spec.d_model).map(|_| StandardNormal.sample(rng)).collect();
    to_sphere(spec.norm.kind, &x)
}

/// The nearest point that a norm of this kind can give: mean removed for LayerNorm, length `sqrt(len)`. Unchanged
/// without a norm.
pub fn to_sphere(kind: NormKind, x: &[f64]) -> Vec<f64> {
    let len = x.len() as f64;
    let mean = match kind {
        NormKind::LayerNorm => x.iter().sum::<f64>() / len,
        NormKind::RmsNorm => 0.0,
        NormKind::None => return x.to_vec(),
    };
    let rms = (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / len).sqrt();
    x.iter().map(|v| (v - mean) / rms).collect()
}

/// Dot product.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn scale_and_shift(x: &[f64], gain: Option<&[f64]>, form: GainForm, shift: Option<&[f64]>) -> Vec<f64> {
    (0..x.len())
        .map(|i| {
            let gain = match (gain, form) {
                (Some(g), GainForm::Plain) => g[i],
                (Some(g), GainForm::OnePlus) => 1.0 + g[i],
                _ => 1.0,
            };
            gain * x[i] + shift.map_or(0.0, |s| s[i])
        })
        .collect()
}

fn project(projection: &Projection<'_>, x: &[f64]) -> Vec<Vec<f64>> {
    let mut row = vec![0.0; x.len()];
    let mut out = Vec::new();
    for (h, head) in projection.heads.iter().enumerate() {
        let (r, d) = head.shape();
        assert_eq!(d, x.len());
        out.push(
            (0..r)
                .map(|c| {
                    head.read_block(c..c + 1, 0..d, &mut row);
                    dot(&row, x) + projection.bias.as_ref().map_or(0.0, |b| b[h * r + c])
                })
                .collect(),
        );
    }
    out
}

fn qk_norm(norm: &QkNorm, vectors: Option<&NormVectors>, heads: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let r = heads[0].len();
    let bare = NormVectors { gain: vec![1.0; r], shift: None };
    let vectors = vectors.unwrap_or(&bare);
    match norm.scope {
        QkNormScope::Joint => {
            let all = to_sphere(norm.kind, &heads.concat());
            let all = scale_and_shift(&all, Some(&vectors.gain), norm.gain, vectors.shift.as_deref());
            all.chunks(r).map(<[f64]>::to_vec).collect()
        }
        QkNormScope::PerHead => heads
            .iter()
            .enumerate()
            .map(|(h, head)| {
                // Shared by all heads, or one stretch per head.
                let from = if vectors.gain.len() == r { 0 } else { h * r };
                let shift = vectors.shift.as_ref().map(|s| &s[from..from + r]);
                scale_and_shift(&to_sphere(norm.kind, head), Some(&vectors.gain[from..from + r]), norm.gain, shift)
            })
            .collect(),
    }
}

fn rotate(rope: &Rope, head: &mut [f64], angles: &[f64]) {
    assert_eq!(angles.len(), rope.rotary_dim / 2);
    for ((a, b), angle) in rope.pairs().zip(angles) {
        let (sin, cos) = angle.sin_cos();
        let (x, y) = (head[a], head[b]);
        head[a] = rope.attention_factor * (x * cos - y * sin);
        head[b] = rope.attention_factor * (y * cos + x * sin);
    }
}
