//! The tensors of a call, and what a plan, bounds and statistics say of each.

use super::shape::LayerShape;
use crate::bound::{E4M3_MAX, LayerBounds};
use crate::named;
use crate::plan::ScalePlan;
use crate::scale::Descale;
use crate::stats::{CastStats, StepStats};

named! {
    /// The tensors of an attention call that have scales, in the order of reports.
    pub enum ScaledTensor is "tensor" {
        /// Logits before the softmax.
        Logit = "logit",
        /// Queries.
        Q = "q",
        /// Keys.
        K = "k",
        /// Values.
        V = "v",
        /// Output.
        O = "o",
    }
}

impl ScaledTensor {
    /// The plan's descales of this tensor; `None` where it has none.
    pub fn descales(self, plan: &ScalePlan) -> Option<&[Descale]> {
        match self {
            Self::Logit => Some(&plan.logit_descale),
            Self::Q => Some(&plan.operands.q),
            Self::K => Some(&plan.operands.k),
            Self::V => plan.operands.v.as_deref(),
            Self::O => plan.operands.o.as_deref(),
        }
    }

    /// Values: query heads for logits, KV heads for operands.
    pub(super) fn row(self, shape: LayerShape) -> usize {
        if self == Self::Logit { shape.n_q_heads } else { shape.n_kv_heads }
    }

    /// Largest |value| for each of the tensor's descales (KV heads take the largest of their query heads). NaN where a
    /// value was NaN, infinite where one was infinite.
    ///
    /// The statistics must have the shape's lengths.
    pub(super) fn amax_row(self, stats: &StepStats, shape: LayerShape) -> Vec<f32> {
        let group = shape.group();
        let heads = |heads: &[CastStats]| heads.iter().map(amax).collect::<Vec<_>>();
        let grouped = |row: Vec<f32>| row.chunks(group).map(largest).collect::<Vec<_>>();
        match self {
            Self::Logit => stats
                .logits
                .iter()
                .map(|head| match head.amax() {
                    finite if finite.is_finite() && head.non_finite > 0 => f32::NAN,
                    amax => amax,
                })
                .collect(),
            Self::Q => grouped(heads(&stats.q)),
            Self::K => heads(&stats.k),
            Self::V => heads(&stats.v),
            Self::O => grouped(heads(&stats.o)),
        }
    }

    /// The worst-case bound on each of the tensor's values, as far as there is one.
    pub(super) fn bound_row(self, bounds: &LayerBounds, shape: LayerShape) -> Option<Vec<f64>> {
        let group = shape.group();
        match self {
            Self::Logit => bounds.heads.iter().map(|head| head.rounded).collect(),
            Self::Q => Some(bounds.q.chunks(group).map(|g| g.iter().map(|b| b.rounded).fold(0.0, f64::max)).collect()),
            Self::K => Some(bounds.k.iter().map(|bound| bound.rounded).collect()),
            Self::V => bounds.v.as_ref().map(|v| v.iter().map(|bound| bound.rounded).collect()),
            Self::O => None,
        }
    }

    /// Overflow, beyond rounding, non-finite and all values.
    pub(super) fn counts(self, stats: &StepStats) -> [u64; 4] {
        let casts = |heads: &[CastStats]| {
            heads
                .iter()
                .fold([0; 4], |sum, head| add(sum, [head.overflow, head.beyond_rounding, head.non_finite, head.count]))
        };
        match self {
            Self::Logit => stats
                .logits
                .iter()
                .fold([0; 4], |sum, head| add(sum, [head.overflow, head.beyond_rounding, head.non_finite, head.count])),
            Self::Q => casts(&stats.q),
            Self::K => casts(&stats.k),
            Self::V => casts(&stats.v),
            Self::O => casts(&stats.o),
        }
    }
}

fn add(a: [u64; 4], b: [u64; 4]) -> [u64; 4] {
    std::array::from_fn(|i| a[i] + b[i])
}

/// A NaN that the amax may have lost is put back.
fn amax(head: &CastStats) -> f32 {
    if head.non_finite > 0 && head.amax.is_finite() { f32::NAN } else { head.amax }
}

/// The largest, where NaN is larger than everything.
pub(super) fn largest(row: &[f32]) -> f32 {
    row.iter().copied().fold(0.0, |a, b| if a.is_nan() || a >= b { a } else { b })
}

/// Whether a value leaves the range, by division or by multiplication with the rounded inverse; NaN does.
pub(super) fn overflows(amax: f32, descale: Descale) -> bool {
    let fits = |scaled: f32| scaled <= E4M3_MAX as f32;
    !(fits(amax / descale.get()) && fits(amax * descale.quant_scale().get()))
}
