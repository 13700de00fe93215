//! The attention kernels, forward and backward, on rows and on pages, over tensors that Python owns.

use crate::call::{Array, Call, OnDevice as Described};
use crate::device::stream;
use crate::errors::raise;
use crate::threads::{OnDevice, on_device};
use pyo3::prelude::*;
use sigmascale::attention::{AttentionShape, Mask, PvAccumulator};
use sigmascale::cuda::{Device, DevicePtr};
use sigmascale::device::attention::{BackwardEngine, Cuda, Element, PagedEngine, Sequences, Terms, View};
use sigmascale::{Error, Result};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The kernels on one device.
#[pyclass(frozen)]
pub struct Attention {
    cuda: OnDevice<Cuda>,
    backward: OnDevice<BackwardEngine>,
    /// Those of calls on pages, without and with a check of lengths and block tables before each call.
    paged: [OnceLock<OnDevice<PagedEngine>>; 2],
    /// The kernels of one call begin before the one in front of them has ended, and rely on it being their own: those of two
    /// threads must not mix on one stream.
    launching: Mutex<()>,
}

impl Attention {
    fn paged(&self, checks: bool) -> Result<&PagedEngine> {
        let place = &self.paged[usize::from(checks)];
        if place.get().is_none() {
            let engine = PagedEngine::new(self.cuda.device())?.with_table_checks(checks);
            // Another thread may have made it meanwhile.
            let _ = place.set(OnDevice::new(engine));
        }
        Ok(place.get().expect("set above"))
    }
}

#[pymethods]
impl Attention {
    #[new]
    fn new(py: Python<'_>, device: usize) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let (cuda, backward) = (OnDevice::new(Cuda::new(&device)?), OnDevice::new(BackwardEngine::new(&device)?));
            Ok(Self { cuda, backward, paged: Default::default(), launching: Mutex::new(()) })
        })
    }

    /// Whether the kernels take heads of these dimensions in calls with these terms, by their names in `Terms`.
    #[staticmethod]
    fn offers(d_head: usize, d_v: usize, causal: bool, given: Vec<String>) -> bool {
        let shape = AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q: 1, len_k: 1, d_head, d_v };
        // SAFETY: no launch sees it. The address is none that is refused.
        let one = |element| unsafe { View::<1>::new(DevicePtr(256), element, [1], [1]) };
        let [q_starts, q_ends, k_starts, k_ends] = [Element::I32; 4].map(one);
        let has = |name: &str| given.iter().any(|term| term == name);
        let terms = Terms {
            mask: Mask {
                causal,
                window_left: has("window_left").then_some(0),
                window_right: has("window_right").then_some(0),
            },
            softmax_scale: 1.0,
            soft_cap: has("soft_cap").then_some(1.0),
            sinks: has("sinks").then(|| one(Element::F32)),
            sequences: has("sequences").then_some(Sequences {
                q_starts,
                q_ends,
                k_starts,
                k_ends,
                max_len_q: 1,
                max_len_k: 1,
            }),
        };
        Cuda::workspace_bytes(&shape, &terms, Element::Bf16, PvAccumulator::F16, true).is_ok()
    }

    /// Bytes of workspace of a forward.
    fn forward_bytes(&self, py: Python<'_>, call: Call) -> PyResult<usize> {
        let bytes = || match call.forward()? {
            Described::Rows(terms, tensors) => {
                let (shape, saves) = (call.shape()?, tensors.saved.is_some());
                Cuda::workspace_bytes(&shape, &terms, call.q.element()?, tensors.accumulator, saves)
            }
            Described::Pages(_, tensors) => PagedEngine::workspace_bytes(&tensors),
        };
        bytes().map_err(|error| raise(py, &error))
    }

    /// Puts cast and attention on the stream, or append and attention of a call on pages.
    fn forward(&self, py: Python<'_>, call: Call, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let (described, workspace) = (call.forward()?, workspace.view::<1>("workspace")?);
            let stream = self::stream(self.cuda.device(), stream);
            // Compilation takes seconds: other threads' calls do not wait for it.
            match described {
                Described::Rows(terms, tensors) => {
                    self.cuda.prepare(&terms, &tensors)?;
                    let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
                    self.cuda.launch(&stream, &terms, &tensors, &workspace)
                }
                Described::Pages(terms, tensors) => {
                    let engine = self.paged(call.checks_pages())?;
                    engine.prepare(&tensors, &workspace)?;
                    let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
                    engine.forward(&stream, &tensors, terms.mask.causal, terms.softmax_scale, &workspace)
                }
            }
        })
    }

    /// Puts the attention alone on the stream, on what [`Attention::forward`] left in the same workspace. For benchmarks.
    fn attend(&self, py: Python<'_>, call: Call, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let Described::Rows(terms, tensors) = call.forward()? else {
                return Err(Error::argument("attend() takes calls on rows, not on pages"));
            };
            let (workspace, stream) = (workspace.view("workspace")?, self::stream(self.cuda.device(), stream));
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            self.cuda.engine().attend(&stream, &terms, &tensors, &workspace)
        })
    }

    /// Bytes of workspace of a backward.
    fn backward_bytes(&self, py: Python<'_>, call: Call) -> PyResult<usize> {
        let engine = self.backward.clone().with_options(call.backward_options());
        let bytes = |terms| engine.workspace_bytes(&call.shape()?, &terms);
        call.device_terms().and_then(bytes).map_err(|error| raise(py, &error))
    }

    /// Puts a backward on the stream.
    fn backward(&self, py: Python<'_>, call: Call, workspace: Array, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let engine = self.backward.clone().with_options(call.backward_options());
            let (terms, tensors, workspace) = (call.device_terms()?, call.backward()?, workspace.view("workspace")?);
            let stream = self::stream(self.cuda.device(), stream);
            engine.prepare(&call.shape()?, &terms)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            engine.backward(&stream, &terms, &tensors, &workspace)
        })
    }
}
