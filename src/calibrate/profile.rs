//! A calibration's result. Its serialized form is the JSON of `sigmascale calibrate`.

use super::options::Options;
use crate::bound::{BoundKind, CStar, HeadBounds, LayerBounds, LayerRanges, MlaBounds, OperandBound, Tail};
use crate::error::{Error, Result};
use crate::geometry::LayerGeometry;
use crate::model::{
    AttentionSpec, Mla, NormKind, PerLayer, QkNormScope, QkvBias, RopeLayout, require_attention_module,
};
use crate::plan::{Center, CenterPolicy, CenteredLayer, Granularity, OperandDescales, ScalePlan, center_hash};
use crate::scale::Descale;
use crate::serving::LayerScales;
use crate::spectral::{Estimator, HeadSpectrum, PowerEstimate, certified_inflation};
use serde::Serialize;

/// Result of a calibration.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// The model.
    pub model: ModelSummary,
    /// The union bound.
    pub tail: TailSummary,
    /// The paper's constants.
    pub c_star: CStar,
    /// The constant that replaces `c_star` under `as_paper`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen_c: Option<ChosenC>,
    /// How the layers were computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<Method>,
    /// One entry per layer; only with weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<LayerProfile>>,
}

impl Profile {
    /// The scales of every layer as serving engines take them; none for a config without weights or under `as_paper`.
    ///
    /// # Errors
    /// `is_unsupported` if the family has no names for its layers, or for latent attention, whose cache holds neither keys nor
    /// values.
    pub fn layer_scales(&self) -> Result<Vec<LayerScales>> {
        let ModelSummary { family, prefix, .. } = &self.model;
        if self.model.mla.is_some() {
            return Err(Error::unsupported(format_args!(
                "{}: latent attention (MLA) caches no keys and values to export scales for: see `mla` of each layer",
                self.model.name
            )));
        }
        let scales = |(layer, operands): (&LayerProfile, OperandDescales)| {
            let module = require_attention_module(family, prefix, layer.number)?;
            let n_q_heads = layer.logit_descales.len();
            let OperandDescales { q, k, v, .. } = operands;
            Ok(LayerScales { layer: layer.number, module, q, k, v, expanded: None, centered: None, n_q_heads })
        };
        self.layers.iter().flatten().filter_map(|layer| Some((layer, layer.operands()?))).map(scales).collect()
    }

    /// The center of every layer.
    pub fn centers(&self) -> Vec<Center> {
        let of = |layer: &LayerProfile| {
            let (k, v) = layer.center.as_ref().map_or((None, None), |center| (center.c.clone(), center.m.clone()));
            Center { layer: layer.layer, k, v }
        };
        self.layers.iter().flatten().map(of).collect()
    }

    /// What a cache depends on that these centers were subtracted from: see [`center_hash`].
    pub fn center_hash(&self) -> String {
        center_hash(&self.centers())
    }
}

/// A constant in place of `c_star`, and the failure probability that it amounts to.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChosenC {
    /// The constant.
    pub c: f64,
    /// See [`Tail::delta_of`].
    pub delta: f64,
}

impl ChosenC {
    pub(super) fn new(options: &Options, spec: &AttentionSpec) -> Result<Option<Self>> {
        options.c.map(|c| Ok(Self { c, delta: options.tail.delta_of(c, spec)? })).transpose()
    }
}

/// How layers were computed.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Method {
    /// Bound that logit descales come from; null under `as_paper`, which has a bound of its own.
    pub bound: Option<BoundKind>,
    /// Engine.
    pub estimator: Estimator,
    /// Iterations of a power iteration, from random vectors; absent with exact norms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iterations: Option<usize>,
    /// Whether the logit bound holds under the model's rotation: power iteration and `as_paper` leave RoPE out.
    pub rotation: bool,
    /// One scale per head or per layer.
    pub granularity: Granularity,
    /// Whether everything is as the paper has it.
    pub as_paper: bool,
    /// Soft-cap of the logits that the bounds count; absent where they hold without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_cap: Option<f64>,
    /// The constant that multiplied the worst case under `as_paper`.
    pub c: Option<f64>,
    /// Behind a LayerNorm, the largest `|mean| / sqrt(variance + epsilon)` of a token up to which bounds hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_norm_mean_limit: Option<f64>,
    /// Where centers of keys and values come from; absent under `as_paper`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub centers: Option<CenterPolicy>,
}

/// A model in a line.
#[derive(Clone, Debug, Serialize)]
pub struct ModelSummary {
    /// Preset, folder or file.
    pub name: String,
    /// Family.
    pub family: String,
    /// Prefix of its tensor names.
    #[serde(skip)]
    pub prefix: String,
    /// Layers.
    pub layers: usize,
    /// Model dimension.
    pub d_model: usize,
    /// Query heads: a number, or a list with one for each layer where layers differ. So are the next two.
    pub n_q_heads: PerLayer,
    /// KV heads.
    pub n_kv_heads: PerLayer,
    /// Head dimension.
    pub d_head: PerLayer,
    /// Norm in front of attention.
    pub norm: NormKind,
    /// Pairing of the rotation, null without.
    pub rope: Option<RopeLayout>,
    /// Scope of the QK-norm, null without.
    pub qk_norm: Option<QkNormScope>,
    /// Sizes of latent attention; absent without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mla: Option<Mla>,
    /// Biases of q, k and v.
    pub bias: QkvBias,
    /// Positions up to which bounds hold, where queries grow with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounded_positions: Option<usize>,
    /// Bounds count inputs of the projections that are rounded to E4M3.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fp8_inputs: bool,
}

impl ModelSummary {
    /// The summary of a spec.
    pub fn new(spec: &AttentionSpec) -> Self {
        Self {
            name: spec.name.clone(),
            family: spec.family.clone(),
            prefix: spec.prefix.clone(),
            layers: spec.layers.len(),
            d_model: spec.d_model,
            n_q_heads: PerLayer::new(spec.layers.iter().map(|layer| layer.n_q_heads)),
            n_kv_heads: PerLayer::new(spec.layers.iter().map(|layer| layer.n_kv_heads)),
            d_head: PerLayer::new(spec.layers.iter().map(|layer| layer.d_head)),
            norm: spec.norm.kind,
            rope: spec.layers.iter().find_map(|layer| layer.rope.as_ref()).map(|rope| rope.layout),
            qk_norm: spec.qk_norm.map(|norm| norm.scope),
            mla: spec.layers.iter().find_map(|layer| layer.mla),
            bias: spec.bias,
            bounded_positions: spec.bounded_positions(),
            fp8_inputs: spec.fp8_inputs,
        }
    }
}

/// The union bound and eta.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TailSummary {
    /// Counts and failure probability.
    #[serde(flatten)]
    pub tail: Tail,
    /// Share of the E4M3 range.
    pub eta: f64,
}

/// One layer of a profile. Shapes: `heads` n_q, descales n_kv.
#[derive(Clone, Debug, Serialize)]
pub struct LayerProfile {
    /// Place among the layers that have attention.
    pub layer: usize,
    /// The model's own number of the layer, as tensor names have it: another where layers without attention come before it.
    pub number: usize,
    /// Largest sigma of a head; the paper's summed sigma under `as_paper`; null with QK-norm.
    pub sigma: Option<f64>,
    /// The paper's summed sigma, raw weights.
    pub sigma_sum: Option<f64>,
    /// Largest logit bound of a head, of the chosen kind.
    pub logit_bound: f64,
    /// Largest logit descale of a head.
    pub logit_descale: Descale,
    /// Logit descale of each query head.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logit_descales: Vec<Descale>,
    /// Descales of q per KV head; null where there is no bound or under `as_paper`.
    pub q_descale: Option<Vec<Descale>>,
    /// Of k.
    pub k_descale: Option<Vec<Descale>>,
    /// Of v.
    pub v_descale: Option<Vec<Descale>>,
    /// Of o.
    pub o_descale: Option<Vec<Descale>>,
    /// What centers change; absent where keys have no constant part and nothing is subtracted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub center: Option<CenterProfile>,
    /// Latent attention: what its cache needs, where the rows above are those of the expanded form. Absent without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mla: Option<MlaProfile>,
    /// The heads; absent under `as_paper`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<Vec<HeadProfile>>,
}

/// What centers change in one layer: rows have an entry per KV head. Bounds are in exact arithmetic, descales cover rounding.
#[derive(Clone, Debug, Serialize)]
pub struct CenterProfile {
    /// Largest constant of a rotation pair of keys, relative to the bound of k.
    pub bias_share: Vec<f64>,
    /// Bound of k at any position, which `k_descale` of the layer comes from.
    pub k_bound: Vec<f64>,
    /// Bound of k at the positions of the model.
    pub k_position_bound: Vec<f64>,
    /// Bound of k - c at these positions.
    pub k_centered_bound: Vec<f64>,
    /// Bound of v; null where there is none. So is the next.
    pub v_bound: Option<Vec<f64>>,
    /// Bound of v - m.
    pub v_centered_bound: Option<Vec<f64>>,
    /// The bounds hold at positions below this; null: at all.
    pub positions: Option<usize>,
    /// Descales that cover k - c. `k_descale` of the layer covers k.
    pub k_centered_descale: Vec<Descale>,
    /// Descales that cover v - m.
    pub v_centered_descale: Option<Vec<Descale>>,
    /// c, `d_head` values; null where nothing is subtracted. Elements are BF16 values.
    pub c: Option<Vec<Vec<f32>>>,
    /// m, `d_v` values.
    pub m: Option<Vec<Vec<f32>>>,
}

impl CenterProfile {
    pub(super) fn new(layer: CenteredLayer, bounds: &LayerBounds, ranges: &LayerRanges) -> Self {
        let exact = |heads: &[OperandBound]| heads.iter().map(|bound| bound.exact).collect();
        Self {
            k_bound: exact(&bounds.k),
            k_position_bound: ranges.k.iter().map(|head| head.plain().exact).collect(),
            k_centered_bound: exact(&layer.k),
            v_bound: bounds.v.as_deref().map(exact),
            v_centered_bound: layer.v.as_deref().map(exact),
            bias_share: layer.bias_share,
            positions: layer.positions,
            k_centered_descale: layer.k_descale,
            v_centered_descale: layer.v_descale,
            c: layer.center.k,
            m: layer.center.v,
        }
    }
}

/// Latent attention in absorbed form: a cached row `[latent, k_pe]`, which the values are part of, and its query.
#[derive(Clone, Debug, Serialize)]
pub struct MlaProfile {
    /// The one descale of a cached row.
    pub cache_descale: Descale,
    /// Descale of the absorbed query of each head, its rotated part included.
    pub absorbed_q_descale: Vec<Descale>,
    /// Bound on the latent, including rounding: up to 448 it cannot overflow at scale 1.
    pub latent_bound: f64,
    /// The same of the shared rotated key.
    pub k_pe_bound: f64,
}

impl MlaProfile {
    pub(super) fn new(bounds: &MlaBounds, granularity: Granularity) -> Result<Self> {
        let mut absorbed_q_descale =
            bounds.absorbed_q.iter().map(|bound| bound.descale()).collect::<Result<Vec<Descale>>>()?;
        if granularity == Granularity::Layer {
            let largest = ScalePlan::per_tensor(&absorbed_q_descale);
            absorbed_q_descale.fill(largest);
        }
        Ok(Self {
            cache_descale: bounds.cache().descale()?,
            absorbed_q_descale,
            latent_bound: bounds.latent.rounded,
            k_pe_bound: bounds.k_pe.rounded,
        })
    }
}

impl LayerProfile {
    /// The operand descales as a plan has them; `None` under `as_paper`.
    pub fn operands(&self) -> Option<OperandDescales> {
        Some(OperandDescales {
            q: self.q_descale.clone()?,
            k: self.k_descale.clone()?,
            v: self.v_descale.clone(),
            o: self.o_descale.clone(),
        })
    }
}

/// One query head of a profile.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HeadProfile {
    /// Query head.
    pub head: usize,
    /// The KV head it reads.
    pub kv_head: usize,
    /// Effective, unrotated norm.
    pub sigma: Option<f64>,
    /// Raw norm.
    pub sigma_raw: Option<f64>,
    /// Bound over every relative position.
    pub sigma_rope: Option<f64>,
    /// Certified upper bound of sigma_rope: what the bounds on logits use.
    pub sigma_certified: Option<f64>,
    /// Frobenius norm.
    pub frobenius: Option<f64>,
    /// `frobenius^2 / sigma^2`.
    pub stable_rank: Option<f64>,
    /// With `--estimator power`: what the estimate is worth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerProfile>,
    /// What constants add to the bound in exact arithmetic.
    pub bias_constant: Option<f64>,
    /// See [`HeadBounds`].
    pub bound_naive: Option<f64>,
    /// See [`HeadBounds`].
    pub bound_exact: Option<f64>,
    /// See [`HeadBounds`].
    pub bound_rounded: Option<f64>,
    /// See [`HeadBounds`].
    pub bound_rank_aware: Option<f64>,
    /// See [`HeadBounds`].
    pub bound_spectrum: Option<f64>,
}

/// What a power iteration's sigma is worth: a lower bound.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PowerProfile {
    /// Always true: sigma is at least the estimate.
    pub lower_bound: bool,
    /// Some singular value lies within this of the last iteration's `||M v||`, which is at most the estimate.
    pub residual: f64,
    /// The estimate times this is an upper bound but for one start in [`INFLATION_FAILURE`]; null after a warm start.
    pub certified_inflation: Option<f64>,
}

/// Failure probability of [`PowerProfile::certified_inflation`].
pub const INFLATION_FAILURE: f64 = 1e-9;

impl PowerProfile {
    fn new(estimate: &PowerEstimate, d_head: usize) -> Self {
        let inflation = |iterations| certified_inflation(iterations, d_head, INFLATION_FAILURE).ok();
        Self {
            lower_bound: true,
            residual: estimate.residual,
            certified_inflation: estimate.cold_iterations.and_then(inflation),
        }
    }
}

impl HeadProfile {
    /// Only bounds: a head without a spectrum of its own.
    pub(super) fn bounded(head: usize, kv_head: usize, bounds: &HeadBounds) -> Self {
        Self {
            head,
            kv_head,
            sigma: None,
            sigma_raw: None,
            sigma_rope: None,
            sigma_certified: None,
            frobenius: None,
            stable_rank: None,
            power: None,
            bias_constant: None,
            bound_naive: bounds.naive,
            bound_exact: bounds.exact,
            bound_rounded: bounds.rounded,
            bound_rank_aware: bounds.rank_aware,
            bound_spectrum: bounds.spectrum,
        }
    }

    pub(super) fn new(
        head: usize,
        geometry: &LayerGeometry<'_>,
        spectrum: Option<&HeadSpectrum>,
        bounds: &HeadBounds,
    ) -> Self {
        let exact = spectrum.and_then(|spectrum| spectrum.exact);
        let root = (geometry.d_model as f64).sqrt();
        Self {
            sigma: spectrum.map(|s| s.sigma),
            sigma_raw: spectrum.map(|s| s.sigma_raw),
            sigma_rope: exact.map(|e| e.sigma_rope),
            sigma_certified: exact.map(|e| e.sigma_rope_upper),
            frobenius: exact.map(|e| e.frobenius),
            stable_rank: spectrum.zip(exact).map(|(s, e)| e.stable_rank(s.sigma)),
            power: spectrum.and_then(|s| s.power).map(|estimate| PowerProfile::new(&estimate, geometry.d_head)),
            bias_constant: spectrum
                .map(|s| geometry.softmax_scale * (root * (s.constants.a + s.constants.b) + s.constants.c0)),
            ..Self::bounded(head, geometry.kv_head(head), bounds)
        }
    }
}
