//! The order of launches of a plan, and what runs beside what, for layers of one kind: alike in everything that a launch takes once ([`super::partition`]).

use super::bounds::Bounds;
use super::grams::{GramRoute, Grams};
use super::layout::{self, Tables};
use super::norms::Norms;
use super::qk_norm::QkNorm;
use super::results::{Logits, Results};
use super::tables::{self, ChannelStats, LayerInput, Place};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::{Error, Result};
use crate::plan::DEFAULT_ETA;

/// Everything that the scales of one kind of layers need, set up.
#[derive(Debug)]
pub(super) struct Group {
    layers: Vec<LayerInput>,
    projections: Buffer<tables::Projection>,
    /// What the table held when it was made.
    made: Vec<tables::Projection>,
    stats: Buffer<ChannelStats>,
    layer_table: Buffer<tables::Layer>,
    norms: Norms,
    descales: Kernel,
    certified: Option<Certified>,
    estimated: Option<Estimated>,
    qk_norm: Option<QkNorm>,
    /// Kernels may start before the one before them has ended, and wait for it (PDL).
    pdl: bool,
}

/// Grams, and the certificates that are made of them.
#[derive(Debug)]
struct Certified {
    grams: Grams,
    bounds: Bounds,
}

/// What makes bounds of estimates.
#[derive(Debug)]
struct Estimated {
    kernel: Kernel,
    growth: Buffer<tables::Growth>,
    eta: f64,
}

impl Group {
    /// # Safety
    /// As [`ScaleEngine::new`](super::ScaleEngine::new).
    pub unsafe fn new(device: &Device, picked: (Vec<LayerInput>, Vec<Place>), logits: Logits) -> Result<Self> {
        let (layers, places) = picked;
        let built = Tables::new(&layers, &places);
        let normalised = layers[0].qk_norm.is_some();
        let (mut certified, mut estimated) = (None, None);
        match logits {
            Logits::Certified if !normalised => {
                let grams = Grams::new(device, &layers, &built)?;
                let bounds = Bounds::new(device, &layers, &places, &grams)?;
                certified = Some(Certified { grams, bounds });
            }
            Logits::Estimated if !normalised => {
                let kernel = device.module(sources::ESTIMATED_BOUNDS, &[])?.kernel("scale_estimated_bounds")?;
                let growth = layers.iter().zip(&places).map(|(l, place)| l.growth(place)).collect::<Vec<_>>();
                estimated = Some(Estimated { kernel, growth: device.upload(&growth)?, eta: DEFAULT_ETA });
            }
            _ => {}
        }
        Ok(Self {
            stats: device.zeros(built.rows)?,
            layer_table: device.upload(&built.layers)?,
            norms: Norms::new(device, &layers, &built)?,
            descales: device.module(sources::DESCALES, &[])?.overlapping_kernel("scale_operand_descales")?,
            certified,
            estimated,
            qk_norm: if normalised { Some(QkNorm::new(device, &layers, &places)?) } else { None },
            // Without projections to read there is no kernel before the descales, but a fill.
            pdl: device.arch().compute >= 90 && !built.projections.is_empty(),
            projections: device.upload(&built.projections)?,
            made: built.projections,
            layers,
        })
    }

    /// Where the tables hold what depends on the addresses of these layers, and what that is. They are as those that the group
    /// was made with, but for addresses.
    pub fn places(&self, layers: &[LayerInput]) -> Result<Vec<(DevicePtr, Vec<u64>)>> {
        let maps = [self.norms.maps(), self.certified.as_ref().and_then(|c| c.grams.maps())];
        let mut all = vec![];
        for (index, (at, made)) in layout::places(layers).zip(&self.made).enumerate() {
            all.push((self.projections.at(index), bytemuck::cast::<_, [u64; 4]>(at).to_vec()));
            let moved = tables::Projection { at, ..*made };
            for maps in maps.into_iter().flatten() {
                all.extend(maps.of(index, &moved)?);
            }
        }
        all.extend(self.qk_norm.as_ref().map(|norm| norm.places(layers)).unwrap_or_default());
        Ok(all)
    }

    /// Operand descales; with normalized q and k the logit bounds too. `clear`: the status has to be cleared first. `early`: as of
    /// [`Norms::every`].
    pub fn descales(&self, stream: &Stream, results: &Results, clear: bool, early: bool) -> Result<()> {
        let status = clear.then_some(&results.status);
        self.norms.every(stream, [self.projections.ptr(), self.stats.ptr()], status, early)?;
        self.operand_descales(stream, results, self.pdl, 1024)
    }

    /// Bounds of logits from `estimates`, `[layer][query head]` or with `summed` `[layer]`, behind [`Group::descales`]. `cover`: what
    /// sigma is multiplied by for heads of so many channels.
    pub fn estimate(
        &self,
        stream: &Stream,
        results: &Results,
        (estimates, summed): (DevicePtr, bool),
        cover: &dyn Fn(usize) -> Result<f64>,
    ) -> Result<()> {
        let (Some(estimated), Some(bounds)) = (&self.estimated, &results.bounds) else { return Ok(()) };
        let (count, first) = (self.layers.len(), &self.layers[0]);
        // An estimate does not know of rotation, so nothing covers it there.
        let factor = if summed || first.rotary > 0 { 1.0 } else { cover(first.d_head)? };
        let args = [
            Arg::Ptr(self.layer_table.ptr()),
            Arg::Ptr(estimated.growth.ptr()),
            Arg::U32(count as u32),
            Arg::U32(summed.into()),
            Arg::F64(factor),
            Arg::F64(estimated.eta),
            Arg::Ptr(self.stats.ptr()),
            Arg::Ptr(estimates),
            Arg::Ptr(bounds.ptr()),
            Arg::Ptr(results.status.ptr()),
        ];
        let launch = Launch::linear((count * first.n_q).div_ceil(4), 128, 0);
        // SAFETY: 1. the arguments are the kernel's; 2. all are buffers of this engine and of the one that estimates, for these
        // layers; 3. a warp writes its own head's bound, and what it reads was written by launches in front of it.
        unsafe { estimated.kernel.launch(stream, launch, &args) }
    }

    /// From the channel statistics. `pdl`: a kernel that leaves some of these is the last on the stream.
    fn operand_descales(&self, stream: &Stream, results: &Results, pdl: bool, threads: u32) -> Result<()> {
        let args = [
            Arg::Ptr(self.layer_table.ptr()),
            Arg::Ptr(self.stats.ptr()),
            Arg::Ptr(results.descales.ptr()),
            Arg::Ptr(results.tensors.ptr()),
            Arg::Ptr(results.operand_bounds.ptr()),
            Arg::Ptr(results.status.ptr()),
        ];
        let shared = 4 * self.layers[0].n_q as u32;
        let launch = Launch { grid: (self.layers.len() as u32, 3, 1), block: threads, shared };
        // SAFETY: 1. the arguments are the kernel's, in order; 2. and 3. all are the engine's buffers, written for these
        // layers, ordered by the stream.
        unsafe { self.descales.launch_early(stream, launch, &args, pdl)? };
        self.qk_norm.as_ref().map_or(Ok(()), |norm| norm.run(stream, results))
    }

    /// The Grams, if this group has them.
    pub fn grams(&self, stream: &Stream) -> Result<()> {
        let Some(Certified { grams, .. }) = &self.certified else { return Ok(()) };
        grams.launch(stream, self.projections.ptr(), self.stats.ptr(), DevicePtr::NULL)
    }

    /// Operand descales and logit bounds. `side`: for what runs concurrently with the certificates. `clear`: the status has to be cleared
    /// first. `early`: as of [`Group::descales`], for layers without Grams.
    pub fn plan(&self, stream: &Stream, side: &Stream, results: &Results, clear: bool, early: bool) -> Result<()> {
        let Some(Certified { grams, bounds }) = &self.certified else {
            return self.descales(stream, results, clear, early);
        };
        let (projections, stats, status) = (self.projections.ptr(), self.stats.ptr(), results.status.ptr());
        let cleared = if clear { grams.clear(&results.status, stream)? } else { DevicePtr::NULL };
        grams.launch(stream, projections, stats, cleared)?;
        if !grams.has_stats {
            self.norms.every(stream, [projections, stats], None, false)?;
        }
        grams.part_stats(stream, projections, stats)?;
        // V and the descales concurrently with the certificates: the one waits for memory, the others for tensor cores.
        side.wait_for(stream)?;
        let values = grams.has_stats && self.norms.values(side, projections, stats)?;
        // Blocks small enough for the room that certificates leave.
        self.operand_descales(side, results, self.pdl && values, 256)?;
        bounds.norms(stream, grams, stats, status)?;
        bounds.frobenius(stream, grams, stats, DevicePtr::NULL)?;
        stream.wait_for(side)?;
        bounds.finish(stream, grams, stats, results)
    }

    /// Frobenius norms, after a plan, if this group has Grams.
    pub fn frobenius(&self, stream: &Stream, results: &Results) -> Result<()> {
        let (Some(Certified { grams, bounds }), Some(norms)) = (&self.certified, &results.frobenius) else {
            return Ok(());
        };
        bounds.frobenius(stream, grams, self.stats.ptr(), norms.ptr())
    }

    /// What logit descales are made with.
    pub fn set_eta(&mut self, eta: f64) {
        if let Some(estimated) = &mut self.estimated {
            estimated.eta = eta;
        }
        if let Some(certified) = &mut self.certified {
            certified.bounds.eta = eta;
        }
        if let Some(norm) = &mut self.qk_norm {
            norm.eta = eta;
        }
    }

    /// Whether a plan reads each weight once; `None` without Grams.
    pub fn one_pass(&self) -> Option<bool> {
        self.certified.as_ref().map(|c| c.grams.has_stats)
    }

    /// Which kernel makes the Grams, if any.
    pub fn route(&self) -> Option<GramRoute> {
        self.certified.as_ref().map(|c| c.grams.route)
    }

    /// As [`ScaleEngine::squared`](super::ScaleEngine::squared).
    pub fn squared(&self) -> Result<(usize, usize)> {
        self.certified.as_ref().map_or(Ok((0, 0)), |c| c.bounds.squared())
    }

    /// Statistics of every channel of the layer in this place: q, k, then v, those that are read.
    pub fn read_stats(&self, place: usize) -> Result<Vec<ChannelStats>> {
        let rows = self.stats.len() / self.layers.len();
        Ok(self.stats.read()?[place * rows..][..rows].to_vec())
    }

    /// The Gram of one head of the layer in this place, row-major.
    pub fn read_gram(&self, place: usize, head: usize) -> Result<Vec<f64>> {
        let certified = self.certified.as_ref().ok_or_else(|| Error::cuda("the layer has no Grams"))?;
        let first = &self.layers[0];
        let heads = first.n_q + first.n_kv;
        if head >= heads {
            return Err(Error::argument(format_args!("there is no head {head}, the layer has {heads} of q and k")));
        }
        certified.grams.read(place * heads + head, first.d_head)
    }
}
