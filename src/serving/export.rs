//! A checkpoint that an engine loads as it is: weights linked, scales in a file of their own, index and configs merged.

use super::engine::{Engine, Method, Operand, Reads};
use super::folder::{Moved, bring, files_with, folder_of, index, write_without};
use super::names::ScaleNames;
use super::scales::{LayerScales, scale_file};
use super::settings::{HF_QUANT, Settings, hf_quant_config};
use crate::error::{Error, Result};
use crate::file::{place_of, write_folder, write_new};
use crate::model::{Checkpoint, INDEX, WeightFiles};
use crate::plan::{CenterPolicy, OperandDescales, center_hash};
use crate::scale::Descale;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// File of the scales.
pub const SCALES_FILE: &str = "model-attention-scales.safetensors";
/// File of the certificate.
pub(super) const CERTIFICATE_FILE: &str = "sigmascale.json";

/// What an export is asked for.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Who loads it.
    pub engine: Engine,
    /// One scale a head in place of one a tensor; vLLM only.
    pub per_head: bool,
    /// Copies of the weights in place of hard links.
    pub copy: bool,
}

/// What an export wrote.
#[derive(Clone, Debug, Serialize)]
pub struct Export {
    /// The new folder.
    pub folder: PathBuf,
    /// How the server is started.
    pub command: String,
    /// Files that are hard links to those of the model.
    pub linked: usize,
    /// Files that were copied.
    pub copied: usize,
    /// Files of the model that were left out, each with the reason.
    pub left_out: Vec<String>,
    /// What was certified; the same is in `sigmascale.json`.
    #[serde(flatten)]
    pub certificate: Certificate,
}

/// What an engine casts with, beside what the weights need.
#[derive(Clone, Debug, Serialize)]
pub struct Certificate {
    /// Version that made it.
    pub sigmascale: &'static str,
    /// Engine that it is for.
    pub engine: Engine,
    /// Model.
    pub model: String,
    /// Its family.
    pub family: String,
    /// `tensor` or `head`.
    pub granularity: &'static str,
    /// File of the scales; null where the engine reads none.
    pub scales_file: Option<&'static str>,
    /// Whether no operand can overflow, those cast at 1.0 included.
    pub safe: bool,
    /// What to know before serving.
    pub notes: Vec<String>,
    /// What may be subtracted from keys and values before their cast; absent where the weights give nothing to subtract.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub centers: Option<CenterCertificate>,
    /// The layers with attention.
    pub layers: Vec<LayerCertificate>,
}

/// Centers of a model, for engines that subtract them. The stored scales cover k and v as they are; these cover what is left.
#[derive(Clone, Debug, Serialize)]
pub struct CenterCertificate {
    /// Where they come from.
    pub policy: CenterPolicy,
    /// What a cache with these centers depends on: see [`center_hash`].
    pub hash: String,
    /// The layers that have one.
    pub layers: Vec<LayerCenters>,
}

/// The center of one layer. Rows have an entry per KV head.
#[derive(Clone, Debug, Serialize)]
pub struct LayerCenters {
    /// The model's own number.
    pub layer: usize,
    /// Module that holds the layer's attention.
    pub module: String,
    /// c, BF16 values.
    pub k: Option<Vec<Vec<f32>>>,
    /// m, likewise.
    pub v: Option<Vec<Vec<f32>>>,
    /// Scales that cover k - c, rounded up to BF16.
    pub k_scale: Vec<Descale>,
    /// Scales that cover v - m; null where values have no bound.
    pub v_scale: Option<Vec<Descale>>,
    /// The scales of k hold at positions below this; null: at all.
    pub positions: Option<usize>,
}

impl CenterCertificate {
    fn new(layers: &[LayerScales]) -> Result<Option<Self>> {
        let centered = || layers.iter().filter_map(|layer| Some((layer, layer.centered.as_ref()?)));
        let hash = center_hash(&centered().map(|(_, own)| own.center.clone()).collect::<Vec<_>>());
        let layers = centered().map(|(layer, own)| {
            let up = |row: &[Descale]| row.iter().map(|scale| scale.up_to_bf16()).collect::<Result<Vec<_>>>();
            let within = |error: Error| error.within(&layer.module);
            Ok(LayerCenters {
                layer: layer.layer,
                module: layer.module.clone(),
                k: own.center.k.clone(),
                v: own.center.v.clone(),
                k_scale: up(&own.k_descale).map_err(within)?,
                v_scale: own.v_descale.as_deref().map(up).transpose().map_err(within)?,
                positions: own.positions,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok((!layers.is_empty()).then_some(Self { policy: CenterPolicy::CACHE, hash, layers }))
    }
}

/// One layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerCertificate {
    /// The model's own number.
    pub layer: usize,
    /// Queries.
    pub q: OperandCertificate,
    /// Keys.
    pub k: OperandCertificate,
    /// Values; null where they have no bound.
    pub v: Option<OperandCertificate>,
}

/// One operand of a layer.
#[derive(Clone, Debug, Serialize)]
pub struct OperandCertificate {
    /// What the engine casts with: one entry, or one a head.
    pub scale: Vec<f32>,
    /// The worst-case bound over 448, the largest of what shares an entry.
    pub needed: Vec<f32>,
    /// Whether the scale is 1.0 because the engine reads none.
    pub cast_at_one: bool,
    /// Whether no value can overflow.
    pub safe: bool,
    /// The largest value possible over the largest that fits; at most 1 where it is safe.
    pub load: f32,
}

impl OperandCertificate {
    fn new(scale: Vec<f32>, needed: Vec<f32>, cast_at_one: bool) -> Self {
        let load = needed.iter().zip(&scale).map(|(needed, scale)| needed / scale).fold(0.0, f32::max);
        let safe = needed.iter().zip(&scale).all(|(needed, scale)| needed <= scale);
        Self { scale, needed, cast_at_one, safe, load }
    }
}

/// Writes a folder that the engine loads. `each` is called after each layer, and stops the work by an error.
///
/// # Errors
/// `is_argument` if the folder is there and not empty, lies in the model's own, or the engine does not take `per_head`;
/// `is_unsupported` if the values of a layer have no bound and the engine would read a scale for them; `is_io`, and then nothing is
/// left; else as [`Checkpoint::layer`].
pub fn export(
    checkpoint: &Checkpoint,
    to: &Path,
    options: &ExportOptions,
    each: &mut dyn FnMut() -> Result<()>,
) -> Result<Export> {
    let from = folder_of(checkpoint.path())?;
    if place_of(to).starts_with(place_of(&from)) {
        return Err(Error::argument(format_args!(
            "{} is in the folder of the model: choose a new folder elsewhere",
            to.display()
        )));
    }
    let mut config = Settings::read(&from.join("config.json"))?;
    let aside = Settings::read_if_present(&from.join(HF_QUANT))?;
    let method = config.method(aside.as_ref());
    let spec = checkpoint.spec();
    let reads = options.engine.reads(spec, config.model_type(), method);
    options.check(spec, method, reads)?;
    let files = WeightFiles::open(&from)?;
    check_read(checkpoint, &from, method, &files)?;

    let mut layers = Vec::with_capacity(spec.layers.len());
    for layer in 0..spec.layers.len() {
        layers.push(LayerScales::new(spec, checkpoint.layer(layer)?)?);
        each()?;
    }
    let certificate = Certificate::new(checkpoint, &layers, options, reads, method)?;
    let operands: Vec<Operand> = Operand::ALL.into_iter().filter(|operand| reads.scale(*operand)).collect();
    let scales = match reads.any() {
        true => Some(scale_file(options.engine, &spec.family, &layers, &operands, options.per_head)?),
        false => None,
    };

    let names = ScaleNames::new(spec)?;
    let gone = files_with(&files, |name| names.is_scale(name));
    let mistral = |name: &str| name.starts_with("consolidated") && name.ends_with(".safetensors");
    // vLLM would load these, under other names, in place of the index's files.
    let foreign = |name: &str| options.engine == Engine::Vllm && (mistral(name) || name == "params.json");
    let present = || files.files().chain(files.unlisted.iter().map(String::as_str));
    let has_foreign = present().any(mistral);
    let mut left_out: Vec<String> = present().filter(|name| foreign(name)).map(str::to_owned).collect();
    left_out.sort_unstable();
    let index_file = Settings::read_if_present(&from.join(INDEX))?;
    let quantized = hf_quant_config(&from, options.engine, method, aside)?;
    if reads.any() {
        config.ask_for_fp8(options.engine, method, options.per_head);
    }

    let moved = write_folder(to, |folder| {
        let own = ["config.json", INDEX, HF_QUANT, SCALES_FILE, CERTIFICATE_FILE];
        let skip = |name: &str| own.contains(&name) || gone.contains_key(name) || (has_foreign && foreign(name));
        let mut moved = Moved::default();
        bring(&from, folder, options.copy, &skip, &mut moved)?;
        for (file, without) in &gone {
            if *file != SCALES_FILE {
                write_without(&files, file, without, folder)?;
            }
        }
        let write = |name: &str, bytes: &[u8]| write_new(&folder.join(name), bytes);
        let came = match &scales {
            Some(bytes) => {
                write(SCALES_FILE, bytes)?;
                stored_sizes(bytes)?
            }
            None => vec![],
        };
        if index_file.is_some() || !came.is_empty() {
            let value = index(index_file.map(|index| index.value), &files, &gone, &came, SCALES_FILE);
            write(INDEX, &Settings { value }.bytes()?)?;
        }
        write("config.json", &config.bytes()?)?;
        if let Some(quantized) = quantized {
            write(HF_QUANT, &quantized.bytes()?)?;
        }
        let text = serde_json::to_string_pretty(&certificate)
            .map_err(|error| Error::non_finite(format_args!("the certificate cannot be written as JSON: {error}")))?;
        write(CERTIFICATE_FILE, (text + "\n").as_bytes())?;
        Ok(moved)
    })?;
    Ok(Export {
        folder: to.to_owned(),
        command: options.engine.command(&to.display().to_string()),
        linked: moved.linked,
        copied: moved.copied,
        left_out,
        certificate,
    })
}

/// Refuses a folder whose weights engines would load otherwise than they were read here.
pub(super) fn check_read(checkpoint: &Checkpoint, folder: &Path, method: Method, files: &WeightFiles) -> Result<()> {
    checkpoint.check_loaded(files)?;
    if method == Method::Plain && checkpoint.spec().fp8_inputs {
        return Err(Error::format(
            &folder.join("config.json"),
            "projections are stored in FP8 (E4M3), but there is no `quantization_config`, without which engines load them \
             without their scales: restore it",
        ));
    }
    Ok(())
}

/// Name and bytes of each tensor.
fn stored_sizes(file: &[u8]) -> Result<Vec<(String, usize)>> {
    let read = safetensors::SafeTensors::deserialize(file).map_err(|e| Error::format(Path::new(SCALES_FILE), e))?;
    Ok(read.iter().map(|(name, tensor)| (name.to_owned(), tensor.data().len())).collect())
}

impl ExportOptions {
    fn check(&self, spec: &crate::model::AttentionSpec, method: Method, reads: Reads) -> Result<()> {
        if !self.per_head {
            return Ok(());
        }
        let rule =
            if self.engine != Engine::Vllm || !reads.any() {
                "only vLLM reads per-head scales"
            } else if !matches!(method, Method::Plain | Method::CompressedTensors) {
                "vLLM reads per-head scales only with compressed-tensors or unquantized weights"
            } else if !spec.layers.iter().all(|layer| {
                (layer.n_q_heads, layer.n_kv_heads) == (spec.layers[0].n_q_heads, spec.layers[0].n_kv_heads)
            }) {
                "vLLM takes one pair of head counts for all layers, but the layers of this model differ"
            } else {
                return Ok(());
            };
        Err(Error::argument(format_args!("{rule}: export one scale per tensor")))
    }
}

impl Certificate {
    fn new(
        checkpoint: &Checkpoint,
        layers: &[LayerScales],
        options: &ExportOptions,
        reads: Reads,
        method: Method,
    ) -> Result<Self> {
        let spec = checkpoint.spec();
        let one = |layer: &LayerScales, operand: Operand| -> Result<Option<OperandCertificate>> {
            let Some(row) = layer.row(operand) else {
                // An engine that would read a scale gets an error; one that casts at 1.0 has no certificate.
                return if reads.scale(operand) { layer.stored(operand, false).map(|_| None) } else { Ok(None) };
            };
            let needed = |per_head: bool| -> Vec<f32> {
                if per_head {
                    let entries = if operand == Operand::Q { layer.n_q_heads } else { row.len() };
                    (0..entries).map(|entry| row[entry * row.len() / entries].get()).collect()
                } else {
                    vec![crate::plan::ScalePlan::per_tensor(row).get()]
                }
            };
            Ok(Some(if reads.scale(operand) {
                let scale = layer.stored(operand, options.per_head)?.into_iter().map(Descale::get).collect();
                OperandCertificate::new(scale, needed(options.per_head), false)
            } else {
                OperandCertificate::new(vec![1.0], needed(false), true)
            }))
        };
        let (prefill, centers) = (prefill_notes(layers), CenterCertificate::new(layers)?);
        let layers = layers
            .iter()
            .map(|layer| {
                let part = |operand| one(layer, operand);
                let without = || Error::unsupported(format_args!("{}: q or k has no bound", layer.module));
                Ok(LayerCertificate {
                    layer: layer.layer,
                    q: part(Operand::Q)?.ok_or_else(without)?,
                    k: part(Operand::K)?.ok_or_else(without)?,
                    v: part(Operand::V)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let safe = layers.iter().all(|layer| layer.q.safe && layer.k.safe && layer.v.as_ref().is_some_and(|v| v.safe));
        Ok(Self {
            sigmascale: env!("CARGO_PKG_VERSION"),
            engine: options.engine,
            model: spec.name.clone(),
            family: spec.family.clone(),
            granularity: if options.per_head { "head" } else { "tensor" },
            scales_file: reads.any().then_some(SCALES_FILE),
            safe,
            notes: [notes(&layers, options, reads, method), prefill].concat(),
            centers,
            layers,
        })
    }
}

/// What latent attention needs where prefill casts its expanded form at 1.0, as vLLM and TensorRT-LLM can be told to.
fn prefill_notes(layers: &[LayerScales]) -> Vec<String> {
    let expanded: Vec<_> = layers.iter().filter_map(|layer| layer.expanded.as_ref()).collect();
    if expanded.is_empty() {
        return vec![];
    }
    let row = |one: fn(&OperandDescales) -> &[Descale]| {
        expanded.iter().flat_map(|descales| one(descales)).map(|scale| scale.get()).fold(0.0, f32::max)
    };
    let loads = [row(|d| &d.q), row(|d| &d.k), row(|d| d.v.as_deref().unwrap_or_default())];
    let [q, k, v] = loads.map(|load| format!("{load:.3}"));
    let safe = if loads.iter().all(|load| *load <= 1.0) { "safe" } else { "not certified" };
    vec![
        "q is the absorbed query here, k and v the cached row of latent and rotated key.".to_owned(),
        format!("FP8 prefill casts q, k and v of each head at 1.0: {safe}, the bounds are {q}, {k} and {v} of 448."),
    ]
}

/// What to know before serving.
fn notes(layers: &[LayerCertificate], options: &ExportOptions, reads: Reads, method: Method) -> Vec<String> {
    let mut notes = Vec::new();
    notes.extend(reads.why.map(|why| format!("{why}.")));
    type Part = fn(&LayerCertificate) -> Option<&OperandCertificate>;
    let parts: [(&str, Part); 3] =
        [("q", |layer| Some(&layer.q)), ("k", |layer| Some(&layer.k)), ("v", |layer| layer.v.as_ref())];
    for (name, part) in parts {
        let worst = layers
            .iter()
            .filter_map(|layer| Some((layer.layer, part(layer)?)))
            .filter(|(_, operand)| operand.cast_at_one)
            .max_by(|a, b| a.1.load.total_cmp(&b.1.load));
        match worst {
            Some((_, worst)) if worst.safe => {
                notes.push(format!("{name} is safe at 1.0: its bound is {:.3} of 448.", worst.load));
            }
            Some((layer, worst)) => notes.push(format!(
                "{name} is not certified at 1.0: in layer {layer} the bound is {:.3} times 448.",
                worst.load
            )),
            None => {}
        }
        if layers.iter().any(|layer| part(layer).is_none()) {
            notes.push(format!("{name} has no bound: there is no norm before its projection."));
        }
    }
    if options.per_head {
        notes.push(
            "vLLM 0.32 cannot update or reload the weights of a model with per-head scales (AttributeError): export one scale a \
             tensor for reinforcement learning."
                .to_owned(),
        );
    }
    if method == Method::Fp8 && reads.any() {
        notes.push("The KV-cache type has to be named at the start: `auto` stays BF16 for this checkpoint.".to_owned());
    }
    notes
}
