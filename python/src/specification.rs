//! Attention on the CPU over tensors of Python, forward and backward: the crate's own, which the kernels have to match.

use crate::attention::Array;
use crate::work::beside;
use pyo3::prelude::*;
use sigmascale::attention::{
    Attention, AttentionCall, AttentionShape, BackwardPrecision, Cpu, Inputs, Keeps, LogitCast, Mask, Precision,
    PvAccumulator, Saved, Sequence, backward,
};
use sigmascale::plan::{OperandDescales, ScalePlan};
use sigmascale::stats::{CastStats, CastWords, LogitWords, StepStats, StepWords, ordered};
use sigmascale::{Descale, Error, Result};

/// What a call computes, beside its tensors; lengths and sinks by their values.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Terms {
    causal: bool,
    window_left: Option<usize>,
    window_right: Option<usize>,
    softmax_scale: f64,
    soft_cap: Option<f64>,
    sinks: Option<Vec<f64>>,
    /// Starts and ends of queries and of keys, counted over `batch * len`.
    sequences: Option<[Vec<i64>; 4]>,
    /// Of q, k and v, `(batch, n_kv)` or `(1, n_kv)` each.
    descales: [Vec<f32>; 3],
    accumulator: String,
}

/// A forward: q, k, v, out and lse, contiguous and f32.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Forward {
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    terms: Terms,
}

/// A backward: likewise, with the output's gradient and those to write.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Backward {
    forward: Forward,
    d_out: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dq_fp8: bool,
}

fn read(Array(address, _, shape, _): &Array) -> &[f32] {
    // SAFETY: 1. the package passes contiguous f32 tensors of the host; 2. it holds them, and nobody writes them, until the call
    // returns.
    unsafe { std::slice::from_raw_parts(*address as *const f32, shape.iter().product()) }
}

fn write(Array(address, _, shape, _): &Array, at: usize, values: &[f32]) {
    let size: usize = shape.iter().product();
    assert!(at + values.len() <= size, "results fit the tensor that was made for them");
    // SAFETY: as in `read`, of tensors that nobody else reads or writes until the call returns.
    let to = unsafe { std::slice::from_raw_parts_mut(*address as *mut f32, size) };
    to[at..at + values.len()].copy_from_slice(values);
}

/// Sequences of a batch that are computed together, since they have one set of descales.
struct Part {
    shape: AttentionShape,
    /// First of them in the batch.
    first: usize,
    sequences: Option<Vec<Sequence>>,
    plan: ScalePlan,
}

impl Part {
    /// These rows of `x`, whose first axis is the batch.
    fn rows<'a>(&self, x: &'a Array) -> &'a [f32] {
        let (each, all) = (x.2[1..].iter().product::<usize>(), read(x));
        &all[self.first * each..(self.first + self.shape.batch) * each]
    }

    fn write(&self, to: &Array, values: &[f32]) {
        write(to, self.first * to.2[1..].iter().product::<usize>(), values);
    }

    fn call<'a>(&'a self, terms: &'a Terms) -> AttentionCall<'a> {
        let mask = Mask { causal: terms.causal, window_left: terms.window_left, window_right: terms.window_right };
        AttentionCall {
            shape: self.shape,
            mask,
            softmax_scale: terms.softmax_scale,
            soft_cap: terms.soft_cap,
            sequences: self.sequences.as_deref(),
            sinks: terms.sinks.as_deref(),
        }
    }

    fn inputs<'a>(&self, forward: &'a Forward) -> Inputs<'a> {
        Inputs { q: self.rows(&forward.q), k: self.rows(&forward.k), v: self.rows(&forward.v) }
    }
}

impl Forward {
    fn precision(&self) -> Result<Precision> {
        let accumulator: PvAccumulator = self.terms.accumulator.parse()?;
        Ok(Precision { logits: LogitCast::F32, ..Precision::hopper(accumulator) })
    }

    fn parts(&self) -> Result<Vec<Part>> {
        let (&[batch, len_q, n_q_heads, d_head], &[_, len_k, n_kv_heads, d_v]) = (&self.q.2[..], &self.v.2[..]) else {
            return Err(Error::argument("q, k and v must be (batch, length, heads, d_head)"));
        };
        let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v };
        let sets = self.terms.descales[0].len() / n_kv_heads;
        let each = batch / sets;
        (0..sets)
            .map(|set| {
                let row = |values: &[f32]| {
                    let own = &values[set * n_kv_heads..(set + 1) * n_kv_heads];
                    own.iter().map(|descale| Descale::new(*descale)).collect::<Result<Vec<_>>>()
                };
                let [q, k, v] = &self.terms.descales;
                let operands = OperandDescales { q: row(q)?, k: row(k)?, v: Some(row(v)?), o: None };
                let logit_descale = vec![Descale::ONE; n_q_heads];
                let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale, operands };
                let shape = AttentionShape { batch: each, ..shape };
                Ok(Part { shape, first: set * each, sequences: self.sequences(&shape, set, sets)?, plan })
            })
            .collect()
    }

    /// Sequences of the `set`-th of `sets` parts of the batch, counted from its first row.
    fn sequences(&self, shape: &AttentionShape, set: usize, sets: usize) -> Result<Option<Vec<Sequence>>> {
        let Some([q_starts, q_ends, k_starts, k_ends]) = &self.terms.sequences else { return Ok(None) };
        let (rows_q, rows_k) = ((shape.batch * shape.len_q) as i64, (shape.batch * shape.len_k) as i64);
        let (from_q, from_k) = (set as i64 * rows_q, set as i64 * rows_k);
        let range = |i: usize, name: &str, start: i64, end: i64, rows: i64| {
            if 0 <= start && start <= end && end <= rows {
                return Ok(start as usize..end as usize);
            }
            Err(Error::argument(format_args!("{name} {start}..{end} of sequence {i} do not lie in its {rows} rows")))
        };
        let mut own = Vec::new();
        for i in 0..q_starts.len() {
            // Where descales differ, a sequence belongs to the part that its first query, or if it has none its first key, lies in.
            let empty = q_starts[i] >= q_ends[i];
            let at = if empty { k_starts[i] / rows_k } else { q_starts[i] / rows_q };
            if sets > 1 && at != set as i64 {
                continue;
            }
            let q = if empty { 0..0 } else { range(i, "queries", q_starts[i] - from_q, q_ends[i] - from_q, rows_q)? };
            let k = range(i, "keys", k_starts[i] - from_k, k_ends[i].max(k_starts[i]) - from_k, rows_k)?;
            // An empty range lies where the one before ended.
            let q = if empty { own.last().map_or(0..0, |last: &Sequence| last.q.end..last.q.end) } else { q };
            own.push(Sequence { q, k });
        }
        Ok(Some(own))
    }
}

fn cast_words(stats: &CastStats) -> CastWords {
    let count = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    CastWords {
        amax: stats.amax.to_bits(),
        overflow: count(stats.overflow),
        beyond_rounding: count(stats.beyond_rounding),
        non_finite: count(stats.non_finite),
    }
}

/// Statistics as a device reports them: of the logits those before the soft-cap.
fn words(stats: &StepStats) -> StepWords {
    let logits = stats.logits.iter().zip(&stats.o).map(|(logit, o)| {
        if logit.count == 0 {
            return LogitWords { amax_o: o.amax.to_bits(), ..LogitWords::default() };
        }
        let (max, min) = (ordered(logit.raw_max), !ordered(logit.raw_min));
        LogitWords { max, min, amax_o: o.amax.to_bits(), overflow: 0 }
    });
    let casts = |stats: &[CastStats]| stats.iter().map(cast_words).collect();
    StepWords { logits: logits.collect(), q: casts(&stats.q), k: casts(&stats.k), v: casts(&stats.v) }
}

/// Computes a forward, and returns the words of its statistics, a row for each set of descales.
#[pyfunction]
pub fn host_forward(py: Python<'_>, call: Forward) -> PyResult<Vec<Vec<u32>>> {
    beside(py, || {
        let precision = call.precision()?;
        let part = |part: &Part| {
            let result = Cpu.forward(&part.call(&call.terms), &part.inputs(&call), &part.plan, &precision)?;
            part.write(&call.out, &result.out);
            part.write(&call.lse, &result.lse);
            Ok(words(&result.stats).to_row())
        };
        call.parts()?.iter().map(part).collect()
    })
}

/// Computes a backward, and returns the gradients of the sinks, none without.
#[pyfunction]
pub fn host_backward(py: Python<'_>, call: Backward) -> PyResult<Vec<f32>> {
    beside(py, || {
        let forward = &call.forward;
        let precision = forward.precision()?;
        let mut d_sinks = vec![0.0; forward.terms.sinks.as_ref().map_or(0, Vec::len)];
        for part in forward.parts()? {
            let saved = Saved { out: part.rows(&forward.out), lse: part.rows(&forward.lse) };
            let (terms, inputs) = (part.call(&forward.terms), part.inputs(forward));
            let how = &BackwardPrecision::after(if call.dq_fp8 { Keeps::Fp8Dq } else { Keeps::Operands });
            let grads = backward(&terms, &inputs, &part.plan, &precision, how, &saved, part.rows(&call.d_out))?;
            for (to, values) in [(&call.dq, &grads.dq), (&call.dk, &grads.dk), (&call.dv, &grads.dv)] {
                part.write(to, values);
            }
            d_sinks.iter_mut().zip(&grads.d_sinks).for_each(|(sum, part)| *sum += part);
        }
        Ok(d_sinks)
    })
}
