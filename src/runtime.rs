//! Runs a scaling policy over training steps: bounds from the weights, a plan for the attention call, and the statistics of
//! the call back to the policy.
//!
//! ```text
//! step: weights changed?  -> geometry -> spectrum -> bounds       (kept until the weights change)
//!       current policy?   -> measure the step                     (the others plan from what they know)
//!       plan -> attention -> statistics -> policy                 (report, events, fallback)
//! ```
//!
//! [`Runtime::step`] does all of it with an [`Attention`] backend of this crate. Around a foreign FP8 call, use
//! [`Runtime::update_weights`], [`Runtime::plan`] and [`Runtime::observe`].
//!
//! **Centers** ([`CenterPolicy`]). [`Runtime::center`] is what the next call of a layer subtracts from keys and values, from the
//! weights or from the running means that [`Runtime::observe_sums`] takes in; [`Runtime::step`] does both. Policies are given the
//! bounds of what is cast, so that plans cover `k - c` and `v - m`.
//!
//! **State.** [`Runtime::state`] holds everything that later plans depend on, apart from the weights: a resumed runtime
//! is given the weights again at its first step and then plans the same bits as one that never stopped. Without state,
//! each policy is where its table in [`crate::policy`] says it starts.
//!
//! **Power iteration** ([`Estimator::Power`], [`Estimator::PowerSummed`]). Every step that is given weights does one iteration, also
//! where they did not change, so that a poor start heals; [`Weights::Unchanged`] gives none and keeps the estimate.
//! [`Runtime::estimates`] tells how far it has come. `geometry` covers sigma from a cold start on: the estimate times its certified
//! inflation, until the weights change. Everything else takes the estimate as it is, without a guarantee
//! ([`Estimator::caveat`]). The state also holds the singular vectors and the bounds that came from them: an estimate
//! depends on every step before it, so it cannot be recomputed from the weights. A resumed runtime then keeps its
//! bounds until it is given weights again, and continues from warm vectors.
//!
//! **Events** go to `tracing`: `scale update` (info; layer, step, policy, tensor, old and new descale), `overflow` (warn;
//! with counts, for the tensors that the call casts and no others), `not finite` and `beyond the bound` (warn),
//! and the policy's own.

mod means;
mod state;

use crate::attention::{Attention, AttentionCall, AttentionOutput, Inputs, LogitCast, Precision, measure};
use crate::bound::{LayerBounds, LayerRanges, MlaBounds, Tail};
use crate::error::{Error, Result};
use crate::geometry::LayerGeometry;
use crate::model::{AttentionSpec, LayerWeights};
use crate::plan::{
    Center, CenterPolicy, CenterSource, CenteredLayer, Granularity, ScalePlan, center_layer, centered_bounds,
};
use crate::policy::{Policy, PolicyConfig, PolicyEvent, PolicyKind, Report, Restart, ScaledTensor, differs};
use crate::spectral::{Estimator, GramEngine, Iterations, PowerEngine, PowerEstimate, PowerState, SpectralEngine};
use crate::stats::{KvSums, StepStats};
pub use means::RunningMeans;
use serde::{Deserialize, Serialize};
use state::check_version;
pub use state::{LayerState, RuntimeState, STATE_VERSION};
use tracing::{info, warn};

/// What a runtime is made from, in addition to the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuntimeConfig {
    /// Policy and its parameters.
    pub policy: PolicyConfig,
    /// Union bound of the isotropic bounds (only `geometry-c-star` reads them).
    pub tail: Tail,
    /// Where the norms come from, under any policy that plans from a bound.
    pub estimator: Estimator,
    /// Iterations of a step, if that is power iteration.
    pub iterations: Iterations,
    /// Centers of keys and values.
    pub centers: CenterPolicy,
}

impl From<PolicyKind> for RuntimeConfig {
    /// The policy with its default parameters.
    fn from(kind: PolicyKind) -> Self {
        PolicyConfig::from(kind).into()
    }
}

impl From<PolicyConfig> for RuntimeConfig {
    /// The policy with the default union bound and norms, and without centers.
    fn from(policy: PolicyConfig) -> Self {
        Self {
            policy,
            tail: Tail::default(),
            estimator: Estimator::default(),
            iterations: Iterations::default(),
            centers: CenterPolicy::NONE,
        }
    }
}

impl RuntimeConfig {
    /// Algorithm 1 of the spectral-bounds paper, with one scale a layer: a power iteration of the sum over the heads, whose norm
    /// times `c_star` under [`PolicyKind::GeometryCStar`] (or the constant of `auto-c`, Algorithm 4) gives the scale of the logits;
    /// under `delayed-paper` the paper's baseline in the same place. Cast with [`Precision::PAPER_LOGITS`].
    ///
    /// ```
    /// use sigmascale::policy::PolicyKind;
    /// use sigmascale::runtime::RuntimeConfig;
    /// let (paper, baseline) = (PolicyKind::GeometryCStar, PolicyKind::DelayedPaper);
    /// for kind in [paper, baseline] {
    ///     assert_eq!(RuntimeConfig::paper(kind).policy.kind(), kind);
    /// }
    /// ```
    pub fn paper(kind: PolicyKind) -> Self {
        let mut policy = PolicyConfig::from(kind);
        policy.set_granularity(Granularity::Layer);
        Self { estimator: Estimator::PowerSummed, ..policy.into() }
    }

    fn check(&self) -> Result<()> {
        self.tail.check()?;
        self.centers.check()?;
        self.iterations.check()
    }

    /// Whether sigma is estimated.
    fn estimates(&self) -> bool {
        self.estimator != Estimator::Gram && self.policy.kind().bound().is_some()
    }
}

/// What a step knows about its layer's weights.
#[derive(Clone, Debug)]
pub enum Weights<'a> {
    /// The same as at the layer's last step.
    Unchanged,
    /// New: bounds are recomputed.
    Changed(LayerWeights<'a>),
    /// With the caller's version number: bounds are recomputed if it is not that of the layer's last step.
    Versioned(u64, LayerWeights<'a>),
    /// New, with bounds that the caller computed.
    Bounded(LayerBounds),
}

/// One attention call of one layer.
#[derive(Debug)]
pub struct Step<'a> {
    /// Index among the layers with attention.
    pub layer: usize,
    /// Its weights.
    pub weights: Weights<'a>,
    /// Sizes, mask, softmax scale and soft-cap; the last two must be the model's.
    pub call: AttentionCall<'a>,
    /// q, k and v after QK-norm and rotation.
    pub inputs: Inputs<'a>,
    /// What is cast.
    pub precision: Precision,
}

/// What a step gives back.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// The scales used.
    pub plan: ScalePlan,
    /// What the call subtracted from keys and values; its backward pass needs it too.
    pub center: Center,
    /// Output, log-sum-exp and statistics.
    pub output: AttentionOutput,
    /// What the policy made of the statistics.
    pub report: Report,
    /// Whether bounds were recomputed.
    pub recomputed: bool,
}

/// State of one layer.
#[derive(Clone, Debug, Default)]
struct Layer {
    bounds: Option<LayerBounds>,
    /// What a center makes of the bounds; `None` where it is not known.
    ranges: Option<LayerRanges>,
    /// The center in use and the bounds of what is cast with it; `None` where nothing is subtracted.
    centered: Option<(Center, LayerBounds)>,
    means: RunningMeans,
    weights_version: Option<u64>,
    steps: u64,
    last: Option<ScalePlan>,
    /// Of each query head, where norms are estimated.
    estimates: Vec<PowerEstimate>,
}

impl Layer {
    fn cast_bounds(&self) -> Option<&LayerBounds> {
        self.centered.as_ref().map(|(_, bounds)| bounds).or(self.bounds.as_ref())
    }
}

/// A policy applied to a model.
///
/// ```
/// use sigmascale::model::{SyntheticModel, SyntheticOptions, preset};
/// use sigmascale::policy::PolicyKind;
/// use sigmascale::runtime::{Runtime, Weights};
///
/// let mut spec = preset("gpt2-xl").unwrap();
/// spec.d_model = 128;
/// spec.set_heads(2, 2, 64);
/// let model = SyntheticModel::new(&spec, 1, SyntheticOptions::default())?;
/// let mut runtime = Runtime::new(&spec, PolicyKind::Geometry.into())?;
/// // Around a foreign attention call:
/// runtime.update_weights(0, Weights::Changed(model.layer(0)?.weights()))?;
/// let plan = runtime.plan(0, None)?;
/// assert_eq!(plan.operands.q.len(), 2);
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Debug)]
pub struct Runtime {
    spec: AttentionSpec,
    config: RuntimeConfig,
    policy: Box<dyn Policy>,
    /// Singular vectors, where norms are estimated.
    power: Option<PowerState>,
    layers: Vec<Layer>,
}

impl Runtime {
    /// A runtime whose policy is at its start. The policy's assumption, if it has one, is logged.
    ///
    /// # Errors
    /// `is_argument` if a parameter breaks its rule.
    pub fn new(spec: &AttentionSpec, config: RuntimeConfig) -> Result<Self> {
        config.check()?;
        let policy = config.policy.build(spec.into())?;
        Ok(Self::with(spec, config, policy))
    }

    fn with(spec: &AttentionSpec, config: RuntimeConfig, policy: Box<dyn Policy>) -> Self {
        if let Some(assumption) = policy.assumption() {
            info!(policy = policy.name(), assumption, "assumption");
        }
        let estimated = config.estimates();
        if let Some(caveat) = config.estimator.caveat().filter(|_| estimated) {
            info!(policy = policy.name(), estimator = config.estimator.name(), caveat, "estimator");
        }
        let power = estimated.then(|| PowerState::new(spec, 0));
        Self { spec: spec.clone(), config, policy, power, layers: vec![Layer::default(); spec.layers.len()] }
    }

    /// A runtime that continues from a state. Every layer's weights have to be given again, unless sigma is estimated and they
    /// did not change.
    ///
    /// # Errors
    /// `is_mismatch` if the state belongs to another version, model, policy or configuration; the message names what
    /// differs.
    pub fn resume(spec: &AttentionSpec, config: RuntimeConfig, state: RuntimeState) -> Result<Self> {
        config.check()?;
        check_version(state.version)?;
        differs("model", &nameless(&state.model), &nameless(spec))?;
        differs("tail", &state.tail, &config.tail)?;
        differs("estimator", &state.estimator, &config.estimator)?;
        differs("iterations", &state.iterations, &config.iterations)?;
        differs("centers", &state.centers, &config.centers)?;
        if state.power.is_some() != config.estimates() {
            return Err(Error::mismatch("the saved state's vectors do not fit its own estimator"));
        }
        state.power.as_ref().map_or(Ok(()), |power| power.check_model(spec))?;
        if state.layers.len() != spec.layers.len() {
            return Err(Error::mismatch(format_args!(
                "the saved state has {} layers, the model {}",
                state.layers.len(),
                spec.layers.len()
            )));
        }
        let misplaced = |(at, layer): (usize, &LayerState)| {
            layer.last.as_ref().is_some_and(|plan| plan.layer != at)
                || layer.bounds.as_ref().is_some_and(|bounds| bounds.layer != at)
        };
        if state.layers.iter().enumerate().any(misplaced) {
            return Err(Error::mismatch("the saved state's plans or bounds do not stand at their own layers"));
        }
        let policy = state.policy.restore(&config.policy, spec.into())?;
        let mut runtime = Self::with(spec, config, policy);
        let known = state.layers.iter().map(|layer| layer.bounds.is_some()).collect::<Vec<_>>();
        runtime.power = state.power;
        for (layer, saved) in runtime.layers.iter_mut().zip(state.layers) {
            let LayerState { steps, last, bounds, weights_version, means, estimates } = saved;
            *layer = Layer { bounds, weights_version, steps, last, means, estimates, ..Layer::default() };
        }
        for layer in (0..known.len()).filter(|layer| known[*layer]) {
            runtime.recenter(layer)?;
        }
        Ok(runtime)
    }

    /// Everything that later plans depend on, apart from the weights.
    pub fn state(&self) -> RuntimeState {
        let estimated = self.power.is_some();
        let layer = |layer: &Layer| LayerState {
            steps: layer.steps,
            last: layer.last.clone(),
            bounds: layer.bounds.clone().filter(|_| estimated),
            weights_version: layer.weights_version.filter(|_| estimated),
            means: layer.means.clone(),
            estimates: layer.estimates.clone(),
        };
        RuntimeState {
            version: STATE_VERSION,
            model: self.spec.clone(),
            tail: self.config.tail,
            estimator: self.config.estimator,
            iterations: self.config.iterations,
            centers: self.config.centers,
            power: self.power.clone(),
            policy: self.policy.save(),
            layers: self.layers.iter().map(layer).collect(),
        }
    }

    /// The model.
    pub fn spec(&self) -> &AttentionSpec {
        &self.spec
    }

    /// The policy.
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// The bounds of a layer's logits and of q, k and v as they are; `None` before its weights are known.
    pub fn bounds(&self, layer: usize) -> Option<&LayerBounds> {
        self.layers.get(layer)?.bounds.as_ref()
    }

    /// Whether bounds come from estimated norms, so that every step has to be given weights.
    pub fn estimated(&self) -> bool {
        self.power.is_some()
    }

    /// How far the power iteration of each query head of a layer has come; under [`Estimator::PowerSummed`] that of the sum for each.
    /// Empty with Grams, with normalized q and k, and before the weights are known.
    pub fn estimates(&self, layer: usize) -> &[PowerEstimate] {
        self.layers.get(layer).map_or(&[], |layer| &layer.estimates)
    }

    /// What the next call of a layer subtracts from keys and values.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer or its weights were never given.
    pub fn center(&self, layer: usize) -> Result<Center> {
        self.known_bounds(layer)?;
        Ok(self.layers[layer].centered.as_ref().map_or(Center::none(layer), |(center, _)| center.clone()))
    }

    /// Takes in the sums of a call's keys and values, for [`CenterSource::Mean`].
    ///
    /// # Errors
    /// `is_argument` if there is no such layer or its weights were never given; otherwise as [`RunningMeans::observe`].
    pub fn observe_sums(&mut self, layer: usize, sums: &KvSums) -> Result<()> {
        self.known_bounds(layer)?;
        let policy = self.config.centers;
        if [policy.k, policy.v].contains(&CenterSource::Mean) {
            let place = self.spec.place(layer);
            self.layers[layer].means.observe(sums, &policy).map_err(|error| error.within(place))?;
            self.recenter(layer)?;
        }
        Ok(())
    }

    /// The center of a layer by its policy, and the bounds of what is cast with it.
    fn recenter(&mut self, layer: usize) -> Result<()> {
        let (policy, own) = (self.config.centers, self.spec.layer(layer)?);
        let (keys, values) = (policy.keys(&self.spec, own), policy.values(own));
        let kept = &self.layers[layer];
        let Some(bounds) = &kept.bounds else { return Ok(()) };
        let of_weights = match &kept.ranges {
            Some(ranges) => CenteredLayer::new(&self.spec, bounds, ranges, &policy)?.center,
            None => Center::none(layer),
        };
        // Layers that read the keys of another take its center.
        let means = &self.layers[center_layer(&self.spec, layer)?].means;
        let seen = means.center(layer, &policy)?.unwrap_or(Center::none(layer));
        let center = Center {
            layer,
            k: if keys == CenterSource::Mean { seen.k } else { of_weights.k },
            v: if values == CenterSource::Mean && bounds.v.is_some() { seen.v } else { of_weights.v },
        };
        let centered = if center.is_none() {
            None
        } else {
            let bounds = centered_bounds(&self.spec, bounds, kept.ranges.as_ref(), &center)?;
            Some((center, bounds))
        };
        self.layers[layer].centered = centered;
        Ok(())
    }

    /// Tells the policy that what it observed no longer describes the model; see [`Policy::restart`].
    pub fn restart(&mut self, reason: Restart) {
        for event in self.policy.restart(reason) {
            log_event(self.policy.name(), None, &event);
        }
    }

    /// Recomputes a layer's bounds if its weights changed, or if they are estimated and weights are given, and says whether it did.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer or its weights were never given; otherwise as [`LayerGeometry::new`],
    /// [`SpectralEngine::layer`] and [`LayerBounds::new`].
    pub fn update_weights(&mut self, layer: usize, weights: Weights<'_>) -> Result<bool> {
        let kept = self.layer(layer)?;
        let (version, weights) = match weights {
            Weights::Unchanged => {
                return match kept.bounds {
                    Some(_) => Ok(false),
                    None => Err(unknown(&self.spec, layer)),
                };
            }
            Weights::Versioned(version, _)
                if self.power.is_none() && kept.bounds.is_some() && kept.weights_version == Some(version) =>
            {
                return Ok(false);
            }
            Weights::Versioned(version, weights) => (Some(version), weights),
            Weights::Changed(weights) => (None, weights),
            Weights::Bounded(bounds) => {
                self.check_layer(layer, bounds.layer, "bounds")?;
                let kept = &mut self.layers[layer];
                (kept.bounds, kept.ranges, kept.weights_version) = (Some(bounds), None, None);
                kept.estimates.clear();
                self.recenter(layer)?;
                return Ok(true);
            }
        };
        self.check_layer(layer, weights.layer, "weights")?;
        let unchanged = version.is_some() && self.layers[layer].weights_version == version;
        // Nothing is kept of the old weights if the new ones cannot be bounded.
        let kept = &mut self.layers[layer];
        (kept.bounds, kept.centered, kept.weights_version) = (None, None, None);
        kept.estimates.clear();
        let (bounds, ranges) = match self.power.is_some() {
            true => self.estimate(layer, weights, unchanged)?,
            false => bounds_by(&mut GramEngine, &self.spec, weights, &self.config.tail)?,
        };
        let kept = &mut self.layers[layer];
        (kept.bounds, kept.ranges, kept.weights_version) = (Some(bounds), ranges, version);
        self.recenter(layer)?;
        Ok(true)
    }

    /// Bounds from power iteration.
    fn estimate(
        &mut self,
        layer: usize,
        weights: LayerWeights<'_>,
        unchanged: bool,
    ) -> Result<(LayerBounds, Option<LayerRanges>)> {
        let RuntimeConfig { policy, tail, estimator, iterations: Iterations { cold, warm }, .. } = self.config;
        let Some(power) = &mut self.power else { return Err(Error::argument("sigma is not estimated")) };
        if weights.mla.is_some() {
            return Err(Error::unsupported(format_args!(
                "{}: power iteration does not bound logits of latent attention (MLA): use estimator gram",
                self.spec.place(layer)
            )));
        }
        let geometry = LayerGeometry::new(&self.spec, weights)?;
        let mut engine = PowerEngine::new(power);
        (engine.cold, engine.warm, engine.unchanged) = (cold, warm, unchanged);
        let mut spectrum = engine.estimate(&geometry, estimator)?;
        self.layers[layer].estimates = spectrum.heads.iter().flatten().filter_map(|head| head.power).collect();
        // Of the sum there is nothing to cover a head with, and the estimate does not know of rotation.
        let covers =
            policy.kind() == PolicyKind::Geometry && estimator == Estimator::Power && geometry.rotary.is_none();
        let share = tail.delta / self.spec.all_q_heads() as f64;
        for head in spectrum.heads.iter_mut().flatten().filter(|_| covers) {
            let upper = head.power.map(|estimate| estimate.upper(geometry.d_head, share)).transpose()?;
            head.sigma = upper.flatten().unwrap_or(head.sigma);
        }
        let bounds = LayerBounds::estimated(&self.spec, &geometry, &spectrum, &tail)?;
        Ok((bounds, Some(LayerRanges::new(&self.spec, &geometry, &spectrum.k, &spectrum.v))))
    }

    /// The scales of a layer's next call; `measured` is for [`Policy::needs_measurement`].
    ///
    /// # Errors
    /// As [`Policy::plan`]; `is_argument` if the layer's weights were never given.
    pub fn plan(&self, layer: usize, measured: Option<&StepStats>) -> Result<ScalePlan> {
        let at = |error: Error| error.within(self.spec.place(layer));
        self.policy.plan(self.cast_bounds(layer)?, measured).map_err(at)
    }

    /// Takes in what a fused FP8 call with `plan` reported, logs it, and returns the policy's report. Such a call casts q,
    /// k, v and perhaps o, and keeps its logits in f32: a logit beyond its descale's range is in the report and no
    /// overflow in the log.
    ///
    /// # Errors
    /// As [`Policy::observe`].
    pub fn observe(&mut self, plan: &ScalePlan, stats: &StepStats) -> Result<Report> {
        self.observe_cast(plan, stats, &[ScaledTensor::Q, ScaledTensor::K, ScaledTensor::V, ScaledTensor::O])
    }

    /// [`Runtime::observe`] for a call that cast these tensors.
    ///
    /// # Errors
    /// As [`Policy::observe`].
    pub fn observe_cast(&mut self, plan: &ScalePlan, stats: &StepStats, cast: &[ScaledTensor]) -> Result<Report> {
        let layer = plan.layer;
        self.layer(layer)?;
        let kept = &mut self.layers[layer];
        let bounds = kept.cast_bounds().ok_or_else(|| unknown(&self.spec, layer))?;
        let report = self.policy.observe(plan, bounds, stats).map_err(|error| error.within(self.spec.place(layer)))?;
        let name = self.policy.name();
        log_update(name, kept.steps, kept.last.as_ref(), plan);
        log_report(name, kept.steps, &report, cast);
        kept.steps += 1;
        kept.last = Some(plan.clone());
        Ok(report)
    }

    /// One step of one layer.
    ///
    /// # Errors
    /// `is_mismatch` if the call is not that of the model (heads, softmax scale, soft-cap); otherwise as
    /// [`Runtime::update_weights`], [`Runtime::plan`], [`Attention::forward`] and [`Runtime::observe`]. Nothing is
    /// observed of a step that failed.
    pub fn step(&mut self, step: Step<'_>, attention: &dyn Attention) -> Result<StepOutcome> {
        self.layer(step.layer)?;
        self.check_call(step.layer, &step.call)?;
        let recomputed = self.update_weights(step.layer, step.weights)?;
        let center = self.center(step.layer)?;
        let call = AttentionCall { center: (!center.is_none()).then_some(&center), ..step.call };
        let measured = if self.policy.needs_measurement() { Some(measure(&call, &step.inputs)?) } else { None };
        let plan = self.plan(step.layer, measured.as_ref())?;
        let output = attention.forward(&call, &step.inputs, &plan, &step.precision)?;
        let report = self.observe_cast(&plan, &output.stats, &casts(&step.precision, &plan))?;
        if let Some(sums) = &output.sums {
            self.observe_sums(step.layer, sums)?;
        }
        Ok(StepOutcome { plan, center, output, report, recomputed })
    }

    fn layer(&self, layer: usize) -> Result<&Layer> {
        self.spec.layer(layer)?;
        Ok(&self.layers[layer])
    }

    /// The bounds of what the layer's next call casts.
    fn cast_bounds(&self, layer: usize) -> Result<&LayerBounds> {
        self.layer(layer)?.cast_bounds().ok_or_else(|| unknown(&self.spec, layer))
    }

    fn known_bounds(&self, layer: usize) -> Result<&LayerBounds> {
        self.layer(layer)?.bounds.as_ref().ok_or_else(|| unknown(&self.spec, layer))
    }

    fn check_layer(&self, step: usize, given: usize, what: &str) -> Result<()> {
        if step == given {
            Ok(())
        } else {
            let (step, given) = (self.spec.place(step), self.spec.place(given));
            Err(Error::mismatch(format_args!("a step of {step} was given the {what} of {given}")))
        }
    }

    fn check_call(&self, layer: usize, call: &AttentionCall) -> Result<()> {
        let (own, shape) = (self.spec.layer(layer)?, &call.shape);
        let heads = [shape.n_q_heads, shape.n_kv_heads, shape.d_head];
        if heads != [own.n_q_heads, own.n_kv_heads, own.d_head] {
            return Err(Error::mismatch(format_args!(
                "the call has {} query heads, {} KV heads and d_head {}, {} has {}, {} and {}",
                heads[0],
                heads[1],
                heads[2],
                self.spec.place(layer),
                own.n_q_heads,
                own.n_kv_heads,
                own.d_head
            )));
        }
        if let Some(temperature) = own.temperature.filter(|temperature| shape.len_k > temperature.positions) {
            return Err(Error::mismatch(format_args!(
                "the call has {} keys, and queries of {} grow with the position: bounds hold for {}",
                shape.len_k,
                self.spec.place(layer),
                temperature.positions
            )));
        }
        // Bounds include both: with others they would promise nothing.
        let same = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
        if !same(call.softmax_scale, own.softmax_scale) {
            return Err(Error::mismatch(format_args!(
                "the call's softmax scale is {}, that of {} {}",
                call.softmax_scale,
                self.spec.place(layer),
                own.softmax_scale
            )));
        }
        match (call.soft_cap, self.spec.soft_cap) {
            (None, None) => Ok(()),
            (Some(a), Some(b)) if same(a, b) => Ok(()),
            (a, b) => Err(Error::mismatch(format_args!("the call's soft-cap is {a:?}, the model's {b:?}"))),
        }
    }
}

/// The bounds of one layer, with the exact engine. For latent attention they are those of its expanded form, and
/// [`MlaBounds`] has the cache's.
///
/// # Errors
/// As [`LayerGeometry::new`], [`SpectralEngine::layer`], [`LayerBounds::new`] and [`MlaBounds::new`].
pub fn bounds_of(spec: &AttentionSpec, weights: LayerWeights<'_>, tail: &Tail) -> Result<LayerBounds> {
    Ok(bounds_by(&mut GramEngine, spec, weights, tail)?.0)
}

fn bounds_by(
    engine: &mut dyn SpectralEngine,
    spec: &AttentionSpec,
    weights: LayerWeights<'_>,
    tail: &Tail,
) -> Result<(LayerBounds, Option<LayerRanges>)> {
    if weights.mla.is_some() {
        return Ok((MlaBounds::new(spec, weights)?.expanded, None));
    }
    let geometry = LayerGeometry::new(spec, weights)?;
    let spectrum = engine.layer(&geometry)?;
    let bounds = LayerBounds::new(spec, &geometry, &spectrum, tail)?;
    Ok((bounds, Some(LayerRanges::new(spec, &geometry, &spectrum.k, &spectrum.v))))
}

/// The tensors that a call at this precision casts with its plan's descales.
fn casts(precision: &Precision, plan: &ScalePlan) -> Vec<ScaledTensor> {
    let cast = |tensor: &ScaledTensor| {
        let asked = match tensor {
            ScaledTensor::Logit => precision.logits == LogitCast::E4m3,
            ScaledTensor::Q | ScaledTensor::K | ScaledTensor::V => precision.operands.fp8().is_some(),
            ScaledTensor::O => precision.output.fp8().is_some(),
        };
        asked && tensor.descales(plan).is_some()
    };
    ScaledTensor::ALL.into_iter().filter(cast).collect()
}

fn unknown(spec: &AttentionSpec, layer: usize) -> Error {
    Error::argument(format_args!("{}: its weights have not been given yet", spec.place(layer)))
}

/// A model is the same wherever it was loaded from, and for its plans also with another window or other sinks.
fn nameless(spec: &AttentionSpec) -> AttentionSpec {
    let mut spec = AttentionSpec { name: String::new(), prefix: String::new(), ..spec.clone() };
    for layer in &mut spec.layers {
        (layer.window, layer.sinks) = (None, false);
    }
    spec
}

fn log_update(policy: &str, step: u64, old: Option<&ScalePlan>, plan: &ScalePlan) {
    for tensor in ScaledTensor::ALL {
        let new = tensor.descales(plan);
        let old = old.and_then(|old| tensor.descales(old));
        if new != old {
            let one = |row: Option<&[crate::Descale]>| row.map(|row| f64::from(ScalePlan::per_tensor(row).get()));
            let (old, new) = (one(old), one(new));
            info!(layer = plan.layer, step, policy, tensor = tensor.name(), old, new, "scale update");
        }
    }
}

fn log_report(policy: &str, step: u64, report: &Report, cast: &[ScaledTensor]) {
    let layer = report.layer;
    for tensor in &report.tensors {
        let name = tensor.tensor.name();
        if tensor.overflowed() && cast.contains(&tensor.tensor) {
            warn!(
                layer,
                step,
                policy,
                tensor = name,
                overflow = tensor.overflow,
                beyond_rounding = tensor.beyond_rounding,
                count = tensor.count,
                max_scaled = f64::from(tensor.max_scaled),
                "overflow"
            );
        }
        if tensor.non_finite > 0 {
            warn!(layer, step, policy, tensor = name, non_finite = tensor.non_finite, "not finite");
        }
        if tensor.beyond_bound > 0 {
            let (heads, amax) = (tensor.beyond_bound, f64::from(tensor.amax));
            warn!(layer, step, policy, tensor = name, heads, amax, "beyond the bound");
        }
    }
    for event in &report.events {
        log_event(policy, Some(layer), event);
    }
}

fn log_event(policy: &str, layer: Option<usize>, event: &PolicyEvent) {
    match event {
        PolicyEvent::Frozen { tensor, c, ratio, head, .. } => {
            info!(layer, policy, tensor = tensor.name(), head, c, ratio, "constant frozen");
        }
        PolicyEvent::FellBack { tensor, c, head, .. } => {
            warn!(layer, policy, tensor = tensor.name(), head, c, "back to the worst-case bound");
        }
        PolicyEvent::Restarted { reason, restarts } => info!(layer, policy, ?reason, restarts, "burn-in restarted"),
        PolicyEvent::Forbidden { reason } => warn!(layer, policy, ?reason, "no constant will be used"),
        PolicyEvent::Skipped { tensor } => warn!(layer, policy, tensor = tensor.name(), "step not taken in"),
        PolicyEvent::TinyAmax { tensor } => warn!(layer, policy, tensor = tensor.name(), "amax too small for a scale"),
    }
}

/// The Rust of the guide.
#[cfg(doctest)]
#[doc = include_str!("../docs/run-the-paper.md")]
struct RunThePaper;

#[cfg(test)]
mod tests;
