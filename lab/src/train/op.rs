//! The attention call as a node of candle's graph.
//!
//! The forward has already run, under the scales of a plan; the node carries its output. The backward is
//! [`attention::backward`](sigmascale::attention::backward) on the operands as the forward saw them, handed to the unrounded
//! ones (the straight-through rule).

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};
use sigmascale::attention::{AttentionCall, BackwardPrecision, Inputs, Precision, Saved, backward};
use sigmascale::plan::ScalePlan;

/// One attention call that has run.
pub(super) struct Attended {
    pub call: AttentionCall<'static>,
    pub plan: ScalePlan,
    pub precision: Precision,
    pub backward: BackwardPrecision,
    /// `(batch, len_q, n_q_heads, d_head)`.
    pub out: Vec<f32>,
    /// `(batch, n_q_heads, len_q)`.
    pub lse: Vec<f32>,
}

impl Attended {
    /// Puts the call into the graph of its operands.
    pub(super) fn place(self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        q.apply_op3(k, v, self)
    }
}

impl CustomOp3 for Attended {
    fn name(&self) -> &'static str {
        "e4m3-attention"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        q: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(self.out.clone()), q.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &Tensor,
        d_out: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (q_values, k_values, v_values) = (values(q)?, values(k)?, values(v)?);
        let inputs = Inputs { q: &q_values, k: &k_values, v: &v_values };
        let saved = Saved { out: &self.out, lse: &self.lse };
        let d_out = values(d_out)?;
        let gradients = backward(&self.call, &inputs, &self.plan, &self.precision, &self.backward, &saved, &d_out)
            .map_err(candle_core::Error::wrap)?;
        let like = |values: Vec<f32>, x: &Tensor| Tensor::from_vec(values, x.shape(), x.device());
        Ok((Some(like(gradients.dq, q)?), Some(like(gradients.dk, k)?), Some(like(gradients.dv, v)?)))
    }
}
