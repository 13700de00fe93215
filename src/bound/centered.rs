//! Bounds of keys and values from which a constant is subtracted before they are cast.
//!
//! Behind a norm a channel's value at position t is `w_i(t) . x + beta_i(t)`, where w(t) and beta(t) are the rotated columns and
//! constants of its pair and `||x|| <= sqrt(d)`. With `a_i(t) = sqrt(d) ||w_i(t)||`,
//!
//! ```text
//! high_i = max_t [a_i(t) + beta_i(t)]        low_i = max_t [a_i(t) - beta_i(t)]
//! |k_i - c_i| <= max(high_i - c_i, low_i + c_i)         attained; least for c_i = (high_i - low_i) / 2
//! ```
//!
//! in exact arithmetic, for any c. Both maxima are taken over the interval of angles from 0 to that of the last position, not
//! over integers: kernels compute angles in f32, positions of images have several axes, and some scalings slow pairs down as
//! sequences grow. For a fixed x a channel is a sinusoid of the angle with an amplitude of at most
//! `M = sqrt(d) sigma(pair) + |beta|`, so between points h apart it exceeds the larger of them by `M (1 - cos(h / 2))` at
//! most, which is added. A pair that makes a full turn has `high = low` and gains nothing from any c.
//!
//! The rounding term A counts what is there before the subtraction, so c does not change it; one rounding of the difference to
//! BF16 is added, and those of the cast's arithmetic.

use super::values::{LayerBounds, OperandBound};
use crate::geometry::{Channels, HeadLimit, LayerGeometry, Rotary};
use crate::model::AttentionSpec;
use std::f64::consts::TAU;

/// Points in a full turn.
const GRID: f64 = 512.0;

/// Errors of angles in f32: two roundings.
const ANGLE_ROUNDING: f64 = 1.0 / (1 << 22) as f64;

/// Roundings of `(x - c) / s` in f32, or of `x / s - c / s`, relative to `|x - c| + |c|`.
const CAST_ROUNDING: f64 = 1.0 / (1 << 22) as f64;

/// Relative error of rounding the difference to BF16, where a kernel does not cast it at once.
const DIFFERENCE_ROUNDING: f64 = 1.0 / 256.0;

/// What the channels of one head of k or v can be.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadRange {
    /// Largest value of each channel, in exact arithmetic.
    pub high: Vec<f64>,
    /// Largest negated value of each channel.
    pub low: Vec<f64>,
    /// What roundings before the subtraction add to either.
    pub rounding: Vec<f64>,
    /// The constant part of each channel, before rotation.
    pub constant: Vec<f64>,
}

/// The ranges of a layer's keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRanges {
    /// Of each KV head's keys.
    pub k: Vec<HeadRange>,
    /// Of each KV head's values; `None` where the projection's input has no norm.
    pub v: Option<Vec<HeadRange>>,
    /// The keys' own rotation, as far as it turns the constants.
    pub rotary: Option<Rotary>,
    /// The ranges hold at positions below this; `None`: at all.
    pub positions: Option<usize>,
}

impl HeadRange {
    /// Bound of the head with `center` subtracted.
    pub fn bound(&self, center: &[f32]) -> OperandBound {
        let mut bound = OperandBound { exact: 0.0, rounded: 0.0 };
        for (i, c) in center.iter().enumerate() {
            let c = f64::from(*c);
            let exact = (self.high[i] - c).max(self.low[i] + c);
            let rounded = (exact + self.rounding[i]) * (1.0 + DIFFERENCE_ROUNDING) + CAST_ROUNDING * (exact + c.abs());
            bound.exact = bound.exact.max(exact);
            bound.rounded = bound.rounded.max(rounded);
        }
        bound
    }

    /// Bound of the head as it is: that of all angles may be wider.
    pub fn plain(&self) -> OperandBound {
        self.bound(&vec![0.0; self.high.len()])
    }

    /// The center of the least bound in exact arithmetic.
    pub fn minimax(&self) -> Vec<f64> {
        self.high.iter().zip(&self.low).map(|(high, low)| 0.5 * (high - low)).collect()
    }

    fn fixed(root: f64, channels: &Channels, rounding: Vec<f64>) -> Self {
        let lengths = channels.norm_sq.iter().map(|square| root * square.sqrt());
        Self::around(lengths.collect(), channels.constant.clone(), rounding)
    }

    /// Values that lie within `lengths` of their constants.
    fn around(lengths: Vec<f64>, constant: Vec<f64>, rounding: Vec<f64>) -> Self {
        let high = lengths.iter().zip(&constant).map(|(a, c)| a + c).collect();
        let low = lengths.iter().zip(&constant).map(|(a, c)| a - c).collect();
        Self { high, low, rounding, constant }
    }

    /// The same where pairs rotate: `pair(i)` is the Gram block of the pair at `i`.
    fn rotated(&self, root: f64, rotary: &Rotary, positions: Option<usize>, pair: impl Fn(usize) -> [f64; 3]) -> Self {
        let mut out = self.clone();
        let least_factor = 1.0 - rotary.factor_slack;
        for (at, &(a, b)) in rotary.pairs.iter().enumerate() {
            let reach = match (&rotary.fastest, positions) {
                (Some(angles), Some(n)) => angles[at] * n.saturating_sub(1) as f64 * (1.0 + ANGLE_ROUNDING),
                _ => TAU,
            };
            let ranges = pair_range(root, pair(at), (self.constant[a], self.constant[b]), reach);
            for (channel, (high, low)) in [a, b].into_iter().zip(ranges) {
                out.high[channel] = high.max(least_factor * high);
                out.low[channel] = low.max(least_factor * low);
            }
        }
        out
    }

    /// Either of two.
    fn cover(mut self, other: Self) -> Self {
        let largest =
            |to: &mut Vec<f64>, from: Vec<f64>| to.iter_mut().zip(from).for_each(|(to, from)| *to = to.max(from));
        largest(&mut self.high, other.high);
        largest(&mut self.low, other.low);
        largest(&mut self.rounding, other.rounding);
        self
    }
}

/// `(high, low)` of the two channels of a pair with the Gram block `[p, s, m]`, over the angles from 0 to `reach`.
fn pair_range(root: f64, [p, s, m]: [f64; 3], (ka, kb): (f64, f64), reach: f64) -> [(f64, f64); 2] {
    let sigma_sq = 0.5 * (p + s) + (0.5 * (p - s)).hypot(m);
    let most = root * sigma_sq.sqrt() + ka.hypot(kb);
    let reach = reach.clamp(-TAU, TAU);
    let steps = (GRID * reach.abs() / TAU).ceil().max(1.0);
    let step = reach / steps;
    let mut ranges = [(f64::NEG_INFINITY, f64::NEG_INFINITY); 2];
    for i in 0..=steps as usize {
        let (sin, cos) = (step * i as f64).sin_cos();
        let cross = 2.0 * m * sin * cos;
        // What the squares lose in f64 would be lost of their root where they vanish.
        let length = |square: f64| root * (square.max(0.0) + 1e-15 * (p + s)).sqrt();
        let channels = [
            (length(p * cos * cos + s * sin * sin - cross), cos * ka - sin * kb),
            (length(p * sin * sin + s * cos * cos + cross), sin * ka + cos * kb),
        ];
        for (range, (a, beta)) in ranges.iter_mut().zip(channels) {
            *range = (range.0.max(a + beta), range.1.max(a - beta));
        }
    }
    let excess = most * (1.0 - (step / 2.0).cos());
    let up = |x: f64| (x + excess).min(most) + 1e-12 * most;
    ranges.map(|(high, low)| (up(high), up(low)))
}

impl LayerRanges {
    /// The ranges of a layer, given the channels of its keys and values (see
    /// [`layer_channels`](crate::spectral::layer_channels)), at positions below the config's longest sequence.
    pub fn new(spec: &AttentionSpec, geometry: &LayerGeometry<'_>, k: &[Channels], v: &[Channels]) -> Self {
        let positions = spec.layers.get(geometry.layer).and_then(|layer| spec.positions_of(layer));
        Self::within(geometry, k, v, positions)
    }

    /// The same at positions below this.
    pub fn within(geometry: &LayerGeometry<'_>, k: &[Channels], v: &[Channels], positions: Option<usize>) -> Self {
        let (share, d) = (geometry.rounding, geometry.d_model as f64);
        let root = d.sqrt();
        let plain = |heads: &[Channels], share: f64| -> Vec<HeadRange> {
            heads.iter().map(|head| HeadRange::fixed(root, head, operand_rounding(d, head, share))).collect()
        };
        let turns = geometry.qk_limits.as_ref().is_none_or(|limits| !limits.behind_rotation);
        let rotaries: Vec<&Rotary> = geometry.rotaries().filter(|_| turns).collect();
        let k = match &geometry.qk_limits {
            Some(limits) => limits.k.iter().map(|limit| normalised(limit, share.k, &rotaries, positions)).collect(),
            None => {
                let heads = k.iter().zip(plain(k, share.k));
                heads.map(|(channels, range)| turned(channels, range, root, &rotaries, positions)).collect()
            }
        };
        let v = if geometry.v_normalised {
            let (r, length) = (geometry.d_head, (geometry.d_head as f64).sqrt());
            let range = HeadRange::around(vec![length; r], vec![0.0; r], vec![length * share.v; r]);
            Some(vec![range; geometry.v.len()])
        } else {
            geometry.input_bounded.then(|| plain(v, share.v))
        };
        Self { k, v, rotary: geometry.rotary.clone().filter(|_| turns), positions }
    }

    /// The largest constant of a rotation pair of a key head, and of a channel that does not rotate.
    pub fn largest_constant(&self, head: &HeadRange) -> f64 {
        let alone = head.constant.iter().map(|c| c.abs()).fold(0.0, f64::max);
        let pairs = self.rotary.iter().flat_map(|rotary| &rotary.pairs);
        pairs.map(|&(a, b)| head.constant[a].hypot(head.constant[b])).fold(alone, f64::max)
    }
}

/// What roundings add to each channel, `share A`, of inputs no longer than sqrt(d).
pub(super) fn operand_rounding(d: f64, channels: &Channels, share: f64) -> Vec<f64> {
    let rows = channels.folded_sq.iter().zip(&channels.spread).zip(&channels.floor);
    rows.map(|((square, spread), floor)| share * ((d * square).sqrt() + spread) + floor).collect()
}

/// Every reading of the rotation.
fn turned(
    channels: &Channels,
    range: HeadRange,
    root: f64,
    rotaries: &[&Rotary],
    positions: Option<usize>,
) -> HeadRange {
    let mut first = 0;
    let readings = rotaries.iter().map(|rotary| {
        let dots = &channels.pair_dot[first..];
        first += rotary.pairs.len();
        let mut range = range.rotated(root, rotary, positions, |at| {
            let (a, b) = rotary.pairs[at];
            [channels.norm_sq[a], channels.norm_sq[b], dots[at]]
        });
        for &(a, b) in &rotary.pairs {
            let rounding = range.rounding[a].hypot(range.rounding[b]);
            (range.rounding[a], range.rounding[b]) = (rounding, rounding);
        }
        range
    });
    readings.reduce(HeadRange::cover).unwrap_or(range)
}

/// A head that is normalized after its projection: gains take the place of the columns.
fn normalised(limit: &HeadLimit, share: f64, rotaries: &[&Rotary], positions: Option<usize>) -> HeadRange {
    let channel = |c: usize| limit.radius * limit.pair_gain[c] + limit.pair_shift[c];
    let rounding = (0..limit.gain.len()).map(|c| share * channel(c)).collect();
    let lengths = limit.gain.iter().map(|gain| limit.radius * gain.abs()).collect();
    let range = HeadRange::around(lengths, limit.shift.clone(), rounding);
    let readings = rotaries.iter().map(|rotary| {
        range.rotated(limit.radius, rotary, positions, |at| {
            let (a, b) = rotary.pairs[at];
            [limit.gain[a].powi(2), limit.gain[b].powi(2), 0.0]
        })
    });
    readings.reduce(HeadRange::cover).unwrap_or(range)
}

impl LayerBounds {
    /// These bounds where the largest |c| and |m| of each KV head are subtracted and nothing else is known: they are added.
    pub fn around(mut self, c: Option<&[f64]>, m: Option<&[f64]>) -> Self {
        let add = |bounds: &mut [OperandBound], center: Option<&[f64]>| {
            for (bound, c) in bounds.iter_mut().zip(center.unwrap_or_default()) {
                let exact = bound.exact + c;
                let rounded = (bound.rounded + c) * (1.0 + DIFFERENCE_ROUNDING) + CAST_ROUNDING * (exact + c);
                *bound = OperandBound { exact, rounded };
            }
        };
        add(&mut self.k, c);
        self.v.as_deref_mut().into_iter().for_each(|v| add(v, m));
        self.m = m.map(<[f64]>::to_vec);
        self
    }
}
