//! A state survives the way into device memory and back.

use super::*;
use crate::plan::Granularity;
use crate::policy::{AutoCConfig, DelayedPaperConfig, DelayedTeConfig, PolicyShape, Pooling, ScaledTensor};

fn start(config: PolicyConfig) -> PolicyState {
    config.build(PolicyShape::new([(8, 2), (3, 3), (6, 1)])).unwrap().save()
}

/// Writes a memory and reads it back into that of a new policy. `act` is what the kernels do meanwhile.
fn back(state: &PolicyState, act: impl Fn(&MemoryLayout, &mut [u64])) -> Memory {
    let row = row_length(state).unwrap();
    let (layout, mut words) = MemoryLayout::encode(&state.memory, row);
    let mut fresh = start(state.config);
    assert_eq!(layout, MemoryLayout::encode(&fresh.memory, row).0, "every memory of a policy has one layout");
    act(&layout, &mut words);
    layout.decode(&words, &mut fresh.memory);
    fresh.memory
}

#[test]
fn auto_c_keeps_pools_and_counts() {
    for pooling in [Pooling::Model, Pooling::Layer, Pooling::Head] {
        let config = AutoCConfig { burn_in: 50_000, pooling, ..AutoCConfig::default() };
        let mut state = start(PolicyConfig::AutoC(config));
        let Memory::AutoC(memory) = &mut state.memory else { panic!("{pooling:?}") };
        (memory.seen, memory.restarts) = (vec![3, 50_000, 7], 5);
        let phases = [
            Phase::BurnIn,
            Phase::Frozen { c: 0.25 },
            Phase::FellBack { c: 1.0 },
            Phase::Forbidden { reason: Forbidden::TooManyRestarts },
            Phase::Forbidden { reason: Forbidden::NothingObserved },
        ];
        for (at, pool) in memory.pools.iter_mut().flatten().enumerate() {
            pool.phase = phases[at % 5];
            pool.top = (0..at % 4).map(|place| 1.0 / (1 + place + at) as f64).collect();
        }
        assert_eq!(back(&state, |_, _| {}), state.memory, "{pooling:?}");
        let pools = back(&state, |layout, words| {
            bytemuck::cast_slice_mut::<_, PoolWords>(&mut words[layout.pools.clone()])[1].count = 0;
            words[layout.seen.start] = 9 << 32 | 4;
        });
        let (Memory::AutoC(read), Memory::AutoC(mut expected)) = (pools, state.memory) else { panic!("{pooling:?}") };
        expected.pools.iter_mut().flatten().nth(1).unwrap().top.clear();
        (expected.seen[0], expected.seen[1]) = (4, 9);
        assert_eq!(read, expected, "{pooling:?}");
    }
}

#[test]
fn slack_is_read_layer_by_layer() {
    let state = start(PolicyConfig::AutoC(AutoCConfig::default()));
    let (layout, mut words) = MemoryLayout::encode(&state.memory, row_length(&state).unwrap());
    assert_eq!(layout.slack(&words), [[None; 4]; 3]);
    let at = 4 + ScaledTensor::K as usize;
    bytemuck::cast_slice_mut::<_, SlackWords>(&mut words[layout.slack.clone()])[at] =
        SlackWords { min: 1.0, max: 5.0, sum: 6.0, count: 2 };
    let slack = layout.slack(&words);
    assert_eq!(slack[1][ScaledTensor::K as usize], Some(Slack { min: 1.0, mean: 3.0, max: 5.0, count: 2 }));
    assert_eq!(slack.iter().flatten().flatten().count(), 1);
}

#[test]
fn delayed_policies_keep_histories_in_order() {
    for granularity in [Granularity::Head, Granularity::Layer] {
        for history in [1, 5] {
            let mut next = 0.0;
            let mut ring = |slot: &mut Vec<f32>| {
                slot.fill_with(|| {
                    next += 1.0;
                    next
                })
            };
            let mut paper = start(PolicyConfig::DelayedPaper(DelayedPaperConfig {
                history,
                granularity,
                ..DelayedPaperConfig::default()
            }));
            let Memory::DelayedPaper(memory) = &mut paper.memory else { panic!("no history") };
            memory.layers.iter_mut().flatten().flatten().for_each(|slot| ring(&mut slot.history));
            assert_eq!(back(&paper, |_, _| {}), paper.memory);

            let config = DelayedTeConfig { history, granularity, ..DelayedTeConfig::default() };
            let mut te = start(PolicyConfig::DelayedTe(config));
            let Memory::DelayedTe(memory) = &mut te.memory else { panic!("no history") };
            for (at, slot) in memory.layers.iter_mut().flatten().flatten().enumerate() {
                ring(&mut slot.history);
                slot.scale = at as f32;
            }
            assert_eq!(back(&te, |_, _| {}), te.memory);
            // The ring of the third slot begins at its last entry.
            let turned = back(&te, |layout, words| {
                bytemuck::cast_slice_mut::<_, SlotWords>(&mut words[layout.slots.clone()])[2].place =
                    history as u32 - 1;
            });
            let Memory::DelayedTe(memory) = &mut te.memory else { panic!("no history") };
            memory.layers.iter_mut().flatten().flatten().nth(2).unwrap().history.rotate_right(1);
            assert_eq!(turned, te.memory);
        }
    }
}

#[test]
fn a_burn_in_that_keeps_too_much_is_refused() {
    let config = AutoCConfig { burn_in: 1 << 27, quantile: 0.5, ..AutoCConfig::default() };
    let error = row_length(&start(PolicyConfig::AutoC(config))).unwrap_err();
    assert!(error.is_argument() && error.to_string().contains("quantile 0.5 keeps"), "{error}");
}
