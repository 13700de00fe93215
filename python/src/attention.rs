//! The fused attention kernel over tensors that Python owns.

use crate::device::stream;
use crate::errors::raise;
use crate::work::{OnDevice, on_device};
use pyo3::prelude::*;
use sigmascale::attention::{AttentionCall, AttentionShape, Mask};
use sigmascale::cuda::{Device, DevicePtr};
use sigmascale::device::attention::{Cuda, Descales, Element, Tensors, View};
use sigmascale::stats::stats_words;
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

/// What one call takes.
#[derive(FromPyObject)]
pub struct Call {
    #[pyo3(item)]
    q: Array,
    #[pyo3(item)]
    k: Array,
    #[pyo3(item)]
    v: Array,
    #[pyo3(item)]
    out: Array,
    #[pyo3(item)]
    lse: Option<Array>,
    #[pyo3(item)]
    stats: Option<Array>,
    #[pyo3(item)]
    descales: [Option<Array>; 3],
    #[pyo3(item)]
    logit_descale: Option<Array>,
    #[pyo3(item)]
    workspace: Array,
    #[pyo3(item)]
    causal: bool,
    #[pyo3(item)]
    softmax_scale: f64,
    #[pyo3(item)]
    stream: u64,
}

/// The kernel on one device.
#[pyclass(frozen)]
pub struct Attention {
    cuda: OnDevice<Cuda>,
    /// Cast and attention of one call share a workspace: those of two threads must not mix on one stream.
    launching: Mutex<()>,
}

fn shape(q: &[usize], k: &[usize]) -> Result<AttentionShape> {
    let (&[batch, len_q, n_q_heads, d_head], &[_, len_k, n_kv_heads, _]) = (q, k) else {
        return Err(Error::argument("q and k must be (batch, length, heads, d_head)"));
    };
    Ok(AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head })
}

#[pymethods]
impl Attention {
    #[new]
    fn new(py: Python<'_>, device: usize) -> PyResult<Self> {
        let cuda = on_device(py, || Device::open(device).and_then(|device| Cuda::new(&device)).map(OnDevice::new))?;
        Ok(Self { cuda, launching: Mutex::new(()) })
    }

    /// Bytes of workspace and words of telemetry of a call.
    #[staticmethod]
    fn sizes(py: Python<'_>, q: Vec<usize>, k: Vec<usize>, dtype: &str) -> PyResult<(usize, usize)> {
        let sizes = || {
            let shape = shape(&q, &k)?;
            let call = AttentionCall::causal(shape);
            let bytes = Cuda::workspace_bytes(&call, element(dtype)?)?;
            Ok::<_, Error>((bytes, stats_words(shape.n_q_heads, shape.n_kv_heads)))
        };
        sizes().map_err(|error| raise(py, &error))
    }

    /// Puts cast and attention on the stream.
    fn forward(&self, py: Python<'_>, call: Call) -> PyResult<()> {
        on_device(py, || {
            let shape = shape(&call.q.2, &call.k.2)?;
            let mask = if call.causal { Mask::CAUSAL } else { Mask::NONE };
            let [q, k, v] = &call.descales;
            let row = |name: &str, array: &Option<Array>| array.as_ref().map(|a| view::<2>(name, a)).transpose();
            let tensors = Tensors {
                q: view("q", &call.q)?,
                k: view("k", &call.k)?,
                v: view("v", &call.v)?,
                descales: Descales {
                    q: row("q_descale", q)?,
                    k: row("k_descale", k)?,
                    v: row("v_descale", v)?,
                    o: None,
                    logit: call.logit_descale.as_ref().map(|a| view::<1>("logit_descale", a)).transpose()?,
                },
                rope: None,
                out: view("out", &call.out)?,
                lse: call.lse.as_ref().map(|a| view::<3>("lse", a)).transpose()?,
                stats: call.stats.as_ref().map(|a| view::<1>("stats", a)).transpose()?,
            };
            let workspace = view::<1>("workspace", &call.workspace)?;
            let stream = stream(self.cuda.device(), call.stream);
            let call = AttentionCall { mask, softmax_scale: call.softmax_scale, ..AttentionCall::causal(shape) };
            // Compilation takes seconds: other threads' calls do not wait for it.
            self.cuda.prepare(&call, &tensors)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            self.cuda.launch(&stream, &call, &tensors, &workspace)
        })
    }
}
