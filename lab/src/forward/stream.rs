//! The whole forward of a model around its attention calls, one sequence at a time.
//!
//! ```text
//! norms before:  h += O attention(norm(h))        h += MLP(norm(h))           (Llama, GPT-2)
//! around:        h += norm(O attention(norm(h)))  h += norm(MLP(norm(h)))     (Gemma 2 and 3)
//! of outputs:    h += norm(O attention(h))        h += norm(MLP(h))           (OLMo 2)
//! norms after:   h  = norm(h + O attention(h))    h  = norm(h + MLP(h))       (BERT)
//! MLP(x) = down(act(gate x) * up x), or down(act(up x)) without a gate, or the sum over those that a router chooses
//! ```
//!
//! Attention itself is the caller's: [`Stream::input`] gives what a layer's projections read, [`Stream::advance`] takes
//! what its attention put out. f32 products, norms in f64.

use super::qkv::{Tokens, affine, normed, product};
use nalgebra::DMatrix;
use rayon::prelude::*;
use sigmascale::model::{Activation, AttentionSpec, Block, Body, LayerWeights, Linear, Mlp, NormKind, NormOrder};
use sigmascale::{Error, Result};
use statrs::function::erf::erf;
use std::f32::consts::FRAC_2_SQRT_PI;

/// The residual stream of one sequence, between two attention calls.
#[derive(Clone, Debug)]
pub struct Stream {
    /// `d_model x tokens`. With norms after the blocks, the sum before the norm that is the next layer's input norm.
    hidden: DMatrix<f32>,
}

impl Stream {
    /// Embeds token ids at positions 0, 1, ...
    ///
    /// # Errors
    /// `is_argument` if there are no ids, one is not in the vocabulary, or there are more than the model takes;
    /// `is_non_finite` if an embedding is not finite.
    pub fn embed(spec: &AttentionSpec, body: &Body<'_>, ids: &[u32]) -> Result<Self> {
        let (vocabulary, d) = body.tokens.shape();
        if ids.is_empty() {
            return Err(Error::argument("a sequence needs at least one token"));
        }
        if let Some((longest, what)) = body.longest.filter(|(longest, _)| ids.len() > *longest) {
            let (name, count) = (&spec.name, ids.len());
            return Err(Error::argument(format_args!("{name}: {count} tokens exceed the {longest} {what}")));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            let name = &spec.name;
            return Err(Error::argument(format_args!(
                "token id {id} is outside the vocabulary of {name} ({vocabulary} ids)"
            )));
        }
        let mut hidden = DMatrix::zeros(d, ids.len());
        let mut row = vec![0.0; d];
        for (position, (mut token, id)) in hidden.column_iter_mut().zip(ids).enumerate() {
            let mut add = |values: &[f64]| token.iter_mut().zip(values).for_each(|(x, value)| *x += *value as f32);
            let id = *id as usize;
            body.tokens.read_block(id..id + 1, 0..d, &mut row);
            add(&row);
            if let Some(positions) = &body.positions {
                positions.read_block(position..position + 1, 0..d, &mut row);
                add(&row);
            }
            if let Some(segment) = &body.segment {
                add(segment);
            }
        }
        hidden *= body.embedding_factor as f32;
        let stream = Self { hidden };
        stream.check(spec, "the embedding")?;
        Ok(stream)
    }

    /// Tokens of the sequence.
    pub fn count(&self) -> usize {
        self.hidden.ncols()
    }

    /// What the next layer's projections read, before the gain and shift of its input norm.
    pub fn input(&self, spec: &AttentionSpec, body: &Body<'_>) -> Tokens {
        let mut values = self.hidden.clone();
        if spec.norm.kind != NormKind::None {
            normalise_all(&mut values, spec, body);
        }
        Tokens { values: values.as_slice().to_vec(), d_model: spec.d_model, epsilon: body.epsilon }
    }

    /// Goes through the rest of a layer: `attention` is its output, `(token, query head, channel)`; `weights` are those
    /// that [`super::project`] got.
    ///
    /// # Errors
    /// `is_mismatch` if a length does not fit, `is_non_finite` if the result is not finite.
    pub fn advance(
        &mut self,
        spec: &AttentionSpec,
        body: &Body<'_>,
        weights: &LayerWeights<'_>,
        block: &Block<'_>,
        attention: &[f32],
    ) -> Result<()> {
        let (d, count) = (spec.d_model, self.count());
        let own = spec.layer(weights.layer)?;
        let inner = own.n_q_heads * own.d_head;
        if attention.len() != inner * count {
            return Err(Error::mismatch(format_args!(
                "{} layer {}: an attention output of {} values does not fit {count} tokens of {inner}",
                spec.name,
                weights.layer,
                attention.len()
            )));
        }
        if body.order == NormOrder::After {
            self.hidden = normed(spec, weights, &self.input(spec, body))?;
        }
        let normed_by = |mut tokens: DMatrix<f32>, gain: Option<&[f64]>, shift: Option<&[f64]>| {
            if gain.is_some() {
                normalise_all(&mut tokens, spec, body);
                affine(&mut tokens, gain, body.gain, shift);
            }
            tokens
        };
        let out = linear(&block.attention_out, &DMatrix::from_column_slice(inner, count, attention))?;
        self.hidden += normed_by(out, block.attention_gain.as_deref(), None);
        let y = normed_by(self.hidden.clone(), block.gain.as_deref(), block.shift.as_deref());
        let out = normed_by(mlps(body.activation, block, &y)?, block.mlp_gain.as_deref(), None);
        if body.order == NormOrder::After {
            self.hidden = y;
        }
        self.hidden += out;
        debug_assert_eq!(self.hidden.nrows(), d);
        self.check(spec, format_args!("layer {}'s output", weights.layer))
    }

    fn check(&self, spec: &AttentionSpec, what: impl std::fmt::Display) -> Result<()> {
        if self.hidden.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        Err(Error::non_finite(format_args!("{}: {what} is not finite on these tokens", spec.name)))
    }
}

/// The norm of every token, without gain and shift.
fn normalise_all(tokens: &mut DMatrix<f32>, spec: &AttentionSpec, body: &Body<'_>) {
    let centred = spec.norm.kind == NormKind::LayerNorm;
    let rows = tokens.nrows();
    tokens.as_mut_slice().par_chunks_exact_mut(rows).for_each(|token| normalise(token, centred, body.epsilon));
}

/// The norm of [`Stream::input`]: `x / sqrt(mean x^2 + epsilon)`, without the mean if `centred`.
fn normalise(token: &mut [f32], centred: bool, epsilon: f64) {
    let n = token.len() as f64;
    let mean = if centred { token.iter().map(|x| f64::from(*x)).sum::<f64>() / n } else { 0.0 };
    let square = token.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
    let root = (square + epsilon).sqrt();
    let factor = if root > 0.0 { root.recip() } else { 0.0 };
    token.iter_mut().for_each(|x| *x = ((f64::from(*x) - mean) * factor) as f32);
}

/// `W x + b`, a token per column.
fn linear(linear: &Linear<'_>, input: &DMatrix<f32>) -> Result<DMatrix<f32>> {
    let mut out = product(&linear.weight, input);
    if let Some(bias) = &linear.bias {
        for mut token in out.column_iter_mut() {
            token.iter_mut().zip(bias).for_each(|(x, b)| *x += *b as f32);
        }
    }
    if out.iter().all(|x| x.is_finite()) {
        return Ok(out);
    }
    Err(Error::non_finite(format_args!("tensor `{}`: its product with these tokens is not finite", linear.name)))
}

/// The MLP of a block, or of each token those that the router chooses.
fn mlps(activation: Activation, block: &Block<'_>, input: &DMatrix<f32>) -> Result<DMatrix<f32>> {
    let Some(router) = &block.router else { return mlp(activation, &block.mlps[0], input) };
    let logits = linear(&router.logits, input)?;
    // The tokens of each MLP, with the weights of its outputs.
    let mut taken = vec![Vec::new(); block.mlps.len()];
    for (token, logits) in logits.column_iter().enumerate() {
        let most = logits.max();
        let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        order.truncate(router.chosen);
        let share = |at: &usize| f64::from(logits[*at] - most).exp() / sum;
        let whole = if router.normalized { order.iter().map(share).sum() } else { 1.0 };
        order.iter().for_each(|at| taken[*at].push((token, (share(at) / whole) as f32)));
    }
    let mut out = DMatrix::zeros(input.nrows(), input.ncols());
    for (expert, tokens) in block.mlps.iter().zip(&taken).filter(|(_, tokens)| !tokens.is_empty()) {
        let own = mlp(activation, expert, &input.select_columns(tokens.iter().map(|(token, _)| token)))?;
        for ((token, weight), from) in tokens.iter().zip(own.column_iter()) {
            out.column_mut(*token).axpy(*weight, &from, 1.0);
        }
    }
    Ok(out)
}

fn mlp(activation: Activation, mlp: &Mlp<'_>, input: &DMatrix<f32>) -> Result<DMatrix<f32>> {
    let mut inner = linear(&mlp.up, input)?;
    let apply = |x: f32| activate(activation, x);
    match &mlp.gate {
        Some(gate) => {
            let gate = linear(gate, input)?;
            inner.as_mut_slice().par_iter_mut().zip(gate.as_slice()).for_each(|(x, gate)| *x *= apply(*gate));
        }
        None => inner.as_mut_slice().par_iter_mut().for_each(|x| *x = apply(*x)),
    }
    linear(&mlp.down, &inner)
}

fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => (0.5 * f64::from(x) * (1.0 + erf(f64::from(x) * std::f64::consts::FRAC_1_SQRT_2))) as f32,
        Activation::GeluTanh => {
            // sqrt(2 / pi).
            let root = FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
            0.5 * x * (1.0 + (root * (x + 0.044_715 * x * x * x)).tanh())
        }
        Activation::Relu => x.max(0.0),
    }
}
