//! Spectral facts as values, and the trait of the engines that find them.

use crate::error::{Error, Result};
use crate::geometry::{Channels, HeadOperator, LayerGeometry};
use crate::named;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// What one call of the iteration tells.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerEstimate {
    /// `||M^T u||`: never above sigma (but for rounding).
    pub sigma: f64,
    /// `||M^T u - s v||` with `s = ||M v||`, of the last iteration's vectors: some singular value lies within it of s.
    pub residual: f64,
    /// Iterations since a random start on the same weights; `None` once the weights have changed, since nothing can be certified
    /// of vectors that come from others.
    pub cold_iterations: Option<usize>,
    /// Iterations since the vectors were drawn.
    pub steps: u64,
}

/// Iterations of one forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iterations {
    /// From random vectors.
    pub cold: usize,
    /// From those of the forward before.
    pub warm: usize,
}

impl Iterations {
    /// # Errors
    /// `is_argument` if one of them is zero.
    pub fn check(self) -> Result<()> {
        match self {
            Self { cold: 1.., warm: 1.. } => Ok(()),
            Self { cold, warm } => {
                Err(Error::argument(format_args!("iterations {cold},{warm}: at least 1 cold and 1 warm are needed")))
            }
        }
    }
}

/// `COLD,WARM`.
impl FromStr for Iterations {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let counts = text.split_once(',').and_then(|(cold, warm)| Some((cold.parse().ok()?, warm.parse().ok()?)));
        let Some((cold, warm)) = counts else {
            return Err(Error::argument(format_args!("iterations {text:?} must be COLD,WARM, such as 5,1")));
        };
        let iterations = Self { cold, warm };
        iterations.check()?;
        Ok(iterations)
    }
}

/// Five and one, as in the paper.
impl Default for Iterations {
    fn default() -> Self {
        Self { cold: 5, warm: 1 }
    }
}

named! {
    /// Where the norms come from.
    pub enum Estimator is "estimator" default Gram {
        /// Exact and certified, from Gram matrices.
        Gram = "gram",
        /// The paper's power iteration, for each head: a lower bound, which cannot certify.
        Power = "power",
        /// The same for the sum over a layer's heads, as the paper has it: its norm bounds no head.
        PowerSummed = "power-summed",
    }
}

impl Estimator {
    /// What a scale from this estimator does not promise; `None` for certified norms.
    pub fn caveat(self) -> Option<&'static str> {
        match self {
            Self::Gram => None,
            Self::Power => Some(
                "no guarantee: power iteration estimates sigma from below and leaves rotation out, so logits can exceed the \
                 bound; the policy counts those that overflow",
            ),
            Self::PowerSummed => Some(
                "no guarantee: power iteration estimates the norm of the sum over the heads, which bounds no head, and leaves \
                 gains and rotation out, so logits can exceed the bound; the policy counts those that overflow",
            ),
        }
    }
}

/// Something that turns a layer's operators into spectral facts.
pub trait SpectralEngine {
    /// Everything that bounds need from one layer.
    ///
    /// # Errors
    /// If a weight is not finite (the message names the tensor), or if the engine's state belongs to another model.
    fn layer(&mut self, geometry: &LayerGeometry<'_>) -> Result<LayerSpectrum>;
}

/// Spectral facts of one layer.
#[derive(Clone, Debug)]
pub struct LayerSpectrum {
    /// Index among the layers with attention; the model's own number is that of its spec.
    pub layer: usize,
    /// One entry per query head; `None` where q and k are normalized after the projection, so that the weights' norms
    /// bound nothing.
    pub heads: Option<Vec<HeadSpectrum>>,
    /// Norm of the paper's summed matrix `sum_h W_Q^h W_K^hT` on raw weights (a lower bound, converged); `None` with
    /// QK-norm. It bounds no head.
    pub sigma_sum: Option<f64>,
    /// Channels of the query heads.
    pub q: Vec<Channels>,
    /// Channels of the key heads.
    pub k: Vec<Channels>,
    /// Channels of the value heads.
    pub v: Vec<Channels>,
}

/// Spectral facts of one query head and the KV head it reads.
#[derive(Clone, Debug)]
pub struct HeadSpectrum {
    /// Query head.
    pub head: usize,
    /// KV head.
    pub kv_head: usize,
    /// `||W_Q W_K^T||` of the effective operators, without rotation. From power iteration: a lower bound.
    pub sigma: f64,
    /// The same of the raw weights.
    pub sigma_raw: f64,
    /// What the Gram matrices tell beyond that; `None` from power iteration.
    pub exact: Option<ExactSpectrum>,
    /// How far the power iteration came; `None` from Grams.
    pub power: Option<PowerEstimate>,
    /// The constant parts.
    pub constants: Constants,
}

/// What only the Gram matrices tell. `*_upper` values are certified upper bounds; the others are the best values.
#[derive(Clone, Copy, Debug)]
pub struct ExactSpectrum {
    /// Certified `sigma`.
    pub sigma_upper: f64,
    /// Bound on `||W_Q R_delta W_K^T||` over every relative position (equals sigma without rotation).
    pub sigma_rope: f64,
    /// Certified `sigma_rope`.
    pub sigma_rope_upper: f64,
    /// `||W_Q W_K^T||_F`.
    pub frobenius: f64,
    /// Certified bound on the Frobenius norm over every relative position.
    pub frobenius_rope_upper: f64,
    /// Certified `||W_Q||`.
    pub sigma_q_upper: f64,
    /// Certified `||W_K||`.
    pub sigma_k_upper: f64,
    /// Certified `||diag(g) W_Q,raw||`, mean not removed.
    pub folded_q_upper: f64,
    /// Certified `||diag(g) W_K,raw||`, mean not removed.
    pub folded_k_upper: f64,
    /// Certified `||W_Q F|| ||W_K F^-1||` for the diagonal F, constant on rotation pairs, that balances the two sides:
    /// `f_b = (tr G_K,bb / tr G_Q,bb)^(1/4)`. `None` without rotation.
    pub balanced_upper: Option<f64>,
    /// `tr(W_K^T W_Q)`, for the diagonal entries.
    pub trace: f64,
}

impl HeadSpectrum {
    /// Takes in the same head under another rotation: what holds over relative positions then holds over both.
    pub(super) fn cover(&mut self, other: &Self) {
        let (c, o) = (&mut self.constants, &other.constants);
        (c.a, c.b, c.c0) = (c.a.max(o.a), c.b.max(o.b), c.c0.max(o.c0));
        if let (Some(exact), Some(other)) = (&mut self.exact, &other.exact) {
            exact.sigma_rope = exact.sigma_rope.max(other.sigma_rope);
            exact.sigma_rope_upper = exact.sigma_rope_upper.max(other.sigma_rope_upper);
            exact.frobenius_rope_upper = exact.frobenius_rope_upper.max(other.frobenius_rope_upper);
            exact.balanced_upper = exact.balanced_upper.zip(other.balanced_upper).map(|(one, two)| one.max(two));
        }
    }
}

impl ExactSpectrum {
    /// `F^2 / sigma^2`, between 1 and r; 0 for a zero head.
    pub fn stable_rank(&self, sigma: f64) -> f64 {
        if sigma == 0.0 { 0.0 } else { (self.frobenius / sigma).powi(2) }
    }
}

/// The constant part of the logits: upper bounds on norms, over every relative position.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Constants {
    /// `||W_Q c_k||`.
    pub a: f64,
    /// `||W_K c_q||`.
    pub b: f64,
    /// `|c_q . c_k|`.
    pub c0: f64,
    /// `||c_q||`.
    pub norm_q: f64,
    /// `||c_k||`.
    pub norm_k: f64,
    /// Norm of `sum_i |beta_i w_ic| + |b_c|` over the channels of q.
    pub spread_q: f64,
    /// The same of k.
    pub spread_k: f64,
}

impl Constants {
    /// Whether there is any constant part.
    pub fn any(&self) -> bool {
        self.norm_q > 0.0 || self.norm_k > 0.0
    }
}

/// Channel facts of every head of q, k and v: what operand bounds are made of.
///
/// # Errors
/// If a weight is not finite.
pub fn layer_channels(geometry: &LayerGeometry<'_>) -> Result<[Vec<Channels>; 3]> {
    let pairs = &geometry.rotary_pairs()[..];
    let all = |heads: &[HeadOperator<'_>], pairs: &[(usize, usize)]| {
        heads.par_iter().map(|head| head.channels(pairs)).collect::<Result<Vec<_>>>()
    };
    Ok([all(&geometry.q, pairs)?, all(&geometry.k, pairs)?, all(&geometry.v, &[])?])
}
