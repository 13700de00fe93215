//! What an engine needs of each layer: the bounds of the weights under the options of the server, with what the engine computes
//! otherwise than the config and the files say.
//!
//! **Temperature.** vLLM does not read `attn_temperature_tuning` of Llama 4: it is on where the longest sequence passes 32768, or
//! by the generation config.
//!
//! **Rotations.** Where a class of an engine does not read the factor that the config states for the rotation, the factor that follows
//! from the other settings counts, where it is larger.
//!
//! **Requantized weights.** Engines fuse q, k and v. Where each of them is E4M3 with one scale, they are brought to the largest of
//! the three; scales of blocks are brought to powers of two. With new scale s', a weight w changes by at most
//! `|w| / 16 + s' / 1024`: half a step of E4M3, of a normal or a subnormal number. A bound b of an operand grows by at most
//! `b / 16 + sqrt(d) ||g|| s' / 1024` with the gain g of the norm, times what multiplies the operand afterwards.

use super::engine::{Engine, Operand};
use super::options::{KvFormat, Serving, SkipLayers};
use super::scales::LayerScales;
use super::settings::Settings;
use crate::error::Result;
use crate::fp8::E4M3_MAX;
use crate::model::{AttentionSpec, Checkpoint, GainForm, LayerSpec, LayerWeights, NormKind, Temperature};
use crate::scale::Descale;
use std::path::Path;

/// From this many positions on vLLM turns the temperature of Llama 4 on.
const TUNED_FROM: usize = 32768;
/// Half a step of a normal E4M3 number, relative to it.
const RELATIVE: f64 = 1.0 / 16.0;
/// Half a step of a subnormal one.
const ABSOLUTE: f64 = 1.0 / 1024.0;

/// One layer's needs.
pub(super) struct Need {
    /// By the stored weights.
    pub stored: LayerScales,
    /// By the weights as an engine requantizes them; none where it leaves them.
    pub requantized: Option<LayerScales>,
    /// Why there is no bound for requantized weights.
    pub unbounded: bool,
    /// The largest bias of a key over the bound of the keys: 0 without one.
    pub key_bias: f32,
}

/// The needs of every layer. `each` is called after each.
pub(super) fn needs(
    checkpoint: &Checkpoint,
    spec: &AttentionSpec,
    each: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Need>> {
    let mut all = Vec::with_capacity(spec.layers.len());
    for index in 0..spec.layers.len() {
        let weights = checkpoint.layer(index)?;
        let own = spec.layer(index)?;
        let coarser = coarser_scale(checkpoint, spec, index)?;
        let extra = coarser.map(|coarser| extra(spec, own, &weights, coarser));
        let biases = weights.k.bias.clone().filter(|_| spec.qk_norm_of(own).is_none());
        let stored = LayerScales::new(spec, weights)?;
        let requantized = match &extra {
            Some(Some(extra)) => Some(stored.raised(RELATIVE, *extra)?),
            _ => None,
        };
        let key_bias = biases.map_or(0.0, |biases| bias_share(own, &biases, &stored.k));
        all.push(Need { stored, requantized, unbounded: matches!(extra, Some(None)), key_bias });
        each()?;
    }
    Ok(all)
}

/// The largest scale to which q, k and v of a layer are requantized; none where they are left as they are.
fn coarser_scale(checkpoint: &Checkpoint, spec: &AttentionSpec, index: usize) -> Result<Option<f64>> {
    if spec.has_mla() {
        return Ok(None);
    }
    let Some(scales) = checkpoint.weight_scales(index)? else { return Ok(None) };
    let largest = scales.values.iter().flatten().copied().fold(0.0, f64::max);
    if scales.blocks {
        let exact = |scale: &f64| scale.log2().fract() == 0.0;
        return Ok((!scales.values.iter().flatten().all(exact)).then_some(2.0 * largest));
    }
    let differ = scales.values.iter().any(|row| row != &scales.values[0]);
    let one_each = scales.values.iter().all(|row| row.len() == 1);
    Ok((one_each && differ).then_some(largest))
}

/// How much further than by `RELATIVE` the bounds of q, k and v grow; none where that is not known.
fn extra(spec: &AttentionSpec, own: &LayerSpec, weights: &LayerWeights<'_>, coarser: f64) -> Option<[f64; 3]> {
    if spec.norm.shift || spec.norm.kind == NormKind::None {
        return None;
    }
    let form = |gain: &f64| if spec.norm.gain == GainForm::OnePlus { 1.0 + gain } else { *gain };
    let squares = match &weights.norm_gain {
        Some(gain) => gain.iter().map(|gain| form(gain).powi(2)).sum(),
        None => spec.d_model as f64,
    };
    // Inputs that are rounded to E4M3 are longer by at most a sixteenth.
    let most = ABSOLUTE * coarser * (spec.d_model as f64 * squares).sqrt() * (1.0 + RELATIVE) * 1.001;
    // A rotation mixes two channels.
    let rotated = own.rope.as_ref().map_or(1.0, |rope| 2f64.sqrt() * rope.attention_factor.max(1.0));
    let key = spec.multipliers.map_or(1.0, |factors| factors.key.abs().max(1.0));
    let normed = spec.qk_norm_of(own).is_some();
    Some([
        if normed { 0.0 } else { most * rotated * own.query_factor() },
        if normed { 0.0 } else { most * rotated * key },
        if spec.v_norm { 0.0 } else { most },
    ])
}

/// The largest pair of a rotated bias, or the largest value of another, over what the keys need.
fn bias_share(own: &LayerSpec, biases: &[f64], needed: &[Descale]) -> f32 {
    let heads = biases.chunks(own.d_head.max(1)).zip(needed);
    let share = heads.map(|(head, needed)| {
        let single = head.iter().map(|x| x.abs()).fold(0.0, f64::max);
        let pair = own.rope.as_ref().map_or(0.0, |rope| {
            let norm = |(a, b): (usize, usize)| head[a].hypot(head[b]);
            rope.pairs().filter(|(a, b)| a.max(b) < &head.len()).map(norm).fold(0.0, f64::max) * rope.attention_factor
        });
        single.max(pair) / (f64::from(needed.get()) * f64::from(E4M3_MAX))
    });
    share.fold(0.0, f64::max) as f32
}

impl LayerScales {
    /// Every bound raised by a share of itself and by an amount of each of q, k and v.
    fn raised(&self, share: f64, extra: [f64; 3]) -> Result<Self> {
        let row = |row: &[Descale], extra: f64| -> Result<Vec<Descale>> {
            let one = |scale: &Descale| {
                let bound = f64::from(scale.get()) * f64::from(E4M3_MAX);
                Descale::covering(bound * (1.0 + share) + extra, f64::from(E4M3_MAX))
            };
            row.iter().map(one).collect()
        };
        let [q, k, v] = extra;
        let v = self.v.as_deref().map(|own| row(own, v)).transpose()?;
        Ok(Self { q: row(&self.q, q)?, k: row(&self.k, k)?, v, ..self.clone() })
    }
}

impl Engine {
    /// The attention of a model as this engine computes it, started with these options.
    ///
    /// # Errors
    /// As [`AttentionSpec::from_config_json`], of a config without the keys that the engine may not read.
    pub(super) fn spec(
        self,
        spec: &AttentionSpec,
        config: &Settings,
        generation: Option<&Settings>,
        serving: &Serving,
    ) -> Result<AttentionSpec> {
        let mut spec = spec.clone();
        let context = serving.context.or(spec.max_positions);
        if self == Self::Vllm && spec.family == "llama4_text" {
            let said = generation.and_then(|file| file.value.get("attn_temperature_tuning"));
            let is_off = |value: &serde_json::Value| value.as_bool() == Some(false) || value.as_f64() == Some(0.0);
            let tuned = said.map_or(context.is_none_or(|context| context > TUNED_FROM), |value| !is_off(value));
            let number = |key: &str, default: f64| config.text(key).and_then(|v| v.as_f64()).unwrap_or(default);
            let factor = Temperature {
                strength: number("attn_scale", 0.1).max(0.0),
                period: (number("floor_scale", 8192.0) as usize).max(1),
                shift: 1,
                positions: context.unwrap_or(usize::MAX),
            };
            for layer in spec.layers.iter_mut().filter(|layer| layer.rope.is_none()) {
                layer.temperature = tuned.then_some(factor);
            }
        }
        for key in self.description().unread {
            let Some(without) = config.without_rotation_key(key) else { continue };
            let other = AttentionSpec::from_config_json(&without.bytes()?, Path::new("config.json"))
                .map_err(|error| error.within(format_args!("without `{key}`, which {self} may not read")))?;
            let others = other.layers.into_iter().map(|layer| layer.rope);
            for (rope, other) in spec.layers.iter_mut().map(|layer| layer.rope.as_mut()).zip(others) {
                let Some((rope, other)) = rope.zip(other) else { continue };
                rope.attention_factor = rope.attention_factor.max(other.attention_factor);
            }
        }
        if let Some(context) = serving.context {
            for temperature in spec.layers.iter_mut().filter_map(|layer| layer.temperature.as_mut()) {
                temperature.positions = context;
            }
        }
        Ok(spec)
    }

    /// The options that this engine has.
    pub(super) fn serving(self, serving: &Serving) -> Serving {
        let mut own = serving.clone();
        if !self.description().skips_layers {
            (own.skip, own.kv) = (SkipLayers::default(), KvFormat::default());
        }
        own
    }

    /// The needs of a layer in this engine, or none where it computes with weights that have no bound.
    pub(super) fn needed(self, need: &Need) -> Option<&LayerScales> {
        let description = self.description();
        match &need.requantized {
            _ if !description.requantizes => Some(&need.stored),
            Some(requantized) => Some(requantized),
            None => (!need.unbounded).then_some(&need.stored),
        }
    }
}

/// The operands that a loader takes from another.
pub(super) const KEY_AND_VALUE: [Operand; 2] = [Operand::K, Operand::V];

/// Layers whose key bias is a large part of the bound of k, and how to keep them out of the FP8 cache of a folder, for people.
pub(super) fn biased(
    needs: &[Need],
    spec: &AttentionSpec,
    engine: Engine,
    folder: &str,
    serving: &Serving,
) -> Option<String> {
    /// Beside a bias b the steps of E4M3 are at least b / 16, however small a key's own part is: from this share on, 1/160 of the
    /// bound.
    const FROM: f32 = 0.1;
    let own = needs.iter().zip(&spec.layers).filter(|(need, own)| need.key_bias > FROM && !serving.skip.has(own));
    let mut layers: Vec<(usize, f32)> = own.map(|(need, _)| (need.stored.layer, need.key_bias)).collect();
    if layers.is_empty() {
        return None;
    }
    layers.sort_by(|a, b| b.1.total_cmp(&a.1));
    let named: Vec<String> = layers.iter().take(8).map(|(layer, share)| format!("{layer} ({share:.2})")).collect();
    let more = layers.len().saturating_sub(8);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let keep = if engine.description().skips_layers {
        let mut serving = serving.clone();
        serving.skip.numbers.extend(layers.iter().map(|(layer, _)| *layer));
        format!("Keep them in the model's type: {}", engine.command(folder, &serving))
    } else {
        format!("{engine} cannot keep single layers in the model's type.")
    };
    Some(format!(
        "The bias of the keys is above 0.1 of their bound in layers {}{more}: FP8 rounds most of what it stores of such keys alike \
         in every token. {keep}",
        named.join(", ")
    ))
}
