//! Scaling policies whose memory is on the device.

use crate::device::{Layer, stream};
use crate::errors::raise;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sigmascale::bound::Tail;
use sigmascale::cuda::Device;
use sigmascale::cuda::scale::ScaleEngine;
use sigmascale::device_plan::{Bounds, DevicePlan};
use sigmascale::model::AttentionSpec;
use sigmascale::policy::{PolicyKind, PolicyState, Tensor};
use sigmascale::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One policy for all layers of a model.
#[pyclass(frozen)]
pub struct DevicePolicy {
    plan: Mutex<DevicePlan>,
    device: Device,
    has_weights: bool,
    spec: AttentionSpec,
}

impl DevicePolicy {
    fn plan(&self) -> MutexGuard<'_, DevicePlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl DevicePolicy {
    /// `spec` is an attention spec as JSON; `layers` are given to policies that plan from bounds.
    #[new]
    fn new(py: Python<'_>, device: usize, spec: &str, policy: &str, layers: Option<Vec<Layer>>) -> PyResult<Self> {
        let made = py.detach(|| {
            let device = Device::open(device)?;
            let spec: AttentionSpec =
                serde_json::from_str(spec).map_err(|e| Error::argument(format_args!("no attention spec: {e}")))?;
            let kinds = PolicyKind::parse_list(policy)?;
            let &[kind] = &kinds[..] else {
                return Err(Error::argument(format_args!("{policy} names more than one policy")));
            };
            let bounds = match &layers {
                None => Bounds::None,
                Some(layers) => {
                    let inputs = layers.iter().map(Layer::input).collect::<Result<Vec<_>>>()?;
                    // SAFETY: as for the engine of its own, see `device`.
                    Bounds::Weights(Box::new(unsafe { ScaleEngine::new(&device, &inputs, true)? }))
                }
            };
            let plan = DevicePlan::new(&device, &spec, kind.into(), &Tail::default(), bounds)?;
            Ok::<_, Error>(Self { plan: Mutex::new(plan), device, has_weights: layers.is_some(), spec })
        });
        made.map_err(|error| raise(py, &error))
    }

    /// Takes in the statistics (if `observe`), reads the weights where there are any, and plans.
    fn launch(&self, py: Python<'_>, stream: u64, observe: bool) -> PyResult<()> {
        let done = py.detach(|| {
            let plan = self.plan();
            let stream = self::stream(&self.device, stream);
            if observe {
                plan.engine().observe(&stream)?;
            }
            if self.has_weights {
                plan.engine().update_bounds(&stream)?;
            }
            plan.engine().plan(&stream)
        });
        done.map_err(|error: Error| raise(py, &error))
    }

    /// Addresses and lengths: `stats` u32 `[layer][word]`, `descales` f32 `[layer][logit n_q, q, k, v, o n_kv each]`.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let results = PyDict::new(py);
        let (layers, n_q, n_kv) = (self.spec.layers, self.spec.n_q_heads, self.spec.n_kv_heads);
        let plan = self.plan();
        let places = || Ok::<_, Error>((plan.stats(0)?, plan.descales(0, Tensor::Logit)?));
        let (stats, descales) = places().map_err(|error| raise(py, &error))?;
        results.set_item("stats", (stats.0, layers * 8 * (n_q + n_kv)))?;
        results.set_item("descales", (descales.0, layers * (n_q + 4 * n_kv)))?;
        Ok(results)
    }

    /// The state as JSON, the same that the host's policies save. Waits for the device.
    fn save(&self, py: Python<'_>) -> PyResult<String> {
        let saved = py.detach(|| {
            let state = self.plan().save()?;
            serde_json::to_string(&state).map_err(|e| Error::non_finite(format_args!("the state cannot be saved: {e}")))
        });
        saved.map_err(|error| raise(py, &error))
    }

    /// Goes on from a state; addresses stay.
    fn load(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        let done = py.detach(|| {
            let state: PolicyState =
                serde_json::from_str(state).map_err(|e| Error::mismatch(format_args!("no policy state: {e}")))?;
            self.plan().load(state)
        });
        done.map_err(|error| raise(py, &error))
    }
}
