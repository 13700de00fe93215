//! Operands of one head as the products see them: cast, padded and laid out for the inner loops.

use super::call::{AttentionCall, Inputs};
use super::lanes::{self, LANES, TILE};
use super::precision::{Cast, LogitCast, Precision, Rounding};
use crate::error::Result;
use crate::fp8::{Counts, Format};
use crate::plan::ScalePlan;
use crate::scale::Descale;
use std::ops::Range;

/// Scales of one query head and its KV head.
pub(super) struct HeadScales {
    pub q: Option<Descale>,
    pub k: Option<Descale>,
    pub v: Option<Descale>,
    pub o: Option<Descale>,
    pub logit: Option<Descale>,
}

/// Rows of one head, `(len, stride)`: E4M3 codes' values, not multiplied by their descale, where they are cast.
pub(super) struct Rows {
    pub values: Vec<f32>,
    pub counts: Counts,
}

impl Rows {
    /// No value is NaN or infinite, so that zero times any is zero.
    pub(super) fn finite(&self) -> bool {
        lanes::non_finite(&self.values) == 0
    }

    /// Tiles of 64 rows, each transposed: `(tiles, stride, TILE)`. Rows past the last are zeros.
    pub(super) fn transposed(&self, stride: usize) -> Vec<f32> {
        let tiles = (self.values.len() / stride).div_ceil(TILE);
        let mut out = vec![0.0; tiles * stride * TILE];
        for (row, values) in self.values.chunks_exact(stride).enumerate() {
            let tile = &mut out[row / TILE * stride * TILE..];
            for (c, &x) in values.iter().enumerate() {
                tile[c * TILE + row % TILE] = x;
            }
        }
        out
    }
}

/// One call's operands and scales.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub call: &'a AttentionCall<'a>,
    pub inputs: &'a Inputs<'a>,
    /// `None` casts nothing.
    pub plan: Option<&'a ScalePlan>,
    pub precision: &'a Precision,
}

impl Operands<'_> {
    /// Row length of q and k in the inner loops: `d_head` padded with zeros.
    pub(super) fn stride(&self) -> usize {
        self.call.shape.d_head.next_multiple_of(LANES)
    }

    /// Row length of v and of the output.
    pub(super) fn stride_v(&self) -> usize {
        self.call.shape.d_v.next_multiple_of(LANES)
    }

    pub(super) fn scales(&self, head: usize) -> HeadScales {
        let kv = self.call.shape.kv_head(head);
        let at = |row: Option<&Vec<Descale>>, i: usize| row.map(|row| row[i]);
        let operands = self.plan.map(|plan| &plan.operands);
        HeadScales {
            q: at(operands.map(|o| &o.q), kv),
            k: at(operands.map(|o| &o.k), kv),
            v: at(operands.and_then(|o| o.v.as_ref()), kv),
            o: at(operands.and_then(|o| o.o.as_ref()), kv),
            logit: at(self.plan.map(|plan| &plan.logit_descale), head),
        }
    }

    /// The multiplier that undoes an operand's cast.
    pub(super) fn undo(&self, descale: Option<Descale>) -> f64 {
        match (descale, self.precision.operands.fp8()) {
            (Some(descale), Some((_, factor))) => f64::from(descale.get()) / f64::from(factor),
            _ => 1.0,
        }
    }

    /// What the sums of q . k are multiplied by: tau and the descales of q and k.
    pub(super) fn logit_factor(&self, scales: &HeadScales) -> f32 {
        (self.call.softmax_scale * self.undo(scales.q) * self.undo(scales.k)) as f32
    }

    /// The sink of a query head.
    pub(super) fn sink(&self, head: usize) -> Option<f32> {
        self.call.sinks.map(|sinks| sinks[head] as f32)
    }

    /// These rows of a query head.
    pub(super) fn queries(&self, head: usize, rows: Range<usize>) -> Result<Rows> {
        let shape = self.call.shape;
        self.rows((self.inputs.q, None), shape.d_head, rows, |row| shape.q_at(row, head), self.scales(head).q, 0)
    }

    /// `tau q . c` of each row, of the queries that the products see: what centered keys take from all logits of the row.
    pub(super) fn offsets(&self, head: usize, queries: &Rows) -> Option<Vec<f32>> {
        let c = self.call.key_center(head)?;
        let factor = self.call.softmax_scale * self.undo(self.scales(head).q);
        let product = |row: &[f32]| row.iter().zip(c).map(|(q, c)| f64::from(*q) * f64::from(*c)).sum::<f64>();
        Some(queries.values.chunks_exact(self.stride()).map(|row| (factor * product(row)) as f32).collect())
    }

    /// Whether logits have to be the model's own when they are computed, and not only up to a constant a row.
    pub(super) fn absolute_logits(&self) -> bool {
        self.call.soft_cap.is_some() || self.precision.logits != LogitCast::F32
    }

    /// The same rows of a tensor in the output's layout, which is not cast.
    pub(super) fn out_rows(&self, x: &[f32], head: usize, rows: Range<usize>) -> Rows {
        let (shape, stride) = (self.call.shape, self.stride_v());
        let mut values = vec![0.0; rows.len() * stride];
        for (row, to) in rows.zip(values.chunks_exact_mut(stride)) {
            to[..shape.d_v].copy_from_slice(&x[shape.out_at(row, head)..][..shape.d_v]);
        }
        Rows { values, counts: Counts::default() }
    }

    /// These keys of a KV head.
    pub(super) fn keys(&self, kv_head: usize, rows: Range<usize>) -> Result<Rows> {
        let shape = self.call.shape;
        let head = kv_head * shape.group();
        let (descale, c) = (self.scales(head).k, self.call.key_center(head));
        self.rows((self.inputs.k, c), shape.d_head, rows, |row| shape.k_at(row, kv_head), descale, 1)
    }

    /// These values of a KV head.
    pub(super) fn values(&self, kv_head: usize, rows: Range<usize>) -> Result<Rows> {
        let shape = self.call.shape;
        let head = kv_head * shape.group();
        let (descale, m) = (self.scales(head).v, self.call.value_center(head));
        self.rows((self.inputs.v, m), shape.d_v, rows, |row| shape.v_at(row, kv_head), descale, 2)
    }

    /// Copies rows of `d` values without the center, through FP8 or BF16 if that is asked for; counts in any case. `tensor`
    /// tells the random bits of q, k and v apart.
    fn rows(
        &self,
        (x, center): (&[f32], Option<&[f32]>),
        d: usize,
        rows: Range<usize>,
        start: impl Fn(usize) -> usize,
        descale: Option<Descale>,
        tensor: u64,
    ) -> Result<Rows> {
        let stride = d.next_multiple_of(LANES);
        let mut values = vec![0.0; rows.len() * stride];
        let mut counts = Counts::default();
        for (row, to) in rows.zip(values.chunks_exact_mut(stride)) {
            let at = start(row);
            let (from, to) = (&x[at..][..d], &mut to[..d]);
            let own = center.map(|center| centered(from, center));
            let from = own.as_deref().unwrap_or(from);
            let Precision { operands: cast, rounding, on_overflow, .. } = *self.precision;
            counts += match (descale, cast.fp8(), rounding) {
                (Some(descale), Some((format, factor)), Rounding::Nearest) => {
                    format.round_slice(from, descale.quant_scale().get() * factor, on_overflow, to)?
                }
                (Some(descale), Some((format, factor)), Rounding::Stochastic { seed }) => {
                    let scale = descale.quant_scale().get() * factor;
                    for (i, (to, from)) in to.iter_mut().zip(from).enumerate() {
                        let bits = Rounding::bits(seed, tensor, at + i);
                        *to = format.decode(format.encode_stochastic(from * scale, bits, on_overflow));
                    }
                    format.count_slice(from, scale)?
                }
                _ => {
                    to.copy_from_slice(from);
                    if cast == Cast::Bf16 {
                        lanes::round_bf16(to);
                    }
                    count(from, descale)?
                }
            };
        }
        Ok(Rows { values, counts })
    }
}

/// What a call with centers takes from the logits of each row, `tau q . c` of the queries that the products see; `None` where keys
/// have no center.
///
/// # Errors
/// As the cast of q.
#[cfg(feature = "cuda")]
pub(crate) fn key_offsets(
    call: &AttentionCall<'_>,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    precision: &Precision,
) -> Result<Option<Vec<f32>>> {
    let shape = call.shape;
    if call.center.is_none_or(|center| center.k.is_none()) {
        return Ok(None);
    }
    let operands = Operands { call, inputs, plan: Some(plan), precision };
    let rows = shape.batch * shape.len_q;
    let mut all = vec![0.0; shape.lse_elements()];
    for head in 0..shape.n_q_heads {
        let offsets = operands.offsets(head, &operands.queries(head, 0..rows)?);
        for (row, offset) in offsets.into_iter().flatten().enumerate() {
            all[shape.lse_at(row, head)] = offset;
        }
    }
    Ok(Some(all))
}

/// `x - c`.
pub(super) fn centered(x: &[f32], center: &[f32]) -> Vec<f32> {
    x.iter().zip(center).map(|(x, c)| x - c).collect()
}

/// Counts against a descale; without one nothing overflows.
pub(super) fn count(x: &[f32], descale: Option<Descale>) -> Result<Counts> {
    match descale {
        Some(descale) => Format::E4m3.count_slice(x, descale.quant_scale().get()),
        None => Ok(Counts { overflow: 0, beyond_rounding: 0, ..Format::E4m3.count_slice(x, 1.0)? }),
    }
}
