//! Scaling policies on the device: bounds and observed statistics in, descales out, all in device memory.
//!
//! [`PolicyEngine`] holds one policy's memory for every layer of a model. After it is made it only launches: no
//! allocation, no synchronisation, the caller's stream, capturable; plans stay at the same addresses. The kernels give the
//! bits of the policies of the host; what the numbers mean is written there.
//!
//! ```text
//! update_bounds   weights -> bounds               after the weights changed (one read of them)
//! plan            bounds, memory -> descales      before the calls (`current`: after this step's measurement)
//! observe         statistics -> memory, status    after the calls; clears the statistics
//! ```

use super::setup::{PolicySetup, Pool, Rule, TENSORS};
use super::table::{PolicyLayer, PolicyTable, SlackWords};
use crate::bound::HeadBound;
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::device::scale::ScaleEngine;
use crate::error::{Error, Result};
use crate::model::HeadOffsets;
use crate::stats::stats_words;

const THREADS: u32 = 256;

/// Tensors that have pools of their own: logits, q, k, v.
const POOLED: usize = TENSORS - 1;

/// What a status word of a layer says. Bits stay until [`PolicyEngine::clear_status`].
pub mod status {
    /// A value passed 448 times its descale.
    pub const OVERFLOW: u32 = 1;
    /// A value was NaN or infinite.
    pub const NON_FINITE: u32 = 2;
    /// A value passed its certain bound: the bounds are of other weights.
    pub const BEYOND_BOUND: u32 = 4;
    /// auto-c gave a constant up.
    pub const FELL_BACK: u32 = 8;
    /// delayed-te: an amax too small for a finite scale.
    pub const TINY: u32 = 16;
    /// A descale is NaN: its bound or its measurement is not finite.
    pub const NO_PLAN: u32 = 32;
}

/// Where the bounds come from.
#[derive(Debug)]
pub enum BoundSource {
    /// The policy needs none.
    None,
    /// From weights in device memory.
    Weights(Box<ScaleEngine>),
    /// Written from outside: [`PolicyEngine::write_bounds`] or [`PolicyEngine::host_bounds`].
    Host,
}

/// What a policy remembers, as the device keeps it. Vectors that a rule does not use are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyMemory {
    /// auto-c: burn-in steps of each layer.
    pub seen: Vec<u32>,
    /// auto-c: restarts, one value.
    pub restarts: Vec<u32>,
    /// auto-c: phase of each pool, see [`phase`]. Pools of logits, q, k, v; in each, layer by layer and head by head.
    pub phases: Vec<u32>,
    /// auto-c: constant of each pool.
    pub constants: Vec<f64>,
    /// auto-c: how many of a pool's places in `top` are taken.
    pub counts: Vec<u32>,
    /// auto-c: the largest ratios of each pool, descending, [`PolicySetup::room`] places a pool.
    pub top: Vec<f64>,
    /// delayed: a ring of maxima for each slot. Slots of a layer: one a tensor, or logits (its n_q), q, k, v, o (n_kv).
    pub history: Vec<f32>,
    /// delayed: the place of each ring where its order begins: the oldest (paper), the running step's (TE).
    pub places: Vec<u32>,
    /// delayed-te: scale of each slot.
    pub scales: Vec<f32>,
}

/// Phases of an auto-c pool.
pub mod phase {
    /// Observing.
    pub const BURN_IN: u32 = 0;
    /// The constant is used.
    pub const FROZEN: u32 = 1;
    /// An overflow brought the certain bound back.
    pub const FELL_BACK: u32 = 2;
    /// More restarts than allowed.
    pub const TOO_MANY_RESTARTS: u32 = 3;
    /// Every observed value was zero.
    pub const NOTHING_OBSERVED: u32 = 4;
}

#[derive(Debug)]
struct Memory {
    seen: Buffer<u32>,
    restarts: Buffer<u32>,
    phases: Buffer<u32>,
    constants: Buffer<f64>,
    counts: Buffer<u32>,
    top: Buffer<f64>,
    history: Buffer<f32>,
    places: Buffer<u32>,
    scales: Buffer<f32>,
}

/// One policy over every layer of a model, in device memory. Steps on two streams have to be ordered by events.
#[derive(Debug)]
pub struct PolicyEngine {
    setup: PolicySetup,
    layers: usize,
    source: BoundSource,
    plan: Kernel,
    observe: Kernel,
    restart: Kernel,
    table: Buffer<PolicyTable>,
    host_bounds: Option<(Buffer<HeadBound>, Buffer<f32>)>,
    stats: Buffer<u32>,
    seen_stats: Buffer<u32>,
    descales: Buffer<f32>,
    tensors: Buffer<f32>,
    status: Buffer<u32>,
    memory: Memory,
    slack: Buffer<SlackWords>,
    _sizes: Buffer<PolicyLayer>,
}

impl PolicyMemory {
    fn lengths(&self) -> [usize; 9] {
        [
            self.seen.len(),
            self.restarts.len(),
            self.phases.len(),
            self.constants.len(),
            self.counts.len(),
            self.top.len(),
            self.history.len(),
            self.places.len(),
            self.scales.len(),
        ]
    }
}

/// Whether bounds of these heads are the policy's.
fn fits(heads: &HeadOffsets, policy: &HeadOffsets) -> Result<()> {
    if heads.layers() != policy.layers() {
        let (have, want) = (heads.layers(), policy.layers());
        return Err(Error::mismatch(format_args!("the scale engine has {have} layers, the policy {want}")));
    }
    let of = |heads: &HeadOffsets, layer: usize| (heads.q(layer).len(), heads.kv(layer).len());
    match (0..heads.layers()).find(|layer| of(heads, *layer) != of(policy, *layer)) {
        None => Ok(()),
        Some(layer) => {
            let ((q, kv), (want_q, want_kv)) = (of(heads, layer), of(policy, layer));
            Err(Error::mismatch(format_args!(
                "layer {layer} of the scale engine has {q} query and {kv} KV heads, the policy's {want_q} and {want_kv}"
            )))
        }
    }
}

impl PolicyEngine {
    /// Sets everything up; `memory` is what the policy starts from.
    ///
    /// # Errors
    /// If the sizes break a rule, the memory does not fit them, the bounds are of another shape or missing, a kernel does
    /// not compile, or device memory runs out.
    pub fn new(device: &Device, setup: PolicySetup, source: BoundSource, memory: &PolicyMemory) -> Result<Self> {
        setup.check()?;
        let (layers, all_q, all_kv) = (setup.layers(), setup.heads.all_q(), setup.heads.all_kv());
        if setup.lengths() != memory.lengths() {
            return Err(Error::mismatch("the policy's memory does not fit its sizes"));
        }
        let needs_bounds = matches!(setup.rule, Rule::Geometry | Rule::GeometryCStar(_) | Rule::AutoC { .. });
        let mut host_bounds = None;
        let (heads, operands) = match &source {
            BoundSource::None if needs_bounds => {
                return Err(Error::argument("this policy plans from bounds, and none were given"));
            }
            BoundSource::None => (DevicePtr::NULL, DevicePtr::NULL),
            BoundSource::Weights(engine) => {
                let heads = engine
                    .head_bounds()
                    .ok_or_else(|| Error::unsupported("the scale engine was made without logit bounds"))?;
                fits(engine.heads(), &setup.heads)?;
                (heads.ptr(), engine.operand_bounds().ptr())
            }
            BoundSource::Host => {
                let bounds = host_bounds.insert((device.zeros::<HeadBound>(all_q)?, device.zeros::<f32>(3 * all_kv)?));
                (bounds.0.ptr(), bounds.1.ptr())
            }
        };
        let observing = device.module(sources::POLICY_OBSERVE, &[])?;
        let held = Memory {
            seen: device.upload(&memory.seen)?,
            restarts: device.upload(&memory.restarts)?,
            phases: device.upload(&memory.phases)?,
            constants: device.upload(&memory.constants)?,
            counts: device.upload(&memory.counts)?,
            top: device.upload(&memory.top)?,
            history: device.upload(&memory.history)?,
            places: device.upload(&memory.places)?,
            scales: device.upload(&memory.scales)?,
        };
        let slack = device.zeros(if matches!(setup.rule, Rule::AutoC { .. }) { layers * POOLED } else { 0 })?;
        let words = stats_words(all_q, all_kv);
        let stats = device.zeros::<u32>(words)?;
        let seen_stats = device.zeros::<u32>(words)?;
        let descales = device.upload(&vec![1f32; all_q + 4 * all_kv])?;
        let tensors = device.upload(&vec![1f32; layers * TENSORS])?;
        let status = device.zeros::<u32>(layers)?;
        let sizes = device.upload(&setup.table())?;
        let mut table = PolicyTable {
            heads: heads.0,
            operands: operands.0,
            stats: stats.ptr().0,
            seen_stats: seen_stats.ptr().0,
            plan: descales.ptr().0,
            tensors: tensors.ptr().0,
            status: status.ptr().0,
            sizes: sizes.ptr().0,
            seen: held.seen.ptr().0,
            restarts: held.restarts.ptr().0,
            phases: held.phases.ptr().0,
            constants: held.constants.ptr().0,
            counts: held.counts.ptr().0,
            top: held.top.ptr().0,
            slack: slack.ptr().0,
            history: held.history.ptr().0,
            places: held.places.ptr().0,
            scales: held.scales.ptr().0,
            layers: layers as u32,
            per_layer: setup.per_layer.into(),
            has_values: setup.has_values.into(),
            logit_target: setup.logit_target,
            operand_target: setup.operand_target,
            soft_cap: setup.soft_cap.unwrap_or(f64::INFINITY),
            d_model: setup.d_model as f64,
            ..bytemuck::Zeroable::zeroed()
        };
        setup.rule.write(&setup, &mut table);
        Ok(Self {
            layers,
            plan: device.module(sources::POLICY_PLAN, &[])?.kernel("policy_plan")?,
            observe: observing.kernel("policy_observe")?,
            restart: observing.kernel("policy_restart")?,
            table: device.upload(&[table])?,
            host_bounds,
            stats,
            seen_stats,
            descales,
            tensors,
            status,
            memory: held,
            slack,
            source,
            _sizes: sizes,
            setup,
        })
    }

    /// What it was made from.
    pub fn setup(&self) -> &PolicySetup {
        &self.setup
    }

    /// Puts new bounds on `stream`: one read of the weights. Nothing where bounds do not come from weights.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn update_bounds(&self, stream: &Stream) -> Result<()> {
        match &self.source {
            BoundSource::Weights(engine) => engine.plan(stream),
            BoundSource::None | BoundSource::Host => Ok(()),
        }
    }

    /// Where bounds lie that do not come from weights, `[layer][n_q]` of [`HeadBound`] and `[layer][q, k, v][n_kv]` f32: a
    /// stream's work may write them in place of [`PolicyEngine::write_bounds`]. Always the same addresses.
    pub fn host_bounds(&self) -> Option<(DevicePtr, DevicePtr)> {
        self.host_bounds.as_ref().map(|(heads, operands)| (heads.ptr(), operands.ptr()))
    }

    /// Gives the bounds of every layer: `[layer][n_q]` and `[layer][q, k, v][n_kv]`. Synchronous.
    ///
    /// # Errors
    /// If the bounds do not come from the host, or are not one for each head.
    pub fn write_bounds(&self, heads: &[HeadBound], operands: &[f32]) -> Result<()> {
        match &self.host_bounds {
            Some(bounds) => bounds.0.write(heads).and_then(|()| bounds.1.write(operands)),
            None => Err(Error::argument("this policy's bounds do not come from the host")),
        }
    }

    /// Reads the bounds in use. Waits for the device.
    ///
    /// # Errors
    /// If the policy has none, or the device fails.
    pub fn read_bounds(&self) -> Result<(Vec<HeadBound>, Vec<f32>)> {
        let of = |heads: &Buffer<HeadBound>, operands: &Buffer<f32>| Ok((heads.read()?, operands.read()?));
        match (&self.source, &self.host_bounds) {
            (BoundSource::Weights(engine), _) => match engine.head_bounds() {
                Some(heads) => of(heads, engine.operand_bounds()),
                None => Err(Error::cuda("the scale engine was made without logit bounds")),
            },
            (_, Some((heads, operands))) => of(heads, operands),
            _ => Err(Error::argument("this policy plans without bounds")),
        }
    }

    /// The engine that reads the weights, if there is one.
    pub fn weights(&self) -> Option<&ScaleEngine> {
        match &self.source {
            BoundSource::Weights(engine) => Some(engine),
            BoundSource::None | BoundSource::Host => None,
        }
    }

    /// The same, to write new weights of its own.
    pub fn weights_mut(&mut self) -> Option<&mut ScaleEngine> {
        match &mut self.source {
            BoundSource::Weights(engine) => Some(engine),
            BoundSource::None | BoundSource::Host => None,
        }
    }

    /// Puts the plan of every layer on `stream`.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn plan(&self, stream: &Stream) -> Result<()> {
        self.launch_plan(stream, 0, self.layers)
    }

    /// Puts the plan of one layer on `stream`.
    ///
    /// # Errors
    /// If there is no such layer or the launch is refused.
    pub fn plan_layer(&self, stream: &Stream, layer: usize) -> Result<()> {
        self.check_layer(layer)?;
        self.launch_plan(stream, layer, 1)
    }

    /// Takes the statistics of every layer in, and clears them.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn observe(&self, stream: &Stream) -> Result<()> {
        self.launch_observe(stream, 0, self.layers)
    }

    /// Takes the statistics of one layer in, and clears them.
    ///
    /// # Errors
    /// If there is no such layer or the launch is refused.
    pub fn observe_layer(&self, stream: &Stream, layer: usize) -> Result<()> {
        self.check_layer(layer)?;
        self.launch_observe(stream, layer, 1)
    }

    /// auto-c starts its burn-in again; the other policies ignore it.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn restart(&self, stream: &Stream) -> Result<()> {
        if !matches!(self.setup.rule, Rule::AutoC { .. }) {
            return Ok(());
        }
        let args = [Arg::Ptr(self.table.ptr()), Arg::U32(self.memory.phases.len() as u32)];
        // SAFETY: 1. the arguments are the kernel's; 2. and 3. the table reaches this engine's buffers only, and one block
        // writes them.
        unsafe { self.restart.launch(stream, Launch::linear(1, THREADS, 0), &args) }
    }

    fn launch_plan(&self, stream: &Stream, first: usize, count: usize) -> Result<()> {
        let args = [Arg::Ptr(self.table.ptr()), Arg::U32(first as u32)];
        let launch = Launch::linear(count, THREADS, (8 * self.setup.heads.most_q()) as u32);
        // SAFETY: 1. the arguments are the kernel's; 2. the table reaches buffers that this engine owns, sized for these
        // layers; 3. a block writes its own layer's row.
        unsafe { self.plan.launch(stream, launch, &args) }
    }

    fn launch_observe(&self, stream: &Stream, first: usize, count: usize) -> Result<()> {
        let shared_pools = matches!(self.setup.rule, Rule::AutoC { pool: Pool::Model, .. });
        let args = [Arg::Ptr(self.table.ptr()), Arg::U32(first as u32), Arg::U32(count as u32)];
        let blocks = if shared_pools { 1 } else { count };
        let launch = Launch::linear(blocks, THREADS, (8 * self.setup.heads.most_q()) as u32);
        // SAFETY: as above; where layers share a pool, one block takes them in order.
        unsafe { self.observe.launch(stream, launch, &args) }
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers {
            return Ok(());
        }
        Err(Error::argument(format_args!("there is no layer {layer}, the policy has {}", self.layers)))
    }

    /// Where the call of a layer has to leave its statistics: [`stats_words`] words, zero before the first call.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn stats(&self, layer: usize) -> DevicePtr {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        self.stats.at(self.setup.stats(layer).start)
    }

    /// Writes the statistics of one layer from the host, for calls that run elsewhere. Synchronous.
    ///
    /// # Errors
    /// If there is no such layer or `row` has another length.
    pub fn write_stats(&self, layer: usize, row: &[u32]) -> Result<()> {
        self.check_layer(layer)?;
        let place = self.setup.stats(layer);
        let words = place.len();
        let mut all = self.stats.read()?;
        match all.get_mut(place) {
            Some(place) if row.len() == words => place.copy_from_slice(row),
            _ => return Err(Error::argument(format_args!("a row of statistics has {words} words, not {}", row.len()))),
        }
        self.stats.write(&all)
    }

    /// The statistics that the last observation took in, row after row ([`PolicySetup::stats`]). Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read_observed(&self) -> Result<Vec<u32>> {
        self.seen_stats.read()
    }

    /// Descales of one layer's tensor (0 logits with its `n_q` values; q, k, v, o with `n_kv`), f32, always at this address.
    ///
    /// # Panics
    /// If there is no such layer or tensor.
    pub fn descales(&self, layer: usize, tensor: usize) -> DevicePtr {
        assert!(layer < self.layers && tensor < TENSORS, "layer {layer}, tensor {tensor}");
        self.descales.at(self.setup.descales(layer, tensor).start)
    }

    /// The largest descale of one layer's tensor: one f32, always at this address.
    ///
    /// # Panics
    /// If there is no such layer or tensor.
    pub fn tensor_descale(&self, layer: usize, tensor: usize) -> DevicePtr {
        assert!(layer < self.layers && tensor < TENSORS, "layer {layer}, tensor {tensor}");
        self.tensors.at(layer * TENSORS + tensor)
    }

    /// All descales, `[layer][n_q + 4 n_kv]` with each layer's own heads ([`PolicySetup::descales`]). Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read_descales(&self) -> Result<Vec<f32>> {
        self.descales.read()
    }

    /// The largest of each row, `[layer][5]`. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read_tensor_descales(&self) -> Result<Vec<f32>> {
        self.tensors.read()
    }

    /// A [`status`] word for each layer. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
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

    /// The policy's memory. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read_memory(&self) -> Result<PolicyMemory> {
        let m = &self.memory;
        Ok(PolicyMemory {
            seen: m.seen.read()?,
            restarts: m.restarts.read()?,
            phases: m.phases.read()?,
            constants: m.constants.read()?,
            counts: m.counts.read()?,
            top: m.top.read()?,
            history: m.history.read()?,
            places: m.places.read()?,
            scales: m.scales.read()?,
        })
    }

    /// auto-c: slack of each layer's logits, q, k and v since the burn-in began here; empty for the other rules. Waits for the
    /// device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read_slack(&self) -> Result<Vec<[SlackWords; POOLED]>> {
        Ok(self.slack.read()?.as_chunks().0.to_vec())
    }

    /// Puts another memory in its place, at the same addresses; slack begins anew. Synchronous.
    ///
    /// # Errors
    /// If it does not fit, or the device fails.
    pub fn write_memory(&self, memory: &PolicyMemory) -> Result<()> {
        if self.setup.lengths() != memory.lengths() {
            return Err(Error::mismatch("the policy's memory does not fit its sizes"));
        }
        let m = &self.memory;
        m.seen.write(&memory.seen)?;
        m.restarts.write(&memory.restarts)?;
        m.phases.write(&memory.phases)?;
        m.constants.write(&memory.constants)?;
        m.counts.write(&memory.counts)?;
        m.top.write(&memory.top)?;
        m.history.write(&memory.history)?;
        m.places.write(&memory.places)?;
        m.scales.write(&memory.scales)?;
        self.slack.write(&vec![SlackWords::default(); self.slack.len()])
    }
}
