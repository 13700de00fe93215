//! Policies by their parameters, and those whose memory is on the device.

use crate::device::stream;
use crate::errors::raise;
use crate::threads::{OnDevice, on_device};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use sigmascale::Error;
use sigmascale::Result;
use sigmascale::bound::HeadBound;
use sigmascale::bound::Tail;
use sigmascale::cuda::Device;
use sigmascale::device::policy::{BoundSource, PolicyEngine};
use sigmascale::model::{AttentionSpec, GainForm, InputNorm, LayerSpec, NormKind, QkvBias, Rope, RopeLayout};
use sigmascale::plan::DEFAULT_ETA;
use sigmascale::policy::{PolicyConfig, PolicyKind, PolicyShape, PolicyState, ScaledTensor};
use sigmascale::stats::stats_words;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a failure probability counts, and the share of the range of logits.
#[derive(FromPyObject)]
pub struct TailArguments {
    #[pyo3(item)]
    delta: f64,
    #[pyo3(item)]
    seq_len: usize,
    #[pyo3(item)]
    batch: usize,
    #[pyo3(item)]
    steps: usize,
    #[pyo3(item)]
    pub eta: f64,
}

impl TailArguments {
    pub fn tail(&self) -> Tail {
        Tail { delta: self.delta, seq_len: self.seq_len, batch: self.batch, steps: self.steps }
    }
}

/// The policies of a name (`delayed` and lists name more than one), or one with the parameters given as a JSON object, those
/// left out at their defaults.
pub fn configs(name: &str, parameters: Option<&str>) -> Result<Vec<PolicyConfig>> {
    let kinds = PolicyKind::parse_list(name)?;
    let Some(parameters) = parameters else { return Ok(kinds.into_iter().map(PolicyConfig::from).collect()) };
    let invalid = |error: serde_json::Error| Error::argument(format_args!("{name}: {error}"));
    let given: serde_json::Map<_, _> = serde_json::from_str(parameters).map_err(invalid)?;
    let with = |kind: PolicyKind| {
        let mut config = serde_json::to_value(PolicyConfig::from(kind)).map_err(invalid)?;
        for (key, value) in &given {
            match config.get_mut(key) {
                Some(place) => *place = value.clone(),
                None => return Err(Error::argument(format_args!("{name} has no parameter {key}"))),
            }
        }
        serde_json::from_value(config).map_err(invalid)
    };
    kinds.into_iter().map(with).collect()
}

/// A layer of the package, as far as policies depend on it.
#[derive(FromPyObject)]
pub struct PolicyLayer<'py> {
    q: Bound<'py, PyAny>,
    n_q_heads: usize,
    n_kv_heads: usize,
    d_head: usize,
    norm: Option<String>,
    gain: Option<Bound<'py, PyAny>>,
    shift: Option<Bound<'py, PyAny>>,
    q_bias: Option<Bound<'py, PyAny>>,
    k_bias: Option<Bound<'py, PyAny>>,
    v_bias: Option<Bound<'py, PyAny>>,
    rotary: usize,
    interleaved: bool,
    rope_factor: f64,
    softmax_scale: Option<f64>,
    query_factor: f64,
}

impl PolicyLayer<'_> {
    fn spec(&self, number: usize) -> LayerSpec {
        let rope = Rope {
            rotary_dim: self.rotary,
            other_dims: Vec::new(),
            layout: if self.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit },
            attention_factor: self.rope_factor,
            inv_freq: None,
            range: None,
        };
        LayerSpec {
            number,
            rope: (self.rotary > 0).then_some(rope),
            // Bounds on logits are of grown queries.
            softmax_scale: self.query_factor * self.softmax_scale.unwrap_or((self.d_head as f64).sqrt().recip()),
            ..LayerSpec::plain(self.n_q_heads, self.n_kv_heads, self.d_head)
        }
    }
}

/// The attention spec of layers with as many heads, as JSON.
#[pyfunction]
pub fn attention_spec(py: Python<'_>, layers: Vec<PolicyLayer<'_>>) -> PyResult<String> {
    let Some(first) = layers.first() else {
        return Err(raise(py, &Error::argument("a policy needs at least one layer")));
    };
    let kind = match first.norm.as_deref() {
        Some("rms") => NormKind::RmsNorm,
        Some(_) => NormKind::LayerNorm,
        None => NormKind::None,
    };
    let d_model = first.q.getattr("shape")?.get_item(1)?.extract()?;
    let spec = AttentionSpec {
        norm: InputNorm {
            kind,
            gain: if first.gain.is_some() { GainForm::Plain } else { GainForm::Unit },
            shift: first.shift.is_some(),
        },
        bias: QkvBias { q: first.q_bias.is_some(), k: first.k_bias.is_some(), v: first.v_bias.is_some() },
        ..AttentionSpec::plain(d_model, layers.iter().enumerate().map(|(number, layer)| layer.spec(number)).collect())
    };
    serde_json::to_string(&spec).map_err(|error| raise(py, &Error::argument(format_args!("attention spec: {error}"))))
}

/// A checked policy with all its parameters, as JSON.
#[pyfunction]
pub fn policy(py: Python<'_>, name: &str, parameters: Option<&str>, tail: TailArguments) -> PyResult<String> {
    let checked = || {
        tail.tail().check()?;
        let [mut config] = configs(name, parameters)?[..] else {
            return Err(Error::argument(format_args!("{name} names more than one policy")));
        };
        config.set_eta(tail.eta);
        // A policy checks its parameters when it is made.
        config.build(PolicyShape::uniform(1, 1, 1))?;
        serde_json::to_string(&config).map_err(|error| Error::argument(format_args!("{name}: {error}")))
    };
    checked().map_err(|error| raise(py, &error))
}

/// The policies and their defaults, as JSON: `policies`, in order, each with its `name`, the `bound` that it plans from (null
/// for a policy that observes) and its `parameters`; and the `tail`.
#[pyfunction]
pub fn defaults() -> String {
    let policy = |kind: PolicyKind| {
        let mut parameters = json!(PolicyConfig::from(kind));
        let name = parameters.as_object_mut().and_then(|fields| fields.remove("policy"));
        json!({ "name": name, "bound": kind.bound(), "parameters": parameters })
    };
    let Tail { delta, seq_len, batch, steps } = Tail::default();
    let tail = json!({ "delta": delta, "seq_len": seq_len, "batch": batch, "steps": steps, "eta": DEFAULT_ETA });
    json!({ "policies": PolicyKind::ALL.map(policy), "tail": tail }).to_string()
}

/// One policy for all layers of a model.
#[pyclass(frozen)]
pub struct DevicePolicy {
    engine: OnDevice<Mutex<PolicyEngine>>,
    device: OnDevice<Device>,
}

impl DevicePolicy {
    fn engine(&self) -> MutexGuard<'_, PolicyEngine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl DevicePolicy {
    /// `spec` is an attention spec and `policy` one with all its parameters, as JSON; `bounded` for policies that plan from
    /// bounds, which are written to the addresses of `results`.
    #[new]
    fn new(
        py: Python<'_>,
        device: usize,
        spec: &str,
        policy: &str,
        tail: TailArguments,
        bounded: bool,
    ) -> PyResult<Self> {
        on_device(py, || {
            let device = Device::open(device)?;
            let spec: AttentionSpec =
                serde_json::from_str(spec).map_err(|e| Error::argument(format_args!("no attention spec: {e}")))?;
            let config: PolicyConfig =
                serde_json::from_str(policy).map_err(|e| Error::argument(format_args!("no policy: {e}")))?;
            let source = if bounded { BoundSource::Host } else { BoundSource::None };
            let engine = PolicyEngine::new(&device, &spec, config, &tail.tail(), source)?;
            Ok(Self { engine: OnDevice::new(Mutex::new(engine)), device: OnDevice::new(device) })
        })
    }

    /// Launches the update of the memory from the statistics of the calls since the last plan. Comes before new bounds overwrite
    /// those of that plan.
    fn observe(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        on_device(py, || self.engine().observe(&self::stream(&self.device, stream)))
    }

    /// Launches the plan of one layer or of all, from the memory or from the bounds.
    #[pyo3(signature = (stream, layer=None))]
    fn launch(&self, py: Python<'_>, stream: u64, layer: Option<usize>) -> PyResult<()> {
        on_device(py, || {
            let stream = self::stream(&self.device, stream);
            layer.map_or_else(|| self.engine().plan(&stream), |layer| self.engine().plan_layer(&stream, layer))
        })
    }

    /// Addresses and lengths: `stats` u32 `[layer][word]`, `descales` f32 `[layer][logit n_q, q, k, v, o n_kv each]`; where
    /// the policy is bounded also `bounds` f32 `[layer][n_q][word]` and `operands` f32 `[layer][q, k, v][n_kv]`. Each layer has
    /// its own heads, without padding.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let results = PyDict::new(py);
        let engine = self.engine();
        let heads = engine.shape().heads();
        let (all_q, all_kv) = (heads.all_q(), heads.all_kv());
        let places = || Ok::<_, Error>((engine.stats(0)?, engine.descales(0, ScaledTensor::Logit)?));
        let (stats, descales) = places().map_err(|error| raise(py, &error))?;
        results.set_item("stats", (stats.0, stats_words(all_q, all_kv)))?;
        results.set_item("descales", (descales.0, all_q + 4 * all_kv))?;
        if let Some((heads, operands)) = engine.host_bounds() {
            results.set_item("bounds", (heads.0, all_q * (size_of::<HeadBound>() / 4)))?;
            results.set_item("operands", (operands.0, 3 * all_kv))?;
        }
        Ok(results)
    }

    /// Slack of each layer's logits, q, k and v over the burn-in so far: smallest, mean, largest and count of worst-case bound over
    /// observed amax, as JSON; null where nothing but zeros was observed. Waits for the device.
    fn slack(&self, py: Python<'_>) -> PyResult<String> {
        on_device(py, || {
            let slack = self.engine().read_slack()?;
            serde_json::to_string(&slack).map_err(|e| Error::non_finite(format_args!("slack cannot be written: {e}")))
        })
    }

    /// The state as JSON, the same that the host's policies save. Waits for the device.
    fn save(&self, py: Python<'_>) -> PyResult<String> {
        on_device(py, || {
            let state = self.engine().save()?;
            serde_json::to_string(&state).map_err(|e| Error::non_finite(format_args!("the state cannot be saved: {e}")))
        })
    }

    /// Goes on from a state; addresses stay.
    fn load(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        on_device(py, || {
            let state: PolicyState =
                serde_json::from_str(state).map_err(|e| Error::mismatch(format_args!("no policy state: {e}")))?;
            self.engine().load(state)
        })
    }
}
