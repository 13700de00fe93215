//! What files hold of an [`AttentionSpec`]: its own fields, and its layers as columns.

use super::families::family_named;
use super::mla::Mla;
use super::spec::{AttentionSpec, LayerSpec, Rope, Temperature};
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
    /// One per layer.
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

    /// One count per layer.
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

impl Serialize for AttentionSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        AttentionSpec::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for AttentionSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut spec = AttentionSpec::deserialize(deserializer)?;
        let prefixes = family_named(&spec.family).map(|family| family.prefixes).unwrap_or_default();
        spec.prefix = prefixes.first().copied().unwrap_or_default().into();
        Ok(spec)
    }
}

/// [`AttentionSpec::layers`] in files.
pub(super) fn serialize<S: Serializer>(layers: &[LayerSpec], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    Columns::from(layers).serialize(serializer)
}

/// See [`serialize`].
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<LayerSpec>, D::Error> {
    Columns::deserialize(deserializer)?.try_into().map_err(serde::de::Error::custom)
}

/// Declares what files hold of the layers. The traits named here are lists in a file, left out where no layer has the trait.
macro_rules! columns {
    ($($field:ident: $Type:ty,)*) => {
        /// The layers of a file: counts as [`PerLayer`], and lists.
        #[derive(Serialize, Deserialize)]
        struct Columns {
            layers: usize,
            /// Numbers of the layers, where layers without attention are left out.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            numbers: Option<Vec<usize>>,
            n_q_heads: PerLayer,
            n_kv_heads: PerLayer,
            d_head: PerLayer,
            rope: Vec<Option<Rope>>,
            softmax_scale: Vec<f64>,
            $(#[serde(default, skip_serializing_if = "Option::is_none")] $field: Option<Vec<$Type>>,)*
        }

        impl From<&[LayerSpec]> for Columns {
            fn from(layers: &[LayerSpec]) -> Self {
                let numbers: Vec<usize> = layers.iter().map(|layer| layer.number).collect();
                Self {
                    layers: layers.len(),
                    numbers: (!numbers.iter().copied().eq(0..layers.len())).then_some(numbers),
                    n_q_heads: PerLayer::new(layers.iter().map(|layer| layer.n_q_heads)),
                    n_kv_heads: PerLayer::new(layers.iter().map(|layer| layer.n_kv_heads)),
                    d_head: PerLayer::new(layers.iter().map(|layer| layer.d_head)),
                    rope: layers.iter().map(|layer| layer.rope.clone()).collect(),
                    softmax_scale: layers.iter().map(|layer| layer.softmax_scale).collect(),
                    $($field: column(layers.iter().map(|layer| layer.$field)),)*
                }
            }
        }

        impl TryFrom<Columns> for Vec<LayerSpec> {
            type Error = Error;

            fn try_from(columns: Columns) -> Result<Self> {
                let layers = columns.layers;
                // The lists bound the count, before anything is allocated by it.
                let lists = [
                    ("rope", Some(columns.rope.len())),
                    ("softmax_scale", Some(columns.softmax_scale.len())),
                    ("numbers", columns.numbers.as_ref().map(Vec::len)),
                    $((stringify!($field), columns.$field.as_ref().map(Vec::len)),)*
                ];
                for (field, entries) in lists {
                    if let Some(entries) = entries.filter(|entries| *entries != layers) {
                        return Err(Error::mismatch(format_args!("`{field}` has {entries} entries for {layers} layers")));
                    }
                }
                let each = |field: &str, counts: &PerLayer| {
                    counts.each(layers).map_err(|error| error.within(format_args!("`{field}`")))
                };
                let n_q_heads = each("n_q_heads", &columns.n_q_heads)?;
                let n_kv_heads = each("n_kv_heads", &columns.n_kv_heads)?;
                let d_head = each("d_head", &columns.d_head)?;
                let one = |(at, (rope, softmax_scale))| LayerSpec {
                    number: columns.numbers.as_ref().map_or(at, |numbers| numbers[at]),
                    n_q_heads: n_q_heads[at],
                    n_kv_heads: n_kv_heads[at],
                    d_head: d_head[at],
                    rope,
                    softmax_scale,
                    $($field: columns.$field.as_ref().map_or_else(Default::default, |column| column[at]),)*
                };
                Ok(columns.rope.into_iter().zip(columns.softmax_scale).enumerate().map(one).collect())
            }
        }
    };
}
columns! {
    temperature: Option<Temperature>,
    window: Option<usize>,
    sinks: bool,
    mla: Option<Mla>,
    kv_source: Option<usize>,
}

/// A list, unless no layer has the trait.
fn column<T: Default + PartialEq>(values: impl Iterator<Item = T>) -> Option<Vec<T>> {
    let values: Vec<T> = values.collect();
    values.iter().any(|value| *value != T::default()).then_some(values)
}
