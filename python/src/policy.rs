//! Scaling policies whose memory is on the device.

use crate::device::stream;
use crate::errors::raise;
use crate::work::{OnDevice, on_device};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sigmascale::Error;
use sigmascale::bound::HeadBound;
use sigmascale::bound::Tail;
use sigmascale::cuda::Device;
use sigmascale::device::policy::{Bounds, DevicePlan};
use sigmascale::model::AttentionSpec;
use sigmascale::policy::{PolicyKind, PolicyState, Tensor};
use sigmascale::stats::stats_words;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One policy for all layers of a model.
#[pyclass(frozen)]
pub struct DevicePolicy {
    plan: OnDevice<Mutex<DevicePlan>>,
    device: OnDevice<Device>,
}

impl DevicePolicy {
    fn plan(&self) -> MutexGuard<'_, DevicePlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl DevicePolicy {
    /// `spec` is an attention spec as JSON; `bounded` for policies that plan from bounds, which are written to the addresses
    /// of `results`.
    #[new]
    fn new(py: Python<'_>, device: usize, spec: &str, policy: &str, bounded: bool) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let spec: AttentionSpec =
                serde_json::from_str(spec).map_err(|e| Error::argument(format_args!("no attention spec: {e}")))?;
            let kinds = PolicyKind::parse_list(policy)?;
            let &[kind] = &kinds[..] else {
                return Err(Error::argument(format_args!("{policy} names more than one policy")));
            };
            let bounds = if bounded { Bounds::Host } else { Bounds::None };
            let plan = DevicePlan::new(&device, &spec, kind.into(), &Tail::default(), bounds)?;
            Ok(Self { plan: OnDevice::new(Mutex::new(plan)), device: OnDevice::new(device) })
        })
    }

    /// Takes in the statistics of the calls that the last plan was for; before its bounds are overwritten.
    fn observe(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        on_device(py, || self.plan().engine().observe(&self::stream(&self.device, stream)))
    }

    /// Plans, from memory or from the bounds as they are.
    fn launch(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        on_device(py, || self.plan().engine().plan(&self::stream(&self.device, stream)))
    }

    /// Addresses and lengths: `stats` u32 `[layer][word]`, `descales` f32 `[layer][logit n_q, q, k, v, o n_kv each]`; where
    /// the policy is bounded also `bounds` f32 `[layer][n_q][word]` and `operands` f32 `[layer][q, k, v][n_kv]`. Each layer has
    /// its own heads, without padding.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let results = PyDict::new(py);
        let plan = self.plan();
        let heads = &plan.engine().setup().heads;
        let (all_q, all_kv) = (heads.all_q(), heads.all_kv());
        let places = || Ok::<_, Error>((plan.stats(0)?, plan.descales(0, Tensor::Logit)?));
        let (stats, descales) = places().map_err(|error| raise(py, &error))?;
        results.set_item("stats", (stats.0, stats_words(all_q, all_kv)))?;
        results.set_item("descales", (descales.0, all_q + 4 * all_kv))?;
        if let Some((heads, operands)) = plan.engine().host_bounds() {
            results.set_item("bounds", (heads.0, all_q * (size_of::<HeadBound>() / 4)))?;
            results.set_item("operands", (operands.0, 3 * all_kv))?;
        }
        Ok(results)
    }

    /// The state as JSON, the same that the host's policies save. Waits for the device.
    fn save(&self, py: Python<'_>) -> PyResult<String> {
        on_device(py, || {
            let state = self.plan().save()?;
            serde_json::to_string(&state).map_err(|e| Error::non_finite(format_args!("the state cannot be saved: {e}")))
        })
    }

    /// Goes on from a state; addresses stay.
    fn load(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        on_device(py, || {
            let state: PolicyState =
                serde_json::from_str(state).map_err(|e| Error::mismatch(format_args!("no policy state: {e}")))?;
            self.plan().load(state)
        })
    }
}
