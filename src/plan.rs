//! What one layer's FP8 attention call gets.

use crate::scale::Descale;
use serde::{Deserialize, Serialize};

/// Scales of one layer.
///
/// Logit entries are per query head (`n_q`), operand entries per KV head (`n_kv`; q too, which is FlashAttention-3's
/// convention). [`ScalePlan::per_tensor`] folds a row into the one scale that cuDNN takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalePlan {
    /// Layer number.
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
    /// Output: twice that of v, since a softmax row of E4M3 weights may sum to a little over one.
    pub o: Option<Vec<Descale>>,
}

impl ScalePlan {
    /// The largest descale of a row: the one scale of a call that takes one per tensor.
    pub fn per_tensor(row: &[Descale]) -> Descale {
        row.iter().copied().reduce(Descale::max).unwrap_or(Descale::ONE)
    }
}
