//! Calibrate, inspect, stress and export, as the command line does them.

use crate::errors::raise;
use crate::policy::configs;
use crate::threads::{Stop, detached};
use pyo3::prelude::*;
use serde::Serialize;
use serde_json::json;
use sigmascale::bound::Tail;
use sigmascale::calibrate::{Calibration, Inspection, Options, Profile, calibrate_config};
use sigmascale::cuda;
use sigmascale::model::{Checkpoint, Layout, ModelSource, preset_names, read_config};
use sigmascale::policy::PolicyConfig;
use sigmascale::spectral::Iterations;
use sigmascale::{Error, Result};
use sigmascale_cli::pages;
use sigmascale_lab::stress::{Scenario, StressModel, StressOptions, TokenFile, Trace, replay, run_with_progress};
use sigmascale_lab::train::{self, LabOptions, ModelKind, trained};
use std::ffi::OsString;
use std::iter;
use std::path::{Path, PathBuf};

/// A model as Python names it: a preset or path, or a config with weights in memory.
#[derive(FromPyObject)]
pub enum Source {
    Named(String),
    Memory(String, Option<Vec<u8>>, String),
}

impl Source {
    fn open(self) -> Result<ModelSource> {
        match self {
            Self::Named(name) => ModelSource::open(&name),
            Self::Memory(config, Some(weights), name) => {
                Checkpoint::from_memory(config.as_bytes(), weights, &name).map(|c| ModelSource::Checkpoint(Box::new(c)))
            }
            Self::Memory(config, None, name) => {
                let layout = Layout::from_config_json(config.as_bytes(), Path::new(&name))?;
                Ok(ModelSource::Config(Box::new(layout.spec().clone())))
            }
        }
    }
}

/// Options of `calibrate`, as keywords.
#[derive(FromPyObject)]
pub struct CalibrateOptions {
    #[pyo3(item)]
    delta: f64,
    #[pyo3(item)]
    seq_len: usize,
    #[pyo3(item)]
    batch: usize,
    #[pyo3(item)]
    steps: usize,
    #[pyo3(item)]
    eta: f64,
    #[pyo3(item)]
    bound: String,
    #[pyo3(item)]
    granularity: String,
    #[pyo3(item)]
    estimator: String,
    #[pyo3(item)]
    iterations: usize,
    #[pyo3(item)]
    as_paper: bool,
    #[pyo3(item)]
    soft_cap: bool,
    #[pyo3(item)]
    c: Option<f64>,
}

impl CalibrateOptions {
    fn check(&self) -> Result<Options> {
        let options = Options {
            tail: Tail { delta: self.delta, seq_len: self.seq_len, batch: self.batch, steps: self.steps },
            eta: self.eta,
            bound: self.bound.parse()?,
            granularity: self.granularity.parse()?,
            estimator: self.estimator.parse()?,
            iterations: self.iterations,
            as_paper: self.as_paper,
            soft_cap: self.soft_cap,
            c: self.c,
            ..Options::default()
        };
        options.check()?;
        Ok(options)
    }
}

fn text(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::non_finite(format_args!("the result cannot be written as JSON: {error}")))
}

/// The profile of a model, unless it is told to stop between two layers.
fn profile(source: Source, options: Options, stop: &Stop) -> Result<Profile> {
    match source.open()? {
        ModelSource::Config(spec) => calibrate_config(&spec, &options),
        ModelSource::Checkpoint(checkpoint) => {
            let mut calibration = Calibration::new(checkpoint.spec(), options)?;
            stop.expect(checkpoint.spec().layers.len());
            for layer in 0..checkpoint.spec().layers.len() {
                stop.check()?;
                calibration.layer(checkpoint.layer(layer)?)?;
            }
            Ok(calibration.finish())
        }
    }
}

/// The text of a config file.
#[pyfunction]
pub fn config_text(py: Python<'_>, file: PathBuf) -> PyResult<String> {
    let read = || {
        String::from_utf8(read_config(&file)?).map_err(|error| Error::format(&file, format_args!("not UTF-8: {error}")))
    };
    read().map_err(|error| raise(py, &error))
}

#[pyfunction]
pub fn calibrate(py: Python<'_>, source: Source, options: CalibrateOptions) -> PyResult<String> {
    detached(py, "calibrate", move |stop| text(&profile(source, options.check()?, stop)?))
}

/// The command, with the arguments that follow its name; returns its exit code. `plugins`: name, whether it would load, and what
/// there is to say, for `doctor`.
#[pyfunction]
pub fn command(py: Python<'_>, arguments: Vec<OsString>, plugins: Vec<(String, bool, String)>) -> u8 {
    let fact = |(name, found, value)| sigmascale_cli::Fact { name, found, value };
    let plugins = plugins.into_iter().map(fact).collect();
    py.detach(|| sigmascale_cli::run_with(iter::once("sigmascale".into()).chain(arguments), plugins))
}

/// JSON, and the page of the command line.
#[pyfunction]
pub fn inspect(py: Python<'_>, source: Source) -> PyResult<(String, String)> {
    detached(py, "inspect", move |stop| {
        let profile = profile(source, Options::default(), stop)?;
        if profile.layers.is_none() {
            return Err(Error::argument(
                "inspect needs weights, but this model has none: pass a checkpoint folder, a .safetensors file or \
                 weights",
            ));
        }
        let inspection = Inspection::new(profile);
        Ok((text(&inspection)?, pages::of_inspection(&inspection)))
    })
}

/// Options of `stress`.
#[derive(FromPyObject)]
pub struct StressArguments {
    #[pyo3(item)]
    model: Option<String>,
    #[pyo3(item)]
    mode: String,
    #[pyo3(item)]
    /// Names with parameters as JSON.
    policies: Option<Vec<(String, Option<String>)>>,
    #[pyo3(item)]
    layers: Option<usize>,
    #[pyo3(item)]
    seq_len: Option<usize>,
    #[pyo3(item)]
    tokens: Option<PathBuf>,
    #[pyo3(item)]
    path: Vec<PathBuf>,
    #[pyo3(item)]
    steps: Option<usize>,
    #[pyo3(item)]
    seed: u64,
    #[pyo3(item)]
    device: String,
    #[pyo3(item)]
    trace: Option<PathBuf>,
    #[pyo3(item)]
    estimator: String,
    #[pyo3(item)]
    iterations: (usize, usize),
}

/// Policies in their order; a name counts once.
fn listed(policies: &[(String, Option<String>)]) -> Result<Vec<PolicyConfig>> {
    let mut all: Vec<PolicyConfig> = Vec::new();
    for (name, parameters) in policies {
        let once =
            |config: &PolicyConfig| parameters.is_some() || all.iter().all(|other| other.kind() != config.kind());
        let new: Vec<_> = configs(name, parameters.as_deref())?.into_iter().filter(once).collect();
        all.extend(new);
    }
    Ok(all)
}

impl StressArguments {
    fn options(&self) -> Result<StressOptions> {
        let default = StressOptions::default();
        let bounds_on_gpu = match self.device.as_str() {
            "cpu" => false,
            "cuda" => true,
            other => return Err(Error::argument(format_args!("device {other:?} is not one of cpu, cuda"))),
        };
        if bounds_on_gpu {
            cuda::require()?;
        }
        let iterations = Iterations { cold: self.iterations.0, warm: self.iterations.1 };
        iterations.check()?;
        Ok(StressOptions {
            mode: self.mode.parse()?,
            policies: self.policies.as_deref().map_or_else(|| Ok(default.policies.clone()), listed)?,
            layers: self.layers,
            seq_len: self.seq_len.unwrap_or(default.seq_len),
            tokens: self.tokens.as_deref().map(TokenFile::read).transpose()?,
            steps: self.steps,
            seed: self.seed,
            bounds_on_gpu,
            estimator: self.estimator.parse()?,
            iterations,
            ..default
        })
    }

    /// A scenario that trains its model.
    fn train(&self, scenario: Scenario, options: &StressOptions) -> Result<(String, String)> {
        let kind = self.model.as_deref().unwrap_or_default().parse::<ModelKind>()?;
        let kept = [
            ("layers", self.layers.is_some()),
            ("tokens", self.tokens.is_some()),
            ("path", !self.path.is_empty()),
            ("trace", self.trace.is_some()),
            ("device", self.device != "cpu"),
        ];
        if let Some((name, _)) = kept.into_iter().find(|(_, given)| *given) {
            return Err(Error::argument(format_args!(
                "{}: leave {name} out, since the model that is trained has its own text and weights on the CPU",
                scenario.name()
            )));
        }
        let result = train::run(scenario, &LabOptions::of_stress(scenario, kind, options, self.seq_len)?)?;
        pages::of_training(result)
            .map_err(|error| Error::non_finite(format_args!("the result cannot be written as JSON: {error}")))
    }

    fn open(&self, name: &str) -> Result<StressModel> {
        if let Ok(kind) = name.parse::<ModelKind>() {
            return trained(kind, self.seed, &|_| ());
        }
        match ModelSource::open(name)? {
            ModelSource::Config(_) if !self.path.is_empty() => {
                Err(Error::argument(format_args!("path needs a checkpoint as its model, and {name} has no weights")))
            }
            ModelSource::Config(spec) => StressModel::synthetic(&spec, self.seed),
            ModelSource::Checkpoint(first) => {
                let first = [first.path().to_owned()];
                StressModel::open_path(&first.iter().chain(&self.path).collect::<Vec<_>>())
            }
        }
    }
}

/// As [`inspect`].
#[pyfunction]
pub fn stress(py: Python<'_>, scenario: String, arguments: StressArguments) -> PyResult<(String, String)> {
    detached(py, "stress", move |stop| {
        let scenario: Scenario = scenario.parse()?;
        let options = arguments.options()?;
        if matches!(scenario, Scenario::Resume | Scenario::LrSpike) {
            return arguments.train(scenario, &options);
        }
        if scenario != Scenario::Refit && !arguments.path.is_empty() {
            return Err(Error::argument(format_args!("path is for refit, not for {}", scenario.name())));
        }
        let result = match (scenario, &arguments.model, &arguments.trace) {
            (Scenario::Replay, _, Some(file)) => {
                let name = file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy();
                replay(&name, &Trace::read(file)?, &options)
            }
            (Scenario::Replay, _, None) => Err(Error::argument("replay needs a trace")),
            (_, None, _) => Err(Error::argument(format_args!("{} needs a model", scenario.name()))),
            (_, _, Some(_)) => Err(Error::argument("a trace is for replay alone")),
            (_, Some(name), None) => run_with_progress(scenario, &arguments.open(name)?, &options, |done| {
                stop.expect(done.layers * done.steps);
                // A run has no place to stop at.
                let _ = stop.check();
            }),
        }?;
        Ok((text(&result)?, pages::of_stress(result)))
    })
}

/// Names and places of a model's attention tensors, with its spec.
#[pyfunction]
pub fn layout(py: Python<'_>, config: &str, name: &str) -> PyResult<String> {
    let described = || {
        let layout = Layout::from_config_json(config.as_bytes(), Path::new(name))?;
        let spec = layout.spec();
        let latent = if spec.has_mla() { Some(crate::mla::needs(config, name)?) } else { None };
        if latent.is_none() {
            sigmascale::bound::check_plain(spec)?;
        }
        let layers = (0..spec.layers.len())
            .map(|layer| {
                let (own, names) = (spec.layer(layer)?, layout.layer(layer)?);
                let one = crate::serving::place;
                Ok(json!({
                    "number": own.number, "n_q_heads": own.n_q_heads, "n_kv_heads": own.n_kv_heads, "d_head": own.d_head,
                    "q": one(&names.q), "k": one(&names.k), "v": one(&names.v),
                    "norm": names.norm, "qk_norm": names.qk_norm, "latent": latent.as_ref().map(|needs| &needs[layer]),
                }))
            })
            .collect::<Result<Vec<_>>>()?;
        text(&json!({"spec": spec, "prefixes": layout.prefixes(), "layers": layers}))
    };
    described().map_err(|error| raise(py, &error))
}

#[pyfunction]
pub fn presets() -> Vec<&'static str> {
    preset_names().collect()
}
