//! Scales of a whole model, whose layers may differ.

use super::grams::GramRoute;
use super::group::Group;
use super::host::DeviceWeights;
use super::partition::Partition;
use super::results::{Logits, Results};
use super::tables::{ChannelStats, LayerInput};
use crate::bound::{HeadBound, HeadFrobenius};
use crate::cuda::{Buffer, Device, DevicePtr, Stream};
use crate::error::{Error, Result};
use crate::model::HeadOffsets;
use crate::plan::check_eta;
use std::sync::Arc;

/// A model's weights in device memory, with everything that scales need set up.
///
/// Layers may differ in anything: shape, rotation, norm, storage, and whether q and k are normalized. Layers of one kind share
/// their launches, and each other kind adds its own to the caller's stream. All write into one set of results, layer after
/// layer without padding: [`ScaleEngine::heads`] says where a layer's begin.
///
/// An engine has one workspace: work of one engine on two streams has to be ordered by events.
#[derive(Debug)]
pub struct ScaleEngine {
    partition: Partition,
    groups: Vec<Group>,
    results: Results,
    /// For what a plan runs besides its certificates.
    side: Stream,
    /// Every layer has logit bounds.
    bounded: bool,
    bytes: usize,
    /// Weights that the engine keeps alive; `None` where its maker promised to.
    weights: Option<Arc<DeviceWeights>>,
}

impl ScaleEngine {
    /// Sets everything up: compiles (or finds) the kernels, writes the tables, allocates the workspace.
    ///
    /// # Errors
    /// `is_argument`, naming the layer, if a shape breaks a rule (d_head a multiple of 8 from 16 to 256, n_kv divides n_q,
    /// rotated channels even and within a head); otherwise if a kernel does not compile or the memory is not there.
    ///
    /// # Safety
    /// 1. Every address in `layers` reaches the matrix or vector that its shape describes, in memory of `device`.
    /// 2. It stays valid, and is not written while a launch of this engine (or a graph of one) runs.
    pub unsafe fn new(device: &Device, layers: &[LayerInput], with_grams: bool) -> Result<Self> {
        // SAFETY: the caller's promises.
        unsafe { Self::set_up(device, layers, logits(with_grams), false) }
    }

    /// The same with room for bounds that are made of estimates: [`ScaleEngine::estimate`].
    ///
    /// # Errors
    /// As [`ScaleEngine::new`].
    ///
    /// # Safety
    /// As [`ScaleEngine::new`].
    pub(super) unsafe fn estimated(device: &Device, layers: &[LayerInput]) -> Result<Self> {
        // SAFETY: the caller's promises.
        unsafe { Self::set_up(device, layers, Logits::Estimated, false) }
    }

    /// # Safety
    /// As [`ScaleEngine::new`], but for a dry run, which reaches no address.
    unsafe fn set_up(device: &Device, layers: &[LayerInput], logits: Logits, dry: bool) -> Result<Self> {
        let partition = Partition::new(layers)?;
        let ((results, groups), bytes) = device.counting(dry, |device| {
            let results = Results::new(device, &partition.heads, layers, logits)?;
            // SAFETY: the caller's promises, for these layers.
            let group = |members| unsafe { Group::new(device, partition.pick(layers, members), logits) };
            Ok((results, partition.groups().map(group).collect::<Result<Vec<_>>>()?))
        })?;
        let bounded = logits != Logits::Unbounded || layers.iter().all(|l| l.qk_norm.is_some());
        Ok(Self { partition, groups, results, side: device.urgent_stream()?, bounded, bytes, weights: None })
    }

    /// Where the tables hold what depends on the addresses of these layers, and what that is. Nothing else differs from those
    /// that the engine was made with.
    pub(super) fn places(&self, layers: &[LayerInput]) -> Result<Vec<(DevicePtr, Vec<u64>)>> {
        let of = |(group, members): (&Group, &[usize])| group.places(&self.partition.pick(layers, members).0);
        let all = self.groups.iter().zip(self.partition.groups()).map(of).collect::<Result<Vec<_>>>()?;
        Ok(all.concat())
    }

    /// The same over weights that are kept alive with the engine.
    ///
    /// # Errors
    /// As [`ScaleEngine::new`].
    pub fn over(device: &Device, weights: &Arc<DeviceWeights>, with_grams: bool) -> Result<Self> {
        // SAFETY: 1. every range was checked against the memory that `weights` owns; 2. the engine holds it, and nothing
        // here writes it.
        let engine = unsafe { Self::new(device, weights.layers(), with_grams)? };
        Ok(engine.keeping(weights))
    }

    /// Keeps these weights alive with the engine.
    pub(super) fn keeping(mut self, weights: &Arc<DeviceWeights>) -> Self {
        self.weights = Some(weights.clone());
        self
    }

    /// The weights that the engine keeps alive.
    pub fn weights(&self) -> Option<&Arc<DeviceWeights>> {
        self.weights.as_ref()
    }

    /// The heads of each layer, and where its results begin: entry `4 heads().kv(layer).start` of
    /// [`ScaleEngine::head_descales`], `3 heads().kv(layer).start` of [`ScaleEngine::operand_bounds`],
    /// `heads().q(layer).start` of [`ScaleEngine::head_bounds`] and [`ScaleEngine::head_frobenius`], and `4 layer` of
    /// [`ScaleEngine::tensor_descales`].
    pub fn heads(&self) -> &HeadOffsets {
        &self.partition.heads
    }

    /// Number of kinds of layers. Each kind has its own launches.
    pub fn kinds(&self) -> usize {
        self.groups.len()
    }

    /// Puts bounds of logits on `stream`, behind the operand descales: see [`Group::estimate`].
    pub(super) fn estimate(
        &self,
        stream: &Stream,
        estimates: (DevicePtr, bool),
        cover: &dyn Fn(usize) -> Result<f64>,
    ) -> Result<()> {
        self.groups.iter().try_for_each(|group| group.estimate(stream, &self.results, estimates, cover))
    }

    /// Puts the operand descales of every layer on `stream`: one read of W_Q, W_K and W_V.
    ///
    /// # Errors
    /// If a launch is refused.
    pub fn descales(&self, stream: &Stream) -> Result<()> {
        self.descales_early(stream, false)
    }

    /// [`ScaleEngine::descales`]. `early`: the launch in front is one of this crate, which a kernel may wait for.
    pub(super) fn descales_early(&self, stream: &Stream, early: bool) -> Result<()> {
        let mut groups = self.groups.iter().enumerate();
        groups.try_for_each(|(i, group)| group.descales(stream, &self.results, i == 0, early && i == 0))
    }

    /// Puts the Grams of every Q and K head on `stream`: one read of W_Q and W_K. Layers with normalized q and k have none.
    ///
    /// # Errors
    /// If the engine was made without Grams, or a launch is refused.
    pub fn grams(&self, stream: &Stream) -> Result<()> {
        self.need_grams()?;
        self.groups.iter().try_for_each(|group| group.grams(stream))
    }

    fn need_grams(&self) -> Result<()> {
        if self.groups.iter().any(|group| group.route().is_some()) {
            return Ok(());
        }
        Err(Error::cuda("the engine was made without Grams"))
    }

    /// Puts the whole plan on `stream`: operand descales, and for every query head a certified logit bound and its
    /// descale. One read of the weights where [`ScaleEngine::one_pass`] says so; W_Q and W_K are read twice elsewhere, and
    /// not at all where q and k are normalized after the projection.
    ///
    /// # Errors
    /// If the engine was made without Grams, or a launch is refused.
    pub fn plan(&self, stream: &Stream) -> Result<()> {
        self.plan_early(stream, false)
    }

    /// [`ScaleEngine::plan`]. `early`: as of [`ScaleEngine::descales_early`].
    pub(super) fn plan_early(&self, stream: &Stream, early: bool) -> Result<()> {
        if !self.bounded {
            return Err(Error::cuda("the engine was made without logit bounds"));
        }
        let mut groups = self.groups.iter().enumerate();
        groups.try_for_each(|(i, group)| group.plan(stream, &self.side, &self.results, i == 0, early && i == 0))
    }

    /// Logit bounds of [`ScaleEngine::plan`], `[layer][query head]`; `None` if a layer has none, since the engine was made
    /// without Grams.
    pub fn head_bounds(&self) -> Option<&Buffer<HeadBound>> {
        self.results.bounds.as_ref().filter(|_| self.bounded)
    }

    /// Puts the Frobenius norms `F = ||W_Q W_K^T||_F` of every query head on `stream`, and certified bounds of them over every
    /// relative position, after [`ScaleEngine::plan`], whose Grams it reads: no weight is read again, and nothing of the plan
    /// changes. For stable ranks and for bounds on isotropic tokens: sigma of a plan is below the bound of F already.
    ///
    /// # Errors
    /// If no layer has Grams (the engine was made without, or q and k are normalized in all), or a launch is refused.
    pub fn frobenius(&self, stream: &Stream) -> Result<()> {
        self.need_grams()?;
        self.groups.iter().try_for_each(|group| group.frobenius(stream, &self.results))
    }

    /// What [`ScaleEngine::frobenius`] leaves, `[layer][query head]`; NaN in layers whose q and k are normalized.
    pub fn head_frobenius(&self) -> Option<&Buffer<HeadFrobenius>> {
        self.results.frobenius.as_ref()
    }

    /// Bytes of device memory that the engine holds.
    pub fn workspace_bytes(&self) -> usize {
        self.bytes
    }

    /// What [`ScaleEngine::workspace_bytes`] of an engine for these layers will be: compiles (or finds) the kernels, and
    /// allocates nothing. Addresses are not read.
    ///
    /// # Errors
    /// As [`ScaleEngine::new`], but for memory.
    pub fn workspace_bytes_for(device: &Device, layers: &[LayerInput], with_grams: bool) -> Result<usize> {
        // SAFETY: a dry run.
        Ok(unsafe { Self::set_up(device, layers, logits(with_grams), true)? }.bytes)
    }

    /// The same engine with logit descales bound / (eta 448); 0.8 unless this is called.
    ///
    /// # Errors
    /// As [`check_eta`](crate::plan::check_eta).
    pub fn with_eta(mut self, eta: f64) -> Result<Self> {
        check_eta(eta)?;
        self.groups.iter_mut().for_each(|group| group.set_eta(eta));
        Ok(self)
    }

    /// True if [`ScaleEngine::plan`] reads each weight once: the Gram pass leaves the statistics of its channels too.
    pub fn one_pass(&self) -> bool {
        let mut passes = self.groups.iter().filter_map(Group::one_pass).peekable();
        passes.peek().is_some() && passes.all(|once| once)
    }

    /// Which kernel makes the Grams of a layer; `None` if it has none, or there is no such layer.
    pub fn route(&self, layer: usize) -> Option<GramRoute> {
        self.groups[self.partition.place(layer)?.0].route()
    }

    /// Operand descales, `[layer][q, k, v, o][n_kv]` f32.
    pub fn head_descales(&self) -> &Buffer<f32> {
        &self.results.descales
    }

    /// The largest of each layer's heads, `[layer][q, k, v, o]` f32.
    pub fn tensor_descales(&self) -> &Buffer<f32> {
        &self.results.tensors
    }

    /// Operand bounds with rounding, `B + share A`, `[layer][q, k, v][n_kv]` f32, rounded up; 0 for a head of zeros.
    pub fn operand_bounds(&self) -> &Buffer<f32> {
        &self.results.operand_bounds
    }

    /// Status word of all layers: 0, or bits for weights that are not finite (1), bounds that are not finite (2), bounds
    /// that fell back to a coarser certificate (4).
    pub fn status(&self) -> &Buffer<u32> {
        &self.results.status
    }

    /// Matrices whose norm the last plan certified, and how many a plan may have to: heads' own norms are left out where the
    /// scaled ones show that their product cannot be the smaller bound. Products of heads without rotation are not counted. Waits
    /// for the device.
    ///
    /// # Errors
    /// As the device.
    pub fn squared(&self) -> Result<(usize, usize)> {
        let add = |sum: (usize, usize), group: &Group| group.squared().map(|own| (sum.0 + own.0, sum.1 + own.1));
        self.groups.iter().try_fold((0, 0), add)
    }

    /// Statistics of every channel of a layer that is read: q, k, then v. Waits for the device.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer; otherwise as the device.
    pub fn read_stats(&self, layer: usize) -> Result<Vec<ChannelStats>> {
        let (group, place) = self.place(layer)?;
        group.read_stats(place)
    }

    /// The Gram of one head of a layer, assembled on the host (row-major, d_head x d_head), for tests. `head` counts the
    /// query heads, then the key heads.
    ///
    /// # Errors
    /// `is_argument` if there is no such layer or head; if there are no Grams or the device fails.
    pub fn read_gram(&self, layer: usize, head: usize) -> Result<Vec<f64>> {
        let (group, place) = self.place(layer)?;
        group.read_gram(place, head)
    }

    fn place(&self, layer: usize) -> Result<(&Group, usize)> {
        let missing = || {
            let count = self.partition.heads.layers();
            Error::argument(format_args!("there is no layer {layer}, the engine has {count}"))
        };
        let (group, place) = self.partition.place(layer).ok_or_else(missing)?;
        Ok((&self.groups[group], place))
    }
}

fn logits(with_grams: bool) -> Logits {
    if with_grams { Logits::Certified } else { Logits::Unbounded }
}
