//! Descales of one layer's attention call, the bounds that they come from, and centers: what is subtracted from keys and
//! values before they are cast.

mod center;
mod centering;

use crate::bound::{BoundKind, E4M3_MAX, LayerBounds, OperandBound};
use crate::error::{Error, Result};
use crate::named;
use crate::scale::Descale;
pub use center::{Center, center_hash};
pub use centering::{CENTER_POSITIONS, CenterPolicy, CenterSource, CenteredLayer, center_layer, centered_bounds};
use serde::{Deserialize, Serialize};

/// Scales of one layer.
///
/// Logit entries are per query head (`n_q`), operand entries per KV head (`n_kv`; q too, which is FlashAttention-3's
/// convention). [`ScalePlan::per_tensor`] folds a row into the one scale that cuDNN takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalePlan {
    /// Index among the layers with attention; the model's own number is that of its spec.
    pub layer: usize,
    /// Bound on |logit|, `n_q` values; `None` where a policy sets a scale without knowing a bound.
    pub logit_bound: Option<Vec<f64>>,
    /// Descale of E4M3 logits, `n_q` values.
    pub logit_descale: Vec<Descale>,
    /// Descales of q, k, v and o.
    pub operands: OperandDescales,
}

/// Descales of the operands, `n_kv` values each; v and o are `None` where the values have no bound (OLMo 2).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperandDescales {
    /// Queries (the largest of the group of query heads that share a KV head).
    pub q: Vec<Descale>,
    /// Keys.
    pub k: Vec<Descale>,
    /// Values.
    pub v: Option<Vec<Descale>>,
    /// Output: twice that of v. With weights rounded to E4M3 the output can exceed the largest v by 1/17, and 2 is the next power.
    /// Of centered values m is added.
    pub o: Option<Vec<Descale>>,
}

named! {
    /// Whether every head has its own scale or all heads of a layer share the largest.
    pub enum Granularity is "granularity" default Head {
        /// One scale per head.
        Head = "head",
        /// One scale per layer; rows keep their length and all entries are equal.
        Layer = "layer",
    }
}

/// Share of the E4M3 range that a logit bound is mapped onto by default (the paper's eta).
pub const DEFAULT_ETA: f64 = 0.8;

/// Smallest share: less than one code of E4M3 is left under it.
const LEAST_ETA: f64 = 1e-6;

impl ScalePlan {
    /// The plan of one layer: logit descale = bound / (eta 448), with the worst-case bound for
    /// [`BoundKind::WorstCase`]; operand descales always from the worst-case bounds; o = 2 v.
    ///
    /// # Errors
    /// As [`check_eta`]; if the layer does not have that bound, or if a descale leaves the range of f32.
    pub fn from_bounds(bounds: &LayerBounds, kind: BoundKind, eta: f64, granularity: Granularity) -> Result<Self> {
        check_eta(eta)?;
        let mut logit_bound = bounds.heads.iter().map(|head| head.for_scale(kind)).collect::<Result<Vec<_>>>()?;
        if granularity == Granularity::Layer {
            let largest = logit_bound.iter().copied().fold(0.0, f64::max);
            logit_bound.fill(largest);
        }
        let logit_descale =
            logit_bound.iter().map(|&bound| Descale::covering(bound, eta * E4M3_MAX)).collect::<Result<Vec<_>>>();
        let logit_descale = logit_descale.map_err(|error| error.within("logits"))?;
        let plan = Self {
            layer: bounds.layer,
            logit_bound: Some(logit_bound),
            logit_descale,
            operands: OperandDescales::from_bounds(bounds, granularity)?,
        };
        Ok(plan)
    }

    /// The largest descale of a row: the one scale of a call that takes one per tensor.
    pub fn per_tensor(row: &[Descale]) -> Descale {
        row.iter().copied().reduce(Descale::max).unwrap_or(Descale::ONE)
    }
}

/// The rule of eta, the same for offline scales, policies and the engines on a device.
///
/// # Errors
/// `is_argument` if it does not lie between 1e-6 and 1.
pub fn check_eta(eta: f64) -> Result<()> {
    if (LEAST_ETA..=1.0).contains(&eta) {
        return Ok(());
    }
    Err(Error::argument(format_args!("eta {eta:?} must lie between {LEAST_ETA:?} and 1")))
}

impl OperandDescales {
    /// Descales from the worst-case operand bounds, `(B + share A) / 448`, the share from [`RoundingShare`](crate::model::RoundingShare).
    ///
    /// # Errors
    /// If a descale leaves the range of f32.
    pub fn from_bounds(bounds: &LayerBounds, granularity: Granularity) -> Result<Self> {
        let n_kv = bounds.k.len();
        let row = |operand: &str, heads: &[OperandBound]| -> Result<Vec<Descale>> {
            let mut row = vec![0.0f64; n_kv];
            for (head, bound) in heads.iter().enumerate() {
                let slot = &mut row[head * n_kv / heads.len()];
                *slot = slot.max(bound.rounded);
            }
            if granularity == Granularity::Layer {
                let largest = row.iter().copied().fold(0.0, f64::max);
                row.fill(largest);
            }
            let descales: Result<_> = row.into_iter().map(|bound| Descale::covering(bound, E4M3_MAX)).collect();
            descales.map_err(|error| error.within(operand))
        };
        let v = bounds.v.as_deref().map(|heads| row("v", heads)).transpose()?;
        let twice = |v: &Vec<Descale>| {
            let m = |head: usize| bounds.m.as_ref().map_or(0.0, |m| m[head]);
            let largest = (0..n_kv).map(m).fold(0.0, f64::max);
            let m = |head: usize| if granularity == Granularity::Layer { largest } else { m(head) };
            v.iter()
                .enumerate()
                .map(|(i, v)| Descale::covering(2.0 * f64::from(v.get()) + m(i) / E4M3_MAX, 1.0))
                .collect()
        };
        let o = v.as_ref().map(twice).transpose().map_err(|error: Error| error.within("o"))?;
        Ok(Self { q: row("q", &bounds.q)?, k: row("k", &bounds.k)?, v, o })
    }
}
