//! Exact, certified spectral norms from Gram matrices.
//!
//! `sigma^2 = lambda_max(G_Q G_K)`, `F^2 = tr(G_Q G_K)`. Grams are accumulated in f64: entry (i, j) is within
//! `g ||w_i|| ||w_j||` of exact with `g = (3 d + 16) 2^-53` (chain of d products, folding of gain and mean), hence
//! `||T (G_computed - G) T|| <= e = g sum_c t_c^2 ||w_c||^2` for every diagonal T. The product's eigenvalues do not change
//! under `T G_Q T` and `T^-1 G_K T^-1`; a T of powers of two that equalizes the two diagonals costs no rounding and takes
//! badly scaled channels out. Then, with `A = G_Q + delta I = L L^T` (delta only lets the factorization of a singular
//! Gram succeed and errs upwards), `sigma^2 <= lambda_max(L^T G_K L) + e_K lambda_max(A) + e_Q lambda_max(G_K) + e_Q e_K`.
//! Cost: `2 d r^2 (n_q + n_kv)` FLOP per layer, half of it saved by symmetry, and the same again for raw weights.

use super::dense::UNIT;
use crate::geometry::{Channels, HeadOperator, LayerGeometry, PANEL, dot};
use nalgebra::{DMatrix, DMatrixView, Dyn};
use rayon::prelude::*;

/// Columns of one block of the symmetric product; only blocks on and below the diagonal are computed.
const BLOCK: usize = 64;

/// A head's Gram matrix `G = W^T W`, `r x r`, with the bound on its error in spectral norm.
#[derive(Clone, Debug)]
pub struct Gram {
    /// The computed matrix.
    pub matrix: DMatrix<f64>,
    /// Error of an entry in units of the lengths of its two channels.
    rounding: f64,
    /// `||w_c||^2` that the rounding refers to (mean not removed).
    pub(super) sizes: Vec<f64>,
}

impl Gram {
    fn zero(head: &HeadOperator<'_>) -> Self {
        let (r, d) = head.shape();
        Self { matrix: DMatrix::zeros(r, r), rounding: rounding(d), sizes: Vec::new() }
    }

    /// The Gram of one head whose input keeps its mean.
    pub(super) fn of(head: &HeadOperator<'_>) -> Self {
        let (r, d) = head.shape();
        let mut gram = Self::zero(head);
        let mut panel = vec![0.0; r * PANEL];
        for start in (0..d).step_by(PANEL) {
            let n = PANEL.min(d - start);
            head.read_panel(start, n, &[], &mut panel[..r * n]);
            add_symmetric_product(&panel[..r * n], n, &mut gram.matrix);
        }
        gram.matrix.fill_upper_triangle_with_lower_triangle();
        gram.sizes = gram.matrix.diagonal().iter().copied().collect();
        gram
    }

    /// The same error in the same units, for a matrix made of this one.
    pub(super) fn with(&self, matrix: DMatrix<f64>, sizes: Vec<f64>) -> Self {
        Self { matrix, sizes, rounding: self.rounding }
    }

    /// Error of an entry in units of the lengths of its two channels.
    pub(super) fn entry_error(&self) -> f64 {
        self.rounding
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
    let channel = |c: usize| &panel[c * n..][..n];
    for row in (0..r).step_by(BLOCK) {
        let rows = BLOCK.min(r - row);
        for col in (0..=row).step_by(BLOCK) {
            let cols = BLOCK.min(r - col);
            // nalgebra's path for tiny products (a size below 6) reads strided views out of bounds; a few dots are as fast.
            if n.min(rows).min(cols) < 8 {
                for (i, j) in (0..rows).flat_map(|i| (0..cols).map(move |j| (row + i, col + j))) {
                    matrix[(i, j)] += channel(i).iter().zip(channel(j)).map(|(a, b)| a * b).sum::<f64>();
                }
                continue;
            }
            let left = &panel[row * n..(row + rows) * n];
            let left =
                DMatrixView::<f64, Dyn, Dyn>::from_slice_with_strides_generic(left, Dyn(rows), Dyn(n), Dyn(n), Dyn(1));
            let right = DMatrixView::from_slice(&panel[col * n..(col + cols) * n], n, cols);
            matrix.view_mut((row, col), (rows, cols)).gemm(1.0, &left, &right, 1.0);
        }
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
    /// The Grams of a layer, given its channels (see `layer_channels`).
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
