//! Which tiles a call is cut into: pure functions of its sizes.

use super::regions::Regions;
use super::sizes::HeadDims;
use crate::attention::{AttentionShape, PvAccumulator};
use std::cmp::Reverse;
use std::ops::RangeInclusive;

/// Tile of the attention kernel: keys per tile, consumer warpgroups (64 rows each), stages of the rings of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Keys.
    pub keys: usize,
    /// Consumer warpgroups.
    pub consumers: usize,
    /// Stages.
    pub stages: usize,
}

/// Query rows of one consumer.
pub(super) const ROWS: usize = 64;
/// Keys of the largest tile, after which P V can be promoted.
pub(super) const TILE_KEYS: usize = 128;
/// Multiprocessors that [`Split`] reckons with. Not those of the device: results must not depend on them.
pub(super) const PROCESSORS: usize = 132;
/// What a work item costs besides its keys, and what a kernel that joins parts costs besides their bytes, in tenths of a microsecond.
pub(super) const ITEM: usize = 15;
pub(super) const JOIN: usize = 40;
/// Bytes of parts that are written and read again in a tenth of a microsecond.
pub(super) const PART_BYTES: usize = 175_000;
/// Waves of work items beyond the fewest possible that [`Split::of`] looks at.
const MORE_WAVES: usize = 8;
/// Tiles of keys of a part for which one copy of the code (`Mainloop::Rolled`) is faster than many, as was measured: where one consumer
/// waits for memory, and else.
const FEW_TILES: [RangeInclusive<usize>; 2] = [2..=64, 2..=16];
/// Room for parts at most, in bytes.
pub(super) const PARTS_BYTES: usize = 64 << 20;
/// Bytes of keys and values that blocks running together should share in the L2 cache.
const SHARED_BYTES: usize = 24_000_000;

impl Tile {
    /// Values of up to 128 columns, where the registers of two consumers hold the logits of two tiles, or wider ones, where they hold
    /// those of one.
    pub const TWO: Self = Self { keys: 128, consumers: 2, stages: 4 };
    /// d = 64; and 96, or keys of 192 with values of 128, whose sums of P V take the registers of the logits.
    pub const THREE: Self = Self { keys: 128, consumers: 3, stages: 4 };
    /// d = 128 with logits in E4M3, whose registers do not hold the logits of two tiles. Its items cost more than those of
    /// [`Tile::TWO`], and its keys less.
    pub const NARROW: Self = Self { keys: 96, consumers: 3, stages: 3 };
    /// Values of 256 columns in F16, where registers hold the logits of half a tile next to the output.
    pub const HALF: Self = Self { keys: 64, consumers: 2, stages: 4 };
    /// Keys from which [`Tile::NARROW`] is faster.
    const NARROW_FROM: usize = 2048;

    /// The tile of a call.
    pub fn of(sizes: &AttentionShape, logits_e4m3: bool, accumulator: PvAccumulator) -> Self {
        let dims = sizes.head_dims();
        match (dims.qk, dims.v) {
            (64, 64) => Self::THREE,
            (..=96, ..=96) if accumulator != PvAccumulator::F16 => Self::THREE,
            (192, 128) if accumulator != PvAccumulator::F16 && !logits_e4m3 => Self::THREE,
            (128, 128) if logits_e4m3 && sizes.len_k >= Self::NARROW_FROM => Self::NARROW,
            _ => Self::of_two(dims, accumulator),
        }
    }

    /// The tile of two consumers.
    pub(super) fn of_two(dims: HeadDims, accumulator: PvAccumulator) -> Self {
        if dims.v > 192 && accumulator == PvAccumulator::F16 { Self::HALF } else { Self::TWO }
    }

    /// Every tile of a kernel.
    #[cfg(test)]
    pub(super) fn all(dims: HeadDims, logits_e4m3: bool, accumulator: PvAccumulator) -> Vec<Self> {
        match (dims.qk, dims.v, logits_e4m3) {
            (64, 64, _) => vec![Self::THREE],
            (..=96, ..=96, _) | (192, 128, false) if accumulator != PvAccumulator::F16 => vec![Self::THREE],
            (128, 128, true) => vec![Self::TWO, Self::NARROW],
            _ => vec![Self::of_two(dims, accumulator)],
        }
    }

    /// Tenths of a microsecond in which one multiprocessor takes 128 keys, if that many consumers work: as was measured of 64 and 128
    /// columns of keys and values, in proportion of others.
    pub(super) fn time(sizes: &AttentionShape, consumers: usize) -> usize {
        let dims = sizes.head_dims();
        let (of_64, more) = match consumers {
            1 => (5, 1),
            2 => (9, 2),
            _ => (12, 4),
        };
        of_64 + more * (dims.qk + dims.v - 128) / 128
    }
}

/// How a call with few query rows is cut, whose tiles would be mostly padding, or too few for the device: the rows of a tile are
/// positions and heads of one group, which share its keys, and the keys are split into parts that a second kernel joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Heads of one group in a tile; they divide the group.
    pub heads: usize,
    /// Positions that one consumer takes: 64 / heads, rounded down.
    pub positions: usize,
    /// Consumers of a block that take tiles.
    pub consumers: usize,
    /// Parts of the keys; a single one is the output, with nothing to join.
    pub parts: usize,
}

impl Split {
    /// The tile by which calls are cut.
    pub const TILE: Tile = Tile::TWO;
    /// Warps of a block of the kernel that joins parts.
    pub(super) const JOINING_WARPS: usize = 8;

    /// The cut of a call, where it promises to be faster by a tenth than whole tiles.
    ///
    /// Time is the longer of two: reading all keys and values once, and waves of work items on the multiprocessors. A pure function
    /// of the sizes: on any device a call has the same parts, and so the same bits.
    pub fn of(sizes: &AttentionShape, logits_e4m3: bool) -> Option<Self> {
        let AttentionShape { batch, n_kv_heads: heads_kv, len_k, d_head, d_v, .. } = *sizes;
        // A tile of keys and values of 128 x 128 takes all multiprocessors together a microsecond each.
        let reading = batch * heads_kv * len_k.div_ceil(128) * 10 * (d_head + d_v) / (256 * PROCESSORS);
        let time = |items: usize, keys: usize, consumers: usize| {
            let item = keys.div_ceil(128) * Tile::time(sizes, consumers) + ITEM;
            reading.max(items.div_ceil(PROCESSORS) * item)
        };
        let tile = Tile::of(sizes, logits_e4m3, PvAccumulator::default());
        let whole = time(Schedule::whole(sizes, tile, 1).tiles(), len_k, tile.consumers);

        // Logits in E4M3 have a descale a head, so that a tile has one head.
        let one = Self::single(sizes, if logits_e4m3 { 1 } else { usize::MAX });
        let (tiles, key_tiles) = (one.tiles(sizes), len_k.div_ceil(Self::TILE.keys));
        let fewest = tiles.div_ceil(PROCESSORS);
        let candidates = (fewest..=fewest + MORE_WAVES).map(|waves| {
            // As many parts as those waves take, but none that is empty.
            let most = (waves * PROCESSORS / tiles).clamp(1, key_tiles);
            let parts = key_tiles.div_ceil(key_tiles.div_ceil(most));
            let cut = Self { parts, ..one };
            let joining = if parts > 1 { JOIN + cut.partial(sizes).bytes / PART_BYTES } else { 0 };
            let keys = key_tiles.div_ceil(parts) * Self::TILE.keys;
            (time(tiles * parts, keys, one.consumers) + joining, cut)
        });
        let fitting = candidates.filter(|(_, cut)| cut.partial(sizes).bytes <= PARTS_BYTES);
        let (split, cut) = fitting.min_by_key(|&(time, cut)| (time, cut.parts))?;
        (11 * split <= 10 * whole).then_some(cut)
    }

    /// The rows of tiles in a single part each, of at most so many heads.
    pub(super) fn single(sizes: &AttentionShape, most_heads: usize) -> Self {
        let group = sizes.n_q_heads / sizes.n_kv_heads;
        let cut = |heads| {
            let positions = ROWS / heads;
            let consumers = if sizes.len_q <= positions { 1 } else { Self::TILE.consumers };
            Self { heads, positions, consumers, parts: 1 }
        };
        let cuts = (1..=group.min(most_heads).min(ROWS)).filter(|heads| group.is_multiple_of(*heads)).map(cut);
        // Of equally many tiles those with more heads, which read the keys of a group once.
        cuts.min_by_key(|cut| (cut.tiles(sizes), Reverse(cut.heads))).unwrap_or(cut(1))
    }

    /// Whether every block has one part at most, of so few tiles that the kernel of short code is the faster one.
    pub(super) fn has_few_tiles(&self, sizes: &AttentionShape) -> bool {
        let [waiting, busy] = FEW_TILES;
        let few = if self.consumers == 1 && sizes.d_head + sizes.d_v >= 256 { waiting } else { busy };
        let tiles = sizes.len_k.div_ceil(Self::TILE.keys).div_ceil(self.parts);
        few.contains(&tiles) && self.tiles(sizes) * self.parts <= PROCESSORS
    }

    /// Blocks of rows a unit of `heads` heads.
    pub fn row_blocks(&self, sizes: &AttentionShape) -> usize {
        sizes.len_q.div_ceil(self.positions * self.consumers)
    }

    /// Tiles of rows of the call, each of which has `parts` parts.
    pub(super) fn tiles(&self, sizes: &AttentionShape) -> usize {
        sizes.batch * sizes.n_q_heads / self.heads * self.row_blocks(sizes)
    }

    /// The binary logarithm of the warps that share a row when parts are joined.
    pub(super) fn share(&self) -> u32 {
        const AT_ONCE: usize = 8;
        self.parts.div_ceil(AT_ONCE).next_power_of_two().min(8).trailing_zeros()
    }

    /// Blocks of the kernel that joins parts: queries first, since only that dimension of a grid has more than 16 bits.
    pub(super) fn joining_grid(&self, sizes: &AttentionShape) -> [usize; 3] {
        [sizes.len_q, (sizes.n_q_heads << self.share()).div_ceil(Self::JOINING_WARPS), sizes.batch]
    }

    /// Where the partial results lie: nothing, where one split is the output.
    pub(super) fn partial(&self, sizes: &AttentionShape) -> Partial {
        let rows = if self.parts == 1 { 0 } else { self.parts * sizes.batch * sizes.len_q * sizes.n_q_heads };
        let mut regions = Regions::default();
        // F16, f32, and two words of extremes.
        let [o, lse, extremes] = [2 * sizes.head_dims().v, 4, 8].map(|bytes| regions.add(bytes * rows));
        Partial { o, lse, extremes, bytes: regions.bytes() }
    }
}

/// Where the partial results of a split call lie, in bytes from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Partial {
    /// `[splits, batch, len_q, heads_q, d]` in F16, d the kernel's.
    pub o: usize,
    /// `[splits, batch, len_q, heads_q]` in f32.
    pub lse: usize,
    /// As `lse`, in two words.
    pub extremes: usize,
    /// Size of it all.
    pub bytes: usize,
}

/// How the tiles of a call are scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The consumers of a block take different heads of one group at the same rows, and share its keys.
    pub pack_gqa: bool,
    /// Blocks of rows per head.
    pub row_blocks: usize,
    /// Heads, or groups of `consumers` heads with `pack_gqa`, of the whole batch.
    pub units: usize,
    /// Units that run together, so that their keys and values stay in the L2 cache.
    pub section: usize,
    /// Thread blocks: each takes tiles until there are none.
    pub grid: usize,
    /// Rows and parts of tiles, where the call is split. Units are then `heads` heads each.
    pub split: Option<Split>,
}

impl Schedule {
    /// The schedule of a call that is split, on a device with that many multiprocessors.
    pub fn split(sizes: &AttentionShape, split: Split, processors: usize) -> Self {
        let units = sizes.batch * sizes.n_q_heads / split.heads;
        let row_blocks = split.row_blocks(sizes);
        let grid = processors.min(units * row_blocks * split.parts).max(1);
        Self { pack_gqa: false, row_blocks, units, section: units, grid, split: Some(split) }
    }

    /// The schedule of a call in whole tiles, on a device with that many multiprocessors.
    pub fn whole(sizes: &AttentionShape, tile: Tile, processors: usize) -> Self {
        let group = sizes.n_q_heads / sizes.n_kv_heads;
        let pack_gqa = group.is_multiple_of(tile.consumers);
        let heads = if pack_gqa { tile.consumers } else { 1 };
        let rows = if pack_gqa { ROWS } else { ROWS * tile.consumers };
        let units = sizes.batch * sizes.n_q_heads / heads;
        let row_blocks = sizes.len_q.div_ceil(rows);
        let kv_heads = (SHARED_BYTES / (sizes.len_k * (sizes.d_head + sizes.d_v))).max(1);
        let section = (kv_heads * (group / heads).max(1)).clamp(1, units);
        Self { pack_gqa, row_blocks, units, section, grid: processors.min(units * row_blocks).max(1), split: None }
    }

    /// Work items of the call.
    pub fn tiles(&self) -> usize {
        self.units * self.row_blocks * self.split.map_or(1, |split| split.parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(batch: usize, heads_q: usize, heads_kv: usize, len: usize, d_head: usize) -> AttentionShape {
        AttentionShape { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q: len, len_k: len, d_head, d_v: d_head }
    }

    #[test]
    fn every_row_and_head_has_a_tile() {
        for d in [40, 64, 96, 128, 256] {
            for (heads_q, heads_kv) in
                [(1, 1), (2, 1), (3, 1), (4, 2), (5, 5), (6, 1), (6, 2), (64, 8), (32, 32), (9, 3)]
            {
                for len in [1, 63, 64, 65, 128, 129, 1023, 5000, 70_000] {
                    let sizes = sizes(3, heads_q, heads_kv, len, d);
                    let tile = Tile::of(&sizes, false, PvAccumulator::default());
                    let s = Schedule::whole(&sizes, tile, PROCESSORS);
                    let (heads, rows) = if s.pack_gqa { (tile.consumers, 64) } else { (1, 64 * tile.consumers) };
                    assert_eq!(s.units * heads, 3 * heads_q, "{sizes:?}");
                    assert!(s.row_blocks * rows >= len && (s.row_blocks - 1) * rows < len, "{sizes:?}");
                    assert!((heads_q / heads_kv).is_multiple_of(heads), "a block's heads share their keys");
                    assert!((1..=s.units).contains(&s.section));
                    assert!(s.grid >= 1 && s.grid <= PROCESSORS && s.grid <= s.tiles());
                }
            }
        }
    }

    #[test]
    fn few_rows_are_packed_and_their_keys_split() {
        let decode = AttentionShape { len_q: 1, len_k: 8192, ..sizes(1, 64, 8, 1, 128) };
        let cut = Split::of(&decode, false).unwrap();
        assert_eq!((cut.heads, cut.positions, cut.consumers), (8, 8, 1));
        assert!(cut.parts >= 8 && cut.parts * 8 <= 2 * PROCESSORS, "{cut:?}");
        let schedule = Schedule::split(&decode, cut, 7);
        assert_eq!((schedule.units, schedule.row_blocks, schedule.grid), (8, 1, 7));
        // Sixteen positions of eight heads fill two consumers; a full batch leaves nothing to split.
        let drafts = Split::of(&AttentionShape { len_q: 16, ..decode }, false).unwrap();
        assert_eq!((drafts.heads, drafts.positions, drafts.consumers), (8, 8, 2));
        assert_eq!(Split::of(&AttentionShape { batch: 64, ..decode }, false).unwrap().parts, 1);
        // Long sequences stay whole, and so do calls with nothing to gain.
        assert_eq!(Split::of(&sizes(8, 64, 8, 2048, 128), false), None);
        assert_eq!(Split::of(&AttentionShape { len_q: 2048, len_k: 100, ..decode }, false), None);
        let few = |sizes: AttentionShape| Split::of(&sizes, false).unwrap().has_few_tiles(&sizes);
        // Four tiles a part, 64 that wait for memory, and 64 that do not; a single one; several parts a block.
        assert!(
            few(decode)
                && few(AttentionShape { batch: 16, ..decode })
                && !few(AttentionShape { batch: 16, d_head: 64, ..decode })
        );
        assert!(!few(AttentionShape { n_kv_heads: 1, ..decode }) && !few(AttentionShape { batch: 20, ..decode }));
        // One more sequence than multiprocessors can take at once is cut finer, and so is a single head.
        let awkward = Split::of(&AttentionShape { batch: 17, ..decode }, false).unwrap();
        assert!(awkward.parts > 1 && awkward.parts * 8 * 17 > 2 * PROCESSORS, "{awkward:?}");
        let one_head = Split::of(&AttentionShape { n_kv_heads: 1, len_k: 131_072, ..decode }, false).unwrap();
        assert_eq!((one_head.heads, one_head.positions, one_head.consumers), (64, 1, 1));
        assert!((PROCESSORS - 8..=PROCESSORS).contains(&one_head.parts), "{one_head:?}");
        // Where heads and positions fill as many tiles either way, heads share keys.
        assert_eq!(Split::of(&AttentionShape { len_q: 64, ..decode }, false).unwrap().heads, 8);
        // A head of E4M3 logits has a descale of its own.
        assert_eq!(Split::of(&decode, true).unwrap().heads, 1);
    }

    #[test]
    fn a_split_covers_every_row_and_keeps_to_its_room() {
        let mut many_queries = 0;
        for (heads_q, heads_kv) in [(1, 1), (6, 2), (10, 2), (64, 8), (71, 1), (128, 1), (32, 32)] {
            for (batch, len_q) in [(1, 1), (1, 5), (2, 16), (1, 64), (3, 65), (1, 300), (300, 1), (1, 67_600)] {
                for (len_k, logits, d_head) in [(1000, false, 64), (8192, true, 128), (100_000, false, 128)] {
                    let sizes = AttentionShape {
                        batch,
                        n_q_heads: heads_q,
                        n_kv_heads: heads_kv,
                        len_q,
                        len_k,
                        d_head,
                        d_v: d_head,
                    };
                    let Some(cut) = Split::of(&sizes, logits) else { continue };
                    assert!((heads_q / heads_kv).is_multiple_of(cut.heads) && cut.heads * cut.positions <= ROWS);
                    assert!(cut.row_blocks(&sizes) * cut.positions * cut.consumers >= len_q, "{sizes:?} {cut:?}");
                    assert!((1..=len_k.div_ceil(128)).contains(&cut.parts), "{sizes:?} {cut:?}");
                    assert!(cut.partial(&sizes).bytes <= PARTS_BYTES, "{sizes:?} {cut:?}");
                    let [_, heads, sequences] = cut.joining_grid(&sizes);
                    assert!(heads * Split::JOINING_WARPS >= heads_q << cut.share(), "{sizes:?} {cut:?}");
                    assert!(heads.max(sequences) <= 65_535, "{sizes:?} {cut:?}");
                    many_queries += usize::from(cut.parts > 1 && len_q > 65_535);
                    assert!(!logits || cut.heads == 1);
                }
            }
        }
        assert!(many_queries > 0, "a call of more queries than a grid's second dimension has blocks");
    }

    #[test]
    fn a_section_holds_whole_groups_and_fits_the_cache() {
        let long = Schedule::whole(&sizes(1, 64, 8, 16_384, 128), Tile::TWO, PROCESSORS);
        assert!(long.pack_gqa && long.section.is_multiple_of(4) && long.section < long.units, "{long:?}");
        let short = Schedule::whole(&sizes(16, 64, 8, 1024, 128), Tile::TWO, PROCESSORS);
        assert!(short.section > long.section);
        let endless = Schedule::whole(&sizes(1, 8, 8, 1 << 20, 128), Tile::TWO, PROCESSORS);
        assert_eq!(endless.section, 1);
    }
}
