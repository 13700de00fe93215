//! Stream-K: the tiles of all units, end to end, cut into one share per block.

use super::tables::{HeadGram, Segment};

/// Heads that share a tile of channels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub projection: u32,
    pub first_row: u32,
    /// Statistics row of its first channel.
    pub stat_row: u32,
    pub heads: u32,
}

/// How Grams are cut into work: segments, the share of each block, and where each head's parts lie.
#[derive(Debug, Default)]
pub(super) struct Shares {
    pub segments: Vec<Segment>,
    /// First segment of each block, and of none.
    pub starts: Vec<u32>,
    pub heads: Vec<HeadGram>,
    /// Parts of Grams.
    pub slots: u32,
    /// First part and number of parts of every unit's statistics, in runs of 128 rows; none where a segment leaves them itself.
    pub stats: Vec<(u32, u32)>,
    pub stat_parts: u32,
}

impl Shares {
    /// Units of `tiles` tiles each. A segment leaves `stat_runs` parts of its statistics, but with `whole` the statistics
    /// themselves where it has all tiles of its unit.
    pub fn new(units: &[Unit], tiles: u32, blocks: usize, d_head: u32, stat_runs: u32, whole: bool) -> Self {
        let mut cut = Self { starts: vec![0], ..Self::default() };
        let end_of = |block: usize| units.len() as u64 * u64::from(tiles) * block as u64 / blocks as u64;
        let mut done = 0;
        for unit in units {
            let (base, first_stat) = (cut.slots, cut.stat_parts);
            let (mut tile, mut parts) = (0, 0);
            while tile < tiles {
                while end_of(cut.starts.len()) <= done {
                    cut.starts.push(cut.segments.len() as u32);
                }
                let count = (end_of(cut.starts.len()) - done).min(u64::from(tiles - tile)) as u32;
                let whole = whole && count == tiles;
                cut.segments.push(Segment {
                    projection: unit.projection,
                    first_row: unit.first_row,
                    first: tile,
                    last: tile + count,
                    slot: base + parts * unit.heads,
                    heads: unit.heads,
                    stat: if whole { unit.stat_row } else { cut.stat_parts * 128 },
                    whole: whole.into(),
                });
                parts += 1;
                cut.stat_parts += if whole { 0 } else { stat_runs };
                done += u64::from(count);
                tile += count;
            }
            cut.stats.push((first_stat * 128, cut.stat_parts - first_stat));
            cut.slots += parts * unit.heads;
            cut.heads.extend((0..unit.heads).map(|h| HeadGram {
                first: base + h,
                stride: unit.heads,
                count: parts,
                stat_row: unit.stat_row + h * d_head,
            }));
        }
        cut.starts.resize(blocks + 1, cut.segments.len() as u32);
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_tile_once_and_differ_by_one_tile_at_most() {
        for (tiles, blocks, whole) in
            [(5u32, 3usize, false), (64, 132, true), (25, 7, true), (1, 4, true), (25, 7, false)]
        {
            let units: Vec<Unit> =
                (0..11).map(|i| Unit { projection: i, first_row: 0, stat_row: 1000 * i, heads: 1 + i % 3 }).collect();
            let cut = Shares::new(&units, tiles, blocks, 64, 2, whole);
            assert_eq!(cut.starts.len(), blocks + 1);
            let mut seen = vec![vec![0; tiles as usize]; 11];
            let mut sizes = vec![];
            for share in cut.starts.windows(2) {
                let segments = &cut.segments[share[0] as usize..share[1] as usize];
                for s in segments {
                    (s.first..s.last).for_each(|t| seen[s.projection as usize][t as usize] += 1);
                }
                sizes.push(segments.iter().map(|s| s.last - s.first).sum::<u32>());
            }
            assert!(seen.iter().flatten().all(|&n| n == 1));
            assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
            assert_eq!(cut.heads.len(), units.iter().map(|u| u.heads as usize).sum::<usize>());
            let (alone, parts): (Vec<&Segment>, Vec<&Segment>) = cut.segments.iter().partition(|s| s.whole == 1);
            for s in &alone {
                assert!(s.first == 0 && s.last == tiles && s.stat == units[s.projection as usize].stat_row);
            }
            let several = |unit: &Unit| parts.iter().any(|s| s.projection == unit.projection);
            assert_eq!(alone.len(), if whole { units.iter().filter(|u| !several(u)).count() } else { 0 });
            assert!(whole || !parts.is_empty());
            let mut rows: Vec<u32> = parts.iter().map(|s| s.stat).collect();
            rows.dedup();
            assert_eq!(rows.len(), parts.len(), "every segment has its own statistics");
            assert_eq!(cut.stat_parts as usize, 2 * parts.len());
            for (unit, &(first, count)) in units.iter().zip(&cut.stats) {
                let own = parts.iter().filter(|s| s.projection == unit.projection);
                assert!(own.map(|s| s.stat).eq((0..count / 2).map(|i| first + 256 * i)));
            }
            let mut slots: Vec<u32> =
                cut.heads.iter().flat_map(|h| (0..h.count).map(move |i| h.first + i * h.stride)).collect();
            slots.sort_unstable();
            assert_eq!(slots, (0..cut.slots).collect::<Vec<_>>(), "every slot belongs to one head");
        }
    }
}
