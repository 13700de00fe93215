//! Inputs and outputs of a backend, and the operands as its products see them.

use super::call::{AttentionCall, Inputs};
use super::operands::centered;
use super::precision::Precision;
use crate::error::{Error, Result};
use crate::fp8::{Counts, Format, OnOverflow};
use crate::plan::ScalePlan;
use crate::scale::Descale;
use crate::stats::{CastStats, KvSums, StepStats};

/// What a call gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput {
    /// Output, `(batch, len_q, n_q_heads, d_v)`.
    pub out: Vec<f32>,
    /// Log-sum-exp of each row in nats with its head's sink, `(batch, n_q_heads, len_q)`; only the sink where a row of a
    /// sequence sees no key, `-inf` without sinks and where no sequence has the row.
    pub lse: Vec<f32>,
    /// What a backward pass takes in their place where the call has centers.
    pub centered: Option<CenteredOutput>,
    /// Sums of k and v over the rows of sequences, which the mean of later centers comes from; `None` from a GPU.
    pub sums: Option<KvSums>,
    /// Statistics per head, over all sequences. Those of k and v are of what is cast, with centers subtracted; logits have what
    /// a center takes added again.
    ///
    /// Logits are those after the soft-cap and before their cast, of the pairs that the mask shows; extremes before the
    /// soft-cap have fields of their own. Sinks are not counted. NaN takes no part in maximum and minimum; `non_finite` is counted
    /// before the soft-cap. q, k and v are counted in the rows of sequences, also keys that no query sees.
    pub stats: StepStats,
}

/// The output and the log-sum-exp of centered keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct CenteredOutput {
    /// `O - m`. Without sinks it is what the products with `v - m` give; with sinks their output is `O - (1 - p_sink) m`.
    pub out: Vec<f32>,
    /// Log-sum-exp of the logits that were exponentiated: `lse - tau q . c`, or `lse` where those were the model's own (with a
    /// soft-cap or logits in E4M3).
    pub lse: Vec<f32>,
}

impl AttentionOutput {
    /// What the backward pass of the same call takes.
    pub fn saved(&self) -> Saved<'_> {
        match &self.centered {
            Some(centered) => Saved { out: &centered.out, lse: &centered.lse },
            None => Saved { out: &self.out, lse: &self.lse },
        }
    }
}

/// What a backward pass needs of its forward: [`AttentionOutput::saved`]. With centers both are those of [`CenteredOutput`].
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Output, `(batch, len_q, n_q_heads, d_v)`. [`Delta::Probabilities`](super::Delta::Probabilities) does not look at it.
    pub out: &'a [f32],
    /// Log-sum-exp, `(batch, n_q_heads, len_q)`.
    pub lse: &'a [f32],
}

/// A backend that computes attention with the scales of a plan.
pub trait Attention {
    /// Runs one call.
    ///
    /// # Errors
    /// If the call, the operands' lengths or the plan's lengths break their rules, if the backend does not offer the
    /// precision (`is_unsupported`), or if its device fails.
    fn forward(
        &self,
        call: &AttentionCall<'_>,
        inputs: &Inputs<'_>,
        plan: &ScalePlan,
        precision: &Precision,
    ) -> Result<AttentionOutput>;
}

/// The operands as the products see them: cast to E4M3 and multiplied back, in the layouts of [`Inputs`].
#[derive(Clone, Debug, PartialEq)]
pub struct Dequantised {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values; unchanged where the plan has no descales for them.
    pub v: Vec<f32>,
}

/// `e4m3(x / descale) * descale` of every operand, and `e4m3((x - c) / descale) * descale + c` with a center.
///
/// # Errors
/// As [`Attention::forward`].
pub fn dequantised(
    call: &AttentionCall<'_>,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    on_overflow: OnOverflow,
) -> Result<Dequantised> {
    check(call, inputs, plan)?;
    let shape = &call.shape;
    let cast = |x: &[f32], d: usize, descales: &[Descale], group: usize, centers: Option<&Vec<Vec<f32>>>| {
        let mut out = vec![0.0; x.len()];
        for (row, (from, to)) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
            let head = row / group % descales.len();
            let (descale, scale) = (descales[head].get(), descales[head].quant_scale().get());
            match centers {
                None => {
                    Format::E4m3.round_slice(from, scale, on_overflow, to)?;
                    to.iter_mut().for_each(|value| *value *= descale);
                }
                Some(centers) => {
                    Format::E4m3.round_slice(&centered(from, &centers[head]), scale, on_overflow, to)?;
                    to.iter_mut().zip(&centers[head]).for_each(|(value, c)| *value = value.mul_add(descale, *c));
                }
            }
        }
        Ok::<_, Error>(out)
    };
    let (c, m) = call.center.map_or((None, None), |center| (center.k.as_ref(), center.v.as_ref()));
    Ok(Dequantised {
        q: cast(inputs.q, shape.d_head, &plan.operands.q, shape.group(), None)?,
        k: cast(inputs.k, shape.d_head, &plan.operands.k, 1, c)?,
        v: plan.operands.v.as_ref().map_or_else(|| Ok(inputs.v.to_vec()), |v| cast(inputs.v, shape.d_v, v, 1, m))?,
    })
}

pub(crate) fn check(call: &AttentionCall<'_>, inputs: &Inputs<'_>, plan: &ScalePlan) -> Result<()> {
    call.check()?;
    inputs.check(&call.shape)?;
    let (n_q, n_kv) = (call.shape.n_q_heads, call.shape.n_kv_heads);
    let operands = &plan.operands;
    let rows = [
        ("logit", Some(&plan.logit_descale), n_q),
        ("q", Some(&operands.q), n_kv),
        ("k", Some(&operands.k), n_kv),
        ("v", operands.v.as_ref(), n_kv),
        ("o", operands.o.as_ref(), n_kv),
    ];
    for (name, row, want) in rows {
        if let Some(row) = row
            && row.len() != want
        {
            return Err(Error::mismatch(format_args!(
                "the plan has {} {name} descales where the call needs {want}",
                row.len()
            )));
        }
    }
    Ok(())
}

impl From<Counts> for CastStats {
    fn from(counts: Counts) -> Self {
        let Counts { amax, overflow, beyond_rounding, non_finite, count } = counts;
        Self { amax, overflow, beyond_rounding, non_finite, count }
    }
}
