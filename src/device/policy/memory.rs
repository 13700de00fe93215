//! A policy's memory in device memory: one buffer, written from and read into the host's own [`Memory`].

use super::table::{POOLED, PolicyTable};
use crate::cuda::Buffer;
use crate::error::{Error, Result};
use crate::policy::{DelayedState, Forbidden, Memory, Phase, PolicyConfig, PolicyState, RatioPool, Slack, TeSlot};
use bytemuck::{Pod, Zeroable};
use std::iter::repeat;
use std::ops::Range;

/// Most ratios that auto-c keeps in all pools together (1 GiB), so that parameters cannot ask for any amount of memory.
const MAX_RATIOS: usize = 1 << 27;

/// Phases of an auto-c pool in `kernels/policy/types.cuh`.
mod phase {
    pub const BURN_IN: u32 = 0;
    pub const FROZEN: u32 = 1;
    pub const FELL_BACK: u32 = 2;
    pub const TOO_MANY_RESTARTS: u32 = 3;
    pub const NOTHING_OBSERVED: u32 = 4;
}

/// `Pool` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PoolWords {
    phase: u32,
    count: u32,
    c: f64,
}

/// `Slot` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SlotWords {
    place: u32,
    scale: f32,
}

/// `Slack` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SlackWords {
    min: f64,
    max: f64,
    sum: f64,
    count: u64,
}
const _: () = assert!(size_of::<PoolWords>() == 16 && size_of::<SlotWords>() == 8 && size_of::<SlackWords>() == 32);

impl From<&RatioPool> for PoolWords {
    fn from(pool: &RatioPool) -> Self {
        let (phase, c) = match pool.phase {
            Phase::BurnIn => (phase::BURN_IN, 0.0),
            Phase::Frozen { c } => (phase::FROZEN, c),
            Phase::FellBack { c } => (phase::FELL_BACK, c),
            Phase::Forbidden { reason: Forbidden::TooManyRestarts } => (phase::TOO_MANY_RESTARTS, 0.0),
            Phase::Forbidden { reason: Forbidden::NothingObserved } => (phase::NOTHING_OBSERVED, 0.0),
        };
        Self { phase, count: pool.top.len() as u32, c }
    }
}

impl PoolWords {
    fn phase(self) -> Phase {
        match self.phase {
            phase::FROZEN => Phase::Frozen { c: self.c },
            phase::FELL_BACK => Phase::FellBack { c: self.c },
            phase::TOO_MANY_RESTARTS => Phase::Forbidden { reason: Forbidden::TooManyRestarts },
            phase::NOTHING_OBSERVED => Phase::Forbidden { reason: Forbidden::NothingObserved },
            _ => Phase::BurnIn,
        }
    }
}

/// Values in a row of `top` (auto-c: the most ratios that a pool keeps) or of `history` (delayed: steps remembered).
///
/// # Errors
/// `is_argument` if auto-c would keep more than 2^27 ratios.
pub(super) fn row_length(state: &PolicyState) -> Result<usize> {
    match (&state.config, &state.memory) {
        (PolicyConfig::AutoC(config), Memory::AutoC(memory)) => {
            let kept =
                (0..state.shape.layers()).flat_map(|l| POOLED.map(|t| config.kept_ratios(&state.shape, l, t))).max();
            let (row, pools) = (kept.unwrap_or(0), memory.pools.iter().flatten().count());
            if row.saturating_mul(pools) > MAX_RATIOS {
                return Err(Error::argument(format_args!(
                    "auto-c: a burn-in of {} steps with quantile {} keeps {row} ratios in each of {pools} pools, and a policy on \
                     the device keeps at most 2^27 in all: shorten the burn-in or raise the quantile",
                    config.burn_in, config.quantile
                )));
            }
            Ok(row)
        }
        (PolicyConfig::DelayedPaper(config), _) => Ok(config.history),
        (PolicyConfig::DelayedTe(config), _) => Ok(config.history),
        _ => Ok(0),
    }
}

/// Where the parts of a memory lie in its buffer, in words of 8 bytes. Parts that the policy does not use are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct MemoryLayout {
    row: usize,
    seen: Range<usize>,
    restarts: Range<usize>,
    pools: Range<usize>,
    top: Range<usize>,
    slack: Range<usize>,
    slots: Range<usize>,
    history: Range<usize>,
}

impl MemoryLayout {
    /// The words of a memory that the host's policy has accepted, and where its parts lie. Memories of one policy have one
    /// layout. Slack is empty. `row` is [`row_length`].
    pub fn encode(memory: &Memory, row: usize) -> (Self, Vec<u64>) {
        let (mut layout, mut words) = (Self { row, ..Self::default() }, Vec::new());
        match memory {
            Memory::None => {}
            Memory::AutoC(state) => {
                let pools = || state.pools.iter().flatten();
                let tops = pools().flat_map(|pool| pool.top.iter().copied().chain(repeat(0.0)).take(row));
                layout.seen = push(&mut words, &state.seen);
                layout.restarts = push(&mut words, &[state.restarts]);
                layout.pools = push(&mut words, &pools().map(PoolWords::from).collect::<Vec<_>>());
                layout.top = push(&mut words, &tops.collect::<Vec<_>>());
                layout.slack = push(&mut words, &vec![SlackWords::zeroed(); POOLED.len() * state.seen.len()]);
            }
            Memory::DelayedPaper(state) => layout.push_slots(&mut words, state, |slot| (0.0, &slot.history)),
            Memory::DelayedTe(state) => layout.push_slots(&mut words, state, |slot| (slot.scale, &slot.history)),
        }
        (layout, words)
    }

    fn push_slots<S>(&mut self, words: &mut Vec<u64>, state: &DelayedState<S>, slot: impl Fn(&S) -> (f32, &Vec<f32>)) {
        let slots = || state.layers.iter().flatten().flatten().map(&slot);
        self.slots = push(words, &slots().map(|(scale, _)| SlotWords { place: 0, scale }).collect::<Vec<_>>());
        self.history = push(words, &slots().flat_map(|(_, history)| history).copied().collect::<Vec<_>>());
    }

    /// Replaces what a memory of this layout holds.
    pub fn decode(&self, words: &[u64], memory: &mut Memory) {
        let slots = part::<SlotWords>(words, &self.slots).iter();
        let mut slots = slots.zip(part::<f32>(words, &self.history).chunks(self.row.max(1))).map(|(slot, ring)| {
            let mut history = ring.to_vec();
            history.rotate_left(slot.place as usize);
            TeSlot { scale: slot.scale, history }
        });
        match memory {
            Memory::None => {}
            Memory::AutoC(state) => {
                for (to, from) in state.seen.iter_mut().zip(part(words, &self.seen)) {
                    *to = *from;
                }
                state.restarts = part(words, &self.restarts)[0];
                let pools = part::<PoolWords>(words, &self.pools).iter();
                let pools = pools.zip(part::<f64>(words, &self.top).chunks(self.row));
                for (pool, (words, top)) in state.pools.iter_mut().flatten().zip(pools) {
                    *pool = RatioPool { phase: words.phase(), top: top[..words.count as usize].to_vec() };
                }
            }
            Memory::DelayedPaper(state) => {
                for (slot, read) in state.layers.iter_mut().flatten().flatten().zip(slots) {
                    slot.history = read.history;
                }
            }
            Memory::DelayedTe(state) => {
                state.layers.iter_mut().flatten().flatten().zip(&mut slots).for_each(|(slot, read)| *slot = read);
            }
        }
    }

    /// auto-c: slack of each layer's logits, q, k and v; `None` where nothing but zeros was observed.
    pub fn slack(&self, words: &[u64]) -> Vec<[Option<Slack>; 4]> {
        let slack = |words: SlackWords| {
            let SlackWords { min, max, sum, count } = words;
            (count > 0).then(|| Slack { min, mean: sum / count as f64, max, count })
        };
        part::<SlackWords>(words, &self.slack).as_chunks().0.iter().map(|layer| layer.map(slack)).collect()
    }

    /// auto-c: pools of all tensors.
    pub fn pools(&self) -> usize {
        8 * self.pools.len() / size_of::<PoolWords>()
    }

    /// Writes the addresses of the parts into the kernels' table.
    pub fn place(&self, buffer: &Buffer<u64>, table: &mut PolicyTable) {
        let at = |part: &Range<usize>| buffer.at(part.start).0;
        (table.seen, table.restarts, table.pools) = (at(&self.seen), at(&self.restarts), at(&self.pools));
        (table.top, table.slack) = (at(&self.top), at(&self.slack));
        (table.slots, table.history) = (at(&self.slots), at(&self.history));
    }
}

/// Appends values, filled up to whole words.
fn push<T: Pod>(words: &mut Vec<u64>, values: &[T]) -> Range<usize> {
    let start = words.len();
    words.resize(start + size_of_val(values).div_ceil(8), 0);
    bytemuck::cast_slice_mut(&mut words[start..])[..values.len()].copy_from_slice(values);
    start..words.len()
}

fn part<'a, T: Pod>(words: &'a [u64], range: &Range<usize>) -> &'a [T] {
    bytemuck::cast_slice(&words[range.clone()])
}

#[cfg(test)]
mod tests;
