//! Attention on the CPU over tensors of Python, forward and backward: the crate's own, which the kernels have to match.

use crate::call::{Array, Call, Sequences};
use crate::threads::beside;
use pyo3::prelude::*;
use sigmascale::attention::{
    Attention, AttentionShape, BackwardPrecision, Cpu, Inputs, LogitCast, Precision, Saved, Sequence, backward,
};
use sigmascale::device::attention::Element;
use sigmascale::plan::{OperandDescales, ScalePlan};
use sigmascale::stats::{CastStats, CastWords, LogitWords, StepStats, StepWords, ordered};
use sigmascale::{Descale, Error, Result};

/// Memory of a tensor from its first element on.
fn memory<T>(array: &Array, elements: usize) -> &[T] {
    // An empty tensor may have no address.
    if elements == 0 {
        return &[];
    }
    // SAFETY: 1. the package passes tensors of the host that have these elements, f32 for operands and results, else as
    // `values` checks; 2. it holds them, and nobody writes them, until the call returns.
    unsafe { std::slice::from_raw_parts(array.address as *const T, elements) }
}

/// A contiguous tensor of f32.
fn read(array: &Array) -> &[f32] {
    memory(array, array.shape.iter().product())
}

fn write(array: &Array, at: usize, values: &[f32]) {
    let size: usize = array.shape.iter().product();
    assert!(at + values.len() <= size, "results fit the tensor that was made for them");
    // SAFETY: as in `memory`, of contiguous f32 tensors that nobody else reads or writes until the call returns.
    let to = unsafe { std::slice::from_raw_parts_mut(array.address as *mut f32, size) };
    to[at..at + values.len()].copy_from_slice(values);
}

/// The values of a small tensor of any strides, row by row, which must be of type `element`.
fn values<T: Copy>(name: &str, array: &Array, element: Element) -> Result<Vec<T>> {
    if array.element()? != element {
        return Err(Error::argument(format_args!("{name} must be of type {element:?}")));
    }
    let mut places = vec![0];
    for (&size, &stride) in array.shape.iter().zip(&array.strides) {
        let step = stride.unsigned_abs() as usize;
        places = places.iter().flat_map(|place| (0..size).map(move |i| place + i * step)).collect();
    }
    let all = memory(array, places.last().map_or(0, |last| last + 1));
    Ok(places.into_iter().map(|place| all[place]).collect())
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
        let (each, all) = (x.shape[1..].iter().product::<usize>(), read(x));
        &all[self.first * each..(self.first + self.shape.batch) * each]
    }

    fn write(&self, to: &Array, values: &[f32]) {
        write(to, self.first * to.shape[1..].iter().product::<usize>(), values);
    }

    fn inputs<'a>(&self, call: &'a Call) -> Result<Inputs<'a>> {
        Ok(Inputs { q: self.rows(&call.q), k: self.rows(call.keys()?), v: self.rows(call.values()?) })
    }
}

fn precision(call: &Call) -> Result<Precision> {
    let logits = if call.terms.logit_descale.is_some() { LogitCast::E4m3 } else { LogitCast::F32 };
    Ok(Precision { logits, ..Precision::hopper(call.terms.accumulator()?) })
}

fn sinks(call: &Call) -> Result<Option<Vec<f64>>> {
    let wide = |sinks| Ok(values::<f32>("sinks", sinks, Element::F32)?.into_iter().map(f64::from).collect());
    call.terms.sinks.as_ref().map(wide).transpose()
}

fn parts(call: &Call) -> Result<Vec<Part>> {
    let shape = call.shape()?;
    // One set of descales for the whole batch, where all rows are the same.
    let sets = if call.descales.iter().all(|d| d.shape[0] == 1 || d.strides[0] == 0) { 1 } else { shape.batch };
    let each = shape.batch / sets;
    let [q, k, v] = &call.descales;
    let descales = |name: &str, array: &Array| values::<f32>(name, array, Element::F32);
    let (q, k, v) = (descales("q descale", q)?, descales("k descale", k)?, descales("v descale", v)?);
    let logit = call.terms.logit_descale.as_ref().map(|array| descales("logit descale", array)).transpose()?;
    if logit.as_ref().is_some_and(|row| row.len() != shape.n_q_heads) {
        return Err(Error::mismatch(format_args!(
            "descales of logits: one for each of {} heads is needed",
            shape.n_q_heads
        )));
    }
    let place = |name: &str, array: &Array| values::<i32>(name, array, Element::I32);
    let places = |s: &Sequences| {
        let (q_starts, q_ends) = (place("q_starts", &s.q_starts)?, place("q_ends", &s.q_ends)?);
        Ok::<_, Error>([q_starts, q_ends, place("k_starts", &s.k_starts)?, place("k_ends", &s.k_ends)?])
    };
    let places = call.terms.sequences.as_ref().map(places).transpose()?;
    (0..sets)
        .map(|set| {
            let row = |all: &[f32]| {
                let rows = all.chunks(shape.n_kv_heads);
                let own = rows.clone().nth(set.min(rows.len().saturating_sub(1))).unwrap_or_default();
                own.iter().map(|descale| Descale::new(*descale)).collect::<Result<Vec<_>>>()
            };
            let operands = OperandDescales { q: row(&q)?, k: row(&k)?, v: Some(row(&v)?), o: None };
            let logit_descale = match &logit {
                Some(row) => row.iter().map(|descale| Descale::new(*descale)).collect::<Result<_>>()?,
                None => vec![Descale::ONE; shape.n_q_heads],
            };
            let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale, operands };
            let shape = AttentionShape { batch: each, ..shape };
            let sequences = places.as_ref().map(|places| sequences(places, &shape, set, sets)).transpose()?;
            Ok(Part { shape, first: set * each, sequences, plan })
        })
        .collect()
}

/// Sequences of the `set`-th of `sets` parts of the batch, counted from its first row.
fn sequences(
    [q_starts, q_ends, k_starts, k_ends]: &[Vec<i32>; 4],
    shape: &AttentionShape,
    set: usize,
    sets: usize,
) -> Result<Vec<Sequence>> {
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
        let [q_start, q_end, k_start, k_end] = [q_starts, q_ends, k_starts, k_ends].map(|places| i64::from(places[i]));
        // Where descales differ, a sequence belongs to the part that its first query, or if it has none its first key, lies in.
        let empty = q_start >= q_end;
        let at = if empty { k_start / rows_k } else { q_start / rows_q };
        if sets > 1 && at != set as i64 {
            continue;
        }
        let q = if empty { 0..0 } else { range(i, "queries", q_start - from_q, q_end - from_q, rows_q)? };
        let k = range(i, "keys", k_start - from_k, k_end.max(k_start) - from_k, rows_k)?;
        // An empty range lies where the one before ended.
        let q = if empty { own.last().map_or(0..0, |last: &Sequence| last.q.end..last.q.end) } else { q };
        own.push(Sequence { q, k });
    }
    Ok(own)
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
        let overflow = u32::try_from(logit.overflow).unwrap_or(u32::MAX);
        LogitWords { max, min, amax_o: o.amax.to_bits(), overflow }
    });
    let casts = |stats: &[CastStats]| stats.iter().map(cast_words).collect();
    StepWords { logits: logits.collect(), q: casts(&stats.q), k: casts(&stats.k), v: casts(&stats.v) }
}

/// Computes a forward, and returns the words of its statistics, a row for each set of descales.
#[pyfunction]
pub fn host_forward(py: Python<'_>, call: Call) -> PyResult<Vec<Vec<u32>>> {
    beside(py, || {
        let (precision, sinks) = (precision(&call)?, sinks(&call)?);
        let part = |part: &Part| {
            let terms = call.on_host(part.shape, part.sequences.as_deref(), sinks.as_deref());
            let result = Cpu.forward(&terms, &part.inputs(&call)?, &part.plan, &precision)?;
            part.write(&call.out, &result.out);
            part.write(&call.lse, &result.lse);
            Ok(words(&result.stats).to_row())
        };
        parts(&call)?.iter().map(part).collect()
    })
}

/// Computes a backward.
#[pyfunction]
pub fn host_backward(py: Python<'_>, call: Call) -> PyResult<()> {
    beside(py, || {
        let (precision, sinks) = (precision(&call)?, sinks(&call)?);
        let how = BackwardPrecision::after(call.terms.keeps()?);
        let mut d_sinks = vec![0.0; sinks.as_ref().map_or(0, Vec::len)];
        for part in parts(&call)? {
            let saved = Saved { out: part.rows(&call.out), lse: part.rows(&call.lse) };
            let (terms, inputs) =
                (call.on_host(part.shape, part.sequences.as_deref(), sinks.as_deref()), part.inputs(&call)?);
            let grads = backward(&terms, &inputs, &part.plan, &precision, &how, &saved, part.rows(call.d_out()?))?;
            for (to, values) in call.grads()?.into_iter().zip([&grads.dq, &grads.dk, &grads.dv]) {
                part.write(to, values);
            }
            d_sinks.iter_mut().zip(&grads.d_sinks).for_each(|(sum, part)| *sum += part);
        }
        if let Some(to) = &call.d_sinks {
            write(to, 0, &d_sinks);
        }
        Ok(())
    })
}
