//! One training run: graph, backward, loss scaling, AdamW, and the runtime whose scales attention uses.

use super::failed;
use super::language::{Batch, Language, mix};
use super::model::{Parameter, Parameters};
use super::op::Attended;
use super::options::TrainOptions;
use super::state::{Counters, Snapshot, TrainState};
use crate::stress::{Divergence, Quality, Seen, TraceRow, identity, look, row};
use candle_core::Tensor;
use sigmascale::attention::{Attention, AttentionCall, AttentionShape, BackwardPrecision, Cpu, Inputs, Precision};
use sigmascale::model::{AttentionSpec, Checkpoint, LayerWeights};
use sigmascale::policy::{PolicyConfig, Report};
use sigmascale::runtime::{Runtime, RuntimeState, Step, StepOutcome, Weights, bounds_of};
use sigmascale::{Error, Result};
use std::path::Path;

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

/// A run.
#[derive(Debug)]
pub struct Trainer {
    options: TrainOptions,
    spec: AttentionSpec,
    language: Language,
    pub(super) parameters: Parameters,
    runtime: Option<Runtime>,
    shadows: Vec<Runtime>,
    pub(super) counters: Counters,
    /// The last good checkpoint.
    pub(super) good: Option<Snapshot>,
}

impl Trainer {
    /// A run at its start.
    ///
    /// # Errors
    /// `is_argument` if an option breaks its rule.
    ///
    /// ```
    /// use sigmascale::policy::PolicyKind;
    /// use sigmascale_lab::train::{ModelKind, TrainOptions, Trainer};
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
            counters: Counters::default(),
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
        for &policy in policies {
            self.shadows.push(Runtime::new(&self.spec, self.options.runtime_of(policy))?);
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
        self.counters = Counters { step: self.counters.step, ..Counters::default() };
        self.forget_scales()
    }

    /// A policy's state of another run or time in place of this run's.
    ///
    /// # Errors
    /// As [`Runtime::resume`]; `is_mismatch` for the control, which has no scales.
    pub fn take_scales(&mut self, state: RuntimeState) -> Result<()> {
        let config = self.options.runtime().ok_or_else(|| Error::mismatch("the control has no scales to replace"))?;
        self.runtime = Some(Runtime::resume(&self.spec, config, state)?);
        self.good = None;
        Ok(())
    }

    /// The policy's state; `None` for the control.
    pub fn scales(&self) -> Option<RuntimeState> {
        self.runtime.as_ref().map(Runtime::state)
    }

    /// The weights as a checkpoint in memory.
    ///
    /// # Errors
    /// As [`Checkpoint::from_memory`].
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        let (config, weights) = self.parameters.encode()?;
        Checkpoint::from_memory(config.as_bytes(), weights, self.options.model.name())
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
    /// As [`Checkpoint::open`](sigmascale::model::Checkpoint::open); `is_mismatch` if it is another model.
    pub fn load_weights(&mut self, folder: &Path) -> Result<()> {
        let loaded = Parameters::load(self.options.model, folder)?;
        for (own, loaded) in self.parameters.all.iter_mut().zip(loaded.all) {
            own.value = loaded.value;
        }
        self.good = None;
        Ok(())
    }

    /// Everything that [`Trainer::resume`] needs.
    pub fn state(&self) -> TrainState {
        TrainState { run: self.options.identity(), now: self.snapshot(), good: self.good.clone() }
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { parameters: self.parameters.clone(), scales: self.scales(), counters: self.counters }
    }

    /// A run that goes on from a state with the bits of one that never stopped, if the options are the same; shadows are
    /// put beside it anew.
    ///
    /// # Errors
    /// As [`Trainer::new`] and [`Runtime::resume`]; `is_mismatch` if the state is of another model, seed, batch, length or
    /// policy.
    pub fn resume(options: TrainOptions, state: &TrainState) -> Result<Self> {
        state.check(options.identity(), options.policy.map(|policy| policy.kind().name()))?;
        let mut trainer = Self::new(options)?;
        trainer.restore(&state.now, true)?;
        trainer.counters = state.now.counters;
        trainer.good = state.good.clone();
        Ok(trainer)
    }

    /// Parameters and, if asked for, scales of a snapshot.
    fn restore(&mut self, snapshot: &Snapshot, scales: bool) -> Result<()> {
        self.parameters = snapshot.parameters.clone();
        if let (true, Some(scales), Some(config)) = (scales, &snapshot.scales, self.options.runtime()) {
            self.runtime = Some(Runtime::resume(&self.spec, config, scales.clone())?);
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
        self.counters.step
    }

    /// Factor of the loss scaling.
    pub fn loss_scale(&self) -> f64 {
        self.counters.loss_scale.factor
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
            let (precision, backward) = (Precision::F32, BackwardPrecision::default());
            Attended { call, plan, precision, backward, out: output.out, lse: output.lse }.place(q, k, v)
        };
        scalar(&self.parameters.loss(&variables, &text, &mut attend).map_err(failed)?)
    }

    /// One forward pass of a step's text, without a backward pass: what the overhead of scales is measured on.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn forward(&mut self) -> Result<f64> {
        let text = self.language.batch(self.counters.step, self.options.batch, self.options.seq_len);
        let variables = self.parameters.variables()?;
        let (loss, _) = self.attend_all(&variables, &text)?;
        scalar(&loss)
    }

    /// One step at `factor` times the rate.
    ///
    /// # Errors
    /// `is_argument` if the factor is not finite or below zero; otherwise if the graph, a bound or a plan fails. Values
    /// that are not finite are no error: the step is skipped.
    pub fn step(&mut self, factor: f64) -> Result<StepRecord> {
        if !(factor.is_finite() && factor >= 0.0) {
            return Err(Error::argument(format_args!("factor {factor} of the rate must be finite and not below zero")));
        }
        let Counters { step, updates, bad, cautious, loss_scale } = self.counters;
        let every = u64::from(self.options.watchdog.every);
        if bad == 0 && every > 0 && step.is_multiple_of(every) {
            self.good = Some(self.snapshot());
        }
        let text = self.language.batch(step, self.options.batch, self.options.seq_len);
        let variables = self.parameters.variables()?;
        let (loss, observed) = self.attend_all(&variables, &text)?;
        let loss_value = scalar(&loss)?;
        let scale = loss_scale.factor;
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

        let warm = (f64::from(updates + 1) / f64::from(self.options.warm_up.max(1))).min(1.0);
        let rate = self.options.rate * factor * warm * if cautious > 0 { 0.5 } else { 1.0 };
        self.counters.loss_scale.observe(finite);
        let mut rolled_back = false;
        if finite {
            self.update(rate, norm, rows)?;
            (self.counters.bad, self.counters.cautious) = (0, cautious.saturating_sub(1));
        } else {
            self.counters.bad += 1;
            rolled_back = self.go_back()?;
        }
        self.counters.step += 1;
        Ok(StepRecord {
            step,
            loss: loss_value,
            gradient_norm: norm,
            rate,
            loss_scale: scale,
            skipped: !finite,
            rolled_back,
            observed,
        })
    }

    fn update(&mut self, rate: f64, norm: f64, rows: Vec<Option<Vec<f32>>>) -> Result<()> {
        // As torch's clip_grad_norm_.
        let clip = (self.options.clip / (norm + 1e-6)).min(1.0) as f32;
        self.counters.updates += 1;
        for (parameter, row) in self.parameters.all.iter_mut().zip(rows) {
            let Some(mut row) = row else { continue };
            if clip < 1.0 {
                row.iter_mut().for_each(|g| *g *= clip);
            }
            let Parameter { name, value, moments, .. } = parameter;
            self.options.optimizer.update(self.counters.updates, rate, value, moments, &row);
            if !value.iter().all(|x| x.is_finite()) {
                let step = self.counters.step;
                return Err(Error::non_finite(format_args!(
                    "step {step}: a rate of {rate:.1e} drove `{name}` out of f32"
                )));
            }
        }
        Ok(())
    }

    /// After too many bad steps: weights and moments of the last good checkpoint, and half the rate for a while.
    fn go_back(&mut self) -> Result<bool> {
        let watchdog = self.options.watchdog;
        if self.counters.bad < watchdog.patience {
            return Ok(false);
        }
        let Some(good) = self.good.take() else { return Ok(false) };
        self.restore(&good, watchdog.restore_scales)?;
        // Text goes on, and the loss scale does not go back: it fell for a reason.
        let Counters { step, loss_scale, .. } = self.counters;
        self.counters = Counters { step, loss_scale, bad: 0, cautious: watchdog.cautious, ..good.counters };
        self.good = Some(good);
        Ok(true)
    }

    /// The loss of a text under the run's own scales, and what every policy's scales did in every layer.
    fn attend_all(&mut self, variables: &[candle_core::Var], text: &Batch) -> Result<(Tensor, Vec<Observed>)> {
        let Self { options, spec, parameters, runtime, shadows, counters, .. } = self;
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
                let weights = match runtime.estimated() {
                    true => Weights::Changed(parameters.layer(layer)?),
                    false => Weights::Bounded(bounds),
                };
                let request = Step { layer, weights, call, inputs, precision };
                let mut outcome = runtime.step(request, &Cpu)?;
                let seen = look(options.mode, &call.shape, &outcome);
                let out = &outcome.output.out;
                let mut quality = exact.as_ref().map(|exact| Quality::of(&exact.out, out)).unwrap_or_default();
                quality.softmax_kl =
                    divergence.as_ref().map(|d| d.of(options.mode, &outcome.plan)).transpose()?.flatten();
                let kind = outcome.report.policy;
                let row = row(counters.step as usize, kind, options.mode, &outcome, &seen, &quality);
                observed.push(Observed { row, seen, report: outcome.report.clone(), own });
                // A policy that gave its scale up says which one is safe: the call is run again with it.
                if let Some(safe) = outcome.report.fallback.take().filter(|_| own) {
                    outcome.output = Cpu.forward(&call, &inputs, &safe, &precision)?;
                    outcome.plan = safe;
                }
                Ok(Some(outcome))
            };
            let precision = options.precision(counters.step, layer);
            let own = match runtime.as_mut() {
                Some(runtime) => one(runtime, true, precision)?,
                None => None,
            };
            // Shadows always saturate: what they would have broken is counted, not lived through.
            for shadow in shadows.iter_mut() {
                one(shadow, false, options.quantised())?;
            }
            let (plan, output) = match (own, exact) {
                (Some(own), _) => (own.plan, own.output),
                (None, Some(exact)) => (plan, exact),
                (None, None) => return Err(Error::argument("a run without a policy computes attention in f32")),
            };
            let backward = options.backward();
            Ok(Attended { call, plan, precision, backward, out: output.out, lse: output.lse })
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

fn call_of(spec: &AttentionSpec, layer: usize, text: &Batch) -> AttentionCall<'static> {
    let own = &spec.layers[layer];
    let shape = AttentionShape {
        batch: text.batch,
        n_q_heads: own.n_q_heads,
        n_kv_heads: own.n_kv_heads,
        len_q: text.len,
        len_k: text.len,
        d_head: own.d_head,
        d_v: own.d_head,
    };
    AttentionCall { softmax_scale: own.softmax_scale, ..AttentionCall::causal(shape) }
}
