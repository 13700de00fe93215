//! Exports, audits and streamed scales, as the crate's `serving` has them.

use crate::cpu_scales::bytes_at;
use crate::errors::raise;
use crate::threads::{beside, detached};
use pyo3::prelude::*;
use serde::Serialize;
use serde_json::json;
use sigmascale::model::{Checkpoint, ModelSource, NormKind, attention_module, local_path};
use sigmascale::plan::{Center, CenterPolicy};
use sigmascale::serving::{self, CenterCertificate, Engine, ExportOptions, LayerScales, Operand, Serving, SkipLayers};
use sigmascale::{Descale, Error, Result};
use sigmascale_cli::pages;
use sigmascale_cli::report::Report;
use sigmascale_lab::stress::{StressModel, TokenFile, observe};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

fn text(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::non_finite(format_args!("the result cannot be written as JSON: {error}")))
}

fn checkpoint(model: &str) -> Result<Box<Checkpoint>> {
    match ModelSource::open(model)? {
        ModelSource::Checkpoint(checkpoint) => Ok(checkpoint),
        ModelSource::Config(_) => {
            Err(Error::argument(format_args!("weights are needed, but {model} has none: pass a checkpoint folder")))
        }
    }
}

/// Options of the server.
fn options(context: Option<usize>, skip: &[String]) -> Result<Serving> {
    Ok(Serving { context, skip: SkipLayers::parse(skip)?, ..Serving::default() })
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn export(
    py: Python<'_>,
    model: String,
    to: PathBuf,
    name: String,
    per_head: bool,
    copy: bool,
    context: Option<usize>,
    skip: Vec<String>,
) -> PyResult<String> {
    detached(py, "export", move |stop| {
        let options = ExportOptions { engine: name.parse()?, per_head, copy, serving: options(context, &skip)? };
        let checkpoint = checkpoint(&model)?;
        stop.expect(checkpoint.spec().layers.len());
        text(&serving::export(&checkpoint, &to, &options, &mut || stop.check())?)
    })
}

/// The audits of these engines, each with its page; without one, of all, that which the folder was exported for first. The first has
/// what a text reached.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn verify(
    py: Python<'_>,
    folder: String,
    name: Option<String>,
    context: Option<usize>,
    skip: Vec<String>,
    kv: String,
    tokens: Option<PathBuf>,
    seq_len: Option<usize>,
) -> PyResult<Vec<(String, String)>> {
    detached(py, "verify", move |stop| {
        let first = name.as_deref().map(str::parse::<Engine>).transpose()?;
        let own = || Engine::of_export(&local_path(&folder)).unwrap_or(Engine::Vllm);
        let mut engines = vec![first.unwrap_or_else(own)];
        if first.is_none() {
            let others = Engine::ALL.into_iter().filter(|engine| *engine != engines[0]);
            engines = [engines[0]].into_iter().chain(others).collect();
        }
        let serving = Serving { kv: kv.parse()?, ..options(context, &skip)? };
        let checkpoint = checkpoint(&folder)?;
        let layers = checkpoint.spec().layers.len();
        stop.expect(if tokens.is_some() { 2 * layers } else { layers });
        let audits = serving::verify(&checkpoint, &engines, &serving, &mut || stop.check())?;
        let mut observed = match tokens {
            Some(file) => {
                let (file, model) = (TokenFile::read(&file)?, StressModel::open(checkpoint.path())?);
                Some(observe(&model, &file, seq_len, &mut || stop.check())?)
            }
            None => None,
        };
        let report = |audit| Report { folder: folder.clone(), audit, observed: observed.take(), others: vec![] };
        audits.into_iter().map(report).map(|report| Ok((text(&report)?, pages::of_audit(&report)))).collect()
    })
}

/// The centers that the weights of a checkpoint give, as in the certificate of an export; `null` where nothing is subtracted.
#[pyfunction]
pub fn centers(
    py: Python<'_>,
    model: String,
    keys: String,
    values: String,
    positions: Option<usize>,
) -> PyResult<String> {
    detached(py, "centers", move |stop| {
        let policy = CenterPolicy {
            k: keys.parse()?,
            v: values.parse()?,
            positions: positions.unwrap_or(CenterPolicy::CACHE.positions),
            ..CenterPolicy::CACHE
        };
        text(&CenterCertificate::of_checkpoint(&*checkpoint(&model)?, &policy, &mut || stop.check())?)
    })
}

/// Weights that arrive tensor by tensor.
#[pyclass]
pub struct ScaleStream(Mutex<serving::ScaleStream>);

/// A layer by its place, with the descales of q, k and v that were computed on a device.
type Computed = (usize, Vec<f32>, Vec<f32>, Option<Vec<f32>>);

/// A layer with what engines take: one scale a tensor, rounded up to BF16, and its names.
#[derive(Serialize)]
struct Described<'a> {
    #[serde(flatten)]
    layer: &'a LayerScales,
    scale: BTreeMap<char, Descale>,
    names: BTreeMap<&'static str, BTreeMap<char, String>>,
}

impl<'a> Described<'a> {
    fn new(family: &str, layer: &'a LayerScales) -> Result<Self> {
        let own = || Operand::ALL.into_iter().filter(|operand| layer.row(*operand).is_some());
        let scale = |operand: Operand| Ok((operand.letter(), layer.stored(operand, false)?[0]));
        let names = |engine: Engine| {
            own().map(|operand| (operand.letter(), engine.scale_name(family, &layer.module, operand))).collect()
        };
        Ok(Self {
            layer,
            scale: own().map(scale).collect::<Result<_>>()?,
            names: Engine::ALL.into_iter().map(|engine| (engine.name(), names(engine))).collect(),
        })
    }
}

/// A projection's place, as JSON.
pub fn place(place: &sigmascale::model::ProjectionName) -> serde_json::Value {
    json!({"name": place.name, "heads": place.heads, "channels": place.channels, "conv1d": place.conv1d})
}

#[pymethods]
impl ScaleStream {
    #[new]
    fn new(py: Python<'_>, config: &str, name: &str, names: Vec<String>, ranks: usize) -> PyResult<Self> {
        serving::ScaleStream::new(config.as_bytes(), Path::new(name), &names)
            .and_then(|stream| stream.of_rank(ranks))
            .map(|stream| Self(Mutex::new(stream)))
            .map_err(|error| raise(py, &error))
    }

    /// Centers as JSON, those of layers that were given before.
    fn keep_centers(&self, py: Python<'_>, centers: &str) -> PyResult<()> {
        let kept = || {
            let centers = serde_json::from_str(centers)
                .map_err(|error| Error::argument(format_args!("centers are not those of layers: {error}")))?;
            self.held().keep_centers(centers)
        };
        kept().map_err(|error| raise(py, &error))
    }

    fn wants(&self, name: &str) -> bool {
        self.held().wants(name)
    }

    /// Where the tensors of each layer are, by names without prefix, as JSON.
    fn places(&self, py: Python<'_>) -> PyResult<String> {
        let stream = self.held();
        let (spec, tensors) = (stream.spec(), stream.tensors());
        let layer = |(index, own): (usize, &sigmascale::model::LayerSpec)| {
            let names = tensors.names(index);
            let module = names.q.name.rsplit_once('.').map_or("", |(module, _)| module);
            let held = attention_module(&spec.family, "", own.number).unwrap_or_default();
            let operands = Operand::ALL.into_iter().filter(|x| *x != Operand::V || spec.norm.kind != NormKind::None);
            let scales: Vec<_> = operands.map(|x| Engine::Vllm.scale_name(&spec.family, &held, x)).collect();
            json!({
                "number": own.number, "module": module, "d_head": own.d_head, "d_model": spec.d_model, "n_q": own.n_q_heads,
                "n_kv": own.n_kv_heads, "mla": own.mla, "q": place(&names.q), "k": place(&names.k), "v": place(&names.v),
                "k_pe": names.mla.as_ref().map(|mla| place(&mla.k_pe)), "needs": tensors.wanted(index),
                "vllm": scales,
            })
        };
        let layers: Vec<_> = spec.layers.iter().enumerate().map(layer).collect();
        text(&json!({"prefixes": tensors.prefixes(), "layers": layers})).map_err(|error| raise(py, &error))
    }

    /// The layers that a tensor completes, as JSON. Its `size` bytes are in host memory at `address`.
    fn push(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<usize>,
        address: u64,
        size: usize,
    ) -> PyResult<String> {
        let work = || {
            let bytes = bytes_at(&address, size).to_vec();
            let dtype = serde_json::from_value(json!(dtype))
                .map_err(|_| Error::argument(format_args!("{name} has type {dtype}, which is not read")))?;
            let mut stream = self.held();
            let done = stream.push(name, dtype, &shape, bytes)?;
            let family = stream.spec().family.clone();
            text(&done.iter().map(|layer| Described::new(&family, layer)).collect::<Result<Vec<_>>>()?)
        };
        // Not on the global pool, whose threads a child of `fork` does not have.
        beside(py, work)
    }

    /// Why the scale engine of a device cannot compute this model's descales; None if it can.
    fn not_on_device(&self) -> Option<String> {
        let stream = self.held();
        let spec = stream.spec();
        let reads = |d_head: usize| d_head.is_multiple_of(8) && (16..=256).contains(&d_head);
        if let Some(own) = spec.layers.iter().find(|own| !reads(own.d_head)) {
            return Some(format!("d_head {} is not a multiple of 8 from 16 to 256", own.d_head));
        }
        let per_head = |index: usize| stream.tensors().names(index).qk_norm.is_some_and(|(q, _)| q.contains("{h}"));
        if spec.qk_norm.is_some_and(|norm| norm.shift) || (0..spec.layers.len()).any(per_head) {
            return Some("norms of q and k with a shift, or with a tensor for each head".to_owned());
        }
        sigmascale::bound::check_device(spec).err().map(|error| error.to_string())
    }

    /// The layers that a tensor completes whose values stay on a device.
    fn note(&self, py: Python<'_>, name: &str, dtype: &str, shape: Vec<usize>) -> PyResult<Vec<usize>> {
        let noted = || {
            let dtype = serde_json::from_value(json!(dtype))
                .map_err(|_| Error::argument(format_args!("{name} has type {dtype}, which is not read")))?;
            self.held().note(name, dtype, &shape)
        };
        noted().map_err(|error| raise(py, &error))
    }

    /// Layers whose descales were computed on a device, as JSON.
    fn computed(&self, py: Python<'_>, layers: Vec<Computed>) -> PyResult<String> {
        let row = |values: Vec<f32>| values.into_iter().map(Descale::new).collect::<Result<Vec<_>>>();
        let described = || {
            let mut stream = self.held();
            let family = stream.spec().family.clone();
            let each = layers
                .into_iter()
                .map(|(layer, q, k, v)| stream.computed(layer, row(q)?, row(k)?, v.map(row).transpose()?));
            let done = each.collect::<Result<Vec<_>>>()?;
            text(&done.iter().map(|layer| Described::new(&family, layer)).collect::<Result<Vec<_>>>()?)
        };
        described().map_err(|error| raise(py, &error))
    }

    /// Drops what a pass has taken so far.
    fn restart(&self) {
        self.held().restart();
    }

    fn finish(&self, py: Python<'_>, part: bool) -> PyResult<()> {
        self.held().finish(part).map_err(|error| raise(py, &error))
    }

    #[getter]
    fn held_bytes(&self) -> usize {
        self.held().held_bytes()
    }
}

impl ScaleStream {
    fn held(&self) -> std::sync::MutexGuard<'_, serving::ScaleStream> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The hash of centers that are given as JSON.
#[pyfunction]
pub fn center_hash(py: Python<'_>, centers: &str) -> PyResult<String> {
    let centers: Vec<Center> = serde_json::from_str(centers)
        .map_err(|error| raise(py, &Error::argument(format_args!("centers are not those of layers: {error}"))))?;
    Ok(sigmascale::plan::center_hash(&centers))
}

/// The rule for a cache that is kept: scales in use and new ones as `(layer, q, k, v)`; gives the numbers of the layers that grew.
#[pyfunction]
pub fn refit(
    py: Python<'_>,
    in_use: Vec<(usize, f32, f32, Option<f32>)>,
    new: Vec<(usize, f32, f32, Option<f32>)>,
) -> PyResult<Vec<usize>> {
    let rows = |given: Vec<(usize, f32, f32, Option<f32>)>| -> Result<Vec<LayerScales>> {
        let one = |(layer, q, k, v): (usize, f32, f32, Option<f32>)| {
            let v = v.map(|v| Descale::new(v).map(|v| vec![v])).transpose()?;
            let (q, k) = (vec![Descale::new(q)?], vec![Descale::new(k)?]);
            Ok(LayerScales { layer, module: String::new(), q, k, v, expanded: None, centered: None, n_q_heads: 1 })
        };
        given.into_iter().map(one).collect()
    };
    let decided = || serving::refit(&rows(in_use)?, &rows(new)?);
    decided().map(|refit| refit.grown).map_err(|error| raise(py, &error))
}
