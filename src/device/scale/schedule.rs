//! How launches of an engine are arranged, where that has no part in what they compute.

/// Ways to launch the same sums: results are equal bit for bit. All are off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// A plan of few heads of V is one chain of launches without a side stream, in which each starts before the one in front of it
    /// has ended; the pass over Q and K asks for its first weights beside the launches in front of it, and no fill clears the status.
    pub overlap: bool,
    /// Where there are fewer heads than blocks that run at a time, 2, 4 or 8 blocks share a head's statistics.
    pub split: bool,
    /// Fewer blocks a multiprocessor where the statistics' last round of blocks would otherwise leave many idle.
    pub even: bool,
    /// The statistics' copies bring 256 bytes of a row into the L2 cache, of which a tile takes 128.
    pub far: bool,
}

impl Schedule {
    /// All of them.
    pub const ALL: Self = Self { overlap: true, split: true, even: true, far: true };

    /// What kernels that overlap are compiled with.
    pub(super) fn variant(self) -> Vec<(&'static str, String)> {
        if self.overlap { vec![("OVERLAP", "1".to_owned())] } else { vec![] }
    }

    /// Blocks that share each of `heads` heads: as many as three blocks a multiprocessor allow.
    pub(super) fn sharing(self, heads: usize, processors: usize) -> usize {
        let fits = |&blocks: &usize| self.split && heads * blocks <= 3 * processors;
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// Blocks of one head each that a multiprocessor runs at a time, of at most `fit`; 0 for all of these. Blocks take about as long
    /// as each other, so they run in rounds, and a multiprocessor is given the next ones when its own have ended.
    pub(super) fn at_a_time(self, heads: usize, processors: usize, fit: usize) -> usize {
        // Blocks that the busiest multiprocessor runs one after another, each weighed by its share of the multiprocessor.
        let busiest = |at_a_time: usize| match heads.div_ceil(at_a_time * processors) {
            0 | 1 => heads.div_ceil(processors),
            rounds => rounds * at_a_time,
        };
        let fewest = (fit.div_ceil(2).max(1)..=fit).rev().min_by_key(|&n| busiest(n)).unwrap_or(fit);
        if self.even && 100 * busiest(fewest) < 95 * busiest(fit) { fewest } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_heads_are_shared_and_rounds_are_full() {
        // One layer of Llama-3 8B, its V alone, its 32 layers; V of 24 layers of Qwen2.5-0.5B.
        assert_eq!([48, 8, 1536, 48].map(|heads| Schedule::ALL.sharing(heads, 132)), [8, 8, 1, 8]);
        assert_eq!([99, 100, 198, 199].map(|heads| Schedule::ALL.sharing(heads, 132)), [4, 2, 2, 1]);
        // Qwen2.5-3B runs in 2 rounds of 3 blocks, not in 2 of 4; others are full as they are.
        let fit = [(720, 4), (448, 4), (768, 8), (1536, 4), (432, 8), (3600, 6), (1, 1)];
        assert_eq!(fit.map(|(heads, fit)| Schedule::ALL.at_a_time(heads, 132, fit)), [3, 0, 0, 0, 0, 4, 0]);
        let off = Schedule::default();
        assert_eq!((off.sharing(1, 132), off.at_a_time(720, 132, 4)), (1, 0));
    }
}
