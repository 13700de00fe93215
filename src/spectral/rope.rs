//! Norms that hold over every relative position.
//!
//! Under RoPE the logit of positions m and n sees `M_D = W_Q R_D W_K^T`, `D = n - m`, and `||M_D||` can exceed `||M_0||`
//! (the paper's Corollary 3.6 assumes that it does not). `R_D` is block diagonal with a rotation of each channel pair,
//! so it commutes with any scaling that is constant on pairs.

use super::dense::{Largest, largest_eigenvalue};
use super::gram::Gram;
use crate::geometry::Rotary;
use nalgebra::DMatrix;

/// `||M_D|| <= sqrt(lambda_max(T^.5 G_Q T^.5) lambda_max(T^-.5 G_K T^-.5))` for every D and any T that is constant and
/// positive on each pair; `t_b = sqrt(tr G_K,bb / tr G_Q,bb)` balances the two. Squared.
pub fn scaled_square(q: &Gram, k: &Gram, rotary: &Rotary) -> Largest {
    let r = q.matrix.nrows();
    let mut root = vec![1.0; r];
    let balance = |gq: f64, gk: f64| if gq > 0.0 && gk > 0.0 { (gk / gq).powf(0.25) } else { 1.0 };
    for &(a, b) in &rotary.pairs {
        let t = balance(q.matrix[(a, a)] + q.matrix[(b, b)], k.matrix[(a, a)] + k.matrix[(b, b)]);
        (root[a], root[b]) = (t, t);
    }
    for &c in &rotary.fixed {
        root[c] = balance(q.matrix[(c, c)], k.matrix[(c, c)]);
    }
    let side = |gram: &Gram, root: &[f64]| {
        let scaled = gram.scaled(root);
        let mut largest = largest_eigenvalue(&scaled.matrix);
        // The Gram's own error under the same T, and the rounding of the scaling.
        largest.upper = (largest.upper + scaled.error()) * (1.0 + 8.0 * f64::EPSILON * r as f64);
        largest
    };
    let inverse: Vec<f64> = root.iter().map(|t| 1.0 / t).collect();
    let (lq, lk) = (side(q, &root), side(k, &inverse));
    Largest { value: lq.value * lk.value, upper: lq.upper * lk.upper * (1.0 + 4.0 * f64::EPSILON) }
}

/// The largest `||M_D||_F^2` if every pair could rotate by its own angle: for 2x2 blocks x of G_Q and y of G_K,
/// `tr(x R y^T R'^T)` splits into the parts that rotate by the sum and by the difference of the two angles, each at most
/// the product of its lengths.
pub fn frobenius_square(q: &DMatrix<f64>, k: &DMatrix<f64>, rotary: &Rotary) -> f64 {
    let fixed_pairs = rotary.fixed.chunks_exact(2).map(|pair| (pair[0], pair[1]));
    let pairs: Vec<(usize, usize)> = rotary.pairs.iter().copied().chain(fixed_pairs).collect();
    let mut sum = 0.0;
    for &(a0, a1) in &pairs {
        for &(b0, b1) in &pairs {
            let lengths = |g: &DMatrix<f64>| {
                let [x00, x01, x10, x11] = [g[(a0, b0)], g[(a0, b1)], g[(a1, b0)], g[(a1, b1)]];
                ((x00 + x11).hypot(x01 - x10), (x00 - x11).hypot(x01 + x10))
            };
            let ((same_q, mirror_q), (same_k, mirror_k)) = (lengths(q), lengths(k));
            sum += 0.5 * (same_q * same_k + mirror_q * mirror_k);
        }
    }
    sum
}

/// Largest eigenvalue of a symmetric 2x2 matrix `[[p, m], [m, s]]`: the squared norm of a rotation pair.
pub fn pair_norm_square(p: f64, s: f64, m: f64) -> f64 {
    0.5 * (p + s) + (0.5 * (p - s)).hypot(m)
}
