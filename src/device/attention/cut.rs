//! How one call is cut into tiles: of its sizes where all sequences are alike, of its longest sequence otherwise.

use super::regions::Regions;
use super::sizes::VALUE_TILE;
use super::terms::{DeviceCall, Sequences};
use super::tile::{ITEM, JOIN, PARTS_BYTES, ROWS, Schedule, Split, Tile};
use crate::attention::{AttentionShape, PvAccumulator};

/// Bytes of one entry of the list of tiles, and of the header before it.
const ENTRY: usize = 64;
/// Sequences whose parts one launch can join.
const JOINED_SEQUENCES: usize = 65_535;

/// Tiles, parts of keys and the order of both.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub tile: Tile,
    /// With sequences of unequal length, `parts` is the most that one can have: how many, the device decides by the lengths.
    pub split: Option<Split>,
    pub schedule: Schedule,
    /// Tiles that the list of a call with sequences has room for.
    pub capacity: usize,
}

impl Cut {
    /// `split`: whether a call may be split; `processors`: how many multiprocessors it takes.
    pub fn of(
        call: &DeviceCall,
        accumulator: PvAccumulator,
        logits_e4m3: bool,
        split: bool,
        processors: usize,
    ) -> Self {
        let sizes = &call.shape;
        let two = Tile::of_two(sizes.head_dims(), accumulator);
        let split = if split { split_of(call, logits_e4m3) } else { None };
        let Some(sequences) = &call.sequences else {
            let tile = match split {
                Some(_) => two,
                None => Tile::of(sizes, logits_e4m3, accumulator),
            };
            let schedule = match split {
                Some(split) => Schedule::split(sizes, split, processors),
                None => Schedule::whole(sizes, tile, processors),
            };
            return Self { tile, split, schedule, capacity: 0 };
        };
        // Every sequence begins a tile of rows of its own. All entries of the batch are one list, which has the heads of one.
        let one =
            AttentionShape { batch: 1, len_q: sizes.batch * sizes.len_q, len_k: sizes.batch * sizes.len_k, ..*sizes };
        let blocks = |rows: usize| one.len_q / rows + sequences.count();
        if let Some(split) = split {
            let capacity = blocks(split.positions * split.consumers) * split.parts;
            let units = sizes.n_q_heads / split.heads;
            let grid = processors.min(units * capacity).max(1);
            let schedule = Schedule { pack_gqa: false, row_blocks: 0, units, section: units, grid, split: Some(split) };
            return Self { tile: two, split: Some(split), schedule, capacity };
        }
        // Values of each sequence lie in whole tiles of 128 keys, which a tile has to divide: that of logits in E4M3 may not.
        let tile = match Tile::of(sizes, logits_e4m3, accumulator) {
            Tile::NARROW => two,
            tile => tile,
        };
        let schedule = Schedule::whole(&one, tile, processors);
        let capacity = blocks(if schedule.pack_gqa { ROWS } else { ROWS * tile.consumers });
        Self {
            tile,
            split,
            schedule: Schedule { grid: processors.min(schedule.units * capacity).max(1), ..schedule },
            capacity,
        }
    }

    /// Query rows of a tile.
    pub fn tile_rows(&self) -> usize {
        match self.split {
            Some(split) => split.positions * split.consumers,
            None if self.schedule.pack_gqa => ROWS,
            None => ROWS * self.tile.consumers,
        }
    }

    /// What the kernel that makes the list reckons with: what an item, a tile of keys of one, and joining parts take, in tenths of a
    /// microsecond.
    pub fn times(&self, sizes: &AttentionShape) -> [usize; 3] {
        [ITEM, Tile::time(sizes, self.split.map_or(self.tile.consumers, |split| split.consumers)), JOIN]
    }
}

/// The split of a call, if one pays.
fn split_of(call: &DeviceCall, logits_e4m3: bool) -> Option<Split> {
    let longest = call.longest();
    let split = Split::of(&longest, logits_e4m3)?;
    if call.sequences.is_none() {
        return Some(split);
    }
    // The kernel that joins parts counts sequences in a grid's third dimension, which has 16 bits.
    if longest.batch > JOINED_SEQUENCES {
        return Some(Split { parts: 1, ..split });
    }
    // The longest sequence may stand alone among short ones.
    let alone = AttentionShape { batch: 1, ..longest };
    let parts = Split::of(&alone, logits_e4m3).map_or(1, |alone| alone.parts).max(split.parts);
    let room = PARTS_BYTES / Split { parts: 2, ..split }.partial(&call.shape).bytes.div_ceil(2);
    let parts = if parts > room { split.parts.min(room).max(1) } else { parts };
    Some(Split { parts, ..split })
}

/// Sizes of the values as the attention reads them: with sequences, tiles of all entries of the batch.
pub(super) fn values(call: &DeviceCall) -> AttentionShape {
    let sizes = &call.shape;
    let tiles = |sequences: &Sequences| sizes.batch * sizes.len_k / VALUE_TILE + sequences.count();
    match &call.sequences {
        Some(sequences) => AttentionShape { batch: 1, len_k: tiles(sequences) * VALUE_TILE, ..*sizes },
        None => *sizes,
    }
}

/// Room for partial results, the list of tiles, and the parts of each sequence, of any call with these sizes.
pub(super) fn regions(call: &DeviceCall, regions: &mut Regions) -> [usize; 3] {
    let sizes = &call.shape;
    let splits = [false, true].map(|logits_e4m3| split_of(call, logits_e4m3));
    let partial = splits.iter().flatten().map(|split| split.partial(sizes).bytes).max().unwrap_or(0);
    let partial = regions.add(partial);
    let Some(sequences) = &call.sequences else { return [partial; 3] };
    let rows = sizes.batch * sizes.len_q;
    let parts = |split: &Split| (rows / (split.positions * split.consumers) + sequences.count()) * split.parts;
    let capacity = splits.iter().flatten().map(parts).max().unwrap_or(0).max(rows / ROWS + sequences.count());
    [partial, regions.add(ENTRY * (1 + capacity)), regions.add(4 * sequences.count())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{DevicePtr, Element, View};

    #[test]
    fn a_launch_joins_as_many_sequences_as_a_grid_counts() {
        for (count, max_len_k) in [(1, 8192), (300, 8192), (65_535, 1 << 20), (65_536, 1 << 20), (200_000, 1024)] {
            // SAFETY: nothing is launched.
            let list = unsafe { View::dense(DevicePtr(1 << 20), Element::I32, [count]) };
            let lists =
                Sequences { q_starts: list, q_ends: list, k_starts: list, k_ends: list, max_len_q: 1, max_len_k };
            let sizes = AttentionShape {
                batch: 1,
                n_q_heads: 1,
                n_kv_heads: 1,
                len_q: count,
                len_k: 1 << 20,
                d_head: 64,
                d_v: 64,
            };
            let call = DeviceCall { sequences: Some(lists), ..DeviceCall::causal(sizes) };
            let split =
                Cut::of(&call, PvAccumulator::default(), false, true, crate::device::attention::tile::PROCESSORS)
                    .split
                    .expect("few rows");
            let [_, _, sequences] = split.joining_grid(&call.longest());
            assert!(split.parts == 1 || sequences <= JOINED_SEQUENCES, "{count} sequences in {split:?}");
            assert!(count > 1 || split.parts > 1, "{split:?}");
        }
    }
}
