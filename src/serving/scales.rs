//! The scales of a layer, and the file that holds them.

use super::engine::{Engine, Operand};
use crate::bound::{LayerBounds, LayerRanges, MlaBounds};
use crate::error::{Error, Result};
use crate::geometry::LayerGeometry;
use crate::model::{AttentionSpec, LayerWeights, NormKind, require_attention_module};
use crate::plan::{Center, CenterPolicy, CenteredLayer, Granularity, OperandDescales, ScalePlan};
use crate::scale::Descale;
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// What the operands of one layer need: the worst-case bounds over 448, one entry per KV head.
///
/// With latent attention they are those of the absorbed form, which an FP8 cache holds: k and v are the cached row `[latent, k_pe]`,
/// of one entry, and q is the absorbed query, of one entry a head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerScales {
    /// The model's own number of the layer.
    pub layer: usize,
    /// Module that holds the layer's attention, as the checkpoint names it.
    pub module: String,
    /// Queries: the largest of the query heads that share a KV head.
    pub q: Vec<Descale>,
    /// Keys.
    pub k: Vec<Descale>,
    /// Values; `None` where they have no bound (OLMo 2).
    pub v: Option<Vec<Descale>>,
    /// Latent attention: q, k and v of each head, as prefill has them. `None` without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expanded: Option<OperandDescales>,
    /// The center that the weights give and the scales of what is cast with it. `None` where nothing is subtracted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub centered: Option<CenteredLayer>,
    /// Query heads.
    #[serde(skip)]
    pub n_q_heads: usize,
}

impl LayerScales {
    /// The scales of a layer by its weights: the operand descales of a calibration, without its logit bounds.
    ///
    /// # Errors
    /// As [`LayerGeometry::new`], [`LayerBounds::operands`] and [`CenteredLayer::new`]; with latent attention as [`MlaBounds::operands`].
    pub fn new(spec: &AttentionSpec, weights: LayerWeights<'_>) -> Result<Self> {
        Self::of(spec, weights, |bounds, ranges| CenteredLayer::new(spec, bounds, ranges, &CenterPolicy::CACHE))
    }

    /// The same with a center that does not follow the weights, since entries of a cache have it.
    ///
    /// # Errors
    /// As [`LayerScales::new`] and [`CenteredLayer::with`].
    pub fn with_center(spec: &AttentionSpec, weights: LayerWeights<'_>, center: Center) -> Result<Self> {
        Self::of(spec, weights, |bounds, ranges| CenteredLayer::with(center, bounds, ranges))
    }

    fn of(
        spec: &AttentionSpec,
        weights: LayerWeights<'_>,
        center: impl FnOnce(&LayerBounds, &LayerRanges) -> Result<CenteredLayer>,
    ) -> Result<Self> {
        let index = weights.layer;
        let own = spec.layer(index)?;
        let module = require_attention_module(&spec.family, &spec.prefix, own.number)?;
        let within = |error: Error| error.within(spec.place(index));
        let (layer, n_q_heads) = (own.number, own.n_q_heads);
        let descales = |bounds: &LayerBounds| OperandDescales::from_bounds(bounds, Granularity::Head).map_err(within);
        if weights.mla.is_some() {
            let bounds = MlaBounds::operands(spec, weights)?;
            let expanded = Some(descales(&bounds.expanded)?);
            let q: Result<Vec<_>> = bounds.absorbed_q.iter().map(|bound| bound.descale()).collect();
            let row = vec![bounds.cache().descale().map_err(within)?];
            return Ok(Self {
                layer,
                module,
                q: q.map_err(within)?,
                k: row.clone(),
                v: Some(row),
                expanded,
                centered: None,
                n_q_heads,
            });
        }
        let (bounds, ranges) = LayerBounds::operands_and_ranges(spec, &LayerGeometry::new(spec, weights)?)?;
        let centered = center(&bounds, &ranges).map_err(within)?;
        let centered = Some(centered).filter(|layer| !layer.center.is_none());
        let OperandDescales { q, k, v, .. } = descales(&bounds)?;
        Ok(Self { layer, module, q, k, v, expanded: None, centered, n_q_heads })
    }

    /// The scales of a layer whose descales were computed elsewhere: one a KV head, as a [scale
    /// engine](crate::device::scale::ScaleEngine) leaves them.
    ///
    /// # Errors
    /// `is_unsupported` with latent attention, which no engine computes; `is_mismatch` if a row has not one descale a KV head, or
    /// there are descales of values that have no bound.
    pub fn from_descales(
        spec: &AttentionSpec,
        index: usize,
        q: Vec<Descale>,
        k: Vec<Descale>,
        v: Option<Vec<Descale>>,
    ) -> Result<Self> {
        let own = spec.layer(index)?;
        if own.mla.is_some() {
            return Err(Error::unsupported(format_args!(
                "{}: descales of latent attention (MLA) are computed on the CPU",
                spec.place(index)
            )));
        }
        let module = require_attention_module(&spec.family, &spec.prefix, own.number)?;
        let bounded = spec.norm.kind != NormKind::None;
        let rows = [Some(&q), Some(&k), v.as_ref()];
        if v.is_some() != bounded || rows.into_iter().flatten().any(|row| row.len() != own.n_kv_heads) {
            return Err(Error::mismatch(format_args!(
                "{}: expected descales of {} KV heads for q, k{}",
                spec.place(index),
                own.n_kv_heads,
                if bounded { " and v" } else { ", and none for v" },
            )));
        }
        Ok(Self { layer: own.number, module, q, k, v, expanded: None, centered: None, n_q_heads: own.n_q_heads })
    }

    /// The row of an operand.
    pub fn row(&self, operand: Operand) -> Option<&[Descale]> {
        match operand {
            Operand::Q => Some(&self.q),
            Operand::K => Some(&self.k),
            Operand::V => self.v.as_deref(),
        }
    }

    /// What is stored for an operand: the largest of the heads, or with `per_head` one entry per head (q: a query head), rounded up
    /// to BF16, and above 1.0 where that would be it.
    ///
    /// # Errors
    /// `is_unsupported` if the operand has no bound, `is_non_finite` if its scale is past BF16.
    pub fn stored(&self, operand: Operand, per_head: bool) -> Result<Vec<Descale>> {
        let row = self.row(operand).ok_or_else(|| {
            Error::unsupported(format_args!(
                "{}: v has no bound (no norm before its projection), so there is no v_scale to export",
                self.module
            ))
        })?;
        let row = match (per_head, operand) {
            (false, _) => vec![ScalePlan::per_tensor(row)],
            (true, Operand::Q) => {
                let group = (self.n_q_heads / row.len().max(1)).max(1);
                row.iter().flat_map(|scale| std::iter::repeat_n(*scale, group)).collect()
            }
            (true, _) => row.to_vec(),
        };
        // Loaders take exactly 1.0 for a scale that is not there, and later updates of the weights then pass it over.
        let past = |scale: Descale| match scale {
            Descale::ONE => Descale::new(1.0f32.next_up())?.up_to_bf16(),
            other => Ok(other),
        };
        let up = |scale: Descale| scale.up_to_bf16().and_then(past).map_err(|error| error.within(&self.module));
        row.into_iter().map(up).collect()
    }
}

/// The safetensors file of one engine's scales: f32, of shape `[]` or with `per_head` `[heads, 1, 1]`.
pub(super) fn scale_file(
    engine: Engine,
    family: &str,
    layers: &[LayerScales],
    operands: &[Operand],
    per_head: bool,
) -> Result<Vec<u8>> {
    let mut values = BTreeMap::new();
    for layer in layers {
        for &operand in operands {
            let name = engine.scale_name(family, &layer.module, operand);
            let row = layer.stored(operand, per_head)?;
            let bytes: Vec<u8> = row.iter().flat_map(|scale| scale.get().to_le_bytes()).collect();
            let shape = if per_head { vec![row.len(), 1, 1] } else { vec![] };
            if values.insert(name.clone(), (shape, bytes)).is_some() {
                return Err(Error::argument(format_args!("duplicate {name}")));
            }
        }
    }
    let broken = |e| Error::format(Path::new("scales"), format_args!("cannot be written as safetensors: {e}"));
    let tensors = values
        .iter()
        .map(|(name, (shape, bytes))| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(broken)?)))
        .collect::<Result<Vec<_>>>()?;
    // Hugging Face transformers asks for the format.
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(about)).map_err(broken)
}
