//! The statistics that an attention call leaves in device memory (`kernels/common/step_stats.cuh`), one row per layer.

use bytemuck::{Pod, Zeroable};

/// Logits of one query head, and its output. Every word only grows; zero means nothing was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LogitWords {
    /// [`ordered`] bits of the largest logit.
    pub max: u32,
    /// Complement of the [`ordered`] bits of the smallest.
    pub min: u32,
    /// Bits of the largest |output|.
    pub amax_o: u32,
    /// Logits past 448 of their descale.
    pub overflow: u32,
}

/// One head of q, k or v at its cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CastWords {
    /// Bits of the largest |x| before the scale.
    pub amax: u32,
    /// Values past 448 of their descale.
    pub overflow: u32,
    /// Of these, past 464.
    pub beyond_rounding: u32,
    /// NaN or infinite values.
    pub non_finite: u32,
}

/// One layer's row: `n_q` [`LogitWords`], then [`CastWords`] of q (`n_q`), k and v (`n_kv` each).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepWords {
    /// Logits and output, `n_q`.
    pub logits: Vec<LogitWords>,
    /// Queries, `n_q`.
    pub q: Vec<CastWords>,
    /// Keys, `n_kv`.
    pub k: Vec<CastWords>,
    /// Values, `n_kv`.
    pub v: Vec<CastWords>,
}

/// Words of a row.
pub fn stats_words(n_q: usize, n_kv: usize) -> usize {
    8 * (n_q + n_kv)
}

impl StepWords {
    /// Reads a row; `None` if it has not [`stats_words`] words.
    pub fn from_row(row: &[u32], n_q: usize, n_kv: usize) -> Option<Self> {
        if row.len() != stats_words(n_q, n_kv) {
            return None;
        }
        let (logits, casts) = row.split_at(4 * n_q);
        let cast = |w: &[u32]| CastWords { amax: w[0], overflow: w[1], beyond_rounding: w[2], non_finite: w[3] };
        let heads = |words: &[u32]| words.chunks_exact(4).map(cast).collect::<Vec<_>>();
        let (q, rest) = casts.split_at(4 * n_q);
        let (k, v) = rest.split_at(4 * n_kv);
        let logit = |w: &[u32]| LogitWords { max: w[0], min: w[1], amax_o: w[2], overflow: w[3] };
        let logits = logits.chunks_exact(4).map(logit).collect();
        Some(Self { logits, q: heads(q), k: heads(k), v: heads(v) })
    }

    /// As a row.
    pub fn to_row(&self) -> Vec<u32> {
        let mut row = bytemuck::cast_slice::<_, u32>(&self.logits).to_vec();
        for heads in [&self.q, &self.k, &self.v] {
            row.extend_from_slice(bytemuck::cast_slice(heads));
        }
        row
    }
}

/// Monotone map from floats to unsigned integers, never 0 for a number: -inf becomes 0x007fffff.
pub fn ordered(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits & 0x8000_0000 != 0 { !bits } else { bits | 0x8000_0000 }
}

/// The inverse of [`ordered`].
pub fn unordered(bits: u32) -> f32 {
    f32::from_bits(if bits & 0x8000_0000 != 0 { bits & 0x7fff_ffff } else { !bits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_floats_is_kept() {
        let rising = [f32::NEG_INFINITY, -3e38, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, f32::INFINITY];
        for pair in rising.windows(2) {
            assert!(ordered(pair[0]) < ordered(pair[1]), "{pair:?}");
        }
        for x in rising {
            assert_eq!(unordered(ordered(x)).to_bits(), x.to_bits());
        }
    }

    #[test]
    fn a_row_survives_the_way_to_the_device() {
        let (n_q, n_kv) = (6, 2);
        let row: Vec<u32> = (0..stats_words(n_q, n_kv) as u32).collect();
        let words = StepWords::from_row(&row, n_q, n_kv).unwrap();
        assert_eq!((words.logits.len(), words.q.len(), words.k.len(), words.v.len()), (6, 6, 2, 2));
        assert_eq!(words.k[0].amax, 48);
        assert_eq!(words.to_row(), row);
        assert!(StepWords::from_row(&row[1..], n_q, n_kv).is_none());
    }
}
