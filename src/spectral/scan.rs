//! The exact norm over a range of relative positions, one by one: for load time or study.
//!
//! `sigma(M_D)^2 = lambda_max(L^T R_D G_K R_D^T L)` with `G_Q = L L^T`. Layouts differ in the sense of rotation, so both
//! signs of D are taken unless the mask is causal.

use super::dense::{UNIT, lanczos, largest_eigenvalue};
use super::head_grams::{HeadGrams, cholesky_factor};
use crate::error::{Error, Result};
use crate::geometry::Rotary;
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

/// Longest sequence of a scan: it walks every position.
const MAX_SCAN: usize = u32::MAX as usize;

/// Result of an exact scan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scan {
    /// Largest norm found, from below.
    pub sigma: f64,
    /// The relative position at which it is reached.
    pub position: i64,
    /// Certified upper bound over all scanned positions (error of the Grams not included).
    pub upper: f64,
}

/// The largest `||W_Q R_D W_K^T||` over every `|D| < seq_len`.
///
/// # Errors
/// If the rotation's angles are not known, or `seq_len` is 0 or 2^32 or more, or a Gram matrix is not finite.
pub fn scan_positions(grams: HeadGrams<'_>, rotary: &Rotary, seq_len: usize) -> Result<Scan> {
    let Some(inv_freq) = &rotary.inv_freq else {
        return Err(Error::unsupported("a scan over positions needs the angles of the rotary embedding"));
    };
    if inv_freq.len() != rotary.pairs.len() {
        return Err(Error::mismatch(format_args!("{} angles for {} pairs", inv_freq.len(), rotary.pairs.len())));
    }
    if seq_len == 0 || seq_len > MAX_SCAN {
        return Err(Error::argument(format_args!("seq_len must lie between 1 and {MAX_SCAN}, not {seq_len}")));
    }
    let (q, k) = (&grams.q.matrix, &grams.k.matrix);
    let r = q.nrows();
    let (tq, tk) = (q.trace(), k.trace());
    if !(tq.is_finite() && tk.is_finite() && q.iter().chain(k).all(|x| x.is_finite())) {
        return Err(Error::non_finite("a Gram matrix is not finite"));
    }
    if tq <= 0.0 || tk <= 0.0 {
        return Ok(Scan { sigma: 0.0, position: 0, upper: 0.0 });
    }
    let (factor, _) = cholesky_factor(&(q / tq));
    let k = k / tk;
    let reach = seq_len as i64 - 1;
    let rotated = |position: i64, sign: f64, x: &mut DVector<f64>| {
        for (&(a, b), freq) in rotary.pairs.iter().zip(inv_freq) {
            let (sin, cos) = (sign * position as f64 * freq).sin_cos();
            (x[a], x[b]) = (cos * x[a] - sin * x[b], sin * x[a] + cos * x[b]);
        }
    };
    let at = |position: i64| {
        lanczos(r, 0, |x| {
            let mut y = &factor * x;
            rotated(position, -1.0, &mut y);
            let mut y = &k * y;
            rotated(position, 1.0, &mut y);
            factor.tr_mul(&y)
        })
    };
    let (square, position) = (-reach..=reach)
        .into_par_iter()
        .map(|position| (at(position), position))
        .reduce(|| (0.0, 0), |a, b| if b.0 > a.0 || (b.0 == a.0 && b.1.abs() < a.1.abs()) { b } else { a });
    let upper = (-reach..=reach)
        .into_par_iter()
        .map(|position| {
            let mut columns = factor.clone();
            for mut column in columns.column_iter_mut() {
                let mut x = column.clone_owned();
                rotated(position, -1.0, &mut x);
                column.copy_from(&x);
            }
            let h: DMatrix<f64> = columns.tr_mul(&(&k * &columns));
            largest_eigenvalue(&((&h + h.transpose()) * 0.5)).upper
        })
        .reduce(|| 0.0, f64::max);
    Ok(Scan { sigma: (square * tq * tk).sqrt(), position, upper: ((upper + 8.0 * r as f64 * UNIT) * tq * tk).sqrt() })
}
