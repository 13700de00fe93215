//! Results of several groups of layers, brought together in the order of the layers.

use super::group::Group;
use super::partition::{Partition, Run};
use crate::bound::{HeadBound, HeadFrobenius};
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// One run of words for the kernel.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Move {
    from: u64,
    to: u64,
    words: u32,
    pad: u32,
}
const _: () = assert!(size_of::<Move>() == 24);

impl Move {
    pub fn new(from: DevicePtr, to: DevicePtr, words: usize) -> Self {
        Self { from: from.0, to: to.0, words: words as u32, pad: 0 }
    }
}

/// What a group leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Frobenius,
    LogitBounds,
    Descales,
    TensorDescales,
    OperandBounds,
}

/// Which launches the results come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Behind {
    Frobenius,
    Plan,
    Descales,
}

/// Every run of a model, so ordered that each launch has its own in one piece.
#[derive(Debug)]
struct Runs {
    list: Vec<(Part, Run)>,
    /// First of the logit bounds of projections, of those of normalised q and k, and of the operands.
    starts: [usize; 3],
    has_bounds: bool,
}

impl Runs {
    /// `normalised`: of each group.
    fn new(partition: &Partition, normalised: &[bool], with_grams: bool) -> Self {
        let heads = &partition.heads;
        let mut list = vec![];
        let mut add = |part, wanted: &dyn Fn(usize) -> bool| -> usize {
            let words = |layer| match part {
                Part::Frobenius => heads.q(layer).len() * size_of::<HeadFrobenius>() / 4,
                Part::LogitBounds => heads.q(layer).len() * size_of::<HeadBound>() / 4,
                Part::Descales => 4 * heads.kv(layer).len(),
                Part::TensorDescales => 4,
                Part::OperandBounds => 3 * heads.kv(layer).len(),
            };
            list.extend(partition.runs(words).into_iter().filter(|run| wanted(run.group)).map(|run| (part, run)));
            list.len()
        };
        let has_bounds = with_grams || normalised.iter().all(|n| *n);
        let projected = |group: usize| !normalised[group];
        let starts = [
            add(Part::Frobenius, &|group| with_grams && projected(group)),
            add(Part::LogitBounds, &|group| has_bounds && projected(group)),
            add(Part::LogitBounds, &|group| has_bounds && normalised[group]),
        ];
        for part in [Part::Descales, Part::TensorDescales, Part::OperandBounds] {
            add(part, &|_| true);
        }
        Self { list, starts, has_bounds }
    }

    fn has_frobenius(&self) -> bool {
        self.starts[0] > 0
    }

    fn bytes(&self, partition: &Partition) -> usize {
        let (q, kv, layers) = (partition.heads.all_q(), partition.heads.all_kv(), partition.heads.layers());
        size_of::<Move>() * self.list.len()
            + if self.has_bounds { size_of::<HeadBound>() * q } else { 0 }
            + if self.has_frobenius() { size_of::<HeadFrobenius>() * q } else { 0 }
            + 4 * (7 * kv + 4 * layers)
    }
}

#[derive(Debug)]
pub(super) struct Joined {
    kernel: Kernel,
    moves: Buffer<Move>,
    starts: [usize; 3],
    pub heads: Buffer<f32>,
    pub tensors: Buffer<f32>,
    pub operand_bounds: Buffer<f32>,
    pub bounds: Option<Buffer<HeadBound>>,
    pub frobenius: Option<Buffer<HeadFrobenius>>,
    pub bytes: usize,
}

impl Joined {
    pub fn new(device: &Device, partition: &Partition, groups: &[Group], with_grams: bool) -> Result<Self> {
        let normalised: Vec<bool> = groups.iter().map(Group::normalised).collect();
        let runs = Runs::new(partition, &normalised, with_grams);
        let (q, kv, layers) = (partition.heads.all_q(), partition.heads.all_kv(), partition.heads.layers());
        let heads = device.zeros(4 * kv)?;
        let tensors = device.zeros(4 * layers)?;
        let operand_bounds = device.zeros(3 * kv)?;
        let bounds = if runs.has_bounds { Some(device.zeros(q)?) } else { None };
        // Where there is no Gram, there is no norm, and no number stands for it.
        let frobenius = if runs.has_frobenius() {
            let none = |layer| partition.place(layer).is_some_and(|(group, _)| normalised[group]);
            let start = |layer| {
                let value = if none(layer) { f32::NAN } else { 0.0 };
                std::iter::repeat_n(HeadFrobenius { norm: value, bound: value }, partition.heads.q(layer).len())
            };
            Some(device.upload(&(0..layers).flat_map(start).collect::<Vec<_>>())?)
        } else {
            None
        };
        let ends = |part, group: &Group| match part {
            Part::Frobenius => Some((group.head_frobenius()?.ptr(), frobenius.as_ref()?.ptr())),
            Part::LogitBounds => Some((group.head_bounds()?.ptr(), bounds.as_ref()?.ptr())),
            Part::Descales => Some((group.heads.ptr(), heads.ptr())),
            Part::TensorDescales => Some((group.tensors.ptr(), tensors.ptr())),
            Part::OperandBounds => Some((group.operand_bounds.ptr(), operand_bounds.ptr())),
        };
        let at = |base: DevicePtr, words: usize| base.offset(4 * words as u64);
        let moves = runs
            .list
            .iter()
            .map(|&(part, run)| {
                let ends = ends(part, &groups[run.group]);
                let (from, to) = ends.ok_or_else(|| Error::cuda(format_args!("a group of layers left no {part:?}")))?;
                Ok(Move::new(at(from, run.from), at(to, run.to), run.words))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            kernel: device.module(sources::JOIN, &[])?.kernel("scale_join")?,
            moves: device.upload(&moves)?,
            starts: runs.starts,
            bytes: runs.bytes(partition),
            heads,
            tensors,
            operand_bounds,
            bounds,
            frobenius,
        })
    }

    /// [`Joined::bytes`] before anything is allocated.
    pub fn bytes_for(partition: &Partition, normalised: &[bool], with_grams: bool) -> usize {
        Runs::new(partition, normalised, with_grams).bytes(partition)
    }

    /// Brings together what the launches in front of it left.
    pub fn run(&self, stream: &Stream, behind: Behind) -> Result<()> {
        let [bounds, normalised, _] = self.starts;
        let all = self.moves.len();
        let (first, last) = match behind {
            Behind::Frobenius => (0, bounds),
            Behind::Plan => (bounds, all),
            Behind::Descales => (normalised, all),
        };
        let args = [Arg::Ptr(self.moves.at(first))];
        // SAFETY: 1. the argument is the kernel's; 2. every run lies in a group's result and in this buffer's; 3. runs do
        // not meet, and what they read was written by the launches before, by the stream's order.
        unsafe { self.kernel.launch(stream, Launch::linear(last - first, 256, 0), &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables::{LayerInput, QkNormInput, QkNormSide};
    use super::*;
    use crate::device::scale::Dtype;

    /// Plain, normalised, plain with other heads, normalised, plain.
    fn partition() -> (Partition, Vec<bool>) {
        let side = QkNormSide { gain: DevicePtr::NULL, shift: DevicePtr::NULL, per_head: false, channels: 64 };
        let norm = QkNormInput { q: side, k: side, dtype: Dtype::F32, gain_offset: 0.0 };
        let layers =
            [(4, 2, false), (4, 2, true), (6, 3, false), (4, 2, true), (4, 2, false)].map(|(n_q, n_kv, norms)| {
                let qk_norm = norms.then_some(norm);
                LayerInput { d_model: 256, n_q, n_kv, d_head: 64, qk_norm, ..LayerInput::without_addresses() }
            });
        let partition = Partition::new(&layers).unwrap();
        let normalised = partition.groups().map(|m| layers[m[0]].qk_norm.is_some()).collect();
        (partition, normalised)
    }

    fn parts(runs: &[(Part, Run)], part: Part) -> Vec<(usize, usize)> {
        let mut of: Vec<_> = runs.iter().filter(|r| r.0 == part).map(|r| (r.1.to, r.1.words)).collect();
        of.sort_unstable();
        of
    }

    #[test]
    fn every_launch_brings_together_what_it_wrote_and_nothing_else() {
        let (partition, normalised) = partition();
        let runs = Runs::new(&partition, &normalised, true);
        let [bounds, behind_norms, operands] = runs.starts;
        // Query heads 4 4 6 4 4, KV heads 2 2 3 2 2.
        assert_eq!(parts(&runs.list[..bounds], Part::Frobenius), [(0, 8), (16, 12), (36, 8)]);
        assert_eq!(parts(&runs.list[bounds..behind_norms], Part::LogitBounds), [(0, 32), (64, 48), (144, 32)]);
        assert_eq!(parts(&runs.list[behind_norms..operands], Part::LogitBounds), [(32, 32), (112, 32)]);
        let rest = &runs.list[operands..];
        assert_eq!(parts(rest, Part::Descales), [(0, 8), (8, 8), (16, 12), (28, 8), (36, 8)]);
        assert_eq!(parts(rest, Part::TensorDescales), [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4)]);
        assert_eq!(parts(rest, Part::OperandBounds), [(0, 6), (6, 6), (12, 9), (21, 6), (27, 6)]);
        assert_eq!(rest.len(), 15);
    }

    #[test]
    fn without_grams_only_operands_come_together() {
        let (partition, normalised) = partition();
        let runs = Runs::new(&partition, &normalised, false);
        assert!(!runs.has_bounds && !runs.has_frobenius() && runs.starts == [0; 3]);
        // Unless every layer is bounded by norms of q and k.
        assert!(Runs::new(&partition, &[true; 3], false).has_bounds);
    }
}
