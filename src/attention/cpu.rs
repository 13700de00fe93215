//! The CPU backend: tiles of 64 queries by 64 keys, online softmax, f32 arithmetic.
//!
//! ```text
//! for each key tile:   S = tau dq dk (Q8 K8^T)         soft-cap, statistics, cast of the logits
//!                      m' = max(m, row max of S)       a = exp(m - m')
//!                      P = exp(S - m')                 l = a l + row sum of P
//!                      O = a O + e4m3(256 P) V8
//! out = O dv / (256 l)     lse = m + ln l
//! ```
//!
//! A GPU backend differs from this in the order of its sums and in the last bits of `exp`, nowhere else. Results depend
//! neither on the number of threads nor on the CPU (`tanh` and `ln` are the platform's).

use super::backend::{Attention, AttentionOutput, check};
use super::call::{AttentionCall, Inputs};
use super::lanes::{self, LANES, TILE};
use super::precision::{Cast, LogitCast, P_SCALE, Precision, Probabilities};
use super::shift::Shift;
use crate::error::Result;
use crate::fp8::{self, Counts, Format, OnOverflow};
use crate::plan::ScalePlan;
use crate::scale::Descale;
use crate::stats::{LogitStats, StepStats};
use half::bf16;
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use std::ops::Range;

/// Tiled attention on the CPU, over rayon's current thread pool.
///
/// ```
/// use sigmascale::Descale;
/// use sigmascale::attention::{Attention, AttentionCall, AttentionShape, Cpu, Inputs, Precision};
/// use sigmascale::plan::{OperandDescales, ScalePlan};
///
/// let shape = AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 3, len_k: 3, d_head: 16 };
/// let (q, k, v) = (vec![0.5; 96], vec![1.0; 48], vec![2.0; 48]);
/// let one = vec![Descale::ONE];
/// let operands = OperandDescales { q: one.clone(), k: one.clone(), v: Some(one.clone()), o: Some(one) };
/// let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: vec![Descale::ONE; 2], operands };
/// let inputs = Inputs { q: &q, k: &k, v: &v };
/// let output = Cpu.forward(&AttentionCall::causal(shape), &inputs, &plan, &Precision::KERNEL)?;
/// assert_eq!(output.out[0], 2.0);
/// assert_eq!(output.stats.logits[0].max, 2.0);
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Attention for Cpu {
    fn forward(
        &self,
        call: &AttentionCall,
        inputs: &Inputs<'_>,
        plan: &ScalePlan,
        precision: &Precision,
    ) -> Result<AttentionOutput> {
        Ok(forward(call, inputs, plan, precision, Shift::RowMaximum)?.0)
    }
}

/// The statistics of a step without a plan: amax of q, k and v, extremes of the f32 logits of the unrounded operands.
///
/// This is the extra pass that a `current` policy pays for. Overflow counts are zero, and `o` has no values.
///
/// # Errors
/// If the call or an operand's length breaks its rule.
pub fn measure(call: &AttentionCall, inputs: &Inputs<'_>) -> Result<StepStats> {
    call.check()?;
    inputs.check(&call.shape)?;
    let engine = Engine { call, inputs, plan: None, precision: &Precision::F32, shift: None };
    Ok(engine.run()?.0.stats)
}

/// Forward with a choice of the softmax's shift; also the number of repeated maxima per query head.
pub(super) fn forward(
    call: &AttentionCall,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    precision: &Precision,
    shift: Shift,
) -> Result<(AttentionOutput, Vec<u64>)> {
    check(call, inputs, plan)?;
    Engine { call, inputs, plan: Some(plan), precision, shift: Some(shift) }.run()
}

/// Scales of one query head and its KV head.
struct HeadScales {
    q: Option<Descale>,
    k: Option<Descale>,
    v: Option<Descale>,
    o: Option<Descale>,
    logit: Option<Descale>,
}

/// Keys and values of one KV head, cast and laid out for the inner loops.
struct Packed {
    /// `(tiles, stride, TILE)`: each tile of 64 keys transposed.
    keys: Vec<f32>,
    /// `(len_k, stride)`.
    values: Vec<f32>,
    /// No value is NaN or infinite, so that `0 * v = 0`.
    clean: bool,
    k: Counts,
    v: Counts,
}

/// What one tile of queries of one head contributes.
struct Tile {
    out: Vec<f32>,
    lse: Vec<f32>,
    logits: LogitStats,
    q: Counts,
    o: Counts,
    repeated: u64,
}

struct Engine<'a> {
    call: &'a AttentionCall,
    inputs: &'a Inputs<'a>,
    plan: Option<&'a ScalePlan>,
    precision: &'a Precision,
    /// `None` measures logits and computes nothing after them.
    shift: Option<Shift>,
}

impl Engine<'_> {
    fn run(&self) -> Result<(AttentionOutput, Vec<u64>)> {
        let shape = self.call.shape;
        let (n_q, n_kv) = (shape.n_q_heads, shape.n_kv_heads);
        let packed: Vec<Packed> =
            (0..shape.batch * n_kv).into_par_iter().map(|at| self.pack(at / n_kv, at % n_kv)).collect::<Result<_>>()?;
        let tiles_per_head = shape.len_q.div_ceil(TILE);
        let place = |at: usize| (at / tiles_per_head / n_q, at / tiles_per_head % n_q, at % tiles_per_head * TILE);
        let tiles: Vec<Tile> = (0..shape.batch * n_q * tiles_per_head)
            .into_par_iter()
            .map(|at| {
                let (batch, head, first) = place(at);
                self.tile(&packed[batch * n_kv + shape.kv_head(head)], batch, head, first)
            })
            .collect::<Result<_>>()?;

        let computes = self.shift.is_some();
        let mut out = vec![0.0; if computes { shape.q_elements() } else { 0 }];
        let mut lse = vec![0.0; if computes { shape.lse_elements() } else { 0 }];
        let mut totals = vec![(Counts::default(), Counts::default(), LogitStats::default(), 0); n_q];
        for (at, tile) in tiles.iter().enumerate() {
            let (batch, head, first) = place(at);
            for (row, values) in tile.out.chunks_exact(shape.d_head).enumerate() {
                out[shape.q_row(batch, first + row, head)..][..shape.d_head].copy_from_slice(values);
            }
            if computes {
                lse[shape.lse_at(batch, head, first)..][..tile.lse.len()].copy_from_slice(&tile.lse);
            }
            let (q, o, logits, repeated) = &mut totals[head];
            *q += tile.q;
            *o += tile.o;
            *repeated += tile.repeated;
            merge(logits, &tile.logits);
        }
        let mut kv = vec![(Counts::default(), Counts::default()); n_kv];
        for (at, head) in packed.iter().enumerate() {
            kv[at % n_kv].0 += head.k;
            kv[at % n_kv].1 += head.v;
        }
        let stats = StepStats {
            logits: totals.iter().map(|t| t.2).collect(),
            q: totals.iter().map(|t| t.0.into()).collect(),
            k: kv.iter().map(|t| t.0.into()).collect(),
            v: kv.iter().map(|t| t.1.into()).collect(),
            o: totals.iter().map(|t| t.1.into()).collect(),
        };
        Ok((AttentionOutput { out, lse, stats }, totals.iter().map(|t| t.3).collect()))
    }

    /// Row length in the inner loops: `d_head` padded with zeros.
    fn stride(&self) -> usize {
        self.call.shape.d_head.next_multiple_of(LANES)
    }

    fn scales(&self, head: usize) -> HeadScales {
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

    /// Copies a row, through E4M3 if that is asked for; counts in either case.
    fn take(&self, row: &[f32], descale: Option<Descale>, out: &mut [f32]) -> Result<Counts> {
        if let (Some(descale), Cast::E4m3) = (descale, self.precision.operands) {
            return Format::E4m3.round_slice(row, descale.quant_scale().get(), self.precision.on_overflow, out);
        }
        out.copy_from_slice(row);
        count(row, descale)
    }

    /// The multiplier that undoes the cast of [`Engine::take`].
    fn undo(&self, descale: Option<Descale>) -> f64 {
        match (descale, self.precision.operands) {
            (Some(descale), Cast::E4m3) => f64::from(descale.get()),
            _ => 1.0,
        }
    }

    fn pack(&self, batch: usize, head: usize) -> Result<Packed> {
        let shape = &self.call.shape;
        let (d, stride) = (shape.d_head, self.stride());
        let scales = self.scales(head * (shape.n_q_heads / shape.n_kv_heads));
        let mut keys = vec![0.0; shape.len_k.div_ceil(TILE) * stride * TILE];
        let mut values = vec![0.0; shape.len_k * stride];
        let (mut k, mut v) = (Counts::default(), Counts::default());
        let mut buffer = vec![0.0; d];
        let mut clean = true;
        for row in 0..shape.len_k {
            let at = shape.kv_row(batch, row, head);
            k += self.take(&self.inputs.k[at..at + d], scales.k, &mut buffer)?;
            let tile = &mut keys[row / TILE * stride * TILE..];
            for (c, &x) in buffer.iter().enumerate() {
                tile[c * TILE + row % TILE] = x;
            }
            let to = &mut values[row * stride..][..d];
            v += self.take(&self.inputs.v[at..at + d], scales.v, to)?;
            clean &= lanes::non_finite(to) == 0;
        }
        Ok(Packed { keys, values, clean, k, v })
    }

    fn tile(&self, packed: &Packed, batch: usize, head: usize, first: usize) -> Result<Tile> {
        let shape = &self.call.shape;
        let (d, stride) = (shape.d_head, self.stride());
        let rows = TILE.min(shape.len_q - first);
        let scales = self.scales(head);
        let mut queries = vec![0.0; rows * stride];
        let mut q = Counts::default();
        for row in 0..rows {
            let at = shape.q_row(batch, first + row, head);
            q += self.take(&self.inputs.q[at..at + d], scales.q, &mut queries[row * stride..][..d])?;
        }
        let factor = self.call.softmax_scale * self.undo(scales.q) * self.undo(scales.k);
        let mut state = State {
            out: vec![0.0; rows * stride],
            max: [f32::NEG_INFINITY; TILE],
            sum: [0.0; TILE],
            logits: LogitStats::default(),
            repeated: 0,
        };
        let kernel = Kernel {
            queries: &queries,
            packed,
            stride,
            visible: (first..first + rows).map(|row| self.call.visible(row)).collect(),
            factor: factor as f32,
            soft_cap: self.call.soft_cap.map(|cap| cap as f32),
            logit: scales.logit,
            precision: self.precision,
            shift: self.shift,
            state: &mut state,
        };
        pulp::Arch::new().dispatch(kernel);

        let mut tile = Tile {
            out: Vec::new(),
            lse: Vec::new(),
            logits: state.logits,
            q,
            o: Counts::default(),
            repeated: state.repeated,
        };
        if self.shift.is_some() {
            let p_scale = if self.precision.probabilities == Probabilities::E4m3 { P_SCALE } else { 1.0 };
            let undo = self.undo(scales.v) as f32 / p_scale;
            for row in 0..rows {
                let from = tile.out.len();
                let sum = state.sum[row];
                // A row that saw no key has an empty sum and stays zero.
                let factor = if sum == 0.0 { 0.0 } else { undo / sum };
                tile.out.extend(state.out[row * stride..][..d].iter().map(|x| x * factor));
                tile.lse.push(state.max[row] + sum.ln());
                tile.o += count(&tile.out[from..], scales.o)?;
            }
            if let (Some(descale), Cast::E4m3) = (scales.o, self.precision.output) {
                let saturate = self.precision.on_overflow;
                for x in &mut tile.out {
                    *x = Format::E4m3.round(*x * descale.quant_scale().get(), saturate) * descale.get();
                }
            }
        }
        Ok(tile)
    }
}

/// Counts against a descale; without one nothing overflows.
fn count(x: &[f32], descale: Option<Descale>) -> Result<Counts> {
    match descale {
        Some(descale) => Format::E4m3.count_slice(x, descale.quant_scale().get()),
        None => Ok(Counts { overflow: 0, beyond_rounding: 0, ..Format::E4m3.count_slice(x, 1.0)? }),
    }
}

fn merge(into: &mut LogitStats, from: &LogitStats) {
    into.max = into.max.max(from.max);
    into.min = into.min.min(from.min);
    into.overflow += from.overflow;
    into.beyond_rounding += from.beyond_rounding;
    into.non_finite += from.non_finite;
    into.count += from.count;
}

/// The online softmax of one tile of rows.
struct State {
    /// Sum of P times V, `(rows, stride)`.
    out: Vec<f32>,
    /// Shift of each row, m.
    max: [f32; TILE],
    /// Sum of each row's P, l.
    sum: [f32; TILE],
    logits: LogitStats,
    repeated: u64,
}

/// All key tiles of one tile of rows, compiled once for each vector width.
struct Kernel<'a> {
    queries: &'a [f32],
    packed: &'a Packed,
    stride: usize,
    /// Keys that each row sees.
    visible: Vec<Range<usize>>,
    /// tau times the descales of q and k.
    factor: f32,
    soft_cap: Option<f32>,
    logit: Option<Descale>,
    precision: &'a Precision,
    shift: Option<Shift>,
    state: &'a mut State,
}

impl NullaryFnOnce for Kernel<'_> {
    type Output = ();

    #[inline(always)]
    fn call(mut self) {
        let seen = self.visible.iter().filter(|keys| !keys.is_empty());
        let Some(keys) = seen.cloned().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { return };
        let rows = self.visible.len();
        let mut s = [0f32; TILE * TILE];
        for tile in keys.start / TILE..keys.end.div_ceil(TILE) {
            let base = tile * TILE;
            let columns = TILE.min(keys.end - base);
            let tile_keys = &self.packed.keys[tile * self.stride * TILE..][..self.stride * TILE];
            lanes::logits(self.queries, tile_keys, self.stride, rows, columns, &mut s);
            // Keys of this tile that each row sees.
            let mut spans = [(TILE, 0); TILE];
            for (row, s) in s.chunks_exact_mut(TILE).take(rows).enumerate() {
                let from = self.visible[row].start.max(base) - base;
                let to = self.visible[row].end.min(base + TILE).saturating_sub(base);
                if from >= to {
                    s.fill(0.0);
                    continue;
                }
                spans[row] = (from, to);
                self.logits(&mut s[from..to]);
                if let Some(shift) = self.shift {
                    self.softmax(row, &mut s[from..to], shift);
                    s[..from].fill(0.0);
                    s[to..].fill(0.0);
                }
            }
            if self.shift.is_none() {
                continue;
            }
            let v = &self.packed.values[base * self.stride..];
            // Rows go in blocks, whose invisible keys have P = 0; next to NaN or infinity each row goes alone.
            let block = if self.packed.clean { 4 } else { 1 };
            for first in (0..rows).step_by(block) {
                let count = block.min(rows - first);
                let span = &spans[first..first + count];
                let from = span.iter().fold(TILE, |a, s| a.min(s.0));
                let to = span.iter().fold(0, |a, s| a.max(s.1));
                lanes::values(&s, v, self.stride, (first, count), (from, to), &mut self.state.out);
            }
        }
    }
}

impl Kernel<'_> {
    /// Products to logits: factor, soft-cap, statistics, cast.
    #[inline(always)]
    fn logits(&mut self, s: &mut [f32]) {
        let stats = &mut self.state.logits;
        for s in s.iter_mut() {
            *s *= self.factor;
        }
        stats.count += s.len() as u64;
        stats.non_finite += lanes::non_finite(s);
        if let Some(cap) = self.soft_cap {
            for s in s.iter_mut() {
                *s = cap * (*s / cap).tanh();
            }
        }
        let (max, min) = (lanes::max(s), lanes::min(s));
        stats.max = stats.max.max(max);
        stats.min = stats.min.min(min);
        let Some(descale) = self.logit else { return };
        if self.precision.logits == LogitCast::F32 {
            return;
        }
        let scale = descale.quant_scale().get();
        if max * scale > fp8::E4M3_MAX || min * scale < -fp8::E4M3_MAX {
            for &s in s.iter().filter(|s| s.is_finite()) {
                stats.overflow += u64::from((s * scale).abs() > fp8::E4M3_MAX);
                stats.beyond_rounding += u64::from((s * scale).abs() > fp8::E4M3_LAST_ROUNDING);
            }
        }
        if self.precision.logits == LogitCast::E4m3 {
            let saturate = self.precision.on_overflow == OnOverflow::Saturate;
            for s in s.iter_mut() {
                *s = fp8::round_e4m3(*s * scale, saturate) * descale.get();
            }
        }
    }

    /// Logits to P, with the row's sums brought to the new shift.
    #[inline(always)]
    fn softmax(&mut self, row: usize, s: &mut [f32], shift: Shift) {
        let state = &mut *self.state;
        let (candidate, repeated) = shift.of(s, lanes::max(s));
        state.repeated += u64::from(repeated);
        let old = state.max[row];
        let new = if candidate > old { candidate } else { old };
        let rescale = lanes::exp(old - new);
        if new > old {
            for out in &mut state.out[row * self.stride..][..self.stride] {
                *out *= rescale;
            }
        }
        for s in s.iter_mut() {
            *s = lanes::exp(*s - new);
        }
        state.max[row] = new;
        state.sum[row] = state.sum[row] * rescale + lanes::sum(s);
        match self.precision.probabilities {
            Probabilities::F32 => {}
            Probabilities::Bf16 => s.iter_mut().for_each(|p| *p = bf16::from_f32(*p).to_f32()),
            Probabilities::E4m3 => s.iter_mut().for_each(|p| *p = fp8::round_e4m3(*p * P_SCALE, true)),
        }
    }
}
