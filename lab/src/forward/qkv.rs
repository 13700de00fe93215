//! Tokens, and the q, k and v that a layer makes of them.

use nalgebra::DMatrix;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sigmascale::model::{
    AttentionSpec, GainForm, LayerWeights, NormKind, NormVectors, Projection, QkNorm, QkNormScope, rotate,
};
use sigmascale::tensor::MatrixView;
use sigmascale::{Error, Result};

/// Model-dimension entries of a weight panel.
const PANEL: usize = 256;

/// What norms of q and k divide by, `sqrt(mean square + epsilon)`, for tokens that are not a model's own.
const EPSILON: f64 = 1e-6;

/// Normalized tokens, before a norm's gain and shift: `||x_hat|| = sqrt(d_model)`.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `count x d_model`, row-major.
    pub(super) values: Vec<f32>,
    pub(super) d_model: usize,
    /// What norms of the q and k that are made of them add to the mean square.
    pub(super) epsilon: f64,
}

impl Tokens {
    /// Independent tokens, uniform on the sphere (within the plane of zero mean for LayerNorm).
    ///
    /// Tokens of trained models are not like that: they align with the weights, and logits of the same weights are then
    /// larger.
    pub fn isotropic(spec: &AttentionSpec, count: usize, seed: u64) -> Self {
        let d = spec.d_model;
        let centred = spec.norm.kind == NormKind::LayerNorm;
        let mut rng = StdRng::seed_from_u64(seed);
        let mut values = vec![0f32; count * d];
        for token in values.chunks_exact_mut(d) {
            token.iter_mut().for_each(|x| *x = StandardNormal.sample(&mut rng));
            normalise(token, centred);
        }
        Self { values, d_model: d, epsilon: EPSILON }
    }

    /// Tokens from rows of any length above zero, brought to the norm's sphere.
    ///
    /// # Errors
    /// `is_argument` if `values` is not whole rows of `d_model`, `is_non_finite` if a value is not finite.
    pub fn from_rows(spec: &AttentionSpec, values: &[f32]) -> Result<Self> {
        let d = spec.d_model;
        if values.is_empty() || !values.len().is_multiple_of(d) {
            return Err(Error::argument(format_args!(
                "{} values are not a multiple of the hidden size {d}",
                values.len()
            )));
        }
        if values.iter().any(|x| !x.is_finite()) {
            return Err(Error::non_finite("a token has a NaN or an infinity"));
        }
        let mut values = values.to_vec();
        let centred = spec.norm.kind == NormKind::LayerNorm;
        values.chunks_exact_mut(d).for_each(|token| normalise(token, centred));
        Ok(Self { values, d_model: d, epsilon: EPSILON })
    }

    /// The values, `count x d_model`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Number of tokens.
    pub fn count(&self) -> usize {
        self.values.len() / self.d_model
    }
}

/// Brings a token to length sqrt(d), without its mean if `centred`; zero stays zero.
fn normalise(token: &mut [f32], centred: bool) {
    let d = token.len() as f64;
    if centred {
        let mean = (token.iter().map(|x| f64::from(*x)).sum::<f64>() / d) as f32;
        token.iter_mut().for_each(|x| *x -= mean);
    }
    let norm = token.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        let factor = (d.sqrt() / norm) as f32;
        token.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Operands of one attention call, in its layout: `(token, head, channel)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Projected {
    /// Queries, `n_q_heads` a token.
    pub q: Vec<f32>,
    /// Keys, `n_kv_heads` a token.
    pub k: Vec<f32>,
    /// Values, `n_kv_heads` a token.
    pub v: Vec<f32>,
}

/// q, k and v of one layer for tokens at positions 0, 1, ...
///
/// # Errors
/// `is_unsupported` for latent attention and if the layer rotates by angles that its config does not determine, `is_mismatch` if a vector does not
/// fit the spec.
///
/// ```
/// use sigmascale_lab::forward::{Tokens, project};
/// use sigmascale::model::{SyntheticModel, SyntheticOptions, preset};
/// let mut spec = preset("gpt2-xl").unwrap();
/// spec.d_model = 128;
/// spec.set_heads(2, 2, 64);
/// let layer = SyntheticModel::new(&spec, 1, SyntheticOptions::default())?.layer(0)?;
/// let projected = project(&spec, &layer.weights(), &Tokens::isotropic(&spec, 5, 0))?;
/// assert_eq!(projected.k.len(), 5 * 2 * 64);
/// # Ok::<(), sigmascale::Error>(())
/// ```
pub fn project(spec: &AttentionSpec, weights: &LayerWeights<'_>, tokens: &Tokens) -> Result<Projected> {
    let layer = weights.layer;
    let own = spec.layer(layer)?;
    if tokens.d_model != spec.d_model {
        return Err(Error::mismatch(format_args!(
            "{} layer {layer}: weights and tokens do not fit this layer",
            spec.name
        )));
    }
    if let Some(source) = own.kv_source {
        return Err(Error::unsupported(format_args!(
            "{} layer {}: its keys and values are those of layer {source}, which were computed from other tokens",
            spec.name, own.number
        )));
    }
    if own.mla.is_some() {
        return Err(Error::unsupported(format_args!(
            "{} layer {layer}: there is no forward pass for latent attention (MLA)",
            spec.name
        )));
    }
    let (n_q, n_kv, r) = (own.n_q_heads, own.n_kv_heads, own.d_head);
    let input = normed(spec, weights, tokens)?;
    let mut projected = Projected {
        q: linear(&weights.q, n_q, r, &input)?,
        k: linear(&weights.k, n_kv, r, &input)?,
        v: linear(&weights.v, n_kv, r, &input)?,
    };
    if spec.v_norm {
        let norm = QkNorm {
            scope: QkNormScope::PerHead,
            kind: NormKind::RmsNorm,
            gain: GainForm::Unit,
            shift: false,
            behind_rotation: false,
            rotated_only: false,
        };
        qk_norm(r, &norm, tokens.epsilon, None, n_kv, &mut projected.v)?;
    }
    let sides =
        [(&mut projected.q, n_q, &weights.q_norm, "q norm"), (&mut projected.k, n_kv, &weights.k_norm, "k norm")];
    for (values, heads, vectors, name) in sides {
        let normalise = |values: &mut [f32], behind_rotation: bool| match &spec.qk_norm_of(own) {
            Some(norm) if norm.behind_rotation == behind_rotation => {
                qk_norm(r, norm, tokens.epsilon, vectors.as_ref(), heads, values)
                    .map_err(|error| error.within(format_args!("{} layer {layer} {name}", spec.name)))
            }
            _ => Ok(()),
        };
        normalise(values, false)?;
        if let Some(rope) = &own.rope {
            rotate(&spec.name, rope, 0, (heads, r), values)?;
        }
        normalise(values, true)?;
    }
    if let Some(temperature) = own.temperature {
        for (position, token) in projected.q.chunks_exact_mut(n_q * r).enumerate() {
            let factor = temperature.factor(position) as f32;
            token.iter_mut().for_each(|x| *x *= factor);
        }
    }
    Ok(projected)
}

fn stored_gain(stored: f64, form: GainForm) -> f64 {
    match form {
        GainForm::Plain => stored,
        GainForm::OnePlus => 1.0 + stored,
        GainForm::Unit => 1.0,
    }
}

/// The projections' input, one token per column.
pub(crate) fn normed(spec: &AttentionSpec, weights: &LayerWeights<'_>, tokens: &Tokens) -> Result<DMatrix<f32>> {
    let d = spec.d_model;
    let mut input = DMatrix::from_column_slice(d, tokens.count(), &tokens.values);
    for (vector, name) in [(&weights.norm_gain, "gain"), (&weights.norm_shift, "shift")] {
        if vector.as_ref().is_some_and(|vector| vector.len() != d) {
            return Err(Error::mismatch(format_args!("{}: input norm {name} does not have {d} values", spec.name)));
        }
    }
    affine(&mut input, weights.norm_gain.as_deref(), spec.norm.gain, weights.norm_shift.as_deref());
    Ok(input)
}

/// Gain and shift of a norm, a token per column.
pub(super) fn affine(tokens: &mut DMatrix<f32>, gain: Option<&[f64]>, form: GainForm, shift: Option<&[f64]>) {
    for mut token in tokens.column_iter_mut() {
        for (x, g) in token.iter_mut().zip(gain.into_iter().flatten()) {
            *x *= stored_gain(*g, form) as f32;
        }
        for (x, shift) in token.iter_mut().zip(shift.into_iter().flatten()) {
            *x += *shift as f32;
        }
    }
}

/// `W y + b` of every head, `(token, head, channel)`.
fn linear(projection: &Projection<'_>, heads: usize, r: usize, input: &DMatrix<f32>) -> Result<Vec<f32>> {
    let (d, count) = input.shape();
    let fits = projection.heads.len() == heads
        && projection.heads.iter().all(|head| head.shape() == (r, d))
        && projection.bias.as_ref().is_none_or(|bias| bias.len() == heads * r);
    if !fits {
        return Err(Error::mismatch(format_args!("{}: weights do not fit the model", projection.name)));
    }
    let products: Vec<_> = projection.heads.par_iter().map(|head| block_product(head, input)).collect();
    let mut out = vec![0f32; count * heads * r];
    for (head, product) in products.iter().enumerate() {
        let bias = projection.bias.as_ref().map(|bias| &bias[head * r..][..r]);
        for (token, from) in product.as_slice().chunks_exact(r).enumerate() {
            let to = &mut out[(token * heads + head) * r..][..r];
            to.copy_from_slice(from);
            for (x, b) in to.iter_mut().zip(bias.into_iter().flatten()) {
                *x += *b as f32;
            }
        }
    }
    Ok(out)
}

/// Rows of a weight that one task multiplies.
const ROWS: usize = 128;

/// `W x` of any size, a token per column.
pub(super) fn product(weight: &MatrixView<'_>, input: &DMatrix<f32>) -> DMatrix<f32> {
    let rows = weight.shape().0;
    let starts: Vec<usize> = (0..rows).step_by(ROWS).collect();
    let part = |&start: &usize| block_product(&weight.slice_rows(start, ROWS.min(rows - start)), input);
    let parts: Vec<_> = starts.par_iter().map(part).collect();
    let mut out = DMatrix::zeros(rows, input.ncols());
    for (start, part) in starts.iter().zip(&parts) {
        out.rows_mut(*start, part.nrows()).copy_from(part);
    }
    out
}

/// `W x` of a few rows, read panel by panel.
fn block_product(weight: &MatrixView<'_>, input: &DMatrix<f32>) -> DMatrix<f32> {
    let (rows, cols) = weight.shape();
    let mut out = DMatrix::zeros(rows, input.ncols());
    let mut block = vec![0f64; rows * PANEL];
    for start in (0..cols).step_by(PANEL) {
        let n = PANEL.min(cols - start);
        let block = &mut block[..rows * n];
        weight.read_block(0..rows, start..start + n, block);
        let panel = DMatrix::from_row_iterator(rows, n, block.iter().map(|w| *w as f32));
        out.gemm(1.0, &panel, &input.rows(start, n), 1.0);
    }
    out
}

/// Normalizes q or k over each head, or over all heads of a token.
fn qk_norm(
    r: usize,
    norm: &QkNorm,
    epsilon: f64,
    vectors: Option<&NormVectors>,
    heads: usize,
    values: &mut [f32],
) -> Result<()> {
    let span = match norm.scope {
        QkNormScope::PerHead => r,
        QkNormScope::Joint => heads * r,
    };
    let vector = |values: &[f64], what: &str| {
        if values.len() == r || values.len() == heads * r {
            Ok(())
        } else {
            Err(Error::mismatch(format_args!("{what} has {} values, not {r} or {}", values.len(), heads * r)))
        }
    };
    let gain = vectors.map(|vectors| vectors.gain.as_slice());
    let shift = vectors.and_then(|vectors| vectors.shift.as_deref());
    gain.map_or(Ok(()), |gain| vector(gain, "gain"))?;
    shift.map_or(Ok(()), |shift| vector(shift, "shift"))?;
    for token in values.chunks_exact_mut(heads * r) {
        for (at, part) in token.chunks_exact_mut(span).enumerate() {
            let n = span as f64;
            let mean = match norm.kind {
                NormKind::LayerNorm => part.iter().map(|x| f64::from(*x)).sum::<f64>() / n,
                NormKind::RmsNorm | NormKind::None => 0.0,
            };
            let square = part.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
            let factor = (square + epsilon).sqrt().recip();
            for (c, x) in part.iter_mut().enumerate() {
                let channel = at * span + c;
                let of = |row: &[f64]| row[channel % row.len()];
                let g = gain.map_or(1.0, |gain| stored_gain(of(gain), norm.gain));
                *x = ((f64::from(*x) - mean) * factor * g + shift.map_or(0.0, of)) as f32;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sigmascale::model::{RopeLayout, SyntheticModel, SyntheticOptions, preset};

    fn small(name: &str) -> AttentionSpec {
        let mut spec = preset(name).unwrap();
        spec.d_model = 272;
        spec.layers.truncate(2);
        spec.set_heads(4, 2, 16);
        for rope in spec.layers.iter_mut().flat_map(|layer| &mut layer.rope) {
            rope.rotary_dim = 16;
            rope.inv_freq = Some((0..8).map(|i| 0.7f64.powi(i)).collect());
        }
        spec
    }

    #[test]
    fn tokens_lie_on_the_norms_sphere() {
        for name in ["gpt2-xl", "mistral-7b"] {
            let spec = small(name);
            let tokens = Tokens::isotropic(&spec, 3, 1);
            assert_eq!(tokens.count(), 3);
            for token in tokens.values.chunks_exact(272) {
                let sum: f64 = token.iter().map(|x| f64::from(*x)).sum();
                let square: f64 = token.iter().map(|x| f64::from(*x).powi(2)).sum();
                assert!((square - 272.0).abs() < 1e-3);
                assert_eq!(sum.abs() < 1e-2, name == "gpt2-xl", "{sum}");
            }
        }
        assert!(Tokens::from_rows(&small("gpt2-xl"), &[1.0; 7]).unwrap_err().is_argument());
        assert!(Tokens::from_rows(&small("gpt2-xl"), &[f32::NAN; 272]).unwrap_err().is_non_finite());
    }

    #[test]
    fn projections_equal_a_plain_sum_in_f64() {
        let mut spec = small("mistral-7b");
        spec.layers[1].rope.as_mut().unwrap().layout = RopeLayout::Interleaved;
        let model = SyntheticModel::new(&spec, 5, SyntheticOptions { gain: 1.3, ..Default::default() }).unwrap();
        let tokens = Tokens::isotropic(&spec, 4, 2);
        for layer in 0..2 {
            let owned = model.layer(layer).unwrap();
            let mut weights = owned.weights();
            weights.q.bias = Some((0..64).map(|c| f64::from(c) * 0.01).collect());
            weights.norm_shift = Some((0..272).map(|i| f64::from(i % 5) * 0.1).collect());
            let projected = project(&spec, &weights, &tokens).unwrap();
            let (token, head) = (3, 2);
            let y: Vec<f64> = (0..272)
                .map(|i| f64::from(tokens.values[token * 272 + i]) * 1.3 + f64::from(i as u32 % 5) * 0.1)
                .collect();
            let plain = |view: &MatrixView<'_>, c: usize| (0..272).map(|i| view.get(c, i) * y[i]).sum::<f64>();
            let rope = spec.layers[layer].rope.as_ref().unwrap();
            let q: Vec<f64> =
                (0..16).map(|c| plain(&weights.q.heads[head], c) + (head * 16 + c) as f64 * 0.01).collect();
            for ((a, b), f) in rope.pairs().zip(rope.inv_freq.as_ref().unwrap()) {
                let (sin, cos) = (3.0 * f).sin_cos();
                let have = &projected.q[(token * 4 + head) * 16..][..16];
                assert!((f64::from(have[a]) - (q[a] * cos - q[b] * sin)).abs() < 1e-4);
                assert!((f64::from(have[b]) - (q[a] * sin + q[b] * cos)).abs() < 1e-4);
            }
            let v = f64::from(projected.v[(token * 2 + 1) * 16 + 5]);
            assert!((v - plain(&weights.v.heads[1], 5)).abs() < 1e-4);
        }
    }

    #[test]
    fn normalised_heads_have_the_gains_size() {
        let mut spec = preset("qwen3-8b").unwrap();
        spec.d_model = 128;
        spec.layers.truncate(1);
        spec.set_heads(4, 2, spec.layers[0].d_head);
        let owned = SyntheticModel::new(&spec, 5, SyntheticOptions::default()).unwrap().layer(0).unwrap();
        let mut weights = owned.weights();
        weights.q_norm = Some(NormVectors { gain: vec![2.0; 128], shift: None });
        let projected = project(&spec, &weights, &Tokens::isotropic(&spec, 3, 2)).unwrap();
        for head in projected.q.chunks_exact(128) {
            let square: f64 = head.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((square - 4.0 * 128.0).abs() < 0.1, "{square}");
        }
        weights.q_norm = Some(NormVectors { gain: vec![2.0; 7], shift: None });
        assert!(project(&spec, &weights, &Tokens::isotropic(&spec, 3, 2)).unwrap_err().is_mismatch());
    }

    #[test]
    fn unknown_angles_are_refused() {
        let mut spec = small("mistral-7b");
        spec.layers[0].rope.as_mut().unwrap().inv_freq = None;
        let owned = SyntheticModel::new(&spec, 5, SyntheticOptions::default()).unwrap().layer(0).unwrap();
        let tokens = Tokens::isotropic(&spec, 2, 2);
        assert!(project(&spec, &owned.weights(), &tokens).unwrap_err().is_unsupported());
    }

    #[test]
    fn what_has_no_forward_of_its_own_is_refused() {
        let spec = small("mistral-7b");
        let owned = SyntheticModel::new(&spec, 5, SyntheticOptions::default()).unwrap().layer(1).unwrap();
        let tokens = Tokens::isotropic(&spec, 2, 2);
        let mut shared = spec.clone();
        shared.layers[1].kv_source = Some(0);
        let error = project(&shared, &owned.weights(), &tokens).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("those of layer 0"), "{error}");
        let mut latent = spec.clone();
        latent.layers[1].mla = preset("deepseek-v3").unwrap().layers[1].mla;
        let error = project(&latent, &owned.weights(), &tokens).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("MLA"), "{error}");
    }
}
