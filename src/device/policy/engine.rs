//! Policies in device memory: buffers, the launches of a step, and what the host reads. The weights' part of a plan:
//! [`crate::device::scale`].

use super::memory::{MemoryLayout, row_length};
use super::table::{PolicyLayer, PolicyTable, has_values};
use crate::bound::{self, BoundKind, HeadBound, LayerBounds, Tail, check_device};
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream, sources};
use crate::device::scale::{EstimateEngine, ScaleEngine};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, HeadOffsets, LayerSpec};
use crate::plan::{OperandDescales, ScalePlan};
use crate::policy::{AutoCConfig, PolicyConfig, PolicyShape, PolicyState, Pooling, ScaledTensor, Slack};
use crate::scale::Descale;
use crate::stats::{StepStats, StepWords, stats_words};
use std::ops::Range;

const THREADS: u32 = 256;

/// Most query heads of a layer: a block keeps 8 bytes of shared memory for each.
const MAX_QUERY_HEADS: usize = 4096;

const TENSORS: usize = ScaledTensor::ALL.len();

/// Where a policy's bounds come from.
#[derive(Debug)]
pub enum BoundSource {
    /// The policy plans from none: [`PolicyKind::bound`](crate::policy::PolicyKind::bound).
    None,
    /// Weights in device memory, one read of them for each [`PolicyEngine::update_bounds`].
    Weights(Box<ScaleEngine>),
    /// The same with norms from a power iteration: each update is one forward's iterations.
    Estimates(Box<EstimateEngine>),
    /// The host, by [`PolicyEngine::write_bounds`], or a stream's work at the addresses of [`PolicyEngine::host_bounds`].
    Host,
}

/// One policy over every layer of a model, in device memory. Steps on two streams have to be ordered by events.
#[derive(Debug)]
pub struct PolicyEngine {
    spec: AttentionSpec,
    config: PolicyConfig,
    shape: PolicyShape,
    tail: Tail,
    plan: Kernel,
    observe: Kernel,
    restart: Kernel,
    weights: Option<Box<ScaleEngine>>,
    estimates: Option<Box<EstimateEngine>>,
    host_bounds: Option<(Buffer<HeadBound>, Buffer<f32>)>,
    stats: Buffer<u32>,
    observed: Buffer<u32>,
    descales: Buffer<f32>,
    tensor_descales: Buffer<f32>,
    status: Buffer<u32>,
    memory: Buffer<u64>,
    layout: MemoryLayout,
    table: Buffer<PolicyTable>,
    /// Read by the kernels alone.
    _layers: Buffer<PolicyLayer>,
}

impl PolicyEngine {
    /// A policy at its start.
    ///
    /// # Errors
    /// `is_argument` if a parameter breaks its rule or bounds are missing, `is_mismatch` if the scale engine's layers have other
    /// heads, `is_unsupported` for geometry-c-star with a QK-norm, a scale engine without logit bounds, or what
    /// [`check_device`] refuses; `is_cuda` if a kernel
    /// does not compile or device memory runs out.
    pub fn new(
        device: &Device,
        spec: &AttentionSpec,
        config: PolicyConfig,
        tail: &Tail,
        source: BoundSource,
    ) -> Result<Self> {
        Self::with_state(device, spec, config.build(spec.into())?.save(), tail, source)
    }

    /// A policy that goes on from a state, whichever side saved it.
    ///
    /// # Errors
    /// As [`PolicyEngine::new`]; `is_mismatch` if the state's parts do not fit each other or the model.
    pub fn with_state(
        device: &Device,
        spec: &AttentionSpec,
        state: PolicyState,
        tail: &Tail,
        source: BoundSource,
    ) -> Result<Self> {
        spec.check()?;
        let (config, shape) = (state.config, PolicyShape::from(spec));
        // The host's own checks of a state, whose parts may come from a file.
        let state = state.restore(&config, shape.clone())?.save();
        if spec.qk_norm.is_some() && config.kind().bound() == Some(BoundKind::RankAware) {
            return Err(Error::unsupported(format_args!(
                "{}: q and k are normalized after the projection, so {} has no rank-aware bound",
                spec.name,
                config.kind()
            )));
        }
        let heads = shape.heads();
        if let Some(layer) = (0..heads.layers()).find(|layer| heads.q(*layer).len() > MAX_QUERY_HEADS) {
            return Err(Error::argument(format_args!(
                "{}: {} query heads, a policy on the device takes at most {MAX_QUERY_HEADS}",
                spec.place(layer),
                heads.q(layer).len()
            )));
        }
        let row = row_length(&state)?;
        let mut table = PolicyTable::new(spec, &state, tail, row)?;
        let (layout, words) = MemoryLayout::encode(&state.memory, row);

        let (all_q, all_kv) = (heads.all_q(), heads.all_kv());
        let (mut weights, mut estimates, mut host_bounds) = (None, None, None);
        match source {
            BoundSource::None if config.kind().bound().is_some() => {
                return Err(Error::argument(format_args!("{} plans from bounds, and none were given", config.kind())));
            }
            BoundSource::None => {}
            BoundSource::Weights(engine) => {
                check_device(spec)?;
                check_heads(engine.heads(), heads)?;
                let bounds = engine
                    .head_bounds()
                    .ok_or_else(|| Error::unsupported("the scale engine was made without logit bounds"))?;
                (table.heads, table.operands) = (bounds.ptr().0, engine.operand_bounds().ptr().0);
                weights = Some(engine);
            }
            BoundSource::Estimates(engine) => {
                check_device(spec)?;
                check_heads(engine.heads(), heads)?;
                let bounds = engine.head_bounds().ok_or_else(|| Error::unsupported("no layer has estimated bounds"))?;
                (table.heads, table.operands) = (bounds.ptr().0, engine.operand_bounds().ptr().0);
                estimates = Some(engine);
            }
            BoundSource::Host => {
                let (bounds, operands) = (device.zeros(all_q)?, device.zeros(3 * all_kv)?);
                (table.heads, table.operands) = (bounds.ptr().0, operands.ptr().0);
                host_bounds = Some((bounds, operands));
            }
        }
        let layers = device.upload(&PolicyLayer::all(spec, &state))?;
        let stats = device.zeros(stats_words(all_q, all_kv))?;
        let observed = device.zeros(stats.len())?;
        let descales = device.upload(&vec![1.0; all_q + 4 * all_kv])?;
        let tensor_descales = device.upload(&vec![1.0; TENSORS * heads.layers()])?;
        let status = device.zeros(heads.layers())?;
        let memory = device.upload(&words)?;
        (table.stats, table.observed, table.status) = (stats.ptr().0, observed.ptr().0, status.ptr().0);
        (table.descales, table.tensor_descales) = (descales.ptr().0, tensor_descales.ptr().0);
        table.layers = layers.ptr().0;
        layout.place(&memory, &mut table);
        let observing = device.module(sources::POLICY_OBSERVE, &[])?;
        Ok(Self {
            spec: spec.clone(),
            config,
            tail: *tail,
            plan: device.module(sources::POLICY_PLAN, &[])?.kernel("policy_plan")?,
            observe: observing.kernel("policy_observe")?,
            restart: observing.kernel("policy_restart")?,
            table: device.upload(&[table])?,
            weights,
            estimates,
            host_bounds,
            stats,
            observed,
            descales,
            tensor_descales,
            status,
            memory,
            layout,
            _layers: layers,
            shape,
        })
    }

    /// Parameters.
    pub fn config(&self) -> PolicyConfig {
        self.config
    }

    /// Heads of each layer, and where its values begin: statistics at word `stats_words` of the heads before it, descales at
    /// `heads().q(layer).start + 4 heads().kv(layer).start`.
    pub fn shape(&self) -> &PolicyShape {
        &self.shape
    }

    /// The engine that reads the weights; `None` where bounds do not come from weights.
    pub fn weights(&self) -> Option<&ScaleEngine> {
        self.weights.as_deref()
    }

    /// The engine that estimates norms, if bounds come from one.
    pub fn estimates(&self) -> Option<&EstimateEngine> {
        self.estimates.as_deref()
    }

    /// Launches new bounds on `stream`: one read of the weights, or the iterations of a forward. Does nothing where bounds do not
    /// come from weights.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn update_bounds(&self, stream: &Stream) -> Result<()> {
        if let Some(engine) = self.estimates() {
            return engine.plan(stream);
        }
        self.weights().map_or(Ok(()), |engine| engine.plan(stream))
    }

    /// Launches the plan of every layer on `stream`.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn plan(&self, stream: &Stream) -> Result<()> {
        self.launch_plan(stream, 0, self.shape.layers())
    }

    /// Launches the plan of one layer on `stream`.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer; if the launch is refused.
    pub fn plan_layer(&self, stream: &Stream, layer: usize) -> Result<()> {
        self.spec.layer(layer)?;
        self.launch_plan(stream, layer, 1)
    }

    /// Launches bounds and plan of every layer on `stream`: what a training step does after its update.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn refresh(&self, stream: &Stream) -> Result<()> {
        self.update_bounds(stream)?;
        self.plan(stream)
    }

    /// Launches the update of memory and status from the statistics of every layer, which it clears.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn observe(&self, stream: &Stream) -> Result<()> {
        self.launch_observe(stream, 0, self.shape.layers())
    }

    /// auto-c: launches a new start of the burn-in. The other policies ignore it.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn restart(&self, stream: &Stream) -> Result<()> {
        if !matches!(self.config, PolicyConfig::AutoC(_)) {
            return Ok(());
        }
        let args = [Arg::Ptr(self.table.ptr()), Arg::U32(self.layout.pools() as u32)];
        // SAFETY: 1. the arguments are the kernel's; 2. the table reaches buffers that this engine owns; 3. one block writes them.
        unsafe { self.restart.launch(stream, Launch::linear(1, THREADS, 0), &args) }
    }

    fn launch_plan(&self, stream: &Stream, first: usize, count: usize) -> Result<()> {
        let args = [Arg::Ptr(self.table.ptr()), Arg::U32(first as u32)];
        // SAFETY: 1. the arguments are the kernel's; 2. the table reaches buffers that this engine owns, sized for these
        // layers; 3. a block writes its own layer's row.
        unsafe { self.plan.launch(stream, self.launch(count), &args) }
    }

    fn launch_observe(&self, stream: &Stream, first: usize, count: usize) -> Result<()> {
        let shared_pools = matches!(self.config, PolicyConfig::AutoC(AutoCConfig { pooling: Pooling::Model, .. }));
        let args = [Arg::Ptr(self.table.ptr()), Arg::U32(first as u32), Arg::U32(count as u32)];
        // SAFETY: as above; where layers share a pool, one block takes them in order.
        unsafe { self.observe.launch(stream, self.launch(if shared_pools { 1 } else { count }), &args) }
    }

    fn launch(&self, blocks: usize) -> Launch {
        Launch::linear(blocks, THREADS, (8 * self.shape.heads().most_q()) as u32)
    }

    /// Where a layer's call reads the descales of a tensor, f32: `n_q` for logits, `n_kv` for q, k, v and o. 1 where values have
    /// no bound (no input norm). Always the same address.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn descales(&self, layer: usize, tensor: ScaledTensor) -> Result<DevicePtr> {
        Ok(self.descales.at(self.descale_range(layer, tensor)?.start))
    }

    fn descale_range(&self, layer: usize, tensor: ScaledTensor) -> Result<Range<usize>> {
        self.spec.layer(layer)?;
        let (q, kv) = (self.shape.heads().q(layer), self.shape.heads().kv(layer));
        let (before, count) = match tensor {
            ScaledTensor::Logit => (0, q.len()),
            _ => (q.len() + (tensor as usize - 1) * kv.len(), kv.len()),
        };
        let start = q.start + 4 * kv.start + before;
        Ok(start..start + count)
    }

    /// Where a layer's call leaves its statistics ([`StepWords`]), zero before the first call. Always the same address.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer.
    pub fn stats(&self, layer: usize) -> Result<DevicePtr> {
        Ok(self.stats.at(self.stats_range(layer)?.start))
    }

    fn stats_range(&self, layer: usize) -> Result<Range<usize>> {
        self.spec.layer(layer)?;
        let (q, kv) = (self.shape.heads().q(layer), self.shape.heads().kv(layer));
        Ok(stats_words(q.start, kv.start)..stats_words(q.end, kv.end))
    }

    /// Writes the statistics of one layer from the host, for calls that run elsewhere: a row of [`StepWords`]. Synchronous.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer or `row` has another length; otherwise as the device.
    pub fn write_stats(&self, layer: usize, row: &[u32]) -> Result<()> {
        let range = self.stats_range(layer)?;
        if row.len() != range.len() {
            return Err(Error::argument(format_args!(
                "{}: expected {} words of statistics, got {}",
                self.spec.place(layer),
                range.len(),
                row.len()
            )));
        }
        let mut all = self.stats.read()?;
        all[range].copy_from_slice(row);
        self.stats.write(&all)
    }

    /// [`BoundSource::Host`]: where bounds lie, `[layer][n_q]` of [`HeadBound`] and `[layer][q, k, v][n_kv]` f32. Always the same
    /// addresses.
    pub fn host_bounds(&self) -> Option<(DevicePtr, DevicePtr)> {
        self.host_bounds.as_ref().map(|(heads, operands)| (heads.ptr(), operands.ptr()))
    }

    /// [`BoundSource::Host`]: writes bounds that the host computed, one entry per layer in order, rounded up to f32. Synchronous.
    ///
    /// # Errors
    /// `is_argument` if bounds do not come from the host, `is_mismatch` if a layer is missing or has other heads,
    /// `is_unsupported` if a head lacks a bound that the policy plans from; otherwise as the device.
    pub fn write_bounds(&self, bounds: &[LayerBounds]) -> Result<()> {
        let Some((heads, operands)) = &self.host_bounds else {
            return Err(Error::argument("the bounds of this policy do not come from the host"));
        };
        let kind = self.config.kind().bound().unwrap_or_default();
        let (head_bounds, operand_bounds) = bound::to_device(&self.spec, bounds, kind)?;
        heads.write(&head_bounds)?;
        operands.write(&operand_bounds)
    }

    /// The bounds in use. Waits for the device.
    ///
    /// # Errors
    /// `is_argument` if the policy has none, `is_non_finite` if a weight was not finite; otherwise as the device.
    pub fn read_bounds(&self) -> Result<Vec<LayerBounds>> {
        let (heads, operands) = match (&self.weights, &self.estimates, &self.host_bounds) {
            (Some(engine), ..) => (engine.head_bounds(), engine.operand_bounds()),
            (_, Some(engine), _) => (engine.head_bounds(), engine.operand_bounds()),
            (.., Some((heads, operands))) => (Some(heads), operands),
            _ => return Err(Error::argument("this policy was made without bounds")),
        };
        let heads = heads.ok_or_else(|| Error::cuda("the scale engine was made without logit bounds"))?;
        bound::from_device(&self.spec, &heads.read()?, &operands.read()?, &self.tail)
    }

    /// The plan of one layer. Waits for the device.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer, `is_non_finite` if a descale is NaN; otherwise as the device.
    pub fn read_plan(&self, layer: usize) -> Result<ScalePlan> {
        self.spec.layer(layer)?;
        let all = self.descales.read()?;
        let row = |tensor: ScaledTensor| -> Result<Vec<Descale>> {
            let values = &all[self.descale_range(layer, tensor)?];
            if values.iter().any(|value| value.is_nan()) {
                return Err(Error::non_finite(format_args!(
                    "{}: a {} descale is NaN, since its bound or measurement was not finite",
                    self.spec.place(layer),
                    tensor.name()
                )));
            }
            values.iter().map(|value| Descale::new(*value)).collect()
        };
        let known = has_values(&self.spec) || self.config.kind().bound().is_none();
        let values = |tensor| known.then(|| row(tensor)).transpose();
        let operands = OperandDescales {
            q: row(ScaledTensor::Q)?,
            k: row(ScaledTensor::K)?,
            v: values(ScaledTensor::V)?,
            o: values(ScaledTensor::O)?,
        };
        Ok(ScalePlan { layer, logit_bound: None, logit_descale: row(ScaledTensor::Logit)?, operands })
    }

    /// The largest descale of each tensor, `[layer][logit, q, k, v, o]`. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn read_tensor_descales(&self) -> Result<Vec<f32>> {
        self.tensor_descales.read()
    }

    /// A [`status`](super::status) word for each layer. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn read_status(&self) -> Result<Vec<u32>> {
        self.status.read()
    }

    /// Clears the status words, in the order of `stream`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear_status(&self, stream: &Stream) -> Result<()> {
        self.status.clear(stream)
    }

    /// The statistics of the last observation, one entry per layer. The device does not count values: `count` says only whether
    /// there was one. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn read_observed(&self) -> Result<Vec<StepStats>> {
        let all = self.observed.read()?;
        let layer = |(layer, own): (usize, &LayerSpec)| {
            let words = StepWords::from_row(&all[self.stats_range(layer)?], own.n_q_heads, own.n_kv_heads);
            words.map(|words| StepStats::from(&words)).ok_or_else(|| Error::cuda("a row of statistics is cut short"))
        };
        self.spec.layers.iter().enumerate().map(layer).collect()
    }

    /// auto-c: worst-case bound over observed amax since the burn-in began here, one entry per layer, of logits, q, k and v. `None`
    /// where nothing but zeros was observed; no entries under the other policies. Not part of the state. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn read_slack(&self) -> Result<Vec<[Option<Slack>; 4]>> {
        Ok(self.layout.slack(&self.memory.read()?))
    }

    /// Everything that later plans depend on, except the weights. Waits for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn save(&self) -> Result<PolicyState> {
        let mut state = self.config.build(self.shape.clone())?.save();
        self.layout.decode(&self.memory.read()?, &mut state.memory);
        Ok(state)
    }

    /// Goes on from a state, in place: addresses and captured graphs stay valid, slack begins anew. Synchronous.
    ///
    /// # Errors
    /// As [`PolicyState::restore`], or as the device.
    pub fn load(&self, state: PolicyState) -> Result<()> {
        let state = state.restore(&self.config, self.shape.clone())?.save();
        self.memory.write(&MemoryLayout::encode(&state.memory, row_length(&state)?).1)
    }
}

/// # Errors
/// `is_mismatch` if a scale engine has other heads than the policy.
fn check_heads(got: &HeadOffsets, expected: &HeadOffsets) -> Result<()> {
    let (layers, got_layers) = (expected.layers(), got.layers());
    if got_layers != layers {
        return Err(Error::mismatch(format_args!("scale engine: expected {layers} layers, got {got_layers}")));
    }
    for layer in 0..layers {
        let [want, have] = [expected, got].map(|heads| (heads.q(layer).len(), heads.kv(layer).len()));
        if have != want {
            return Err(Error::mismatch(format_args!(
                "scale engine: expected {} query and {} KV heads in layer {layer}, got {} and {}",
                want.0, want.1, have.0, have.1
            )));
        }
    }
    Ok(())
}
