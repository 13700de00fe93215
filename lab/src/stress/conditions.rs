//! What the failure of BF16 attention needs, measured on a model's own forward: rows whose largest logit repeats, errors of the
//! output that keep their sign, and gradients of W_Q that point in one direction ("Why Low-Precision Transformer Training
//! Fails", sections 3.1 and 3.3).
//!
//! Only a forward is run. That dO has the sign of the error too needs gradients: the record of a training run has it.

use super::calls::call_of;
use super::lab::identity;
use super::model::StressModel;
use super::observed::sequences_of;
use super::tokens::{Source, TokenFile, TokenSummary};
use crate::forward::{normed, project};
use half::bf16;
use nalgebra::DMatrix;
use rayon::prelude::*;
use serde::Serialize;
use sigmascale::attention::{Attention, AttentionCall, Cpu, Inputs, Precision};
use sigmascale::model::{Rope, rotate};
use sigmascale::{Error, Result};

/// Rows of a sequence whose sums are followed key by key, and whose directions are compared.
const ROWS: usize = 64;

/// What one query head showed. Operands are in BF16, and logits in f32.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadConditions {
    /// The model's own number of the layer.
    pub layer: usize,
    /// Query head.
    pub head: usize,
    /// Share of rows whose largest logit occurs more than once.
    pub repeated: f64,
    /// Share of rows with more than one weight that is exactly 1 in BF16, before the row is normalized.
    pub ones: f64,
    /// Of the rounding errors of P V, summed in BF16 key by key, the share that is made where the weight is 1.
    pub error_at_ones: Option<f64>,
    /// How far these errors keep one sign in a channel of the output: 1 if always, near 0 if as often one as the other. Mean of
    /// the channels.
    pub error_sign: Option<f64>,
    /// Mean cosine of `(P K)[T]^T X[T]` of two rows T: of the directions in which an error of delta moves W_Q. Absent where q is
    /// normalized after the projection.
    pub similarity: Option<f64>,
}

/// What a text showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    /// The text.
    pub tokens: TokenSummary,
    /// Sequences that were run.
    pub sequences: usize,
    /// Tokens of each.
    pub seq_len: usize,
    /// Every query head of the layers with attention.
    pub heads: Vec<HeadConditions>,
}

/// Runs a text through a checkpoint in f32, in sequences of at most `seq_len` tokens. `each` is called after each layer.
///
/// # Errors
/// `is_unsupported` if the family has no forward here; as [`TokenFile::read`].
pub fn conditions(
    model: &StressModel,
    file: &TokenFile,
    seq_len: Option<usize>,
    each: &mut dyn FnMut(),
) -> Result<Conditions> {
    let spec = model.spec();
    let (sequences, seq_len) = sequences_of(model, file, seq_len)?;
    let mut source = Source::text(model, file, sequences, seq_len, false)?;
    let mut heads = Vec::new();
    for (layer, own) in spec.layers.iter().enumerate() {
        let stored = model.layer(layer, seq_len, 0)?;
        let weights = stored.weights(0, 1.0)?;
        let sinks = model.sinks(layer, 0)?;
        let call = call_of(spec, layer, seq_len, sinks.as_deref());
        let mut tallies = vec![Tally::default(); own.n_q_heads];
        for sequence in 0..sequences {
            let tokens = source.tokens(spec, layer, sequence);
            let projected = project(spec, &weights, &tokens)?;
            let inputs = Inputs { q: &projected.q, k: &projected.k, v: &projected.v };
            let read = spec.qk_norm_of(own).is_none().then(|| normed(spec, &weights, &tokens)).transpose()?;
            let rope = own.rope.as_ref().map(|rope| (spec.name.as_str(), rope));
            let seen = (0..own.n_q_heads).into_par_iter().map(|head| look(&call, &inputs, head, read.as_ref(), rope));
            for (tally, seen) in tallies.iter_mut().zip(seen.collect::<Result<Vec<_>>>()?) {
                tally.add(&seen);
            }
            if layer + 1 < spec.layers.len() {
                let exact = Cpu.forward(&call, &inputs, &identity(layer, &call.shape), &Precision::F32)?;
                source.advance(spec, &weights, sequence, &exact.out)?;
            }
        }
        heads.extend(tallies.iter().enumerate().map(|(head, tally)| tally.of(own.number, head)));
        each();
    }
    let tokens = source.summary().ok_or_else(|| Error::argument("there is no text"))?;
    Ok(Conditions { tokens, sequences, seq_len, heads })
}

/// Sums over the rows of a head.
#[derive(Clone, Debug, Default)]
struct Tally {
    rows: f64,
    repeated: f64,
    ones: f64,
    /// Sums of |error|, of all additions and of those where the weight is 1.
    errors: [f64; 2],
    /// By channel: sums of the error of the output and of its magnitude, over rows with several ones.
    signed: Vec<[f64; 2]>,
    /// Sum of cosines, and of pairs.
    cosines: [f64; 2],
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.repeated += other.repeated;
        self.ones += other.ones;
        self.signed.resize(other.signed.len(), [0.0; 2]);
        let pairs = |to: &mut [f64; 2], from: &[f64; 2]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        pairs(&mut self.errors, &other.errors);
        pairs(&mut self.cosines, &other.cosines);
        self.signed.iter_mut().zip(&other.signed).for_each(|(to, from)| pairs(to, from));
    }

    fn of(&self, layer: usize, head: usize) -> HeadConditions {
        let quotient = |part: f64, of: f64| (of > 0.0).then(|| part / of);
        let channels: Vec<f64> = self.signed.iter().filter_map(|[sum, size]| quotient(sum.abs(), *size)).collect();
        HeadConditions {
            layer,
            head,
            repeated: self.repeated / self.rows,
            ones: self.ones / self.rows,
            error_at_ones: quotient(self.errors[1], self.errors[0]),
            error_sign: quotient(channels.iter().sum(), channels.len() as f64),
            similarity: quotient(self.cosines[0], self.cosines[1]),
        }
    }
}

/// One head on one sequence. `read`: what the projections read, a token per column.
fn look(
    call: &AttentionCall<'_>,
    inputs: &Inputs<'_>,
    head: usize,
    read: Option<&DMatrix<f32>>,
    rope: Option<(&str, &Rope)>,
) -> Result<Tally> {
    let shape = call.shape;
    let (n, r) = (shape.len_q, shape.d_head);
    let kv_head = head * shape.n_kv_heads / shape.n_q_heads;
    let rounded = |values: &[f32], heads: usize, head: usize| -> Vec<f32> {
        let of = |token: &[f32]| token[head * r..][..r].iter().map(|x| bf16::from_f32(*x).to_f32()).collect::<Vec<_>>();
        values.chunks_exact(heads * r).flat_map(of).collect()
    };
    let q = rounded(inputs.q, shape.n_q_heads, head);
    let (k, v) = (rounded(inputs.k, shape.n_kv_heads, kv_head), rounded(inputs.v, shape.n_kv_heads, kv_head));
    let mut tally = Tally { signed: vec![[0.0; 2]; r], ..Tally::default() };
    let mut directions = vec![0f32; n * r];
    for (row, q) in q.chunks_exact(r).enumerate() {
        let keys = call.mask.visible(row, n, n);
        let logit = |k: &[f32]| {
            let s = q.iter().zip(k).map(|(a, b)| a * b).sum::<f32>() * call.softmax_scale as f32;
            call.soft_cap.map_or(s, |cap| cap as f32 * (s / cap as f32).tanh())
        };
        let logits: Vec<f32> = k[keys.start * r..keys.end * r].chunks_exact(r).map(logit).collect();
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let p: Vec<f32> = logits.iter().map(|s| bf16::from_f32((s - top).exp()).to_f32()).collect();
        let several = p.iter().filter(|p| **p == 1.0).count() > 1;
        tally.rows += 1.0;
        tally.repeated += f64::from(u8::from(logits.iter().filter(|s| **s == top).count() > 1));
        tally.ones += f64::from(u8::from(several));
        let total: f32 = logits.iter().map(|s| (s - top).exp()).sum();
        let direction = &mut directions[row * r..][..r];
        for (s, k) in logits.iter().zip(k[keys.start * r..].chunks_exact(r)) {
            let p = (s - top).exp() / total;
            direction.iter_mut().zip(k).for_each(|(to, k)| *to += p * k);
        }
        if row % (n / ROWS).max(1) != 0 {
            continue;
        }
        for channel in 0..r {
            let (mut sum, mut error) = (0f32, 0.0);
            for (p, v) in p.iter().zip(v[keys.start * r..].chunks_exact(r)) {
                let next = bf16::from_f32(sum + p * v[channel]).to_f32();
                let step = f64::from(next) - f64::from(sum) - f64::from(*p) * f64::from(v[channel]);
                tally.errors[0] += step.abs();
                if *p == 1.0 {
                    tally.errors[1] += step.abs();
                }
                (sum, error) = (next, error + step);
            }
            if several {
                tally.signed[channel][0] += error;
                tally.signed[channel][1] += error.abs();
            }
        }
    }
    if let Some(read) = read {
        tally.cosines = cosines(directions, r, read, rope)?;
    }
    Ok(tally)
}

/// The sum of the cosines of `(P K)[T]^T X[T]` over pairs of rows, and their number. `directions`: P K, which is turned back by
/// the row's rotation, as the gradient of q is.
fn cosines(mut directions: Vec<f32>, r: usize, read: &DMatrix<f32>, rope: Option<(&str, &Rope)>) -> Result<[f64; 2]> {
    if let Some((name, rope)) = rope {
        // A turn by the opposite angle is one between two reflections.
        let reflect = |directions: &mut [f32]| {
            let second: Vec<usize> = rope.pairs().map(|(_, b)| b).collect();
            directions.chunks_exact_mut(r).for_each(|row| second.iter().for_each(|&b| row[b] = -row[b]));
        };
        reflect(&mut directions);
        rotate(name, rope, 0, (1, r), &mut directions)?;
        reflect(&mut directions);
    }
    let n = read.ncols();
    let rows: Vec<usize> = (0..n).step_by((n / ROWS).max(1)).collect();
    let unit = |columns: Vec<&[f32]>| {
        let d = columns[0].len();
        let mut matrix = DMatrix::from_iterator(d, columns.len(), columns.into_iter().flatten().copied());
        for mut column in matrix.column_iter_mut() {
            let norm = column.norm();
            if norm > 0.0 {
                column /= norm;
            }
        }
        matrix.transpose() * &matrix
    };
    let of_keys = unit(rows.iter().map(|row| &directions[row * r..][..r]).collect());
    let of_inputs = unit(rows.iter().map(|row| &read.as_slice()[row * read.nrows()..][..read.nrows()]).collect());
    // The cosine of two matrices of rank one is the product of those of their factors.
    let products = of_keys.component_mul(&of_inputs);
    let off_diagonal = f64::from(products.sum() - products.trace());
    Ok([off_diagonal, (rows.len() * (rows.len() - 1)) as f64])
}

#[cfg(test)]
mod tests {
    use super::*;
    use sigmascale::attention::{AttentionShape, Mask};

    const N: usize = 48;
    const R: usize = 8;

    fn call() -> AttentionCall<'static> {
        let shape = AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q: N, len_k: N, d_head: R, d_v: R };
        AttentionCall { mask: Mask::NONE, softmax_scale: 1.0, ..AttentionCall::causal(shape) }
    }

    fn wave(seed: f32) -> Vec<f32> {
        (0..N * R).map(|i| (i as f32 * seed).sin()).collect()
    }

    /// Every key occurs `copies` times, and values have one sign.
    fn seen(copies: usize, read: Option<&DMatrix<f32>>) -> HeadConditions {
        let (q, drawn, mut v) = (wave(0.37), wave(1.91), wave(2.7));
        let k: Vec<f32> = (0..N).flat_map(|key| drawn[key / copies * R..][..R].to_vec()).collect();
        v.iter_mut().for_each(|v| *v = -2.3 - 0.4 * *v);
        let q: Vec<f32> = q.iter().map(|q| 6.0 * q).collect();
        let inputs = Inputs { q: &q, k: &k, v: &v };
        look(&call(), &inputs, 0, read, None).unwrap().of(3, 0)
    }

    #[test]
    fn copies_of_keys_repeat_the_maximum_and_bias_the_output() {
        let (once, thrice) = (seen(1, None), seen(3, None));
        assert_eq!((thrice.repeated, thrice.ones, thrice.layer), (1.0, 1.0, 3));
        assert!(once.repeated == 0.0 && once.ones < 0.3, "{once:?}");
        let errors = |head: &HeadConditions| head.error_at_ones.unwrap();
        assert!(errors(&thrice) > 2.0 * errors(&once), "{thrice:?} {once:?}");
        assert!((0.0..=1.0).contains(&thrice.error_sign.unwrap()));
        assert_eq!(thrice.similarity, None);
    }

    #[test]
    fn similarity_is_that_of_keys_times_that_of_inputs() {
        let mean = |directions: &[f32], read: &DMatrix<f32>| {
            let [sum, pairs] = cosines(directions.to_vec(), R, read, None).unwrap();
            sum / pairs
        };
        let (same, turn) = ([1.5; N * R], wave(0.7));
        let one = DMatrix::from_element(5, N, 2.0);
        // Of 48 tokens in turn along five axes, 414 of 2256 ordered pairs share an axis.
        let axes = DMatrix::from_fn(5, N, |axis, token| f32::from(u8::from(token % 5 == axis)));
        assert!((mean(&same, &one) - 1.0).abs() < 1e-5);
        assert!((mean(&same, &axes) - 414.0 / 2256.0).abs() < 1e-5);
        assert!(mean(&turn, &one).abs() < 0.9 && mean(&turn, &axes).abs() < 414.0 / 2256.0);
        // A head on a text has the same.
        assert!(seen(1, Some(&one)).similarity.is_some_and(|cosine| (-1.0..=1.0).contains(&cosine)));

        let drawn = DMatrix::from_iterator(5, N, (0..5 * N).map(|i| (i as f32 * 3.1).cos()));
        let mut directions = wave(0.7);
        let plain = cosines(directions.clone(), R, &drawn, None).unwrap();
        let rope = Rope {
            rotary_dim: R,
            other_dims: Vec::new(),
            layout: sigmascale::model::RopeLayout::HalfSplit,
            attention_factor: 1.0,
            inv_freq: Some(vec![1.0, 0.3, 0.1, 0.03]),
            range: None,
        };
        rotate("test", &rope, 0, (1, R), &mut directions).unwrap();
        let turned = cosines(directions, R, &drawn, Some(("test", &rope))).unwrap();
        assert!((plain[0] - turned[0]).abs() < 1e-3 * plain[1], "{plain:?} {turned:?}");
    }
}
