//! Random weights with a prescribed spectral norm, for studies of models that are not at hand.
//!
//! Every head is Gaussian; W_Q and W_K of a layer are scaled together so that the summed matrix
//! `M_sum = sum_h W_Q^h W_K^{kv(h)T}` (raw weights, the paper's sigma) has the target norm. The norm's gain is one
//! constant, biases and shifts are zero, QK-norm gains are one. Layers are drawn one at a time, each from its own
//! stream, so any layer can be had alone and the whole model is never held.
//!
//! Real heads are not Gaussian: their spectra are steeper and their tokens align with them. This is a stand-in for
//! sizes and magnitudes only.

use super::spec::{AttentionSpec, GainForm, LayerSpec, NormKind, QkNormScope};
use super::weights::{LayerWeights, NormVectors, Projection};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, MatrixView};
use half::bf16;
use nalgebra::DMatrix;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

/// Steps of the bidiagonalisation that measures the summed matrix.
const LANCZOS_STEPS: usize = 32;

/// Storage of synthetic weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyntheticDtype {
    /// bfloat16, as most checkpoints.
    #[default]
    Bf16,
    /// IEEE binary32.
    F32,
}

/// How synthetic weights are made.
#[derive(Clone, Debug)]
pub struct SyntheticOptions {
    /// Norm of the summed raw matrix of each layer; `None` leaves W_Q and W_K with variance 1 / d_model.
    pub sigma: Option<Vec<f64>>,
    /// The input norm's gain in effect (1 + g counts as one number).
    pub gain: f64,
    /// Storage.
    pub dtype: SyntheticDtype,
}

impl Default for SyntheticOptions {
    fn default() -> Self {
        Self { sigma: None, gain: 1.0, dtype: SyntheticDtype::Bf16 }
    }
}

/// A model of random weights, drawn layer by layer.
///
/// ```
/// use sigmascale::model::{SyntheticModel, SyntheticOptions, preset};
/// let mut spec = preset("gpt2-xl").unwrap();
/// spec.d_model = 128;
/// spec.set_heads(2, 2, 64);
/// let options = SyntheticOptions { sigma: Some(vec![50.0; spec.layers.len()]), ..Default::default() };
/// let model = SyntheticModel::new(&spec, 1, options)?;
/// let layer = model.layer(3)?;
/// assert_eq!(layer.weights().q.heads[1].shape(), (64, 128));
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SyntheticModel {
    spec: AttentionSpec,
    seed: u64,
    options: SyntheticOptions,
}

/// The owned weights of one synthetic layer.
#[derive(Clone, Debug)]
pub struct SyntheticLayer {
    layer: usize,
    spec: AttentionSpec,
    dtype: Dtype,
    /// q, k, v: `heads * d_head` rows of `d_model`, in storage format.
    storage: [Vec<u8>; 3],
    gain: f64,
}

impl SyntheticModel {
    /// A model of this shape.
    ///
    /// # Errors
    /// `is_argument` if the targets are not one finite positive number per layer, or the gain is not finite; `is_unsupported` for
    /// latent attention.
    pub fn new(spec: &AttentionSpec, seed: u64, options: SyntheticOptions) -> Result<Self> {
        if spec.has_mla() {
            return Err(Error::unsupported(format_args!(
                "{}: synthetic weights are not available for latent attention (MLA): pass a checkpoint",
                spec.name
            )));
        }
        if let Some(sigma) = &options.sigma {
            if sigma.len() != spec.layers.len() {
                return Err(Error::argument(format_args!(
                    "{} sigma targets do not fit {} layers",
                    sigma.len(),
                    spec.layers.len()
                )));
            }
            if let Some(bad) = sigma.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
                return Err(Error::argument(format_args!("sigma target {bad} must be finite and above zero")));
            }
        }
        if !options.gain.is_finite() {
            return Err(Error::argument(format_args!("norm gain {} must be finite", options.gain)));
        }
        Ok(Self { spec: spec.clone(), seed, options })
    }

    /// What the attention is.
    pub fn spec(&self) -> &AttentionSpec {
        &self.spec
    }

    /// Draws one layer: `4 d_model d_head (n_q + 2 n_kv)` bytes while it is made, half of it after in bf16.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<SyntheticLayer> {
        let own = self.spec.layer(layer)?;
        let [mut q, mut k, v] = [(0, own.n_q_heads), (1, own.n_kv_heads), (2, own.n_kv_heads)]
            .map(|(which, heads)| self.draw(layer, which, heads, own.d_head));
        if let Some(targets) = &self.options.sigma {
            let sigma = summed_norm(self.spec.d_model, own, &q, &k, self.seed ^ layer as u64, LANCZOS_STEPS);
            let factor = (targets[layer] / sigma).sqrt() as f32;
            for values in [&mut q, &mut k] {
                values.par_iter_mut().for_each(|x| *x *= factor);
            }
        }
        let dtype = match self.options.dtype {
            SyntheticDtype::Bf16 => Dtype::Bf16,
            SyntheticDtype::F32 => Dtype::F32,
        };
        let storage = [q, k, v].map(|values| store(&values, dtype));
        Ok(SyntheticLayer { layer, spec: self.spec.clone(), dtype, storage, gain: self.options.gain })
    }

    /// Heads of one projection, variance 1 / d_model; each head has its own stream.
    fn draw(&self, layer: usize, which: u64, heads: usize, r: usize) -> Vec<f32> {
        let d = self.spec.d_model;
        let scale = (d as f32).sqrt().recip();
        let mut values = vec![0f32; heads * r * d];
        values.par_chunks_mut(r * d).enumerate().for_each(|(head, chunk)| {
            let mut bytes = [0u8; 32];
            for (slot, word) in bytes.chunks_exact_mut(8).zip([self.seed, layer as u64, which, head as u64]) {
                slot.copy_from_slice(&word.to_le_bytes());
            }
            let mut rng = StdRng::from_seed(bytes);
            for x in chunk {
                let normal: f32 = StandardNormal.sample(&mut rng);
                *x = normal * scale;
            }
        });
        values
    }
}

impl SyntheticLayer {
    fn own(&self) -> &LayerSpec {
        // `SyntheticModel::layer` found it.
        &self.spec.layers[self.layer]
    }

    /// The weights as views, the same type that a checkpoint gives.
    pub fn weights(&self) -> LayerWeights<'_> {
        let spec = &self.spec;
        let (d, own) = (spec.d_model, self.own());
        let stored_gain = |gain: f64, form: GainForm| match form {
            GainForm::OnePlus => gain - 1.0,
            GainForm::Plain | GainForm::Unit => gain,
        };
        let has_norm = spec.norm.kind != NormKind::None;
        let norm = |heads: usize| {
            spec.qk_norm_of(own).map(|norm| {
                let len = match norm.scope {
                    QkNormScope::PerHead => own.d_head,
                    QkNormScope::Joint => heads * own.d_head,
                };
                let gain = vec![stored_gain(1.0, norm.gain); len];
                NormVectors { gain, shift: norm.shift.then(|| vec![0.0; len]) }
            })
        };
        LayerWeights {
            layer: self.layer,
            q: self.projection(0, own.n_q_heads, spec.bias.q, "synthetic W_Q"),
            k: self.projection(1, own.n_kv_heads, spec.bias.k, "synthetic W_K"),
            v: self.projection(2, own.n_kv_heads, spec.bias.v, "synthetic W_V"),
            norm_gain: (has_norm && spec.norm.gain != GainForm::Unit)
                .then(|| vec![stored_gain(self.gain, spec.norm.gain); d]),
            norm_shift: (has_norm && spec.norm.shift).then(|| vec![0.0; d]),
            q_norm: norm(own.n_q_heads),
            k_norm: norm(own.n_kv_heads),
            mla: None,
        }
    }

    fn projection(&self, which: usize, heads: usize, bias: bool, name: &str) -> Projection<'_> {
        let (d, r) = (self.spec.d_model, self.own().d_head);
        let whole = MatrixView::dense(&self.storage[which], self.dtype, heads * r, d).expect("storage has this size");
        Projection {
            heads: (0..heads).map(|h| whole.slice_rows(h * r, r)).collect(),
            bias: bias.then(|| vec![0.0; heads * r]),
            name: format!("{name} of layer {}", self.layer),
        }
    }
}

fn store(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0u8; values.len() * dtype.size()];
    // Views are little-endian whatever the machine is.
    bytes.par_chunks_mut(dtype.size()).zip(values).with_min_len(1 << 14).for_each(|(slot, x)| match dtype {
        Dtype::Bf16 => slot.copy_from_slice(&bf16::from_f32(*x).to_le_bytes()),
        _ => slot.copy_from_slice(&x.to_le_bytes()),
    });
    bytes
}

/// Spectral norm of `M_sum` by Golub-Kahan bidiagonalisation with full reorthogonalisation: from below, and short by
/// less than 0.2 % on Gaussian heads, whose spectrum has no gap at the top.
///
/// The query heads of one group meet the same key head, so they are summed first: one step costs
/// `4 d_model d_head n_kv` multiplications.
fn summed_norm(d: usize, layer: &LayerSpec, q: &[f32], k: &[f32], seed: u64, steps: usize) -> f64 {
    let group = layer.group();
    let head = layer.d_head * d;
    let mut sums = vec![0f32; layer.n_kv_heads * head];
    sums.par_chunks_mut(head).enumerate().for_each(|(kv, sum)| {
        for h in kv * group..(kv + 1) * group {
            for (s, x) in sum.iter_mut().zip(&q[h * head..(h + 1) * head]) {
                *s += x;
            }
        }
    });
    // y = A^T (B x), rows of A and B are channels.
    let apply = |a: &[f32], b: &[f32], x: &[f64]| -> Vec<f64> {
        let x: Vec<f32> = x.iter().map(|v| *v as f32).collect();
        a.par_chunks(head)
            .zip(b.par_chunks(head))
            .map(|(a, b)| {
                let mut y = vec![0f32; d];
                for (a, b) in a.chunks_exact(d).zip(b.chunks_exact(d)) {
                    let dot = dot(b, &x);
                    for (y, a) in y.iter_mut().zip(a) {
                        *y += dot * a;
                    }
                }
                y.into_iter().map(f64::from).collect::<Vec<f64>>()
            })
            .reduce(
                || vec![0.0; d],
                |mut x, y| {
                    x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
                    x
                },
            )
    };
    let mut rng = StdRng::seed_from_u64(seed);
    let mut v: Vec<f64> = (0..d).map(|_| StandardNormal.sample(&mut rng)).collect();
    normalise(&mut v);
    let steps = steps.min(d);
    let (mut left, mut right): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), vec![v]);
    let mut band = DMatrix::<f64>::zeros(steps, steps);
    for step in 0..steps {
        let mut u = apply(&sums, k, &right[step]);
        orthogonalise(&mut u, &left);
        band[(step, step)] = normalise(&mut u);
        left.push(u);
        if step + 1 == steps || band[(step, step)] == 0.0 {
            break;
        }
        let mut v = apply(k, &sums, &left[step]);
        orthogonalise(&mut v, &right);
        band[(step, step + 1)] = normalise(&mut v);
        if band[(step, step + 1)] == 0.0 {
            break;
        }
        right.push(v);
    }
    band.singular_values().max()
}

/// Dot product in eight chains, which the compiler turns into vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

fn orthogonalise(x: &mut [f64], basis: &[Vec<f64>]) {
    // Twice is enough.
    for _ in 0..2 {
        for b in basis {
            let c: f64 = x.iter().zip(b).map(|(x, b)| x * b).sum();
            x.iter_mut().zip(b).for_each(|(x, b)| *x -= c * b);
        }
    }
}

fn normalise(x: &mut [f64]) -> f64 {
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    if norm > 0.0 {
        x.iter_mut().for_each(|x| *x /= norm);
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::preset;

    fn dense(heads: &[MatrixView<'_>]) -> Vec<DMatrix<f64>> {
        let (r, d) = heads[0].shape();
        heads.iter().map(|head| DMatrix::from_fn(r, d, |c, i| head.get(c, i))).collect()
    }

    #[test]
    fn summed_norm_hits_the_target_with_grouped_heads() {
        let mut spec = preset("mistral-7b").unwrap();
        spec.d_model = 96;
        spec.layers.truncate(2);
        spec.set_heads(4, 2, 16);
        let targets = vec![46.8, 2.4];
        let options = SyntheticOptions { sigma: Some(targets.clone()), dtype: SyntheticDtype::F32, gain: 1.5 };
        let model = SyntheticModel::new(&spec, 7, options).unwrap();
        for (number, target) in targets.iter().enumerate() {
            let layer = model.layer(number).unwrap();
            let weights = layer.weights();
            let (q, k) = (dense(&weights.q.heads), dense(&weights.k.heads));
            let mut sum = DMatrix::<f64>::zeros(96, 96);
            for (h, q) in q.iter().enumerate() {
                sum += q.transpose() * &k[h / 2];
            }
            let sigma = sum.singular_values().max();
            assert!((sigma / target - 1.0).abs() < 1e-4, "{sigma} for {target}");
            assert_eq!(weights.norm_gain.unwrap()[5], 1.5);
        }
    }

    #[test]
    fn the_steps_taken_are_enough_on_a_flat_spectrum() {
        let mut spec = preset("gpt2-xl").unwrap();
        spec.d_model = 768;
        spec.set_heads(12, 12, 64);
        let model = SyntheticModel::new(&spec, 11, SyntheticOptions::default()).unwrap();
        let (q, k) = (model.draw(0, 0, 12, 64), model.draw(0, 1, 12, 64));
        let [taken, many] = [LANCZOS_STEPS, 160].map(|steps| summed_norm(768, &spec.layers[0], &q, &k, 4, steps));
        assert!(taken <= many * (1.0 + 1e-6) && taken > 0.998 * many, "{taken} of {many}");
    }

    #[test]
    fn a_layer_is_the_same_whenever_it_is_drawn() {
        let mut spec = preset("gpt2-xl").unwrap();
        spec.d_model = 128;
        spec.set_heads(2, 2, 64);
        let model = SyntheticModel::new(&spec, 3, SyntheticOptions::default()).unwrap();
        let (first, again, other) = (model.layer(5).unwrap(), model.layer(5).unwrap(), model.layer(6).unwrap());
        assert_eq!(first.storage, again.storage);
        assert_ne!(first.storage, other.storage);
    }

    #[test]
    fn arguments_are_checked() {
        let spec = preset("gpt2-xl").unwrap();
        let with = |sigma| SyntheticModel::new(&spec, 0, SyntheticOptions { sigma: Some(sigma), ..Default::default() });
        assert!(with(vec![1.0]).unwrap_err().is_argument());
        assert!(with(vec![f64::NAN; 48]).unwrap_err().is_argument());
    }
}
