//! Largest eigenvalue of a small symmetric positive semidefinite matrix, with a proof.
//!
//! Lanczos with full reorthogonalisation finds the value; a Cholesky factorization of `mu I - H` that succeeds proves
//! `lambda_max(H) <= mu (1 + r (r + 1) u)`, `u = 2^-53`. Where the first start was orthogonal to the top direction the
//! proof fails, and another start, at last a full decomposition, is tried.

use nalgebra::{DMatrix, DVector};

/// Unit roundoff of f64.
pub const UNIT: f64 = f64::EPSILON / 2.0;

/// What the certificate adds to the value found: more than Lanczos leaves out, less than anyone will see.
const MARGIN: f64 = 1e-8;

/// A largest eigenvalue and a certified upper bound on it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Largest {
    /// Best value.
    pub value: f64,
    /// Never below the exact value of the given matrix.
    pub upper: f64,
}

impl Largest {
    /// Both times a factor that is not negative.
    pub fn scaled(self, factor: f64) -> Self {
        Self { value: self.value * factor, upper: self.upper * factor }
    }

    /// What is known of a matrix that left f64.
    pub const UNKNOWN: Self = Self { value: f64::INFINITY, upper: f64::INFINITY };
}

/// Largest eigenvalue of a symmetric positive semidefinite matrix (rounding may make it slightly indefinite).
pub fn largest_eigenvalue(matrix: &DMatrix<f64>) -> Largest {
    let r = matrix.nrows();
    let trace = matrix.trace();
    // Decompositions need not end on a NaN.
    if !(trace.is_finite() && matrix.iter().all(|x| x.is_finite())) {
        return Largest::UNKNOWN;
    }
    if trace <= 0.0 {
        return Largest::default();
    }
    // Everything inside squares its entries; a unit trace keeps that in range.
    let h = matrix / trace;
    let slack = (r * (r + 1)) as f64 * UNIT;
    let proves = |mu: f64| (DMatrix::identity(r, r) * mu - &h).cholesky().is_some();
    let mut value: f64 = 0.0;
    for start in 0..3 {
        value = value.max(lanczos(r, start, |x| &h * x));
        let mu = value * (1.0 + MARGIN) + slack;
        if proves(mu) {
            return Largest { value, upper: mu * (1.0 + slack) }.scaled(trace);
        }
    }
    value = value.max(h.clone().symmetric_eigen().eigenvalues.max());
    let mut margin = MARGIN;
    while margin < 1.0 {
        let mu = value * (1.0 + margin) + slack;
        if proves(mu) {
            return Largest { value, upper: mu * (1.0 + slack) }.scaled(trace);
        }
        margin *= 10.0;
    }
    // The trace bounds every eigenvalue of a semidefinite matrix.
    Largest { value, upper: 1.0 + slack }.scaled(trace)
}

/// Largest eigenvalue of a symmetric operator on `r` values, from below, to about 1e-10 unless the start misses it.
pub fn lanczos(r: usize, start: u64, apply: impl FnMut(&DVector<f64>) -> DVector<f64>) -> f64 {
    lanczos_within(r, start, r, 1e-11, apply)
}

/// The same with at most `steps` products, ended when three in a row gain less than `tolerance`, relative.
pub fn lanczos_within(
    r: usize,
    start: u64,
    steps: usize,
    tolerance: f64,
    mut apply: impl FnMut(&DVector<f64>) -> DVector<f64>,
) -> f64 {
    let mut basis: Vec<DVector<f64>> = vec![start_vector(r, start)];
    let (mut alpha, mut beta) = (Vec::new(), Vec::new());
    let mut value: f64 = 0.0;
    let mut settled = 0;
    loop {
        let last = basis.last().expect("the basis starts with one vector");
        let mut next = apply(last);
        alpha.push(next.dot(last));
        // Once is not enough: where the Krylov space is exhausted what is left is rounding noise, and a basis vector made
        // of it that is not orthogonal raises the result above the truth. Twice is.
        for _ in 0..2 {
            for vector in &basis {
                let overlap = next.dot(vector);
                next.axpy(-overlap, vector, 1.0);
            }
        }
        let latest = tridiagonal_max(&alpha, &beta);
        settled = if latest - value <= tolerance * latest.abs() { settled + 1 } else { 0 };
        value = value.max(latest);
        let norm = next.norm();
        if settled >= 3 || basis.len() == steps.min(r) || norm <= 1e-15 * value.max(f64::MIN_POSITIVE) {
            return value;
        }
        beta.push(norm);
        basis.push(next / norm);
    }
}

/// A fixed unit vector without structure: start vectors must not depend on a caller's seed, so that results do not.
fn start_vector(r: usize, start: u64) -> DVector<f64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(start + 1);
    let vector = DVector::from_fn(r, |_, _| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    });
    let norm = vector.norm();
    vector / norm
}

/// Largest eigenvalue of the symmetric tridiagonal matrix, by bisection on the sign count.
fn tridiagonal_max(alpha: &[f64], beta: &[f64]) -> f64 {
    let edge = |i: usize| beta.get(i).copied().unwrap_or(0.0) + if i > 0 { beta[i - 1] } else { 0.0 };
    let mut high = alpha.iter().enumerate().map(|(i, a)| a + edge(i)).fold(f64::MIN, f64::max);
    let mut low = alpha.iter().copied().fold(f64::MIN, f64::max);
    let below = |x: f64| {
        // All pivots of x I - T positive: every eigenvalue lies below x.
        let mut pivot = x - alpha[0];
        for (a, b) in alpha[1..].iter().zip(beta) {
            if pivot <= 0.0 {
                return false;
            }
            pivot = x - a - b * b / pivot;
        }
        pivot > 0.0
    };
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            break;
        }
        if below(middle) { high = middle } else { low = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn agrees_with_a_full_decomposition_and_certifies(n in 1usize..40, seed in 0u64..1000, decay in 0.0f64..3.0) {
            let b = DMatrix::from_fn(n, n, |i, j| {
                let noise = start_vector(n * n, seed)[i * n + j];
                noise * (j as f64 + 1.0).powf(-decay)
            });
            let h = &b.transpose() * &b;
            let exact = h.clone().symmetric_eigen().eigenvalues.max();
            let got = largest_eigenvalue(&h);
            prop_assert!((got.value - exact).abs() <= 1e-9 * exact, "{got:?} {exact}");
            prop_assert!(got.upper >= exact && got.upper <= exact * (1.0 + 1e-7));
        }
    }

    #[test]
    fn a_start_that_misses_the_top_direction_is_found_out() {
        // Orthogonal to the first start vector, which Lanczos can then never see.
        let r = 24;
        let start = start_vector(r, 0);
        let mut top = start_vector(r, 7);
        top -= &start * start.dot(&top);
        top /= top.norm();
        let h = DMatrix::identity(r, r) + &top * top.transpose() * 9.0;
        assert!(lanczos(r, 0, |x| &h * x) < 1.1);
        let got = largest_eigenvalue(&h);
        assert!((got.value - 10.0).abs() < 1e-9 && got.upper >= 10.0, "{got:?}");
    }

    #[test]
    fn zero_tiny_and_huge_matrices() {
        assert_eq!(largest_eigenvalue(&DMatrix::zeros(16, 16)).upper, 0.0);
        for scale in [1e-280, 1e280] {
            let got = largest_eigenvalue(&(DMatrix::identity(16, 16) * scale));
            assert!(got.upper >= scale && got.upper <= scale * (1.0 + 1e-7));
        }
    }
}
