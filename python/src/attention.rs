//! The attention kernels, forward and backward, over tensors that Python owns.

use crate::device::stream;
use crate::errors::raise;
use crate::work::{OnDevice, on_device};
use pyo3::prelude::*;
use sigmascale::attention::{AttentionCall, AttentionShape, Mask, PvAccumulator};
use sigmascale::cuda::{Device, DevicePtr};
use sigmascale::device::attention::{
    BackwardEngine, BackwardTensors, Cuda, Delta, Descales, Element, SavedOperands, Tensors, View,
};
use sigmascale::{Error, Result};
use std::sync::{Mutex, PoisonError};

/// A tensor: address, type, shape and strides in elements.
type Array = (u64, String, Vec<usize>, Vec<i64>);

fn element(name: &str) -> Result<Element> {
    match name {
        "bfloat16" => Ok(Element::Bf16),
        "float16" => Ok(Element::F16),
        "float32" => Ok(Element::F32),
        "float8_e4m3fn" => Ok(Element::E4m3),
        "int32" => Ok(Element::U32),
        "uint8" => Ok(Element::U8),
        other => Err(Error::argument(format_args!("tensors of type {other} are not taken"))),
    }
}

fn view<const R: usize>(name: &str, (ptr, dtype, shape, strides): &Array) -> Result<View<R>> {
    let (Ok(shape), Ok(strides)) = (<[usize; R]>::try_from(&shape[..]), <[i64; R]>::try_from(&strides[..])) else {
        return Err(Error::argument(format_args!("{name} must have {R} dimensions, not {}", shape.len())));
    };
    // SAFETY: 1. the package reads these off a live tensor of this device; 2. PyTorch's allocator keeps its memory until
    // the work of its stream has run; 3. outputs are tensors of the package's own, and work is ordered by streams.
    Ok(unsafe { View::new(DevicePtr(*ptr), element(dtype)?, shape, strides) })
}

fn optional<const R: usize>(name: &str, array: &Option<Array>) -> Result<Option<View<R>>> {
    array.as_ref().map(|array| view(name, array)).transpose()
}

fn descales([q, k, v]: &[Array; 3]) -> Result<Descales> {
    let [q, k, v] = [("q descale", q), ("k descale", k), ("v descale", v)].map(|(name, x)| view(name, x).map(Some));
    Ok(Descales { q: q?, k: k?, v: v?, o: None, logit: None })
}

fn call(q: &Array, k: &Array, causal: bool, softmax_scale: f64) -> Result<AttentionCall> {
    let (&[batch, len_q, n_q_heads, d_head], &[_, len_k, n_kv_heads, _]) = (&q.2[..], &k.2[..]) else {
        return Err(Error::argument("q and k must be (batch, length, heads, d_head)"));
    };
    let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head };
    let mask = if causal { Mask::CAUSAL } else { Mask::NONE };
    Ok(AttentionCall { mask, softmax_scale, ..AttentionCall::causal(shape) })
}

/// What a forward takes.
#[derive(FromPyObject)]
pub struct Forward {
    #[pyo3(item)]
    q: Array,
    #[pyo3(item)]
    k: Array,
    #[pyo3(item)]
    v: Array,
    #[pyo3(item)]
    out: Array,
    #[pyo3(item)]
    lse: Array,
    #[pyo3(item)]
    stats: Option<Array>,
    #[pyo3(item)]
    descales: [Array; 3],
    #[pyo3(item)]
    saved: Option<[Array; 3]>,
    #[pyo3(item)]
    accumulator: String,
    #[pyo3(item)]
    causal: bool,
    #[pyo3(item)]
    softmax_scale: f64,
}

impl Forward {
    fn accumulator(&self) -> Result<PvAccumulator> {
        self.accumulator.parse()
    }

    fn saved(&self) -> Result<Option<SavedOperands>> {
        let saved = |[q, k, v]: &[Array; 3]| {
            Ok(SavedOperands { q: view("saved q", q)?, k: view("saved k", k)?, v: view("saved v", v)? })
        };
        self.saved.as_ref().map(saved).transpose()
    }

    fn call(&self) -> Result<AttentionCall> {
        call(&self.q, &self.k, self.causal, self.softmax_scale)
    }

    fn tensors(&self) -> Result<Tensors> {
        Ok(Tensors {
            q: view("q", &self.q)?,
            k: view("k", &self.k)?,
            v: view("v", &self.v)?,
            descales: descales(&self.descales)?,
            accumulator: self.accumulator()?,
            saved: self.saved()?,
            rope: None,
            out: view("out", &self.out)?,
            lse: Some(view("lse", &self.lse)?),
            stats: optional("stats", &self.stats)?,
        })
    }

    fn bytes(&self) -> Result<usize> {
        Cuda::workspace_bytes(&self.call()?, element(&self.q.1)?, self.accumulator()?, self.saved.is_some())
    }
}

/// What a backward takes: operands in E4M3, and the output of a forward whose sums of P V are unbiased.
#[derive(FromPyObject)]
pub struct Backward {
    #[pyo3(item)]
    q: Array,
    #[pyo3(item)]
    k: Array,
    #[pyo3(item)]
    v: Array,
    #[pyo3(item)]
    out: Array,
    #[pyo3(item)]
    lse: Array,
    #[pyo3(item)]
    d_out: Array,
    #[pyo3(item)]
    dq: Array,
    #[pyo3(item)]
    dk: Array,
    #[pyo3(item)]
    dv: Array,
    #[pyo3(item)]
    descales: [Array; 3],
    #[pyo3(item)]
    causal: bool,
    #[pyo3(item)]
    softmax_scale: f64,
    #[pyo3(item)]
    deterministic: bool,
}

impl Backward {
    fn call(&self) -> Result<AttentionCall> {
        call(&self.q, &self.k, self.causal, self.softmax_scale)
    }

    fn tensors(&self) -> Result<BackwardTensors> {
        Ok(BackwardTensors {
            q: view("q", &self.q)?,
            k: view("k", &self.k)?,
            v: view("v", &self.v)?,
            descales: descales(&self.descales)?,
            lse: view("lse", &self.lse)?,
            delta: Delta::Output(view("out", &self.out)?),
            d_out: view("d_out", &self.d_out)?,
            dq: view("dq", &self.dq)?,
            dk: view("dk", &self.dk)?,
            dv: view("dv", &self.dv)?,
        })
    }
}

/// The kernels on one device.
#[pyclass(frozen)]
pub struct Attention {
    cuda: OnDevice<Cuda>,
    /// Without and with a fixed order of the sums of dQ.
    backward: [OnDevice<BackwardEngine>; 2],
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
            let engine = |deterministic| {
                BackwardEngine::new(&device).map(|engine| OnDevice::new(engine.with_deterministic(deterministic)))
            };
            let (cuda, backward) = (OnDevice::new(Cuda::new(&device)?), [engine(false)?, engine(true)?]);
            Ok(Self { cuda, backward, launching: Mutex::new(()) })
        })
    }

    /// Bytes of workspace of a forward.
    fn forward_bytes(&self, py: Python<'_>, call: Forward) -> PyResult<usize> {
        call.bytes().map_err(|error| raise(py, &error))
    }

    /// Puts cast and attention on the stream.
    fn forward(&self, py: Python<'_>, call: Forward, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let (tensors, workspace) = (call.tensors()?, view::<1>("workspace", &workspace)?);
            let (call, stream) = (call.call()?, self::stream(self.cuda.device(), stream));
            // Compilation takes seconds: other threads' calls do not wait for it.
            self.cuda.prepare(&call, &tensors)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            self.cuda.launch(&stream, &call, &tensors, &workspace)
        })
    }

    /// Bytes of workspace of a backward.
    fn backward_bytes(&self, py: Python<'_>, call: Backward) -> PyResult<usize> {
        let engine = &self.backward[usize::from(call.deterministic)];
        call.call().and_then(|call| engine.workspace_bytes(&call)).map_err(|error| raise(py, &error))
    }

    /// Puts a backward on the stream.
    fn backward(&self, py: Python<'_>, call: Backward, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let engine = &self.backward[usize::from(call.deterministic)];
            let (tensors, workspace) = (call.tensors()?, view::<1>("workspace", &workspace)?);
            let (call, stream) = (call.call()?, self::stream(self.cuda.device(), stream));
            engine.prepare(&call)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            engine.backward(&stream, &call, &tensors, &workspace)
        })
    }
}
