//! The attention kernels, forward and backward, on rows and on pages, over tensors that Python owns.

use crate::call::{Array, Call};
use crate::device::stream;
use crate::errors::raise;
use crate::threads::{OnDevice, on_device};
use pyo3::prelude::*;
use sigmascale::attention::AttentionShape;
use sigmascale::cuda::Device;
use sigmascale::device::attention::{BackwardEngine, Cuda, DeviceCall};
use std::sync::{Mutex, PoisonError};

/// The kernels on one device.
#[pyclass(frozen)]
pub struct Attention {
    /// As is fastest; with a check of lengths and block tables before each call on pages; without splits of keys on rows.
    cuda: [OnDevice<Cuda>; 3],
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
            let cuda = |checks, split| {
                Cuda::new(&device).map(|cuda| OnDevice::new(cuda.with_table_checks(checks).with_split(split)))
            };
            let backward = OnDevice::new(BackwardEngine::new(&device)?);
            Ok(Self {
                cuda: [cuda(false, true)?, cuda(true, true)?, cuda(false, false)?],
                backward,
                launching: Mutex::new(()),
            })
        })
    }

    /// Whether the kernels take heads of these dimensions; they do so with every term.
    #[staticmethod]
    fn offers(d_head: usize, d_v: usize) -> bool {
        let shape = AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q: 1, len_k: 1, d_head, d_v };
        DeviceCall::causal(shape).check().is_ok()
    }

    /// Bytes of workspace of a forward.
    fn forward_bytes(&self, py: Python<'_>, call: Call) -> PyResult<usize> {
        let bytes = call.forward().and_then(|(call, tensors)| Cuda::workspace_bytes(&call, &tensors));
        bytes.map_err(|error| raise(py, &error))
    }

    /// Puts cast and attention on the stream, or append and attention of a call on pages.
    fn forward(&self, py: Python<'_>, call: Call, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let cuda = &self.cuda[if call.is_whole() { 2 } else { usize::from(call.checks_pages()) }];
            let ((call, tensors), workspace) = (call.forward()?, workspace.view("workspace")?);
            let stream = self::stream(cuda.device(), stream);
            // Compilation takes seconds: other threads' calls do not wait for it.
            cuda.prepare(&call, &tensors)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            cuda.launch(&stream, &call, &tensors, &workspace)
        })
    }

    /// Puts the attention alone on the stream, on what [`Attention::forward`] left in the same workspace. For benchmarks.
    fn attend(&self, py: Python<'_>, call: Call, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let [cuda, ..] = &self.cuda;
            let ((call, tensors), workspace) = (call.forward()?, workspace.view("workspace")?);
            let stream = self::stream(cuda.device(), stream);
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            cuda.attend(&stream, &call, &tensors, &workspace)
        })
    }

    /// Bytes of workspace of a backward.
    fn backward_bytes(&self, py: Python<'_>, call: Call) -> PyResult<usize> {
        let bytes = || {
            let (call, _, options) = call.backward()?;
            self.backward.clone().with_options(options).workspace_bytes(&call)
        };
        bytes().map_err(|error| raise(py, &error))
    }

    /// Puts a backward on the stream.
    fn backward(&self, py: Python<'_>, call: Call, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let ((call, tensors, options), workspace) = (call.backward()?, workspace.view("workspace")?);
            let engine = self.backward.clone().with_options(options);
            let stream = self::stream(engine.device(), stream);
            engine.prepare(&call)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            engine.backward(&stream, &call, &tensors, &workspace)
        })
    }
}
