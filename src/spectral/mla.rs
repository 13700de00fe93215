//! Norms of multi-head latent attention.
//!
//! With the operators of [`MlaGeometry`], a head's logit is `tau z^T (A^T K u + B^T R D y)` for `||z|| <= rho_q`,
//! `||u|| <= rho_c`, `||y|| <= rho` and a rotation R, and what the shared key's constant adds. Both parts come from one query
//! latent z: for any `0 < s < 1`, since `(a + b)(a + b)^T <= a a^T / s + b b^T / (1 - s)`,
//!
//! ```text
//! |logit| <= tau rho_q sqrt(lambda_max(Y^.5 G Y^.5)),    G = [A; B] [A; B]^T
//! Y = diag(rho_c^2 / s K K^T, rho^2 / (1 - s) Z)
//! ```
//!
//! where Z is any matrix with `R D D^T R^T <= Z` for every R: `mu T` with T constant on rotation pairs and
//! `mu = lambda_max(T^-.5 D D^T T^-.5)`, or `D D^T` itself where nothing rotates. A golden section over s finds the least;
//! the result is certified only at that s. Not used: u and y come from one token.

use super::dense::{UNIT, lanczos, largest_eigenvalue};
use super::gram::Gram;
use super::head_grams::{HeadGrams, cholesky_factor};
use super::rope::{pair_norm_square, scaled_square};
use crate::error::Result;
use crate::geometry::{Channels, HeadOperator, MlaGeometry};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;
use std::ops::Range;

/// Steps of the golden section: they leave a hundredth of a per cent.
const SECTION_STEPS: usize = 24;

/// What bounds of the operands need. Channels of k and v have as `floor` what an input error of length 1 can add.
#[derive(Clone, Debug)]
pub struct MlaOperands {
    /// Channels of the queries, `d_nope` and then `d_rope` a head.
    pub q: Vec<Channels>,
    /// Channels of the keys that come from the latent.
    pub k: Vec<Channels>,
    /// Channels of the values.
    pub v: Vec<Channels>,
    /// Channels of the shared rotated key.
    pub k_pe: Channels,
    /// Channels of the absorbed query of each head, one for each of the latent.
    pub absorbed: Vec<Vec<AbsorbedChannel>>,
}

/// Spectral facts of one layer.
#[derive(Clone, Debug)]
pub struct MlaSpectrum {
    /// What bounds of the operands need.
    pub operands: MlaOperands,
    /// One entry per head.
    pub heads: Vec<MlaHeadSpectrum>,
    /// Certified `||D||`.
    pub norm_k_pe: f64,
}

/// Spectral facts of one head; all are certified upper bounds.
#[derive(Clone, Debug)]
pub struct MlaHeadSpectrum {
    /// Of `|z^T (A^T K u + B^T R D y)|` over every token and relative position.
    pub logit: f64,
    /// The same of the two parts one by one, which `logit` never passes.
    pub split: f64,
    /// Of `|z^T B^T R b|`, b the shared key's constant.
    pub constant: f64,
    /// `||[A; B]||`.
    pub norm_q: f64,
    /// `||A||`.
    pub norm_nope: f64,
    /// `||B||`.
    pub norm_rope: f64,
    /// `||K||`.
    pub norm_k: f64,
    /// `||K||` without the latent's gain, as the absorbed query meets it.
    pub norm_k_raw: f64,
}

/// Channel j of the absorbed query `K^T q_nope`, K without the latent's gain; upper bounds.
#[derive(Clone, Copy, Debug)]
pub struct AbsorbedChannel {
    /// `||A^T K e_j||`.
    pub norm: f64,
    /// What rounding errors of q_nope scale with: `sum_i |K_ij| ||a_i||`, or `||K e_j|| ||A||` where that is less.
    pub amplitude: f64,
    /// What errors of at most each channel's `floor` add.
    pub floor: f64,
    /// `sum_i |K_ij|`: what an error of 1 in each channel of q_nope adds.
    pub sum: f64,
}

/// The Gram of a head's queries, and `||A||`.
type QueryGram = (Gram, f64);

impl MlaOperands {
    /// The channels of a layer, without the norms that bounds of logits need.
    ///
    /// # Errors
    /// If a weight is not finite, or squares underflow; the message names tensor, head and channel.
    pub fn new(geometry: &MlaGeometry<'_>) -> Result<Self> {
        Self::with_grams(geometry).map(|(operands, _)| operands)
    }

    fn with_grams(geometry: &MlaGeometry<'_>) -> Result<(Self, Vec<QueryGram>)> {
        let all = |heads: &[HeadOperator<'_>], pairs: &[(usize, usize)]| {
            heads.par_iter().map(|head| head.channels(pairs)).collect::<Result<Vec<_>>>()
        };
        let unit = |heads: &[HeadOperator<'_>]| -> Result<Vec<_>> {
            heads.par_iter().map(|head| head.clone().with_input_error(1.0).channels(&[])).collect()
        };
        let k_pe = geometry.k_pe.channels(geometry.k_pe_pairs())?;
        let q = all(&geometry.q, &geometry.q_pairs())?;
        let (k, v) = (unit(&geometry.k)?, unit(&geometry.v)?);
        let n = geometry.mla.d_nope;
        let head = |head: usize| {
            let gram = Gram::of(&geometry.q[head]);
            let a = gram.part(0..n);
            let norm = norm_of(&a);
            let absorbed = absorbed(&geometry.k[head].without_norm(), &a, norm, &q[head].floor[..n]);
            (absorbed, (gram, norm))
        };
        let (absorbed, grams) = (0..q.len()).into_par_iter().map(head).unzip();
        Ok((Self { q, k, v, k_pe, absorbed }, grams))
    }
}

impl MlaSpectrum {
    /// The facts of a layer.
    ///
    /// # Errors
    /// As [`MlaOperands::new`].
    pub fn new(geometry: &MlaGeometry<'_>) -> Result<Self> {
        let (operands, grams) = MlaOperands::with_grams(geometry)?;
        let shared = SharedKey::new(geometry, &operands.k_pe);
        let head = |(query, key): (&QueryGram, &HeadOperator<'_>)| head_spectrum(geometry, &shared, query, key);
        let heads = grams.par_iter().zip(&geometry.k).map(head).collect();
        Ok(Self { operands, heads, norm_k_pe: shared.norm })
    }
}

/// The rotated key that all heads share.
struct SharedKey {
    /// `D D^T`.
    gram: Gram,
    norm: f64,
    constant: DVector<f64>,
}

impl SharedKey {
    fn new(geometry: &MlaGeometry<'_>, channels: &Channels) -> Self {
        let gram = Gram::of(&geometry.k_pe);
        let norm = norm_of(&gram);
        Self { gram, norm, constant: DVector::from_column_slice(&channels.constant) }
    }

    /// The candidates for Z beside a query's B: each bounds `R D D^T R^T` for every rotation.
    fn majorants(&self, geometry: &MlaGeometry<'_>, b: &Gram) -> Vec<Gram> {
        if geometry.rotary.is_none() {
            return vec![self.gram.clone()];
        }
        let mut balanced = vec![1.0; self.constant.len()];
        for &(i, j) in geometry.k_pe_pairs() {
            let trace = |gram: &Gram| gram.matrix[(i, i)] + gram.matrix[(j, j)];
            let (d, b) = (trace(&self.gram), trace(b));
            let t = if d > 0.0 && b > 0.0 { (d / b).sqrt() } else { 1.0 };
            (balanced[i], balanced[j]) = (t, t);
        }
        let majorant = |t: Vec<f64>| {
            let root: Vec<f64> = t.iter().map(|t| t.sqrt().recip()).collect();
            let scaled = self.gram.scaled(&root);
            let slack = 8.0 * f64::EPSILON * t.len() as f64;
            let mu = (largest_eigenvalue(&scaled.matrix).upper + scaled.error()) * (1.0 + slack);
            Gram::exact(DMatrix::from_diagonal(&DVector::from_vec(t)) * mu)
        };
        vec![majorant(balanced), majorant(vec![1.0; self.constant.len()])]
    }
}

fn norm_of(gram: &Gram) -> f64 {
    (largest_eigenvalue(&gram.matrix).upper + gram.error()).sqrt()
}

fn head_spectrum(
    geometry: &MlaGeometry<'_>,
    shared: &SharedKey,
    (gram, norm_nope): &QueryGram,
    k: &HeadOperator<'_>,
) -> MlaHeadSpectrum {
    let (n, r, norm_nope) = (geometry.mla.d_nope, gram.matrix.nrows(), *norm_nope);
    let [rho_q, rho_c, rho] =
        [geometry.q_radius_square(), geometry.latent_radius_square(), geometry.d_model as f64].map(f64::sqrt);
    let (a, b) = (gram.part(0..n), gram.part(n..r));
    let keys = Gram::of(k);
    let norm_rope = norm_of(&b);

    let product = |q: &Gram, k: &Gram| HeadGrams { q, k }.sigma_square().upper.sqrt();
    let nope = rho_c * product(&a, &keys);
    let rope = match &geometry.rotary {
        Some(rotary) => {
            let frobenius = HeadGrams { q: &b, k: &shared.gram }.frobenius_rope_square(Some(rotary));
            scaled_square(&b, &shared.gram, rotary).upper.min(frobenius).sqrt().min(norm_rope * shared.norm)
        }
        None => product(&b, &shared.gram),
    };
    let parts = (nope, rho * rope);
    let joint = shared
        .majorants(geometry, &b)
        .iter()
        .map(|z| joint_square(gram, &keys.times(rho_c * rho_c), &z.times(rho * rho), parts))
        .fold(f64::INFINITY, f64::min);
    let split = rho_q * (parts.0 + parts.1);
    MlaHeadSpectrum {
        logit: split.min(rho_q * joint.sqrt()),
        split,
        constant: rho_q * constant_norm(geometry, &b, &shared.constant, norm_rope),
        norm_q: norm_of(gram),
        norm_nope,
        norm_rope,
        norm_k: norm_of(&keys),
        norm_k_raw: norm_of(&Gram::of(&k.without_norm())),
    }
}

/// `lambda_max(Y^.5 G Y^.5)` at about the best s, certified. `keys` and `z` have the squares of their radii in them.
fn joint_square(gram: &Gram, keys: &Gram, z: &Gram, (nope, rope): (f64, f64)) -> f64 {
    let certified = |s: f64| {
        let both = keys.times(1.0 / s).beside(&z.times(1.0 / (1.0 - s)));
        HeadGrams { q: gram, k: &both }.sigma_square().upper
    };
    // Where one part is zero, the other is all there is.
    if nope == 0.0 || rope == 0.0 || !(nope + rope).is_finite() {
        return f64::INFINITY;
    }
    let trace = gram.matrix.trace();
    let (factor, _) = cholesky_factor(&(&gram.matrix / trace));
    let (n, r) = (keys.matrix.nrows(), gram.matrix.nrows());
    let (upper, lower) = (factor.rows(0, n), factor.rows(n, r - n));
    let (first, second) = (upper.tr_mul(&(&keys.matrix * upper)), lower.tr_mul(&(&z.matrix * lower)));
    // Convex in s, so with one minimum in its log-odds too.
    let share = |x: f64| 1.0 / (1.0 + (-x).exp());
    let value = |x: f64| {
        let s = share(x);
        let sum = &first / s + &second / (1.0 - s);
        lanczos(r, 0, |v| &sum * v)
    };
    let golden = 0.5 * (5f64.sqrt() - 1.0);
    let start = (nope / rope).ln();
    let (mut low, mut high) = (start - 6.0, start + 6.0);
    let inner = |low: f64, high: f64| (high - golden * (high - low), low + golden * (high - low));
    let (mut left, mut right) = inner(low, high);
    let (mut at_left, mut at_right) = (value(left), value(right));
    for _ in 0..SECTION_STEPS {
        if at_left < at_right {
            high = right;
            (right, at_right) = (left, at_left);
            left = inner(low, high).0;
            at_left = value(left);
        } else {
            low = left;
            (left, at_left) = (right, at_right);
            right = inner(low, high).1;
            at_right = value(right);
        }
    }
    let best = if at_left < at_right { left } else { right };
    [best, start].into_iter().map(|x| certified(share(x))).fold(f64::INFINITY, f64::min)
}

/// Bound on `||B^T R b||` over every rotation.
fn constant_norm(geometry: &MlaGeometry<'_>, b: &Gram, constant: &DVector<f64>, norm: f64) -> f64 {
    let length = constant.norm();
    if length == 0.0 {
        return 0.0;
    }
    if geometry.rotary.is_none() {
        return (constant.dot(&(&b.matrix * constant)) + b.error() * length * length).max(0.0).sqrt();
    }
    let g = &b.matrix;
    let block = |&(i, j): &(usize, usize)| {
        (pair_norm_square(g[(i, i)], g[(j, j)], g[(i, j)]) + b.error()).sqrt() * constant[i].hypot(constant[j])
    };
    geometry.k_pe_pairs().iter().map(block).sum::<f64>().min(norm * length)
}

/// The channels of the absorbed query: `||A^T K e_j||^2 = K_j^T A A^T K_j`.
fn absorbed(k: &HeadOperator<'_>, a: &Gram, norm: f64, floors: &[f64]) -> Vec<AbsorbedChannel> {
    let (n, rank) = k.shape();
    let mut rows = vec![0.0; n * rank];
    k.read_raw(0, rank, &mut rows);
    // Rows of K are channels; a column of `k` is one of them in each.
    let k = DMatrix::from_row_slice(n, rank, &rows);
    let product = &a.matrix * &k;
    let lengths: Vec<f64> = a.sizes.iter().map(|size| size.sqrt()).collect();
    let channel = |j: usize| {
        let column = k.column(j);
        let sum = |weights: &[f64]| column.iter().zip(weights).map(|(k, w)| k.abs() * w).sum::<f64>();
        let spread = sum(&lengths);
        // The Gram's error, that of the product and of the dot product.
        let error = a.entry_error() + 4.0 * n as f64 * UNIT;
        let square = column.dot(&product.column(j)).max(0.0) + error * spread * spread;
        AbsorbedChannel {
            norm: square.sqrt(),
            amplitude: spread.min(column.norm() * norm * (1.0 + n as f64 * UNIT)),
            floor: sum(floors),
            sum: column.iter().map(|k| k.abs()).sum(),
        }
    };
    (0..rank).map(channel).collect()
}

impl Gram {
    /// Rows and columns of a range.
    fn part(&self, range: Range<usize>) -> Self {
        let (start, len) = (range.start, range.len());
        self.with(self.matrix.view((start, start), (len, len)).into_owned(), self.sizes[range].to_vec())
    }

    fn times(&self, factor: f64) -> Self {
        self.with(&self.matrix * factor, self.sizes.iter().map(|size| size * factor).collect())
    }

    /// Two blocks on the diagonal.
    fn beside(&self, other: &Self) -> Self {
        let (n, m) = (self.matrix.nrows(), other.matrix.nrows());
        let mut matrix = DMatrix::zeros(n + m, n + m);
        matrix.view_mut((0, 0), (n, n)).copy_from(&self.matrix);
        matrix.view_mut((n, n), (m, m)).copy_from(&other.matrix);
        let sizes = [&self.sizes[..], &other.sizes].concat();
        if self.entry_error() > other.entry_error() { self.with(matrix, sizes) } else { other.with(matrix, sizes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_the_larger_error() {
        let gram = Gram::exact(DMatrix::from_row_slice(2, 2, &[4.0, 1.0, 1.0, 9.0]));
        let both = gram.times(2.0).beside(&gram.part(1..2));
        assert_eq!(both.matrix, DMatrix::from_row_slice(3, 3, &[8.0, 2.0, 0.0, 2.0, 18.0, 0.0, 0.0, 0.0, 9.0]));
        assert_eq!((both.sizes.clone(), both.error()), (vec![8.0, 18.0, 9.0], 0.0));
    }
}
