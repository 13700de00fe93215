//! What a backward call is made of, and the rules it has to keep.

use super::call::Descales;
use super::terms::DeviceCall;
use crate::attention::{AttentionShape, Keeps};
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
use std::ops::Range;

/// Where delta, `sum_j P_ij dP_ij` of each query row, comes from.
#[derive(Clone, Copy, Debug)]
pub enum Delta {
    /// The dot product of a row of dO with the forward's output, BF16, shaped as q. An output of FP8 P V is biased, and so is dQ
    /// then: it takes one whose probabilities and sums are of 16 bits or better.
    Output(View<4>),
    /// The same product with the output before its rounding to BF16, so that no rounding of one sign reaches dQ: for calls whose
    /// forward keeps [`Keeps::UnroundedDelta`].
    Unrounded {
        /// The output.
        out: View<4>,
        /// What its rounding took, as [`SavedRows::Residual`](super::SavedRows::Residual) has it: bytes, shaped as q,
        /// 8-byte aligned, strides multiples of 8 elements.
        residual: View<4>,
    },
    /// Given, f32, `(batch, heads_q, len_q)` without gaps.
    Given(View<3>),
}

/// How a [`BackwardEngine`](super::BackwardEngine) runs its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardOptions {
    /// dQ, too, has the same bits in every run; slower.
    pub deterministic: bool,
    /// Most bytes of f32 sums of dQ, 4 for each element of q: calls that have more run in parts, entries of the batch or KV
    /// heads, in two lanes that share the limit; a lane has at least those of one KV head. `None`: a quarter of the call's where
    /// each query head has a KV head of its own, which makes the peak memory of a training step that of BF16's, but enough to
    /// fill the device; no limit elsewhere. `Some(usize::MAX)`: one part. Calls with sequences or sinks are in one part.
    pub sums_limit: Option<usize>,
    /// What the forwards of its calls keep, and with it where delta comes from and what dQ is a product of. With
    /// [`Keeps::Fp8Dq`], dQ of E4M3 codes of dS (see [`Fp8Products`](crate::attention::Fp8Products)), calls need
    /// [`BackwardTensors::bounds`], heads of at most 128, and with `deterministic` heads of more than 64.
    pub keeps: Keeps,
}

impl Default for BackwardOptions {
    fn default() -> Self {
        Self { deterministic: false, sums_limit: None, keeps: Keeps::Operands }
    }
}

/// What the scales of dS come from.
#[derive(Clone, Copy, Debug)]
pub struct RowBounds {
    /// The base-2 logarithm of the largest P of each row, as a forward with [`SavedRows::RowMax`](super::SavedRows::RowMax)
    /// leaves it: f32, `(batch, heads_q, len_q)` without gaps.
    pub row_max: View<3>,
    /// A bound on |v_j| of each KV head, of the E4M3 values that are read, f32, `(batch, heads_kv)`; `None`: what the
    /// range of E4M3 says, 448 sqrt(d_v) descales. One that is negative or not finite
    /// makes dQ NaN.
    pub value_norm: Option<View<2>>,
}

/// What one backward call reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct BackwardTensors {
    /// Queries as the forward multiplied them: E4M3, `(batch, len_q, heads_q, d)`, 16-byte aligned, strides multiples of 16
    /// elements.
    pub q: View<4>,
    /// Keys, E4M3, `(batch, len_k, heads_kv, d)`, likewise.
    pub k: View<4>,
    /// Values, E4M3, as keys: rows, not the order that the forward's cast writes.
    pub v: View<4>,
    /// Descales of q, k and v; those of an E4M3 output are not read.
    pub descales: Descales,
    /// Log-sum-exp of the forward, in nats: f32, `(batch, heads_q, len_q)` without gaps; `-inf` where a row sees no key.
    pub lse: View<3>,
    /// Where delta comes from.
    pub delta: Delta,
    /// Gradient of the output, BF16, shaped as q. 16-byte aligned, strides multiples of 8 elements.
    pub d_out: View<4>,
    /// Gradient of the queries before their cast, BF16, shaped as q, likewise.
    pub dq: View<4>,
    /// Gradient of the keys, BF16, shaped as k, likewise.
    pub dk: View<4>,
    /// Gradient of the values, BF16, shaped as v, likewise.
    pub dv: View<4>,
    /// For dQ in FP8, and for no other.
    pub bounds: Option<RowBounds>,
    /// Gradient of the sinks, f32, `(heads_q)` without gaps; for calls with sinks, and for no others.
    pub d_sinks: Option<View<1>>,
}

impl BackwardTensors {
    /// Sizes of the call on these tensors.
    pub fn shape(&self) -> AttentionShape {
        let [batch, len_q, n_q_heads, d_head] = self.q.extents();
        let [_, len_k, n_kv_heads, _] = self.k.extents();
        AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: self.v.extents()[3] }
    }

    /// What the forward kept for it.
    pub fn keeps(&self) -> Keeps {
        match (&self.delta, &self.bounds) {
            (_, Some(_)) => Keeps::Fp8Dq,
            (Delta::Unrounded { .. }, None) => Keeps::UnroundedDelta,
            _ => Keeps::Operands,
        }
    }

    /// Checks every rule of a call and of its tensors.
    ///
    /// # Errors
    /// Names the argument and the rule.
    pub fn check(&self, call: &DeviceCall) -> Result<()> {
        call.check()?;
        let sizes = &call.shape;
        let AttentionShape { batch, n_q_heads, n_kv_heads, .. } = *sizes;
        let (of_q, of_out, of_k, of_v) = (sizes.q_shape(), sizes.out_shape(), sizes.k_shape(), sizes.v_shape());
        for (name, x, shape) in [("q", &self.q, of_q), ("k", &self.k, of_k), ("v", &self.v, of_v)] {
            x.expect(name, &[Element::E4m3], shape)?;
            x.expect_aligned(name, 16, 16)?;
        }
        let wide =
            [("d_out", &self.d_out, of_out), ("dq", &self.dq, of_q), ("dk", &self.dk, of_k), ("dv", &self.dv, of_v)];
        let check_wide = |name: &str, x: &View<4>, shape| {
            x.expect(name, &[Element::Bf16], shape)?;
            x.expect_aligned(name, 16, 8)
        };
        wide.into_iter().try_for_each(|(name, x, shape)| check_wide(name, x, shape))?;
        self.lse.expect_dense("lse", Element::F32, sizes.lse_shape())?;
        match &self.delta {
            Delta::Output(out) => check_wide("out", out, of_out)?,
            Delta::Unrounded { out, residual } => {
                check_wide("out", out, of_out)?;
                residual.expect("residual", &[Element::U8], of_out)?;
                residual.expect_aligned("residual", 8, 8)?;
            }
            Delta::Given(delta) => delta.expect_dense("delta", Element::F32, sizes.lse_shape())?,
        }
        self.descales.check(sizes)?;
        if let Some(bounds) = &self.bounds {
            if matches!(self.delta, Delta::Unrounded { .. }) {
                return Err(Error::unsupported(
                    "dQ in FP8 takes delta from the rounded output: leave out the bounds or the residual",
                ));
            }
            bounds.row_max.expect_dense("row_max", Element::F32, sizes.lse_shape())?;
            if let Some(x) = &bounds.value_norm {
                x.expect("value_norm", &[Element::F32], [batch, n_kv_heads])?;
                x.expect_aligned("value_norm", 4, 1)?;
            }
        }
        if call.sinks.is_some() != self.d_sinks.is_some() {
            return Err(Error::argument("d_sinks is for calls with sinks, and they need it"));
        }
        if let Some(d_sinks) = &self.d_sinks {
            d_sinks.expect_dense("d_sinks", Element::F32, [n_q_heads])?;
        }
        if self.descales.logit.is_some() {
            return Err(Error::unsupported("gradients through logits in E4M3 are not offered on the GPU"));
        }
        Ok(())
    }

    /// Of some entries of the batch, or of some KV heads of one entry with the query heads that read them.
    pub(super) fn part(&self, entries: Range<usize>, kv_heads: Range<usize>) -> Self {
        let group = self.q.extents()[2] / self.k.extents()[2];
        let heads = kv_heads.start * group..kv_heads.end * group;
        let of_q = |x: &View<4>| x.narrow(0, entries.clone()).narrow(2, heads.clone());
        let of_k = |x: &View<4>| x.narrow(0, entries.clone()).narrow(2, kv_heads.clone());
        let of_rows = |x: &View<3>| x.narrow(0, entries.clone()).narrow(1, heads.clone());
        let descale = |x: Option<View<2>>| x.map(|x| x.narrow(0, entries.clone()).narrow(1, kv_heads.clone()));
        let Descales { q, k, v, .. } = self.descales;
        Self {
            q: of_q(&self.q),
            k: of_k(&self.k),
            v: of_k(&self.v),
            descales: Descales { q: descale(q), k: descale(k), v: descale(v), ..self.descales },
            lse: of_rows(&self.lse),
            delta: match &self.delta {
                Delta::Output(out) => Delta::Output(of_q(out)),
                Delta::Unrounded { out, residual } => Delta::Unrounded { out: of_q(out), residual: of_q(residual) },
                Delta::Given(delta) => Delta::Given(of_rows(delta)),
            },
            d_out: of_q(&self.d_out),
            dq: of_q(&self.dq),
            dk: of_k(&self.dk),
            dv: of_k(&self.dv),
            bounds: self
                .bounds
                .map(|bounds| RowBounds { row_max: of_rows(&bounds.row_max), value_norm: descale(bounds.value_norm) }),
            d_sinks: self.d_sinks,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cuda::DevicePtr;

    // SAFETY of every view below: nothing is launched in these tests.
    pub(in crate::device::attention) fn dense<const R: usize>(element: Element, extents: [usize; R]) -> View<R> {
        unsafe { View::dense(DevicePtr(1 << 20), element, extents) }
    }

    fn tensors() -> BackwardTensors {
        let (q, kv) = ([2, 40, 4, 128], [2, 50, 2, 128]);
        BackwardTensors {
            q: dense(Element::E4m3, q),
            k: dense(Element::E4m3, kv),
            v: dense(Element::E4m3, kv),
            descales: Descales::default(),
            lse: dense(Element::F32, [2, 4, 40]),
            delta: Delta::Output(dense(Element::Bf16, q)),
            d_out: dense(Element::Bf16, q),
            dq: dense(Element::Bf16, q),
            dk: dense(Element::Bf16, kv),
            dv: dense(Element::Bf16, kv),
            bounds: None,
            d_sinks: None,
        }
    }

    fn check(tensors: &BackwardTensors) -> Result<AttentionShape> {
        let shape = tensors.shape();
        tensors.check(&DeviceCall::causal(shape)).map(|()| shape)
    }

    fn descales() -> Descales {
        let one = Some(dense(Element::F32, [2, 2]));
        Descales { q: one, k: one, v: one, ..Descales::default() }
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        let sizes = check(&tensors()).unwrap();
        assert_eq!(
            sizes,
            AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 40, len_k: 50, d_head: 128, d_v: 128 }
        );
        type Change = fn(&mut BackwardTensors);
        let cases: [(&str, Change); 14] = [
            ("d_head 264 is not offered", |t| t.q = dense(Element::E4m3, [2, 40, 4, 264])),
            ("q is Bf16", |t| t.q = dense(Element::Bf16, [2, 40, 4, 128])),
            ("v has shape", |t| t.v = dense(Element::E4m3, [2, 51, 2, 128])),
            ("d_out is F32", |t| t.d_out = dense(Element::F32, [2, 40, 4, 128])),
            ("d_out must be contiguous in its last dimension", |t| {
                // The gradient of a sum.
                t.d_out = unsafe { View::new(DevicePtr(256), Element::Bf16, [2, 40, 4, 128], [0; 4]) };
            }),
            ("dq has shape", |t| t.dq = dense(Element::Bf16, [2, 40, 2, 128])),
            ("dv is E4m3", |t| t.dv = dense(Element::E4m3, [2, 50, 2, 128])),
            ("lse has shape", |t| t.lse = dense(Element::F32, [2, 40, 4])),
            ("out is E4m3", |t| t.delta = Delta::Output(dense(Element::E4m3, [2, 40, 4, 128]))),
            ("residual has shape", |t| {
                let (out, residual) = (dense(Element::Bf16, [2, 40, 4, 128]), dense(Element::U8, [2, 40, 2, 128]));
                t.delta = Delta::Unrounded { out, residual };
            }),
            ("delta has shape", |t| t.delta = Delta::Given(dense(Element::F32, [2, 4, 41]))),
            ("leave out the bounds or the residual", |t| {
                let out = dense(Element::Bf16, [2, 40, 4, 128]);
                t.delta = Delta::Unrounded { out, residual: dense(Element::U8, [2, 40, 4, 128]) };
                t.bounds = Some(RowBounds { row_max: dense(Element::F32, [2, 4, 40]), value_norm: None });
            }),
            ("d_sinks is for calls with sinks", |t| t.d_sinks = Some(dense(Element::F32, [4]))),
            ("logits in E4M3", |t| t.descales.logit = Some(dense(Element::F32, [4]))),
        ];
        for (message, change) in cases {
            let mut call = tensors();
            change(&mut call);
            let error = check(&call).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    /// A part is a call of its own: its tensors begin at its first entry and head, and keep every rule.
    #[test]
    fn a_part_has_the_tensors_of_its_entries_and_heads() {
        let all = BackwardTensors { descales: descales(), ..tensors() };
        let part = all.part(1..2, 1..2);
        let sizes = check(&part).unwrap();
        assert_eq!((sizes.batch, sizes.n_q_heads, sizes.n_kv_heads), (1, 2, 1));
        let at = |x: DevicePtr| x.0 - (1 << 20);
        assert_eq!(at(part.q.ptr()), (40 * 4 + 2) * 128);
        assert_eq!(at(part.dk.ptr()), 2 * (50 * 2 + 1) * 128);
        assert_eq!(at(part.lse.ptr()), 4 * (4 + 2) * 40);
        assert_eq!(at(part.descales.k.unwrap().ptr()), 4 * 3);
        let whole = all.part(0..2, 0..2);
        assert_eq!((whole.q, whole.dv, whole.lse), (all.q, all.dv, all.lse));
        assert!(check(&all.part(0..2, 1..2)).is_err(), "the log-sum-exp of some heads of two entries has gaps");
    }
}
