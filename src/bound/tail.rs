//! The paper's probabilistic constants (Sections 3.2 and B.3), and sharper ones under the same assumption.
//!
//! **Assumption everywhere in this file**: normalized tokens are independent and uniform on the sphere. Trained models
//! break it: real text exceeded the theorem's bounds where rotation is left out. Nothing here is used unless requested by name.

use crate::error::{Error, Result};
use crate::model::{AttentionSpec, LayerSpec, NormKind};
use serde::{Deserialize, Serialize};
use statrs::function::beta::beta_reg;

/// What the union bound runs over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tail {
    /// Failure probability delta.
    pub delta: f64,
    /// Sequence length L.
    pub seq_len: usize,
    /// Sequences in a batch (the paper: 1).
    pub batch: usize,
    /// Steps over which nothing may fail (the paper: 1).
    pub steps: usize,
}

impl Default for Tail {
    fn default() -> Self {
        Self { delta: 1e-6, seq_len: 1024, batch: 1, steps: 1 }
    }
}

/// `gamma`, `c_star` and what they are compared with, for one model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CStar {
    /// Typicality threshold (Eq. 12): `(r/2)(gamma - 1 - ln gamma) = ln(2 N L / delta)`.
    pub gamma: f64,
    /// The paper's alpha* (Eq. 13): `sqrt(2 gamma r ln(4 N L^2 / delta)) / d`.
    pub c_star: f64,
    /// `sqrt(2 ln(2 N L^2 / delta) / d)` (Section B.3).
    pub c_rank_agnostic: f64,
    /// Ratio of the tail exponents, `d / (gamma r)`.
    pub improvement: f64,
    /// Gamma from the exact Beta(r/2, (d-r)/2) tail instead of its Chernoff bound: the same theorem, tighter.
    pub gamma_beta: f64,
    /// `c_star` with `gamma_beta`.
    pub c_star_beta: f64,
}

/// A split of the failure probability: see [`Tail::best_split`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// Share of delta for an atypical projection.
    pub share: f64,
    /// Typicality threshold.
    pub gamma: f64,
    /// The constant.
    pub c_star: f64,
}

impl Tail {
    /// # Errors
    /// If delta is not between 0 and 1 or a count is zero.
    pub fn check(&self) -> Result<()> {
        if !(self.delta > 0.0 && self.delta < 1.0) {
            return Err(Error::argument(format_args!("delta {} must be greater than 0 and less than 1", self.delta)));
        }
        for (name, count) in [("seq_len", self.seq_len), ("batch", self.batch), ("steps", self.steps)] {
            if count == 0 {
                return Err(Error::argument(format_args!("{name} must be at least 1")));
            }
        }
        Ok(())
    }

    /// `ln(factor N L^power batch steps / delta)`, N the query heads of all layers.
    pub fn log_union(&self, factor: f64, spec: &AttentionSpec, power: i32) -> f64 {
        let heads = spec.all_q_heads() as f64;
        // Summed logarithms: the product itself may leave f64.
        factor.ln()
            + heads.ln()
            + f64::from(power) * (self.seq_len as f64).ln()
            + (self.batch as f64).ln()
            + (self.steps as f64).ln()
            - self.delta.ln()
    }

    /// The constants of a model. Where heads differ in width, they are those of the widest, which cover the others: both
    /// grow with r.
    ///
    /// # Errors
    /// As [`Tail::check`] and [`AttentionSpec::check`].
    ///
    /// ```
    /// # use sigmascale::{bound::Tail, model};
    /// let c = Tail::default().c_star(&model::preset("mistral-7b").unwrap())?;
    /// assert!((c.c_star - 0.035_213_846).abs() < 1e-9);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn c_star(&self, spec: &AttentionSpec) -> Result<CStar> {
        self.check()?;
        spec.check()?;
        let widest = spec.layers.iter().map(|layer| layer.d_head).max().unwrap_or(0);
        let (d, r) = (spec.d_model as f64, widest as f64);
        let (t1, t2) = (self.log_union(2.0, spec, 1), self.log_union(4.0, spec, 2));
        let gamma = chernoff_gamma(r, t1);
        let gamma_beta = beta_gamma(r, d, t1);
        let c_star = |gamma: f64| (2.0 * gamma * r * t2).sqrt() / d;
        Ok(CStar {
            gamma,
            c_star: c_star(gamma),
            c_rank_agnostic: (2.0 * self.log_union(2.0, spec, 2) / d).sqrt(),
            improvement: d / (gamma * r),
            gamma_beta,
            c_star_beta: c_star(gamma_beta),
        })
    }

    /// The delta at which [`Tail::c_star`] is `c`, in place of this one's: the failure probability that a chosen constant
    /// amounts to. 1 where no smaller delta has it, 0 from `c` = 1 on, which is the worst case itself.
    ///
    /// # Errors
    /// As [`Tail::c_star`], or if `c` is not finite and greater than zero.
    ///
    /// ```
    /// # use sigmascale::{bound::Tail, model};
    /// let spec = model::preset("mistral-7b").unwrap();
    /// let tail = Tail::default();
    /// let delta = tail.delta_of(tail.c_star(&spec)?.c_star, &spec)?;
    /// assert!((delta / tail.delta - 1.0).abs() < 1e-9);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn delta_of(&self, c: f64, spec: &AttentionSpec) -> Result<f64> {
        if !(c.is_finite() && c > 0.0) {
            return Err(Error::argument(format_args!("c {c} must be finite and greater than zero")));
        }
        if c >= 1.0 {
            return Ok(0.0);
        }
        // -ln delta: c_star grows with it. Deltas below f64's least are 0.
        let smaller = |x: f64| -> Result<bool> { Ok(Self { delta: (-x).exp(), ..*self }.c_star(spec)?.c_star < c) };
        let (mut low, mut high) = (f64::EPSILON, -f64::MIN_POSITIVE.ln());
        if !smaller(low)? {
            return Ok(1.0);
        }
        if smaller(high)? {
            return Ok(0.0);
        }
        for _ in 0..200 {
            let middle = 0.5 * (low + high);
            if smaller(middle)? { low = middle } else { high = middle }
        }
        Ok((-high).exp())
    }

    /// The paper's constants with delta split between their two events, an atypical projection and an overflow of typical ones, so
    /// that `c_star` is smallest, where [`Tail::c_star`] gives each half of it.
    ///
    /// # Errors
    /// As [`Tail::c_star`].
    ///
    /// ```
    /// # use sigmascale::{bound::Tail, model};
    /// let spec = model::preset("mistral-7b").unwrap();
    /// let tail = Tail::default();
    /// let (best, equal) = (tail.best_split(&spec)?, tail.c_star(&spec)?.c_star);
    /// assert!(best.c_star <= equal && best.c_star > 0.99 * equal);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn best_split(&self, spec: &AttentionSpec) -> Result<Split> {
        self.check()?;
        spec.check()?;
        let widest = spec.layers.iter().map(|layer| layer.d_head).max().unwrap_or(0);
        let (d, r) = (spec.d_model as f64, widest as f64);
        let (t1, t2) = (self.log_union(1.0, spec, 1), self.log_union(2.0, spec, 2));
        let at = |share: f64| {
            let gamma = chernoff_gamma(r, t1 - share.ln());
            Split { share, gamma, c_star: (2.0 * gamma * r * (t2 - (1.0 - share).ln())).sqrt() / d }
        };
        // Both factors are convex in the logit of the share: golden section.
        let of = |logit: f64| at(1.0 / (1.0 + (-logit).exp()));
        let ratio = 0.5 * (5f64.sqrt() - 1.0);
        let (mut low, mut high) = (-30.0, 30.0);
        for _ in 0..200 {
            let step = ratio * (high - low);
            let (left, right) = (high - step, low + step);
            if of(left).c_star < of(right).c_star { high = right } else { low = left }
        }
        Ok(of(0.5 * (low + high)))
    }

    /// Half the failure probability, for a union with another event.
    pub fn halved(&self) -> Self {
        Self { delta: 0.5 * self.delta, ..*self }
    }

    /// `t` such that no operand channel passes `t ||w_c|| + |c_c|`: `sqrt(d (1 - eps^(2/(d-1))))`,
    /// `eps = delta / (L sum over layers of r (n_q + 2 n_kv))`.
    ///
    /// # Errors
    /// As [`Tail::check`].
    pub fn operand(&self, spec: &AttentionSpec) -> Result<f64> {
        self.check()?;
        spec.check()?;
        let d = spec.d_model as f64;
        let of = |layer: &LayerSpec| (layer.d_head * (layer.n_q_heads + 2 * layer.n_kv_heads)) as f64;
        let channels: f64 = spec.layers.iter().map(of).sum();
        let count = self.seq_len as f64 * self.batch as f64 * self.steps as f64;
        let ln_eps = self.delta.ln() - (count * channels).ln();
        Ok((d * -(2.0 * ln_eps / (d - 1.0)).exp_m1()).sqrt())
    }

    /// `c_spec` for stable rank `k`: `min over 0 < l < 1 of [t - (k/2) ln(1 - l^2)] / (l d)`, `t = ln(2 N L^2 / delta)`.
    ///
    /// From `ln E exp(l u^T M v) <= -1/2 sum_i ln(1 - l^2 sigma_i^2 / d^2)` for independent uniform u and v. Any l gives
    /// a sound constant; this is the smallest to rounding.
    ///
    /// # Errors
    /// As [`Tail::check`], or if `k` is negative or not finite.
    pub fn c_spec(&self, spec: &AttentionSpec, k: f64) -> Result<f64> {
        self.check()?;
        spec.check()?;
        if !(k >= 0.0 && k.is_finite()) {
            return Err(Error::argument(format_args!("stable rank {k} must be finite and not negative")));
        }
        let t = self.log_union(2.0, spec, 2);
        let value = |l: f64| (t - 0.5 * k * (-l * l).ln_1p()) / l;
        // Unimodal in l: golden section.
        let ratio = 0.5 * (5f64.sqrt() - 1.0);
        let (mut low, mut high) = (1e-9, 1.0 - 1e-15);
        for _ in 0..200 {
            let step = ratio * (high - low);
            let (left, right) = (high - step, low + step);
            if value(left) < value(right) { high = right } else { low = left }
        }
        Ok(value(0.5 * (low + high)) / spec.d_model as f64)
    }
}

/// Logarithms of the union bound, the same for every head of a model.
pub(super) struct ModelConstants {
    pub(super) c_star: f64,
    pub(super) c_star_halved: f64,
    /// `ln(8 N L^2 / delta)`: the linear terms that go with `c_star(delta / 2)`.
    pub(super) t_rank_aware: f64,
    /// Off-diagonal entries, without and with constants; twice as many pairs where attention is not causal.
    pub(super) t_spectrum: (f64, f64),
    /// Diagonal entries.
    pub(super) x_diagonal: f64,
    pub(super) sphere: f64,
}

impl ModelConstants {
    pub(super) fn new(spec: &AttentionSpec, tail: &Tail) -> Result<Self> {
        let pairs = if spec.causal { 1.0 } else { 2.0 };
        Ok(Self {
            c_star: tail.c_star(spec)?.c_star,
            c_star_halved: tail.halved().c_star(spec)?.c_star,
            t_rank_aware: tail.log_union(8.0, spec, 2),
            t_spectrum: (tail.log_union(2.0 * pairs, spec, 2), tail.log_union(6.0 * pairs, spec, 2)),
            x_diagonal: tail.log_union(4.0, spec, 1),
            sphere: sphere_factor(spec),
        })
    }
}

/// d/(d-1) for LayerNorm, whose tokens live on a sphere of one dimension less; 1 for RMSNorm. Multiplies tail bounds.
pub fn sphere_factor(spec: &AttentionSpec) -> f64 {
    let d = spec.d_model as f64;
    if spec.norm.kind == NormKind::LayerNorm { d / (d - 1.0) } else { 1.0 }
}

/// Root above 1 of `(r/2)(gamma - 1 - ln gamma) = t1`.
fn chernoff_gamma(r: f64, t1: f64) -> f64 {
    let value = |excess: f64| 0.5 * r * (excess - excess.ln_1p()) - t1;
    let mut high = 1.0;
    while value(high) < 0.0 {
        high *= 2.0;
    }
    1.0 + bisect(0.0, high, |x| value(x) < 0.0)
}

/// Smallest gamma with `P(Beta(r/2, (d-r)/2) >= gamma r / d) <= exp(-t1)`; `d/r` where even the whole sphere is needed.
fn beta_gamma(r: f64, d: f64, t1: f64) -> f64 {
    if d <= r {
        return 1.0;
    }
    let above = |gamma: f64| beta_reg(0.5 * (d - r), 0.5 * r, (1.0 - gamma * r / d).clamp(0.0, 1.0)) > (-t1).exp();
    bisect(1.0, d / r, above)
}

/// The point where `low_side` turns false between `low` and `high`.
fn bisect(mut low: f64, mut high: f64, low_side: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if low_side(middle) { low = middle } else { high = middle }
    }
    high
}
