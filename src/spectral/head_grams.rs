//! A head's certified norms from the Grams of its two sides.

use super::dense::{Largest, UNIT, largest_eigenvalue};
use super::gram::Gram;
use super::rope::frobenius_square;
use crate::geometry::Rotary;
use nalgebra::DMatrix;

/// Grams of a query head and of the KV head it reads.
#[derive(Clone, Copy, Debug)]
pub struct HeadGrams<'g> {
    /// `W_Q^T W_Q`.
    pub q: &'g Gram,
    /// `W_K^T W_K`.
    pub k: &'g Gram,
}

/// Diagonals T and T^-1 of powers of two under which both Grams have about the same diagonal. A channel that is zero
/// on one side adds nothing to the product and is left out of both.
fn balance(q: &[f64], k: &[f64]) -> (Vec<f64>, Vec<f64>) {
    q.iter()
        .zip(k)
        .map(|(&q, &k)| {
            if q == 0.0 || k == 0.0 {
                return (0.0, 0.0);
            }
            let exponent = (0.25 * (k.log2() - q.log2())).round();
            (exponent.exp2(), (-exponent).exp2())
        })
        .unzip()
}

/// `L` with `L L^T = matrix + jitter I`, for a semidefinite matrix of unit trace, and the jitter that it took.
pub(super) fn cholesky_factor(matrix: &DMatrix<f64>) -> (DMatrix<f64>, f64) {
    let r = matrix.nrows();
    let mut jitter = 2.0 * UNIT * r as f64;
    loop {
        let shifted = matrix + DMatrix::identity(r, r) * jitter;
        match shifted.cholesky() {
            Some(factor) => return (factor.unpack(), jitter),
            None => jitter *= 8.0,
        }
    }
}

impl HeadGrams<'_> {
    /// `sigma^2 = ||W_Q W_K^T||^2`, value and certified bound.
    pub fn sigma_square(&self) -> Largest {
        let r = self.q.matrix.nrows();
        let (tq, tk) = balance(&self.q.sizes, &self.k.sizes);
        let (q, k) = (self.q.scaled(&tq), self.k.scaled(&tk));
        let (trace_q, trace_k) = (q.matrix.trace(), k.matrix.trace());
        let finite = |matrix: &DMatrix<f64>, trace: f64| trace.is_finite() && matrix.iter().all(|x| x.is_finite());
        if !(finite(&q.matrix, trace_q) && finite(&k.matrix, trace_k)) {
            return Largest::UNKNOWN;
        }
        if trace_q <= 0.0 || trace_k <= 0.0 {
            return Largest::default();
        }
        let (factor, jitter) = cholesky_factor(&(q.matrix.clone() / trace_q));
        let half = (&k.matrix / trace_k) * &factor;
        let h = factor.tr_mul(&half);
        let largest = largest_eigenvalue(&((&h + h.transpose()) * 0.5));
        let (error_q, error_k) = (q.error() / trace_q, k.error() / trace_k);
        // A unit trace bounds every eigenvalue of the two.
        let upper =
            largest.upper + 4.0 * r as f64 * UNIT + error_k * (1.0 + r as f64 * jitter) + error_q + error_q * error_k;
        Largest { value: largest.value, upper }.scaled(trace_q * trace_k)
    }

    /// `F^2 = ||W_Q W_K^T||_F^2`.
    pub fn frobenius_square(&self) -> f64 {
        self.q.matrix.dot(&self.k.matrix).max(0.0)
    }

    /// Bound on the squared Frobenius norm over every relative position, certified.
    pub fn frobenius_rope_square(&self, rotary: Option<&Rotary>) -> f64 {
        let r = self.q.matrix.nrows();
        let lifted = |gram: &Gram| {
            let (mut matrix, error) = (gram.matrix.clone(), gram.error());
            (0..r).for_each(|i| matrix[(i, i)] += error);
            matrix
        };
        let (q, k) = (lifted(self.q), lifted(self.k));
        let value = match rotary {
            Some(rotary) => frobenius_square(&q, &k, rotary),
            None => q.dot(&k),
        };
        // Summation error of r^2 products.
        value.max(0.0) + 2.0 * (r * r) as f64 * UNIT * q.norm() * k.norm()
    }
}
