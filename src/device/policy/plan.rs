//! The loop on a GPU: weights to bounds to plans, and statistics back to the policy, all in device memory.
//!
//! [`DevicePlan`] is any of the six policies of [`crate::policy`] with its memory on the device. It gives the bits that the
//! policy of the host gives for the same bounds and statistics, and its state is the same [`PolicyState`], so a run may
//! move from one to the other at any step. After it is made it only launches: no allocation, no synchronisation, on the
//! caller's stream, capturable in a CUDA graph; every descale keeps its address, for the attention call to read.
//!
//! ```text
//! update_bounds     after the weights changed     one read of W_Q, W_K, W_V
//! plan              before the attention calls    `current`: after the measurement of this step
//! (the calls)       read descales(layer, tensor), add to stats(layer)
//! observe           after the calls               memory and status; the statistics are zero again
//! ```
//!
//! What the host would report as an event is a bit in the layer's status word ([`crate::device::policy::status`]); a bound
//! or measurement that is not finite makes a NaN descale and sets `NO_PLAN`. A plan whose values have no bound (v without
//! an input norm) has descales of 1 there.
//!
//! [`DeviceBounds`] is the bounds stage alone, from weights in host memory: what the stress lab uses with
//! `--device cuda`.

use super::engine::{BoundSource, PolicyEngine};
use super::setup::{PolicySetup, Pool, Rule, TENSORS};
use super::state;
use super::table::SlackWords;
use crate::bound::{E4M3_MAX, LayerBounds, Tail, isotropic};
use crate::cuda::{Device, DevicePtr, Stream};
use crate::device::{bounds, scale::ScaleEngine};
use crate::error::{Error, Result};
use crate::model::AttentionSpec;
use crate::plan::{Granularity, OperandDescales, ScalePlan};
use crate::policy::{AmaxAlgorithm, PolicyConfig, PolicyShape, PolicyState, Pooling, Slack, Tensor};
use crate::scale::Descale;
use crate::stats::{StepStats, StepWords};

/// Where a plan's bounds come from.
#[derive(Debug)]
pub enum Bounds {
    /// The policy needs none: `delayed-paper`, `delayed-te`, `current`.
    None,
    /// Weights in device memory, one read of them for each update.
    Weights(Box<ScaleEngine>),
    /// The host writes them ([`DevicePlan::write_bounds`]): models with QK-norm, or weights that never change.
    Host,
}

/// A scaling policy whose bounds, memory and plans are in device memory.
#[derive(Debug)]
pub struct DevicePlan {
    engine: PolicyEngine,
    config: PolicyConfig,
    shape: PolicyShape,
    spec: AttentionSpec,
    tail: Tail,
}

impl DevicePlan {
    /// A policy at its start.
    ///
    /// # Errors
    /// `is_argument` if a parameter breaks its rule or bounds are missing, `is_mismatch` if the engine's weights are of
    /// another shape, `is_unsupported` for geometry-c-star with a QK-norm; otherwise as the device.
    pub fn new(
        device: &Device,
        spec: &AttentionSpec,
        config: PolicyConfig,
        tail: &Tail,
        bounds: Bounds,
    ) -> Result<Self> {
        Self::with_state(device, spec, config.build(spec.into())?.save(), tail, bounds)
    }

    /// A policy that goes on from a state, whichever side saved it.
    ///
    /// # Errors
    /// As [`DevicePlan::new`]; `is_mismatch` if the state's parts do not fit each other or the model.
    pub fn with_state(
        device: &Device,
        spec: &AttentionSpec,
        state: PolicyState,
        tail: &Tail,
        bounds: Bounds,
    ) -> Result<Self> {
        spec.check()?;
        let shape = PolicyShape::from(spec);
        let config = state.config;
        // The host's own checks of a state, whose parts may come from a file.
        let state = state.restore(&config, shape.clone())?.save();
        if spec.qk_norm.is_some() && matches!(config, PolicyConfig::GeometryCStar(_)) {
            return Err(Error::unsupported(format_args!(
                "{}: q and k are normalised after the projection, so there is no rank-aware bound",
                spec.name
            )));
        }
        let source = match bounds {
            Bounds::None => BoundSource::None,
            Bounds::Weights(engine) => BoundSource::Weights(engine),
            Bounds::Host => BoundSource::Host,
        };
        let setup = setup(spec, &config, &shape, tail)?;
        let memory = state::to_device(&setup, &state.memory);
        let engine = PolicyEngine::new(device, setup, source, &memory)?;
        Ok(Self { engine, config, shape, spec: spec.clone(), tail: *tail })
    }

    /// Parameters.
    pub fn config(&self) -> PolicyConfig {
        self.config
    }

    /// The launches and addresses: [`PolicyEngine::update_bounds`], `plan`, `observe`, `restart` and their layer by layer
    /// forms.
    pub fn engine(&self) -> &PolicyEngine {
        &self.engine
    }

    /// Puts bounds and plan of every layer on `stream`, then nothing more: what a training step does after its update.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn refresh(&self, stream: &Stream) -> Result<()> {
        self.engine.update_bounds(stream)?;
        self.engine.plan(stream)
    }

    /// Where a layer's call reads the descales of a tensor: its `n_q` f32 for logits, `n_kv` for q, k, v and o. Always the
    /// same address.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn descales(&self, layer: usize, tensor: Tensor) -> Result<DevicePtr> {
        self.check_layer(layer)?;
        Ok(self.engine.descales(layer, tensor as usize))
    }

    /// Where a layer's call leaves its statistics ([`StepWords`]).
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn stats(&self, layer: usize) -> Result<DevicePtr> {
        self.check_layer(layer)?;
        Ok(self.engine.stats(layer))
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        self.spec.layer(layer).map(drop)
    }

    /// Gives bounds that the host computed, one entry a layer in order; they are rounded up to f32.
    ///
    /// # Errors
    /// `is_mismatch` if a layer is missing or of another shape, `is_unsupported` if a layer lacks the certain bound.
    pub fn write_bounds(&self, bounds: &[LayerBounds]) -> Result<()> {
        let (heads, operands) = bounds::to_device(&self.spec, bounds, &self.tail)?;
        self.engine.write_bounds(&heads, &operands)
    }

    /// The bounds in use, as the device has them. Waits for the device.
    ///
    /// # Errors
    /// `is_non_finite` if a weight was; otherwise as the device.
    pub fn read_bounds(&self) -> Result<Vec<LayerBounds>> {
        let (heads, operands) = self.engine.read_bounds()?;
        bounds::from_device(&self.spec, &heads, &operands, &self.tail)
    }

    /// The plan of one layer. Waits for the device.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer, `is_non_finite` if a descale is NaN; otherwise as the device.
    pub fn read_plan(&self, layer: usize) -> Result<ScalePlan> {
        self.check_layer(layer)?;
        let all = self.engine.read_descales()?;
        let row = |tensor: Tensor| -> Result<Vec<Descale>> {
            let values = &all[self.engine.setup().descales(layer, tensor as usize)];
            if values.iter().any(|value| value.is_nan()) {
                return Err(Error::non_finite(format_args!(
                    "layer {layer}: a {} descale is NaN, since its bound or measurement was not finite",
                    tensor.name()
                )));
            }
            values.iter().map(|value| Descale::new(*value)).collect()
        };
        let bounded = self.engine.setup().has_values || !plans_from_bounds(&self.config);
        let optional = |tensor| if bounded { row(tensor).map(Some) } else { Ok(None) };
        Ok(ScalePlan {
            layer,
            logit_bound: None,
            logit_descale: row(Tensor::Logit)?,
            operands: OperandDescales {
                q: row(Tensor::Q)?,
                k: row(Tensor::K)?,
                v: optional(Tensor::V)?,
                o: optional(Tensor::O)?,
            },
        })
    }

    /// What the last observation took in, a layer an entry. `counts` are not measured on the device: entries say only
    /// whether there was something. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn read_observed(&self) -> Result<Vec<StepStats>> {
        let all = self.engine.read_observed()?;
        (0..self.spec.layers.len())
            .map(|layer| {
                let own = self.spec.layer(layer)?;
                let row = &all[self.engine.setup().stats(layer)];
                let words = StepWords::from_row(row, own.n_q_heads, own.n_kv_heads);
                words
                    .map(|words| StepStats::from(&words))
                    .ok_or_else(|| Error::cuda("a row of statistics is cut short"))
            })
            .collect()
    }

    /// auto-c: how far the certain bounds lay above what the burn-in has observed so far, a layer an entry, of logits, q, k and
    /// v. `None` where nothing but zeros was seen; no entries under the other policies. Not part of the state. Waits for the
    /// device.
    ///
    /// # Errors
    /// As the device.
    pub fn read_slack(&self) -> Result<Vec<[Option<Slack>; 4]>> {
        let slack = |words: SlackWords| {
            let SlackWords { min, max, sum, count } = words;
            (count > 0).then(|| Slack { min, mean: sum / count as f64, max, count })
        };
        Ok(self.engine.read_slack()?.into_iter().map(|layer| layer.map(slack)).collect())
    }

    /// Everything that later plans depend on, apart from the weights. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn save(&self) -> Result<PolicyState> {
        let memory = state::from_device(self.engine.setup(), &self.config, &self.engine.read_memory()?);
        Ok(PolicyState::new(self.config, &self.shape, memory))
    }

    /// Goes on from a state, in place: addresses and captured graphs stay valid. Synchronous.
    ///
    /// # Errors
    /// As [`PolicyState::restore`], or as the device.
    pub fn load(&self, state: PolicyState) -> Result<()> {
        let state = state.restore(&self.config, self.shape.clone())?.save();
        let memory = state::to_device(self.engine.setup(), &state.memory);
        self.engine.write_memory(&memory)
    }

    /// The same launches, with statistics and weights that the host may write.
    pub fn engine_mut(&mut self) -> &mut PolicyEngine {
        &mut self.engine
    }
}

fn plans_from_bounds(config: &PolicyConfig) -> bool {
    matches!(config, PolicyConfig::Geometry(_) | PolicyConfig::GeometryCStar(_) | PolicyConfig::AutoC(_))
}

/// A policy's parameters as numbers.
fn setup(spec: &AttentionSpec, config: &PolicyConfig, shape: &PolicyShape, tail: &Tail) -> Result<PolicySetup> {
    let mut keep = Vec::new();
    let (rule, eta, granularity) = match config {
        PolicyConfig::Geometry(c) => (Rule::Geometry, c.eta, c.granularity),
        PolicyConfig::GeometryCStar(c) => (Rule::GeometryCStar(isotropic(spec, tail)?), c.eta, c.granularity),
        PolicyConfig::AutoC(c) => {
            let pool = match c.pooling {
                Pooling::Model => Pool::Model,
                Pooling::Layer => Pool::Layer,
                Pooling::Head => Pool::Head,
            };
            let pooled = [Tensor::Logit, Tensor::Q, Tensor::K, Tensor::V];
            keep = (0..shape.layers()).map(|layer| pooled.map(|tensor| c.kept_ratios(shape, layer, tensor))).collect();
            let rule = Rule::AutoC { kappa: c.kappa, burn_in: c.burn_in, max_restarts: c.max_restarts, pool };
            (rule, c.eta, c.granularity)
        }
        // The paper's margin takes eta's place, for every tensor.
        PolicyConfig::DelayedPaper(c) => (Rule::DelayedPaper { history: c.history }, c.margin, c.granularity),
        PolicyConfig::DelayedTe(c) => {
            let most_recent = c.algorithm == AmaxAlgorithm::MostRecent;
            let rule = Rule::DelayedTe { history: c.history, most_recent, scaled_max: c.scaled_max() };
            (rule, 1.0, c.granularity)
        }
        PolicyConfig::Current(c) => (Rule::Current, 1.0, c.granularity),
    };
    let logit_target = eta * E4M3_MAX;
    let operand_target = if matches!(rule, Rule::DelayedPaper { .. }) { logit_target } else { E4M3_MAX };
    Ok(PolicySetup {
        rule,
        heads: shape.heads().clone(),
        d_model: spec.d_model,
        per_layer: granularity == Granularity::Layer,
        has_values: spec.norm.kind != crate::model::NormKind::None,
        logit_target,
        operand_target,
        soft_cap: spec.soft_cap,
        softmax_scales: spec.layers.iter().map(|layer| layer.logit_scale()).collect(),
        keep,
    })
}

// Tensors are counted alike on both sides.
const _: () = assert!(Tensor::O as usize + 1 == TENSORS && Tensor::Logit as usize == 0);
