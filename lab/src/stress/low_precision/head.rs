//! The heads of the construction: planted weights, tokens, and one pass of the layer forwards and backwards.

use super::casts::Casts;
use super::options::LowPrecisionOptions;
use super::remedy::Remedy;
use half::bf16;
use rand::RngExt;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use sigmascale::Descale;
use sigmascale::attention::{
    Attention, AttentionCall, AttentionOutput, AttentionShape, Cast, Cpu, Delta, Inputs, Mask, Saved, backward,
    reference,
};
use sigmascale::fp8::{self, Format, OnOverflow};
use sigmascale::plan::{OperandDescales, ScalePlan};
use sigmascale::{Error, Result};

/// Tokens, channels of a head, constant features, sequences in a step.
pub const TOKENS: usize = 31;
pub const D: usize = 32;
const CONSTANT: usize = 16;
pub const BATCH: usize = 2;
pub const FEATURES: usize = TOKENS + CONSTANT;
/// Value of a constant feature: the massive activations of trained models.
pub const MASSIVE: f32 = 4.0;
/// Squared norm of a token's features.
pub const NORM_SQUARED: f64 = 1.0 + CONSTANT as f64 * (MASSIVE * MASSIVE) as f64;
/// The share by which targets differ from what attention can give.
const GAP: f32 = 0.1;

/// `(D, FEATURES)`.
pub type Weights = Vec<f32>;
/// W_Q, W_K and W_V of one head.
pub type Projections = [Weights; 3];

pub fn zeros() -> Projections {
    std::array::from_fn(|_| vec![0.0; D * FEATURES])
}

/// The sequences of one step, of one length.
pub struct Tokens {
    /// `(BATCH, n)`.
    pub ids: Vec<usize>,
    pub n: usize,
    /// `(BATCH, TOKENS)`: how often each token occurs.
    copies: Vec<usize>,
}

impl Tokens {
    /// Sequences in which half of the tokens, drawn anew, occur `copies` times.
    pub fn draw(copies: usize, rng: &mut StdRng) -> Self {
        let (mut ids, mut counts) = (Vec::new(), Vec::new());
        for _ in 0..BATCH {
            let mut order: Vec<usize> = (0..TOKENS).collect();
            shuffle(&mut order, rng);
            let mut count = [1; TOKENS];
            order[..TOKENS / 2].iter().for_each(|&token| count[token] = copies);
            let mut tokens: Vec<usize> = (0..TOKENS).flat_map(|token| vec![token; count[token]]).collect();
            shuffle(&mut tokens, rng);
            ids.extend(tokens);
            counts.extend(count);
        }
        Self { n: ids.len() / BATCH, ids, copies: counts }
    }
}

/// What one head showed in a step that is recorded.
#[derive(Default)]
pub struct Seen {
    pub logit: f64,
    pub repeated: f64,
    pub repeated_in_tile: f64,
    /// Sum of the error of the delta that the backward uses, over that of |delta|.
    pub bias: f64,
    /// Mean product of the signs of dO and of the output's error.
    pub error_sign: f64,
    pub entropy: f64,
}

pub struct Head {
    index: usize,
    /// `(TOKENS, D)`.
    target: Vec<f32>,
    /// The token that each token looks for.
    partner: Vec<usize>,
    pub weights: Projections,
}

impl Head {
    pub fn new(index: usize, options: &LowPrecisionOptions, rng: &mut StdRng) -> Self {
        let mut partner: Vec<usize> = (0..TOKENS).collect();
        shuffle(&mut partner, rng);
        let code = |a: usize, token: usize| if (a & (token + 1)).count_ones().is_multiple_of(2) { 1.73 } else { -1.73 };
        let mut normal = || -> f32 { StandardNormal.sample(&mut *rng) };
        let one_sign = options.head == Some(index);
        let target: Vec<f32> =
            (0..TOKENS * D).map(|_| if one_sign { -1.5 * (0.6 * normal()).exp() } else { 1.5 * normal() }).collect();
        let mut weights = zeros();
        for a in 0..D {
            for token in 0..TOKENS {
                weights[0][a * FEATURES + token] = code(a, partner[token]);
                weights[1][a * FEATURES + token] = code(a, token);
                weights[2][a * FEATURES + token] = target[token * D + a];
            }
            for matrix in weights[..2].iter_mut().filter(|_| one_sign) {
                matrix[a * FEATURES + TOKENS..][..CONSTANT].fill(1.0 / (CONSTANT as f32 * MASSIVE));
            }
        }
        Self { index, target, partner, weights }
    }

    /// `W x` for every token, `(BATCH, n, D)`; weights and result in BF16 if `rounded`.
    fn project(weights: &Weights, tokens: &Tokens, rounded: bool) -> Vec<f32> {
        let round = |x: f32| if rounded { bf16::from_f32(x).to_f32() } else { x };
        let row = |a: usize| &weights[a * FEATURES..][..FEATURES];
        let constant: Vec<f32> = (0..D).map(|a| row(a)[TOKENS..].iter().map(|&w| round(w)).sum()).collect();
        let of =
            |&token: &usize| (0..D).map(|a| round(round(row(a)[token]) + MASSIVE * constant[a])).collect::<Vec<_>>();
        tokens.ids.iter().flat_map(of).collect()
    }

    /// Forward and backward. Returns the head's loss, its gradients and, if asked for, what it showed.
    pub fn pass(
        &self,
        options: &LowPrecisionOptions,
        tokens: &Tokens,
        look: bool,
    ) -> Result<(f64, Projections, Option<Seen>)> {
        let casts = Casts::of(self.index, options);
        let rounded = [casts.query, casts.others, casts.others];
        let mut x: [Vec<f32>; 3] = std::array::from_fn(|i| Self::project(&self.weights[i], tokens, rounded[i]));
        let n = tokens.n;
        let shape = AttentionShape { batch: BATCH, n_q_heads: 1, n_kv_heads: 1, len_q: n, len_k: n, d_head: D, d_v: D };
        let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape) };
        let one = vec![Descale::ONE];
        let operands = match casts.precision.operands {
            Cast::E4m3 => {
                // Rounded here, where every look at the operands sees it; the call's own cast changes nothing then.
                let [q, k, v] = x.each_mut().map(|x| {
                    let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
                    let descale = Descale::covering(most.into(), fp8::E4M3_MAX.into())?;
                    let scale = descale.quant_scale().get();
                    x.iter_mut()
                        .for_each(|x| *x = Format::E4m3.round(*x * scale, OnOverflow::Saturate) * descale.get());
                    Ok::<_, Error>(vec![descale])
                });
                OperandDescales { q: q?, k: k?, v: Some(v?), o: None }
            }
            _ => OperandDescales { q: one.clone(), k: one.clone(), v: None, o: None },
        };
        let inputs = Inputs { q: &x[0], k: &x[1], v: &x[2] };
        let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: one, operands };
        let mut output = match casts.shifted {
            Some(softmax) => softmax.forward(&call, &inputs, &plan, &casts.precision)?.output,
            None => Cpu.forward(&call, &inputs, &plan, &casts.precision)?,
        };
        // The output that delta is taken from.
        let mut used = output.out.clone();
        if options.remedy == Remedy::UnroundedDelta {
            for (used, out) in used.iter_mut().zip(&mut output.out) {
                *out = bf16::from_f32(*used).to_f32();
                *used = *out + bf16::from_f32(*used - *out).to_f32();
            }
        }
        let mut loss = 0.0;
        let mean = 1.0 / (BATCH * n * options.heads) as f32;
        let mut d_out = vec![0.0; output.out.len()];
        for (i, &token) in tokens.ids.iter().enumerate() {
            let partner = self.partner[token];
            let factor = if tokens.copies[i / n * TOKENS + partner] > 1 { 1.0 - GAP } else { 1.0 + GAP };
            for a in 0..D {
                let miss = output.out[i * D + a] - factor * self.target[partner * D + a];
                loss += 0.5 * f64::from(miss * miss * mean / D as f32);
                d_out[i * D + a] = miss * mean / D as f32;
            }
        }
        let saved = Saved { out: &used, lse: &output.lse };
        let gradients = backward(&call, &inputs, &plan, &casts.precision, &casts.backward, &saved, &d_out)?;
        let seen = look
            .then(|| self.look(options, &call, &inputs, &AttentionOutput { out: used, ..output }, &d_out))
            .transpose()?;
        let mut grads = zeros();
        for (grad, dx) in grads.iter_mut().zip([gradients.dq, gradients.dk, gradients.dv]) {
            for (dx, &token) in dx.chunks_exact(D).zip(&tokens.ids) {
                for (row, dx) in grad.chunks_exact_mut(FEATURES).zip(dx) {
                    row[token] += dx;
                    row[TOKENS] += dx * MASSIVE;
                }
            }
            // The gradient is the same for every constant feature.
            for row in grad.chunks_exact_mut(FEATURES) {
                let constant = row[TOKENS];
                row[TOKENS..].fill(constant);
            }
        }
        Ok((loss, grads, seen))
    }

    fn look(
        &self,
        options: &LowPrecisionOptions,
        call: &AttentionCall<'_>,
        inputs: &Inputs<'_>,
        output: &AttentionOutput,
        d_out: &[f32],
    ) -> Result<Seen> {
        let delta_from = Casts::of(self.index, options).backward.delta;
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let exact = reference(call, &wide(inputs.q), &wide(inputs.k), &wide(inputs.v))?;
        let n = call.shape.len_k;
        let rows = (BATCH * n) as f64;
        let mut seen = Seen { logit: output.stats.logits[0].amax().into(), ..Seen::default() };
        let (mut error, mut size) = (0.0, 0.0);
        for (i, (q, d_out)) in inputs.q.chunks_exact(D).zip(d_out.chunks_exact(D)).enumerate() {
            let sequence = i / n * n * D..(i / n + 1) * n * D;
            let products = |row: &[f32], with: &[f32]| -> Vec<f32> {
                with.chunks_exact(D).map(|other| row.iter().zip(other).map(|(a, b)| a * b).sum()).collect()
            };
            let logits: Vec<f32> =
                products(q, &inputs.k[sequence.clone()]).iter().map(|s| s * call.softmax_scale as f32).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let repeats =
                |s: &[f32]| f64::from(u8::from(s.iter().filter(|&&s| max - s <= options.epsilon).count() > 1));
            seen.repeated += repeats(&logits) / rows;
            seen.repeated_in_tile += logits.chunks(options.tile).map(repeats).fold(0.0, f64::max) / rows;
            let p = |s: &f32| f64::from(s - output.lse[i]);
            seen.entropy -= logits.iter().map(|s| p(s).exp() * p(s)).sum::<f64>() / rows;

            let high: f64 = d_out.iter().zip(&exact.out[i * D..]).map(|(d, o)| f64::from(*d) * o).sum();
            let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
            let signs = d_out.iter().zip(&output.out[i * D..]).zip(&exact.out[i * D..]);
            let agreeing = signs.map(|((d, o), exact)| sign(f64::from(*d)) * sign(f64::from(*o) - exact));
            seen.error_sign += agreeing.sum::<f64>() / (rows * D as f64);
            let used: f64 = match delta_from {
                Delta::Output => {
                    d_out.iter().zip(&output.out[i * D..]).map(|(d, o)| f64::from(*d) * f64::from(*o)).sum()
                }
                Delta::Probabilities => {
                    let weights = logits.iter().map(|s| (s - output.lse[i]).exp());
                    weights.zip(products(d_out, &inputs.v[sequence])).map(|(p, dp)| p * dp).sum::<f32>().into()
                }
            };
            error += used - high;
            size += high.abs();
        }
        Ok(Seen { bias: error / size, ..seen })
    }
}

fn shuffle(values: &mut [usize], rng: &mut StdRng) {
    (1..values.len()).rev().for_each(|i| values.swap(i, rng.random_range(0..=i)));
}
