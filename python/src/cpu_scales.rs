//! The certified bounds of the CPU over tensors of Python, and policies in host memory: what the scale engine and
//! [`DevicePolicy`](crate::policy::DevicePolicy) are on a device.

use crate::device::{Layer, Projection, QkNorm, dtype};
use crate::errors::raise;
use crate::policy::TailArguments;
use crate::threads::beside;
use pyo3::prelude::*;
use sigmascale::bound::{BoundKind, HeadBound, HeadBounds, LayerBounds, OperandBound, Tail, operand_row, round_up};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{
    self, AttentionSpec, GainForm, InputNorm, LayerSpec, LayerWeights, NormKind, NormVectors, QkNormScope, QkvBias,
    Rope, RopeLayout, Temperature,
};
use sigmascale::plan::{Granularity, OperandDescales, ScalePlan};
use sigmascale::policy::{Policy, PolicyConfig, PolicyShape, PolicyState, ScaledTensor, Slack};
use sigmascale::spectral::{
    Estimator, GramEngine, SpectralEngine, attention_factor, from_estimates, iterate_heads, iterate_sum,
};
use sigmascale::stats::{StepStats, StepWords, stats_words};
use sigmascale::tensor::{Dtype, MatrixView};
use sigmascale::{Descale, Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Floats of a [`HeadBound`].
const HEAD_WORDS: usize = size_of::<HeadBound>() / 4;

/// Descales `[layer][q, k, v, o][n_kv]`, operand bounds `[layer][q, k, v][n_kv]`, and with logits bounds `[layer][n_q]` of
/// [`HeadBound`], as the scale engine has them.
pub type Scales = (Vec<f32>, Vec<f32>, Option<Vec<f32>>);

/// Scales of layers in host memory, whose tensors the caller keeps alive and unchanged until this returns. `q_heads` are those
/// of all layers of the model, which `tail` counts.
#[pyfunction]
pub fn host_scales(
    py: Python<'_>,
    layers: Vec<Layer>,
    logits: bool,
    tail: TailArguments,
    q_heads: usize,
) -> PyResult<Scales> {
    beside(py, || {
        let (mut heads, mut operands, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
        for layer in &layers {
            // The union of the failure probability runs over the heads of a spec, which here has one layer.
            let shared = Tail { delta: tail.tail().delta * layer.n_q as f64 / q_heads as f64, ..tail.tail() };
            let stored = Stored::read(layer)?;
            let (bound, plan, sigma) = stored.bounds(layer, &shared, tail.eta)?;
            heads.extend(row_of(&plan.operands, layer.n_kv));
            operands.extend(operand_row(&bound, layer.n_kv));
            for ((head, descale), sigma) in bound.heads.iter().zip(&plan.logit_descale).zip(sigma) {
                let sigma = round_up(sigma);
                bounds.extend(values(HeadBound { sigma, descale: descale.get(), ..HeadBound::new(head) }));
            }
        }
        Ok((heads, operands, logits.then_some(bounds)))
    })
}

/// What [`host_estimates`] gives: as [`Scales`], then the vectors after the last iteration.
type Estimates = (Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>);

/// The same with norms from `count` iterations of power iteration, of `vectors` as the device has them: bounds of logits always.
/// `cover`: the failure probability of a head with which sigma is covered. `sums`: estimates of the layers' sums that ranks have
/// made together, in place of iterations here.
#[pyfunction]
#[pyo3(signature = (layers, estimator, tail, q_heads, vectors, count, cover, sums=None))]
#[allow(clippy::too_many_arguments)]
pub fn host_estimates(
    py: Python<'_>,
    layers: Vec<Layer>,
    estimator: &str,
    tail: TailArguments,
    q_heads: usize,
    mut vectors: Vec<f32>,
    count: usize,
    cover: Option<f64>,
    sums: Option<Vec<f64>>,
) -> PyResult<Estimates> {
    beside(py, || {
        let estimator: Estimator = estimator.parse()?;
        let (mut heads, mut operands, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
        let mut rest = &mut vectors[..];
        let mut sums = sums.map(Vec::into_iter);
        for layer in &layers {
            let shared = Tail { delta: tail.tail().delta * layer.n_q as f64 / q_heads as f64, ..tail.tail() };
            let owners = if estimator == Estimator::PowerSummed { layer.n_kv } else { layer.n_q };
            let Some((own, others)) = std::mem::take(&mut rest).split_at_mut_checked(owners * layer.d_head) else {
                return Err(Error::mismatch("vectors of a power iteration of another model"));
            };
            rest = others;
            let stored = Stored::read(layer)?;
            let sum = sums.as_mut().and_then(Iterator::next);
            let (bound, plan, sigma) = stored.estimated(layer, &shared, tail.eta, estimator, own, count, cover, sum)?;
            heads.extend(row_of(&plan.operands, layer.n_kv));
            operands.extend(operand_row(&bound, layer.n_kv));
            for ((head, descale), sigma) in bound.heads.iter().zip(&plan.logit_descale).zip(sigma) {
                let sigma = round_up(sigma);
                bounds.extend(values(HeadBound { sigma, descale: descale.get(), ..HeadBound::new(head) }));
            }
        }
        Ok((heads, operands, bounds, vectors))
    })
}

/// What an estimate has to be multiplied by to cover sigma but with probability `p`.
#[pyfunction]
pub fn certified_inflation(py: Python<'_>, iterations: usize, rank: usize, p: f64) -> PyResult<f64> {
    sigmascale::spectral::certified_inflation(iterations, rank, p).map_err(|error| raise(py, &error))
}

/// Descales `[q, k, v, o][n_kv]`, 1 where values have no bound.
fn row_of(own: &OperandDescales, n_kv: usize) -> Vec<f32> {
    let known = |row: Option<&Vec<Descale>>| match row {
        Some(row) => row.iter().map(|descale| descale.get()).collect(),
        None => vec![1.0; n_kv],
    };
    [Some(&own.q), Some(&own.k), own.v.as_ref(), own.o.as_ref()].map(known).concat()
}

/// The floats of a bound, in its order.
pub fn values(bound: HeadBound) -> [f32; HEAD_WORDS] {
    bound.into()
}

/// The model of layers with as many heads, for bounds and policies.
fn spec(layers: &[Layer]) -> AttentionSpec {
    let one = |(number, layer): (usize, &Layer)| {
        let rope = Rope {
            rotary_dim: layer.rotary,
            other_dims: Vec::new(),
            layout: if layer.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit },
            attention_factor: f64::from(layer.rope_factor),
            inv_freq: None,
            range: None,
        };
        LayerSpec {
            number,
            rope: (layer.rotary > 0).then_some(rope),
            softmax_scale: layer.softmax_scale,
            temperature: Temperature::constant(layer.query_factor),
            ..LayerSpec::plain(layer.n_q, layer.n_kv, layer.d_head)
        }
    };
    let first = &layers[0];
    let kind = match (&first.v, first.mean_removed) {
        (None, _) => NormKind::None,
        (Some(_), true) => NormKind::LayerNorm,
        (Some(_), false) => NormKind::RmsNorm,
    };
    AttentionSpec {
        norm: InputNorm {
            kind,
            gain: if first.gain == 0 { GainForm::Unit } else { GainForm::Plain },
            shift: first.shift != 0,
        },
        bias: QkvBias { q: first.q.bias != 0, k: first.k.bias != 0, v: first.v.as_ref().is_some_and(|v| v.bias != 0) },
        qk_norm: first.qk_norm.as_ref().map(|_| model::QkNorm {
            scope: QkNormScope::PerHead,
            kind: NormKind::RmsNorm,
            gain: GainForm::Plain,
            shift: false,
            behind_rotation: false,
            rotated_only: false,
        }),
        ..AttentionSpec::plain(first.d_model, layers.iter().enumerate().map(one).collect())
    }
}

/// A layer's tensors, dense and in the types that they are stored in.
struct Stored {
    q: Dense,
    k: Dense,
    /// Zeros where values have no bound.
    v: Dense,
    gain: Option<Vec<f64>>,
    shift: Option<Vec<f64>>,
    qk_norm: Option<[Vec<f64>; 2]>,
}

struct Dense {
    bytes: Vec<u8>,
    dtype: Dtype,
    bias: Option<Vec<f64>>,
}

impl Dense {
    fn heads(&self, name: &str, heads: usize, d_head: usize, d_model: usize) -> Result<model::Projection<'_>> {
        let whole = MatrixView::dense(&self.bytes, self.dtype, heads * d_head, d_model)?;
        let heads = (0..heads).map(|head| whole.slice_rows(head * d_head, d_head)).collect();
        Ok(model::Projection { heads, bias: self.bias.clone(), name: name.to_owned() })
    }
}

/// `count` values at an address; `None` at address 0.
fn vector(address: u64, count: usize, kind: &str) -> Result<Option<Vec<f64>>> {
    if address == 0 {
        return Ok(None);
    }
    let dtype = Dtype::from(dtype(kind)?);
    let bytes = bytes_at(&address, count * dtype.size());
    let mut values = vec![0.0; count];
    MatrixView::dense(bytes, dtype, 1, count)?.read_block(0..1, 0..count, &mut values);
    Ok(Some(values))
}

/// The bytes of a tensor, for as long as its address is borrowed. (The stable ABI has no buffers before Python 3.11.)
pub fn bytes_at(address: &u64, size: usize) -> &[u8] {
    if size == 0 {
        return &[];
    }
    // SAFETY: 1. the package passes the address of a contiguous tensor of at least this length; 2. it holds the tensor, and
    // nobody writes it, until the call returns.
    unsafe { std::slice::from_raw_parts(*address as *const u8, size) }
}

impl Stored {
    fn read(layer: &Layer) -> Result<Self> {
        if !layer.d_head.is_multiple_of(8) || !(16..=256).contains(&layer.d_head) {
            let d_head = layer.d_head;
            return Err(Error::argument(format_args!("d_head {d_head} must be a multiple of 8 from 16 to 256")));
        }
        let kind = Dtype::from(dtype(&layer.dtype)?);
        let projection = |projection: &Projection, heads: usize| -> Result<Dense> {
            let rows = heads * layer.d_head;
            let bias = vector(projection.bias, rows, &layer.vector_dtype)?;
            Ok(Dense { bytes: gather(projection, kind, rows, layer.d_model), dtype: kind, bias })
        };
        let side = |norm: &QkNorm, (gain, per_head, _): (u64, bool, u32), heads: usize| {
            let count = if per_head { heads * layer.d_head } else { layer.d_head };
            let missing = || Error::argument("a norm of q and k has no gain");
            let stored = vector(gain, count, &norm.dtype)?.ok_or_else(missing)?;
            Ok::<_, Error>(stored.iter().map(|gain| gain + f64::from(norm.offset)).collect::<Vec<_>>())
        };
        let form = |gain: Vec<f64>| gain.iter().map(|gain| gain + f64::from(layer.gain_offset)).collect();
        let qk_norm = match &layer.qk_norm {
            Some(norm) => Some([side(norm, norm.q, layer.n_q)?, side(norm, norm.k, layer.n_kv)?]),
            None => None,
        };
        let without =
            || Dense { bytes: vec![0; layer.n_kv * layer.d_head * layer.d_model * 2], dtype: Dtype::Bf16, bias: None };
        Ok(Self {
            q: projection(&layer.q, layer.n_q)?,
            k: projection(&layer.k, layer.n_kv)?,
            v: layer.v.as_ref().map_or_else(|| Ok(without()), |v| projection(v, layer.n_kv))?,
            gain: vector(layer.gain, layer.d_model, &layer.vector_dtype)?.map(form),
            shift: vector(layer.shift, layer.d_model, &layer.vector_dtype)?,
            qk_norm,
        })
    }

    fn weights(&self, layer: &Layer) -> Result<LayerWeights<'_>> {
        let (r, d) = (layer.d_head, layer.d_model);
        let vectors =
            |which: usize| self.qk_norm.as_ref().map(|gains| NormVectors { gain: gains[which].clone(), shift: None });
        Ok(LayerWeights {
            layer: 0,
            q: self.q.heads("q", layer.n_q, r, d)?,
            k: self.k.heads("k", layer.n_kv, r, d)?,
            v: self.v.heads("v", layer.n_kv, r, d)?,
            norm_gain: self.gain.clone(),
            norm_shift: self.shift.clone(),
            q_norm: vectors(0),
            k_norm: vectors(1),
            mla: None,
        })
    }

    /// As [`Stored::bounds`], from `count` iterations of these vectors.
    #[allow(clippy::too_many_arguments)]
    fn estimated(
        &self,
        layer: &Layer,
        tail: &Tail,
        eta: f64,
        estimator: Estimator,
        vectors: &mut [f32],
        count: usize,
        cover: Option<f64>,
        sum: Option<f64>,
    ) -> Result<(LayerBounds, ScalePlan, Vec<f64>)> {
        let spec = spec(std::slice::from_ref(layer));
        let geometry = LayerGeometry::new(&spec, self.weights(layer)?)?;
        let mut sigma = match (estimator, sum) {
            (Estimator::PowerSummed, sum) => {
                let sum = sum.map_or_else(|| iterate_sum(&geometry, vectors, count), Ok)?;
                vec![sum * attention_factor(&geometry).powi(2); layer.n_q]
            }
            _ => iterate_heads(&geometry, vectors, count)?,
        };
        if let Some(p) = cover.filter(|_| estimator == Estimator::Power && layer.rotary == 0) {
            let factor = sigmascale::spectral::certified_inflation(count, layer.d_head, p)?;
            sigma.iter_mut().for_each(|sigma| *sigma *= factor);
        }
        let bounds = LayerBounds::estimated(&spec, &geometry, &from_estimates(&geometry, &sigma)?, tail)?;
        let plan = ScalePlan::from_bounds(&bounds, BoundKind::WorstCase, eta, Granularity::Head)?;
        Ok((bounds, plan, sigma))
    }

    /// Bounds, plan, and the norm of each query head's interaction (0 where q and k are normalised).
    fn bounds(&self, layer: &Layer, tail: &Tail, eta: f64) -> Result<(LayerBounds, ScalePlan, Vec<f64>)> {
        let spec = spec(std::slice::from_ref(layer));
        let mut geometry = LayerGeometry::new(&spec, self.weights(layer)?)?;
        if let (Some(limits), Some(norm)) = (&mut geometry.qk_limits, &layer.qk_norm) {
            // The norm may run over more channels than these heads have.
            for (heads, (_, _, channels)) in [(&mut limits.q, norm.q), (&mut limits.k, norm.k)] {
                heads.iter_mut().for_each(|head| head.radius = f64::from(channels).sqrt());
            }
        }
        let spectrum = GramEngine.layer(&geometry)?;
        let bounds = LayerBounds::new(&spec, &geometry, &spectrum, tail)?;
        let plan = ScalePlan::from_bounds(&bounds, BoundKind::WorstCase, eta, Granularity::Head)?;
        let sigma = match &spectrum.heads {
            Some(heads) => heads.iter().map(|h| h.exact.map_or(h.sigma, |exact| exact.sigma_rope_upper)).collect(),
            None => vec![0.0; layer.n_q],
        };
        Ok((bounds, plan, sigma))
    }
}

/// The rows of a projection one after the other.
fn gather(projection: &Projection, dtype: Dtype, rows: usize, columns: usize) -> Vec<u8> {
    let size = dtype.size();
    let mut bytes = Vec::with_capacity(rows * columns * size);
    let run = if projection.col_stride == 1 { columns } else { 1 };
    for row in 0..rows {
        for column in (0..columns).step_by(run) {
            let offset = row as i64 * projection.row_stride + column as i64 * projection.col_stride;
            let start = (projection.ptr as *const u8).wrapping_offset(offset as isize * size as isize);
            // SAFETY: 1. the package reads address, shape and strides off a live tensor of the host, inside which every element
            // of these rows and columns lies; 2. it holds the tensor, and nobody writes it, until the call returns.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(start, run * size) });
        }
    }
    bytes
}

/// One policy for all layers of a model, in host memory.
#[pyclass(frozen)]
pub struct HostPolicy {
    held: Mutex<Held>,
    spec: AttentionSpec,
    shape: PolicyShape,
    config: PolicyConfig,
    tail: Tail,
    /// Whether it plans from bounds.
    bounded: bool,
}

struct Held {
    policy: Box<dyn Policy>,
    /// Of logits, q, k and v of each layer, since the policy was made or loaded.
    slack: Vec<[Option<Slack>; 4]>,
}

/// Tensors with slack.
const POOLED: [ScaledTensor; 4] = [ScaledTensor::Logit, ScaledTensor::Q, ScaledTensor::K, ScaledTensor::V];

impl HostPolicy {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bounds of a layer, from the rows that [`host_scales`] gives.
    fn bounds(&self, layer: usize, heads: &[f32], operands: &[f32]) -> Result<LayerBounds> {
        let own = self.spec.layer(layer)?;
        if !self.bounded {
            let unknown = |heads| vec![OperandBound { exact: f64::INFINITY, rounded: f64::INFINITY }; heads];
            let heads = vec![HeadBounds::default(); own.n_q_heads];
            let (q, k, v) = (unknown(own.n_q_heads), unknown(own.n_kv_heads), Some(unknown(own.n_kv_heads)));
            return Ok(LayerBounds { layer, heads, q, k, v, m: None });
        }
        let (q, kv) = (self.shape.heads().q(layer), self.shape.heads().kv(layer));
        let cut = || Error::mismatch("bounds of another model");
        let heads = heads.get(HEAD_WORDS * q.start..HEAD_WORDS * q.end).ok_or_else(cut)?;
        let operands = operands.get(3 * kv.start..3 * kv.end).ok_or_else(cut)?;
        let heads: Vec<HeadBound> = heads.as_chunks::<HEAD_WORDS>().0.iter().copied().map(HeadBound::from).collect();
        LayerBounds::from_device(&self.spec, layer, &heads, operands, &self.tail)
    }
}

#[pymethods]
impl HostPolicy {
    /// `spec` is an attention spec and `policy` one with all its parameters, as JSON; `bounded` for policies that plan from
    /// bounds.
    #[new]
    fn new(py: Python<'_>, spec: &str, policy: &str, tail: TailArguments, bounded: bool) -> PyResult<Self> {
        let made = || {
            let spec: AttentionSpec =
                serde_json::from_str(spec).map_err(|e| Error::argument(format_args!("no attention spec: {e}")))?;
            let config: PolicyConfig =
                serde_json::from_str(policy).map_err(|e| Error::argument(format_args!("no policy: {e}")))?;
            let shape = PolicyShape::from(&spec);
            let slack = vec![[None; 4]; spec.layers.len()];
            let held = Mutex::new(Held { policy: config.build(shape.clone())?, slack });
            Ok(Self { held, spec, shape, config, tail: tail.tail(), bounded })
        };
        made().map_err(|error| raise(py, &error))
    }

    /// Takes in the words of every layer's calls since the last plan, whose bounds these are.
    fn observe(&self, py: Python<'_>, words: Vec<u32>, heads: Vec<f32>, operands: Vec<f32>) -> PyResult<()> {
        beside(py, || {
            let held = &mut *self.held();
            for layer in 0..self.shape.layers() {
                let (q, kv) = (self.shape.heads().q(layer), self.shape.heads().kv(layer));
                let row = words.get(stats_words(q.start, kv.start)..stats_words(q.end, kv.end));
                let row = row.and_then(|row| StepWords::from_row(row, q.len(), kv.len()));
                let stats = StepStats::from(&row.ok_or_else(|| Error::mismatch("statistics of another model"))?);
                let bounds = self.bounds(layer, &heads, &operands)?;
                let plan = held.policy.plan(&bounds, None)?;
                let report = held.policy.observe(&plan, &bounds, &stats)?;
                if let PolicyConfig::AutoC(_) = self.config {
                    for (slack, tensor) in held.slack[layer].iter_mut().zip(POOLED) {
                        *slack = match (*slack, report.tensor(tensor).slack) {
                            (Some(before), Some(now)) => Some(before.merge(now)),
                            (before, now) => before.or(now),
                        };
                    }
                }
            }
            Ok(())
        })
    }

    /// Descales of a layer, `[logit n_q, q, k, v, o n_kv each]`.
    fn plan(&self, py: Python<'_>, layer: usize, heads: Vec<f32>, operands: Vec<f32>) -> PyResult<Vec<f32>> {
        beside(py, || {
            let plan = self.held().policy.plan(&self.bounds(layer, &heads, &operands)?, None)?;
            let without = vec![Descale::ONE; self.spec.layer(layer)?.n_kv_heads];
            let own = &plan.operands;
            let rows = [
                &plan.logit_descale,
                &own.q,
                &own.k,
                own.v.as_ref().unwrap_or(&without),
                own.o.as_ref().unwrap_or(&without),
            ];
            Ok(rows.into_iter().flatten().map(|descale| descale.get()).collect())
        })
    }

    /// As [`DevicePolicy`](crate::policy::DevicePolicy)'s.
    fn slack(&self, py: Python<'_>) -> PyResult<String> {
        beside(py, || {
            let slack = &self.held().slack;
            serde_json::to_string(slack).map_err(|e| Error::non_finite(format_args!("slack cannot be written: {e}")))
        })
    }

    /// The state as JSON.
    fn save(&self, py: Python<'_>) -> PyResult<String> {
        beside(py, || {
            let state = self.held().policy.save();
            serde_json::to_string(&state).map_err(|e| Error::non_finite(format_args!("the state cannot be saved: {e}")))
        })
    }

    /// Goes on from a state.
    fn load(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        beside(py, || {
            let state: PolicyState =
                serde_json::from_str(state).map_err(|e| Error::mismatch(format_args!("no policy state: {e}")))?;
            let policy = state.restore(&self.config, self.shape.clone())?;
            *self.held() = Held { policy, slack: vec![[None; 4]; self.spec.layers.len()] };
            Ok(())
        })
    }
}
