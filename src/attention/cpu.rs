//! The CPU backend: tiles of 64 queries by 64 keys, online softmax, f32 arithmetic.
//!
//! ```text
//! for each key tile:   S = tau dq dk (Q8 K8^T)         soft-cap, statistics, cast of the logits
//!                      m' = max(m, row max of S)       a = exp(m - m')
//!                      P = exp(S - m')                 l = a l + row sum of P
//!                      O = a O + e4m3(256 P) V8
//! l = l + exp(sink - m)    out = O dv / (256 l)         lse = m + ln l
//! ```
//!
//! The sink joins the row sum at the end, so that P is relative to the largest logit of a key and keeps E4M3's range
//! whatever the sink is. Where the sink is larger than m, all three are brought to it first.
//!
//! With an accumulator of Hopper ([`QkAccumulator`], [`PvAccumulator`]) the products Q8 K8^T and P V8 are summed as its
//! instructions do, and with a second level O is the sum of two accumulators: every `promote_every` keys the narrow one is
//! added to the f32 one and starts again at zero.
//!
//! A GPU backend differs from this in the order of its sums, in the size of its tiles, to whose running maximum P is
//! relative, and in the last bits of `exp`, nowhere else. Results depend neither on the number of threads nor on the CPU
//! (`tanh` and `ln` are the platform's).

use super::accumulator;
use super::backend::{Attention, AttentionOutput, CenteredOutput, check};
use super::call::{AttentionCall, Inputs};
use super::lanes::{self, TILE};
use super::operands::{Operands, Rows, count};
use super::precision::{Cast, LogitCast, P_SCALE, Precision, Probabilities, PvAccumulator, QkAccumulator};
use super::sequences::Sequence;
use super::shift::Shift;
use super::stochastic;
use crate::error::Result;
use crate::fp8::{self, Counts, OnOverflow};
use crate::plan::ScalePlan;
use crate::scale::Descale;
use crate::stats::{KvSums, LogitStats, StepStats};
use half::f16;
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
/// let shape = AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 3, len_k: 3, d_head: 16, d_v: 16 };
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
        call: &AttentionCall<'_>,
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
pub fn measure(call: &AttentionCall<'_>, inputs: &Inputs<'_>) -> Result<StepStats> {
    call.check()?;
    inputs.check(&call.shape)?;
    let operands = Operands { call, inputs, plan: None, precision: &Precision::F32 };
    Ok(Engine { operands, shift: None }.run()?.0.stats)
}

/// Forward with a choice of the softmax's shift; also the number of repeated maxima per query head.
pub(super) fn forward(
    call: &AttentionCall<'_>,
    inputs: &Inputs<'_>,
    plan: &ScalePlan,
    precision: &Precision,
    shift: Shift,
) -> Result<(AttentionOutput, Vec<u64>)> {
    check(call, inputs, plan)?;
    precision.check(plan)?;
    Engine { operands: Operands { call, inputs, plan: Some(plan), precision }, shift: Some(shift) }.run()
}

/// Keys and values of one KV head of one sequence, cast and laid out for the inner loops.
struct Packed {
    /// `(tiles, stride, TILE)`: each tile of 64 keys transposed.
    keys: Vec<f32>,
    k: Counts,
    v: Rows,
    /// No value is NaN or infinite.
    clean: bool,
}

/// Where one tile of queries lies.
struct Place {
    sequence: usize,
    head: usize,
    /// First query, counted from the sequence's.
    first: usize,
    /// Its row in the batch.
    row: usize,
}

/// What one tile of queries of one head contributes.
struct Tile {
    out: Vec<f32>,
    lse: Vec<f32>,
    /// The same for the backward pass, with centers.
    centered_out: Vec<f32>,
    centered_lse: Vec<f32>,
    logits: LogitStats,
    q: Counts,
    o: Counts,
    repeated: u64,
}

struct Engine<'a> {
    operands: Operands<'a>,
    /// `None` measures logits and computes nothing after them.
    shift: Option<Shift>,
}

impl Engine<'_> {
    fn run(&self) -> Result<(AttentionOutput, Vec<u64>)> {
        let call = self.operands.call;
        let shape = call.shape;
        let (n_q, n_kv) = (shape.n_q_heads, shape.n_kv_heads);
        let sequences = call.all_sequences();
        let packed: Vec<Packed> = (0..sequences.len() * n_kv)
            .into_par_iter()
            .map(|at| self.pack(&sequences[at / n_kv], at % n_kv))
            .collect::<Result<_>>()?;
        let mut places = Vec::new();
        for (i, sequence) in sequences.iter().enumerate() {
            for head in 0..n_q {
                let tiles = (0..sequence.q.len()).step_by(TILE);
                places.extend(tiles.map(|first| Place { sequence: i, head, first, row: sequence.q.start + first }));
            }
        }
        let tiles: Vec<Tile> = places
            .par_iter()
            .map(|place| {
                let packed = &packed[place.sequence * n_kv + shape.kv_head(place.head)];
                self.tile(packed, &sequences[place.sequence], place)
            })
            .collect::<Result<_>>()?;

        let computes = self.shift.is_some();
        let mut out = vec![0.0; if computes { shape.out_elements() } else { 0 }];
        let mut lse = vec![f32::NEG_INFINITY; if computes { shape.lse_elements() } else { 0 }];
        let mut centered =
            call.center.filter(|_| computes).map(|_| CenteredOutput { out: out.clone(), lse: lse.clone() });
        let mut totals = vec![(Counts::default(), Counts::default(), LogitStats::default(), 0); n_q];
        for (place, tile) in places.iter().zip(&tiles) {
            for (row, values) in tile.out.chunks_exact(shape.d_v).enumerate() {
                out[shape.out_at(place.row + row, place.head)..][..shape.d_v].copy_from_slice(values);
            }
            for (row, value) in tile.lse.iter().enumerate() {
                lse[shape.lse_at(place.row + row, place.head)] = *value;
            }
            if let Some(centered) = &mut centered {
                for (row, values) in tile.centered_out.chunks_exact(shape.d_v).enumerate() {
                    centered.out[shape.out_at(place.row + row, place.head)..][..shape.d_v].copy_from_slice(values);
                }
                for (row, value) in tile.centered_lse.iter().enumerate() {
                    centered.lse[shape.lse_at(place.row + row, place.head)] = *value;
                }
            }
            let (q, o, logits, repeated) = &mut totals[place.head];
            *q += tile.q;
            *o += tile.o;
            *repeated += tile.repeated;
            merge(logits, &tile.logits);
        }
        let mut kv = vec![(Counts::default(), Counts::default()); n_kv];
        for (at, head) in packed.iter().enumerate() {
            kv[at % n_kv].0 += head.k;
            kv[at % n_kv].1 += head.v.counts;
        }
        let stats = StepStats {
            logits: totals.iter().map(|t| t.2).collect(),
            q: totals.iter().map(|t| t.0.into()).collect(),
            k: kv.iter().map(|t| t.0.into()).collect(),
            v: kv.iter().map(|t| t.1.into()).collect(),
            o: totals.iter().map(|t| t.1.into()).collect(),
        };
        let sums = Some(self.sums(&sequences));
        Ok((AttentionOutput { out, lse, centered, sums, stats }, totals.iter().map(|t| t.3).collect()))
    }

    /// Sums of k and v over the rows of sequences.
    fn sums(&self, sequences: &[Sequence]) -> KvSums {
        let (shape, inputs) = (self.operands.call.shape, self.operands.inputs);
        let rows = || sequences.iter().flat_map(|sequence| sequence.k.clone());
        let sum = |x: &[f32], d: usize, start: &dyn Fn(usize) -> usize| {
            let mut sum = vec![0.0; d];
            for row in rows() {
                sum.iter_mut().zip(&x[start(row)..]).for_each(|(sum, x)| *sum += f64::from(*x));
            }
            sum
        };
        let heads = 0..shape.n_kv_heads;
        KvSums {
            tokens: rows().count() as u64,
            k: heads.clone().map(|head| sum(inputs.k, shape.d_head, &|row| shape.k_at(row, head))).collect(),
            v: heads.map(|head| sum(inputs.v, shape.d_v, &|row| shape.v_at(row, head))).collect(),
        }
    }

    fn pack(&self, sequence: &Sequence, kv_head: usize) -> Result<Packed> {
        let k = self.operands.keys(kv_head, sequence.k.clone())?;
        let v = self.operands.values(kv_head, sequence.k.clone())?;
        let keys = k.transposed(self.operands.stride());
        Ok(Packed { keys, k: k.counts, clean: v.finite(), v })
    }

    fn tile(&self, packed: &Packed, sequence: &Sequence, place: &Place) -> Result<Tile> {
        let Operands { call, precision, .. } = self.operands;
        let (d_v, stride_v) = (call.shape.d_v, self.operands.stride_v());
        let rows = TILE.min(sequence.q.len() - place.first);
        let scales = self.operands.scales(place.head);
        let queries = self.operands.queries(place.head, place.row..place.row + rows)?;
        let offsets = self.operands.offsets(place.head, &queries);
        let absolute = self.operands.absolute_logits();
        let promoted = matches!(precision.pv_accumulator, PvAccumulator::Fp8 { .. });
        let mut state = State {
            out: vec![0.0; rows * stride_v],
            promoted: vec![0.0; if promoted { rows * stride_v } else { 0 }],
            max: [f32::NEG_INFINITY; TILE],
            sum: [0.0; TILE],
            logits: LogitStats::default(),
            repeated: 0,
        };
        let visible: Vec<Range<usize>> = (0..rows).map(|row| call.visible(sequence, place.first + row)).collect();
        let empty: Vec<bool> = visible.iter().map(Range::is_empty).collect();
        let kernel = Kernel {
            queries: &queries.values,
            packed,
            stride: self.operands.stride(),
            stride_v,
            visible,
            factor: self.operands.logit_factor(&scales),
            offsets: offsets.as_deref(),
            absolute,
            soft_cap: call.soft_cap.map(|cap| cap as f32),
            logit: scales.logit,
            precision,
            shift: self.shift,
            state: &mut state,
        };
        pulp::Arch::new().dispatch(kernel);

        let mut tile = Tile {
            out: Vec::new(),
            lse: Vec::new(),
            centered_out: Vec::new(),
            centered_lse: Vec::new(),
            logits: state.logits,
            q: queries.counts,
            o: Counts::default(),
            repeated: state.repeated,
        };
        if self.shift.is_some() {
            let undo = self.operands.undo(scales.v) as f32 / precision.p_scale();
            let m = call.value_center(place.head);
            for row in 0..rows {
                let from = tile.out.len();
                // What centered keys took from the row's logits, where it is not there again already. A row without keys has none,
                // and is not read.
                let offset = offsets.as_ref().filter(|_| !absolute && !empty[row]).map_or(0.0, |offsets| offsets[row]);
                let sink = self.operands.sink(place.head).map(|sink| sink - offset);
                let Finished { factor, share, lse } = finish(undo, state.max[row], state.sum[row], sink);
                let sums = &state.out[row * stride_v..][..d_v];
                match m {
                    None => tile.out.extend(sums.iter().map(|x| x * factor)),
                    Some(m) => {
                        tile.out.extend(sums.iter().zip(m).map(|(x, m)| x.mul_add(factor, share * m)));
                        let rest = 1.0 - share;
                        tile.centered_out.extend(sums.iter().zip(m).map(|(x, m)| x.mul_add(factor, -(rest * m))));
                    }
                }
                tile.lse.push(lse + offset);
                tile.centered_lse.push(lse);
                tile.o += count(&tile.out[from..], scales.o)?;
            }
            if m.is_none() && call.center.is_some() {
                tile.centered_out.clone_from(&tile.out);
            }
            if precision.output == Cast::Bf16 {
                lanes::round_bf16(&mut tile.centered_out);
            }
            match (scales.o, precision.output.fp8()) {
                (Some(descale), Some((format, factor))) => {
                    let (scale, undo) = (descale.quant_scale().get() * factor, descale.get() / factor);
                    for x in &mut tile.out {
                        *x = format.round(*x * scale, precision.on_overflow) * undo;
                    }
                }
                _ if precision.output == Cast::Bf16 => lanes::round_bf16(&mut tile.out),
                _ if precision.output == Cast::Bf16Stochastic => {
                    for (i, row) in tile.out.chunks_exact_mut(d_v).enumerate() {
                        stochastic::round_row(row, (place.row + i) * call.shape.n_q_heads + place.head);
                    }
                }
                _ => {}
            }
        }
        Ok(tile)
    }
}

/// How a row ends.
struct Finished {
    /// What O is multiplied by, `undo` included.
    factor: f32,
    /// What the keys' P sum to: 1, less the sink's share; 0 for a row that saw no key.
    share: f32,
    lse: f32,
}

/// From the shift and the sum of the row's keys.
fn finish(undo: f32, max: f32, sum: f32, sink: Option<f32>) -> Finished {
    let Some(sink) = sink else {
        // A row that saw no key has an empty sum and stays zero.
        let (factor, share) = if sum == 0.0 { (0.0, 0.0) } else { (undo / sum, 1.0) };
        return Finished { factor, share, lse: max + sum.ln() };
    };
    let top = max.max(sink);
    let keys = lanes::exp(max - top);
    let total = sum * keys + lanes::exp(sink - top);
    Finished { factor: undo * keys / total, share: sum * keys / total, lse: top + total.ln() }
}

fn merge(into: &mut LogitStats, from: &LogitStats) {
    into.max = into.max.max(from.max);
    into.min = into.min.min(from.min);
    into.raw_max = into.raw_max.max(from.raw_max);
    into.raw_min = into.raw_min.min(from.raw_min);
    into.overflow += from.overflow;
    into.beyond_rounding += from.beyond_rounding;
    into.non_finite += from.non_finite;
    into.count += from.count;
}

/// The online softmax of one tile of rows.
struct State {
    /// Sum of P times V, `(rows, stride_v)`.
    out: Vec<f32>,
    /// The second level of a promoted sum.
    promoted: Vec<f32>,
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
    stride_v: usize,
    /// Keys of the sequence that each row sees.
    visible: Vec<Range<usize>>,
    /// tau times the descales of q and k.
    factor: f32,
    /// What centered keys take from each row's logits.
    offsets: Option<&'a [f32]>,
    /// It is added before anything is made of logits, and not only to their statistics.
    absolute: bool,
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
            match self.precision.qk_accumulator {
                QkAccumulator::F32 => lanes::logits(self.queries, tile_keys, self.stride, rows, columns, &mut s),
                QkAccumulator::Fp8 => {
                    accumulator::FP8.logits(self.queries, tile_keys, self.stride, rows, columns, &mut s);
                }
            }
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
                self.logits(row, &mut s[from..to]);
                s[..from].fill(0.0);
                s[to..].fill(0.0);
            }
            let Some(shift) = self.shift else { continue };
            let v = &self.packed.v.values[base * self.stride_v..];
            let width = self.precision.pv_accumulator.tile();
            for part in (0..TILE).step_by(width) {
                let within = |(from, to): (usize, usize)| (from.max(part), to.min(part + width));
                for (row, s) in s.chunks_exact_mut(TILE).take(rows).enumerate() {
                    let (from, to) = within(spans[row]);
                    if from < to {
                        self.softmax(row, &mut s[from..to], shift);
                    }
                }
                self.products(&s, v, spans.map(within), rows);
            }
            if let PvAccumulator::Fp8 { promote_every } = self.precision.pv_accumulator {
                let done = tile + 1 - keys.start / TILE;
                if done.is_multiple_of(promote_every / TILE) || tile + 1 == keys.end.div_ceil(TILE) {
                    for (promoted, out) in self.state.promoted.iter_mut().zip(&mut self.state.out) {
                        *promoted += std::mem::take(out);
                    }
                }
            }
        }
        if !self.state.promoted.is_empty() {
            std::mem::swap(&mut self.state.out, &mut self.state.promoted);
        }
    }
}

impl Kernel<'_> {
    /// Adds P V of the keys in `spans` to the output.
    #[inline(always)]
    fn products(&mut self, p: &[f32], v: &[f32], spans: [(usize, usize); TILE], rows: usize) {
        // Rows go in blocks, whose invisible keys have P = 0; next to NaN or infinity each row goes alone.
        let block = if self.packed.clean { 4 } else { 1 };
        for first in (0..rows).step_by(block) {
            let count = block.min(rows - first);
            let span = &spans[first..first + count];
            let from = span.iter().fold(TILE, |a, s| a.min(s.0));
            let to = span.iter().fold(0, |a, s| a.max(s.1));
            if from >= to {
                continue;
            }
            let (rows, out) = ((first, count), &mut self.state.out);
            match self.precision.pv_accumulator {
                PvAccumulator::F32 | PvAccumulator::Bf16 { .. } => {
                    lanes::values(p, v, self.stride_v, rows, (from, to), out);
                }
                PvAccumulator::Fp8 { .. } => accumulator::FP8.values(p, v, self.stride_v, rows, (from, to), out),
                PvAccumulator::F16 => accumulator::F16.values(p, v, self.stride_v, rows, (from, to), out),
            }
        }
        if let PvAccumulator::Bf16 { .. } = self.precision.pv_accumulator {
            lanes::round_bf16(&mut self.state.out);
        }
    }

    /// Products to logits: factor, soft-cap, statistics, cast.
    #[inline(always)]
    fn logits(&mut self, row: usize, s: &mut [f32]) {
        let stats = &mut self.state.logits;
        for s in s.iter_mut() {
            *s *= self.factor;
        }
        let mut seen = 0.0;
        match self.offsets.map(|offsets| offsets[row]) {
            Some(offset) if self.absolute => s.iter_mut().for_each(|s| *s += offset),
            Some(offset) => seen = offset,
            None => {}
        }
        stats.count += s.len() as u64;
        stats.non_finite += lanes::non_finite(s);
        let (mut max, mut min) = (lanes::max(s) + seen, lanes::min(s) + seen);
        stats.raw_max = stats.raw_max.max(max);
        stats.raw_min = stats.raw_min.min(min);
        if let Some(cap) = self.soft_cap {
            for s in s.iter_mut() {
                *s = cap * (*s / cap).tanh();
            }
            (max, min) = (lanes::max(s), lanes::min(s));
        }
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
            for level in [&mut state.out, &mut state.promoted].into_iter().filter(|level| !level.is_empty()) {
                for out in &mut level[row * self.stride_v..][..self.stride_v] {
                    *out *= rescale;
                }
            }
        }
        for s in s.iter_mut() {
            *s = lanes::exp(*s - new);
        }
        state.max[row] = new;
        state.sum[row] = state.sum[row] * rescale + lanes::sum(s);
        match self.precision.probabilities {
            Probabilities::F32 => {}
            Probabilities::Bf16 => lanes::round_bf16(s),
            Probabilities::F16 => s.iter_mut().for_each(|p| *p = f16::from_f32(*p * P_SCALE).to_f32()),
            Probabilities::E4m3 => s.iter_mut().for_each(|p| *p = fp8::round_e4m3(*p * P_SCALE, true)),
        }
    }
}
