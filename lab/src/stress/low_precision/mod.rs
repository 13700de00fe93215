//! The failure of BF16 flash attention, reproduced: a biased `delta` that makes the norms of W_Q and W_K grow.
//!
//! One attention layer without a mask is trained with AdamW on synthetic sequences. In every head each token looks for one
//! other token, which occurs once or `copies` times. Copies have the same key, so that the row maximum repeats. In one head,
//! [`LowPrecisionOptions::head`], the columns of V have one sign; this head fails, the others do not.
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
//! Nothing is added to a gradient. Attention and its backward pass are [`sigmascale::attention`]'s, with the casts of
//! [`Precision::BF16`] or of another [`Arithmetic`]; every head is a call of its own, so that each can have its own casts.
//! Source: "Why Low-Precision Transformer Training Fails", sections 3.2 and 3.3, Algorithms 1 to 3.

mod arithmetic;
mod casts;
mod head;
mod options;
mod remedy;
mod summary;

pub use arithmetic::Arithmetic;
pub use options::LowPrecisionOptions;
pub use remedy::Remedy;
pub use summary::{LowPrecisionSummary, RemedyVerdict, verdicts};

use crate::history::{FORMAT, History, LayerInfo, LayerRecord, OperandFormat, RunInfo, StepRecord};
use head::{D, FEATURES, Head, NORM_SQUARED, Projections, Seen, Tokens, Weights, zeros};
use nalgebra::DMatrix;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rayon::prelude::*;
use sigmascale::Result;
use sigmascale::spectral::largest_eigenvalue;

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct LowPrecisionRun {
    /// What the steps showed.
    pub history: History,
    /// Share of the squared change of each head's W_Q that lies in one singular direction: near 1 where every step pushed
    /// the same way.
    pub rank_one: Vec<f64>,
}

/// Trains with these options; the history has a step record for every step and a layer record for every tenth. `progress`
/// gets the number of steps done.
///
/// # Errors
/// `is_argument` if an option breaks its rule.
pub fn low_precision(options: &LowPrecisionOptions, mut progress: impl FnMut(u64)) -> Result<LowPrecisionRun> {
    options.check()?;
    let mut rng = StdRng::seed_from_u64(options.seed);
    let mut heads: Vec<Head> = (0..options.heads).map(|index| Head::new(index, options, &mut rng)).collect();
    let start: Vec<Weights> = heads.iter().map(|head| head.weights[0].clone()).collect();
    let mut moments: Vec<[Projections; 2]> = heads.iter().map(|_| [zeros(), zeros()]).collect();
    let (layer, count) = (0, options.heads);
    let operands = Some(match (options.remedy, options.arithmetic) {
        (Remedy::F32, _) => OperandFormat::F32,
        (_, Arithmetic::Fp8) => OperandFormat::Fp8,
        _ => OperandFormat::Bf16,
    });
    let info = LayerInfo { layer, heads: count, kv_heads: count, head_dim: D, width: Some(FEATURES), operands };
    let name = serde_json::to_string(options).ok();
    let run = RunInfo { format: FORMAT, source: "lab".into(), name, version: None, layers: vec![info] };
    let mut history = History { run, ..History::default() };
    for step in 0..options.steps {
        let tokens = Tokens::draw(options.copies, &mut rng);
        let look = step % 10 == 0;
        let passes = heads.par_iter().map(|head| head.pass(options, &tokens, look)).collect::<Result<Vec<_>>>()?;
        let grad_norm = passes.iter().flat_map(|pass| pass.1.iter().flatten()).map(|&g| f64::from(g).powi(2));
        let grad_norm = grad_norm.sum::<f64>().sqrt();
        let lr = options.rate * ((step + 1) as f32 / 100.0).min(1.0);
        history.steps.push(StepRecord {
            step,
            loss: Some(passes.iter().map(|pass| pass.0).sum()),
            grad_norm: Some(grad_norm),
            lr: Some(lr.into()),
            ..StepRecord::default()
        });
        if look {
            let seen: Vec<&Seen> = passes.iter().filter_map(|pass| pass.2.as_ref()).collect();
            history.layers.push(record(step, &heads, &seen));
        }
        let clip = (1.0 / grad_norm).min(1.0) as f32;
        for ((head, (_, grads, _)), moments) in heads.iter_mut().zip(&passes).zip(&mut moments) {
            update(head, grads, moments, step, lr, clip);
        }
        progress(step + 1);
    }
    let change = |(head, start): (&Head, &Weights)| {
        let change: Weights = head.weights[0].iter().zip(start).map(|(now, start)| now - start).collect();
        let gram = gram(&change);
        largest_eigenvalue(&gram).value / gram.trace()
    };
    let rank_one = heads.iter().zip(&start).map(change).collect();
    Ok(LowPrecisionRun { history, rank_one })
}

/// One step of AdamW without weight decay, with the paper's beta1 = 0.9 and beta2 = 0.95.
fn update(head: &mut Head, grads: &Projections, [first, second]: &mut [Projections; 2], step: u64, lr: f32, clip: f32) {
    let correct = |beta: f32| 1.0 - beta.powi(step as i32 + 1);
    for (((w, g), m), v) in head.weights.iter_mut().zip(grads).zip(first).zip(second) {
        for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
            *m = 0.9 * *m + 0.1 * g * clip;
            *v = 0.95 * *v + 0.05 * (g * clip).powi(2);
            *w -= lr * (*m / correct(0.9)) / ((*v / correct(0.95)).sqrt() + 1e-8);
        }
    }
}

fn record(step: u64, heads: &[Head], seen: &[&Seen]) -> LayerRecord {
    let column = |value: fn(&Seen) -> f64| seen.iter().map(|seen| value(seen)).collect::<Vec<f64>>();
    let norms: Vec<[f64; 2]> = heads.iter().map(|head| norms(&head.weights)).collect();
    let sigma: Vec<f64> = norms.iter().map(|norms| norms[1]).collect();
    LayerRecord {
        step,
        layer: 0,
        w_q: norms.iter().map(|norms| norms[0]).collect(),
        bound: sigma.iter().map(|sigma| NORM_SQUARED * sigma / (D as f64).sqrt()).collect(),
        // The head has no rotation.
        sigma_rope: sigma.clone(),
        sigma,
        logit_max: column(|seen| seen.logit),
        repeated: column(|seen| seen.repeated),
        repeated_in_tile: column(|seen| seen.repeated_in_tile),
        delta_bias: column(|seen| seen.bias),
        error_sign: column(|seen| seen.error_sign),
        entropy: column(|seen| seen.entropy),
        ..LayerRecord::default()
    }
}

/// `W W^T`.
fn gram(w: &Weights) -> DMatrix<f64> {
    let w = DMatrix::from_row_iterator(D, FEATURES, w.iter().map(|&x| f64::from(x)));
    &w * w.transpose()
}

/// Norms of W_Q and of W_Q^T W_K.
fn norms([q, k, _]: &Projections) -> [f64; 2] {
    let (q, k) = (gram(q), gram(k));
    let w_q = largest_eigenvalue(&q).upper.sqrt();
    // lambda_max(G_Q G_K) is that of the symmetric L^T G_K L with G_Q = L L^T.
    let l = q.cholesky().map(|l| l.unpack());
    let sigma = l.map_or(f64::NAN, |l| largest_eigenvalue(&(l.transpose() * k * &l)).upper.sqrt());
    [w_q, sigma]
}

#[cfg(test)]
mod tests;
