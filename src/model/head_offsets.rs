//! Where each layer's heads begin in arrays of a whole model.

use std::ops::Range;

/// Prefix sums of the query and KV heads of each layer: arrays over a model hold one layer's values behind another's,
/// without padding, also where layers have unequal numbers of heads.
///
/// ```
/// use sigmascale::model::HeadOffsets;
/// let heads = HeadOffsets::new([(8, 2), (12, 3), (8, 2)]);
/// assert_eq!((heads.layers(), heads.all_q(), heads.all_kv()), (3, 28, 7));
/// assert_eq!((heads.q(2), heads.kv(1)), (20..28, 2..5));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadOffsets {
    /// Query and KV heads in front of each layer, and of all.
    starts: Vec<(usize, usize)>,
}

impl HeadOffsets {
    /// From the query and KV heads of each layer.
    pub fn new(layers: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut starts = vec![(0, 0)];
        let mut next = (0, 0);
        starts.extend(layers.into_iter().map(|(q, kv)| {
            next = (next.0 + q, next.1 + kv);
            next
        }));
        Self { starts }
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.starts.len() - 1
    }

    /// Query heads of a layer, counted over the model.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn q(&self, layer: usize) -> Range<usize> {
        self.starts[layer].0..self.starts[layer + 1].0
    }

    /// KV heads of a layer, counted over the model.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn kv(&self, layer: usize) -> Range<usize> {
        self.starts[layer].1..self.starts[layer + 1].1
    }

    /// Most query heads of a layer.
    pub fn most_q(&self) -> usize {
        (0..self.layers()).map(|layer| self.q(layer).len()).max().unwrap_or(0)
    }

    /// Query heads of all layers.
    pub fn all_q(&self) -> usize {
        self.starts[self.layers()].0
    }

    /// KV heads of all layers.
    pub fn all_kv(&self) -> usize {
        self.starts[self.layers()].1
    }
}
