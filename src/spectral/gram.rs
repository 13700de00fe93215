//! Exact, certified spectral norms from Gram matrices.
//!
//! A layer is read three times here: for the channels' means and norms, for the Grams (which need the means), and for
//! the paper's summed norm, which no bound uses.
//!
//! `sigma^2 = lambda_max(G_Q G_K)`, `F^2 = tr(G_Q G_K)`. Grams are accumulated in f64: entry (i, j) is within
//! `g ||w_i|| ||w_j||` of exact with `g = (3 d + 16) 2^-53` (chain of d products, folding of gain and mean), hence
//! `||T (G_computed - G) T|| <= e = g sum_c t_c^2 ||w_c||^2` for every diagonal T. The product's eigenvalues do not change
//! under `T G_Q T` and `T^-1 G_K T^-1`; a T of powers of two that equalises the two diagonals costs no rounding and takes
//! badly scaled channels out. Then, with `A = G_Q + delta I = L L^T` (delta only lets the factorisation of a singular
//! Gram succeed and errs upwards), `sigma^2 <= lambda_max(L^T G_K L) + e_K lambda_max(A) + e_Q lambda_max(G_K) + e_Q e_K`.
//! Cost: `2 d r^2 (n_q + n_kv)` flop a layer, half of it saved by symmetry, and the same again for raw weights.

use super::dense::{Largest, UNIT, largest_eigenvalue};
use super::power::summed_norm;
use super::rope::{frobenius_square, pair_norm_square, scaled_square};
use super::{Constants, ExactSpectrum, HeadSpectrum, LayerSpectrum, SpectralEngine, layer_channels};
use crate::error::Result;
use crate::geometry::{Channels, HeadOperator, LayerGeometry, PANEL, Rotary, dot};
use nalgebra::{DMatrix, DMatrixView, DVector, Dyn};
use rayon::prelude::*;
use std::time::Instant;

/// Columns of one block of the symmetric product; only blocks on and below the diagonal are computed.
const BLOCK: usize = 64;

/// The exact engine. Holds no state.
#[derive(Clone, Copy, Debug, Default)]
pub struct GramEngine;

/// A head's Gram matrix `G = W^T W`, `r x r`, with the bound on its error in spectral norm.
#[derive(Clone, Debug)]
pub struct Gram {
    /// The computed matrix.
    pub matrix: DMatrix<f64>,
    /// Error of an entry in units of the lengths of its two channels.
    rounding: f64,
    /// `||w_c||^2` that the rounding refers to (mean not removed).
    sizes: Vec<f64>,
}

/// Grams of a query head and of the KV head it reads.
#[derive(Clone, Copy, Debug)]
pub struct HeadGrams<'g> {
    /// `W_Q^T W_Q`.
    pub q: &'g Gram,
    /// `W_K^T W_K`.
    pub k: &'g Gram,
}

impl Gram {
    fn zero(head: &HeadOperator<'_>) -> Self {
        let (r, d) = head.shape();
        Self { matrix: DMatrix::zeros(r, r), rounding: rounding(d), sizes: Vec::new() }
    }

    /// A Gram from its matrix, taken as exact.
    pub fn exact(matrix: DMatrix<f64>) -> Self {
        let sizes = matrix.diagonal().iter().copied().collect();
        Self { matrix, rounding: 0.0, sizes }
    }

    /// Bound on `||matrix - exact||`.
    pub fn error(&self) -> f64 {
        self.rounding * self.sizes.iter().sum::<f64>()
    }

    /// `T G T` for a diagonal T, errors included.
    pub(super) fn scaled(&self, t: &[f64]) -> Self {
        let r = self.matrix.nrows();
        Self {
            matrix: DMatrix::from_fn(r, r, |i, j| self.matrix[(i, j)] * (t[i] * t[j])),
            rounding: self.rounding,
            sizes: self.sizes.iter().zip(t).map(|(size, t)| size * t * t).collect(),
        }
    }
}

/// Error of a Gram entry over d rows, in units of the lengths of its two channels.
fn rounding(d: usize) -> f64 {
    (3 * d + 16) as f64 * UNIT
}

/// `matrix += P^T P` on the lower block triangle; `panel` holds the `n x r` P, channel after channel.
fn add_symmetric_product(panel: &[f64], n: usize, matrix: &mut DMatrix<f64>) {
    let r = matrix.nrows();
    // nalgebra's path for tiny products (below 6) reads strided views out of bounds; a narrow panel is a few dots.
    if n < 8 {
        for row in 0..r {
            for col in 0..=row {
                let (a, b) = (&panel[row * n..][..n], &panel[col * n..][..n]);
                matrix[(row, col)] += a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            }
        }
        return;
    }
    for row in (0..r).step_by(BLOCK) {
        let rows = BLOCK.min(r - row);
        let left = &panel[row * n..(row + rows) * n];
        let left =
            DMatrixView::<f64, Dyn, Dyn>::from_slice_with_strides_generic(left, Dyn(rows), Dyn(n), Dyn(n), Dyn(1));
        for col in (0..=row).step_by(BLOCK) {
            let cols = BLOCK.min(r - col);
            let right = DMatrixView::from_slice(&panel[col * n..(col + cols) * n], n, cols);
            matrix.view_mut((row, col), (rows, cols)).gemm(1.0, &left, &right, 1.0);
        }
    }
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

impl SpectralEngine for GramEngine {
    fn layer(&mut self, geometry: &LayerGeometry<'_>) -> Result<LayerSpectrum> {
        let start = Instant::now();
        let [q, k, v] = layer_channels(geometry)?;
        let channels_done = Instant::now();
        if geometry.qk_limits.is_some() {
            return Ok(LayerSpectrum { layer: geometry.layer, heads: None, sigma_sum: None, q, k, v });
        }
        let grams = LayerGrams::new(geometry, &q, &k);
        let grams_done = Instant::now();
        let spectra = |rotary: Option<&Rotary>| -> Vec<HeadSpectrum> {
            let side = |(channels, grams)| Side::new(channels, grams, geometry, rotary);
            let qs: Vec<Side<'_>> = q.par_iter().zip(&grams.q).map(side).collect();
            let ks: Vec<Side<'_>> = k.par_iter().zip(&grams.k).map(side).collect();
            let spectrum = |head| {
                let kv_head = geometry.kv_head(head);
                head_spectrum(head, kv_head, &qs[head], &ks[kv_head], rotary, grams.trace[head])
            };
            (0..qs.len()).into_par_iter().map(spectrum).collect()
        };
        let mut heads = spectra(geometry.rotary.as_ref());
        for rotary in &geometry.other_rotaries {
            heads.iter_mut().zip(spectra(Some(rotary))).for_each(|(head, other)| head.cover(&other));
        }
        let norms_done = Instant::now();
        let sigma_sum = Some(summed_norm(geometry));
        tracing::debug!(
            layer = geometry.layer,
            channels_ms = (channels_done - start).as_secs_f64() * 1e3,
            grams_ms = (grams_done - channels_done).as_secs_f64() * 1e3,
            norms_ms = (norms_done - grams_done).as_secs_f64() * 1e3,
            summed_ms = norms_done.elapsed().as_secs_f64() * 1e3,
            "spectrum"
        );
        Ok(LayerSpectrum { layer: geometry.layer, heads: Some(heads), sigma_sum, q, k, v })
    }
}

/// One projection head: its Grams and what they tell alone.
struct Side<'g> {
    gram: &'g Gram,
    /// Of the raw weights, where they differ.
    raw: Option<&'g Gram>,
    largest: Largest,
    folded_upper: f64,
    /// Certified norm of each rotation pair's two columns, then of the fixed columns together.
    block_norms: Vec<f64>,
    /// The fixed columns one by one, with their certified norms.
    fixed_norms: Vec<(usize, f64)>,
    constant: DVector<f64>,
    block_constants: Vec<f64>,
    spread: f64,
}

impl<'g> Side<'g> {
    fn new(channels: &Channels, pass: &'g GramPair, geometry: &LayerGeometry<'_>, rotary: Option<&Rotary>) -> Self {
        let (gram, raw) = (&pass.effective, pass.raw.as_ref());
        let mut largest = largest_eigenvalue(&gram.matrix);
        largest.upper += gram.error();
        let folded_upper = if geometry.centred {
            // diag(g) W_raw = J diag(g) W_raw + 1 mean^T, and the two parts are orthogonal.
            let mean = DVector::from_column_slice(&channels.mean);
            let folded = &gram.matrix + &mean * mean.transpose() * geometry.d_model as f64;
            (largest_eigenvalue(&folded).upper + 2.0 * gram.error()).sqrt()
        } else {
            largest.upper.sqrt()
        };
        let constant = DVector::from_column_slice(&channels.constant);
        let (mut block_norms, mut block_constants) = (Vec::new(), Vec::new());
        let mut fixed_norms = Vec::new();
        if let Some(rotary) = rotary {
            for &(a, b) in &rotary.pairs {
                let g = &gram.matrix;
                block_norms.push((pair_norm_square(g[(a, a)], g[(b, b)], g[(a, b)]) + gram.error()).sqrt());
                block_constants.push(constant[a].hypot(constant[b]));
            }
            let fixed = gram.matrix.select_rows(&rotary.fixed).select_columns(&rotary.fixed);
            block_norms.push((largest_eigenvalue(&fixed).upper + gram.error()).sqrt());
            block_constants.push(rotary.fixed.iter().map(|&c| constant[c].powi(2)).sum::<f64>().sqrt());
            let error = gram.error();
            fixed_norms.extend(rotary.fixed.iter().map(|&c| (c, (gram.matrix[(c, c)].max(0.0) + error).sqrt())));
        }
        let spread = channels.spread.iter().map(|s| s * s).sum::<f64>().sqrt();
        Self { gram, raw, largest, folded_upper, block_norms, fixed_norms, constant, block_constants, spread }
    }

    fn raw(&self) -> &Gram {
        self.raw.unwrap_or(self.gram)
    }

    /// Bound on `||W R c||` over every rotation R, for the other side's constant c.
    fn linear(&self, other: &Self, rotary: Option<&Rotary>) -> f64 {
        let norm = other.constant.norm();
        if norm == 0.0 {
            return 0.0;
        }
        if rotary.is_none() {
            let square = other.constant.dot(&(&self.gram.matrix * &other.constant)) + self.gram.error() * norm * norm;
            return square.max(0.0).sqrt();
        }
        let mut blocks: Vec<f64> = self.block_norms.iter().zip(&other.block_constants).map(|(w, c)| w * c).collect();
        // Column by column where large ones meet small constants.
        let columns: f64 = self.fixed_norms.iter().map(|&(c, norm)| norm * other.constant[c].abs()).sum();
        if let Some(fixed) = blocks.last_mut() {
            *fixed = fixed.min(columns);
        }
        blocks.iter().sum::<f64>().min(self.largest.upper.sqrt() * norm)
    }
}

fn head_spectrum(
    head: usize,
    kv_head: usize,
    q: &Side<'_>,
    k: &Side<'_>,
    rotary: Option<&Rotary>,
    trace: f64,
) -> HeadSpectrum {
    let grams = HeadGrams { q: q.gram, k: k.gram };
    let sigma = grams.sigma_square();
    let sigma_raw = if q.raw.is_none() && k.raw.is_none() {
        sigma.value
    } else {
        HeadGrams { q: q.raw(), k: k.raw() }.sigma_square().value
    };
    let frobenius_square = grams.frobenius_square();
    let frobenius_rope_square = grams.frobenius_rope_square(rotary);
    let scaled = rotary.map(|rotary| scaled_square(q.gram, k.gram, rotary));
    let rope = match scaled {
        Some(scaled) => {
            let product =
                Largest { value: q.largest.value * k.largest.value, upper: q.largest.upper * k.largest.upper };
            Largest {
                value: scaled.value.min(product.value).min(frobenius_rope_square).max(sigma.value),
                upper: scaled.upper.min(product.upper).min(frobenius_rope_square),
            }
        }
        None => sigma,
    };
    let c0 = match rotary {
        Some(rotary) => {
            // Channels that do not rotate give the same product at every relative position.
            let fixed: f64 = rotary.fixed.iter().map(|&c| q.constant[c] * k.constant[c]).sum();
            let turned = q.block_constants.iter().zip(&k.block_constants).take(rotary.pairs.len());
            turned.map(|(a, b)| a * b).sum::<f64>() + fixed.abs()
        }
        None => q.constant.dot(&k.constant).abs(),
    };
    HeadSpectrum {
        head,
        kv_head,
        sigma: sigma.value.sqrt(),
        sigma_raw: sigma_raw.sqrt(),
        exact: Some(ExactSpectrum {
            sigma_upper: sigma.upper.sqrt(),
            sigma_rope: rope.value.sqrt(),
            sigma_rope_upper: rope.upper.sqrt(),
            frobenius: frobenius_square.sqrt(),
            frobenius_rope_upper: frobenius_rope_square.sqrt(),
            sigma_q_upper: q.largest.upper.sqrt(),
            sigma_k_upper: k.largest.upper.sqrt(),
            folded_q_upper: q.folded_upper,
            folded_k_upper: k.folded_upper,
            balanced_upper: scaled.map(|scaled| scaled.upper.sqrt()),
            trace,
        }),
        power: None,
        constants: Constants {
            a: q.linear(k, rotary),
            b: k.linear(q, rotary),
            c0,
            norm_q: q.constant.norm(),
            norm_k: k.constant.norm(),
            spread_q: q.spread,
            spread_k: k.spread,
        },
    }
}

/// Grams of all heads of a layer, from one read of W_Q and W_K.
#[derive(Clone, Debug)]
pub struct LayerGrams {
    /// Query heads.
    pub q: Vec<GramPair>,
    /// Key heads.
    pub k: Vec<GramPair>,
    /// `tr(W_K^T W_Q) = sum_c w_q,c . w_k,c` of each query head.
    pub trace: Vec<f64>,
}

/// What one head's weights add up to in a pass.
#[derive(Clone, Debug)]
pub struct GramPair {
    /// Of the effective operator.
    pub effective: Gram,
    /// Of the raw weights, where they differ.
    pub raw: Option<Gram>,
}

/// Query heads that one task reads beside their keys.
const TASK_HEADS: usize = 4;

impl LayerGrams {
    /// The Grams of a layer, given its channels (see [`layer_channels`]).
    pub fn new(geometry: &LayerGeometry<'_>, q: &[Channels], k: &[Channels]) -> Self {
        let group = geometry.q.len() / geometry.k.len();
        let tasks: Vec<(usize, usize)> =
            (0..geometry.k.len()).flat_map(|kv| (0..group).step_by(TASK_HEADS).map(move |first| (kv, first))).collect();
        let done: Vec<_> = tasks
            .par_iter()
            .map(|&(kv, first)| {
                let heads = kv * group + first..kv * group + group.min(first + TASK_HEADS);
                Self::task(geometry, heads, kv, first == 0, q, k)
            })
            .collect();
        let mut grams = Self { q: Vec::new(), k: Vec::new(), trace: Vec::new() };
        for (heads, keys, trace) in done {
            grams.q.extend(heads);
            grams.k.extend(keys);
            grams.trace.extend(trace);
        }
        grams
    }

    /// A few query heads beside their keys, whose own Gram only one task of the group forms.
    fn task(
        geometry: &LayerGeometry<'_>,
        heads: std::ops::Range<usize>,
        kv: usize,
        own_keys: bool,
        q: &[Channels],
        k: &[Channels],
    ) -> (Vec<GramPair>, Option<GramPair>, Vec<f64>) {
        let (r, d) = geometry.k[kv].shape();
        let (mut key_panel, mut panel) = (vec![0.0; r * PANEL], vec![0.0; r * PANEL]);
        let mut passes: Vec<GramPair> = heads.clone().map(|head| GramPair::new(&geometry.q[head])).collect();
        let mut keys = own_keys.then(|| GramPair::new(&geometry.k[kv]));
        let mut trace = vec![0.0; heads.len()];
        for start in (0..d).step_by(PANEL) {
            let n = PANEL.min(d - start);
            let (key_panel, panel) = (&mut key_panel[..r * n], &mut panel[..r * n]);
            match &mut keys {
                Some(pass) => pass.add(&geometry.k[kv], start, n, &k[kv].mean, key_panel),
                None => geometry.k[kv].read_panel(start, n, &k[kv].mean, key_panel),
            }
            for (i, head) in heads.clone().enumerate() {
                passes[i].add(&geometry.q[head], start, n, &q[head].mean, panel);
                trace[i] += dot(panel, key_panel);
            }
        }
        let finish = |mut pass: GramPair, channels: &Channels| {
            pass.finish(channels);
            pass
        };
        let passes = passes.into_iter().zip(heads).map(|(pass, head)| finish(pass, &q[head])).collect();
        (passes, keys.map(|pass| finish(pass, &k[kv])), trace)
    }
}

impl GramPair {
    fn new(head: &HeadOperator<'_>) -> Self {
        Self { effective: Gram::zero(head), raw: (!head.is_raw()).then(|| Gram::zero(head)) }
    }

    /// Adds `n` model dimensions and leaves the effective panel in `panel`.
    fn add(&mut self, head: &HeadOperator<'_>, start: usize, n: usize, mean: &[f64], panel: &mut [f64]) {
        if let Some(raw) = &mut self.raw {
            head.read_raw(start, n, panel);
            add_symmetric_product(panel, n, &mut raw.matrix);
            head.fold_panel(start, n, mean, panel);
        } else {
            head.read_panel(start, n, mean, panel);
        }
        add_symmetric_product(panel, n, &mut self.effective.matrix);
    }

    fn finish(&mut self, channels: &Channels) {
        self.effective.matrix.fill_upper_triangle_with_lower_triangle();
        self.effective.sizes.clone_from(&channels.folded_sq);
        if let Some(raw) = &mut self.raw {
            raw.matrix.fill_upper_triangle_with_lower_triangle();
            raw.sizes = raw.matrix.diagonal().iter().copied().collect();
        }
    }
}
