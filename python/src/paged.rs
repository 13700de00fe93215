//! Attention over paged caches in E4M3, over tensors that Python owns.

use crate::attention::{Array, array_of, descales, optional, view};
use crate::device::stream;
use crate::errors::raise;
use crate::work::{OnDevice, on_device};
use pyo3::prelude::*;
use sigmascale::attention::{Mask, PvAccumulator};
use sigmascale::cuda::Device;
use sigmascale::device::attention::{Cuda, DeviceCall, Element, Keys, NewTokens, Pages, Rope, Tensors, ValuePages};
use sigmascale::{Error, Result};
use std::sync::{Mutex, PoisonError};

/// What a call takes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Call {
    q: Array,
    k_pages: Array,
    /// Of six dimensions where they are tiled, of four where they are rows.
    v_pages: Array,
    block_table: Array,
    lengths: Array,
    /// New keys and values.
    new: Option<[Array; 2]>,
    /// Cosines and sines.
    rope: Option<[Array; 2]>,
    interleaved: bool,
    out: Array,
    lse: Option<Array>,
    stats: Option<Array>,
    descales: [Array; 3],
    causal: bool,
    softmax_scale: f64,
}

impl Call {
    /// The call and its tensors.
    fn call(&self) -> Result<(DeviceCall, Tensors)> {
        let v = match self.v_pages.2.len() {
            6 => ValuePages::Tiled(view("v pages", &self.v_pages)?),
            _ => ValuePages::Rows(view("v pages", &self.v_pages)?),
        };
        let new = |[k, v]: &[Array; 2]| Ok::<_, Error>(NewTokens { k: view("new k", k)?, v: view("new v", v)? });
        let rope = |[cosine, sine]: &[Array; 2]| {
            let (cosine, sine) = (view("RoPE cosines", cosine)?, view("RoPE sines", sine)?);
            Ok::<_, Error>(Rope { cosine, sine, positions: None, interleaved: self.interleaved })
        };
        let tensors = Tensors {
            q: view("q", &self.q)?,
            keys: Keys::Pages(Pages {
                k: view("k pages", &self.k_pages)?,
                v,
                block_table: view("block table", &self.block_table)?,
                lengths: view("lengths", &self.lengths)?,
                new: self.new.as_ref().map(new).transpose()?,
            }),
            descales: descales(&self.descales)?,
            rope: self.rope.as_ref().map(rope).transpose()?,
            accumulator: PvAccumulator::default(),
            saved: None,
            out: view("out", &self.out)?,
            lse: optional("lse", &self.lse)?,
            stats: self.stats.as_ref().map(|stats| array_of("stats", Element::U32, stats)).transpose()?,
        };
        let call = DeviceCall {
            mask: Mask { causal: self.causal, ..Mask::NONE },
            softmax_scale: self.softmax_scale,
            ..DeviceCall::causal(tensors.shape())
        };
        Ok((call, tensors))
    }
}

/// The kernels on one device.
#[pyclass(frozen)]
pub struct Paged {
    /// Without and with a check of lengths and block tables before each call.
    engines: [OnDevice<Cuda>; 2],
    /// As in `Attention`.
    launching: Mutex<()>,
}

#[pymethods]
impl Paged {
    #[new]
    fn new(py: Python<'_>, device: usize) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let engine = |checks| Cuda::new(&device).map(|x| OnDevice::new(x.with_table_checks(checks)));
            Ok(Self { engines: [engine(false)?, engine(true)?], launching: Mutex::new(()) })
        })
    }

    /// Bytes of workspace of a call.
    fn bytes(&self, py: Python<'_>, call: Call) -> PyResult<usize> {
        call.call()
            .and_then(|(call, tensors)| Cuda::workspace_bytes(&call, &tensors))
            .map_err(|error| raise(py, &error))
    }

    /// Puts append and attention on the stream.
    fn forward(&self, py: Python<'_>, call: Call, workspace: Array, check: bool, stream: u64) -> PyResult<()> {
        on_device(py, || {
            let engine = &self.engines[usize::from(check)];
            let ((call, tensors), workspace) = (call.call()?, view("workspace", &workspace)?);
            let stream = self::stream(engine.device(), stream);
            // Compilation takes seconds: other threads' calls do not wait for it.
            engine.prepare(&call, &tensors)?;
            let _one = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
            engine.launch(&stream, &call, &tensors, &workspace)
        })
    }
}
