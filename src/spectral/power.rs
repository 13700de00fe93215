//! The paper's implicit power iteration (Section 4, Algorithms 2 and 3): parity, and a cheap tracker.
//!
//! One iteration is `u = M v / ||M v||`, `v = M^T u / ||M^T u||`, with `M v = W_Q (W_K^T v)`, so that M is never formed.
//! `summed` iterates on `sum_h W_Q^h W_K^hT` as the paper does; with grouped queries the r-vectors are replicated on the
//! way out and summed on the way back, and W_K is never expanded. The sum bounds no head (`W_Q, -W_Q` on one `W_K` cancel),
//! so the default is one iteration per head.
//!
//! **An estimate is a lower bound**: `||M^T u|| <= sigma` for every unit u. [`certified_inflation`] says how far below it
//! can be after k iterations from a random start; nothing is promised after a warm start on changed weights.

use super::spectrum::{Constants, Estimator, HeadSpectrum, Iterations, LayerSpectrum, PowerEstimate};
use super::spectrum::{SpectralEngine, layer_channels};
use crate::error::{Error, Result};
use crate::geometry::{Channels, HeadOperator, LayerGeometry, Rotary};
use crate::model::{AttentionSpec, PerLayer};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use statrs::function::beta::beta_reg;

/// Version of a saved [`PowerState`]; any other is refused.
const STATE_VERSION: u32 = 1;

/// Persistent singular vectors of a whole model, owned by the caller; save it to resume warm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerState {
    version: u32,
    seed: u64,
    d_model: usize,
    n_q_heads: PerLayer,
    layers: Vec<Option<LayerVectors>>,
}

/// The vectors of one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct LayerVectors {
    heads: Vec<PowerVectors>,
    raw: Vec<PowerVectors>,
    summed: Option<PowerVectors>,
}

/// Estimates of the top left and right singular vectors of one matrix, `d` values each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerVectors {
    /// Left.
    pub u: Vec<f32>,
    /// Right.
    pub v: Vec<f32>,
    /// Iterations since they were drawn.
    steps: u64,
    /// Those on the weights that they were drawn for; `None` once these have changed.
    cold: Option<usize>,
}

impl PowerState {
    /// A state without vectors: every layer starts cold, from vectors drawn from `seed`.
    pub fn new(spec: &AttentionSpec, seed: u64) -> Self {
        let n_q_heads = PerLayer::new(spec.layers.iter().map(|layer| layer.n_q_heads));
        Self { version: STATE_VERSION, seed, d_model: spec.d_model, n_q_heads, layers: vec![None; spec.layers.len()] }
    }

    /// Whether the state is of a model of this shape.
    ///
    /// # Errors
    /// `is_mismatch`, naming what differs.
    pub fn check_model(&self, spec: &AttentionSpec) -> Result<()> {
        let want = Self::new(spec, self.seed);
        let of = |state: &Self| (state.layers.len(), state.d_model, state.n_q_heads.clone());
        let (here, there) = (of(self), of(&want));
        if self.version == want.version && here == there {
            return Ok(());
        }
        Err(Error::mismatch(format_args!(
            "power state of version {} with (layers, d_model, n_q_heads) = {here:?} is not one of version {} with {there:?}",
            self.version, want.version
        )))
    }

    /// Query heads of one layer, if the state has it.
    fn n_q(&self, layer: usize) -> Option<usize> {
        match &self.n_q_heads {
            PerLayer::Same(count) => (layer < self.layers.len()).then_some(*count),
            PerLayer::Each(counts) => counts.get(layer).copied().filter(|_| layer < self.layers.len()),
        }
    }

    /// Whether a layer has vectors to start from.
    pub fn is_warm(&self, layer: usize) -> bool {
        self.layers.get(layer).is_some_and(Option::is_some)
    }

    fn check(&self, geometry: &LayerGeometry<'_>) -> Result<()> {
        if self.version != STATE_VERSION {
            return Err(Error::mismatch(format_args!(
                "the power state has version {}, this build reads {STATE_VERSION}",
                self.version
            )));
        }
        let here = (self.d_model, self.n_q(geometry.layer));
        let there = (geometry.d_model, Some(geometry.q.len()));
        if here != there {
            return Err(Error::mismatch(format_args!(
                "{}: a power state of {} layers with (d_model, n_q_heads) = {here:?} does not fit {there:?}",
                geometry.place,
                self.layers.len()
            )));
        }
        let fits = |p: &PowerVectors| {
            p.u.len() == self.d_model && p.v.len() == self.d_model && p.u.iter().chain(&p.v).all(|x| x.is_finite())
        };
        let sound = self.layers[geometry.layer].as_ref().is_none_or(|layer| {
            (layer.heads.is_empty() || layer.heads.len() == geometry.q.len())
                && (layer.raw.is_empty() || layer.raw.len() == geometry.q.len())
                && layer.heads.iter().chain(&layer.raw).chain(&layer.summed).all(fits)
        });
        if !sound {
            return Err(Error::mismatch(format_args!(
                "{}: the power state does not hold one finite pair of {} values per head",
                geometry.place, self.d_model
            )));
        }
        Ok(())
    }
}

impl PowerVectors {
    /// A random unit right vector (a normalized Gaussian is uniform on the sphere) and no left one yet.
    pub fn random(d: usize, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut v: Vec<f64> = (0..d).map(|_| StandardNormal.sample(&mut rng)).collect();
        normalise(&mut v);
        Self { u: vec![0.0; d], v: v.into_iter().map(|x| x as f32).collect(), steps: 0, cold: Some(0) }
    }

    /// For weights that are those of the last iteration, or others.
    fn on(&mut self, unchanged: bool) -> &mut Self {
        self.cold = self.cold.filter(|_| unchanged);
        self
    }

    /// Runs `iterations >= 1` iterations of the operator given by `M x` and `M^T x`.
    pub fn iterate(
        &mut self,
        iterations: usize,
        mut forward: impl FnMut(&[f64]) -> Vec<f64>,
        mut adjoint: impl FnMut(&[f64]) -> Vec<f64>,
    ) -> PowerEstimate {
        let mut v: Vec<f64> = self.v.iter().map(|&x| f64::from(x)).collect();
        normalise(&mut v);
        let iterations = iterations.max(1);
        self.steps += iterations as u64;
        self.cold = self.cold.map(|cold| cold + iterations);
        let (mut sigma, mut residual) = (0.0, 0.0);
        for _ in 0..iterations {
            let mut u = forward(&v);
            let along = normalise(&mut u);
            let mut next = adjoint(&u);
            residual = next.iter().zip(&v).map(|(n, v)| (n - along * v).powi(2)).sum::<f64>().sqrt();
            sigma = normalise(&mut next);
            if sigma == 0.0 {
                // M v = 0: the vectors stay as they are; a warm start that is orthogonal to M never moves.
                break;
            }
            self.u = u.iter().map(|&x| x as f32).collect();
            v = next;
        }
        self.v = v.iter().map(|&x| x as f32).collect();
        PowerEstimate { sigma, residual, cold_iterations: self.cold, steps: self.steps }
    }
}

impl PowerEstimate {
    /// What sigma does not exceed, but with probability `p` over the random start; `None` once the weights have changed.
    ///
    /// # Errors
    /// As [`certified_inflation`].
    pub fn upper(&self, rank: usize, p: f64) -> Result<Option<f64>> {
        let inflation = |iterations| certified_inflation(iterations, rank, p);
        Ok(self.cold_iterations.map(inflation).transpose()?.map(|factor| factor * self.sigma))
    }
}

/// Scales to unit length, returns the former length; a zero vector stays.
fn normalise(x: &mut [f64]) -> f64 {
    // Through the largest entry, or squares of values past 1e154 would be infinite and those below 1e-154 zero.
    let largest = x.iter().fold(0.0f64, |largest, v| largest.max(v.abs()));
    if largest == 0.0 {
        return 0.0;
    }
    x.iter_mut().for_each(|v| *v /= largest);
    let norm = x.iter().map(|v| v * v).sum::<f64>().sqrt();
    x.iter_mut().for_each(|v| *v /= norm);
    largest * norm
}

/// The power-iteration engine: borrows the caller's state and advances it.
#[derive(Debug)]
pub struct PowerEngine<'s> {
    state: &'s mut PowerState,
    /// Iterations for a layer without vectors (the paper: 5).
    pub cold: usize,
    /// Iterations for a layer with vectors (the paper: 1).
    pub warm: usize,
    /// Whether to iterate on every head (sound form) in addition to the sum.
    pub per_head: bool,
    /// Whether the weights are those of the engine's last call: a cold start is then still one.
    pub unchanged: bool,
}

impl<'s> PowerEngine<'s> {
    /// An engine with the paper's iteration counts.
    pub fn new(state: &'s mut PowerState) -> Self {
        let Iterations { cold, warm } = Iterations::default();
        Self { state, cold, warm, per_head: true, unchanged: false }
    }

    /// What the bounds of one layer need: the norm of each head, or under [`Estimator::PowerSummed`] that of the sum in its place.
    ///
    /// # Errors
    /// As [`SpectralEngine::layer`].
    pub fn estimate(&mut self, geometry: &LayerGeometry<'_>, estimator: Estimator) -> Result<LayerSpectrum> {
        let [q, k, v] = layer_channels(geometry)?;
        let mut spectrum = LayerSpectrum { layer: geometry.layer, heads: None, sigma_sum: None, q, k, v };
        if geometry.qk_limits.is_some() {
            return Ok(spectrum);
        }
        let estimates = if estimator == Estimator::PowerSummed {
            let estimate = self.summed(geometry)?;
            spectrum.sigma_sum = Some(estimate.sigma);
            vec![estimate; geometry.q.len()]
        } else {
            self.state.check(geometry)?;
            let (q, k) = (effective_operators(&geometry.q, &spectrum.q), effective_operators(&geometry.k, &spectrum.k));
            let old = self.state.layers[geometry.layer].take().unwrap_or_default();
            let (heads, estimates) = self.heads(geometry, &old.heads, 1, &q, &k).into_iter().unzip();
            self.state.layers[geometry.layer] = Some(LayerVectors { heads, ..old });
            estimates
        };
        // Raw weights are without the factor on rotated channels, which is in both sides of a logit.
        let turned = if estimator == Estimator::PowerSummed { attention_factor(geometry).powi(2) } else { 1.0 };
        let head = |(head, estimate): (usize, &PowerEstimate)| {
            let kv_head = geometry.kv_head(head);
            HeadSpectrum {
                head,
                kv_head,
                sigma: estimate.sigma * turned,
                sigma_raw: estimate.sigma,
                exact: None,
                power: Some(*estimate),
                constants: constants(geometry, head, &spectrum.q[head], &spectrum.k[kv_head]),
            }
        };
        spectrum.heads = Some(estimates.iter().enumerate().map(head).collect());
        Ok(spectrum)
    }

    /// The paper's summed estimate of one layer, raw weights (Algorithm 3; Algorithm 2 where every head has its own keys).
    ///
    /// # Errors
    /// If the state belongs to another model.
    pub fn summed(&mut self, geometry: &LayerGeometry<'_>) -> Result<PowerEstimate> {
        self.state.check(geometry)?;
        let (seed, unchanged) = (self.seed(geometry.layer, 0), self.unchanged);
        let layer = self.state.layers[geometry.layer].get_or_insert_default();
        let (vectors, iterations) = match &mut layer.summed {
            Some(vectors) => (vectors.on(unchanged), self.warm),
            none => (none.insert(PowerVectors::random(geometry.d_model, seed)), self.cold),
        };
        Ok(vectors.iterate(iterations, |v| summed_forward(geometry, v), |u| summed_adjoint(geometry, u)))
    }

    fn seed(&self, layer: usize, stream: usize) -> u64 {
        // Distinct streams for distinct matrices, the same ones whenever the state is made again.
        self.state.seed ^ ((layer as u64) << 32 | stream as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn heads(
        &self,
        geometry: &LayerGeometry<'_>,
        old: &[PowerVectors],
        stream: usize,
        q: &[(HeadOperator<'_>, Vec<f64>)],
        k: &[(HeadOperator<'_>, Vec<f64>)],
    ) -> Vec<(PowerVectors, PowerEstimate)> {
        (0..q.len())
            .into_par_iter()
            .map(|head| {
                let (mut vectors, iterations) = match old.get(head) {
                    Some(vectors) => (vectors.clone(), self.warm),
                    None => {
                        let seed = self.seed(geometry.layer, stream + head);
                        (PowerVectors::random(geometry.d_model, seed), self.cold)
                    }
                };
                vectors.on(self.unchanged || old.is_empty());
                let (q, k) = (&q[head], &k[geometry.kv_head(head)]);
                let product = |from: &(HeadOperator<'_>, Vec<f64>), to: &(HeadOperator<'_>, Vec<f64>), x: &[f64]| {
                    let mut y = vec![0.0; geometry.d_head];
                    from.0.apply(x, &from.1, &mut y);
                    let mut out = vec![0.0; geometry.d_model];
                    to.0.apply_adjoint(&y, &to.1, &mut out);
                    out
                };
                let estimate = vectors.iterate(iterations, |v| product(k, q, v), |u| product(q, k, u));
                (vectors, estimate)
            })
            .collect()
    }
}

impl SpectralEngine for PowerEngine<'_> {
    fn layer(&mut self, geometry: &LayerGeometry<'_>) -> Result<LayerSpectrum> {
        let [q, k, v] = layer_channels(geometry)?;
        if geometry.qk_limits.is_some() {
            return Ok(LayerSpectrum { layer: geometry.layer, heads: None, sigma_sum: None, q, k, v });
        }
        let sigma_sum = Some(self.summed(geometry)?.sigma);
        let mut heads = Vec::new();
        if self.per_head {
            let old = self.state.layers[geometry.layer].clone().unwrap_or_default();
            let effective = self.heads(
                geometry,
                &old.heads,
                1,
                &effective_operators(&geometry.q, &q),
                &effective_operators(&geometry.k, &k),
            );
            let same = geometry.q.iter().chain(&geometry.k).all(HeadOperator::is_raw);
            let raws = if same {
                Vec::new()
            } else {
                self.heads(
                    geometry,
                    &old.raw,
                    1 + geometry.q.len(),
                    &raw_operators(&geometry.q),
                    &raw_operators(&geometry.k),
                )
            };
            for (head, (_, estimate)) in effective.iter().enumerate() {
                let kv_head = geometry.kv_head(head);
                heads.push(HeadSpectrum {
                    head,
                    kv_head,
                    sigma: estimate.sigma,
                    sigma_raw: raws.get(head).map_or(estimate.sigma, |(_, raw)| raw.sigma),
                    exact: None,
                    power: Some(*estimate),
                    constants: constants(geometry, head, &q[head], &k[kv_head]),
                });
            }
            let layer = self.state.layers[geometry.layer].get_or_insert_default();
            layer.heads = effective.into_iter().map(|(vectors, _)| vectors).collect();
            layer.raw = raws.into_iter().map(|(vectors, _)| vectors).collect();
        }
        Ok(LayerSpectrum { layer: geometry.layer, heads: Some(heads), sigma_sum, q, k, v })
    }
}

/// `count` iterations of every head from the side of the heads, as the device has them (`kernels/scale/power.cu`): of M's right
/// vector v only `y = W_K^T v` is kept, up to its length, `[query head][d_head]`. Gives the estimates of the last.
///
/// # Errors
/// `is_mismatch` if the vectors are of another size, `is_non_finite` if a weight is not finite.
pub fn iterate_heads(geometry: &LayerGeometry<'_>, vectors: &mut [f32], count: usize) -> Result<Vec<f64>> {
    let r = geometry.d_head;
    check_vectors(vectors, geometry.q.len() * r, geometry)?;
    let [q, k, _] = layer_channels(geometry)?;
    let (q, k) = (effective_operators(&geometry.q, &q), effective_operators(&geometry.k, &k));
    let gram = |(operator, mean): &(HeadOperator<'_>, Vec<f64>), y: &[f64]| {
        let (mut inputs, mut out) = (vec![0.0; geometry.d_model], vec![0.0; r]);
        operator.apply_adjoint(y, mean, &mut inputs);
        operator.apply(&inputs, mean, &mut out);
        out
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let heads = vectors.par_chunks_exact_mut(r).enumerate().map(|(head, vector)| {
        let mut y: Vec<f64> = vector.iter().map(|&x| f64::from(x)).collect();
        let mut sigma = 0.0;
        for _ in 0..count {
            let z = gram(&q[head], &y);
            let mut next = gram(&k[geometry.kv_head(head)], &z);
            let (along, square) = (dot(&y, &z), dot(&z, &next));
            sigma = if along > 0.0 && square > 0.0 { (square / along).sqrt() } else { 0.0 };
            // A vector that is mapped to zero stays as it is.
            if normalise(&mut next) > 0.0 {
                y = next;
            }
        }
        vector.iter_mut().zip(y).for_each(|(to, y)| *to = y as f32);
        sigma
    });
    Ok(heads.collect())
}

/// The factor on rotated channels (YaRN), or 1 if that is larger: what a norm of raw weights has to be multiplied by on either side.
pub fn attention_factor(geometry: &LayerGeometry<'_>) -> f64 {
    geometry.q.iter().flat_map(HeadOperator::channel_scales).fold(1.0, |most, &scale| most.max(scale))
}

/// The same of the sum over the heads, raw weights: `[KV head][d_head]`, one estimate.
///
/// # Errors
/// As [`iterate_heads`].
pub fn iterate_sum(geometry: &LayerGeometry<'_>, vectors: &mut [f32], count: usize) -> Result<f64> {
    let r = geometry.d_head;
    check_vectors(vectors, geometry.k.len() * r, geometry)?;
    layer_channels(geometry)?;
    let mut keys: Vec<Vec<f64>> = vectors.chunks_exact(r).map(|y| y.iter().map(|&x| f64::from(x)).collect()).collect();
    let mut sigma = 0.0;
    for _ in 0..count {
        let mut u = summed_outputs(geometry, &keys);
        normalise(&mut u);
        let mut v = summed_adjoint(geometry, &u);
        sigma = normalise(&mut v);
        if sigma > 0.0 {
            keys = all_apply(&geometry.k, &v);
        }
    }
    vectors.iter_mut().zip(keys.into_iter().flatten()).for_each(|(to, y)| *to = y as f32);
    Ok(sigma)
}

fn check_vectors(vectors: &[f32], want: usize, geometry: &LayerGeometry<'_>) -> Result<()> {
    if vectors.len() == want && vectors.iter().all(|x| x.is_finite()) {
        return Ok(());
    }
    Err(Error::mismatch(format_args!(
        "{}: {} values of power iteration vectors do not fit, {want} finite ones are needed",
        geometry.place,
        vectors.len()
    )))
}

/// Spectral facts of a layer from estimates, one for each query head.
///
/// # Errors
/// `is_non_finite` if a weight is not finite.
pub fn from_estimates(geometry: &LayerGeometry<'_>, sigma: &[f64]) -> Result<LayerSpectrum> {
    let [q, k, v] = layer_channels(geometry)?;
    let head = |(head, &sigma): (usize, &f64)| {
        let kv_head = geometry.kv_head(head);
        let constants = constants(geometry, head, &q[head], &k[kv_head]);
        HeadSpectrum { head, kv_head, sigma, sigma_raw: sigma, exact: None, power: None, constants }
    };
    let heads = Some(sigma.iter().enumerate().map(head).collect());
    Ok(LayerSpectrum { layer: geometry.layer, heads, sigma_sum: None, q, k, v })
}

/// Effective operators, each with its channels' means.
fn effective_operators<'a>(heads: &[HeadOperator<'a>], channels: &[Channels]) -> Vec<(HeadOperator<'a>, Vec<f64>)> {
    heads.iter().zip(channels).map(|(head, channels)| (head.without_constant(), channels.mean.clone())).collect()
}

/// Raw operators, which have no means to remove.
fn raw_operators<'a>(heads: &[HeadOperator<'a>]) -> Vec<(HeadOperator<'a>, Vec<f64>)> {
    heads.iter().map(|head| (head.without_norm(), vec![0.0; head.shape().0])).collect()
}

/// Constants from the operators, without Grams: norms by one product each.
fn constants(geometry: &LayerGeometry<'_>, head: usize, q: &Channels, k: &Channels) -> Constants {
    let norm = |x: &[f64]| x.iter().map(|v| v * v).sum::<f64>().sqrt();
    let linear = |operator: &HeadOperator<'_>, own: &Channels, other: &Channels| {
        let size = norm(&other.constant);
        if size == 0.0 {
            0.0
        } else if geometry.rotary.is_some() {
            // Over every rotation: the Frobenius norm is the cheap sound choice without Grams.
            size * own.norm_sq.iter().sum::<f64>().sqrt()
        } else {
            let mut out = vec![0.0; geometry.d_model];
            operator.apply_adjoint(&other.constant, &own.mean, &mut out);
            norm(&out)
        }
    };
    let turned = |rotary: &Rotary| {
        let pairs =
            rotary.pairs.iter().map(|&(a, b)| q.constant[a].hypot(q.constant[b]) * k.constant[a].hypot(k.constant[b]));
        let fixed = |c: &Channels| norm(&rotary.fixed.iter().map(|&i| c.constant[i]).collect::<Vec<_>>());
        pairs.sum::<f64>() + fixed(q) * fixed(k)
    };
    let still = || q.constant.iter().zip(&k.constant).map(|(a, b)| a * b).sum::<f64>().abs();
    let c0 = geometry.rotaries().map(turned).reduce(f64::max).unwrap_or_else(still);
    Constants {
        a: linear(&geometry.q[head], q, k),
        b: linear(&geometry.k[geometry.kv_head(head)], k, q),
        c0,
        norm_q: norm(&q.constant),
        norm_k: norm(&k.constant),
        spread_q: norm(&q.spread),
        spread_k: norm(&k.spread),
    }
}

/// `sum_h W_Q^h W_K^{kv(h)T} v` on raw weights: the r-vectors of the keys are replicated over their group.
fn summed_forward(geometry: &LayerGeometry<'_>, v: &[f64]) -> Vec<f64> {
    summed_outputs(geometry, &all_apply(&geometry.k, v))
}

/// `sum_h W_Q^h y_kv(h)`.
fn summed_outputs(geometry: &LayerGeometry<'_>, keys: &[Vec<f64>]) -> Vec<f64> {
    let outs: Vec<Vec<f64>> = geometry
        .q
        .par_iter()
        .enumerate()
        .map(|(head, q)| {
            let mut out = vec![0.0; geometry.d_model];
            let raw = q.without_norm();
            raw.apply_adjoint(&keys[geometry.kv_head(head)], &vec![0.0; geometry.d_head], &mut out);
            out
        })
        .collect();
    sum_in_order(outs)
}

/// The adjoint: the r-vectors of a group of queries are summed before W_K sees them.
fn summed_adjoint(geometry: &LayerGeometry<'_>, u: &[f64]) -> Vec<f64> {
    let queries = all_apply(&geometry.q, u);
    let mut groups = vec![vec![0.0; geometry.d_head]; geometry.k.len()];
    for (head, y) in queries.iter().enumerate() {
        groups[geometry.kv_head(head)].iter_mut().zip(y).for_each(|(g, y)| *g += y);
    }
    let outs: Vec<Vec<f64>> = geometry
        .k
        .par_iter()
        .zip(&groups)
        .map(|(k, y)| {
            let mut out = vec![0.0; geometry.d_model];
            k.without_norm().apply_adjoint(y, &vec![0.0; geometry.d_head], &mut out);
            out
        })
        .collect();
    sum_in_order(outs)
}

fn all_apply(heads: &[HeadOperator<'_>], x: &[f64]) -> Vec<Vec<f64>> {
    heads
        .par_iter()
        .map(|head| {
            let r = head.shape().0;
            let mut y = vec![0.0; r];
            head.without_norm().apply(x, &vec![0.0; r], &mut y);
            y
        })
        .collect()
}

/// A fixed order of additions, so that the result does not depend on the threads.
fn sum_in_order(outs: Vec<Vec<f64>>) -> Vec<f64> {
    outs.into_iter()
        .reduce(|mut sum, out| {
            sum.iter_mut().zip(out).for_each(|(s, o)| *s += o);
            sum
        })
        .unwrap_or_default()
}

/// How much larger than its estimate sigma can be: the smallest factor f with `P(sigma > f sigma_hat) <= p` after
/// `iterations` full iterations from a random start, for rank `r`.
///
/// From `P(sigma_hat^2 <= (1 - e) sigma^2) <= I_{q/(1+q)}(1/2, (r-1)/2)`, `m = 2k - 1`,
/// `q = (1 - e)^(m+1) m^m / ((m+1)^(m+1) e)`; `f = (1 - e)^(-1/2)`.
///
/// # Errors
/// If `iterations` is 0, `rank` is 0, or `p` is not between 0 and 1.
///
/// ```
/// let factor = sigmascale::spectral::certified_inflation(20, 128, 1e-9)?;
/// assert!((factor - 1.68).abs() < 0.01);
/// # Ok::<(), sigmascale::Error>(())
/// ```
pub fn certified_inflation(iterations: usize, rank: usize, p: f64) -> Result<f64> {
    if iterations == 0 || rank == 0 || !(p > 0.0 && p < 1.0) {
        return Err(Error::argument(format_args!(
            "inflation needs at least one iteration, rank 1 and 0 < p < 1, not {iterations}, {rank}, {p}"
        )));
    }
    if rank == 1 {
        return Ok(1.0);
    }
    let m = (2 * iterations - 1) as f64;
    let probability = |factor: f64| {
        let kept = factor.powi(-2);
        let ln_q = (m + 1.0) * kept.ln() + m * m.ln() - (m + 1.0) * (m + 1.0).ln() - (1.0 - kept).ln();
        let x = 1.0 / (1.0 + (-ln_q).exp());
        beta_reg(0.5, 0.5 * (rank as f64 - 1.0), x)
    };
    let (mut low, mut high) = (0.0, 1.0);
    while probability(f64::exp(high)) > p {
        high *= 2.0;
        if high > 600.0 {
            return Err(Error::argument(format_args!("p = {p} is too small for {iterations} iterations")));
        }
    }
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if probability(f64::exp(middle)) > p { low = middle } else { high = middle }
    }
    Ok(high.exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_of_any_magnitude_have_an_estimate() {
        for magnitude in [1e-200, 1.0, 1e200] {
            let scaled = |x: &[f64]| x.iter().zip([3.0, 1.0]).map(|(x, s)| x * s * magnitude).collect::<Vec<_>>();
            let estimate = PowerVectors::random(2, 1).iterate(40, scaled, scaled);
            let relative = estimate.sigma / magnitude;
            assert!((relative - 3.0).abs() < 1e-12, "{magnitude:e}: {relative}");
        }
    }
}
