//! Gradients in tiles of 64 queries by 64 keys, from the operands that the forward really multiplied.
//!
//! With P recomputed from the forward's log-sum-exp, `P_ij = exp(S'_ij - lse_i)`, and `dO` given:
//!
//! ```text
//! dV_j = sum_i P_ij dO_i       dP_ij = dO_i . v_j       delta_i = sum_j P_ij dP_ij = dO_i . o_i
//! dS_ij = P_ij (dP_ij - delta_i) (1 - (S'_ij / cap)^2)     the last factor with a soft-cap only
//! dQ_i = tau sum_j dS_ij k_j       dK_j = tau sum_i dS_ij q_i
//! dsink = - sum_i exp(sink - lse_i) delta_i                over the rows of the sink's query head
//! ```
//!
//! The log-sum-exp has the sink in it, so that it enters P and nothing else changes.
//!
//! q, k, v are the dequantized E4M3 operands, and the gradients are with respect to them; handing them to the unrounded
//! ones is the straight-through rule. S' is the forward's to the bit: the same operands, accumulator and order of sums.
//! With logits in E4M3, P is that of the rounded logits and the rounding passes gradients unchanged. The forward's rounding
//! of P is not differentiated.
//!
//! **delta** ([`Delta`]). From P and dP rows of dS sum to zero. From the output they sum to the error of `dO . o`, which
//! enters `dQ_i` as `-tau error_i sum_j P_ij k_j`: an output that is off in one direction gives a dQ that is, too.
//!
//! **Centers.** With c and m in the call everything above is of `k - c`, `v - m` and `O - m` (rows of dS sum to zero, so dS and dQ
//! are the same), and an error of delta enters dQ along `K - c` instead of K. dP and delta are of one kind: an output with m
//! next to `v - m` gives a wrong dS. With sinks rows of dS sum to `p_sink dO . O` and with a soft-cap to anything, and `tau c sum_j dS_ij` is added.
//!
//! **Roundings** ([`GradientProducts`]). In BF16 the products dP, dV, dQ and dK are taken of BF16 operands: dO, P, dS, and
//! E4M3 codes, which BF16 holds exactly; descales multiply sums. delta comes from the same rounded dO as dP. Sums are f32:
//! the 16-bit accumulator keeps 25 bits, which changes nothing at this precision.
//!
//! **FP8 products** ([`Fp8Products`]). Off by default. dQ is taken of E4M3 codes of dS, dP of E4M3 codes of dO, each row
//! by a power of two that no code can pass 448 under, known before the product:
//!
//! ```text
//! t_i = 2^floor(log2(448 / |dO_i|))                                       dO8_i = e4m3(t_i dO_i)
//! s_i = 2^floor(log2(448 / (b_i |dO_i| R_V)))                             dS8_i = e4m3(s_i dS_i)
//! b_i = 2 min(Pmax_i, 1 - Pmax_i, 1/4) + Pmax_i / 256
//! ```
//!
//! since `|dP_ij| <= |dO_i| |v_j|` and `|dS_ij| <= P_ij (1 - P_ij) max_k |dP_ij - dP_ik|`, and every P but the largest is
//! at most `1 - Pmax_i`. `R_V` bounds `|v_j|`, all in units of V's descale; `Pmax_i` is the row's largest P, from the
//! forward's row maximum; 1/256 covers the rounding of the output in delta. dK takes dS in BF16. Where dP is in FP8,
//! delta and `|dO_i|` are those of the rounded dO. Both products have the accumulator of [`FP8`]: dP sums d_v channels,
//! dQ 128 keys, and f32 holds the sum over those.
//!
//! Source: flash-attention paper, Algorithm 2 and section 3.3, Equation 1.

use super::accumulator;
use super::backend::{Saved, check};
use super::call::{AttentionCall, Inputs, Keeps, check_length};
use super::lanes::{self, TILE};
use super::operands::{HeadScales, Operands, Rows};
use super::precision::{LogitCast, Precision, QkAccumulator};
use super::sequences::Sequence;
use crate::error::Result;
use crate::fp8::{self, OnOverflow};
use crate::plan::ScalePlan;
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use serde::Serialize;
use std::ops::Range;

/// What delta is computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Delta {
    /// The sum of P dP over the keys.
    #[default]
    Probabilities,
    /// The sum of dO times the forward's output over the channels: cheaper, and as good as that output.
    Output,
}

/// The precision of the products of a backward pass other than Q K^T.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientProducts {
    /// f32.
    #[default]
    F32,
    /// BF16 operands, f32 sums.
    Bf16,
    /// BF16, but some in FP8 by scales of rows; for operands in E4M3.
    Fp8(Fp8Products),
}

/// Which products of a backward pass are in FP8, and how loose the bound is that their scales come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Products {
    /// dQ = tau dS K.
    pub dq: bool,
    /// dP = dO V^T.
    pub dp: bool,
    /// R_V as a multiple of the largest |v_j| of the head: what a bound from the weights gives away. At least 1.
    pub value_slack: u32,
}

/// How a backward pass computes; the default is the most exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardPrecision {
    /// delta.
    pub delta: Delta,
    /// dP, dV, dQ and dK.
    pub products: GradientProducts,
}

impl BackwardPrecision {
    /// What a fused kernel computes after a forward in [`Precision::TRAINING`]: delta from the output, products in BF16.
    pub const KERNEL: Self = Self { delta: Delta::Output, products: GradientProducts::Bf16 };

    /// What it computes after one that keeps this. The output here is not rounded, so that delta is that of
    /// [`Keeps::UnroundedDelta`] after any forward. The kernel's bound on |v| in FP8 is the range of E4M3, which has the error of
    /// this one unless V's descale is far too large.
    pub const fn after(keeps: Keeps) -> Self {
        match keeps {
            Keeps::Fp8Dq => {
                let fp8 = Fp8Products { dq: true, dp: false, value_slack: 1 };
                Self { products: GradientProducts::Fp8(fp8), ..Self::KERNEL }
            }
            _ => Self::KERNEL,
        }
    }
}

/// Gradients of the operands, in their layouts.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// dQ, `(batch, len_q, n_q_heads, d_head)`.
    pub dq: Vec<f32>,
    /// dK, `(batch, len_k, n_kv_heads, d_head)`.
    pub dk: Vec<f32>,
    /// dV, `(batch, len_k, n_kv_heads, d_v)`.
    pub dv: Vec<f32>,
    /// Gradient of each query head's sink; empty without sinks.
    pub d_sinks: Vec<f32>,
}

/// Gradients of the call whose forward gave `saved`, for the output's gradient `d_out`, `(batch, len_q, n_q_heads, d_v)`.
/// `inputs`, `plan` and `precision` are those of the forward.
///
/// Rows that see no key, or are in no sequence, have zero gradients and give none; in no sequence `d_out` and `saved` are
/// not read.
///
/// # Errors
/// As [`Attention::forward`](super::Attention::forward), and if a tensor of `saved` or `d_out` has another length.
pub fn backward(
    call: &AttentionCall<'_>,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    precision: &Precision,
    how: &BackwardPrecision,
    saved: &Saved<'_>,
    d_out: &[f32],
) -> Result<Gradients> {
    check(call, inputs, plan)?;
    precision.check(plan)?;
    let shape = &call.shape;
    check_length("lse", saved.lse.len(), shape.lse_elements())?;
    check_length("d_out", d_out.len(), shape.out_elements())?;
    if how.delta == Delta::Output {
        check_length("out", saved.out.len(), shape.out_elements())?;
    }
    let operands = Operands { call, inputs, plan: Some(plan), precision };
    let engine = Engine { operands, how, saved, d_out };
    let sequences = call.all_sequences();
    let heads: Vec<Head> = (0..sequences.len() * shape.n_kv_heads)
        .into_par_iter()
        .map(|at| engine.head(&sequences[at / shape.n_kv_heads], at % shape.n_kv_heads))
        .collect::<Result<_>>()?;

    let (d, d_v, stride, stride_v) = (shape.d_head, shape.d_v, operands.stride(), operands.stride_v());
    let mut all = Gradients {
        dq: vec![0.0; shape.q_elements()],
        dk: vec![0.0; shape.k_elements()],
        dv: vec![0.0; shape.v_elements()],
        d_sinks: Vec::new(),
    };
    let mut d_sinks = vec![0f64; call.sinks.map_or(0, <[f64]>::len)];
    for (at, head) in heads.iter().enumerate() {
        let (sequence, kv_head) = (&sequences[at / shape.n_kv_heads], at % shape.n_kv_heads);
        let len_q = sequence.q.len();
        for (i, dq) in head.dq.chunks_exact(stride).enumerate() {
            let (member, row) = (i / len_q, sequence.q.start + i % len_q);
            all.dq[shape.q_at(row, kv_head * shape.group() + member)..][..d].copy_from_slice(&dq[..d]);
        }
        for (row, dk) in sequence.k.clone().zip(head.dk.chunks_exact(stride)) {
            all.dk[shape.k_at(row, kv_head)..][..d].copy_from_slice(&dk[..d]);
        }
        for (row, dv) in sequence.k.clone().zip(head.dv.chunks_exact(stride_v)) {
            all.dv[shape.v_at(row, kv_head)..][..d_v].copy_from_slice(&dv[..d_v]);
        }
        // Empty without sinks.
        d_sinks.iter_mut().skip(kv_head * shape.group()).zip(&head.d_sinks).for_each(|(sum, part)| *sum += part);
    }
    all.d_sinks = d_sinks.into_iter().map(|x| x as f32).collect();
    Ok(all)
}

/// Gradients of one KV head of one sequence and of the query heads that read it, in rows padded to the strides.
struct Head {
    /// `(group, queries, stride)`.
    dq: Vec<f32>,
    /// `(keys, stride)`.
    dk: Vec<f32>,
    /// `(keys, stride_v)`.
    dv: Vec<f32>,
    /// `(group)`.
    d_sinks: Vec<f64>,
    /// Sums of the rows of dS, `(group, queries)`.
    ds_sums: Vec<f32>,
}

struct Engine<'a> {
    operands: Operands<'a>,
    how: &'a BackwardPrecision,
    saved: &'a Saved<'a>,
    d_out: &'a [f32],
}

/// Rows that a gradient is a weighted sum of.
struct Factor {
    rows: Rows,
    /// No value is NaN or infinite.
    finite: bool,
}

/// The KV head's operands.
struct Packed {
    /// `(tiles, stride, TILE)`, for S.
    keys: Vec<f32>,
    /// `(keys, stride)`, for dQ.
    key_rows: Factor,
    /// `(tiles, stride_v, TILE)`, for dP.
    values: Vec<f32>,
    /// The largest |v_j|, in units of V's descale.
    value_norm: f32,
}

impl Engine<'_> {
    /// Rows as the gradients' products are taken of them.
    fn factor(&self, mut rows: Rows) -> Factor {
        self.how.products.round(&mut rows.values);
        Factor { finite: rows.finite(), rows }
    }

    fn head(&self, sequence: &Sequence, kv_head: usize) -> Result<Head> {
        let (shape, stride, stride_v) = (self.operands.call.shape, self.operands.stride(), self.operands.stride_v());
        let (len_q, len_k) = (sequence.q.len(), sequence.k.len());
        let keys = self.operands.keys(kv_head, sequence.k.clone())?;
        let values = self.factor(self.operands.values(kv_head, sequence.k.clone())?).rows;
        // A sink's value is zero, which is -m next to v - m.
        let sink_value = match self.operands.call.value_center(kv_head * shape.group()) {
            Some(m) if self.operands.call.sinks.is_some() => {
                norm(m) / self.operands.undo(self.operands.scales(kv_head * shape.group()).v) as f32
            }
            _ => 0.0,
        };
        let packed = Packed {
            keys: keys.transposed(stride),
            key_rows: self.factor(keys),
            value_norm: values.values.chunks_exact(stride_v).map(norm).fold(sink_value, f32::max),
            values: values.transposed(stride_v),
        };
        let mut head = Head {
            dq: vec![0.0; shape.group() * len_q * stride],
            dk: vec![0.0; len_k * stride],
            dv: vec![0.0; len_k * stride_v],
            d_sinks: vec![0.0; shape.group()],
            ds_sums: vec![0.0; shape.group() * len_q],
        };
        let scales = self.operands.scales(kv_head * shape.group());
        for member in 0..shape.group() {
            for first in (0..len_q).step_by(TILE) {
                self.tile(&packed, &mut head, sequence, kv_head, member, first)?;
            }
        }
        let tau = self.operands.call.softmax_scale;
        let dq_factor = (tau * self.operands.undo(scales.k)) as f32;
        let dk_factor = (tau * self.operands.undo(scales.q)) as f32;
        head.dq.iter_mut().for_each(|x| *x *= dq_factor);
        head.dk.iter_mut().for_each(|x| *x *= dk_factor);
        let call = self.operands.call;
        if let Some(c) =
            call.key_center(kv_head * shape.group()).filter(|_| call.sinks.is_some() || call.soft_cap.is_some())
        {
            for (row, sum) in head.dq.chunks_exact_mut(stride).zip(&head.ds_sums) {
                row.iter_mut().zip(c).for_each(|(dq, c)| *dq += tau as f32 * sum * c);
            }
        }
        Ok(head)
    }

    /// Adds what the queries from `first` on, counted from the sequence's, of one query head contribute.
    fn tile(
        &self,
        packed: &Packed,
        head: &mut Head,
        sequence: &Sequence,
        kv_head: usize,
        member: usize,
        first: usize,
    ) -> Result<()> {
        let Operands { call, precision, .. } = self.operands;
        let (shape, stride) = (call.shape, self.operands.stride());
        let q_head = kv_head * shape.group() + member;
        let count = TILE.min(sequence.q.len() - first);
        let rows = sequence.q.start + first..sequence.q.start + first + count;
        let queries = self.operands.queries(q_head, rows.clone())?;
        let visible: Vec<Range<usize>> = (first..first + count).map(|row| call.visible(sequence, row)).collect();
        let stride_v = self.operands.stride_v();
        let d_out = self.factor(self.operands.out_rows(self.d_out, q_head, rows.clone()));
        let seen = self.how.products.seen(&d_out.rows.values, stride_v);
        let delta = match self.how.delta {
            Delta::Probabilities => None,
            Delta::Output => {
                let out = self.operands.out_rows(self.saved.out, q_head, rows.clone());
                let rows = seen.rows.chunks_exact(stride_v).zip(out.values.chunks_exact(stride_v)).zip(&seen.scales);
                Some(rows.map(|((d_out, out), scale)| lanes::dot(d_out, out) / scale).collect())
            }
        };
        let scales = self.operands.scales(q_head);
        let offsets = self.operands.offsets(q_head, &queries);
        let absolute = self.operands.absolute_logits();
        let d_out_m = call.value_center(q_head).map(|m| {
            let rows = seen.rows.chunks_exact(stride_v).zip(&seen.scales);
            let dot = |row: &[f32]| row.iter().zip(m).map(|(d, m)| f64::from(*d) * f64::from(*m)).sum::<f64>();
            rows.map(|(row, scale)| dot(row) as f32 / scale).collect()
        });
        let sinks = self.operands.sink(q_head).map(|sink| {
            let offset = |row: usize| offsets.as_ref().filter(|_| !absolute).map_or(0.0, |offsets| offsets[row]);
            (0..count).map(|row| sink - offset(row)).collect()
        });
        let kernel = Kernel {
            stride,
            stride_v,
            packed,
            lse: rows.map(|row| self.saved.lse[shape.lse_at(row, q_head)]).collect(),
            logit_factor: self.operands.logit_factor(&scales),
            value_factor: self.operands.undo(scales.v) as f32,
            scales,
            soft_cap: call.soft_cap.map(|cap| cap as f32),
            offsets: offsets.filter(|_| absolute),
            sinks,
            d_out_m,
            precision,
            products: self.how.products,
            visible,
            delta,
            query_rows: self.factor(Rows { values: queries.values.clone(), ..queries }),
            queries: queries.values,
            d_out,
            seen,
            dq: &mut head.dq[(member * sequence.q.len() + first) * stride..][..count * stride],
            dk: &mut head.dk,
            dv: &mut head.dv,
            d_sink: &mut head.d_sinks[member],
            ds_sums: &mut head.ds_sums[member * sequence.q.len() + first..][..count],
        };
        pulp::Arch::new().dispatch(kernel);
        Ok(())
    }
}

impl GradientProducts {
    #[inline(always)]
    fn round(self, x: &mut [f32]) {
        if self != Self::F32 {
            lanes::round_bf16(x);
        }
    }

    fn fp8(self) -> Option<Fp8Products> {
        if let Self::Fp8(products) = self { Some(products) } else { None }
    }

    /// Rows of dO as dP and delta take them.
    fn seen(self, d_out: &[f32], stride: usize) -> Seen {
        let (mut rows, mut scales) = (d_out.to_vec(), vec![1.0; d_out.len() / stride]);
        if self.fp8().is_some_and(|products| products.dp) {
            for (row, scale) in rows.chunks_exact_mut(stride).zip(&mut scales) {
                *scale = row_scale(norm(row));
                row.iter_mut().for_each(|x| *x = fp8::round_e4m3(*x * *scale, true));
            }
        }
        Seen { rows, scales }
    }
}

/// Rows of dO times their scales: E4M3 codes where dP is in FP8, else as they are.
struct Seen {
    rows: Vec<f32>,
    scales: Vec<f32>,
}

fn norm(row: &[f32]) -> f32 {
    lanes::dot(row, row).sqrt()
}

/// The largest power of two by which what `bound` bounds stays within E4M3.
fn row_scale(bound: f32) -> f32 {
    // Powers of two past 2^99 and a row without a gradient are no matter.
    let ratio = 448.0 / bound.max(1e-30);
    f32::from_bits(ratio.to_bits() & 0x7f80_0000)
}

/// One tile of queries against all its keys, compiled once for each vector width.
struct Kernel<'a> {
    stride: usize,
    stride_v: usize,
    packed: &'a Packed,
    lse: Vec<f32>,
    logit_factor: f32,
    value_factor: f32,
    scales: HeadScales,
    soft_cap: Option<f32>,
    /// `tau q . c` of each row, where the forward had it in its logits.
    offsets: Option<Vec<f32>>,
    /// The sink beside the forward's logits, of each row.
    sinks: Option<Vec<f32>>,
    /// dO . m of each row.
    d_out_m: Option<Vec<f32>>,
    precision: &'a Precision,
    products: GradientProducts,
    visible: Vec<Range<usize>>,
    /// `None`: from P and dP.
    delta: Option<Vec<f32>>,
    /// As the forward multiplied them, and as the gradients' products do.
    queries: Vec<f32>,
    query_rows: Factor,
    /// dO as dV takes it, and as dP does.
    d_out: Factor,
    seen: Seen,
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    d_sink: &'a mut f64,
    ds_sums: &'a mut [f32],
}

/// A tile of queries by keys, `(TILE, TILE)`.
type Square = [f32; TILE * TILE];

/// One tile of keys.
struct Block {
    tile: usize,
    /// Keys that each row sees.
    spans: [(usize, usize); TILE],
    p: Box<Square>,
    /// dP, then dS.
    ds: Box<Square>,
    /// The slope of the soft-cap, where there is one.
    slope: Option<Box<Square>>,
}

impl NullaryFnOnce for Kernel<'_> {
    type Output = ();

    #[inline(always)]
    fn call(mut self) {
        let seen = self.visible.iter().filter(|keys| !keys.is_empty());
        let Some(keys) = seen.cloned().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { return };
        let tiles = keys.start / TILE..keys.end.div_ceil(TILE);
        let mut blocks: Vec<Block> = tiles.map(|tile| self.block(tile, &keys)).collect();
        let delta = self.delta.take().unwrap_or_else(|| {
            let row = |row: usize| {
                let of = |block: &Block| {
                    let (from, to) = block.spans[row];
                    let span = row * TILE + from.min(to)..row * TILE + to;
                    lanes::dot(&block.p[span.clone()], &block.ds[span])
                };
                let keys: f32 = blocks.iter().map(of).sum();
                // The sink's column, whose value is -m next to v - m.
                keys - self
                    .sink_share(row)
                    .zip(self.d_out_m.as_ref())
                    .map_or(0.0, |(share, d_out_m)| share * d_out_m[row])
            };
            (0..self.visible.len()).map(row).collect()
        });
        for row in (0..delta.len()).filter(|row| !self.visible[*row].is_empty()) {
            if let Some(share) = self.sink_share(row) {
                let own = delta[row] + self.d_out_m.as_ref().map_or(0.0, |d_out_m| d_out_m[row]);
                *self.d_sink -= f64::from(share * own);
                // What the row's dS sum to; summed up, they would bring delta's whole error along c.
                self.ds_sums[row] = share * own;
            }
        }
        for block in &mut blocks {
            for (row, &(from, to)) in block.spans.iter().enumerate().take(delta.len()) {
                for at in (from..to).map(|j| row * TILE + j) {
                    let slope = block.slope.as_ref().map_or(1.0, |slope| slope[at]);
                    block.ds[at] = block.p[at] * (block.ds[at] - delta[row]) * slope;
                }
            }
        }
        if self.soft_cap.is_some() {
            for (row, sum) in self.ds_sums.iter_mut().enumerate() {
                let of = |block: &Block| block.ds[row * TILE..(row + 1) * TILE].iter().sum::<f32>();
                *sum = blocks.iter().map(of).sum();
            }
        }
        self.add_queries(&blocks);
        for block in &mut blocks {
            self.products.round(&mut block.p[..]);
            self.products.round(&mut block.ds[..]);
            self.add(block);
        }
    }
}

impl Kernel<'_> {
    /// P of a row's sink.
    #[inline(always)]
    fn sink_share(&self, row: usize) -> Option<f32> {
        Some(lanes::exp(self.sinks.as_ref()?[row] - self.lse[row]))
    }

    /// P and dP of one tile of keys; zeros where a row does not see a key.
    #[inline(always)]
    fn block<'s>(&'s self, tile: usize, keys: &Range<usize>) -> Block {
        let base = tile * TILE;
        let (rows, columns) = (self.visible.len(), TILE.min(keys.end - base));
        let square = || -> Box<Square> { Box::new([0.0; TILE * TILE]) };
        let (mut p, mut dp) = (square(), square());
        let tile_of = |x: &'s [f32], stride: usize| &x[tile * stride * TILE..(tile + 1) * stride * TILE];
        let tile_keys = tile_of(&self.packed.keys, self.stride);
        let tile_values = tile_of(&self.packed.values, self.stride_v);
        match self.precision.qk_accumulator {
            QkAccumulator::F32 => lanes::logits(&self.queries, tile_keys, self.stride, rows, columns, &mut p[..]),
            QkAccumulator::Fp8 => {
                accumulator::FP8.logits(&self.queries, tile_keys, self.stride, rows, columns, &mut p[..]);
            }
        }
        match self.products.fp8() {
            Some(products) if products.dp => {
                accumulator::FP8.logits(&self.seen.rows, tile_values, self.stride_v, rows, columns, &mut dp[..]);
            }
            _ => lanes::logits(&self.seen.rows, tile_values, self.stride_v, rows, columns, &mut dp[..]),
        }
        let mut slope = self.soft_cap.map(|_| square());
        let mut spans = [(TILE, 0); TILE];
        for (row, visible) in self.visible.iter().enumerate() {
            let from = visible.start.max(base) - base;
            let to = visible.end.min(base + TILE).saturating_sub(base);
            let row_of = row * TILE..(row + 1) * TILE;
            let (p, dp) = (&mut p[row_of.clone()], &mut dp[row_of.clone()]);
            if from >= to {
                p.fill(0.0);
                dp.fill(0.0);
                continue;
            }
            spans[row] = (from, to);
            for unseen in [0..from, to..TILE] {
                p[unseen.clone()].fill(0.0);
                dp[unseen].fill(0.0);
            }
            self.probabilities(row, &mut p[from..to], slope.as_mut().map(|slope| &mut slope[row_of][from..to]));
            let factor = self.value_factor / self.seen.scales[row];
            dp[from..to].iter_mut().for_each(|dp| *dp *= factor);
        }
        Block { tile, spans, p, ds: dp, slope }
    }

    /// Products of the operands to P, as the forward does it.
    #[inline(always)]
    fn probabilities(&self, row: usize, s: &mut [f32], slope: Option<&mut [f32]>) {
        for s in s.iter_mut() {
            *s *= self.logit_factor;
        }
        if let Some(offsets) = &self.offsets {
            s.iter_mut().for_each(|s| *s += offsets[row]);
        }
        if let (Some(cap), Some(slope)) = (self.soft_cap, slope) {
            for (s, slope) in s.iter_mut().zip(slope) {
                let t = (*s / cap).tanh();
                *slope = 1.0 - t * t;
                *s = cap * t;
            }
        }
        if let (Some(descale), LogitCast::E4m3) = (self.scales.logit, self.precision.logits) {
            let saturate = self.precision.on_overflow == OnOverflow::Saturate;
            for s in s.iter_mut() {
                *s = fp8::round_e4m3(*s * descale.quant_scale().get(), saturate) * descale.get();
            }
        }
        for s in s.iter_mut() {
            *s = lanes::exp(*s - self.lse[row]);
        }
    }

    /// dQ of all keys.
    #[inline(always)]
    fn add_queries(&mut self, blocks: &[Block]) {
        let (rows, stride) = (self.visible.len(), self.stride);
        let Some(products) = self.products.fp8().filter(|products| products.dq) else {
            for block in blocks {
                let mut ds = block.ds.clone();
                self.products.round(&mut ds[..]);
                let spans = &block.spans[..rows];
                add_product(&ds[..], spans, &self.packed.key_rows, block.tile * TILE * stride, stride, self.dq);
            }
            return;
        };
        let bound = products.value_slack.max(1) as f32 * self.packed.value_norm;
        let scales: Vec<f32> = (0..rows)
            .map(|row| {
                let largest = |block: &Block| lanes::max(&block.p[row * TILE..(row + 1) * TILE]);
                let p = blocks.iter().map(largest).fold(0.0, f32::max);
                let d_out = norm(&self.seen.rows[row * self.stride_v..][..self.stride_v]) / self.seen.scales[row];
                row_scale((2.0 * p.min(1.0 - p).min(0.25) + p / 256.0) * d_out * bound)
            })
            .collect();
        let mut sums = vec![0.0; rows * stride];
        for (place, block) in blocks.iter().enumerate() {
            let mut codes = block.ds.clone();
            for (row, scale) in scales.iter().enumerate() {
                let (from, to) = block.spans[row];
                for ds in &mut codes[row * TILE + from.min(to)..row * TILE + to] {
                    *ds = fp8::round_e4m3(*ds / self.value_factor * scale, true);
                }
                let keys = &self.packed.key_rows.rows.values[block.tile * TILE * stride..];
                accumulator::FP8.values(&codes[..], keys, stride, (row, 1), (from.min(to), to), &mut sums);
            }
            // The kernel's blocks have 128 keys.
            if block.tile % 2 == 1 || place + 1 == blocks.len() {
                for ((dq, sum), scale) in
                    self.dq.chunks_exact_mut(stride).zip(sums.chunks_exact_mut(stride)).zip(&scales)
                {
                    for (dq, sum) in dq.iter_mut().zip(sum) {
                        *dq += std::mem::take(sum) / scale * self.value_factor;
                    }
                }
            }
        }
    }

    /// dK and dV of one tile of keys.
    #[inline(always)]
    fn add(&mut self, block: &Block) {
        let rows = self.visible.len();
        let (at, at_v) = (block.tile * TILE * self.stride, block.tile * TILE * self.stride_v);
        let spans = &block.spans[..rows];
        // Rows that see a key are neighbors, since both ends of what a row sees grow.
        let mut columns = [(TILE, 0); TILE];
        for (row, &(from, to)) in spans.iter().enumerate() {
            for column in &mut columns[from.min(to)..to] {
                *column = (column.0.min(row), row + 1);
            }
        }
        let keys = TILE.min(self.dk.len() / self.stride - block.tile * TILE);
        let columns = &columns[..keys];
        let mut turned = [0.0; TILE * TILE];
        transpose(&block.ds, &mut turned);
        add_product(&turned, columns, &self.query_rows, 0, self.stride, &mut self.dk[at..]);
        transpose(&block.p, &mut turned);
        add_product(&turned, columns, &self.d_out, 0, self.stride_v, &mut self.dv[at_v..]);
    }
}

#[inline(always)]
fn transpose(from: &Square, to: &mut Square) {
    for row in 0..TILE {
        for column in 0..TILE {
            to[column * TILE + row] = from[row * TILE + column];
        }
    }
}

/// `out += weights x` for rows of `x` from `at` on. Row `i` of the weights has `spans[i]`, and zeros beside it; next to NaN
/// or infinity each row goes alone, and over its span only.
#[inline(always)]
fn add_product(weights: &[f32], spans: &[(usize, usize)], x: &Factor, at: usize, stride: usize, out: &mut [f32]) {
    let block = if x.finite { 4 } else { 1 };
    for (place, spans) in spans.chunks(block).enumerate() {
        let from = spans.iter().fold(TILE, |a, s| a.min(s.0));
        let to = spans.iter().fold(0, |a, s| a.max(s.1));
        lanes::values(weights, &x.rows.values[at..], stride, (place * block, spans.len()), (from, to), out);
    }
}
