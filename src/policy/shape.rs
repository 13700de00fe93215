//! The heads of every layer, which a policy's state depends on.

use crate::bound::LayerBounds;
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, HeadOffsets, PerLayer};
use crate::plan::ScalePlan;
use crate::stats::StepStats;
use serde::{Deserialize, Serialize};

/// The heads of every layer, which a policy's state depends on.
///
/// ```
/// use sigmascale::policy::PolicyShape;
/// let shape = PolicyShape::new([(8, 2), (12, 3)]);
/// assert_eq!((shape.layers(), shape.layer(1)?.n_q_heads), (2, 12));
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ShapeRecord", into = "ShapeRecord")]
pub struct PolicyShape {
    heads: HeadOffsets,
}

/// The heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Query heads.
    pub n_q_heads: usize,
    /// KV heads; divides `n_q_heads`.
    pub n_kv_heads: usize,
}

/// What files hold of a shape: numbers where all layers have the same heads.
#[derive(Clone, Serialize, Deserialize)]
struct ShapeRecord {
    layers: usize,
    n_q_heads: PerLayer,
    n_kv_heads: PerLayer,
}

/// Most layers that a file's shape may have, before anything is allocated by it.
const MAX_LAYERS: usize = 1 << 16;

impl From<PolicyShape> for ShapeRecord {
    fn from(shape: PolicyShape) -> Self {
        let heads = &shape.heads;
        Self {
            layers: heads.layers(),
            n_q_heads: PerLayer::new((0..heads.layers()).map(|layer| heads.q(layer).len())),
            n_kv_heads: PerLayer::new((0..heads.layers()).map(|layer| heads.kv(layer).len())),
        }
    }
}

impl TryFrom<ShapeRecord> for PolicyShape {
    type Error = Error;

    fn try_from(record: ShapeRecord) -> Result<Self> {
        let layers = record.layers;
        if layers > MAX_LAYERS {
            return Err(Error::mismatch(format_args!("a policy of {layers} layers has more than {MAX_LAYERS}")));
        }
        let q = record.n_q_heads.each(layers).map_err(|error| error.within("`n_q_heads`"))?;
        let kv = record.n_kv_heads.each(layers).map_err(|error| error.within("`n_kv_heads`"))?;
        // Offsets are sums, which must not leave the range of a count.
        if q.iter().chain(&kv).any(|count| *count > u32::MAX as usize) {
            return Err(Error::mismatch("a layer of a policy has more than 2^32 heads"));
        }
        Ok(Self::new(q.into_iter().zip(kv)))
    }
}

impl From<&AttentionSpec> for PolicyShape {
    fn from(spec: &AttentionSpec) -> Self {
        Self::new(spec.layers.iter().map(|layer| (layer.n_q_heads, layer.n_kv_heads)))
    }
}

impl PolicyShape {
    /// From the query and KV heads of each layer.
    pub fn new(layers: impl IntoIterator<Item = (usize, usize)>) -> Self {
        Self { heads: HeadOffsets::new(layers) }
    }

    /// Layers that all have the same heads.
    pub fn uniform(layers: usize, n_q_heads: usize, n_kv_heads: usize) -> Self {
        Self::new(std::iter::repeat_n((n_q_heads, n_kv_heads), layers))
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.heads.layers()
    }

    /// Where each layer's heads lie among those of the model.
    pub fn heads(&self) -> &HeadOffsets {
        &self.heads
    }

    /// The heads of one layer.
    ///
    /// # Errors
    /// `is_mismatch` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<LayerShape> {
        if layer >= self.layers() {
            return Err(Error::mismatch(format_args!(
                "layer index {layer} is not one of the policy's {} layers",
                self.layers()
            )));
        }
        Ok(self.of(layer))
    }

    /// The heads of a layer that exists.
    pub(super) fn of(&self, layer: usize) -> LayerShape {
        LayerShape { n_q_heads: self.heads.q(layer).len(), n_kv_heads: self.heads.kv(layer).len() }
    }

    /// # Errors
    /// If a count is zero or query heads are not a multiple of the KV heads.
    pub fn check(&self) -> Result<()> {
        if self.layers() == 0 {
            return Err(Error::argument("a policy needs at least one layer"));
        }
        for layer in 0..self.layers() {
            let LayerShape { n_q_heads, n_kv_heads } = self.of(layer);
            if n_q_heads == 0 || n_kv_heads == 0 || !n_q_heads.is_multiple_of(n_kv_heads) {
                return Err(Error::argument(format_args!(
                    "layer index {layer} has {n_q_heads} query and {n_kv_heads} KV heads: a policy needs query heads that are a \
                     multiple of the KV heads"
                )));
            }
        }
        Ok(())
    }

    /// The layer's heads, if the bounds are theirs.
    pub(super) fn check_bounds(&self, bounds: &LayerBounds) -> Result<LayerShape> {
        let shape = self.layer(bounds.layer)?;
        let (n_q, n_kv) = (shape.n_q_heads, shape.n_kv_heads);
        check_rows(&[
            ("logit bounds", bounds.heads.len(), n_q),
            ("q bounds", bounds.q.len(), n_q),
            ("k bounds", bounds.k.len(), n_kv),
            ("v bounds", bounds.v.as_ref().map_or(n_kv, Vec::len), n_kv),
        ])?;
        Ok(shape)
    }

    /// The layer's heads, if plan, bounds and statistics are theirs.
    pub(super) fn check_step(&self, plan: &ScalePlan, bounds: &LayerBounds, stats: &StepStats) -> Result<LayerShape> {
        let shape = self.check_bounds(bounds)?;
        if plan.layer != bounds.layer {
            return Err(Error::mismatch("the plan and the bounds observed with it belong to two layers"));
        }
        let (n_q, n_kv) = (shape.n_q_heads, shape.n_kv_heads);
        let operands = &plan.operands;
        check_rows(&[
            ("logit descales", plan.logit_descale.len(), n_q),
            ("q descales", operands.q.len(), n_kv),
            ("k descales", operands.k.len(), n_kv),
            ("v descales", operands.v.as_ref().map_or(n_kv, Vec::len), n_kv),
            ("o descales", operands.o.as_ref().map_or(n_kv, Vec::len), n_kv),
        ])?;
        shape.check_stats(stats)?;
        Ok(shape)
    }
}

impl LayerShape {
    /// Query heads of one KV head.
    pub(super) fn group(self) -> usize {
        self.n_q_heads / self.n_kv_heads
    }

    /// Whether statistics are those of a layer of this shape.
    pub(super) fn check_stats(self, stats: &StepStats) -> Result<()> {
        let (n_q, n_kv) = (self.n_q_heads, self.n_kv_heads);
        check_rows(&[
            ("logit statistics", stats.logits.len(), n_q),
            ("q statistics", stats.q.len(), n_q),
            ("k statistics", stats.k.len(), n_kv),
            ("v statistics", stats.v.len(), n_kv),
            ("o statistics", stats.o.len(), n_q),
        ])
    }
}

fn check_rows(rows: &[(&str, usize, usize)]) -> Result<()> {
    match rows.iter().find(|(_, have, want)| have != want) {
        Some((what, have, want)) => {
            Err(Error::mismatch(format_args!("there are {have} {what}, and the policy's layer has {want}")))
        }
        None => Ok(()),
    }
}
