//! What an export certifies: the scale or the 1.0 that an engine casts with, compared with what the weights need.

use super::audit::Unjudged;
use super::engine::{Engine, Operand};
use super::options::Serving;
use super::scales::LayerScales;
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, Checkpoint, require_attention_module};
use crate::plan::{CenterPolicy, CenteredLayer, OperandDescales, ScalePlan, center_hash};
use crate::scale::Descale;
use serde::Serialize;

/// What an export is asked for.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Who loads it.
    pub engine: Engine,
    /// One scale a head in place of one a tensor; vLLM only.
    pub per_head: bool,
    /// Copies of the weights in place of hard links.
    pub copy: bool,
    /// What the server will be started with.
    pub serving: Serving,
}

/// What an engine does with the scales of an exported checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Reads {
    /// Whether it casts q, k and v with a scale of the checkpoint, and not at 1.0.
    pub scaled: [bool; 3],
    /// Why it does not, for people.
    pub why: Option<String>,
    /// Whether the FP8 cache has to be asked for when the server starts.
    pub named_at_start: bool,
}

impl Reads {
    pub fn scale(&self, operand: Operand) -> bool {
        self.scaled[operand as usize]
    }

    pub fn any(&self) -> bool {
        self.scaled.contains(&true)
    }
}

/// What an engine casts with, compared with what the weights need.
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
    /// Whether no operand can overflow, those cast at 1.0 included, and nothing that attention reads was left unjudged.
    pub safe: bool,
    /// What the server is started with.
    pub serving: Serving,
    /// What to know before serving.
    pub notes: Vec<String>,
    /// What attention reads, or may read, and was not judged.
    pub unjudged: Vec<Unjudged>,
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
    /// The centers that a policy gives the layers of a checkpoint, beside no export; `None` where nothing is subtracted. `each` is
    /// called after each layer, and stops the work by an error.
    ///
    /// # Errors
    /// `is_argument` for a center from means, which needs tokens; otherwise as [`Checkpoint::layer`] and [`CenteredLayer::of_weights`].
    pub fn of_checkpoint(
        checkpoint: &Checkpoint,
        policy: &CenterPolicy,
        each: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Self>> {
        policy.check_for_weights()?;
        let spec = checkpoint.spec();
        let mut layers = Vec::new();
        for (index, own) in spec.layers.iter().enumerate() {
            each()?;
            let Some((_, centered)) = CenteredLayer::of_weights(spec, checkpoint.layer(index)?, policy)? else {
                continue;
            };
            if !centered.center.is_none() {
                layers.push((own.number, require_attention_module(&spec.family, &spec.prefix, own.number)?, centered));
            }
        }
        Self::new(*policy, layers.iter().map(|(number, module, own)| (*number, module.as_str(), own)))
    }

    /// Of the scales of an export, which have centers of its policy.
    fn of_scales(layers: &[LayerScales]) -> Result<Option<Self>> {
        let centered = layers.iter().filter_map(|layer| layer.centered.as_ref().map(|own| (layer, own)));
        Self::new(CenterPolicy::CACHE, centered.map(|(layer, own)| (layer.layer, layer.module.as_str(), own)))
    }

    fn new<'a>(
        policy: CenterPolicy,
        layers: impl Iterator<Item = (usize, &'a str, &'a CenteredLayer)> + Clone,
    ) -> Result<Option<Self>> {
        let hash = center_hash(&layers.clone().map(|(.., own)| own.center.clone()).collect::<Vec<_>>());
        let layers = layers.map(|(layer, module, own)| {
            let up = |row: &[Descale]| row.iter().map(|scale| scale.up_to_bf16()).collect::<Result<Vec<_>>>();
            let within = |error: Error| error.within(module);
            Ok(LayerCenters {
                layer,
                module: module.to_owned(),
                k: own.center.k.clone(),
                v: own.center.v.clone(),
                k_scale: up(&own.k_descale).map_err(within)?,
                v_scale: own.v_descale.as_deref().map(up).transpose().map_err(within)?,
                positions: own.positions,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok((!layers.is_empty()).then_some(Self { policy, hash, layers }))
    }
}

/// One layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerCertificate {
    /// The model's own number.
    pub layer: usize,
    /// Whether it is kept out of the FP8 cache, and needs no scale.
    pub kept: bool,
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

impl Certificate {
    /// The certificate of these layers; `file` is that of the scales.
    pub(super) fn new(
        spec: &AttentionSpec,
        layers: &[LayerScales],
        options: &ExportOptions,
        reads: &Reads,
        file: &'static str,
        unjudged: Vec<Unjudged>,
    ) -> Result<Self> {
        let rows = layers.iter().zip(&spec.layers).map(|(layer, own)| {
            let kept = options.serving.skip.has(own);
            let part = |operand| operand_of(layer, operand, options, reads, kept);
            let without = || Error::unsupported(format_args!("{}: q or k has no bound", layer.module));
            Ok(LayerCertificate {
                layer: layer.layer,
                kept,
                q: part(Operand::Q)?.ok_or_else(without)?,
                k: part(Operand::K)?.ok_or_else(without)?,
                v: part(Operand::V)?,
            })
        });
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let fits = |layer: &LayerCertificate| {
            layer.kept || layer.q.safe && layer.k.safe && layer.v.as_ref().is_some_and(|v| v.safe)
        };
        Ok(Self {
            sigmascale: env!("CARGO_PKG_VERSION"),
            engine: options.engine,
            model: spec.name.clone(),
            family: spec.family.clone(),
            granularity: if options.per_head { "head" } else { "tensor" },
            scales_file: reads.any().then_some(file),
            safe: unjudged.is_empty() && rows.iter().all(fits),
            serving: options.serving.clone(),
            notes: [notes(&rows, options, reads), prefill_notes(layers)].concat(),
            unjudged,
            centers: CenterCertificate::of_scales(layers)?,
            layers: rows,
        })
    }
}

/// One operand's certificate; none where it has no bound and the engine casts at 1.0.
fn operand_of(
    layer: &LayerScales,
    operand: Operand,
    options: &ExportOptions,
    reads: &Reads,
    kept: bool,
) -> Result<Option<OperandCertificate>> {
    let Some(row) = layer.row(operand) else {
        // An engine that would read a scale gets an error.
        let wanted = reads.scale(operand) && !kept;
        return if wanted { layer.stored(operand, false).map(|_| None) } else { Ok(None) };
    };
    let needed = |per_head: bool| -> Vec<f32> {
        if per_head {
            let entries = if operand == Operand::Q { layer.n_q_heads } else { row.len() };
            (0..entries).map(|entry| row[entry * row.len() / entries].get()).collect()
        } else {
            vec![ScalePlan::per_tensor(row).get()]
        }
    };
    Ok(Some(if reads.scale(operand) && !kept {
        let scale = layer.stored(operand, options.per_head)?.into_iter().map(Descale::get).collect();
        OperandCertificate::new(scale, needed(options.per_head), false)
    } else {
        OperandCertificate::new(vec![1.0], needed(false), true)
    }))
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
fn notes(layers: &[LayerCertificate], options: &ExportOptions, reads: &Reads) -> Vec<String> {
    let mut notes: Vec<String> = reads.why.iter().map(|why| format!("{why}.")).collect();
    type Part = fn(&LayerCertificate) -> Option<&OperandCertificate>;
    let parts: [(&str, Part); 3] =
        [("q", |layer| Some(&layer.q)), ("k", |layer| Some(&layer.k)), ("v", |layer| layer.v.as_ref())];
    for (name, part) in parts {
        let worst = layers
            .iter()
            .filter(|layer| !layer.kept)
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
        if layers.iter().any(|layer| !layer.kept && part(layer).is_none()) {
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
    if reads.named_at_start && reads.any() {
        notes.push("The KV-cache type has to be named at the start: `auto` stays BF16 for this checkpoint.".to_owned());
    }
    notes
}
