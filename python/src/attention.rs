//! The attention kernels, forward and backward, over tensors that Python owns.

use crate::device::stream;
use crate::errors::raise;
use crate::work::{OnDevice, on_device};
use pyo3::intern;
use pyo3::prelude::*;
use sigmascale::attention::{AttentionShape, Keeps, Mask};
use sigmascale::cuda::{Device, DevicePtr};
use sigmascale::device::attention::{
    BackwardEngine, BackwardOptions, BackwardTensors, Cuda, Delta, Descales, DeviceCall, Element, Keys, Rope,
    RowBounds, SavedOperands, SavedRows, Sequences, Tensors, View,
};
use sigmascale::{Error, Result};
use std::sync::{Mutex, PoisonError};

/// A tensor of PyTorch: address, type, shape and strides in elements.
pub struct Array(pub u64, pub String, pub Vec<usize>, pub Vec<i64>);

impl<'py> FromPyObject<'_, 'py> for Array {
    type Error = PyErr;

    fn extract(tensor: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let dtype = tensor.getattr(intern!(py, "dtype"))?.str()?;
        let dtype = dtype.to_str()?;
        Ok(Self(
            tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            dtype.strip_prefix("torch.").unwrap_or(dtype).to_owned(),
            tensor.getattr(intern!(py, "shape"))?.extract()?,
            tensor.call_method0(intern!(py, "stride"))?.extract()?,
        ))
    }
}

fn element(name: &str) -> Result<Element> {
    match name {
        "bfloat16" => Ok(Element::Bf16),
        "float16" => Ok(Element::F16),
        "float32" => Ok(Element::F32),
        "float8_e4m3fn" => Ok(Element::E4m3),
        "int32" => Ok(Element::I32),
        "uint8" => Ok(Element::U8),
        other => Err(Error::argument(format_args!("tensors of type {other} are not taken"))),
    }
}

pub fn view<const R: usize>(name: &str, array: &Array) -> Result<View<R>> {
    array_of(name, element(&array.1)?, array)
}

/// A tensor whose elements are taken as `element`.
pub fn array_of<const R: usize>(name: &str, element: Element, array: &Array) -> Result<View<R>> {
    let Array(ptr, _, shape, strides) = array;
    let (Ok(shape), Ok(strides)) = (<[usize; R]>::try_from(&shape[..]), <[i64; R]>::try_from(&strides[..])) else {
        return Err(Error::argument(format_args!("{name} must have {R} dimensions, not {}", shape.len())));
    };
    // SAFETY: 1. the package reads these off a live tensor of this device; 2. PyTorch's allocator keeps its memory until
    // the work of its stream has run; 3. outputs are tensors of the package's own, and work is ordered by streams.
    Ok(unsafe { View::new(DevicePtr(*ptr), element, shape, strides) })
}

pub fn optional<const R: usize>(name: &str, array: &Option<Array>) -> Result<Option<View<R>>> {
    array.as_ref().map(|array| view(name, array)).transpose()
}

pub fn descales([q, k, v]: &[Array; 3]) -> Result<Descales> {
    let [q, k, v] = [("q descale", q), ("k descale", k), ("v descale", v)].map(|(name, x)| view(name, x).map(Some));
    Ok(Descales { q: q?, k: k?, v: v?, o: None, logit: None })
}

/// Starts and ends of queries and of keys, and the longest of each.
type Places = ([Array; 4], usize, usize);

/// Causal, the widths of a window to the left and to the right, softmax scale, soft-cap, sinks, sequences.
type Conditions = (bool, Option<usize>, Option<usize>, f64, Option<f64>, Option<Array>, Option<Places>);

fn described(
    (causal, window_left, window_right, softmax_scale, soft_cap, sinks, places): &Conditions,
    shape: AttentionShape,
) -> Result<DeviceCall> {
    let sequences = |(places, max_len_q, max_len_k): &Places| {
        let [q_starts, q_ends, k_starts, k_ends] = places;
        Ok::<_, Error>(Sequences {
            q_starts: view("q_starts", q_starts)?,
            q_ends: view("q_ends", q_ends)?,
            k_starts: view("k_starts", k_starts)?,
            k_ends: view("k_ends", k_ends)?,
            max_len_q: *max_len_q,
            max_len_k: *max_len_k,
        })
    };
    Ok(DeviceCall {
        shape,
        mask: Mask { causal: *causal, window_left: *window_left, window_right: *window_right },
        softmax_scale: *softmax_scale,
        soft_cap: *soft_cap,
        sinks: optional("sinks", sinks)?,
        sequences: places.as_ref().map(sequences).transpose()?,
    })
}

/// What a forward leaves for a backward: q, k, v, and for dQ in FP8 the largest P of each row, or what the rounding of the
/// output took.
type Saved = (Array, Array, Array, Option<Array>, Option<Array>);

/// What a forward takes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Forward {
    q: Array,
    k: Array,
    v: Array,
    descales: [Array; 3],
    terms: Conditions,
    out: Array,
    lse: Array,
    stats: Option<Array>,
    saved: Option<Saved>,
    accumulator: String,
    /// Cosines, sines, and whether pairs are neighbours: the cast turns q and k.
    rope: Option<(Array, Array, bool)>,
}

impl Forward {
    fn saved(&self) -> Result<Option<SavedOperands>> {
        let Some((q, k, v, row_max, residual)) = &self.saved else { return Ok(None) };
        let [q, k, v] = [("saved q", q), ("saved k", k), ("saved v", v)].map(|(name, x)| view(name, x));
        let rows = match (row_max, residual) {
            (Some(x), _) => SavedRows::RowMax(view("row_max", x)?),
            (_, Some(x)) => SavedRows::Residual(view("residual", x)?),
            _ => SavedRows::Nothing,
        };
        Ok(Some(SavedOperands { q: q?, k: k?, v: v?, rows }))
    }

    fn rope(&self) -> Result<Option<Rope>> {
        let Some((cosine, sine, interleaved)) = &self.rope else { return Ok(None) };
        let (cosine, sine) = (view("RoPE cosines", cosine)?, view("RoPE sines", sine)?);
        Ok(Some(Rope { cosine, sine, positions: None, interleaved: *interleaved }))
    }

    /// The call and its tensors.
    fn call(&self) -> Result<(DeviceCall, Tensors)> {
        let tensors = Tensors {
            q: view("q", &self.q)?,
            keys: Keys::Rows { k: view("k", &self.k)?, v: view("v", &self.v)? },
            descales: descales(&self.descales)?,
            accumulator: self.accumulator.parse()?,
            saved: self.saved()?,
            rope: self.rope()?,
            out: view("out", &self.out)?,
            lse: Some(view("lse", &self.lse)?),
            // PyTorch has no unsigned words to add to.
            stats: self.stats.as_ref().map(|stats| array_of("stats", Element::U32, stats)).transpose()?,
        };
        Ok((described(&self.terms, tensors.shape())?, tensors))
    }
}

/// What a backward takes: operands in E4M3, and the output of a forward whose sums of P V are unbiased.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Backward {
    q: Array,
    k: Array,
    v: Array,
    descales: [Array; 3],
    terms: Conditions,
    out: Array,
    lse: Array,
    d_out: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    d_sinks: Option<Array>,
    /// For dQ in FP8.
    row_max: Option<Array>,
    /// What the rounding of the output took.
    residual: Option<Array>,
    deterministic: bool,
    sums_limit: Option<usize>,
}

impl Backward {
    /// The engine as this call wants it.
    fn engine(&self, engine: &BackwardEngine) -> BackwardEngine {
        let options = BackwardOptions {
            deterministic: self.deterministic,
            sums_limit: self.sums_limit,
            keeps: match (&self.row_max, &self.residual) {
                (Some(_), _) => Keeps::Fp8Dq,
                (_, Some(_)) => Keeps::UnroundedDelta,
                _ => Keeps::Operands,
            },
        };
        engine.clone().with_options(options)
    }

    /// The call and its tensors.
    fn call(&self) -> Result<(DeviceCall, BackwardTensors)> {
        let tensors = BackwardTensors {
            q: view("q", &self.q)?,
            k: view("k", &self.k)?,
            v: view("v", &self.v)?,
            descales: descales(&self.descales)?,
            lse: view("lse", &self.lse)?,
            delta: match &self.residual {
                Some(residual) => {
                    Delta::Unrounded { out: view("out", &self.out)?, residual: view("residual", residual)? }
                }
                None => Delta::Output(view("out", &self.out)?),
            },
            d_out: view("d_out", &self.d_out)?,
            dq: view("dq", &self.dq)?,
            dk: view("dk", &self.dk)?,
            dv: view("dv", &self.dv)?,
            bounds: optional("row_max", &self.row_max)?.map(|row_max| RowBounds { row_max, value_norm: None }),
            d_sinks: optional("d_sinks", &self.d_sinks)?,
        };
        Ok((described(&self.terms, tensors.shape())?, tensors))
    }
}

/// The kernels on one device.
#[pyclass(frozen)]
pub struct Attention {
    cuda: OnDevice<Cuda>,
    backward: OnDevice<BackwardEngine>,
    /// The kernels of one call begin before the one in front of them has ended, and rely on it being their own: those of two
    /// threads must not mix on one stream.
    launching: Mutex<()>,
}

#[pymethods]
impl Attention {
    #[new]
    fn new(py: Python<'_>, device: usize) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let (cuda, backward) = (OnDevice::new(Cuda::new(&device)?), OnDevice::new(BackwardEngine::new(&device)?));
            Ok(Self { cuda, backward, launching: Mutex::new(()) })
        })
    }

    /// Whether the kernels take heads of these dimensions in causal calls, or in others, with a window, a soft-cap, sinks, and
    /// sequences.
    #[staticmethod]
    fn offers(
        d_head: usize,
        d_v: usize,
        causal: bool,
        window: bool,
        soft_cap: bool,
        sinks: bool,
        sequences: bool,
    ) -> bool {
        let shape = AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q: 1, len_k: 1, d_head, d_v };
        // SAFETY: no launch sees it. The address is none that is refused.
        let one = |element| unsafe { View::<1>::new(DevicePtr(256), element, [1], [1]) };
        let [q_starts, q_ends, k_starts, k_ends] = [Element::I32; 4].map(one);
        let call = DeviceCall {
            shape,
            mask: Mask { causal, window_left: window.then_some(0), window_right: None },
            softmax_scale: 1.0,
            soft_cap: soft_cap.then_some(1.0),
            sinks: sinks.then(|| one(Element::F32)),
            sequences: sequences.then_some(Sequences {
                q_starts,
                q_ends,
                k_starts,
                k_ends,
                max_len_q: 1,
                max_len_k: 1,
            }),
        };
        call.check().is_ok()
    }

    /// Bytes of workspace of a forward.
    fn forward_bytes(&self, py: Python<'_>, call: Forward) -> PyResult<usize> {
        let bytes = call.call().and_then(|(call, tensors)| Cuda::workspace_bytes(&call, &tensors));
        bytes.map_err(|error| raise(py, &error))
    }

    /// Puts cast and attention on the stream.
    fn forward(&self, py: Python<'_>, call: Forward, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let ((call, tensors), workspace) = (call.call()?, view("workspace", &workspace)?);
            let stream = self::stream(self.cuda.device(), stream);
            // Compilation takes seconds: other threads' calls do not wait for it.
            self.cuda.prepare(&call, &tensors)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            self.cuda.launch(&stream, &call, &tensors, &workspace)
        })
    }

    /// Puts the attention alone on the stream, on what [`Attention::forward`] left in the same workspace. For benchmarks.
    fn attend(&self, py: Python<'_>, call: Forward, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let ((call, tensors), workspace) = (call.call()?, view("workspace", &workspace)?);
            let stream = self::stream(self.cuda.device(), stream);
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            self.cuda.attend(&stream, &call, &tensors, &workspace)
        })
    }

    /// Bytes of workspace of a backward.
    fn backward_bytes(&self, py: Python<'_>, call: Backward) -> PyResult<usize> {
        let engine = call.engine(&self.backward);
        call.call().and_then(|(call, _)| engine.workspace_bytes(&call)).map_err(|error| raise(py, &error))
    }

    /// Puts a backward on the stream.
    fn backward(&self, py: Python<'_>, call: Backward, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let engine = call.engine(&self.backward);
            let ((call, tensors), workspace) = (call.call()?, view("workspace", &workspace)?);
            let stream = self::stream(self.cuda.device(), stream);
            engine.prepare(&call)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            engine.backward(&stream, &call, &tensors, &workspace)
        })
    }
}
