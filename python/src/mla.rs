//! Scales of layers with multi-head latent attention (MLA), from tensors in host memory under the names that they have in the
//! model.
//!
//! Attention runs on the expanded form: q and k of `d_nope + d_rope` and v of `d_value` channels for each head.

use crate::cpu_scales::{Scales, values};
use crate::device::{dtype, results, stream};
use crate::errors::raise;
use crate::threads::{OnDevice, beside, on_device};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use sigmascale::bound::{BoundKind, HeadBound, MlaBounds, round_up};
use sigmascale::cuda::{Device, DevicePtr};
use sigmascale::device::scale::{self, DeviceTensor, MlaInput};
use sigmascale::model::{LayerStream, Layout};
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::{Descale, Error, Result};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A tensor: its name, its type as safetensors files have it, its shape, and address and bytes of its contiguous values.
type Tensor = (String, String, Vec<usize>, u64, usize);

/// Which tensors each layer's scales depend on, as JSON: of each entry one of the names, without prefix.
pub fn needs(config: &str, name: &str) -> Result<Vec<serde_json::Value>> {
    let stream = LayerStream::new(config.as_bytes(), Path::new(name), &[])?;
    Ok((0..stream.spec().layers.len()).map(|layer| json!(stream.wanted(layer))).collect())
}

/// A model with latent attention: its config, parsed once for all of its layers, and the names of all of its tensors.
#[pyclass(frozen)]
pub struct MlaModel {
    layout: Layout,
    config: String,
    name: String,
    names: Vec<String>,
}

#[pymethods]
impl MlaModel {
    #[new]
    fn new(py: Python<'_>, config: String, name: String, names: Vec<String>) -> PyResult<Self> {
        let layout =
            Layout::from_config_json(config.as_bytes(), Path::new(&name)).map_err(|error| raise(py, &error))?;
        Ok(Self { layout, config, name, names })
    }

    /// Scales of one layer on the host, as [`host_scales`](crate::cpu_scales::host_scales) has them. The caller keeps the tensors given
    /// alive and unchanged until this returns.
    fn scales(&self, py: Python<'_>, layer: usize, tensors: Vec<Tensor>, logits: bool, eta: f64) -> PyResult<Scales> {
        beside(py, || {
            let mut stream = LayerStream::new(self.config.as_bytes(), Path::new(&self.name), &self.names)?;
            for (tensor, kind, shape, address, size) in tensors {
                let dtype = serde_json::from_value(json!(kind))
                    .map_err(|_| Error::argument(format_args!("{tensor} has type {kind}, which is not read")))?;
                // SAFETY: 1. the package passes address and size of a contiguous tensor of the host; 2. it holds the tensor,
                // and nobody writes it, until the call returns.
                let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, size) };
                stream.push(&tensor, dtype, &shape, bytes.to_vec())?;
            }
            if !stream.is_due(layer) {
                let missing = stream.wanted(layer).iter().map(|names| names[0].as_str()).collect::<Vec<_>>().join(", ");
                return Err(Error::argument(format_args!("layer {layer} needs all of {missing}")));
            }
            let bounds = if logits {
                MlaBounds::new(stream.spec(), stream.layer(layer)?)?
            } else {
                MlaBounds::operands(stream.spec(), stream.layer(layer)?)?
            };
            scales(&bounds, stream.spec().layers[layer].n_q_heads, eta)
        })
    }
}

fn scales(bounds: &MlaBounds, heads: usize, eta: f64) -> Result<Scales> {
    let expanded = &bounds.expanded;
    let plan = ScalePlan::from_bounds(expanded, BoundKind::WorstCase, eta, Granularity::Head)?;
    let missing = || Error::unsupported("values of latent attention have no bound");
    let own = &plan.operands;
    let (v, o) = own.v.as_ref().zip(own.o.as_ref()).ok_or_else(missing)?;
    let descales = [&own.q, &own.k, v, o].into_iter().flatten().map(|descale| descale.get()).collect();
    let v = expanded.v.as_ref().ok_or_else(missing)?;
    let operands = [&expanded.q, &expanded.k, v].into_iter().flatten().map(|bound| round_up(bound.rounded)).collect();
    // Their logits have no single operator, and so no norm of one.
    let bound = |(head, descale): (&_, &Descale)| HeadBound { descale: descale.get(), ..HeadBound::new(head) };
    let logits: Vec<f32> = expanded.heads.iter().zip(&plan.logit_descale).map(bound).flat_map(values).collect();
    debug_assert!(logits.is_empty() || logits.len() == 8 * heads, "a row for each head");
    Ok((descales, operands, (!logits.is_empty()).then_some(logits)))
}

/// A layer on a device: its model, its place among the layers with attention, and its tensors: name, type, shape, strides in
/// values, address.
type DeviceLayer = (Py<MlaModel>, usize, Vec<(String, String, Vec<usize>, Vec<i64>, u64)>);

/// Operand descales of layers with latent attention, from weights on a device.
///
/// The caller (the package) keeps the weights alive and in place, and orders calls by streams.
#[pyclass(frozen)]
pub struct MlaEngine {
    engine: OnDevice<Mutex<scale::MlaEngine>>,
    device: OnDevice<Device>,
}

#[pymethods]
impl MlaEngine {
    #[new]
    fn new(py: Python<'_>, device: usize, layers: Vec<DeviceLayer>) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let inputs = layers.iter().map(input).collect::<Result<Vec<_>, Error>>()?;
            // SAFETY: 1. the package reads addresses, shapes and strides off live tensors of this device; 2. it checks
            // at every launch that they still lie where they did, and orders launches on streams.
            let engine = unsafe { scale::MlaEngine::new(&device, &inputs)? };
            Ok(Self { engine: OnDevice::new(Mutex::new(engine)), device: OnDevice::new(device) })
        })
    }

    /// Whether it can take these layers in place of those that it was made with.
    fn fits(&self, py: Python<'_>, layers: Vec<DeviceLayer>) -> PyResult<bool> {
        on_device(py, || {
            let layers = layers.iter().map(input).collect::<Result<Vec<_>, Error>>()?;
            Ok(self.engine.lock().unwrap_or_else(PoisonError::into_inner).fits(&layers))
        })
    }

    /// Puts the work on a stream (its handle as an integer): of the layers that it was made with, or of others in place
    /// of these from now on.
    #[pyo3(signature = (stream, layers = None))]
    fn launch(&self, py: Python<'_>, stream: u64, layers: Option<Vec<DeviceLayer>>) -> PyResult<()> {
        on_device(py, || {
            let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
            let stream = self::stream(&self.device, stream);
            if let Some(layers) = &layers {
                let layers = layers.iter().map(input).collect::<Result<Vec<_>, Error>>()?;
                // SAFETY: the package reads addresses off live tensors of this device, gives layers with every launch
                // once it has given any, and keeps the memory of a capture for its replays.
                unsafe { engine.place(&stream, &layers)? };
            }
            engine.descales(&stream)
        })
    }

    /// As [`results`], without bounds of logits.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        results(py, engine.head_descales(), engine.operand_bounds(), engine.status(), None)
    }
}

fn input((model, layer, tensors): &DeviceLayer) -> Result<MlaInput, Error> {
    let mut found = Vec::with_capacity(tensors.len());
    for (name, kind, shape, strides, address) in tensors {
        let (ptr, dtype) = (DevicePtr(*address), dtype(kind)?);
        found.push((name, DeviceTensor { ptr, dtype, shape: shape.clone(), strides: strides.clone() }));
    }
    // Names have a prefix.
    let find = |wanted: &str| {
        let is =
            |name: &str| name.strip_suffix(wanted).is_some_and(|before| before.is_empty() || before.ends_with('.'));
        found.iter().find(|(name, _)| is(name)).map(|(_, tensor)| tensor.clone())
    };
    MlaInput::new(&model.get().layout, *layer, find)
}
