//! One training run: graph, backward, loss scaling, AdamW, and the runtime whose scales attention uses.

use super::language::{Batch, Language, mix};
use super::model::{LAYERS, ModelKind, POSITIONS, Parameters};
use super::op::Attended;
use super::optimizer::{AdamW, LossScale};
use super::{Casts, failed};
use crate::attention::{Attention, AttentionCall, AttentionShape, Cpu, Inputs, Mask, Precision};
use crate::bound::Tail;
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, LayerWeights};
use crate::policy::{PolicyConfig, Report};
use crate::runtime::{Runtime, RuntimeConfig, RuntimeState, Step, StepOutcome, Weights, bounds_of};
use crate::spectral::Estimator;
use crate::stress::{Divergence, Mode, Seen, TraceRow, identity, look, row, sqnr_db};
use candle_core::Tensor;
use std::path::Path;

/// What a run is made from.
#[derive(Clone, Copy, Debug)]
pub struct TrainOptions {
    /// Model.
    pub model: ModelKind,
    /// Policy; `None` is attention in f32, the control.
    pub policy: Option<PolicyConfig>,
    /// What is cast.
    pub mode: Mode,
    /// What a value out of range becomes.
    pub casts: Casts,
    /// Seed of parameters and text.
    pub seed: u64,
    /// Sequences of a step.
    pub batch: usize,
    /// Tokens of a sequence, at most 64.
    pub seq_len: usize,
    /// Learning rate.
    pub rate: f64,
    /// Steps over which the rate rises from zero at the start.
    pub warm_up: u32,
    /// Optimizer.
    pub optimizer: AdamW,
    /// Largest norm of all gradients together.
    pub clip: f64,
    /// Union bound of `geometry-c-star`.
    pub tail: Tail,
    /// What is done about steps that are not finite.
    pub watchdog: Watchdog,
    /// Factor on the biases of q and k at the start (GPT-2 alone has them): they are drawn with this deviation.
    pub bias: f32,
    /// Whether every step also compares attention with f32 on the same operands.
    pub compare: bool,
}

impl TrainOptions {
    /// The defaults of the scenarios.
    pub fn new(model: ModelKind, policy: Option<PolicyConfig>) -> Self {
        Self {
            model,
            policy,
            mode: Mode::Logit,
            casts: Casts::Saturating,
            seed: 0,
            batch: 4,
            seq_len: POSITIONS,
            rate: 3e-3,
            warm_up: 10,
            optimizer: AdamW::default(),
            clip: 1.0,
            tail: Tail::default(),
            watchdog: Watchdog::default(),
            bias: 0.0,
            compare: true,
        }
    }

    fn check(&self) -> Result<()> {
        for (name, value, most) in [("batch", self.batch, 4096), ("seq-len", self.seq_len, POSITIONS)] {
            if !(1..=most).contains(&value) {
                return Err(Error::argument(format_args!("{name} {value} must lie between 1 and {most}")));
            }
        }
        if !(self.rate.is_finite() && self.rate > 0.0) {
            return Err(Error::argument(format_args!("rate {} must be finite and greater than zero", self.rate)));
        }
        Ok(())
    }

    /// What the run's runtime is made from, if it has one.
    fn runtime(&self) -> Option<RuntimeConfig> {
        self.policy.map(|policy| RuntimeConfig { policy, tail: self.tail, estimator: Estimator::Gram })
    }

    fn precision(&self) -> Precision {
        match self.policy {
            None => Precision::F32,
            Some(_) => Precision { on_overflow: self.casts.on_overflow(), ..self.mode.precision() },
        }
    }
}

/// Skip and recovery (numerics paper, sections 12.3 and 12.5).
///
/// A step whose loss or gradients are not finite changes no weight. After `patience` such steps in a row weights,
/// moments and scaling state go back to the last good checkpoint, and the rate is halved for `cautious` steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watchdog {
    /// Good steps between two checkpoints.
    pub every: u32,
    /// Bad steps in a row before the run goes back.
    pub patience: u32,
    /// Steps at half the rate after that.
    pub cautious: u32,
    /// Whether the scaling state goes back too; without, a policy keeps what it saw on the way.
    pub restore_scales: bool,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self { every: 25, patience: 8, cautious: 10, restore_scales: true }
    }
}

/// One policy in one layer of a step.
#[derive(Clone, Debug)]
pub struct Observed {
    /// What the scales of the tensors that are cast did.
    pub row: TraceRow,
    /// The same, head by head.
    pub(super) seen: Seen,
    /// The runtime's report.
    pub report: Report,
    /// Whether the run itself used these scales.
    pub own: bool,
}

/// One step of a run.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// Step, from 0.
    pub step: u64,
    /// Mean cross entropy in nats; NaN if attention made it so.
    pub loss: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Learning rate.
    pub rate: f64,
    /// Factor of the loss scaling during the step.
    pub loss_scale: f64,
    /// Nothing was learned: the loss or a gradient was not finite.
    pub skipped: bool,
    /// The run went back to its last good checkpoint after it.
    pub rolled_back: bool,
    /// Every layer under every policy that watched.
    pub observed: Vec<Observed>,
}

/// Everything that a resume needs.
#[derive(Clone, Debug)]
pub struct TrainState {
    parameters: Parameters,
    scales: Option<RuntimeState>,
    updates: u32,
    loss_scale: LossScale,
    bad: u32,
    cautious: u32,
    step: u64,
}

/// A run.
#[derive(Debug)]
pub struct Trainer {
    options: TrainOptions,
    spec: AttentionSpec,
    language: Language,
    pub(super) parameters: Parameters,
    runtime: Option<Runtime>,
    shadows: Vec<Runtime>,
    /// Updates that the optimizer has done.
    updates: u32,
    loss_scale: LossScale,
    /// Bad steps in a row.
    bad: u32,
    /// Steps left at half the rate.
    cautious: u32,
    step: u64,
    good: Option<Box<TrainState>>,
}

impl Trainer {
    /// A run at its start.
    ///
    /// # Errors
    /// `is_argument` if an option breaks its rule.
    ///
    /// ```
    /// use sigmascale::policy::PolicyKind;
    /// use sigmascale::train::{ModelKind, TrainOptions, Trainer};
    /// let options = TrainOptions { batch: 1, seq_len: 16, ..TrainOptions::new(ModelKind::Llama, Some(PolicyKind::Geometry.into())) };
    /// let record = Trainer::new(options)?.step(1.0)?;
    /// assert!(record.loss > 0.0 && !record.skipped);
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn new(options: TrainOptions) -> Result<Self> {
        options.check()?;
        let spec = options.model.spec()?;
        let mut parameters = Parameters::new(options.model, mix(options.seed ^ 0x5eed));
        if options.bias > 0.0 {
            parameters.draw_biases(options.bias, mix(options.seed ^ 0xb1a5));
        }
        let mut trainer = Self {
            language: Language::new(options.seed),
            parameters,
            runtime: None,
            shadows: Vec::new(),
            updates: 0,
            loss_scale: LossScale::default(),
            bad: 0,
            cautious: 0,
            step: 0,
            good: None,
            spec,
            options,
        };
        trainer.forget_scales()?;
        Ok(trainer)
    }

    /// Puts policies beside the run: they see its operands and plan, and change nothing.
    ///
    /// # Errors
    /// As [`Runtime::new`].
    pub fn shadow(&mut self, policies: &[PolicyConfig]) -> Result<()> {
        let tail = self.options.tail;
        for &policy in policies {
            self.shadows.push(Runtime::new(&self.spec, RuntimeConfig { policy, tail, estimator: Estimator::Gram })?);
        }
        Ok(())
    }

    /// The scaling state is lost: the policy is at its start.
    ///
    /// # Errors
    /// As [`Runtime::new`].
    pub fn forget_scales(&mut self) -> Result<()> {
        self.runtime = self.options.runtime().map(|config| Runtime::new(&self.spec, config)).transpose()?;
        self.good = None;
        Ok(())
    }

    /// The optimizer's moments and count, the loss scale and the scaling state are lost; the weights stay.
    ///
    /// # Errors
    /// As [`Runtime::new`].
    pub fn forget_all_but_weights(&mut self) -> Result<()> {
        for parameter in &mut self.parameters.all {
            parameter.moments.first.fill(0.0);
            parameter.moments.second.fill(0.0);
        }
        (self.updates, self.loss_scale, self.bad, self.cautious) = (0, LossScale::default(), 0, 0);
        self.forget_scales()
    }

    /// A policy's state of another run, model or time in place of this run's.
    ///
    /// # Errors
    /// As [`Runtime::resume`].
    pub fn take_scales(&mut self, state: RuntimeState) -> Result<()> {
        if let Some(config) = self.options.runtime() {
            self.runtime = Some(Runtime::resume(&self.spec, config, state)?);
        }
        self.good = None;
        Ok(())
    }

    /// The policy's state; `None` for the control.
    pub fn scales(&self) -> Option<RuntimeState> {
        self.runtime.as_ref().map(Runtime::state)
    }

    /// Writes the weights as a Hugging Face folder.
    ///
    /// # Errors
    /// `is_io` if the folder cannot be written.
    pub fn save_weights(&self, folder: &Path) -> Result<()> {
        self.parameters.save(folder)
    }

    /// Weights of a folder in place of the run's own; moments and scaling state stay.
    ///
    /// # Errors
    /// As [`Checkpoint::open`](crate::model::Checkpoint::open); `is_mismatch` if it is another model.
    pub fn load_weights(&mut self, folder: &Path) -> Result<()> {
        let loaded = Parameters::load(self.options.model, folder)?;
        for (own, loaded) in self.parameters.all.iter_mut().zip(loaded.all) {
            own.value = loaded.value;
        }
        Ok(())
    }

    /// Everything that [`Trainer::resume`] needs.
    pub fn state(&self) -> TrainState {
        TrainState {
            parameters: self.parameters.clone(),
            scales: self.scales(),
            updates: self.updates,
            loss_scale: self.loss_scale,
            bad: self.bad,
            cautious: self.cautious,
            step: self.step,
        }
    }

    /// A run that goes on from a state with the bits of one that never stopped.
    ///
    /// # Errors
    /// As [`Trainer::new`] and [`Runtime::resume`]; `is_mismatch` if the state is of another model.
    pub fn resume(options: TrainOptions, state: &TrainState) -> Result<Self> {
        if state.parameters.kind != options.model || state.scales.is_some() != options.policy.is_some() {
            return Err(Error::mismatch("the training state is of another model or policy"));
        }
        let mut trainer = Self::new(options)?;
        trainer.restore(state, true)?;
        trainer.step = state.step;
        Ok(trainer)
    }

    fn restore(&mut self, state: &TrainState, scales: bool) -> Result<()> {
        self.parameters = state.parameters.clone();
        (self.updates, self.loss_scale) = (state.updates, state.loss_scale);
        (self.bad, self.cautious) = (state.bad, state.cautious);
        if let (true, Some(scales)) = (scales, &state.scales) {
            self.take_scales(scales.clone())?;
        }
        Ok(())
    }

    /// All parameters in order, for comparisons.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.parameters.all.iter().map(|parameter| (parameter.name.as_str(), parameter.value.as_slice()))
    }

    /// The attention weights of a layer, as the bounds see them.
    ///
    /// # Errors
    /// `is_mismatch` if there is no such layer.
    pub fn layer_weights(&self, layer: usize) -> Result<LayerWeights<'_>> {
        self.parameters.layer(layer)
    }

    /// The model's attention.
    pub fn spec(&self) -> &AttentionSpec {
        &self.spec
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.parameters.count()
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Mean cross entropy of text that no step has seen, with attention in f32: it judges the weights, not the scales.
    ///
    /// # Errors
    /// If the graph fails.
    pub fn held_out_loss(&self) -> Result<f64> {
        let text = self.language.held_out(4 * self.options.batch, self.options.seq_len);
        let variables = self.parameters.variables()?;
        let mut attend = |layer: usize, q: &Tensor, k: &Tensor, v: &Tensor| {
            let call = call_of(&self.spec, layer, &text);
            let (q_values, k_values, v_values) = (values(q)?, values(k)?, values(v)?);
            let inputs = Inputs { q: &q_values, k: &k_values, v: &v_values };
            let plan = identity(layer, &call.shape);
            let output = Cpu.forward(&call, &inputs, &plan, &Precision::F32).map_err(candle_core::Error::wrap)?;
            Attended { call, plan, precision: Precision::F32, out: output.out, lse: output.lse }.place(q, k, v)
        };
        scalar(&self.parameters.loss(&variables, &text, &mut attend).map_err(failed)?)
    }

    /// One forward pass of a step's text, without a backward pass: what the overhead of scales is measured on.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn forward(&mut self) -> Result<f64> {
        let text = self.language.batch(self.step, self.options.batch, self.options.seq_len);
        let variables = self.parameters.variables()?;
        let (loss, _) = self.attend_all(&variables, &text)?;
        scalar(&loss)
    }

    /// One step at `factor` times the rate.
    ///
    /// # Errors
    /// If the graph, a bound or a plan fails. Values that are not finite are no error: the step is skipped.
    pub fn step(&mut self, factor: f64) -> Result<StepRecord> {
        if self.bad == 0
            && self.options.watchdog.every > 0
            && self.step.is_multiple_of(self.options.watchdog.every.into())
        {
            self.good = Some(Box::new(self.state()));
        }
        let text = self.language.batch(self.step, self.options.batch, self.options.seq_len);
        let variables = self.parameters.variables()?;
        let (loss, observed) = self.attend_all(&variables, &text)?;
        let loss_value = scalar(&loss)?;
        let scale = self.loss_scale.factor;
        let gradients = (loss * scale).and_then(|loss| loss.backward()).map_err(failed)?;
        // A parameter that the text did not touch has no gradient.
        let mut rows = Vec::with_capacity(variables.len());
        for variable in &variables {
            let row = gradients.get(variable.as_tensor()).map(values).transpose().map_err(failed)?;
            rows.push(row.map(|row| row.into_iter().map(|g| (f64::from(g) / scale) as f32).collect::<Vec<_>>()));
        }
        let square = |row: &Vec<f32>| row.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
        let norm = rows.iter().flatten().map(square).sum::<f64>().sqrt();
        let finite = loss_value.is_finite() && norm.is_finite();

        let warm = (f64::from(self.updates + 1) / f64::from(self.options.warm_up.max(1))).min(1.0);
        let rate = self.options.rate * factor * warm * if self.cautious > 0 { 0.5 } else { 1.0 };
        let mut record = StepRecord {
            step: self.step,
            loss: loss_value,
            gradient_norm: norm,
            rate,
            loss_scale: scale,
            skipped: !finite,
            rolled_back: false,
            observed,
        };
        self.loss_scale.observe(finite);
        if finite {
            self.update(rate, norm, rows);
            self.bad = 0;
            self.cautious = self.cautious.saturating_sub(1);
        } else {
            self.bad += 1;
            record.rolled_back = self.go_back()?;
        }
        self.step += 1;
        Ok(record)
    }

    fn update(&mut self, rate: f64, norm: f64, rows: Vec<Option<Vec<f32>>>) {
        // As torch's clip_grad_norm_.
        let clip = (self.options.clip / (norm + 1e-6)).min(1.0) as f32;
        self.updates += 1;
        for (parameter, row) in self.parameters.all.iter_mut().zip(rows) {
            let Some(mut row) = row else { continue };
            if clip < 1.0 {
                row.iter_mut().for_each(|g| *g *= clip);
            }
            self.options.optimizer.update(self.updates, rate, &mut parameter.value, &mut parameter.moments, &row);
        }
    }

    /// After too many bad steps: weights and moments of the last good checkpoint, and half the rate for a while.
    fn go_back(&mut self) -> Result<bool> {
        let watchdog = self.options.watchdog;
        if self.bad < watchdog.patience {
            return Ok(false);
        }
        let Some(good) = self.good.take() else { return Ok(false) };
        let scale = self.loss_scale;
        self.restore(&good, watchdog.restore_scales)?;
        // The loss scale does not go back: it fell for a reason.
        (self.loss_scale, self.bad, self.cautious) = (scale, 0, watchdog.cautious);
        self.good = Some(good);
        Ok(true)
    }

    /// The loss of a text under the run's own scales, and what every policy's scales did in every layer.
    fn attend_all(&mut self, variables: &[candle_core::Var], text: &Batch) -> Result<(Tensor, Vec<Observed>)> {
        let Self { options, spec, parameters, runtime, shadows, step, .. } = self;
        let mut observed = Vec::new();
        let watched = runtime.is_some() || !shadows.is_empty();
        let mut call_layer = |layer: usize, inputs: Inputs<'_>| -> Result<Attended> {
            let call = call_of(spec, layer, text);
            let plan = identity(layer, &call.shape);
            let exact = if runtime.is_none() || options.compare {
                Some(Cpu.forward(&call, &inputs, &plan, &Precision::F32)?)
            } else {
                None
            };
            let bounds = if watched { Some(bounds_of(spec, parameters.layer(layer)?, &options.tail)?) } else { None };
            let divergence = options.compare.then(|| Divergence::new(&call, &inputs));
            let mut one = |runtime: &mut Runtime, own: bool, precision: Precision| -> Result<Option<StepOutcome>> {
                let Some(bounds) = bounds.clone() else { return Ok(None) };
                let request = Step { layer, weights: Weights::Bounded(bounds), call, inputs, precision };
                let mut outcome = runtime.step(request, &Cpu)?;
                let seen = look(options.mode, &call.shape, &outcome);
                let sqnr = exact.as_ref().and_then(|exact| sqnr_db(&exact.out, &outcome.output.out));
                let kl = divergence.as_ref().map(|d| d.of(options.mode, &outcome.plan)).transpose()?.flatten();
                let kind = outcome.report.policy;
                let row = row(*step as usize, kind, options.mode, &outcome, &seen, sqnr, kl);
                observed.push(Observed { row, seen, report: outcome.report.clone(), own });
                // A policy that gave its scale up says which one is safe: the call is run again with it.
                if let Some(safe) = outcome.report.fallback.take().filter(|_| own) {
                    outcome.output = Cpu.forward(&call, &inputs, &safe, &precision)?;
                    outcome.plan = safe;
                }
                Ok(Some(outcome))
            };
            let precision = options.precision();
            let own = match runtime.as_mut() {
                Some(runtime) => one(runtime, true, precision)?,
                None => None,
            };
            // Shadows always saturate: what they would have broken is counted, not lived through.
            for shadow in shadows.iter_mut() {
                one(shadow, false, options.mode.precision())?;
            }
            let (plan, output) = match (own, exact) {
                (Some(own), _) => (own.plan, own.output),
                (None, Some(exact)) => (plan, exact),
                (None, None) => return Err(Error::argument("a run without a policy computes attention in f32")),
            };
            Ok(Attended { call, plan, precision, out: output.out, lse: output.lse })
        };
        // candle carries its own errors alone: ours waits here.
        let mut failure = None;
        let mut attend = |layer: usize, q: &Tensor, k: &Tensor, v: &Tensor| {
            let (q_values, k_values, v_values) = (values(q)?, values(k)?, values(v)?);
            match call_layer(layer, Inputs { q: &q_values, k: &k_values, v: &v_values }) {
                Ok(attended) => attended.place(q, k, v),
                Err(error) => {
                    let message = error.to_string();
                    failure = Some(error);
                    Err(candle_core::Error::msg(message))
                }
            }
        };
        let loss = parameters.loss(variables, text, &mut attend);
        match failure {
            Some(error) => Err(error),
            None => Ok((loss.map_err(failed)?, observed)),
        }
    }
}

fn values(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.flatten_all()?.to_vec1::<f32>()
}

fn scalar(x: &Tensor) -> Result<f64> {
    x.to_scalar::<f32>().map(f64::from).map_err(failed)
}

fn call_of(spec: &AttentionSpec, layer: usize, text: &Batch) -> AttentionCall {
    let shape = AttentionShape {
        batch: text.batch,
        n_q_heads: spec.n_q_heads,
        n_kv_heads: spec.n_kv_heads,
        len_q: text.len,
        len_k: text.len,
        d_head: spec.d_head,
    };
    AttentionCall {
        shape,
        mask: Mask::CAUSAL,
        softmax_scale: spec.softmax_scale[layer.min(LAYERS - 1)],
        soft_cap: None,
    }
}
