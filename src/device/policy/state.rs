//! A policy's memory between its serde form and the device's vectors.

use super::engine::{PolicyMemory, phase};
use super::setup::PolicySetup;
use crate::policy::{AutoCState, DelayedState, Forbidden, Memory, PaperSlot, Phase, PolicyConfig, RatioPool, TeSlot};

/// The device's form of a state that [`crate::policy::PolicyState::restore`] has accepted.
pub(super) fn to_device(setup: &PolicySetup, memory: &Memory) -> PolicyMemory {
    let mut device = PolicyMemory::default();
    match memory {
        Memory::None => {}
        Memory::AutoC(state) => {
            device.seen = state.seen.clone();
            device.restarts = vec![state.restarts];
            for (pools, room) in state.pools.iter().zip(setup.room()) {
                for pool in pools {
                    let (code, c) = match pool.phase {
                        Phase::BurnIn => (phase::BURN_IN, 0.0),
                        Phase::Frozen { c } => (phase::FROZEN, c),
                        Phase::FellBack { c } => (phase::FELL_BACK, c),
                        Phase::Forbidden { reason: Forbidden::TooManyRestarts } => (phase::TOO_MANY_RESTARTS, 0.0),
                        Phase::Forbidden { reason: Forbidden::NothingObserved } => (phase::NOTHING_OBSERVED, 0.0),
                    };
                    device.phases.push(code);
                    device.constants.push(c);
                    device.counts.push(pool.top.len() as u32);
                    let end = device.top.len() + room;
                    device.top.extend_from_slice(&pool.top);
                    device.top.resize(end, 0.0);
                }
            }
        }
        Memory::DelayedPaper(state) => {
            for slot in state.layers.iter().flatten().flatten() {
                device.history.extend_from_slice(&slot.history);
                device.places.push(0);
            }
        }
        Memory::DelayedTe(state) => {
            for slot in state.layers.iter().flatten().flatten() {
                device.history.extend_from_slice(&slot.history);
                device.places.push(0);
                device.scales.push(slot.scale);
            }
        }
    }
    device
}

/// The serde form of the device's memory, the same values that the host's policy would hold.
pub(super) fn from_device(setup: &PolicySetup, config: &PolicyConfig, device: &PolicyMemory) -> Memory {
    let layers = setup.heads.layers();
    match config {
        PolicyConfig::Geometry(_) | PolicyConfig::GeometryCStar(_) | PolicyConfig::Current(_) => Memory::None,
        PolicyConfig::AutoC(_) => {
            let counts = setup.pools();
            let room = setup.room();
            let (mut pool, mut place) = (0, 0);
            let pools = std::array::from_fn(|tensor| {
                (0..counts[tensor])
                    .map(|_| {
                        let c = device.constants[pool];
                        let phase = match device.phases[pool] {
                            phase::FROZEN => Phase::Frozen { c },
                            phase::FELL_BACK => Phase::FellBack { c },
                            phase::TOO_MANY_RESTARTS => Phase::Forbidden { reason: Forbidden::TooManyRestarts },
                            phase::NOTHING_OBSERVED => Phase::Forbidden { reason: Forbidden::NothingObserved },
                            _ => Phase::BurnIn,
                        };
                        let top = device.top[place..place + device.counts[pool] as usize].to_vec();
                        pool += 1;
                        place += room[tensor];
                        RatioPool { phase, top }
                    })
                    .collect()
            });
            let restarts = device.restarts.first().copied().unwrap_or(0);
            Memory::AutoC(AutoCState { seen: device.seen.clone(), restarts, pools })
        }
        PolicyConfig::DelayedPaper(c) => {
            let slot = |i: usize| PaperSlot { history: unrolled(device, i, c.history) };
            Memory::DelayedPaper(DelayedState { layers: per_layer(setup, layers, slot) })
        }
        PolicyConfig::DelayedTe(c) => {
            let slot = |i: usize| TeSlot { scale: device.scales[i], history: unrolled(device, i, c.history) };
            Memory::DelayedTe(DelayedState { layers: per_layer(setup, layers, slot) })
        }
    }
}

/// A ring from its place on.
fn unrolled(device: &PolicyMemory, slot: usize, length: usize) -> Vec<f32> {
    let mut history = device.history[slot * length..(slot + 1) * length].to_vec();
    history.rotate_left(device.places[slot] as usize);
    history
}

fn per_layer<S>(setup: &PolicySetup, layers: usize, slot: impl Fn(usize) -> S) -> Vec<[Vec<S>; 5]> {
    let mut next = 0;
    (0..layers)
        .map(|layer| {
            std::array::from_fn(|tensor| {
                let count = if setup.per_layer { 1 } else { setup.row(layer, tensor) };
                let first = next;
                next += count;
                (first..next).map(&slot).collect()
            })
        })
        .collect()
}
