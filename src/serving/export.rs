//! A checkpoint that an engine loads as it is: weights linked, scales in a file of their own, index and configs merged.

use super::certificate::{Certificate, ExportOptions, Reads};
use super::description::{Carries, Loads};
use super::engine::{Engine, Operand};
use super::folder::{CERTIFICATE_FILE, Moved, bring, check_read, files_with, folder_of, index, write_without};
use super::names::ScaleNames;
use super::needs::{Need, biased, needs};
use super::scales::{LayerScales, scale_file};
use super::settings::{HF_QUANT, Method, Settings, hf_quant_config};
use super::unjudged::{otherwise, unjudged};
use crate::error::{Error, Result};
use crate::file::{place_of, write_folder, write_new};
use crate::model::{AttentionSpec, Checkpoint, INDEX, WeightFiles};
use crate::scale::Descale;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// File of the scales.
pub const SCALES_FILE: &str = "model-attention-scales.safetensors";

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
    if options.engine == Engine::Trtllm {
        return Err(Error::argument(
            "TensorRT-LLM reads no scales for an FP8 cache, so there is nothing to export: `verify --for trtllm` says whether 1.0, at \
             which it casts, covers the bounds",
        ));
    }
    let description = options.engine.description();
    options.serving.check(checkpoint.spec(), description.skips_layers, description.windows)?;
    let mut config = Settings::read(&from.join("config.json"))?;
    let aside = Settings::read_if_present(&from.join(HF_QUANT))?;
    let generation = Settings::read_if_present(&from.join("generation_config.json"))?;
    let method = config.method(aside.as_ref(), description.upper_case, description.needs_producer);
    let spec = &options.engine.spec(checkpoint.spec(), &config, generation.as_ref(), &options.serving)?;
    let names = ScaleNames::new(spec)?;
    let reads = reads(options, spec, &config, &method, &names)?;
    options.check(spec, &method, &reads)?;
    let files = WeightFiles::open(&from)?;
    check_read(checkpoint, &from, method.is_plain(), &files)?;

    let needs = needs(checkpoint, spec, each)?;
    let layers = layers(options, spec, &needs)?;
    let mut unjudged = unjudged(&from, checkpoint, &config, &names, &files);
    unjudged.extend(otherwise(options.engine, &config));
    let mut certificate = Certificate::new(spec, &layers, options, &reads, SCALES_FILE, unjudged)?;
    let place = to.display().to_string();
    certificate.notes.extend(biased(&needs, spec, options.engine, &place, &options.serving));
    let operands: Vec<Operand> = Operand::ALL.into_iter().filter(|operand| reads.scale(*operand)).collect();
    let served = layers.iter().zip(&spec.layers).filter(|(_, own)| !options.serving.skip.has(own));
    let served: Vec<LayerScales> = served.map(|(layer, _)| layer.clone()).collect();
    let scales = match reads.any() {
        true => Some(scale_file(options.engine, &spec.family, &served, &operands, options.per_head)?),
        false => None,
    };

    let gone = files_with(&files, |name| names.is_scale(name));
    let mistral = |name: &str| name.starts_with("consolidated") && name.ends_with(".safetensors");
    // vLLM would load these, under other names, in place of the index's files.
    let foreign = |name: &str| options.engine == Engine::Vllm && (mistral(name) || name == "params.json");
    let present = || files.files().chain(files.unlisted.iter().map(String::as_str));
    let has_foreign = present().any(mistral);
    let mut left_out: Vec<String> = present().filter(|name| foreign(name)).map(str::to_owned).collect();
    left_out.sort_unstable();
    let index_file = Settings::read_if_present(&from.join(INDEX))?;
    let quantized = hf_quant_config(&from, aside)?;
    if reads.any() {
        config.ask_for_fp8(options.engine, &method, options.per_head);
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
        command: options.engine.command(&to.display().to_string(), &options.serving),
        linked: moved.linked,
        copied: moved.copied,
        left_out,
        certificate,
    })
}

/// Name and bytes of each tensor.
fn stored_sizes(file: &[u8]) -> Result<Vec<(String, usize)>> {
    let read = safetensors::SafeTensors::deserialize(file).map_err(|e| Error::format(Path::new(SCALES_FILE), e))?;
    Ok(read.iter().map(|(name, tensor)| (name.to_owned(), tensor.data().len())).collect())
}

/// What the engine does with the scales of the export.
fn reads(
    options: &ExportOptions,
    spec: &AttentionSpec,
    config: &Settings,
    method: &Method,
    names: &ScaleNames,
) -> Result<Reads> {
    let (engine, description) = (options.engine, options.engine.description());
    let none = |why: &str| Ok(Reads { why: Some(why.to_owned()), ..Reads::default() });
    let unknown = |what: std::fmt::Arguments<'_>| {
        let rule = format_args!("{what} is not known of {engine} {}: there is no export for it", description.version);
        Err(Error::unsupported(rule))
    };
    match description.loads(spec, &config.types()) {
        None => return unknown(format_args!("what the attention of family `{}` loads", spec.family)),
        Some(Loads::Nothing(why)) => return none(why),
        Some(Loads::Partly(_, why)) => {
            return Err(Error::unsupported(format_args!("{why}: there is no export for it")));
        }
        Some(Loads::Scales(_)) => {}
    }
    // Unquantized weights get a config that asks for the scales.
    if !method.is_plain() {
        let key = method.key();
        match description.methods.iter().find(|(word, _)| *word == key) {
            None => return unknown(format_args!("whether scales are loaded next to weights stored as `{key}`")),
            Some((_, Carries::Never(why))) => return none(why),
            Some((_, Carries::NotExcluded)) => {
                let excluded = |module: &&String| config.quark_excludes(&format!("{module}.attn")) != Some(false);
                if let Some(module) = names.modules.iter().find(excluded) {
                    return Err(Error::unsupported(format_args!(
                        "Quark's `exclude` matches {module} (or cannot be followed), and {engine} has no scales there: remove the \
                         entry"
                    )));
                }
            }
            Some(_) => {}
        }
    }
    let why = description.without.map(str::to_owned);
    Ok(Reads { scaled: description.operands, why, named_at_start: method.name == "fp8" })
}

/// The scales of each layer as this engine needs them: what two layers share is the larger of both.
fn layers(options: &ExportOptions, spec: &AttentionSpec, needs: &[Need]) -> Result<Vec<LayerScales>> {
    let own = |need: &Need| {
        options.engine.needed(need).cloned().ok_or_else(|| {
            Error::unsupported(format_args!(
                "{}: {} requantizes its FP8 weights of q, k and v, and after a norm with a shift they have no bound",
                need.stored.module, options.engine
            ))
        })
    };
    let mut layers = needs.iter().map(own).collect::<Result<Vec<_>>>()?;
    for (index, layer) in spec.layers.iter().enumerate() {
        let Some(source) = layer.kv_source else { continue };
        let Some(writer) = spec.layers.iter().position(|layer| layer.number == source) else { continue };
        let skip = &options.serving.skip;
        if skip.has(layer) != skip.has(&spec.layers[writer]) {
            return Err(Error::argument(format_args!(
                "layers to skip: layer {} reads the cache of layer {source}: skip both or none",
                layer.number
            )));
        }
        let larger = |a: &[Descale], b: &[Descale]| a.iter().zip(b).map(|(a, b)| a.max(*b)).collect::<Vec<_>>();
        let k = larger(&layers[index].k, &layers[writer].k);
        let v = layers[index].v.as_deref().zip(layers[writer].v.as_deref()).map(|(a, b)| larger(a, b));
        for place in [index, writer] {
            (layers[place].k, layers[place].v) = (k.clone(), v.clone());
        }
    }
    Ok(layers)
}

impl ExportOptions {
    fn check(&self, spec: &AttentionSpec, method: &Method, reads: &Reads) -> Result<()> {
        if !self.per_head {
            return Ok(());
        }
        let rule =
            if self.engine != Engine::Vllm || !reads.any() {
                "only vLLM reads per-head scales"
            } else if !(method.is_plain() || method.is_compressed_tensors()) {
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
