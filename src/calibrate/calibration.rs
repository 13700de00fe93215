//! From a config or weights to a profile.

use super::options::Options;
use super::profile::{
    CenterProfile, ChosenC, HeadProfile, LayerProfile, Method, MlaProfile, ModelSummary, Profile, TailSummary,
};
use crate::bound::{CStar, E4M3_MAX, LAYER_NORM_MEAN_LIMIT, LayerBounds, LayerRanges, MlaBounds};
use crate::error::{Error, Result};
use crate::geometry::LayerGeometry;
use crate::model::{AttentionSpec, LayerWeights, NormKind};
use crate::plan::{CenteredLayer, Granularity, ScalePlan};
use crate::scale::Descale;
use crate::spectral::{Estimator, GramEngine, PowerEngine, PowerState, SpectralEngine, layer_channels, summed_norm};

/// The profile of a config without weights: `c_star`, no layers.
///
/// # Errors
/// As [`Options::check`].
pub fn calibrate_config(spec: &AttentionSpec, options: &Options) -> Result<Profile> {
    options.check()?;
    Ok(Profile {
        model: ModelSummary::new(spec),
        tail: TailSummary { tail: options.tail, eta: options.eta },
        c_star: options.tail.c_star(spec)?,
        chosen_c: ChosenC::new(options, spec)?,
        method: None,
        layers: None,
    })
}

/// The profile of a model with weights, layer by layer in order.
#[derive(Debug)]
pub struct Calibration<'s> {
    spec: &'s AttentionSpec,
    options: Options,
    c_star: CStar,
    chosen_c: Option<ChosenC>,
    power: PowerState,
    layers: Vec<LayerProfile>,
}

impl<'s> Calibration<'s> {
    /// A calibration without layers yet.
    ///
    /// # Errors
    /// As [`Options::check`].
    pub fn new(spec: &'s AttentionSpec, options: Options) -> Result<Self> {
        options.check()?;
        let c_star = options.tail.c_star(spec)?;
        let chosen_c = ChosenC::new(&options, spec)?;
        let power = PowerState::new(spec, options.seed);
        Ok(Self { spec, options, c_star, chosen_c, power, layers: Vec::with_capacity(spec.layers.len()) })
    }

    /// Adds one layer and returns its profile.
    ///
    /// # Errors
    /// If weights are not finite, of the wrong shape, or cannot be bounded.
    pub fn layer(&mut self, weights: LayerWeights<'_>) -> Result<&LayerProfile> {
        let profile = if weights.mla.is_some() {
            self.mla_layer(weights)?
        } else {
            let mut geometry = LayerGeometry::new(self.spec, weights)?;
            if !self.options.soft_cap {
                geometry.soft_cap = None;
            }
            if self.options.as_paper { self.paper_layer(&geometry)? } else { self.sound_layer(&geometry)? }
        };
        self.layers.push(profile);
        Ok(&self.layers[self.layers.len() - 1])
    }

    fn sound_layer(&mut self, geometry: &LayerGeometry<'_>) -> Result<LayerProfile> {
        let spectrum = match self.options.estimator {
            Estimator::Gram => GramEngine.layer(geometry)?,
            Estimator::Power => self.power_engine().layer(geometry)?,
            summed @ Estimator::PowerSummed => self.power_engine().estimate(geometry, summed)?,
        };
        let bounds = LayerBounds::new(self.spec, geometry, &spectrum, &self.options.tail)?;
        let sigma = spectrum.heads.as_ref().map(|heads| heads.iter().map(|head| head.sigma).fold(0.0, f64::max));
        let heads = bounds
            .heads
            .iter()
            .enumerate()
            .map(|(head, bounds)| {
                let spectrum = spectrum.heads.as_ref().map(|heads| &heads[head]);
                HeadProfile::new(head, geometry, spectrum, bounds)
            })
            .collect();
        let ranges = LayerRanges::new(self.spec, geometry, &spectrum.k, &spectrum.v);
        let centered = CenteredLayer::new(self.spec, &bounds, &ranges, &self.options.centers);
        let centered = centered.map_err(|error| error.within(&geometry.place))?;
        let center = centered.matters().then(|| CenterProfile::new(centered, &bounds, &ranges));
        Ok(LayerProfile { sigma, sigma_sum: spectrum.sigma_sum, center, ..self.planned(&bounds, heads)? })
    }

    fn power_engine(&mut self) -> PowerEngine<'_> {
        let mut engine = PowerEngine::new(&mut self.power);
        engine.cold = self.options.iterations;
        engine
    }

    /// Latent attention: its logits have a bound of their own, not the norms of heads.
    fn mla_layer(&self, weights: LayerWeights<'_>) -> Result<LayerProfile> {
        let place = self.spec.place(weights.layer);
        if self.options.as_paper || self.options.estimator != Estimator::Gram {
            return Err(Error::unsupported(format_args!(
                "{place}: the paper's sigma and its power iteration do not bound logits of latent attention (MLA): use estimator \
                 gram and the worst-case bound"
            )));
        }
        let bounds = MlaBounds::new(self.spec, weights)?;
        let heads = bounds.expanded.heads.iter().enumerate();
        let heads = heads.map(|(head, bounds)| HeadProfile::bounded(head, head, bounds)).collect();
        let mla = MlaProfile::new(&bounds, self.options.granularity).map_err(|error| error.within(&place))?;
        Ok(LayerProfile { mla: Some(mla), ..self.planned(&bounds.expanded, heads)? })
    }

    /// What the plan of a layer says.
    fn planned(&self, bounds: &LayerBounds, heads: Vec<HeadProfile>) -> Result<LayerProfile> {
        let plan = ScalePlan::from_bounds(bounds, self.options.bound, self.options.eta, self.options.granularity)
            .map_err(|error| error.within(self.spec.place(bounds.layer)))?;
        Ok(LayerProfile {
            layer: bounds.layer,
            number: self.spec.layer(bounds.layer)?.number,
            sigma: None,
            sigma_sum: None,
            logit_bound: plan.logit_bound.iter().flatten().copied().fold(0.0, f64::max),
            logit_descale: ScalePlan::per_tensor(&plan.logit_descale),
            logit_descales: plan.logit_descale,
            q_descale: Some(plan.operands.q),
            k_descale: Some(plan.operands.k),
            v_descale: plan.operands.v,
            o_descale: plan.operands.o,
            center: None,
            mla: None,
            heads: Some(heads),
        })
    }

    /// Algorithm 1 of the paper: `s = c tau d sigma_sum / (eta 448)`.
    fn paper_layer(&mut self, geometry: &LayerGeometry<'_>) -> Result<LayerProfile> {
        if geometry.qk_limits.is_some() {
            return Err(Error::unsupported(
                "the paper's sigma does not bound the logits of normalized q and k: remove --as-paper (Python: as_paper)",
            ));
        }
        let sigma_sum = match self.options.estimator {
            Estimator::Power | Estimator::PowerSummed => self.power_engine().summed(geometry)?.sigma,
            Estimator::Gram => {
                layer_channels(geometry)?;
                summed_norm(geometry)
            }
        };
        let c = self.options.c.unwrap_or(self.c_star.c_star);
        let logit_bound = c * geometry.softmax_scale * geometry.d_model as f64 * sigma_sum;
        Ok(LayerProfile {
            layer: geometry.layer,
            number: self.spec.layer(geometry.layer)?.number,
            sigma: Some(sigma_sum),
            sigma_sum: Some(sigma_sum),
            logit_bound,
            logit_descale: Descale::covering(logit_bound, self.options.eta * E4M3_MAX)?,
            logit_descales: Vec::new(),
            q_descale: None,
            k_descale: None,
            v_descale: None,
            o_descale: None,
            center: None,
            mla: None,
            heads: None,
        })
    }

    /// The finished profile.
    pub fn finish(self) -> Profile {
        let options = self.options;
        Profile {
            model: ModelSummary::new(self.spec),
            tail: TailSummary { tail: options.tail, eta: options.eta },
            c_star: self.c_star,
            chosen_c: self.chosen_c,
            method: Some(Method {
                bound: (!options.as_paper).then_some(options.bound),
                estimator: options.estimator,
                iterations: (options.estimator != Estimator::Gram).then_some(options.iterations),
                rotation: !self.spec.layers.iter().any(|layer| layer.rope.is_some())
                    || (options.estimator == Estimator::Gram && !options.as_paper),
                granularity: if options.as_paper { Granularity::Layer } else { options.granularity },
                as_paper: options.as_paper,
                soft_cap: self.spec.soft_cap.filter(|_| options.soft_cap),
                c: options.as_paper.then(|| options.c.unwrap_or(self.c_star.c_star)),
                layer_norm_mean_limit: (self.spec.norm.kind == NormKind::LayerNorm && !options.as_paper)
                    .then_some(LAYER_NORM_MEAN_LIMIT),
                centers: (!options.as_paper).then_some(options.centers),
            }),
            layers: Some(self.layers),
        }
    }
}
