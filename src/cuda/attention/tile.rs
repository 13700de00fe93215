//! Which tiles a call is cut into: pure functions of its sizes.

use super::Sizes;

/// Tile of the attention kernel: keys a tile, consumer warpgroups (64 rows each), stages of the rings of keys and values.
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
const ROWS: usize = 64;
/// Bytes of keys and values that blocks running together should share in the L2 cache.
const SHARED_BYTES: usize = 24_000_000;

impl Tile {
    /// d = 128, where the registers of two consumers hold the logits of two tiles, and every call whose logits go through
    /// E4M3, whose registers three would spill.
    pub const TWO: Self = Self { keys: 128, consumers: 2, stages: 4 };
    /// d = 64.
    pub const THREE: Self = Self { keys: 128, consumers: 3, stages: 4 };

    /// The tile of a call. `logits_e4m3`: logits pass through E4M3.
    pub const fn of(d_head: usize, logits_e4m3: bool) -> Self {
        if d_head == 128 || logits_e4m3 { Self::TWO } else { Self::THREE }
    }
}

/// How the tiles of a call are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The consumers of a block take different heads of one group at the same rows, and share its keys.
    pub packed: bool,
    /// Blocks of rows a head.
    pub row_blocks: usize,
    /// Heads, or groups of `consumers` heads where packed, of the whole batch.
    pub units: usize,
    /// Units that run together, so that their keys and values stay in the L2 cache.
    pub section: usize,
    /// Thread blocks: each takes tiles until there are none.
    pub grid: usize,
}

impl Schedule {
    /// The schedule of a call on a device with that many multiprocessors.
    pub fn of(sizes: &Sizes, tile: Tile, processors: usize) -> Self {
        let group = sizes.heads_q / sizes.heads_kv;
        let packed = group.is_multiple_of(tile.consumers);
        let heads = if packed { tile.consumers } else { 1 };
        let rows = if packed { ROWS } else { ROWS * tile.consumers };
        let units = sizes.batch * sizes.heads_q / heads;
        let row_blocks = sizes.len_q.div_ceil(rows);
        let kv_heads = (SHARED_BYTES / (2 * sizes.len_k * sizes.d_head)).max(1);
        let section = (kv_heads * (group / heads).max(1)).clamp(1, units);
        Self { packed, row_blocks, units, section, grid: processors.min(units * row_blocks).max(1) }
    }

    /// Tiles of the call.
    pub fn tiles(&self) -> usize {
        self.units * self.row_blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(batch: usize, heads_q: usize, heads_kv: usize, len: usize, d_head: usize) -> Sizes {
        Sizes { batch, heads_q, heads_kv, len_q: len, len_k: len, d_head }
    }

    #[test]
    fn every_row_and_head_has_a_tile() {
        for d in [64, 128] {
            for (heads_q, heads_kv) in
                [(1, 1), (2, 1), (3, 1), (4, 2), (5, 5), (6, 1), (6, 2), (64, 8), (32, 32), (9, 3)]
            {
                for len in [1, 63, 64, 65, 128, 129, 1023, 5000, 70_000] {
                    for logits in [false, true] {
                        let sizes = sizes(3, heads_q, heads_kv, len, d);
                        let tile = Tile::of(d, logits);
                        let s = Schedule::of(&sizes, tile, 132);
                        let (heads, rows) = if s.packed { (tile.consumers, 64) } else { (1, 64 * tile.consumers) };
                        assert_eq!(s.units * heads, 3 * heads_q, "{sizes:?}");
                        assert!(s.row_blocks * rows >= len && (s.row_blocks - 1) * rows < len, "{sizes:?}");
                        assert!((heads_q / heads_kv).is_multiple_of(heads), "a block's heads share their keys");
                        assert!((1..=s.units).contains(&s.section));
                        assert!(s.grid >= 1 && s.grid <= 132 && s.grid <= s.tiles());
                    }
                }
            }
        }
    }

    #[test]
    fn logits_in_e4m3_take_the_tile_that_does_not_spill() {
        assert_eq!([64, 128].map(|d| Tile::of(d, true)), [Tile::TWO; 2]);
        assert_eq!([64, 128].map(|d| Tile::of(d, false)), [Tile::THREE, Tile::TWO]);
    }

    #[test]
    fn a_section_holds_whole_groups_and_fits_the_cache() {
        let long = Schedule::of(&sizes(1, 64, 8, 16_384, 128), Tile::TWO, 132);
        assert!(long.packed && long.section.is_multiple_of(4) && long.section < long.units, "{long:?}");
        let short = Schedule::of(&sizes(16, 64, 8, 1024, 128), Tile::TWO, 132);
        assert!(short.section > long.section);
        let endless = Schedule::of(&sizes(1, 8, 8, 1 << 20, 128), Tile::TWO, 132);
        assert_eq!(endless.section, 1);
    }
}
