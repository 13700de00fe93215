//! Layers with weights of the test's choosing.

use nalgebra::DMatrix;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::*;
use sigmascale::tensor::MatrixView;

/// A layer whose heads are given as `d x r` matrices (column c = channel c), stored in F64.
#[derive(Clone)]
pub struct Planted {
    pub spec: AttentionSpec,
    pub q: Vec<DMatrix<f64>>,
    pub k: Vec<DMatrix<f64>>,
    pub v: Vec<DMatrix<f64>>,
    pub q_bias: Option<Vec<f64>>,
    pub k_bias: Option<Vec<f64>>,
    pub v_bias: Option<Vec<f64>>,
    pub gain: Option<Vec<f64>>,
    pub shift: Option<Vec<f64>>,
    pub q_norm: Option<NormVectors>,
    pub k_norm: Option<NormVectors>,
}

pub fn spec(d: usize, r: usize, n_q: usize, n_kv: usize) -> AttentionSpec {
    AttentionSpec {
        name: "planted".into(),
        family: "llama".into(),
        prefix: "model.".into(),
        ..AttentionSpec::plain(d, vec![LayerSpec::plain(n_q, n_kv, r)])
    }
}

pub fn rope(rotary_dim: usize, layout: RopeLayout, theta: f64) -> Rope {
    let inv_freq = (0..rotary_dim / 2).map(|b| theta.powf(-2.0 * b as f64 / rotary_dim as f64)).collect();
    Rope { rotary_dim, other_dims: vec![], layout, attention_factor: 1.0, inv_freq: Some(inv_freq), range: None }
}

pub fn gaussian(rows: usize, cols: usize, rng: &mut StdRng) -> DMatrix<f64> {
    DMatrix::from_fn(rows, cols, |_, _| StandardNormal.sample(rng))
}

impl Planted {
    /// Gaussian heads without gains, constants or rotation.
    pub fn gaussian(spec: AttentionSpec, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let scale = 1.0 / (spec.d_model as f64).sqrt();
        let own = &spec.layers[0];
        let mut heads =
            |n: usize| -> Vec<_> { (0..n).map(|_| gaussian(spec.d_model, own.d_head, &mut rng) * scale).collect() };
        let (q, k, v) = (heads(own.n_q_heads), heads(own.n_kv_heads), heads(own.n_kv_heads));
        Self {
            spec,
            q,
            k,
            v,
            q_bias: None,
            k_bias: None,
            v_bias: None,
            gain: None,
            shift: None,
            q_norm: None,
            k_norm: None,
        }
    }

    /// One query head and one key head.
    pub fn pair(q: DMatrix<f64>, k: DMatrix<f64>) -> Self {
        let mut planted = Self::gaussian(spec(q.nrows(), q.ncols(), 1, 1), 0);
        (planted.q, planted.k) = (vec![q], vec![k]);
        planted
    }

    pub fn geometry(&self) -> LayerGeometry<'_> {
        self.try_geometry().unwrap()
    }

    pub fn try_geometry(&self) -> sigmascale::Result<LayerGeometry<'_>> {
        LayerGeometry::new(&self.spec, self.weights())
    }

    pub fn weights(&self) -> LayerWeights<'_> {
        LayerWeights {
            layer: 0,
            q: projection(&self.q, &self.q_bias, "q_proj"),
            k: projection(&self.k, &self.k_bias, "k_proj"),
            v: projection(&self.v, &self.v_bias, "v_proj"),
            norm_gain: Some(self.gain.clone().unwrap_or_else(|| vec![1.0; self.spec.d_model])),
            norm_shift: self.shift.clone(),
            q_norm: self.q_norm.clone(),
            k_norm: self.k_norm.clone(),
            mla: None,
        }
    }

    /// Random gains around one, shifts and biases, of the sizes trained models have.
    pub fn with_random_norm(mut self, seed: u64, kind: NormKind, constants: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0xabcd);
        let mut vector = |n: usize, mean: f64, spread: f64| -> Vec<f64> {
            (0..n).map(|_| mean + spread * rng.random_range(-1.0..1.0)).collect()
        };
        let (d, r) = (self.spec.d_model, self.spec.layers[0].d_head);
        self.spec.norm = InputNorm { kind, gain: GainForm::Plain, shift: constants };
        self.gain = Some(vector(d, 1.5, 1.4));
        if constants {
            self.shift = Some(vector(d, 0.1, 0.5));
            self.q_bias = Some(vector(self.q.len() * r, 0.0, 2.0));
            self.k_bias = Some(vector(self.k.len() * r, 0.5, 2.0));
            self.v_bias = Some(vector(self.v.len() * r, 0.0, 0.5));
            self.spec.bias = QkvBias { q: true, k: true, v: true };
        }
        self
    }

    /// Effective operator by its definition, `J diag(g) W_raw` (and the attention factor), dense f64.
    pub fn effective(&self, w: &DMatrix<f64>) -> DMatrix<f64> {
        let mut w = w.clone();
        if let Some(gain) = &self.gain {
            for (mut row, g) in w.row_iter_mut().zip(gain) {
                row *= *g;
            }
        }
        if self.spec.norm.kind == NormKind::LayerNorm {
            for mut column in w.column_iter_mut() {
                let mean = column.mean();
                column.add_scalar_mut(-mean);
            }
        }
        w
    }
}

/// Column-major `d x r` is row-major `r x d`.
fn projection<'a>(heads: &'a [DMatrix<f64>], bias: &Option<Vec<f64>>, name: &str) -> Projection<'a> {
    Projection {
        heads: heads.iter().map(|w| MatrixView::from_f64(w.as_slice(), w.ncols(), w.nrows()).unwrap()).collect(),
        bias: bias.clone(),
        name: name.into(),
    }
}

/// Largest singular value by a dense f64 decomposition of the `d x d` (or smaller, equivalent) matrix.
pub fn dense_norm(q: &DMatrix<f64>, k: &DMatrix<f64>) -> f64 {
    // Through QR, so that nothing is squared: ||Q_q R_q R_k^T Q_k^T|| = ||R_q R_k^T||.
    let (rq, rk) = (q.clone().qr().r(), k.clone().qr().r());
    (&rq * rk.transpose()).singular_values().max()
}
