//! Per-head effective operators, without copies of the weights.
//!
//! A head's projection is `y = W_raw^T x` with `W_raw` of shape `d x r`. Behind a norm with gain g and shift beta it is
//! `y = W^T x_hat + c` with `W = J diag(g) W_raw`, `c = W_raw^T beta + b`, `||x_hat|| <= sqrt(d)`, and `J = I - 11^T/d`
//! for LayerNorm (x_hat has no mean), `I` for RMSNorm. The paper (Section 3.1) takes `W = W_raw`, `c = 0`, which is
//! unsound for gains above one and for any shift or bias.
//!
//! Rotary channels are multiplied by the attention factor first, so that what remains is a rotation. Where q and k are
//! normalized after the projection, their size does not depend on the weights and [`QkLimits`] takes the place of the
//! operators. [`LayerGeometry::new`] refuses what cannot be bounded. Latent attention has operators of other shapes:
//! [`MlaGeometry`].
//!
//! ```
//! use sigmascale::geometry::LayerGeometry;
//! use sigmascale::model::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("data/tiny-llama".as_ref())?;
//! let geometry = LayerGeometry::new(checkpoint.spec(), checkpoint.layer(0)?)?;
//! assert_eq!((geometry.q.len(), geometry.k.len(), geometry.kv_head(3)), (4, 2, 1));
//!
//! // q of one token for head 0, with the norm's gain: r values from d. An RMSNorm removes no mean.
//! let (r, d) = geometry.q[0].shape();
//! let x_hat = vec![1.0; d]; // ||x_hat|| = sqrt(d)
//! let mut q = vec![0.0; r];
//! geometry.q[0].apply(&x_hat, &vec![0.0; r], &mut q);
//!
//! // Channel i is w_i . x_hat, so |q_i| <= sqrt(d) ||w_i||.
//! let channels = geometry.q[0].channels(&geometry.rotary_pairs())?;
//! assert!(q.iter().zip(&channels.norm_sq).all(|(q, square)| q.abs() <= (d as f64 * square).sqrt()));
//! # Ok::<(), sigmascale::Error>(())
//! ```

mod mla;
mod positions;

pub(crate) use crate::model::gains;

use crate::error::{Error, Result};
use crate::model::{
    AttentionSpec, GainForm, LayerWeights, NormKind, NormVectors, Projection, QkNorm, QkNormScope, Rope, RoundingShare,
};
use crate::tensor::MatrixView;
use std::sync::Arc;

pub use mla::MlaGeometry;

/// Model-dimension entries read at a time.
pub const PANEL: usize = 256;

/// Least square of a channel's length: a product of two must stay a normal f64, or bounds would be lost to underflow.
const LEAST_SQUARE: f64 = 1e-140;

/// One layer's operators and everything else that a bound needs.
#[derive(Clone, Debug)]
pub struct LayerGeometry<'a> {
    /// Index among the layers with attention.
    pub layer: usize,
    /// The model and the layer by the model's own number, for messages.
    pub place: String,
    /// Model dimension d.
    pub d_model: usize,
    /// Head dimension r.
    pub d_head: usize,
    /// Softmax scale tau, times the largest factor on the query where one grows with the position.
    pub softmax_scale: f64,
    /// That factor; q is cast with it. The operators of q are without.
    pub query_factor: f64,
    /// Soft-cap of the logits.
    pub soft_cap: Option<f64>,
    /// Query operators, `n_q`.
    pub q: Vec<HeadOperator<'a>>,
    /// Key operators, `n_kv`.
    pub k: Vec<HeadOperator<'a>>,
    /// Value operators, `n_kv`.
    pub v: Vec<HeadOperator<'a>>,
    /// Rotation of q and k.
    pub rotary: Option<Rotary>,
    /// The rotation by other readings of the config: bounds hold for each.
    pub other_rotaries: Vec<Rotary>,
    /// Limits of q and k where they are normalized after the projection.
    pub qk_limits: Option<QkLimits>,
    /// Whether each value head is normalized, without a gain: its length is `sqrt(d_head)` at most.
    pub v_normalised: bool,
    /// Whether a norm bounds the projections' input; without one (OLMo 2) only normalized q and k have bounds.
    pub input_bounded: bool,
    /// Whether the input has its mean removed (LayerNorm).
    pub centred: bool,
    /// Shares of the rounding term A of q, k and v.
    pub rounding: RoundingShare,
}

/// Which channels of a head rotate together, and by what angle a position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rotary {
    /// Channel pairs.
    pub pairs: Vec<(usize, usize)>,
    /// Channels that do not rotate; an even number of them.
    pub fixed: Vec<usize>,
    /// Angle per position of each pair, where known.
    pub inv_freq: Option<Vec<f64>>,
    /// The largest that it can be, where that is known.
    pub fastest: Option<Vec<f64>>,
    /// By what share of it the attention factor may be smaller than the one that operators are multiplied by.
    pub factor_slack: f64,
}

impl Rotary {
    /// The rotation of the first `rotary_dim` of `d_head` channels, without angles.
    fn new(rope: &Rope, rotary_dim: usize, d_head: usize) -> Self {
        let (pairs, fixed) = (rope.pairs_of(rotary_dim).collect(), (rotary_dim..d_head).collect());
        Self { pairs, fixed, ..Self::default() }
    }

    /// The model's own rotation.
    fn own(rope: &Rope, d_head: usize) -> Self {
        Self {
            inv_freq: rope.inv_freq.clone(),
            fastest: rope.fastest().map(<[f64]>::to_vec),
            factor_slack: rope.range.as_ref().map_or(0.0, |range| 1.0 - range.least_factor / rope.attention_factor),
            ..Self::new(rope, rope.rotary_dim, d_head)
        }
    }
}

/// Bounds on normalized q and k (after rotation): the norm of a whole head and of single channels.
#[derive(Clone, Debug)]
pub struct QkLimits {
    /// One entry per query head.
    pub q: Vec<HeadLimit>,
    /// One entry per KV head.
    pub k: Vec<HeadLimit>,
    /// Whether a shift is added, so that pairs cannot be matched up.
    pub shifted: bool,
    /// Whether the norm comes behind the rotation, so that nothing turns its gains and shifts.
    pub behind_rotation: bool,
}

/// Bounds of one normalized head: `|y_b| <= radius * pair_gain_b + shift`.
#[derive(Clone, Debug)]
pub struct HeadLimit {
    /// sqrt of the number of channels normalized together.
    pub radius: f64,
    /// Largest |gain| of the rotation pair that each channel belongs to (its own without rotation), attention factor
    /// included.
    pub pair_gain: Vec<f64>,
    /// Norm of the shift's pair for each channel (its own |shift| without rotation).
    pub pair_shift: Vec<f64>,
    /// Norm of the whole shift.
    pub shift_norm: f64,
    /// Each channel's own gain, attention factor included.
    pub gain: Vec<f64>,
    /// Each channel's own shift, attention factor included.
    pub shift: Vec<f64>,
}

impl HeadLimit {
    /// Bound on the norm of the head: `radius * max |gain| + ||shift||`.
    pub fn norm(&self) -> f64 {
        self.radius * self.pair_gain.iter().copied().fold(0.0, f64::max) + self.shift_norm
    }

    /// Bound on any channel.
    pub fn channel(&self) -> f64 {
        self.pair_gain.iter().zip(&self.pair_shift).map(|(g, s)| self.radius * g + s).fold(0.0, f64::max)
    }
}

/// One head's effective operator `W = J diag(g) W_raw diag(s)` (`d x r`) and constant, as a recipe over borrowed weights.
#[derive(Clone, Debug)]
pub struct HeadOperator<'a> {
    raw: MatrixView<'a>,
    gain: Option<Arc<[f64]>>,
    shift: Option<Arc<[f64]>>,
    bias: Option<Vec<f64>>,
    channel_scale: Option<Arc<[f64]>>,
    centred: bool,
    floor: f64,
    label: String,
}

/// What one pass over a head's weights tells about its channels, in f64.
#[derive(Clone, Debug, Default)]
pub struct Channels {
    /// Mean over the model dimension of `diag(g) W_raw`, zero unless the input is centered.
    pub mean: Vec<f64>,
    /// `||w_c||^2` of the effective operator.
    pub norm_sq: Vec<f64>,
    /// `||diag(g) w_c||^2`, mean not removed.
    pub folded_sq: Vec<f64>,
    /// Constant `c = W_raw^T beta + b`.
    pub constant: Vec<f64>,
    /// `sum_i |beta_i w_ic| + |b_c|`: what rounding errors of the constant part scale with.
    pub spread: Vec<f64>,
    /// What rounding errors of input elements under the normal numbers of E4M3 add at most; 0 where inputs are not rounded to it.
    pub floor: Vec<f64>,
    /// `w_a . w_b` of the effective operator for each rotation pair given.
    pub pair_dot: Vec<f64>,
}

impl<'a> LayerGeometry<'a> {
    /// The operators of one layer.
    ///
    /// # Errors
    /// As [`AttentionSpec::check`]; if a vector is missing or its length does not fit the spec; or if the layer is of a
    /// kind that has no bound: no norm in front of the projections and none behind them.
    pub fn new(spec: &AttentionSpec, weights: LayerWeights<'a>) -> Result<Self> {
        spec.check()?;
        let layer = weights.layer;
        let own = spec.layer(layer)?;
        let r = own.d_head;
        let place = || spec.place(layer);
        if own.mla.is_some() {
            return Err(Error::unsupported(format_args!(
                "{}: latent attention (MLA) has bounds of its own, on the CPU only",
                place()
            )));
        }
        if spec.norm.kind == NormKind::None && spec.qk_norm_of(own).is_none() {
            return Err(Error::unsupported(format_args!(
                "{}: there is no norm before attention and none of q and k, so they have no bound",
                place()
            )));
        }
        let stored = |vector: &Option<Vec<f64>>, what: &str, wanted: bool| -> Result<Option<Arc<[f64]>>> {
            match vector {
                None if wanted => Err(Error::mismatch(format_args!("{}: input norm {what} is missing", place()))),
                Some(values) if values.len() != spec.d_model => Err(Error::mismatch(format_args!(
                    "{}: input norm {what} has {} values, expected d_model = {}",
                    place(),
                    values.len(),
                    spec.d_model
                ))),
                Some(values) => Ok(Some(values.clone().into())),
                None => Ok(None),
            }
        };
        let gain = match spec.norm.gain {
            GainForm::Unit => None,
            form => stored(&weights.norm_gain, "gain", spec.norm.kind != NormKind::None)?.map(|g| gains(&g, form)),
        };
        // An input that is shortened channel by channel is no longer than before, but its mean need not be zero any more.
        let centred = spec.norm.kind == NormKind::LayerNorm && !gain.as_ref().is_some_and(|gain| gain.rounded);
        let gain: Option<Arc<[f64]>> = gain.map(|gain| gain.values.into());
        let shift = stored(&weights.norm_shift, "shift", spec.norm.shift)?;
        let bounded_fp8 = spec.fp8_inputs && spec.norm.kind != NormKind::None;
        let floor = if bounded_fp8 { input_floor(spec.d_model, gain.as_deref(), shift.as_deref()) } else { 0.0 };
        let rounding = spec.rounding_share(own, weights.stored());
        let rope = own.rope.as_ref();
        let rotary = rope.map(|rope| Rotary::own(rope, r));
        let other_rotaries: Vec<Rotary> =
            rope.iter().flat_map(|rope| rope.other_dims.iter().map(|dim| Rotary::new(rope, *dim, r))).collect();
        let pairs: Vec<(usize, usize)> =
            rotary.iter().chain(&other_rotaries).flat_map(|rotary| rotary.pairs.iter().copied()).collect();
        let factor = rope.map_or(1.0, |rope| rope.attention_factor);
        let channel_scale: Option<Arc<[f64]>> = rope
            .filter(|_| factor != 1.0)
            .map(|rope| (0..r).map(|c| if c < rope.rotary_dim { factor } else { 1.0 }).collect());
        let operators = |projection: Projection<'a>, heads: usize, bias: bool, scale: &Option<Arc<[f64]>>| {
            if bias && projection.bias.is_none() {
                return Err(Error::mismatch(format_args!("{}: {}: bias is missing", place(), projection.name)));
            }
            let norm = NormOutput { gain: &gain, shift: &shift, centred, floor };
            operators((r, spec.d_model), projection, heads, norm, scale).map_err(|error| error.within(place()))
        };
        let qk_limits = match &spec.qk_norm_of(own) {
            Some(norm) => Some(QkLimits {
                q: limits(r, norm, &weights.q_norm, own.n_q_heads, &pairs, factor)
                    .map_err(|e| e.within(format_args!("{} q norm", place())))?,
                k: limits(r, norm, &weights.k_norm, own.n_kv_heads, &pairs, factor)
                    .map_err(|e| e.within(format_args!("{} k norm", place())))?,
                shifted: [&weights.q_norm, &weights.k_norm]
                    .into_iter()
                    .flatten()
                    .any(|vectors| vectors.shift.is_some()),
                behind_rotation: norm.behind_rotation,
            }),
            None => None,
        };
        Ok(Self {
            layer,
            place: place(),
            d_model: spec.d_model,
            d_head: r,
            softmax_scale: own.logit_scale(),
            query_factor: own.query_factor(),
            soft_cap: spec.soft_cap,
            q: operators(weights.q, own.n_q_heads, spec.bias.q, &channel_scale)?,
            k: operators(weights.k, own.n_kv_heads, spec.bias.k, &channel_scale)?,
            v: operators(weights.v, own.n_kv_heads, spec.bias.v, &None)?,
            rotary,
            other_rotaries,
            qk_limits,
            v_normalised: spec.v_norm,
            input_bounded: spec.norm.kind != NormKind::None,
            rounding,
            centred,
        })
    }

    /// The rotation, by each reading of the config.
    pub fn rotaries(&self) -> impl Iterator<Item = &Rotary> {
        self.rotary.iter().chain(&self.other_rotaries)
    }

    /// The channel pairs that rotate together, those of every reading one after the other.
    pub fn rotary_pairs(&self) -> Vec<(usize, usize)> {
        self.rotaries().flat_map(|rotary| rotary.pairs.iter().copied()).collect()
    }

    /// The KV head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head * self.k.len() / self.q.len()
    }
}

/// What the projections of a layer read.
#[derive(Clone, Copy)]
struct NormOutput<'g> {
    gain: &'g Option<Arc<[f64]>>,
    shift: &'g Option<Arc<[f64]>>,
    centred: bool,
    /// See [`input_floor`].
    floor: f64,
}

/// Length of the error of an input that is rounded to E4M3 by the scale of a token's (or a part's) largest element, as far as it
/// comes from elements under the normal numbers: `2^-10` of the scale each, which is at most `(sqrt(d) max|g| + max|beta|) / 448`, or
/// twice that where it is rounded to a power of two.
fn input_floor(d: usize, gain: Option<&[f64]>, shift: Option<&[f64]>) -> f64 {
    let largest =
        |values: Option<&[f64]>| values.map(|values| values.iter().fold(0.0, |most: f64, x| most.max(x.abs())));
    let root = (d as f64).sqrt();
    let element = root * largest(gain).unwrap_or(1.0) + largest(shift).unwrap_or(0.0);
    2.0 * root * element / 448.0 / 1024.0
}

fn operators<'a>(
    (r, d): (usize, usize),
    projection: Projection<'a>,
    heads: usize,
    norm: NormOutput<'_>,
    channel_scale: &Option<Arc<[f64]>>,
) -> Result<Vec<HeadOperator<'a>>> {
    let Projection { heads: views, bias, name } = projection;
    if views.len() != heads || views.iter().any(|view| view.shape() != (r, d)) {
        return Err(Error::mismatch(format_args!("{name}: expected {heads} heads of {r} x {d} weights")));
    }
    if bias.as_ref().is_some_and(|bias| bias.len() != heads * r) {
        return Err(Error::mismatch(format_args!("{name}: bias does not have {} values", heads * r)));
    }
    Ok(views
        .into_iter()
        .enumerate()
        .map(|(head, raw)| HeadOperator {
            raw,
            gain: norm.gain.clone(),
            shift: norm.shift.clone(),
            bias: bias.as_ref().map(|bias| bias[head * r..][..r].to_vec()),
            channel_scale: channel_scale.clone(),
            centred: norm.centred,
            floor: norm.floor,
            label: format!("{name} head {head}"),
        })
        .collect())
}

fn limits(
    r: usize,
    norm: &QkNorm,
    vectors: &Option<NormVectors>,
    heads: usize,
    pairs: &[(usize, usize)],
    factor: f64,
) -> Result<Vec<HeadLimit>> {
    // A rotation in front of the norm changes no length that the norm sees, and none comes behind it.
    let (pairs, factor) = if norm.behind_rotation { (&[][..], 1.0) } else { (pairs, factor) };
    let stored = |values: &[f64], what: &str| {
        if values.len() != r && values.len() != heads * r {
            return Err(Error::mismatch(format_args!("{what} has {} values, not {r} or {}", values.len(), heads * r)));
        }
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(Error::non_finite(format_args!("{what} holds {value}"))),
            None => Ok(()),
        }
    };
    let gain = match vectors {
        Some(vectors) => {
            stored(&vectors.gain, "gain")?;
            gains(&vectors.gain, norm.gain).values
        }
        None if norm.gain == GainForm::Unit => vec![1.0; r],
        None => return Err(Error::mismatch("gain is missing")),
    };
    let shift = match vectors.as_ref().and_then(|vectors| vectors.shift.clone()) {
        None if norm.shift => return Err(Error::mismatch("shift is missing")),
        shift => shift.unwrap_or_else(|| vec![0.0; r]),
    };
    stored(&shift, "shift")?;
    let channels = match norm.scope {
        QkNormScope::PerHead => r,
        QkNormScope::Joint => heads * r,
    };
    Ok((0..heads)
        .map(|head| {
            let of = |values: &[f64], c: usize| if values.len() == r { values[c] } else { values[head * r + c] };
            let (own_gain, own_shift) = (|c: usize| of(&gain, c).abs(), |c: usize| of(&shift, c).abs());
            let mut pair_gain: Vec<f64> = (0..r).map(own_gain).collect();
            let mut pair_shift: Vec<f64> = (0..r).map(own_shift).collect();
            let mut rotated = vec![false; r];
            for &(a, b) in pairs {
                let (g, s) = (own_gain(a).max(own_gain(b)), own_shift(a).hypot(own_shift(b)));
                for c in [a, b] {
                    pair_gain[c] = pair_gain[c].max(g);
                    pair_shift[c] = pair_shift[c].max(s);
                    rotated[c] = true;
                }
            }
            let factors = rotated.iter().map(|rotated| if *rotated { factor } else { 1.0 });
            let by_factor = |values: &[f64]| -> Vec<f64> {
                factors.clone().enumerate().map(|(c, factor)| of(values, c) * factor).collect()
            };
            for (c, factor) in factors.clone().enumerate() {
                pair_gain[c] *= factor;
                pair_shift[c] *= factor;
            }
            let (gain, shift) = (by_factor(&gain), by_factor(&shift));
            let shift_norm = shift.iter().map(|shift| shift.powi(2)).sum::<f64>().sqrt();
            HeadLimit { radius: (channels as f64).sqrt(), pair_gain, pair_shift, shift_norm, gain, shift }
        })
        .collect())
}

impl<'a> HeadOperator<'a> {
    /// Head dimension and model dimension.
    pub fn shape(&self) -> (usize, usize) {
        self.raw.shape()
    }

    /// Tensor and head, for messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The raw weights, `r x d`.
    pub fn raw(&self) -> &MatrixView<'a> {
        &self.raw
    }

    /// Whether the effective operator is the raw weights.
    pub fn is_raw(&self) -> bool {
        self.gain.is_none() && !self.centred && self.channel_scale.is_none()
    }

    /// Writes columns `start .. start + n` of the effective operator (`n <= PANEL` model dimensions of all r channels),
    /// channel after channel, given the channels' means.
    pub fn read_panel(&self, start: usize, n: usize, mean: &[f64], out: &mut [f64]) {
        self.read_raw(start, n, out);
        self.fold_panel(start, n, mean, out);
    }

    /// The same for the raw weights.
    pub fn read_raw(&self, start: usize, n: usize, out: &mut [f64]) {
        self.raw.read_block(0..self.shape().0, start..start + n, out);
    }

    /// Turns a raw panel into the effective one.
    pub fn fold_panel(&self, start: usize, n: usize, mean: &[f64], panel: &mut [f64]) {
        self.apply_gain(start, n, panel);
        if self.centred {
            for (line, mean) in panel.chunks_exact_mut(n).zip(mean) {
                line.iter_mut().for_each(|w| *w -= mean);
            }
        }
    }

    /// Raw panel to `diag(g) W_raw diag(s)`, mean not removed.
    fn apply_gain(&self, start: usize, n: usize, panel: &mut [f64]) {
        if let Some(gain) = &self.gain {
            for line in panel.chunks_exact_mut(n) {
                line.iter_mut().zip(&gain[start..start + n]).for_each(|(w, g)| *w *= g);
            }
        }
        if let Some(scale) = &self.channel_scale {
            for (line, s) in panel.chunks_exact_mut(n).zip(scale.iter()) {
                line.iter_mut().for_each(|w| *w *= s);
            }
        }
    }

    /// Norms, constants and pair products of the channels: one read of the weights, two where the input is centered.
    ///
    /// # Errors
    /// If a weight, or a sum of them, is not finite, or if squares underflow; the message names tensor, head and channel.
    pub fn channels(&self, pairs: &[(usize, usize)]) -> Result<Channels> {
        let (r, d) = self.shape();
        let mut panel = vec![0.0; r * PANEL];
        let mut mean = vec![0.0; r];
        if self.centred {
            for start in (0..d).step_by(PANEL) {
                let n = PANEL.min(d - start);
                let panel = &mut panel[..r * n];
                self.read_raw(start, n, panel);
                self.apply_gain(start, n, panel);
                for (mean, line) in mean.iter_mut().zip(panel.chunks_exact(n)) {
                    *mean += line.iter().sum::<f64>();
                }
            }
            mean.iter_mut().for_each(|m| *m /= d as f64);
        }
        let mut out = Channels {
            mean,
            norm_sq: vec![0.0; r],
            folded_sq: vec![0.0; r],
            constant: vec![0.0; r],
            spread: vec![0.0; r],
            floor: vec![0.0; r],
            pair_dot: vec![0.0; pairs.len()],
        };
        let mut nonzero = vec![false; r];
        for start in (0..d).step_by(PANEL) {
            let n = PANEL.min(d - start);
            let panel = &mut panel[..r * n];
            self.read_raw(start, n, panel);
            if let Some(shift) = &self.shift {
                for (c, line) in panel.chunks_exact(n).enumerate() {
                    let scale = self.channel_scale.as_ref().map_or(1.0, |s| s[c]);
                    for (w, beta) in line.iter().zip(&shift[start..start + n]) {
                        out.constant[c] += scale * w * beta;
                        out.spread[c] += (scale * w * beta).abs();
                    }
                }
            }
            if self.floor > 0.0 {
                for (c, line) in panel.chunks_exact(n).enumerate() {
                    out.floor[c] += dot(line, line);
                }
            }
            self.apply_gain(start, n, panel);
            for (c, line) in panel.chunks_exact_mut(n).enumerate() {
                nonzero[c] = nonzero[c] || line.iter().any(|w| *w != 0.0);
                out.folded_sq[c] += dot(line, line);
                if self.centred {
                    line.iter_mut().for_each(|w| *w -= out.mean[c]);
                    out.norm_sq[c] += dot(line, line);
                }
            }
            for (sum, &(a, b)) in out.pair_dot.iter_mut().zip(pairs) {
                *sum += dot(&panel[a * n..][..n], &panel[b * n..][..n]);
            }
        }
        if !self.centred {
            out.norm_sq.clone_from(&out.folded_sq);
        }
        if let Some(bias) = &self.bias {
            for (c, b) in bias.iter().enumerate() {
                let b = b * self.channel_scale.as_ref().map_or(1.0, |s| s[c]);
                out.constant[c] += b;
                out.spread[c] += b.abs();
            }
        }
        for (c, raw_sq) in out.floor.iter_mut().enumerate() {
            *raw_sq = self.floor * raw_sq.sqrt() * self.channel_scale.as_ref().map_or(1.0, |s| s[c]);
        }
        for (c, nonzero) in nonzero.into_iter().enumerate() {
            if !(out.norm_sq[c] + out.folded_sq[c] + out.constant[c].powi(2) + out.spread[c].powi(2)).is_finite() {
                return Err(Error::non_finite(format_args!(
                    "{} channel {c} has a NaN, an infinite weight or a norm beyond f64",
                    self.label
                )));
            }
            if (nonzero && out.folded_sq[c] < LEAST_SQUARE)
                || (out.spread[c] > 0.0 && out.spread[c].powi(2) < LEAST_SQUARE)
            {
                return Err(Error::unsupported(format_args!(
                    "{} channel {c} is not zero, but its square underflows in f64",
                    self.label
                )));
            }
        }
        Ok(out)
    }

    /// `y = W^T x` for the effective operator (`x` of d values, `y` of r), f64.
    pub fn apply(&self, x: &[f64], mean: &[f64], y: &mut [f64]) {
        let (r, d) = self.shape();
        y.fill(0.0);
        let mut panel = vec![0.0; r * PANEL];
        for start in (0..d).step_by(PANEL) {
            let n = PANEL.min(d - start);
            let panel = &mut panel[..r * n];
            self.read_panel(start, n, mean, panel);
            for (y, line) in y.iter_mut().zip(panel.chunks_exact(n)) {
                *y += dot(line, &x[start..start + n]);
            }
        }
    }

    /// `x += W y` for the effective operator (`y` of r values, `x` of d), f64.
    pub fn apply_adjoint(&self, y: &[f64], mean: &[f64], x: &mut [f64]) {
        let (r, d) = self.shape();
        let mut panel = vec![0.0; r * PANEL];
        for start in (0..d).step_by(PANEL) {
            let n = PANEL.min(d - start);
            let panel = &mut panel[..r * n];
            self.read_panel(start, n, mean, panel);
            let x = &mut x[start..start + n];
            for (y, line) in y.iter().zip(panel.chunks_exact(n)) {
                x.iter_mut().zip(line).for_each(|(x, w)| *x += y * w);
            }
        }
    }

    /// The same operator where its input comes with an error of at most this length.
    pub fn with_input_error(self, floor: f64) -> Self {
        Self { floor, ..self }
    }

    /// The same operator without its constant.
    pub fn without_constant(&self) -> Self {
        Self { shift: None, bias: None, ..self.clone() }
    }

    /// What each channel is multiplied by behind the projection; none where nothing is.
    pub(crate) fn channel_scales(&self) -> &[f64] {
        self.channel_scale.as_deref().unwrap_or_default()
    }

    /// The same head with raw weights and no constant: what the paper bounds.
    pub fn without_norm(&self) -> Self {
        Self {
            raw: self.raw.clone(),
            gain: None,
            shift: None,
            bias: None,
            channel_scale: None,
            centred: false,
            floor: 0.0,
            label: self.label.clone(),
        }
    }
}

/// Dot product in eight chains, so that it vectorizes.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f64>() + rest
}
