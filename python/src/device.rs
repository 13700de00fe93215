//! The scale engine over memory that Python owns.

use crate::threads::{OnDevice, on_device};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sigmascale::bound::HeadBound;
use sigmascale::cuda::{self, Buffer, Device, DevicePtr, Stream};
use sigmascale::device::scale::{self, DeviceMatrix, Dtype, LayerInput, ProjectionInput, QkNormInput, QkNormSide};
use sigmascale::model::{Forward, GainForm, NormKind, norm_roundings};
use sigmascale::{Error, Result};
use std::sync::Mutex;

/// One projection: address, element strides of an output and of an input channel, and the bias (0: none).
#[derive(FromPyObject)]
pub struct Projection {
    pub ptr: u64,
    pub row_stride: i64,
    pub col_stride: i64,
    pub bias: u64,
}

/// Gains of the norms of q and k: addresses, whether each head has its own, and how many channels go together.
#[derive(FromPyObject)]
pub struct QkNorm {
    pub q: (u64, bool, u32),
    pub k: (u64, bool, u32),
    pub dtype: String,
    pub offset: f32,
}

/// One layer, addresses as integers (0: none).
#[derive(FromPyObject)]
pub struct Layer {
    #[pyo3(item)]
    pub q: Projection,
    #[pyo3(item)]
    pub k: Projection,
    #[pyo3(item)]
    pub v: Option<Projection>,
    #[pyo3(item)]
    pub dtype: String,
    #[pyo3(item)]
    pub gain: u64,
    #[pyo3(item)]
    pub shift: u64,
    #[pyo3(item)]
    pub vector_dtype: String,
    #[pyo3(item)]
    pub gain_offset: f32,
    #[pyo3(item)]
    pub mean_removed: bool,
    #[pyo3(item)]
    pub d_model: usize,
    #[pyo3(item)]
    pub n_q: usize,
    #[pyo3(item)]
    pub n_kv: usize,
    #[pyo3(item)]
    pub d_head: usize,
    #[pyo3(item)]
    pub rotary: usize,
    #[pyo3(item)]
    pub interleaved: bool,
    #[pyo3(item)]
    pub rope_factor: f32,
    #[pyo3(item)]
    pub softmax_scale: f64,
    #[pyo3(item)]
    pub query_factor: f64,
    #[pyo3(item)]
    pub qk_norm: Option<QkNorm>,
}

/// A type by PyTorch's name.
pub fn dtype(name: &str) -> Result<Dtype> {
    match name {
        "bfloat16" => Ok(Dtype::Bf16),
        "float16" => Ok(Dtype::F16),
        "float32" => Ok(Dtype::F32),
        other => Err(Error::argument(format_args!("weights of type {other}: bfloat16, float16 and float32 are read"))),
    }
}

impl QkNorm {
    fn input(&self) -> Result<QkNormInput> {
        let side = |(gain, per_head, channels): (u64, bool, u32)| QkNormSide {
            gain: DevicePtr(gain),
            shift: DevicePtr::NULL,
            per_head,
            channels,
        };
        let dtype = dtype(&self.dtype)?;
        Ok(QkNormInput { q: side(self.q), k: side(self.k), dtype, gain_offset: self.offset })
    }
}

impl Layer {
    fn input(&self) -> Result<LayerInput> {
        let kind = dtype(&self.dtype)?;
        let one = |p: &Projection| ProjectionInput {
            weight: DeviceMatrix {
                ptr: DevicePtr(p.ptr),
                dtype: kind,
                row_stride: p.row_stride,
                col_stride: p.col_stride,
            },
            bias: DevicePtr(p.bias),
        };
        let stored = kind.into();
        let gain = if self.gain == 0 { GainForm::Unit } else { GainForm::Plain };
        let norm = if self.mean_removed { NormKind::LayerNorm } else { NormKind::RmsNorm };
        let rounding = Forward {
            norm: norm_roundings(norm, gain),
            qk_norm: self.qk_norm.as_ref().map(|_| norm_roundings(NormKind::RmsNorm, GainForm::Plain)),
            rotated: self.rotary > 0,
            grows: self.query_factor != 1.0,
            d_model: self.d_model,
        };
        Ok(LayerInput {
            q: one(&self.q),
            k: one(&self.k),
            v: self.v.as_ref().map(one),
            gain: DevicePtr(self.gain),
            shift: DevicePtr(self.shift),
            vector_dtype: dtype(&self.vector_dtype)?,
            gain_offset: self.gain_offset,
            mean_removed: self.mean_removed,
            d_model: self.d_model,
            n_q: self.n_q,
            n_kv: self.n_kv,
            d_head: self.d_head,
            rotary: self.rotary,
            interleaved: self.interleaved,
            rope_factor: self.rope_factor,
            softmax_scale: self.softmax_scale,
            query_factor: self.query_factor,
            rounding_share: rounding.share([stored; 3]),
            qk_norm: self.qk_norm.as_ref().map(QkNorm::input).transpose()?,
        })
    }
}

/// A stream by its handle; 0 is the legacy default stream.
pub fn stream(device: &Device, raw: u64) -> Stream {
    if raw == 0 {
        return device.default_stream();
    }
    // SAFETY: 1. and 2. the package passes the handle of a stream of this device that PyTorch keeps for the life of the
    // process.
    unsafe { device.borrow_stream(raw) }
}

/// Descales, and with `logits` certified logit bounds, of many layers in one go.
///
/// The caller (the package) keeps the weights alive and in place, and orders calls by streams.
#[pyclass(frozen)]
pub struct ScaleEngine {
    engine: OnDevice<Mutex<scale::ScaleEngine>>,
    device: OnDevice<Device>,
    logits: bool,
}

#[pymethods]
impl ScaleEngine {
    #[new]
    fn new(py: Python<'_>, device: usize, layers: Vec<Layer>, logits: bool, eta: f64) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let inputs = inputs(&layers)?;
            // SAFETY: 1. the package reads addresses, shapes and strides off live tensors of this device; 2. it checks at
            // every launch that they still lie where they did, and orders launches on streams.
            let engine = unsafe { scale::ScaleEngine::new(&device, &inputs, logits)? }.with_eta(eta)?;
            Ok(Self { engine: OnDevice::new(Mutex::new(engine)), device: OnDevice::new(device), logits })
        })
    }

    /// Puts the work on a stream (its handle as an integer).
    fn launch(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let engine = self.engine.try_lock().map_err(|_| {
                Error::argument("refresh() is running in another thread: call it from one thread at a time")
            })?;
            let stream = self::stream(&self.device, stream);
            if self.logits { engine.plan(&stream) } else { engine.descales(&stream) }
        })
    }

    /// As [`results`].
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let bounds = engine.head_bounds().filter(|_| self.logits);
        results(py, engine.head_descales(), engine.operand_bounds(), engine.status(), bounds)
    }

    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner).workspace_bytes()
    }
}

/// Addresses and lengths of the results: `heads` f32 `[layer][q, k, v, o][n_kv]`, `operands` f32
/// `[layer][q, k, v][n_kv]`, `bounds` f32 `[layer][n_q][sigma, exact, rounded, descale, ..]` (absent without logits),
/// `status` one u32. Each layer has its own heads, without padding.
pub fn results<'py>(
    py: Python<'py>,
    heads: &Buffer<f32>,
    operands: &Buffer<f32>,
    status: &Buffer<u32>,
    bounds: Option<&Buffer<HeadBound>>,
) -> PyResult<Bound<'py, PyDict>> {
    let results = PyDict::new(py);
    results.set_item("heads", (heads.ptr().0, heads.len()))?;
    results.set_item("operands", (operands.ptr().0, operands.len()))?;
    results.set_item("status", (status.ptr().0, 1))?;
    if let Some(bounds) = bounds {
        results.set_item("bounds", (bounds.ptr().0, size_of::<HeadBound>() / 4 * bounds.len()))?;
    }
    Ok(results)
}

/// The same of layers of one shape, whose addresses come with each launch.
#[pyclass(frozen)]
pub struct ShapeEngine {
    engine: OnDevice<Mutex<scale::ShapeEngine>>,
    device: OnDevice<Device>,
    logits: bool,
}

#[pymethods]
impl ShapeEngine {
    #[new]
    fn new(py: Python<'_>, device: usize, layers: Vec<Layer>, logits: bool, eta: f64) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let engine = scale::ShapeEngine::new(&device, &inputs(&layers)?, logits)?.with_eta(eta)?;
            Ok(Self { engine: OnDevice::new(Mutex::new(engine)), device: OnDevice::new(device), logits })
        })
    }

    /// Whether it can take these layers: their shapes are those of the ones that it was made with.
    fn fits(&self, py: Python<'_>, layers: Vec<Layer>) -> PyResult<bool> {
        on_device(py, || {
            let layers = inputs(&layers)?;
            Ok(self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner).fits(&layers))
        })
    }

    /// Puts the work of these layers on a stream (its handle as an integer).
    fn launch(&self, py: Python<'_>, stream: u64, layers: Vec<Layer>) -> PyResult<()> {
        on_device(py, || {
            let engine = self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let (stream, layers) = (self::stream(&self.device, stream), inputs(&layers)?);
            // SAFETY: the package reads addresses, shapes and strides off live tensors of this device, launches on the
            // stream on which they are used and freed, and keeps the memory of a capture for its replays.
            unsafe { if self.logits { engine.plan(&stream, &layers) } else { engine.descales(&stream, &layers) } }
        })
    }

    /// As [`results`].
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let bounds = engine.head_bounds().filter(|_| self.logits);
        results(py, engine.head_descales(), engine.operand_bounds(), engine.status(), bounds)
    }

    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner).workspace_bytes()
    }
}

/// Scales with norms from power iteration, of layers where they lay when it was made or, given at a launch, elsewhere.
#[pyclass(frozen)]
pub struct EstimateEngine {
    engine: OnDevice<Mutex<scale::EstimateEngine>>,
    device: OnDevice<Device>,
}

#[pymethods]
impl EstimateEngine {
    #[new]
    fn new(
        py: Python<'_>,
        device: usize,
        layers: Vec<Layer>,
        estimator: &str,
        eta: f64,
        cover: Option<f64>,
    ) -> PyResult<Self> {
        on_device(py, || {
            let (device, inputs) = (Device::open(device)?, inputs(&layers)?);
            // SAFETY: as for [`ScaleEngine`]; the package gives vectors at each launch.
            let engine = unsafe { scale::EstimateEngine::new(&device, &inputs, estimator.parse()?, 0)? };
            let engine = engine.with_eta(eta)?;
            let engine = if let Some(p) = cover { engine.covering(p) } else { engine };
            Ok(Self { engine: OnDevice::new(Mutex::new(engine)), device: OnDevice::new(device) })
        })
    }

    /// Whether it can take these layers.
    fn fits(&self, py: Python<'_>, layers: Vec<Layer>) -> PyResult<bool> {
        on_device(py, || {
            let layers = inputs(&layers)?;
            Ok(self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner).fits(&layers))
        })
    }

    /// Puts the work on a stream: `count` iterations, `cold` if vectors are random ones. With none, `sigma` holds the estimates.
    #[pyo3(signature = (stream, layers, count, cold))]
    fn launch(
        &self,
        py: Python<'_>,
        stream: u64,
        layers: Option<Vec<Layer>>,
        count: usize,
        cold: bool,
    ) -> PyResult<()> {
        on_device(py, || {
            let engine = self.engine.try_lock().map_err(|_| {
                Error::argument("refresh() is running in another thread: call it from one thread at a time")
            })?;
            let stream = self::stream(&self.device, stream);
            match layers {
                None => engine.run(&stream, count, cold),
                // SAFETY: as for [`ShapeEngine`].
                Some(layers) => unsafe { engine.run_on(&stream, &inputs(&layers)?, count, cold) },
            }
        })
    }

    /// As [`results`], and f32 `vectors`, which the package writes in front of a launch and reads behind it, and `sigma`, estimates.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let bounds = engine.head_bounds();
        let results = results(py, engine.head_descales(), engine.operand_bounds(), engine.status(), bounds)?;
        for (name, buffer) in [("vectors", engine.vectors()), ("sigma", engine.estimates())] {
            results.set_item(name, (buffer.ptr().0, buffer.len()))?;
        }
        Ok(results)
    }
}

fn inputs(layers: &[Layer]) -> Result<Vec<LayerInput>> {
    layers.iter().map(Layer::input).collect()
}

/// Whether kernels can be compiled and launched here, and if not, why.
#[pyfunction]
pub fn gpu() -> (bool, String) {
    let probe = cuda::probe();
    let missing = [probe.driver.err(), probe.devices.err(), probe.compiler.err()];
    (cuda::is_available(), missing.into_iter().flatten().collect::<Vec<_>>().join("; "))
}
