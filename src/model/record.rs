//! What files hold of an [`AttentionSpec`].

use super::families::family_named;
use super::mla::Mla;
use super::spec::{AttentionSpec, InputNorm, LayerSpec, Multipliers, QkNorm, QkvBias, Rope, Temperature};
use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A count that every layer has, as a number, or one of each layer, as a list where layers differ. It is how files and JSON
/// hold counts of heads.
///
/// ```
/// use sigmascale::model::PerLayer;
/// assert_eq!(PerLayer::new([8, 8]), PerLayer::Same(8));
/// assert_eq!(PerLayer::new([8, 4]).each(2)?, [8, 4]);
/// assert!(PerLayer::new([8, 4]).each(3).is_err());
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PerLayer {
    /// Every layer has it.
    Same(usize),
    /// One a layer.
    Each(Vec<usize>),
}

impl PerLayer {
    /// The shorter of the two forms.
    pub fn new(counts: impl IntoIterator<Item = usize>) -> Self {
        let counts: Vec<usize> = counts.into_iter().collect();
        match counts.first() {
            Some(first) if counts.iter().all(|count| count == first) => Self::Same(*first),
            _ => Self::Each(counts),
        }
    }

    /// One count a layer.
    ///
    /// # Errors
    /// `is_mismatch` if it is a list of another length.
    pub fn each(&self, layers: usize) -> Result<Vec<usize>> {
        match self {
            Self::Same(count) => Ok(vec![*count; layers]),
            Self::Each(counts) if counts.len() == layers => Ok(counts.clone()),
            Self::Each(counts) => {
                Err(Error::mismatch(format_args!("a list of {} counts for {layers} layers", counts.len())))
            }
        }
    }
}

/// The fields of a file: counts as [`PerLayer`], lists only of what differs between layers.
#[derive(Clone, Serialize, Deserialize)]
struct SpecRecord {
    name: String,
    family: String,
    causal: bool,
    layers: usize,
    /// Numbers of the layers, where layers without attention are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numbers: Option<Vec<usize>>,
    d_model: usize,
    n_q_heads: PerLayer,
    n_kv_heads: PerLayer,
    d_head: PerLayer,
    norm: InputNorm,
    bias: QkvBias,
    rope: Vec<Option<Rope>>,
    qk_norm: Option<QkNorm>,
    softmax_scale: Vec<f64>,
    /// Where a layer has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    temperature: Option<Vec<Option<Temperature>>>,
    /// Where a layer has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    window: Option<Vec<Option<usize>>>,
    /// Where a layer has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sinks: Option<Vec<bool>>,
    /// The same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mla: Option<Vec<Option<Mla>>>,
    /// The same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kv_source: Option<Vec<Option<usize>>>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    v_norm: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    streams: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    multipliers: Option<Multipliers>,
    soft_cap: Option<f64>,
    max_positions: Option<usize>,
    /// Where they are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    fp8_inputs: bool,
}

impl Serialize for AttentionSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        SpecRecord::from(self.clone()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for AttentionSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        SpecRecord::deserialize(deserializer)?.try_into().map_err(serde::de::Error::custom)
    }
}

impl From<AttentionSpec> for SpecRecord {
    fn from(spec: AttentionSpec) -> Self {
        let layers = &spec.layers;
        let numbers: Vec<usize> = layers.iter().map(|layer| layer.number).collect();
        Self {
            layers: layers.len(),
            numbers: (!numbers.iter().copied().eq(0..layers.len())).then_some(numbers),
            n_q_heads: PerLayer::new(layers.iter().map(|layer| layer.n_q_heads)),
            n_kv_heads: PerLayer::new(layers.iter().map(|layer| layer.n_kv_heads)),
            d_head: PerLayer::new(layers.iter().map(|layer| layer.d_head)),
            softmax_scale: layers.iter().map(|layer| layer.softmax_scale).collect(),
            temperature: layers
                .iter()
                .any(|layer| layer.temperature.is_some())
                .then(|| layers.iter().map(|layer| layer.temperature).collect()),
            window: layers
                .iter()
                .any(|layer| layer.window.is_some())
                .then(|| layers.iter().map(|layer| layer.window).collect()),
            sinks: layers.iter().any(|layer| layer.sinks).then(|| layers.iter().map(|layer| layer.sinks).collect()),
            mla: spec.has_mla().then(|| layers.iter().map(|layer| layer.mla).collect()),
            kv_source: layers
                .iter()
                .any(|layer| layer.kv_source.is_some())
                .then(|| layers.iter().map(|layer| layer.kv_source).collect()),
            v_norm: spec.v_norm,
            streams: spec.streams,
            multipliers: spec.multipliers,
            rope: spec.layers.into_iter().map(|layer| layer.rope).collect(),
            name: spec.name,
            family: spec.family,
            causal: spec.causal,
            d_model: spec.d_model,
            norm: spec.norm,
            bias: spec.bias,
            qk_norm: spec.qk_norm,
            soft_cap: spec.soft_cap,
            max_positions: spec.max_positions,
            fp8_inputs: spec.fp8_inputs,
        }
    }
}

impl TryFrom<SpecRecord> for AttentionSpec {
    type Error = Error;

    fn try_from(record: SpecRecord) -> Result<Self> {
        let layers = record.layers;
        // The lists bound the count, before anything is allocated by it.
        for (field, entries) in [("rope", record.rope.len()), ("softmax_scale", record.softmax_scale.len())] {
            if entries != layers {
                return Err(Error::mismatch(format_args!("`{field}` has {entries} entries for {layers} layers")));
            }
        }
        let each =
            |field: &str, counts: &PerLayer| counts.each(layers).map_err(|e| e.within(format_args!("`{field}`")));
        let temperature = record.temperature.unwrap_or_else(|| vec![None; layers]);
        let window = record.window.unwrap_or_else(|| vec![None; layers]);
        let sinks = record.sinks.unwrap_or_else(|| vec![false; layers]);
        let mla = record.mla.unwrap_or_else(|| vec![None; layers]);
        let kv_source = record.kv_source.unwrap_or_else(|| vec![None; layers]);
        let lists = [
            ("temperature", temperature.len()),
            ("window", window.len()),
            ("sinks", sinks.len()),
            ("mla", mla.len()),
            ("kv_source", kv_source.len()),
        ];
        for (field, entries) in lists {
            if entries != layers {
                return Err(Error::mismatch(format_args!("`{field}` has {entries} entries for {layers} layers")));
            }
        }
        let n_q_heads = each("n_q_heads", &record.n_q_heads)?;
        let n_kv_heads = each("n_kv_heads", &record.n_kv_heads)?;
        let d_head = each("d_head", &record.d_head)?;
        let numbers = match record.numbers {
            Some(numbers) => each("numbers", &PerLayer::Each(numbers))?,
            None => (0..layers).collect(),
        };
        let layers =
            record.rope.into_iter().zip(record.softmax_scale).enumerate().map(|(at, (rope, softmax_scale))| {
                LayerSpec {
                    number: numbers[at],
                    n_q_heads: n_q_heads[at],
                    n_kv_heads: n_kv_heads[at],
                    d_head: d_head[at],
                    rope,
                    softmax_scale,
                    temperature: temperature[at],
                    window: window[at],
                    sinks: sinks[at],
                    kv_source: kv_source[at],
                    mla: mla[at],
                }
            });
        Ok(Self {
            layers: layers.collect(),
            name: record.name,
            prefix: family_named(&record.family)
                .and_then(|family| family.prefixes.first())
                .copied()
                .unwrap_or_default()
                .into(),
            family: record.family,
            causal: record.causal,
            d_model: record.d_model,
            norm: record.norm,
            bias: record.bias,
            qk_norm: record.qk_norm,
            soft_cap: record.soft_cap,
            max_positions: record.max_positions,
            v_norm: record.v_norm,
            streams: record.streams,
            multipliers: record.multipliers,
            fp8_inputs: record.fp8_inputs,
        })
    }
}
