//! The failure of BF16 flash attention, reproduced: a biased `delta` that makes the norms of W_Q and W_K grow.
//!
//! One attention layer with one head and no mask is trained with AdamW on synthetic sequences. Every token looks for one other
//! token, which occurs once or `copies` times. Copies have the same key, so that the row maximum repeats.
//!
//! ```text
//! O~ = bf16(bf16(exp(S - m)) V)      O = bf16(O~ / l)      delta = rowsum(dO o O)      dS = P o (dP - delta)
//! ```
//!
//! **Why the error is not opposed.** In exact arithmetic rows of dS sum to zero, so the part of K that all keys share
//! gives dQ nothing. An error e of delta adds `-alpha e (P K)[T]` to `dQ[T]`, which has this part. No gradient of the loss
//! opposes it, and AdamW makes its steps as large as any other.
//!
//! **Why the error has one sign.** V has columns of one sign. A sum of `copies` equal values often lies halfway between
//! two BF16 numbers; the small rest of the row, of the same sign, decides every such tie away from zero. The target asks
//! for less where a token repeats and for more where it does not, which attention cannot do, so that dO keeps the
//! sign of O on repeated rows.
//!
//! Nothing is added to a gradient. Source: "Why Low-Precision Transformer Training Fails", sections 3.2 and 3.3,
//! Algorithms 1 to 3.

use crate::attention::Stabilised;
use crate::error::{Error, Result};
use crate::history::{FORMAT, History, LayerInfo, LayerRecord, RunInfo, StepRecord};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use serde::Serialize;

/// What is done against the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remedy {
    /// Nothing: P, the product P V and O in BF16, delta from O.
    None,
    /// The output in f32 from P V on.
    F32Output,
    /// P V in f32, the output in BF16.
    F32Pv,
    /// delta = rowsum(P o dP).
    DeltaFromP,
    /// The row maximum of Algorithm 3 with beta = 2 and epsilon = 1e-3, moved by at most 40 nats, as
    /// [`Stabilised`](crate::attention::Stabilised) does. Past the limit every row moves by the same 40 nats, which is the
    /// fixed offset that the paper's appendix C warns of.
    Stabilised,
    /// The same, but past the limit a row with maximum r moves by `20 + r mod 20` nats, so that P rounds either way.
    StabilisedVarying,
    /// Everything in f32.
    F32,
}

impl Remedy {
    /// Every choice.
    pub const ALL: [Self; 7] = [
        Self::None,
        Self::F32Output,
        Self::F32Pv,
        Self::DeltaFromP,
        Self::Stabilised,
        Self::StabilisedVarying,
        Self::F32,
    ];
}

/// What a run is made from.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LowPrecisionOptions {
    /// Remedy.
    pub remedy: Remedy,
    /// Seed of tokens, targets and batches.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Learning rate after 100 steps of warm-up.
    pub rate: f32,
    /// How often a repeated token occurs; 1, 2 and 4 times have no tie to round.
    pub copies: usize,
    /// Whether every column of V has one sign.
    pub one_sign: bool,
}

impl Default for LowPrecisionOptions {
    fn default() -> Self {
        Self { remedy: Remedy::None, seed: 0, steps: 1600, rate: 1e-3, copies: 3, one_sign: true }
    }
}

/// Tokens, channels of a head, constant features, sequences in a step.
const TOKENS: usize = 31;
const D: usize = 32;
const CONSTANT: usize = 16;
const BATCH: usize = 2;
const FEATURES: usize = TOKENS + CONSTANT;
/// Value of a constant feature: the massive activations of trained models.
const MASSIVE: f32 = 4.0;
/// The share by which targets differ from what attention can give.
const GAP: f32 = 0.1;

type Weights = Vec<f32>;

struct Head {
    target: Vec<f32>,
    partner: Vec<usize>,
    weights: [Weights; 3],
}

#[derive(Default)]
struct Seen {
    loss: f64,
    bias: f64,
    delta: f64,
    logit: f32,
    repeated: u64,
    rows: u64,
    entropy: f64,
}

fn round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

impl Head {
    fn new(options: &LowPrecisionOptions, rng: &mut StdRng) -> Self {
        let mut partner: Vec<usize> = (0..TOKENS).collect();
        shuffle(&mut partner, rng);
        let code = |a: usize, token: usize| if (a & (token + 1)).count_ones().is_multiple_of(2) { 1.73 } else { -1.73 };
        let mut normal = || -> f32 { StandardNormal.sample(&mut *rng) };
        let target: Vec<f32> = (0..TOKENS * D)
            .map(|_| if options.one_sign { -1.5 * (0.6 * normal()).exp() } else { 1.5 * normal() })
            .collect();
        let mut weights: [Weights; 3] = std::array::from_fn(|_| vec![0.0; D * FEATURES]);
        for a in 0..D {
            for token in 0..TOKENS {
                weights[0][a * FEATURES + token] = code(a, partner[token]);
                weights[1][a * FEATURES + token] = code(a, token);
                weights[2][a * FEATURES + token] = target[token * D + a];
            }
            for matrix in &mut weights[..2] {
                matrix[a * FEATURES + TOKENS..][..CONSTANT].fill(1.0 / (CONSTANT as f32 * MASSIVE));
            }
        }
        Self { target, partner, weights }
    }

    /// One sequence: adds its gradients.
    fn sequence(&self, options: &LowPrecisionOptions, rng: &mut StdRng, grads: &mut [Weights; 3], seen: &mut Seen) {
        let remedy = options.remedy;
        let mut order: Vec<usize> = (0..TOKENS).collect();
        shuffle(&mut order, rng);
        let mut copies = [1; TOKENS];
        order[..TOKENS / 2].iter().for_each(|&token| copies[token] = options.copies);
        let mut tokens: Vec<usize> = (0..TOKENS).flat_map(|token| vec![token; copies[token]]).collect();
        shuffle(&mut tokens, rng);
        let n = tokens.len();
        let project = |w: &Weights| -> Vec<f32> {
            let row = |&token: &usize| {
                (0..D).map(move |a| {
                    let constant: f32 = w[a * FEATURES + TOKENS..(a + 1) * FEATURES].iter().sum();
                    let x = w[a * FEATURES + token] + MASSIVE * constant;
                    if remedy == Remedy::F32 { x } else { round(x) }
                })
            };
            tokens.iter().flat_map(row).collect()
        };
        let [q, k, v] = [0, 1, 2].map(|i| project(&self.weights[i]));
        let alpha = (D as f32).sqrt().recip();
        let scale = 1.0 / (n * BATCH) as f32;
        let [mut dq, mut dk, mut dv] = [0, 1, 2].map(|_| vec![0f32; n * D]);
        for (i, &token) in tokens.iter().enumerate() {
            let s: Vec<f32> = (0..n).map(|j| alpha * dot(&q[i * D..], &k[j * D..])).collect();
            let max = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let repeated = s.iter().filter(|&&x| max - x <= 1e-3).count() > 1;
            let limit = match remedy {
                Remedy::StabilisedVarying => 20.0 + max.abs() % 20.0,
                _ => Stabilised::MAX_SHIFT,
            };
            let stabilises = matches!(remedy, Remedy::Stabilised | Remedy::StabilisedVarying);
            let moved = match repeated && stabilises {
                true if max.abs() > Stabilised::MAX_SHIFT => limit,
                true => max.abs(),
                false => 0.0,
            };
            let shift = max + moved;
            let p: Vec<f32> = s.iter().map(|x| (x - shift).exp()).collect();
            let sum: f32 = p.iter().sum();
            let (output, exact) = forward(remedy, &p, sum, &v);
            let partner = self.partner[token];
            let factor = if copies[partner] > 1 { 1.0 - GAP } else { 1.0 + GAP };
            let d_out: Vec<f32> =
                (0..D).map(|a| (output[a] - factor * self.target[partner * D + a]) / D as f32).collect();
            seen.loss += d_out.iter().map(|x| 0.5 * f64::from(x * x) * D as f64).sum::<f64>() * f64::from(scale);
            let (lp, hp) = (dot(&d_out, &output), dot(&d_out, &exact));
            seen.bias += f64::from(lp - hp);
            seen.delta += f64::from(hp.abs());
            seen.logit = s.iter().fold(seen.logit, |m, x| m.max(x.abs()));
            seen.repeated += u64::from(repeated);
            seen.rows += 1;
            let dp: Vec<f32> = (0..n).map(|j| dot(&d_out, &v[j * D..])).collect();
            let p: Vec<f32> = p.iter().map(|p| p / sum).collect();
            seen.entropy -= p.iter().filter(|&&p| p > 0.0).map(|&p| f64::from(p * p.ln())).sum::<f64>();
            let delta = match remedy {
                Remedy::DeltaFromP => p.iter().zip(&dp).map(|(p, dp)| p * dp).sum(),
                _ => lp,
            };
            for j in 0..n {
                let ds = alpha * scale * p[j] * (dp[j] - delta);
                for a in 0..D {
                    dq[i * D + a] += ds * k[j * D + a];
                    dk[j * D + a] += ds * q[i * D + a];
                    dv[j * D + a] += scale * p[j] * d_out[a];
                }
            }
        }
        for (grad, dx) in grads.iter_mut().zip([dq, dk, dv]) {
            for (dx, &token) in dx.chunks_exact(D).zip(&tokens) {
                for (a, dx) in dx.iter().enumerate() {
                    grad[a * FEATURES + token] += dx;
                    grad[a * FEATURES + TOKENS..(a + 1) * FEATURES].iter_mut().for_each(|g| *g += dx * MASSIVE);
                }
            }
        }
    }
}

/// One row's output as the remedy rounds it, and in f32 from the same P.
fn forward(remedy: Remedy, p: &[f32], sum: f32, v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let mut product = [0f32; D];
    for (p, v) in p.iter().zip(v.chunks_exact(D)) {
        let p = if remedy == Remedy::F32 { *p } else { round(*p) };
        product.iter_mut().zip(v).for_each(|(sum, v)| *sum += p * v);
    }
    let output = |x: &f32| match remedy {
        Remedy::F32 | Remedy::F32Output => x / sum,
        Remedy::F32Pv => round(x / sum),
        _ => round(round(*x) / sum),
    };
    (product.iter().map(output).collect(), product.iter().map(|x| x / sum).collect())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).take(D).map(|(a, b)| a * b).sum()
}

fn shuffle(values: &mut [usize], rng: &mut StdRng) {
    (1..values.len()).rev().for_each(|i| values.swap(i, rng.random_range(0..=i)));
}

fn norm(w: &Weights) -> f64 {
    let w = nalgebra::DMatrix::from_row_iterator(D, FEATURES, w.iter().map(|&x| f64::from(x)));
    (&w * w.transpose()).symmetric_eigenvalues().max().sqrt()
}

/// Trains with these options; the history has a step record for every step and a layer record for every tenth.
///
/// # Errors
/// `is_argument` for no steps, no copies or a rate that is not positive.
pub fn low_precision(options: &LowPrecisionOptions) -> Result<History> {
    if options.steps == 0 || options.copies == 0 || !(options.rate > 0.0 && options.rate.is_finite()) {
        return Err(Error::argument(format_args!("{options:?}: steps, copies and rate must be greater than zero")));
    }
    let mut rng = StdRng::seed_from_u64(options.seed);
    let mut head = Head::new(options, &mut rng);
    let zeros = || -> [Weights; 3] { std::array::from_fn(|_| vec![0.0; D * FEATURES]) };
    let (mut first, mut second) = (zeros(), zeros());
    let info = LayerInfo { layer: 0, heads: 1, kv_heads: 1, head_dim: D, width: Some(FEATURES) };
    let name = serde_json::to_string(options).ok();
    let run = RunInfo { format: FORMAT, source: "lab".into(), name, version: None, layers: vec![info] };
    let mut history = History { run, ..History::default() };
    for step in 0..options.steps {
        let (mut grads, mut seen) = (zeros(), Seen::default());
        (0..BATCH).for_each(|_| head.sequence(options, &mut rng, &mut grads, &mut seen));
        let grad_norm = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        let lr = options.rate * ((step + 1) as f32 / 100.0).min(1.0);
        history.steps.push(StepRecord {
            step,
            loss: Some(seen.loss),
            grad_norm: Some(grad_norm),
            lr: Some(lr.into()),
            ..StepRecord::default()
        });
        if step % 10 == 0 {
            let rows = seen.rows as f64;
            history.layers.push(LayerRecord {
                step,
                layer: 0,
                w_q: vec![norm(&head.weights[0])],
                logit_max: vec![seen.logit.into()],
                repeated: vec![seen.repeated as f64 / rows],
                delta_bias: vec![seen.bias / seen.delta],
                entropy: vec![seen.entropy / rows],
                ..LayerRecord::default()
            });
        }
        let clip = (1.0 / grad_norm).min(1.0) as f32;
        let correct = |beta: f32| 1.0 - beta.powi(step as i32 + 1);
        for (((w, g), m), v) in head.weights.iter_mut().zip(&grads).zip(&mut first).zip(&mut second) {
            for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                *m = 0.9 * *m + 0.1 * g * clip;
                *v = 0.95 * *v + 0.05 * (g * clip).powi(2);
                *w -= lr * (*m / correct(0.9)) / ((*v / correct(0.95)).sqrt() + 1e-8);
            }
        }
    }
    Ok(history)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bias(remedy: Remedy, one_sign: bool) -> f64 {
        let options = LowPrecisionOptions { remedy, one_sign, steps: 11, ..LowPrecisionOptions::default() };
        let history = low_precision(&options).unwrap();
        history.layers.iter().map(|layer| layer.delta_bias[0]).sum::<f64>() / history.layers.len() as f64
    }

    #[test]
    fn repeated_maxima_and_values_of_one_sign_bias_delta_upwards() {
        let none = bias(Remedy::None, true);
        assert!(none > 1e-4, "{none}");
        for remedy in [Remedy::F32Output, Remedy::F32Pv, Remedy::StabilisedVarying, Remedy::F32] {
            let with = bias(remedy, true).abs();
            assert!(with < none / 2.0, "{remedy:?}: {with} against {none}");
        }
    }
}
